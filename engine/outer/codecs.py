"""Codecs of the values that a site pushes to the outer store: a message is a run of bytes with a size known before.

    fp64, fp32, bf16   numbers in this dtype                       8, 4, 2 bytes a number
    int8, int4         codes, then an fp32 scale for each 256      1.02, 0.52 bytes a number; the last 256 may be fewer
    topk               the largest numbers of each chunk           see below

Top-k sparsification with error feedback (Stich et al. 2018) in chunks, as in SparseLoCo (arXiv 2508.15706). A chunk of
s numbers keeps k = max(1, round(density * s)), and the last chunk may be shorter:

    | index 0 | index 1 | .. |           packed, 12 bits each for chunks of 4,096, ascending inside a chunk
    | value 0 | value 1 | .. |           32 bits: fp32
    | low, high of each chunk | code 0 | code 1 | .. |        2 bits: two fp32 magnitudes a chunk, then packed codes

A code of 2 bits is a sign and a choice between the two magnitudes of its chunk: the mean absolute values of the kept
numbers up to the median, and above it.

A number that is not finite never becomes finite: every codec decodes it, or its chunk, to a number that is not finite.

Shape suffixes: n values, m bytes of a message, C chunks, k kept numbers of a chunk, s elements of a chunk, t kept
numbers of all chunks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.codecs.block_codec import BlockFormat, CastFormat, Codec, NumberFormat, make_codec
from engine.kernels.dispatch import REFERENCE

BLOCK = 256
"""Elements per scale of int8 and int4."""
_FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
    {
        "fp64": CastFormat(torch.float64),
        "fp32": CastFormat(torch.float32),
        "bf16": CastFormat(torch.bfloat16),
        "int8": BlockFormat(8, BLOCK),
        "int4": BlockFormat(4, BLOCK),
    }
)
DELTA_CODECS = (*_FORMATS, "topk")
"""Names that :func:`make_delta_codec` accepts."""
VALUE_BITS = (32, 2)
"""Bits per value that top-k can send."""
_BYTE = 8
_MAGNITUDES = 2
_WIDEST = 8
"""Largest element size in bytes: a message starts at a multiple, since torch views its bytes as numbers."""


class DeltaCodec(Protocol):
    """Interface of codecs that encode gradients or weight differences before a training site sends them.

    A message is a 1-D uint8 tensor on the host.
    """

    @property
    def name(self) -> str:
        """Name of the codec in the configuration, such as "int8" or "topk"."""

    @property
    def lossless(self) -> bool:
        """True if ``decode`` returns the encoded fp64 values unchanged, bit for bit."""

    def message_bytes(self, n: int) -> int:
        """Returns the exact size in bytes of a message of ``n`` values."""

    def encode(self, values_n: Tensor) -> Tensor:
        """Encodes ``values_n``, fp64 or fp32 [n], and returns the message, uint8 [``message_bytes(n)``]."""

    def decode(self, message_m: Tensor, n: int) -> Tensor:
        """Decodes ``message_m`` and returns its ``n`` values, fp64 [n].

        Raises:
            ValueError: the message has a wrong size, or a top-k index is out of range or out of order.
        """


def make_delta_codec(name: str, *, density: float = 0.03, bits: int = 32, chunk: int = 4096) -> DeltaCodec:
    """Returns the codec called ``name``, one of ``DELTA_CODECS``. Only "topk" reads the other arguments.

    Args:
        density: share of the elements of each chunk that top-k sends, above 0 and up to 1.
        bits: bits per sent value: 32 (fp32), or 2 (one for its sign, one that replaces its magnitude by the mean of the
            lower or of the upper half of the chunk's sent magnitudes).
        chunk: number of elements of a chunk.

    Raises:
        ValueError: no codec has this name, or an argument is out of its range.
    """
    if name in _FORMATS:
        return _WholeNumbers(name, _FORMATS[name], make_codec(_FORMATS[name], REFERENCE))
    if name != "topk":
        raise ValueError(f"no codec is called {name!r}; take one of {', '.join(DELTA_CODECS)}.")
    if not 0 < density <= 1:
        raise ValueError(f"topk has a density of {density}, and keeps a share above 0 and up to 1; give 0.03.")
    if bits not in VALUE_BITS:
        raise ValueError(f"topk has values of {bits} bits, and sends 32 or 2 bits; give one of them.")
    if chunk < 1:
        raise ValueError(f"topk has chunks of {chunk} elements, and needs at least 1; give 4096.")
    return _LargestNumbers(density, bits, chunk)


@dataclass(frozen=True, slots=True)
class _WholeNumbers:
    """Codec that sends every number, by a codec of the kernels."""

    name: str
    wire: NumberFormat
    codec: Codec

    @property
    def lossless(self) -> bool:
        return isinstance(self.wire, CastFormat) and self.wire.dtype is torch.float64

    def message_bytes(self, n: int) -> int:
        return self.wire.message_bytes(self.wire.padded(n)) - self._code_bytes(n)[1]

    def encode(self, values_n: Tensor) -> Tensor:
        n = len(values_n)
        if not n:
            return torch.empty(0, dtype=torch.uint8)
        whole_m = self.codec.encode(F.pad(values_n.detach(), (0, self.wire.padded(n) - n)).view(1, -1)).view(-1)
        codes, padding = self._code_bytes(n)
        return torch.cat([whole_m[:codes], whole_m[codes + padding :]]) if padding else whole_m

    def decode(self, message_m: Tensor, n: int) -> Tensor:
        aligned_m = _checked(message_m, self, n)
        out_n = torch.empty(self.wire.padded(n), dtype=torch.float64)
        codes, padding = self._code_bytes(n)
        if padding:
            aligned_m = torch.cat([aligned_m[:codes], aligned_m.new_zeros(padding), aligned_m[codes:]])
        if n:
            self.codec.decode(aligned_m.view(1, -1), out_n.view(1, -1))
        return out_n[:n]

    def _code_bytes(self, n: int) -> tuple[int, int]:
        """Returns the bytes of ``n`` codes, and those of the codes that fill the last block, which are not sent."""
        if isinstance(self.wire, CastFormat):
            return self.wire.message_bytes(n), 0
        codes = -(-n * self.wire.bits // _BYTE)
        return codes, self.wire.code_bytes(self.wire.padded(n)) - codes


@dataclass(frozen=True, slots=True)
class _LargestNumbers:
    """Codec that sends the numbers of largest magnitude in each chunk, with their indexes."""

    density: float
    bits: int
    chunk: int
    name: str = "topk"
    lossless: bool = False

    def message_bytes(self, n: int) -> int:
        return sum(self._sections(n))

    @torch.no_grad()
    def encode(self, values_n: Tensor) -> Tensor:
        indexes, kept, magnitudes, codes = [], [], [], []
        for values_Cs in self._tables(values_n):
            index_Ck, kept_Ck = _largest(values_Cs, self._kept(values_Cs.shape[1]))
            indexes.append(index_Ck.flatten())
            if self.bits == VALUE_BITS[0]:
                kept.append(kept_Ck.float().flatten())
            else:
                magnitude_C2, code_Ck = _two_magnitudes(kept_Ck.float())
                magnitudes.append(magnitude_C2.flatten())
                codes.append(code_Ck.flatten())
        if not indexes:
            return torch.empty(0, dtype=torch.uint8)
        index_m = _packed(torch.cat(indexes), self._index_bits)
        if self.bits == VALUE_BITS[0]:
            return torch.cat([index_m, torch.cat(kept).view(torch.uint8)])
        return torch.cat([index_m, torch.cat(magnitudes).view(torch.uint8), _packed(torch.cat(codes), self.bits)])

    @torch.no_grad()
    def decode(self, message_m: Tensor, n: int) -> Tensor:
        sections = torch.split(_checked(message_m, self, n), self._sections(n))
        counts_C = self._counts(n)
        chunk_t = torch.repeat_interleave(counts_C)
        index_t = _unpacked(sections[0], self._index_bits, len(chunk_t))
        place_t = chunk_t * self.chunk + index_t
        self._refuse_places(index_t, place_t, n)
        value_section = sections[1].clone().view(torch.float32)  # a copy starts at an aligned address
        if self.bits == VALUE_BITS[0]:
            value_t = value_section.double()
        else:
            code_t = _unpacked(sections[2], self.bits, len(chunk_t))
            magnitude_t = value_section.double()[chunk_t * _MAGNITUDES + (code_t >> 1)]
            value_t = torch.where((code_t & 1).bool(), -magnitude_t, magnitude_t)
        return torch.zeros(n, dtype=torch.float64).index_copy_(0, place_t, value_t)

    @property
    def _index_bits(self) -> int:
        return (self.chunk - 1).bit_length()

    def _kept(self, size: int) -> int:
        return max(1, round(self.density * size))

    def _counts(self, n: int) -> Tensor:
        """Returns the kept numbers of each chunk, int64 [C]."""
        whole, rest = divmod(n, self.chunk)
        counts = [self._kept(self.chunk)] * whole + ([self._kept(rest)] if rest else [])
        return torch.tensor(counts, dtype=torch.int64)

    def _sections(self, n: int) -> list[int]:
        """Returns the bytes of the parts of a message: indexes, then fp32 numbers, then codes of 2 bits."""
        whole, rest = divmod(n, self.chunk)
        count = whole * self._kept(self.chunk) + (self._kept(rest) if rest else 0)
        index_bytes = -(-count * self._index_bits // _BYTE)
        if self.bits == VALUE_BITS[0]:
            return [index_bytes, 4 * count]
        return [index_bytes, 4 * _MAGNITUDES * (whole + (rest > 0)), -(-count * self.bits // _BYTE)]

    def _tables(self, values_n: Tensor) -> Iterator[Tensor]:
        """Yields the whole chunks as one table, then the shorter last chunk as a table of one row."""
        end = len(values_n) // self.chunk * self.chunk
        if end:
            yield values_n[:end].view(-1, self.chunk)
        if end < len(values_n):
            yield values_n[end:].view(1, -1)

    def _refuse_places(self, index_t: Tensor, place_t: Tensor, n: int) -> None:
        """Refuses indexes outside their chunk, and indexes that repeat or do not ascend."""
        if not len(place_t):
            return
        if int(index_t.max()) >= self.chunk or int(place_t[-1]) >= n:
            raise ValueError(
                f"a message of topk names an element after the last one of {n:,} values in chunks of {self.chunk:,}; "
                "encode and decode with the same number of values and the same chunk."
            )
        if bool((place_t[1:] <= place_t[:-1]).any()):
            raise ValueError(
                "a message of topk has indexes that do not ascend, and each element has one value; push it again."
            )


def _checked(message_m: Tensor, codec: DeltaCodec, n: int) -> Tensor:
    """Returns the message at an aligned address; refuses a message of another size or dtype."""
    if message_m.dtype is not torch.uint8 or message_m.dim() != 1:
        raise ValueError(
            f"a message of {codec.name} is a tensor of {message_m.dtype} with {message_m.dim()} dims, "
            "and has to be one run of uint8; pass the bytes as they came."
        )
    if len(message_m) != codec.message_bytes(n):
        raise ValueError(
            f"a message of {codec.name} has {len(message_m):,} bytes, and {n:,} values take "
            f"{codec.message_bytes(n):,} bytes; encode and decode with the same codec and number of values."
        )
    is_aligned = (
        message_m.is_contiguous() and message_m.storage_offset() % _WIDEST == message_m.data_ptr() % _WIDEST == 0
    )
    return message_m if is_aligned else message_m.clone()


def _largest(values_Cs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the indexes, ascending, and values of the ``count`` largest magnitudes of each chunk.

    Numbers that are not finite come first, so that a message contains one of them if its chunk does.
    """
    size_Cs = torch.where(values_Cs.isfinite(), values_Cs.abs(), torch.inf)
    index_Ck = size_Cs.topk(count, dim=1).indices.sort(dim=1).values
    return index_Ck, values_Cs.gather(1, index_Ck)


def _two_magnitudes(kept_Ck: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the low and the high magnitude of each chunk, fp32 [C, 2], and the codes of its numbers."""
    size_Ck = kept_Ck.abs()
    upper_Ck = size_Ck > size_Ck.median(dim=1, keepdim=True).values
    magnitudes = []
    for half_Ck in (~upper_Ck, upper_Ck):
        # an empty half has no mean, and its magnitude is never read
        total_C = torch.where(half_Ck, size_Ck, 0.0).sum(dim=1, dtype=torch.float64)
        magnitudes.append((total_C / half_Ck.sum(dim=1).clamp_min(1)).float())
    return torch.stack(magnitudes, dim=1), (kept_Ck < 0).long() + 2 * upper_Ck.long()


def _packed(codes_t: Tensor, width: int) -> Tensor:
    """Packs codes of ``width`` bits, the first into the lowest bits, and fills the last byte with zeros."""
    group = _BYTE // gcd(width, _BYTE)  # codes that fill whole bytes
    padded = F.pad(codes_t, (0, -len(codes_t) % group)).view(-1, group, 1)
    bits = padded.bitwise_right_shift(torch.arange(width)).bitwise_and_(1).to(torch.uint8)
    weights = 2 ** torch.arange(_BYTE, dtype=torch.uint8)
    packed_m = (bits.view(-1, _BYTE) * weights).sum(dim=1, dtype=torch.uint8)
    return packed_m[: -(-len(codes_t) * width // _BYTE)]


def _unpacked(packed_m: Tensor, width: int, count: int) -> Tensor:
    """Returns the ``count`` codes of :func:`_packed`, int64."""
    if not width or not count:
        return torch.zeros(count, dtype=torch.int64)
    bits = packed_m.unsqueeze(1).bitwise_right_shift(torch.arange(_BYTE, dtype=torch.uint8)).bitwise_and_(1)
    bits_tw = bits.view(-1)[: count * width].view(count, width)
    return (bits_tw.long() << torch.arange(width)).sum(dim=1)


@torch.no_grad()
def encode_with_feedback(codec: DeltaCodec, values_n: Tensor, residual_n: Tensor, decay: float = 1.0) -> Tensor:
    """Encodes ``values_n`` [n] with error feedback (Seide et al. 2014), and returns the message, uint8 [m].

        wanted = values + decay * residual;  message = encode(wanted);  residual = wanted - decode(message)

    Overwrites ``residual_n``, fp32 [n], the previous message's encoding error, with the new error, in which non-finite
    elements become 0.
    """
    wanted_n = values_n.detach().double() + decay * residual_n.double()
    message_m = codec.encode(wanted_n)
    error_n = wanted_n - codec.decode(message_m, len(wanted_n))
    residual_n.copy_(error_n.nan_to_num_(0.0, 0.0, 0.0))
    return message_m
