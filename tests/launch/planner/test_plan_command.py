"""``trine plan``: what it prints for each kind of model, and each mistake in a sentence, most of them without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from engine.config import load_config
from engine.launch.cli import main, make_parser
from engine.launch.planner import plan_command, planned_model
from engine.launch.planner.plan_command import settings_of
from engine.launch.planner.plan_report import setting_text
from engine.launch.planner.plan_request import ModelSource, read_request
from engine.planning.cost_model.layout import TrainingLayout

ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
    "intermediate_size": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GRID = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "parallel": {"tensor": 2, "pipeline": 2}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW"},
}  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plan for four ranks and 16 rows, with which several tests compare."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with redirect_stdout(StringIO()) as written:
        assert main(["plan", str(folder), "--world", "4", "--batch", "16", "--json"]) == 0
    return json.loads(written.getvalue())


@pytest.fixture
def deeper(llama: Path) -> Path:
    """The same with four blocks: shorter models have none that are counted for the others."""
    (llama / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 4}))
    return llama


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 1
    return capsys.readouterr().err.strip()


def test_a_folder_with_a_configuration(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps(GRID))
    found = planned(capsys, llama, config, "--nodes", "2x4", "--gpu", "a100", "--price", "2")
    assert (found["gpu"], found["world"], found["gpus_of_a_node"]) == ("NVIDIA A100 SXM4 80 GB", 8, 4)
    assert found["fits"] and len(found["memory_bytes"]) == 2
    assert found["counted"].count(" MiB in ") == 2
    for rank in found["memory_bytes"]:  # more than the values of a microbatch between its blocks
        assert rank["buffers"] == 0 and rank["activations"] > 2 * 2 * 64 * 64 and rank["activations"] % 2 == 0
    assert {row["axis"] for row in found["sent_bytes"]} == {"dp", "tp", "pp", "replica", "world"}
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["dollars_per_billion_tokens"] == pytest.approx(2 / 3600 * 1e9 / found["tokens_per_second_of_a_gpu"])
    assert "config" not in found


def test_a_file_alone_of_any_name(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text((llama / "config.json").read_text())
    given = "--world", 2, "--batch", 4, "--estimate"
    alone, folder = planned(capsys, file, *given), planned(capsys, llama, *given)
    assert (alone.pop("model"), folder.pop("model")) == (str(file), str(llama))
    assert alone == folder


@pytest.mark.long
def test_a_folder_alone(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:

    monkeypatch.setattr(planned_model, "MOST_SILENT", 1)
    assert main(["plan", str(llama), "--world", "16", "--gpu", "h100", "--context", "32", "--json"]) == 0
    written = capsys.readouterr()
    found = json.loads(written.out)
    assert f"counting activations of {found['layout']} on shapes: " in written.err
    config = load_config(found["config"], 16)
    assert config.dp * config.tp * config.pp == 16 and config.train_batch_size == (1 << 22) // 32


@pytest.mark.parametrize(
    ("settings", "bytes_of_each"),
    [
        ({}, 12),
        ({"optimizer": {"type": "SGD"}}, 4),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 8),
        ({"optimizer": [{"type": "Lion", "match": ["a"]}, {"type": "Adafactor"}], "ema": {"decay": 0.9}}, 12),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, 0),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}}, 9),
    ],
)
def test_closed_forms_have_the_state_of_the_configuration(settings: dict[str, Any], bytes_of_each: float) -> None:
    assert plan_command.element_state_bytes(load_config({"train_batch_size": 1, **settings}, 1)) == bytes_of_each


@pytest.mark.parametrize(
    ("section", "key", "value", "least"),
    [
        ("zero_optimization", "reduce", "microbatch", 4),
        ("zero_optimization", "gather", "step", 3),
        ("zero_optimization", "zero_hpz_partition_size", 2, 3),
        ("zero_optimization", "zero_quantized_gradients", True, 1),
        ("zero_optimization", "shard_size", 4, 1),
        ("parallel", "expert", 2, 4),
    ],
)
def test_a_layout_takes_what_it_accepts_of_a_configuration(section: str, key: str, value: Any, least: int) -> None:
    base = {"optimizer": {"type": "AdamW"}, section: {key: value}}
    for stage in range(4):
        settings = settings_of(TrainingLayout(dp=4, stage=stage), base)
        assert (settings[section].get(key) == value) == (stage >= least)
        assert load_config(settings, 4).parallel.expert == 1
    assert "shard_size" not in settings_of(TrainingLayout(dp=2, tp=2, stage=1), base)["zero_optimization"]


@pytest.mark.long
def test_a_search_knows_what_the_host_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--layers", 8, "--width", 2048, "--heads", 16, "--context", 256, "--memory", 5, "--world", 1)
    offloaded = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "run.json").write_text(json.dumps(GRID | {"parallel": {}, "zero_optimization": offloaded}))
    found = planned(capsys, tmp_path / "run.json", *sizes, "--search", "--estimate", "--top", 1)
    assert found["finalists"][0]["fits"]


@pytest.mark.long
def test_the_built_in_decoder_prints_the_plan_and_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--layers", 2, "--width", 64, "--heads", 2, "--context", 32, "--vocabulary", 64)
    assert main(["plan", *map(str, sizes), "--world", "16", "--batch", "64", "--price", "1"]) == 0
    text = capsys.readouterr().out
    names = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "]
    assert names[:2] == ["grid", "model"]
    costs = ["gpu", "placement", "memory", "counted", "step", "speed", "price", "fits"]
    assert [name for name in dict.fromkeys(names) if name in costs] == costs
    assert "64 rows" in text and "16 x NVIDIA H100 SXM5 80 GB, 8 a node" in text


def test_a_search_writes_a_configuration_that_loads(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "best.json"
    assert main(["plan", str(llama), "--world", "8", "--batch", "32", "--search", "--top", "2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "whole plans of 2" in text
    why = text[text.index("\nwhy\n") :].splitlines()[2:5]
    assert "s a step, of which " in why[0] and "grid" in why[1] and "fit in closed form" in why[2]
    config = load_config(out, 8)
    assert config.train_batch_size == 32 and config.dp * config.tp * config.pp == 8
    assert why[0].split()[0] == f"{planned(capsys, llama, out, '--world', 8)['step_seconds']:.3g}"


@pytest.mark.long
def test_what_does_not_fit_says_what_would(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 90000}
    (llama / "config.json").write_text(json.dumps(raw))
    config = tmp_path / "run.json"
    config.write_text(json.dumps({**GRID, "parallel": {}, "zero_optimization": {"stage": 0}}))
    found = planned(capsys, llama, config, "--world", 8, "--memory", 2)
    assert not found["fits"] and found["nearest_that_fits"]
    assert main(["plan", str(llama), str(config), "--world", "8", "--memory", "2", "--estimate"]) == 0
    assert "no: " in (text := capsys.readouterr().out) and "the nearest that does: " in text
    assert "(" not in text[text.index("the nearest that does: ") :].partition(" (")[0], "settings stand in words"


def test_settings_stand_in_words() -> None:
    assert setting_text("grid", (8, 1, 1, 2, 1)) == "dp8 x tp1 x pp2"
    assert setting_text("grid", (8, 1, 1, 2, 4)) == "dp8 x tp1 x pp2 (ep4)"
    assert setting_text("microbatches", (1, 16)) == "16 of 1 row"
    assert setting_text("schedule", ("zb-v", 2)) == "zb-v of 2 stages a rank"
    assert setting_text("zero", (3, "microbatch")) == "3 of every microbatch"
    assert setting_text("recomputation", "full") == "full"


def test_rates_of_another_gpu_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--vocabulary", "64")
    for gpu, said in (("b200", True), ("h200", False), ("h100", False)):
        assert main(["plan", *sizes, "--world", "1", "--batch", "1", "--gpu", gpu, "--estimate"]) == 0
        assert ("are from h100, not measured on this kind of GPU" in capsys.readouterr().out) is said


@pytest.mark.long
def test_a_search_proposes_nothing_slower_than_the_plain_command(
    llama: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = llama, "--world", 4, "--batch", 16
    real = plan_command._finalists
    monkeypatch.setattr(  # the fastest layouts are no finalists
        plan_command,
        "_finalists",
        lambda finals, found, top: real(finals, replace(found, ranked=found.ranked[-3:]), top),
    )
    searched = planned(capsys, *given, "--search", "--top", 1)["finalists"]
    assert searched[0]["layout"] == plain["layout"] and len(searched) == 2
    assert searched[0]["step_seconds"] <= plain["step_seconds"]


def count_more(monkeypatch: pytest.MonkeyPatch, modes: Sequence[str], gib: float) -> list[str]:
    """Counting finds so much more where these are recomputed; returns the layouts that are counted. No samples."""

    monkeypatch.setattr(planned_model.SampledBlocks, "of", lambda *_, **__: None)

    layouts = list[str]()

    def counted(costs: Any, *_: object) -> tuple[Any, str]:
        layouts.append(str(costs.layout))
        more = gib * 2**30 if costs.layout.recomputation in modes else 0.0
        memory = tuple(replace(rank, activations=rank.activations + more) for rank in costs.memory)
        return replace(costs, memory=memory), "counted"

    monkeypatch.setattr(planned_model, "counted_costs", counted)
    return layouts


@pytest.mark.long
def test_a_layout_that_is_too_large_once_counted_gives_way(
    llama: Path, plain: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = llama, "--world", 4, "--batch", 16
    counted = count_more(monkeypatch, ["none", "selective"], 100.0)
    found = planned(capsys, *given)
    assert found["fits"] and found["layout"].endswith("recomputation full") and counted[0] == plain["layout"]
    assert [one["layout"] for one in found["passed"]] == counted[:-1] and counted[-1] == found["layout"]
    assert 2 <= len(counted) == len(set(counted)) <= 6 and plain["passed"] == []
    assert main(["plan", *map(str, given)]) == 0
    assert "that fit in closed form but not once counted: " + counted[0] in capsys.readouterr().out
    searched = planned(capsys, *given, "--search", "--top", 2)["finalists"]
    assert searched[0]["fits"] and searched[0]["counted"] and searched[0]["layout"].endswith("recomputation full")
    assert sum(one["fits"] for one in searched[1:]) == 0


def test_no_layout_fits_once_counted(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = count_more(monkeypatch, ["none", "selective", "full"], 100.0)
    assert main(["plan", str(llama), "--world", "4", "--batch", "16"]) == 0
    text = capsys.readouterr().out
    assert "  fits       no: " in text and f"nor does any other of the {len(counted)} layouts that were counted" in text
    assert not planned(capsys, llama, "--world", 4, "--batch", 16, "--search", "--top", 1)["finalists"][0]["fits"]


@pytest.mark.long
def test_a_search_keeps_estimates_where_counting_would_take_long(
    deeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setattr(planned_model, "MOST_SEARCHED", 1)
    out = tmp_path / "best.json"
    given = deeper, "--world", 4, "--batch", 16, "--search", "--top", 1, "--out", out
    (found,) = planned(capsys, *given)["finalists"]
    start = "activations and buffers are estimates, scaled to counted blocks: a search does not run "
    assert found["counted"].startswith(start)
    alone = planned(capsys, deeper, out, "--world", 4)
    assert alone["counted"].startswith("activations and buffers of each pipeline rank, by storages on shapes: ")


@pytest.mark.long
def test_a_model_that_is_too_large_to_count_has_estimates_at_the_scale_of_its_blocks(
    deeper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    config = tmp_path / "run.json"
    config.write_text(json.dumps({**GRID, "parallel": {}}))
    given = deeper, config, "--world", 8
    (counted,) = planned(capsys, *given)["memory_bytes"]
    monkeypatch.setattr(planned_model, "MOST_LEAVES", 1)
    found = planned(capsys, *given)
    (estimate,) = found["memory_bytes"]
    start = "activations and buffers are estimates, scaled to counted blocks: "
    assert found["counted"].startswith(start) and found["counted"].endswith("modules are too many to run on shapes")
    assert estimate["activations"] + estimate["buffers"] == pytest.approx(counted["activations"], rel=0.1)
    asked = planned(capsys, *given, "--estimate")
    assert asked["memory_bytes"] == found["memory_bytes"] and asked["counted"] == start + "--estimate was given"


def test_a_model_is_planned_as_it_trains(llama: Path) -> None:
    """Without keys and values that are kept: no block is alone with them, so none would be cut."""
    from engine.launch.planner.planned_model import build_model

    model: Any = build_model(ModelSource(folder=llama)).model
    assert [module.config.use_cache for module in model.modules() if hasattr(module, "config")].count(True) == 0


def test_a_function_builds_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_plan.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n"
        "    rows = {'input': torch.zeros(16, 8)}\n"
        "    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))\n"
        "    return model, rows, lambda output, batch: output.square().mean()\n\n\n"
        "def broken():\n    return nn.Linear(2, 2).weight.sum().item()\n"
    )
    monkeypatch.chdir(tmp_path)
    found = planned(capsys, "mine_to_plan:build", "--world", 2, "--batch", 4)
    assert found["world"] == 2 and found["flops_per_second"] > 0
    text = refused(capsys, "mine_to_plan:broken", "--world", 2)
    assert text.startswith("MODEL mine_to_plan:broken cannot be built on the meta device (RuntimeError: ")


def test_a_plan_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(GRID | {"parallel": {}}))

    def named(*line: str) -> str:
        return read_request(make_parser().parse_args(["plan", *line, "--world", "2"])).model.words

    hint = "(no MODEL is given; for yours, give a Hugging Face folder or module:function before CONFIG)"
    built_in = named(str(tmp_path / "run.json"))
    assert built_in.startswith("the built-in decoder: 8 blocks of width 256, 4 heads") and built_in.endswith(hint)
    assert hint not in named("--layers", "2") and "2 blocks" in named("--layers", "2")
    assert named("mine:build") == "mine:build"


MISTAKES: dict[tuple[str, ...], str] = {
    ("--world", "8", "--gpu", "h1000"): "--gpu h1000: there is no such kind of GPU",
    ("--world", "8", "--memory", "0.1"): "--memory 0.1: give the GiB of a GPU, from 1 to 4096",
    ("--world", "12"): "--world 12 does not fill nodes of 8 GPUs",
    ("--world", "0"): "--world 0: a plan needs at least 1 GPU",
    (): "neither --world nor --nodes is given",
    ("--nodes", "3"): "--nodes 3: it is not nodes x GPUs of a node",
    ("--nodes", "2x4", "--world", "9"): "--world 9 is not --nodes 2x4 = 8 GPUs",
    ("--world", "8", "--batch", "0"): "--batch 0 is not above 0",
    ("--world", "8", "--width", "65"): "--width 65 is not divisible by --heads 4",
    ("--world", "8", "--layers", "-1"): "--layers -1: a model has at least 1",
    ("--world", "8", "no/config.json"): "no/config.json does not exist",
    ("--world", "8", "what"): "MODEL what is neither a folder, a .json file nor module:function",
    ("--world", "8", "a:b", "--layers", "3"): "--layers is for the built-in decoder, but",
    ("--world", "8", "--memory", "1"): "no layout fits: of ",
    ("--nodes", "1x7", "--layers", "2", "--batch", "10"): "no grid of 7 ranks divides 10 rows, 4 heads and 2 blocks; ",
}


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES.items(), ids=[" ".join(given) for given in MISTAKES])
def test_mistakes(arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *arguments)
    assert text.startswith(sentence) and "\n" not in text and text.endswith(".")


def test_what_offload_would_leave_is_said_where_no_layout_fits(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "--world", "8", "--memory", "1")
    room = "a layout may fill 0.9 of 1.0 GiB (6% is left free); give more GPUs"
    assert f'with zero_optimization.offload_optimizer {{"device": "cpu"}}, but {room}' in text


def test_folders_without_a_model(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llama / "config.json").write_text("{}")
    assert "does not describe a model" in refused(capsys, llama, "--world", 8)
    (llama / "config.json").write_text("{")
    assert "cannot be read as JSON" in refused(capsys, llama, "--world", 8)
    (llama / "config.json").unlink()
    assert "has no config.json" in refused(capsys, llama, "--world", 8)


def test_mistakes_are_found_without_torch(tmp_path: Path) -> None:
    """Torch takes longer to import than everything else of these answers."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({**GRID, "parallel": {"tensor": 2}}))
    code = """
import sys
from engine.launch.cli import main
from engine.launch.planner.plan_request import ModelSource
for line in (
    "plan --gpu x", "plan --world 8 --memory 0", "plan --world 12", "plan --world 8 no/config.json",
    "plan --world 8 empty", "plan --world 8 --memory 1", "plan run.json --world 3", "plan --world 8 no-such",
    "verify empty run.json --world 2", "verify no/config.json run.json --world 2", "verify empty run.json --world 3",
    "plan --nodes 1x7 --layers 2 --batch 10", "verify no.py", "verify empty",
    "verify a:b no.json", "verify a:b run.json --world 2 --steps 0",
):
    assert main(line.split()) == 1, line
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and len(done.stderr.splitlines()) == 16, done.stderr


@pytest.mark.parametrize("counts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_longest_row_of_a_folder(
    counts: bool, deeper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, given = tmp_path / "best.json", (deeper, "--world", 2, "--memory", 2, "--longest")
    given = (*given, *(() if counts else ("--estimate",)))
    found = planned(capsys, *given, "--out", out)
    best, memory = found["longest"], found["longest"]["memory_bytes"]
    assert best["counted"] == counts and best["tokens"] % 256 == 0
    assert memory["total"] == pytest.approx(sum(value for kind, value in memory.items() if kind != "total"))
    assert memory["total"] <= 0.94 * found["gpu_memory_bytes"]
    assert [one["context"] for one in found["by_context"]] == [1, 2]
    assert load_config(json.loads(out.read_text()), 2).cp == best["context"]
    assert main(["plan", *map(str, given)]) == 0
    shown = capsys.readouterr().out
    assert f"longest: {best['tokens']:,} tokens a row, {best['layout']}" in shown
    assert "note: the model declares 64 positions" in shown


def test_rows_that_nothing_reads_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps(GRID))
    given = (tmp_path / "run.json", "--world", 8, "--batch", 64)
    assert refused(capsys, *given).startswith("--batch 64 is given, but a step of the configuration has 8 rows;")
    assert "leave one of them out" in refused(capsys, "--world", 8, "--batch", 64, "--longest")
    options = make_parser().parse_args(["plan", *map(str, given), "--search"])
    assert read_request(options).rows == 64


def test_a_longest_row_has_its_mistakes_in_a_sentence(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "leave one of them out" in refused(capsys, llama, "--world", 2, "--longest", "--search")
    assert "no layout on 2 GPUs fits" in refused(capsys, llama, "--world", 2, "--longest", "--memory", 1, "--estimate")
