"""Patches of module forwards: engine operators, fused activations, lazy heads, compiled blocks.

``change_forwards`` runs before the model is traced, so that the plan sees the forwards of the run; the other functions
run after the model is placed. ``ForwardPatches.remove`` undoes all of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import Config
from engine.errors import ConfigError
from engine.kernels.device import device_name, find_accelerator, is_host
from engine.kernels.dispatch import REFERENCE, Kernels, runs_triton
from engine.kernels.ops.embedding import look_up_rows
from engine.parallel.comm.agreement import all_or_none, from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.kernel_injection.flex_calls import redirect_flex
from engine.parallel.kernel_injection.inject import LAZY_HEAD, Replacement, find_heads, find_replacements
from engine.parallel.model.blocks import find_units, has_compiled_code
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.operand_casts import is_watched
from engine.parallel.model.placeholders import is_expanded
from engine.parallel.tensor.deferred_linear import fuse, is_linear
from engine.parallel.tensor.layers.lazy_head import install_lazy_head
from engine.parallel.tensor.layers.linear import ColumnLayer, has_plain_forward, is_cut
from engine.parallel.tensor.layers.vocab_parallel import HeadLayer
from engine.parallel.tensor.tp_axis import TensorAxis


@dataclass(frozen=True, slots=True)
class ForwardChanges:
    """Kernel choices of a run, and the modules that run an engine kernel in place of their own forward."""

    kernels: Kernels = REFERENCE
    replacements: tuple[Replacement, ...] = ()


def _check_kernels(config: Config, device: torch.device) -> None:
    if config.kernels == "triton" and not runs_triton(device):
        raise ConfigError(
            f"kernels 'triton' on {device.type}: Triton kernels need a GPU and the package triton; pip install triton "
            "on a machine with a GPU, or set kernels to 'auto', which uses Triton only where it runs."
        )


def change_forwards(
    model: nn.Module, config: Config, device: torch.device, patches: ForwardPatches, planned: Kernels | None = None
) -> ForwardChanges:
    """Replaces forwards of ``model`` by the engine's kernels, and compiles its blocks if ``compile`` is on.

    Returns the kernel choices and the replaced modules, with the output layers that :func:`make_heads_lazy` replaces
    later. ``patches`` records the changes; its ``remove`` undoes them. Nothing is communicated; all ranks make the same
    changes.

    Args:
        planned: kernel choices for a GPU that is absent; None: choices for ``device``.

    Raises:
        ConfigError: ``kernels`` is "triton" on a device that cannot run Triton, or ``compile`` is on and the model has
            no list of blocks.
    """
    if planned is None:
        _check_kernels(config, device)
    redirect_flex(model, patches)
    kernels = planned or Kernels(config.kernels)
    replaces = kernels.replaces(device)
    found = find_replacements(model, kernels) if replaces else ()
    for _, put_on in found:
        put_on(patches)
    replacements = tuple(replacement for replacement, _ in found)
    heads = find_heads(model) if replaces else ()
    late = tuple(Replacement(name, LAZY_HEAD, "logits in chunks of tokens, never all") for name in heads)
    if config.compile:
        _compile(model, patches)
    return ForwardChanges(kernels, (*replacements, *late))


def own_card(kernels: Kernels) -> str:
    """Returns the name of this rank's GPU if the choice of kernels depends on it (``kernels`` is "auto" and Triton
    runs); else "".
    """
    device = torch.device(find_accelerator() or "cpu")
    return device_name(device) if kernels.mode == "auto" and not is_host(device) and runs_triton(device) else ""


def agree_on_kernels(kernels: Kernels, comm: Comm, device: torch.device) -> None:
    """Makes all ranks choose kernels by the type of rank 0's GPU. Three all-reduces over the world.

    Does nothing on CPUs, or if ``kernels`` is not "auto".

    Raises:
        ConfigError: rank 0 can run Triton and another rank cannot; all ranks raise it.
    """
    if kernels.mode != "auto" or is_host(device):
        return
    card = from_first(lambda: (device_name(device) if runs_triton(device) else "").encode(), comm, device).decode()
    with all_or_none(comm, device):
        if card and not runs_triton(device):
            raise ConfigError(
                "kernels 'auto': rank 0 can run Triton, but this rank cannot; install the same packages on every node, "
                "or set kernels to 'reference'."
            )
    kernels.card = card


def fuse_activations(model: nn.Module, changes: ForwardChanges, patches: ForwardPatches) -> None:
    """Fuses linear layers, unsharded or column-parallel, with the activations after them, as listed in ``changes``.

    If the engine sums gradients in main-gradient buffers, the backward of unsharded linear layers and embeddings then
    adds to these buffers. Layers with a custom forward are not changed for that. ``patches`` records each replaced
    forward.
    """
    for found in changes.replacements:
        layer = model.get_submodule(found.module)
        if found.activation != "none" and (isinstance(layer, ColumnLayer) or not is_cut(layer)):
            fuse(layer, found.activation, changes.kernels, patches)
    if changes.kernels.main:
        _add_weight_gradients(model, changes.kernels, patches)


def _add_weight_gradients(model: nn.Module, kernels: Kernels, patches: ForwardPatches) -> None:
    """Makes full linear layers and embeddings add their weight gradients to main gradients, as sharded layers do."""
    compiled = {id(layer) for block in model.modules() if has_compiled_code(block) for layer in block.modules()}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or not weight.requires_grad or id(layer) in compiled or "forward" in vars(layer):
            continue
        if is_linear(layer) and has_plain_forward(layer) and not is_cut(layer):
            fuse(layer, "none", kernels, patches)
        elif _is_plain_embedding(layer):
            with patches.changing(layer, PatchLayer.FUSED, "adds the gradient of its rows to the flat bucket"):
                object.__setattr__(layer, "forward", AddedRows(layer, kernels))


def _is_plain_embedding(layer: nn.Module) -> bool:
    """Returns True if the layer only looks up rows."""
    if not isinstance(layer, nn.Embedding) or type(layer).forward is not nn.Embedding.forward or is_cut(layer):
        return False
    return layer.max_norm is None and not layer.sparse and not layer.scale_grad_by_freq


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Callable in place of the forward of an embedding. In backward, the weight gradient is added directly to the
    buffer of gradients.
    """

    module: nn.Module
    kernels: Kernels

    def __call__(self, input: Tensor) -> Tensor:
        """Looks up ids [..]; returns [.., H]."""
        layer: Any = self.module
        if is_watched():  # a tracer matches calls by torch's own names
            return nn.Embedding.forward(layer, input)
        return look_up_rows(layer.weight, input, layer.padding_idx, self.kernels)


