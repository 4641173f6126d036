"""Replay of routers: the experts that another engine has chosen for each position, in place of a router's own choice.

A batch has them in ``routed_experts`` [rows, positions, layers, k], integers as vLLM and SGLang return them; where an
entry is -1, the router chooses itself. The model's own formula computes the weights of these experts from
its scores.

    forward       routers read the entry of the running microbatch
    backward      a block that runs again reads the entry of its forward, or of the microbatch of the backward
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import EngineError
from engine.parallel.comm.comm import Comm
from engine.parallel.experts.router_choice import OtherChoice, RouterChoice
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.program.batch import Batch
from engine.program.batch_rows import BatchRows

KEY = "routed_experts"
"""Key of the expert indices in a batch."""
_NOTE = "takes the experts of each row from the batch, if it has them (router_replay)"


class RouterReplay:
    """Replayer and recorder of routers' expert choices. It replays the batch's entry ``routed_experts``, if there is
    one, and records choices in the context of :meth:`recording`.

    Args:
        routers: routers of the model in order, each with the index of its layer.
        layers: number of layers of the model, including layers without experts.
        rows: rule that finds the number of rows of a batch.
    """

    def __init__(self, routers: Sequence[tuple[RouterChoice, int]], layers: int, rows: BatchRows) -> None:
        self._routers, self._layers, self._rows = tuple(routers), layers, rows
        self._now: tuple[Tensor | None, int] = (None, 0)
        """Entry of the microbatch whose forward ran last, and its number of rows."""
        self._runs = False
        """A forward runs, or a block runs again with a known entry."""
        self._traces = False
        """Forwards are traced: routers choose, and nothing is recorded."""
        self._waiting: list[bool] = []
        """Forwards with a graph since the last backward: True if the batch has an entry."""
        self._recorded: dict[str, list[Tensor]] | None = None
        """Choices of each router in the forwards so far [rows, positions, k]; None: they are not recorded."""
        self._seen: dict[str, Tensor] = {}
        """Choices in the running forward; a block that sends rows to experts runs twice in it."""

    def install(self, model: nn.Module, patches: ForwardPatches) -> None:
        """Wraps the forwards of all routers of ``model``, to use or record expert choices."""
        for place, (choice, _) in enumerate(self._routers):
            module = model.get_submodule(choice.router)
            patches.wrap_forward(module, PatchLayer.EXPERTS, self._wrapped(place, module.forward), _NOTE)

    def _wrapped(self, place: int, own: Callable[..., Any]) -> Callable[..., Any]:
        choice, _ = self._routers[place]

        def forward(*args: Any, **kwargs: Any) -> Any:
            given, recorded = self._given(place), self._recorded
            if given is None and (recorded is None or not self._runs):
                return own(*args, **kwargs)

            def record(numbers: Tensor) -> None:
                self._seen[choice.router] = numbers.reshape(self._now[1], -1, choice.chosen).to(torch.int32)

            with OtherChoice(choice, given, record if recorded is not None else None):
                return own(*args, **kwargs)

        return forward

    def _given(self, place: int) -> Tensor | None:
        """Returns the numbers [T, k] of a router's rows; None: it chooses itself.

        Raises:
            EngineError: the router runs again, and several forwards may be the one.
        """
        if not self._runs:
            if torch._C._current_graph_task_id() == -1:
                return None  # a call of the model outside of the engine
            if len(self._waiting) > 1 and any(self._waiting):
                raise EngineError(
                    "a backward goes through several forwards with routed_experts, and blocks that the model's own "
                    "gradient checkpointing runs again cannot be matched to one of them; turn that checkpointing off "
                    'and set activation_checkpointing {"mode": "full"}, or call backward after each forward.'
                )
        entry = self._now[0]
        if entry is None:
            return None
        choice, layer = self._routers[place]
        numbers = entry[:, :, place if entry.shape[2] == len(self._routers) else layer]
        return numbers.reshape(-1, choice.chosen)

    # ------------------------------------------------------------------ forwards and backwards

    @contextmanager
    def forward(self, batch: Batch) -> Iterator[None]:
        """Returns a context for the forward of ``batch``, in which routers use its ``routed_experts``, if any."""
        if self._traces:
            yield
            return
        before, self._now = (self._now, self._runs), self._entry(batch)
        self._waiting += [self._now[0] is not None] * torch.is_grad_enabled()
        self._runs = True
        try:
            yield
        finally:
            self._runs = before[1]
            if self._recorded is not None:
                for router, numbers in self._seen.items():
                    self._recorded.setdefault(router, []).append(numbers)
            self._seen = {}
            if not torch.is_grad_enabled():
                self._now = before[0]

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Returns a context for a trace, in which routers make their own choices and nothing is recorded."""
        before, self._traces = self._traces, True
        try:
            yield
        finally:
            self._traces = before

    def begin_backward(self, batch: Batch) -> None:
        """Selects ``batch["routed_experts"]`` for the backward of ``batch``, which may recompute blocks."""
        self._now, self._waiting = self._entry(batch), []

    def end_backward(self) -> None:
        """Clears the list of forwards that await a backward, which serves to refuse ambiguous recomputation."""
        self._waiting = []

    def again(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that opens a context for recomputing blocks in backward. Call ``again`` in the forward.

        In the context, routers use ``routed_experts`` of the batch of that forward, and nothing is recorded.
        """
        now = self._now

        @contextmanager
        def running() -> Iterator[None]:
            before = self._now, self._runs, self._recorded
            self._now, self._runs, self._recorded = now, True, None
            try:
                yield
            finally:
                self._now, self._runs, self._recorded = before

        return running

    def _entry(self, batch: Batch) -> tuple[Tensor | None, int]:
        return _entry_of(batch), self._rows.count(batch)

    # ------------------------------------------------------------------ checks

    def check(self, batch: Batch) -> None:
        """Checks the entry ``routed_experts`` of ``batch``, if there is one; synchronizes with the device.

        Raises:
            EngineError: the entry has a wrong shape or number of layers, an invalid expert index, an expert twice for
                one token, or -1 for only some experts of a token.
        """
        entry = _entry_of(batch)
        if entry is None:
            return
        chosen, many = self._routers[0][0].chosen, len(self._routers)
        wanted = f"[rows, positions, {many}{'' if many == self._layers else f' or {self._layers}'} layers, {chosen}]"
        if not isinstance(entry, Tensor) or entry.is_floating_point() or entry.dtype is torch.bool or entry.ndim != 4:
            shown = f"{entry.dtype} {list(entry.shape)}" if isinstance(entry, Tensor) else f"a {type(entry).__name__}"
            raise EngineError(f"batch['{KEY}'] is {shown}; give a tensor of integers {wanted}, -1 for no choice.")
        if entry.shape[2] not in (many, self._layers) or entry.shape[3] != chosen:
            raise EngineError(
                f"batch['{KEY}'] is {list(entry.shape)}, but {many} layers of the model have routers, and each chooses "
                f"{chosen} experts for a position; give {wanted}."
            )
        tokens = batch.get("input_ids")
        if isinstance(tokens, Tensor) and tokens.shape[:2] != entry.shape[:2]:
            raise EngineError(
                f"batch['{KEY}'] has {list(entry.shape[:2])} rows and positions, but input_ids has "
                f"{list(tokens.shape[:2])}; give one entry for each token, -1 for no choice."
            )
        for place, (choice, layer) in enumerate(self._routers):
            self._check_layer(choice, entry[:, :, place if entry.shape[2] == many else layer])

    @staticmethod
    def _check_layer(choice: RouterChoice, numbers: Tensor) -> None:
        if not numbers.numel():
            return
        low, high = int(numbers.min()), int(numbers.max())
        if low < -1 or high >= choice.experts:
            raise EngineError(
                f"batch['{KEY}'] has {low if low < -1 else high} for {choice.router}, which chooses among "
                f"{choice.experts} experts; give numbers from 0 to {choice.experts - 1}, -1 for no choice."
            )
        ordered = numbers.sort(-1).values
        left = ordered < 0
        if bool(((left.any(-1) & ~left.all(-1)) | ((ordered.diff(dim=-1) == 0) & ~left[..., 1:]).any(-1)).any()):
            raise EngineError(
                f"batch['{KEY}'] has, for {choice.router}, a position with an expert twice or with -1 in only some of "
                f"its {choice.chosen} entries; give each position {choice.chosen} different experts, or -1 in all "
                f"{choice.chosen} entries."
            )

    # ------------------------------------------------------------------ recording

    @contextmanager
    def recording(self) -> Iterator[Mapping[str, list[Tensor]]]:
        """Opens a context that yields a dict by router name; forwards in the context add the routers' choices to it.

        An entry has one int32 tensor [rows, positions, experts per token] for each forward.
        """
        self._recorded = {}
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def joined(self, recorded: Mapping[str, list[Tensor]], rows: int, comm: Comm, device: torch.device) -> Tensor:
        """Returns, on every rank, the recorded choices of all routers, also of routers on other pipeline stages.

        The result is int32 [``rows``, positions, layers with routers, experts per token]. ``recorded``: this rank's
        choices by router name from :meth:`recording`, one tensor per microbatch, to be concatenated. ``rows``: rows of
        the batch. Makes two all-reduces over pp, label "routing".
        """
        positions = torch.tensor([each.shape[1] for found in recorded.values() for each in found[:1]][:1] or [0])
        positions = positions.to(device)
        comm.all_reduce(positions, "pp", "routing", "max").wait()
        shape = (rows, int(positions), len(self._routers), self._routers[0][0].chosen)
        made = torch.full(shape, -1, dtype=torch.int32, device=device)
        for place, (choice, _) in enumerate(self._routers):
            found = recorded.get(choice.router)
            if found is not None:
                made[:, :, place] = torch.cat(found)[:rows]
        comm.all_reduce(made, "pp", "routing", "max").wait()
        return made


def _entry_of(batch: Batch) -> Any:
    return batch.get(KEY) if isinstance(batch, Mapping) else None
