"""Replay of a store's journal: all versions again, in one process, from the stored bodies."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.outer.store.journal import TRACE, read_events
from engine.outer.store.recovery import apply_stored
from engine.outer.store.state import DifferentMergeError, StoreState


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay."""

    merges: int
    """Merges with the bits that the journal says."""
    versions: tuple[int, ...]
    """Version of each fragment of this store after them."""
    difference: str | None = None
    """First merge with other bits; None without one."""


def replay(folder: str | Path) -> Replayed:
    """Recomputes every merge of a journal and compares the hash of its weights; stops at the first that differs.

    Needs the bodies since the first event: the store was started with ``keep``. Changes nothing in the folder.

    Raises:
        CheckpointError: there is no journal, it is damaged, or a body is missing.
    """
    path = Path(folder)
    state: StoreState | None = None
    merges = 0
    for _, event in read_events(path):
        if event["kind"] == "start" and state is None:
            if not event["keep"]:
                raise CheckpointError(
                    f"{path} was written by a store that removes merged bodies, and a replay needs all; start the "
                    "store with keep in a new folder."
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
        raise CheckpointError(f"{path / TRACE} has no events; give the folder of a store.")
    return Replayed(merges, _versions(state))


def _versions(state: StoreState) -> tuple[int, ...]:
    return tuple(fragment.version for fragment in state.fragments.values())
