"""A step whose gradients are not finite anywhere is made nowhere, leaves no trace, and says where it was."""

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.launch.reference_run import ProgressLine
from engine.models.decoder import Block, loss_sum
from engine.parallel.comm.agreement import bit_sum
from engine.zero.reduce.replica_check import NON_FINITE
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
STAGES = (0, 1, 2, 3)
GRIDS: dict[str, dict[str, int]] = {
    "dp2": {"data": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
}


class Counted(Block):
    """A block with running statistics and a counter that forward writes, and a buffer that it makes anew."""

    calls: Tensor
    largest: Tensor

    def watch(self, width: int) -> None:
        self.statistics = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        self.calls += 1
        y = super().forward(x)
        self.largest = y.detach().abs().max()
        normed: Tensor = self.statistics(y.flatten(0, 1))
        return normed.view_as(y)


def build() -> nn.Module:
    model: Any = models.decoder(layers=2, dropout=0.1)
    for block in model.blocks:
        block.__class__ = Counted
        block.watch(32)
    return model  # type: ignore[no-any-return]


def traces(eng: engine.Engine) -> list[int]:
    """Bits of everything that a step may change on this rank."""
    buckets = eng._runtime.buckets
    tensors = [flat.kept if flat.sharded else flat.params for flat in buckets]
    tensors += [flat.master for flat in buckets if flat.master is not None]
    tensors += [value for state in eng.optimizer.state.values() for value in state.values()]
    tensors += [*eng.module.buffers(), torch.get_rng_state()]
    groups = [group.get("step", 0) for group in eng.optimizer.param_groups]
    return [*map(int, map(bit_sum, tensors)), *groups, eng.step_count, hash(eng.lr)]


class Poison:
    """Makes one thing on one rank not finite while ``on``."""

    def __init__(self, eng: engine.Engine, kind: str) -> None:
        self.on, last = False, eng.grid.world_size - 1
        if eng.grid.rank == last and kind == "gradient":
            eng.module.get_parameter("blocks.1.norm1.weight").register_hook(self)  # type: ignore[no-untyped-call]
        if eng.grid.rank == last and kind == "activation":
            eng.module.get_submodule("blocks.1.attention").register_forward_hook(lambda m, a, y: self(y))

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor * math.nan if self.on else tensor


def train(grid: str, stage: int, kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Body of a rank: poisoned steps between good ones, then the good ones alone."""
    settings = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": GRIDS[grid],
        "zero_optimization": {"stage": stage, "reduce": "microbatch" if stage == 2 else "step"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
    }
    batches = models.batches_for("decoder", 8, 2)
    found: dict[str, Any] = {"kept": [], "reports": [], "extra": 0}
    runs = []
    for plan in (("bad", 0, "bad", "bad", 1), (0, 1)):
        example = {key: value[:2] for key, value in batches[0].items()}
        with engine.initialize(build(), settings | changes, loss_sum, example) as eng:
            poison = Poison(eng, kind)
            rows = slice(eng.grid.coord().dp * 4, eng.grid.coord().dp * 4 + 4)
            losses = []
            for step in plan:
                poison.on, before, sent = step == "bad", traces(eng), eng.sent
                batch = batches[0 if step == "bad" else int(step)]
                report = eng.train_batch({key: value[rows] for key, value in batch.items()})
                if poison.on:
                    found["kept"].append(traces(eng) == before)
                    found["reports"].append((report.skipped, report.nonfinite))
                    rows_sent = eng.sent.since(sent).rows()
                    found["extra"] += sum(row.calls for row in rows_sent if row.label == NON_FINITE)
                else:
                    losses.append(report.loss)
            found["skipped"] = found.get("skipped", eng.skipped_steps)
            runs.append((losses, traces(eng)))
    found["as if never"] = runs[0] == runs[1]
    return found


Case = tuple[int, str]
"""ZeRO stage, and what is not finite."""
EVERY: tuple[Case, ...] = (*((stage, "gradient") for stage in STAGES), (2, "activation"))


def train_all(grid: str, wanted: tuple[Case, ...]) -> list[tuple[Case, dict[str, Any]]]:
    """Body of a rank: all cases of a grid."""
    return [(case, train(grid, *case, {})) for case in wanted]


@pytest.mark.parametrize(
    ("grid", "wanted"),
    [
        wide("dp2 x tp2", (EVERY[3],), id="dp2 x tp2, some"),
        wide("dp2 x pp2", (EVERY[1], EVERY[4]), id="dp2 x pp2, some"),
        *(pytest.param(grid, EVERY, marks=pytest.mark.long, id=grid) for grid in GRIDS),
    ],
)
def test_a_skipped_step_leaves_no_bit_and_names_the_first_parameter(
    run_ranks: RunRanks, grid: str, wanted: tuple[Case, ...]
) -> None:
    for rank, cases in enumerate(run_ranks(train_all, math.prod(GRIDS[grid].values()), grid, wanted)):
        for (stage, kind), found in cases:
            where = (rank, stage, kind)
            name = "blocks.1.norm1.weight" if kind == "gradient" else "the loss"
            assert found["reports"] == [(True, name)] * 3, where
            assert found["kept"] == [True] * 3 and found["as if never"], where
            assert (found["skipped"], found["extra"]) == (3, 3), where


def spoil_each(grid: str, stage: int) -> list[str]:
    """Body of a rank: for every rank and parameter in turn one step in which its gradient is not finite; what was
    named. After each, this rank's state has to be what it was."""
    settings = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "parallel": GRIDS[grid],
        "zero_optimization": {"stage": stage}, "max_skipped_steps": 0,
    }  # fmt: skip
    (batch,) = models.batches_for("decoder", 8, 1)
    example = {key: value[:2] for key, value in batch.items()}
    armed: list[tuple[int, str]] = [(-1, "")]
    named = []
    with engine.initialize(models.decoder(layers=2), settings, loss_sum, example) as eng:
        rows = slice(eng.grid.coord().dp * 4, eng.grid.coord().dp * 4 + 4)
        own = {key: value[rows] for key, value in batch.items()}
        eng.train_batch(own)

        def spoil(grad: Tensor, name: str) -> Tensor:
            return grad * math.nan if armed[0] == (eng.grid.rank, name) else grad

        names = [name for name, _ in models.decoder(layers=2).named_parameters()]
        for name in names:
            parameter = eng.module.get_parameter(name)
            if parameter.requires_grad:  # one of another stage is a placeholder
                parameter.register_hook(partial(spoil, name=name))  # type: ignore[no-untyped-call]
        for rank in range(eng.grid.world_size):
            for name in names:
                armed[0], before = (rank, name), traces(eng)
                report = eng.train_batch(own)
                assert not report.skipped or traces(eng) == before, (rank, name)
                if report.skipped:
                    named.append(f"{rank} {name}: {report.nonfinite}")
    return named


@pytest.mark.long
@pytest.mark.parametrize(("grid", "stage"), [("dp2", 0), ("dp2", 2), ("dp2 x tp2", 1), ("dp2 x pp2", 1)])
def test_every_parameter_of_every_rank(run_ranks: RunRanks, grid: str, stage: int) -> None:
    size = math.prod(GRIDS[grid].values())
    first, *others = run_ranks(spoil_each, size, grid, stage, seconds=280)
    assert all(other == first for other in others), "all ranks skip the same steps"
    parameters = len(list(models.decoder(layers=2).parameters()))
    stages = GRIDS[grid].get("pipeline", 1)
    assert len(first) == parameters * size // stages, first  # a stage has half of them
    for line in first:
        where, _, said = line.partition(": ")
        assert where.partition(" ")[2] == said, line
    print(f"{len(first)} gradients spoiled on {grid}, ZeRO {stage}")


def test_progress_and_logs_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    reports = alone(Settings(monitor={"jsonl": str(log), "every": 1}), [1.0, math.nan])
    progress = ProgressLine(steps=9, every=9)
    for report in reports:
        progress.show(report)
    assert capsys.readouterr().out.rstrip().endswith("SKIPPED: the loss not finite on rank 0")
    assert [json.loads(line)["nonfinite"] for line in log.read_text().splitlines()] == [None, "the loss"]


class Settings:
    """What ``alone`` is told."""

    def __init__(self, **changes: Any) -> None:
        self.config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}} | changes


