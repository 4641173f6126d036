"""Checkpoints of runs that are not the plain one: schedulers and optimizers in code, odd tensors, odd folders."""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

import engine
from engine.data import Sampler
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.checkpoint.test_checkpoint import settings, train
from tests.engine.parity.test_axes import same
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def start(model: nn.Module | None = None, in_code: Mapping[str, Any] | None = None, **changes: Any) -> engine.Engine:
    return engine.initialize(model or models.decoder(), settings(**changes), loss_sum, **(in_code or {}))


def goes_on(folder: Path, in_code: Mapping[str, Any], at: int = 2, **changes: Any) -> None:
    """Bit for bit, in a fresh engine and in one that has other state."""
    with start(in_code=in_code, **changes) as eng:
        train(eng, 0, at)
        eng.save_checkpoint(folder).wait()
        expected, rate, state = train(eng, at, at + 3), eng.lr, eng.full_state_dict()
    for others in (0, 1):
        with start(in_code=in_code, **changes) as eng:
            train(eng, 5, 5 + others)
            eng.load_checkpoint(folder)
            assert (train(eng, at, at + 3), eng.lr) == (expected, rate), f"{others} other steps before"
            assert same(eng.full_state_dict(), state)


# ------------------------------------------------------------------------------------------------ rates


def in_sequence(optimizer: Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=1), ExponentialLR(optimizer, 0.5)], [1])


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "chainable": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "closed form": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "moves betas": lambda optimizer: OneCycleLR(optimizer, 2e-2, total_steps=8),
    "schedulers inside": in_sequence,
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(
    "optimizer", [wide(None, id="configured"), pytest.param(lambda groups: AdamW(groups, lr=1e-2), id="in code")]
)
def test_the_rate_of_a_torch_scheduler_goes_on(name: str, optimizer: Any, tmp_path: Path) -> None:
    goes_on(tmp_path, {"lr_scheduler": SCHEDULERS[name], "optimizer": optimizer})


def test_the_rate_of_a_torch_schedule_by_name_goes_on(tmp_path: Path) -> None:
    goes_on(tmp_path, {}, scheduler={"type": "CosineAnnealingLR", "params": {"T_max": 6}})


def test_the_rate_goes_on_where_the_optimizer_starts_fresh(tmp_path: Path) -> None:
    in_code = {"lr_scheduler": SCHEDULERS["chainable"]}
    with start(in_code=in_code) as eng:
        train(eng, 0, 2)
        eng.save_checkpoint(tmp_path).wait()
    with start(in_code=in_code) as eng:
        eng.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert eng.lr == 1e-2 / 4


def test_a_scheduler_over_other_groups_is_refused(tmp_path: Path) -> None:
    in_code = {"lr_scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 9)}
    with start(in_code=in_code) as eng:
        eng.save_checkpoint(tmp_path).wait()
    with start(in_code=in_code, optimizer={"type": "AdamW", "no_weight_decay": ["*.bias"]}) as eng:
        with pytest.raises(engine.CheckpointError, match=r"the learning-rate scheduler was saved over 1 optimizer gr"):
            eng.load_checkpoint(tmp_path)
        assert train(eng, 0, 1), "nothing was touched"


# ------------------------------------------------------------------------------------------------ optimizers


def two_momenta(groups: list[dict[str, Any]]) -> Optimizer:
    return SGD([groups[0] | {"momentum": 0.9}, groups[1]], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "state made at once": lambda groups: Adagrad(groups, lr=1e-2),
    "rate a tensor": lambda groups: AdamW(groups, lr=torch.tensor(1e-2), foreach=False),
    "moments of one group only": two_momenta,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stage", [wide(0), 1])
def test_optimizers_in_code_go_on(name: str, stage: int, tmp_path: Path) -> None:
    grouped = {"type": "AdamW", "no_weight_decay": ["*.bias"]}
    goes_on(tmp_path, {"optimizer": OPTIMIZERS[name]}, optimizer=grouped, zero_optimization={"stage": stage})


@pytest.mark.parametrize("optimizer", [None, OPTIMIZERS["state made at once"]], ids=["configured", "in code"])
def test_a_checkpoint_of_the_start_takes_the_step_count_back(optimizer: Any, tmp_path: Path) -> None:
    goes_on(tmp_path, {"optimizer": optimizer}, at=0)


@pytest.mark.parametrize("optimizer", [None, OPTIMIZERS["state made at once"]], ids=["configured", "in code"])
def test_without_optimizer_states_nothing_of_the_old_ones_is_left(optimizer: Any, tmp_path: Path) -> None:
    found = []
    for others in (0, 2):
        with start(in_code={"optimizer": optimizer}) as eng:
            if not others:
                train(eng, 0, 1)
                eng.save_checkpoint(tmp_path).wait()
        with start(in_code={"optimizer": optimizer}) as eng:
            train(eng, 3, 3 + others)
            eng.load_checkpoint(tmp_path, load_optimizer_states=False)
            found.append(train(eng, 1, 3))
    assert found[0] == found[1]


def test_weight_decay_of_groups_is_what_this_run_says(tmp_path: Path) -> None:
    in_code = {"optimizer": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1)}
    with start(in_code=in_code) as eng:
        train(eng, 0, 1)
        eng.save_checkpoint(tmp_path).wait()
    with start(in_code=in_code, optimizer={"type": "AdamW", "no_weight_decay": ["*.bias"]}) as eng:
        eng.load_checkpoint(tmp_path)
        assert [group["weight_decay"] for group in eng.optimizer.param_groups] == [0.1, 0.0]


# ------------------------------------------------------------------------------------------------ tensors


class Odd(nn.Module):
    """Names, shapes and buffers that are legal and rare; gives its loss."""

    seen: Tensor
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.randn(6, 4).t(), requires_grad=False)
        self.numbers = nn.Parameter(torch.arange(4), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 3))
        for name in ("W/x", "w/x", "é \n\"'{}"):
            self.register_parameter(name, nn.Parameter(torch.randn(3)))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("nothing", torch.zeros(0, 2))
        self.register_buffer("across", torch.ones(2, 3).t())
        self.register_buffer("expanded", torch.arange(3.0).expand(2, 3))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        flag: Any = self.flag
        flag.logical_not_()
        self.seen = self.seen.double() + 0.1  # another tensor, of another dtype
        self.cache = torch.cat([self.cache, x.new_ones(1)])
        scale = self.get_parameter("W/x") * self.get_parameter("w/x") + self.get_parameter("é \n\"'{}")
        return ((x @ self.frozen).square().mean() * scale.sum() * (1 + self.cache.sum())).square()


