"""The unmodified client of tinker over a socket, against an executor in plain torch: every call of a training loop.

A restart in the middle, from snapshots and the journal, changes no bit.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.restart import open_ledger
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.served_model import ServedModel
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, listen
from tests.engine.serving.executors import CONTEXT, VOCABULARY, PlainExecutor, running

BASE = "Qwen/Qwen3-8B"
pytestmark = [
    pytest.mark.peers, pytest.mark.timeout(600), pytest.mark.filterwarnings("default"),
]  # fmt: skip


@pytest.fixture
def tinker() -> Iterator[Any]:
    os.environ.update(TINKER_API_KEY="tml-local", TINKER_TELEMETRY="0")
    yield pytest.importorskip("tinker")
    gc.collect()  # sockets that the client leaves open warn here, where warnings are no errors


@contextmanager
def served(folder: Path, executor: PlainExecutor, port: int = 0) -> Iterator[str]:
    """Serves an executor, after what the journal runs again."""
    with ExitStack() as opened:
        listening = opened.enter_context(listen("127.0.0.1", port, "the service of a test"))
        ledger, restart = open_ledger(FairQueue(), folder, LedgerLimits(snapshot_every=6))
        assert ledger.journal is not None
        opened.callback(ledger.journal.close)
        application = ServiceApplication(ledger, ServedModel((BASE,), CONTEXT, VOCABULARY), "local")
        hosted = HostedApplication(application, listening, application.end_waits)
        opened.enter_context(run_in_thread(hosted, "service"))
        for entry in restart.entries():
            assert entry.command is not None
            ledger.finish(entry, executor.run(entry.command))
        opened.enter_context(running(ledger.queue, ledger, executor))
        yield address_of(listening)


def batch(tinker: Any, seed: int, length: int = 12) -> list[Any]:
    """Returns three data of cross_entropy."""
    generator, data = torch.Generator().manual_seed(seed), []
    for row in range(3):
        tokens = torch.randint(0, VOCABULARY, (length + row + 1,), generator=generator)
        inputs = {"target_tokens": tokens[1:], "weights": torch.ones(length + row) / (length + row)}
        model_input = tinker.types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(tinker.types.Datum(model_input=model_input, loss_fn_inputs=inputs))
    return data


def train(tinker: Any, client: Any, steps: range) -> list[float]:
    """Returns the losses of some steps."""
    losses = []
    for step in steps:
        first = client.forward_backward(batch(tinker, step), "cross_entropy")
        second = client.optim_step(tinker.types.AdamParams(learning_rate=1e-3))
        losses.append(first.result().metrics["loss:sum"])
        second.result()
    return losses


def test_every_call_of_a_training_loop(tinker: Any, tmp_path: Path) -> None:
    types = tinker.types
    with served(tmp_path, PlainExecutor()) as address:
        service = tinker.ServiceClient(base_url=address)
        lora = service.create_lora_training_client(BASE, rank=8, seed=1).result()
        full = service.create_lora_training_client(BASE, rank=0).result()
        assert (lora.get_info().is_lora, full.get_info().is_lora) == (True, False)
        for client in (lora, full):
            losses = train(tinker, client, range(2)) + train(tinker, client, range(2))
            assert losses[2] < losses[0]
        with pytest.raises(tinker.RequestFailedError, match="gspo"):
            lora.forward_backward(batch(tinker, 7), "gspo").result()

        def callable_loss(data: Any, logprobs: Any) -> Any:
            total = sum((values**2).mean() for values in logprobs)
            return total, {"mine": 1.0}

        def graph_loss(logprobs: Any) -> Any:
            total = (logprobs**2).mean()
            return total, {"custom/mine:sum": total}

        handle = service.create_custom_loss(graph_loss, {"logprobs": 1}).result()
        pair = [service.create_lora_training_client(BASE, rank=4, seed=3).result() for _ in range(2)]
        for step in range(2):
            own = [client.forward_backward_custom(batch(tinker, 50 + step), loss) for client, loss in
                   zip(pair, (callable_loss, handle), strict=True)]  # fmt: skip
            for client in pair:
                client.optim_step(types.AdamParams(learning_rate=1e-2))
            found = [one.result().metrics["loss:sum"] for one in own]
            assert found[0] == pytest.approx(found[1], rel=1e-6)
        prompt, params = types.ModelInput.from_ints([1, 2, 3, 4]), types.SamplingParams(max_tokens=5, seed=5)
        samplers = [client.save_weights_and_get_sampling_client().result() for client in pair]
        drawn = [sampler.sample(prompt, 2, params).result() for sampler in samplers]
        assert [one.tokens for one in drawn[0].sequences] == [one.tokens for one in drawn[1].sequences]
        assert samplers[0].compute_logprobs(prompt).result()[0] is None
        topped = samplers[0].sample(prompt, 1, types.SamplingParams(max_tokens=1), True, 2).result()
        assert topped.topk_prompt_logprobs[0] is None and len(topped.topk_prompt_logprobs[1]) == 2
        path = lora.save_state("here").result().path
        ahead = train(tinker, lora, range(900, 902))
        again = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(tinker, again, range(900, 902)) == ahead
        rest = service.create_rest_client()
        (session,) = rest.list_sessions(limit=5).result().sessions
        found = rest.get_session(session).result()
        assert lora.model_id in found.training_run_ids and len(found.training_run_ids) == 5 and found.sampler_ids
        service.close("success")


def test_a_restart_in_the_middle_changes_no_bit(tinker: Any, tmp_path: Path) -> None:
    def losses(folder: Path, stops: bool) -> list[float]:
        executor = PlainExecutor()
        with ExitStack() as opened:
            address = opened.enter_context(served(folder, executor))
            service = tinker.ServiceClient(base_url=address)
            client = service.create_lora_training_client(BASE, rank=8, seed=1).result()
            found = train(tinker, client, range(5))
            if stops:
                opened.close()
                again = PlainExecutor()
                again.saved = executor.saved  # files of a real service
                opened.enter_context(served(folder, again, int(address.rpartition(":")[2])))
            found += train(tinker, client, range(5, 8))
            service.close("success")
            return found

    assert losses(tmp_path / "stopped", True) == losses(tmp_path / "whole", False)
