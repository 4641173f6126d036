"""Rotary position embedding in Triton: q and k in one launch, one program a position.

Two features that are turned together, with their own cosines and sines:

    y1 = x1 cos1 - x2 sin1      transposed      y1 = x1 cos1 + x2 sin2
    y2 = x2 cos2 + x1 sin2                      y2 = x2 cos2 - x1 sin1

Shape suffixes: B batch, H heads, S positions, D features, R of them turned. Features lie together, all else anywhere.
"""

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 1024
"""Pairs that a program turns at once."""


@triton.jit
def _turn_heads(
    x, y, heads, features, x_head, y_head, angles,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """All heads of one position; ``x`` and ``y`` point to its first head."""
    cos1, sin1, cos2, sin2 = angles
    pair = tl.arange(0, PAIRS)
    first = pair * 2 if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else TURNED // 2)
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < heads) & (pair < TURNED // 2)[None, :]
        x1 = tl.load(x + head * x_head + first[None, :], mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x + head * x_head + second[None, :], mask=inside, other=0.0).to(tl.float32)
        if TRANSPOSED:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
        tl.store(y + head * y_head + first[None, :], y1.to(y.dtype.element_ty), mask=inside)
        tl.store(y + head * y_head + second[None, :], y2.to(y.dtype.element_ty), mask=inside)
        if REST > 0:
            kept = (TURNED + tl.arange(0, REST))[None, :]
            inside = (head < heads) & (kept < features)
            rest = tl.load(x + head * x_head + kept, mask=inside, other=0.0)
            tl.store(y + head * y_head + kept, rest, mask=inside)


@triton.jit
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_heads, k_heads, features, angle_batch,
    q_batch, q_head, q_row, k_batch, k_head, k_row, qo_batch, qo_head, qo_row, ko_batch, ko_head, ko_row,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """One position of one sequence."""
    row = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    inside = pair < TURNED // 2
    place = batch * angle_batch + row * TURNED + (pair * 2 if INTERLEAVED else pair)
    other = place + (1 if INTERLEAVED else TURNED // 2)
    cos1 = tl.load(cos + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin + place, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos + other, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin + other, mask=inside, other=0.0).to(tl.float32)[None, :]
    angles = (cos1, sin1, cos2, sin2)
    _turn_heads(
        q + batch * q_batch + row * q_row, q_out + batch * qo_batch + row * qo_row, q_heads, features, q_head, qo_head,
        angles, TURNED, INTERLEAVED, TRANSPOSED, REST, HEADS, PAIRS,
    )  # fmt: skip
    _turn_heads(
        k + batch * k_batch + row * k_row, k_out + batch * ko_batch + row * ko_row, k_heads, features, k_head, ko_head,
        angles, TURNED, INTERLEAVED, TRANSPOSED, REST, HEADS, PAIRS,
    )  # fmt: skip


def turn(
    given: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], interleaved: bool,
    transposed: bool,
) -> None:  # fmt: skip
    """Write q and k [B, H, S, D], turned by cos and sin [B or 1, S, R], which are contiguous, into ``out``."""
    (q_BHSD, k_BHSD), (cos_BSR, sin_BSR) = given, angles
    batch, _, length, features = q_BHSD.shape
    turned = cos_BSR.shape[2]
    pairs = triton.next_power_of_2(turned // 2)
    rest = triton.next_power_of_2(features - turned) if features > turned else 0
    heads = max(1, min(_ELEMENTS // max(pairs, rest // 2), triton.next_power_of_2(q_BHSD.shape[1])))
    strides = [size for x in (*given, *out) for size in x.stride()[:3]]
    if q_BHSD.numel() or k_BHSD.numel():
        rotary_kernel[length, batch](
            *given, cos_BSR, sin_BSR, *out, q_BHSD.shape[1], k_BHSD.shape[1], features,
            0 if cos_BSR.shape[0] == 1 else length * turned, *strides,
            TURNED=turned, INTERLEAVED=interleaved, TRANSPOSED=transposed,
            REST=rest, HEADS=heads, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
