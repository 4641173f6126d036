"""What Triton's interpreter gets wrong about bf16, put right, so that it and a GPU share tolerances.

It keeps bf16 as bit patterns: ``tl.dot`` multiplies the patterns, a cast from fp32 cuts bits off, arithmetic gives
nonsense. With ``repair`` a product widens its operands, the cast rounds to the nearest even number, and arithmetic on
bf16, which our kernels do not do, is an error. Moreover it no longer warns of infinities and NaN, which no GPU does,
and launches of several threads, which disturb each other, wait for each other. Who looks whether a signal has come
lets others run. And Triton 3.6 reads the bounds of loops under NumPy 2.4.

It is also faster: inside a kernel, every call of a device function looked through all of Triton's language to replace
what was replaced when the kernel began, and every array made a new table of dtypes. That was a third of its time.
"""

from collections.abc import Callable
from threading import Lock
from time import sleep
from typing import Any

import numpy as np

_PAUSE = 2e-5
"""Seconds between two looks at a signal."""


def repair() -> None:
    """Change Triton's interpreter in this process, once."""
    import triton.language as tl
    from triton._C.libtriton.ir import MEM_SEMANTIC
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

    if getattr(InterpreterBuilder, "repaired", False):
        return
    dot, cast, execute = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, GridExecutor.__call__

    def wide(operand: Any) -> Any:
        if operand.dtype.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(operand.data).astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), tl.float32)
        if operand.dtype.scalar == tl.float16:
            return TensorHandle(operand.data.astype(np.float32), tl.float32)
        return operand

    def create_dot(self: Any, a: Any, b: Any, sum_: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), sum_, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            rounded = np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded)
            return TensorHandle(rounded.reshape(source.data.shape), target.scalar)
        return cast(self, source, target)

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, x: Any, *rest: Any) -> Any:
            if x.dtype.scalar == tl.bfloat16:
                raise TypeError("arithmetic on bf16: load it as fp32 first")
            return function(self, x, *rest)

        return checked

    one_at_a_time = Lock()
    forget = _replace_once_a_launch(interpreter, tl)

    def silently(self: Any, *args: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"), one_at_a_time:
            forget()
            return execute(self, *args, **named)

    look = InterpreterBuilder.create_atomic_rmw

    def patiently(self: Any, operation: Any, place: Any, value: Any, mask: Any, order: Any, scope: Any) -> Any:
        found = look(self, operation, place, value, mask, order, scope)
        if order == MEM_SEMANTIC.ACQUIRE:
            sleep(_PAUSE)  # whoever is waited for may need this processor
        return found

    InterpreterBuilder.create_atomic_rmw = patiently
    GridExecutor.__call__ = silently
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.binary_op = refusing(InterpreterBuilder.binary_op)
    InterpreterBuilder.unary_op = refusing(InterpreterBuilder.unary_op)
    _keep_dtypes(interpreter, tl)
    _take_elements(interpreter)
    InterpreterBuilder.repaired = True


def _take_elements(interpreter: Any) -> None:
    """Let a tensor of one element be a bound of a loop: Triton 3.6 takes ``int`` of it, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _replace_once_a_launch(interpreter: Any, tl: Any) -> Callable[[], None]:
    """Return what a launch calls first: its scope puts the language back at its end, and device functions have none."""
    replace = interpreter._patch_lang
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        modules = {word.__name__ for word in function.__globals__.values() if word is tl or word is tl.core}
        if modules and modules <= replaced:
            return interpreter._LangPatchScope()
        replaced.update(modules)
        return replace(function)

    interpreter._patch_lang = replace_once
    return replaced.clear


def _keep_dtypes(interpreter: Any, tl: Any) -> None:
    find, known = interpreter._get_np_dtype, dict[Any, Any]()

    def find_once(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if type(scalar) is not tl.dtype:  # a pointer
            return find(kind)
        if scalar not in known:
            known[scalar] = find(scalar)
        return known[scalar]

    interpreter._get_np_dtype = find_once
