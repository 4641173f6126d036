"""Training service on the ranks: rank 0 answers HTTP in a thread, and all ranks run its commands in one order.

start    models of the journal -> commands of clients until rank 0 gets SIGTERM or SIGINT
end      all ranks leave the loop after the same command; the server stops, engines close

A command that does not end, because a rank has, blocks rank 0's main thread. A thread hears the launcher's SIGTERM and
answers the clients, before the launcher or the watchdog kills the process.
"""

import logging
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from engine.config import Config
from engine.config.serve_section import ServeConfig
from engine.engine import Engine, ServedFunction
from engine.errors import ConfigError, EngineError, PlanError, first_line
from engine.parallel.comm.host_group import HostGroup, TorchHostGroup
from engine.parallel.comm.world import read_world
from engine.serving.bookkeeping.session import SHARED
from engine.serving.commands import Adapter
from engine.serving.executor import CommandExecutor
from engine.serving.host.front import LedgerSource, check_front, open_front
from engine.serving.loop import CommandLoop
from engine.serving.tenants.pool import TenantLimits, TenantPool
from engine.serving.training import LENGTH
from engine.serving.wire.served_model import ServedModel

logger = logging.getLogger("trine")

WEIGHTS = "weights"
"""Folder of saved weights in the folder of a service."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
STOP_SECONDS = 1.0
"""Seconds for which a command runs on after a signal, before its client and all others are answered 503."""


def serve_folder(config: Config, folder: Path) -> None:
    """Serves the model in a Hugging Face folder to training clients until rank 0 receives SIGTERM or SIGINT.

    Every rank calls it.

    Raises:
        ConfigError: the folder has no causal language model.
        EngineError: configuration, address or journal (stored commands) are wrong, or a rank is lost.
    """
    settings = config.serve or ServeConfig()
    check_front(settings, read_world().rank)
    limits = TenantLimits(adapters=settings.tenants.most, full=settings.tenants.full)
    example = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64)}
    weights = replace(config.checkpoint, init_from=config.checkpoint.init_from or str(folder))
    pool = TenantPool(lambda: empty_model(folder), replace(config, checkpoint=weights), limits, example)
    model = describe(pool.base, settings.models or (folder.resolve().name,), read_tokenizer(folder))
    executor = CommandExecutor(
        pool, Path(settings.folder) / WEIGHTS, staleness=settings.held.staleness, vllm=settings.sampler.vllm
    )
    serve_ranks(executor, settings, model)


def serve(
    engine: Engine, functions: Mapping[str, ServedFunction] | None = None, settings: ServeConfig | None = None
) -> None:
    """Serves ``engine`` as one model that all clients share, until rank 0 receives SIGTERM or SIGINT.

    Every rank calls it.

    Args:
        functions: functions that clients call by name, with tensors as arguments and results.
        settings: address, limits and folder; None: section ``serve`` of the engine's configuration, or its defaults.

    Raises:
        EngineError: address or settings are wrong, or a rank is lost.
    """
    settings = settings or engine.config.serve or ServeConfig()
    weights, held, vllm = Path(settings.folder) / WEIGHTS, settings.held, settings.sampler.vllm
    executor = CommandExecutor(_OneEngine(engine), weights, functions, held.staleness, vllm)
    executor.adopt(SHARED, engine)
    serve_ranks(executor, settings, describe(engine, settings.models or (SHARED,)), journals=False)


def serve_ranks(executor: CommandExecutor, settings: ServeConfig, model: ServedModel, journals: bool = True) -> None:
    """Runs this rank's command loop and, on rank 0, the HTTP server, until the service ends; then closes ``executor``.

    Args:
        journals: True to store accepted commands on disk, so that a restart runs them again.

    Raises:
        EngineError: a rank is lost, or address or journal are wrong.
    """
    grid = executor.grid
    host = TorchHostGroup(grid.rank, grid.world_size, _PATIENCE_SECONDS, "serve a model")
    try:
        _run_loop(executor, host, partial(open_front, settings, model, partial(print, flush=True), journals))
    finally:
        executor.close()
        host.close()


_PATIENCE_SECONDS = 600.0
"""Seconds after which a rank that runs one command is considered lost."""


def _run_loop(
    executor: CommandExecutor, host: HostGroup, front: Callable[[], AbstractContextManager[LedgerSource]]
) -> None:
    if host.rank:
        with _signals_to(lambda: None) as renew:  # rank 0 ends the loop of all
            CommandLoop(host, executor.run, executor.spoil, beat=renew, retained=executor.retained_bytes).run()
        return
    with front() as source, _signals_to(source.stop) as renew, answering_late_stops(source.end):
        CommandLoop(host, executor.run, executor.spoil, source, renew, executor.retained_bytes).run()


def empty_model(folder: Path) -> nn.Module:
    """Returns the causal language model in a Hugging Face folder, with its parameters on the meta device.

    Raises:
        ConfigError: the folder has no such model, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    except ImportError as error:
        raise ConfigError("trine serve builds models with transformers; run: pip install transformers.") from error
    try:
        about = AutoConfig.from_pretrained(folder, local_files_only=True)
        build: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model = build(about, dtype=about.dtype or torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model {folder} is no causal language model of Hugging Face ({first_line(error)}); give a folder with "
            "config.json and weights."
        ) from error
    with suppress(OSError):  # a folder without generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    made: nn.Module = model
    return made


