"""Rank 0's side of a service: ledger and journal, the HTTP server in a thread, and the source of the command loop."""

import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from engine.config.serve_section import ServeConfig
from engine.errors import ConfigError, LaunchError, first_line
from engine.serving.bookkeeping.entry import FutureEntry
from engine.serving.bookkeeping.journal import read_journal
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.restart import Restart, open_ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import Command, PlainOutput, Result, Stop
from engine.serving.wire.served_model import ServedModel
from engine.web.sockets import address_of, is_loopback, listen

JOURNAL = "journal"
"""Folder of the journal in the folder of a service."""
_REPEAT = "repeat the request after the next start"
_JOURNALED = f"{_REPEAT}, which runs what was accepted from the journal."
SERVER = "the service"
"""Name of the server in errors."""


def service_token(serve: ServeConfig) -> str:
    """Returns the secret token that clients must send, or "" if there is none.

    It is the value of the environment variable that ``serve.token_env`` names.

    Raises:
        ConfigError: the token is not one word of printable ASCII.
        LaunchError: there is no token, and the service would be open to other hosts.
    """
    token = os.environ.get(serve.token_env, "")
    if token and not (token.isascii() and token.isprintable() and token.split() == [token]):
        raise ConfigError(f"the token in {serve.token_env} is not one word of printable ASCII; give one.")
    if not token and not is_loopback(serve.host):
        raise LaunchError(
            f"the address {serve.host} lets other hosts connect, and a service serves them only with a token; set the "
            f"environment variable {serve.token_env}, or serve 127.0.0.1."
        )
    return token


def check_front(serve: ServeConfig, rank: int) -> None:
    """Checks the token, the TLS files and, on rank 0, the address of a service.

    Raises:
        ConfigError: the token or a TLS file is unusable.
        LaunchError: the service would be open to other hosts without a token, or its address is in use.
    """
    service_token(serve)
    if serve.tls_certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(serve.tls_certificate, serve.tls_key)
        except OSError as error:
            raise ConfigError(
                f"serve.tls_certificate {serve.tls_certificate} and serve.tls_key {serve.tls_key} are no certificate "
                f"with its key ({first_line(error)}); give PEM files."
            ) from error
    if rank == 0:
        listen(serve.host, serve.port, SERVER).close()


class LedgerSource:
    """Source of commands for rank 0's command loop: first ``stored``, then the ledger's queue.

    Args:
        ledger: record of commands and their results.
        stored: commands of an earlier process, to run again.
        end: callback that answers all open and later requests with status 503 and a reason; any thread may call it.
    """

    def __init__(
        self, ledger: Ledger, stored: Iterator[FutureEntry], end: Callable[[str], None] = lambda why: None
    ) -> None:
        self._ledger, self._stored, self.end = ledger, stored, end
        self._running: FutureEntry | None = None

    def take(self, seconds: float) -> tuple[str, Command] | None:
        """Returns (key, next command), or None if no command arrives within ``seconds``.

        ``finish`` needs the key. After ``stop``, returns ("", ``Stop()``).

        Raises:
            CheckpointError: commands of an earlier process are run again, and a snapshot (saved model state) from which
                they continue could not be loaded.
        """
        if self._ledger.queue.is_closed:
            return "", Stop()
        entry = next(self._stored, None) or self._ledger.queue.next(seconds)
        self._running = entry
        if entry is None or entry.command is None:
            return ("", Stop()) if self._ledger.queue.is_closed else None
        return entry.key, entry.command

    def finish(self, key: str, result: Result, retained: int = 0) -> None:
        """Stores the result of the last command that ``take`` has returned.

        Args:
            key: key of the command.
            retained: bytes of autograd graphs stored for later backwards; the maximum over ranks.
        """
        assert self._running is not None and self._running.key == key
        self._ledger.finish(self._running, result, retained)

    def stop(self) -> None:
        """Ends the command loop after the current command; any thread or signal handler may call it."""
        self._ledger.queue.close()


def limits_of(serve: ServeConfig) -> LedgerLimits:
    """Returns the limits of the ledger (record of commands and results) from the configuration section ``serve``."""
    queue, held = serve.queue, serve.held
    return LedgerLimits(
        queue.depth, queue.per_session, queue.seconds, serve.session_seconds, serve.journal.snapshot_every,
        held_bytes=held.bytes, held_seconds=held.seconds, staleness=held.staleness,
    )  # fmt: skip


@contextmanager
def open_front(
    serve: ServeConfig, model: ServedModel, ready: Callable[[str], None], journals: bool = True
) -> Iterator[LedgerSource]:
    """Opens the journal (record of accepted commands), serves HTTP in a thread, and yields rank 0's source of commands.

    Args:
        serve: section ``serve`` of the configuration.
        model: facts about the base model, for checks of requests.
        ready: callback that receives a line with the address once the socket listens.
        journals: True to open the journal, so that a restart runs accepted commands again; False: no journal.

    Raises:
        LaunchError: the address cannot be served, or starlette, uvicorn or protobuf are not installed.
        CheckpointError: the journal is damaged, or another process has it.
    """
    try:
        from engine.serving.wire.application import ServiceApplication
        from engine.web.hosted import HostedApplication, run_in_thread
    except ImportError as error:
        raise LaunchError(
            f"a service needs starlette, uvicorn and protobuf, but {error.name} is not installed; run: pip install "
            "'trine[serve]'."
        ) from error
    token, folder = service_token(serve), Path(serve.folder)
    with ExitStack() as opened:
        listening = opened.enter_context(listen(serve.host, serve.port, SERVER))
        stored: Iterator[FutureEntry] = iter(())
        if journals:
            ledger, restart = open_ledger(FairQueue(), folder / JOURNAL, limits_of(serve))
            assert ledger.journal is not None
            opened.callback(ledger.journal.close)
            stored = restart.entries()
        else:
            ledger = Ledger(FairQueue(), None, limits_of(serve))
        application = ServiceApplication(
            ledger, model, token, int(serve.queue.body_bytes), journals and serve.tenants.full > 0
        )
        options = {} if serve.tls_certificate is None else {
            "ssl_certfile": serve.tls_certificate, "ssl_keyfile": serve.tls_key
        }  # fmt: skip
        hosted = HostedApplication(application, listening, application.end_waits, **options)
        opened.enter_context(run_in_thread(hosted, "trine-service"))
        address = address_of(listening, "https" if options else "http")
        about = f"token in {serve.token_env}" if token else "without a token: this host only"
        ready(f"service at {address}: {' '.join(model.names)}, folder {folder}, {about}")
        remedy = _JOURNALED if journals else f"{_REPEAT}."
        source = LedgerSource(ledger, stored, lambda why: application.end(f"{why}; {remedy}"))
        opened.callback(source.stop)
        opened.push(partial(_tell_failure, source.end))
        yield source


def _tell_failure(end: Callable[[str], None], kind: object, error: BaseException | None, trace: object) -> None:
    """Ends all requests with the error that has ended the block."""
    if error is not None:
        end(f"the service has failed: {first_line(error).rstrip('.')}")


def check_journal(folder: Path) -> Mapping[str, int]:
    """Reads the journal (accepted commands) in the folder of a service, without changing it.

    Returns the numbers of "sessions", "models", "snapshots" and "commands" that a start would restore or run again.

    Raises:
        CheckpointError: there is no journal, or it is damaged.
    """
    ledger = Ledger(FairQueue(), None, LedgerLimits())
    for entry in (restart := Restart(ledger, read_journal(folder / JOURNAL))).entries():
        ledger.finish(entry, PlainOutput())
    return restart.counts
