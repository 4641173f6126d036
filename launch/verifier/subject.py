"""What ``trine verify`` trains: a model that can be built again and again, and batches for it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.errors import EngineError, PlanError, first_line
from engine.launch.verifier.tiny_config import VOCABULARY, shrink
from engine.program.batch import Batch, map_tensors
from engine.program.loss import LossFunction
from engine.program.module_function import find_function

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

    def parts() -> tuple[Any, Any, Any]:
        made = _guarded(name, function)
        given = made if isinstance(made, tuple) else (made,)
        model, rows, loss_fn = (*given, None, None)[:3]
        return model, rows, loss_fn

    model, rows, loss_fn = parts()
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"MODEL {name} gives a {type(model).__name__}; return an nn.Module, or (module, rows, loss_fn)."
        )
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
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, logging
    except ImportError:
        raise PlanError(
            "transformers is not installed, which builds Hugging Face models; run: pip install transformers."
        ) from None
    config = _guarded(str(folder), lambda: AutoConfig.from_pretrained(folder))
    shrink(config, tensor, layers)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    encodes = not getattr(config, "is_decoder", False)  # an encoder can be made a decoder, and is both then
    heads = (*[AutoModelForMaskedLM] * encodes, AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    auto = next((head for head in heads if type(config) in (head._model_mapping or ())), None)
    if auto is None:
        raise PlanError(
            f"MODEL {folder} is a {config.model_type} without a language model head, so it has no loss of its own; "
            "give module:function that returns (module, rows, loss_fn)."
        )

    def build() -> nn.Module:
        made: nn.Module = auto.from_config(config)  # type: ignore[no-untyped-call]
        return made.train().float()

    elements = sum(parameter.numel() for parameter in _guarded(str(folder), build).parameters())
    words = f"{config.model_type} of {folder}, shrunk to {elements:,} parameters, without dropout"
    return Subject(words=words, build=build, loss_fn=None, rows=_token_rows(VOCABULARY))


def _guarded(name: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except EngineError:
        raise
    except Exception as error:
        raise PlanError(
            f"MODEL {name} cannot be built ({type(error).__name__}: {first_line(error)}); give one that builds, or a "
            "module:function that builds a small one."
        ) from error


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
