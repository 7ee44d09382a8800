"""The rows of embedding tables that a run has touched since a checkpoint.

Rows are marked in the forward pass, as in the paper. That misses rows that change without a look-up through the module:
rows of other processes in a reduced gradient, gradients kept from step to step or over a save, tables read without
their module. So gradients are read, too, before the optimizer's step: with several processes at every step; otherwise
at the first step after each save and then from time to time, because a dense gradient must be read completely. If a
row is found that was not looked up, gradients are read at every step from then on.

Source: Check-N-Run, section 5.1.1.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..codec.evidence.kind import Kind
from ..codec.evidence.module import canonical_name
from ..codec.evidence.module import kinds as kinds_of
from ..kernels.errors import BadArgumentError
from ..kernels.packing import pack_mask
from .optimizer_hooks import Nesting, closure_of, remove, weak
from .processes import world

if TYPE_CHECKING:
    from ..store.saver.saver import SaveResult
    from ..store.session import Saved

Optimizers: TypeAlias = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | Sequence[torch.optim.Optimizer]
Named: TypeAlias = Sequence[tuple[str, torch.optim.Optimizer]]
Bits: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_MOST_PENDING = 8
_EVERY = 64
"""Steps from one reading of the gradients of a single process to the next, the first one after a snapshot."""


class _Table:
    """Marks of one table: a flag for each row, now and since earlier snapshots.

    `pending[i]` are the rows between snapshots i - 1 and i, not yet known to be saved; `base` and `last` those before
    them, since the base and since the last checkpoint. `recent` are rows looked up, `moved` rows seen in gradients.
    """

    def __init__(self, name: str, weight: nn.Parameter, snapshots: int = 0) -> None:
        self.name = name
        self.weight = weight
        self.rows = int(weight.shape[0])
        self.recent = torch.zeros(self.rows, dtype=torch.bool, device=weight.device)
        self.flags = self.recent.numpy() if self.recent.is_cpu else None
        self.moved: torch.Tensor | None = None
        self.moved_flags: Any = None
        self.all_recent = True
        self.base: Bits | None = None
        self.last: Bits | None = None
        self.pending: list[Bits | None] = [None] * snapshots
        self.padding_row: int | None = None
        self.renormed = False
        self.stepped = False
        self.steps = 0
        self.is_bypassed = False

    def mark(self, ids: torch.Tensor) -> None:
        if self.flags is not None and ids.is_cpu and not torch.compiler.is_compiling():
            try:
                # This takes a third of the time of indexing in torch.
                self.flags[ids.numpy()] = True
            except IndexError:  # ids that belong to no bag are not checked by EmbeddingBag
                self.forget()
            return
        if self.recent.device != ids.device:
            self.recent, self.flags = self.recent.to(ids.device), None
        flat = ids.reshape(-1)
        self.recent.index_fill_(0, flat if flat.dtype == torch.int64 else flat.long(), True)

    def read(self, everywhere: bool) -> None:
        """Mark the rows of the present gradient.

        Args:
            everywhere: at every step, instead of now and again.
        """
        gradient = self.weight.grad
        if gradient is None or self.all_recent:
            return
        if gradient.shape[0] != self.rows:
            self.forget()
            return
        look = everywhere or self.is_bypassed
        if look and gradient.is_sparse:
            self._mark_moved(gradient._indices()[0])
        elif look or self.steps % _EVERY == 0:
            rows = self._rows_of(gradient._indices()[0]) if gradient.is_sparse else _with_gradient(gradient)
            if not look and self._unknown(rows):
                # Code that looked up these rows bypassed the hook, and may have done so before.
                self.is_bypassed = True
                self.forget()
            self._add_moved(rows)
        self.steps += 1

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.rows, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)

    def _unknown(self, rows: torch.Tensor) -> bool:
        """Return whether some of these rows are not marked."""
        unknown = rows & ~self.recent.to(rows.device)
        if self.padding_row is not None:
            unknown[self.padding_row] = rows[self.padding_row]
        if self.moved is not None:
            unknown &= ~self.moved.to(rows.device)
        return bool(unknown.any())

    def _mark_moved(self, ids: torch.Tensor) -> None:
        if self.moved_flags is None or not ids.is_cpu:
            self._add_moved(self._rows_of(ids))
        else:
            self.moved_flags[ids.numpy()] = True

    def _add_moved(self, rows: torch.Tensor) -> None:
        self.moved = rows if self.moved is None else self.moved.to(rows.device) | rows
        self.moved_flags = self.moved.numpy() if self.moved.is_cpu else None

    def since_snapshot(self) -> Bits | None:
        if self.all_recent:
            return None
        marks = self.recent
        if self.padding_row is not None and not self.renormed:
            # Looked up, but not trained.
            marks = marks.clone()
            marks[self.padding_row] = False
        if self.moved is not None:
            marks = marks | self.moved.to(marks.device)
        packed: Bits = pack_mask(marks).cpu().numpy()
        return packed

    def snapshot(self) -> None:
        self.pending.append(self.since_snapshot())
        self.recent.zero_()
        self.moved = self.moved_flags = None
        self.all_recent, self.steps = False, 0
        # Rows that have a gradient now move at the next step, even without another look-up.
        gradient = self.weight.grad
        if gradient is None:
            return
        if gradient.shape[0] != self.rows:
            self.forget()
        elif gradient.is_sparse:
            self._mark_moved(gradient._indices()[0])
        else:
            self._add_moved(_with_gradient(gradient))

    def forget(self) -> None:
        self.all_recent = True

    def settle(self, snapshot: int, base: bool) -> None:
        """Record that all marks up to a snapshot are in a checkpoint."""
        covered = self._no_rows()
        for bits in self.pending[: snapshot + 1]:
            covered = _union(covered, bits)
        self.base = self._no_rows() if base else _union(self.base, covered)
        self.last = self._no_rows()
        del self.pending[: snapshot + 1]

    def touched(self) -> tuple[Bits, Bits]:
        """Return the rows touched since the base and since the last checkpoint, as packed bits."""
        return self._since(self.base), self._since(self.last)

    def _since(self, bits: Bits | None) -> Bits:
        for more in (*self.pending, self.since_snapshot()):
            bits = _union(bits, more)
        return np.packbits(np.ones(self.rows, np.uint8), bitorder="little") if bits is None else bits

    def _no_rows(self) -> Bits | None:
        return np.zeros((self.rows + 7) // 8, np.uint8)


def _union(a: Bits | None, b: Bits | None) -> Bits | None:
    return None if a is None or b is None else a | b


@torch.no_grad()
def _with_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return bool [R]: rows of a dense gradient that are not zero; NaN counts as not zero."""
    flat = gradient.reshape(gradient.shape[0], -1)
    if not flat.shape[1]:
        return torch.zeros(flat.shape[0], dtype=torch.bool, device=flat.device)
    # Both together are a fifth of the time that `any` takes, and no copy of the table.
    return (flat.amax(1) != 0) | (flat.amin(1) != 0)


