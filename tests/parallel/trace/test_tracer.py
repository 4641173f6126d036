"""What a probe sees, what it leaves alone and what it refuses."""

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.errors import PlanError
from engine.parallel.model.placeholders import placeholder, replace_absent
from engine.parallel.trace.model_trace import Constant, FreeTensor, FromValue, ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.play import batches_of
from tests.parallel.pipeline.zoo import (
    CASES,
    LENGTH,
    ROWS,
    VOCABULARY,
    WIDTH,
    Block,
    Buffered,
    NoisyGlue,
    Own,
    SharedByBlocks,
    SharedByGlue,
    Tied,
    run_own,
)
from tests.selection import wide

IDS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % VOCABULARY


def probe_own(model: nn.Module, **options: Any) -> ModelTrace:
    return trace_model(model, lambda: run_own(model, IDS), **options)


def outline(timeline: ModelTrace) -> list[Any]:
    """Everything but the specs and constants, which compare by identity."""
    calls = [(c.unit, c.event, c.inputs, c.parameters, c.flops, c.writes, c.starts_block) for c in timeline.calls]
    glue = [(g.name, g.event, g.makes, g.writes, g.random) for g in timeline.glue]
    return [timeline.values, calls, glue, timeline.targets, timeline.read_by_glue, dict(timeline.parameter_bytes)]


# ---- what it sees


def test_calls_glue_and_values() -> None:
    timeline = probe_own(Own(layers=2))
    assert [call.unit for call in timeline.calls] == ["embed", "blocks.0", "blocks.1", "norm", "head"]
    assert [glue.name for glue in timeline.glue] == ["flatten", "cross_entropy"]
    assert [value.shape for value in timeline.values] == [
        *[(ROWS, LENGTH - 1, WIDTH)] * 4, (ROWS, LENGTH - 1, VOCABULARY), (ROWS * (LENGTH - 1), VOCABULARY), (),
    ]  # fmt: skip
    assert timeline.targets == (6,)
    assert [call.event for call in timeline.calls] == [0, 1, 2, 3, 4]
    assert [glue.event for glue in timeline.glue] == [5, 6]
    assert timeline.values[1].inputs == (0,)
    assert timeline.read_by_glue == ()
    rows = ROWS * (LENGTH - 1)
    assert [call.flops for call in timeline.calls] == [
        0, *[2 * 2 * rows * WIDTH * 2 * WIDTH] * 2, 0, 2 * rows * WIDTH * VOCABULARY,
    ]  # fmt: skip
    assert timeline.blocks == ("blocks.0", "blocks.1")
    assert timeline.starts == (1, 2)


def test_the_place_of_glue_is_the_users_line() -> None:
    timeline = probe_own(Own(layers=2))
    assert re.fullmatch(r".*zoo\.py:\d+", timeline.glue[1].place)


def test_parameters_read_by_glue_are_listed_and_counted() -> None:
    timeline = probe_own(Tied(layers=2))
    assert timeline.read_by_glue == ("embed.weight",)
    head = next(glue for glue in timeline.glue if glue.name == "linear")
    assert head.flops == 2 * ROWS * (LENGTH - 1) * WIDTH * VOCABULARY
    assert timeline.parameter_bytes["embed.weight"] == VOCABULARY * WIDTH * 4


@pytest.mark.parametrize(
    "name", ["decoder", "own", "tied", "skips", "shared_by_blocks", "llama", *map(wide, ("t5", "mixtral", "bert"))]
)
def test_meta_and_absent_models_give_the_same_timeline(name: str) -> None:
    case = CASES[name]
    batch = batches_of(case, 1)[0]
    model = case.build()
    expected = outline(trace_model(model, lambda: case.run(model, batch)))
    absent_model = copy.deepcopy(model)
    replace_absent(absent_model, ())
    assert outline(trace_model(absent_model, lambda: case.run(absent_model, batch))) == expected
    with torch.device("meta"):
        meta = case.build()
    assert outline(trace_model(meta, lambda: case.run(meta, batch))) == expected


def test_a_batch_on_meta_will_do() -> None:
    with torch.device("meta"):
        model, ids = Own(), torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    assert outline(trace_model(model, lambda: run_own(model, ids))) == outline(probe_own(Own()))


