"""Joint examination of a job's ranks, along the steps of training's start; every wait has a limit.

    facts    every rank           over the store of the job, with the reason why training would not start there
    start    if none has a reason the process group, and the groups of the grid, as ``engine.initialize`` makes them
    links    all ranks            clocks, axes, pairs of hosts
    end      rank 0               decides whether training would start; the others wait for its verdict

A thread does the work, and the process waits for it phase by phase, so that a hung library does not block the process.
When a phase fails or takes too long, every rank reports it in the store, and rank 0 names the ranks that do not.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from engine.build.equal_input import describe_config, difference_error
from engine.config import Config
from engine.errors import EngineError, first_line
from engine.kernels.device import is_host
from engine.launch.doctor.examined import ClockFigure, Examined, Hosts, PairFigure, RankFacts
from engine.launch.doctor.links import AxisTimes, PairTimes, axis_figures, measure_axes, measure_clocks, measure_pairs
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.host_group import TorchHostGroup, collect
from engine.parallel.comm.launcher import loopback_words
from engine.parallel.comm.rendezvous import KeyStore, Rendezvous
from engine.parallel.comm.shared_memory import shared_bytes
from engine.parallel.comm.torch_backend import TorchBackend
from engine.parallel.comm.world import World, meeting_point, open_store, open_world, prefixed, shares_memory

_GRACE_SECONDS = 3.0
"""Extra seconds that the process waits for a phase, and seconds that rank 0 waits for reports of a failure."""
_MEETING_GRACE_SECONDS = 12.0
"""Extra seconds of a rendezvous: rank 0 reports the absent ranks to the others, and torch connects twice."""
_LATE_SECONDS = 1.0
"""Seconds that rank 0 waits for facts of the present ranks of an incomplete rendezvous."""
_POLL_SECONDS = 0.02
_REACHING = "reaching the meeting point"


@dataclass(slots=True, kw_only=True)
class Examination:
    """One rank's part of the check that ``trine doctor`` makes on all ranks of a job together.

    Args:
        own: facts about this rank.
        config: configuration of the job; None: it is invalid, and ``own.problem`` contains the reason.
        seconds: timeout of each phase.
        tell: callback for the name of each phase.
    """

    world: World
    own: RankFacts
    config: Config | None
    seconds: float
    tell: Callable[[str], None]
    seen: Examined = field(init=False)
    failure: str = ""
    """Reason why this rank stopped; empty if it did not."""
    hung: bool = False
    """True if a phase of the examination hangs or failed, so that its resources cannot be released."""
    _store: KeyStore | None = None
    """Store for the doctor's own messages; None: this rank has not joined the others."""
    _phase: str = _REACHING
    _deadline: float = 0.0

    def __post_init__(self) -> None:
        config, world = self.config, self.world
        grid = None if config is None else config.grid(0).sizes
        tensor = config is not None and config.tp > 1 and is_host(world.device)
        self.seen = Examined(
            size=world.size,
            facts=(self.own,),
            grid=grid,
            order="tp-dp-pp" if config is None else config.parallel.order,
            seconds=self.seconds,
            place=meeting_point(world) if world.place is not None else "",
            shared_bytes=shared_bytes(1) if tensor and not self.own.problem and shares_memory() else 0,
            ranks_of_node=_count(os.environ, "LOCAL_WORLD_SIZE"),
        )

    def run(self) -> Examined:
        """Runs all phases of the check, each with a timeout; returns this rank's results, or on rank 0 all ranks'
        results.
        """
        ended = threading.Event()
        self._enter(self._phase, _MEETING_GRACE_SECONDS)
        threading.Thread(target=self._work, args=(ended,), daemon=True).start()
        while not ended.wait(_POLL_SECONDS):
            if time.monotonic() > self._deadline:
                self.hung, self.failure = True, self.failure or self._no_answer()
                break
        roll = self._call_roll if self.own.rank == 0 and self.failure else self._answer_roll
        if self._store is not None and not self._limited(roll, _GRACE_SECONDS + 1):
            self._store = None
        if self.failure and (self.own.rank or not self.seen.silent):
            failed = dict(self.seen.failed) | {self.own.rank: self.failure}
            self.seen = replace(self.seen, failed=tuple(sorted(failed.items())))
        return self.seen

    def _no_answer(self) -> str:
        """Returns the reason of a phase that takes too long, with the remedy of an address that cannot be reached."""
        place, unmet = self.world.place, self._phase == _REACHING
        words = loopback_words(place, os.environ) if place is not None and unmet else ""
        return f"no answer within {self.seconds:g} s: {self._phase}{'; ' * bool(words)}{words}."

    def say(self, verdict: Mapping[str, Any]) -> None:
        """Sends ``verdict``, rank 0's conclusion as a JSON object, to all ranks that took part and still answer.

        It waits a few seconds at most until they have read it.
        """
        store, others = self._store, [one.rank for one in self.seen.facts if one.rank not in (0, *self.seen.silent)]
        if store is None or not others:
            return

        def speak() -> None:
            store.set("verdict", json.dumps(dict(verdict)))
            deadline = time.monotonic() + _GRACE_SECONDS
            waiting = [f"heard/{rank}" for rank in others]
            while waiting and time.monotonic() < deadline:
                waiting = [key for key in waiting if not store.check([key])]
                time.sleep(_POLL_SECONDS * bool(waiting))

        self._limited(speak, 2 * _GRACE_SECONDS)

    def hear(self) -> dict[str, Any] | None:
        """Waits for rank 0's conclusion; returns it as a JSON object, or None after the timeout."""
        store, heard = self._store, list[dict[str, Any]]()
        if store is None:
            return None
        patience = self.seconds + 4 * _GRACE_SECONDS

        def listen() -> None:
            store.wait(["verdict"], timedelta(seconds=patience))
            heard.append(json.loads(store.get("verdict")))
            store.set(f"heard/{self.own.rank}", "")

        self._limited(listen, patience + _GRACE_SECONDS)
        return heard[0] if heard else None

    def _limited(self, call: Callable[[], None], seconds: float) -> bool:
        """Runs ``call`` in a thread, for at most this time; returns False if the store does not answer."""

        def attempt() -> None:
            try:
                call()
            except RuntimeError as error:
                self.failure = self.failure or f"the store of the job is lost ({first_line(error)})."

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()

    def _enter(self, phase: str, grace: float = _GRACE_SECONDS) -> None:
        """Begins a phase, or a part of one."""
        self._deadline = time.monotonic() + self.seconds + grace
        if phase != self._phase and self.world.size > 1:
            self.tell(phase)
        self._phase = phase

    def _work(self, ended: threading.Event) -> None:
        try:
            self._examine()
        except (EngineError, RuntimeError) as error:
            self.hung = True
            self.failure = str(error) if isinstance(error, EngineError) else f"{self._phase}: {first_line(error)}."
        except Exception as error:
            self.hung = True
            self.failure = f"{self._phase}: {type(error).__name__}: {first_line(error)}; this is a bug in Trine."
            raise
        finally:
            ended.set()

    def _examine(self) -> None:
        store, starts, hosts = open_store(self.world), not self.own.problem, Hosts((self.own,))
        if self.world.size > 1:
            rendezvous, problem = self._meet(store)
            self.seen = replace(self.seen, met=True)
            store = prefixed(store, rendezvous.name)
            self._store = prefixed(store, "doctor")
            starts, hosts = self._exchange_facts(self._store, problem)
        if not starts or self.config is None:
            return
        self._enter("starting the process group")
        open_world(self.world, store)
        grid = self.config.grid(self.own.rank)
        backend = TorchBackend(grid, self.world.device)
        comm = Comm(grid, backend)
        host = TorchHostGroup(self.own.rank, self.world.size, self.seconds, "examine the job")
        self._measure(comm, backend.shares("tp"), host, hosts)
        host.close()
        comm.close()

    # ------------------------------------------------------------------------------------------------ over the store

    def _meet(self, store: KeyStore) -> tuple[Rendezvous, str]:
        """Returns the rendezvous, and its problem: ranks that did not join, or different configurations."""
        self._enter("waiting for all ranks", _MEETING_GRACE_SECONDS)
        rendezvous = Rendezvous(store, self.own.rank, self.world.size, meeting_point(self.world), self.seconds)
        try:
            difference = rendezvous.meet({} if self.config is None else describe_config(self.config))
        except EngineError as error:
            if not rendezvous.name:
                raise
            return rendezvous, str(error)
        return rendezvous, "" if difference is None else str(difference_error(difference))

    def _exchange_facts(self, store: KeyStore, problem: str) -> tuple[bool, Hosts]:
        """Sends the facts to rank 0, which returns the facts of all ranks, and the decision to start."""
        self._enter("exchanging facts")
        store.set(f"facts/{self.own.rank}", json.dumps(asdict(self.own)))
        if self.own.rank == 0:
            self._gather_facts(store, problem)
        store.wait(["facts"], timedelta(seconds=self.seconds))
        message = json.loads(store.get("facts"))
        facts = tuple(RankFacts.from_json(one) for one in message["facts"])
        self.seen = replace(self.seen, facts=facts)
        return bool(message["starts"]), Hosts(facts)

    def _gather_facts(self, store: KeyStore, problem: str) -> None:
        """Reads the facts of all ranks that joined, on rank 0, and sends the decision to start."""
        waiting, facts = set(range(self.world.size)), list[RankFacts]()
        patience = _LATE_SECONDS if problem else self.seconds
        deadline = time.monotonic() + patience
        while waiting and time.monotonic() < deadline:
            for rank in [rank for rank in sorted(waiting) if store.check([f"facts/{rank}"])]:
                facts.append(RankFacts.from_json(json.loads(store.get(f"facts/{rank}"))))
                waiting.remove(rank)
            time.sleep(_POLL_SECONDS * bool(waiting))
        facts.sort(key=lambda one: one.rank)
        differs = problem and not waiting and not any(one.problem for one in facts)
        failed = tuple((rank, problem) for rank in range(self.world.size)) if differs else ()
        self.seen = replace(self.seen, facts=tuple(facts), failed=failed)
        starts = not waiting and not problem and not any(one.problem for one in facts)
        store.set("facts", json.dumps({"facts": [asdict(one) for one in facts], "starts": starts}))

    def _answer_roll(self) -> None:
        """Reports this rank's failure, or an empty one, since a rank may have finished its part early."""
        assert self._store is not None
        self._store.set(f"ended/{self.own.rank}", self.failure)
        self._store.check(["verdict"])  # waits for an answer of the store, unlike the line above

    def _call_roll(self) -> None:
        """Collects the reports of all ranks that answer, after a failure of rank 0; the others are silent."""
        store = self._store
        assert store is not None
        waiting, reports = {one.rank for one in self.seen.facts} - {0}, {0: self.failure}
        deadline = time.monotonic() + _GRACE_SECONDS
        while waiting and time.monotonic() < deadline:
            for rank in [rank for rank in sorted(waiting) if store.check([f"ended/{rank}"])]:
                reports[rank] = store.get(f"ended/{rank}").decode()
                waiting.remove(rank)
            time.sleep(_POLL_SECONDS * bool(waiting))
        failed = () if waiting else tuple((rank, words) for rank, words in sorted(reports.items()) if words)
        self.seen = replace(self.seen, silent=tuple(sorted(waiting)), failed=failed, phase=self._phase)

    # ------------------------------------------------------------------------------------------------ measurements

    def _measure(self, comm: Comm, shared: bool, host: TorchHostGroup, hosts: Hosts) -> None:
        """Measures clocks, axes and pairs; rank 0 stores the results."""
        names, leaders = list(hosts.ranks), [ranks[0].rank for ranks in hosts.ranks.values()]
        leads = self.own.rank in leaders and len(leaders) > 1
        self._enter("comparing clocks")
        clocks = measure_clocks(host, leaders) if leads else []
        self.seen = replace(
            self.seen,
            clocks=tuple(
                ClockFigure(host=name, seconds=ahead, uncertain=error)
                for name, (ahead, error) in zip(names[1:], clocks, strict=False)
            ),
        )
        times = list[AxisTimes]()
        self._enter("measuring the axes of the grid")
        for found in measure_axes(comm, self.world.device):
            times.append(found)
            self._enter("measuring the axes of the grid")
        rows = _gathered(host, [_row(one) for one in times])
        everyone = [AxisTimes(row[0], tuple(row[1]), row[2], row[3], row[4]) for row in rows]
        figures = axis_figures(everyone, comm.grid, hosts, self.world.device, shared)
        self.seen = replace(self.seen, axes=tuple(figures))
        if len(leaders) > 1:
            self._enter("measuring pairs of hosts")
            played = measure_pairs(host, leaders) if leads else []
            rows = _gathered(host, [[list(one.hosts), one.latency, one.rate] for one in played])
            pairs = [_pair(PairTimes((row[0][0], row[0][1]), row[1], row[2]), names, hosts) for row in rows]
            self.seen = replace(self.seen, pairs=tuple(sorted(pairs, key=lambda pair: pair.rate)))


def _row(one: AxisTimes) -> list[Any]:
    return [one.axis, list(one.ranks), one.latency, one.payload, one.rate]


def _gathered(host: TorchHostGroup, rows: Sequence[list[Any]]) -> list[Any]:
    """Returns the rows of all ranks, on rank 0."""
    texts = collect(host, json.dumps(list(rows)).encode())
    return [row for text in texts or [] for row in json.loads(text)]


def _pair(times: PairTimes, names: Sequence[str], hosts: Hosts) -> PairFigure:
    first, second = (names[index] for index in times.hosts)
    carriers = [hosts.host(name).carrier() for name in (first, second)]
    speeds = [one.megabits for one in carriers if one is not None and one.megabits]
    expected = min(speeds) * 125e3 if speeds else None
    return PairFigure(hosts=(first, second), latency=times.latency, rate=times.rate, expected_rate=expected)


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else 0
