"""Command ``trine init MODEL``: a script and a configuration to start from, for a Hugging Face folder or a module."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from string import Template
from typing import Any

from engine.errors import ConfigError

SCRIPT, CONFIG = "train.py", "engine.json"

_CONFIG = Template("""{
  // rows of a step, over all data ranks; the rest is accumulated
  "train_batch_size": 8,
  "train_micro_batch_size_per_gpu": 1,
  // "auto" takes the remaining ranks; trine plan predicts memory and time of a grid
  "parallel": {"data": "auto", "tensor": 1, "pipeline": 1},
  // 1 shards the optimizer state over the data ranks, 2 the gradients too, 3 the parameters too
  "zero_optimization": {"stage": 1},
  // true on GPUs
  "bf16": {"enabled": false},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 20, "total_num_steps": 1000}},
  "gradient_clipping": 1.0,
  "checkpoint": {"folder": $runs, "every": 100}
}
""")

_HEAD = Template('''"""Train $name.

    torchrun --nproc_per_node 2 train.py$files [KEY=VALUE ...]

The same command continues from the last checkpoint, on any number of processes. engine.json defines grid, batch and
optimizer; an argument such as optimizer.params.lr=1e-4 changes one key of it.
"""

import sys
from pathlib import Path

''')

_FOLDER = Template("""import engine
import torch
from engine.data import Sampler
from transformers import $imported

FOLDER, CONTEXT, STEPS = $folder, $context, 1000

words = sys.argv[1:]
config = engine.load_config(Path(__file__).with_name("engine.json"), overrides=[word for word in words if "=" in word])
text = "\\n".join(Path(word).read_text(encoding="utf-8") for word in words if "=" not in word)
$tokens
if len(tokens) < CONTEXT:
    sys.exit(f"{len(tokens)} tokens are less than a row of {CONTEXT}; name larger text files")
rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def build():
    return $made


def batch(indices):
    return {"input_ids": rows[indices], "labels": rows[indices]}  # the model shifts the labels

""")

_FUNCTION = Template("""import engine
import torch
from engine.data import Sampler
${found}from $module import $function as make_model

STEPS = 1000

config = engine.load_config(Path(__file__).with_name("engine.json"), overrides=sys.argv[1:])
$parts

def batch(indices):
    return torch.utils._pytree.tree_map(lambda tensor: tensor[indices], rows)

""")

_MODEL_ALONE = '''

def all_rows():
    """The training rows: a dict or a tuple of tensors, one row each along the first dim, as forward takes them."""
    raise SystemExit("train.py: write all_rows(), which returns your training rows")


build, rows, loss_fn = make_model, all_rows(), None  # loss_fn(output, batch), if forward returns no loss
'''

_WITH_ROWS = """

def build():
    return make_model()[0]


_, rows, *rest = make_model()
loss_fn = rest[0] if rest else None
"""

_LOOP = Template("""
with engine.initialize(build, config$loss) as eng:
    count = len($counted)
    sampler = Sampler(count, eng.config.train_batch_size, eng.config.seed, eng.grid.row_rank, eng.grid.row_ranks)
    eng.register_for_checkpointing(data=sampler)
    eng.load_checkpoint(missing_ok=True)
    while eng.step_count < STEPS:
        report = eng.train_batch(batch(torch.from_numpy(next(sampler))))
        if eng.grid.rank == 0:
            print(f"step {report.step} loss {report.loss:.6f}")
    $saved
""")


def add_init_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine init`` to the parser ``command``."""
    command.add_argument("model", metavar="MODEL", help=(
        "Hugging Face folder; or module:function that returns model, (model, rows) or (model, rows, loss_fn)"
    ))  # fmt: skip
    command.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="folder to write into (default: .)")
    command.set_defaults(run=write_starter)


def write_starter(options: Namespace) -> None:
    """Writes a starter ``train.py`` and ``engine.json`` for the user's model, and prints the next commands.

    Raises:
        ConfigError, PlanError: one of the files exists already, or the model does not exist.
    """
    for name in (SCRIPT, CONFIG):
        if (options.out / name).exists():
            raise ConfigError(
                f"{options.out / name} exists and is not overwritten; remove it, or pass another folder with --out."
            )
    folder = Path(options.model)
    if ":" in options.model and not folder.exists():
        name, script = _for_function(options.model, options.out)
        given = ""
    else:
        name, script = _for_folder(folder)
        given = " FILE.txt"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / SCRIPT).write_text(script, encoding="utf-8")
    (options.out / CONFIG).write_text(_CONFIG.substitute(runs=json.dumps(f"runs/{name}")), encoding="utf-8")
    print(f"{options.out / SCRIPT} and {options.out / CONFIG} are written; continue with:")
    print(f"  trine check {options.out / CONFIG} --world 2")
    print(f"  torchrun --nproc_per_node 2 {options.out / SCRIPT}{given}")


