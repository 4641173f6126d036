"""Tensors on the wire: protobuf messages from and to arrays, dense or sparse, with their sizes checked first."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Final

import numpy as np

from engine.serving.bookkeeping.entry import RequestRefusedError
from engine.serving.commands import Array
from engine.serving.wire.messages import message_class

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
_DTYPES: Final[Mapping[int, Any]] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32, BFLOAT16: np.uint16}
MOST_ELEMENTS = 1 << 24
"""Maximum elements of one tensor, sparse ones counted in full."""
EMPTY_TOKEN, EMPTY_LOGPROB = 0, -99999.0
"""Cell of a table of the most probable tokens at a position that has none."""


def array_from(message: Any, name: str) -> Array:
    """Returns the protobuf tensor ``message``, dense or sparse, as a dense fp32 or int64 array.

    ``name`` is the tensor's name in errors.

    Raises:
        RequestRefusedError: 400, bytes and shape do not match; 413, the tensor has too many elements.
    """
    dtype, what = _DTYPES.get(message.dtype), f"tensor {name[:60]!r}"
    if dtype is None:
        raise RequestRefusedError(f"{what} has the dtype {message.dtype}; give fp32, int64, int32 or bf16.")
    shape = tuple(message.shape)
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise RequestRefusedError(f"{what} has the shape {shape[:4]}; give [n] or [n, k].")
    if prod(shape) > MOST_ELEMENTS:
        raise RequestRefusedError(f"{what} has {prod(shape):,} elements; give at most {MOST_ELEMENTS:,}.", 413)
    kind = message.WhichOneof("encoding")
    if kind == "sparse_csr":
        return _dense(message.sparse_csr, np.dtype(dtype), shape, name)
    flat = _values(message.dense, np.dtype(dtype), name)
    if not shape:
        return flat
    if flat.size != prod(shape):
        raise RequestRefusedError(f"{what} has {flat.size:,} values and the shape {list(shape)}; make them equal.")
    return flat.reshape(shape)


def _values(data: bytes, dtype: Any, name: str) -> Array:
    if len(data) % dtype.itemsize:
        raise RequestRefusedError(
            f"tensor {name[:60]!r} has {len(data)} bytes, no multiple of {dtype.itemsize}; send whole values."
        )
    flat = np.frombuffer(data, dtype.newbyteorder("<"))
    if dtype == np.uint16:  # bfloat16: the upper half of an fp32
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.int64) if dtype == np.int32 else flat


def _dense(csr: Any, dtype: Any, shape: tuple[int, ...], name: str) -> Array:
    """Returns a sparse matrix in full."""
    values = _values(csr.values, dtype, name)
    starts, columns = (_values(part, np.dtype(np.int64), name) for part in (csr.crow_indices, csr.col_indices))
    is_right = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    if is_right:
        counts = np.diff(starts)
        is_right = bool(starts[0] == 0 and starts[-1] == len(values) and (counts >= 0).all())
    if is_right and len(columns):
        is_right = bool(columns.min() >= 0 and columns.max() < shape[1])
    if not is_right:
        raise RequestRefusedError(
            f"the sparse tensor {name[:60]!r} has indices outside of its shape {list(shape)}; give CSR."
        )
    full = np.zeros(shape, values.dtype)
    full[np.repeat(np.arange(shape[0]), counts), columns] = values
    return full


def batched_tensor(arrays: Sequence[Array]) -> Any:
    """Returns a BatchedTensor message (protobuf) with ``arrays``, one for each datum.

    The arrays' shapes differ in dim 0 only. Floats are sent as fp32, integers as int64.
    """
    dtype = np.float32 if arrays[0].dtype.kind == "f" else np.int64
    parts = [np.ascontiguousarray(array, dtype) for array in arrays]
    offsets = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
    return message_class("BatchedTensor")(
        data=b"".join(part.tobytes() for part in parts),
        offsets=offsets.tobytes(),
        dtype=FLOAT32 if dtype is np.float32 else INT64,
        trailing_shape=arrays[0].shape[1:],
    )


def top_tokens(tokens: Array, logprobs: Array) -> Any:
    """Returns a protobuf message with the k most probable tokens at each of n positions.

    Args:
        tokens: token ids, [n, k].
        logprobs: their log-probabilities, [n, k]; NaN marks an empty cell.
    """
    empty = np.isnan(logprobs)
    return message_class("TopkLogprobs")(
        token_ids=np.where(empty, EMPTY_TOKEN, tokens).astype(np.int32).tobytes(),
        logprobs=np.where(empty, np.float32(EMPTY_LOGPROB), logprobs).astype(np.float32).tobytes(),
        k=tokens.shape[1],
        length=tokens.shape[0],
    )
