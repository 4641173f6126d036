"""Faults in what scripts of DeepSpeed ask, count and log: momenta, samples, loaders, answers, Weights & Biases."""

from tests.faults.fault import Fault

_RESTATED = "tests/deepspeed/test_restated.py::test_a_program_gives_what_deepspeed_gives"
_MEMBERS = "tests/deepspeed/test_members.py"
_CONFIG = "tests/engine/config/test_deepspeed.py"

ANSWERS_TO_DEEPSPEED = (
    Fault(
        name="one-momentum-for-all-groups",
        about="OneCycle gives every group of the optimizer the momentum of the first one.",
        file="engine/optim/lr_schedules.py",
        old="momenta = tuple(partial(one_cycle_momentum, p=p) for p in params)",
        new="momenta = tuple(partial(one_cycle_momentum, p=params[0]) for p in params)",
        tests=("tests/engine/optim/test_lr_schedules.py::test_lists_give_each_group_its_momentum",),
    ),
    Fault(
        name="cycle-begins-at-its-peak",
        about="The schedule, asked before its first step, gives the momentum of the peak.",
        file="engine/deepspeed/runtime/lr_schedules.py",
        old="return self._betas() if self.last_epoch else",
        new="return self._betas() if self.last_epoch >= 0 else",
        tests=(_RESTATED,),
    ),
    Fault(
        name="samples-of-equal-steps",
        about="A step of a loop that owns its accumulation counts as many rows as the configuration says.",
        file="engine/deepspeed/engine_state.py",
        old="            self.taken += self.waiting\n",
        new="            self.taken += self._steps\n",
        tests=(_RESTATED,),
    ),
    Fault(
        name="evaluation-rows-shuffled",
        about="The loader of an evaluation shuffles its rows.",
        file="engine/deepspeed/deepspeed_engine.py",
        old='            route == "train",\n',
        new="            True,\n",
        tests=(_RESTATED,),
    ),
    Fault(
        name="optimizer-of-a-callable-wrapped",
        about="initialize returns a wrapper in place of the optimizer that the callable has made.",
        file="engine/deepspeed/returned.py",
        old="    if plain and own is None and given is not None and engine.built:\n",
        new="    if plain and own is not None and given is None and engine.built:\n",
        tests=(_RESTATED,),
    ),
    Fault(
        name="part-on-the-host-not-answered",
        about="zero_partial_offload answers 1 whatever part of the state the host has.",
        file="engine/deepspeed/asked.py",
        old="        return self._zero.offload_optimizer.ratio\n",
        new="        return 1.0\n",
        tests=(f"{_MEMBERS}::test_members_about_zero_answer_by_what_the_run_does",),
    ),
    Fault(
        name="project-of-weights-and-biases-left-out",
        about="DeepSpeed's section wandb is read, and nothing is logged.",
        file="engine/config/deepspeed/forms.py",
        old='    move(raw, "monitor.wandb", project, "wandb.project", problems)\n',
        new="",
        tests=(f"{_CONFIG}::test_forms_act_as_present_keys",),
    ),
    Fault(
        name="ranks-of-the-script-not-joined",
        about="init_distributed leaves out where the script lets its ranks meet, and each one trains alone.",
        file="engine/deepspeed/comm.py",
        old="    if not dist.is_initialized() and (init_method is not None or rank >= 0):\n",
        new="    if not dist.is_initialized() and init_method is None and rank >= 0:\n",
        tests=(f"{_MEMBERS}::test_ranks_meet_where_the_script_says",),
    ),
)
