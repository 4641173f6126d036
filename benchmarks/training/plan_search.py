"""The search for tensor plans of real models: processor seconds, peak memory and the plan, on one core.

    python -m benchmarks plan_search [--models llama-70b,gpt-oss-120b] [--full llama-1b] [--write-figures]

Models have the published sizes of their configurations and no content (device meta). Every search runs in a process of
its own, whose imports alone take about 0.4 GiB. ``--full`` names the models that are also searched with all numbers of
their weights drawn, which takes tens of gigabytes for blocks of a billion parameters.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from benchmarks.harness.figures import record_cells, render
from engine.config import load_config
from engine.planning.tensor_plan_search import find_styles
from engine.precision.dtypes import make_precision
from engine.program.program import Program

RANKS = 8
CORNER = f"model, tensor {RANKS}"
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType({
    "llama-1b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    }),
    "llama-70b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8,
    }),
    "llama-405b": ("Llama", {
        "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8,
    }),
    "mixtral-8x22b": ("Mixtral", {
        "vocab_size": 32768, "hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56,
        "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    }),
    "gpt-oss-120b": ("GptOss", {"num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek-v3": ("DeepseekV3", {}),
})  # fmt: skip
"""Class and sizes; what is not given is the default of the configuration's class, which has the published size."""


def main(arguments: Sequence[str]) -> int:
    """Search each model in a process of its own, and show the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plan_search", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="some of " + ",".join(MODELS))
    parser.add_argument("--full", default="llama-1b", help="models that are also searched with all numbers drawn")
    parser.add_argument("--one", help="search this model here and print the result")
    parser.add_argument("--all-numbers", action="store_true", help="with --one: draw all numbers")
    parser.add_argument("--write-figures", action="store_true", help="keep the table in docs/figures and show it")
    asked = parser.parse_args(arguments)
    if asked.one:
        print(json.dumps(_search(asked.one, low_rank=not asked.all_numbers)))
        return 0
    cells: dict[tuple[str, str], str] = {}
    for name in asked.models.split(","):
        cells |= _cells(name, _apart(name), _apart(name, "--all-numbers") if name in asked.full.split(",") else None)
        print(name, *(f"{column} {text};" for (row, column), text in cells.items() if row == name), flush=True)
    rows = {name: {column: text for (row, column), text in cells.items() if row == name} for name, _ in cells}
    columns = list(dict.fromkeys(column for _, column in cells))
    print(render({"corner": CORNER, "columns": columns, "rows": rows}))
    if asked.write_figures:
        record_cells("plan-search", CORNER, cells)
    return 0


def _apart(name: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "plan_search", "--one", name, *options]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def _cells(name: str, found: dict[str, Any], full: dict[str, Any] | None) -> dict[tuple[str, str], str]:
    same = "" if full is None else ", same plan" if full["patterns"] == found["patterns"] else ", OTHER PLAN"
    texts = {
        "parameters": f"{found['parameters'] / 1e9:.1f} B",
        "largest block": f"{found['largest'] / 1e9:.2f} B",
        "search and proof": f"{found['seconds']:.1f} s",
        "peak memory": f"{found['bytes'] / 2**30:.1f} GiB",
        "all numbers drawn": "" if full is None else f"{full['seconds']:.1f} s, {full['bytes'] / 2**30:.1f} GiB{same}",
        "how its groups of layers run": found["plan"],
    }
    return {(name, column): text for column, text in texts.items()}


def _search(name: str, low_rank: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = _build(name)
    parallel = {"data": 1, "tensor": RANKS}
    config = load_config({"train_batch_size": 8, "parallel": parallel, "optimizer": {"type": "AdamW"}}, RANKS)
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    ids = torch.randint(0, 1000, (2, 128), generator=torch.Generator().manual_seed(0))
    begun = time.process_time()
    found = find_styles(program, {"input_ids": ids, "labels": ids}, RANKS, low_rank=low_rank)
    seconds = time.process_time() - begun
    hows = Counter(f"{reason.style} {reason.how}" for reason in found.reasons)
    blocks = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return {
        "seconds": seconds,
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "largest": max(sum(p.numel() for p in block.parameters()) for blocks_ in blocks for block in blocks_),
        "patterns": dict(found.patterns),
        "plan": "; ".join(hows),
    }


def _build(name: str) -> nn.Module:
    import transformers

    kind, sizes = MODELS[name]
    configuration = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False)
    build: Callable[..., nn.Module] = getattr(transformers, f"{kind}ForCausalLM")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return build(configuration)
    finally:
        torch.set_default_dtype(before)
