"""The safetensors format: a length, a JSON header, then the bytes of all tensors in sequence. Independent of torch.

    0         8                    page                              size
    | length | {"name": ...}  ... | tensor | tensor | ... | tensor |

Headers written here are padded with spaces to a page, as the format allows, and tensors are ordered by descending
element width, so that each starts at a multiple of its width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from engine.checkpoint.format.filesystem import PAGE
from engine.checkpoint.format.strict_json import Fields, dump, naturals, parse
from engine.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names in a folder of several files, and of one."""
HEADER_LIMIT = 1 << 25
"""Largest header in bytes: some 100,000 tensors. The format allows more; a parsed header takes ten times its size."""

DTYPES: Mapping[str, str] = MappingProxyType({
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
})  # fmt: skip
"""Dtype names of the format -> names of torch and numpy."""
_WIDTHS: Mapping[str, int] = MappingProxyType({
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
})  # fmt: skip
_METADATA = "__metadata__"
_CODES: Mapping[str, str] = MappingProxyType({name: code for code, name in DTYPES.items()})


class TensorKind(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    """Dtype, in the names of the format."""
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        """Bytes per element."""
        return _WIDTHS[self.dtype]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.width


def code_of(dtype: str) -> str:
    """The format's name of a torch dtype ("bfloat16").

    Raises:
        CheckpointError: the format has no such dtype.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"a tensor of dtype {dtype} cannot be stored; safetensors has {', '.join(_CODES)}, so convert it to one of "
            "these."
        )
    return _CODES[dtype]


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Positions of the tensors in a file."""

    header: bytes
    places: Mapping[str, tuple[TensorKind, int]]
    """Kind and first byte of each tensor, by key."""
    size: int


def lay_out(tensors: Mapping[str, TensorKind], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """Layout of a file that holds these tensors.

    Raises:
        CheckpointError: a tensor has the name that the format reserves.
    """
    if _METADATA in tensors:
        raise CheckpointError(f"a tensor named {_METADATA!r} cannot be stored: safetensors reserves it; rename it.")
    ordered = sorted(tensors.items(), key=lambda item: -item[1].width)
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    offset, starts = 0, {}
    for key, kind in ordered:
        starts[key] = offset
        entries[key] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [offset, offset + kind.bytes]}
        offset += kind.bytes
    text = dump(entries)
    begin = -(-(8 + len(text)) // PAGE) * PAGE
    header = (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)
    places = {key: (kind, begin + starts[key]) for key, kind in tensors.items()}
    return FileLayout(header, places, begin + offset)


def read_header(read: Callable[[int, int], bytes], size: int, what: str) -> dict[str, tuple[TensorKind, int]]:
    """Kind and first byte of each tensor in a file of ``size`` bytes, whose bytes ``read(start, stop)`` returns.

    Raises:
        CheckpointError: another format, or the tensors do not fill the file from the header to its end.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else size
    if length > min(size - 8, HEADER_LIMIT):
        raise CheckpointError(f"{what} is damaged: a header of {length} bytes in a file of {size}.")
    entries = parse(read(8, 8 + length), f"the header of {what}")
    entries.pop(_METADATA, None)
    places = {key: _place(entry, f"the header of {what}: {key!r}") for key, entry in entries.items()}
    end = 0
    for key, (kind, start) in sorted(places.items(), key=lambda item: (item[1][1], item[1][0].bytes)):
        if start != end:
            raise CheckpointError(
                f"{what} is damaged: tensor {key!r} begins at byte {start}, and the one before it ends at {end}."
            )
        end += kind.bytes
    if 8 + length + end != size:
        raise CheckpointError(f"{what} is damaged: it has {size} bytes, and its tensors end at {8 + length + end}.")
    return {key: (kind, 8 + length + start) for key, (kind, start) in places.items()}


def _place(entry: object, what: str) -> tuple[TensorKind, int]:
    fields = Fields(entry, what)
    kind = read_kind(fields)
    offsets = naturals(fields.any("data_offsets"), f"{what}: data_offsets")
    if len(offsets) != 2 or offsets[1] - offsets[0] != kind.bytes:
        raise CheckpointError(f"{what}: data_offsets {list(offsets)} do not fit {kind.dtype} {list(kind.shape)}.")
    return kind, offsets[0]


def read_kind(fields: Fields) -> TensorKind:
    """The kind in the fields "dtype" and "shape"."""
    dtype = fields.text("dtype")
    if dtype not in DTYPES:
        raise CheckpointError(f"{fields.what}: dtype {dtype!r} is unknown; this engine knows {', '.join(DTYPES)}.")
    shape = naturals(fields.any("shape"), f"{fields.what}: shape")
    if len(shape) > 64 or prod(size or 1 for size in shape) >= 2**63:
        raise CheckpointError(
            f"{fields.what}: shape {list(shape)[:8]} is too large for any tensor; the file is damaged."
        )
    return TensorKind(dtype, shape)