def test_gradients_flow_only_in_grad_mode_and_from_what_is_trainable() -> None:
    case = CASES["frozen_start"]
    model = case.build()
    batch = batches_of(case, 1)[0]
    with_grad = trace_model(model, lambda: case.run(model, batch))
    assert [value.grad for value in with_grad.values[:6]] == [False] * 4 + [True] * 2
    with torch.no_grad():
        without = trace_model(model, lambda: case.run(model, batch))
    assert not any(value.grad for value in without.values)
    replace_absent(model, ())  # what was frozen stays known
    assert outline(trace_model(model, lambda: case.run(model, batch))) == outline(with_grad)


def test_the_result_says_what_another_rank_must_know() -> None:
    model = Own(layers=2)

    def program() -> Any:
        logits = model(IDS)
        return {"logits": logits, "loss": logits.sum(), "mask": IDS > 3, "weight": 7.0}

    timeline = trace_model(model, program)
    logits, loss, mask, weight = timeline.result.leaves
    assert isinstance(logits, FromValue) and isinstance(loss, FromValue)
    assert timeline.values[logits.value].shape == (ROWS, LENGTH, VOCABULARY)
    assert timeline.targets == (logits.value, loss.value)
    assert mask == FreeTensor((ROWS, LENGTH), torch.bool)
    assert weight == Constant(7.0)


def test_values_answer_for_shape_type_gradient_and_device() -> None:
    seen = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append((output.requires_grad, tuple(output.shape), output.dtype, output.device.type, output.is_meta))

    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Own(layers=2)
        model.blocks[0].register_forward_hook(look)
        probe_own(model)
    assert seen == [(True, (ROWS, LENGTH - 1, WIDTH), torch.float32, "cpu", False)] * 2


def test_a_unit_that_leaks_is_opened_and_blocks_still_start_where_they_did() -> None:
    timeline = probe_own(SharedByBlocks(layers=3))
    assert "blocks.0.own" in timeline.units and "blocks.0" not in timeline.units
    assert [timeline.calls[index].unit for index in timeline.starts] == [f"blocks.{i}.own" for i in range(3)]


def test_chains_inside_chains_are_used_where_there_are_too_few_blocks() -> None:
    inner = [nn.Sequential(Block(), Block()) for _ in range(2)]
    model = nn.Sequential(*inner)
    x = torch.randn(2, WIDTH)
    assert trace_model(model, lambda: model(x).sum()).blocks == ("0", "1")
    assert trace_model(model, lambda: model(x).sum(), stages=3).blocks == ("0.0", "0.1", "1.0", "1.1")


# ---- what it leaves alone


def test_nothing_is_changed() -> None:
    model = Buffered()
    model.blocks[0].register_forward_hook(lambda module, args, out: setattr(module, "calls", 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [dict(vars(module)) for module in model.modules()]
    random_before, python_before = torch.get_rng_state(), random.getstate()
    apply = torch.autograd.Function.__dict__["apply"]
    trace_model(model, lambda: (random.random(), torch.rand(3), run_own(model, IDS))[-1])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), random_before) and random.getstate() == python_before
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_is_changed_by_a_program_that_fails() -> None:
    model = Own(layers=2)
    with pytest.raises(ZeroDivisionError):
        trace_model(model, lambda: (model(IDS), 1 / 0))
    assert "forward" not in vars(model.blocks[0])


def test_modes_are_kept() -> None:
    model = NoisyGlue()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    probe_own(model)
    assert [module.training for module in model.modules()] == modes


def test_an_absent_tensor_takes_no_memory_and_is_nan() -> None:
    tensor = placeholder((1000, 1000), torch.float32, torch.device("cpu"))
    assert tensor.untyped_storage().nbytes() == 4 and bool(tensor.isnan().all())
    assert not placeholder((3,), torch.int64, torch.device("cpu")).any()


def test_ties_are_found_by_identity_when_made_absent() -> None:
    model = CASES["nano"].build()
    replace_absent(model, {"lm_head.weight"})
    assert not model.wte.weight.isnan().any()  # type: ignore[union-attr, operator]
    assert model.wpe.weight.isnan().all()  # type: ignore[union-attr, operator]


def test_a_meta_model_made_absent_lies_on_the_device() -> None:
    with torch.device("meta"):
        model = CASES["nano"].build()
    head: Any = model.lm_head
    replace_absent(model, {"wpe.weight"})
    assert head.weight.device.type == "cpu" and head.weight is model.wte.weight  # type: ignore[union-attr]
    assert model.wpe.weight.is_meta  # type: ignore[union-attr]


