"""Which rows of embedding tables a run has looked up, so that a checkpoint need not look for those that changed.

Source: Check-N-Run, section 5.1.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn

from ..codec.kinds import Kind
from ..codec.kinds import kinds as kinds_of
from ..kernels.errors import BadArgumentError
from ..kernels.mask import pack_mask

Optimizers: TypeAlias = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
Bits: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_MOST_PENDING = 8


class _Table:
    """The marks of one table: a flag a row since the last snapshot, packed bits (None: every row) for what was before.

    `pending[i]` are the rows between snapshots i - 1 and i, not yet known to be saved; `base` and `last` those before
    them, since the base and since the last checkpoint.
    """

    def __init__(self, name: str, weight: nn.Parameter) -> None:
        self.name = name
        self.weight = weight
        self.rows = int(weight.shape[0])
        self.recent = torch.zeros(self.rows, dtype=torch.bool, device=weight.device)
        self.flags = self.recent.numpy() if self.recent.is_cpu else None
        self.all_recent = False
        self.base: Bits | None = None
        self.last: Bits | None = None
        self.pending: list[Bits | None] = []
        self.never: int | None = None
        self.renormed = False

    def mark(self, ids: torch.Tensor) -> None:
        if self.flags is not None and ids.is_cpu and not torch.compiler.is_compiling():
            try:
                # A third of the time that torch takes for it.
                self.flags[ids.numpy()] = True
            except IndexError:  # ids that belong to no bag are not checked by EmbeddingBag
                self.forget()
            return
        if self.recent.device != ids.device:
            self.recent, self.flags = self.recent.to(ids.device), None
        flat = ids.reshape(-1)
        self.recent.index_fill_(0, flat if flat.dtype == torch.int64 else flat.long(), True)

    def since_snapshot(self) -> Bits | None:
        if self.all_recent:
            return None
        packed: Bits = pack_mask(self.recent).cpu().numpy()
        return packed

    def snapshot(self) -> None:
        self.pending.append(self.since_snapshot())
        self.recent.zero_()
        self.all_recent = False

    def forget(self) -> None:
        self.all_recent = True

    def settle(self, snapshot: int, base: bool) -> None:
        """Everything up to a snapshot is in a checkpoint."""
        covered = self._nothing()
        for bits in self.pending[: snapshot + 1]:
            covered = _either(covered, bits)
        self.base = self._nothing() if base else _either(self.base, covered)
        self.last = self._nothing()
        del self.pending[: snapshot + 1]

    def touched(self) -> tuple[Bits, Bits]:
        """Since the base and since the last checkpoint, as packed bits."""
        return self._since(self.base), self._since(self.last)

    def _since(self, bits: Bits | None) -> Bits:
        for more in (*self.pending, self.since_snapshot()):
            bits = _either(bits, more)
        if bits is None:
            bits = np.packbits(np.ones(self.rows, np.uint8), bitorder="little")
        if self.never is not None and not self.renormed:
            bits = bits.copy()
            bits[self.never // 8] &= np.uint8(255 - (1 << self.never % 8))
        return bits

    def _nothing(self) -> Bits | None:
        return np.zeros((self.rows + 7) // 8, np.uint8)


def _either(a: Bits | None, b: Bits | None) -> Bits | None:
    return None if a is None or b is None else a | b


class _Hook:
    """A hook that stays with its module: copies and pickles of the module have one that does nothing."""

    def __init__(self, table: _Table) -> None:
        self._table = table

    def __call__(self, *_: Any) -> None:
        self._table.forget()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_action, ()


class _LookUp(_Hook):
    """Marks the rows of a look-up."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        table, weight = self._table, module._parameters["weight"]
        # A replica (DataParallel) runs on another device and thread, with a weight of its own.
        if weight is None or weight is not table.weight or weight.shape[0] != table.rows:
            table.forget()
        elif (weight.requires_grad and torch.is_grad_enabled()) or table.renormed:
            table.mark(args[0] if args else kwargs["input"])


def _no_action() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    """Do nothing."""


