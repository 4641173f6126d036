"""Transfer of weights between two engines on the same ranks with any two grids, such as a policy and its generator.

chunk of parameters ->  each rank writes its own elements into an image of the full tensors, zeros elsewhere
                        all-reduce (max) of the bytes over the world, label "weights"
                        each rank reads its elements
A rank has one chunk of full tensors in memory, never the full model.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.contents.local_tensors import Held
from engine.checkpoint.format.host_image import as_bytes, kind_of
from engine.checkpoint.format.pieces import Piece
from engine.checkpoint.format.safetensors_file import TensorKind, in_batches
from engine.checkpoint.format.step_reader import ReadRequest
from engine.checkpoint.load import AT_ONCE, Loader, share_weights
from engine.checkpoint.run_state import RunState
from engine.errors import CheckpointError, EngineError
from engine.parallel.comm.agreement import from_first
from engine.zero.optim.master_weights import sync_masters


def copy_weights(source: RunState, target: RunState) -> None:
    """Copies parameters and persistent buffers of ``source`` into ``target``, cast to the target's dtypes. Collective
    over the world.

    If ``source`` has fp32 masters, copies their values instead of the rounded weights. If ``target`` has masters, they
    receive the values too. Other optimizer state does not change.

    Raises:
        EngineError: the models differ, frozen weights are quantized, or the engines run on different ranks. All ranks
            raise, before a weight is changed.
    """
    kinds = _checked_kinds(source, target)
    for flat in source.runtime.buckets:
        sync_masters(flat)
    for names in in_batches(kinds, lambda name: kinds[name].bytes, AT_ONCE):
        chunk = {name: kinds[name] for name in names}
        image = shared_image(source, chunk, lambda made: _write(source, made))
        live = {name: tensor for name, tensor in target.buffers.items() if name in chunk}
        Loader(image, target.local_tensors, live, strict=False).read_weights()
    share_weights(target.runtime.buckets, target.comm)
    _restart_iterates(target)


def _restart_iterates(run: RunState) -> None:
    """Restarts the averages of a schedule-free optimizer, so that an evaluation has the weights that were given."""
    averaged = run.runtime.averaged
    if averaged is not None and averaged.by_itself:
        averaged.average.forget()


def _checked_kinds(source: RunState, target: RunState) -> dict[str, TensorKind]:
    """Returns dtype and shape of the sent tensors, after a check that ``target`` has them in the same shapes."""
    sizes = [run.comm.grid.world_size for run in (source, target)]
    if sizes[0] != sizes[1]:
        raise EngineError(
            f"copy_weights_from: the engines run on {sizes[0]} and {sizes[1]} ranks; start both on the same ranks."
        )
    for run, which in ((source, "the other"), (target, "this")):
        if any(row.quantized is not None for row in run.runtime.plan.table):
            raise EngineError(
                f"copy_weights_from: {which} engine stores frozen weights in 8 or 4 bits (quantize_frozen), but only "
                "unquantized weights can be copied; leave quantize_frozen out of the configurations of both engines."
            )
    kinds, wanted = _kinds(source), _kinds(target)
    theirs, own = ({name: kind.shape for name, kind in of.items()} for of in (kinds, wanted))
    for name in sorted(theirs.keys() ^ own.keys() | {name for name in own if theirs.get(name) != own[name]}):
        given = [str(list(shapes[name])) if name in shapes else "nothing" for shapes in (theirs, own)]
        raise EngineError(
            f"copy_weights_from: {name.partition('/')[2]!r} is {given[0]} in the other engine and {given[1]} in this "
            "one; build both with the same model."
        )
    return kinds


def _kinds(run: RunState) -> dict[str, TensorKind]:
    """Returns dtype and shape of the sent tensors, equal on every rank."""
    kinds = {f"buffer/{name}": kind for name, kind in run.full_state.buffer_kinds().items()}
    kinds |= {f"param/{row.name}": (run.full_state.widest_dtype(row), row.shape) for row in run.runtime.plan.table}
    return {name: kind_of(torch.empty(0, dtype=dtype), shape) for name, (dtype, shape) in kinds.items()}


@dataclass(frozen=True, slots=True)
class Image:
    """Full tensors by name in one CPU buffer, which a load can read like a checkpoint."""

    kinds: Mapping[str, TensorKind]
    places: Mapping[str, Tensor]
    """uint8 view of the buffer for each tensor."""
    name: Path | str = "the other engine"

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Reads each requested piece from the buffer into the request's memory."""
        for request in wanted:
            _copy(request.piece, self.kinds[request.tensor].width, self.places[request.tensor], request.target, True)

    def write(self, tensor: str, piece: Piece, values: Tensor) -> None:
        """Copies ``values`` into the buffer, as the elements ``piece`` of ``tensor``."""
        _copy(piece, self.kinds[tensor].width, self.places[tensor], as_bytes(values), False)


