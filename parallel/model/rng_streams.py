"""Random numbers keyed by what they are for, so that dropout does not depend on the grid.

The generators are set from (seed, step, global microbatch index) before a microbatch, set anew at the exit
of every block and other outermost module with parameters (key: how many of them have ended), and put back
afterwards: the user's own streams are not touched.

Setting them at exits and not at entries has two reasons: what is drawn between two modules is the same on
whatever pipeline stage it runs, and recomputed activations, which go back to the state at a block's entry,
draw the same numbers again. Where several blocks are recomputed together, the seed found at the entry of each
tells which microbatch this is and where in it, so that its exit sets the same seed as before.

Where blocks have dropout, what they consist of sets the generators too: a stage may begin inside a block, and what
it does not have draws nothing there.

Seeds made from what they are for, and the generators that they go to.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from engine.parallel.model.blocks import Units, find_units, weighty_children
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer

Hook = Callable[..., None]


@contextmanager
def keyed_generators(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the CPU's and this device's generator from ``key``; restore both at the end."""
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    try:
        seed_generators(device, derive_seed(*key))
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class StreamPosition(NamedTuple):
    """Where in a microbatch the generators were last set."""

    key: tuple[int, ...]
    ended: int = 0
    """Modules that had ended."""
    inner: int = 0
    """Parts of blocks that have ended since."""

    def seed(self) -> int:
        """What the generators are set to here."""
        counts = (self.ended, self.inner) if self.inner else (self.ended,) if self.ended else ()
        return derive_seed(*self.key, *counts)

    def after(self, part: bool) -> "StreamPosition":
        """When one more has ended: a part of a block, or a module."""
        return (
            StreamPosition(self.key, self.ended, self.inner + 1) if part else StreamPosition(self.key, self.ended + 1)
        )


class RandomStreams:
    """The random streams of one model: hooks that reseed while a microbatch runs, forward or once more in backward.

    They are put on with the first microbatch that draws something: a call of a module with hooks takes longer.
    """

    def __init__(self, model: nn.Module, device: torch.device, patches: ForwardPatches) -> None:
        self._model, self._device, self._patches = model, device, patches
        self._hooked = False
        self._now: StreamPosition | None = None
        self._made: dict[int, StreamPosition] = {}
        """Of this step, by seed."""
        self._again: dict[int, StreamPosition] = {}
        """What running recomputations found at the entry of a module, by the module."""
        # what is compiled traces its hooks too, and these cannot be traced; elsewhere that would only cost time
        self._traced = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())

    @contextmanager
    def forward(self, *key: int) -> Iterator[None]:
        """Around the forward of one microbatch: key = (seed, step, ...). Backward must lie outside."""
        if not self._hooked:
            self._install()
        if any(other.key[:2] != key[:2] for other in list(self._made.values())[:1]):
            self._made.clear()
        with keyed_generators(self._device, *key):
            self._now = StreamPosition(key)
            self._made[self._now.seed()] = self._now
            try:
                yield
            finally:
                self._now = None

    def _install(self) -> None:
        units = find_units(self._model, deep=True)
        whole = list(units.modules.values())
        for unit in whole:
            self._watch(unit, part=False)
        for unit in _parts(units, {id(unit) for unit in whole}):
            self._watch(unit, part=True)
        self._hooked = True

    def _watch(self, unit: nn.Module, part: bool) -> None:
        enter: Hook = self._enter
        leave: Hook = partial(self._exit, part)
        if self._traced:
            enter, leave = torch.compiler.disable(enter), torch.compiler.disable(leave)  # type: ignore[no-untyped-call]
        note = "reseeds the random generators at its exit, by step, microbatch and position"
        self._patches.hook(unit, PatchLayer.RANDOM, unit.register_forward_pre_hook(enter), note)
        self._patches.hook(unit, PatchLayer.RANDOM, unit.register_forward_hook(leave), note)

    def _enter(self, unit: nn.Module, *_: object) -> None:
        if self._now is None:
            found = self._made.get(torch.default_generator.initial_seed())
            if found is not None:
                self._again[id(unit)] = found

    def _exit(self, part: bool, unit: nn.Module, *_: object) -> None:
        if self._now is not None:
            self._now = self._reseed(self._now.after(part))
        elif (found := self._again.pop(id(unit), None)) is not None:
            # parts of the module may have ended meanwhile
            self._reseed(self._made.get(torch.default_generator.initial_seed(), found).after(part))

    def _reseed(self, place: StreamPosition) -> StreamPosition:
        seed = place.seed()
        self._made[seed] = place
        seed_generators(self._device, seed)
        return place


def _parts(units: Units, known: set[int]) -> Iterator[nn.Module]:
    """What blocks with dropout consist of: code that goes round the block's forward calls them one by one.

    Not those of compiled blocks, whose graph a hook would break.
    """
    for name in units.blocks:
        block = units.modules[name]
        drops = any(isinstance(module, _DropoutNd) and module.p > 0 for module in block.modules())
        if drops and block._compiled_call_impl is None:
            for _, child in weighty_children(block):
                if id(child) not in known:
                    known.add(id(child))
                    yield child


def derive_seed(*key: int) -> int:
    """A 63-bit seed from a tuple of integers; near keys give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a model on ``device`` draws from: the CPU's, and the device's own.

    They are named one by one because ``torch.manual_seed``, which seeds every device there is, takes 70
    microseconds where a generator takes one.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        current = torch.cuda.current_device()  # starts CUDA: the generators do not exist before
        generators.append(torch.cuda.default_generators[current if device.index is None else device.index])
    return generators


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed what a model on ``device`` draws from."""
    for generator in generators_of(device):
        generator.manual_seed(seed)


def draw_apart(device: torch.device, index: int) -> int:
    """From here on the rank ``index`` of the tensor axis draws random numbers of its own.

    Returns one number from the CPU's generator, the same on all ranks, with which ``draw_alike`` ends this.
    """
    drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    seed_generators(device, derive_seed(drawn, index + 1))
    return drawn


def draw_alike(device: torch.device, drawn: int) -> None:
    """From here on all ranks of the tensor axis draw the same random numbers again."""
    seed_generators(device, derive_seed(drawn, 0))
