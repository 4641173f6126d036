"""Loops of one's own over a pipeline: a forward runs all stages, its backward runs them back, as torch does alone."""

import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.step.pipeline_call import PipelineCall
from tests import models
from tests.engine.step.test_user_loop import (
    CLIP,
    LOOPS,
    ROWS,
    Loop,
    RunRanks,
    Trained,
    data,
    differentiate,
    differs,
    in_one_process,
    loss_of,
    settings,
)
from tests.selection import wide

PP2 = {"data": 1, "pipeline": 2}
ONCE: dict[str, Loop] = {name: loop for name, loop in LOOPS.items() if name != "two losses"}
"""Loops in which each forward has one backward."""


def unused(forward: Any, backward: Any, ids: Tensor) -> None:
    """A forward without a backward, one that needs no gradient, and one of other rows come between."""
    dropped = forward(ids[:1])
    with torch.no_grad():
        before = forward(ids)
    logits = forward(ids)
    assert torch.equal(before, logits) and dropped.requires_grad and not before.requires_grad
    logits.mul_(0.5)  # an output may be written into
    backward(loss_of(2 * logits, ids))


def frozen() -> nn.Module:
    """A decoder whose first stage trains nothing."""
    model: Any = models.decoder(layers=4)
    for part in (model.tokens, model.positions, *model.blocks[:2]):
        part.requires_grad_(False)
    return model  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "plain": models.decoder, "deep": partial(models.decoder, layers=4), "tied": partial(models.decoder, tied=True),
    "repeated": models.repeated, "frozen": frozen,
}  # fmt: skip


def trained(config: dict[str, Any], loop: Loop, make: Callable[[], nn.Module], rows: int | None) -> Trained:
    """The loop on an engine; weights on rank 0."""
    reports = []
    with engine.initialize(make(), config, loss_of, example_batch=data(1)[0]) as eng:
        eng.open_pipeline(rows)
        for batch in data(eng.grid.dp):
            loop(eng, eng.backward, batch.chunk(eng.grid.dp)[eng.grid.coord().dp])
            report = eng.step()
            assert report is not None
            reports.append(report)
        weights = eng.full_state_dict()
    return Trained([r.grad_norm for r in reports], weights, [r.loss for r in reports])


def all_loops(config: dict[str, Any], model: str, rows: int | None, loops: list[str]) -> dict[str, str]:
    """Body of a rank: what differs from one process, on rank 0."""
    found, dp, make = {}, config["parallel"].get("data", 1), MAKERS[model]
    for name in loops:
        run = trained(config, (ONCE | {"unused": unused})[name], make, rows)
        if run.weights:
            assert min(run.norms) > CLIP and not any(map(math.isnan, run.losses)), "clipping must be active"
            found[name] = differs(run, in_one_process((ONCE | {"unused": unused})[name], dp, make))
    return found


CASES = [
    pytest.param(PP2, 0, "plain", None, id="pp2"),
    wide(PP2, 1, "tied", None, id="pp2-tied"),
    wide({"data": 1, "pipeline": 2, "tensor": 2}, 0, "plain", 2, id="tp2-pp2-parts"),
    wide({"data": 2, "pipeline": 2}, 1, "repeated", 2, id="dp2-pp2-zero1-repeated-parts"),
    wide({"data": 2, "pipeline": 2}, {"stage": 2, "reduce": "microbatch"}, "plain", None, id="dp2-pp2-zero2"),
    wide({"data": 2, "pipeline": 2}, 3, "plain", 1, id="dp2-pp2-zero3-parts"),
    wide(PP2 | {"schedule": "interleaved", "virtual_stages": 2}, 0, "deep", 2, id="interleaved-parts"),
    wide(PP2 | {"schedule": "zb-v"}, 1, "deep", 2, id="zb-v-parts"),
    wide({"data": 1, "pipeline": 4}, 0, "deep", 1, id="pp4-parts"),
    wide(PP2, 0, "frozen", 2, id="frozen"),
]


@pytest.mark.parametrize(("grid", "stage", "model", "rows"), CASES)
def test_every_loop_trains_as_torch_in_one_process(
    grid: dict[str, Any], stage: Any, model: str, rows: int | None, run_ranks: RunRanks
) -> None:
    world = math.prod(size for size in grid.values() if isinstance(size, int)) // grid.get("virtual_stages", 1)
    loops = [*ONCE, "unused"]
    found = run_ranks(all_loops, world, settings(grid, stage), model, rows, loops, seconds=300.0)[0]
    assert found == dict.fromkeys(loops, "")


