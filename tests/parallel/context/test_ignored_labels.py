"""Sequences of which a rank has no label or no unmasked token, or no rank has one, train as in one process."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.context.cuts import contiguous, zigzag
from engine.verify import verify
from tests.parallel.context.recurrent_models import OWN
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.parallel.context.test_documents_apart import METHODS
from tests.selection import wide

LENGTH = 36
IGNORED = -100
Edit = Callable[[dict[str, Tensor], Tensor], None]
"""Changes a batch; the second argument has the positions of one rank."""


def _no_labels(batch: dict[str, Tensor], of_rank: Tensor) -> None:
    batch["labels"][:, of_rank] = IGNORED
    batch["labels"][:, (of_rank + 1) % LENGTH] = IGNORED  # predicted by the position before


def _no_labels_anywhere(batch: dict[str, Tensor], _: Tensor) -> None:
    batch["labels"][:] = IGNORED


def _no_labels_in_a_row(batch: dict[str, Tensor], _: Tensor) -> None:
    batch["labels"][1] = IGNORED


def _one_label(batch: dict[str, Tensor], of_rank: Tensor) -> None:
    kept = batch["labels"][:, of_rank[-1]].clone()
    batch["labels"][:] = IGNORED
    batch["labels"][:, of_rank[-1]] = kept


def _no_tokens(batch: dict[str, Tensor], of_rank: Tensor) -> None:
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, of_rank] = 0
    batch["labels"][batch["attention_mask"] == 0] = IGNORED


def _no_tokens_in_a_row(batch: dict[str, Tensor], _: Tensor) -> None:
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2] = 0


FORMS: dict[str, Edit] = {
    "no labels of a rank": _no_labels,
    "no labels": _no_labels_anywhere,
    "no labels in a row": _no_labels_in_a_row,
    "one label": _one_label,
    "no tokens of a rank": _no_tokens,
    "no tokens in a row": _no_tokens_in_a_row,
}


def _batches(form: str, own: np.ndarray[Any, Any]) -> list[dict[str, Tensor]]:
    """Returns three batches, of which the form changes the first and the second."""
    made = batches_of("plain", LENGTH)
    for batch in made[:2]:
        FORMS[form](batch, torch.as_tensor(own))
    return made


def _check(build: Any, batches: Any, ranks: int, method: str, loss_fn: Any = None) -> None:
    config = config_of({"data": 1, "context": {"size": ranks, "method": method}})
    found = verify(build, config, batches, loss_fn, threads=ranks)
    assert found is not None
    for name, (ours, theirs) in {
        "losses": (found.engine.losses, found.reference.losses),
        "norms": (found.engine.norms, found.reference.norms),
    }.items():
        assert [math.isnan(x) for x in ours] == [math.isnan(x) for x in theirs], (name, ours, theirs)
        assert ours == pytest.approx(theirs, rel=1e-5 if name == "norms" else 1e-6, nan_ok=True), name
    for name, weight in found.reference.weights.items():
        torch.testing.assert_close(found.engine.weights[name], weight, rtol=0, atol=1e-5, equal_nan=True, msg=name)


RANK_FORMS = ("no labels of a rank", "one label", "no tokens of a rank")
"""Forms that depend on the rank."""
CASES = [
    wide(form, attention, method, ranks, rank)
    for form, (attention, method), ranks, rank in product(
        FORMS, [*(("sdpa", method) for method in METHODS), ("eager", "auto")], (2, 4), (0, -1)
    )
    if rank == 0 or form in RANK_FORMS
]


@pytest.mark.parametrize(("form", "attention", "method", "ranks", "rank"), CASES)
def test_ignored_positions_train_as_one_process(form: str, attention: str, method: str, ranks: int, rank: int) -> None:
    own = zigzag(LENGTH, ranks).ranks[rank]
    _check(lambda: llama(attention), _batches(form, own), ranks, method)


def _summed(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits, labels = output.logits[:, :-1], batch["labels"][:, 1:]
    total = nn.functional.cross_entropy(
        logits.transpose(1, 2), labels.clamp(min=0), reduction="none"
    ) * (labels != IGNORED)  # fmt: skip
    return total.sum(), (labels != IGNORED).sum()


@pytest.mark.parametrize(
    ("form", "ranks"),
    [wide(form, ranks) for form in FORMS if "labels" in form and form != "no labels" for ranks in (2, 4)],
)
def test_ignored_positions_weigh_nothing_in_a_weighted_loss(form: str, ranks: int) -> None:
    own = zigzag(LENGTH, ranks).ranks[-1]
    _check(llama, _batches(form, own), ranks, "auto", _summed)


def _refusal(ranks: int, world: World) -> str:
    config = config_of({"data": 1, "context": ranks})
    with (
        pytest.raises(EngineError) as caught,
        engine.initialize(llama(layers=1), config, _summed, world=world) as eng,
    ):
        eng.train_batch(_batches("no labels", np.arange(1))[0])
    return str(caught.value)


@pytest.mark.parametrize("ranks", [wide(2), wide(4)])
def test_a_weighted_loss_without_labels_is_refused_as_in_one_process(ranks: int) -> None:
    alone = run_thread_ranks(1, partial(_refusal, 1))
    assert run_thread_ranks(ranks, partial(_refusal, ranks)) == alone * ranks
    assert "there is nothing to average" in alone[0]


@pytest.mark.parametrize("layer", ["stacked loop", "scan", "causal conv"])
@pytest.mark.parametrize(
    ("form", "ranks"), [wide(form, ranks) for form in FORMS if "label" in form for ranks in (2, 4)]
)
def test_ignored_positions_train_as_one_process_with_a_state(layer: str, form: str, ranks: int) -> None:
    cut = zigzag if layer == "causal conv" else contiguous
    made = _batches(form, cut(LENGTH, ranks).ranks[-1])
    batches = [batch | {"position_ids": torch.arange(LENGTH).expand(4, -1).contiguous()} for batch in made]
    _check(OWN[layer], batches, ranks, "auto")
