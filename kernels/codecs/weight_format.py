"""Formats of frozen weights in 8 or 4 bits: a code per weight, and one fp32 scale per block of a row.

    int8    value = code / 127 * scale      codes -127 .. 127
    nf4     value = book[code] * scale      16 quantiles of the normal distribution (QLoRA, Dettmers et al. 2023)
            scale = max |block|, so that the largest number of a block is exact

Decoded values encode to the same codes: quantization is a projection, in fp32 and in bf16. Blocks are runs of a row,
counted from its beginning, and the last block may be shorter. Rows are independent, so a matrix sharded along any other
dim has the codes of the full matrix; a shard of the columns has the scales of all blocks it overlaps:

    full row       | block 0 | block 1 | bl. 2 |
    rank 0         | block 0 | bl|               scales 0, 1
    rank 1                       |ock 1| bl. 2 |  scales 1, 2

Memory of a matrix, in bytes: codes of all rows (4 bits: two per byte, the first in the low half), then scales [rows,
blocks].

A number that is not finite makes the whole block NaN or infinite. Arithmetic is in fp32.

Shape suffixes: R rows (all leading dims together), C columns, K blocks of a row, L bytes of a row.

:class:`QuantizedWeight` stores codes and scales, and is the decoded matrix for every operation:

    y = x W'     forward    W is dequantized, multiplied, freed;  autograd saves the codes
                 backward   W is dequantized again: dx = dy W

A view (a transpose, a cast) is recorded, and applied to the values when an operation needs them, so that autograd never
saves a matrix of values for backward. One matrix of a stack (experts) can be decoded alone. The weight has no gradient
and is read-only.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from engine.errors import EngineError
from engine.kernels.codecs.block_codec import ENCODED_DTYPES, OPERATOR
from engine.kernels.dispatch import REFERENCE, Kernels, fused_operator

WeightKind = Literal["int8", "nf4"]
AT_ONCE = 1 << 24
"""Maximum elements per step of a computation, which limits temporary fp32 memory."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage format of quantized frozen weights: int8 or nf4 codes, one fp32 scale per ``block`` columns of a row."""

    kind: WeightKind
    block: int
    """Number of columns per scale."""

    @property
    def bits(self) -> int:
        """Bits per code: 8 or 4."""
        return 8 if self.kind == "int8" else 4