@pytest.mark.parametrize("stage", [0, 3])
def test_odd_names_shapes_and_buffers(stage: int, tmp_path: Path) -> None:
    batches = [torch.randn(4, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]
    config = settings(zero_optimization={"stage": stage})
    with engine.initialize(Odd(), config) as eng:
        eng.train_batch(batches[0])
        eng.module.get_buffer("expanded")[0] += 1
        eng.save_checkpoint(tmp_path).wait()
        expected = [eng.train_batch(batch).loss for batch in batches[1:]]
    with engine.initialize(Odd(), config) as eng:
        eng.load_checkpoint(tmp_path)
        again: Any = eng.module
        assert again.expanded.tolist() == [[1, 2, 3]] * 2
        assert again.seen.tolist() == [0.1 + 0.1] and again.cache.tolist() == [1.0, 1.0]
        assert [eng.train_batch(batch).loss for batch in batches[1:]] == expected


class Reserved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("__metadata__", nn.Parameter(torch.ones(3)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.get_parameter("__metadata__")).mean()


def test_the_one_name_that_the_format_keeps_is_refused(tmp_path: Path) -> None:
    with engine.initialize(Reserved(), settings()) as eng:
        pending = eng.save_checkpoint(tmp_path)
        with pytest.raises(engine.CheckpointError, match=r"a tensor named '__metadata__' cannot be stored"):
            pending.wait()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_frozen_now_gets_the_master_it_was_trained_with(stage: int, tmp_path: Path) -> None:
    with start(bf16={"enabled": True}) as eng:
        train(eng, 0, 2)
        eng.save_checkpoint(tmp_path).wait()
        weights = eng.full_state_dict()
    frozen = models.decoder()
    frozen.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    with start(frozen, zero_optimization={"stage": stage}) as eng:
        eng.load_checkpoint(tmp_path)
        assert same(eng.full_state_dict(), weights)


# ------------------------------------------------------------------------------------------------ folders


def test_a_folder_is_the_same_by_every_name_and_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    with start(checkpoint={"folder": "link/run", "every": 1, "keep": 2}) as eng:
        monkeypatch.chdir(tmp_path / "real")
        train(eng, 0, 2)
        for index in (2, 3):
            train(eng, index, index + 1)
            assert eng.save_checkpoint("../link/../link/run").wait().parent == tmp_path / "real" / "run"
    left = [path.name for path in (tmp_path / "real" / "run").glob("step-*")]
    assert {name[:13] for name in left} <= {"step-00000003", "step-00000004"} and len(left) == 2, "keep holds"
    with start() as eng:
        assert eng.load_checkpoint(tmp_path / "link" / "run") == {} and eng.step_count == 4


def test_what_lies_beside_an_export_or_a_run_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".trash-mine").mkdir()
    (tmp_path / ".trash-mine" / "thesis").write_text("all of it")
    (tmp_path / "step-2.tmp-notes").write_text("mine")
    (tmp_path / "step-00000009.tmp-0123abcd").mkdir()
    with start() as eng:
        eng.save_pretrained(tmp_path / "model")
        assert (tmp_path / "step-00000009.tmp-0123abcd").exists(), "somebody may be writing it"
        eng.save_checkpoint(tmp_path).wait()
    assert not (tmp_path / "step-00000009.tmp-0123abcd").exists()
    assert (tmp_path / ".trash-mine" / "thesis").exists() and (tmp_path / "step-2.tmp-notes").exists()


# ------------------------------------------------------------------------------------------------ SIGTERM


def end_in_a_skipped_step(eng: engine.Engine) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    parameter: Any = next(eng.module.parameters())
    parameter.register_hook(lambda grad: grad * torch.nan)
    train(eng, 2, 3)


def test_a_save_elsewhere_does_not_stand_for_the_one_at_the_end(tmp_path: Path) -> None:
    with start(checkpoint={"folder": str(tmp_path / "run")}) as eng:
        train(eng, 0, 2)
        eng.save_checkpoint(tmp_path / "other")
        with pytest.raises(SystemExit):
            end_in_a_skipped_step(eng)
    assert (tmp_path / "run" / "step-00000002").is_dir()


def test_an_end_without_a_checkpoint_is_said(tmp_path: Path) -> None:
    with start(checkpoint={"folder": str(tmp_path / "run")}) as eng:
        train(eng, 0, 1)
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(engine.CheckpointError):
            train(eng, 1, 2)


# ------------------------------------------------------------------------------------------------ registered objects


def test_state_that_nobody_registered_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start() as eng:
        eng.register_for_checkpointing(data=Sampler(50, 4))
        eng.save_checkpoint(tmp_path).wait()
    with caplog.at_level(logging.WARNING, "trine"), start() as eng:
        eng.load_checkpoint(tmp_path)
    assert "has the state of 'data', which is not registered" in caplog.text


class Place:
    """A data rank's own place, which is not the same on every rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def saves_a_place_of_its_own(folder: Path) -> None:
    with start(parallel={"data": 2}) as eng:
        eng.register_for_checkpointing(same=Sampler(50, 4), place=Place(eng.grid.rank))
        pending = eng.save_checkpoint(folder)
        with pytest.raises(
            engine.CheckpointError, match=r"^not saved: the state of 'place' differs between rank 1 and"
        ):
            pending.wait()


def test_one_state_is_not_stored_for_ranks_that_differ(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(saves_a_place_of_its_own, 2, tmp_path)


def test_a_scheduler_that_comes_late_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start() as eng:
        train(eng, 0, 1)
        eng.save_checkpoint(tmp_path).wait()
    with caplog.at_level(logging.WARNING, "trine"), start(in_code={"lr_scheduler": SCHEDULERS["chainable"]}) as eng:
        eng.load_checkpoint(tmp_path)
    assert "the given ExponentialLR starts at its first step" in caplog.text


def uncut(folder: Path, load: bool) -> tuple[list[Any], int]:
    """Tensor ranks without an example; what is drawn for the first batches and after them."""
    sampler = Sampler(50, 4, seed=3)
    with start(parallel={"data": 1, "tensor": 2}) as eng:
        eng.register_for_checkpointing(data=sampler)
        first, drawn = 0, []
        if load:
            eng.load_checkpoint(folder)
            first = eng.step_count
        for index in range(first, 4):
            if index == 2 and not load:
                eng.save_checkpoint(folder).wait()
            drawn.append((next(sampler).tolist(), torch.rand(2).tolist(), train(eng, index, index + 1)))
        return drawn, first


def test_data_and_generators_are_at_their_places_before_the_first_batch(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The first batch cuts the model, so weights are read after it was drawn."""
    expected = run_ranks(uncut, 2, tmp_path, False)
    for (drawn, _), (again, first) in zip(expected, run_ranks(uncut, 2, tmp_path, True), strict=True):
        assert first == 2 and again == drawn[2:]


def refused_uncut(folder: Path, **checkpoint: Any) -> None:
    with start(models.decoder(layers=3), parallel={"data": 1, "tensor": 2}, checkpoint=checkpoint) as eng:
        if not checkpoint:
            eng.load_checkpoint(folder)
        for message in ("blocks.2.norm1.weight", "^the last load_checkpoint or checkpoint.init_from failed midway"):
            with pytest.raises(engine.CheckpointError, match=message):
                train(eng, 0, 1)


def refused_uncut_start(folder: Path) -> None:
    refused_uncut(folder, init_from=str(folder))


@pytest.mark.parametrize("body", [refused_uncut, refused_uncut_start])
def test_a_run_whose_weights_were_not_read_does_not_train(body: Any, run_ranks: RunRanks, tmp_path: Path) -> None:
    with start() as eng:
        eng.save_checkpoint(tmp_path).wait()
    run_ranks(body, 2, tmp_path)
