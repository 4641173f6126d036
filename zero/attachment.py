"""Check that the model's parameters are still the tensors that the engine trains."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from engine.errors import EngineError
from engine.parallel.model.placeholders import trainable
from engine.zero.flat_buckets import FlatBucket


@dataclass(frozen=True, slots=True)
class _Tie:
    name: str
    module: nn.Module
    leaf: str
    """Name of the parameter in ``module``."""
    parameter: nn.Parameter
    flat: FlatBucket | None
    """The bucket that it lies in; None for a parameter outside the buckets, or without elements."""
    offset: int
    """Offset in the bucket's storage."""


class Attachment:
    """Parameter objects of a model, and their places in the flat buckets, as they were when the engine was built."""

    def __init__(self, model: nn.Module, buckets: Sequence[FlatBucket]) -> None:
        self._buckets = buckets
        held = {id(parameter): flat for flat in buckets for parameter in flat.parameters if parameter.numel()}
        self._ties = [
            _Tie(
                f"{path}.{leaf}" if path else leaf,
                module,
                leaf,
                parameter,
                held.get(id(parameter)),
                int(parameter.storage_offset()) if id(parameter) in held else 0,
            )
            for path, module in model.named_modules()
            for leaf, parameter in module.named_parameters(recurse=False)
        ]
        self._trained = {id(tie.parameter) for tie in self._ties if trainable(tie.parameter)}
        self._model, self._modules = model, list(model.modules())
        self._members = self._count()

    def check(self) -> None:
        """Refuse parameters that would not be trained: added, replaced, moved or thawed since the engine was built.

        A trained parameter may be frozen and thawed again: it then has no gradient, as one that forward does not use.

        Raises:
            EngineError: such a parameter exists; the message names the first one.
        """
        if self._count() != self._members:
            self._refuse_added()
        storages = {id(flat): flat.params.untyped_storage()._cdata for flat in self._buckets}
        for tie in self._ties:
            moved = tie.flat is not None and _place(tie.parameter) != (storages[id(tie.flat)], tie.offset)
            if moved or tie.module._parameters.get(tie.leaf) is not tie.parameter:
                raise EngineError(
                    f"parameter {tie.name!r} no longer lies in the engine's memory (a new .data, in forward too, "
                    "model.to(), load_state_dict(assign=True), or a second engine on this model); write into it in "
                    "place instead."
                )
            if tie.parameter.requires_grad and id(tie.parameter) not in self._trained:
                raise EngineError(
                    f"parameter {tie.name!r} was frozen when the engine was built and requires a gradient now, but has "
                    "no place for gradient and optimizer state; name it in optimizer.include_frozen, or freeze it "
                    "after engine.initialize."
                )

    def _count(self) -> int:
        """Number of parameters and children of all modules, which grows with whatever is added to one of them."""
        return sum(len(module._parameters) + len(module._modules) for module in self._modules)

    def _refuse_added(self) -> None:
        known = {id(tie.parameter) for tie in self._ties}
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in known:
                raise EngineError(
                    f"parameter {name!r} was added to the model after engine.initialize, so the engine does not train "
                    "it; if forward makes it, run one forward before engine.initialize, else save a checkpoint, close "
                    "the engine, call engine.initialize with the larger model, and continue with "
                    "eng.load_checkpoint(folder, strict=False)."
                )
        self._modules = list(self._model.modules())
        self._members = self._count()


def _place(parameter: nn.Parameter) -> tuple[int, int]:
    """Return (storage, offset), which stay the same when the storage is freed and allocated again."""
    return parameter.untyped_storage()._cdata, int(parameter.storage_offset())
