"""Optimizers by name: the engine's, over flat buckets, and torch's equivalents for one process.

Optimizers of whole matrices divide them among owner ranks; every rank derives all routes from the plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch

from engine.config import Config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import PlanError
from engine.kernels.optim.eight_bit_codes import StateFormat
from engine.kernels.optim.matrix_rule import MatrixRule, MuonRule
from engine.kernels.optim.preconditioned_rules import ShampooRule, SoapRule
from engine.parallel.comm.traffic import Traffic
from engine.parallel.grid import Axis, Coord, ShardHolder
from engine.parallel.shard_table import ShardRow
from engine.zero.layout import FlatLayout
from engine.zero.optim.composite import CompositeOptimizer, PlainComposite
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory
from engine.zero.optim.matrix.matrix_optimizers import FlatMuon, FlatShampoo, FlatSOAP
from engine.zero.optim.matrix.matrix_updates import MatrixRound, MatrixRoutes, state_dtype
from engine.zero.optim.matrix.owner_exchange import OwnerRoute, balanced_owners, rounds_of
from engine.zero.optim.rules.adafactor import FactorRoutes, FlatAdafactor
from engine.zero.optim.rules.eight_bit_adamw import FlatAdamW8bit
from engine.zero.optim.rules.layerwise import FlatLamb, FlatLARS, LayerRoutes
from engine.zero.optim.rules.schedule_free import FlatScheduleFreeAdamW


@dataclass(frozen=True, slots=True)
class GroupState:
    """Description of a parameter group's optimizer state: the number of values per parameter element, or, for matrices
    that are updated as a whole, the rule that defines their state.
    """

    values: int = 0
    """Number of state values per element, in the dtype of moments."""
    codes: int = 0
    """Number of 8-bit state values per element."""
    block: int = 1
    """Number of 8-bit values per scale."""
    factored: bool = False
    """True for Adafactor: row and column means of matrices, stored in full on every rank."""
    layerwise: bool = False
    """True if updates depend on norms of whole parameters (LAMB, LARS)."""
    matrices: MatrixRule | None = None
    """Rule for matrices that are updated as a whole (Muon, SOAP, Shampoo); it defines their state."""

    def bytes(self, elements: int, itemsize: int) -> int:
        """Returns the bytes of element-wise optimizer state in memory.

        Args:
            elements: number of parameter elements.
            itemsize: bytes of a value in the moments' dtype; not used for 8-bit values.
        """
        return self.values * elements * itemsize + self.codes * StateFormat(self.block, signed=True).bytes(elements)

    def stored_bytes(self, elements: int, itemsize: int) -> int:
        """Returns the bytes of element-wise optimizer state in a checkpoint, which converts 8-bit values to values of
        ``itemsize`` bytes.

        Args:
            elements: number of parameter elements.
            itemsize: bytes of a stored value.
        """
        return (self.values + self.codes) * elements * itemsize


def built_in_optimizer(config: OptimizerConfig) -> OptimizerFactory:
    """Returns a function that makes the configured optimizer over parameter groups of flat buckets (1-D tensors of many
    parameters).

    With several configured optimizers, each parameter group is updated by the optimizer assigned to it.
    """
    if not config.before:
        return _flat(config)
    kind = config.kind.replace("AdamW8bit", "AdamW")  # a checkpoint stores its moments as AdamW's
    return partial(CompositeOptimizer, makers=[_flat(entry) for entry in config.entries], kind=kind)


def _flat(config: OptimizerConfig) -> OptimizerFactory:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW": (FlatAdam, {"decoupled": True}),
        "Adam": (FlatAdam, {"decoupled": False}),
        "SGD": (FlatSGD, {}),
        "Lion": (FlatLion, {}),
        "Muon": (FlatMuon, {}),
        "SOAP": (FlatSOAP, {}),
        "Shampoo": (FlatShampoo, {}),
        "AdamW8bit": (FlatAdamW8bit, {}),
        "Adafactor": (FlatAdafactor, {}),
        "Lamb": (FlatLamb, {}),
        "LARS": (FlatLARS, {}),
        "ScheduleFreeAdamW": (FlatScheduleFreeAdamW, {}),
    }
    kind, extra = kinds[config.type]
    options = dict(config.params) | extra
    return lambda groups: kind(groups, **options)


def plain_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns an optimizer with the configured update rule, for training without the engine. It is of torch's class, or
    of the engine's if torch lacks the rule.

    Args:
        groups: parameter groups, as torch optimizers take them.
    """
    if not config.before:
        return _plain(config, groups)
    return PlainComposite(groups, [partial(_plain, entry) for entry in config.entries])


