"""Optimizer state in 8 bits: the nearest of all codes, its bounds, and Adam on decoded moments."""

import math

import pytest
import torch
from torch import Tensor

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.adamw import AdamRun, adamw_8bit_
from engine.kernels.optim.eight_bit_codes import BlockCodes, StateFormat, adam_8bit_, decode, encode
from engine.kernels.optim.update_rules import AdamRule, adam_

RULE = AdamRule(lr=1e-2, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.1, decoupled=True)


def encoded(values: Tensor, form: StateFormat) -> BlockCodes:
    codes = BlockCodes.zeros(len(values), form.block, values.device)
    encode(values, codes, form)
    return codes


def spread(elements: int, signed: bool) -> Tensor:
    """Numbers of many magnitudes, some of them zero."""
    generator = torch.Generator().manual_seed(elements)
    found = torch.randn(elements, generator=generator) * 10.0 ** torch.randint(-6, 3, (elements,), generator=generator)
    found[torch.rand(elements, generator=generator) < 0.1] = 0.0
    return found if signed else found.square()


def levels(signed: bool) -> list[float]:
    """What codes stand for, in a block whose largest number is 1: eight numbers an octave, and 0."""
    count = 127 if signed else 255
    return [0.0] + [(1 + step % 8 / 8) * 2.0 ** (step // 8) for step in range(1 - count, 1)]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(("elements", "block"), [(256, 256), (1000, 64), (77, 64), (3, 256)])
def test_each_number_becomes_the_nearest_code(elements: int, block: int, signed: bool) -> None:
    form, values = StateFormat(block, signed), spread(elements, signed)
    found = decode(encoded(values, form), form)
    known = torch.tensor(levels(signed), dtype=torch.float64)
    for start in range(0, elements, block):
        part, scale = values[start : start + block].double(), values[start : start + block].abs().max().double()
        distance = (part.abs().unsqueeze(1) / scale - known).abs().min(dim=1).values
        mine = (found[start : start + block].double() / scale - part / scale).abs()
        assert torch.all(mine <= distance * (1 + 1e-5) + 2e-7 * part.abs() / scale + (0 if signed else 2.0**-31))


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_errs_by_a_sixteenth_and_the_largest_not_at_all(signed: bool) -> None:
    form, values = StateFormat(256, signed), spread(4096, signed)
    found, scales = decode(encoded(values, form), form), values.view(-1, 256).abs().amax(dim=1).repeat_interleave(256)
    least = 1.25 * 2.0 ** (-16 if signed else -32) * scales
    inside = values.abs() >= least
    assert torch.all((found - values)[inside].abs() <= values[inside].abs() * (1 / 16 + 1e-6))
    assert torch.equal(found[values.abs() == scales], values[values.abs() == scales])
    assert torch.all(found[values == 0] == 0)
    assert signed or torch.all(found[values > 0] > 0), "a root of it divides"


@pytest.mark.parametrize("signed", [True, False])
def test_decoded_numbers_encode_to_the_same_codes(signed: bool) -> None:
    form = StateFormat(128, signed)
    first = encoded(spread(3000, signed), form)
    again = encoded(decode(first, form), form)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)


def test_what_is_not_finite_spoils_its_block_alone() -> None:
    values = torch.ones(192)
    values[3], values[70] = math.nan, math.inf
    found = decode(encoded(values, StateFormat(64, True)), StateFormat(64, True))
    assert not found[:128].isfinite().any()
    assert torch.equal(found[128:], values[128:])


def test_bytes_are_those_of_the_tensors() -> None:
    form = StateFormat(256, True)
    for elements in (256, 257, 5120):
        assert sum(each.nbytes for each in BlockCodes.zeros(elements, 256, torch.device("cpu"))) == form.bytes(elements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_that_of_adam_on_decoded_moments(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kernels.optim.eight_bit_codes.CHUNK", 128)
    forms, generator = [StateFormat(64, signed) for signed in (True, False)], torch.Generator().manual_seed(0)
    weights = torch.randn(500, generator=generator, dtype=dtype)
    expected, codes = weights.clone(), [BlockCodes.zeros(500, 64, torch.device("cpu")) for _ in forms]
    mine = [BlockCodes.zeros(500, 64, torch.device("cpu")) for _ in forms]
    for step in range(1, 5):
        grads = torch.randn(500, generator=generator, dtype=dtype)
        moments = [decode(each, form, dtype) for each, form in zip(codes, forms, strict=True)]
        adam_([expected], [grads], moments[:1], moments[1:], step, RULE)
        for values, each, form in zip(moments, codes, forms, strict=True):
            encode(values, each, form)
        adam_8bit_(weights, grads, mine, step, RULE, 64)
        assert torch.equal(weights, expected)
        assert all(
            torch.equal(*pair) for one, other in zip(mine, codes, strict=True) for pair in zip(one, other, strict=True)
        )


@pytest.mark.parametrize(("elements", "block"), [(4096, 256), (3000, 64), (5000, 2048)])
def test_the_kernel_makes_the_same_update(elements: int, block: int) -> None:
    generator = torch.Generator().manual_seed(1)
    runs = []
    for kernels in (Kernels("reference"), Kernels("triton")):
        generator.manual_seed(1)
        weights = torch.randn(elements, generator=generator)
        moments = [BlockCodes.zeros(elements, block, weights.device) for _ in range(2)]
        for step in range(1, 4):
            grads = torch.randn(elements, generator=generator) * 10.0**-step
            run = AdamRun(weights, grads, moments[0].codes, moments[1].codes)
            adamw_8bit_(run, (moments[0].scales, moments[1].scales), RULE, step, block, kernels)
        runs.append((weights, moments))
    (expected, theirs), (found, ours) = runs
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one.scales, other.scales, rtol=1e-6, atol=0)
        apart = (one.codes.int() - other.codes.int()).abs()
        assert apart.max() <= 1 and float((apart > 0).float().mean()) < 1e-3, "a sum rounded otherwise"
    off = (expected - found).abs()
    assert float((off > 1e-6).float().mean()) < 1e-3 and off.max() < 1e-3


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_the_kernel_spoils_a_block_alone() -> None:
    weights, grads = torch.ones(192), torch.ones(192)
    grads[70] = math.inf
    moments = [BlockCodes.zeros(192, 64, weights.device) for _ in range(2)]
    run = AdamRun(weights, grads, moments[0].codes, moments[1].codes)
    adamw_8bit_(run, (moments[0].scales, moments[1].scales), RULE, 1, 64, Kernels("triton"))
    assert all(each.scales.isnan().tolist() == [False, True, False] for each in moments)
    assert bool(weights[:64].isfinite().all()) and bool(weights[128:].isfinite().all())
