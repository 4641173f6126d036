"""All promises, in the order of their goals."""

import re
from collections.abc import Mapping

from tests.reliability.proof import Proof, both, counted, found, largest, of_table, passed

Rows = Mapping[str, Mapping[str, str]]
_CHECKPOINT = "tests/engine/checkpoint"
_ENDS = ("`kill -9`", "raises", "runs out")
_JOBS = "pytest -m long tests/engine/watchdog/test_jobs.py tests/cluster/test_nodes.py --write-figures"


def _named(rows: Rows, ends: bool) -> str:
    """How many faults were named, and the longest time that one took; ``ends``: those that end a rank."""
    cells = [cell for row, cells in rows.items() if row.startswith(_ENDS) is ends for cell in cells.values()]
    seconds = [float(cell.removesuffix(" s")) for cell in cells]
    if not seconds:
        raise LookupError("no fault was tried")
    return f"{len(seconds)} of {len(seconds)} named, after {max(seconds):.1f} s at most"


def _hangs(rows: Rows) -> str:
    return _named(rows, ends=False)


def _crashes(rows: Rows) -> str:
    return _named(rows, ends=True)


def _flips(rows: Rows) -> str:
    pairs = [re.fullmatch(r"(\d+) of (\d+)", cell) for cells in rows.values() for cell in cells.values()]
    counts = [(int(pair[1]), int(pair[2])) for pair in pairs if pair is not None]
    return f"{sum(count for count, _ in counts)} of {sum(count for _, count in counts)}"


def _soaked(rows: Rows) -> str:
    return "; ".join(f"{row}: {cells['false alarms']} false alarms" for row, cells in rows.items())


def _goodput(rows: Rows) -> str:
    return "; ".join(
        f"{row}: {cells['effective time']} effective, restart in {cells['kill to first new step']}"
        for row, cells in rows.items()
    )


