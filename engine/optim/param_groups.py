"""Parameter groups of the optimizer: from the script's optimizer, or by name patterns of the configuration.

The script's optimizer is rebuilt over flat buckets from its class, groups and options. While the engine exists, it
exposes the engine's groups and state, and rates set there, also by a scheduler, take effect.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.config.optim_sections import MATRIX_OPTIMIZERS, OptimizerConfig
from engine.errors import ConfigError
from engine.parallel.model.name_patterns import refuse_unmatched
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory, refuse_own_step

_OF_TORCH = ("params", "param_names")
"""Keys of a group under which torch stores its parameters."""


@dataclass(frozen=True, slots=True)
class GivenOptimizer:
    """User's optimizer, and the index of each parameter's group; ``factory`` makes an optimizer of the same class and
    defaults over the engine's flat buckets (1-D tensors of many parameters).
    """

    optimizer: torch.optim.Optimizer
    factory: OptimizerFactory
    assigned: Mapping[str, int]
    """Group index of every trainable parameter, by its first name."""
    groups: tuple[GroupOptions, ...]


def read_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: OptimizerConfig | None
) -> GivenOptimizer:
    """Returns class, parameter groups and options of the user's ``optimizer`` over the parameters of ``model``.

    Raises:
        ConfigError: the optimizer has parameters outside of ``model``, has made steps, or needs a constructor argument
            that its ``defaults`` lack; or ``config`` has parameter groups too.
    """
    kind = type(optimizer).__name__
    if config is not None and (config.groups or config.no_weight_decay):
        raise ConfigError(
            f"optimizer is a {kind} with groups of its own, but the configuration has optimizer.groups or "
            "optimizer.no_weight_decay; keep one of them."
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigError(
            f"optimizer is a {kind} that has made steps, but an engine cannot use its state; pass a new one, and load "
            "the state with eng.load_checkpoint."
        )
    _refuse_parallel_lists(optimizer)
    assigned = _assigned(optimizer, model)
    groups = tuple(GroupOptions(others=tuple(_group_options(group).items())) for group in optimizer.param_groups)
    return GivenOptimizer(optimizer, _factory(optimizer), assigned, groups)


def replacing_sections(config: Config, optimizer: object, lr_scheduler: object, notes: Iterable[str]) -> Config:
    """Returns ``config`` for a run with the user's own optimizer or schedule, with notes that the banner prints.

    If ``optimizer`` is given, type and params of the configured optimizer have no effect, and a note says this if the
    configuration sets them. If ``lr_scheduler`` is given, a configured scheduler is removed, with a note too. ``notes``
    are added as well.

    Args:
        optimizer: the user's optimizer, or None.
        lr_scheduler: the user's schedule, or None.
    """
    notes, own = [*notes], config.optimizer
    if optimizer is not None and own is not None:
        built_by_hand = not config.written and own != OptimizerConfig()
        if built_by_hand or config.written & {"optimizer.type", "optimizer.params"}:
            notes.append(
                f"optimizer: the one passed in code is used, so type and params of the section ({own.type}) have no "
                "effect; leave them out"
            )
    if lr_scheduler is not None and config.scheduler is not None:
        notes.append(
            f"scheduler: the one passed in code is used, so the section ({config.scheduler.type}) has no effect; "
            "leave one of them out"
        )
        config = replace(config, scheduler=None)
    return replace(config, notes=(*config.notes, *notes))


def show_inner(given: torch.optim.Optimizer, inner: torch.optim.Optimizer, scheduled: bool) -> Callable[[], None]:
    """Makes the user's optimizer ``given`` show ``param_groups`` and ``state`` of ``inner``, the engine's optimizer.

    Returns a function that undoes this; until then ``given.step()`` raises EngineError.

    Args:
        scheduled: True: the engine's schedule sets the learning rates. False: each group of ``inner`` gets the rate of
            its group in ``given``.
    """
    before = given.param_groups, given.state
    for group, old in zip(inner.param_groups, given.param_groups, strict=True):
        if not scheduled:
            group.update({name: old[name] for name in ("lr", "initial_lr") if name in old})
    given.param_groups, given.state = inner.param_groups, inner.state
    # torch's schedulers warn if step() of the optimizer they were made for is never called
    counted = inner.register_step_post_hook(lambda *_: setattr(given, "_opt_called", True))
    refused = given.register_step_pre_hook(refuse_own_step)
    return partial(_show_own, given, before, (counted, refused))


def _show_own(given: torch.optim.Optimizer, before: tuple[Any, Any], handles: tuple[Any, ...]) -> None:
    given.param_groups, given.state = before
    for handle in handles:
        handle.remove()


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Returns True if there is state of a step; Adagrad creates state in its constructor, with a step count of 0."""
    return bool(state) and not ("step" in state and float(state["step"]) == 0)


