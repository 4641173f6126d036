"""Rules between keys of a configuration that hold for any model. Every reader of a configuration applies them."""

import re
from collections.abc import Mapping
from typing import Any

from engine.config.optim_sections import MATRIX_OPTIMIZERS, OptimizerConfig, SchedulerConfig
from engine.config.rules import Problems
from engine.config.sections import (
    ActivationCheckpointingConfig,
    Bf16Config,
    CheckpointConfig,
    EmaConfig,
    Fp16Config,
    IntegrityConfig,
    MonitorConfig,
    OffloadConfig,
    ParallelConfig,
    TorchAutocastConfig,
    WatchdogConfig,
    ZeroConfig,
)
from engine.config.wording import shown_value


def check_precision(bf16: Bf16Config, fp16: Fp16Config, autocast: TorchAutocastConfig, problems: Problems) -> None:
    """Adds a problem for each pair of settings that exclude each other in ``bf16``, ``fp16`` and ``torch_autocast``."""
    if autocast.enabled and fp16.enabled:
        problems.add(
            "torch_autocast.enabled",
            "true together with fp16.enabled, which stores the model in fp16; set one of them to false.",
        )
    if bf16.enabled and fp16.enabled:
        problems.add("fp16.enabled", "true together with bf16.enabled; set one of them to false.")
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        problems.add(
            "bf16.bf16_optimizer_states",
            "true with bf16.bf16_master_weights_and_grads false, which keeps fp32 master weights, the larger part of "
            "the state; set both to true, or leave bf16_optimizer_states out.",
        )


def check_copies(checkpoint: CheckpointConfig, problems: Problems) -> None:
    """Adds a problem if ``checkpoint.memory_every`` is set without ``checkpoint.folder``."""
    if checkpoint.memory_every and checkpoint.folder is None:
        problems.add(
            "checkpoint.memory_every",
            f"{checkpoint.memory_every} without checkpoint.folder, where the identity of a run's copies is stored; "
            "give checkpoint.folder too.",
        )


def check_recomputation(given: ActivationCheckpointingConfig, problems: Problems) -> None:
    """Adds a problem for each key of ``activation_checkpointing`` that its ``mode`` ignores, or that contradicts
    another key.
    """
    takes = {
        "save": given.mode == "selective" or (given.mode, given.others) == ("offload", "selective"),
        "every": given.mode in ("selective", "offload"),
    }
    extra = [key for key in takes if getattr(given, key) is not None]
    for key in extra:
        if not takes[key]:
            problems.add(
                f"activation_checkpointing.{key}",
                f'given with mode {shown_value(given.mode)}; set the mode to "selective", or leave {key} out.',
            )
    if given.others != "none" and (given.mode != "offload" or given.every is None):
        problems.add(
            "activation_checkpointing.others",
            f"{shown_value(given.others)} applies to the blocks that mode offload leaves on the device; give mode "
            '"offload" and the key every, or leave others out.',
        )
    if given.inputs == "host" and given.mode in ("none", "offload") and given.others == "none":
        problems.add(
            "activation_checkpointing.inputs",
            f'"host" with mode {shown_value(given.mode)}, which recomputes nothing; set the mode to "full" or '
            '"selective", or leave inputs out.',
        )
    if given.mode == "selective" and len(extra) == 2:
        problems.add(
            "activation_checkpointing.every",
            f"{given.every} together with save; give only save to keep operators of all blocks, or only every to "
            "recompute whole blocks.",
        )


def check_tiles(
    given: ActivationCheckpointingConfig, parallel: ParallelConfig, compiled: bool, problems: Problems
) -> None:
    """Adds a problem if ``activation_checkpointing.tile_tokens`` is set together with tensor parallelism or
    torch.compile.

    ``compiled`` is the configuration value ``compile``.
    """
    other = "compile true" if compiled else f"parallel.tensor {shown_value(parallel.tensor)}"
    why = "compiled blocks run as a whole" if compiled else "a tile would repeat the sums over tensor ranks"
    if given.tile_tokens is not None and (compiled or parallel.tensor != 1):
        problems.add(
            "activation_checkpointing.tile_tokens",
            f"{shown_value(given.tile_tokens)} with {other}: {why}; leave one of them out.",
        )


