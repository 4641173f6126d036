"""Matrix products on shards: linear, matmul, addmm, einsum, grouped products, embedding.

Every dim of every operand has a letter; a rank computes with the indices that it stores of all operands:

    x_BSI  w_OI  ->  y_BSO     w sharded along O   y is sharded along O                                column
                               w sharded along I   each rank has a partial sum over I                  row
                               x sharded along S   y is sharded along S, w's gradient is partial       sequence
                               x along S, w        (S of rank 0, O of rank 1) would be on no rank:     column after
                               along O             x is gathered first                                 sequence
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.kernels.dispatch import Kernels
from engine.kernels.ops.activations import ACTIVATIONS
from engine.kernels.ops.embedding import look_up_rows
from engine.kernels.ops.linear import linear as fused
from engine.parallel.tensor.global_tensor.context import PlainGradient
from engine.parallel.tensor.global_tensor.global_tensor import Function, GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index, NoRuleError, Sets, common, covers, held_once
from engine.parallel.tensor.global_tensor.layout import Layout, Shape
from engine.parallel.tensor.global_tensor.operands import layout_of, part
from engine.parallel.tensor.global_tensor.redistribute import add_rows, gather_global

if TYPE_CHECKING:
    from engine.parallel.tensor.global_tensor.context import GlobalTensorContext


class EinsumSpec(NamedTuple):
    """Letters of the dims of a product's operands and of its result ``out``, as in ``einsum``."""

    operands: tuple[str, ...]
    out: str


class _Plan(NamedTuple):
    operands: tuple[Sets, ...]
    """The index sets that each operand must have."""
    shape: Shape
    sets: Sets
    summed: bool
    """True if every rank has only a partial sum."""


def multiply_parts(
    context: "GlobalTensorContext",
    tensors: Sequence[Tensor],
    product: EinsumSpec,
    run: Callable[..., Tensor],
    bias: Tensor | None = None,
) -> GlobalTensor | Tensor:
    """Calls ``run`` to multiply this rank's shards of ``tensors``; sums partial results over the ranks.

    ``product``: einsum letters of the operands' dims; ``bias``: tensor added after the sum, or None. Operands with
    unsuitable shards are gathered first.

    Raises:
        NoRuleError: the sizes of the operands do not agree.
    """
    layouts = tuple(map(layout_of, tensors))
    try:
        plan = context.find(("product", product, layouts), lambda: _plan(layouts, product))
    except NoRuleError:  # gather one operand and try again; a product of full activations always has a plan
        return multiply_parts(context, _with_whole(context, tensors, product), product, run, bias)
    parts = [part(context, tensor, sets) for tensor, sets in zip(tensors, plan.operands, strict=True)]
    folded = tensors[0].folded if type(tensors[0]) is GlobalTensor else None
    if plan.summed:
        # the bias follows the sum over ranks, which would otherwise add it once per rank
        return plus_bias(add_rows(context, run(*parts), folded), bias)
    if bias is not None:
        if bias.shape[-1] not in (1, plan.shape[-1]):
            raise NoRuleError("the sizes do not agree; torch raises its own error.")
        parts.append(part(context, bias, plan.sets))
    out = GlobalTensor(run(*parts), plan.shape, plan.sets, context)
    if len(plan.shape) == 2:
        out.folded = folded
    return out


def plus_bias(out: GlobalTensor | Tensor, bias: Tensor | None) -> GlobalTensor | Tensor:
    """Returns ``out`` plus ``bias``, added in place if possible."""
    if bias is None:
        return out
    if type(bias) is GlobalTensor and type(out) is not GlobalTensor:
        return out + bias
    return out.add_(bias)  # in place, which also preserves the dtype of out under autocast


def _with_whole(context: "GlobalTensorContext", tensors: Sequence[Tensor], product: EinsumSpec) -> list[Tensor]:
    """Returns the operands after a gather of one sharded operand that is not a parameter.

    Tensor ranks gather the first such operand. Context ranks gather the smallest operand that allows the product, and
    the last one of equal size: queries stay sharded, keys are gathered.

    Raises:
        NoRuleError: there is no such operand.
    """
    places = [
        place
        for place, tensor in enumerate(tensors)
        if type(tensor) is GlobalTensor and any(tensor.sets) and not isinstance(tensor.local, nn.Parameter)
    ]
    if context.plain is PlainGradient.PARTIAL:
        places.sort(key=lambda place: (not _allows(tensors, place, product), tensors[place].numel(), -place))
    for place in places:
        chosen = tensors[place]
        assert type(chosen) is GlobalTensor
        if not context.sequence:
            context.note_gather("matrix product")
        return [*tensors[:place], gather_global(chosen), *tensors[place + 1 :]]
    raise NoRuleError("the parameters are sharded along dims that do not match, and are not gathered.")


def _allows(tensors: Sequence[Tensor], place: int, product: EinsumSpec) -> bool:
    """Returns True if the product has a plan once the operand at ``place`` is full."""
    layouts = list(map(layout_of, tensors))
    layouts[place] = Layout(layouts[place].shape, (None,) * len(layouts[place].shape))
    try:
        _plan(layouts, product)
    except NoRuleError:
        return False
    return True