def _plain(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
        "Lion": FlatLion,
        "Muon": torch.optim.Muon,
        "SOAP": FlatSOAP,
        "Shampoo": FlatShampoo,
        "AdamW8bit": FlatAdamW8bit,
        "Adafactor": torch.optim.Adafactor,
        "Lamb": FlatLamb,
        "LARS": FlatLARS,
        "ScheduleFreeAdamW": FlatScheduleFreeAdamW,
    }
    params = dict(config.params)
    if config.type == "Muon" and params.pop("ns_dtype") != "bf16":
        return FlatMuon(groups, **config.params)  # torch's multiplies in bf16 alone
    corrected = config.type in ("AdamW8bit", "Lamb") or params.pop("bias_correction", True)
    made = kinds[config.type](groups, **params)
    if not corrected:
        switch_off_bias_correction(made)
    return made


def switch_off_bias_correction(adam: torch.optim.Optimizer) -> None:
    """Sets the step count of ``adam``, a torch optimizer that has made no step, to 1e9, so that its bias correction has
    no effect.
    """
    for weight in [weight for group in adam.param_groups for weight in group["params"]]:
        averages = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        adam.state[weight] = {"step": torch.tensor(1e9), **averages}


def kept_state(config: OptimizerConfig | None, groups: Sequence[GroupOptions]) -> tuple[GroupState, ...] | None:
    """Returns a description of each parameter group's optimizer state, such as two values per element; None without an
    optimizer.
    """
    if config is None:
        return None
    return tuple(_kept(config.entries[group.entry or 0]) for group in groups)


def block_of_codes(config: OptimizerConfig | None) -> int:
    """Returns the number of elements to which parameters are aligned in a bucket: the block size of 8-bit optimizer
    state, or 1.
    """
    entries = config.entries if config is not None else ()
    return max((entry.params["block_size"] for entry in entries if entry.type == "AdamW8bit"), default=1)


def _kept(config: OptimizerConfig) -> GroupState:
    match config.type:
        case "SGD":
            return GroupState(values=int(config.params["momentum"] != 0))
        case "Lion":
            return GroupState(values=1)
        case "Muon":
            return GroupState(values=1, matrices=MuonRule.of(config.params))
        case "SOAP":
            return GroupState(matrices=SoapRule.of(config.params))
        case "Shampoo":
            return GroupState(matrices=ShampooRule.of(config.params))
        case "AdamW8bit":
            return GroupState(codes=2, block=config.params["block_size"])
        case "Adafactor":
            return GroupState(factored=True)
        case "Lamb":
            return GroupState(values=2, layerwise=True)
        case "LARS":
            return GroupState(values=int(config.params["momentum"] != 0), layerwise=True)
    return GroupState(values=2)


