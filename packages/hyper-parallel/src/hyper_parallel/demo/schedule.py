"""The learning rate of a step, and how many collectives a number of steps needs.

Pure. The rate climbs linearly for the first tenth of the steps and then falls along half a
cosine to a twentieth of its top.

Counting, with every block and the root as one unit each, blocks resharded after forward and the
root kept until its backward:

    collective       training step        validation batch
    all_gather       2 per block + root   1 per block + root
    reduce_scatter   1 per block + root   0
    all_reduce       1 (the loss)         1 (the loss)

Source: cosine decay with warm restarts left out (Loshchilov and Hutter, 2016).
"""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, peak: float) -> float:
    """Return the learning rate of one step.

    Args:
        step: Which step, counted from 0.
        steps: Number of steps of the whole run.
        peak: The highest learning rate.

    Returns:
        The rate, above 0 and at most `peak`.

    Example:
        >>> [round(learning_rate(step, steps=100, peak=1.0), 2) for step in (0, 9, 10, 55, 99)]
        [0.1, 1.0, 1.0, 0.53, 0.05]
    """
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def expected_collectives(
    *, num_blocks: int, num_steps: int, num_validation_batches: int
) -> dict[str, int]:
    """Return how many collectives of each kind a rank takes part in.

    Args:
        num_blocks: Transformer blocks of the model.
        num_steps: Training steps.
        num_validation_batches: Batches of all validations together.

    Returns:
        Number of collectives by kind.

    Example:
        >>> expected_collectives(num_blocks=6, num_steps=10, num_validation_batches=0)
        {'all_gather': 130, 'reduce_scatter': 70, 'all_reduce': 10}
    """
    num_units = num_blocks + 1
    return {
        "all_gather": num_steps * (num_units + num_blocks) + num_validation_batches * num_units,
        "reduce_scatter": num_steps * num_units,
        "all_reduce": num_steps + num_validation_batches,
    }
