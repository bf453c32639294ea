"""What the scheduler asks the executor to do, as plain values.

Gather      start to make a unit's parameters whole
Await       wait until they are whole and let the modules see them
Free        let the modules see the shards again and give the full memory back
Reduce      start to add the unit's gradients over the ranks
Accumulate  keep the unit's gradients on this rank for a later reduction
Discard     drop gradients of a backward that was broken off
Drain       finish every reduction that is still running
QueueEnd    ask the autograd engine to report the end of this backward
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gather:
    """Start to make unit `unit` whole."""

    unit: int


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until unit `unit` is whole, then let its modules see the full parameters."""

    unit: int


@dataclass(frozen=True, slots=True)
class Free:
    """Let the modules of unit `unit` see the shards again; the full memory is given back."""

    unit: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start to add the gradients of unit `unit` over the ranks."""

    unit: int


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Keep the gradients of unit `unit` on this rank; a later `Reduce` takes them along."""

    unit: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop the unreduced gradients of unit `unit`: their backward was broken off."""

    unit: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish every reduction that is still running."""

    keep: bool = True
    """Whether the results become gradients; not so after a backward that was broken off."""


@dataclass(frozen=True, slots=True)
class QueueEnd:
    """Ask the autograd engine to report the end of the backward that is running."""


Action = Gather | Await | Free | Reduce | Accumulate | Discard | Drain | QueueEnd
