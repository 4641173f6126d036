"""Rows of the training benchmarks: the modes, which rows are compared, and their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, get_args

from benchmarks.harness.report import (
    ACTIVATIONS,
    CALLS,
    END,
    LIVE,
    LOSS_TOLERANCE,
    RESIDENT,
    SENT,
    STATE,
    STEP_PEAK,
    Baseline,
    Column,
    Comparison,
)
from benchmarks.peers.models import Name
from benchmarks.peers.workload import Axis, Kind, Mode, Schedule

Group = Literal["dp", "tp", "pp", "watchdog"]
GROUPS: tuple[Group, ...] = get_args(Group)
BESIDE_PEERS: tuple[Group, ...] = GROUPS[:3]
"""Groups of rows that are measured without a selection."""
STAGES = (0, 1, 2, 3)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)

ONE = "one process, plain torch"
DDP = "torch DDP"
AGAIN = " again (control)"
"""Suffix of a second team of the same mode, which measures the noise."""

# CPU seconds of Trine over those of its peer
DDP_LIMIT = 1.03
WATCHDOG_LIMIT = 1.005
"""Maximum ratio of a step with watchdog to one without."""
DTENSOR_LIMIT = 0.5
PIPELINING_LIMIT = 1.0
ZERO_LIMITS: Mapping[int, float] = MappingProxyType({1: 1.02, 2: 1.02, 3: 1.15})
"""Maximum ratio of CPU seconds to DDP's, by ZeRO stage."""

TENSOR_LIMITS: Mapping[Name, float] = MappingProxyType({"llama": 1.25, "fused": 1.4})
"""Maximum ratio of two tensor ranks' CPU seconds to one process's, by model."""
TENSOR_PEER_LIMIT = 0.6
"""Maximum ratio of four ranks' CPU seconds to DTensor's."""
TENSOR_LOSS_TOLERANCE = 5e-6
"""Maximum difference of losses in nats, a millionth of a loss above 5."""

STEP_COLUMNS = (*SENT, LIVE, RESIDENT, *END)
PIPELINE_COLUMNS = (SENT[0], CALLS, ACTIVATIONS, STEP_PEAK, *END)
TENSOR_COLUMNS = (SENT[0], CALLS, STEP_PEAK, *END)
ZERO_COLUMNS = (*SENT, CALLS, STATE, LIVE, STEP_PEAK, *END)


@dataclass(frozen=True, slots=True)
class Lineup:
    """Rows of a table, with the comparisons between them."""

    modes: tuple[Mode, ...]
    comparisons: tuple[Comparison, ...]
    baseline: Baseline
    columns: tuple[Column, ...] = STEP_COLUMNS
    loss_tolerance: float = LOSS_TOLERANCE
    """Maximum loss difference in nats between modes after equal steps."""

    def of_peers(self, kinds: Sequence[Kind]) -> "Lineup":
        """Returns a lineup with only Trine, the peers of ``kinds`` and the baseline, and their comparisons."""
        return self._of(
            [m for m in self.modes if m.kind in ("plain", "trine", *kinds) or m.name in self.baseline.modes]
        )

    def without(self, left_out: Sequence[Mode]) -> "Lineup":
        """Returns a lineup without the rows in ``left_out``, and their comparisons."""
        return self._of([mode for mode in self.modes if mode not in left_out])

    def _of(self, kept: Sequence[Mode]) -> "Lineup":
        names = {None, *(mode.name for mode in kept)}
        asked = [c for c in self.comparisons if {c.mode, c.peer, c.control} <= names]
        return replace(self, modes=tuple(kept), comparisons=tuple(asked))

    def __add__(self, other: "Lineup") -> "Lineup":
        modes, comparisons = self.modes + other.modes, self.comparisons + other.comparisons
        return replace(self, modes=modes, comparisons=comparisons)


Rows = tuple[tuple[Mode, ...], tuple[Comparison, ...]]


def make_lineup(ranks: int, accumulation: int = 1, groups: Sequence[Group] = BESIDE_PEERS) -> Lineup:
    """Returns the rows of all ``groups`` after the single process, the reference of losses.

    ``accumulation``: microbatches per step; a pipeline has as many as ranks.
    """
    baseline = Baseline("x DDP", (DDP, DDP + AGAIN)) if "dp" in groups else Baseline("x one", (ONE,))
    lineup = Lineup((Mode(ONE, "plain", 1, accumulation),), (), baseline)
    make = {"dp": _data, "tp": _tensor, "pp": _pipeline, "watchdog": _watched}
    for group in GROUPS:
        if group in groups:
            lineup += Lineup(*make[group](ranks, accumulation), baseline)
    return lineup


