"""Second door: gradients cross the network, through servers in series and in branches."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import Command, CreateModel, Failure, Result
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.served_model import ServedModel
from engine.web.remote_line import RemoteError, RemoteLine, Reply
from engine.web.remote_model import RemoteModel
from engine.web.tensor_headers import NUMBER, SESSION
from tests.engine.serving.commands_of_tests import open_at
from tests.engine.serving.doors import tensor_server
from tests.engine.serving.executors import CONTEXT, VOCABULARY, CountingExecutor, running
from tests.engine.serving.lossy import Lossy
from tests.structure import ROOT

ADAM = {"lr": 1e-2, "eps": 1e-8, "beta2": 0.999}


def layer() -> nn.Module:
    """Build the model of a server."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def rows(seed: int) -> Tensor:
    """Draw a batch."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that a server has by ADAM."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def test_a_client_trains_a_server_as_its_own_model(tmp_path: Path) -> None:
    local = layer()
    optimizer = adam(local)
    with tensor_server(layer, tmp_path, shape=rows(0)) as url:
        model = RemoteModel(url)
        for step in range(5):
            x, y = rows(step).requires_grad_(), rows(step).requires_grad_()
            (model(x) - 1).square().mean().backward()
            (local(y) - 1).square().mean().backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-7)
            assert model.step(**ADAM) == step + 1
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(rows(9)), local(rows(9)), rtol=0, atol=1e-6)
        assert model.statistics()["routes"]["/v1/backward/{model}/{ticket}"] == {
            "requests": 5, "refused": 0, "seconds": pytest.approx(0, abs=60),
        }  # fmt: skip


def test_a_model_that_cannot_be_created_has_its_reason_in_every_reply(tmp_path: Path) -> None:
    with tensor_server(layer, tmp_path, shape=rows(0), full=0) as url:
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"the limit serve\.tenants\.full is 0; train an adapter"):
                RemoteModel(url)(rows(0))


class FullPool(CountingExecutor):
    """Executor that creates no model until there is room."""

    has_room = False

    def run(self, command: Command) -> Result:
        """Runs a command."""
        if isinstance(command, CreateModel) and not self.has_room:
            return Failure("the pool is full; unload a model.")
        return super().run(command)


def test_a_model_that_could_not_be_created_is_created_once_there_is_room(tmp_path: Path) -> None:
    ledger, executor = open_at(tmp_path, FullPool(), LedgerLimits()), FullPool()
    facts = ServedModel(("m",), CONTEXT, VOCABULARY, (), "", "", None)
    app = ServiceApplication(ledger, facts, creates_shared=True)

    async def statuses() -> list[int]:
        found = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for number, executor.has_room in enumerate((False, True, True), 1):
                headers = {SESSION: "s", NUMBER: str(number)}
                found.append((await client.post("/v1/step/shared", json={}, headers=headers)).status_code)
        return found

    with running(ledger.queue, ledger, executor):
        assert asyncio.run(statuses()) == [400, 200, 200]
    assert ledger.journal is not None
    ledger.journal.close()
    again = CountingExecutor()
    open_at(tmp_path, again, LedgerLimits()).journal.close()  # type: ignore[union-attr]
    assert again.models == executor.models


def test_two_forwards_before_the_first_backward_give_both_gradients(tmp_path: Path) -> None:
    local = layer()
    with tensor_server(layer, tmp_path, shape=rows(0)) as url:
        model, first, second = RemoteModel(url), rows(1).requires_grad_(), rows(2).requires_grad_()
        one, two = model(first), model(second)
        one.sum().backward()
        two.square().sum().backward()
        other = rows(2).requires_grad_()
        local(other).square().sum().backward()
        torch.testing.assert_close(second.grad, other.grad, rtol=0, atol=1e-7)
        stale = model(first)
        model.step(**ADAM)
        with pytest.raises(RemoteError, match="used version 0 of the weights and they are at version 1"):
            stale.sum().backward()


def test_a_client_that_was_silent_for_long_goes_on(tmp_path: Path) -> None:
    with tensor_server(layer, tmp_path, shape=rows(0), session_seconds=0.5) as url:
        model, x = RemoteModel(url), rows(1).requires_grad_()
        found = model(x)
        time.sleep(3)
        found.sum().backward()
        assert x.grad is not None and model.step(**ADAM) == 1


def test_servers_in_series_train_as_one_model_and_branches_run_at_the_same_time(tmp_path: Path) -> None:
    def slow(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        time.sleep(0.5)
        return given

    local = nn.ModuleList([layer(), layer()])
    optimizer = adam(local)
    with (
        tensor_server(layer, tmp_path / "a", {"slow": slow}, rows(0)) as first,
        tensor_server(layer, tmp_path / "b", {"slow": slow}, rows(0)) as second,
    ):
        a, b = RemoteModel(first, optimize=ADAM), RemoteModel(second, optimize=ADAM)
        own = torch.full((), 0.5, requires_grad=True)
        for step in range(4):
            found = (b(a(rows(step) * own)) - 1).square().mean()
            expected = (local[1](local[0](rows(step) * 0.5)) - 1).square().mean()
            assert found.item() == pytest.approx(expected.item(), abs=1e-6)
            found.backward()
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert own.grad is not None and own.grad.abs() > 0, "a client's own parameter trains through servers"

        async def branches() -> float:
            began = time.monotonic()
            lines = [model.line for model in (a, b)]
            await asyncio.gather(*(asyncio.to_thread(line.fetch, "/v1/call/slow", rows(0)) for line in lines))
            return time.monotonic() - began

        assert asyncio.run(branches()) < 0.65 * 1.0


def test_lost_replies_and_doubled_requests_change_nothing_twice(tmp_path: Path) -> None:
    results: list[tuple[Tensor, Tensor | None, int]] = []
    for transport in (None, Lossy(seed=0)):
        with tensor_server(layer, tmp_path, shape=rows(0)) as url:
            model = RemoteModel(line=RemoteLine(url, transport=transport))
            for step in range(6):
                x = rows(step).requires_grad_()
                model(x).square().sum().backward()
                model.step(**ADAM)
            with torch.no_grad():
                results.append((model(rows(9)), x.grad, model.version))
    for one, other in zip(*(result[:2] for result in results), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
    assert results[0][2] == results[1][2] == 6


def test_mistakes_are_one_sentence_of_the_server(tmp_path: Path) -> None:
    def double(given: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {"y": 2 * given["0"]} if given else {"y": torch.ones(1)}

    with tensor_server(layer, tmp_path, {"double": double}, rows(0)) as url:
        model = RemoteModel(url)
        assert torch.equal(model.function("double", torch.ones(2)), torch.full((2,), 2.0))  # type: ignore[arg-type]
        assert httpx.get(f"{url}/v1/call/double", headers={"x-trine-session": "s"}).status_code == 200
        for said, call in (
            ("there is no model other", lambda: RemoteModel(url, "other")(rows(0))),
            ("there is no function", lambda: model.function("treble")),
            ("the model failed on these tensors: mat1", lambda: model(torch.ones(2, 3))),
            ("an update takes", lambda: model.step(rate=1.0)),
            ("must be a number from 0", lambda: model.step(lr=-1.0)),
            ("and may have 1,048,576", lambda: model(torch.ones(1 << 17, 4))),
            ("use letters", lambda: RemoteModel(url, "a b")(rows(0))),
        ):
            with pytest.raises(RemoteError, match=said):
                call()
        x = rows(1).requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None, "the server goes on"


def example(number: int) -> str:
    """Return a block of Python of the guide."""
    text = (ROOT / "docs" / "guides" / "service.md").read_text(encoding="utf-8")
    return text.split("```python\n")[number].partition("\n```")[0]


def test_the_clients_and_servers_of_the_guide(tmp_path: Path) -> None:
    def identity() -> nn.Module:
        made = nn.Linear(16, 16, bias=False)
        nn.init.eye_(made.weight)
        return made

    shape = torch.randn(6, 16)
    with tensor_server(identity, tmp_path / "one", shape=shape, token="a-secret") as url:
        names: dict[str, Any] = {}
        exec(example(1).replace("http://host:8100", url), names)
        assert names["x"].grad.abs().sum() > 0 and names["model"].version == 1
        with pytest.raises(RemoteError, match="wrong X-API-Key or none"):
            RemoteModel(url)(shape)
    with (
        tensor_server(identity, tmp_path / "a", shape=shape) as first,
        tensor_server(identity, tmp_path / "b", shape=shape) as second,
    ):
        exec(example(3), names)
        with tensor_server(partial(names["Chain"], first, second), tmp_path / "chain", shape=shape) as url:
            model, own = RemoteModel(url), torch.zeros((), requires_grad=True)
            optimizer = torch.optim.SGD([own], lr=0.1)
            losses = []
            for _ in range(40):
                loss = (model(torch.ones(2, 16) * own) - 2).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.step(lr=1e-3)
                losses.append(loss.item())
            assert losses[-1] < 0.05 * losses[0] and own.item() > 0.5
            assert RemoteModel(first)(shape).shape == (6, 16) and model.version == 40


class Echo(RemoteLine):
    """Line to no server: every forward returns a tensor on the host."""

    def __init__(self) -> None:
        pass

    def new_ticket(self) -> str:
        return "ticket"

    def post(self, path: str, tensors: Mapping[str, Tensor], options: Mapping[str, str] | None = None) -> Reply:
        return Reply({"output": torch.ones(2)}, 1)


@pytest.mark.parametrize("graded", [True, False])
def test_an_output_is_on_the_device_of_the_input_with_and_without_a_graph(graded: bool) -> None:
    model = RemoteModel(line=Echo())
    with torch.set_grad_enabled(graded):
        assert model(torch.empty(2, device="meta")).device.type == "meta"
        assert model().device.type == "cpu", "a model without inputs"
