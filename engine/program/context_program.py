"""Program of a rank that computes a part of the positions of every sequence (context parallelism)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec

from engine.errors import EngineError
from engine.parallel.context.balance import WorkBalance, work_of_documents
from engine.parallel.context.choose import AskedMethod
from engine.parallel.context.recurrence.followed import ContextPlan
from engine.parallel.context.recurrence.placed import PlacedTensor
from engine.parallel.context.recurrence.placed_rules import gathered_value
from engine.parallel.context.rows.rowwise import RowwiseModule, running_rowwise
from engine.parallel.context.sequences import ContextOfSequences, SequenceEntry
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Sets
from engine.parallel.tensor.global_tensor.redistribute import gradient_to_owner
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.parallel.trace.model_trace import ModelTrace
from engine.parallel.trace.torch_function import map_leaves, plain_leaves
from engine.program.batch import Batch, tensors_by_path
from engine.program.loss import WeightedLoss
from engine.program.program import ForwardResult, Program


@dataclass(frozen=True, slots=True)
class ContextProgram(Program):
    """Model and loss function under context parallelism, in which each rank computes a part of every sequence."""

    sequences: ContextOfSequences | None = field(default=None, compare=False)
    staged: bool = False
    """True if a forward runs one pipeline stage, so that the layer that reads the batch may be on another rank."""
    plan: ContextPlan = field(default_factory=ContextPlan)
    local: tuple[RowwiseModule, ...] = ()
    """Modules that a trace runs on this rank's positions as plain tensors; in a run they have been patched."""

    def forward(self, microbatch: Batch) -> ForwardResult:
        """Returns output and loss of one microbatch.

        All context ranks get the same loss; only the first rank's loss contributes gradients in backward.
        """
        done = Program.forward(self, microbatch)
        total = _plain(done.loss.sum)
        if total.requires_grad:
            total = gradient_to_owner(total, self._sequences.axis)
        metrics = tuple(_plain(each) for each in done.loss.metrics)
        return ForwardResult(
            done.output, done.loss._replace(sum=total, weight=_plain(done.loss.weight), metrics=metrics)
        )

    def planned_loss(self, microbatch: Batch) -> WeightedLoss:
        """Returns the loss of an example microbatch for planning, as :meth:`Program.planned_loss` does."""
        loss = Program.planned_loss(self, microbatch)
        return WeightedLoss(_plain(loss.sum), _plain(loss.weight))

    def output(self, microbatch: Batch) -> Any:
        """Returns the model's output for one microbatch, with sequences gathered over the axis "cp"."""
        return gather_sequences(Program.output(self, microbatch))

    def local_modules(self) -> AbstractContextManager[None]:
        """Returns a context, used for traces, in which position-wise modules compute only this rank's positions."""
        return running_rowwise(self.model, self.local)

    def on_shapes(self) -> AbstractContextManager[None]:
        """Returns a context in which operations over the axis "cp" compute shapes only, without communication."""
        return self._sequences.axis.dry_run()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the startup banner about attention methods, each rank's attention work, and functions that gather
        whole sequences.
        """
        gathers = self._sequences.gathers
        attention = (*self._sequences.attention.notes, *self._on_balance())
        if not gathers:
            return attention
        shown = ", ".join(f"{name} ({times})" for name, times in sorted(gathers.items(), key=lambda one: -one[1])[:4])
        return (*attention, f"parallel.context: sequences are gathered in each forward by {shown}")

    @property
    def balance(self) -> WorkBalance:
        """Attention work of each context rank in the last forward, in (query, key) pairs per head; empty without packed
        documents.
        """
        return self._sequences.balance

    def _on_balance(self) -> Iterator[str]:
        """Yields lines for the banner about the attention work of the ranks."""
        balance = self.balance
        if self.plan.in_blocks and self._sequences.attention.used:
            yield (
                "parallel.context: ranks have neighbouring positions, because a state passes along them; attention by "
                'another method than "heads" has more work on the later ranks'
            )
        elif not self.plan.by_work and balance.pairs:
            yield (
                "parallel.context: packed documents keep two chunks a rank, because pipeline stages send or pad other "
                "positions than those of the batch"
            )
        if balance.pairs:
            yield (
                f"parallel.context: the documents of the example have {max(balance.pairs):,} pairs of query and key a "
                f"head on the rank with the most, {balance.most_over_mean:.2f} times the mean"
            )

    def keeps_positions(self, trace: ModelTrace) -> bool:
        """Returns True if all sharded tensors passed between modules of ``trace`` contain, on each rank, the same
        sequence positions as this rank's part of the batch.
        """
        last = max((call.event for call in trace.calls), default=0)
        specs = [call.output.spec for call in trace.calls]
        specs += [glue.output.spec for glue in trace.glue if glue.event < last]
        return all(self._sequences.is_plain(sets) for spec in specs for sets in _sets_in(spec, self._sequences))

    def check_trace(self, trace: ModelTrace) -> None:
        """Checks that tensors passed between modules of the traced forward ``trace`` contain, on each rank, the same
        sequence positions as this rank's part of the batch.

        Does nothing unless packed documents are divided into parts of equal attention work (``plan.by_work``).

        Raises:
            EngineError: a tensor has other positions.
        """
        if self.plan.by_work and not self.keeps_positions(trace):
            raise EngineError(
                "for this batch, parallel.context divides a tensor between modules at other sequence positions than "
                "the batch itself, and pipeline stages support such a tensor only if example_batch has one too; pass a "
                "batch of these shapes as example_batch to engine.initialize, or set parallel.pipeline to 1."
            )

    @property
    def _sequences(self) -> ContextOfSequences:
        assert self.sequences is not None, "set by with_context"
        return self.sequences

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output with sequences gathered over the axis "cp".

        A single positional argument is a batch; other arguments are passed to the model's forward. In backward, only
        the first context rank's output gradient counts.
        """
        moved = self.move(args), self.move(kwargs)
        run = partial(Program.call, self, *moved[0], **moved[1])
        # the graphs of several forwards may live at once, and a recomputation knows the positions of the last one
        made = map_leaves(self._owned, self._entered(moved, run, sharing=not self.plan.halo))
        if self.plan.halo and self.plan.by_work:
            self._sequences.note_unshared()
        return made

    def _owned(self, value: Any) -> Any:
        value = _plain(value)
        needs = isinstance(value, Tensor) and value.requires_grad
        # autograd refuses to modify a view of a custom function in place, such as ``loss *= scale`` in a user's loop
        return gradient_to_owner(value, self._sequences.axis).clone() if needs else value

    def _run(self, moved: Batch, given: Batch | None = None) -> Any:
        return self._entered(moved, partial(Program._run, self, moved, given), given)

    def _entered(self, moved: Any, run: Callable[[], Any], given: Any = None, sharing: bool = True) -> Any:
        """Returns the result of ``run``, a forward that reads the tensors of ``moved`` as sequences.

        ``given``: the batch that was moved. ``sharing``: packed documents may be shared by work.
        """
        sequences = self._sequences
        sequences.clear()  # recomputation in the last backward has sent states too
        # a stage keeps one trace for all documents of equal lengths
        reads = not (self.staged and sequences.axis.dry)
        named = ((str(path[-1]), tensor) for path, tensor in tensors_by_path(moved if given is None else given) if path)
        sequences.begin(work_of_documents(named if reads else ()), sharing and self.plan.by_work)
        sequences.running = True
        try:
            with SequenceEntry(sequences, (tensor for _, tensor in tensors_by_path(moved))) as entry:
                made = run()
                if any(type(leaf) is PlacedTensor for leaf in plain_leaves(made)):
                    made = _gather_placed(made)  # before the relay forgets the messages that their backward joins
        finally:
            sequences.running = False
        sequences.clear()
        if not entry.found and (self._sequences.axis.dry or not self.staged):
            raise EngineError(
                "parallel.context shards token ids [B, S] that an embedding reads, or rows [B, S, H] that a linear "
                "layer reads, but this model reads no batch tensor in such a layer; set parallel.context to 1."
            )
        return made


