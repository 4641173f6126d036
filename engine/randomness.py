"""Random numbers keyed by what they are for, so that dropout does not depend on the grid.

The generators are set from (seed, step, global microbatch index) before a microbatch, set anew at the exit
of every block and other outermost module with parameters (key: how many of them have ended), and put back
afterwards: the user's own streams are not touched.

Setting them at exits and not at entries has two reasons: what is drawn between two modules is the same on
whatever pipeline stage it runs, and recomputed activations, which go back to the state at a block's entry,
draw the same numbers again. Where several blocks are recomputed together, the seed found at the entry of each
tells which microbatch this is and where in it, so that its exit sets the same seed as before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from engine.parallel.pipeline.units import find_units
from engine.parallel.seeds import derive_seed, generators_of

Hook = Callable[..., None]


@contextmanager
def keyed(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the CPU's and this device's generator from ``key``; restore both at the end."""
    generators = generators_of(device)
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(derive_seed(*key))
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class Streams:
    """The random streams of one model: hooks that reseed while a microbatch runs, forward or once more in backward."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._key: tuple[int, ...] | None = None
        self._ended = 0
        self._made: dict[int, tuple[tuple[int, ...], int]] = {}
        """Of this step: seed -> (key of the microbatch, modules that had ended)."""
        self._again: dict[int, tuple[tuple[int, ...], int]] = {}
        """What running recomputations found at the entry of a module, by the module."""
        units = find_units(model, deep=True).modules.values()
        # a compiled module traces its hooks with it, and these cannot be traced
        enter: Hook = torch.compiler.disable(lambda *seen: self._enter(*seen))  # type: ignore[no-untyped-call]
        leave: Hook = torch.compiler.disable(lambda *seen: self._exit(*seen))  # type: ignore[no-untyped-call]
        self._hooks = [unit.register_forward_pre_hook(enter) for unit in units]
        self._hooks += [unit.register_forward_hook(leave) for unit in units]

    @contextmanager
    def forward(self, *key: int) -> Iterator[None]:
        """Around the forward of one microbatch: key = (seed, step, ...). Backward must lie outside."""
        if any(other[:2] != key[:2] for other, _ in list(self._made.values())[:1]):
            self._made.clear()
        with keyed(self._device, *key):
            self._key, self._ended = key, 0
            self._made[derive_seed(*key)] = key, 0
            try:
                yield
            finally:
                self._key = None

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, unit: nn.Module, *_: object) -> None:
        if self._key is None:
            found = self._made.get(torch.default_generator.initial_seed())
            if found is not None:
                self._again[id(unit)] = found

    def _exit(self, unit: nn.Module, *_: object) -> None:
        if self._key is not None:
            self._ended += 1
            self._reseed(self._key, self._ended)
        elif (found := self._again.pop(id(unit), None)) is not None:
            self._reseed(found[0], found[1] + 1)

    def _reseed(self, key: tuple[int, ...], ended: int) -> None:
        seed = derive_seed(*key, ended)
        self._made[seed] = key, ended
        for generator in generators_of(self._device):
            generator.manual_seed(seed)
