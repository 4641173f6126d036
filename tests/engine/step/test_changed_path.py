"""A forward that takes another way than the one that was cut: seen in time, or called by name; no rank hangs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from tests import models
from tests.engine.parity.architectures import find
from tests.engine.parity.launches import settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


class Trainer(nn.Module):
    """Another way in training than in evaluation: blocks that only one of them calls, glue that only one has."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, width), nn.Linear(width, models.VOCABULARY)
        self.blocks = nn.ModuleList(models.NanoBlock(width, 2) for _ in range(4))
        self.gate = nn.Parameter(torch.ones(width))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = x0 = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if self.training or i != 1:
                x = block(x)
        x = x * self.gate if self.training else x + x0
        logits = self.head(x)
        if not self.training:
            logits = logits.log_softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) if targets is not None else None
        return {"loss": loss, "logits": logits}


def evaluated(pp: int) -> tuple[list[float], Tensor | None]:
    """Losses of training and of evaluation in turns, of two lengths, and an output."""
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 3)]
    losses = []
    with engine.initialize(Trainer, settings(pp), example_batch=tuple(t[:2] for t in batches[0])) as eng:
        for batch in batches:
            losses.append(eng.train_batch(batch).loss)
            losses.append(eng.eval_batch(batches[0]).loss)
            losses.append(eng.eval_batch(tuple(t[:, :5] for t in batches[0])).loss)
        _, output = eng.eval_batch(batches[0], return_output=True)
    return losses, None if output is None else output["logits"]


def test_evaluation_may_take_another_path_than_training(run_ranks: RunRanks) -> None:
    losses, logits = run_ranks(evaluated, 1, 1)[0]
    ours = run_ranks(evaluated, 2, 2)
    for found, _ in ours:
        assert found == pytest.approx(losses, rel=1e-6)
    assert logits is not None and torch.allclose(ours[0][1], logits, atol=1e-6) and ours[1][1] is None


class Elsewhere:
    """What a forward may look at and nobody can watch."""

    gate = False
    factor = 1.0


@contextmanager
def elsewhere(**changes: Any) -> Iterator[None]:
    """Change it for a while."""
    before = {name: getattr(Elsewhere, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(Elsewhere, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(Elsewhere, name, value)


class Gated(nn.Module):
    """``gate`` adds the embedding at the end, ``skip`` leaves a block out; ``residual`` puts glue between blocks."""

    def __init__(self, residual: bool, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed, self.head = nn.Embedding(models.VOCABULARY, width), nn.Linear(width, models.VOCABULARY)
        self.blocks = nn.ModuleList(models.NanoBlock(width, 2) for _ in range(4))
        self.residual, self.gate, self.skip, self.calls, self.depth = residual, False, False, 0, 4

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        x = x0 = self.embed(ids)
        for i, block in enumerate(self.blocks[: self.depth]):
            if self.skip and i == 1:
                continue
            x = x + block(x) if self.residual else block(x)
        if self.gate or Elsewhere.gate:
            x = x + x0
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) * Elsewhere.factor


SWITCHED: list[dict[str, Any]] = [{}, {"gate": True}, {"gate": False, "skip": True}, {"depth": 3}, {"skip": False}, {}]


def switched(pp: int, residual: bool) -> tuple[list[float], list[float], int]:
    """Losses while attributes change between steps, those of evaluations, and how often the model was looked at."""
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, len(SWITCHED))]
    with engine.initialize(Gated(residual), settings(pp), example_batch=tuple(t[:2] for t in batches[0])) as eng:
        losses, evaluated = [], []
        for batch, changes in zip(batches, SWITCHED, strict=True):
            for name, value in changes.items():
                setattr(eng.module, name, value)
            losses.append(eng.train_batch(batch).loss)
            evaluated.append(eng.eval_batch(batches[0]).loss)
        model: Any = eng.module
        before = model.calls
        eng.train_batch(batches[0])
        return losses, evaluated, model.calls - before


@pytest.mark.parametrize("residual", [wide(False, id="plain"), pytest.param(True, id="glue")])
def test_attributes_may_change_between_steps(run_ranks: RunRanks, residual: bool) -> None:
    losses, evaluated, _ = run_ranks(switched, 1, 1, residual)[0]
    assert len(set(losses)) == len(losses)
    for ours, evaluations, runs in run_ranks(switched, 2, 2, residual):
        assert ours == pytest.approx(losses, rel=1e-6)
        assert evaluations == pytest.approx(evaluated, rel=1e-6)
        assert runs == 4, "a counter that changes in every forward is no reason to look again"


def unseen(residual: bool, evaluate: bool) -> list[str]:
    """What is said in a step whose path was changed from outside, and that the next step is well."""
    batches = [(t[:, :-1], t[:, 1:]) for t in models.token_batches(8, 2)]
    with engine.initialize(Gated(residual), settings(2), example_batch=tuple(t[:2] for t in batches[0])) as eng:
        step = eng.eval_batch if evaluate else eng.train_batch
        step(batches[0])  # in the next one the counter is found to have no effect
        said = [f"{step(batches[0]).loss > 0}"]
        with elsewhere(gate=True), pytest.raises(engine.EngineError) as caught:
            step(batches[1])
        said.append(str(caught.value))
        return [*said, f"{step(batches[1]).loss > 0}", str(eng.step_count), str(eng.skipped_steps)]


@pytest.mark.parametrize("evaluate", [pytest.param(False, id="train"), wide(True, id="evaluate")])
def test_a_path_that_changes_unseen_is_called_by_name_on_all_ranks(run_ranks: RunRanks, evaluate: bool) -> None:
    said = run_ranks(unseen, 2, False, evaluate)
    assert said[0] == said[1]
    first, message, again, made, skipped = said[0]
    assert (first, again, made, skipped) == ("True", "True", "0" if evaluate else "3", "0")
    assert message.startswith(
        f"the loss is NaN, because the forward has changed since it was traced: it reaches add at {__file__}:"
    )
    assert "where it reached a call of unit 'head' before; choose its path only by shapes" in message


def not_a_number(parallel: dict[str, int]) -> tuple[bool, int, float]:
    """A loss that is nan for its own reasons."""
    batches = models.batches_for("decoder", 8, 2)
    loss_fn = nan_at_will
    config = settings(2, parallel=parallel)
    example = {key: value[:2] for key, value in batches[0].items()}
    with engine.initialize(lambda: models.decoder(layers=4), config, loss_fn, example) as eng:
        eng.train_batch(batches[0])
        with elsewhere(factor=float("nan")):
            report = eng.train_batch(batches[1])
            eng.eval_batch(batches[1])
        return report.skipped, eng.skipped_steps, eng.train_batch(batches[1]).loss


def nan_at_will(output: Any, batch: Any) -> Any:
    """The mean cross entropy, times what is set elsewhere."""
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten()) * Elsewhere.factor


