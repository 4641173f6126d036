"""Which dtype what is kept in: computation, accumulation, master, wire.

fp32    parameters as given (fp32 or fp64), gradients and moments likewise, no second copy
bf16    parameters bf16, gradients summed in fp32, fp32 master and moments (Kalamkar et al. 2019)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

import torch
from torch import Tensor, nn

from engine.config import Config
from engine.errors import PlanError

_WIRE: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)

# Rounding rotary frequencies to bf16 moves positions; running statistics are sums of many small steps.
_ALWAYS_WIDE = ("*inv_freq", "*running_mean", "*running_var")


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of one run."""

    compute: torch.dtype | None
    """Dtype of parameters and floating inputs in forward; None leaves both as given."""
    wire: torch.dtype | None
    """Dtype of gradients while they are reduced; None is the dtype of accumulation."""

    def parameter(self, name: str, given: torch.dtype) -> torch.dtype:
        """Dtype in which the parameter ``name`` takes part in forward.

        Raises:
            PlanError: a dtype that this run cannot train.
        """
        if not given.is_floating_point:
            raise PlanError(
                f"parameter {name!r} is {str(given).removeprefix('torch.')}; only real floating parameters can be "
                "trained: freeze it (requires_grad_(False)) or store its real parts."
            )
        if self.compute is not None:
            return self.compute
        if given not in (torch.float32, torch.float64):
            raise PlanError(
                f"parameter {name!r} is {str(given).removeprefix('torch.')} and the run is fp32: set bf16.enabled, "
                "or give the model as float32 (model.float())."
            )
        return given

    def frozen(self, given: torch.dtype) -> torch.dtype:
        """Dtype of a parameter that is not trained; what is not floating stays."""
        return self.compute if self.compute is not None and given.is_floating_point else given

    def buffer(self, name: str, given: torch.dtype) -> torch.dtype:
        """Dtype of a buffer: floating ones follow the parameters, as ``Module.to(dtype)`` does it."""
        wide = any(fnmatchcase(name, pattern) for pattern in _ALWAYS_WIDE)
        return given if self.compute is None or wide or not given.is_floating_point else self.compute

    def input(self, value: Tensor) -> Tensor:
        """A model input in the dtype of the computation; integers stay."""
        return value.to(self.compute) if self.compute is not None and value.is_floating_point() else value


def make_precision(config: Config) -> Precision:
    """Read the dtypes out of a configuration."""
    wire = config.communication_data_type
    return Precision(torch.bfloat16 if config.bf16.enabled else None, _WIRE[wire] if wire else None)


@torch.no_grad()
def place_rest(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    absent: Collection[str] = (),
    placed: Collection[str] = (),
) -> None:
    """Move what the flat buckets do not hold, frozen parameters and buffers, to its device and dtype.

    ``absent`` parameters belong to other stages: of them only shape and dtype stay. ``placed`` ones are in buckets.
    """
    for name, parameter in model.named_parameters():
        narrow = precision.frozen(parameter.dtype)
        if name in absent:
            parameter.data = torch.zeros((), dtype=narrow, device=parameter.device).expand(parameter.shape)
        elif not parameter.requires_grad and name not in placed:
            parameter.data = parameter.data.to(device, narrow)
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            dtype = precision.buffer(f"{path}.{name}", buffer.dtype)
            setattr(module, name, buffer.to(device, dtype))
