"""Validation of the arguments of ``initialize`` before any communication."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.build.held_module import refuse_parts
from engine.build.request import Request
from engine.config import Config
from engine.config.sections import Bf16Config, check_installed
from engine.errors import ConfigError, PlanError
from engine.parallel.activation_checkpointing.blocks import find_operators, offloaded_blocks, recomputed_blocks
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.quantized_layers import refuse_quantized
from engine.planning.analysis import needs_example
from engine.planning.plan import check_settings
from engine.precision.frozen_weights import find_quantized, refuse_foreign_codes
from engine.program.batch import Batch, named_tensors
from engine.zero.reduce.reducer import check_own_hooks


def prepare(model: nn.Module, config: Config, request: Request) -> None:
    """Checks the arguments of ``initialize`` as far as possible without a batch and without communication.

    Also sets ``use_cache`` to False in Hugging Face configurations until ``request.patches`` are removed.

    Raises:
        ConfigError: settings of the configuration or arguments exclude each other or do not fit the model.
        PlanError: the model or ``example_batch`` cannot be used.
    """
    _check_master(config.bf16, request)
    find_operators(config.activation_checkpointing)
    recomputed_blocks(model, config.activation_checkpointing)
    offloaded_blocks(model, config.activation_checkpointing)
    check_installed(config.monitor)
    if request.optimizer is not None and config.optimizer is not None and config.optimizer.before:
        raise ConfigError(
            "optimizer is a list in the configuration, with entries that assign parameters, and optimizer=... was "
            "passed; remove one of them."
        )
    device = config.zero_optimization.offload_optimizer.device
    if request.whole is not None and device != "none":
        raise ConfigError(
            f'zero_optimization.offload_optimizer.device is "{device}", but the passed optimizer updates whole '
            "parameters, and the state of such an optimizer cannot be offloaded; leave offload_optimizer out, or "
            "leave the argument optimizer out and name AdamW in the section optimizer."
        )
    _refuse_forms(model)
    _refuse_shared_memory(model)
    refuse_quantized(model)
    refuse_foreign_codes(model, config)
    find_quantized(model, config)
    for name, parameter in model.named_parameters():
        check_own_hooks(name, parameter, 0)
    _check_example(request.example_batch)
    if needs_example(config) and request.example_batch is None:
        check_settings(model, config)  # the plan, which would find the mistake, waits for the first batch
    _switch_cache_off(model, request.patches)


def take_model(model: nn.Module, patches: ForwardPatches) -> nn.Module:
    """Marks ``model`` as in use by an engine until ``patches`` are removed, and returns it.

    Raises:
        PlanError: another engine trains the model or one of its modules, or has left only parts of its parameters; or a
            parameter has no shape yet.
    """
    _refuse_lazy(model)
    for name, module in model.named_modules():
        if vars(module).get(_TAKEN) is not None:
            what = f"module {name!r} of the model" if name else "the model"
            raise PlanError(
                f"another engine trains {what} already, and a model belongs to one engine; call close() of that one "
                "(DeepSpeed's destroy()) before, or build a new model (also in a notebook cell that runs twice)."
            )
    refuse_parts(model)
    object.__setattr__(model, _TAKEN, _Owned())
    undo = partial(object.__delattr__, model, _TAKEN)
    patches.own(model, PatchLayer.PARAMETERS, undo, "belongs to one engine")
    return model


class _Owned:
    """Mark of a model that an engine has; deep copies of the model are free."""

    def __deepcopy__(self, memo: object) -> None:
        return None


_TAKEN = "_trine_engine"
"""Attribute of a model that an engine has."""


def _check_master(bf16: Bf16Config, request: Request) -> None:
    if bf16.enabled and bf16.bf16_master_weights_and_grads and request.optimizer is not None:
        raise ConfigError(
            "bf16.bf16_master_weights_and_grads true with an optimizer passed in code, which rounds every update to "
            "nearest and loses small updates; name AdamW, Adam, SGD or Lion in the config, or leave "
            "bf16_master_weights_and_grads out."
        )


def _check_example(example: Batch) -> None:
    if example is not None and not any(tensor.ndim for _, tensor in named_tensors(example)):
        raise PlanError(
            f"example_batch is a {type(example).__name__} without tensors; give one microbatch (of tensors, or of "
            "meta tensors that have its shapes), or leave example_batch out."
        )


def _refuse_lazy(model: nn.Module) -> None:
    """Refuses parameters and buffers that receive their shapes in a first forward (``LazyLinear``)."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise PlanError(
                f"{name!r} has no shape before a first forward (a lazy layer); run one forward of the model on a "
                "microbatch before engine.initialize."
            )


def _refuse_forms(model: nn.Module) -> None:
    """Refuses tensors whose memory does not hold the value of each element: sparse, nested, or lazy views."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided or tensor.is_nested:
            form = "a nested tensor" if tensor.is_nested else f"a tensor of the layout {tensor.layout}"
            raise PlanError(
                f"{name!r} is {form}, but parameters and buffers must be dense; "
                "register its dense parts, such as indices and values, and make the tensor from them in forward."
            )
        if tensor.is_conj() or tensor.is_neg():
            made, remedy = ("conjugate", "resolve_conj") if tensor.is_conj() else ("negative", "resolve_neg")
            raise PlanError(
                f"{name!r} is a lazy {made} of another tensor, whose values torch computes at each use; register "
                f"{name}.{remedy}() in its place."
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuses two parameters, or a trained parameter and a buffer, over the same memory, because flat buckets would
    silently separate them.
    """
    owners: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if not _has_memory(parameter):
            continue
        other = owners.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise PlanError(
                f"parameters {other!r} and {name!r} are two objects over the same memory; tie them by assigning one "
                "nn.Parameter to both modules."
            )
    for name, buffer in model.named_buffers():
        tied = owners.get(buffer.data_ptr()) if _has_memory(buffer) else None
        if tied is not None and model.get_parameter(tied).requires_grad:
            raise PlanError(
                f"buffer {name!r} is a view of the parameter {tied!r}, which moves to other memory, so the buffer "
                "would keep its first values; read the parameter in forward instead, or clone the buffer."
            )


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0


def _switch_cache_off(model: nn.Module, patches: ForwardPatches) -> None:
    """Sets ``use_cache`` to False in each Hugging Face config; the forwards would build a key-value cache otherwise."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            undo = partial(setattr, config, "use_cache", True)
            patches.own(module, PatchLayer.PARAMETERS, undo, "runs with config.use_cache False")
