"""One process of a part of the first contact: ``python -m benchmarks.first_contact.child PART [CASE ..]``."""

import sys
from collections.abc import Sequence


def main(command: Sequence[str]) -> int:
    """Runs the part in this process, and prints its results."""
    task, names = command[0], command[1:]
    if task == "facts":
        from benchmarks.first_contact.facts import run_facts

        run_facts(names)
    elif task == "step":
        from benchmarks.first_contact.step import run_step

        run_step(names[0])
    else:
        from benchmarks.first_contact.parity import run_gloo, run_gloo_rank, run_parity, run_ranks

        {"parity": run_parity, "ranks": run_ranks, "gloo": run_gloo, "gloo-rank": run_gloo_rank}[task](names)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
