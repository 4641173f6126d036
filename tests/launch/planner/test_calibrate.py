"""Measured factors: the line through products, links from a doctor, and a file that ``--gpu`` reads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.launch.cli import main
from engine.launch.planner import calibrate as calibrating
from engine.launch.planner.calibrate import gpu_kind_of, line_of, link_entries, measured
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stand-in for the GPU of this machine: its name, and what is measured of it."""

    def install(name: str, **found: float) -> None:
        monkeypatch.setattr(calibrating, "find_accelerator", lambda: "cpu")
        monkeypatch.setattr(calibrating, "device_name", lambda device: name)
        monkeypatch.setattr(calibrating, "measured", lambda device: [(*one, "test") for one in found.items()])

    return install


def test_a_known_kind_keeps_its_data_sheet(
    tmp_path: Path, gpu: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    known, links, mine = load_gpu("h200"), tmp_path / "links.json", tmp_path / "mine.json"
    gpu("NVIDIA H200", product=known.bf16_rate / 2)
    links.write_text(json.dumps({"axes": [axis("tp", ["a"], 4, known.link_rate / 4)]}))
    assert main(["plan", "--calibrate", str(mine), "--links", str(links)]) == 0
    found = load_gpu(str(mine))
    assert (found.bf16_rate, found.reached.product, found.reached.link) == (known.bf16_rate, 0.5, 0.25)
    sources = json.loads(mine.read_text())["reached"]
    assert sources["product"]["source"] == "measured: test"
    assert sources["memory"]["source"].startswith("not measured, as in the file of its kind")
    assert not found.reached_of
    capsys.readouterr()
    assert main(["plan", "--world", "2", "--gpu", str(mine), "--batch", "4", "--estimate"]) == 0
    assert "NVIDIA H200" in capsys.readouterr().out


def test_an_unknown_kind_has_its_measured_rates(tmp_path: Path, gpu: Callable[..., None]) -> None:
    gpu("NVIDIA L40S", product=2e14, attention=1e14)
    calibrating.calibrate(tmp_path / "mine.json")
    found = load_gpu(str(tmp_path / "mine.json"))
    assert (found.bf16_rate, found.reached.product, found.reached.attention) == (2e14, 1.0, 0.5)
    assert found.memory_rate == load_gpu("h100").memory_rate


def test_names_of_vendors() -> None:
    names = ("NVIDIA H100 80GB HBM3", "AMD Instinct MI300X", "NVIDIA L40S")
    assert [gpu_kind_of(name) for name in names] == ["h100", "mi300x", None]


def test_products_passes_and_attention_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"WIDTHS": (16, 32), "COPIED": 1 << 16, "TOKENS": 32, "HEADS": 1, "REPEATS": 1}.items():
        monkeypatch.setattr(calibrating, name, size)
    found = measured(torch.device("cpu"))
    assert [key for key, _, _ in found] == ["product", "product_half", "memory", "attention"]
    assert all(value > 0 for key, value, _ in found if key != "product_half")


def test_a_machine_without_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrating, "find_accelerator", lambda: None)
    assert main(["plan", "--calibrate", str(tmp_path / "mine.json")]) == 1
    assert "measures a GPU, but this machine has none" in capsys.readouterr().err
    assert main(["plan", "--calibrate", str(tmp_path / "mine.json"), "--world", "2"]) == 1
    assert "it measures one GPU of this machine; leave --world out" in capsys.readouterr().err
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"axes": 3}'])
def test_links_that_are_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match="has no axes"):
        calibrating.calibrate(tmp_path / "mine.json", tmp_path / "links.json")