def alone(settings: Settings, factors: list[float], where: str = "all") -> list[engine.StepReport]:
    """A linear layer in one process; ``factors`` go over the loss, its weight or its value alone, a step each."""
    torch.manual_seed(1)
    reports: list[engine.StepReport] = []

    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        factor = factors[len(reports)]
        total, one = output.square().sum(), torch.ones(())
        if where == "weight":
            return total, one * factor
        if where == "steep":  # a finite loss whose gradient is not
            return (total - total.detach()) * factor, one
        return (total + factor if where == "value" else total * factor), one

    with engine.initialize(nn.Linear(3, 3), settings.config, loss) as eng:
        for _ in factors:
            reports.append(eng.train_batch(torch.ones(4, 3)))
    return reports


def test_what_is_not_finite_is_named_also_where_it_is_no_gradient() -> None:
    (lost,) = alone(Settings(), [math.nan])
    assert (lost.nonfinite, lost.nonfinite_ranks) == ("the loss", (0,))
    (steep,) = alone(Settings(), [3e38], "steep")
    assert (steep.nonfinite, steep.nonfinite_ranks) == ("weight", (0,))
    assert alone(Settings(), [math.nan], "weight")[0].nonfinite == "the weight"
    (report,) = alone(Settings(), [math.inf], "value")
    assert (report.skipped, report.nonfinite, report.loss) == (False, None, math.inf), "gradients are finite"


