"""What the first step says of kernels that Triton compiles in it."""

import logging
from typing import Any

import pytest
import torch
from triton import knobs

from engine.reporting.banner import say_what_compiles

GPU = torch.device("cuda", 0)


def compiled(name: str, cached: bool = False) -> None:
    """Tell the listener of Triton, if there is one, as its compiler does."""
    listener: Any = knobs.compilation.listener
    if listener is not None:
        times = knobs.CompileTimes(100_000, [("ttir", 200_000), ("cubin", 1_200_000)], 0)
        listener(src=None, metadata={"name": name}, metadata_group={}, times=times, cache_hit=cached)


def told(caplog: pytest.LogCaptureFixture, device: torch.device, rank: int = 0) -> str:
    """Return what is said of two kernels, three compilations, and one that the cache has."""
    with caplog.at_level(logging.INFO, "trine"), say_what_compiles(device, rank):
        for name in ("norm", "adamw", "norm"):
            compiled(name)
        compiled("rotary", cached=True)
    return caplog.text


def test_the_kernels_that_were_compiled_are_named_with_their_time(caplog: pytest.LogCaptureFixture) -> None:
    text = told(caplog, GPU)
    assert "compiled 3 kernels in 4.5 s and found 1 in its cache" in text and "reads: adamw 1x, norm 2x" in text
    assert knobs.compilation.listener is None, "nothing listens to later steps"


def test_a_listener_of_somebody_else_hears_all_and_stays(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **call: heard.append(call["metadata"]["name"]))
    theirs = knobs.compilation.listener
    told(caplog, GPU)
    assert heard == ["norm", "adamw", "norm", "rotary"] and knobs.compilation.listener is theirs


@pytest.mark.parametrize(("device", "rank"), [(torch.device("cpu"), 0), (GPU, 1)])
def test_nobody_listens_where_nothing_is_compiled_or_said(
    caplog: pytest.LogCaptureFixture, device: torch.device, rank: int
) -> None:
    assert not told(caplog, device, rank)
