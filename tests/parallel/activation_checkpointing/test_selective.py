"""Selective activation checkpointing: bit for bit the run that keeps everything, with less memory and no new bytes."""

import gc
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import engine
from engine.config.sections import ActivationCheckpointingConfig
from engine.errors import ConfigError, EngineError
from engine.models.decoder import loss_sum
from engine.parallel.activation_checkpointing.blocks import find_operators, recompute_blocks, recomputed_in_part
from engine.parallel.activation_checkpointing.selective import SavedActivations, Selective
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.model.torch_checkpoint import CheckpointedRegion, recomputed, spread_checkpoints
from engine.parallel.tensor.layers.linear import ColumnLinear, RowLinear
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.planning.activation_memory import LiveStorages
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.models import take_rows
from tests.resumed_runs import own_rows
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Settings = dict[str, Any]

SAVES: dict[str, Settings] = {
    "default": {"mode": "selective"},
    "attention": {"mode": "selective", "save": ["attention", "batched matmul", "softmax", "aten.gelu"]},
    "nothing": {"mode": "selective", "save": []},
    "drawn": {"mode": "selective", "save": ["matmul", "norm", "dropout", "aten.bernoulli", "aten.native_dropout"]},
    "every": {"mode": "selective", "every": 2},
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "decoder": (lambda: models.decoder(layers=4, dropout=0.1), loss_sum),
    "gpt2": (lambda: models.gpt2(layers=4, dropout=0.1), None),
    "llama": (lambda: models.llama(layers=4), None),
    "t5": (lambda: models.t5(dropout=0.1), None),
}


def train(name: str, settings: Settings) -> tuple[Any, dict[Any, Any], dict[Any, Any]]:
    """Two steps: losses, norms and weights; what the second one sent and should have sent."""
    build, loss_fn = MODELS[name]
    first, second = models.batches_for(name, 16, 2)
    config = engine.load_config(settings, torch.distributed.get_world_size())
    with engine.initialize(build, config, loss_fn, take_rows(first, 0, config.micro)) as eng:
        reports = [eng.train_batch(own_rows(eng, first))]
        before = eng.sent
        reports.append(eng.train_batch(own_rows(eng, second)))
        sent = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.sent.since(before).rows()}
        planned = {(row.axis, row.label): (row.calls, row.bytes) for row in eng.plan.rank(eng.grid.rank).traffic}
        weights = {key: value.sum().item() for key, value in eng.full_state_dict().items()}
    return ([(r.loss, r.grad_norm) for r in reports], weights), sent, planned


def trains(name: str, settings: Settings, modes: list[Settings]) -> None:
    """Body of a rank: every mode gives what "none" gives, and sends it too; "every" and "full" make some sums again."""
    expected, plain, _ = train(name, settings)
    for mode in modes:
        found, sent, planned = train(name, settings | {"activation_checkpointing": mode})
        assert found == expected, mode
        assert sent == planned, mode
        if "every" not in mode and mode["mode"] != "full":
            assert sent == plain, mode


GRIDS: dict[str, Settings] = {
    "one": {},
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
}
CASES = [(name, grid) for name in ("decoder", "gpt2", "llama") for grid in GRIDS] + [("t5", "one"), ("t5", "pp2")]
SHORT = (("decoder", "pp2", ("drawn", "every")),)
"""Data ranks have no part in what a block saves; tensor ranks and t5 are in rows of ``test_covering_array``."""


@pytest.mark.parametrize(
    ("name", "grid", "saves"),
    [*SHORT, *(pytest.param(*case, tuple(SAVES), marks=pytest.mark.long) for case in CASES)],
    ids=str,
)
def test_what_is_kept_changes_no_bit_and_no_byte(
    run_ranks: RunRanks, name: str, grid: str, saves: tuple[str, ...]
) -> None:
    settings = config_for(GRIDS[grid].get("data", 1), 1, parallel={"data": 1} | GRIDS[grid])
    run_ranks(trains, prod(GRIDS[grid].values()), name, settings, [SAVES[kind] for kind in saves])


