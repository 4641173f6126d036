"""DualPipeV: two directions of work on each rank, so that one's compute hides the other's messages."""

from collections import deque
from collections.abc import Iterator

from engine.parallel.pipeline.actions import Action, Op, Schedule
from engine.parallel.pipeline.placement import v_shape


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.1), cut in half and folded to a V; m >= 2p.

    The bubble is (p-1)/(6m+p-1), and a rank holds 2p + 1 activations of a half slice at most. In the middle every
    forward of one half stands beside a whole backward of the other: their messages and compute can overlap.
    """
    rows = tuple(tuple(_Row(ranks, rank).fill(microbatches)) for rank in range(ranks))
    return Schedule("dualpipe-v", 2 * ranks, microbatches, rows, v_shape(ranks))


class _Row:
    """What one rank does; half 0 is its stage on the way there, half 1 the one on the way back."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._after, self._upto = ranks, ranks - rank - 1, rank + 1
        self._stages = (rank, 2 * ranks - 1 - rank)
        self._done = {(op, half): 0 for op in (Op.FORWARD, Op.BACKWARD) for half in (0, 1)}
        self._waiting: deque[Action] = deque()

    def fill(self, microbatches: int) -> Iterator[Action]:
        """``after`` ranks follow this one, ``upto`` are as far as it or less."""
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
