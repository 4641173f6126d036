"""The inventory of what a rank holds, beside the plan: the same kinds, places and bytes, without processes."""

from collections import Counter
from typing import Any

import pytest

from engine.engine import Engine
from engine.zero.state.state_inventory import Home
from tests.zero.small import batch, start

BF16 = {"bf16": {"enabled": True}}
HOST = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 and an average": {**BF16, "ema": {"decay": 0.9}},
    "optimizer on the host": {**BF16, "zero_optimization": HOST},
    "parameters on the host": {
        **BF16, "zero_optimization": {**HOST, "stage": 3, "offload_param": {"device": "cpu"}},
    },
    "an average on the host": {**BF16, "zero_optimization": HOST, "ema": {"decay": 0.9}},
}  # fmt: skip


def held_bytes(eng: Engine) -> dict[tuple[Home, str], int]:
    """Bytes of every kind in each place, by the words of the plan."""
    inventory, held = eng._runtime.inventory, Counter[tuple[Home, str]]()
    trained = {id(flat) for flat in inventory.trained}
    for each in inventory.weights():
        held[each.home, "parameters" if id(each.flat) in trained else "frozen parameters"] += each.tensor.nbytes
    for each in inventory.masters():
        held[each.home, "master"] += each.tensor.nbytes
    for each in inventory.moments():
        held[each.home, "optimizer"] += each.tensor.nbytes
    for each in inventory.companion_state():
        held[each.home, "average"] += each.tensor.nbytes
    for each in inventory.gradients():
        held[each.home, "gradients"] += each.tensor.nbytes
    return {place: size for place, size in held.items() if size}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_what_the_inventory_lists(case: str) -> None:
    eng = start(CASES[case])
    for step in range(2):
        eng.train_batch(batch(eng, step))
    planned = eng.plan.rank(0)
    expected = {(Home.DEVICE, kind): size for kind, size in planned.state_bytes.items() if size}
    expected |= {(Home.HOST, kind): size for kind, size in planned.host_bytes.items() if size}
    assert held_bytes(eng) == expected
    eng.close()
