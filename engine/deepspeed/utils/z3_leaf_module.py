"""Marks of ZeRO 3 leaf modules, under the names of ``deepspeed.utils``.

The marks have no effect, because the engine gathers whole blocks, with any submodules in any order of calls. They exist
for code that reads them.
"""

from collections.abc import Sequence

from torch import nn

_MARK = "_z3_leaf"


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Marks all submodules of ``model`` of the given classes (or class names) as ZeRO 3 leaf modules, and returns them.

    The mark has no effect on the engine.

    Raises:
        ValueError: the model has no such module.
    """
    found = [module for module in model.modules() if _is_one(module, leaf_module_classes)]
    if not found:
        named = ", ".join(each if isinstance(each, str) else each.__name__ for each in leaf_module_classes)
        raise ValueError(f"set_z3_leaf_modules: the model has no module of {named}; pass classes of its modules.")
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Removes the ZeRO 3 leaf mark from all submodules of ``model`` of the given classes (or class names), and returns
    them.
    """
    found = [module for module in model.modules() if _is_one(module, leaf_module_classes)]
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks ``model`` as a ZeRO 3 leaf module if ``flag`` is True; otherwise removes the mark."""
    object.__setattr__(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules in ``model``, including itself, that are marked as ZeRO 3 leaf modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns True if ``model`` itself is marked as a ZeRO 3 leaf module."""
    return bool(vars(model).get(_MARK, False))


def z3_leaf_parameter(parameter: nn.Parameter) -> bool:
    """Returns False, because only modules are marked as leaves."""
    return False


def _is_one(module: nn.Module, classes: Sequence[type[nn.Module] | str]) -> bool:
    kind = type(module)
    names = (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return any(each in names if isinstance(each, str) else isinstance(module, each) for each in classes)
