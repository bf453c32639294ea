"""Wrong arguments are refused with a message that helps, and nothing is changed."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hp_comm.testing import run_ranks
from hp_dtensor import Shard
from hp_fully_shard import FullyShardError, MixedPrecisionPolicy, UnsupportedError, fully_shard
from hp_mesh import init_device_mesh


def line() -> object:
    """Return a mesh over all ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


class WithScalar(nn.Module):
    """Holds a 0-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))


def sharded() -> nn.Module:
    """Return a module that is sharded already."""
    torch.manual_seed(0)
    return fully_shard(nn.Linear(4, 4), mesh=line())


def model() -> nn.Module:
    """Return a module that isn't."""
    torch.manual_seed(0)
    return nn.Linear(4, 4)


Call = Callable[[], object]
CASES: dict[str, tuple[type[Exception], str, Call]] = {
    "no module": (FullyShardError, "module of torch", lambda: fully_shard(3)),
    "empty list": (FullyShardError, "module of torch", lambda: fully_shard([])),
    "element": (
        FullyShardError,
        "element 1 of the list is a int",
        lambda: fully_shard([model(), 3], mesh=line()),
    ),
    "twice": (
        FullyShardError,
        "names a module twice",
        lambda: fully_shard([layer := model(), layer], mesh=line()),
    ),
    "again": (
        FullyShardError,
        "applied to this HSDPLinear before",
        lambda: fully_shard(sharded(), mesh=line()),
    ),
    "container": (
        FullyShardError,
        "container's forward is never called",
        lambda: fully_shard(nn.ModuleList([model()]), mesh=line()),
    ),
    "scalar": (
        UnsupportedError,
        "'temperature' is a scalar",
        lambda: fully_shard(WithScalar(), mesh=line()),
    ),
    "two axes": (
        UnsupportedError,
        r"2 axes of sizes \(1, 2\)",
        lambda: fully_shard(model(), mesh=init_device_mesh("cpu", (1, 2))),
    ),
    "number": (
        UnsupportedError,
        "reshard_after_forward=2",
        lambda: fully_shard(model(), mesh=line(), reshard_after_forward=2),
    ),
    "dim": (
        FullyShardError,
        r"'weight' of shape \(4, 4\) on dim 2",
        lambda: fully_shard(model(), mesh=line(), shard_placement_fn=lambda p: Shard(2)),
    ),
    "placement": (
        FullyShardError,
        "returned 'rows' for parameter 'weight'",
        lambda: fully_shard(model(), mesh=line(), shard_placement_fn=lambda p: "rows"),
    ),
    "policy": (
        FullyShardError,
        r"mp_policy.param_dtype is torch.int32",
        lambda: fully_shard(model(), mesh=line(), mp_policy=MixedPrecisionPolicy(torch.int32)),
    ),
    "ignored": (
        FullyShardError,
        "ignored_params holds a str at position 0",
        lambda: fully_shard(model(), mesh=line(), ignored_params=["weight"]),
    ),
    "sync": (
        FullyShardError,
        "requires_gradient_sync=1",
        lambda: sharded().set_requires_gradient_sync(1),
    ),
    "prefetch": (
        FullyShardError,
        "Linear at position 0, which isn't sharded",
        lambda: sharded().set_modules_to_forward_prefetch([model()]),
    ),
    "prefetch list": (
        FullyShardError,
        "takes a list of sharded modules",
        lambda: sharded().set_modules_to_backward_prefetch(sharded()),
    ),
    "factor": (
        FullyShardError,
        "set_gradient_divide_factor got 0",
        lambda: sharded().set_gradient_divide_factor(0),
    ),
}


def run_case(rank: int, world: int, name: str) -> None:
    error, text, call = CASES[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_is_refused(name: str) -> None:
    run_ranks(run_case, 2, name)
