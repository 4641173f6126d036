"""Selective activation checkpointing (Korthikanti et al. 2022, section 5): outputs of some operators are kept.

A block runs under ``torch.utils.checkpoint``, and a dispatch mode surrounds each of its two runs:

    forward    Saving    records the output of a listed operator         sum over tp: its result is recorded
    backward   Reusing   returns that output, and skips the operator     sum over tp: filled from the record

torch's own pair of modes (``create_selective_checkpoint_contexts``) does the same for operators alone, and would be
wrong here in three ways. It refuses an operator that only the second run has, such as a gather of sharded parameters. A
sum over tensor ranks is made in the memory of the product before it: kept as that product's output, it would be summed
once more. And it refuses outputs that are written in place (a bias added to a sum, an in-place activation); here they
are copied before the write.

Operators after the last tensor that backward needs do not run again, and their outputs are not kept.

Random numbers of operators that do not run again are skipped in the generators too, so that all later operators draw
the same masks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from engine.errors import EngineError
from engine.parallel.comm.comm import Pending
from engine.parallel.model.rng_streams import generators_of
from engine.parallel.tensor.tp_axis import TensorAxis

Operator = Any
"""Type of ``torch._ops.OpOverload``."""


@dataclass(slots=True)
class _Output:
    """One tensor that an operator returned."""

    like: Tensor
    """The tensor; an empty one on meta if a sum has been made in its memory."""
    version: int | None
    """The tensor's version counter; None for a sum, whose completion autograd counts as one more write."""

    def copy(self) -> None:
        self.like = self.like.clone()
        self.version = self.like._version

    def drop(self) -> None:
        self.like = self.like.to("meta")

    def take(self, operator: str, device: torch.device) -> Tensor:
        if self.like.is_meta:  # the kept sum will be written into it
            return torch.empty_like(self.like, device=device)
        if self.version is not None and self.like._version != self.version:
            raise EngineError(
                f"the output of {operator}, which activation_checkpointing keeps, was modified in place after its "
                "block had ended; leave this operator out of activation_checkpointing.save, or set the mode to "
                '"full".'
            )
        return self.like


@dataclass(frozen=True, slots=True)
class _Entry:
    """The outputs of one call of an operator."""

    leaves: tuple[Any, ...]
    """The flattened outputs, with an ``_Output`` for each tensor."""
    spec: Any
    device: torch.device
    random: tuple[Tensor, ...] | None
    """The generators' states after the call, if it drew random numbers."""


