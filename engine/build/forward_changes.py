"""What takes the place of forwards of the user's model before it is planned: operators of ours, and compiled blocks.

Both are there before anything looks at the model, so that a plan sees what a run does. ``remove`` undoes them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.errors import ConfigError
from engine.kernels.dispatch import REFERENCE, Kernels, gpu_name, runs_triton
from engine.parallel.comm.agreement import all_or_none, from_first
from engine.parallel.comm.comm import Comm
from engine.parallel.kernel_injection.inject import Replacement, find_heads, find_replacements
from engine.parallel.model.blocks import find_units
from engine.parallel.model.forward_patch import put_on
from engine.parallel.model.placeholders import is_expanded
from engine.parallel.tensor.deferred_linear import fuse, unfuse
from engine.parallel.tensor.layers.lazy_head import install_lazy_head
from engine.parallel.tensor.layers.linear import ColumnLayer, is_cut
from engine.parallel.tensor.layers.vocab_parallel import HeadLayer
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.planning.budgets import shards_parameters


@dataclass(frozen=True, slots=True)
class Forwards:
    """What has been done to the forwards of a model."""

    kernels: Kernels = REFERENCE
    replacements: tuple[Replacement, ...] = ()
    undo: tuple[Callable[[], None], ...] = ()
    heads: tuple[str, ...] = ()
    """Layers whose logits are to wait for the loss."""

    def remove(self) -> None:
        """Give every module its own forward again."""
        for take_off in reversed(self.undo):
            take_off()


def _check_kernels(config: Config, device: torch.device) -> None:
    if config.kernels == "triton" and not runs_triton(device):
        raise ConfigError(
            f"kernels 'triton' on {device.type}: Triton and a GPU are needed to run them; pip install triton where "
            "there is a GPU, or set kernels to 'auto', which takes them where it can."
        )


def change_forwards(model: nn.Module, config: Config, device: torch.device) -> Forwards:
    """Put operators on the modules that compute the same, and compile blocks, as the configuration says.

    Nothing is communicated; all ranks do the same.

    Raises:
        ConfigError: kernels "triton" where they cannot run; nothing to compile.
    """
    _check_kernels(config, device)
    kernels = Kernels(config.kernels)
    replaces = kernels.replaces(device)
    found = find_replacements(model, kernels) if replaces else ()
    undo = [put_on() for _, put_on in found]
    replacements = tuple(replacement for replacement, _ in found)
    # at ZeRO 3 the weights have gone when the loss is computed
    heads = tuple(find_heads(model)) if replaces and not shards_parameters(config) else ()
    late = tuple(Replacement(name, "loss", "logits in chunks of tokens, never all") for name in heads)
    undo += _compile(model) if config.compile else []
    return Forwards(kernels, (*replacements, *late), tuple(undo), heads)


def agree_on_kernels(kernels: Kernels, comm: Comm, device: torch.device) -> None:
    """Let all ranks choose by the GPU of rank 0: ranks of one step must not differ in what they run, and some of it
    decides what is sent.

    Collective where "auto" chooses on GPUs.

    Raises:
        ConfigError: rank 0 has Triton and this rank has not; on all ranks.
    """
    if kernels.mode != "auto" or device.type != "cuda":
        return
    card = from_first(lambda: (gpu_name(device) if runs_triton(device) else "").encode(), comm, device).decode()
    with all_or_none(comm, device):
        if card and not runs_triton(device):
            raise ConfigError(
                "kernels 'auto': rank 0 has Triton and this rank has not; install the same on every node, or set "
                "kernels to 'reference'."
            )
    kernels.card = card


def fuse_activations(model: nn.Module, forwards: Forwards) -> list[Callable[[], None]]:
    """One kernel for linear layers and the activation behind them, where the layer is whole or cut by columns."""
    undo: list[Callable[[], None]] = []
    for found in forwards.replacements:
        layer = model.get_submodule(found.module)
        if found.activation != "none" and (isinstance(layer, ColumnLayer) or not is_cut(layer)):
            forward = vars(layer).pop("forward")
            fuse(layer, found.activation, forwards.kernels)
            undo.append(partial(_unfuse, layer, forward))
    return undo


def _unfuse(layer: nn.Module, forward: Callable[..., Any]) -> None:
    unfuse(layer)
    object.__setattr__(layer, "forward", forward)


def delay_heads(model: nn.Module, heads: Iterable[str], axis: TensorAxis) -> list[Callable[[], None]]:
    """Let the logits of ``heads`` wait for their loss, where the head is here, and whole or cut as a head."""
    modules = [module for module in map(model.get_submodule, heads) if isinstance(module, nn.Linear)]
    here = [module for module in modules if not is_expanded(module.weight)]
    return [
        install_lazy_head(module, axis, axis.kernels)
        for module in here
        if axis.size == 1 or isinstance(module, HeadLayer)
    ]


def leave_out(model: nn.Module, names: Iterable[str]) -> list[Callable[[], None]]:
    """Let torch.compile pass over these modules: layers that communicate, which is nothing that could be compiled."""
    undo = []
    for module in map(model.get_submodule, names):
        forward = vars(module).get("forward")
        own = forward.__func__ if isinstance(forward, MethodType) else type(module).forward
        undo.append(put_on(module, torch.compiler.disable(own)))  # type: ignore[no-untyped-call]
    return undo


def _compile(model: nn.Module) -> list[Callable[[], None]]:
    """Compile every block that its owner has not compiled."""
    units = find_units(model)
    blocks = [units.modules[name] for name in units.blocks]
    if not blocks:
        raise ConfigError(
            "compile true: the model has no chain of blocks (a ModuleList or Sequential of one class) to compile; "
            "compile it in your code, or leave compile out."
        )
    own = [block for block in blocks if block._compiled_call_impl is None]
    for block in own:
        block.compile()
    return [partial(setattr, block, "_compiled_call_impl", None) for block in own]
