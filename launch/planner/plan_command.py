"""Command ``trine plan``: plans a run on absent GPUs, reports its memory and cost, and searches the best layout."""

import ctypes
import gc
import json
import sys
from argparse import Namespace
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.config import Config, load_config
from engine.config.sections import GPU_BUCKET
from engine.errors import ConfigError, EngineError, PlanError, first_line
from engine.launch.planner.longest_report import find_longest, longest_json, longest_text
from engine.launch.planner.plan_report import (
    Planned,
    as_json,
    as_text,
    offload_text,
    room_text,
    search_text,
    setting_text,
)
from engine.launch.planner.plan_request import STEP_TOKENS, PlanAsked, read_request
from engine.planning.cost_model.estimate import StepModel
from engine.planning.cost_model.layout import TrainingLayout
from engine.planning.cost_model.search import (
    MOST_COUNTED,
    USABLE,
    LayoutChoice,
    SearchResult,
    Wish,
    nearest,
    search_layouts,
)
from engine.planning.cost_model.workload import Workload
from engine.reporting.console import open_console, say_if_slow

if TYPE_CHECKING:
    from engine.launch.planner.planned_model import PlannedModel, SampledBlocks
    from engine.planning.plan import Plan

MOST_ACTIONS = 12_000
"""Maximum number of forwards (stages x microbatches) in all full plans of a search; one takes a millisecond."""


SLOW_SECONDS = 5.0
"""Seconds after which progress is printed."""
OBJECTS = 50_000
"""Threshold of Python's cycle collector during a plan, instead of 700 objects."""
TRIM_THRESHOLD, MMAP_THRESHOLD = (-1, 2**30), (-3, 2**25)
"""Parameters of glibc's ``mallopt`` with their numbers of bytes."""


def run_plan(options: Namespace) -> None:
    """Runs ``trine plan``: prints the plan of a configuration or of the best layout.

    With ``--longest`` it prints the longest row that fits instead; with ``--calibrate`` it measures a GPU.

    Raises:
        EngineError: the request, the model or the configuration is wrong.
    """
    if options.calibrate is not None:
        from engine.launch.planner.calibrate import calibrate

        if options.world is not None:
            raise ConfigError(
                f"--calibrate with --world {options.world}: it measures one GPU of this machine; leave --world out."
            )
        calibrate(options.calibrate, options.links)
        return
    asked = read_request(options)
    config = None if asked.config is None else load_config(asked.config, asked.world).for_accelerators()
    quiet = open_console(0)  # prints the progress of slow parts
    _keep_freed_memory()
    try:
        with _collecting_seldom():
            _run(asked, config, options)
    finally:
        quiet()


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Makes Python's cycle collector run rarely: a plan imports half a million objects, which each collection visits.

    Code with much memory in cycles, such as a proof, collects them itself.
    """
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _keep_freed_memory() -> None:
    """Makes the C library retain freed memory until the process ends, for the masks of each forward on shapes.

    Otherwise the system would reclaim and clear their pages each time, a tenth of the time of a plan.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # glibc
        for parameter, value in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            mallopt(parameter, value)


def _run(asked: PlanAsked, config: Config | None, options: Namespace) -> None:
    if options.longest:
        _longest(asked, config, options)
        return
    if options.search:
        _search(asked, config, options)
        return
    planned = _planned(asked, config)
    if options.out is not None:
        _write(options.out, planned.settings)
    print(json.dumps(as_json(planned), indent=2) if options.json else as_text(planned))


def _planned(asked: PlanAsked, config: Config | None) -> Planned:
    """Returns the complete plan of the configuration, or of the fastest layout that fits."""
    model = _Model(asked, config)
    if config is None:
        return _chosen(asked, model)
    made = _costed(asked, model, config, {})
    if made.fits:
        return made
    search = _searched(asked, model.workload(config), config)
    choice = _choice(model, search)
    choice.learn(made.costs.closed, made.costs.fullest)
    return _with_change(made, search, choice)


