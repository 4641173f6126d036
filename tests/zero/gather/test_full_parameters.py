"""What somebody keeps of parameters that were full stays alive; everything else is freed."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid
from engine.zero.flat_buckets import FlatBucket, Ownership
from engine.zero.gather.unsharded_buckets import UnshardedBuckets
from engine.zero.layout import Item, build_layout
from tests.zero import small
from tests.zero.buckets import allocate
from tests.zero.gather.test_gather_ranks import message

RunRanks = Callable[..., list[Any]]
BOTH, WEIGHT = frozenset({0, 1}), 1


def sharded(model: nn.Module) -> tuple[UnshardedBuckets, tuple[FlatBucket, ...]]:
    """The parameters of ``model`` in buckets of their own, sharded over two data ranks, of which this is the first."""
    named = dict(model.named_parameters())
    layout = build_layout([Item(name=name, shape=tuple(p.shape), dtype="float32") for name, p in named.items()], 2, 1)
    who = Ownership(0, 2, sharded=True, sharded_parameters=True)
    buckets = allocate(layout, named, who, torch.device("cpu"))
    grid = Grid(dp=2, rank=0)
    return UnshardedBuckets(buckets, Comm(grid, RecordingBackend(grid)), lambda *_: None), buckets


def nbytes(buckets: tuple[FlatBucket, ...]) -> list[int]:
    return [flat.params.untyped_storage().nbytes() for flat in buckets]


KEPT: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda p: p.detach(),
    "view": lambda p: p.data.t()[:1],
    "array": lambda p: p.detach().numpy(),
    "in a graph": lambda p: torch.ones(4, 5, requires_grad=True) @ p.detach().t(),
}


@pytest.mark.parametrize("what", KEPT)
def test_memory_that_somebody_holds_is_left_to_him(what: str) -> None:
    model = nn.Linear(5, 3)
    unsharded, buckets = sharded(model)
    for value in (7.0, 8.0):
        unsharded.ask(BOTH)
        unsharded.show(BOTH)
        for flat in buckets:
            flat.params.fill_(value)
        kept = KEPT[what](model.weight)
        unsharded.free(BOTH, leave=True)
        assert nbytes(buckets) == [0, 0], "the engine holds nothing"
        if what != "in a graph":
            assert (torch.as_tensor(kept) == value).all()
        else:
            assert kept.sum().backward() is None
    with unsharded.without_content():
        found = [unsharded.bucket_of(tensor) for tensor in (model.weight, torch.as_tensor(kept).detach())]
    assert found == [WEIGHT, None]


@pytest.mark.parametrize("leave", [False, True])
def test_an_array_that_has_gone_does_not_fix_the_memory(leave: bool) -> None:
    model = nn.Linear(5, 3)
    unsharded, buckets = sharded(model)
    for _ in range(2):
        unsharded.ask(BOTH)
        unsharded.show(BOTH)
        assert model.weight.detach().numpy().shape == (3, 5)
        unsharded.free(BOTH, leave=leave)
        assert nbytes(buckets) == [0, 0]


def test_memory_that_nobody_holds_stays_the_same() -> None:
    """Views that autograd has saved in a forward are valid again in its backward."""
    model = nn.Linear(5, 3)
    unsharded, buckets = sharded(model)
    before = [flat.params.untyped_storage()._cdata for flat in buckets]
    for leave in (False, True):
        unsharded.ask(BOTH)
        unsharded.show(BOTH)
        saved = None if leave else model.weight.t()
        assert [flat.escaped for flat in buckets] == [False, saved is not None]
        unsharded.free(BOTH, leave=leave)
        del saved
        assert [flat.params.untyped_storage()._cdata for flat in buckets] == before and nbytes(buckets) == [0, 0]


def keeps() -> list[Any]:
    """Body of a rank: keep everything that is full, go on training, save what was kept."""
    with small.start({"zero_optimization": {"stage": 3}}) as eng:
        eng.train_batch(small.batch(eng, 0))
        with eng.full_parameters() as parameters:
            kept = {name: parameter.detach() for name, parameter in parameters.items()}
            itself = {name: parameter.cpu() for name, parameter in parameters.items()}
            array = parameters["up.weight"].detach().numpy()
            expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        losses = [eng.train_batch(small.batch(eng, step)).loss for step in (1, 2)]
        file = io.BytesIO()
        torch.save(kept, file)
        file.seek(0)
        loaded = torch.load(file)
        equal = [torch.equal(loaded[name], values) for name, values in expected.items()]
        said = message(lambda: torch.save(itself, io.BytesIO()))  # on the CPU, .cpu() is the parameter itself
        with eng.full_parameters() as parameters:
            trained = not torch.equal(parameters["up.weight"].detach(), expected["up.weight"])
    return [all(equal), (array == expected["up.weight"].numpy()).all(), trained, losses, said]


def without_keeping() -> list[float]:
    with small.start({"zero_optimization": {"stage": 3}}) as eng:
        return [eng.train_batch(small.batch(eng, step)).loss for step in range(3)][1:]


def test_what_is_kept_of_full_parameters_can_be_read_and_saved(run_ranks: RunRanks) -> None:
    plain = run_ranks(without_keeping, 2)
    for (equal, array, trained, losses, said), expected in zip(run_ranks(keeps, 2), plain, strict=True):
        assert equal and array and trained and losses == expected
        assert "is gathered only while the model or a module of it runs; read or write it inside" in said


def output_after_a_write(world: World) -> Tensor:
    """Body of a rank: the output after masters were set to 0 behind a forward that gets no backward."""
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"data": 2}, "zero_optimization": {"stage": 3}}
    with engine.initialize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config, world=world) as eng:
        eng(torch.ones(1, 4))
        with eng.masters("1.*") as masters:
            for values in masters.values():
                values.zero_()
        found: Tensor = eng(torch.ones(1, 4)).detach()
        return found


def test_written_masters_replace_what_a_forward_has_left_gathered() -> None:
    assert not any(output.any() for output in run_thread_ranks(2, output_after_a_write))


def test_a_stage_that_writes_unequal_values_is_refused_on_all_stages() -> None:
    """The other stage has a collective for the tied parameter that the first one would not reach."""
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3},
        "parallel": {"data": 2, "pipeline": 2},
    }  # fmt: skip

    def body(world: World) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        with engine.initialize(model, config, _mean_loss, torch.ones(1, 4), world=world) as eng:
            here = eng.grid.coord()

            def write(opened: Any) -> None:
                with torch.no_grad(), opened("*") as given:
                    for values in given.values():
                        values.fill_(here.dp if here.pp == 0 else 0)

            told = [message(partial(write, opened)) for opened in (eng.full_parameters, eng.masters)]
            with eng.full_parameters("0.weight") as parameters:
                assert parameters["0.weight"].count_nonzero() == 16, "the values were dropped"
        return told

    for told in run_thread_ranks(4, body):
        for call, text in zip(("full_parameters", "masters"), told, strict=True):
            assert text.startswith(f"{call}: data ranks have written different values into ")


def _mean_loss(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()
