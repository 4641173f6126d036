"""Names of modules and parameters, and patterns that match them.

A pattern is an ``fnmatch`` pattern over whole names: ``*`` matches any characters, including dots.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from engine.errors import ConfigError, EngineError

_NUMBER = re.compile(r"(^|\.)\d+(?=\.|$)")


_LISTED = 8
"""Most names of the model that an error lists."""


def is_inside(name: str, module: str) -> bool:
    """Returns True if ``name`` is ``module`` itself or inside it. ``module`` "" is the whole model."""
    return not module or name == module or name.startswith(f"{module}.")


def starred(name: str) -> str:
    """Returns ``name`` with each part between dots that is a number replaced by ``*``."""
    return _NUMBER.sub(r"\1*", name)


def name_runs(names: Iterable[str]) -> str:
    """Joins names into a line of text; names that differ only in a number become a range: ``embed, h.0 to h.11, norm``.

    Cuts a long list.
    """
    runs: dict[str, list[str]] = {}
    for name in names:
        runs.setdefault(starred(name), []).append(name)
    entries = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs.values()]
    return ", ".join(entries[:_LISTED]) + (" and others" if len(entries) > _LISTED else "")


def refuse_unmatched(
    given: Iterable[tuple[str, str]], names: Sequence[str], kind: str, error: type[EngineError] = ConfigError
) -> None:
    """Checks that every pattern in ``given`` matches at least one of ``names``.

    Args:
        given: (key in the user's configuration, pattern).
        kind: the noun for the names, such as "module".

    Raises:
        EngineError: a pattern matches nothing; raised as class ``error``, with all such patterns and similar names.
    """
    idle = [(where, glob) for where, glob in given if not any(fnmatchcase(name, glob) for name in names)]
    if not idle:
        return
    known = list(dict.fromkeys(map(starred, names)))
    near = dict.fromkeys(name for _, glob in idle for name in get_close_matches(glob, known, 3, 0.4))
    hint = f"similar names are {', '.join(near)}" if near else f"the model has {', '.join(known[:_LISTED]) or 'none'}"
    patterns = "; ".join(f"{where}: {glob!r}" for where, glob in idle)
    raise error(f"{patterns} matches no {kind}; {hint}; write a pattern of whole names, with * for any characters.")
