"""Messages between sites and stores of the outer loop: joins, layouts, pushes, offers and merged versions.

    site                                      store
    join          number, tensors, settings ->      a life (one run of the site's processes), rows trained so far
    register      pieces of every rank      ->
    seed          initial weights           ->      only from the first site of a new store
    push          one body a rank           ->      complete with the bodies of all ranks; repeating it is harmless
    offer                                   <-      newest version that this life may take over
    pull          one body a rank           <-      the version of the offer, which stays available until the next offer

A *fragment* is a group of whole logical tensors with a version and an optimizer of its own; messages number fragments
by their position in ``fragments.divide(...)``, where the parts of one fragment on several stores count apart. All
bodies of a rank concern the pieces that it has registered, in their order, each encoded on its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from engine.checkpoint.format.pieces import Piece


class Content(Enum):
    """Kind of values that training sites push to the store: gradients or weight differences."""

    SUMS = "sums"
    """Summed gradients; sites pull their sum and update weights themselves: synchronous training."""
    GRADIENTS = "gradients"
    """Summed gradients; the store averages them, clips, and updates its weights."""
    DELTAS = "deltas"
    """Weights before minus weights after the steps of a period; the outer optimizer takes them as gradients."""


@dataclass(frozen=True, slots=True)
class NamedPiece:
    """Range of elements of one unsharded tensor, with the tensor's name."""

    name: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Elements that one rank of a training site pushes and pulls, in the order of its messages."""

    pushed: tuple[NamedPiece, ...]
    """Elements that this rank sends; over all ranks of a site each element of every tensor is sent once."""
    pulled: tuple[NamedPiece, ...]
    """Elements that this rank updates."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Request of a training site, sent by its rank 0, to join the other sites that train the same model."""

    site: int
    """Number of the site, from 0."""
    ranks: int
    """Number of processes of the site."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and shape of every trained logical tensor, in the order of the model."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Options of each parameter group (lr, weight_decay) for an optimizer on the store."""
    group_of: tuple[int, ...] = ()
    """Group of each tensor, in the order of ``tensors``; empty: all in one group without options of its own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all sites and the store share, as JSON values; see ``shared_settings``."""
    untrained: Mapping[str, str] = field(default_factory=dict)
    """Dtype and digest of every frozen parameter and, from a site without updates, of every persistent buffer."""


@dataclass(frozen=True, slots=True)
class JoinReply:
    """Reply of the store to a training site that joins."""

    life: int
    """Number of this run of the site; no other run has it."""
    rows: int
    """Rows of this site's data in merged pushes of earlier lives; a new life continues after them."""
    clock: int
    """Clock at which this life starts: number of its pushes that count as merged."""
    seeds: bool
    """True if this site sends the initial weights."""


@dataclass(frozen=True, slots=True)
class PushKey:
    """Identity of a push of gradients or weight differences; a second push with an equal key has no effect.

    ``seq`` counts, from 0, the pushes of one fragment (group of tensors) in run number ``life`` of a site's processes.
    """

    life: int
    fragment: int
    seq: int

    def __str__(self) -> str:
        return f"{self.life}-{self.fragment}-{self.seq}"


@dataclass(frozen=True, slots=True)
class PushMeta:
    """Description of a push of one fragment (group of tensors), equal on all ranks of the site."""

    key: PushKey
    base: int
    """Version of the fragment from which the pushed difference or gradient was computed."""
    steps: int
    """Local steps in the push."""
    tokens: float
    """Tokens, or rows where tokens are not counted, in the push."""
    rows: int
    """Rows that this site has trained up to this push, including those of earlier lives."""
    step: int
    """Local step of the push, counted from the start of this life."""
    rates: tuple[float, ...] = ()
    """Learning rate of each group by the site's schedule at this step, for an optimizer on the store."""
    taken: tuple[tuple[int, int], ...] = ()
    """(local step, version) of every version that the site took over since the fragment's last push."""


