"""Pickles and copies of weights in training: each has its own bytes, and not those of the bucket in which it lies."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.every_grid import every_grid

BATCH = torch.arange(32.0).reshape(4, 8).sin()


class Tied(nn.Module):
    """Three layers, of which two have one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.third(self.second(self.first(x).relu()).relu())
        return made


def size(thing: object) -> int:
    file = io.BytesIO()
    torch.save(thing, file)
    return len(file.getvalue())


def loaded(thing: object) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@contextmanager
def trained(model: nn.Module, **sections: Any) -> Iterator[engine.Engine]:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "adamw"}, **sections}
    with engine.initialize(model, config, lambda output, batch: output.square().mean(), BATCH) as eng:
        eng.train_batch(BATCH)
        yield eng


def plain(tensor: Tensor) -> Tensor:
    """A tensor or parameter as it would be without an engine."""
    own = tensor.detach().clone()
    return nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own


def differing(parallel: dict[str, int], stage: int) -> list[str]:
    """Body of a rank: names of weights, gradients and masters whose file is not that of a plain tensor."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = list[str]()
    with trained(model, parallel=parallel, zero_optimization={"stage": stage}) as eng:
        with eng.full_parameters() as held:
            # on a pipeline state_dict() is refused, since it reads parameters of other stages
            state = model.state_dict() if parallel.get("pipeline", 1) == 1 else {}
            entries = {f"entry {name}": entry for name, entry in state.items() if name in held}
            for name, tensor in ({f"parameter {name}": each for name, each in held.items()} | entries).items():
                alone, again = plain(tensor), loaded(tensor)
                if size(tensor) != size(alone) or type(again) is not type(alone) or not torch.equal(again, alone):
                    found.append(name)
        with eng.gradients() as gradients, eng.masters() as masters:
            for kind, tensors in (("gradient", gradients), ("master", masters)):
                found += [f"{kind} {name}" for name, each in tensors.items() if size(each) != size(plain(each))]
        found += [] if found or gradients else ["no gradient was looked at"]
        eng.train_batch(BATCH)
        assert all(torch.equal(entry, entry.clone()) for entry in entries.values())
    return found


@pytest.mark.parametrize(("grid", "stage"), every_grid("dp2-zero3"))
def test_each_has_the_file_of_a_plain_tensor(run_ranks: Callable[..., Any], grid: dict[str, int], stage: int) -> None:
    assert run_ranks(differing, prod(grid.values()), grid, stage) == [[]] * prod(grid.values())


def test_tied_entries_stay_tied_and_copies_keep_their_values() -> None:
    model, alone = Tied(), Tied()
    with trained(model) as eng:
        state = model.state_dict()
        assert {type(entry) for entry in state.values()} == {Tensor}
        assert size(state) == size(alone.state_dict()) and size(list(model.parameters())) == size([*alone.parameters()])
        again = loaded({"entries": state, "parameter": model.second.weight})
        names = ("second.weight", "third.weight")
        assert len({again["entries"][name].data_ptr() for name in names} | {again["parameter"].data_ptr()}) == 1

        kept = copy.deepcopy(state)
        before = model.first.weight.detach().clone()
        version = model.first.weight._version
        state["first.weight"].add_(1.0)  # an entry is the parameter, whose counter tells of the write
        assert torch.equal(model.first.weight, before + 1.0) and model.first.weight._version > version
        eng.train_batch(BATCH)
        assert torch.equal(kept["first.weight"], before) and torch.equal(loaded(kept)["first.weight"], before)
        assert kept["first.weight"].untyped_storage().nbytes() == before.nbytes
    assert size(model.first.bias) == size(alone.first.bias)
    assert size(model.state_dict()["first.bias"]) == size(alone.state_dict()["first.bias"])
    assert size(model) == size(alone) and "__reduce_ex__" not in vars(model.first.bias)


def test_memory_of_an_entry_stays_while_states_are_away() -> None:
    model = Tied()
    with trained(model) as eng:
        entry = model.state_dict()["first.weight"]
        before, storage = entry.clone(), entry.untyped_storage()
        eng.offload_states()
        assert model.first.weight.untyped_storage().nbytes() >= storage.nbytes() and torch.equal(entry, before)
        eng.reload_states()
        eng.train_batch(BATCH)
        assert torch.equal(entry, model.first.weight)


def test_a_shallow_copy_of_a_module_shares_its_parameters_and_is_as_little_pickled() -> None:
    model = Tied()
    with trained(model) as eng:
        copied = copy.copy(model)
        assert copied is not model and copied.first.weight is model.first.weight
        assert torch.equal(copied(BATCH), model(BATCH))
        shared = copy.copy(model.first.weight)
        assert type(shared) is nn.Parameter and shared.data_ptr() == model.first.weight.data_ptr()
        ways: tuple[Callable[[Any], Any], ...] = (
            pickle.dumps,
            ForkingPickler.dumps,
        )  # the latter for spawned processes
        for pickled in ways:
            with pytest.raises(engine.EngineError, match=r"^the Tied is trained by an engine, whose hooks and shards"):
                pickled(model)
        eng.train_batch(BATCH)
