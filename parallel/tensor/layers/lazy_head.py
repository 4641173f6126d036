"""Language-model head with lazy logits: cross-entropy computes them in chunks of tokens and never stores all of them.

    logits = head(x)                      nothing is computed: x, weight and bias are saved
    logits.float().view(-1, V) ...        still nothing; shapes change as the code asks (``logits.lazy_logits``)
    cross_entropy(logits, labels)         in chunks (``kernels.ops.linear_cross_entropy``)
    logits.argmax(-1), anything else      computes the logits once, then behaves as for any tensor

The model and the loss function stay unchanged. A head that is sharded over "tp" sends the same bytes under the same
labels as without lazy logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import PlanError
from engine.kernels.dispatch import Kernels
from engine.kernels.ops.linear_cross_entropy import as_autocast
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.operand_casts import is_watched
from engine.parallel.model.placeholders import is_plain
from engine.parallel.tensor.deferred_linear import FusedForward, is_conv1d, only_argument
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.layers.linear import has_plain_forward
from engine.parallel.tensor.layers.position_layer import run_on_positions
from engine.parallel.tensor.layers.vocab_parallel import HeadLayer
from engine.parallel.tensor.logits.lazy_logits import product_of
from engine.parallel.tensor.logits.logit_shard import LateProduct, LogitShard, Vocabulary
from engine.parallel.tensor.logits.sharded_logits import ShardedLogits
from engine.parallel.tensor.overlap.async_input_grad import enter_region
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class _Late:
    """Vocabulary and kernels of a lazy head."""

    vocabulary: Vocabulary
    kernels: Kernels


class LazyLMHead(nn.Module):
    """Language-model head with lazy logits [.., V] for x [.., D]: the loss computes them in chunks of tokens.

    Without gradients, it computes the logits at once.
    """

    tensor_late: _Late

    def forward(self, *given: Tensor, **named: Tensor) -> Tensor:
        """Returns lazy logits, a tensor that stores the only argument, x [.., D], until the loss computes the logits
        from it.

        Without gradients, returns computed logits. Backward of a sharded head sums the gradient of x over "tp".
        """
        logits: Tensor = run_on_positions(self._late, only_argument(given, named))
        return logits

    def _late(self, x_D: Tensor) -> Tensor:
        late, own = self.tensor_late, self._parameters
        weight, bias = own.get("weight"), own.get("bias")
        planned = "multiply" in vars(self)  # a pipeline with a split backward has replaced the product
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
        """Returns the logits of ``x_D``, computed at once by the original forward of the head."""
        own: Any = super()
        logits: Tensor = own.multiply(x_D) if isinstance(self, HeadLayer) else own.forward(x_D)
        return logits


class LateLinear(LazyLMHead, nn.Linear):
    """Lazy head made from a replicated ``nn.Linear``: the loss computes its logits, in chunks of tokens."""


def install_lazy_head(module: nn.Linear, axis: TensorAxis, kernels: Kernels, patches: ForwardPatches) -> None:
    """Patches the head ``module`` so that the loss computes its logits; communicates nothing.

    ``module``: a linear layer to the vocabulary. ``axis``: size 1 for a replicated layer, otherwise the axis over which
    ``apply_plan`` has sharded the layer. ``kernels``: implementation of the logits and loss of a chunk of tokens.

    Constraints:
        - The weights must stay in memory, unchanged, until the start of the loss's backward.
        - The head must be on the pipeline stage of the loss.
        - Lazy logits must be read before the weights are updated; a first read after that raises.
        - Backward hooks on the module miss the gradient of the weight; hooks on parameters get it.
        - Outside training (no gradients, a dry run of the axis, the meta device, a function mode, compilation) the head
          returns computed logits.

    Raises:
        PlanError: the module is a ``Conv1D``, it computes more than ``nn.Linear``, such as an activation, or its
            forward has been replaced.
    """
    fused = vars(module).get("forward")
    product = fused is None or (isinstance(fused, FusedForward) and fused.activation == "none")
    if not has_plain_forward(module) or is_conv1d(module) or not product:
        raise PlanError(
            f"a {type(module).__name__} was given as a head with lazy logits, which require the forward of "
            "nn.Linear; do not install lazy logits on this head."
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
    # a tracer that matches operations by name must see the same in the trace and in the run
    if is_watched():
        return False
    seen = x.local if type(x) is GlobalTensor else x
    plain = is_plain(seen) and seen.device.type != "meta" and weight.device == seen.device
    same = seen.dtype == weight.dtype or torch.is_autocast_enabled(seen.device.type)
    return plain and same and (seen.requires_grad or weight.requires_grad)
