"""Batch check: verifies, before any computation, that all ranks of a replica were passed the same batch.

The tensor and pipeline ranks of a replica work on the same rows; different rows would train silently wrong, or hang.
The same exchange shows that attributes of the model have changed on a rank. The ranks of a pipeline then compare their
traced paths, because a forward that counts its calls would take a different path on each rank.

The buffer check runs once: data ranks read different rows, so buffers that a forward writes may differ between them.
"""

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engine.errors import EngineError, PlanError
from engine.kernels.device import is_host
from engine.parallel.comm.agreement import gather_from_all
from engine.parallel.comm.comm import Comm
from engine.program.batch import Batch, named_tensors
from engine.step.failed_ranks import OtherRankError

SAMPLER_ADVICE = (
    "let the sampler use eng.grid.coord().dp and eng.grid.dp (under engine.deepspeed: "
    "model_engine.grid.get_data_parallel_rank() and model_engine.grid.get_data_parallel_world_size())"
)
"""Advice in messages about batches that the wrong ranks share."""
_REFUSED = -1
_GLIMPSE = 4096
"""Bytes of each tensor that a glimpse reads."""
_MOVED, _TRAINS = 61, 62
"""Positions of two flag bits above the 61-bit hash of a batch."""


def take_batch(
    take: Callable[[], list[Batch]], comm: Comm, device: torch.device, moved: bool = False
) -> tuple[list[Batch], BaseException | None, bool]:
    """Takes a step's microbatches, and checks that they are equal on all ranks of the replica (one full copy of the
    model).

    Returns (microbatches, problem, changed). The problem is the error of ``take`` or of the check, or None. ``changed``
    is True if ``moved`` is True on any rank of the replica; False after a problem, or with one rank.

    ``moved``: True if attributes of this rank's model have changed since the last comparison of forward traces between
    ranks.

    Raises:
        EngineError: a rank of the replica did not take part, or has ended.
    """
    microbatches: list[Batch] = []
    problem: BaseException | None = None
    anywhere = False
    try:
        microbatches = take()
    except (Exception, KeyboardInterrupt) as error:  # an iterator may fail in any way
        problem = error
    try:
        anywhere = check_batch(microbatches, problem, comm, device, moved)
    except EngineError as error:
        if isinstance(error.__cause__, RuntimeError):
            raise  # the check itself could not be made: a rank is lost, and no step can agree on anything
        problem = error
    return microbatches, problem, anywhere


def check_batch(
    microbatches: Sequence[Batch], problem: BaseException | None, comm: Comm, device: torch.device, moved: bool = False
) -> bool:
    """Checks that all ranks of a replica (one full copy of the model) have equal batches and equal grad modes.

    One all-gather of 8 bytes a rank over the replica, label "batch check". Returns True if ``moved`` is True on any
    rank. On a rank with a ``problem``, returns False and never raises for batches. A replica of one rank communicates
    nothing and returns False.

    ``problem``: exception that left this rank without a batch, or None.
    ``moved``: True if attributes of this rank's model have changed since the last comparison of forward traces between
    ranks.

    Raises:
        EngineError: batches or grad modes differ between ranks, or another rank has a ``problem``.
    """
    ranks = comm.grid.size("replica")
    if ranks == 1:
        return False
    flags = torch.is_grad_enabled() << _TRAINS | moved << _MOVED
    digest = _REFUSED if problem is not None else _digest(microbatches) | flags
    mine = torch.tensor([digest], dtype=torch.int64)
    table = gather_from_all(mine, comm, device, "batch check", "replica").flatten()
    if problem is not None:
        return False
    digests, grid = table.tolist(), comm.grid
    peers = grid.peers("replica")
    for other, rank in zip(digests, peers, strict=True):
        if other == _REFUSED:
            raise OtherRankError(
                f"rank {rank} refused its batch, so no rank makes this step; see the error of rank {rank}."
            )
    anywhere = any(other >> _MOVED & 1 for other in digests)
    digests = [other & ~(1 << _MOVED) for other in digests]
    for other, rank in zip(digests, peers, strict=True):
        if other >> _TRAINS != digests[0] >> _TRAINS:
            raise EngineError(
                f"rank {peers[0]} and rank {rank} make different calls of the engine: one trains and the other does "
                "not; make the same calls in the same order on all ranks."
            )
        if other != digests[0]:
            raise EngineError(
                f"rank {peers[0]} and rank {rank} were given different batches; all ranks of a "
                f"data coordinate (here {grid.row_rank}) must pass the same batch: {SAMPLER_ADVICE}."
            )
    return anywhere