def with_context(
    program: Program,
    axis: TensorAxis,
    asked: AskedMethod,
    plan: ContextPlan,
    *,
    staged: bool = False,
    unit: int = 1,
) -> Program:
    """Returns a copy of ``program`` with context parallelism over ``axis``, or ``program`` itself for one rank.

    Args:
        asked: configured attention method.
        plan: results of a trace of the model, such as modules that get full sequences.
        staged: True if a forward runs one pipeline stage only.
        unit: each rank's number of positions is a multiple of this number.
    """
    if axis.size == 1:
        return program
    own = {each.name: getattr(program, each.name) for each in fields(Program)}
    sequences = ContextOfSequences(axis, asked.method, unit, plan.in_blocks, asked.rates)
    return ContextProgram(**own, sequences=sequences, staged=staged, plan=plan)


def gather_sequences(output: Any) -> Any:
    """Gathers every tensor in ``output`` that is sharded along sequence positions; returns ``output`` with full
    tensors.
    """
    return map_leaves(_plain, output)


def _gather_placed(output: Any) -> Any:
    """Sends every tensor in ``output`` that a single context rank stores to all ranks; returns ``output`` with them."""
    return map_leaves(lambda leaf: _plain(leaf) if type(leaf) is PlacedTensor else leaf, output)


def _plain(value: Any) -> Any:
    return gathered_value(value, "output")


def _sets_in(spec: TreeSpec, context: ContextOfSequences) -> Iterator[Sets]:
    """Yields the sharding of each global tensor of ``context`` in a traced output."""
    if spec.type is GlobalTensor and spec.context[2] is context:
        yield spec.context[1]
    for child in spec.children():
        yield from _sets_in(child, context)
