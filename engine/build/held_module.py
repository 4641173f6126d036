"""Calls on the user's module that raise a clear error while an engine has it.

load_state_dict        if this rank has only shards or a stage, which full tensors do not fit
save_pretrained        if this rank has only shards or a stage, which alone would be written
pickle, torch.save     hooks and forwards of the engine cannot be pickled

Entries of ``state_dict()`` can be pickled: each has its own storage, although parameters are views of buckets.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NoReturn

from torch import Tensor, nn

from engine.config import Config
from engine.errors import EngineError, PlanError
from engine.parallel.model.forward_patch import ForwardPatches, PatchLayer, copy_deeply
from engine.planning.budgets import shards_parameters
from engine.zero.flat_buckets import lay_apart, storages_of

_NOTE = "is not pickled while an engine trains it"
_NAMES = ("__reduce_ex__", "__deepcopy__")


def lay_entries_apart(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes ``model.state_dict()`` return tensors with separate storages until ``patches`` are removed, so that each
    can be pickled alone.
    """
    for module in model.modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            handle = module.register_state_dict_post_hook(_lay_entries)  # type: ignore[no-untyped-call]
            patches.hook(module, PatchLayer.PARAMETERS, handle, "state_dict() gives entries that are pickled alone")


def _lay_entries(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, parameter in module._parameters.items():
        entry, storages = state.get(prefix + name), storages_of(parameter) if parameter is not None else None
        if storages is not None and type(entry) is Tensor:
            lay_apart(entry, storages)


class _Held:
    """Module in training, as the argument of its reconstruction: ``copy.copy`` reads it, and pickle is refused."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise EngineError(
            f"the {type(self.model).__name__} is trained by an engine, whose hooks and shards cannot be pickled; save "
            "eng.full_state_dict() or eng.save_pretrained(folder), or the module itself after eng.close()."
        )


def _shallow_copy(held: _Held) -> nn.Module:
    """Returns another module over the same parameters, buffers and modules, as ``copy.copy`` creates it."""
    kind = type(held.model)
    copied = kind.__new__(kind)
    vars(copied).update({name: value for name, value in vars(held.model).items() if name not in _NAMES})
    return copied


def refuse_pickles(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes pickling of ``model`` raise EngineError until ``patches`` are removed. Copies still work. Does nothing for
    a class that defines ``__setstate__`` or ``__deepcopy__``.
    """
    kind = type(model)
    if kind.__setstate__ is not nn.Module.__setstate__ or hasattr(kind, "__deepcopy__"):
        return

    def reduce(protocol: object) -> tuple[Any, ...]:
        return _shallow_copy, (_Held(model),)

    vars(model).update(zip(_NAMES, (reduce, MethodType(copy_deeply, model)), strict=True))

    def take_off() -> None:
        for name in _NAMES:
            vars(model).pop(name, None)

    patches.own(model, PatchLayer.PARAMETERS, take_off, _NOTE)


def refuse_calls(model: nn.Module, config: Config, codes: bool, patches: ForwardPatches) -> None:
    """Makes ``load_state_dict`` and ``save_pretrained`` raise EngineError, until ``patches`` are removed, if tensor,
    pipeline or expert parallelism divides the parameters. ZeRO 3 refuses only ``save_pretrained``.

    Args:
        codes: True if frozen weights are stored quantized; both methods then raise too.
    """
    if config.divides_parameters or codes:
        _refuse_state_dicts(model, patches)
    if config.divides_parameters or codes or shards_parameters(config):
        _refuse_saves(model, patches)


def leave_parts(model: nn.Module, config: Config, cut: bool, patches: ForwardPatches) -> None:
    """Makes the removal of ``patches``, when the engine closes, mark the parameters of ``model`` as incomplete. Does
    nothing if this rank has all their elements.

    :func:`refuse_parts` refuses a model with marked parameters.

    Args:
        cut: True if some parameter is sharded over tensor or expert ranks.
    """
    if not cut and config.pp == 1:
        return

    def mark() -> None:
        for parameter in model.parameters():
            setattr(
                parameter, _PARTS, f"{config.tp} tensor, {config.pp} pipeline and {config.parallel.expert} expert ranks"
            )

    patches.own(model, PatchLayer.PARAMETERS, mark, "has parts of its parameters on this rank")


def refuse_parts(model: nn.Module) -> None:
    """Raises if a closed engine has left only shards of the model's parameters, or placeholders, on this rank.

    Raises:
        PlanError: ``model`` has only parts of its parameters.
    """
    for parameter in model.parameters():
        if (left := vars(parameter).get(_PARTS)) is not None:
            raise PlanError(
                f"the model has a part of its parameters on each rank, from a closed engine with {left}; save "
                "eng.full_state_dict() before close(), and load it into a new model."
            )


_PARTS = "_parts_of_an_engine"
"""Attribute of a parameter of which a rank has a part."""


def _refuse_state_dicts(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes modules refuse ``load_state_dict`` if this rank has only a part of them."""

    def refuse(*_: object) -> None:
        raise EngineError(
            "load_state_dict takes full tensors, but each rank of this model has a part of its parameters "
            "(parallel.tensor, parallel.pipeline, parallel.expert) or codes (quantize_frozen); call "
            "eng.load_checkpoint(folder), give checkpoint.init_from, or load the model before engine.initialize."
        )

    for module in model.modules():
        handle = module.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        patches.hook(module, PatchLayer.PARAMETERS, handle, "refuses load_state_dict, since parameters are in parts")


def _refuse_saves(model: nn.Module, patches: ForwardPatches) -> None:
    """Makes modules refuse ``save_pretrained`` if this rank has only a part of them, which it would write alone.

    A call that is given the weights (``state_dict=accelerator.get_state_dict(model)``), or writes none, is made.
    """

    def refuse(own: Callable[..., object], *args: object, **kwargs: object) -> object:
        if kwargs.get("state_dict") is not None or kwargs.get("is_main_process") is False:
            return own(*args, **kwargs)
        raise EngineError(
            "save_pretrained of the model would write only the part of its parameters that this rank has "
            "(parallel.tensor, parallel.pipeline, parallel.expert, ZeRO 3), or codes (quantize_frozen); call "
            "eng.save_pretrained(folder) on all ranks."
        )

    for module in model.modules():
        if callable(own := getattr(module, "save_pretrained", None)):
            made = partial(refuse, own)
            object.__setattr__(module, "save_pretrained", made)
            undo = partial(_restore_save, module, made)
            patches.own(module, PatchLayer.PARAMETERS, undo, "refuses save_pretrained, since parameters are in parts")


def _restore_save(module: nn.Module, refuse: object) -> None:
    if vars(module).get("save_pretrained") is refuse:
        object.__delattr__(module, "save_pretrained")
