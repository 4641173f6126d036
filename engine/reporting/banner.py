"""Banner that describes a plan before the run, and comparison of planned and measured traffic."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from engine.config import Config
from engine.config.sections import CheckpointConfig, IntegrityConfig
from engine.kernels.codecs.block_codec import BlockFormat, NumberFormat
from engine.kernels.device import compiles_triton
from engine.kernels.overlap import OverlapChoices
from engine.parallel.comm.traffic import Tally, megabytes
from engine.parallel.kernel_injection.inject import describe_replacements as replaced
from engine.parallel.model.name_patterns import starred
from engine.parallel.pipeline.report.text import draw
from engine.parallel.pipeline.schedule.simulate import peak_live, simulate
from engine.parallel.tensor.collectives import LOGITS
from engine.parallel.tensor.plan.tensor_plan import Reason
from engine.parallel.tensor.tp_axis import Overlap
from engine.planning.budgets import (
    GatherPlan,
    RankPlan,
    hosts_parameters,
    pipeline_format,
    reduces_each_microbatch,
    tensor_format,
    wire_formats,
)
from engine.planning.fused_layers import fused_layers
from engine.planning.plan import Plan
from engine.precision.dtypes import Precision
from engine.precision.loss_scaler import make_loss_scale


def banner_text(plan: Plan, device: str, measured: OverlapChoices | None = None) -> str:
    """Returns the startup banner, with one line for each topic, such as grid of ranks, batch and precision.

    The lines about bytes of state and bytes sent describe rank 0.

    Args:
        plan: plan of the run; its notes become the last lines.
        device: device of the parameters, such as "cuda:0".
        measured: measurements of fused communication kernels on ``device``, or None.
    """
    config, rank = plan.config, plan.rank(0)
    clip, weight = config.gradient_clipping, "as its rows" if config.uneven_microbatches else "1"
    lines = {
        "grid": f"{plan.grid(0)}, on {device}",
        "model": _model_line(plan),
        "batch": f"{config.train_batch_size} rows = {config.micro} micro x {config.accumulation} accumulation "
        f"x {config.row_ranks} data",
        "precision": _precision_line(plan),
        "zero": _zero_line(plan),
        **_fewer_bits_line(plan),
        **_wire_line(plan),
        **_tensor_lines(plan),
        **_overlap_line(plan, device, measured),
        **_pipeline_lines(plan),
        **_kernel_lines(plan),
        "state": _state_line(plan, rank),
        **_expert_line(plan),
        **_offload_line(plan, rank),
        "sends": _traffic_line(rank),
        "optimizer": _optimizer_line(plan),
        "clipping": f"one norm over the grid, clipped at {clip:g}" if clip else "off, the norm is reported",
        **_outer_line(config),
        "loss": f"sum / weight over all microbatches and data ranks; a 0-dim loss weighs {weight}",
        "seed": str(config.seed),
        **_integrity_lines(config.integrity),
        **_checkpoint_lines(config.checkpoint),
        **_copies_line(plan),
    }
    text = [f"  {name:<10} {line}" for name, line in lines.items()]
    return "\n".join(["trine", *text, *(f"  note       {note}" for note in plan.notes)])


def _integrity_lines(integrity: IntegrityConfig) -> dict[str, str]:
    if not integrity.every:
        return {}
    again = ", where a step is run twice" * integrity.rerun
    words = {"raise": "raises", "warn": "is logged"}[integrity.on_failure]
    return {"integrity": f"digests in every step, read every {integrity.every}{again}; corruption {words}"}


def _checkpoint_lines(checkpoint: CheckpointConfig) -> dict[str, str]:
    lines = {}
    if checkpoint.init_from is not None:
        lines["weights"] = f"from {checkpoint.init_from}"
    if checkpoint.folder is not None:
        every = f"every {checkpoint.every} steps" if checkpoint.every else "when asked"
        lines["saves"] = f"{every} into {checkpoint.folder}, the newest {checkpoint.keep} are kept"
    return lines


def _copies_line(plan: Plan) -> dict[str, str]:
    """Returns the line of checkpoints in memory: the average bytes that a rank sends and that its host stores for
    it."""
    every = plan.config.checkpoint.memory_every
    share = plan.stored_bytes // plan.grid(0).world_size
    held = f"{megabytes(2 * share)} a rank in /dev/shm, doubled while they are replaced"
    return (
        {"copies": f"every {every} steps in the memory of two hosts: {megabytes(share)} sent, {held}"} if every else {}
    )


def compare_traffic(plan: Plan, measured: Tally, rank: int, steps: int) -> str:
    """Returns a text table of planned and measured bytes and calls that ``rank`` sends per training step.

    Each row is for one axis, such as "dp", and one label, such as "gradients". Returns "" without traffic.

    Args:
        plan: plan of the run.
        measured: traffic that ``rank`` has sent in ``steps`` training steps; the table has the mean.
        rank: global rank.
    """
    planned = {(row.axis, row.label): row for row in plan.rank(rank).traffic}
    lines = list[str]()
    for row in measured.rows():
        plan_row = planned.pop((row.axis, row.label), None)
        expected = _amount(plan_row.bytes, plan_row.calls) if plan_row else "-"
        lines.append(_row(row.axis, row.label, expected, _amount(row.bytes / steps, row.calls / steps)))
    lines += [_row(row.axis, row.label, _amount(row.bytes, row.calls), "0") for row in planned.values()]
    head = (f"bytes sent by rank {rank} per step, over {steps} steps", _row("axis", "what", "planned", "measured"))
    return "\n".join([*head, *lines]) if lines else ""


def _row(axis: str, label: str, planned: str, measured: str) -> str:
    return f"  {axis:<7} {label:<20} {planned:>26} {measured:>26}"


def _amount(count: float, calls: float) -> str:
    return f"{count:,.0f} in {calls:g} call{'s' * (calls != 1)}"


def _model_line(plan: Plan) -> str:
    frozen = sum(row.elements for row in plan.table if not row.trainable)
    tied = sum(1 for row in plan.table if row.aliases)
    extras = [f"{frozen:,} frozen"] * bool(frozen) + [f"{tied} tied"] * bool(tied)
    return f"{plan.table.elements:,} parameters{''.join(', ' + extra for extra in extras)}"


def _precision_line(plan: Plan) -> str:
    config, precision = plan.config, plan.precision
    extra = _kept_words(precision) if precision.compute is not None else ""
    exact = config.communication_data_type or ("fp32" if precision.master else "bf16")
    formats = wire_formats(config, precision)
    wire = f"{extra}; gradients are sent in {formats.gradients.word if formats.gradients else exact}"
    if precision.autocast is not None:
        return f"fp32, forwards in torch.autocast ({str(precision.autocast).removeprefix('torch.')}){wire}"
    if precision.compute is None:
        half = any(row.trainable and row.dtype.itemsize < 4 for row in plan.table)
        return f"{'as given, fp32 masters of 16-bit parameters' if half else 'fp32, no second copy'}{wire}"
    if not precision.master:
        moments = "bf16" if precision.narrow_moments else "fp32"
        return f"bf16 without a master, moments in {moments}, updates rounded stochastically{wire}"
    if config.bf16.enabled:
        return f"bf16 with fp32 master and accumulation{wire}"
    scale = make_loss_scale(config.fp16)
    return f"fp16 with fp32 master and accumulation, loss scale {scale.value:g}{', dynamic' * scale.dynamic}{wire}"


def _kept_words(precision: Precision) -> str:
    """Returns words about the modules and tensors that stay in fp32."""
    kept, marked = len(precision.kept.modules), len(precision.kept.marked)
    modules = f", {kept} module{'s' * (kept != 1)} in fp32" * bool(kept)
    tensors = f", {marked} tensor{'s' * (marked != 1)} in fp32 as the model marks" * bool(marked)
    return modules + tensors


def _zero_line(plan: Plan) -> str:
    stage, layout = plan.config.zero_optimization.stage, plan.layout(plan.grid(0).coord())
    if plan.config.row_ranks * plan.config.cp == 1 and not hosts_parameters(plan.config):
        return f"stage {stage}: one data rank, so nothing is sharded or sent"
    if (gathers := plan.gathers(plan.grid(0).coord())) is not None:
        return _gathers_line(plan, gathers) + _groups_words(plan.config)
    what = "gradients reduce-scattered, parameters gathered" if stage else "gradients all-reduced"
    sent = f"stage {stage}: {what} in {len(layout.buckets)} bucket{'s' * (len(layout.buckets) != 1)} during backward"
    return sent + _groups_words(plan.config)


def _groups_words(config: Config) -> str:
    """Returns words about shard groups, if there are several."""
    groups = config.row_ranks * config.cp // config.shards
    ranks = f"{config.shards} data{' and context' * (config.cp > 1)} ranks"
    words = f"; {groups} shard groups of {ranks}, which sum their shards once a step"
    return words if groups > 1 else ""


def _fewer_bits_line(plan: Plan) -> dict[str, str]:
    """Returns the line about formats with fewer bits between data ranks."""
    formats = wire_formats(plan.config, plan.precision)
    words = []
    if formats.weights is not None:
        words.append(f"weights are gathered in {formats.weights.word}")
    if formats.gradients is not None:
        hops = ", within nodes and then across" * (len(formats.hops) > 1)
        kept = ", with error feedback" * formats.feedback
        words.append(f"gradients are reduced in {formats.gradients.word}{hops}{kept}")
    block = plan.config.zero_optimization.zero_quantized_block_size
    return {"fewer bits": f"{'; '.join(words)}; an fp32 scale for {block} elements"} if words else {}


def _wire_line(plan: Plan) -> dict[str, str]:
    """Returns the line about rounded messages of stages and tensor ranks, with the bounds of their errors."""
    stages, tensor, words = pipeline_format(plan.config), tensor_format(plan.config), list[str]()
    if stages is not None:
        kept = ", with error feedback" * plan.config.wire.error_feedback
        words.append(f"stages send activations and gradients in {stages.wire.word}{kept}")
        words.append(f"an element errs by up to {_rounding(stages.wire)}")
    if tensor is not None:
        words.append(f"tensor ranks sum and gather activations and gradients in {tensor.wire.word}")
        words.append(f"a sum errs by up to {_rounding(tensor.wire)} for each rank and once more")
    return {"wire": "; ".join(words)} if words else {}


def _rounding(wire: NumberFormat) -> str:
    if isinstance(wire, BlockFormat):
        return f"half a scale (max |block| / {wire.largest} of {wire.block} elements)"
    return f"half a unit in the last place of {wire.word}"


def _gathers_line(plan: Plan, gathers: GatherPlan) -> str:
    order, sizes = gathers.order, gathers.sizes
    whole = [sum(sizes[index] for index in members) for members in order.members]
    peak = max(map(sum, zip(whole, [*whole[1:], 0], strict=True)))
    kept = sum(sizes[index] for index in gathers.pinned)
    calls, near = gathers.gathers.calls, gathers.gathers.calls_within
    inside = f", and {near} times from the other {gathers.within.ranks - 1} ranks of a node" * bool(near)
    over = f" and {megabytes(kept)} over the step" * bool(kept)
    reduced = "microbatch" if reduces_each_microbatch(plan.config) else "step"
    gathered = "come from host memory" if hosts_parameters(plan.config) else "gathered"
    return (
        f"stage 3: parameters {gathered} in {len(order.turns)} groups, {calls} times a step{inside}, at most "
        f"{megabytes(peak)} full at a time{over}; gradients reduce-scattered every {reduced}"
    )


def _tensor_lines(plan: Plan) -> dict[str, str]:
    if plan.tensor is None:
        return {}
    kinds = [cut.kind for cut in plan.tensor.layers.values()]
    counts = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
    shown = len(plan.tensor.shown)
    counts += [f"{shown} parameter{'s' * (shown > 1)} through views"] * bool(shown)
    gathers = any(row.label == LOGITS for tally in plan.tensor_traffic.values() for row in tally.rows())
    extra = "; the loss gathers the logits" if gathers else ""
    whole = sum(row.elements * row.dtype.itemsize for row in plan.table if row.name not in plan.tensor.parameters)
    lines = [
        f"{plan.config.tp} ranks shard the layers ({', '.join(counts) or 'no layer is sharded'}{extra}), "
        f"{megabytes(whole)} are replicated on every rank; plan: {plan.tensor.source}"
    ]
    if any(reason.how in ("view", "replicate") for reason in plan.tensor.reasons):
        lines += reasons_table(plan.tensor.reasons).splitlines()
    return {"tensor": _INDENT.join(lines)}


def _expert_line(plan: Plan) -> dict[str, str]:
    """Returns the line about experts that data ranks share."""
    if (shared := plan.shared_experts) is None:
        return {}
    kinds: dict[tuple[str, int], list[str]] = {}
    for each in shared.shared:
        kinds.setdefault((starred(each.name), each.experts), []).append(each.name)
    words = []
    for (pattern, experts), names in kinds.items():
        least, more = divmod(experts, shared.ranks)
        first = f"the first {more} ranks" if more > 1 else "the first rank"
        held = f"{least + 1} on {first} and {least} on others" if more else f"{least} on a rank"
        where = pattern if len(names) > 1 else names[0]
        words.append(f"{experts} of {where} ({len(names)} module{'s' * (len(names) > 1)}), {held}")
    asked = "; blocks with lists of experts run twice" * bool(shared.listed)
    form = f"{_INDENT}{shared.form}" if shared.form else ""
    return {"experts": f"{shared.ranks} data ranks share {', '.join(words)}; tokens are sent to them{asked}{form}"}


def _overlap_line(plan: Plan, device: str, measured: OverlapChoices | None) -> dict[str, str]:
    """Returns the line about overlap of tensor ranks' products with communication."""
    if plan.tensor is None:
        return {}
    wanted, rows = plan.config.parallel.overlap, "column inputs and row outputs"
    least, most = megabytes(Overlap().bytes), megabytes(plan.config.parallel.overlap_buffer_bytes)
    behind = "input gradients are summed while weight gradients are computed"
    if wanted == "off":
        return {"overlap": "off: computation waits for every collective"}
    if wanted == "fused":
        what = rows if plan.tensor.sequence else "row outputs"
        return {"overlap": f"fused for {what} of at most {most} between two ranks; collectives for the rest"}
    if wanted == "chunks":
        return {"overlap": f"chunks for {rows}; collectives for the rest" if plan.tensor.sequence else behind}
    if tensor_format(plan.config) is not None and not device.startswith("cpu"):
        return {"overlap": f"collectives for {rows}, because encoded blocks are not split; from {least} on {behind}"}
    fused = fused_layers(plan, measured)
    words = [f"fused for {', '.join(fused)}"] * bool(fused)
    if device.startswith("cpu"):
        words.append(f"collectives for {'the rest' if fused else 'everything, on CPUs'}")
    elif plan.tensor.sequence:
        words += [f"chunks of at least {least} for {'other ' * bool(fused)}{rows}", "collectives for the rest"]
    else:
        words.append(f"collectives for {'the rest' if fused else 'row outputs'}; from {least} on {behind}")
    return {"overlap": "; ".join(words)}


