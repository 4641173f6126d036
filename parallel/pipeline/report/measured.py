"""Measured timeline of a step: the spans of all ranks on one time axis, comparable with the predicted timeline."""

import time

import torch

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.pipeline.runtime.executor import Executor
from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule
from engine.parallel.pipeline.schedule.simulate import Span, StepTimeline

LABEL = "timeline"
_OPS = tuple(Op)


def measured_timeline(schedule: Schedule, executor: Executor, comm: Comm, device: torch.device) -> StepTimeline:
    """Gathers start and end of every action of all pipeline ranks in the last step of ``executor``.

    Times are seconds from the start of the first action. Communicates over axis pp, label "timeline".

    Raises:
        EngineError: the last run on this rank was not a training step.
    """
    rows = schedule.per_rank
    if [span.action for span in executor.spans] != list(rows[comm.grid.coord().pp]):
        raise EngineError("timeline() reads the last step, which was no train_batch; call eng.train_batch first.")
    comm.all_reduce(torch.zeros(1, device=device), "pp", LABEL).wait()
    now = time.perf_counter()
    longest = max(map(len, rows))
    own = torch.zeros(longest, 5, dtype=torch.float64)
    for index, (action, start, end) in enumerate(executor.spans):
        place = _OPS.index(action.op), action.stage, action.microbatch
        own[index] = torch.tensor([*place, start - now, end - now], dtype=torch.float64)
    full = torch.zeros(len(rows) * longest * 5, dtype=torch.float64, device=device)
    here = slice(comm.grid.coord().pp * longest * 5, (comm.grid.coord().pp + 1) * longest * 5)
    full[here] = own.view(-1).to(device)
    comm.all_gather(full, full[here].clone(), "pp", LABEL).wait()
    first = float(full.view(len(rows), longest, 5)[:, 0, 3].min())
    table = full.view(len(rows), longest, 5).tolist()
    return StepTimeline(
        schedule,
        tuple(
            tuple(
                Span(Action(_OPS[int(op)], int(stage), int(microbatch)), start - first, end - first)
                for op, stage, microbatch, start, end in line[: len(row)]
            )
            for line, row in zip(table, rows, strict=True)
        ),
    )
