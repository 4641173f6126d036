"""Search for the styles of a block: for each group of parameters the cheapest strategy that passes the proof.

    at once      all groups with plain tensors
    by module    each group in its enclosing module, then the block with the strategies found
    one by one   each group in the block, together with the decided groups

The first of these that passes the proof of the whole block decides.

A trial also records the numbers of modules that the code of a block reads. A number that was not read can have any
value: its division changes nothing and is not tried.

The enclosing module of a group is the innermost module around it, a smaller block for the trials:

    block   norm ── self_attn ── + ── norm ── mlp ── +        proven once, after all groups are decided
                    q k v o                   gate up down
                    └ tried alone             └ tried alone

Such a module gets the arguments of a run of the whole block, and the proof compares the outputs that reach an output of
the block. A strategy that is correct in the module alone can be wrong in the block; the block's proof decides.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from engine.errors import PlanError, first_line
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.user_code import is_own_mistake
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters, Given, float_leaves
from engine.parallel.tensor.auto.equivalence import PROOF, BlockReference, Verdict, exactly
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight, WholeWeightError
from engine.parallel.tensor.auto.strategies import (
    Number,
    ShardingStrategy,
    divisible_attributes,
    local,
    view,
    with_numbers,
)
from engine.parallel.tensor.plan.sharding_rules import cut_model
from engine.parallel.tensor.plan.styles import parse_style

MOST = 3
"""Maximum number of attributes that one strategy divides."""
TRIES = 24
"""Maximum number of attribute sets tried for a group."""


@dataclass(frozen=True, slots=True)
class Decided:
    """Sharding strategy for one parameter group of a block, with the reason for the choice."""

    group: CoupledParameters
    way: ShardingStrategy
    """Strategy of the group; "replicate" has no styles."""
    note: str

    @property
    def why(self) -> str:
        """Reason for this group's strategy, and the integer module attributes that the strategy divides, as text."""
        return f"divided {', '.join(self.way.changes)}{self.note}" if self.way.changes else self.note


