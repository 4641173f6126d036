"""Run the scripts with the real DeepSpeed and write what they print: ``python -m tests.deepspeed.record [NAME ...]``.

With names, it runs those scripts of ``CONFIGS`` alone and keeps the rest of the record; ``restated`` names the small
programs. Needs the extra bench-deepspeed. The tests compare the engine with this record.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
ADAM: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-6, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}}

BATCH: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}

CONFIGS: dict[str, dict[str, Any]] = {
    "cifar": {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "scheduler": WARMUP,
        "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
    },
    "gan": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 1},
    },
    "alexnet": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.0,
        "steps_per_print": 100,
    },
    "bert": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
    },
    "zero3": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
    "full_grad": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 2},
    },
    "gan_direct": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.0,
    },
    "preferences": {
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.1,
        "scheduler": WARMUP, "zero_optimization": {"stage": 0},
    },
    "pooler": {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    },
    "hello": {},
    "cifar_example": {},
    "offload": BATCH | {
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-6}},
        "zero_optimization": {"stage": 3},
    },
    "reward": BATCH | {"zero_optimization": {"stage": 2}},
    "chat_sft": BATCH | {"zero_optimization": {"stage": 3}},
    "autotp_patterns": {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 0.5, "optimizer": ADAM},
}  # fmt: skip

ADAMW = {"type": "AdamW", "params": ADAM["params"] | {"weight_decay": 0.1}}
RESUMED: dict[str, Any] = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "optimizer": ADAMW,
    "scheduler": WARMUP,
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}}
SHARES = {"stage": 3, "stage3_param_persistence_threshold": 0}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("checkpoint", RESUMED | {"zero_optimization": {"stage": 1}}),
    "zero2": ("checkpoint", RESUMED | {"zero_optimization": {"stage": 2}}),
    "zero3": ("checkpoint", RESUMED | {"zero_optimization": SHARES}),
    "zero3_in_parts": ("checkpoint", RESUMED | {"zero_optimization": SHARES | {"sub_group_size": 60}}),
    "round_robin": ("checkpoint", RESUMED | {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}),
    "elastic": ("checkpoint", RESUMED | {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}),
    "bf16_zero1": ("checkpoint", RESUMED | BF16 | {"zero_optimization": {"stage": 1}}),
    "bf16_zero3": ("checkpoint", RESUMED | BF16 | {"zero_optimization": SHARES}),
    "pipeline": ("pipe_checkpoint", RESUMED | {"gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}),
}  # fmt: skip
"""Checkpoints of DeepSpeed's that the tests load: the script and its configuration."""
UNIVERSAL = ("zero2", "zero3")
SAVED = HERE / "checkpoints"


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def printed(
    source: str,
    config: Mapping[str, Any],
    ranks: int = 2,
    more: Mapping[str, str] = MappingProxyType({}),
    torchrun: Sequence[str] = TORCHRUN,
) -> list[tuple[str, float]]:
    """What rank 0 of a script prints: (word, number) of each line; ``more`` is its environment.

    Raises:
        RuntimeError: the script failed, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, settings = Path(folder, "train.py"), Path(folder, "ds_config.json")
        script.write_text(source, encoding="utf-8")
        settings.write_text(json.dumps(config), encoding="utf-8")
        launch = [
            *torchrun, f"--nproc_per_node={ranks}", "--master-port=0",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--role=rank", "--local-ranks-filter=0",
            str(script), "--deepspeed", "--deepspeed_config", str(settings),
        ]  # fmt: skip
        own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CHECKPOINTS": str(Path(folder, "saved"))}
        path = {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))}
        done = subprocess.run(
            launch, capture_output=True, text=True, timeout=300, env=os.environ | own | path | dict(more)
        )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return [(word, float(number)) for word, number in map(str.split, filter(_is_pair, done.stdout.splitlines()))]


def _tried(source: str, config: Mapping[str, Any], more: Mapping[str, str]) -> list[tuple[str, float]]:
    """Twice more where DeepSpeed's processes abort at their exit, which they do at times."""
    for _ in range(2):
        with suppress(RuntimeError):
            return printed(source, config, more=more)
    return printed(source, config, more=more)


def _is_pair(line: str) -> bool:
    return line.partition(" ")[0] in ("loss", "rate", "sum", "step", "grad", "weight", "moment", "saved")


def source(name: str) -> str:
    """A script as its user has it."""
    return (HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8")


def _saved(name: str, folder: str) -> list[tuple[str, float]]:
    """Run a script that saves, and keep the files of its checkpoint."""
    script, config = CHECKPOINTS[name]
    found = _tried(source(script), config, {"CHECKPOINTS": folder})
    for path in Path(folder).glob("*/**/*.pt"):
        kept = SAVED / name / path.relative_to(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(path.read_bytes())
    (SAVED / name / "latest").write_text(Path(folder, "latest").read_text(encoding="utf-8"), encoding="utf-8")
    return found


def _make_universal(name: str) -> None:
    """Convert a kept checkpoint with DeepSpeed's tool."""
    (given,) = (SAVED / name).glob("global_step*")
    done = SAVED / f"{name}_universal" / f"{given.name}_universal"
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(given), "--output_folder", str(done)]
    subprocess.run([*tool, *folders], check=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}, capture_output=True)


def _restated() -> dict[str, Any]:
    """What the small programs give."""
    own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.deepspeed.restated"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | own)
    line = next(line for line in done.stdout.splitlines() if "RESTATED " in line)
    found: dict[str, Any] = json.loads(line.partition("RESTATED ")[2])
    return found


def add(names: Sequence[str]) -> None:
    """Record these scripts, and keep what is recorded of others."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in names:
        if name == "restated":
            record["restated"] = _restated()
        else:
            record["printed"][name] = _tried(source(name), CONFIGS[name], {})
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Record all scripts, and the checkpoints that two of them save."""
    found = {name: _tried(source(name), config, {}) for name, config in CONFIGS.items()}
    continued = {}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as folder:
            continued[name] = _saved(name, folder)
    for name in UNIVERSAL:
        _make_universal(name)
    versions = {"deepspeed": version("deepspeed"), "torch": version("torch")}
    record = versions | {"printed": found, "continued": continued, "restated": _restated()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    add(sys.argv[1:]) if sys.argv[1:] else main()
