"""Model of a plan, on the meta device, and its activations, counted on shapes. Needs torch.

The model comes from a Hugging Face folder, a function, or sizes. Activations of a whole plan are counted if that takes
seconds; otherwise those of one more block, on a model of a few blocks without a pipeline:

    blocks     | first | A A | last       plays a step, whose peak is counted; the increase of live bytes from the end
                                          of one period to the end of the next is the activations of a period
    layouts    with the same tensor ranks, sequence parallelism and recomputation share a sample

So a layout that takes long to count has an estimate based on the model's code, and the first layout that is counted in
full usually fits.
"""

import logging
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.build.request import Request
from engine.config import Config
from engine.dry_run.dry_run_rank import DryRunRank
from engine.dry_run.rank_forecast import PlanDryRun, PlannedKernels, RankForecast, forecast_of
from engine.dry_run.repeating_blocks import is_called, longest_run, outer_runs
from engine.dry_run.shortened_models import shorten
from engine.errors import PlanError, first_line
from engine.kernels.device import find_accelerator
from engine.launch.planner.plan_request import ModelSource
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.models.named_model import build_named, find_function, huggingface_class, import_transformers, model_and_rows
from engine.optim.param_groups import as_trainable
from engine.parallel.model.user_code import is_own_mistake
from engine.planning.analysis import PlanRequest, needs_search, search_styles
from engine.planning.cost_model.estimate import CONTEXT_BYTES, SLACK, BlockSample, LayoutEstimate, working_bytes
from engine.planning.cost_model.hardware import GpuSpec
from engine.planning.cost_model.layout import EngineTraits, TrainingLayout
from engine.planning.cost_model.search import Working
from engine.planning.cost_model.workload import DecoderShape, Workload
from engine.planning.found_styles import FoundStyles
from engine.planning.plan import Plan, build_plan, stages_wanted
from engine.planning.profile_calls import needs_profiling, profile_run
from engine.planning.step_time.plan_costs import PlanCosts
from engine.planning.step_time.traced_workload import traced_workload
from engine.planning.tensor_plan_search import CalledModules, SearchedProgram, calls_of_modules
from engine.precision.dtypes import Precision, make_precision
from engine.program.batch import Batch, BatchPath, change_tensors, map_tensors
from engine.program.batch_rows import BatchRows
from engine.program.forward_inputs import ForwardInputs, Inputs, with_targets
from engine.program.loss import LossFunction
from engine.program.program import Program
from engine.program.router_replay import KEY

