"""Keys and values as they were before each head was repeated for its query heads, so that fewer bytes travel.

[b, h, s, d] -> [b, h, 1, s, d] -> expand [b, h, g, s, d] -> reshape [b, h g, s, d]
[b, h, s, d] -> repeat_interleave(g, dim=1)
"""

from typing import TYPE_CHECKING, Any

from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor, Unrepeated
from engine.parallel.tensor.global_tensor.rules.shapes import to_shape
from engine.parallel.tensor.global_tensor.rules.table import TENSOR_RULES

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


def noted_expand(context: "GlobalTensorContext", func: Function, *args: Any, **options: Any) -> Any:
    """Computes ``expand``; if it repeats a dim of size one, the result records the unrepeated tensor as its source.

    Attention then sends the smaller source between ranks.
    """
    made, given, grown = _run(context, func, args, options)
    if len(grown) == 1 and given.full[grown[0]] == 1:
        Unrepeated.note(made, given, grown[0])
    return made


def noted_repeat(context: "GlobalTensorContext", func: Function, *args: Any, **options: Any) -> Any:
    """Computes ``repeat_interleave``; the result refers to the unrepeated tensor.

    Attention then sends the smaller, unrepeated tensor between ranks.
    """
    made, given, grown = _run(context, func, args, options)
    if len(grown) == 1:
        Unrepeated.note(made, given, grown[0])
    return made


def noted_reshape(context: "GlobalTensorContext", func: Function, *args: Any, **options: Any) -> Any:
    """Computes ``reshape``; if it joins the heads with a dim that ``expand`` repeated, the result records the
    unrepeated heads.

    Attention then sends the smaller, unrepeated tensor between ranks.
    """
    made, given, _ = _run(context, func, args, options)
    note = given.unrepeated if type(given) is GlobalTensor and type(made) is GlobalTensor else None
    if note is not None and note.dim and note.source.full[note.dim] == 1 and note.valid(given):
        dim, full = note.dim, tuple(given.full)
        if tuple(made.full) == (*full[: dim - 1], full[dim - 1] * full[dim], *full[dim + 1 :]):
            Unrepeated.note(made, to_shape(note.source, (*full[:dim], *full[dim + 1 :])), dim - 1)
    return made


def _run(context: "GlobalTensorContext", func: Function, args: Any, options: Any) -> tuple[Any, Any, list[int]]:
    """Returns the result of the rule, the tensor that was given, and the dims in which their sizes differ."""
    made = TENSOR_RULES.by_function[func](context, func, *args, **options)
    given = args[0] if args else next(iter(options.values()))
    if type(made) is not GlobalTensor or type(given) is not GlobalTensor or made.ndim != given.ndim:
        return made, given, []
    return made, given, [dim for dim, pair in enumerate(zip(given.full, made.full, strict=True)) if len(set(pair)) > 1]


def before_repeat(x: GlobalTensor) -> GlobalTensor:
    """Returns keys or values ``x`` [.., heads, S, D] without the recorded repeat of heads; ``x`` itself if none is
    recorded.
    """
    note = x.unrepeated
    return note.source if note is not None and note.dim == x.ndim - 3 and note.valid(x) else x