def _assigned(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    kind = type(optimizer).__name__
    group_of = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"optimizer is a {kind}, and its group {index} has a parameter of shape {tuple(parameter.shape)} "
                    f"that is not the model's; build it over model.parameters(), or pass optimizer=lambda params: "
                    f"{kind}(params, ...)."
                )
    return {name: group_of[id(parameter)] for name, parameter in named.items()}


def _refuse_parallel_lists(optimizer: torch.optim.Optimizer) -> None:
    """Refuses a group option with an entry for each parameter, as LoRA-FA's ``names``: buckets have another order."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            parallel = isinstance(value, list) and len(value) == len(group["params"]) and name not in _OF_TORCH
            if parallel and not any(isinstance(entry, int | float) for entry in value):
                raise ConfigError(
                    f"optimizer is a {type(optimizer).__name__}, and its group {index} has an entry of {name!r} for "
                    "each parameter, but an engine passes only trained parameters, in an order of its own; "
                    "choose an optimizer without such lists."
                )


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a group; a scheduler over the optimizer has moved lr from ``initial_lr``."""
    options = {name: value for name, value in group.items() if name not in (*_OF_TORCH, "initial_lr")}
    return options | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _factory(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    kind, defaults = type(optimizer), optimizer.defaults
    _, *parameters = inspect.signature(kind).parameters.values()
    options = {each.name: defaults[each.name] for each in parameters if each.name in defaults}
    for name in _required(parameters):
        if name not in options:
            raise ConfigError(
                f"optimizer is a {kind.__name__}, and its constructor needs {name}, which its defaults lack; "
                f"pass optimizer=lambda params: {kind.__name__}(params, {name}=...)."
            )
    return lambda groups: kind(groups, **options)


def _required(parameters: list[inspect.Parameter]) -> Iterator[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    yield from (p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic)


def assign_groups(
    model: nn.Module, config: OptimizerConfig | None
) -> tuple[Mapping[str, int], tuple[GroupOptions, ...]]:
    """Returns (mapping from the name of each trainable parameter to its group's index, options of each group).

    Groups are numbered in the order of their first parameters. A tied parameter appears under its first name. With
    several optimizers, each parameter belongs to the first one with a ``match`` for its name, or else to the last.
    Optimizers of matrices leave parameters that are not 2-D to later optimizers.

    Raises:
        ConfigError: a pattern matches no trainable parameter, or an optimizer of matrices is last and a remaining
            parameter is not a matrix.
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
    """Returns all names of frozen parameters that match a pattern of ``optimizer.include_frozen``.

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
    """Returns a context manager in which the parameters ``names`` of ``model`` have ``requires_grad``.

    Parameters that were frozen before are frozen again afterwards.
    """
    before = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    frozen = [name for name in names if not before[name].requires_grad]
    for name in frozen:
        before[name].requires_grad_(True)
    try:
        yield
    finally:  # placement may have replaced the objects
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
    """Returns the number of the optimizer of each parameter."""
    shapes, last = {name: tuple(p.shape) for name, p in model.named_parameters()}, len(config.before)
    taken = {name: last for name in names}
    for number, entry in reversed(list(enumerate(config.before))):  # so that the first match overwrites later ones
        globs = [(f"optimizer[{number}].match", pattern) for pattern in entry.patterns]
        refuse_unmatched(globs, [alias for aliases in names.values() for alias in aliases], "trainable parameter")
        fits = [name for name in names if entry.type not in MATRIX_OPTIMIZERS or len(shapes[name]) == 2]
        taken |= {name: number for name in fits if _match(names[name], entry.patterns)}
    idle = [number for number in range(last) if number not in taken.values()]
    if idle:
        entry = config.before[idle[0]]
        ranks = {len(shapes[name]) for name in names if _match(names[name], entry.patterns)}
        if entry.type in MATRIX_OPTIMIZERS and 2 not in ranks:
            raise ConfigError(
                f"optimizer[{idle[0]}].match: {entry.type} updates only matrices, but no parameter that this entry "
                "matches is 2-D; match the names of matrices, or remove the entry."
            )
        raise ConfigError(
            f"optimizer[{idle[0]}].match: earlier entries already take all parameters that this entry matches and "
            f"{entry.type} can update; move this entry before them, or remove it."
        )
    others = [name for name, number in taken.items() if number == last and len(shapes[name]) != 2]
    if config.type in MATRIX_OPTIMIZERS and others:
        raise ConfigError(
            f"optimizer: {config.type} updates only matrices, but here it would also take {others[0]!r} of shape "
            f'{list(shapes[others[0]])}; end the list optimizer with {{"match": "*", "type": "{config.type}"}}, which '
            'takes all matrices, and {"type": "AdamW"}, which takes the rest.'
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
