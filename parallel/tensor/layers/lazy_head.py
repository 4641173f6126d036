"""A head whose logits wait for the loss: cross-entropy then goes through tokens in chunks and never stores them all.

    logits = head(x)                      nothing is computed: x, weight and bias are kept
    logits.float().view(-1, V) ...        still nothing; shapes change as code wants them (``late_rules``)
    cross_entropy(logits, labels)         by chunks (``kernels.linear_cross_entropy``)
    logits.argmax(-1), anything else      computes them, once, and goes on as with any tensor

The model and its loss function stay as they are. With a head cut over "tp" everything is sent that would be sent, with
the same labels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from engine.errors import PlanError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.linear_cross_entropy import as_autocast
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.tensor.deferred_linear import FusedForward, is_conv1d
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.layers.linear import has_plain_forward
from engine.parallel.tensor.layers.vocab_parallel import HeadLayer
from engine.parallel.tensor.logits.lazy_logits import product_of
from engine.parallel.tensor.logits.logit_shard import LateProduct, LogitShard, Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.overlap.async_input_grad import enter_region
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class _Late:
    """What a late head knows."""

    vocabulary: Vocabulary
    kernels: Kernels


class LazyLMHead(nn.Module):
    """x [.., D] -> logits [.., V] that wait, while gradients are wanted; otherwise what the head was before gives."""

    tensor_late: _Late

    def forward(self, x_D: Tensor) -> Tensor:
        """Keep x; a cut head lets it arrive as for its product."""
        late, own = self.tensor_late, self._parameters
        weight, bias = own.get("weight"), own.get("bias")
        planned = "multiply" in vars(self)  # as by a pipeline that splits its backward
        if weight is None or planned or not _can_wait(x_D, weight, late.vocabulary.axis):
            logits: Tensor = super().forward(x_D) if isinstance(self, HeadLayer) else self.multiply(x_D)
            return logits
        if isinstance(self, HeadLayer):
            x_D = enter_region(*self.entrance(x_D))
        x_D, weight_WD, bias_W = as_autocast(x_D, weight, bias)
        hidden = LogitShard(
            x_D, late.vocabulary, x_D.dim() - 1, product=LateProduct(weight_WD, bias_W, x_D.dtype, late.kernels)
        )
        return ShardedLogits.late(hidden, product_of(hidden, weight))

    def multiply(self, x_D: Tensor) -> Tensor:
        """The layer's own product."""
        own: Any = super()
        logits: Tensor = own.multiply(x_D) if isinstance(self, HeadLayer) else own.forward(x_D)
        return logits


class LateLinear(LazyLMHead, nn.Linear):
    """A whole head that is a plain ``nn.Linear``."""


def install_lazy_head(module: nn.Linear, axis: TensorAxis, kernels: Kernels, patches: ForwardPatches) -> None:
    """Let the logits of ``module`` stay uncomputed until the loss reads them. Communicates nothing.

    ``module``: a linear layer to the vocabulary, whole on an axis of one rank (or equal on all ranks, outside tensor
    parallelism: give an axis of size 1), or one that ``install`` has cut as a head. ``kernels`` choose how a chunk is
    computed.

    The caller must know:
        - Weights are read when the loss is computed, after the module has returned. Where they are gone by then, or
          replaced (ZeRO 3 gathers them for the module's forward only), a head must not be late.
        - Logits that wait cannot be sent to another pipeline stage: only a head whose stage has the loss may be late.
        - Logits that nobody has looked at when the weights are updated cannot be had any more, and say so. The
          version of the parameter tells, so who writes past autograd must increment it.
        - Gradients of the weight come from the loss's backward, not from the module's: hooks on the module's backward
          do not see them; hooks on parameters do.
        - What is no training (no gradients, a dry axis, the meta device, a function mode as in probes, compilation)
          gets the logits as before.

    Raises:
        PlanError: the module computes more than a matrix product, or somebody has replaced its forward.
    """
    fused = vars(module).get("forward")
    product = fused is None or (isinstance(fused, FusedForward) and fused.activation == "none")
    if not has_plain_forward(module) or is_conv1d(module) or not product:
        raise PlanError(
            f"a {type(module).__name__} was given as a head whose logits may wait; only a layer with the forward of "
            "nn.Linear can: leave this one as it is."
        )
    own: type[nn.Module] = type(module)
    cut = getattr(module, "tensor_vocabulary", None)
    vocabulary = cut if isinstance(cut, Vocabulary) else Vocabulary(axis, (module.out_features,))
    with patches.changing(module, PatchLayer.LAZY, "leaves its logits uncomputed until the loss reads them in chunks"):
        module.__class__ = LateLinear if own is nn.Linear else type(f"Late{own.__name__}", (LazyLMHead, own), {})
        object.__setattr__(module, "tensor_late", _Late(vocabulary, kernels))
        vars(module).pop("forward", None)


def _can_wait(x: Tensor, weight: Tensor, axis: TensorAxis) -> bool:
    if axis.dry or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    # who looks at operations by name sees the same in the probe and in a run
    if _get_current_function_mode() is not None:  # type: ignore[no-untyped-call]
        return False
    seen = x.local if type(x) is GlobalTensor else x
    plain = type(seen) in (Tensor, nn.Parameter) and seen.device.type != "meta" and weight.device == seen.device
    same = seen.dtype == weight.dtype or torch.is_autocast_enabled(seen.device.type)
    return plain and same and (seen.requires_grad or weight.requires_grad)
