"""Models over stages in every way of running them: recomputed, compiled, cast, sharded, cut by tensor ranks too.

What the user's model does itself (Hugging Face's checkpoints, compiled blocks, autocast) is part of its name.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.engine.parity.launches import Compared, compare, settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

FULL = {"activation_checkpointing": {"mode": "full"}}
DATA = {"parallel": {"data": 2}}
BOTH = {"parallel": {"tensor": 2}}
V: dict[str, Any] = {"parallel": {"schedule": "zb-v"}}
"""Two stages a rank, backwards in two parts."""


def sharded(stage: int, **more: Any) -> dict[str, Any]:
    """Two data ranks with a ZeRO stage."""
    return {"zero_optimization": {"stage": stage} | more, **DATA}


def split(changes: dict[str, Any]) -> dict[str, Any]:
    """The same under ZB-V."""
    return changes | {"parallel": changes.get("parallel", {}) | V["parallel"]}


AWKWARD = ("T5", "Mixtral", "Gemma 3n", "ALBERT", "Whisper", "U-Net", "skips and gates", "blocks passing a dict", "ViT")
PLANNED = ("GPT-2", "Llama", "Qwen3", "Mistral", "Gemma", "Gemma 2")
WAYS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "recomputed": (FULL, ("T5, dropout",)),
    "by the model itself": ({}, ("T5, dropout and checkpoints",)),
    "ZeRO 3": (sharded(3), ("Mixtral",)),
    "tensor ranks": (BOTH, ("Gemma",)),
    "zb-v": (split(sharded(3)), ("U-Net",)),
}  # fmt: skip
WIDE: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "recomputed": (FULL, AWKWARD),
    "checkpoints": ({}, [f"{name}, checkpoints" for name in ("GPT-2", "BERT", "T5", "Mixtral", "ViT")]),
    "dropout": ({}, [f"{name}, dropout" for name in ("GPT-2", "BERT", "T5", "ViT", "Whisper", "OPT", "ALBERT")]),
    "dropout, recomputed": (FULL, [f"{name}, dropout" for name in ("GPT-2", "BERT", "T5", "ViT", "ALBERT")]),
    "compiled": ({}, [f"{name}, compiled" for name in ("T5", "Mixtral", "U-Net", "skips and gates", "ALBERT", "ViT")]),
    "compiled by AOT": ({}, [f"{name}, compiled by AOT" for name in ("GPT-2", "T5", "U-Net", "skips and gates")]),
    "compiled, recomputed": (FULL, ["GPT-2, compiled", "skips and gates, compiled"]),
    "autocast": ({}, [f"{name}, autocast" for name in ("GPT-2", "ViT", "U-Net")]),
    "by the model itself, more": ({}, ("Gemma 3n, checkpoints", "Mixtral, autocast", "GPT-2, dropout and compiled")),
    "ZeRO 3, compiled": (sharded(3), ("GPT-2, compiled",)),
    "ZeRO 1": (sharded(1), AWKWARD),
    "ZeRO 2": (sharded(2, reduce="microbatch"), AWKWARD),
    "ZeRO 3": (sharded(3), AWKWARD),
    "ZeRO 3, recomputed": (sharded(3) | FULL, AWKWARD),
    "tensor ranks": (BOTH, PLANNED),
    "tensor ranks, recomputed": (BOTH | FULL, PLANNED),
    "zb-v, recomputed": (V | FULL, AWKWARD),
    "zb-v, by the model itself": (
        V, [f"{name}, {how}" for name in ("GPT-2", "T5", "ViT") for how in ("checkpoints", "dropout", "autocast")]
    ),
    "zb-v, compiled": (V, [f"{name}, compiled" for name in ("GPT-2", "T5", "U-Net", "skips and gates")]),
    "zb-v, ZeRO 2": (split(sharded(2, reduce="microbatch")), AWKWARD),
    "zb-v, ZeRO 3": (split(sharded(3)), AWKWARD),
    "zb-v, tensor ranks": (split(BOTH), PLANNED),
    "dualpipe-v": ({"parallel": {"schedule": "dualpipe-v"}}, AWKWARD),
    "looped-bfs": ({"parallel": {"schedule": "looped-bfs", "virtual_stages": 2}}, AWKWARD),
    "zb-h1 of two stages": ({"parallel": {"schedule": "zb-h1", "virtual_stages": 2}}, AWKWARD),
}  # fmt: skip


def check(run_ranks: RunRanks, changes: dict[str, Any], names: Sequence[str]) -> None:
    """All of them train as in one process."""
    results = compare(run_ranks, names, settings(2, **changes))
    assert all(isinstance(result, Compared) for result in results.values()), results


@pytest.mark.parametrize("way", [wide(way) if way != "by the model itself" else way for way in WAYS])
def test_some_models_each_way(run_ranks: RunRanks, way: str) -> None:
    check(run_ranks, *WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("way", WIDE)
def test_many_models_each_way(run_ranks: RunRanks, way: str) -> None:
    check(run_ranks, *WIDE[way])


@pytest.mark.long
def test_bf16_stays_near_one_process(run_ranks: RunRanks) -> None:
    # a rounding difference of 1e-8 turns the rounding of some weight or gradient to bf16 every few steps
    results = compare(run_ranks, AWKWARD, settings(2, bf16={"enabled": True}), near=1e-3)
    assert all(isinstance(result, Compared) for result in results.values()), results
