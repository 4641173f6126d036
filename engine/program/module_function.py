"""A function that is named on the command line as ``module:function``, of this folder or installed."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from engine.errors import PlanError, first_line


def find_function(name: str) -> Callable[[], Any]:
    """The function.

    Raises:
        PlanError: there is no such module, or nothing of that name in it.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"MODEL {name} is not found ({first_line(error)}); give module:function.") from error
    finally:
        sys.path.remove("")
    return found