@dataclass(frozen=True, kw_only=True)
class QuantizedShape:
    """Shape and format of quantized weights in memory.

    The weights are a matrix, a stack of matrices, or one tensor-parallel rank's shard of either.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    """Shape of the shard."""
    runs: tuple[tuple[int, int], ...] = ()
    """Column ranges [start, stop) of the full matrix in the shard, in order; empty: all columns."""

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dims of ``shape`` except the last."""
        return math.prod(self.shape[:-1])

    @property
    def matrix_rows(self) -> int:
        """Number of rows of one matrix in a stack [matrices, rows, columns]; 1 if ``shape`` is [rows, columns]."""
        return math.prod(self.shape[1:-1])

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Blocks with columns in this shard: (index of the block in an unsharded row, number of its columns here)."""
        block, found = self.format.block, []
        for start, stop in self.runs or ((0, self.shape[-1]),):
            for number in range(start // block, -(-stop // block)):
                found.append((number, min(stop, (number + 1) * block) - max(start, number * block)))
        return tuple(found)

    @cached_property
    def width(self) -> int | None:
        """Number of columns per block in this shard; None if blocks have different numbers of columns."""
        widths = {width for _, width in self.blocks}
        return widths.pop() if len(widths) == 1 else None

    @property
    def row_bytes(self) -> int:
        """Size in bytes of the codes of one row, without its scales."""
        return -(-self.shape[-1] * self.format.bits // 8)

    @property
    def code_bytes(self) -> int:
        """Size in bytes of all codes, rounded up to a multiple of 4."""
        return -(-self.rows * self.row_bytes // _SCALE_BYTES) * _SCALE_BYTES

    @property
    def bytes(self) -> int:
        """Size in bytes of all codes and scales together."""
        return self.code_bytes + self.rows * len(self.blocks) * _SCALE_BYTES


@cache
def normal_book() -> tuple[float, ...]:
    """Returns the 16 values of the NF4 codes, in ascending order, from -1 to 1.

    They are quantiles of the normal distribution, divided by the largest (QLoRA, appendix E).
    """
    tail = (1 / 32 + 1 / 30) / 2
    above, below = (
        [NormalDist().inv_cdf(1 - tail - (0.5 - tail) * step / steps) for step in range(steps)] for steps in (8, 7)
    )
    return tuple(value / above[0] for value in (*(-value for value in below), 0.0, *reversed(above)))


@torch.no_grad()
def block_scales(values: Tensor, shape: QuantizedShape) -> Tensor:
    """Returns the largest absolute value in each row for each block of columns, fp32 [rows, blocks of a row].

    ``shape`` is the layout of ``values``.
    """
    found = torch.empty(shape.rows, len(shape.blocks), dtype=torch.float32, device=values.device)
    values_RC = values.reshape(shape.rows, -1)
    for rows in _slabs(shape, shape.rows):
        sizes_RC = values_RC[rows].float().abs()
        if shape.width is not None:
            found[rows] = sizes_RC.view(-1, len(shape.blocks), shape.width).amax(dim=2)
        else:
            parts = torch.split(sizes_RC, [width for _, width in shape.blocks], dim=1)
            found[rows] = torch.stack([part.amax(dim=1) for part in parts], dim=1)
    return found


@torch.no_grad()
def quantize(values: Tensor, shape: QuantizedShape, scales_RK: Tensor | None = None) -> Tensor:
    """Encodes ``values`` to codes and scales in the memory layout ``shape``; returns one tensor, uint8 [bytes].

    ``scales_RK`` [rows, blocks in ``shape``]: for a shard, the scales of its rows and blocks in the full matrix; None:
    scales are computed from ``values``.
    """
    scales_RK = block_scales(values, shape) if scales_RK is None else scales_RK
    packed = torch.zeros(shape.bytes, dtype=torch.uint8, device=values.device)
    codes_RL, own_RK = _parts(packed, shape)
    own_RK.copy_(scales_RK)
    values_RC = values.reshape(shape.rows, -1)
    for rows in _slabs(shape, shape.rows):
        scale = torch.where(own_RK[rows] > 0, own_RK[rows], 1.0)
        ratios_RC = values_RC[rows].float() / _spread(scale, shape)
        codes_RL[rows] = _encoded(ratios_RC, shape.format.kind)
    return packed


@torch.no_grad()
def dequantize(
    packed: Tensor, shape: QuantizedShape, dtype: torch.dtype, kernels: Kernels = REFERENCE, index: int | None = None
) -> Tensor:
    """Decodes ``packed``, a result of :func:`quantize`, to values in ``dtype``.

    ``index``: decodes only this matrix of a stack; None: all. ``kernels`` selects Triton or PyTorch.
    """
    codes_RL, scales_RK = _parts(packed, shape)
    if index is not None:
        start, count = index * shape.matrix_rows, shape.matrix_rows
        codes_RL, scales_RK = codes_RL.narrow(0, start, count), scales_RK.narrow(0, start, count)
    size = shape.shape if index is None else shape.shape[1:]
    if _fits(packed, shape, dtype, kernels):
        book = _pairs(packed.device)[:16, 0].contiguous()
        made: Tensor = _dequantize(codes_RL, scales_RK, book, dtype, shape.format.bits)
        return made.view(size)
    values = torch.empty(size, dtype=dtype, device=packed.device)
    values_RC = values.view(len(codes_RL), -1)
    for rows in _slabs(shape, len(codes_RL)):
        ratios_RC = _decoded(codes_RL[rows], shape)
        values_RC[rows] = ratios_RC * _spread(scales_RK[rows], shape)
    return values


def _fits(packed: Tensor, shape: QuantizedShape, dtype: torch.dtype, kernels: Kernels) -> bool:
    whole = shape.width == shape.format.block and packed.numel() > 0 and dtype in ENCODED_DTYPES
    # the traffic codec moves bytes the same way, so both follow its measured choice
    return whole and kernels.replaces(packed.device) and kernels.triton(OPERATOR, packed, shape.shape[-1])


@fused_operator("trine::dequantize")
def _dequantize(codes: Tensor, scales: Tensor, book: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    """Decodes values [R, C] from codes [R, L] and scales [R, K] of whole blocks."""
    from engine.kernels.gpu.codecs import launch_dequantize

    out = torch.empty(codes.shape[0], codes.shape[1] * 8 // bits, dtype=dtype, device=codes.device)
    launch_dequantize(codes, scales, book, out, bits)
    return out


@_dequantize.register_fake
def _(codes: Tensor, scales: Tensor, book: Tensor, dtype: torch.dtype, bits: int) -> Tensor:
    return codes.new_empty(codes.shape[0], codes.shape[1] * 8 // bits, dtype=dtype)


def _encoded(ratios_RC: Tensor, kind: WeightKind) -> Tensor:
    if kind == "int8":
        return (ratios_RC * 127).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    book = normal_book()
    middles = [(low + high) / 2 for low, high in pairwise(book)]
    codes = torch.bucketize(ratios_RC, torch.tensor(middles, device=ratios_RC.device), out_int32=True).to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | codes[:, 1::2].bitwise_left_shift(4)


def _decoded(codes_RL: Tensor, shape: QuantizedShape) -> Tensor:
    """Decodes ratios between -1 and 1, fp32 [R, C]."""
    if shape.format.kind == "int8":
        return codes_RL.view(torch.int8).float().div_(127)
    pairs_RC = torch.nn.functional.embedding(codes_RL.int(), _pairs(codes_RL.device)).view(codes_RL.shape[0], -1)
    return pairs_RC[:, : shape.shape[-1]]


@cache
def _pairs(device: torch.device) -> Tensor:
    """Returns the two values of every byte, [256, 2]; cached, because a copy to a GPU waits for its queue."""
    book = normal_book()
    return _table([[book[byte % 16], book[byte // 16]] for byte in range(256)], device)


@cache
def _widths(blocks: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    return _table([width for _, width in blocks], device)


def _table(values: Sequence[Any], device: torch.device) -> Tensor:
    """Returns a tensor for all later calls, independent of the first call's modes."""
    with _disable_current_modes(), torch.inference_mode(False):
        return torch.tensor(values, device=device)


