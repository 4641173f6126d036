"""A trial says no where the module cannot take part in it, and never because of a mistake of this package."""

import pytest
import torch
from torch import Tensor

from engine.parallel.kernel_injection.equivalence import agrees, random
from engine.parallel.kernel_injection.replacements import find_norm


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def failing(x: Tensor) -> Tensor:
    raise KeyError("of the user")


@pytest.mark.parametrize(
    "module",
    [failing, lambda: 1, lambda x: None, lambda x: {"out": 2 * x}, lambda x: (2 * x, x), lambda x: 2 * x[:0]],
    ids=["raises", "takes nothing", "gives nothing", "gives a mapping", "gives more", "gives no element"],
)
def test_a_module_that_cannot_be_compared_does_not_agree(module: object) -> None:
    assert agrees(doubled, lambda x: x + x, [random(2, 3)])
    assert not agrees(module, doubled, [random(2, 3)])  # type: ignore[arg-type]
    assert not agrees(doubled, module, [random(2, 3)])  # type: ignore[arg-type]


def test_a_mistake_in_an_operator_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.parallel.kernel_injection.replacements.norm", None)
    with pytest.raises(TypeError, match="not callable"):
        find_norm(torch.nn.LayerNorm(8))