def reasons_table(reasons: Sequence[Reason]) -> str:
    """Returns a text table that explains a tensor-parallel plan, one line per group of layers.

    A line has a name pattern with its sharding style (such as "column"), a method of execution (such as "local"), the
    reason, and the MB that stay replicated.
    """
    hows = [reason.how for reason in reasons]
    counts = ", ".join(f"{hows.count(how)} {how}" for how in dict.fromkeys(hows))
    cells = [
        (f"{r.pattern}: {r.style}".rstrip(": "), r.how, f"{r.why}{f'; {megabytes(r.bytes)}' if r.bytes else ''}")
        for r in reasons
    ]
    widths = [max((len(row[column]) for row in cells), default=0) for column in (0, 1)]
    rows = [f"{what:<{widths[0]}}  {how:<{widths[1]}}  {why}" for what, how, why in cells]
    return "\n".join([f"groups of layers: {counts}", *rows])


def _kernel_lines(plan: Plan) -> dict[str, str]:
    lines = list[str]()
    if plan.config.compile:
        eager = plan.config.kernels == "auto"  # as measured on an H200; docs/guides/kernels.md has the figures
        lines += [f"blocks run under torch.compile{'; without it, steps were faster on an H200' * eager}"]
    if plan.replacements:
        lines += [f"{plan.config.kernels!r}, in these modules of the model:", *replaced(plan.replacements)]
    return {"kernels": _INDENT.join(lines)} if lines else {}


