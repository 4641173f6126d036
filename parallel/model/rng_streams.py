"""Random streams keyed by microbatch and module, so that dropout does not depend on the grid.

    microbatch starts              seed(key)               key = (seed, step, global microbatch index)
    block 0 or embedding ends      seed(key, 1)            an outermost module with parameters
    block 1 ends                   seed(key, 2)
    child of a block ends          seed(key, 2, 1)         only in blocks with dropout
    microbatch ends                the user's own streams are restored

Python's and NumPy's generators follow in models that draw from them:

    forward begins                seed(key)       the user's generators are saved
    a unit begins                 seed(key, -1)   so that a unit draws the same numbers when it runs again, on any stage
    a unit ends                   seed(key)       as for torch's generators
    forward ends                  the user's generators are restored
    a block runs again            seed(key, -1)   the user's generators are saved until the backward ends

Units are seeded only in models that use these generators, according to a trace or the first forward in this mode; other
models are watched in the first forward of each step.

Generators are reseeded at the exit of modules, not at their entry, so that numbers drawn between two modules are equal
on every pipeline stage, and a recomputed block, which starts from the generator state saved at its entry, draws the
same numbers again. If several blocks are recomputed together, the seed at the entry of each identifies microbatch and
position.

Modules inside units reseed at their exits too, at a separate level: the blocks of a chain inside a unit, and the
children of blocks with dropout, because a stage may begin inside a block. The exit of a module restarts the counts of
the levels below, so positions after a skipped module do not depend on the modules inside it.
"""

import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from engine.kernels.device import device_generator
from engine.parallel.model.blocks import find_units, has_compiled_code, weighty_children
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer

_NUMPY: Any = np.random  # NumPy's stubs lack the exchange of generators
_EXTREMES = 512
"""Number of extreme words in an extreme state; a uniform number takes two."""
_UNTEMPERED_ONES = 0x12DD9BB3
"""The word of a state that becomes 32 ones in the output."""
Hook = Callable[..., None]


@contextmanager
def keyed_generators(device: torch.device, *key: int) -> Iterator[None]:
    """Seeds the random generators of the CPU and ``device`` from ``key`` inside the context, then restores them."""
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    try:
        seed_generators(device, derive_seed(*key))
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class StreamPosition(NamedTuple):
    """Position in a microbatch, from which a seed is derived: key of the microbatch, and number of modules that have
    run.
    """

    key: tuple[int, ...]
    ended: tuple[int, ...] = ()
    """Number of ended modules at each nesting level since the last end at the level above; the last number is not 0."""

    def seed(self) -> int:
        """Returns the 63-bit seed for the generators at this position."""
        return derive_seed(*self.key, *self.ended)

    def after(self, level: int) -> "StreamPosition":
        """Returns the position after the end of one more module at nesting level ``level`` (0: outermost).

        The counts of deeper levels restart at 0.
        """
        counts = (*self.ended, *(0 for _ in range(level + 1)))[: level + 1]
        return StreamPosition(self.key, (*counts[:-1], counts[-1] + 1))


