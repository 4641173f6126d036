"""Command loop over threads: order, agreement, beats, end."""

from collections.abc import Callable, Iterator
from queue import Empty, Queue
from threading import Thread

import numpy as np
import pytest

from engine.errors import EngineError
from engine.serving.commands import (
    AdamParameters,
    Command,
    Datum,
    Failure,
    ForwardBackward,
    LossCall,
    OptimStep,
    PlainOutput,
    Result,
    SampleTokens,
    SamplingParameters,
    Stop,
    UnloadModel,
    decode_message,
    encode_message,
)
from engine.serving.loop import CommandLoop


class ThreadHosts:
    """Host group of threads."""

    def __init__(self, rank: int, size: int, posts: dict[tuple[int, int], "Queue[bytes]"]) -> None:
        self.rank, self.size, self._posts = rank, size, posts

    def send(self, data: memoryview, to: int) -> Callable[[], None]:
        self._posts[self.rank, to].put(bytes(data))
        return lambda: None

    def receive(self, target: memoryview, source: int) -> Callable[[], None]:
        def wait() -> None:
            target[:] = self._posts[source, self.rank].get(timeout=20)

        return wait


class Listed:
    """Source of a list of commands."""

    def __init__(self, commands: list[Command | None]) -> None:
        self._commands, self.results, self.held = iter(commands), list[tuple[str, Result]](), list[int]()

    def take(self, seconds: float) -> tuple[str, Command] | None:
        found = next(self._commands)
        return None if found is None else (f"k{len(self.results)}", found)

    def finish(self, key: str, result: Result, held: int) -> None:
        self.results.append((key, result))
        self.held.append(held)


@pytest.fixture
def hosts() -> Iterator[list[ThreadHosts]]:
    posts: dict[tuple[int, int], Queue[bytes]] = {(a, b): Queue() for a in range(3) for b in range(3)}
    yield [ThreadHosts(rank, 3, posts) for rank in range(3)]
    for post in posts.values():
        with pytest.raises(Empty):
            post.get_nowait()


def test_all_ranks_run_commands_in_one_order_and_a_split_end_spoils_the_model(hosts: list[ThreadHosts]) -> None:
    step = OptimStep("m", AdamParameters())
    source = Listed([None, step, UnloadModel("bad"), None, UnloadModel("split"), step, Stop()])
    ran: list[list[Command]] = [[], [], []]
    spoilt: list[list[Command]] = [[], [], []]

    def body(rank: int) -> None:
        def run(command: Command) -> Result:
            ran[rank].append(command)
            if isinstance(command, UnloadModel):
                if command.model == "bad":
                    return Failure("no model bad")
                return Failure("disk full", "server") if rank == 1 else PlainOutput()
            return PlainOutput({"rank": rank})

        own = source if rank == 0 else None
        CommandLoop(hosts[rank], run, spoilt[rank].append, own, retained=lambda: 7 * len(ran[rank]) - (rank != 1)).run()

    threads = [Thread(target=body, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ran[0] == ran[1] == ran[2] == [step, UnloadModel("bad"), UnloadModel("split"), step]
    assert spoilt == [[UnloadModel("split")]] * 3
    assert [key for key, _ in source.results] == ["k0", "k1", "k2", "k3"]
    assert source.held == [7, 14, 21, 28], "the bytes of the rank with most"
    results = [result for _, result in source.results]
    assert results[0] == results[3] == PlainOutput({"rank": 0}) and results[1] == Failure("no model bad")
    assert isinstance(results[2], Failure) and "disk full" in results[2].error and results[2].category == "server"


def test_a_loop_without_a_source_on_rank_0_is_refused(hosts: list[ThreadHosts]) -> None:
    with pytest.raises(EngineError, match=r"^CommandLoop got no source on rank 0, but .* pass one on rank 0.$"):
        CommandLoop(hosts[0], lambda _: PlainOutput(), lambda _: None)


def test_commands_are_the_same_after_encoding() -> None:
    datum = Datum(np.arange(3), {"weights": np.ones((3, 2), np.float32)})
    command = ForwardBackward("m", (datum, datum), LossCall("ppo", {"clip_low_threshold": 0.5}), True)
    again = decode_message(encode_message(command))
    assert again.loss == command.loss and again.forward_only and len(again.data) == 2
    assert np.array_equal(again.data[1].inputs["weights"], datum.inputs["weights"])
    sample = SampleTokens("", np.arange(4), SamplingParameters(stops=((1, 2), (3,))))
    assert decode_message(encode_message(sample)).parameters == sample.parameters
    for wrong in (
        b"",
        b"x" * 20,
        encode_message(command)[:-1],
        b"\x02" + bytes(7) + b"[]",
        b"\x0c" + bytes(7) + b'{"is":"os"} ',
    ):
        with pytest.raises(ValueError):
            decode_message(wrong)
