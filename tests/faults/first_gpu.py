"""Faults of what a first GPU meets: ranks that share it, gloo beside it, and the benchmark that spends its time."""

from tests.faults.fault import Fault

_SHARED = "tests/emulated_device/test_shared_device.py"

FIRST_GPU = (
    Fault(
        name="fresh-sums-zeroed-first",
        about="A gradient sum in fp32 is filled with zeros before its first product is added.",
        file="kernels/ops/linear.py",
        old="        torch.mm(a, b, out_dtype=total.dtype, out=total)\n",
        new="        torch.addmm(total.zero_(), a, b, out_dtype=total.dtype, out=total)\n",
        tests=("tests/kernels/ops/test_linear.py::test_a_fresh_wide_sum_is_one_operator_that_reads_no_zeros",),
    ),
    Fault(
        name="batches-from-pageable-memory",
        about="Batches in pageable memory go through a buffer of the driver, for which the host may wait.",
        file="kernels/device.py",
        old="        if not pageable:\n",
        new="        if not pageable or tensor.numel():\n",
        tests=("tests/emulated_device/test_host_waits.py::test_the_host_waits_once_a_step",),
    ),
    Fault(
        name="backward-of-a-shared-device-in-one-thread",
        about="Ranks that share a device run their backwards in the one thread of that device, and training hangs.",
        file="parallel/comm/threads.py",
        old="        with torch.autograd.set_multithreading_enabled(False) if shared else nullcontext():\n",
        new="        with nullcontext():\n",
        tests=(f"{_SHARED}::test_ranks_that_share_a_device_train_to_the_bits_of_the_cpu",),
    ),
    Fault(
        name="one-generator-for-ranks-of-a-device",
        about="Ranks that share a device go on with the random state in which another rank has left its generator.",
        file="parallel/comm/threads.py",
        old="    turns, posts = Turns(size, generators), ",
        new="    turns, posts = Turns(size), ",
        tests=(f"{_SHARED}::test_ranks_that_share_a_device_train_to_the_bits_of_the_cpu",),
    ),
    Fault(
        name="posted-copies-read-before-they-are-made",
        about="A rank reads what another one has posted without a wait for the stream that copies it.",
        file="kernels/device.py",
        old="            hand_over(device, self._event, (self._copy,))\n",
        new="            pass\n",
        tests=(f"{_SHARED}::test_ranks_that_share_a_device_train_to_the_bits_of_the_cpu",),
    ),
    Fault(
        name="addresses-of-a-device-given-to-gloo",
        about="Ranks with accelerators in a gloo group give it the addresses of their devices.",
        file="parallel/comm/torch_backend.py",
        old='    return is_host(device) or dist.get_backend() != "gloo"\n',
        new="    return True\n",
        tests=(
            "tests/emulated_device/test_gloo.py::test_ranks_of_a_gloo_group_train_on_devices_to_the_bits_of_the_cpu",
        ),
    ),
    Fault(
        name="results-left-on-the-host",
        about="What gloo has put into pinned memory does not come back to the device.",
        file="parallel/comm/staged_backend.py",
        old="            tensor.copy_(host)\n",
        new="            host.copy_(tensor)\n",
        tests=(
            "tests/emulated_device/test_gloo.py::test_ranks_of_a_gloo_group_train_on_devices_to_the_bits_of_the_cpu",
        ),
    ),
    Fault(
        name="control-sums-set-by-the-host",
        about="Numbers of the control sums are copied to the device one by one, for which CUDA's host waits.",
        file="engine/step/state.py",
        old="                packed[place].fill_(value)",
        new="                packed[place] = value",
        tests=("tests/emulated_device/test_host_waits.py::test_the_host_waits_once_a_step",),
    ),
    Fault(
        name="host-copies-of-written-tensors",
        about="The host answers for a tensor with the elements from before it was written.",
        file="parallel/context/recipe_mode.py",
        old="tensor._version == version else None",
        new="True else None",
        tests=(
            "tests/parallel/context/test_recipe.py::test_the_host_answers_nothing_about_a_tensor_that_code_has_written",
        ),
    ),
    Fault(
        name="relu-input-not-kept",
        about="The input of relu, whose sign its gradient needs, is not kept.",
        file="kernels/gpu/matmul.py",
        old='    if KEEPS and ACTIVATION == "relu":\n',
        new="    if KEEPS and not KEEPS:\n",
        tests=("tests/kernels/ops/test_linear.py::test_relu_has_the_sign_of_the_sum_before_it_is_rounded",),
    ),
)
