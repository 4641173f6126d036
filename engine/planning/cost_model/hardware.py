"""GPUs as data: rates, memory and links of a kind of GPU, and the shares of them that training reaches.

A file is a JSON object; each entry is ``{"value": number, "source": "where it is from"}``. The files of this package
are in ``gpus``; any other one is given by its path.
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
    """Shares of the data sheet that training reaches; one set for a kind of GPU."""

    product: float
    """Share of the FLOPs a second: matrix products of any width, while nothing else runs."""
    product_half: float
    """Width of the narrower side of a product at which half of that is reached."""
    fp8: float
    """Share of the fp8 FLOPs a second: products with their casts; 0 without fp8."""
    attention: float
    """Share of the FLOPs a second: attention by blocks, of the FLOPs that it executes (causal: half)."""
    memory: float
    """Share of the bytes a second: passes over memory."""
    link: float
    """Share of the bytes a second within a node."""
    network: float
    """Share of the bytes a second between nodes."""
    overlap: float
    """Share of overlapped communication that costs no time."""
    step: float
    """Seconds for each second of a step that are lost besides: launches, stragglers, data, logging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Kind of GPU in its usual node."""

    name: str
    memory_bytes: float
    memory_rate: float
    """Bytes a second."""
    bf16_rate: float
    """Dense FLOPs a second of matrix products."""
    fp8_rate: float
    """The same in fp8; 0 where there is none."""
    gpus_per_node: float
    link_rate: float
    """Bytes a second, one way, of a GPU to the others of its node together."""
    link_latency: float
    """Seconds of one message within a node."""
    network_rate: float
    """Bytes a second, one way, of a GPU's share of the node's network."""
    network_latency: float
    """Seconds of one message between nodes."""
    reached: ReachedShares
    reached_of: str = ""
    """The kind of GPU from which ``reached`` is taken over; empty: it is that of this kind."""


def known_gpus() -> tuple[str, ...]:
    """Returns names of the files of this package."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def load_gpu(name: str) -> GpuSpec:
    """Reads a kind of GPU by its name or the path of a file.

    Raises:
        ConfigError: there is no such kind or file, or the file lacks a value.
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
    """Returns a kind of GPU from the content of a file."""
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
