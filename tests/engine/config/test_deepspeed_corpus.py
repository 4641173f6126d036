"""DeepSpeed configurations of real shape: every key is acted on, off, noted or refused, and the page lists which."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest

from engine.config import load_config
from engine.config.deepspeed.keys import TABLE, Moved
from engine.errors import ConfigError
from tests.deepspeed_page import PAGE, files, outcomes, rendered, told

FILES: Mapping[str, Any] = files()
REFUSED = {name for name, raw in FILES.items() if told(raw).refusals}


def test_all_but_a_few_are_accepted() -> None:
    assert len(FILES) >= 75 and len(FILES) - len(REFUSED) >= 72 and len(REFUSED) >= 2


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_an_outcome(name: str) -> None:
    assert not [path for path, became in outcomes(FILES[name]).items() if became is None]


@pytest.mark.parametrize("name", sorted(set(FILES) - REFUSED))
def test_what_is_acted_on_acts_and_nothing_else_does(name: str) -> None:
    """Without a key that acts the configuration is another one or none, unless the value is the default."""
    config = load_config(FILES[name]).to_json()
    for path, became in outcomes(FILES[name]).items():
        without = deepcopy(FILES[name])
        *parents, leaf = path.split(".")
        value = at(without, parents).pop(leaf)
        try:
            same = load_config(without).to_json() == config
        except ConfigError:
            assert became == "acted on", "others need it"
            continue
        if became != "acted on":
            assert same, path
        elif same and leaf != "adam_w_mode":
            entry = TABLE.get(path)
            there = entry.target if isinstance(entry, Moved) else path
            assert at(config, there.split(".")) in (value, "AdamW" if value == "Adam" else value), path


def at(tree: Any, path: Sequence[str]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def test_the_page_is_current() -> None:
    assert rendered() == PAGE.read_text(encoding="utf-8"), "python -m tests.deepspeed_page --write"
