"""Attention as models write it, on parts."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.parallel.tensor.global_tensor.rig import Given, compare, normal

B, T, S, C, HEADS = 2, 8, 12, 24, 4
RANKS = (2, 4)


def given(*shape: int, cut: dict[int, str] | None = None, seed: int = 0, parameter: bool = True) -> Given:
    """A parameter."""
    return Given(normal(*shape, seed=seed) * 0.3, cut, parameter)


def x(length: int = T, cut: dict[int, str] | None = None) -> Given:
    """The stream."""
    return Given(normal(B, length, C), cut)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_attention_of_torch_runs_on_heads_apart(ranks: int) -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    heads = {name: given(B, HEADS, T, C, cut={1: "blocks"}, seed=seed) for seed, name in enumerate("qkv")}
    found = compare(program, heads, ranks)
    assert not found[0].called and not found[0].gathers


def fused() -> dict[str, Given]:
    """Queries, keys and values in thirds, and what leads out."""
    return {
        "w": given(3 * C, C, cut={0: "thirds"}), "b": given(3 * C, cut={0: "thirds"}),
        "out": given(C, C, cut={1: "blocks"}), "bias": given(C),
    }  # fmt: skip


def nano(x: Tensor, w: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """NanoGPT's, with flash attention."""
    q, k, v = torch.split(functional.linear(x, w, b), C, dim=2)
    q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in (q, k, v))
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
    return x + functional.linear(y.transpose(1, 2).contiguous().view(B, T, C), out, bias)


