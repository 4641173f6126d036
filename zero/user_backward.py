"""Notices a backward that the user starts himself, and keeps the engine's context of it open until it ends.

    loss.backward()    | the first gradient arrives    | the others arrive    | autograd's final callback
                       | start: open the context       | are taken            | end: close the context

Autograd says nothing when a backward begins. Its final callback does not run if the backward raises.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch


class _AbandonedError(Exception):
    """Closes the context of a backward that has raised."""


Enter = Callable[[], AbstractContextManager[None] | None]
"""Returns the context of a backward that begins now; None if the engine does not use its gradients."""


class UserBackward:
    """The backward of the user's own that runs at present."""

    def __init__(self) -> None:
        self._enter: weakref.WeakMethod[Enter] | None = None
        self._context: AbstractContextManager[None] | None = None

    def serve(self, enter: Enter) -> None:
        """Ask ``enter``, a method, for the context of every backward from now on, as long as its object lives.

        Hooks on parameters refer to this object, and the garbage collector does not look into all of them: through a
        strong reference they would keep a dropped engine alive, whose loss may refer to it.
        """
        self._enter = weakref.WeakMethod(enter)

    def start(self) -> None:
        """A gradient has arrived, so a backward runs. Called by hooks of autograd while no backward is known."""
        enter = self._enter() if self._enter is not None else None
        if enter is None or self._context is not None:
            return
        context = enter()
        if context is None:
            return
        context.__enter__()
        self._context = context
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def abandon(self) -> bool:
        """Close the context of a backward that has raised; True if there was one."""
        context = self._context
        if context is None or torch._C._current_graph_task_id() != -1:
            return False
        self._context = None
        with suppress(_AbandonedError):
            context.__exit__(_AbandonedError, _AbandonedError("a backward of the user's own has raised"), None)
        return True

    def _end(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)
