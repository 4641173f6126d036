"""Scaling record as text tables: each grid and its prediction, bandwidth of each axis, compute speed of ranks."""

from collections.abc import Iterable, Sequence

from benchmarks.scaling.record import Machine, ScalingRecord, ScalingRow, measured_rows
from engine.planning.cost_model.links import LinkSpeed

_HEAD = (
    "nodes", "ranks", "mode", "grid", "step s", "predicted", "off", "tok/s", "TFLOP/s", "MFU", "efficiency",
    "waits of a rank, s", "predicted: computation, bubble, waits, s",
)  # fmt: skip
_AXES = ("nodes", "ranks", "grid", "axis", "ranks of a group", "hosts of a group", "latency us", "MB/s a rank")
_LEAST = 5e-4
"""Seconds that are worth a word."""


def table(record: ScalingRecord) -> str:
    """Formats the record as text; the fastest grid of a mode and number of nodes comes first."""
    rows = sorted(record.rows, key=_order)
    lines = _columns([_HEAD, *(_cells(row, record) for row in rows)])
    axes = [
        (str(row.nodes), str(row.world), str(row.choice), axis.axis, str(axis.ranks), str(axis.hosts),
         f"{1e6 * axis.latency:.0f}", f"{axis.rate / 1e6:.1f}")
        for row in rows for axis in row.axes
    ]  # fmt: skip
    machines = [machine for key in record.keys if (machine := record.machine(key)) is not None]
    parts = [lines, *([_columns([_AXES, *axes])] * bool(axes)), "\n".join(map(_machine, machines))]
    return "\n\n".join(part for part in parts if part)


def _order(row: ScalingRow) -> tuple[str, int, int, float]:
    return row.mode, row.nodes, row.ranks, row.seconds or float("inf")


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(row: ScalingRow, record: ScalingRecord) -> tuple[str, ...]:
    seconds, predicted = row.seconds, row.predicted.total if row.predicted else None
    head = (str(row.nodes), str(row.world), row.mode, str(row.choice))
    if row.refused:
        return (*head, *[""] * (len(_HEAD) - len(head) - 1), row.refused)
    peak, share = record.peak_flops, efficiency(row, record)
    flops = row.flops / seconds / row.world if seconds else None
    return (
        *head,
        f"{seconds:.3f}" if seconds else "",
        f"{predicted:.3f}" if predicted else "",
        f"{predicted / seconds - 1:+.0%}" if predicted and seconds else "",
        f"{row.tokens / seconds:.0f}" if seconds else "",
        f"{flops / 1e12:.4f}" if flops else "",
        f"{flops / peak:.1%}" if flops and peak else "",
        f"{share:.0%}" if share else "",
        _listed(row.waits.items()),
        _listed(parts_of(row)),
    )


def parts_of(row: ScalingRow) -> list[tuple[str, float]]:
    """Returns (name, seconds) of each part of a predicted step."""
    told = row.predicted
    return [("computation", told.computation), ("bubble", told.bubble), *told.communication.items()] if told else []


def _listed(parts: Iterable[tuple[str, float]]) -> str:
    return " ".join(f"{name} {seconds:.3f}" for name, seconds in parts if seconds >= _LEAST)


def efficiency(row: ScalingRow, record: ScalingRecord) -> float | None:
    """Returns tokens per second and rank relative to the best grid of the fewest ranks; None: not measured."""
    found = list(measured_rows(record, row.mode))
    if row.seconds is None or not found:
        return None
    fewest = min(other.world for other, _ in found)
    base = max(other.tokens / seconds / other.world for other, seconds in found if other.world == fewest)
    return row.tokens / row.seconds / row.world / base


def _machine(machine: Machine) -> str:
    computed, links = machine.computation, machine.links
    microbatch = 1e3 * (computed.forward + computed.backward)
    return (
        f"{machine.nodes} nodes of {machine.ranks} ranks: a microbatch of the whole model takes a rank "
        f"{microbatch:.1f} ms, {computed.fixed:.0%} of it on every tensor rank; the rest of a step takes "
        f"{1e3 * computed.update:.1f} ms; between ranks of a host {_speed(links.within)}, "
        f"out of a host {_speed(links.between)}"
    )


def _speed(link: LinkSpeed) -> str:
    return f"{1e6 * link.latency:.0f} us and {link.rate / 1e6:.1f} MB/s" if link.rate < 1e15 else "nothing"
