"""Keys of encoded traffic: what is taken, and one sentence for each mistake."""

from typing import Any

import pytest

from engine.config import load_config
from engine.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}


def test_keys_of_deepspeed_are_honored() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = load_config(BATCH | {"zero_optimization": zero})
    assert found.zero_optimization.zero_quantized_weights and found.zero_optimization.zero_quantized_gradients
    assert (found.zero_optimization.zero_quantized_weights_bits, found.notes) == (8, ())


@pytest.mark.parametrize(
    ("zero", "sentence"),
    [
        ({"zero_quantized_weights_bits": 2}, "zero_quantized_weights_bits: 2 is not a number of bits; give 8 or 4."),
        (
            {"zero_quantized_gradients_bits": 6},
            "zero_quantized_gradients_bits: 6 is not a number of bits; give 8, 4 or 1.",
        ),
        (
            {"zero_quantized_gradients": True, "zero_quantized_gradients_bits": 1},
            "zero_quantized_gradients_bits: 1 without zero_gradient_error_feedback, so what signs leave out",
        ),
        ({"zero_quantized_block_size": 100}, "zero_quantized_block_size: 100 is not a block size; give 64, 128"),
        ({"zero_quantized_gradients": True, "stage": 0}, "zero_quantized_gradients: true with stage 0: only stages 1"),
        ({"zero_quantized_weights": True, "stage": 0}, "zero_quantized_weights: true with stage 0: only stages 1"),
        ({"zero_quantized_gradients_bits": 4}, "zero_quantized_gradients_bits: 4 without zero_quantized_gradients"),
        ({"zero_quantized_weights_bits": 4}, "zero_quantized_weights_bits: 4 without zero_quantized_weights"),
        ({"zero_gradient_error_feedback": True}, "zero_gradient_error_feedback: true without zero_quantized_gradients"),
    ],
)
def test_mistakes_are_one_sentence(zero: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(BATCH | {"zero_optimization": {"stage": 1} | zero}, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("node", "tensor", "world", "fits"),
    [
        (2, 1, 4, True), (3, 1, 4, False), (8, 1, 4, True), (2, 2, 8, True), (3, 2, 12, False), (8, 2, 12, False),
        (1, 2, 4, True), (8, 1, 6, True),
    ],
)  # fmt: skip
def test_nodes_have_to_share_data_ranks_alike(node: int, tensor: int, world: int, fits: bool) -> None:
    zero = {"stage": 1, "zero_quantized_gradients": True}
    given = BATCH | {"zero_optimization": zero, "parallel": {"tensor": tensor, "gpus_per_node": node}}
    if fits:
        load_config(given, world)
        return
    with pytest.raises(ConfigError, match=f"parallel.gpus_per_node: {node} does not divide"):
        load_config(given, world)


def test_a_second_run_of_a_step_would_encode_what_the_first_has_left_out() -> None:
    zero = {"stage": 1, "zero_quantized_gradients": True, "zero_gradient_error_feedback": True}
    with pytest.raises(
        ConfigError, match=r"integrity\.rerun: true with zero_optimization\.zero_gradient_error_feedback"
    ):
        load_config(BATCH | {"zero_optimization": zero, "integrity": {"every": 1, "rerun": True}})
