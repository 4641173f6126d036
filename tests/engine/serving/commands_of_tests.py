"""Entries of tests: a session with one model and its numbered commands."""

from pathlib import Path

import numpy as np

from engine.serving.bookkeeping.entry import FutureEntry
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.restart import open_ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import (
    AdamParameters,
    Command,
    CreateModel,
    Datum,
    ForwardBackward,
    LossCall,
    OptimStep,
    SampleTokens,
    SamplingParameters,
)
from tests.engine.serving.executors import Runs

SESSION = "s1"
MODEL = f"{SESSION}:train:0"


def forward_backward(number: int, tokens: int = 3, model: str = MODEL) -> ForwardBackward:
    """Returns a command whose effect depends on ``number``."""
    return ForwardBackward(model, (Datum(np.full(tokens, number, np.int64), {}),), LossCall("cross_entropy"))


def command_of(number: int, model: str = MODEL) -> Command:
    """Returns forward_backward for odd numbers, optim_step for even ones."""
    return forward_backward(number, model=model) if number % 2 else OptimStep(model, AdamParameters())


def numbered(number: int, command: Command | None = None, model: str = MODEL) -> FutureEntry:
    """Returns the entry of a numbered command."""
    return FutureEntry(
        f"{model}:{number}", model.split(":")[0], command or command_of(number, model), model, number, "test"
    )


def created(model: str = MODEL) -> FutureEntry:
    """Returns the entry of a new model."""
    return FutureEntry(f"{model}:create", model.split(":")[0], CreateModel(model, "base", None), route="create_model")


def sample(number: int, session: str = SESSION, tokens: int = 4) -> FutureEntry:
    """Returns the entry of a sample of the base model."""
    command = SampleTokens("", np.arange(3), SamplingParameters(max_tokens=tokens))
    return FutureEntry(f"{session}:sample:0:{number}", session, command, route="asample")


def open_at(folder: Path, executor: Runs, limits: LedgerLimits) -> Ledger:
    """Opens a ledger with a journal, and runs what a start runs again."""
    ledger, restart = open_ledger(FairQueue(), folder, limits)
    try:
        for entry in restart.entries():
            assert entry.command is not None
            ledger.finish(entry, executor.run(entry.command))
    except BaseException:
        assert ledger.journal is not None
        ledger.journal.close()
        raise
    return ledger


def submit(ledger: Ledger, *entries: FutureEntry) -> FutureEntry:
    """Submits entries, and waits until they are in the journal."""
    entry = ledger.submit(*entries)
    entry.stored.result(20)
    return entry


def open_session(ledger: Ledger, name: str = SESSION) -> None:
    """Opens a session and stores it."""
    ledger.open_session(name)
    ledger.append(ledger.note("session", name, {"time": "now"})).result(20)
