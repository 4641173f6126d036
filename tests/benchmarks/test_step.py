"""The benchmark of one training step: a tiny run of its core, and its arithmetic."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks.peers import Workload
from benchmarks.report import Sample, Verdict, judge, loss_spread, medians
from benchmarks.step import CONTROL, DDP, Effort, conclude, main, make_modes, measure
from benchmarks.timing import RankError, Team
from engine.decoder import DecoderConfig

TINY = Workload(DecoderConfig(layers=1, width=32, heads=2, context=16), sequences=4)


@pytest.fixture(autouse=True, scope="module")
def _shared_server(run_ranks: Callable[..., list[Any]]) -> None:
    """The fork server of the session starts with what all tests need, not with what the benchmark needs."""
    run_ranks(len, 1, ())


def test_a_tiny_run_has_all_rows_and_equal_losses() -> None:
    modes = make_modes(ranks=2, accumulation=2)
    rounds = measure(modes, TINY, Effort(rounds=1, steps=2))
    text, figures, _ = conclude(rounds, modes)

    rows = {row["mode"]: row for row in figures["rows"]}
    assert list(rows) == [mode.name for mode in modes]
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in rows)
    assert loss_spread(rounds) <= 1e-5
    assert all(row["cpu_seconds"] > 0 and row["seconds"] > 0 and row["startup_seconds"] > 0 for row in rows.values())
    assert json.loads(json.dumps(figures)) == figures


def test_bytes_follow_the_formulas() -> None:
    modes = make_modes(ranks=2)
    rows = {row.mode: row for row in medians(measure(modes[1:], TINY, Effort(rounds=1, steps=2)))}
    payload = rows[DDP].sent_bytes  # 2 (N-1)/N of the parameters' bytes, and N is 2
    for name in ("Trine ZeRO-0", "Trine ZeRO-1"):
        assert payload <= rows[name].sent_bytes <= payload * 1.1  # padding and the control all-reduce
    assert rows[DDP].live_bytes >= 4 * payload
    assert rows["Trine ZeRO-1"].live_bytes < 3.2 * payload


def test_a_failing_rank_is_reported_with_its_traceback() -> None:
    mode = make_modes(ranks=2, accumulation=3)[-1]  # 4 sequences do not make 3 microbatches
    with pytest.raises(RankError, match="gradient_accumulation_steps"), Team(mode, TINY):
        pass


def test_ratios_are_paired_by_round() -> None:
    rounds = [_round(ddp=1.0, control=1.0, trine=1.02), _round(ddp=3.0, control=3.3, trine=3.15)]
    verdict = judge(rounds, "Trine ZeRO-1", DDP, CONTROL)
    assert verdict.ratio == pytest.approx((1.02 + 1.0) / 2)
    assert verdict.spread == pytest.approx(0.05)
    assert verdict.passed


def test_the_limit_is_kept_or_not() -> None:
    assert Verdict("Trine", 1.039, 0.01).passed
    late = Verdict("Trine", 1.041, 0.01)
    assert not late.passed
    assert str(late) == ("CPU seconds of Trine = 1.041x DDP; limit 1.03 + spread of DDP against itself (0.010) -> FAIL")


def test_sizes_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--ranks", "3"])
    assert "must divide the batch of 16 sequences" in capsys.readouterr().err


def _round(ddp: float, control: float, trine: float) -> Sequence[Sample]:
    seconds = {DDP: ddp, CONTROL: control, "Trine ZeRO-1": trine}
    return [Sample(mode, 1.0, cpu, 0, None, 0, 0, 0.0, 5.0) for mode, cpu in seconds.items()]
