"""Outer loop of one site: gradients or differences of weights go to the store, merged weights come back.

    period 1, average or diloco    before the update: gradients -> their sum over all sites; each site updates
    period 1, bsp, ssp or async    before the update: gradients -> weights that the store has updated
    longer periods                 after the update: anchor - weights -> merged weights, ``delay`` steps later

    step        1     2     3     4     5     6     7     8        period 4, delay 1
    fragment 0                    push  take              push
    fragment 1        push  take              push  take

Under average, diloco and bsp a merge is taken over after a fixed step; the site waits for it. Under ssp, async and
quorum the site trains on, and all its ranks take a merge over at the end of the step in which it has come.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from engine.config.outer_section import WAITING_RULES, OuterConfig, shared_settings
from engine.errors import EngineError
from engine.optim.lr_schedules import LearningRate
from engine.outer.exchange import PushFlight, StoreExchange
from engine.outer.fragments import Fragment, due
from engine.outer.messages import (
    Content,
    JoinReply,
    JoinRequest,
    PushKey,
    PushMeta,
    PushShare,
    StoreLink,
    StoreRefusedError,
)
from engine.outer.site_weights import SiteWeights
from engine.parallel.comm.agreement import all_or_none, first_rank, from_first
from engine.parallel.comm.comm import Comm
from engine.planning.plan import Plan
from engine.step.parts import PartOrder, StepPart
from engine.step.state import StepState, StepTotals

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class OuterState:
    """Progress of a training site in its exchange with the stores.

    ``pushed_bytes``, ``pulled_bytes`` and ``waited`` are of this rank; the other fields are equal on all ranks of the
    site.
    """

    life: int
    """Number of this run of the site's processes on the store."""
    clock: int
    """Merged pushes of this site."""
    versions: tuple[int, ...]
    """Version of each fragment that this site has taken over."""
    staleness: int
    """Merges between the base of the last push and its own merge."""
    members: int
    """Pushes in the last merge that was taken over."""
    rows: int
    """Rows that this site has trained, over all its lives; a data loader continues after them."""
    pushed_bytes: int
    """Encoded bytes that this rank has pushed."""
    pulled_bytes: int
    """Bytes that this rank has pulled."""
    waited: float
    """Seconds that this rank has waited for the store."""

    def __str__(self) -> str:
        return (
            f"clock {self.clock}, version {'/'.join(map(str, self.versions))}, staleness {self.staleness}, "
            f"{self.members} members, {self.rows:,} rows, {self.pushed_bytes / 1e6:,.1f} MB pushed, "
            f"{self.pulled_bytes / 1e6:,.1f} MB pulled, waited {self.waited:.1f} s"
        )

    @property
    def figures(self) -> dict[str, float]:
        """Values for the step report, by names such as "outer/clock"."""
        return {
            "outer/clock": self.clock, "outer/version": max(self.versions, default=0),
            "outer/staleness": self.staleness, "outer/members": self.members, "outer/rows": self.rows,
            "outer/pushed_bytes": self.pushed_bytes, "outer/pulled_bytes": self.pulled_bytes,
            "outer/waited_seconds": self.waited,
        }  # fmt: skip


OpenLink = Callable[[OuterConfig, Sequence[Fragment]], StoreLink]
"""Function that opens the connection of a rank to the stores, which divide the fragments among them."""


