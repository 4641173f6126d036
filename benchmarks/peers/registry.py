"""Trainer class of each mode, imported only on the ranks that use it: imports count as their start-up."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType

from benchmarks.peers.workload import Mode, Trainer, Workload

TRAINERS: Mapping[str, str] = MappingProxyType(
    {
        "plain": "loop:Plain",
        "ddp": "loop:Ddp",
        "dtensor": "dtensor:DecoderPeer",
        "dtensor llama": "dtensor:LlamaPeer",
        "dtensor fused": "dtensor:FusedPeer",
        "pipelining": "pipelining:PipeliningPeer",
        "fsdp2": "fsdp2:Fsdp2Peer",
        "context_parallel": "sequence_ranks:TorchContext",
        "deepspeed": "deepspeed:DeepSpeedPeer",
        "deepspeed context": "sequence_ranks:Ulysses",
        "deepspeed expert": "deepspeed:DeepSpeedExperts",
        "deepspeed pipeline": "deepspeed_pipeline:DeepSpeedPipeline",
        "trine": "trine:Trine",
        "trine, empty launches": "empty_launches:EmptyLaunches",
        "trine, collectives alone": "bare_collectives:BareCollectives",
        "trine, dispatch": "expert_rows:DispatchedRows",
        "rows": "expert_rows:ExchangedRows",
    }
)
"""Class of each kind of trainer ("module:class"), also by kind and model or axis."""


def make_trainer(mode: Mode, workload: Workload) -> Trainer:
    """Builds one rank of ``mode`` in a running process group."""
    workload = replace(workload, model=mode.model or workload.model)
    names = (f"{mode.kind} {workload.model}", f"{mode.kind} {mode.axis}", mode.kind)
    module, name = next(TRAINERS[key] for key in names if key in TRAINERS).split(":")
    make: Callable[[Mode, Workload], Trainer] = getattr(import_module(f"benchmarks.peers.{module}"), name)
    return make(mode, workload)
