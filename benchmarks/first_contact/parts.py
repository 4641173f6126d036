"""List of the parts of a first contact, the most important first."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

FACTS = (
    "versions", "host", "device", "rates", "dW into fp32", "loss chunks", "attention", "what blocks the host",
)  # fmt: skip
CASES = (
    "fp32", "bf16", "bf16 kernels reference", "bf16 kernels triton", "fp16", "zero1", "zero2 microbatch", "zero3",
    "accumulate clip", "offload", "offload zero3", "recompute full", "recompute selective", "activations on host",
    "adamw8bit", "bf16 no master", "muon", "autocast", "gpt2 dropout", "checkpoint", "quantized", "compile",
)  # fmt: skip
"""Single-rank cases, each compared with plain torch or with itself."""
RANKS = (
    "dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp2 sequence", "pp2 1f1b", "pp2 zb-h1", "dp2 tp2 pp2",
    "cp2 zero1", "cp2 tp2", "dp2 ep2 zero1", "dp2 ep2 tp2",
)  # fmt: skip
GLOO = ("gloo dp2 zero0", "gloo dp2 zero1", "gloo tp2", "gloo pp2")
STEPS: Mapping[str, float] = MappingProxyType(
    {
        "engine 1b": 45, "torch 1b": 40, "engine 8b-shape": 45, "engine 1b reference": 35, "torch 8b-shape": 35,
        "engine 1b triton": 60, "engine 1b compiled": 90, "torch 1b compiled": 90,
    }
)  # fmt: skip
"""Time limits in seconds by contender and model size."""
STEPS_BEFORE_KERNELS = 3
CORRECTNESS = ("main", "torchrun", "doctor", "parity", "ranks", "gloo", "kernel tests")
"""Parts that ``--only correctness`` selects."""
SPEED = ("facts", *(f"step {name}" for name in STEPS), "kernels", "overlap")
"""Parts that ``--only speed`` selects."""
GPU_TESTS = "tests/gpu"
TINY_TESTS = "tests/kernels/optim/test_update_rules.py"
"""Test file that replaces :data:`GPU_TESTS` without a GPU."""
SLOWER_ON_CPU = 3.0
"""Factor of the time limits without a GPU."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a first contact: one process, or several in turn, with a time limit."""

    name: str
    decides: str
    seconds: float
    """Time limit of a process in seconds."""
    command: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Test cases that one process runs in turn; after a crash a new process runs the rest."""
    beside: bool = False
    """True if the part does no timing and may run concurrently with others."""
    keeps: tuple[str, ...] = ()
    """Names of files in the part's folder to retain."""


def select(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Returns the parts that ``only`` names, "correctness" and "speed" included; all if ``only`` is empty.

    Raises:
        LookupError: a name is unknown.
    """
    groups = {"correctness": CORRECTNESS, "speed": SPEED}
    wanted = [name for given in only for name in groups.get(given, (given,))]
    named = {part.name for part in parts}
    if unknown := [name for name in only if name not in groups and name not in named]:
        raise LookupError(f"no part is called {', '.join(unknown)}; there are: {', '.join([*groups, *sorted(named)])}.")
    return [part for part in parts if not only or part.name in wanted]


def make_parts(device: str, scratch: Path) -> list[Part]:
    """Returns all parts in order of importance; ``scratch``: folder for their files."""
    tiny = device == "cpu"
    steps = [_step(name, seconds) for name, seconds in list(STEPS.items())[: 2 if tiny else None]]
    first = [_own("facts", "versions, ceilings, the best attention, what blocks the host", 60, FACTS)]
    checks = [*_runs(tiny, scratch), *_checks(tiny)]
    benches = _benches(tiny, scratch)
    return [*first, *checks, *steps[:STEPS_BEFORE_KERNELS], benches[0], *steps[STEPS_BEFORE_KERNELS:], benches[1]]


def _own(name: str, decides: str, seconds: float, names: tuple[str, ...], beside: bool = False) -> Part:
    return Part(name, decides, seconds, (sys.executable, "-m", "benchmarks.first_contact.child", name), names, beside)


def _step(name: str, seconds: float) -> Part:
    command = (sys.executable, "-m", "benchmarks.first_contact.child", "step")
    return Part(f"step {name}", "MFU, host bound or not, waits, launches, memory, kernels", seconds, command, (name,))


def _runs(tiny: bool, scratch: Path) -> list[Part]:
    """Make the parts that start what a user starts."""
    sizes = ("--width", "32", "--layers", "2", "--context", "32") if tiny else ()

    def train(steps: int, sample: int, out: str) -> tuple[str, ...]:
        told = ("--steps", str(steps), "--fresh", "--sample", str(sample), *sizes, "--out", str(scratch / out))
        return ("train.py", *told)

    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1")
    doctor = (sys.executable, "-c", "from engine.launch.cli import main; raise SystemExit(main())", "doctor")
    main = (sys.executable, *train(3 if tiny else 30, 20, "train"))
    return [
        Part("main", "the main job trains here", 90, main, beside=True),
        Part("torchrun", "rendezvous, NCCL of one rank", 90, (*torchrun, *train(2, 5, "train1")), beside=True),
        Part("doctor", "the product's own examination of this machine", 40, doctor, beside=True),
    ]


def _checks(tiny: bool) -> list[Part]:
    """Make the parts that compare."""
    tests = (TINY_TESTS,) if tiny else ("-n", "4", "-p", "no:benchmark", "--durations", "10", "-m", "gpu", GPU_TESTS)
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "--maxfail", "40")
    return [
        _own("parity", "each mode computes what plain torch does", 150, CASES, beside=True),
        _own("ranks", "data, tensor and pipeline ranks as threads that share the GPU", 120, RANKS, beside=True),
        _own("gloo", "processes that share the GPU through gloo", 90, GLOO[:1] if tiny else GLOO, beside=True),
        Part(
            "kernel tests",
            "every kernel as compiled: error, bits",
            150,
            (*pytest, *tests),
            beside=True,
        ),
    ]


def _benches(tiny: bool, scratch: Path) -> tuple[Part, Part]:
    """Make the parts that are benchmarks of their own: kernels, and products that communicate."""
    bench = (sys.executable, "-m", "benchmarks")
    less = ("--device", "cpu", "--operators", "gated") if tiny else ()
    tuning = (*bench, "kernels", "--quick", "--minutes", "2.2", "--out", str(scratch / "k"), *less)
    overlap = (*bench, "overlap", "--quick", "--ranks", "2", "--minutes", "1.2", "--out", str(scratch / "o"))
    return (
        Part("kernels", "each kernel beside its peers", 150, tuning, keeps=("k/kernels.json", "k/tuned.json")),
        Part("overlap", "products that communicate, two virtual ranks", 90, overlap, keeps=("o/overlap.json",)),
    )
