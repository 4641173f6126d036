"""One case on one set of ranks: its inputs, and every implementation of the operation."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap.cases import OverlapCase
from benchmarks.overlap.places import SPARE_PROCESSORS, Place, Turns
from benchmarks.overlap.virtual_axis import VirtualAxis
from engine.kernels.device import is_host
from engine.kernels.gpu.launch_shapes import Tile
from engine.kernels.gpu.matmul import Follows, launch_matmul
from engine.kernels.gpu.overlap.launches import (
    KernelCall,
    launch_gather_product,
    launch_product_scatter,
    launch_sum_slots,
    signals_of,
)
from engine.parallel.comm.comm import Pending
from engine.parallel.comm.symmetric_memory import SlotSizes, SymmetricBuffer
from engine.parallel.tensor.overlap.chunked_matmul import MOST_PIECES
from engine.parallel.tensor.overlap.fused_moves import copied_rows, leave_rows, signal_numbers
from engine.parallel.tensor.overlap.fused_sum import sum_in_turns
from engine.parallel.tensor.overlap.moves import Route, gather_product, product_scatter
from engine.parallel.tensor.tp_axis import TensorAxis

LABEL = "benchmark"
GATED_EPOCH, SENT_EPOCH = 1, 2
"""Epochs with permanent signals and slots of their own."""
Run = Callable[[], Sequence[Tensor]]


class OverlapTrial:
    """Inputs [1, L, K] (for a scatter or sum [1, W, L, K]) and matrices [K, N] of this process's ranks, with all
    implementations.
    """

    def __init__(self, case: OverlapCase, place: Place) -> None:
        self.case, self.place = case, place
        tiles = [Tile(*tile, parts=2, described=False) for tile in case.tiles]
        most = max(signals_of(1, case.sent_rows, max(case.sizes.columns, case.sizes.depth), tile) for tile in tiles)
        sizes = SlotSizes(ranks=case.ranks, capacity=case.capacity, most=most)
        self.buffers, self._gates = place.open(sizes), place.open(sizes)
        gathers = case.operation == "gather_product"
        shape = (1, case.rows, case.sizes.depth) if gathers else (1, case.ranks, case.rows, case.sizes.depth)
        self.inputs = [torch.empty(shape, dtype=case.dtype, device=place.device) for _ in place.own]
        layers = torch.empty(
            len(place.own), case.sizes.columns, case.sizes.depth, dtype=case.dtype, device=place.device
        )
        self.matrices = [layer.t() for layer in layers]

    def fill(self, whole_numbers: bool, turn: int = 0) -> None:
        """Fills the inputs, differently for each rank and ``turn``; sums of integers (``whole_numbers``) are exact in
        fp32.
        """
        for rank, given, matrix in zip(self.place.own, self.inputs, self.matrices, strict=True):
            generator = torch.Generator(device=self.place.device).manual_seed(self.case.ranks * turn + rank)
            for tensor in (given, matrix):
                if whole_numbers:
                    tensor.random_(-2, 3, generator=generator)
                else:
                    tensor.normal_(generator=generator)

    def expected(self) -> list[Tensor]:
        """Returns the expected result of each rank in this process, [rows, N], from plain products and sums."""
        place, case = self.place, self.case
        if case.operation == "gather_product":
            whole = torch.cat([part[0] for part in place.of_all(self.inputs)])
            return [_rounded(whole, matrix) for matrix in self.matrices]
        products = [_rounded(x.flatten(0, 2), matrix) for x, matrix in zip(self.inputs, self.matrices, strict=True)]
        total = torch.stack(place.of_all(products)).sum(0, dtype=torch.float32).to(case.dtype)
        if case.operation == "product_sum":
            return [total for _ in place.own]
        return [total.view(case.ranks, case.rows, -1)[rank] for rank in place.own]

    def check(self) -> None:
        """Checks that no kernel timed out, and resets the status.

        Raises:
            RuntimeError: a kernel timed out; the message names rank, tile and call.
        """
        for buffer in (*self.buffers, *self._gates):
            try:
                buffer.check()
            finally:
                buffer.mailbox.status.zero_()

    # ------------------------------------------------------------------------------------------ all ranks together

    def ways(self, tile: Tile) -> dict[str, Run]:
        """Returns all implementations of the operation as functions to time."""
        made: dict[str, Run] = {"fused": partial(self._run, partial(self._fused, tile))}
        if self.case.operation == "gather_product":
            made["copied"] = partial(self._run, partial(self._copied, tile))
        if self.case.operation != "product_sum" and self._pieces > 1:
            made["chunks"] = partial(self._run, partial(self._in_pieces, self._pieces), self._pieces)
        made["collectives"] = partial(self._run, partial(self._in_pieces, 1))
        return made | self._async_tp()

    def parts(self, tile: Tile) -> dict[str, Run]:
        """Returns the functions to time besides: the product of rows that are all present, and the transfer alone."""
        self._open_gates(tile)
        made: dict[str, Run] = {
            "gated": partial(self._run, partial(self._gated, tile)),
            "product": partial(self._run, self._product),
            "transfer": partial(self._run, partial(self._transfer, self._products())),
        }
        return made | self._from_host(tile) if self.place.board is not None else made

    def _from_host(self, tile: Tile) -> dict[str, Run]:
        """A gather whose rows, but for a rank's own, come from memory of the host: over the one real link, by the copy
        engine, that a single GPU has."""
        if self.case.operation != "gather_product":
            return {}
        pins = not is_host(self.place.device)
        rows = [given.cpu().pin_memory() if pins else given.clone() for given in self.inputs]

        def turns(multiplies: bool, index: int) -> Turns:
            given, buffer = self.inputs[index], self.buffers[index]
            call = self._call(buffer, tile, SPARE_PROCESSORS)
            numbers = signal_numbers(given, buffer, call.epoch, tile.rows)
            leave_rows(given, numbers, buffer, (index, call.epoch, tile.rows))
            with buffer.copies.behind():
                for step in range(1, self.case.ranks):
                    owner = (index + step) % self.case.ranks
                    leave_rows(rows[index], numbers, buffer, (owner, call.epoch, tile.rows))
            if self._takes_turns:
                yield
            if multiplies:
                given = launch_gather_product(given, self.matrices[index], None, call, "multiply")
            buffer.copies.join()
            return given

        return {
            "from host": partial(self._run, partial(turns, True)),
            "host transfer": partial(self._run, partial(turns, False)),
        }

    def alone(self, tile: Tile) -> dict[str, Run]:
        """Returns one rank's work on the whole device: the communicating kernel without waits, and the plain
        product.
        """
        gathers = self.case.operation == "gather_product"
        own, given, matrix = self._gates[0], self.inputs[0], self.matrices[0]
        rows = given.new_empty(self.case.sizes.rows, self.case.sizes.depth).normal_()

        def communicating() -> Sequence[Tensor]:
            if gathers:
                call = KernelCall(own.mailbox, GATED_EPOCH, tile)
                return [launch_gather_product(given, matrix, None, call, "multiply")]
            launch_product_scatter(given, matrix, None, KernelCall(own.mailbox, SENT_EPOCH, tile), given.dtype)
            return []

        def plain() -> Sequence[Tensor]:
            return [launch_matmul(rows, matrix, Follows(), tile=tile)[0]]

        return {"communicating alone": communicating, "plain alone": plain}

    def first_in_turns(self, tile: Tile) -> Sequence[Tensor]:
        """Runs the fused way with each half launched for all ranks before the next, so that kernels load and memory is
        allocated without waits. For a gather also the way by copies.
        """
        if self.case.operation == "gather_product":
            self._run(partial(self._copied, tile, in_turns=True))
        return self._run(partial(self._fused, tile, in_turns=True))

    def _run(self, turns: Callable[[int], Turns], pieces: int = 1) -> Sequence[Tensor]:
        if self.place.board is not None:
            self.place.board.begin(self.inputs, pieces)
        return self.place.together([turns(index) for index in range(len(self.place.own))])

    def _call(self, buffer: SymmetricBuffer, tile: Tile, spare: int = 0) -> KernelCall:
        return KernelCall(buffer.mailbox, buffer.next_epoch(), tile, self.place.programs(spare))

    @property
    def _takes_turns(self) -> bool:
        return is_host(self.place.device) and len(self.place.own) > 1

    def _fused(self, tile: Tile, index: int, in_turns: bool = False) -> Turns:
        given, matrix, buffer = self.inputs[index], self.matrices[index], self.buffers[index]
        if self.case.operation == "product_sum":
            return (yield from sum_in_turns(given.flatten(0, 2), matrix, partial(self._call, buffer, tile)))
        call = self._call(buffer, tile)
        if self.case.operation == "product_scatter":
            launch_product_scatter(given, matrix, None, call, given.dtype)
            yield
            return launch_sum_slots(1, self.case.rows, self.case.sizes.columns, call, given.dtype)
        if not in_turns and not self._takes_turns:
            return launch_gather_product(given, matrix, None, call)
        launch_gather_product(given, matrix, None, call, "push")
        yield
        return launch_gather_product(given, matrix, None, call, "multiply")

    def _copied(self, tile: Tile, index: int, in_turns: bool = False) -> Turns:
        given, buffer = self.inputs[index], self.buffers[index]
        call = self._call(buffer, tile, SPARE_PROCESSORS)
        with copied_rows(given, buffer, call.epoch, tile.rows):
            if in_turns or self._takes_turns:
                yield
            return launch_gather_product(given, self.matrices[index], None, call, "multiply")

    @cached_property
    def _pieces(self) -> int:
        return next(n for n in range(MOST_PIECES, 0, -1) if self.case.rows % n == 0)

    def _in_pieces(self, pieces: int, index: int) -> Turns:
        given, matrix, axis = self.inputs[index], self.matrices[index], self.place.axes[index]
        route = Route(axis, LABEL, pieces)
        if self.case.operation == "gather_product":
            return gather_product(given, matrix, None, route)[0]
        if self.case.operation == "product_scatter":
            wait = product_scatter(given.flatten(1, 2), matrix, None, given.dtype, route)
            yield
            return wait()
        total, pending = start_sum(given.flatten(0, 2) @ matrix, axis)
        yield
        pending.wait()
        return total

    def _async_tp(self) -> dict[str, Run]:
        """torch's own, between GPUs."""
        if len(self.place.own) > 1 or is_host(self.place.device) or self.case.operation == "product_sum":
            return {}
        (given,), (matrix,) = self.inputs, self.matrices
        from torch.distributed import _symmetric_memory  # noqa: F401  registers the operators

        group = dist.group.WORLD
        assert group is not None
        operators = torch.ops.symm_mem

        def gather() -> Sequence[Tensor]:
            return [operators.fused_all_gather_matmul(given[0], [matrix], 0, group.group_name)[1][0]]

        def scatter() -> Sequence[Tensor]:
            return [operators.fused_matmul_reduce_scatter(given.flatten(0, 2), matrix, "sum", 0, group.group_name)]

        return {"async-TP": gather if self.case.operation == "gather_product" else scatter}

    # ---------------------------------------------------------------------------------------------------- their parts

    def _open_gates(self, tile: Tile) -> None:
        """Let all rows come in the memory of which only the gated product takes."""
        part_BLK = self.inputs[0].new_empty(1, self.case.rows, self.case.sizes.depth).normal_()

        def push(index: int) -> Turns:
            call = KernelCall(self._gates[index].mailbox, GATED_EPOCH, tile, self.place.programs())
            yield
            return launch_gather_product(part_BLK, self.matrices[index], None, call, "push")

        self._run(push)
        self.place.longest([0.0])  # all processes have launched theirs

    def _gated(self, tile: Tile, index: int) -> Turns:
        part_BLK = self.inputs[index].view(1, -1, self.case.sizes.depth)[:, : self.case.rows]
        call = KernelCall(self._gates[index].mailbox, GATED_EPOCH, tile, self.place.programs())
        yield
        return launch_gather_product(part_BLK, self.matrices[index], None, call, "multiply")

    def _product(self, index: int) -> Turns:
        yield
        return torch.mm(self._whole_rows[index], self.matrices[index])

    @cached_property
    def _whole_rows(self) -> list[Tensor]:
        """All rows that a rank multiplies."""
        shape = (self.case.sizes.rows, self.case.sizes.depth)
        return [given.new_empty(shape).normal_() for given in self.inputs]

    def _products(self) -> list[Tensor]:
        """What is summed over the ranks; a gather sums nothing."""
        if self.case.operation == "gather_product":
            return []
        shape = (self.case.ranks, self.case.rows, self.case.sizes.columns)
        return [given.new_empty(shape).normal_() for given in self.inputs]

    def _transfer(self, products: Sequence[Tensor], index: int) -> Turns:
        axis = self.place.axes[index]
        if self.case.operation == "gather_product":
            full, pending = axis.start_all_gather(self.inputs[index], LABEL)
        elif self.case.operation == "product_scatter":
            full, pending = axis.start_reduce_scatter(products[index], LABEL)
        else:
            full, pending = start_sum(products[index], axis)
        yield
        pending.wait()
        return full


def start_sum(tensor: Tensor, axis: TensorAxis) -> tuple[Tensor, Pending]:
    """Starts the sum of ``tensor`` over the ranks; returns the result, ready after the wait."""
    if isinstance(axis, VirtualAxis):
        return axis.start_sum(tensor)
    return tensor, axis.start_all_reduce(tensor, LABEL)


def _rounded(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product, rounded once to the dtype of ``rows``."""
    return (rows.float() @ matrix.float()).to(rows.dtype)


def deviating(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[float]:
    """Yields the maximum absolute difference of each result from the expected one."""
    for one, other in zip(found, wanted, strict=True):
        yield float((one.reshape(other.shape).float() - other.float()).abs().max())
