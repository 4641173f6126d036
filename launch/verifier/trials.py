"""Trials of ``trine verify``: a model that can be built repeatedly, with rows for it, and configurations.

as asked         dp2 x tp2 x pp2, ZeRO 2, full recomputation     off by 3e-2
tensor off       dp2 x  1  x pp2, ZeRO 2, full recomputation     equal          <- the cause
pipeline off     dp2 x tp2 x  1 , ZeRO 2, full recomputation     off by 3e-2
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.config import ActivationCheckpointingConfig as Recomputation
from engine.config import (
    Bf16Config,
    CheckpointConfig,
    Config,
    Fp16Config,
    IntegrityConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    TorchAutocastConfig,
    WatchdogConfig,
    ZeroConfig,
    load_config,
)
from engine.config.rules import FrozenMap
from engine.errors import PlanError
from engine.launch.verifier.script_run import ScriptCall
from engine.models.named_model import (
    build_named,
    find_function,
    has_language_model_head,
    huggingface_class,
    import_transformers,
    model_and_rows,
)
from engine.parallel.data_digits import expert_problem
from engine.program.batch import Batch, map_tensors
from engine.program.loss import LossFunction
from engine.verify import Parity, verify

TOKENS = 16
"""Tokens per row of a trial."""
SEED = 7
"""Random seed of the token rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model that ``trine verify`` tests, with a loss function and rows of data for it."""

    words: str
    """Description of the model for the first line of output."""
    build: Callable[[], nn.Module]
    loss_fn: LossFunction | None
    rows: Batch
    """Pool of rows for batches, along the first dim of each tensor."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of :func:`engine.verify.verify`."""

    def batches(self, count: int, size: int) -> list[Batch]:
        """Draws ``count`` batches of ``size`` random rows from ``rows``, the same in every call."""
        chance = torch.Generator().manual_seed(SEED)
        rows = len(next(leaf for leaf in tree_leaves(self.rows) if isinstance(leaf, Tensor)))
        draws = [torch.randint(rows, (size,), generator=chance) for _ in range(count)]
        return [map_tensors(self.rows, lambda tensor, draw=draw: tensor[draw]) for draw in draws]  # type: ignore[misc]


def of_function(name: str) -> Subject:
    """Returns the test subject for ``name``, a ``module:function`` that builds a model in its full size.

    The function returns model, (model, rows) or (model, rows, loss_fn); ``rows`` is a batch of two rows or more.
    Without rows, random tokens are used if the model's ``config`` has a ``vocab_size``.

    Raises:
        PlanError: there is no function, it raises, it returns no model or fewer than two rows, or there are neither
            rows nor a ``vocab_size``.
    """
    function = find_function(name)

    def parts() -> tuple[nn.Module, Any, Any]:
        return model_and_rows(name, build_named(name, function))

    model, rows, loss_fn = parts()
    if rows is None:
        rows = _tokens_for(model, name, "return (module, rows), with a batch of at least two rows of inputs as rows")
    _check_rows(rows, name)
    elements = sum(parameter.numel() for parameter in model.parameters())
    words = f"{name}, {type(model).__name__} unchanged, {elements:,} parameters"
    return Subject(words=words, build=lambda: parts()[0], loss_fn=loss_fn, rows=rows)


def of_folder(folder: Path, tensor: int, layers: int) -> Subject:
    """Returns the test subject for a Hugging Face folder or ``config.json``: a small model with random weights.

    ``tensor``: number of tensor ranks. ``layers``: maximum number of blocks.

    Raises:
        PlanError: the model cannot be built at this size.
    """
    transformers = import_transformers()
    config = build_named(str(folder), lambda: transformers.AutoConfig.from_pretrained(folder))
    transformers.logging.set_verbosity_error()
    kind = huggingface_class(config)
    if not has_language_model_head(kind, config):
        named = f", {kind.__name__}," if kind is not None else ""
        raise PlanError(
            f"MODEL {folder} is a {config.model_type}{named} without a language model head, so it computes no "
            "loss; give module:function that returns (module, rows, loss_fn)."
        )
    return _shrunk(kind, config, str(folder), (tensor, layers))


