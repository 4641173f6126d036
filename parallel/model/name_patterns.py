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
    """True if ``name`` is ``module`` or inside it; everything is inside the model itself, with the empty name."""
    return not module or name == module or name.startswith(f"{module}.")


def starred(name: str) -> str:
    """Returns the name with ``*`` for each number: the pattern of the same thing in all elements of a chain."""
    return _NUMBER.sub(r"\1*", name)


def name_runs(names: Iterable[str]) -> str:
    """Names as a list in which numbered ones share an entry: ``embed, h.0 to h.11, norm``; the first few entries."""
    runs: dict[str, list[str]] = {}
    for name in names:
        runs.setdefault(starred(name), []).append(name)
    entries = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs.values()]
    return ", ".join(entries[:_LISTED]) + (" and others" if len(entries) > _LISTED else "")


def refuse_unmatched(
    given: Iterable[tuple[str, str]], names: Sequence[str], kind: str, error: type[EngineError] = ConfigError
) -> None:
    """Refuses patterns that match none of ``names``.

    Args:
        given: (place in the user's configuration, pattern).
        kind: the kind of thing that the names denote, such as "module".

    Raises:
        EngineError: of the class ``error``; names all such patterns and the most similar names.
    """
    idle = [(where, glob) for where, glob in given if not any(fnmatchcase(name, glob) for name in names)]
    if not idle:
        return
    known = list(dict.fromkeys(map(starred, names)))
    near = dict.fromkeys(name for _, glob in idle for name in get_close_matches(glob, known, 3, 0.4))
    hint = f"similar names are {', '.join(near)}" if near else f"the model has {', '.join(known[:_LISTED]) or 'none'}"
    patterns = "; ".join(f"{where}: {glob!r}" for where, glob in idle)
    raise error(f"{patterns} matches no {kind}; {hint}; a pattern matches whole names, and * stands for anything.")
