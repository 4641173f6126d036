"""The closed form: parts by hand on a GPU with round numbers, and which way it has to move."""

from dataclasses import replace

import pytest

from engine.planning.cost_model.estimate import CHANNEL_BYTES, CONTEXT_BYTES, SLACK, StepModel
from engine.planning.cost_model.hardware import GpuSpec, ReachedShares, load_gpu
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout, idle_over_useful, microbatches_held, slowest
from engine.planning.cost_model.links import Links
from engine.planning.cost_model.workload import DecoderShape, ExpertWork

WORK = DecoderShape(layers=4, width=64, heads=4, vocabulary=128, context=16).workload()
ALL = ReachedShares(
    product=1, product_half=0, fp8=0, attention=1, memory=1, link=1, network=1, overlap=1, step=0
)  # fmt: skip
GPU = GpuSpec(
    name="round", memory_bytes=1e9, memory_rate=1e18, bf16_rate=1e9, fp8_rate=0, gpus_per_node=4, link_rate=1e6,
    link_latency=0, network_rate=1e5, network_latency=0, reached=ALL,
)  # fmt: skip


def seconds(layout: TrainingLayout, gpu: GpuSpec = GPU, **traits: object) -> dict[str, float]:
    found = StepModel(WORK, gpu, 4, EngineTraits(**traits)).estimate(layout).seconds  # type: ignore[arg-type]
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def test_a_rank_alone_computes_its_flops() -> None:
    parts = seconds(TrainingLayout(micro=2, microbatches=3))
    tokens = 2 * 16 * 3
    products = 3 * (4 * 2 * 12 * 64 * 64 + 2 * 64 * 128)
    attention = 3.5 * 4 * 4 * 64 * 16 / 2  # causal: half of all pairs; its backward takes 2.5 times the forward
    assert parts["computation"] == pytest.approx(tokens * (products + attention) / 1e9)
    assert sum(parts.values()) == pytest.approx(parts["computation"])


def test_recomputation_repeats_a_forward() -> None:
    parts = seconds(TrainingLayout(recomputation="full"))
    forward = 16 * 4 * (2 * 12 * 64 * 64 + 4 * 64 * 16 / 2)
    assert parts["recomputation"] == pytest.approx(forward / 1e9)


def test_tensor_sums_are_those_of_the_formula() -> None:
    parts = seconds(TrainingLayout(tp=4), tensor_overlap=0.0)
    elements = 4 * 4 * 2 * (4 - 1) / 4 * 16 * 64  # blocks x sums x ring x b s h
    assert parts["tensor"] == pytest.approx(2 * elements / 1e6)
    assert seconds(TrainingLayout(tp=4), tensor_overlap=1.0)["tensor"] == 0


def test_rings_share_the_way_out_of_a_node() -> None:
    rates = {
        (dp, tp): Links(TrainingLayout(dp=dp, tp=tp), GPU, 4).ring("dp+cp").rate
        for dp, tp in ((4, 1), (8, 1), (8, 2), (8, 4))
    }
    assert rates == {(4, 1): 1e6, (8, 1): 4e5, (8, 2): 2e5, (8, 4): 1e5}


@pytest.mark.parametrize(
    ("kind", "virtual", "idle", "held"),
    [("gpipe", 1, 3 / 8, 8), ("1f1b", 1, 3 / 8, 4), ("interleaved", 2, 3 / 16, 5.5), ("zb-h1", 1, 1 / 8, 4),
     ("zb-v", 2, 1 / 16, 4), ("dualpipe-v", 2, 1 / 16, 4.5)],
)  # fmt: skip
def test_schedules_wait_and_hold_as_their_table_says(kind: str, virtual: int, idle: float, held: float) -> None:
    layout = TrainingLayout(pp=4, schedule=kind, virtual=virtual, microbatches=8)
    assert idle_over_useful(layout) == pytest.approx(idle) and microbatches_held(layout) == held


def test_the_slowest_stage_has_the_head_or_one_block_more() -> None:
    assert slowest(WORK, 1, 1.0, 0.5).blocks == 4
    level = slowest(WORK, 2, 1.0, 0.1)
    assert (level.blocks, level.heads) == (2, 1)
    assert slowest(WORK, 2, 1.0, 3.0).blocks <= 1  # a heavy head leaves no room for blocks beside it


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_cut_as_zero_says(stage: int) -> None:
    layout = TrainingLayout(dp=4, stage=stage, reduction="microbatch")
    found = StepModel(WORK, GPU, 4).estimate(layout).memory
    count, share = WORK.parameters, 4
    assert found.parameters == 2 * count / (share if stage == 3 else 1)
    assert found.gradients == 4 * count / (share if stage >= 2 else 1)
    assert found.optimizer == 12 * count / (share if stage else 1)
    assert found.activations == 4 * 16 * sum(WORK.keeps("none"))
    assert found.communication == CHANNEL_BYTES
    assert found.slack == CONTEXT_BYTES + SLACK * (found.activations + found.buffers)


def test_buffers_have_a_round_of_rows_of_experts() -> None:
    work = replace(WORK, experts=ExpertWork(parameters=0, experts=8, chosen=2, layers=4))
    alone, shared = (StepModel(work, GPU, 4).estimate(TrainingLayout(dp=4, ep=ep)).memory for ep in (1, 4))
    tokens, width = 16, 64
    row, result = (width + 2) * 2 + 2 * 4, width * 2  # two weights and two numbers travel with a row
    received, given = 4 * tokens, 2 * tokens  # all tokens of four ranks; own tokens to two of them
    assert shared.buffers - alone.buffers == (received + given) * (row + result)


def test_a_slower_network_and_more_stages_cost_more() -> None:
    h100 = load_gpu("h100")
    work = DecoderShape(layers=32, width=4096, heads=32, vocabulary=32000, context=4096).workload()
    layout = TrainingLayout(dp=64, stage=1, micro=1, microbatches=2)
    fast, slow = (StepModel(work, replace(h100, network_rate=rate), 8).estimate(layout).seconds for rate in (50e9, 5e9))
    assert slow.data > fast.data and slow.computation == fast.computation
    bubbles = [
        StepModel(work, h100, 8).estimate(TrainingLayout(pp=pp, microbatches=8)).seconds.bubble for pp in (1, 2, 4, 8)
    ]
    assert bubbles == sorted(bubbles) and bubbles[0] == 0
