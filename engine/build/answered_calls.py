"""Calls of ``engine.initialize`` that somebody else answers: ``trine verify`` runs a script of the user's up to there.

A context of this process, so that neither the script nor the engine is changed:

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
"""Function of all arguments by name; the caller receives its result."""

_ANSWER: ContextVar[Answer | None] = ContextVar("answer", default=None)
_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """Replaces every function that is ``answerable`` by ``answer`` inside this context, in this thread."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


def answerable(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Returns a function whose calls ``answered_by`` may answer."""
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
