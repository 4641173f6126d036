"""States of the random generators that user code draws from, as bytes.

The engine's own randomness is keyed by seed and step and needs no state; a data loader that shuffles or augments
with the global generators does.
"""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.parallel.seeds import generators_of


def random_states(device: torch.device) -> dict[str, Tensor]:
    """uint8 tensors: torch's generators, Python's, NumPy's global one."""
    states = {f"torch/{index}": generator.get_state() for index, generator in enumerate(generators_of(device))}
    states["python"] = _bytes(random.getstate())
    legacy: Any = np.random.get_state(legacy=False)
    inner = legacy["state"] | {"key": legacy["state"]["key"].tolist()}
    states["numpy"] = _bytes(legacy | {"state": inner})
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse, for as many generators as there were."""
    for index, generator in enumerate(generators_of(device)):
        if f"torch/{index}" in states:
            generator.set_state(states[f"torch/{index}"])
    version, words, gauss = json.loads(states["python"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss))
    legacy = json.loads(states["numpy"].numpy().tobytes())
    legacy["state"]["key"] = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy)


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
