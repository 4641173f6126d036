"""A client that vanishes with 100 samples queued delays the next session by one sample at most."""

from pathlib import Path
from threading import Event

from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import Command, Result, SampleTokens
from tests.engine.serving.commands_of_tests import created, numbered, open_at, open_session, sample, submit
from tests.engine.serving.executors import CountingExecutor, drain
from tests.engine.serving.wire.tinker_calls import BASE, TinkerCalls, calls, forward_backward, optim_step

SAMPLES, SESSION_SECONDS = 100, 5.0
STEP = ["CreateModel", "ForwardBackward", "OptimStep"]


class GatedExecutor(CountingExecutor):
    """Executor whose samples wait for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = Event(), Event()

    def run(self, command: Command) -> Result:
        """Runs a command."""
        if isinstance(command, SampleTokens):
            self.has_begun.set()
            self.may_end.wait(20)
        return super().run(command)


class Clock:
    """Seconds of a ledger."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Returns the time."""
        return self.now


def queue_samples(tinker: TinkerCalls, executor: GatedExecutor) -> None:
    """Queues the samples of a client, of which the first one runs."""
    body = {"session_id": tinker.session, "sampling_session_seq_id": 0, "base_model": BASE}
    sampler = tinker.json("create_sampling_session", body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    for number in range(SAMPLES):
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "prompt": prompt,
            "sampling_params": {"max_tokens": 3},
        }
        tinker.json("asample", body)
    assert executor.has_begun.wait(20) and len(tinker.ledger.queue) == SAMPLES - 1


def train_step(tinker: TinkerCalls, executor: GatedExecutor) -> None:
    """Makes the first step of a new session, one command after the other."""
    client = TinkerCalls(tinker.client, tinker.ledger, executor)
    executor.may_end.set()
    model = client.create()
    client.result("forward_backward", forward_backward(model, 1))
    client.result("optim_step", optim_step(model, 2))


def test_a_finished_session_delays_the_next_step_by_the_sample_that_runs() -> None:
    executor = GatedExecutor()
    with calls(executor=executor, per_session=2 * SAMPLES) as tinker:
        queue_samples(tinker, executor)
        tinker.json(f"sessions/{tinker.session}/finish", {"reason": {"type": "interrupted"}})
        train_step(tinker, executor)
    assert executor.log == ["SampleTokens", *STEP]


def test_a_silent_session_keeps_its_samples_for_session_seconds_and_no_longer() -> None:
    executor, clock = GatedExecutor(), Clock()
    with calls(executor=executor, per_session=2 * SAMPLES, session_seconds=SESSION_SECONDS) as tinker:
        tinker.ledger.clock = clock
        queue_samples(tinker, executor)
        clock.now = SESSION_SECONDS
        tinker.ledger.tick()
        assert len(tinker.ledger.queue) == SAMPLES - 1
        clock.now += 0.01
        tinker.ledger.tick()
        train_step(tinker, executor)
    assert executor.log == ["SampleTokens", *STEP]


def test_samples_of_a_crash_wait_behind_the_first_step_after_it(tmp_path: Path) -> None:
    limits = LedgerLimits(per_session=2 * SAMPLES)
    ledger = open_at(tmp_path, CountingExecutor(), limits)
    open_session(ledger)
    for number in range(SAMPLES):
        submit(ledger, sample(number))
    assert ledger.journal is not None
    ledger.journal.close()
    executor = CountingExecutor()
    ledger = open_at(tmp_path, executor, limits)
    assert executor.log == [] and len(ledger.queue) == SAMPLES and not ledger.is_replaying
    model = "s2:train:0"
    open_session(ledger, "s2")
    submit(ledger, created(model))
    submit(ledger, numbered(1, model=model))
    submit(ledger, numbered(2, model=model))
    drain(ledger.queue, ledger, executor)
    assert executor.log == [*STEP, *["SampleTokens"] * SAMPLES]
    assert ledger.journal is not None
    ledger.journal.close()
