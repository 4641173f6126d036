"""Calibration ``trine plan --calibrate``: measures the rates of this machine's GPU, and writes a file for ``--gpu``.

    products    square ones of growing width w: their seconds per FLOP are 1 / R x (1 + w0 / w), a straight line
    attention   causal, forward, by the FLOPs that it executes
    passes      a copy of more bytes than any cache stores
    links       read from the file of ``trine doctor --json FILE`` about the ranks of a job, by axis

For a known kind of GPU the data sheet stays and its shares are measured; for other GPUs the rates are measured and
their shares are 1. Values that were not measured are copied from that kind, or from h100, with a note.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from engine.errors import ConfigError
from engine.kernels.device import device_name, find_accelerator, finish
from engine.planning.cost_model.hardware import FOLDER, known_gpus, spec_of

REPEATS = 5
WIDTHS = (256, 512, 1024, 2048, 4096, 8192)
"""Widths of the measured square matrix products."""
COPIED = 1 << 31
"""Bytes copied in the bandwidth measurement."""
TOKENS, HEADS, HEAD_WIDTH = 8192, 32, 128
"""Tokens, heads and head width of the measured attention."""
FALLBACK = "h100"
"""Kind of GPU that supplies the unmeasured values for a GPU of unknown kind."""


def calibrate(path: Path, links: Path | None = None) -> None:
    """Measures the rates of matrix products, memory copies and attention on this machine's GPU; prints and writes them.

    ``path``: written file, for ``trine plan --gpu``. ``links``: file of ``trine doctor --json`` with link rates, or
    None.

    Raises:
        ConfigError: there is no GPU, or a file cannot be read or written.
    """
    axes = [] if links is None else _axes(links)
    found = find_accelerator()
    if found is None:
        raise ConfigError(
            f"--calibrate {path} measures a GPU, but this machine has none; run it on a machine with the GPUs of "
            "the training."
        )
    device = torch.device(found)
    name = device_name(device)
    kind = gpu_kind_of(name)
    base = kind or FALLBACK
    content = filled(json.loads((FOLDER / f"{base}.json").read_text(encoding="utf-8")), name)
    for key, value, source in (*measured(device), *link_entries(axes)):
        _put(content, key, value, source, known=kind is not None)
    spec_of(content, str(path))
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibrate {path} cannot be written: {error.strerror}; give another path.") from None
    print(f"{path}: {name}, the rest as {base}")
    for key, entry in (*content.items(), *content["reached"].items()):
        if isinstance(entry, Mapping) and str(entry.get("source", "")).startswith("measured"):
            print(f"  {key:<15} {entry['value']:.4g}  {entry['source']}")


def gpu_kind_of(name: str) -> str | None:
    """Returns the known GPU kind, such as "h100", in the device name ``name``; None if there is none."""
    return next((kind for kind in known_gpus() if kind in name.lower().replace(" ", "")), None)


def filled(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns ``content``, the parsed file of a known kind of GPU, with ``name`` as the name of the GPU.

    The values are unchanged, but marked as not measured.
    """
    for entry in (*content.values(), *content["reached"].values()):
        if isinstance(entry, dict) and "source" in entry:
            entry["source"] = f"not measured, as in the file of its kind: {entry['source']}"
    return content | {"name": name, "reached_of": ""}


def _put(content: dict[str, Any], key: str, value: float, source: str, known: bool) -> None:
    """Stores a measured rate: as a share of a known data sheet, or as the rate itself with the share 1."""
    rates = {"product": "bf16_rate", "memory": "memory_rate", "link": "link_rate", "network": "network_rate"}
    entry = {"value": value, "source": f"measured: {source}"}
    if key in ("product_half",):
        content["reached"][key] = entry
    elif key == "attention":
        entry["value"] = value / content["bf16_rate"]["value"]
        content["reached"][key] = entry
    elif key not in rates:
        content[key] = entry
    elif known:
        entry["value"] = value / content[rates[key]]["value"]
        content["reached"][key] = entry
    else:
        content[rates[key]] = entry
        content["reached"][key] = {"value": 1, "source": "the rate itself was measured"}


_Entry = tuple[str, float, str]
"""(key, value in SI units, source)."""


def measured(device: torch.device) -> list[_Entry]:
    """Measures bf16 matrix products, fp32 memory copies and bf16 attention on ``device``.

    Returns entries of a GPU file: (key, value in SI units, description of the measurement).
    """
    dtype = torch.bfloat16
    times = {width: _product_seconds(width, device, dtype) for width in WIDTHS}
    rate, half = line_of(times)
    data = torch.empty(COPIED // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(data)
    copied = _seconds(lambda: other.copy_(data), device)
    query = torch.randn(1, HEADS, TOKENS, HEAD_WIDTH, device=device, dtype=dtype)
    attended = _seconds(lambda: functional.scaled_dot_product_attention(query, query, query, is_causal=True), device)
    products = f"bfloat16 products of widths {min(times)} to {max(times)}"
    return [
        ("product", rate, products),
        ("product_half", half, products),
        ("memory", 2 * COPIED / copied, f"a copy of {COPIED / 2**20:.0f} MiB"),
        (
            "attention",
            2 * HEADS * TOKENS * TOKENS * HEAD_WIDTH / attended,
            f"bfloat16, causal, {TOKENS} tokens of {HEADS} heads",
        ),
    ]


def line_of(times: Mapping[int, float]) -> tuple[float, float]:
    """Fits the rate of products of square matrices to ``times``, a mapping from width to seconds.

    Returns (FLOP/s at infinite width, width with half of this rate). The model is rate(w) = R w / (w + w0).
    """
    points = [(width, width * seconds / (2 * width**3)) for width, seconds in times.items()]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    best = max(2 * width**3 / seconds for width, seconds in times.items())
    if slope <= 0:
        return best, 0.0
    return 1 / slope, max(0.0, mean_y / slope - mean_x)


def _product_seconds(width: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    return _seconds(lambda: left @ right, device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call, the median of a few; each repetition is long enough for the clock."""
    call()
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    once = max(time.perf_counter() - began, 1e-7)
    count, found = max(1, int(0.02 / once)), []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(count):
            call()
        finish(device)
        found.append((time.perf_counter() - began) / count)
    return median(found)


def link_entries(axes: Sequence[Mapping[str, Any]]) -> list[_Entry]:
    """Returns link rates and latencies as entries of a GPU file: (key, value in SI units, description).

    ``axes``: measurements of ``trine doctor --json``. "link" entries are from the fastest group within a host,
    "network" entries from the slowest group across hosts.
    """
    found: list[_Entry] = []
    for inside, rate, latency in ((True, "link", "link_latency"), (False, "network", "network_latency")):
        groups = [axis for axis in axes if (len(axis["hosts"]) == 1) == inside and axis["rate"] > 0]
        if groups:
            one = max(groups, key=lambda axis: axis["rate"]) if inside else min(groups, key=lambda axis: axis["rate"])
            steps = max(1, 2 * (len(one["ranks"]) - 1)) if one["axis"] != "pp" else 1
            source = f"axis {one['axis']} of {len(one['ranks'])} ranks, {one['payload']:,} bytes a call"
            found += [(rate, one["rate"], source), (latency, one["latency"] / steps, source)]
    return found


def _axes(path: Path) -> list[Mapping[str, Any]]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return list(read["axes"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--links {path} has no axes; write it with torchrun -m engine.launch.doctor config.json --json {path}."
        ) from None
