"""Activation checkpointing of blocks (Chen et al. 2016): a block keeps its input and runs again in backward.

    full         every block
    selective    every n-th block ("every"), or every block except for the outputs of listed operators, which are kept
    offload      no block ("every": n-th): its saved tensors go to the host; the other blocks run as "others"

The random state at the block's entry is restored for the second run, so that dropout draws the same masks, and so is
every other state that the block reads or writes (:mod:`~engine.parallel.activation_checkpointing.second_run`). A model
whose own switch is on (Hugging Face's ``gradient_checkpointing_enable``) is left as it is.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from engine.errors import ConfigError, EngineError
from engine.parallel.activation_checkpointing.host_activations import HostActivations
from engine.parallel.activation_checkpointing.operators import DEFAULT, OPERATOR_KINDS
from engine.parallel.activation_checkpointing.second_run import BlockState
from engine.parallel.activation_checkpointing.selective import Operator, SavedActivations, Selective
from engine.parallel.model.blocks import find_units
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer
from engine.parallel.model.torch_checkpoint import AGAIN, ENDS
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.tp_axis import TensorAxis

CPU = torch.device("cpu")
_ENABLED: Mapping[SDPBackend, Callable[[], bool]] = MappingProxyType({
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
})  # fmt: skip
Again = Callable[[], Callable[[], AbstractContextManager[None]]]
"""Called in the forward of a block; returns the context in which this block runs again."""


class CheckpointPolicy(Protocol):
    """Interface of the configuration section ``activation_checkpointing``."""

    @property
    def mode(self) -> str:
        """Mode of the model's blocks: ``none``, ``full``, ``selective`` or ``offload``.

        In backward, ``full`` recomputes all blocks, and ``selective`` a part of each, or with :attr:`every` some
        blocks completely. In forward, ``offload`` moves activations to the host.
        """

    @property
    def save(self) -> tuple[str, ...] | None:
        """Operators that mode ``selective`` does not recompute, because it saves their outputs: names of torch
        operators, or kinds such as "matmul" and "attention". None: these two kinds.
        """

    @property
    def every(self) -> int | None:
        """Interval n in modes ``selective`` and ``offload``.

        ``offload`` offloads every n-th block; None: all blocks. ``selective`` recomputes every n-th block completely,
        and no other block; None: it recomputes a part of every block.
        """

    @property
    def others(self) -> str:
        """Mode for the blocks with activations that ``offload`` leaves on the device, such as ``none`` or ``full``."""

    @property
    def inputs(self) -> str:
        """Memory that stores the inputs of recomputed blocks until backward: ``device`` or ``host``."""


def recomputed_blocks(model: nn.Module, settings: CheckpointPolicy) -> Mapping[str, nn.Module]:
    """Returns the blocks that backward recomputes in full, by module name. With Hugging Face's own gradient
    checkpointing, returns all blocks.

    Raises:
        ConfigError: ``every`` is larger than the number of blocks.
    """
    if _switched_on(model) or settings.mode == "full":
        return _blocks(model)
    if settings.mode == "offload" and settings.others == "full":
        return _without(_blocks(model), offloaded_blocks(model, settings))
    if settings.mode != "selective" or settings.every is None:
        return MappingProxyType({})
    return _every(settings.every, _blocks(model), "recomputed")


def selective_blocks(model: nn.Module, settings: CheckpointPolicy) -> Mapping[str, nn.Module]:
    """Returns the blocks that backward recomputes in part, by module name. With Hugging Face's own gradient
    checkpointing, returns none.
    """
    if _switched_on(model):
        return MappingProxyType({})
    if settings.mode == "offload" and settings.others == "selective":
        return _without(_blocks(model), offloaded_blocks(model, settings))
    chosen = settings.mode == "selective" and settings.every is None
    return _blocks(model) if chosen else MappingProxyType({})


def offloaded_blocks(model: nn.Module, settings: CheckpointPolicy) -> Mapping[str, nn.Module]:
    """Returns the blocks with activations that are offloaded to the host, by module name. With Hugging Face's own
    gradient checkpointing, returns none.

    Raises:
        ConfigError: ``every`` is larger than the number of blocks.
    """
    if settings.mode != "offload" or _switched_on(model):
        return MappingProxyType({})
    return _every(settings.every or 1, _blocks(model), "kept on the host")


def find_operators(settings: CheckpointPolicy) -> frozenset[Operator]:
    """Returns the torch operators (``OpOverload``) that ``settings.save`` names. Selective checkpointing saves their
    outputs.

    Raises:
        ConfigError: torch has no operator of a given name, or the operator's outputs share memory with its arguments.
    """
    names = settings.save if settings.save is not None else DEFAULT
    known = [name for kind in names for name in OPERATOR_KINDS.get(kind, ())]
    found = {operator for name in known for operator in _overloads(name) if _gives_own_memory(operator)}
    for name in names:
        if name not in OPERATOR_KINDS:
            found.update(_asked(name))
    return frozenset(found)


def recompute_blocks(
    model: nn.Module,
    settings: CheckpointPolicy,
    patches: ForwardPatches,
    axis: TensorAxis | None = None,
    device: torch.device = CPU,
    again: Again | None = None,
) -> HostActivations:
    """Patches the blocks that ``settings`` selects: backward recomputes them, or their activations are offloaded. Does
    nothing if Hugging Face's own gradient checkpointing is on.

    Returns the store of offloaded activations.

    Args:
        patches: list that records the changes to modules.
        axis: tensor-parallel axis; selective checkpointing also saves the results of its all-reduces.
        device: device of the activations.
        again: callback without arguments, called in each forward of a block. It returns a context manager factory,
            used when backward recomputes this forward.
    """
    host = HostActivations(device)
    if _switched_on(model):
        return host
    selective = Selective(find_operators(settings), axis)
    for block in recomputed_blocks(model, settings).values():
        note = "keeps its inputs only and is recomputed in backward"
        patches.wrap_forward(block, PatchLayer.RECOMPUTE, _recomputed(block, again), note)
    for block in selective_blocks(model, settings).values():
        note = "is recomputed in backward, except the outputs of the operators that activation_checkpointing.save names"
        forward = recomputed_in_part(block, selective, again=again)
        patches.wrap_forward(block, PatchLayer.RECOMPUTE, forward, note)
    repeated = (*recomputed_blocks(model, settings).values(), *selective_blocks(model, settings).values())
    for block in repeated if settings.inputs == "host" else ():
        patches.wrap_forward(block, PatchLayer.RECOMPUTE, host.keeping(block), "keeps its inputs on the host")
    for block in offloaded_blocks(model, settings).values():
        note = "keeps the activations that its backward needs on the host"
        patches.wrap_forward(block, PatchLayer.RECOMPUTE, host.keeping(block), note)
    return host


def recomputed_in_part(
    block: nn.Module, selective: Selective, started: list[SavedActivations] | None = None,
    again: Again | None = None,
) -> Any:  # fmt: skip
    """Returns a forward of ``block`` that saves only the tensors selected by ``selective``; backward recomputes all
    others.

    Each call appends its records of saved tensors to the list ``started``. ``again``: callback, called in
    each forward; it returns a context manager factory for the recomputation.
    """
    inner, state = block.forward, BlockState(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        run, args, kwargs = _on_shards(_repeated(state, inner, again), args, kwargs)
        made, given = list[SavedActivations](), _GivenTensors(args, kwargs)

        def contexts() -> Any:  # a block in several units runs again in parts, the last one first
            made.append(SavedActivations())
            return selective.contexts(made[-1])

        def end(out: Any) -> None:
            for kept in made:
                kept.finish(leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor))

        vars(contexts)[ENDS] = end
        out = checkpoint(
            run,
            *args,
            use_reentrant=False,
            context_fn=contexts,
            **kwargs,
        )
        given.refuse_written(block)
        end(out)
        if started is not None:
            started.extend(made)
        return out

    return forward


def _every(number: int, blocks: Mapping[str, nn.Module], what: str) -> Mapping[str, nn.Module]:
    """Every ``number``-th block."""
    if number > max(len(blocks), 1):
        raise ConfigError(
            f"activation_checkpointing.every is {number}, but the model has {len(blocks)} blocks, so that none "
            f"would be {what}; give a smaller number, or leave activation_checkpointing out."
        )
    return MappingProxyType(dict(list(blocks.items())[number - 1 :: number]))


def _without(blocks: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> Mapping[str, nn.Module]:
    return MappingProxyType({name: block for name, block in blocks.items() if name not in others})


def _blocks(model: nn.Module) -> Mapping[str, nn.Module]:
    units = find_units(model)
    return MappingProxyType({name: units.modules[name] for name in units.blocks})


def _switched_on(model: nn.Module) -> bool:
    """Returns True if Hugging Face's own switch is on, under its new or its old name."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))


