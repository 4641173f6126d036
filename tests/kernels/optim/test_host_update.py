"""The kernel of the host gives torch's bits, wherever an element lies and whatever number it is."""

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.optim import host_update
from engine.kernels.optim.host_library import library
from engine.kernels.optim.host_update import HostKernel, host_kernel, rounds_to, update_adam_, update_lion_, update_sgd_
from engine.kernels.optim.update_rules import AdamRule, LionRule, SGDRule, adam_, lion_, sgd_
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD

SIZES = (0, 1, 7, 8, 15, 16, 33, 129, 1023, 20_011)
Update = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""(weights, gradient, two moments), in place."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostKernel]:
    """The kernel, compiled for this module, whether or not an update takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield host_kernel.__wrapped__() or HostKernel(ctypes.CDLL(str(library(host_update.SOURCE))), lanes=8)


@pytest.fixture
def used(kernel: HostKernel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernel's rules as they are called; it takes tensors of any size."""
    called: list[str] = []

    class Noted(HostKernel):
        def adam(self, *arguments: Any) -> None:
            called.append("adam")
            super().adam(*arguments)

        def sgd(self, *arguments: Any) -> Tensor:
            called.append("sgd")
            return super().sgd(*arguments)

        def lion(self, *arguments: Any) -> None:
            called.append("lion")
            super().lion(*arguments)

    monkeypatch.setattr(host_update, "WORTH", 1)
    monkeypatch.setattr(host_update, "host_kernel", lambda: Noted(kernel.compiled, kernel.lanes))
    return called


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@cache
def numbers(size: int, seed: int) -> Tensor:
    """fp32 [size] of every magnitude, with zeros, denormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(1000 * seed + size)
    bits = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator).to(torch.int32).view(torch.float32)
    near = torch.randn(size, generator=generator)
    kind = torch.randint(0, 8, (size,), generator=generator)
    chosen = torch.where(kind == 0, bits, near)
    for at, special in ((1, 0.0), (2, 1e-41), (3, -1e30)):
        chosen = torch.where(kind == at, torch.tensor(special), chosen)
    return chosen


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN equals NaN: which of its bits an operation passes on depends on the order of its operands."""
    number = ~theirs.isnan()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[number].view(torch.int32), theirs[number].view(torch.int32))


def compare(ours: Update, theirs: Update) -> None:
    for size in SIZES:
        given = [numbers(size, seed) for seed in range(4)]
        given[3] = given[3].abs()
        here, there = ([tensor.clone() for tensor in given] for _ in range(2))
        ours(*here)
        theirs(*there)
        for a, b in zip(here, there, strict=True):
            assert_same_bits(a, b)


ADAM = [
    AdamRule(3e-3, betas, eps, decay, decoupled, corrected)
    for betas, eps, corrected in (
        ((0.9, 0.999), 1e-8, True),
        ((0.5, 0.95), 0.0, False),
        ((0.2, 0.3), 1e-8, True),
    )
    for decay, decoupled in ((0.0, True), (0.1, True), (0.1, False))
]
SGD = [
    SGDRule(3e-3, 0.9, dampening, decay, nesterov)
    for dampening, decay, nesterov in product((0.0, 0.3), (0.0, 0.1), (True, False))
    if not (nesterov and dampening)
]
LION = [LionRule(3e-4, betas, decay) for betas in ((0.9, 0.99), (0.4, 0.3)) for decay in (0.0, 0.1)]


def test_a_sample_has_torchs_bits(kernel: HostKernel) -> None:
    assert host_update.has_bits_of_torch(kernel)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", ADAM, ids=str)
