"""``trine plan --calibrate``: measures what the device at hand reaches, and writes a hardware file for ``--gpu``.

    products    square ones of growing width w: their seconds for each FLOP are 1 / R x (1 + w0 / w), a straight line
    attention   causal, forward, by the FLOPs that it executes
    passes      a copy of more bytes than any cache holds
    links       taken from what ``trine doctor --json FILE`` has measured on the ranks of a job, by axis

On a GPU of a known kind the data sheet stays and the shares are measured; elsewhere the rates are measured and the
shares of them are 1. What was not measured is copied from that kind and says so.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from engine.errors import ConfigError
from engine.kernels.device import device_name, find_accelerator, finish, is_host
from engine.planning.cost_model.hardware import FOLDER, known_gpus, spec_of
from engine.planning.host_step.host_rates import KEY

REPEATS = 5
WIDTHS = {True: (64, 128, 256, 512), False: (256, 512, 1024, 2048, 4096, 8192)}
"""Of the products, on the host and on an accelerator."""
COPIED = {True: 1 << 26, False: 1 << 31}
"""Bytes of the pass."""


def calibrate(path: Path, links: Path | None = None, ranks: int | None = None) -> None:
    """Measure, write ``path`` and say what is in it.

    Args:
        ranks: on the host, so many processes measure every operator and collective besides, all at once.

    Raises:
        ConfigError: a file cannot be read or written.
    """
    axes = [] if links is None else _axes(links)
    device = torch.device(find_accelerator() or "cpu")
    name = device_name(device)
    base = gpu_kind_of(name)
    content = filled(json.loads((FOLDER / f"{base}.json").read_text(encoding="utf-8")), name, is_host(device))
    for key, value, source in (*measured(device), *link_entries(axes)):
        _put(content, key, value, source, known=not is_host(device))
    if ranks is not None:
        content[KEY] = host_rates(ranks, device)
    spec_of(content, str(path))
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--calibrate {path} cannot be written: {error.strerror}; give another place.") from None
    print(f"{path}: {name}, the rest as {base}")
    for key, entry in (*content.items(), *content["reached"].items()):
        if isinstance(entry, Mapping) and str(entry.get("source", "")).startswith("measured"):
            print(f"  {key:<15} {entry['value']:.4g}  {entry['source']}")


def gpu_kind_of(name: str) -> str:
    """The known kind of GPU in a vendor's name; h100 where there is none."""
    return next((kind for kind in known_gpus() if kind in name.lower().replace(" ", "")), "h100")


def filled(content: dict[str, Any], name: str, host: bool) -> dict[str, Any]:
    """The file of a known kind as the start of another one."""
    for entry in (*content.values(), *content["reached"].values()):
        if isinstance(entry, dict) and "source" in entry:
            entry["source"] = f"not measured, as in the file of its kind: {entry['source']}"
    if host:
        content["reached"]["fp8"] = {"value": 0, "source": "not measured: no fp8 on the host"}
    return content | {"name": name}


def _put(content: dict[str, Any], key: str, value: float, source: str, known: bool) -> None:
    """Keep a measured rate: as a share of a known data sheet, or as the rate itself with the share 1."""
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
    """What this device reaches alone."""
    host = is_host(device)
    dtype = torch.float32 if host else torch.bfloat16
    kind = str(dtype).removeprefix("torch.")
    times = {width: _product_seconds(width, device, dtype) for width in WIDTHS[host]}
    rate, half = line_of(times)
    size = COPIED[host]
    data = torch.empty(size // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(data)
    copied = _seconds(lambda: other.copy_(data), device)
    tokens, heads = (512, 4) if host else (8192, 32)
    query = torch.randn(1, heads, tokens, 128, device=device, dtype=dtype)
    attended = _seconds(lambda: functional.scaled_dot_product_attention(query, query, query, is_causal=True), device)
    widths = f"{min(times)} to {max(times)}"
    return [
        ("product", rate, f"{kind} products of widths {widths}"),
        ("product_half", half, f"{kind} products of widths {widths}"),
        ("memory", 2 * size / copied, f"a copy of {size / 2**20:.0f} MiB"),
        (
            "attention",
            2 * heads * tokens * tokens * 128 / attended,
            f"{kind}, causal, {tokens} tokens of {heads} heads",
        ),
    ]


def line_of(times: Mapping[int, float]) -> tuple[float, float]:
    """(FLOPs a second of endless width, width at which half of it is reached) from seconds by width.

    2 w^3 / seconds = R w / (w + w0), so w / rate is the line (w + w0) / R; least squares.
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
    """Of one call, the median of a few; each is long enough for the clock."""
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


def host_rates(ranks: int, device: torch.device) -> dict[str, Any]:
    """What so many busy ranks of this host reach, of one thread each; they are started by torchrun and end here.

    Raises:
        ConfigError: the device is no host, or the ranks have failed.
    """
    if not is_host(device) or ranks < 1:
        raise ConfigError(
            f"--calibrate with --world {ranks}: it measures 1 or more ranks on the processors of a host, and here is "
            f"{device.type}; leave --world out."
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rates.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["-m", "engine.launch.planner.calibration.rank_measurements", str(out)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        if done.returncode or not out.is_file():
            raise ConfigError(
                f"--calibrate with --world {ranks}: the ranks ended with {done.returncode}; see their error above, or "
                "give a smaller --world."
            )
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def link_entries(axes: Sequence[Mapping[str, Any]]) -> list[_Entry]:
    """Links from the axes of a doctor: the fastest group within a host, the slowest between hosts."""
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
            f"--links {path} holds no axes; write it with torchrun -m engine.launch.doctor config.json --json {path}."
        ) from None