KNOWN_STYLES: Mapping[str, Mapping[str, str]] = {
    "decoder": {
        "tokens": "vocabulary", "*.query": "column", "*.key": "column", "*.value": "column", "*.output": "row",
        "*.up": "column", "*.down": "row", "head": "vocabulary",
    },
    "llama": {
        "*embed_tokens": "vocabulary", "*.q_proj": "column", "*.k_proj": "column", "*.v_proj": "column",
        "*.o_proj": "row", "*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row",
        "lm_head": "vocabulary",
    },
}  # fmt: skip
"""Tensor plans of model families with a slow search, equal to its results."""
KNOWN_NOTE = "tensor: the known plan of this family, not searched here; training searches and proves its own"
LIKE_LLAMA = ("llama", "mistral", "qwen2", "olmo2", "smollm3", "granite")
_ON_META = "build it without reading or computing values, under torch.device('meta')"
WIDE = 1024
"""Minimum hidden size for which a known tensor plan replaces the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Model on the meta device, with loss function, example row and other inputs of the planner."""

    model: nn.Module
    loss_fn: LossFunction | None
    row: Batch
    """Batch of one row, on the meta device."""
    styles: Mapping[str, str] | None
    """Known tensor plan; None: the plan is searched."""
    card: str = ""
    """Name of the GPU, by which attention chooses its method; empty: unknown."""
    inputs: Inputs | None = None
    """Entries of a batch that forward receives; None: as ``initialize`` selects them."""
    rows: BatchRows = field(default_factory=BatchRows)
    """Rule of the tensors without rows."""
    searched: dict[Hashable, FoundStyles] = field(default_factory=dict, repr=False, compare=False)
    """Cache of search results, shared by plans with equal search inputs."""
    programs: dict[Hashable, SearchedProgram] = field(default_factory=dict, repr=False, compare=False)
    """Cache of programs, shared by searches for several tensor sizes."""

    def plan(self, config: Config) -> Plan:
        """Returns the plan that the engine would make for this model under ``config``."""
        styles = self.styles if config.tp > 1 and config.parallel.tensor_plan == "auto" else None
        if styles is not None:
            config = replace(config, parallel=replace(config.parallel, tensor_plan=styles, prove_plan=False))
        program, example = self._program(config), self.example(config.micro)
        costs = None
        with as_trainable(self.model, self.request(config).included):
            if needs_profiling(config):
                device = torch.device(find_accelerator() or "cpu")
                costs = profile_run(program, example, config, stages_wanted(config), device)
            found = self._search(config, program) if needs_search(config) else None
            plan = build_plan(config, PlanRequest(program, example, costs=costs, found=found, card=self.card))
        if styles is None:
            return plan
        notes = [note for note in plan.notes if not note.startswith("parallel.tensor_plan is not proven")]
        return replace(plan, notes=(*notes, KNOWN_NOTE))

    def request(self, config: Config) -> Request:
        """Returns the arguments of ``initialize`` for a run of this model under ``config``."""
        return self._given({KEY} if config.router_replay else ()).completed(self.model, config)

    def _given(self, without: Collection[str] = (KEY,)) -> Request:
        """Returns the arguments of ``initialize``; ``without``: entries of a batch that forward does not receive."""
        forward = ForwardInputs.of(self.model, self.loss_fn is not None, self.inputs, without)
        return Request(with_targets(self.loss_fn, forward), rows=self.rows, inputs=forward)

    def example(self, rows: int) -> Batch:
        """Returns one microbatch of ``rows`` rows on the meta device."""

        def with_rows(path: BatchPath, row: Tensor) -> Tensor:
            return row.new_empty((rows, *row.shape[1:])) if row.ndim and not self.rows.is_whole(path) else row

        return change_tensors(self.row, with_rows)

    def plan_shorter(self, shorter: nn.Module, plan: Plan) -> Plan:
        """Returns a plan for ``shorter``, a copy of the model with fewer blocks.

        The returned plan has the tensor-parallel styles of ``plan``.
        """
        styles = None if plan.tensor is None else _present(shorter, plan.tensor.patterns)
        made = replace(self, model=shorter, styles=styles).plan(plan.config)
        return replace(made, config=plan.config)

    def shortened(self, shorter: nn.Module, config: Config) -> "PlannedModel":
        """Returns a copy of this object for ``shorter``, a copy of the model with fewer blocks.

        If ``styles`` is None and ``config`` does not determine the tensor-parallel styles, the copy gets the styles
        that a search finds for the full model.
        """
        if self.styles is not None or not needs_search(config):
            return replace(self, model=shorter)
        return replace(
            self, model=shorter, styles=_present(shorter, self._search(config, self._program(config)).patterns)
        )

    def with_rows_of(self, length: int) -> "PlannedModel":
        """Returns a copy of this object with an example row of ``length`` tokens."""
        sizes = {leaf.shape[1] for leaf in tree_leaves(self.row) if leaf.dim() > 1}
        tokens = max(sizes, default=1)

        def longer(row: Tensor) -> Tensor:
            return row.new_empty([length if size == tokens else size for size in row.shape])

        return replace(self, row=map_tensors(self.row, longer))

    def called(self) -> set[int] | None:
        """Returns the ``id`` of each module that a forward on the meta device calls; None if the forward raises."""
        program = replace(self._given(), loss_fn=None).program(self.model, Precision(None, None), torch.device("meta"))
        called = CalledModules()
        try:
            with torch.no_grad(), calls_of_modules(called):
                program.output(self.row)
        except Exception as error:  # the model's own code may raise anything on shapes
            if is_own_mistake(error):
                raise
            return None
        return called.all

    def workload(self, config: Config) -> Workload:
        """Returns the model's FLOPs and tensor sizes for the cost model, traced in one forward without data."""
        program = self._program(config)  # reads what is frozen
        with as_trainable(self.model, self.request(config).included):
            return traced_workload(program, self.row)

    def _search(self, config: Config, program: Program) -> FoundStyles:
        """Searches the tensor plan of a configuration; rows of a microbatch and other axes do not change it."""
        parallel = config.parallel
        key = config.tp, parallel.sequence_parallel, parallel.tensor_proof, program.precision
        if key not in self.searched:
            example = self.example(config.micro)
            shared = self.programs.setdefault((program.precision, config.micro), SearchedProgram(program, example))
            self.searched[key] = search_styles(config, PlanRequest(program, example, searched=shared))
        return self.searched[key]

    def _program(self, config: Config) -> Program:
        return self.request(config).program(self.model, make_precision(config, self.model), torch.device("cpu"))


