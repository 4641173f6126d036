"""The state of optimizers from code: what is a moment, what is a number, and what no checkpoint holds."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import ASGD, Adagrad, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import engine
from engine.checkpoint.contents.optimizer_state import Families, arranged, make_moments, restore
from engine.checkpoint.format.manifest import StoredTensor
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import CheckpointError
from tests.engine.checkpoint.fake_ranks import fake_run
from tests.engine.parity.test_axes import same


class Shapes(nn.Module):
    """Parameters of no dim, of one element, and a matrix; gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
        self.matrix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.matrix) * self.scale + self.one).square().mean()


class Counting(Optimizer):
    """SGD that divides by a count of shape [1]."""

    elementwise = True

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter].setdefault("count", torch.zeros(1))
                assert count.shape == (1,)
                count += 1
                parameter.sub_(parameter.grad * group["lr"] / count.item())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "0-dim product": lambda groups: NAdam(groups, lr=1e-2),
    "0-dim rate": lambda groups: ASGD(groups, lr=1e-2, t0=0),
    "one element": Counting,
}
BATCHES = [torch.randn(4, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]


def start(optimizer: Callable[[Any], Optimizer], stage: int) -> engine.Engine:
    config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
    return engine.initialize(Shapes(), config, optimizer=optimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("stage", "then"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_state_of_one_element_goes_on(name: str, stage: int, then: int, tmp_path: Path) -> None:
    """Parameters of one element make such a state look like a moment at one stage and like a number at another."""
    with start(OPTIMIZERS[name], stage) as eng:
        eng.train_batch(BATCHES[0])
        eng.save_checkpoint(tmp_path).wait()
        expected, state = [eng.train_batch(batch).loss for batch in BATCHES[1:]], eng.full_state_dict()
    with start(OPTIMIZERS[name], then) as eng:
        eng.load_checkpoint(tmp_path)
        assert [eng.train_batch(batch).loss for batch in BATCHES[1:]] == expected
        assert same(eng.full_state_dict(), state)


class Unbounded(AdamW):
    """AdamW with infinite options and numbers, like Prodigy's, and with rates in tensors."""

    elementwise = True

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, torch.tensor(1e-2), (torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
        for group in self.param_groups:
            group |= {"growth": float("inf"), "bounds": (float("-inf"), 1.0)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            assert (group["growth"], group["bounds"]) == (float("inf"), (float("-inf"), 1.0))
            for parameter in group["params"]:
                assert self.state[parameter].setdefault("best", float("inf")) == float("inf")


class Patient(LambdaLR):
    """Schedule with an infinite number in its state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.best = float("inf")
        super().__init__(optimizer, lambda step: 1 / (1 + step))


def test_infinite_numbers_and_options_in_tensors_go_on(tmp_path: Path) -> None:
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
    with engine.initialize(Shapes(), config, optimizer=Unbounded, lr_scheduler=Patient) as eng:
        eng.train_batch(BATCHES[0])
        eng.save_checkpoint(tmp_path).wait()
        expected = eng.train_batch(BATCHES[1]).loss, eng.train_batch(BATCHES[2]).loss
        eng.load_checkpoint(tmp_path)
        assert (eng.train_batch(BATCHES[1]).loss, eng.train_batch(BATCHES[2]).loss) == expected
        assert all(isinstance(beta, Tensor) for beta in eng.optimizer.param_groups[0]["betas"])


def test_one_group_keeps_one_kind_of_state() -> None:
    stored = {
        "v/matrix": StoredTensor(TensorKind("F32", (4, 4)), ()),
        "v/one": StoredTensor(TensorKind("F32", (1,)), ()),
    }
    groups = [{"params": ["matrix", "one", "bias"]}]
    number = {"v": [1.0, None]}
    assert arranged(stored, groups, {})[0] == stored
    assert arranged(stored, groups, {"one": number}) == (stored, {"numbers": {}, "fresh": ["bias"]})
    alone = {"v/one": stored["v/one"]}
    assert arranged(alone, groups, {"one": number, "bias": number, "matrix": number}) == (
        {},
        {"numbers": {"0": number}},
    )
    with pytest.raises(CheckpointError, match=r"^not saved: the optimizer has 'v' in the shape of 'matrix' and as"):
        arranged(stored, groups, {"one": number, "bias": number})


def test_parameters_keep_numbers_of_their_own() -> None:
    groups = [{"params": ["a", "b", "c"]}, {"params": ["d"]}]
    five, three = {"step": [5.0, "float32"]}, {"step": [3.0, "float32"]}
    found = arranged({}, groups, {"a": five, "b": three, "d": three})[1]
    assert found == {"numbers": {"0": five, "1": three}, "own_numbers": {"b": three}, "fresh": ["c"]}


# ------------------------------------------------------------------------------------------------ padding


class Norm(nn.Module):
    """256 elements, which end on data rank 3 of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).mean()


def test_a_rank_with_nothing_but_padding_goes_on_too() -> None:
    settings = {"train_batch_size": 8, "zero_optimization": {"stage": 3}, "parallel": {"data": 8}}
    run = fake_run(Norm, settings, torch.ones(1, 256))
    stored = {
        "type": "AdamW",
        "groups": [{"params": ["weight"], "options": {}}],
        "numbers": {"0": {"step": [5.0, "float32"]}},
    }
    kinds = {f"{moment}/weight": TensorKind("F32", (256,)) for moment in ("exp_avg", "exp_avg_sq")}
    owned = set()
    for rank in run.ranks:
        optimizer = rank.optimizer
        optimizer.inner = inner = AdamW([place.parameter for place in optimizer.places])
        make_moments(optimizer, Families(kinds, stored), run.plan.table)
        restore(optimizer, run.plan.table, stored)
        for place in optimizer.places:
            place.parameter.grad = torch.zeros_like(place.parameter)
            owned.add(bool(place.names()))
        inner.step()
        assert all(state["step"] == 6 for state in inner.state.values())
    assert owned == {True, False}, "some ranks own weights, some padding alone"


# ------------------------------------------------------------------------------------------------ elsewhere


class Composite(Optimizer):
    """Hands its groups to optimizers of its own, which keep the state."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-2})
        self.inside = {"all": [AdamW(self.param_groups, lr=1e-2)]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inside["all"][0].step()


class OwnTable(Adagrad):
    """Keeps averages in a table of its own, from the first step on."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=1e-2)
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.averages: dict[Any, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.averages = {parameter: parameter.detach().clone() for parameter in self.parameters}


class Global(Adagrad):
    """Keeps a state that is no parameter's."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["all"] = {"seen": torch.ones(())}  # type: ignore[index]


@pytest.mark.parametrize(
    ("optimizer", "place"),
    [
        (Composite, "self.inside"),
        (OwnTable, "self.averages"),
        (lambda groups: Global(groups, lr=1e-2), "self.state['all']"),
    ],
)
def test_state_that_is_not_saved_is_said_once(
    optimizer: Callable[[Any], Optimizer], place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trine"), start(optimizer, 0) as eng:
        for batch in BATCHES[:2]:
            eng.train_batch(batch)
            eng.save_checkpoint(tmp_path).wait()
    said = [record.message for record in caplog.records if "which is not saved" in record.message]
    assert len(said) == 1 and f"has state in {place}, which" in said[0]


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS.values(), None])
def test_of_other_optimizers_nothing_is_said(optimizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trine"), start(optimizer, 0) as eng:
        eng.train_batch(BATCHES[0])
        eng.save_checkpoint(tmp_path).wait()
    assert not [record for record in caplog.records if "not saved" in record.message]
