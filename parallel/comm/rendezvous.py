"""Messages between ranks through the store of the job: before there are groups, after one has failed, and before
rare calls that all of them have to make.

    ranks 1 ..   hello: a word of this start, and a digest of the arguments of the rank
    rank 0       answers each hello with that word and the name of this meeting, until all have come
    all          use keys under that name from here on; where digests differ, rank 0 finds the first difference

A store may outlive a start: torchrun keeps it when it restarts a job, with everything that the ranks before have
written, addresses too. A rank takes an answer for its own only if it contains its own word, so nothing that is left
over can be mistaken for an answer, and the name is new each time, however often and on which nodes a job was restarted.
"""

import atexit
import json
import logging
import secrets
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256
from typing import Protocol, TypedDict

from engine.errors import EngineError, GridError, first_line
from engine.parallel.comm.flight.flight import rank_runs, ranks_of

logger = logging.getLogger("trine")
_POLL_SECONDS = 0.01
_GRACE_SECONDS = 5.0
"""Seconds that other ranks wait longer than rank 0, which sends them the list of absent ranks."""
SLOW_SECONDS = 10.0
"""Seconds of waiting in a joint call after which a rank logs the missing ranks."""
_MOST_PAUSE_SECONDS = 0.25
JOINED_CALLS = 3
"""Number of calls of each name that all ranks join."""
_ALL = "call it on every rank, outside of any `if rank == 0:` block."
_REPORT_SECONDS = 2.0
"""Seconds that a rank with failed communication waits for reports of others, which notice at the same time."""


class KeyStore(Protocol):
    """Interface of a key-value store, a part of ``torch.distributed.Store``; each method may raise RuntimeError."""

    def set(self, key: str, value: str, /) -> None:
        """Sets ``key`` to ``value`` in the store."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of ``key``, which must exist."""

    def check(self, keys: list[str], /) -> bool:
        """Returns True if all of ``keys`` exist."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Blocks until all ``keys`` exist; raises after ``timeout``."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds ``amount`` to the integer at ``key`` (0 if ``key`` is missing); returns the sum."""

    def delete_key(self, key: str, /) -> bool:
        """Deletes ``key``; returns True if it existed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Setting with different values on different ranks: its name, and the ranks with each value."""

    key: str
    values: tuple[tuple[tuple[int, ...], str | None], ...]
    """Pairs (ranks, their value), rank 0's first; None: these ranks lack the key."""

    def __str__(self) -> str:
        told = (f"{'absent' if value is None else value} on {name_ranks(ranks)}" for ranks, value in self.values)
        return f"{self.key} is {' and '.join(told)}"


class _Verdict(TypedDict):
    """Verdict that rank 0 sends to all ranks."""

    missing: list[tuple[int, int, int]]
    """Ranks that have not come, as ``rank_runs`` tells them."""
    alike: list[list[tuple[int, int, int]]]
    """Ranks that were given the same, in groups; one group if all were. Every rank reads it, so it is short."""
    seconds: float
    """Seconds for which rank 0 has waited."""


