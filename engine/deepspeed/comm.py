"""``deepspeed.comm``: the functions of torch.distributed, and ``init_distributed``."""

from typing import Any

import torch
import torch.distributed as dist

from engine.parallel.comm.world import open_world, read_world


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(dist, name)


def init_distributed(*_: Any, **__: Any) -> None:
    """Start the default process group as the launcher says, unless there is one; ``initialize`` starts it too.

    NCCL on GPUs, gloo otherwise, with the timeout of ``TRINE_TIMEOUT_SECONDS``: DeepSpeed's arguments change nothing.
    """
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
