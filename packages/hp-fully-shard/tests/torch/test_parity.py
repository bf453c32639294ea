"""A sharded model trains like the unsharded one: same weights after 5 steps, on 1 to 4 ranks.

Every rank computes on its own data. The reference is the unsharded model on the mean of the
ranks' losses. Tolerance: 1e-5 absolute on every weight in float32 (sums are taken in another
order),
with bfloat16 compute 2e-3 after SGD.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hp_comm.testing import run_ranks
from hp_dtensor import Shard
from hp_fully_shard import MixedPrecisionPolicy, fully_shard
from hp_mesh import init_device_mesh

STEPS = 5
TOLERANCE = 1e-5


class Block(nn.Module):
    """Linear, relu, linear with a residual; sizes that no number of ranks divides."""

    def __init__(self, width: int = 7, hidden: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between two layers of the root's own."""

    def __init__(self, blocks: int = 3, recompute: str = "") -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.outlet = nn.Linear(7, 3, bias=False)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.outlet(x)


class Tied(nn.Module):
    """An embedding whose weight is also the output projection's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.mid = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 100).long() % 5
        return self.out(self.mid(self.emb(tokens)))


class Twice(nn.Module):
    """One layer applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class InPlace(nn.Module):
    """Changes its input and a unit's output (a view) in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Viewing()
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += 1.0
        return self.second(y)


class Viewing(nn.Module):
    """A linear layer that returns a view of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).unsqueeze(0).squeeze(0)


class Structured(nn.Module):
    """Takes and gives nested structures; one output is unused by the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)

    def forward(self, *, batch: dict[str, list[torch.Tensor]]) -> dict[str, object]:
        (x,) = batch["x"]
        return {"y": (self.left(x), [self.right(x)]), "unused": self.left(x).sum()}


def shard_all(model: nn.Module, units: list[nn.Module], **options: object) -> None:
    """Make each of these modules a unit, then the model."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss that depends on every output."""
    return model(x).float().pow(2).mean()


def compare(
    model: nn.Module,
    shard: Callable[[nn.Module], None],
    *,
    loss: Step = loss_of,
    tolerance: float = TOLERANCE,
    micro_batches: int = 1,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> None:
    """Train a sharded and an unsharded copy and compare weights after each step."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reference = copy.deepcopy(model)
    shard(model)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    reference_optimizer = optimizer_class(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        data = torch.randn(micro_batches, world, 4, 6, generator=generator)
        for index, batch in enumerate(data):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(index == micro_batches - 1)
            loss(model, batch[rank].clone()).backward()
        for batch in data:
            (sum(loss(reference, x.clone()) for x in batch) / world).backward()
        for one in (optimizer, reference_optimizer):
            one.step()
            one.zero_grad()
        expect_same_weights(model, reference, tolerance)


def expect_same_weights(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    """Assert that every gathered parameter equals the reference's."""
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        got = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        torch.testing.assert_close(got, wanted[name], rtol=0, atol=tolerance, msg=f"weight {name}")


def net_case(recompute: str = "", blocks: int = 3, **options: object) -> Callable[[], None]:
    """Return a case that shards every block of a `Net` and the net."""

    def case() -> None:
        model = Net(blocks, recompute)
        compare(model, lambda net: shard_all(net, list(net.blocks), **options))

    return case


def root_only() -> None:
    compare(Net(), lambda net: shard_all(net, []))


def inner_units_only() -> None:
    def shard(net: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)

    model = Net(blocks=5)  # five trees, each with a reduction of its own in flight
    for module in (model.inlet, model.outlet):
        module.requires_grad_(False)  # nobody reduces what isn't sharded
    compare(model, shard)


def list_unit() -> None:
    def shard(net: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(list(net.blocks), mesh=mesh)
        fully_shard(net, mesh=mesh)

    compare(Net(), shard)


def nested_units() -> None:
    def shard(net: nn.Module) -> None:
        inner = [module for block in net.blocks for module in (block.up, block)]
        shard_all(net, inner)

    compare(Net(), shard)


def tied_in_one_unit() -> None:
    compare(Tied(), lambda net: shard_all(net, [net.mid]))


def tied_in_two_units() -> None:
    compare(Tied(), lambda net: shard_all(net, [net.emb, net.out]))


def tied_between_unit_and_root() -> None:
    compare(Tied(), lambda net: shard_all(net, [net.emb]))


def called_twice() -> None:
    compare(Twice(), lambda net: shard_all(net, [net.layer]))


def in_place() -> None:
    compare(InPlace(), lambda net: shard_all(net, [net.first, net.second]))


def structured() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first, (second,) = model(batch={"x": [x]})["y"]
        return (first * second).sum()

    compare(Structured(), lambda net: shard_all(net, []), loss=loss)


def dim_one() -> None:
    def place(parameter: nn.Parameter) -> object:
        return Shard(1) if parameter.dim() > 1 else None

    compare(Net(), lambda net: shard_all(net, list(net.blocks), shard_placement_fn=place))


def frozen_parts() -> None:
    model = Net()
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    compare(model, lambda net: shard_all(net, list(net.blocks)))


def frozen_then_trained() -> None:
    def shard(net: nn.Module) -> None:
        net.blocks[0].requires_grad_(False)
        shard_all(net, list(net.blocks))
        loss_of(net, torch.ones(2, 6)).backward()
        net.zero_grad()
        net.blocks[0].requires_grad_(True)

    compare(Net(), shard)


def accumulation() -> None:
    compare(Net(), lambda net: shard_all(net, list(net.blocks)), micro_batches=3)


def accumulation_without_keeping_the_root() -> None:
    def shard(net: nn.Module) -> None:
        shard_all(net, list(net.blocks), reshard_after_forward=True)

    compare(Net(), shard, micro_batches=2)


def bfloat16() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    compare(
        Net(),
        lambda net: shard_all(net, list(net.blocks), mp_policy=policy),
        tolerance=2e-3,
        micro_batches=2,
        optimizer_class=torch.optim.SGD,  # an adaptive one amplifies rounding to its step size
    )


CASES = {
    "nested": nested_units,
    "blocks": net_case(),
    "blocks_kept_full": net_case(reshard_after_forward=False),
    "blocks_and_root_freed": net_case(reshard_after_forward=True),
    "root_only": root_only,
    "inner_units_only": inner_units_only,
    "list_unit": list_unit,
    "recompute": net_case(recompute="plain"),
    "recompute_reentrant": net_case(recompute="reentrant"),
    "tied_in_one_unit": tied_in_one_unit,
    "tied_in_two_units": tied_in_two_units,
    "tied_between_unit_and_root": tied_between_unit_and_root,
    "called_twice": called_twice,
    "in_place": in_place,
    "structured": structured,
    "dim_one": dim_one,
    "frozen_parts": frozen_parts,
    "frozen_then_trained": frozen_then_trained,
    "accumulation": accumulation,
    "accumulation_freed": accumulation_without_keeping_the_root,
    "bfloat16": bfloat16,
}


def run_case(rank: int, world: int, name: str) -> None:
    torch.manual_seed(11)
    CASES[name]()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_training_over_shared_memory_equals_unsharded(name: str, world: int) -> None:
    run_ranks(run_case, world, name)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_training_over_gloo_equals_unsharded(name: str, world: int) -> None:
    run_ranks(run_case, world, name, env={"HP_TRANSPORT": "gloo"})
