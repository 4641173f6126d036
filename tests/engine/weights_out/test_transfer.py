"""Receivers on any cut get exactly the bytes that they lack, and what is unchanged costs nothing."""

from collections import Counter

import pytest
import torch

from engine.checkpoint.format.checked_blocks import BLOCK
from engine.errors import EngineError
from engine.weights_out.plan import share_of
from engine.weights_out.receiver import Target, empty_targets
from engine.weights_out.version import OwnerRank
from tests.engine.weights_out.trainer import SHAPES, Trainer, has, random_weights, receiver_of, targets

BYTES = {key: 4 * torch.Size(shape).numel() for key, shape in SHAPES.items()}


def columns(shape: tuple[int, ...], owner: int, owners: int):  # type: ignore[no-untyped-def]
    """The cut of a row-parallel weight."""
    return share_of(shape, owner, owners, len(shape) - 1)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("cut", [share_of, columns])
@pytest.mark.parametrize("owners", [1, 4])
def test_every_part_receives_what_it_lacks(parts: int, cut, owners: int) -> None:  # type: ignore[no-untyped-def]
    trainer, weights = Trainer(owners, cut=cut), random_weights(1)
    trainer.publish(weights)
    for part in range(parts):
        live = targets(part, parts)
        reader = trainer.reader()
        receiver = receiver_of(reader, live)
        assert receiver.update() is not None and has(live, weights, part, parts)
        own = sum(target.values.nbytes for target in live.values())
        assert (reader.traffic.received, reader.traffic.repeated) == (reader.traffic.lacked, 0)
        assert reader.traffic.received == own
        assert receiver.update() is None
        trainer.publish(weights)
        assert receiver.update() is not None and reader.traffic.received == own, "an unchanged version costs nothing"


