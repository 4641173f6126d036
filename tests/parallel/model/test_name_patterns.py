"""Names of modules and parameters."""

import pytest

from engine.parallel.model.name_patterns import is_inside, starred


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
