"""Gradients, masters and optimizer state by name: those of plain torch in one process, to read and to write."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.shard_table import ShardRow
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
ROWS, CLIP, SILENCED = 4, 0.3, "blocks.0.*"


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def data(dp: int) -> list[Tensor]:
    return [ids[:, : models.LENGTH] for ids in models.token_batches(ROWS * dp, 3)]


def settings(grid: dict[str, int], stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": ROWS * grid.get("data", 1),
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": {"stage": stage},
        "parallel": grid,
        **more,
    }


Snapshot = dict[str, dict[str, Tensor]]


def in_one_process(dp: int) -> list[Snapshot]:
    """Gradients of the first microbatches and of all, before and after clipping, and moments, of three steps in which
    some gradients are set to zero and after the first of which the moments are halved.
    """
    model, found = models.decoder(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    named = dict(model.named_parameters())
    for index, batch in enumerate(data(dp)):
        optimizer.zero_grad()
        begun = torch.cat([ids.chunk(2)[0] for ids in batch.chunk(dp)])
        (loss_of(model(begun), begun) / 2).backward()  # type: ignore[no-untyped-call]
        seen: Snapshot = {"begun": {name: p.grad.clone() for name, p in named.items() if p.grad is not None}}
        optimizer.zero_grad()
        loss_of(model(batch), batch).backward()  # type: ignore[no-untyped-call]
        seen |= {"gradient": {name: p.grad.clone() for name, p in named.items() if p.grad is not None}}
        for name, p in named.items():
            if name.startswith("blocks.0.") and p.grad is not None:
                p.grad.zero_()
        seen["norm"] = {"": nn.utils.clip_grad_norm_(model.parameters(), CLIP)}
        seen["used"] = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        optimizer.step()
        for key in ("exp_avg", "exp_avg_sq"):
            seen[key] = {name: optimizer.state[p][key].clone() for name, p in named.items()}
            for p in named.values():
                optimizer.state[p][key] *= 0.5 if index == 0 else 1.0
        seen["weight"] = {name: p.detach().clone() for name, p in named.items()}
        found.append(seen)
    return found


def part_of(full: Tensor, row: ShardRow, tp: int) -> Tensor:
    """What tensor rank ``tp`` holds of a parameter."""
    if row.dim is None:
        return full
    held = [full.narrow(row.dim, part.start, part.stop - part.start) for part in row.ranges if tp in part.holders]
    return torch.cat(held, row.dim)


def on_ranks(config: dict[str, Any]) -> list[str]:
    """Body of a rank: what deviates from one process."""
    dp, wrong = config["parallel"].get("data", 1), []
    expected = in_one_process(dp)
    with engine.initialize(models.decoder(), config, loss_of, example_batch=data(1)[0][:2]) as eng:
        coord, piped = eng.grid.coord(), eng.grid.pp > 1
        rows = {row.name: row for row in eng.plan.table}

        def compare(found: dict[str, Tensor], kind: str, seen: Snapshot, step: int) -> None:
            assert found, f"{kind}: this rank holds some"
            for name, tensor in found.items():
                full = part_of(seen[kind][name], rows[name], coord.tp)
                if tensor.shape != full.shape or not torch.allclose(tensor, full, rtol=1e-4, atol=2e-6):
                    wrong.append(f"step {step}, {kind} of {name}")

        for step, (batch, seen) in enumerate(zip(data(dp), expected, strict=True)):
            ids = batch.chunk(dp)[coord.dp]
            for index, half in enumerate(ids.chunk(2)):
                eng.backward(loss_of(eng(half), half))
                with eng.gradients() as gradients, torch.no_grad():
                    compare(gradients, "gradient" if index else "begun", seen, step)
            with eng.gradients(SILENCED) as gradients, torch.no_grad():
                assert all(name.startswith("blocks.0.") for name in gradients)
                for gradient in gradients.values():
                    gradient.zero_()
            report = eng.step()
            assert report is not None and not piped
            if abs(report.grad_norm - float(seen["norm"][""])) > 1e-5 * report.grad_norm:
                wrong.append(f"step {step}, norm {report.grad_norm}")
            with eng.gradients() as gradients:
                compare(gradients, "used", seen, step)
            with eng.optimizer_state() as state, torch.no_grad():
                for key in ("exp_avg", "exp_avg_sq"):
                    compare({name: values[key] for name, values in state.items()}, key, seen, step)
                    for values in state.values():
                        values[key] *= 0.5 if step == 0 else 1.0
            with eng.masters() as weights:
                compare(weights, "weight", seen, step)
            with eng.masters(local=True) as parts, eng.gradients(local=True) as shards:
                assert {name: part.shape for name, part in parts.items()} == {
                    n: p.shape for n, p in shards.items()
                } or (config["zero_optimization"]["stage"] == 0)
                whole = sum(part.numel() for part in parts.values())
                assert whole <= sum(row.elements for row in rows.values())
    return wrong


GRIDS = [
    pytest.param({"data": 2}, 0, id="dp2-zero0", marks=pytest.mark.long),
    wide({"data": 2}, 1, id="dp2-zero1"),
    pytest.param({"data": 2}, 2, id="dp2-zero2", marks=pytest.mark.long),
    pytest.param({"data": 2}, 3, id="dp2-zero3"),
    wide({"data": 1, "tensor": 2}, 0, id="tp2"),
    pytest.param({"data": 2, "tensor": 2}, 1, id="dp2-tp2-zero1"),
    pytest.param({"data": 2, "tensor": 2}, 3, id="dp2-tp2-zero3", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("grid", "stage"), GRIDS)
def test_what_is_read_and_written_is_as_in_one_process(grid: dict[str, int], stage: int, run_ranks: RunRanks) -> None:
    for wrong in run_ranks(on_ranks, math.prod(grid.values()), settings(grid, stage), seconds=120.0):
        assert wrong == []


EXACT = 1.0 + 2.0**-12
"""Not representable in bf16."""


def write_masters(config: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: a value that bf16 rounds is written into masters, whole and in parts, and survives an update."""
    found: dict[str, Any] = {}
    with engine.initialize(models.decoder(), config, loss_of, example_batch=data(1)[0][:2]) as eng:
        mine = data(2)[0].chunk(2)[eng.grid.coord().dp]
        eng.train_batch(mine)
        with eng.masters("blocks.0.*.weight") as weights, torch.no_grad():
            for weight in weights.values():
                weight.fill_(EXACT)
        with eng.masters("head.weight", local=True) as parts, torch.no_grad():
            for part in parts.values():
                part.fill_(-EXACT)
        with eng.full_parameters() as parameters:
            for name, sign in (("blocks.0.", 1.0), ("head.weight", -1.0)):
                values = [p for n, p in parameters.items() if n.startswith(name) and n.endswith(".weight")]
                found[name] = [bool((p == sign).all()) for p in values]
        with eng.full_parameters() as parameters, torch.no_grad():
            for parameter in parameters.values():
                parameter.mul_(1)  # a write that changes nothing must not round the masters
        eng.train_batch(mine)
        with eng.masters() as weights:
            found["kept"] = {
                n: bool((w == math.copysign(EXACT, float(w.flatten()[0]))).all()) for n, w in weights.items()
            }
        found["dtypes"] = {str(w.dtype) for w in weights.values()}
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_are_written_exactly_and_rounded_into_the_parameters(stage: int, run_ranks: RunRanks) -> None:
    frozen = {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0}}
    config = settings({"data": 2}, stage, bf16={"enabled": True}, optimizer=frozen)
    for found in run_ranks(write_masters, 2, config):
        assert all(found["blocks.0."]) and found["head.weight"] == [True]
        changed = {name for name in found["kept"] if name.startswith("blocks.0.") and name.endswith(".weight")}
        assert all(found["kept"][name] for name in changed | {"head.weight"}) and len(changed) > 3
        assert found["dtypes"] == {"torch.float32"}