# ---- what it refuses


class Trunk(Own):
    """Runs ``middle`` between its blocks."""

    def __init__(self, middle: Callable[["Trunk", Tensor], Tensor]) -> None:
        super().__init__(layers=4)
        self.middle = [middle]

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.middle[0](self, block(x))
        return x


def branch(model: Trunk, x: Tensor) -> Tensor:
    return x * 2 if x.mean() > 0 else x


def read_item(model: Trunk, x: Tensor) -> Tensor:
    return x * float(x.norm())


def select(model: Trunk, x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def choose_by_shape(model: Trunk, x: Tensor) -> Tensor:
    return 2 * x if len(x[x > 0]) else x


def differentiate(model: Trunk, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(x.sum(), x)[0]


def write_parameter(model: Trunk, x: Tensor) -> Tensor:
    model.embed.weight.data.mul_(x.detach().mean())
    return x


HERE = re.escape(__file__)


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (branch, rf"{HERE}:\d+ reads the content of a tensor on the host \(__bool__\) between units, where only one"),
        (read_item, rf"{HERE}:\d+ reads the content of a tensor on the host \(__float__\) between units"),
        (
            choose_by_shape,
            rf"{HERE}:\d+ chooses the path of the forward by a shape that depends on content: with another",
        ),
        (differentiate, rf"{HERE}:\d+ differentiates \(grad\) between units, where the graph spans several stages"),
        (write_parameter, rf"{HERE}:\d+ writes parameter 'embed.weight' in place \(mul_\) between units"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_glue_that_no_stage_can_do_alone_is_refused(middle: Any, message: str) -> None:
    with pytest.raises(PlanError, match="^" + message):
        probe_own(Trunk(middle))


def test_a_selection_between_units_is_recorded() -> None:
    assert probe_own(Trunk(select)).glue


def test_a_read_on_the_host_inside_a_block_is_the_blocks_own_affair() -> None:
    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.mean() > 0 else super().forward(-x)

    model = Own(layers=1)
    model.blocks = nn.ModuleList(Reading() for _ in range(3))
    assert len(probe_own(model).starts) == 3


class Leaking(nn.Linear):
    """Has no parts that could be opened."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.kept = out * 2
        return out


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Returning(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Holder(super().forward(x))


def chain(kind: type[nn.Module], step: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Callable[[], Any]]:
    model = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3))
    x = torch.randn(2, WIDTH)

    def program() -> Tensor:
        y = x
        for block in model:
            y = step(block, y)
        return y.sum()

    return model, program


def test_a_leak_that_opening_cannot_cure() -> None:
    model, program = chain(Leaking, lambda block, x: block(x) + block.kept)
    with pytest.raises(
        PlanError,
        match=rf"^add at {HERE}:\d+ reads a tensor that unit '0' made and did not return, so no stage can send it",
    ):
        trace_model(model, program)


def test_an_object_that_hides_tensors() -> None:
    model, program = chain(Returning, lambda block, x: block(x).tensor)
    with pytest.raises(PlanError, match=r"^unit '0' returns a Holder that holds tensors of the model and is not a py"):
        trace_model(model, program)
    own = Own(layers=2)
    with pytest.raises(PlanError, match=r"^the program returns a Holder that holds tensors of the model"):
        trace_model(own, lambda: (Holder(own(IDS)), own(IDS).sum()))


def test_a_loss_without_parameters() -> None:
    model = Own(layers=2)
    with pytest.raises(PlanError, match=r"^nothing that the forward and the loss returned depends on a parameter"):
        trace_model(model, lambda: (model(IDS), IDS.float().sum())[1])


class Hiding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        out: Tensor = block(x)
        return out


def test_a_unit_called_inside_a_function() -> None:
    model, program = chain(nn.Linear, lambda block, x: F.relu(Hiding.apply(x, block)))  # type: ignore[no-untyped-call]
    with pytest.raises(PlanError, match=r"^unit '0' is called inside an autograd.Function, which hides what it reads"):
        trace_model(model, program)


def test_the_users_own_mistake_comes_through() -> None:
    model = Own(layers=2)
    with pytest.raises(RuntimeError, match="shape"):
        trace_model(model, lambda: model(IDS) @ torch.zeros(3, 3))


def test_deepcopy_of_a_shared_dict_model_is_its_own() -> None:
    model = SharedByGlue()
    assert copy.deepcopy(model).shared is not model.shared