def refuse_experts(rows: Iterable[ShardRow], rules: Mapping[int, MatrixRule]) -> None:
    """Raises if an optimizer of whole matrices (Muon, SOAP, Shampoo) would update experts that are divided among data
    ranks.

    Args:
        rows: one row for each parameter, with its name, optimizer group and sharding.
        rules: update rules of whole matrices, by index of the parameter group.

    Raises:
        PlanError: a parameter of such experts is in a group with a rule.
    """
    name = next((row.name for row in rows if row.trainable and row.experts and row.group in rules), None)
    if name is not None:
        raise PlanError(
            f"the optimizer updates {name!r} as a whole matrix, but parallel.expert divides the experts among data "
            "ranks, and only element-wise optimizers, Adafactor, LAMB and LARS update divided experts; make optimizer "
            'a list that gives the experts "AdamW", or leave parallel.expert out.'
        )


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class MatrixOwners:
    """Assignment of each matrix to the rank that gets its full gradient and updates it (Muon, SOAP, Shampoo)."""

    config: Config
    rows: Sequence[ShardRow]
    """All rows of the shard table, one per parameter."""
    rules: Mapping[int, MatrixRule]
    """Rules of optimizer groups that update whole matrices."""
    layouts: Mapping[ShardHolder, FlatLayout]
    ways: int = 2
    """Exchanges per update on each axis: 2 (gradients to owners, updates back); 3 if weights are sent to owners too."""

    known: dict[int, dict[str, int]] = field(default_factory=dict, repr=False, compare=False)
    """Cache of each pipeline rank's owners: matrix -> data rank in its shard group."""

    def _matrices(self, pp: int) -> dict[str, ShardRow]:
        """Returns the matrices of a pipeline rank."""
        rows = (row for row in self.rows if row.trainable and row.group in self.rules)
        return {row.name: row for row in rows if pp in row.owners}

    def _owners(self, pp: int) -> dict[str, int]:
        if pp not in self.known:
            rows = self._matrices(pp)
            held = _held(self.layouts[ShardHolder(pp)], rows, self._shares)
            self.known[pp] = balanced_owners({name: self._cost(row) for name, row in rows.items()}, held)
        return self.known[pp]

    @property
    def _shares(self) -> int:
        """Number of data ranks that share every bucket."""
        return self.config.shards if self.config.zero_optimization.stage else 1

    @property
    def data_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of data ranks that exchange matrices; each number is a rank's index on the axis of gradient sums."""
        count, grid = self._shares, self.config.grid(0)
        return tuple(tuple(range(first, first + count)) for first in range(0, grid.size(grid.sums), count))

    def routes(self, coord: Coord) -> MatrixRoutes | None:
        """Returns the exchanges in which the rank at ``coord`` sends and receives gradients and updates of whole
        matrices; None if its pipeline rank has no such matrix.
        """
        rows = self._matrices(coord.pp)
        if not rows:
            return None
        count, grid = self._shares, self.config.grid(0)
        index = grid.index(grid.shard_line, grid.rank_at(**coord))
        first, place = index // count * count, index % count
        members = tuple(range(first, first + count))
        # all tensor ranks agree on the owner of a matrix that they share, so one of their layouts decides
        decides, own = (_held(self.layouts[ShardHolder(coord.pp, tp)], rows, count) for tp in (0, coord.tp))
        costs = {name: self._cost(row) for name, row in rows.items()}
        owners = self._owners(coord.pp)
        cut = {name: row for name, row in rows.items() if row.dim is not None} if self.config.tp > 1 else {}
        tensor = self._tensor_owners({name: row for name, row in cut.items() if owners[name] == place})
        order = [slot.name for bucket in self.layouts[ShardHolder(coord.pp)].buckets for slot in bucket.slots]
        rounds = [
            MatrixRound(
                data=OwnerRoute(grid.shard_line, members, _of(names, owners), _of(names, own)),
                tensor=self._tensor_route(_of(names, tensor), cut),
            )
            for names in rounds_of(owners, costs, decides, [name for name in order if name in rows])
        ]
        return MatrixRoutes(
            rows=rows, rounds=tuple(rounds), dtype=_dtype(rows.values()), place=place, tp=coord.tp, crossed=bool(cut)
        )

    def traffic(self, coord: Coord) -> tuple[Traffic, ...]:
        """Returns the traffic of the rank at ``coord`` for whole matrices in each training step: axis, label, calls and
        bytes of each exchange.
        """
        routes = self.routes(coord)
        if routes is None:
            return ()
        size, grid = routes.dtype.itemsize, self.config.grid(0)
        data = [row for each in routes.rounds for row in each.data.traffic(grid.sharding, size, self.ways)]
        crossing = [each.tensor for each in routes.rounds if each.tensor is not None]
        tensor = [row for each in crossing for row in each.traffic("tp", size, self.ways)]
        return (*data, *tensor)

    def state_bytes(self, coord: Coord) -> int:
        """Returns the bytes of optimizer state for the matrices that the rank at ``coord`` updates."""
        grid, rows = self.config.grid(0), self._matrices(coord.pp)
        place = grid.index(grid.shard_line, grid.rank_at(**coord)) % self._shares
        own = {name: rows[name] for name, owner in self._owners(coord.pp).items() if owner == place}
        cut = {name: row for name, row in own.items() if row.dim is not None} if self.config.tp > 1 else {}
        tensor = self._tensor_owners(cut)
        return sum(self._state(row) for name, row in own.items() if tensor.get(name, coord.tp) == coord.tp)

    def stored_bytes(self) -> int:
        """Returns the bytes of optimizer state in a checkpoint for all parameters updated as whole matrices."""
        return sum(self._state(row) for row in self.rows if row.trainable and row.group in self.rules)

    def _state(self, row: ShardRow) -> int:
        shapes = self.rules[row.group].state_shapes(row.shape).values()
        return sum(map(prod, shapes)) * state_dtype(row).itemsize

    def _tensor_owners(self, cut: Mapping[str, ShardRow]) -> dict[str, int]:
        costs = {name: self.rules[row.group].cost(row.shape) for name, row in cut.items()}
        return balanced_owners(costs, {name: self._cuts(row) for name, row in cut.items()})

    def _tensor_route(self, owners: Mapping[str, int], cut: Mapping[str, ShardRow]) -> OwnerRoute | None:
        sizes = {name: self._cuts(cut[name]) for name in owners}
        return OwnerRoute("tp", tuple(range(self.config.tp)), owners, sizes) if owners else None

    def _cuts(self, row: ShardRow) -> tuple[int, ...]:
        """Returns the elements of a matrix that each tensor rank stores."""
        return tuple(row.local_elements(ShardHolder(tp=index)) for index in range(self.config.tp))

    def _cost(self, row: ShardRow) -> int:
        """Returns the work of a rank; tensor ranks share the work of matrices that they shard."""
        return self.rules[row.group].cost(row.shape) // (1 if row.dim is None else self.config.tp)


