"""Every pipeline schedule gives the losses, norms and weights of one process, with every ZeRO stage and tp2.

By default a core; ``-m long`` runs every kind on p = 2, 4 and m = 4, 6, 8 and every kind with every ZeRO stage and tp2.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn

from engine.models.decoder import loss_sum
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone, train_on_grid, verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.tables import Table

RunRanks = Callable[..., list[Any]]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder tied": partial(models.decoder, tied=True, layers=8),
    "decoder dropout": partial(models.decoder, dropout=0.2, layers=8),
    "gpt2": partial(models.gpt2, layers=8, dropout=0.0),
    "nano": partial(models.nano, layers=8),
    "crossing": partial(models.crossing, layers=8),
    "t5": partial(models.t5, layers=4),
}
KINDS: dict[str, int] = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "looped-bfs": 2, "zb-h1": 1, "zb-h1 v2": 2, "zb-v": 2, "dualpipe-v": 2,
}  # fmt: skip
"""Kinds, with their stages on each rank."""


class Case(NamedTuple):
    """One way to train."""

    kind: str
    microbatches: int
    zero: int = 0
    reduce: str = "step"
    recompute: str = "none"

    def allowed(self, ranks: int) -> bool:
        """Whether the kind allows as few microbatches."""
        return self.kind != "dualpipe-v" or self.microbatches >= 2 * ranks

    def settings(self, sizes: dict[str, int]) -> dict[str, Any]:
        """The configuration; two rows a microbatch."""
        data = sizes.get("data", 1)
        return config_for(
            data,
            self.zero,
            train_batch_size=2 * self.microbatches * data,
            train_micro_batch_size_per_gpu=2,
            zero_optimization={"stage": self.zero, "reduce": self.reduce, "reduce_bucket_size": 6000},
            parallel={"data": 1} | sizes | {"schedule": self.kind.split()[0], "virtual_stages": KINDS[self.kind]},
            activation_checkpointing={"mode": self.recompute},
        )


def train_all(name: str, sizes: dict[str, int], cases: Sequence[Case]) -> list[tuple[TrainingRecord, TrainingRecord]]:
    """Body of a rank: every case on the grid, and once in one process for each number of microbatches."""
    wishes = VerifyOptions(loss_sum if name.startswith("decoder") else None)
    rows = {case.microbatches: 2 * case.microbatches * sizes.get("data", 1) for case in cases}
    batches = {count: models.batches_for(name.split()[0], size) for count, size in rows.items()}
    runs = [train_on_grid(MODELS[name], case.settings(sizes), batches[case.microbatches], wishes) for case in cases]
    if not runs[0].weights:
        return []
    alone = {
        case.microbatches: train_alone(MODELS[name], case.settings(sizes), batches[case.microbatches], wishes)
        for case in {case.microbatches: case for case in cases}.values()
    }
    return [(run, alone[case.microbatches]) for run, case in zip(runs, cases, strict=True)]


def check(run_ranks: RunRanks, name: str, sizes: dict[str, int], cases: Sequence[Case]) -> dict[Case, Parity]:
    """All cases hold."""
    cases = [case for case in cases if case.allowed(sizes["pipeline"])]
    pairs = run_ranks(train_all, prod(sizes.values()), name, sizes, cases, seconds=900.0)[0]
    results = {case: Parity(*pair) for case, pair in zip(cases, pairs, strict=True)}
    for case, result in results.items():
        assert result.holds(), f"{name} on {sizes}, {case}: {result}"
        assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"
    return results


def note(table: Table, column: str, results: dict[Case, Parity]) -> None:
    """The worst deviation of each kind."""
    for case, result in results.items():
        before = float(table.cells.get((case.kind, column), 0))
        table.cells[case.kind, column] = f"{max(before, result.loss):.0e}"


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5"])
def test_every_kind_on_two_ranks(run_ranks: RunRanks, schedules_table: Table, name: str) -> None:
    results = check(run_ranks, name, {"pipeline": 2}, [Case(kind, 4) for kind in KINDS])
    note(schedules_table, "p2 m4", results)


@pytest.mark.long
def test_every_kind_on_four_ranks(run_ranks: RunRanks, schedules_table: Table) -> None:
    results = check(run_ranks, "crossing", {"pipeline": 4}, [Case(kind, 8) for kind in KINDS])
    note(schedules_table, "p4 m8", results)


@pytest.mark.long
def test_every_kind_with_a_zero_stage(run_ranks: RunRanks, schedules_table: Table) -> None:
    ways = [(3, "microbatch", "full"), (2, "microbatch", "none"), (1, "step", "full"), (3, "step", "none")]
    cases = [Case(kind, 4, *ways[number % 4]) for number, kind in enumerate(KINDS)]
    note(schedules_table, "p2 dp2, ZeRO", check(run_ranks, "decoder tied", {"data": 2, "pipeline": 2}, cases))


@pytest.mark.long
def test_every_kind_with_two_tensor_ranks(run_ranks: RunRanks, schedules_table: Table) -> None:
    results = check(run_ranks, "gpt2", {"tensor": 2, "pipeline": 2}, [Case(kind, 4) for kind in KINDS])
    note(schedules_table, "p2 tp2", results)


MIXED = """\
0F0 0F1 2F0 2I0 2F1 2B1 2W0 0I0 0B1 0W0
1F0 1F1 1I0 1B1 1W0
"""
"""Whole and split backwards in every stage, and weight gradients that wait longer than the last whole backward."""


def train_by_file(path: str, zero: int, reduce: str) -> Parity | None:
    """Body of a rank."""
    case = Case("gpipe", 2, zero, reduce)
    config = case.settings({"pipeline": 2}) | {"parallel": {"pipeline": 2, "schedule": path}}
    return verify(MODELS["decoder tied"], config, models.batches_for("decoder", 4), loss_sum)


@pytest.mark.parametrize(("zero", "reduce"), [(1, "step"), (2, "microbatch")])
def test_a_schedule_from_a_file(run_ranks: RunRanks, tmp_path: Path, zero: int, reduce: str) -> None:
    path = tmp_path / "mixed.txt"
    path.write_text(MIXED)
    result = run_ranks(train_by_file, 2, str(path), zero, reduce)[0]
    assert result.holds(), str(result)


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [4, 6, 8])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_kinds_by_ranks_and_microbatches(
    run_ranks: RunRanks, schedules_table: Table, name: str, ranks: int, microbatches: int
) -> None:
    results = check(run_ranks, name, {"pipeline": ranks}, [Case(kind, microbatches) for kind in KINDS])
    note(schedules_table, f"p{ranks} m{microbatches}", results)


WAYS = [(0, "step"), (1, "step"), (2, "step"), (2, "microbatch"), (3, "step"), (3, "microbatch")]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["decoder tied", "nano"])
def test_kinds_with_every_zero_stage(run_ranks: RunRanks, schedules_table: Table, name: str, kind: str) -> None:
    cases = [Case(kind, 4, *way, recompute) for way in WAYS for recompute in ("none", "full")]
    results = check(run_ranks, name, {"data": 2, "pipeline": 2}, cases)
    note(schedules_table, "p2 dp2, ZeRO", results)


@pytest.mark.long
def test_kinds_on_three_axes(run_ranks: RunRanks, schedules_table: Table) -> None:
    sizes = {"data": 2, "tensor": 2, "pipeline": 2}
    cases = [Case(kind, 4, zero) for kind in KINDS for zero in (1, 3)]
    note(schedules_table, "p2 dp2 tp2, ZeRO 1 and 3", check(run_ranks, "gpt2", sizes, cases))
