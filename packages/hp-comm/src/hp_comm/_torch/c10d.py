"""Collectives over a process group of torch.distributed: gloo, NCCL, HCCL."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from hp_comm._torch.ops import TorchOps
from hp_comm.collective_unit import CollectiveUnit
from hp_comm.errors import CommTimeoutError
from hp_comm.trace import note_collective
from hp_comm.verify import check_all_gather, check_array, check_reduce_scatter, check_source
from hp_comm.wire import all_reduce_bytes, nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hp_comm.plan import UnitPlan
    from hp_comm.ports import Array, ArrayOps, ReduceOp, Rendezvous, UnitChannel, Work

NATIVE_AVG = ("nccl",)
REPORT_S = 1.0
"""How long the ranks that timed out wait for each other's report."""

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
    ranks: tuple[int, ...]
    index: int
    backend: str
    device: str


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
        """Return when the output may be read."""
        work, self._work = self._work, None
        limit_s = self._owner.timeout_s if timeout_s is None else timeout_s
        start = time.monotonic()
        try:
            if work is not None:
                work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            if time.monotonic() - start < limit_s:
                raise
            raise self._owner.timed_out(self._operation, self._sequence, limit_s) from error
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Tell, without waiting, whether `wait` would return at once."""
        return self._work is None or self._work.is_completed()


class C10dCommunicator:
    """Implements `hp_comm.ports.Communicator` over a process group.

    Args:
        group: torch's process group.
        facts: Its name, members and backend.
        rendezvous: Where ranks report when a wait timed out.
        timeout_s: How long a wait lasts, in seconds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        facts: GroupFacts,
        *,
        rendezvous: Rendezvous,
        timeout_s: float,
    ) -> None:
        self.name = facts.name
        self.transport = facts.backend
        self.ranks = facts.ranks
        self.index = facts.index
        self.ops: ArrayOps = TorchOps(facts.device)
        self.timeout_s = timeout_s
        self.sequence = 0
        self._group = group
        self._rendezvous = rendezvous

    def all_gather_into(
        self, output: Array, source: Array, *, async_op: bool = False
    ) -> Work | None:
        """Concatenate every rank's `source` in `output`, by group index."""
        check_all_gather(self.ops, output, source, len(self.ranks))
        self._note("all_gather", nbytes(self.ops, source) * (len(self.ranks) - 1))
        work = dist.all_gather_single(
            _flat(output), _flat(source), group=self._group, async_op=True
        )
        return self._end(work, None, "all_gather", async_op)

    def reduce_scatter_into(
        self, output: Array, source: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `source` and keep this rank's part in `output`."""
        check_reduce_scatter(self.ops, output, source, op, len(self.ranks))
        self._note("reduce_scatter", nbytes(self.ops, output) * (len(self.ranks) - 1))
        work = dist.reduce_scatter_single(
            _flat(output), _flat(source), self._op(op), group=self._group, async_op=True
        )
        return self._end(work, self._mean(op, output), "reduce_scatter", async_op)

    def all_reduce(
        self, array: Array, *, op: ReduceOp = "sum", async_op: bool = False
    ) -> Work | None:
        """Reduce every rank's `array`, in place, on every rank."""
        check_array(self.ops, array, op)
        self._note("all_reduce", all_reduce_bytes(nbytes(self.ops, array), len(self.ranks)))
        work = dist.all_reduce(_flat(array), self._op(op), group=self._group, async_op=True)
        return self._end(work, self._mean(op, array), "all_reduce", async_op)

    def broadcast(self, array: Array, *, source: int = 0, async_op: bool = False) -> Work | None:
        """Overwrite `array` on every rank by that of group index `source`."""
        check_array(self.ops, array, "sum")
        check_source(source, len(self.ranks))
        self._note("broadcast", 0 if source == self.index else nbytes(self.ops, array))
        root = self.ranks[source]
        work = dist.broadcast(_flat(array), root, group=self._group, async_op=True)
        return self._end(work, None, "broadcast", async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank of the group has called this."""
        self._note("barrier", 0)
        token = self.ops.empty((1,), "float32")
        self.ops.fill_zero(token)
        work = dist.all_reduce(_flat(token), group=self._group, async_op=True)
        C10dWork(work, None, self, "barrier").wait(timeout_s)

    def all_gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes, by group index."""
        lengths = self._gather_ints(len(value))
        longest = max(lengths)
        if not longest:
            return [b"" for _ in lengths]
        own = bytearray(value) + bytearray(longest - len(value))
        source = torch.frombuffer(own, dtype=torch.uint8)
        whole = self.ops.empty((longest * len(lengths),), "uint8")
        self.all_gather_into(whole, cast("Array", source.to(_flat(whole).device)))
        rows = _flat(whole).cpu().view(len(lengths), longest)
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def open_unit(self, plan: UnitPlan, *, label: str) -> UnitChannel:
        """Return a channel for one unit."""
        return CollectiveUnit(self, plan, label)

    def close(self) -> None:
        """Do nothing: the process group is torch's."""

    def timed_out(self, operation: str, sequence: int, limit_s: float) -> CommTimeoutError:
        """Return the error for a wait that ended, naming the ranks that didn't report it too."""
        place = f"hp-comm/late/{self.name}/{self.ranks}/{sequence}"
        self._rendezvous.put(f"{place}/{self.index}", b"here")
        end = time.monotonic() + REPORT_S
        missing = []
        for index, rank in enumerate(self.ranks):
            reported = False
            with contextlib.suppress(TimeoutError):
                left = max(0.01, end - time.monotonic())
                reported = bool(self._rendezvous.wait_for(f"{place}/{index}", left))
            if not reported:
                missing.append(rank)
        return CommTimeoutError(operation, self.name, sequence, tuple(missing), limit_s)

    def _gather_ints(self, value: int) -> list[int]:
        device = _flat(self.ops.empty((1,), "int64")).device
        own = torch.tensor([value], dtype=torch.int64, device=device)
        whole = torch.empty(len(self.ranks), dtype=torch.int64, device=device)
        self.all_gather_into(cast("Array", whole), cast("Array", own))
        return [int(number) for number in whole.tolist()]

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


def _flat(array: Array) -> torch.Tensor:
    return cast("torch.Tensor", array).detach().view(-1)
