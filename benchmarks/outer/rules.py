"""Trains a small decoder on real sites: each a process with an engine, whose store serves HTTP and writes its journal.

    python -m benchmarks outer_rules [--parts slow,loss,link] [--write-figures]

slow    four sites, one of them four times slower: seconds until a set training loss. bsp makes one update of four
        pushes, ssp and async one of each
loss    validation loss of Hogwild and Downpour beside synchronous training after equal rows, and the moments of sites
link    two sites behind links of 1/50 of the rate of loopback: tokens a second beside the prediction; root only

Exit code 1 if a goal is missed.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from benchmarks.harness.figures import record_cells, render_cells
from benchmarks.outer.live import LiveSites, ThisHost, Trained, live_sites, transport_rate
from benchmarks.outer.live_site import Job
from benchmarks.outer.text import ROWS, SIZES

PARTS = ("slow", "loss", "link")
RATE, SHARE_RATE = 3e-3, 1e-3
"""Learning rate of an update by the rows of all sites, and of one by the rows of one site: the best tried."""
PAUSE, SLOWER = 0.1, 4
"""Seconds that a site sleeps in a step, so that processors are not the limit; factor of the slow site."""
SITES, SLOW_STEPS, LOSS_STEPS, LINK_STEPS = 4, 200, 250, 100
COSINE = {
    "type": "WarmupCosineLR",
    "params": {
        "total_num_steps": LOSS_STEPS, "warmup_num_steps": 20, "warmup_type": "linear", "cos_min_ratio": 0.1,
    },
}  # fmt: skip
TARGET, WINDOW, DRAWS = 3.2, 20, 4
"""Training loss that ends the race; steps of all sites over which it is a mean; draws of rows in a step."""
RACES = {"SGD": {"bsp": 0.05, "ssp(3)": 0.05, "async": 0.05}, "AdamW": {"bsp": 3e-3, "ssp(3)": 1.5e-3}}
"""Learning rate of each rule: one for all with SGD; with AdamW, a smaller one for updates by the rows of one site."""
SLICE = 50
"""Ratio of the rate of loopback to that of a slow link."""
PERIOD, FRAGMENTS, DELAY = 50, 4, 5
SSP_SHARE, LOSS_SHARE = 0.7, 1.05
"""Goals: most of the time of bsp that ssp takes, and most of the loss of synchronous training."""
NAME, CORNER = "outer-rules", "real sites"
TIME, RATIO, LOSS, MOMENTS, SPEED, PREDICTED, LINK, COMPUTE = (
    "seconds to loss 3.2", "of the first row", "validation loss", "moments of a site", "tokens a second", "predicted",
    "MB/s of the link", "ms of a step alone",
)  # fmt: skip
Table = dict[tuple[str, str], str]


def race(sites: LiveSites) -> tuple[Table, bool]:
    """Trains four sites, one four times slower, by each rule until the loss is reached."""
    pauses, cells = (PAUSE,) * (SITES - 1) + (SLOWER * PAUSE,), Table()
    rules: dict[str, dict[str, Any]] = {
        "bsp": {"rule": "bsp"},
        "ssp(3)": {"rule": "ssp", "staleness": 3},
        "async": {"rule": "async"},
    }
    passed, first = True, 0.0
    for kind, rates in RACES.items():
        for name, rate in rates.items():
            job = replace(_job(rules[name], SLOW_STEPS, pauses), draws=DRAWS)
            job = replace(job, optimizer={"type": kind, "params": {"lr": rate}})
            found = sites.train(job, lambda now: now.seconds_until(TARGET, WINDOW) is not None)
            taken, row = (
                found.seconds_until(TARGET, WINDOW),
                f"one of {SITES} sites {SLOWER} x slower: {name}, {kind} {rate}",
            )
            first = (taken or 0.0) if name == "bsp" else first
            cells[row, TIME] = "not reached" if taken is None else f"{taken:.1f}"
            cells[row, RATIO] = f"{taken / first:.2f}" if taken and first else ""
            if (kind, name) == ("SGD", "ssp(3)"):
                passed = taken is not None and taken <= SSP_SHARE * first
            print(row, cells[row, TIME], cells[row, RATIO], _waits(found), flush=True)
    return cells, passed


def losses(sites: LiveSites) -> tuple[Table, bool]:
    """Trains four sites for equal rows, by synchronous training, Downpour and Hogwild."""
    cells, passed, base = Table(), True, 0.0
    for name, outer, rate in (
        ("synchronous (average, period 1)", {"rule": "average", "period": 1}, RATE),
        ("Downpour (async), AdamW on the store", {"rule": "async"}, SHARE_RATE),
        ("Hogwild, AdamW on each site", {"rule": "hogwild"}, SHARE_RATE),
    ):
        found = sites.train(replace(_job(outer, LOSS_STEPS, (0.0,) * SITES, rate), scheduler=COSINE))
        base = base or found.validation
        end = found.ends[0]
        cells[name, LOSS], cells[name, RATIO] = f"{found.validation:.4f}", f"{found.validation / base:.3f}"
        cells[name, MOMENTS] = f"{end['moments']:,} elements, plan {end['planned']:,} bytes"
        passed &= found.validation <= LOSS_SHARE * base
        passed &= outer["rule"] != "async" or end["moments"] == end["planned"] == 0
        print(name, *(text for (row, _), text in cells.items() if row == name), _waits(found), flush=True)
    return cells, passed


def links() -> tuple[Table, bool]:
    """Trains two sites behind slow links, by synchronous training, DiLoCo and streaming DiLoCo.

    Predicted seconds of a step, with B bytes of a push or pull, rate R, period H, F fragments and delay D:

        compute + max(0, 2 B / F / R - D compute) F / H
    """
    from tests.network import network

    loopback = transport_rate(ThisHost())
    rate, cells = loopback / SLICE, Table()
    with network(2, f"{8 * rate / 1e3:.0f}kbit") as net, live_sites(2, net) as sites:
        measured = transport_rate(net, 2_000_000)
        print(
            f"loopback {loopback / 1e6:.0f} MB/s, link {rate / 1e6:.1f} MB/s, measured {measured / 1e6:.1f}", flush=True
        )
        apart = sites.train(_job({"rule": "diloco", "period": LINK_STEPS + 1}, LINK_STEPS // 2, (0.0, 0.0)))
        compute = mean(step.ended - step.began - step.waited for own in _by_site(apart) for step in own[1:])
        forms: tuple[tuple[str, dict[str, Any]], ...] = (
            ("synchronous, period 1", {"rule": "average", "period": 1}),
            (f"DiLoCo, period {PERIOD}", {"rule": "diloco", "period": PERIOD}),
            (f"DiLoCo, period {PERIOD}, {FRAGMENTS} fragments, delay {DELAY}",
             {"rule": "diloco", "period": PERIOD, "fragments": FRAGMENTS, "delay": DELAY}),
        )  # fmt: skip
        for name, outer in forms:
            found = sites.train(_job(outer, LINK_STEPS, (0.0, 0.0)))
            joined = min(own[0].ended for own in _by_site(found))
            seconds = max(step.ended for step in found.steps) - joined
            period, fragments, delay = (int(outer.get(key, least)) for key, least in _FORM.items())
            predicted = predicted_step(compute, (SIZE / fragments, measured), period, fragments, delay)
            tokens, row = 2 * ROWS * SIZES.context, f"two sites, link of 1/{SLICE} of loopback: {name}"
            cells[row, SPEED] = f"{tokens * (LINK_STEPS - 1) / seconds:,.0f}"
            cells[row, LINK], cells[row, COMPUTE] = f"{measured / 1e6:.1f}", f"{1e3 * compute:.0f}"
            cells[row, PREDICTED] = f"{tokens / predicted:,.0f}"
            print(row, cells[row, SPEED], cells[row, PREDICTED], _waits(found), flush=True)
    return cells, True


_FORM = {"period": 1, "fragments": 1, "delay": 0}
SIZE = 547_840
"""Bytes of the decoder's fp32 weights."""