def test_adam_has_torchs_bits(kernel: HostKernel, rule: AdamRule) -> None:
    def theirs(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> None:
        adam_([w], [g], [m], [v], step, rule)

    for step in (1, 1000):
        compare(partial(kernel.adam, step=step, rule=rule), partial(theirs, step=step))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", SGD, ids=str)
def test_sgd_has_torchs_bits(kernel: HostKernel, rule: SGDRule) -> None:
    compare(lambda w, g, m, v: kernel.sgd(w, g, m, rule), lambda w, g, m, v: sgd_([w], [g], [m], rule))
    compare(
        lambda w, g, m, v: m.copy_(kernel.sgd(w, g, None, rule)),
        lambda w, g, m, v: m.copy_(torch.cat([made for made in sgd_([w], [g], [None], rule) if made is not None])),
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rule", LION, ids=str)
def test_lion_has_torchs_bits(kernel: HostKernel, rule: LionRule) -> None:
    compare(lambda w, g, m, v: kernel.lion(w, g, m, rule), lambda w, g, m, v: lion_([w], [g], [m], rule))


@pytest.mark.usefixtures("threads")
def test_what_is_written_into_rounded_weights_is_seen(kernel: HostKernel) -> None:
    for size in SIZES:
        wide = numbers(size, 5).nan_to_num()
        narrow = wide.bfloat16()
        assert kernel.rounds_to(wide, narrow)
        for place in {0, size // 2, size - 1} if size else ():
            written = narrow.clone()
            written.view(torch.int16)[place] += 1
            assert not kernel.rounds_to(wide, written)
            unknown = wide.clone()
            unknown[place] = torch.nan
            assert not kernel.rounds_to(unknown, unknown.bfloat16())


def test_every_fp32_number_between_two_of_bf16_is_rounded_as_torch_does(kernel: HostKernel) -> None:
    wide = torch.arange(0x3F7E0000, 0x3F820000, dtype=torch.int32).view(torch.float32)
    assert kernel.rounds_to(wide, wide.bfloat16()) and kernel.rounds_to(-wide, -wide.bfloat16())


def test_rounded_weights_are_looked_at_by_it(used: list[str]) -> None:
    wide = torch.randn(77)
    assert rounds_to(wide, wide.bfloat16()) and not rounds_to(wide, (2 * wide).bfloat16())
    assert not rounds_to(wide, wide.half()) and not rounds_to(wide.double(), wide.bfloat16())
    assert not used


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2, 3, 10, 100, 1000, 5000])
def test_every_root_is_divided_as_torch_does(kernel: HostKernel, step: int) -> None:
    rule = AdamRule(1.0, (0.9, 0.999), 0.0, 0.0, True)
    second = torch.arange(0x3F800000, 0x40800000, dtype=torch.int32).view(torch.float32)  # all of [1, 4)
    ours, theirs = ([torch.zeros_like(second), torch.ones_like(second), second.clone()] for _ in range(2))
    grad = torch.zeros_like(second)
    kernel.adam(ours[0], grad, ours[1], ours[2], step, rule)
    adam_(theirs[:1], [grad], theirs[1:2], theirs[2:], step, rule)
    assert_same_bits(ours[0], theirs[0])


@pytest.mark.parametrize(("kind", "name"), [(FlatAdam, "adam"), (FlatSGD, "sgd"), (FlatLion, "lion")])
def test_optimizers_update_by_it(kind: type, name: str, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> Tensor:
        torch.manual_seed(0)
        weights = torch.nn.Parameter(torch.randn(77))
        optimizer = kind([weights], lr=0.1, weight_decay=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
        for _ in range(3):
            weights.grad = torch.randn(77)
            optimizer.step()
        return weights.detach()

    ours = trained()
    assert used == [name] * 3
    monkeypatch.setattr(host_update, "host_kernel", lambda: None)
    assert_same_bits(ours, trained())


def test_what_it_does_not_support_is_torchs(used: list[str]) -> None:
    rule = AdamRule(0.1, (0.9, 0.99), 1e-8, 0.1, True)
    for given in (torch.ones(4, 8, dtype=torch.float64), torch.ones(8, 2)[:, 0].unsqueeze(0).repeat(4, 1).T):
        w, g, m, v = (given.clone(memory_format=torch.preserve_format) for _ in range(4))
        update_adam_([w], [g], [m], [v], 1, rule)
        assert (w < 1).all()
    w, g = torch.ones(9), torch.ones(9)
    assert update_sgd_([w], [g], [None], SGDRule(0.1, 0.0, 0.0, 0.0, False)) == [None]
    update_lion_([], [], [], LionRule(0.1, (0.9, 0.99), 0.0))
    assert not used
