"""All stages, run one after the other, give what the uncut model gives."""

import copy
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.model.blocks import compiled_around
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.pipeline.partition.partition import Partition, make_cut, repartition, units_for_split
from engine.parallel.pipeline.runtime.stage import Stage
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.play import Gradients, Play, batches_of, whole
from tests.parallel.pipeline.zoo import CASES, Case, NoisyGlue, Own, run_own, tokens
from tests.parallel.pipeline.zoo_wide import WIDE
from tests.selection import wide


def assert_same(ours: Gradients, theirs: Gradients, exact: bool) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(float(grad.abs().max()) for grad in theirs.values() if grad is not None)
    for name, expected in theirs.items():
        got = ours[name]
        if expected is None:
            assert got is None, name
            continue
        assert got is not None, f"{name} has no gradient"
        if exact:
            assert torch.equal(got, expected), f"{name} differs by {float((got - expected).abs().max())}"
        else:
            # entries that are rounding noise only (key biases) have no relative precision
            floor = 1e-4 * largest
            assert float((got - expected).abs().max()) <= 2e-6 * max(float(expected.abs().max()), floor), name


@pytest.mark.parametrize("stages", [wide(2), 3, wide(4)])
@pytest.mark.parametrize("name", [wide(name) if number % 2 else name for number, name in enumerate(CASES)])
def test_stages_give_what_the_whole_model_gives(name: str, stages: int) -> None:
    case = CASES[name]
    model = case.build()
    batches = batches_of(case, 3)
    timeline = trace_model(model, lambda: case.run(model, batches[0]), stages=stages)
    cut = make_cut(timeline, stages)
    play = Play(case, model, cut)
    losses, gradients = play.train(timeline, batches)
    expected_losses, expected = whole(case, copy.deepcopy(model), batches)
    assert losses == expected_losses
    assert_same(gradients, expected, case.exact)
    if case.tier and stages == 4:
        assert case.tier in [plan.tier for plan in cut.stages]


def ready(name: str, stages: int, **options: Any) -> tuple[Case, nn.Module, list[Any], ModelTrace, Partition]:
    case = CASES[name]
    model = case.build()
    batches = batches_of(case, 3)
    timeline = trace_model(model, lambda: case.run(model, batches[0]), stages=stages)
    return case, model, batches, timeline, make_cut(timeline, stages, **options)


def check_play(play: Play, timeline: ModelTrace, model: nn.Module, batches: list[Any]) -> None:
    losses, gradients = play.train(timeline, batches)
    expected_losses, expected = whole(play.case, copy.deepcopy(model), batches)
    assert losses == expected_losses
    assert_same(gradients, expected, play.case.exact)


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", WIDE)
def test_many_architectures(name: str, stages: int) -> None:
    case = WIDE[name]
    model = case.build()
    batches = batches_of(case, 2)
    timeline = trace_model(model, lambda: case.run(model, batches[0]), stages=stages)
    check_play(Play(case, model, make_cut(timeline, stages)), timeline, model, batches)


@pytest.mark.parametrize(
    ("name", "split"),
    [("own", "blocks.3.down"), ("hybrid", "blocks.3.mix"), ("hybrid_sequential", "inner.3.up"), ("t5", "lm_head")],
)
def test_a_stage_may_begin_inside_a_block(name: str, split: str) -> None:
    case = CASES[name]
    model = case.build()
    batches = batches_of(case, 3)
    units = units_for_split(model, [split], 2)
    timeline = trace_model(model, lambda: case.run(model, batches[0]), units, stages=2)
    cut = make_cut(timeline, 2, [split])
    losses, gradients = Play(case, model, cut).train(timeline, batches)
    expected_losses, expected = whole(case, copy.deepcopy(model), batches)
    assert losses == expected_losses
    assert_same(gradients, expected, exact=False)  # a residual adds two gradients in another order


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["own", "t5", "x0", "gpt2", "checkpointed"])
def test_tier_two_gives_the_same_wherever_one_suffices(name: str, stages: int) -> None:
    _, model, batches, timeline, cut = ready(name, stages)
    cut = replace(cut, stages=tuple(replace(plan, tier=2) for plan in cut.stages))
    check_play(Play(CASES[name], model, cut), timeline, model, batches)


