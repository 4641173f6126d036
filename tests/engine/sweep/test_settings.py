"""Settings of a sweep: forms of values, and mistakes in one sentence each before any rank communicates."""

from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.sweep.settings import read_sweep
from engine.sweep.study import SweepStudy, make_component
from engine.sweep.sweep import Sweep

LR = {"optimizer.params.lr": {"log": [1e-5, 1e-2]}}
GIVEN: dict[str, Any] = {"space": LR, "trials": 3}


def test_each_form_of_values_is_read() -> None:
    read = read_sweep({
        "space": LR | {
            "gradient_clipping": {"uniform": [0, 2]},
            "optimizer.groups.0.lr": {"choices": [1e-4, 1e-3, 1e-4]},
            "train_batch_size": {"int": [8, 11]},
            "scheduler": {"choices": [None, {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}]},
        },
        "trials": 4,
    })  # fmt: skip
    log, uniform, listed, whole, objects = read.space
    assert (log.form, log.values, log.listed) == ("log", (1e-5, 1e-2), None)
    assert uniform.values == (0.0, 2.0) and whole.listed == (8, 9, 10, 11)
    assert [listed.decode(value) for value in listed.listed or ()] == [1e-4, 1e-3]
    assert [objects.decode(value) for value in objects.values][1]["params"] == {"warmup_num_steps": 5}
    assert read.pruner.type == "successive_halving" and read.count == 4


def test_a_grid_counts_all_combinations() -> None:
    space = {"gradient_clipping": {"choices": [0.5, 1, 2]}, "train_batch_size": {"int": [8, 11]}}
    assert read_sweep({"space": space, "grid": True}).count == 12


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown path": (
        {"space": {"optimizer.params.lrr": {"log": [1e-5, 1e-2]}}},
        "optimizer.params.lrr: unknown key. Did you mean optimizer.params.lr?",
    ),
    "own path": (
        {"space": {"checkpoint.folder": {"choices": ["a"]}}},
        'checkpoint.folder: the sweep sets this key itself for each trial; leave it out of "space".',
    ),
    "empty space": ({"space": {}}, "space: {} has no key to change; give {"),
    "no space": ({"space": None}, "space: null is no value; give {"),
    "unknown form": (
        {"space": {"gradient_clipping": {"range": [0, 1]}}},
        'space.gradient_clipping: {"range": [0, 1]} is no form of values; give {"log": [LOW, HIGH]}',
    ),
    "two forms": (
        {"space": {"gradient_clipping": {"log": [1, 2], "uniform": [1, 2]}}},
        "is no form of values; give",
    ),
    "log of zero": ({"space": {"optimizer.params.lr": {"log": [0, 1]}}}, "0 is not above 0; give a number above 0."),
    "text as a bound": ({"space": {"optimizer.params.lr": {"uniform": ["a", 1]}}}, '"a" is text; give a number.'),
    "upside down": (
        {"space": {"optimizer.params.lr": {"log": [1e-2, 1e-5]}}},
        "is no range, because 0.01 is not below 1e-05; give [LOW, HIGH].",
    ),
    "one bound": ({"space": {"optimizer.params.lr": {"log": [1]}}}, "[1] has 1 entries; give [LOW, HIGH]."),
    "no choice": ({"space": {"optimizer.params.lr": {"choices": []}}}, "the list of choices is empty; give"),
    "unknown key": ({"prunner": "median"}, "prunner: unknown key. Did you mean pruner?"),
    "pruner's form": ({"pruner": 3}, 'pruner: 3 is a number; give a name, or {"type": NAME, "params": {...}}.'),
    "direction": ({"direction": "down"}, 'direction: "down" is not a direction; give "minimize" or "maximize".'),
    "no such metric": ({"metric": "los"}, 'metric: "los" is no number of a step report; give loss, grad_norm'),
    "no trials": ({"trials": 0}, "trials: 0 is below 1; give a whole number of at least 1."),
    "number of trials": ({"trials": None}, "trials: missing; give the number of trials, or set grid to true."),
    "grid of a range": (
        {"grid": True, "trials": None},
        'grid tries each value of a key, but {"log": ...} is a range of real numbers; give {"choices": [...]}',
    ),
    "grid with trials": (
        {"grid": True, "space": {"gradient_clipping": {"choices": [1]}}},
        "trials: 3 is given, but grid",
    ),
    "never reports": ({"report_every": 0}, "report_every: 0 is below 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_file_is_one_sentence(mistake: str) -> None:
    changes, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as raised:
        read_sweep(GIVEN | changes)
    said = str(raised.value)
    assert words in said
    assert "\n" not in said and said.endswith((".", "?"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pruner": "halving"}, 'pruner: "halving" is none of Optuna\'s; give hyperband, median, nop'),
        ({"pruner": "patient"}, 'pruner: "patient" is none of Optuna\'s; give'),
        ({"sampler": "best"}, 'sampler: "best" is none of Optuna\'s; give brute_force, cmaes'),
        (
            {"pruner": {"type": "successive_halving", "params": {"min_resource": 0}}},
            "pruner.params: The value of `min_resource` is 0",
        ),
        ({"pruner": {"type": "median", "params": {"depth": 3}}}, "keyword argument 'depth'; see MedianPruner"),
    ],
    ids=["pruner", "wrapping pruner", "sampler", "value", "argument"],
)  # fmt: skip
def test_optuna_s_names_and_arguments_are_checked_before_any_store(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.sweep.sweep.open_store", lambda world: pytest.fail("communicates"))
    with pytest.raises(ConfigError) as raised:
        Sweep(GIVEN | changes | {"journal": str(tmp_path / "journal")})
    assert words in str(raised.value) and not list(tmp_path.iterdir())


def test_without_optuna_the_remedy_is_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sweep.study.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; install it with pip install 'trine\[sweep\]'"):
        make_component("pruners", read_sweep(GIVEN).pruner)


@pytest.mark.parametrize("text", [b"", b'{"op": 1}\n{"op_c\n', b"PK\x03\x04\n"], ids=["folder", "torn", "other"])
def test_a_journal_that_is_none_is_one_sentence(text: bytes, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    if text:
        journal.write_bytes(text)
    else:
        journal.mkdir()
    with pytest.raises(ConfigError, match=r"journal: .* cannot be used \(.*\); name a file of a sweep, or a new one"):
        SweepStudy(read_sweep(GIVEN | {"journal": str(journal)}))


def test_a_journal_of_another_sweep_is_refused(tmp_path: Path) -> None:
    journal = {"journal": str(tmp_path / "journal")}
    SweepStudy(read_sweep(GIVEN | journal))
    with pytest.raises(
        ConfigError, match=r'direction: "maximize" was given, but the sweep in journal .* has "minimize"; give the'
    ):
        SweepStudy(read_sweep(GIVEN | journal | {"direction": "maximize"}))
