"""Retained forwards: backwards after updates on the weights of their forward, and limits in bytes and seconds."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from engine.api import initialize
from engine.config import load_config
from engine.errors import ConfigError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.serving.bookkeeping.entry import FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.retained import RetainedForwards
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import (
    AdamParameters,
    Array,
    BackwardTensors,
    Command,
    CreateModel,
    DropTicket,
    Failure,
    ForwardTensors,
    LoadWeights,
    OptimStep,
    PlainOutput,
    Result,
    SaveWeights,
    TensorOutput,
)
from engine.serving.executor import CommandExecutor
from engine.serving.losses import ServedError
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.tensor_calls import TensorCalls
from engine.serving.training import TenantTrainer
from engine.step.held_weights import WeightHolds
from tests.engine.serving.commands_of_tests import MODEL, SESSION, created
from tests.engine.serving.test_training import CONFIG

STEP = AdamParameters(lr=1e-2, eps=1e-8)
GRIDS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "dp2 ZeRO-0": ({"data": 2}, 0),
    "dp2 ZeRO-1": ({"data": 2}, 1),
    "dp2 ZeRO-2": ({"data": 2}, 2),
    "dp2 ZeRO-3": ({"data": 2}, 3),
    "tp2": ({"tensor": 2}, 1),
    "pp2": ({"pipeline": 2}, 1),
}


class Scaled(nn.Module):
    """Layer whose graph saves a parameter itself, as norms do, and not only views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def layer() -> nn.Module:
    """Build the model of a server."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), Scaled(), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def values(seed: int) -> Array:
    """Draw fp32 values [6, 4]."""
    return np.random.default_rng(seed).standard_normal((6, 4)).astype(np.float32)


def forward(ticket: str, seed: int = 1) -> ForwardTensors:
    """Return a forward of the model."""
    return ForwardTensors("m", {"0": values(seed)}, ticket)


def backward(ticket: str, step: AdamParameters | None = None) -> BackwardTensors:
    """Return the backward of a forward."""
    return BackwardTensors("m", ticket, {"output": values(9)}, step)


def ran(
    world: World, folder: Path, grid: str, commands: list[Command], staleness: int
) -> tuple[list[Result], list[int]]:
    """Run commands on this rank; return results, and the held bytes after each."""
    parallel, stage = GRIDS.get(grid, ({}, 0))
    config = {**CONFIG, "parallel": dict(parallel), "zero_optimization": {"stage": stage}}
    pool = TenantPool(layer, load_config(config), TenantLimits(full=1), torch.from_numpy(values(0)), world)
    executor = CommandExecutor(pool, folder, staleness=staleness)
    try:
        pairs = [
            (executor.run(command), executor.retained_bytes())
            for command in (CreateModel("m", "base", None), *commands)
        ]
    finally:
        executor.close()
    return [result for result, _ in pairs[1:]], [held for _, held in pairs[1:]]


def of_first(folder: Path, grid: str, commands: list[Command], staleness: int) -> tuple[list[Result], list[int]]:
    """Run commands on a grid of thread ranks; return what rank 0 has."""
    size = int(np.prod(list(GRIDS.get(grid, ({}, 0))[0].values()), dtype=int))
    run = partial(ran, folder=folder, grid=grid, commands=commands, staleness=staleness)
    return run_thread_ranks(size, run)[0]


@pytest.mark.parametrize("grid", GRIDS)
def test_a_backward_within_the_staleness_runs_on_the_weights_of_its_forward(grid: str, tmp_path: Path) -> None:
    late: list[Command] = [
        forward("a"), forward("b"), backward("b", STEP), backward("a"), OptimStep("m", STEP),
        forward("", 5), forward("c"), forward("d"), backward("d", STEP), forward("e"), backward("e", STEP),
        backward("c"),
    ]  # fmt: skip
    results, held = of_first(tmp_path, grid, late, 1)
    assert [type(result) for result in results] == [*[TensorOutput] * 4, PlainOutput, *[TensorOutput] * 6, Failure]
    assert results[-1] == Failure(
        "forward 'c' used version 2 of the weights and they are at version 4 or later; serve.held.staleness allows 1 "
        "between; call forward again.", "gone",
    )  # fmt: skip
    assert held[0] > 0 and held[3] == held[-1] == 0 and held[2] > held[1] - held[0], "graphs and one version"
    model = layer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    x = torch.from_numpy(values(1)).requires_grad_()
    torch.autograd.backward(model(x), torch.from_numpy(values(9)))
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()  # of "b", whose gradient is that of "a": the weights were the same
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    found, first = results[5], results[3]
    assert isinstance(found, TensorOutput) and isinstance(first, TensorOutput)
    expected = model(torch.from_numpy(values(5))).detach().numpy()
    np.testing.assert_allclose(found.tensors["output"], expected, atol=3e-6)
    (soon,) = of_first(tmp_path, grid, [forward("a"), backward("a")], 0)[0][1:]
    assert isinstance(soon, TensorOutput)
    for name, value in soon.tensors.items():
        assert np.array_equal(first.tensors[name], value), "to the bit"
    refused = of_first(tmp_path, grid, late[:4], 0)[0][-1]
    assert isinstance(refused, Failure) and refused.category == "gone" and "staleness allows 0" in refused.error


def test_live_storages_are_counted_once_and_end_with_their_forwards(tmp_path: Path) -> None:
    elements = sum(parameter.numel() for parameter in layer().parameters())
    commands: list[Command] = [
        forward("a"), forward("b"), forward("x"), backward("x", STEP), forward("c"), DropTicket("m", "a"),
        DropTicket("m", "b"), SaveWeights("m", "w", True), LoadWeights("m", "w", True), backward("c"),
    ]  # fmt: skip
    results, held = of_first(tmp_path, "one", commands, 1)
    graph = held[0]
    assert 6 * 8 * 4 * 3 < graph < 6 * 8 * 4 * 10
    version = held[3] - 2 * graph
    assert held[1] == 2 * graph and 4 * elements <= version < 4 * elements + 2048, "one copy, of padded buckets"
    assert held[4:8] == [3 * graph + version, 2 * graph + version, graph, graph]
    assert held[8] == 0, "a load ends the forwards before it"
    assert isinstance(results[-1], Failure) and "came before its model was loaded" in results[-1].error


def test_a_ticket_that_is_used_again_ends_its_first_forward(tmp_path: Path) -> None:
    commands: list[Command] = [forward("a"), forward("a", 2), DropTicket("m", "a")]
    _, (first, second, dropped) = of_first(tmp_path, "one", commands, 1)
    assert first == second > 0 == dropped
    waiting = RetainedForwards(1e9, seconds=10.0)
    for ticket, time in (("a", 0.0), ("b", 1.0), ("a", 9.0)):
        waiting.record(ForwardTensors("m", {}, ticket), PlainOutput(), time)
    assert [drop.ticket for drop in waiting.late(12.0)] == ["b"]


class Chosen(nn.Module):
    """Rows of a table; the length of the second output is that of the first rank's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor, fixed: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        y = self.table(x)
        return {"y": y} if fixed is None else {"y": y, "fixed": y.new_ones(2)}


