"""Age of each figure of the documents, and the command that measures it again.

python -m benchmarks figures                         every figure, the oldest first, with its command
python -m benchmarks figures --renew parity step     run the commands of these figures
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from benchmarks.harness.figures import FOLDER, ROOT, UNKNOWN, read

_PARITY = "pytest -m long tests/engine/parity/test_{}.py --write-figures"
_PLANNING = "python -m benchmarks planning --write-figures"
_OFFLOAD = "python -m benchmarks offload --write-figures"
_SCHEDULES = "pytest tests/launch/test_schedule_command.py --write-figures"
RENEW: Mapping[str, str] = MappingProxyType(
    {
        "activation-memory": "pytest -m long tests/engine/dry_run --write-figures",
        "architectures": _PARITY.format("architectures"),
        "axes": _PARITY.format("parity_axes"),
        "checkpoint": "python -m benchmarks checkpoint --write-figures",
        "context": "python -m benchmarks context --write-figures",
        "context-families": "pytest -m long tests/parallel/context/test_context_families.py --write-figures",
        "expert-families": _PARITY.format("expert_families"),
        "expert": "python -m benchmarks expert --rounds 1 --write-figures",
        "faults": "python -m tests.faults --write-figures",
        "fewer-bits": _PARITY.format("fewer_bits_training"),
        "fewer-bits-link": "python -m tests.cluster.fewer_bits --write-figures",
        "first-contact": "python -m benchmarks first_contact --out runs/first_contact && "
        "python -m benchmarks first_contact --store runs/first_contact",
        "goodput": "python -m tests.cluster.goodput --write-figures",
        "host-time": "python -m benchmarks host_time --write-figures",
        "integrity": "pytest -m long tests/engine/integrity/test_flips.py --write-figures",
        "integrity-cost": "python -m benchmarks integrity --write-figures",
        "kernels-models": _PARITY.format("kernel_injection"),
        "model-types": _PARITY.format("transformers_types"),
        "offload-disk": "python -m benchmarks offload --disk build/moments --write-figures",
        "offload-limit": "python -m benchmarks memory_limit --write-figures",
        **dict.fromkeys(("offload-step", "offload-update"), _OFFLOAD),
        "outer": "python -m benchmarks outer --write-figures",
        "outer-rules": "python -m benchmarks outer_rules --write-figures",
        "parity": _PARITY.format("parity"),
        "parity-schedules": _PARITY.format("parity_schedules"),
        "parity-zero": _PARITY.format("parity_zero"),
        "pipeline": "python -m benchmarks pipeline --write-figures",
        "plan-search": "python -m benchmarks plan_search --write-figures",
        **dict.fromkeys(
            ("placement", "placement-stages", "plan-example", "planning", "planning-agreement", "planning-errors"),
            _PLANNING,
        ),
        **dict.fromkeys(("planning-left-out", "planning-memory"), _PLANNING),
        "planning-experts": "python -m benchmarks planning --experts --write-figures",
        "planning-search": "python -m benchmarks planning --search --write-figures",
        "protocol-defects": "pytest tests/kernels/gpu/overlap/test_protocol.py --write-figures",
        "reliability": "python -m tests.reliability --write-figures",
        "scale": "python -m benchmarks scale --write-figures",
        "scale-planning": "python -m benchmarks scale --planning --write-figures",
        **dict.fromkeys(("schedule-compare", "schedule-kinds", "schedules"), _SCHEDULES),
        "secondary-shards-link": "python -m tests.cluster.secondary_shards --write-figures",
        "shard-groups-link": "python -m tests.cluster.shard_groups --write-figures",
        "service-load": "python -m benchmarks service --write-figures",
        "soak": "python -m tests.cluster.soak --write-figures",
        "stage-messages-link": "python -m tests.cluster.stage_messages --write-figures",
        "step": "python -m benchmarks step --write-figures",
        "tensor": "python -m benchmarks tensor --models llama,fused --rounds 7 --write-figures",
        "sweep": "python -m benchmarks sweep --write-figures",
        **dict.fromkeys(("tensor-models", "tensor-unseen"), _PARITY.format("tensor_models")),
        "timeline": "python -m benchmarks sleeping_blocks --write-figures",
        "versions": "python -m tests.versions runs/versions --write-figures",
        "watchdog-cost": "python -m benchmarks step --rows watchdog --write-figures",
        "watchdog-faults": "pytest -m long tests/engine/watchdog/test_jobs.py tests/cluster/test_nodes.py "
        "--write-figures",
        "weights-out": "python -m benchmarks weights_out --write-figures",
        "weights-out-bytes": "pytest tests/engine/weights_out/test_peers.py --write-figures",
        "wire": _PARITY.format("wire_training"),
        "zero": "python -m benchmarks zero --write-figures",
    }
)
"""Command that measures each figure again, by name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists figures or renews some; returns the largest exit code of the commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--renew", nargs="+", metavar="NAME", default=[], help="measure these figures again")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.renew if name not in RENEW]:
        parser.error(f"there is no figure {', '.join(unknown)}; without --renew all are listed.")
    if not asked.renew:
        print("\n".join(by_age()))
        return 0
    return max(run(command) for command in dict.fromkeys(RENEW[name] for name in asked.renew))


def by_age() -> list[str]:
    """Returns one line per figure, the oldest first: date, name, command."""
    dates = {file.stem: str(read(file.stem).get("date") or UNKNOWN) for file in FOLDER.glob("*.json")}
    order = sorted(dates, key=lambda name: (dates[name] != UNKNOWN, dates[name], name))
    return [f"{dates[name]:12}  {name:22}  {RENEW[name]}" for name in order]


def run(command: str) -> int:
    """Runs the commands in ``command``, joined by &&, up to the first failure; returns its exit code."""
    for part in command.split(" && "):
        print(f"\n$ {part}", flush=True)
        program, *words = shlex.split(part)
        given = words if program == "python" else ["-m", program, *words]
        if code := subprocess.run([sys.executable, *given], cwd=ROOT, check=False).returncode:
            return code
    return 0
