"""What a sharded module does in the situations in which designs like this one go wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hp_comm.testing import run_ranks
from hp_fully_shard import (
    FullyShardError,
    HSDPModule,
    MixedPrecisionPolicy,
    ShardedStateError,
    UnsupportedError,
    fully_shard,
)
from hp_mesh import init_device_mesh


def line() -> object:
    """Return a mesh over all ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def two_layers(bias: bool = False) -> nn.Sequential:
    """Return two layers whose rows no number of ranks from 2 to 4 divides."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Linear(5, 7, bias=bias))


def shard_layers(model: nn.Sequential, **options: object) -> nn.Sequential:
    """Make every layer a unit, then the model."""
    for layer in (*model, model):
        fully_shard(layer, mesh=line(), **options)
    return model


class Branch(nn.Module):
    """Two layers; the second one runs only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, with_b: bool) -> torch.Tensor:
        return self.a(x) + self.b(x) if with_b else self.a(x)


def layer_used_on_some_ranks(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(Branch(), mesh=line())
    model(torch.ones(1, 4), rank != 0).sum().backward()
    grad = model.b.weight.grad.full_tensor()
    torch.testing.assert_close(grad, torch.full((4, 4), (world - 1) / world))
    model.zero_grad()
    model(torch.ones(1, 4), False).sum().backward()
    assert model.b.weight.grad is None
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
def test_layer_unused_on_one_rank_gets_the_mean_and_unused_everywhere_none(
    world: int, transport: str
) -> None:
    run_ranks(layer_used_on_some_ranks, world, env={"HP_TRANSPORT": transport})


def used_in_first_micro_batch_only(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(Branch(), mesh=line())
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4), True).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 4), False).sum().backward()
    torch.testing.assert_close(model.b.weight.grad.full_tensor(), torch.ones(4, 4))
    torch.testing.assert_close(model.a.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


def test_layer_used_in_first_micro_batch_only_keeps_its_gradient() -> None:
    run_ranks(used_in_first_micro_batch_only, 2)


def two_forwards_then_two_backwards(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()
    for net in (model, reference):
        first = net(torch.ones(1, 6)).sum()
        second = net(torch.full((1, 6), 2.0)).pow(2).sum()
        first.backward()
        second.backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_two_forwards_then_two_backwards_add_up() -> None:
    run_ranks(two_forwards_then_two_backwards, 2)


def exception_in_backward(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("a user's hook")

    hidden = model[0](torch.ones(1, 6))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError, match="user's hook"):
        model[1](hidden).sum().backward()
    hidden = model(torch.ones(1, 6))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError, match="user's hook"):
        hidden.sum().backward()
    model.zero_grad()
    for net in (model, reference):
        net(torch.ones(2, 6)).sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_exception_in_backward_leaves_nothing_behind() -> None:
    run_ranks(exception_in_backward, 2)


class Fragile(nn.Module):
    """A layer that raises when asked, after it saw its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
        y = self.layer(x)
        if fail:
            raise ArithmeticError("inside forward")
        return y


def exception_in_forward(rank: int, world: int) -> None:
    torch.manual_seed(1)
    model = fully_shard(Fragile(), mesh=line())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 6), False).sum().backward()
    with pytest.raises(ArithmeticError, match="inside forward"):
        model(torch.ones(1, 6), True)
    optimizer.step()
    with torch.no_grad():
        got = model(torch.ones(1, 6), False)
        weight, bias = (p.full_tensor() for p in model.parameters())
    torch.testing.assert_close(got, torch.ones(1, 6) @ weight.T + bias)


def test_weights_are_fresh_after_an_exception_in_forward() -> None:
    run_ranks(exception_in_forward, 2)


def evaluation_then_step(rank: int, world: int) -> None:
    model = shard_layers(two_layers())
    x = torch.ones(1, 6)
    with torch.no_grad():
        before = model(x)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(2.0)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before * 4.0)


def test_forward_sees_shards_changed_after_an_evaluation() -> None:
    run_ranks(evaluation_then_step, 2)


def state_dict_is_sharded_at_any_time(rank: int, world: int) -> None:
    model = shard_layers(two_layers())
    loss = model(torch.ones(1, 6)).sum()
    if rank == 0:  # reading is local: no other rank takes part
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    loss.backward()
    assert list(model.state_dict()) == ["0.weight", "1.weight"]


def test_state_dict_between_forward_and_backward_is_sharded() -> None:
    run_ranks(state_dict_is_sharded_at_any_time, 2)


def dtype_changed_after_sharding(rank: int, world: int) -> None:
    model = shard_layers(two_layers().to(torch.bfloat16))
    reference = two_layers().to(torch.bfloat16).to(torch.float32)
    model(torch.ones(1, 6, dtype=torch.bfloat16))
    model.to(torch.float32)
    for net in (model, reference):
        net(torch.ones(1, 6)).sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        assert sharded.dtype == torch.float32
        torch.testing.assert_close(sharded.full_tensor(), whole)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_model_converted_after_sharding_trains_in_the_new_type(transport: str) -> None:
    run_ranks(dtype_changed_after_sharding, 2, env={"HP_TRANSPORT": transport})


def meta_model(rank: int, world: int) -> None:
    with torch.device("meta"):
        model = two_layers()
    shard_layers(model)
    with pytest.raises(ShardedStateError, match=r"0\.weight|weight.*meta device.*to_empty"):
        model(torch.ones(1, 6))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    got = model(torch.ones(1, 6))
    torch.testing.assert_close(got, torch.full((1, 7), 6 * 0.5 * 5 * 0.5))


def test_meta_model_is_refused_until_it_has_values() -> None:
    run_ranks(meta_model, 2)


def explicit_unshard(rank: int, world: int) -> None:
    model = shard_layers(two_layers())
    reference = two_layers()
    handle = model[0].unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert not isinstance(model[0].weight, DTensor)
    torch.testing.assert_close(model[0].weight, reference[0].weight)
    model[0].reshard()
    assert isinstance(model[0].weight, DTensor)
    torch.testing.assert_close(model(torch.ones(1, 6)), reference(torch.ones(1, 6)))


def test_unshard_shows_full_parameters_until_reshard() -> None:
    run_ranks(explicit_unshard, 2)


def class_and_names(rank: int, world: int) -> None:
    model = two_layers()
    names = [name for name, _ in model.named_parameters()]
    assert fully_shard(model, mesh=line()) is model
    assert isinstance(model, HSDPModule)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model).__name__ == "HSDPSequential"
    assert isinstance(model[0:1], nn.Sequential)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    with pytest.raises(UnsupportedError, match="set_requires_all_reduce isn't supported"):
        model.set_requires_all_reduce(True)
    with pytest.raises(UnsupportedError, match="Copy the module before fully_shard"):
        __import__("copy").deepcopy(model)


def test_sharded_module_keeps_its_class_and_names() -> None:
    run_ranks(class_and_names, 2)


def different_seeds(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(FullyShardError, match=r"'0\.weight' differs .* ranks \[1\]"):
        fully_shard(model, mesh=line())
    assert [id(parameter) for parameter in model.parameters()] == before
    assert type(model) is nn.Sequential


def test_ranks_built_with_different_seeds_are_refused() -> None:
    run_ranks(different_seeds, 2)


def gradient_kept_by_a_hook(rank: int, world: int) -> None:
    kept: list[torch.Tensor] = []

    class Hooked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.register_hook(kept.append)
            return super().forward(x)

    torch.manual_seed(0)
    model = fully_shard(Hooked(6, 5, bias=False), mesh=line())
    model(torch.full((2, 6), float(rank + 1))).sum().backward()
    torch.testing.assert_close(kept[0], torch.full((5, 6), 2.0 * (rank + 1)))


def test_gradient_that_a_hook_keeps_is_not_changed() -> None:
    run_ranks(gradient_kept_by_a_hook, 2)


def edit_of_full_parameter_is_private(rank: int, world: int) -> None:
    torch.manual_seed(0)

    class Editing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if rank == 0:
                self.weight.data.zero_()
            return super().forward(x)

    reference = nn.Linear(6, 5, bias=False)
    torch.manual_seed(0)
    model = fully_shard(Editing(6, 5, bias=False), mesh=line())
    for _ in range(2):
        with torch.no_grad():
            got = model(torch.ones(1, 6))
            want = torch.zeros(1, 5) if rank == 0 else reference(torch.ones(1, 6))
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(model.weight.full_tensor(), reference.weight)


def test_edit_of_a_full_parameter_stays_on_its_rank() -> None:
    run_ranks(edit_of_full_parameter_is_private, 2)


def bf16_policy(rank: int, world: int) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    model = shard_layers(two_layers(), mp_policy=policy)
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    out = model(torch.ones(1, 6))
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32
    out.sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_policy_casts_inputs_outputs_and_gradients() -> None:
    run_ranks(bf16_policy, 2)


def small_terms_survive_accumulation(rank: int, world: int) -> None:
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=line(), mp_policy=policy)
    small = 2.0**-9
    for micro_batch in range(65):
        model.set_requires_gradient_sync(micro_batch == 64)
        model(torch.full((1, 4), small if micro_batch else 1.0)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 1.125))


def test_accumulation_adds_in_the_reduce_dtype() -> None:
    run_ranks(small_terms_survive_accumulation, 2)


def divide_factor(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=line())
    model.set_gradient_divide_factor(3.0)
    model(torch.full((2, 4), float(rank + 1))).sum().backward()
    want = sum(2.0 * (number + 1) for number in range(world)) / 3.0
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), want))


def test_gradient_divide_factor_replaces_the_mean() -> None:
    run_ranks(divide_factor, 2)


def ignored_parameter(rank: int, world: int) -> None:
    model = two_layers()
    kept = model[0].weight
    fully_shard(model, mesh=line(), ignored_params={kept})
    assert model[0].weight is kept
    assert isinstance(model[1].weight, DTensor)
    model(torch.ones(1, 6)).sum().backward()
    assert kept.grad is not None


def test_ignored_parameter_stays_whole() -> None:
    run_ranks(ignored_parameter, 2)


def first_forward_in_inference_mode(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()
    with torch.inference_mode():
        torch.testing.assert_close(model(torch.ones(1, 6)), reference(torch.ones(1, 6)))
    expect_same_gradients(model, reference)


def expect_same_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Run one backward on both and compare every gradient."""
    for net in (model, reference):
        net(torch.ones(2, 6)).sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_model_trains_after_a_first_forward_in_inference_mode(transport: str) -> None:
    run_ranks(first_forward_in_inference_mode, 2, env={"HP_TRANSPORT": transport})


def list_unit_as_root(rank: int, world: int) -> None:
    model, reference = two_layers(), two_layers()
    fully_shard(list(model), mesh=line())
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(1, 6)), reference(torch.ones(1, 6)))
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(2.0)
    expect_same_gradients(model, reference)


