"""Every model type of transformers that builds small: over two ranks equal to one process, or refused by a sentence.

``pytest -m long --write-figures`` keeps the table of docs/reference/model_types.md.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import engine
from engine.errors import first_line
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.parity.transformers_types import ModelType, build, model_types, text
from tests.models import take_rows
from tests.ranks import RankError
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
GRIDS: Mapping[str, Mapping[str, int]] = {"tp2": {"data": 1, "tensor": 2}, "pp2": {"data": 1, "pipeline": 2}}
CONFIG: Mapping[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
    "gradient_clipping": 0.01,
}
MOST_SECONDS = 60.0
"""Of processor time until a model is placed, its search included."""
AMPLIFIED = 10
"""Most times the deviation of one process from itself."""
TOGETHER = 8
"""Model types in one launch of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one model type fared on one grid."""

    name: str
    text: str
    """Deviation of a loss, or why not."""
    equal: bool = False
    refused: bool = False
    seconds: float = 0.0
    """Processor time of ``engine.initialize``."""


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Written at the end, if asked."""
    made = Table("model-types", "type")
    yield made
    if request.config.getoption("--write-figures"):
        made.write()


def quiet() -> None:
    """Without transformers' remarks on small configurations."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def runs(kind: ModelType) -> str:
    """Why a type cannot be tried; empty if it can."""
    try:
        loss = build(kind)(**text(2, 1)[0]).loss
    except Exception as error:  # configurations and models that are not ours
        return f"{type(error).__name__}: {first_line(error)}"
    return "" if bool(torch.isfinite(loss)) else "its loss is not finite"


def runnable(names: Sequence[str]) -> dict[str, str]:
    """Body of a rank: why types cannot be tried, by name."""
    quiet()
    return {str(kind): why for kind in model_types() if str(kind) in names and (why := runs(kind))}


def train(names: Sequence[str], grid: str) -> list[Outcome]:
    """Body of a rank: one type after the other."""
    quiet()
    kinds = {str(kind): kind for kind in model_types()}
    return [train_one(kinds[name], {**CONFIG, "parallel": GRIDS[grid]}) for name in names]


def train_one(kind: ModelType, config: Mapping[str, Any]) -> Outcome:
    """Train on the grid, and alone on rank 0, which has the full weights and tells the others."""
    batches, began = text(8), time.process_time()
    try:
        eng = engine.initialize(partial(build, kind), dict(config), example_batch=take_rows(batches[0], 0, 2))
    except engine.EngineError as error:
        return Outcome(name=str(kind), text=str(error), refused=True, seconds=time.process_time() - began)
    seconds = time.process_time() - began
    with eng:
        reports = [eng.train_batch(batch) for batch in batches]
        losses, norms = tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports)
        record = TrainingRecord(losses, norms, eng.full_state_dict())
    told: list[Outcome | None] = [None]
    if dist.get_rank() == 0:
        equal, said = judged(kind, config, batches, record)
        told = [Outcome(name=str(kind), text=said, equal=equal, seconds=seconds)]
    dist.broadcast_object_list(told)
    (outcome,) = told
    assert outcome is not None
    return outcome


def judged(kind: ModelType, config: Mapping[str, Any], batches: list[Any], found: TrainingRecord) -> tuple[bool, str]:
    """Whether a run is equal to one process, and by how much a loss deviates.

    A model may amplify rounding errors beyond the promise. Then the measure is what one process deviates from itself
    when its weights are rounded otherwise.
    """
    alone = train_alone(partial(build, kind), dict(config), batches, VerifyOptions())
    parity = Parity(found, alone)
    if min(alone.norms) <= config["gradient_clipping"]:
        return False, f"norms of {alone.norms} are not clipped"
    if parity.holds():
        return True, f"{parity.loss:.0e}"
    again = train_alone(partial(rounded_otherwise, kind), dict(config), batches, VerifyOptions())
    own = Parity(again, alone)
    equal = parity.holds(AMPLIFIED * own.loss, AMPLIFIED * own.norm, AMPLIFIED * own.weight)
    return equal, f"{parity.loss:.0e} (rounding alone {own.loss:.0e})" if equal else f"{parity}; rounding alone: {own}"


def rounded_otherwise(kind: ModelType) -> nn.Module:
    """The model with weights that differ in their last bits."""
    model, generator = build(kind), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn(parameter.shape, generator=generator))
    return model


def all_outcomes(run_ranks: RunRanks, names: Sequence[str], grid: str) -> Iterator[Outcome]:
    """Of all types; one that breaks its launch is tried again alone, to be named."""
    for start in range(0, len(names), TOGETHER):
        some = names[start : start + TOGETHER]
        try:
            yield from run_ranks(train, 2, some, grid, seconds=900.0)[0]
            continue
        except RankError:
            pass
        for name in some:
            try:
                yield from run_ranks(train, 2, [name], grid, seconds=300.0)[0]
            except RankError as error:
                yield Outcome(name=name, text=str(error)[-2000:])


def test_rules_of_sizes_fit_most_types(run_ranks: RunRanks) -> None:
    names = [str(kind) for kind in model_types()]
    (skipped,) = run_ranks(runnable, 1, names[::16])
    assert len(skipped) < len(names[::16]) / 3, skipped


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("grid", GRIDS)
def test_every_type_is_equal_or_refused(run_ranks: RunRanks, table: Table, grid: str) -> None:
    names = [str(kind) for kind in model_types()]
    (skipped,) = run_ranks(runnable, 1, names, seconds=600.0)
    tried = [name for name in names if name not in skipped]
    assert len(tried) > 200, "most types are tried"
    found = list(all_outcomes(run_ranks, tried, grid))
    table.cells |= {(name, grid): "not tried" for name in skipped}
    table.cells |= {(one.name, grid): f"refused: {one.text}" if one.refused else one.text for one in found}
    wrong = [f"{one.name}: {one.text}" for one in found if not (one.equal or one.refused)]
    slow = [f"{one.name}: {one.seconds:.0f} s" for one in found if one.seconds > MOST_SECONDS]
    assert not wrong and not slow, "\n".join([*wrong, *slow])
    assert sum(one.equal for one in found) > 0.8 * len(tried), "most types train"
