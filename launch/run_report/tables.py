"""Tables of the page: what was planned beside what was measured, by rank and by axis."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape

from engine.launch.run_report.recorded_run import RecordedRank, RecordedRun
from engine.parallel.comm.traffic import megabytes


def traffic_table(run: RecordedRun) -> str:
    """Bytes sent in the last recorded step, summed over the recorded ranks, by axis and label."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in (row for rank in run.ranks for row in rank.sent):
        planned, measured = sums.setdefault((row.axis, row.label), [0, 0])
        sums[row.axis, row.label] = [planned + (row.planned or 0), measured + (row.measured or 0)]
    if not sums:
        return '<p class="empty">nothing: one rank</p>'
    most = max(max(pair) for pair in sums.values()) or 1
    rows = [
        [
            cell(axis), cell(label), whole_number(planned), whole_number(measured), _difference(planned, measured),
            bars([[(0, planned / most)], [(1, measured / most)]]),
        ]
        for (axis, label), (planned, measured) in sorted(sums.items())
    ]  # fmt: skip
    return table(["axis", "what", "planned bytes", "sent bytes", "difference", KEYS], rows, right=(2, 3, 4))


KEYS = '<span class="key k0">planned</span><span class="key k1">measured</span>'
"""Legend of bars."""


def memory_table(ranks: Sequence[RecordedRank]) -> str:
    """Planned state and measured peak of each rank."""
    kinds = list(dict.fromkeys(kind for rank in ranks for kind, count in rank.state.items() if count))
    hosted = any(rank.host_bytes for rank in ranks)
    most = max(max(rank.peak_bytes, sum(rank.state.values())) for rank in ranks) or 1
    rows = []
    for rank in ranks:
        planned = sum(rank.state.values())
        sizes = [amount(rank.state.get(kind, 0)) for kind in kinds]
        drawn = bars([[(0, planned / most)], [(1, rank.peak_bytes / most)]])
        sizes += [amount(rank.host_bytes)] * hosted
        rows.append([_rank(rank), *sizes, amount(planned), amount(rank.peak_bytes), drawn])
    head = ["rank", *map(escape, kinds), *["on the host"] * hosted, "state planned", "peak measured", KEYS]
    return table(head, rows, right=range(1, len(kinds) + hosted + 3))


def wait_axes(ranks: Iterable[RecordedRank]) -> list[str]:
    """Axes on which any rank has waited."""
    return sorted({axis for rank in ranks for axis, seconds in (rank.waits or {}).items() if seconds})


def waits_by_rank(ranks: Sequence[RecordedRank]) -> str:
    """Seconds of waiting of each rank by axis, and their share of its seconds in steps."""
    axes = wait_axes(ranks)
    rows = []
    for rank in (rank for rank in ranks if rank.waits is not None):
        waits: Mapping[str, float] = rank.waits or {}
        spent = [waits.get(axis, 0.0) for axis in axes]
        whole = max(rank.in_steps, sum(spent)) or 1.0
        drawn = bars([[(place, seconds / whole) for place, seconds in enumerate(spent)]])
        share = cell(f"{sum(spent) / whole:.1%}")
        rows.append([_rank(rank), *(cell(f"{s:.3f}") for s in spent), cell(f"{rank.in_steps:.3f}"), share, drawn])
    legend = "".join(f'<span class="key k{place % 6}">{escape(axis)}</span>' for place, axis in enumerate(axes))
    head = ["rank", *(f"{escape(axis)}, s" for axis in axes), "in steps, s", "waited", legend]
    return table(head, rows, right=range(1, len(axes) + 3))


def bubble_table(run: RecordedRun, predicted: float) -> str:
    """Idle share of each pipeline in the last recorded step, beside the predicted one."""
    found = run.timelines()
    rows = [
        [
            cell(place), cell(f"{predicted:.1%}"), cell(f"{line.bubble:.1%}"),
            cell(f"{line.makespan * 1e3:.1f}"), bars([[(0, predicted)], [(1, line.bubble)]]),
        ]
        for place, line in found.items()
    ]  # fmt: skip
    head = ["pipeline", "idle predicted", "idle measured", "first to last action, ms", KEYS]
    return table(head, rows, right=(1, 2, 3))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of finished cells.

    Args:
        head: HTML of the headings.
        right: columns whose headings stand to the right.
    """
    to_right = set(right)
    heads = "".join(f"<th{RIGHT * (n in to_right)}>{text}</th>" for n, text in enumerate(head))
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in (_placed(row, to_right) for row in rows))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


RIGHT = ' class="r"'


def _placed(row: Sequence[str], right: Collection[int]) -> list[str]:
    return [text.replace("<td>", f"<td{RIGHT}>") if n in right else text for n, text in enumerate(row)]


def cell(text: str) -> str:
    """A cell of text."""
    return f"<td>{escape(text)}</td>"


def whole_number(count: int) -> str:
    """A cell of a whole number."""
    return cell(f"{count:,}")


def amount(count: int) -> str:
    """A cell of bytes, the exact number as its tooltip."""
    return f'<td class="r" title="{count} bytes">{megabytes(count)}</td>'


def bars(lines: Sequence[Sequence[tuple[int, float]]]) -> str:
    """A cell of bars, one above the other, each of pieces (colour, share of the width)."""
    drawn = (
        "".join(f'<i class="k{colour % 6}" style="width:{min(share, 1.0):.2%}"></i>' for colour, share in pieces)
        for pieces in lines
    )
    return f'<td class="bar">{"".join(f"<div>{pieces}</div>" for pieces in drawn)}</td>'


def _rank(rank: RecordedRank) -> str:
    place = ", ".join(f"{axis} {index}" for axis, index in rank.place.items())
    return f'<td title="{escape(place)} on {escape(rank.host)}">{rank.rank}</td>'


def _difference(planned: int, measured: int) -> str:
    off = measured - planned
    return f'<td class="r {"off" if off else "ok"}">{f"{off:+,}" if off else "0"}</td>'
