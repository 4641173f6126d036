"""Faults of what is kept on the host."""

from tests.faults.fault import Fault

_FILE = "parallel/activation_checkpointing/host_activations.py"
_TESTS = "tests/parallel/activation_checkpointing/test_host_activations.py"
_DEVICE = "tests/emulated_device/test_training.py::test_every_grid_trains_to_the_bits_of_the_cpu"

HOST_MEMORY = (
    Fault(
        name="activation-read-before-it-is-back",
        about="A backward does not wait for the copies that bring its activations back.",
        file="kernels/device.py",
        old="    event.wait()\n    current = ",
        new="    current = ",
        tests=(f"{_DEVICE}[activations on the host-policies1]",),
    ),
    Fault(
        name="activation-sent-before-it-is-there",
        about="An activation is copied to the host before it is computed.",
        file=_FILE,
        old="        with self._stream.behind():\n            host.copy_",
        new="        with self._stream.after(()):\n            host.copy_",
        tests=(f"{_DEVICE}[activations on the host-policies1]",),
    ),
    Fault(
        name="activation-of-another-version",
        about="A tensor that was written since it was sent to the host is taken for what lies there.",
        file=_FILE,
        old="key = (_memory(tensor), tensor._version, ",
        new="key = (_memory(tensor), 0, ",
        tests=(f"{_TESTS}::test_a_tensor_that_two_blocks_save_is_sent_again_once_it_was_written",),
    ),
    Fault(
        name="activations-all-back-at-once",
        about="What has come back stays on the device to the end of the backward.",
        file=_FILE,
        old="        if kept not in needed:\n            kept.back = None",
        new="        pass",
        tests=(f"{_TESTS}::test_the_device_holds_two_blocks_at_most",),
    ),
    Fault(
        name="activations-not-ahead",
        about="The activations of a block come only once its backward has begun.",
        file=_FILE,
        old="if earlier is not None and not earlier.here:",
        new="if earlier is not None and earlier.here:",
        tests=(f"{_TESTS}::test_a_block_comes_back_while_the_one_after_it_computes",),
    ),
    Fault(
        name="weights-sent-to-the-host",
        about="Weights that autograd saves go to the host with the activations, and gathered ones are kept there.",
        file=_FILE,
        old="not extent or _belongs_to(block, tensor)",
        new="not extent",
        tests=(f"{_TESTS}::test_each_run_of_memory_goes_out_once",),
    ),
)
