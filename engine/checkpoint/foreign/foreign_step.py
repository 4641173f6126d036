"""Checkpoint of another engine behind the interface of this engine's: manifest, dtypes and shapes, reads of pieces."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.checkpoint.foreign.pickle_values import plain
from engine.checkpoint.foreign.torch_file import TorchTensor
from engine.checkpoint.format.file_spans import FileSpan, SpannedTensor, read_spans
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.manifest import Checksum, Manifest, StoredTensor
from engine.checkpoint.format.pieces import covers_once
from engine.checkpoint.format.safetensors_file import DTYPES, TensorKind
from engine.checkpoint.format.step_reader import ReadRequest
from engine.errors import CheckpointError
from engine.parallel.grid import Grid

_TYPES: Mapping[frozenset[str], tuple[str, ...]] = {
    frozenset({"exp_avg", "exp_avg_sq"}): ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "Lamb", "FusedLamb"),
    frozenset({"exp_avg"}): ("Lion", "FusedLion", "DeepSpeedCPULion"),
    frozenset({"momentum_buffer"}): ("SGD",),
    frozenset({"sum"}): ("Adagrad",),
}
"""Moments -> the optimizers with these; the files do not name the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameter group of the optimizer in another engine's checkpoint."""

    params: Sequence[str]
    options: Mapping[str, Any]
    """Settings such as lr, as JSON values; "step" is the number of updates."""
    numbers: Mapping[str, Sequence[Any]]
    """Scalars of optimizer state by name: [value, tensor dtype or None]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignContents:
    """Contents of another engine's checkpoint under this engine's names. Tensor values stay in the files."""

    origin: str
    """Words for logs: "DeepSpeed 0.19.8, ZeRO 2 over 2 data ranks"."""
    tensors: Mapping[str, SpannedTensor]
    """Tensors under this engine's names: "param/...", "buffer/...", "exp_avg/..."."""
    made: int = 0
    """Number of weight updates."""
    skipped: int = 0
    samples: int = 0
    loss_scale: Mapping[str, Any] | None = None
    """Dynamic loss scale with keys value, forgiven, good; None if it was fixed."""
    scheduler: Mapping[str, Any] | None = None
    groups: Sequence[ParameterGroup] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    user: Any = None


class ForeignStep:
    """Open checkpoint of another engine, such as DeepSpeed, with the interface ``OpenCheckpoint``.

    Raises:
        CheckpointError: the pieces of a tensor leave a gap or overlap.
    """

    def __init__(self, files: Files, step: Path, contents: ForeignContents) -> None:
        self.step = self.name = step
        self._files, self._tensors = files, contents.tensors
        for name, tensor in contents.tensors.items():
            if not covers_once(tensor.kind.shape, [span.piece for span in tensor.spans]):
                raise CheckpointError(
                    f"{step} does not have {name!r} exactly once: a file is missing or is of another save; copy the "
                    "folder again."
                )
        self.kinds: dict[str, TensorKind] = {name: tensor.kind for name, tensor in contents.tensors.items()}
        self.manifest = _manifest(contents)

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the files into the request's memory."""
        read_spans(self._files, self._tensors, wanted)

    def check_file(self, file: str) -> None:
        """Does nothing, because files of other engines have no hashes."""

    def tensors_of(self, file: str) -> dict[str, tuple[TensorKind, memoryview]]:
        """Returns {}: callers ask for random states, which are not read from other engines' checkpoints."""
        return {}


def spanned(kind: TensorKind, spans: Iterable[FileSpan]) -> SpannedTensor:
    """Returns a full tensor that consists of the file pieces ``spans``; empty pieces are dropped. ``kind``: dtype and
    full shape.
    """
    return SpannedTensor(kind, tuple(span for span in spans if span.piece.elements))


def described_group(
    params: Sequence[str], options: Mapping[str, Any], state: Mapping[Any, Any], files: Files
) -> ParameterGroup:
    """Returns a parameter group with its options and optimizer scalars.

    ``state``: optimizer state of one of the group's parameters, from which scalars such as "step" are taken.
    """
    kept = plain({key: value for key, value in options.items() if key != "params"}, [])
    numbers: dict[str, list[Any]] = {}
    for key, value in state.items():
        if isinstance(value, TorchTensor) and (key == "step" or not value.kind.shape):
            number = value.number(files)
            if number is not None:
                numbers[str(key)] = [number, DTYPES[value.kind.dtype]]
        elif isinstance(value, bool | int | float):
            numbers[str(key)] = [value, None]
    step = numbers.get("step", [kept.get("step", 0)])[0]
    step = int(step) if isinstance(step, int | float) and 0 <= step < 2**53 else 0
    return ParameterGroup(params=params, options=kept | {"step": step}, numbers=numbers)


def _manifest(contents: ForeignContents) -> Manifest:
    families = frozenset(name.partition("/")[0] for name in contents.tensors) - {"param", "buffer"}
    types = _TYPES.get(families, ())
    update = {
        "made": contents.made, "skipped": contents.skipped, "in_a_row": 0, "tokens": 0, "samples": contents.samples,
        "scale": None if contents.loss_scale is None else dict(contents.loss_scale),
    }  # fmt: skip
    return Manifest(
        step=contents.made,
        attempt="",
        tensors={name: StoredTensor(tensor.kind, ()) for name, tensor in contents.tensors.items()},
        files={},
        checksum=Checksum("", 0, "", 0),
        aliases=dict(contents.aliases),
        info={"origin": contents.origin, "grid": dict.fromkeys((*Grid().sizes, "zero"), 0)},
        progress={
            "update": update,
            "scheduler": None if contents.scheduler is None else dict(contents.scheduler),
            "tracked": {},
        },
        optimizer={
            "type": None,
            "types": list(types),
            "groups": [{"params": list(group.params), "options": dict(group.options)} for group in contents.groups],
            "numbers": {
                str(index): {name: list(number) for name, number in group.numbers.items()}
                for index, group in enumerate(contents.groups)
                if group.numbers
            },
        },
        user=contents.user,
    )
