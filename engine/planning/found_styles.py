"""Result of a tensor-plan search, which rank 0 broadcasts and stores in a cache.

The cache is ``~/.cache/trine/tensor_plans``, or the folder in the environment variable TRINE_CACHE; ``TRINE_CACHE=0``
disables it. Each search has one file, named by a digest and written atomically. If the file is damaged or unreadable,
the search runs again. The digest covers everything on which a search depends:

    engine      sources of every package that plans, traces and shards
    code        sources of the model's classes and functions and of the user's Python modules, with their plain values
    model       attributes of every module, shapes of parameters, contents of buffers
    example     shapes and dtypes
    versions    Python, torch and the libraries that define the model's classes

The content of batches is left out, because a plan is valid for all.
"""

import fnmatch
import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from engine.parallel.model.name_patterns import starred
from engine.parallel.tensor.plan.sharding_rules import cut_model, match_styles
from engine.parallel.tensor.plan.tensor_plan import Reason, TensorPlan
from engine.program.batch import Batch, named_tensors
from engine.program.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStyles:
    """Tensor-parallel styles of layers (column, row etc.) that a search has found for a model."""

    patterns: Mapping[str, str]
    """Styles by name pattern, in the form of ``parallel.tensor_plan``."""
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]

    def plan(self, model: nn.Module, tp: int, sequence: bool = False) -> TensorPlan:
        """Returns the tensor plan of ``model`` for ``tp`` ranks; ``sequence``: True for sequence parallelism."""
        read = match_styles(model, self.patterns)
        plan = cut_model(model, read, tp, "found by zero patterns, proven", sequence)
        return replace(plan, patterns=self.patterns, reasons=self.reasons, notes=self.notes)

    def to_bytes(self) -> bytes:
        """Returns these styles as JSON bytes for other ranks."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "FoundStyles":
        """Returns the styles from ``data``, which :meth:`to_bytes` has made."""
        read = json.loads(data)
        reasons = tuple(Reason(**reason) for reason in read["reasons"])
        return cls(patterns=read["patterns"], reasons=reasons, notes=tuple(read["notes"]))


def as_patterns(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Returns ``styles`` (layer name -> style) with names joined into patterns such as ``layers.*.up``.

    All layers that match a pattern have the same style.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str] = {}
    hits: dict[str, list[str]] = {}
    for name, style in styles.items():
        if (pattern := starred(name)) not in hits:
            hits[pattern] = fnmatch.filter(modules, pattern) or fnmatch.filter(parameters, pattern)
        found[pattern if all(styles.get(other) == style for other in hits[pattern]) else name] = style
    return found


logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class StylesCache:
    """Folder of tensor-parallel styles that earlier searches have found, one file per search."""

    folder: Path

    @classmethod
    def of_environment(cls) -> "StylesCache | None":
        """Returns the cache in the folder $TRINE_CACHE, or in ``~/.cache/trine``.

        Returns None if TRINE_CACHE is 0, or if the path needs a home folder and the user has none.
        """
        given = os.environ.get("TRINE_CACHE", "")
        if given == "0":
            return None
        try:
            root = Path(given).expanduser() if given else Path.home() / ".cache" / "trine"
        except RuntimeError:  # a user without a home
            return None
        return cls(root / "tensor_plans")

    def read(self, digest: str) -> FoundStyles | None:
        """Returns the stored styles of the search with this digest; None if there are none, or the file is damaged."""
        try:
            kept = json.loads(self._file(digest).read_text(encoding="utf-8"))
            found: str = kept["found"]
            if kept["digest"] != digest or kept["sha256"] != _sha256(found):
                return None
            return FoundStyles.from_bytes(found.encode())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, digest: str, found: FoundStyles) -> None:
        """Stores ``found``, the result of a search, in a file; logs a message if the folder is not writable."""
        text = found.to_bytes().decode()
        record = json.dumps({"digest": digest, "sha256": _sha256(text), "found": text})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            written = self.folder / f"{uuid4().hex}.tmp"  # a file of tempfile is unreadable for other users
            try:
                written.write_text(record, encoding="utf-8")
                os.replace(written, self._file(digest))
            except OSError:
                with suppress(OSError):
                    written.unlink()
                raise
        except OSError as error:
            logger.info("the tensor plan is not kept for the next start, because %s cannot be written: %s",
                        self.folder, error.strerror)  # fmt: skip

    def _file(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


def kept_or_found(digest: Callable[[], str | None], find: Callable[[], FoundStyles]) -> FoundStyles:
    """Returns the cached result of a search; if there is none, runs the search and caches its result.

    ``digest``: function that returns the cache key, or None if the search cannot be cached. ``find``: function that
    runs the search.
    """
    cache = StylesCache.of_environment()
    key = digest() if cache is not None else None
    if cache is None or key is None:
        return find()
    if (kept := cache.read(key)) is not None:
        logger.info("the tensor plan is the one that an earlier start has found and proven (%s)", cache.folder)
        return kept
    found = find()
    cache.write(key, found)
    return found


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


_SOURCES = ("config", "kernels", "parallel", "planning", "precision", "program")
"""Packages of the engine that a search runs."""
_VERSIONED = sys.stdlib_module_names | {"torch", "numpy", "engine", "builtins"}
"""Packages with their version, or all of their sources, in the digest."""
_LARGEST = 2**26
"""Most bytes of a tensor that is read for the digest."""
_PIECE = 2**16
"""Bytes that a hash is given at once."""
_PLAIN = bool | int | float | complex | str | bytes | None | torch.dtype | torch.device | torch.Size


class ProgramDigest:
    """Digest of a program's code, model and example batch, for the keys of cached searches.

    ``known`` is False if some of the model's code is in no file.
    """

    def __init__(self, program: Program, example: Batch) -> None:
        self._digest = _Digest()
        self.known = _take_program(self._digest, program, example)

    def of(self, settings: Mapping[str, Any]) -> str | None:
        """Returns the cache key of a search with ``settings``; None if ``known`` is False."""
        return self._digest.with_text(repr(sorted(settings.items()))) if self.known else None


def _take_program(digest: "_Digest", program: Program, example: Batch) -> bool:
    try:
        digest.take((program.model, program.loss_fn, program.precision, program.rows, program.inputs))
    except RecursionError:
        return False
    digest.take({name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named_tensors(example)})
    digest.take((sys.version, torch.__version__))
    if not digest.take_modules():
        return False
    for name in _SOURCES:
        for folder in import_module(f"engine.{name}").__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                digest.take_file(str(file), file)
    return True


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.is_file() else None


def _users_modules() -> set[str]:
    """Returns names of the modules that belong to neither Python, an installed library nor the engine."""
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]  # as .pth files add
    installed = tuple({os.path.realpath(path) + os.sep for path in (*sysconfig.get_paths().values(), *folders)})
    real = cache(os.path.realpath)
    found = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) and _top(name) != "engine" else None
        if isinstance(file, str) and file.endswith(".py"):
            folder, leaf = os.path.split(file)
            there = os.path.realpath(file) if os.path.islink(file) else os.path.join(real(folder), leaf)
            if not there.startswith(installed):
                found.add(name)
    return found


def _top(name: str) -> str:
    return name.partition(".")[0]


class _Digest:
    """Feeds values into a hash, and notes the modules that define them."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._waiting = bytearray()
        """Next input of the hash: many short pieces at once."""
        self._seen: dict[int, tuple[int, Any]] = {}
        self._classes: set[type] = set()
        self._packages: set[str] = set()
        self.modules: set[str] = set()

    def with_text(self, text: str) -> str:
        """Returns the digest of the content so far and ``text``, which is not added."""
        self._feed(b"")
        whole = self._hash.copy()
        whole.update(text.encode())
        return whole.hexdigest()

    def take_file(self, name: str, file: Path) -> None:
        """Adds the content of a file."""
        content = file.read_bytes()
        self._text("file", name, str(len(content)))
        self._feed(content)

    def take_modules(self) -> bool:
        """Adds the noted modules, modules of functions and classes that they use, and all modules of the user.

        Returns False if one of them is in no file.
        """
        self.modules |= _users_modules()
        self._packages = {_top(name) for name in self.modules} - _VERSIONED
        done = set[str]()
        while left := sorted(self.modules - done):
            for name in left:
                done.add(name)
                module = sys.modules.get(name)
                if module is None or _top(name) in _VERSIONED:
                    continue
                if (file := _file(module)) is None:
                    return False
                self.take_file(f"{name} {vars(sys.modules.get(_top(name), module)).get('__version__', '')}", file)
                self._take_names(vars(module), _globals_read(module))
        return True

    def _take_names(self, names: Mapping[str, Any], read: Collection[str]) -> None:
        """Adds the current names of a module or a class: plain values that are read, its functions and its classes."""
        for name, value in sorted(names.items()):
            if type(value) in (bool, int, float, str) and name in read and not name.startswith("__"):
                self._text(name, repr(value))
            elif isinstance(value, FunctionType | type):
                if isinstance(value.__module__, str) and _top(value.__module__) in self._packages:
                    self._note(value.__module__)
                self._text(name, str(value.__module__), value.__qualname__)
                if isinstance(value, FunctionType):
                    code = value.__code__
                    self._text(code.co_code.hex(), *code.co_names, repr([c for c in code.co_consts if _is_plain(c)]))

    def _note(self, module: Any) -> None:
        if isinstance(module, str):
            self.modules.add(module)

    def take(self, value: Any) -> None:
        """Adds any value."""
        if isinstance(value, _PLAIN):
            self._text(type(value).__name__, repr(value))
        elif id(value) in self._seen:
            self._text("again", str(self._seen[id(value)][0]))
        else:
            self._seen[id(value)] = len(self._seen), value  # kept alive, so that ids stay unique
            self._take_new(value)

    def _take_new(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._take_tensor(value)
        elif isinstance(value, Mapping):
            self._take_all("mapping", [part for pair in value.items() for part in pair])
        elif isinstance(value, list | tuple):
            self._take_all(type(value).__name__, value)
        elif isinstance(value, set | frozenset):
            self._take_all("set", sorted(value, key=repr))
        elif isinstance(value, type | FunctionType | MethodType | partial | ModuleType | CodeType):
            self._take_code(value)
        else:
            self._take_object(value)

    def _take_tensor(self, tensor: Tensor) -> None:
        self._text("tensor", repr((tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tensor.is_meta)))
        if (
            not isinstance(tensor, nn.Parameter)
            and not tensor.is_meta
            and tensor.layout == torch.strided
            and (tensor.nbytes <= _LARGEST)
        ):
            self._feed(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

    def _take_code(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._text("module", value.__name__)
        elif isinstance(value, partial):
            self._take_all("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, MethodType):
            self._take_all("method", (value.__func__, value.__self__))
        elif isinstance(value, CodeType):
            self._take_all("code", (value.co_code, value.co_consts, value.co_names, value.co_varnames))
        else:
            self._note(value.__module__)
            self._text("defined", f"{value.__module__}.{value.__qualname__}")
            if isinstance(value, FunctionType):
                cells = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
                self._take_all("function", (value.__code__, value.__defaults__, value.__kwdefaults__, cells))

    def _take_object(self, value: Any) -> None:
        for base in type(value).__mro__:
            self._note(base.__module__)
            if _top(base.__module__) not in _VERSIONED and base not in self._classes:
                self._classes.add(base)
                self._take_names(vars(base), set(vars(base)))
        self.take(type(value))
        if isinstance(value, Enum):
            self._text(value.name)
            return
        if is_dataclass(value):
            self._take_all("fields", [(field.name, getattr(value, field.name)) for field in fields(value)])
        for name, inner in sorted(getattr(value, "__dict__", {}).items()):
            self._text(name)
            # the keys of hooks count up over the whole process
            self.take(list(inner.values()) if name.endswith("_hooks") and isinstance(inner, Mapping) else inner)

    def _take_all(self, kind: str, values: Iterable[Any]) -> None:
        parts = list(values)
        self._text(kind, str(len(parts)))
        for part in parts:
            self.take(part)

    def _text(self, *words: str) -> None:
        for word in words:
            data = word.encode(errors="backslashreplace")
            self._waiting += len(data).to_bytes(8, "little")
            self._waiting += data
        if len(self._waiting) > _PIECE:
            self._feed(b"")

    def _feed(self, data: bytes) -> None:
        self._hash.update(self._waiting)
        self._waiting.clear()
        self._hash.update(data)


def _globals_read(module: ModuleType) -> set[str]:
    """Returns the names in the code of a module; a script also has times and counters, which no function reads."""
    own = [value for value in list(vars(module).values()) if getattr(value, "__module__", None) == module.__name__]
    methods = [inner for value in own if isinstance(value, type) for inner in vars(value).values()]
    left = [value.__code__ for value in (*own, *methods) if isinstance(value, FunctionType)]
    found = set[str]()
    while left:
        code = left.pop()
        found.update(code.co_names)
        left += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True
