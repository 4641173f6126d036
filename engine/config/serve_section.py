"""Section "serve": training as a service."""

from dataclasses import dataclass

from engine.config.optim_sections import COUNT, SIZE
from engine.config.outer_section import check_address
from engine.config.reader import Section, setting
from engine.config.rules import Int, ListOf, Problems, Real, Text

_SECONDS = Real(above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeTenants:
    """Limits on the models that clients of a training service create."""

    most: int = setting(16, SIZE)
    """Number of models at a time."""
    full: int = setting(1, COUNT)
    """Number of models with all parameters trained; they are on the ranks by turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeQueue:
    """Limits on the client requests in the queue of a training service."""

    depth: int = setting(256, SIZE)
    """Commands that wait, over all sessions; further ones are answered 429."""
    per_session: int = setting(32, SIZE)
    """Commands of one session that wait."""
    body_bytes: float = setting(64e6, Real(low=1024))
    """Bytes of a request's body, decompressed."""
    seconds: float = setting(600.0, _SECONDS)
    """Seconds after which a command that has not begun fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJournal:
    """Journal of client commands that a training service has accepted. A restarted service continues from it."""

    snapshot_every: int = setting(50, SIZE)
    """Commands of a model between two snapshots; a start runs later ones again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeHeld:
    """Limits on forwards that wait for a client to request their backward."""

    bytes: float = setting(2e9, Real(low=0))
    """Bytes of graphs and of earlier weights on a rank; above it the oldest forward is dropped."""
    seconds: float = setting(300.0, _SECONDS)
    """Seconds for which a forward is retained."""
    staleness: int = setting(0, COUNT)
    """Updates between a forward and its backward, which uses the weights of its forward; 0: none. Each costs a copy of
    the weights, while it is needed.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSampler:
    """Settings for sampling text from weights that clients save."""

    vllm: str | None = setting(None, Text(noun="an address", null=True))
    """Address of a vLLM server that gets the weights that a full-parameter model saves for sampling, and samples from
    the last ones; null: the ranks sample, as they do from adapters.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of a training service: its ranks have the models, and its clients send data and choose losses."""

    host: str = setting("127.0.0.1", Text(noun="an address"))
    """Address to serve; other hosts are served only with a token."""
    port: int = setting(8100, Int(low=0, high=65535))
    """Port to serve; 0: a free one."""
    token_env: str = setting("TRINE_TOKEN", Text(noun="the name of an environment variable"))
    """Environment variable with the token that clients send as X-API-Key."""
    models: tuple[str, ...] = setting((), ListOf(each=Text(), noun="a list of names"))
    """Names by which clients ask for the base model; empty: the name of its folder."""
    folder: str = setting("runs/service", Text(noun="a path"))
    """Folder of the journal, snapshots and saved weights."""
    tenants: ServeTenants = setting(ServeTenants(), Section(cls=ServeTenants))
    """Limits of the models of clients."""
    queue: ServeQueue = setting(ServeQueue(), Section(cls=ServeQueue))
    """Limits of requests that wait."""
    held: ServeHeld = setting(ServeHeld(), Section(cls=ServeHeld))
    """Limits of forwards that wait for their backward."""
    sampler: ServeSampler = setting(ServeSampler(), Section(cls=ServeSampler))
    """Sampler of saved weights."""
    session_seconds: float = setting(120.0, _SECONDS)
    """Seconds without a heartbeat after which a session ends; its models are saved and unloaded."""
    journal: ServeJournal = setting(ServeJournal(), Section(cls=ServeJournal))
    """Journal of accepted commands."""
    tls_certificate: str | None = setting(None, Text(noun="a path", null=True))
    """File with the certificate of the server (PEM); null: HTTP without TLS."""
    tls_key: str | None = setting(None, Text(noun="a path", null=True))
    """File with the private key of the certificate (PEM)."""


def check_serve(serve: ServeConfig | None, problems: Problems) -> None:
    """Adds problems for settings of section ``serve`` that exclude each other."""
    if serve is None:
        return
    check_address("serve.sampler.vllm", serve.sampler.vllm, problems)
    if serve.queue.per_session > serve.queue.depth:
        problems.add(
            "serve.queue.per_session",
            f"{serve.queue.per_session} with a queue depth of {serve.queue.depth}; give at most the depth.",
        )
    if (serve.tls_certificate is None) != (serve.tls_key is None):
        missing, given = ("tls_key", "tls_certificate") if serve.tls_key is None else ("tls_certificate", "tls_key")
        problems.add(f"serve.{missing}", f"missing with serve.{given}; give both files, or neither.")
