"""Layers of a stream that is cut along the sequence, with rows that travel in pieces, against rows that do not."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.models.decoder import Decoder
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import Overlap, TensorAxis
from tests.parallel.tensor.models import LENGTH, build, tokens
from tests.parallel.tensor.plans import written_plan

EVERYWHERE = Overlap(frozenset({"cpu"}), 1)


def train(axis: TensorAxis, whole: nn.Module, overlap: Overlap) -> tuple[dict[str, Tensor], list[Any]]:
    """Body of a rank: gradients of one microbatch, and the collectives."""
    axis.overlap = overlap
    model = copy.deepcopy(whole)
    apply_plan(model, find_tensor_plan(model, written_plan(model), axis.size, sequence=True), axis, ForwardPatches())
    ids = tokens()
    output = model(ids) if isinstance(model, Decoder) else model(input_ids=ids).logits
    torch.autograd.backward(nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten()))
    grads = {path: p.grad for path, p in model.named_parameters() if p.grad is not None}
    return grads, axis.called  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["decoder", "decoder-tied", "llama-kv2", "gpt2"])
def test_gradients_are_those_of_rows_that_travel_at_once(name: str) -> None:
    assert LENGTH % 4 == 0
    whole = build(name).double()
    plain = run_tensor_ranks(2, lambda axis: train(axis, whole, Overlap(frozenset())))
    pieces = run_tensor_ranks(2, lambda axis: train(axis, whole, EVERYWHERE))
    for (expected, before), (found, after) in zip(plain, pieces, strict=True):
        assert found.keys() == expected.keys()
        for path, grad in expected.items():
            torch.testing.assert_close(found[path], grad, rtol=1e-10, atol=1e-12)
        assert len(after) > len(before), "more and smaller collectives"
        assert sum(_elements(call) for call in after) == sum(_elements(call) for call in before)


def _elements(call: Any) -> int:
    """What travels: of a gather all ranks' parts."""
    size = int(torch.tensor(call.shape).prod())
    return size * 2 if call.op == "all_gather" else size