@dataclass(frozen=True, slots=True)
class Search:
    """Search for the cheapest correct sharding strategy of each parameter group of ``block``.

    Correct: the sharded block reproduces the outputs and gradients in ``truth``.
    """

    block: nn.Module
    truth: BlockReference
    sequence: bool = False
    """True if activations between regions are sharded along the sequence."""
    known: tuple[Decided, ...] = ()
    """Strategies found for other blocks, which equal parameter groups of this block try first."""

    def decide(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """Returns one strategy for each of ``groups``; together the strategies reproduce the unsharded results on
        ``tp`` ranks.

        A group without a correct strategy gets "replicate".
        """
        found = (self._at_once(groups, tp) or self._by_module(groups, tp)) if len(groups) > 1 else []
        return found or self._one_by_one(groups, tp)

    def _at_once(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """Returns known decisions for groups of other blocks and plain tensors for the rest; empty if the proof
        fails."""
        found = [one for group in groups if (one := self._likely(group, tp)) is not None]
        if len(found) < len(groups):
            return []
        verdict = self._try({}, _together(one.way for one in found), tp)
        return [replace(one, note=one.note or _note(one.way, "", verdict)) for one in found] if verdict.holds else []

    def _likely(self, group: CoupledParameters, tp: int) -> Decided | None:
        """Returns the known decision for an equal group, or else plain tensors if the group allows them."""
        before = (one for one in self.known if one.group == group and one.way.how != "replicate")
        way = local(self.block, group, tp)
        return next(before, None if way is None else Decided(group, way, ""))

    def _by_module(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """Returns the strategies that are correct in the enclosing modules; empty if the proof of the block fails."""
        paths = [enclosing_module(group) for group in groups]
        if "" in paths:
            return []
        decided: dict[str, Decided] = {}
        for path in dict.fromkeys(paths):
            truth = reference_inside(self.truth, path)
            if truth is None:
                return []
            mine = [group for group, other in zip(groups, paths, strict=True) if other == path]
            inner = Search(truth.block, truth, self.sequence)
            found = inner._one_by_one([group_inside(group, path) for group in mine], tp)
            for group, one in zip(mine, found, strict=True):
                decided[group.row] = Decided(group, strategy_outside(one.way, path), one.note)
        together = _together(one.way for one in decided.values())
        right = not together.styles or self._try({}, together, tp).holds
        return [decided[group.row] for group in groups] if right else []

    def _one_by_one(self, groups: Sequence[CoupledParameters], tp: int) -> list[Decided]:
        """Chooses a strategy for each group, proven together with the strategies chosen before it.

        Groups without a correct strategy are tried once more together with all others: code between groups may reject a
        sharded input together with a replicated one.
        """
        styles: dict[str, str] = {}
        decided: dict[str, Decided] = {}
        for again in (False, True):
            for group in groups:
                if not again or (decided[group.row].way.how == "replicate" and styles):
                    found = self._decide(group, styles, tp)
                    if not again or found.way.how != "replicate":
                        decided[group.row] = found
                    styles |= found.way.styles
        return list(decided.values())

    def _decide(self, group: CoupledParameters, before: Mapping[str, str], tp: int) -> Decided:
        first = ""
        if (plain := local(self.block, group, tp)) is not None:
            verdict = self._try(before, plain, tp)
            if verdict.holds:
                return Decided(group, plain, _note(plain, "", verdict))
            first = verdict.problem
            if (found := self._with_numbers(group, before, plain, first, tp)) is not None:
                return found
        for partial in (True, False) if group.partial else (True,):
            way = view(self.block, group, tp, partial)
            verdict = self._try(before, way, tp)
            if verdict.holds:
                return Decided(group, way, _note(way, first, verdict))
        return Decided(
            group, ShardingStrategy("replicate", {}), f"no strategy is right: {_problems(first, verdict.problem)}"
        )

    def _with_numbers(
        self, group: CoupledParameters, before: Mapping[str, str], plain: ShardingStrategy, problem: str, tp: int
    ) -> Decided | None:
        """Divides one number; if the division changes the problem, divides a second number as well, and so on."""
        all_numbers = divisible_attributes(self.block, group, tp)
        problems: dict[tuple[Number, ...], str] = {(): problem}
        reads: dict[tuple[Number, ...], set[Number]] = {(): self._watched(before, plain, all_numbers, tp)[1]}
        frontier: list[tuple[Number, ...]] = [()]
        while frontier:
            chosen = frontier.pop(0)
            for number in all_numbers:
                wider = tuple(sorted({*chosen, number}))
                if wider in problems or len(problems) > TRIES:
                    continue
                if number not in reads[chosen]:
                    problems[wider], reads[wider] = problems[chosen], reads[chosen]
                    continue
                way = with_numbers(plain, wider)
                verdict, reads[wider] = self._watched(before, way, all_numbers, tp)
                if verdict.holds and (verdict := self._try(before, way, tp)).holds:  # once more without the watch
                    return Decided(group, way, _note(way, "", verdict))
                problems[wider] = verdict.problem
                if verdict.problem != problems[chosen] and len(wider) < MOST:
                    frontier.append(wider)
        return None

    def _watched(
        self, before: Mapping[str, str], way: ShardingStrategy, numbers: Sequence[Number], tp: int
    ) -> tuple[Verdict, set[Number]]:
        """Returns the verdict on a strategy, and the ``numbers`` that the code has read."""
        reads = AttributeReads(numbers)
        return self._try(before, way, tp, reads.watch), reads.seen

    def _try(
        self,
        before: Mapping[str, str],
        way: ShardingStrategy,
        tp: int,
        watch: Callable[[nn.Module], None] | None = None,
    ) -> Verdict:
        try:
            read = {name: parse_style(text) for name, text in {**before, **way.styles}.items()}
            plan = cut_model(self.block, read, tp, "found", self.sequence)
        except PlanError as error:
            return Verdict(first_line(error))
        return self.truth.prove(plan, tp, watch)


def _problems(plain: str, views: str) -> str:
    return f"plain tensors: {plain}; global tensors: {views}" if plain else views


def _together(ways: Iterable[ShardingStrategy]) -> ShardingStrategy:
    return ShardingStrategy("", {name: style for way in ways for name, style in way.styles.items()})


def _note(way: ShardingStrategy, first: str, verdict: Verdict) -> str:
    """Returns the text of :attr:`Decided.why` after the divided numbers."""
    gathering = ", ".join(name for name in verdict.gathers if name != PROOF)
    gathers = f"; gathers for {gathering}" if gathering else ""
    if way.how == "local":
        return f"plain tensors{gathers}"
    if way.how == "local+":
        return gathers
    reason = (
        f"plain shards do not fit its code (a trial with them ended in {first})"
        if first
        else "the weight belongs to no linear layer"
    )
    return f"global tensors: {reason}{gathers}"


_CONFIG = "config."


class AttributeReads:
    """Recorder of reads of integer attributes by a block's code. ``numbers``: attributes to watch; ``seen``: attributes
    read.
    """

    def __init__(self, numbers: Collection[Number]) -> None:
        self._numbers = frozenset(numbers)
        self.seen: set[Number] = set(numbers)
        """The numbers that code has read; all numbers until a block is watched."""
        self._watching = False

    def watch(self, block: nn.Module) -> None:
        """Makes the modules of ``block``, a private copy, report reads of their watched integer attributes to this
        recorder.

        The classes of the modules change and are not restored.
        """
        if not self._watching:
            self._watching = True
            self.seen.clear()
        for path in sorted({number.module for number in self._numbers}):
            module = block.get_submodule(path)
            mine = {number.attribute for number in self._numbers if number.module == path}
            if any(name.startswith(_CONFIG) for name in mine):
                self._watch_config(module, path)
            module.__class__ = _asked(type(module), lambda name, path=path: self._note(path, name))  # type: ignore[misc]

    def _watch_config(self, module: nn.Module, path: str) -> None:
        config: Any = copy.copy(module.config)
        aliases: dict[str, str] = getattr(config, "attribute_map", None) or {}

        def note(name: str) -> None:
            same = {name, aliases.get(name, name), *(alias for alias, own in aliases.items() if own == name)}
            for known in same:
                self._note(path, f"{_CONFIG}{known}")

        try:
            config.__class__ = _asked(type(config), note)
        except TypeError:  # a class with slots cannot report reads: count all its numbers as read
            self.seen |= {n for n in self._numbers if n.module == path and n.attribute.startswith(_CONFIG)}
            return
        module.config = config

    def _note(self, path: str, name: str) -> None:
        if (number := Number(path, name)) in self._numbers:
            self.seen.add(number)


def _asked(own: type, note: Callable[[str], None]) -> type:
    def read(self: Any, name: str) -> Any:
        note(name)
        return own.__getattribute__(self, name)  # type: ignore[call-arg]

    return type(own.__name__, (own,), {"__getattribute__": read, "__module__": own.__module__})


def enclosing_module(group: CoupledParameters) -> str:
    """Returns the path of the innermost module around all sharded parameters of ``group``; "" for the block."""
    owners = {tuple(name.split(".")[:-1]) for name in group.cuts}
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*owners, strict=False))]
    return ".".join(shared[:-1] if owners == {tuple(shared)} else shared)


