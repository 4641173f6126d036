"""State of a store: lives, pushes and versions. Events alone change it, so that a journal recomputes it to the bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from engine.outer.codecs import DeltaCodec, make_delta_codec
from engine.outer.fragments import divide
from engine.outer.messages import Content, Offer, PushKey, PushMeta, PushShare
from engine.outer.store.arithmetic import Contribution, MergeArithmetic
from engine.outer.store.members import Life, Members, Progress
from engine.outer.store.placement import Flats, FlatTensors
from engine.outer.store.records import Event, hash_of, read_key, read_layout, read_meta
from engine.outer.store.rules import FragmentView, WaitingPush, make_merge_rule

Bodies = Callable[[str], Tensor]
"""Function that returns a stored body by its name."""


def seed_name(life: int, fragment: int, rank: int) -> str:
    """Returns the file name of ``rank``'s initial weights for ``fragment`` in the run ``life``."""
    return f"seed-{life}-{fragment}-{rank}"


def push_name(key: PushKey, rank: int) -> str:
    """Returns the file name of ``rank``'s part of the push ``key``."""
    return f"push-{key}-{rank}"


class DifferentMergeError(Exception):
    """Error of a recomputed merge: its weights have another hash than the journal records."""


@dataclass(frozen=True, slots=True)
class MergedVersion:
    """One version of a fragment's weights, with total loss, total loss weight and number of pushes of the merge that
    made it.
    """

    number: int
    flats: Flats
    weight: float = 0.0
    loss: float = 0.0
    members: int = 0


@dataclass(slots=True)
class StoredPush:
    """Push that is not merged yet, with the parts that ranks of the site have sent."""

    meta: PushMeta
    life: Life
    bodies: dict[int, Tensor] = field(default_factory=dict)
    shares: dict[int, PushShare] = field(default_factory=dict)
    hashes: dict[int, str] = field(default_factory=dict)
    finite: bool = True
    arrived: float = 0.0

    @property
    def complete(self) -> bool:
        """True once all ranks of the site have sent their parts."""
        return len(self.bodies) == self.life.ranks


class FragmentState:
    """Retained versions, waiting pushes and optimizer of one fragment (group of tensors) on this store."""

    def __init__(self, index: int, tensors: FlatTensors, arithmetic: MergeArithmetic) -> None:
        self.index, self.tensors, self.arithmetic = index, tensors, arithmetic
        self.version = -1
        """Newest version; -1 before the initial weights have come."""
        self.versions: dict[int, MergedVersion] = {}
        """The newest version, and those that lives may still pull."""
        self.pushes: dict[PushKey, StoredPush] = {}
        """Pushes in no merge; complete ones in the order of their completion."""
        self.seeds: dict[int, Tensor] = {}
        """Initial weights of the ranks that have sent them."""
        self.spreads: list[float] = []
        self.spent_bodies: list[str] = []
        """Names of bodies that are needless after a snapshot: merged or dropped ones."""

    def install(self, version: MergedVersion) -> None:
        """Makes ``version`` the newest version of this fragment."""
        self.version = version.number
        self.versions[version.number] = version

    def view(self) -> FragmentView:
        """Returns the part of this fragment's state that merge rules read."""
        waiting = [WaitingPush(key, push.life.site, push.arrived) for key, push in self.pushes.items() if push.complete]
        lives = frozenset(push.life.number for push in self.pushes.values())
        return FragmentView(self.index, self.version, waiting, lives, self.spreads)


