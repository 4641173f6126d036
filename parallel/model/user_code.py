"""Distinguishes mistakes of this package from errors of the user's model, which meet in one call stack.

A plan falls back if the user's model fails: a block whose copy does not run in isolation, a trace that fails. The
``except`` around that model must re-raise a mistake of this package, so that it is reported.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# Without RuntimeError, ValueError and IndexError: torch raises them for wrong shapes and dims, also when we call it.
_KINDS = (AssertionError, AttributeError, KeyError, NameError, TypeError)
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_REFERENCE_MODELS = os.path.join(_PACKAGE, "models") + os.sep
"""Models of this package, which count as user code."""


def call_user_code(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs ``function`` of torch or of the user; arguments that it refuses are not a mistake of this package."""
    return function(*args, **kwargs)


def is_engine_hook(hook: Any) -> bool:
    """Returns True for a hook that this package has registered, on a module or on a tensor."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("engine.")


def is_own_mistake(error: BaseException) -> bool:
    """True if ``error`` is of a kind that Python raises for wrong code, and was raised by a line of this package.

    A missing attribute counts for the line that reads it, not for the ``__getattr__`` that fails to find it.
    """
    if not isinstance(error, _KINDS):
        return False
    codes, traceback = [], error.__traceback__
    while traceback is not None:
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    asking = [code for code in codes if code.co_name != "__getattr__"]
    if not asking or asking[-1] is call_user_code.__code__:
        return False
    file = asking[-1].co_filename
    return file.startswith(_PACKAGE) and not file.startswith(_REFERENCE_MODELS)
