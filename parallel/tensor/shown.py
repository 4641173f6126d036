"""Parameters that a module's code sees as views: with the whole shape, while this rank holds a part.

The parameter stays where it is registered, so that optimizers, hooks and checkpoints find it. What the code reads
as ``self.weight`` is made anew at each reading, since ZeRO-3 swaps the memory of a parameter between uses.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from engine.parallel.tensor.cuts import ParameterCut
from engine.parallel.tensor.views.context import Views
from engine.parallel.tensor.views.index import Index
from engine.parallel.tensor.views.view import View, show


def shown_class(own: type[nn.Module], cuts: Mapping[str, tuple[ParameterCut, tuple[int, ...]]], views: Views) -> type:
    """A subclass of ``own`` whose attributes named in ``cuts`` (with their whole shapes) are views."""
    properties = {name: _shown(name, cut, shape, views) for name, (cut, shape) in cuts.items()}
    return type(f"Shown{own.__name__}", (own,), properties)


def _shown(name: str, cut: ParameterCut, shape: tuple[int, ...], views: Views) -> property:
    sets: list[Index | None] = [None] * len(shape)
    sets[cut.dim] = Index.of_ranges(cut.ranges, views.axis.size)

    def read(module: nn.Module) -> Tensor | View:
        parameter = module._parameters[name]
        assert parameter is not None
        return show(parameter, shape, tuple(sets), views)

    return property(read)
