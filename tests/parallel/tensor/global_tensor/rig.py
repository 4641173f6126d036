"""A program on whole tensors, and the same on parts by simulated ranks: outputs and all gradients are compared.

Gradients of parts are laid where they belong and summed over the ranks; so are those of plain parameters that met a
View; those of other plain tensors must be equal on all ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor, show_parameter
from engine.parallel.tensor.global_tensor.index_sets import Index, Sets
from engine.parallel.tensor.global_tensor.rules.table import global_context
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis

Program = Callable[..., Any]
KINDS = ("blocks", "interleaved", "thirds", "uneven", "shared", "pairs")


def index(kind: str, size: int, ranks: int) -> Index:
    """A way to hold a dim: ``size`` is a multiple of 3 * ranks."""
    everything = np.arange(size)
    if kind == "blocks":
        return Index.even_blocks(size, ranks)
    if kind == "interleaved":
        return Index([everything[rank::ranks] for rank in range(ranks)], size)
    if kind == "thirds":
        parts = everything.reshape(3, ranks, -1)
        return Index([parts[:, rank].ravel() for rank in range(ranks)], size)
    if kind == "uneven":
        borders = [0, *(size // ranks * rank + 1 for rank in range(1, ranks)), size]
        return Index([everything[a:b] for a, b in pairwise(borders)], size)
    if kind == "shared":  # neighbours overlap by one
        width = size // ranks
        return Index([everything[max(rank * width - 1, 0) : (rank + 1) * width] for rank in range(ranks)], size)
    halves = np.split(everything, 2)
    return Index([halves[rank * 2 // ranks] for rank in range(ranks)], size)


@dataclass
class Given:
    """One tensor of a program: plain, a plain parameter, a parameter shown as a View, or a View in the graph."""

    tensor: Tensor
    cut: Mapping[int, str] | None = None
    """Which dims are cut, and how; None: plain, {}: a View of which every rank holds all."""
    parameter: bool = False
    grad: bool = True

    def sets(self, ranks: int) -> Sets:
        """Who holds what."""
        cut = self.cut or {}
        return tuple(index(cut[d], n, ranks) if d in cut else None for d, n in enumerate(self.tensor.shape))


@dataclass
class Found:
    """What a rank brings home."""

    output: list[Tensor]
    sets: list[Sets | None]
    grads: dict[str, Tensor]
    partial: set[str]
    gathers: dict[str, int]
    called: list[Any] = field(default_factory=list)


def take(full: Tensor, sets: Sets, rank: int) -> Tensor:
    """What a rank holds."""
    for dim, held in enumerate(sets):
        if held is not None:
            full = full.index_select(dim, torch.as_tensor(held.ranks[rank]))
    return full.clone()


def place(part: Tensor, sets: Sets, shape: tuple[int, ...], rank: int) -> Tensor:
    """A part where it belongs, in zeros."""
    for dim, held in enumerate(sets):
        if held is not None:
            wider = part.new_zeros((*part.shape[:dim], shape[dim], *part.shape[dim + 1 :]))
            part = wider.index_copy(dim, torch.as_tensor(held.ranks[rank]), part)
    return part


def ownership(sets: Sets, shape: tuple[int, ...], rank: int, ranks: int) -> Tensor:
    """1 for the elements that no lower rank holds."""
    ones = [place(take(torch.ones(shape), sets, other), sets, shape, other) for other in range(ranks)]
    seen = torch.stack(ones).cumsum(0)
    return take(((seen[rank] == 1) & (ones[rank] == 1)).double(), sets, rank)


def _cotangent(number: int, shape: Any) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def _outputs(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple | list) else [result]
    return [one for one in results if one is not None]


def run_rank(program: Program, given: Mapping[str, Given], axis: TensorAxis, sequence: bool = False) -> Found:
    """Forward and backward of one rank."""
    views = global_context(axis, sequence)
    leaves: dict[str, Tensor] = {}
    arguments: dict[str, Any] = {}
    for name, one in given.items():
        sets = one.sets(axis.size)
        leaf = take(one.tensor, sets, axis.index)
        leaf = nn.Parameter(leaf) if one.parameter else leaf.requires_grad_(one.grad)
        leaves[name] = leaf
        if one.cut is None:
            arguments[name] = leaf
        elif isinstance(leaf, nn.Parameter):
            arguments[name] = show_parameter(leaf, tuple(one.tensor.shape), sets, views)
        else:
            arguments[name] = GlobalTensor(leaf.view_as(leaf), tuple(one.tensor.shape), sets, views)
    outputs = _outputs(program(**arguments))
    partial = {name for name, leaf in leaves.items() if isinstance(leaf, nn.Parameter) and leaf in views.partial}
    views.clear()
    roots, cotangents = [], []
    for number, out in enumerate(outputs):
        cotangent = _cotangent(number, out.shape)
        if isinstance(out, GlobalTensor):
            own = ownership(out.sets, tuple(out.shape), axis.index, axis.size)
            cotangent = take(cotangent, out.sets, axis.index) * own
        if out.requires_grad:
            roots.append(out.local if isinstance(out, GlobalTensor) else out)
            cotangents.append(cotangent.to(out.dtype))
    torch.autograd.backward(roots, cotangents)
    grads = {name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()}
    return Found(
        [(out.local if isinstance(out, GlobalTensor) else out).detach() for out in outputs],
        [out.sets if isinstance(out, GlobalTensor) else None for out in outputs],
        grads,
        partial,
        views.gathers,
        axis.called if isinstance(axis, SimulatedAxis) else [],
    )


def compare(
    program: Program, given: Mapping[str, Given], ranks: int, sequence: bool = False, bound: float = 1e-10
) -> list[Found]:
    """Run ``program`` whole and on parts; all must agree. What the ranks found is returned."""
    leaves = {n: one.tensor.clone().requires_grad_(one.grad or one.parameter) for n, one in given.items()}
    outputs = _outputs(
        program(**{name: leaf.view_as(leaf) if leaf.requires_grad else leaf for name, leaf in leaves.items()})
    )
    wanted = [out for out in outputs if out.requires_grad]
    roots = [_cotangent(number, out.shape).to(out.dtype) for number, out in enumerate(outputs) if out.requires_grad]
    torch.autograd.backward(wanted, roots)
    found = run(program, given, ranks, sequence)
    for number, whole in enumerate(outputs):
        check_output(whole.detach(), number, found, bound)
    for name, one in given.items():
        leaf = leaves[name]
        expected = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
        check_gradient(name, one, expected, found, bound)
    return found


def run(program: Program, given: Mapping[str, Given], ranks: int, sequence: bool = False) -> list[Found]:
    """On parts only."""
    return run_tensor_ranks(ranks, lambda axis: run_rank(program, given, axis, sequence))


def check_output(whole: Tensor, number: int, found: list[Found], bound: float) -> None:
    """Every rank's part is what plain code has there; all parts are all."""
    held = torch.zeros(whole.shape)
    for rank, one in enumerate(found):
        sets = one.sets[number] or (None,) * whole.ndim
        expected = take(whole, sets, rank)
        assert one.output[number].shape == expected.shape, (number, one.output[number].shape, expected.shape)
        torch.testing.assert_close(one.output[number], expected, rtol=bound, atol=bound)
        held += place(torch.ones(expected.shape), sets, tuple(whole.shape), rank)
    assert bool((held > 0).all())


def check_gradient(name: str, given: Given, expected: Tensor, found: list[Found], bound: float) -> None:
    """Put together from the ranks, the gradient is that of plain code."""
    ranks = len(found)
    if given.cut is not None:
        sets = given.sets(ranks)
        total = sum(place(one.grads[name], sets, tuple(expected.shape), rank) for rank, one in enumerate(found))
    elif name in found[0].partial:
        assert given.parameter and all(name in one.partial for one in found)
        total = sum(one.grads[name] for one in found)
    else:
        total = found[0].grads[name]
        for one in found[1:]:
            torch.testing.assert_close(one.grads[name], total, rtol=bound, atol=bound, msg=f"{name} differs by rank")
    close = bound * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    torch.testing.assert_close(total, expected, rtol=bound, atol=close, msg=lambda text: f"gradient of {name}: {text}")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers of float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
