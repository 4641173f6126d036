"""Keys of a Hugging Face model's parameters in published folders, where they differ from ``model.state_dict()``.

transformers renames and stacks tensors when it loads a folder: the experts of a layer are published one by one and are
one parameter in memory. Its own reversal runs here on meta tensors; their views show which elements of a parameter each
published tensor has:

    mlp.experts.gate_up_proj [E, 2 I, H]  ->  mlp.experts.0.gate_proj.weight [I, H], elements 0 .. I H
                                              mlp.experts.0.up_proj.weight   [I, H], elements I H .. 2 I H, ...
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.checkpoint.format.pieces import tiles
from engine.checkpoint.format.safetensors_file import FilePart


def published_parts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[FilePart, ...]]:
    """Returns a dict: key of a parameter -> the tensors into which transformers divides it when it saves a model
    folder.

    Example: the folder has one tensor for each expert, where the model has one stacked parameter. The dict lacks
    parameters that keep their key in the folder, and parameters that are not divided into contiguous parts. Returns {}
    for models that are not from transformers.

    Args:
        shapes: full shape of every parameter, by its key in ``model.state_dict()``.
    """
    if not hasattr(type(model), "base_model_prefix"):
        return {}
    try:
        from transformers import core_model_loading as loading
    except ImportError:  # transformers before 5 publishes the keys of state_dict
        return {}
    revert: Any = loading.revert_weight_conversion
    given = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    owners = {tensor.untyped_storage()._cdata: key for key, tensor in given.items()}
    with _Views():
        published: Mapping[str, Tensor] = revert(model, dict(given))
    found: dict[str, list[FilePart]] = {}
    for name, tensor in published.items():
        key = owners.get(tensor.untyped_storage()._cdata)
        if key is not None and tensor.is_contiguous():
            found.setdefault(key, []).append(FilePart(name, tuple(tensor.shape), int(tensor.storage_offset())))
    ordered = {key: tuple(sorted(parts, key=lambda part: part.start)) for key, parts in found.items()}
    return {
        key: parts
        for key, parts in ordered.items()
        if parts[0].key != key
        and tiles([(part.start, part.start + part.elements) for part in parts], given[key].numel())
    }


class _Views(TorchFunctionMode):
    """Mode in which ``contiguous`` returns its tensor, so that a piece of a meta tensor stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))
