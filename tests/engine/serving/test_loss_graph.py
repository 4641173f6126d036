"""Uploaded losses: calls of an allow-list, with bounded results, and nothing else."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.serving.loss_graph import MOST_NODES, LossGraph
from engine.serving.losses import ServedError


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a node of a graph."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    """Return a reference to a node."""
    return {"ref": name}


def graph(*nodes: dict[str, Any], inputs: tuple[str, ...] = ("logprobs",)) -> LossGraph:
    """Return a loss of ``inputs`` with these nodes."""
    places = [node("placeholder", name, name) for name in inputs]
    return LossGraph(json.dumps({"format": 1, "nodes": [*places, *nodes]}), inputs)


def run(*nodes: dict[str, Any]) -> tuple[Tensor, Any]:
    """Run a loss of log-probabilities alone."""
    return graph(*nodes).run(torch.full((4,), -2.0, requires_grad=True), {})


OUT = node("output", "output", "output", {"tuple": [ref("loss"), {"dict": {"kl:mean": ref("loss")}}]})


def test_a_graph_computes_what_the_function_did() -> None:
    found = graph(
        node("call_function", "ratio", "operator.sub", ref("logprobs"), ref("old")),
        node("call_function", "clipped", "torch.clamp", ref("ratio"), min=-0.5, max={"float": 0.5}),
        node("call_function", "mask", "operator.gt", ref("ratio"), 0),
        node("call_function", "picked", "operator.getitem", ref("clipped"), ref("mask")),
        node("call_method", "loss", "sum", ref("picked")),
        OUT,
        inputs=("logprobs", "old"),
    )
    p = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss, metrics = found.run(p, {"old": torch.tensor([-1.2, -3.0, -1.0])})
    (gradient,) = torch.autograd.grad(loss, p)
    assert loss.item() == pytest.approx(0.7) and gradient.tolist() == [1.0, 0.0, 0.0]
    assert metrics == {"kl:mean": pytest.approx(0.7)}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (node("call_function", "loss", "os.system", "true"), "not on the server's list"),
        (node("call_function", "loss", "torch.load", "/etc/passwd"), "not on the server's list"),
        (node("call_function", "loss", "torch.ops.aten.add", 1, 2), "not on the server's list"),
        (node("call_method", "loss", "backward", ref("logprobs")), "not on the server's list"),
        (node("get_attr", "loss", "weights"), "only calls"),
        (node("call_function", "loss", "torch.add", ref("logprobs"), 1, out=ref("logprobs")), "leave it out"),
        (node("call_function", "loss", "builtins.getattr", ref("logprobs"), "__class__"), "may read"),
        (node("call_function", "loss", "torch.zeros", 1 << 40), "at most"),
        (node("call_method", "loss", "repeat", ref("logprobs"), 1 << 30), "at most"),
        (node("call_function", "loss", "operator.pow", 10, 10**9), "apply it to a tensor"),
        (node("call_function", "loss", "operator.mul", {"tuple": [1]}, 10**12), "apply it to a tensor"),
        (node("call_function", "loss", "torch.sum", ref("later")), "before it is computed"),
        (node("call_function", "loss", "torch.full", [2], 1, dtype={"dtype": "Tensor"}), "no value of a graph"),
        (node("call_function", "loss", "torch.sum", {"code": "1"}), "no value of a graph"),
        (node("call_function", "loss", "torch.matmul", ref("logprobs"), 3), "failed in torch.matmul"),
        (node("call_function", "loss", "torch.exp", ref("logprobs")), "no scalar"),
    ],
)  # fmt: skip
def test_what_a_loss_may_not_do_is_one_sentence(made: dict[str, Any], said: str) -> None:
    with pytest.raises(ServedError, match=said):
        run(made, OUT)


def test_graphs_that_are_none_are_refused_when_they_are_uploaded() -> None:
    for text in ("", "[]", "{}", '{"nodes": [1]}', '{"nodes": [{"op": "output"}]}', "x" * 99):
        with pytest.raises(ServedError, match="no graph"):
            LossGraph(text, ("logprobs",))
    many = [node("call_function", f"n{index}", "torch.exp", ref("logprobs")) for index in range(MOST_NODES + 1)]
    with pytest.raises(ServedError, match="at most"):
        graph(*many)
    with pytest.raises(ServedError, match="no output"):
        run(node("call_method", "loss", "sum", ref("logprobs")))
    with pytest.raises(ServedError, match="needs loss_fn_inputs"):
        graph(OUT, inputs=("logprobs", "old")).run(torch.zeros(1), {})
