"""Parameters that no optimizer updates: frozen while the engine exists, so that no gradient is computed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from engine.config import Config
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.zero.optim.inner_optimizer import OptimizerFactory


def freeze_untrained(
    model: nn.Module,
    config: Config,
    optimizer: OptimizerFactory | torch.optim.Optimizer | None,
    patches: ForwardPatches,
) -> Config:
    """Freezes the parameters of ``model`` that no optimizer updates, until ``patches`` are removed.

    Returns ``config``, with a note for the user if a parameter was frozen.

    Args:
        optimizer: the user's optimizer; parameters that it leaves out are frozen. A callable, or an optimizer in
            ``config``, freezes none. Without any optimizer, all parameters are frozen.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if isinstance(optimizer, torch.optim.Optimizer):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        left = [name for name, parameter in trained.items() if id(parameter) not in held]
        why = f"the {type(optimizer).__name__} that was passed leaves out"
    elif optimizer is None and config.optimizer is None:
        left, why = list(trained), "the engine only evaluates, since no optimizer was named or passed, which leaves out"
    else:
        return config
    if not left:
        return config
    thaw = freeze([trained[name] for name in left])
    patches.own(model, PatchLayer.PARAMETERS, thaw, "has parameters that no optimizer updates, frozen until close")
    named = f"{left[0]!r}" + f" and {len(left) - 1} more of the trainable parameters" * (len(left) > 1)
    return replace(config, notes=(*config.notes, f"{why} {named}; frozen until the engine is closed."))


def freeze(parameters: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Sets ``requires_grad`` of ``parameters`` to False, and returns a function that sets it to True again."""

    def set_trained(trained: bool) -> None:
        for parameter in parameters:
            parameter.requires_grad_(trained)

    set_trained(False)
    return partial(set_trained, True)
