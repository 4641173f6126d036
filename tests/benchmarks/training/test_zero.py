"""The benchmark of ZeRO: its rows, what is asked of them, and a tiny run that is right in loss, bytes and calls."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.footprint import Footprint
from benchmarks.harness.report import loss_spread, medians
from benchmarks.harness.sent_bytes import RingCounter
from benchmarks.peers.deepspeed import make_config as make_deepspeed_config
from benchmarks.peers.registry import make_trainer
from benchmarks.peers.trine import make_config
from benchmarks.peers.workload import Mode, Workload, make_rows
from benchmarks.training.comparison import Effort, measure
from benchmarks.training.lineups import AGAIN, DDP, make_zero_lineup
from engine.config import load_config
from engine.models.decoder import DecoderConfig
from engine.zero.gather.call_agreement import ROUND
from tests.selection import wide

TINY = Workload(DecoderConfig(layers=2, width=32, heads=2, context=16), sequences=8)
TRINE = tuple(mode for mode in make_zero_lineup(2, 2).modes if mode.kind == "trine")


def test_the_configurations_ask_for_the_stage() -> None:
    modes = {mode.name: mode for mode in make_zero_lineup(4, accumulation=4).modes}
    found = {}
    for name, mode in modes.items():
        if mode.kind == "trine":
            config = load_config(make_config(mode, Workload()), 4)
            assert (config.dp, config.micro, config.accumulation) == (4, 1, 4)
            zero_config = config.zero_optimization
            found[name] = (zero_config.stage, zero_config.reduce, zero_config.gather)
    assert found["Trine ZeRO-2"] == (2, "step", "microbatch")
    assert found["Trine ZeRO-2, reduce: microbatch"] == (2, "microbatch", "microbatch")
    assert found["Trine ZeRO-3"] == (3, "step", "microbatch")
    assert found["Trine ZeRO-3, gather: step"] == (3, "step", "step")
    deepspeed = make_deepspeed_config(modes["DeepSpeed ZeRO-3"], Workload(), 1000)
    assert deepspeed["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000}
    assert (deepspeed["train_batch_size"], deepspeed["gradient_accumulation_steps"]) == (16, 4)


@pytest.mark.long
def test_a_tiny_run_trains_alike_and_counts_exactly() -> None:
    lineup = make_zero_lineup(2, accumulation=2).of_peers(["fsdp2"])
    others = {"Trine ZeRO-2", "Trine ZeRO-3", "Trine ZeRO-3, gather: step"}  # counted below, without processes
    modes = [mode for mode in lineup.modes if AGAIN not in mode.name and mode.name not in others]
    rounds = measure(modes, TINY, Effort(rounds=1, steps=2))
    assert loss_spread(rounds) <= 1e-5
    rows = {row.mode: row.footprint for row in medians(rounds)}
    payload = 4 * parameters()  # sent once for each pass of all of it around two ranks: half of it, twice
    assert rows[DDP].sent_bytes == payload
    # FSDP2: two blocks and the root, gathered once or twice, in stage 3 for each of two microbatches; one norm
    padded = pytest.approx(payload / 2, rel=0.01)
    assert (rows["torch FSDP2 as ZeRO-2"].calls, rows["torch FSDP2 as ZeRO-3"].calls) == (2 * 3 + 3 + 1, 4 * 3 + 3 + 1)
    assert (rows["torch FSDP2 as ZeRO-3"].sent_bytes - 4) / 5 == padded
    check_memory(rows, payload)


def check_memory(rows: dict[str, Footprint], payload: int) -> None:
    """Parameters, gradients and moments of DDP and its buckets; shards of them; and more within a step."""
    assert rows[DDP].state_bytes == pytest.approx(4 * payload, rel=0.01)
    assert rows["Trine ZeRO-0"].state_bytes == pytest.approx(4 * payload, rel=0.03)
    assert rows["Trine ZeRO-1"].state_bytes == pytest.approx(3 * payload, rel=0.03)
    assert rows["Trine ZeRO-2, reduce: microbatch"].state_bytes == pytest.approx(2.5 * payload, rel=0.03)
    assert rows["torch FSDP2 as ZeRO-3"].state_bytes == pytest.approx(1.5 * payload, rel=0.03)
    assert all(held.step_peak_bytes > held.live_bytes >= held.state_bytes for held in rows.values())


def parameters() -> int:
    """Of the tiny decoder."""
    from engine.models.decoder import Decoder

    return sum(parameter.numel() for parameter in Decoder(TINY.decoder).parameters())


ROUND_BYTES = 10
"""Sent to one other host at the end of a forward of ZeRO 3: flags, a digest of calls, a mask of at most 8 buckets. The
engine does not count rounds between hosts, nor the byte that says whether a batch is there."""


@pytest.mark.parametrize(
    "mode", [mode if mode.stage == 1 else wide(mode) for mode in TRINE], ids=lambda mode: mode.name
)
def test_the_counter_finds_what_the_engine_tells(run_ranks: Callable[..., list[Any]], mode: Mode) -> None:
    for counted, told in run_ranks(counted_and_told, mode.ranks, mode):
        assert counted == told


def counted_and_told(mode: Mode) -> tuple[tuple[int, int], tuple[int, int]]:
    """(bytes, calls) of the second step, as seen from outside and by the engine's own tally.

    Ranks of one host agree on gathers through shared memory, which is not seen from outside.
    """
    import torch.distributed as dist

    trainer: Any = make_trainer(mode, TINY)
    trainer.step(make_rows(mode, TINY, 0, dist.get_rank()))
    before = trainer._engine.sent.copy()
    with RingCounter() as counter:
        trainer.step(make_rows(mode, TINY, 1, dist.get_rank()))
    rows = [row for row in trainer._engine.sent.since(before).rows() if row.label not in (ROUND, "batch check")]
    return (counter.sent, counter.calls), (sum(row.bytes for row in rows), sum(row.calls for row in rows))


@pytest.mark.peers
def test_deepspeed_trains_alike() -> None:
    lineup = make_zero_lineup(2, accumulation=2, stages=(1, 2, 3)).of_peers(["deepspeed"])
    modes = [mode for mode in lineup.modes if mode.kind != "trine"]
    assert loss_spread(measure(modes, TINY, Effort(rounds=1, steps=2))) <= 1e-5