class _Hook:
    """Hook whose copies and pickles do nothing."""

    def __init__(self, table: _Table) -> None:
        self._table = table

    def __call__(self, *_: Any) -> None:
        self._table.forget()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_action, ()


class _LookUp(_Hook):
    """Hook that marks the rows of a look-up."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        table, weight = self._table, module._parameters["weight"]
        # A replica (DataParallel) runs on another device and thread, with a weight of its own.
        if weight is None or weight is not table.weight or weight.shape[0] != table.rows:
            table.forget()
        elif (weight.requires_grad and torch.is_grad_enabled()) or table.renormed:
            table.mark(args[0] if args else kwargs["input"])


class _Accumulated(_Hook):
    """Mark rows after a backward pass, for loops without an optimizer of torch."""

    def __call__(self, *_: Any) -> None:
        if self._table.stepped:
            return
        if world() > 1:
            # What other processes add comes after this.
            self._table.forget()
        else:
            self._table.read(everywhere=False)


def _no_action() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    """Do nothing."""


class RowTracker:
    """Tracker of the embedding rows that training changes.

    These are the rows looked up in a forward pass with gradients (or in any forward pass if `max_norm` changes rows as
    they are read), and all rows with a gradient when the optimizer steps, for example from other processes, an earlier
    batch, or a look-up without the module. (Dense gradients of a single process are read at the first step after a save
    and at every 64th step, because that reads the whole table; at every step once such a row was found.)

    Until the first save, and after a `load_state_dict`, every row counts as touched. A table that replaces another one
    of the same size is tracked from the next `kinds` on, with all rows touched.

    A table is compared row by row without marks if it is also the weight of another layer, or if its optimizer moves
    rows without a gradient: with momentum or weight decay, and every optimizer except `SGD`, `SparseAdam` and
    `Adagrad`. `untracked` names these tables and the reasons. After direct edits of rows call `forget()`. Marks are
    checked: a changed row without a mark is stored, too, and the summary's note counts such rows.

    Args:
        module: the module that is trained.
        optimizer: the optimizer, `{name in the state: optimizer}`, or several whose entries are in one place of the
            state by the parameters' names, as in the state of `trainers.save`. None: the optimizer is assumed to
            change only rows with a gradient, unless it is given to `kinds`.

    Raises:
        BadArgumentError: `module` is not a module, or `optimizer` not an optimizer.

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
        self._found: list[tuple[str, nn.Module, Any]] = []
        self._elsewhere: dict[int, str] = {}
        self._untracked: dict[str, str] = {}
        self._pending: list[dict[str, Kind]] = []
        self._waiting: list[tuple[Future[SaveResult], Mapping[str, Kind]]] = []
        self._own: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[tuple[int, int], list[_Table]]]
        self._own = weakref.WeakKeyDictionary()
        self._nesting = Nesting()
        self._handles: list[Any] = []
        self._closed = False
        self._register()
        # Weak references, so that a tracker without other references is freed and its hooks are removed.
        before, after, loaded = (weak(m) for m in (self._before_step, self._after_step, self._loaded))
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        handles += [one.register_load_state_dict_post_hook(loaded) for _, one in self._optimizers]
        self._unhook = weakref.finalize(self, remove, handles)

    def _look(self) -> list[tuple[str, nn.Module, Any]]:
        """Return the module's present tables, and note parameters that are used elsewhere too."""
        found: list[tuple[str, nn.Module, Any]] = []
        self._elsewhere = {}
        for prefix, sub in self._module.named_modules():
            for short, parameter in sub.named_parameters(recurse=False):
                name = canonical_name(self._module, f"{prefix}.{short}".lstrip("."))
                if isinstance(sub, nn.Embedding | nn.EmbeddingBag) and short == "weight":
                    found.append((name, sub, parameter))
                else:
                    self._elsewhere.setdefault(id(parameter), name)
        return found

    def _register(self) -> None:
        """Track the present tables; known parameters keep their marks."""
        known, self._tables = self._tables, {}
        remove(self._handles)
        self._names, self._handles, self._untracked = {}, [], {}
        self._own.clear()
        self._found = self._look()
        for name, module, weight in self._found:
            self._add(name, module, weight, known)

    def _add(self, name: str, module: Any, weight: Any, known: Mapping[int, _Table]) -> None:
        if type(weight) is not nn.Parameter or type(weight.data) is not torch.Tensor:
            self._untracked[name] = f"a {type(weight.data).__qualname__}, not a plain tensor"
            return
        table = self._tables.get(id(weight))
        if table is None:
            table = known.get(id(weight)) or _Table(name, weight, len(self._pending))
            self._tables[id(weight)] = table
            table.padding_row, table.renormed = module.padding_idx, False
            if not self._optimizers and weight.requires_grad:
                accumulated: Any = _Accumulated(table)
                self._handles.append(weight.register_post_accumulate_grad_hook(accumulated))  # type: ignore[no-untyped-call]
        elif table.padding_row != module.padding_idx:
            table.padding_row = None
        table.renormed |= module.max_norm is not None
        self._names[name] = table
        self._handles.append(module.register_forward_hook(_LookUp(table), with_kwargs=True))
        self._handles.append(module.register_load_state_dict_post_hook(_Hook(table)))

    # ------------------------------------------------------------------ hooks of optimizers

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Mark rows before an optimizer's step, when gradients are complete."""
        tables = self._tables_of(optimizer)
        own = self._nesting.enter(tables, frozenset(map(id, tables))) if tables else ()
        if closure_of(args, kwargs) is None:
            self._read(own)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Mark rows after an optimizer's step if a closure made the gradients within it."""
        tables = self._tables_of(optimizer)
        own = self._nesting.leave(tables) if tables else ()
        if closure_of(args, kwargs) is not None:
            self._read(own)

    def _tables_of(self, optimizer: torch.optim.Optimizer) -> list[_Table]:
        # Their parameters too: a group that is there already may be given more.
        state = len(optimizer.param_groups), sum(len(group["params"]) for group in optimizer.param_groups)
        found = self._own.get(optimizer)
        if found is None or found[0] != state:
            parameters = [id(p) for group in optimizer.param_groups for p in group["params"]]
            found = state, [self._tables[one] for one in dict.fromkeys(parameters) if one in self._tables]
            self._own[optimizer] = found
        return found[1]

    def _read(self, tables: Sequence[_Table]) -> None:
        """Mark the rows with gradients, once for a step within another."""
        everywhere = world() > 1 if tables else False
        for table in tables:
            table.stepped = True
            table.read(everywhere)

    def _loaded(self, _: Any) -> None:
        self.forget()

    @property
    def module(self) -> nn.Module:
        """The tracked module."""
        return self._module

    @property
    def untracked(self) -> dict[str, str]:
        """Names of tables that are compared instead, and the reasons, as of the last `kinds`."""
        return dict(self._untracked)

    def kinds(self, optimizer: Optimizers | None = None) -> dict[str, Kind]:
        """Return `kinds(module, optimizer)` with the rows touched until now.

        Each call is the snapshot of one save: rows touched afterwards belong to the next, and so do rows that have
        a gradient now, since a step may follow. Take it together with the state, and call `saved` once that is
        committed, or `follow` with what the save returned.

        Args:
            optimizer: as in the constructor; None: that one.

        Raises:
            BadArgumentError: a table was resized, or replaced by one of another size, since the tracker was made; the
                tracker is closed.
        """
        self._check_open()
        optimizers = self._optimizers if optimizer is None else _named(optimizer)
        self._check_tables()
        self._settle_done()
        table = self._kinds(optimizers)
        # After a few unreported saves, rows are counted to the next snapshot: they are stored once more, not lost.
        if len(self._pending) < _MOST_PENDING:
            for one in self._tables.values():
                one.snapshot()
            self._pending.append(table)
        return table

    def _kinds(self, optimizers: Named) -> dict[str, Kind]:
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

    def _reason(self, table: _Table, optimizers: Named) -> str:
        """Return why other rows than those looked up may change, or ""."""
        if id(table.weight) in self._elsewhere:
            return f"also the parameter {self._elsewhere[id(table.weight)]}"
        if not optimizers or not table.weight.requires_grad:
            return ""
        groups = [
            (one, group)
            for _, one in optimizers
            for group in one.param_groups
            if any(parameter is table.weight for parameter in group["params"])
        ]
        if not groups:
            return "in none of the optimizers"
        return next((why for one, group in groups if (why := _moves_other_rows(one, group))), "")

    def saved(self, base: bool, *, kinds: Mapping[str, Kind] | None = None) -> None:
        """Record that the state of a snapshot is committed, with all rows touched before it.

        Args:
            base: whether it was stored as a base (`not Saved.is_delta`).
            kinds: result of `kinds` for this save. None: the oldest snapshot not yet reported, which is right if all
                saves are reported in order, and safe if some were not.

        Raises:
            BadArgumentError: there was no snapshot; the tracker is closed.
        """
        self._check_snapshot("saved")
        at = 0 if kinds is None else next((i for i, k in enumerate(self._pending) if k is kinds), None)
        if at is None:
            return
        for table in self._tables.values():
            table.settle(at, base)
        del self._pending[: at + 1]

    def follow(self, save: Saved | Future[SaveResult], *, kinds: Mapping[str, Kind] | None = None) -> None:
        """Call `saved` when the result of a save is known.

        After a save that failed, or was skipped or cancelled, its rows stay marked for the next save.

        Args:
            save: what `Store.save` or `Saver.save` returned.
            kinds: result of `kinds` for this save. None: the newest snapshot.

        Raises:
            BadArgumentError: there was no snapshot; the tracker is closed.
        """
        self._check_snapshot("follow")
        taken = self._pending[-1] if kinds is None else kinds
        if isinstance(save, Future):
            self._waiting.append((save, taken))
            self._settle_done()
        else:
            self.saved(not save.is_delta, kinds=taken)

    def _settle_done(self) -> None:
        """Record the background saves that have ended."""
        done = [pair for pair in self._waiting if pair[0].done()]
        self._waiting = [pair for pair in self._waiting if not pair[0].done()]
        for future, taken in done:
            failed = future.cancelled() or future.exception() is not None or future.result().status != "saved"
            if not failed and any(taken is one for one in self._pending):
                self.saved(not future.result().is_delta, kinds=taken)

    def forget(self) -> None:
        """Forget the marks: the next save compares all rows."""
        for table in self._tables.values():
            table.forget()

    def shares(self) -> dict[str, tuple[float, float]]:
        """Return the shares of rows touched since the base and the last checkpoint."""
        self._check_open()
        self._settle_done()
        table = {}
        for name, one in self._names.items():
            base, last = (int(np.bitwise_count(bits).sum()) / max(1, one.rows) for bits in one.touched())
            table[name] = (base, last)
        return table

    def close(self) -> None:
        """Remove the hooks from the module; may be called twice."""
        remove(self._handles)
        self._handles = []
        self._unhook()
        self._nesting.clear()
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

    def _check_snapshot(self, call: str) -> None:
        self._check_open()
        if not self._pending:
            raise BadArgumentError(f"{call}: no snapshot was taken since the last one; call kinds() for each save")

    def _check_tables(self) -> None:
        """Refuse tables of another size; follow replaced ones."""
        now = self._look()
        for name, _, weight in now:
            table = self._names.get(name)
            if table is not None and int(weight.shape[0]) != table.rows:
                raise BadArgumentError(
                    f"{name}: the table was resized from {table.rows} to {weight.shape[0]} rows; "
                    "close this tracker and make another"
                )
        if len(now) != len(self._found) or any(
            a[0] != b[0] or a[1] is not b[1] or a[2] is not b[2] for a, b in zip(now, self._found, strict=True)
        ):
            self._register()