class SavedActivations:
    """Record of the tensors that selective checkpointing saves in one forward of one block."""

    def __init__(self) -> None:
        self._calls: dict[Operator, deque[_Entry]] = defaultdict(deque)
        self._sums: deque[_Output] = deque()
        self._in_memory: dict[int, list[_Output]] = defaultdict(list)
        self._latest: list[deque[Any]] = []
        """The queues of the entries that were added since autograd last saved a tensor, in order."""

    @property
    def bytes(self) -> int:
        """Memory of all saved tensors in bytes; a storage that several tensors share counts once."""
        outputs = [leaf for entries in self._calls.values() for entry in entries for leaf in entry.leaves]
        tensors = [output.like for output in (*outputs, *self._sums) if isinstance(output, _Output)]
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
        return sum(sizes.values())

    def note(self, operator: Operator, out: Any, random: tuple[Tensor, ...] | None) -> None:
        """Saves ``out``, the output of one call of ``operator``. ``random``: states of the random generators after the
        call, if it drew random numbers; otherwise None.
        """
        leaves, spec = pytree.tree_flatten(out)
        noted = tuple(self._noted(leaf, leaf._version) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        self._calls[operator].append(_Entry(noted, spec, device, random))
        self._latest.append(self._calls[operator])

    def note_sum(self, tensor: Tensor) -> None:
        """Saves ``tensor``, the result of an all-reduce over the tensor axis."""
        self._sums.append(self._noted(tensor, None))
        self._latest.append(self._sums)

    def _noted(self, tensor: Tensor, version: int | None) -> _Output:
        output = _Output(_alias(tensor), version)
        self._in_memory[_memory(tensor)].append(output)
        return output

    def saved(self) -> None:
        """Makes :meth:`finish` retain all tensors added so far. Called whenever autograd has saved a tensor for
        backward.
        """
        self._latest.clear()

    def finish(self, outputs: Iterable[Tensor]) -> None:
        """Completes the record at the end of a forward that returns ``outputs``.

        Drops the tensors recorded after autograd last saved a tensor (see :meth:`saved`), because backward does not
        need them. Moves other recorded tensors that share memory with ``outputs`` to memory of their own.
        """
        for entries in self._latest:
            entries.pop()
        self._latest.clear()
        for output in outputs:
            self.before_write(output)
        self._in_memory.clear()

    def before_write(self, tensor: Tensor) -> None:
        """Moves saved tensors that share memory with ``tensor`` to memory of their own. Call it before an in-place
        write to ``tensor``.
        """
        for output in self._in_memory.pop(_memory(tensor), ()):
            output.copy()

    def before_sum(self, tensor: Tensor) -> None:
        """Drops saved outputs that share memory with ``tensor``. Call it before an in-place all-reduce of ``tensor``.

        In recomputation, the result of the all-reduce, saved by :meth:`note_sum`, takes their place. If ``tensor`` is
        only a part of its storage, the saved outputs are copied instead, because the result does not replace all of
        them.
        """
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            self.before_write(tensor)
        for output in self._in_memory.pop(_memory(tensor), ()):
            output.drop()

    def take(self, operator: Operator) -> _Entry | None:
        """Removes and returns the saved outputs and random states of the oldest call of ``operator``; None if none."""
        calls = self._calls.get(operator)
        return calls.popleft() if calls else None

    def take_sum(self) -> Tensor | None:
        """Removes and returns the oldest saved result of an all-reduce; None if none is left."""
        return self._sums.popleft().take("a sum", torch.device("cpu")) if self._sums else None

    def clear(self) -> None:
        """Frees all saved tensors."""
        self._calls.clear()
        self._sums.clear()
        self._in_memory.clear()
        self._latest.clear()


def _alias(tensor: Tensor) -> Tensor:
    """The tensor without its autograd history, which would keep it alive; both share one version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Saving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of the first run."""

    def __init__(self, operators: frozenset[Operator], kept: SavedActivations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._kept, self.passes = operators, kept, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for written in _written(func, args, kwargs):
            self._kept.before_write(written)
        if self.passes or func not in self._operators:
            return func(*args, **kwargs)
        before = _states(func, args)
        out = func(*args, **kwargs)
        after = _states(func, args)
        drawn = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        self._kept.note(func, out, after if drawn else None)
        return out

    def collective(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        """Make a sum, and keep its result."""
        self._kept.before_sum(given)
        return _KeptSum(result, start(), self._kept)


class _KeptSum(Pending):
    """A pending sum; its result is saved once it is complete."""

    def __init__(self, tensor: Tensor, pending: Pending, kept: SavedActivations) -> None:
        super().__init__()
        self._tensor, self._pending, self._kept = tensor, pending, kept

    def wait(self) -> None:
        self._pending.wait()
        self._kept.note_sum(self._tensor)


class _Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode of the second run. A third run, of a retained graph, finds no entries and runs every operator."""

    def __init__(self, operators: frozenset[Operator], kept: SavedActivations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators, self._kept, self.passes = operators, kept, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        entry = self._kept.take(func) if func in self._operators and not self.passes else None
        if entry is None:
            return func(*args, **(kwargs or {}))
        if entry.random is not None:
            for generator, state in zip(generators_of(entry.device), entry.random, strict=True):
                generator.set_state(state)
        leaves = [leaf.take(str(func), entry.device) if isinstance(leaf, _Output) else leaf for leaf in entry.leaves]
        return pytree.tree_unflatten(leaves, entry.spec)

    def collective(self, given: Tensor, result: Tensor, start: Callable[[], Pending]) -> Pending:
        """Fill ``result`` with the sum that was kept."""
        summed = self._kept.take_sum()
        if summed is None:
            return start()
        with torch.no_grad():
            result.copy_(summed)
        return Pending()


@contextmanager
def outside_of_saving() -> Iterator[None]:
    """Returns a context in which selective checkpointing neither saves operator outputs nor reuses saved ones."""
    modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, _Saving | _Reusing)]
    before = [mode.passes for mode in modes]
    for mode in modes:
        mode.passes = True
    try:
        yield
    finally:
        for mode, passes in zip(modes, before, strict=True):
            mode.passes = passes


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Returns the tensors that an operator writes in place."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))


def _states(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return ()
    device = next((leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), torch.device("cpu"))
    return tuple(generator.get_state() for generator in generators_of(device))


class Selective:
    """Rule of selective checkpointing: outputs of ``operators`` and results of all-reduces over ``axis`` are saved."""

    def __init__(self, operators: frozenset[Operator], axis: TensorAxis | None = None) -> None:
        self._operators, self._axis = operators, axis

    def contexts(self, kept: SavedActivations) -> "tuple[_Run, _Run]":
        """Returns the pair of contexts for ``context_fn`` of ``torch.utils.checkpoint``. The forward fills the record
        ``kept``; the recomputation takes tensors from it.
        """
        first, second = _Saving(self._operators, kept), _Reusing(self._operators, kept)
        return _FirstRun(first, self._axis, kept), _Run(second, self._axis, kept.clear)


class _Run:
    """A context around one run of a block; it may be entered again."""

    def __init__(
        self, mode: "_Saving | _Reusing", axis: TensorAxis | None, done: Callable[[], None] | None = None
    ) -> None:
        self._mode, self._axis, self._done = mode, axis, done
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        if self._axis is not None:
            self._before.append(self._axis.repeats)
            self._axis.repeats = self._mode

    def __exit__(self, *problem: object) -> None:
        if self._axis is not None:
            self._axis.repeats = self._before.pop()
        self._mode.__exit__(*problem)  # type: ignore[no-untyped-call]
        if self._done is not None:
            self._done()


class _FirstRun(_Run):
    """The context of the first run; inside the checkpoint's own hooks it also sees when autograd saves a tensor."""

    def __init__(self, mode: _Saving, axis: TensorAxis | None, kept: SavedActivations) -> None:
        super().__init__(mode, axis)
        self._kept = kept

    def __enter__(self) -> None:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def noted(tensor: Tensor) -> Any:
            self._kept.saved()
            return pack(tensor)

        self._hooks = saved_tensors_hooks(noted, unpack)
        self._hooks.__enter__()
        super().__enter__()

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        self._hooks.__exit__(*problem)
        del self._hooks  # it leads back here: a cycle would hold what the block keeps until garbage is collected
