"""Blocks with a list of equal expert modules, which their own code calls with rows of its choice: they are asked twice.

    pass 1    the block's forward; an expert notes the rows that it is asked for and answers zeros
    exchange  rows are sent to the ranks of their experts, which compute them, and the answers are sent back
    pass 2    the block's forward again, from the same random state and buffers; experts give their answers

The gate and the code around the experts are computed twice, so any loop over experts will do. Gradients pass through
the rows of pass 1 and the answers of pass 2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.activation_checkpointing.second_run import BlockState
from engine.parallel.comm.comm import Comm
from engine.parallel.experts.dispatch import AXIS, COMBINE, DISPATCH, ROUTING, exchange
from engine.parallel.experts.forms import ListedExperts, expert_bounds
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.placeholders import is_without_content
from engine.parallel.model.rng_streams import HostState, generators_of
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.tp_axis import TensorAxis


class Pass(Enum):
    """Phase of a block's forward, which runs twice: first to collect the experts' input rows, then to use their
    results.
    """

    OUTSIDE = auto()
    """No pass runs: calls of experts by other code raise."""
    ASK = auto()
    """First run: experts store their rows and return zeros."""
    ANSWER = auto()
    """Second run: experts return the results of the stored rows."""
    TRACE = auto()
    """Trace of shapes: experts compute their own rows."""


@dataclass(eq=False)
class _Expert:
    """Calls of one expert in the passes of its block."""

    module: nn.Module
    own: Callable[[Tensor], Tensor]
    rows: list[Tensor] = field(default_factory=list)
    """Rows [n, H] of each call of pass 1."""
    answers: list[Tensor] = field(default_factory=list)
    """Answers to the calls of pass 1, in their order."""
    answered: int = 0
    """Number of calls that pass 2 has made."""


def share_listed(
    model: nn.Module,
    found: Sequence[ListedExperts],
    comm: Comm,
    tensor: TensorAxis,
    patches: ForwardPatches,
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Applies expert parallelism to the blocks in ``found``, by two runs of each forward.

    The first run collects the experts' input rows, which are sent to the ranks of the experts; the second uses their
    results. ``tensor``: tensor-parallel axis. ``patches``: list that records the changes. ``uncounted``: returns a
    context in which forwards do not count the rows of experts; the first run enters it, so that rows are counted once.
    """
    for each in found:
        block = SharedList(each, model, comm, tensor, uncounted)
        block.install(model, patches)