def _for_folder(folder: Path) -> tuple[str, str]:
    """Returns name of the run and script for a folder of a Hugging Face model."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json; give the folder of a Hugging Face model, or module:function.")
    from engine.models.named_model import has_language_model_head, huggingface_class, import_transformers

    config = import_transformers().AutoConfig.from_pretrained(folder)
    kind = huggingface_class(config)
    if kind is None or not has_language_model_head(kind, config) or config.is_encoder_decoder:
        raise ConfigError(
            f"{folder} is a {config.model_type}, which is not a causal language model; give a module:function that "
            "returns (model, rows, loss_fn)."
        )
    name = folder.resolve().name
    words = _folder_words(folder, config, kind.__name__)
    head = _HEAD.substitute(name=f"{name} on text files", files=" FILE.txt ...")
    return name, head + _FOLDER.substitute(words) + _LOOP.substitute(words, loss="", counted="rows")


def _folder_words(folder: Path, config: Any, kind: str) -> dict[str, Any]:
    """Returns the parts of the script that depend on the folder: its tokenizer and its weights."""
    tokenizer = any(folder.glob("tokenizer*")) or any(folder.glob("*.model")) or (folder / "vocab.json").is_file()
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if not tokenizer and config.vocab_size < 256:
        raise ConfigError(
            f"{folder} has no tokenizer, so the script would read text as bytes, but the model has only "
            f"{config.vocab_size} tokens for 256 byte values; put tokenizer files into the folder, or give as MODEL a "
            "module:function that returns (model, rows)."
        )
    read = "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n" + 'tokens = torch.tensor(tokenizer(text)["input_ids"])'
    as_bytes = "tokens = torch.tensor(list(text.encode()))  # the folder has no tokenizer: tokens are bytes"
    imported = [*["AutoConfig"] * (not weights), *["AutoTokenizer"] * tokenizer, kind]
    saved = '\n    if eng.grid.rank == 0:\n        tokenizer.save_pretrained("trained")' if tokenizer else ""
    return {
        "folder": _literal(folder.resolve()),
        "imported": ", ".join(imported),
        "context": min(256, getattr(config, "max_position_embeddings", None) or 256),
        "tokens": read if tokenizer else as_bytes,
        "made": f"{kind}.from_pretrained(FOLDER).train()" if weights else f"{kind}(AutoConfig.from_pretrained(FOLDER))",
        "saved": f'eng.save_pretrained("trained"){saved}',
    }


def _for_function(name: str, out: Path) -> tuple[str, str]:
    """Returns name of the run and script for a function that builds the model."""
    from engine.models.named_model import build_named, find_function, model_and_rows

    module, _, function = name.partition(":")
    _, rows, _ = model_and_rows(name, build_named(name, find_function(name)))
    parts = _MODEL_ALONE if rows is None else _WITH_ROWS
    found = _found_from(module, out)
    script = _FUNCTION.substitute(module=module, function=function, parts=parts, found=found)
    counted = "torch.utils._pytree.tree_leaves(rows)[0]"
    loop = _LOOP.substitute(loss=", loss_fn=loss_fn", counted=counted, saved="eng.save_checkpoint()")
    return function, _HEAD.substitute(name=name, files="") + script + loop


def _found_from(module: str, out: Path) -> str:
    """Returns the line by which a script in another folder finds a module of this one."""
    here, file = Path.cwd(), sys.modules[module].__file__
    if out.resolve() == here or file is None or not Path(file).resolve().is_relative_to(here):
        return ""
    return f"\nsys.path.insert(0, {_literal(here)})  # the folder of {module}\n"


def _literal(path: Path) -> str:
    """Returns a path as a literal of Python in double quotes. Python reads no pairs of surrogates, as JSON writes them;
    bytes that are no text are escaped.
    """
    return json.dumps(str(path), ensure_ascii=False).encode(errors="backslashreplace").decode()
