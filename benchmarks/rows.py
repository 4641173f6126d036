"""Which modes stand in the table, and which of them are held against which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.peers import Mode
from benchmarks.report import Baseline, Comparison

Group = Literal["dp", "tp", "pp"]
GROUPS: tuple[Group, ...] = get_args(Group)

ONE = "one process, plain torch"
DDP = "torch DDP"
AGAIN = " again (control)"
"""A second team of the same mode: how far two measurements of one thing lie apart."""

# CPU seconds of Trine over those of its peer
DDP_LIMIT = 1.03
DTENSOR_LIMIT = 0.5
PIPELINING_LIMIT = 1.0


@dataclass(frozen=True, slots=True)
class Lineup:
    """The rows of a table and what is asked of them."""

    modes: tuple[Mode, ...]
    comparisons: tuple[Comparison, ...]
    baseline: Baseline

    def __add__(self, other: "Lineup") -> "Lineup":
        return Lineup(self.modes + other.modes, self.comparisons + other.comparisons, self.baseline)


def make_lineup(ranks: int, accumulation: int = 1, groups: Sequence[Group] = GROUPS) -> Lineup:
    """The rows of all ``groups`` behind the one process, which always runs: its losses are what all others must have.

    ``accumulation``: microbatches a step; a pipeline has as many as ranks, the fewest that fill it.
    """
    baseline = Baseline("x DDP", (DDP, DDP + AGAIN)) if "dp" in groups else Baseline("x one", (ONE,))
    lineup = Lineup((Mode(ONE, "plain", 1, accumulation),), (), baseline)
    make = {"dp": _data, "tp": _tensor, "pp": _pipeline}
    for group in GROUPS:
        if group in groups:
            lineup += Lineup(*make[group](ranks, accumulation), baseline)
    return lineup


Rows = tuple[tuple[Mode, ...], tuple[Comparison, ...]]


def _data(ranks: int, accumulation: int) -> Rows:
    modes = (
        Mode("plain torch, one all-reduce", "plain", ranks, accumulation),
        Mode(DDP, "ddp", ranks, accumulation),
        Mode(DDP + AGAIN, "ddp", ranks, accumulation),
        Mode("Trine ZeRO-0", "trine", ranks, accumulation, stage=0),
        Mode("Trine ZeRO-1", "trine", ranks, accumulation, stage=1),
    )
    names = [mode.name for mode in modes if mode.kind == "trine"]
    return modes, tuple(Comparison(name, DDP, DDP + AGAIN, DDP_LIMIT) for name in reversed(names))


def _tensor(ranks: int, accumulation: int) -> Rows:
    peer, trine = f"torch DTensor tp{ranks}", f"Trine tp{ranks}"
    modes = (
        Mode(peer, "dtensor", ranks, accumulation, axis="tensor"),
        Mode(trine, "trine", ranks, accumulation, axis="tensor"),
    )
    # Against DTensor no control: the limit is too far off for noise to decide.
    return modes, (Comparison(trine, peer, limit=DTENSOR_LIMIT), Comparison(trine, ONE))


def _pipeline(ranks: int, _: int) -> Rows:
    peer, trine = f"torch pipelining pp{ranks}", f"Trine pp{ranks}"
    modes = (
        Mode(peer, "pipelining", ranks, ranks, axis="pipeline"),
        Mode(peer + AGAIN, "pipelining", ranks, ranks, axis="pipeline"),
        Mode(trine, "trine", ranks, ranks, axis="pipeline"),
    )
    return modes, (Comparison(trine, peer, peer + AGAIN, PIPELINING_LIMIT),)
