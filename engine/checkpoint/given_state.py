"""Weights from a state dict of the whole model that rank 0 holds: the inverse of ``full_state_dict``.

rank 0     tells the names, dtypes and shapes of what it was given     label "start"
all        compare them with the model, and raise alike
chunk ->   the bytes of rank 0: all-reduce (max) over the world        label "weights"
           each rank reads the elements that it holds
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.host_image import in_batches, kind_of
from engine.checkpoint.format.safetensors_file import TensorKind
from engine.checkpoint.load import AT_ONCE, Loader, share_weights
from engine.checkpoint.run_state import RunState
from engine.checkpoint.weights_transfer import Image, kind_bytes, shared_image
from engine.errors import CheckpointError
from engine.parallel.comm.agreement import from_first

_SOURCE = "the state that rank 0 was given"


@torch.no_grad()
def load_given(run: RunState, state: Mapping[str, Any], strict: bool) -> None:
    """Fill the weights and persistent buffers of all ranks from the ``state`` of rank 0. Collective.

    Raises:
        CheckpointError: a key is unknown or missing, a tensor has another shape or no floating-point dtype where the
            model has one; on all ranks, before a weight is changed.
    """
    told = from_first(lambda: json.dumps(_described(run, state)).encode(), run.comm, run.device)
    kinds, keys = {}, {}
    for name, (key, dtype, shape) in json.loads(told).items():
        kinds[name], keys[name] = TensorKind(dtype, tuple(shape)), key
    Loader(Image(kinds, {}, _SOURCE), run.local_tensors, run.buffers, strict).check()
    known = [name for name in kinds if name in run.keys]
    for names in in_batches(known, lambda name: kind_bytes(kinds[name]), AT_ONCE):
        chunk = {name: kinds[name] for name in names}
        image = shared_image(run, chunk, lambda made: _fill(run, made, state, keys))
        live = {name: tensor for name, tensor in run.buffers.items() if name in chunk}
        Loader(image, run.local_tensors, live, strict=False).read_weights()
    share_weights(run.runtime.buckets, run.comm)
    if run.runtime.average is not None:
        run.runtime.average.forget()


def _described(run: RunState, state: Mapping[str, Any]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Key, dtype and shape of each tensor, by "param/..." or "buffer/..."; a tensor with several keys counts once."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_full_state_dict was given a {type(state).__name__} on rank 0; give a mapping of names to tensors, "
            "such as eng.full_state_dict() returns."
        )
    names = {key: name for name, own in run.keys.items() for key in own}
    others = {key for key, entry in run.full_state.entries.items() if entry.kind == "other"}
    found: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for key, value in state.items():
        if key in others:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"load_full_state_dict was given a {type(value).__name__} as {key!r} on rank 0; give a tensor."
            )
        kind = kind_of(value)
        found.setdefault(names.get(key, f"param/{key}"), (key, kind.dtype, kind.shape))
    return found


def _fill(run: RunState, image: Image, state: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    if run.comm.grid.rank == 0:
        for name, place in image.places.items():
            place.copy_(state[keys[name]].detach().cpu().contiguous().view(-1).view(torch.uint8))
