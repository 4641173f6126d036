"""Arguments of the model's forward, selected from a microbatch.

Without ``loss_fn`` forward receives the whole microbatch. With it, ``inputs`` selects the arguments, or they follow
from the signature of forward; an ambiguous batch raises:

    forward(x)                 (x, y) -> x                   {"x": x, "y": y} -> x=x
    forward(x, mask)           (x, mask, y) -> x, mask
    forward(x, mask=None)      (x, y) is refused: y may be the mask or the targets of loss_fn
                               ({"x": x}, y) -> x=x
    forward(*args)             everything
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from engine.errors import EngineError
from engine.parallel.model.user_code import call_user_code
from engine.program.batch import Batch
from engine.program.batch_rows import Name
from engine.program.loss import LossFunction

Inputs = Name | Sequence[Name] | Callable[[Batch], Any]
"""Keys or positions of a microbatch that forward receives, or a function from a microbatch to forward's arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardSignature:
    """Parameter names of a model's ``forward``."""

    required: tuple[str, ...] = ()
    """Names of positional parameters without a default."""
    positional: tuple[str, ...] | None = None
    """Names of positional parameters; None for ``*args``."""
    keywords: frozenset[str] | None = None
    """Names of keyword parameters; None for ``**kwargs``."""

    @staticmethod
    def of(model: nn.Module) -> "ForwardSignature":
        """Returns the signature of the model's forward; if Python cannot inspect it, a signature that accepts any
        arguments.
        """
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):
            return ForwardSignature()
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        kinds = {p.kind for p in parameters}
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        return ForwardSignature(
            required=tuple(p.name for p in by_position if p.default is p.empty),
            positional=None if inspect.Parameter.VAR_POSITIONAL in kinds else tuple(p.name for p in by_position),
            keywords=None if inspect.Parameter.VAR_KEYWORD in kinds else named,
        )


def batch_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """Returns the arguments of a call of ``model`` as one batch: a single argument itself, else a tuple or a dict.

    With positional and keyword arguments, positional ones get the names of forward's parameters.
    """
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args or not kwargs:
        return kwargs or args
    return dict(zip(ForwardSignature.of(model).positional or (), args, strict=False)) | kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """Rule that selects the part of a microbatch that the model's forward receives."""

    stated: Inputs | None = None
    signature: ForwardSignature = field(default_factory=ForwardSignature)
    """Signature that selects arguments, if there is a loss function and the user passed no ``inputs``; otherwise it
    accepts everything.
    """
    without: frozenset[str] = frozenset()
    """Keys of a batch that the engine itself reads, and forward never receives."""

    @staticmethod
    def of(
        model: nn.Module, separate_loss: bool, stated: Inputs | None, without: Collection[str] = ()
    ) -> "ForwardInputs":
        """Returns the rule that selects arguments of ``model.forward`` from a microbatch.

        ``stated``: the user's ``inputs``; None: the signature of forward selects if ``separate_loss`` is True (there is
        a loss function), else nothing is left out. ``without``: keys that forward never receives.
        """
        follows = separate_loss and stated is None
        signature = ForwardSignature.of(model) if follows else ForwardSignature()
        return ForwardInputs(stated=stated, signature=signature, without=frozenset(without))

    def kept(self, microbatch: Batch) -> Batch:
        """Returns the microbatch without the keys in ``without``, which the engine itself reads."""
        if not self.without or not isinstance(microbatch, Mapping) or self.without.isdisjoint(microbatch):
            return microbatch
        return {key: value for key, value in microbatch.items() if key not in self.without}

    def take(self, microbatch: Batch) -> Batch:
        """Returns the part of ``microbatch`` that the model's forward receives.

        Raises:
            EngineError: the signature of forward does not determine the arguments, or ``inputs`` names absent entries.
        """
        microbatch = self.kept(microbatch)
        if self.stated is not None:
            return self._take_stated(microbatch)
        if isinstance(microbatch, Mapping):
            return self._matching(microbatch)
        if isinstance(microbatch, tuple | list) and self.signature.positional is not None:
            return self._leading(microbatch, self.signature.positional)
        return microbatch

    def rest(self, microbatch: Batch) -> list[Any]:
        """Returns the values of ``microbatch`` that the model's forward does not receive, such as targets.

        Returns [] if the user's ``inputs`` is a function, since the rest is then unknown.
        """
        microbatch = self.kept(microbatch)
        if callable(self.stated):
            return []
        if isinstance(microbatch, Mapping):
            given = self._take_stated(microbatch) if self.stated is not None else self._matching(microbatch)
            return [value for key, value in microbatch.items() if key not in given]
        if not isinstance(microbatch, tuple | list):
            return []
        if self.stated is not None:
            names = (self.stated,) if isinstance(self.stated, Name) else tuple(self.stated)
            return [part for index, part in enumerate(microbatch) if index not in names]
        given = self.take(microbatch)
        return list(microbatch[len(given) if isinstance(given, tuple | list) else 1 :])

    def note(self, microbatch: Batch) -> str:
        """Returns the startup banner's sentence about entries that only the loss function receives, or ""."""
        microbatch = self.kept(microbatch)
        given = self.take(microbatch)
        if not isinstance(microbatch, Mapping | tuple | list) or given is microbatch:
            return ""
        if isinstance(microbatch, Mapping) and isinstance(given, Mapping):
            rest = [repr(key) for key in microbatch if key not in given]
            return f"batch: {_listed(rest)} {'go' if rest[1:] else 'goes'} to loss_fn, not to forward" if rest else ""
        parts = len(given) if isinstance(given, tuple | list) else 1
        of_parts = f"{parts} of the {len(microbatch)} parts of a batch"
        return f"batch: forward gets {of_parts}, loss_fn all" if parts < len(microbatch) else ""

    def _take_stated(self, microbatch: Batch) -> Batch:
        if callable(self.stated):
            return self.stated(microbatch)
        names = (self.stated,) if isinstance(self.stated, Name) else tuple(self.stated or ())
        try:
            if isinstance(microbatch, Mapping):
                return {name: microbatch[name] for name in names}
            return tuple(microbatch[name] for name in names)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(
                f"the argument inputs lists {', '.join(map(repr, names))}, but the batch {_described(microbatch)}; "
                "list only keys or indices that the batch has."
            ) from error

    def _matching(self, microbatch: Mapping[str, Any]) -> Batch:
        if self.signature.keywords is None:
            return microbatch
        given = {key: value for key, value in microbatch.items() if key in self.signature.keywords}
        missing = [name for name in self.signature.required if name not in given]
        if missing or not given:
            raise EngineError(
                f"the batch {_described(microbatch)}, but forward takes {_listed(self.signature.positional or ())}; "
                "name the keys as forward does, or pass inputs= to engine.initialize to select them."
            )
        return given if len(given) < len(microbatch) else microbatch

    def _leading(self, microbatch: Sequence[Any], positional: tuple[str, ...]) -> Batch:
        count, required, most = len(microbatch), len(self.signature.required), len(positional)
        first = microbatch[0] if microbatch else None
        if count <= required:
            return microbatch
        names = self.signature.keywords
        if count == 2 and isinstance(first, Mapping) and (names is None or first.keys() <= names):
            return first
        if required == most:
            return tuple(microbatch[:most])
        raise EngineError(
            f"the batch {_described(microbatch)} and loss_fn gets all of them, but forward takes {required} to "
            f"{most} ({_listed(positional)}), so its inputs are ambiguous; pass inputs=(0,) to engine.initialize "
            "for the first part only, inputs=(0, 1) for the first two, or give a dict."
        )


