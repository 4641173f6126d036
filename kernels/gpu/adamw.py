"""Adam and AdamW in Triton: one pass over a flat run, with the decision to update on the device.

    read      gradient, weights, moments, and the narrow weights if there is a master
    written   weights, moments, narrow weights: 32 bytes an element with an fp32 master, fp32 gradients and bf16 weights

Hyperparameters are fp32 scalars that the host computes in fp64. Roots and quotients are rounded to nearest.

AdamW with moments in 8 bits is one pass that decodes the moments of whole blocks, updates and encodes them:

    read      gradient, weights, codes of both moments
    written   weights, codes of both moments: 16 bytes per element with fp32 weights and gradients

Codes and scales equal those of ``kernels/optim/eight_bit_codes.py``, to the bit for equal moments. A program updates a
few blocks, about ``_ELEMENTS`` numbers.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.gpu.launch_shapes import ceil_div
from engine.kernels.optim.eight_bit_codes import BlockCodes
from engine.kernels.optim.stochastic_rounding import StochasticRounding
from engine.kernels.optim.update_rules import AdamRule

_BLOCK = 1024
_WORD = 1 << 32


@triton.jit
def mix(x):
    """Returns random bits: a hash of each uint32 number in ``x``.

    The PyTorch function in ``kernels/optim/stochastic_rounding.py`` gives equal bits.
    """
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15)
    x = x * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def rounded(values, index, low, high):
    """Rounds fp32 ``values`` stochastically to bf16: to the next number above or below.

    ``index`` (int64) of an element and a 64-bit key in two words, ``low`` and ``high``, determine the random bits.
    """
    bits = mix((index & 0xFFFFFFFF).to(tl.uint32) ^ low.to(tl.uint32, bitcast=True))
    bits = mix(bits ^ (index >> 32).to(tl.uint32) ^ high.to(tl.uint32, bitcast=True))
    own = values.to(tl.int32, bitcast=True)
    carried = ((own + (bits >> 16).to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    finite = (own & 0x7F800000) != 0x7F800000
    return tl.where(finite, carried, values).to(tl.bfloat16)


@triton.jit
def whole_index(own, places, held, along, inner):
    """Maps ``own``, flat indices in a shard, to flat indices in the full parameter.

    The sharded dim has size ``along`` in the parameter, and ``held`` in the shard. ``places`` points to the parameter's
    index for each of the shard's ``held`` indices in this dim; ``inner``: elements per index of this dim.
    """
    line = own // inner
    place = tl.load(places + line % held).to(tl.int64)
    return ((line // held).to(tl.int64) * along + place) * inner + own % inner


@triton.jit(
    do_not_specialize=[
        "begin", "held", "along", "inner", "low", "high", "first_low", "first_high", "second_low", "second_high",
    ]
)  # fmt: skip
def adamw_kernel(
    weights, gradient, first, second, narrow, factor, go, places,
    count, begin, held, along, inner, low, high, first_low, first_high, second_low, second_high,
    decay, first_rest, second_rest, step_size, root_scale, eps,
    DECOUPLED: tl.constexpr, NARROW: tl.constexpr, ROUNDED: tl.constexpr, ROUNDED_MOMENTS: tl.constexpr,
    CUT: tl.constexpr, SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates BLOCK elements of ``weights`` by Adam or AdamW in place, unless the number at ``go`` is 0.

    The gradient is multiplied by the number at ``factor``. NARROW: also writes ``narrow``, the weights in the compute
    dtype. ROUNDED: rounds bf16 weights stochastically, with the random key in ``low`` and ``high``. ROUNDED_MOMENTS:
    also rounds bf16 moments, with the keys from ``first_low`` to ``second_high``. ``begin``: index of the first element
    in the shard; CUT: :func:`whole_index` converts indices to the parameter's. ``decay`` to ``eps``: Adam's constants.
    """
    if tl.load(go) != 0.0:
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        w = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        if NARROW:  # take over weights that the user has written since the last update
            kept = tl.load(narrow + place, mask=inside, other=0.0).to(tl.float32)
            w = tl.where(kept != w.to(narrow.dtype.element_ty).to(tl.float32), kept, w)
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
        m = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
        shrunk = tl.where(decay != 0.0, decay * w, 0.0)  # 0 times infinity would be NaN
        if DECOUPLED:
            w -= shrunk
        else:
            g += shrunk
        m += first_rest * (g - m)
        v += second_rest * (g * g - v)
        w -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * root_scale + eps)
        if ROUNDED:
            if CUT:
                if SMALL:
                    index = whole_index((begin + place).to(tl.int32), places, held, along, inner)
                else:
                    index = whole_index(begin + place, places, held, along, inner)
            else:
                index = begin + place
            tl.store(weights + place, rounded(w, index, low, high), mask=inside)
            if ROUNDED_MOMENTS:
                tl.store(first + place, rounded(m, index, first_low, first_high), mask=inside)
                tl.store(second + place, rounded(v, index, second_low, second_high), mask=inside)
            else:
                tl.store(first + place, m, mask=inside)
                tl.store(second + place, v, mask=inside)
        else:
            tl.store(weights + place, w, mask=inside)
            tl.store(first + place, m, mask=inside)
            tl.store(second + place, v, mask=inside)
            if NARROW:
                tl.store(narrow + place, w.to(narrow.dtype.element_ty), mask=inside)


