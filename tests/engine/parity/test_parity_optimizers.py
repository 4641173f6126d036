"""Lists of optimizers, and Muon whose matrices lie in parts: one process's numbers, bytes as planned, any grid."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.models.decoder import loss_sum
from engine.verify import verify
from tests import models
from tests.engine.parity.optimizer_grids import OPTIMIZER_GRIDS
from tests.parallel.comm.small_decoder import batch, on_threads
from tests.planned_traffic import traffic_differs
from tests.selection import wide
from tests.zero.test_secondary_shards import WIDTH, Blocks

RunRanks = Callable[..., list[Any]]
ADAMW: dict[str, Any] = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
MUON: dict[str, Any] = {"type": "Muon", "params": {"lr": 0.02, "ns_dtype": "fp32"}}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
LIST = [
    {"match": "*.bias", **SGD},
    {"match": ["blocks.*"], **MUON, "groups": [{"params": ["blocks.1.*"], "lr": 0.01}]},
    ADAMW,
]
ELEMENTWISE = [{"match": "blocks.*", **SGD}, {"match": ["*.bias"], "type": "Lion", "params": {"lr": 1e-4}}, ADAMW]
WARMUP = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}}


def settings(optimizer: Any, parallel: dict[str, Any], zero: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Eight rows a rank in two microbatches, clipping active, a rate that moves."""
    return {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "parallel": {"data": 1} | parallel,
        "zero_optimization": {"reduce_bucket_size": 3000} | zero, "optimizer": optimizer,
        "scheduler": WARMUP, "gradient_clipping": 0.05, **changes,
    }  # fmt: skip


def blocks() -> nn.Module:
    """Small blocks in one seed."""
    torch.manual_seed(3)
    return Blocks()


