"""Faults of frozen weights that are held as codes."""

from tests.faults.fault import Fault

_FORMAT = "tests/kernels/codecs/test_weight_format.py"
_WEIGHT = "tests/kernels/codecs/test_weight_format.py"
_PARITY = "tests/engine/parity/test_quantized_base.py"
_CHECKPOINT = "tests/engine/checkpoint/test_quantized_base.py"

QUANTIZED_BASE = (
    Fault(
        name="scales-of-a-part",
        about="Tensor ranks that cut rows quantize their part with its own scales, so that each grid has another base.",
        file="parallel/model/quantized_layers.py",
        old="    if form.runs:\n",
        new="    if False:\n",
        tests=(f"{_PARITY}::test_a_grid_trains_on_the_values_of_the_codes",),
    ),
    Fault(
        name="values-kept-for-backward",
        about="A transposed weight is made of its codes at once, so that autograd keeps the values of every layer.",
        file="kernels/codecs/weight_format.py",
        old="    _aten.t.default, _aten.transpose.int, ",
        new="    ",
        tests=(f"{_WEIGHT}::test_autograd_saves_codes",),
    ),
    Fault(
        name="scale-that-codes-do-not-give-back",
        about="The largest number of a block does not come back, so that a base that is read again has other codes.",
        file="kernels/codecs/weight_format.py",
        old="codes_RL.view(torch.int8).float().div_(127)",
        new="codes_RL.view(torch.int8).float().div_(128)",
        tests=(f"{_FORMAT}::test_values_of_codes_have_the_same_codes",),
    ),
    Fault(
        name="nibbles-the-other-way",
        about="Two codes of a byte are read in the wrong order.",
        file="kernels/codecs/weight_format.py",
        old="[book[byte % 16], book[byte // 16]]",
        new="[book[byte // 16], book[byte % 16]]",
        tests=(f"{_FORMAT}::test_an_error_is_at_most_half_a_step_of_its_block",),
    ),
    Fault(
        name="codes-counted-as-values",
        about="The plan counts the bytes of the values of frozen weights that are held as codes.",
        file="engine/planning/budgets.py",
        old="    if quantized is not None:\n        return quantized.bytes\n",
        new="",
        tests=(f"{_PARITY}::test_a_grid_trains_on_the_values_of_the_codes",),
    ),
    Fault(
        name="base-of-a-folder-not-read",
        about="A base that is read from init_from stays zero where it is held as codes.",
        file="engine/checkpoint/load.py",
        old="        self._read_quantized()\n",
        new="",
        tests=(f"{_CHECKPOINT}::test_a_model_without_content_reads_its_base_into_codes",),
    ),
    Fault(
        name="foreign-codes-on-tensor-ranks",
        about="Codes of bitsandbytes are cut and traced as if they were values.",
        file="engine/precision/frozen_weights.py",
        old="    if asked is not None:\n",
        new="    if False:\n",
        tests=("tests/engine/precision/test_frozen_weights.py::test_what_needs_more_than_whole_weights_is_refused",),
    ),
    Fault(
        name="foreign-codes-in-a-checkpoint",
        about="A checkpoint stores codes of bitsandbytes without their scales.",
        file="engine/precision/frozen_weights.py",
        old='    if config.checkpoint.frozen:\n        raise ConfigError(\n            f"checkpoint',
        new='    if False:\n        raise ConfigError(\n            f"checkpoint',
        tests=("tests/engine/precision/test_frozen_weights.py::test_a_checkpoint_of_codes_without_scales_is_refused",),
    ),
)
