"""``deepspeed.runtime.pipe.topology``: named axes over ranks; ranks along the last axis are adjacent."""

from itertools import product
from typing import Any, NamedTuple

from engine.parallel.grid import Grid


class ProcessTopology:
    """Grid of ranks with a name for each axis; consecutive ranks are neighbors along the last axis.

    Args:
        axes: names of the axes, the outermost first.
        dims: number of ranks along each axis.
    """

    def __init__(self, axes: list[str], dims: list[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        kind: Any = NamedTuple("ProcessCoord", [(axis, int) for axis in axes])  # type: ignore[misc]
        self.ProcessCoord = kind  # DeepSpeed's name
        self.mapping = {kind(*place): rank for rank, place in enumerate(product(*(range(dim) for dim in dims)))}

    def get_rank(self, **coord: int) -> int:
        """Returns the rank with the given index on every axis, such as ``get_rank(pipe=0, data=1)``.

        Raises:
            ValueError: the axes in ``coord`` are not the axes of the grid.
        """
        if coord.keys() != set(self.axes):
            raise ValueError(f"get_rank got axes {sorted(coord)}; pass each of {self.axes}.")
        return next(rank for place, rank in self.mapping.items() if place._asdict() == coord)

    def get_coord(self, rank: int) -> Any:
        """Returns the coordinate of a rank as a namedtuple with one index per axis."""
        return next(place for place, each in self.mapping.items() if each == rank)

    def get_axis_names(self) -> list[str]:
        """Returns the names of the axes."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Returns the number of ranks along ``axis``; 0 if no axis has that name."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def world_size(self) -> int:
        """Returns the number of ranks in the grid."""
        return len(self.mapping)

    def filter_match(self, **coord: int) -> list[int]:
        """Returns the ranks with the indices ``coord`` on the named axes, ascending; other axes may have any index."""
        return sorted(r for place, r in self.mapping.items() if all(getattr(place, a) == v for a, v in coord.items()))

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Returns all ranks with index ``idx`` on ``axis``, ascending."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Returns one list of ranks for each communication group along ``axis``; [] if no axis has that name.

        The ranks of a group have equal indices on all other axes.
        """
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        places = product(*(range(self.get_dim(name)) for name in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]

    def get_rank_repr(
        self, rank: int, omit_axes: tuple[str, ...] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Returns a rank's axis indices as text, such as "pipe_01-model_00", without the axes in ``omit_axes``.

        ``inner_sep`` joins name and index of an axis, ``outer_sep`` joins the axes.
        """
        place = self.get_coord(rank)
        named = [f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(named)


class PipeDataParallelTopology(ProcessTopology):
    """Topology with the axes "pipe" (outermost) and "data"."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Topology with the axes "pipe" (outermost), "data" and "model" (tensor parallelism)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """Numbers of ranks on each axis and this rank's indices, with DeepSpeed's method names."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def topology(self) -> ProcessTopology:
        """Returns the grid as a ``ProcessTopology`` with the axes "pipe", "data" and "model", outermost first.

        If the configuration has the rank order "tp-pp-dp", the axes are "data", "pipe" and "model".
        """
        grid = self._grid
        if grid.order == "tp-pp-dp":
            return ProcessTopology(["data", "pipe", "model"], [grid.row_ranks, grid.pp, grid.tp])
        return ProcessTopology(["pipe", "data", "model"], [grid.pp, grid.row_ranks, grid.tp])

    @property
    def is_first_stage(self) -> bool:
        """True if this rank runs the first pipeline stage."""
        return self.get_stage_id() == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank runs the last pipeline stage."""
        return self.get_stage_id() == self._grid.pp - 1

    def stage_to_global(self, stage_id: int, **coord: int) -> int:
        """Returns the global rank on pipeline stage ``stage_id`` with this rank's indices on all other axes.

        ``coord`` overrides indices, such as ``data=1``.
        """
        axes = self.topology()
        return axes.get_rank(**(axes.get_coord(self._grid.rank)._asdict() | coord | {"pipe": stage_id}))

    def get_global_rank(self) -> int:
        """Returns the rank of this process among all processes, from 0."""
        return self._grid.rank

    def get_stage_id(self) -> int:
        """Returns the index of this rank's pipeline stage, from 0."""
        return self._grid.coord().pp

    get_pipe_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Returns the number of ranks on the pipeline axis."""
        return self._grid.pp

    def get_data_parallel_rank(self) -> int:
        """Returns this rank's index on the data axis, from 0."""
        return self._grid.row_rank

    get_data_parallel_id = get_data_parallel_rank

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of ranks on the data axis."""
        return self._grid.row_ranks

    def get_model_parallel_rank(self) -> int:
        """Returns this rank's index on the tensor axis, from 0."""
        return self._grid.coord().tp

    def get_model_parallel_world_size(self) -> int:
        """Returns the number of ranks on the tensor axis."""
        return self._grid.tp

    get_slice_parallel_rank, get_slice_parallel_world_size = get_model_parallel_rank, get_model_parallel_world_size
