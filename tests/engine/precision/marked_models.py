"""The models of transformers that mark modules as fp32, small and without memory, found in the installed package."""

import contextlib
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

MARKS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
_MARKED = re.compile(r"_keep_in_fp32_modules(_strict)?\s*=\s*[\[({]\s*[\"']")
_DEPTHS = re.compile(r"num_(hidden_|decoder_|encoder_)?layers|n_layers?|depth|(en|de)coder_layers")
_BY_LAYER = re.compile(r"(mlp_)?layer_types|layers_block_type")


def families() -> dict[str, list[type[PreTrainedModel]]]:
    """Family -> its models whose class has a mark."""
    found: dict[str, list[type[PreTrainedModel]]] = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if not any(mark in file.read_text(encoding="utf-8") for mark in MARKS):
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for value in vars(module).values():
            ours = (
                isinstance(value, type) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
            )
            if ours and any(getattr(value, mark) for mark in MARKS):
                found.setdefault(file.parent.name, []).append(value)
    return found


def names_of_families() -> list[str]:
    """The same names, read from the text of the package without an import of the models."""
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if _MARKED.search(file.read_text(encoding="utf-8"))})


def build(models: list[type[PreTrainedModel]], dtype: torch.dtype) -> PreTrainedModel:
    """The first model of a family that its default configuration builds, with few layers, on the meta device."""
    problem: Exception | None = None
    for model in sorted(models, key=lambda cls: "For" not in cls.__name__):
        if model.__name__.lower().endswith("pretrainedmodel"):
            continue
        for few in (True, False):
            try:
                with _default(dtype), torch.device("meta"):
                    return model(_small(cast(Any, model).config_class(), few))
            except Exception as error:
                problem = error
    raise AssertionError(f"no model of {models[0].__module__} is built from its default configuration") from problem


def _small(config: Any, few: bool) -> Any:
    """The configuration with at most four layers if ``few``, and with experts where it leaves their number out."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _small(value, few)
        elif few and isinstance(value, int) and _DEPTHS.fullmatch(name):
            setattr(config, name, min(value, 4))
        elif few and isinstance(value, list) and _BY_LAYER.fullmatch(name):
            setattr(config, name, value[:4])
        elif name in ("n_routed_experts", "n_shared_experts") and value is None:
            setattr(config, name, 1)
    return config


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before, level = torch.get_default_dtype(), logging.root.manager.disable
    torch.set_default_dtype(dtype)
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        logging.disable(level)
