"""A forward that leaves no trace: random streams, buffers and attributes of the model are put back afterwards."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back, at the end: the generators of torch, Python and numpy, every buffer's content, and what the
    attributes of the modules name, with the items of plain dicts and lists among them."""
    undo = [_undo_python_random(), *(_undo_module(module) for module in model.modules())]
    undo += [_undo_buffer(buffer) for buffer in model.buffers() if not buffer.is_meta]
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), _uncompiled():
            yield
    finally:
        for step in undo:
            step()


def _uncompiled() -> Any:
    """A compiled module cannot be looked into; nothing is compiled unless dynamo has been loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _undo_python_random() -> Callable[[], None]:
    state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None

    def undo() -> None:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)

    return undo


def _undo_buffer(buffer: Tensor) -> Callable[[], None]:
    content, version = buffer.detach().clone(), buffer._version

    def undo() -> None:
        if buffer._version != version:
            with torch.no_grad():
                buffer.copy_(content)

    return undo


def _undo_module(module: nn.Module) -> Callable[[], None]:
    attributes = dict(vars(module))
    plain = (dict, OrderedDict, list, set)
    holders = [(holder, holder.copy()) for holder in attributes.values() if type(holder) in plain]

    def undo() -> None:
        for holder, items in holders:
            if _differ(holder, items):
                holder.clear()
                holder.extend(items) if isinstance(holder, list) else holder.update(items)
        if _differ(vars(module), attributes):
            vars(module).clear()
            vars(module).update(attributes)

    return undo


def _differ(now: Any, before: Any) -> bool:
    """By identity: equality of tensors is a tensor."""
    return [*map(id, _items(now))] != [*map(id, _items(before))]


def _items(holder: Any) -> list[Any]:
    return [*holder.keys(), *holder.values()] if isinstance(holder, dict) else list(holder)
