"""Hardware files: those of the package are whole and say where each value is from; others are refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.planning.cost_model.hardware import FOLDER, known_gpus, load_gpu, spec_of


def content(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return read


def test_five_kinds_ship() -> None:
    assert known_gpus() == ("a100", "b200", "h100", "h200", "mi300x")


@pytest.mark.parametrize("name", known_gpus())
def test_every_value_has_a_source_and_every_share_is_one(name: str) -> None:
    raw, spec = content(name), load_gpu(name.upper())
    entries = [value for key, value in raw.items() if key not in ("name", "reached", "reached_of")]
    assert all(entry["source"] for entry in (*entries, *raw["reached"].values()))
    shares = {key: entry["value"] for key, entry in raw["reached"].items() if key != "product_half"}
    assert len(shares) == 8 and all(0 <= share <= 1 for share in shares.values())
    assert spec.bf16_rate * 2 == pytest.approx(spec.fp8_rate, rel=1e-3) or spec.fp8_rate == 0


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content("h100") | {"memory_bytes": {"value": 7, "source": "test"}}))
    assert load_gpu(str(path)).memory_bytes == 7


@pytest.mark.parametrize("name", ["h1000", "no/such.json", "."])
def test_an_unknown_kind_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--gpu {name}: .* give a100, b200, h100, h200, mi300x"):
        load_gpu(name)


@pytest.mark.parametrize("entry", [None, 5, {"value": "5"}, {"value": True}, {"value": -1}], ids=str)
def test_a_value_that_is_none_is_named(entry: Any) -> None:
    with pytest.raises(ConfigError, match="--gpu x has memory_rate = "):
        spec_of(content("h100") | {"memory_rate": entry}, "x")
    raw = content("h100")
    raw["reached"]["link"] = entry
    with pytest.raises(ConfigError, match=r"--gpu x has reached\.link = "):
        spec_of(raw, "x")


def test_files_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_gpu(str(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        load_gpu(str(path))
