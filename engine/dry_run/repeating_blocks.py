"""Repeating blocks of module lists: equal modules, shapes and settings, except for stored layer numbers."""

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_PERIOD = 6
"""Longest period of a pattern in blocks, such as alternating windowed and full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeRun:
    """Repetitions of a pattern of blocks at the end of a module list.

    The pattern is one block or several, such as two layers with different attention.
    """

    blocks: str
    """Name of the module list."""
    start: int
    """Index of the first block of the pattern."""
    period: int
    """Number of blocks after which the pattern repeats."""
    periods: int


def longest_run(model: nn.Module, called: Container[int] | None = None) -> AlikeRun | None:
    """Returns the repeating pattern at the end of a module list in ``model`` with the most blocks in all its
    repetitions; None if nothing repeats.

    Args:
        called: ids (``id(module)``) of the modules that a forward calls; lists without them are ignored. None: all
            lists count.
    """
    runs = [
        run
        for name, kinds in _lists(model)
        if (called is None or is_called(model, name, called)) and (run := _run(name, kinds)) is not None
    ]
    return max(runs, key=_blocks, default=None)


def outer_runs(model: nn.Module) -> list[AlikeRun]:
    """Returns the repeating pattern of blocks at the end of each module list that is not in another list; lists without
    a pattern are left out.
    """
    outer = [(name, kinds) for name, kinds in _lists(model) if not any(part.isdecimal() for part in name.split("."))]
    return [run for name, kinds in outer if (run := _run(name, kinds)) is not None]


def is_called(model: nn.Module, blocks: str, called: Container[int]) -> bool:
    """Returns True if a forward calls any module in ``blocks``, the name of a module list in ``model``.

    Args:
        called: ids (``id(module)``) of the modules that the forward calls.
    """
    return any(id(module) in called for module in model.get_submodule(blocks).modules())


def _run(name: str, kinds: Sequence[int]) -> AlikeRun | None:
    """Returns the run with the most blocks, and among those the shortest period, which ``max`` meets first."""
    runs = [_run_of_period(name, kinds, period) for period in range(1, MOST_PERIOD + 1)]
    return max((run for run in runs if run.periods > 1), key=_blocks, default=None)


def _run_of_period(name: str, kinds: Sequence[int], period: int) -> AlikeRun:
    start = max(0, len(kinds) - period)
    while start > 0 and start - 1 + period < len(kinds) and kinds[start - 1] == kinds[start - 1 + period]:
        start -= 1
    periods = (len(kinds) - start) // period
    return AlikeRun(blocks=name, start=len(kinds) - periods * period, period=period, periods=periods)


def _blocks(run: AlikeRun) -> int:
    return run.periods * run.period


class KindNames:
    """Converter of names of modules and parameters: a block's index becomes ``#`` and the number of its kind, as in
    ``layers.#0.mlp``.

    Blocks of one list with equal modules, shapes and settings are of one kind.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds: Mapping[str, int] = {
            f"{name}.{index}".removeprefix("."): kind
            for name, kinds in _lists(model)
            for index, kind in enumerate(kinds)
        }

    def of(self, name: str) -> str:
        """Returns ``name``, of a module or parameter, with the kind of each block in place of its number:
        ``layers.7.down.weight`` becomes ``layers.#0.down.weight``.
        """
        parts = name.split(".")
        for index, part in enumerate(parts):
            kind = self._kinds.get(".".join(name.split(".")[: index + 1])) if part.isdecimal() else None
            parts[index] = part if kind is None else f"#{kind}"
        return ".".join(parts)


def _lists(model: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """Yields each list of modules with the kind of each member."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            yield name, _kinds(list(module))


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """Returns a number for each block; equal blocks have the same number."""
    settings = [dict(_settings(block)) for block in blocks]
    positions = {key for key in settings[0] if _is_position([one.get(key) for one in settings])}
    seen: dict[Hashable, int] = {}
    kinds = []
    for one in settings:
        described = tuple(item for item in one.items() if item[0] not in positions)
        kinds.append(seen.setdefault(described, len(seen)))
    return kinds


def _is_position(values: Sequence[Hashable]) -> bool:
    """Returns True if every block stores its own index in the list."""
    return all(type(value) is int and value == at for at, value in enumerate(values))


def _settings(block: nn.Module) -> Iterator[tuple[tuple[str, str], Hashable]]:
    """Yields all settings that determine the memory of a block, by (module, attribute)."""
    for name, module in block.named_modules():
        yield (name, ""), id(type(module))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield (name, key), _described(tensor)
        for key, value in vars(module).items():
            if not key.startswith("_") and _is_plain(value):
                yield (name, key), repr(value) if isinstance(value, list | tuple) else value


def _described(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, str | bool | int | float | None) for one in value)
    return value is None or isinstance(value, str | bool | int | float | torch.dtype)