@dataclass(frozen=True, slots=True)
class PushShare:
    """Loss and loss weight of one rank in a push; the store sums both over the ranks."""

    weight: float = 0.0
    """Loss weight of the gradients; 0 on ranks that do not count it, and for differences."""
    loss: float = 0.0
    """Sum of losses."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Newest version of a fragment (group of tensors) that the store offers to a training site."""

    version: int
    merged: int
    """Highest ``seq`` of this life in a merge up to ``version``; -1: none."""
    weight: float = 0.0
    """Loss weight of all pushes in the merge."""
    loss: float = 0.0
    """Sum of losses of all pushes in the merge."""
    members: int = 0
    """Number of pushes in the merge."""
    staleness: int = 0
    """Versions between the base of this life's last merged push and the version that its merge made, less one."""


class PushState(Enum):
    """State of a push on the store: parts missing, complete, or merged."""

    PARTIAL = "partial"
    """Bodies of other ranks are missing."""
    COMPLETE = "complete"
    """All bodies are stored; the push waits for its merge."""
    MERGED = "merged"
    """The push is in a version already; its body was ignored."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """State of a store for displays such as ``trine watch``."""

    versions: tuple[int, ...]
    """Version of each fragment."""
    members: Mapping[int, int] = field(default_factory=dict)
    """Life of each live site."""
    clocks: Mapping[int, int] = field(default_factory=dict)
    """Clock of each live site."""
    rows: Mapping[int, int] = field(default_factory=dict)
    """Rows of each site in merged pushes."""
    waiting: Sequence[str] = ()
    """Keys of complete pushes that wait for a merge."""
    received_bytes: int = 0
    sent_bytes: int = 0


class StoreRefusedError(Exception):
    """Error of a request that a store refuses; the state of the store is unchanged.

    Args:
        message: one sentence with the refused value, the rule that it breaks, and a remedy.
        status: HTTP status, such as 409 for a push out of sequence.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class StoreLink(Protocol):
    """Interface through which one rank of a training site reaches the stores, which merge the weights of all sites.

    ``life`` is the number of one run of the site. Each call with a ``life`` renews the lease of that run; a run with an
    expired lease counts as lost. ``fragment`` is the number of a group of tensors that one store merges together. No
    method waits for a merge.
    """

    @property
    def outage(self) -> str:
        """Sentence about a store that does not answer; empty if all answer."""

    def join(self, request: JoinRequest) -> JoinReply:
        """Starts a new life (run of the processes) of a site, and ends its earlier life.

        Only rank 0 of the site calls it. Complete pushes of the earlier life remain and are merged later.
        """

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Registers the elements that ``rank`` pushes and pulls in the site's run ``life``; call it before any push and
        pull.
        """

    def seed(self, life: int, rank: int, fragment: int, body: Tensor) -> None:
        """Sends ``rank``'s initial weights of ``fragment``; call it if ``JoinReply.seeds`` is True.

        ``life``: number of the site's run. ``body``: bytes of fp32 values, uint8 [bytes].
        """

    def push(self, meta: PushMeta, rank: int, share: PushShare, body: Tensor) -> PushState:
        """Stores ``rank``'s part of a push, on disk if the store has a folder; returns the state of the push.

        Args:
            meta: description of the push, equal on all ranks of the site.
            share: loss and loss weight of this rank.
            body: encoded values of this rank, uint8 [bytes].
        """

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns the newest version of ``fragment`` that the site's run ``life`` may download with ``pull``; None if
        there is none now.
        """

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Downloads ``rank``'s elements of ``fragment`` in this ``version``, fp32 [elements].

        ``life``: number of the site's run.
        """

    def renew(self, life: int) -> None:
        """Renews the lease of ``life``, one run of a site. When a lease ends, the store counts the site as lost.

        Raises:
            GridError: a store does not answer now.
        """

    def leave(self, life: int) -> None:
        """Ends ``life``, one run of a site; merges no longer wait for this site."""

    def status(self) -> StoreStatus:
        """Returns the versions, live sites and traffic of the store."""
