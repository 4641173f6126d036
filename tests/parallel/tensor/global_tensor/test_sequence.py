"""A residual stream that is cut along the sequence, through two blocks and what stands around them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from engine.errors import EngineError
from engine.parallel.tensor.collectives import COLUMN_INPUTS, slice_of
from engine.parallel.tensor.global_tensor.redistribute import cut_rows, enter_stream, full
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.layers.linear import ColumnLinear
from engine.parallel.tensor.layers.parallel_region import Region
from engine.parallel.tensor.thread_ranks import run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis
from tests.parallel.tensor.global_tensor.rig import Given, compare, normal

B, T, C, HIDDEN, HEADS = 2, 8, 12, 24, 4
Parameters = dict[str, Tensor]


def block(x: Tensor, p: Parameters, n: int) -> Tensor:
    """Pre-norm; attention with a fused weight, a gated perceptron."""
    h = functional.layer_norm(x, (C,), p[f"norm_{n}"], p[f"shift_{n}"])
    q, k, v = torch.split(functional.linear(h, p[f"qkv_{n}"], p[f"qkv_bias_{n}"]), C, dim=-1)
    q, k, v = (t.view(B, T, HEADS, C // HEADS).transpose(1, 2) for t in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
    x = x + functional.dropout(functional.linear(y, p[f"out_{n}"], p[f"out_bias_{n}"]), 0.0)
    h = functional.rms_norm(x, (C,), p[f"norm2_{n}"])
    h = functional.silu(functional.linear(h, p[f"gate_{n}"])) * functional.linear(h, p[f"up_{n}"])
    return x + functional.dropout(functional.linear(h, p[f"down_{n}"]), 0.0)


def model(ids: Tensor, table: Tensor, places: Tensor, **p: Tensor) -> Tensor:
    """Embeddings, two blocks with glue between them, a head and a loss in steps."""
    x = functional.embedding(ids, table) + places
    x = block(x, p, 0)
    x = x * 2.0 - x.detach() / 2
    x = block(x, p, 1)
    logits = functional.linear(functional.layer_norm(x, (C,), p["final"]), p["head"])
    picked = logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1))
    return -picked.mean()


def given() -> dict[str, Given]:
    """All parameters; the stream begins plain."""

    def one(*shape: int, cut: dict[int, str] | None = None) -> Given:
        return Given(normal(*shape, seed=len(found)) * 0.4, cut, True)

    found: dict[str, Given] = {}
    ids = torch.randint(0, 7, (B, T), generator=torch.Generator().manual_seed(1))
    found["ids"] = Given(ids, grad=False)
    found["table"], found["places"] = one(7, C), one(T, C)
    for n in range(2):
        for name in ("norm", "shift", "norm2", "out_bias"):
            found[f"{name}_{n}"] = one(C)
        found[f"qkv_{n}"], found[f"qkv_bias_{n}"] = one(3 * C, C, cut={0: "thirds"}), one(3 * C, cut={0: "thirds"})
        found[f"out_{n}"] = one(C, C, cut={1: "blocks"})
        found[f"gate_{n}"], found[f"up_{n}"] = one(HIDDEN, C, cut={0: "blocks"}), one(HIDDEN, C, cut={0: "blocks"})
        found[f"down_{n}"] = one(C, HIDDEN, cut={1: "blocks"})
    return found | {"final": one(C), "head": one(7, C)}


@pytest.mark.parametrize("ranks", [2, 4])
def test_two_blocks(ranks: int) -> None:
    whole = compare(model, given(), ranks)
    found = compare(model, given(), ranks, sequence=True)
    assert not whole[0].gathers and not whole[0].partial
    assert found[0].gathers == {"gather": 1}
    plain = {"table", "places", "norm_0", "shift_0"}  # the stream is cut from the first sum on
    everywhere = {name for name, one in given().items() if one.cut is None} - {"ids"}
    assert found[0].partial == everywhere - plain
    ops = [call.op for call in found[0].called]
    stream = [call for call in found[0].called if call.label in ("row outputs", "column inputs")]
    assert ops.count("reduce_scatter") == 4 + 3  # sums forward; gradients of cut inputs backward
    assert all(T in call.shape or T // ranks in call.shape for call in stream)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_of_torch(ranks: int, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(
        C, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    rows = {"self_attn.out_proj.weight", "linear2.weight"}
    columns = {"linear1.weight": "blocks", "linear1.bias": "blocks"}
    columns |= {f"self_attn.in_proj_{name}": "thirds" for name in ("weight", "bias")}

    def program(x: Tensor, **parameters: Tensor) -> Any:
        x = functional_call(
            deepcopy(layer), parameters, (x,), {"src_key_padding_mask": (torch.arange(T) > 5).expand(B, T)}
        )
        return functional_call(deepcopy(layer), parameters, (x,))

    tensors = {"x": Given(normal(B, T, C), {1: "blocks"})}
    for name, parameter in layer.named_parameters():
        cut = {1: "blocks"} if name in rows else {0: columns[name]} if name in columns else None
        tensors[name] = Given(parameter.detach() + 0.1 * normal(*parameter.shape), cut, True)
    found = compare(program, tensors, ranks, sequence=True)
    assert not found[0].gathers and found[0].sets == [tensors["x"].sets(ranks)]
    assert found[0].partial == {name for name, one in tensors.items() if one.cut is None}


def test_positions_that_are_picked_out_of_the_stream() -> None:
    def program(x: Tensor, w: Tensor, v: Tensor) -> Any:
        y = x + functional.linear(functional.gelu(functional.linear(x, w)), v)
        return [y[:, -1], y.mean(1), y[:, 1:], y.shape[1] * y]

    tensors = {"x": Given(normal(B, T, C)), "w": Given(normal(HIDDEN, C), {0: "blocks"}, True)}
    tensors["v"] = Given(normal(C, HIDDEN), {1: "blocks"}, True)
    found = compare(program, tensors, 2, sequence=True)
    assert found[0].gathers == {"select": 1}


def test_a_layer_that_is_called_twice_sees_a_cut_stream_twice() -> None:
    def body(axis: TensorAxis) -> tuple[Tensor, Tensor]:
        views = global_context(axis, sequence=True)
        x = normal(B, T, C).requires_grad_()
        weight = nn.Parameter(normal(C, C))
        stream = cut_rows(views, slice_of(x * 1, axis, -2, COLUMN_INPUTS), tuple(x.shape))
        hidden: Any = torch.tanh(functional.linear(torch.tanh(functional.linear(stream, weight)), weight))
        out = full(hidden, "test")
        torch.autograd.backward(out.sum())
        assert views.partial == {weight} and x.grad is not None and weight.grad is not None
        return x.grad, weight.grad

    x, weight = normal(B, T, C).requires_grad_(), normal(C, C).requires_grad_()
    torch.autograd.backward(torch.tanh(torch.tanh(x @ weight.t()) @ weight.t()).sum())
    found = run_tensor_ranks(2, body)
    assert weight.grad is not None
    torch.testing.assert_close(sum(grad for _, grad in found), weight.grad)
    for grad, _ in found:
        torch.testing.assert_close(grad, x.grad)


def test_a_write_in_place_ends_what_was_gathered() -> None:
    def program(x: Any, w: Tensor) -> Any:
        x = x * 1
        return x @ w + x.add_(1.0) @ w

    frozen = Given(normal(C, HIDDEN), {1: "blocks"}, grad=False)
    compare(program, {"x": Given(normal(B, T, C), {1: "blocks"}), "w": frozen}, 2)

    def body(axis: TensorAxis) -> None:
        views = global_context(axis, sequence=True)
        region, given = Region(axis, views), normal(B, T, C).float()
        layers = [ColumnLinear(C, HIDDEN, axis=axis, region=region).requires_grad_(False) for _ in range(2)]
        x: Any = enter_stream(views, given)
        layers[0](x)
        found, wanted = layers[1](x.add_(1.0)), functional.linear(given + 1, layers[1].weight, layers[1].bias)
        torch.testing.assert_close(found, wanted)

    run_tensor_ranks(2, body)


def test_a_write_that_needs_the_whole_stream_names_the_setting_that_helps() -> None:
    def body(axis: TensorAxis) -> str:
        x: Any = enter_stream(global_context(axis, sequence=True), normal(B, T, C))
        with pytest.raises(EngineError) as caught:
            x[:, 0] = 0.0
        return str(caught.value)

    (said,) = set(run_tensor_ranks(2, body))
    assert said.endswith("returns a new tensor, or set parallel.sequence_parallel to false.")
