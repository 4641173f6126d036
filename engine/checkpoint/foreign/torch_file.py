"""File of ``torch.save``: a zip with a pickle, and one uncompressed entry for the bytes of each storage.

    archive/data.pkl      the value; a tensor is (storage key, first element, size, stride)
    archive/data/0        bytes of storage "0"

The pickle is interpreted without executing it, and tensors stay on disk: each is known by its first byte.
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.checkpoint.foreign.pickle_values import LIMIT, PickledName, PickledObject, read_pickle
from engine.checkpoint.format.file_spans import FileSpan
from engine.checkpoint.format.filesystem import Files, opened
from engine.checkpoint.format.pieces import Piece
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.errors import COPY_AGAIN, CheckpointError

_STORAGES: Mapping[str, str] = MappingProxyType({
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
})  # fmt: skip
_DTYPES: Mapping[str, str] = MappingProxyType({
    "uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
})  # fmt: skip
"""Dtypes without a storage class: torch stores their bytes."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NUMBERS: Mapping[str, str] = MappingProxyType(
    {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B", "BOOL": "<?"}
)


@dataclass(frozen=True, slots=True)
class _Storage:
    code: str
    path: Path
    start: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """Tensor in a file of ``torch.save``, as its dtype, shape and position. Its values stay in the file."""

    kind: TensorKind
    path: Path
    start: int
    """Offset of the first element in the file, in bytes."""
    strides: tuple[int, ...]

    def span(self, piece: Piece, first: int = 0, tensor: str = "a tensor") -> FileSpan:
        """Returns the file position of ``piece``, elements of a parameter that are consecutive in this tensor.

        ``first``: index of the first of them in this tensor. ``tensor``: name of the parameter for messages.

        Raises:
            CheckpointError: this tensor is not contiguous, or has too few elements.
        """
        self.check_row(tensor)
        if not 0 <= first <= first + piece.elements <= self.kind.elements:
            raise CheckpointError(
                f"{self.path} is damaged: {tensor} ends at element {first + piece.elements:,} of a saved tensor, but "
                f"the saved tensor has only {self.kind.elements:,} elements; {COPY_AGAIN}"
            )
        return FileSpan(self.path, self.start + first * self.kind.width, piece)

    def check_row(self, tensor: str) -> None:
        """Raises CheckpointError if this tensor is not contiguous. ``tensor``: its name for the message."""
        expected = 1
        for size, stride in reversed(list(zip(self.kind.shape, self.strides, strict=True))):
            if size != 1 and stride != expected and self.kind.elements:
                raise CheckpointError(
                    f"{self.path}: {tensor} has shape {list(self.kind.shape)} and strides {list(self.strides)}, but "
                    "only contiguous tensors are read; save it with .contiguous()."
                )
            expected *= size

    def number(self, files: Files) -> float | int | bool | None:
        """Returns the value of this tensor if it is numeric and has one element, otherwise None."""
        if self.kind.elements != 1 or self.kind.dtype not in _NUMBERS:
            return None
        data = bytearray(self.kind.width)
        with opened(files, self.path.parent, self.path.name) as file, memoryview(data) as target:
            files.read_into(file, target, self.start)
        value: float | int | bool = struct.unpack(_NUMBERS[self.kind.dtype], data)[0]
        return value


class _Range(io.RawIOBase):
    """Bytes ``start : start + size`` of an open file, as a separate file."""

    def __init__(self, files: Files, file: int, start: int, size: int) -> None:
        self._files, self._file, self._start, self._size, self._at = files, file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        with memoryview(target).cast("B") as memory:
            count = max(0, min(len(memory), self._size - self._at))
            done = self._files.read_into(self._file, memory[:count], self._start + self._at)
        self._at += done
        return done


