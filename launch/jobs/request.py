"""Request of ``trine launch``, independent of its place, including options of the ``deepspeed`` launcher.

Each of these options is accepted as one of Trine's, ignored, or refused; a line before the job reports it.
"""

import fnmatch
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any, Literal, Self

from engine.errors import LaunchError

ScriptForm = Literal["script", "module", "program"]
"""Kind of a script: Python file, module for ``python -m``, or program without Python."""
PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "NCCL_*", "GLOO_*", "TRINE_*")
"""Environment variables, as names or globs, that the launcher passes to all hosts."""


def refuse_all(problems: Sequence[LaunchError]) -> None:
    """Raises one error with all ``problems``, one per line; does nothing if there are none.

    Raises:
        LaunchError: ``problems`` is not empty.
    """
    if problems:
        raise LaunchError("\n".join(map(str, problems)))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCount:
    """Number of nodes of a job; for an elastic job, the smallest and the largest number."""

    least: int
    most: int
    elastic: bool = False

    @classmethod
    def parse(cls, text: str, option: str, elastic: bool = False) -> Self:
        """Parses ``text``, a number of nodes such as ``4``, or a range such as ``2:4`` for an elastic job.

        ``option``: name of the option in the error message. ``elastic``: True if only a range is accepted.

        Raises:
            LaunchError: ``text`` is malformed.
        """
        least, colon, most = text.partition(":")
        if not (least.isdecimal() and (most.isdecimal() if colon else not elastic)):
            form = "MIN:MAX, such as 2:4" if elastic else "a number of nodes, such as 4, or MIN:MAX, such as 2:4"
            raise LaunchError(f"{option} {text}: give {form}.")
        if not 1 <= int(least) <= int(most or least):
            raise LaunchError(
                f"{option} {text}: a job has at least 1 node, and MAX is at least MIN; give N, or MIN:MAX such as 2:4."
            )
        return cls(least=int(least), most=int(most or least), elastic=bool(colon))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """Options of ``trine launch`` for every way of launching: on this host, over ssh, with Slurm, with Kubernetes."""

    script: str
    """Script file, module or program, by ``form``."""
    arguments: tuple[str, ...]
    python: str
    ranks_per_node: int | None
    nodes: NodeCount | None
    export: Mapping[str, str]
    """Environment variables of the ranks: ``--export``, and ``PASSED_ON`` over ssh."""
    folder: Path
    """Working directory of the launcher."""
    name: str
    port: int | None
    join_seconds: int
    """Timeout of the rendezvous of all nodes in seconds."""
    form: ScriptForm = "script"
    cores: str | None = None
    """Cores to divide among the ranks of a host, such as 0-3,8; empty: all cores; None: ranks are not bound."""
    grace_seconds: int
    """Seconds between SIGTERM and SIGKILL, for a last checkpoint."""

    @property
    def elastic(self) -> bool:
        """True if nodes may leave and join while the job runs."""
        return self.nodes is not None and self.nodes.elastic

    def ranks(self, why: str) -> int:
        """Returns the number of ranks per node from the command line.

        ``why``: option that needs the number, for the error message.

        Raises:
            LaunchError: the command line does not contain the number.
        """
        if self.ranks_per_node is None:
            raise LaunchError(
                f"{why} needs --ranks-per-node N, since the GPUs of its nodes cannot be counted from here."
            )
        return self.ranks_per_node


def exported(wishes: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of the options ``--export``.

    ``wishes``: option values, "NAME" with the value from ``environment``, or "NAME=VALUE".

    Raises:
        LaunchError: a name is invalid, or ``environment`` lacks the variable.
    """
    found: dict[str, str] = {}
    for wish in wishes:
        name, given, value = wish.partition("=")
        if not name.isidentifier():
            raise LaunchError(f"--export {wish}: {name!r} is not the name of a variable; give NAME or NAME=VALUE.")
        if not given and name not in environment:
            raise LaunchError(f"--export {name}: the launcher has no such variable; set it, or give {name}=VALUE.")
        found[name] = value if given else environment[name]
    return found


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of ``environment`` that every host gets even without ``--export``, such as NCCL_*."""
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in PASSED_ON)
    }


