"""Ledger: one future for each request, whatever the network repeats or reorders; limits, deadlines, sessions."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from engine.serving.bookkeeping.entry import EntryState, FutureEntry, RequestRefusedError
from engine.serving.bookkeeping.ledger import RETAINED, Ledger
from engine.serving.bookkeeping.line import ModelLine
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import (
    AdamParameters,
    BackwardTensors,
    Command,
    DropTicket,
    Failure,
    ForwardTensors,
    OptimStep,
    PlainOutput,
    Result,
    SaveWeights,
    TensorOutput,
    UnloadModel,
)
from tests.engine.serving.commands_of_tests import (
    MODEL,
    SESSION,
    command_of,
    created,
    forward_backward,
    numbered,
    open_at,
    open_session,
    sample,
    submit,
)
from tests.engine.serving.executors import CountingExecutor, drain


class Clock:
    """Clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ledger_of(clock: Clock | None = None, **limits: float) -> Ledger:
    """Returns a ledger without a journal, with one session and one model."""
    ledger = Ledger(FairQueue(), None, LedgerLimits(**limits), clock or Clock())  # type: ignore[arg-type]
    ledger.open_session(SESSION)
    submit(ledger, created())
    return ledger


def run(ledger: Ledger, executor: CountingExecutor | None = None) -> CountingExecutor:
    """Runs what is queued."""
    executor = executor or CountingExecutor()
    drain(ledger.queue, ledger, executor)
    return executor


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """State of the model after commands 1 to 4 in order."""
    ledger = ledger_of()
    for number in range(1, 5):
        submit(ledger, numbered(number))
    return run(ledger).models[MODEL]


@pytest.mark.parametrize("order", list(permutations(range(1, 5))), ids=lambda order: "".join(map(str, order)))
def test_chunks_in_any_order_each_twice_run_once_and_in_order(order: tuple[int, ...], expected: list[int]) -> None:
    ledger, executor = ledger_of(), CountingExecutor()
    run(ledger, executor)
    for number in order:
        first = submit(ledger, numbered(number))
        assert submit(ledger, numbered(number)) is first
        run(ledger, executor)
        with pytest.raises(RequestRefusedError, match="was used before for another request") as error:
            submit(ledger, numbered(number, forward_backward(90 + number)))
        assert error.value.status == 400
    assert executor.models[MODEL] == expected
    assert executor.log == ["CreateModel", "ForwardBackward", "OptimStep", "ForwardBackward", "OptimStep"]
    assert all(ledger.find(f"{MODEL}:{number}").state is EntryState.DONE for number in order)


def test_a_wrong_request_takes_its_number_and_later_ones_run() -> None:
    ledger = ledger_of()
    wrong = FutureEntry(f"{MODEL}:1", SESSION, None, MODEL, 1, "test", digest="x", result=Failure("data is empty."))
    submit(ledger, numbered(2))
    assert run(ledger).log == ["CreateModel"]
    submit(ledger, wrong)
    assert run(ledger, CountingExecutor()).log == ["OptimStep"]
    found = ledger.find(f"{MODEL}:1")
    assert found.state is EntryState.DONE and found.result == Failure("data is empty.")


def test_unknown_sessions_models_and_futures_are_404() -> None:
    ledger = ledger_of()
    for entry in (numbered(1, model="s9:train:0"), numbered(1, model=f"{SESSION}:train:7")):
        with pytest.raises(RequestRefusedError) as error:
            ledger.submit(entry)
        assert error.value.status == 404
    for key in (f"{MODEL}:8", "s9:train:0:1", ""):
        with pytest.raises(RequestRefusedError) as error:
            ledger.find(key)
        assert error.value.status == 404


def test_a_full_queue_is_429_but_a_number_that_others_wait_for_is_accepted() -> None:
    ledger = ledger_of(per_session=3)
    run(ledger)
    for number in (2, 3, 4):
        submit(ledger, numbered(number))
    with pytest.raises(RequestRefusedError, match="3 commands of this session wait") as error:
        ledger.submit(numbered(5))
    assert (error.value.status, error.value.retry_seconds) == (429, 2)
    submit(ledger, numbered(1))
    ledger = ledger_of(depth=1)
    with pytest.raises(RequestRefusedError, match="1 commands wait in the queue"):
        ledger.submit(sample(1))


