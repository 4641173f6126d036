"""What messages of fewer bits between stages win on two nodes whose link is slow, beside what the plan's bytes say.

    python -m tests.cluster.stage_messages --write-figures

One stage a node trains a perceptron in fp32 with all forwards before all backwards (gpipe), so that the link carries
values one way, and then gradients the other way, with nothing beside them. The plan says how many bytes both stages
send less, and the rate of the link, with the headers of its packets, how many seconds that is. Exit status 1: a way is
further off than 15%.
"""

import sys
from collections.abc import Sequence
from statistics import median

from tests.cluster.network import missing
from tests.cluster.slow_link import Cells, judge, link_seconds, read_options, run_job, won_cells

JOB = """
WAYS = {
    "exact": {},
    "bf16": {"pipeline": "bf16"},
    "int8": {"pipeline": "int8"},
    "int4, error feedback": {"pipeline": "int4", "error_feedback": True},
}
ROWS, COUNT = 512, 4

engines = {}
for name, wire in WAYS.items():
    config = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": COUNT, "wire": wire}
    config |= {"parallel": {"pipeline": 2, "schedule": "gpipe"}}
    engines[name] = engine.initialize(perceptron(4), config, mean_square)
rows = torch.randn(COUNT * ROWS, 512)
taken, found = seconds(engines, lambda eng: rows, 8), {}
for name, eng in engines.items():
    sent = [sum(row.bytes for row in eng.plan.rank(rank).traffic if row.axis == "pp") for rank in range(2)]
    found[name] = {"seconds": taken[name], "bytes": sum(sent)}
tell(engines, found)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    options = read_options("stage_messages", __doc__, arguments)
    if problem := missing():
        print(problem)
        return 1
    rounds = [run_job(JOB, 2, 1, options.rate) for _ in range(options.rounds)]
    cells, worst = Cells(), 0.0
    for name, first in rounds[0].items():
        cells[name, "bytes a step, both stages"] = f"{first['bytes']:,.0f}"
        cells[name, "step"] = f"{median(found[name]['seconds'] for found in rounds):.2f} s"
        if name != "exact":
            won = median(found["exact"]["seconds"] - found[name]["seconds"] for found in rounds)
            planned = link_seconds(rounds[0]["exact"]["bytes"] - first["bytes"], options.rate)
            worst = max(worst, won_cells(cells, name, won, planned))
    return judge("stage-messages-link", cells, worst, options)


if __name__ == "__main__":
    sys.exit(main())