def read_torch_file(files: Files, path: Path, start: int = 0, size: int | None = None) -> Any:
    """Reads a file of ``torch.save`` without running code from it. Returns plain values as they are, tensors as
    :class:`TorchTensor`, and other objects as :class:`PickledObject`.

    Args:
        start, size: range of bytes within ``path`` that contains the saved file; by default, all of it.

    Raises:
        CheckpointError: the file is damaged, compressed, in torch's format before 1.6, or from a big-endian machine.
    """
    with opened(files, path.parent, path.name) as file:
        size = files.size(file) - start if size is None else size
        if start < 0 or size < 0 or start + size > files.size(file):
            raise CheckpointError(f"{path} is damaged: it has no bytes {start:,} to {start + size:,}; {COPY_AGAIN}")
        with _entries(files, file, path, start, size) as entries:
            data = entries.read("data.pkl")
            if "byteorder" in entries.known and entries.read("byteorder") != b"little":
                raise CheckpointError(
                    f"{path} was saved on a big-endian machine; load it there, and save it again on a little-endian "
                    "machine."
                )
            return read_pickle(data, str(path), call_of_torch, entries.storage)


class _Entries:
    """Entries of one archive, by their names below its folder."""

    def __init__(self, files: Files, file: int, path: Path, start: int, archive: zipfile.ZipFile) -> None:
        self._files, self._file, self._path, self._start, self._archive = files, file, path, start, archive
        pickles = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(
                f"{path} is no file of torch.save: it has {len(pickles)} entries data.pkl instead of 1; pass a file "
                "that torch.save has written."
            )
        folder = pickles[0].removesuffix("data.pkl")
        self.known = {i.filename.removeprefix(folder): i for i in archive.infolist() if i.filename.startswith(folder)}

    def read(self, name: str) -> bytes:
        """Returns the bytes of a small entry."""
        entry = self._entry(name)
        if entry.file_size > LIMIT:
            raise CheckpointError(
                f"{self._path} is damaged: its entry {name!r} has {entry.file_size:,} bytes, but at most {LIMIT:,} are "
                f"read; {COPY_AGAIN}"
            )
        return self._archive.read(entry)

    def storage(self, persistent: Any) -> _Storage:
        """Returns the storage of ("storage", class, key, device, elements)."""
        word, kind, key, *_ = persistent if isinstance(persistent, tuple) and len(persistent) == 5 else (None,) * 3
        if word != "storage" or not isinstance(kind, PickledName) or not isinstance(key, str):
            raise CheckpointError(
                f"{self._path} has a persistent id that is not the storage of a tensor, but torch.save writes no "
                "others; load the file with the program that wrote it, and save it again with torch.save."
            )
        code = _STORAGES.get(kind.attribute, "U8" if kind.attribute == "UntypedStorage" else None)
        if code is None:
            raise CheckpointError(
                f"{self._path} has a tensor in a {kind}, which cannot be read; convert the tensor to float32, "
                "bfloat16, float16 or an integer dtype, and save the file again with torch.save."
            )
        entry = self._entry(f"data/{key}")
        return _Storage(code, self._path, self._start + self._first_byte(entry), entry.file_size)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self.known.get(name)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise CheckpointError(f"{self._path} is damaged: it has no uncompressed entry {name[:80]!r}; {COPY_AGAIN}")
        return entry

    def _first_byte(self, entry: zipfile.ZipInfo) -> int:
        """Returns the byte at which the data begins, after the entry's own header of variable length."""
        data = bytearray(_LOCAL_HEADER.size)
        with memoryview(data) as target:
            self._files.read_into(self._file, target, self._start + entry.header_offset)
        magic, name, extra = _LOCAL_HEADER.unpack(data)
        if magic != b"PK\3\4":
            raise CheckpointError(
                f"{self._path} is damaged: its entries are not at the offsets in its directory; {COPY_AGAIN}"
            )
        return int(entry.header_offset + _LOCAL_HEADER.size + name + extra)


@contextmanager
def _entries(files: Files, file: int, path: Path, start: int, size: int) -> Iterator[_Entries]:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Range(files, file, start, size))) as archive:
            yield _Entries(files, file, path, start, archive)
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is damaged, or was not saved with torch.save of torch 1.6 or later; load it with torch, and save "
            "it again."
        ) from error


_PARAMETERS = frozenset({"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"})


