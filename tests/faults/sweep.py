"""Faults of a sweep: ranks that part, trials that two processes run, lost progress, values that change nothing."""

from tests.faults.fault import Fault

_COMMAND = "tests/launch/test_sweep_command.py"
_STUDY = "tests/engine/sweep/test_study.py"
_TRIALS = "tests/engine/sweep/test_trials.py"

SWEEP = (
    Fault(
        name="trial-ends-on-rank-0-alone",
        about="Rank 0 leaves a pruned trial at once, and the other rank waits in its next step.",
        file="engine/sweep/trial.py",
        old="            self.asked = True\n",
        new="            self.end()\n",
        tests=(f"{_TRIALS}::test_a_loop_with_its_own_metric_ends_after_the_step_that_follows",),
    ),
    Fault(
        name="pruned-without-a-checkpoint",
        about="A pruned trial saves nothing, so its promotion trains from the first step again.",
        file="engine/checkpoint/coordinator.py",
        old="        if (due or stops or ends_trial) and self._folder",
        new="        if (due or stops) and self._folder",
        tests=(f"{_TRIALS}::test_a_loop_with_its_own_metric_ends_after_the_step_that_follows",),
    ),
    Fault(
        name="trial-of-a-live-process-is-taken",
        about="A process takes up every trial that runs in the journal, so two processes train the same one.",
        file="engine/sweep/study.py",
        old="        if not self._hold(folder):\n            return None\n",
        new="        self._hold(folder)\n",
        tests=(f"{_STUDY}::test_a_trial_of_a_live_process_is_not_taken_and_one_of_a_dead_process_is",),
    ),
    Fault(
        name="reports-again-after-a-kill",
        about="A trial that is taken up counts its earlier reports as none, so old updates are reported twice.",
        file="engine/sweep/study.py",
        old="return Assignment(trial.number, values, folder, reported)",
        new="return Assignment(trial.number, values, folder, 0)",
        tests=(f"{_STUDY}::test_a_trial_of_a_live_process_is_not_taken_and_one_of_a_dead_process_is",),
    ),
    Fault(
        name="last-loss-instead-of-the-mean",
        about="A report has the metric of one step, so noise decides which trials are pruned.",
        file="engine/sweep/trial.py",
        old="self._sum, self._count = self._sum + value, self._count + 1",
        new="self._sum, self._count = value, 1",
        tests=(f"{_TRIALS}::test_a_report_is_the_mean_since_the_last_one",),
    ),
    Fault(
        name="promoted-and-pruned-again",
        about="The pruner stops a promoted trial at its first report.",
        file="engine/sweep/study.py",
        old="return _PROMOTED not in self._trial.user_attrs and bool(",
        new="return bool(",
        tests=(f"{_STUDY}::test_promoted_trials_continue_in_their_folders_and_are_not_pruned",),
    ),
    Fault(
        name="sigterm-counts-as-pruned",
        about="The bit that ends a trial counts as a SIGTERM, so the first pruned trial ends the sweep.",
        file="engine/step/state.py",
        old="return bool(self.stops % ENDS_TRIAL)",
        new="return bool(self.stops)",
        tests=(f"{_TRIALS}::test_a_loop_with_its_own_metric_ends_after_the_step_that_follows",),
    ),
)
