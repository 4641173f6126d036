"""Every command of the documents works: it is run here, or by a test that is named here, or it says why not."""

import ast
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, run
from benchmarks.harness.figures import ROOT, with_sections
from engine.launch.cli import main
from tests.test_documents import PAGES

VLLM = (
    'VLLM_SERVER_DEV_MODE=1 vllm serve folder --weight-transfer-config \'{"backend": "trine_http"}\' --enable-scale-out'
)
PROGRAMS = ("python", "trine", "torchrun", "pytest", "ruff", "mypy", "bash", "pip", "srun", "mpirun")
EXAMPLES = "tests/test_examples.py::"
JOBS = "tests/launch/jobs/"
PLANNER = "tests/launch/planner/"
CHECKPOINT = "tests/launch/test_checkpoint_command.py::"

RUN = (
    "trine check config.json --world 8",
    "trine schedule",
    "trine schedule --config config.json --world 8",
    "trine schedule 1f1b --ranks 4 --microbatches 8 --tokens > mine.txt",
    "trine schedule mine.txt",
    "trine schedule zb-v --ranks 4 --microbatches 8 --svg zb-v.svg --trace zb-v.json",
    "trine schedule 1f1b --backward 3 --transfer 0.2",
    "trine schema",
    "python -m benchmarks --list",
    "python -m tests.structure",
    "python -m benchmarks figures",
)
"""Executed here, in this order, in one folder."""
PLANS = (
    "trine plan config.json --world 64",
    "trine plan --layers 24 --width 2048 --heads 16 --context 4096 --vocabulary 131072 --world 48 --batch 192",
)
"""Executed with ``-m long``: each counts a large model for seconds; tests/launch/planner has small ones."""

