"""First contact with a GPU: its parts, its limits, what it keeps, and tiny runs on a CPU."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.first_contact.command import Schedule, main
from benchmarks.first_contact.findings import Findings
from benchmarks.first_contact.parts import (
    CORRECTNESS,
    GPU_TESTS,
    SPEED,
    TINY_TESTS,
    Part,
    make_parts,
    select,
)
from benchmarks.first_contact.processes import MARK
from benchmarks.first_contact.stored import store
from benchmarks.harness.device_profile import busy, figures
from benchmarks.harness.figures import ROOT

CHILD = f"""
import json, os, sys, time
for name in sys.argv[1:]:
    if name == "dies":
        os._exit(7)
    time.sleep(60 if name == "hangs" else 0)
    print({MARK!r} + json.dumps({{"name": name, "ok": name != "wrong", "seconds": 0.0}}), flush=True)
"""


def part_of(*names: str, seconds: float = 30.0, beside: bool = True) -> Part:
    return Part("cases", "nothing", seconds, (sys.executable, "-c", CHILD), names, beside)


def run_parts(folder: Path, *parts: Part, seconds: float = 60.0) -> dict[str, bool | None]:
    findings = Findings(folder, "cuda")
    Schedule(parts, findings, seconds, 2).run(folder)
    kept = json.loads((folder / "part-cases.json").read_text())["rows"]
    assert kept == findings.rows, "what is found is in the folder"
    return {row["name"]: row["ok"] for row in findings.rows}


def test_a_case_that_ends_its_process_costs_no_other_case(tmp_path: Path) -> None:
    found = run_parts(tmp_path, part_of("first", "dies", "wrong", "last"))
    assert found == {"first": True, "dies": False, "wrong": False, "last": True}
    assert "exit code 7" in (tmp_path / "log.txt").read_text()
    assert "| cases | dies | **failed** |" in (tmp_path / "summary.md").read_text()


def test_a_process_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    assert run_parts(tmp_path, part_of("first", "hangs", "last", seconds=2.0)) == {"first": True, "hangs": None}
    assert time.monotonic() - began < 30


def test_what_there_is_no_time_for_is_told_case_by_case(tmp_path: Path) -> None:
    assert run_parts(tmp_path, part_of("one", "two", beside=False), seconds=1.0) == {"one": None, "two": None}


def test_two_runs_have_every_part_once_and_correctness_first() -> None:
    parts = make_parts("cuda", Path("scratch"))
    names = [part.name for part in parts]
    assert sorted(names) == sorted([*CORRECTNESS, *SPEED]) and len(set(names)) == len(names)
    assert [part.name for part in select(parts, ["correctness"])] == list(CORRECTNESS)
    assert {part.name for part in select(parts, ["speed"])} == set(SPEED)
    assert not any(part.beside for part in select(parts, ["speed"])), "what is timed runs alone"
    with pytest.raises(LookupError, match=r"no part is called nothing.*speed"):
        select(parts, ["nothing"])


def test_tests_of_kernels_are_in_the_folder_that_a_gpu_machine_can_collect() -> None:
    (tests,) = select(make_parts("cuda", Path()), ["kernel tests"])
    assert (
        tests.command[-3:] == ("-m", "gpu", GPU_TESTS) and (ROOT / GPU_TESTS).is_dir() and (ROOT / TINY_TESTS).exists()
    )


def test_findings_of_two_runs_are_one_figure(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").touch()
    page = tmp_path / "docs" / "devices.md"
    page.write_text("<!-- first-contact:begin -->\n<!-- first-contact:end -->\n")
    correct, fast = Findings(tmp_path / "a", "cuda"), Findings(tmp_path / "b", "cuda")
    correct.add("parity", "fp32", True, 1.0, loss="1e-8")
    correct.add("parity", "bf16", False, 1.0, error="wrong")
    fast.add("facts", "versions", True, 1.0, python="3.12.3", packages={"torch": "2.11.0", "numpy": "2.5.2"}, cpus=16)
    fast.add("facts", "device", True, 1.0, gpu="NVIDIA H100")
    fast.add("step engine 1b", "engine 1b: steps", True, 9.0, gpu="NVIDIA H100", step_ms=520.0, MFU=0.51)
    store([tmp_path / "a", tmp_path / "b"], tmp_path)
    text = page.read_text()
    assert "| part | decides | NVIDIA H100 |" in text
    assert "1 ok, 1 failed, 0 not run; failed: bf16" in text and "step_ms 520.0; MFU 0.51" in text
    assert ", one NVIDIA H100, 16 cores.*" in text, "the origin names the machine of the run"
    versions = json.loads((tmp_path / "docs" / "figures" / "first-contact.json").read_text())["versions"]
    assert versions == {"python": "3.12.3", "torch": "2.11.0"}


def test_findings_without_a_gpu_are_no_figure(tmp_path: Path) -> None:
    Findings(tmp_path, "cpu").add("facts", "host", True, 1.0)
    with pytest.raises(LookupError, match="no findings of a GPU"):
        store([tmp_path], tmp_path)


def test_the_share_of_a_busy_device_counts_overlapping_kernels_once() -> None:
    assert busy([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.5, 5.75)]) == 4.0


def event(name: str, start: float, end: float, device: str = "DeviceType.CUDA", annotation: bool = False) -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=span, is_user_annotation=annotation)


def test_a_profile_counts_no_annotation_and_names_idle_spans() -> None:
    events = [
        event("0F0", 0.0, 900.0, "DeviceType.CPU", annotation=True),
        event("0F0", 0.0, 1000.0),
        event("step", 0.0, 2000.0, annotation=True),
        event("cudaLaunchKernel", 0.0, 5.0, "DeviceType.CPU"),
        event("product", 0.0, 100.0),
        event("copy", 50.0, 90.0),  # on another stream
        event("norm", 101.0, 300.0),
        event("product", 700.0, 1000.0),
        event("adamw", 1010.0, 1100.0),
    ]
    found = figures(events, 2e-3)
    assert (found["busy_share"], found["launches"], found["calls"]) == (0.345, 5, {"cudaLaunchKernel": 1})
    assert found["top_ms"] == {"product": 0.4, "norm": 0.2, "adamw": 0.09, "copy": 0.04}
    lengths = {"< 3 us": (1, 0.001), "< 20 us": (1, 0.01), "< 200 us": (0, 0), "longer": (1, 0.4)}
    assert found["idle_count_ms"] == lengths
    assert found["gaps"][0] == {"ms": 0.4, "at_ms": 0.3, "after": "norm", "before": "product", "within": "0F0"}
    assert found["gaps"][1]["within"] == "step" and len(found["gaps"]) == 3


@pytest.mark.long
def test_a_run_without_a_gpu_finds_something_and_says_that_it_means_nothing(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path), "--only", "facts"]) == 0
    told = (tmp_path / "summary.md").read_text()
    assert "no figure here means anything" in told and "| facts | host | ok |" in told
    rows = json.loads((tmp_path / "part-facts.json").read_text())["rows"]
    assert {row["name"] for row in rows if row["ok"]} == {"versions", "host", "dW into fp32"}
    assert all(row["why"] == "needs a GPU" for row in rows if row["ok"] is None)


@pytest.mark.long
def test_every_part_that_needs_no_gpu_is_right_on_a_cpu(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 0, (tmp_path / "summary.md").read_text()