def make_zero_lineup(ranks: int, accumulation: int = 1, stages: Sequence[int] = STAGES) -> Lineup:
    """Returns two teams of DDP, then each of ``stages`` by Trine and by the peers that support it.

    Only Trine's default mode at each stage above 0 has a limit.
    """
    trine = [mode for mode in _trine_stages(ranks, accumulation) if mode.stage in stages]
    others = [mode for mode in _peer_stages(ranks, accumulation) if mode.stage in stages]
    against_ddp = [Comparison(mode.name, DDP, DDP + AGAIN, _zero_limit(mode)) for mode in trine]
    against_others = [Comparison(f"Trine ZeRO-{mode.stage}", mode.name) for mode in others]
    ddp = (Mode(DDP, "ddp", ranks, accumulation), Mode(DDP + AGAIN, "ddp", ranks, accumulation))
    baseline = Baseline("x DDP", (DDP, DDP + AGAIN))
    return Lineup((*ddp, *trine, *others), (*against_ddp, *against_others), baseline, ZERO_COLUMNS)


def make_pipeline_lineup(ranks: int, microbatches: int, schedules: Sequence[Schedule] = SCHEDULES) -> Lineup:
    """Returns the single process, then each of ``schedules`` by peers and by Trine, which all peers limit.

    Every mode takes the same ``microbatches``.
    """
    baseline = Baseline("x one", (ONE,))
    lineup = Lineup((Mode(ONE, "plain", 1, microbatches),), (), baseline, PIPELINE_COLUMNS)
    for schedule in schedules:
        lineup += Lineup(*_scheduled(schedule, ranks, microbatches), baseline)
    return lineup


def make_tensor_lineup(model: Name, sizes: Sequence[int], accumulation: int = 1) -> Lineup:
    """Returns the single process, then Trine and DTensor on each number of ranks in ``sizes``."""
    modes = [Mode(ONE, "plain", 1, accumulation)]
    comparisons = []
    for ranks in sizes:
        trine, peer = f"Trine tp{ranks}", f"torch DTensor tp{ranks}"
        modes.append(Mode(trine, "trine", ranks, accumulation, axis="tensor"))
        modes.append(Mode(peer, "dtensor", ranks, accumulation, axis="tensor"))
        comparisons += [
            Comparison(trine, ONE, limit=TENSOR_LIMITS[model] if ranks == 2 else None),
            Comparison(trine, peer, limit=TENSOR_PEER_LIMIT if ranks == 4 else None),
        ]
    baseline = Baseline("x one", (ONE,))
    return Lineup(tuple(modes), tuple(comparisons), baseline, TENSOR_COLUMNS, TENSOR_LOSS_TOLERANCE)


def _scheduled(schedule: Schedule, ranks: int, microbatches: int) -> Rows:
    def mode(name: str, kind: Kind) -> Mode:
        return Mode(name, kind, ranks, microbatches, axis="pipeline", schedule=schedule)

    trine, torch, deepspeed = (f"{who} {schedule}" for who in ("Trine", "torch", "DeepSpeed"))
    modes = [mode(trine, "trine"), mode(torch, "pipelining"), mode(torch + AGAIN, "pipelining")]
    comparisons = [Comparison(trine, torch, torch + AGAIN, PIPELINING_LIMIT)]
    if schedule == "1f1b":
        modes.append(mode(deepspeed, "deepspeed"))
        comparisons.append(Comparison(trine, deepspeed, limit=PIPELINING_LIMIT))
    return tuple(modes), tuple(comparisons)


def _zero_limit(mode: Mode) -> float | None:
    return None if mode.reduce or mode.gather else ZERO_LIMITS.get(mode.stage)


def _trine_stages(ranks: int, accumulation: int) -> tuple[Mode, ...]:
    return (
        *(Mode(f"Trine ZeRO-{stage}", "trine", ranks, accumulation, stage) for stage in (0, 1, 2)),
        Mode("Trine ZeRO-2, reduce: microbatch", "trine", ranks, accumulation, 2, reduce="microbatch"),
        Mode("Trine ZeRO-3", "trine", ranks, accumulation, 3),
        Mode("Trine ZeRO-3, gather: step", "trine", ranks, accumulation, 3, gather="step"),
    )


def _peer_stages(ranks: int, accumulation: int) -> tuple[Mode, ...]:
    return (
        *(Mode(f"torch FSDP2 as ZeRO-{stage}", "fsdp2", ranks, accumulation, stage) for stage in (2, 3)),
        *(Mode(f"DeepSpeed ZeRO-{stage}", "deepspeed", ranks, accumulation, stage) for stage in (1, 2, 3)),
    )


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


def _watched(ranks: int, accumulation: int) -> Rows:
    """Each axis under the watchdog, and without one; the first of them again, as a control."""
    modes: list[Mode] = []
    comparisons: list[Comparison] = []
    axes: tuple[tuple[Axis, str, int], ...] = (
        ("data", "ZeRO-1", accumulation),
        ("tensor", f"tp{ranks}", accumulation),
        ("pipeline", f"pp{ranks}", ranks),
    )
    for axis, name, microbatches in axes:
        watched = Mode(f"Trine {name}, watched", "trine", ranks, microbatches, stage=int(axis == "data"), axis=axis)
        alone = replace(watched, name=f"Trine {name}, not watched", watched=False)
        again = replace(alone, name=alone.name + AGAIN)
        modes += [watched, alone, again]
        comparisons.append(Comparison(watched.name, alone.name, again.name, WATCHDOG_LIMIT))
    return tuple(modes), tuple(comparisons)
