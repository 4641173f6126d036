"""Language of a tensor plan: ``{name pattern: style}``.

``fnmatch`` matches patterns to the names of modules, or of parameters (``*`` also crosses dots). A style is one of

    column            outputs sharded evenly, one shard for each tensor rank
    column+gather     the same, and the outputs are gathered: for a layer without a row layer after it
    row               inputs sharded evenly; outputs are summed over the ranks
    vocabulary        embedding or head sharded by vocabulary rows

    experts           a module with code that computes with shards of the parameters: the outputs are summed
    cut:0             a parameter, or the weight of a module, sharded along dim 0; code that reads it gets the shard

    partial           replicated, but used on sharded activations (a norm over one head): the gradient is partial

    replicate         the full tensor on every rank: the default for everything that no pattern matches

column, row and cut may be followed by

    fused:3           three fused equal parts (query, key, value), each sharded evenly; ``column:3`` is short for it

    head:64           shards are whole heads of that width; with fewer heads than ranks (kv heads), several ranks store
                      each head. The default is the parent module's ``head_dim`` or ``head_width``
    rows:0-4+8-12/4-8+12-16       exactly these rows, rank by rank; valid for this number of ranks only
    view              code reads the full shape and a rank computes with its shard: ``tensor.global_tensor``

For modules that compute with sizes, one or more of


    divide:a,b        the whole numbers a and b are divided by the number of ranks (result at least 1)
    set:a=2           the attribute a becomes 2; ``set:config.a=2`` changes the module's own copy of its config
    ratio:a=q/k       the attribute a becomes the local outputs of child q over the local outputs of child k
    heads:a=q         the attribute a becomes the number of local heads of child q; ``a?`` where it may be absent
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from engine.errors import ConfigError, PlanError

CUTTING = ("column", "column+gather", "row", "cut")
Rows = tuple[tuple[tuple[int, int], ...], ...]
"""For each tensor rank, its runs [start, stop) of rows, ascending."""


@dataclass(frozen=True, slots=True)
class Style:
    """Style of one module or parameter: how it is sharded. It is parsed from ``text``, such as "column head:64"."""

    text: str
    kind: str = "attributes"
    """Kind of the style: "column", "column+gather", "row", "vocabulary", "experts", "cut", "partial", "replicate" or
    "attributes".
    """
    dim: int | None = None
    """Sharded dim of a "cut" style."""
    parts: int = 1
    head: int | None = None
    rows: Rows | None = None
    view: bool = False
    divided: tuple[str, ...] = ()
    values: tuple[tuple[str, int], ...] = ()
    """Pairs (attribute, new value), one for each ``set``."""
    ratios: tuple[tuple[str, str, str], ...] = ()
    """Triples (attribute, child above, child below), one for each ``ratio``."""
    counts: tuple[tuple[str, bool, str], ...] = ()
    """Triples (attribute, True if it may be absent, child module), one for each ``heads``."""

    @property
    def changes_attributes(self) -> bool:
        """True if the style also changes integer attributes of the module, such as its number of heads."""
        return bool(self.divided or self.values or self.ratios or self.counts)


def parse_style(text: str) -> Style:
    """Parses ``text``, the style by which a module or parameter is sharded, such as "column head:64".

    Raises:
        PlanError: ``text`` is no valid style.
    """
    style = Style(text)
    for word in text.split():
        for pattern, add in _WORDS.items():
            if match := re.fullmatch(pattern, word):
                style = add(style, *match.groups())
                break
        else:
            raise _wrong(text, word)
    exact = style.parts > 1 or style.head or style.rows or style.view
    named = style.kind != "attributes"
    mixed = named and style.changes_attributes and style.kind != "experts"
    if mixed or not (named or style.changes_attributes) or (exact and style.kind not in CUTTING):
        raise _wrong(text, text)
    if style.rows and (style.parts > 1 or style.head):
        raise _wrong(text, text)
    return style


def write_rows(rows: Sequence[Sequence[tuple[int, int]]]) -> str:
    """Returns the part of a style that lists each rank's rows, such as "rows:0-4/4-8". ``rows``: intervals [start,
    stop) of each rank.
    """
    return "rows:" + "/".join("+".join(f"{start}-{stop}" for start, stop in runs) for runs in rows)


def _wrong(text: str, word: str) -> PlanError:
    return PlanError(
        f"parallel.tensor_plan has the style {text!r}, but {word!r} is no word of a style; write column, "
        "column+gather, row or cut:0 (each may be followed by fused:3, head:64, rows:0-4/4-8 and view), vocabulary, "
        "experts, partial, replicate, divide:a,b, set:a=2, ratio:a=q/k or heads:a=q."
    )


def _layer(style: Style, kind: str, parts: str | None = None) -> Style:
    if style.kind != "attributes":
        raise _wrong(style.text, kind)
    return replace(style, kind=kind, parts=int(parts or style.parts))


def _cut(style: Style, dim: str) -> Style:
    return replace(_layer(style, "cut"), dim=int(dim))


def _fused(style: Style, parts: str) -> Style:
    return replace(style, parts=int(parts))


def _head(style: Style, width: str) -> Style:
    return replace(style, head=int(width))


def _rows(style: Style, text: str) -> Style:
    def run(word: str) -> tuple[int, int]:
        start, stop = word.split("-")
        return int(start), int(stop)

    return replace(style, rows=tuple(tuple(map(run, runs.split("+"))) for runs in text.split("/")))


def _view(style: Style) -> Style:
    return replace(style, view=True)


def _divide(style: Style, names: str) -> Style:
    return replace(style, divided=(*style.divided, *names.split(",")))


def _set(style: Style, name: str, value: str) -> Style:
    return replace(style, values=(*style.values, (name, int(value))))


def _ratio(style: Style, name: str, above: str, below: str) -> Style:
    return replace(style, ratios=(*style.ratios, (name, above, below)))


def _count(style: Style, name: str, optional: str, child: str) -> Style:
    return replace(style, counts=(*style.counts, (name, bool(optional), child)))


_WORDS: Mapping[str, Callable[..., Style]] = MappingProxyType(
    {
        r"(column)(?::([1-9]\d*))?": _layer,
        r"(column\+gather|row|vocabulary|experts|partial|replicate)": _layer,
        r"cut:(\d)": _cut,
        r"fused:([1-9]\d*)": _fused,
        r"head:([1-9]\d*)": _head,
        r"rows:(\d+-\d+(?:[+/]\d+-\d+)*)": _rows,
        r"view": _view,
        r"divide:([\w.]+(?:,[\w.]+)*)": _divide,
        r"set:([\w.]+)=([1-9]\d*)": _set,
        r"ratio:(\w+)=([\w.]+)/([\w.]+)": _ratio,
        r"heads:(\w+)(\??)=([\w.]+)": _count,
    }
)


Patterns = Mapping[str, str]
EXAMPLE = '{"*.query": "column", "*.output": "row"}'


def read_setting(setting: str | Patterns) -> tuple[str, Patterns]:
    """Returns (source, styles by name pattern). The source, for reports, is the file's path or "parallel.tensor_plan".
    ``setting``: mapping of patterns, or path of its JSON file.

    Raises:
        ConfigError: the file contains no mapping of name patterns to styles.
    """
    return ("parallel.tensor_plan", setting) if not isinstance(setting, str) else (setting, _read_file(setting))


def _read_file(path: str) -> Patterns:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"parallel.tensor_plan = {path!r} cannot be read ({reason}); name a JSON file with {EXAMPLE}."
        ) from error
    if not (isinstance(found, dict) and found and all(isinstance(style, str) for style in found.values())):
        raise ConfigError(
            f"parallel.tensor_plan = {path!r} must contain a JSON object from name patterns to styles; write it as "
            f"{EXAMPLE}."
        )
    return found
