"""Training state moved to host memory between two phases of a run, and back without a change of any bit.

    train    | offload_states |  another model generates  | reload_states |  train
    device     all state         what was not offloaded                     all state
    host                         copies of the storages

Only storages are emptied and filled again. Their tensors remain the same objects, so that no reference to them changes:
optimizer, views of the model's parameters, digests, checkpoints. While parameters are on the host, reading them raises.
State that the configuration keeps on the host or on disk does not move.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.kernels.device import finish, host_bytes, is_host
from engine.parallel.trace.absent_parameter import AbsentParameter, conceal, reveal
from engine.zero.state.state_inventory import Home, StateInventory, StateTensor

MOMENTS, MASTERS, PARAMETERS, GRADIENTS = "optim_states", "hp_params", "lp_params", "lp_grads"
KINDS = (MOMENTS, MASTERS, PARAMETERS, GRADIENTS)
"""Kinds of offloadable state, named as in DeepSpeed."""
_SAME = MappingProxyType({"contiguous_grad_buffer": GRADIENTS})

_FORWARD = frozenset({PARAMETERS})
_WEIGHTS = frozenset({PARAMETERS, MASTERS})
_NEEDS: Mapping[str, frozenset[str]] = MappingProxyType({
    "eval_batch": _FORWARD, "predict": _FORWARD, "generate": _FORWARD, "generate_requests": _FORWARD,
    "eng(batch)": _FORWARD, "full_parameters": _FORWARD, "gradients": frozenset({GRADIENTS}), "masters": _WEIGHTS,
    "optimizer_state": frozenset({MOMENTS}), "full_state_dict": _WEIGHTS, "save_pretrained": _WEIGHTS,
    "timeline": frozenset(), "register_for_checkpointing": frozenset(), "offload_states": frozenset(),
    "reload_states": frozenset(),
})  # fmt: skip
"""State that the calls of an engine read or write; unlisted calls: everything."""


@dataclass(frozen=True, slots=True)
class _Away:
    """Storage that is empty, and the copy of its content."""

    whole: Tensor
    """A view of all of it."""
    copy: Tensor


class OffloadedStates:
    """Training state of one engine on this rank, moved to the host by ``offload_states``. Communicates nothing."""

    def __init__(self, inventory: StateInventory, device: torch.device) -> None:
        self._inventory, self._device = inventory, device
        self._moved: dict[str, list[_Away]] = {}
        self._concealed: list[nn.Parameter] = []
        self._blocks = 0
        """Number of open `with` blocks of the user's that refer to the state."""

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of state that are in host memory now, named as in DeepSpeed, such as "optim_states"."""
        return frozenset(self._moved)

    @property
    def bytes(self) -> int:
        """Size in bytes of all copies in host memory."""
        return sum(each.copy.nbytes for kind in self._moved.values() for each in kind)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Marks the state as in use inside the context. An offload is forbidden then: :meth:`refuse_held` raises."""
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1

    def refuse_held(self) -> None:
        """Raises if a context of :meth:`held` is open, because ``offload_states`` must not move state in use.

        Raises:
            EngineError: a context is open.
        """
        if self._blocks:
            raise EngineError(
                "offload_states inside a `with` block of eng.masters, eng.gradients, eng.optimizer_state or "
                "eng.full_parameters, which refers to the state; leave the block first."
            )

    def expire(self, kinds: Collection[str]) -> None:
        """Marks the parameters as changed in place, if ``kinds`` contains "lp_params" (parameters). Autograd then
        raises RuntimeError in a backward of an earlier forward. Call it before :meth:`offload`.
        """
        if PARAMETERS in kinds and PARAMETERS not in self._moved:
            held = [each for each in self._inventory.model.parameters() if not isinstance(each, AbsentParameter)]
            torch.autograd.graph.increment_version(held)

    def offload(self, kinds: Collection[str], pinned: bool, blocking: bool) -> None:
        """Copies the state of ``kinds``, such as "optim_states", to host memory, and frees its device memory. A failed
        allocation moves nothing.

        Args:
            pinned: True for page-locked host memory.
            blocking: True to return when all copies have ended; False: copies may still run.

        Raises:
            EngineError: the host memory cannot be allocated.
        """
        moved = {kind: self._wholes(kind) for kind in KINDS if kind in kinds and kind not in self._moved}
        pinned = pinned and not is_host(self._device)
        try:
            copies = {
                kind: [host_bytes(whole.nbytes, pinned).view(whole.dtype) for whole in found]
                for kind, found in moved.items()
            }
        except RuntimeError as error:
            size = sum(whole.nbytes for found in moved.values() for whole in found)
            raise EngineError(
                f"offload_states: the host cannot allocate {size} bytes of {'page-locked ' * pinned}memory "
                f"({str(error).splitlines()[0]}); {'pass pin_memory=False' if pinned else 'include fewer kinds'}."
            ) from error
        if PARAMETERS in moved:
            if self._inventory.gatherer is not None:
                self._inventory.gatherer.end()  # a forward without a backward has left buckets for it
            self._conceal(moved[PARAMETERS])
        for kind, found in moved.items():
            for whole, copy in zip(found, copies[kind], strict=True):
                copy.copy_(whole, non_blocking=True)
                whole.untyped_storage().resize_(0)
            self._moved[kind] = [_Away(*pair) for pair in zip(found, copies[kind], strict=True)]
        if blocking:
            finish(self._device)

    def reload(self, kinds: Collection[str] = KINDS, blocking: bool = True) -> None:
        """Copies the state of ``kinds`` (default: all), such as "optim_states", back to the device. Skips kinds that
        are not in host memory. ``blocking``: True to wait for the copies.
        """
        for kind in [kind for kind in KINDS if kind in kinds and kind in self._moved]:
            for each in self._moved[kind]:
                each.whole.untyped_storage().resize_(each.copy.nbytes)
                each.whole.copy_(each.copy, non_blocking=True)
            del self._moved[kind]
        if PARAMETERS not in self._moved:
            for parameter in self._concealed:
                reveal(parameter)
            self._concealed.clear()
        if blocking:
            finish(self._device)

    def refuse(self, call: str) -> None:
        """Raises if the public method ``call`` needs state that is in host memory.

        Raises:
            EngineError: the state is offloaded; the message names it.
        """
        needs = _NEEDS.get(call, frozenset(KINDS))
        if call == "eng(batch)" and torch.is_grad_enabled():
            needs = needs | {GRADIENTS}
        missing = [kind for kind in KINDS if kind in needs and kind in self._moved]
        if missing:
            raise EngineError(
                f"{call} while {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} in host memory "
                "(offload_states); call eng.reload_states() first."
            )

    def _wholes(self, kind: str) -> list[Tensor]:
        """Returns views of the storages of a kind, each once.

        Storages of a fixed size (of NumPy, of a mapped file) remain, and storages under entries of a state dict.
        """
        taken = {_place(each.whole) for away in self._moved.values() for each in away}
        taken |= {_place(flat.params) for flat in self._inventory.buckets if flat.apart}
        found: dict[int, Tensor] = {}
        for held in self._of(kind):
            tensor = held.tensor
            storage = _storage(tensor)
            here = tensor.device == self._device and storage.nbytes() > 0 and storage.resizable()
            if here and _place(tensor) not in taken:
                found.setdefault(_place(tensor), _whole(tensor))
        return list(found.values())

    def _of(self, kind: str) -> Iterator[StateTensor]:
        """Yields the tensors of a kind that are on the device between two steps; several may share one storage."""
        inventory = self._inventory
        if kind == MOMENTS:
            found = inventory.moments()
        elif kind == MASTERS:
            found = inventory.masters()
        elif kind == GRADIENTS:
            found = inventory.gradients()
        else:
            found = chain(inventory.weights(), inventory.secondary())
        return (held for held in found if held.home is Home.DEVICE)

    def _conceal(self, wholes: Sequence[Tensor]) -> None:
        """Guards the parameters in these storages against reads."""
        away = {_place(whole) for whole in wholes}
        for name, parameter in self._inventory.model.named_parameters():
            if not isinstance(parameter, AbsentParameter) and _place(parameter) in away:
                conceal(parameter, partial(_refuse_read, name), "in host memory (offload_states)")
                self._concealed.append(parameter)


