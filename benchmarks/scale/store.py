"""Counts the requests of one rank to the job's store at start-up, and answers for all other ranks."""

import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import sha256

from engine.parallel.comm.rendezvous import JointCalls, Rendezvous

GIVEN = {f"model blocks.{block}.weight": "(1024, 1024) torch.bfloat16" for block in range(2000)}
"""Arguments of a rank, of any length: only digests are compared."""


@dataclass
class CountingStore:
    """Store in memory that counts requests; all other ranks have joined with equal arguments."""

    size: int
    values: dict[str, bytes] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
    """Bytes of keys and values that this rank has sent and received."""
    keys: set[str] = field(default_factory=set)
    """Keys that this rank has set."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key; other ranks respond at once."""
        self._count("set", len(key) + len(value))
        self.keys.add(key)
        self.values[key] = value.encode()
        if key.startswith("answer/"):  # the asked rank takes the answer
            word, name = value.split()
            self.values[f"{name}/come/{key.partition('/')[2]}"] = word.encode()

    def get(self, key: str, /) -> bytes:
        """Returns the value of ``key``."""
        self._count("get", len(key) + len(self.values[key]))
        return self.values[key]

    def check(self, keys: list[str], /) -> bool:
        """Returns True if all keys exist."""
        self._count("check", sum(map(len, keys)))
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Checks that all keys exist in the store."""
        self._count("wait", sum(map(len, keys)))
        assert all(key in self.values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        """Returns the number of ranks: all others have added already."""
        self._count("add", len(key))
        self.keys.add(key)
        return self.size

    def delete_key(self, key: str, /) -> bool:
        """Deletes a key; returns True if it existed."""
        self._count("delete_key", len(key))
        return self.values.pop(key, None) is not None

    def _count(self, call: str, size: int) -> None:
        self.calls[call] += 1
        self.moved_bytes += size


class AnsweringStore(CountingStore):
    """Store in which rank 0 answers each hello at once."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key; if it is a hello, also sets rank 0's answer."""
        super().set(key, value)
        if key.startswith("hello/"):
            self.values[f"answer/{key.partition('/')[2]}"] = f"{value.split()[0]} meeting".encode()


def start_over_store(size: int, rank: int) -> CountingStore:
    """Runs the rendezvous and a first joint call as one rank; returns the store."""
    host, digest = CountingStore(size), sha256(json.dumps(GIVEN).encode()).hexdigest()
    host.values |= {f"hello/{other}": f"word{other} {digest}".encode() for other in range(1, size)}
    rendezvous = Rendezvous(host, 0, size, "a store", 60.0)
    assert rendezvous.meet(GIVEN) is None
    store = host
    if rank:
        store = AnsweringStore(size)
        store.values["meeting/verdict"] = host.values[f"{rendezvous.name}/verdict"]
        assert Rendezvous(store, rank, size, "a store", 60.0).meet(GIVEN) is None
    JointCalls(store, rank, size, 60.0).join("eval_batch")
    return store
