"""Faults of the results of experts that a block awaits at their first use, and of waits of the host."""

from tests.faults.fault import Fault

_DISPATCH = "parallel/experts/dispatch.py"
_FILE = "parallel/experts/awaited.py"
_TESTS = "tests/parallel/experts/test_awaited.py"
_ORDER = f"{_TESTS}::test_a_shared_expert_is_computed_between_the_start_and_the_wait"
_USES = f"{_TESTS}::test_every_use_of_the_result_is_that_of_one_process"

AWAITED_EXPERTS = (
    Fault(
        name="experts-read-before-they-arrive",
        about="A block reads the results of experts before they have arrived.",
        file=_FILE,
        old="            self._arrival.complete()\n            with",
        new="            with",
        tests=(f"{_USES}[grad-add]",),
    ),
    Fault(
        name="experts-awaited-at-once",
        about="A change of shape waits for the results of experts, so that no other expert is computed meanwhile.",
        file=_FILE,
        old="if func in _VIEWS and isinstance(first, Awaited) and first._keeps_content(args):",
        new="if False:",
        tests=(f"{_ORDER}[False]",),
    ),
    Fault(
        name="experts-gradients-sent-before-the-last",
        about="Gradients that pass by the first use of the results of experts are not sent.",
        file=_FILE,
        old="if sent is not grad:",
        new="if False:",
        tests=(f"{_USES}[grad-identity]",),
    ),
    Fault(
        name="experts-awaited-outside-their-block",
        about="A tensor that is awaited leaves the block, for code that may be compiled or read memory by itself.",
        file=_FILE,
        old="out = pytree.tree_map_only(Awaited, Awaited.plain, self._own(*args, **kwargs))",
        new="out = self._own(*args, **kwargs)",
        tests=(f"{_TESTS}::test_metadata_and_shapes_wait_for_nothing_and_unread_rows_have_no_memory",),
    ),
    Fault(
        name="experts-under-way-after-their-block",
        about="A block that does not read the results of experts frees the memory that other ranks send them to.",
        file=_FILE,
        old="                each.complete()\n        finally",
        new="                pass\n        finally",
        tests=(f"{_TESTS}::test_a_result_that_nobody_reads_has_arrived_at_the_end_of_its_block",),
    ),
    Fault(
        name="compiled-code-awaits-experts",
        about="Compiled code gets the results of experts as tensors that are awaited.",
        file=_FILE,
        old="is not None and not _is_compiled()",
        new="is not None",
        tests=(f"{_TESTS}::test_a_block_without_other_experts_or_in_compiled_code_gets_plain_results",),
    ),
    Fault(
        name="host-waits-for-received-experts",
        about="The host waits a second time in each layer, for the number of experts that other ranks ask for.",
        file=_DISPATCH,
        old="here.nonzero_static(size=self._gets_experts) if self._is_one_round else here.nonzero()",
        new="here.nonzero()",
        tests=("tests/parallel/experts/test_routed.py::test_the_host_reads_the_table_of_counts_alone[2]",),
    ),
)
