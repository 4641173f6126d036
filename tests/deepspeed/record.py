"""Run the scripts with the real DeepSpeed and write what they print: ``python -m tests.deepspeed.record``.

Needs the extra bench-deepspeed. The tests compare the engine with this record.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
ADAM = {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-6, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}}

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
}  # fmt: skip


def printed(source: str, config: Mapping[str, Any], ranks: int = 2) -> list[tuple[str, float]]:
    """What rank 0 of a script prints: (word, number) of each line.

    Raises:
        RuntimeError: the script failed, with the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, settings = Path(folder, "train.py"), Path(folder, "ds_config.json")
        script.write_text(source, encoding="utf-8")
        settings.write_text(json.dumps(config), encoding="utf-8")
        launch = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--master-port=0",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--role=rank", "--local-ranks-filter=0",
            str(script), "--deepspeed", "--deepspeed_config", str(settings),
        ]  # fmt: skip
        own = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CHECKPOINTS": str(Path(folder, "saved"))}
        path = {"PYTHONPATH": os.pathsep.join((str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))}
        done = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=os.environ | own | path)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    return [(w, float(number)) for w, number in (line.split() for line in done.stdout.splitlines() if _is_pair(line))]


def _tried(source: str, config: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Twice more where DeepSpeed's processes abort at their exit, which they do at times."""
    for _ in range(2):
        with suppress(RuntimeError):
            return printed(source, config)
    return printed(source, config)


def _is_pair(line: str) -> bool:
    return line.partition(" ")[0] in ("loss", "rate", "sum", "step", "grad", "weight", "moment")


def main() -> None:
    """Record all scripts."""
    found = {
        name: _tried((HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8"), CONFIGS[name]) for name in CONFIGS
    }
    record = {"deepspeed": version("deepspeed"), "torch": version("torch"), "printed": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
