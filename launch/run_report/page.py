"""Page of a run: sections in the order of a reader's questions. It refers to nothing outside of itself."""

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from engine.errors import EngineError
from engine.launch.run_report.charts import Curve, chart, expert_charts
from engine.launch.run_report.recorded_run import RankTrace, RecordedRank, RecordedRun, perfetto, read_run, read_traces
from engine.parallel.comm.traffic import megabytes
from engine.parallel.pipeline.report.svg import svg
from engine.parallel.pipeline.report.text import Panel
from engine.parallel.pipeline.schedule.simulate import simulate

MIB = 2**20


class PageSection(NamedTuple):
    """Section of the HTML report that ``trine report`` writes about a run."""

    name: str
    """HTML id of the section."""
    title: str
    lead: str
    """Introductory sentence: content and method of measurement."""
    body: str


def page(run: RecordedRun) -> str:
    """Returns the HTML report of a run as one document."""
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
    return PageSection("warnings", "Warnings", "Notes of the plan, and gaps in the record.", body)


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
    """Returns the values of monitor.metrics."""
    names = dict.fromkeys(name for row in run.steps for name in row.get("metrics", {}))
    return {name: Curve(name, [(r["step"], r.get("metrics", {}).get(name)) for r in run.steps]) for name in names}


def _is_expert(name: str) -> bool:
    return name.lower().startswith("expert")


def _experts(run: RecordedRun) -> PageSection:
    curves = [curve for name, curve in _metrics(run).items() if _is_expert(name)]
    counted, below = expert_charts(run.steps)
    own = chart("values of monitor.metrics", curves, _short, zero=True) if curves else ""
    lead = (
        "Rows that each expert received in the logged steps, over all microbatches and data ranks; 1 is the mean of "
        "its layer. Newest: the last tenth of the logged steps."
    )
    lead = lead if counted else "Values of monitor.metrics whose names begin with expert."
    body = _charts([counted, own]) + below if counted or own else ""
    return PageSection("experts", "Expert load", lead, body)


def _waits(run: RecordedRun) -> PageSection:
    lead = "Seconds of waiting for communication since training began, and all seconds in training steps."
    if not any(rank.waits is not None for rank in run.ranks):
        return PageSection("waits", "Waits by axis", lead, '<p class="empty">not measured: the watchdog was off</p>')
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
    """Returns milliseconds per step from cumulative seconds; a new start, with seconds from 0, leaves a gap."""
    found: list[tuple[float, float | None]] = []
    for (before, earlier), (step, later) in pairwise(curve.points):
        if earlier is not None and later is not None and step > before:
            found.append((step, 1e3 * (later - earlier) / (step - before) if later >= earlier else None))
    return Curve(curve.name, found)


def _bytes(run: RecordedRun) -> PageSection:
    lead = "Bytes that all recorded ranks sent in their last recorded step, by ring convention, and the planned bytes."
    return PageSection("bytes", "Bytes", lead, f'<div class="panel tall">{traffic_table(run)}</div>')


def _memory(run: RecordedRun) -> PageSection:
    measured = {
        "resident": "the measured peak is all resident memory of the process, libraries included",
        "allocated": "the measured peak is memory allocated on the GPU, activations included",
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
        "Predicted: every action starts as soon as it can, and a backward takes as long as two forwards. As run: "
        "the last recorded step of the first pipeline, on the clocks of its hosts; waits count as idle."
    )
    picture = f'<div class="panel schedule">{_inline(svg(panels, 1100))}</div>'
    return PageSection("schedule", "Schedule and bubble", lead, picture + table)


