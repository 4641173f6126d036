"""Quantized collectives of activations over one axis.

    all-reduce        encode -> all-to-all -> add in fp32 -> encode -> all-gather -> decode
    reduce-scatter    encode -> all-to-all -> add in fp32
    all-gather        encode -> all-gather -> decode

Every rank decodes all messages of a gather, including its own, so all ranks get equal bits. The layers' autograd
functions call these collectives in forward and backward as if they were exact (straight-through).

Shape suffixes: T ranks, p elements of a shard, s of a shard in whole blocks, m bytes of its message.

A sum adds encoded contributions only, this rank's own included, so that it does not depend on the rank that adds.

A tensor is encoded if it is fp32, bf16 or fp16 and its message is shorter than the tensor; others are sent unencoded.
Bytes over T ranks, for n elements of b bytes:

                    exact                     encoded, m(s) bytes for s elements in whole blocks
    all-reduce      2 n b (T-1)/T             all-to-all and all-gather, each T m(n/T) (T-1)/T
    reduce-scatter  n b (T-1)/T               all-to-all, T m(n/T) (T-1)/T
    all-gather      n b (T-1)/T               all-gather, T m(n/T) (T-1)/T
    message         n b                       m(n)

The error of a gathered or sent element is at most half its block's scale; of a sum, half the scale of each of T
contributions, and in an all-reduce half the scale of the sum in addition.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.codecs.block_codec import ENCODED_DTYPES, Codec, NumberFormat, make_codec
from engine.kernels.dispatch import Kernels
from engine.parallel.comm.comm import Comm, Pending
from engine.parallel.comm.traffic import Op
from engine.parallel.grid import Axis

Exchange = Callable[[Tensor, Tensor], Pending]
"""Function (received, given) that starts an all-to-all of the rows of both, [ranks, bytes]."""


def sum_messages(given_Rm: Tensor, out_s: Tensor, codec: Codec, exchange: Exchange) -> Pending:
    """Starts to sum encoded messages over ranks: row r of ``given_Rm`` [ranks, bytes] goes to rank r.

    After the returned handle's wait, ``out_s`` is the sum of the received rows, decoded by ``codec``. ``exchange``:
    function (receive buffer, ``given_Rm``) that starts the all-to-all.
    """
    received_Rm = torch.empty_like(given_Rm)
    return exchange(received_Rm, given_Rm).then(partial(codec.add, received_Rm, out_s))


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """Number format of quantized activations and activation gradients in the collectives of one axis."""

    wire: NumberFormat
    labels: frozenset[str] = frozenset()
    """Labels of encoded collectives; all others are sent unencoded."""

    def message_bytes(self, elements: int) -> int:
        """Returns the bytes of an encoded message of ``elements`` numbers, padded to whole quantization blocks."""
        return self.wire.message_bytes(self.wire.padded(elements))

    def shortens(self, dtype: torch.dtype, elements: int) -> bool:
        """Returns True if encoding shortens a message of ``elements`` numbers of ``dtype``.

        Only fp32, bf16 and fp16 can be encoded.
        """
        return dtype in ENCODED_DTYPES and self.message_bytes(elements) < elements * dtype.itemsize

    def encodes(self, label: str, dtype: torch.dtype, elements: int, ranks: int) -> bool:
        """Returns True if a collective over ``ranks`` ranks is encoded, which requires that ``label`` is in the
        attribute ``labels`` and that encoding shortens one rank's share.

        ``elements``: numbers of ``dtype`` in the full tensor.
        """
        return label in self.labels and self.shortens(dtype, -(-elements // ranks))

    def collectives(self, op: Op, elements: int, ranks: int) -> tuple[tuple[Op, int], ...]:
        """Returns the encoded collectives that replace ``op`` over ``ranks`` ranks, as pairs (collective, bytes of the
        full encoded tensor).

        ``op``: "all_reduce", "reduce_scatter" or "all_gather". ``elements``: numbers in the full tensor of ``op``.
        """
        size = ranks * self.message_bytes(-(-elements // ranks))
        if op == "all_reduce":
            return ("all_to_all", size), ("all_gather", size)
        return (("all_to_all" if op == "reduce_scatter" else "all_gather", size),)


class EncodedCollectives:
    """Collectives over one axis that send quantized numbers; tensors are contiguous, in fp32, bf16 or fp16.

    In shapes, p is the number of elements of one rank's slice. All ranks must wait for their all-reduces in the same
    order.
    """

    def __init__(self, comm: Comm, axis: Axis, form: ActivationFormat, kernels: Kernels) -> None:
        self._comm, self._axis, self._form, self._codec = comm, axis, form, make_codec(form.wire, kernels)
        self._members = tuple(range(comm.grid.size(axis)))

    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, label: str) -> Pending:
        """Starts to sum ``tensor`` in place over the axis, by one encoded all-to-all and one encoded all-gather."""
        size = self._form.wire.padded(-(-tensor.numel() // len(self._members)))
        values_Ts = _padded(tensor.view(1, -1), len(self._members) * size).view(-1, size)
        sum_s = torch.empty(size, dtype=torch.float32, device=tensor.device)
        return self._sum(values_Ts, sum_s, label).then(partial(self._spread, sum_s, tensor, label))

    @torch.no_grad()
    def reduce_scatter(self, part_p: Tensor, full: Tensor, label: str) -> Pending:
        """Starts to sum ``full`` [ranks * p] over the axis into this rank's slice ``part_p`` [p], by one encoded
        all-to-all.
        """
        values_Ts = self._rows(full)
        if values_Ts.shape[1] == part_p.numel():
            return self._sum(values_Ts, part_p, label)
        sum_s = part_p.new_empty(values_Ts.shape[1])
        return self._sum(values_Ts, sum_s, label).then(partial(_keep_rows, sum_s.view(1, -1), part_p))

    @torch.no_grad()
    def all_gather(self, full: Tensor, part_p: Tensor, label: str) -> Pending:
        """Starts to concatenate every rank's ``part_p`` [p] into ``full`` [ranks * p], by one encoded all-gather."""
        size = self._form.wire.padded(part_p.numel())
        own_m = self._codec.encode(_padded(part_p.view(1, -1), size)).view(-1)
        full_Tm = own_m.new_empty((len(self._members), own_m.numel()))
        pending = self._comm.all_gather(full_Tm.view(-1), own_m, self._axis, label)
        return pending.then(partial(self._decode, full_Tm, full, size))

    def _sum(self, values_Ts: Tensor, sum_s: Tensor, label: str) -> Pending:
        exchange = partial(self._comm.all_to_all, members=self._members, label=label, axis=self._axis)
        return sum_messages(self._codec.encode(values_Ts), sum_s, self._codec, exchange)

    @torch.no_grad()
    def _spread(self, sum_s: Tensor, tensor: Tensor, label: str) -> None:
        """Gather the sums of all ranks into ``tensor``."""
        size = sum_s.numel()
        own_m = self._codec.encode(sum_s.view(1, -1)).view(-1)
        full_Tm = own_m.new_empty((len(self._members), own_m.numel()))
        self._comm.all_gather(full_Tm.view(-1), own_m, self._axis, label).wait()
        if tensor.numel() == len(self._members) * size:
            self._codec.decode(full_Tm, tensor.view(-1, size))
            return
        values_Ts = tensor.new_empty((len(self._members), size))
        self._codec.decode(full_Tm, values_Ts)
        tensor.view(-1).copy_(values_Ts.view(-1)[: tensor.numel()])

    @torch.no_grad()
    def _decode(self, full_Tm: Tensor, full: Tensor, size: int) -> None:
        if full.numel() == len(self._members) * size:
            self._codec.decode(full_Tm, full.view(-1, size))
            return
        values_Ts = full.new_empty((len(self._members), size))
        self._codec.decode(full_Tm, values_Ts)
        _keep_rows(values_Ts, full)

    def _rows(self, full: Tensor) -> Tensor:
        """[T p] -> [T, s]."""
        values_Tp = full.view(len(self._members), -1)
        return _padded(values_Tp, self._form.wire.padded(values_Tp.shape[1]))


def _padded(values_Rp: Tensor, size: int) -> Tensor:
    """Rows of ``size`` elements, with zeros at their ends; the same memory where there are none."""
    extra = size - values_Rp.shape[1]
    return functional.pad(values_Rp, (0, extra)) if extra else values_Rp


@torch.no_grad()
def _keep_rows(values_Rs: Tensor, out: Tensor) -> None:
    """Copy the beginnings of all rows, without their padding."""
    rows_Rp = out.view(values_Rs.shape[0], -1)
    rows_Rp.copy_(values_Rs[:, : rows_Rp.shape[1]])
