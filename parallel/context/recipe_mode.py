"""Modes of a forward in which long masks are recipes, and the host answers for short tensors of integers.

On a GPU, the mode also computes short integer tensors that come from ``torch.arange`` on the host, so that
``if mask.all():`` does not wait.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.kernels.device import is_host
from engine.parallel.context.recipe import (
    BY_ELEMENT,
    CONSTANTS,
    INDEXED,
    Function,
    constant_recipe,
    functions_named,
    recipe_of,
)
from engine.parallel.model.operand_casts import QuietMode, is_watched

_LONG = 1 << 12
"""Positions from which on the tensors of a forward become recipes."""
_TWIN = 1 << 17
"""Maximum elements of a tensor that the host computes too."""
_FOLLOWED = BY_ELEMENT | {INDEXED} | functions_named("unsqueeze expand view diff cumsum all any sum")
"""Functions that the host computes too, of tensors that it knows."""


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


class HostTwins:
    """Host copies of a forward's small integer tensors, so that code reads their values without a device wait.

    ``torch.arange`` runs on the host too; the copy of a batch is the host tensor that it was made from. Later
    operations run on the copies too.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, Tensor]] = {}
        """(tensor, its version, the copy) by the tensor's id; the tensor is held, so that its id stays its own."""

    def follow(self, func: Function, args: Any, kwargs: Any, made: Any) -> None:
        """Registers the host copy of ``made``, a result of ``func``, by running ``func`` on the host copies of the
        arguments.

        Does nothing unless all tensor arguments have host copies and ``made`` is a short tensor of integers.
        """
        if func is not torch.arange and not any(id(each) in self._known for each in args):
            return
        if type(made) is not Tensor or made.numel() > _TWIN or made.is_floating_point() or made.is_inference():
            return
        if func is torch.arange and is_host(made.device):
            return
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        leaves, form = pytree.tree_flatten((args, kwargs), is_leaf=_is_tensor)
        own = [self.of(leaf) if isinstance(leaf, Tensor) else _on_host(leaf) for leaf in leaves]
        if all(twin is not None or leaf is None for twin, leaf in zip(own, leaves, strict=True)):
            args, kwargs = pytree.tree_unflatten(own, form)
            self._known[id(made)] = made, made._version, func(*args, **kwargs)

    def know(self, tensor: Tensor, twin: Tensor) -> None:
        """Registers the host tensor ``twin`` as the host copy of ``tensor``, unless ``tensor`` is large or
        floating-point.
        """
        short = tensor.numel() <= _TWIN and not tensor.is_floating_point() and not tensor.is_inference()
        if short and is_host(twin.device) and not is_host(tensor.device):
            self._known[id(tensor)] = tensor, tensor._version, twin

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the host copy of ``tensor``; None without a copy, or if ``tensor`` was written after the copy."""
        _, version, twin = self._known.get(id(tensor), (None, 0, None))
        return twin if twin is not None and tensor._version == version else None


def _on_host(leaf: Any) -> Any:
    """Returns an argument for the host's copy; None if it may name a device in another way."""
    return torch.device("cpu") if isinstance(leaf, torch.device) else None if isinstance(leaf, str) else leaf


class RecipeMode(QuietMode):
    """Function mode that replaces large results, which elementwise functions broadcast from small tensors, by
    :class:`TensorRecipe`.

    ``twins``: host copies of short tensors, which ``bool``, ``int`` and ``item`` read without a wait; None: no copies.
    """

    def __init__(self, twins: HostTwins | None = None) -> None:
        super().__init__()
        self._twins = twins

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in CONSTANTS and (made := constant_recipe(func, args, kwargs)) is not None:
            return made
        if func in BY_ELEMENT and (made := recipe_of(func, args, kwargs)) is not None:
            return made
        if self._twins is None or not (func in _FOLLOWED or func in _STARTS or func in _ANSWERS):
            return func(*args, **kwargs)
        if func in _ANSWERS and (twin := self._twins.of(args[0])) is not None:
            return func(twin)
        made = func(*args, **kwargs)
        self._twins.follow(func, args, kwargs, made)
        return made


_STARTS, _ANSWERS = (torch.arange,), (Tensor.__bool__, Tensor.item, Tensor.__int__)


@contextmanager
def masks_by_recipe(batch: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Opens a context for one forward, in which large masks are computed in parts when read.

    For a batch on a device, short integer tensors get host copies. Does nothing for a short batch in host memory, or if
    another function mode is active.

    ``batch``: pairs (tensor, the tensor that it was copied from).
    """
    pairs = [pair for pair in batch if pair[0].ndim > 1]
    given = [tensor for tensor, _ in pairs]
    plain = all(type(tensor) is Tensor and not tensor.is_meta for tensor in given)
    waits = any(not is_host(tensor.device) for tensor in given)
    if plain and (waits or any(tensor.shape[1] >= _LONG for tensor in given)) and not is_watched():
        twins = HostTwins()
        for pair in pairs:
            twins.know(*pair)
        with RecipeMode(twins if waits else None):
            yield
    else:
        yield
