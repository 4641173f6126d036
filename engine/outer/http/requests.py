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
    """Returns the header of a request with a token.

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
    """Join of a site; repeating ``attempt`` starts no second life."""

    request: JoinRequest
    attempt: str


@dataclass(frozen=True, slots=True)
class RegisterCall:
    """Registration of one rank."""

    life: int
    rank: int
    layout: RankLayout


@dataclass(frozen=True, slots=True)
class PushHead:
    """Description of one range of a push."""

    meta: PushMeta
    rank: int
    share: PushShare
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Place and number of the body."""
        return BodyKey(self.meta.key.life, self.rank, self.meta.key.fragment, self.meta.key.seq)


@dataclass(frozen=True, slots=True)
class SeedHead:
    """Description of one range of the initial weights."""

    life: int
    rank: int
    fragment: int
    part: BodyRange

    @property
    def key(self) -> BodyKey:
        """Place and number of the body."""
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER)


@dataclass(frozen=True, slots=True)
class ArrivedCall:
    """Question how many bytes of a body have arrived; ``seq`` is None for initial weights."""

    life: int
    rank: int
    fragment: int
    seq: int | None
    whole: str
    """Hash of the body."""

    @property
    def key(self) -> BodyKey:
        """Place and number of the body."""
        return BodyKey(self.life, self.rank, self.fragment, SEED_NUMBER if self.seq is None else self.seq)


@dataclass(frozen=True, slots=True)
class LifeCall:
    """Renewal of a lease, or end of a life."""

    life: int


@dataclass(frozen=True, slots=True)
class OfferCall:
    """Request for an offer; repeating ``asked`` returns the same offer, so that its version remains available."""

    life: int
    fragment: int
    asked: int
    """Number of the request, ascending within a life."""


@dataclass(frozen=True, slots=True)
class OfferReply:
    """Offer of a store, if it has one."""

    offer: Offer | None


@dataclass(frozen=True, slots=True)
class Done:
    """Reply without values."""