WAYS: dict[str, tuple[int, Settings]] = {
    "ZeRO 3": (2, config_for(2, 3)),
    "ZeRO 2 by microbatch": (2, config_for(2, 2, zero_optimization={"stage": 2, "reduce": "microbatch"})),
    "split backward": (2, config_for(1, 1, parallel={"data": 1, "pipeline": 2, "schedule": "zb-h1"})),
    "two stages a rank": (2, config_for(1, 1, parallel={"data": 1, "pipeline": 2, "schedule": "zb-v"})),
    "interleaved": (
        2, config_for(1, 1, parallel={"data": 1, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ),
    "split x tp": (4, config_for(1, 1, parallel={"data": 1, "pipeline": 2, "tensor": 2, "schedule": "zb-h1"})),
    "bf16 x tp": (2, config_for(1, 0, parallel={"data": 1, "tensor": 2}, bf16={"enabled": True})),
    "ZeRO 3 x tp": (4, config_for(2, 3, parallel={"data": 2, "tensor": 2})),
}  # fmt: skip


SHORT_WAYS = ("ZeRO 3",)
"""Schedules of several stages a rank are in rows of ``test_covering_array``."""


@pytest.mark.long
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way not in SHORT_WAYS)) for way in WAYS])
def test_every_way_of_running_keeps_the_same(run_ranks: RunRanks, way: str) -> None:
    ranks, settings = WAYS[way]
    run_ranks(trains, ranks, "decoder", settings, [SAVES["default"], SAVES["every"]])


def other_shapes(settings: Settings) -> None:
    """Body of a rank: evaluation, and a shorter batch than the example, which is probed while blocks recompute."""
    (batch,) = models.batches_for("decoder", 16, 1)
    short = {key: value[:, :8] for key, value in batch.items()}
    found = []
    for mode in ({"mode": "none"}, SAVES["default"]):
        changed = settings | {"activation_checkpointing": mode}
        with engine.initialize(MODELS["decoder"][0], changed, loss_sum, take_rows(batch, 0, 2)) as eng:
            reports = [eng.train_batch(short), eng.eval_batch(batch), eng.train_batch(batch)]
            found.append([report.loss for report in reports])
    assert found[0] == found[1]


@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, wide(2)])
def test_other_shapes_than_the_example(run_ranks: RunRanks, tensor: int) -> None:
    run_ranks(other_shapes, 2 * tensor, config_for(1, 0, parallel={"data": 1, "tensor": tensor, "pipeline": 2}))


