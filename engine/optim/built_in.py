"""The optimizers that a configuration names: the engine's over flat tensors, and torch's, which they equal."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from engine.config.optim_sections import MATRIX_OPTIMIZERS, OptimizerConfig
from engine.zero.optim.composite import CompositeOptimizer, PlainComposite
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory
from engine.zero.optim.muon import FlatMuon


def built_in_optimizer(config: OptimizerConfig) -> OptimizerFactory:
    """What makes the optimizer over flat tensors; of a list, one that updates each group by its own rule."""
    if not config.before:
        return _flat(config)
    return partial(CompositeOptimizer, makers=[_flat(entry) for entry in config.entries], kind=config.kind)


def _flat(config: OptimizerConfig) -> OptimizerFactory:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW": (FlatAdam, {"decoupled": True}),
        "Adam": (FlatAdam, {"decoupled": False}),
        "SGD": (FlatSGD, {}),
        "Lion": (FlatLion, {}),
        "Muon": (FlatMuon, {}),
    }
    kind, extra = kinds[config.type]
    options = dict(config.params) | extra
    return lambda groups: kind(groups, **options)


def plain_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of one process that the engine's has to equal, over whole parameters."""
    if not config.before:
        return _plain(config, groups)
    return PlainComposite(groups, [partial(_plain, entry) for entry in config.entries])


def _plain(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
        "Lion": FlatLion,
        "Muon": torch.optim.Muon,
    }
    params = dict(config.params)
    if config.type == "Muon" and params.pop("ns_dtype") != "bf16":
        return FlatMuon(groups, **config.params)  # torch's multiplies in bf16 alone
    corrected = params.pop("bias_correction", True)
    made = kinds[config.type](groups, **params)
    if not corrected:
        switch_off_bias_correction(made)
    return made


def switch_off_bias_correction(adam: torch.optim.Optimizer) -> None:
    """Start torch's Adam, which always corrects, at an update whose correction is a division by one."""
    for weight in [weight for group in adam.param_groups for weight in group["params"]]:
        averages = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        adam.state[weight] = {"step": torch.tensor(1e9), **averages}


def values_per_element(config: OptimizerConfig | None, groups: Sequence[GroupOptions]) -> tuple[int, ...] | None:
    """Optimizer values that an element of each group has; None if the optimizer is not configured."""
    if config is None:
        return None
    return tuple(_values(config.entries[group.entry or 0]) for group in groups)


def matrix_groups(config: OptimizerConfig | None, groups: Sequence[GroupOptions]) -> frozenset[int]:
    """Indices of the groups whose matrices are updated as a whole."""
    if config is None:
        return frozenset()
    kinds = [config.entries[group.entry or 0].type for group in groups]
    return frozenset(index for index, kind in enumerate(kinds) if kind in MATRIX_OPTIMIZERS)


def _values(config: OptimizerConfig) -> int:
    if config.type == "SGD":
        return int(config.params["momentum"] != 0)
    return 1 if config.type in ("Lion", "Muon") else 2
