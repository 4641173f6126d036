"""Trine: 3D-parallel training of unchanged PyTorch models, from one JSON file.

    import engine
    eng = engine.initialize(model, "config.json")
    report = eng.train_batch(batch)

Names are imported on first use, so that the configuration and ``--help`` do not import torch.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine import data, verify
    from engine.api import initialize
    from engine.config import Config, load_config
    from engine.engine import Engine
    from engine.errors import (
        CheckpointError,
        ConfigError,
        CorruptionError,
        EngineError,
        GridError,
        LaunchError,
        PlanError,
        ScheduleError,
    )
    from engine.reporting.step_report import StepReport
    from engine.serving.host.service import serve
    from engine.sweep.sweep import Sweep
    from engine.sweep.trial import SweepTrial, TrialEnd
    from engine.web.remote_model import remote

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "Engine",
    "EngineError",
    "GridError",
    "LaunchError",
    "PlanError",
    "ScheduleError",
    "StepReport",
    "Sweep",
    "SweepTrial",
    "TrialEnd",
    "__version__",
    "data",
    "initialize",
    "load_config",
    "remote",
    "serve",
    "verify",
]

__version__ = "0.2.0"

_HOMES = MappingProxyType(
    {
        "Config": "engine.config",
        "Engine": "engine.engine",
        "StepReport": "engine.reporting.step_report",
        "Sweep": "engine.sweep.sweep",
        "SweepTrial": "engine.sweep.trial",
        "TrialEnd": "engine.sweep.trial",
        "initialize": "engine.api",
        "load_config": "engine.config",
        "remote": "engine.web.remote_model",
        "serve": "engine.serving.host.service",
    }
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    if name in ("data", "verify"):
        return import_module(f"engine.{name}")
    return getattr(import_module(_HOMES.get(name, "engine.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