def chosen_kinds(include: Iterable[object] | None) -> frozenset[str]:
    """Returns the kinds of state in ``include``, by names such as "optim_states"; None: all kinds. Items are strings,
    or members of DeepSpeed's enum ``OffloadStateTypeEnum``.

    Raises:
        EngineError: a name is not one of DeepSpeed's.
    """
    if include is None:
        return frozenset(KINDS)
    names = [str(getattr(each, "value", each)) for each in ([include] if isinstance(include, str) else include)]
    for name in names:
        if name not in KINDS and name not in _SAME:
            known = ", ".join((*KINDS, *_SAME))
            raise EngineError(
                f"offload_states was given {name!r}, but the kinds of state are {known}; pass some of these."
            )
    return frozenset(_SAME.get(name, name) for name in names)


def _refuse_read(name: str) -> None:
    raise EngineError(
        f"parameter {name!r} is in host memory (offload_states), so its values cannot be read here; call "
        "eng.reload_states() first."
    )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def _place(tensor: Tensor) -> int:
    """Returns the number of a tensor's storage, which does not change when the storage is resized."""
    return int(_storage(tensor)._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """Returns all elements of a tensor's storage, in its dtype, as a view with writes that autograd does not count."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data.as_strided((_storage(tensor).nbytes() // tensor.element_size(),), (1,), 0)
