"""Runs the microbatches of a step, and holds back what goes wrong until all ranks can hear of it."""

from engine.build import Parts
from engine.outputs import Carrier
from engine.parallel.pipeline.executor import Row
from engine.step import Step
from engine.work import Work


def play(parts: Parts, carrier: Carrier, step: Step, work: Work, row: Row) -> None:
    """Look at all microbatches, then run them; an error waits in ``step`` until all ranks meet, if they can.

    In a look nothing is sent, and what is wrong is wrong on the whole replica. In the middle of a pipeline or
    between tensor ranks the others wait for what this rank will never send, so an error goes out at once.
    """
    try:
        if step.problem is None:
            work.look()
    except Exception as problem:
        step.problem = problem
    if step.problem is not None:
        return
    try:
        with parts.bench.passes(row.actions):
            parts.executor.run(row, work)
            work.bring_outputs(carrier)
    except Exception as problem:
        if carrier.comm.grid.size("replica") > 1 or parts.bench.gathering is not None:
            raise
        step.problem = problem
