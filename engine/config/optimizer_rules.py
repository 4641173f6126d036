"""Rules between the settings of optimizers and schedules, and between them and other sections."""

from collections.abc import Mapping
from typing import Any

from engine.config.optim_sections import MATRIX_OPTIMIZERS, OptimizerConfig, SchedulerConfig
from engine.config.rules import Problems
from engine.config.sections import Bf16Config, EmaConfig, ZeroConfig
from engine.config.wording import shown_value

_LAYERWISE = ("Lamb", "LARS")
_NOT_ROUNDED = (*sorted(MATRIX_OPTIMIZERS), *_LAYERWISE, "AdamW8bit", "Adafactor", "ScheduleFreeAdamW")
"""Those whose updates are not rounded stochastically into bf16 weights."""
_NOT_ON_DISK = ("AdamW8bit", "ScheduleFreeAdamW")
"""Those whose state is not moments alone, of which each bucket has a file."""
_OFFLOAD = "zero_optimization.offload_optimizer.device"
_ORDERED = (
    ("warmup_num_steps", "total_num_steps"), ("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"), ("base_momentum", "max_momentum"), ("eta_min", "lr"),
)  # fmt: skip
"""Pairs of params of which the first may not be above the second; a second that is absent or null is the optimizer's
rate."""


def check_optimizer(
    optimizer: OptimizerConfig | None, zero: ZeroConfig, bf16: Bf16Config, ema: EmaConfig | None, problems: Problems
) -> None:
    """Note params of an optimizer that need others, and what optimizers of a list, or some kinds, do not have."""
    if optimizer is None:
        return
    for index, entry in enumerate(optimizer.entries):
        at = f"optimizer[{index}]" if optimizer.before else "optimizer"
        _check_params(entry, f"{at}.params", problems)
        for key in ("update_unused", "include_frozen") if entry is not optimizer else ():
            if getattr(entry, key):
                problems.add(f"{at}.{key}", "is for all parameters of the model; give it in the last entry.")
    kinds: list[str] = [entry.type for entry in optimizer.entries]
    _check_offload(kinds, zero, problems)
    whole = [kind for kind in kinds if kind in MATRIX_OPTIMIZERS]
    if whole and optimizer.update_unused:
        problems.add(
            "optimizer.update_unused", f"true with {whole[0]}, which has no update without a gradient; leave it out."
        )
    exact = [kind for kind in kinds if kind in _NOT_ROUNDED]
    if exact and bf16.bf16_master_weights_and_grads:
        problems.add(
            "bf16.bf16_master_weights_and_grads",
            f"true with {exact[0]}, whose updates are not rounded stochastically; leave it out, or give AdamW.",
        )
    if "ScheduleFreeAdamW" in kinds and ema is not None:
        problems.add("ema", "given with ScheduleFreeAdamW, which averages the weights itself; leave one of them out.")


def _check_offload(kinds: list[str], zero: ZeroConfig, problems: Problems) -> None:
    device = zero.offload_optimizer.device
    if device == "none":
        return
    if len(kinds) > 1 and device == "nvme":
        problems.add(
            _OFFLOAD, '"nvme" with a list of optimizers, and moments on disk are those of one; give one optimizer, or '
            '"cpu".',
        )  # fmt: skip
    for kind in kinds:
        if kind in MATRIX_OPTIMIZERS:
            why = f"{kind}, whose products of matrices are for the device; leave the offload out, or give AdamW."
        elif kind == "Adafactor":
            why = f"{kind}, whose state is a few rows and columns; leave the offload out, or give AdamW."
        elif kind in _LAYERWISE:
            why = f"{kind}, whose norms of parameters meet on the device; leave the offload out, or give AdamW."
        elif kind in _NOT_ON_DISK and device == "nvme" and len(kinds) == 1:
            why = f'{kind}, and files on a disk hold moments in the dtype of the weights; give "cpu", or AdamW.'
        else:
            continue
        problems.add(_OFFLOAD, f"{shown_value(device)} with {why}")
        return


def _check_params(entry: OptimizerConfig, at: str, problems: Problems) -> None:
    params: Mapping[str, Any] = entry.params
    if entry.type == "SGD" and params.get("nesterov") and (not params["momentum"] or params["dampening"]):
        given = f"momentum is {params['momentum']} and dampening {params['dampening']}"
        problems.add(f"{at}.nesterov", f"true needs momentum above 0 and dampening 0, but {given}; give both.")
    if entry.type == "Lamb" and params["min_coeff"] > params["max_coeff"]:
        problems.add(
            f"{at}.min_coeff",
            f"{params['min_coeff']:g} is above max_coeff, {params['max_coeff']:g}; give at most that, or raise it.",
        )
    if entry.type == "Shampoo" and params["betas"][0] == 1:
        problems.add(f"{at}.betas", "the first is 1, and momenta would take no gradient in; give a number below 1.")
    if entry.type == "Adafactor" and params["eps"][1] is None:
        problems.add(f"{at}.eps", "[.., null] has no least RMS of the weights; give a number, such as 1e-3.")
    if entry.type == "ScheduleFreeAdamW" and not params["betas"][0]:
        problems.add(
            f"{at}.betas",
            "the first is 0, and gradients would be taken where the average is not; give a number above 0, such as "
            "0.9.",
        )


def check_rates(scheduler: SchedulerConfig | None, optimizer: OptimizerConfig | None, problems: Problems) -> None:
    """Note params that contradict each other."""
    if scheduler is None:
        return
    params, at = scheduler.params, "scheduler.params"
    for low, high in _ORDERED:
        if low in params:
            _check_order(low, high, params, optimizer, problems)
    if params.get("three_phase") and params["pct_start"] > 0.5:
        problems.add(
            f"{at}.pct_start",
            f"{params['pct_start']} with three_phase, whose first two phases are as long; give at most 0.5.",
        )
    if scheduler.type == "OneCycleLR" and params["cycle_momentum"] and optimizer is not None:
        for key in ("betas", "momentum"):
            if all(key in entry.params for entry in optimizer.entries):
                return
        problems.add(
            f"{at}.cycle_momentum",
            f"true moves the momentum, and {optimizer.kind} has neither betas nor momentum everywhere; give false.",
        )


def _check_order(
    low: str, high: str, params: Mapping[str, Any], optimizer: OptimizerConfig | None, problems: Problems
) -> None:
    """Note the first group for which ``low`` is above ``high``."""
    if low.endswith("_mom") and not params["cycle_momentum"]:
        return
    top, name = params.get(high), high
    if top is None:
        if high == "total_num_steps" or optimizer is None:
            return
        top, name = optimizer.params["lr"], "the optimizer's lr"
    lows, tops = (value if isinstance(value, tuple) else (value,) for value in (params[low], top))
    for index in range(max(len(lows), len(tops))):
        one, other = (values[min(index, len(values) - 1)] for values in (lows, tops))
        if one > other:
            problems.add(
                f"scheduler.params.{low}", f"{one:g} is above {name}, {other:g}; give at most {other:g}, or raise that."
            )
            return
