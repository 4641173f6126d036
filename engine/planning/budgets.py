"""Budgets of a plan: formulas for state bytes and traffic of every rank, which measured counts must equal exactly."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from engine.config import Config
from engine.kernels.codecs.block_codec import BlockFormat, CastFormat, NumberFormat
from engine.kernels.optim.update_rules import mean_elements
from engine.optim.built_in import GroupState
from engine.parallel.comm.encoded_collectives import ActivationFormat
from engine.parallel.comm.traffic import Tally, Traffic, sent_bytes
from engine.parallel.grid import Axis, Coord, Grid, ShardHolder
from engine.parallel.pipeline.partition.stage_plan import StagePlan
from engine.parallel.pipeline.schedule.actions import Action, Op
from engine.parallel.shard_table import ShardRow, ShardTable
from engine.parallel.tensor.collectives import ACTIVATIONS
from engine.parallel.tensor.layers.partial_grads import LABEL
from engine.parallel.trace.model_trace import Value
from engine.precision.dtypes import Precision, Widths
from engine.zero.gather.call_agreement import ROUND, round_bytes
from engine.zero.gather.gather_schedule import GatherOrder, Gathers, count_gathers
from engine.zero.gather.secondary_shards import NO_SHARDS, WITHIN, SecondaryLayout
from engine.zero.layout import Bucket, FlatLayout
from engine.zero.offload.block_file import whole_sectors
from engine.zero.offload.host_copies import offloaded_buckets
from engine.zero.optim.averaged_weights import average_dtype
from engine.zero.wire_formats import WireFormats

CONTROL_SCALARS = 9
"""fp64 values that one step sums over all ranks: loss, weight, norm squared, tokens, problems, stop requests."""

COUNTS = "microbatches"
"""Label of the agreement on the numbers of microbatches (``uneven_microbatches``)."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Planned bytes of one rank: state between steps, and traffic in a step."""

    coord: Coord
    parameters: int
    """Number of parameter elements of forward on this rank, without padding."""
    state_bytes: Mapping[str, int]
    """Device bytes by kind: parameters, frozen parameters, gradients, master, optimizer, error feedback."""
    host_bytes: Mapping[str, int]
    """Host bytes by kind: parameters, frozen parameters, master, gradients, optimizer; empty without offload."""
    disk_bytes: int
    """Disk bytes: two slots of moments, and the weights before the last update."""
    traffic: tuple[Traffic, ...]


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Plan of the all-gathers with which a rank gathers sharded parameters in a step (ZeRO 3)."""

    order: GatherOrder
    passes: tuple[Action, ...]
    pinned: frozenset[int]
    """Indices of buckets that stay gathered for the whole step."""
    sizes: tuple[int, ...]
    """Full size of each bucket, in bytes."""
    wire: tuple[int, ...]
    """Bytes of each full bucket in its message format."""
    within: SecondaryLayout = NO_SHARDS
    """Layout of secondary shards inside a node (hpZ)."""

    @property
    def gathers(self) -> Gathers:
        """Counts of one step: all-gather calls, each for one or more buckets (flat buffers), and gathers of each
        bucket.
        """
        return self.over(None)

    def over(self, axis: Axis | None) -> Gathers:
        """Returns the counts of all-gathers in a step for parameters sharded over ``axis``; None: all parameters."""
        return count_gathers(self.order, self.passes, self.pinned, self.within.buckets, axis)

    @property
    def axes(self) -> Mapping[Axis, int]:
        """Axes over which parameters are sharded, each with its number of ranks."""
        return {each.spread.sharding: each.spread.ranks for each in self.order.buckets}

    @property
    def secondary_bytes(self) -> int:
        """Bytes of this rank's secondary shards, the copies of parameters inside each node (hpZ of ZeRO++)."""
        return sum(self.sizes[index] // self.within.ranks for index in self.within.buckets)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a rank's state between steps: on device and host by kind of state, and on disk in total."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    disk: int


def state_bytes(
    layout: FlatLayout,
    frozen: int,
    precision: Precision,
    config: Config,
    kept: Callable[[Bucket], int],
) -> StateBytes:
    """Returns the bytes of state that a rank with the buckets of ``layout`` stores between steps.

    ``frozen``: bytes of frozen parameters outside of buckets. ``kept``: function that returns the optimizer bytes of a
    bucket.
    """
    state = {"parameters": 0, "frozen parameters": 0, "gradients": 0, "master": 0, "optimizer": 0}
    formats = wire_formats(config, precision)
    if formats.feedback:
        state["error feedback"] = sum(4 * formats.residual_elements(bucket) for bucket in layout.buckets)
    host = {"parameters": 0, "frozen parameters": 0, "master": 0, "gradients": 0, "optimizer": 0}
    held = host if hosts_parameters(config) else state
    hosted = hosted_buckets(layout, config, precision)
    for bucket in layout.buckets:
        widths, shard = precision.widths(bucket.dtype), bucket.elements // bucket.spread.ranks
        owned = shard if config.zero_optimization.stage else bucket.elements
        summed = shard if reduces_each_microbatch(config) and not bucket.partial else bucket.elements
        state["gradients"] += summed * widths.sums.itemsize
        held["parameters"] += (shard if shards_parameters(config) else bucket.elements) * widths.compute.itemsize
        place = host if bucket.index in hosted else state
        place["optimizer"] += kept(bucket)
        if config.ema is not None:
            size = average_dtype(widths.master or widths.compute).itemsize
            place["average"] = place.get("average", 0) + owned * size
        if bucket.index in hosted:
            # where the host has the parameters, it needs a copy of them only beside a step that still uses them
            if widths.master or held is state or config.zero_optimization.offload_optimizer.delayed_update:
                host["master"] += owned * (widths.master or widths.compute).itemsize
            host["gradients"] += owned * widths.sums.itemsize
        elif widths.master:
            state["master"] += owned * widths.master.itemsize
    for bucket in layout.frozen:
        parts = bucket.spread.ranks if shards_parameters(config) else 1
        held["frozen parameters"] += bucket.elements // parts * getattr(torch, bucket.dtype).itemsize
    state["frozen parameters"] += frozen
    if config.zero_optimization.offload_optimizer.device != "nvme":
        return StateBytes(state, _held(host), 0)
    del host["optimizer"]
    buckets = [bucket for bucket in layout.buckets if bucket.index in hosted and kept(bucket)]
    sharded = config.zero_optimization.stage > 0
    sizes = [(b.elements // (b.spread.ranks if sharded else 1), kept(b), precision.widths(b.dtype)) for b in buckets]
    host["buffers"], disk = _disk_bytes(sizes)
    host["buffers"] *= min(config.zero_optimization.offload_optimizer.buffer_count, len(buckets))
    return StateBytes(state, _held(host), disk)


def optimizer_bytes(
    bucket: Bucket, groups: Sequence[GroupState], grid: Grid, config: Config, precision: Precision
) -> int:
    """Returns the bytes of optimizer state of ``bucket`` on the rank with the coordinates of ``grid``.

    ``groups``: optimizer state of each parameter group.
    """
    sharded = config.zero_optimization.stage > 0
    owned = bucket.shard(grid.index(bucket.spread.sharding)) if sharded else slice(0, bucket.elements)
    size = precision.widths(bucket.dtype).moments.itemsize
    return sum(groups[segment.group].bytes(segment.stop - segment.start, size) for segment in bucket.segments(owned))


def factor_bytes(rows: Sequence[ShardRow], groups: Sequence[GroupState], precision: Precision) -> int:
    """Returns the bytes of Adafactor's row and column statistics on one rank for the parameters ``rows``.

    A rank with any shard of a parameter stores its full statistics. ``groups``: state of each parameter group.
    """
    return sum(
        mean_elements(row.shape) * _widths(row, precision).moments.itemsize
        for row in rows
        if row.trainable and groups[row.group].factored
    )


def _widths(row: ShardRow, precision: Precision) -> Widths:
    return precision.widths(str(precision.parameter(row.name, row.dtype)).removeprefix("torch."))


def _disk_bytes(owned: Sequence[tuple[int, int, Widths]]) -> tuple[int, int]:
    """Returns (bytes of a page that fits every bucket, bytes of the files of the buckets), from elements, bytes of
    moments and widths."""
    slots = [whole_sectors(kept) for _, kept, _ in owned]
    before = [whole_sectors(elements * (widths.master or widths.compute).itemsize) for elements, _, widths in owned]
    pages = [sum(page) for page in zip(slots, before, strict=True)]
    return max(pages, default=0), 2 * sum(slots) + sum(before)


def _held(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in kinds.items() if count}


def hosted_buckets(layout: FlatLayout, config: Config, precision: Precision) -> frozenset[int]:
    """Returns the indices of the buckets (flat buffers) that the CPU updates under ``offload_optimizer``.

    With ``offload_param``, also returns all buckets that have no fp32 master weights.
    """
    offload = config.zero_optimization.offload_optimizer
    ratio = 1.0 if offload.ratio == "auto" else offload.ratio  # a plan has a number
    asked = offloaded_buckets(layout, ratio) if offload.device != "none" else frozenset()
    if not hosts_parameters(config):
        return asked
    return asked | {b.index for b in layout.buckets if precision.widths(b.dtype).master is None}


def stored_bytes(table: ShardTable, precision: Precision, config: Config, groups: Sequence[GroupState]) -> int:
    """Returns the bytes of a checkpoint over all ranks, without module buffers.

    ``table``: all parameters of the model. ``groups``: optimizer state of each parameter group.
    """
    total = factor_bytes(table.rows, groups, precision)
    for row in table:
        elements = prod(row.shape)
        if not row.trainable:
            total += elements * precision.frozen(row.name, row.dtype).itemsize
            continue
        widths = _widths(row, precision)
        master = widths.master.itemsize if widths.master else 0
        average = average_dtype(widths.master or widths.compute).itemsize if config.ema is not None else 0
        total += elements * (widths.compute.itemsize + master + average)
        total += groups[row.group].stored_bytes(elements, widths.moments.itemsize)
    return total


def reduces_each_microbatch(config: Config) -> bool:
    """Returns True if gradients are reduce-scattered after every microbatch; a rank then accumulates only its shard."""
    return config.zero_optimization.stage >= 2 and config.zero_optimization.reduce == "microbatch"


def shards_parameters(config: Config) -> bool:
    """Returns True if a rank stores only shards of parameters and gathers the full ones for each use (ZeRO 3)."""
    return config.zero_optimization.stage == 3 and (config.shards > 1 or hosts_parameters(config))


def gathers_once(config: Config) -> bool:
    """Returns True if all parameters are gathered once at the start of a step, instead of in each forward."""
    return config.uneven_microbatches and shards_parameters(config) and config.zero_optimization.gather == "step"


def meets_each_microbatch(config: Config) -> bool:
    """Returns True if data ranks gather parameters or reduce gradients in every microbatch of a step."""
    return reduces_each_microbatch(config) or (shards_parameters(config) and not gathers_once(config))


def hosts_parameters(config: Config) -> bool:
    """Returns True if parameter shards are in host memory while unused (ZeRO 3, ``offload_param``)."""
    return config.zero_optimization.stage == 3 and config.zero_optimization.offload_param.device != "none"


def wire_formats(config: Config, precision: Precision) -> WireFormats:
    """Returns the quantization formats of gradients and weights in messages between data ranks."""
    zero, ranks = config.zero_optimization, config.shards
    if ranks == 1:
        return WireFormats()
    node, axis = min(ranks, data_ranks_of_a_node(config)), config.grid(0).sharding
    block, found = zero.zero_quantized_block_size, WireFormats(ranks=ranks, within=node, axis=axis)
    if zero.zero_quantized_gradients:
        wire = BlockFormat(zero.zero_quantized_gradients_bits, block)
        found = replace(found, gradients=wire, feedback=zero.zero_gradient_error_feedback)
    if zero.zero_quantized_weights:
        found = replace(found, weights=BlockFormat(zero.zero_quantized_weights_bits, block))
        if zero.stage < 3:  # where there is no master, a gather would overwrite the weights that are updated
            kinds = ("float32", "bfloat16", "float16")
            masters = frozenset(kind for kind in kinds if precision.widths(kind).master is not None)
            found = replace(found, weight_dtypes=masters)
    return found


def pipeline_format(config: Config) -> ActivationFormat | None:
    """Returns the quantization format of messages between pipeline stages; None: tensors are sent unchanged."""
    wire = _number_format(config.wire.pipeline, config.wire.block_size)
    return ActivationFormat(wire) if wire is not None and config.pp > 1 else None


def tensor_format(config: Config) -> ActivationFormat | None:
    """Returns the quantization format of tensor-parallel collectives; None: tensors are sent unchanged."""
    wire = _number_format(config.wire.tensor, config.wire.block_size)
    return ActivationFormat(wire, ACTIVATIONS) if wire is not None and config.tp > 1 else None


def sequence_unit(config: Config) -> int:
    """Returns ``tp`` with sequence parallelism, else 1; each context rank's number of positions must be a multiple of
    it.
    """
    return config.tp if config.parallel.sequence_parallel else 1


def _number_format(name: str, block: int) -> NumberFormat | None:
    formats: dict[str, NumberFormat] = {
        "bf16": CastFormat(torch.bfloat16),
        "fp16": CastFormat(torch.float16),
        "int8": BlockFormat(8, block),
        "int4": BlockFormat(4, block),
    }
    return formats.get(name)


def data_ranks_of_a_node(config: Config) -> int:
    """Returns the number of ranks on one node that sum their gradients together (over data and context). Without
    ``parallel.gpus_per_node``, counts the whole grid as one node.
    """
    node, grid = config.parallel.gpus_per_node, config.grid(0)
    ranks = grid.size(grid.sums)
    return ranks if node is None else min(ranks, max(1, node // grid.stride(grid.sums)))


def ranks_with_secondary_shards(config: Config) -> int:
    """Returns the number of data ranks in a node that share secondary shards (hpZ of ZeRO++); 1 without secondary
    shards.
    """
    asked = config.zero_optimization.zero_hpz_partition_size
    found = data_ranks_of_a_node(config) if asked == "auto" else max(1, asked)
    return found if shards_parameters(config) and found < config.shards and config.shards % found == 0 else 1


def reduction_traffic(
    bucket: Bucket, grid: Grid, formats: WireFormats, itemsize: int, sharded: bool
) -> tuple[Traffic, ...]:
    """Returns this rank's traffic over data ranks for one gradient reduction of ``bucket``.

    ``sharded``: True for a reduce-scatter, False for an all-reduce. ``itemsize``: bytes of an element without
    quantization.
    """
    if sharded:
        return tuple(formats.reduction(bucket, itemsize))
    axis, size = bucket.spread.sums, bucket.elements * itemsize
    return (Traffic(axis, "gradients", 1, sent_bytes("all_reduce", size, grid.size(axis))),)


def replica_traffic(bucket: Bucket, grid: Grid, itemsize: int) -> Traffic:
    """Returns the traffic per step of the all-reduce of a bucket's gradient shard over dp_replicate.

    ``itemsize``: bytes of a gradient element.
    """
    axis, shard = bucket.spread.groups, bucket.elements // bucket.spread.ranks * itemsize
    return Traffic(axis, "gradients", 1, sent_bytes("all_reduce", shard, grid.size(axis)))


def gather_traffic(plan: GatherPlan, config: Config) -> Tally:
    """Returns a rank's traffic in a step for all-gathers of sharded parameters, and for control messages in which data
    ranks agree on these gathers.

    If data ranks call different modules, they send more control messages than counted here.
    """
    ranks, axis, rows = config.shards, config.grid(0).sharding, list[Traffic]()
    if ranks == 1:
        return Tally()
    for each, members in plan.axes.items():
        over = plan.over(each)
        moved = (
            times * sent_bytes("all_gather", size, members) for size, times in zip(plan.wire, over.times, strict=True)
        )
        if members > 1:
            rows.append(Traffic(each, "parameters", over.calls, sum(moved)))
    gathers = plan.gathers
    if gathers.calls_within:
        near = zip(plan.sizes, gathers.times_within, strict=True)
        sent = sum(times * sent_bytes("all_gather", size, plan.within.ranks) for size, times in near)
        rows.append(Traffic(axis, WITHIN, gathers.calls_within, sent))
    if not gathers_once(config):
        rounds = sum(walk.op is Op.FORWARD for walk in plan.passes)
        said = rounds * sent_bytes("all_gather", ranks * round_bytes(len(plan.sizes)), ranks)
        rows.append(Traffic(axis, ROUND, rounds, said))
    rows.append(Traffic(axis, "batch check", 1, sent_bytes("all_gather", ranks, ranks)))
    return Tally(rows)


def gradient_traffic(layout: FlatLayout, rows: tuple[ShardRow, ...], config: Config, precision: Precision) -> Tally:
    """Returns a rank's traffic per step for gradients (over dp, tp and pp) and for updated parameters (over dp).

    ``rows``: all parameters of the rank.
    """
    sharded, tally, grid = config.zero_optimization.stage > 0, Tally(), config.grid(0)
    formats = wire_formats(config, precision)
    for bucket in layout.buckets:
        widths, ranks = precision.widths(bucket.dtype), bucket.spread.ranks
        wire = (precision.wire or widths.sums).itemsize
        backwards = config.accumulation * max(1, len(bucket.stages))
        rounds = backwards if reduces_each_microbatch(config) and not bucket.partial else 1
        for hop in reduction_traffic(bucket, grid, formats, wire, sharded) if ranks > 1 else ():
            tally.add(replace(hop, calls=rounds, bytes=rounds * hop.bytes))
        if grid.size(bucket.spread.groups) > 1:
            tally.add(replica_traffic(bucket, grid, wire))
        if ranks > 1 and sharded and not shards_parameters(config):
            gathered = sent_bytes("all_gather", formats.gathered_bytes(bucket, widths.compute.itemsize), ranks)
            tally.add(Traffic(bucket.spread.sharding, "parameters", 1, gathered))
        if bucket.ties:
            summed = bucket.elements // (ranks if sharded else 1) * widths.sums.itemsize
            tally.add(Traffic("pp", "ties", 1, sent_bytes("all_reduce", summed, len(bucket.ties))))
    parts: dict[torch.dtype, int] = {}
    held = {slot.name: slot.stop - slot.start for bucket in layout.buckets for slot in bucket.slots}
    for row in rows:
        if row.partial and row.trainable:
            name = str(precision.parameter(row.name, row.dtype)).removeprefix("torch.")
            sums = precision.widths(name).sums
            parts[sums] = parts.get(sums, 0) + (held[row.name] if row.equal_on_tensor_ranks else row.elements)
    for sums, elements in parts.items():
        tally.add(Traffic("tp", LABEL, 1, sent_bytes("all_reduce", elements * sums.itemsize, config.tp)))
    return tally


def message_bytes(value: Value, form: ActivationFormat | None) -> int:
    """Returns the bytes of the traced tensor ``value``, or of its gradient, in a message between pipeline stages.

    ``form``: quantization format; None: no quantization.
    """
    elements = prod(value.shape)
    if form is None or not value.grad or not form.shortens(value.dtype, elements):
        return value.bytes
    return form.message_bytes(elements)


def feedback_bytes(stage: StagePlan, values: tuple[Value, ...], ranks: Sequence[int], config: Config) -> int:
    """Returns the bytes of error-feedback residuals for the gradients that ``stage`` sends; 0 without error feedback.

    ``values``: traced tensors. ``ranks``: pipeline rank of every stage.
    """
    form, here = pipeline_format(config), ranks[stage.stage]
    if form is None or not config.wire.error_feedback:
        return 0
    received = [values[number] for number, other in stage.receives.items() if ranks[other] != here]
    sizes = [(value, prod(value.shape)) for value in received if value.grad]
    return sum(4 * form.wire.padded(size) for value, size in sizes if form.shortens(value.dtype, size))


def stage_traffic(
    stage: StagePlan,
    values: tuple[Value, ...],
    ranks: Sequence[int],
    microbatches: int,
    form: ActivationFormat | None = None,
) -> Tally:
    """Returns a stage's traffic over pp in a step: activations to later stages, and gradients of received activations.

    ``values``: traced tensors. ``ranks``: pipeline rank of every stage. ``form``: quantization format; None: no
    quantization.
    """
    here = ranks[stage.stage]
    targets = [number for number, to in stage.sends.items() for other in to if ranks[other] != here]
    forward = [message_bytes(values[number], form) for number in targets]
    sources = [number for number, other in stage.receives.items() if values[number].grad and ranks[other] != here]
    backward = [message_bytes(values[number], form) for number in sources]
    tally = Tally()
    for flow, sizes in (("forward", forward), ("backward", backward)):
        if sizes:
            tally.add(Traffic("pp", flow, len(sizes) * microbatches, sum(sizes) * microbatches))
    return tally


def control_traffic(config: Config, world: int, experts: int = 0) -> Tally:
    """Returns a rank's control traffic per step, such as all-reduces of totals and checks that ranks have equal
    batches.

    ``world``: number of ranks. ``experts``: number of token counts among the totals, one per expert and layer.
    """
    tally, replica = Tally(), config.grid(0).size("replica")
    if world > 1:
        scalars = CONTROL_SCALARS + 2 * len(config.monitor.metrics) + experts
        tally.add(Traffic("world", "control", 1, sent_bytes("all_reduce", scalars * 8, world)))
        if config.zero_optimization.offload_optimizer.device == "nvme":
            tally.add(Traffic("world", "disk", 1, sent_bytes("all_reduce", 8, world)))
    if config.uneven_microbatches and config.row_ranks > 1:
        count = sent_bytes("all_gather", 16 * config.row_ranks, config.row_ranks)
        tally.add(Traffic(config.grid(0).rows, COUNTS, 1, count))
    if (sharing := config.parallel.expert) > 1:
        tally.add(Traffic("ep", "batch check", 1, sent_bytes("all_reduce", 8, sharing)))
    if replica > 1:
        tally.add(Traffic("replica", "batch check", 1, sent_bytes("all_gather", 8 * replica, replica)))
    return tally


def frozen_bytes(row: ShardRow, holder: ShardHolder, precision: Precision) -> int:
    """Returns the bytes of the frozen parameter ``row``, which is in no bucket, on the rank at position ``holder``."""
    quantized = row.quantized_shape(holder)
    if quantized is not None:
        return quantized.bytes
    return row.local_elements(holder) * precision.frozen(row.name, row.dtype).itemsize
