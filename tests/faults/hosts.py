"""Faults of other libraries' loops over the engine: owners of values, steps of a pipeline, clipping, replicas."""

from tests.faults.fault import Fault

_ARGUMENTS = "tests/engine/huggingface/test_arguments.py"
_STEPS = "tests/engine/huggingface/test_whole_steps.py"
_SETTINGS = "tests/engine/huggingface/test_loop_settings.py"
_LOOP = "tests/engine/huggingface/test_own_loop.py"
_CLIPPING = "tests/engine/step/test_clipping.py"
_PIPED = "tests/engine/step/test_pipeline_loop.py"
_LIGHTNING = "tests/engine/lightning/test_hosted_module.py"

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
    Fault(
        name="clipping-of-the-loop-ignored",
        about="A step clips to the norm of the configuration, whatever the loop has said.",
        file="engine/step/update.py",
        old="        return self._config.gradient_clipping if step.max_norm is None else step.max_norm\n",
        new="        return self._config.gradient_clipping\n",
        tests=(f"{_CLIPPING}::test_the_norm_is_that_of_one_process",),
    ),
    Fault(
        name="norm-of-one-rank",
        about="The norm that a loop is told is that of the shards of its own rank.",
        file="engine/step/user_loop.py",
        old='        runtime.comm.all_reduce(squared, "world", "gradient norm").wait()\n',
        new="",
        tests=(f"{_CLIPPING}::test_the_norm_is_that_of_one_process",),
    ),
    Fault(
        name="accumulation-of-the-loop-overruled",
        about="A configuration that contradicts a loop of the user's own is overruled without a word.",
        file="engine/huggingface/loop_settings.py",
        old="        if config.get(key) is not None and config[key] != value:\n",
        new="        if False:\n",
        tests=(f"{_SETTINGS}::test_two_owners_are_refused",),
    ),
    Fault(
        name="ranks-of-a-replica-summed",
        about="A sum over the ranks of an Accelerator counts each tensor rank, and metrics are twice as large.",
        file="engine/huggingface/accelerator.py",
        old='        if reduction != "sum" or copies == 1:\n',
        new="        if True:\n",
        tests=(f"{_LOOP}::test_mistakes_are_one_sentence_and_replicas_count_once",),
    ),
    Fault(
        name="clipped-twice",
        about="A second clip_grad_norm_ in a step replaces the first without a word.",
        file="engine/huggingface/own_loop.py",
        old="        if self._clipped:\n",
        new="        if False:\n",
        tests=(f"{_LOOP}::test_mistakes_are_one_sentence_and_replicas_count_once",),
    ),
    Fault(
        name="parameters-beside-the-module-stay",
        about="Parameters of a LightningModule beside the placed module are never trained, and nobody says so.",
        file="engine/lightning/hosted_module.py",
        old="    if beside:\n",
        new="    if False:\n",
        tests=(f"{_LIGHTNING}::test_parameters_beside_it_are_refused",),
    ),
    Fault(
        name="backward-through-old-weights",
        about="The stages of a pipeline run back through weights that an update has changed.",
        file="engine/step/pipeline_call.py",
        old="        if self._updates != self._arrivals.updates:\n",
        new="        if False:\n",
        tests=(f"{_PIPED}::test_mistakes_are_sentences_on_every_stage",),
    ),
    Fault(
        name="outputs-without-gradient",
        about="Gradients of a pipeline's outputs do not reach the last stage, and its weights stay as they are.",
        file="engine/step/pipeline_call.py",
        old="        self._gradients[part][:] = gradients\n",
        new="        self._gradients[part][:] = [None] * len(gradients)\n",
        tests=(f"{_PIPED}::test_every_loop_trains_as_torch_in_one_process",),
    ),
    Fault(
        name="backward-that-ends-at-the-outputs",
        about="loss.backward() over a pipeline trains nothing, and nobody says so.",
        file="engine/step/pipeline_call.py",
        old="        if not self._arrivals.open:\n",
        new="        if False:\n",
        tests=(f"{_PIPED}::test_mistakes_are_sentences_on_every_stage",),
    ),
    Fault(
        name="second-backward-of-a-call",
        about="A second backward through one forward of a pipeline runs into activations that are gone.",
        file="engine/step/pipeline_call.py",
        old="        if self._spent:\n",
        new="        if False:\n",
        tests=(f"{_PIPED}::test_mistakes_are_sentences_on_every_stage",),
    ),
    Fault(
        name="means-of-parts-joined",
        about="A model's own mean loss of a part of a batch is taken for rows of the batch.",
        file="engine/program/call_parts.py",
        old="        if not shape or shape[0] not in rows:\n",
        new="        if False:\n",
        tests=(f"{_PIPED}::test_mistakes_are_sentences_on_every_stage",),
    ),
    Fault(
        name="parts-of-the-configuration-ignored",
        about="A batch goes through a pipeline as one part, whatever rows of a part the configuration has.",
        file="engine/huggingface/loop_settings.py",
        old="    return rows if isinstance(rows, int) and rows > 0 else None\n",
        new="    return None\n",
        tests=(f"{_SETTINGS}::test_a_pipeline_may_have_a_batch_of_the_loader_in_equal_parts",),
    ),
)
