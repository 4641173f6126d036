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
    """Start the default process group, unless there is one, as the launcher says; ``initialize`` starts it too.

    NCCL on GPUs, gloo otherwise, with the timeout of ``TRINE_TIMEOUT_SECONDS``. The other arguments change nothing.

    Args:
        init_method: the place where ranks meet, as torch takes it, in place of the launcher's.
        rank: this process among the ``world_size`` of them; -1: as the launcher says.
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
    """Backend of a type of device."""
    return str(dist.get_default_backend_for_device(kind))


def world_group() -> Any:
    """The group of all ranks; None in one process without a group."""
    return dist.group.WORLD if dist.is_initialized() else None


def wait_for_all() -> None:
    """A barrier, where there is more than one process."""
    if dist.is_initialized():
        dist.barrier()


def share_from(tensor: torch.Tensor, rank: int) -> None:
    """Give every rank the values that ``rank`` has."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(tensor, src=rank)


def from_every_rank(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of each rank, all of the same shape."""
    if not dist.is_initialized():
        return [tensor]
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor)
    return found
