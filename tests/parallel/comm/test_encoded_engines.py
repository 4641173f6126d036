"""Engines whose tensor ranks and stages send fewer bits: bytes as planned, equal bits, exact losses, checkpoints."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.engine import Engine
from engine.models.decoder import Decoder, loss_sum
from engine.parallel.comm.agreement import bit_sum
from engine.parallel.tensor.tp_axis import Overlap
from engine.reporting.banner import banner_text
from engine.step.rank_parts import EncodingResiduals
from tests.parallel.comm.small_decoder import SIZES, batch, on_threads
from tests.planned_traffic import traffic_differs
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
INT8, INT4, BF16 = ({"pipeline": name, "tensor": name} for name in ("int8", "int4", "bf16"))
SMALL = {"block_size": 64}
FEEDBACK = {"error_feedback": True}
HALF: dict[str, Any] = {"bf16": {"enabled": True}}


def traffic_of_later_steps(eng: Engine) -> list[str]:
    """Where it is not the plan's; a first step also agrees on its order of calls."""
    eng.train_batch(batch(eng, 0))
    return traffic_differs(eng, batch, (1, 2))


GRIDS: list[Any] = [
    ({"pipeline": 2}, INT8 | SMALL | FEEDBACK, {}, 2),
    ({"tensor": 2}, INT8 | SMALL, {}, 2),
    wide({"tensor": 2, "sequence_parallel": True}, INT8 | SMALL, {}, 2),
    wide({"tensor": 2, "sequence_parallel": True, "sequence_parallel_regather": True}, INT4 | SMALL, {}, 2),
    wide({"tensor": 2}, BF16, {}, 2),
    wide({"tensor": 2}, INT4 | SMALL, HALF, 2),
    wide({"tensor": 2}, INT8 | SMALL, {"activation_checkpointing": {"mode": "full"}}, 2),
    wide({"tensor": 2}, INT8 | SMALL, {"activation_checkpointing": {"mode": "selective"}}, 2),
    wide({"pipeline": 2}, BF16, {}, 2),
    wide({"pipeline": 2}, INT4 | SMALL | FEEDBACK, HALF, 2),
    *(
        wide({"pipeline": 2, "schedule": schedule, "virtual_stages": stages}, INT8 | SMALL | FEEDBACK, {}, 2)
        for schedule, stages in (
            ("gpipe", 1), ("interleaved", 2), ("looped-bfs", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)
        )
    ),
    wide({"tensor": 2, "pipeline": 2}, INT8 | SMALL | FEEDBACK, {"zero_optimization": {"stage": 1}}, 4),
    wide({"data": 2, "pipeline": 2}, INT8 | SMALL, {"zero_optimization": {"stage": 3}}, 4),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "form", "changes", "ranks"), GRIDS)
def test_bytes_and_calls_are_those_of_the_plan(
    grid: dict[str, Any], form: dict[str, Any], changes: dict[str, Any], ranks: int
) -> None:
    layers = 4 if "virtual_stages" in grid else 2
    found = on_threads(ranks, {"parallel": grid, "wire": form} | changes, traffic_of_later_steps, layers)
    assert not [wrong for each in found for wrong in each]


def planned_bytes(eng: Engine) -> dict[str, int]:
    return {row.label: row.bytes for row in eng.plan.rank(eng.grid.rank).traffic if row.axis in ("pp", "tp")}


