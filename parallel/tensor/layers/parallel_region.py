"""Region between the column layers and the row layer of an attention or an MLP.

    full x ─ f ─┬─ query ─┐
                ├─ key   ─┤ region: activations are sharded   row ─ g ─ full y
                └─ value ─┘

The column layers of a region share one copy of their input, so that the gradient is summed once. Inside, activations
are sharded and dropout differs between tensor ranks; outside, both are equal on all ranks. So the region draws one
number from the CPU's generator, equal on all ranks, and seeds the generators from it: by rank when the region opens,
equally when it closes. A recomputed block draws the same masks, since a region has no counter.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from engine.parallel.model.rng_streams import draw_alike, draw_apart, keyed_generators
from engine.parallel.tensor.global_tensor.context import GlobalTensorContext
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, version_of
from engine.parallel.tensor.global_tensor.redistribute import add_rows, cut_rows, gather_global, stream_dim
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.overlap.async_input_grad import Entrance, Shared, has_own_weights, share_input
from engine.parallel.tensor.overlap.chunked_matmul import SharedInPieces, is_in_pieces, scatter_product
from engine.parallel.tensor.overlap.fused_sum import multiply_and_sum, sums_in_kernel
from engine.parallel.tensor.tp_axis import TensorAxis


class Region:
    """Parallel region: the part of a model from column layers to the row layer that sums their results.

    ``context``: context of the model's global tensors. With ``context.sequence``, activations outside are sharded along
    the sequence.
    """

    def __init__(self, axis: TensorAxis, context: GlobalTensorContext | None = None) -> None:
        self.axis = axis
        self._context = context or global_context(axis)
        self._plain: list[torch.nn.Module] = []
        self._owned = True
        """True if every column layer is a plain matrix product; see :func:`copy_to`."""
        self._entrances: dict[int | None, Entrance] = {}
        self._folded: tuple[int, ...] | None = None
        """The dims that were flattened into the rows of the latest input."""
        self._entered: set[int] = set()
        self._copies: list[tuple[Tensor, int | None, Shared]] = []
        """(input, its version, what the layers share): a write in place to the input ends the equality of both."""
        self._drawn: int | None = None

    def add(self, layer: torch.nn.Module, plain: bool) -> None:
        """Adds the column layer ``layer`` to the region. ``plain``: True if its forward is only a matrix product."""
        self._entrances.clear()
        if plain:
            self._plain.append(layer)
        else:
            self._owned = False

    def enter(self, layer: torch.nn.Module, x: Tensor, again: bool = False) -> Shared:
        """Returns the copy of ``x`` that all column layers of this region share.

        A second call by the same ``layer`` begins a new forward. With ``again`` it does not: ``x`` is one more input of
        the running forward.
        """
        if not self._entered or (id(layer) in self._entered and not again):
            self._open(layer.training, x.device)
        part = x.local if type(x) is GlobalTensor else x
        copies = (shared for given, at, shared in self._copies if given is part and at == version_of(part))
        shared = next(copies, None)
        if shared is None:
            shared = self._share(x, part)
            self._copies.append((part, version_of(part), shared))
        self._entered.add(id(layer))
        return shared

    def product(self, layer: torch.nn.Module, x: Tensor) -> Tensor:
        """Multiplies this rank's features ``x`` by the weight of the row layer ``layer``, without bias, and returns the
        sum of these products over "tp".

        Under sequence parallelism the result is a global tensor sharded along the sequence.
        """
        own: Any = layer
        if self._context.sequence and x.ndim > 2 and own.tensor_product != "own" and has_own_weights(layer):
            rows, rest = divmod(x.shape[-2], self.axis.size)
            if not rest and is_in_pieces(rows, x.narrow(-2, 0, rows), self.axis, "product_scatter"):
                y = scatter_product(layer, x, self.axis)
                return cut_rows(self._context, y, (*x.shape[:-1], y.shape[-1]))
        alone = self.axis.symmetric is None or self._context.sequence or own.tensor_product == "own"
        if not alone and sums_in_kernel(layer, x, self.axis):
            return multiply_and_sum(layer, x, self.axis)
        return self.combine(own.multiply(x))

    def combine(self, y: Tensor) -> Tensor:
        """Returns the sum of ``y`` over the ranks, under sequence parallelism sharded along the sequence."""
        return add_rows(self._context, y, self._folded)

    def _share(self, x: Tensor, part: Tensor) -> Shared:
        # x is full (a plain tensor, dim None), sharded evenly in rank order along ``dim``, or sharded in another way,
        # which is gathered here. Rows that are large enough are gathered in chunks during the products; everything
        # else passes an entrance, which gathers along ``dim`` if there is one and defers the weight gradients.
        dim = None
        if type(x) is GlobalTensor:
            dim, self._folded = stream_dim(x), x.folded
            if dim is None:
                return Shared(gather_global(x).local)
        by_rows = dim is not None and dim == part.ndim - 2 and not self._context.regather
        if by_rows and is_in_pieces(part.shape[-2], part, self.axis, "gather_product"):
            return SharedInPieces(part, self.axis, self._plain)
        if dim not in self._entrances:
            self._entrances[dim] = Entrance(self.axis, self._owned, self._forget, dim, self._context.regather)
        return share_input(
            part, self._entrances[dim], (other for other in self._plain if id(other) not in self._entered)
        )

    def leave(self, device: torch.device) -> None:
        """Closes the region after the row layer's sum: random numbers on ``device`` are equal on all ranks again."""
        self._close()
        if self._drawn is not None:
            draw_alike(device, self._drawn)
            self._drawn = None

    @contextmanager
    def drawing(self, device: torch.device, stream: int | None) -> Iterator[None]:
        """Seeds the random generators of ``device`` inside the context.

        ``stream``: number of a random stream equal on all tensor ranks; None: a different stream on each rank.
        """
        key: tuple[int, ...] = ()
        if stream is None and self.axis.size > 1 and not self.axis.dry:
            key = int(torch.empty((), dtype=torch.int64, device="cpu").random_()), self.axis.index + 1
        elif stream is not None and self._drawn is not None:
            key = self._drawn, 0, stream
        with keyed_generators(device, *key) if key else nullcontext():
            yield

    def _open(self, training: bool, device: torch.device) -> None:
        self._close()
        self._drawn = None
        if training and self.axis.size > 1 and not self.axis.dry:
            self._drawn = draw_apart(device, self.axis.index)

    def _close(self) -> None:
        """Resets all attributes, so that they are equal between forwards and never count as changed model state."""
        self._forget()
        self._entered.clear()
        self._folded = None

    def _forget(self) -> None:  # a bound `_copies.clear` would clear the original's list in a copied model
        self._copies.clear()
