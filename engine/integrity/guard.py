"""Detection of silent corruption on a rank: the times of digests, comparisons and reads.

every step             compare, just before the update         take, just after it
every N steps          rerun (if on), before the update        replicas, and the host reads: raise or warn
a save                 compare and replicas before it          take after it
a load, a write        compare before it                       take after it
"""

import json
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.config.sections import IntegrityConfig
from engine.errors import CorruptionError, EngineError
from engine.integrity.copies import INTEGRITY, AtRest, DataCopies, ReplicaCopies
from engine.integrity.finding import Finding, sentence
from engine.parallel.comm.agreement import bit_sum, gather_from_all
from engine.step.parts import PartOrder, StepPart
from engine.step.state import StepState

logger = logging.getLogger("trine")


class ComputedGradients:
    """Comparison of two runs of one training step on this rank, by the bit sum of each gradient and of the loss: the
    bits of each element count as one integer, and the integers are added.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._sums = torch.zeros(len(names) + 1, dtype=torch.int64, device=device)
        self._before: Tensor | None = None
        self._differs: Tensor | None = None

    def see(self, name: str, grad: Tensor) -> None:
        """Adds the bit sum of ``grad``, an unreduced gradient of parameter ``name``, to this run."""
        self._sums[self._places[name]] += bit_sum(grad)

    def end(self, loss: Tensor) -> None:
        """Ends a run of the step: the first call stores the bit sums, the second compares with them.

        ``loss`` is this rank's sum of losses in the run.
        """
        self._sums[-1] = bit_sum(loss)
        if self._before is None:
            self._before = self._sums.clone()
        else:
            self._differs, self._before = self._sums != self._before, None
        self._sums.zero_()

    def forget(self) -> None:
        """Discards the sums of an unfinished run, and the result of a comparison."""
        self._before = self._differs = None
        self._sums.zero_()

    @property
    def noticed(self) -> bool | Tensor:
        """0-dim bool tensor on the device: True if the two runs of a step differ; the Python value False if no step was
        run twice since the last ``findings``.
        """
        return self._differs is not None and self._differs.any()

    def findings(self, rank: int, update: int) -> list[Finding]:
        """Returns a list with one report, about the first gradient that differs between the two runs of a step, or
        about the loss if no gradient differs; [] if the runs are equal.

        The call also discards the comparison's result. The host waits for the device.

        Args:
            rank: global rank of this process.
            update: number of updates at the check before this one; the report stores it.
        """
        differs, self._differs = self._differs, None
        if differs is None or not differs.any():
            return []
        names = [*self._places, ""]
        first = names[int(differs.nonzero()[0])]
        kind = "gradient" if first else "loss"
        return [Finding(how="rerun", kind=kind, name=first, update=update, ranks=(rank,))]

    @property
    def compared(self) -> bool:
        """True if a step was run twice since the last call of ``findings``."""
        return self._differs is not None


class Integrity(StepPart):
    """Detector of silent corruption, such as flipped bits, in this rank's weights and optimizer state. It runs in each
    training step.

    With ``integrity.rerun`` it also finds gradients that differ when a step is run again.
    """

    order = PartOrder.INTEGRITY

    def __init__(
        self,
        config: IntegrityConfig,
        at_rest: AtRest,
        copies: tuple[DataCopies, ReplicaCopies],
        computed: ComputedGradients | None,
        join_update: Callable[[], None],
    ) -> None:
        self._data, self._replica = copies
        self._config, self._comm, self._device = config, self._data.comm, self._data.device
        self._at_rest, self._join_update = at_rest, join_update
        self.computed = computed
        """Sums of a step that is run twice; None: no step is."""
        self._steps, self._update, self._checked_after = 0, 0, 0
        self._failed = ""

    # ------------------------------------------------------------------ around an update

    def before_update(self, step: StepState) -> BaseException | None:
        """Compares weights and optimizer state with their digests of the last update, without host synchronization;
        ``check`` reads the result.

        Returns ``step.problem``: an earlier error of the step, or None.
        """
        self._at_rest.compare()
        return step.problem

    def rerun(self) -> ComputedGradients | None:
        """Returns the object that compares the gradients of two runs; None if the next step runs once."""
        if self.computed is None or (self._steps + 1) % self._config.every:
            return None
        self.computed.forget()  # an interrupted step leaves the sums of a part of its run
        return self.computed

    def undo_step(self) -> None:
        """Discards the comparison of a failed step, whose runs ended at different places."""
        if self.computed is not None:
            self.computed.forget()

    def refuse_own_loop(self) -> None:
        """Raises if ``integrity.rerun`` is on, because only ``train_batch`` can run a step twice.

        Raises:
            EngineError: ``integrity.rerun`` is on.
        """
        if self.computed is not None:
            raise EngineError(
                "integrity.rerun is true, but the engine cannot repeat a loop of eng.backward and eng.step; call "
                "eng.train_batch(batch), or remove integrity.rerun."
            )

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        """Stores the digests of weights and optimizer state after a step; runs ``check`` every ``integrity.every``
        steps and after a skipped step. Collective.

        Args:
            step: state of the step, which counts sent bytes; the call excludes the bytes of ``check`` from them.
            made: number of updates so far.
            skipped: True if the step was skipped.

        Raises:
            CorruptionError: corruption was found and ``integrity.on_failure`` is "raise".
        """
        self._join_update()
        self._update, self._steps = made, self._steps + 1
        self._at_rest.take(made)
        if skipped or self._steps % self._config.every == 0:
            before = self._comm.tally.copy()
            self.check()
            for row in self._comm.tally.since(before).rows():
                step.sent.add(row)

    # ------------------------------------------------------------------ beside steps

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Returns a context manager around a call that may write weights or optimizer state.

        Before the call it compares them with their stored digests; after the call it stores new digests. The next
        ``check`` reports a difference.
        """
        self._at_rest.compare()
        try:
            yield
        finally:
            self._at_rest.take(self._update)

    def restarted(self, made: int) -> None:
        """Replaces all digests, and forgets found corruption, after weights were loaded or built.

        Args:
            made: number of updates that these weights have had.
        """
        self._at_rest.forget()
        self._failed = ""
        self._update = self._checked_after = made
        self._at_rest.take(made)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Returns a context manager around a save of weights; on entry, it checks weights and optimizer state.
        Collective.

        Raises:
            CorruptionError: corruption was found, and ``integrity.on_failure`` is "raise".
        """
        if self._failed:
            raise CorruptionError(self._failed)
        self._at_rest.compare()
        self.check()
        try:
            yield
        finally:
            self._at_rest.take(self._update)

    # ------------------------------------------------------------------ the check

    def check(self) -> None:
        """Reads the results of all comparisons, and compares copies of weights and optimizer state across ranks.
        Collective over the world.

        The host waits for the device. If ``integrity.on_failure`` is "warn", corruption is only logged.

        Raises:
            CorruptionError: any rank has found corruption and ``integrity.on_failure`` is "raise"; all ranks raise it.
        """
        digests = self._at_rest.digests()
        bad = self._data.compare(self._at_rest.held, digests) | self._replica.compare(self._device)
        bad = bad | self._at_rest.noticed
        bad = bad | self.computed.noticed if self.computed is not None else bad
        flag = bad.to(torch.int64).view(1)
        self._comm.all_reduce(flag, "world", INTEGRITY, "max").wait()
        if int(flag):
            self._tell()
        elif self.computed is not None:
            self.computed.findings(0, 0)
        self._checked_after = self._update

    def _tell(self) -> None:
        rank, since = self._comm.grid.rank, self._checked_after
        again = self.computed is not None and self.computed.compared
        own = self._at_rest.findings(rank)
        if self.computed is not None:
            own += self.computed.findings(rank, since)
        own += self._data.findings(since) + self._replica.findings(since)
        told = [json.loads(text) for text in self._exchanged(json.dumps(_words(own)).encode())]
        found = [Finding.from_json(values) for each in told for values in each["found"]]
        text = sentence(_certain(found), [each["host"] for each in told], again)
        if self._config.on_failure == "raise":
            self._failed = text
            raise CorruptionError(text)
        if rank == 0:
            logger.warning(text)

    def _exchanged(self, text: bytes) -> list[bytes]:
        """Returns the texts of all ranks; two all-gathers over the world, label "integrity"."""
        sizes = gather_from_all(torch.tensor([len(text)]), self._comm, self._device, INTEGRITY).flatten().tolist()
        own: Tensor = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        table = gather_from_all(own, self._comm, self._device, INTEGRITY)
        return [bytes(row[:size].tolist()) for row, size in zip(table, sizes, strict=True)]


def _words(found: Sequence[Finding]) -> dict[str, object]:
    return {"host": socket.gethostname(), "found": [finding.to_json() for finding in found[:_TOLD]]}


_TOLD = 16
"""Most findings that a rank sends."""


def _certain(found: Sequence[Finding]) -> list[Finding]:
    """Drops differences of copies that a change at rest explains, because that finding names the rank to blame."""
    known = {rank for finding in found if finding.how == "rest" for rank in finding.ranks}
    explained = [finding for finding in found if finding.how == "copies" and known & {*finding.ranks, *finding.others}]
    return [finding for finding in found if finding not in explained] if known else list(found)
