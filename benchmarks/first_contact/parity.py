"""Compares losses of engine modes on one rank, and of grids of several ranks on one device, with plain torch."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from benchmarks.first_contact.processes import MARK
from benchmarks.first_contact.telling import Finding, device_kind, each, on_gpu

Config = dict[str, Any]
VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 512, 128, 2, 64, 8
EXACT = frozenset(
    {"fp32", "zero1", "zero2 microbatch", "zero3", "accumulate clip", "offload", "offload zero3", "recompute full",
     "recompute selective", "activations on host", "gpt2 dropout"}
)  # fmt: skip
"""Cases in fp32, with results that may differ by rounding only."""
BOUNDS = {True: (5e-6, 5e-5, 1e-4), False: (1e-6, 1e-5, 2e-5)}
"""Maximum deviations of losses, norms and weights, with and without a GPU."""
LOOSE = (1e-2, 5e-2, 1.0)
"""Maximum deviations of losses, norms and weights in 16 bits."""
OWN_RULES = ("adamw8bit", "bf16 no master")
"""Cases without an equivalent in plain torch, for which the loss must decrease."""


def changes_of(name: str) -> Config:
    """Returns the configuration for the case ``name``, as changes to the default."""
    bf16, host = {"bf16": {"enabled": True}}, {"device": "cpu"}
    triton = "triton" if on_gpu() else "reference"
    adamw = {"type": "AdamW", "params": {"lr": 3e-3}}
    matrices = {"match": "*.weight", "type": "Muon", "params": {"lr": 0.02}}
    muon = [{"match": ["*embed*", "*head*"]} | adamw, matrices, adamw]
    changes: dict[str, Config] = {
        "bf16": bf16,
        "bf16 kernels reference": bf16 | {"kernels": "reference"},
        "bf16 kernels triton": bf16 | {"kernels": triton},
        "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "zero1": {"zero_optimization": {"stage": 1}},
        "zero2 microbatch": {"zero_optimization": {"stage": 2, "reduce": "microbatch"}},
        "zero3": {"zero_optimization": {"stage": 3}},
        "accumulate clip": {"train_micro_batch_size_per_gpu": 1},
        "offload": {"zero_optimization": {"stage": 1, "offload_optimizer": host}},
        "offload zero3": {"zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host}},
        "recompute full": {"activation_checkpointing": {"mode": "full"}},
        "recompute selective": {"activation_checkpointing": {"mode": "selective"}},
        "activations on host": {"activation_checkpointing": {"mode": "offload"}},
        "adamw8bit": {"optimizer": {"type": "AdamW8bit", "params": {"lr": 3e-3}}},
        "bf16 no master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        "muon": {"optimizer": muon},
        "autocast": {"torch_autocast": {"enabled": True}},
        "compile": {"compile": True},
    }
    return changes.get(name, {})


def make_config(**changes: Any) -> Config:
    """Returns the common configuration with ``changes``."""
    adamw = {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}}
    sizes = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 2}
    return {**sizes, "zero_optimization": {"stage": 0}, "optimizer": adamw, "gradient_clipping": 0.25} | changes


def make_llama() -> nn.Module:
    """Builds a small random Llama model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
        )
    )  # fmt: skip


def make_mixtral() -> nn.Module:
    """Builds a small random Mixtral model of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(7)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=128,
            use_cache=False,
        )
    )  # fmt: skip


def make_batches(steps: int = 3) -> list[dict[str, torch.Tensor]]:
    """Draws the global batches of ``steps`` steps."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(steps)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def judged(found: Any, bounds: tuple[float, float, float]) -> Finding:
    """Returns a loss comparison with its verdict as a JSON object."""
    figures = {"loss": f"{found.loss:.1e}", "norm": f"{found.norm:.1e}", "weight": f"{found.weight:.1e}"}
    return {"ok": found.holds(*bounds), **figures}


def run_parity(names: Sequence[str]) -> None:
    """Trains every case in ``names`` and prints its result."""
    torch.backends.cuda.matmul.allow_tf32 = False
    each(names, _case)


def _case(name: str) -> Finding:
    from engine.verify import verify

    if name == "checkpoint":
        return _checkpoint()
    if name == "quantized":
        return _quantized()
    if name in OWN_RULES:
        return _learns(make_llama(), make_config(**changes_of(name)), 6)
    build, batches = make_llama, make_batches()
    if name == "gpt2 dropout":
        from tests import models

        build, batches = models.gpt2, models.batches_for("gpt2", ROWS, 3)
    found = verify(build, make_config(**changes_of(name)), batches)
    return judged(found, BOUNDS[on_gpu()] if name in EXACT else LOOSE)


