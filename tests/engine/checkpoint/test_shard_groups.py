"""Checkpoints do not know of shard groups: one group stores, any other division of the data axis loads, to the bit."""

from collections.abc import Callable
from functools import cache
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
from tests.zero.test_secondary_shards import begin, rows

RunRanks = Callable[..., list[Any]]
Way = tuple[int, int, int, int | None]
"""dp, tp, ZeRO stage, shard size."""
SHAPE = DecoderConfig(vocabulary=61, layers=2, width=24, heads=12, context=8, tied=True)


def make() -> Decoder:
    torch.manual_seed(1)
    return Decoder(SHAPE)


@cache
def run_on(way: Way) -> FakeRun:
    """All ranks of a way, in this process."""
    dp, tp, stage, size = way
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": dp, "tensor": tp, "pipeline": 1},
        "zero_optimization": {"stage": stage, "shard_size": size},
        "bf16": {"enabled": True},
    }
    ids = torch.zeros((1, SHAPE.context), dtype=torch.int64)
    return fake_run(make, settings, {"input_ids": ids, "labels": ids}, loss_sum)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ((4, 1, 3, 2), (4, 1, 1, None)),
        ((2, 1, 1, None), (4, 1, 3, 2)),
        wide((4, 1, 1, 2), (1, 1, 0, None)),
        wide((4, 2, 3, 2), (4, 1, 2, 2)),
        wide((6, 1, 3, 3), (6, 1, 3, 2)),
        wide((4, 1, 2, None), (4, 2, 1, 2)),
    ],
)
def test_groups_save_every_element_once_and_load_from_any_division(saved: Way, wanted: Way, tmp_path: Path) -> None:
    logical = {name: value.bfloat16().float() for name, value in random_tensors([run_on(saved)]).items()}
    for rank in run_on(saved).ranks:
        rank.fill(logical)
    step = run_on(saved).save(tmp_path)[0]
    reader = StepReader(Files(), step)
    files = [name for name in reader.manifest.files if name.endswith(".safetensors")]
    held = [sum(kind.bytes for kind, _ in reader.tensors_of(name).values()) for name in files]
    assert sum(held) == sum(kind.bytes for kind in reader.kinds.values()), "not an element more"
    for rank in run_on(wanted).ranks:
        rank.load(reader)
        masters = {each.tensor.partition("/")[2] for each in rank.local_tensors.masters()}
        for each in rank.held():
            kind, name = each.tensor.split("/", 1)
            if kind != "param" or name not in masters:  # those are their masters rounded, when all have read
                assert torch.equal(each.values, part_of(logical[each.tensor], each.own).to(each.values.dtype))


def trained(folder: str, zero: dict[str, Any], load: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Body of a rank: steps after a checkpoint, which is saved or loaded."""
    with begin({"zero_optimization": zero, "gradient_accumulation_steps": 2}) as eng:
        if load:
            eng.load_checkpoint(folder)
        else:
            eng.train_batch(rows(eng, 0))
            eng.save_checkpoint(folder).wait()
        weights = eng.full_state_dict()
        return [eng.train_batch(rows(eng, step)).loss for step in (1, 2)], weights


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"stage": 3, "shard_size": 2}, {"stage": 3}),
        ({"stage": 1}, {"stage": 3, "shard_size": 2}),
        ({"stage": 2, "reduce": "microbatch", "shard_size": 2}, {"stage": 1, "shard_size": 2}),
    ],
)
def test_processes_go_on_with_another_division(
    run_ranks: RunRanks, tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    first = run_ranks(trained, 4, str(tmp_path), saved, False)
    then = run_ranks(trained, 4, str(tmp_path), wanted, True)
    for (losses, weights), (others, loaded) in zip(first, then, strict=True):
        assert others == pytest.approx(losses, rel=1e-6)
        assert weights.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[name]) for name, value in weights.items())