def test_a_deadline_fails_a_command_with_its_place_and_later_numbers_run() -> None:
    clock = Clock()
    ledger = ledger_of(clock, seconds=10.0, session_seconds=1000.0)
    run(ledger)
    submit(ledger, numbered(1))
    submit(ledger, numbered(3))
    clock.now += 11
    submit(ledger, numbered(2))
    ledger.tick()
    late = {number: ledger.find(f"{MODEL}:{number}").result for number in (1, 3)}
    assert isinstance(late[1], Failure) and "0 commands were before it in the queue" in late[1].error
    executor = CountingExecutor()
    executor.models[MODEL] = [7, 0]
    assert run(ledger, executor).log == ["OptimStep"]
    held = ledger_of(clock, seconds=10.0, session_seconds=1000.0)
    run(held)
    submit(held, numbered(2))
    clock.now += 11
    held.tick()
    result = held.find(f"{MODEL}:2").result
    assert isinstance(result, Failure) and "number 1 of its model has not arrived" in result.error
    submit(held, numbered(1))
    submit(held, numbered(3))
    executor.log.clear()
    assert run(held, executor).log == ["ForwardBackward", "ForwardBackward"]


def test_a_session_without_heartbeat_loses_its_samples_and_saves_its_models() -> None:
    clock = Clock()
    ledger = ledger_of(clock, session_seconds=20.0)
    executor = run(ledger)
    for number in range(20):
        submit(ledger, sample(number))
    clock.now += 15
    ledger.session(SESSION)
    clock.now += 15
    ledger.tick()
    assert SESSION in ledger.sessions and len(ledger.queue) == 20
    clock.now += 6
    ledger.tick()
    assert len(ledger.queue) == 2  # save and unload
    executor.log.clear()
    assert run(ledger, executor).log == ["SaveWeights", "UnloadModel"] and not ledger.sessions and not ledger.lines
    with pytest.raises(
        RequestRefusedError, match=r"sent no heartbeat for 20 seconds; .*load tinker://s1:train:0"
    ) as error:
        ledger.submit(numbered(1))
    assert error.value.status == 404


def test_a_session_that_ends_before_its_model_is_created_is_removed() -> None:
    ledger = ledger_of()
    ledger.end_session(SESSION, "was finished by its client", saved=False)
    assert "CreateModel" not in run(ledger).log
    assert not ledger.sessions and not ledger.lines


def test_a_cancelled_sample_fails_and_training_cannot_be_cancelled() -> None:
    ledger = ledger_of()
    submit(ledger, sample(1))
    submit(ledger, numbered(1))
    assert ledger.cancel(f"{SESSION}:sample:0:1") and not ledger.cancel(f"{MODEL}:1")
    assert not ledger.cancel(f"{SESSION}:sample:0:1")
    assert run(ledger).log == ["CreateModel", "ForwardBackward"]
    assert ledger.find(f"{SESSION}:sample:0:1").has_failed


def test_results_above_the_limit_remove_the_oldest_fetched_ones_and_then_refuse() -> None:
    ledger = ledger_of(result_bytes=100)
    executor = CountingExecutor()
    for number in (1, 3, 5):
        submit(ledger, numbered(number, forward_backward(number, tokens=12)))
        submit(ledger, numbered(number + 1))
        run(ledger, executor)
        if number == 1:
            ledger.mark_fetched(ledger.find(f"{MODEL}:1"))
    with pytest.raises(RequestRefusedError, match="was fetched before") as error:
        ledger.find(f"{MODEL}:1")
    assert error.value.status == 410 and ledger.result_bytes == 96
    submit(ledger, numbered(7, forward_backward(7, tokens=12)))
    run(ledger, executor)
    assert ledger.result_bytes == 144
    with pytest.raises(RequestRefusedError, match="bytes of results wait") as error:
        ledger.submit(numbered(8))
    assert error.value.status == 429


def test_a_session_retains_a_bounded_number_of_fetched_futures() -> None:
    ledger, executor = ledger_of(), CountingExecutor()
    for number in range(1, RETAINED + 20):
        entry = submit(ledger, numbered(number, OptimStep(MODEL, command_of(2).adam)))  # type: ignore[union-attr]
        run_one = ledger.queue.next(1)
        while run_one is not None and run_one is not entry:
            ledger.finish(run_one, executor.run(run_one.command))  # type: ignore[arg-type]
            run_one = ledger.queue.next(1)
        ledger.finish(entry, executor.run(entry.command))  # type: ignore[arg-type]
        ledger.mark_fetched(entry)
    assert len(ledger.sessions[SESSION].entries) == RETAINED + 1  # and the model's own
    with pytest.raises(RequestRefusedError, match="was answered") as error:
        ledger.submit(numbered(1))
    assert error.value.status == 410