def test_messages_between_stages_have_the_bytes_of_the_formula() -> None:
    first, last = on_threads(2, {"parallel": {"pipeline": 2}, "wire": {"pipeline": "int8"} | SMALL}, planned_bytes)
    elements = 2 * 16 * 32  # rows, length, width: one activation of each of four microbatches
    assert first["forward"] == last["backward"] == 4 * (elements + elements // 64 * 4)


@pytest.mark.long
def test_sums_over_tensor_ranks_have_the_bytes_of_the_formula() -> None:
    exact = on_threads(2, {"parallel": {"tensor": 2}}, planned_bytes)[0]
    found = on_threads(2, {"parallel": {"tensor": 2}, "wire": {"tensor": "int8"} | SMALL}, planned_bytes)[0]
    for label in ("column inputs", "row outputs"):
        assert exact[label] % (2 * 16 * 32 * 4) == 0
        assert found[label] == exact[label] // 4 * (1 + 4 / 64), label
    assert found["loss"] == exact["loss"]


def trained(eng: Engine) -> tuple[list[float], dict[str, float], int]:
    """(losses, bits of the parameters that no tensor rank cuts, stage) after three steps."""
    losses = [eng.train_batch(batch(eng, step)).loss for step in range(3)]
    cut = set() if eng.plan.tensor is None else set(eng.plan.tensor.parameters)
    here = {row.name for row in eng.plan.table.held_by(eng.grid.holder())} - cut
    with eng.full_parameters("*") as found:
        bits = {name: bit_sum(found[name].detach()).item() for name in sorted(here)}
    return losses, bits, eng.grid.coord().pp


@pytest.mark.parametrize(
    ("grid", "ranks"),
    [
        wide({"tensor": 2}, 2),
        wide({"tensor": 2, "sequence_parallel": True}, 2),
        wide({"pipeline": 2}, 2),
        wide({"tensor": 2, "pipeline": 2}, 4),
    ],
)
def test_losses_are_near_exact_ones_and_copies_on_tensor_ranks_keep_equal_bits(
    grid: dict[str, Any], ranks: int
) -> None:
    exact = on_threads(ranks, {"parallel": grid}, trained)
    found = on_threads(ranks, {"parallel": grid, "wire": INT8 | SMALL}, trained)
    assert found[0][0] != exact[0][0], "something was rounded"
    assert found[0][0] == pytest.approx(exact[0][0], rel=1e-3)
    for losses, bits, stage in found:
        assert losses == found[0][0]
        assert bits and all(other == bits for _, other, its in found if its == stage)


def skip_and_look(eng: Engine) -> tuple[list[float], int, int]:
    """(largest residual after a step, after one that was skipped and after a load; bytes of residuals; bytes that the
    plan says).
    """
    found, part = [], eng._runtime.parts.find(EncodingResiduals)
    assert part is not None and part.encoder is not None
    encoder = part.encoder
    for value in (0.0, math.inf, 0.0):
        parameters: Any = dict(eng.module.named_parameters())
        held = [row.name for row in eng.plan.table.held_by(eng.grid.holder())]
        handles = [parameters[name].register_hook(lambda grad, value=value: grad + value) for name in held]
        eng.train_batch(batch(eng, 0))
        for handle in handles:
            handle.remove()
        found.append(max((float(residual.abs().max()) for residual in encoder.residuals), default=0.0))
    part.restarted(0)  # as every load does
    found[-1] *= max((float(residual.abs().max()) for residual in encoder.residuals), default=0.0)
    kept = sum(residual.nbytes for residual in encoder.residuals)
    return found, kept, eng.plan.rank(eng.grid.rank).state_bytes.get("error feedback", 0)


def test_residuals_take_the_bytes_of_the_plan_and_a_skipped_step_leaves_none() -> None:
    form = {"pipeline": "int4"} | SMALL | FEEDBACK
    first, last = on_threads(2, {"parallel": {"pipeline": 2}, "wire": form}, skip_and_look)
    assert first[1:] == (0, 0), "the first stage sends no gradients"
    (made, skipped, loaded), kept, planned = last
    assert made > 0 and skipped == 0 and loaded == 0
    assert kept == planned == 4 * 2 * 16 * 32


def test_the_banner_says_what_is_given_up() -> None:
    form = {"pipeline": "int8", "tensor": "int4"} | FEEDBACK
    changes = {"parallel": {"pipeline": 2}, "wire": form}
    text = on_threads(2, changes, lambda eng: banner_text(eng.plan, "cpu"))[0]
    assert (
        "wire       stages send activations and gradients in int8, with error feedback; an element errs by up to half "
        "a scale (max |block| / 127 of 256 elements)\n" in text
    )
    assert "note       wire.tensor: there is one tensor rank, which sends nothing" in text


def passed_on(folder: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Body of a rank: weights that a run with other messages loads otherwise than they were saved."""
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "parallel": {"pipeline": 2}}
    with engine.initialize(Decoder(SIZES), config | {"wire": before}, loss_sum) as eng:
        eng.train_batch(batch(eng, 0))
        eng.save_checkpoint(folder).wait()
        kept = eng.full_state_dict()
    with engine.initialize(Decoder(SIZES), config | {"wire": after}, loss_sum) as eng:
        eng.train_batch(batch(eng, 1))
        eng.load_checkpoint(folder)
        found = eng.full_state_dict()
    return [name for name, weight in kept.items() if not torch.equal(found[name], weight)]


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [({}, INT4 | SMALL | FEEDBACK), (INT4 | SMALL | FEEDBACK, {})])
def test_checkpoints_do_not_know_how_messages_are_sent(
    run_ranks: RunRanks, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert run_ranks(passed_on, 2, str(tmp_path), before, after) == [[], []]


def overlapping(eng: Engine) -> list[float]:
    """Losses with sums of gradients that are waited for beside weight gradients, as on GPUs."""
    eng._runtime.axis.overlap = Overlap(frozenset({"cpu"}), 0)
    return [eng.train_batch(batch(eng, step)).loss for step in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("grid", [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}])
def test_sums_beside_weight_gradients_give_the_same_losses(grid: dict[str, Any]) -> None:
    changes = {"parallel": grid, "wire": {"tensor": "int8"} | SMALL}
    waited = on_threads(2, changes, lambda eng: [eng.train_batch(batch(eng, step)).loss for step in range(3)])
    assert on_threads(2, changes, overlapping) == waited


@pytest.mark.long
@pytest.mark.parametrize("grid", [{"tensor": 2}, {"pipeline": 2}])
def test_kernels_train_as_torch(grid: dict[str, Any]) -> None:
    found = [
        on_threads(2, {"parallel": grid, "wire": INT8 | SMALL, "kernels": kernels}, trained)[0][0]
        for kernels in ("reference", "triton")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
