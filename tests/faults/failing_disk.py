"""Faults of how a disk that fails is met."""

from tests.faults.fault import Fault

_FAILING = "tests/zero/offload/test_failing_disk.py"
_MAPPED = "tests/zero/offload/test_mapped_memory.py"
_STEP_BEFORE = (f"{_FAILING}::test_a_disk_that_takes_no_more_leaves_the_step_before",)

FAILING_DISK = (
    Fault(
        name="failed-block-not-moved-again",
        about="A block that fails once fails the update.",
        file="zero/offload/block_file.py",
        old="                self.direct = False\n            move()\n",
        new="                self.direct = False\n                move()\n                return\n            raise\n",
        tests=(f"{_FAILING}::test_a_block_that_fails_is_moved_again",),
    ),
    Fault(
        name="short-transfer-taken-for-a-whole-one",
        about="What a call of the system leaves out of a block is never moved.",
        file="zero/offload/block_file.py",
        old="            done += whole\n",
        new="            done = len(block)\n",
        tests=(f"{_FAILING}::test_transfers_that_move_less_are_gone_on_with",),
    ),
    Fault(
        name="part-of-a-sector-gone-on-from",
        about="A direct transfer that ends inside a sector is gone on with from there, where no direct one can begin.",
        file="zero/offload/block_file.py",
        old="            whole = count if done + count == len(block) or not self.direct else count - count % SECTOR\n",
        new="            whole = count\n",
        tests=(f"{_FAILING}::test_transfers_that_move_less_are_gone_on_with",),
    ),
    Fault(
        name="valid-slot-written",
        about="New moments go over those of the step before, which a failed update then cannot go back to.",
        file="zero/offload/disk_moments.py",
        old="        self._fresh = 0 if self.valid != 0 else 1\n",
        new="        self._fresh = self.valid or 0\n",
        tests=_STEP_BEFORE,
    ),
    Fault(
        name="weights-of-a-failed-update-kept",
        about="An update that a disk breaks off leaves some buckets with new weights and old moments.",
        file="zero/offload/disk_moments.py",
        old="        self._restore_weights()\n        self._end_update()\n",
        new="        self._end_update()\n",
        tests=_STEP_BEFORE,
    ),
    Fault(
        name="failed-update-counted",
        about="An update that was undone counts as a step of the optimizer.",
        file="zero/optim/sharded_optimizer.py",
        old="        counted.put_back(self.inner)\n",
        new="",
        tests=_STEP_BEFORE,
    ),
    Fault(
        name="weights-of-a-failed-update-not-gathered",
        about="The weights from before an update reach the masters, and not the parameters that are computed with.",
        file="zero/optim/sharded_optimizer.py",
        old="        counted.put_back(self.inner)\n        self.refresh(self._buckets)\n",
        new="        counted.put_back(self.inner)\n",
        tests=_STEP_BEFORE,
    ),
    Fault(
        name="failing-disk-kept-to-itself",
        about="A rank undoes an update that its disk breaks off, and the others keep it; the run hangs or differs.",
        file="zero/offload/disk_moments.py",
        old="            self._agreed = (self._agreement.first(self._failure is not None),)\n",
        new="            self._agreed = (0 if self._failure is not None else None,)\n",
        tests=(f"{_FAILING}::test_all_ranks_stop_with_the_sentence_of_the_one_that_failed",),
    ),
    Fault(
        name="update-not-repeated",
        about="An update that fails once stops the run.",
        file="zero/offload/disk_moments.py",
        old="        for last in (False, True):\n",
        new="        for last in (True,):\n",
        tests=(f"{_FAILING}::test_an_update_that_fails_once_is_repeated",),
    ),
    Fault(
        name="saved-after-a-loss",
        about="Moments that were lost are saved in a checkpoint.",
        file="zero/offload/disk_moments.py",
        old="        self._lost = EngineError(says)\n",
        new="",
        tests=(f"{_FAILING}::test_a_torn_block_stops_the_run",),
    ),
    Fault(
        name="loaded-moments-lost",
        about="Moments that were loaded are given up before the disk has taken them.",
        file="zero/offload/disk_moments.py",
        old="                self._state[weights][name] = moment\n",
        new="                pass\n",
        tests=(f"{_FAILING}::test_loaded_moments_that_a_disk_does_not_take_stay",),
    ),
    Fault(
        name="masters-not-mapped",
        about="Masters and gradients on the host take ordinary memory although they are to lie in files.",
        file="zero/flat_buckets.py",
        old="    if who.mapped is not None:\n        return who.mapped(count, dtype)\n    pinned",
        new="    pinned",
        tests=(f"{_MAPPED}::test_all_state_on_the_host_lies_in_files",),
    ),
)
