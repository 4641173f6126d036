"""Inventory of what a rank holds of a model and its training: one list for integrity, offload, checkpoints and names.

ZeRO    weights                  masters, moments      equal on the data ranks
0       whole buckets            whole                 all of it
1, 2    whole buckets            shards                weights
3       shards                   shards                nothing

What an optimizer keeps of whole parameters is equal where all data ranks have it, and not where its owner has. For the
parameters of experts, the data ranks are those along "edp", which hold the same experts.

Frozen parameters are weights too: whole ones of their own below ZeRO 3. Gradients, residuals of encodings and secondary
shards are held between steps as well, and no checkpoint has the latter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from engine.parallel.grid import Axis, Grid, Spread
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket


class UpdatedTensor(Protocol):
    """Tensor that an optimizer updates: the elements ``part`` of a bucket."""

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor."""

    @property
    def flat(self) -> FlatBucket:
        """The bucket."""

    @property
    def part(self) -> slice:
        """Its elements."""

    def names(self) -> list[str]:
        """Returns the parameters with elements in this tensor."""


class KeepsWhole(Protocol):
    """Keeper of state of whole parameters, in shapes of its own."""

    @property
    def on_all_data_ranks(self) -> bool:
        """All data ranks keep the same state."""

    @property
    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter -> kind -> what this rank keeps."""


class HoldsMoments(Protocol):
    """Interface of an optimizer with moments that the inventory lists."""

    @property
    def places(self) -> Sequence[UpdatedTensor]:
        """All tensors that it updates."""

    @property
    def inner(self) -> Optimizer:
        """The optimizer that keeps state by those tensors."""

    @property
    def whole(self) -> Sequence[KeepsWhole]:
        """Updates with state of full parameters."""


class HoldsAverages(Protocol):
    """Moving average of the weights."""

    def tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns the averages by updated tensor and kind."""


