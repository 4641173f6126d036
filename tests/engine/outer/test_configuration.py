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
        ({"url": "store:8140"}, 'outer.url: address 0 is "store:8140"; it begins with http:// or https://.'),
        ({"url": "http://store:port"}, 'outer.url: address 0 is "http://store:port"; give http://HOST:PORT with a '),
        ({"url": [URL, "http://:8140"]}, 'outer.url: address 1 is "http://:8140"; give http://HOST:PORT with a '),
        ({"url": URL, "rule": "quorum", "sites": 2, "least": 3}, "outer.least: 3 with 2 sites, which never push that "),
        ({"url": URL, "sites": 2, "site": 2}, "outer.sites: 2 with site 2; count every site that starts the training."),
        ({"url": URL, "period": 10, "delay": 10}, "outer.delay: 10 steps with 10 steps between two pushes; give "),
    ],
)
def test_a_mistake_is_one_sentence(outer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "outer": outer}, 1)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)
