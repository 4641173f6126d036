"""The updates are torch's and Lion's own, and a shard is updated as its slice of the whole."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.config.optim_sections import ScheduleFreeAdamWParams
from engine.config.reader import stored
from engine.kernels.optim.update_rules import (
    AdamRule,
    LionRule,
    ScheduleFreeRule,
    SGDRule,
    adam_,
    averaged,
    count,
    lion_,
    schedule_free_,
    sgd_,
)
from engine.zero.optim.rules.layerwise import FlatLamb, FlatLARS

STEPS = 5
Update = Callable[[list[Tensor], list[Tensor], int], None]
"""(weights, gradients, number of the update from 1): updates the weights in place."""


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, generator=generator).to(dtype) for size in (33, 7)]


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(size, generator=generator).to(dtype) * 10 ** (step - 3) for size in (33, 7)]


def adam_update(rule: AdamRule) -> Update:
    moments: list[tuple[Tensor, Tensor]] = []

    def update(weights: list[Tensor], grads: list[Tensor], step: int) -> None:
        if not moments:
            moments.extend((torch.zeros_like(w), torch.zeros_like(w)) for w in weights)
        adam_(weights, grads, [first for first, _ in moments], [second for _, second in moments], step, rule)

    return update


def sgd_update(rule: SGDRule) -> Update:
    buffers: list[list[Tensor | None]] = []

    def update(weights: list[Tensor], grads: list[Tensor], step: int) -> None:
        given: list[Tensor | None] = buffers.pop() if buffers else [None] * len(weights)
        buffers.append(sgd_(weights, grads, given, rule))
        assert all((buffer is None) == (rule.momentum == 0) for buffer in buffers[0])

    return update


def lion_update(rule: LionRule) -> Update:
    momenta: list[Tensor] = []

    def update(weights: list[Tensor], grads: list[Tensor], step: int) -> None:
        if not momenta:
            momenta.extend(torch.zeros_like(w) for w in weights)
        lion_(weights, grads, momenta, rule)

    return update


def run(update: Update, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weights after all updates; the gradients must be left as they are."""
    weights = tensors(dtype)
    for step in range(1, STEPS + 1):
        grads = gradients(step, dtype)
        update(weights, grads, step)
        assert all(torch.equal(a, b) for a, b in zip(grads, gradients(step, dtype), strict=True))
    return weights


def by_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype) -> list[Tensor]:
    parameters = [nn.Parameter(tensor) for tensor in tensors(dtype)]
    optimizer = make(parameters)
    for step in range(1, STEPS + 1):
        for parameter, grad in zip(parameters, gradients(step, dtype), strict=True):
            parameter.grad = grad
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b, start in zip(ours, theirs, tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        assert (a - start).abs().max() > 1e-3, "an update that does nothing would agree too"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_is_torchs(decoupled: bool, decay: float, dtype: torch.dtype) -> None:
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = by_torch(
        lambda params: kind(params, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay, foreach=False), dtype
    )
    assert_same(run(adam_update(AdamRule(0.02, (0.8, 0.95), 1e-6, decay, decoupled)), dtype), theirs)


SGD_CASES = [
    SGDRule(0.05, momentum, dampening, decay, nesterov)
    for momentum, dampening, decay, nesterov in product((0.0, 0.9), (0.0, 0.3), (0.0, 0.1), (False, True))
    if not (nesterov and (dampening or not momentum))
]


@pytest.mark.parametrize("rule", SGD_CASES, ids=str)
def test_sgd_is_torchs(rule: SGDRule) -> None:
    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, rule.lr, rule.momentum, rule.dampening, rule.weight_decay, rule.nesterov, foreach=False
        )

    assert_same(run(sgd_update(rule)), by_torch(make, torch.float32))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_algorithm_2_of_its_paper(decay: float) -> None:
    lr, (beta1, beta2) = 0.02, (0.9, 0.98)
    theirs, momenta = tensors(), [torch.zeros(33), torch.zeros(7)]
    for step in range(1, STEPS + 1):
        for i, grad in enumerate(gradients(step)):
            direction = torch.sign(beta1 * momenta[i] + (1 - beta1) * grad)
            theirs[i] = theirs[i] - lr * (direction + decay * theirs[i])
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * grad
    assert_same(run(lion_update(LionRule(lr, (beta1, beta2), decay))), theirs)


UPDATES: dict[str, Callable[[], Update]] = {
    "AdamW": lambda: adam_update(AdamRule(0.02, (0.9, 0.99), 1e-8, 0.1, True)),
    "Adam": lambda: adam_update(AdamRule(0.02, (0.9, 0.99), 1e-8, 0.1, False)),
    "SGD": lambda: sgd_update(SGDRule(0.02, 0.9, 0.0, 0.1, True)),
    "Lion": lambda: lion_update(LionRule(0.02, (0.9, 0.99), 0.1)),
}


def cuts(size: int) -> Iterator[slice]:
    """Shards of odd sizes and offsets, so that vector and remainder loops both meet every element."""
    yield from (slice(0, 1), slice(1, 10), slice(10, size - 3), slice(size - 3, size))


