"""The command line: answers at once, without torch, in sentences."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import engine
from engine.launch.cli import CommandParser, main, make_parser

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.json"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_right(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = "8" if path.name.startswith("dp2_tp2_pp2") else "4"
    assert main(["check", str(path), "--world", ranks]) == 0
    assert f"{path} is valid for {ranks} ranks" in capsys.readouterr().out


def test_all_mistakes_are_printed_and_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wrong.json"
    path.write_text('{"train_batch": 8, "zero_optimization": {"stage": 4}}')
    assert main(["check", str(path)]) == 1
    text = capsys.readouterr().err
    assert "train_batch: unknown key. Did you mean train_batch_size?" in text and "zero_optimization.stage: 4" in text


def test_check_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs/dp_zero1.json")
    assert main(["check", path, "optimizer.params.lr=1e-4", 'keep_fp32=["*norm*"]', "--world", "4"]) == 0
    assert f"{path} is valid for 4 ranks" in capsys.readouterr().out
    assert main(["check", path, "optimizer.params.epss=1e-4"]) == 1
    assert "optimizer.params.epss: unknown key. Did you mean optimizer.params.eps?" in capsys.readouterr().err


ONE_RULE: tuple[dict[str, Any], ...] = (
    {"zero_optimization": {"stage": 1, "reduce": "microbatch"}},
    {"zero_optimization": {"stage": 2, "gather": "step"}},
    {"zero_optimization": {"keep_gathered_bytes": 9}},
    {"torch_autocast": {"enabled": True}, "fp16": {"enabled": True}},
    {"parallel": {"sequence_parallel_regather": True}},
    {"bf16": {"enabled": True, "bf16_optimizer_states": True}},
    {"parallel": {"schedule": "no_such_file.csv"}},
    {"parallel": {"schedule": "dualpipe-v"}, "gradient_accumulation_steps": 1},
    {"parallel": {"schedule": "interleaved"}},
    {"activation_checkpointing": {"mode": "selective", "save": ["aten.no_such"]}},
    {"monitor": {"tensorboard": "board"}},
    {"monitor": {"wandb": "project"}},
)


@pytest.mark.parametrize("raw", ONE_RULE, ids=str)
def test_check_and_initialize_refuse_in_the_same_words(
    raw: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("engine.config.sections.find_spec", lambda name: None)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 4} | raw))
    with pytest.raises(engine.EngineError) as caught:
        engine.initialize(nn.Linear(2, 2), config).close()
    assert main(["check", str(config), "--ranks", "1"]) == 1
    assert capsys.readouterr().err.strip() == str(caught.value)


@pytest.mark.parametrize("plan", ["no_such.json", {"*.q": "colunm"}], ids=str)
def test_a_tensor_plan_that_fits_no_model_is_refused(
    plan: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 4, "parallel": {"tensor": 2, "tensor_plan": plan}}))
    assert main(["check", str(config)]) == 1
    text = capsys.readouterr().err
    assert "parallel.tensor_plan = 'no_such.json' cannot be read" in text or "colunm" in text


def test_check_says_what_it_cannot_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    tuned = {"optimizer": None, "compile": True, "kernels": "triton", "keep_fp32": ["*norm"]}
    grid = {"parallel": {"tensor": 2, "pipeline": 2, "split": ["a", "b"]}}
    more = {"checkpoint": {"init_from": "x"}, "activation_checkpointing": {"mode": "selective", "every": 3}}
    config.write_text(json.dumps({"train_batch_size": 4} | tuned | grid | more))
    assert main(["check", str(config)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not checked: ")]
    for key in ("--ranks N", "parallel.tensor 2", "parallel.pipeline 2", "parallel.split", "keep_fp32", "kernels",
                "optimizer null", "activation_checkpointing.every 3", "compile", "checkpoint.init_from"):  # fmt: skip
        assert sum(key in line for line in said) == 1, (key, said)
    config.write_text(json.dumps({"train_batch_size": 4}))
    assert main(["check", str(config), "--ranks", "2"]) == 0
    assert capsys.readouterr().out == f"{config} is valid for 2 ranks\n"


ORDERS: tuple[tuple[str, ...], ...] = (
    ("verify --world 2 --weights train.py -- --steps 9 -w", "verify train.py --world 2 --weights -- --steps 9 -w"),
    ("verify --world 2 mine:build run.json a=1 b=2", "verify mine:build --world 2 run.json a=1 b=2",
     "verify mine:build run.json a=1 --wor=2 b=2", "verify mine:build run.json --wor 2 a=1 b=2"),
    ("compile --world 2 --gpu h100 train.py -- --steps 9", "compile train.py --world 2 --gpu h100 -- --steps 9"),
    ("plan --world 2 --layers -1 folder run.json a=1", "plan folder --layers -1 run.json --world 2 a=1"),
    ("check --world 2 run.json a=1", "check run.json --world 2 a=1"),
)  # fmt: skip


@pytest.mark.parametrize("orders", ORDERS, ids=[lines[0].split()[0] + f" {i}" for i, lines in enumerate(ORDERS)])
def test_options_stand_before_between_or_after_the_other_arguments(orders: tuple[str, ...]) -> None:
    first, *others = (vars(make_parser().parse_args(line.split())) for line in orders)
    assert first["world"] == 2
    for other in others:
        assert other == first


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    properties = json.loads(capsys.readouterr().out)["properties"]
    assert "train_batch_size" in properties
    assert properties["watchdog"]["properties"]["enabled"]["type"] == "boolean"


@pytest.mark.long
def test_plan_needs_no_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(ROOT / "configs" / "dp_zero1.json"), "--world", "48"]) == 0
    text = capsys.readouterr().out
    assert "48 ranks = 1 pipeline x 48 data x 1 tensor" in text and "6,482,432 parameters" in text


@pytest.mark.long
def test_plan_of_three_axes_tells_the_cut_and_draws_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "configs" / "dp2_tp2_pp2_zero1.json")
    assert main(["plan", config, "--world", "8", "--layers", "4"]) == 0
    text = capsys.readouterr().out
    for expected in ("8 ranks = 2 pipeline x 2 data x 2 tensor", "2 ranks shard the layers",
                     "found by zero patterns, proven",
                     "stage 0: tokens .. blocks.1", "stage 1: blocks.2 .. head", "1f1b, 20% idle",
                     "rank 0 |F0 F1  .  . B0 B0 F2", "pp 3.0 MiB"):  # fmt: skip
        assert expected in text, text


@pytest.mark.long
def test_plan_measures_where_the_configuration_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "auto.json"
    parallel = {"pipeline": 2, "balance": "time", "schedule": "auto"}
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "parallel": parallel}))
    sizes = ["--layers", "3", "--width", "16", "--context", "8"]
    assert main(["plan", str(config), "--world", "2", *sizes]) == 0
    text = capsys.readouterr().out
    assert "2 stages, balanced by measured seconds" in text and "note       measured 5 kinds of calls on " in text
    assert "auto: " in text and " MiB of activations" in text and ": 1.00 x the time" in text


@pytest.mark.parametrize("arguments", [["-m", "engine.launch.cli", "--help"], ["train.py", "--help"]])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    # a module that stands in the way of torch would make the import fail
    code = f"""
import runpy, sys
sys.modules["torch"] = None
sys.argv = {arguments[-2:]!r}
try:
    {
        "runpy.run_module('engine.launch.cli', run_name='__main__')"
        if arguments[0] == "-m"
        else "runpy.run_path('train.py', run_name='__main__')"
    }
except SystemExit as done:
    sys.exit(done.code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage:" in done.stdout, done.stderr


def test_a_reader_that_ends_early_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        assert main(["schema"]) == 141


def test_a_broken_pipe_of_a_command_is_no_end_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise BrokenPipeError("of a socket")

    monkeypatch.setattr(CommandParser, "parse_args", lambda *_: Namespace(run=broken))
    with pytest.raises(BrokenPipeError, match="of a socket"):
        main(["schema"])
