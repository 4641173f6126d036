"""What ranks must have been given alike, as text: everything that changes training, and nothing else."""

from typing import Any

import pytest
import torch
from torch import nn

from engine.build.equal_input import describe_input, difference_error
from engine.config import load_config
from engine.errors import ConfigError, EngineError, GridError, PlanError
from engine.parallel.comm.rendezvous import Difference, first_difference

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}


class Net(nn.Module):
    """A dropout rate that no module knows, a name, and where it runs."""

    def __init__(self, rate: float = 0.1, rank: int = 0, width: int = 4) -> None:
        super().__init__()
        self.rate, self.world_rank, self._calls, self.note = rate, rank, rank, f"on {rank}"
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.LayerNorm(width))


def compare(model: nn.Module, settings: dict[str, Any], here: str = "cpu") -> EngineError | None:
    """The error of a rank 1 with this model and configuration beside a plain rank 0."""
    texts = [
        describe_input(Net(), load_config(SETTINGS, 4), CPU),
        describe_input(model, load_config(settings, 4), torch.device(here)),
    ]
    found = first_difference([(0,), (1,)], texts)
    return None if found is None else difference_error(found)


def test_ranks_that_differ_in_where_they_run_are_alike() -> None:
    assert compare(Net(rank=1), SETTINGS) is None


def changed(name: str, value: Any) -> nn.Module:
    model = Net()
    where, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(where), attribute, value)
    return model


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        (Net(rate=0.2), {}, "rate is 0.1 on rank 0 and 0.2 on rank 1: ranks were given different models"),
        (changed("inner.1.p", 0.0), {}, "inner.1.p is 0.5 on rank 0 and 0.0 on rank 1: "),
        (changed("inner.2.eps", 1e-6), {}, "inner.2.eps is 1e-05 on rank 0 and 1e-06 on rank 1: "),
        (changed("inner.1.training", False), {}, "inner.1.training is True on rank 0 and False on rank 1: "),
        (changed("inner.1", nn.ReLU()), {}, "class of inner.1 is Dropout on rank 0 and ReLU on rank 1: "),
        (changed("inner.3", nn.ReLU()), {}, "class of inner.3 is absent on rank 0 and ReLU on rank 1: "),
        (Net(), {"parallel": {"tensor": 2}}, "parallel.data is 4 on rank 0 and 2 on rank 1: ranks were given"),
        (Net(), {"seed": 7}, "seed is 1234 on rank 0 and 7 on rank 1: ranks were given different configurations"),
        (Net(), {"optimizer": {"type": "SGD"}}, 'optimizer.type is "AdamW" on rank 0 and "SGD" on rank 1: '),
    ],
)
def test_the_first_key_is_named_with_both_values(model: nn.Module, settings: dict[str, Any], told: str) -> None:
    error = compare(model, SETTINGS | settings)
    assert isinstance(error, ConfigError if settings else PlanError)
    assert str(error).startswith(told)


def test_shapes_dtypes_and_what_is_trained_are_compared() -> None:
    wide = compare(Net(width=8), SETTINGS)
    assert str(wide).startswith("inner.0.in_features is 4 on rank 0 and 8 on rank 1")
    frozen = Net()
    frozen.inner.requires_grad_(False)
    assert "inner.0.weight is (4, 4) torch.float32 on rank 0 and (4, 4) torch.float32, frozen" in str(
        compare(frozen, SETTINGS)
    )
    assert "torch.float64" in str(compare(Net().double(), SETTINGS))


def test_versions_and_hardware_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text = describe_input(Net(), load_config(SETTINGS, 4), CPU)
    assert list(text)[:4] == ["setup trine", "setup torch", "setup python", "setup device"]
    error = compare(Net(rate=0.2), SETTINGS, "cuda")
    assert isinstance(error, GridError)
    assert str(error) == (
        "device is cpu on rank 0 and cuda on rank 1, but all ranks must train on devices of one type; use only nodes "
        "with usable GPUs, or hide the GPUs of every node, for example with CUDA_VISIBLE_DEVICES=''."
    )
    error = difference_error(Difference("setup torch", (((0, 1), "2.13.0"), ((2,), "2.12.0"))))
    assert str(error).startswith("torch is 2.13.0 on ranks 0, 1 and 2.12.0 on rank 2, but all ranks must run the same ")