def read_tokenizer(folder: Path) -> Callable[[str], list[int]] | None:
    """Returns a function from text to token ids; None if ``folder`` has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        logger.info("%s has no tokenizer (%s), so stop strings are refused", folder, first_line(error))
        return None

    def tokenize(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    return tokenize


def describe(engine: Engine, names: tuple[str, ...], tokenize: Callable[[str], list[int]] | None = None) -> ServedModel:
    """Returns facts about the engine's model, such as context length, for checks of requests.

    Args:
        names: names by which clients ask for the model.
        tokenize: function from a stop string to its token ids; None: stop strings are refused.
    """
    about: Any = getattr(engine.module, "config", None)
    ends = getattr(getattr(engine.module, "generation_config", None), "eos_token_id", None)
    return ServedModel(
        names=names,
        context=int(getattr(about, "max_position_embeddings", None) or 1 << 20),
        vocabulary=int(getattr(about, "vocab_size", None) or 1 << 31),
        ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (int(ends),),
        architecture=type(engine.module).__name__,
        grid=str(engine.grid),
        tokenize=tokenize,
    )


class _OneEngine:
    """Pool of one engine, which creates no tenants."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def base(self) -> Engine:
        return self._engine

    def create(self, model_id: str, adapter: Adapter | None) -> Engine:
        raise PlanError(
            f"this service cannot create model {model_id}, because engine.serve shares one engine among all clients; "
            f'use model "{SHARED}", or start `trine serve`, under which each client creates models.'
        )

    def get(self, model_id: str) -> Engine:
        return self._engine

    def drop(self, model_id: str) -> None:
        raise PlanError(
            f'unload_model, or load_weights without "optimizer": true, would remove model "{model_id}", which all '
            'clients of this service share; leave unload_model out, or send load_weights with "optimizer": true to '
            "load weights and optimizer state into the existing model."
        )

    def close(self) -> None:
        """Leaves the engine to its owner."""


@contextmanager
def _signals_to(stop: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Calls ``stop`` at SIGTERM and SIGINT inside the block; yields the function that sets the handlers again.

    An engine sets a handler of its own, by which it would save a checkpoint and exit in its next step.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    def renew() -> None:
        for one in _SIGNALS:
            if signal.getsignal(one) is not handle:
                signal.signal(one, handle)

    before: dict[signal.Signals, Any] = {one: signal.getsignal(one) for one in _SIGNALS}
    try:
        renew()
    except ValueError as error:
        raise EngineError(
            f"engine.serve was called in the thread {current_thread().name!r}, but it handles signals, and Python "
            "allows this in the main thread only; call engine.serve in the main thread of each rank."
        ) from error
    try:
        yield renew
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def answering_late_stops(end: Callable[[str], None]) -> Iterator[None]:
    """Opens a context that calls ``end`` with a reason if it is still open ``STOP_SECONDS`` after SIGTERM or SIGINT."""
    over, (ours, theirs) = Event(), socket.socketpair()
    theirs.setblocking(False)

    def listen() -> None:
        while numbers := ours.recv(16):
            if set(numbers) & set(_SIGNALS) and not over.wait(STOP_SECONDS):
                end("the service was told to end, or a rank has ended, and a command has not finished")

    thread = Thread(target=listen, name="trine-late-stop", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        theirs.close()
        thread.join()
        ours.close()
