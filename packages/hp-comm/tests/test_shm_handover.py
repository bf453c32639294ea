"""Who gets a segment, and what a group that can't be made says on every rank."""

import os
import socket
import struct
import threading
import time

import pytest

from hp_comm._shm import connect, formation, handover, kernel
from hp_comm._shm.handover import Door, Handover, HandoverError, knock
from hp_comm._shm.segment import Segment
from hp_comm.errors import CommTimeoutError, TransportError
from hp_comm.testing import NumpyOps
from hp_comm.testing.folder import FolderRendezvous

pytestmark = pytest.mark.skipif(
    kernel.why_unsupported() is not None, reason=f"{kernel.why_unsupported()}"
)


@pytest.fixture
def door():
    made = Door(num_peers=4)
    yield made
    made.close()


def soon(seconds: float = 0.3) -> float:
    return time.monotonic() + seconds


def greet(address: str, message: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(b"\0" + address.encode())
    connection.send(message)
    return connection


def close_all(*connections: socket.socket) -> None:
    for connection in connections:
        connection.close()


def test_door_lets_in_who_shows_the_token(door):
    peer = knock(door.address, door.token, 1, soon())
    admitted = door.admit({1}, soon())
    assert list(admitted) == [1]
    close_all(peer, *admitted.values())


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("<8sI32s", b"hp-shm-1", 1, b"guess" * 6),
        struct.pack("<8sI32s", b"other", 1, b""),
        b"x",
        b"y" * 10000,
    ],
    ids=["wrong token", "other protocol", "short", "long"],
)
def test_door_sends_away_who_shows_something_else(door, message):
    stranger = greet(door.address, message)
    assert door.admit({1}, soon()) == {}
    assert stranger.recv(1) == b""
    stranger.close()


def test_door_sends_away_an_index_that_is_taken_or_unknown(door):
    first, second, third = (knock(door.address, door.token, i, soon()) for i in (1, 1, 7))
    admitted = door.admit({1, 2}, soon())
    assert list(admitted) == [1]
    close_all(first, second, third, *admitted.values())


def test_door_is_not_held_up_by_a_silent_stranger(door):
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(b"\0" + door.address.encode())
    peer = knock(door.address, door.token, 1, soon())
    start = time.monotonic()
    admitted = door.admit({1}, soon(10))
    assert list(admitted) == [1]
    assert time.monotonic() - start < 5
    close_all(silent, peer, *admitted.values())


def test_door_sends_another_user_away(door, monkeypatch):
    stranger = greet(door.address, b"")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert door.admit({1}, soon()) == {}
    stranger.close()


