"""Division of a batch into microbatches by rows, and its tensors without rows.

rows       tensors with micro x accumulation rows on each data rank, split into microbatches
whole      tensors that every microbatch receives unchanged (position ids, class weights): named by the user, or with
           a leading dim other than the rows of the example; 0-dim tensors always
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

from engine.errors import EngineError
from engine.program.batch import Batch, BatchPath, change_tensors, expression, tensors_by_path

Name = str | int
"""Key of a mapping at any depth, or position of an element of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRows:
    """Rule for splitting the tensors of a batch into microbatches along dim 0 (rows).

    Tensors named in ``whole`` are not split. Tensors at the paths in ``learnt`` are not split either, because in an
    example their leading dim was not the number of rows.
    """

    whole: frozenset[Name] = frozenset()
    learnt: frozenset[BatchPath] = frozenset()
    """Paths of tensors that have another leading dim than the number of rows in the example."""

    @staticmethod
    def of(whole: Name | Sequence[Name], example: Batch, micro: int) -> "BatchRows":
        """Returns the rule for batches like ``example``, a microbatch of ``micro`` rows.

        Tensors in ``whole`` are not split. If any tensor in ``example`` has leading dim ``micro``, tensors with another
        leading dim are not split either; otherwise all other tensors are split.
        """
        leading = {path: tensor.shape[0] for path, tensor in tensors_by_path(example) if tensor.ndim}
        others = {path for path, rows in leading.items() if rows != micro} if micro in leading.values() else ()
        return BatchRows(whole=frozenset((whole,) if isinstance(whole, Name) else whole), learnt=frozenset(others))

    @property
    def notes(self) -> tuple[str, ...]:
        """Startup banner's sentence about the tensors that are not split; empty if all are split."""
        whole = [f"batch[{name!r}]" for name in self.whole] + [expression(path) for path in self.learnt]
        return (f"batch: every microbatch gets the whole of {', '.join(sorted(set(whole)))}",) if whole else ()

    def is_whole(self, path: BatchPath) -> bool:
        """Returns True if the tensor at ``path`` is not split; every microbatch receives all of it."""
        named = path[0] in self.whole if path else False
        return named or path in self.learnt or any(isinstance(key, str) and key in self.whole for key in path)

    def take_microbatches(self, batch: Batch | Iterator[Batch], micro: int, count: int | None) -> list[Batch]:
        """Returns ``count`` microbatches of ``micro`` rows each, from one batch or an iterator of microbatches.

        With ``count`` None, ``batch`` must be a list of microbatches of any sizes; checks and returns it.

        Raises:
            EngineError: a tensor has a wrong number of rows, a batch has no tensors, ``batch`` has a wrong type, or an
                iterator ends before ``count`` items.
        """
        if count is None:
            return self._listed(batch)
        if isinstance(batch, Iterator):
            return self._pull(batch, micro, count)
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise EngineError(
                f"the batch is a {type(batch).__name__}; give a tensor, tuple, dict or iterator of microbatches "
                "(of a DataLoader: iter(loader), made once)."
            )
        rows = micro * count
        self._check(batch, rows, f"micro x accumulation = {micro} x {count} = {rows}")
        return [self.take_rows(batch, index * micro, micro) for index in range(count)]

    def split(self, batch: Batch, micro: int) -> list[Batch]:
        """Splits a batch into microbatches of ``micro`` rows; the last one may have fewer.

        Raises:
            EngineError: the batch has no row, or its tensors have different numbers of rows.
        """
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise EngineError(f"the batch is a {type(batch).__name__}; give a tensor, tuple or dict.")
        rows = self.count(batch)
        if not rows:
            raise EngineError("the batch has no row; give tensors with at least one row along dim 0.")
        self._check(batch, rows, str(rows))
        return [self.take_rows(batch, start, micro) for start in range(0, rows, micro)]

    def count(self, batch: Batch) -> int:
        """Returns the batch's number of rows; 0 if no tensor is split."""
        cut = (tensor for path, tensor in tensors_by_path(batch) if tensor.ndim and not self.is_whole(path))
        return next((tensor.shape[0] for tensor in cut), 0)

    def whole_names(self, batch: Batch) -> list[str]:
        """Returns expressions such as ``batch['key']`` for the tensors that are not split, except 0-dim tensors."""
        return [expression(path) for path, tensor in tensors_by_path(batch) if tensor.ndim and self.is_whole(path)]

    def take_rows(self, batch: Batch, start: int, count: int) -> Batch:
        """Returns a copy of the batch with ``count`` rows, from row ``start``, of each split tensor; other tensors stay
        whole.
        """

        def cut(path: BatchPath, tensor: Tensor) -> Tensor:
            return tensor[start : start + count] if tensor.ndim and not self.is_whole(path) else tensor

        return change_tensors(batch, cut)

    def _listed(self, batch: Batch) -> list[Batch]:
        if not isinstance(batch, list):
            raise EngineError(
                f"the batch is a {type(batch).__name__}, but with uneven_microbatches each data rank passes a list of "
                "its microbatches; give a list, which is empty on a rank without rows."
            )
        for index, item in enumerate(batch):
            rows = self.count(item)
            if not rows:
                raise EngineError(
                    f"microbatch {index} of the list has no row; give each microbatch tensors with at least one row "
                    "along dim 0, and an empty list to a rank without rows."
                )
            self._check(item, rows, str(rows))
        return list(batch)

    def _pull(self, items: Iterator[Batch], micro: int, count: int) -> list[Batch]:
        pulled: list[Batch] = []
        for item in items:
            self._check(item, micro, f"train_micro_batch_size_per_gpu = {micro}")
            pulled.append(item)
            if len(pulled) == count:
                return pulled
        raise EngineError(
            f"the iterator ended after {len(pulled)} of {count} microbatches; a step needs "
            f"gradient_accumulation_steps = {count} of them: give a longer iterator or a new one."
        )

    def _check_names(self, batch: Batch) -> None:
        """Refuses a name that is nearly a name of the batch; an absent name may belong to another batch (pictures)."""
        found = {key for path, _ in tensors_by_path(batch) for key in path}
        for name in self.whole - found:
            near = get_close_matches(str(name), map(str, found - self.whole), 1)
            if near:
                raise EngineError(
                    f"the argument whole has {name!r}, but the batch has no tensor of that name; did you mean "
                    f"whole=[{near[0]!r}]?"
                )

    def _check(self, batch: Batch, rows: int, rule: str) -> None:
        self._check_names(batch)
        cut = [(path, t) for path, t in tensors_by_path(batch) if t.ndim and not self.is_whole(path)]
        if not cut:
            raise EngineError(f"the batch has no tensor with a leading dim; give tensors of {rule} rows.")
        for path, tensor in cut:
            if tensor.shape[0] != rows:
                name = path[-1] if path else "..."
                raise EngineError(
                    f"{expression(path)} has leading dim {tensor.shape[0]}, but a data rank's share has {rule} rows; "
                    "change the loader or the sizes in the configuration; if the tensor has no rows of the batch, pass "
                    f"whole=[{name!r}] to engine.initialize (or with engine_config), so that every microbatch gets all "
                    "of it."
                )
