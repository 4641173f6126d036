"""Service of a model's folder: tenants and command loop on every rank, ledger and HTTP server in a thread of rank 0."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import Config
from engine.config.serve_section import ServeConfig
from engine.errors import ConfigError, LaunchError
from engine.parallel.comm.host_group import TorchHostGroup
from engine.parallel.comm.world import read_world
from engine.serving.commands import Done
from engine.serving.executor import Executor
from engine.serving.journal import read_journal
from engine.serving.ledger import Ledger
from engine.serving.queue import FairQueue
from engine.serving.restart import Restart, open_ledger
from engine.serving.service import LedgerSource, serve_ranks
from engine.serving.session import LedgerLimits
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.wire.served_model import ServedModel
from engine.web.sockets import address_of, is_loopback, listen

JOURNAL, WEIGHTS = "journal", "weights"
"""Folders of the journal and of saved weights in the folder of a service."""
_HOST_SECONDS = 600.0
SERVER = "the service"
"""Name of the server in errors."""


def read_token(serve: ServeConfig) -> str:
    """Returns the token of a service; empty without one.

    Raises:
        ConfigError: it is not one word of printable ASCII.
        LaunchError: there is none, and the service would serve other hosts.
    """
    token = os.environ.get(serve.token_env, "")
    if token and not (token.isascii() and token.isprintable() and token.split() == [token]):
        raise ConfigError(f"the token in {serve.token_env} is not one word of printable ASCII; give one.")
    if not token and not is_loopback(serve.host):
        raise LaunchError(
            f"--host {serve.host} serves other hosts, and a service without a token serves its own only; set "
            f"{serve.token_env}, or leave --host out."
        )
    return token


def limits_of(serve: ServeConfig) -> LedgerLimits:
    """Returns the limits of a ledger."""
    queue = serve.queue
    return LedgerLimits(
        queue.depth, queue.per_session, queue.seconds, serve.session_seconds, serve.journal.snapshot_every
    )


@contextmanager
def open_front(serve: ServeConfig, model: ServedModel, ready: Callable[[str], None]) -> Iterator[LedgerSource]:
    """Opens the journal, serves HTTP in a thread, and yields the source of the command loop.

    Args:
        ready: receives a line about address and token once the socket listens.

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
    token, folder = read_token(serve), Path(serve.folder)
    with ExitStack() as opened:
        listening = opened.enter_context(listen(serve.host, serve.port, SERVER))
        ledger, restart = open_ledger(FairQueue(), folder / JOURNAL, limits_of(serve))
        assert ledger.journal is not None
        opened.callback(ledger.journal.close)
        application = ServiceApplication(ledger, model, token, int(serve.queue.body_bytes))
        options = {} if serve.tls_certificate is None else {
            "ssl_certfile": serve.tls_certificate, "ssl_keyfile": serve.tls_key
        }  # fmt: skip
        hosted = HostedApplication(application, listening, application.end_waits, **options)
        opened.enter_context(run_in_thread(hosted, "trine-service"))
        address = address_of(listening, "https" if options else "http")
        about = f"token in {serve.token_env}" if token else "without a token: this host only"
        ready(f"service at {address}: {' '.join(model.names)}, folder {folder}, {about}")
        yield LedgerSource(ledger, restart, lambda: None)


def serve_folder(config: Config, folder: Path) -> None:
    """Serves the model in a Hugging Face folder until rank 0 gets SIGTERM or SIGINT. Every rank calls it.

    Raises:
        EngineError: folder, configuration, address or journal have a mistake, or a rank is lost.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    serve = config.serve or ServeConfig()
    facts = AutoConfig.from_pretrained(folder)
    limits = TenantLimits(adapters=serve.tenants.most, full=serve.tenants.full)
    pool = TenantPool(lambda: AutoModelForCausalLM.from_pretrained(folder), config, limits)
    grid = pool.base.grid
    executor = Executor(pool, Path(serve.folder) / WEIGHTS)
    host = TorchHostGroup(grid.rank, read_world().size, _HOST_SECONDS, "serve")
    model = _facts_of(facts, folder, serve, str(grid))

    def source() -> AbstractContextManager[LedgerSource]:
        return open_front(serve, model, lambda line: print(line, flush=True))

    serve_ranks(executor, host, source if grid.rank == 0 else None)


def _facts_of(facts: Any, folder: Path, serve: ServeConfig, grid: str) -> ServedModel:
    """Returns facts about a model from its configuration and tokenizer."""
    ends = facts.eos_token_id
    tokenize = None
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenize = partial(tokenizer.encode, add_special_tokens=False)
    return ServedModel(
        serve.models or (folder.resolve().name,),
        facts.max_position_embeddings,
        facts.vocab_size,
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        (facts.architectures or [type(facts).__name__])[0],
        grid,
        tokenize,
    )


def check_journal(folder: Path) -> Mapping[str, int]:
    """Reads the journal in the folder of a service without changing it; returns the numbers of what a start would load
    and run.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    ledger = Ledger(FairQueue(), None, LedgerLimits())
    for entry in (restart := Restart(ledger, read_journal(folder / JOURNAL))).entries():
        ledger.finish(entry, Done())
    return restart.counts
