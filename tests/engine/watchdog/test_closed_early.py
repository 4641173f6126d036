"""Ranks that close their engines before a monitor has started: it finds them closed, and the last one clears up."""

import re
from pathlib import Path
from typing import Any

import pytest

from engine.config import load_config
from engine.parallel.comm.flight.layout import EventKind
from engine.parallel.comm.flight.recorder import Stream
from engine.watchdog import watchdog
from engine.watchdog.diagnosis import diagnose
from engine.watchdog.local_ranks import LocalRanks
from engine.watchdog.watchdog import Watchdog

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Watchdog]:
    """Two watchdogs of a job that start no monitor within the test."""
    monkeypatch.setattr(watchdog, "flight_folder", lambda: tmp_path)
    config = load_config({"train_batch_size": 2}, 2)
    store: Any = None
    return [Watchdog(config.grid(rank), store, "job", config.watchdog, 600.0, None) for rank in range(2)]


def test_a_monitor_that_starts_late_finds_that_a_rank_has_closed_its_engine(
    ranks: list[Watchdog], tmp_path: Path
) -> None:
    ranks[1].close()
    ranks[0].recorder.enter(3)
    dp = Stream(EventKind.COLLECTIVE, "dp", "dp")
    ranks[0].recorder.wait(ranks[0].recorder.begin(dp, "gradients", (64, "float32")))
    local = LocalRanks(tmp_path / "job")
    local.refresh()
    found = diagnose({view.rank: view for view in local.views(detailed=True)}, 2, timeout=0.0)
    local.close(remove=False)
    assert found is not None and found.ranks == (1,)
    assert re.match(
        r"rank 1 \(.*\) closed its engine \d+\.\d s ago, .*; rank 0 has waited .* in gradients", found.sentence
    )
    ranks[0].close()


def test_the_last_rank_that_closes_removes_the_files(ranks: list[Watchdog], tmp_path: Path) -> None:
    ranks[0].close()
    assert (tmp_path / "job").is_dir()
    ranks[1].close()
    assert not list(tmp_path.iterdir())


def test_files_of_a_rank_that_left_a_message_stay_for_the_monitor(ranks: list[Watchdog], tmp_path: Path) -> None:
    try:
        raise ValueError("odd input")
    except ValueError:
        ranks[0].close()
    ranks[1].close()
    assert (tmp_path / "job" / "rank0.flight").is_file()


def test_the_page_on_hangs_quotes_the_verdicts() -> None:
    page = (ROOT / "docs/guides/hangs.md").read_text()
    table = page.split("| verdict | cause | next step |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    source = "".join((ROOT / "engine/watchdog" / name).read_text() for name in ("diagnosis.py", "view.py"))
    said = re.sub(r"[\"']\s+f?[\"']", "", source)
    quoted = [piece.strip() for row in rows for words in re.findall(r"`(.+?)`", row) for piece in words.split("...")]
    signal = "has ended: signal 9 (SIGKILL)"
    assert len(rows) == 10 and not [piece for piece in quoted if piece not in said and piece != signal]
