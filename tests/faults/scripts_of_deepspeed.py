"""Faults behind DeepSpeed's scripts as they are: gradients so far, one engine after another, words of its launcher."""

from tests.faults.fault import Fault

_AGAIN = "tests/deepspeed/test_again.py::test_engines_train_a_model_one_after_another"
_NAMED = "tests/engine/test_named_state.py::test_what_is_read_and_written_is_as_in_one_process"
_WORDS = "tests/launch/jobs/test_deepspeed_options.py::test_a_spelling_is_taken_and_said"
_CORES = "tests/launch/jobs/test_bound_cores.py"

SCRIPTS_OF_DEEPSPEED = (
    Fault(
        name="gradients-so-far-are-dropped",
        about="What was read of the gradients inside an accumulation is not in the update.",
        file="zero/reduce/reducer.py",
        old="            flat.gradient(part).add_(sums)\n",
        new="            flat.gradient(part)\n",
        tests=(_NAMED,),
    ),
    Fault(
        name="gradients-so-far-are-their-mean",
        about="Gradients inside an accumulation are divided by the microbatches so far, and not by those of the step.",
        file="engine/step/user_loop.py",
        old="to_come = 1.0 if self._due(step) else self._accumulation / step.microbatches",
        new="to_come = 1.0",
        tests=("tests/deepspeed/test_restated.py::test_a_program_gives_what_deepspeed_gives",),
    ),
    Fault(
        name="left-shards-in-another-order",
        about="A model whose ZeRO 3 engine has ended becomes whole with its shards in another order.",
        file="zero/gather/left_shards.py",
        old="for rank in bucket.ranks]",
        new="for rank in reversed(bucket.ranks)]",
        tests=(_AGAIN,),
    ),
    Fault(
        name="all-ranks-on-the-first-cores",
        about="Every rank is bound to the cores of the first one.",
        file="launch/jobs/bound_cores.py",
        old="return tuple(cores[rank * each : (rank + 1) * each])",
        new="return tuple(cores[:each])",
        tests=(_CORES,),
    ),
    Fault(
        name="cores-of-a-list-are-not-used",
        about="--bind-cores-to binds to all cores of the host.",
        file="launch/jobs/torchrun.py",
        old='listed = ["--cores", request.cores] if request.cores else []',
        new="listed = list[str]()",
        tests=(_WORDS,),
    ),
    Fault(
        name="meeting-at-half-an-address",
        about="Hosts meet at an IPv6 address whose end is read as a port.",
        file="launch/jobs/torchrun.py",
        old='f"[{self.address}]:{self.port}" if ":" in self.address else',
        new='f"{self.address}:{self.port}" if ":" in self.address else',
        tests=(_WORDS,),
    ),
    Fault(
        name="this-host-over-ssh",
        about="A hostfile that lists this host alone starts it over ssh.",
        file="launch/jobs/launch_command.py",
        old='here = place == "ssh" and _names_this_host(options)',
        new="here = False",
        tests=(_WORDS,),
    ),
    Fault(
        name="name-of-a-user-cuts-a-host",
        about="--include takes the sign of user@host for the one between hosts.",
        file="launch/jobs/hostfile.py",
        old="        if joined != word and _named(joined, known)[0] in known:\n",
        new="        if False:\n",
        tests=(_WORDS,),
    ),
    Fault(
        name="csv-monitor-without-its-job",
        about="csv_monitor writes every job of a folder into one file.",
        file="engine/config/deepspeed/translate.py",
        old='for key in ("output_path", "job_name") if read.get(key)]',
        new='for key in ("output_path",) if read.get(key)]',
        tests=("tests/engine/config/test_deepspeed.py::test_a_csv_monitor_writes_the_engines_file",),
    ),
)
