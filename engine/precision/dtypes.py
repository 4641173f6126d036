"""Dtypes of a run: forward, gradient accumulation, masters, moments, messages.

fp32            parameters as passed (fp32 or fp64), gradients and moments likewise, no masters; a parameter passed in
                16 bits stays so in forward, with fp32 gradients, master and moments as below
bf16, fp16      parameters in 16 bits, gradients summed in fp32, fp32 master and moments (Kalamkar et al. 2019,
                Micikevicius et al. 2018)
bf16 alone      parameters without masters, gradients summed in bf16, moments in fp32 or bf16; updates are computed in
                fp32 and rounded stochastically (Zamirai et al. 2020)
keep_fp32       modules that stay in fp32, in addition to tensors that the model marks as fp32
torch_autocast  fp32 or bf16 as above, with every forward inside torch.autocast

Inputs and buffers keep their dtype, unless ``cast_forward_inputs`` or ``buffer_dtype`` is set.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.model.operand_casts import OperandCasts
from engine.parallel.model.placeholders import placeholder
from engine.precision.fp32_modules import KeptFp32, find_fp32_modules, marked_tensors, running_statistics

NAMED_DTYPES: Mapping[str | None, torch.dtype | None] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
)


_HALF = (torch.bfloat16, torch.float16)


class Widths(NamedTuple):
    """Dtypes of a group of parameters: of the forward, accumulated gradients, master weights and optimizer moments."""

    compute: torch.dtype
    sums: torch.dtype
    """Dtype in which gradients are accumulated."""
    master: torch.dtype | None
    """Dtype of master weights; None if there are none."""
    moments: torch.dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of a run: of parameters, gradients, master weights, optimizer moments, inputs and buffers."""

    compute: torch.dtype | None
    """Dtype of parameters in forward; None leaves them unchanged."""
    wire: torch.dtype | None
    """Dtype of gradients in reductions; None: the dtype of accumulation."""
    kept: KeptFp32 = field(default_factory=KeptFp32)
    """Modules and tensors that stay in fp32."""
    master: bool = True
    """True if 16-bit parameters have fp32 masters and fp32 gradient accumulation."""
    narrow_moments: bool = False
    """True if moments have the dtype of the parameter, in runs without masters."""
    autocast: torch.dtype | None = None
    """Dtype of torch.autocast around every forward; None leaves the user's autocast unchanged."""
    inputs: torch.dtype | None = None
    """Dtype of floating inputs of forward; None leaves all unchanged."""
    buffers: torch.dtype | None = None
    """Dtype of floating buffers in a 16-bit run; None leaves all unchanged."""
    operands: OperandCasts | None = field(default=None, compare=False)
    """Casts of operands in the model's own code; None: no casts."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of activations, without autocast: those of ``compute``, or 4."""
        return self.compute.itemsize if self.compute is not None else 4

    def forward(self, device: torch.device, whole: bool = True) -> AbstractContextManager[Any]:
        """Returns the context manager for a forward on ``device``: torch.autocast, casts of operands, or no effect, as
        configured.

        Args:
            whole: True for a forward of the full model, False for a part of it. If the first full forward needs no
                casts of operands, later forwards with the same grad mode make none.
        """
        if self.operands is not None:
            return self.operands.forward(whole)
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def parameter(self, name: str, given: torch.dtype) -> torch.dtype:
        """Returns the dtype of the trainable parameter ``name`` in forward; ``given`` is its dtype in the user's model.

        Raises:
            PlanError: this run cannot train a parameter of dtype ``given``.
        """
        if not given.is_floating_point:
            raise PlanError(
                f"parameter {name!r} is {str(given).removeprefix('torch.')}, but only parameters of a real floating "
                "dtype can be trained; freeze it (requires_grad_(False)), or store its values as floats (of a complex "
                "tensor: torch.view_as_real)."
            )
        if self.compute is not None:
            return self.frozen(name, given)
        if given not in (torch.float32, torch.float64, *_HALF):
            raise PlanError(
                f"parameter {name!r} is {str(given).removeprefix('torch.')}, a dtype that torch cannot train; pass the "
                "model as float32 (model.float())."
            )
        if given in _HALF and self.kept.modules:
            raise PlanError(
                f"parameter {name!r} is {str(given).removeprefix('torch.')}, but keep_fp32 keeps modules in fp32 only "
                "if bf16.enabled or fp16.enabled is true; set one of them to true, pass the model as float32 "
                "(model.float()), or leave keep_fp32 out."
            )
        return given

    def frozen(self, name: str, given: torch.dtype) -> torch.dtype:
        """Returns the dtype of the frozen parameter ``name`` in forward; ``given`` is its dtype in the user's model."""
        if self.compute is None or not given.is_floating_point:
            return given
        return torch.promote_types(given, torch.float32) if name in self.kept.tensors else self.compute

    def buffer(self, name: str, given: torch.dtype) -> torch.dtype:
        """Returns the dtype of the buffer ``name`` in forward; ``given`` is its dtype in the user's model."""
        if self.compute is None or not given.is_floating_point:
            return given
        return torch.promote_types(given, torch.float32) if name in self.kept.tensors else self.buffers or given

    def widths(self, dtype_name: str) -> Widths:
        """Returns the dtypes of gradients, master weights and optimizer moments for parameters of one dtype.

        Args:
            dtype_name: dtype of the parameters in forward, such as "bfloat16".
        """
        narrow: torch.dtype = getattr(torch, dtype_name)
        wide = torch.promote_types(narrow, torch.float32)
        if narrow == wide:
            return Widths(narrow, wide, None, wide)
        if self.master:
            return Widths(narrow, wide, wide, wide)
        return Widths(narrow, narrow, None, narrow if self.narrow_moments else wide)


