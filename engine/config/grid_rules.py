"""Rules between configuration keys of the grid: sizes of axes, plans, wire formats and nodes."""

from engine.config.rules import Problems
from engine.config.sections import IntegrityConfig, ParallelConfig, WireConfig, ZeroConfig
from engine.config.wording import shown_value
from engine.parallel.data_digits import expert_problem
from engine.parallel.grid import Grid
from engine.parallel.pipeline.schedule.kinds import training_schedule
from engine.parallel.tensor.plan.styles import parse_style, read_setting


def check_parallel(parallel: ParallelConfig, problems: Problems) -> None:
    """Adds a problem for each key of section ``parallel`` that contradicts another key of the section."""
    automatic = [axis for axis in ("data", "tensor", "pipeline", "context") if getattr(parallel, axis) == "auto"]
    if len(automatic) > 1:
        named = " and ".join(automatic)
        problems.add(
            "parallel",
            f'{named} are "auto" (the default of data), but only one axis may be; give the others a number.',
        )
    if parallel.schedule_costs is not None and parallel.schedule not in ("zb-h1", "zb-v"):
        problems.add(
            "parallel.schedule_costs",
            f"given for schedule {shown_value(parallel.schedule)}, which does not depend on costs; leave "
            'schedule_costs out, or set schedule to "zb-h1" or "zb-v".',
        )
    if parallel.sequence_parallel_regather and not parallel.sequence_parallel:
        problems.add(
            "parallel.sequence_parallel_regather",
            "true without sequence_parallel: only sequence parallelism gathers activations again; set "
            "sequence_parallel to true, or leave sequence_parallel_regather out.",
        )


def check_nodes(parallel: ParallelConfig, zero: ZeroConfig, problems: Problems) -> None:
    """Adds problems if data ranks do not divide evenly into nodes, shard groups or expert groups."""
    asked, ranks, shared = zero.zero_hpz_partition_size, parallel.data, zero.shard_size
    fits = shared is None or (isinstance(ranks, int) and ranks % shared == 0)
    if fits and isinstance(ranks, int) and isinstance(parallel.context, int):
        problem = expert_problem(parallel.expert, ranks, parallel.context, shared)
        if problem is not None:
            problems.add("parallel.expert", f"{parallel.expert} {problem}.")
    if shared is not None and isinstance(ranks, int) and ranks % shared:
        problems.add(
            "zero_optimization.shard_size",
            f"{shared} does not divide the {ranks} data ranks, which form shard groups of that size; give a divisor "
            f"of {ranks}, or leave shard_size out.",
        )
    elif shared is not None and isinstance(asked, int) and asked > 1 and shared % asked:
        problems.add(
            "zero_optimization.zero_hpz_partition_size",
            f"{asked} does not divide the {shared} data ranks of a shard group (zero_optimization.shard_size); give a "
            f"divisor of {shared}, or leave zero_hpz_partition_size out.",
        )
    elif isinstance(asked, int) and isinstance(ranks, int) and asked > 1 and ranks > 1 and ranks % asked:
        problems.add(
            "zero_optimization.zero_hpz_partition_size",
            f"{asked} does not divide the {ranks} data ranks, and every node needs the same number of data ranks; "
            f"give a divisor of {ranks}, or leave zero_hpz_partition_size out.",
        )
    _check_node_sums(parallel, zero, problems)


def _check_node_sums(parallel: ParallelConfig, zero: ZeroConfig, problems: Problems) -> None:
    node, tensor, data, pipeline = parallel.gpus_per_node, parallel.tensor, parallel.data, parallel.pipeline
    if not zero.zero_quantized_gradients or node is None:
        return
    if not isinstance(data, int) or not isinstance(tensor, int) or not isinstance(pipeline, int):
        return
    grid = Grid(pp=pipeline, dp=data, tp=tensor, order=parallel.order)
    shards = min(data, zero.shard_size or data)
    between, outermost = grid.stride("dp"), grid.stride("dp") * shards == grid.world_size
    # a shard group spans `copies` consecutive ranks; `inside` of its data ranks are on one node
    copies, inside = shards * between, max(1, node // between)
    # nodes contain whole shard groups, or all ranks are on one node
    fits = copies <= node and (node % copies == 0 or outermost)
    # or every node contains the same number of a group's data ranks, at a stride that divides nodes evenly
    if not (fits or (shards % inside == 0 and (node % between == 0 or between % node == 0))):
        problems.add(
            "parallel.gpus_per_node",
            f"{node} does not divide {shards} data x {tensor} tensor ranks, and quantized gradients are summed within "
            "nodes first; give a number that does, or leave gpus_per_node out, which sums them in one step.",
        )


def check_wire(wire: WireConfig, parallel: ParallelConfig, integrity: IntegrityConfig, problems: Problems) -> None:
    """Adds a problem for each setting of ``wire`` (compression of messages) that has no effect, or that contradicts
    another setting.
    """
    blocks = {"int8", "int4"} & {wire.pipeline, wire.tensor}
    if wire.block_size != 256 and not blocks:
        problems.add(
            "wire.block_size",
            f"{wire.block_size} without int8 or int4, so no block has a scale; set wire.pipeline or wire.tensor to "
            '"int8", or leave block_size out.',
        )
    if wire.error_feedback and wire.pipeline == "exact":
        problems.add(
            "wire.error_feedback",
            f"true with pipeline {shown_value(wire.pipeline)}: only rounded messages have an error to add to the next "
            'ones; set wire.pipeline to "int8" or another format, or leave error_feedback out.',
        )
    if wire.error_feedback and integrity.rerun:
        problems.add(
            "wire.error_feedback",
            "true with integrity.rerun: the second run of a step would add the rounding error of the first; set one "
            "of them to false.",
        )
    if wire.tensor != "exact" and parallel.overlap in ("chunks", "fused"):
        problems.add(
            "wire.tensor",
            f"{shown_value(wire.tensor)} with parallel.overlap {shown_value(parallel.overlap)}, which sends rows as "
            'they are computed, not whole blocks; set parallel.overlap to "auto" or "off", or leave wire.tensor out.',
        )


def check_plans(parallel: ParallelConfig, microbatches: int | None) -> None:
    """Raises an error if the pipeline schedule or the tensor plan is invalid for every model.

    ``microbatches`` is the number per step. The schedule is not checked if ``microbatches`` is None,
    ``parallel.pipeline`` is "auto", or several pipeline ranks have the schedule "auto".

    Raises:
        ConfigError, PlanError, ScheduleError: the errors of :func:`engine.initialize`.
    """
    kind, ranks = parallel.schedule, parallel.pipeline
    if isinstance(ranks, int) and microbatches is not None and (kind != "auto" or ranks == 1):
        training_schedule(kind, ranks, microbatches, parallel.virtual_stages)
    if parallel.tensor != 1 and parallel.tensor_plan != "auto":
        for style in read_setting(parallel.tensor_plan)[1].values():
            parse_style(style)