def check_zero(zero: ZeroConfig, problems: Problems) -> None:
    """Adds a problem for each ZeRO setting that does not fit the ZeRO stage, and each offload setting that does not fit
    other offload settings.
    """
    _check_offload(zero.offload_optimizer, problems)
    if zero.reduce == "microbatch" and zero.stage < 2:
        problems.add(
            "zero_optimization.reduce",
            f'"microbatch" with stage {zero.stage}: only stages 2 and 3 keep gradients as shards; set stage to 2, or '
            'reduce to "step".',
        )
    for key, asks in (("gather", zero.gather == "step"), ("keep_gathered_bytes", zero.keep_gathered_bytes)):
        if asks and zero.stage < 3:
            problems.add(
                f"zero_optimization.{key}",
                f"{shown_value(getattr(zero, key))} with stage {zero.stage}: only stage 3 gathers parameters; set "
                f"stage to 3, or leave {key} out.",
            )
    if zero.shard_size is not None and zero.stage == 0:
        problems.add(
            "zero_optimization.shard_size",
            f"{zero.shard_size} with stage 0, which shards nothing; set stage to 1, 2 or 3, or leave shard_size out.",
        )
    check_secondary_shards(zero, problems)
    check_fewer_bits(zero, problems)


def _check_offload(offload: OffloadConfig, problems: Problems) -> None:
    """Notes offload settings that lack another setting, or that need another place."""
    if offload.device == "nvme" and offload.nvme_path is None:
        problems.add(
            "zero_optimization.offload_optimizer.nvme_path",
            'missing, and device is "nvme": give a folder on a disk of every host, or set device to "cpu".',
        )
    if offload.ratio == "auto" and offload.memory_limit is None:
        problems.add(
            "zero_optimization.offload_optimizer.memory_limit",
            'missing, and ratio is "auto": give the GiB that optimizer state may take on a GPU.',
        )
    if offload.ratio == "auto" and offload.device == "none":
        problems.add(
            "zero_optimization.offload_optimizer.ratio",
            '"auto", and device is "none": set device to "cpu" or "nvme", or leave ratio out.',
        )
    if offload.ratio != "auto" and offload.memory_limit is not None:
        problems.add(
            "zero_optimization.offload_optimizer.ratio",
            f'{shown_value(offload.ratio)} with memory_limit, which is for "auto"; give "auto", or no memory_limit.',
        )
    if offload.delayed_update and (offload.device != "cpu" or offload.ratio != 1.0):
        other = f'device "{offload.device}"' if offload.device != "cpu" else f"ratio {shown_value(offload.ratio)}"
        problems.add(
            "zero_optimization.offload_optimizer.delayed_update",
            f"true with {other}: only an update that the host makes completely, in its memory, overlaps with the next "
            'step; set device to "cpu" and ratio to 1, or leave delayed_update out.',
        )
    if offload.map_memory and offload.device != "nvme":
        problems.add(
            "zero_optimization.offload_optimizer.map_memory",
            f'true with device "{offload.device}"; set device to "nvme" and give nvme_path, or leave map_memory out.',
        )


