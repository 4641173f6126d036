"""Kernels that ``trine compile`` notes beside those that an engine launches.

    python -m tests.launch.planner.launched_kernels [CASE ..]

The engine trains on the CPU with content in all tensors, and its launches go as far as Triton's key. Must run in a
process that does not interpret. Prints JSON: by case, what only one of them has, and how many both have.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.build import forward_changes
from engine.build.request import Request
from engine.kernels import dispatch
from engine.kernels.gpu import launch_shapes, norm
from engine.kernels.gpu.launch_shapes import GPUS
from engine.kernels.gpu.warm_cache import NotedKernel, noted_launches
from engine.launch.planner.compile_command import StepSubject, note_subject
from engine.launch.planner.planned_model import PlannedModel
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.program.batch import map_tensors

GPU = GPUS["h100"]
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "decoder fp32": ("decoder", {}),
    "llama bf16": ("llama", {"bf16": {"enabled": True}}),
    "llama bf16 without master": ("llama", {"bf16": {"enabled": True, "bf16_master_weights_and_grads": False}}),
    "gpt2 bf16, recomputed": ("gpt2", {"bf16": {"enabled": True}, "activation_checkpointing": {"mode": "full"}}),
    "llama bf16, ZeRO 3": ("llama", {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}),
    "llama bf16, offloaded": (
        "llama",
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    "llama bf16, tp2": ("llama", {"bf16": {"enabled": True}, "parallel": {"tensor": 2, "data": 1}}),
    "llama bf16, pp2, zb-h1": (
        "llama",
        {"bf16": {"enabled": True}, "parallel": {"pipeline": 2, "data": 1, "schedule": "zb-h1"}},
    ),
    "gpt2 fp32, dp2 x tp2, ZeRO 1": (
        "gpt2",
        {"parallel": {"tensor": 2, "data": 2}, "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1},
    ),
    "llama fp16, 8-bit": ("llama", {"fp16": {"enabled": True}, "optimizer": {"type": "AdamW8bit", "params": {}}}),
}


def main(names: list[str]) -> None:
    """Compare the cases."""
    found = {}
    for name in names or CASES:
        kind, settings = CASES[name]
        config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW} | settings
        config |= {"kernels": "triton", "gradient_clipping": 1.0}
        config = with_plan(kind, config)
        noted = set(note_subject(subject_of(kind, config), "H100", GPU))
        launched = set(launched_by_engine(kind, config))
        found[name] = {
            "noted alone": [_told(kernel) for kernel in noted - launched],
            "launched alone": [_told(kernel) for kernel in launched - noted],
            "both": sorted(kernel.name for kernel in noted & launched),
        }
    print(json.dumps(found))


def build(kind: str) -> tuple[nn.Module, Any]:
    """Return a model and its loss function."""
    torch.manual_seed(1)
    if kind == "decoder":
        return Decoder(DecoderConfig(vocabulary=64, layers=2, width=64, heads=4, context=32)), loss_sum
    import transformers

    made: nn.Module
    if kind == "gpt2":
        gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=32, use_cache=False)
        made = transformers.GPT2LMHeadModel(gpt2)
    else:
        llama = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=96,
            use_cache=False,
        )  # fmt: skip
        made = transformers.LlamaForCausalLM(llama)
    return made.train(), None


def rows(count: int) -> dict[str, torch.Tensor]:
    """Return a batch."""
    ids = torch.randint(64, (count, 32), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids.clone()}


def subject_of(kind: str, config: dict[str, Any]) -> StepSubject:
    """Return what ``trine compile`` is given."""
    model, loss_fn = build(kind)
    row = map_tensors(rows(1), lambda tensor: tensor.to("meta"))
    planned = PlannedModel(model=model, loss_fn=loss_fn, row=row, styles=None)
    return StepSubject(planned, engine.load_config(config, ranks_of(config)), Request(loss_fn))


def with_plan(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with its tensor plan: kernels that write nothing prove none."""
    subject = subject_of(kind, config)
    tensor = subject.planned.plan(subject.config).tensor
    known = {} if tensor is None else {"tensor_plan": dict(tensor.patterns), "verify_plan": False}
    return config | {"parallel": config.get("parallel", {}) | known}


def launched_by_engine(kind: str, config: dict[str, Any]) -> list[NotedKernel]:
    """Return what an engine launches in two steps, on all of its ranks, which are threads."""

    def train(world: World) -> None:
        model, loss_fn = models[world.rank]
        eng = engine.initialize(model, config, loss_fn=loss_fn, example_batch=rows(2), world=world)
        for _ in range(2):
            eng.train_batch(rows(4 // eng.grid.dp))
        eng.close()

    ranks = ranks_of(config)
    models = [build(kind) for _ in range(ranks)]
    with _everywhere(), noted_launches(GPU) as found:
        run_thread_ranks(ranks, train)
    return list(found)


def ranks_of(config: Mapping[str, Any]) -> int:
    """Return the number of ranks of a configuration."""
    return prod(size for size in config.get("parallel", {}).values() if type(size) is int)


class _Zeros:
    """The module torch, whose memory without content has zeros."""

    empty = staticmethod(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def _everywhere() -> Iterator[None]:
    """Inside, kernels fit tensors of the CPU; they write nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (dispatch, forward_changes):
            patch.setattr(module, "runs_triton", lambda device: True)
        patch.setattr(launch_shapes, "gpu_shape", lambda device: GPU)  # in threads too
        patch.setattr(norm, "torch", _Zeros())  # the norm of gradients ends a step that has none
        yield


def _told(kernel: NotedKernel) -> str:
    return f"{kernel.name} {json.loads(kernel.specialization)['key']}"


if __name__ == "__main__":
    main(sys.argv[1:])
