"""Engines that shard over a part of the data axis (MiCS, HSDP): parity, bytes inside and across, equal copies."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.engine import Engine
from engine.errors import ConfigError, CorruptionError
from engine.models.decoder import loss_sum
from engine.parallel.grid import Axis
from engine.verify import verify
from tests import models
from tests.selection import wide
from tests.zero.small import forget_the_living, live_bytes
from tests.zero.test_secondary_shards import (
    BF16,
    WIDTH,
    Blocks,
    begin,
    history,
    on_threads,
    rows,
    sent_beside_plan,
    skipping,
)

RunRanks = Callable[..., list[Any]]
PAIRS: dict[str, Any] = {"shard_size": 2}
MODES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 2, "reduce": "microbatch"},
    {"stage": 3},
    {"stage": 3, "reduce": "microbatch"},
    {"stage": 3, "gather": "step"},
]
TWICE: dict[str, Any] = {"gradient_accumulation_steps": 2}


def settings(zero: dict[str, Any], parallel: dict[str, Any]) -> dict[str, Any]:
    """Four data ranks in groups of two, two microbatches, clipping active."""
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"data": 4} | parallel,
        "zero_optimization": {"reduce_bucket_size": 6000} | PAIRS | zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
        "gradient_clipping": 0.05,
    }


def build() -> nn.Module:
    """The model of both runs."""
    torch.manual_seed(3)
    return Blocks()


@pytest.mark.parametrize("zero", [MODES[0], *map(wide, MODES[1:4]), MODES[4], wide(MODES[5])])
def test_groups_train_as_one_process(zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, WIDTH, generator=generator) for _ in range(3)]
    found = verify(build, settings(zero, {}), batches, threads=4)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.long
@pytest.mark.parametrize("zero", MODES)
@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        {"tensor": 2, "order": "tp-pp-dp"},
        {"pipeline": 2},
        {"pipeline": 2, "order": "tp-pp-dp"},
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_groups_on_every_grid_train_as_one_process(zero: dict[str, Any], parallel: dict[str, Any], tied: bool) -> None:
    def decoder() -> nn.Module:
        return models.decoder(tied=tied)

    found = verify(decoder, settings(zero, parallel), models.batches_for("decoder", 16, 3), loss_sum, threads=8)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


def steps_of(eng: Engine) -> tuple[list[float], list[str], dict[str, Tensor]]:
    """(losses, traffic beside the plan, all shards and moments of this rank) of three steps."""
    losses, wrong = [], []
    for step in range(3):
        loss, more = sent_beside_plan(eng, step)
        losses.append(loss)
        wrong += more
    runtime = eng._runtime
    held = {f"weights {number}": flat.weights.clone() for number, flat in enumerate(runtime.buckets)}
    for number, place in enumerate(runtime.optimizer.places):
        state = runtime.optimizer.inner.state[place.parameter]
        held |= {f"{name} {number}": value.clone() for name, value in state.items() if isinstance(value, Tensor)}
    return losses, wrong, held


OFFLOADED: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
NARROW = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
CODES: dict[str, Any] = {"zero_quantized_gradients": True, "zero_quantized_weights": True}


@pytest.mark.parametrize(
    ("zero", "changes"),
    [
        ({"stage": 3, "reduce": "microbatch"}, BF16),
        wide({"stage": 1}, {}),
        wide({"stage": 2, "reduce": "microbatch"}, {"communication_data_type": "bf16"}),
        wide({"stage": 1}, {"communication_data_type": "bf16"}),
        wide({"stage": 1} | OFFLOADED, BF16),
        wide({"stage": 3, "reduce": "microbatch"} | OFFLOADED, {}),
        wide({"stage": 3} | CODES, BF16),
        wide({"stage": 2, "reduce": "microbatch", "zero_gradient_error_feedback": True} | CODES, BF16),
        wide({"stage": 3}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        wide({"stage": 2}, {"bf16": dict.fromkeys(NARROW, True)}),
        wide({"stage": 2}, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    ],
)
def test_replicas_of_a_shard_keep_equal_bits_and_send_what_is_planned(
    zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    found = on_threads(4, {"zero_optimization": PAIRS | zero} | TWICE | changes, steps_of)
    for losses, wrong, _ in found:
        assert wrong == [] and losses == found[0][0]
    for place in (0, 1):
        one, other = found[place][2], found[place + 2][2]
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.long
@pytest.mark.parametrize("zero", MODES)
def test_what_is_written_between_steps_is_used_by_all_groups(zero: dict[str, Any]) -> None:
    plain, found = (on_threads(4, {"zero_optimization": zero | own} | TWICE, history) for own in ({}, PAIRS))
    for (values, weights, wrong), (others, expected, _) in zip(found, plain, strict=True):
        assert wrong == []
        assert [each for each in values if isinstance(each, float)] == pytest.approx(
            [each for each in others if isinstance(each, float)], rel=1e-5
        )
        assert all(torch.equal(value, found[0][1][name]) for name, value in weights.items())
        assert all(torch.allclose(value, expected[name], rtol=0, atol=1e-5) for name, value in weights.items())


def by_axis(eng: Engine) -> tuple[dict[tuple[str, str], int], list[int]]:
    """(bytes of a step by axis and label, bytes of the trained buckets)."""
    before = eng.sent
    eng.train_batch(rows(eng, 0))
    sent: dict[tuple[str, str], int] = {(row.axis, row.label): row.bytes for row in eng.sent.since(before).rows()}
    return sent, [4 * bucket.elements for bucket in eng.plan.layout(eng.grid.coord()).buckets]


@pytest.mark.parametrize(("mode", "times"), [("step", 1), wide("microbatch", 2)])
def test_gradients_cross_groups_once_a_step_as_shards(mode: str, times: int) -> None:
    """Of P bytes a reduce-scatter of 2 sends P/2 and an all-reduce of P/2 over 2 sends P/2; nothing goes over dp."""
    zero = PAIRS | {"stage": 2, "reduce": mode}
    for sent, sizes in on_threads(4, {"zero_optimization": zero} | TWICE, by_axis):
        assert sent["dp_shard", "gradients"] == times * sum(sizes) // 2
        assert sent["dp_shard", "parameters"] == sum(sizes) // 2
        assert sent["dp_replicate", "gradients"] == sum(sizes) // 2
        assert not [label for axis, label in sent if axis == "dp"]


@pytest.mark.long
def test_secondary_shards_lie_inside_a_group() -> None:
    zero, parallel = {"stage": 3, "shard_size": 4}, {"parallel": {"data": 8}}
    plain, near = (
        on_threads(8, {"zero_optimization": zero | {"zero_hpz_partition_size": node}} | parallel | TWICE, steps_of)
        for node in (1, 2)
    )
    for one, other in zip(plain, near, strict=True):
        assert one[0] == other[0] and one[1] == other[1] == []
        assert all(torch.equal(value, other[2][name]) for name, value in one[2].items())


@pytest.mark.long
@pytest.mark.parametrize("mode", ["step", "microbatch"])
def test_codes_within_nodes_and_then_across_stay_in_a_group(mode: str) -> None:
    zero = {"stage": 3, "shard_size": 4, "reduce": mode} | CODES
    parallel = {"parallel": {"data": 8, "gpus_per_node": 2}}
    found = on_threads(8, {"zero_optimization": zero} | parallel | TWICE, steps_of)
    assert all(wrong == [] and losses == found[0][0] for losses, wrong, _ in found)
    for place in range(4):
        assert all(torch.equal(value, found[place + 4][2][name]) for name, value in found[place][2].items())


@pytest.mark.long
@pytest.mark.parametrize("zero", MODES)
def test_a_step_that_one_rank_spoils_is_skipped_by_all(zero: dict[str, Any]) -> None:
    found = on_threads(4, {"zero_optimization": PAIRS | zero}, skipping)
    assert all(each == found[0] for each in found) and found[0][::2] == [False, True, False]
    assert all(math.isfinite(loss) for loss in found[0][1::2])


def spoiled(eng: Engine) -> str:
    """What a rank says of a moment that has changed on rank 2 before the copies are compared."""

    def spoil(*_: object) -> None:
        place = eng._runtime.optimizer.places[0]
        eng._runtime.optimizer.inner.state[place.parameter]["exp_avg"].view(torch.uint8)[4] ^= 1

    try:
        eng.train_batch(rows(eng, 0))
        if eng.grid.rank == 2:
            eng._runtime.optimizer.inner.register_step_post_hook(spoil)
        eng.train_batch(rows(eng, 1))
    except CorruptionError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_shards_that_differ_between_groups_are_found() -> None:
    said = on_threads(4, {"zero_optimization": PAIRS | {"stage": 1}, "integrity": {"every": 1}}, spoiled)
    assert len(set(said)) == 1 and "exp_avg" in said[0] and "ranks 0" in said[0] and "2 " in said[0], said


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"stage": 0, "shard_size": 2}, "stage 0, which shards nothing"),
        ({"stage": 1, "shard_size": 3}, "3 does not divide the 4 data ranks, which form shard groups"),
        ({"stage": 1, "shard_size": 8}, "8 does not divide the 4 data ranks"),
        ({"stage": 1, "shard_size": 1}, "shard_size"),
        ({"stage": 3, "mics_shard_size": 3}, "3 does not divide the 4 data ranks"),
        ({"stage": 3, "shard_size": 2, "zero_hpz_partition_size": 4}, "4 does not divide the 2 data ranks of a shard"),
    ],
)
def test_refused_before_anything_is_sent(zero: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}, world_size=4)


@pytest.mark.parametrize(
    ("zero", "axis", "shards"),
    [
        ({"stage": 3, "mics_shard_size": 2}, "dp_shard", 2),
        ({"stage": 3, "mics_shard_size": -1}, "dp", 4),
        ({"stage": 1, "shard_size": 4}, "dp", 4),
        ({"stage": 0}, "dp", 4),
    ],
)
def test_a_group_of_all_data_ranks_is_the_axis_itself(zero: dict[str, Any], axis: Axis, shards: int) -> None:
    config = load_config({"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}, world_size=4)
    assert config.grid(3).sharding == axis and config.shards == shards


def measure(zero: dict[str, Any], changes: dict[str, Any]) -> tuple[int, int]:
    """(bytes alive, planned) between steps."""
    forget_the_living()
    eng = begin({"zero_optimization": PAIRS | zero} | changes)
    for step in range(2):
        eng.train_batch(rows(eng, step))
    planned = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
    found = live_bytes()
    eng.close()
    return found, planned


@pytest.mark.long
@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 2, "reduce": "microbatch"}, {"stage": 3}])
@pytest.mark.parametrize("changes", [{}, BF16])
def test_a_rank_holds_a_half_of_what_its_stage_shards(
    run_ranks: RunRanks, zero: dict[str, Any], changes: dict[str, Any]
) -> None:
    for found, planned in run_ranks(measure, 4, zero, changes):
        assert found == planned


def in_processes(changes: dict[str, Any]) -> tuple[list[float], list[str], dict[str, Tensor]]:
    """Body of a rank: three steps."""
    with begin(TWICE | changes) as eng:
        return steps_of(eng)


@pytest.mark.long
@pytest.mark.parametrize("zero", MODES)
def test_processes_keep_equal_bits_and_send_what_is_planned(run_ranks: RunRanks, zero: dict[str, Any]) -> None:
    changes = {"zero_optimization": PAIRS | zero}
    found, threads = run_ranks(in_processes, 4, changes), on_threads(4, changes | TWICE, steps_of)
    for number, (losses, wrong, held) in enumerate(found):
        assert wrong == [] and losses == pytest.approx(threads[number][0], rel=1e-6)
        assert all(torch.equal(value, found[number % 2][2][name]) for name, value in held.items())