TESTED = {
    "torchrun --nproc_per_node 4 --max-restarts 100 -m engine.launch.cli serve config.json --model models/Qwen3-8B":
        "tests/launch/test_served_kills.py::"
        "test_a_rank_killed_in_a_forward_is_503_within_five_seconds_and_its_command_runs_again",
    "trine outer config.json --host 0.0.0.0":
        "tests/engine/outer/http/test_service.py::test_the_command_prints_its_address_and_ends_at_sigterm",
    "trine outer status http://store:8140": "tests/engine/outer/http/test_service.py::test_status_is_a_table",
    "trine outer replay outer-store": "tests/engine/outer/http/test_service.py::test_a_replay_compares_all_merges",
    "trine sweep sweep.json -- train.py --steps 1000":
        "tests/launch/test_sweep_command.py::test_halving_finds_the_winner_of_the_grid_in_two_fifths_of_its_steps",
    **dict.fromkeys(
        (
            "trine sweep --nproc_per_node 4 sweep.json -- train.py --steps 1000",
            "torchrun --nproc_per_node 4 -m engine.launch.cli sweep sweep.json -- train.py --steps 1000",
        ),
        "tests/launch/test_sweep_command.py::test_torchrun_s_ranks_share_one_sweep",
    ),
    "trine sweep --resume-pruned 3 sweep.json -- train.py --steps 1000":
        "tests/launch/test_sweep_command.py::test_promoted_trials_go_on_from_their_checkpoints_to_the_same_losses",
    "torchrun --nproc_per_node 4 train.py": "tests/launch/test_reference_run.py::test_two_nodes",
    "trine check config.json optimizer.params.lr=1e-4 parallel.tensor=4 'keep_fp32=[\"*norm*\"]'":
        "tests/launch/test_cli.py::test_check_takes_overrides",
    "torchrun --nproc_per_node 4 train.py zero_optimization.stage=2":
        "tests/launch/test_reference_run.py::test_settings_take_overrides",
    **dict.fromkeys(
        (
            "torchrun --nproc_per_node 4 train.py parallel.tensor=2 parallel.pipeline=1",
            "torchrun --nproc_per_node 4 train.py --layers 8 parallel.tensor=1 parallel.pipeline=4 "
            "parallel.schedule=zb-v",
            "torchrun --nproc_per_node 4 train.py --config optimizers.json",
            "torchrun --nproc_per_node 4 train.py parallel.tensor=1 parallel.pipeline=1 bf16.enabled=true "
            "zero_optimization.offload_optimizer.device=cpu",
            "torchrun --nproc_per_node 4 train.py parallel.tensor=1 parallel.pipeline=1 zero_optimization.stage=3 "
            "zero_optimization.zero_quantized_weights=true zero_optimization.zero_quantized_gradients=true",
            "torchrun --nproc_per_node 4 train.py wire.pipeline=int8 wire.tensor=int8",
            "torchrun --nproc_per_node 4 train.py bf16.enabled=true",
            "torchrun --nproc_per_node 4 train.py kernels=reference",
        ),
        "tests/launch/test_reference_run.py::test_settings_take_overrides",
    ),
    "trine init runs/llama --out mine":
        "tests/launch/test_init_command.py::test_a_folder_with_tokenizer_trains_and_goes_on",
    "trine init model:build --out mine": "tests/launch/test_init_command.py::test_a_function_with_rows_trains",
    "torchrun --nproc_per_node 2 mine/train.py FILE.txt":
        "tests/launch/test_init_command.py::test_a_folder_with_tokenizer_trains_and_goes_on",
    "trine init MODEL": "tests/launch/test_init_command.py::test_a_function_with_rows_trains",
    "trine compile runs/llama config.json":
        f"{PLANNER}test_compile_command.py::test_a_second_call_finds_every_kernel_in_the_cache",
    "trine compile train.py --world 8 --gpu h100 -- --steps 100":
        f"{PLANNER}test_compile_command.py::test_the_kernels_of_a_script",
    "torchrun --nproc_per_node 2 mine.py tp2.json":
        "tests/test_start_pages.py::test_the_script_prints_the_losses_of_the_page_on_every_grid",
    "trine verify --world 2 mine.py -- tp2.json":
        "tests/launch/verifier/test_script_run.py::test_a_script_is_compared_and_trains_nothing",
    "trine verify": "tests/launch/verifier/test_verify_command.py::test_a_sound_plan_trains_as_one_process",
    "trine verify llama-70b config.json --world 64":
        "tests/launch/verifier/test_verify_command.py::test_families_of_hugging_face_train_as_one_process",
    "trine convert ds_run runs/a":
        "tests/engine/checkpoint/foreign/test_load_foreign.py::test_convert_prints_what_it_wrote",
    "torchrun --nproc_per_node 4 -m engine.launch.doctor config.json":
        "tests/launch/doctor/test_doctor_command.py::test_torchrun_of_four_ranks",
    "trine doctor": "tests/launch/doctor/test_doctor_command.py::test_one_process",
    "trine plan runs/llama --world 1024 --gpu h100": f"{PLANNER}test_plan_command.py::test_a_folder_alone",
    "trine plan runs/llama config.json --nodes 16x8 --gpu a100 --price 2.5":
        f"{PLANNER}test_plan_command.py::test_a_folder_with_a_configuration",
    "trine plan runs/llama --world 1024 --search --out best.json":
        f"{PLANNER}test_plan_command.py::test_a_search_writes_a_configuration_that_loads",
    "trine plan runs/llama --world 64 --gpu h200 --longest":
        f"{PLANNER}test_plan_command.py::test_the_longest_row_of_a_folder",
    "trine plan --calibrate here.json": f"{PLANNER}test_calibrate.py::test_an_unknown_kind_has_its_measured_rates",
    "trine plan --calibrate here.json --links links.json":
        f"{PLANNER}test_calibrate.py::test_a_known_kind_keeps_its_data_sheet",
    "pytest -m long tests/engine/parity/test_fewer_bits_training.py --write-figures":
        "tests/zero/test_fewer_bits.py::test_all_data_ranks_compute_with_the_same_rounded_values",
    "pytest -m long tests/engine/parity/test_wire_training.py --write-figures":
        "tests/parallel/comm/test_encoded_engines.py::test_losses_are_near_exact_ones_and_copies_on_tensor_ranks_keep_equal_bits",
    "python -m tests.versions FOLDER": "tests/test_versions.py::test_a_row_says_what_fails_and_why_it_is_not_here",
    "python -m benchmarks first_contact":
        "tests/benchmarks/first_contact/test_command.py::test_every_part_that_needs_no_gpu_is_right_on_a_cpu",
    "python -m benchmarks first_contact --only correctness":
        "tests/benchmarks/first_contact/test_command.py::test_two_runs_have_every_part_once_and_correctness_first",
    "python -m benchmarks first_contact --only speed":
        "tests/benchmarks/first_contact/test_command.py::test_two_runs_have_every_part_once_and_correctness_first",
    "python -m benchmarks offload":
        "tests/benchmarks/offload/test_command.py::test_every_contender_is_measured",
    "python -m benchmarks offload --disk FOLDER":
        "tests/benchmarks/offload/test_command.py::test_updates_from_disk_are_measured_beside_the_disk",
    "trine verify train.py --world 4 -- --steps 100":
        "tests/launch/verifier/test_script_run.py::test_a_script_is_compared_and_trains_nothing",
    "trine report runs/train": "tests/launch/test_report.py::test_a_page_shows_what_ranks_have_recorded",
    "trine report RUN": "tests/launch/test_report.py::test_a_page_shows_what_ranks_have_recorded",
    "trine report": "tests/launch/test_report.py::test_a_page_shows_what_ranks_have_recorded",
    "torchrun --nproc_per_node 4 train.py --profile 40:42":
        "tests/launch/test_report_pictures.py::test_the_page_follows_the_reader_from_light_to_dark",
    "trine watch": "tests/launch/test_watch_command.py::test_ranks_of_this_host_and_of_a_report",
    "trine launch --ranks-per-node 4 train.py --steps 1000":
        f"{JOBS}test_launch_command.py::test_a_job_on_this_host_is_torchrun",
    "trine launch --hostfile hosts.txt train.py --steps 1000": f"{JOBS}test_ssh.py::test_a_job_runs_on_all_hosts",
    "trine launch --hostfile hosts.txt --elastic 2:4 train.py":
        f"{JOBS}test_ssh.py::test_a_host_is_lost_and_comes_back",
    "trine launch --slurm --nodes 4 --ranks-per-node 8 --time 24:00:00 train.py":
        f"{JOBS}test_slurm.py::test_a_job_ends_as_its_ranks_do",
    "trine launch --kubernetes jobset --image site/train:1 --nodes 4 --ranks-per-node 8 train.py":
        f"{JOBS}test_kubernetes.py::test_a_jobset",
    "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job "
    "--rdzv-conf=join_timeout=60 train.py": "tests/cluster/test_nodes.py::test_a_job_over_nodes_trains_as_one_process",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc-per-node=8 --max-restarts=100 "
    "--rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job --rdzv-conf=last_call_timeout=1,"
    "keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60 train.py":
        "tests/cluster/test_elastic.py::test_a_job_loses_a_node_and_takes_it_in_again",
    "trine watch --waits": "tests/launch/test_watch_command.py::test_ranks_of_this_host_and_of_a_report",
    "trine watch runs/train": "tests/launch/test_watch_command.py::test_ranks_of_this_host_and_of_a_report",
    "python train.py": "tests/launch/test_reference_run.py::test_a_second_run_goes_on_and_a_fresh_one_keeps_it",
    "torchrun --nproc_per_node 2 nanogpt.py pp2.json FOLDER 500": f"{EXAMPLES}test_nanogpt_goes_on_on_another_grid",
    "torchrun --nproc_per_node 2 finetune.py pp2.json MODEL pairs.jsonl tuned":
        f"{EXAMPLES}test_losses_are_the_same_on_every_grid",
    "torchrun --nproc_per_node 2 lora.py tp2.json MODEL text.txt adapters.safetensors":
        f"{EXAMPLES}test_lora_saves_adapters_alone",
    "torchrun --nproc_per_node 2 peft_lora.py tp2.json MODEL text.txt adapters":
        f"{EXAMPLES}test_adapters_of_peft_are_saved_and_merged",
    "torchrun --nproc_per_node 2 unet.py dp2.json": f"{EXAMPLES}test_unet_prints_the_same_losses_on_every_grid",
    "torchrun --nproc_per_node 2 distill.py pp2.json teacher.json MODEL text.txt student":
        f"{EXAMPLES}test_a_student_learns_from_its_teacher",
    "torchrun --nproc_per_node 2 signs.py zero2.json":
        f"{EXAMPLES}test_a_deepspeed_script_prints_the_same_losses_in_both_stages",
    "torchrun --nproc_per_node 2 trainer.py pp2.json MODEL text.txt tuned":
        "tests/engine/huggingface/test_hosts_page.py::test_the_script_prints_the_same_losses_on_its_grids_and_goes_on",
    "torchrun --nproc_per_node 2 accelerated.py tp2.json MODEL text.txt tuned":
        "tests/engine/huggingface/test_hosts_page.py::test_a_loop_of_accelerate_prints_the_same_and_goes_on",
    "torchrun --nproc_per_node 2 sft.py zero3.json MODEL text.txt tuned":
        "tests/engine/huggingface/test_hosts_page.py::test_a_script_of_trl_prints_the_same_and_goes_on",
    "torchrun --nproc_per_node 2 grpo.py zero3.json MODEL text.txt tuned":
        "tests/engine/huggingface/test_hosts_page.py::test_a_script_of_rewards_prints_the_same_and_goes_on",
    "torchrun --nproc_per_node 2 lit.py zero3.json text.txt tuned":
        "tests/engine/huggingface/test_hosts_page.py::test_a_script_of_lightning_prints_the_same_and_goes_on",
    "trine explain page-locked memory offload_states":
        "tests/launch/test_explain_command.py::test_some_words_find_an_error_with_its_remedy_and_place",
    "trine checkpoint info runs/train": f"{CHECKPOINT}test_info_of_one_step_and_of_a_folder_of_train_py",
    "trine checkpoint verify runs/train --all": f"{CHECKPOINT}test_verify_reads_one_or_all",
    "trine checkpoint export runs/train hf": f"{CHECKPOINT}test_export_gives_the_folder_that_was_saved",
    "python -m tests.reference_pages --write": "tests/test_documents.py::test_every_marked_section_shows_its_figure",
    "python -m benchmarks figures --renew step zero":
        "tests/benchmarks/harness/test_renewal.py::test_named_figures_are_renewed_by_one_run_of_their_command",
    "python -m benchmarks figures --renew parity axes":
        "tests/benchmarks/harness/test_renewal.py::test_named_figures_are_renewed_by_one_run_of_their_command",
    "python -m tests.faults": "tests/faults/test_seeded_faults.py::test_every_fault_is_noticed",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 -m benchmarks scaling "
    "--out runs/scaling.json": "tests/cluster/test_scaling.py::test_a_job_that_lost_a_node_goes_on",
    "trine launch --hostfile hosts.txt benchmarks/scaling/__main__.py --out runs/scaling.json":
        "tests/benchmarks/scaling/test_command.py::test_the_launcher_starts_it",
    "python -m benchmarks scaling --render runs/scaling.json --svg runs/scaling.svg":
        "tests/benchmarks/scaling/test_command.py::test_a_render_needs_no_ranks",
    "torchrun --nproc_per_node 8 -m benchmarks overlap":
        "tests/benchmarks/overlap/test_command.py::test_processes_of_torchrun_are_right",
    "srun python train.py":
        "tests/parallel/comm/test_launcher.py::test_a_task_of_srun_meets_at_the_first_node_of_its_step",
}  # fmt: skip
"""Command -> the test that runs it, or what it does."""

