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
    """Range of elements of one logical tensor (whole, as on one GPU), with the tensor's name."""

    name: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Elements that one rank of a training site pushes and pulls, in the order in which its messages have them."""

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
    """Identity of a push, in which a training site sends gradients or weight differences to the store.

    It has the site's life (run), the fragment (group of tensors), and ``seq``, the number of the push in this life and
    fragment, from 0. A second push with an equal key has no effect.
    """

    life: int
    fragment: int
    seq: int

    def __str__(self) -> str:
        return f"{self.life}-{self.fragment}-{self.seq}"


@dataclass(frozen=True, slots=True)
class PushMeta:
    """Description of a push of one fragment (group of tensors); all ranks of the site that pushes send the same
    description.
    """

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
    """Loss and loss weight that one rank adds to a push; the store sums both over the ranks of the training site."""

    weight: float = 0.0
    """Loss weight of the gradients; 0 on ranks that do not count it, and for differences."""
    loss: float = 0.0
    """Sum of losses."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Newest version of a fragment (group of tensors) that a training site may take over.

    The offer also has facts about the merge that made this version.
    """

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
    """State of a push after the store has received a body from one rank."""

    PARTIAL = "partial"
    """Bodies of other ranks are missing."""
    COMPLETE = "complete"
    """All bodies are stored; the push waits for its merge."""
    MERGED = "merged"
    """The push is in a version already; its body was ignored."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """State of a store for displays, such as ``trine watch``; ``received_bytes`` and ``sent_bytes`` count bytes of
    bodies.
    """

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
        message: one sentence with the given value, the rule and the remedy.
        status: HTTP status, such as 409 for a push out of sequence and 410 for a life that has ended.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class StoreLink(Protocol):
    """Interface through which one rank of a training site reaches the outer store, which merges the sites' weights.

    Implementations are a store in this process, and a connection to one or more stores. ``life`` is the number of one
    run of the site's processes, and ``fragment`` the position of a group of tensors in the result of ``divide``. No
    method waits for a merge. Every method with the argument ``life`` renews this life's lease.
    """

    @property
    def outage(self) -> str:
        """Sentence about a store that does not answer; empty if all answer."""

    def join(self, request: JoinRequest) -> JoinReply:
        """Starts a new life of a site, one run of its processes; only rank 0 of the site calls it.

        An earlier life of the site ends; its complete pushes remain and are merged later.
        """

    def register(self, life: int, rank: int, layout: RankLayout) -> None:
        """Registers ``layout``, the elements that ``rank`` pushes and pulls; call it before any push and pull of this
        life.
        """

    def seed(self, life: int, rank: int, fragment: int, body: Tensor) -> None:
        """Sends ``body``, the initial weights of the elements of ``fragment`` that ``rank`` pushes, fp32 as uint8
        [bytes].
        """

    def push(self, meta: PushMeta, rank: int, share: PushShare, body: Tensor) -> PushState:
        """Stores the part of a push that ``rank`` sends, and returns the push's state. On return, the part survives a
        crash.

        Args:
            meta: description of the push, equal on all ranks of the site.
            share: loss and loss weight that this rank adds to the push.
            body: encoded values of this rank, uint8 [bytes].
        """

    def offer(self, life: int, fragment: int) -> Offer | None:
        """Returns the newest version of ``fragment`` that this life may take over; the store retains it for ``pull``.

        Returns None before the initial weights have come, and while the store's merge rule forbids this life to take
        over a version.
        """

    def pull(self, life: int, rank: int, fragment: int, version: int) -> Tensor:
        """Returns the elements of ``fragment`` that ``rank`` updates, fp32 [elements], from ``version``, which the last
        offer names.
        """

    def renew(self, life: int) -> None:
        """Renews the lease of ``life``, one run of a site. When a lease ends, the store counts the site as lost.

        Raises:
            GridError: a store does not answer now.
        """

    def leave(self, life: int) -> None:
        """Ends ``life``, one run of a site, so that merges no longer wait for this site."""

    def status(self) -> StoreStatus:
        """Returns the versions, live sites and traffic of the store."""
