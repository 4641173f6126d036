"""Hugging Face folders: sharded reads of weights, and the files without tensors.

Tensors are found by their keys in ``model.state_dict()``, with or without the prefix of the base model ("model.",
"transformer."). A folder ``model/`` of a checkpoint has block hashes and is read as a checkpoint; other folders are
read without verification.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from engine.checkpoint.format.file_spans import FileSpan, SpannedTensor, read_spans
from engine.checkpoint.format.filesystem import Files, opened, read_all, resolved
from engine.checkpoint.format.pieces import Part, Piece
from engine.checkpoint.format.safetensors_file import HEADER_LIMIT, INDEX, SINGLE, FilePart, TensorKind, read_header
from engine.checkpoint.format.step_reader import ReadRequest
from engine.checkpoint.format.strict_json import Fields, parse
from engine.errors import CheckpointError

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class PretrainedFolder:
    """Hugging Face folder of safetensors files, open for reading tensors by this engine's names.

    Args:
        keys: name in this engine ("param/...", "buffer/...") -> keys that the folder may use.
        prefix: transformers' ``base_model_prefix``; keys are found with and without it.
        parts: name in this engine -> (full shape, folder entries that together form the full tensor).

    Raises:
        CheckpointError: the folder has no safetensors file, or has a tensor that this model lacks.
    """

    def __init__(
        self,
        files: Files,
        folder: Path,
        keys: Mapping[str, Sequence[str]],
        prefix: str = "",
        parts: Mapping[str, tuple[tuple[int, ...], Sequence[FilePart]]] = MappingProxyType({}),
    ) -> None:
        self.name = folder
        self._files = files
        stored = self._find()
        self._tensors: dict[str, SpannedTensor] = {}
        used: set[str] = set()
        for name, given in keys.items():
            candidates = [candidate for key in given for candidate in _spellings(key, prefix)]
            used.update(candidates)
            found = next((stored[candidate] for candidate in candidates if candidate in stored), None)
            if found is None and name in parts:
                shape, published = parts[name]
                found = _joined(stored, shape, published, prefix)
                used.update(candidate for part in published for candidate in _spellings(part.key, prefix))
            if found is not None:
                self._tensors[name] = found
        foreign = next((key for key in stored if key not in used), None)
        if foreign is not None:
            raise CheckpointError(
                f"{folder} has {foreign!r}, which this model lacks; build the model that was saved there, or pass "
                "another folder."
            )
        self.kinds = {name: tensor.kind for name, tensor in self._tensors.items()}

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the files into the request's memory. Reads only the bytes of these pieces."""
        read_spans(self._files, self._tensors, wanted)

    def _find(self) -> dict[str, SpannedTensor]:
        names = self._files.names(self.name) if self._files.is_folder(self.name) else []
        if INDEX in names:
            index_file = resolved(self.name / INDEX)
            data = read_all(self._files, index_file.parent, index_file.name, HEADER_LIMIT)
            index = Fields(parse(data, str(self.name / INDEX)), str(self.name / INDEX))
            listed = sorted({str(file) for file in index.object("weight_map").values()})
        elif SINGLE in names:
            listed = [SINGLE]
        else:
            raise CheckpointError(f"{self.name} {_what_is_there(names)}")
        found: dict[str, SpannedTensor] = {}
        for name in listed:
            for key, (kind, start) in self._header(name).items():
                found[key] = SpannedTensor(kind, (FileSpan(self.name / name, start, Part(kind.shape).whole()),))
        return found

    def _opened(self, name: str) -> AbstractContextManager[int]:
        """Opens a file of the folder; in the cache of the Hugging Face hub it is a link."""
        path = resolved(self.name / name)
        return opened(self._files, path.parent, path.name)

    def _header(self, name: str) -> dict[str, tuple[TensorKind, int]]:
        if "/" in name or name not in self._files.names(self.name):
            raise CheckpointError(
                f"{self.name / INDEX} names {name[:80]!r}, which is not in the folder; "
                "copy all files of the model there."
            )
        with self._opened(name) as file:

            def read(start: int, stop: int) -> bytes:
                data = bytearray(stop - start)
                return bytes(data[: self._files.read_into(file, memoryview(data), start)])

            return read_header(read, self._files.size(file), str(self.name / name))


def model_files(model: nn.Module) -> dict[str, bytes]:
    """Returns "config.json" and "generation_config.json" of a Hugging Face model, name -> contents; {} for other
    models.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(type(model), "base_model_prefix"):
        return {}
    settings = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    files = {"config.json": _text(settings)}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string().encode()
    return files


def refuse_adapters(model: nn.Module) -> None:
    """Checks that transformers' ``from_pretrained`` can find all weights in a saved folder of this model.

    Raises:
        CheckpointError: PEFT wraps the model, or adapters replace some of its layers.
    """
    kind = type(model)
    inside = getattr(model, "base_model_prefix", None) is not None and not hasattr(kind, "base_model_prefix")
    adapter = next((name for name, _ in model.named_parameters() if ".base_layer." in name or ".lora_" in name), None)
    if inside or adapter is not None:
        what = f"has adapters ({adapter!r})" if adapter is not None else "wraps another model"
        raise CheckpointError(
            f"save_pretrained: this {kind.__name__} {what}, so transformers would load none of its keys and start "
            "from random weights; save adapters from eng.full_state_dict() with the library that made them, or merge "
            "them into the model first."
        )


def with_dtype(files: Mapping[str, bytes], dtype: str) -> dict[str, bytes]:
    """Returns the files of a Hugging Face folder (name -> contents), with ``dtype`` written into "config.json"."""
    return {
        name: _text(json.loads(data) | {"dtype": dtype}) if name == "config.json" else data
        for name, data in files.items()
    }


def _text(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, sort_keys=True) + "\n").encode()


def _joined(
    stored: Mapping[str, SpannedTensor], shape: tuple[int, ...], parts: Sequence[FilePart], prefix: str
) -> SpannedTensor | None:
    """Returns a tensor that the folder stores in parts; None if it lacks one."""
    whole, spans, dtypes = Part(shape), list[FileSpan](), set[str]()
    for part in parts:
        found = next((stored[key] for key in _spellings(part.key, prefix) if key in stored), None)
        if found is None or found.kind.shape != part.shape:
            return None
        (span,) = found.spans
        spans.append(replace(span, piece=Piece(whole, part.start, part.start + part.elements)))
        dtypes.add(found.kind.dtype)
    return SpannedTensor(TensorKind(dtypes.pop(), shape), tuple(spans)) if len(dtypes) == 1 else None


def _spellings(key: str, prefix: str) -> list[str]:
    if not prefix:
        return [key]
    return [key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")]


def _what_is_there(names: Sequence[str]) -> str:
    pickled = next((name for name in names if name.endswith(_PICKLED)), None)
    if pickled is not None:
        return (
            f"has {pickled}, a pickle that may run code when it is read, and no safetensors; convert it on a machine "
            "where you trust it (transformers: from_pretrained, then save_pretrained)."
        )
    return f"has neither {SINGLE} nor {INDEX}; pass a Hugging Face folder, or a checkpoint of this engine."