REASONS = {
    "trine COMMAND --help": "stands for every command; tests/launch/test_cli.py asks some",
    "trine launch": "names the command, whose whole lines are tested above",
    "trine sweep": "names the command, whose whole lines are tested above",
    "trine check": "names the command, whose whole lines are run above",
    "trine explain": "names the command, whose whole line is tested above",
    "trine plan": "names the command, whose whole line is run above",
    "trine init": "names the command, whose whole lines are tested above",
    "trine convert": "names the command, whose whole line is tested above",
    "trine check zero2.json --world 2": "run above for another file",
    "trine check mine/engine.json --world 2": "a line that trine init prints; the command is run above",
    "trine plan config.json --world 8": "run above with another number of ranks",
    "trine plan config.json --world 8 --context 2048": "run above with another number of ranks and tokens",
    "trine plan --estimate": "names an option, whose command is run above",
    "trine plan config.json --world 64 --estimate": "run above without the option",
    "pip install -c constraints.txt -e .": "takes a minute and an index of packages; .ci/run does it",
    'pip install -c constraints.txt -e ".[test]"': "takes a minute and an index of packages; .ci/run does it",
    'DS_BUILD_OPS=0 pip install -e ".[bench-deepspeed]"': "needs an index of packages",
    "ruff check . && ruff format --check .": "the last lines of .ci/run",
    "mypy engine tests benchmarks": "the last line of .ci/run",
    "python -m tests.reliability R4 R5": "runs tests of the suite for minutes",
    "bash .ci/run": "runs all tests, this one too",
    'pip install "trine[outer]"': "needs an index of packages",
    VLLM: "needs vLLM: tests/engine/weights_out/test_vllm_server.py",
    'pip install "trine[sweep]"': "needs an index of packages",
    'pip install "trine[serve]"': "needs an index of packages",
    "export TRINE_TOKEN=a-secret": "a setting of the commands after it",
    "TINKER_BASE_URL=http://host:8100 TINKER_API_KEY=tml-a-secret python -m tinker_cookbook.recipes.sl_loop": (
        "needs packages of others; pytest -m peers trains with their client"
    ),
    "export TRINE_OUTER_TOKEN=a-secret": "a setting of the commands after it",
    "torchrun --nproc_per_node 8 train.py": "run above with another number of ranks",
    "python -m tests.recorded record RUNS.json --checkpoints FOLDER": "trains for minutes",
    **dict.fromkeys(
        (
            "GLOO_SOCKET_IFNAME=eth0 torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d "
            f"--rdzv-endpoint=10.0.0.1:29400 --rdzv-id=job --rdzv-conf=join_timeout=60,is_host={host} "
            f"--local-addr={address} train.py"
            for host, address in (("true", "10.0.0.1"), ("false", "10.0.0.2"))
        ),
        "needs two hosts without names; tests/cluster/test_nodes.py runs the line with names",
    ),
}
"""Command -> why no test runs it."""

