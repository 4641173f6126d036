"""An operation on meta tensors of a known form gives what it gave the first time, and counts the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.parallel.trace import operation_meter
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.operation_meter import META, OperationMeter
from engine.parallel.trace.tracer import trace_model
from engine.program.batch import call_model
from engine.program.loss import find_loss
from tests import models


def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def attention(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


OPERATIONS: dict[str, Callable[[], Any]] = {
    "product": lambda: meta(3, 4) @ meta(4, 5),
    "transposed": lambda: meta(4, 3).t() @ meta(4, 5),
    "sum": lambda: meta(3, 4).sum(1, keepdim=True),
    "broadcast": lambda: meta(3, 1, 4) + meta(2, 1),
    "integer and float": lambda: meta(3, dtype=torch.int64) * 2.0,
    "integers": lambda: meta(3, dtype=torch.int64) * 2,
    "strided": lambda: meta(3, 4).t().exp(),
    "several results": lambda: meta(3, 4).max(1),
    "a list of results": lambda: torch.split(meta(6, 4), 2),
    "norm": lambda: functional.layer_norm(meta(3, 4), (4,), meta(4), meta(4)),
    "attention": lambda: attention(meta(2, 2, 5, 4)),
    "dropout": lambda: functional.dropout(meta(3, 4), 0.5),
    "convolution": lambda: functional.conv1d(meta(2, 3, 8), meta(4, 3, 3)),
    "cast": lambda: meta(3, 4).to(torch.bfloat16),
}


def facts(result: Any) -> list[tuple[Any, ...]]:
    tensors = [result] if isinstance(result, Tensor) else result
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes(), t.requires_grad) for t in tensors]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_second_time_is_as_the_first(name: str) -> None:
    run, expected = OPERATIONS[name], facts(OPERATIONS[name]())
    with OperationMeter() as meter:
        assert facts(run()) == expected
        flops, draws, meter.flops, meter.draws = meter.flops, meter.draws, 0, False
        assert facts(run()) == expected
    assert (meter.flops, meter.draws) == (flops, draws)
    assert (flops > 0) == (name in ("product", "transposed", "attention", "convolution"))
    assert draws == (name == "dropout")


def test_results_are_separate_tensors() -> None:
    x = meta(3, 4)
    with OperationMeter():
        first, second = x.exp(), x.exp()
        first.resize_(7)
    assert first is not second and second.shape == (3, 4)
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_constants_that_are_equal_but_of_another_type_are_other_forms() -> None:
    x = meta(3, dtype=torch.int64)
    with OperationMeter():
        assert [(x * factor).dtype for factor in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_the_default_dtype_is_part_of_a_form() -> None:
    x = meta(3, dtype=torch.int64)
    with OperationMeter():
        before = (x * 1.5).dtype
        torch.set_default_dtype(torch.float64)
        try:
            after = (x * 1.5).dtype
        finally:
            torch.set_default_dtype(torch.float32)
    assert (before, after) == (torch.float32, torch.float64)


def test_what_is_written_and_shared_runs_each_time() -> None:
    x = meta(3, 4)
    with OperationMeter():
        for _ in range(2):
            assert x.add_(1) is x
            assert x.view(12).untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata


def test_real_tensors_are_computed() -> None:
    with OperationMeter():
        assert [float((torch.ones(()) * number).exp().log().round()) for number in (1, 2)] == [1.0, 2.0]


def test_gradients_pass_through_known_results() -> None:
    weight = nn.Parameter(meta(4, 4))
    with OperationMeter():
        grads = [torch.autograd.grad((meta(3, 4) @ weight).sum(), weight)[0] for _ in range(2)]
    assert [grad.shape for grad in grads] == [weight.shape, weight.shape]


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "crossing", "nano"])
def test_a_trace_is_the_same_without_known_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> ModelTrace:
        model, batch = getattr(models, name)(), models.batches_for(name, 4)[0]
        return trace_model(model, lambda: find_loss(call_model(model, batch), batch, None).sum)

    known = traced()
    monkeypatch.setattr(operation_meter, "_is_functional", lambda func: False)
    computed = traced()
    assert known.values == computed.values
    assert [(call.flops, call.inputs, call.output) for call in known.calls] == [
        (call.flops, call.inputs, call.output) for call in computed.calls
    ]
    assert [entry.flops for entry in known.glue] == [entry.flops for entry in computed.glue]
