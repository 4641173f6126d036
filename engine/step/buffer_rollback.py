"""Rollback of buffers that a forward writes (running statistics, counters), for steps that are skipped."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.step.parts import PartOrder, StepPart


class _Seen(NamedTuple):
    """A buffer as it was before a step."""

    module: nn.Module
    leaf: str
    buffer: Tensor
    version: int
    copy: Tensor | None

    def written(self) -> bool:
        """The buffer is now another tensor, or has other content.

        The version alone is not enough: torch's batch normalisation writes its running mean without counting it.
        """
        now = self.module._buffers.get(self.leaf)
        if now is not self.buffer or now._version != self.version:
            return True
        return self.copy is not None and not torch.equal(self.copy, now)


class WrittenBuffers(StepPart):
    """Copies of the buffers that a step may write.

    The first step in each combination of train and eval modes copies and compares all buffers; later steps copy only
    the buffers that some step has written, and those that have come since. Between steps no copy is held.

    A forward may register a buffer in any step, so a model that begins without one is watched too. The step that
    registers a buffer keeps it, since nothing was there before.
    """

    order = PartOrder.BUFFERS

    def __init__(self, model: nn.Module) -> None:
        self._named = tuple(model.named_modules())
        self._modules = tuple(module for _, module in self._named)
        self._compared: dict[tuple[bool, ...], set[tuple[int, str]]] = {}
        """The buffers that a step in these modes has copied and compared."""
        self._written: set[tuple[int, str]] = set()
        self._seen: list[_Seen] = []

    @torch.no_grad()
    def begin_step(self) -> None:
        """Copy the buffers, before the first forward of a step."""
        self._seen = []
        holders = [module for module in self._modules if module._buffers]
        compared = self._compared.get(self._mode(), set()) if holders else set()
        for module in holders:
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    wanted = (key := (id(module), leaf)) in self._written or key not in compared
                    self._seen.append(_Seen(module, leaf, buffer, buffer._version, buffer.clone() if wanted else None))

    @torch.no_grad()
    def undo_step(self) -> None:
        """Undo what the forwards of a step without update have written."""
        seen = list(self._seen)
        self.after_update()
        for each in seen:
            if each.copy is not None and (id(each.module), each.leaf) in self._written:
                each.buffer.copy_(each.copy)
                each.module._buffers[each.leaf] = each.buffer

    def after_skip(self) -> None:
        """Undo what the forwards have written."""
        self.undo_step()

    def after_update(self) -> None:
        """End the step: drop the copies, and note which buffers it has written."""
        for seen in self._seen:
            key = id(seen.module), seen.leaf
            if key not in self._written and seen.written():
                self._written.add(key)
        if self._seen:
            self._compared.setdefault(self._mode(), set()).update((id(seen.module), seen.leaf) for seen in self._seen)
        self._seen = []

    def state(self) -> dict[str, Tensor]:
        """Every buffer that steps have written on this rank, as buffer/NAME."""
        return {
            _key(path, leaf): buffer.detach()
            for path, module in self._named
            for leaf, buffer in module._buffers.items()
            if buffer is not None and (id(module), leaf) in self._written
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore buffers, whose shape or dtype forwards may have changed."""
        for path, module in self._named:
            for leaf, buffer in module._buffers.items():
                saved = state.get(_key(path, leaf))
                if buffer is not None and saved is not None:
                    if (buffer.shape, buffer.dtype) == (saved.shape, saved.dtype):
                        buffer.copy_(saved)
                    else:
                        module._buffers[leaf] = saved.to(buffer.device, copy=True)
                    self._written.add((id(module), leaf))

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


def _key(path: str, leaf: str) -> str:
    return f"buffer/{path}.{leaf}" if path else f"buffer/{leaf}"
