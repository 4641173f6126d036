"""Expert load: how evenly the experts of each layer were used, as curves and heat maps."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from engine.launch.run_report.charts import Curve, chart
from engine.launch.run_report.heat_map import KEYS, HeatMap

_COLUMNS = 48
"""Columns of a heat map over steps; of more steps, neighbours are added up."""
_LAYERS = 6
"""Layers that have a heat map over steps of their own."""
_RECENT = 0.1
"""Part of the logged steps that counts as the newest."""


class _Layer(NamedTuple):
    """The experts of one layer."""

    name: str
    short: str
    steps: Sequence[int]
    rows: Sequence[Sequence[int]]
    """Of each step: the rows of each expert."""
    recent: Sequence[float]
    """Share of each expert in the newest steps, over the mean."""

    @property
    def worst(self) -> float:
        """Share of the busiest expert in the newest steps, over the mean."""
        return max(self.recent)


def expert_charts(steps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(figures, a legend and a sentence below them) of the logged steps; empty if no rows were counted."""
    layers = list(_layers([row for row in steps if row.get("expert_load")]))
    if not layers:
        return "", ""
    uneven = {layer.name for layer in sorted(layers, key=lambda layer: -layer.worst)[:_LAYERS]}
    pictures = [_imbalance(layers)]
    if len(layers) > 1:
        pictures.append(_by_layer(layers))
    pictures += [_over_steps(layer) for layer in layers if layer.name in uneven]
    left = len(layers) - len(uneven)
    note = f'<p class="note">Over steps: the {_LAYERS} of {len(layers)} layers that are least even.</p>' * bool(left)
    return "".join(pictures), KEYS + note


def _layers(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Layer]:
    """The layers that were given any rows, in the order of the model."""
    names = list(dict.fromkeys(name for row in rows for name in row["expert_load"]))
    for name, short in zip(names, _shortened(names), strict=True):
        size = next(len(row["expert_load"][name]) for row in reversed(rows) if name in row["expert_load"])
        found = [(row["step"], row["expert_load"][name]) for row in rows if sum(row["expert_load"].get(name, ()))]
        found = [(step, counts) for step, counts in found if len(counts) == size]
        if found:
            counted = [counts for _, counts in found]
            recent = _shares(_summed(counted[-max(1, round(_RECENT * len(counted))) :]))
            yield _Layer(name, short, [step for step, _ in found], counted, recent)


def _shortened(names: Sequence[str]) -> list[str]:
    """Names without the parts with which all of them begin and end: ``model.layers.3.mlp.experts`` is 3."""
    parts = [name.split(".") for name in names]
    if len(names) < 2:
        return [str(place) for place in range(len(names))]
    shortest = min(map(len, parts))
    head = next((n for n in range(shortest) if len({part[n] for part in parts}) > 1), shortest)
    tail = next((n for n in range(shortest - head) if len({part[-1 - n] for part in parts}) > 1), 0)
    return [".".join(part[head : len(part) - tail]) for part in parts]


def _summed(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*rows, strict=True)]


def _shares(counts: Sequence[int]) -> list[float]:
    """Over the mean."""
    total = sum(counts) or 1
    return [count * len(counts) / total for count in counts]


def _imbalance(layers: Sequence[_Layer]) -> str:
    """The busiest expert over the mean of its layer, by step."""
    found: dict[int, list[float]] = {}
    for layer in layers:
        for step, counts in zip(layer.steps, layer.rows, strict=True):
            found.setdefault(step, []).append(max(_shares(counts)))
    steps = sorted(found)
    curves = [Curve("least even layer", [(step, max(found[step])) for step in steps])]
    if len(layers) > 1:
        curves.append(Curve("median of the layers", [(step, median(found[step])) for step in steps]))
    return chart("busiest expert, times the mean", curves, _times, zero=True)


def _by_layer(layers: Sequence[_Layer]) -> str:
    """All experts of all layers in the newest steps."""
    most = max(len(layer.recent) for layer in layers)
    tips = [
        f"{layer.name}: {_times(min(layer.recent))} to {_times(layer.worst)} times the mean, "
        f"{sum(share == 0 for share in layer.recent)} of {len(layer.recent)} experts without rows"
        for layer in layers
    ]
    picture = HeatMap(
        title="newest steps, by layer and expert",
        cells=[[*layer.recent, *[1.0] * (most - len(layer.recent))] for layer in layers],
        rows=[layer.short for layer in layers],
        tips=tips,
        columns=range(most),
        across="expert",
    )
    return picture.drawn("")


def _over_steps(layer: _Layer) -> str:
    """The experts of one layer, step by step."""
    stretch = -(-len(layer.steps) // _COLUMNS)
    starts = range(0, len(layer.steps), stretch)
    columns = [_shares(_summed(layer.rows[start : start + stretch])) for start in starts]
    picture = HeatMap(
        title=layer.name,
        cells=list(zip(*columns, strict=True)),
        rows=[str(expert) for expert in range(len(layer.recent))],
        tips=[f"expert {expert}: {_times(share)} times the mean" for expert, share in enumerate(layer.recent)],
        columns=[layer.steps[start] for start in starts],
        across="step",
    )
    return picture.drawn(f"{_times(layer.worst)}")


def _times(value: float) -> str:
    return f"{value:.3g}"