def _plan(layouts: Sequence[Layout], product: EinsumSpec) -> _Plan:
    sizes: dict[str, int] = {}
    cut: dict[str, Index | None] = {}
    for layout, letters in zip(layouts, product.operands, strict=True):
        for letter, size, index in zip(letters, layout.shape, layout.sets, strict=True):
            if sizes.get(letter, 1) not in (1, size) and size != 1:
                raise NoRuleError("the sizes do not agree; torch raises its own error.")
            # a dim of size 1 is broadcast and decides neither size nor index set
            if size != 1 or letter not in sizes:
                sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
                cut[letter] = common(cut.get(letter), index)
    summed = [letter for letter, index in cut.items() if index is not None and letter not in product.out]
    if not covers(cut.values()):
        raise NoRuleError("the operands are sharded in such a way that some element would be on no rank.")
    if summed:
        _sum_once(cut, product.out)
    operands = tuple(tuple(cut[letter] for letter in letters) for letters in product.operands)
    shape, sets = tuple(sizes[letter] for letter in product.out), tuple(cut[letter] for letter in product.out)
    return _Plan(operands, shape, sets, bool(summed))


def _sum_once(cut: dict[str, Index | None], out: str) -> None:
    """Checks that every term of the sum is on one rank, and that every rank has a partial sum of the full result.

    Raises:
        NoRuleError: several ranks have a term and no rank can be chosen for it, or the result is sharded as well.
    """
    letters = [letter for letter, index in cut.items() if index is not None]
    if any(letter in out for letter in letters):
        raise NoRuleError("the product is sharded along a summed dim and along a dim of the result at the same time.")
    first = cut[letters[0]]
    if len(letters) == 1 and first is not None:
        # a term on several ranks is added by the first of them only
        cut[letters[0]] = first if first.once else first.owned
    elif not held_once(cut.values()):
        raise NoRuleError("several ranks store one term of the sum.")


def linear_rule(context: "GlobalTensorContext", func: Function, input: Any, weight: Any, bias: Any = None) -> Any:
    """Runs ``functional.linear`` on this rank's shards of ``input`` [.., I] and ``weight`` [O, I] or [I].

    If I is sharded, the ranks' products are summed before ``bias`` [O] is added.
    """
    rows = "abcdefgh"[: input.ndim - 1]
    columns = "O" if weight.ndim == 2 else ""
    product = EinsumSpec((rows + "I", columns + "I"), rows + columns)
    return multiply_parts(context, (input, weight), product, functional.linear, bias)


def fused_linear(
    context: "GlobalTensorContext", func: Function, x: Any, weight: Any, *rest: Any, residual: Any = None
) -> Any:
    """Runs the fused linear operator ``kernels.ops.linear.linear`` on this rank's shards of ``x`` and ``weight``.

    ``rest``: bias, form (activation, memory order of the weight), and the choice between Triton and PyTorch. The
    activation is applied, and ``residual`` added, after the sum over the ranks.
    """
    bias, form, kernels = rest
    rows, plain = "abcdefgh"[: x.ndim - 1], form._replace(activation="none")
    product = EinsumSpec((rows + "I", "IO" if form.transposed else "OI"), rows + "O")

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return fused(x, weight, bias, plain, kernels)

    # an activation of partial sums would be wrong, so it follows the sum over ranks
    y = ACTIVATIONS[form.activation](multiply_parts(context, (x, weight), product, run, bias))
    return y if residual is None else y + residual


def matmul(context: "GlobalTensorContext", func: Function, input: Any, other: Any = None, **named: Any) -> Any:
    """Runs ``matmul``, ``mm``, ``bmm``, ``mv`` or ``dot`` on this rank's shards of ``input`` and ``other``.

    Partial products are summed over the ranks.
    """
    other = other if other is not None else next(iter(named.values()))
    # func itself: autocast lowers the dtype of matmul, but not of dot
    return multiply_parts(context, (input, other), _matmul_letters(input.ndim, other.ndim), func)


def rmatmul(context: "GlobalTensorContext", func: Function, input: Any, other: Any) -> Any:
    """Runs ``Tensor.__rmatmul__``, which returns ``other @ input``, on shards, by the rule of ``matmul``."""
    return matmul(context, torch.matmul, other, input)


def _matmul_letters(left: int, right: int) -> EinsumSpec:
    lead = "abcdefgh"[: max(left, right, 2) - 2]
    m, n = ("M" if left > 1 else ""), ("N" if right > 1 else "")
    first = lead[len(lead) - max(left - 2, 0) :] + m + "K"
    second = lead[len(lead) - max(right - 2, 0) :] + "K" + n
    return EinsumSpec((first, second), lead + m + n)


