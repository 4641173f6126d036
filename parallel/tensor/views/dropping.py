"""Dropout: what only this rank holds is dropped by numbers of its own, what all hold alike.

    held once       own numbers, between two seedings
    held by all     the same numbers everywhere: generators agree
    held by some    every rank draws the mask of the whole, and takes its part

The same two seedings as in ``region``, around each draw: every number that is drawn in between belongs to a part, and
afterwards all ranks go on as one.
"""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from engine.parallel.tensor.views.elementwise import elementwise
from engine.parallel.tensor.views.index import NoRuleError, Sets, held_once
from engine.parallel.tensor.views.view import Function, View

if TYPE_CHECKING:
    from engine.parallel.tensor.views.context import Views


def dropout(
    views: "Views", func: Function, input: Any, p: float = 0.5, training: bool | None = None, inplace: bool = False
) -> Any:
    """``F.dropout`` and ``F.alpha_dropout``; ``torch.dropout`` takes no default and no ``inplace``."""
    if training is None:
        training = func.__name__ == "dropout"  # of torch.nn.functional; its alpha_dropout does nothing by default
    return drop(views, func, input, (p, training), inplace)


def dropout_(
    views: "Views", func: Function, input: Any, p: float, training: bool | None = None, train: bool = False
) -> Any:
    """The forms of ``torch``."""
    return drop(views, func, input, (p, train if training is None else training), None)


def drop(views: "Views", func: Function, input: Any, how: tuple[float, bool], inplace: bool | None) -> Any:
    """Run ``func(input, *how)``.

    Raises:
        NoRuleError: several ranks hold some of it, and no mask would do.
    """
    if type(input) is not View:
        raise NoRuleError("no view")
    extra = {} if inplace is None else {"inplace": inplace}
    try:
        alone = draws_alone(input.sets, how[0] if how[1] else 0.0)
    except NoRuleError:
        if func.__name__ != "dropout":
            raise
        mask = functional.dropout(input.local.new_ones(input.full), *how)
        return input.mul_(mask) if inplace else input * mask
    with views.own_draws(input.device) if alone else nullcontext():
        return elementwise(views, func, input, *how, **extra)


def draws_alone(sets: Sets, p: float) -> bool:
    """Whether a rank draws by itself for a part that is cut so: False where nothing is drawn, or all draw alike.

    Raises:
        NoRuleError: several ranks hold some of it, not all.
    """
    if p == 0.0 or not any(index is not None for index in sets):
        return False
    if not held_once(sets):
        raise NoRuleError("one mask for several holders")
    return True