def _pipeline_lines(plan: Plan) -> dict[str, str]:
    if plan.partition is None or plan.trace is None:
        return {}
    count, ranks = plan.schedule.stages, plan.schedule.rank_of_stage
    measure = "measured seconds" if plan.config.parallel.balance == "time" else "FLOPs"
    lines = [f"{count} stages, {f'balanced by {measure}' if plan.config.parallel.split == 'auto' else 'as given'}"]
    total = sum(call.flops for call in plan.trace.calls) or 1
    for stage, part in enumerate(plan.partition.stages):
        calls = [plan.trace.calls[index] for index in sorted(part.calls)]
        held = sum(row.elements for row in plan.table if row.name in part.parameters)
        where = f" on rank {ranks[stage]}" if count > plan.config.pp else ""
        share = sum(call.flops for call in calls) / total
        lines.append(
            f"stage {stage}{where}: {calls[0].unit} .. {calls[-1].unit}, {held:,} parameters, {share:.0%} of the FLOPs,"
            f" receives {len(part.receives)} value{'s' * (len(part.receives) != 1)} a microbatch"
        )
    timeline = simulate(plan.schedule)
    picture = draw(timeline, 107).splitlines()
    what = "microbatches" if count == plan.config.pp else "microbatches of one stage"
    idle = f"{timeline.bubble:.0%} idle, ranks hold up to {', '.join(map(str, peak_live(plan.schedule)))} {what}"
    chosen = plan.decision.lines() if plan.decision else ()
    drawn = [f"{picture[0]}, {idle}", *chosen, *picture[1:]]
    return {"pipeline": _INDENT.join(lines), "schedule": _INDENT.join(drawn)}