class RandomStreams:
    """Random streams of one model: module hooks seed the generators by position in the microbatch.

    Recomputation in backward draws the same numbers as forward.
    """

    def __init__(self, model: nn.Module, device: torch.device, patches: ForwardPatches) -> None:
        self._model, self._device, self._patches = model, device, patches
        self._hooked = False
        self._host = HostDraws()
        self._now: StreamPosition | None = None
        self._made: dict[int, StreamPosition] = {}
        """Positions of this step, by seed."""
        self._again: dict[int, StreamPosition] = {}
        """Position at the entry of each module in recomputation, by module id."""
        self._place: StreamPosition | None = None
        """Position in the recomputation of a block, where code of the user may have seeded torch's generators."""
        # a compiled module traces its hooks, which these do not support; in other modules the exclusion costs time
        self._traced = any(map(has_compiled_code, model.modules()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "RandomStreams":
        """Returns ``self``: a copy of the model (an average of weights) has these hooks, inactive outside of a
        forward."""
        return self

    @contextmanager
    def forward(self, *key: int, host: bool | None = None) -> Iterator[None]:
        """Seeds the random generators for the forward of one microbatch inside the context.

        ``key``: (seed, step, microbatch). Run backward outside the context. ``host``: True if the forward draws from
        Python's or NumPy's generators; None if unknown.
        """
        if not self._hooked:
            self._install()
        if any(other.key[:2] != key[:2] for other in list(self._made.values())[:1]):
            self._made.clear()
        self._now = StreamPosition(key)
        seed = self._now.seed()
        with (
            keyed_generators(self._device, *key),
            self._host.forward(seed, key[:2], self._model.training, host),
        ):
            self._made[seed] = self._now
            try:
                yield
            finally:
                self._now = None

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that opens a context for recomputing a block in backward. Call ``again`` in the forward of
        the block.

        The context seeds Python's and NumPy's generators from torch's seed, which the recomputation has restored.
        """
        begin, seed = self._now or self._place, torch.default_generator.initial_seed()

        @contextmanager
        def running() -> Iterator[None]:
            restored = torch.default_generator.initial_seed() == seed  # tiles leave the user's generator alone
            before, self._place = self._place, begin if restored else None
            self._host.again(_entry_seed())
            try:
                yield
            finally:
                self._place = before

        return running

    def end_backward(self) -> None:
        """Restores the user's Python and NumPy generators after the recomputation of blocks."""
        self._host.end_backward()

    def _install(self) -> None:
        for unit, level in _counted(self._model):
            self._watch(unit, level)
        self._hooked = True

    def _watch(self, unit: nn.Module, level: int) -> None:
        enter: Hook = self._enter
        leave: Hook = partial(self._exit, level)
        if self._traced:
            enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)  # type: ignore[no-untyped-call]
        note = "reseeds the random generators at its exit, by step, microbatch and position"
        self._patches.hook(unit, PatchLayer.RANDOM, unit.register_forward_pre_hook(enter), note)
        self._patches.hook(unit, PatchLayer.RANDOM, unit.register_forward_hook(leave), note)

    def _enter(self, unit: nn.Module, *_: object) -> None:
        # outside a forward this is recomputation in backward: the restored seed identifies microbatch and position
        if self._now is not None:
            if self._host.keyed:
                self._host.unit(_entry_seed())
            return
        if self._place is not None:
            self._host.again(_entry_seed())
        elif (found := self._made.get(torch.default_generator.initial_seed())) is not None:
            self._again[id(unit)] = found
            self._host.again(_entry_seed())

    def _exit(self, level: int, unit: nn.Module, *_: object) -> None:
        if self._now is not None:
            self._now = self._reseed(self._now.after(level))
            if self._host.keyed:
                self._host.unit(self._now.seed())
        elif self._place is not None:
            self._place = self._reseed(self._place.after(level))
            self._host.again(self._place.seed())
        elif (found := self._again.pop(id(unit), None)) is not None:
            # inner modules may have ended since the entry, so the current seed takes precedence
            again = self._reseed(self._made.get(torch.default_generator.initial_seed(), found).after(level))
            self._host.again(again.seed())

    def _reseed(self, place: StreamPosition) -> StreamPosition:
        seed = place.seed()
        self._made[seed] = place
        seed_generators(self._device, seed)
        return place


def _entry_seed() -> int:
    """Returns the seed of Python's and NumPy's generators at a unit's begin, from torch's seed, which recomputation
    restores."""
    return derive_seed(torch.default_generator.initial_seed() & _63_BITS, -1)


_63_BITS = (1 << 63) - 1
"""Mask of the bits that ``derive_seed`` accepts; a user's seed may have more."""


def _counted(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yields the modules whose ends are counted, each with its level: the number of counted modules around it.

    Counted are all modules that a stage may skip as a whole: units, the blocks of chains inside units, and the children
    of blocks with dropout. The end of a module restarts the counts of the levels below, so a skipped module leaves
    later positions unchanged. Modules inside a compiled block are omitted: a hook would break the graph.
    """
    named: dict[str, nn.Module] = {}
    blocks: list[str] = []
    for units in (find_units(model), find_units(model, deep=True), find_units(model, mixed=True)):
        named |= units.modules
        blocks += units.blocks
    for name in blocks:
        block = named[name]
        if any(isinstance(module, _DropoutNd) and module.p > 0 for module in block.modules()):
            named |= {f"{name}.{key}": child for key, child in weighty_children(block)}
    known = set[int]()
    for name in sorted(named, key=lambda name: name.count(".")):
        around = [named[outer] for outer in _outer_names(name) if outer in named]
        if id(named[name]) not in known and all(module._compiled_call_impl is None for module in around):
            known.add(id(named[name]))
            yield named[name], len(around)


def _outer_names(name: str) -> list[str]:
    """Returns the names of the modules around ``name``, outermost first."""
    keys = name.split(".")
    return [".".join(keys[:count]) for count in range(1, len(keys))]


def derive_seed(*key: int) -> int:
    """Returns a 63-bit seed derived from ``key``. Similar keys give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Returns the torch generator of the CPU, and the generator of ``device`` if it is an accelerator."""
    own = device_generator(device)
    return [torch.default_generator] if own is None else [torch.default_generator, own]


def seed_generators(device: torch.device, seed: int) -> None:
    """Seeds the torch generators of the CPU and ``device`` with ``seed``."""
    for generator in generators_of(device):
        generator.manual_seed(seed)


def draw_apart(device: torch.device, index: int) -> int:
    """Seeds the torch generators differently on each tensor rank. ``index``: index of this rank on the tensor axis.

    Returns a number for :func:`draw_alike`, equal on all ranks.
    """
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    seed_generators(device, derive_seed(drawn, index + 1))
    return drawn


def draw_alike(device: torch.device, drawn: int) -> None:
    """Seeds the torch generators equally on all tensor ranks. ``drawn``: result of :func:`draw_apart`."""
    seed_generators(device, derive_seed(drawn, 0))


_ONE_AT_A_TIME = threading.RLock()
"""Lock of NumPy's generator: an exchange in one thread frees the memory that another thread's copy reads."""


class HostState(NamedTuple):
    """States of Python's and NumPy's global random generators in this process."""

    python: Any
    numpy: Any

    @staticmethod
    def take() -> "HostState":
        """Returns the current state of Python's and NumPy's generators."""
        with _ONE_AT_A_TIME:
            return HostState(random.getstate(), np.random.get_state())

    def put(self) -> None:
        """Sets Python's and NumPy's generators to this state."""
        with _ONE_AT_A_TIME:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    def is_present(self) -> bool:
        """Returns True if no number was drawn from Python's and NumPy's generators since this state."""
        python, now = HostState.take()
        before = self.numpy
        return python == self.python and bool(now[2:] == before[2:] and (now[1] == before[1]).all())


class HostDraws:
    """Seeder of Python's and NumPy's generators for the forwards of one model. Restores the user's generators."""

    def __init__(self) -> None:
        self.keyed = False
        """True if units of the running forward are seeded."""
        self._drawn = False
        """True if some forward of the model has drawn a number."""
        self._modes: set[bool] = set()
        """Modes (training: True) with at least one forward so far."""
        self._step: tuple[int, ...] = ()
        self._watched: HostState | None = None
        """The last seeded state, which stays equal if a forward draws nothing; None: not watched."""
        self._own = np.random.MT19937(0)
        """NumPy's generator during a forward: an exchange takes less time than a copy of the user's generator."""
        self._users: AbstractContextManager[None] | None = None
        """Context that restores the user's generators after recomputation in backward."""

    @contextmanager
    def forward(self, seed: int, step: tuple[int, ...], training: bool, known: bool | None) -> Iterator[None]:
        """Seeds Python's and NumPy's generators for a forward inside the context, if the model draws from them.

        ``step``: identifies the training step. ``training``: mode of the model. ``known``: True if the forward draws,
        False if not, None if unknown. The first unknown forward of each mode, and of each step, is seeded and watched;
        once one draws, all later forwards are seeded.
        """
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
        """Seeds Python's and NumPy's generators with ``seed`` at the start or end of a module."""
        self._look()
        self._seed(seed, watch=self._watched is not None)

    def again(self, seed: int) -> None:
        """Seeds Python's and NumPy's generators for the recomputation of a block.

        :meth:`end_backward` restores the user's generators.
        """
        if self._drawn:
            if self._users is None:
                self._users = self._aside()
                self._users.__enter__()
            self._seed(seed)

    def end_backward(self) -> None:
        """Restores the user's Python and NumPy generators if a block was recomputed."""
        users, self._users = self._users, None
        if users is not None:
            users.__exit__(None, None, None)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Saves the user's generators, and restores them at the end of the context."""
        with _ONE_AT_A_TIME:
            state, generator = HostState.take(), _NUMPY.get_bit_generator()
            _NUMPY.set_bit_generator(self._own)
        try:
            yield
        finally:
            with _ONE_AT_A_TIME:
                _NUMPY.set_bit_generator(generator)
                random.setstate(state.python)
                if state.numpy[3]:  # the exchange loses a normal number that was drawn ahead
                    np.random.set_state(state.numpy)

    def _seed(self, seed: int, watch: bool = False) -> None:
        with _ONE_AT_A_TIME:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        self._watched = HostState.take() if watch else None

    def _look(self) -> None:
        if self._watched is not None and not self._watched.is_present():
            self._drawn = True


@contextmanager
def highest_draws() -> Iterator[None]:
    """Makes the first 256 uniform draws from each of Python's and NumPy's generators the highest possible numbers.

    Layer drop (``random() < p``) thus drops no layer. The end of the context restores both generators.
    """
    before = HostState.take()
    host_extreme(True).put()
    try:
        yield
    finally:
        before.put()


def host_extreme(highest: bool) -> HostState:
    """Returns a state of Python's and NumPy's generators from which the next 256 uniform draws are extreme.

    They are the highest possible numbers, or the lowest if ``highest`` is False. Later draws are ordinary numbers.
    """
    ordinary = np.random.MT19937(0).state["state"]["key"]
    words = [_UNTEMPERED_ONES if highest else 0] * _EXTREMES + [int(word) for word in ordinary[_EXTREMES:]]
    return HostState((3, (*words, 0), None), ("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))
