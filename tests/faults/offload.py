"""Faults of optimizer state on the host and on disk."""

from tests.faults.fault import Fault

_COPIES = "tests/zero/offload/test_host_copies.py"
_TRAINING = "tests/zero/offload/test_offloaded_training.py"
_DISK = "tests/zero/offload/test_disk.py"
_KERNEL = "tests/kernels/optim/test_host_update.py"
_LIBRARY = "tests/kernels/optim/test_host_update.py"
_SAVED = "tests/engine/checkpoint/test_offloaded_state.py"

OFFLOAD = (
    Fault(
        name="weights-gathered-before-the-host-updates",
        about="A bucket is copied back and gathered before the host has updated it, so weights are a step old.",
        file="zero/optim/sharded_optimizer.py",
        old="            return self.disk is None or self.disk.begin(number)\n\n        def end(number: int) -> None:\n"
        "            gathers.append(self._start_gather(self._buckets[number], rounded))\n",
        new="            gathers.append(self._start_gather(self._buckets[number], rounded))\n"
        "            return self.disk is None or self.disk.begin(number)\n\n        def end(number: int) -> None:\n",
        tests=(f"{_TRAINING}::test_bits_are_those_of_training_without_an_offload",),
    ),
    Fault(
        name="gradient-memory-used-too-early",
        about="Weights are rounded into the memory of gradients that an update still needs, and nobody is told.",
        file="zero/offload/host_copies.py",
        old="            source.copy_(flat.master)\n            self.changed(flat)\n",
        new="            source.copy_(flat.master)\n",
        tests=(f"{_COPIES}::test_the_master_is_rounded_into_the_memory_of_used_gradients",),
    ),
    Fault(
        name="gradients-of-the-step-before",
        about="The host updates from the gradients of an earlier step, because a copy from before counts as valid.",
        file="zero/offload/host_copies.py",
        old="        self._brought.pop(flat.bucket.index, None)\n",
        new="        self._brought.get(flat.bucket.index, None)\n",
        tests=(f"{_COPIES}::test_what_changed_since_the_copy_is_copied_again",),
    ),
    Fault(
        name="gradients-copied-while-they-are-reduced",
        about="The host copies the sums of a bucket while their reduction runs, so it updates from its own rows.",
        file="zero/offload/host_copies.py",
        old="        if flat.host_sums is None or self.late or (is_host(self._device) and reduction.under_way):\n",
        new="        if flat.host_sums is not None:\n            reduction = Pending()\n        else:\n",
        tests=(f"{_COPIES}::test_sums_that_are_still_reduced_are_left_to_the_wait",),
    ),
    Fault(
        name="written-gradients-not-copied-again",
        about="What the user writes into reduced gradients never reaches buckets that the host updates.",
        file="engine/step/runtime.py",
        old="            self.optimizer.copies.forget()",
        new="            pass",
        tests=("tests/zero/offload/test_written_state.py::test_written_gradients_are_used",),
    ),
    Fault(
        name="written-weights-lost-on-the-host",
        about="What the user writes into parameters is overwritten by the master on the host.",
        file="zero/optim/master_weights.py",
        old="    if flat.wide is None:\n        flat.master.copy_(kept)\n        return\n",
        new="    if flat.wide is None:\n        return\n",
        tests=("tests/zero/offload/test_written_state.py::test_written_weights_are_used",),
    ),
    Fault(
        name="loaded-weights-not-on-the-host",
        about="A checkpoint fills the parameters and not their copy on the host, from which the next update is made.",
        file="engine/checkpoint/load.py",
        old="            flat.kept.copy_(flat.wide)\n",
        new="            pass\n",
        tests=(f"{_SAVED}::test_placements_load_each_others_checkpoints",),
    ),
    Fault(
        name="copy-on-the-host-saved-as-a-master",
        about="A copy on the host in the dtype of the parameters is saved beside them, so a checkpoint grows.",
        file="engine/checkpoint/contents/local_tensors.py",
        old="state.flat.wide is not None:\n",
        new="state.flat.master is not None:\n",
        tests=(f"{_SAVED}::test_a_copy_on_the_host_is_not_saved_twice",),
    ),
    Fault(
        name="host-state-counted-on-the-device",
        about="The plan counts moments that the host keeps as memory of the device.",
        file="engine/planning/budgets.py",
        old="        place = host if bucket.index in hosted else state\n",
        new="        place = state\n",
        tests=(f"{_TRAINING}::test_live_bytes_are_what_the_plan_says",),
    ),
    Fault(
        name="one-bucket-too-few-on-the-host",
        about="Fewer buckets than the ratio asks for leave the device.",
        file="zero/offload/host_copies.py",
        old="        if elements >= ratio * layout.elements:\n",
        new="        if elements + bucket.elements > ratio * layout.elements:\n",
        tests=(f"{_COPIES}::test_the_first_buckets_until_the_ratio_is_reached",),
    ),
    Fault(
        name="moments-of-another-bucket",
        about="A bucket is updated with the moments that were read for the one before it.",
        file="zero/offload/disk_moments.py",
        old="            self._reads[number] = page, self._files[number].start_read(",
        new="            self._reads[number] = page, self._files[max(number - 1, 0)].start_read(",
        tests=(f"{_DISK}::test_bits_are_those_of_training_without_an_offload",),
    ),
    Fault(
        name="block-of-an-older-write-taken",
        about="Blocks that a disk kept from an older write are taken for the newest.",
        file="zero/offload/block_file.py",
        old="            if checked and xxhash",
        new="            if not checked and xxhash",
        tests=(f"{_DISK}::test_a_block_of_an_older_write_is_refused",),
    ),
    Fault(
        name="moments-read-before-they-are-written",
        about="A buffer is read into while it is still written, so a file gets the moments of another bucket.",
        file="zero/offload/block_file.py",
        old="            page, write = self._busy.popleft()\n            write.result()\n",
        new="            page, write = self._busy.popleft()\n",
        tests=(f"{_DISK}::test_a_buffer_is_free_when_its_write_has_ended",),
    ),
    Fault(
        name="written-moments-refused",
        about="Moments that the user has written on disk are taken for damage, and the run stops.",
        file="zero/offload/disk_moments.py",
        old="        checked = self._version == self._mapped[self.valid]._version\n",
        new="        checked = True\n",
        tests=(f"{_DISK}::test_what_the_program_writes_into_moments_is_used",),
    ),
    Fault(
        name="folder-of-a-live-engine-deleted",
        about="An engine that starts deletes the folder of one that runs.",
        file="zero/offload/scratch_folder.py",
        old="            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n            shutil.rmtree(folder",
        new="            shutil.rmtree(folder",
        tests=(f"{_DISK}::test_what_a_killed_run_left_is_deleted_and_a_live_one_is_spared",),
    ),
    Fault(
        name="last-elements-of-a-host-update-as-vectors",
        about="The last elements of an array are rounded otherwise than torch rounds them, so ranks with and without a "
        "compiler drift apart.",
        file="kernels/optim/host_update.cpp",
        old="const int64_t whole = end - (end - begin) % lanes;",
        new="const int64_t whole = end;",
        tests=(f"{_KERNEL}::test_adam_has_torchs_bits",),
    ),
    Fault(
        name="writes-of-one-bit-not-seen",
        about="Weights that a user has moved to the next bf16 number are taken for those that the host has rounded.",
        file="kernels/optim/host_update.cpp",
        old="return (rounded ^ narrow) |",
        new="return (rounded >> 1 ^ narrow >> 1) |",
        tests=(f"{_KERNEL}::test_what_is_written_into_rounded_weights_is_seen",),
    ),
    Fault(
        name="host-update-without-proof",
        about="A kernel that a compiler has made with other roundings than torch's updates the weights of some ranks.",
        file="kernels/optim/host_update.py",
        old="        if has_bits_of_torch(kernel):\n            return kernel\n",
        new="        return kernel\n",
        tests=(f"{_LIBRARY}::test_a_kernel_with_other_bits_is_not_used",),
    ),
    Fault(
        name="damaged-library-loaded",
        about="A compiled kernel that was damaged on disk is loaded into every rank of the next run.",
        file="kernels/optim/host_update.py",
        old='        if found.stem == f"{stem}-{_hashed(found.read_bytes())}":\n',
        new="        if found.exists():\n",
        tests=(f"{_LIBRARY}::test_a_damaged_library_is_made_anew",),
    ),
    Fault(
        name="every-rank-compiles",
        about="All ranks of a host compile the same kernel at once.",
        file="kernels/optim/host_update.py",
        old="        fcntl.flock(lock, fcntl.LOCK_EX)\n",
        new="",
        tests=(f"{_LIBRARY}::test_of_two_processes_one_compiles",),
    ),
)
