"""Receivers of one version read from each other what they have: the trainer sends each byte once."""

from collections import Counter
from collections.abc import Iterator
from threading import Thread
from time import monotonic
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from engine.weights_out.plan import share_of
from engine.weights_out.receiver import PeerServer, Target, WeightReceiver, follow
from engine.weights_out.transfer import Shadows
from tests import models
from tests.engine.weights_out.trainer import DIMS, SHAPES, Trainer, has, random_weights, receiver_of, targets
from tests.tables import Table

TOTAL = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())
DEADLINE = 2.0
CUTS = [
    [(0, 1), (0, 1)],
    [(0, 2), (0, 1)],
    [(0, 1), (1, 2), (2, 3)],
    [(0, 2), (1, 3), (0, 1)],
    [(1, 3), (2, 3), (0, 2)],
]
"""Parts of receivers, in the order in which they read: (part, parts)."""
COLUMNS = (
    "bytes that they want", "sent by the trainer", "sent by receivers", "of a second version without a change",
    "of one with a changed tensor, by the trainer",
)  # fmt: skip


class Receivers:
    """Receivers that serve each other.

    Args:
        cuts: part and parts of each.
    """

    def __init__(self, trainer: Trainer, cuts: list[tuple[int, int]], deadline: float = 30.0, **network: Any) -> None:
        self.cuts, self.trainer, self.lives = cuts, trainer, list[tuple[dict[str, Target], WeightReceiver]]()
        for number, (part, parts) in enumerate(cuts):
            live, reader = targets(part, parts), trainer.reader(deadline, **(network if number else {}))
            receiver = receiver_of(reader, live)
            peer = PeerServer(f"http://peer{number}", trainer.geometry, live)
            trainer.servers[peer.rank.url] = peer.server
            receiver.serve(peer)
            self.lives.append((live, receiver))

    def update(self, together: bool = False) -> None:
        """Updates all, one after the other or all at once."""
        threads = [Thread(target=receiver.update) for _, receiver in self.lives]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()

    @property
    def sent(self) -> Counter[str]:
        """Bytes of blocks by the kind of their server."""
        found = Counter[str]()
        for _, receiver in self.lives:
            network: Any = receiver._reader._connect
            for url, size in network.sent.items():
                found["trainer" if "owner" in url else "peers"] += size
        return found

    @property
    def own(self) -> int:
        """Bytes of all live tensors."""
        return sum(target.values.nbytes for live, _ in self.lives for target in live.values())

    def have(self, weights: dict[str, Tensor]) -> bool:
        """True if all live tensors are those of ``weights``."""
        return all(has(live, weights, *cut) for (live, _), cut in zip(self.lives, self.cuts, strict=True))