PROOFS: tuple[Proof, ...] = (
    Proof(
        goal="R1",
        about="`kill -9` of any rank at any moment: no committed checkpoint is lost, and the run goes on to the bit",
        asked="200 kills",
        command=f"pytest -m long {_CHECKPOINT}/test_kills.py::test_killed_at_random --kills 30",
        read=counted(r"(\d+) kills on ", "{} kills, nothing lost"),
    ),
    Proof(
        goal="R1",
        about="power is lost after any file operation of a save: what is committed is whole",
        asked="every prefix of the operations",
        command=f"pytest {_CHECKPOINT}/test_crash.py",
        read=counted(r"(\d+) crash cases", "{} states of the disk, all right"),
    ),
    Proof(
        goal="R2",
        about="any grid loads a checkpoint of any other, to the bit",
        asked="every ordered pair of grids of up to 4 ranks",
        command=f"pytest -m long {_CHECKPOINT}/test_grids.py::test_every_ordered_pair_of_grids",
        read=counted(r"(\d+) pairs of grids", "{} pairs, equal bits"),
    ),
    Proof(
        goal="R2",
        about="a run goes on on another grid, in another launch",
        asked="losses within 1e-6, for 12 pairs",
        command=f'pytest -m "long or not long" {_CHECKPOINT}/test_relaunch.py::test_goes_on_on_another_grid',
        read=largest(r"largest deviation of a loss (\S+)", "{} pairs, largest deviation {:.0e}"),
    ),
    Proof(
        goal="R3",
        about="bits flipped, pages zeroed or repeated, files cut, swapped, missing or of another step",
        asked="10,000 faults refused, with file and tensor",
        command=f"pytest -m long {_CHECKPOINT}/test_damage.py::test_damage_is_refused_ten_thousand_times",
        read=counted(r"damage: (\d+) faults", "{} refused"),
    ),
    Proof(
        goal="R4",
        about="a disk that is full or fails, at every operation of a save and of a load",
        asked="the checkpoint before stays valid, path and bytes are told",
        command=f"pytest {_CHECKPOINT}/test_faults.py",
        read=both(
            counted(r"(\d+) faults of a save", "{} faults of saves"), counted(r"(\d+) faults of a load", "{} of loads")
        ),
    ),
    Proof(
        goal="R5",
        about="hostile checkpoints: no code runs, nothing outside the folder is read, little memory is taken",
        asked="60 files, below 64 MiB beside the file",
        command=f"pytest {_CHECKPOINT}/format/test_hostile.py",
        read=found(r"(\d+) hostile checkpoints refused, .*; at most (\d+ MiB)", "{} refused, {} at most"),
    ),
    Proof(
        goal="R5",
        about="hostile pickles in checkpoints of other engines",
        asked="no code runs",
        command=f"pytest {_CHECKPOINT}/foreign/test_pickle_values.py {_CHECKPOINT}/foreign/test_torch_file.py",
        read=passed("{} tests passed"),
    ),
    Proof(
        goal="R6",
        about="a rank hangs, leaves the others or makes another call; a link or a node is gone",
        asked="50 of 50 named within timeout (3 s) + 1 s",
        command=_JOBS,
        read=of_table(_hangs),
        figure="watchdog-faults",
    ),
    Proof(
        goal="R6",
        about="a job that is slow but sound is left alone",
        asked="no false alarm in an hour",
        command="python -m tests.cluster.soak --minutes 30 --write-figures",
        read=of_table(_soaked),
        figure="soak",
    ),
    Proof(
        goal="R7",
        about="a rank is killed, raises or runs out of memory: it is named, and not those that it takes down",
        asked="50 of 50 within 1 s",
        command=_JOBS,
        read=of_table(_crashes),
        figure="watchdog-faults",
    ),
    Proof(
        goal="R8",
        about="NaN or Inf in a gradient, an activation or the loss of one rank: all ranks skip the step, or none",
        asked="no bit of the state changes; first parameter and rank are named",
        command='pytest -m "long or not long" tests/engine/step/test_nonfinite.py',
        read=both(
            counted(r"(\d+) gradients spoiled", "{} gradients spoiled, by parameter and rank"), passed("{} tests")
        ),
    ),
    Proof(
        goal="R9",
        about="damaged configurations: accepted, or one sentence with path, value and rule",
        asked="10,000 mutants, p99 below 5 ms",
        command="pytest -m long tests/engine/config/test_mutations.py",
        read=found(r"(\d+) of 10000 accepted; p99 of a call (\S+ ms)", "10,000 mutants, {} accepted, p99 {}"),
    ),
    Proof(
        goal="R10",
        about="the place in the data after kills, on other grids, batches and epochs: nothing twice, nothing left out",
        asked="500 random histories",
        command="pytest tests/engine/data/test_data_resume.py",
        read=counted(r"(\d+) histories", "{} histories, nothing twice or left out"),
    ),
    Proof(
        goal="R11",
        about="what training waits for in a save",
        asked="1.2 times a copy of its bytes",
        command="python -m benchmarks checkpoint --write-figures",
        read=found(r"stall: Trine takes (\S+)x the time of memcpy", "{} times"),
        figure="checkpoint",
    ),
    Proof(
        goal="R12",
        about="a rank is killed again and again",
        asked="90 % effective when killed every 120 s, restart within 8 s",
        command="python -m tests.cluster.goodput --minutes 20 --every 60 --write-figures",
        read=of_table(_goodput),
        figure="goodput",
    ),
    Proof(
        goal="R13",
        about="one bit of a weight or a moment flips on one rank: found, with rank, tensor and bit",
        asked="200 flips within `integrity.every` steps",
        command="pytest -m long tests/engine/integrity/test_flips.py --write-figures",
        read=of_table(_flips),
        figure="integrity",
    ),
    Proof(
        goal="R14",
        about="the same seed gives the same bits: losses, weights, moments",
        asked="100 steps twice, on each grid",
        command="pytest -m long tests/engine/test_same_seed.py",
        read=counted(r"(1)00 steps twice", "100 steps twice on {} grids, equal bits"),
    ),
    Proof(
        goal="R15",
        about="SIGTERM at a random moment: a committed checkpoint, exit status 143, and the run goes on to the bit",
        asked="50 trials",
        command=f"pytest -m long {_CHECKPOINT}/test_sigterm.py::test_stopped_at_many_random_moments",
        read=counted(r"(\d+) runs stopped on ", "{} stopped, all with a checkpoint that goes on"),
    ),
    Proof(
        goal="R16",
        about="clean-up: the newest checkpoint always stays, and the next save removes what a cut-off one has left",
        asked="part of the power cuts of R1",
        command=(
            f"pytest {_CHECKPOINT}/test_crash.py::test_the_next_save_clears_what_is_left "
            f"{_CHECKPOINT}/format/test_step_folders.py"
        ),
        read=passed("{} tests passed"),
    ),
)