def group_inside(group: CoupledParameters, path: str) -> CoupledParameters:
    """Returns ``group`` with parameter names relative to the module at ``path``.

    Drops replicated parameters with partial gradients if they are outside the module.
    """

    def local(name: str) -> str:
        return name[len(path) + 1 :]

    return replace(
        group,
        row=local(group.row),
        columns=tuple(map(local, group.columns)),
        cuts={local(name): cut for name, cut in group.cuts.items()},
        partial=tuple(local(name) for name in group.partial if is_inside(name, path)),
        beside=tuple(map(local, group.beside)),
        factors=tuple(map(local, group.factors)),
    )


def strategy_outside(way: ShardingStrategy, path: str) -> ShardingStrategy:
    """Converts the names in ``way`` from names relative to the module at ``path`` to names relative to the block."""
    styles = {f"{path}.{name}".rstrip("."): style for name, style in way.styles.items()}
    return way._replace(styles=styles, changes=tuple(f"{path}.{change}" for change in way.changes))


def reference_inside(truth: BlockReference, path: str) -> BlockReference | None:
    """Returns the unsharded results of the module at ``path``, with its arguments from a run of the block of ``truth``.

    Returns None if the module cannot be tested alone: it does not run exactly once, none of its outputs reaches an
    output of the block, or it fails on copies of its arguments.
    """
    try:
        call = _observed(truth, path, truth.givens[-1])  # the shortest suffice: the block's proof runs all of them
        module = truth.block.get_submodule(path)
        return BlockReference(module, [call.given], call.used) if call.used else None
    except WholeWeightError:
        raise
    except Exception as error:  # code may pass anything to its modules
        if is_own_mistake(error):
            raise
        return None


