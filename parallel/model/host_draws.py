"""Random numbers of Python's ``random`` and of ``numpy.random``: keyed in a forward, and as the user left them outside.

    forward begins                seed(key)       the user's generators are put aside
    a unit begins                 seed(key, -1)   so that a unit draws the same when it runs again, on whichever stage
    a unit ends                   seed(key)       as torch's generators are (``rng_streams``)
    forward ends                  the user's generators are back
    a block runs again            seed(key, -1)   the user's generators are put aside until the backward ends

Seeding costs microseconds, and few models draw so. Units are seeded in a model that does: a trace has seen it, or the
first forward in this mode. Of a model that has not drawn so the first forward of each step is watched.
"""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

_NUMPY: Any = np.random  # its stubs lack the exchange of generators


class HostState(NamedTuple):
    """State of both generators of this process."""

    python: Any
    numpy: Any

    @staticmethod
    def take() -> "HostState":
        """The present state."""
        return HostState(random.getstate(), np.random.get_state())

    def put(self) -> None:
        """Make it the present state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def is_present(self) -> bool:
        """Whether nothing has been drawn since it was taken."""
        if random.getstate() != self.python:
            return False
        now, before = _NUMPY.get_state(), self.numpy
        return bool(now[2:] == before[2:] and (now[1] == before[1]).all())


class HostDraws:
    """What the forwards of one model draw on the host."""

    def __init__(self) -> None:
        self.keyed = False
        """Units are seeded in the forward that runs."""
        self._drawn = False
        """Some forward of the model has drawn."""
        self._modes: set[bool] = set()
        """Modes, training or not, whose first forward has run."""
        self._step: tuple[int, ...] = ()
        self._watched: HostState | None = None
        """State that a forward leaves where it draws nothing; None: nobody watches."""
        self._own = np.random.MT19937(0)
        """NumPy's generator while a forward runs: exchanging it takes less than copying the user's."""
        self._users: AbstractContextManager[None] | None = None
        """The user's generators while units run again in backward."""

    @contextmanager
    def forward(self, seed: int, step: tuple[int, ...], training: bool, known: bool | None) -> Iterator[None]:
        """Context of a forward; ``known``: whether it draws, from a trace, or None without one."""
        self.end_backward()
        self._drawn = self._drawn or known is True
        first = known is None and training not in self._modes
        watch = first or (known is None and not self._drawn and step != self._step)
        self._modes, self._step = self._modes | {training}, step
        if not (self._drawn or watch):
            yield
            return
        with self._aside():
            self.keyed = self._drawn or first
            try:
                self._seed(seed, watch)
                yield
            finally:
                self._look()
                self.keyed, self._watched = False, None

    def unit(self, seed: int) -> None:
        """Seed both generators where a unit begins or ends in a forward."""
        self._look()
        self._seed(seed, watch=self._watched is not None)

    def again(self, seed: int) -> None:
        """Seed both generators for a unit that runs again in backward; the user's are back after ``end_backward``."""
        if self._drawn:
            if self._users is None:
                self._users = self._aside()
                self._users.__enter__()
            self._seed(seed)

    def end_backward(self) -> None:
        """Put the user's generators back after units have run again."""
        users, self._users = self._users, None
        if users is not None:
            users.__exit__(None, None, None)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context in which the user's generators are put aside."""
        state, generator = HostState.take(), _NUMPY.get_bit_generator()
        _NUMPY.set_bit_generator(self._own)
        try:
            yield
        finally:
            _NUMPY.set_bit_generator(generator)
            random.setstate(state.python)
            if state.numpy[3]:  # a normal number that was drawn ahead is lost with the exchange
                np.random.set_state(state.numpy)

    def _seed(self, seed: int, watch: bool = False) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._watched = HostState.take() if watch else None

    def _look(self) -> None:
        if self._watched is not None and not self._watched.is_present():
            self._drawn = True


@contextmanager
def highest_draws() -> Iterator[None]:
    """Context whose draws are the highest possible numbers, with which a block leaves out nothing that it draws for."""
    before = HostState.take()
    host_extreme(True).put()
    try:
        yield
    finally:
        before.put()


def host_extreme(highest: bool) -> HostState:
    """A state whose next draws are the lowest possible numbers, or the highest, and then ordinary ones.

    Both generators are Mersenne Twisters, which give out the words of their state, tempered. Not all words are
    extreme, since code that draws until a number suits it would never end.
    """
    ordinary = np.random.MT19937(0).state["state"]["key"]
    words = [_UNTEMPERED_ONES if highest else 0] * _EXTREMES + [int(word) for word in ordinary[_EXTREMES:]]
    return HostState((3, (*words, 0), None), ("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))


_EXTREMES = 512
"""Words that are extreme; a uniform number takes two."""
_UNTEMPERED_ONES = 0x12DD9BB3
"""The word of a state that is given out as 32 ones."""
