"""Faults of state moved between phases, of parameters on the host, of the part by itself, of delayed updates."""

from tests.faults.fault import Fault

_AWAY = "tests/zero/state/test_offloaded_states.py"
_HOSTED = "tests/zero/offload/test_host_parameters.py"
_RATIO = "tests/engine/planning/test_host_placement.py"
_DELAYED = "tests/zero/offload/test_delayed_update.py"

STATE_BETWEEN_PLACES = (
    Fault(
        name="moved-state-comes-back-empty",
        about="State that was in host memory gets its device memory back, and not its values.",
        file="zero/state/offloaded_states.py",
        old="                each.whole.copy_(each.copy, non_blocking=True)\n",
        new="                each.whole.zero_()\n",
        tests=(f"{_AWAY}::test_bits_are_those_of_a_run_without_a_break",),
    ),
    Fault(
        name="moved-state-stays-on-the-device",
        about="offload_states copies state to the host and frees nothing on the device.",
        file="zero/state/offloaded_states.py",
        old="                whole.untyped_storage().resize_(0)\n",
        new="                pass\n",
        tests=(f"{_AWAY}::test_moved_bytes_are_those_of_the_plan",),
    ),
    Fault(
        name="step-without-its-masters",
        about="A step is let through while masters are in host memory, and reads memory that is not there.",
        file="zero/state/offloaded_states.py",
        old="        needs = _NEEDS.get(call, frozenset(KINDS))\n",
        new="        needs = _NEEDS.get(call, frozenset())\n",
        tests=(f"{_AWAY}::test_calls_that_need_what_is_away_are_one_sentence_and_others_run",),
    ),
    Fault(
        name="parameters-guarded-for-ever",
        about="Parameters that have come back from host memory refuse to be read as if they were there.",
        file="zero/state/offloaded_states.py",
        old="                self._concealed.append(parameter)\n",
        new="",
        tests=(f"{_AWAY}::test_frozen_parameters_and_those_of_a_reader_are_guarded",),
    ),
    Fault(
        name="shard-not-brought-before-its-gather",
        about="A bucket is gathered from the memory of the device, into which nobody has copied the host's shard.",
        file="zero/gather/unsharded_buckets.py",
        old="                flat.params[flat.shard].copy_(flat.kept, non_blocking=True)\n",
        new="                pass\n",
        tests=(f"{_HOSTED}::test_bits_are_those_of_parameters_on_the_device",),
    ),
    Fault(
        name="updated-weights-stay-in-the-master",
        about="The host updates a master and leaves the parameters that are gathered as they were.",
        file="zero/offload/host_copies.py",
        old="            flat.kept.copy_(flat.master.to(flat.kept.dtype))\n",
        new="            pass\n",
        tests=(f"{_HOSTED}::test_bits_are_those_of_parameters_on_the_device",),
    ),
    Fault(
        name="host-parameters-counted-on-the-device",
        about="The plan counts shards of parameters that lie in host memory as memory of the device.",
        file="engine/planning/budgets.py",
        old="    held = host if hosts_parameters(config) else state\n",
        new="    held = state\n",
        tests=(f"{_HOSTED}::test_live_bytes_are_what_the_plan_says",),
    ),
    Fault(
        name="part-larger-than-it-must-be",
        about="The part of the optimizer state that goes to the host by itself is one bucket too large.",
        file="engine/planning/host_state.py",
        old="    return ratios[first] if first < len(ratios) else None\n",
        new="    return ratios[min(first + 1, len(ratios) - 1)] if first < len(ratios) else None\n",
        tests=(f"{_RATIO}::test_the_ratio_fits_and_the_next_smaller_one_does_not",),
    ),
    Fault(
        name="ratio-rounded-to-one-more-bucket",
        about="A quotient that was rounded up moves one bucket more to the host than the plan has counted.",
        file="engine/planning/host_state.py",
        old="                ratio = math.nextafter(ratio, 0.0)\n",
        new="                break\n",
        tests=(f"{_RATIO}::test_every_bucket_has_a_ratio_and_no_larger_one_has_as_few",),
    ),
    Fault(
        name="delayed-weights-never-brought",
        about="The weights of an update beside a step are not copied to the device, which computes with old ones.",
        file="zero/offload/delayed_update.py",
        old="        self._update = self._given = None\n        self._give()\n",
        new="        self._update = self._given = None\n",
        tests=(f"{_DELAYED}::test_bits_are_those_of_the_same_delay_by_hand",),
    ),
    Fault(
        name="delayed-update-waited-for",
        about="The update is waited for in its own step, so nothing runs beside the next one, and nothing is delayed.",
        file="zero/offload/delayed_update.py",
        old="        self._update = self._thread.submit(update)\n",
        new="        self._update = self._thread.submit(update)\n        self.finish()\n",
        tests=(f"{_DELAYED}::test_bits_are_those_of_the_same_delay_by_hand",),
    ),
    Fault(
        name="gradients-overwritten-beside-their-update",
        about="The sums of the next step are copied over those that an update on the host still reads.",
        file="zero/offload/host_copies.py",
        old="self.late or (is_host(self._device) and reduction.under_way):",
        new="(is_host(self._device) and reduction.under_way):",
        tests=("tests/zero/offload/test_host_copies.py::test_sums_are_left_alone_while_an_update_may_read_them",),
    ),
    Fault(
        name="save-beside-an-update",
        about="A checkpoint is copied while an update writes masters and moments.",
        file="engine/step/runtime.py",
        old="        with self.parts.entering(StepPart.saving):\n            self.settle()\n",
        new="        with self.parts.entering(StepPart.saving):\n",
        tests=(f"{_DELAYED}::test_a_save_finishes_the_update_and_a_resumed_run_goes_on_alike",),
    ),
    Fault(
        name="written-weights-lost-beside-an-update",
        about="What a user writes into parameters while their update runs is overwritten, and nobody is told.",
        file="zero/offload/delayed_update.py",
        old="            if written:\n",
        new="            if False:\n",
        tests=(f"{_DELAYED}::test_weights_that_are_written_beside_the_update_are_one_sentence",),
    ),
)