def _inline(picture: str) -> str:
    """Returns a picture for use within HTML, where it has no namespace of its own."""
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
    """Writes the HTML report of a run, and ``trace.json`` next to it if steps were profiled.

    Args:
        folder: the ``monitor.report`` folder of the run.
        out: file of the page; None: ``report.html`` in ``folder``.

    Raises:
        EngineError: the folder contains no records, a file is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    file = out or folder / "report.html"
    traces, trace = read_traces(folder, run.size), file.with_name("trace.json")
    try:
        file.write_text(page(run), encoding="utf-8", errors="backslashreplace")  # paths may be no text
        if traces:
            trace.write_text(perfetto(traces), encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{file} cannot be written ({error.strerror}); name another file with --out.") from error
    print(f"{file}: {len(run.steps)} logged steps, {len(run.ranks)} of {run.size} ranks")
    if traces:
        print(f"{trace}: steps of {len(traces)} ranks for ui.perfetto.dev{_lost(traces)}")


def _lost(traces: Sequence[RankTrace]) -> str:
    """Describes the missing events of traces."""
    lost = sum(trace.lost for trace in traces)
    return f"; {lost} events of long steps were overwritten before they were read" if lost else ""


def traffic_table(run: RecordedRun) -> str:
    """Returns an HTML table of planned and sent bytes in the last recorded step, summed over the recorded ranks."""
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
"""HTML legend of the colours for planned and measured bars."""


def memory_table(ranks: Sequence[RecordedRank]) -> str:
    """Returns an HTML table with each rank's planned bytes by kind, such as weights, and its measured peak memory."""
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
    """Returns the sorted names of the grid axes on which a rank has waited for communication."""
    return sorted({axis for rank in ranks for axis, seconds in (rank.waits or {}).items() if seconds})


def waits_by_rank(ranks: Sequence[RecordedRank]) -> str:
    """Returns an HTML table with each rank's seconds of waiting for communication, by axis, and their fraction of the
    time in all steps.
    """
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
    """Returns an HTML table with each pipeline's idle fraction in the last recorded step, next to ``predicted``."""
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
    """Returns an HTML table.

    Args:
        head: HTML of each heading.
        rows: HTML cells of each row, as :func:`cell` returns them.
        right: indices of right-aligned columns.
    """
    to_right = set(right)
    heads = "".join(f"<th{RIGHT * (n in to_right)}>{text}</th>" for n, text in enumerate(head))
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in (_placed(row, to_right) for row in rows))
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


RIGHT = ' class="r"'


def _placed(row: Sequence[str], right: Collection[int]) -> list[str]:
    return [text.replace("<td>", f"<td{RIGHT}>") if n in right else text for n, text in enumerate(row)]


def cell(text: str) -> str:
    """Returns an HTML table cell with ``text``; special characters of HTML are escaped."""
    return f"<td>{escape(text)}</td>"


def whole_number(count: int) -> str:
    """Returns an HTML table cell with the integer ``count``, with thousands separators."""
    return cell(f"{count:,}")


def amount(count: int) -> str:
    """Returns an HTML table cell with ``count`` bytes in readable units."""
    return f'<td class="r" title="{count} bytes">{megabytes(count)}</td>'


def bars(lines: Sequence[Sequence[tuple[int, float]]]) -> str:
    """Returns an HTML table cell with a horizontal bar for each of ``lines``.

    Each line is a list of the bar's segments: (index of the colour, fraction of the cell's width).
    """
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


