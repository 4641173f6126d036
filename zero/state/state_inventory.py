"""Inventory of all state on a rank: one list for integrity checks, offload, checkpoints and names.

ZeRO    weights                  masters, moments      equal on the data ranks
0       whole buckets            whole                 all of it
1, 2    whole buckets            shards                weights
3       shards                   shards                nothing

Optimizer state of whole parameters is equal on the data ranks, or on its owner only. For expert parameters, the data
ranks are the ranks along "edp", which store the same experts.

Frozen parameters are full weights below ZeRO 3. Gradients, quantization residuals and secondary shards are stored
between steps too; secondary shards are in no checkpoint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Protocol

from torch import Tensor, nn

from engine.parallel.grid import Axis, Grid, Spread
from engine.parallel.pipeline.runtime.encoded_messages import MessageEncoder
from engine.parallel.shard_table import ShardRow
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.gatherer import ParameterGatherer
from engine.zero.optim.optimizer_tensors import WholeUpdates
from engine.zero.optim.sharded_optimizer import ShardedOptimizer
from engine.zero.reduce.reducer import Reducer


class HoldsCompanions(Protocol):
    """Interface of a feature that stores a tensor for each updated tensor, such as a moving average of weights."""

    def tensors(self) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Returns the tensors that the feature stores, by parameter object of the optimizer, then by kind such as
        "ema".
        """

    def prepare(self, stored: Mapping[str, object]) -> Mapping[nn.Parameter, Mapping[str, Tensor]]:
        """Allocates the tensors that a checkpoint load fills. Returns optimizer parameter -> kind, such as "ema", ->
        tensor.

        ``stored``: entries of the checkpoint by "KIND/NAME", with the parameter's name as NAME.
        """

    def forget(self) -> None:
        """Discards or resets the feature's tensors, after the user has replaced the weights."""


class Home(Enum):
    """Kind of memory in which a tensor is stored between two steps."""

    DEVICE = auto()
    """Memory of the accelerator (or CPU) that computes."""
    HOST = auto()
    """Host memory, as the configuration's offload requires."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """Entry for a tensor of training state on this rank, with the parameter or the bucket that it belongs to."""

    kind: str
    """Kind of state: "weight", "master", "gradient", "host gradient", "residual", "secondary shard", "ema", or an
    optimizer state name such as "exp_avg".
    """
    tensor: Tensor
    name: str = ""
    """Name of the parameter, if the tensor belongs to a single one."""
    flat: FlatBucket | None = None
    """Bucket that the tensor's elements belong to, if any."""
    part: slice = field(default_factory=lambda: slice(0))
    """Elements of the bucket in the tensor."""
    home: Home = Home.DEVICE
    equal: bool = False
    """True if the tensor is bitwise equal on all data ranks."""
    spread: Spread = field(default_factory=Spread)
    """Axes of the parameters that the tensor belongs to."""
    writers: tuple[Tensor, ...] = ()
    """Other tensors over the same memory, through which code may write."""

    @property
    def copies(self) -> Axis:
        """Axis along which ranks have bitwise equal copies of this tensor."""
        return self.spread.copies if self.equal else self.spread.shard_copies

    def parameter(self, element: int) -> str:
        """Returns the name of the parameter that element ``element`` of this tensor belongs to."""
        return self._slot(element)[0]

    def place(self, element: int) -> int:
        """Returns the position of ``element`` (an index into this tensor) among this tensor's elements of the same
        parameter.
        """
        return element - self._slot(element)[1]

    def within(self, part: slice) -> "StateTensor":
        """Returns an entry for ``part``, a range of bucket elements within the range of this entry. Its tensor is a
        view.
        """
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
    """Inventory of a rank's state tensors between two steps: weights, masters, optimizer state, gradients. All data
    ranks list their tensors in the same order.
    """

    model: nn.Module
    rows: Sequence[ShardRow]
    """Rows of the parameters on this rank's stages; parameters of other stages are placeholders."""
    trained: Sequence[FlatBucket]
    frozen: Sequence[FlatBucket]
    """Buckets of frozen sharded parameters; other frozen parameters stay in the model."""
    optimizer: ShardedOptimizer
    companions: list[HoldsCompanions] = field(default_factory=list)
    """Features with a tensor for each updated one, which checkpoints store: averages, anchors of the outer loop."""
    reducer: Reducer | None = None
    encoder: MessageEncoder | None = None
    gatherer: ParameterGatherer | None = None
    grid: Grid = field(default_factory=Grid)
    """Grid with this rank's coordinates."""

    @property
    def buckets(self) -> tuple[FlatBucket, ...]:
        """Flat buckets of this rank: the trained ones, then the frozen ones."""
        return (*self.trained, *self.frozen)

    def weights(self) -> Iterator[StateTensor]:
        """Yields the weights in the compute dtype: one entry for each bucket, then parameters that are in no bucket."""
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
        """Yields the master weights (copies that the optimizer updates instead of the parameters) on this rank, bucket
        by bucket.
        """
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
        """Yields the optimizer state: first the state of whole parameters (as in Muon), then per-element state (such as
        Adam's moments).
        """
        for updates in self.optimizer.whole:
            yield from self.whole_state(updates)
        state = self.optimizer.inner.state
        yield from self.element_state({
            p: {str(kind): value for kind, value in sorted(state.get(p, {}).items()) if _is_filled(value)}
            for p in (place.parameter for place in self.optimizer.places)
        })  # fmt: skip

    def element_state(self, tensors: Mapping[nn.Parameter, Mapping[str, Tensor]]) -> Iterator[StateTensor]:
        """Yields an entry for each state tensor in ``tensors``: optimizer parameter -> kind -> tensor."""
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

    def whole_state(self, updates: WholeUpdates) -> Iterator[StateTensor]:
        """Yields the state tensors of ``updates``, an update rule with state for whole parameters."""
        for name, own in updates.state.items():
            for kind, value in own.items():
                yield StateTensor(
                    kind=kind, tensor=value, name=name, equal=updates.on_all_data_ranks, spread=self._spread(name)
                )

    def companion_state(self) -> Iterator[StateTensor]:
        """Yields the tensors that weight averaging and DiLoCo store for each tensor of the optimizer: averages, and for
        DiLoCo the weights and encoding errors of the last synchronization.
        """
        for companion in self.companions:
            yield from self.element_state(companion.tensors())

    def gradients(self) -> Iterator[StateTensor]:
        """Yields accumulated gradients, their host copies, and encoding errors of quantized gradients and pipeline
        messages.
        """
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
        """Yields the secondary shards on this rank (ZeRO++ hpZ: additional copies of the parameters, sharded within a
        node).
        """
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