@pytest.mark.parametrize(
    ("optimizer", "zero"),
    [
        (LIST, {"stage": 1}),
        (LIST, {"stage": 3}),
        (ELEMENTWISE, {"stage": 2}),
        wide(LIST, {"stage": 0}),
        wide(LIST, {"stage": 2}),
        wide(LIST, {"stage": 2, "reduce": "microbatch"}),
        wide(LIST, {"stage": 3, "reduce": "microbatch"}),
        wide(LIST, {"stage": 1, "reduce_bucket_size": 100}),
        wide(ELEMENTWISE, {"stage": 0}),
        wide(ELEMENTWISE, {"stage": 3}),
        wide(ELEMENTWISE, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_a_list_trains_as_one_process_of_torch(optimizer: Any, zero: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(16, WIDTH, generator=generator) for _ in range(3)]
    found = verify(blocks, settings(optimizer, {"data": 2}, zero), batches, threads=2)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


@pytest.mark.parametrize(("parallel", "zero", "ranks"), OPTIMIZER_GRIDS)
@pytest.mark.parametrize("kind", ["decoder", wide("llama"), wide("decoder tied")])
def test_matrices_in_parts_train_as_one_process(
    kind: str, parallel: dict[str, Any], zero: dict[str, Any], ranks: int
) -> None:
    rest = {"llama": "model.layers.*", "decoder": "blocks.*", "decoder tied": "*"}[kind]
    optimizer = [{"match": rest, **MUON}, ADAMW]

    def build() -> nn.Module:
        return models.llama() if kind == "llama" else models.decoder(tied=kind == "decoder tied")

    name = kind.split()[0]
    config = settings(optimizer, parallel, zero)
    loss_fn = loss_sum if name == "decoder" else None
    found = verify(build, config, models.batches_for(name, 16, 3), loss_fn, threads=ranks)
    assert found is not None and found.holds(), str(found)
    assert all(norm > 0.05 for norm in found.reference.norms), "clipping must be active"


DECODER: list[dict[str, Any]] = [{"match": "blocks.*", **MUON}, ADAMW]


def beside_plan(eng: Engine) -> list[str]:
    """What two steps send and keep that the plan does not say; the first step may search unused parameters."""
    eng.train_batch(batch(eng, 0))
    wrong = traffic_differs(eng, batch, range(1, 3))
    held = sum(
        value.numel() * value.element_size() for state in eng.optimizer.state.values() for value in state.values()
    )
    planned = eng.plan.rank(eng.grid.rank).state_bytes["optimizer"]
    labels = {(row.axis, row.label) for row in eng.plan.rank(eng.grid.rank).traffic}
    expected = {(axis, "matrices") for axis in ("dp", "tp") if eng.grid.size(axis) > 1}
    return wrong + [f"held {held}, planned {planned}"] * (held != planned) + sorted(map(str, expected - labels))


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [
        (2, {"data": 2}, {"stage": 1}),
        wide(2, {"data": 2}, {"stage": 2}),
        wide(2, {"data": 2}, {"stage": 3}),
        wide(4, {"data": 4}, {"stage": 3, "reduce": "microbatch"}),
        wide(4, {"data": 2, "tensor": 2}, {"stage": 1}),
        wide(4, {"data": 2, "pipeline": 2}, {"stage": 1}),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", wide("bf16")])
def test_bytes_sent_and_kept_are_those_of_the_plan(
    dtype: str, ranks: int, parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    changes = {"parallel": parallel, "zero_optimization": zero | {"reduce_bucket_size": 20_000}, "optimizer": DECODER}
    more = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    assert on_threads(ranks, changes | more, beside_plan) == [[]] * ranks


def test_parameters_without_a_gradient_keep_weights_and_momenta() -> None:
    def body(eng: Engine) -> list[str]:
        runtime = eng._runtime
        eng.train_batch(batch(eng, 0))
        for name, parameter in eng.module.named_parameters():
            if name.startswith("blocks.1."):
                parameter.requires_grad_(False)
        before = [place.parameter.detach().clone() for place in runtime.optimizer.places]
        momenta = _momenta(eng)
        eng.train_batch(batch(eng, 1))
        wrong = [name for name, value in _momenta(eng).items() if _changed(name, value, momenta[name])]
        for place, old in zip(runtime.optimizer.places, before, strict=True):
            for slot, part in place.slots():
                now, then = place.parameter.detach().view(-1)[part], old.view(-1)[part]
                wrong += [slot.name] * _changed(slot.name, now, then)
        return wrong

    changes = {
        "parallel": {"data": 2}, "zero_optimization": {"stage": 1}, "optimizer": [{"match": "blocks.*", **MUON}, ADAMW],
    }  # fmt: skip
    assert on_threads(2, changes, body) == [[], []]


def _changed(name: str, now: Tensor, then: Tensor) -> bool:
    """Whether a parameter of the frozen block has changed, or a weight of the other one has not."""
    if name.startswith("blocks.1."):
        return not torch.equal(now, then)
    return name.startswith("blocks.0.") and name.endswith("weight") and torch.equal(now, then)


def _momenta(eng: Engine) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for place in eng._runtime.optimizer.places:
        momentum = eng.optimizer.state.get(place.parameter, {}).get("momentum_buffer")
        if momentum is not None:
            found |= {slot.name: momentum.view(-1)[part].clone() for slot, part in place.slots()}
    return found


@pytest.mark.parametrize(
    ("ranks", "parallel", "zero"),
    [(2, {"data": 2}, {"stage": 1}), wide(2, {"pipeline": 2}, {"stage": 0}), wide(4, {"data": 4}, {"stage": 3})],
)
def test_each_parameter_shows_the_state_of_its_own_optimizer(
    ranks: int, parallel: dict[str, Any], zero: dict[str, Any]
) -> None:
    def body(eng: Engine) -> list[str]:
        eng.train_batch(batch(eng, 0))
        eng.train_batch(batch(eng, 1))
        wrong, shapes = [], {name: p.shape for name, p in eng.module.named_parameters()}
        with eng.optimizer_state() as found:
            for name, state in found.items():
                matrix = name.startswith("blocks.") and len(shapes[name]) == 2
                names = {"momentum_buffer"} if matrix else {"exp_avg", "exp_avg_sq"}
                right = state.keys() == names and all(value.shape == shapes[name] for value in state.values())
                moved = not matrix or any(bool(value.any()) for value in state.values())
                wrong += [f"{name} {sorted(state)}"] * (not (right and moved))
        return wrong + ["nothing found"] * (not found)

    changes = {"parallel": parallel, "zero_optimization": zero, "optimizer": DECODER}
    assert on_threads(ranks, changes, body) == [[]] * ranks
