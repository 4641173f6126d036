"""Proof of a configured tensor plan: each kind of block, sharded, is compared with the full block.

    find     distinct blocks of the model, by their class, sizes and arguments
    prove    a float64 copy of each with random weights, for each set of styles in the plan
    note     each part that could not be proven; the run uses it unchanged

Nothing is communicated; the result is equal on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from engine.errors import PlanError, first_line
from engine.parallel.model.blocks import find_units
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.tensor.auto.equivalence import BlockReference, exactly
from engine.parallel.tensor.plan.sharding_rules import cut_model, match_styles
from engine.parallel.tensor.plan.styles import Style
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.planning.materialized_block import IsolatedRunError, MaterializedBlock, MaterializedUnit, alone
from engine.planning.tensor_plan_search import (
    DistinctUnits,
    SearchedProgram,
    Unit,
    distinct_units,
    local_name,
    search_conditions,
)
from engine.program.batch import Batch
from engine.program.program import Program

_SETTING = "parallel.tensor_plan"
_Styles = Mapping[str, Style]


def check_plan(program: Program, example: Batch, plan: TensorPlan, tp: int, low_rank: bool = True) -> tuple[str, ...]:
    """Proves a configured tensor-parallel plan for ``tp`` ranks by comparing the results of sharded and unsharded
    blocks.

    ``low_rank``: True to draw large random weights as products of two thin matrices.

    Returns:
        One sentence for each part of the plan that cannot be proven.

    Raises:
        PlanError: a sharded block has other results than the unsharded one.
    """
    with search_conditions(program.model):  # the simulated ranks draw random numbers too, which are the user's
        try:
            found = distinct_units(SearchedProgram(program, example), tp)
        except PlanError as error:
            return (f"{_SETTING} is not proven, because the model cannot be followed: {first_line(error)}",)
        if found.choice:
            return (f"{_SETTING} is not proven, because the model cannot be followed: {found.choice}",)
        styles = match_styles(program.model, plan.patterns)
        proofs = [note for unit in found.units for note in _prove_unit(program, unit, styles, plan, tp, low_rank)]
    return (*found.notes, *proofs, *_left_out(found, styles))


def _prove_unit(
    program: Program, unit: Unit, styles: _Styles, plan: TensorPlan, tp: int, low_rank: bool
) -> Iterator[str]:
    """Proves the styles of all blocks of one kind; yields a note if a block of this kind cannot be proven."""
    wanted = _sets_of_styles(unit, styles)
    if not wanted:
        return
    drawn = MaterializedUnit(
        model=program.model,
        name=unit.name,
        precision=program.precision,
        calls=unit.arguments,
        low_rank=low_rank,
        other_values=unit.other_values,
    )
    try:
        drawn.run(lambda copied: _prove_styles(copied, unit, wanted, plan, tp))
    except IsolatedRunError as error:
        first, *others = (name for _, names in wanted for name in names)
        alike = f" (and {len(others)} like it)" if others else ""
        yield f"block {first}{alike}: its plan is not proven, because a copy of it does not run alone: {error}"


def _prove_styles(
    drawn: MaterializedBlock, unit: Unit, wanted: Sequence[tuple[_Styles, list[str]]], plan: TensorPlan, tp: int
) -> None:
    block = drawn.block
    with exactly(), alone():
        truth = BlockReference(block.train(), drawn.givens, unit.used)
    for inner, names in wanted:
        verdict = truth.prove(cut_model(block, inner, tp, plan.source, plan.sequence), tp)
        if not verdict.holds:
            listed = ", ".join(f"{name or names[0]} {style.text!r}" for name, style in inner.items())
            raise PlanError(
                f"{_SETTING} is wrong in {names[0]}: {verdict.problem}; correct its styles ({listed}), or set "
                'parallel.tensor_plan to "auto".'
            )


def _sets_of_styles(unit: Unit, styles: _Styles) -> list[tuple[_Styles, list[str]]]:
    """Sets of styles of one kind of block: (style by name in the block, blocks with this set). Empty sets are left out.

    Vocabularies are left out too: sharded logits are not an output that a block without its loss can be compared by.
    """
    found: list[tuple[_Styles, list[str]]] = []
    for block in unit.alike:
        inner = {
            local_name(block, name): style
            for name, style in styles.items()
            if is_inside(name, block) and style.kind != "vocabulary"
        }
        same = next((names for other, names in found if other == inner), None)
        if same is not None:
            same.append(block)
        elif inner:
            found.append((inner, [block]))
    return found


def _left_out(found: DistinctUnits, styles: _Styles) -> Iterator[str]:
    """Notes on the styles that no proof of a block covers."""
    blocks = [name for unit in found.units for name in unit.alike]
    cut = {name: style for name, style in styles.items() if style.kind != "replicate"}
    outside = [name for name in cut if not any(is_inside(name, block) for block in blocks)]
    if outside:
        yield f"{_SETTING} is not proven for what lies outside blocks: {_listed(outside)}"
    tables = [name for name, style in cut.items() if style.kind == "vocabulary" and name not in outside]
    if tables:
        yield f"{_SETTING} is not proven for vocabularies in blocks: {_listed(tables)}"


def wrong_outside_blocks(
    plan: TensorPlan, model: nn.Module, failure: Callable[[TensorPlan], Exception | None], tp: int
) -> tuple[str, ...]:
    """Returns the names of sharded layers outside the model's blocks that make the forward of ``plan`` fail.

    The forward succeeds if only these layers stay unsharded. If no such layers are found, returns all sharded layers
    outside blocks. ``failure``: function that runs a plan's forward and returns its error, or None.
    """
    styles, blocks = match_styles(model, plan.patterns), find_units(model).blocks
    outside = [name for name in styles if not any(is_inside(name, block) for block in blocks)]
    layers = {name: plan.layers[name] for name in outside if name in plan.layers}
    region = {name: cut.region for name, cut in layers.items() if cut.kind in ("column", "row")}
    for name in outside:
        together = [other for other in region if name in region and region[other] == region[name]]
        group = tuple(other for other in outside if other == name or other in together)
        left = {other: style for other, style in styles.items() if other not in group}
        try:
            if failure(cut_model(model, left, tp, plan.source, plan.sequence)) is None:
                return group
        except PlanError:  # what is left is no plan
            continue
    return tuple(outside)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