class StoreState:
    """State of one store: runs of training sites, and versions and pushes of the store's fragments (groups of tensors).

    ``apply`` changes the state by one event of the store's journal.

    Args:
        settings: settings that all sites and the store share, as JSON values.
        number: number of this store among all stores.
    """

    def __init__(self, settings: Mapping[str, Any], number: int = 0) -> None:
        self.settings, self.number = settings, number
        self.content = Content(settings["content"])
        self.codec: DeltaCodec = make_delta_codec(settings["wire"], density=settings["density"], bits=settings["bits"])
        self.rule = make_merge_rule(settings)
        self.members = Members()
        self.model: Event | None = None
        """Tensors and groups of the training; None before the first join."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of all tensors of the training."""
        self.own_shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the tensors of this store."""
        self.count = 0
        """Fragments of all stores."""
        self.fragments: dict[int, FragmentState] = {}
        """Fragments of this store, by number."""
        self.seeder: int | None = None
        """Life that sends the initial weights."""
        self.now = 0.0
        """Time of the current event, for arrivals and leases."""

    @property
    def seeded(self) -> bool:
        """True once every fragment of this store has its initial weights."""
        return bool(self.fragments) and all(each.version >= 0 for each in self.fragments.values())

    @property
    def versions(self) -> tuple[int, ...]:
        """Newest version number of each fragment; -1 without initial weights, and for fragments on other stores."""
        found = dict.fromkeys(range(self.count), -1)
        return tuple((found | {each.index: each.version for each in self.fragments.values()}).values())

    def apply(self, event: Event, bodies: Bodies) -> None:
        """Applies one event of the store's journal to this state.

        ``bodies``: function that returns the bytes of a stored file by name.
        """
        match event["kind"]:
            case "join":
                self._join(event)
            case "layout":
                self.members.lives[event["life"]].layouts[event["rank"]] = read_layout(event, self.shapes)
            case "seed":
                self._seed(event, bodies)
            case "push":
                self._push(event, bodies)
            case "merge":
                self.merge(event)
            case "offer" | "taken":
                self._hand_over(event)
            case "lost" | "back" | "leave":
                self._change(self.members.lives[event["life"]], event["kind"])

    # ------------------------------------------------------------------ members

    def set_model(self, model: Event) -> None:
        """Divides the tensors of ``model``, a result of ``model_record``, into groups that are merged together, and
        adds the groups of this store to ``fragments``.

        Raises:
            ValueError: the tensors cannot be divided into the configured fragments.
        """
        rows = [(str(name), tuple(shape)) for name, shape in model["tensors"]]
        parts = divide(rows, self.settings["fragments"], self.settings["stores"])
        groups = list(model["groups"]) or [{}]
        group_of = dict(zip((name for name, _ in rows), model["group_of"] or [0] * len(rows), strict=True))
        self.model, self.shapes = model, dict(rows)
        self.count = len(parts)
        for number, part in enumerate(parts):
            if part.store == self.number:
                own = ((name, self.shapes[name], group_of[name]) for name in part.names)
                tensors = FlatTensors.of(own, len(groups))
                made = MergeArithmetic(self.content, self.settings, tensors, groups)
                self.fragments[number] = FragmentState(number, tensors, made)
                self.own_shapes |= {name: self.shapes[name] for name in part.names}

    def _join(self, event: Event) -> None:
        if "model" in event:
            self.set_model(event["model"])
        for older in self.members.of_site(event["site"]):
            if not older.ended:
                self._end(older)
        progress = tuple(Progress() for _ in range(self.count))
        life = Life(event["life"], event["site"], event["ranks"], progress, expires=self._lease())
        self.members.lives[life.number] = life
        self.members.credit(life)
        for fragment in self.fragments.values() if self.content is Content.SUMS else ():
            own = progress[fragment.index]  # the site has made all these updates, or it is refused
            own.clock, own.taken = max(fragment.version, 0), fragment.version or -1
        if event["seeds"]:
            self.seeder = life.number
            for fragment in self.fragments.values():
                fragment.seeds.clear()

    def _lease(self) -> float:
        return self.now + float(self.settings["lease"])

    def renew(self, life: Life) -> None:
        """Renews the lease of ``life``, a run of a training site: it ends ``settings["lease"]`` seconds after
        ``self.now``.
        """
        life.expires = self._lease()

    def _change(self, life: Life, kind: str) -> None:
        if kind == "back":
            life.lost = False
            self.members.credit(life)
            return
        life.lost = True
        if kind == "leave":
            self._end(life)

    def _end(self, life: Life) -> None:
        """Ends a life; its complete pushes wait on, and its partial ones are dropped."""
        life.ended = True
        for own in life.progress:
            own.offered = -1
        for fragment in self.fragments.values():
            for key in [key for key, push in fragment.pushes.items() if push.life is life and not push.complete]:
                self._drop(fragment, key)
        self._release()

    def _drop(self, fragment: FragmentState, key: PushKey) -> None:
        fragment.spent_bodies += [push_name(key, rank) for rank in fragment.pushes.pop(key).bodies]

    def rows_of(self, site: int) -> int:
        """Returns the number of data rows on which training site ``site`` has trained up to its last complete push,
        merged or not.
        """
        waiting = [
            push.meta.rows
            for fragment in self.fragments.values()
            for push in fragment.pushes.values()
            if push.complete and push.life.site == site
        ]
        return max([self.members.rows.get(site, 0), *waiting])

    def restart(self, now: float) -> None:
        """Begins all leases anew at the time ``now`` (seconds) after a restart; sets arrival times of waiting pushes to
        ``now``.
        """
        self.now = now
        for life in self.members.lives.values():
            self.renew(life)
        for fragment in self.fragments.values():
            for push in fragment.pushes.values():
                push.arrived = now

    # ------------------------------------------------------------------ bodies

    def _seed(self, event: Event, bodies: Bodies) -> None:
        life, fragment = self.members.lives[event["life"]], self.fragments[event["fragment"]]
        fragment.seeds[event["rank"]] = bodies(seed_name(life.number, fragment.index, event["rank"]))
        if len(fragment.seeds) == life.ranks:
            fragment.install(MergedVersion(0, fragment.tensors.assemble_seeds(life.layouts, fragment.seeds)))
            fragment.spent_bodies += [seed_name(life.number, fragment.index, rank) for rank in fragment.seeds]
            fragment.seeds = {}

    def _push(self, event: Event, bodies: Bodies) -> None:
        meta, rank = read_meta(event), event["rank"]
        life, fragment = self.members.lives[event["life"]], self.fragments[event["fragment"]]
        own = life.progress[fragment.index]
        own.next = max(own.next, meta.key.seq + 1)
        own.taken = max(own.taken, meta.base)
        push = fragment.pushes.pop(meta.key, None) or StoredPush(meta, life)
        fragment.pushes[meta.key] = push  # the last one, so that complete pushes are in their order
        push.bodies[rank] = bodies(push_name(meta.key, rank))
        push.shares[rank] = PushShare(event["weight"], event["loss"])
        push.hashes[rank] = event["hash"]
        push.finite &= event["finite"]
        push.arrived = self.now

    # ------------------------------------------------------------------ versions

    def merge(self, event: Event) -> Event:
        """Merges the pushes in the "merge" event ``event`` into the next version of their fragment.

        Returns the event with the fields "version", "hash" and "not_finite" (a bool per push) added.

        Raises:
            DifferentMergeError: the event already has a hash, and the new weights have a different hash.
        """
        fragment = self.fragments[event["fragment"]]
        chosen = [fragment.pushes[read_key(key)] for key in event["pushes"]]
        number = fragment.version + 1
        flats = fragment.arithmetic.merge(
            fragment.versions[fragment.version].flats, [self._contribution(fragment, push) for push in chosen]
        )
        found = hash_of(flats)
        if event.get("hash", found) != found:
            raise DifferentMergeError(
                f"version {number} of fragment {fragment.index} has the hash {found} instead of the journal's "
                f"{event['hash']}"
            )
        used = [push for push in chosen if push.finite or self.content is Content.SUMS]
        shares = [share for push in used for _, share in sorted(push.shares.items())]
        weight, loss = (float(sum(values)) for values in ([s.weight for s in shares], [s.loss for s in shares]))
        fragment.install(MergedVersion(number, flats, weight, loss, len(used)))
        for push in chosen:
            self._count(fragment, push)
        fragment.spreads = [*fragment.spreads[-19:], event["spread"]]
        self._release()
        return {**event, "version": number, "hash": found, "not_finite": [not push.finite for push in chosen]}

    def _contribution(self, fragment: FragmentState, push: StoredPush) -> Contribution:
        meta = push.meta
        shares = {"tokens": meta.tokens, "steps": float(meta.steps), "equal": 1.0}
        values = partial(fragment.tensors.assemble, push.life.layouts, push.bodies, self.codec)
        weight = float(sum(share.weight for _, share in sorted(push.shares.items())))
        share = shares[self.settings["weights"]]
        return Contribution(push.finite, share, weight, meta.rates, values)

    def _count(self, fragment: FragmentState, push: StoredPush) -> None:
        """Counts a push as merged in the newest version."""
        key, own = push.meta.key, push.life.progress[fragment.index]
        own.clock += 1
        own.merged, own.merged_in = key.seq, fragment.version
        own.staleness = fragment.version - push.meta.base - 1
        own.hashes = [push.hashes[rank] for rank in range(push.life.ranks)]
        rows = self.members.rows
        rows[push.life.site] = max(rows.get(push.life.site, 0), push.meta.rows)
        self._drop(fragment, key)

    def _hand_over(self, event: Event) -> None:
        """Counts an offer, or a version that all ranks of a life have pulled."""
        own = self.members.lives[event["life"]].progress[event["fragment"]]
        if event["kind"] == "taken":
            own.taken = max(own.taken, event["version"])
            return
        own.offered, own.pulled = event["version"], []
        self._release()

    def _release(self) -> None:
        """Forgets versions that nobody may pull any more."""
        for fragment in self.fragments.values():
            kept = {life.progress[fragment.index].offered for life in self.members.lives.values()}
            kept.add(fragment.version)
            for number in [number for number in fragment.versions if number not in kept]:
                del fragment.versions[number]

    def offer_of(self, life: Life, fragment: FragmentState, version: int) -> Offer:
        """Returns a new :class:`Offer` to ``life``, a run of a training site: the retained version number ``version``
        of ``fragment``.
        """
        own, made = life.progress[fragment.index], fragment.versions[version]
        return Offer(version, own.merged, made.weight, made.loss, made.members, own.staleness)

    def pullers(self, life: Life, fragment: FragmentState) -> Sequence[int]:
        """Returns the ranks of ``life``, a run of a training site, that pull elements of ``fragment``."""
        return [rank for rank, layout in life.layouts.items() if any(True for _ in fragment.tensors.own(layout.pulled))]