class HoldsResiduals(Protocol):
    """Reducer of gradients."""

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Encoding errors, by name."""


class HoldsSecondary(Protocol):
    """Gatherer of parameters."""

    @property
    def secondary(self) -> Sequence[Tensor]:
        """Secondary shards of gathered parameters on this node."""

    def end(self) -> None:
        """Frees the values that a forward has left for its backward."""


class Home(Enum):
    """Memory in which a tensor lies between two steps."""

    DEVICE = auto()
    """On the device that computes."""
    HOST = auto()
    """On the host, which updates it or gives it to gathers, as the configuration asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """Tensor that this rank holds between two steps."""

    kind: str
    """"weight", "master", "gradient", "host gradient", "residual", "secondary shard", "ema", or a name of the
    optimizer's such as "exp_avg"."""
    tensor: Tensor
    name: str = ""
    """The parameter, of a tensor that belongs to one of them alone."""
    flat: FlatBucket | None = None
    """The bucket, of a tensor that holds elements of one."""
    part: slice = field(default_factory=lambda: slice(0))
    """Those elements."""
    home: Home = Home.DEVICE
    equal: bool = False
    """All data ranks hold it, in equal bits."""
    spread: Spread = field(default_factory=Spread)
    """Axes of the parameters that it belongs to."""
    writers: tuple[Tensor, ...] = ()
    """Other tensors in its memory, through which the program may write."""

    @property
    def copies(self) -> Axis:
        """The axis along which ranks hold it in equal bits."""
        return self.spread.copies if self.equal else self.spread.shard_copies

    def parameter(self, element: int) -> str:
        """Returns the parameter of an element."""
        return self._slot(element)[0]

    def place(self, element: int) -> int:
        """Returns the index of an element in this tensor's part of its parameter."""
        return element - self._slot(element)[1]

    def within(self, part: slice) -> "StateTensor":
        """Returns the elements ``part`` of the bucket, all of which are in this tensor."""
        start = self.part.start
        return replace(self, tensor=self.tensor[part.start - start : part.stop - start], part=part)

    def _slot(self, element: int) -> tuple[str, int]:
        """Returns the parameter of an element, and the parameter's first element here."""
        if self.flat is None:
            return self.name, 0
        at = self.part.start + element
        found = (slot for slot in self.flat.bucket.slots if slot.start <= at < slot.stop)
        return next(
            ((slot.name, max(slot.start, self.part.start) - self.part.start) for slot in found),
            ("padding of a bucket", 0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInventory:
    """State of a rank. The state of the optimizer changes, so it is listed anew each time.

    All data ranks list their tensors in the same order.
    """

    model: nn.Module
    rows: Sequence[ShardRow]
    """The parameters that this rank's stages hold; others are placeholders, which may not be read."""
    trained: Sequence[FlatBucket]
    frozen: Sequence[FlatBucket]
    """Buckets of sharded frozen parameters; others are the model's own."""
    optimizer: HoldsMoments
    average: HoldsAverages | None = None
    reducer: HoldsResiduals | None = None
    encoder: MessageEncoder | None = None
    gatherer: HoldsSecondary | None = None
    grid: Grid = field(default_factory=Grid)
    """The grid of this rank."""

    @property
    def buckets(self) -> tuple[FlatBucket, ...]:
        """All buckets."""
        return (*self.trained, *self.frozen)

    def weights(self) -> Iterator[StateTensor]:
        """Yields parameters in the dtype of the computation: parameters of buckets, then the others."""
        for flat in self.buckets:
            optimized = self._optimized(flat) if flat.master is None else ()
            if flat.sharded:
                home = Home.HOST if flat.kept_on_host else Home.DEVICE
                yield StateTensor(
                    kind="weight", tensor=flat.kept, flat=flat, part=flat.owned, home=home, writers=optimized,
                    spread=flat.bucket.spread,
                )  # fmt: skip
            else:
                writers, whole = (flat.kept, *flat.parameters, *optimized), slice(0, flat.bucket.elements)
                yield StateTensor(
                    kind="weight", tensor=flat.params, flat=flat, part=whole, equal=True, writers=writers,
                    spread=flat.bucket.spread,
                )  # fmt: skip
        placed = {slot.name for flat in self.buckets for slot in flat.bucket.slots}
        named = dict(self.model.named_parameters())
        for row in self.rows:
            if row.name not in placed and row.name in named:
                yield StateTensor(
                    kind="weight", tensor=named[row.name], name=row.name, equal=True, spread=self._spread(row.name)
                )

    def masters(self) -> Iterator[StateTensor]:
        """Yields the master weights, which the optimizer updates in place of parameters."""
        for flat in self.buckets:
            if flat.master is not None:
                yield StateTensor(
                    kind="master", tensor=flat.master, flat=flat, part=flat.owned, home=_updated_in(flat),
                    equal=_is_whole(flat), writers=self._optimized(flat), spread=flat.bucket.spread,
                )  # fmt: skip

    def updated(self) -> Iterator[StateTensor]:
        """Yields the tensors that the optimizer updates: masters, and parameters without a master."""
        for flat in self.trained:
            yield StateTensor(
                kind="weight" if flat.master is None else "master", tensor=flat.weights, flat=flat, part=flat.owned,
                home=_updated_in(flat), equal=_is_whole(flat), spread=flat.bucket.spread,
            )  # fmt: skip

    def moments(self) -> Iterator[StateTensor]:
        """Yields the optimizer's state, of whole parameters and of elements."""
        for updates in self.optimizer.whole:
            yield from self.whole_state(updates)
        state = self.optimizer.inner.state
        yield from self.element_state({
            p: {str(kind): value for kind, value in sorted(state.get(p, {}).items()) if _is_filled(value)}
            for p in (place.parameter for place in self.optimizer.places)
        })  # fmt: skip

    def element_state(self, tensors: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[StateTensor]:
        """Yields states of elements, by updated tensor and kind in ``tensors``: the optimizer's, or states to be
        loaded."""
        for place in self.optimizer.places:
            flat, shape = place.flat, place.parameter.shape
            for kind, value in tensors.get(place.parameter, {}).items():
                held = StateTensor(
                    kind=kind, tensor=value, home=_updated_in(flat), equal=_is_whole(flat), spread=flat.bucket.spread
                )
                if value.shape == shape:
                    yield replace(held, flat=flat, part=place.part)
                else:
                    yield replace(held, name=next(iter(place.names()), "padding of a bucket"))

    def whole_state(self, updates: KeepsWhole) -> Iterator[StateTensor]:
        """Yields the state of whole parameters, in shapes of its own."""
        for name, own in updates.state.items():
            for kind, value in own.items():
                yield StateTensor(
                    kind=kind, tensor=value, name=name, equal=updates.on_all_data_ranks, spread=self._spread(name)
                )

    def averages(self) -> Iterator[StateTensor]:
        """Yields the moving average of the updated tensors."""
        return self.element_state(self.average.tensors() if self.average is not None else {})

    def gradients(self) -> Iterator[StateTensor]:
        """Sums of gradients, their copies that the host reads, and what encodings have left out of them."""
        for flat in self.trained:
            yield StateTensor(kind="gradient", tensor=flat.grads, flat=flat, part=flat.held)
            if flat.host_sums is not None:
                yield StateTensor(
                    kind="host gradient", tensor=flat.host_sums, flat=flat, part=flat.owned, home=Home.HOST
                )
        residuals = [*self.reducer.residuals.values()] if self.reducer is not None else []
        for residual in (*residuals, *(self.encoder.residuals if self.encoder is not None else ())):
            yield StateTensor(kind="residual", tensor=residual)

    def secondary(self) -> Iterator[StateTensor]:
        """Yields secondary shards of gathered parameters on this node."""
        for shard in self.gatherer.secondary if self.gatherer is not None else ():
            yield StateTensor(kind="secondary shard", tensor=shard)

    def _spread(self, name: str) -> Spread:
        """Axes of a parameter."""
        experts = any(row.name == name and row.experts for row in self.rows)
        return self.grid.expert_spread if experts else self.grid.spread

    def _optimized(self, flat: FlatBucket) -> tuple[Tensor, ...]:
        return tuple(place.parameter for place in self.optimizer.places if place.flat is flat)


def _is_filled(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _is_whole(flat: FlatBucket) -> bool:
    """Returns True if all data ranks update all of it: ZeRO 0, or a single data rank."""
    return len(flat.weights) == flat.bucket.elements


def _updated_in(flat: FlatBucket) -> Home:
    return Home.DEVICE if flat.host_sums is None else Home.HOST