def test_list_unit_without_a_model_above_is_gathered_afresh() -> None:
    run_ranks(list_unit_as_root, 2)


def forward_without_backward(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()
    for net in (model, reference):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        net(torch.ones(1, 6)).sum().backward()
        net(torch.ones(1, 6))  # for a metric; nobody calls backward
        optimizer.step()
    torch.testing.assert_close(model(torch.ones(1, 6)), reference(torch.ones(1, 6)))


def test_step_after_a_forward_without_backward_leaves_nothing_stale() -> None:
    run_ranks(forward_without_backward, 2)


def load_at_any_time(rank: int, world: int, assign: bool) -> None:
    model, reference = fully_shard(two_layers(), mesh=line()), two_layers()
    model(torch.ones(1, 6))  # the root is full now
    doubled = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(doubled, assign=assign)
    reference.load_state_dict({name: v * 2 for name, v in reference.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, 6)), reference(torch.ones(1, 6)))


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_state_loaded_while_full_is_seen_by_the_next_forward(assign: bool) -> None:
    run_ranks(load_at_any_time, 2, assign)


def inner_units_after_a_broken_backward(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()
    model(torch.ones(1, 6)).sum().backward()  # the root has the tree

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError("a user's hook")

    hidden = model[0](torch.ones(1, 6))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError, match="user's hook"):
        model[1](hidden).sum().backward()
    model.zero_grad()
    for net in (model, reference):
        net[1](net[0](torch.ones(2, 6))).sum().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_inner_units_called_alone_train_on_after_a_broken_backward() -> None:
    run_ranks(inner_units_after_a_broken_backward, 2)


