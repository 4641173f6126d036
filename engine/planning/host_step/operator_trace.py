"""The operators of one microbatch on one tensor rank, forward and backward, with their sizes: a run on shapes.

    forward    operators as the model calls them, each with the stage whose unit runs; those of a recomputed block that
               come before its last saved tensor run once more
    backward   a node of autograd belongs to the stage that made it, which its sequence number tells

Nothing is computed: parameters and rows are meta tensors, and tensor ranks have the shapes of their shards.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.parallel.activation_checkpointing.blocks import recomputed_blocks, selective_blocks
from engine.parallel.model.placeholders import is_expanded
from engine.parallel.tensor.layers.planned_traffic import TrafficRecorder
from engine.planning.example_trace import run_dtypes
from engine.planning.host_step.operator_classes import ATTENTION, describe, is_kept
from engine.planning.plan import Plan
from engine.program.batch import Batch, map_tensors
from engine.program.program import Program


class OperatorCall(NamedTuple):
    """One operator of a microbatch."""

    kind: str
    """A table of :class:`~engine.planning.host_step.host_rates.HostRates`; empty: it moves nothing."""
    sizes: tuple[float, ...]
    times: float
    """So many of these sizes in one call."""
    stage: int
    backward: bool
    repeats: bool = False
    """Recomputation runs it once more before the backward."""


def trace_operators(program: Program, plan: Plan, row: Batch) -> tuple[OperatorCall, ...]:
    """The operators that the first tensor rank runs for one microbatch like ``row``, of all stages.

    Raises:
        EngineError: the model cannot run on shapes.
    """
    model = program.model
    example = map_tensors(row, lambda tensor: tensor.new_empty(tensor.shape, device="meta"))
    watch = None if plan.tensor is None else TrafficRecorder(model, plan.tensor, {}, plan.config.tp)
    calls = _Calls(plan)
    with (
        torch.enable_grad(),
        watch.cut() if watch else nullcontext(),
        run_dtypes(model, program.precision),
        calls.watching(model),
    ):
        for parameter in model.parameters():
            if is_expanded(parameter):  # a product would take its strides for those of another layout
                parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        loss = program.on(torch.device("meta")).planned_loss(example).sum
        calls.enter_backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, trained, allow_unused=True)
    return tuple(calls.found)


@dataclass(slots=True)
class _Calls:
    """What a run has called so far, and where the run is."""

    plan: Plan
    found: list[OperatorCall] = field(default_factory=list)
    _stage: int = 0
    _next: int = 0
    """Call of the plan's timeline that comes next."""
    _starts: list[int] = field(default_factory=lambda: [0])
    """Sequence number of autograd from which on nodes are of a stage."""
    _stages: list[int] = field(default_factory=lambda: [0])
    _saved: int = 0
    """Number of operators before the last tensor that was saved."""
    _began: int = 0
    """Number of operators before the running block."""
    _quiet: bool = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, operators are noted."""
        settings = self.plan.config.activation_checkpointing
        with ExitStack() as stack:
            whole, part = recomputed_blocks(model, settings), selective_blocks(model, settings)
            for blocks, kept in ((whole, False), (part, True)):
                for block in blocks.values():
                    stack.callback(block.register_forward_pre_hook(self._enter_block).remove)
                    leave: Callable[..., None] = partial(self._leave_block, kept)
                    stack.callback(block.register_forward_hook(leave).remove)
            for name, unit in self._units(model).items():
                stack.callback(unit.register_forward_pre_hook(partial(self._enter_unit, name)).remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved))
            stack.enter_context(_Attention(self))
            stack.enter_context(_Operators(self))
            yield

    def enter_backward(self) -> None:
        """The forward is over."""
        self._saved = len(self.found)

    def note(self, kind: str, sizes: tuple[float, ...], times: float = 1.0) -> None:
        """Add an operator."""
        if self._quiet:
            return
        node = torch._C._current_autograd_node()
        stage = self._stage
        if node is not None:
            stage = self._stages[bisect_right(self._starts, node._sequence_nr()) - 1]
        self.found.append(OperatorCall(kind, sizes, times, stage, node is not None))

    def _units(self, model: nn.Module) -> Mapping[str, nn.Module]:
        if self.plan.cut is None or self.plan.timeline is None:
            return {}
        return {call.unit: model.get_submodule(call.unit) for call in self.plan.timeline.calls}

    def _enter_unit(self, name: str, *_: object) -> None:
        cut, timeline = self.plan.cut, self.plan.timeline
        assert cut is not None and timeline is not None
        rest = range(self._next, len(timeline.calls))
        here = next((index for index in rest if timeline.calls[index].unit == name), None)
        if here is None:
            return
        self._next = here + 1
        if cut.stage_of_call[here] != self._stage:
            self._stage = cut.stage_of_call[here]
            self._starts.append(torch._C._autograd._get_sequence_nr())
            self._stages.append(self._stage)

    def _enter_block(self, *_: object) -> None:
        self._began = self._saved = len(self.found)

    def _leave_block(self, kept: bool, *_: object) -> None:
        for index in range(self._began, self._saved):
            call = self.found[index]
            if not (kept and is_kept(call.kind)):
                self.found[index] = call._replace(repeats=True)

    def _pack(self, saved: Tensor) -> Tensor:
        self._saved = len(self.found)
        self._quiet = True
        try:
            return saved.detach()  # an output saved as it is would refer to its own node
        finally:
            self._quiet = False


class _Operators(TorchDispatchMode):
    def __init__(self, calls: _Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool  # no content: code that asks takes the path of rows without padding
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        views = all(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
        if views:
            self._calls.note("", ())
        else:
            self._calls.note(*describe(func._overloadpacket.__name__, given, made))
        return out


class _Attention(TorchFunctionMode):
    """On shapes torch writes out all scores; this notes attention as its kernels for processors run it."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **given)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | given
        kind = ATTENTION[bool(named.get("is_causal"))]
        key, value = named["key"], named["value"]
        if named.get("enable_gqa"):
            groups = named["query"].shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
        return _StandIn.apply(named["query"], key, value, self._calls, kind)  # type: ignore[no-untyped-call]


class _StandIn(torch.autograd.Function):
    """An attention without content."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: _Calls, kind: str) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.calls, ctx.kind = calls, kind
        _note_attention(calls, kind, query, key)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        _note_attention(ctx.calls, f"{ctx.kind} backward", query, key)
        return *(torch.empty_like(each) for each in (query, key, value)), None, None


def _note_attention(calls: _Calls, kind: str, query: Tensor, key: Tensor) -> None:
    *outer, length, width = query.shape
    rows = float(length * key.shape[-2]) ** 0.5
    calls.note(kind, (rows, float(width)), float(torch.Size(outer).numel()))
