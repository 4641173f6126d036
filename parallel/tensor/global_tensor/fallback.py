"""Functions without a rule: their arguments are made whole on every rank, and the function is noted.

Not those that write into a View, hand out its memory, or watch its gradient: they are refused.
"""

from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, views_among
from engine.parallel.tensor.global_tensor.redistribute import full

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


_SIGNS = frozenset((
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__",
    "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__imatmul__", "__setitem__", "__set__",
))  # fmt: skip
_MEMORY = frozenset((
    "data_ptr", "untyped_storage", "storage", "storage_offset", "_typed_storage", "share_memory_", "set_",
    "__dlpack__", "as_strided", "register_hook", "register_post_accumulate_grad_hook", "grad",
))  # fmt: skip


def rule_name(func: Function) -> str:
    """What a function is called; ``get x`` for an attribute."""
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{name.strip('_')} {func.__self__.__name__}"  # type: ignore[attr-defined]
    return name


def gathered(context: "GlobalTensorContext", func: Function, *args: Any, **kwargs: Any) -> Any:
    """Run ``func`` on plain tensors.

    Raises:
        EngineError: it would write into a View, or read its memory.
    """
    name = rule_name(func)
    if name in _MEMORY or any(True for _ in views_among(_written(func, name, args, kwargs), {})):
        raise EngineError(
            f"{name} was called on a tensor {list(next(views_among(args, kwargs)).full)} that is cut over tensor "
            "ranks, of which a rank can neither write nor hand out the whole; use a function that returns a new "
            "tensor, or leave this module whole in parallel.tensor_plan."
        )
    return func(*_plain(args, name), **_plain(kwargs, name))


def _written(func: Function, name: str, args: Any, kwargs: Any) -> list[Any]:
    written = [kwargs.get("out"), kwargs.get("inputs")]  # the latter of backward: whose .grad is written
    raw = getattr(func, "__name__", "")
    in_place = raw in _SIGNS or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True
    if in_place and args:
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