def _copy(piece: Piece, width: int, full: Tensor, local: memoryview, out: bool) -> None:
    """Copies the stretches of a piece between the full tensor and its own memory, both as bytes."""
    if not len(local):
        return
    own = torch.frombuffer(local, dtype=torch.uint8)
    for start, at, length in zip(*(numbers.tolist() for numbers in piece.spans()), strict=True):
        there = full[start * width : (start + length) * width]
        here = own[at * width : (at + length) * width]
        (here if out else there).copy_(there if out else here)


def shared_image(run: RunState, kinds: Mapping[str, TensorKind], fill: Callable[[Image], None]) -> Image:
    """Returns full tensors on every rank, in one CPU buffer joined from pieces that all ranks write. Makes one
    all-reduce over the world (maximum of each byte; traffic label "weights").

    Args:
        run: state of an engine, for its process groups and device.
        kinds: dtype and shape of each returned tensor, by name.
        fill: callback that writes this rank's pieces into the tensors, which begin as zeros. Ranks that write the same
            element write the same value.
    """
    sizes = [kind.bytes for kind in kinds.values()]
    whole = torch.zeros(sum(sizes), dtype=torch.uint8)
    image = Image(kinds, dict(zip(kinds, torch.split(whole, sizes), strict=True)))
    fill(image)
    there = whole.to(run.device)
    run.comm.all_reduce(there, "world", "weights", "max").wait()
    whole.copy_(there)
    return image


def _write(source: RunState, image: Image) -> None:
    """Writes this rank's elements of the chunk."""
    kinds = image.kinds
    for held in _widest(source):
        name = f"param/{held.row.name}"
        if name in kinds:
            image.write(name, held.own, held.values.detach().cpu().contiguous())
    for tensor in source.tensors:
        if tensor.row is None and tensor.name in kinds and tensor.owner == source.comm.grid.rank:
            buffer = source.buffers[tensor.name].detach().cpu().contiguous()
            image.places[tensor.name].copy_(buffer.view(-1).view(torch.uint8))


def _widest(run: RunState) -> Iterable[Held]:
    """Returns this rank's tensor of each parameter: its master if there is one."""
    local = run.local_tensors
    held = {each.row.name: each for each in local.weights()}
    return (held | {each.row.name: each for each in local.masters()}).values()


_SOURCE = "the state that rank 0 was given"


@torch.no_grad()
def load_given(run: RunState, state: Mapping[str, Any], strict: bool) -> None:
    """Loads weights and persistent buffers on all ranks from rank 0's ``state``, a full state dict; on other ranks it
    is ignored. Collective over the world.

    Raises:
        CheckpointError: a tensor has the wrong shape or dtype (floating-point dtypes may differ); or, with ``strict``,
            a key is unknown or missing. All ranks raise, before a weight is changed.
    """
    told = from_first(lambda: json.dumps(_described(run, state)).encode(), run.comm, run.device)
    kinds, keys = {}, {}
    for name, (key, dtype, shape) in json.loads(told).items():
        kinds[name], keys[name] = TensorKind(dtype, tuple(shape)), key
    buffers = {
        f"buffer/{name}": torch.empty(shape, dtype=dtype, device="meta")
        for name, (dtype, shape) in run.full_state.buffer_kinds().items()
    }  # equal on all ranks, so that all or none raise
    Loader(Image(kinds, {}, _SOURCE), run.local_tensors, buffers, strict).check()
    known = [name for name in kinds if name in run.keys]
    for names in in_batches(known, lambda name: kinds[name].bytes, AT_ONCE):
        chunk = {name: kinds[name] for name in names}
        image = shared_image(run, chunk, lambda made: _fill(run, made, state, keys))
        live = {name: tensor for name, tensor in run.buffers.items() if name in chunk}
        Loader(image, run.local_tensors, live, strict=False).read_weights()
    share_weights(run.runtime.buckets, run.comm)
    for companion in run.runtime.inventory.companions:
        companion.forget()
    _restart_iterates(run)


def _described(run: RunState, state: Mapping[str, Any]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """Returns key, dtype and shape of each tensor, by "param/..." or "buffer/..."; several keys of a tensor count
    once."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"load_full_state_dict was given a {type(state).__name__} on rank 0; pass a mapping of names to tensors, "
            "such as the result of eng.full_state_dict()."
        )
    names = {key: name for name, own in run.keys.items() for key in own}
    others = {key for key, entry in run.full_state.entries.items() if entry.kind == "other"}
    found: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for key, value in state.items():
        if key in others:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"load_full_state_dict was given a {type(value).__name__} as {key!r} on rank 0; pass a tensor."
            )
        kind = kind_of(value)
        found.setdefault(names.get(key, f"param/{key}"), (key, kind.dtype, kind.shape))
    return found


def _fill(run: RunState, image: Image, state: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    if run.comm.grid.rank == 0:
        for name, place in image.places.items():
            place.copy_(state[keys[name]].detach().cpu().contiguous().view(-1).view(torch.uint8))