STYLE: Final = """
:root{--bg:#f6f7f8;--panel:#fff;--ink:#1a1f26;--soft:#5c6570;--line:#e3e6ea;--grid:#eceff2;--track:#edf0f3;
--warn:#8a5300;--warnbg:#fff6e5;--k0:#2f6fde;--k1:#d9730d;--k2:#0f9d75;--k3:#b0399a;--k4:#7a5af5;--k5:#8d99a6;
--mono:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--panel:#151b23;--ink:#e6edf3;--soft:#9aa5b1;--line:#2a323c;
--grid:#232b35;--track:#242c36;--warn:#f0b849;--warnbg:#2a2114;--k0:#6ea8fe;--k1:#f0a35a;--k2:#4fcfa3;--k3:#e283cf;
--k4:#a995ff;--k5:#7d8894}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
main,header{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:36px}
h1{font-size:28px;line-height:1.2;margin:0;letter-spacing:-.01em}
h2{font-size:19px;margin:0 0 4px;letter-spacing:-.005em}
header p,.lead{color:var(--soft);margin:4px 0 16px;max-width:80ch}
nav{margin:18px 0 4px;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13.5px}
nav a{color:var(--k0);text-decoration:none}nav a:hover{text-decoration:underline}
section{margin:34px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:18px}
.tile,.panel,.chart{background:var(--panel);border:1px solid var(--line);border-radius:10px}
.tile{padding:12px 16px}
.tile span{display:block;color:var(--soft);font-size:12.5px}
.tile b{display:block;font-size:22px;font-weight:600;line-height:1.35;font-variant-numeric:tabular-nums}
.tile i{display:block;font-style:normal;color:var(--soft);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(320px,1fr));gap:14px}
.chart{margin:0;padding:12px 14px 8px}
.chart figcaption{display:flex;justify-content:space-between;gap:12px;font-size:13.5px;font-weight:600;
margin-bottom:4px}
.chart figcaption b{color:var(--k0);font-variant-numeric:tabular-nums}
.chart svg{display:block;width:100%;height:auto;overflow:visible}
.chart .grid{stroke:var(--grid);stroke-width:1}
.chart .tick{font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,"DejaVu Sans",sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.chart .right{text-anchor:end}.chart .middle{text-anchor:middle}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.tip{fill:transparent}.tip:hover{fill:var(--soft);fill-opacity:.4}
.curve.k0{stroke:var(--k0)}.curve.k1{stroke:var(--k1)}.curve.k2{stroke:var(--k2)}.curve.k3{stroke:var(--k3)}
.curve.k4{stroke:var(--k4)}.curve.k5{stroke:var(--k5)}
.dot.k0{fill:var(--k0)}.dot.k1{fill:var(--k1)}.dot.k2{fill:var(--k2)}.dot.k3{fill:var(--k3)}.dot.k4{fill:var(--k4)}
.dot.k5{fill:var(--k5)}
.m0{fill:var(--k0)}.m1{fill:var(--k0);fill-opacity:.62}.m2{fill:var(--k0);fill-opacity:.3}.m3{fill:var(--track)}
.m4{fill:var(--k1);fill-opacity:.35}.m5{fill:var(--k1);fill-opacity:.7}.m6{fill:var(--k1)}
.chart path[class^=m]{shape-rendering:crispEdges}
.keys,.note,.empty{margin:4px 0;font-size:12.5px;color:var(--soft)}
.key{margin-right:14px;white-space:nowrap}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;
vertical-align:-1px;background:var(--k5)}
.key.k0::before,.bar .k0{background:var(--k0)}.key.k1::before,.bar .k1{background:var(--k1)}
.key.k2::before,.bar .k2{background:var(--k2)}.key.k3::before,.bar .k3{background:var(--k3)}
.key.k4::before,.bar .k4{background:var(--k4)}.key.k5::before,.bar .k5{background:var(--k5)}
.key.m0::before{background:var(--k0)}.key.m1::before{background:var(--k0);opacity:.62}
.key.m2::before{background:var(--k0);opacity:.3}.key.m3::before{background:var(--track)}
.key.m4::before{background:var(--k1);opacity:.35}.key.m5::before{background:var(--k1);opacity:.7}
.key.m6::before{background:var(--k1)}
.charts+.keys{margin-top:12px}
.panel{padding:14px 18px;overflow:auto}
.panel+.panel,.charts+.panel,.panel+.charts{margin-top:14px}
.tall{max-height:460px}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;color:var(--soft);font-size:12.5px;padding:4px 14px 6px 0;white-space:nowrap}
td{padding:4px 14px 4px 0;border-top:1px solid var(--line);vertical-align:middle;white-space:nowrap}
th.r,td.r{text-align:right}td:last-child,th:last-child{padding-right:0}
td.bar{width:34%;min-width:160px}
.bar div{display:flex;height:9px;border-radius:5px;background:var(--track);overflow:hidden}
.bar div+div{margin-top:3px}
.bar i{display:block;height:100%}
td.ok{color:var(--k2)}td.off{color:var(--warn);font-weight:600}
pre{margin:0;font:12.5px/1.55 var(--mono);white-space:pre;tab-size:2}
.warnings{list-style:none;margin:0;padding:0}
.warnings li{background:var(--warnbg);border-left:3px solid var(--warn);border-radius:4px;padding:8px 14px;margin:8px 0;
overflow-wrap:anywhere}
.schedule svg{display:block;width:100%;min-width:720px;height:auto}
.schedule svg .page{fill:none}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 22px;margin:0;font-size:13.5px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
footer{max-width:1180px;margin:0 auto;padding:8px 24px 40px;color:var(--soft);font-size:12.5px}
@media print{nav{display:none}.panel,.tall{overflow:visible;max-height:none}}
""".strip()