def narrow(more: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Body of a rank: norms of the loop ``summed``, and those of fp32."""
    runs = [trained(settings(PP2, 0, **each), ONCE["summed"], models.decoder, 2) for each in (more, {})]
    return runs[0].norms, runs[1].norms


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "exact"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, 2e-2),
        ({"bf16": {"enabled": True}}, 5e-2),
        ({"activation_checkpointing": {"mode": "full"}}, 1e-6),
    ],
    ids=["fp16", "bf16", "recomputed"],
)
def test_a_loss_scale_narrow_weights_and_recomputation(more: dict[str, Any], exact: float, run_ranks: RunRanks) -> None:
    (found, wide_norms), other = run_ranks(narrow, 2, more)
    assert found == pytest.approx(wide_norms, rel=exact) and other == (found, wide_norms)


def kept() -> tuple[int, int, bool]:
    """Body of a rank: bytes sent by a forward over pp, by label; whether a dropped call is forgotten."""
    with engine.initialize(models.decoder(), settings(PP2, 0), loss_of, example_batch=data(1)[0]) as eng:
        eng.open_pipeline()
        before = eng.sent
        logits = eng(data(1)[0])
        rows = eng.sent.since(before).rows()
        outputs = sum(row.bytes for row in rows if row.label == "outputs")
        calls = sum(row.calls for row in rows if row.label == "outputs")
        assert any(isinstance(each, PipelineCall) for each in gc.get_objects()), "it waits for a backward"
        del logits
        return outputs, calls, not any(isinstance(each, PipelineCall) for each in gc.get_objects())


def test_outputs_are_sent_once_to_each_other_stage_and_a_dropped_call_is_forgotten(run_ranks: RunRanks) -> None:
    logits = 4 * ROWS * models.LENGTH * models.VOCABULARY
    first, last = run_ranks(kept, 2)
    assert first == (0, 0, True) and last == (logits, 1, True)


class WithLoss(nn.Module):
    """A model that returns its loss beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.decoder()

    def forward(self, ids: Tensor) -> Any:
        logits = self.inner(ids)
        return {"loss": loss_of(logits, ids), "logits": logits, "tokens": ids.numel()}


def mistakes() -> list[str]:
    """Body of a rank: what the engine says, and that it goes on afterwards."""
    ids, said = data(1)[0], []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(engine.EngineError) as caught:
            call()
        said.append(str(caught.value))

    with engine.initialize(WithLoss(), settings(PP2, 0), example_batch=ids) as eng:
        refused(lambda: eng(ids))
        eng.open_pipeline()
        refused(lambda: differentiate(eng(ids)["loss"]))
        refused(lambda: eng.scale(eng(ids)["loss"]))
        refused(lambda: eng.backward(eng(ids)["logits"].detach().sum()))
        loss = eng(ids)["loss"]
        eng.backward(loss, retain_graph=True)
        refused(lambda: eng.backward(loss))
        refused(lambda: eng(torch.zeros(1, requires_grad=True) + ids))
        refused(eng.step)
        eng.open_pipeline(2)
        refused(lambda: eng(ids))
        eng.open_pipeline()
        refused(lambda: eng(ids[: 3 + eng.grid.rank]))
        found, late = eng(ids), eng(ids)["loss"]
        eng.backward(found["loss"])
        report = eng.step()
        assert report is not None and found["tokens"] == ids.numel()
        said.append(f"{report.loss:.6f} {report.grad_norm:.4f}")
        refused(lambda: eng.backward(late))
    return said


def test_mistakes_are_sentences_on_every_stage(run_ranks: RunRanks) -> None:
    first, second = run_ranks(mistakes, 2)
    assert first == second
    model = models.decoder()
    loss = loss_of(model(data(1)[0]), data(1)[0])
    differentiate(loss)
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    expected = [
        "eng(batch) with parallel.pipeline 2: forwards and backwards of all stages are one schedule",
        "loss.backward() was called with parallel.pipeline 2, where it reaches the outputs and not the stages",
        "scale(loss) was called with parallel.pipeline 2: loss.backward() ends at the outputs and does not reach the "
        "stages",
        "the loss does not depend on any trainable parameter",
        "backward was called twice through one forward with parallel.pipeline 2, where stages keep their",
        "batch requires a gradient and was computed from other tensors, but with parallel.pipeline 2 a backward",
        "step() before backward()",
        "the model returns a number, such as the mean of a loss, for a microbatch, but outputs of microbatches are",
        "rank 0 and rank 1 were given different batches; all ranks of a data coordinate",
        f"{float(loss.detach()):.6f} {float(norm):.4f}",
        "backward was called after step(), but the weights have changed since the forward that it differentiates;",
    ]
    assert len(first) == len(expected)
    for text, begin in zip(first, expected, strict=True):
        assert text.startswith(begin), text


class Scaled(nn.Module):
    """Two layers, and a factor for their output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        """Returns the scaled output."""
        for block in self.blocks:
            x = block(x)
        return x * scale


def test_a_call_with_positional_and_keyword_arguments_is_one_batch() -> None:
    """The model is placed by its first call, and each stage adds the gradient of the positional input."""
    inputs = torch.linspace(-1, 1, 8).view(2, 4)

    def body(world: World) -> Tensor | None:
        x = inputs.clone().requires_grad_()
        config = {"train_micro_batch_size_per_gpu": 2, "parallel": PP2}
        with engine.initialize(Scaled(), config, lambda output, _: output.sum(), world=world) as eng:
            eng.open_pipeline()
            eng.backward(eng(x, scale=torch.full((2, 4), 2.0)).sum())
        return x.grad

    x = inputs.clone().requires_grad_()
    Scaled()(x, scale=torch.full((2, 4), 2.0)).sum().backward()
    for grad in run_thread_ranks(2, body):
        assert grad is not None and torch.allclose(grad, x.grad)  # type: ignore[arg-type]