def _chosen(asked: PlanAsked, model: "_Model") -> Planned:
    """Returns the fastest layout that fits once counted; if none of MOST_COUNTED fits, the smallest of them."""
    search = _searched(asked, model.workload(None), None)
    if not search.ranked:
        raise ConfigError(_nothing_fits(search, asked))
    choice, made, refused = _choice(model, search), list[Planned](), list[EngineError]()
    for one in islice(choice, MOST_COUNTED):
        settings = settings_of(one.layout)
        try:
            made.append(_costed(asked, model, load_config(settings, asked.world), settings))
        except EngineError as error:
            refused.append(error)
            continue
        if made[-1].fits:
            break
        choice.learn(one, made[-1].costs.fullest)
    if not made:
        raise refused[0]
    best = min(made, key=lambda each: (not each.fits, each.costs.fullest.total))
    best = replace(best, passed=tuple(each.costs for each in made if each is not best))
    return best if best.fits else _with_change(best, search, choice)


def _with_change(made: Planned, search: SearchResult, choice: LayoutChoice) -> Planned:
    """Returns a plan that does not fit, with the nearest layout that does by current knowledge."""
    likely = replace(search, ranked=choice.likely())
    return replace(made, change=nearest(likely, made.costs.layout), smallest=search.smallest)


def _choice(model: "_Model", search: SearchResult) -> LayoutChoice:
    """Returns an iterator of the layouts of a search that are likely to fit, by samples of the model's blocks."""
    from engine.launch.planner.planned_model import working_of

    limit = USABLE * model.asked.gpu.memory_bytes
    return LayoutChoice(search.ranked, limit, working_of(model.samples, model.workload(model.config)))


def _costed(
    asked: PlanAsked, model: "_Model", config: Config, settings: dict[str, Any], counts: bool = True
) -> Planned:
    """Plans and estimates costs; ``counts``: activations are counted on shapes if that takes seconds."""
    from engine.planning.step_time.plan_costs import plan_costs, planned_layout

    plan = model.plan(config)
    estimated = not counts or model.why_not_counted(plan)
    sample = model.samples.of(planned_layout(plan)) if estimated else None
    costs = plan_costs(plan, model.workload(config), asked.gpu, asked.node, sample)
    made = Planned(
        asked=asked,
        plan=plan,
        costs=costs,
        counted="",
        settings=settings,
        fits=costs.fullest.total <= asked.gpu.memory_bytes,
        change=None,
        smallest=None,
    )
    return _counted(model, made) if counts else made


def _counted(model: "_Model", made: Planned, searches: bool = False) -> Planned:
    """Returns the plan with counted activations instead of estimates, if counting takes seconds."""
    from engine.launch.planner.planned_model import counted_costs

    if reason := model.why_not_counted(made.plan, searches):
        sampled = ", scaled to counted blocks" * (model.samples.of(made.costs.layout) is not None)
        return replace(made, counted=f"activations and buffers are estimates{sampled}: {reason}")
    costs, words = counted_costs(made.costs, made.plan, model.built, made.asked.gpu)
    return replace(made, costs=costs, counted=words, fits=costs.fullest.total <= made.asked.gpu.memory_bytes)


def _searched(asked: PlanAsked, work: Workload, config: Config | None) -> SearchResult:
    rows = asked.rows or (config.train_batch_size if config is not None else None) or _usual_rows(asked.world, work)
    wish = Wish(world=asked.world, rows=rows, node=asked.node, memory_bytes=asked.gpu.memory_bytes)
    with say_if_slow("ranking all layouts by closed forms", 0, SLOW_SECONDS):
        return search_layouts(work, StepModel(work, asked.gpu, asked.node), wish)


def _usual_rows(world: int, work: Workload) -> int:
    """Returns the rows of STEP_TOKENS tokens, as a multiple of the ranks."""
    return max(1, round(STEP_TOKENS / work.context / world)) * world


