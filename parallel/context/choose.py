"""Choice of the method by which queries meet keys: bytes, exposed seconds and memory of each. Pure arithmetic.

b rows, S keys, n ranks, h and h_kv query and key heads of d and e elements; bytes that one rank sends in forward:

    gather    b S h_kv (d + e) (n - 1) / n           memory b S h_kv (d + e)
    ring      the same, behind the blocks            memory of two parcels
    heads     b S (h + h_kv) (d + e) (n - 1) / n^2   memory b S (h + h_kv) (d + e) / n
    need      the needed keys only                   memory of the needed keys
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from engine.parallel.comm.traffic import megabytes

Method = Literal["gather", "need", "heads", "ring"]

GAIN = 0.9
"""A method replaces gather if its exposed seconds are at most this fraction of those of gather."""


class AttentionRates(NamedTuple):
    """Speed of a GPU's attention and of the links between context ranks, equal on all ranks."""

    flops: float
    """FLOP/s of attention."""
    bandwidth: float
    """Bytes per second that a rank sends."""
    latency: float
    """Seconds of a call."""
    source: str


ASSUMED = AttentionRates(4e14, 5e10, 2e-5, "assumed rates")
"""Rates of a GPU of an unknown type."""


class AskedMethod(NamedTuple):
    """Configured method of context-parallel attention; ``method`` "auto" chooses one by the speeds ``rates``."""

    method: Method | Literal["auto"]
    rates: AttentionRates = ASSUMED


class AttentionSizes(NamedTuple):
    """Sizes of one attention call that determine the cost of each method, equal on all ranks."""

    ranks: int
    rows: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    width: int
    """Elements of a key and a value of one head."""
    element: int
    causal: bool
    sent: int | None = None
    """Most elements of needed keys and values that a rank sends; None: unknown."""
    needed: int | None = None
    """Most keys that a rank needs."""
    uneven: float = 1.0
    """Work of the rank with the most, divided by the mean; the heads of a rank have equal work."""

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values of all ranks."""
        return self.rows * self.keys * self.key_heads * self.width * self.element

    @property
    def flops(self) -> float:
        """Forward FLOPs of attention on one rank, if the ranks have equal work."""
        pairs = self.queries * self.keys / (2 if self.causal else 1)
        return 2 * self.rows * self.heads * self.width * pairs / self.ranks

    @property
    def served(self) -> int:
        """Number of key heads that one rank needs if the ranks divide the query heads evenly; at least 1."""
        return max(1, self.key_heads // self.ranks)


class MethodCost(NamedTuple):
    """Cost of one attention method in one forward on one rank: bytes sent, seconds not hidden by computation, and
    memory for keys and values (method "heads": for queries and outputs too).
    """

    bytes: int
    exposed: float
    """Seconds of communication that no computation hides, and of waits for the rank with the most work."""
    memory: int


def costs_of(form: AttentionSizes, rates: AttentionRates = ASSUMED) -> Mapping[Method, MethodCost]:
    """Returns the cost of each context-parallel attention method that can run with the sizes ``form``.

    "heads" requires a number of heads that is divisible by the number of ranks; "need" requires that ``form.sent`` and
    ``form.needed`` are not None; "gather" and "ring" always can run.
    """
    away, whole = form.ranks - 1, form.key_bytes
    gathered = whole * away // form.ranks
    bandwidth, latency = rates.bandwidth, rates.latency
    step, block = whole / form.ranks / bandwidth + latency, form.flops / rates.flops / form.ranks
    waits = (form.uneven - 1) * form.flops / rates.flops  # for the rank with the most work
    found: dict[Method, MethodCost] = {
        "gather": MethodCost(gathered, waits + gathered / bandwidth + latency, whole),
        "ring": MethodCost(gathered, waits + away * max(latency, step - block), 2 * whole // form.ranks),
    }
    if form.heads % form.ranks == 0:
        moved = (
            form.rows * form.width * form.element * (form.queries * form.heads // form.ranks + form.keys * form.served)
        )
        sent = moved * away // form.ranks
        found["heads"] = MethodCost(sent, sent / bandwidth + 4 * latency, moved)
    if form.sent is not None and form.needed is not None:
        sent = form.sent * form.element
        found["need"] = MethodCost(sent, waits + sent / bandwidth + latency, whole * form.needed // max(form.keys, 1))
    return MappingProxyType(found)


def choose_method(form: AttentionSizes, limit: int | None, rates: AttentionRates = ASSUMED) -> tuple[Method, str]:
    """Returns the attention method (gather, need, heads or ring) with the least exposed time, and the reason as text.

    Considers methods that need at most ``limit`` bytes of memory (None: all), or ring if there are none. Gather is
    preferred unless another method has at most 90 % of gather's exposed time.
    """
    costs = costs_of(form, rates)
    fits = {name: cost for name, cost in costs.items() if limit is None or cost.memory <= limit} or {
        "ring": costs["ring"]
    }
    best = min(fits, key=lambda name: fits[name].exposed)
    if "gather" in fits and fits[best].exposed > GAIN * fits["gather"].exposed:
        best = "gather"
    cost, plain = costs[best], costs["gather"]
    reason = f"{megabytes(cost.bytes)} sent, {cost.exposed * 1e3:.2f} ms exposed, {megabytes(cost.memory)} of keys"
    if best != "gather":
        reason += f"; gather: {megabytes(plain.bytes)}, {plain.exposed * 1e3:.2f} ms, {megabytes(plain.memory)}"
    return best, f"{reason}; {rates.source}"
