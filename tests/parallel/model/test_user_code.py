"""Whose mistake an error is, told by the line that has raised it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.parallel.model.user_code import call_user_code, is_own_mistake

PACKAGE = Path(engine.__file__).parent


def raised(code: str, file: str | Path, **names: Any) -> Exception:
    """What an expression raises that stands in ``file``."""
    with pytest.raises(Exception) as caught:
        eval(compile(code, str(file), "eval"), names)
    return caught.value


OURS = PACKAGE / "zero" / "layout.py"


@pytest.mark.parametrize(
    "code",
    [
        "{}['a']",
        "None.size",
        "(lambda nothing: nothing())(None)",
        "no_such_name",
        "module.no_such_layer",
        "(lambda: None)(3)",
    ],
)
def test_wrong_code_of_this_package(code: str) -> None:
    assert is_own_mistake(raised(code, OURS, module=nn.Linear(2, 2)))
    for theirs in (__file__, torch.__file__, PACKAGE / "models" / "decoder.py"):
        assert not is_own_mistake(raised(code, theirs, module=nn.Linear(2, 2)))


@pytest.mark.parametrize("code", ["torch.ones(2) @ torch.ones(3)", "torch.ones(2)[5]", "int('a')"])
def test_what_torch_raises_for_tensors_is_no_mistake_of_ours(code: str) -> None:
    assert not is_own_mistake(raised(code, OURS, torch=torch))


def takes_one(x: object) -> object:
    """Code of a user."""
    return {}[x]  # type: ignore[index]


@pytest.mark.parametrize("code", ["call(torch.add, ('a',), {})", "call(theirs, (1, 2), {})", "call(theirs, (1,), {})"])
def test_user_code_that_refuses_its_arguments(code: str) -> None:
    assert not is_own_mistake(raised(code, OURS, torch=torch, call=call_user_code, theirs=takes_one))


def test_an_error_without_a_line() -> None:
    assert not is_own_mistake(KeyError("never raised"))