SUITES = (
    "pytest", "pytest -m long", "pytest -m gpu", "pytest -m peers", "pytest tests/kernels",
    "pytest tests/emulated_device", "pytest -m long tests/emulated_device",
    "pytest tests/kernels --write-budgets", "pytest tests/test_documents.py",
    "pytest -m long tests/engine/checkpoint/test_kills.py --kills 200", "pytest tests/engine/parity/test_parity.py",
    "pytest tests/engine/parity/test_covering_array.py",
    "pytest tests/launch/test_schedule_command.py --write-figures",
    "pytest -m long tests/engine/parity/test_transformers_types.py --write-figures",
    "pytest -m long tests/engine/parity/test_expert_families.py --write-figures",
    "pytest -m long tests/engine/parity/test_kernel_injection.py --write-figures",
)  # fmt: skip
"""The tests themselves: their files, marks and options exist."""

MEASURED = (
    "python -m benchmarks scale",
    "python -m benchmarks step", "python -m benchmarks zero", "python -m benchmarks pipeline",
    "python -m benchmarks kernels",
    "python -m benchmarks sleeping_blocks --write-figures",
    "python -m benchmarks matrix_rounds", "python -m benchmarks generate",
    "python -m benchmarks plan_search --write-figures",
    "python -m benchmarks kernels --out runs/benchmarks", "python -m benchmarks gpu_step --out runs/benchmarks",
    "python -m benchmarks overlap",
)  # fmt: skip
"""Benchmarks, which take minutes, some of them on a GPU: their names and options exist."""


