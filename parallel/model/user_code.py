"""Classification of errors: raised by this package, or by the user's model.

A plan falls back if the user's model fails, for example if a copy of a block does not run alone or a trace fails. The
``except`` around the model must re-raise a mistake of this package, so that users can report it.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

# without RuntimeError, ValueError and IndexError: torch raises them for wrong shapes and dims, also in our calls
_KINDS = (AssertionError, AttributeError, KeyError, NameError, TypeError)
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_REFERENCE_MODELS = os.path.join(_PACKAGE, "models") + os.sep
"""Models of this package, which count as user code."""


def call_user_code(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls ``function`` and returns its result.

    If ``args`` or ``kwargs`` do not fit, :func:`is_own_mistake` counts the error as one of the user's model.
    """
    return function(*args, **kwargs)


def is_engine_hook(hook: Any) -> bool:
    """Returns True if ``hook``, on a module or a tensor, is a function of this package."""
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("engine.")


def is_own_mistake(error: BaseException) -> bool:
    """Returns True if ``error`` is probably a bug of this package and not of the user's model.

    This holds for an AssertionError, AttributeError, KeyError, NameError or TypeError that this package raised.
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
