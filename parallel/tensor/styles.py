"""The words in which a tensor plan is written: ``{module name pattern: style}``.

Patterns are those of ``fnmatch`` over module names (``*`` also crosses dots). A style is one of

    column            outputs in equal pieces, one for each tensor rank
    column:3          outputs are three fused equal parts (query, key, value), each in equal pieces
    row               inputs in equal pieces; outputs are summed
    vocabulary        embedding or head by vocabulary rows
    partial           every rank holds all of it but uses it on cut activations (a norm over one head)
    replicate         every rank holds all of it; what no pattern names is replicated too

``column`` and ``row`` may be followed by ``head:64``: pieces are whole heads of that width. Without it the width
is the parent module's ``head_dim`` or ``head_width``, if it has one. Where there are fewer heads than ranks (kv
heads), each is held by several ranks.

For modules that compute with sizes, one or more of

    divide:a,b        the attributes a and b are whole numbers of which each rank has an equal share
    ratio:a=q/k       the attribute a becomes the local outputs of child q over those of child k
    heads:a=q         the attribute a becomes the number of local heads of child q; ``a?`` where it may be absent
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from engine.errors import PlanError

LAYER_STYLES = ("column", "row", "vocabulary", "partial", "replicate")


@dataclass(frozen=True, slots=True)
class Style:
    """One style, read."""

    text: str
    kind: str = "attributes"
    """One of ``LAYER_STYLES``, or "attributes"."""
    parts: int = 1
    head: int | None = None
    divided: tuple[str, ...] = ()
    ratios: tuple[tuple[str, str, str], ...] = ()
    """(attribute, child, child)."""
    counts: tuple[tuple[str, bool, str], ...] = ()
    """(attribute, whether it may be absent, child)."""


def parse_style(text: str) -> Style:
    """Read a style.

    Raises:
        PlanError: it is not in the language above.
    """
    style = Style(text)
    for word in text.split():
        for pattern, add in _WORDS.items():
            if match := re.fullmatch(pattern, word):
                style = add(style, *match.groups())
                break
        else:
            raise _wrong(text, word)
    named, attributes = style.kind != "attributes", bool(style.divided or style.ratios or style.counts)
    if named == attributes or (style.head and style.kind not in ("column", "row")):
        raise _wrong(text, text)
    return style


def _wrong(text: str, word: str) -> PlanError:
    return PlanError(
        f"parallel.tensor_plan has the style {text!r}, in which {word!r} is not understood; write column, column:3, "
        "row (each may be followed by head:64), vocabulary, partial, replicate, divide:a,b, ratio:a=q/k or heads:a=q."
    )


def _layer(style: Style, kind: str, parts: str | None = None) -> Style:
    if style.kind != "attributes":
        raise _wrong(style.text, kind)
    return replace(style, kind=kind, parts=int(parts or 1))


def _head(style: Style, width: str) -> Style:
    return replace(style, head=int(width))


def _divide(style: Style, names: str) -> Style:
    return replace(style, divided=(*style.divided, *names.split(",")))


def _ratio(style: Style, name: str, above: str, below: str) -> Style:
    return replace(style, ratios=(*style.ratios, (name, above, below)))


def _count(style: Style, name: str, optional: str, child: str) -> Style:
    return replace(style, counts=(*style.counts, (name, bool(optional), child)))


_WORDS: Mapping[str, Callable[..., Style]] = MappingProxyType(
    {
        r"(column)(?::([1-9]\d*))?": _layer,
        r"(row|vocabulary|partial|replicate)": _layer,
        r"head:([1-9]\d*)": _head,
        r"divide:(\w+(?:,\w+)*)": _divide,
        r"ratio:(\w+)=([\w.]+)/([\w.]+)": _ratio,
        r"heads:(\w+)(\??)=([\w.]+)": _count,
    }
)
