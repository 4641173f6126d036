"""Steps publish without copying: a thread copies weights until the next update, which waits for it."""

from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.models.decoder import loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.weights_out.image import WeightImage
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import WeightReceiver, empty_targets
from tests import models

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def run(steps: int, **weights_out: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains; returns the weights, and those of the newest version."""
    batch, found = models.batches_for("decoder", 4, 1)[0], dict[str, Tensor]()
    config = {**CONFIG, "weights_out": weights_out} if weights_out else CONFIG
    with engine.initialize(models.decoder(), config, loss_sum, batch) as eng:
        for _ in range(steps):
            eng.train_batch(batch)
        if (publisher := eng._parts.publisher) is not None:
            publisher._reads.wait()
            reader = WeightReader(publisher.url)
            live = empty_targets(reader.geometry(), 0, 1)
            version = WeightReceiver(reader, live).update()
            assert version is not None and version.step == steps - steps % weights_out["every"]
            assert publisher.copied == 0, "a thread has copied all of it"
            found = {key: target.values for key, target in live.items()}
        return eng.full_state_dict(), found


def test_a_version_has_the_weights_of_its_step_though_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    put, expected = WeightImage.put, run(2)[0]

    def slow(*given: Any) -> None:
        sleep(0.05)  # the next step ends before the last tensor is copied
        put(*given)

    monkeypatch.setattr(WeightImage, "put", slow)
    after, version = run(3, every=2)
    assert all(torch.equal(version[key], expected[key]) for key in version)
    assert not any(torch.equal(after[key], version[key]) for key in version if version[key].dim() > 1)


def test_a_load_waits_for_the_copy_of_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, put, seen = models.batches_for("decoder", 4, 1)[0], WeightImage.put, dict[str, Tensor]()

    def slow(image: WeightImage, key: str, values: Tensor, held: Any) -> None:
        sleep(0.02)
        put(image, key, values, held)
        seen[key] = values.clone()

    config = {**CONFIG, "weights_out": {"every": 1}}
    with engine.initialize(models.decoder(), config, loss_sum, batch) as eng:
        eng.save_checkpoint(tmp_path).wait()
        monkeypatch.setattr(WeightImage, "put", slow)
        eng.train_batch(batch)
        expected = {key: values.clone() for key, values in eng.module.state_dict().items()}
        eng.load_checkpoint(tmp_path)
        assert seen.keys() == expected.keys()
        assert all(torch.equal(values, expected[key].view(-1)) for key, values in seen.items())


@pytest.mark.parametrize("quantized", [False, True])
def test_frozen_weights_that_were_loaded_are_published_again(quantized: bool) -> None:
    example = torch.ones(4, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64).requires_grad_(False), torch.nn.Linear(64, 64))
    config = {
        **CONFIG, "weights_out": {"frozen": True}, "checkpoint": {"frozen": False},
        "quantize_frozen": {"dtype": "int8"} if quantized else None,
    }  # fmt: skip
    with engine.initialize(model, config, lambda output, _: output.sum(), example) as eng:
        reader = WeightReader(eng.publish_weights().url)
        live = empty_targets(reader.geometry(), 0, 1)
        receiver = WeightReceiver(reader, live)
        receiver.update()
        eng.load_full_state_dict({key: torch.full_like(each, 3) for key, each in eng.full_state_dict().items()})
        eng.publish_weights()
        receiver.update()
        assert all((target.values == 3).all() for target in live.values())
        publisher: Any = eng._parts.publisher
        copied = publisher.copied
        eng.full_state_dict()  # a read
        eng.publish_weights()
        assert publisher.copied - copied == 4 * (64 * 64 + 64), "frozen weights are not copied again"


def test_a_failure_of_the_copy_ends_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(WeightImage, "put", failing)
    with pytest.raises(MemoryError):
        run(2, every=1)


def test_a_buffer_of_another_shape_is_refused_on_all_ranks() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"data": 2}, "weights_out": {}}

    def body(world: World) -> str:
        model = torch.nn.Linear(2, 2)
        model.register_buffer("seen", torch.zeros(2))
        with engine.initialize(model, config, lambda output, _: output.sum(), torch.ones(1, 2), world=world) as eng:
            eng.publish_weights()
            eng.module.seen = torch.zeros(3)
            with pytest.raises(engine.EngineError) as caught:
                eng.publish_weights()
            eng.module.seen = torch.ones(2)
            eng.publish_weights()
        return str(caught.value)

    assert sorted(run_thread_ranks(2, body)) == [
        "buffer 'seen' has shape [3], but receivers have memory for its shape at the start, [2]; keep the shapes of "
        "persistent buffers, or make a new engine.",
        "rank 0 refused to publish its buffers, so no rank publishes; read its error.",
    ]
