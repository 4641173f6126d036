"""Workload of any model from one forward on the meta device: FLOPs, memory bytes moved, activation bytes."""

from collections.abc import Iterator
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from engine.errors import ConfigError, EngineError, PlanError, first_line
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.pipeline.partition.cost_model import flops_of_calls
from engine.planning.cost_model.workload import CutAmount, ExpertWork, Product, Workload
from engine.planning.example_trace import run_dtypes, trace_example
from engine.planning.tensor_plan_search import CalledModules, calls_of_modules
from engine.program.batch import Batch
from engine.program.expert_load import chosen_experts, find_experts
from engine.program.program import Program

MANY_HEADS = 1 << 20
"""Number of heads assumed if a model does not declare it, divisible by any number of tensor ranks."""


class OperatorCounts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch dispatch mode that counts FLOPs and memory bytes of matrix products, attention and other operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: dict[tuple[int, int], float] = {}
        """Rows that are multiplied, by (inner, outer)."""
        self.attention_flops = 0
        self.keys = 0
        """Elements of keys and values."""
        self.pass_bytes = 0
        self.product_bytes = 0
        """Bytes of the results of products and attention."""

    def usual_width(self) -> int:
        """Returns the most frequent size of the summed dim of the counted matrix products, an estimate of the hidden
        size.

        Returns 1 without products.
        """
        widths: dict[int, float] = {}
        for (inner, _), count in self.products.items():
            widths[inner] = widths.get(inner, 0.0) + count
        return max(widths, key=lambda inner: widths[inner], default=1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(getattr(func, "_overloadpacket", None))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if formula is not None:
            self._product(int(formula(*args, **(kwargs or {}), out_val=out)), func, args, made)
        elif any(schema.alias_info is None for schema in func._schema.returns):
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self.pass_bytes += sum(map(_bytes, (*given, *made)))
        return out

    def _product(self, flops: int, func: Any, args: Any, made: list[Tensor]) -> None:
        self.product_bytes += _bytes(made[0])
        if func._overloadpacket is torch.ops.aten.bmm:  # products of activations: attention that is written out
            self.attention_flops += flops
            return
        weight = args[-1] if isinstance(args[-1], Tensor) else made[0]
        inner, outer = weight.shape[-2:] if weight.dim() >= 2 else (1, weight.shape[0])
        size = int(inner), int(outer)
        self.products[size] = self.products.get(size, 0.0) + flops / (2 * inner * outer)


class _AttentionByBlocks(TorchFunctionMode):
    """On shapes torch writes out all scores; this counts attention as its kernels run it, which keep none."""

    def __init__(self, counts: OperatorCounts, kept: "_Kept") -> None:
        super().__init__()
        self._counts, self._kept = counts, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = [*args, *(kwargs or {}).values()][:3]
        out = query.new_empty((*query.shape[:-1], value.shape[-1])) + 0 * query[..., :1]
        self._counts.attention_flops += 2 * out[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        self._counts.keys += key.numel() + value.numel()
        self._counts.product_bytes += _bytes(out)
        for tensor in (query, key, value, out):
            self._kept.pack(tensor)
        return out


def traced_workload(program: Program, row: Batch) -> Workload:
    """Returns the sizes and costs of training the model on rows like ``row``, counted in a forward on meta tensors.

    Raises:
        PlanError: the model cannot be traced.
    """
    model = program.model
    tokens = max((leaf.shape[1] for leaf in tree_leaves(row) if leaf.dim() == 2), default=1)
    called = CalledModules()
    with calls_of_modules(called):
        counts, kept = _counted(program, row, called)
    parameters = float(sum(parameter.numel() for parameter in model.parameters()))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    dtypes = ((program.precision.buffer(name, buffer.dtype), buffer) for name, buffer in model.named_buffers())
    blocks, inside = _blocks(model, called)
    every, width = blocks * tokens, counts.usual_width()
    return Workload(
        blocks=blocks,
        context=tokens,
        width=width,
        products=tuple(
            Product(inner, outer, "outer" if outer >= inner else "inner", count / every)
            for (inner, outer), count in counts.products.items()
        ),
        attention=counts.attention_flops / (4 * tokens * every),
        causal=True,
        heads=MANY_HEADS,
        passes=CutAmount(counts.pass_bytes / every, 0.0),
        fused=CutAmount(counts.pass_bytes / every / 2, 0.0),
        kept=(
            CutAmount(kept.bytes / every, 0.0),
            CutAmount(counts.product_bytes / every, 0.0),
            CutAmount(0.0, 2.0 * width),
        ),
        head=(),
        vocabulary=0,
        block_parameters=inside / blocks,
        outer_parameters=parameters - inside,
        experts=_experts(model, blocks),
        keys=counts.keys / every,
        itemsize=program.precision.itemsize,
        buffer_bytes=float(sum(dtype.itemsize * buffer.numel() for dtype, buffer in dtypes)),
        trained=trained / max(1.0, parameters),
    )


def _experts(model: nn.Module, blocks: int) -> ExpertWork | None:
    """Returns the experts of an average block; None if the model has none."""
    try:
        found = find_experts(model)
    except ConfigError:
        return None
    owned = sum(parameter.numel() for each in found for parameter in model.get_submodule(each.name).parameters())
    experts = max(each.experts for each in found)
    return ExpertWork(owned / blocks, experts, chosen_experts(model, experts), len(found))


def _counted(program: Program, row: Batch, called: CalledModules) -> tuple[OperatorCounts, "_Kept"]:
    """Returns the operators of a forward on shapes, and the bytes that it keeps; coarser if a forward needs values."""
    counts, kept = OperatorCounts(), _Kept(program.model)
    try:
        with (
            torch.enable_grad(),
            run_dtypes(program.model, program.precision),
            saved_tensors_hooks(kept.pack, lambda saved: saved),
            _AttentionByBlocks(counts, kept),
            counts,
        ):
            program.on(torch.device("meta")).planned_loss(row)
    except Exception as error:
        if is_own_mistake(error):
            raise
        return _coarse(program, row, called)
    return counts, kept


BYTES_OF_A_WIDTH = 34
"""Activation bytes of a transformer block per token and element of the hidden size (Korthikanti et al. 2022, section
4).
"""


def _coarse(program: Program, row: Batch, called: CalledModules) -> tuple[OperatorCounts, "_Kept"]:
    """Returns the same from the engine's own trace, which also follows code that reads values; bytes by a rule of
    thumb.

    Raises:
        PlanError: the model cannot be traced.
    """
    try:
        trace = trace_example(program, row, 1)
    except EngineError:
        raise
    except Exception as error:
        if is_own_mistake(error):
            raise
        raise PlanError(
            f"the forward of the model raises {type(error).__name__} on a row of tokens: {first_line(error)}; give "
            "module:function that returns the module and one row of a batch that it takes."
        ) from error
    counts, kept = OperatorCounts(), _Kept(program.model)
    tokens = max((leaf.shape[1] for leaf in tree_leaves(row) if leaf.dim() == 2), default=1)
    shapes = [value.shape[-1] for value in trace.values if len(value.shape) > 1]
    width = int(median_low(shapes)) if shapes else 1
    counts.products[width, width] = sum(flops_of_calls(trace)) / (2 * width**2)
    blocks, _ = _blocks(program.model, called)
    kept.bytes = counts.pass_bytes = BYTES_OF_A_WIDTH * width * tokens * blocks
    counts.product_bytes = kept.bytes // 2
    return counts, kept


class _Kept:
    """Bytes of the tensors that autograd saves, each memory once, without parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._held: list[Any] = []
        self._seen = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a saved tensor, and returns it."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(storage)  # so that its address is not given to another one
            self.bytes += storage.nbytes()
        return tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _blocks(model: nn.Module, called: CalledModules) -> tuple[int, int]:
    """Returns the longest run of equal modules that the forward has called: their number, and the elements of their
    parameters."""
    runs = (run for run in _runs(model) if any(id(part) in called.all for block in run for part in block.modules()))
    longest = max(runs, key=len, default=[model])
    return len(longest), sum(parameter.numel() for block in longest for parameter in block.parameters())


def _runs(model: nn.Module) -> Iterator[list[nn.Module]]:
    for module in model.modules():
        children = list(module.children())
        if (
            len(children) > 1
            and len({type(child) for child in children}) == 1
            and any(True for _ in children[0].children())
        ):
            yield children