def _search(asked: PlanAsked, config: Config | None, options: Namespace) -> None:
    """Ranks all layouts by closed forms, plans the best completely, and prints the winner as a configuration."""
    model = _Model(asked, config)
    found = _searched(asked, model.workload(config), config)
    if not found.ranked:
        raise ConfigError(_nothing_fits(found, asked))
    base = None if asked.config is None else dict(asked.config)
    planned = _fitting(_Finals(asked, model, base), found, options.top)
    first = next(_choice(model, found), None)
    if config is not None or not any(first and one.fits and one.costs.layout == first.layout for one in planned):
        planned = [*_plain(asked, model, config, planned), *planned]
    if not planned:
        raise PlanError(
            "the engine refuses all of the fastest layouts that --search has found; correct the model or configuration "
            f"by the first refusal, or try more layouts with --top above {options.top}: {model.refused[0]}"
        )
    if options.out is not None:
        _write(options.out, planned[0].settings)
    if options.json:
        shown = {"tried": found.tried, "grids": found.grids, "fit": len(found.ranked)}
        print(json.dumps(shown | {"finalists": [as_json(one) for one in planned]}, indent=2))
        return
    print(search_text(found, planned))
    print(
        json.dumps(planned[0].settings, indent=2) if options.out is None else f"its configuration is in {options.out}"
    )


def _longest(asked: PlanAsked, config: Config | None, options: Namespace) -> None:
    """Prints the longest row that fits, and writes its configuration."""
    if options.search:
        raise ConfigError("--longest and --search are given, but a plan has one aim; leave one of them out.")
    model = _Model(asked, config)
    work, samples = model.workload(config), model.samples if asked.counts else None
    with say_if_slow("counting blocks on shapes", 0, SLOW_SECONDS):
        runs = find_longest(asked, work, samples)
    settings = settings_of(runs[0].layout, asked.config)
    if options.out is not None:
        _write(options.out, settings)
    if options.json:
        print(json.dumps(longest_json(asked, runs, settings), indent=2))
        return
    print(longest_text(asked, runs, asked.model.positions))


def _plain(asked: PlanAsked, model: "_Model", config: Config | None, finalists: list[Planned]) -> list[Planned]:
    """Returns the plan of the command without ``--search``, if it is better than all finalists.

    A finalist may replace it: a search has fewer candidates, and long pipelines keep estimates of their memory.
    """
    try:
        made = _chosen(asked, model) if config is None else _costed(asked, model, config, dict(asked.config or {}))
    except EngineError as error:
        model.refused.append(first_line(error))
        return []
    return [made] if all(_fit_and_fast(made) < _fit_and_fast(one) for one in finalists) else []


class _Finals(NamedTuple):
    """Common inputs of all finalists of a search."""

    asked: PlanAsked
    model: "_Model"
    base: Mapping[str, Any] | None
    """Given configuration; a layout replaces the keys that it decides."""


def _fitting(finals: _Finals, found: SearchResult, top: int) -> list[Planned]:
    """Returns complete plans of the best layouts, beginning with the fastest that fits once counted.

    Counts plans until one fits, and plans further layouts if all finalists turn out too large.
    """
    planned = list(_finalists(finals, found, top))
    choice = _choice(finals.model, found)
    for one in planned:
        choice.pass_over(one.costs.layout)
    for _ in range(MOST_COUNTED):
        planned.sort(key=_fit_and_fast)
        if not planned or not planned[0].fits:
            more = next(_finalists(finals, replace(found, ranked=choice.likely()), 1), None)
            if more is None:
                break
            choice.pass_over(more.costs.layout)
            planned.insert(0, more)
        if planned[0].counted:
            break
        planned[0] = _counted(finals.model, planned[0], searches=True)
        choice.learn(planned[0].costs.closed, planned[0].costs.fullest)
    return sorted(planned, key=_fit_and_fast)


def _fit_and_fast(one: Planned) -> tuple[bool, float]:
    return not one.fits, one.costs.time.total


