"""Training whose optimizer state lies on the host gives the bits of training without, and holds what the plan says."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from tests.zero.small import batch, forget_the_living, start
from tests.zero.test_state_bytes import MODES, OPTIMIZERS, PRECISIONS, settled_bytes

RunRanks = Callable[..., list[Any]]
Case = tuple[str, str, tuple[int, str], float]
"""Optimizer, precision, (ZeRO stage, reduce), ratio."""
STEPS = 4


def settings(case: Case, device: str, **changes: Any) -> dict[str, Any]:
    name, precision, mode, ratio = case
    zero = {
        "stage": mode[0],
        "reduce": mode[1],
        "reduce_bucket_size": 700,
        "offload_optimizer": {"device": device, "ratio": ratio},
    }
    return (
        {"optimizer": OPTIMIZERS[name][0], "zero_optimization": zero, "gradient_clipping": 0.1}
        | PRECISIONS[precision]
        | changes
    )


def bits(eng: Engine) -> dict[str, Tensor]:
    """Weights on rank 0, and this rank's masters and moments."""
    found = {f"weight {name}": value.clone() for name, value in eng.full_state_dict().items()}
    with eng.masters(local=True) as masters:
        found |= {f"master {name}": value.clone() for name, value in masters.items()}
    with eng.optimizer_state(local=True) as state:
        found |= {f"{kind} {name}": value.clone() for name, of in state.items() for kind, value in of.items()}
    return found


def trained(changes: dict[str, Any], steps: int = STEPS) -> tuple[list[Any], dict[str, Tensor]]:
    eng = start(changes)
    with eng:
        reports = [eng.train_batch(batch(eng, step)) for step in range(steps)]
        return [(r.loss, r.grad_norm, r.skipped, r.loss_scale) for r in reports], bits(eng)


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name].cpu(), other[name].cpu())
    ]


def compare_all(cases: list[Case]) -> list[str]:
    """Body of a rank: one line for each case whose bits differ from those of a run without an offload."""
    wrong = []
    for case in cases:
        plain, offloaded = trained(settings(case, "none")), trained(settings(case, "cpu"))
        if plain[0] != offloaded[0] or (names := unequal(plain[1], offloaded[1])):
            wrong.append(f"{case}: {plain[0]} {offloaded[0]} {names[:3] if plain[0] == offloaded[0] else ''}")
        assert any(norm > 0.1 for _, norm, *_ in plain[0]), "clipping must be active"
    return wrong


CORE: list[Case] = [
    ("AdamW", "fp32", (0, "step"), 1.0),
    ("AdamW", "bf16", (1, "step"), 1.0),
    ("SGD momentum", "bf16", (2, "microbatch"), 1.0),
    ("Lion", "fp32", (3, "step"), 0.5),
    ("AdamW", "bf16 alone, all of it", (1, "step"), 1.0),
    ("AdamW", "fp16", (3, "microbatch"), 0.5),
]
CASES: list[Case] = [*product(OPTIMIZERS, PRECISIONS, MODES, (1.0, 0.4))]


@pytest.mark.parametrize(
    ("dp", "cases"),
    [
        (1, CORE[:2]),
        (2, CORE[1:5]),
        pytest.param(2, CORE, marks=pytest.mark.long),
        *(pytest.param(dp, CASES, marks=pytest.mark.long) for dp in (1, 2, 4)),
    ],
    ids=["1 core", "2 some", "2 core", "1 all", "2 all", "4 all"],
)
def test_bits_are_those_of_training_without_an_offload(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(compare_all, dp, cases, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def measure_all(cases: list[Case]) -> list[str]:
    """Body of a rank: one line for each case that holds other bytes than planned, on the device or on the host."""
    wrong = []
    for case in cases:
        forget_the_living()
        eng = start(settings(case, "cpu"))
        for step in range(2):
            eng.train_batch(batch(eng, step))
        plan, runtime = eng.plan.rank(eng.grid.rank), eng._runtime
        expected = sum(plan.state_bytes.values()) + sum(plan.host_bytes.values())
        hosted = [place for place in runtime.optimizer.places if place.flat.host_sums is not None]
        moments = [value for place in hosted for value in runtime.optimizer.inner.state[place.parameter].values()]
        flats = [flat for flat in runtime.buckets if flat.host_sums is not None]
        on_host = {
            "master": sum(flat.master.nbytes for flat in flats if flat.master is not None),
            "gradients": sum(flat.host_sums.nbytes for flat in flats if flat.host_sums is not None),
            "optimizer": sum(value.nbytes for value in moments),
        }
        on_host = {kind: count for kind, count in on_host.items() if count}
        found = settled_bytes(expected)
        if found != expected or on_host != plan.host_bytes:
            wrong.append(f"{case}: found {found}, planned {expected}; host {on_host}, planned {plan.host_bytes}")
        eng.close()
    return wrong


@pytest.mark.parametrize(
    ("dp", "cases"),
    [(2, CORE), *(pytest.param(dp, CASES, marks=pytest.mark.long) for dp in (2, 4))],
    ids=["2 core", "2 all", "4 all"],
)
def test_live_bytes_are_what_the_plan_says(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(measure_all, dp, cases, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)
