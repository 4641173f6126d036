"""Strategies to run a block's code on shards, and the choice of layers that are sharded by vocabulary.

local     plain tensors; linear layers with f and g. Sufficient for code with view(..., -1, head_dim), as
          in most Hugging Face models
local+    plain tensors, with some whole numbers that the code reads divided by the number of ranks
view      parameters are global tensors with the full shape; slower in Python, correct for any use of widths

The list begins with the cheapest. Embeddings and heads are sharded by vocabulary if a tie or an equal number of rows
connects them; without a head, the embedding with the most rows is sharded. Other embeddings (positions, token types)
are small; replicated, they need no sum.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import NamedTuple

from torch import nn

from engine.errors import PlanError
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters
from engine.parallel.tensor.deferred_linear import is_conv1d, is_linear
from engine.parallel.tensor.plan.ranges import cut_parts, runs_of
from engine.parallel.tensor.plan.sharding_rules import check_embedding, head_width
from engine.parallel.tensor.plan.styles import write_rows
from engine.parallel.tensor.plan.tensor_plan import ParameterCut


class ShardingStrategy(NamedTuple):
    """Sharding strategy of one parameter group.

    ``how``: "local" (code computes with plain shards), "local+" (also divides integer attributes by the number of
    ranks), "view" (code reads global tensors) or "replicate". ``styles``: style, such as "column" or "partial", of each
    module or parameter, by name in the block.
    """

    how: str
    styles: Mapping[str, str]
    changes: tuple[str, ...] = ()
    """Attributes with a changed value, for reports."""


def local(block: nn.Module, group: CoupledParameters, tp: int) -> ShardingStrategy | None:
    """Returns the strategy "local": the block's code computes with plain tensors, this rank's slices.

    Returns None if this strategy cannot shard ``group``.
    """
    rows = (group.row, *group.beside)
    weights = (*group.columns, *rows)
    owners = {_owner(name) for name in weights}
    styles = {name: "partial" for name in group.partial}
    if len(owners) == 1:
        owner = owners.pop()
        others = [name for name in group.cuts if _owner(name) != owner and name not in group.factors]
        if is_linear(block.get_submodule(owner)) or others:
            return None
        cut = {name: _cut_style(block, name, piece, tp) for name, piece in group.cuts.items()}
        return ShardingStrategy("local", styles | {owner: "experts"} | cut)
    for name, piece in group.cuts.items():
        module = block.get_submodule(_owner(name))
        if name in weights:
            if not (is_linear(module) and name.endswith("weight") and _called(block, _owner(name))):
                return None
            kind = "row" if name in rows else "column"
            styles[_owner(name)] = _words(block, _owner(name), kind, piece, tp)
        elif not (_owner(name) in owners and name.endswith("bias")):
            styles[name] = _cut_style(block, name, piece, tp)
    return ShardingStrategy("local", styles)


def view(block: nn.Module, group: CoupledParameters, tp: int, partial: bool = True) -> ShardingStrategy:
    """Returns the strategy "view": the block's code reads each sharded parameter as a ``GlobalTensor``.

    ``partial``: True sums gradients of replicated parameters once after backward; False sums them in backward at each
    use.
    """
    styles = {name: "partial" for name in group.partial if partial}
    for name, cut in group.cuts.items():
        styles[name] = f"{_cut_style(block, name, cut, tp)} view"
    return ShardingStrategy("view", styles)


def _cut_style(block: nn.Module, name: str, cut: ParameterCut, tp: int) -> str:
    size = block.get_parameter(name).shape[cut.dim]
    return f"cut:{cut.dim}{_extent(cut, size, tp)}"


def _words(block: nn.Module, layer: str, kind: str, cut: ParameterCut, tp: int) -> str:
    """Returns the style of a linear layer; without a ``head`` word the parent module's head width applies."""
    module = block.get_submodule(layer)
    dim = 0 if (kind == "column") != is_conv1d(module) else 1
    size = block.get_parameter(f"{layer}.weight").shape[dim]
    return kind + _extent(cut, size, tp, head_width(block.get_submodule(_owner(layer))) or 1)


def _extent(cut: ParameterCut, size: int, tp: int, default: int = 1) -> str:
    """Returns the words for the rows: even shards, fused equal parts, or exact rows.

    ``default``: the head width that needs no word.
    """
    for unit in dict.fromkeys((default, 1)):
        for parts in (1, 2, 3):
            if _shares_heads(size, tp, parts, unit) and cut.ranges == cut_parts(size, tp, parts, unit):
                return f" fused:{parts}" * (parts > 1) + f" head:{unit}" * (unit != default)
    return f" {write_rows(runs_of(cut.ranges, tp))}"


