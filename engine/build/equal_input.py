"""Checks that versions, configuration, model, weights and plan are equal on all ranks.

describe_input     text by key, compared in the rendezvous store before groups exist (``parallel/comm/rendezvous``)
check_equal        hashes of weights and plan; with ``initial_weights: "rank0"``, rank 0 broadcasts its weights before
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.format.safetensors_file import in_batches
from engine.config import Config
from engine.errors import ConfigError, EngineError, GridError, PlanError
from engine.parallel.comm.agreement import bit_sum, differing, gather_from_all, take_from
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.rendezvous import Difference
from engine.parallel.model.side_effects import overwrite
from engine.planning.plan import Plan

_AT_ONCE = 1 << 26
"""Bytes of one all-reduce of weights."""
_SETUP, _CONFIG, _MODEL = "setup ", "config ", "model "
"""Prefixes of keys in a description, which determine the wording of an error."""


def describe_input(model: nn.Module, config: Config, device: torch.device) -> dict[str, str]:
    """Returns texts that must be equal on all ranks, by key: versions, device type, configuration and model.

    The model's entries are module classes, shapes and dtypes of tensors, ``requires_grad`` and numeric attributes.
    Private attributes, and attributes named after a rank or device, are left out.
    """
    setup = {"trine": _trine_version(), "torch": str(torch.__version__), "python": _python(), "device": device.type}
    return {
        **{_SETUP + name: value for name, value in setup.items()},
        **describe_config(config),
        **{_MODEL + key: value for key, value in _structure(model)},
    }


def describe_config(config: Config) -> dict[str, str]:
    """Returns the full configuration as a flat dict, for a comparison between ranks: "config " and the dotted path ->
    JSON text.
    """
    return {_CONFIG + key: value for key, value in _flat({"parallel": None} | config.to_json())}


def difference_error(difference: Difference) -> EngineError:
    """Returns the error that every rank raises if ranks were started with different input.

    It is a ConfigError for different configurations, a PlanError for different models, or a GridError for different
    versions or devices.

    Args:
        difference: first key with different values, and these values.
    """
    kind, _, key = difference.key.partition(" ")
    told = str(Difference(key, difference.values))
    if kind == _CONFIG.strip():
        return ConfigError(f"{told}: ranks were given different configurations; pass the same one on every rank.")
    if kind == _MODEL.strip():
        return PlanError(f"{told}: ranks were given different models; build the same model on every rank.")
    if key == "device":
        return GridError(
            f"{told}, but all ranks must train on devices of one type; use only nodes with usable GPUs, or hide the "
            "GPUs of every node, for example with CUDA_VISIBLE_DEVICES=''."
        )
    return GridError(f"{told}, but all ranks must run the same version; install it on every node.")


def _trine_version() -> str:
    try:
        return version("trine")
    except PackageNotFoundError:
        return "not installed, run from its source"


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, JSON of the value) of each value inside a JSON value that is not an object."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, json.dumps(value, sort_keys=True)


def _structure(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield f"class of {name or 'the model'}", type(module).__qualname__
        for key, value in sorted(vars(module).items()):
            if type(value) in (int, float, bool) and not key.startswith("_") and not {"rank", "device"} & _words(key):
                yield f"{name}.{key}" if name else key, repr(value)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, f"{tuple(parameter.shape)} {parameter.dtype}{'' if parameter.requires_grad else ', frozen'}"
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, f"{tuple(buffer.shape)} {buffer.dtype}"


def _words(name: str) -> set[str]:
    return set(name.lower().split("_"))


@torch.no_grad()
def check_equal(model: nn.Module, plan: Plan, comm: Comm, device: torch.device) -> None:
    """Raises on all ranks if weights or plans differ between ranks. All ranks of the world must call it.

    If ``initial_weights`` is "rank0", rank 0 first broadcasts its weights. Then one all-reduce, with label "equal
    weights", compares hashes of names, weights and plans. If a hash differs, all-gathers find a differing rank and
    parameter.

    Raises:
        PlanError: parameters, weights or plans differ between ranks.
    """
    if plan.config.initial_weights == "rank0":
        _take_from_first(model, comm, device)
    named = [*model.named_parameters(), *model.named_buffers()]
    sums = torch.tensor([int(bit_sum(tensor)) for _, tensor in named], dtype=torch.int64)
    names = repr([name for name, _ in named])
    division = repr([(row.name, row.owners, row.ranges, row.experts, row.expert_dim) for row in plan.table]) + repr(
        plan.partition and plan.partition.boundaries
    )
    texts = (names.encode(), sums.numpy().tobytes(), division.encode())
    hashes = torch.stack([_hash(text) for text in texts])
    if not any(differing(hashes, comm, device, "equal weights")):
        return
    gathered = gather_from_all(hashes, comm, device)
    if others := _differing(gathered, 0):
        raise PlanError(
            f"rank 0 and rank {others[0]} have changed their models since engine.initialize, and have different "
            "parameters now; build the same model on every rank before that call."
        )
    if others := _differing(gathered, 2):
        raise PlanError(
            f"rank 0 and rank {others[0]} would partition or shard the model differently, because their first batches "
            "differ; pass the same example_batch to engine.initialize on every rank."
        )
    table = gather_from_all(sums, comm, device)
    column = next(i for i in range(len(named)) if _differing(table, i))
    raise PlanError(
        f"rank 0 and rank {_differing(table, column)[0]} were given different weights, first in "
        f"{named[column][0]!r}; build the model with the same seed on every rank (torch.manual_seed), pass "
        'a callable that builds it, or give "initial_weights": "rank0".'
    )


def _take_from_first(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Broadcasts the parameters and buffers of rank 0 to every rank, bit by bit; tensors on the meta device are left
    out.

    All-reduces over the world, label "start", of at most 64 MiB: other ranks add bytes of 0.
    """
    given = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta and tensor.numel()]
    for tensors in in_batches(given, lambda tensor: tensor.nbytes, _AT_ONCE):
        whole = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8).to(device) for tensor in tensors])
        for part in torch.split(whole, _AT_ONCE):
            take_from(part, comm.grid.rank == 0, comm, "world", "start")
        for tensor, data in zip(tensors, torch.split(whole, [tensor.nbytes for tensor in tensors]), strict=True):
            # cloned: a dtype of several bytes needs memory that is aligned to it
            overwrite(tensor, data.clone().view(tensor.dtype).view(tensor.shape))


def _differing(table: Tensor, column: int) -> list[int]:
    return [int(rank) for rank in (table[:, column] != table[0, column]).nonzero().flatten()]


def _hash(data: bytes) -> Tensor:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return torch.tensor(int.from_bytes(digest, "little", signed=True), dtype=torch.int64)