def _parts(packed: Tensor, shape: QuantizedShape) -> tuple[Tensor, Tensor]:
    """Returns (codes [R, L], scales [R, K]) as views of the bytes of a matrix."""
    codes = packed[: shape.rows * shape.row_bytes].view(shape.rows, shape.row_bytes)
    return codes, packed[shape.code_bytes :].view(torch.float32).view(shape.rows, len(shape.blocks))


def _spread(scales_RK: Tensor, shape: QuantizedShape) -> Tensor:
    """Returns the scale of every column, [R, C]."""
    if shape.width is not None:
        return scales_RK.unsqueeze(2).expand(-1, -1, shape.width).reshape(scales_RK.shape[0], -1)
    widths_K = _widths(shape.blocks, scales_RK.device)
    return scales_RK.repeat_interleave(widths_K, dim=1, output_size=shape.shape[-1])


def _slabs(shape: QuantizedShape, rows: int) -> Iterator[slice]:
    """Yields runs of rows with about ``AT_ONCE`` elements."""
    step = max(1, AT_ONCE // max(1, shape.shape[-1]))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


_aten = torch.ops.aten
_VIEWS = frozenset({
    _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.view.default, _aten._unsafe_view.default,
    _aten.expand.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten._to_copy.default,
})  # fmt: skip
_SAME = frozenset({_aten.detach.default, _aten.alias.default})
_SET = _aten.set_.source_Tensor
View = Callable[[Tensor], Tensor]


class QuantizedWeight(Tensor):
    """Read-only tensor for frozen quantized weights, which stores only codes and scales.

    It has the shape and ``dtype`` of the decoded weights, and is decoded for each operation except views and casts.
    """

    packed: Tensor
    """Codes and scales, uint8 [bytes]."""
    form: QuantizedShape
    held: tuple[torch.dtype, Kernels]
    """Dtype before views and casts are applied, and the kernels that decode."""
    views: tuple[View, ...]
    """Functions applied to the decoded values, in order."""
    number: int | None
    """Index of the matrix in a stack; None: the whole stack."""
    _like: Tensor
    """A meta tensor with shape and dtype of the result of all ``views``."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, packed: Tensor, form: QuantizedShape, held: tuple[torch.dtype, Kernels], like: Tensor,
        views: tuple[View, ...] = (),
    ) -> "QuantizedWeight":  # fmt: skip
        """Makes a tensor with the shape and dtype of ``like``, without memory."""
        self: QuantizedWeight = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=packed.device, storage_size=0
        )
        self.packed, self.form, self.held, self._like, self.views, self.number = packed, form, held, like, views, None
        return self

    @classmethod
    def of(
        cls, packed: Tensor, form: QuantizedShape, dtype: torch.dtype, kernels: Kernels = REFERENCE
    ) -> "QuantizedWeight":
        """Returns a weight that decodes ``packed`` to ``dtype``.

        ``packed``: codes and scales in the memory layout ``form``. ``kernels`` selects Triton or PyTorch for
        the decoding.
        """
        with _disable_current_modes():
            like = torch.empty(form.shape, dtype=dtype, device="meta")
        made = cls(packed, form, (dtype, kernels), like)
        made._is_param = True  # for isinstance(made, nn.Parameter) in code around layers
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        weight = args[0] if args else None
        if isinstance(weight, cls):
            if func in _SAME:
                return weight._with(weight._like, weight.views)
            if func in _VIEWS and kwargs.get("device") is None:
                return weight._viewed(func, args[1:], kwargs)
            if func is _aten.select.int and args[1] == 0 and weight.ndim == 3 and not weight.views:
                return weight._matrix(args[2])
            if func is _aten._to_copy.default and kwargs["device"].type == "meta":
                return torch.empty_like(weight._like, dtype=kwargs.get("dtype"))
        if func is _SET and args[0] is args[1]:  # as torch.nn.utils.parametrize does
            return weight
        _refuse_writes(func, args)
        args, kwargs = tree_map_only(cls, cls.dequantized, (args, kwargs))
        return func(*args, **kwargs)

    def dequantized(self) -> Tensor:
        """Returns the decoded values as a plain tensor in new memory."""
        values = dequantize(self.packed, self.form, *self.held, self.number)
        for view in self.views:
            values = view(values)
        return values

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "QuantizedWeight":
        def view(values: Tensor) -> Tensor:
            made: Tensor = func(values, *args, **kwargs)
            return made

        with _disable_current_modes():
            like = view(self._like)
        return self._with(like, (*self.views, view))

    def _matrix(self, index: int) -> "QuantizedWeight":
        """Returns one matrix of a stack, such as an expert's, without decoding the others."""
        with _disable_current_modes():
            made = self._with(self._like.select(0, index), ())
        made.number = index % len(self._like)
        return made

    def _with(self, like: Tensor, views: tuple[View, ...]) -> "QuantizedWeight":
        made = QuantizedWeight(self.packed, self.form, self.held, like, views)
        made.number = self.number
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantizedWeight({self.form.format.kind}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _refuse_writes(func: Any, args: tuple[Any, ...]) -> None:
    for argument, given in zip(func._schema.arguments, args, strict=False):
        if argument.is_write and isinstance(given, QuantizedWeight):
            raise EngineError(
                f"{func._schema.name} was called to change a frozen weight of shape {list(given.shape)}, but "
                f"quantize_frozen has stored it in {given.form.format.kind}, which is read-only; change the weight "
                "before engine.initialize, or add its name to quantize_frozen.skip."
            )
