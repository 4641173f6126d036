"""The expert load in ``trine report``: heat maps of what a run has recorded, and their colours."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.launch.cli import main
from engine.launch.run_report.charts import BOUNDS, HeatMap, expert_charts
from engine.launch.run_report.recorded_run import read_run
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.launch.test_report import Outline
from tests.recorded_runs import moe
from tests.resumed_runs import own_rows


def rank(folder: Path, world: World) -> list[dict[str, Any]]:
    settings = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "parallel": {"data": world.size},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "monitor": {"report": str(folder), "every": 1, "expert_load": True},
    }  # fmt: skip
    with engine.initialize(moe, settings, world=world) as eng:
        return [dict(eng.train_batch(own_rows(eng, batch)).expert_load) for batch in models.batches_for("qwen3", 4, 3)]


def test_a_page_shows_the_experts_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = run_thread_ranks(2, partial(rank, tmp_path))[0]
    assert main(["report", str(tmp_path)]) == 0
    capsys.readouterr()
    recorded = [row["expert_load"] for row in read_run(tmp_path).steps]
    assert recorded == json.loads(json.dumps(told))
    page = (tmp_path / "report.html").read_text()
    assert "experts" in Outline(page).ids
    section = page.split('id="experts"')[1].split("</section>")[0]
    newest = told[-1]["model.layers.0.mlp.experts"]
    assert f"<b>{max(newest) * 4 / sum(newest):.3g}</b>" in section
    assert section.count("<svg") == 4, "the busiest experts, all layers, and both layers over the steps"


def steps_of(*loads: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [{"step": step, "expert_load": load} for step, load in enumerate(loads, start=1)]


def test_without_counts_there_is_no_figure() -> None:
    for steps in ([], [{"step": 1}], steps_of({"a": [0, 0]})):
        assert expert_charts(steps) == ("", "")


def test_colours_say_how_far_from_even_an_expert_is() -> None:
    shares = [0.0, 0.3, 0.7, 1.0, 1.3, 3.0, 5.0]
    assert len(shares) == len(BOUNDS) + 1
    picture = HeatMap(
        title="t", cells=[shares], rows=["0"], tips=["even & odd"], columns=range(len(shares)), across="step"
    ).drawn("")
    assert re.findall(r'<path class="m(\d)" d="M([\d.]+) ', picture) == [
        (str(level), f"{44 + level * 310 / 7:.1f}") for level in range(7)
    ]
    assert "even &amp; odd" in picture


def test_equal_neighbours_are_one_rectangle() -> None:
    picture = HeatMap(title="t", cells=[[1.0] * 9], rows=["0"], tips=[""], columns=range(9), across="step").drawn("")
    assert picture.count("M44.0 ") == 1 and picture.count("h310.0") == 1


def test_many_steps_are_added_up_and_few_layers_are_drawn_step_by_step() -> None:
    load = {f"blocks.{layer}.moe": [10 + layer, 10, 10, 10 - layer] for layer in range(9)}
    drawn, below = expert_charts(steps_of(*[load] * 100))
    assert drawn.count("<svg") == 2 + 6 and "the 6 of 9 layers that are least even" in below
    assert all(f">blocks.{layer}.moe<" in drawn for layer in range(3, 9)) and ">blocks.2.moe<" not in drawn
    assert '">8</text>' in drawn, "layers are named by what tells them apart"
    assert len(drawn) < 60_000


def test_a_layer_that_changes_its_experts_counts_as_it_is_now() -> None:
    drawn, _ = expert_charts(steps_of({"a": [1, 3]}, {"a": [2, 2, 2, 6]}, {"b": [5, 5]}))
    assert "<b>2</b>" in drawn and "b: 1 to 1 times the mean, 0 of 2 experts without rows" in drawn


@pytest.mark.parametrize("load", ['{"a": [1, "2"]}', '{"a": 3}', "[3]"])
def test_damaged_counts_are_one_sentence(load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_thread_ranks(1, partial(rank, tmp_path))
    steps = tmp_path / "steps.jsonl"
    row = steps.read_text().splitlines()[0]
    steps.write_text(re.sub(r'"expert_load": \{.*?\}', f'"expert_load": {load}', row) + "\n")
    assert main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "steps.jsonl cannot be read (ValueError: line 1 is not a step" in said
