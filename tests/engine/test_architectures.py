"""Models as they are, cut into pipeline stages, train as in one process; the table of the README says which and how.

Many models share one launch of ranks. What a model cannot is a sentence, the same on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.batch import take_rows
from engine.verify import Parity, Run, Wishes, train_alone
from tests.engine.architectures import ALL, HUGGING_FACE, OWN, REFUSED, ROWS, WIDE, find
from tests.readme import Table

RunRanks = Callable[..., list[Any]]

MICRO = 2


def settings(pp: int, **changes: Any) -> dict[str, Any]:
    """Four microbatches of two rows, clipping active, three steps with a rate that moves."""
    parallel = {"data": 1, "pipeline": pp} | changes.pop("parallel", {})
    return {
        "train_batch_size": ROWS * parallel["data"],
        "train_micro_batch_size_per_gpu": MICRO,
        "parallel": parallel,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.05,
    } | changes


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of one model, and what its stages receive for one microbatch."""

    run: Run
    values: tuple[int, ...]
    """Values received by each stage but the first."""
    bytes: tuple[int, ...]
    """The same in bytes."""


def train(name: str, config: Mapping[str, Any]) -> Trained | str:
    """Body of a rank for one model: what came out, or why the model cannot be cut."""
    architecture = find(name)
    batches = architecture.batches(config["train_batch_size"])
    example = take_rows(batches[0], 0, MICRO)
    try:
        eng = engine.initialize(architecture.build, dict(config), architecture.loss_fn, example)
    except engine.PlanError as error:
        return str(error)
    with eng:
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        reports = [eng.train_batch(take_rows(batch, first * rows, rows)) for batch in batches]
        run = Run(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), eng.full_state_dict())
        received, values = [], eng.plan.timeline.values if eng.plan.timeline else ()
        for plan in eng.plan.cut.stages[1:] if eng.plan.cut else ():
            received.append([values[number].bytes for number in plan.receives])
    return Trained(run, tuple(map(len, received)), tuple(map(sum, received)))


def train_each(names: Sequence[str], config: Mapping[str, Any]) -> list[Trained | str]:
    """Body of a rank: one model after another."""
    return [train(name, config) for name in names]


def train_each_alone(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, Run]:
    """Body of a rank: this rank's share of the models, in one process each."""
    import torch.distributed as dist

    found = {}
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        architecture = find(name)
        batches = architecture.batches(config["train_batch_size"])
        found[name] = train_alone(architecture.build, dict(config), batches, Wishes(architecture.loss_fn))
    return found


def train_both(names: Sequence[str], config: Mapping[str, Any]) -> tuple[list[Trained | str], dict[str, Run]]:
    """Body of a rank."""
    return train_each(names, config), train_each_alone(names, config)


@dataclass(frozen=True, slots=True)
class Compared:
    """A trained model that has been found equal."""

    trained: Trained
    parity: Parity


def compare(
    run_ranks: RunRanks, names: Sequence[str], config: Mapping[str, Any], near: float | None = None
) -> dict[str, Compared | str]:
    """Train on the grid and alone; by name what came out, all of it found equal, or why a model cannot.

    ``near``: a bound for losses that takes the place of the promise, where only that can be asked.
    """
    ranks = config["parallel"]
    world = ranks["data"] * ranks.get("tensor", 1) * ranks["pipeline"]
    found = run_ranks(train_both, world, list(names), dict(config), seconds=300.0)
    alone = {name: run for _, share in found for name, run in share.items()}
    results: dict[str, Compared | str] = {}
    for index, name in enumerate(names):
        result = found[0][0][index]
        if isinstance(result, str):
            assert [trained[index] for trained, _ in found] == [result] * world, "all ranks say the same"
            results[name] = result
            continue
        parity = Parity(result.run, alone[name])
        assert parity.holds() if near is None else parity.loss <= near, f"{name}: {parity}"
        assert min(alone[name].norms) > config["gradient_clipping"], f"{name}: clipping must be active"
        results[name] = Compared(result, parity)
    return results


WHY: Mapping[str, str] = {
    "GRU": "but its forward calls only 0 blocks",
    "glue that reads content": "reads the content of a tensor on the host (__bool__) between units",
}


def check(results: Mapping[str, Compared | str], pp: int) -> None:
    """Those that can be cut have been trained, all others say why."""
    for name, result in results.items():
        if name in REFUSED:
            assert isinstance(result, str) and WHY[name] in result, f"{name}: {result}"
        else:
            assert isinstance(result, Compared), f"{name}: {result}"
            received = result.trained.values
            assert len(received) == pp - 1 and all(received), "every stage but the first receives something"


CORE = {2: (*HUGGING_FACE, *OWN, *REFUSED), 4: ("T5", "Mixtral", "ALBERT", "U-Net", "skips and gates")}


@pytest.mark.parametrize("pp", CORE)
def test_models_as_they_are_train_over_stages_as_in_one_process(run_ranks: RunRanks, pp: int) -> None:
    check(compare(run_ranks, CORE[pp], settings(pp)), pp)


@pytest.mark.long
def test_the_table_of_models(run_ranks: RunRanks, architectures_table: Table) -> None:
    names = [*HUGGING_FACE, *WIDE, *OWN, *REFUSED]
    by_pp = {pp: compare(run_ranks, names, settings(pp)) for pp in (2, 4)}
    virtual = {
        f"pp2, {kind}": compare(run_ranks, names, settings(2, parallel={"schedule": kind, "virtual_stages": 2}))
        for kind in ("interleaved", "zb-v")
    }
    cells = architectures_table.cells
    for name in names:
        special = ALL[name].special
        for pp, results in by_pp.items():
            check({name: results[name]}, pp)
            result = results[name]
            cells[name, f"pp{pp}"] = "refused" if isinstance(result, str) else f"{result.parity.loss:.0e}"
            special = special or str(result).replace(f"{Path.cwd()}/", "")
        for column, results in virtual.items():
            check({name: results[name]}, 4)
            result = results[name]
            cells[name, column] = "refused" if isinstance(result, str) else f"{result.parity.loss:.0e}"
        for pp, results in by_pp.items():
            result = results[name]
            numbers = "" if isinstance(result, str) else ", ".join(map(str, result.trained.values))
            cells[name, f"values, pp{pp}"] = numbers
        widest = by_pp[4][name]
        cells[name, "bytes, pp4"] = "" if isinstance(widest, str) else ", ".join(map(str, widest.trained.bytes))
        cells[name, "what is special"] = special
