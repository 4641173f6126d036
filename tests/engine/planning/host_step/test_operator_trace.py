"""The operators of a microbatch: how many of which sizes, on which stage, and what recomputation repeats."""

from collections import Counter

import pytest

from engine.planning.host_step.operator_trace import OperatorCall, trace_operators
from tests.engine.planning.host_step.conftest import Make

TOKENS, WIDTH, VOCABULARY = 32.0, 64.0, 32.0


def products(calls: tuple[OperatorCall, ...], kind: str) -> Counter[tuple[float, ...]]:
    return Counter(call.sizes for call in calls if call.kind == f"product {kind}")


@pytest.mark.parametrize("layers", [1, 3])
def test_products_of_a_decoder(make_planned: Make, layers: int) -> None:
    calls = trace_operators(*make_planned({}, layers))
    assert products(calls, "nt") == {
        (TOKENS, WIDTH, WIDTH): 4 * layers, (TOKENS, WIDTH, 4 * WIDTH): layers, (TOKENS, 4 * WIDTH, WIDTH): layers,
        (TOKENS, WIDTH, VOCABULARY): 1,
    }  # fmt: skip
    assert products(calls, "tn").total() == products(calls, "nn").total() == 6 * layers + 1
    kinds = Counter((call.kind, call.backward, call.times) for call in calls if "attention" in call.kind)
    assert kinds == {
        ("causal attention", False, 4.0): layers, ("causal attention backward", True, 4.0): layers,
    }  # fmt: skip
    assert not any(call.repeats or call.stage for call in calls)


def test_recomputation_stops_at_the_last_tensor_that_is_kept(make_planned: Make) -> None:
    calls = trace_operators(*make_planned({}, 2, activation_checkpointing={"mode": "full"}))
    again = Counter(call.kind for call in calls if call.repeats and call.kind)
    assert again["product nt"] == 2 * 5 and again["gelu"] == 2  # not the last product of a block
    assert not any(call.backward for call in calls if call.repeats)
    calls = trace_operators(*make_planned({}, 2, activation_checkpointing={"mode": "selective"}))
    again = Counter(call.kind for call in calls if call.repeats and call.kind)
    assert again["gelu"] == 2 and not [kind for kind in again if "product" in kind or "attention" in kind]


def test_stages_share_the_operators_of_both_ways(make_planned: Make) -> None:
    whole = trace_operators(*make_planned({}, 4))
    calls = trace_operators(*make_planned({"pipeline": 2}, 4))
    assert Counter(call[:3] for call in calls) == Counter(call[:3] for call in whole)
    found = Counter((call.stage, call.backward) for call in calls if call.kind == "causal attention backward")
    forward = Counter((call.stage, call.backward) for call in calls if call.kind == "causal attention")
    assert found == {(0, True): found[0, True], (1, True): 4 - found[0, True]}
    assert forward == {(stage, False): count for (stage, _), count in found.items()}
    assert {call.stage for call in calls if call.kind.startswith("log softmax")} == {1}
    assert {call.stage for call in calls if call.kind.startswith("embedding")} == {0}


def test_tensor_ranks_have_their_shards(make_planned: Make) -> None:
    calls = trace_operators(*make_planned({"tensor": 2}, 1))
    assert products(calls, "nt") == {
        (TOKENS, WIDTH, WIDTH / 2): 3, (TOKENS, WIDTH / 2, WIDTH): 1, (TOKENS, WIDTH, 2 * WIDTH): 1,
        (TOKENS, 2 * WIDTH, WIDTH): 1, (TOKENS, WIDTH, VOCABULARY / 2): 1,
    }  # fmt: skip
    heads = [call.times for call in calls if call.kind == "causal attention"]
    assert heads == [2.0]  # a row of a head: two rows, one of two heads