def _named(optimizer: Any) -> Named:
    """Return optimizers by their place in the state; "" for several or a single one."""
    if optimizer is None:
        return ()
    named: list[tuple[Any, Any]]
    if isinstance(optimizer, Mapping):
        named = list(optimizer.items())
    else:
        named = [("", one) for one in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]
    for name, one in named:
        if not isinstance(name, str) or not isinstance(one, torch.optim.Optimizer):
            raise BadArgumentError(f"optimizer: {name!r}: a {type(one).__qualname__} is not a torch.optim.Optimizer")
    return named


def _entries(module: nn.Module, optimizers: Named) -> Iterator[tuple[str, tuple[Kind, Any]]]:
    """Yield kind and value of each optimizer entry, by the tail of its path."""
    weights = set(kinds_of(module))
    places = [place for place, _ in optimizers]
    for place, one in optimizers:
        numbers = [p for group in one.param_groups for p in group["params"]]
        by_name = {canonical_name(module, name): p for name, p in module.named_parameters()}
        for path, kind in kinds_of(module, one).items():
            if path in weights:
                continue
            owner, _, entry = path.removeprefix("state/").rpartition("/")
            if owner.isdigit() and places.count(place) > 1:
                continue
            parameter = numbers[int(owner)] if owner.isdigit() else by_name[owner]
            yield (f"{place}/{path}" if place else path), (kind, one.state[parameter][entry])


def _rows(value: Any) -> int:
    return int(value.shape[0]) if isinstance(value, torch.Tensor) and value.ndim else 0


def _moves_other_rows(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return why an optimizer changes rows whose gradient is zero, or ""."""
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        return f"{name} may move rows that have no gradient"
    for setting in ("momentum", "weight_decay"):
        if group.get(setting):
            return f"{name} with {setting} {group[setting]} moves rows that have no gradient"
    return ""
