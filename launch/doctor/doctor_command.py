"""Command ``trine doctor``: checks that training would start here, and measures the links between ranks.

    torchrun --nproc_per_node 4 -m engine.launch.doctor config.json

Rank 0 prints; all ranks end with the same status. A rank that cannot reach rank 0 prints its own message.
"""

import json
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import Config, load_config
from engine.config.grid_rules import check_plans
from engine.config.sections import check_installed
from engine.errors import ConfigError, EngineError
from engine.launch.doctor.examined import AxisFigure, Examined, HostFacts, Hosts, RankFacts, host_facts, with_gpus
from engine.launch.doctor.findings import HostFinding, find_all, in_megabytes
from engine.parallel.comm.launcher import Place, find_place, read_count
from engine.parallel.comm.traffic import megabytes
from engine.parallel.grid import Grid, shown_axes
from engine.reporting.console import aligned, unless_within
from engine.reporting.failure_message import torchrun_error

if TYPE_CHECKING:
    from engine.launch.doctor.joint import Examination
    from engine.parallel.comm.world import World


_SECONDS = 30


def add_doctor_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine doctor`` to the parser ``command``."""
    about = "configuration of the training; without one, all ranks are data ranks"
    command.add_argument("config", type=Path, nargs="?", help=about)
    about = f"time limit of a rank's answer (default {_SECONDS})"
    command.add_argument("--timeout", type=int, default=_SECONDS, metavar="SECONDS", help=about)
    command.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")


def run_doctor(options: Namespace) -> None:
    """Examines all ranks of the job and prints the report on rank 0; exits with status 1 if training would not start.

    Raises:
        EngineError: the result cannot be written, or the launcher's environment variables contradict each other.
    """
    if options.timeout < 1:
        raise ConfigError(f"--timeout {options.timeout} is below 1; give the time limit of a rank's answer in seconds.")
    place = find_place(os.environ)
    rank = 0 if place is None else place.rank
    if rank == 0 and options.json is not None:
        _check_writable(options.json)
    import engine.launch.doctor.joint  # noqa: F401  # with torch, whose import does not count against the limit

    problem = _wrong_variable()
    with _patience(options.timeout):
        with _limited_to(options.timeout, rank):
            examination = _prepare(options.config, options.timeout, place, problem)
        seen = examination.run()
        failed = _conclude(examination, seen, options.json) if rank == 0 else _follow(examination, seen)
    if examination.hung:  # a hung thread would block the exit of the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(failed))
    if failed:
        raise SystemExit(1)


def _wrong_variable() -> str:
    """Returns the error that training would raise about variables that it reads later."""
    try:
        for name in ("TRINE_TIMEOUT_SECONDS", "TRINE_SHARED_MEMORY"):
            read_count(os.environ, name, 1)
    except EngineError as error:
        return str(error)
    return ""


@contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """Limits all waits of the engine, and removes waits for the launcher, since all ranks end together here."""
    before = {name: os.environ.pop(name, None) for name in ("TRINE_TIMEOUT_SECONDS", "TORCHELASTIC_RUN_ID")}
    os.environ["TRINE_TIMEOUT_SECONDS"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["TRINE_TIMEOUT_SECONDS"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _limited_to(seconds: int, rank: int) -> Iterator[None]:
    """Ends the process if the block takes longer: nothing else escapes from a hung driver or file system."""

    def end() -> None:
        slow = f"rank {rank} ({socket.gethostname()}) could not examine its host within {seconds} s"
        words = f"{slow}: a file system, a name server or the driver of a GPU hangs; --timeout sets a longer limit."
        _tell_launcher(words)
        print(f"trine doctor: {words}", file=sys.stderr, flush=True)
        os._exit(1)

    with unless_within(seconds, end):
        yield


def _check_writable(path: Path) -> None:
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise EngineError(f"--json {path} cannot be written: {error.strerror}; give another path.") from error


def _prepare(path: Path | None, seconds: int, place: Place | None, problem: str) -> "Examination":
    """Collects this rank's facts, and the error with which training would begin here."""
    import torch

    from engine.launch.doctor.joint import Examination
    from engine.parallel.comm.world import World, read_world

    rank, size, local_rank = (place.rank, place.size, place.local_rank) if place is not None else (0, 1, 0)
    host, config = host_facts(os.environ, place.address if place is not None else "localhost"), None
    world, device = World(rank, size, local_rank, torch.device("cpu"), place), ""
    try:
        world = read_world()
        device = str(world.device)
        config = _read_config(path, world)
    except EngineError as error:
        problem = problem or str(error)
    host = with_gpus(host, os.environ, device if device.startswith("cuda") else "")
    own = RankFacts(
        rank=rank, local_rank=local_rank, pid=os.getpid(), device=device, problem=problem, host=host
    )  # fmt: skip
    return Examination(world=world, own=own, config=config, seconds=seconds, tell=_say if rank == 0 else _say_nothing)


