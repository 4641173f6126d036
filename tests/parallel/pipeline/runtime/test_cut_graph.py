"""A graph that is cut at outputs and goes on behind them has the gradients of the whole graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.step.pipeline_call import Gradients, cut_graph, resume_graph


def stages(weight: Tensor) -> list[Tensor]:
    """Outputs, of which the loss below leaves out the second."""
    hidden = weight.square()
    return [hidden.sin(), hidden * 3, hidden.sum()]


def loss_of(outputs: list[Tensor]) -> Tensor:
    outputs[0].mul_(2)
    return (outputs[0] * torch.arange(3.0)).sum() * outputs[2]


def gradient_of_the_whole() -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    loss_of(stages(weight)).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad


def test_a_cut_graph_has_the_gradients_of_the_whole() -> None:
    weight, arrived, calls = torch.tensor([0.5, 1.0, 2.0], requires_grad=True), list[Tensor | None](), []
    outputs = stages(weight)
    root = resume_graph(outputs, arrived)

    def arrive(gradients: Gradients) -> None:
        arrived[:] = gradients
        calls.append(len(gradients))

    attached = cut_graph([tensor.detach() for tensor in outputs], arrive)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(attached, outputs, strict=True))
    loss_of(list(attached)).backward()  # type: ignore[no-untyped-call]
    assert calls == [3] and arrived[1] is None
    root.backward()  # type: ignore[no-untyped-call]
    found: Any = weight.grad
    assert torch.equal(found, gradient_of_the_whole()) and not arrived


def test_without_gradients_nothing_arrives_behind_the_cut() -> None:
    weight = torch.ones(3, requires_grad=True)
    resume_graph(stages(weight), []).backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None or not weight.grad.any()


def test_an_error_of_the_receiver_is_raised_as_it_is() -> None:
    def refuse(_: Gradients) -> None:
        raise ValueError("mine")

    (attached,) = cut_graph([torch.ones(2)], refuse)
    with pytest.raises(ValueError, match="mine"):
        attached.sum().backward()  # type: ignore[no-untyped-call]