@pytest.mark.parametrize("name", UPDATES)
def test_a_shard_is_updated_as_its_slice_of_the_whole(name: str) -> None:
    size = 203
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(size, generator=generator)
    grads = [torch.randn(size, generator=generator) for _ in range(STEPS)]
    whole, whole_update = start.clone(), UPDATES[name]()
    for step, grad in enumerate(grads, 1):
        whole_update([whole], [grad], step)
    for cut in cuts(size):
        shard, update = start.clone()[cut], UPDATES[name]()
        for step, grad in enumerate(grads, 1):
            update([shard], [grad[cut]], step)
        torch.testing.assert_close(shard, whole[cut], rtol=1e-6, atol=1e-7)


def test_no_tensor_is_no_update() -> None:
    adam_([], [], [], [], 1, AdamRule(0.1, (0.9, 0.99), 1e-8, 0.0, True))
    lion_([], [], [], LionRule(0.1, (0.9, 0.99), 0.0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup_steps": 3, "weight_decay": 0.1, "weight_step_power": 1.0, "weight_lr_power": 1.0, "betas": (0.8, 0.9)},
    ],
)
def test_the_weights_are_the_point_between_iterate_and_average(options: dict[str, Any]) -> None:
    params: dict[str, Any] = dict(stored(ScheduleFreeAdamWParams())) | {"lr": 0.05} | options
    beta, beta2 = params["betas"]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    weights, iterate, squares = start.clone(), start.clone(), torch.zeros_like(start)
    x, z, y, v, total, largest = start, start, start, torch.zeros_like(start), 0.0, 0.0
    group = dict(params)
    for step in range(1, 8):
        grads = torch.randn(40, generator=generator, dtype=torch.float64)
        count(group)
        schedule_free_(weights, grads, iterate, squares, step, ScheduleFreeRule.of(group))
        lr = params["lr"] * min(1.0, step / max(1, params["warmup_steps"]))
        largest = max(largest, lr)
        total += (weight := step ** params["weight_step_power"] * largest ** params["weight_lr_power"])
        v = beta2 * v + (1 - beta2) * grads**2
        z = z - lr * (grads / ((v / (1 - beta2**step)).sqrt() + params["eps"]) + params["weight_decay"] * y)
        x = x + weight / total * (z - x)
        y = (1 - beta) * z + beta * x
        torch.testing.assert_close(weights, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(iterate, z, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(averaged(weights, iterate, params["betas"]), x, rtol=1e-12, atol=1e-11)


def test_a_rate_of_zero_averages_nothing() -> None:
    group: dict[str, Any] = dict(stored(ScheduleFreeAdamWParams())) | {"lr": 0.0}
    count(group)
    assert group["newest"] == 0.0 and group["step"] == 1


SHAPES = {"matrix": (5, 3), "vector": (7,), "scalar": ()}
LAYERWISE_STEPS = 4


def weights_and_gradients() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}

    weights = draw() | {"zeros": torch.zeros(4, dtype=torch.float64)}
    grads = [draw() | {"zeros": torch.ones(4, dtype=torch.float64) * step} for step in range(LAYERWISE_STEPS)]
    return weights, grads


def params_of(kind: str, **changes: Any) -> dict[str, Any]:
    config = load_config({"train_batch_size": 1, "optimizer": {"type": kind, "params": changes}}).optimizer
    assert config is not None
    return dict(config.params)


def by_ours(kind: str, **changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    parameters = {name: torch.nn.Parameter(value) for name, value in weights.items()}
    make = {"Lamb": FlatLamb, "LARS": FlatLARS}[kind]
    optimizer = make(list(parameters.values()), **params_of(kind, **changes))
    for grads in gradients:
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def lamb(**changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    p = params_of("Lamb", **changes)
    (beta1, beta2), eps = p["betas"], p["eps"]
    for name, w in weights.items():
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, grads in enumerate(gradients, start=1):
            m = beta1 * m + (1 - beta1) * grads[name]
            v = beta2 * v + (1 - beta2) * grads[name] ** 2
            corrected = (m / (1 - beta1**step), v / (1 - beta2**step)) if p["bias_correction"] else (m, v)
            root = (corrected[1] + eps).sqrt() if p["eps_inside_sqrt"] else corrected[1].sqrt() + eps
            update = corrected[0] / root + p["weight_decay"] * w
            ratio = 1.0
            if w.norm() > 0 and update.norm() > 0:
                ratio = min(max(float(w.norm() / update.norm()), p["min_coeff"]), p["max_coeff"])
            w -= p["lr"] * ratio * update
    return weights


def lars(**changes: Any) -> dict[str, Tensor]:
    weights, gradients = weights_and_gradients()
    p = params_of("LARS", **changes)
    for name, w in weights.items():
        v = torch.zeros_like(w)
        for grads in gradients:
            g, local = grads[name], 1.0
            if w.norm() > 0 and g.norm() > 0:
                local = p["trust_coefficient"] * w.norm() / (g.norm() + p["weight_decay"] * w.norm() + p["eps"])
            v = p["momentum"] * v + p["lr"] * local * (g + p["weight_decay"] * w)
            w -= v
    return weights


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Lamb", {}),
        ("Lamb", {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}),
        ("Lamb", {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3, "eps_inside_sqrt": True, "bias_correction": False}),
        ("Lamb", {"lr": 0.1, "max_coeff": 0.3, "min_coeff": 0.2}),
        ("LARS", {}),
        ("LARS", {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.1, "momentum": 0.5}),
        ("LARS", {"momentum": 0.0}),
    ],
)
def test_updates_are_those_of_the_papers(kind: str, changes: dict[str, Any]) -> None:
    expected = {"Lamb": lamb, "LARS": lars}[kind](**changes)
    for name, value in by_ours(kind, **changes).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
