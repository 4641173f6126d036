"""Adam on a flat run: 100 steps against float64 and torch's own error, the device's decision, stochastic rounding."""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor, nn

from engine.kernels.dispatch import Kernels, Mode
from engine.kernels.ops.adamw import AdamRun, DeviceDecision, adamw_, adamw_reference_
from engine.kernels.optim.stochastic_rounding import Lines, StochasticRounding
from engine.kernels.optim.update_rules import AdamRule
from engine.optim.built_in import switch_off_bias_correction
from engine.parallel.model.rng_streams import derive_seed

MODES: tuple[Mode, ...] = ("reference", "triton")
RULES = {
    "adamw": AdamRule(3e-3, (0.9, 0.999), 1e-8, 0.1, True),
    "adam": AdamRule(3e-3, (0.8, 0.95), 1e-6, 0.1, False),
    "no decay": AdamRule(1e-2, (0.9, 0.99), 1e-8, 0.0, True),
    "no bias correction": AdamRule(3e-3, (0.9, 0.999), 1e-8, 0.1, True, bias_correction=False),
}
ROUNDING = StochasticRounding((5, 2**62 + 77, 0x80000000_90000001 >> 1), 0)


def decision(factor: float = 1.0, go: float = 1.0) -> DeviceDecision:
    return DeviceDecision(torch.tensor(factor, dtype=torch.float64), torch.tensor(go, dtype=torch.float64))


def random(count: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(count: int, weights: torch.dtype, moments: torch.dtype, narrow: torch.dtype | None = None) -> AdamRun:
    """A run after some steps."""
    values = random(count, 1, weights)
    copy = None if narrow is None else values.to(narrow)
    gradient = random(count, 2, torch.bfloat16 if weights == torch.bfloat16 else torch.float32)
    return AdamRun(values, gradient, random(count, 3, moments) * 0.1, random(count, 4, moments).square() * 0.1, copy)


def copied(run: AdamRun) -> AdamRun:
    return replace(run, **{name: value.clone() for name, value in tensors(run).items()})


def tensors(run: AdamRun) -> dict[str, Tensor]:
    named = {field.name: getattr(run, field.name) for field in fields(run)}
    return {name: value for name, value in named.items() if value is not None}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_100_steps_err_at_most_twice_as_much_as_torchs_fused_kernel(rule: AdamRule, mode: Mode) -> None:
    count, start = 37, random(37, 0)
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam

    def by_torch(dtype: torch.dtype, fused: bool) -> Tensor:
        parameter = nn.Parameter(start.to(dtype, copy=True))
        optimizer = kind([parameter], rule.lr, rule.betas, rule.eps, rule.weight_decay, fused=fused)
        if not rule.bias_correction:
            switch_off_bias_correction(optimizer)
        for step in range(100):
            parameter.grad = random(count, 10 + step).to(dtype) * 0.25
            optimizer.step()
        return parameter.detach().double()

    run = AdamRun(start.clone(), torch.empty(count), torch.zeros(count), torch.zeros(count))
    for step in range(100):
        run.gradient.copy_(random(count, 10 + step))
        adamw_(run, rule, step + 1, decision(0.25), Kernels(mode))
    exact = by_torch(torch.float64, fused=False)
    error, eager = ((x - exact).square().mean().sqrt() for x in (run.weights.double(), by_torch(torch.float32, True)))
    assert float(error) <= 2 * float(eager)
    assert float((exact - start).abs().max()) > 0.05


@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("count", [1, 63, 1024, 1025])
def test_the_kernel_is_the_reference(count: int, rule: AdamRule, narrow: torch.dtype | None) -> None:
    run = made(count, torch.float32, torch.float32, narrow)
    ours, other = copied(run), copied(run)
    adamw_(ours, rule, 3, decision(0.5), Kernels("triton"))
    adamw_reference_(other, rule, 3, decision(0.5))
    for name, found in tensors(ours).items():
        expected = tensors(other)[name]
        assert found.dtype == expected.dtype, name
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7 if name == "narrow" else 1e-6, atol=1e-7)
    if ours.narrow is not None and narrow is not None:
        assert torch.equal(ours.narrow, ours.weights.to(narrow))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rounding", [None, ROUNDING], ids=["master", "rounded"])
