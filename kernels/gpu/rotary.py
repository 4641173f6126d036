"""Rotary position embedding in Triton: q and k in one launch, one program per position.

Each of two features that are rotated together has its own cosine and sine:

    y1 = x1 cos1 - x2 sin1      transposed      y1 = x1 cos1 + x2 sin2
    y2 = x2 cos2 + x1 sin2                      y2 = x2 cos2 - x1 sin1

Shape suffixes: B batch, H heads, S positions, D features, R rotated features. Only the features must be contiguous.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import power_of_two

_ELEMENTS = 1024
"""Pairs of features that a program rotates at once."""


@triton.jit
def _load_pairs(x, inside, second: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Loads x1, x2 [HEADS, PAIRS] in fp32; adjacent features are loaded together and split in registers."""
    if INTERLEAVED:
        both = tl.load(x + tl.arange(0, 2 * PAIRS)[None, :], mask=inside, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(both, (HEADS, PAIRS, 2)))
    else:
        x1 = tl.load(x + tl.arange(0, PAIRS)[None, :], mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x + tl.arange(0, PAIRS)[None, :] + second, mask=inside, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _turn_heads(
    x, y, heads, features, x_head, y_head, angles,
    TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one position; ``x`` and ``y`` point to its first head."""
    cos1, sin1, cos2, sin2 = angles
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)[None, :]
        turned = column < TURNED
    else:
        column = tl.arange(0, PAIRS)[None, :]
        turned = column < TURNED // 2
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        inside = (head < heads) & turned
        x1, x2 = _load_pairs(x + head * x_head, inside, TURNED // 2, INTERLEAVED, HEADS, PAIRS)
        if TRANSPOSED:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
        place = y + head * y_head + column
        if INTERLEAVED:
            both = tl.reshape(tl.join(y1, y2), (HEADS, 2 * PAIRS))
            tl.store(place, both.to(y.dtype.element_ty), mask=inside)
        else:
            tl.store(place, y1.to(y.dtype.element_ty), mask=inside)
            tl.store(place + TURNED // 2, y2.to(y.dtype.element_ty), mask=inside)
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
    """Applies rotary embeddings to all heads of ``q`` and ``k`` at one position; writes ``q_out`` and ``k_out``.

    The grid is (positions, batch). The first TURNED features of each head are rotated; the others, at most REST, are
    copied. TRANSPOSED: rotates backwards. ``angle_batch`` to ``ko_row``: strides.
    """
    row = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    place = batch * angle_batch + row * TURNED
    inside = (tl.arange(0, 2 * PAIRS) < TURNED if INTERLEAVED else tl.arange(0, PAIRS) < TURNED // 2)[None, :]
    cos1, cos2 = _load_pairs(cos + place, inside, TURNED // 2, INTERLEAVED, 1, PAIRS)
    sin1, sin2 = _load_pairs(sin + place, inside, TURNED // 2, INTERLEAVED, 1, PAIRS)
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
    """Applies rotary embeddings to ``given``, (q, k), and writes the results to ``out``.

    q and k are [B, H, S, D]: batch, heads, positions, features of a head.

    Args:
        angles: contiguous (cos, sin), [B or 1, S, R]; the first R features are rotated.
        interleaved: True: adjacent features are pairs; False: features i and i + R / 2 are pairs.
        transposed: True: rotates backwards, for gradients.
    """
    (q_BHSD, k_BHSD), (cos_BSR, sin_BSR) = given, angles
    batch, _, length, features = q_BHSD.shape
    turned = cos_BSR.shape[2]
    pairs = power_of_two(turned // 2)
    rest = power_of_two(features - turned) if features > turned else 0
    heads = max(1, min(_ELEMENTS // max(pairs, rest // 2), power_of_two(q_BHSD.shape[1])))
    strides = [size for x in (*given, *out) for size in x.stride()[:3]]
    if q_BHSD.numel() or k_BHSD.numel():
        rotary_kernel[length, batch](
            *given, cos_BSR, sin_BSR, *out, q_BHSD.shape[1], k_BHSD.shape[1], features,
            0 if cos_BSR.shape[0] == 1 else length * turned, *strides,
            TURNED=turned, INTERLEAVED=interleaved, TRANSPOSED=transposed,
            REST=rest, HEADS=heads, PAIRS=pairs, num_warps=4,
        )  # fmt: skip