def factor_routes(rows: Iterable[ShardRow], groups: frozenset[int], config: Config) -> FactorRoutes | None:
    """Returns Adafactor's all-reduces of row and column means on a pipeline rank; None if Adafactor updates none of the
    rank's parameters.

    Args:
        rows: one row for each parameter of the pipeline rank, with its optimizer group and sharding.
        groups: indices of the parameter groups with Adafactor.
    """
    own = tuple(row for row in rows if row.trainable and row.group in groups)
    return FactorRoutes(own, *_dividing(own, config), _dtype(own)) if own else None


def layer_routes(rows: Iterable[ShardRow], groups: frozenset[int], config: Config) -> LayerRoutes | None:
    """Returns the all-reduces of norms by LAMB and LARS on a pipeline rank; None if these optimizers update none of the
    rank's parameters.

    Args:
        rows: one row for each parameter of the pipeline rank, with its optimizer group and sharding.
        groups: indices of the parameter groups with LAMB or LARS.
    """
    own = tuple(row for row in rows if row.trainable and row.group in groups)
    return LayerRoutes(own, *_dividing(own, config), _dtype(own)) if own else None


def _dividing(rows: Sequence[ShardRow], config: Config) -> tuple[tuple[tuple[Axis, int], ...], bool]:
    """Returns the axes that divide the elements of ``rows``, with their ranks, and ``SumRoutes.copied``.

    Experts are divided over "ep" too. Shard groups that do not contain whole groups of experts sum over all data ranks.
    """
    grid, shards = config.grid(0), config.shards if config.zero_optimization.stage else 1
    copied = shards < grid.experts and any(row.experts for row in rows)
    data: tuple[Axis, int] = (grid.shard_line, grid.size(grid.shard_line)) if copied else (grid.sharding, shards)
    axes: list[tuple[Axis, int]] = [data, ("tp", config.tp)]
    return tuple(each for each in axes if each[1] > 1), copied


def _dtype(rows: Iterable[ShardRow]) -> torch.dtype:
    """Returns the dtype of updates: fp64 if a parameter was passed in fp64, else fp32."""
    return torch.float64 if any(row.dtype == torch.float64 for row in rows) else torch.float32


def _of(names: Sequence[str], values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the values of the names that have one, in the order of the names."""
    return {name: values[name] for name in names if name in values}


def _held(layout: FlatLayout, rows: Mapping[str, ShardRow], ranks: int) -> dict[str, tuple[int, ...]]:
    """Returns the elements of each matrix in the shard of each data rank."""
    found = {}
    for bucket in layout.buckets:
        whole = [slice(0, bucket.elements)]
        shards = whole if ranks == 1 else [bucket.shard(index) for index in range(bucket.spread.ranks)]
        for slot in bucket.slots:
            if slot.name in rows:
                found[slot.name] = tuple(
                    max(0, min(slot.stop, shard.stop) - max(slot.start, shard.start)) for shard in shards
                )
    return {name: found[name] for name in rows}
