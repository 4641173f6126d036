"""Blocks of attention: the kernels of GPUs get the arguments of their operators, here on shapes."""

from contextlib import nullcontext

import pytest
import torch

from engine.dry_run.dry_run_rank import shape_mode
from engine.kernels.ops import attention_block
from engine.kernels.ops.attention_block import BlockRule, attend, attend_backward
from engine.planning.activation_memory import LiveStorages

QUERIES, KEYS = 40, 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["all", "causal", "bool", "added"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_kernels_of_gpus_accept_a_block(
    dtype: torch.dtype, form: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_block, "attends_in_blocks", lambda device: True)
    keys = QUERIES if form == "causal" else KEYS
    q, k, v = (
        torch.empty(2, heads, length, 16, dtype=dtype, device="meta")
        for heads, length in ((4, QUERIES), (key_heads, keys), (key_heads, keys))
    )
    masks = {"bool": torch.bool, "added": dtype}
    mask = torch.empty(2, 1, QUERIES, keys, dtype=masks[form], device="meta") if form in masks else None
    rule = BlockRule(0.25, form == "causal", mask)
    out, lse = attend(q, k, v, rule)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype is torch.float32
    grads = attend_backward(out, (q, k, v), (out, lse), rule)
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


def test_half_precision_computes_in_fp32() -> None:
    q, k, v = (torch.randn(1, 2, 33, 8, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attend(q, k, v, BlockRule(0.3, causal=True))
    whole = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=0.3)
    assert out.dtype is torch.float32 and lse.dtype is torch.float32
    assert torch.allclose(out, whole, atol=1e-6)


def peaks(length: int, dtype: torch.dtype, form: str, on_shapes: bool) -> tuple[int, int]:
    """Most live bytes of a block and of its backward, above those of its inputs."""
    rule = BlockRule(0.25, form == "causal", torch.ones(length, length, dtype=torch.bool) if form == "bool" else None)
    width = 8 if form == "narrow" else 16
    with shape_mode() if on_shapes else nullcontext():
        q, k = (torch.zeros(2, heads, length, 16, dtype=dtype) for heads in (4, 2))
        v, grad = (torch.zeros(2, heads, length, width, dtype=dtype) for heads in (2, 4))
    live = LiveStorages()
    with live:
        before = live.mark()
        out, lse = attend(q, k, v, rule)
        forward, before = live.peak - before, live.mark()
        attend_backward(grad, (q, k, v), (out, lse), rule)
        return forward, live.peak - before


@pytest.mark.parametrize("form", ["all", "causal", "bool", "narrow"])
def test_a_block_on_shapes_stores_what_a_block_of_a_cpu_stores(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_block, "_TILE", 1 << 13)
    predicted, measured = (peaks(96, torch.float32, form, on_shapes) for on_shapes in (True, False))
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_a_block_without_a_mask_grow_as_its_length(dtype: torch.dtype) -> None:
    shorter, longer = (peaks(length, dtype, "causal", on_shapes=True) for length in (2048, 4096))
    assert [2 * each for each in shorter] == pytest.approx(longer, rel=1e-3)
