"""Steps of a Trainer over a pipeline: what the engine is given of them, without an engine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.hosting.hosted_model import HostedModel
from engine.huggingface.trainer import OwnLoss, Trainer, WholeSteps
from engine.program.batch_rows import BatchRows
from tests import models


@dataclass
class FakeAccelerator:
    """Two data ranks, and an engine that keeps what it is given."""

    sync_gradients: bool = False
    num_processes: int = 2
    device: torch.device | str = "cpu"
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    model_loss: Callable[[dict[str, Any]], Tensor] = lambda batch: per_item(batch)
    batch_rows: BatchRows = field(default_factory=BatchRows)

    @property
    def trained(self) -> "FakeAccelerator":
        return self

    def train_batch(self, batch: Iterator[dict[str, Any]]) -> Any:
        self.steps.append(list(batch))
        return SimpleNamespace(loss=0.5)

    def predict(self, batch: dict[str, Any]) -> Any:
        return {"loss": torch.stack([self.model_loss(batch)])}

    def record(self, report: Any) -> None:
        self.reports.append(report)


def steps_of(accelerator: FakeAccelerator, own_loss: OwnLoss | None = None, counts: bool = True) -> WholeSteps:
    """Steps of two microbatches of three rows."""
    arguments = SimpleNamespace(
        gradient_accumulation_steps=2, per_device_train_batch_size=3, average_tokens_across_devices=True
    )
    return WholeSteps(arguments, accelerator, own_loss, counts)  # type: ignore[arg-type]


def per_item(batch: dict[str, Any]) -> Tensor:
    """The loss of a model that divides by the number of items."""
    found: Tensor = batch["labels"].clamp(min=0).sum() / batch["num_items_in_batch"]
    return found


def mean(batch: dict[str, Any]) -> Tensor:
    """That of one that ignores the number."""
    labels: Tensor = batch["labels"]
    return labels.clamp(min=0).float().mean()


def per_item_in_part(batch: dict[str, Any]) -> Tensor:
    """That of one that adds something to it, such as the balance of experts."""
    return per_item(batch) + mean(batch)


def rows(count: int) -> dict[str, Tensor]:
    ids = torch.arange(4 * count).view(count, 4)
    return {"input_ids": ids, "labels": ids.clone()}


def test_a_step_waits_for_its_last_microbatch() -> None:
    accelerator = FakeAccelerator()
    steps = steps_of(accelerator)
    assert steps.add(rows(3), torch.tensor(12)) is None and not accelerator.steps
    accelerator.sync_gradients = True
    assert steps.add(rows(3), torch.tensor(12)) == 0.5
    ((first, second),) = accelerator.steps
    assert len(accelerator.reports) == 1 and torch.equal(first["input_ids"], second["input_ids"])
    assert float(first["num_items_in_batch"]) == 12


@pytest.mark.parametrize("model_loss", [per_item, mean, per_item_in_part])
def test_the_average_of_a_step_is_the_loss_of_the_host(model_loss: Callable[[dict[str, Any]], Tensor]) -> None:
    """The host sums microbatches and multiplies each by its data ranks, which it averages, whatever the model does."""
    accelerator = FakeAccelerator(sync_gradients=True)
    steps = steps_of(accelerator)
    steps.add(rows(3), torch.tensor(12))
    (step,) = accelerator.steps
    losses = [steps.loss({"loss": model_loss(steps.inputs(microbatch))}, microbatch) for microbatch in step]
    host = 2 * model_loss({**rows(3), "num_items_in_batch": torch.tensor(12)})
    assert float(sum(losses)) / 2 == float(host), "the second microbatch lacks and counts nothing"


def test_a_subclass_of_the_host_may_say_that_losses_are_averaged() -> None:
    for summed, factor in ((True, 4), (False, 2), (None, 4)):
        arguments = SimpleNamespace(
            gradient_accumulation_steps=2, per_device_train_batch_size=3, average_tokens_across_devices=True
        )
        steps = WholeSteps(arguments, FakeAccelerator(), None, True, summed)  # type: ignore[arg-type]
        microbatch = steps.microbatch(rows(3), 12)
        assert float(steps.loss({"loss": torch.tensor(1.0)}, microbatch)) == factor


def test_lacking_rows_have_no_labels_and_lacking_microbatches_count_nothing() -> None:
    accelerator = FakeAccelerator(sync_gradients=True)
    steps = steps_of(accelerator)
    steps.add(rows(2), torch.tensor(8))
    ((short, lacking),) = accelerator.steps
    assert short["input_ids"].shape == lacking["input_ids"].shape == (3, 4)
    assert torch.equal(short["labels"][:2], rows(2)["labels"]) and (short["labels"][2:] == -100).all()
    losses = [float(steps.loss({"loss": torch.tensor(1.0)}, each)) for each in (short, lacking)]
    assert losses == [4.0, 0.0] and steps.inputs(lacking).keys() == steps.inputs(short).keys()


def test_patches_count_no_rows_and_cannot_be_filled_up() -> None:
    """They come first in the batch, and in another number."""
    accelerator = FakeAccelerator(sync_gradients=True, batch_rows=BatchRows(whole=frozenset({"patches"})))
    steps = steps_of(accelerator)
    steps.add({"patches": torch.ones(7, 2)} | rows(3), torch.tensor(12))
    assert accelerator.steps[0][0]["patches"].shape == (7, 2)
    with pytest.raises(
        engine.EngineError, match=r"a microbatch of 2 of 3 rows, and it cannot be .*\['patches'\] has no rows"
    ):
        steps.add({"patches": torch.ones(7, 2)} | rows(2), torch.tensor(8))


@pytest.mark.parametrize("model_loss", [mean, per_item_in_part])
def test_rows_that_lack_are_refused_by_the_loss_itself_and_not_by_a_signature(
    model_loss: Callable[[dict[str, Any]], Tensor],
) -> None:
    accelerator = FakeAccelerator(sync_gradients=True, model_loss=model_loss)
    with pytest.raises(engine.EngineError, match=r"^the last step of the epoch has a microbatch of 2 of 3 rows"):
        steps_of(accelerator).add(rows(2), torch.tensor(8))


@pytest.mark.parametrize(
    ("count", "what"), [(2, "a microbatch of 2 of 3 rows"), (3, "1 of 2 microbatches")]
)  # fmt: skip
def test_a_mean_is_refused_what_lacks(count: int, what: str) -> None:
    with pytest.raises(engine.EngineError, match=f"^the last step of the epoch has {what}, .* a multiple of 12 rows"):
        steps_of(FakeAccelerator(sync_gradients=True), counts=False).add(rows(count), torch.tensor(8))


def test_a_loss_of_the_users_is_summed_over_the_step() -> None:
    def own(output: Tensor, labels: Tensor | None, count: Tensor | None) -> Tensor:
        assert labels is not None and count is not None
        return (output * labels).sum() / count

    steps = steps_of(FakeAccelerator(), own)
    microbatch = steps.microbatch(rows(3), torch.tensor(12))
    assert float(microbatch["num_items_in_batch"]) == 12 and list(steps.inputs(microbatch)) == ["input_ids"]
    assert float(steps.loss(torch.ones(3, 4), microbatch)) == sum(range(12)) / 12 * 4


LABELS: Mapping[str, list[list[int]] | None] = {
    "none": None,
    "ragged": [[1, 1, 1], [1, 1, -100], [-100, 1, 1], [1, 1, 1], [-100, -100, 1]],
    "none in a microbatch": [[1, 1, 1], [1, 1, -100], [1, -100, -100], [1, -100, -100], [1, 1, 1]],
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize(("shifts", "told"), [(True, True), (False, False), (True, None), (False, None)])
def test_losses_of_microbatches_become_that_of_the_batch(
    divides: bool, labels: str, shifts: bool, told: bool | None
) -> None:
    """A model divides by the number of items or averages over its labels, of which a causal one skips the first."""
    values, given = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]), LABELS[labels]
    batch = {"values": values, "num_items_in_batch": torch.tensor(9)}
    batch |= {} if given is None else {"labels": torch.tensor(given)}

    def loss(part: Mapping[str, Tensor]) -> Tensor:
        wanted = part.get("labels", torch.ones(len(part["values"]), 3))[:, int(shifts) :]
        items = wanted.ne(-100)
        total = (part["values"][:, None] * items).sum()
        return total / (part["num_items_in_batch"].sum() if divides else items.sum())

    class Predicting(SimpleNamespace):
        def predict(self, batch: Mapping[str, Tensor], micro: int) -> Any:
            parts = [{key: part[first : first + micro] for key, part in batch.items()} for first in range(0, 5, micro)]
            return {"loss": torch.stack([loss(part) for part in parts])}

    config = SimpleNamespace(pp=2, micro=2)
    fake: Any = Predicting(module=None, config=config, batch_rows=BatchRows(), complete=lambda batch: None)
    with torch.no_grad():
        output = HostedModel(fake, whole_steps=True, shifts=told)(**batch)
    assert float(output["loss"]) == pytest.approx(float(loss(batch)), rel=1e-6)


def test_a_model_that_is_made_under_inference_mode_trains() -> None:
    """A host may evaluate first, in inference mode, whose tensors never have gradients."""
    (ids,) = models.token_batches(2, 1)
    with engine.initialize(models.decoder(), {"train_micro_batch_size_per_gpu": 2}) as eng:
        hosted = HostedModel(eng)
        with torch.inference_mode():
            output = hosted(ids[:, :-1])
        assert not output.is_inference() and not output.requires_grad
        eng.backward(hosted(ids[:, :-1]).square().mean())
        assert eng.step() is not None


def test_a_host_that_calls_train_and_eval_reaches_the_model() -> None:
    """``from_pretrained`` gives a model in eval mode, and hosts call ``train`` of what they were given in its place."""
    with engine.initialize(models.decoder().eval(), {"train_micro_batch_size_per_gpu": 2}) as eng:
        hosted = HostedModel(eng)
        assert not eng.module.training
        assert hosted.train() is hosted and all(module.training for module in eng.module.modules())
        hosted.eval()
        assert not any(module.training for module in eng.module.modules())


def test_microbatches_before_an_interrupt_are_in_no_later_step() -> None:
    """A second train() begins with its own first microbatch."""
    accelerator = FakeAccelerator()
    host = SimpleNamespace(accelerator=SimpleNamespace(hosted=SimpleNamespace(module=1)), model=1)
    host._steps = steps = steps_of(accelerator)
    steps.add(rows(3), 12)
    Trainer._wrap_model(host, torch.nn.Identity(), training=False)  # type: ignore[arg-type]
    assert len(steps._waiting) == 1, "an evaluation inside a step changes nothing"
    Trainer._wrap_model(host, torch.nn.Identity())  # type: ignore[arg-type]
    for accelerator.sync_gradients in (False, True):
        steps.add(rows(3), 12 + accelerator.sync_gradients)
    assert [[float(each["num_items_in_batch"]) for each in step] for step in accelerator.steps] == [[12, 13]]