def test_knock_at_another_users_door_is_refused(door, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(HandoverError, match="another user"):
        knock(door.address, door.token, 1, soon())


def test_knock_where_nobody_listens_is_refused():
    with pytest.raises(ConnectionRefusedError):
        knock("hyper-parallel-nobody", b"", 1, soon())


def test_parcel_of_another_size_than_agreed_is_refused(door):
    peer = knock(door.address, door.token, 1, soon())
    giver = Handover(0, door.admit({1}, soon()))
    taker = Handover(1, {0: peer})
    segment = Segment.create(4096)
    giver.give(segment, 4096, timeout_s=1)
    with pytest.raises(HandoverError, match=r"segment 0 of 4096 bytes .* instead of .* 8192"):
        taker.take(8192, timeout_s=1)
    segment.close()
    giver.close()
    taker.close()


def test_handover_of_what_could_not_be_made_says_why(door, monkeypatch):
    peer = knock(door.address, door.token, 1, soon())
    giver, taker = Handover(0, door.admit({1}, soon())), Handover(1, {0: peer})
    monkeypatch.setattr(Segment, "create", _fail_to_create)
    with pytest.raises(HandoverError, match="no room today"):
        giver.share(4096, timeout_s=1)
    with pytest.raises(HandoverError, match="no room today"):
        taker.share(4096, timeout_s=1)
    giver.close()
    taker.close()


def _fail_to_create(num_bytes: int) -> Segment:
    raise OSError(12, "no room today")


def test_handover_sees_who_closed(door):
    peer = knock(door.address, door.token, 1, soon())
    giver = Handover(0, door.admit({1}, soon()))
    assert giver.lost() == ()
    peer.close()
    assert giver.lost() == (1,)
    giver.close()


def make_groups(folder, ranks, timeout_s=10.0, present=None):
    """Run `connect` on threads and return the errors by group index."""
    errors: dict[int, Exception] = {}

    def run(index: int) -> None:
        try:
            connect(
                name="dp",
                ranks=ranks,
                index=index,
                rendezvous=FolderRendezvous(folder),
                ops=NumpyOps(),
                timeout_s=timeout_s,
                key="k",
            ).close()
        except (TransportError, CommTimeoutError) as error:
            errors[index] = error

    indices = range(len(ranks)) if present is None else present
    threads = [threading.Thread(target=run, args=(index,), name=str(index)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def on_thread(name: str) -> bool:
    return threading.current_thread().name == name


def assert_all_say(errors, num_ranks, *texts):
    assert sorted(errors) == list(range(num_ranks))
    for error in errors.values():
        for text in texts:
            assert text in str(error)


@pytest.mark.parametrize("where", [0, 2], ids=["at index 0", "at index 2"])
def test_group_with_a_machine_without_futex_is_refused_on_every_rank(tmp_path, monkeypatch, where):
    def reason() -> str | None:
        return "it needs the futex system call" if on_thread(str(where)) else None

    monkeypatch.setattr(formation, "why_unsupported", reason)
    errors = make_groups(tmp_path, (4, 5, 6))
    assert_all_say(errors, 3, "'dp'", f"rank {4 + where}: it needs the futex")
    assert all(type(error) is TransportError for error in errors.values())


def test_group_with_a_rank_elsewhere_is_refused_on_every_rank(tmp_path, monkeypatch):
    def knock_elsewhere(address, token, index, deadline):
        found = "nowhere" if index == 1 else address
        return knock(found, token, index, deadline)

    monkeypatch.setattr(formation, "knock", knock_elsewhere)
    start = time.monotonic()
    errors = make_groups(tmp_path, (4, 5, 6))
    assert_all_say(errors, 3, "rank 5: could not reach rank 4", "another host")
    assert time.monotonic() - start < 8


def test_group_with_a_rank_that_sees_other_memory_is_refused_on_every_rank(tmp_path, monkeypatch):
    def take_other(self, num_bytes, timeout_s):
        taken = take(self, num_bytes, timeout_s)
        if not on_thread("1"):
            return taken
        taken.close()
        return Segment.create(num_bytes)

    take = Handover.take
    monkeypatch.setattr(Handover, "take", take_other)
    errors = make_groups(tmp_path, (0, 1, 2))
    assert_all_say(errors, 3, "rank 1: it sees other memory")


def test_group_without_memory_is_refused_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(Segment, "create", _fail_to_create)
    errors = make_groups(tmp_path, (0, 1))
    assert_all_say(errors, 2, "rank 0: a segment or socket could not be made", "no room today")


def test_group_with_a_rank_that_cannot_map_is_refused_on_every_rank(tmp_path, monkeypatch):
    def fail_to_map(self, **kwargs):
        if on_thread("2"):
            raise OSError(12, "no room today")
        return make_map(self, **kwargs)

    make_map = Segment.map
    monkeypatch.setattr(Segment, "map", fail_to_map)
    errors = make_groups(tmp_path, (0, 1, 2))
    assert_all_say(errors, 3, "rank 2: could not get the segment", "no room today")


@pytest.mark.parametrize("absent", [0, 2], ids=["index 0 absent", "index 2 absent"])
def test_group_with_an_absent_rank_times_out_naming_it(tmp_path, absent):
    present = [index for index in range(3) if index != absent]
    errors = make_groups(tmp_path, (4, 5, 6), timeout_s=0.5, present=present)
    assert sorted(errors) == present
    for error in errors.values():
        assert isinstance(error, CommTimeoutError)
        assert error.missing == (4 + absent,)
        assert error.group == "dp"


def test_group_that_cannot_be_made_leaves_no_descriptor_open(tmp_path, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(handover, "_is_own_user", lambda connection: False)
    errors = make_groups(tmp_path, (0, 1, 2), timeout_s=1.0)
    assert sorted(errors) == [0, 1, 2]
    assert len(os.listdir("/proc/self/fd")) == before
