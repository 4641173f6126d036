"""Families of models over two, three and four context ranks: equal to one process, or refused with the reason.

``pytest -m long --write-figures`` keeps the table of docs/reference/model_types.md.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

import engine
from engine.errors import EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.parity.architectures import Architecture
from tests.parallel.context.own_models import OWN
from tests.parallel.context.test_context_training import FAMILIES, config_of
from tests.selection import wide
from tests.tables import Table

ROWS, STAGE = 4, 1
EVERY = {**FAMILIES, **OWN}
RANKS = (2, 3, 4)


class Run(NamedTuple):
    """Training of one rank, and its traffic of the last step."""

    record: TrainingRecord
    gathers: dict[str, int]
    """Gathers of a forward by name."""
    sent: int
    """Bytes that the rank sends over "cp" in a step."""


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Written at the end, if asked."""
    made = Table("context-families", "model")
    yield made
    if request.config.getoption("--write-figures"):
        made.write()


def settings(ranks: int) -> dict[str, Any]:
    return config_of({"data": 1, "context": ranks}, STAGE)


def trained(family: Architecture, ranks: int, world: World) -> Run:
    batches = family.batches(ROWS)
    with engine.initialize(family.build, settings(ranks), family.loss_fn, world=world) as eng:
        steps = []
        for batch in batches:
            context: Any = eng._parts.runtime.program if eng.built else None
            before, earlier = eng.sent, dict(context.sequences.gathers) if context else {}
            steps.append(eng.train_batch(batch))
        found = {name: (n - earlier.get(name, 0)) // ROWS for name, n in context.sequences.gathers.items()}
        sent = sum(row.bytes for row in eng.sent.since(before).rows() if row.axis == "cp")
        weights = eng.full_state_dict()
    record = TrainingRecord(tuple(r.loss for r in steps), tuple(r.grad_norm for r in steps), weights)
    return Run(record, {name: count for name, count in found.items() if count}, sent)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # MobileBERT has an empty layer
@pytest.mark.parametrize("name", [wide(name) for name in EVERY])
def test_family_is_equal_to_one_process_or_refused(name: str, table: Table) -> None:
    family = EVERY[name]
    options, alone = VerifyOptions(family.loss_fn), World(0, 1, 0, torch.device("cpu"))
    reference = train_alone(family.build, settings(1), family.batches(ROWS), options, alone)
    for ranks in RANKS:
        try:
            first, *others = run_thread_ranks(ranks, partial(trained, family, ranks))
        except EngineError as error:
            table.cells[name, f"cp{ranks}"] = f"refused: {error}" if ranks == RANKS[0] else "refused"
            continue
        found = Parity(first.record, reference)
        assert found.holds(), f"{name}, cp{ranks}: {found}"
        assert all(each.record.losses == first.record.losses for each in others)
        table.cells[name, f"cp{ranks}"] = f"{found.loss:.0e} / {found.norm:.0e} / {found.weight:.0e}"
        if ranks == RANKS[0]:
            shown = sorted(first.gathers.items(), key=lambda item: -item[1])
            table.cells[name, "gathers of a forward, cp2"] = ", ".join(f"{each} ({count})" for each, count in shown)
        table.cells[name, f"KB over cp{ranks}"] = f"{max(each.sent for each in (first, *others)) / 1e3:.1f}"
