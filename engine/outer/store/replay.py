"""Replay of a store's journal from stored bodies: of all of it, or at a start of what follows the newest snapshot."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.errors import COPY_AGAIN, CheckpointError
from engine.outer.store.journal import TRACE, Journal, read_body, read_events
from engine.outer.store.records import Event, hash_of, read_key
from engine.outer.store.snapshot import read_snapshot
from engine.outer.store.state import DifferentMergeError, StoreState, push_name, seed_name

_MAY_CHANGE = ("lease", "grace", "sites", "least", "staleness")
"""Settings that decide when merges are made and which are in the journal, so that a new start may change them."""


def body_name(event: Event) -> str | None:
    """Returns the name of the file with the bytes of a journal's "seed" or "push" event; None for other events."""
    match event["kind"]:
        case "seed":
            return seed_name(event["life"], event["fragment"], event["rank"])
        case "push":
            return push_name(read_key(event), event["rank"])
    return None


def apply_stored(state: StoreState, folder: Path, event: Event) -> None:
    """Applies one event of the journal in ``folder`` to ``state``, and reads the event's stored file, if any.

    Raises:
        CheckpointError: the file is missing, or its hash differs.
        DifferentMergeError: a merge gives weights with another hash than the journal has.
    """

    def stored(name: str) -> Tensor:
        body = read_body(folder, name)
        if hash_of((body,)) != event["hash"]:
            raise CheckpointError(f"{folder / 'bodies' / name} is damaged: it has another hash; {COPY_AGAIN}")
        return body

    state.apply(event, stored)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of the replay of a store's journal: number of reproduced merges, and the first merge that differs."""

    merges: int
    """Merges with the bits that the journal says."""
    versions: tuple[int, ...]
    """Version of each fragment of this store after them."""
    difference: str | None = None
    """First merge with other bits; None without one."""


def replay(folder: str | Path) -> Replayed:
    """Recomputes every merge of the store's journal in ``folder``, and compares the new weights with the journal's
    hashes.

    Stops at the first difference, which the result's ``difference`` describes. The store must have retained all pushes
    (``Store(keep=True)``). Changes nothing in the folder.

    Raises:
        CheckpointError: there is no journal, it is damaged, or a push is missing.
    """
    path = Path(folder)
    state: StoreState | None = None
    merges = 0
    for _, event in read_events(path):
        if event["kind"] == "start" and state is None:
            if not event["keep"]:
                raise CheckpointError(
                    f"{path} was written by trine outer without --keep, which removes each pushed update after its "
                    "merge, but a replay needs all pushed updates; start trine outer with --keep and a new --folder "
                    "before a training that you want to replay."
                )
            state = StoreState(event["settings"], event["store"])
        if state is None:
            break
        try:
            apply_stored(state, path, event)
        except DifferentMergeError as error:
            return Replayed(merges, _versions(state), str(error))
        merges += event["kind"] == "merge"
    if state is None:
        raise CheckpointError(
            f"{path / TRACE}, the journal of a store, is missing or has no events; give the folder that trine outer "
            "has written (its --folder, outer.folder or outer-store)."
        )
    return Replayed(merges, _versions(state))


def _versions(state: StoreState) -> tuple[int, ...]:
    return tuple(fragment.version for fragment in state.fragments.values())


def recover(journal: Journal, state: StoreState, settings: Mapping[str, Any]) -> None:
    """Restores ``state`` from the journal's newest snapshot and all events after it.

    Removes an incomplete last line of the journal and, unless the store retains all pushes (``keep``), the pushes that
    are no longer needed.

    Args:
        settings: settings that all sites and the store share, as JSON values.

    Raises:
        CheckpointError: the journal is damaged, or a store with other ``settings`` has written it.
    """
    first = next((event for _, event in read_events(journal.folder)), None)
    if first is not None:
        _check_settings(journal.folder, first, settings, state.number)
    position = read_snapshot(journal.folder, state)
    needed = set[str]()
    for end, event in read_events(journal.folder, position):
        try:
            apply_stored(state, journal.folder, event)
        except DifferentMergeError as error:
            raise CheckpointError(
                f"trine outer cannot restore its state from {journal.folder}, because {error}; start it with the "
                "versions of Trine and PyTorch and on the kind of CPU that it ran with before."
            ) from error
        needed.update(filter(None, [body_name(event)]))
        position = end
    journal.cut(position)
    for fragment in state.fragments.values():
        needed.update(push_name(key, rank) for key, push in fragment.pushes.items() for rank in push.bodies)
        needed.update(seed_name(state.seeder or 0, fragment.index, rank) for rank in fragment.seeds)
    if first is None or not first["keep"]:
        journal.remove_bodies(set(journal.body_names()) - needed)


def _check_settings(folder: Path, first: Event, settings: Mapping[str, Any], number: int) -> None:
    known = {**first["settings"], "number of the store": first["store"]}
    for name, value in {**settings, "number of the store": number}.items():
        if name not in _MAY_CHANGE and known.get(name) != value:
            raise CheckpointError(
                f'{folder} was written with "{name}" {known.get(name)!r}, but the configuration has {value!r}; set it '
                "back to the first value, or give another folder."
            )
