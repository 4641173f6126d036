"""Whether the model's parameters are still those that the engine trains."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from engine.errors import EngineError
from engine.zero.storage import FlatBucket


@dataclass(frozen=True, slots=True)
class _Tie:
    name: str
    module: nn.Module
    leaf: str
    """The parameter's name in ``module``."""
    parameter: nn.Parameter
    address: int | None
    """Where the flat bucket has it; None for a frozen parameter."""


class Attachment:
    """Remembers which parameter objects, at which addresses, the engine was built on."""

    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        addresses = {
            id(parameter): flat.address(slot.start)
            for flat in buckets
            for slot, parameter in zip(flat.bucket.slots, flat.parameters, strict=True)
            if parameter.numel()
        }
        self._ties = [
            _Tie(f"{path}.{leaf}" if path else leaf, module, leaf, parameter, addresses.get(id(parameter)))
            for path, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        ]
        self._trainable = {id(parameter) for flat in buckets for parameter in flat.parameters}

    def check(self) -> None:
        """Refuse parameters that would train nothing: replaced, moved, frozen or thawed since then.

        Raises:
            EngineError: names the first such parameter.
        """
        for tie in self._ties:
            moved = tie.address is not None and tie.parameter.data_ptr() != tie.address
            if moved or tie.module._parameters.get(tie.leaf) is not tie.parameter:
                raise EngineError(
                    f"parameter {tie.name!r} no longer lies in the engine's memory (a new .data, model.to(), "
                    "load_state_dict(assign=True), or a second engine on this model); write into it in place instead."
                )
            trained = id(tie.parameter) in self._trainable
            if trained != tie.parameter.requires_grad:
                raise EngineError(
                    f"parameter {tie.name!r} was {'frozen' if trained else 'made trainable'} after engine.initialize; "
                    "do it before, or build a new engine."
                )
