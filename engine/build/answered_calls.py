"""Interception of ``engine.initialize``: ``trine verify`` runs a user's script up to that call.

Neither the script nor the engine is changed:

    with answered_by(take):          every call of initialize in this thread goes to take(arguments)
        run the script
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, cast

Answer = Callable[[Mapping[str, Any]], Any]
"""Function of the call's arguments by name; its result is returned to the caller."""

_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Opens a context in which calls of :func:`answerable` functions in this thread return ``answer(arguments)``.

    The functions do not run. ``arguments`` is a dict by name, with defaults.
    """
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


def answerable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a wrapper of ``function``. Inside a context of :func:`answered_by`, it calls the context's ``answer``
    instead.
    """
    known = signature(function)

    @wraps(function)
    def answered(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        answer = _ANSWER.get()
        if answer is None:
            return function(*args, **kwargs)
        given = known.bind(*args, **kwargs)
        given.apply_defaults()
        return cast(_R, answer(given.arguments))

    return answered
