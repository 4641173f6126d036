"""Rate of optimizer updates on the host, in bytes of memory a second, and the seconds of a step with an offload.

    python -m benchmarks offload [--elements 16777216] [--rounds 7] [--threads 2] [--peers deepspeed] [--write-figures]
    python -m benchmarks offload --disk FOLDER           only updates whose moments are on that disk, beside its rate

Every contender updates the same fp32 elements in the same memory by AdamW, in a new order each round; the median
counts. Bytes are the least that AdamW moves: weights, gradient and two moments read, all but the gradient written. The
upper bound is the rate of these reads and writes with sums in place of AdamW. The last rows are whole steps of the
engine with optimizer state on the "device" (also the CPU) and on the host, next to the lower bound of such a step
(``steps``) and DeepSpeed's ZeRO-Offload.
"""

import argparse
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.figures import record_cells, render_cells
from benchmarks.offload.disk import disk_cells, disk_works, host_optimizer, update
from benchmarks.offload.steps import ENGINE_BYTES, RULE_BYTES, step_cells
from benchmarks.offload.turns import Work, medians
from benchmarks.peers.zero_offload import make_cpu_adam
from engine.kernels.optim.host_update import CompileError, library, update_adam_
from engine.kernels.optim.update_rules import AdamRule

CORNER = "AdamW on the host"
BOUND = "its reads and writes alone"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks offload", description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="fp32 elements of an update")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every contender")
    parser.add_argument("--threads", type=int, default=1, help="of an update and of a step")
    parser.add_argument("--peers", default="deepspeed", help="deepspeed, or none; left out if it is not installed")
    parser.add_argument("--disk", metavar="FOLDER", help="measure updates from this disk instead")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    for name, corner, cells in _tables(asked):
        print(render_cells(corner, cells))
        if asked.write_figures:
            record_cells(name, corner, cells)
    return 0


def _tables(asked: argparse.Namespace) -> Iterator[tuple[str, str, dict[tuple[str, str], str]]]:
    """(name of the figure, corner, cells) of what was asked for."""
    if asked.disk is not None:
        with disk_works(asked.disk, asked.elements) as works:
            yield "offload-disk", "AdamW from disk", disk_cells(medians(works, asked.rounds), asked.elements)
        return
    updates = _update_cells(contenders(asked.elements, asked.peers), asked.elements, asked.rounds)
    yield "offload-update", CORNER, updates
    yield "offload-step", "optimizer state", step_cells(asked.rounds, asked.peers)


def contenders(elements: int, peers: str) -> dict[str, tuple[Work, int]]:
    """Returns one update of each contender as a function, and the bytes that it moves per element."""
    arrays = _Arrays(elements)
    source, target = torch.ones(elements), torch.zeros(elements)
    found: dict[str, tuple[Work, int]] = {"a plain copy": (partial(target.copy_, source), 8)}
    try:
        found[BOUND] = (_memory_pass(arrays), RULE_BYTES)
    except CompileError as error:
        print(f"{BOUND}: left out, since {error}")
    found |= {
        "Trine, the update": (_rule(arrays), RULE_BYTES),
        "Trine, all that a bf16 bucket takes": (partial(update, host_optimizer(elements, 1)), ENGINE_BYTES),
        "torch AdamW, fused": (_torch(arrays, {"fused": True}), RULE_BYTES),
        "torch AdamW, foreach": (_torch(arrays, {"foreach": True}), RULE_BYTES),
    }
    if "deepspeed" in peers.split(","):
        try:
            found["DeepSpeed CPUAdam"] = (make_cpu_adam(arrays.parameter, arrays.moments()), RULE_BYTES)
        except (ImportError, RuntimeError) as error:
            print(f"DeepSpeed CPUAdam is left out: {str(error).splitlines()[0]}")
    return found


class _Arrays:
    """What an update of fp32 elements reads and writes."""

    def __init__(self, elements: int) -> None:
        self.parameter = nn.Parameter(torch.randn(elements))
        self.parameter.grad = self.grads = torch.randn(elements)
        self.first, self.second = torch.zeros(elements), torch.zeros(elements)

    def moments(self) -> dict[str, Tensor]:
        """Both by torch's names."""
        return {"exp_avg": self.first, "exp_avg_sq": self.second}


def _memory_pass(arrays: _Arrays) -> Work:
    """The reads and writes of an update, which leave the arrays as they are.

    Raises:
        CompileError: there is no compiler, or nothing may be kept.
    """
    made = library(Path(__file__).with_name("memory_pass.cpp"))
    if made is None:
        raise CompileError("TRINE_CACHE is 0, so that nothing is compiled")
    run = ctypes.CDLL(str(made)).memory_pass
    tensors = (arrays.parameter, arrays.grads, arrays.first, arrays.second)
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    numbers = ctypes.c_float(0), ctypes.c_int64(arrays.grads.numel()), ctypes.c_int64(torch.get_num_threads())
    return lambda: run(*places, *numbers)


def _rule(arrays: _Arrays) -> Work:
    weights = arrays.parameter.detach()
    rule = AdamRule(1e-3, (0.9, 0.999), 1e-8, 0.1, decoupled=True)
    return lambda: update_adam_([weights], [arrays.grads], [arrays.first], [arrays.second], 3, rule)


def _torch(arrays: _Arrays, how: Mapping[str, Any]) -> Work:
    optimizer = torch.optim.AdamW([arrays.parameter], weight_decay=0.1, **how)
    optimizer.state[arrays.parameter] = {"step": torch.zeros(()), **arrays.moments()}
    return optimizer.step


def _update_cells(found: Mapping[str, tuple[Work, int]], elements: int, rounds: int) -> dict[tuple[str, str], str]:
    seconds = medians({name: work for name, (work, _) in found.items()}, rounds)
    rates = {name: size * elements / seconds[name] for name, (_, size) in found.items()}
    copy = rates["a plain copy"]
    columns: dict[str, Callable[[str], str]] = {
        "ns an element": lambda name: f"{1e9 * seconds[name] / elements:.2f}",
        "bytes an element": lambda name: str(found[name][1]),
        "GB/s": lambda name: f"{rates[name] / 1e9:.1f}",
        "of a copy": lambda name: f"{rates[name] / copy:.2f}",
    }
    if BOUND in rates:
        columns["of the bound"] = lambda name: f"{rates[name] / rates[BOUND]:.2f}"
    return {(name, column): text(name) for name in found for column, text in columns.items()}