def test_no_bit_changes_where_the_device_says_no(rounding: StochasticRounding | None, mode: Mode) -> None:
    kept = torch.bfloat16 if rounding else torch.float32
    run = made(70, kept, kept, None if rounding else torch.bfloat16)
    if run.narrow is not None:
        run.narrow[3] = 9  # an edit that the next update takes in, and not this one
    run.gradient[5] = math.nan
    before = copied(run)
    adamw_(run, RULES["adamw"], 1, decision(math.nan, 0.0), Kernels(mode), rounding)
    for name, value in tensors(run).items():
        assert torch.equal(value.view(torch.uint8), tensors(before)[name].view(torch.uint8)), name


@pytest.mark.parametrize("mode", MODES)
def test_what_was_written_into_narrow_weights_reaches_the_master(mode: Mode) -> None:
    run = made(50, torch.float32, torch.float32, torch.bfloat16)
    other = copied(run)
    assert run.narrow is not None and other.narrow is not None
    run.narrow[7] = other.narrow[7] = other.weights[7] = 4.5
    for each in (run, other):
        adamw_(each, RULES["adamw"], 2, decision(), Kernels(mode))
    assert torch.equal(run.weights, other.weights) and not torch.equal(run.weights, run.weights.bfloat16().float())


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_run_is_no_update(mode: Mode) -> None:
    adamw_(made(0, torch.float32, torch.float32), RULES["adamw"], 1, decision(), Kernels(mode))


# stochastic rounding

LINES = {
    "whole": (None, 5),
    "rows": (Lines(torch.tensor([4, 5, 6, 0, 1], dtype=torch.int32), 9, 3), 2),
    "columns": (Lines(torch.tensor([1, 2, 7], dtype=torch.int32), 8, 1), 4),
    "far": (Lines(torch.tensor([3, 2**20], dtype=torch.int32), 2**21, 2**13), 2**32 + 5),
    "far, whole": (None, 2**33 + 1),
}


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lines", "begin"), LINES.values(), ids=LINES)
def test_the_bits_of_rounding_are_the_references(lines: Lines | None, begin: int, moments: torch.dtype) -> None:
    run = made(1030, torch.bfloat16, moments)
    wide = replace(run, **{name: value.to(torch.float32, copy=True) for name, value in tensors(run).items()})
    rounding = StochasticRounding(ROUNDING.keys, begin, lines)
    adamw_(run, RULES["adamw"], 4, decision(0.5), Kernels("triton"), rounding)
    adamw_(wide, RULES["adamw"], 4, decision(0.5), Kernels("triton"))
    assert torch.equal(run.weights, rounding.round(wide.weights, 0))
    assert not torch.equal(run.weights, wide.weights.bfloat16())
    for kind, (found, exact) in enumerate(((run.first, wide.first), (run.second, wide.second)), 1):
        assert torch.equal(found, exact if moments == torch.float32 else rounding.round(exact, kind))


def test_rounding_keeps_the_mean() -> None:
    draws, count = 64, 1024
    rule, total = AdamRule(1e-3, (0.0, 0.0), 0.0, 0.0, True), torch.zeros(count, dtype=torch.float64)
    for key in range(draws):
        ones = torch.ones(count, dtype=torch.bfloat16)
        run = AdamRun(ones, ones.clone(), torch.zeros(count), torch.zeros(count))
        adamw_(run, rule, 1, decision(), Kernels("triton"), StochasticRounding((derive_seed(key), 1, 2), 0))
        total += run.weights.double()
    share = 1e-3 / 2**-8  # of the way from 1 to the number below it
    error = 2**-8 * math.sqrt(share * (1 - share) / (draws * count))
    assert abs(float(total.mean()) / draws - (1 - 1e-3)) < 4 * error


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of numpy, in the interpreter
def test_what_is_not_finite_stays_so() -> None:
    run = made(40, torch.bfloat16, torch.float32)
    run.weights[0], run.weights[1], run.gradient[2] = math.inf, -math.inf, math.nan
    adamw_(run, RULES["no decay"], 1, decision(), Kernels("triton"), ROUNDING)
    assert [float(x) for x in run.weights[:2]] == [math.inf, -math.inf]
    assert bool(run.weights[2].isnan()) and bool(run.weights[3:].isfinite().all())
