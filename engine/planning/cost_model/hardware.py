"""GPU types as data: rates, memory and links, and the fractions of them that training reaches.

A file is a JSON object of entries ``{"value": number, "source": "where it is from"}``. Known GPUs are in ``gpus``;
other files are passed by path.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from engine.errors import ConfigError

FOLDER = Path(__file__).parent / "gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedShares:
    """Fractions of a GPU type's data-sheet rates (such as peak FLOP/s) that training reaches."""

    product: float
    """Fraction of peak FLOP/s for wide matrix products."""
    product_half: float
    """Narrower side of a matrix product at which half of that fraction is reached."""
    fp8: float
    """Fraction of peak fp8 FLOP/s for matrix products with their casts; 0 without fp8."""
    attention: float
    """Fraction of peak FLOP/s for flash attention, by executed FLOPs (causal: half)."""
    memory: float
    """Fraction of peak memory bandwidth for elementwise operators."""
    link: float
    """Fraction of link bandwidth inside a node."""
    network: float
    """Fraction of network bandwidth between nodes."""
    overlap: float
    """Fraction of overlapped communication that costs no time."""
    step: float
    """Overhead per second of a step: launches, stragglers, data, logging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Rates and memory of a GPU type, and size and links of a typical node with such GPUs."""

    name: str
    memory_bytes: float
    memory_rate: float
    """Memory bandwidth in bytes per second."""
    bf16_rate: float
    """Dense bf16 FLOP/s of matrix products."""
    fp8_rate: float
    """Dense fp8 FLOP/s; 0 without fp8."""
    gpus_per_node: float
    link_rate: float
    """One-way bytes per second from a GPU to all others of its node."""
    link_latency: float
    """Seconds of a small message inside a node."""
    network_rate: float
    """One-way bytes per second of the node's network per GPU."""
    network_latency: float
    """Seconds of a small message between nodes."""
    reached: ReachedShares
    reached_of: str = ""
    """GPU type on which ``reached`` was measured; empty: this one."""


def known_gpus() -> tuple[str, ...]:
    """Returns the names of the GPU types that ship with this package, such as "h100"."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_gpu(name: str) -> GpuSpec:
    """Returns the GPU type called ``name``; if there is none, reads it from the JSON file at the path ``name``.

    Raises:
        ConfigError: there is no such name or file, or the file lacks a value.
    """
    path = FOLDER / f"{name.lower()}.json"
    if name.lower() not in known_gpus():
        path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            f"--gpu {name}: there is no such kind of GPU and no such file; give {', '.join(known_gpus())}, or the path "
            "of a JSON file that trine plan --calibrate writes."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--gpu {name} cannot be read as JSON ({error}); give a file like {FOLDER.name}/h100.json."
        ) from None
    return spec_of(raw, name)


def spec_of(raw: Any, name: str) -> GpuSpec:
    """Returns the GPU type that ``raw``, the parsed content of a JSON file, describes.

    ``name``: name or path that the user gave, for errors.

    Raises:
        ConfigError: ``raw`` is no JSON object, or lacks a value.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"--gpu {name} holds no JSON object; give a file like {FOLDER.name}/h100.json.")
    shares = raw.get("reached")
    reached = ReachedShares(**_numbers(shares if isinstance(shares, Mapping) else {}, ReachedShares, name, "reached."))
    taken = str(raw.get("reached_of", ""))
    return GpuSpec(
        name=str(raw.get("name", name)), reached=reached, reached_of=taken, **_numbers(raw, GpuSpec, name, "")
    )


def _numbers(raw: Mapping[str, Any], of: type, name: str, prefix: str) -> dict[str, float]:
    hints = get_type_hints(of)
    wanted = [entry.name for entry in fields(of) if hints[entry.name] is float]
    found: dict[str, float] = {}
    for key in wanted:
        entry = raw.get(key)
        value = entry.get("value") if isinstance(entry, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(
                f"--gpu {name} has {prefix}{key} = {json.dumps(entry)}; each entry is an object with a number of at "
                'least 0 and its source, such as {"value": 0.7, "source": "measured"}.'
            )
        found[key] = float(value)
    return found
