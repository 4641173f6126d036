"""Functions without a rule: their arguments are gathered on every rank, and the function is recorded.

Functions that write into a global tensor, expose its memory, or hook its gradient are refused instead.
"""

from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, global_tensors_in
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.trace.torch_function import function_name, writes_in_place

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


_MEMORY = frozenset((
    "data_ptr", "untyped_storage", "storage", "storage_offset", "_typed_storage", "share_memory_", "set_",
    "__dlpack__", "as_strided", "register_hook", "register_post_accumulate_grad_hook", "grad",
))  # fmt: skip


def gathered(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Run ``func`` on plain tensors.

    Raises:
        EngineError: ``func`` writes into a global tensor, or reads its memory.
    """
    name = function_name(func)
    if name in _MEMORY or any(True for _ in global_tensors_in(_written(name, args, kwargs), {})):
        raise EngineError(
            f"{name} was called on a tensor {list(next(global_tensors_in(args, kwargs)).full)} "
            "that is sharded over tensor ranks, but it needs the memory of the full tensor; "
            "use a function that returns a new tensor, or give "
            'this module the style "replicate" in parallel.tensor_plan.'
        )
    return func(*_plain(args, name), **_plain(kwargs, name))


def _written(name: str, args: Any, kwargs: Any) -> list[Any]:
    written = [kwargs.get("out"), kwargs.get("inputs")]  # the latter of backward: whose .grad is written
    if args and (writes_in_place(name) or name.startswith("set ") or kwargs.get("inplace") is True):
        written.append(args[0])
    return written


def _plain(value: Any, name: str) -> Any:
    if type(value) is GlobalTensor:
        return full(value, name)
    if isinstance(value, list | tuple):
        plain = [_plain(inner, name) for inner in value]
        return type(value)(*plain) if hasattr(value, "_fields") else type(value)(plain)
    if isinstance(value, dict):
        return {key: _plain(inner, name) for key, inner in value.items()}
    return value