def on_a_pipeline() -> list[Any]:
    """Body of a rank: after ``train_batch``, which is all that a pipeline has."""
    batch = data(1)[0]
    config = settings({"data": 1, "pipeline": 2}, 0)
    with engine.initialize(models.decoder(), config, loss_of, example_batch=batch[:2]) as eng:
        eng.train_batch(batch)
        with eng.gradients() as gradients:
            used = {name: gradient.clone() for name, gradient in gradients.items()}
        with eng.optimizer_state("blocks.*") as state:
            moments = {name: values["exp_avg"].clone() for name, values in state.items()}
    return [used, moments]


def test_a_pipeline_gives_what_each_stage_holds(run_ranks: RunRanks) -> None:
    model, batch = models.decoder(), data(1)[0]
    loss_of(model(batch), batch).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ranks = run_ranks(on_a_pipeline, 2)
    assert set(ranks[0][0]) | set(ranks[1][0]) == set(expected) and set(ranks[0][0]) != set(ranks[1][0])
    for used, moments in ranks:
        assert all(torch.allclose(used[name], expected[name], rtol=1e-4, atol=2e-6) for name in used)
        assert moments and all(
            torch.allclose(moments[name], 0.1 * used[name], rtol=1e-4, atol=1e-8) for name in moments
        )


