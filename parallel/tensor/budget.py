"""What the sharded layers of a model send, found from one run of the cut model on shapes.

While the pipeline's probe runs the model, it is cut to the shapes that a rank holds, over an axis that communicates
nothing and tells what it would have sent; every collective of a backward is told in the forward that asks for it.
Recomputation repeats the collectives of a forward as far as it goes.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from engine.parallel.pipeline.timeline import Timeline
from engine.parallel.tensor.axis import DryAxis, Expected
from engine.parallel.tensor.collectives import LOGITS
from engine.parallel.tensor.cuts import TensorPlan
from engine.parallel.tensor.install import install_shapes
from engine.parallel.tensor.loss_budget import LogitUse
from engine.parallel.tensor.reads import OutsideReads
from engine.parallel.traffic import Op, Tally, Traffic, sent_bytes


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of a forward and its backward."""

    module: str
    """The innermost module that was running, or the last one that had run."""
    what: Expected
    repeated: bool = False
    """Recomputation of its block makes it once more."""


class Watch:
    """Runs a model as a plan cuts it, on shapes, and notes what it would send.

    ``recomputed``: modules whose activations are recomputed, by name. Recomputation stops when the last tensor
    that backward needs is there, so a collective of a forward is repeated only if something after it saves one.
    """

    def __init__(self, model: nn.Module, plan: TensorPlan, recomputed: Mapping[str, nn.Module], tp: int) -> None:
        self._model, self._plan, self._recomputed = model, plan, recomputed
        self._axis = DryAxis(tp, self._note)
        self._sent: list[Sent] = []
        self._reads = OutsideReads(model, plan)
        self._running: list[str] = []
        self._last = ""
        self._saved = 0
        self._pending: list[tuple[int, int]] = []
        """(index of a collective, tensors saved until then) inside the running recomputed module."""
        self._partial: set[int] = set()

    @property
    def sent(self) -> tuple[Sent, ...]:
        """Of the last run, in its order."""
        return tuple(self._sent)

    @property
    def read_outside(self) -> tuple[str, ...]:
        """Cut parameters that code outside their modules reads."""
        return tuple(self._reads.names)

    @property
    def partial(self) -> frozenset[str]:
        """Whole parameters that met cut activations: each rank has a part of their gradient."""
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in self._partial)

    @property
    def used_both_ways(self) -> frozenset[str]:
        """Those that met whole activations too, in code that no style speaks of."""
        both = self._partial & self._reads.plain
        names = (name for name, p in self._model.named_parameters() if id(p) in both)
        return frozenset(names) - self._plan.partial

    @property
    def used_one_way(self) -> frozenset[str]:
        """Those that met no whole activations."""
        one = self._partial - self._reads.plain
        return frozenset(name for name, p in self._model.named_parameters() if id(p) in one)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, the model has the shapes that a tensor rank holds."""
        installed = install_shapes(self._model, self._plan, self._axis)
        try:
            yield
        finally:
            self._partial = {id(parameter) for parameter in installed.views.partial}
            installed.undo()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around one run of the model; an earlier one is forgotten."""
        self._sent.clear()
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                handles = [
                    module.register_forward_pre_hook(partial(self._enter, name)),
                    module.register_forward_hook(partial(self._exit, name)),
                ]
                for handle in handles:
                    stack.callback(handle.remove)
            stack.enter_context(saved_tensors_hooks(self._pack, lambda saved: saved))
            stack.enter_context(self._reads.watching())
            try:
                yield
            finally:
                self._running.clear()

    def _note(self, what: Expected) -> None:
        if what.label == LOGITS:  # of shapes only: what becomes of logits is seen afterwards
            return
        if not what.backward:
            self._pending.append((len(self._sent), self._saved))
        self._sent.append(Sent(self._running[-1] if len(self._running) > 1 else self._last, what))

    def _pack(self, saved: Tensor) -> Tensor:
        self._saved += 1
        return saved

    def _enter(self, name: str, *_: object) -> None:
        self._running.append(name)
        self._last = name
        if name in self._recomputed:
            self._pending.clear()

    def _exit(self, name: str, *_: object) -> None:
        if self._running and self._running[-1] == name:
            self._running.pop()
        if name not in self._recomputed:
            return
        for index, saved in self._pending:
            if self._saved > saved:
                self._sent[index] = replace(self._sent[index], repeated=True)
        self._pending.clear()


def traffic_by_call(sent: tuple[Sent, ...], timeline: Timeline, tp: int) -> dict[int, Tally]:
    """What each call of the timeline makes a tensor rank send for one microbatch, forward and backward."""
    calls: dict[str, list[int]] = {}
    for index, call in enumerate(timeline.calls):
        calls.setdefault(call.unit, []).append(index)
    by_module: dict[str, list[Sent]] = {}
    for item in sent:
        by_module.setdefault(item.module, []).append(item)
    tallies: dict[int, Tally] = {}
    for module, items in by_module.items():
        places = next((calls[unit] for unit in calls if module == unit or module.startswith(f"{unit}.")), [0])
        for number, item in enumerate(items):
            tally = tallies.setdefault(places[number * len(places) // len(items)], Tally())
            for _ in range(1 + item.repeated):
                tally.add(_traffic(item.what.label, item.what.op, item.what.bytes, tp))
    return tallies


def loss_traffic(use: LogitUse, tp: int) -> Tally:
    """What becomes of the logits after the head: a vocabulary-parallel loss, or a gather by whoever needs all."""
    return Tally([_traffic(sent.label, sent.op, sent.bytes, tp) for sent in use.sent])


def _traffic(label: str, op: Op, payload: int, tp: int) -> Traffic:
    return Traffic("tp", label, 1, sent_bytes(op, payload, tp))
