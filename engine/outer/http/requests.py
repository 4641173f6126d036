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

    ``attempt`` is a random text; repeats with the same text get the same reply and start no second run.
    """

    request: JoinRequest
    attempt: str


@dataclass(frozen=True, slots=True)
class RegisterCall:
    """Request that registers the elements that one rank of a training site pushes and pulls."""

    life: int
    rank: int
    layout: RankLayout


@dataclass(frozen=True, slots=True)
class PushHead:
    """JSON before one range of a pushed body: the description of the push, the rank with its loss, and the range's
    position.
    """

    meta: PushMeta
    rank: int
    share: PushShare
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Identity of the body to which the range belongs: life (run of the site), rank, fragment, and number of the
        push.
        """
        return BodyKey(self.meta.key.life, self.rank, self.meta.key.fragment, self.meta.key.seq)


@dataclass(frozen=True, slots=True)
class SeedHead:
    """JSON before one range of a rank's initial weights: the life (run of the site), rank, fragment, and range's
    position.
    """

    life: int
    rank: int
    fragment: int
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Identity of the body to which the range belongs: life (run of the site), rank, fragment, and -1 for initial
        weights.
        """
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER)


@dataclass(frozen=True, slots=True)
class ArrivedCall:
    """Request for the number of bytes of a body (push or initial weights) that have arrived.

    ``seq`` is the number of the push; None: initial weights.
    """

    life: int
    rank: int
    fragment: int
    seq: int | None
    whole: str
    """Hash of the body."""

    @property
    def key(self) -> BodyKey:
        """Identity of the body: life (run of the site), rank, fragment, and number of the push, or -1 for initial
        weights.
        """
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER if self.seq is None else self.seq)


@dataclass(frozen=True, slots=True)
class LifeCall:
    """Request to renew the lease of a life (run of a site) at path /v1/renew, or to end the life at /v1/leave."""

    life: int


@dataclass(frozen=True, slots=True)
class OfferCall:
    """Request for the newest version of ``fragment`` that ``life``, one run of a training site, may take over.

    ``asked`` is the number of the request within the life. A repeat with the same number receives the same offer. The
    store retains the offered version for the downloads that follow.
    """

    life: int
    fragment: int
    asked: int
    """Number of the request, ascending within a life."""


@dataclass(frozen=True, slots=True)
class OfferReply:
    """Reply to a request for an offer. Its field ``offer`` is None if the life may not take over a version now."""

    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Done:
    """Reply that confirms a request and has no fields."""
