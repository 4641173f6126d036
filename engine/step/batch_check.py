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

_REFUSED = -1
_GLIMPSE = 4096
"""Bytes of each tensor that a glimpse reads."""
_MOVED, _TRAINS = 61, 62
"""Positions of two flag bits above the 61-bit hash of a batch."""


def take_batch(
    take: Callable[[], list[Batch]], comm: Comm, device: torch.device, moved: bool = False
) -> tuple[list[Batch], BaseException | None, bool]:
    """Calls ``take`` for the microbatches of a step, and compares them on all ranks of the replica, which is all ranks
    of one full copy of the model. They must be equal.

    ``moved``: True if attributes of the model, on which its forward may depend, have changed on this rank.

    Returns (microbatches, problem, moved anywhere). The problem is the error of ``take`` or of the comparison; None if
    both succeeded. The last value is True if ``moved`` was True on any rank of the replica.

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
    """Checks that all ranks of a replica, which is all ranks of one full copy of the model, have equal batches.

    Sends one all-gather of 8 bytes a rank over the replica, label "batch check". Also compares the grad mode, because
    ranks that train and ranks that evaluate call different collectives.

    ``problem``: exception that left this rank without a batch; every other rank of the replica then raises. This rank
    does not: its caller raises ``problem``. ``moved``: True if attributes of the model have changed on this rank.
    Returns True if ``moved`` was True on any rank of the replica.

    Raises:
        EngineError: batches or grad modes differ, on every rank of the replica; or another rank has no batch.
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
                f"data coordinate (here {grid.row_rank}) must pass the same batch: let the sampler use "
                "grid.coord().dp and grid.dp."
            )
    return anywhere


def check_paths(paths: Sequence[int], problem: BaseException | None, comm: Comm, device: torch.device) -> None:
    """Checks that all ranks of a replica (one full copy of the model) have traced the same path through the model's
    modules.

    ``paths``: hash of each traced forward of this rank. ``problem``: exception that tracing has raised on this rank, or
    None; unless it is a PlanError, this rank only returns. One all-gather of 8 bytes a rank over the replica, label
    "path check".

    Raises:
        EngineError: paths differ, or only some ranks have a ``problem``.
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
    """Returns the name of the first persistent floating-point buffer with content that differs between data ranks; None
    if all agree.

    Such buffers are running statistics or averages, for example. Collective: one all-gather of 8 bytes a buffer over
    axis dp, label "buffer check"; none without such buffers.
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
    """Returns a hash of the names, shapes, dtypes and content of all tensors in a step's microbatches, from 1 to 2^20.

    The range is small so that sums of squared hashes are exact in fp64 over any number of ranks.
    """
    return _digest(microbatches) % (2**20 - 3) + 1


def glimpse(microbatch: Batch) -> int | None:
    """Returns a cheap hash of a microbatch, from the name, shape, dtype and first 4 KiB of each tensor.

    None if the microbatch has no tensors, or if one of them is on a GPU. The content of a non-contiguous tensor is
    ignored.
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
