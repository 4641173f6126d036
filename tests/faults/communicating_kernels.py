"""Faults of kernels that communicate, and of the memory they do it in."""

from tests.faults.fault import Fault

_FOLDER = "tests/kernels/gpu/overlap"
_CONFORMANCE = f"{_FOLDER}/test_conformance.py::test_kernels_do_what_the_model_does"
_MISSING = f"{_FOLDER}/test_turns.py::test_what_does_not_come_is_written_down"
_CALLS = f"{_FOLDER}/test_turns.py::test_every_call_equals_the_plain_products"

COMMUNICATING_KERNELS = (
    Fault(
        name="signal-without-release",
        about="A signal may be seen before the tile that it tells of.",
        file="kernels/gpu/overlap/signals.py",
        old='tl.atomic_xchg(place, epoch, sem="release", scope="sys")',
        new='tl.atomic_xchg(place, epoch, sem="relaxed", scope="sys")',
        tests=("tests/kernels/test_offline.py::test_kernels_that_have_changed_compile_as_before",),
    ),
    Fault(
        name="signal-before-its-tile",
        about="Rows are signalled before they are written.",
        file="kernels/gpu/overlap/gather_matmul.py",
        old="        slot = slot_of(slots, target, rank, epoch, capacity, RANKS, part)\n",
        new="        slot = slot_of(slots, target, rank, epoch, capacity, RANKS, part)\n"
        "        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)\n",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="arrival-of-an-old-call",
        about="Rows count as arrived that were of the call before last.",
        file="kernels/gpu/overlap/signals.py",
        old="epoch, most, RANKS), epoch, epoch, looks)",
        new="epoch, most, RANKS), epoch - 2, epoch, looks)",
        tests=(_MISSING,),
    ),
    Fault(
        name="arrival-of-a-later-call",
        about="A rank whose calls are out of step is not noticed.",
        file="kernels/gpu/overlap/signals.py",
        old="return (value >= epoch) & (value <= last)",
        new="return value >= epoch",
        tests=(_MISSING,),
    ),
    Fault(
        name="slots-do-not-alternate",
        about="A rank overwrites rows that another one still reads.",
        file="kernels/gpu/overlap/signals.py",
        old="tl.cast((epoch % 2) * RANKS + writer, tl.int64) * capacity",
        new="tl.cast(writer, tl.int64) * capacity",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="sum-of-all-ranks-but-one",
        about="A reduce-scatter inside a kernel leaves the last rank out.",
        file="kernels/gpu/overlap/matmul_scatter.py",
        old="        for source in range(RANKS):\n",
        new="        for source in range(RANKS - 1):\n",
        tests=(_CALLS,),
    ),
    Fault(
        name="rows-of-the-wrong-rank",
        about="Gathered rows are multiplied into the place of another rank.",
        file="kernels/gpu/overlap/gather_matmul.py",
        old="target = out + (sequence * RANKS + source) * L * N",
        new="target = out + (sequence * RANKS + rank) * L * N",
        tests=(_CALLS,),
    ),
    Fault(
        name="missing-tile-unreported",
        about="Training goes on with rows that did not come.",
        file="parallel/comm/symmetric/symmetric_buffer.py",
        old="        if missing is not None:\n",
        new="        if missing is not None and missing.tile < 0:\n",
        tests=("tests/parallel/comm/symmetric/test_symmetric_buffer.py::test_a_rank_that_does_not_come_is_named",),
    ),
)
