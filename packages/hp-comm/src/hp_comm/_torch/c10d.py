"""Collectives over a process group of torch.distributed: gloo, NCCL, HCCL."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from hp_comm._torch.ops import TorchOps
from hp_comm._torch.progress import FAILURE_GRACE_S, TIME_OUT_GRACE_S, Progress
from hp_comm._torch.stuck import keep_until_exit
from hp_comm.collective_unit import open_unit
from hp_comm.errors import CommError, CommTimeoutError, TransferError
from hp_comm.settings import choose_timeout
from hp_comm.trace import muted, note_collective
from hp_comm.verify import (
    check_all_gather,
    check_array,
    check_reduce_scatter,
    check_source,
    check_value,
)
from hp_comm.wire import all_reduce_bytes, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm._torch.store import StoreRendezvous
    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, UnitChannel, Work

NATIVE_AVG = ("nccl",)
NATIVE_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8",
                 "bool")  # fmt: skip
"""What every backend moves and reduces; anything else moves as bytes, or is refused."""

T = TypeVar("T")
FIRST_LOOK_S = 1.0
"""A wait that takes longer than this (or a quarter of its time-out) tells the others so."""

LONGEST_S = 1e9
"""A time-out of torch, in seconds, that fits its type; some 30 years."""

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What is known about a process group before a communicator is made for it."""

    name: str
    """In errors and traces."""

    ranks: tuple[int, ...]
    """Global ranks by group index."""

    index: int
    """Of this process."""

    backend: str
    """What moves the bytes: "gloo", "nccl", "hccl"."""

    device: str
    """Type of the device whose tensors are moved."""


