"""Runs benchmarks by name: ``python -m benchmarks NAME``.

    python -m benchmarks --list                          what there is
    python -m benchmarks zero --stages 2,3 --rounds 3    one benchmark with its own options, which zero -h lists
    python -m benchmarks step zero pipeline --rounds 3 --peers ddp,fsdp2 --out runs/benchmarks
    python -m benchmarks all                             each in turn, with its defaults

Exit code 1 when a benchmark exceeds a limit or finds a wrong loss.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Module with ``main(arguments)`` that runs a benchmark, and the shared options that it accepts."""

    module: str
    about: str
    options: frozenset[str]


STEPS = frozenset({"rounds", "peers", "out", "write_figures"})
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "step": Benchmark("training.step", "one training step beside plain torch, DDP, DTensor, pipelining", STEPS),
        "zero": Benchmark("training.zero", "every ZeRO stage beside DDP, FSDP2, DeepSpeed", STEPS),
        "pipeline": Benchmark("training.pipeline", "schedules beside pipelining and DeepSpeed's PipelineModule", STEPS),
        "tensor": Benchmark("training.tensor", "tensor ranks beside parallelize_module", STEPS),
        "expert": Benchmark(
            "training.expert", "experts on several ranks beside all_to_all_single, tensor ranks, data ranks, DeepSpeed",
            frozenset({"rounds", "write_figures"}),
        ),
        "context": Benchmark(
            "training.context", "sequences over several ranks beside torch, DeepSpeed's Ulysses and data ranks",
            frozenset({"rounds", "write_figures"}),
        ),
        "outer": Benchmark(
            "outer.command", "sites of an outer loop on real text: loss against pushed bytes",
            frozenset({"write_figures"}),
        ),
        "outer_rules": Benchmark(
            "outer.rules", "real sites of an outer loop: a slow site, a slow link, and the loss of each rule",
            frozenset({"write_figures"}),
        ),
        "service": Benchmark(
            "service.command", "clients of the training service: latencies beside a bare echo, lost updates",
            frozenset({"write_figures"}),
        ),
        "weights_out": Benchmark(
            "outer.read_weights", "training steps while weights are published and read, by cause of the time",
            frozenset({"rounds", "write_figures"}),
        ),
        "sweep": Benchmark(
            "outer.sweep_steps", "successive halving beside trials that all train to their ends",
            frozenset({"write_figures"}),
        ),
        "host_time": Benchmark(
            "training.host_time", "host time that an engine adds to a block, beside torch's own wrappers",
            frozenset({"rounds", "write_figures"}),
        ),
        "sleeping_blocks": Benchmark(
            "training.sleeping_blocks", "the timeline of a real pipeline beside the predicted one",
            frozenset({"write_figures"}),
        ),
        "generate": Benchmark(
            "training.generate", "generation with a cache on one rank beside transformers", frozenset({"rounds"})
        ),
        "matrix_rounds": Benchmark(
            "training.matrix_rounds", "updates of whole matrices with their exchange beside them, or not",
            frozenset({"rounds"}),
        ),
        "uneven_work": Benchmark(
            "training.uneven_work", "steps of data ranks with different numbers of microbatches",
            frozenset({"rounds"}),
        ),
        "plan_search": Benchmark(
            "planning.plan_search", "the search for tensor plans of models of up to 671 B parameters",
            frozenset({"write_figures"}),
        ),
        "integrity": Benchmark(
            "training.integrity", "a step with checks against silent corruption",
            frozenset({"rounds", "write_figures"}),
        ),
        "checkpoint": Benchmark(
            "checkpoint.command", "a checkpoint beside torch.save, DCP, safetensors and the bare disk",
            frozenset({"rounds", "out", "write_figures"}),
        ),
        "offload": Benchmark(
            "offload.command", "updates on the host beside a copy, torch and DeepSpeed; steps with an offload",
            frozenset({"rounds", "peers", "write_figures"}),
        ),
        "memory_limit": Benchmark(
            "offload.memory_limit", "training from disk under a limit on memory that the state exceeds four times",
            frozenset({"write_figures"}),
        ),
        "scaling": Benchmark(
            "scaling.command", "steps of every grid over nodes beside their prediction; started by a launcher",
            frozenset({"rounds", "out"}),
        ),
        "scale": Benchmark(
            "scale.command", "what grows with worlds of up to 16,384 ranks, replayed one rank at a time",
            frozenset({"write_figures"}),
        ),
        "planning": Benchmark(
            "planning.command", "the cost model of trine plan beside published figures",
            frozenset({"write_figures"}),
        ),
        "kernels": Benchmark("kernels.command", "every kernel on one GPU beside its peers", frozenset({"out"})),
        "overlap": Benchmark(
            "overlap.command", "products that communicate beside collectives; one GPU, several, or none",
            frozenset({"out"}),
        ),
        "first_contact": Benchmark(
            "first_contact.command", "the first minutes on a GPU: correctness, then speed", frozenset({"out"})
        ),
        "figures": Benchmark(
            "harness.renewal", "figures of the documents by age, with the command that renews each", frozenset()
        ),
        "gpu_step": Benchmark("gpu_step.command", "steps of 1 B models on one GPU beside peers", frozenset({"out"})),
    }
)  # fmt: skip


def _parse(command: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What things cost, measured.",
        epilog="Options of a single benchmark: python -m benchmarks NAME -h",
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="of --list, or all")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--rounds", help="fresh processes each; more rounds, less noise")
    parser.add_argument("--peers", help="with whom to compare: some of ddp,dtensor,pipelining,fsdp2,deepspeed, or none")
    parser.add_argument("--out", help="folder for all samples")
    parser.add_argument("--write-figures", action="store_true", help="keep the tables in docs/figures and show them")
    arguments = parser.parse_args(command)
    if unknown := [name for name in arguments.names if name not in (*BENCHMARKS, "all")]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are: {', '.join(BENCHMARKS)}")
    names = list(BENCHMARKS) if "all" in arguments.names else arguments.names
    return arguments, names


def shared_options(arguments: argparse.Namespace, name: str) -> list[str]:
    """Returns the shared options that benchmark ``name`` accepts as its command line; prints the others."""
    given = {key: value for key, value in vars(arguments).items() if key not in ("names", "list") and value}
    for key in sorted(set(given) - BENCHMARKS[name].options):
        print(f"{name} has no --{key.replace('_', '-')}, it runs without.", flush=True)
    told: list[str] = []
    for key in sorted(set(given) & BENCHMARKS[name].options):
        told += [f"--{key.replace('_', '-')}", *([] if given[key] is True else [given[key]])]
    return told


def run(name: str, command: Sequence[str]) -> int:
    """Runs one benchmark with its own ``command`` line; returns its exit code."""
    return int(import_module(f"benchmarks.{BENCHMARKS[name].module}").main(command))


def main(command: Sequence[str]) -> int:
    """Runs the named benchmarks; returns the largest exit code."""
    if command and command[0] in BENCHMARKS and not (len(command) > 1 and command[1] in BENCHMARKS):
        return run(command[0], command[1:])
    arguments, names = _parse(command)
    if arguments.list or not names:
        print("\n".join(f"{name:16} {one.about}" for name, one in BENCHMARKS.items()))
        return 0
    codes = []
    for name in names:
        print(f"\n== {name}", flush=True)
        codes.append(run(name, shared_options(arguments, name)))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