def test_a_mistake_in_the_rows_of_one_data_rank_is_an_error_of_all() -> None:
    rows = np.array([1, 2, 3])
    mistakes: list[tuple[dict[str, Array], int, str]] = [
        ({"0": np.array([1, 2, 9])}, 3, "the model failed on these tensors: index out of range"),
        ({"0": rows, "1": rows}, 3, "an output has no rows"),
        ({"0": rows}, 4, r"shape \(4, 4\), and the output \(3, 4\); send a gradient"),
    ]

    def body(world: World) -> int:
        with initialize(Chosen(), {**CONFIG, "parallel": {"data": 2}}, world=world) as eng:
            trainer, calls = TenantTrainer(eng, {}), TensorCalls({})
            for tensors, count, said in [*mistakes, ({"0": rows}, 3, "")]:
                gradients = {"y": np.ones((count, 4), np.float32)}
                with pytest.raises(ServedError, match=said) if said else nullcontext():
                    calls.forward(trainer, ForwardTensors("m", tensors, "t"))
                    calls.backward(trainer, BackwardTensors("m", "t", gradients))
            return trainer.version

    assert run_thread_ranks(2, body) == [0, 0]


def test_an_update_copies_weights_only_for_forwards_that_may_still_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = list[int]()
    monkeypatch.setattr(WeightHolds, "_copy_held", lambda part: copies.append(len(part._present)))
    for staleness, expected in ((0, [0, 0]), (1, [1, 0])):
        copies.clear()
        commands: list[Command] = [
            forward("a"),
            forward("b"),
            forward("c"),
            backward("a", STEP),
            forward("d"),
            backward("d", STEP),
        ]
        of_first(tmp_path, "one", [*commands], staleness)
        assert copies == expected, "holds before each update"


