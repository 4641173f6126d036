"""Memory of weights out: the shard and one bucket, on both sides."""

import gc
import tracemalloc
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.checkpoint.format.pieces import Part
from engine.models.decoder import loss_sum
from engine.outer.http.bodies import RANGE
from engine.weights_out.image import WeightImage
from engine.weights_out.receiver import Target, WeightReceiver
from tests import models
from tests.engine.weights_out import trainer
from tests.models import take_rows

SIZE = 6 << 20
"""Elements of each of two large tensors, so that a bucket is small beside them."""
BUCKET = 4 * RANGE
"""Replies under way: a range of all owners together, on the server, in the transport and here, and what Python adds."""


def storages() -> int:
    """Bytes of all live storages."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


def test_an_image_is_the_shard_and_a_receiver_has_a_shadow_and_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {name: torch.full((SIZE,), value) for name, value in (("first", 1.0), ("second", 2.0))}
    monkeypatch.setattr(trainer, "random_weights", lambda *_: weights)
    before = storages()
    sender = trainer.Trainer(2)
    assert storages() - before == 2 * 4 * SIZE == sum(image.size for image in sender.images), "the shards, no copy"
    sender.publish(weights)
    live = {name: Target(Part((SIZE,)).whole(), torch.zeros(SIZE)) for name in weights}
    receiver = WeightReceiver(sender.reader(), live)
    before, seen = storages(), list[int]()
    read = WeightImage.read

    def counted(*given: Any) -> Any:
        seen.append(storages() - before)
        return read(*given)

    monkeypatch.setattr(WeightImage, "read", counted)
    tracemalloc.start()
    receiver.update()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(live["second"].values, weights["second"])
    assert max(seen) <= 2 * 4 * SIZE, "shadows of the receiver's own tensors"
    assert peak < BUCKET < 4 * SIZE
    monkeypatch.undo()
    assert storages() - before == 0, "the shadow ends with the update"


def published(stage: int, copies: int) -> tuple[int, int, int]:
    """Body of a rank: bytes that publishing adds, this rank's image, and the largest tensor."""
    config = {
        "train_micro_batch_size_per_gpu": 4, "parallel": {"data": 2}, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "weights_out": {"copies": copies},
    }  # fmt: skip
    batch = models.batches_for("decoder", 8, 1)[0]
    with engine.initialize(models.decoder(), config, loss_sum, take_rows(batch, 0, 4)) as eng:
        eng.train_batch(take_rows(batch, 4 * eng.grid.coord().dp, 4))
        before = storages()
        eng.publish_weights()
        publisher = eng._parts.publisher
        assert publisher is not None
        for _ in range(20):  # gloo frees the tensors of its last messages soon
            if storages() == before:
                break
            sleep(0.05)
        return storages() - before, publisher.image_bytes, sum(p.numel() * 4 for p in models.decoder().parameters())


@pytest.mark.long
@pytest.mark.parametrize(("stage", "copies", "images"), [(0, 1, 1), (0, 2, 2), (3, 2, 1)])
def test_publishing_allocates_nothing_beyond_the_images(run_ranks: Any, stage: int, copies: int, images: int) -> None:
    found = run_ranks(published, 2, stage, copies)
    assert sum(image for _, image, _ in found) == images * found[0][2] and all(added == 0 for added, *_ in found)
    assert max(image for _, image, _ in found) < 0.75 * images * found[0][2], "each rank its share"