def _learns(model: nn.Module, config: Config, steps: int) -> Finding:
    import engine

    batch = make_batches(1)[0]
    with engine.initialize(model, config) as eng:
        losses = [float(eng.train_batch(batch).loss) for _ in range(steps)]
    return {"ok": losses[-1] < losses[0], "losses": [round(loss, 4) for loss in losses]}


def _checkpoint() -> Finding:
    """Compare losses of a run that goes on from a checkpoint with those of one that never stopped, to the bit."""
    import engine

    config, batches = make_config(bf16={"enabled": True}, zero_optimization={"stage": 1}), make_batches(4)
    with tempfile.TemporaryDirectory() as folder:
        with engine.initialize(make_llama(), config) as eng:
            for batch in batches[:2]:
                eng.train_batch(batch)
            eng.save_checkpoint(folder)
            ahead = [float(eng.train_batch(batch).loss) for batch in batches[2:]]
        with engine.initialize(make_llama(), config) as eng:
            eng.load_checkpoint(folder)
            again = [float(eng.train_batch(batch).loss) for batch in batches[2:]]
    return {"ok": ahead == again, "ahead": ahead, "again": again}


def _quantized() -> Finding:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return {"ok": None, "why": "needs peft"}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(make_llama(), lora)
    config = make_config(bf16={"enabled": True}, quantize_frozen={"dtype": "nf4"}, checkpoint={"frozen": False})
    return _learns(model, config, 4)


def grid_config(name: str) -> Config:
    """Parses a configuration from a case such as "dp2 tp2 zero1 sequence 1f1b"."""
    axes = {"dp": "data", "cp": "context", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
    words = name.split()
    parallel: Config = {axes[word[:2]]: int(word[2:]) for word in words if word[:2] in axes}
    if "sequence" in words:
        parallel["sequence_parallel"] = True
    if kinds := [word for word in words if word in ("1f1b", "zb-h1")]:
        parallel["schedule"] = kinds[0]
    stage = next((int(word[4:]) for word in words if word.startswith("zero")), 0)
    return make_config(parallel=parallel, zero_optimization={"stage": stage}, train_micro_batch_size_per_gpu=1)


def run_ranks(names: Sequence[str]) -> None:
    """Trains every grid in ``names`` with thread ranks on one device, and prints the result."""
    from engine.verify import verify

    torch.backends.cuda.matmul.allow_tf32 = False

    def body(name: str) -> Finding:
        config = grid_config(name)
        grid = config["parallel"]
        size = prod(grid.get(axis, 1) for axis in ("data", "context", "tensor", "pipeline"))
        build = make_mixtral if "expert" in grid else make_llama
        found = verify(build, config, make_batches(), threads=size, device=device_kind())
        return judged(found, BOUNDS[True])

    each(names, body)


def run_gloo(names: Sequence[str]) -> None:
    """Trains every grid in ``names`` with two gloo processes on one device, and prints the result."""

    def body(name: str) -> Finding:
        own = ("-m", "benchmarks.first_contact.child", "gloo-rank", name)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        with subprocess.Popen([*torchrun, *own], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            try:
                said, _ = run.communicate(timeout=45 if on_gpu() else 150)
            except subprocess.TimeoutExpired:
                run.terminate()  # torchrun ends its workers
                said, _ = run.communicate(timeout=20)
        print(said[-6000:])
        line = next((line for line in said.splitlines() if line.lstrip().startswith(MARK)), None)
        if line is None:
            errors = [line for line in said.splitlines() if "Error" in line] or [""]
            return {"ok": False, "code": run.returncode, "error": errors[-1][:300]}
        found: Finding = json.loads(line.lstrip()[len(MARK) :])
        return found

    each(names, body)


def run_gloo_rank(names: Sequence[str]) -> None:
    """Trains as one of two ranks; rank 0 prints the comparison, indented so that the parent ignores it."""
    import torch.distributed as dist

    from engine.verify import verify

    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("gloo")
    found = verify(make_llama, grid_config(names[0]), make_batches(2))
    if found is not None:
        print(f"\n {MARK}{json.dumps(judged(found, BOUNDS[True]))}", flush=True)