def half_note(model: nn.Module, precision: Precision) -> str | None:
    """Returns a note for the startup log if ``model`` trains bf16 or fp16 parameters without ``bf16`` or ``fp16``
    enabled.

    Returns None otherwise.
    """
    if precision.compute is not None:
        return None
    found = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad and p.dtype in _HALF}
    if not found:
        return None
    dtype, name = next(iter(found.items()))
    short = str(dtype).removeprefix("torch.")
    lost = "; without a loss scale small gradients are lost: fp16.enabled has one" * (torch.float16 in found)
    return (
        f"precision: {name} is {short}, so it computes in {short} with an fp32 master and fp32 moments, and inputs are "
        f"passed unchanged; model.float() trains it in fp32{lost}"
    )


def make_precision(config: Config, model: nn.Module) -> Precision:
    """Returns the dtypes for a run of ``model`` with this configuration.

    Raises:
        ConfigError: a pattern of ``keep_fp32`` matches no module, or only some of the modules that share a tensor.
    """
    wire = NAMED_DTYPES[config.communication_data_type]
    compute = torch.bfloat16 if config.bf16.enabled else torch.float16
    cast = torch.bfloat16 if config.torch_autocast.enabled else None
    if not (config.bf16.enabled or config.fp16.enabled):
        return Precision(None, wire, find_fp32_modules(model, config.keep_fp32), autocast=cast)
    kept = find_fp32_modules(model, (*config.keep_fp32, *running_statistics(model)))
    marked = marked_tensors(model, compute)
    return Precision(
        compute,
        wire,
        replace(kept, tensors=kept.tensors | marked, marked=marked),
        master=not (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads),
        narrow_moments=config.bf16.enabled and config.bf16.bf16_optimizer_states,
        autocast=cast,
        inputs=compute if config.cast_forward_inputs else None,
        buffers=NAMED_DTYPES[config.buffer_dtype],
        operands=None if config.compile else OperandCasts(compute),
    )


@torch.no_grad()
def place_rest(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    absent: Collection[str] = (),
    placed: Collection[str] = (),
) -> None:
    """Moves buffers and frozen parameters to ``device``, and casts them to their forward dtype.

    Args:
        absent: names of parameters of other pipeline stages, which become placeholders without memory instead.
        placed: names of parameters in flat buckets (tensors of many parameters), which stay unchanged.
    """
    for name, parameter in model.named_parameters():
        narrow = precision.frozen(name, parameter.dtype)
        if name in absent:
            parameter.data = placeholder(parameter.shape, narrow, parameter.device)
        elif not parameter.requires_grad and name not in placed:
            parameter.data = parameter.data.to(device, narrow).contiguous()  # as parameters in buckets are
    moved: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                dtype = precision.buffer(f"{path}.{name}" if path else name, buffer.dtype)
                if (id(buffer), dtype) not in moved:  # the old one stays allocated, so that no other gets its id
                    moved[id(buffer), dtype] = buffer, buffer.to(device, dtype)
                module._buffers[name] = moved[id(buffer), dtype][1]
