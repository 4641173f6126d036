"""Names of modules and parameters, and patterns over them."""

import pytest

from engine.errors import ConfigError, PlanError
from engine.parallel.model.name_patterns import is_inside, refuse_unmatched, starred


@pytest.mark.parametrize(
    ("name", "module", "inside"),
    [
        ("blocks.1", "blocks.1", True),
        ("blocks.1.up.weight", "blocks.1", True),
        ("blocks.10", "blocks.1", False),
        ("blocks", "blocks.1", False),
        ("blocks.1", "", True),
        ("", "", True),
        ("", "blocks", False),
    ],
)
def test_is_inside(name: str, module: str, inside: bool) -> None:
    assert is_inside(name, module) is inside


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("blocks.10.up", "blocks.*.up"), ("0.1.2", "*.*.*"), ("norm1.weight", "norm1.weight"), ("2", "*"), ("", "")],
)
def test_starred(name: str, pattern: str) -> None:
    assert starred(name) == pattern


NAMES = ["blocks.0.up", "blocks.1.up", "blocks.0.norm", "head"]


def test_patterns_that_match_pass() -> None:
    refuse_unmatched([("here", "*.up"), ("there", "head")], NAMES, "module")
    refuse_unmatched([], [], "module")


def test_a_pattern_that_matches_nothing_names_what_is_near() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unmatched([("a[0]", "blocks.*.upp"), ("a[1]", "head"), ("b", "haed")], NAMES, "module")
    assert str(caught.value) == (
        "a[0]: 'blocks.*.upp'; b: 'haed' matches no module; similar names are blocks.*.up, blocks.*.norm, head; write "
        "a pattern of whole names, with * for any characters."
    )


def test_a_pattern_that_nothing_is_near_lists_the_model() -> None:
    with pytest.raises(PlanError, match=r"^x: 'zzz' matches no module; the model has blocks\.\*\.up, blocks\.\*\.norm"):
        refuse_unmatched([("x", "zzz")], NAMES, "module", PlanError)
    with pytest.raises(ConfigError, match="the model has none;"):
        refuse_unmatched([("x", "*")], [], "module")
