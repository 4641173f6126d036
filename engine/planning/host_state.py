"""Choice of the offloaded fraction of optimizer state, and notes about settings with surprising effects.

The fraction is the smallest with which the rest fits the device.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.planning.cost_model.links import tensor_groups_cross
from engine.precision.dtypes import Precision, half_note
from engine.program.program import Program
from engine.zero.layout import FlatLayout
from engine.zero.wire_formats import WireFormats


def possible_ratios(layouts: Iterable[FlatLayout]) -> tuple[float, ...]:
    """Returns the highest ``offload_optimizer.ratio`` for each possible set of buckets (flat buffers) on the host.

    The values ascend from 0 to 1. A ratio between two of them acts as the higher one.
    """
    found = {0.0, 1.0}
    for layout in layouts:
        elements = 0
        for bucket in layout.buckets:
            elements += bucket.elements
            ratio = min(1.0, elements / layout.elements)
            while ratio * layout.elements > elements:  # the quotient was rounded up
                ratio = math.nextafter(ratio, 0.0)
            while (above := math.nextafter(ratio, 1.0)) > ratio and above * layout.elements <= elements:
                ratio = above
            found.add(ratio)
    return tuple(sorted(found))


def smallest_ratio(layouts: Iterable[FlatLayout], fits: Callable[[float], bool]) -> float | None:
    """Returns the smallest ``offload_optimizer.ratio`` for which ``fits`` returns True, or None. ``fits`` must
    stay True as the ratio grows.
    """
    ratios = possible_ratios(layouts)
    first = bisect_left(ratios, True, key=fits)
    return ratios[first] if first < len(ratios) else None


def with_ratio(config: Config, ratio: float) -> Config:
    """Returns ``config`` with ``zero_optimization.offload_optimizer.ratio`` set to ``ratio``."""
    zero = config.zero_optimization
    return replace(
        config, zero_optimization=replace(zero, offload_optimizer=replace(zero.offload_optimizer, ratio=ratio))
    )


def refuse_limit(limit: float, rank: int, state: Mapping[str, int]) -> PlanError:
    """Returns the error for a ``rank`` that exceeds ``limit`` GiB of device memory even with all optimizer state on the
    host.

    ``state``: bytes on the device of ``rank``, by kind.
    """
    kinds = ", ".join(f"{kind} {count / 2**30:.3g}" for kind, count in state.items() if count)
    return PlanError(
        f"zero_optimization.offload_optimizer.memory_limit {limit:g} GiB: with all optimizer state on the host, rank "
        f"{rank} still has {sum(state.values()) / 2**30:.3g} GiB on its device ({kinds}); raise the limit, take more "
        "data ranks or a higher stage, or put parameters on the host too (offload_param)."
    )


def refuse_unknown() -> PlanError:
    """Returns the error for ``offload_optimizer.ratio`` "auto" with the script's own optimizer, of unknown size."""
    return PlanError(
        'zero_optimization.offload_optimizer.ratio "auto" with an optimizer passed in code, whose state is not '
        "known before it is made; give a number from 0 to 1, or name the optimizer in the config."
    )


