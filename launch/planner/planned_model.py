"""The model of a plan, on the meta device: from a Hugging Face folder, a function, or sizes. Needs torch."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config import Config
from engine.errors import PlanError
from engine.kernels.device import find_accelerator
from engine.launch.planner.plan_request import ModelSource
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.models.named_model import build_named, find_function, huggingface_class, import_transformers, model_and_rows
from engine.parallel.model.user_code import is_own_mistake
from engine.planning.analysis import PlanRequest, needs_search, search_styles
from engine.planning.cost_model.decoder_shape import DecoderShape
from engine.planning.cost_model.workload import Workload
from engine.planning.plan import Plan, build_plan, stages_wanted
from engine.planning.profile_calls import needs_profiling, profile_run
from engine.planning.step_time.traced_workload import traced_workload
from engine.planning.tensor_plan_search import CalledModules, SearchedProgram, calls_of_modules
from engine.planning.tensor_search.found_styles import FoundStyles
from engine.precision.dtypes import Precision, make_precision
from engine.program.batch import Batch, map_tensors
from engine.program.loss import LossFunction
from engine.program.program import Program

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
"""Tensor plans of families whose search would take long; the search finds the same ones."""
KNOWN_NOTE = "tensor: the known plan of this family, not searched here; training searches and proves its own"
LIKE_LLAMA = ("llama", "mistral", "qwen2", "olmo2", "smollm3", "granite")
_ON_META = "build it without reading or computing values, under torch.device('meta')"
WIDE = 1024
"""Width from which a known plan takes the place of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model whose parameters have shapes alone, and what a plan of it needs besides."""

    model: nn.Module
    loss_fn: LossFunction | None
    row: Batch
    """One row of a batch, on the meta device."""
    styles: Mapping[str, str] | None
    """A tensor plan that needs no search; None: it is searched."""
    searched: dict[Hashable, FoundStyles] = field(default_factory=dict, repr=False, compare=False)
    """What searches have found: plans that differ in nothing that a search depends on share one."""
    programs: dict[Hashable, SearchedProgram] = field(default_factory=dict, repr=False, compare=False)
    """What searches for several numbers of tensor ranks share."""

    def plan(self, config: Config) -> Plan:
        """The plan that the engine would run."""
        styles = self.styles if config.tp > 1 and config.parallel.tensor_plan == "auto" else None
        if styles is not None:
            config = replace(config, parallel=replace(config.parallel, tensor_plan=styles, prove_plan=False))
        program, example = self._program(config), self._example(config)
        costs = None
        if needs_profiling(config):
            device = torch.device(find_accelerator() or "cpu")
            costs = profile_run(program, example, config, stages_wanted(config), device)
        found = self._search(config) if needs_search(config) else None
        plan = build_plan(config, PlanRequest(program, example, costs=costs, found=found))
        if styles is None:
            return plan
        notes = [note for note in plan.notes if not note.startswith("parallel.tensor_plan is not proven")]
        return replace(plan, notes=(*notes, KNOWN_NOTE))

    def plan_shorter(self, shorter: nn.Module, plan: Plan) -> Plan:
        """The plan of a copy with fewer blocks, under the configuration and with the styles of ``plan``."""
        styles = None if plan.tensor is None else _present(shorter, plan.tensor.patterns)
        made = replace(self, model=shorter, styles=styles).plan(plan.config)
        return replace(made, config=plan.config)

    def shortened(self, shorter: nn.Module, config: Config) -> "PlannedModel":
        """The same of a copy with fewer blocks, with the styles that the whole model has under ``config``."""
        if self.styles is not None or not needs_search(config):
            return replace(self, model=shorter)
        return replace(self, model=shorter, styles=_present(shorter, self._search(config).patterns))

    def called(self) -> set[int] | None:
        """Ids of the modules that a forward on shapes calls; None if it needs values."""
        program = Program(self.model, self.loss_fn, Precision(None, None), torch.device("meta"))
        called = CalledModules()
        try:
            with torch.no_grad(), calls_of_modules(called):
                program.planned_loss(self.row)
        except Exception as error:  # the model's own code may raise anything on shapes
            if is_own_mistake(error):
                raise
            return None
        return called.all

    def workload(self, config: Config) -> Workload:
        """The workload, from one forward on shapes."""
        return traced_workload(self._program(config), self.row)

    def _search(self, config: Config) -> FoundStyles:
        """The tensor plan of a configuration; rows of a microbatch and the rest of the grid do not change it."""
        program, parallel = self._program(config), config.parallel
        key = config.tp, parallel.sequence_parallel, parallel.tensor_proof, program.precision
        if key not in self.searched:
            example = self._example(config)
            shared = self.programs.setdefault((program.precision, config.micro), SearchedProgram(program, example))
            self.searched[key] = search_styles(config, PlanRequest(program, example, searched=shared))
        return self.searched[key]

    def _example(self, config: Config) -> Batch:
        """One microbatch."""
        return map_tensors(self.row, lambda row: row.new_empty((config.micro, *row.shape[1:])))

    def _program(self, config: Config) -> Program:
        return Program(self.model, self.loss_fn, make_precision(config, self.model), torch.device("cpu"))


def build_model(source: ModelSource) -> PlannedModel:
    """Build the model on the meta device.

    Raises:
        PlanError: it cannot be built there; says why.
    """
    if source.decoder is not None:
        return _decoder(source.decoder)
    name = source.function or str(source.folder)
    with torch.device("meta"):
        made = build_named(name, partial(_made, source), " on the meta device", _ON_META)
    model, rows, loss_fn = model_and_rows(name, made)
    _switch_cache_off(model)
    row = _token_row(model, source, name) if rows is None else map_tensors(rows, lambda rows: rows[:1].to("meta"))
    family = getattr(getattr(model, "config", None), "model_type", None)
    wide = source.shape is not None and source.shape.width >= WIDE
    styles = _present(model, KNOWN_STYLES["llama"]) if wide and family in LIKE_LLAMA else None
    return PlannedModel(model=model, loss_fn=loss_fn, row=row, styles=styles)


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
    if config is None or not isinstance(context, int):
        raise PlanError(f"MODEL {name} does not say what its rows are; return (module, rows) from it.")
    return _tokens(context)


def _made(source: ModelSource) -> Any:
    """What the function returns, or the model of the folder."""
    return find_function(source.function)() if source.function else _of_folder(source.folder or Path())


def _of_folder(folder: Path) -> nn.Module:
    config = import_transformers().AutoConfig.from_pretrained(folder)
    kind = huggingface_class(config)
    if kind is None:
        raise PlanError(
            f"MODEL {folder} is a {config.model_type}, for which transformers has no class of its own; give "
            "module:function that returns the module."
        )
    model: nn.Module = kind(config).train()
    return model


def _switch_cache_off(model: nn.Module) -> None:
    """As in training: a block is not alone with a cache of keys and values, so no tensor plan would be found for it."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False


def _present(model: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """The styles whose patterns match a module or a parameter."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {pattern: style for pattern, style in styles.items() if any(fnmatchcase(name, pattern) for name in names)}
