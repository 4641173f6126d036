"""Optimizer groups by name pattern: assigns options to parameters."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from engine.config.sections import OptimizerConfig
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.zero.optim.sharded_optimizer import GroupOptions


def assign_groups(
    model: nn.Module, config: OptimizerConfig | None
) -> tuple[Mapping[str, int], tuple[GroupOptions, ...]]:
    """Return the group index of every trainable parameter, by its first name, and the options of each group.

    ``optimizer.groups`` are tried in order, and the first match wins; ``no_weight_decay`` then removes the decay. A
    pattern may match any alias of a tied parameter. Groups are numbered by their first parameter.

    Raises:
        ConfigError: a pattern matches no trainable parameter.
    """
    config = config or OptimizerConfig()
    names = _names(model)
    known = [alias for aliases in names.values() for alias in aliases]
    refuse_unmatched(_patterns(config), known, "trainable parameter")
    chosen = {name: _options(aliases, config) for name, aliases in names.items()}
    options = tuple(dict.fromkeys(chosen.values()))
    return {name: options.index(option) for name, option in chosen.items()}, options


def _names(model: nn.Module) -> dict[str, list[str]]:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in aliases.values()}


def _options(aliases: Sequence[str], config: OptimizerConfig) -> GroupOptions:
    chosen = GroupOptions()
    for group in config.groups:
        if _match(aliases, group.params):
            chosen = GroupOptions(lr=group.lr, weight_decay=group.weight_decay)
            break
    return replace(chosen, weight_decay=0.0) if _match(aliases, config.no_weight_decay) else chosen


def _match(aliases: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(alias, pattern) for alias in aliases for pattern in patterns)


def _patterns(config: OptimizerConfig) -> Iterator[tuple[str, str]]:
    yield from ((f"optimizer.no_weight_decay[{i}]", glob) for i, glob in enumerate(config.no_weight_decay))
    for g, group in enumerate(config.groups):
        yield from ((f"optimizer.groups[{g}].params[{i}]", glob) for i, glob in enumerate(group.params))
