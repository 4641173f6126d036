"""Entries of the ledger: accepted commands, and the error of a refused request."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from engine.serving.bookkeeping.journal import pending
from engine.serving.commands import (
    BackwardTensors,
    Command,
    Failure,
    ForwardBackward,
    ForwardTensors,
    Result,
    SampleTokens,
)

INTERNAL = ""
"""Session of entries that the service makes itself."""


class RequestRefusedError(Exception):
    """Error of a request that the service refuses.

    Args:
        sentence: text of the reply.
        status: HTTP status of the reply.
        retry_seconds: seconds after which the client may repeat the request; None: the reply names none.
    """

    def __init__(self, sentence: str, status: int = 400, retry_seconds: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_seconds = status, retry_seconds


class EntryState(Enum):
    """State of an accepted command of a client, from its arrival until its result is removed."""

    STORING = "is written to the journal"
    HELD = "waits for an earlier number of its model"
    QUEUED = "is queued"
    RUNNING = "runs"
    DONE = "is done"
    FORGOTTEN = "has been fetched, and its result was removed"


@dataclass(eq=False, slots=True)
class FutureEntry:
    """Command of a client or of the service itself and, once it has ended, its result. ``key`` identifies the entry."""

    key: str
    session: str
    command: Command | None
    """None once the command is done, and for futures with a result in a snapshot."""
    line: str | None = None
    """Model of the numbered command, which runs in the order of numbers; None: no number."""
    number: int | None = None
    route: str = ""
    """Route of the request, by which the reply is made from the result."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that the reply needs."""
    digest: str = ""
    state: EntryState = EntryState.STORING
    result: Result | None = None
    result_bytes: int = 0
    is_fetched: bool = False
    accepted: float = 0.0
    """Time of the ledger's clock at which the request has come."""
    cost: int = 1
    """Tokens; a backward counts three times."""
    stored: "Future[None]" = field(default_factory=pending)
    """Done when the command is in the journal."""
    listeners: list[Callable[[], None]] = field(default_factory=list)
    """Functions that are called once, when the command is done; in the thread that has run it."""

    @property
    def is_sample(self) -> bool:
        """True for sampling commands. Clients may cancel them, and training commands may overtake them."""
        return isinstance(self.command, SampleTokens)

    @property
    def has_failed(self) -> bool:
        """True if the command has ended and its result is a failure."""
        return isinstance(self.result, Failure)


def cost_of(command: Command) -> int:
    """Returns the cost of ``command`` in the fair queue, at least 1: the command's tokens, times 3 for forward with
    backward, or times 2 for backward alone.
    """
    match command:
        case ForwardBackward():
            return max(1, sum(len(datum.tokens) for datum in command.data) * (1 if command.forward_only else 3))
        case SampleTokens():
            return max(1, len(command.prompt) + command.parameters.samples * command.parameters.max_tokens)
        case ForwardTensors():
            return max(1, max((one.size for one in command.tensors.values()), default=1))
        case BackwardTensors():
            return 2 * max(1, max((one.size for one in command.gradients.values()), default=1))
    return 1