def _shrunk(kind: Any, config: Any, name: str, sizes: tuple[int, int]) -> Subject:
    """Builds a class of transformers at toy widths; ``sizes``: tensor ranks and blocks."""
    shrink(config, *sizes)

    def build() -> nn.Module:
        made: nn.Module = kind(config)
        return made.train().float()

    elements = sum(parameter.numel() for parameter in build_named(name, build).parameters())
    words = f"{config.model_type} of {name}, shrunk to {elements:,} parameters, without dropout"
    return Subject(words=words, build=build, loss_fn=None, rows=_token_rows(VOCABULARY))


def _tokens_for(model: nn.Module, name: str, remedy: str) -> Batch:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise PlanError(
            f"MODEL {name} gives no batch of inputs, and its module has no config.vocab_size to draw tokens from; "
            f"{remedy}."
        )
    return _token_rows(vocabulary)


def _token_rows(vocabulary: int) -> Batch:
    ids = torch.randint(vocabulary, (64, TOKENS), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "labels": ids}


def _check_rows(rows: Batch, name: str) -> None:
    tensors = [leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(lengths) != 1 or lengths <= {0, 1}:
        raise PlanError(
            f"MODEL {name} returns rows whose tensors have the sizes {sorted(lengths)} in dim 0, but trine verify "
            "needs the same size, at least 2, in every tensor; return (module, rows) with two rows or more."
        )
    if any(tensor.is_meta for tensor in tensors):
        raise PlanError(
            f"MODEL {name} returns rows on the meta device, but trine verify trains on their values; create the rows "
            "on the CPU, and return (module, rows)."
        )


def of_call(call: ScriptCall, name: str, sizes: tuple[int, int]) -> Subject:
    """Returns the test subject for ``call``, a recorded call of ``engine.initialize``.

    A transformers language model is replaced by a small one.

    Args:
        name: name of the model in messages.
        sizes: (number of tensor ranks, maximum number of blocks) of the small model.

    Raises:
        PlanError: building the model fails, or the script gave no batch and the model has no ``vocab_size`` for random
            tokens.
    """
    model = build_named(name, call.model) if not isinstance(call.model, nn.Module) else call.model
    config = getattr(model, "config", None)
    if hasattr(config, "model_type") and has_language_model_head(type(model), config):
        subject = _shrunk(type(model), deepcopy(config), name, sizes)
        rows = subject.rows if call.rows is None else _folded(call.rows)
    else:
        built = model.cpu()
        missing = "pass a batch of at least two rows as example_batch to engine.initialize"
        rows = call.rows if call.rows is not None else _tokens_for(model, name, missing)
        elements = sum(parameter.numel() for parameter in built.parameters())
        words = f"{type(model).__name__} of {name}, unchanged, {elements:,} parameters"
        subject = Subject(words=words, build=lambda: deepcopy(built), loss_fn=None, rows=rows)
    _check_rows(rows, name)
    return replace(subject, loss_fn=call.loss_fn, rows=rows, more=call.more)


def _folded(rows: Batch) -> Batch:
    """Returns rows for a shrunk model: few tokens, of few kinds; -100 stays."""

    def fold(tensor: Tensor) -> Tensor:
        short = tensor[:, :TOKENS] if tensor.dim() > 1 else tensor
        return short if short.is_floating_point() else torch.where(short >= 0, short % VOCABULARY, short)

    return map_tensors(rows, fold)


HEAD = 8
"""Width of an attention head in shrunk models."""
VOCABULARY, POSITIONS, WINDOW = 128, 64, 8
CHOSEN = 2
"""Maximum experts per token of shrunk models."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers")  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
          "decoder_attention_heads")  # fmt: skip
_KEYS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size", "lru_width")
_INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim",
          "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")  # fmt: skip
_OF_A_HEAD = ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "kv_channels", "qk_head_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_FIXED: Mapping[str, int] = MappingProxyType({
    "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "n_positions": POSITIONS, "n_ctx": POSITIONS,
    "max_sequence_length": POSITIONS, "q_lora_rank": 2 * HEAD, "kv_lora_rank": 2 * HEAD,
})  # fmt: skip
_MOST: Mapping[str, int] = MappingProxyType({
    "num_experts_per_tok": CHOSEN, "experts_per_token": CHOSEN, "moe_top_k": CHOSEN, "moe_topk": CHOSEN,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": WINDOW,
    "window_size": WINDOW, "attention_window": WINDOW, "num_nextn_predict_layers": 0,
})  # fmt: skip


def shrink(config: Any, tensor: int, layers: int) -> None:
    """Reduces a Hugging Face configuration in place to a small model without dropout.

    Its widths and query heads are multiples of ``tensor``, the number of tensor ranks. Settings that select code paths,
    such as activations and tied weights, stay.

    Args:
        layers: maximum number of blocks.
    """
    for name in getattr(config, "sub_configs", {}):
        if (inner := getattr(config, name, None)) is not None:
            shrink(inner, tensor, layers)
    found = _Sizes(config)
    before = found.first(_LAYERS)
    keys, heads = _heads(found, tensor)
    width = heads * HEAD
    found.set(_HEADS, heads)
    found.set(_KEYS, keys)
    found.set(_WIDTHS, width)
    found.set(_INNER, 2 * width)
    found.set(_OF_A_HEAD, HEAD)
    found.set(_LAYERS, min(before or layers, layers))
    found.set(_EXPERTS, max(2 * CHOSEN, tensor))
    for name, value in _FIXED.items():
        found.set((name,), value)
    for name, value in _MOST.items():
        found.set((name,), value, most=True)
    _shorten_lists(config, before, min(before or layers, layers))
    _drop_nothing(config)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(token := getattr(config, name, None), int) and token >= VOCABULARY:
            setattr(config, name, VOCABULARY - 1)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0


class _Sizes:
    """Numbers of a configuration; a name that is absent or None there is not changed."""

    def __init__(self, config: Any) -> None:
        self._config, self._known = config, set(config.to_dict())

    def first(self, names: tuple[str, ...]) -> int | None:
        values = (getattr(self._config, name, None) for name in names if name in self._known)
        return next((value for value in values if _is_number(value)), None)

    def set(self, names: tuple[str, ...], value: int, most: bool = False) -> None:
        """Sets the names that exist; ``most``: only if they are larger."""
        for name in names:
            before: Any = getattr(self._config, name, None) if name in self._known else None
            if _is_number(before) and not (most and before <= value):
                setattr(self._config, name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _heads(found: _Sizes, tensor: int) -> tuple[int, int]:
    """Returns (key heads, query heads): equal if they were equal, else two query heads for each key head."""
    heads, keys = found.first(_HEADS) or 1, found.first(_KEYS)
    least = max(2, tensor)
    if keys is None or keys == heads:
        return least, least
    return (1, least) if keys == 1 else (least, 2 * least)


def _drop_nothing(config: Any) -> None:
    """Switches dropout off, because its masks inside sharded layers differ from the masks of one process."""
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _shorten_lists(config: Any, before: int | None, layers: int) -> None:
    """Shortens lists with an entry for each layer by the removed layers."""
    for name, value in config.to_dict().items():
        if isinstance(value, list) and before is not None and len(value) == before and before > layers:
            setattr(config, name, value[:layers])


Chosen = TypeVar("Chosen", bound=OptimizerConfig)

MOST_DATA = 2
"""Maximum number of data ranks in a trial."""
MICROBATCHES = 4
CLIP = 0.05
"""Clipping norm, below the norm of every gradient, for configurations that clip."""
EPS = 1e-5
"""Adam's eps in trials; a smaller one turns rounding errors of zero gradients into full steps."""


def small_config(config: Config) -> Config:
    """Returns a small version of ``config`` in fp32, for a comparison with plain training.

    It has microbatches of one row, and at most 4 data ranks. Checkpoints, monitors and watchdogs are off.
    """
    optimizer = config.optimizer
    if optimizer is not None:
        before = tuple(_steadied(entry) for entry in optimizer.before)
        optimizer = replace(_steadied(optimizer), before=before)
    plain = replace(
        config,
        bf16=Bf16Config(), fp16=Fp16Config(), torch_autocast=TorchAutocastConfig(), communication_data_type=None,
        optimizer=optimizer, checkpoint=CheckpointConfig(), monitor=MonitorConfig(), watchdog=WatchdogConfig(),
        integrity=IntegrityConfig(), gradient_clipping=min(config.gradient_clipping, CLIP), notes=(),
    )  # fmt: skip
    grouped = config.shards < config.dp
    plain = replace(
        plain, zero_optimization=replace(plain.zero_optimization, shard_size=MOST_DATA if grouped else None)
    )
    data = 2 * MOST_DATA if grouped else min(config.dp, MOST_DATA)
    if config.parallel.expert > 1:
        plain = replace(plain, parallel=replace(plain.parallel, expert=MOST_DATA))
    return _resized(plain, plain.parallel, (data, config.tp, config.pp))


def _steadied(optimizer: Chosen) -> Chosen:
    """Returns the optimizer with settings that do not amplify rounding errors."""
    steady = {"eps": EPS} if {"betas", "eps"} <= optimizer.params.keys() else {}
    exact = {"ns_dtype": "fp32"} if "ns_dtype" in optimizer.params else {}
    return replace(optimizer, params=FrozenMap({**optimizer.params, **steady, **exact}))


def switched_off(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (configuration key, copy of ``config`` without it) for each optional feature of ``config``."""
    parallel, (dp, tp, pp) = config.parallel, (config.dp, config.tp, config.pp)
    parts = replace(parallel, sequence_parallel=False, sequence_parallel_regather=False)
    line = replace(parallel, schedule="1f1b", virtual_stages=1)
    if tp > 1:
        yield "parallel.tensor", _resized(config, replace(parts, tensor_plan="auto"), (dp, 1, pp))
    if tp > 1 and parallel.sequence_parallel:
        yield "parallel.sequence_parallel", replace(config, parallel=parts)
    if pp > 1:
        yield "parallel.pipeline", _resized(config, replace(line, split="auto"), (dp, tp, 1))
    if pp > 1 and parallel.schedule != "1f1b":
        yield "parallel.schedule", replace(config, parallel=line)
    if parallel.order != ParallelConfig().order:
        yield "parallel.order", replace(config, parallel=replace(parallel, order=ParallelConfig().order))
    if parallel.expert > 1:
        yield "parallel.expert", replace(config, parallel=replace(parallel, expert=1))
    if dp > 1:
        yield "parallel.data", _resized(config, parallel, (1, tp, pp))
    if config.zero_optimization.stage:
        yield "zero_optimization", replace(config, zero_optimization=ZeroConfig())
    if config.activation_checkpointing != Recomputation():
        yield "activation_checkpointing", replace(config, activation_checkpointing=Recomputation())
    if config.kernels != "reference":
        yield "kernels", replace(config, kernels="reference")
    if config.compile:
        yield "compile", replace(config, compile=False)


def train_both_ways(subject: Subject, config: Config, steps: int) -> Parity:
    """Trains the model of ``subject`` for ``steps`` steps on the grid of ``config`` and in plain torch; returns
    the comparison of losses, gradient norms and final weights.

    The ranks of the grid are threads.

    Raises:
        EngineError: the same error that :func:`engine.initialize` or a step raises.
    """
    assert config.train_batch_size is not None
    batches = subject.batches(steps, config.train_batch_size)
    ranks = config.grid(0).world_size
    found = verify(subject.build, config, batches, subject.loss_fn, threads=ranks, **subject.more)
    assert found is not None  # thread ranks all return a result
    return found


def _resized(config: Config, parallel: ParallelConfig, grid: tuple[int, int, int]) -> Config:
    """Returns the configuration on a grid of data x tensor x pipeline ranks, with fitting batch sizes."""
    zero = config.zero_optimization
    node, shards = zero.zero_hpz_partition_size, zero.shard_size
    near = node if isinstance(node, str) or not node or (shards or grid[0]) % node == 0 else 1
    fits = shards is not None and grid[0] % shards == 0
    experts = parallel.expert if expert_problem(parallel.expert, grid[0], 1, shards if fits else None) is None else 1
    sized = replace(
        config,
        zero_optimization=replace(zero, zero_hpz_partition_size=near, shard_size=shards if fits else None),
        parallel=replace(parallel, data=grid[0], tensor=grid[1], pipeline=grid[2], expert=experts),
        gradient_accumulation_steps=max(MICROBATCHES, 2 * config.pp),
        train_batch_size=None,
        train_micro_batch_size_per_gpu=1,
    )
    return load_config(sized, prod(grid))
