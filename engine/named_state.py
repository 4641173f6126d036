"""Gradients, weights and optimizer state of an engine between steps: by parameter name, or offloaded."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.checkpoint.format.safetensors_file import shard_bytes
from engine.engine_parts import EngineParts
from engine.errors import EngineError
from engine.parallel.comm.agreement import from_first
from engine.zero.flat_buckets import FlatBucket, squared_norms
from engine.zero.gather.full_tensors import (
    HeldPart,
    NamedShards,
    ShardedModel,
    full_parameters,
    full_tensors,
    local_tensors,
)
from engine.zero.optim.composite import CompositeOptimizer
from engine.zero.optim.flat_optimizers import FlatOptimizer
from engine.zero.optim.master_weights import sync_masters
from engine.zero.optim.rules.element_state import ElementState, opened_state, state_names
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.state.offloaded_states import chosen_kinds
from engine.zero.state.state_inventory import StateInventory, StateTensor

if TYPE_CHECKING:
    from engine.weights_out.publisher import PendingVersion


class NamedState:
    """Engine methods that access weights, gradients and optimizer state by parameter name.

    Patterns are ``fnmatch`` patterns over whole names, such as ``"layers.0.*"``, equal on all ranks.
    """

    _parts: EngineParts

    def full_state_dict(self, ema: bool = False) -> dict[str, Tensor]:
        """Returns the whole model on rank 0, with the keys and dtypes of ``model.state_dict()``, on the CPU.
        Collective.

        Other ranks get an empty dict. ``ema`` selects the moving average of trained parameters. With a schedule-free
        optimizer, returns its averaged weights; the method ``masters`` gives access to its training weights.

        fp32 masters are gathered over dp, one flat buffer at a time, then parameter by parameter over tp and pp.

        Raises:
            EngineError: inside ``full_parameters`` with sharded parameters; with ``ema``, the run has no moving
                average.
        """
        self._parts.resources.refuse_closed("full_state_dict")
        if self._parts.runtime.gatherer is not None:
            self._parts.runtime.gatherer.refuse_opened("full_state_dict")
        if ema:
            self._check_average("full_state_dict(ema=True)")
        averaged = self._parts.runtime.averaged
        taken = averaged is not None and not averaged.inside and (ema or averaged.by_itself)
        with self._parts.runtime.reading():
            return self._parts.checkpoints.gather_state(averaged.average if averaged is not None and taken else None)

    def publish_weights(self) -> "PendingVersion":
        """Publishes the present weights as a new version for receivers, such as inference engines. Collective.

        First waits until receivers have read the previous version, at most ``weights_out.deadline`` seconds, and drops
        that version. Then copies this rank's shard to host memory, in the dtype of forward; with ``weights_out.copies``
        2, another rank's shard too.

        Communicates three small all-reduces over the world (traffic label "start"), four if the model has persistent
        buffers. The first call also gathers frozen quantized weights over dp.

        Returns a handle: its ``wait()`` waits for the receivers in ``weights_out.to``, and its ``url`` is the address
        for receivers.

        Raises:
            EngineError: the configuration has no "weights_out", the model is not placed yet, or a persistent buffer has
                changed its shape.
        """
        self._parts.resources.refuse_closed("publish_weights")
        self._parts.checkpoints.placed("publish_weights")
        self._parts.comm.join("publish_weights")
        if self._parts.publisher is None:
            raise EngineError(
                'publish_weights was called without "weights_out" in the configuration; add "weights_out": {}.'
            )
        self._parts.checkpoints.control.refuse_spoiled()
        pending = self._parts.publisher.publish()
        assert pending is not None, "it has waited for the readers of the last version"
        return pending

    def load_full_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Loads the weights and persistent buffers of the whole model from ``state`` on rank 0. Collective.

        ``state`` has the keys of ``model.state_dict()`` (one key is enough for a tied weight), with tensors in any
        floating-point dtype, on any device. Other ranks may pass an empty dict. A moving average restarts, and the
        optimizer state does not change. Tensors are all-reduced over the world in chunks of at most 256 MiB, label
        "weights".

        Args:
            strict: True to raise if ``state`` lacks a tensor of the model, or has an unknown key. False: missing
                tensors retain their values, and unknown keys are ignored.

        Raises:
            CheckpointError: a key is missing or unknown, or a tensor does not fit; the same on all ranks, before a
                weight is changed.
        """
        self._parts.refuse_unfinished("load_full_state_dict")
        runtime = self._parts.runtime
        if runtime.gatherer is not None:
            runtime.gatherer.refuse_opened("load_full_state_dict")
        runtime.comm.join("load_full_state_dict")
        with runtime.changing():
            self._parts.checkpoints.load_state(state, strict)

    def gradient_norms(self) -> dict[str, float]:
        """Returns the L2 norm of the gradient of each trained parameter, by name; 0 without a gradient. Collective.

        The gradient is averaged over microbatches and data ranks, before clipping and without the loss scale. Call it
        between the last backward and ``step()``, or after a step. All ranks get the same norms. One all-reduce of eight
        bytes a parameter over the world, label "gradient norms".

        Raises:
            EngineError: no backward was called yet.
        """
        self._parts.resources.refuse_closed("gradient_norms")
        runtime, clipping = self._parts.runtime, self._parts.update.used_clipping
        factor, readable = self._gradient_factor("gradient_norms")
        names = [row.name for row in runtime.plan.table if row.trainable]
        with runtime.offloaded.held():
            squares = squared_norms(runtime.buckets, names, factor)
        runtime.comm.all_reduce(squares, "world", "gradient norms").wait()
        norms = squares.sqrt() / (clipping if readable else 1.0)
        return dict(zip(names, norms.tolist(), strict=True))

    def _gradient_factor(self, call: str) -> tuple[Callable[[FlatBucket], float], bool]:
        """Returns the factor from a bucket's contents to the averaged gradient, and True if a step has used and clipped
        it."""
        if self._parts.loop is not None and self._parts.loop.unfinished:
            before = 1.0 / self._parts.loop.reduce_gradients()
            return lambda flat: before, False
        if self._parts.update.used_factor is not None:
            return self._parts.update.used_factor, True
        raise EngineError(
            f"{call} before the first step: there is no gradient yet; call backward or train_batch first."
        )

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Opens a context in which the model has the average of its weights, for evaluation or saving. Collective.

        The average comes from ``"ema"`` or from a schedule-free optimizer. With the latter, ``eval_batch``, ``predict``
        and ``generate`` enter this context themselves. The average is rounded to the dtype of forward. Entry and exit
        each gather parameters over dp, label "parameters". Inside, a copy of this rank's weights is stored.

        Raises:
            EngineError: the run has no average; inside, a call that needs the training weights raises too.
        """
        self._parts.resources.refuse_closed("averaged_weights")
        self._check_average("averaged_weights")
        with self._parts.runtime.averaging():
            yield

    def save_pretrained(
        self, folder: str | os.PathLike[str], ema: bool = False, max_shard_size: int | str | None = None
    ) -> None:
        """Writes the model to ``folder`` in Hugging Face format, in the dtype of forward. Collective.

        Writes the average of the weights with ``ema``, or with a schedule-free optimizer. Writes only the adapters of a
        ``PeftModel``.

        Args:
            max_shard_size: maximal bytes of a file, such as "5GB"; rank 0 then writes all files. None: each rank
                that owns weights writes one file.
        """
        shards = shard_bytes(max_shard_size) if max_shard_size is not None else None
        self._parts.resources.refuse_closed("save_pretrained")
        if ema:
            self._check_average("save_pretrained(ema=True)")
        averaged = self._parts.built.averaged if self._parts.built is not None else None
        inside = averaged is not None and averaged.inside
        self._parts.runtime.comm.join("save_pretrained")
        with self._parts.runtime.averaging() if ema and not inside else self._parts.evaluated():
            self._parts.checkpoints.save_pretrained(folder, shards)

    def _check_average(self, call: str) -> None:
        if self._parts.runtime.averaged is None or ("ema" in call and self._parts.runtime.average is None):
            raise EngineError(
                f'{call} was called in a run without an average of its weights; give "ema": {{"decay": 0.999}} in the '
                "configuration."
            )

    @contextmanager
    def full_parameters(self, pattern: str = "*") -> Iterator[dict[str, nn.Parameter]]:
        """Yields this rank's parameters that match ``pattern``, by name, to read and write in place. Collective.

        ZeRO 3 gathers them over dp, label "parameters"; tensor ranks have their shards. Quantized frozen weights
        (``quantize_frozen``) are left out. When the context ends, ZeRO 3 checks that data ranks have written the same
        values, which costs 8 bytes per bucket and parameter.

        Raises:
            EngineError: inside a forward; no parameter matches; data ranks have written different values.
        """
        self._parts.resources.refuse_closed("full_parameters")
        runtime = self._parts.runtime
        sharded = ShardedModel(
            model=runtime.program.model,
            table=runtime.plan.table,
            buckets=(*runtime.buckets, *runtime.frozen),
            gatherer=runtime.gatherer,
            comm=runtime.comm,
        )
        with runtime.changing(), full_parameters(sharded, pattern) as parameters:
            yield parameters

    @contextmanager
    def gradients(self, pattern: str = "*", local: bool = False) -> Iterator[dict[str, Tensor]]:
        """Opens a context with the gradients of parameters that match ``pattern``, by name, to read and write in place.
        Collective.

        Between the last backward of a step and ``step()``, they are averaged over all microbatches and data ranks, not
        clipped, and without the loss scale; the step uses the written values. Inside an accumulation they are the
        step's sum so far, divided by ``gradient_accumulation_steps``. After a step they are clipped, and read-only.
        Tensor ranks have their shard of each.

        Args:
            pattern: names of trained parameters.
            local: yields the 1-D shard on this rank (ZeRO 1 to 3) instead of the tensor gathered over dp.

        Reduces outstanding gradients and sums the loss weights over dp; unless ``local``, all-gathers over dp, label
        "full tensors".

        Raises:
            EngineError: no backward was called yet; no parameter matches; ranks have written different values; values
                were written after the step.
        """
        self._parts.resources.refuse_closed("gradients")
        runtime = self._parts.runtime
        factor, readable = self._gradient_factor("gradients")
        pieces = _gradient_pieces(runtime.inventory, self._sharded, factor)
        with runtime.offloaded.held(), self._opened("gradients", pieces, pattern, local) as found:
            before_step = {name: tensor._version for name, tensor in found.items()}
            yield found
            if readable and any(tensor._version != before_step[name] for name, tensor in found.items()):
                raise EngineError(
                    "gradients were written after the step that used them, without effect; write them between "
                    "eng.backward and eng.step."
                )

    @contextmanager
    def masters(self, pattern: str = "*", local: bool = False) -> Iterator[dict[str, Tensor]]:
        """Opens a context with the weights that the optimizer updates, by parameter name, to read and to write in
        place. Collective.

        They are fp32 masters, or without masters the parameters themselves. Tensor ranks have their shard of each. The
        end of the context rounds written values into the parameters, on all data ranks.

        Args:
            pattern: names of trained parameters, such as ``"layers.0.*"``.
            local: yields the 1-D shard on this rank (ZeRO 1 to 3) instead of the tensor gathered over dp.

        Unless ``local``, all-gathers over dp, label "full tensors".

        Raises:
            EngineError: no parameter matches; ranks have written different values; inside ``full_parameters``.
        """
        self._parts.resources.refuse_closed("masters")
        runtime = self._parts.runtime
        if runtime.gatherer is not None:
            runtime.gatherer.refuse_opened("masters")
        with runtime.changing():
            pieces = _master_pieces(runtime.inventory)
            try:
                with self._opened("masters", pieces, pattern, local, runtime.optimizer.refresh) as found:
                    yield found
            finally:
                runtime.weights_written()

    @contextmanager
    def optimizer_state(self, pattern: str = "*", local: bool = False) -> Iterator[dict[str, dict[str, Tensor]]]:
        """Opens a context with the optimizer's state tensors by parameter name, to read and to write in place.
        Collective.

        Example: {"layers.0.weight": {"exp_avg": tensor, ...}}. Empty before the first update. The end of the context
        stores written values.

        Args:
            pattern: names of trained parameters, such as ``"layers.0.*"``.
            local: yields the 1-D shard on this rank (ZeRO 1 to 3) instead of the tensor gathered over dp.

        Unless ``local``, all-gathers over dp, label "full tensors".

        Raises:
            EngineError: no parameter matches; ranks have written different values.
        """
        self._parts.resources.refuse_closed("optimizer_state")
        runtime = self._parts.runtime
        own = state_names(runtime.optimizer)
        names = json.loads(from_first(lambda: json.dumps(own).encode(), runtime.comm, runtime.program.device))
        with runtime.changing(), opened_state(runtime.optimizer) as state, ExitStack() as stack:
            found: dict[str, dict[str, Tensor]] = {}
            groups = {row.name: row.group for row in runtime.plan.table}
            for name in names:
                pieces = _state_pieces(runtime.inventory, runtime.optimizer, state, name)
                opened = self._opened("optimizer_state", pieces, pattern, local)
                for parameter, tensor in stack.enter_context(opened).items():
                    if _keeps(runtime.optimizer, name, groups[parameter]):
                        found.setdefault(parameter, {})[name] = tensor
            yield found

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        unfinished: bool = False,
    ) -> None:
        """Moves weights, gradients and optimizer state from the device to host memory, until ``reload_states``.

        Until then an engine method that needs the state raises. Nothing is communicated.

        Args:
            include: DeepSpeed's names: "optim_states" (moments), "hp_params" (fp32 masters), "lp_params" (parameters,
                or this rank's shards of them, also frozen ones), "lp_grads" (gradients, and rounding errors of
                quantized gradients and pipeline messages); None: all.
            device: "cpu", the only supported device.
            pin_memory: page-lock the copies, for faster transfers.
            non_blocking: True: copies may still run when this returns.
            unfinished: allow the call inside an accumulation, and between a forward and its backward. Call
                ``reload_states`` before the next backward.

        Raises:
            EngineError: another device, an unknown name, too little memory; inside an accumulation, unless
                ``unfinished``; inside a `with` block of ``gradients``, ``masters``, ``optimizer_state`` or
                ``full_parameters``.
        """
        if unfinished:
            self._parts.resources.refuse_closed("offload_states")
        else:
            self._parts.refuse_unfinished("offload_states")
        kinds, place = chosen_kinds(include), str(getattr(device, "value", device))
        if place != "cpu":
            raise EngineError(f'offload_states got device {place!r}, but moves state to host memory only; give "cpu".')
        if (runtime := self._parts.built) is not None:
            runtime.offloaded.refuse_held()
            with runtime.changing():
                if unfinished:
                    runtime.reducer.land()
                else:
                    runtime.offloaded.expire(kinds)
            runtime.offloaded.offload(kinds, pin_memory, not non_blocking)
            self._parts.resources.refuse_by(runtime.offloaded.refuse)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Moves all state that ``offload_states`` has moved to host memory back to the device. Nothing is communicated.

        ``non_blocking``: copies may still run when this returns; the device waits for them.
        """
        self._parts.resources.refuse_closed("reload_states")
        if self._parts.built is not None:
            self._parts.built.offloaded.reload(blocking=not non_blocking)
            self._parts.resources.refuse_no_more_by(self._parts.built.offloaded.refuse)

    @property
    def _sharded(self) -> bool:
        return self._parts.runtime.plan.config.zero_optimization.stage > 0

    def _opened(
        self,
        call: str,
        pieces: Sequence[HeldPart],
        pattern: str,
        local: bool,
        refresh: Callable[[Sequence[FlatBucket]], None] | None = None,
    ) -> AbstractContextManager[dict[str, Tensor]]:
        runtime = self._parts.runtime
        shards = NamedShards(
            call=call,
            table=runtime.plan.table,
            comm=runtime.comm,
            device=runtime.program.device,
            buckets=runtime.buckets,
            pieces=pieces,
            sharded=self._sharded,
            refresh=refresh,
        )
        return (local_tensors if local else full_tensors)(shards, pattern)


