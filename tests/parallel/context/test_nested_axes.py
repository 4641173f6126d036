"""Context ranks with tensor ranks and pipeline stages train unchanged models as one process does."""

from functools import partial
from typing import Any

import pytest

import engine
from engine.errors import EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.verify import verify
from tests.parallel.context.test_context_training import FAMILIES, NO_SEQUENCE, batches_of, config_of, llama
from tests.selection import wide

GRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "cp2 x tp2": ({"context": 2, "tensor": 2}, 1),
    "cp2 x tp2, sequence parallel": ({"context": 2, "tensor": 2, "sequence_parallel": True}, 2),
    "cp2 x pp2": ({"context": 2, "pipeline": 2}, 1),
    "cp2 x tp2 x pp2": ({"context": 2, "tensor": 2, "pipeline": 2}, 1),
    "dp2 x cp2 x pp2, ZeRO 3": ({"data": 2, "context": 2, "pipeline": 2}, 3),
}
FIRST = (("Llama", "cp2 x tp2, sequence parallel"),)


def _check(build: Any, batches: Any, grid: str, loss_fn: Any = None, **more: Any) -> None:
    sizes, stage = GRIDS[grid]
    parallel = {"data": 1, **sizes}
    ranks = parallel["data"] * parallel["context"] * parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    result = verify(build, config_of(parallel, stage, **more), batches, loss_fn, threads=ranks)
    assert result is not None and result.holds(), str(result)


def _keys_sent(sizes: dict[str, Any], world: Any) -> int:
    import engine

    with engine.initialize(llama(), config_of({"data": 1, **sizes}), world=world) as eng:
        eng.train_batch(batches_of("plain")[0])
        return sum(row.bytes for row in eng.sent.rows() if row.axis == "cp" and row.label.startswith("key"))


@pytest.mark.long
@pytest.mark.parametrize("grid", ["cp2 x tp2", wide("cp2 x tp2, sequence parallel")])
def test_tensor_ranks_of_a_context_rank_send_keys_of_their_heads(grid: str) -> None:
    alone, *_ = run_thread_ranks(2, partial(_keys_sent, {"context": 2}))
    assert alone > 0
    assert run_thread_ranks(4, partial(_keys_sent, GRIDS[grid][0])) == [alone // 2] * 4


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a model without a type of token
@pytest.mark.parametrize(
    ("family", "grid"),
    [
        (name, grid) if (name, grid) in FIRST else wide(name, grid)
        for name in FAMILIES
        if name not in NO_SEQUENCE
        for grid in GRIDS
    ],
)
def test_families_train_as_one_process_on_context_and_other_axes(family: str, grid: str) -> None:
    found = FAMILIES[family]
    _check(found.build, found.batches(4), grid, found.loss_fn)


@pytest.mark.parametrize("grid", [wide(grid) for grid in GRIDS])
@pytest.mark.parametrize("form", ["left", "right", "packed", "a rank without labels"])
def test_masks_and_positions_stay_as_they_are_on_every_grid(form: str, grid: str) -> None:
    _check(llama, batches_of(form), grid)


@pytest.mark.parametrize(
    "parallel",
    [
        wide({"pipeline": 2, "schedule": schedule, **more})
        for schedule, more in (
            ("gpipe", {}), ("interleaved", {"virtual_stages": 2}), ("zb-h1", {}), ("zb-v", {}), ("dualpipe-v", {}),
        )
    ],
    ids=str,
)  # fmt: skip
def test_schedules_compose_with_context_ranks(parallel: dict[str, Any]) -> None:
    config = config_of({"data": 1, "context": 2, **parallel})
    result = verify(lambda: llama(layers=4), config, batches_of("plain"), None, threads=4)
    assert result is not None and result.holds(), str(result)


def _refused(world: Any) -> str:
    import engine

    parallel = {"data": 1, "context": 2, "tensor": 2, "sequence_parallel": True}
    with pytest.raises(EngineError) as found, engine.initialize(llama(), config_of(parallel), world=world) as eng:
        eng.train_batch(batches_of("plain", 37)[0])
    return str(found.value)


def test_positions_that_tensor_ranks_cannot_shard_are_refused_on_all_ranks() -> None:
    first, *others = run_thread_ranks(4, _refused)
    assert all(each == first for each in others), (first, others)
    assert "a sequence of 37 positions" in first and "pad it to a multiple of 2" in first, first


def _notes(world: Any) -> tuple[str, ...]:
    sizes, _ = GRIDS["cp2 x tp2"]
    with engine.initialize(llama(layers=1), config_of({"data": 1, **sizes}), world=world) as eng:
        eng.train_batch(batches_of("plain", 36)[0])
        return tuple(note for note in eng.plan.notes if "parallel.context" in note)


def test_no_layer_of_tensor_ranks_gathers_the_sequence() -> None:
    for notes in run_thread_ranks(4, _notes):
        assert len(notes) == 1 and "1 attention by" in notes[0]
