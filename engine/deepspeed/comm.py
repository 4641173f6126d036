"""``deepspeed.comm``: the functions of torch.distributed, and ``init_distributed``."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.kernels.device import collectives_for
from engine.parallel.comm.world import open_world, read_world, timeout_seconds


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500,
    verbose: bool = True, timeout: timedelta | None = None, init_method: str | None = None,
    dist_init_required: bool | None = None, config: Any = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Starts torch's default process group over all ranks, unless it exists. Collective.

    The backend is NCCL on GPUs and gloo on the CPU.

    Args:
        timeout: time limit of collectives; ignored unless ``init_method`` or ``rank`` is passed. Default: the
            environment variable ``TRINE_TIMEOUT_SECONDS``.
        init_method: torch's rendezvous URL, in place of the launcher's.
        rank: rank of this process; -1: the launcher's value.
        world_size: number of processes; ignored unless ``init_method`` or ``rank`` is passed. -1: the launcher's value.

    All other arguments have no effect.
    """
    if not dist.is_initialized() and (init_method is not None or rank >= 0):
        told = read_world()
        dist.init_process_group(
            collectives_for(told.device),
            init_method=init_method,
            rank=told.rank if rank < 0 else rank,
            world_size=told.size if world_size < 0 else world_size,
            timeout=timeout or timedelta(seconds=timeout_seconds()),
        )
    open_world(read_world())


def default_backend(kind: str) -> str:
    """Returns torch's default torch.distributed backend for device type ``kind``, such as "nccl" for "cuda"."""
    return str(dist.get_default_backend_for_device(kind))


def world_group() -> Any:
    """Returns torch's default process group, which has all ranks; None if no group was started."""
    return dist.group.WORLD if dist.is_initialized() else None


def share_from(tensor: torch.Tensor, rank: int) -> None:
    """Broadcasts ``tensor`` from rank ``rank`` to all ranks, in place; no effect without a process group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src=rank)


def from_every_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns a list with the ``tensor`` of each rank, in rank order. Collective.

    The tensors of all ranks have one shape and dtype.
    """
    if not dist.is_initialized():
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found