def _pieces(states: Iterable[StateTensor]) -> list[HeldPart]:
    """Returns the elements of buckets on this rank."""
    return [HeldPart(held.flat, held.part, held.tensor.view(-1)) for held in states if held.flat is not None]


def _gradient_pieces(inventory: StateInventory, sharded: bool, factor: Callable[[FlatBucket], float]) -> list[HeldPart]:
    """Returns the reduced gradients; ``factor`` scales a bucket's contents to the returned values."""
    held = ((held, held.flat) for held in inventory.gradients() if held.kind == "gradient" and held.flat is not None)
    parts = (held.within(flat.shard if sharded else slice(0, flat.bucket.elements)) for held, flat in held)
    return [replace(piece, factor=factor(piece.flat)) for piece in _pieces(parts)]


def _master_pieces(inventory: StateInventory) -> list[HeldPart]:
    """Returns the weights that the optimizer updates: fp32 masters, or the parameters themselves without masters."""
    with torch.no_grad():
        for flat in inventory.trained:
            sync_masters(flat)
    return _pieces(inventory.updated())


def _state_pieces(
    inventory: StateInventory, optimizer: ShardedOptimizer, state: ElementState, name: str
) -> list[HeldPart]:
    """Returns the state ``name`` of every element, such as the moment "exp_avg"."""
    pieces = _pieces(held for held in inventory.element_state(state) if held.kind == name)
    inner = optimizer.inner
    if isinstance(inner, CompositeOptimizer) or not isinstance(inner, FlatOptimizer):
        for place in optimizer.places:  # a rank without this state takes part in its gathers
            weights = place.parameter
            dtype = inner.moment_dtype(weights) if isinstance(inner, CompositeOptimizer) else weights.dtype
            none = torch.empty(0, dtype=dtype, device=weights.device)
            pieces.append(HeldPart(place.flat, slice(place.part.start, place.part.start), none))
    return pieces


def _keeps(optimizer: ShardedOptimizer, name: str, group: int) -> bool:
    """Returns True if parameters of a group have this state; each of several optimizers has its own."""
    inner = optimizer.inner
    return not isinstance(inner, CompositeOptimizer) or inner.keeps(name, group)