@pytest.mark.parametrize("name", ["own", "skips", wide("t5"), wide("mixtral"), "in_place"])
def test_one_model_runs_several_stages(name: str) -> None:
    case, model, batches, timeline, cut = ready(name, 4)
    check_play(Play(case, model, cut, ranks=[0, 1, 0, 1]), timeline, model, batches)
    check_play(Play(case, model, cut, ranks=[0, 1, 1, 0]), timeline, model, batches)
    check_play(Play(case, model, cut, ranks=[0, 0, 0, 0]), timeline, model, batches)


def test_one_stage_is_the_whole_model() -> None:
    case, model, batches, timeline, cut = ready("mixtral", 1)
    check_play(Play(case, model, cut), timeline, model, batches)


# ---- random numbers


class Reseeding:
    """What the engine does: each unit's exit seeds the generator by microbatch and position."""

    def __init__(self, model: nn.Module, run: Any, timeline: ModelTrace) -> None:
        self.run, self.calls, self.microbatch = run, 0, 0
        for unit in timeline.units:
            model.get_submodule(unit).register_forward_hook(self.reseed)

    def reseed(self, *_: Any) -> None:
        self.calls += 1
        torch.manual_seed(1000 * self.microbatch + self.calls)

    def start(self, microbatch: int) -> None:
        self.calls, self.microbatch = -1, microbatch
        self.reseed()


@pytest.mark.parametrize("stages", [2, 4])
def test_dropout_does_not_depend_on_the_cut(stages: int) -> None:
    build = NoisyGlue
    case = Case(build, run_own, tokens)
    model = build()
    batch = batches_of(case, 1)[0]
    timeline = trace_model(model, lambda: case.run(model, batch))
    cut = make_cut(timeline, stages)
    assert {plan.tier for plan in cut.stages} == {2}
    seeds: dict[int, Reseeding] = {}

    def run(model: nn.Module, batch: Any) -> Any:
        seeds[id(model)].start(5)
        return run_own(model, batch)

    def prepare(model: nn.Module) -> None:
        seeds[id(model)] = Reseeding(model, run, timeline)

    case = replace(case, run=run)
    reference = copy.deepcopy(model)
    prepare(reference)
    play = Play(case, model, cut, prepare=prepare)
    losses, gradients = play.train(timeline, [batch])
    expected_losses, expected = whole(case, reference, [batch])
    assert losses == expected_losses
    assert_same(gradients, expected, exact=True)


# ---- evaluation, other signatures


def test_evaluation_returns_what_the_program_returns() -> None:
    case, model, batches, timeline, cut = ready("llama", 3)
    play = Play(case, model, cut)
    ids = batches[0]["input_ids"][:, :5]
    play.case = replace(case, run=lambda model, batch: (model(input_ids=batch, use_cache=False), batch.numel()))
    with torch.no_grad():
        other = trace_model(model, lambda: play.case.run(model, ids))
        again = repartition(other, cut.boundaries, [plan.parameters for plan in cut.stages])
        (output, weight), moved = play.forward(other, again, ids)
        expected = model(input_ids=ids, use_cache=False)
    assert weight == 10 and torch.equal(output.logits, expected.logits) and type(output) is type(expected)
    assert not any(tensor.requires_grad for _, sent in moved for tensor in sent.values())
    # training goes on with the first signature on the same stages
    play.case = case
    check_play(play, timeline, model, batches)


def test_stages_before_the_last_have_no_result() -> None:
    case, model, batches, timeline, cut = ready("own", 2)
    play = Play(case, model, cut)
    outcome = play.stages[0].forward(timeline, cut.stages[0], lambda: case.run(play.models[0], batches[0]), {})
    assert outcome.result is None and list(outcome.sent) == list(cut.stages[0].sends)


def test_timelines_with_other_units_share_a_model() -> None:
    """Evaluation does not collect router logits, so its blocks stay closed."""
    case, model, batches, timeline, cut = ready("mixtral", 2)
    play = Play(case, model, cut)
    play.case = replace(case, run=lambda model, batch: model(**batch, use_cache=False, output_router_logits=False).loss)
    with torch.no_grad():
        other = trace_model(model, lambda: play.case.run(model, batches[0]))
        assert other.units != timeline.units
        again = repartition(other, cut.boundaries, [plan.parameters for plan in cut.stages])
        result, _ = play.forward(other, again, batches[0])
        assert torch.equal(result, play.case.run(model, batches[0]))
    play.case = case
    check_play(play, timeline, model, batches)


