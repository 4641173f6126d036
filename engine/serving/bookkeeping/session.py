"""Sessions of clients, and the limits of the ledger."""

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.serving.bookkeeping.entry import EntryState, FutureEntry

HOUSE = "house"
"""Name of the session of models that all clients share."""
SHARED = "shared"
"""Id of the model that all clients of the second door share."""
WAITS = (EntryState.STORING, EntryState.HELD, EntryState.QUEUED)
"""States of commands that have not begun."""


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    """Limits of a service's command queue, client sessions and memory."""

    depth: int = 256
    """Commands that wait, over all sessions."""
    per_session: int = 32
    """Commands of one session that wait."""
    seconds: float = 600.0
    """Seconds after which a command that has not begun fails."""
    session_seconds: float = 120.0
    """Seconds without a heartbeat after which a session ends."""
    snapshot_every: int = 50
    """Commands of a model between two snapshots."""
    result_bytes: int = 1 << 30
    """Bytes of results that are retained."""
    held_bytes: float = 2e9
    """Bytes of retained forwards, and of earlier weights that these need, on a rank."""
    held_seconds: float = 300.0
    """Seconds for which a forward is retained."""
    staleness: int = 0
    """Updates of its model after which a forward still serves a backward."""


@dataclass(eq=False, slots=True)
class ClientSession:
    """Session of one client, with its commands and models."""

    name: str
    """:data:`HOUSE` is the session of models that all clients share; it never ends."""
    seen: float
    """Time of its last request."""
    entries: dict[str, FutureEntry] = field(default_factory=dict)
    open: dict[str, FutureEntry] = field(default_factory=dict)
    """Entries that are not done."""
    fetched: OrderedDict[str, FutureEntry] = field(default_factory=OrderedDict)
    """Fetched futures, oldest first."""
    models: list[str] = field(default_factory=list)
    """All models that the session has created."""
    is_ending: bool = False

    def waiting(self) -> int:
        """Returns the number of the session's commands that have not begun."""
        return sum(one.state in WAITS for one in list(self.open.values()))
