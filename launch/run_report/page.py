"""The page: sections in the order in which a reader asks. It refers to nothing outside of itself."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from engine.errors import EngineError
from engine.launch.run_report.charts import Curve, chart
from engine.launch.run_report.expert_charts import expert_charts
from engine.launch.run_report.merged_trace import RankTrace, perfetto, read_traces
from engine.launch.run_report.recorded_run import RecordedRun, read_run
from engine.launch.run_report.style import STYLE
from engine.launch.run_report.tables import (
    bubble_table,
    memory_table,
    traffic_table,
    wait_axes,
    waits_by_rank,
)
from engine.parallel.comm.traffic import megabytes
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel
from engine.parallel.pipeline.schedule.simulate import simulate

MIB = 2**20


class PageSection(NamedTuple):
    """A part of the page."""

    name: str
    """Its anchor."""
    title: str
    lead: str
    """A sentence on what is shown and how it was measured."""
    body: str


def page(run: RecordedRun) -> str:
    """The whole page as HTML."""
    sections = [part for part in (make(run) for make in _SECTIONS) if part.body]
    if run.warnings:
        sections = [sections[-1], *sections[:-1]]
    links = "".join(f'<a href="#{part.name}">{escape(part.title)}</a>' for part in sections)
    return "\n".join([
        '<!DOCTYPE html>', '<html lang="en">', "<head>", '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(run.name)}: run report</title>", f"<style>{STYLE}</style>", "</head>", "<body>",
        f"<header><h1>{escape(run.name)}</h1><p>{escape(str(run.facts['grid']))}</p>",
        f'<div class="tiles">{"".join(_tiles(run))}</div><nav>{links}</nav></header>', "<main>",
        *(_section(part) for part in sections), "</main>",
        f"<footer>Written by trine report; the newest record is of {_moment(run)}.</footer>", "</body>", "</html>", "",
    ])  # fmt: skip


def _section(part: PageSection) -> str:
    lead = f'<p class="lead">{escape(part.lead)}</p>' if part.lead else ""
    return f'<section id="{part.name}"><h2>{escape(part.title)}</h2>{lead}{part.body}</section>'


def _moment(run: RecordedRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(max(rank.written for rank in run.ranks))) + " UTC"


def _tiles(run: RecordedRun) -> Iterator[str]:
    trained = [row for row in run.steps if not row["skipped"]]
    speeds = [row["tokens_per_second"] for row in trained if row["tokens_per_second"]]
    lines = list(run.timelines().values())
    sent = [sum(row.measured or 0 for row in rank.sent) for rank in run.ranks]
    planned = [sum(row.planned or 0 for row in rank.sent) for rank in run.ranks]
    yield _tile("step", str(max(rank.step for rank in run.ranks)), f"{len(run.steps)} logged")
    yield _tile("loss", _short(trained[-1]["loss"]), f"{_short(trained[0]['loss'])} at step {trained[0]['step']}"
                ) if trained else _tile("loss", "none", "no step was made")  # fmt: skip
    yield _tile("tokens or rows / s", _thousands(median(speeds)) if speeds else "none", "median")
    yield _tile(
        "peak of a rank", megabytes(max(rank.peak_bytes for rank in run.ranks)), f"memory, {run.ranks[0].memory}"
    )
    yield _tile("sent in a step", megabytes(sum(sent)), f"{megabytes(sum(planned))} planned")
    idle = f"{lines[0].bubble:.1%}" if lines else "unknown"
    yield _tile("pipeline idle", idle, f"{simulate(run.schedule).bubble:.1%} predicted")


def _tile(name: str, value: str, below: str) -> str:
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><i>{escape(below)}</i></div>'


def _warnings(run: RecordedRun) -> PageSection:
    items = "".join(f"<li>{escape(text)}</li>" for text in run.warnings)
    body = f'<ul class="warnings">{items}</ul>' if items else '<p class="empty">none</p>'
    return PageSection("warnings", "Warnings", "Notes of the plan, and what is missing in the record.", body)


def _training(run: RecordedRun) -> PageSection:
    def of(key: str, scale: float = 1.0) -> Curve:
        points = [(row["step"], row[key] if row[key] is None else row[key] * scale) for row in run.steps]
        return Curve("", points)

    pictures = [
        chart("loss", [of("loss")], _short),
        chart("learning rate", [of("lr")], _power, zero=True),
        chart("gradient norm before clipping", [of("grad_norm")], _short, zero=True),
        chart("tokens or rows a second, all ranks", [of("tokens_per_second")], _thousands, zero=True),
        chart("seconds of a step, rank 0", [of("seconds")], _short, zero=True),
        chart("peak memory of rank 0, MiB", [of("peak_bytes", 1 / MIB)], _thousands, zero=True),
    ]
    if any(row["loss_scale"] != 1 for row in run.steps):
        pictures.append(chart("loss scale", [of("loss_scale")], _thousands, zero=True))
    pictures += [chart(name, [curve], _short) for name, curve in _metrics(run).items() if not _is_expert(name)]
    return PageSection("training", "Training", "Logged steps, from left to right.", _charts(pictures))


def _metrics(run: RecordedRun) -> dict[str, Curve]:
    """Values of monitor.metrics."""
    names = dict.fromkeys(name for row in run.steps for name in row.get("metrics", {}))
    return {name: Curve(name, [(r["step"], r.get("metrics", {}).get(name)) for r in run.steps]) for name in names}


def _is_expert(name: str) -> bool:
    return name.lower().startswith("expert")


def _experts(run: RecordedRun) -> PageSection:
    curves = [curve for name, curve in _metrics(run).items() if _is_expert(name)]
    counted, below = expert_charts(run.steps)
    own = chart("of monitor.metrics", curves, _short, zero=True) if curves else ""
    lead = (
        "Rows that each expert was given in the logged steps, over all microbatches and data ranks; 1 is the mean of "
        "its layer. Newest: the last tenth of the logged steps."
    )
    lead = lead if counted else "Values of monitor.metrics whose names begin with expert."
    body = _charts([counted, own]) + below if counted or own else ""
    return PageSection("experts", "Expert load", lead, body)


def _waits(run: RecordedRun) -> PageSection:
    lead = "Seconds in which ranks waited for communication since training began, of their seconds in training steps."
    if not any(rank.waits is not None for rank in run.ranks):
        return PageSection("waits", "Waits by axis", lead, '<p class="empty">not measured: no watchdog watched</p>')
    rows = [row for row in run.steps if row.get("waits") is not None]
    axes = wait_axes(run.ranks)
    sums = [Curve(axis, [(row["step"], row["waits"].get(axis, 0.0)) for row in rows]) for axis in axes]
    pictures = [
        chart("waited so far, rank 0, s", sums, _short, zero=True),
        chart("waited in a step, rank 0, ms", [_each_step(curve) for curve in sums], _short, zero=True),
    ]
    body = f'<div class="panel tall">{waits_by_rank(run.ranks)}</div>{_charts(pictures) if axes else ""}'
    return PageSection("waits", "Waits by axis", lead, body)


def _each_step(curve: Curve) -> Curve:
    """Milliseconds of a step, of seconds so far; a new start, whose seconds begin at 0, leaves a gap."""
    found: list[tuple[float, float | None]] = []
    for (before, earlier), (step, later) in pairwise(curve.points):
        if earlier is not None and later is not None and step > before:
            found.append((step, 1e3 * (later - earlier) / (step - before) if later >= earlier else None))
    return Curve(curve.name, found)


def _bytes(run: RecordedRun) -> PageSection:
    lead = (
        "What all recorded ranks together sent in their last recorded step, by ring convention, "
        "beside what the plan says."
    )
    return PageSection("bytes", "Bytes", lead, f'<div class="panel tall">{traffic_table(run)}</div>')


def _memory(run: RecordedRun) -> PageSection:
    measured = {
        "resident": "the measured peak is all resident memory of the process, libraries included",
        "allocated": "the measured peak is what the allocator of the GPU gave out, activations included",
    }
    lead = f"Planned: weights, gradients and optimizer state on the device; {measured.get(run.ranks[0].memory, '')}."
    return PageSection("memory", "Memory", lead, f'<div class="panel tall">{memory_table(run.ranks)}</div>')


def _schedule(run: RecordedRun) -> PageSection:
    predicted = simulate(run.schedule)
    panels, found = [Panel(predicted, "predicted")], run.timelines()
    if found:
        panels.append(Panel(next(iter(found.values())), "as run", seconds=True))
    table = f'<div class="panel tall">{bubble_table(run, predicted.bubble)}</div>' if found else (
        '<p class="empty">not measured: the last step was not a train_batch, or a rank has no record of it</p>'
    )  # fmt: skip
    lead = (
        "Predicted: every action starts as soon as it can, backwards take twice a forward. As run: the last recorded "
        "step of the first pipeline, on the clocks of its hosts; waits count as idle."
    )
    picture = f'<div class="panel schedule">{_inline(svg(panels, 1100))}</div>'
    return PageSection("schedule", "Schedule and bubble", lead, picture + table)


def _inline(picture: str) -> str:
    """A picture within HTML, where it has no namespace of its own."""
    return picture.replace(' xmlns="http://www.w3.org/2000/svg"', "")


def _plan(run: RecordedRun) -> PageSection:
    return PageSection("plan", "Plan", "", f'<div class="panel"><pre>{escape(str(run.facts["plan"]))}</pre></div>')


def _configuration(run: RecordedRun) -> PageSection:
    text = escape(json.dumps(run.facts["config"], indent=2))
    return PageSection(
        "configuration", "Configuration", "With every default.", f'<div class="panel tall"><pre>{text}</pre></div>'
    )


def _environment(run: RecordedRun) -> PageSection:
    facts = "".join(f"<dt>{escape(str(k))}</dt><dd>{escape(str(v))}</dd>" for k, v in run.facts["environment"].items())
    return PageSection("environment", "Environment", "", f'<div class="panel"><dl>{facts}</dl></div>')


_SECTIONS: tuple[Callable[[RecordedRun], PageSection], ...] = (
    _training, _waits, _experts, _bytes, _memory, _schedule, _plan, _configuration, _environment, _warnings,
)  # fmt: skip


def _charts(pictures: list[str]) -> str:
    return f'<div class="charts">{"".join(pictures)}</div>'


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _power(value: float) -> str:
    return f"{value:.2g}"


def _thousands(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def write_report(folder: Path, out: Path | None) -> None:
    """Read a run and write its page, and the trace of profiled steps, ``trace.json``, beside it.

    Args:
        folder: the folder that ``monitor.report`` of the run names.
        out: file of the page; None: ``report.html`` in that folder.

    Raises:
        EngineError: no run has recorded there, a file of it is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    file = out or folder / "report.html"
    traces, trace = read_traces(folder, run.size), file.with_name("trace.json")
    try:
        file.write_text(page(run), encoding="utf-8")
        if traces:
            trace.write_text(perfetto(traces), encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{file} cannot be written ({error.strerror}); name another file with --out.") from error
    print(f"{file}: {len(run.steps)} logged steps, {len(run.ranks)} of {run.size} ranks")
    if traces:
        print(f"{trace}: steps of {len(traces)} ranks for ui.perfetto.dev{_lost(traces)}")


def _lost(traces: Sequence[RankTrace]) -> str:
    """What is missing in traces."""
    lost = sum(trace.lost for trace in traces)
    return f"; {lost} events of long steps were overwritten before they were read" if lost else ""