_INDENT = "\n" + 13 * " "


def _state_line(plan: Plan, rank: RankPlan) -> str:
    parts = ", ".join(f"{kind} {megabytes(count)}" for kind, count in rank.state_bytes.items() if count)
    unknown = "" if plan.moments is not None else ", optimizer state unknown"
    return f"{megabytes(sum(rank.state_bytes.values()))} a rank ({parts}{unknown})"


def _offload_line(plan: Plan, rank: RankPlan) -> dict[str, str]:
    """Returns the line about state that the host stores and updates, with its fraction of the elements."""
    offload = plan.config.zero_optimization.offload_optimizer
    if offload.device == "none" and not hosts_parameters(plan.config):
        return {}
    layout, hosted = plan.layout(rank.coord), plan.hosted(rank.coord)
    elements = sum(bucket.elements for bucket in layout.buckets if bucket.index in hosted)
    share = elements / layout.elements if layout.elements else 0.0
    parts = ", ".join(f"{kind} {megabytes(count)}" for kind, count in rank.host_bytes.items())
    disk = f", {megabytes(rank.disk_bytes)} on disk in {offload.nvme_path}" * (offload.device == "nvme")
    if offload.memory_limit is not None:
        disk += f"; no smaller part keeps a rank within {offload.memory_limit:g} GiB of state"
    return {
        "offload": f"{len(hosted)} of {len(layout.buckets)} buckets, {share:.1%} of the elements, updated by the host: "
        f"{megabytes(sum(rank.host_bytes.values()))} of its memory a rank ({parts}){disk}"
    }