def _finalists(finals: _Finals, found: SearchResult, top: int) -> Iterator[Planned]:
    """Yields complete plans of the best layouts that the engine accepts, at most two of a grid."""
    left, grids, actions = top, dict[tuple[int, int, int, int], int](), 0
    for one in found.ranked:
        layout = one.layout
        grid = layout.grid
        length = layout.pp * layout.virtual * layout.microbatches
        # further layouts of a grid differ little, and long rows of actions take long to plan
        if left == 0 or grids.get(grid, 0) == 2 or (actions and actions + length > MOST_ACTIONS):
            continue
        settings = settings_of(layout, finals.base)
        try:
            config = load_config(settings, finals.asked.world)
            made = _costed(finals.asked, finals.model, config, settings, counts=False)
        except EngineError as error:
            finals.model.refused.append(f"{layout}: {first_line(error)}")
            if len(finals.model.refused) > 3 * top:
                return
            continue
        grids[grid], actions = grids.get(grid, 0) + 1, actions + length
        left -= 1
        yield made


def _nothing_fits(found: SearchResult, asked: PlanAsked) -> str:
    need, room = found.smallest.memory.total / 2**30, room_text(asked.gpu.memory_bytes)
    return (
        f"no layout fits: of {found.tried:,} on {asked.world} GPUs the smallest ({found.smallest.layout}) needs "
        f"{need:.1f} GiB{offload_text(found.smallest)}, but {room}; give more GPUs, GPUs with more "
        "memory, or a configuration with offload."
    )


def _write(path: Any, settings: dict[str, Any]) -> None:
    if not settings:
        raise ConfigError(
            f"--out {path} with a given configuration: there is nothing to write; leave --out or the configuration out."
        )
    try:
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}; give another path.") from None


LEAST_STAGES: Mapping[str, int] = MappingProxyType({
    "reduce": 2, "gather": 3, "keep_gathered_bytes": 3, "zero_hpz_partition_size": 3, "shard_size": 1,
    "zero_quantized_weights": 1, "zero_quantized_weights_bits": 1, "zero_quantized_gradients": 1,
    "zero_quantized_gradients_bits": 1, "zero_gradient_error_feedback": 1, "zero_quantized_block_size": 1,
})  # fmt: skip
"""Key of ``zero_optimization`` -> lowest ZeRO stage that accepts it."""


def _of_stage(zero: Mapping[str, Any], layout: TrainingLayout) -> dict[str, Any]:
    """Returns the keys of a section that the ZeRO stage and the data ranks of ``layout`` accept."""
    kept = {key: value for key, value in zero.items() if LEAST_STAGES.get(key, 0) <= layout.stage}
    size = kept.get("shard_size")
    if isinstance(size, int) and size > 0 and layout.dp % size:
        del kept["shard_size"]
    return kept