def union(cuts: list[tuple[int, int]], keys: tuple[str, ...] = tuple(SHAPES)) -> int:
    """Bytes that at least one of the parts has."""
    size = 0
    for key in keys:
        seen = torch.zeros(SHAPES[key], dtype=torch.bool)
        for part, parts in cuts:
            for start, stop in share_of(SHAPES[key], part, parts, DIMS.get(key, 0)).part.rows:
                seen.transpose(0, DIMS.get(key, 0))[start:stop] = True
            if parts == 1 or not SHAPES[key]:
                seen[...] = True
        size += 4 * int(seen.sum())
    return size


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Bytes that trainer and receivers send, by parts of the receivers."""
    made = Table("weights-out-bytes", "receivers, by their parts of the model")
    yield made
    if request.config.getoption("--write-figures"):
        made.write()


@pytest.mark.parametrize("together", [False, True], ids=["in-turn", "together"])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_trainer_sends_each_byte_once(cuts: list[tuple[int, int]], together: bool, table: Table) -> None:
    trainer, first = Trainer(2), random_weights(1)
    receivers = Receivers(trainer, cuts)
    trainer.publish(first)
    receivers.update(together)
    assert receivers.have(first)
    assert receivers.sent == {"trainer": union(cuts), "peers": receivers.own - union(cuts)}
    trainer.publish(first)
    receivers.update(together)
    assert receivers.sent.total() == receivers.own, "an unchanged version costs nothing"
    key = "layers.0.up.weight"
    changed = {**first, key: first[key] + 1}
    trainer.publish(changed)
    before = receivers.sent["trainer"]
    receivers.update(together)
    sent = receivers.sent["trainer"] - before
    assert receivers.have(changed) and sent == union(cuts, (key,))
    row = ", ".join(f"{part + 1} of {parts}" for part, parts in cuts)
    figures = (receivers.own, union(cuts), receivers.own - union(cuts), 0, sent)
    table.cells |= {(row, column): f"{figure:,}" for column, figure in zip(COLUMNS, figures, strict=True)}


@pytest.mark.parametrize("byte", [0, 300_000, 900_000])
def test_the_trainer_sends_what_a_dead_receiver_does_not(byte: int) -> None:
    trainer, weights = Trainer(2), random_weights(1)
    receivers = Receivers(trainer, [(0, 1), (0, 1)], DEADLINE, life=byte, victim="http://peer0")
    trainer.publish(weights)
    began = monotonic()
    receivers.update()
    assert receivers.have(weights) and monotonic() - began < DEADLINE
    assert TOTAL < receivers.sent["trainer"] <= 2 * TOTAL


def test_a_receiver_that_gets_nothing_does_not_hold_up_later_ones() -> None:
    trainer, weights = Trainer(2), random_weights(1)
    receivers = Receivers(trainer, [(0, 1), (0, 1)], DEADLINE)
    version = trainer.publish(weights)
    (_, first), (live, second) = receivers.lives
    assert first._peer is not None
    with first._reader.leased(None, monotonic() + DEADLINE, first._peer.rank):  # it reads no block
        first._peer.begin(version)
        assert second.update() is not None
    assert has(live, weights) and receivers.sent == {"trainer": TOTAL}


def test_damaged_blocks_of_a_receiver_are_read_from_the_trainer() -> None:
    trainer, weights = Trainer(1), random_weights(1)
    receivers = Receivers(trainer, [(0, 1), (0, 1)])
    trainer.publish(weights)
    (_, first), (live, second) = receivers.lives
    first.update()
    for target in receivers.lives[0][0].values():
        target.values.add_(1)  # it serves its live tensors
    second.update()
    assert has(live, weights) and second._reader.traffic.from_peers == 0 < second._reader.traffic.repeated


def test_a_receiver_of_a_later_version_does_not_serve_an_earlier_one() -> None:
    trainer, first, second = Trainer(1), random_weights(1), random_weights(2)
    receivers = Receivers(trainer, [(0, 1), (0, 1)], DEADLINE)
    (_, early), (live, late) = receivers.lives
    trainer.publish(first)
    early.update()
    with late._reader.leased(None, monotonic() + DEADLINE) as version:
        assert version is not None and late._reader.peers
        assert early._peer is not None
        early._peer.begin(trainer.publish(second))
        late._reader.peers, peers = (), late._reader.peers
    late._reader.peers = peers
    late.update()
    assert has(live, second)


def test_a_new_version_begins_without_receivers() -> None:
    trainer, weights = Trainer(1), random_weights(1)
    receivers = Receivers(trainer, [(0, 1), (0, 1)])
    trainer.publish(weights)
    receivers.update()
    version = trainer.publish(weights)
    late = receivers.lives[1][1]._reader
    with late.leased(None, monotonic() + DEADLINE) as found:
        assert found == version and late.peers == ()


def test_a_tensor_is_served_once_all_its_flows_have_arrived() -> None:
    ready = list[str]()
    into = Shadows((), lambda key: None, lambda key: torch.empty(0), ready.append)
    into.expect(["a", "b", "a"])
    into.arrived("a")
    assert ready == []
    into.arrived("b")
    into.arrived("a")
    assert ready == ["b", "a"]


def test_weights_without_a_token_are_served_to_this_host_only() -> None:
    trainer = Trainer(1)
    with pytest.raises(EngineError, match=r"serves at 0\.0\.0\.0 without a token"):
        PeerServer.start("0.0.0.0", trainer.geometry, targets(0, 1))


def test_real_receivers_read_from_each_other() -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "weights_out": {},
    }  # fmt: skip
    with engine.initialize(models.decoder(), config, loss_sum, models.batches_for("decoder", 4, 1)[0]) as eng:
        url, state = eng.publish_weights().url, eng.full_state_dict()
        followers = [(model := models.decoder(), follow(model, url, serve="127.0.0.1")) for _ in range(2)]
        for model, receiver in followers:
            for value in model.state_dict().values():
                value.zero_()
            receiver.update()
            assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        (_, first), (_, second) = followers
        assert first._reader.traffic.from_peers == 0 < first._reader.traffic.received
        assert second._reader.traffic.from_peers == second._reader.traffic.received == first._reader.traffic.received
        for _, receiver in followers:
            receiver.close()
