"""One rank of a job searches; the others make the same plan of what it has found."""

from typing import Any

import pytest

from engine.build import assemble
from engine.planning.found_styles import FoundStyles
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity_axes import settings


def test_one_rank_searches_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[FoundStyles] = []

    def search(*given: Any) -> FoundStyles:
        searched.append(find(*given))
        return searched[-1]

    find = assemble.search_model
    monkeypatch.setattr("engine.engine_parts.search_model", search)
    config, batches = settings("dp2 x tp2", (1, "1f1b", "none")), models.batches_for("llama", 16, 1)
    parity = verify(lambda: models.llama(layers=2), config, batches, threads=4)
    assert parity is not None and parity.holds(), str(parity)
    (found,) = searched
    assert FoundStyles.from_bytes(found.to_bytes()) == found and found.patterns and found.reasons


def test_what_was_received_makes_the_plan_that_was_found() -> None:
    model = models.llama(layers=2)
    styles = {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.gate_proj": "column"}
    found = FoundStyles(patterns=styles | {"model.layers.*.mlp.down_proj": "row"}, reasons=(), notes=("a note",))
    plan = FoundStyles.from_bytes(found.to_bytes()).plan(model, 2)
    assert plan == found.plan(model, 2)
    assert plan.notes == ("a note",) and "model.layers.1.mlp.down_proj.weight" in plan.parameters
