"""Page at /: one file, no resource of another host, colours for light and dark, data by /v1/status only."""

import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageStat

from engine.serving.bookkeeping.entry import FutureEntry
from engine.serving.bookkeeping.ledger import Ledger
from engine.serving.bookkeeping.queue import FairQueue
from engine.serving.bookkeeping.session import LedgerLimits
from engine.serving.commands import Command, CreateModel, ForwardBackward, PlainOutput, Result, TrainedOutput
from engine.serving.wire.application import ServiceApplication
from engine.serving.wire.directory import RUN
from engine.web.hosted import HostedApplication, run_in_thread
from engine.web.sockets import address_of, listen
from tests.browser import MODES, live
from tests.engine.serving.commands_of_tests import numbered
from tests.engine.serving.executors import CountingExecutor, drain
from tests.engine.serving.wire.tinker_calls import BASE, MODEL, calls


def test_the_page_loads_nothing_and_shows_the_status() -> None:
    with calls(token="secret") as own:
        reply = own.client.get("/", headers={"x-api-key": ""})
        status = own.client.get("/v1/status").json()
    text = reply.text
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    assert reply.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<(link|img|iframe|script\s+src)|@import|url\(|innerHTML|eval\(", text)
    assert re.findall(r"https?://[^\"'\s]+", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text and 'lang="en"' in text and "fetch(" in text
    for name in re.findall(r"state\.(\w+)", text):
        assert name in status, name
    for part in ("model", "queue", "retained"):
        for name in re.findall(rf"state\.{part}\.(\w+)", text):
            assert name in status[part], name
    ids = set(re.findall(r'id="(\w+)"', text))
    assert set(re.findall(r'at\("(\w+)"\)', text)) <= ids


def trained() -> ServiceApplication:
    """Return an application with two models of clients that have trained, and a command that waits."""
    ledger = Ledger(FairQueue(), None, LedgerLimits())
    application = ServiceApplication(ledger, MODEL)
    models = {"s1:train:0": 8, "s2:train:0": None}
    for model, rank in models.items():
        session = model.partition(":")[0]
        ledger.open_session(session)
        ledger.note(RUN, model, {"is_lora": rank is not None, "lora_rank": rank})
        ledger.submit(FutureEntry(f"{model}:create", session, CreateModel(model, BASE, None), route="create"))
        for number in range(1, 30):
            ledger.submit(numbered(number, model=model))
    drain(ledger.queue, ledger, Falling())
    for model in models:
        ledger.submit(numbered(30, model=model))
    return application


class Falling(CountingExecutor):
    """Executor whose losses fall."""

    def run(self, command: Command) -> Result:
        if not isinstance(command, ForwardBackward):
            return PlainOutput()
        number = int(command.data[0].tokens[0])
        return TrainedOutput(({"logprobs": np.zeros(3, np.float32)},), {"loss:sum": 9.0 - number / 5})


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_browser_shows_model_grid_tenants_queue_and_losses_and_asks_no_other_host(mode: str, tmp_path: Path) -> None:
    application = trained()
    with ExitStack() as opened:
        listening = opened.enter_context(listen("127.0.0.1", 0, "the page"))
        hosted = HostedApplication(application, listening, application.end_waits)
        opened.enter_context(run_in_thread(hosted, "page"))
        address = address_of(listening)
        picture, elements, asked = live(f"{address}/", mode, (1100, 900), tmp_path)
    assert asked == {f"{address}/v1/status"}
    brightness = ImageStat.Stat(picture.convert("L")).mean[0]
    assert (brightness > 220) if mode == "light" else (brightness < 50)
    shown = re.sub(r"<style.*?</style>|<script.*?</script>", "", elements, flags=re.S)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))
    for words in (
        BASE, "healthy", "architecture Qwen3", "grid tp2", "context 256", "queue 2 of 256", "commands 60",
        "s1:train:0 rank 8 29", "s2:train:0 all 29", "/v1/status",
    ):  # fmt: skip
        assert words in text, (words, text)
    curves = re.findall(r'<polyline points="([^"]+)"', shown)
    assert [len(points.split()) for points in curves] == [15, 15]
    first, *_, last = (float(point.split(",")[1]) for point in curves[0].split())
    assert last > first, "a loss that falls ends lower on the page"
    assert 'data-ok="true"' in shown and '<form id="access" hidden' in shown