def _traffic_line(rank: RankPlan) -> str:
    if not rank.traffic:
        return "nothing: one rank"
    by_axis: dict[str, int] = {}
    for row in rank.traffic:
        by_axis[row.axis] = by_axis.get(row.axis, 0) + row.bytes
    parts = ", ".join(f"{axis} {megabytes(count)}" for axis, count in by_axis.items())
    return f"{megabytes(sum(by_axis.values()))} a rank and step ({parts})"


def _optimizer_line(plan: Plan) -> str:
    optimizer, scheduler = plan.config.optimizer, plan.config.scheduler
    kind = _optimizer_words(plan.config) if optimizer and plan.moments is not None else "given in code"
    unknown = {"": "constant lr", None: "constant lr or given in code"}
    schedule = scheduler.type if scheduler else plan.own_schedule or unknown[plan.own_schedule]
    return f"{kind}, {len(plan.groups)} group{'s' * (len(plan.groups) > 1)}, {schedule}"


def _outer_line(config: Config) -> dict[str, str]:
    """Returns the line of the outer loop: this site, the rule, and the values that sites push."""
    if (outer := config.outer) is None:
        return {}
    chosen = outer.store_optimizer(config.optimizer)
    rate = f"{chosen.type} lr {chosen.params['lr']:g}"
    forms = {
        "sums": "gradients are summed over the sites at every step, and each site updates: synchronous training",
        "gradients": f"gradients at every step, {rate} on the store, no optimizer state here",
        "deltas": f"differences of weights every {outer.steps} steps, {outer.wire}, {rate} on the store",
    }
    parts = f" in {outer.fragments} fragments" * (outer.fragments > 1)
    parts += f", {outer.delay} steps late" * bool(outer.delay)
    form = forms[outer.content] if outer.rule != "hogwild" else f"updates in shared memory, {outer.folder}"
    return {"outer": f"site {outer.site}, rule {outer.rule}: {form}{parts}"}


