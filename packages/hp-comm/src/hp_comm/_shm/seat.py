"""Who this process is in its group, and how errors name the others."""

from __future__ import annotations

from dataclasses import dataclass

from hp_comm.errors import CommTimeoutError


@dataclass(frozen=True, slots=True)
class Seat:
    """This process's place in a group."""

    name: str
    """The group's name in errors and traces."""

    ranks: tuple[int, ...]
    """Global ranks of the members, by group index."""

    index: int
    """This process's index in `ranks`."""

    timeout_s: float
    """How long a wait lasts."""

    @property
    def num_ranks(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def globals(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global ranks of group indices."""
        return tuple(self.ranks[index] for index in indices)

    def timed_out(
        self, operation: str, sequence: int, missing: tuple[int, ...], timeout_s: float
    ) -> CommTimeoutError:
        """Return the error for a wait that ended before group indices `missing` arrived."""
        return CommTimeoutError(operation, self.name, sequence, self.globals(missing), timeout_s)
