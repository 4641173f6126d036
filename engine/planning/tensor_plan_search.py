"""Search of a tensor plan: each distinct block is isolated, sharded and proven with random weights.

    trace      record the arguments of each call of a unit, for a short example and for a shorter one
    group      calls of equal units with equal argument shapes need one search
    search     run ``engine.parallel.tensor.auto`` on a float64 copy of one unit
    spread     give the styles of that unit to all equal units, as patterns

Nothing is communicated during the search. Rank 0 searches, and broadcasts its result.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from engine.errors import PlanError, first_line
from engine.parallel.model.name_patterns import is_inside, starred
from engine.parallel.model.side_effects import restoring_state
from engine.parallel.model.torch_checkpoint import CheckpointedRegion, open_checkpoints, spread_checkpoints
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters, GradientSparsity
from engine.parallel.tensor.auto.equivalence import BlockReference, exactly
from engine.parallel.tensor.auto.search import Decided, Search
from engine.parallel.tensor.auto.strategies import vocabulary_styles
from engine.parallel.tensor.deferred_linear import is_linear
from engine.parallel.tensor.global_tensor.redistribute import SequenceError
from engine.parallel.tensor.plan.tensor_plan import Reason
from engine.parallel.trace.model_trace import Arguments, FromValue, Material, ModelTrace
from engine.parallel.trace.provenance import UncutPathError
from engine.planning.example_trace import trace_example
from engine.planning.found_styles import FoundStyles, ProgramDigest, as_patterns
from engine.planning.isolated_block import holds_objects, reads_other_values, signatures
from engine.planning.materialized_block import IsolatedRunError, MaterializedBlock, MaterializedUnit, alone, in_float64
from engine.program.batch import Batch, map_tensors, named_tensors
from engine.program.program import Program

ROWS = 2
LENGTH = 16
"""Most tokens per row of the traced example; results do not depend on size."""
_Names = tuple[str, ...]
_SIZES = (2, 3, 4, 5, 6, 7, 8, 12, 16)
"""Sizes of the tensor axis that an error may propose."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Representative of modules with equal code and shapes, for the search or proof of a tensor-parallel plan."""

    name: str
    arguments: tuple[Arguments, ...]
    """Call arguments for the example, and for a shorter one if the model accepts it."""
    alike: tuple[str, ...]
    used: frozenset[int]
    """Indices of output leaves that other code reads, in any call of the group."""
    other_values: bool = False
    """True if some call of the group reads values that are not among its arguments."""


