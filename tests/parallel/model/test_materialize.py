"""Models from the meta device: weights that do not depend on the grid, and no rank ever holds the whole model."""

import gc
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.model.materialize import materialize
from engine.verify import VerifyOptions, train_alone
from tests import models
from tests.engine.parity.test_axes import batches, config, loss_of, same, share
from tests.zero.small import forget_the_living

RunRanks = Callable[..., list[Any]]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": partial(models.decoder, layers=4, tied=True),
    "llama": partial(models.llama, layers=4),
    "gpt2": partial(models.gpt2, layers=4, dropout=0.0),
}
GRIDS: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2 ZeRO-3": {"data": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "dp2 x tp2 ZeRO-3": {"data": 2, "tensor": 2},
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def settings(grid: str) -> dict[str, Any]:
    zero = {"zero_optimization": {"stage": 3}} if "ZeRO-3" in grid else {}
    return config("dp2") | {"parallel": {"data": 1} | GRIDS.get(grid, {})} | zero


def live_bytes() -> int:
    """Memory behind all tensors made since ``forget_the_living``, each storage once."""
    storages = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or torch._C._dispatch_keys(thing).has(torch._C.DispatchKey.Python):
            continue  # a tensor of shapes alone, which other tests have left, has no memory
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def trains(name: str, grid: str) -> dict[str, Any]:
    """Weights at the start and losses; how much memory the model takes on this rank."""
    first = batches(name)[0]
    example = {key: torch.empty(value[:2].shape, dtype=value.dtype, device="meta") for key, value in first.items()}
    with engine.initialize(on_meta(name), settings(grid), loss_of(name), example) as eng:
        del first
        gc.collect()
        found: dict[str, Any] = {"bytes": live_bytes(), "plan": eng.plan.rank(eng.grid.rank)}
        held = {row.name for row in eng.plan.table.held_by(eng.grid.holder())}
        found["absent"] = sum(
            p.untyped_storage().nbytes() for name, p in eng.module.named_parameters() if name not in held
        )
        found["whole"] = 4 * eng.plan.table.elements
        found["state"] = eng.full_state_dict()
        found["meta"] = any(t.is_meta for t in (*eng.module.parameters(), *eng.module.buffers()))
        found["losses"] = [eng.train_batch(share(eng, batch)).loss for batch in batches(name)]
    return found


def trains_on(name: str, grids: Sequence[str]) -> list[dict[str, Any]]:
    """One grid after another on the same ranks."""
    found = []
    for grid in grids:
        forget_the_living()  # and what gloo's thread still holds of the grid before
        found.append(trains(name, grid))
    return found


SHORT = ("pp2", "dp2 ZeRO-3", "tp2")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("decoder", SHORT), *(pytest.param(name, tuple(GRIDS), marks=pytest.mark.long) for name in MODELS)],
    ids=str,
)
def test_weights_do_not_depend_on_the_grid_and_training_is_that_of_one_process(
    run_ranks: RunRanks, name: str, wanted: tuple[str, ...]
) -> None:
    alone = trains(name, "alone")

    def in_memory() -> nn.Module:
        model = MODELS[name]()
        model.load_state_dict(alone["state"])
        return model

    expected = train_alone(in_memory, settings("alone"), batches(name), VerifyOptions(loss_of(name)))
    assert alone["losses"] == pytest.approx(expected.losses, rel=1e-6), "buffers are those of a model built in memory"
    assert list(alone["state"]) == list(in_memory().state_dict())
    by_size = {size: [grid for grid in wanted if prod(GRIDS[grid].values()) == size] for size in (2, 4)}
    without = {"TRINE_SHARED_MEMORY": "0"}  # which ranks of a host share is nobody's state
    by_rank = [zip(*run_ranks(trains_on, n, name, grids, env=without), strict=True) for n, grids in by_size.items()]
    for grid, results in zip(itertools.chain(*by_size.values()), itertools.chain(*by_rank), strict=True):
        assert same(results[0]["state"], alone["state"]), grid
        assert results[0]["losses"] == pytest.approx(expected.losses, rel=1e-6), grid
        for found in results:
            assert not found["meta"]
            planned = found["plan"].state_bytes  # moments come with the first step
            assert 0 <= found["bytes"] - planned["parameters"] - planned["gradients"] <= 1024, "and small buffers"
            assert found["absent"] <= 4 * 100, "an absent parameter is one element"
            if "pp" in grid:
                assert found["plan"].state_bytes["parameters"] < 0.75 * found["whole"]


