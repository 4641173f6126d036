"""Rules of a tensor plan, from the user's styles to the ranges of each parameter and the region of each layer.

A region is the part of a block between column layers and their row layer. The region of a layer is the innermost
enclosing module that also contains a layer of the other kind:

    blocks.0.attention.{query,key,value}  blocks.0.attention.output     -> blocks.0.attention
    blocks.0.up                           blocks.0.down                 -> blocks.0

All rules run before the first error about a size, so that the error can list every tensor size that fits the whole
model.

``parallel.tensor_plan`` contains the styles, or the path of a JSON file with them. A plan is data, made from names and
shapes alone: a model on the meta device is sufficient, and every rank makes the same plan. ``layers.apply_plan``
applies the plan to a model, and the shard table uses its ranges. With the setting "auto", ``auto`` searches the plan
instead.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from engine.errors import PlanError
from engine.parallel.model.forward_patch import goes_through_class
from engine.parallel.model.name_patterns import is_inside, refuse_unmatched
from engine.parallel.tensor.deferred_linear import is_conv1d, is_linear
from engine.parallel.tensor.plan.low_rank_pairs import join_pairs
from engine.parallel.tensor.plan.ranges import Divisibility, check_fits, cut_parts, cut_unevenly, held, ranges_of_runs
from engine.parallel.tensor.plan.styles import Patterns, Style, parse_style, read_setting
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, LayerCut, LayerKind, ParameterCut, TensorPlan


class _Target(NamedTuple):
    """Parameter that a style shards."""

    owner: str
    """The module that owns the parameter."""
    local: str
    dim: int
    named: str
    """The module or parameter with the style."""


def cut_model(
    model: nn.Module, styles: Mapping[str, Style], tp: int, source: str, sequence: bool = False
) -> TensorPlan:
    """Returns the plan that shards ``model`` over ``tp`` tensor ranks by ``styles``.

    ``styles``: name of a module or parameter -> style. If a module or parameter has several names, the key is the
    first. ``source``: origin of the styles, for the startup banner. ``sequence``: True for sequence parallelism.

    Raises:
        PlanError: a style does not suit its module, or the model does not fit ``tp``.
    """
    return replace(_Cutting(model, styles, tp).plan(source), sequence=sequence)


class _Cutting:
    def __init__(self, model: nn.Module, styles: Mapping[str, Style], tp: int) -> None:
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.styles, self.tp = styles, tp
        self.kinds = {
            name: _kind(name, self.modules[name], style) for name, style in styles.items() if name in self.modules
        }
        self.layers = {name: kind for name, kind in self.kinds.items() if kind is not None and not styles[name].view}
        self.regions = find_regions(self.layers)
        self.heads = {name: self._head_width(name) for name in styles}
        self.names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def plan(self, source: str) -> TensorPlan:
        for name in self.kinds:
            self._check_module(name)
        check_fits([fit for name in self.styles for fit in self._fits(name)], self.tp)
        if self.tp == 1:
            return TensorPlan(MappingProxyType({}), MappingProxyType({}), (), frozenset(), source)
        parameters, shown = self._parameters()
        layers = {name: LayerCut(name, kind, self.regions.get(name, "")) for name, kind in self.layers.items()}
        layers, halves = join_pairs(self.modules, layers, parameters, lambda p: self.names[id(p)][0])
        changes = tuple(change for name, style in self.styles.items() for change in self._changes(name, style))
        layers_, parameters_ = MappingProxyType(layers), MappingProxyType(parameters)
        return TensorPlan(layers_, parameters_, changes, self._partial() | halves, source, shown)

    # sizes

    def _head_width(self, name: str) -> int | None:
        style = self.styles[name]
        if style.head:
            return style.head
        if style.kind == "cut" or style.rows:
            return None
        return head_width(self.modules.get(name.rpartition(".")[0]))

    def _unit(self, name: str) -> int:
        """Returns the number of rows that stay together; a row layer uses the number of its column layers."""
        if self.kinds.get(name) == "row" and not self.heads[name] and name in self.regions:
            region = self.regions[name]
            return max(self.heads[other] or 1 for other, place in self.regions.items() if place == region)
        return self.heads[name] or 1

    def _fits(self, name: str) -> Iterable[Divisibility]:
        style, kind = self.styles[name], self.kinds.get(name)
        if kind in ("embedding", "head"):
            yield Divisibility(name, "vocabulary rows", self._size(name), "rows")
        elif style.rows is not None:
            self._check_rows(name)
        elif target := next(self._targets(name), None):
            unit, parts = self._unit(name), style.parts
            size = self._whole(target).shape[target.dim]
            noun = "inputs" if kind == "row" else "outputs" if kind else f"rows of dim {target.dim}"
            if size % (unit * parts):
                raise PlanError(
                    f"{name} has {size} {noun}, but its style {style.text!r} needs a multiple of {unit * parts} "
                    f"(head width {unit} times {parts} fused part{'s' * (parts > 1)}); set another head:WIDTH or "
                    f"fused:PARTS in the style of {name} in parallel.tensor_plan."
                )
            noun = f"heads of width {unit}" if unit > 1 else noun
            shared = kind == "column" and bool(self.heads[name])
            yield Divisibility(name, noun, size // unit // parts, "share" if shared else "divide")
        for attribute in style.divided:
            yield Divisibility(name, attribute, _number(name, self.modules[name], attribute), "share")

    def _check_rows(self, name: str) -> None:
        style, target = self.styles[name], next(self._targets(name), None)
        size = self._whole(target).shape[target.dim] if target else 0
        assert style.rows is not None
        if len(style.rows) != self.tp:
            raise PlanError(
                f"the style {style.text!r} of {name} lists rows for {len(style.rows)} tensor ranks, but "
                f"parallel.tensor is {self.tp}; list the rows for {self.tp} ranks, or set parallel.tensor_plan to "
                '"auto".'
            )
        listed, rows = {row for runs in style.rows for run in runs for row in range(*run)}, set(range(size))
        if listed != rows:
            fault = f"leaves out row {min(rows - listed)}" if rows - listed else f"lists row {min(listed - rows)}"
            raise PlanError(
                f"the style {style.text!r} of {name} {fault}, but must list each of the rows 0 to {size - 1} for at "
                "least one tensor rank, and no other row; correct the style in parallel.tensor_plan."
            )

    def _size(self, name: str) -> int:
        weight = self.modules[name].weight
        assert isinstance(weight, Tensor)
        return weight.shape[self._dim(name)]

    def _dim(self, name: str) -> int:
        by_outputs = self.kinds[name] != "row"
        return 0 if by_outputs != is_conv1d(self.modules[name]) else 1

    # parameters

    def _targets(self, name: str) -> Iterator[_Target]:
        """Yields the parameters that the style of a module or parameter shards, the weight first."""
        style, kind = self.styles[name], self.kinds.get(name)
        if style.kind == "cut":
            owner, local = (name, "weight") if name in self.modules else _split(name)
            yield _Target(owner, local, style.dim or 0, name)
        elif kind is not None and kind != "experts":
            yield _Target(name, "weight", self._dim(name), name)
            if getattr(self.modules[name], "bias", None) is not None and kind != "row" and kind != "embedding":
                yield _Target(name, "bias", 0, name)

    def _whole(self, target: _Target) -> Tensor:
        tensor = getattr(self.modules[target.owner], target.local, None)
        if not isinstance(tensor, nn.Parameter) or target.dim >= tensor.dim():
            raise PlanError(
                f"{target.named} must be sharded along dim {target.dim}, but has no parameter with that dim; correct "
                f"its style {self.styles[target.named].text!r}."
            )
        return tensor

    def _parameters(self) -> tuple[dict[str, ParameterCut], frozenset[str]]:
        cuts: dict[str, ParameterCut] = {}
        owners: dict[str, str] = {}
        shown = set()
        for name in self.styles:
            for target in self._targets(name):
                first, *_ = self.names[id(self._whole(target))]
                owners.setdefault(first, name)
                cut = self._cut(name, target)
                if cuts.setdefault(first, cut) != cut:
                    raise PlanError(
                        f"{first} is shared by {owners[first]} and {name}, but their styles shard it differently; give "
                        'both the same sharding, or give both the style "replicate".'
                    )
                if self.styles[name].view:
                    shown.add(first)
        self._check_ties(cuts)
        return cuts, frozenset(shown)

    def _cut(self, name: str, target: _Target) -> ParameterCut:
        style, size = self.styles[name], self._whole(target).shape[target.dim]
        if self.kinds.get(name) in ("embedding", "head"):
            return ParameterCut(target.dim, cut_unevenly(size, self.tp))
        if style.rows is not None:
            return ParameterCut(target.dim, ranges_of_runs(style.rows))
        return ParameterCut(target.dim, cut_parts(size, self.tp, style.parts, self._unit(name)))

    def _check_ties(self, cuts: Mapping[str, ParameterCut]) -> None:
        targets = [target for name in self.styles for target in self._targets(name)]
        cutting = {(id(self.modules[target.owner]), target.local) for target in targets}
        for first, *others in self.names.values():
            for alias in (first, *others) if first in cuts else ():
                owner, local = _split(alias)
                if owner not in self.modules or (id(self.modules[owner]), local) in cutting:
                    continue  # the owner is another name of a shared module, or the same module is sharded
                if _passes_on(owner, [target.owner for target in targets if first in self._names_of(target)]):
                    continue  # an alias of a parameter of a layer inside (BERT's head); OutsideReads finds other reads
                raise PlanError(
                    f"{first} is sharded, but {owner or 'the model itself'} uses the same parameter unsharded; give "
                    f'{owner or "it"} the same style, or give both the style "replicate".'
                )

    def _names_of(self, target: _Target) -> list[str]:
        return self.names[id(self._whole(target))]

    def _partial(self) -> frozenset[str]:
        found = set()
        for name, style in self.styles.items():
            if style.kind != "partial":
                continue
            if name in self.parameters:
                found.add(self.names[id(self.parameters[name])][0])
                continue
            for local, parameter in self.modules[name].named_parameters(recurse=False):
                width = self.heads[name]
                if width is not None and tuple(parameter.shape) != (width,):
                    raise PlanError(
                        f'{name}.{local} has the shape {tuple(parameter.shape)}, but the style "partial" is for norms '
                        f"over one head of width {width}; set parallel.tensor to 1, or give {_split(name)[0]} and its "
                        'layers the style "replicate" in parallel.tensor_plan.'
                    )
                found.add(self.names[id(parameter)][0])
        return frozenset(found)

    # attributes

    def _changes(self, name: str, style: Style) -> Iterable[AttributeChange]:
        for attribute in style.divided:
            share = max(1, _number(name, self.modules[name], attribute) // self.tp)
            yield AttributeChange(name, attribute, share)
        for attribute, value in style.values:
            _number(name, self.modules[name], attribute)
            yield AttributeChange(name, attribute, value)
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
            raise PlanError(
                f"the style {self.styles[owner].text!r} of {owner} needs the number of outputs of {child} on each "
                f'tensor rank, but {child} does not have the style "column"; in parallel.tensor_plan, give {child} '
                f'this style, or name a layer with the style "column" in the style of {owner}.'
            )
        return held(self._cut(child, next(self._targets(child))).ranges, 0)

    # modules

    def _check_module(self, name: str) -> None:
        module, view = self.modules[name], self.styles[name].view
        if self.kinds[name] in (None, "experts") or self.styles[name].kind == "cut":
            return
        more = [local for local, _ in module.named_parameters() if local not in ("weight", "bias")]
        if more:
            raise PlanError(
                f"{name} has the parameter {more[0]}, but this style shards only weight and bias; give {name} the "
                'style "replicate".'
            )
        if not goes_through_class(module):
            raise PlanError(
                f"{name} has a forward assigned to the module object, which would bypass the sharded layer; restore "
                "the forward of its class."
            )
        if isinstance(self.modules[name.rpartition(".")[0]], nn.MultiheadAttention) and not view:
            raise PlanError(
                f"{name} is inside an nn.MultiheadAttention, which reads its weight without calling the layer; "
                'add "view" to its style, or give it the style "replicate".'
            )
        if isinstance(module, nn.Embedding):
            check_embedding(module, name)


def _passes_on(owner: str, layers: Iterable[str]) -> bool:
    """Returns True if one of the layers is inside ``owner``."""
    return bool(owner) and any(layer != owner and is_inside(layer, owner) for layer in layers)


def head_width(module: nn.Module | None) -> int | None:
    """Returns the width of one attention head of ``module``, from its attribute ``head_dim`` or ``head_width``, or
    None.
    """
    widths = (getattr(module, attribute, None) for attribute in ("head_dim", "head_width"))
    return next((width for width in widths if isinstance(width, int) and width > 0), None)


def _kind(name: str, module: nn.Module, style: Style) -> LayerKind | None:
    """Returns the kind of sharded layer that a style makes of a module; None if the module is not wrapped."""
    wanted = style.kind
    if wanted == "experts":
        return "experts"
    if wanted == "vocabulary" and isinstance(module, nn.Embedding):
        return "embedding"
    if wanted in ("vocabulary", "column", "column+gather", "row"):
        if not is_linear(module):
            cut = "nn.Linear, Conv1D and nn.Embedding" if wanted == "vocabulary" else "nn.Linear and Conv1D"
            raise PlanError(
                f"{name} is a {type(module).__name__}, but the style {style.text!r} is for {cut}; "
                'narrow its pattern or give it the style "replicate".'
            )
        kinds: dict[str, LayerKind] = {"vocabulary": "head", "column": "column", "column+gather": "column+gather"}
        return kinds.get(wanted, "row")
    return None


def _split(name: str) -> tuple[str, str]:
    owner, _, local = name.rpartition(".")
    return owner, local


def _number(name: str, module: nn.Module, attribute: str) -> int:
    value: object = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if type(value) is not int:
        raise PlanError(
            f'{name}.{attribute} is {value!r}, but the words "divide", "set", "ratio" and "heads" of a style change '
            f"attributes of type int only; correct the attribute in the style of {name} in parallel.tensor_plan."
        )
    return value


def find_regions(kinds: Mapping[str, str | None]) -> dict[str, str]:
    """Returns layer name -> name of its parallel region: the innermost module around the layer that contains both
    column and row layers.

    ``kinds``: kind of each sharded layer by name. Layers of other kinds have no region.

    Raises:
        PlanError: a column or row layer has no region, or a region lacks column layers or a row layer.
    """
    around: dict[str, set[str]] = {"column": set(), "row": set()}
    for name, kind in kinds.items():
        if kind in around:
            around[kind].update(_ancestors(name))
    regions: dict[str, str] = {}
    for name, kind in kinds.items():
        if kind in around:
            other = around["row" if kind == "column" else "column"]
            place = next((module for module in _ancestors(name) if module in other), None)
            if place is None:
                raise _alone(name, kind)
            regions[name] = place
    for name, place in regions.items():
        if not any(regions[other] == place and kinds[other] != kinds[name] for other in regions):
            raise _alone(name, str(kinds[name]))
    return regions


def _ancestors(name: str) -> Iterator[str]:
    while name:
        name = name.rpartition(".")[0]
        yield name


def _alone(name: str, kind: str) -> PlanError:
    partner = '"row", which sums its outputs' if kind == "column" else '"column", which shards its inputs'
    return PlanError(
        f'{name} has the style "{kind}" and needs a layer with the style {partner}, but no module around {name} has a '
        f'free one; give this style to a layer, or give {name} the style "replicate" in parallel.tensor_plan.'
    )


def check_embedding(module: nn.Embedding, name: str) -> None:
    """Checks that the embedding ``module`` has no option that needs all rows on one rank, such as ``max_norm``.
    ``name``: its name for the error text.

    Raises:
        PlanError: ``module`` has such an option.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise PlanError(
                f"{name} has {option} = {getattr(module, option)}, which needs all rows of the vocabulary on one rank; "
                f'build it without {option}, or give it the style "replicate" in parallel.tensor_plan.'
            )


