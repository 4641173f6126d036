"""Blocks of Hugging Face, unchanged, on shown parameters: what they compute, and what they send."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from engine.errors import EngineError
from tests.parallel.tensor.global_tensor.rig import Given, compare, normal, run

B, T, C, HEADS = 2, 8, 24, 4
COLUMN, ROW, THIRDS = {0: "blocks"}, {1: "blocks"}, {0: "thirds"}


class Case(NamedTuple):
    """A block, how its parameters are cut by the ends of their names, and what it is called with."""

    block: nn.Module
    cuts: dict[str, dict[int, str]]
    options: dict[str, Any]


def gpt2(ranks: int) -> Case:
    """Fused thirds in Conv1D, which folds batch and sequence."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(n_embd=C, n_head=HEADS, n_layer=1, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)
    config._attn_implementation = "sdpa"
    cuts = {"c_attn.weight": {1: "thirds"}, "c_attn.bias": THIRDS, "c_proj.weight": COLUMN}
    block: nn.Module = GPT2Block(config, 0)  # type: ignore[no-untyped-call]
    return Case(block, cuts | {"c_fc.weight": ROW, "c_fc.bias": COLUMN}, {})


def _gated() -> dict[str, dict[int, str]]:
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    return {f"{name}.weight": COLUMN for name in names} | {"o_proj.weight": ROW, "down_proj.weight": ROW}


def llama(ranks: int) -> Case:
    """Key heads that query heads share, and over four ranks ranks share them too."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=C, num_attention_heads=HEADS, num_key_value_heads=2, intermediate_size=48)
    config._attn_implementation = "sdpa"
    rotary = LlamaRotaryEmbedding(config)(torch.zeros(1).double(), torch.arange(T)[None])
    shared = {f"{name}_proj.weight": {0: "pairs"} for name in "kv"} if ranks == 4 else {}
    options = {"position_embeddings": rotary, "attention_mask": None}
    return Case(LlamaDecoderLayer(config, 0), _gated() | shared, options)


def olmo2(ranks: int) -> Case:
    """A norm over all heads together."""
    from transformers import Olmo2Config
    from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding

    config = Olmo2Config(hidden_size=C, num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=48)
    config._attn_implementation = "eager"
    rotary = Olmo2RotaryEmbedding(config)(torch.zeros(1).double(), torch.arange(T)[None])
    norms = {"q_norm.weight": COLUMN, "k_norm.weight": COLUMN}
    options = {"position_embeddings": rotary, "attention_mask": None}
    return Case(Olmo2DecoderLayer(config, 0), _gated() | norms, options)


def t5(ranks: int) -> Case:
    """A table of biases for heads."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Block

    config = T5Config(d_model=C, d_kv=6, num_heads=HEADS, d_ff=48, num_layers=1, dropout_rate=0.0)
    config._attn_implementation = "eager"
    cuts = {f"{name}.weight": COLUMN for name in ("q", "k", "v", "wi")} | {"o.weight": ROW, "wo.weight": ROW}
    block = T5Block(config, has_relative_attention_bias=True, layer_idx=0)
    return Case(block, cuts | {"relative_attention_bias.weight": ROW}, {})


def bloom(ranks: int) -> Case:
    """Its activation is an autograd.Function."""
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomBlock, build_alibi_tensor

    config = BloomConfig(hidden_size=C, n_head=HEADS, n_layer=1, hidden_dropout=0, attention_dropout=0)
    names = ("query_key_value.weight", "query_key_value.bias", "dense_h_to_4h.weight", "dense_h_to_4h.bias")
    cuts = {name: COLUMN for name in names} | {"attention.dense.weight": ROW, "dense_4h_to_h.weight": ROW}
    mask = torch.zeros(B, 1, T, T, dtype=torch.float64)
    alibi = build_alibi_tensor(torch.ones(B, T), HEADS, torch.float64)
    return Case(BloomBlock(config, layer_idx=0), cuts, {"alibi": alibi, "attention_mask": mask})


def prepared(case: Case, cut: bool) -> tuple[Callable[..., Any], dict[str, Given]]:
    """A program of the stream and all parameters, in 64 bits."""
    block = case.block.double().train()
    tensors = {"x": Given(normal(B, T, C), {1: "blocks"} if cut else None)}
    for seed, (name, parameter) in enumerate(block.named_parameters()):
        found = next((how for end, how in case.cuts.items() if name.endswith(end)), None)
        tensors[name] = Given(normal(*parameter.shape, seed=seed) * 0.2, found, True)

    def program(x: Tensor, **parameters: Tensor) -> Any:
        out = functional_call(deepcopy(block), parameters, (x,), case.options)
        return out[0] if isinstance(out, tuple) else out

    return program, tensors


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [gpt2, llama, olmo2, t5])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block(make: Callable[[int], Case], ranks: int, sequence: bool) -> None:
    program, tensors = prepared(make(ranks), sequence)
    found = compare(program, tensors, ranks, sequence, bound=1e-5)  # some of them compute in 32 bits
    assert not found[0].gathers
    sent = [call.op for call in found[0].called if call.shape[-1:] != (1,)]
    if sequence:
        assert sorted(sent) == ["all_gather"] * 4 + ["reduce_scatter"] * 4
        assert found[0].partial == {name for name, one in tensors.items() if one.cut is None}
    else:
        assert sent == ["all_reduce"] * 4 and not found[0].partial


def test_a_block_with_an_autograd_function_is_refused() -> None:
    program, tensors = prepared(bloom(2), False)
    with pytest.raises(EngineError, match=r"^autograd.Function GeLUFunction"):
        run(program, tensors, 2)