@dataclass(frozen=True)
class Documented:
    """A command, and the page that gives it."""

    page: Path
    command: str

    def place(self) -> str:
        """The command with the line where it stands, or where it begins."""
        lines = self.page.read_text(encoding="utf-8").splitlines()
        begins = " ".join(self.command.split()[:2])
        at = next((f"{number}: {line.strip()}" for number, line in enumerate(lines, 1) if begins in line), "")
        return f"{self.command!r} at {self.page.name}:{at}"


def written_by_hand(text: str) -> str:
    """A page without its generated sections."""
    return with_sections(text, lambda one: "")


def commands(text: str) -> Iterator[str]:
    """Commands of a page: all lines of bash blocks, those of other plain blocks that are commands, and code in prose.

    The name of a program alone, such as ``torchrun``, is no command, except for ``pytest``.
    """
    fence = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
    for kind, body in fence.findall(text):
        for line in body.splitlines() if kind in ("", "bash") else ():
            told = line.removeprefix("$ ")
            inside = re.search(r"python -m .*", line) if kind == "" else None
            if kind == "bash" or line != told or is_command(told.split()):
                yield re.sub(r"\s+#.*", "", told).strip()
            elif inside:
                yield inside[0].strip()
    for span in re.findall(r"`([^`]+)`", fence.sub("", text)):
        if is_command(span.split()):
            yield " ".join(span.split())


def is_command(words: list[str]) -> bool:
    program = next((word for word in words if "=" not in word), "")
    return program in PROGRAMS and (len(words) > 1 or program == "pytest")


