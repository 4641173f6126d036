"""Which activations and gradients of an axis are sent in fewer bits, and as how many bytes: for the plan and the run.

A tensor is encoded if its dtype is fp32, bf16 or fp16 and its messages are shorter than it is; small ones, where the
last block is mostly padding, integers, bools and fp64 are sent as they are. Over T ranks, for n elements of b bytes:

                    exact                     encoded, m(s) bytes for s elements in whole blocks
    all-reduce      2 n b (T-1)/T             all-to-all and all-gather, each T m(n/T) (T-1)/T
    reduce-scatter  n b (T-1)/T               all-to-all, T m(n/T) (T-1)/T
    all-gather      n b (T-1)/T               all-gather, T m(n/T) (T-1)/T
    message         n b                       m(n)

An element that is gathered or sent errs by half a scale of its block; one that is summed by half a scale of each of
the T contributions, and after an all-reduce by half a scale of the sum besides.
"""

from dataclasses import dataclass

import torch

from engine.kernels.wire.block_codec import ENCODED_DTYPES, NumberFormat
from engine.parallel.comm.traffic import Op


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The format of the activations of one axis and of their gradients."""

    wire: NumberFormat
    labels: frozenset[str] = frozenset()
    """Labels of the collectives that are encoded; all others are exact."""

    def message_bytes(self, elements: int) -> int:
        """Bytes of ``elements`` numbers in whole blocks."""
        return self.wire.message_bytes(self.wire.padded(elements))

    def shortens(self, dtype: torch.dtype, elements: int) -> bool:
        """A message of so many numbers is shorter than they are."""
        return dtype in ENCODED_DTYPES and self.message_bytes(elements) < elements * dtype.itemsize

    def encodes(self, label: str, dtype: torch.dtype, elements: int, ranks: int) -> bool:
        """A collective whose full tensor has ``elements`` is encoded."""
        return label in self.labels and self.shortens(dtype, -(-elements // ranks))

    def collectives(self, op: Op, elements: int, ranks: int) -> tuple[tuple[Op, int], ...]:
        """The collectives that take the place of ``op``, each with the bytes of its full tensor."""
        size = ranks * self.message_bytes(-(-elements // ranks))
        if op == "all_reduce":
            return ("all_to_all", size), ("all_gather", size)
        return (("all_to_all" if op == "reduce_scatter" else "all_gather", size),)
