"""An optimizer that the user has built over the model's parameters: its class, groups and options, to build it anew.

The engine moves parameters into flat buckets, shards them, or leaves them to other stages, so an optimizer that holds
the user's parameters cannot be used itself. While the engine lives, it shows the groups and the state of the one that
is: rates that the user, or a scheduler of his, sets on it take effect.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import ConfigError
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory, refuse_own_step

_OF_TORCH = ("params", "param_names")
"""Keys of a group by which torch keeps its parameters."""


@dataclass(frozen=True, slots=True)
class GivenOptimizer:
    """What an optimizer of the user says about its parameters."""

    optimizer: torch.optim.Optimizer
    factory: OptimizerFactory
    assigned: Mapping[str, int]
    """Group of every trainable parameter, by its first name."""
    groups: tuple[GroupOptions, ...]


def read_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: OptimizerConfig | None
) -> GivenOptimizer:
    """Read class, groups and options of an optimizer over the parameters of ``model``.

    Raises:
        ConfigError: it has parameters that are not the model's, has made steps, cannot be built anew, or the
            configuration has groups too.
    """
    kind = type(optimizer).__name__
    if config is not None and (config.groups or config.no_weight_decay):
        raise ConfigError(
            f"optimizer is a {kind} with groups of its own, and the configuration has optimizer.groups or "
            "optimizer.no_weight_decay; keep one of them."
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigError(
            f"optimizer is a {kind} that has made steps, whose state an engine cannot take; pass a new one, and load "
            "the state with eng.load_checkpoint."
        )
    _refuse_parallel_lists(optimizer)
    assigned = _assigned(optimizer, model)
    groups = tuple(GroupOptions(others=tuple(_options(group).items())) for group in optimizer.param_groups)
    return GivenOptimizer(optimizer, _factory(optimizer), assigned, groups)


def replacing_sections(config: Config, optimizer: object, lr_scheduler: object, notes: Iterable[str]) -> Config:
    """The configuration of a run, with ``notes`` and one for each section that an optimizer or a schedule from code
    replaces.

    Groups of the section and its other keys hold for the optimizer that is passed too.
    """
    notes, own = [*notes], config.optimizer
    if optimizer is not None and own is not None:
        built_by_hand = not config.written and own != OptimizerConfig()
        if built_by_hand or config.written & {"optimizer.type", "optimizer.params"}:
            notes.append(
                f"optimizer: the one that is passed in code is used, so type and params of the section ({own.type}) "
                "have no effect; leave them out"
            )
    if lr_scheduler is not None and config.scheduler is not None:
        notes.append(
            f"scheduler: the one that is passed in code is used, so the section ({config.scheduler.type}) has no "
            "effect; leave one of them out"
        )
        config = replace(config, scheduler=None)
    return replace(config, notes=(*config.notes, *notes))


def show_inner(given: torch.optim.Optimizer, inner: torch.optim.Optimizer, scheduled: bool) -> Callable[[], None]:
    """Let the user's optimizer show groups and state of the inner one, until the returned function is called.

    Args:
        scheduled: rates come from a schedule that is made for the inner optimizer. If not, each group goes on with the
            rate that a scheduler over ``given`` has set.
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
    """Whether there is state of a step; Adagrad makes state in its constructor, with a step count of 0."""
    return bool(state) and not ("step" in state and float(state["step"]) == 0)


def _assigned(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    kind = type(optimizer).__name__
    held = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    known = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"optimizer is a {kind} whose group {index} has a parameter of shape {tuple(parameter.shape)} that "
                    f"is not the model's; build it over model.parameters(), or pass optimizer=lambda params: "
                    f"{kind}(params, ...)."
                )
    return {name: held[id(parameter)] for name, parameter in named.items()}


def _refuse_parallel_lists(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a group option with an entry for each parameter, as LoRA-FA's ``names``: buckets have another order."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            beside = isinstance(value, list) and len(value) == len(group["params"]) and name not in _OF_TORCH
            if beside and not any(isinstance(entry, int | float) for entry in value):
                raise ConfigError(
                    f"optimizer is a {type(optimizer).__name__} whose group {index} has an entry of {name!r} for each "
                    "parameter, and an engine gives its optimizer those that are trained, in an order of its own; "
                    "choose an optimizer that reads each parameter alone."
                )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group; a scheduler that was made for the optimizer has moved lr away from ``initial_lr``."""
    options = {name: value for name, value in group.items() if name not in (*_OF_TORCH, "initial_lr")}
    return options | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})


def _factory(optimizer: torch.optim.Optimizer) -> OptimizerFactory:
    kind, defaults = type(optimizer), optimizer.defaults
    _, *parameters = inspect.signature(kind).parameters.values()
    options = {each.name: defaults[each.name] for each in parameters if each.name in defaults}
    for name in _required(parameters):
        if name not in options:
            raise ConfigError(
                f"optimizer is a {kind.__name__}, whose constructor needs {name}, which the optimizer does not keep "
                f"among its defaults; pass optimizer=lambda params: {kind.__name__}(params, {name}=...)."
            )
    return lambda groups: kind(groups, **options)


def _required(parameters: list[inspect.Parameter]) -> Iterator[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    yield from (p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variadic)