def _read_config(path: Path | None, world: "World") -> Config:
    config = load_config({"train_batch_size": world.size} if path is None else path, world.size)
    check_plans(config.parallel, config.gradient_accumulation_steps)
    check_installed(config.monitor)
    return config


def _say(what: str) -> None:
    print(f"trine doctor: {what} ..", file=sys.stderr, flush=True)


def _say_nothing(what: str) -> None:
    pass


def _conclude(examination: "Examination", seen: Examined, path: Path | None) -> bool:
    """Prints, writes and sends the result on rank 0. Returns True if training would not start."""
    findings = find_all(seen)
    print("\n".join(report_lines(seen, findings)), flush=True)
    if path is not None:
        path.write_text(json.dumps(result_json(seen, findings), indent=2) + "\n", encoding="utf-8")
    first = next((finding.sentence for finding in findings if finding.severity == "error"), "")
    _tell_launcher(first)
    examination.say({"error": first})
    return bool(first)


def result_json(seen: Examined, findings: Sequence[HostFinding]) -> dict[str, Any]:
    """Returns the results ``seen`` and the ``findings`` (errors and warnings) as a JSON object.

    Its entry "starts" is True if training would start.
    """
    starts = not any(finding.severity == "error" for finding in findings)
    return {"starts": starts, "findings": [asdict(finding) for finding in findings], **seen.to_json()}


def _follow(examination: "Examination", seen: Examined) -> bool:
    """Ends another rank with rank 0's verdict. Returns True if training would not start."""
    verdict = examination.hear()
    if verdict is None:
        own = examination.own
        words = dict(seen.failed).get(own.rank, "") or f"rank 0 did not answer within {examination.seconds:g} s."
        if own.local_rank == 0:
            print(f"trine doctor: rank {own.rank} ({own.host.name}): {words}", file=sys.stderr, flush=True)
        _tell_launcher(words)
        return True
    _tell_launcher(str(verdict["error"]))
    return bool(verdict["error"])


def _tell_launcher(sentence: str) -> None:
    """Writes the sentence where torchrun reads it for its summary."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if sentence and name:
        with suppress(OSError):  # the sentence was printed already
            Path(name).write_text(torchrun_error(sentence), encoding="utf-8")


_MOST_ROWS = 64
"""Maximal rows of a printed table; the JSON file has all."""


def report_lines(seen: Examined, findings: Sequence[HostFinding]) -> Iterator[str]:
    """Yields the lines of the report: tables of hosts, ranks and links in ``seen``, then the ``findings``."""
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
    """Returns the last line of the report, such as "training would start: 1 warning"."""
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    counted = [_number(errors, "error")] * bool(errors) + [_number(warnings, "warning")] * bool(warnings)
    words = "training would not start" if errors else "training would start"
    return f"{words}{': ' * bool(counted)}{', '.join(counted)}"


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
    yield ("rank", "host", "pid", "device", *(axis.noun for axis in shown_axes(seen.grid or {})))
    for one in seen.facts:
        yield (str(one.rank), hosts.of_rank[one.rank], str(one.pid), one.device or "-", *_coordinates(one, seen))


def _coordinates(one: RankFacts, seen: Examined) -> tuple[str, ...]:
    if seen.grid is None:
        return ("-",) * len(shown_axes({}))
    return tuple(map(str, Grid(order=seen.order, **seen.grid).place(one.rank).values()))


def _axis_rows(seen: Examined, hosts: Hosts) -> Iterator[tuple[str, ...]]:
    """Yields a line for each group; the slowest groups of each axis come first."""
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
    """Yields a line for each pair of hosts, the slowest first."""
    yield ("hosts", "8 B", "one way", "expected")
    for pair in seen.pairs:
        expected = "-" if pair.expected_rate is None else in_megabytes(pair.expected_rate)
        yield (" - ".join(pair.hosts), _micros(pair.latency), in_megabytes(pair.rate), expected)
