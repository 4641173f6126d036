"""The folder of a ``PeftModel``: its adapters alone, as ``PeftModel.from_pretrained`` loads them.

    rank 0     asks PEFT which keys of the state dict it would save     label "start"
    all        gather those weights, not those of the base              label "full state"
    rank 0     lets PEFT write the folder beside its place, and moves its files there

PEFT is imported by the user of such a model, so it is imported here only when there is one.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.parallel.comm.agreement import from_first
from engine.parallel.comm.comm import Comm

_CARD = "README.md"
_PROMPTS = "prompt_encoder.{}.embedding.weight"
_EMBEDDED = ("PROMPT_TUNING", "PREFIX_TUNING")
GatherState = Callable[[frozenset[str]], Mapping[str, Tensor]]


def is_peft_model(model: nn.Module) -> bool:
    """Whether PEFT has put adapters around this model."""
    return any((base.__module__, base.__name__) == ("peft.peft_model", "PeftModel") for base in type(model).__mro__)


def write_adapters(
    folder: Path, model: nn.Module, keys: Iterable[str], gather: GatherState, comm: Comm, device: torch.device
) -> None:
    """Write the adapters of a ``PeftModel`` on any grid, replacing files of the same names. Collective.

    ``keys``: of its state dict; ``gather``: returns the full tensors of some of them on rank 0, and is collective too.

    Raises:
        CheckpointError: PEFT computes the prompts of an adapter, or the folder cannot be written; raised on all ranks.
    """
    asked = from_first(lambda: json.dumps(_adapter_keys(model, keys)).encode(), comm, device)
    weights = gather(frozenset(json.loads(asked)))
    from_first(lambda: _write(model, weights, folder), comm, device)


def _adapter_keys(model: Any, keys: Iterable[str]) -> list[str]:
    """Those of ``keys`` that PEFT saves; it chooses by names alone, so each key stands for its tensor."""
    from peft import get_peft_model_state_dict

    given = {key: key for key in keys}
    found: dict[str, None] = {}
    for name, settings in model.peft_config.items():
        if settings.is_prompt_learning:
            found[_prompt_key(name, settings)] = None
            continue
        chosen = get_peft_model_state_dict(model, state_dict=given, adapter_name=name)
        found.update(dict.fromkeys(chosen.values()))
    return list(found)


def _prompt_key(name: str, settings: Any) -> str:
    """The key of the prompts of an adapter, which are its embedding; other encoders of prompts compute with more."""
    kind = settings.peft_type.value
    if kind not in _EMBEDDED or getattr(settings, "prefix_projection", False):
        raise CheckpointError(
            f"save_pretrained: PEFT computes the prompts of the adapter {name!r} ({kind}) from a model of its own; "
            "load eng.full_state_dict() into a model of one process, and save that."
        )
    return _PROMPTS.format(name)


@contextmanager
def _prompts_from(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, PEFT reads prompts from ``weights``, because the model may hold a shard of them."""
    model.get_prompt_embedding_to_save = lambda name: weights[_PROMPTS.format(name)]
    try:
        yield
    finally:
        del model.get_prompt_embedding_to_save


def _write(model: Any, weights: Mapping[str, Tensor], folder: Path) -> bytes:
    """Let PEFT write ``weights`` on this rank; returns the files that are there now."""
    moved = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as written:
            with _prompts_from(model, weights):
                model.save_pretrained(written, state_dict=weights)
            for file in sorted(path for path in Path(written).rglob("*") if path.is_file()):
                target = folder / file.relative_to(written)
                if file.name != _CARD or not target.exists():  # a card may have been written by hand
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, target)
                    moved.append(str(target))
    except OSError as error:
        raise CheckpointError(
            f"save_pretrained: {folder} cannot be written ({error.strerror or error}); make room, or choose another "
            "folder."
        ) from error
    return json.dumps(moved).encode()