@dataclass(frozen=True, slots=True)
class CalledModules:
    """Record of all modules that a forward has called, as ``id(module)``."""

    all: set[int] = field(default_factory=set)
    counting: set[int] = field(default_factory=set)
    """Ids of embeddings whose input is consecutive positions."""

    def note(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Records a call of ``module`` with positional arguments ``args``; used as a forward pre-hook."""
        self.all.add(id(module))
        if isinstance(module, nn.Embedding) and args and _counts(args[0]):
            self.counting.add(id(module))


class SearchedProgram:
    """Program and example batch, shared by several searches for tensor-parallel plans."""

    def __init__(self, program: Program, example: Batch) -> None:
        self.program, self.example = program, example
        self.called = CalledModules()
        self._traced: dict[tuple[int | None, ...], tuple[_Followed | None, str]] = {}

    @cached_property
    def digest(self) -> ProgramDigest:
        """Digest of model, code and example batch; a search depends only on these and on its settings."""
        return ProgramDigest(self.program, self.example)

    def find_styles(self, tp: int, sequence: bool = False, low_rank: bool = True, whole: _Names = ()) -> FoundStyles:
        """Finds tensor-parallel styles (column, row etc.) of the model's layers for ``tp`` ranks; returns the styles.

        ``low_rank``: draw large weights as products of two thin matrices. ``whole``: modules that may stay unsharded.

        Raises:
            PlanError: the model cannot be traced, or ``tp`` does not divide its widths.
        """
        model = self.program.model
        with search_conditions(model):
            found = distinct_units(self, tp)
            words = {} if found.choice else _vocabularies(model, found.trace, self.called, tp)
            shared = blocks_with_shared_layers(model, [name for unit in found.units for name in unit.alike])
            search = _Search(self.program, tp, sequence, low_rank, shared, whole, dict(words))
            for unit in found.units:
                search.take(unit)
        patterns = as_patterns(model, search.styles)
        notes = [f"tensor ranks shard blocks alone, as one path of the forward calls them: {found.choice}"]
        notes = [*found.notes, *(notes if found.choice else ())]
        return FoundStyles(patterns=patterns, reasons=tuple(search.reasons), notes=tuple(notes))

    def trace(self, length: int) -> "tuple[_Followed, str]":
        """Returns (trace of the example cut to ``length`` tokens, "").

        If that is not possible, returns (trace of the full example, the reason), or "" if nothing can be cut.
        """
        few = self.program.rows.take_rows(self.example, 0, ROWS)
        found, refused = self._tried(few, length)
        if found is not None:
            return found, ""
        note = (
            f"the tensor plan is searched with the full length of the example, because {length} tokens raise: {refused}"
        )
        whole, _ = self._tried(few, None)
        assert whole is not None
        return whole, note if refused else ""

    def material_of_shorter(self, followed: "_Followed", tp: int) -> tuple[Material | None, str]:
        """Traces the model again, on half the tokens of the example in ``followed``, a multiple of ``tp`` tokens.

        Returns (arguments of all module calls, ""), or (None, reason); the reason is "" if there are no tokens.
        """
        lengths = [t.shape[1] for _, t in named_tensors(followed.example) if t.ndim >= 2 and not t.is_floating_point()]
        if not lengths:
            return None, ""
        length = max(min(lengths) // 2 // tp * tp, tp)
        if length >= max(lengths):
            return None, f"an example of {max(lengths)} tokens cannot be shortened for {tp} tensor ranks"
        found, refused = self._tried(followed.example, length)
        if found is None:
            return None, f"the model does not run with {length} tokens: {refused}"
        if [call.unit for call in found.trace.calls] != [call.unit for call in followed.trace.calls]:
            return None, f"the model calls other modules with {length} tokens"
        return found.material, ""

    def _tried(self, example: Batch, length: int | None) -> "tuple[_Followed | None, str]":
        """Returns the trace of ``length`` tokens, or the reason why there is none, and of the unchanged example; each
        is traced once."""
        asked = (length, *(size for _, tensor in named_tensors(example) for size in tensor.shape))
        if asked not in self._traced:
            with calls_of_modules(self.called):
                self._traced[asked] = (
                    (_follow(self.program, example), "")
                    if length is None
                    else _try_length(self.program, example, length)
                )
        return self._traced[asked]


def blocks_with_shared_layers(model: nn.Module, blocks: Sequence[str]) -> frozenset[str]:
    """Returns the names of blocks that share a layer with another block, or a parameter with such a block."""
    modules = {name: model.get_submodule(name) for name in blocks}
    holders: dict[int, set[int]] = {}
    for block in modules.values():
        for layer in block.modules():
            if any(parameter.ndim > 1 for parameter in layer.parameters(recurse=False)):
                holders.setdefault(id(layer), set()).add(id(block))
    found = {block for together in holders.values() if len(together) > 1 for block in together}
    while found:
        tied = {id(p) for block in modules.values() if id(block) in found for p in block.parameters()}
        more = {id(b) for b in modules.values() if not tied.isdisjoint(map(id, b.parameters()))}
        if more <= found:
            break
        found |= more
    return frozenset(name for name, block in modules.items() if id(block) in found)


@dataclass
class _InTheOpen:
    """Checkpoint handler that runs every region without recomputation."""

    inside: bool = False
    regions: list[CheckpointedRegion] = field(default_factory=list)


@contextmanager
def search_conditions(model: nn.Module) -> Iterator[None]:
    """Opens a context with a fixed random seed; its end restores random states, buffers and module attributes."""
    # a backward runs what it recomputes outside the arithmetic of a proof
    with (
        restoring_state(model, torch.device("cpu")),
        open_checkpoints(recompute=False),
        spread_checkpoints(_InTheOpen()),
    ):
        torch.manual_seed(0)
        yield


def local_name(unit: str, name: str) -> str:
    """Returns the module name ``name`` relative to the enclosing module ``unit``; "" for ``unit`` itself."""
    return name[len(unit) + 1 :]


@dataclass(frozen=True, slots=True)
class DistinctUnits:
    """Modules for the search or proof of a tensor-parallel plan, one for each group with equal code and shapes."""

    units: tuple[Unit, ...]
    trace: ModelTrace
    """Trace of the example batch."""
    notes: tuple[str, ...]
    """One sentence if the modules are known for one text length only."""
    choice: str = ""
    """Part of a sentence about untraced paths of the forward; "" if there are none."""


def distinct_units(searched: SearchedProgram, tp: int) -> DistinctUnits:
    """Returns one module for each group of modules with equal code and shapes in the example's forward.

    Leaves out modules without submodules.

    Raises:
        PlanError: the model cannot be traced.
    """
    program = searched.program
    followed, full_length = searched.trace(LENGTH - LENGTH % tp)
    _, trace, material, choice = followed
    shorter, why = searched.material_of_shorter(followed, tp)
    names = [call.unit for call in trace.calls]
    kinds: dict[object, list[int]] = {}
    given = [in_float64(arguments) for arguments in material.arguments]
    for index, signature in enumerate(signatures(program.model, names, given)):
        kinds.setdefault(signature, []).append(index)
    others = {
        call.unit
        for call, arguments in zip(trace.calls, material.arguments, strict=True)
        if reads_other_values(call, arguments) and not holds_objects(arguments)
    }
    units, seen = [], set[str]()
    for indices in kinds.values():
        index = indices[0]
        alike = tuple(dict.fromkeys(names[i] for i in indices if names[i] not in seen))
        module = program.model.get_submodule(names[index])
        seen.update(alike)
        if alike and next(module.children(), None) is not None:
            arguments = (material.arguments[index], *(shorter.arguments[index : index + 1] if shorter else ()))
            used = _used(trace, indices, everything=bool(choice))
            units.append(Unit(names[index], arguments, alike, used, not others.isdisjoint(alike)))
    one_length = f"the tensor plan is proven for one length of text only, because {why}" if why else ""
    notes = tuple(note for note in (full_length, one_length) if note)
    return DistinctUnits(tuple(units), trace, notes, choice)


class _Followed(NamedTuple):
    """Example, its trace, and the reason for other paths of the forward; empty if there are none."""

    example: Batch
    trace: ModelTrace
    material: Material
    choice: str


def _follow(program: Program, example: Batch) -> _Followed:
    """Traces an example on one path, even if code between units chooses between several, because tensor ranks do not
    need the others."""
    material = Material()
    try:
        return _Followed(example, trace_example(program, example, 1, material=material), material, "")
    except UncutPathError as error:
        if error.trace is None:
            raise
        return _Followed(example, error.trace, material, error.what)


def _try_length(program: Program, example: Batch, length: int) -> tuple[_Followed | None, str]:
    """Traces the example with ``length`` tokens, with unchanged floats and then with shortened ones; returns (None, the
    first error) if both fail, with an empty error if nothing can be shortened."""
    refused, seen = "", [_shapes(example)]
    for floats in (False, True):
        tried = _short(example, length, floats)
        if _shapes(tried) in seen:
            continue
        seen.append(_shapes(tried))
        try:
            return _follow(program, tried), ""
        except Exception as error:  # not every model takes every length
            if is_own_mistake(error):
                raise
            refused = refused or first_line(error)
    return None, refused


def _shapes(example: Batch) -> list[torch.Size]:
    return [tensor.shape for _, tensor in named_tensors(example)]


def _used(trace: ModelTrace, calls: Sequence[int], everything: bool) -> frozenset[int]:
    """Returns the outputs of these calls that are read, or ``everything``, because other paths may read others."""
    read = {number for value in trace.values for number in value.inputs} | set(trace.result.values())
    read |= {number for call in trace.calls for number in call.inputs}
    outputs = [leaf for index in calls for leaf in enumerate(trace.calls[index].output.leaves)]
    values = [(place, leaf.value) for place, leaf in outputs if isinstance(leaf, FromValue)]
    return frozenset(place for place, value in values if everything or value in read)


def _vocabularies(model: nn.Module, trace: ModelTrace, called: CalledModules, tp: int) -> dict[str, str]:
    """Returns vocabulary styles by name, except for layers with a weight that other code reads (uncalled layers, glue
    products)."""
    units = {call.unit: model.get_submodule(call.unit) for call in trace.calls}
    inside = {f"{u}.{n}".rstrip("."): m for u, unit in units.items() for n, m in unit.named_modules()}
    inside = {name: module for name, module in inside.items() if id(module) not in called.counting}
    styles = vocabulary_styles(model, inside, tp)
    layers = {name: model.get_submodule(name) for name in styles}
    passed_by = {id(model.get_parameter(name)) for name in trace.read_by_glue}
    passed_by |= {id(m.weight) for m in layers.values() if is_linear(m) and id(m) not in called.all}
    # of embeddings that share a weight, one call is enough
    used = {id(m.weight) for m in layers.values() if id(m) in called.all}
    passed_by |= {id(m.weight) for m in layers.values() if id(m.weight) not in used}
    return {name: style for name, style in styles.items() if id(layers[name].weight) not in passed_by}


@contextmanager
def calls_of_modules(called: CalledModules) -> Iterator[None]:
    """Opens a context that records in ``called`` every module that is called inside."""
    hook = register_module_forward_pre_hook(called.note)
    try:
        yield
    finally:
        hook.remove()


def _counts(ids: Any) -> bool:
    if not isinstance(ids, Tensor) or ids.is_meta or not ids.ndim or ids.shape[-1] < 2:
        return False
    with torch._C.DisableTorchFunction():  # hidden from a tracer of the forward
        return torch.equal(ids, ids[..., :1] + torch.arange(ids.shape[-1], device=ids.device))


def _short(example: Batch, length: int, floats: bool = False) -> Batch:
    """Returns an example with fewer tokens of text; ``floats``: tensors of floats, such as masks, are shortened like
    text.

    The copies are contiguous, as the tensors of a data loader are: code may call ``view`` on them.
    """
    text = {t.shape[1] for _, t in named_tensors(example) if t.ndim >= 2 and not t.is_floating_point()}

    def cut(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not floats:
            return tensor
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] in text and tensor.shape[dim] > length:
                tensor = tensor.narrow(dim, 0, length)
        return tensor.contiguous()

    return map_tensors(example, cut)


@dataclass
class _Search:
    """Styles found so far, by name in the model."""

    program: Program
    tp: int
    sequence: bool
    low_rank: bool
    shared: frozenset[str]
    """Blocks that hold a layer of another block too, which stay whole."""
    whole: _Names
    styles: dict[str, str] = field(default_factory=dict)
    reasons: list[Reason] = field(default_factory=list)
    known: list[Decided] = field(default_factory=list)
    """Decisions about the groups of other units."""

    def take(self, unit: Unit) -> None:
        """Finds the styles of a group of equal units."""
        if not self.shared.isdisjoint(unit.alike):
            self._leave([name for name in unit.alike if name in self.shared], "holds a layer of another block too")
            unit = replace(unit, alike=tuple(name for name in unit.alike if name not in self.shared))
            if not unit.alike:
                return
        try:
            found = self._drawn(unit).run(lambda drawn: self._decide(unit, drawn))
        except IsolatedRunError as error:
            self._leave(unit.alike, f"does not run alone: {error}")
            return
        self.known += found
        for one in found:
            for name in unit.alike:
                self.styles |= {f"{name}.{local}".strip("."): s for local, s in one.way.styles.items()}
            self.reasons.append(self._reason(unit, one))

    def _leave(self, names: Sequence[str], why: str) -> None:
        """Leaves these units unsharded."""
        modules = [self.program.model.get_submodule(name) for name in names]
        size = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
        self.reasons.append(Reason(_pattern_of(names), "", "replicate", why, size))

    def _drawn(self, unit: Unit) -> MaterializedUnit:
        return MaterializedUnit(
            model=self.program.model,
            name=unit.name,
            precision=self.program.precision,
            calls=unit.arguments,
            low_rank=self.low_rank,
            other_values=unit.other_values,
        )

    def _decide(self, unit: Unit, drawn: MaterializedBlock) -> list[Decided]:
        """Returns a strategy for each group of a unit.

        Raises:
            PlanError: another size of the tensor axis could shard a group that this one cannot.
        """
        block = drawn.block
        with exactly(), alone():
            patterns = GradientSparsity(block.eval(), drawn.givens[0], self._whole(unit), unit.used)
            truth = BlockReference(block.train(), drawn.givens, unit.used)
        with exactly():
            block.eval()
            groups = self._groups(unit, patterns)
            patterns.forget()
            block.train()
        search = Search(block, truth, self.sequence, tuple(self.known))
        found = search.decide(groups, self.tp)
        for one in found:
            if one.way.how == "replicate" and not self._may_stay_whole(unit, one.group.row):
                self._refuse_if_others_fit(unit, patterns, one.group, search)
        return found

    def _reason(self, unit: Unit, found: Decided) -> Reason:
        columns = ", ".join(_layer(name) for name in found.group.columns)
        size = 0
        if found.way.how == "replicate":
            wholes = [self.program.model.get_parameter(f"{u}.{name}") for u in unit.alike for name in found.group.cuts]
            size = sum(parameter.numel() * parameter.element_size() for parameter in wholes)
        style = f"{columns} -> {_layer(found.group.row)}"
        return Reason(_pattern_of(unit.alike), style, found.way.how, found.why, size)

    def _whole(self, unit: Unit) -> list[str]:
        """Returns parameters of the unit that the vocabulary shards, by name in it."""
        return [f"{local_name(unit.name, name)}.weight" for name in self.styles if is_inside(name, unit.name)]

    def _groups(self, unit: Unit, patterns: GradientSparsity) -> tuple[CoupledParameters, ...]:
        groups = patterns.groups(self.tp)
        taken = {name for group in groups for name in group.cuts}
        taken |= {one.weight for one in patterns.products if self._may_stay_whole(unit, one.weight)}
        loose = dict.fromkeys(product.weight for product in patterns.products if product.weight not in taken)
        rows = {group.row for group in groups}
        # the largest first, since sizes that divide it follow from what its ranks need
        others = [s for s in sorted(_SIZES, reverse=True) if len(loose) > 1 and patterns.may_shard(loose, s)]
        for size in reversed(others):
            missed = next((g for g in patterns.groups(size) if g.row not in taken), None)
            if missed is not None:
                fits = [s for s in _SIZES if rows | {missed.row} <= {g.row for g in patterns.groups(s)}]
                raise self._does_not_fit(unit, patterns, missed, fits)
        return groups

    def _may_stay_whole(self, unit: Unit, name: str) -> bool:
        return any(is_inside(f"{unit.name}.{name}".strip("."), module) for module in self.whole)

    def _refuse_if_others_fit(
        self, unit: Unit, patterns: GradientSparsity, group: CoupledParameters, search: Search
    ) -> None:
        """Refuses a replicated group that another size of the tensor axis could shard; keeps it if none could."""
        fits = []
        with exactly():
            search.block.eval()
            patterns.try_sizes(_SIZES)
            patterns.forget()
            search.block.train()
        for size in _SIZES:
            with exactly():
                same = [other for other in patterns.groups(size) if other.row == group.row and size != self.tp]
            try:
                if same and search.decide(same, size)[0].way.how != "replicate":
                    fits.append(size)
            except SequenceError:  # this size does not divide the sequence of the example, so it says nothing
                continue
        if fits:
            raise self._does_not_fit(unit, patterns, group, fits)

    def _does_not_fit(
        self, unit: Unit, patterns: GradientSparsity, group: CoupledParameters, fits: Sequence[int]
    ) -> PlanError:
        columns = ", ".join(map(_layer, group.columns))
        listed = ", ".join(map(str, fits)) or "1"
        return PlanError(
            f"tensor = {self.tp} does not divide the heads or the width between {columns} and {_layer(group.row)} in "
            f"{unit.name} ({patterns.width(group.row)} wide); choose a size that fits: {listed}, or give these layers "
            "styles in parallel.tensor_plan."
        )


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _pattern_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else starred(names[0])
