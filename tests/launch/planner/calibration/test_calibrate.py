"""Measured factors: the line through products, links from a doctor, and a file that ``--gpu`` reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.launch.cli import main
from engine.launch.planner.calibration import calibrate as calibrating
from engine.launch.planner.calibration.calibrate import gpu_kind_of, line_of, link_entries
from engine.planning.cost_model.hardware import load_gpu


def axis(name: str, hosts: list[str], ranks: int, rate: float) -> dict[str, Any]:
    return {
        "axis": name, "hosts": hosts, "ranks": list(range(ranks)), "rate": rate, "latency": 8e-6, "payload": 1 << 20,
    }  # fmt: skip


def test_the_line_of_a_device_that_obeys_it() -> None:
    rate, half = 5e12, 200.0
    times = {width: 2 * width**3 / (rate * width / (width + half)) for width in (64, 128, 512, 2048)}
    assert line_of(times) == pytest.approx((rate, half))
    assert line_of({64: 1.0, 128: 1.0}) == (2 * 128**3, 0.0)  # no line: what was reached


def test_links_of_a_doctor() -> None:
    axes = [axis("tp", ["a"], 4, 3e11), axis("dp", ["a"], 2, 1e11), axis("dp", ["a", "b"], 3, 2e10)]
    assert [entry[:2] for entry in link_entries(axes)] == [
        ("link", 3e11), ("link_latency", pytest.approx(8e-6 / 6)), ("network", 2e10),
        ("network_latency", pytest.approx(2e-6)),
    ]  # fmt: skip
    assert link_entries([]) == []


def test_a_known_kind_keeps_its_data_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(calibrating, "is_host", lambda device: False)
    known = load_gpu("h200")
    monkeypatch.setattr(calibrating, "measured", lambda device: [("product", known.bf16_rate / 2, "test")])
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"axes": [axis("tp", ["a"], 4, known.link_rate / 4)]}))
    calibrating.calibrate(tmp_path / "mine.json", links)
    found = load_gpu(str(tmp_path / "mine.json"))
    assert (found.bf16_rate, found.reached.product, found.reached.link) == (known.bf16_rate, 0.5, 0.25)
    sources = json.loads((tmp_path / "mine.json").read_text())["reached"]
    assert sources["product"]["source"] == "measured: test"
    assert sources["memory"]["source"].startswith("not measured, as in the file of its kind")


def test_names_of_vendors() -> None:
    assert (gpu_kind_of("NVIDIA H100 80GB HBM3"), gpu_kind_of("AMD Instinct MI300X"), gpu_kind_of("cpu")) == (
        "h100",
        "mi300x",
        "h100",
    )


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(calibrating, "WIDTHS", {True: (16, 32), False: (256, 512)})
    monkeypatch.setattr(calibrating, "COPIED", {True: 1 << 16, False: 1 << 20})
    monkeypatch.setattr(calibrating, "REPEATS", 1)
    out = tmp_path / "here.json"
    assert main(["plan", "--calibrate", str(out)]) == 0
    assert "measured: " in capsys.readouterr().out
    assert main(["plan", "--world", "2", "--gpu", str(out), "--batch", "4"]) == 0
    assert "fits" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"axes": 3}'])
def test_links_that_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match="holds no axes"):
        calibrating.calibrate(tmp_path / "mine.json", tmp_path / "links.json")