class Noting(nn.Linear):
    """Notes how much memory there is at its initialisation."""

    notes: list[int]

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "notes") and not self.weight.is_meta:
            self.notes.append(live_bytes())


def most_at_a_time(zero: dict[str, Any]) -> tuple[int, int, int]:
    """Body of a rank: most memory during initialisation, what is there at the end, and what one block takes."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(Noting(64, 64), nn.Tanh()) for _ in range(16)])
    notes: list[int] = []
    for module in model.modules():
        if isinstance(module, Noting):
            module.notes = notes
    forget_the_living()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "SGD"}}
    with engine.initialize(model, settings, lambda output, batch: output.mean()) as eng:
        gc.collect()
        assert len(notes) == 16
        return max(notes), sum(eng.plan.rank(eng.grid.rank).state_bytes.values()), 4 * (64 * 64 + 64)


def test_a_sharded_model_is_never_whole_while_it_is_initialised(run_ranks: RunRanks) -> None:
    for most, state, block in run_ranks(most_at_a_time, 4, {"stage": 3, "reduce": "microbatch"}):
        assert state < 17 * block // 2 < 16 * block, "a quarter of parameters and of gradients"
        assert state <= most <= state + block + 8192, "and the state of a random generator"


class Scaled(nn.Module):
    """A block with a parameter that nothing initialises."""

    def __init__(self, scale: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        if scale:
            self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        return x * self.scale if hasattr(self, "scale") else x


def refused() -> str:
    """The module that cannot be initialised lies on the second stage; afterwards a good model starts."""
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))

    def mean(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()

    with torch.device("meta"):
        model = nn.Sequential(*[Scaled(index == 3) for index in range(4)])
    with pytest.raises(engine.EngineError) as caught:
        engine.initialize(model, settings("pp2"), mean, x[:2])
    with torch.device("meta"):
        model = nn.Sequential(*[Scaled(False) for _ in range(4)])
    with engine.initialize(model, settings("pp2"), mean, x[:2]) as eng:
        assert eng.train_batch(x).loss > 0
    return str(caught.value)


def test_module_that_cannot_initialise_itself_is_refused_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(refused, 2)
    assert first == "rank 1 could not prepare for this run, so no rank starts; read its error."
    assert second == (
        "parameter '3.scale' is on the meta device and its module has no reset_parameters that sets it; add one (and "
        "_init_weights in a Hugging Face model), or build the model in memory."
    )


class Overwritten(nn.Module):
    """Model whose ``__init__`` scales a weight after its layer has drawn it."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        if scaled:
            nn.init.normal_(self.second.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x)).mean()
        return found


@pytest.mark.parametrize("scaled", [True, False])
def test_writes_of_init_that_are_lost_on_the_meta_device_are_named(
    scaled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):
        model = Overwritten(scaled)
    engine.initialize(model, {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}).close()
    told = [one.getMessage() for one in caplog.records if "initialised by reset_parameters alone" in one.getMessage()]
    assert len(told) == scaled
    assert all(text.startswith("1 parameter(s), such as second.weight, ") for text in told)


class Masked(nn.Module):
    """Module with a buffer of a dtype, which its initialisation copies, assigns or leaves."""

    mask: Tensor

    def __init__(self, dtype: torch.dtype, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("mask", torch.ones(4, 4, dtype=dtype))

    def reset_parameters(self) -> None:
        made = torch.ones(4, 4).tril().to(self.mask.dtype)
        if self.way == "copied":
            self.mask.copy_(made)
        elif self.way == "assigned":
            self.mask = made


@pytest.mark.parametrize("way", ["left", "copied", "assigned"])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.complex64, torch.uint8, torch.uint32, torch.int64, torch.float32], ids=str
)
def test_buffers_of_every_dtype_are_set_or_refused(dtype: torch.dtype, way: str) -> None:
    with torch.device("meta"):
        model = Masked(dtype, way)
    fill = partial(materialize, model, (), 1, torch.device("cpu"), lambda name, full: full)
    if way == "left":
        with pytest.raises(engine.PlanError, match="buffer 'mask' of 'the model' is on the meta device"):
            fill()
    else:
        fill()
        assert torch.equal(model.mask, torch.ones(4, 4).tril().to(dtype))
