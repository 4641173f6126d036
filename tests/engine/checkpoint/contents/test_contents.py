"""What data ranks hold together (every element once), and settings that a run has changed since it was saved."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checkpoint.contents.trainer_state import changed_settings, kept_options
from engine.checkpoint.format.pieces import Piece, covers_once
from engine.config import load_config
from tests.engine.checkpoint.fake_ranks import fake_run


class Layers(nn.Module):
    """Weights that end in the middle of shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def test_moments_of_data_ranks_tile_every_parameter() -> None:
    settings = {"train_batch_size": 3, "zero_optimization": {"stage": 1}, "parallel": {"data": 3}}
    run = fake_run(Layers, settings, torch.ones(1, 20))
    held: dict[str, list[Piece]] = {}
    for rank in run.ranks:
        for found in rank.local_tensors.state(rank.made):
            assert found.own.elements == found.values.numel()
            held.setdefault(found.tensor, []).append(found.own)
    assert {name.partition("/")[0] for name in held} == {"exp_avg", "exp_avg_sq"} and len(held) == 8
    shapes = {name: parameter.shape for name, parameter in Layers().named_parameters()}
    for name, pieces in held.items():
        assert covers_once(tuple(shapes[name.partition("/")[2]]), pieces), name
    assert max(map(len, held.values())) > 1, "several ranks share a parameter"


BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99]}},
    "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
}


def as_json(**changes: Any) -> dict[str, Any]:
    return load_config(BASE | changes, 1).to_json()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"checkpoint": {"folder": "a", "every": 3}, "monitor": {"jsonl": "b"}, "watchdog": {"folder": "c"}}, []),
        ({"zero_optimization": {"stage": 0, "reduce_bucket_size": 9}, "kernels": "reference"}, []),
        ({"gradient_clipping": 0.5, "seed": 7}, ["gradient_clipping 1.0 -> 0.5", "seed 1234 -> 7"]),
        ({"bf16": {"enabled": True}}, ["bf16.enabled false -> true"]),
        ({"ema": {"decay": 0.9}}, ['ema null -> {"decay": 0.9}']),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.8, 0.99]}}},
            ["optimizer.params.lr 0.001 -> 0.002", "optimizer.params.betas [0.9, 0.99] -> [0.8, 0.99]"],
        ),
        ({"optimizer": BASE["optimizer"] | {"no_weight_decay": ["*.bias"]}},
         ['optimizer.no_weight_decay [] -> ["*.bias"]']),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 2}}}, ['scheduler.type "ExponentialLR" -> "StepLR"']),
        ({"scheduler": None}, ["scheduler ExponentialLR -> null"]),
    ],
)  # fmt: skip
def test_changes_of_training_are_listed_and_no_others(changes: dict[str, Any], said: list[str]) -> None:
    assert changed_settings(as_json(), as_json(**changes), own_optimizer=False) == said


def test_what_code_replaces_and_what_an_older_file_lacks_is_left_out() -> None:
    before, now = as_json(), as_json(optimizer={"type": "SGD", "no_weight_decay": ["*.bias"]})
    assert changed_settings(before, now, own_optimizer=True) == ['optimizer.no_weight_decay [] -> ["*.bias"]']
    assert changed_settings({"seed": 1}, now, own_optimizer=False) == ["seed 1 -> 1234"]
    assert changed_settings({}, now, own_optimizer=False) == []


def test_options_of_an_optimizer_from_code_that_go_on_are_named() -> None:
    saved, code = {"lr": torch.tensor(0.5), "eps": 1e-5, "betas": (0.9, 0.99)}, {"lr": 0.25, "eps": 1e-5}
    assert kept_options([saved], [code], frozenset()) == ["lr 0.5 of group 0 (the code has 0.25)"]
    assert kept_options([saved], [code], frozenset({"lr"})) == []
    assert kept_options([saved | {"initial_lr": 0.5}], [code], frozenset()) == []


def start(config: dict[str, Any], **given: Any) -> engine.Engine:
    torch.manual_seed(0)
    return engine.initialize(nn.Linear(3, 2), config, lambda output, batch: output.square().mean(), **given)


def rates(eng: engine.Engine, steps: int) -> list[float]:
    x: Tensor = torch.ones(4, 3)
    return [eng.train_batch(x).lr for _ in range(steps)]


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if words in each.getMessage()]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.125e-3, 0.0625e-3]),
        ({"scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.1}}}, [1e-6, 1e-7]),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}}, [0.5e-3, 0.25e-3]),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 8e-3, "betas": [0.9, 0.99]}}}, [1e-3, 0.5e-3]),
        ({"scheduler": None}, [1e-3, 1e-3]),
    ],
)
def test_a_changed_schedule_is_where_it_would_be(
    changes: dict[str, Any], expected: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start(BASE) as eng:
        rates(eng, 3)
        eng.save_checkpoint(tmp_path).wait()
    with caplog.at_level(logging.INFO, "trine"), start(BASE | changes) as eng:
        eng.load_checkpoint(tmp_path)
        assert rates(eng, 2) == pytest.approx(expected, rel=1e-6)
    said = messages(caplog, "settings changed since step 3: ")
    assert len(said) == bool(changes)


def test_a_configured_schedule_of_torch_that_comes_late_is_at_its_update(tmp_path: Path) -> None:
    with start(BASE | {"scheduler": None}) as eng:
        rates(eng, 3)
        eng.save_checkpoint(tmp_path).wait()
    with start(BASE) as eng:
        eng.load_checkpoint(tmp_path)
        assert rates(eng, 2) == pytest.approx([0.125e-3, 0.0625e-3])


def test_an_optimizer_from_code_goes_on_as_saved_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"train_batch_size": 4}
    with start(config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5)) as eng:
        rates(eng, 1)
        eng.save_checkpoint(tmp_path).wait()
    caplog.set_level(logging.INFO, "trine")
    with start(config, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.25)) as eng:
        eng.load_checkpoint(tmp_path)
        assert rates(eng, 1) == [0.5]
    assert messages(caplog, "continues with options") == [
        "the optimizer continues with options of the checkpoint: lr 0.5 of group 0 (the code has 0.25)"
    ]
