"""A checkpoint of any grid loads on any other: every ordered pair of grids with at most four ranks, in one process."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from tests.engine.checkpoint.fake_ranks import FakeRun, fake_run, part_of, random_tensors
from tests.selection import wide

SHAPE = DecoderConfig(vocabulary=61, layers=4, width=24, heads=12, context=8, tied=True)
"""Twelve heads, so that three ranks share them; the tied head lies on two stages."""

Cell = tuple[int, int, int, int]
"""dp, tp, pp, ZeRO stage."""
CELLS: list[Cell] = [
    (dp, tp, pp, stage) for dp, tp, pp in product(range(1, 5), repeat=3) if dp * tp * pp <= 4 for stage in range(4)
]

POLICIES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "bf16 alone": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
}


def make() -> Decoder:
    torch.manual_seed(1)
    return Decoder(SHAPE)


def settings(cell: Cell, **changes: Any) -> dict[str, Any]:
    dp, tp, pp, stage = cell
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "parallel": {"data": dp, "tensor": tp, "pipeline": pp},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "no_weight_decay": ["*norm*", "*.bias"]},
    } | changes


@cache
def run_with(cell: Cell, policy: str) -> FakeRun:
    ids = torch.zeros((1, SHAPE.context), dtype=torch.int64)
    return fake_run(make, settings(cell, **POLICIES[policy]), {"input_ids": ids, "labels": ids}, loss_sum)


def run_on(cell: Cell) -> FakeRun:
    return run_with(cell, "fp32")


@pytest.fixture(scope="module")
def logical() -> dict[str, Tensor]:
    return random_tensors([run_on((1, 1, 1, 0))])


@pytest.fixture(scope="module")
def checkpoints(logical: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Cell, Path]]:
    """Saved when asked for the first time."""
    folder = tmp_path_factory.mktemp("grids")

    class Saved(dict[Cell, Path]):
        def __missing__(self, cell: Cell) -> Path:
            run = run_on(cell)
            for rank in run.ranks:
                rank.fill(logical)
            self[cell] = run.save(folder / "-".join(map(str, cell)))[0]
            return self[cell]

    yield Saved()
    run_with.cache_clear()


def loads(step: Path, cell: Cell, logical: dict[str, Tensor]) -> None:
    """Every rank of the grid finds in its share, bit for bit, what was saved."""
    for rank in run_on(cell).ranks:
        rank.load(StepReader(Files(), step))
        for held in rank.held():
            assert torch.equal(held.values, part_of(logical[held.tensor], held.own)), (held.tensor, step, cell)


def pairs(count: int) -> list[tuple[Cell, Cell]]:
    """So many of all ordered pairs, every grid at least once on either side."""
    every = [(saved, wanted) for saved in CELLS for wanted in CELLS]
    if count >= len(every):
        return every
    shuffled = random.Random(3)
    others = [shuffled.sample(CELLS, len(CELLS)) for _ in range(-(-count // len(CELLS)))]
    return [(saved, wanted) for other in others for saved, wanted in zip(CELLS, other, strict=True)][:count]


def test_pairs_of_grids(checkpoints: dict[Cell, Path], logical: dict[str, Tensor]) -> None:
    for saved, wanted in pairs(len(CELLS))[::16]:
        loads(checkpoints[saved], wanted, logical)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_ordered_pair_of_grids(checkpoints: dict[Cell, Path], logical: dict[str, Tensor]) -> None:
    every = pairs(10**6)
    assert len(CELLS) == 52 and len(every) == 52 * 52
    for saved, wanted in every:
        loads(checkpoints[saved], wanted, logical)
    print(f"{len(every)} pairs of grids")


def test_every_tensor_is_stored_once_and_padding_never(
    checkpoints: dict[Cell, Path], logical: dict[str, Tensor]
) -> None:
    for cell in ((1, 1, 1, 0), (3, 1, 1, 1), (2, 2, 1, 3), (1, 2, 2, 0), (1, 3, 1, 2), (4, 1, 1, 3)):
        step = checkpoints[cell]
        reader = StepReader(Files(), step)
        assert set(reader.kinds) == set(logical)
        tensors = sum(kind.bytes for kind in reader.kinds.values())
        files = {name: size for name, size in reader.manifest.files.items() if name.endswith(".safetensors")}
        headers = sum((step / name).stat().st_size % 4096 + 4096 * 64 for name in files)
        assert sum(files.values()) <= tensors + headers
        assert sum(size for name, size in files.items() if name.startswith("model/")) <= tensors / 3 + headers
        held = [sum(kind.bytes for key, (kind, _) in reader.tensors_of(name).items()) for name in files]
        assert sum(held) == tensors, "not an element more"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16 alone": torch.bfloat16}


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (saved, wanted) if column == (row + 1) % len(POLICIES) else wide(saved, wanted)
        for row, saved in enumerate(POLICIES)
        for column, wanted in enumerate(POLICIES)
    ],
    ids=lambda name: name,
)
def test_any_dtype_policy_loads_any_other(saved: str, wanted: str, logical: dict[str, Tensor], tmp_path: Path) -> None:
    """The widest form that is stored reaches the widest form that is wanted; 16 bits are never a detour."""
    source, target = run_with((2, 1, 1, 1), saved), run_with((1, 2, 1, 0), wanted)
    wide = {name: logical[name.replace("master/", "param/")] for rank in source.ranks for name in kinds_of(rank)}
    for rank in source.ranks:
        rank.fill(wide)
    (step, *_) = source.save(tmp_path)
    for rank in target.ranks:
        rank.load(StepReader(Files(), step))
        masters = {held.tensor.partition("/")[2] for held in rank.local_tensors.masters()}
        for held in rank.held():
            kind, name = held.tensor.split("/", 1)
            if kind == "param" and name in masters:
                continue  # is its master rounded, when all ranks have read
            expected = part_of(logical["param/" + name if kind == "master" else held.tensor], held.own)
            if saved == "bf16 alone":
                expected = expected.bfloat16()  # moments too: nothing wider was there
            if kind == "param" and DTYPES[wanted] == DTYPES[saved]:
                expected = expected.to(DTYPES[saved])
            assert torch.equal(held.values, expected.to(held.values.dtype)), held.tensor


def kinds_of(rank: Any) -> list[str]:
    return [held.tensor for held in rank.held()]
