"""`Config`: rules that give each array a codec, targets, a rate, and when to take a base."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Never

from ..kernels.backend.arguments import check_field, choice, flag, instance, integer, number, or_none, strings
from ..kernels.backend.floats import FORMATS
from .base import Codec
from .display import html_fields
from .embeddings.rows import Rows
from .errors import BadArgumentError, ShrinkpointWarning
from .evidence.gather import Evidence
from .evidence.kind import LAYERS, ROLES, Kind
from .lossless.exact import Exact
from .moments.clusters import Clusters
from .moments.firstmoment import FirstMoment
from .moments.logbuckets import LogBuckets
from .moments.secondmoment import SecondMoment
from .registry import CODECS as CODECS
from .registry import from_json, to_json
from .state.leaves import LeafSpec
from .weights.quantize import Quantize


class UnmatchedRuleWarning(ShrinkpointWarning):
    """A rule matches no array of a state."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A codec for the arrays that match a kind or a shell glob over the path.

    Args:
        match: a kind (a layer type or role: "norm", "embedding", "first moment") or a glob. In a glob, `*` also matches
            `/`: `optimizer/*` is everything in the optimizer.
        codec: what encodes these arrays.
        dtypes: the only dtypes that the rule is for ("float32"); None (default): all.
    """

    match: str
    codec: Codec
    dtypes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str) or not self.match:
            raise BadArgumentError(f"a rule's pattern must be a non-empty string, not {self.match!r}")
        name = str(getattr(type(self.codec), "id", ""))
        if name not in CODECS or CODECS[name] is not type(self.codec):
            raise BadArgumentError(f"rule {self.match!r}: {self.codec!r} is not a codec{_nearest_codec(self.codec)}")
        if self.dtypes is not None:
            named = strings(f"rule {self.match!r}: dtypes", self.dtypes)
            if not named:
                raise BadArgumentError(f"rule {self.match!r} is for no dtype; None is for all")
            for name in named:
                choice(f"rule {self.match!r}: a dtype", name, FORMATS)
            object.__setattr__(self, "dtypes", named)

    def matches(self, path: str, spec: LeafSpec, kind: Kind) -> bool:
        """Return whether the rule applies to this array."""
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            return False
        if self.match in ROLES:
            return kind.role == self.match
        if self.match in LAYERS:
            return kind.layer == self.match and kind.role == "weight"
        return fnmatch.fnmatchcase(path, self.match)


@dataclass(frozen=True, slots=True)
class ChainPolicy:
    """Policy that decides when `Store` saves a base, and which parent a delta has.

    Args:
        base_every: number of checkpoints from one base to the next, 1 (only bases) or more; default 20. None: no limit.
        against: "previous" (linear chain) or "base".
        predictor: "size": save a base when the next checkpoints are predicted to be no larger in total with a new base
            than as further deltas (Check-N-Run, section 5.1). None: no prediction.
        max_restore_cost: save a base when restoring would otherwise decode more than this multiple of a base's bytes,
            in [1, 1e6]. Every delta of the chain costs at most 1: its quantized and exact arrays are decoded, its
            moments are not. None: no limit.
        only_smaller: save a base if a delta would be less than 1 % smaller, as after a jump; default True.
    """

    base_every: int | None = 20
    against: str = "previous"
    predictor: str | None = None
    max_restore_cost: float | None = None
    only_smaller: bool = True

    def __post_init__(self) -> None:
        check_field(self, "base_every", or_none, integer, 1)
        check_field(self, "against", choice, ("previous", "base"))
        check_field(self, "predictor", or_none, choice, ("size",))
        check_field(self, "max_restore_cost", or_none, number, 1, 1e6)
        check_field(self, "only_smaller", flag)


def is_lossless(codec: Codec) -> bool:
    """Return whether a codec keeps every bit of any array."""
    return isinstance(codec, Exact) or (isinstance(codec, Rows) and codec.lossless)


_EXACT = Exact()
_WEIGHTS = Quantize()
_FIRST = FirstMoment()
_SECOND = SecondMoment()


@dataclass(frozen=True, slots=True)
class Config:
    """Configuration of `compress`: a codec for each array, error targets, and chain policy.

    `Config()` rounds weights to 64 bins (an error of about 2 %), first moments to steps of half an update, and second
    moments to steps of a factor of 1.4. It promises what the worst family of `docs/choosing.md` shows.

    Args:
        rules: `Rule`s or `(pattern or kind, codec)` pairs in order; the first that matches decides. A pattern
            that names an array by its path also says what the array is; a rule by kind, and the default, need other
            evidence (`docs/lossy-or-exact.md`). Norms, biases, integers and small arrays are exact under all rules.
        max_rel_error: relative L2 error that no array may exceed, in (0, 1). It picks step, protected share and lambda
            of each array; an array that 254 bins do not bring there is stored exactly, with a note in the summary.
            None: as the rules say.
        rate: lambda of the rate-distortion encoder, in units of the weights' variance per bit, >= 0; 0 means every
            weight gets its nearest level or, under an error target, the lambda that this leaves room for, which is
            also what bounds a rate. Where the state holds second moments v, errors and variance are weighted by sqrt(v)
            and one slope holds for all arrays; where it holds none and there are gradients, by their magnitude. It
            acts on weights alone; moments are as their codecs say.
        chain: when `Store` takes a base.
        ahead: whether `Store` extrapolates weights by their drift (`compress(earlier=)`). Trainings that are restored
            then lose less, and the restored model is a little worse right away (docs/advanced.md). None (default): if
            there is a rate. Not in chains against the base.

    Example:
        >>> cfg = Config(rules=[("embedding", Exact()), ("*/exp_avg", LogBuckets(alpha=0.1))])
        >>> Config.from_json(cfg.to_json()) == cfg
        True
    """

    rules: tuple[Rule, ...] = ()
    max_rel_error: float | None = None
    rate: float = 0.0
    chain: ChainPolicy = ChainPolicy()
    ahead: bool | None = None

    def __init__(
        self,
        rules: Iterable[Rule | tuple[str, Codec]] = (),
        *,
        max_rel_error: float | None = None,
        rate: float = 0.0,
        chain: ChainPolicy | None = None,
        ahead: bool | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise BadArgumentError(_advice(*unknown))
        try:
            made = tuple(r if isinstance(r, Rule) else Rule(*r) for r in rules)
        except TypeError:
            raise BadArgumentError("rules must be Rules or (pattern, codec) pairs") from None
        chain = ChainPolicy() if chain is None else instance("chain", chain, ChainPolicy)
        values = (made, max_rel_error, rate, chain, ahead)
        for name, value in zip(("rules", "max_rel_error", "rate", "chain", "ahead"), values, strict=True):
            object.__setattr__(self, name, value)
        check_field(self, "max_rel_error", or_none, number, 0, 1, open_low=True, open_high=True)
        check_field(self, "rate", number, 0, 1e6)
        check_field(self, "ahead", or_none, flag)
        if ahead and chain.against == "base":
            raise BadArgumentError(
                "ahead is True and chain.against 'base'; it must be 'previous', or ahead None or False"
            )

    def codec_for(self, path: str, spec: LeafSpec, evidence: Evidence) -> tuple[Codec, str]:
        """Return the codec for one array, and why it is this one.

        A rule that names the array by its path is evidence itself; a rule by kind, and the default, need some.
        """
        rule = next((r for r in self.rules if r.matches(path, spec, evidence.kind)), None)
        if rule is not None and (is_lossless(rule.codec) or not evidence.is_bound):
            return rule.codec, f"rule {rule.match!r}"
        if not evidence.may_be_lossy:
            return _EXACT, evidence.why
        role = evidence.kind.role
        return _WEIGHTS if role == "weight" else _FIRST if role == "first moment" else _SECOND, evidence.why

    def for_restores(self, restores: int) -> Config:
        """Return the configuration of a run that has resumed from a checkpoint `restores` times.

        A codec with an estimate of that number (`Rows`) uses a finer width once the estimate is exceeded.

        Args:
            restores: how often so far, 0 or more.

        Raises:
            BadArgumentError: `restores` is out of range.

        Example:
            >>> cfg = Config([("embedding", Rows("auto", expected_restores=1))])
            >>> [cfg.for_restores(n).rules[0].codec.width for n in (0, 1, 2)]
            [2, 2, 8]

        Source: Check-N-Run, section 6.2.1.
        """
        restores = integer("restores", restores, 0)
        rules = tuple(
            replace(r, codec=r.codec.for_restores(restores)) if hasattr(r.codec, "for_restores") else r
            for r in self.rules
        )
        return replace(self, rules=rules)

    def _repr_html_(self) -> str:
        cells = {rule.match: repr(rule.codec) for rule in self.rules} or {"rules": "none: the default of each kind"}
        cells |= {"max_rel_error": str(self.max_rel_error), "rate": f"{self.rate:g}", "chain": repr(self.chain)}
        return html_fields("Config", cells)

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain JSON."""
        return {
            "rules": [[r.match, to_json(r.codec), *([] if r.dtypes is None else [list(r.dtypes)])] for r in self.rules],
            "max_rel_error": self.max_rel_error,
            "rate": self.rate,
            "chain": asdict(self.chain),
            "ahead": self.ahead,
        }

    @staticmethod
    def from_json(data: Any) -> Config:
        """Return the Config that `to_json` described; raise BadArgumentError for other values."""
        try:
            if set(data) != {"rules", "max_rel_error", "rate", "chain", "ahead"}:
                raise BadArgumentError(f"no configuration: its fields are {sorted(map(str, data))}")
            return Config(
                [Rule(match, from_json(CODECS, codec), *dtypes) for match, codec, *dtypes in data["rules"]],
                max_rel_error=data["max_rel_error"],
                rate=data["rate"],
                chain=ChainPolicy(**data["chain"]),
                ahead=data["ahead"],
            )
        except (TypeError, KeyError, ValueError) as e:
            if isinstance(e, BadArgumentError):
                raise
            raise BadArgumentError(f"no configuration: {e}") from None


