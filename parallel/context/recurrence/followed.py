"""Modules of a model over sharded sequences: those whose scans are relayed, and those that need full sequences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from engine.parallel.context.recurrence.placed import PlacedTensor
from engine.parallel.context.recurrence.scans import relay_scans
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, LocalOnlyError
from engine.parallel.tensor.global_tensor.redistribute import full


@dataclass(frozen=True, slots=True)
class Gathered:
    """Module that receives full sequences, because its code raises an error on sharded ones."""

    module: str
    place: str
    """File and line that refuse."""


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Plan of a model's run over sequences sharded along positions, equal on all ranks."""

    gathered: tuple[Gathered, ...] = ()
    """Modules that run on full sequences."""
    in_blocks: bool = False
    """True if each rank has neighbouring positions, because the model passes a state along them."""
    by_work: bool = True
    """True if packed documents may be shared by work."""
    halo: bool = False
    """True if rows at the borders of positions are sent."""
    pairs: tuple[int, ...] = ()
    """Pairs of a query and a key of each rank, in a head, for a microbatch of the example; () without documents."""


def follow_sequences(model: nn.Module, plan: ContextPlan, patches: ForwardPatches) -> None:
    """Patches the modules of ``model`` to run over sharded sequences according to ``plan``.

    A scan (a function that carries a state along positions) passes the state from rank to rank. Modules in
    ``plan.gathered`` get full sequences. ``patches``: list that records the changes.
    """
    relay_scans(model, patches)
    for one in plan.gathered:
        module = model.get_submodule(one.module)
        forward = _on_full(module.forward, f"{type(module).__name__} at {one.place}")
        patches.wrap_forward(module, PatchLayer.TENSOR, forward, "gets full sequences")


def _on_full(forward: Callable[..., Any], reason: str) -> Callable[..., Any]:
    def plain(value: Any) -> Any:
        if type(value) is PlacedTensor:
            return value.everywhere(reason)
        return full(value, reason) if type(value) is GlobalTensor else value

    def on_full(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(plain, (args, kwargs), is_leaf=lambda one: isinstance(one, GlobalTensor))
        return forward(*args, **kwargs)

    return on_full


def with_refusal(model: nn.Module, plan: ContextPlan, problem: BaseException) -> ContextPlan | None:
    """Returns ``plan`` with one more module that gets full sequences: the module in which a forward raised ``problem``.

    Returns None if no module refused a sharded sequence, or if ``plan`` already has the refusing module.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    done = {one.module for one in plan.gathered}
    for error in _causes(problem):
        if isinstance(error, LocalOnlyError):
            found = [(names[id(own)], line) for own, line in _callers(error) if id(own) in names]
            if found and found[-1][0] not in done:
                module, line = found[-1]
                return replace(plan, gathered=(*plan.gathered, Gathered(module, line)))
    return None


def _causes(problem: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [problem]
    while waiting:
        error = waiting.pop()
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            yield error
            waiting += [error.__cause__, error.__context__]


def _callers(error: BaseException) -> Iterator[tuple[Any, str]]:
    """Yields the module of each method on the way to the error, with its line, from outside to inside."""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and not frame.f_globals.get("__name__", "").startswith(("torch.", "engine.")):
            yield own, f"{Path(frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
