"""Weights that several ranks hold alike are compared as long as a run goes on, in the sum that a step makes anyway."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.zero.flat_buckets import FlatBucket

STEPS, WIDTH = 6, 8
PLAN = {"*.up": "column", "*.down": "row"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return out


class Tied(nn.Module):
    """Stages share the embedding, tensor ranks the norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


CASES: dict[str, tuple[dict[str, int], int]] = {
    "tp2": ({"tensor": 2}, 0),
    "dp2 ZeRO 0": ({"data": 2}, 0),
    "dp2 ZeRO 2": ({"data": 2}, 2),
    "dp2 x tp2 ZeRO 3": ({"data": 2, "tensor": 2}, 3),
    "pp2": ({"pipeline": 2}, 1),
}
WHO = {
    "tp2": "tensor ranks",
    "dp2 ZeRO 0": "data ranks",
    "dp2 ZeRO 2": "data ranks",
    "dp2 x tp2 ZeRO 3": "tensor ranks",
}


def said(case: str, name: str | None, steps: int = STEPS) -> tuple[list[str], list[Any]]:
    """What a run says in which one tensor rank, or else one rank, writes an element of a weight after the third step;
    and the bytes of each step."""
    axes, stage = CASES[case]
    parallel: dict[str, Any] = {"data": 1} | axes | ({"tensor_plan": PLAN} if "tensor" in axes else {})
    ranks = axes.get("data", 1) * axes.get("tensor", 1) * axes.get("pipeline", 1)
    heard: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]

    def body(world: World) -> list[Any]:
        config = {
            "train_batch_size": 4 * axes.get("data", 1), "gradient_accumulation_steps": 2, "parallel": parallel,
            "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }  # fmt: skip
        ids, sent = torch.randint(0, 11, (4 * STEPS * 16, 3), generator=torch.Generator().manual_seed(5)), []
        with engine.initialize(Tied(), config, example_batch=ids[:2], world=world) as eng:
            for step in range(steps):
                mine = ids[4 * (2 * step + eng.grid.coord().dp) :][:4]
                sent.append(eng.train_batch(mine).bytes_sent)
                writes = eng.grid.coord().tp == 1 if "tensor" in axes else world.rank == 1
                if step == 2 and name is not None and writes:
                    _write(eng, name)
        return sent

    logging.getLogger("trine").addHandler(listener)
    try:
        return heard, run_thread_ranks(ranks, body)
    finally:
        logging.getLogger("trine").removeHandler(listener)


def _write(eng: Any, name: str) -> None:
    for flat in eng._runtime.buckets:
        assert isinstance(flat, FlatBucket)
        for slot in flat.bucket.slots:
            start = max(slot.start - flat.owned.start if flat.sharded else slot.start, 0)
            memory = flat.kept if flat.sharded else flat.params
            if slot.name == name and start < len(memory):
                memory.data[start] += 1e-6


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if "tp2" in case else [pytest.mark.long]) for case in CASES]
)
def test_a_copy_that_differs_is_named_once(case: str) -> None:
    name = "embed.weight" if case == "pp2" else "blocks.0.norm.weight"
    heard, _ = said(case, name)
    found = [line for line in heard if "differs between" in line]
    assert len(found) == 1, heard
    assert found[0].startswith(f"parameter {name!r} differs between {WHO[case]}, " if case in WHO else "a weight that")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.long) for case in CASES] + ["dp2 ZeRO 2"])
def test_equal_copies_are_compared_in_silence_and_send_nothing_more(case: str) -> None:
    heard, sent = said(case, None, steps=8)
    assert not any("differs between" in line for line in heard), heard
    assert all(len(set(steps[4:])) == 1 for steps in sent), "steps 5 to 8, of which the eighth compares"
