"""Request of ``trine plan``: the model, the machine, the batch. Read and checked without torch."""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config import load_config, load_raw
from engine.config.config_file import OVERRIDES_HELP, is_override
from engine.errors import ConfigError, GridError
from engine.planning.cost_model.hardware import GpuSpec, known_gpus, load_gpu
from engine.planning.cost_model.workload import SIZES, DecoderShape, decoder_shape_of, is_model_config

STEP_TOKENS = 1 << 22
"""Tokens per step if rows are not specified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Source of the model for a plan: exactly one of a Hugging Face folder, a function, or the built-in decoder's
    sizes.
    """

    folder: Path | None = None
    """Hugging Face folder with ``config.json``, or a configuration file of any name."""
    function: str | None = None
    """``module:function`` that builds the model."""
    decoder: DecoderShape | None = None
    """Sizes of the built-in decoder."""
    shape: DecoderShape | None = None
    """Sizes of the model, if known without a build."""
    context: int | None = None
    """Tokens per row, if specified."""
    words: str = ""
    """Name of the model in the report."""
    positions: int | None = None
    """Positions that the configuration of the model declares; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAsked:
    """Parsed options of one ``trine plan`` command."""

    model: ModelSource
    world: int
    node: int
    """Number of GPUs in a node."""
    gpu: GpuSpec
    config: Mapping[str, Any] | None
    rows: int | None
    """Rows per step; None: by the configuration, or for ``STEP_TOKENS`` tokens."""
    dollars: float | None
    """Price of a GPU hour in dollars; None: unknown."""
    counts: bool
    """True if activations are counted in a run on shapes, where the model allows it."""


def add_plan_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine plan`` to the parser ``command``."""
    command.add_argument("model", nargs="?", metavar="MODEL", help=(
        "Hugging Face folder or config.json, or module:function; default: the built-in decoder of the sizes below"
    ))  # fmt: skip
    command.add_argument("config", nargs="?", metavar="CONFIG", help=(
        "configuration of the run; default: plan the fastest layout that fits"
    ))  # fmt: skip
    command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    command.add_argument("--world", type=int, help="number of GPUs (processes)")
    command.add_argument(
        "--nodes", metavar="NxG", help="nodes x GPUs of a node, such as 16x8 (default: the GPU's usual node)"
    )
    command.add_argument("--gpu", default="h100", help=f"{', '.join(known_gpus())}, or a JSON file (default h100)")
    command.add_argument("--memory", type=float, metavar="GIB", help="memory of a GPU in GiB (default: from --gpu)")
    command.add_argument("--batch", type=int, metavar="ROWS", help="rows of a step, of all ranks")
    command.add_argument("--price", type=float, metavar="DOLLARS", help="dollars per GPU hour")
    add_sizes(command)
    command.add_argument("--search", action="store_true", help="rank all grids x ZeRO x schedules x microbatches")
    command.add_argument("--longest", action="store_true", help="find the longest row that fits, and its layout")
    command.add_argument("--top", type=int, default=4, help="layouts that a search plans completely (default 4)")
    command.add_argument("--out", type=Path, metavar="FILE", help="write the planned JSON configuration")
    command.add_argument("--estimate", action="store_true", help=(
        "estimate activations; counting them on shapes takes minutes for hundreds of modules"
    ))  # fmt: skip
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--calibrate", type=Path, metavar="FILE", help=(
        "measure matrix products, attention and memory on this machine's GPU, and write a file for --gpu"
    ))  # fmt: skip
    command.add_argument("--links", type=Path, metavar="FILE", help=(
        "with --calibrate: the links of a job, as trine doctor --json FILE measured them"
    ))  # fmt: skip


def add_sizes(command: ArgumentParser) -> None:
    """Adds the options for the sizes of the built-in decoder, such as ``--layers``."""
    sizes = command.add_argument_group("sizes of the built-in decoder; --context also sets the row length of any model")
    for name, text in _SIZES.items():
        sizes.add_argument(f"--{name}", type=int, help=text)


_SIZES = {
    "layers": "blocks (default 8)",
    "width": "width between blocks (default 256)",
    "heads": "attention heads (default 4)",
    "context": "tokens of a row (default 128)",
    "vocabulary": "tokens of the vocabulary (default 256)",
}
_DEFAULTS = {"layers": 8, "width": 256, "heads": 4, "context": 128, "vocabulary": 256}


def read_request(options: Namespace) -> PlanAsked:
    """Parses and checks the options of ``trine plan``, and reads the files that they name.

    Raises:
        ConfigError, GridError: an input does not exist or does not fit the others.
    """
    overrides = [word for word in (options.model, options.config, *options.overrides) if word and is_override(word)]
    model, config = (None if word and is_override(word) else word for word in (options.model, options.config))
    if model is not None and config is None and _is_run_config(model):
        model, config = None, model  # trine plan config.json: the built-in decoder
    if overrides and config is None:
        raise ConfigError(f"{overrides[0]} changes a configuration, but none is given; give CONFIG before it.")
    settings = None if config is None else load_raw(config, overrides)
    gpu = load_gpu(options.gpu)
    if options.memory is not None:
        if not 1 <= options.memory <= 4096:
            raise ConfigError(f"--memory {options.memory:g}: give the GiB of a GPU, from 1 to 4096.")
        gpu = replace(gpu, memory_bytes=options.memory * 2**30)
    known = None if settings is None else load_config(settings, options.world).parallel.gpus_per_node
    world, node = _sizes(options.world, options.nodes, known or int(gpu.gpus_per_node))
    for flag in ("batch", "price", "top"):
        if (value := getattr(options, flag)) is not None and value <= 0:
            raise ConfigError(f"--{flag} {value:g} is not above 0; give a number above 0, or leave --{flag} out.")
    if options.batch is not None:
        _check_rows(options, settings, world)
    return PlanAsked(
        model=_model(model, options),
        world=world,
        node=node,
        gpu=gpu,
        config=settings,
        rows=options.batch,
        dollars=options.price,
        counts=not options.estimate,
    )


