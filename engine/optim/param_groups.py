"""Optimizer groups by name pattern: assigns options to parameters, and includes frozen ones."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from engine.config.optim_sections import OptimizerConfig
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


def included_frozen(model: nn.Module, config: OptimizerConfig | None) -> tuple[str, ...]:
    """Return the names of the frozen parameters that ``optimizer.include_frozen`` matches.

    Raises:
        ConfigError: a pattern matches no frozen parameter.
    """
    patterns = config.include_frozen if config is not None else ()
    names = [alias for aliases in _names(model, trainable=False).values() for alias in aliases]
    given = [(f"optimizer.include_frozen[{i}]", pattern) for i, pattern in enumerate(patterns)]
    refuse_unmatched(given, names, "frozen parameter")
    return tuple(name for name in names if _match([name], patterns))


@contextmanager
def as_trainable(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Context in which the parameters ``names`` require gradients, so that they are planned as trained ones.

    Afterwards those that were frozen are frozen again: an update leaves them until the user thaws them.
    """
    before = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    frozen = [name for name in names if not before[name].requires_grad]
    for name in frozen:
        before[name].requires_grad_(True)
    try:
        yield
    finally:  # placing may have made other objects of them
        after = dict(model.named_parameters(remove_duplicate=False)) if frozen else {}
        for name in frozen:
            after[name].requires_grad_(False)


def _names(model: nn.Module, trainable: bool = True) -> dict[str, list[str]]:
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad == trainable:
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
