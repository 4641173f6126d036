"""Faults of late logits over context ranks, and of documents that context ranks share by work."""

from tests.faults.fault import Fault

_WORK = "tests/parallel/context/test_shared_by_work.py"
_MODELS = "tests/parallel/context/test_shared_models.py"
_LATE = "tests/parallel/context/test_late_logits.py"

CONTEXT_BALANCE = (
    Fault(
        name="late-logits-off-for-context-ranks",
        about="Context ranks store all logits of their positions, which limits the length of a sequence.",
        file="engine/build/assemble.py",
        old="each.operator == LAZY_HEAD]",
        new="each.operator == LAZY_HEAD and comm.grid.cp == 1]",
        tests=(f"{_LATE}::test_no_rank_stores_the_logits_of_its_positions[2-0]",),
    ),
    Fault(
        name="late-logits-off-at-zero-3",
        about="Ranks that gather parameters store all logits of their positions.",
        file="zero/gather/gather_schedule.py",
        old="    return not turns or any(_is_whole(bucket, max(turns)) for bucket in own)",
        new="    return not turns",
        tests=(f"{_LATE}::test_no_rank_stores_the_logits_of_its_positions[2-3]",),
    ),
    Fault(
        name="a-head-that-zero-3-frees-is-lazy",
        about="The loss reads the weight of a head after ZeRO 3 has freed it, which gathers it in every pass.",
        file="zero/gather/gather_schedule.py",
        old="    return not turns or any(_is_whole(bucket, max(turns)) for bucket in own)",
        new="    return True",
        tests=(f"{_LATE}::test_a_head_before_other_modules_computes_its_logits_at_zero_3",),
    ),
    Fault(
        name="shifted-logits-computed-in-full",
        about="A slice of late logits along positions computes all of them before the loss.",
        file="parallel/tensor/logits/lazy_logits.py",
        old="Tensor._is_view: is_view, ",
        new="",
        tests=(f"{_LATE}::test_logits_in_chunks_train_as_one_process[shifted-a rank without labels-cp2]",),
    ),
    Fault(
        name="documents-in-zig-zag-chunks",
        about="Packed documents are shared by position, so that one context rank computes most of the pairs.",
        file="engine/program/context_program.py",
        old="sharing and self.plan.by_work)",
        new="False)",
        tests=(f"{_WORK}::test_ranks_compute_the_pairs_that_were_planned[4-gather]",),
    ),
    Fault(
        name="chunks-without-exchanges",
        about="Ranks do not exchange ends of chunks, so that documents of a few chunks stay uneven.",
        file="parallel/context/balance.py",
        old="    for _ in range(2 * ranks):",
        new="    for _ in range(0):",
        tests=("tests/parallel/context/test_balance.py::test_documents_of_random_lengths_are_shared_by_work",),
    ),
    Fault(
        name="bytes-of-the-first-rank-for-all",
        about="The plan predicts the bytes of rank 0 for all ranks, although ranks send different numbers of keys.",
        file="parallel/context/recut.py",
        old="[count * x.element_size() for count in sent_elements(*self.ways, ranks)]",
        new="[sent_elements(*self.ways, ranks)[0] * x.element_size()] * ranks",
        tests=(f"{_WORK}::test_ranks_compute_the_pairs_that_were_planned[3-need]",),
    ),
    Fault(
        name="stages-place-messages-as-in-the-trace",
        about="A pipeline stage takes a message for rows of zig-zag chunks, while the first stage shares them by work.",
        file="parallel/context/sequences.py",
        old="        if not self.running:",
        new="        if self.shared:",
        tests=(f"{_MODELS}::test_pipeline_stages_know_the_positions_of_messages[None-need-{{}}]",),
    ),
    Fault(
        name="messages-with-other-positions-are-shared-by-work",
        about="Stages exchange rows that are not those of the batch, and place them as in the trace.",
        file="engine/planning/example_trace.py",
        old="(halo or not ran.keeps_positions(trace))",
        new="halo",
        tests=(f"{_MODELS}::test_stages_that_cannot_place_messages_keep_two_chunks[None-True]",),
    ),
    Fault(
        name="uneven-work-costs-nothing",
        about="The choice of a method takes the work of all ranks for equal, also of neighbouring positions.",
        file="parallel/context/choose.py",
        old="    waits = (form.uneven - 1) * form.flops / rates.flops",
        new="    waits = 0.0",
        tests=(f"{_MODELS}::test_heads_are_chosen_where_positions_have_unequal_work",),
    ),
    Fault(
        name="documents-shared-by-chunks-of-equal-number",
        about="Chunks of documents are dealt in turn, whatever their work.",
        file="parallel/context/balance.py",
        old="key=lambda rank: (loads[rank], rank))",
        new="key=lambda rank: (counts[rank], rank))",
        tests=("tests/parallel/context/test_balance.py::test_heavy_chunks_go_to_the_rank_with_the_least_work",),
    ),
    Fault(
        name="documents-as-the-last-batch",
        about="Positions of packed documents are shared as those of an earlier batch without documents.",
        file="parallel/context/sequences.py",
        old="        for key in [key for key in self._found if _begins_with(key, POSITIONS)]:",
        new="        for key in [key for key in self._found if _begins_with(key, POSITIONS) and not work]:",
        tests=("tests/parallel/context/test_sequences.py::test_caches_of_documents_end_with_their_batch",),
    ),
    Fault(
        name="rows-of-masks-across-chunks",
        about="A block of a mask's rows has queries of two chunks, and computes the keys between their documents.",
        file="parallel/context/attention.py",
        old="        runs = (self.queries[:, 1] - self.queries[:, 0]).tolist()",
        new="        runs = [int((self.queries[:, 1] - self.queries[:, 0]).sum())]",
        tests=(f"{_WORK}::test_ranks_compute_the_pairs_that_were_planned[4-gather]",),
    ),
    Fault(
        name="distances-sharded-as-positions",
        about="A table of distances between queries and keys is sharded along keys.",
        file="parallel/context/sequences.py",
        old="(ids.ndim == 2 and self._context.found((POSITIONS, ids.shape[0])) is not None)",
        new="not index.size",
        tests=("tests/parallel/context/test_sequences.py::test_a_table_of_distances_is_read_in_full",),
    ),
)