def addmm(
    context: "GlobalTensorContext",
    func: Function,
    input: Any,
    first: Any = None,
    second: Any = None,
    *,
    beta: Any = 1,
    **named: Any,
) -> Any:
    """Computes ``beta * input + alpha * first @ second`` on shards, for ``addmm``, ``baddbmm`` and ``addmv``.

    Partial products are summed over the ranks before ``input`` is added.
    """
    alpha = named.pop("alpha", 1)
    if "out" in named:
        raise NoRuleError("no rule writes into out=.")
    left = [tensor for tensor in (first, second, *named.values()) if tensor is not None]
    product = _matmul_letters(left[0].ndim, left[1].ndim)
    # the form of GPT-2's Conv1D runs as one fused operation
    if alpha == 1 and beta == 1 and product.out == "MN" and input.ndim == 1 and type(input) is not GlobalTensor:
        return multiply_parts(context, left, product, _add_product, input)
    out = multiply_parts(context, left, product, torch.matmul)
    out = out * alpha if alpha != 1 else out
    if beta == 0:
        return out
    input = input.to(out.dtype)  # autocast has lowered the dtype of the product alone
    return out + (input * beta if beta != 1 else input)


def _add_product(first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.mm(first, second) if bias is None else torch.addmm(bias, first, second)


def einsum(context: "GlobalTensorContext", func: Function, equation: Any, *operands: Any) -> Any:
    """Runs ``einsum`` on this rank's shards of ``operands``; partial results are summed over the ranks.

    Raises:
        NoRuleError: ``equation`` is not a string, or it repeats a letter in one operand.
    """
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    if not isinstance(equation, str) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise NoRuleError("einsum needs a string equation; lists of numbers have no rule.")
    product = _letters(equation.replace(" ", ""), [tensor.ndim for tensor in tensors])
    return multiply_parts(context, tensors, product, lambda *parts: torch.einsum(equation, *parts))


def _letters(equation: str, dims: list[int]) -> EinsumSpec:
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        out = ("..." if "..." in left else "") + "".join(one for one in letters if left.count(one) == 1)
    unnamed = [size - len(term.replace("...", "")) for term, size in zip(terms, dims, strict=True)]
    stand = "0123456789"[: max(unnamed)]
    spelled = [term.replace("...", stand[len(stand) - count :]) for term, count in zip(terms, unnamed, strict=True)]
    if any(len(set(term)) < len(term) for term in spelled):
        raise NoRuleError("einsum takes a diagonal, which has no rule on shards.")
    return EinsumSpec(tuple(spelled), out.replace("...", stand))


def grouped_mm(
    context: "GlobalTensorContext", func: Function, mat_a: Any, mat_b: Any, *, offs: Any = None, **options: Any
) -> Any:
    """Multiplies groups of rows of ``mat_a`` [S, I], each by its expert's matrix in ``mat_b`` [E, I, O].

    ``offs`` [E]: end of each expert's group of rows. The result [S, O] is summed over the ranks if I is sharded.

    Raises:
        NoRuleError: S or E is sharded, ``offs`` is a global tensor, or a bias is given.
    """
    if mat_a.ndim != 2 or mat_b.ndim != 3 or options.get("bias") is not None or type(offs) is GlobalTensor:
        raise NoRuleError("grouped_mm has a rule for [S, I] times [E, I, O] with plain offs and without bias only.")
    if any(layout_of(tensor).sets[0] is not None for tensor in (mat_a, mat_b)):
        raise NoRuleError("grouped_mm needs full rows and experts, but one of them is sharded.")
    product = EinsumSpec(("SI", "EIO"), "SO")
    return multiply_parts(context, (mat_a, mat_b), product, lambda a, b: func(a, b, offs=offs, **options))


def embedding(
    context: "GlobalTensorContext", func: Function, input: Any, weight: Any, *args: Any, **options: Any
) -> Any:
    """Returns the rows of the table ``weight`` [V, H] at the ids ``input``, by ``functional.embedding``.

    The ids may be sharded, and the table along H; the result [.., H] is sharded accordingly.

    Raises:
        NoRuleError: V is sharded, or ``max_norm`` is set.
    """
    table = layout_of(weight)
    if table.sets[0] is not None or args[1:2] not in ((), (None,)) or options.get("max_norm") is not None:
        raise NoRuleError("embedding needs full rows of the table and no max_norm.")
    ids = layout_of(input)
    sets = (*ids.sets, table.sets[1])
    if not covers(sets):
        raise NoRuleError("the operands are sharded in such a way that some element would be on no rank.")
    rows = part(context, input, ids.sets)
    out = func(rows, part(context, weight, table.sets), *args, **options)
    return GlobalTensor(out, (*ids.shape, table.shape[1]), sets, context)


def added_rows(
    context: "GlobalTensorContext", func: Function, weight: Tensor, ids: Tensor, padding: int | None, kernels: Kernels
) -> Any:
    """Returns the rows of the table ``weight`` [V, H] at the indices ``ids``, as :func:`embedding` does.

    ``kernels``: may have a gradient buffer of the table. If the running backward may write the buffer, it adds to the
    buffer in place and returns no gradient. The row ``padding`` gets no gradient.
    """
    return embedding(context, lambda rows, table: look_up_rows(table, rows, padding, kernels), ids, weight)