class RowTracker:
    """Marks the rows of every `nn.Embedding` and `nn.EmbeddingBag` of a module that are looked up in a forward pass.

    Only look-ups that a gradient can follow count (or all, where `max_norm` changes rows as they are read). Until the
    first save, and after a `load_state_dict`, every row counts as touched.

    Marks say which rows changed only where nothing else changes any. A table is compared row by row instead of tracked
    (`untracked` says which and why) when it is also the weight of another layer, or when its optimizer moves rows
    without a gradient: momentum, weight decay, and every optimizer but `SGD`, `SparseAdam` and `Adagrad`. A row edited
    by hand needs `forget()`; a few unmarked rows are compared at each save all the same.

    Args:
        module: what is trained; its tables as they are now.
        optimizer: the optimizer, or `{name in the state: optimizer}`. None: you vouch that it only changes rows with a
            gradient, unless one is given to `kinds`.

    Raises:
        BadArgumentError: `module` is no module, or `optimizer` no optimizer.

    Example:
        >>> import shrinkpoint as sp
        >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 16, sparse=True))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with RowTracker(model, optimizer) as tracker:
        ...     base = sp.compress(model.state_dict(), cfg=sp.presets.check_n_run(), kinds=tracker.kinds())
        ...     tracker.saved(base=True)
        ...     _ = model(torch.tensor([7, 8, 7]))
        ...     tracker.shares()
        {'0.weight': (0.002, 0.002)}

    Source: Check-N-Run, section 5.1.1.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizers | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise BadArgumentError(f"module must be a torch.nn.Module, not {type(module).__qualname__}")
        self._module = module
        self._optimizers = _named(optimizer)
        self._tables: dict[int, _Table] = {}
        self._names: dict[str, _Table] = {}
        self._places: list[tuple[str, nn.Embedding | nn.EmbeddingBag, _Table]] = []
        self._elsewhere: dict[int, str] = {}
        self._untracked: dict[str, str] = {}
        self._pending: list[dict[str, Kind]] = []
        self._handles: list[Any] = []
        self._closed = False
        for prefix, sub in module.named_modules():
            for short, parameter in sub.named_parameters(recurse=False):
                name = f"{prefix}.{short}" if prefix else short
                if isinstance(sub, nn.Embedding | nn.EmbeddingBag) and short == "weight":
                    self._add(name, sub)
                else:
                    self._elsewhere.setdefault(id(parameter), name)
        for one in self._optimizers.values():
            hook = one.register_load_state_dict_post_hook(lambda _: self.forget())
            self._handles.append(hook)

    def _add(self, name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
        weight = module.weight
        if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
            self._untracked[name] = f"a {type(weight.data).__qualname__}, not a plain tensor"
            return
        table = self._tables.get(id(weight))
        if table is None:
            table = self._tables[id(weight)] = _Table(name, weight)
            table.never = module.padding_idx
        elif table.never != module.padding_idx:
            table.never = None
        table.renormed |= module.max_norm is not None
        self._names[name] = table
        self._places.append((name, module, table))

        self._handles.append(module.register_forward_hook(_LookUp(table), with_kwargs=True))
        loaded = module.register_load_state_dict_post_hook(_Hook(table))  # type: ignore[no-untyped-call]
        self._handles.append(loaded)

    @property
    def untracked(self) -> dict[str, str]:
        """Names of tables that are compared instead, and why; as of the last `kinds`."""
        return dict(self._untracked)

    def kinds(self, optimizer: Optimizers | None = None) -> dict[str, Kind]:
        """What `kinds(module, optimizer)` gives, with the rows touched until now; for a save of the state as it is now.

        Each call is the snapshot of one save: what is looked up afterwards belongs to the next. Take it together with
        the state, and call `saved` once that is committed.

        Args:
            optimizer: as in the constructor; None: that one.

        Raises:
            BadArgumentError: a table was resized since the tracker was made; the tracker is closed.
        """
        self._check_open()
        optimizers = self._optimizers if optimizer is None else _named(optimizer)
        self._check_tables()
        table = self._kinds(optimizers)
        # Beyond a few saves that nobody reported, rows go to the snapshot after: they are stored once more, not lost.
        if len(self._pending) < _MOST_PENDING:
            for one in self._tables.values():
                one.snapshot()
            self._pending.append(table)
        return table

    def _kinds(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> dict[str, Kind]:
        found = kinds_of(self._module)
        entries = dict(_entries(self._module, optimizers))
        found.update((path, kind) for path, (kind, _) in entries.items())
        reasons = {id(t): self._reason(t, optimizers) for t in self._tables.values()}
        for name, one in self._names.items():
            self._untracked.pop(name, None)
            reason = reasons[id(one)]
            if reason:
                self._untracked[name] = reason
        touched = {id(t): t.touched() for t in self._tables.values() if not reasons[id(t)]}
        for path, kind in found.items():
            owner = self._names.get(kind.parameter or "")
            value = entries[path][1] if path in entries else None
            if owner is None or id(owner) not in touched or (value is not None and _rows(value) != owner.rows):
                continue
            base, last = touched[id(owner)]
            found[path] = dataclasses.replace(kind, rows=last, rows_since_base=base)
        return found

    def _reason(self, table: _Table, optimizers: Mapping[str, torch.optim.Optimizer]) -> str:
        """Why other rows than those looked up may change, or ""."""
        if id(table.weight) in self._elsewhere:
            return f"also the parameter {self._elsewhere[id(table.weight)]}"
        if not optimizers or not table.weight.requires_grad:
            return ""
        groups = [
            (one, group)
            for one in optimizers.values()
            for group in one.param_groups
            if any(parameter is table.weight for parameter in group["params"])
        ]
        if not groups:
            return "in none of the optimizers"
        return next((why for one, group in groups if (why := _moves_other_rows(one, group))), "")

    def saved(self, base: bool, *, kinds: Mapping[str, Kind] | None = None) -> None:
        """The state of a snapshot is committed: rows touched before it are in the checkpoint.

        Args:
            base: whether it was stored as a base (`not Saved.is_delta`).
            kinds: what `kinds` returned for it. None: the oldest snapshot not yet reported, which is the right one when
                saves are reported one by one, and loses nothing when some were not.

        Raises:
            BadArgumentError: there was no snapshot; the tracker is closed.
        """
        self._check_open()
        if not self._pending:
            raise BadArgumentError("saved: no snapshot was taken since the last one; call kinds() for each save")
        at = 0 if kinds is None else next((i for i, k in enumerate(self._pending) if k is kinds), None)
        if at is None:
            return
        for table in self._tables.values():
            table.settle(at, base)
        del self._pending[: at + 1]

    def forget(self) -> None:
        """Every row may have changed (edited by hand, loaded from elsewhere): the next save compares them all."""
        for table in self._tables.values():
            table.forget()

    def shares(self) -> dict[str, tuple[float, float]]:
        """For each table, the shares of its rows touched since the base and since the last checkpoint."""
        self._check_open()
        table = {}
        for name, one in self._names.items():
            base, last = (int(np.bitwise_count(bits).sum()) / max(1, one.rows) for bits in one.touched())
            table[name] = (base, last)
        return table

    def close(self) -> None:
        """Take the hooks off the module again; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._closed = True

    def __enter__(self) -> RowTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RowTracker of {', '.join(self._names) or 'no tables'}>"

    def _check_open(self) -> None:
        if self._closed:
            raise BadArgumentError("the tracker is closed")

    def _check_tables(self) -> None:
        """Refuse tables of another size; of those that are another parameter now, every row may have changed."""
        for name, module, table in self._places:
            rows = int(module.weight.shape[0])
            if rows != table.rows:
                raise BadArgumentError(
                    f"{name}: the table was resized from {table.rows} to {rows} rows; "
                    "close this tracker and make another"
                )
            if module.weight is not table.weight:
                table.forget()
        for _, module, table in self._places:
            if module.weight is not table.weight:
                del self._tables[id(table.weight)]
                table.weight = cast("nn.Parameter", module.weight)
                self._tables[id(table.weight)] = table