def _recomputed(block: nn.Module, again: Again | None) -> Any:
    inner, state = block.forward, BlockState(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        run, args, kwargs = _on_shards(_repeated(state, inner, again), args, kwargs)
        given = _GivenTensors(args, kwargs)
        out = checkpoint(run, *args, use_reentrant=False, **kwargs)
        given.refuse_written(block)
        return out

    return forward


def _repeated(state: BlockState, inner: Callable[..., Any], again: Again | None) -> Callable[..., Any]:
    """Returns a wrapper of ``inner`` for one forward of the block and its recomputations, in whole or in units."""
    run = state.keeping(as_in_forward(inner, again))
    vars(run)[AGAIN] = again
    return run


def _on_shards(
    run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns ``run`` and its arguments with this rank's shards in place of global tensors, which ``run`` makes again.

    Autograd saves the arguments of a recomputed block; hooks that move saved tensors accept plain tensors only.
    """
    values = (*args, *kwargs.values())
    if not any(type(value) is GlobalTensor for value in values):
        return run, args, kwargs
    makers = [_maker(value) for value in values]

    @wraps(run)
    def whole(*given: Any, **named: Any) -> Any:
        made = [make(value) for make, value in zip(makers, (*given, *named.values()), strict=True)]
        return run(*made[: len(given)], **dict(zip(named, made[len(given) :], strict=True)))

    shards = [_shard(value) for value in values]
    return whole, tuple(shards[: len(args)]), dict(zip(kwargs, shards[len(args) :], strict=True))


def _shard(value: Any) -> Any:
    """Returns the shard of a global tensor, over all axes on which it is nested; other values unchanged."""
    return _shard(value.local) if type(value) is GlobalTensor else value


def _maker(value: Any) -> Callable[[Any], Any]:
    """Returns a function of a shard that makes a global tensor like ``value``, which it does not keep alive."""
    if type(value) is not GlobalTensor:
        return lambda given: given
    full, sets, views, folded, inner = value.full, value.sets, value.views, value.folded, _maker(value.local)

    def make(shard: Tensor) -> GlobalTensor:
        made = GlobalTensor(inner(shard), full, sets, views)
        made.folded = folded
        return made

    return make


def as_in_forward(inner: Callable[..., Any], again: Again | None) -> Callable[..., Any]:
    """Returns a wrapper of ``inner``, a block's forward; each forward of the block needs a new wrapper.

    Its first call is the forward; later calls recompute it under the first call's torch function modes. ``again`` is
    called once; it returns a context manager factory for the recomputations.
    """
    calls, run = 0, _in_mode_of_forward(inner)
    if again is None:
        return run
    entered = again()

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with entered() if calls > 1 else nullcontext():
            return run(*args, **kwargs)

    return forward


class _GivenTensors:
    """The tensors that a block is given, from which it runs again in backward, and how often each had been written."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given: list[Tensor] = []
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._given.append(value)
            elif value is not None:
                self._given += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        self._before = self._versions()

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunction():
            return [tensor._version for tensor in self._given if not tensor.is_inference()]

    def refuse_written(self, block: nn.Module) -> None:
        """Refuse a block that has written into one of them.

        Raises:
            EngineError: its second run would begin with the values that the first one has written.
        """
        if self._versions() != self._before:
            raise EngineError(
                f"a recomputed {type(block).__name__} changes its input in place, so its recomputation in backward "
                "would start from changed values; use x = x * 2 instead of x *= 2 on inputs of the block "
                "(inplace=False in modules), or leave this block out of activation_checkpointing."
            )


def _in_mode_of_forward(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``inner`` to repeat its call in the function modes of the first one, such as the watch of a first forward,
    and with its attention backends (``torch.nn.attention.sdpa_kernel``).

    Layers leave their own products to torch where a mode watches, and a recomputation has to save what the forward
    has saved.
    """
    if torch.compiler.is_compiling():
        return inner
    modes, backends = _get_current_function_mode_stack(), _attention_backends()  # type: ignore[no-untyped-call]

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as entered:
            for mode in modes if not torch._C._len_torch_function_stack() else ():
                entered.enter_context(mode)
            if backends and _attention_backends() != backends:
                entered.enter_context(sdpa_kernel(backends))
            return inner(*args, **kwargs)

    return run


def _attention_backends() -> list[SDPBackend]:
    """Returns the backends that ``scaled_dot_product_attention`` may use now."""
    return [backend for backend, enabled in _ENABLED.items() if enabled()]


def _asked(name: str) -> Sequence[Operator]:
    """The operators that ``name``, one of torch's own names, stands for."""
    found = list(_overloads(name))
    if not found:
        known = {word.split(".")[0].replace("::", ".") for word in torch._C._dispatch_get_all_op_names()}
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "name one that a profile of the model shows, such as aten.mm."
        raise ConfigError(
            f"activation_checkpointing.save holds {name!r}, which this version of torch does not have; {hint}"
        )
    own = [operator for operator in found if _gives_own_memory(operator)]
    if not own:
        raise ConfigError(
            f"activation_checkpointing.save holds {name!r}, which returns or writes memory of its arguments and so has "
            "no output of its own to keep; leave it out."
        )
    return own


def _overloads(name: str) -> Iterator[Operator]:
    space, operator, *overload = name.split(".")
    packet = getattr(getattr(torch.ops, space, None), operator, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        for word in overload or packet.overloads():  # type: ignore[no-untyped-call]
            found = getattr(packet, word, None)
            if isinstance(found, torch._ops.OpOverload):
                yield found


def _gives_own_memory(operator: Operator) -> bool:
    schema = operator._schema
    return not schema.is_mutable and all(result.alias_info is None for result in schema.returns)