def adamw(
    updated: tuple[Tensor, Tensor, Tensor, Tensor | None],
    gradient: Tensor,
    decision: tuple[Tensor, Tensor],
    rule: AdamRule,
    step: int,
    rounding: StochasticRounding | None,
) -> None:
    """Launches an Adam or AdamW update of flat tensors, in place.

    Args:
        updated: weights, first moment, second moment, and the weights in the compute dtype or None.
        decision: two fp64 scalars on the device: a factor for the gradient, and a flag that is 0 to skip the update.
        step: result of :meth:`AdamRule.age`, for the bias correction.
        rounding: stochastic rounding of bf16 weights; None: round to nearest.
    """
    weights, first, second, narrow = updated
    count = weights.numel()
    if not count:
        return
    (beta1, beta2), lines = rule.betas, rounding.lines if rounding else None
    adamw_kernel[(ceil_div(count, _BLOCK),)](
        weights, gradient, first, second, narrow, *decision, lines.places if lines else None,
        count, rounding.begin if rounding else 0, *((lines.held, lines.along, lines.inner) if lines else (0, 0, 0)),
        *(word for key in (rounding.keys if rounding else (0, 0, 0)) for word in _words(key)),
        rule.lr * rule.weight_decay if rule.decoupled else rule.weight_decay, 1 - beta1, 1 - beta2,
        rule.lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, rule.eps,
        DECOUPLED=rule.decoupled, NARROW=narrow is not None, ROUNDED=rounding is not None,
        ROUNDED_MOMENTS=rounding is not None and first.itemsize == 2,
        CUT=lines is not None, SMALL=rounding is None or rounding.begin + count + _BLOCK < 1 << 31,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _words(key: int) -> tuple[int, int]:
    """Splits ``key`` into low and high word, each reinterpreted as int32, so that all keys have one type."""
    return tuple((word ^ 1 << 31) - (1 << 31) for word in (key % _WORD, key >> 32))  # type: ignore[return-value]


_ELEMENTS = 1024


@triton.jit
def decoded(codes, scale, place, inside, SIGNED: tl.constexpr):
    """Decodes 8-bit codes of moments at ``codes + place`` [blocks, elements] to fp32.

    ``scale`` [blocks] has one scale per block. ``inside`` masks the codes. SIGNED: the codes have a sign bit.
    """
    LEAST: tl.constexpr = 1016 - 127 if SIGNED else 1016 - 255
    code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
    size = code & 127 if SIGNED else code
    y = tl.where(size > 0, ((size + LEAST) << 20).to(tl.float32, bitcast=True), 0.0)
    if SIGNED:
        y = tl.where(code > 127, -y, y)
    return y * scale[:, None]


@triton.jit
def encoded(x, SIGNED: tl.constexpr):
    """Encodes fp32 moments ``x`` [blocks, elements] to 8-bit codes; returns (codes, one scale per block).

    SIGNED: the codes have a sign bit.
    """
    LARGEST: tl.constexpr = 127 if SIGNED else 255
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < 0x7F800000
    peak = tl.max(tl.where(finite, tl.abs(x), 0.0), axis=1)
    scale = tl.where(peak < 1.1754943508222875e-38, 0.0, peak)
    scale = tl.where(tl.max(bits, axis=1) < 0x7F800000, scale, float("nan"))
    known = tl.where(scale > 0.0, scale, 1.0)
    y = tl.div_rn(tl.where(finite, tl.abs(x), 0.0), known[:, None] + tl.zeros(x.shape, tl.float32))
    y = tl.where(scale[:, None] > 0.0, y, 0.0)
    code = ((y.to(tl.int32, bitcast=True) + (1 << 19)) >> 20) - (1016 - LARGEST)
    code = tl.minimum(tl.maximum(code, 0), LARGEST)
    if SIGNED:
        code = tl.where(y >= 0.625 / 65536, tl.maximum(code, 1), code)
        return (code | tl.where((x < 0.0) & (code > 0), 128, 0)).to(tl.uint8), scale
    return tl.where(y > 0.0, tl.maximum(code, 1), code).to(tl.uint8), scale


@triton.jit
def adamw_8bit_kernel(
    weights, gradient, first, first_scales, second, second_scales, count,
    decay, first_rest, second_rest, step_size, root_scale, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Makes an AdamW update, in place, of ROWS blocks of BLOCK elements with 8-bit moments.

    It decodes the moments, updates moments and weights in fp32, and encodes the new moments. ``decay`` to
    ``eps``: Adam's constants for this step.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, there = place < count, row * BLOCK < count
    first_scale = tl.load(first_scales + row, mask=there, other=0.0)
    second_scale = tl.load(second_scales + row, mask=there, other=0.0)
    w = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
    m = decoded(first, first_scale, place, inside, True)
    v = decoded(second, second_scale, place, inside, False)
    w -= tl.where(decay != 0.0, decay * w, 0.0)  # 0 times infinity would be NaN
    m = tl.where(inside, m + first_rest * (g - m), 0.0)
    v = tl.where(inside, v + second_rest * (g * g - v), 0.0)
    w -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * root_scale + eps)
    tl.store(weights + place, w, mask=inside)
    code, scale = encoded(m, True)
    tl.store(first + place, code, mask=inside)
    tl.store(first_scales + row, scale, mask=there)
    code, scale = encoded(v, False)
    tl.store(second + place, code, mask=inside)
    tl.store(second_scales + row, scale, mask=there)


def adamw_8bit(
    weights: Tensor, gradient: Tensor, moments: tuple[BlockCodes, BlockCodes], rule: AdamRule, step: int, block: int
) -> None:
    """Launches an AdamW update, in place, of the flat ``weights`` and their 8-bit ``moments``.

    ``block``: number of elements per scale. ``step``: result of :meth:`AdamRule.age`, for the bias correction.
    """
    count, (beta1, beta2) = weights.numel(), rule.betas
    if not count:
        return
    rows = max(1, _ELEMENTS // block)
    adamw_8bit_kernel[(ceil_div(ceil_div(count, block), rows),)](
        weights, gradient, *moments[0], *moments[1], count,
        rule.lr * rule.weight_decay, 1 - beta1, 1 - beta2,
        rule.lr / (1 - beta1**step), (1 - beta2**step) ** -0.5, rule.eps,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