def documented() -> list[Documented]:
    return [
        Documented(page, command)
        for page in PAGES
        for command in commands(written_by_hand(page.read_text(encoding="utf-8")))
        if command
    ]


FOUND = documented()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```bash\npip install x  # all\ntrine schema\n```\n", ["pip install x", "trine schema"]),
        ("```\n$ trine plan a.json   # why\ntrine\n  grid  4 ranks\n```\n", ["trine plan a.json"]),
        ("```\npytest -m gpu x    # on a GPU\ntests/   python -m benchmarks --list\n```\n",
         ["pytest -m gpu x", "python -m benchmarks --list"]),
        ("under `torchrun`, `trine check\nFILE` and `A=0 pip install x`, by `pytest`",
         ["trine check FILE", "A=0 pip install x", "pytest"]),
        ("```python\npip = 1\n```\n`pip.x` and `trine`", []),
        ("<!-- x:begin -->\n`trine plan`\n<!-- x:end -->", []),
    ],
)  # fmt: skip
def test_commands_are_found(text: str, found: list[str]) -> None:
    assert list(commands(written_by_hand(text))) == found


def test_every_command_has_a_row_and_every_row_a_command() -> None:
    rows = [*RUN, *PLANS, *TESTED, *REASONS, *SUITES, *MEASURED]
    assert len(rows) == len(set(rows)), "one row a command"
    missing = [one.place() for one in FOUND if one.command not in rows]
    assert not missing, "each needs a row in one of the tables above"
    assert not set(rows) - {one.command for one in FOUND}, "rows of commands that no document has"


def execute(command: str, python: str) -> str:
    """Run one command and return what it prints; what may be left out, in brackets, is."""
    words, _, target = re.sub(r" \[\w+\]", "", command).partition(" > ")
    program, *arguments = shlex.split(words)
    if program == "trine":
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            assert main(arguments) == 0, command
        printed = caught.getvalue()
    else:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    if target:
        Path(target).write_text(printed)
    return printed


@pytest.fixture
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder that has the configuration of the reference page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")  # of the pictures
    page = (ROOT / "docs/reference/configuration.md").read_text(encoding="utf-8")
    (given,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    Path("config.json").write_text(given)


@pytest.mark.long
def test_plans_of_large_jobs_are_made(in_a_folder: None, warm_python: str) -> None:
    first, second = (execute(command, warm_python) for command in PLANS)
    assert "64 ranks = 2 pipeline x 16 data x 2 tensor" in first and "48 x " in second


def test_commands_run(in_a_folder: None, warm_python: str) -> None:
    printed = {command: execute(command, warm_python) for command in RUN}
    assert all(printed.values())
    assert printed["trine schedule mine.txt"].startswith("mine.txt\nrank 0 |F0 F1 F2 F3")
    assert json.loads(printed["trine schema"])["title"] == "Trine config"
    assert Path("zb-v.svg").read_text().startswith("<svg") and json.loads(Path("zb-v.json").read_text())


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("command", "node"), TESTED.items())
def test_a_test_that_is_named_exists(command: str, node: str) -> None:
    file, _, name = node.partition("::")
    assert name in functions(ROOT / file), f"{command}: {node}"


@pytest.mark.parametrize("command", SUITES)
def test_suites_and_their_options_exist(command: str, request: pytest.FixtureRequest) -> None:
    words = iter(shlex.split(command)[1:])
    marks = {line.partition(":")[0] for line in request.config.getini("markers")}
    for word in words:
        if word == "-m":
            assert next(words) in marks, command
        elif word == "--kills":
            assert int(next(words)) and request.config.getoption("kills")
        elif word.startswith("--"):
            request.config.getoption(word[2:].replace("-", "_"))  # raises ValueError for what is none
        else:
            assert (ROOT / word).exists(), command


@pytest.mark.parametrize("command", MEASURED)
def test_benchmarks_have_their_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *words = shlex.split(command)[3:]
    assert name in BENCHMARKS, command
    with pytest.raises(SystemExit):
        run(name, ["-h"])
    shown = capsys.readouterr().out
    assert all(f"{word} " in f"{shown} ".replace("]", " ") for word in words if word.startswith("--")), command


def test_what_ci_is_said_to_run_stands_there() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert script.endswith("ruff check .\nruff format --check .\nmypy engine tests benchmarks\n")
    assert 'run "main job"' in script and 'run "tests"' in script, "the two blocks of the README"