def settings_of(layout: TrainingLayout, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns an engine configuration for ``layout``. All other keys come from ``base``, or from a default with bf16
    and AdamW.
    """
    given = dict(base or {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}})
    parallel = {"data": layout.dp, "tensor": layout.tp, "pipeline": layout.pp, "order": layout.order}
    more: dict[str, Any] = {"expert": layout.ep} if layout.ep > 1 or "expert" in given.get("parallel", {}) else {}
    if layout.cp > 1 or "context" in given.get("parallel", {}):
        more["context"] = layout.cp
    if layout.tp > 1:
        more["sequence_parallel"] = layout.sequence
    if layout.pp > 1:
        more |= {"schedule": layout.schedule, "virtual_stages": layout.virtual}
    zero: dict[str, Any] = {"stage": layout.stage}
    if layout.dp * layout.cp > 1:
        zero["reduce_bucket_size"] = GPU_BUCKET
    if layout.stage >= 2:
        zero["reduce"] = layout.reduction
    return given | {
        "train_batch_size": layout.rows,
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.microbatches,
        "parallel": {**given.get("parallel", {}), **parallel, **more},
        "zero_optimization": {**_of_stage(given.get("zero_optimization", {}), layout), **zero},
        "activation_checkpointing": {
            "mode": layout.recomputation,
            **({"inputs": "host"} if layout.inputs == "host" else {}),
        },
    }


MOMENTS: Mapping[str, float] = MappingProxyType({"Lion": 4, "Muon": 4, "AdamW8bit": 2, "Adafactor": 0})
"""Type of an optimizer -> bytes of its state for each parameter, if it has no two moments in fp32."""


def element_state_bytes(config: Config) -> float:
    """Returns the bytes of optimizer state in GPU memory for each trained parameter, with master and average, in fp32.

    They are those of the largest of several optimizers; offload moves a fraction of them to the host.
    """
    moments = [
        4.0 * bool(entry.params["momentum"]) if "momentum" in entry.params else MOMENTS.get(entry.type, 8.0)
        for entry in (config.optimizer.entries if config.optimizer is not None else ())
    ]
    offload = config.zero_optimization.offload_optimizer
    hosted = 0.0 if offload.device == "none" else 1.0 if offload.ratio == "auto" else offload.ratio
    return (1 - hosted) * (4 + max(moments, default=8.0) + 4 * (config.ema is not None))


class _Model:
    """Model that is built when first needed: known sizes need no torch."""

    def __init__(self, asked: PlanAsked, config: Config | None) -> None:
        self.refused: list[str] = []
        """Layouts that the engine refuses, each with its reason."""
        self.asked, self.config = asked, config
        self._built: PlannedModel | None = None
        self._samples: SampledBlocks | None = None
        self._workloads: dict[Hashable, Workload] = {}

    @property
    def built(self) -> "PlannedModel":
        """Model on the meta device."""
        if self._built is None:
            from engine.launch.planner.planned_model import build_model

            with say_if_slow("building the model on the meta device", 0, SLOW_SECONDS):
                self._built = replace(build_model(self.asked.model), card=self.asked.gpu.name)
            gc.freeze()  # excludes all current objects from later collections
        return self._built

    @property
    def samples(self) -> "SampledBlocks":
        """Samples of its blocks, under the given configuration or none."""
        if self._samples is None:
            from engine.launch.planner.planned_model import SampledBlocks

            base = self.asked.config
            self._samples = SampledBlocks(
                self.built, lambda layout: load_config(settings_of(layout, base), layout.world), self.asked.gpu
            )
        return self._samples

    def why_not_counted(self, plan: "Plan", searches: bool = False) -> str:
        """Returns the reason why activations of ``plan`` remain estimates; empty if they are counted."""
        from engine.launch.planner.planned_model import why_not_counted

        return why_not_counted(plan, self.built, searches) if self.asked.counts else "--estimate was given"

    def workload(self, config: Config | None) -> Workload:
        """Returns the workload, from its sizes or from a forward on shapes."""
        config = config or load_config(settings_of(TrainingLayout()), 1)
        return replace(self._traced(config), optimizer_bytes=element_state_bytes(config))

    def _traced(self, config: Config) -> Workload:
        if self.asked.model.shape is not None:
            return self.asked.model.shape.workload()
        dtypes = config.bf16.enabled, config.fp16.enabled, config.torch_autocast.enabled, tuple(config.keep_fp32)
        if dtypes not in self._workloads:
            with say_if_slow("a forward of the model on shapes", 0, SLOW_SECONDS):
                self._workloads[dtypes] = self.built.workload(config)
        return self._workloads[dtypes]

    def plan(self, config: Config) -> "Plan":
        """Returns the plan that the engine would run."""
        grid = setting_text("grid", (config.dp, config.cp, config.tp, config.pp, 1))
        with say_if_slow(f"the plan of {grid}, ZeRO {config.zero_optimization.stage}", 0, SLOW_SECONDS):
            return self.built.plan(config)