def written_out(x: Tensor, w: Tensor, b: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """NanoGPT's, without."""
    q, k, v = torch.split(functional.linear(x, w, b), C, dim=2)
    k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
    q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
    v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(torch.tril(torch.ones(T, T)).view(1, 1, T, T) == 0, float("-inf"))
    y = functional.dropout(functional.softmax(scores, dim=-1), 0.0) @ v
    return x + functional.linear(y.transpose(1, 2).contiguous().view(B, T, C), out, bias)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("program", [nano, written_out])
@pytest.mark.parametrize("sequence", ["whole", "from the first sum", "from the start"])
def test_attention_of_nanogpt(program: Any, ranks: int, sequence: str) -> None:
    stream = x(cut={1: "blocks"} if sequence == "from the start" else None)
    found = compare(program, {"x": stream, **fused()}, ranks, sequence=sequence != "whole")
    sent = [(call.op, call.label) for call in found[0].called]
    assert not found[0].gathers
    if sequence == "whole":
        assert sent == [("all_reduce", "row outputs"), ("all_reduce", "column inputs")] and not found[0].partial
    elif sequence == "from the start":
        assert sent == [
            ("all_gather", "column inputs"), ("reduce_scatter", "row outputs"),
            ("all_gather", "row outputs"), ("reduce_scatter", "column inputs"),
        ]  # fmt: skip
        assert found[0].partial == {"bias"}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shared", ["uncut", "pairs", "plain"])
@pytest.mark.parametrize("grouped", [True, False])
def test_key_heads_that_several_query_heads_share(ranks: int, shared: str, grouped: bool) -> None:
    groups, size = 2, C // HEADS

    def program(x: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        q = functional.linear(x, q).view(B, T, -1, size).transpose(1, 2)
        k, v = (functional.linear(x, w).view(B, T, groups, size).transpose(1, 2) for w in (k, v))
        if not grouped:
            k, v = (
                t[:, :, None].expand(B, groups, HEADS // groups, T, size).reshape(B, HEADS, T, size) for t in (k, v)
            )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return functional.linear(y.transpose(1, 2).reshape(B, T, -1), out)

    cut = {"uncut": {}, "plain": None}.get(shared, {0: shared})
    tensors = {"x": x(), "q": given(C, C, cut={0: "blocks"}), "out": given(C, C, cut={1: "blocks"})}
    tensors |= {name: given(groups * size, C, cut=cut, seed=seed) for seed, name in enumerate("kv", 1)}
    found = compare(program, tensors, ranks)
    assert not found[0].gathers
    if shared != "plain":
        assert [call.label for call in found[0].called] == ["row outputs", "column inputs"]


@pytest.mark.parametrize("ranks", RANKS)
def test_one_key_head_for_all(ranks: int) -> None:
    size = C // HEADS

    def program(x: Tensor, w: Tensor, kv: Tensor, out: Tensor) -> Tensor:
        q = functional.linear(x, w).view(B, T, HEADS, size).transpose(1, 2)
        k, v = torch.split(functional.linear(x, kv), size, dim=-1)
        y = functional.scaled_dot_product_attention(q, k[:, None], v[:, None], is_causal=True)
        return functional.linear(y.transpose(1, 2).flatten(2), out)

    tensors = {"x": x(), "w": given(C, C, cut={0: "blocks"}), "kv": given(2 * size, C, cut={})}
    found = compare(program, tensors | {"out": given(C, C, cut={1: "blocks"})}, ranks)
    assert not found[0].gathers and len(found[0].called) == 2


@pytest.mark.parametrize("ranks", RANKS)
def test_a_relative_bias_of_heads(ranks: int) -> None:
    buckets = (torch.arange(T)[None] - torch.arange(T)[:, None]).clamp(-3, 3) + 3

    def program(x: Tensor, w: Tensor, table: Tensor, out: Tensor) -> Tensor:
        q, k, v = functional.linear(x, w).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        bias = functional.embedding(buckets, table).permute([2, 0, 1]).unsqueeze(0)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += bias
        weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous()
        again = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
        return functional.linear((y + again).view(B, -1, C), out)

    tensors = {"x": x(), "w": given(3 * C, C, cut={0: "thirds"}), "table": given(7, HEADS, cut={1: "blocks"})}
    found = compare(program, tensors | {"out": given(C, C, cut={1: "blocks"})}, ranks, bound=1e-5)
    assert not found[0].gathers and len(found[0].called) == 2


def test_positions_that_are_cut_are_gathered() -> None:
    tensors = {name: Given(normal(B, HEADS, S, 6, seed=seed), {2: "blocks"}) for seed, name in enumerate("qkv")}
    found = compare(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v), tensors, 2)
    assert found[0].gathers == {"scaled_dot_product_attention": 3}


# ---- nn.MultiheadAttention, whose parameters are raw

CASES: dict[str, dict[str, Any]] = {
    "self": {},
    "self, causal": {"is_causal": True, "mask": "float"},
    "self, mask": {"mask": "bool"},
    "self, mask of heads": {"mask": "heads"},
    "self, padding": {"padding": True, "mask": "float"},
    "self, weights": {"need_weights": True, "padding": True},
    "self, weights of heads": {"need_weights": True, "average_attn_weights": False, "mask": "float"},
    "cross": {"cross": True},
    "cross, weights": {"cross": True, "need_weights": True, "padding": True},
    "separate": {"cross": True, "separate": True},
    "unbatched": {"unbatched": True, "mask": "bool"},
    "bias of keys": {"bias_k": True},
}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_multihead_attention(case: str, ranks: int) -> None:
    options: dict[str, Any] = dict(CASES[case])
    cross, separate, bias_k = (options.pop(name, False) for name in ("cross", "separate", "bias_k"))
    module = nn.MultiheadAttention(
        C, HEADS, batch_first=True, kdim=18 if separate else None, vdim=18 if separate else None, add_bias_kv=bias_k,
        dtype=torch.float64,
    )  # fmt: skip
    length = S if cross else T
    masks = {"float": "causal", "bool": "bool", "heads": "heads"}
    call = _call(options, masks, length)

    def program(query: Tensor, memory: Tensor | None = None, **parameters: Tensor) -> Any:
        query = query[0] if options.get("unbatched") else query
        memory = query if memory is None else memory
        return torch.func.functional_call(deepcopy(module), parameters, (query, memory, memory), call)

    tensors = {"query": x()}
    if cross:
        tensors["memory"] = Given(normal(B, S, 18 if separate else C))
    for name, parameter in module.named_parameters():
        tensors[name] = Given(parameter.detach().clone(), _cut_of(name), True)
    with torch.no_grad():
        module.in_proj_bias.normal_()
    found = compare(program, tensors, ranks)
    assert bool(found[0].gathers) == bias_k


def _cut_of(name: str) -> dict[int, str] | None:
    if name.startswith("out_proj"):
        return {1: "blocks"} if name.endswith("weight") else None
    if name.startswith("bias_"):
        return None
    return {0: "thirds" if name.startswith("in_proj") else "blocks"}


def _call(options: dict[str, Any], masks: dict[str, str], length: int) -> dict[str, Any]:
    call: dict[str, Any] = {"need_weights": options.get("need_weights", False)}
    for name in ("is_causal", "average_attn_weights"):
        if name in options:
            call[name] = options[name]
    kind = options.get("mask")
    causal = torch.triu(torch.ones(T, length, dtype=torch.bool), 1)
    if kind == "bool":
        call["attn_mask"] = causal
    elif kind == "float":
        call["attn_mask"] = torch.zeros(T, length, dtype=torch.float64).masked_fill(causal, float("-inf"))
    elif kind == "heads":
        call["attn_mask"] = normal(B * HEADS, T, length)
    if options.get("padding"):
        padding = torch.zeros(B, length)
        padding[0, -2:] = float("-inf")
        call["key_padding_mask"] = padding.double() if kind == "float" else padding < 0
    return call
