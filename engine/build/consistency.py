"""Whether all ranks were given the same configuration, model, weights and plan, before anything trains."""

import hashlib
import json

import torch
from torch import Tensor, nn

from engine.errors import ConfigError, PlanError
from engine.parallel.comm.agreement import bit_sum, gather_from_all
from engine.parallel.comm.comm import Comm
from engine.planning.plan import Plan


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
    gathered = gather_from_all(torch.stack(hashes), comm, device)
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
        table = gather_from_all(sums, comm, device)
        column = next(i for i in range(len(named)) if _differing(table, i))
        raise PlanError(
            f"rank 0 and rank {_differing(table, column)[0]} were given different weights, first in "
            f"{named[column][0]!r}; build the model with the same seed on every rank (torch.manual_seed), or pass "
            "a callable that builds it."
        )


def _differing(table: Tensor, column: int) -> list[int]:
    return [int(rank) for rank in (table[:, column] != table[0, column]).nonzero().flatten()]


def _hash(data: bytes) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int64)