@dataclass(slots=True)
class Rendezvous:
    """Meeting of all ranks of a job through its key-value store, to compare settings; every rank calls :meth:`meet`."""

    store: KeyStore
    rank: int
    size: int
    place: str
    """Description of the meeting for error messages."""
    seconds: float
    name: str = ""
    """Prefix of the meeting's keys in the store, set by :meth:`meet`."""
    _heard: dict[int, str] = field(default_factory=dict)

    def meet(self, given: Mapping[str, str]) -> Difference | None:
        """Waits for all ranks and compares their settings. ``given``: this rank's values, by name of the setting.

        Returns the first setting with different values, or None; the result is equal on all ranks.

        Raises:
            GridError: ranks did not come within the attribute ``seconds``; the message names them.
        """
        text = json.dumps(dict(given))
        word = f"{secrets.token_hex(8)} {sha256(text.encode()).hexdigest()}"
        try:
            verdict = self._host(word) if self.rank == 0 else self._join(word)
            alike, missing = [ranks_of(runs) for runs in verdict["alike"]], ranks_of(verdict["missing"])
            found = self._compare(alike, text) if len(alike) > 1 and not missing else None
            if found is not None or missing:
                self._leave(sorted({*range(1, self.size)} - {*missing}))
        except RuntimeError as error:
            raise GridError(
                f"rank {self.rank} has lost {self.place}, where the ranks of this job meet ({first_line(error)}): the "
                "process that holds it has ended; look for the first traceback of the job."
            ) from error
        if missing:
            raise GridError(self._missing(missing, verdict["seconds"]))
        return found

    def _leave(self, others: Sequence[int]) -> None:
        """Before an error: rank 0, which may hold the store and end now, lets the others read all of it."""
        self.store.set(f"{self.name}/read/{self.rank}", "")
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.rank == 0 and others and time.monotonic() < deadline:
            others = [rank for rank in others if not self.store.check([f"{self.name}/read/{rank}"])]
            time.sleep(_POLL_SECONDS)

    def _host(self, word: str) -> "_Verdict":
        """Rank 0: answer all ranks until they have come; tell them who has not, and who was given the same."""
        self.name, began = word.split()[0], time.monotonic()
        waiting, slow = set(range(1, self.size)), began + SLOW_SECONDS
        while waiting and time.monotonic() - began < self.seconds:
            waiting -= {rank for rank in waiting if self._answered(rank)}
            if waiting and time.monotonic() > slow:
                slow = float("inf")
                logger.warning(
                    "rank 0 has waited %g s at %s for %s, and waits up to %g s: a rank that cannot reach this address "
                    "cannot report its failure here, so look for its own output",
                    SLOW_SECONDS, self.place, name_ranks(sorted(waiting)), self.seconds,
                )  # fmt: skip
            time.sleep(_POLL_SECONDS * bool(waiting))
        alike: dict[str, list[int]] = {}
        for rank in range(self.size):
            digest = (self._heard.get(rank) or word).split()[1]
            alike.setdefault(digest, []).append(rank)
        groups = [rank_runs(ranks) for ranks in alike.values()]
        verdict = _Verdict(missing=rank_runs(sorted(waiting)), alike=groups, seconds=time.monotonic() - began)
        self.store.set(f"{self.name}/verdict", json.dumps(verdict))
        return verdict

    def _answered(self, rank: int) -> bool:
        """Answers a new hello of ``rank``; returns True if the rank has taken the answer to its newest one."""
        hello = self._read(f"hello/{rank}")
        if hello is not None and hello != self._heard.get(rank):
            self._heard[rank] = hello
            self.store.set(f"answer/{rank}", f"{hello.split()[0]} {self.name}")
        return hello is not None and self._read(f"{self.name}/come/{rank}") == hello.split()[0]

    def _join(self, word: str) -> "_Verdict":
        """Another rank: say hello, take the answer to it, and hear the verdict."""
        own, answer, began = word.split()[0], "", time.monotonic()
        deadline = began + self.seconds + _GRACE_SECONDS
        self.store.set(f"hello/{self.rank}", word)
        while not answer.startswith(own):
            if time.monotonic() > deadline:
                raise GridError(self._missing([0], time.monotonic() - began))
            time.sleep(_POLL_SECONDS * bool(answer))
            answer = self._read(f"answer/{self.rank}") or "-"
        self.name = answer.split()[1]
        self.store.set(f"{self.name}/come/{self.rank}", own)
        try:
            self.store.wait([f"{self.name}/verdict"], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except RuntimeError as error:
            raise GridError(self._missing([0], time.monotonic() - began)) from error
        verdict: _Verdict = json.loads(self.store.get(f"{self.name}/verdict"))
        return verdict

    def _compare(self, alike: Sequence[tuple[int, ...]], text: str) -> Difference | None:
        """The first difference; rank 0 reads one text of each kind and tells the result."""
        if any(self.rank == ranks[0] for ranks in alike):
            self.store.set(f"{self.name}/given/{self.rank}", zlib.compress(text.encode()).hex())
        patience = timedelta(seconds=self.seconds)
        if self.rank == 0:
            keys = [f"{self.name}/given/{ranks[0]}" for ranks in alike]
            self.store.wait(keys, patience)
            texts = [json.loads(zlib.decompress(bytes.fromhex(self.store.get(key).decode()))) for key in keys]
            found = first_difference(alike, texts)
            self.store.set(f"{self.name}/difference", json.dumps(found and [found.key, found.values]))
            return found
        self.store.wait([f"{self.name}/difference"], patience)
        told = json.loads(self.store.get(f"{self.name}/difference"))
        return told and Difference(told[0], tuple((tuple(ranks), value) for ranks, value in told[1]))

    def _read(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _missing(self, ranks: Sequence[int], seconds: float) -> str:
        return (
            f"{name_ranks(ranks)} of {self.size} did not come to {self.place} within {seconds:.0f} s, so no rank "
            f"starts; read the output of {name_ranks(ranks)}, start all ranks with the same address, or raise "
            "TRINE_TIMEOUT_SECONDS."
        )


def first_difference(alike: Sequence[tuple[int, ...]], texts: Sequence[Mapping[str, str]]) -> Difference | None:
    """Returns the first difference between the mappings ``texts``: a key with different values, or missing in some of
    them. Returns None if all are equal.

    Args:
        alike: groups of ranks; all ranks in ``alike[i]`` have the mapping ``texts[i]``.
    """
    keys = dict.fromkeys(key for text in texts for key in text)
    for key in keys:
        values = [text.get(key) for text in texts]
        if len(set(values)) == 1:
            continue
        by_value: dict[str | None, list[int]] = {}
        for ranks, value in zip(alike, values, strict=True):
            by_value.setdefault(value, []).extend(ranks)
        return Difference(key, tuple((tuple(sorted(ranks)), value) for value, ranks in by_value.items()))
    return None


def name_ranks(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Formats ``ranks`` for messages, such as ``ranks 0, 2``; names at most eight and counts the others.

    ``hosts``: host names of all ranks of the world, by rank, to add in parentheses: ``rank 3 (node1)``.
    """
    shown = [f"{rank} ({hosts[rank]})" if hosts else str(rank) for rank in ranks[:8]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}" + f" and {len(ranks) - 8} more" * (len(ranks) > 8)


class FailureReports:
    """Reports of each rank's failed collective; they show which ranks did not join it.

    Args:
        store: key-value store of the job, with this engine's prefix of keys.
    """

    def __init__(self, store: KeyStore, rank: int) -> None:
        self._store, self._rank = store, rank

    def absent(self, what: str, peers: Sequence[int]) -> str:
        """Reports that the collective ``what`` failed on this rank; returns text about the ranks that did not
        join it.

        ``peers``: all ranks of the collective. The text is '' if all report that it failed, or if nothing is known
        after a few seconds.
        """
        words: list[str] = []
        asking = threading.Thread(target=self._ask, args=(what, peers, words.append), daemon=True)
        asking.start()
        asking.join(2 * _REPORT_SECONDS)
        return words[0] if words else ""

    def tell(self, what: str) -> None:
        """Reports to other ranks that the collective ``what`` failed here; does not wait."""
        threading.Thread(target=self._ask, args=(what, (), str), daemon=True).start()

    def _ask(self, what: str, peers: Sequence[int], tell: Callable[[str], object]) -> None:
        silent, elsewhere = [rank for rank in peers if rank != self._rank], list[str]()
        deadline = time.monotonic() + _REPORT_SECONDS
        try:
            self._store.set(f"failed/{self._rank}", what)
            while silent and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                for rank in [rank for rank in silent if self._store.check([f"failed/{rank}"])]:
                    silent.remove(rank)
                    there = self._store.get(f"failed/{rank}").decode()
                    elsewhere += [f"rank {rank} was in {there}"] * (there != what)
        except RuntimeError:
            tell("rank 0 does not answer" if self._rank else "")
            return
        words = [f"{name_ranks(silent)} did not come, ended or hangs"] * bool(silent)
        tell(", ".join([*words, *elsewhere]))


class JointCalls:
    """Detector of collective engine calls, such as a save or an evaluation, that only some ranks make.

    :meth:`join` waits until all ranks have made the call, in the first three calls of each name. Training steps are not
    checked.

    Args:
        store: store of the job, with a prefix of this engine.
        seconds: timeout of the wait for a rank.
    """

    def __init__(self, store: KeyStore, rank: int, size: int, seconds: float) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._made: Counter[str] = Counter()
        self._last = ""
        """Name of the last call."""
        atexit.register(self.leave)

    def leave(self) -> None:
        """Records in the store that this rank makes no more collective engine calls, so that no rank waits for it.

        Does nothing while an exception is handled, after an uncaught one, or if the store is lost.
        """
        atexit.unregister(self.leave)
        if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            self._store.set("left", "")

    def _announce(self, call: str) -> None:
        """Write that this rank makes the call; a message or two to the store."""
        self._made[call], self._last = self._made[call] + 1, call
        with self._in_store(call):
            self._store.set(f"{self._here()}/{self._rank}", "")
            # all ranks have ended the call before the last one, since they have made the last one together
            self._store.delete_key(f"{call}/{self._made[call] - 2}/{self._rank}")

    def join(self, call: str) -> None:
        """Waits until every rank has made the call named ``call``. From the fourth time with the same name, returns at
        once.

        Raises:
            EngineError: a rank did not make the call in time, or has closed its engine.
        """
        if self._made[call] == JOINED_CALLS:
            return
        self._announce(call)
        began = time.monotonic()
        with self._in_store(call):
            if self._store.add(f"{self._here()}/count", 1) == self._size:
                self._store.set(f"{self._here()}/all", "")
            if not self._wait(min(SLOW_SECONDS, self._seconds)):
                logger.warning("%s", self._missing(time.monotonic() - began))
                if not self._wait(self._seconds - SLOW_SECONDS):
                    raise EngineError(self._missing(time.monotonic() - began))

    def _came(self) -> list[int]:
        """Ranks that have made the last call."""
        return [rank for rank in range(self._size) if self._store.check([f"{self._here()}/{rank}"])]

    def _missing(self, seconds: float) -> str:
        """Words about the ranks that have not made the last call in ``seconds``."""
        came = self._came()
        others = [rank for rank in range(self._size) if rank not in came]
        return (
            f"{self._last} was called on {name_ranks(came)}, but not on {name_ranks(others)} within {seconds:.0f} s; "
            f"{_ALL}"
        )

    def _refuse_left(self) -> None:
        """Refuse to wait for ranks that make no call any more.

        Raises:
            EngineError: names them.
        """
        left = [rank for rank in range(self._size) if self._store.check([f"left/{rank}"])]
        came = self._came()  # after the others: a rank makes its last call before it leaves
        if gone := [rank for rank in left if rank not in came]:
            raise EngineError(
                f"{self._last} was called on {name_ranks(came)}, but not on {name_ranks(gone)}, where the engine is "
                f"closed or the script has ended; {_ALL}"
            )

    def _here(self) -> str:
        return f"{self._last}/{self._made[self._last]}"

    def _wait(self, seconds: float) -> bool:
        """Returns True if all came in time. Polls the store with growing pauses: its own wait would block Ctrl-C."""
        deadline, pause = time.monotonic() + seconds, 1e-3
        while not self._store.check([f"{self._here()}/all"]):
            if self._store.check(["left"]):
                self._refuse_left()
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)
        return True

    @contextmanager
    def _in_store(self, call: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise EngineError(
                f"{call}: rank {self._rank} has lost the store of the job ({first_line(error)}): the process that "
                "holds it has ended; look for the first traceback of the job."
            ) from error
