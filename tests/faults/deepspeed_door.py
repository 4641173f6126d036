"""Faults behind DeepSpeed's names: schedules, accumulation, calls beside the engine, parts of the parameters."""

from tests.faults.fault import Fault

_RESTATED = "tests/deepspeed/test_restated.py::test_a_program_gives_what_deepspeed_gives"
_KEYS = "tests/engine/step/test_accumulation_keys.py"
_MEMBERS = "tests/deepspeed/test_members.py"

DEEPSPEED_DOOR = (
    Fault(
        name="scheduler-states-loaded-anyway",
        about="load_lr_scheduler_states=False is ignored, and the schedule goes on.",
        file="engine/checkpoint/resume.py",
        old="        if self._options.scheduler_states:\n",
        new="        if True:\n",
        tests=(_RESTATED,),
    ),
    Fault(
        name="rates-one-update-late",
        about="A schedule shows the rate of the update that was made instead of the next one.",
        file="engine/optim/lr_schedules.py",
        old="zip(self.optimizer.param_groups, self.rates(self.last_epoch), strict=True)",
        new="zip(self.optimizer.param_groups, self.rates(max(0, self.last_epoch - 1)), strict=True)",
        tests=(_RESTATED,),
    ),
    Fault(
        name="owned-accumulation-averaged",
        about="A loop that owns its accumulation gets the mean over its backwards instead of the sum by the key.",
        file="engine/step/user_loop.py",
        old="first_of_all = 0.0 if step.microbatches else float(self._accumulation)",
        new="first_of_all = 1.0",
        tests=(f"{_KEYS}::test_each_step_updates_where_the_loop_owns_the_accumulation",),
    ),
    Fault(
        name="added-gradients-averaged",
        about='gradient_allreduce_op "sum" still averages over data ranks.',
        file="engine/step/state.py",
        old="return self.scale / self.added_ranks",
        new="return self.scale",
        tests=(f"{_KEYS}::test_gradients_of_data_ranks_are_added",),
    ),
    Fault(
        name="nested-keys-of-a-state-not-looked-at",
        about="Keys of a client state that are no strings become strings, unless they are in the outermost dict.",
        file="engine/checkpoint/run_state.py",
        old="    if depth > _DEPTH:\n",
        new="    if depth:\n",
        tests=(f"{_MEMBERS}::test_a_client_state_has_strings_for_keys",),
    ),
    Fault(
        name="outputs-of-direct-calls-not-watched",
        about="At ZeRO 3, a backward through a direct call of the model reads memory that was freed.",
        file="zero/gather/gatherer.py",
        old="            return self._anywhere.get(group)\n",
        new="            return None\n",
        tests=("tests/engine/step/test_direct_calls.py::test_the_model_and_its_methods_are_called_directly",),
    ),
    Fault(
        name="zero-grad-of-the-model-drops-nothing",
        about="model.zero_grad() leaves the gradients in the engine, and the next step uses them.",
        file="zero/reduce/gradient_guard.py",
        old="            if module is model and drop is not None:\n                drop()\n",
        new="",
        tests=("tests/zero/reduce/test_gradient_guard.py::test_zero_grad_of_the_model_is_that_of_the_engine",),
    ),
    Fault(
        name="left-out-parameters-trained",
        about="Parameters that the user's optimizer leaves out are not frozen, and the run breaks or trains them.",
        file="engine/build/untrained.py",
        old="left = [name for name, parameter in trained.items() if id(parameter) not in held]",
        new="left = list[str]()",
        tests=(
            "tests/engine/optim/test_param_groups.py::test_an_optimizer_over_some_of_the_parameters_trains_those_alone",
        ),
    ),
    Fault(
        name="norm-lost-between-updates",
        about="After a step that makes no update, the engine object knows no gradient norm.",
        file="engine/deepspeed/returned.py",
        old="        if report is not None:\n            self.norm = report.grad_norm\n",
        new="        self.norm = report.grad_norm if report is not None else None\n",
        tests=(f"{_MEMBERS}::test_a_norm_stays_after_a_step_without_an_update",),
    ),
    Fault(
        name="sentence-about-a-missing-module-swallowed",
        about="`from engine.deepspeed import ...` of what is not there says only that the name cannot be imported.",
        file="engine/deepspeed/missing.py",
        old="raise ModuleNotFoundError(missing_sentence(fullname.removeprefix(_DOOR)))",
        new="raise ModuleNotFoundError(missing_sentence(fullname.removeprefix(_DOOR)), name=fullname)",
        tests=("tests/deepspeed/test_missing_names.py::test_an_import_of_what_is_not_there_names_the_nearest_thing",),
    ),
    Fault(
        name="stale-forward-not-named",
        about="A backward through a forward from before the step is torch's error, without the rule.",
        file="engine/step/held_weights.py",
        old="            if self._made != made:\n",
        new="            if made < 0:\n",
        tests=("tests/engine/step/test_user_loop.py::test_mistakes_of_a_loop_are_sentences",),
    ),
    Fault(
        name="waiting-model-keeps-its-weights",
        about="A model whose plan waits for a batch shows the old weights after load_checkpoint.",
        file="engine/checkpoint/load.py",
        old=(
            "        source.read([ReadRequest(stored, Part(tuple(target.shape)).whole(), as_bytes(values))])\n"
            "        overwrite(target, values)\n"
        ),
        new="        source.read([ReadRequest(stored, Part(tuple(target.shape)).whole(), as_bytes(values))])\n",
        tests=(f"{_MEMBERS}::test_a_pipeline_shows_loaded_weights_before_its_first_batch",),
    ),
    Fault(
        name="keywords-of-forward-late",
        about="The curriculum and the layer drop follow half of the steps.",
        file="engine/deepspeed/deepspeed_engine.py",
        old="self._scheduled.call(args, kwargs, self.global_steps)",
        new="self._scheduled.call(args, kwargs, self.micro_steps // 4)",
        tests=(
            "tests/deepspeed/test_scheduled.py::test_forward_is_given_what_belongs_to_the_step_also_after_a_checkpoint",
        ),
    ),
    Fault(
        name="frozen-weights-of-an-excluding-save-sought",
        about="A checkpoint that left frozen parameters out by exclude_frozen_parameters cannot be loaded.",
        file="engine/checkpoint/run_state.py",
        old="""        config["checkpoint"]["frozen"] &= whole  # a load then expects no frozen parameter\n""",
        new="",
        tests=(f"{_MEMBERS}::test_a_checkpoint_leaves_out_frozen_parameters_when_asked",),
    ),
    Fault(
        name="door-decays-weights-without-the-key",
        about="AdamW without weight_decay decays weights by 0.01, where DeepSpeed's own decays none.",
        file="engine/deepspeed/setup.py",
        old='"params": {"weight_decay": 0.0, **params}}',
        new='"params": {**params}}',
        tests=("tests/deepspeed/test_names.py::test_weights_decay_without_the_key_as_by_deepspeeds_own_optimizers",),
    ),
    Fault(
        name="door-clips-nothing-without-the-key",
        about="A configuration without gradient_clipping is not clipped, where DeepSpeed clips at 1.",
        file="engine/deepspeed/setup.py",
        old='"initial_weights": "rank0"}',
        new='"initial_weights": "rank0", "gradient_clipping": 0.0}',
        tests=("tests/deepspeed/test_names.py::test_the_norm_is_clipped_at_1_unless_the_configuration_says_otherwise",),
    ),
)
