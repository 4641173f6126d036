"""Folder of a ``PeftModel``: only its adapters, for ``PeftModel.from_pretrained``.

    rank 0     asks PEFT which keys of the state dict it would save     label "start"
    all        gather those weights, not the base's                     label "full state"
    rank 0     lets PEFT write a temporary folder, and moves its files

PEFT chooses, slices and renames tensors by adapter type, so it receives tensors that remember their key. PEFT runs
prompt encoders; copies of them, made before the engine changed their modules, run with the full weights.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.checkpoint.format.filesystem import follow_umask
from engine.errors import CheckpointError
from engine.parallel.comm.agreement import from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.model.adapters import is_peft_model

_CARD = "README.md"
_ENCODERS = "prompt_encoder"
GatherState = Callable[[frozenset[str]], Mapping[str, Tensor]]


def prompt_encoders(model: nn.Module) -> Mapping[str, nn.Module]:
    """Returns copies on the meta device of a ``PeftModel``'s prompt encoders, by adapter name; {} for other models.
    Call it before the engine changes the modules.
    """
    found = getattr(model, _ENCODERS, None) if is_peft_model(model) else None
    return {name: _without_content(encoder) for name, encoder in found.items()} if found is not None else {}


def _without_content(module: nn.Module) -> nn.Module:
    tensors: dict[int, Any] = {}
    for parameter in module.parameters():
        shapes = torch.empty_like(parameter, device="meta")
        tensors[id(parameter)] = nn.Parameter(shapes, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        tensors[id(buffer)] = torch.empty_like(buffer, device="meta")
    return deepcopy(module, tensors)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Sharded ``PeftModel``, with the functions that :func:`write_adapters` needs to save its adapters."""

    model: nn.Module
    entries: Mapping[str, Any]
    """Parameter or buffer of each key of ``model.state_dict()``."""
    gather: GatherState
    """Function that gathers the full tensors of the given keys on rank 0. Collective."""
    shapes: Callable[[], AbstractContextManager[None]]
    """Context in which parameters of other ranks have their full shapes."""
    encoders: Mapping[str, nn.Module] = field(default_factory=dict)
    """Meta-device copies of the model's prompt encoders, by adapter."""


def write_adapters(folder: Path, source: AdapterSource, comm: Comm, device: torch.device) -> None:
    """Writes the adapters of a sharded ``PeftModel`` into ``folder``, in PEFT's format. Replaces existing files, except
    README.md. Rank 0 gathers the full adapter weights and writes. Collective over the world.

    Raises:
        CheckpointError: the folder cannot be written; raised on all ranks.
    """
    asked = from_first(lambda: json.dumps(_adapter_keys(source)).encode(), comm, device)
    weights = source.gather(frozenset(json.loads(asked)))
    from_first(lambda: _write(source, weights, folder), comm, device)


class _Asked(Tensor):
    """Placeholder of a tensor of the state dict while PEFT chooses; its results stand for the same key."""

    keys: tuple[str, ...] = ()

    @classmethod
    def named(cls, *keys: str) -> "_Asked":
        """Returns a placeholder of these keys."""
        made = torch.empty((), device="meta").as_subclass(cls)
        made.keys = keys
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns a placeholder of all arguments' keys; two for ``topk``, which callers unpack."""
        keys = [key for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls) for key in vars(leaf)["keys"]]
        if getattr(function, "__name__", "") == "topk":
            return cls.named(*keys), cls.named(*keys)
        return cls.named(*keys)


def _adapter_keys(source: AdapterSource) -> list[str]:
    """Returns the keys that PEFT saves."""
    from peft import get_peft_model_state_dict

    model: Any = source.model
    given = {key: _Asked.named(key) for key in source.entries}
    found: dict[str, None] = {}
    for name, settings in model.peft_config.items():
        if settings.is_prompt_learning:
            within = f"{_ENCODERS}.{name}."
            found.update(dict.fromkeys(key for key in source.entries if key.startswith(within)))
            continue
        with source.shapes():
            chosen = get_peft_model_state_dict(model, state_dict=given, adapter_name=name)
        found.update(dict.fromkeys(key for each in chosen.values() if isinstance(each, _Asked) for key in each.keys))
    return list(found)


@contextmanager
def _prompts_from(source: AdapterSource, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Lets PEFT compute prompts inside the context by the copies of the encoders, from ``weights``."""
    model: Any = source.model
    if not source.encoders:
        yield
        return
    for name, encoder in source.encoders.items():
        within = f"{_ENCODERS}.{name}."
        own = {key.removeprefix(within): weight for key, weight in weights.items() if key.startswith(within)}
        encoder.load_state_dict(own, strict=False, assign=True)
    live = model._modules[_ENCODERS]
    model._modules[_ENCODERS] = nn.ModuleDict(dict(source.encoders)).eval()
    try:
        yield
    finally:
        model._modules[_ENCODERS] = live


def _write(source: AdapterSource, weights: Mapping[str, Tensor], folder: Path) -> bytes:
    """Lets PEFT write ``weights`` on this rank; returns the paths of the files."""
    model: Any = source.model
    moved = []
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as written:
            with source.shapes(), _prompts_from(source, weights), torch.no_grad():
                type(model).save_pretrained(model, written, state_dict=weights)  # of the object it is refused
            for file in sorted(path for path in Path(written).rglob("*") if path.is_file()):
                target = folder / file.relative_to(written)
                if file.name != _CARD or not target.exists():  # a person may have edited the card
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, target)
                    follow_umask(target)
                    moved.append(str(target))
    except OSError as error:
        raise CheckpointError(
            f"save_pretrained: {folder} cannot be written ({error.strerror or error}); make room, or choose another "
            "folder."
        ) from error
    return json.dumps(moved).encode()
