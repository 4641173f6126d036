"""Sharded optimizer step: updates the weights that this rank owns and gathers the parameters over axis dp.

    bucket 0   | update | gather ------>
    bucket 1            | update | gather ------>        the built-in optimizers; others update everything first
    bucket 2                     | update | gather ------> | wait

Where the kernels of Adam update a master, they also write its narrow weights, into the shard of the buffer that is
gathered: there is no pass that casts or copies.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.kernels.dispatch import REFERENCE, Kernels
from engine.kernels.ops.adamw import DeviceDecision, fits_adamw_kernel
from engine.kernels.ops.norm import squared_norm
from engine.parallel.comm.comm import Comm, Pending
from engine.zero.flat_buckets import FlatBucket, norm_parts
from engine.zero.gather.encoded_gather import gather_masters
from engine.zero.offload.block_file import MomentBuffers
from engine.zero.offload.delayed_update import DelayedUpdate
from engine.zero.offload.disk_moments import DiskAgreement, DiskMoments
from engine.zero.offload.host_copies import HostCopies
from engine.zero.offload.scratch_folder import ScratchFolder
from engine.zero.optim.bf16_updates import RoundedUpdates
from engine.zero.optim.flat_optimizers import Bookkeeping, FlatAdam, FlatOptimizer, FusedAdam, UpdateOrder
from engine.zero.optim.inner_optimizer import (
    GroupOptions,
    OptimizerFactory,
    built_in,
    check_elementwise,
    make_inner,
    own_options,
    refuse_own_step,
)
from engine.zero.optim.master_weights import sync_masters, sync_rounded, tell_autograd
from engine.zero.optim.optimizer_tensors import (
    LateBuckets,
    OptimizerTensor,
    WholeState,
    WholeUpdates,
    group_segments,
    parameter_parts,
    update_gradient,
    update_pieces,
    whole_parameters,
)

logger = logging.getLogger("trine")


class ShardedOptimizer:
    """Optimizer of a rank. A step updates this rank's weights in every flat bucket. At ZeRO 1 and 2, it then
    all-gathers the updated parameters over dp.

    Args:
        buckets: the flat buckets of this rank.
        groups: option overrides by group index.
        factory: builds the inner optimizer from torch parameter groups.
        comm: sends one all-gather over dp for each bucket and step, label "parameters".
        sharded: True if each data rank updates only its shard (ZeRO 1 and more); at ZeRO 0 every rank updates
            everything.
        own: True if the inner optimizer is the user's. It then gets one tensor per parameter: a flat shard, or at ZeRO
            0 the whole parameter in its shape.

    Raises:
        ConfigError: ``sharded`` is True and the optimizer is not elementwise.
    """

    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        groups: Sequence[GroupOptions],
        factory: OptimizerFactory,
        comm: Comm,
        sharded: bool,
        own: bool = False,
    ) -> None:
        self._buckets, self._comm, self._sharded = buckets, comm, sharded
        self.places: list[OptimizerTensor] = []
        """Optimizer tensors in the order of the buckets."""
        members = self._place(len(groups), own)
        self._norm_parts = norm_parts(buckets)
        self._read = [update_gradient(flat, flat.owned) for flat in buckets]
        """The gradients [owned] of each bucket that its update reads."""
        self._bucket_tensors = [tuple(p.parameter for p in self.places if p.flat is flat) for flat in buckets]
        """The optimizer tensors of each bucket."""
        self._rounding: RoundedUpdates | None = None
        self._kernels = REFERENCE
        self.decides_on_device = False
        """``launch`` can be called: Adam or AdamW, a kernel fits some bucket, and the host updates none.

        The same on all ranks of axis dp, because their shards have equal sizes.
        """
        self.copies = HostCopies(buckets)
        """Copies to and from the buckets that the host updates."""
        self.disk: DiskMoments | None = None
        """Moments on disk, if there are any."""
        self.whole: list[WholeUpdates] = []
        """Updates of parameters as a whole."""
        self.delayed: DelayedUpdate | None = None
        """The update that overlaps with the next step, if updates are delayed."""
        self._make = partial(make_inner, factory, groups, members)
        self.inner = self._make()
        self.configured = tuple(own_options(group) for group in self.inner.param_groups)
        """Options of each group as the inner optimizer was built with."""
        self._stepping = False
        self.unused = frozenset[str]()
        """Parameters that had no gradient on any rank in the last step that was looked at: an update leaves them."""
        self.missed: dict[str, int] = {}
        """Number of updates that left a parameter as it was; the same on all ranks."""
        self.inner.register_step_pre_hook(self._refuse_own_step)
        self._begins_with_state = bool(self.inner.state)
        if sharded:
            check_elementwise(self.inner, "zero_optimization.stage 1 or more")

    def _place(self, groups: int, own: bool) -> dict[int, list[nn.Parameter]]:
        """Creates the tensors that the inner optimizer updates; returns them by group."""
        collect = group_segments if not own else parameter_parts if self._sharded else whole_parameters
        members: dict[int, list[nn.Parameter]] = {index: [] for index in range(groups)}
        for flat in self._buckets:
            for group, part, shape in collect(flat):
                weights = flat.weights[part.start - flat.owned.start : part.stop - flat.owned.start].view(shape)
                parameter = nn.Parameter(weights)
                members[group].append(parameter)
                self.places.append(OptimizerTensor(parameter, update_gradient(flat, part).view(shape), flat, part))
        return members

    def round(self, rounding: RoundedUpdates) -> None:
        """Makes later updates of bf16 weights without fp32 masters use the stochastic rounding ``rounding``.

        Raises:
            ConfigError: the inner optimizer is not a built-in one.
        """
        inner = built_in(self.inner, "bf16.bf16_master_weights_and_grads", "round stochastically")
        for place in self.places:
            if place.parameter.dtype == torch.bfloat16:
                rounding.add(place.parameter, place.flat, place.part)
        self._rounding = inner.rounding = rounding

    def use_disk_moments(self, folder: ScratchFolder, buffers: MomentBuffers, device: torch.device) -> None:
        """Makes updates store the moments of host-updated buckets in files in ``folder``. ``buffers``: host memory for
        moments during an update. ``device``: device of the collectives that report disk failures to all ranks.

        Raises:
            ConfigError: the inner optimizer is not a built-in one.
        """
        try:
            built_in(self.inner, 'zero_optimization.offload_optimizer.device "nvme"', "update bucket by bucket")
        except ConfigError:
            folder.close()
            raise
        sets = [
            tensors if flat.host_sums is not None else ()
            for flat, tensors in zip(self._buckets, self._bucket_tensors, strict=True)
        ]
        self.disk = DiskMoments(folder, sets, self.inner.state, buffers, DiskAgreement(self._comm, device))

    def delay(self) -> None:
        """Makes every later update run on the host while the device computes the next step. The host must update all
        buckets.

        Raises:
            ConfigError: the inner optimizer is not a built-in one.
        """
        built_in(self.inner, "zero_optimization.offload_optimizer.delayed_update", "update beside a step")
        self.copies.late = True
        self.delayed = DelayedUpdate(self._buckets, partial(self.refresh, self._buckets))

    def join_delayed(self) -> None:
        """Waits until the host has computed the pending delayed update, if there is one. The new weights may still be
        in host memory only.
        """
        if self.delayed is not None:
            self.delayed.join()

    def end_delayed(self) -> None:
        """Waits for the delayed update when the engine closes, and copies this rank's new weights to the device.
        Communicates nothing, so the parameters that other ranks update retain old values on this rank.
        """
        if self.delayed is None:
            return
        self.delayed.close()
        if self.delayed.pending and self.delayed.problem() is None:
            for flat in self._buckets:
                if flat.master is not None:
                    self.copies.give(flat)
            if (
                self._sharded
                and self._comm.grid.size(self._comm.grid.sharding) > 1
                and self._comm.grid.rank == 0
                and not self._buckets[0].sharded
            ):
                logger.warning(
                    "the engine was closed while the weights of its last update were on the host, so the model has the "
                    "shards of other ranks without it; save, or call eng.full_state_dict(), before you close it."
                )

    def use(self, kernels: Kernels) -> None:
        """Sets the kernels that later updates use. An optimizer that is not built in ignores them."""
        self._kernels = kernels
        if isinstance(self.inner, FlatOptimizer):
            self.inner.kernels = kernels
        self.decides_on_device = (
            type(self.inner) is FlatAdam
            and not self.copies.any
            and any(fits_adamw_kernel(flat.weights, kernels) for flat in self._buckets)
        )

    def gradient_squared_norm(self) -> Tensor:
        """Returns this rank's part of the squared L2 norm of the reduced gradients, as an fp64 scalar on the gradients'
        device. The sum of the parts of all ranks is the squared norm.
        """
        return squared_norm(self._norm_parts, self._kernels)

    @torch.no_grad()
    def launch(self, decision: DeviceDecision) -> None:
        """Launches the update kernels of a step. They read ``decision`` from device memory: a flag to update or skip,
        and the factor applied to gradients. Does not synchronize the host. At ZeRO 1 and 2, buckets are all-gathered
        over dp in either case.

        The caller then calls ``settle`` after an update, or ``Bookkeeping.put_back`` after a skip.
        """
        assert isinstance(self.inner, FlatAdam)
        sync_rounded(self._buckets)
        narrow: dict[Tensor, Tensor | None] = {place.parameter: place.narrow() for place in self.places}
        self._give_gradients()
        self.inner.fused = FusedAdam(self._kernels, decision, narrow, self._rounding)
        try:
            self._step_inner(rounded=True)
        finally:
            self.inner.fused = None

    def forget(self) -> None:
        """Resets all optimizer state to the state before the first step. Weights do not change."""
        self.inner.state.clear()
        self.unused = frozenset()
        self.missed.clear()
        for each in self.whole:
            each.forget()
        self.inner.state.update(self.first_state())
        for group in self.inner.param_groups if isinstance(self.inner, FlatOptimizer) else ():
            for name in self.inner.counted if isinstance(self.inner, FlatOptimizer) else ():
                group.pop(name, None)

    def first_state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Returns the state that the inner optimizer has before its first update: tensor -> state name -> value. It is
        {} for most optimizers.
        """
        return self._make().state if self._begins_with_state else {}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Multiplies the reduced gradients by ``scale`` and updates this rank's weights. At ZeRO 1 and 2, then
        all-gathers every bucket over dp. After :meth:`delay`, only starts the update on the host.
        """
        if self._rounding is not None:
            self._rounding.scale = scale
        self._give_gradients()
        attempt = partial(self._step_inner, rounded=False, scale=scale)
        if self.disk is None:
            attempt()
        else:
            self.disk.update(attempt, partial(self._put_back, Bookkeeping.of(self.inner)))
        self.settle()

    def _put_back(self, counted: Bookkeeping) -> None:
        """Undoes an update in which a disk has failed: every rank gathers the weights from before it."""
        assert self.disk is not None
        self.disk.put_back()
        counted.put_back(self.inner)
        self.refresh(self._buckets)

    def _prepare(self, number: int, scale: float) -> None:
        """Prepares a bucket for its update: copies written values into the master, and scales gradients."""
        flat = self._buckets[number]
        sync_masters(flat)
        if flat.host_sums is not None:
            self.copies.wait(flat)
        if self._scales(flat):
            self._read[number].mul_(scale)
            if flat.host_sums is not None:
                self.copies.changed(flat)

    def settle(self) -> None:
        """Ends an update: counts a missed update for each parameter without a gradient, and marks all parameters as
        changed in place.
        """
        for name in self.unused:
            self.missed[name] = self.missed.get(name, 0) + 1
        tell_autograd(self._buckets)

    @torch.no_grad()
    def refresh(self, buckets: Sequence[FlatBucket]) -> None:
        """Copies the fp32 masters of ``buckets`` into the parameters of all data ranks, after code other than an update
        has written to the masters. All-gathers over dp at ZeRO 1 and 2, as an update does.
        """
        _wait([self._start_gather(flat, rounded=False) for flat in buckets])
        tell_autograd(buckets)

    def scales_in_place(self, flat: FlatBucket) -> bool:
        """Returns True if ``step`` scales the gradients in the bucket's own memory, and False if it scales a copy."""
        return flat.host_sums is None and self._scales(flat)

    def _scales(self, flat: FlatBucket) -> bool:
        """Returns True if gradients are multiplied by the factor before the inner optimizer runs."""
        return self._rounding is None or flat.grads.dtype != torch.bfloat16

    @property
    def whole_state(self) -> WholeState:
        """State tensors that do not have their parameter's shape, such as the preconditioners of Shampoo: parameter
        name -> state name -> tensor.
        """
        return {name: kept for each in self.whole for name, kept in each.state.items()}

    def unexpected(self, unused: frozenset[str], among: frozenset[str]) -> int:
        """Returns the number of parameters in ``among`` that have a gradient in exactly one of two steps, this one and
        the previous one. ``unused``: names in ``among`` without a gradient in this step.
        """
        return len(unused ^ (self.unused & among))

    def _step_inner(self, rounded: bool, scale: float = 1.0) -> None:
        """Updates and gathers; parameters without a gradient keep values and moments, and built-in optimizers their
        count.

        ``rounded``: the step itself writes values of masters into the narrow weights, and reads gradients as they are.
        """
        if not isinstance(self.inner, FlatOptimizer):
            self._step_other(scale)
            return
        self._choose_pieces(self.inner)
        if self.delayed is not None:
            self._step_delayed(self.inner, self.delayed, scale)
            return
        gathers: list[Pending | None] = []
        late = LateBuckets(self._buckets, self.whole) if self.whole else None

        def begin(number: int) -> bool:
            if self.disk is not None and not self.disk.allows(number):
                sync_masters(self._buckets[number])
                return False
            self._prepare(number, scale)
            return self.disk is None or self.disk.begin(number)

        def end(number: int) -> None:
            gathers.append(self._start_gather(self._buckets[number], rounded))
            if self.disk is not None:
                self.disk.end(number)

        def end_now(number: int) -> None:
            # a late bucket has matrices that are updated below
            if late is None or number not in late:
                end(number)

        self.inner.order = UpdateOrder(self._bucket_tensors, None if rounded else begin, end_now)
        try:
            self._call_step()
        finally:
            self.inner.order = None  # its callbacks refer to the gathers of this step
        for made in chain.from_iterable(each.run(self.unused, self.missed) for each in self.whole):
            for number in late.complete(made) if late is not None else ():
                end(number)
        _wait(gathers)

    def _choose_pieces(self, inner: FlatOptimizer) -> None:
        apart = self.unused.union(self.missed)
        several = [place for place in self.places if not apart.isdisjoint(place.names())] if apart else []
        inner.pieces = {place.parameter: tuple(update_pieces(place, self.unused, self.missed)) for place in several}

    def _step_delayed(self, inner: FlatOptimizer, delayed: DelayedUpdate, scale: float) -> None:
        """Starts the update on copies of the gradients, which do not change while it runs."""
        for flat in self._buckets:
            sync_masters(flat)
            self.copies.wait(flat)
            self.copies.changed(flat)

        def begin(number: int) -> bool:
            if self._scales(self._buckets[number]):
                self._read[number].mul_(scale)
            return True

        inner.order = UpdateOrder(self._bucket_tensors, begin, lambda number: None, delayed.launch)
        try:
            self._call_step()
        finally:
            inner.order = None

    def _step_other(self, scale: float) -> None:
        """Updates everything at once with an optimizer of the user's."""
        for number in range(len(self._buckets)):
            self._prepare(number, scale)
        for place in self.places if self.unused else ():
            if not self.unused.isdisjoint(place.names()):
                place.parameter.grad = None
        self._call_step()
        _wait([self._start_gather(flat, rounded=False) for flat in self._buckets])

    def _call_step(self) -> None:
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False

    def _refuse_own_step(self, *_: object) -> None:
        if not self._stepping:
            refuse_own_step()

    def _give_gradients(self) -> None:
        for place in self.places:
            # set in every step: zero_grad() on the inner optimizer must not end the training
            place.parameter.grad = place.grads

    def _start_gather(self, flat: FlatBucket, rounded: bool) -> Pending | None:
        """Starts the gather of a bucket, if it has one; ``rounded``: its master is in ``kept`` already."""
        if flat.rounds_in_gathers:
            return gather_masters(flat, self._comm, "parameters")
        if flat.master is not None and not rounded:
            self.copies.give(flat)
        if self._sharded and not flat.sharded:
            return self._comm.all_gather(flat.params, flat.kept, flat.bucket.spread.sharding, "parameters")
        return None


def _wait(gathers: Sequence[Pending | None]) -> None:
    for gather in gathers:
        if gather is not None:
            gather.wait()
