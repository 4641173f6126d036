"""``trine watch`` shows what ranks are in, and what a report says."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.launch import watch_command
from engine.launch.cli import main
from engine.parallel.comm.flight import recorder
from engine.parallel.comm.flight.layout import EventKind
from engine.parallel.comm.flight.recorder import FlightRecorder, Stream
from engine.watchdog.diagnosis import Blame
from engine.watchdog.local_ranks import LocalRanks, flight_folder


def test_ranks_of_this_host_and_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = flight_folder() / f"test-{os.getpid()}"
    folder.mkdir()
    ranks = [
        FlightRecorder(
            folder / f"rank{rank}.flight", rank, 4, {"host": f"node{os.getpid()}", "axes": {"dp": [(0, 3, 2)]}}
        )
        for rank in (0, 3)
    ]
    try:
        ranks[0].enter(8)
        dp = Stream(EventKind.COLLECTIVE, "dp", "dp")
        ranks[0].waited(ranks[0].begin(dp, "control"), dp, ranks[0].wait(1) - 9_000_000)
        ranks[0].wait(ranks[0].begin(dp, "gradients", (64, "float32")))
        ranks[1].enter(7)
        ranks[1].leave(8)
        ranks[1].act("forward", 1, 2)
        assert main(["watch"]) == 0
        shown = capsys.readouterr().out
        assert f"job {folder.name}, 2 of 4 ranks on this host" in shown
        first, second = [line for line in shown.splitlines() if f"node{os.getpid()}" in line]
        assert second.split()[3] == "8", "between two steps the last one is shown"
        assert f"{os.getpid()}  9 " in first and "gradients over dp (#2 of 'dp', 64 bytes float32)" in first
        assert "forward of stage 1, microbatch 2" in shown
        assert main(["watch", "--waits"]) == 0
        ours = capsys.readouterr().out.partition(folder.name)[2].partition("\njob ")[0]  # others may run here, too
        (waits,) = [line.split() for line in ours.splitlines() if "dp 'dp' " in line]
        assert waits[:7] == ["0", "dp", "'dp'", "ranks", "0,", "3", "1"] and 0.009 <= float(waits[7]) < 1
        local = LocalRanks(folder)
        local.refresh()
        views = [{**view.to_json(), "stack": "File train.py, line 3"} for view in local.views(detailed=True)]
        local.close(remove=True)
    finally:
        for rank in ranks:
            rank.close()
    told = {"time": "2026-11-23T19:26", **asdict(Blame(ranks=(3,), kind="computing", sentence="rank 3 is late."))}
    (tmp_path / "watchdog_report.json").write_text(json.dumps(told | {"views": views}))
    assert main(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2026-11-23T19:26: rank 3 is late.\nrank  host")
    assert shown.endswith("stack of rank 3:\nFile train.py, line 3\n")


def test_a_repeated_output_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_command, "flight_folder", lambda: tmp_path)
    monkeypatch.setattr("engine.launch.watch_command.time.sleep", interrupted)
    assert main(["watch", "--every", "1"]) == 130
    for wrong in ("-1", "nan", "1e7", "often"):
        with pytest.raises(SystemExit, match="2"):
            main(["watch", "--every", wrong])
        assert f"argument --every: '{wrong}' is not a number from 0 to 1000000" in capsys.readouterr().err


def test_the_latest_dead_jobs_are_listed_and_the_others_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch_command, "flight_folder", lambda: tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has this number
    for number in range(6):
        folder = tmp_path / f"dead{number}"
        folder.mkdir()
        ended = FlightRecorder(folder / "rank0.flight", 0, 1, {"host": "here"})
        ended.say("ValueError: odd")
        ended.close()
        time.sleep(0.02)  # jobs are listed by the time of their end
    monkeypatch.undo()
    monkeypatch.setattr(watch_command, "flight_folder", lambda: tmp_path)
    (tmp_path / "alive").mkdir()
    alive = FlightRecorder(tmp_path / "alive" / "rank0.flight", 0, 1, {"host": "here"})
    assert main(["watch"]) == 0
    told = capsys.readouterr().out
    listed = [f"job dead{number}," in told for number in range(6)]
    assert told.startswith("job alive,") and listed == [False] * 3 + [True] * 3
    assert told.endswith("\n3 more jobs have ended here; trine watch --all lists them\n")
    assert "job dead5, 1 of 1 ranks on this host, ended 0 s ago\n" in told
    assert main(["watch", "--all"]) == 0
    told = capsys.readouterr().out
    assert all(f"job dead{number}," in told for number in range(6)) and "more jobs" not in told
    alive.close()


def test_jobs_that_ended_long_ago_are_counted_and_their_pids_may_be_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    with monkeypatch.context() as past:  # that rank wrote last when the machine started, before this process
        past.setattr(recorder, "now", lambda: 1)
        FlightRecorder(tmp_path / "old" / "rank0.flight", 0, 1, {"host": "here"}).close()
    monkeypatch.setattr(watch_command, "flight_folder", lambda: tmp_path)
    monkeypatch.setattr(watch_command, "_RECENT_HOURS", 0)
    assert main(["watch"]) == 0
    none = "no rank of this user runs on this host under a watchdog\n"
    assert capsys.readouterr().out == f"{none}\n1 job has ended here; trine watch --all lists it\n"
    assert main(["watch", "--all"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{none}\njob old, 1 of 1 ranks on this host, ended ") and " ago\nrank " in shown


def test_a_folder_without_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path)]) == 1
    assert f"{tmp_path} has no watchdog_report.json, which the watchdog writes when a job" in capsys.readouterr().err
    (tmp_path / "watchdog_report.json").write_text("{}")
    assert main(["watch", str(tmp_path)]) == 1
    assert "cannot be read (KeyError: 'views'); it may be damaged; remove it, and" in capsys.readouterr().err