def _named(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by the name of their place in the state; "" for a single one, wherever it is."""
    if optimizer is None:
        return {}
    named = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    for name, one in named.items():
        if not isinstance(name, str) or not isinstance(one, torch.optim.Optimizer):
            raise BadArgumentError(f"optimizer: {name!r}: a {type(one).__qualname__} is no torch.optim.Optimizer")
    return named


def _entries(
    module: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
) -> Iterator[tuple[str, tuple[Kind, Any]]]:
    """Kind and value of each optimizer entry, by the tail of its path."""
    weights = set(kinds_of(module))
    for place, one in optimizers.items():
        numbers = [p for group in one.param_groups for p in group["params"]]
        by_name = dict(module.named_parameters())
        for path, kind in kinds_of(module, one).items():
            if path in weights:
                continue
            owner, _, entry = path.removeprefix("state/").rpartition("/")
            parameter = numbers[int(owner)] if owner.isdigit() else by_name[owner]
            yield (f"{place}/{path}" if place else path), (kind, one.state[parameter][entry])


def _rows(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim else 0


def _moves_other_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Why an optimizer changes rows whose gradient is zero, or ""."""
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        return f"{name} may move rows that have no gradient"
    for setting in ("momentum", "weight_decay"):
        if group.get(setting):
            return f"{name} with {setting} {group[setting]} moves rows that have no gradient"
    return ""