def check_paths(paths: Sequence[int], problem: BaseException | None, comm: Comm, device: torch.device) -> None:
    """Checks that all ranks of a replica (one full copy of the model) have traced the same path through the modules.

    One all-gather of 8 bytes a rank over the replica, label "path check". ``paths``: hash of each forward of this rank.
    ``problem``: exception of a trace on this rank, or None.

    Raises:
        EngineError: paths differ, or only some ranks have a ``problem``. A rank never raises if its own ``problem`` is
            another exception than a PlanError.
    """
    digest = _REFUSED if problem is not None else zlib.crc32(repr(list(paths)).encode())
    mine = torch.tensor([digest], dtype=torch.int64)
    digests = gather_from_all(mine, comm, device, "path check", "replica").flatten().tolist()
    odd = next((place for place, other in enumerate(digests) if other != digests[0]), None)
    if odd is None or not isinstance(problem, PlanError | None):
        return
    peers = comm.grid.peers("replica")
    raise EngineError(
        f"the forward takes different paths through the modules on rank {peers[0]} and on rank {peers[odd]}: it "
        "follows an attribute that a forward changes (a counter of its calls), which a pipeline stage changes only in "
        "the modules it runs; choose the path by shapes of the input and by attributes that have equal values on all "
        "ranks between steps, or set parallel.pipeline to 1."
    ) from problem


def differing_buffer(model: nn.Module, comm: Comm, device: torch.device) -> str | None:
    """Returns the name of the first persistent floating-point buffer that differs between data ranks, or None.

    All-gathers 8 bytes for each such buffer over dp, label "buffer check".
    """
    unsaved = {id(m._buffers[leaf]) for m in model.modules() for leaf in m._non_persistent_buffers_set}
    buffers = {name: b for name, b in model.named_buffers() if id(b) not in unsaved and b.is_floating_point()}
    if comm.grid.row_ranks == 1 or not buffers:
        return None
    mine = torch.tensor([_content(b.detach(), 0) for b in buffers.values()], dtype=torch.int64)
    table = gather_from_all(mine, comm, device, "buffer check", comm.grid.rows)
    differs = (table != table[0]).any(dim=0).tolist()
    return next((name for name, differ in zip(buffers, differs, strict=True) if differ), None)


def small_digest(microbatches: Sequence[Batch]) -> int:
    """Returns a hash, from 1 to 2^20, of names, shapes, dtypes and content of all tensors in a step's microbatches."""
    return _digest(microbatches) % (2**20 - 3) + 1


def glimpse(microbatch: Batch) -> int | None:
    """Returns a cheap hash of a microbatch: name, shape, dtype and first 4 KiB of each tensor.

    Returns None without tensors or with a tensor on a GPU. Ignores the content of non-contiguous tensors.
    """
    found: int | None = None
    for name, tensor in named_tensors(microbatch):
        if not is_host(tensor.device):
            return None
        found = zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), found or 0)
        if tensor.is_contiguous() and tensor.numel():
            first = tensor.detach().view(-1)[: max(1, _GLIMPSE // tensor.element_size())]
            found = zlib.crc32(first.view(torch.uint8).numpy().data, found)
    return found


def _digest(microbatches: Sequence[Batch]) -> int:
    """Returns a 61-bit digest of names, shapes, dtypes and content of all tensors."""
    shapes, content = 0, 0
    for index, microbatch in enumerate(microbatches):
        for name, tensor in named_tensors(microbatch):
            shapes = zlib.crc32(f"{index} {name} {tuple(tensor.shape)} {tensor.dtype}".encode(), shapes)
            content = _content(tensor.detach(), content)
    return (shapes & 0x1FFFFFFF) << 32 | content


def _content(tensor: Tensor, before: int) -> int:
    data = tensor.contiguous().reshape(-1)
    if not data.numel():
        return before
    octets = data.view(torch.uint8)
    if is_host(tensor.device):
        return zlib.crc32(octets.numpy().data, before)
    # on an accelerator, a sum weighted by position: the host reads one number only
    weights = torch.arange(octets.numel(), device=octets.device).remainder_(65521).add_(1)
    return zlib.crc32(int((octets * weights).sum()).to_bytes(8, "little", signed=True), before)
