"""Optimizer groups by name pattern: assigns options to parameters, and includes frozen ones."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from engine.config.optim_sections import MATRIX_OPTIMIZERS, OptimizerConfig
from engine.errors import ConfigError
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.zero.optim.inner_optimizer import GroupOptions


def assign_groups(
    model: nn.Module, config: OptimizerConfig | None
) -> tuple[Mapping[str, int], tuple[GroupOptions, ...]]:
    """Return the group index of every trainable parameter, by its first name, and the options of each group.

    Of a list of optimizers, the first whose ``match`` has a name of the parameter takes it, and the last one the rest;
    those that update matrices pass by what is none. Then its ``groups`` are tried in order, and the first match wins;
    ``no_weight_decay`` then removes the decay. A pattern may match any alias of a tied parameter. Groups are numbered
    by their first parameter.

    Raises:
        ConfigError: a pattern matches no trainable parameter, or a matrix optimizer is left with what is no matrix.
    """
    config = config or OptimizerConfig()
    names, entries = _names(model), config.entries
    taken = _taken(model, names, config)
    for number, entry in enumerate(entries):
        at = f"optimizer[{number}]" if config.before else "optimizer"
        known = [alias for name, aliases in names.items() if taken[name] == number for alias in aliases]
        refuse_unmatched(_patterns(entry, at), known, "trainable parameter" + " of this entry" * bool(config.before))
    chosen = {
        name: replace(_options(aliases, entries[taken[name]]), entry=taken[name] if config.before else None)
        for name, aliases in names.items()
    }
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


def _taken(model: nn.Module, names: Mapping[str, list[str]], config: OptimizerConfig) -> dict[str, int]:
    """The number of the optimizer that takes each parameter."""
    shapes, last = {name: tuple(p.shape) for name, p in model.named_parameters()}, len(config.before)
    taken = {name: last for name in names}
    for number, entry in reversed(list(enumerate(config.before))):
        globs = [(f"optimizer[{number}].match", pattern) for pattern in entry.patterns]
        refuse_unmatched(globs, [alias for aliases in names.values() for alias in aliases], "trainable parameter")
        fits = [name for name in names if entry.type not in MATRIX_OPTIMIZERS or len(shapes[name]) == 2]
        taken |= {name: number for name in fits if _match(names[name], entry.patterns)}
    idle = [number for number in range(last) if number not in taken.values()]
    if idle:
        raise ConfigError(
            f"optimizer[{idle[0]}].match: earlier entries take all parameters that it matches, or they are no "
            "matrices, which its type needs; move it up, or leave it out."
        )
    others = [name for name, number in taken.items() if number == last and len(shapes[name]) != 2]
    if config.type in MATRIX_OPTIMIZERS and others:
        raise ConfigError(
            f"optimizer: {config.type} updates matrices, and {others[0]!r} of shape {list(shapes[others[0]])} is none; "
            f'give a list whose last entry takes the rest, such as [{{"match": "*.weight", "type": "{config.type}"}}, '
            '{"type": "AdamW"}].'
        )
    return taken


def _options(aliases: Sequence[str], config: OptimizerConfig) -> GroupOptions:
    chosen = GroupOptions()
    for group in config.groups:
        if _match(aliases, group.params):
            chosen = GroupOptions(lr=group.lr, weight_decay=group.weight_decay)
            break
    return replace(chosen, weight_decay=0.0) if _match(aliases, config.no_weight_decay) else chosen


def _match(aliases: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(alias, pattern) for alias in aliases for pattern in patterns)


def _patterns(config: OptimizerConfig, at: str) -> Iterator[tuple[str, str]]:
    yield from ((f"{at}.no_weight_decay[{i}]", glob) for i, glob in enumerate(config.no_weight_decay))
    for g, group in enumerate(config.groups):
        yield from ((f"{at}.groups[{g}].params[{i}]", glob) for i, glob in enumerate(group.params))
