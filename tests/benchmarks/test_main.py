"""The one entry of all benchmarks."""

from collections.abc import Sequence
from importlib import import_module

import pytest

from benchmarks import __main__ as entry


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What would have run; the benchmark of ZeRO fails."""
    found: list[tuple[str, list[str]]] = []

    def run(name: str, command: Sequence[str]) -> int:
        found.append((name, list(command)))
        return int(name == "zero")

    monkeypatch.setattr(entry, "run", run)
    return found


def test_all_benchmarks_are_listed_and_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(entry.BENCHMARKS)
    assert entry.main([]) == 0 and capsys.readouterr().out == listed
    for benchmark in entry.BENCHMARKS.values():
        assert callable(import_module(f"benchmarks.{benchmark.module}").main)


def test_one_benchmark_takes_its_own_options(ran: list[tuple[str, list[str]]]) -> None:
    assert entry.main(["tensor", "--models", "llama", "--profile", "Trine tp2"]) == 0
    assert ran == [("tensor", ["--models", "llama", "--profile", "Trine tp2"])]


def test_several_share_what_they_have(ran: list[tuple[str, list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["zero", "checkpoint", "--rounds", "2", "--peers", "fsdp2", "--out", "runs/x"]) == 1
    assert ran == [
        ("zero", ["--out", "runs/x", "--peers", "fsdp2", "--rounds", "2"]),
        ("checkpoint", ["--out", "runs/x", "--rounds", "2"]),
    ]
    assert "checkpoint has no --peers, it runs without." in capsys.readouterr().out


def test_all_run_in_turn(ran: list[tuple[str, list[str]]]) -> None:
    assert entry.main(["all", "--write-figures"]) == 1
    assert [name for name, _ in ran] == list(entry.BENCHMARKS)
    assert dict(ran)["sleeping_blocks"] == ["--write-figures"]


@pytest.mark.parametrize("command", [["speed"], ["step", "speed"], ["step", "zero", "speed"]])
def test_an_unknown_name_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.main(command)
    assert "speed" in capsys.readouterr().err


@pytest.mark.parametrize("name", entry.BENCHMARKS)
def test_shared_options_are_those_of_the_benchmark(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.run(name, ["-h"])
    shown = capsys.readouterr().out
    has = {key for key in ("rounds", "peers", "out", "write_figures") if f"--{key.replace('_', '-')} " in f"{shown} "}
    has |= {"write_figures"} if "--write-figures" in shown else set()
    assert has == entry.BENCHMARKS[name].options
