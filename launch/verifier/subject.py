"""What ``trine verify`` trains: a model that can be built again and again, and batches for it."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.errors import PlanError
from engine.launch.verifier.script_run import ScriptCall
from engine.launch.verifier.tiny_config import VOCABULARY, shrink
from engine.models.huggingface_class import has_language_model_head, huggingface_class, import_transformers
from engine.program.batch import Batch, map_tensors
from engine.program.loss import LossFunction
from engine.program.module_function import build_named, find_function, model_and_rows

TOKENS = 16
"""Of a row."""
SEED = 7
"""Of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model under test."""

    words: str
    """What it is, for the first line."""
    build: Callable[[], nn.Module]
    loss_fn: LossFunction | None
    rows: Batch
    """Some rows, from which batches are drawn; each tensor has them in its first dim."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of :func:`engine.verify.verify`."""

    def batches(self, count: int, size: int) -> list[Batch]:
        """``count`` batches of ``size`` rows, drawn with replacement, the same on every call."""
        chance = torch.Generator().manual_seed(SEED)
        rows = len(next(leaf for leaf in tree_leaves(self.rows) if isinstance(leaf, Tensor)))
        draws = [torch.randint(rows, (size,), generator=chance) for _ in range(count)]
        return [map_tensors(self.rows, lambda tensor, draw=draw: tensor[draw]) for draw in draws]  # type: ignore[misc]


def of_function(name: str) -> Subject:
    """``module:function``, which returns the model, or (model, rows), or (model, rows, loss_fn); built as it is.

    Raises:
        PlanError: there is no such function, it raises, or it gives no model or no rows.
    """
    function = find_function(name)

    def parts() -> tuple[nn.Module, Any, Any]:
        return model_and_rows(name, build_named(name, function))

    model, rows, loss_fn = parts()
    if rows is None:
        rows = _tokens_for(model, name)
    _check_rows(rows, name)
    elements = sum(parameter.numel() for parameter in model.parameters())
    words = f"{name}, {type(model).__name__} as it is, {elements:,} parameters"
    return Subject(words=words, build=lambda: parts()[0], loss_fn=loss_fn, rows=rows)


def of_folder(folder: Path, tensor: int, layers: int) -> Subject:
    """A model of a Hugging Face folder or its ``config.json``, shrunk; its weights are not read.

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
            f"MODEL {folder} is a {config.model_type}{named} without a language model head, so it has no loss of its "
            "own; give module:function that returns (module, rows, loss_fn)."
        )
    return _shrunk(kind, config, str(folder), (tensor, layers))


def _shrunk(kind: Any, config: Any, name: str, sizes: tuple[int, int]) -> Subject:
    """A class of transformers at toy widths; ``sizes``: tensor ranks and blocks."""
    shrink(config, *sizes)

    def build() -> nn.Module:
        made: nn.Module = kind(config)
        return made.train().float()

    elements = sum(parameter.numel() for parameter in build_named(name, build).parameters())
    words = f"{config.model_type} of {name}, shrunk to {elements:,} parameters, without dropout"
    return Subject(words=words, build=build, loss_fn=None, rows=_token_rows(VOCABULARY))


def _tokens_for(model: nn.Module, name: str) -> Batch:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        raise PlanError(f"MODEL {name} does not say what its rows are; return (module, some rows of a batch) from it.")
    return _token_rows(vocabulary)


def _token_rows(vocabulary: int) -> Batch:
    ids = torch.randint(vocabulary, (64, TOKENS), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "labels": ids}


def _check_rows(rows: Batch, name: str) -> None:
    tensors = [leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)]
    lengths = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(lengths) != 1 or lengths <= {0, 1} or any(tensor.is_meta for tensor in tensors):
        raise PlanError(
            f"MODEL {name} gives first dims of {sorted(lengths)}; return at least two rows with content, as many in "
            "every tensor."
        )


def of_call(call: ScriptCall, name: str, sizes: tuple[int, int]) -> Subject:
    """What a script gave to ``engine.initialize``: a model of transformers shrunk, any other one as it is.

    Args:
        sizes: tensor ranks and blocks of a model that is shrunk.

    Raises:
        PlanError: the model cannot be built again, or nothing says what its rows are.
    """
    model = build_named(name, call.model) if not isinstance(call.model, nn.Module) else call.model
    config = getattr(model, "config", None)
    if hasattr(config, "model_type") and has_language_model_head(type(model), config):
        subject = _shrunk(type(model), deepcopy(config), name, sizes)
        rows = subject.rows if call.rows is None else _folded(call.rows)
    else:
        built = model.cpu()
        rows = call.rows if call.rows is not None else _tokens_for(model, name)
        elements = sum(parameter.numel() for parameter in built.parameters())
        words = f"{type(model).__name__} of {name}, as it is, {elements:,} parameters"
        subject = Subject(words=words, build=lambda: deepcopy(built), loss_fn=None, rows=rows)
    _check_rows(rows, name)
    return replace(subject, loss_fn=call.loss_fn, rows=rows, more=call.more)


def _folded(rows: Batch) -> Batch:
    """Rows for a model that has shrunk: few tokens, of few kinds; -100 stays."""

    def fold(tensor: Tensor) -> Tensor:
        short = tensor[:, :TOKENS] if tensor.dim() > 1 else tensor
        return short if short.is_floating_point() else torch.where(short >= 0, short % VOCABULARY, short)

    return map_tensors(rows, fold)