def mistakes(stage: int) -> list[str]:
    """Body of a rank: the sentences."""
    said: list[str] = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(engine.EngineError) as caught:
            call()
        said.append(str(caught.value))

    def opened(call: Callable[..., Any], *args: Any, factor: float | None = None, **options: Any) -> None:
        with call(*args, **options) as found, torch.no_grad():
            for tensor in found.values():
                if factor is not None:
                    tensor.mul_(factor)

    rank = torch.distributed.get_rank()
    batch = data(2)[0].chunk(2)[rank]
    with engine.initialize(models.decoder(), settings({"data": 2}, stage), loss_of, example_batch=batch[:2]) as eng:
        refused(lambda: opened(eng.gradients))
        eng.backward(loss_of(eng(batch[:2]), batch[:2]))
        refused(lambda: eng.clip_gradients(1.0))
        eng.backward(loss_of(eng(batch[2:]), batch[2:]))
        refused(lambda: opened(eng.gradients, "nose.*"))
        refused(lambda: opened(eng.gradients, factor=1.0 + rank))
        late = eng(batch[:2])
        refused(lambda: eng.backward(loss_of(late, batch[:2])))
        norm = eng.step().grad_norm  # type: ignore[union-attr]
        refused(lambda: opened(eng.gradients, factor=2.0))
        refused(lambda: opened(eng.masters, "head.*", factor=1.0 + rank))
        eng.train_batch(batch)
        eng.close()
        refused(lambda: opened(eng.gradients))
    return [*said, f"{norm:.6f}"]


@pytest.mark.parametrize("stage", [0, 3])
def test_mistakes_are_sentences_and_spoil_nothing(stage: int, run_ranks: RunRanks) -> None:
    model = models.decoder()
    loss_of(model(data(2)[0]), data(2)[0]).backward()  # type: ignore[no-untyped-call]
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    first, second = run_ranks(mistakes, 2, stage)
    assert first == second
    starts = [
        "gradients before the first step: there is no gradient yet; call backward",
        "clip_gradients was called inside an unfinished accumulation (1 of 2 microbatches): the norm",
        "gradients: 'nose.*' matches no trained parameter; ",
        "gradients: data ranks have written different values into",
        "backward was called for 3 microbatches, but gradient_accumulation_steps is 2",
        "gradients were written after the step that used them, without effect",
        "masters: data ranks have written different values into",
        "gradients was called after close(), which released",
    ]
    assert [text.startswith(start) for text, start in zip(first, starts, strict=False)] == [True] * len(starts), first
    assert float(first[-1]) == pytest.approx(norm, rel=1e-4)
