"""Configurations in every format that people write, and single keys that a command line changes."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import load_config
from engine.config.config_file import is_override
from engine.errors import ConfigError
from tests.engine.config.valid_configs import FULL

EXPECTED = {"train_batch_size": 8, "seed": 1, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}
FORMS = {
    "run.json": '{"train_batch_size": 8, "seed": 1, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}}',
    "comments.json": """{
  // rows of a step
  "train_batch_size": 8, # all ranks
  /* fixed,
     for all */
  "seed": 1,
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4,},},
}""",
    "run.toml": 'train_batch_size = 8\nseed = 1\n[optimizer]\ntype = "AdamW"\nparams = {lr = 3e-4}\n',
    "run.yaml": "train_batch_size: 08  # rows\nseed: 1\noptimizer:\n  type: AdamW\n  params:\n    lr: 3e-4\n",
    "run.yml": "train_batch_size: 8\nseed: 1\noptimizer: {type: AdamW, params: {<<: {lr: 1.0}, lr: 3e-4}}\n",
}


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_says_the_same(tmp_path: Path, name: str) -> None:
    config = load_config(written(tmp_path, name, FORMS[name]), 1)
    assert config == load_config(EXPECTED, 1) and not config.notes


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def as_toml(value: Any) -> str:
    """An inline value of TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(entry)}" for key, entry in value.items()) + "}"
    return "[" + ", ".join(map(as_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


def test_every_key_can_be_said_in_every_form(tmp_path: Path) -> None:
    full = load_config(FULL).to_json()
    lines = [f"{key} = {as_toml(value)}" for key, value in without_nulls(full).items()]
    assert load_config(written(tmp_path, "run.toml", "\n".join(lines))) == load_config(without_nulls(full))
    assert load_config(written(tmp_path, "run.yaml", yaml.safe_dump(full))) == load_config(full)
    assert load_config(written(tmp_path, "run.json", json.dumps(full, indent=1))) == load_config(full)


def test_comments_are_not_looked_for_in_text(tmp_path: Path) -> None:
    text = '{"train_batch_size": 8, /* x */ "checkpoint": {"folder": "a//b#c/*d*/,}"}}'
    assert load_config(written(tmp_path, "run.json", text)).checkpoint.folder == "a//b#c/*d*/,}"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "run.json",
            '{\n  # rows\n  "seed": 1,\n  "seed": 2\n}',
            "seed: this key is given twice in one object; keep one of them.",
        ),
        ("run.json", '{ // rows\n "seed": 1,,\n}', "not JSON at line 2 column 12"),
        (
            "run.toml",
            "seed = 1\nseed = 2\n",
            "not TOML (Cannot overwrite a value (at line 2, column 9));",
        ),
        ("run.toml", "[seed\n", "not TOML (Expected ']' at the end of a table declaration (at line 1, column 6))"),
        ("run.yaml", "seed: 1\nseed: 2\n", "seed: this key is given twice in one object; keep one of them."),
        ("run.yaml", "seed: [1\n", "not YAML at line 2 column 1 (expected ',' or ']', but got '<stream end>'); fix it"),
        ("run.yaml", "seed: off\n", 'seed: "off" is text'),
        ("run.yaml", "[1, 2]: 3\n", "not YAML at line 1 column 1 (a key is a list or an object); fix it there."),
        ("run.yaml", "- 1\n", "[1] is a list; give one JSON object, the path of one, or a dict."),
        ("run.yaml", "seed: !!python/object:os.system x\n", "not YAML at line 1 column 7 (could not determine a"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    message = refusal(written(tmp_path, name, text))
    assert words in message and "\n" not in message


def test_yaml_without_its_reader_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = written(tmp_path, "run.yaml", "seed: 1")
    assert refusal(path) == (
        f"{path}: YAML is read by PyYAML, which is not installed; install it (pip install pyyaml), or write JSON or "
        "TOML, which need nothing."
    )


def test_a_file_without_commas_is_read_as_hjson(tmp_path: Path) -> None:
    path = written(tmp_path, "run.json", '{\n  # rows of a step\n  "train_batch_size": 8\n  "seed": 1\n}')
    config = load_config(path)
    assert replace(config, notes=()) == load_config({"train_batch_size": 8, "seed": 1})
    assert config.notes == (
        f"{path}: read as Hjson, since it is not JSON at line 4 column 3 (Expecting ',' delimiter).",
    )


def test_without_hjson_such_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    path = written(tmp_path, "run.json", '{"train_batch_size": 8\n"seed": 1}')
    assert refusal(path) == f"{path}: not JSON at line 2 column 1 (Expecting ',' delimiter); fix it there."


# ------------------------------------------------------------------------------------------------ overrides


def test_an_override_is_what_the_file_would_say() -> None:
    given = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}, "groups": [
        {"params": ["*.bias"], "lr": 1.0}
    ]}}  # fmt: skip
    before = json.dumps(given)
    words = [
        "optimizer.params.lr=3e-4", "optimizer.groups.0.lr=2e-4", "parallel.schedule=gpipe", 'keep_fp32=["*.bias"]',
        "bf16.enabled=true", "seed=1", "seed=2", "scheduler=null", "checkpoint.folder=runs/a=b",
    ]  # fmt: skip
    config = load_config(given, overrides=words)
    assert json.dumps(given) == before, "the user's own dict is not changed"
    assert config == load_config(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}, "groups": [{"params": ["*.bias"], "lr": 2e-4}]},
            "parallel": {"schedule": "gpipe"},
            "keep_fp32": ["*.bias"],
            "bf16": {"enabled": True},
            "seed": 2,
            "checkpoint": {"folder": "runs/a=b"},
        }
    )


def test_deepspeeds_keys_are_overridden_before_they_are_translated(tmp_path: Path) -> None:
    path = written(tmp_path, "ds.json", '{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    assert load_config(path, overrides=["zero_optimization.stage=1"]).zero_optimization.stage == 1
    settled = load_config(path, 2)
    assert load_config(settled, overrides=["zero_optimization.stage=1"]).zero_optimization.stage == 1


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("optimizer.params.epss=1", "optimizer.params.epss: unknown key. Did you mean optimizer.params.eps?"),
        ("seed=-1", "seed: -1 is below 0; give"),
        ("seed.low=1", "seed.low: seed is a number, which has no low; give seed itself."),
        ("keep_fp32.3=x", "keep_fp32.3: 3 is not an index of a list of 1; give a number below 1."),
        (
            'scheduler={"type": "LinearLR", "type": "LinearLR"}',
            "scheduler.type: this key is given twice in one object; keep one of them.",
        ),
        ("--lr=1", '"--lr=1" is not an override; give KEY=VALUE, such as optimizer.params.lr=3e-4.'),
    ],
)
def test_a_wrong_override_is_one_sentence(tmp_path: Path, word: str, sentence: str) -> None:
    path = written(tmp_path, "run.json", '{"train_batch_size": 8, "seed": 1, "keep_fp32": ["a"]}')
    message = refusal(path, word)
    assert sentence in message and "\n" not in message


def test_which_words_are_overrides() -> None:
    assert [is_override(word) for word in ("a.b=1", "seed=", "config.json", "-x=1", "a b=1", "dir/x=1")] == [
        True, True, False, False, False, False,
    ]  # fmt: skip
