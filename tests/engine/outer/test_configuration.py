"""Mistakes in the section "outer" are one sentence each, before anything starts."""

from typing import Any

import pytest

from engine.config import load_config
from engine.errors import ConfigError

URL = "http://store:8140"


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        ({}, "outer.url: missing; give the address that `trine outer` prints, such as http://store:8140."),
        (URL, 'outer: "http://store:8140" is text; give an object with url, '),
        ({"url": []}, "outer.url: [] is an empty list; give the address of the store "),
        ({"ulr": URL}, "outer.ulr: unknown key. Did you mean outer.url?"),
        ({"url": "store:8140"}, 'outer.url: "store:8140" does not begin with http:// or https://; give '),
        ({"url": "http://store:port"}, 'outer.url: "http://store:port" has no host or no valid port; '),
        ({"url": [URL, "http://:8140"]}, 'outer.url: "http://:8140" has no host or no valid port; give '),
        ({"url": URL, "rule": "quorum", "sites": 2, "least": 3}, "outer.least: 3 is more than outer.sites (2), so "),
        ({"url": URL, "sites": 2, "site": 2}, "outer.sites: 2, but outer.site is 2, and sites are "),
        ({"url": URL, "period": 10, "delay": 10}, "outer.delay: 10, but the delay must be below 10, the "),
    ],
)
def test_a_mistake_is_one_sentence(outer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "outer": outer}, 1)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
