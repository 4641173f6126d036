"""Sites of one host whose weights are in shared memory, without a store."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import engine
from engine.checkpoint.format.pieces import Part, Piece
from engine.config import load_config
from engine.errors import EngineError
from engine.models.decoder import loss_sum
from engine.outer.messages import (
    JoinRequest,
    NamedPiece,
    PushKey,
    PushMeta,
    PushShare,
    RankLayout,
    StoreRefusedError,
)
from engine.outer.store.shared_weights import SharedWeights
from tests import models
from tests.engine.outer.test_grid_sites import TP2, ZERO2, train_site
from tests.engine.outer.thread_sites import ROWS, SiteRun, apart, config_of, train_alone

RunRanks = Callable[..., list[Any]]


def train(folder: Path, steps: int = 4) -> SiteRun:
    """Trains one site of this process."""
    return train_site(0, 1, steps, {"rule": "hogwild", "url": None, "folder": str(folder)}, {})


def test_a_site_of_shared_memory_trains_as_alone_and_the_next_one_continues(tmp_path: Path) -> None:
    run = train(tmp_path)
    assert apart(run.weights, train_alone(4).weights) < 1e-6
    assert run.outer is not None
    assert (run.outer.clock, run.outer.rows) == (4, 4 * ROWS)
    again = train(tmp_path, 1)
    assert again.losses[0] < run.losses[0] or apart(again.weights, run.weights) < 0.05
    assert again.losses[0] != run.losses[0], "the second site begins with the weights of the first"


@pytest.mark.long
@pytest.mark.parametrize("grid", [TP2, ZERO2], ids=["tp2", "ZeRO 2"])
def test_a_site_of_several_ranks_trains_as_one_rank(run_ranks: RunRanks, tmp_path: Path, grid: dict[str, Any]) -> None:
    outer = {"rule": "hogwild", "url": None, "folder": str(tmp_path / "ranks")}
    ranks: SiteRun = run_ranks(partial(train_site, outer=outer, changes=grid), 2, 0, 1, 4)[0]
    alone = train(tmp_path / "alone")
    assert ranks.losses == pytest.approx(alone.losses, rel=1e-6)
    assert apart(ranks.weights, alone.weights) < 1e-5


def test_a_configuration_of_shared_memory_reads_back() -> None:
    read = load_config({"train_batch_size": 4, "outer": {"rule": "hogwild", "folder": "shared"}}, 1)
    assert load_config(read.to_json(), 1) == read


def test_shared_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    train(tmp_path, 1)
    config = config_of({"rule": "hogwild", "url": None, "folder": str(tmp_path)})
    with pytest.raises(EngineError, match="has weights of another model"):
        engine.initialize(models.decoder(layers=3), config, loss_fn=loss_sum).train_batch(
            models.batches_for("decoder", ROWS, 1)[0]
        )


def shared(folder: Path) -> SharedWeights:
    outer = load_config({"train_batch_size": 4, "outer": {"rule": "hogwild", "folder": str(folder)}}, 1).outer
    assert outer is not None
    return SharedWeights(outer)


def request() -> JoinRequest:
    return JoinRequest(site=0, ranks=1, tensors=(("weight", (2,)),))


def test_a_folder_whose_first_site_ended_before_it_wrote_its_weights_is_refused(tmp_path: Path) -> None:
    first = shared(tmp_path)
    assert first.join(request()).seeds
    second = shared(tmp_path)
    joined = second.join(request())
    assert not joined.seeds, "the first site lives"
    second.register(joined.life, 0, RankLayout((), ()))
    assert second.offer(joined.life, 0) is None
    assert first._first is not None
    os.close(first._first)  # as the kernel does when a process ends
    with pytest.raises(StoreRefusedError, match="has no weights, because the site that has created it ended"):
        shared(tmp_path).join(request())
    (tmp_path / "seeded-0").touch()
    assert not shared(tmp_path).join(request()).seeds


def test_the_names_and_shapes_are_written_before_another_site_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.fdopen

    def open_unseen(*given: Any, **options: Any) -> Any:
        assert not (tmp_path / "tensors").exists()
        return opened(*given, **options)

    monkeypatch.setattr(os, "fdopen", open_unseen)
    assert shared(tmp_path).join(request()).seeds
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tensors")] == ["tensors"]


def test_the_ranks_of_a_site_pull_equal_weights_while_another_site_pushes(tmp_path: Path) -> None:
    """Both ranks have a replicated tensor, of which the second rank pushes the second half."""
    part = Part((4,))
    layouts = [
        RankLayout((NamedPiece("weight", Piece(part, first, first + 2)),), (NamedPiece("weight", part.whole()),))
        for first in (0, 2)
    ]
    ranks, other = [shared(tmp_path) for _ in layouts], shared(tmp_path)
    asked = JoinRequest(site=0, ranks=2, tensors=(("weight", (4,)),))
    life = ranks[0].join(asked).life
    for rank, (link, layout) in enumerate(zip(ranks, layouts, strict=True)):
        link.register(life, rank, layout)
        link.seed(life, rank, 0, torch.zeros(2).view(torch.uint8))
    joined = other.join(JoinRequest(site=1, ranks=1, tensors=asked.tensors))
    other.register(joined.life, 0, RankLayout((NamedPiece("weight", part.whole()),), layouts[0].pulled))

    def push(link: SharedWeights, rank: int, elements: int) -> None:
        meta = PushMeta(PushKey(life, 0, 0), 0, 1, 0.0, 0, 0)
        link.push(meta, rank, PushShare(), torch.ones(elements).view(torch.uint8))

    push(ranks[0], 0, 2)
    assert ranks[0].offer(life, 0) is None, "the second rank has not pushed"
    push(ranks[1], 1, 2)
    assert ranks[0].offer(life, 0) is not None
    first = ranks[0].pull(life, 0, 0, 1)
    push(other, 0, 4)
    assert ranks[1].pull(life, 1, 0, 1).tolist() == first.tolist() == [-1.0] * 4
    assert other.pull(joined.life, 0, 0, 1).tolist() == [-2.0] * 4
    assert not [*tmp_path.glob("site-*")]