def check_secondary_shards(zero: ZeroConfig, problems: Problems) -> None:
    """Adds a problem if ZeRO++ hpZ (secondary parameter shards within each node) is configured below ZeRO 3, or with
    ``zero_optimization.gather`` "step".
    """
    asked = zero.zero_hpz_partition_size
    if asked in (0, 1):
        return
    if zero.stage < 3:
        problems.add(
            "zero_optimization.zero_hpz_partition_size",
            f"{shown_value(asked)} with stage {zero.stage}: only stage 3 gathers parameters; set stage to 3, or leave "
            "zero_hpz_partition_size out.",
        )
    elif zero.gather == "step":
        problems.add(
            "zero_optimization.zero_hpz_partition_size",
            f'{shown_value(asked)} with gather "step", which gathers parameters once a step, so that no gather would '
            'read secondary shards; set gather to "microbatch", or leave zero_hpz_partition_size out.',
        )


def check_fewer_bits(zero: ZeroConfig, problems: Problems) -> None:
    """Adds a problem for each enabled quantization of messages that the ZeRO stage does not send, and each setting of a
    disabled quantization.
    """
    for key, what in (("zero_quantized_weights", "gather parameters"), ("zero_quantized_gradients", "reduce shards")):
        if getattr(zero, key) and zero.stage == 0:
            problems.add(
                f"zero_optimization.{key}",
                f"true with stage 0: only stages 1 to 3 {what}; set stage to 1, 2 or 3, or leave {key} out.",
            )
    if zero.zero_quantized_gradients_bits == 1 and not zero.zero_gradient_error_feedback:
        problems.add(
            "zero_optimization.zero_quantized_gradients_bits",
            "1 without zero_gradient_error_feedback loses the rounding error of the signs; set "
            "zero_gradient_error_feedback to true, or zero_quantized_gradients_bits to 4.",
        )
    given = (
        ("zero_quantized_weights_bits", 8, zero.zero_quantized_weights),
        ("zero_quantized_gradients_bits", 8, zero.zero_quantized_gradients),
        ("zero_gradient_error_feedback", False, zero.zero_quantized_gradients),
        ("zero_quantized_block_size", 256, zero.zero_quantized_weights or zero.zero_quantized_gradients),
    )
    for key, default, used in given:
        if getattr(zero, key) != default and not used:
            switch = "weights" if "weights" in key else "gradients"
            problems.add(
                f"zero_optimization.{key}",
                f"{shown_value(getattr(zero, key))} without zero_quantized_{switch}, so nothing is sent in fewer "
                f"bits; set zero_quantized_{switch} to true, or leave {key} out.",
            )


def check_integrity(integrity: IntegrityConfig, problems: Problems) -> None:
    """Adds a problem for each setting of ``integrity`` that has no effect because ``integrity.every`` is 0."""
    if integrity.every:
        return
    for key, asks in (("rerun", integrity.rerun), ("on_failure", integrity.on_failure != "raise")):
        if asks:
            problems.add(
                f"integrity.{key}",
                f"{shown_value(getattr(integrity, key))} while integrity.every is 0, which checks nothing; set "
                f"integrity.every to a number of steps, or leave {key} out.",
            )


def check_reruns(integrity: IntegrityConfig, zero: ZeroConfig, problems: Problems) -> None:
    """Adds a problem if ``integrity.rerun`` (some steps run twice) is set together with error feedback of gradients."""
    if integrity.rerun and zero.zero_gradient_error_feedback:
        problems.add(
            "integrity.rerun",
            "true with zero_optimization.zero_gradient_error_feedback: the second run of a step would add the "
            "rounding error of the first; set one of them to false.",
        )


def check_average(ema: EmaConfig | None, zero: ZeroConfig, problems: Problems) -> None:
    """Adds a problem if a moving average of the weights is configured together with a delayed optimizer update."""
    if ema is not None and zero.offload_optimizer.delayed_update:
        problems.add(
            "zero_optimization.offload_optimizer.delayed_update",
            "true with ema, which would read weights during their update; leave delayed_update or ema out.",
        )


