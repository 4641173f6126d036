"""Two forwards are compared event by event; the first that differs is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.parallel.trace.model_trace import ModelTrace, trace_difference
from engine.parallel.trace.tracer import trace_model
from tests.parallel.pipeline.play import batches_of
from tests.parallel.pipeline.zoo import CASES, Own, run_own

Turn = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Turning(Own):
    """What happens after each block is a function of its number, what went in and came out, and the embedding."""

    turn: Turn

    def trunk(self, x: Tensor) -> Tensor:
        x0 = x
        for i, block in enumerate(self.blocks):
            x = self.turn(i, x, block(x), x0)
        return x


def plain(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return x + y if i % 2 else y


def seen(model: Any, turn: Turn) -> ModelTrace:
    model.turn = turn
    batch = batches_of(CASES["own"], 1)[0]
    return trace_model(model, lambda: run_own(model, batch))


def no_add(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return y if i == 3 else plain(i, x, y, x0)


def one_more(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return y * 2 if i == 0 else plain(i, x, y, x0)


def other_operand(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return x0 + y if i == 3 else plain(i, x, y, x0)


def other_shape(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return (x[:1] + y[:1]).expand_as(x) if i == 1 else plain(i, x, y, x0)


def detached(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return (x + y).detach() if i == 1 else plain(i, x, y, x0)


def double(i: int, x: Tensor, y: Tensor, x0: Tensor) -> Tensor:
    return (x + y).double().float() if i == 5 else plain(i, x, y, x0)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (no_add, "reaches a call of unit 'blocks.4' where it reached add at "),
        (one_more, "reaches mul at "),
        (other_operand, "reaches add at "),
        (other_shape, "reaches __getitem__ at "),
        (detached, "reaches detach at "),
        (double, "reaches double at "),
    ],
)
def test_the_first_event_that_differs_is_named(turn: Turn, said: str) -> None:
    model = Turning()
    before = seen(model, plain)
    assert trace_difference(before, seen(model, plain)) is None
    found = trace_difference(before, seen(model, turn))
    assert found is not None and found.startswith(said)
    if "call" not in said:
        assert f"{__file__}:" in found
    back = trace_difference(seen(model, turn), before)
    assert back is not None and back != found


def test_calls_that_end_early_or_late() -> None:
    case, model = CASES["own"], CASES["own"].build()
    batch = batches_of(case, 1)[0]
    whole = trace_model(model, lambda: run_own(model, batch))
    logits = trace_model(model, lambda: model(batch[:, :-1]))
    assert (
        trace_difference(whole, logits)
        == f"ends where it reached {whole.glue[-2].name} at {whole.glue[-2].place} before"
    )
    assert (trace_difference(logits, whole) or "").startswith("continues with flatten at ")


def test_another_dtype_or_result_is_shown() -> None:
    case, model = CASES["own"], CASES["own"].build()
    batch = batches_of(case, 1)[0]

    def mean(reduction: str) -> ModelTrace:
        def run() -> Any:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction=reduction)

        return trace_model(model, run)

    found = trace_difference(mean("sum"), mean("none"))
    assert found is not None and "which gives torch.float32 (10,) where it gave torch.float32 () before" in found
    model.embed.requires_grad_(False)
    frozen = trace_model(model, lambda: run_own(model, batch))
    model.embed.requires_grad_(True)
    assert trace_difference(trace_model(model, lambda: run_own(model, batch)), frozen) == (
        "reaches a call of unit 'embed', which gives torch.float32 (2, 5, 8) without gradient where it gave "
        "torch.float32 (2, 5, 8) before"
    )
    assert trace_difference(
        trace_model(model, lambda: model(batch)), trace_model(model, lambda: (model(batch), 1))
    ) == ("returns other values than before")


class Clamping(Own):
    """Writes one of its parameters in place, as Gemma 3n does."""

    def trunk(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.weight.data.clamp_(-1.0, 1.0)
        return super().trunk(x)


def test_parameters_that_lie_in_one_flat_tensor_are_still_apart() -> None:
    model = Clamping()
    batch = batches_of(CASES["own"], 1)[0]
    before = trace_model(model, lambda: run_own(model, batch))
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    now = trace_model(model, lambda: run_own(model, batch))
    assert trace_difference(before, now) is None
    assert [glue.updates for glue in now.glue if glue.updates] == [frozenset({"norm.weight"})]
