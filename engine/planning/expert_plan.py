"""Plan of the experts: the modules whose experts data ranks share, and the sharding of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.config import Config
from engine.errors import PlanError
from engine.parallel.data_digits import expert_sizes
from engine.parallel.experts.forms import (
    ListedExperts,
    RoutedExperts,
    expert_bounds,
    expert_cut,
    lists_of_equal_experts,
    module_kind,
    owner_cut,
    possible_stacks,
    stacked_experts,
    stacks_differ,
)
from engine.parallel.experts.proof import Unproven, prove_adapted, prove_listed, prove_routed
from engine.parallel.experts.router_bias import RouterBias, find_router_bias
from engine.parallel.experts.router_choice import RouterChoice, find_router_choice
from engine.parallel.experts.width import WidthCut, prove_width
from engine.parallel.model.blocks import find_units
from engine.parallel.model.name_patterns import is_inside
from engine.parallel.model.parametrized_weights import adapter_chain, outermost_adapters
from engine.parallel.model.rng_streams import HostState
from engine.parallel.shard_table import Range
from engine.parallel.tensor.plan.tensor_plan import AttributeChange, ParameterCut, TensorPlan
from engine.planning.cost_model.expert_forms import SharedExpertWork
from engine.planning.cost_model.hardware import load_gpu
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.workload import ExpertWork
from engine.program.batch import Batch
from engine.program.expert_load import chosen_experts, find_experts


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Plan of expert parallelism: the MoE modules with experts divided over the axis "ep"."""

    ranks: int
    routed: tuple[RoutedExperts, ...]
    listed: tuple[ListedExperts, ...]
    cuts: Mapping[str, tuple[Range, ...]]
    """Ranges of each parameter of experts, with the expert rank that holds them, by name; of the first dim, or that in
    ``dims``."""
    unproven: tuple[Unproven, ...] = ()
    """Modules that stack experts, and hold all of them on every rank."""
    form: str = ""
    """Form of the experts on tensor ranks with its reason, for the banner; empty with one tensor rank."""
    whole: tuple[Unproven, ...] = ()
    """Modules whose experts are whole on tensor ranks, although others are cut, with the reason."""

    @property
    def shared(self) -> tuple[RoutedExperts | ListedExperts, ...]:
        """All MoE modules with experts divided among ranks."""
        return (*self.routed, *self.listed)

    @property
    def dims(self) -> Mapping[str, int]:
        """Dim along which a parameter stacks its experts, by name of the parameter; only for dims other than 0."""
        return {name: own.dim for each in self.routed for name, own in each.parameters.items() if own.dim}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Distinct numbers of experts of the MoE layers."""
        return tuple(dict.fromkeys(each.experts for each in self.shared))

    @property
    def uncut(self) -> tuple[str, ...]:
        """Names of the modules with experts that every tensor rank stores unsharded; modules with sharded experts are
        left out.
        """
        listed = (name for each in self.listed if not each.cut for name in each.names)
        return (*(each.name for each in self.routed if each.added is None), *listed)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the MoE modules with experts divided among ranks."""
        return tuple(each.name for each in self.shared)

    @property
    def divided(self) -> tuple[str, ...]:
        """Names of parameters of modules that stack experts. Each tensor rank has a part of their gradient: from some
        token rows, or for a part of the experts' width.
        """
        common = (f"{each.name}.{own}" for each in self.routed for own in each.common)
        return (*(name for each in self.routed for name in each.parameters), *common)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the startup banner about modules with undivided experts, each with a reason."""
        everywhere = (
            f"parallel.expert: every rank holds all experts of {each.name}: {each.reason}" for each in self.unproven
        )
        whole = (f"parallel.expert_tensor: experts of {each.name} are whole: {each.reason}" for each in self.whole)
        return (*everywhere, *whole)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """Plan of router replay, in which routers take expert choices from the batch instead of computing them."""

    routers: tuple[tuple[RouterChoice, int], ...]
    """The routers in their order, each with the number of its layer."""
    layers: int
    """Number of layers, with layers without experts."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the routers, as in ``model.named_modules()``."""
        return tuple(choice.router for choice, _ in self.routers)


