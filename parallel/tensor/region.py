"""What lies between the column layers and the row layer of an attention or a perceptron.

    whole x ─ f ─┬─ query ─┐
                 ├─ key   ─┤ region: activations are cut   row ─ g ─ whole y
                 └─ value ─┘

Two things hold for a region at once. Its column layers share one copy of their input, so that the gradient is
summed once. And since its activations are cut, its dropout must differ between tensor ranks, while outside
activations are equal on all of them and dropout must be equal too. For that the region takes one number from
the CPU's generator, which agrees on all ranks, and seeds from it twice: by rank where it opens, alike where it
closes. Nothing is counted, so a block that is run again from the same random state draws the same masks.
"""

import torch
from torch import Tensor

from engine.parallel.seeds import derive_seed, generators_of
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.late import Entrance, Shared, share


class Region:
    """The shared input copies and the random streams of one region."""

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self._plain: list[torch.nn.Module] = []
        self._owned = True
        """Whether every column layer is a plain matrix product, see :func:`copy_to`."""
        self._entrance: Entrance | None = None
        self._entered: set[int] = set()
        self._copies: list[tuple[Tensor, Shared]] = []
        self._drawn: int | None = None

    def add(self, layer: torch.nn.Module, plain: bool) -> None:
        """A column layer of this region; ``plain``: it is a matrix product and nothing else."""
        self._entrance = None
        if plain:
            self._plain.append(layer)
        else:
            self._owned = False

    def enter(self, layer: torch.nn.Module, x: Tensor) -> Shared:
        """``x`` for a column layer: the same copy for the same tensor object until the region closes.

        A layer that enters twice begins anew: recomputed activations may stop before the row layer.
        """
        if not self._entered or id(layer) in self._entered:
            self._open(layer.training, x.device)
        for given, shared in self._copies:
            if given is x:
                self._entered.add(id(layer))
                return shared
        entrance = self._entrance = self._entrance or Entrance(self.axis, self._owned, self._copies.clear)
        shared = share(x, entrance, (other for other in self._plain if id(other) not in self._entered))
        self._entered.add(id(layer))
        self._copies.append((x, shared))
        return shared

    def leave(self, device: torch.device) -> None:
        """The row layer has summed: what follows is whole again."""
        self._copies.clear()
        self._entered.clear()
        if self._drawn is not None:
            _seed(device, derive_seed(self._drawn, 0))
            self._drawn = None

    def _open(self, training: bool, device: torch.device) -> None:
        self._copies.clear()
        self._entered.clear()
        self._drawn = None
        if training and self.axis.size > 1 and not self.axis.dry:
            self._drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            _seed(device, derive_seed(self._drawn, self.axis.index + 1))


def _seed(device: torch.device, seed: int) -> None:
    for generator in generators_of(device):
        generator.manual_seed(seed)