def predicted_step(compute: float, transfer: tuple[float, float], period: int, fragments: int, delay: int) -> float:
    """Returns the seconds of a step; ``transfer``: bytes of one fragment in one direction, and bytes a second."""
    size, rate = transfer
    return compute + max(0.0, 2 * size / rate - delay * compute) * fragments / period


def _job(outer: dict[str, Any], steps: int, pauses: tuple[float, ...], rate: float = RATE) -> Job:
    adamw = {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.1}}
    return Job("", outer | {"lease": 60.0}, adamw, steps, pauses)


def _waits(found: Trained) -> str:
    each = [
        f"{1e3 * median(step.ended - step.began for step in own):.0f}/{1e3 * median(step.waited for step in own):.0f}"
        for own in _by_site(found)
    ]
    return f"(ms of a step / wait: {', '.join(each)})"


def _by_site(found: Trained) -> Iterator[list[Any]]:
    for site in sorted({step.site for step in found.steps}):
        yield [step for step in found.steps if step.site == site]


def main(command: Sequence[str] | None = None) -> int:
    """Measures the parts, prints the table and writes the figure; returns the exit code."""
    asked = _parse(command)
    cells, passed = Table(), True
    local: dict[str, Callable[[LiveSites], tuple[Table, bool]]] = {"slow": race, "loss": losses}
    if set(asked.parts) & local.keys():
        with live_sites(SITES) as sites:
            for part in (part for part in asked.parts if part in local):
                found, good = local[part](sites)
                cells, passed = cells | found, passed and good
    if "link" in asked.parts:
        cells |= links()[0]
    print(render_cells(CORNER, cells, [TIME, RATIO, LOSS, MOMENTS, SPEED, PREDICTED, LINK, COMPUTE]))
    print("goals -> pass" if passed else "goals -> FAIL")
    if asked.write_figures:
        record_cells(NAME, CORNER, cells)
    return 0 if passed else 1


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks outer_rules", description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=lambda text: tuple(text.split(",")), default=PARTS, help="of slow, loss, link")
    parser.add_argument("--write-figures", action="store_true", help="keep the table, and show it")
    return parser.parse_args(command)
