"""Faults of steps whose error the user catches, of hooks on the modules of a pipeline, and of what a model may do."""

from tests.faults.fault import Fault

_CAUGHT = "tests/engine/failures/test_caught_failures.py"
_HOOKS = "tests/engine/failures/test_boundary_hooks.py"
_RANKS = "tests/engine/failures/test_failed_ranks.py"

CAUGHT_FAILURES = (
    Fault(
        name="gradients-of-a-failed-step-stay",
        about="A step whose error is caught leaves the gradients of its first microbatches in the next update.",
        file="engine/step/runtime.py",
        old="        self.reducer.reset()\n        if self.gatherer",
        new="        if self.gatherer",
        tests=(f"{_CAUGHT}::test_some_failures_do_so_on_the_smallest_grids",),
    ),
    Fault(
        name="ranks-that-are-apart-go-on",
        about="Ranks that fail at different places go on, and their next collectives meet each other's.",
        file="parallel/comm/failed_calls.py",
        old="alike=len(places) == 1",
        new="alike=True",
        tests=(f"{_CAUGHT}::test_an_engine_goes_on_only_if_all_ranks_fail_at_one_place",),
    ),
    Fault(
        name="a-lost-rank-leaves-no-word",
        about="Ranks that have all lost another one say that it left no word, though each names it.",
        file="parallel/comm/failed_calls.py",
        old='if store.check([f"{here}/lost"]):',
        new="if False:",
        tests=(f"{_CAUGHT}::test_ranks_that_have_only_lost_another_say_which_unless_one_has_an_error_of_its_own",),
    ),
    Fault(
        name="a-second-failure-takes-the-verdict-of-the-first",
        about="After a failure from which all ranks went on, one that only some of them share is let pass too.",
        file="parallel/comm/failed_calls.py",
        old="            self._past += 1\n",
        new="            pass\n",
        tests=(f"{_CAUGHT}::test_a_second_failure_is_judged_by_itself",),
    ),
    Fault(
        name="a-hook-on-a-sent-tensor-is-called-twice",
        about="A hook on the output of the last block of a stage is called on the stage that receives it as well.",
        file="parallel/pipeline/runtime/stage_forward.py",
        old="leaves[place], apart = tensor.view_as(tensor), True",
        new="leaves[place], apart = tensor, True",
        tests=(f"{_HOOKS}::test_hooks_change_training_as_in_one_process",),
    ),
    Fault(
        name="a-backward-hook-at-a-boundary-is-let-pass",
        about="A full backward hook on the last block of a stage is never called, and nobody learns of it.",
        file="engine/step/trace_cache.py",
        old="if name in sent or len(within) > 1:",
        new="if len(within) > 1:",
        tests=(f"{_HOOKS}::test_backward_hooks_that_a_pipeline_cannot_call_are_refused_on_all_ranks",),
    ),
    Fault(
        name="messages-of-a-failed-call-keep-their-connection",
        about="A rank that fails alone keeps its connections, so a rank that waits for it hangs to its time-out.",
        file="parallel/comm/comm.py",
        old="            pending.drop()\n",
        new="            pass\n",
        tests=(f"{_CAUGHT}::test_a_rank_that_fails_alone_frees_the_others_though_it_keeps_its_engine",),
    ),
    Fault(
        name="data-ranks-gather-without-a-batch-there",
        about="A data rank whose loader fails tells nobody before parameters are gathered, so another one hangs.",
        file="engine/step/runner.py",
        old=(
            "            step.problem = problem_of_any(step.problem, self._comm, self._device, "
            "runtime.gatherer is not None)\n"
        ),
        new="            pass\n",
        tests=(f"{_RANKS}::test_a_loader_that_ends_or_raises_on_one_rank_stops_all_with_its_error",),
    ),
    Fault(
        name="a-trace-is-a-call-outside",
        about="Ranks that trace a new kind of batch wait for data ranks that have none.",
        file="zero/gather/gatherer.py",
        old="if self._pass is not None or self._reads_shapes or self.holds:",
        new="if self._pass is not None or self.holds:",
        tests=("tests/zero/gather/test_outside_calls.py::test_a_trace_gathers_nothing",),
    ),
    Fault(
        name="a-failed-rank-is-not-named",
        about="Ranks that stop because another one has failed name themselves in its place.",
        file="engine/step/failed_ranks.py",
        old="for rank, row in enumerate(rows.tolist()) if any(row)",
        new="for rank, row in enumerate(rows.tolist()[::-1]) if any(row)",
        tests=(f"{_RANKS}::test_a_loader_that_ends_or_raises_on_one_rank_stops_all_with_its_error",),
    ),
)
