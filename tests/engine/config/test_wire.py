"""Keys of activations in fewer bits: what is taken, and one sentence for each mistake."""

from typing import Any

import pytest

from engine.config import WireConfig, load_config
from engine.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}


def test_nothing_is_rounded_unless_it_is_asked_for() -> None:
    assert load_config(BATCH).wire == WireConfig(pipeline="exact", tensor="exact", block_size=256, error_feedback=False)
    given = {"pipeline": "int8", "tensor": "int4", "block_size": 128, "error_feedback": True}
    assert load_config(BATCH | {"wire": given}).wire == WireConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wire", "others", "sentence"),
    [
        ({"pipeline": "int2"}, {}, 'wire.pipeline: "int2" is not a format of numbers; give "exact", "bf16",'),
        ({"tensor": "int8", "block_size": 100}, {}, "wire.block_size: 100 is not a block size; give 64, 128"),
        ({"tensor": "bf16", "block_size": 128}, {}, "wire.block_size: 128 without int8 or int4, so no block has"),
        ({"tensor": "int8", "error_feedback": True}, {}, 'wire.error_feedback: true with pipeline "exact": only'),
        (
            {"pipeline": "int8", "error_feedback": True},
            {"integrity": {"every": 1, "rerun": True}},
            "wire.error_feedback: true with integrity.rerun, and a second run",
        ),
        (
            {"tensor": "int8"},
            {"parallel": {"overlap": "fused"}},
            'wire.tensor: "int8" with parallel.overlap "fused", whose products',
        ),
        ({"tensor": "bf16"}, {"parallel": {"overlap": "chunks"}}, 'wire.tensor: "bf16" with parallel.overlap "chunks"'),
    ],
)
def test_mistakes_are_one_sentence(wire: dict[str, Any], others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BATCH | {"wire": wire} | others)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