def _shares_heads(size: int, tp: int, parts: int, unit: int) -> bool:
    heads, rest = divmod(size, parts * unit)
    return not rest and (heads % tp == 0 or (unit > 1 and tp % heads == 0))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _called(block: nn.Module, layer: str) -> bool:
    """Returns True if the layer is called; nn.MultiheadAttention only reads the weight of its output layer."""
    return not isinstance(block.get_submodule(_owner(layer)), nn.MultiheadAttention)


class Number(NamedTuple):
    """Integer attribute of a module in a block. ``attribute``: name, or "config.NAME" for an attribute of the module's
    config.

    ``module``: path in the block.
    """

    module: str
    attribute: str


def divisible_attributes(block: nn.Module, group: CoupledParameters, tp: int) -> list[Number]:
    """Returns the integer attributes that may have to be divided by ``tp`` when ``group`` is sharded.

    Their values are multiples of ``tp``, or divisors of it above 1, which become 1. Attributes that a module's methods
    read come first.
    """
    paths: dict[str, None] = {}
    for name in group.cuts:
        parts = name.split(".")[:-1]
        paths.update(dict.fromkeys(".".join(parts[:end]) for end in range(len(parts), -1, -1)))
    found = []
    for path in paths:
        module = block.get_submodule(path)
        if is_linear(module):
            continue
        read = _names_read(module)
        own = [name for name in vars(module) if _shares(module, name, tp)]
        # a function that gets the module may read numbers that no method names; they come last
        found += [Number(path, name) for name in sorted(own, key=lambda name: name not in read)]
        if "config" in read and hasattr(module, "config"):
            found += [Number(path, f"config.{name}") for name in sorted(read) if _shares(module.config, name, tp)]
    return found


def _shares(owner: object, name: str, tp: int) -> bool:
    value = getattr(owner, name, None)
    return type(value) is int and value > 1 and (value % tp == 0 or tp % value == 0)


def _names_read(module: nn.Module) -> set[str]:
    """Returns the names in the code of the module's own methods."""
    classes = [base for base in type(module).__mro__ if base.__module__ != "torch.nn.modules.module"]
    functions = [f for base in classes for f in vars(base).values() if isinstance(f, FunctionType)]
    return {name for f in functions if f.__name__ != "__init__" for name in _names_in(f.__code__)}


def _names_in(code: CodeType) -> Iterator[str]:
    """Yields the names in ``code``, and in its comprehensions and inner functions."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def with_numbers(way: ShardingStrategy, chosen: Sequence[Number]) -> ShardingStrategy:
    """Returns the strategy "local+": ``way`` with each attribute in ``chosen`` divided by the number of ranks."""
    changed = dict(way.styles)
    for module, attribute in chosen:
        before = changed.get(module)
        changed[module] = f"{before} divide:{attribute}" if before else f"divide:{attribute}"
    return ShardingStrategy("local+", changed, tuple(f"{n.module}.{n.attribute}".strip(".") for n in chosen))


STYLE = "vocabulary"


def vocabulary_styles(model: nn.Module, called: Mapping[str, nn.Module], tp: int) -> dict[str, str]:
    """Returns the style "vocabulary" for each embedding and output head of ``model`` that can be sharded by rows.

    ``called``: modules that the forward calls, by name; ``tp``: number of ranks.
    """
    embeddings: dict[str, nn.Embedding] = {}
    for name, module in called.items():
        if isinstance(module, nn.Embedding) and _can_be_cut(module, name, tp):
            embeddings[name] = module
    linears = {name: module for name, module in model.named_modules() if is_linear(module)}
    rows = {module.num_embeddings for module in embeddings.values()}
    heads = {name: module for name, module in linears.items() if _outputs(module) in rows and _outputs(module) > 1}
    tied = {id(module.weight) for module in heads.values()}
    sizes = {_outputs(module) for module in heads.values()}
    words = {n: m for n, m in embeddings.items() if id(m.weight) in tied} or {
        n: m for n, m in embeddings.items() if m.num_embeddings in sizes
    }
    if not words and embeddings:
        return {max(embeddings, key=lambda name: embeddings[name].weight.shape[0]): STYLE}
    shared = {id(module.weight) for module in words.values()}
    words |= {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and id(m.weight) in shared}
    wanted = {m.num_embeddings for m in words.values()}
    found = [name for name, module in heads.items() if _outputs(module) in wanted and _is_head(name)]
    return dict.fromkeys((*words, *found), STYLE)


def _can_be_cut(module: nn.Embedding, name: str, tp: int) -> bool:
    if module.num_embeddings < tp:
        return False
    try:
        check_embedding(module, name)
    except PlanError:
        return False
    return True


def _outputs(module: nn.Module) -> int:
    weight = module.weight
    return int(weight.shape[1 if is_conv1d(module) else 0])  # type: ignore[index]


def _is_head(name: str) -> bool:
    """Returns True if a linear layer is outside all chains of blocks."""
    return not any(part.isdecimal() for part in name.split("."))
