"""Requests of sites to a store, checked; a request that is refused changes nothing.

A request becomes an event. The event and its body are on disk before the state changes, and merges follow at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.checked_blocks import DEFAULT_ALGORITHM
from engine.errors import first_line
from engine.outer.messages import (
    Content,
    JoinReply,
    JoinRequest,
    Offer,
    PushKey,
    PushMeta,
    PushShare,
    PushState,
    RankLayout,
    StoreRefusedError,
    StoreStatus,
)
from engine.outer.store.journal import Journal
from engine.outer.store.members import Life
from engine.outer.store.placement import check_body, check_coverage, check_layout
from engine.outer.store.records import (
    Event,
    check_model,
    check_shared,
    hash_of,
    json_values,
    layout_record,
    model_record,
    push_record,
)
from engine.outer.store.replay import recover
from engine.outer.store.snapshot import write_snapshot
from engine.outer.store.state import FragmentState, StoreState, push_name, seed_name

DISK_FULL = 507
"""Status of a refusal because the store cannot write; the same request succeeds later."""
_MEND_SECONDS = 1.0  # from a failed write to the next try
logger = logging.getLogger("trine")
Listener = Callable[[Event], None]
"""Function called with every event after it has changed the state; it returns at once and calls no store."""


class Store:
    """Store that merges the pushes of training sites into new weights; implements ``StoreLink`` in this process.

    It is thread-safe. No method waits for a merge.

    Args:
        settings: settings that all sites share, see ``shared_settings``.
        folder: folder of the journal, from which a restarted store recovers; None: the store is in memory only.
        clock: function that returns the time in seconds, for leases and merges.
        keep: True to retain all pushes, which ``replay`` needs.
        number: index of this store, if several stores divide the tensors.
        snapshot_every: merges between two snapshots.

    Raises:
        CheckpointError: the folder is damaged, in use, or of a store with other settings.
    """

    outage = ""
    """Empty: a store in this process answers."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        folder: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        keep: bool = False,
        number: int = 0,
        snapshot_every: int = 20,
    ) -> None:
        self.listeners: list[Listener] = []
        self._settings, self._clock, self._lock = json_values(settings), clock, threading.RLock()
        self._state = StoreState(self._settings, number)
        self._received = self._sent = self._merges = 0
        self._keep, self._every, self._closed, self._mends_at = keep, snapshot_every, False, 0.0
        self.problem = ""
        """Sentence about the disk while the store cannot write to it."""
        self._journal = None if folder is None else Journal(Path(folder))
        if self._journal is not None:
            try:
                self._start(self._journal)
            except BaseException:
                self._journal.close()
                raise

    def close(self) -> None:
        """Closes the store's journal, so that another store may use its folder."""
        with self._lock:
            self._closed = True
            if self._journal is not None:
                self._journal.close()

    # ------------------------------------------------------------------ members

    def join(self, request: JoinRequest) -> JoinReply:
        """Starts a new run (life) of a site, and ends its earlier run; that run's complete pushes wait for a merge.

        Raises:
            StoreRefusedError: the site's settings or model differ from the store's.
        """
        with self._request():
            state = self._state
            model = model_record(request)
            self._check_join(request, model)
            number = max(state.members.lives, default=-1) + 1
            seeds = not state.seeded and not self._has_seeder(request.site)
            event = {"kind": "join", "life": number, "site": request.site, "ranks": request.ranks, "seeds": seeds}
            self._record(event if state.model is not None else {**event, "model": model})
            self._advance()
            life = state.members.lives[number]
            clock = min((life.progress[index].clock for index in state.fragments), default=0)
            return JoinReply(number, state.rows_of(request.site), clock, seeds)

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Registers the elements that ``rank`` pushes and pulls in the run ``life``; call it before any push and pull.

        Raises:
            StoreRefusedError: ``layout`` does not fit the model or the site's other layouts.
        """
        with self._request():
            found = self._find(life)
            self._check_rank(found, rank)
            known = found.layouts.get(rank)
            if known == layout:
                return
            if known is not None:
                raise StoreRefusedError(
                    f"rank {rank} of life {life} is registered with other pieces, and pieces do not change within a "
                    "life; join again.",
                    409,
                )
            check_layout(layout, self._state.shapes)
            if len(found.layouts) + 1 == found.ranks:
                check_coverage({**found.layouts, rank: layout}, self._state.own_shapes)
            self._record(layout_record(life, rank, layout))

    def renew(self, life: int) -> None:
        """Renews the lease of ``life``, one run of a site; when a lease ends, the store counts the site as lost."""
        with self._request():
            self._find(life)

    def leave(self, life: int) -> None:
        """Ends the run ``life`` of a training site; merges no longer wait for this site."""
        with self._request():
            self._find(life)
            self._record({"kind": "leave", "life": life})
            self._advance()

    def tick(self) -> None:
        """Marks runs with expired leases as lost, and makes merges that are due; call it several times per lease."""
        with self._request():
            now = self._clock()
            for life in [life for life in self._state.members.live() if life.expires < now]:
                self._record({"kind": "lost", "life": life.number})
            self._advance()

    def status(self) -> StoreStatus:
        """Returns the state of the store; version -1 marks a fragment without initial weights on this store."""
        with self._request():
            state, live = self._state, list(self._state.members.live())
            clocks = {life.site: min((life.progress[i].clock for i in state.fragments), default=0) for life in live}
            views = [fragment.view() for fragment in state.fragments.values()]
            return StoreStatus(
                versions=state.versions,
                members={life.site: life.number for life in live},
                clocks=clocks,
                rows=dict(state.members.rows),
                waiting=[str(push.key) for each in views for push in each.waiting],
                received_bytes=self._received,
                sent_bytes=self._sent,
            )

    # ------------------------------------------------------------------ pushes

    def seed(self, life: int, rank: int, fragment: int, body: Tensor) -> None:
        """Stores ``rank``'s initial weights of ``fragment``, unless the store has them already.

        ``life``: number of the site's run. ``body``: bytes of fp32 values, uint8 [bytes].

        Raises:
            StoreRefusedError: another run must send the initial weights, ``body`` has a wrong size, or is not finite.
        """
        with self._request():
            found, part = self._find(life), self._fragment(fragment)
            layout = self._layout(found, rank)
            if part.version >= 0 or rank in part.seeds:
                return
            if self._state.seeder != life:
                raise StoreRefusedError(
                    f"life {life} sends initial weights, but life {self._state.seeder} was chosen to send them; pull "
                    "them once they have come.",
                    409,
                )
            check_body(body, part.tensors.seed_bytes(layout), f"initial weights of fragment {fragment}, rank {rank}")
            if not bool(body.clone().view(torch.float32).isfinite().all()):
                raise StoreRefusedError(
                    f"the initial weights of fragment {fragment} on rank {rank} have a number that is not finite; "
                    "start from finite weights."
                )
            event = {"kind": "seed", "life": life, "rank": rank, "fragment": fragment, "hash": hash_of((body,))}
            self._record(event, seed_name(life, fragment, rank), body)

    def push(self, meta: PushMeta, rank: int, share: PushShare, body: Tensor) -> PushState:
        """Stores ``rank``'s part of a push, on disk if there is a folder; returns the push's state. The part consists
        of ``meta``, ``share`` and the encoded values ``body``.

        Raises:
            StoreRefusedError: ``body`` cannot be decoded or has a wrong size, or the push is out of sequence.
        """
        with self._request():
            life, fragment = self._find(meta.key.life), self._fragment(meta.key.fragment)
            layout = self._layout(life, rank)
            size = fragment.tensors.message_bytes(layout, self._state.codec)
            check_body(body, size, f"push {meta.key}, rank {rank}")
            found = hash_of((body,))
            known = self._known(life, fragment, meta, rank, found)
            if known is not None:
                self._advance()
                return known
            self._check_push(life, fragment, meta, share)
            try:
                finite = fragment.tensors.is_finite(layout, body, self._state.codec)
            except ValueError as error:
                raise StoreRefusedError(f"push {meta.key} of rank {rank} cannot be decoded: {error}") from error
            self._record(push_record(meta, rank, share, found, finite), push_name(meta.key, rank), body)
            complete = fragment.pushes[meta.key].complete
            self._advance()
            return PushState.COMPLETE if complete else PushState.PARTIAL

    def body_bytes(self, life: int, rank: int, fragment: int, initial: bool) -> int:
        """Returns the size in bytes of ``rank``'s push of ``fragment`` in the run ``life``; with ``initial``, the size
        of the rank's initial weights.
        """
        with self._request():
            layout, tensors = self._layout(self._find(life), rank), self._fragment(fragment).tensors
            return tensors.seed_bytes(layout) if initial else tensors.message_bytes(layout, self._state.codec)

    # ------------------------------------------------------------------ versions

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns the newest version of ``fragment`` that the site's run ``life`` may download with ``pull``; None if
        there is none now.
        """
        with self._request():
            found, part = self._find(life), self._fragment(fragment)
            own = found.progress[fragment]
            if part.version <= own.taken or not self._state.rule.answerable(part.view(), self._state.members, found):
                return None
            if own.offered != part.version:
                self._record({"kind": "offer", "life": life, "fragment": fragment, "version": part.version})
            return self._state.offer_of(found, part, part.version)

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Returns ``rank``'s elements of ``fragment``, fp32 [elements], in the ``version`` last offered to the site's
        run ``life``.
        """
        with self._request():
            found, part = self._find(life), self._fragment(fragment)
            layout, own = self._layout(found, rank), found.progress[fragment]
            if version != own.offered or version not in part.versions:
                raise StoreRefusedError(
                    f"version {version} of fragment {fragment} is pulled, but life {life} has no offer of it; ask for "
                    "an offer first.",
                    409,
                )
            values = part.tensors.cut(part.versions[version].flats, layout)
            own.pulled = sorted({*own.pulled, rank})
            if own.taken < version and {*self._state.pullers(found, part)} <= {*own.pulled}:
                self._record({"kind": "taken", "life": life, "fragment": fragment, "version": version})
            self._sent += 4 * values.numel()
            return values

    # ------------------------------------------------------------------ checks

    def _find(self, number: int) -> Life:
        """Returns a life that has not ended, and renews its lease."""
        life = self._state.members.find(number)
        self._state.now = self._clock()
        self._state.renew(life)
        if life.lost:
            self._record({"kind": "back", "life": number})
        return life

    def _fragment(self, index: int) -> FragmentState:
        found = self._state.fragments.get(index)
        if found is None:
            own = ", ".join(map(str, self._state.fragments)) or "none"
            raise StoreRefusedError(
                f"fragment {index} is requested, but store {self._state.number} has the fragments {own}; ask the store "
                "that has it."
            )
        return found

    def _check_rank(self, life: Life, rank: int) -> None:
        if not 0 <= rank < life.ranks:
            raise StoreRefusedError(
                f"rank {rank} is given, but life {life.number} has ranks 0 to {life.ranks - 1}; join with the number "
                "of processes."
            )

    def _layout(self, life: Life, rank: int) -> RankLayout:
        self._check_rank(life, rank)
        if not life.registered:
            raise StoreRefusedError(
                f"{len(life.layouts)} of {life.ranks} ranks of life {life.number} have registered, and all have to "
                "before a push or a pull; register the others.",
                409,
            )
        return life.layouts[rank]

    def _has_seeder(self, site: int) -> bool:
        """Returns True if a live site other than ``site`` sends the initial weights."""
        seeder = self._state.members.lives.get(-1 if self._state.seeder is None else self._state.seeder)
        return seeder is not None and seeder.live and seeder.site != site

    def _check_join(self, request: JoinRequest, model: Event) -> None:
        check_shared(request, self._settings)
        if request.site < 0 or request.ranks < 1:
            raise StoreRefusedError(
                f"site {request.site} joins with {request.ranks} ranks; count sites from 0, with at least one rank."
            )
        if len(request.group_of) not in (0, len(request.tensors)):
            raise StoreRefusedError(
                f"{len(request.group_of):,} groups are given for {len(request.tensors):,} tensors; give one for each, "
                "or none."
            )
        if self._state.model is None:
            try:
                StoreState(self._settings, self._state.number).set_model(model)
            except (ValueError, IndexError) as error:
                raise StoreRefusedError(f"site {request.site} cannot join: {error}") from error
        else:
            check_model(request.site, model, self._state.model)

    def _known(
        self, life: Life, fragment: FragmentState, meta: PushMeta, rank: int, body_hash: str
    ) -> PushState | None:
        """Returns the state of a repeated push; None for a new one."""
        key, own = meta.key, life.progress[fragment.index]
        push = fragment.pushes.get(key)
        if push is not None:
            if push.meta != meta:
                raise StoreRefusedError(
                    f"push {key} is described by rank {rank} otherwise than by rank {min(push.hashes)}, and all ranks "
                    "send one description; push again from all ranks.",
                    409,
                )
            stored, state = push.hashes.get(rank), PushState.COMPLETE if push.complete else PushState.PARTIAL
        else:
            stored = own.hashes[rank] if key.seq == own.merged else body_hash if key.seq < own.merged else None
            state = PushState.MERGED
        if stored is None:
            return None
        if stored != body_hash:
            raise StoreRefusedError(
                f"push {key} of rank {rank} has come before with another body, and a push does not change; push as seq "
                f"{own.next}.",
                409,
            )
        return state

    def _check_push(self, life: Life, fragment: FragmentState, meta: PushMeta, share: PushShare) -> None:
        """Refuses a new push with wrong numbers, or before the last one is merged."""
        key, own, groups = meta.key, life.progress[fragment.index], len(fragment.tensors.sizes)
        if key not in fragment.pushes:
            if key.seq != own.next:
                raise StoreRefusedError(
                    f"push {key} has seq {key.seq}, but the next one of this life and fragment is {own.next}; push in "
                    "order.",
                    409,
                )
            under_way = next((str(other) for other in fragment.pushes if other.life == life.number), None)
            if under_way is not None:
                raise StoreRefusedError(
                    f"push {key} has come while {under_way} is in no merge, and a site has one push under way for each "
                    "fragment; wait for its merge.",
                    409,
                )
            if not 0 <= meta.base <= fragment.version:
                raise StoreRefusedError(
                    f"push {key} is based on version {meta.base}, but fragment {fragment.index} has versions 0 to "
                    f"{fragment.version}; base it on a pulled version."
                )
            if self._state.content is Content.SUMS and meta.base != fragment.version:
                raise StoreRefusedError(
                    f"push {key} is based on version {meta.base}, but version {fragment.version} was made without this "
                    "site, and summed gradients need equal weights; start the site from a checkpoint of another site.",
                    409,
                )
        numbers = {"tokens": meta.tokens, "loss weight": share.weight, "rows": meta.rows, "steps": meta.steps}
        for name, value in numbers.items():
            if not isfinite(value) or value < 0:
                raise StoreRefusedError(f"push {key} has {value} {name}; give a finite number of at least 0.")
        if len(meta.rates) not in (0, groups):
            raise StoreRefusedError(
                f"push {key} has {len(meta.rates)} learning rates for {groups} parameter groups; give one for each."
            )

    # ------------------------------------------------------------------ events

    def _start(self, journal: Journal) -> None:
        """Restores the state from the folder, with new leases, and makes merges that are due."""
        recover(journal, self._state, self._settings)
        start = {"kind": "start", "store": self._state.number, "keep": self._keep, "settings": self._settings}
        journal.write({**start, "algorithm": DEFAULT_ALGORITHM, "versions": list(self._state.versions)})
        self._state.restart(self._clock())
        self._advance()

    def _record(self, event: Event, name: str = "", body: Tensor | None = None) -> None:
        """Writes an event, after its body, and applies it."""
        own = torch.empty(0, dtype=torch.uint8) if body is None else body.detach().clone()
        if self._journal is not None:
            if body is not None:
                self._journal.write_body(name, own)
            # the base of the next push repeats which version was taken, so that a power failure may lose this event
            self._journal.write(event, synced=event["kind"] != "taken")
        self._received += own.numel()
        self._state.now = self._clock()
        self._state.apply(event, lambda _: own)
        self._announce(event)

    def _advance(self) -> None:
        """Makes all merges that are due."""
        self._state.now = self._clock()
        for fragment in self._state.fragments.values():
            while keys := self._state.rule.due(fragment.view(), self._state.members, self._state.now):
                self._merge(fragment, keys)

    def _merge(self, fragment: FragmentState, keys: tuple[PushKey, ...]) -> None:
        arrived = [fragment.pushes[key].arrived for key in keys]
        pushes = [{"life": key.life, "fragment": key.fragment, "seq": key.seq} for key in keys]
        spread = max(arrived) - min(arrived)
        event = self._state.merge({"kind": "merge", "fragment": fragment.index, "pushes": pushes, "spread": spread})
        self._merges += 1
        if self._journal is not None:
            self._journal.write(event)
            if self._merges % self._every == 0:
                self._take_snapshot(self._journal)
        else:
            fragment.spent_bodies.clear()
        self._announce(event)

    def _take_snapshot(self, journal: Journal) -> None:
        """Writes the state, and removes bodies that are in a version now."""
        write_snapshot(journal.folder, self._state, journal.position)
        for fragment in self._state.fragments.values():
            if not self._keep:
                journal.remove_bodies(fragment.spent_bodies)
            fragment.spent_bodies.clear()

    @contextmanager
    def _request(self) -> Iterator[None]:
        """Makes one request at a time; after a failed write, only the disk knows the state, and it is read again."""
        with self._lock:
            if self._closed:
                raise StoreRefusedError("the store has been closed; start it again.", 503)
            try:
                if self.problem and self._journal is not None:
                    self._mend(self._journal)
                yield
            except OSError as error:
                known = bool(self.problem)
                self.problem = (
                    f"the store cannot write to its folder ({first_line(error)}); free space there, and the sites go "
                    "on."
                )
                if not known:
                    logger.warning("%s", self.problem)
                self._mends_at = self._clock() + _MEND_SECONDS
                raise StoreRefusedError(self.problem, DISK_FULL) from error

    def _mend(self, journal: Journal) -> None:
        """Restores the state from the folder after a failed write."""
        if self._clock() < self._mends_at:
            raise StoreRefusedError(self.problem, DISK_FULL)
        journal.close()
        self._state = StoreState(self._settings, self._state.number)
        self._journal = Journal(journal.folder)
        self._start(self._journal)
        self.problem = ""

    def _announce(self, event: Event) -> None:
        for listener in self.listeners:
            listener(event)
