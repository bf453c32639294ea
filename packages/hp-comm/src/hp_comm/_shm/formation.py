"""How the ranks of a group find out together whether shared memory serves them all.

    index 0                                 the others
    makes the segment, writes a nonce       wait for the offer
    offers socket address and token    ->   connect, show the token
    waits for everybody's report       <-   report: reached, or why not
    hands the descriptor over          ->   map it, read the nonce through it
    waits for all votes                <-   vote: the nonce as read, or why not
    says the verdict                   ->   all take it, or all raise the same error

Offer, reports, votes and verdict go through the rendezvous; who has stored one nudges the reader
over the connection, which tells a death from a delay. That ranks share a host is proved by the
nonce, never by a host's name. Index 0 alone decides, so nobody can come to another result; a
rank that doesn't come in time is a time-out on every rank, not a reason to use something else.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_comm._shm.board import Board
from hp_comm._shm.communicator import ShmCommunicator
from hp_comm._shm.handover import Door, Handover, knock
from hp_comm._shm.kernel import Mapping, why_unsupported
from hp_comm._shm.seat import Seat
from hp_comm._shm.segment import Segment
from hp_comm.errors import CommTimeoutError, TransportError

if TYPE_CHECKING:
    import socket

    from hp_comm.ports import ArrayOps, Communicator, Rendezvous

_NONCE_BYTES = 32
_STORED_LONG_AGO_S = 0.5
Note = dict[str, Any]


def connect(
    *,
    name: str,
    ranks: tuple[int, ...],
    index: int,
    rendezvous: Rendezvous,
    ops: ArrayOps,
    timeout_s: float,
    key: str,
) -> Communicator:
    """Return a communicator over shared memory; all ranks of the group call this alike.

    Args:
        name: The group's name in errors and traces.
        ranks: Global ranks of the members, by group index.
        index: This process's index in `ranks`.
        rendezvous: Reached by all of them.
        ops: The tensor operations.
        timeout_s: Limit of every wait, here and later, in seconds.
        key: A prefix in the rendezvous that nothing else uses, not even an earlier attempt.

    Raises:
        TransportError: The ranks can't share memory; raised on every rank, with every reason.
        CommTimeoutError: A rank did not come.
    """
    seat = Seat(name, ranks, index, timeout_s)
    forming = _Forming(seat, rendezvous, key)
    try:
        handover, mapping = forming.lead() if index == 0 else forming.follow()
    except BaseException:
        forming.abandon()
        raise
    return ShmCommunicator(seat, ops, mapping, handover)


@dataclass
class _Forming:
    seat: Seat
    rendezvous: Rendezvous
    key: str
    problems: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    connections: dict[int, socket.socket] = field(default_factory=dict)
    door: Door | None = None
    segment: Segment | None = None

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seat.timeout_s
        self.peers = range(1, self.seat.num_ranks)

    def lead(self) -> tuple[Handover, Mapping]:
        """Play index 0's part."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        mapping = self._prepare(nonce)
        if mapping is None or self.door is None:
            self._put("offer", {"problem": self.problems[0]})
            raise self._refusal()
        self._put("offer", {"address": self.door.address, "token": self.door.token.hex()})
        for peer in self.peers:
            self._hear(peer, "report")
        handover = self._hand_over()
        if not self._has_failed():
            for peer in self.peers:
                vote = self._hear(peer, "vote") if self._has_voted(handover, peer) else None
                if vote is not None and vote.get("nonce") != nonce.hex():
                    self.problems[peer] = "it sees other memory than this rank"
        self._put("verdict", {"problems": self.problems, "missing": self.missing})
        handover.nudge()
        self.door.close()
        if self._has_failed():
            handover.close()  # after the verdict: whoever sees this finds it
            raise self._refusal()
        self._close_segment()
        return handover, mapping

    def follow(self) -> tuple[Handover, Mapping]:
        """Play the part of any other index."""
        offer = self._get("offer", self.seat.timeout_s)
        if "problem" in offer:
            self.problems[0] = offer["problem"]
            raise self._refusal()
        problem = self._reach(offer)
        self._tell("report", {"problem": problem} if problem else {})
        handover = Handover(self.seat.index, self.connections)
        mapping = None
        if not problem:
            mapping, vote = self._look_inside(handover)
            self._tell("vote", vote)
            handover.nudge()
        verdict = self._await_verdict(handover)
        self.problems = {int(peer): text for peer, text in dict(verdict["problems"]).items()}
        self.missing = list(verdict["missing"])
        if mapping is None or self._has_failed():
            raise self._refusal()
        self._close_segment()
        return handover, mapping

    def abandon(self) -> None:
        """Close what was opened."""
        for connection in self.connections.values():
            connection.close()
        if self.door is not None:
            self.door.close()
        self._close_segment()

    def _close_segment(self) -> None:
        if self.segment is not None:
            self.segment.close()

    def _prepare(self, nonce: bytes) -> Mapping | None:
        reason = why_unsupported()
        if reason is not None:
            self.problems[0] = reason
            return None
        try:
            self.segment = Segment.create(Board.num_bytes(self.seat.num_ranks))
            mapping = self.segment.map()
            self.door = Door(len(self.peers))
        except OSError as error:
            self.problems[0] = f"a segment or socket could not be made: {error}"
            return None
        Board(mapping, self.seat.num_ranks, 0).set_up(nonce)
        return mapping

    def _hand_over(self) -> Handover:
        if self.door is not None and not self._has_failed():
            self.connections = self.door.admit(set(self.peers), self.deadline)
            self.missing = [peer for peer in self.peers if peer not in self.connections]
        handover = Handover(0, self.connections)
        if not self._has_failed() and self.segment is not None:
            try:
                handover.give(self.segment, self.segment.num_bytes, self._left_s())
            except OSError as error:
                self.missing = list(handover.lost())  # died between its knock and now
                if not self.missing:
                    self.problems[0] = f"the segment could not be handed over: {error}"
        return handover

    def _reach(self, offer: Note) -> str:
        reason = why_unsupported()
        if reason is not None:
            return reason
        try:
            token = bytes.fromhex(offer["token"])
            self.connections[0] = knock(offer["address"], token, self.seat.index, self.deadline)
        except OSError as error:
            return (
                f"could not reach rank {self.seat.ranks[0]} ({error}): it is on another host, in "
                f"another network namespace, or another user's"
            )
        return ""

    def _look_inside(self, handover: Handover) -> tuple[Mapping | None, Note]:
        num_ranks = self.seat.num_ranks
        try:
            self.segment = handover.take(Board.num_bytes(num_ranks), self._left_s())
            mapping = self.segment.map()
        except OSError as error:
            return None, {"problem": f"could not get the segment: {error}"}
        return mapping, {"nonce": Board(mapping, num_ranks, self.seat.index).nonce().hex()}

    def _has_voted(self, handover: Handover, peer: int) -> bool:
        """Return when a peer has voted; False if it won't: it died, or the time is over."""
        if not handover.is_nudged(peer, self._left_s()):
            self.missing.append(peer)
        return peer not in self.missing

    def _await_verdict(self, handover: Handover) -> Note:
        limit_s = 2 * self.seat.timeout_s  # index 0 may wait for others until its own time-out
        if self.connections and handover.is_nudged(0, limit_s):
            limit_s = self.seat.timeout_s
        elif self.connections:  # what index 0 had to say was stored before the connection closed
            limit_s = _STORED_LONG_AGO_S
        return self._get("verdict", limit_s)

    def _hear(self, peer: int, what: str) -> Note | None:
        """Return what a peer told, or None where it told of a problem or nothing."""
        if peer in self.missing:
            return None
        try:
            note = self._read(f"{what}/{peer}", self._left_s())
        except TimeoutError:
            self.missing.append(peer)
            return None
        if "problem" in note:
            self.problems[peer] = note["problem"]
            return None
        return note

    def _has_failed(self) -> bool:
        return bool(self.problems or self.missing)

    def _refusal(self) -> TransportError | CommTimeoutError:
        if self.missing:
            missing = tuple(self.missing)
            return self.seat.timed_out("making the group", 1, missing, self.seat.timeout_s)
        reasons = "; ".join(
            f"rank {self.seat.ranks[index]}: {text}" for index, text in self.problems.items()
        )
        return TransportError(
            f"shared memory was asked for and can't serve group {self.seat.name!r} of ranks "
            f"{self.seat.ranks}: {reasons}. Use another transport, or 'auto', which picks one."
        )

    def _left_s(self) -> float:
        return max(0.05, self.deadline - time.monotonic())

    def _put(self, what: str, note: object) -> None:
        self.rendezvous.put(f"{self.key}/{what}", json.dumps(note).encode())

    def _tell(self, what: str, note: Note) -> None:
        self._put(f"{what}/{self.seat.index}", note)

    def _read(self, what: str, timeout_s: float) -> Note:
        note: Note = json.loads(self.rendezvous.wait_for(f"{self.key}/{what}", timeout_s))
        return note

    def _get(self, what: str, timeout_s: float) -> Note:
        """Return what index 0 told all.

        Raises:
            CommTimeoutError: It told nothing.
        """
        try:
            return self._read(what, timeout_s)
        except TimeoutError as error:
            raise self.seat.timed_out("making the group", 1, (0,), timeout_s) from error