class Clock:
    """Clock of a test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def entry(number: int, command: Command) -> FutureEntry:
    """Return the entry of a command of the second door."""
    return FutureEntry(f"{SESSION}:tensors:{number}", SESSION, command, MODEL, route="/v1")


def run_all(ledger: Ledger, held: int) -> list[Command]:
    """Run what is queued; return its commands."""
    done: list[Command] = []
    while (one := ledger.queue.next(0.0)) is not None:
        assert one.command is not None
        done.append(one.command)
        held = 0 if isinstance(one.command, DropTicket) else held
        ledger.finish(one, PlainOutput(), held)
    return done


def test_the_oldest_forward_is_dropped_by_bytes_and_seconds_and_never_one_with_an_accepted_backward() -> None:
    clock = Clock()
    limits = LedgerLimits(held_bytes=100, held_seconds=10.0, session_seconds=1e9)
    ledger = Ledger(FairQueue(), None, limits, clock)
    ledger.open_session(SESSION)
    ledger.submit(created())
    for number, ticket in enumerate("abc"):
        clock.now = float(number)
        ledger.submit(entry(number, ForwardTensors(MODEL, {}, ticket)))
        run_all(ledger, 100)
    ledger.submit(entry(3, BackwardTensors(MODEL, "a", {})))
    assert [type(one) for one in run_all(ledger, 101)] == [BackwardTensors, DropTicket], "one drop at a time"
    ledger.submit(entry(4, BackwardTensors(MODEL, "c", {})))
    with pytest.raises(RequestRefusedError, match="'b' was dropped, because retained forwards took more than") as found:
        ledger.submit(entry(5, BackwardTensors(MODEL, "b", {})))
    assert found.value.status == 410
    clock.now = 100.0
    ledger.tick()
    assert [type(one) for one in run_all(ledger, 0)] == [BackwardTensors], "accepted backwards run"
    ledger.submit(entry(6, ForwardTensors(MODEL, {}, "d")))
    run_all(ledger, 0)
    line = ledger.lines[MODEL]
    assert not line.is_clean
    for clock.now in (110.0, 110.1):
        ledger.tick()
    assert run_all(ledger, 0) == [DropTicket(MODEL, "d")]
    with pytest.raises(RequestRefusedError, match=r"no backward came within serve\.held\.seconds, 10; call"):
        ledger.submit(entry(7, BackwardTensors(MODEL, "d", {})))
    ledger.submit(entry(4, BackwardTensors(MODEL, "c", {})))  # a repeat of the network gets its first result


def test_the_section_is_checked() -> None:
    serve = load_config({"serve": {"held": {"bytes": 5e8, "seconds": 30, "staleness": 2}}}).serve
    assert serve is not None and (serve.held.bytes, serve.held.seconds, serve.held.staleness) == (5e8, 30.0, 2)
    for wrong in ({"staleness": -1}, {"seconds": 0}, {"bytes": "2GB"}, {"count": 256}):
        with pytest.raises(ConfigError, match=r"serve\.held\."):
            load_config({"serve": {"held": wrong}})
