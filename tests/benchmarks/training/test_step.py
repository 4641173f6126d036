"""The benchmark of one training step: a tiny run of its core, and its arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import Comparison, Sample, Verdict, judge, loss_spread, medians, wrong_losses
from benchmarks.harness.team import RankError, Team
from benchmarks.peers.workload import Workload
from benchmarks.training.comparison import Effort, conclude, measure
from benchmarks.training.lineups import AGAIN, DDP, make_lineup
from engine.models.decoder import DecoderConfig

CONTROL = DDP + AGAIN
LIMITED = Comparison("Trine ZeRO-1", DDP, CONTROL, 1.03)
NOTHING = Footprint(0, 0, 0, 0, 0, 0, 0)
TINY = Workload(DecoderConfig(layers=1, width=32, heads=2, context=16), sequences=4)


@pytest.mark.long
def test_a_tiny_run_has_all_rows_and_equal_losses() -> None:
    lineup = make_lineup(ranks=2, accumulation=2, groups=("dp",))
    modes = lineup.modes
    rounds = measure(modes, TINY, Effort(rounds=1, steps=2))
    text, figures, _ = conclude(rounds, lineup)

    rows = {row["mode"]: row for row in figures["rows"]}
    assert list(rows) == [mode.name for mode in modes]
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in rows)
    assert loss_spread(rounds) <= 1e-5
    assert all(row["cpu_seconds"] > 0 and row["seconds"] > 0 and row["startup_seconds"] > 0 for row in rows.values())
    assert json.loads(json.dumps(figures)) == figures


@pytest.mark.long
def test_bytes_follow_the_formulas() -> None:
    modes = make_lineup(ranks=2, groups=("dp",)).modes
    rows = {row.mode: row for row in medians(measure(modes[1:], TINY, Effort(rounds=1, steps=2)))}
    payload = rows[DDP].footprint.sent_bytes  # 2 (N-1)/N of the parameters' bytes, and N is 2
    for name in ("Trine ZeRO-0", "Trine ZeRO-1"):
        assert payload <= rows[name].footprint.sent_bytes <= payload * 1.1  # padding and the control all-reduce
    assert rows[DDP].footprint.live_bytes >= 5 * payload  # the buckets are a copy of the gradients
    assert rows["Trine ZeRO-1"].footprint.live_bytes < 3.2 * payload


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    mode = make_lineup(ranks=2, accumulation=3, groups=("dp",)).modes[-1]  # 4 sequences do not make 3 microbatches
    with pytest.raises(RankError, match="gradient_accumulation_steps"), Team(mode, TINY):
        pass


def test_ratios_are_paired_by_round() -> None:
    rounds = [_round(ddp=1.0, control=1.0, trine=1.02), _round(ddp=3.0, control=3.3, trine=3.15)]
    verdict = judge(rounds, LIMITED)
    assert verdict.ratio == pytest.approx((1.02 + 1.0) / 2)
    assert verdict.spread == pytest.approx(0.05)
    assert verdict.passed


def test_without_a_control_the_peer_alone_counts() -> None:
    verdict = judge([_round(ddp=2.0, control=4.0, trine=1.0)], Comparison("Trine ZeRO-1", DDP, limit=0.5))
    assert (verdict.ratio, verdict.spread, verdict.passed) == (0.5, 0.0, True)
    assert str(verdict) == "CPU seconds of Trine ZeRO-1 = 0.500x torch DDP; limit 0.50 -> pass"


def test_the_limit_is_kept_or_not() -> None:
    assert Verdict(LIMITED, 1.039, 0.01).passed
    late = Verdict(LIMITED, 1.041, 0.01)
    assert not late.passed
    assert str(late) == (
        "CPU seconds of Trine ZeRO-1 = 1.041x torch DDP; "
        "limit 1.03 + spread of torch DDP against itself (0.010) -> FAIL"
    )
    told = Verdict(Comparison("Trine tp4", DDP), 9.0)
    assert told.passed
    assert str(told).endswith("9.000x torch DDP; no limit")


def test_a_row_with_another_loss_is_named() -> None:
    first, control, trine = _round(ddp=1.0, control=1.0, trine=1.0)
    rounds = [[first, control, replace(trine, loss=5.1)], [first, control, replace(trine, loss=float("nan"))]]
    assert list(wrong_losses(rounds, (DDP, CONTROL))) == ["Trine ZeRO-1"]
    lineup = make_lineup(ranks=4, groups=("dp",))
    everyone = [replace(first, mode=mode.name, loss=5.1 if mode.stage else 5.0) for mode in lineup.modes]
    text, _, passed = conclude([everyone], lineup)
    assert text.splitlines()[-1] == "WRONG: the loss of Trine ZeRO-1 is off by 1.0e-01"
    assert not passed


def _round(ddp: float, control: float, trine: float) -> Sequence[Sample]:
    seconds = {DDP: ddp, CONTROL: control, "Trine ZeRO-1": trine}
    return [Sample(mode, 1.0, cpu, 0.0, 5.0, None, NOTHING) for mode, cpu in seconds.items()]
