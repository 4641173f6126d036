"""The updates are torch's and Lion's own, and a shard is updated as its slice of the whole."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.optim.update_rules import AdamRule, LionRule, SGDRule, adam_, lion_, sgd_

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