def call_of_torch(name: PickledName, arguments: tuple[Any, ...]) -> Any:
    """Returns the tensor, dict, list or tuple that a known call in a ``torch.save`` pickle makes (a list for a set), or
    a ``PickledObject`` for any other call. Does not run the called function.
    """
    match str(name).replace("__builtin__.", "builtins."), arguments:  # the name of Python 2, which protocol 2 still has
        case ("collections.OrderedDict" | "builtins.dict", ()) | ("collections.defaultdict", _):
            return {}
        case "torch.Size" | "builtins.tuple", (list(values) | tuple(values),):
            return tuple(values)
        case "builtins.set" | "builtins.list", (list(values) | tuple(values),):
            return list(values)
        case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor", (_Storage() as data, first, *more):
            return _tensor(data, data.code, (first, *more[:2]))
        case "torch._utils._rebuild_tensor_v3", (
            _Storage() as data,
            first,
            size,
            stride,
            _,
            _,
            PickledName() as dtype,
            *_,
        ):
            return _tensor(data, _DTYPES.get(dtype.attribute, "?"), (first, size, stride))
        case "torch._tensor._rebuild_from_type_v2", (
            PickledName() as made,
            _,
            tuple(given),
            _,
        ):  # a tensor with attributes
            return call_of_torch(made, given) if made.module == "torch._utils" else PickledObject(name, arguments)
        case callee, (TorchTensor() as tensor, *_) if callee in _PARAMETERS:
            return tensor
    return PickledObject(name, arguments)


def _tensor(storage: _Storage, code: str, place: tuple[Any, ...]) -> TorchTensor:
    first, shape, strides = place
    numbers = (first, *shape, *strides)
    if code == "?" or len(shape) != len(strides) or len(shape) > 64 or not all(map(_is_natural, numbers)):
        raise CheckpointError(
            f"{storage.path} has a tensor of an unknown dtype or shape; load it with torch.load, convert the tensor to "
            "a dtype such as float32, and save the file again with torch.save."
        )
    kind = TensorKind(code, shape)
    last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if prod(shape) else -1
    if (last + 1) * kind.width > storage.bytes:
        raise CheckpointError(
            f"{storage.path} has a tensor of shape {list(shape)[:8]} that ends at byte {(last + 1) * kind.width:,} of "
            f"its storage, but the storage has only {storage.bytes:,} bytes: the file is damaged; {COPY_AGAIN}"
        )
    return TorchTensor(kind, storage.path, storage.start + first * kind.width, strides)


def _is_natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def value_dict(value: Any, what: str) -> dict[Any, Any]:
    """Returns ``value`` if it is a dict. Otherwise raises a CheckpointError that names the source ``what``."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} has a {type(value).__name__} in place of a dict: it is damaged; {COPY_AGAIN}")
    return value


def value_list(value: Any, what: str) -> list[Any]:
    """Returns ``value``, a list or tuple, as a list. Otherwise raises a CheckpointError that names the source
    ``what``.
    """
    if not isinstance(value, list | tuple):
        raise CheckpointError(f"{what} has a {type(value).__name__} in place of a list: it is damaged; {COPY_AGAIN}")
    return list(value)


def numbers_of(value: Any, what: str) -> tuple[int, ...]:
    """Returns ``value``, a list or tuple of integers >= 0, as a tuple. Otherwise raises a CheckpointError that names
    the source ``what``.
    """
    found = value_list(value, what)
    if not all(map(_is_natural, found)):
        raise CheckpointError(
            f"{what} has other values in place of whole numbers of 0 or more: it is damaged; {COPY_AGAIN}"
        )
    return tuple(found)


def shape_of(value: Any, what: str) -> tuple[int, ...]:
    """Returns ``value``, a list or tuple, as a tensor shape. If it is no possible shape, raises a CheckpointError that
    names the source ``what``.
    """
    found = numbers_of(value, what)
    if len(found) > 64 or prod(size or 1 for size in found) >= 2**62:
        raise CheckpointError(f"{what} has a shape that is too large for any tensor: it is damaged; {COPY_AGAIN}")
    return found


def tensor_of(value: Any, what: str) -> TorchTensor:
    """Returns ``value`` if it is a TorchTensor. Otherwise raises a CheckpointError that names the source ``what``."""
    if not isinstance(value, TorchTensor):
        raise CheckpointError(
            f"{what} is a {type(value).__name__} in place of a tensor: the file is damaged; {COPY_AGAIN}"
        )
    return value