def setting_notes(program: Program, config: Config, precision: Precision, formats: WireFormats) -> tuple[str, ...]:
    """Returns notes for the startup banner about settings without effect or with an unexpected effect, one sentence
    each.
    """
    notes, model = list(config.notes), program.model
    if program.loss_fn is None and hasattr(model, "generate") and hasattr(model, "config"):
        notes.append(
            "loss: a Hugging Face output.loss is a mean per microbatch; with unequal token counts pass a loss_fn that "
            "returns (sum, weight) for the exact mean over tokens"
        )
    if 1 <= config.accumulation < config.pp:
        count = f"{config.accumulation} microbatch{'es' * (config.accumulation > 1)}"
        notes.append(
            f"pipeline: {count} for {config.pp} pipeline ranks, so that ranks wait for each other in every step; raise "
            "gradient_accumulation_steps, with smaller microbatches if need be"
        )
    node = config.parallel.gpus_per_node
    if node is not None and tensor_groups_cross(config.tp, min(node, config.pp * config.dp * config.tp)):
        notes.append(
            f"tensor: groups of {config.tp} ranks cross nodes of {node} GPUs, so every layer waits for the network; "
            "take a tensor size that divides a node"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        notes.append(
            "no parameter of the model requires a gradient: this engine predicts, generates and evaluates, and "
            "train_batch refuses"
        )
    if 1 < config.shards == config.zero_optimization.zero_hpz_partition_size:
        notes.append(
            f"zero: zero_hpz_partition_size {config.shards} puts all ranks that share a shard into one node, whose "
            "secondary shards would be the shards once more, so none are kept"
        )
    notes += unused_formats(config, precision)
    notes += exact_weights(model, formats, precision)
    notes += offload_notes(model, config, precision)
    if (half := half_note(model, precision)) is not None:
        notes.append(half)
    notes += rounding_notes(model, config, precision)
    return tuple(notes)


def unused_formats(config: Config, precision: Precision) -> list[str]:
    """Returns one note for each quantization format under ``wire`` that makes no message shorter."""
    notes, computed = [], precision.compute or precision.autocast
    given = (("tensor", config.tp, config.wire.tensor), ("pipeline", config.pp, config.wire.pipeline))
    for axis, ranks, name in given:
        if ranks == 1 and name != "exact":
            notes.append(f"wire.{axis}: there is one {axis} rank, which sends nothing")
        elif name in ("bf16", "fp16") and computed is not None and computed.itemsize == 2:
            notes.append(
                f"wire.{axis}: {name} makes nothing shorter that is computed in 16 bits, so only fp32 is sent in it; "
                "int8 does"
            )
    return notes


def exact_weights(model: nn.Module, formats: WireFormats, precision: Precision) -> list[str]:
    """Returns, as a list, a note on weights sent unquantized despite weight quantization; [] if there are none."""
    if formats.weights is None:
        return []
    left = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad
        and str(precision.parameter(name, p.dtype)).removeprefix("torch.") not in formats.weight_dtypes
    ]
    more = f" and {len(left) - 1} more" * (len(left) > 1)
    return (
        [
            f"zero: {left[0]}{more} are gathered as they are: stages 1 and 2 send fewer bits of weights with a "
            "master (bf16, fp16), and stage 3 of all but fp64"
        ]
        if left
        else []
    )


def offload_notes(model: nn.Module, config: Config, precision: Precision) -> list[str]:
    """Returns notes about ``offload_param`` keys that act differently from DeepSpeed."""
    zero = config.zero_optimization
    if zero.offload_param.device == "none":
        return []
    if zero.stage < 3:
        return [
            f"zero: offload_param moves nothing at stage {zero.stage}, where ranks compute with whole parameters; "
            "stage 3 keeps their shards on the host"
        ]
    notes = []
    if zero.offload_param.device == "nvme":
        notes.append('zero: offload_param "nvme" keeps parameters in host memory; only moments can lie on disk')
    if zero.offload_optimizer.device == "none" or zero.offload_optimizer.ratio != 1.0:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        dtypes = {name: str(precision.parameter(name, p.dtype)).removeprefix("torch.") for name, p in trained}
        alone = [name for name, dtype in dtypes.items() if precision.widths(dtype).master is None]
        if alone:
            more = f" and {len(alone) - 1} more" * (len(alone) > 1)
            notes.append(f"zero: {alone[0]}{more} have no master, so the host that holds them updates them")
    return notes


def rounding_notes(model: nn.Module, config: Config, precision: Precision) -> list[str]:
    """Returns notes about values that the run rounds to bf16 or fp16, and about configured casts without effect."""
    keys = ["cast_forward_inputs"] * config.cast_forward_inputs + ["buffer_dtype"] * (config.buffer_dtype is not None)
    if precision.compute is None:
        words = f"precision: {' and '.join(keys)} cast nothing in a run without bf16.enabled or fp16.enabled"
        return [words] * bool(keys)
    short = "bf16" if config.bf16.enabled else "fp16"
    notes = [f"floating inputs of forward are rounded to {short}: cast_forward_inputs"] * config.cast_forward_inputs
    parameters = [(n, p, precision.frozen(n, p.dtype).itemsize < p.dtype.itemsize) for n, p in model.named_parameters()]
    frozen = [name for name, p, rounded in parameters if rounded and not p.requires_grad]
    wide = [name for name, p, rounded in parameters if rounded and p.requires_grad]
    buffers = [n for n, b in model.named_buffers() if precision.buffer(n, b.dtype).itemsize < b.dtype.itemsize]
    if frozen:
        notes.append(f"frozen parameters are rounded to {short}, as Module.to does it: {_first(frozen)}")
    if buffers:
        notes.append(f"buffers are rounded to {config.buffer_dtype}: {_first(buffers)}")
    if wide and any(p.dtype == precision.compute for _, p, _ in parameters):
        notes.append(
            f"parameters that are wider than others of the model compute in {short} too: {_first(wide)}; keep_fp32 "
            "names modules that stay as they are"
        )
    return notes


def _first(names: Sequence[str]) -> str:
    return f"{', '.join(names[:2])}{f' and {len(names) - 2} more' * (len(names) > 2)}"
