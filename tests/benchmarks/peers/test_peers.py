"""torch's own tensor and pipeline parallelism: the same training as one process, and its bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.harness.report import loss_spread, medians
from benchmarks.harness.sent_bytes import RingCounter, ring_bytes
from benchmarks.peers.pipelining import make_stage, stage_blocks
from benchmarks.peers.registry import make_trainer
from benchmarks.peers.workload import Mode, Workload, make_rows
from benchmarks.training.comparison import Effort, measure
from benchmarks.training.lineups import make_lineup
from engine.models.decoder import Decoder, DecoderConfig
from engine.parallel.comm.backend import Wait
from engine.parallel.comm.shared_memory import SharedMemory, shared_bytes
from tests.parallel.comm.neighbours import neighbours
from tests.selection import wide

TINY = Workload(DecoderConfig(layers=2, width=32, heads=2, context=16), sequences=4, clip=0.05)
ACTIVATIONS = 4 * 16 * 32 * 4
"""Bytes of the hidden states of the whole batch."""
MODES = tuple(mode for mode in make_lineup(2, groups=("tp", "pp")).modes if mode.kind != "trine")


@pytest.mark.long
def test_losses_equal_one_process_and_bytes_the_formulas() -> None:
    rounds = measure(MODES, TINY, Effort(rounds=1, steps=3))
    assert loss_spread(rounds) <= 1e-5
    rows = {row.mode: row for row in medians(rounds)}
    # Half of the hidden states' all-reduce, twice, for 4 in a block, the embedding and the head's input;
    # the rest are maxima and sums of the vocabulary-parallel loss and partial norms.
    around = (4 * 2 + 2) * ACTIVATIONS
    assert around <= rows["torch DTensor tp2"].footprint.sent_bytes <= 1.05 * around
    norm = 4
    assert rows["torch pipelining pp2"].footprint.sent_bytes == ACTIVATIONS + norm


@pytest.mark.long
def test_only_local_tensors_are_live_under_dtensor() -> None:
    rows = {row.mode: row.footprint.live_bytes for row in medians(measure(MODES[:2], TINY, Effort(rounds=1, steps=1)))}
    assert rows["torch DTensor tp2"] < 0.6 * rows["one process, plain torch"]


@pytest.mark.parametrize("mode", [wide(MODES[1]), MODES[2]], ids=lambda mode: mode.kind)
def test_clipping_sees_the_whole_model(run_ranks: Callable[..., list[Any]], mode: Mode) -> None:
    squares = run_ranks(clipped_squares, mode.ranks, mode)
    total = sum(squares) if mode.axis == "pipeline" else squares[0]
    assert total**0.5 == pytest.approx(TINY.clip, rel=1e-4)


def clipped_squares(mode: Mode) -> float:
    """Squared norm of this rank's gradients as the optimizer gets them; of whole ones where they are cut."""
    found: list[Tensor] = []

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        grads = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        found.extend(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)

    trainer = make_trainer(mode, TINY)
    with_hook = register_optimizer_step_pre_hook(look)
    trainer.step(make_rows(mode, TINY, 0, torch.distributed.get_rank()))
    with_hook.remove()
    return sum(grad.double().square().sum().item() for grad in found)


@pytest.mark.parametrize(("blocks", "stages"), [(8, 4), (7, 4), (2, 4), (1, 1)])
def test_stages_cover_all_blocks_in_order(blocks: int, stages: int) -> None:
    shares = [stage_blocks(blocks, stage, stages) for stage in range(stages)]
    assert [index for share in shares for index in share] == list(range(blocks))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_stages_in_a_row_are_the_model() -> None:
    torch.manual_seed(0)
    model = Decoder(replace(TINY.decoder, layers=3))
    tokens = torch.randint(256, (2, 16))
    x = tokens
    for stage in range(2):
        x = make_stage(model, stage, 2)(x)
    torch.testing.assert_close(x, model(tokens), rtol=0, atol=0)


def test_ring_bytes_of_each_kind() -> None:
    assert ring_bytes("all_reduce", 1000, 4) == 1500
    assert ring_bytes("all_gather_into_tensor", 1000, 4) == 750
    assert ring_bytes("send", 1000, 4) == 1000
    assert ring_bytes("recv_", 1000, 4) == 0
    with pytest.raises(KeyError):
        ring_bytes("unheard_of", 1000, 4)


def test_a_group_of_one_rank_sends_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(counted_in_groups, 2) == [((0, 0), (400, 1), (0, 0), (100, 1))] * 2


def counted_in_groups() -> tuple[tuple[int, int], ...]:
    """(bytes, calls) of an all-reduce alone, of one by both ranks, and of functional ones of a quarter of the bytes."""
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    both = torch.distributed.new_group([0, 1])
    counters = [RingCounter() for _ in range(4)]
    for counter, group in zip(counters, (alone, both), strict=False):
        with counter:
            torch.distributed.all_reduce(torch.ones(100), group=group)
    for counter, group in zip(counters[2:], (alone, both), strict=True):
        with counter:
            functional_collectives.all_reduce(torch.ones(25), "sum", group).sum()
    return tuple((counter.sent, counter.calls) for counter in counters)


def test_what_goes_through_shared_memory_counts_as_if_it_were_sent() -> None:
    with neighbours(2, shared_bytes(2)) as found, RingCounter() as counter:
        ranks = [SharedMemory(one) for one in found]
        calls: list[Callable[[SharedMemory], Wait]] = [
            lambda one: one.all_reduce(torch.ones(100), "max"),
            lambda one: one.reduce_scatter(torch.ones(50), torch.ones(100)),
            lambda one: one.all_gather(torch.ones(100), torch.ones(50)),
        ]
        for call in calls:
            for wait in [call(one) for one in ranks]:
                wait()
    assert (counter.sent, counter.calls) == (2 * (400 + 200 + 200), 2 * 3)
    assert SharedMemory.all_reduce.__name__ == "all_reduce"  # nothing is watched any more
