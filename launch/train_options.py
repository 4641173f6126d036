"""Command line of ``train.py``. Imports no torch, so ``--help`` answers at once."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from engine.config.config_file import OVERRIDES_HELP

DEFAULT_CONFIG = Path("configs/tp2_pp2_zero1.json")
"""Default configuration for a multiple of four ranks."""
DATA_CONFIG = Path("configs/dp_zero1.json")
"""Default configuration for any other number of ranks."""


def training_options(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the options of the reference run; every option has a default."""
    parser = ArgumentParser(
        prog="train.py",
        description="Train a small byte-level decoder on real text. "
        "Start it with torchrun --nproc_per_node N train.py, or alone as one process.",
    )
    parser.add_argument("--config", type=Path, default=None, help=(
        f"configuration (default {DEFAULT_CONFIG} for a multiple of 4 ranks, otherwise {DATA_CONFIG})"
    ))  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="your text instead of the built-in one")
    parser.add_argument("--steps", type=_count, default=250, help="optimizer steps in total (default %(default)s)")
    parser.add_argument("--layers", type=_count, default=4, help="blocks of the decoder (default %(default)s)")
    parser.add_argument("--width", type=_count, default=128, help="width of the decoder (default %(default)s)")
    parser.add_argument("--heads", type=_count, default=4, help="attention heads (default %(default)s)")
    parser.add_argument("--context", type=_count, default=128, help="tokens in a window (default %(default)s)")
    parser.add_argument("--sample", type=_count, default=200, help="bytes to generate at the end (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/train"), help=(
        "folder of the run, which continues if it exists (default %(default)s)"
    ))  # fmt: skip
    parser.add_argument("--profile", default=None, metavar="A:B", help=(
        "trace steps A to B on all ranks; trine report OUT writes them for ui.perfetto.dev"
    ))  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start over; the old run is kept in a numbered folder")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)  # argparse names the option and the value
    return number