class Hiding(nn.Module):
    """Gives its result in an object in which nobody looks for tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> object:
        return torch.distributions.Normal(self.layer(x), 1.0)


def hidden_output(rank: int, world: int) -> None:
    model, reference = fully_shard(Hiding(), mesh=line()), Hiding()
    for net in (model, reference):
        net(torch.ones(2, 6)).log_prob(torch.ones(5)).mean().backward()
    for sharded, whole in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def test_gradients_through_an_output_that_hides_its_tensor_are_reduced() -> None:
    run_ranks(hidden_output, 2)


def optimizer_in_backward(rank: int, world: int) -> None:
    model = shard_layers(two_layers())
    seen: list[torch.Size] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    model(torch.ones(1, 6)).sum().backward()
    assert sorted(seen) == sorted(parameter.shape for parameter in model.parameters())


def test_hooks_after_accumulation_run_on_sharded_parameters() -> None:
    run_ranks(optimizer_in_backward, 2)


def zero_grad_while_accumulating(rank: int, world: int) -> None:
    model, reference = shard_layers(two_layers()), two_layers()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 6)).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    expect_same_gradients(model, reference)


def test_zero_grad_drops_what_was_accumulated() -> None:
    run_ranks(zero_grad_while_accumulating, 2)


def frozen_while_full(rank: int, world: int) -> None:
    model = fully_shard(two_layers(), mesh=line())
    model(torch.ones(1, 6))
    model[0].requires_grad_(False)  # the root is full: this is the full parameter
    for _ in range(2):
        model(torch.ones(1, 6)).sum().backward()
        assert model[0].weight.grad is None
        assert model[1].weight.grad is not None


def test_parameter_frozen_while_full_stays_frozen() -> None:
    run_ranks(frozen_while_full, 2)
