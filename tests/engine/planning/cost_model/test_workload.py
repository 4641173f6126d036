"""Sizes of models and what follows from them, counted by hand."""

import pytest

from engine.planning.cost_model.workload import CutAmount, DecoderShape, Product, decoder_shape_of, is_model_config

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "intermediate_size": 14336,
}  # fmt: skip


def test_a_llama_of_8b() -> None:
    shape = decoder_shape_of(LLAMA)
    assert shape is not None and shape.gated and not shape.tied
    work = shape.workload()
    block = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert work.block_parameters == block
    assert work.parameters == 32 * block + 2 * 4096 * 128256  # 8.03e9 without its norms
    attention = 4 * 4096 * 8192
    assert work.flops_of_token() == 3 * (32 * (2 * block + attention) + 2 * 4096 * 128256)


def test_what_gpt_2_calls_its_sizes() -> None:
    found = decoder_shape_of(
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_ctx": 9}
    )
    assert found == DecoderShape(layers=12, width=768, heads=12, vocabulary=50257, context=9, tied=True)


@pytest.mark.parametrize(
    "change", [{"model_type": "mixtral"}, {"hidden_size": None}, {"num_hidden_layers": "x"}], ids=str
)
def test_other_blocks_have_no_closed_form(change: dict[str, object]) -> None:
    assert decoder_shape_of(LLAMA | change) is None


def test_a_configuration_of_a_run_is_no_model() -> None:
    assert is_model_config(LLAMA) and not is_model_config({"train_batch_size": 8}) and not is_model_config([])


def test_tensor_ranks_share_what_is_cut() -> None:
    assert CutAmount(8.0, 4.0).on(2, sequence=False) == 8 and CutAmount(8.0, 4.0).on(2, sequence=True) == 6
    assert Product(64, 32, "inner").narrow(4) == 16 and Product(64, 32, "outer").narrow(4) == 8
    assert Product(64, 32, "none").narrow(4) == 32
