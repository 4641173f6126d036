"""Checkpoints do not know which ranks share experts: any other number of them loads weights and moments, to the bit."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from tests.engine.checkpoint.fake_ranks import FakeRun, fake_run, part_of, random_tensors
from tests.engine.checkpoint.test_memory_checkpoints import TWO, Hosts
from tests.engine.test_shared_experts import Mixture, Routed, loss
from tests.parallel.experts.moe import WIDTH, Always

Way = tuple[int, int, int]
"""Data ranks, expert ranks, ZeRO stage."""


@cache
def run_on(kind: Callable[[], nn.Module], way: Way) -> FakeRun:
    """All ranks of a way, in this process."""
    data, expert, stage = way
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "parallel": {"data": data, "tensor": 1, "pipeline": 1, "expert": expert},
        "zero_optimization": {"stage": stage},
    }
    example = {name: torch.zeros(1, 3, WIDTH) for name in "xy"}
    return fake_run(lambda: Mixture(kind), settings, example, loss)


@pytest.mark.parametrize("kind", [Routed, Always])
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [((2, 2, 0), (4, 4, 1)), ((4, 2, 3), (1, 1, 0)), ((2, 1, 1), (2, 2, 3)), ((4, 4, 0), (4, 2, 2))],
)
def test_expert_ranks_save_every_element_once_and_load_from_any_number(
    kind: Callable[[], nn.Module], saved: Way, wanted: Way, tmp_path: Path
) -> None:
    logical = random_tensors([run_on(kind, saved)])
    for rank in run_on(kind, saved).ranks:
        rank.fill(logical)
    step = run_on(kind, saved).save(tmp_path)[0]
    reader = StepReader(Files(), step)
    files = [name for name in reader.manifest.files if name.endswith(".safetensors")]
    held = [sum(kind.bytes for kind, _ in reader.tensors_of(name).values()) for name in files]
    assert sum(held) == sum(kind.bytes for kind in reader.kinds.values()), "each element once"
    assert {name for name in reader.kinds if ".moe." in name or ".experts." in name}
    for rank in run_on(kind, wanted).ranks:
        rank.load(reader)
        for each in rank.held():
            assert torch.equal(each.values, part_of(logical[each.tensor], each.own)), each.tensor


@pytest.mark.parametrize(
    ("kind", "lost", "saved", "wanted"),
    [
        (Routed, 1, (4, 2, 3), (4, 4, 1)),
        *(
            pytest.param(kind, lost, saved, wanted, marks=pytest.mark.long)
            for kind in (Routed, Always)
            for lost in (0, 1)
            for saved, wanted in (((4, 4, 0), (4, 1, 2)), ((4, 4, 1), (4, 2, 3)), ((4, 2, 3), (4, 4, 1)))
        ),
    ],
)
def test_experts_survive_the_loss_of_a_host_in_copies_in_memory(
    kind: Callable[[], nn.Module], lost: int, saved: Way, wanted: Way, tmp_path: Path
) -> None:
    logical, hosts = random_tensors([run_on(kind, saved)]), Hosts(tmp_path, TWO, partial(run_on, kind, saved))
    ranks = run_on(kind, wanted).ranks  # before the threads: a trace replaces functions of torch
    for rank in run_on(kind, saved).ranks:
        rank.fill(logical)
    hosts.save(3)
    hosts.lose(lost)

    def load(number: int, reader: StepReader) -> None:
        ranks[number].load(reader)
        for each in ranks[number].held():
            assert torch.equal(each.values, part_of(logical[each.tensor], each.own)), each.tensor

    found = hosts.found(load=load)
    assert found is not None and found[0] == 3