def build_model(source: ModelSource) -> PlannedModel:
    """Builds the planned model from ``source`` on the meta device.

    Raises:
        PlanError: the model cannot be built on the meta device; the message contains the reason.
    """
    if source.decoder is not None:
        return _decoder(source.decoder)
    name = source.function or str(source.folder)
    with torch.device("meta"):
        made = build_named(name, partial(_made, source), " on the meta device", _ON_META)
    model, rows, loss_fn = model_and_rows(name, made)
    _switch_cache_off(model)
    row = _token_row(model, source, name) if rows is None else first_row(rows)
    family = getattr(getattr(model, "config", None), "model_type", None)
    wide = source.shape is not None and source.shape.width >= WIDE
    styles = _present(model, KNOWN_STYLES["llama"]) if wide and family in LIKE_LLAMA else None
    return PlannedModel(model=model, loss_fn=loss_fn, row=row, styles=styles)


def first_row(batch: Batch, rows: BatchRows = BatchRows()) -> Batch:  # noqa: B008
    """Returns the first row of ``batch`` on the meta device; ``rows``: rule of the tensors without rows."""
    return map_tensors(rows.take_rows(batch, 0, 1), lambda tensor: tensor.to("meta"))


def _decoder(shape: DecoderShape) -> PlannedModel:
    sizes = DecoderConfig(
        vocabulary=shape.vocabulary, layers=shape.layers, width=shape.width, heads=shape.heads, context=shape.context
    )
    with torch.device("meta"):
        model = Decoder(sizes)
    styles = KNOWN_STYLES["decoder"] if shape.width >= WIDE else None
    return PlannedModel(model=model, loss_fn=loss_sum, row=_tokens(shape.context), styles=styles)