def check_uneven(uneven: bool, parallel: ParallelConfig, problems: Problems) -> None:
    """Adds a problem if ``uneven_microbatches`` (``uneven``) is True and there are expert ranks."""
    if uneven and parallel.expert > 1:
        problems.add(
            "uneven_microbatches",
            f"true with parallel.expert {parallel.expert}, which exchanges rows between data ranks in every forward; "
            "leave uneven_microbatches or parallel.expert out.",
        )


def check_managed(managed: bool, parallel: ParallelConfig, problems: Problems) -> None:
    """Adds a problem if ``managed_gradient_accumulation`` (``managed``) is False and there are pipeline ranks."""
    if not managed and parallel.pipeline not in (1, "auto"):
        problems.add(
            "managed_gradient_accumulation",
            f"false with parallel.pipeline {parallel.pipeline}, which has a schedule of a fixed number of "
            "microbatches; leave managed_gradient_accumulation or parallel.pipeline out.",
        )


def check_profile(monitor: MonitorConfig, watchdog: WatchdogConfig, problems: Problems) -> None:
    """Adds a problem if ``monitor.profile`` is not a range of steps such as "10:12", or lacks a setting that it needs.

    A profile needs a folder (``monitor.report``) and the watchdog.
    """
    if (given := monitor.profile) is None:
        return
    steps = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", given)
    if steps is None or int(steps[1]) > int(steps[2]):
        problems.add("monitor.profile", f'{shown_value(given)} is not a range of steps; give one such as "10:12".')
    elif monitor.report is None:
        problems.add("monitor.profile", f"{shown_value(given)} without monitor.report, its folder; give both.")
    elif not watchdog.enabled:
        problems.add(
            "monitor.profile",
            f"{shown_value(given)} with watchdog.enabled false, but a profile reads the watchdog's flight recorder; "
            "leave watchdog.enabled out.",
        )


_LAYERWISE = ("Lamb", "LARS")
_NOT_ROUNDED = (*sorted(MATRIX_OPTIMIZERS), *_LAYERWISE, "AdamW8bit", "Adafactor", "ScheduleFreeAdamW")
"""Optimizers without stochastic rounding of updates into bf16 weights."""
_NOT_ON_DISK = ("AdamW8bit", "ScheduleFreeAdamW")
"""Optimizers with more state than moments, which is all that the file of a bucket stores."""
_OFFLOAD = "zero_optimization.offload_optimizer.device"
_ORDERED = (
    ("warmup_num_steps", "total_num_steps"), ("warmup_min_lr", "warmup_max_lr"), ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"), ("base_momentum", "max_momentum"), ("eta_min", "lr"),
)  # fmt: skip
"""Pairs of params; the first may not be above the second. A second that is absent or null is the optimizer's rate."""


def check_optimizer(
    optimizer: OptimizerConfig | None, zero: ZeroConfig, bf16: Bf16Config, ema: EmaConfig | None, problems: Problems
) -> None:
    """Adds a problem for each contradiction between optimizer params, and each setting that an optimizer does not
    support.
    """
    if optimizer is None:
        return
    for index, entry in enumerate(optimizer.entries):
        at = f"optimizer[{index}]" if optimizer.before else "optimizer"
        _check_params(entry, f"{at}.params", problems)
        for key in ("update_unused", "include_frozen") if entry is not optimizer else ():
            if getattr(entry, key):
                problems.add(f"{at}.{key}", "applies to all parameters of the model; give it in the last entry.")
    kinds: list[str] = [entry.type for entry in optimizer.entries]
    _check_optimizer_offload(kinds, zero, problems)
    whole = [kind for kind in kinds if kind in MATRIX_OPTIMIZERS]
    if whole and optimizer.update_unused:
        problems.add(
            "optimizer.update_unused",
            f"true with {whole[0]}, which updates no parameter without a gradient; leave update_unused out.",
        )
    exact = [kind for kind in kinds if kind in _NOT_ROUNDED]
    if exact and bf16.bf16_master_weights_and_grads:
        problems.add(
            "bf16.bf16_master_weights_and_grads",
            f"true with {exact[0]}, which rounds to nearest, but bf16 weights without fp32 copies lose small updates "
            "unless updates are rounded stochastically; leave bf16_master_weights_and_grads out, or use the optimizer "
            "AdamW.",
        )
    if "ScheduleFreeAdamW" in kinds and ema is not None:
        problems.add("ema", "given with ScheduleFreeAdamW, which averages the weights itself; leave ema out.")


