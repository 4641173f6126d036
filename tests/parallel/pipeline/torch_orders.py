"""Orders of the schedules of ``torch.distributed.pipelining``, without stages, and the files that it writes of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.distributed.pipelining import schedules

from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule

CLASSES: Mapping[str, str] = MappingProxyType({
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS", "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
})  # fmt: skip
OPS = MappingProxyType({
    "FORWARD": Op.FORWARD, "FULL_BACKWARD": Op.BACKWARD, "BACKWARD_INPUT": Op.BACKWARD_INPUT,
    "BACKWARD_WEIGHT": Op.BACKWARD_WEIGHT,
})  # fmt: skip


def torch_rows(kind: str, ranks: int, microbatches: int, virtual_stages: int) -> list[list[Any]]:
    """Rows of torch's own actions; None in a row is a pause. Only what the rule of the rows reads is there."""
    made: Any = object.__new__(getattr(schedules, CLASSES[kind]))
    made.pp_group_size, made._n_microbatches, made.n_local_stages = ranks, microbatches, virtual_stages
    made._num_stages = made.num_stages = ranks * virtual_stages
    made._stages = [None] * virtual_stages
    made.number_of_rounds = max(1, microbatches // ranks)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    return [made._calculate_single_rank_operations(rank) for rank in range(ranks)]


def torch_allows(kind: str, ranks: int, microbatches: int) -> bool:
    """Whether torch has an order for these sizes."""
    if kind == "dualpipe-v":
        return microbatches >= 2 * ranks
    return kind not in ("interleaved", "zb-h1") or microbatches % max(1, microbatches // ranks) == 0


def torch_order(kind: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Torch's order of a kind; overlapped pairs run one after the other."""
    rows = []
    for row in torch_rows(kind, ranks, microbatches, virtual_stages):
        parts = [part for action in row if action is not None for part in action.sub_actions or (action,)]
        rows.append(tuple(Action(OPS[p.computation_type.name], p.stage_index, p.microbatch_index) for p in parts))
    held = tuple(tuple(sorted({action.stage for action in row})) for row in rows)
    return Schedule(kind, ranks * virtual_stages, microbatches, tuple(rows), held)


def torch_file(rows: list[list[Any]]) -> str:
    """The file that torch writes of these rows."""
    return "".join(",".join("" if action is None else str(action) for action in row) + "\n" for row in rows)


def lowered(rows: list[list[Any]], microbatches: int, messages: bool = True) -> list[list[Any]]:
    """The rows with gathers, reductions and messages, as torch's runtime adds them."""
    stages = {
        part.stage_index: rank
        for rank, row in enumerate(rows)
        for action in row
        if action is not None
        for part in action.sub_actions or (action,)
    }
    made: dict[int, list[Any]] = {}
    for rank, row in enumerate(rows):
        gathered: list[Any] = [*schedules._add_unshard_reshard(row)]
        made[rank] = schedules._add_reduce_grad(gathered, microbatches)
    if messages:
        made = {**schedules._add_send_recv(made, stages.__getitem__, len(stages))}
    return [made[rank] for rank in range(len(rows))]
