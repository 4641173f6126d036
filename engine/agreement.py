"""Whether all ranks were given the same configuration, model, weights and plan, before anything trains."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.bits import bit_sum
from engine.errors import ConfigError, EngineError, PlanError
from engine.parallel.comm import Comm
from engine.plan import Plan

_UNREADY = "could not make ready for this run, so no rank starts"


@contextmanager
def all_or_none(comm: Comm, device: torch.device, failure: str = _UNREADY) -> Iterator[None]:
    """What is inside succeeds on all ranks, or all raise: who fails its own error, the others "rank r" and ``failure``.

    One all-gather of 8 bytes a rank over the world, label "start". Inside, nothing may be communicated.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    failed = _gather(torch.tensor([problem is not None], dtype=torch.int64), comm, device, "start").flatten()
    if problem is not None:
        raise problem
    if failed.any():
        raise EngineError(f"rank {int(failed.nonzero()[0])} {failure}; its message tells why.")


def from_first(make: Callable[[], bytes], comm: Comm, device: torch.device) -> bytes:
    """What rank 0 makes, on every rank; if it cannot, all raise: rank 0 its own error, the others that it did.

    Two all-reduces over the world, label "start": the length, then the bytes. Other ranks do not call ``make``.
    """
    made, problem = b"", None
    if comm.grid.rank == 0:
        try:
            made = make()
        except Exception as error:
            problem = error
    length = torch.tensor([-1 if problem is not None else len(made)], dtype=torch.int64, device=device)
    comm.all_reduce(length, "world", "start").wait()
    if problem is not None:
        raise problem
    if int(length) < 0:
        raise EngineError(f"rank 0 {_UNREADY}; its message tells why.")
    data = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if made:
        data.copy_(torch.frombuffer(bytearray(made), dtype=torch.uint8))
    comm.all_reduce(data, "world", "start").wait()
    return data.cpu().numpy().tobytes()


@torch.no_grad()
def check_equal(model: nn.Module, plan: Plan, comm: Comm, device: torch.device) -> None:
    """Refuse ranks that were given different configurations, models or weights, or plan differently.

    One all-gather of four hashes; only when the weights differ a second one finds the first parameter.
    """
    config = plan.config
    named = [*model.named_parameters(), *model.named_buffers()]
    sums = torch.tensor([int(bit_sum(tensor)) for _, tensor in named], dtype=torch.int64)
    settings = json.dumps(config.to_json(), sort_keys=True)
    aliased = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    structure = repr([(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in aliased])
    division = repr([(row.name, row.owners, row.ranges) for row in plan.table]) + repr(plan.cut and plan.cut.boundaries)
    texts = (settings.encode(), structure.encode(), sums.numpy().tobytes(), division.encode())
    hashes = [_hash(text) for text in texts]
    gathered = _gather(torch.stack(hashes), comm, device)
    if others := _differing(gathered, 0):
        raise ConfigError(f"rank 0 and rank {others[0]} were given different configurations; pass the same to all.")
    if others := _differing(gathered, 1):
        raise PlanError(
            f"rank 0 and rank {others[0]} were given different models (names, shapes, dtypes or requires_grad); build "
            "the same model on every rank."
        )
    if others := _differing(gathered, 3):
        raise PlanError(
            f"rank 0 and rank {others[0]} would cut the model at different places, because their first batches differ; "
            "pass the same example_batch to engine.initialize on every rank."
        )
    if _differing(gathered, 2):
        table = _gather(sums, comm, device)
        column = next(i for i in range(len(named)) if _differing(table, i))
        raise PlanError(
            f"rank 0 and rank {_differing(table, column)[0]} were given different weights, first in "
            f"{named[column][0]!r}; build the model with the same seed on every rank (torch.manual_seed), or pass "
            "a callable that builds it."
        )


def _gather(values: Tensor, comm: Comm, device: torch.device, label: str = "equal weights") -> Tensor:
    world = comm.grid.world_size
    table = torch.zeros(world, values.numel(), dtype=values.dtype, device=device)
    table[comm.grid.rank] = values.to(device)
    comm.all_gather(table.view(-1), table[comm.grid.rank], "world", label).wait()
    return table.cpu()


def _differing(table: Tensor, column: int) -> list[int]:
    return [int(rank) for rank in (table[:, column] != table[0, column]).nonzero().flatten()]


def _hash(data: bytes) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int64)