def summed(axis: Any, mode: Settings) -> tuple[int, list[Tensor]]:
    """Body of a rank: sums of one forward and backward of two layers that share a width, and all gradients."""
    up, down = ColumnLinear(8, 16, axis=axis), RowLinear(16, 8, axis=axis)
    down.tensor_region = up.tensor_region
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(up, nn.ReLU(inplace=True), down, nn.LayerNorm(8), nn.Linear(8, 8))])
    model.blocks.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with torch.no_grad():  # ranks are threads, which share a generator
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).cos().view(parameter.shape))
    config = engine.load_config({"activation_checkpointing": mode}).activation_checkpointing
    patches = ForwardPatches()
    recompute_blocks(model, config, patches, axis)
    x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
    y = x
    for block in model.blocks:
        y = block(y)
    torch.autograd.backward(y.square().sum())
    patches.remove()
    labels = [call.label for call in axis.called]
    return labels.count("row outputs"), [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize(("mode", "sums"), [("none", 1), ("full", 2), ("selective", 1), ("nothing", 1), ("bias", 1)])
def test_a_sum_with_a_bias_is_made_once_and_kept(mode: str, sums: int) -> None:
    changes: Settings = {"nothing": {"save": []}, "bias": {"save": ["aten.add.Tensor"]}}
    settings = {"mode": mode} if mode not in changes else {"mode": "selective"} | changes[mode]
    expected = run_tensor_ranks(2, lambda axis: summed(axis, {"mode": "none"}))
    for (count, found), (_, plain) in zip(
        run_tensor_ranks(2, lambda axis: summed(axis, settings)), expected, strict=True
    ):
        assert count == sums
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


class Scattered(torch.autograd.Function):
    """A product that is summed and cut by rows, as under sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Any) -> Tensor:
        """[2 n, W] -> [n, W]."""
        ctx.axis = axis
        part: Tensor = axis.reduce_scatter(x.view(2, -1, x.shape[-1]), "row outputs")
        return part

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gathered."""
        return ctx.axis.all_gather(grad.contiguous(), "gradients").flatten(0, 1), None


def scattered(axis: Any, keeps: bool) -> tuple[int, Tensor, int]:
    """Body of a rank."""
    weight = torch.linspace(-1, 1, 16).cos().view(4, 4).requires_grad_()
    block = nn.Module()
    apply: Any = Scattered.apply
    block.forward = lambda x: apply(x @ weight, axis).tanh().square()
    config = ActivationCheckpointingConfig(mode="selective", save=("matmul",))
    started = list[SavedActivations]()
    forward = recomputed_in_part(block, Selective(find_operators(config), axis), started) if keeps else block.forward
    y = forward(torch.linspace(0, 1, 24).view(6, 4) * (axis.index + 1))
    kept = sum(outputs.bytes for outputs in started)
    torch.autograd.backward(y.sum())
    assert weight.grad is not None
    return [call.label for call in axis.called].count("row outputs"), weight.grad, kept


def test_a_scattered_sum_is_kept_in_place_of_the_product() -> None:
    plain = run_tensor_ranks(2, lambda axis: scattered(axis, keeps=False))
    for (count, gradient, kept), (_, expected, _) in zip(
        run_tensor_ranks(2, lambda axis: scattered(axis, keeps=True)), plain, strict=True
    ):
        assert count == 1 and kept == 3 * 4 * 4 and torch.equal(gradient, expected)


def test_the_models_own_switch_goes_first() -> None:
    model: Any = models.llama()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    config = engine.load_config({"activation_checkpointing": {"mode": "selective"}}).activation_checkpointing
    recompute_blocks(model, config, ForwardPatches())
    assert not any("forward" in vars(module) for module in model.modules())


# ------------------------------------------------------------------------------------------------ one block


class Block(nn.Module):
    """What is hard to keep: outputs written in place, a product that leaves the block, random numbers of operators."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(self.act(self.up(x)), 0.3)
        y = self.down(hidden)
        y += 0.5
        y = functional.dropout(y * torch.rand_like(y), 0.2)
        result: Tensor = self.out(y)
        return result


def gradients(block: Block, forward: Any, x: Tensor, after: Callable[[Tensor], Any] = lambda y: None) -> list[Tensor]:
    """Of one call, the input's first."""
    torch.manual_seed(4)
    given = x.clone().requires_grad_()
    y = forward(given)
    after(y)
    return list(torch.autograd.grad(y.square().sum(), [given, *block.parameters()]))


@pytest.mark.parametrize("save", [["matmul"], ["aten.addmm", "aten.rand_like", "aten.relu", "aten.mul.Tensor"], []])
def test_written_and_random_outputs_are_kept_as_they_were(save: list[str]) -> None:
    x, block = torch.randn(5, 8), Block()
    expected = gradients(block, block.forward, x)
    operators = find_operators(ActivationCheckpointingConfig(mode="selective", save=tuple(save)))
    started = list[SavedActivations]()
    found = gradients(block, recomputed_in_part(block, Selective(operators), started), x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert [kept.bytes for kept in started] == [0], "what was kept has gone with the backward"


def test_a_block_whose_product_is_its_output_may_be_written_outside() -> None:
    x, block = torch.randn(5, 8), Block()
    expected = gradients(block, block.forward, x, lambda y: y.mul_(2))
    selective = Selective(find_operators(ActivationCheckpointingConfig(mode="selective")))
    found = gradients(block, recomputed_in_part(block, selective), x, lambda y: y.mul_(2))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_second_backward_of_a_retained_graph_runs_everything_again() -> None:
    x, block = torch.randn(5, 8).requires_grad_(), Block()
    selective = Selective(find_operators(ActivationCheckpointingConfig(mode="selective")))
    y = recomputed_in_part(block, selective)(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first)


class Units(nn.Module):
    """A block of two equal units, which a stage recomputes one by one."""

    inside = False

    def __init__(self) -> None:
        super().__init__()
        self.regions = list[CheckpointedRegion]()
        self.units = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            square = partial(lambda unit, x: unit(x).square(), unit)
            run = recomputed(square, self.regions[-1]) if self.regions else square
            self.inside = True
            x = run(x)
            self.inside = False
        return x


def test_units_of_a_block_reuse_only_what_each_has_kept() -> None:
    torch.manual_seed(5)
    x, block = torch.randn(5, 8), Units()
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    selective = Selective(find_operators(ActivationCheckpointingConfig(mode="selective", save=("matmul",))))
    started = list[SavedActivations]()
    with spread_checkpoints(block):
        y = recomputed_in_part(block, selective, started)(x)
    assert [kept.bytes for kept in started] == [x.nbytes] * 2
    found = torch.autograd.grad(y.sum(), list(block.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Leaking(nn.Module):
    """Hands an output out of the block by another way than returning it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.up(x)
        return self.seen.tanh().square()


def test_an_output_that_is_written_behind_the_back_is_refused() -> None:
    block = Leaking()
    selective = Selective(find_operators(ActivationCheckpointingConfig(mode="selective")))
    y = recomputed_in_part(block, selective)(torch.randn(3, 8))
    assert block.seen is not None
    with torch.no_grad():
        block.seen.zero_()
    with pytest.raises(EngineError) as caught:
        torch.autograd.backward(y.sum())
    assert str(caught.value) == (
        "the output of aten.addmm.default, which activation_checkpointing keeps, was modified in place after its block "
        'had ended; leave this operator out of activation_checkpointing.save, or set the mode to "full".'
    )


# ------------------------------------------------------------------------------------------------ memory


def held(settings: Settings) -> int:
    """Bytes between forward and backward: what autograd saves outside blocks, their inputs, and what blocks keep."""
    model, sizes = models.decoder(layers=4), dict[int, int]()
    given = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def count(tree: Any) -> Any:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                sizes[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        return tree

    config = engine.load_config({"activation_checkpointing": settings}).activation_checkpointing
    started: list[SavedActivations] = []
    contexts = Selective.contexts

    def noted(self: Selective, kept: SavedActivations) -> Any:
        started.append(kept)
        return contexts(self, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Selective, "contexts", noted)
        patches = ForwardPatches()
        recompute_blocks(model, config, patches)
        for module in model.modules():
            if patches.around(module):
                module.register_forward_pre_hook(lambda module, args: count(args) and None)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved):
            logits = model(torch.arange(24).view(2, 12))
    assert logits.requires_grad
    return sum(sizes.values()) + sum(kept.bytes for kept in started)


def test_memory_lies_between_all_and_inputs_alone() -> None:
    none, default = held({"mode": "none"}), held({"mode": "selective"})
    attention, half = held({"mode": "selective", "save": ["attention"]}), held({"mode": "selective", "every": 2})
    full = held({"mode": "full"})
    print({"none": none, "selective": default, "attention": attention, "every 2": half, "full": full})
    assert none > default > attention > full
    assert none > half > full
    assert held({"mode": "selective", "save": []}) == full == held({"mode": "selective", "every": 1})


@pytest.mark.parametrize("settings", [{"mode": "selective"}, {"mode": "full"}])
def test_a_backward_gives_back_what_blocks_have_kept(settings: Settings) -> None:
    """Without a collection of garbage, which comes much later: cycles would hold the tensors of blocks until then."""
    model = models.decoder(layers=2)
    config = engine.load_config({"activation_checkpointing": settings}).activation_checkpointing
    recompute_blocks(model, config, ForwardPatches())
    tokens, left = torch.arange(24).view(2, 12), []
    gc.collect()
    gc.disable()
    try:
        with LiveStorages() as live:
            for _ in range(3):
                torch.autograd.backward(model(tokens).sum())
                for parameter in model.parameters():
                    parameter.grad = None
                left.append(live.bytes)
    finally:
        gc.enable()
    assert left[0] == left[1] == left[2] < live.peak / 10


# ------------------------------------------------------------------------------------------------ refusals


def refusal(settings: Settings) -> str:
    with pytest.raises(ConfigError) as caught:
        engine.load_config({"train_batch_size": 1, "activation_checkpointing": settings})
    return str(caught.value)


def test_what_a_config_cannot_mean_is_said_without_torch() -> None:
    at = "activation_checkpointing"
    assert refusal({"mode": "full", "every": 2}) == (
        f'{at}.every: given with mode "full"; set the mode to "selective", or leave every out.'
    )
    assert refusal({"save": ["matmul"]}) == (
        f'{at}.save: given with mode "none"; set the mode to "selective", or leave save out.'
    )
    assert refusal({"mode": "selective", "save": ["matmul"], "every": 2}) == (
        f"{at}.every: 2 together with save; give only save to keep operators of all blocks, or only every to "
        "recompute whole blocks."
    )
    assert refusal({"mode": "selective", "every": 0}).startswith(f"{at}.every: 0 is below 1; give a whole number")
    assert refusal({"mode": "selective", "save": ["matmull"]}) == (
        f'{at}.save: ["matmull"] contains "matmull", which is neither a kind of operator nor of the form aten.mm (did '
        'you mean \'matmul\'?); give a list of operators such as ["matmul", "attention", "aten.bmm"].'
    )
    assert "(kinds are matmul, attention, " in refusal({"mode": "selective", "save": ["xyz"]})
    assert refusal({"mode": "selective", "save": "matmul"}).startswith(f'{at}.save: "matmul" is text; give a list')


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"save": ["aten.admm"]},
            "activation_checkpointing.save holds 'aten.admm', which this version of torch does not have; did you mean "
            "'aten.addmm'?",
        ),
        (
            {"save": ["nowhere.xyz"]},
            "activation_checkpointing.save holds 'nowhere.xyz', which this version of torch does not have; name one "
            "that a profile of the model shows, such as aten.mm.",
        ),
        (
            {"save": ["aten.view"]},
            "activation_checkpointing.save holds 'aten.view', which returns or writes memory of its arguments and so "
            "has no output of its own to keep; leave it out.",
        ),
        (
            {"every": 5},
            "activation_checkpointing.every is 5, but the model has 2 blocks, so that none would be recomputed; give a "
            "smaller number, or leave activation_checkpointing out.",
        ),
    ],
)
def test_what_only_torch_or_the_model_knows_is_said_before_the_run(settings: Settings, sentence: str) -> None:
    config = {"train_batch_size": 2, "activation_checkpointing": {"mode": "selective"} | settings}
    with pytest.raises(ConfigError) as caught:
        engine.initialize(models.decoder(), config, loss_sum)
    assert str(caught.value) == sentence


def test_operators_by_name() -> None:
    aten: Any = torch.ops.aten
    found = find_operators(
        ActivationCheckpointingConfig(mode="selective", save=("matmul", "aten.gelu", "aten.sum.default"))
    )
    assert {aten.mm.default, aten.addmm.default, aten.gelu.default, aten.sum.default} <= found
    assert aten.sum.dim_IntList not in found and aten.mm.out not in found