def _check_rows(options: Namespace, settings: Mapping[str, Any] | None, world: int) -> None:
    """Refuses ``--batch`` where the configuration or ``--longest`` determines the rows of a step."""
    if options.longest:
        raise ConfigError("--batch is given, but --longest plans one row for each data rank; leave one of them out.")
    given = None if settings is None or options.search else load_config(settings, world).train_batch_size
    if given not in (None, options.batch):
        raise ConfigError(
            f"--batch {options.batch} is given, but a step of the configuration has {given} rows; set train_batch_size "
            "in it, leave --batch out, or add --search."
        )


def _is_run_config(name: str) -> bool:
    path = Path(name)
    return path.is_file() and (
        path.suffix in (".toml", ".yaml", ".yml") or (path.suffix == ".json" and not is_model_config(_json(path)))
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}); give an intact folder or file.") from None


def _sizes(world: int | None, nodes: str | None, usual: int) -> tuple[int, int]:
    """Returns the number of GPUs, and the GPUs of a node."""
    if nodes is not None:
        read = re.fullmatch(r"([1-9]\d*)[x*]([1-9]\d*)", nodes)
        if read is None:
            raise GridError(f"--nodes {nodes}: it is not nodes x GPUs of a node; write it as 16x8.")
        count, usual = int(read[1]), int(read[2])
        if world is not None and world != count * usual:
            raise GridError(
                f"--world {world} is not --nodes {nodes} = {count * usual} GPUs; give one of them, or equal ones."
            )
        world = count * usual
    if world is None:
        raise GridError("neither --world nor --nodes is given, but a plan needs the number of GPUs; give --world N.")
    if world < 1:
        raise GridError(f"--world {world}: a plan needs at least 1 GPU; give such a number.")
    if world > usual and world % usual:
        raise GridError(
            f"--world {world} does not fill nodes of {usual} GPUs; give a multiple of {usual}, or other --nodes NxG."
        )
    return world, min(usual, world)


def _model(name: str | None, options: Namespace) -> ModelSource:
    given = {size: getattr(options, size) for size in _SIZES}
    for size, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{size} {value}: a model has at least 1; give such a number.")
    if name is None:
        sizes = {size: _DEFAULTS[size] if value is None else value for size, value in given.items()}
        if sizes["width"] % sizes["heads"]:
            raise ConfigError(
                f"--width {sizes['width']} is not divisible by --heads {sizes['heads']}; give a multiple."
            )
        shape = DecoderShape(
            layers=sizes["layers"],
            width=sizes["width"],
            heads=sizes["heads"],
            vocabulary=sizes["vocabulary"],
            context=sizes["context"],
        )
        words = _decoder_words(shape, any(given.values()))
        return ModelSource(decoder=shape, shape=shape, context=shape.context, words=words, positions=shape.context)
    if odd := [f"--{size}" for size in _SIZES if size != "context" and given[size] is not None]:
        raise ConfigError(
            f"{', '.join(odd)} is for the built-in decoder, but MODEL is {name}; leave {', '.join(odd)} or MODEL out."
        )
    path = Path(name)
    if path.is_dir() or path.suffix == ".json":
        return _from_folder(path, given["context"])
    if re.fullmatch(r"[\w.]+:\w+", name):
        return ModelSource(function=name, context=given["context"], words=name)
    raise ConfigError(
        f"MODEL {name} is neither a folder, a .json file nor module:function; give one of these, or --layers."
    )


def _decoder_words(shape: DecoderShape, sized: bool) -> str:
    """Names the built-in decoder by its sizes; ``sized``: an option sets one of them."""
    words = (
        f"the built-in decoder: {shape.layers} blocks of width {shape.width}, {shape.heads} heads, {shape.context} "
        f"tokens a row, vocabulary {shape.vocabulary:,}"
    )
    other = "no MODEL is given; for yours, give a Hugging Face folder or module:function before CONFIG"
    return words if sized else f"{words} ({other})"


def _from_folder(path: Path, context: int | None) -> ModelSource:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() and file == path:
        raise ConfigError(f"{path} does not exist; give the folder of a Hugging Face model, or its config.json.")
    if not file.is_file():
        raise ConfigError(f"{path} has no config.json, which describes the model; give the folder of a complete model.")
    raw = _json(file)
    if not is_model_config(raw):
        raise ConfigError(
            f"{file} does not describe a model (it has no model_type); give the config.json of a Hugging Face model."
        )
    text: Mapping[str, Any] = raw.get("text_config") or raw
    shape = decoder_shape_of(text)
    declared = next((text[key] for key in SIZES["context"] if isinstance(text.get(key), int)), None)
    if shape is not None:
        shape = replace(shape, context=context or shape.context)
    return ModelSource(folder=path, shape=shape, context=context, words=str(path), positions=declared)
