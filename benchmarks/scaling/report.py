"""A record as a table and as a picture."""

from benchmarks.scaling.record import ScalingRecord, ScalingRow


def table(record: ScalingRecord) -> str:
    """Every grid of every number of nodes, the fastest first."""
    lines = ["nodes  ranks  mode    grid                     step s  predicted   off  tok/s  TFLOP/s  waits"]
    for row in sorted(record.rows, key=_order):
        lines.append(_line(row, record))
    return "\n".join(lines)


def _order(row: ScalingRow) -> tuple[str, int, int, float]:
    return row.mode, row.nodes, row.ranks, row.seconds or float("inf")


def _line(row: ScalingRow, record: ScalingRecord) -> str:
    head = f"{row.nodes:5}  {row.world:5}  {row.mode:6}  {row.choice!s:23}"
    if row.refused:
        return f"{head}  {row.refused}"
    seconds, predicted = row.seconds, row.predicted.total if row.predicted else None
    took = f"{seconds:7.3f}" if seconds else " " * 7
    told = f"{predicted:9.3f}" if predicted else " " * 9
    off = f"{predicted / seconds - 1:+5.0%}" if predicted and seconds else " " * 5
    rates = f"{row.tokens / seconds:6.0f}  {row.flops / seconds / 1e12:7.4f}" if seconds else ""
    waits = " ".join(f"{axis} {waited:.3f}" for axis, waited in row.waits.items() if waited >= 5e-4)
    parts = ""
    if row.predicted:
        found = {"comp": row.predicted.computation, "bubble": row.predicted.bubble, **row.predicted.communication}
        parts = " ".join(f"{name} {part:.3f}" for name, part in found.items() if part >= 5e-4)
    return f"{head}  {took}  {told}  {off}  {rates}  {waits} | {parts}"


def picture(record: ScalingRecord) -> str:
    """Time of a step and efficiency by number of nodes."""
    return ""
