"""What the plan says a rank holds is what a walk over all live tensors of the process finds, to the byte."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from engine.engine import Engine
from tests.zero.small import batch, forget_the_living, live_bytes, start

RunRanks = Callable[..., list[Any]]

# optimizer -> values per element that it keeps
OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    "AdamW": ({"type": "AdamW"}, 2),
    "SGD": ({"type": "SGD", "params": {"lr": 0.1}}, 0),
    "SGD momentum": ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, 1),
    "Lion": ({"type": "Lion"}, 1),
}
ALONE = {"enabled": True, "bf16_master_weights_and_grads": True}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "bf16 alone": {"bf16": ALONE},
    "bf16 alone, all of it": {"bf16": ALONE | {"bf16_optimizer_states": True}},
    "bf16 with an island": {"bf16": {"enabled": True}, "keep_fp32": ["up", "down"]},
    "bf16 alone with an island": {"bf16": ALONE, "keep_fp32": ["up", "down"]},
}


def by_formula(eng: Engine, moments: int) -> int:
    """DESIGN section 7, state bytes: what each stage cuts, and gradients where each microbatch is reduced."""
    zero = eng.config.zero_optimization
    share = eng.grid.dp if zero.stage else 1
    kept = eng.grid.dp if zero.stage >= 2 and zero.reduce == "microbatch" else 1
    whole = eng.grid.dp if zero.stage == 3 else 1
    frozen = 11 if zero.stage < 3 else 64  # padded where it is sharded
    bf16 = eng.config.bf16
    total = frozen * (2 if bf16.enabled or eng.config.fp16.enabled else 4)
    narrow = (2, 4, 4, 4)
    if bf16.bf16_master_weights_and_grads:
        narrow = (2, 2, 0, 2 if bf16.bf16_optimizer_states else 4)
    widths = {"float32": (4, 4, 0, 4), "float64": (8, 8, 0, 8), "bfloat16": narrow, "float16": narrow}
    for bucket in eng.plan.layout(eng.grid.coord()).buckets:
        psi, (param, sums, master, moment) = bucket.elements, widths[bucket.dtype]
        total += psi * param // whole + psi * sums // kept + psi * (master + moment * moments) // share
    return total


def settled_bytes(expected: int) -> int:
    """Bytes alive, once gloo's thread has let go of the control values (72 bytes) of the last collective."""
    deadline = time.monotonic() + 2
    while (found := live_bytes()) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


MODES = ((0, "step"), (1, "step"), (2, "step"), (2, "microbatch"), (3, "step"), (3, "microbatch"))


def measure(name: str, precision: str, mode: tuple[int, str]) -> tuple[int, int, int]:
    """Bytes found, planned and by formula, after two steps. Nothing is left out of what is found."""
    options, moments = OPTIMIZERS[name]
    forget_the_living()
    changes = {
        "optimizer": options,
        "zero_optimization": {"stage": mode[0], "reduce": mode[1], "reduce_bucket_size": 700},
    }
    eng = start(changes | PRECISIONS[precision])
    for step in range(2):
        eng.train_batch(batch(eng, step))
    planned = sum(eng.plan.rank(eng.grid.rank).state_bytes.values())
    found = settled_bytes(planned)
    formula = by_formula(eng, moments)
    differing = inventory_differs(eng)
    eng.close()
    assert not differing, differing
    return found, planned, formula


def inventory_differs(eng: Engine) -> dict[str, tuple[int, int]]:
    """The kinds of the plan of which the inventory holds other bytes: kind -> (inventory, plan)."""
    inventory, held = eng._runtime.inventory, Counter[str]()
    for each in inventory.weights():
        trained = each.flat is not None and each.flat.bucket in [flat.bucket for flat in inventory.trained]
        held["parameters" if trained else "frozen parameters"] += each.tensor.nbytes
    for each in inventory.gradients():
        held["gradients" if each.kind == "gradient" else "error feedback"] += each.tensor.nbytes
    held["master"] = sum(each.tensor.nbytes for each in inventory.masters())
    held["optimizer"] = sum(each.tensor.nbytes for each in inventory.moments())
    planned = eng.plan.rank(eng.grid.rank).state_bytes
    kinds = {**held, **planned}
    return {kind: pair for kind in kinds if (pair := (held[kind], planned.get(kind, 0)))[0] != pair[1]}


Case = tuple[str, str, tuple[int, str]]
"""Optimizer, precision, mode."""
CORE: list[Case] = [
    *product(("AdamW",), ("fp32", "bf16"), MODES),
    *product(("SGD", "SGD momentum", "Lion"), ("bf16",), MODES[1::3]),
    *product(("AdamW",), [name for name in PRECISIONS if name not in ("fp32", "bf16")], MODES[-1:]),
]
CASES: list[Case] = [
    *product(OPTIMIZERS, ("fp32", "bf16"), MODES),
    *product(("AdamW",), [name for name in PRECISIONS if name not in ("fp32", "bf16")], MODES[::2]),
    *product(OPTIMIZERS, ("bf16 alone, all of it",), MODES[-1:]),
]


def measure_all(cases: list[Case]) -> list[str]:
    """Body of a rank: one line for each case that deviates."""
    wrong = []
    for case in cases:
        found, planned, formula = measure(*case)
        if not found == planned == formula:
            wrong.append(f"{case}: found {found}, planned {planned}, formula {formula}")
    return wrong


@pytest.mark.parametrize(
    ("dp", "cases"),
    [
        (2, CORE),
        pytest.param(4, CORE[:12:2], marks=pytest.mark.long),
        pytest.param(2, CASES, marks=pytest.mark.long),
        pytest.param(4, CASES, marks=pytest.mark.long),
    ],
    ids=["2 core", "4 core", "2 all", "4 all"],
)
def test_live_bytes_are_what_the_plan_says(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(measure_all, dp, cases)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def hidden() -> tuple[int, int, int]:
    """Body of a rank: what the walk finds with nothing, a view pair, and a gradient of a leaf."""
    forget_the_living()
    empty = live_bytes()
    leaf = torch.ones(100, requires_grad=True)
    views = leaf.detach()[:50], leaf.detach()[50:]
    viewed = live_bytes()
    torch.autograd.backward(leaf.square().sum())
    return empty, viewed, live_bytes() + 0 * len(views)


def test_the_walk_finds_each_storage_once_and_gradients_too(run_ranks: RunRanks) -> None:
    assert run_ranks(hidden, 1) == [(0, 400, 800)]
