"""Many models share one launch of ranks: each is trained on the grid and alone, and the two runs are compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import engine
from engine.parallel.comm.traffic import Tally
from engine.parallel.tensor.plan.tensor_plan import Reason
from engine.verify import Parity, TrainingRecord, VerifyOptions, train_alone
from tests.engine.parity.adapted_models import ADAPTED, DORA, EXPERTS, PROMPTS
from tests.engine.parity.architectures import ALL, ROWS, Architecture, find
from tests.engine.parity.tensor_models import FOUR, SHORT, UNSEEN
from tests.kernels.interpreter import repair
from tests.models import take_rows

EVERY: Mapping[str, Architecture] = {
    **ALL, **FOUR, **UNSEEN, **SHORT, **ADAPTED, **EXPERTS, **DORA, **PROMPTS,
}  # fmt: skip
RunRanks = Callable[..., list[Any]]

MICRO = 2


def settings(pp: int, **changes: Any) -> dict[str, Any]:
    """Four microbatches of two rows, clipping active, three steps with a rate that moves."""
    parallel = {"data": 1, "pipeline": pp} | changes.pop("parallel", {})
    return {
        "train_batch_size": ROWS * parallel["data"],
        "train_micro_batch_size_per_gpu": MICRO,
        "parallel": parallel,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_min_lr": 1e-3}},
        "gradient_clipping": 0.05,
    } | changes


@dataclass(frozen=True, slots=True)
class Trained:
    """A run of one model, and what its stages receive for one microbatch."""

    run: TrainingRecord
    values: tuple[int, ...]
    """Values received by each stage but the first."""
    bytes: tuple[int, ...]
    """The same in bytes."""
    reasons: tuple[Reason, ...] = ()
    """How tensor ranks share its layers."""
    labels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(calls, bytes) over axis tp in a step, by what for."""
    uncounted: tuple[str, ...] = ()
    """Where what a step sent is not what was planned."""


def train(name: str, config: Mapping[str, Any]) -> Trained | str:
    """Body of a rank for one model: what came out, or why the model cannot be cut."""
    architecture = find(name, EVERY)
    batches = architecture.batches(config["train_batch_size"])
    example = take_rows(batches[0], 0, MICRO)
    try:
        eng = engine.initialize(architecture.build, dict(config), architecture.loss_fn, example)
    except engine.PlanError as error:
        return str(error)
    with eng:
        rows, first = eng.config.micro * eng.config.accumulation, eng.grid.coord().dp
        mine = [take_rows(batch, first * rows, rows) for batch in batches]
        reports = [eng.train_batch(mine[0])]  # the plan is checked in the first step, which sends
        before = eng.sent
        reports += [eng.train_batch(batch) for batch in mine[1:]]
        uncounted = differences(eng, before, len(batches) - 1)
        run = TrainingRecord(tuple(r.loss for r in reports), tuple(r.grad_norm for r in reports), eng.full_state_dict())
        received, values = [], eng.plan.trace.values if eng.plan.trace else ()
        for plan in eng.plan.partition.stages[1:] if eng.plan.partition else ():
            received.append([values[number].bytes for number in plan.receives])
        labels = {row.label: (row.calls, row.bytes) for row in eng.plan.rank(eng.grid.rank).traffic if row.axis == "tp"}
        reasons = eng.plan.tensor.reasons if eng.plan.tensor else ()
    return Trained(run, tuple(map(len, received)), tuple(map(sum, received)), reasons, labels, uncounted)


def differences(eng: engine.Engine, before: Tally, steps: int) -> tuple[str, ...]:
    """Where what was sent since ``before`` is not what the plan says for so many steps."""
    old = {(row.axis, row.label): (row.calls, row.bytes) for row in before.rows()}
    sent = {}
    for row in eng.sent.rows():
        calls, size = old.get((row.axis, row.label), (0, 0))
        sent[row.axis, row.label] = row.calls - calls, row.bytes - size
    planned = {(r.axis, r.label): (steps * r.calls, steps * r.bytes) for r in eng.plan.rank(eng.grid.rank).traffic}
    keys = sorted(key for key in {*sent, *planned} if sent.get(key, (0, 0)) != planned.get(key, (0, 0)))
    return tuple(f"rank {eng.grid.rank} {key}: sent {sent.get(key)}, planned {planned.get(key)}" for key in keys)


def held_bytes(eng: engine.Engine) -> int:
    """Bytes of the live storages of parameters, gradients and optimizer state on this rank."""
    tensors = [
        bucket.kept for bucket in (*eng._runtime.buckets, *eng._runtime.frozen)
    ]  # at ZeRO 3 nothing else holds it
    tensors += [*eng.module.parameters(), *(g for group in eng.optimizer.param_groups for g in group["params"])]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [value for state in eng.optimizer.state.values() for value in state.values()]
    memory = [tensor.untyped_storage() for tensor in tensors if tensor.numel() and not _stands_for_another(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def _stands_for_another(tensor: Tensor) -> bool:
    """A parameter of which this rank has only the shape: one element, expanded."""
    return tensor.numel() > 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


def train_each(names: Sequence[str], config: Mapping[str, Any]) -> list[Trained | str]:
    """Body of a rank: one model after another."""
    return [train(name, config) for name in names]


def train_each_alone(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, TrainingRecord]:
    """Body of a rank: this rank's share of the models, in one process each."""
    import torch.distributed as dist

    found = {}
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        architecture = find(name, EVERY)
        batches = architecture.batches(config["train_batch_size"])
        found[name] = train_alone(architecture.build, dict(config), batches, VerifyOptions(architecture.loss_fn))
    return found


def train_both(
    names: Sequence[str], config: Mapping[str, Any]
) -> tuple[list[Trained | str], dict[str, TrainingRecord]]:
    """Body of a rank."""
    if config.get("kernels") == "triton" or config["parallel"].get("overlap") == "fused":
        repair()
    return train_each(names, config), train_each_alone(names, config)


@dataclass(frozen=True, slots=True)
class Compared:
    """A trained model that has been found equal."""

    trained: Trained
    parity: Parity
    uncounted: tuple[str, ...]
    """Where what any rank sent is not what was planned."""


def compare(
    run_ranks: RunRanks, names: Sequence[str], config: Mapping[str, Any], near: float | None = None
) -> dict[str, Compared | str]:
    """Train on the grid and alone; by name what came out, all of it found equal, or why a model cannot.

    ``near``: a bound for losses that takes the place of the promise, where only that can be asked.
    """
    ranks = config["parallel"]
    world = ranks["data"] * ranks.get("tensor", 1) * ranks["pipeline"]
    found = run_ranks(train_both, world, list(names), dict(config), seconds=300.0)
    alone = {name: run for _, share in found for name, run in share.items()}
    results: dict[str, Compared | str] = {}
    for index, name in enumerate(names):
        result = found[0][0][index]
        if isinstance(result, str):
            assert [trained[index] for trained, _ in found] == [result] * world, "all ranks say the same"
            results[name] = result
            continue
        parity = Parity(result.run, alone[name])
        assert parity.holds() if near is None else parity.loss <= near, f"{name}: {parity}"
        assert min(alone[name].norms) > config["gradient_clipping"], f"{name}: clipping must be active"
        uncounted = [line for trained, _ in found for line in trained[index].uncounted]
        results[name] = Compared(result, parity, tuple(uncounted))
    return results
