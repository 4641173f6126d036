"""Faults of kernels that communicate, and of the memory they do it in."""

from tests.faults.fault import Fault

_FOLDER = "tests/kernels/gpu/overlap"
_CONFORMANCE = f"{_FOLDER}/test_conformance.py::test_kernels_do_what_the_model_does"
_MISSING = f"{_FOLDER}/test_turns.py::test_what_does_not_come_is_written_down"
_CALLS = f"{_FOLDER}/test_turns.py::test_every_call_equals_the_plain_products"
_EXPERTS = f"{_FOLDER}/test_experts.py::test_every_call_equals_exchange_and_plain_products"
_WITHOUT_ROWS = f"{_FOLDER}/test_experts.py::test_a_rank_without_rows_for_another_is_waited_for_all_the_same"
_GROUPED = "tests/kernels/ops/test_grouped_product.py"
_SYMMETRIC = "tests/parallel/comm"

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
        file="kernels/gpu/overlap/launches.py",
        old="RANKS, part)\n        for column",
        new="RANKS, part)\n        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)\n"
        "        for column",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="arrival-of-an-old-call",
        about="Rows count as arrived that were of the call before last.",
        file="kernels/gpu/overlap/signals.py",
        old="epoch, most, RANKS), ended, epoch, epoch, looks)",
        new="epoch, most, RANKS), ended, epoch - 2, epoch, looks)",
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
        file="kernels/gpu/overlap/launches.py",
        old="        for source in range(RANKS):\n            if came",
        new="        for source in range(RANKS - 1):\n            if came",
        tests=(_CALLS,),
    ),
    Fault(
        name="rows-of-the-wrong-rank",
        about="Gathered rows are multiplied into the place of another rank.",
        file="kernels/gpu/overlap/launches.py",
        old="target = out + (sequence * RANKS + source) * L * N",
        new="target = out + (sequence * RANKS + rank) * L * N",
        tests=(_CALLS,),
    ),
    Fault(
        name="missing-tile-unreported",
        about="Training goes on with rows that did not come.",
        file="parallel/comm/symmetric_memory.py",
        old="        if missing is None:\n",
        new="        if missing is None or missing.tile >= 0:\n",
        tests=("tests/parallel/comm/test_symmetric_memory.py::test_a_rank_that_does_not_come_is_named",),
    ),
    Fault(
        name="wait-without-acquire",
        about="A tile may be read before its signal, as it was before it came.",
        file="kernels/gpu/overlap/signals.py",
        old='        value = tl.atomic_add(place, 0, sem="acquire", scope="sys")\n        looks += 1',
        new='        value = tl.atomic_add(place, 0, sem="relaxed", scope="sys")\n        looks += 1',
        tests=("tests/kernels/test_offline.py::test_kernels_that_have_changed_compile_as_before",),
    ),
    Fault(
        name="tile-read-unasked",
        about="A tile is multiplied whether it has come or not.",
        file="kernels/gpu/overlap/launches.py",
        old="            if came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS):\n"
        "                sequence",
        new="            if epoch > 0:\n                sequence",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="signals-swapped",
        about="Rows of experts are signalled when their neighbours have been written.",
        file="kernels/gpu/overlap/expert_matmul.py",
        old="signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)",
        new="signal(arrival_of(arrivals, target, rank, tile ^ 1, epoch, most, RANKS), epoch)",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="no-signal-without-rows",
        about="A rank hangs that waits for another one without rows for it, until its time is over.",
        file="kernels/gpu/overlap/expert_matmul.py",
        old="        signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)",
        new="        if rows > 0:\n"
        "            signal(arrival_of(arrivals, target, rank, tile, epoch, most, RANKS), epoch)",
        tests=(_WITHOUT_ROWS,),
    ),
    Fault(
        name="empty-tile-not-waited-for",
        about="A rank does not wait for another one without rows for it, and overwrites what that one still reads.",
        file="kernels/gpu/overlap/expert_matmul.py",
        old="            has_come = came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS)\n",
        new="            has_come = rows > 0\n            if has_come:\n"
        "                has_come = came(arrivals, status, rank, source, tile, epoch, patience, most, RANKS)\n",
        tests=(_WITHOUT_ROWS,),
    ),
    Fault(
        name="rows-of-another-expert-sent",
        about="An owner gets the first rows of a rank in place of those for its experts.",
        file="kernels/gpu/overlap/expert_matmul.py",
        old="load_tile(tokens + here * K, 0",
        new="load_tile(tokens + there * K, 0",
        tests=(_EXPERTS,),
    ),
    Fault(
        name="returned-rows-misplaced",
        about="Rows that come back overwrite those of another owner.",
        file="kernels/gpu/overlap/expert_matmul.py",
        old="store_tile(out + here * N, values",
        new="store_tile(out + there * N, values",
        tests=(_EXPERTS,),
    ),
    Fault(
        name="gradient-of-earlier-experts",
        about="The gradient of an expert's matrix takes in rows of the experts before and after it.",
        file="kernels/gpu/grouped_matmul.py",
        old="rows = tl.cast(tl.load(ends + expert) - start, tl.int32)",
        new="rows = tl.cast(tl.load(ends + expert), tl.int32)",
        tests=(f"{_GROUPED}::test_whole_numbers_are_exact_and_an_expert_without_rows_gets_zeros",),
    ),
    Fault(
        name="rows-beyond-the-slot",
        about="More rows than a slot holds overwrite those of the next rank.",
        file="parallel/tensor/overlap/routed_products.py",
        old="    if not route.buffer.fits(size, tiles):\n",
        new="    if not size and not tiles:\n",
        tests=("tests/parallel/tensor/overlap/test_routed_products.py::test_what_cannot_be_sent_is_one_sentence",),
    ),
    Fault(
        name="sum-without-a-rank-sent",
        about="A sum by the switch is given to all ranks although one of them has not written its part.",
        file="kernels/gpu/overlap/launches.py",
        old="        if missing == 0:\n",
        new="        if missing >= 0:\n",
        tests=(f"{_FOLDER}/test_turns.py::test_a_sum_that_lacks_a_rank_is_not_sent",),
    ),
    Fault(
        name="sums-over-the-parts",
        about="The switch gives sums to the slots that other owners still read their parts from.",
        file="kernels/gpu/overlap/launches.py",
        old="    given = ((epoch + 1) % 2 * RANKS + own) * capacity\n",
        new="    given = ((epoch + 2) % 2 * RANKS + own) * capacity\n",
        tests=(_CONFORMANCE,),
    ),
    Fault(
        name="no-last-look",
        about="What a rank has sent before it closed its engine counts as missing.",
        file="kernels/gpu/overlap/signals.py",
        old='        value = tl.atomic_add(place, 0, sem="acquire", scope="sys")\n        looks += 1',
        new="        if looks < patience - 1:\n"
        '            value = tl.atomic_add(place, 0, sem="acquire", scope="sys")\n        looks += 1',
        tests=(f"{_FOLDER}/test_conformance.py::test_a_look_at_who_has_ended_follows_some_looks_at_a_signal",),
    ),
    Fault(
        name="end-of-a-rank-unseen",
        about="Ranks wait for a dead one until their time is over.",
        file="parallel/comm/symmetric_memory.py",
        old="                    self._ended[indices[descriptor]] = count\n",
        new="                    self._ended[indices[descriptor]] = 0\n",
        tests=(f"{_SYMMETRIC}/test_killed_in_kernel.py::test_whoever_ends_is_written_down_alone",),
    ),
    Fault(
        name="children-hide-the-end-of-a-rank",
        about="Ranks wait for a dead one as long as a process that it has started holds its sockets open.",
        file="parallel/comm/symmetric_memory.py",
        old="return [os.pidfd_open(process)] if process > 0 else []",
        new="return [os.pidfd_open(process)] if process < 0 else []",
        tests=(f"{_SYMMETRIC}/test_killed_in_kernel.py::test_children_that_a_rank_leaves_behind_do_not_hide_its_end",),
    ),
)
