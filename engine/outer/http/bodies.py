"""Bodies in ranges: frames of one request, and the bodies that a server receives or sends range by range.

    frame    | bytes of the JSON, 4, little-endian | JSON | bytes of this range |

A body that is longer than a range arrives in several requests, in order. The server stores whole ranges in memory and
replies how many bytes have arrived, so a connection that breaks costs one range. Nothing of a body reaches the store
before all of it has arrived with the right hash.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

from engine.outer.messages import PushState, StoreRefusedError
from engine.web.json_text import dump_json

RANGE = 4 << 20
"""Bytes of a range."""
HEAD_BYTES = 1 << 20
"""Maximum bytes of the JSON before a range."""
HASH_HEADER = "x-trine-xxh3"
"""Header with the hash of a whole body, as 16 hexadecimal digits."""
TOTAL_HEADER = "x-trine-total"
"""Header with the bytes of a whole body."""
_LENGTH = struct.Struct("<I")
_IDLE_SECONDS = 600.0


class DamagedBodyError(StoreRefusedError):
    """Refusal (HTTP status 422) of bytes that the network has damaged; the sender sends them again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 422)


@dataclass(frozen=True, slots=True)
class BodyKey:
    """Key of a body. A body is the content of a push, or initial weights, of one rank for one group of tensors."""

    life: int
    rank: int
    fragment: int
    seq: int
    """Number of the push; -1 for initial weights."""

    @property
    def place(self) -> tuple[int, int, int]:
        """Run of the site, rank and fragment; the store receives one payload at a time for each such triple."""
        return self.life, self.rank, self.fragment


@dataclass(frozen=True, slots=True)
class BodyRange:
    """Position of a range of bytes in a body (push payload or initial weights), and hashes of range and body."""

    offset: int
    total: int
    """Bytes of the whole body."""
    hash: str
    """Hash of this range."""
    whole: str
    """Hash of the whole body."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Reply to an uploaded range: the number of arrived bytes, and the push's state (None until all bytes have
    arrived).
    """

    arrived: int
    state: PushState | None


def digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the xxh3-64 hash of ``data``, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def tensor_from(data: bytearray) -> Tensor:
    """Returns ``data`` as a tensor, uint8 [bytes], without a copy."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def frame(head: object, data: bytes | memoryview = b"") -> bytes:
    """Returns the content of a request: the length of ``head`` as JSON (4 bytes, little-endian), this JSON, then
    ``data``.
    """
    text = dump_json(head)
    return b"".join((_LENGTH.pack(len(text)), text, data))


class FrameReader:
    """Reader of a request that arrives in pieces: JSON, then data, in the format that ``frame`` writes.

    It refuses JSON above 1 MiB, and data above 4 MiB.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._head = -1

    def add(self, data: bytes) -> None:
        """Appends the next bytes of the request.

        Raises:
            StoreRefusedError: the request's JSON or its data is longer than allowed.
        """
        self._data += data
        if self._head < 0 and len(self._data) >= _LENGTH.size:
            (self._head,) = _LENGTH.unpack_from(self._data)
            if self._head > HEAD_BYTES:
                raise StoreRefusedError(
                    f"the request has {self._head:,} bytes of JSON before its range, and may have {HEAD_BYTES:,}; use "
                    "the same version of trine on sites and stores.",
                    413,
                )
        if len(self._data) > _LENGTH.size + max(self._head, 0) + RANGE:
            raise StoreRefusedError(
                f"the request has a range of more than {RANGE:,} bytes; send the body in ranges of at most "
                f"{RANGE:,} bytes.",
                413,
            )

    @property
    def has_head(self) -> bool:
        """True once all bytes of the request's JSON have arrived."""
        return 0 <= self._head <= len(self._data) - _LENGTH.size

    @property
    def head(self) -> bytes:
        """Bytes of the request's JSON."""
        return bytes(self._data[_LENGTH.size : _LENGTH.size + self._head])

    @property
    def data(self) -> memoryview:
        """View of the bytes that have arrived after the request's JSON."""
        return memoryview(self._data)[_LENGTH.size + max(self._head, 0) :]


@dataclass(slots=True)
class _Upload:
    key: BodyKey
    whole: str
    data: bytearray
    arrived: int
    used: float


