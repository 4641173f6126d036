"""Names of modules and parameters: which lies in which, and which are alike."""

import re

_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


def is_inside(name: str, module: str) -> bool:
    """Whether ``name`` is ``module`` or lies in it; everything lies in the model itself, whose name is empty."""
    return not module or name == module or name.startswith(f"{module}.")


def starred(name: str) -> str:
    """The name with ``*`` for each number: the pattern of the same thing in all elements of a chain."""
    return _NUMBER.sub(r"\1*", name)