def find_replay_plan(model: nn.Module, config: Config) -> ReplayPlan | None:
    """Finds, in trial runs, the function call by which each router of ``model`` chooses experts.

    Returns None without ``router_replay``.

    Raises:
        ConfigError: the model has no experts.
        PlanError: a choice was not found, or routers choose different numbers of experts.
    """
    if not config.router_replay:
        return None
    proven, found = dict[object, RouterChoice | str](), dict[tuple[str, int], RouterChoice]()
    drawn = HostState.take()
    with torch.random.fork_rng([]):  # trials may draw
        for stack in find_experts(model, "router_replay"):
            name, _, child = stack.name.rpartition(".")
            kind = (module_kind(block := model.get_submodule(name)), child)
            if kind not in proven:
                proven[kind] = find_router_choice(block, child, stack.experts)
            if isinstance(made := proven[kind], str):
                raise PlanError(
                    f"router_replay is true, but the choice of the router of {stack.name} was not found: {made}; leave "
                    "router_replay out."
                )
            choice = made.inside(name)
            found[choice.router, choice.place] = choice
    drawn.put()
    odd = next((each for each in found.values() if each.chosen != next(iter(found.values())).chosen), None)
    if odd is not None:
        raise PlanError(
            f"router_replay is true, but {odd.router} chooses {odd.chosen} experts for a row, and another router "
            "chooses another number, so that routed_experts has no shape; leave router_replay out."
        )
    return _numbered(tuple(found.values()), find_units(model).blocks)


def _numbered(routers: tuple[RouterChoice, ...], blocks: tuple[str, ...]) -> ReplayPlan:
    """Returns the plan with the number of each router's block; without one block for each router, they are counted."""
    owners = {name: number for number, name in enumerate(blocks)}
    layers = [next((owners[b] for b in blocks if f"{each.router}.".startswith(f"{b}.")), -1) for each in routers]
    if -1 in layers or len(set(layers)) < len(routers):
        return ReplayPlan(tuple(zip(routers, range(len(routers)), strict=True)), len(routers))
    return ReplayPlan(tuple(zip(routers, layers, strict=True)), len(blocks))


def around_experts(config: Config, model: nn.Module, shared: ExpertPlan | None) -> tuple[str, ...]:
    """Returns the names of the MoE modules and routers that the engine wraps for expert parallelism, router replay or
    expert counts.

    ``shared``: plan of expert parallelism, or None.
    """
    replay = find_replay_plan(model, config)
    counted = find_experts(model) if config.monitor.expert_load or config.router_bias_update_rate else ()
    return (*(shared.blocks if shared else ()), *(replay.modules if replay else ()), *(each.name for each in counted))


def find_expert_plan(model: nn.Module, config: Config) -> ExpertPlan | None:
    """Finds the model's experts, and verifies in trial runs that they can be divided among ranks.

    Returns None without ``parallel.expert``.

    Raises:
        PlanError: no experts of the model can be divided, or a module has fewer experts than there are ranks.
    """
    ranks = config.parallel.expert
    if ranks == 1:
        return None
    drawn = HostState.take()
    with torch.random.fork_rng([]):  # trials may draw
        routed, refused = _routed(model, ranks)
        listed, others = _listed(model)
    drawn.put()
    unproven = (*refused, *others)
    if not routed and not listed:
        raise PlanError(f"parallel.expert is {ranks}, but {_missing(unproven)}; leave parallel.expert out.")
    shared: tuple[RoutedExperts | ListedExperts, ...] = (*routed, *listed)
    fewest = min(shared, key=lambda each: each.experts)
    if fewest.experts < ranks:
        fitting = expert_sizes(config.dp, config.cp, config.zero_optimization.shard_size)
        raise PlanError(
            f"parallel.expert is {ranks}, but {fewest.name} has {fewest.experts} experts, and every rank needs at "
            f"least one; give one of {', '.join(str(size) for size in fitting if size <= fewest.experts)}."
        )
    return ExpertPlan(ranks, routed, listed, _cuts(model, ranks, routed, listed), unproven)


