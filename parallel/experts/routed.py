"""Modules that stack experts on the experts of this rank: the module's own forward, given the rows of all ranks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.experts.awaited import WaitingBlock
from engine.parallel.experts.calls import Rows
from engine.parallel.experts.dispatch import AXIS, COMBINE, DISPATCH, Dispatch, Round, exchange
from engine.parallel.experts.forms import RoutedExperts, expert_bounds, set_counts
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.parametrized_weights import adapter_chain
from engine.parallel.model.placeholders import is_without_content
from engine.parallel.tensor.collectives import gather_whole, slice_of
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.layers.linear import ExpertsLayer
from engine.parallel.tensor.layers.position_layer import run_on_positions
from engine.parallel.tensor.tp_axis import TensorAxis

EXPERT_ROWS = "expert rows"
"""Label of the rows that tensor ranks divide among themselves."""


def share_experts(
    model: nn.Module,
    found: Sequence[RoutedExperts],
    comm: Comm,
    tensor: TensorAxis,
    patches: ForwardPatches,
    compiled: bool = False,
) -> None:
    """Applies expert parallelism to the modules in ``found``: sends token rows to the ranks of their experts, and
    results back.

    Other layers of a block compute during the exchange of results, unless the model is ``compiled``.
    ``tensor``: tensor-parallel axis. ``patches``: list that records the changes.
    """
    for each in found:
        module, block = model.get_submodule(each.name), None
        parent = model.get_submodule(each.name.rpartition(".")[0])
        if not compiled and parent is not module and _has_other_work(parent, module):
            block = WaitingBlock(parent.forward, comm)
            patches.wrap_forward(parent, PatchLayer.EXPERTS, block.forward, "computes beside the exchange of experts")
        shared = SharedExperts(each, module, comm, tensor, block)
        part = f"a part of the width of {shared.count}" if each.added is not None else f"{shared.count}"
        note = f"computes {part} of its {each.experts} experts, for the tokens of {comm.grid.size(AXIS)} ranks"
        # the trial has proven that a row's result depends on no other row, so each context rank sends its own rows
        forward = partial(run_on_positions, shared.forward) if comm.grid.cp > 1 else shared.forward
        patches.wrap_forward(module, PatchLayer.EXPERTS, forward, f"{note} (parallel.expert)")


def _has_other_work(block: nn.Module, experts: nn.Module) -> bool:
    """Returns True if a child of ``block`` other than ``experts`` has several matrices, and so is no router."""
    others = (child for child in block.children() if all(module is not experts for module in child.modules()))
    return any(sum(each.dim() > 1 for each in child.parameters()) > 1 for child in others)


class SharedExperts:
    """Forward of an expert layer with its experts distributed over the ranks of the axis "ep".

    If tensor ranks store whole experts, each rank sends an equal share of the rows, and results are gathered. If tensor
    ranks shard experts along their width, each rank sends all rows, and results are summed. While communication over
    the tensor axis is off (``dry``), this rank's experts compute all rows, and nothing is sent.
    """

    def __init__(
        self, found: RoutedExperts, module: nn.Module, comm: Comm, tensor: TensorAxis, block: WaitingBlock | None = None
    ) -> None:
        self._block = block
        self._found, self._module, self._comm, self._tensor = found, module, comm, tensor
        self._own: Callable[..., Any] = module.forward
        base = adapter_chain(module)[-1][1]
        self._signature = inspect.signature(base.tensor_forward if isinstance(base, ExpertsLayer) else base.forward)
        index, bounds = comm.grid.index(AXIS), expert_bounds(found.experts, comm.grid.size(AXIS))
        self.count = bounds[index + 1] - bounds[index]
        """Number of experts on this rank."""
        self._bounds = torch.tensor(bounds)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the layer's output for this rank's rows; exchanges rows and results over the axis "ep".

        Raises:
            EngineError: the arguments do not fit the module's calling convention.
        """
        if isinstance(self._module, ExpertsLayer):
            summed: Tensor = self._module.tensor_summed(self._all_rows, args, kwargs)
            return summed
        if self._tensor.size == 1:
            return self._all_rows(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs).arguments
        x, numbers, weights = self._read(given)
        shape = given[self._found.call.names[0]].shape[:-1]
        tokens, ranks = len(x), self._tensor.size
        more = (0, 0, 0, -tokens % ranks)
        x, weights = (slice_of(functional.pad(each, more), self._tensor, 0, EXPERT_ROWS) for each in (x, weights))
        numbers = functional.pad(numbers, more, value=-1).view(ranks, -1, numbers.shape[1])[self._tensor.index]
        y = gather_whole(self._routed(given, x, numbers, weights), self._tensor, 0, EXPERT_ROWS)[:tokens]
        return _with_shape(y, shape)

    def _all_rows(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the output for rows that this rank sends altogether."""
        given = self._signature.bind(*args, **kwargs).arguments
        shape = given[self._found.call.names[0]].shape[:-1]
        return _with_shape(self._routed(given, *self._read(given)), shape)

    def _routed(self, given: Mapping[str, Any], x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the module's output for rows of this rank, from the experts of all ranks of the axis "ep"."""
        if self._tensor.dry or is_without_content(numbers):
            return self._compute(given, x, numbers.clamp(0, self.count - 1), weights)
        if self._bounds.device != numbers.device:
            self._bounds = self._bounds.to(numbers.device)
        sent = Dispatch(numbers, self._bounds, self._comm)
        rounds, y = sent.rounds, None
        if len(rounds) == 1 and self._block is not None and self._block.is_running:
            made, ties = self._made(given, sent, rounds[0], x, weights)
            return self._block.combine(made, rounds[0], sent.token, len(x), ties)
        for each in rounds:  # only the rows of one round are in memory, in the backward too
            if len(rounds) == 1:
                part = self._exchanged(given, sent, each, x, weights)
            else:
                part = checkpoint(self._exchanged, given, sent, each, x, weights, use_reentrant=False)
            y = part.new_zeros(len(x), *part.shape[1:]) if y is None else y
            y = y.index_add(0, sent.token[each.rows], part)
        assert y is not None
        return y

    def _exchanged(self, given: Mapping[str, Any], sent: Dispatch, each: Round, x: Tensor, weights: Tensor) -> Tensor:
        """Returns the sums of the experts of other ranks and of this one for the rows of a round."""
        made, ties = self._made(given, sent, each, x, weights)
        (back,) = exchange((made,), each.gets, each.gives, self._comm, COMBINE, ties)
        return back

    def _made(
        self, given: Mapping[str, Any], sent: Dispatch, each: Round, x: Tensor, weights: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the sums of this rank's experts for the rows that it gets in a round, and ties of their way back."""
        token, local = sent.token[each.rows], sent.local[each.rows]
        weight = weights[token].masked_fill(local < 0, 0)
        whole = (x[token], weight, local.to(torch.int32))
        rows, weight, numbers = exchange(whole, each.gives, each.gets, self._comm, DISPATCH, ())
        row, slot = sent.asked(numbers)
        out = self._compute(given, rows[row], numbers[row, slot][:, None].long(), weight[row, slot][:, None])
        y = out.new_zeros(len(rows), *out.shape[1:]).index_add(0, row, out)
        ties = (rows, weight, *self._module.parameters()) if len(row) == 0 else ()
        return y, ties

    def _compute(self, given: Mapping[str, Any], x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Returns the result of the module's own forward, of the experts of this rank."""
        written = self._found.call.write(Rows(x, numbers, weights), self.count, given)
        made = self._signature.bind_partial()
        made.arguments.update({**given, **written.arguments})
        with self._own_part():
            result: Tensor = self._own(*made.args, **made.kwargs)
        return written.back(result)

    @contextmanager
    def _own_part(self) -> Any:
        """Context in which the module is the part of this rank: its number of experts, and its summand of results."""
        set_counts(self._module, self._found.counts, self.count)
        elsewhere = self._added_elsewhere()
        if self._found.added is not None:
            object.__setattr__(self._module, "tensor_inside", True)
            self._module._parameters.update({name: each * 0 for name, each in elsewhere.items()})  # type: ignore[misc]
        try:
            yield
        finally:
            self._module._parameters.update(elsewhere)
            if self._found.added is not None:
                object.__delattr__(self._module, "tensor_inside")
            set_counts(self._module, self._found.counts, self._found.experts)

    def _added_elsewhere(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that another tensor rank adds to its result, by name."""
        if self._tensor.index == 0:
            return {}
        return {name: self._module.get_parameter(name) for name in self._found.added or ()}

    def _read(self, given: Mapping[str, Any]) -> Rows:
        call, experts = self._found.call, self._found.experts
        whole = {
            name: full(each, "experts of other ranks need whole rows") if isinstance(each, GlobalTensor) else each
            for name, each in given.items()
        }
        rows = call.read(whole, experts)
        for name, each in given.items():
            if name not in call.names and isinstance(each, Tensor) and not isinstance(each, nn.Parameter):
                raise EngineError(
                    f"{self._found.name} was called with a tensor {name} {list(each.shape)}, but with parallel.expert "
                    f"it computes the rows of other ranks too, which have another {name}; apply it before or after the "
                    "experts, or leave parallel.expert out."
                )
        if rows is None:
            found = (given.get(name) for name in call.names)
            shown = ", ".join(str(list(each.shape)) if isinstance(each, Tensor) else str(each) for each in found)
            raise EngineError(
                f"{self._found.name} was called with {shown}, but with parallel.expert its arguments are "
                f"{call.described}; call it with these, or leave parallel.expert out."
            )
        return rows


def _with_shape(y: Tensor, shape: torch.Size) -> Tensor:
    """Returns rows [T, H] in the shape of the rows that the module was called with."""
    return y.view(*shape, y.shape[-1])
