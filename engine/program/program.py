"""User's model and loss as one function of a microbatch: copy to the device, cast, forward, loss.

``evaluating`` is a context with the model in eval mode.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import EngineError, first_line
from engine.kernels.device import PinnedCopies
from engine.parallel.context.recipe_mode import masks_by_recipe
from engine.parallel.trace.model_trace import ModelTrace
from engine.precision.dtypes import Precision
from engine.program.batch import Batch, call_model, cast_floats, map_tensors, tensors_by_path
from engine.program.batch_rows import BatchRows
from engine.program.forward_inputs import ForwardInputs
from engine.program.loss import LossFunction, RowGather, WeightedLoss, find_loss, has_loss
from engine.program.router_replay import RouterReplay


class ForwardResult(NamedTuple):
    """Model output and loss of one microbatch.

    Release the output early: logits of a large vocabulary are often the largest tensor of a step.
    """

    output: Any
    loss: WeightedLoss


@dataclass(frozen=True, slots=True)
class Program:
    """Model, loss function, dtypes and device as one function of a microbatch."""

    model: nn.Module
    loss_fn: LossFunction | None
    precision: Precision
    device: torch.device
    rows: BatchRows = field(default_factory=BatchRows)
    inputs: ForwardInputs = field(default_factory=ForwardInputs)
    metrics: tuple[str, ...] = ()
    """Names of the metrics that the loss function returns."""
    gather: RowGather = field(default_factory=RowGather)
    """All-gather of rows over dp, for the loss function."""
    replay: RouterReplay | None = None
    """Replay of recorded routing; None: routers choose."""
    weighs_rows: bool = False
    """True if the mean loss of a microbatch is weighted by its number of rows; False: all have equal weight."""
    copies: PinnedCopies = field(default_factory=PinnedCopies, compare=False)

    def move(self, batch: Batch) -> Batch:
        """Returns a copy of the nested batch with all tensors on the program's device."""
        return map_tensors(batch, lambda tensor: self.copies.bring(tensor, self.device))

    def cast(self, batch: Batch) -> Batch:
        """Returns a copy of ``batch`` for the model, with floating-point tensors in the dtype of the model's inputs."""
        return cast_floats(batch, self.precision.inputs)

    def forward(self, microbatch: Batch) -> ForwardResult:
        """Moves one microbatch to the device, runs model and loss function, and returns output and loss."""
        moved = self.move(microbatch)
        output = self._run(moved, microbatch)
        return ForwardResult(output, self._loss(output, moved))

    def _loss(self, output: Any, moved: Batch) -> WeightedLoss:
        weight = float(self.rows.count(moved)) if self.weighs_rows else 1.0
        return find_loss(output, moved, self.loss_fn, self.metrics, weight)

    def planned_loss(self, microbatch: Batch) -> WeightedLoss:
        """Returns the loss of an example microbatch, for planning.

        Without a loss in the output, returns a substitute that depends on every floating-point tensor of the output.
        """
        with self.precision.forward(self.device):
            return self._planned_loss(self.move(microbatch))

    def _planned_loss(self, moved: Batch) -> WeightedLoss:
        output = self._run(moved)
        if self.loss_fn is not None or has_loss(output):
            return self._loss(output, moved)
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not found:
            return find_loss(output, moved, None)  # raises with the type of the output
        # tensor ranks keep logits sharded here, as in the cross-entropy that a user's loop computes from the output
        return WeightedLoss(torch.stack([leaf.float().logsumexp(dim=-1).sum() for leaf in found]).sum(), 1.0)

    def output(self, microbatch: Batch) -> Any:
        """Returns the model's output for one microbatch, without a call of the loss function."""
        return self._run(self.move(microbatch), microbatch)

    def _run(self, moved: Batch, given: Batch | None = None) -> Any:
        pairs = zip(tensors_by_path(moved), tensors_by_path(moved if given is None else given), strict=True)
        try:
            replayed = self.replay.forward(moved) if self.replay is not None else nullcontext()
            with replayed, masks_by_recipe((tensor, own) for (_, tensor), (_, own) in pairs):
                return call_model(self.model, self.cast(self.inputs.take(moved)))
        except RuntimeError as error:
            if "meta" in str(error) and (names := _meta_attributes(self.model)):
                raise EngineError(
                    f"{names[0]} of the model is a tensor on the meta device that is neither a parameter nor a buffer, "
                    "so it never gets values; make it a buffer (register_buffer), or build it in forward."
                ) from error
            if self.precision.compute is None or not _MIXED_DTYPES.search(str(error)):
                raise
            raise _mixed_dtypes(error, self.precision.compute) from error

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output. A single positional argument is a batch; other arguments are passed to the
        model's forward.
        """
        given = self.move(args[0] if len(args) == 1 and not kwargs else kwargs)
        if self.replay is not None:
            self.replay.check(given)
        kept = self.cast(self.inputs.kept(given))
        with self.replay.forward(given) if self.replay is not None else nullcontext():
            if len(args) == 1 and not kwargs:
                return call_model(self.model, kept)
            return self.model(*self.cast(self.move(args)), **kept)

    def local_modules(self) -> AbstractContextManager[None]:
        """Returns a context without effect; :class:`ContextProgram` overrides it for traces."""
        return nullcontext()

    def check_trace(self, trace: ModelTrace) -> None:
        """Does nothing; :class:`ContextProgram` overrides it to check a traced forward."""

    def on_shapes(self) -> AbstractContextManager[None]:
        """Returns a context without effect; :class:`ContextProgram` overrides it for traces without communication."""
        return nullcontext()

    def on(self, device: torch.device) -> "Program":
        """Returns a copy of the program that moves its batches to ``device``. The model is not moved."""
        return replace(self, device=device)


def _meta_attributes(model: nn.Module) -> list[str]:
    """Lists the paths of tensors without memory that modules have as plain attributes, also in lists and dicts."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))
    ]


_MIXED_DTYPES = re.compile(
    r"same dtype|dtypes match|expected scalar type|expected m1 and m2|should be the same|same type"
)
"""torch's messages about an operation on tensors of two dtypes."""


_SHORT = MappingProxyType({torch.bfloat16: "bf16", torch.float16: "fp16"})


def _mixed_dtypes(error: RuntimeError, compute: torch.dtype) -> EngineError:
    narrow = str(compute).removeprefix("torch.")
    return EngineError(
        f"the forward mixes two dtypes ({first_line(error)}): weights are {narrow} in this run, but inputs, buffers "
        "and tensors that the forward creates keep their dtype; cast them there (x.to(weight.dtype)), or "
        f"set cast_forward_inputs to true, buffer_dtype to {_SHORT[compute]!r}, or keep_fp32 to the module's name."
    )


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Opens a context outside of ``torch.inference_mode``; without gradients if that mode was on.

    Tensors that the engine creates in that mode and keeps could not be written or differentiated after it.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Returns a context in which all modules of ``model`` are in eval mode; its end restores their modes."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