def find_router_biases(model: nn.Module, config: Config) -> tuple[RouterBias, ...]:
    """Returns the routers' buffers that affect only the choice of experts; () without ``router_bias_update_rate``.

    Raises:
        PlanError: no router has such a buffer.
    """
    if not config.router_bias_update_rate:
        return ()
    stacks = find_experts(model, "router_bias_update_rate")
    found = (find_router_bias(model, stack.name, stack.experts) for stack in stacks)
    biases = tuple(each for each in found if each is not None)
    if not biases:
        raise PlanError(
            f"router_bias_update_rate is {config.router_bias_update_rate:g}, but no router of the model has a buffer "
            "[experts] that is added to the scores only to choose experts; leave router_bias_update_rate out."
        )
    return biases


def _routed(model: nn.Module, ranks: int) -> tuple[tuple[RoutedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, RoutedExperts | Unproven] = {}
    found = list[RoutedExperts | Unproven]()
    adapters = outermost_adapters(model)
    for own, module in model.named_modules():
        if next(possible_stacks(module), None) is None:
            if "expert" in own.lower() and stacks_differ(module):
                found.append(Unproven(own, "its matrices stack different numbers of experts"))
            continue
        name = adapters.get(module, own)
        called = model.get_submodule(name)
        kind = tuple(module_kind(each) for _, each in adapter_chain(called))
        if kind not in proven:
            proven[kind] = prove_routed(name, module) if called is module else prove_adapted(name, called, ranks)
        if isinstance(proven[kind], RoutedExperts) or stacked_experts(module):
            found.append(proven[kind].named(name))
    routed = tuple(each for each in found if isinstance(each, RoutedExperts))
    return routed, tuple(each for each in found if isinstance(each, Unproven))


def _listed(model: nn.Module) -> tuple[tuple[ListedExperts, ...], tuple[Unproven, ...]]:
    proven: dict[object, tuple[int, int] | str] = {}
    found, refused = list[ListedExperts](), list[Unproven]()
    for name, child, members in lists_of_equal_experts(model):
        block = model.get_submodule(name)
        kind = (module_kind(block), child)
        if kind not in proven:
            proven[kind] = prove_listed(block, child)
        widths = proven[kind]
        if not isinstance(widths, str):
            own = tuple(own for own, _ in model.get_submodule(members[0]).named_parameters())
            found.append(ListedExperts(name, members, *widths, own))
        elif "expert" in child.lower():
            refused.append(Unproven(f"{name}.{child}" if name else child, widths))
    return tuple(found), tuple(refused)


def _cuts(
    model: nn.Module, ranks: int, routed: tuple[RoutedExperts, ...], listed: tuple[ListedExperts, ...]
) -> dict[str, tuple[Range, ...]]:
    cuts = {name: expert_cut(each.experts, ranks, own) for each in routed for name, own in each.parameters.items()}
    for each in listed:
        bounds = expert_bounds(each.experts, ranks)
        for rank in range(ranks):
            for name in each.names[bounds[rank] : bounds[rank + 1]]:
                for own, parameter in model.get_submodule(name).named_parameters():
                    cuts[f"{name}.{own}"] = owner_cut(parameter.shape[0] if parameter.dim() else 1, rank)
    return cuts


def _missing(unproven: tuple[Unproven, ...]) -> str:
    if not unproven:
        return (
            "the model has no experts: no module owns parameters [experts, ..] and is called with the rows of each, "
            "and no block calls a list of equal modules with rows"
        )
    return f"the experts of {unproven[0].name} cannot be shared, because {unproven[0].reason}"


def form_on_tensor_ranks(
    config: Config, model: nn.Module, example: Batch, plan: TensorPlan, shared: ExpertPlan
) -> tuple[TensorPlan, ExpertPlan]:
    """Decides for each MoE module if tensor ranks shard its experts along their width (intermediate size); returns both
    updated plans.

    ``plan``: tensor-parallel plan of the layers. ``shared``: plan of expert parallelism. With
    ``parallel.expert_tensor`` = "auto", compares estimated costs.

    Raises:
        PlanError: ``parallel.expert_tensor`` is "cut", and a module's experts cannot be sharded.
    """
    wanted, ranks = config.parallel.expert_tensor, f"on {config.tp} tensor ranks"
    cut, reason = wanted == "cut", "parallel.expert_tensor"
    if wanted == "auto":
        cut, reason = _cheaper_form(config, model, example, shared)
        reason = f"auto: {reason}"
    if not cut:
        return plan.without(shared.uncut), replace(shared, form=f"whole {ranks} ({reason})")
    proven, refused = dict[object, WidthCut | str](), dict[str, str]()
    routed, listed = list[RoutedExperts](), list[ListedExperts]()
    for each in shared.routed:
        module = model.get_submodule(each.name)
        kind = (module_kind(module), tuple(_inside(plan, each.name).items()))
        if kind not in proven:
            proven[kind] = prove_width(module, each, *_changes(plan, each.name), config.tp)
        width = proven[kind]
        if isinstance(width, str):
            refused[each.name] = width
        routed.append(each if isinstance(width, str) else replace(each, added=width.added))
    for block in shared.listed:
        problem = _list_problem(plan, block)
        if problem is not None:
            refused[block.name] = problem
        listed.append(replace(block, cut=problem is None))
    if refused and wanted == "cut":
        name, why = next(iter(refused.items()))
        raise PlanError(
            f'parallel.expert_tensor is "cut", but the experts of {name} cannot be cut along their width: {why}; set '
            'it to "auto" or "whole".'
        )
    if len(refused) == len(shared.shared):
        form, refused = f"whole {ranks} (auto: {next(iter(refused.values()))})", {}
    else:
        form = f"cut along their width {ranks} ({reason})"
    whole = tuple(Unproven(name, why) for name, why in refused.items())
    found = replace(shared, routed=tuple(routed), listed=tuple(listed), form=form, whole=whole)
    return plan.without(found.uncut).with_summed([each.name for each in routed if each.added is not None]), found


def _inside(plan: TensorPlan, module: str) -> dict[str, ParameterCut]:
    """Returns the cuts of the parameters of a module, by name in it."""
    return {name[len(module) + 1 :]: cut for name, cut in plan.parameters.items() if is_inside(name, module)}


def _changes(plan: TensorPlan, module: str) -> tuple[dict[str, ParameterCut], tuple[AttributeChange, ...]]:
    return _inside(plan, module), tuple(change for change in plan.attributes if change.module == module)


def _list_problem(plan: TensorPlan, block: ListedExperts) -> str | None:
    """Returns the reason why experts of a list are not cut; None if the layers of each are."""
    if not all(any(is_inside(layer, name) for layer in plan.layers) for name in block.names):
        return "the tensor plan does not cut their layers"
    if any(is_inside(shown, name) for name in block.names for shown in plan.shown):
        return "the tensor plan cuts them through views"
    return None


def _cheaper_form(config: Config, model: nn.Module, example: Batch, shared: ExpertPlan) -> tuple[bool, str]:
    """Returns True if experts that tensor ranks cut cost less than whole ones, and the reason."""
    gpu, first = load_gpu("h100"), shared.shared[0]
    owned = sum(parameter.numel() for name in shared.uncut for parameter in model.get_submodule(name).parameters())
    tokens = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    widths = [1 if leaf.dim() == 2 else leaf.shape[-1] for leaf in tokens]
    layout = TrainingLayout(
        dp=config.dp, tp=config.tp, pp=config.pp, cp=config.cp, ep=config.parallel.expert, order=config.parallel.order,
        stage=config.zero_optimization.stage, micro=config.micro, microbatches=config.accumulation,
    )  # fmt: skip
    work = SharedExpertWork(
        tokens=max((leaf.numel() // width for leaf, width in zip(tokens, widths, strict=True)), default=config.micro),
        width=first.width,
        layers=ceil(len(shared.shared) / config.pp),
        work=ExpertWork(
            owned / len(shared.shared), first.experts, chosen_experts(model, first.experts), len(shared.shared)
        ),
        itemsize=2 if config.bf16.enabled or config.fp16.enabled else 4,
        listed=bool(shared.listed),
    )
    return work.choose(layout, gpu, config.parallel.gpus_per_node or round(gpu.gpus_per_node))
