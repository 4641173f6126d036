"""Requests on the wire that are no messages of the outer loop themselves, and the paths of all routes."""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.outer.http.bodies import BodyKey, BodyRange
from engine.outer.messages import JoinRequest, Offer, PushMeta, PushShare, RankLayout

JOIN, REGISTER, LEAVE, RENEW = "/v1/join", "/v1/register", "/v1/leave", "/v1/renew"
SEED, PUSH, ARRIVED = "/v1/seed", "/v1/push", "/v1/arrived"
OFFER, PULL, STATUS, HEALTH = "/v1/offer", "/v1/pull", "/v1/status", "/v1/healthz"

SEED_NUMBER = -1
"""Number of a body with initial weights."""


def authorization(token: str) -> str:
    """Returns ``Bearer <token>``, the value of the HTTP header "authorization".

    Raises:
        ConfigError: the token is not one word of printable ASCII.
    """
    if not (token.isascii() and token.isprintable() and token.split() == [token]):
        raise ConfigError(
            "the token of TRINE_OUTER_TOKEN or outer.token_file is not one word of printable ASCII; give one, such as "
            "from: openssl rand -hex 32."
        )
    return f"Bearer {token}"


@dataclass(frozen=True, slots=True)
class JoinCall:
    """Request of a training site to join a store.

    ``attempt`` is a random text; the store answers a repeated text without starting a second run.
    """

    request: JoinRequest
    attempt: str


@dataclass(frozen=True, slots=True)
class RegisterCall:
    """Request to register the elements that one rank of a training site pushes and pulls."""

    life: int
    rank: int
    layout: RankLayout


@dataclass(frozen=True, slots=True)
class PushHead:
    """JSON that precedes one range of bytes of a push in a request."""

    meta: PushMeta
    rank: int
    share: PushShare
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Identity of the push payload that the range of bytes belongs to."""
        return BodyKey(self.meta.key.life, self.rank, self.meta.key.fragment, self.meta.key.seq)


@dataclass(frozen=True, slots=True)
class SeedHead:
    """JSON that precedes one range of bytes of a rank's initial weights in a request."""

    life: int
    rank: int
    fragment: int
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Identity of the initial weights that the range of bytes belongs to; its ``seq`` is -1."""
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER)


@dataclass(frozen=True, slots=True)
class ArrivedCall:
    """Request for the number of bytes of a push, or of initial weights, that have arrived.

    ``seq`` is the number of the push; None for initial weights.
    """

    life: int
    rank: int
    fragment: int
    seq: int | None
    whole: str
    """Hash of the body."""

    @property
    def key(self) -> BodyKey:
        """Identity of the push payload or initial weights; its ``seq`` is -1 for initial weights."""
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER if self.seq is None else self.seq)


@dataclass(frozen=True, slots=True)
class LifeCall:
    """Request to renew the lease of a site's run at path /v1/renew, or to end the run at /v1/leave."""

    life: int


@dataclass(frozen=True, slots=True)
class OfferCall:
    """Request for the newest version of ``fragment`` that a training site may download.

    ``asked`` is the sequence number of the request in the run ``life``; a request repeated with the same number
    receives the same offer.
    """

    life: int
    fragment: int
    asked: int
    """Number of the request, ascending within a life."""


@dataclass(frozen=True, slots=True)
class OfferReply:
    """Reply to a request for a version; ``offer`` is None if the site may not download any now."""

    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Done:
    """Reply that confirms a request and has no fields."""