def make_heads_lazy(model: nn.Module, heads: Iterable[str], axis: TensorAxis, patches: ForwardPatches) -> None:
    """Makes the output layers ``heads`` (module names) return logits without values; the loss computes the values chunk
    by chunk.

    Removing ``patches`` undoes it. Layers of other pipeline stages are left out. ``axis``: tensor ranks, over which the
    layers may be sharded.
    """
    modules = [module for module in map(model.get_submodule, heads) if isinstance(module, nn.Linear)]
    for module in modules:
        if getattr(module, "tensor_joined", False):  # the logits of pairs are added at once
            continue
        if not is_expanded(module.weight) and (axis.size == 1 or isinstance(module, HeadLayer)):
            install_lazy_head(module, axis, axis.kernels, patches)


def leave_out_of_compilation(model: nn.Module, names: Iterable[str], patches: ForwardPatches) -> None:
    """Excludes the forwards of the modules ``names`` from torch.compile until ``patches`` are removed."""
    for module in map(model.get_submodule, names):
        forward, note = vars(module).get("forward"), "is left out of torch.compile: it communicates or reads codes"
        if forward is not None and getattr(forward, "__self__", None) is not module:  # a wrapper, of another object
            eager = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
            patches.wrap_forward(module, PatchLayer.COMPILE, eager, note)
            continue
        own = forward.__func__ if isinstance(forward, MethodType) else type(module).forward
        eager = torch.compiler.disable(own)  # type: ignore[no-untyped-call]
        patches.replace_forward(module, PatchLayer.COMPILE, eager, note)


def _compile(model: nn.Module, patches: ForwardPatches) -> None:
    """Compiles every block that the user has not compiled."""
    units = find_units(model)
    blocks = [units.modules[name] for name in units.blocks]
    if not blocks:
        raise ConfigError(
            "compile true: the model has no chain of blocks (elements of a ModuleList or Sequential) to compile; "
            "compile it in your code, or leave compile out."
        )
    for block in blocks:
        if block._compiled_call_impl is None:
            with patches.changing(block, PatchLayer.COMPILE, "is compiled by torch.compile"):
                block.compile()