def _check_optimizer_offload(kinds: list[str], zero: ZeroConfig, problems: Problems) -> None:
    device = zero.offload_optimizer.device
    if device == "none":
        return
    if len(kinds) > 1 and device == "nvme":
        problems.add(
            _OFFLOAD, '"nvme" with a list of optimizers, but files on disk store the moments of one; give one '
            'optimizer, or "cpu".',
        )  # fmt: skip
    for kind in kinds:
        if kind in MATRIX_OPTIMIZERS:
            why = f"{kind}, which multiplies matrices on the device; leave offload_optimizer out, or give AdamW."
        elif kind == "Adafactor":
            why = f"{kind}, which has only row and column means as state; leave offload_optimizer out, or give AdamW."
        elif kind in _LAYERWISE:
            why = f"{kind}, which reduces norms on the device; leave offload_optimizer out, or give AdamW."
        elif kind in _NOT_ON_DISK and device == "nvme" and len(kinds) == 1:
            why = f'{kind}, but files on disk store moments in the dtype of the weights; give "cpu", or AdamW.'
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
            f"{params['min_coeff']:g} is above max_coeff, {params['max_coeff']:g}; lower it, or raise max_coeff.",
        )
    if entry.type == "Shampoo" and params["betas"][0] == 1:
        problems.add(f"{at}.betas", "the first beta is 1, so that momenta never include a gradient; give one below 1.")
    if entry.type == "Adafactor" and params["eps"][1] is None:
        problems.add(
            f"{at}.eps", "[.., null] has no lower bound of the RMS of the weights; give a number, such as 1e-3."
        )
    if entry.type == "ScheduleFreeAdamW" and not params["betas"][0]:
        problems.add(
            f"{at}.betas",
            "the first beta is 0, so that gradients ignore the averaged weights; give one above 0, such as 0.9.",
        )


def check_rates(scheduler: SchedulerConfig | None, optimizer: OptimizerConfig | None, problems: Problems) -> None:
    """Adds a problem for each scheduler param that contradicts another one, or a param of the optimizer."""
    if scheduler is None:
        return
    params, at = scheduler.params, "scheduler.params"
    for low, high in _ORDERED:
        if low in params:
            _check_order(low, high, params, optimizer, problems)
    if params.get("three_phase") and params["pct_start"] > 0.5:
        problems.add(
            f"{at}.pct_start",
            f"{params['pct_start']} with three_phase, which has two equal phases first; give at most 0.5.",
        )
    if scheduler.type == "OneCycleLR" and params["cycle_momentum"] and optimizer is not None:
        for key in ("betas", "momentum"):
            if all(key in entry.params for entry in optimizer.entries):
                return
        problems.add(
            f"{at}.cycle_momentum",
            f"true moves the momentum, but {optimizer.kind} has no betas or momentum for all parameters; set "
            "cycle_momentum to false.",
        )


def _check_order(
    low: str, high: str, params: Mapping[str, Any], optimizer: OptimizerConfig | None, problems: Problems
) -> None:
    """Notes the first parameter group with ``low`` above ``high``."""
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
            shown = (shown_value(each) if isinstance(each, tuple) else f"{each:g}" for each in (params[low], top))
            first, second = shown
            group = f", in parameter group {index}" if max(len(lows), len(tops)) > 1 else ""
            problems.add(
                f"scheduler.params.{low}",
                f"{first} is above {name}, {second}{group}; give at most {other:g}, or raise {name}.",
            )
            return
