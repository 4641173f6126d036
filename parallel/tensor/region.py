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

from engine.parallel.seeds import derive_seed, seed_generators
from engine.parallel.tensor.axis import TensorAxis
from engine.parallel.tensor.collectives import copy_to


class Region:
    """The shared input copies and the random streams of one region.

    ``owned``: every column layer is a plain matrix product, see :func:`copy_to`.
    """

    def __init__(self, axis: TensorAxis, owned: bool = True) -> None:
        self.axis = axis
        self.owned = owned
        self._entered: set[int] = set()
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._drawn: int | None = None

    def enter(self, layer: torch.nn.Module, x: Tensor, again: bool = False) -> Tensor:
        """``x`` for a column layer: the same copy for the same tensor object until the region closes.

        A layer that enters twice begins anew (recomputed activations may stop before the row layer), unless it says
        that it comes ``again`` with another of its inputs.
        """
        if not self._entered or (id(layer) in self._entered and not again):
            self._open(layer.training, x.device)
        self._entered.add(id(layer))
        for given, copied in self._copies:
            if given is x:
                return copied
        copied = copy_to(x, self.axis, self.owned, self._copies.clear)
        self._copies.append((x, copied))
        return copied

    def leave(self, device: torch.device) -> None:
        """The row layer has summed: what follows is whole again."""
        self._copies.clear()
        self._entered.clear()
        if self._drawn is not None:
            seed_generators(device, derive_seed(self._drawn, 0))
            self._drawn = None

    def _open(self, training: bool, device: torch.device) -> None:
        self._copies.clear()
        self._entered.clear()
        self._drawn = None
        if training and self.axis.size > 1 and not self.axis.dry:
            self._drawn = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            seed_generators(device, derive_seed(self._drawn, self.axis.index + 1))
