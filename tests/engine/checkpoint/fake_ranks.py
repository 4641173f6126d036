"""Several ranks in one process: each has its part of a model in buckets, and they save in threads."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine.build.assemble import plan_run
from engine.build.place_model import place_model
from engine.build.request import Request
from engine.checkpoint.contents.local_tensors import Held, LocalTensors, ModelTensor, SaveOwnership, model_tensors
from engine.checkpoint.contents.optimizer_state import (
    Families,
    Moments,
    describe_optimizer,
    make_moments,
    moments_by_bucket,
    parameter_scalars,
)
from engine.checkpoint.contents.snapshot import Contents, Ours, Snapshot
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.pieces import Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.load import Loader
from engine.checkpoint.save import Saver
from engine.config import load_config
from engine.parallel.comm.backend import RecordingBackend
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import Wait
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.planning.plan import Plan
from engine.zero.optim.flat_optimizers import FlatAdam
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.state.state_inventory import StateInventory

CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass
class MemoryHost:
    """A host group of threads; messages are copied into queues."""

    rank: int
    size: int
    queues: dict[tuple[int, int], "Queue[bytes]"]

    def send(self, data: memoryview, to: int) -> Wait:
        self.queues[self.rank, to].put(bytes(data))
        return lambda: None

    def receive(self, target: memoryview, source: int) -> Wait:
        def finish() -> None:
            target[:] = self.queues[source, self.rank].get(timeout=30)

        return finish


def memory_hosts(size: int) -> list[MemoryHost]:
    queues: dict[tuple[int, int], Queue[bytes]] = {(a, b): Queue() for a in range(size) for b in range(size)}
    return [MemoryHost(rank, size, queues) for rank in range(size)]


@dataclass
class FakeRank:
    """What one rank would have."""

    local_tensors: LocalTensors
    optimizer: ShardedOptimizer
    made: Moments

    def fill(self, logical: Mapping[str, Tensor]) -> None:
        """Put the logical tensors where this rank has them; zeros where ``logical`` is empty."""
        for held in self.held():
            held.values.copy_(part_of(logical[held.tensor], held.own)) if logical else held.values.zero_()

    def load(self, reader: StepReader) -> None:
        """Read this rank's share of a checkpoint, over zeros."""
        self.fill({})
        loader = Loader(reader, self.local_tensors, {})
        loader.check()
        loader.read_weights()
        loader.read_moments(self.made)

    def held(self) -> list[Held]:
        """Weights, masters and moments."""
        local_tensors = self.local_tensors
        return [
            *local_tensors.weights(),
            *local_tensors.masters(),
            *local_tensors.state(self.made),
        ]


@dataclass
class FakeRun:
    """All ranks of a grid."""

    plan: Plan
    ranks: list[FakeRank]
    tensors: tuple[ModelTensor, ...]

    def save(
        self, folder: Path, step: int = 1, files: Callable[[int], Files] | None = None, keep: int | None = None
    ) -> list[Path]:
        """Save from all ranks at once."""
        return on_all(
            len(self.ranks),
            lambda host: self.save_one(host, folder, step, files(host.rank) if files else Files(), keep),
        )

    def save_one(self, host: MemoryHost, folder: Path, step: int, files: Files, keep: int | None) -> Path:
        """What one rank does of it."""
        saver, snapshot = self.saver(host, step, files)
        return saver.run(snapshot, folder, keep)

    def saver(self, host: MemoryHost, step: int, files: Files) -> tuple[Saver, Snapshot]:
        """The saver of a rank, and what it is to save."""
        rank = self.ranks[host.rank]
        local_tensors, optimizer = rank.local_tensors, rank.optimizer
        saver = Saver(local_tensors.ownership, self.tensors, host, files, lambda folder: None)
        pieces = [*local_tensors.masters(), *local_tensors.state(moments_by_bucket(optimizer))]
        weights = [*local_tensors.weights()]
        contents = Contents(step, {}, {}, {}, describe_optimizer(optimizer, self.plan.table, frozenset()), None, {})
        return saver, saver.snapshot(
            Ours(weights, {}, pieces, {}, parameter_scalars(optimizer, self.plan.table)), contents
        )


def on_all(size: int, body: Callable[[MemoryHost], T]) -> list[T]:
    """Run ``body`` on all ranks at once; raises what the first of them raises."""
    hosts, found, errors = memory_hosts(size), dict[int, T](), dict[int, Exception]()

    def work(rank: int) -> None:
        try:
            found[rank] = body(hosts[rank])
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [found[rank] for rank in range(size)]


def fake_run(make: Callable[[], nn.Module], settings: Mapping[str, Any], example: Any, loss_fn: Any = None) -> FakeRun:
    """Place a model on all ranks of a grid, with moments, all zero."""
    config = load_config(settings, _world(settings))
    model = make()
    plan = plan_run(model, config, Request(loss_fn=loss_fn, example_batch=example), example)
    ownership = SaveOwnership(plan)
    names = {row.name: row.name for row in plan.table}
    ranks = [_rank(make(), plan, ownership, index) for index in range(_world(settings))]
    return FakeRun(plan, ranks, model_tensors(ownership, names, {}))


def _world(settings: Mapping[str, Any]) -> int:
    return torch.Size(settings["parallel"].get(axis, 1) for axis in ("data", "tensor", "pipeline", "context")).numel()


def _rank(model: nn.Module, plan: Plan, ownership: SaveOwnership, rank: int) -> FakeRank:
    grid = plan.grid(rank)
    comm = Comm(grid, RecordingBackend(grid))
    buckets = place_model(model, plan, comm, CPU, TensorAxis(comm), Request())
    trained = buckets[: len(plan.layout(grid.coord()).buckets)]
    sharded = plan.config.zero_optimization.stage > 0
    optimizer = ShardedOptimizer(trained, plan.groups, lambda groups: FlatAdam(groups), comm, sharded)
    names = [slot.name for flat in trained for slot in flat.bucket.slots]
    kinds = {f"{moment}/{name}": TensorKind("F32", ()) for moment in ("exp_avg", "exp_avg_sq") for name in names}
    made = make_moments(optimizer, Families(kinds, {"groups": []}), plan.table)
    inventory = StateInventory(
        model=model,
        rows=plan.table.held_by(grid.holder()),
        trained=trained,
        frozen=buckets[len(trained) :],
        optimizer=optimizer,
    )
    return FakeRank(LocalTensors(ownership, grid.coord(), inventory), optimizer, made)


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """The elements of a piece."""
    spans = piece.spans()
    flat = whole.reshape(-1)
    parts = [
        flat[start : start + length] for start, length in zip(spans.full.tolist(), spans.length.tolist(), strict=True)
    ]
    order = sorted(range(len(parts)), key=lambda index: int(spans.local[index]))
    return torch.cat([parts[index] for index in order]) if parts else flat[:0]


def random_tensors(runs: Sequence[FakeRun]) -> dict[str, Tensor]:
    """A value for every logical tensor of these runs of one model."""
    generator = torch.Generator().manual_seed(5)
    kinds = {held.tensor: held.kind for run in runs for rank in run.ranks for held in rank.held()}
    return {name: torch.rand(kind.shape, generator=generator) + 0.5 for name, kind in sorted(kinds.items())}
