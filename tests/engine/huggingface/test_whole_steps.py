"""Steps of a Trainer over a pipeline: what the engine is given of them, without an engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.huggingface.hosted_model import HostedModel, with_one_loss
from engine.huggingface.whole_steps import OwnLoss, WholeSteps
from tests import models


@dataclass
class FakeAccelerator:
    """Two data ranks, and an engine that keeps what it is given."""

    sync_gradients: bool = False
    num_processes: int = 2
    device: torch.device | str = "cpu"
    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)

    @property
    def trained(self) -> "FakeAccelerator":
        return self

    def train_batch(self, batch: Iterator[dict[str, Any]]) -> Any:
        self.steps.append(list(batch))
        return SimpleNamespace(loss=0.5)

    def record(self, report: Any) -> None:
        self.reports.append(report)


def steps_of(accelerator: FakeAccelerator, own_loss: OwnLoss | None = None, counts: bool = True) -> WholeSteps:
    """Steps of two microbatches of three rows."""
    arguments = SimpleNamespace(
        gradient_accumulation_steps=2, per_device_train_batch_size=3, average_tokens_across_devices=True
    )
    return WholeSteps(arguments, accelerator, own_loss, counts)  # type: ignore[arg-type]


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
    assert float(first["num_items_in_batch"]) == 12 / (2 * 2), "2 microbatches, 2 data ranks, over which is averaged"


def test_lacking_rows_and_microbatches_have_no_labels() -> None:
    accelerator = FakeAccelerator(sync_gradients=True)
    steps_of(accelerator).add(rows(2), torch.tensor(8))
    ((short, lacking),) = accelerator.steps
    assert short["input_ids"].shape == lacking["input_ids"].shape == (3, 4)
    assert torch.equal(short["labels"][:2], rows(2)["labels"])
    assert (short["labels"][2:] == -100).all() and (lacking["labels"] == -100).all()


@pytest.mark.parametrize(
    ("count", "what"), [(2, "a microbatch of 2 of 3 rows"), (3, "1 of 2 microbatches")]
)  # fmt: skip
def test_a_mean_is_refused_what_lacks(count: int, what: str) -> None:
    with pytest.raises(engine.EngineError, match=f"^the last step of the epoch has {what}, .*dataloader_drop_last"):
        steps_of(FakeAccelerator(sync_gradients=True), counts=False).add(rows(count), torch.tensor(8))


def test_a_loss_of_the_users_is_summed_over_the_step() -> None:
    def own(output: Tensor, labels: Tensor | None, count: Tensor | None) -> Tensor:
        assert labels is not None and count is not None
        return (output * labels).sum() / count

    steps = steps_of(FakeAccelerator(), own)
    microbatch = steps.microbatch(rows(3), torch.tensor(12))
    assert float(microbatch["num_items_in_batch"]) == 12 and list(steps.inputs(microbatch)) == ["input_ids"]
    assert float(steps.loss(torch.ones(3, 4), microbatch)) == sum(range(12)) / 12 * 4


@pytest.mark.parametrize(
    ("batch", "losses", "expected"),
    [
        ({"input_ids": torch.zeros(5, 4), "num_items_in_batch": torch.tensor(9)}, [1.0, 2.0, 3.0], 6.0),
        ({"input_ids": torch.zeros(5, 4)}, [1.0, 2.0, 3.0], (1 * 2 + 2 * 2 + 3 * 1) / 5),
    ],
)
def test_losses_of_microbatches_become_that_of_the_batch(
    batch: dict[str, Tensor], losses: list[float], expected: float
) -> None:
    output = with_one_loss({"loss": torch.tensor(losses)}, batch, 2)
    assert float(output["loss"]) == pytest.approx(expected)


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