def test_a_run_of_skipped_steps_is_stopped_and_good_steps_begin_it_anew() -> None:
    few = Settings(max_skipped_steps=3)
    reports = alone(few, [math.nan, math.nan, 1.0, math.nan, math.nan, 1.0])
    assert [report.skipped for report in reports] == [True, True, False] * 2
    with pytest.raises(EngineError, match=r"^3 steps in a row .* because the loss on rank 0 was not finite after "):
        alone(few, [1.0, math.nan, math.nan, math.nan, 1.0])
    assert len(alone(Settings(max_skipped_steps=0), [math.nan] * 120)) == 120


def stopped() -> str:
    """Body of a rank: the error of a run that only skips; the other rank poisons it."""
    settings = Settings(train_batch_size=8, max_skipped_steps=2)
    with engine.initialize(nn.Linear(3, 3), settings.config, lambda output, batch: output.square().mean()) as eng:
        batch = torch.ones(4, 3) * (math.inf if eng.grid.rank else 1.0)
        try:
            for _ in range(5):
                eng.train_batch(batch)
        except EngineError as error:
            return f"{eng.skipped_steps} {error}"
    return "not stopped"


def test_all_ranks_are_stopped_by_the_same_error(run_ranks: RunRanks) -> None:
    one, other = run_ranks(stopped, 2)
    assert one == other and one.startswith("2 2 steps in a row were skipped, because the loss on rank 1 was")