class OuterLoop(StepPart):
    """Part of the training step that exchanges gradients or weights with other training sites, through stores.

    Args:
        weights: converter of this rank's weights and gradients to messages, and back.
        rates: learning-rate schedule of this site; each push contains the current rates.
        open_link: callback that opens the connection of this rank to the stores.
    """

    order = PartOrder.OUTER

    def __init__(
        self,
        plan: Plan,
        comm: Comm,
        device: torch.device,
        weights: SiteWeights,
        rates: LearningRate,
        open_link: OpenLink,
    ) -> None:
        assert plan.config.outer is not None, "the part exists only with an outer loop"
        self._plan, self._comm, self._device, self._open = plan, comm, device, open_link
        self._outer, self._content = plan.config.outer, Content(plan.config.outer.content)
        self.weights, self._rates = weights, rates
        self._exchange: StoreExchange | None = None
        self._link: StoreLink | None = None
        self._flights: dict[int, PushFlight] = {}
        self._earlier: dict[int, int] = {}
        """Local step of each fragment's push that was under way when an earlier life ended."""
        self._late: set[int] = set()
        """Fragments whose push is due, while their last one is under way."""
        count = len(self.weights.local.fragments)
        self._seq, self._versions, self._taken = (
            [0] * count,
            [0] * count,
            [list[tuple[int, int]]() for _ in range(count)],
        )
        self._since = [(0, 0.0)] * count
        """Local steps and tokens at the last push of each fragment."""
        self._life = self._clock = self._staleness = self._members = 0
        self._steps, self._made, self._skipped, self._tokens = 0, 0, 0, 0.0
        self._rows: int | None = None
        self._pushed_rows = 0
        """Rows up to the last push."""
        self._began = 0
        """Local step at which this life has begun."""
        self._pushed_bytes = self._pulled_bytes = 0
        self._waited = 0.0

    @property
    def state_now(self) -> OuterState:
        """State of this site's exchange with the stores after the last step."""
        waited = self._waited + (self._exchange.waited if self._exchange is not None else 0.0)
        return OuterState(
            self._life, self._clock, tuple(self._versions), self._staleness, self._members, self._rows or 0,
            self._pushed_bytes, self._pulled_bytes, waited,
        )  # fmt: skip

    # ------------------------------------------------------------------ phases of a step

    def begin_step(self) -> None:
        """Joins the stores if this engine has not joined yet. All ranks call it."""
        if self._exchange is None:
            self._join()

    def join_early(self) -> None:
        """Joins the stores before the first step, so that ``state_now.rows`` is known. All ranks call it.

        Does not join if the sites sum gradients, and this site has to load a checkpoint first to be where they are.
        """
        self._join(early=True)

    def before_update(self, step: StepState) -> BaseException | None:
        """Pushes the step's gradients, and waits for the store's answer, before the optimizer runs.

        With ``Content.SUMS``, the answer is the gradients summed over all sites; they replace the step's gradients.
        With ``Content.GRADIENTS``, it is new weights, which the optimizer copies. With ``Content.DELTAS``, nothing is
        pushed.

        Returns the error of the exchange, else ``step.problem`` (earlier error of the step, or None). All ranks of the
        site call it.
        """
        if self._content is Content.DELTAS:
            return step.problem
        # no rank pushes for a step that has failed on another: the store would wait for the rest of the push
        if first_rank(step.problem is not None, self._comm, self._device, "outer") is not None:
            return step.problem
        try:
            self._exchange_gradients(step)
        except EngineError as error:
            return error
        return step.problem

    def agreed(self, step: StepState, totals: StepTotals[float]) -> None:
        """Adds the tokens of this step, ``totals.tokens``, to those that the site's next push to the stores reports."""
        self._tokens += totals.tokens

    def end_step(self, step: StepState, made: int, skipped: bool) -> None:
        """Counts a training step. If the sites exchange weight differences, then also pushes the groups of tensors that
        are due, and applies newly merged weights.

        Adds values such as "outer/clock" to ``step.figures``. All ranks of the site call it.

        Args:
            made: number of optimizer updates so far, including this step's.
            skipped: True if this step had no update.
        """
        self._steps, self._made, self._skipped = self._steps + 1, made, self._skipped + skipped
        self._rows = (self._rows or 0) + (self._plan.config.train_batch_size or 0)
        if self._content is Content.DELTAS:
            self._push_due()
            self._take_over()
        now = self.state_now
        step.figures |= now.figures
        if self._comm.recorder is not None:
            self._comm.recorder.note(f"outer loop of site {self._outer.site}: {now}")

    def restarted(self, made: int) -> None:
        """Joins the stores again as a new run, after the user has loaded weights.

        Does nothing before the first join. All ranks of the site call it.

        Args:
            made: number of optimizer updates so far, as the engine counts them.
        """
        self._made = made
        if self._exchange is not None:
            self._leave(leave=False)
            self._join()

    def close(self) -> None:
        """Signs this site off at the stores; other sites no longer wait for it."""
        if self._exchange is not None:
            self._leave(leave=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns counters and versions of this site's exchange with the stores, as JSON values for a checkpoint."""
        return {
            "steps": self._steps, "skipped": self._skipped, "rows": self._rows or 0, "pushed_rows": self._pushed_rows,
            "tokens": self._tokens,
            "versions": self._versions, "since": [list(each) for each in self._since],
            "flights": [[number, flight.meta.step + self._began] for number, flight in sorted(self._flights.items())],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters and versions from a result of ``state_dict``; this site's next join uses them."""
        self._steps, self._rows, self._tokens = int(state["steps"]), int(state["rows"]), float(state["tokens"])
        self._pushed_rows, self._skipped = int(state["pushed_rows"]), int(state.get("skipped", 0))
        if len(state["versions"]) == len(self._versions):
            self._versions = [int(version) for version in state["versions"]]
            self._since = [(int(steps), float(tokens)) for steps, tokens in state["since"]]
            self._earlier = {int(number): int(step) for number, step in state["flights"]}
        else:
            self.weights.anchors.filled = False

    # ------------------------------------------------------------------ joining and leaving

    def _join(self, early: bool = False) -> None:
        """Starts a life of this site: joins, registers pieces, and takes the current weights over. Collective."""
        link = self._link = self._link or self._opened()
        untrained = self.weights.untrained.digests(self._comm, self._device, with_buffers=not self._made)
        request = self._request(untrained)
        told = json.loads(from_first(lambda: _worded(lambda: link.join(request)), self._comm, self._device))
        joined = JoinReply(**told)
        self._life, self._clock = joined.life, joined.clock
        made = self._made + self._skipped  # the store has merged the gradients of skipped steps, too
        if self._content is Content.SUMS and joined.clock != made:
            if early:  # the next join ends this life
                return
            raise EngineError(
                f"site {self._outer.site} has made {made} steps and the store has merged {joined.clock}, but with "
                "outer.period 1 these numbers must be equal; load on this site a checkpoint that another site has "
                f"saved after {joined.clock} steps."
            )
        # a checkpoint older than the last push has progress that is in the store already
        resumed = self._content is Content.DELTAS and self.weights.anchors.filled and joined.rows <= self._pushed_rows
        self._rows = self._rows if resumed and self._rows is not None else max(joined.rows, self._rows or 0)
        self._began, self._flights, self._late = self._steps, {}, set()
        self._seq, self._taken = [0] * len(self._seq), [[] for _ in self._taken]
        exchange = self._exchange = StoreExchange(link, joined.life, self._comm, self._device, self._outer.lease)
        rank = self._comm.grid.rank
        exchange.ask(lambda: link.register(joined.life, rank, self.weights.local.layout))
        if joined.seeds:
            exchange.ask(lambda: self._send_seeds(link))
        for number in range(len(self.weights.local.fragments)) if self._content is not Content.SUMS or not made else ():
            if resumed and number in self._earlier:
                self._flights[number] = self._flight_of_earlier(number)
            else:
                self._begin_with(exchange, number, resumed)
        self._earlier = {}
        self.weights.anchors.filled = self._content is Content.DELTAS
        if rank == 0:
            logger.info(
                "site %d has joined: life %d, %s rows trained, version %s",
                self._outer.site, joined.life, f"{self._rows:,}", "/".join(map(str, self._versions)),
            )  # fmt: skip

    def _opened(self) -> StoreLink:
        """Opens the link on every rank, or raises on every rank: rank 0 may have to serve the store. Collective."""
        with all_or_none(self._comm, self._device):
            return self._open(self._outer, self.weights.local.fragments)

    def _request(self, untrained: Mapping[str, str]) -> JoinRequest:
        config, rows = self._plan.config, [row for row in self._plan.table if row.trainable]
        groups = {
            slot.name: slot.group for layout in self._plan.layouts.values() for b in layout.buckets for slot in b.slots
        }
        return JoinRequest(
            site=self._outer.site,
            ranks=self._comm.grid.world_size,
            tensors=tuple((row.name, tuple(row.shape)) for row in rows),
            groups=tuple(group.as_kwargs() for group in self._plan.groups),
            group_of=tuple(groups[row.name] for row in rows),
            settings=shared_settings(self._outer, config.optimizer, config.gradient_clipping),
            untrained=untrained,
        )

    def _send_seeds(self, link: StoreLink) -> None:
        for number in range(len(self.weights.local.fragments)):
            link.seed(self._life, self._comm.grid.rank, number, self.weights.seed(number))

    def _begin_with(self, exchange: StoreExchange, fragment: int, resumed: bool) -> None:
        """Takes over the store's weights; a site from a checkpoint keeps its progress since its anchor."""
        key = PushKey(self._life, fragment, -1)
        flight = exchange.wait(PushFlight(PushMeta(key, 0, 0, 0.0, 0, 0), pushed=_done()))
        assert flight.offer is not None and flight.body is not None, "the exchange has waited for both"
        before, self._versions[fragment] = self._versions[fragment], flight.offer.version
        body = flight.body.result()
        self._pulled_bytes += body.nbytes
        self._taken[fragment].append((0, flight.offer.version))
        if resumed and before == flight.offer.version:
            return
        self.weights.write(fragment, body, alone=not resumed)
        if not resumed:
            self._since[fragment] = (self._steps, self._tokens)

    def _flight_of_earlier(self, fragment: int) -> PushFlight:
        """Returns the flight of a push that an earlier life has made; the next version contains it."""
        version, step = self._versions[fragment], self._earlier[fragment] - self._began
        meta = PushMeta(PushKey(self._life, fragment, -1), version, 0, 0.0, self._rows or 0, step)
        return PushFlight(meta, least=version + 1, pushed=_done())

    def _leave(self, leave: bool) -> None:
        assert self._exchange is not None
        self._waited += self._exchange.waited
        self._exchange.close(leave)
        self._exchange, self._flights = None, {}

    # ------------------------------------------------------------------ gradients, at period 1

    def _exchange_gradients(self, step: StepState) -> None:
        assert self._exchange is not None
        self._rates.prepare(self._made)
        flights = [self._push_gradients(number, step) for number in range(len(self.weights.local.fragments))]
        for flight in flights:
            self._exchange.wait(flight)
        for flight in flights:
            self._note(flight)
        bodies = {flight.meta.key.fragment: flight.body.result() for flight in flights if flight.body is not None}
        if self._content is Content.GRADIENTS:
            self.weights.use_weights(bodies)
        else:
            step.used = self.weights.use_sums(bodies)
            self._use_totals(step, flights[0])

    def _push_gradients(self, fragment: int, step: StepState) -> PushFlight:
        scale = 1.0 if self._content is Content.SUMS else step.divides
        counts = fragment == 0 and self._counts_loss
        share = PushShare(float(step.weight) if counts else 0.0, float(step.loss) if counts else 0.0)
        return self._send(fragment, 1, 0.0, self.weights.gradients(fragment, scale), share)

    @property
    def _counts_loss(self) -> bool:
        """True if the loss weight of this rank counts: one rank of each data coordinate, as in the control sum."""
        grid = self._comm.grid
        return grid.coord().pp == self._plan.last_rank and grid.is_first("stage_replica")

    def _use_totals(self, step: StepState, flight: PushFlight) -> None:
        """Replaces loss and weight of this site by the sums over all sites."""
        assert flight.offer is not None, "the exchange has waited for it"
        if self._counts_loss:
            first = self._comm.grid.row_rank == 0
            step.weight = torch.full_like(step.weight, flight.offer.weight if first else 0.0)
            step.loss = torch.full_like(step.loss, flight.offer.loss if first else 0.0)

    # ------------------------------------------------------------------ differences, at longer periods

    def _push_due(self) -> None:
        """Pushes the fragments that are due after this step."""
        outer = self._outer
        for number, fragment in enumerate(self.weights.local.fragments):
            if due(self._steps, outer.steps, outer.fragments, fragment.index) or number in self._late:
                if number in self._flights and (outer.rule == "ssp" or outer.rule in WAITING_RULES):
                    self._finish(number)  # a site of ssp is too far ahead, and waits here
                if number in self._flights:
                    self._late.add(number)
                    continue
                self._late.discard(number)
                self._push_delta(number)

    def _take_over(self) -> None:
        """Takes over the merges that are due, or that all ranks have pulled."""
        assert self._exchange is not None
        outer, delay = self._outer, self._outer.delay
        waits = outer.rule in WAITING_RULES or outer.rule == "hogwild"
        for number, flight in list(self._flights.items()):
            ahead = self._steps - (flight.meta.step + self._began)
            if (waits and ahead >= delay) or (outer.most_steps and ahead >= outer.most_steps):
                self._finish(number)
        if self._flights:
            for flight in self._exchange.poll(list(self._flights.values())):
                if not waits:
                    self._adopt(flight)

    def _finish(self, fragment: int) -> None:
        """Waits for the merge of a fragment's push, and takes it over. Collective."""
        assert self._exchange is not None
        self._adopt(self._exchange.wait(self._flights[fragment]))

    def _push_delta(self, fragment: int) -> None:
        steps, tokens = self._since[fragment]
        body = self.weights.differences(fragment)
        self._flights[fragment] = self._send(fragment, self._steps - steps, self._tokens - tokens, body, PushShare())
        self._since[fragment] = (self._steps, self._tokens)

    def _send(self, fragment: int, steps: int, tokens: float, body: Tensor, share: PushShare) -> PushFlight:
        assert self._exchange is not None
        meta = PushMeta(
            key=PushKey(self._life, fragment, self._seq[fragment]),
            base=self._versions[fragment],
            steps=steps,
            tokens=tokens,
            rows=self._rows or 0,
            step=self._steps - self._began,
            rates=self.weights.rates,
            taken=tuple(self._taken[fragment]),
        )
        flight = PushFlight(meta)
        self._exchange.push(flight, share, body)
        self._seq[fragment] += 1
        self._taken[fragment] = []
        self._pushed_bytes += body.nbytes
        self._pushed_rows = self._rows or 0
        return flight

    def _adopt(self, flight: PushFlight) -> None:
        """Takes over the merge of a flight. All-gathers over dp, label "parameters"."""
        fragment = flight.meta.key.fragment
        self._note(flight)
        assert flight.body is not None
        self.weights.write(fragment, flight.body.result())
        del self._flights[fragment]

    def _note(self, flight: PushFlight) -> None:
        """Counts a merge that is taken over."""
        fragment = flight.meta.key.fragment
        assert flight.offer is not None and flight.body is not None, "the exchange has waited for both"
        self._versions[fragment], self._members = flight.offer.version, flight.offer.members
        self._staleness = flight.offer.staleness
        self._taken[fragment].append((self._steps - self._began, flight.offer.version))
        self._pulled_bytes += flight.body.result().nbytes
        self._clock += fragment == 0


def _worded(join: Callable[[], JoinReply]) -> bytes:
    """Returns the reply to a join as JSON."""
    try:
        return json.dumps(asdict(join())).encode()
    except StoreRefusedError as refusal:
        raise EngineError(f"the store has refused this site: {refusal}") from refusal


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
