"""DualPipeV: two directions of work on each rank, so that compute of one overlaps with messages of the other."""

from collections import deque
from collections.abc import Iterator

from engine.parallel.pipeline.schedule.actions import Action, Op, Schedule, v_shape


# dualpipe_v(2, 4): stages 0 and 3 on rank 0, 1 and 2 on rank 1. In the middle a forward of one stage stands beside a
# whole backward of the other; only the first and the last backwards are split.
#
#    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3   . 0B1 0B1 3B3 3B3 0I2 0W2 0I3 0W3
#    rank 1    . 1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2I3 1I3 2W3 1W3
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1), cut in half and folded to a V; m >= 2p.

    The bubble is (p-1)/(6m+p-1), and a rank holds at most 2p + 1 activations of a half slice. In the middle every
    forward of one half stands beside a whole backward of the other, so their messages and compute can overlap.
    """
    rows = tuple(tuple(_Row(ranks, rank).fill(microbatches)) for rank in range(ranks))
    return Schedule("dualpipe-v", 2 * ranks, microbatches, rows, v_shape(ranks))


class _Row:
    """The row of one rank; half 0 is its stage on the way there, half 1 its stage on the way back."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._after, self._upto = ranks, ranks - rank - 1, rank + 1
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._done = {(op, half): 0 for op in (Op.FORWARD, Op.BACKWARD) for half in (0, 1)}
        self._waiting: deque[Action] = deque()

    def fill(self, microbatches: int) -> Iterator[Action]:
        """The actions in order; ``after`` ranks follow this one, ``upto`` counts this one and those before it."""
        after, upto = self._after, self._upto
        for _ in range(2 * after):
            yield self._forward(0)
        for _ in range(upto):
            yield self._forward(0)
            yield self._forward(1)
        for _ in range(after):
            yield self._input(1)
            yield self._weight()
            yield self._forward(1)
        for _ in range(microbatches - 2 * self._ranks + upto):
            yield self._forward(0)
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for _ in range(after):
            yield self._backward(1)
            yield self._forward(1)
            yield self._backward(0)
        for number in range(2 * upto):
            half = 1 - number % 2
            yield self._backward(half) if number < upto else self._input(half)
        for _ in range(after):
            yield self._weight()
            yield self._input(0)
        while self._waiting:
            yield self._weight()

    def _next(self, op: Op, half: int) -> int:
        self._done[op, half] += 1
        return self._done[op, half] - 1

    def _forward(self, half: int) -> Action:
        return Action(Op.FORWARD, self._stages[half], self._next(Op.FORWARD, half))

    def _backward(self, half: int) -> Action:
        return Action(Op.BACKWARD, self._stages[half], self._next(Op.BACKWARD, half))

    def _input(self, half: int) -> Action:
        stage, microbatch = self._stages[half], self._next(Op.BACKWARD, half)
        self._waiting.append(Action(Op.BACKWARD_WEIGHT, stage, microbatch))
        return Action(Op.BACKWARD_INPUT, stage, microbatch)

    def _weight(self) -> Action:
        return self._waiting.popleft()