class Steep(torch.autograd.Function):
    """Passes a value on; its gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan


def spoiled(alike: bool) -> tuple[list[tuple[str | None, tuple[int, ...]]], list[str]]:
    """Body of a rank: rank 1 spoils its gradient twice, and its loss once; what is reported, and what is logged."""
    said: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trine").addHandler(listener)
    kinds = ["", "gradient", "gradient", "", "loss", "gradient"]
    reports: list[engine.StepReport] = []

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        kind = kinds[len(reports)] if eng.grid.rank == 1 else ""
        total = output.square().mean()
        spoil: Any = Steep.apply
        return spoil(total) if kind == "gradient" else total * math.nan if kind == "loss" else total

    with engine.initialize(nn.Linear(3, 3), {"train_batch_size": 8}, loss) as eng:
        for _ in kinds:
            reports.append(eng.train_batch(torch.full((4, 3), 1.0 if alike else 1.0 + eng.grid.rank)))
    logging.getLogger("trine").removeHandler(listener)
    return [(report.nonfinite, report.nonfinite_ranks) for report in reports], said


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_are_named_and_warnings_come_once(run_ranks: RunRanks, alike: bool) -> None:
    (reports, said), (others, silent) = run_ranks(spoiled, 2, alike)
    assert reports == others and not silent
    # the sum has hidden the rank of the first one; from then to the next update gradients are looked at before it
    assert reports == [
        (None, ()), ("weight", ()), ("weight", (1,)), (None, ()), ("the loss", (1,)), ("weight", (1,))
    ]  # fmt: skip
    skipped = [line for line in said if "is skipped, because the gradient of 'weight' was not finite" in line]
    same = [line for line in said if line.startswith("all 2 data ranks were given the same batch")]
    assert (len(skipped), len(same), len(said)) == (1, int(alike), 1 + alike), said


@pytest.mark.parametrize("checks", [True, False])
def test_bf16_without_the_check_makes_the_step(checks: bool) -> None:
    settings = Settings(bf16={"enabled": True, "check_grad_overflow": checks})
    (report,) = alone(settings, [math.nan])
    assert (report.skipped, report.nonfinite, report.step) == ((True, "the loss", 0) if checks else (False, None, 1))


def test_the_three_calls_put_buffers_back_too() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    with engine.initialize(model, config) as eng:
        counts = []
        for factor in (1.0, math.nan, 1.0):
            before = eng.module.get_buffer("0.running_mean").clone()
            for _ in range(2):
                eng.backward(eng(torch.randn(4, 3) * factor).square().mean())
                report = eng.step()
            assert report is not None and report.skipped == torch.equal(before, eng.module.get_buffer("0.running_mean"))
            counts.append(int(eng.module.get_buffer("0.num_batches_tracked")))
    assert counts == [2, 2, 4]


def test_buffers_first_written_in_another_mode_are_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[0].eval()
    factor = 1.0
    config = {"train_batch_size": 4}
    with engine.initialize(model, config, lambda output, batch: output.square().mean() * factor) as eng:
        eng.train_batch(torch.randn(4, 3))
        model[0].train()
        factor = math.nan
        assert eng.train_batch(torch.randn(4, 3)).skipped
    assert torch.equal(eng.module.get_buffer("0.running_mean"), torch.zeros(3))


class Spread(nn.Linear):
    """A layer that counts in an expanded buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return super().forward(x)


def test_an_expanded_buffer_is_put_back() -> None:
    factor = 1.0
    config = {"train_batch_size": 4}
    with engine.initialize(Spread(), config, lambda output, batch: output.square().mean() * factor) as eng:
        eng.train_batch(torch.randn(4, 3))
        factor = math.nan
        assert eng.train_batch(torch.randn(4, 3)).skipped
        assert eng.module.get_buffer("calls").tolist() == [1.0, 1.0, 1.0]


class Late(nn.Linear):
    """A layer that registers a counter of its forwards in its ``first`` one, counted from 0."""

    count: Tensor

    def __init__(self, first: int) -> None:
        super().__init__(3, 3)
        self.forwards, self.first = 0, first

    def forward(self, x: Tensor) -> Tensor:
        if self.forwards == self.first:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if self.forwards >= self.first:
            self.count += 1
        self.forwards += 1
        return super().forward(x)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("others", [0, 1])
def test_buffers_that_a_forward_registers_are_put_back(first: int, others: int) -> None:
    late = Late(first)
    factor, counts = 1.0, list[int]()
    model = nn.Sequential(*[nn.BatchNorm1d(3)] * others, late)
    with engine.initialize(
        model, {"train_batch_size": 4}, lambda output, batch: output.square().mean() * factor
    ) as eng:
        for factor in (1.0, 1.0, math.nan, 1.0, math.nan):
            report = eng.train_batch(torch.randn(4, 3))
            assert report.skipped == math.isnan(factor)
            counts.append(int(late.count) if "count" in late._buffers else 0)
    begun = 1 - first
    assert counts == [begun, begun + 1, begun + 1, begun + 2, begun + 2]