def test_a_mask_that_is_full_takes_another_path_through_free_code() -> None:
    case = WIDE["mixtral_padded"]
    model = case.build()
    batches = batches_of(case, 2)
    batches[1] = {**batches[1], "attention_mask": torch.ones_like(batches[1]["attention_mask"])}
    timeline = trace_model(model, lambda: case.run(model, batches[0]))
    cut = make_cut(timeline, 3)
    assert {plan.tier for plan in cut.stages} == {2}
    check_play(Play(case, model, cut), timeline, model, batches)


# ---- hooks, checkpointing, compiled modules


def test_hooks_run_around_absent_units_too() -> None:
    case, model, batches, timeline, cut = ready("own", 2)
    seen: list[str] = []
    play = Play(case, model, cut)
    for name in timeline.units:
        play.models[1].get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
        play.models[0].get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    play.forward(timeline, cut, batches[0])
    # stage 0 ends at the first call that is not its own, so that the hooks of its last unit run
    assert seen == [*list(timeline.units)[: len(cut.stages[0].calls)], *timeline.units]


def test_a_forward_put_on_a_unit_before_is_kept() -> None:
    case, model, batches, timeline, cut = ready("own", 2)
    calls = []

    def checkpointed(original: Any, x: Tensor) -> Any:
        calls.append(1)
        return checkpoint(original, x, use_reentrant=False)

    def prepare(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = partial(checkpointed, block.forward)

    play = Play(case, model, cut, prepare=prepare)
    before = [block.forward for play_model in play.models for block in play_model.blocks]  # type: ignore[union-attr]
    check_play(play, timeline, model, batches)
    assert len(calls) == 6 * len(batches)
    play.patches.remove()
    assert [block.forward for m in play.models for block in m.blocks] == before  # type: ignore[union-attr]


def test_closing_gives_the_model_back() -> None:
    case, model, batches, timeline, cut = ready("own", 1)
    patches = ForwardPatches()
    stage = Stage(model, torch.device("cpu"), patches)
    stage.forward(timeline, cut.stages[0], lambda: case.run(model, batches[0]), {})
    assert "forward" in vars(model.blocks[0])  # type: ignore[index]
    patches.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_stays_open_when_a_forward_is_left_in_a_checkpoint() -> None:
    case, model, batches, timeline, cut = ready("checkpointed", 3)
    play = Play(case, model, cut)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        play.forward(timeline, cut, batches[0])
        packed.clear()
        torch.ones(2, requires_grad=True).square()
        assert packed  # a checkpoint left open would have taken it


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own
@pytest.mark.parametrize("style", ["module.compile", "torch.compile"])
@pytest.mark.parametrize("name", ["own", "gated"])
def test_compiled_blocks(name: str, style: str) -> None:
    case, model, batches, _, _ = ready(name, 2)
    seen = []

    def compile_blocks(model: Any) -> None:
        for i, block in enumerate(model.blocks):
            if style == "module.compile":
                block.compile(backend="eager")
            else:
                model.blocks[i] = torch.compile(block, backend="eager")
            model.blocks[i].register_forward_hook(lambda *_: seen.append(1))

    reference = copy.deepcopy(model)
    losses, expected = whole(case, reference, batches)
    compile_blocks(model)
    timeline = trace_model(model, lambda: case.run(model, batches[0]))
    cut = make_cut(timeline, 2)
    stages = [Stage(model, torch.device("cpu"), ForwardPatches())] * 2
    play = Play.__new__(Play)
    play.case, play.cut, play.ranks, play.models, play.stages = case, cut, [0, 0], [model, model], stages
    seen.clear()
    got, gradients = play.train(timeline, batches)
    assert got == losses and len(seen) == len(batches) * (3 + 6)
    assert_same({k.replace("._orig_mod", ""): v for k, v in gradients.items()}, expected, exact=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own
@pytest.mark.parametrize("style", ["module.compile", "torch.compile"])
def test_a_compiled_block_runs_eagerly_where_a_stage_begins_inside_it(style: str) -> None:
    """Its compiled code would hide the values between its parts; the other blocks stay compiled."""
    case, inside = CASES["own"], "blocks.3._orig_mod.down" if style == "torch.compile" else "blocks.3.down"
    model, patches = case.build(), ForwardPatches()
    batches = batches_of(case, 3)
    losses, expected = whole(case, copy.deepcopy(model), batches)
    for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
        if style == "module.compile":
            block.compile(backend="eager")
        else:
            model.blocks[i] = torch.compile(block, backend="eager")  # type: ignore[operator, assignment]
    trace = trace_model(model, lambda: case.run(model, batches[0]), units_for_split(model, [inside], 2), stages=2)
    play = Play.__new__(Play)
    play.case, play.cut, play.ranks, play.models = case, make_cut(trace, 2, [inside]), [0, 0], [model, model]
    play.cut = replace(play.cut, stages=tuple(replace(plan, tier=2) for plan in play.cut.stages))
    play.stages = [Stage(model, torch.device("cpu"), patches)] * 2
    got, gradients = play.train(trace, batches)
    assert got == losses
    assert_same({k.replace("._orig_mod", ""): v for k, v in gradients.items()}, expected, exact=False)
    eager = [line for name in ("blocks.2", "blocks.3") for line in patches.explain(model, name) if "uncompiled" in line]
    assert eager == ["blocks.3: runs uncompiled, because stages are cut inside it"]
    patches.remove()
    assert len(compiled_around(model, ["blocks.3._orig_mod.down", "blocks.3.down"])) == 1


def test_user_code_cannot_swallow_the_stop() -> None:
    class Catching(Own):
        def trunk(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                try:
                    x = block(x)
                except Exception:
                    raise AssertionError("stopped by an exception") from None
            return x

    case = Case(Catching, run_own, tokens)
    model = Catching()
    batches = batches_of(case, 1)
    timeline = trace_model(model, lambda: case.run(model, batches[0]))
    check_play(Play(case, model, make_cut(timeline, 3)), timeline, model, batches)


def test_buffers_are_written_by_their_stage() -> None:
    case, model, batches, timeline, cut = ready("buffered", 3)
    play = Play(case, model, cut)
    check_play(play, timeline, model, batches)
    whole(case, model, batches)
    for name, buffer in model.named_buffers():
        stage = cut.stage_of_buffer(timeline, name)
        assert torch.equal(dict(play.models[stage].named_buffers())[name], buffer), name


# ---- other paths than the probe's


class Fickle(Own):
    """Takes another way when told to."""

    other = ""

    def trunk(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.other == "skip" and i == 1:
                continue
            y = block(x)
            if self.other == "more" and i == 1:
                y = y * 1.0
            if self.other == "early" and i == 3:
                break
            x = x + y if self.gate and not (self.other == "less" and i == 1) else y
        return x

    gate = False


class FickleGlue(Fickle):
    gate = True


@pytest.mark.parametrize(
    ("kind", "other", "stage", "message"),
    [
        (Fickle, "skip", 0, "the forward calls unit 'blocks.2', but the recorded forward has unit 'blocks.1'"),
        (Fickle, "early", 1, "the forward calls unit 'norm', but the recorded forward has unit 'blocks.4' there; let"),
        (FickleGlue, "skip", 0, "the forward calls unit 'blocks.2', but the recorded forward has unit 'blocks.1'"),
        (FickleGlue, "more", 0, f"the forward reaches mul at {__file__}:"),
        (FickleGlue, "less", 0, "the forward reaches unit 'blocks.2', but the recorded forward has add at "),
    ],
)
def test_another_path_is_caught_by_name(kind: Any, other: str, stage: int, message: str) -> None:
    case = Case(kind, run_own, tokens)
    model = kind()
    batch = batches_of(case, 1)[0]
    timeline = trace_model(model, lambda: case.run(model, batch))
    cut = make_cut(timeline, 2)
    play = Play(case, model, cut)
    plan = cut.stages[stage]
    received = {n: torch.zeros(timeline.values[n].shape) for n in plan.receives}
    play.models[stage].other = other  # type: ignore[assignment]
    with pytest.raises(EngineError, match="^" + re.escape(message)):
        play.stages[stage].forward(timeline, plan, lambda: case.run(play.models[stage], batch), received)
    play.models[stage].other = ""  # type: ignore[assignment]
    play.stages[stage].forward(timeline, plan, lambda: case.run(play.models[stage], batch), received)


class Routed(Own):
    """Reads a tensor of the first stage in the last one, if the batch says so."""

    def trunk(self, x: Tensor) -> Tensor:
        first, positive = x, x.sum(-1, keepdim=True) > 0
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 3 and self.ids[0, 0] == 1:
                x = x * 2
            if i == 3 and self.ids[0, 0] == 2:
                x = x + first
            if i == 3 and self.ids[0, 0] == 3:
                x = x * positive  # a placeholder of booleans is False, not NaN
        return x

    def forward(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return super().forward(ids)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_content_may_choose_a_path_only_among_tensors_of_the_stage(number: int) -> None:
    case, model = Case(Routed, run_own, tokens), Routed()
    batches = batches_of(case, 2)
    for batch, first in zip(batches, (0, number), strict=True):
        batch[0, 0] = first
    timeline = trace_model(model, lambda: case.run(model, batches[0]))
    play = Play(case, model, make_cut(timeline, 2))
    if number == 1:
        return check_play(play, timeline, model, batches)
    with pytest.raises(EngineError, match=r"^the forward gives unit 'blocks.4' a tensor of another pipeline stage, wh"):
        play.train(timeline, batches)


def test_a_program_that_ends_early() -> None:
    case, model, _, timeline, cut = ready("own", 2)
    play = Play(case, model, cut)
    with pytest.raises(EngineError, match=r"^the forward ended before the output of unit 'blocks.2', but the recorded"):
        play.stages[0].forward(timeline, cut.stages[0], lambda: None, {})
    received = {n: torch.zeros(timeline.values[n].shape) for n in cut.stages[1].receives}
    with pytest.raises(EngineError, match=r"^the forward ended before a call of unit 'embed', but the recorded"):
        play.stages[1].forward(timeline, cut.stages[1], lambda: None, received)


def test_shapes_are_checked_where_values_travel() -> None:
    case, model, batches, timeline, cut = ready("own", 2)
    play = Play(case, model, cut)
    shorter = batches[0][:, :4]
    with pytest.raises(
        EngineError,
        match=r"^the output of unit 'blocks.2' is sent as torch.float32 \(2, 3, 8\), but is torch.float32",
    ):
        play.stages[0].forward(timeline, cut.stages[0], lambda: case.run(play.models[0], shorter), {})
    plan = cut.stages[1]
    (number,) = plan.receives
    with pytest.raises(EngineError, match=r"^the output of unit 'blocks.2' is received as torch.float64 \(1,\)"):
        play.stages[1].forward(timeline, plan, lambda: None, {number: torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(EngineError, match=rf"got tensors for the values \[\] in .* the values \[{number}\]; pass"):
        play.stages[1].forward(timeline, plan, lambda: None, {})


@pytest.mark.long
def test_a_model_in_use_can_be_probed_again() -> None:
    """Another signature comes up in the middle of training, on a rank that holds one stage."""
    case, model, batches, timeline, cut = ready("mixtral", 2)
    play = Play(case, model, cut)
    play.train(timeline, batches)
    shorter = {name: tensor[:, :5] for name, tensor in batches[0].items()}
    expected = trace_model(model, lambda: case.run(model, shorter))
    for held in play.models:
        again = trace_model(held, lambda held=held: case.run(held, shorter))  # type: ignore[misc]
        assert again.values == expected.values and [c.unit for c in again.calls] == [c.unit for c in expected.calls]
    check = Play(case, model, repartition(expected, cut.boundaries))
    check_play(check, expected, model, [shorter])
    losses, _ = play.train(timeline, batches)
    assert losses == whole(case, copy.deepcopy(model), batches)[0]


@pytest.mark.parametrize("name", ["own", "gated", "skips"])
def test_backward_hooks_of_modules(name: str) -> None:
    case, model, batches, timeline, _ = ready(name, 2)
    fired: list[str] = []

    for block in timeline.blocks:
        model.get_submodule(block).register_full_backward_hook(lambda *_, block=block: fired.append(block))
    losses, expected = whole(case, copy.deepcopy(model), batches)
    fired.clear()
    timeline = trace_model(model, lambda: case.run(model, batches[0]))
    cut = make_cut(timeline, 3)
    play = Play(case, model, cut)
    got, gradients = play.train(timeline, batches)
    assert got == losses
    assert_same(gradients, expected, case.exact)
    # what travels is what forward returned, before torch wraps it for the hook of the module
    ends = {timeline.calls[max(plan.calls)].unit for plan in cut.stages[:-1]}
    assert set(timeline.blocks) - ends <= set(fired)
