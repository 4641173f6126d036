"""The result of a doctor as text: hosts, ranks, axes, pairs of hosts, findings, verdict."""

from collections.abc import Iterator, Sequence

from engine.launch.doctor.examined import AxisFigure, Examined, HostFacts, Hosts, RankFacts
from engine.launch.doctor.findings import HostFinding
from engine.launch.doctor.link_findings import in_megabytes
from engine.parallel.comm.traffic import megabytes
from engine.parallel.grid import AXES, Grid

_MOST_ROWS = 64
"""Ranks and groups that are shown; the JSON file has all."""


def report_lines(seen: Examined, findings: Sequence[HostFinding]) -> Iterator[str]:
    """The whole report."""
    hosts = Hosts(seen.facts)
    grid = "" if seen.grid is None else f", {Grid(order=seen.order, **seen.grid).shape}"
    yield f"{_number(len(seen.facts), 'rank')} of {seen.size} on {_number(len(hosts.ranks), 'host')}{grid}"
    tables = (_host_rows, _rank_rows, _axis_rows, _pair_rows)
    for rows in tables:
        shown = list(rows(seen, hosts))
        if len(shown) > 1:
            yield ""
            yield from aligned(shown[: _MOST_ROWS + 1])
            if len(shown) > _MOST_ROWS + 1:
                yield f".. and {len(shown) - 1 - _MOST_ROWS} more, see --json"
    yield ""
    yield from (f"{finding.severity}: {finding.sentence}" for finding in findings)
    yield verdict_line(findings)


def verdict_line(findings: Sequence[HostFinding]) -> str:
    """Whether training would start."""
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    counted = [_number(errors, "error")] * bool(errors) + [_number(warnings, "warning")] * bool(warnings)
    words = "training would not start" if errors else "training would start"
    return f"{words}{': ' * bool(counted)}{', '.join(counted)}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose columns are as wide as they have to be."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _host_rows(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, ...]]:
    packages = list(dict.fromkeys(package for one in seen.facts for package in one.host.versions))
    clocks = {clock.host: f"{clock.seconds * 1e3:+.2f} ms" for clock in seen.clocks}
    yield (
        "host", "address", "network", "GPUs", "/dev/shm free", "files", "locked", *packages, "sources", "clock"
    )  # fmt: skip
    for name in hosts.ranks:
        host = hosts.host(name)
        versions = (host.versions.get(package, "-") for package in packages)
        yield (
            name,
            host.route_address or next(iter(host.named_addresses), "-"),
            str(host.carrier() or "-"),
            _gpus(host),
            "-" if host.shm_bytes is None else f"{megabytes(host.shm_free)} of {megabytes(host.shm_bytes)}",
            "any" if host.open_files is None else str(host.open_files),
            "any" if host.locked_bytes is None else megabytes(host.locked_bytes),
            *versions,
            host.digest,
            clocks.get(name, "-"),
        )


def _gpus(host: HostFacts) -> str:
    if not host.gpus:
        return "none"
    first = host.gpus[0]
    return f"{len(host.gpus)} x {first.name}, {megabytes(first.bytes)}"


def _rank_rows(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, ...]]:
    yield ("rank", "host", "pid", "device", *(axis.noun for axis in AXES))
    for one in seen.facts:
        yield (str(one.rank), hosts.of_rank[one.rank], str(one.pid), one.device or "-", *_coordinates(one, seen))


def _coordinates(one: RankFacts, seen: Examined) -> tuple[str, ...]:
    if seen.grid is None:
        return ("-",) * len(AXES)
    return tuple(map(str, Grid(order=seen.order, **seen.grid).coord(one.rank).values()))


def _axis_rows(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, ...]]:
    """A line for each group; the slowest groups of each axis come first."""
    yield ("axis", "ranks", "hosts", "over", "8 B", "expected", "large", "a rank sends", "expected")
    for figure in sorted(seen.axes, key=lambda figure: (figure.axis, figure.rate)):
        yield (
            figure.axis,
            _ranks(figure),
            f"stays on {figure.hosts[0]}" if len(figure.hosts) == 1 else ", ".join(figure.hosts[:4]),
            figure.over,
            _micros(figure.latency),
            _micros(figure.expected_latency),
            megabytes(figure.payload),
            in_megabytes(figure.rate),
            "-" if figure.expected_rate is None else in_megabytes(figure.expected_rate),
        )


def _ranks(figure: AxisFigure) -> str:
    shown = ",".join(map(str, figure.ranks[:8]))
    return f"{shown},.. ({len(figure.ranks)})" if len(figure.ranks) > 8 else shown


def _micros(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f} us" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"


def _pair_rows(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, ...]]:
    """The slowest pairs of hosts first."""
    yield ("hosts", "8 B", "one way", "expected")
    for pair in seen.pairs:
        expected = "-" if pair.expected_rate is None else in_megabytes(pair.expected_rate)
        yield (" - ".join(pair.hosts), _micros(pair.latency), in_megabytes(pair.rate), expected)
