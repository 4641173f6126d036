"""Tiles: a module that treats positions one by one runs on a few positions at a time, and each tile again in backward.

    forward    [B, S, H]  ->  tile 0 | tile 1 | ...  ->  [B, S, H]     only inputs and outputs stay
    backward                  tile 1: forward, backward; tile 0: ...    intermediate tensors of one tile at a time

The modules are those of :mod:`engine.parallel.context.rows.rowwise` with intermediate tensors that are large next to
their inputs and outputs: feed-forward layers, mixtures of experts, norms that compute in steps. A module with dropout
stays whole, since tiles would draw its mask in another order. Arctic Long Sequence Training (Bekman et al. 2025) tiles
the feed-forward layers of some models.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from engine.parallel.activation_checkpointing.blocks import Again, as_in_forward
from engine.parallel.activation_checkpointing.selective import outside_of_saving
from engine.parallel.context.rows.call_forms import flatten_leaves
from engine.parallel.context.rows.rowwise import RowwiseModule
from engine.parallel.context.rows.rowwise_proof import ProvenForm
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor

_MULTIPLE = 64
"""Tokens of an automatic tile are a multiple of this number, if there are so many."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Plan to run ``modules`` tile by tile, on a few positions at a time. ``tokens``: size of a tile."""

    tokens: int
    modules: tuple[RowwiseModule, ...]
    notes: tuple[str, ...] = ()
    """Lines for the banner."""


def plan_tiles(found: Iterable[RowwiseModule], setting: int | Literal["auto"] | None, ranks: int) -> TilePlan | None:
    """Selects the modules in ``found`` for which tiles save memory, and the tile size. Returns None if ``setting`` is
    None.

    ``setting``: tokens of a tile. "auto" chooses the largest tile within a limit: intermediate tensors and gradients of
    the tile together have at most as many elements as the module's inputs and outputs for all tokens of a rank.
    ``ranks``: number of context ranks.
    """
    if setting is None:
        return None
    gaining = (RowwiseModule(each.name, tuple(filter(_gains, each.forms))) for each in found)
    able = [each for each in gaining if each.forms]
    modules = tuple(each for each in able if not any(form.draws for form in each.forms))
    left = _note_of_drawing([each.name for each in able if each not in modules])
    if not modules:
        note = "no module is proven to treat positions one by one with large intermediate tensors, so none has tiles"
        return TilePlan(0, (), left or (f"activation_checkpointing.tile_tokens: {note}",))
    form = max((form for each in modules for form in each.forms), key=lambda form: form.saved / form.stream)
    if setting == "auto":
        most = form.tokens // ranks * form.stream // (2 * form.saved)
        tokens = max(1, most // _MULTIPLE * _MULTIPLE or most)
        why = f"auto: the {form.saved} elements that a token needs inside, twice, fit into the {form.stream} outside"
    else:
        tokens, why = setting, "as configured"
    noun = "module" if len(modules) == 1 else "modules"
    note = f"{len(modules)} {noun} such as {modules[0].name} run in tiles of {tokens} tokens, again in backward ({why})"
    return TilePlan(tokens, modules, (f"activation_checkpointing.tile_tokens: {note}", *left))


def _note_of_drawing(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    nouns = "1 module, " if len(names) == 1 else f"{len(names)} modules such as "
    note = f"no tiles for {nouns}{names[0]}, with dropout: tiles would draw other masks; set the dropout inside to 0"
    return (f"activation_checkpointing.tile_tokens: {note}",)


def _gains(form: ProvenForm) -> bool:
    """Returns True if tiles of such calls save memory."""
    return 2 * form.saved > form.stream


def run_in_tiles(model: nn.Module, plan: TilePlan, patches: ForwardPatches, again: Again | None = None) -> None:
    """Patches the modules in ``plan`` to run tile by tile; backward recomputes each tile.

    ``patches``: list that records the changes. ``again``: callback, called in each tile's forward. It returns a context
    manager factory for the recomputation of this tile.
    """
    for each in plan.modules:
        module = model.get_submodule(each.name)
        forward = _tiled(module, each.forms, plan.tokens, again)
        patches.wrap_forward(module, PatchLayer.ROWS, forward, f"runs in tiles of {plan.tokens} tokens")


def _tiled(module: nn.Module, forms: Sequence[ProvenForm], tokens: int, again: Again | None) -> Callable[..., Any]:
    inner: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        for form in forms:
            leaves = form.call.match(args, kwargs)
            if leaves is not None and (sizes := _tile_sizes(form, leaves, tokens)) is not None:
                return _run(inner, form, _split(form, leaves, sizes), again)
        return inner(*args, **kwargs)

    return forward


def _tile_sizes(form: ProvenForm, leaves: Sequence[Any], tokens: int) -> list[int] | None:
    """Returns the positions of each tile along their dim; None if the call has no tiles."""
    pairs = [(leaf, each.dim) for leaf, each in zip(leaves, form.call.leaves, strict=True) if each.dim is not None]
    dims = {dim for _, dim in pairs}
    rows = max(leaf.shape[0] for leaf, _ in pairs) if dims == {1} else 1
    lengths = {int(leaf.shape[dim]) for leaf, dim in pairs}
    if len(dims) != 1 or len(lengths) != 1 or any(type(leaf) is GlobalTensor for leaf in leaves) or 0 in lengths:
        return None
    (length,), each = lengths, max(1, tokens // max(rows, 1))
    return [min(each, length - start) for start in range(0, length, each)]


def _split(form: ProvenForm, leaves: Sequence[Any], sizes: list[int]) -> list[list[Any]]:
    """Returns the leaves of each tile; one split of a tensor has one gradient, joined from the tiles."""
    columns = [
        [leaf] * len(sizes) if each.dim is None else list(torch.split_with_sizes(leaf, sizes, each.dim))
        for leaf, each in zip(leaves, form.call.leaves, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _run(inner: Callable[..., Any], form: ProvenForm, tiles: list[list[Any]], again: Again | None) -> Any:
    def whole(*leaves: Any) -> Any:
        # a tile of several sequences has gaps, which code that views its input as rows does not take
        return form.call.call(inner, [leaf.contiguous() if isinstance(leaf, Tensor) else leaf for leaf in leaves])

    outs = list[list[Any]]()
    with outside_of_saving():
        for leaves in tiles:
            if torch.is_grad_enabled():
                run = as_in_forward(whole, again)
                out = checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=False)
            else:
                out = whole(*leaves)
            outs.append(flatten_leaves(out)[0])
    made = (
        columns[0] if dim is None else torch.cat(columns, dim)
        for columns, dim in zip(map(list, zip(*outs, strict=True)), form.dims, strict=True)
    )
    return pytree.tree_unflatten(list(made), form.spec)
