"""Turns seconds into shares, verdicts and one table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.figures import markdown_table
from benchmarks.overlap.measure import COMMUNICATES, IN_KERNELS, PLAIN

HIDDEN_GOAL = 0.85
"""Minimum fraction of the transfer, or of a shorter product, that overlap hides."""
GATED_GOAL = 1.02
"""Maximum time of a product that polls for rows already present, relative to the plain product in the same tile."""
OTHERS = ("chunks", "collectives", "async-TP")
SHOWN = ("fused", "copied", *OTHERS, "product", "transfer")
HEADINGS = (
    "operation", "of", "ranks", "M x N x K", "dtype", "right", "tile",
    *(f"{name} ms" for name in SHOWN), "best other / ours", "hidden", "hidden, from host", "gated / plain",
)  # fmt: skip
Found = Mapping[str, Any]
"""Results of ``run_case``: plain data."""


def seconds_of(found: Found, way: str) -> float | None:
    """Returns the median seconds of an implementation; None if not measured."""
    value = found.get("seconds", {}).get(way, {}).get("seconds")
    return None if value is None else float(value)


def fastest(found: Found, ways: Sequence[str]) -> tuple[float, str] | None:
    """Returns (seconds, implementation) of the fastest; None if none was measured."""
    return min(((taken, way) for way in ways if (taken := seconds_of(found, way)) is not None), default=None)


def hidden(found: Found) -> float | None:
    """Returns how much of the shorter of product and transfer our fastest implementation hides, as a fraction."""
    ours = fastest(found, IN_KERNELS)
    return _hidden(found, None if ours is None else ours[0], "transfer")


def hidden_from_host(found: Found) -> float | None:
    """Returns how much of the shorter of product and host transfer a gather of host rows hides, as a fraction."""
    return _hidden(found, seconds_of(found, "from host"), "host transfer")


def _hidden(found: Found, ours: float | None, moved: str) -> float | None:
    product, transfer = seconds_of(found, "gated"), seconds_of(found, moved)
    if ours is None or product is None or transfer is None:
        return None
    return (product + transfer - ours) / min(product, transfer)


def gated_ratio(found: Found) -> float | None:
    """Returns the time of a communicating product on one rank, relative to the plain product."""
    communicating, plain = seconds_of(found, COMMUNICATES), seconds_of(found, PLAIN)
    return communicating / plain if communicating and plain else None


def gain(found: Found) -> float | None:
    """Returns the seconds of the fastest other implementation divided by those of our fastest."""
    ours, other = fastest(found, IN_KERNELS), fastest(found, OTHERS)
    return other[0] / ours[0] if ours and other else None


@dataclass(frozen=True, slots=True)
class OverlapVerdict:
    """Result for a goal of a case."""

    case: str
    wanted: str
    reached: float
    passed: bool

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self.case}: {self.wanted}, reached {self.reached:.3f}"


def judge_overlap(found: Found) -> list[OverlapVerdict]:
    """Checks all goals of a timed case."""
    verdicts = []
    if (share := hidden(found)) is not None:
        wanted = f"hidden at least {HIDDEN_GOAL:.0%}"
        verdicts.append(OverlapVerdict(found["name"], wanted, share, share >= HIDDEN_GOAL))
    ratio = gated_ratio(found)
    if ratio is not None and found["operation"] == "gather_product":
        wanted = f"gated / plain at most {GATED_GOAL}"
        verdicts.append(OverlapVerdict(found["name"], wanted, ratio, ratio <= GATED_GOAL))
    return verdicts


def overlap_table(cases: Sequence[Found]) -> str:
    """Formats results as a Markdown table, one line per case; "-": not measured."""
    return markdown_table(HEADINGS, map(_cells, cases))


CHECKED = ("fused", "copied", "chunks", "collectives", "async-TP")


def check_table(cases: Sequence[Found]) -> str:
    """Formats checks as a Markdown table: whether each implementation equals plain products and integer sums, by number
    of tiles.
    """
    headings = ("operation", "of", "ranks", "M x N x K", "dtype", "tiles", *CHECKED)
    return markdown_table(headings, map(_checks, cases))


def _checks(found: Found) -> list[str]:
    tiles = [check["ways"] for check in found.get("checks", {}).values()]
    told = [found["error"], *["-"] * (len(CHECKED) - 1)] if "error" in found else [_checked(tiles, w) for w in CHECKED]
    return [*_head(found), str(len(tiles)), *told]


def _checked(tiles: Sequence[Mapping[str, Any]], way: str) -> str:
    rows = [ways[way] for ways in tiles if way in ways]
    if not rows:
        return "-"
    if any("error" in row for row in rows):
        return "did not run"
    if not all(row["passed"] for row in rows):
        return "WRONG"
    largest = max(row["deviation"] for row in rows)
    return "exact" if largest == 0 else f"within {largest:.1e}"


def _head(found: Found) -> list[str]:
    sizes = found["sizes"]
    return [
        found["operation"], found["of"], str(found["ranks"]),
        f"{sizes['rows']} x {sizes['columns']} x {sizes['depth']}", found["dtype"],
    ]  # fmt: skip


def _cells(found: Found) -> list[str]:
    head = _head(found)
    if "error" in found:
        return [*head, found["error"], *["-"] * (len(HEADINGS) - len(head) - 1)]
    tile = found.get("tile")
    taken = (seconds_of(found, way) for way in SHOWN)
    return [
        *head,
        "yes" if found.get("passed") else "NO",
        "x".join(map(str, tile[:3])) if tile else "-",
        *("-" if value is None else f"{value * 1e3:.3f}" for value in taken),
        _figure(gain(found), "{:.2f}"),
        _figure(hidden(found), "{:.0%}"),
        _figure(hidden_from_host(found), "{:.0%}"),
        _figure(gated_ratio(found), "{:.3f}"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def overlap_failures(cases: Sequence[Found]) -> list[str]:
    """Lists failed checks and errors, each once."""
    lines: dict[str, None] = {}
    for found in cases:
        if "error" in found:
            lines[f"{found['name']}: {found['error']}"] = None
        for tile, check in found.get("checks", {}).items():
            for way, row in check.get("ways", {}).items():
                if not row["passed"]:
                    why = row.get("error", f"deviates by {row.get('deviation')}")
                    lines[f"{found['name']}, {tile}, {way}: {why}"] = None
        for way, row in found.get("seconds", {}).items():
            if "error" in row:
                lines[f"{found['name']}, {way}: {row['error']}"] = None
    return list(lines)