TAKEN: dict[str, tuple[str, ...]] = {
    "--ranks-per-node": ("--num_gpus", "--num_accelerators"),
    "--nodes": ("--num_nodes",),
    "--port": ("--master_port",),
    "--no-python": ("--no_python",),
    "--hostfile": ("-H",),
    "--include": ("-i",),
    "--exclude": ("-e",),
    "--local-rank": ("--local_rank",),
    "--bind-cores": ("--bind_cores_to_rank",),
    "--bind-cores-to": ("--bind_core_list",),
}
"""Options of Trine, with DeepSpeed's spellings of them."""
IDLE = {
    "--no_local_rank": "a script gets --local_rank only with --local-rank",
    "--no_ssh_check": "hosts are checked before anything starts, within --preflight-timeout",
    "--force_multi": "a hostfile makes a job run over ssh; for this host alone, --ssh ssh does",
    "--quiet": "only the job's own lines are printed",
    "-q": "only the job's own lines are printed",
    "--elastic_training": "--elastic MIN:MAX makes a job elastic",
}
"""DeepSpeed flags without effect, with the reason."""
IDLE_VALUES = {
    "--save_pid": "the launcher of one host becomes torchrun, whose process id is its own",
    "--log_level": "TORCH_CPP_LOG_LEVEL and logging.getLogger('trine') set the level of messages",
}
REFUSED = {
    "--launcher_args": 'give the options of ssh in --ssh "ssh ...", and those of sbatch in --sbatch=OPTION',
    "--enable_each_rank_log": "redirect by torchrun on each host: torchrun --redirects 3 --log-dir FOLDER",
    "--autotuning": "trine plan MODEL --search finds a layout",
    "--venv_script": "give --python PATH of the environment's interpreter",
    "--master_addr": "the rendezvous is on the first host of --hostfile; by hand, start torchrun on each host",
    "--node_rank": "give --hostfile, or start torchrun --node-rank N on each host by hand",
    "--min_elastic_nodes": "give --elastic MIN:MAX",
    "--max_elastic_nodes": "give --elastic MIN:MAX",
}
"""Refused DeepSpeed options, with their replacement in Trine."""
LAUNCHERS = {"pdsh": "--hostfile", "ssh": "--hostfile"}
ENVIRONMENT_FILE = ".deepspeed_env"


def add_deepspeed_options(command: ArgumentParser) -> None:
    """Adds the options of DeepSpeed's launcher to ``trine launch``, hidden from its help.

    Some have an effect, some have none, and some are refused with advice.
    """
    command.set_defaults(became=[], refused=[])
    known = command._option_string_actions
    for ours, spellings in TAKEN.items():
        action = known[ours]
        command.add_argument(
            *spellings, dest=action.dest, type=action.type or str, nargs=action.nargs, default=SUPPRESS, action=_Taken,
            ours=ours, const=action.const, help=SUPPRESS,
        )  # fmt: skip
    for name, why in IDLE.items():
        command.add_argument(name, nargs=0, action=_Idle, why=why, help=SUPPRESS, default=SUPPRESS)
    for name, why in IDLE_VALUES.items():
        command.add_argument(name, action=_Idle, why=why, help=SUPPRESS, default=SUPPRESS)
    for name, instead in REFUSED.items():
        command.add_argument(name, action=_Refused, why=instead, help=SUPPRESS, default=SUPPRESS)
    command.add_argument("--no_ssh", nargs=0, action=_Refused, why=REFUSED["--node_rank"], help=SUPPRESS)
    command.add_argument("--ssh_port", type=int, action=_SshPort, help=SUPPRESS, default=SUPPRESS)
    command.add_argument("--launcher", action=_Launcher, help=SUPPRESS, default=SUPPRESS)


class _Told(Action):
    """Option that records a sentence."""

    def __init__(self, *args: Any, why: str = "", ours: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._why, self._ours = why, ours


class _Taken(_Told):
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        given = self.const if self.nargs == 0 else value
        setattr(options, self.dest, given)
        shown = f" {value}" * (self.nargs != 0)
        if option not in ("-H", "-i", "-e"):
            options.became.append(f"{option}{shown}: taken as {self._ours}{shown}")


class _Idle(_Told):
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        options.became.append(f"{option}: without effect, since {self._why}")


class _Refused(_Told):
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        options.refused.append(LaunchError(f"{option} is an option of deepspeed that trine launch lacks; {self._why}."))


class _SshPort(_Told):
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        options.ssh = f"ssh -p {value}"
        options.became.append(f'{option} {value}: taken as --ssh "{options.ssh}"')


class _Launcher(_Told):
    def __call__(self, parser: ArgumentParser, options: Namespace, value: Any, option: str | None = None) -> None:
        if value in LAUNCHERS:
            options.became.append(f"{option} {value}: without effect, since {LAUNCHERS[value]} runs a job over ssh")
        else:
            instead = "give --slurm" if value == "slurm" else "start the script with mpirun or srun, which it supports"
            options.refused.append(LaunchError(f"{option} {value} is not a launcher of trine launch; {instead}."))


def drop_one_node(options: Namespace) -> None:
    """Discards the option ``--nodes 1``, which DeepSpeed users pass, if neither a hostfile nor a scheduler is given."""
    if options.nodes == "1" and options.hostfile is None and not options.slurm and options.kubernetes is None:
        options.nodes = None


def environment_file() -> tuple[Path, dict[str, str]] | None:
    """Reads environment variables for all hosts from the file that DS_ENV_FILE names (default: ``.deepspeed_env``).

    It uses the file in the working folder, else the one in the home folder. Returns (path, variables), or None if there
    is neither.

    Raises:
        LaunchError: a line of the file is not NAME=VALUE.
    """
    name = environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)
    path = next((folder / name for folder in (Path.cwd(), Path.home()) if (folder / name).is_file()), None)
    if path is None:
        return None
    return path, dict(_pairs(path, path.read_text(encoding="utf-8", errors="replace").splitlines()))


def _pairs(path: Path, lines: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        name, equals, value = text.partition("=")
        if text and not text.startswith("#"):
            if not (equals and name.strip().isidentifier()):
                raise LaunchError(f"{path}:{number}: {text!r} is not NAME=VALUE; correct or remove the line.")
            found.append((name.strip(), value))
    return found