def _described(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return f"has the keys {_listed([repr(key) for key in batch])}"
    return f"has {len(batch)} parts" if isinstance(batch, tuple | list) else f"is a {type(batch).__name__}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


@dataclass(frozen=True, slots=True)
class TorchLoss:
    """Loss function of (output, batch) that calls a ``torch.nn`` loss with the output and the targets.

    The targets are the only tensor of the batch that the model's forward does not receive.
    """

    loss: Callable[..., Any]
    inputs: ForwardInputs

    def __call__(self, output: Any, batch: Batch) -> Any:
        rest = self.inputs.rest(batch)
        if len(rest) != 1 or not isinstance(rest[0], Tensor):
            found = "1 part that is no tensor" if len(rest) == 1 else f"{len(rest)} parts" if rest else "no part"
            raise EngineError(
                f"loss_fn={_name(self.loss)} of torch needs one tensor of targets that forward does not get, but the "
                f"batch leaves {found} for the loss; pass a function such as loss_fn=lambda output, batch: "
                f"{_name(self.loss)}(output, batch[1]), or list the parts for forward in inputs= of engine.initialize."
            )
        return call_user_code(self.loss, (output, rest[0]), {})


def with_targets(loss_fn: LossFunction | None, inputs: ForwardInputs) -> LossFunction | None:
    """Returns ``loss_fn``, wrapped as :class:`TorchLoss` if it is a loss of ``torch.nn`` or ``torch.nn.functional``."""
    inner: Any = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of_torch = isinstance(inner, _Loss) or getattr(inner, "__module__", None) == nn.functional.__name__
    return TorchLoss(loss_fn, inputs) if of_torch and loss_fn is not None else loss_fn


def _name(loss: Any) -> str:
    inner = loss.func if isinstance(loss, partial) else loss
    return str(getattr(inner, "__name__", f"{type(inner).__name__}()"))
