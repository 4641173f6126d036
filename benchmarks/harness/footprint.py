"""Memory and sent bytes of one rank, counted in steps that are not timed.

Memory is the bytes of tensors: between two steps, at the optimizer's update, and at the peak of a step, with and
without the training state. The step that counts sent bytes runs first: it finds tensors that only torch's C++ holds,
such as DDP's buckets (a second copy of the gradients).
"""

import gc
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from benchmarks.harness.sent_bytes import RingCounter

SETTLE_SECONDS = 0.1
"""Seconds to wait for gloo's threads to free a collective's tensors."""
FOOTPRINT_STEPS = 4
TRAINING_STATE = 4
"""Bytes of training state over bytes of parameters: parameters, gradients and two AdamW moments."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and traffic of one rank, or the maximum of each figure over ranks."""

    sent_bytes: int
    """Bytes sent in one step, by the ring convention."""
    calls: int
    """Number of collectives and messages sent in one step."""
    state_bytes: int
    """Bytes of unique storages reachable from Python between two steps."""
    live_bytes: int
    """Bytes of tensors just after the optimizer's update: parameters, gradients, optimizer state, other tensors."""
    step_peak_bytes: int
    """``state_bytes`` plus the peak of a step's allocations, including activations."""
    activation_bytes: int
    """``step_peak_bytes`` without parameters, gradients and two moments: activations and temporaries. Only meaningful
    for plain unsharded AdamW.
    """
    peak_resident_bytes: int
    """Maximum resident size of the process so far in bytes, libraries included."""


def measure_footprint(step: Callable[[Tensor], object], batches: Sequence[Tensor]) -> Footprint:
    """Runs ``FOOTPRINT_STEPS`` steps, one on each of ``batches``, and returns memory and traffic."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # first: what follows needs memory itself
    counted, looked_at, *watched = batches
    with RingCounter() as counter:
        step(counted)
    live, updated = _live_at_update(step, looked_at)
    above = _peak_above_state(step, watched)
    time.sleep(SETTLE_SECONDS)
    state = live_tensor_bytes()
    peak = state + above
    return Footprint(counter.sent, counter.calls, state, live, peak, peak - TRAINING_STATE * updated, resident)


def largest(footprints: Sequence[Footprint]) -> Footprint:
    """Returns the maximum of each figure."""
    names = Footprint.__slots__
    return Footprint(**{name: max(getattr(found, name) for found in footprints) for name in names})


def live_tensor_bytes() -> int:
    """Returns the bytes of unique storages of all tensors reachable from Python."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    grads = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = {storage.data_ptr(): storage for tensor in (*tensors, *grads) for storage in _storages(tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def _storages(thing: object) -> Iterator[torch.UntypedStorage]:
    """What a tensor keeps in memory; a DTensor has no storage of its own but its local tensor's."""
    if is_traceable_wrapper_subclass(thing):
        for name in thing.__tensor_flatten__()[0]:
            yield from _storages(getattr(thing, name))
    elif isinstance(thing, Tensor) and thing.untyped_storage().device.type != "meta":
        yield thing.untyped_storage()


def _live_at_update(step: Callable[[Tensor], object], rows: Tensor) -> tuple[int, int]:
    """Bytes of live tensors at the end of the inner optimizer's update in one more step; those of what it updates.

    0 without an optimizer.
    """
    seen: list[int] = []
    updated: set[Tensor] = set()

    def look(optimizer: Optimizer, *_: object) -> None:
        time.sleep(SETTLE_SECONDS)
        seen.append(live_tensor_bytes())
        updated.update(parameter for group in optimizer.param_groups for parameter in group["params"])

    hook = register_optimizer_step_post_hook(look)
    try:
        step(rows)
    finally:
        hook.remove()
    return max(seen, default=0), sum(parameter.numel() * parameter.element_size() for parameter in updated)


def _peak_above_state(step: Callable[[Tensor], object], batches: Sequence[Tensor]) -> int:
    """Most bytes that tensors take within a step, above what they take after it.

    torch's profiler sees every allocation on the CPU, and every release of what was allocated before its eyes. Of
    two steps the second releases what the first has left, so that its level against the end is the true one; the
    first one's can only be too low.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for rows in batches:
            step(rows)
        time.sleep(SETTLE_SECONDS)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels: list[int] = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(levels) - levels[-1]
