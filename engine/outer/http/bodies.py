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
    """Refusal (HTTP status 422) of bytes that the network has damaged. The sender sends these bytes again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 422)


@dataclass(frozen=True, slots=True)
class BodyKey:
    """Identity of one body: the payload of a push or of initial weights, which one rank sends for one group of tensors.

    ``life`` is the number of a run of a training site, ``fragment`` of the group of tensors, and ``seq`` of the push;
    ``seq`` is -1 for initial weights. A body with another ``seq`` replaces an unfinished body of the same life, rank
    and fragment.
    """

    life: int
    rank: int
    fragment: int
    seq: int
    """Number of the push; -1 for initial weights."""

    @property
    def place(self) -> tuple[int, int, int]:
        """The triple of life (run of a site), rank and fragment. The store receives at most one body at a time for each
        triple.
        """
        return self.life, self.rank, self.fragment


@dataclass(frozen=True, slots=True)
class BodyRange:
    """Position of a range of bytes in a body (payload of a push or of initial weights); one request carries one
    range.
    """

    offset: int
    total: int
    """Bytes of the whole body."""
    hash: str
    """Hash of this range."""
    whole: str
    """Hash of the whole body."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Reply of the store to a range: the number of bytes that have arrived without a gap, and the state of the push.

    The state is None until the body is complete.
    """

    arrived: int
    state: PushState | None


def digest(data: bytes | bytearray | memoryview) -> str:
    """Returns the xxh3-64 hash of ``data``, as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous tensor on the host, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_from(data: bytearray) -> Tensor:
    """Returns ``data`` as a tensor, uint8 [bytes], without a copy."""
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def frame(head: object, data: bytes | memoryview = b"") -> bytes:
    """Returns the content of one request: 4 bytes with the length of the JSON, ``head`` as JSON, then the bytes
    ``data``.
    """
    text = dump_json(head)
    return b"".join((_LENGTH.pack(len(text)), text, data))


class FrameReader:
    """Reader of the content of one request, as ``frame`` makes it, while the content arrives in pieces.

    It refuses a request as soon as its JSON is longer than 1 MiB or its range longer than 4 MiB.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._head = -1

    def add(self, data: bytes) -> None:
        """Appends the next bytes of the request.

        Raises:
            StoreRefusedError: the JSON or the range is longer than its maximum.
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
        """True once all bytes of the JSON have arrived."""
        return 0 <= self._head <= len(self._data) - _LENGTH.size

    @property
    def head(self) -> bytes:
        """Bytes of the JSON."""
        return bytes(self._data[_LENGTH.size : _LENGTH.size + self._head])

    @property
    def data(self) -> memoryview:
        """View of the bytes of the range that have arrived."""
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
    """Bodies, the payloads of pushes and initial weights, that a store receives in ranges of bytes.

    For each life (run of a site), rank and fragment (group of tensors), it has the body that is under way, and the
    reply to the last complete body.
    """

    under_way: dict[tuple[int, int, int], _Upload] = field(default_factory=dict)
    finished: dict[tuple[int, int, int], tuple[BodyKey, str, Arrived]] = field(default_factory=dict)

    def arrived(self, key: BodyKey, whole: str) -> Arrived:
        """Returns the number of arrived bytes of the body ``key`` and, if the body is complete, the state of its push.

        Args:
            whole: hash of the whole body; if the store has begun a body with another hash, the number is 0.
        """
        last, upload = self.finished.get(key.place), self.under_way.get(key.place)
        if last is not None and last[:2] == (key, whole):
            return last[2]
        is_known = upload is not None and (upload.key, upload.whole) == (key, whole)
        return Arrived(upload.arrived if upload is not None and is_known else 0, None)

    def add(self, key: BodyKey, part: BodyRange, data: memoryview, now: float) -> bytearray | None:
        """Adds the range ``part`` with bytes ``data`` to the body ``key``.

        Returns the whole body if it is now complete, else None. Ignores a range that does not begin where the arrived
        bytes end. A complete body stays here until ``finish`` or ``drop``, so that a store with a full disk can store
        it later.

        Args:
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
        """Removes the complete body ``key`` with hash ``whole``, and stores ``result`` as the reply to repeated
        requests for this body.
        """
        self.drop(key)
        self.finished[key.place] = key, whole, result

    def drop(self, key: BodyKey) -> None:
        """Removes the unfinished body with the life, rank and fragment of ``key``, if there is one."""
        self.under_way.pop(key.place, None)

    def forget_others(self, lives: Collection[int]) -> None:
        """Removes all bodies and replies, except for the lives (runs of training sites) in ``lives``."""
        self.under_way = {place: one for place, one in self.under_way.items() if place[0] in lives}
        self.finished = {place: one for place, one in self.finished.items() if place[0] in lives}

    def expire(self, now: float) -> None:
        """Removes unfinished bodies of which no range has arrived in the ten minutes before ``now`` (seconds)."""
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
    """Bodies with merged weights that a store sends in ranges of bytes.

    For each life (run of a site), rank and fragment (group of tensors), it has the body that is under way.
    """

    under_way: dict[tuple[int, int, int], _Download] = field(default_factory=dict)

    def find(self, place: tuple[int, int, int], version: int, now: float) -> tuple[memoryview, str] | None:
        """Returns the bytes of the body under way at ``place`` and their hash; None if there is no body of this
        ``version``.

        Args:
            place: (life, rank, fragment) of the body.
            now: time in seconds, from which ``expire`` counts.
        """
        found = self.under_way.get(place)
        if found is None or found.version != version:
            return None
        found.used = now
        return found.data, found.hash

    def keep(self, place: tuple[int, int, int], version: int, body: tuple[memoryview, str], now: float) -> None:
        """Stores ``body``, bytes and their hash, so that requests for its further ranges need not read the store.

        Args:
            place: (life, rank, fragment) of the body.
            version: version of the fragment that the body contains.
            now: time in seconds, from which ``expire`` counts.
        """
        self.under_way[place] = _Download(version, *body, now)

    def drop(self, place: tuple[int, int, int]) -> None:
        """Removes the body under way at ``place`` (life, rank, fragment); a later request makes the body again."""
        self.under_way.pop(place, None)

    def forget_others(self, lives: Collection[int]) -> None:
        """Removes all bodies, except for the lives (runs of training sites) in ``lives``."""
        self.under_way = {place: one for place, one in self.under_way.items() if place[0] in lives}

    def expire(self, now: float) -> None:
        """Removes bodies of which no range was requested in the ten minutes before ``now`` (seconds)."""
        for place in [place for place, one in self.under_way.items() if now - one.used > _IDLE_SECONDS]:
            del self.under_way[place]