def _optimizer_words(config: Config) -> str:
    """Returns the configured optimizers with their rates; one that the configuration does not name is a default."""
    entries = config.optimizer.entries if config.optimizer is not None else ()
    words = " + ".join(dict.fromkeys(f"{entry.type} lr {entry.params['lr']:g}" for entry in entries))
    default = bool(config.written) and "optimizer" not in config.written
    return words + " (the default, since the configuration names no optimizer)" * default


logger = logging.getLogger("trine")


@contextmanager
def say_what_compiles(device: torch.device, rank: int) -> Iterator[None]:
    """Returns a context manager that logs on rank 0 the Triton kernels compiled inside, and their total seconds."""
    knobs = _compilation_knobs() if rank == 0 and compiles_triton(device) else None
    if knobs is None:
        yield
        return
    kernels, found, microseconds, before = Counter[str](), 0, 0, knobs.listener

    def listen(**call: Any) -> None:
        nonlocal found, microseconds
        if before is not None:
            before(**call)
        if call["cache_hit"]:
            found += 1
        else:
            kernels[str(call["metadata"]["name"])] += 1
            microseconds += call["times"].total

    knobs.listener = listen
    try:
        yield
    finally:
        knobs.listener = before
        if kernels:
            names = ", ".join(f"{name} {count}x" for name, count in sorted(kernels.items()))
            told = "Triton compiled %d kernels in %.1f s and found %d in its cache, which the next start reads: %s"
            logger.info(told, kernels.total(), microseconds / 1e6, found, names)


def _compilation_knobs() -> Any:
    """Returns Triton's settings of compilation; None without Triton."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation
