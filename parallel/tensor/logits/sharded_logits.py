"""Logits with a vocabulary sharded over the tensor ranks, in the form of an ordinary tensor.

A head returns them to code without any notion of tensor parallelism. Functions that are correct on a shard run on the
shard (``logits.rules``): elementwise operations, another order of dims, losses. Every other function is recorded by
name, gathers the vocabulary over "tp" (label "logits"), with gradients, and runs on a plain tensor.

Logits may also be lazy (``layers.lazy_head``): nothing is computed until a function other than a loss reads them. On a
tensor axis of one rank they exist only to be lazy, and become a plain tensor at the first read.

``__torch_function__`` handles functions that reach Python. Custom autograd functions do not reach Python: they get a
tensor of the autograd graph, and gather under ``__torch_dispatch__``.

Shape suffixes: V the vocabulary, W this rank's shard of it.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.errors import EngineError
from engine.parallel.tensor.collectives import gather_last
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.redistribute import full
from engine.parallel.tensor.logits.lazy_logits import LazyLogits, derived, late_answer
from engine.parallel.tensor.logits.logit_shard import LogitShard, Vocabulary
from engine.parallel.tensor.logits.rules import answer
from engine.parallel.trace.torch_function import METADATA, function_name, writes_in_place


class ShardedLogits(Tensor):
    """Tensor subclass for logits with a sharded vocabulary dim. It has the full shape and stores this rank's shard,
    ``part``.

    Raises:
        EngineError: a function writes into the logits in place, or registers a hook on them.
    """

    _part: LogitShard | None
    _full: Tensor | None
    _waiting: LazyLogits | None
    _derived: "list[weakref.ref[ShardedLogits]]"
    _in_loss: bool
    """True if a loss has been computed from these lazy logits."""

    @staticmethod
    def wrap(local_W: Tensor, vocabulary: Vocabulary) -> "ShardedLogits":
        """Returns the logits [.., V] with ``local_W`` as this rank's shard."""
        return ShardedLogits.of(LogitShard(local_W, vocabulary, local_W.dim() - 1))

    @staticmethod
    def of(part: LogitShard) -> "ShardedLogits":
        """Returns sharded logits that have ``part`` as this rank's shard."""
        wrapped: ShardedLogits = _Wrap.apply(part.local, part)  # type: ignore[no-untyped-call]
        wrapped._part = part
        return wrapped

    @staticmethod
    def late(hidden: LogitShard, compute: Callable[[], LogitShard]) -> "ShardedLogits":
        """Returns lazy (not yet computed) logits of the ``hidden`` states. ``compute``: callback that returns this
        rank's shard.
        """
        arrivals = list[Callable[[Tensor], None]]()

        def computed() -> LogitShard:
            part = compute()
            if part.local.requires_grad:
                part.local.register_hook(partial(_call, arrivals))  # type: ignore[no-untyped-call]
            return part

        return _wait(LazyLogits(hidden, computed, arrivals=arrivals))

    def when_differentiated(self, hook: Callable[[Tensor], None]) -> None:
        """Calls ``hook(gradient)`` when a backward reaches these logits, lazy or computed.

        The gradient is that of the logits, or of a loss computed from lazy logits.
        """
        self.register_hook(hook)  # type: ignore[no-untyped-call]
        if self._waiting is not None:
            self._waiting.arrivals.append(hook)

    @property
    def part(self) -> LogitShard:
        """This rank's shard. A read computes lazy (not yet computed) logits."""
        if self._part is not None:
            return self._part
        assert self._waiting is not None
        part = self._waiting.compute()
        if part.local.requires_grad or not self.requires_grad:  # a result computed below autograd lacks its graph
            self._part = part
        return part

    def compute(self) -> None:
        """Computes this rank's shard, if these logits are still lazy."""
        _ = self.part

    @property
    def waits(self) -> bool:
        """True until these logits, or the logits from which they were derived, are computed."""
        source = None if self._waiting is None else self._waiting.source
        return self._part is None and (source is None or source.waits)

    @property
    def vocabulary(self) -> Vocabulary:
        """Distribution of the vocabulary over the tensor ranks."""
        return self._held.vocabulary

    @property
    def _held(self) -> LogitShard:
        if self._part is None and self._waiting is not None:
            return self._waiting.part
        assert self._part is not None
        return self._part

    @property
    def alone(self) -> bool:
        """True if this rank has the full vocabulary, because the tensor axis has one rank."""
        return self.vocabulary.axis.size == 1

    @property
    def gathered(self) -> bool:
        """True if the full logits have been gathered and cached."""
        return self._full is not None

    def full(self, reason: str = "full") -> Tensor:
        """Returns the full logits as a plain tensor with gradients, by one all-gather over "tp" with the label
        "logits". Caches the result.

        ``reason``: name of the function that needs them, recorded in ``vocabulary.gathers``.
        """
        part, vocabulary = self.part, self.vocabulary
        local, dim = part.local, part.dim
        if self.alone:
            return local
        wanted = torch.is_grad_enabled() and local.requires_grad
        if self._full is None or self._full.requires_grad != wanted:
            if reason not in vocabulary.gathers:
                vocabulary.gathers.append(reason)
            whole_V = gather_last(local.movedim(dim, -1), vocabulary.widths, vocabulary.axis)
            self._full = whole_V if part.is_last else whole_V.movedim(-1, dim)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held, begin = self._held, self.vocabulary.start
        place = f"columns {begin}:{begin + self.vocabulary.width}"
        place += "" if held.is_last else f" of dim {held.dim}"
        place += "" if self._part is not None else ", not computed"
        return f"ShardedLogits(shape={tuple(self.shape)}, {place}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT_IT and (func is Tensor.__hash__ or not _is_plain(args[0])):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        result = _late(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if all(logits.alone for logits in _found((args, kwargs))):
            if _writes(function_name(func), args, kwargs):
                _settle(_found((args, kwargs)))
            return func(*_gathered(args, ""), **_gathered(dict(kwargs), ""))
        result = answer(func, *_to_slices((args, dict(kwargs))))
        if result is not NotImplemented:
            return _from_slices(result, args)
        name = function_name(func)
        _refuse_writes(name, args, kwargs)
        return func(*_gathered(args, name), **_gathered(dict(kwargs), name))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # autograd makes an alias of the tensor
            return _renamed(args[0])
        name = func.__name__.split(".")[0]
        _refuse_writes(name, args, kwargs or {})
        with torch.no_grad():  # below autograd, which records the wrapped tensor
            return func(*_gathered(args, name), **_gathered(dict(kwargs or {}), name))


def gather_logits(tree: Any) -> Any:
    """Returns ``tree`` with all sharded logits and global (DTensor-like) tensors gathered to full plain tensors.
    ``tree`` may contain lists, tuples, dicts and Hugging Face outputs.
    """
    return _gathered(pytree.tree_map(_plain, tree, is_leaf=lambda node: type(node) is GlobalTensor), "whole")


def compute_lazy(tree: Any, unread: bool = False) -> None:
    """Computes the lazy (not yet computed) logits in ``tree``. Communicates nothing.

    ``unread``: True to skip logits from which a loss has been made already.
    """
    for logits in _found(tree):
        if logits.waits and not (unread and _source_of(logits)._in_loss):
            logits.compute()


def _plain(leaf: Any) -> Any:
    return full(leaf, "whole") if type(leaf) is GlobalTensor else leaf


def _gathered(tree: Any, reason: str) -> Any:
    return pytree.tree_map_only(ShardedLogits, lambda logits: logits.full(reason), tree)


def _found(tree: Any) -> Iterator[ShardedLogits]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, ShardedLogits))


def _is_plain(logits: Any) -> bool:
    """Returns True if these logits are computed and full, so that they behave as the plain tensor inside."""
    return isinstance(logits, ShardedLogits) and logits._part is not None and logits.alone


def _late(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the result of a function that leaves lazy logits uncomputed, or ``NotImplemented``."""
    logits = args[0] if args else kwargs.get("input")
    if not isinstance(logits, ShardedLogits) or not logits.waits or logits._waiting is None:
        return NotImplemented
    rest, named = args[1:], {name: value for name, value in kwargs.items() if value is not logits}
    if any(True for _ in _found((rest, named))):
        return NotImplemented
    own = logits._waiting.part
    logits._waiting.check()
    found = late_answer(func, own if torch.is_grad_enabled() else own.detached(), rest, named)
    if found is own:
        return logits
    if isinstance(found, LogitShard):
        return _wait(derived(logits, found, lambda part: answer(func, (part, *rest), named)))
    if not isinstance(found, tuple):
        if isinstance(found, Tensor) and found.requires_grad:
            _announce(found, _source_of(logits))
        return found

    def piece(place: int) -> Callable[[LogitShard], Any]:
        return lambda part: answer(func, (part, *rest), named)[place]

    return tuple(_wait(derived(logits, one, piece(place))) for place, one in enumerate(found))


def _call(hooks: Sequence[Callable[[Tensor], None]], grad: Tensor) -> None:
    for hook in hooks:
        hook(grad)


def _source_of(logits: ShardedLogits) -> ShardedLogits:
    """Returns the output of the head from which ``logits`` derive."""
    while logits._waiting is not None and isinstance(logits._waiting.source, ShardedLogits):
        logits = logits._waiting.source
    return logits


def _announce(loss: Tensor, source: ShardedLogits) -> None:
    """Calls the hooks of the lazy logits ``source`` when a backward of ``loss`` begins.

    ZeRO 3 frees the head's weight in this backward. If it retains the graph, a later loss may read the logits for the
    first time, so they are computed before.
    """
    assert source._waiting is not None
    source._in_loss = True
    arrivals, reference = source._waiting.arrivals, weakref.ref(source)

    def arrive(grad: Tensor) -> None:
        _call(arrivals, grad)
        still = reference()
        if arrivals and still is not None and torch._C._autograd._get_current_graph_task_keep_graph():
            still.compute()

    loss.register_hook(arrive)  # type: ignore[no-untyped-call]


def _settle(logits: Iterator[ShardedLogits]) -> None:
    """Computes all lazy logits that derive from the same source, before a function writes into it."""
    for one in map(_source_of, logits):
        pending = [one]
        while pending:
            one = pending.pop()
            one.compute()
            pending += [made for made in (reference() for reference in one._derived) if made is not None]


def _to_slices(tree: Any) -> Any:
    return pytree.tree_map_only(ShardedLogits, lambda logits: logits.part, tree)


def _from_slices(result: Any, args: tuple[Any, ...]) -> Any:
    """Returns ``result`` with shards wrapped as tensors; the shard of an argument becomes that argument's object."""
    given = {id(arg.part): arg for arg in args if isinstance(arg, ShardedLogits)}
    return pytree.tree_map_only(
        LogitShard, lambda part: given[id(part)] if id(part) in given else ShardedLogits.of(part), result
    )


class _Wrap(torch.autograd.Function):
    """Autograd node of the logits, for functions that bypass ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: LogitShard) -> ShardedLogits:
        ctx.part = part.dim, part.vocabulary
        return _empty(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dim, vocabulary = ctx.part
        return grad.narrow(dim, vocabulary.start, vocabulary.width), None


class _WrapLate(torch.autograd.Function):
    """Autograd node of lazy logits; functions that bypass ``__torch_function__`` compute the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_WH: Tensor, bias_W: Tensor | None, part: LogitShard) -> ShardedLogits:
        ctx.save_for_backward(hidden, weight_WH)
        ctx.part, ctx.biased = (part.dim, part.vocabulary), bias_W is not None
        return _empty(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight_WH), (dim, vocabulary) = ctx.saved_tensors, ctx.part
        mine = grad.narrow(dim, vocabulary.start, vocabulary.width).movedim(dim, -1).to(hidden.dtype)
        mine_NW, hidden_NH = (x.reshape(-1, x.shape[-1]) for x in (mine, hidden.movedim(dim, -1)))
        bias_W = mine_NW.sum(0) if ctx.biased else None
        return (mine @ weight_WH).movedim(-1, dim), mine_NW.t() @ hidden_NH, bias_W, None


def _wait(waiting: LazyLogits) -> ShardedLogits:
    part = waiting.part
    assert part.product is not None
    given = part.local, part.product.weight, part.product.bias
    wrapped: ShardedLogits = _WrapLate.apply(*given, part)  # type: ignore[no-untyped-call]
    wrapped._waiting = waiting
    if isinstance(waiting.source, ShardedLogits):
        waiting.source._derived.append(weakref.ref(wrapped))
    return wrapped


def _renamed(logits: ShardedLogits) -> ShardedLogits:
    """Returns the same logits without gradients, for ``detach`` below autograd."""
    made = _empty(logits._held)
    if logits._part is not None:
        made._part = logits._part.now(logits._part.local.detach(), same=True)
    elif logits._waiting is not None:
        made._waiting = derived(logits, logits._waiting.part.detached(), LogitShard.detached)
    return made


def _empty(part: LogitShard) -> ShardedLogits:
    made: ShardedLogits = Tensor._make_wrapper_subclass(
        ShardedLogits, part.shape, dtype=part.dtype, device=part.local.device
    )
    made._part, made._full, made._waiting, made._derived, made._in_loss = None, None, None, [], False
    return made


def _writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    target = args[0] if args else None
    writes = writes_in_place(name) or name.startswith("set ") or name in _TO_THE_OBJECT
    return (writes and isinstance(target, ShardedLogits)) or isinstance(kwargs.get("out"), ShardedLogits)


def _refuse_writes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if _writes(name, args, kwargs):
        raise EngineError(
            f"{name} was called on logits with a vocabulary sharded over the tensor ranks, which are read-only and "
            "take no hooks; make a new tensor, or call engine.parallel.tensor.gather_logits on them first."
        )


_TO_THE_OBJECT = frozenset((
    "register_hook", "retain_grad", "register_post_accumulate_grad_hook", "requires_grad_", "share_memory_",
))  # fmt: skip
"""Functions that change the tensor object, which the autograd graph does not contain."""
_ABOUT_IT = METADATA | {Tensor.__hash__}