@dataclass(slots=True)
class Uploads:
    """Bodies (payloads of pushes, and initial weights) that a store receives in ranges of bytes.

    Each rank of a site sends one body at a time for each fragment (group of tensors).
    """

    under_way: dict[tuple[int, int, int], _Upload] = field(default_factory=dict)
    finished: dict[tuple[int, int, int], tuple[BodyKey, str, Arrived]] = field(default_factory=dict)

    def arrived(self, key: BodyKey, whole: str) -> Arrived:
        """Returns the number of arrived bytes of the body ``key`` (payload of a push or initial weights). The result's
        state is None until the whole body is stored.

        Args:
            whole: hash of the whole body; an upload that began with another hash counts as 0 bytes.
        """
        last, upload = self.finished.get(key.place), self.under_way.get(key.place)
        if last is not None and last[:2] == (key, whole):
            return last[2]
        is_known = upload is not None and (upload.key, upload.whole) == (key, whole)
        return Arrived(upload.arrived if upload is not None and is_known else 0, None)

    def add(self, key: BodyKey, part: BodyRange, data: memoryview, now: float) -> bytearray | None:
        """Appends ``data`` to the body that ``key`` identifies (payload of a push, or initial weights).

        Returns the body if it is complete, else None. Ignores a range that does not begin at the end of the arrived
        bytes.

        Args:
            part: position of ``data`` in the body, and hashes.
            now: time in seconds, from which ``expire`` counts.

        Raises:
            DamagedBodyError: the bytes of the range or of the whole body do not have the hash that ``part`` names.
            StoreRefusedError: the range ends after the end of the body.
        """
        if digest(data) != part.hash:
            raise DamagedBodyError(
                f"bytes {part.offset:,} to {part.offset + len(data):,} of a body have another hash than their "
                "sender's; send them again."
            )
        if part.offset + len(data) > part.total:
            raise StoreRefusedError(
                f"a range ends at byte {part.offset + len(data):,} of a body of {part.total:,} bytes; send at most the "
                "body.",
                413,
            )
        upload = self.under_way.get(key.place)
        if upload is None or (upload.key, upload.whole, len(upload.data)) != (key, part.whole, part.total):
            if part.offset:  # its first ranges are not here, after a restart of the store
                return None
            upload = _Upload(key, part.whole, bytearray(part.total), 0, now)
            self.under_way[key.place] = upload
        if part.offset == upload.arrived:
            upload.data[part.offset : part.offset + len(data)] = data
            upload.arrived += len(data)
            upload.used = now
        if upload.arrived < part.total:
            return None
        if digest(upload.data) != part.whole:
            del self.under_way[key.place]
            raise DamagedBodyError(f"a body of {part.total:,} bytes has another hash than its sender's; send it again.")
        return upload.data

    def finish(self, key: BodyKey, whole: str, result: Arrived) -> None:
        """Removes the complete payload identified by ``key``, with hash ``whole``; stores ``result``, which is then the
        reply to repeated uploads of the same payload.
        """
        self.drop(key)
        self.finished[key.place] = key, whole, result

    def drop(self, key: BodyKey) -> None:
        """Removes the unfinished upload for the site's run, rank and fragment in ``key``, also if it has all bytes."""
        self.under_way.pop(key.place, None)

    def forget_others(self, lives: Collection[int]) -> None:
        """Removes uploads and replies of all runs of training sites, except the runs numbered in ``lives``."""
        self.under_way = {place: one for place, one in self.under_way.items() if place[0] in lives}
        self.finished = {place: one for place, one in self.finished.items() if place[0] in lives}

    def expire(self, now: float) -> None:
        """Removes unfinished uploads of which no range has arrived in the ten minutes before ``now`` (seconds)."""
        for place in [place for place, one in self.under_way.items() if now - one.used > _IDLE_SECONDS]:
            del self.under_way[place]


@dataclass(slots=True)
class _Download:
    version: int
    data: memoryview
    hash: str
    used: float


@dataclass(slots=True)
class Downloads:
    """Merged weights that a store sends in ranges of bytes: one version at a time for each run of a site, rank and
    fragment.
    """

    under_way: dict[tuple[int, int, int], _Download] = field(default_factory=dict)

    def find(self, place: tuple[int, int, int], version: int, now: float) -> tuple[memoryview, str] | None:
        """Returns bytes and hash of the merged weights stored at ``place``; None if there are none of this ``version``.

        Args:
            place: (number of the site's run, rank, fragment) of the weights.
            now: time in seconds, from which ``expire`` counts.
        """
        found = self.under_way.get(place)
        if found is None or found.version != version:
            return None
        found.used = now
        return found.data, found.hash

    def keep(self, place: tuple[int, int, int], version: int, body: tuple[memoryview, str], now: float) -> None:
        """Stores ``body``, the pair (bytes, hash) of merged weights, from which later requests read ranges.

        Args:
            place: (number of the site's run, rank, fragment) of the weights.
            version: version of the weights.
            now: time in seconds, from which ``expire`` counts.
        """
        self.under_way[place] = _Download(version, *body, now)

    def drop(self, place: tuple[int, int, int]) -> None:
        """Removes the merged weights stored at ``place`` (number of the site's run, rank, fragment)."""
        self.under_way.pop(place, None)

    def forget_others(self, lives: Collection[int]) -> None:
        """Removes the weights stored for all runs of training sites, except the runs numbered in ``lives``."""
        self.under_way = {place: one for place, one in self.under_way.items() if place[0] in lives}

    def expire(self, now: float) -> None:
        """Removes merged weights of which no range was requested in the ten minutes before ``now`` (seconds)."""
        for place in [place for place, one in self.under_way.items() if now - one.used > _IDLE_SECONDS]:
            del self.under_way[place]