def find_tensor_plan(model: nn.Module, setting: str | Mapping[str, str], tp: int, sequence: bool = False) -> TensorPlan:
    """Returns the plan that shards ``model`` over ``tp`` tensor ranks by the configured styles. Communicates nothing.

    ``setting``: ``parallel.tensor_plan``, a mapping {name pattern: style} or the path of its JSON file. ``sequence``:
    True for sequence parallelism.

    Raises:
        ConfigError: the file contains no mapping of name patterns to styles.
        PlanError: the plan does not fit the model, or the model does not fit ``tp``; the message lists the values of
            ``tp`` that fit.
    """
    source, patterns = read_setting(setting)
    plan = cut_model(model, match_styles(model, patterns), tp, source, sequence)
    return replace(plan, patterns=patterns)


def match_styles(model: nn.Module, patterns: Patterns) -> dict[str, Style]:
    """Returns name -> style of each matched module or parameter of ``model``. If it has several names, the first is the
    key.

    ``patterns``: name pattern -> style. Only a pattern that matches no module is matched against parameters.

    Raises:
        PlanError: a pattern matches nothing, a module gets two styles, or a style is invalid.
    """
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(module), name) for name, module in model.named_modules(remove_duplicate=False) if name
    }
    owned: dict[int, str] = {}
    parameters = {
        name: owned.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    given = [("parallel.tensor_plan", pattern) for pattern in patterns]
    refuse_unmatched(given, [*names, *parameters], "module and no parameter", PlanError)
    chosen: dict[str, tuple[str, Style]] = {}
    for pattern, text in patterns.items():
        style = parse_style(text)
        hits = [name for name in names if fnmatchcase(name, pattern)]
        hits = hits or [name for name in parameters if fnmatchcase(name, pattern)]
        for name in hits:
            first_name = names.get(name) or parameters[name]
            other, before = chosen.setdefault(first_name, (pattern, style))
            if before != style:
                raise PlanError(
                    f"{first_name} gets two styles, {before.text!r} from {other!r} and {text!r} from {pattern!r}, but "
                    "takes only one; narrow one of the patterns."
                )
    return {name: style for name, (_, style) in chosen.items()}