def test_listeners_are_called_once() -> None:
    ledger, called = ledger_of(), list[int]()
    entry = submit(ledger, numbered(1))
    assert ledger.watch(entry, lambda: called.append(1))
    run(ledger)
    assert called == [1] and not ledger.watch(entry, lambda: called.append(2))


def test_a_start_loads_the_newest_snapshot_and_runs_what_follows(tmp_path: Path) -> None:
    limits, executor = LedgerLimits(snapshot_every=4), CountingExecutor()
    ledger = open_at(tmp_path, executor, limits)
    open_session(ledger)
    submit(ledger, created())
    for number in range(1, 12):
        submit(ledger, numbered(number))
        drain(ledger.queue, ledger, executor)
    assert executor.log.count("SaveWeights") == 2 and executor.log.count("DropWeights") == 1
    before = executor.models[MODEL]
    results = {number: ledger.find(f"{MODEL}:{number}").result for number in range(1, 12)}
    assert ledger.journal is not None
    ledger.journal.close()
    again = CountingExecutor()
    again.saved = executor.saved
    ledger = open_at(tmp_path, again, limits)
    assert again.log == ["CreateModel", "LoadWeights", "ForwardBackward", "OptimStep", "ForwardBackward"]
    assert again.models[MODEL] == before
    for number, result in results.items():
        found = submit(ledger, numbered(number)).result
        assert type(found) is type(result)
        with pytest.raises(RequestRefusedError, match="another request"):
            ledger.submit(numbered(number, forward_backward(77)))
    assert ledger.journal is not None
    ledger.journal.close()


def test_a_start_forgets_what_was_unloaded_cancelled_and_fetched(tmp_path: Path) -> None:
    limits, executor = LedgerLimits(), CountingExecutor()
    ledger = open_at(tmp_path, executor, limits)
    open_session(ledger)
    submit(ledger, created())
    submit(ledger, numbered(1))
    submit(ledger, sample(1))
    submit(ledger, sample(2))
    submit(ledger, sample(3))
    assert ledger.cancel(f"{SESSION}:sample:0:3")
    drain(ledger.queue, ledger, executor)
    ledger.mark_fetched(ledger.find(f"{SESSION}:sample:0:1"))
    submit(ledger, FutureEntry(f"{MODEL}:unload", SESSION, UnloadModel(MODEL), route="unload_model"))
    drain(ledger.queue, ledger, executor)
    assert ledger.journal is not None
    ledger.journal.close()
    again = CountingExecutor()
    ledger = open_at(tmp_path, again, limits)
    drain(ledger.queue, ledger, again)
    assert again.log == ["SampleTokens"]
    with pytest.raises(RequestRefusedError) as error:
        ledger.find(f"{SESSION}:sample:0:1")
    assert error.value.status == 410 and ledger.find(f"{SESSION}:sample:0:3").has_failed
    assert ledger.journal is not None
    ledger.journal.close()


def test_weights_that_a_start_would_load_are_known() -> None:
    from engine.serving.commands import LoadWeights

    ledger = ledger_of()
    submit(ledger, numbered(1, SaveWeights(MODEL, "a", True)))
    submit(ledger, numbered(2, LoadWeights(MODEL, "a", True)))
    assert ledger.loads("a") and not ledger.loads("b")


def test_a_line_is_clean_without_gradient_and_retained_forward() -> None:
    line, values = ModelLine(MODEL, SESSION), {"x": np.ones(1, np.float32)}

    def run(command: Command, result: Result) -> bool:
        line.advance(FutureEntry("key", SESSION, command, MODEL), result)
        return line.is_clean

    done = TensorOutput(values)
    assert run(ForwardTensors(MODEL, values, ""), done)
    assert not run(ForwardTensors(MODEL, values, "a"), done)
    assert not run(ForwardTensors(MODEL, values, "b"), done)
    assert not run(BackwardTensors(MODEL, "a", values), done), "a gradient, and another forward"
    assert not run(OptimStep(MODEL, AdamParameters()), Failure("no"))
    assert run(OptimStep(MODEL, AdamParameters()), PlainOutput()), "other forwards are stale"
    assert not run(ForwardTensors(MODEL, values, "c"), done)
    assert run(DropTicket(MODEL, "c"), PlainOutput({"dropped": True}))