@dataclass
class _Observed:
    """Call of a module."""

    given: Given = ((), {})
    outputs: list[Any] = field(default_factory=list)
    times: int = 0
    used: Collection[int] = frozenset()
    """Leaves of the output that reach an output of the block; empty if the module was not called exactly once."""


def _observed(truth: BlockReference, path: str, given: Given) -> _Observed:
    block = copy.deepcopy(truth.block)
    with exactly(), _watching(block.get_submodule(path)) as call:
        args, kwargs = pytree.tree_map(_copied, given)
        out = block(*args, **kwargs)
        if call.times == 1:
            call.used = _reaching(call.outputs, float_leaves(out, truth.used))
    call.outputs.clear()  # outputs keep the graph of the block alive
    return call


@contextmanager
def _watching(module: nn.Module) -> Iterator[_Observed]:
    call = _Observed()

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call.times += 1
        call.given = pytree.tree_map(_copied, (args, dict(kwargs)))

    def after(_: nn.Module, args: Any, out: Any) -> Any:
        seen = pytree.tree_map(_named, out)  # the module's own use of an output does not count
        call.outputs = pytree.tree_leaves(seen)
        return seen

    hooks = (module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after))
    try:
        yield call
    finally:
        for hook in hooks:
            hook.remove()


def _copied(leaf: Any) -> Any:
    """Returns a copy of an argument, no leaf of the graph, so that the block may write into it.

    Raises:
        ValueError: the argument is a parameter; a copy would lose its gradient.
    """
    if not isinstance(leaf, Tensor):
        return copy.deepcopy(leaf)
    if isinstance(leaf, nn.Parameter | LowRankWeight):
        raise ValueError("the block passes a parameter to the module as an argument; a copy would lose its gradient.")
    twin = leaf.detach().clone()
    return twin.requires_grad_().clone() if leaf.requires_grad else twin


def _named(leaf: Any) -> Any:
    return leaf.view_as(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf


def _reaching(leaves: list[Any], outputs: list[Any]) -> frozenset[int]:
    """Returns the indices of the leaves that a float output depends on with a gradient."""
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    total = sum((out.sum() for out in outputs if out.requires_grad), torch.zeros(()))
    if not places or not total.requires_grad:
        return frozenset()
    gradients = torch.autograd.grad(total, [leaves[place] for place in places], allow_unused=True)
    return frozenset(place for place, grad in zip(places, gradients, strict=True) if grad is not None)
