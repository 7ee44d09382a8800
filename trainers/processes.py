"""Collectives in which an error of one process is raised on all."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from ..codec import errors
from ..codec.errors import ShrinkpointError

A = TypeVar("A")
B = TypeVar("B")


def world() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among those that train together."""
    return dist.get_rank() if world() > 1 else 0


def on_all(work: Callable[[], A], brief: Callable[[A], B]) -> tuple[A, list[B]]:
    """Call `work` on all processes; return its result here and `brief` of all results."""
    if world() == 1:
        found = work()
        return found, [brief(found)]
    error, short = None, None
    try:
        found = work()
        short = brief(found)
    except BaseException as e:  # an interrupt of one, too, or the others would wait for it
        error = e
    everyone: list[Any] = [None] * world()
    with _preferring(error):
        dist.all_gather_object(everyone, (short, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    failed = [f"rank {number}: {why}" for number, (_, why) in enumerate(everyone) if why is not None]
    if failed:
        raise ShrinkpointError(f"nothing was saved, since another rank could not: {'; '.join(failed)}")
    return found, [one for one, _ in everyone]


def from_all(mine: Any) -> list[Any]:
    """Gather a value of each process on rank 0; return an empty list on the others."""
    if world() == 1:
        return [mine]
    everyone: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone or []


@contextlib.contextmanager
def explaining(what: str) -> Iterator[None]:
    """Add a note to torch's errors about another process that is gone or does not answer."""
    try:
        yield
    except RuntimeError as e:
        if world() > 1:
            e.add_note(f"rank {rank()} of {world()}: {what}; another process is gone or does not answer")
        raise


@contextlib.contextmanager
def _preferring(error: BaseException | None) -> Iterator[None]:
    """Raise the local error, rather than the failure to send it to lost processes."""
    try:
        yield
    except RuntimeError:
        if error is not None:
            raise error from None
        raise


def on_rank_0(work: Callable[[], Any], light: Callable[[Any], Any], otherwise: str) -> Any:
    """Call `work` on rank 0; return its result there, and `light` of it elsewhere.

    `otherwise` says what became of it where the result cannot be sent (`explaining`).
    """
    if world() == 1:
        return work()
    found, error = None, None
    if rank() == 0:
        try:
            found = work()
        except BaseException as e:  # an interrupt, too
            error = e
    sent: list[Any] = [
        None if found is None else light(found),
        None if error is None else (type(error).__name__, str(error), getattr(error, "errno", None)),
    ]
    with _preferring(error), explaining(otherwise):
        dist.broadcast_object_list(sent)
    if error is not None:
        raise error
    if sent[1] is not None:
        raise _received_error(*sent[1])
    return found if rank() == 0 else sent[0]


def _received_error(name: str, text: str, errno: int | None) -> Exception:
    """Return an error of another process, with its class if that is known here.

    The error itself is not sent: errors of storage libraries may not be picklable, or need more arguments than a text.
    """
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):
            raised = known(text)
            if isinstance(raised, OSError):
                raised.errno = errno
            return raised
    return ShrinkpointError(f"rank 0: {name}: {text}")
