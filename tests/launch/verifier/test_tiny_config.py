"""A shrunken configuration: narrow, shallow, and of the same kind."""

from typing import Any

import pytest
import transformers

from engine.launch.verifier.trials import HEAD, VOCABULARY, shrink


def shrunk(config: Any, tensor: int = 2, layers: int = 2) -> Any:
    shrink(config, tensor, layers)
    return config


def test_keys_stay_shared_by_heads_and_widths_follow() -> None:
    config = shrunk(transformers.LlamaConfig(hidden_size=8192, num_attention_heads=64, num_key_value_heads=8))
    assert (config.num_attention_heads, config.num_key_value_heads, config.hidden_size) == (4, 2, 4 * HEAD)
    assert (config.num_hidden_layers, config.vocab_size, config.intermediate_size) == (2, VOCABULARY, 8 * HEAD)


@pytest.mark.parametrize(("before", "after"), [(32, (8, 8)), (1, (8, 1)), (8, (16, 8))])
def test_each_kind_of_attention_stays(before: int, after: tuple[int, int]) -> None:
    config = shrunk(transformers.LlamaConfig(num_attention_heads=32, num_key_value_heads=before), tensor=8)
    assert (config.num_attention_heads, config.num_key_value_heads) == after


def test_experts_and_latent_attention_stay() -> None:
    config = shrunk(transformers.DeepseekV3Config(), tensor=2, layers=4)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.first_k_dense_replace) == (4, 2, 1)
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.v_head_dim) == (16, HEAD, HEAD)


def test_lists_lose_the_layers_that_are_gone_and_nothing_drops() -> None:
    config = shrunk(transformers.GptOssConfig(), layers=4)
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2 and config.sliding_window == 8
    assert config.attention_dropout == 0.0
    dropped = shrunk(transformers.GPT2Config())
    assert (dropped.attn_pdrop, dropped.embd_pdrop, dropped.resid_pdrop) == (0.0, 0.0, 0.0)


def test_tokens_with_a_meaning_are_in_the_vocabulary() -> None:
    config = shrunk(transformers.GPT2Config())
    assert max(config.bos_token_id, config.eos_token_id) == VOCABULARY - 1


def test_a_shallow_model_stays_as_shallow() -> None:
    assert shrunk(transformers.LlamaConfig(num_hidden_layers=1), layers=4).num_hidden_layers == 1