class SharedList:
    """Block with a list of experts that are distributed over the ranks of the axis "ep"."""

    def __init__(
        self, found: ListedExperts, model: nn.Module, comm: Comm, tensor: TensorAxis,
        uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:  # fmt: skip
        self._uncounted = uncounted
        self._found, self._comm, self._tensor = found, comm, tensor
        block = model.get_submodule(found.block)
        self._own: Callable[..., Any] = block.forward
        self._state, self._pass = BlockState(block), Pass.OUTSIDE
        modules = [model.get_submodule(name) for name in found.names]
        self._experts = [_Expert(module, module.forward) for module in modules]
        self._bounds = expert_bounds(len(modules), comm.grid.size(AXIS))
        self._index = comm.grid.index(AXIS)
        self._dtypes: dict[object, torch.dtype] = {}
        """Dtype of answers, by that of rows and of autocast."""
        self._stream = torch.get_default_dtype()
        """Dtype of rows."""
        self._differences: list[Tensor] = []
        """Differences between the rows of both passes, by call."""
        self._answers: Tensor | None = None
        """Answers to all rows of this rank."""

    def install(self, model: nn.Module, patches: ForwardPatches) -> None:
        """Wraps the forwards of the experts in ``model`` and the forward of their block."""
        count, ranks = self._bounds[self._index + 1] - self._bounds[self._index], self._comm.grid.size(AXIS)
        for number, expert in enumerate(self._experts):
            held = "computes rows of" if expert in self._held else "is held by another of"
            note = f"{held} {ranks} ranks (parallel.expert)"
            patches.wrap_forward(expert.module, PatchLayer.EXPERTS, partial(self._call, number), note)
        note = f"runs twice, to send rows to {count} of its {len(self._experts)} experts here and to other ranks"
        block = model.get_submodule(self._found.block)
        patches.wrap_forward(block, PatchLayer.EXPERTS, self.forward, f"{note} (parallel.expert)")

    @property
    def _held(self) -> list[_Expert]:
        """The experts of this rank."""
        return self._experts[self._bounds[self._index] : self._bounds[self._index + 1]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's forward twice and returns the output of the second run.

        Between the runs, rows and expert results are exchanged over the axis "ep".

        Raises:
            EngineError: the second run calls the experts with other rows than the first run.
        """
        if self._tensor.dry or any(map(is_without_content, pytree.tree_leaves((args, kwargs)))):
            with self._passing(Pass.TRACE):
                return self._own(*args, **kwargs)
        drawn = [(generator, generator.get_state()) for generator in generators_of(_device(args, kwargs))]
        host = HostState.take()

        def ask() -> None:
            with self._passing(Pass.ASK), self._uncounted():
                self._own(*_copied(args), **_copied(kwargs))

        def answer() -> Any:
            self._exchange()
            for generator, state in drawn:
                generator.set_state(state)
            host.put()
            with self._passing(Pass.ANSWER):
                return self._joined(self._own(*args, **kwargs))

        try:
            out = self._state.run_twice(ask, answer, (*args, *kwargs.values()))
            if any(expert.answered < len(expert.answers) for expert in self._experts) or self._asked_others():
                raise self._differs()
        finally:
            for expert in self._experts:
                expert.rows, expert.answers, expert.answered = [], [], 0
            self._answers, self._differences = None, []
        return out

    def _joined(self, out: Any) -> Any:
        """Returns the output, whose gradient reaches the exchange also if the output has none of its answers."""
        if self._answers is None or len(self._answers) or not self._answers.requires_grad:
            return out
        leaves, spec = pytree.tree_flatten(out)
        first = next(
            (i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()), None
        )
        if first is not None:
            leaves[first] = leaves[first] + self._answers.sum().to(leaves[first].dtype)
        return pytree.tree_unflatten(leaves, spec)

    @contextmanager
    def _passing(self, which: Pass) -> Iterator[None]:
        self._pass = which
        try:
            yield
        finally:
            self._pass = Pass.OUTSIDE

    def _call(self, number: int, x: Tensor) -> Tensor:
        """Stands in for the forward of expert ``number``."""
        expert, rows = self._experts[number], x.reshape(-1, x.shape[-1])
        if self._pass is Pass.TRACE:
            return (expert if expert in self._held else self._held[0]).own(x)
        if self._pass is Pass.ASK:
            self._stream = x.dtype
            expert.rows.append(rows)
            return x.new_zeros(*x.shape[:-1], self._found.out, dtype=self._dtype(x))
        if self._pass is Pass.ANSWER:
            call, expert.answered = expert.answered, expert.answered + 1
            if call >= len(expert.answers) or len(expert.answers[call]) != len(rows):
                raise self._differs()
            self._note_difference(rows, expert.rows[call])
            return expert.answers[call].view(*x.shape[:-1], self._found.out)
        raise EngineError(
            f"{self._found.names[number]} was called outside the forward of {self._found.block}, but with "
            "parallel.expert only this forward sends rows to the ranks of the experts; call "
            f"{self._found.block} instead, or leave parallel.expert out."
        )

    @torch.no_grad()
    def _note_difference(self, rows: Tensor, before: Tensor) -> None:
        """Notes the sums [2] of the differences between the rows of both passes, and of the rows."""
        sums = [(rows - before).abs().sum(dtype=torch.float32), before.abs().sum(dtype=torch.float32)]
        self._differences.append(torch.stack(sums))

    def _asked_others(self) -> bool:
        """Returns True if the rows of pass 2 are not those of pass 1; roundings of kernels may differ."""
        if not self._differences:
            return False
        difference, size = torch.stack(self._differences).sum(0).tolist()
        return bool(difference > 0.05 * size)  # False with NaN: a diverged model asks for no other rows

    def _differs(self) -> EngineError:
        return EngineError(
            f"parallel.expert runs the forward of {self._found.block} twice with equal arguments, random numbers and "
            "buffers, but the second run passed its experts different rows; compute these rows from the arguments of "
            "the forward only, or leave parallel.expert out."
        )

    def _exchange(self) -> None:
        """Sends the rows of pass 1 to the ranks of their experts, and fills in the answers."""
        sizes = [[len(rows) for rows in expert.rows] for expert in self._experts]
        own = [len(each) and sum(each) + 1 for each in sizes]  # 0: not called
        width, ranks = self._bounds[1] - self._bounds[0], len(self._bounds) - 1
        padded = torch.zeros(ranks, width, dtype=torch.int64)
        for rank, (start, stop) in enumerate(zip(self._bounds, self._bounds[1:], strict=False)):
            padded[rank, : stop - start] = torch.tensor(own[start:stop])
        called = self._told(padded)
        counts = (called - 1).clamp(min=0)
        gives = [sum(map(sum, sizes[start:stop])) for start, stop in zip(self._bounds, self._bounds[1:], strict=False)]
        gets = [int(row.sum()) for row in counts]
        asked = [rows for expert in self._experts for rows in expert.rows]
        asked = asked or [torch.zeros(0, self._found.width, dtype=self._stream, device=self._device)]
        # a rank whose experts got no rows joins the backward too, and one that asked for none
        ties = (torch.zeros((), device=self._device, requires_grad=True),) if torch.is_grad_enabled() else ()
        (got,) = exchange((torch.cat(asked),), gives, gets, self._comm, DISPATCH, ties)
        made = self._computed(got, called, counts)
        unread = (got,) if ties and not len(got) else ()  # no answer leads to the rows that this rank has sent
        (back,) = exchange((made,), gets, gives, self._comm, COMBINE, (*ties, *unread))
        self._answers = back
        each_call = [size for each in sizes for size in each]  # unsafe: the block may write into its answers in place
        parts = list(torch.unsafe_split_with_sizes(back, each_call)) if each_call else []
        for expert, each in zip(self._experts, sizes, strict=True):
            expert.answers, parts = parts[: len(each)], parts[len(each) :]

    def _told(self, padded: Tensor) -> Tensor:
        """Returns, for each rank and each expert of this rank, 1 more than its number of rows; 0: it was not called."""
        given = padded.view(-1).to(self._device)
        table = given.new_empty(len(padded), given.numel())
        self._comm.all_gather(table.view(-1), given, AXIS, ROUTING).wait()
        width = padded.shape[1]
        return table[:, self._index * width : (self._index + 1) * width].cpu()

    @property
    def _device(self) -> torch.device:
        return next(self._held[0].module.parameters()).device

    def _computed(self, got: Tensor, called: Tensor, counts: Tensor) -> Tensor:
        """Returns the answers to rows ``got``, which are ordered by rank and expert, in the same order."""
        ranks, parts = len(counts), torch.split(got, counts.reshape(-1).tolist())
        width, answers = counts.shape[1], dict[int, Tensor]()
        for number, expert in enumerate(self._held):
            if not called[:, number].any():
                continue
            mine = range(number, ranks * width, width)
            out = expert.own(torch.cat([parts[index] for index in mine]))
            if isinstance(out, GlobalTensor):  # layers of the expert that tensor ranks cut shard rows of their results
                out = full(out, "answers are sent to other ranks as whole rows")
            answers.update(zip(mine, torch.split(out, [len(parts[index]) for index in mine]), strict=True))
        ordered = [answers[index] for index in sorted(answers)]
        if not ordered:
            return got.new_zeros(0, self._found.out, dtype=self._dtype(got))
        return torch.cat(ordered)

    @torch.no_grad()
    def _dtype(self, x: Tensor) -> torch.dtype:
        """Returns the dtype of an expert's result for rows like ``x``."""
        kind = x.device.type
        key = (x.dtype, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind))
        if key not in self._dtypes:
            self._dtypes[key] = self._held[0].own(x.new_zeros(0, x.shape[-1])).dtype
        return self._dtypes[key]


def _copied(given: Any) -> Any:
    """Returns ``given`` with copies of its tensors, into which a first pass may write."""
    return pytree.tree_map(_copy, given)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _device(args: Any, kwargs: Any) -> torch.device:
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
