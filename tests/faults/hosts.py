"""Faults of Hugging Face's Trainer over the engine: owners of values, steps of a pipeline, losses of evaluation."""

from tests.faults.fault import Fault

_ARGUMENTS = "tests/engine/huggingface/test_arguments.py"
_STEPS = "tests/engine/huggingface/test_whole_steps.py"

HOSTS = (
    Fault(
        name="accumulation-of-two-owners",
        about="A configuration that contradicts TrainingArguments is overruled without a word.",
        file="engine/huggingface/arguments.py",
        old='        if given not in ("auto", None) and given != value:\n',
        new="        if False:\n",
        tests=(f"{_ARGUMENTS}::test_two_owners_are_refused",),
    ),
    Fault(
        name="optimizer-of-two-owners",
        about="The configuration's learning rate is ignored where the arguments have another one.",
        file="engine/huggingface/arguments.py",
        old='        if given != "auto" and not _equal(given, value):\n',
        new="        if False:\n",
        tests=(f"{_ARGUMENTS}::test_two_owners_are_refused",),
    ),
    Fault(
        name="bf16-of-the-arguments-ignored",
        about="TrainingArguments ask for bf16, and training runs in fp32.",
        file="engine/huggingface/arguments.py",
        old='                config["torch_autocast" if key == "bf16" else "fp16"] = {"enabled": True}\n',
        new='                config["torch_autocast" if key == "bf16" else "fp16"] = {"enabled": False}\n',
        tests=(f"{_ARGUMENTS}::test_bf16_is_autocast_unless_the_configuration_has_a_section_for_it",),
    ),
    Fault(
        name="averaged-over-microbatches-twice",
        about="In a pipeline the loss over the items of a step is averaged over its microbatches once more.",
        file="engine/huggingface/whole_steps.py",
        old="        self._factor = self._accumulation * over_ranks\n",
        new="        self._factor = over_ranks\n",
        tests=(f"{_STEPS}::test_a_step_waits_for_its_last_microbatch",),
    ),
    Fault(
        name="lacking-rows-trained-twice",
        about="Rows that fill up the last step of an epoch in a pipeline count as if they were data.",
        file="engine/huggingface/whole_steps.py",
        old='    return {**microbatch, "labels": torch.full_like(microbatch["labels"], _NO_LABEL)}\n',
        new="    return {**microbatch}\n",
        tests=(f"{_STEPS}::test_lacking_rows_and_microbatches_have_no_labels",),
    ),
    Fault(
        name="losses-of-evaluation-averaged",
        about="Losses of microbatches, which are divided by the items of their batch, are averaged in evaluation.",
        file="engine/huggingface/hosted_model.py",
        old="        loss = losses.sum()\n",
        new="        loss = losses.mean()\n",
        tests=(f"{_STEPS}::test_losses_of_microbatches_become_that_of_the_batch",),
    ),
)