class C10dWork:
    """A collective of torch.distributed that was started.

    Args:
        work: torch's.
        finish: Called once after it.
        owner: The communicator, for errors.
        operation: For errors.
    """

    def __init__(
        self,
        work: dist.Work | None,
        finish: Callable[[], None] | None,
        owner: C10dCommunicator,
        operation: str,
    ) -> None:
        self._work = work
        self._finish = finish
        self._owner = owner
        self._operation = operation
        self._sequence = owner.sequence

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the output may be read: on accelerators by what is launched after this."""
        if self._work is not None:
            self._owner.finish(self._work, (self._sequence, self._operation), timeout_s)
            self._work = None
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Tell, without waiting, whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()


class C10dCommunicator:
    """Implements `hp_comm.ports.Communicator` over a process group.

    On accelerators a wait orders streams and returns; there the time-out is the process group's.

    Args:
        group: torch's process group; not kept alive.
        facts: Its name, members and backend.
        store: Where ranks tell each other how far they are, when a wait takes long.
        key: A prefix in it that only this communicator uses.
        timeout_s: How long a wait lasts, in seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        facts: GroupFacts,
        *,
        store: StoreRendezvous,
        key: str,
        timeout_s: float,
    ) -> None:
        self.name = facts.name
        self.transport = facts.backend
        self.ranks = facts.ranks
        self.index = facts.index
        self.ops: ArrayOps = TorchOps(facts.device)
        self.timeout_s = timeout_s
        self.sequence = 0
        self._device = facts.device
        self._is_on_host = facts.device == "cpu"
        self._group_ref = weakref.ref(group)
        self._progress = Progress(store, key, index=facts.index, ranks=facts.ranks)

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate every rank's `source` in `output`, by group index."""
        check_all_gather(self.ops, output, source, len(self.ranks))
        group = self._group_of(output, source)
        self._note("all_gather", nbytes(self.ops, source) * (len(self.ranks) - 1))
        whole, part = self._moved(output), self._moved(source)
        work = self._issue(
            "all_gather", lambda: dist.all_gather_single(whole, part, group=group, async_op=True)
        )
        return self._end(work, None, "all_gather", async_op)

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` and keep this rank's part in `output`."""
        check_reduce_scatter(self.ops, output, source, op, len(self.ranks))
        self._check_reduced(output, op)
        group, fold = self._group_of(output, source), self._op(op)
        self._note("reduce_scatter", nbytes(self.ops, output) * (len(self.ranks) - 1))
        part, whole = _flat(output), _flat(source)
        work = self._issue(
            "reduce_scatter",
            lambda: dist.reduce_scatter_single(part, whole, fold, group=group, async_op=True),
        )
        return self._end(work, self._mean(op, output), "reduce_scatter", async_op)

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array`, in place, on every rank."""
        check_array(self.ops, array, op)
        self._check_reduced(array, op)
        group, fold, flat = self._group_of(array), self._op(op), _flat(array)
        self._note("all_reduce", all_reduce_bytes(nbytes(self.ops, array), len(self.ranks)))
        work = self._issue(
            "all_reduce", lambda: dist.all_reduce(flat, fold, group=group, async_op=True)
        )
        return self._end(work, self._mean(op, array), "all_reduce", async_op)

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        check_array(self.ops, array)
        check_source(source, len(self.ranks))
        group, root, moved = self._group_of(array), self.ranks[source], self._moved(array)
        self._note("broadcast", 0 if source == self.index else nbytes(self.ops, array))
        work = self._issue(
            "broadcast", lambda: dist.broadcast(moved, root, group=group, async_op=True)
        )
        return self._end(work, None, "broadcast", async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank of the group has called this."""
        group, limit_s = self._group_of(), self._limit_s(timeout_s)
        self._note("barrier", 0)
        token = _flat(self.ops.empty((1,), "float32")).zero_()
        work = self._issue("barrier", lambda: dist.all_reduce(token, group=group, async_op=True))
        C10dWork(work, None, self, "barrier").wait(limit_s)
        token.cpu()  # on accelerators, only this waits for the others

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes, by group index; set-up traffic, no trace counts it."""
        check_value(value)
        with muted():
            lengths = [
                int.from_bytes(raw, "little")
                for raw in self._gather_rows(len(value).to_bytes(8, "little"), 8)
            ]
            rows = self._gather_rows(value, max(lengths))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit.

        Raises:
            CommError: The plan is for another number of ranks.
            MismatchError: The ranks have different plans.
        """
        return open_unit(self, plan, label)

    def close(self) -> None:
        """Do nothing: the process group is torch's."""

    def finish(self, work: dist.Work, call: tuple[int, str], timeout_s: float | None) -> None:
        """Wait for a collective of this group.

        Args:
            work: torch's.
            call: Its number and operation.
            timeout_s: How long, in seconds; None: the communicator's.

        Raises:
            CommError: The time-out isn't a finite number above 0.
            CommTimeoutError: It didn't end in time, or a rank is gone.
            MismatchError: Another rank waits for another operation under this number.
            TransferError: It failed though every rank arrived.
        """
        if not self._is_on_host:
            self._issue(call[1], work.wait, call[0])
            return
        limit_s = self._limit_s(timeout_s)
        start = time.monotonic()
        if self._has_ended(work, min(FIRST_LOOK_S, limit_s / 4)):
            return
        self._progress.post(self.sequence, call)
        try:
            work.wait(_duration(start + limit_s - time.monotonic()))
        except RuntimeError as error:
            waited_s = limit_s if not work.is_completed() else round(time.monotonic() - start, 1)
            self._raise(error, work, call, waited_s)

    def _limit_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else choose_timeout(timeout_s)

    def _has_ended(self, work: dist.Work, limit_s: float) -> bool:
        """Wait for a moment; an error of the collective itself shows up in the wait after it."""
        try:
            work.wait(_duration(limit_s))
        except RuntimeError:
            return False
        return True

    def _raise(
        self, error: RuntimeError, work: dist.Work, call: tuple[int, str], waited_s: float
    ) -> NoReturn:
        sequence, operation = call
        is_late = not work.is_completed()
        if is_late:
            text = f"{operation} number {sequence} of group {self.name!r}"
            keep_until_exit(work, self._group_of(), text)
        grace_s = TIME_OUT_GRACE_S if is_late else FAILURE_GRACE_S
        missing = self._progress.missing(sequence, operation, grace_s)
        if missing or is_late:
            raise CommTimeoutError(operation, self.name, sequence, missing, waited_s) from error
        raise TransferError(operation, self.name, sequence, _reason(error)) from error

    def _issue(self, operation: str, call: Callable[[], T], sequence: int | None = None) -> T:
        """Return what a call of torch returns; its errors say which collective it was for."""
        try:
            return call()
        except RuntimeError as error:
            number = self.sequence if sequence is None else sequence
            raise TransferError(operation, self.name, number, _reason(error)) from error

    def _group_of(self, *arrays: Array) -> dist.ProcessGroup:
        """Return the process group, if it lives and moves these tensors as they are."""
        for array in arrays:
            tensor = _tensor(array)
            if tensor.device.type != self._device:
                raise CommError(
                    f"group {self.name!r} moves tensors of device {self._device!r} and was given "
                    f"one on {str(tensor.device)!r}. Move it, or use a group for its device."
                )
            if tensor.is_conj() or tensor.is_neg():
                raise CommError(
                    f"group {self.name!r} was given a lazy conjugate of shape "
                    f"{tuple(tensor.shape)}. Pass tensor.resolve_conj().resolve_neg()."
                )
        group = self._group_ref()
        if group is None:
            raise CommError(
                f"group {self.name!r} of ranks {self.ranks} was used after its process group was "
                f"destroyed. Ask hp_comm.communicator for another one."
            )
        return group

    def _gather_rows(self, value: bytes, length: int) -> list[bytes]:
        """Return every rank's bytes, filled up to one length."""
        if not length:
            return [b"" for _ in self.ranks]
        own = torch.frombuffer(bytearray(value.ljust(length, b"\0")), dtype=torch.uint8)
        whole = self.ops.empty((length * len(self.ranks),), "uint8")
        self.all_gather_into(whole, cast("Array", own.to(_flat(whole).device)))
        rows = _flat(whole).cpu().view(len(self.ranks), length)
        return [row.numpy().tobytes() for row in rows]

    def _moved(self, array: Array) -> torch.Tensor:
        """Return the tensor as backends take it that only move it."""
        flat = _flat(array)
        return flat if self.ops.dtype_of(array) in NATIVE_DTYPES else flat.view(torch.uint8)

    def _check_reduced(self, array: Array, op: ReduceOp) -> None:
        dtype = self.ops.dtype_of(array)
        is_sum = op in ("sum", "avg")
        if dtype not in NATIVE_DTYPES and not (dtype.startswith("complex") and is_sum):
            raise CommError(
                f"{op!r} of {dtype} was asked for and {self.transport} has none. Cast to one of "
                f"{NATIVE_DTYPES}."
            )

    def _op(self, op: ReduceOp) -> dist.ReduceOp.RedOpType:
        if op == "avg" and self.transport in NATIVE_AVG:
            return dist.ReduceOp.AVG
        return REDUCE_OPS[op]

    def _mean(self, op: ReduceOp, array: Array) -> Callable[[], None] | None:
        """Return what divides the sum where the backend has no average of its own."""
        if op != "avg" or self.transport in NATIVE_AVG:
            return None
        return lambda: self.ops.scale(array, 1.0 / len(self.ranks))

    def _end(
        self,
        work: dist.Work | None,
        finish: Callable[[], None] | None,
        operation: str,
        async_op: bool,
    ) -> Work | None:
        made = C10dWork(work, finish, self, operation)
        if async_op:
            return made
        made.wait()
        return None

    def _note(self, kind: str, wire_bytes: int) -> None:
        self.sequence += 1
        note_collective(
            kind,
            group=self.name,
            transport=self.transport,
            wire_bytes=wire_bytes,
            sequence=self.sequence,
        )


def _tensor(array: Array) -> torch.Tensor:
    return cast("torch.Tensor", array)


def _flat(array: Array) -> torch.Tensor:
    return _tensor(array).detach().view(-1)


def _duration(seconds: float) -> timedelta:
    """Return a time-out for torch, which takes less than a millisecond as "for ever"."""
    return timedelta(seconds=min(max(seconds, 0.001), LONGEST_S))


def _reason(error: RuntimeError) -> str:
    """Return the first line of torch's message, without its full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