def _tokens(context: int) -> Batch:
    ids = torch.empty((1, context), dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def _token_row(model: nn.Module, source: ModelSource, name: str) -> Batch:
    config = getattr(model, "config", None)
    context = source.context or (source.shape.context if source.shape else None)
    context = context or getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if config is None:
        raise PlanError(
            f"MODEL {name} returns a module without a config of transformers, so the shapes of its inputs are unknown; "
            "return (module, rows), with a batch of inputs as rows."
        )
    if not isinstance(context, int):
        raise PlanError(
            f"MODEL {name} has no max_position_embeddings in its config, so the length of its rows is unknown; give "
            "the number of tokens in a row as --context N."
        )
    return _tokens(context)


def _made(source: ModelSource) -> Any:
    """Returns the result of the function, or the model of the folder."""
    return find_function(source.function)() if source.function else _of_folder(source.folder or Path())


def _of_folder(folder: Path) -> nn.Module:
    config = import_transformers().AutoConfig.from_pretrained(folder)
    kind = huggingface_class(config)
    if kind is None:
        raise PlanError(
            f"MODEL {folder} is a {config.model_type}, but transformers has no class for it; give "
            "module:function that returns the module."
        )
    model: nn.Module = kind(config).train()
    return model


def _switch_cache_off(model: nn.Module) -> None:
    """Switches the cache of keys and values off, as in training: with it no block is isolated for a tensor plan."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def _present(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """Returns the styles with patterns that match a module or a parameter."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {pattern: style for pattern, style in styles.items() if any(fnmatchcase(name, pattern) for name in names)}


MOST_LEAVES = 2000
"""Maximum number of leaf modules for a count of activations on shapes."""
MOST_SEARCHED = 400
"""Maximum of leaf modules x pipeline ranks in a search, at about 40 ms each."""

MOST_SILENT = 150
"""Maximum number of leaf modules for a run on shapes without progress messages."""


def why_not_counted(plan: Plan, planned: PlannedModel, searches: bool = False) -> str:
    """Returns the reason if ``plan`` has too many modules for a dry run that counts activations; otherwise "".

    Args:
        searches: True if the plan is one of several in a search; the limit is then lower.
    """
    leaves = _leaves(planned)
    if searches and leaves * plan.config.pp > MOST_SEARCHED:
        return (
            f"a search does not run {leaves:,} modules on {plan.config.pp} pipeline ranks on shapes; the plan of this "
            "configuration without --search does"
        )
    return f"{leaves:,} modules are too many to run on shapes" if leaves > MOST_LEAVES else ""


def _leaves(planned: PlannedModel) -> int:
    return sum(1 for module in planned.model.modules() if not any(True for _ in module.children()))


def counted_costs(costs: PlanCosts, plan: Plan, planned: PlannedModel, gpu: GpuSpec) -> tuple[PlanCosts, str]:
    """Counts each pipeline rank's peak memory of activations in a dry run with tensor shapes only.

    Returns (``costs`` with these numbers, a sentence with each rank's peak). If the model raises an exception in the
    dry run, ``costs`` are unchanged, and the sentence contains the reason.
    """
    leaves = _leaves(planned)
    if leaves > MOST_SILENT:
        print(
            f"counting activations of {costs.layout} on shapes: {leaves:,} modules, {plan.config.pp} pipeline ranks",
            file=sys.stderr,
            flush=True,
        )
    quiet = logging.getLogger("trine")
    before, quiet.disabled = quiet.disabled, True
    try:
        found = list(_forecasts(plan, planned, gpu))
    except Exception as error:  # the model's own code may raise anything on shapes; a line of the plan reports it
        if is_own_mistake(error):
            raise
        return costs, f"activations and buffers are estimates: on shapes the model raises {first_line(error)}"
    finally:
        quiet.disabled = before
    memory = tuple(
        replace(
            rank,
            activations=float(forecast.peak.bytes),
            buffers=costs.exchanges[pp].round if costs.exchanges else 0.0,  # a run on shapes exchanges nothing
            slack=CONTEXT_BYTES + SLACK * forecast.peak.bytes,
        )
        for pp, (rank, forecast) in enumerate(zip(costs.memory, found, strict=True))
    )
    where = ", ".join(f"{one.peak.bytes / 2**20:,.1f} MiB in {one.peak.action}" for one in found)
    words = f"activations and buffers of each pipeline rank, by storages on shapes: {where}"
    return replace(costs, memory=memory), words


def kernels_of(config: Config, gpu: GpuSpec) -> PlannedKernels | None:
    """Returns the choice of Triton kernels for a dry run on ``gpu`` under ``config``; None: only torch operators."""
    return None if config.kernels == "reference" else PlannedKernels(config.kernels, gpu.name)


def _forecasts(plan: Plan, planned: PlannedModel, gpu: GpuSpec) -> Iterator[RankForecast]:
    dry_run = PlanDryRun(
        model=planned.model,
        plan=plan,
        request=planned.request(plan.config),
        example=planned.example(plan.config.micro),
        kernels=kernels_of(plan.config, gpu),
        plan_of=lambda shorter: planned.plan_shorter(shorter, plan),
    )
    return dry_run.forecasts()


class SampledBlocks:
    """Cache of measured memory sizes of one block of a model, per layout and row length.

    Dry runs of a copy of the model with fewer blocks measure missing sizes.

    Args:
        planned: model of the plan.
        config_of: callback that returns the configuration of a layout.
        gpu: GPU that determines which operators have kernels.
    """

    def __init__(self, planned: PlannedModel, config_of: Callable[[TrainingLayout], Config], gpu: GpuSpec) -> None:
        self._planned, self._config_of, self._gpu = planned, config_of, gpu
        outer = outer_runs(planned.model)
        called = planned.called() if len(outer) > 1 else None
        idle = [] if called is None else [run for run in outer if not is_called(planned.model, run.blocks, called)]
        self._idle = idle
        """Runs of lists that a forward does not call, such as a vision tower on rows of text."""
        self._run = longest_run(planned.model, called)
        self._samples: dict[Hashable, BlockSample | None] = {}
        self._shortened: dict[int, nn.Module] = {}

    def of(self, layout: TrainingLayout, fresh: bool = True, length: int | None = None) -> BlockSample | None:
        """Returns the measured memory of one block under ``layout``, for rows of ``length`` tokens or the model's own
        length.

        Returns None if it cannot be measured. ``fresh`` False: only searches the cache.
        """
        key = layout.tp, layout.cp, layout.sequence, layout.recomputation, layout.inputs, length
        if key not in self._samples and fresh:
            self._samples[key] = self._sample(layout, length)
        return self._samples.get(key)

    def _sample(self, layout: TrainingLayout, length: int | None) -> BlockSample | None:
        run, periods = self._run, self._periods(layout)
        short = self._short(periods)
        if run is None or short is None:
            return None
        alone = replace(
            layout, dp=1, pp=1, ep=1, stage=0, reduction="step", micro=1, microbatches=1, schedule="1f1b", virtual=1
        )
        try:
            config = self._config_of(alone)
            rank = self._rank(short, config, length)
            last = run.start + periods * run.period - 1
            levels = rank.watch([f"{run.blocks}.{index}" for index in (last - run.period, last)])
            peak = forecast_of(rank.plan, 0, rank.step()).peak.bytes
            period = levels[-1] - levels[-2]
        except Exception as error:  # the model's own code may raise anything on shapes; its estimate stays
            if is_own_mistake(error):
                raise
            return None
        if period < 0:  # forwards that depend on earlier forwards; the estimate stays
            return None
        return BlockSample(kept=period / run.period, around=max(0.0, peak - periods * period))

    def _periods(self, layout: TrainingLayout) -> int:
        """Returns the number of periods of the short model: one is enough if other blocks precede the run.

        A block that moves its inputs to the host still has them when it returns; its first input stays with the model.
        """
        first = 1 if self._run is not None and self._run.start else 2
        return first + (layout.inputs == "host")

    def _short(self, periods: int) -> nn.Module | None:
        """Returns a short model, which plans and dry runs leave unchanged; None if no run is longer."""
        if self._run is None or self._run.periods <= periods:
            return None
        if periods not in self._shortened:
            model = self._planned.model
            for run in self._idle:
                model = shorten(model, run, 1)
            self._shortened[periods] = shorten(model, self._run, periods)
        return self._shortened[periods]

    def _rank(self, model: nn.Module, config: Config, length: int | None) -> DryRunRank:
        """Returns the only rank of a short model."""
        planned = self._planned if length is None else self._planned.with_rows_of(length)
        short = planned.shortened(model, config)
        plan = short.plan(config)
        request, kernels = short.request(config), kernels_of(config, self._gpu)
        return DryRunRank(short.model, plan, 0, request, short.example(1), kernels)


def working_of(samples: SampledBlocks, work: Workload) -> Working:
    """Returns a function (estimate, fresh) that computes the bytes of activations and buffers for ``estimate.layout``.

    If ``samples`` has no measurement of the layout, ``fresh`` True makes one; with ``fresh`` False, or if that fails,
    the result is None. ``work``: the model's FLOPs and tensor sizes.
    """

    def working(one: LayoutEstimate, fresh: bool) -> float | None:
        layout, closed = one.layout, working_bytes(work, one.layout, EngineTraits())[0]
        sample = samples.of(layout, fresh)
        if sample is None or not closed:
            return None
        activations = one.memory.activations * sample.kept * layout.micro / closed
        return activations + max(one.memory.buffers, sample.around * layout.micro)

    return working
