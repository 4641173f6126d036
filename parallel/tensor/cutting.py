"""From a style for each module to the cuts of its parameters: the rules of a tensor plan.

All rules are tried before the first complaint about a size, so that the error can list every tensor size that
the whole model fits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

from engine.errors import PlanError
from engine.parallel.tensor.cuts import AttributeChange, Kind, LayerCut, ParameterCut, TensorPlan
from engine.parallel.tensor.product import is_conv1d, is_linear
from engine.parallel.tensor.ranges import cut_parts, cut_unevenly, held
from engine.parallel.tensor.regions import find_regions
from engine.parallel.tensor.styles import Style
from engine.parallel.tensor.vocabulary import check_embedding


@dataclass(frozen=True, slots=True)
class Fit:
    """A number that the tensor ranks have to share."""

    owner: str
    noun: str
    count: int
    rule: str = "divide"
    """divide: in equal shares; share: or each held by several ranks; rows: at least one each."""

    def allows(self, tp: int) -> bool:
        """Whether this number goes with ``tp`` ranks."""
        if self.rule == "rows":
            return self.count >= tp
        return self.count % tp == 0 or (self.rule == "share" and tp % self.count == 0)

    def complaint(self, tp: int) -> str:
        """What is wrong with ``tp`` ranks."""
        verb = {"divide": "does not divide", "share": "neither divides nor is a multiple of", "rows": "is more than"}
        return f"tensor = {tp} {verb[self.rule]} the {self.count} {self.noun} of {self.owner}"


def cut_model(model: nn.Module, styles: Mapping[str, Style], tp: int, source: str) -> TensorPlan:
    """The plan that ``styles``, by first module name, make.

    Raises:
        PlanError: a style that does not suit its module, or a model that does not fit ``tp``.
    """
    return _Cutting(model, styles, tp).plan(source)


class _Cutting:
    def __init__(self, model: nn.Module, styles: Mapping[str, Style], tp: int) -> None:
        self.modules = dict(model.named_modules())
        self.styles, self.tp = styles, tp
        self.kinds = {name: _kind(name, self.modules[name], style) for name, style in styles.items()}
        self.regions = find_regions(self.kinds)
        self.heads = {name: self._head_width(name) for name in styles}
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def plan(self, source: str) -> TensorPlan:
        for name in self.kinds:
            self._check_module(name)
        self._check_sizes()
        layers = {name: LayerCut(name, kind, self.regions.get(name, "")) for name, kind in self._layers()}
        if self.tp == 1:
            return TensorPlan(MappingProxyType({}), MappingProxyType({}), (), frozenset(), source)
        parameters = self._parameters()
        attributes = tuple(change for name, style in self.styles.items() for change in self._changes(name, style))
        return TensorPlan(MappingProxyType(layers), MappingProxyType(parameters), attributes, self._partial(), source)

    def _layers(self) -> Iterable[tuple[str, Kind]]:
        return ((name, kind) for name, kind in self.kinds.items() if kind is not None)

    # sizes

    def _head_width(self, name: str) -> int | None:
        if self.styles[name].head:
            return self.styles[name].head
        parent = self.modules[name.rpartition(".")[0]]
        widths = (getattr(parent, attribute, None) for attribute in ("head_dim", "head_width"))
        return next((width for width in widths if isinstance(width, int) and width > 0), None)

    def _unit(self, name: str) -> int:
        """Rows that stay together. A row layer takes what the column layers of its region give."""
        if self.kinds[name] == "row" and not self.heads[name]:
            region = self.regions[name]
            return max(self.heads[other] or 1 for other, place in self.regions.items() if place == region)
        return self.heads[name] or 1

    def _check_sizes(self) -> None:
        fits = [fit for name in self.kinds for fit in self._fits(name)]
        wrong = next((fit for fit in fits if not fit.allows(self.tp)), None)
        if wrong is None:
            return
        largest = max(fit.count for fit in fits)
        sizes = [size for size in range(1, largest + 1) if all(fit.allows(size) for fit in fits)]
        listed = ", ".join(str(size) for size in sizes)
        raise PlanError(f"{wrong.complaint(self.tp)}; choose a size that fits the whole model: {listed}.")

    def _fits(self, name: str) -> Iterable[Fit]:
        style, kind, module = self.styles[name], self.kinds[name], self.modules[name]
        if kind in ("embedding", "head"):
            yield Fit(name, "vocabulary rows", self._size(name), "rows")
        elif kind is not None:
            unit, parts = self._unit(name), style.parts
            if self._size(name) % (unit * parts):
                raise PlanError(
                    f"{name} has {self._size(name)} {'inputs' if kind == 'row' else 'outputs'}, which are not {parts} "
                    f"equal parts of whole heads of width {unit}; correct its style {style.text!r}."
                )
            noun = f"heads of width {unit}" if unit > 1 else ("inputs" if kind == "row" else "outputs")
            shared = kind == "column" and bool(self.heads[name])
            yield Fit(name, noun, self._size(name) // unit // parts, "share" if shared else "divide")
        for attribute in style.divided:
            yield Fit(name, attribute, _number(name, module, attribute))

    def _size(self, name: str) -> int:
        weight = self.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.shape[self._dim(name)]

    def _dim(self, name: str) -> int:
        by_outputs = self.kinds[name] != "row"
        return 0 if by_outputs != is_conv1d(self.modules[name]) else 1

    # parameters

    def _parameters(self) -> dict[str, ParameterCut]:
        cuts: dict[str, ParameterCut] = {}
        owners: dict[str, str] = {}
        for name, kind in self._layers():
            for local, cut in self._cuts(name, kind):
                first, *_ = self.names[id(getattr(self.modules[name], local))]
                owners.setdefault(first, name)
                if cuts.setdefault(first, cut) != cut:
                    raise PlanError(
                        f"{first} is shared by {owners[first]} and {name}, whose styles cut it in different ways; give "
                        'them styles that agree, or "replicate" to both.'
                    )
        self._check_ties(cuts)
        return cuts

    def _cuts(self, name: str, kind: Kind) -> Iterable[tuple[str, ParameterCut]]:
        size, dim = self._size(name), self._dim(name)
        if kind in ("embedding", "head"):
            ranges = cut_unevenly(size, self.tp)
        else:
            ranges = cut_parts(size, self.tp, self.styles[name].parts, self._unit(name))
        yield "weight", ParameterCut(dim, ranges)
        if getattr(self.modules[name], "bias", None) is not None and kind in ("column", "head"):
            yield "bias", ParameterCut(0, ranges)

    def _check_ties(self, cuts: Mapping[str, ParameterCut]) -> None:
        for first, *others in self.names.values():
            for alias in (first, *others) if first in cuts else ():
                owner = alias.rpartition(".")[0]
                if not any(self.modules[name] is self.modules.get(owner) for name, _ in self._layers()):
                    if owner not in self.modules:
                        continue  # another name of a module that is shared whole
                    raise PlanError(
                        f"{first} is cut, but {owner or 'the model itself'} uses the same parameter and is not; give "
                        f'{owner or "it"} the same style, or both "replicate".'
                    )

    def _partial(self) -> frozenset[str]:
        found = set()
        for name, style in self.styles.items():
            if style.kind != "partial":
                continue
            for local, parameter in self.modules[name].named_parameters(recurse=False):
                width = self.heads[name]
                if width is not None and tuple(parameter.shape) != (width,):
                    raise PlanError(
                        f"{name}.{local} has the shape {tuple(parameter.shape)}, but partial is for norms over one "
                        f"head of width {width}: a rank has not all heads; use tensor = 1 or replicate this attention."
                    )
                found.add(self.names[id(parameter)][0])
        return frozenset(found)

    # attributes

    def _changes(self, name: str, style: Style) -> Iterable[AttributeChange]:
        for attribute in style.divided:
            yield AttributeChange(name, attribute, _number(name, self.modules[name], attribute) // self.tp)
        for attribute, above, below in style.ratios:
            _number(name, self.modules[name], attribute)
            high, low = self._local_outputs(f"{name}.{above}", name), self._local_outputs(f"{name}.{below}", name)
            yield AttributeChange(name, attribute, high // low)
        for attribute, optional, child in style.counts:
            if not (optional and getattr(self.modules[name], attribute, None) is None):
                _number(name, self.modules[name], attribute)
                heads = self._local_outputs(f"{name}.{child}", name) // self._unit(f"{name}.{child}")
                yield AttributeChange(name, attribute, heads)

    def _local_outputs(self, child: str, owner: str) -> int:
        if self.kinds.get(child) != "column":
            raise PlanError(f"the style of {owner} names {child}, which is no column layer of the plan; correct it.")
        return held(cut_parts(self._size(child), self.tp, self.styles[child].parts, self._unit(child)), 0)

    # modules

    def _check_module(self, name: str) -> None:
        module = self.modules[name]
        if self.kinds[name] is None:
            return
        more = [local for local, _ in module.named_parameters() if local not in ("weight", "bias")]
        if more:
            raise PlanError(
                f"{name} has the parameter {more[0]} besides weight and bias, and no rule to cut it; "
                'give it the style "replicate".'
            )
        if "forward" in vars(module):
            raise PlanError(
                f"{name} has had its forward replaced on the object, which would pass the cut by; restore it."
            )
        if isinstance(self.modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            raise PlanError(
                f"{name} lies in an nn.MultiheadAttention, which reads its weight without calling it; "
                'give it the style "replicate".'
            )
        if isinstance(module, nn.Embedding):
            check_embedding(module, name)


def _kind(name: str, module: nn.Module, style: Style) -> Kind | None:
    """What a style makes of a module; None if it cuts nothing."""
    wanted = style.kind
    if wanted == "vocabulary" and isinstance(module, nn.Embedding):
        return "embedding"
    if wanted in ("vocabulary", "column", "row"):
        if not is_linear(module):
            cut = "nn.Linear, Conv1D and nn.Embedding" if wanted == "vocabulary" else "nn.Linear and Conv1D"
            raise PlanError(
                f"{name} is a {type(module).__name__}, but the style {style.text!r} is for {cut}; "
                'narrow its pattern or give it "replicate".'
            )
        return "head" if wanted == "vocabulary" else ("column" if wanted == "column" else "row")
    return None


def _number(name: str, module: nn.Module, attribute: str) -> int:
    value = getattr(module, attribute, None)
    if type(value) is not int:
        raise PlanError(
            f"{name}.{attribute} is {value!r}, but divide, ratio and heads change whole numbers; correct the "
            "name of the attribute."
        )
    return value
