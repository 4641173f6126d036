"""Measures weak and strong scaling: seconds of a step for every grid and node count, and its prediction.

    torchrun --nnodes 2 --nproc-per-node 2 ... -m benchmarks scaling --out FILE      on every node, then with more nodes
    python -m benchmarks scaling --render FILE                                      table and picture of what FILE has

Each node count is a separate job; all jobs add to one file, and a restarted job continues.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.gpu_step.report import known_peak
from benchmarks.scaling.plot import draw_record
from benchmarks.scaling.prediction import ranked, with_predictions
from benchmarks.scaling.ranking import GridChoice, grid_choices
from benchmarks.scaling.ranks import Effort, Ranks
from benchmarks.scaling.record import RowKey, ScalingRecord, ScalingRow, merged, read_record, write_record
from benchmarks.scaling.report import table
from benchmarks.scaling.task import MODES, Mode, Task
from engine.errors import EngineError
from engine.models.decoder import DecoderConfig
from engine.parallel.grid import Grid


def main(command: Sequence[str] | None = None) -> int:
    """Measures results that the file lacks, or shows the file."""
    options = _parser().parse_args(command)
    if options.render:
        return _render([Path(name) for name in options.render], options.svg)
    try:
        _measure(options)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", default="runs/scaling.json", help="the JSON file, which rank 0 reads and writes")
    add("--render", nargs="+", metavar="FILE", help="show what these files have together, and measure nothing")
    add("--svg", metavar="FILE", help="with --render: where the picture goes")
    add("--modes", default="strong", help=f"some of {','.join(MODES)}")
    add("--stages", default="0,1", help="ZeRO stages, such as 0,1,2,3")
    add("--grids", default="", metavar="LIST", help="only these, such as dp4xtp2,pp8; without: all")
    add("--top", type=int, metavar="N", help="only the N grids of the best predictions")
    add("--rounds", type=int, default=3, help="engines a grid, in turn with the others")
    add("--warmup", type=int, default=Effort().warmup, help="steps of an engine that do not count")
    add("--steps", type=int, default=Effort().steps, help="steps of an engine that count")
    add("--seconds", type=float, default=Effort().seconds, help="about, for the steps of an engine that count")
    add("--rows", type=int, default=64, help="rows of a step: of all data ranks (strong), of each (weak)")
    add("--micro", type=int, default=2, help="rows of a microbatch")
    for name, size in (("layers", 8), ("width", 256), ("heads", 8), ("context", 128), ("vocabulary", 256)):
        add(f"--{name}", type=int, default=size, help="of the decoder")
    add("--bf16", action="store_true", help="train in bf16")
    add("--peak-tflops", type=float, help="of a rank's device, for MFU; known for H100 and H200 SXM in bf16")
    return parser


def _task(options: argparse.Namespace) -> Task:
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
    return Task(decoder=DecoderConfig(**sizes), micro=options.micro, rows=options.rows, bf16=options.bf16)


def _measure(options: argparse.Namespace) -> None:
    with closing(Ranks()) as ranks:
        _Run(options, ranks).run()


class _Run:
    """One job: the same calls on every rank, the record on rank 0."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self._options, self._ranks, self._path = options, ranks, Path(options.out)
        self._task = _task(options)
        self._effort = Effort(warmup=options.warmup, steps=options.steps, seconds=options.seconds)
        self._size = (ranks.nodes, ranks.of_node)
        self._record = ScalingRecord(task=asdict(self._task), peak_flops=self._peak())
        ranks.share(self._open)

    def _open(self) -> None:
        """On rank 0: go on with what the file has."""
        if self._path.exists():
            found = read_record(self._path)
            if found.task != self._record.task:
                raise EngineError(
                    f"{self._path} has results of {found.task}, and a file has those of one task; give another --out "
                    f"for {self._record.task}."
                )
            self._record = found

    def _peak(self) -> float | None:
        if self._options.peak_tflops:
            return float(self._options.peak_tflops) * 1e12
        return known_peak(self._ranks.device_name) if self._task.bf16 else None

    def run(self) -> None:
        """Machine, predictions, then rounds of all grids."""
        for number in range(self._options.rounds):
            self._measure_machine(number)
        modes = [mode for mode in MODES if mode in self._options.modes.split(",")]
        chosen = [(mode, choice) for mode in modes for choice in self._choose(mode)]
        for number in range(self._options.rounds):
            for mode, choice in chosen:
                self._measure_row(mode, choice, number)
        if self._ranks.first:
            print(table(self._record), flush=True)

    def _measure_machine(self, number: int) -> None:
        known = self._ranks.share(lambda: sum(machine.key == self._size for machine in self._record.machines))
        if known <= number:
            found = self._ranks.machine(self._task, self._effort)
            self._keep(replace(self._record, machines=(*self._record.machines, found)))

    def _choose(self, mode: Mode) -> list[GridChoice]:
        """The grids that this job measures, the best predicted ones first."""
        stages = [int(stage) for stage in self._options.stages.split(",")]
        wanted = [name for name in self._options.grids.split(",") if name]
        choices = [
            choice
            for choice in grid_choices(self._ranks.world.size, stages)
            if not wanted or _short(str(choice)) in wanted
        ]
        return [choices[place] for place in self._ranks.share(lambda: self._predict(mode, choices))]

    def _predict(self, mode: Mode, choices: Sequence[GridChoice]) -> list[int]:
        """On rank 0: the places of the grids to measure; the record has a row for each of ``choices``."""
        machine = self._record.machine(self._size)
        assert machine is not None
        found = ranked(self._task, mode, machine, choices)
        self._keep(with_predictions(self._record, self._task, machine, found, mode))
        return [choices.index(grid.choice) for grid in found if grid.time is not None][: self._options.top]

    def _measure_row(self, mode: Mode, choice: GridChoice, number: int) -> None:
        key = (*self._size, mode, choice)
        if self._ranks.share(lambda: len(self._row(key).samples)) > number:
            return
        sample = self._ranks.steps(self._task, choice, mode, self._effort)
        axes = () if number else tuple(self._ranks.axes(Grid(pp=choice.pp, dp=choice.dp, tp=choice.tp)))
        if self._ranks.first:
            row = self._row(key)
            filled = replace(row, samples=(*row.samples, sample), axes=axes or row.axes)
            self._keep(self._record.with_row(filled))
            print(f"{mode} {choice} round {number + 1}: {sample.seconds:.3f} s", flush=True)

    def _row(self, key: RowKey) -> ScalingRow:
        row = self._record.row(key)
        assert row is not None, key
        return row

    def _keep(self, record: ScalingRecord) -> None:
        self._record = record
        if self._ranks.first:
            write_record(record, self._path)


def _short(name: str) -> str:
    return name.replace(" x ", "x").replace(", ZeRO ", "z")


def _render(paths: Sequence[Path], drawing: str | None) -> int:
    record = merged(read_record(path) for path in paths)
    print(table(record))
    if drawing:
        Path(drawing).write_text(draw_record(record), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