_RULE_OF = {
    Quantize: "weight",
    FirstMoment: "first moment",
    SecondMoment: "second moment",
    LogBuckets: "second moment",
    Clusters: "second moment",
    Rows: "embedding",
}
"""A kind of arrays for which each codec with parameters is meant."""


def _advice(name: str, *_: str) -> str:
    """Return the message for an unknown argument, with the codec that has it or a similar one."""
    own = ("rules", "max_rel_error", "rate", "chain", "ahead")
    owners = {field.name: kind for kind in reversed(_RULE_OF) for field in fields(kind) if field.name not in own}
    meant = next(iter(difflib.get_close_matches(name, (*own, *owners), 1, 0.7)), "")
    if meant not in owners:
        hint = f"did you mean {meant!r}?" if meant else f"its arguments are {', '.join(own[:-1])} and {own[-1]}"
        return f"Config has no argument {name!r}; {hint}"
    codec, rule = owners[meant].__name__, _RULE_OF[owners[meant]]
    return f"Config has no argument {name!r}; {codec} has: Config([({rule!r}, {codec}({meant}=...))])"


def _nearest_codec(given: object) -> str:
    """Return a hint for a value that is not a codec but has the name of one, or a similar name."""
    if isinstance(given, type):
        return f"; write {given.__name__}()" if given in CODECS.values() else ""
    names = {name.lower(): kind.__name__ for kind in CODECS.values() for name in (kind.id, kind.__name__)}
    near = difflib.get_close_matches(given.lower(), names, 1) if isinstance(given, str) else []
    return f"; did you mean {names[near[0]]}()?" if near else ""