@pytest.mark.parametrize("known", [True, False], ids=["hashes", "values"])
def test_one_changed_layer_is_sent_alone(known: bool) -> None:
    trainer, weights = Trainer(2), random_weights(1)
    trainer.publish(weights)
    reader, live = trainer.reader(), targets(0, 1, None if known else weights)
    receiver = receiver_of(reader, live)
    if known:
        receiver.update()
    before = reader.traffic.received
    changed = {**weights, "layers.0.up.weight": weights["layers.0.up.weight"] + 1}
    trainer.publish(changed)
    receiver.update()
    assert has(live, changed) and reader.traffic.received - before == BYTES["layers.0.up.weight"]
    changed["layers.0.down.weight"] = changed["layers.0.down.weight"].clone()
    changed["layers.0.down.weight"][0, 0] += 1
    before = reader.traffic.received
    trainer.publish(changed)
    receiver.update()
    assert has(live, changed) and reader.traffic.received - before == min(BLOCK, BYTES["layers.0.down.weight"] // 2)


def test_frozen_tensors_are_held_by_receivers() -> None:
    trainer, weights = Trainer(2, held=("embed.weight",)), random_weights(1)
    trainer.publish(weights)
    live = targets(0, 1)
    reader = trainer.reader()
    receiver_of(reader, live).update()
    assert (
        not live["embed.weight"].values.any() and reader.traffic.received == sum(BYTES.values()) - BYTES["embed.weight"]
    )
    assert "embed.weight" not in empty_targets(trainer.geometry, 0, 1)


def test_a_tensor_that_is_expanded_receives_its_values() -> None:
    trainer, live, key = Trainer(1), targets(0, 1), "layers.1.scale"
    weights = {**random_weights(1), key: torch.tensor(2.0).expand(600)}
    trainer.publish(weights)
    live[key] = Target(live[key].piece, torch.zeros(()).expand(600))
    receiver_of(trainer.reader(), live).update()
    assert has(live, weights)


def test_equal_copies_share_the_load() -> None:
    trainer, weights = Trainer(2, copies=True), random_weights(1)
    trainer.publish(weights)
    for _ in range(3):
        reader = trainer.reader()
        live = targets(0, 1)
        receiver_of(reader, live).update()
        sent: Counter[str] = reader._connect.sent  # type: ignore[attr-defined]
        loads, owner = Counter[str](), OwnerRank("a", {}, ("b",))
        assert {reader._by_load(owner, loads, 10)[0] for _ in range(2)} == {"a", "b"}
        assert has(live, weights) and max(sent.values()) < 0.6 * sent.total() == 0.6 * sum(BYTES.values())


def test_bf16_and_new_tensors_for_a_part() -> None:
    trainer, weights = Trainer(3, torch.bfloat16), random_weights(1, torch.bfloat16)
    trainer.publish(weights)
    live = empty_targets(trainer.geometry, 1, 3)
    receiver_of(trainer.reader(), live).update()
    assert torch.equal(live["embed.weight"].values, weights["embed.weight"][100:200])
    assert live["head.count"].values == weights["head.count"]


def test_a_trainer_that_starts_again_sends_only_what_differs() -> None:
    weights = random_weights(1)
    first, live = Trainer(2), targets(0, 1)
    first.publish(weights)
    reader = first.reader()
    receiver = receiver_of(reader, live)
    receiver.update()
    second, changed = Trainer(3, run="again"), {**weights, "layers.1.scale": weights["layers.1.scale"] * 2}
    second.publish(changed)
    reader._connect.servers = second.servers  # type: ignore[attr-defined]
    before = reader.traffic.received
    assert receiver.update() is not None and has(live, changed)
    assert reader.traffic.received - before == BYTES["layers.1.scale"]


def test_a_trainer_that_starts_again_does_not_complete_a_version_of_its_last_run() -> None:
    first, second, live = Trainer(2), Trainer(2, run="again"), targets(0, 1)
    first.publish(random_weights(1))
    second.publish(random_weights(2))
    reader = first.reader()
    reader._connect.servers = {  # type: ignore[attr-defined]
        "http://owner0": first.servers["http://owner0"],
        "http://owner1": second.servers["http://owner1"],
    }
    with pytest.raises(EngineError, match="version 1 is of an earlier run"):
        receiver_of(reader, live).update()
    assert not any(target.values.any() for target in live.values())


def test_damaged_blocks_are_repeated_and_never_taken_over() -> None:
    trainer, weights = Trainer(2), random_weights(1)
    trainer.publish(weights)
    live, reader = targets(0, 1), trainer.reader(damages=2)
    receiver = receiver_of(reader, live)
    receiver.update()
    assert has(live, weights) and reader.traffic.repeated > 0 and reader.traffic.received == sum(BYTES.values())
    live, bad = targets(0, 1), trainer.reader(damages=10**6)
    with pytest.raises(EngineError, match="have had another hash than their version's 4 times"):
        receiver_of(bad, live).update()
    assert not any(target.values.any() for target in live.values())


def different(name: str) -> dict[str, Target]:
    live = targets(0, 1)
    value = live["embed.weight"].values
    if name == "unknown":
        live["router.weight"] = live["embed.weight"]
    if name == "missing":
        del live["layers.1.scale"]
    if name == "dtype":
        live["embed.weight"] = Target(live["embed.weight"].piece, value.bfloat16())
    if name == "shape":
        live["embed.weight"] = Target(share_of((300, 96), 0, 1), value[: 300 * 96])
    if name == "part":
        live["embed.weight"] = Target(live["embed.weight"].piece, value[:96])
    return live


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("architecture", "the trainer has Model, and the receiver Other"),
        ("unknown", "the receiver has 'router.weight', which the trainer does not publish"),
        ("missing", "the trainer publishes 'layers.1.scale', which the receiver lacks"),
        ("dtype", r"'embed.weight' is F32 \[301, 96\] in the trainer and BF16 \[301, 96\] in the receiver"),
        ("shape", r"'embed.weight' is F32 \[301, 96\] in the trainer and F32 \[300, 96\] in the receiver"),
        ("part", "target 'embed.weight' has 96 elements in Target.values, but Target.piece describes 28,896; allocate"),
    ],
)
def test_another_model_is_refused_by_name(name: str, message: str) -> None:
    trainer = Trainer(2)
    trainer.publish(random_weights(1))
    with pytest.raises(EngineError, match=message):
        receiver_of(trainer.reader(), different(name), architecture="Other" if name == "architecture" else "Model")
