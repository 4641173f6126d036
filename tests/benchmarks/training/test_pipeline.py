"""The benchmark of pipelines: its rows, what they ask of Trine, a tiny run, and whose clipping is right."""

import pytest
from torch.distributed.pipelining import PipelineStage

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import Sample, loss_spread, medians
from benchmarks.peers.pipelining import held_stages
from benchmarks.peers.trine import make_config
from benchmarks.peers.workload import Mode, Workload
from benchmarks.training import pipeline
from benchmarks.training.comparison import Effort, conclude, measure
from benchmarks.training.lineups import AGAIN, ONE, SCHEDULES, make_pipeline_lineup
from benchmarks.training.pipeline import EPSILON, judge_clipping, measure_clipping, that_starts
from engine.config import load_config
from engine.models.decoder import DecoderConfig

TINY = Workload(DecoderConfig(layers=4, width=32, heads=2, context=16), sequences=8, clip=0.05, epsilon=EPSILON)
MODES = make_pipeline_lineup(2, 4).modes


def named(name: str) -> Mode:
    return next(mode for mode in MODES if mode.name == name)


def test_a_slower_row_fails() -> None:
    lineup = make_pipeline_lineup(4, 8)
    seconds = {"Trine 1f1b": 1.05, "torch 1f1b": 1.1, "torch 1f1b" + AGAIN: 1.1, "Trine zb-v": 1.01}
    nothing = Footprint(0, 0, 0, 0, 0, 0, 0)
    rounds = [[Sample(m.name, 1.0, seconds.get(m.name, 1.0), 0.0, 5.0, None, nothing) for m in lineup.modes]]
    _, figures, passed = conclude(rounds, lineup)
    assert [verdict["passed"] for verdict in figures["verdicts"]] == [True, False, True, False]
    assert not passed


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_the_configurations_ask_for_the_schedule(schedule: str, stages: int) -> None:
    asked = make_config(named(f"Trine {schedule}"), TINY)["parallel"]
    assert asked == {"data": 1, "pipeline": 2, "schedule": schedule, "virtual_stages": stages}


def test_a_v_of_torch_is_left_out_with_its_reason_where_torch_cannot_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lineup = make_pipeline_lineup(4, 8)
    assert that_starts(lineup) == lineup
    monkeypatch.delattr(PipelineStage, "_warmup_forward_vote")
    left = that_starts(lineup)
    told = capsys.readouterr().out
    assert told.startswith("torch zb-v is left out: torch ") and told.count("\n") == 1
    assert [mode.name for mode in lineup.modes if mode not in left.modes] == ["torch zb-v", "torch zb-v" + AGAIN]
    assert {asked.mode for asked in left.comparisons} == {"Trine 1f1b", "Trine interleaved"}


def test_the_batch_is_cut_into_microbatches_alone() -> None:
    config = load_config(make_config(named("Trine 1f1b"), TINY), 2)
    assert (config.dp, config.pp, config.micro, config.accumulation) == (1, 2, 2, 4)


def test_stages_of_a_rank() -> None:
    found = {schedule: [held_stages(rank, 3, schedule) for rank in range(3)] for schedule in SCHEDULES}
    assert found == {
        "1f1b": [(0,), (1,), (2,)],
        "interleaved": [(0, 3), (1, 4), (2, 5)],
        "zb-v": [(0, 5), (1, 4), (2, 3)],
    }


@pytest.mark.long
def test_a_tiny_run_of_trine_trains_as_one_process() -> None:
    modes = [mode for mode in MODES if mode.kind == "trine"]
    rounds = measure([named(ONE), *modes], TINY, Effort(rounds=1, steps=2))
    assert loss_spread(rounds) <= 1e-5
    one, *others = (row.footprint for row in medians(rounds))
    assert one.sent_bytes == 0
    hidden = 8 * 16 * 32 * 4
    """Bytes of the hidden states of all sequences, and of their gradients."""
    control = 200
    crossings = {"1f1b": 1, "interleaved": 3, "zb-v": 2}  # of either rank: what it sends forwards and backwards
    for mode, found in zip(modes, others, strict=True):
        assert 0 < found.sent_bytes - crossings[mode.schedule] * hidden <= control
        assert 0 < found.activation_bytes < found.step_peak_bytes < one.step_peak_bytes


@pytest.mark.long
def test_torch_and_its_schedules_train_as_one_process() -> None:
    modes = [named(name) for name in (ONE, "torch 1f1b", "torch interleaved", "torch zb-v")]
    assert loss_spread(measure(modes, TINY, Effort(rounds=1, steps=2))) <= 1e-5


@pytest.mark.long
def test_weights_tell_who_clips_by_the_norm_of_a_part() -> None:
    apart = measure_clipping([named(name) for name in (ONE, "Trine zb-v", "torch zb-v", "torch zb-v" + AGAIN)], TINY)
    assert list(apart) == [ONE, "Trine zb-v", "torch zb-v"]
    assert apart[ONE] == 0 < apart["Trine zb-v"] < pipeline.WEIGHT_TOLERANCE < apart["torch zb-v"]


def test_only_the_clipping_of_trine_has_to_be_right() -> None:
    text, passed = judge_clipping({ONE: 0.0, "Trine 1f1b": 1e-6, "torch 1f1b": 2e-4})
    assert passed and text.splitlines() == [
        f"clipping moves no weight further than 1e-05 from one process: {ONE}; Trine 1f1b -> pass",
        "clipping by another norm than the model's: torch 1f1b",
    ]
    assert not judge_clipping({"Trine zb-v": 2e-5, "torch zb-v": 0.0})[1]
    assert not judge_clipping({"Trine zb-v": float("nan")})[1]


@pytest.mark.peers
def test_deepspeed_trains_as_one_process_but_clips_by_the_first_stage() -> None:
    modes = [named(ONE), named("DeepSpeed 1f1b")]
    assert loss_spread(measure(modes, TINY, Effort(rounds=1, steps=2))) <= 1e-5
    assert measure_clipping(modes, TINY)["DeepSpeed 1f1b"] > pipeline.WEIGHT_TOLERANCE
