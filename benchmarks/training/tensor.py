"""Times tensor parallelism: Trine and torch's ``parallelize_module`` on two and four ranks, and one process.

    python -m benchmarks tensor [--models llama,fused] [--ranks 2,4] [--sequences 4] [--rounds 7] [--steps 10]
                                [--write-figures] [--out FOLDER]
    python -m benchmarks tensor --models llama --profile "Trine tp2" [--steps 10]

Width 256 and the batch in one microbatch keep products small, so that overhead shows. *llama* is Hugging Face's
``LlamaForCausalLM``. *fused* has nanoGPT blocks, with one product for query, key and value; DTensor plans cannot shard
it, so torch's rows use three products.

Exit code 1 when Trine exceeds the limits of CPU seconds (user and system, all ranks) in ``lineups``, or when losses
differ by more than a millionth. Data, AdamW and rounds as in ``step``, columns as in ``pipeline``; messages through
shared memory count as sent, and that memory is part of *step MB* on every rank.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.harness.figures import record_text
from benchmarks.peers.models import TENSOR_MODELS, Name
from benchmarks.peers.workload import Workload
from benchmarks.training.comparison import add_options, make_workload, profile, run, runnable, some_of
from benchmarks.training.lineups import make_tensor_lineup

RANKS = (2, 4)
LAYERS = 4
SEQUENCES = 4
EPSILON = 1e-5
"""Eps of AdamW, large enough that rounding in near-zero gradients does not change losses."""


def workload_of(model: Name, arguments: argparse.Namespace) -> Workload:
    """Returns the workload of all rows of ``model``."""
    standard = make_workload(arguments.bucket, arguments.adamw)
    sizes = replace(standard.decoder, layers=LAYERS)
    return replace(standard, model=model, decoder=sizes, sequences=arguments.sequences, epsilon=EPSILON)


def _parse(command: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tensor", description="Cost of tensor parallelism.", conflict_handler="resolve"
    )
    add_options(parser)
    parser.add_argument(
        "--models",
        type=some_of(TENSOR_MODELS, "no models are called {}"),
        default=("llama",),
        help="some of llama,fused",
    )
    parser.add_argument("--ranks", type=some_of(RANKS, "{} ranks are not measured"), default=RANKS, help="some of 2,4")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="of 128 tokens: the batch")
    arguments = parser.parse_args(command)
    if arguments.sequences % arguments.accumulation:
        parser.error(f"accumulation must divide the batch of {arguments.sequences} sequences")
    names = [mode.name for mode in make_tensor_lineup("llama", arguments.ranks).modes]
    if arguments.profile not in (None, *names):
        parser.error(f"no row is called {arguments.profile!r}; there are: {'; '.join(names)}")
    return arguments


def _measure(model: Name, arguments: argparse.Namespace) -> tuple[str, bool]:
    """One table."""
    print(f"{model}: {LAYERS} layers, {arguments.sequences} x 128 tokens in {arguments.accumulation} microbatch")
    lineup = runnable(make_tensor_lineup(model, arguments.ranks, arguments.accumulation), arguments.peers)
    text, passed = run(f"tensor-{model}", arguments, lineup, workload_of(model, arguments))
    return f"{model}\n{text}", passed


def main(command: Sequence[str] | None = None) -> int:
    """Measures, prints and writes results; returns 0 if every check passed."""
    arguments = _parse(command)
    if arguments.profile:
        for model in arguments.models:
            modes = make_tensor_lineup(model, arguments.ranks, arguments.accumulation).modes
            print(f"{model}\n{profile(modes, arguments.profile, workload_of(model, arguments), arguments.steps)}")
        return 0
    found = [_measure(model, arguments) for model in arguments.models]
    if arguments.write_figures:
        record_text("tensor", "```\n" + "\n\n".join(text for text, _ in found) + "\n```")
    return 0 if all(passed for _, passed in found) else 1