@pytest.mark.parametrize("parallel", [pytest.param({}, id="pp2"), wide({"tensor": 2}, id="tp2 x pp2")])
def test_a_loss_that_is_not_a_number_for_its_own_reasons_skips_the_step(
    run_ranks: RunRanks, parallel: dict[str, int]
) -> None:
    for skipped, count, loss in run_ranks(not_a_number, 4 if parallel else 2, parallel):
        assert skipped and count == 1 and loss > 0


class Twice(Gated):
    """A layer that the end calls always, and the start for long inputs too."""

    def __init__(self) -> None:
        super().__init__(residual=False)
        self.extra = nn.Linear(16, 16)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.tanh(self.extra(x)) if ids.shape[1] > 8 else x
        for block in self.blocks:
            x = block(x)
        logits = self.head(torch.tanh(self.extra(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trained_elsewhere() -> list[str]:
    """Under a V the first and the last stage share a rank."""
    tokens = models.token_batches(8, 1)[0]
    long = tokens[:, :-1], tokens[:, 1:]
    short = tuple(t[:, :6] for t in long)
    config = settings(2, parallel={"schedule": "zb-v"}) | {"zero_optimization": {"stage": 2, "reduce": "microbatch"}}
    with engine.initialize(Twice, config, example_batch=tuple(t[:2] for t in short)) as eng:
        eng.train_batch(short)
        with pytest.raises(engine.PlanError) as caught:
            eng.train_batch(long)
        return [str(caught.value), f"{eng.eval_batch(long).loss > 0}", f"{eng.train_batch(short).skipped}"]


def test_a_stage_does_not_train_what_only_another_stage_of_its_rank_was_seen_to_use(run_ranks: RunRanks) -> None:
    said = run_ranks(trained_elsewhere, 2)
    assert said[0] == said[1]
    message, evaluated, skipped = said[0]
    assert message.startswith("this input makes stage 0 need parameter 'extra.bias', which is on another stage; pass")
    assert (evaluated, skipped) == ("True", "False")


def diverged(names: Sequence[str]) -> list[tuple[float, bool]]:
    """Of models whose weights have become nan: loss, and whether the step was skipped."""
    found = []
    for name in names:
        architecture = find(name)
        batches = architecture.batches(8)
        example = {key: value[:2] for key, value in batches[0].items()}
        with engine.initialize(architecture.build, settings(2), example_batch=example) as eng:
            eng.train_batch(batches[0])
            with torch.no_grad():
                for parameter in eng.module.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(float("nan"))
            report = eng.train_batch(batches[1])
            found.append((report.loss, report.skipped))
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("GPT-2, dropout",), id="one"),
        wide(("Mixtral", "T5", "Gemma 3n"), id="more"),
    ],
)
def test_a_model_that_has_diverged_is_not_taken_for_a_changed_one(run_ranks: RunRanks, names: tuple[str, ...]) -> None:
    for found in run_ranks(diverged, 2, names):
        assert len(found) == len(names) and all(loss != loss and skipped for loss, skipped in found), found
