"""Command ``trine launch``: reads the options, reports all problems with them, and starts or writes the job."""

import os
import shlex
import socket
import sys
import time
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path

from engine.errors import LaunchError
from engine.launch.jobs.bound_cores import read_cores
from engine.launch.jobs.hostfile import Host, chosen_hosts, read_hostfile
from engine.launch.jobs.probe import gpu_names
from engine.launch.jobs.remote import HostReply, SshRequest, examine
from engine.launch.jobs.request import (
    JobRequest,
    NodeCount,
    ScriptForm,
    add_deepspeed_options,
    drop_one_node,
    environment_file,
    exported,
    passed_on,
    refuse_all,
)
from engine.launch.jobs.schedulers import (
    KINDS,
    PROCESSORS_WITH_GPU,
    KubernetesRequest,
    SlurmRequest,
    manifest,
    slurm_script,
    submit,
    write_job_file,
)
from engine.launch.jobs.ssh import MeetingPlace, SshJob, SshPlan
from engine.launch.jobs.torchrun import JOIN_SECONDS, shell_line, torchrun_command, torchrun_environment

PLACES = {
    "nodes": ("ssh", "slurm", "kubernetes"),
    "include": ("local", "ssh"),
    "exclude": ("local", "ssh"),
    "elastic": ("ssh", "slurm", "kubernetes"),
    "ssh": ("ssh",),
    "join_timeout": ("ssh", "slurm", "kubernetes"),
    "preflight_timeout": ("ssh",),
    "submit": ("slurm",),
    "time": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "sbatch": ("slurm",),
    "gpus_per_node": ("slurm", "kubernetes"),
    "cpus_per_rank": ("slurm",),
    "name": ("slurm", "kubernetes"),
    "out": ("slurm", "kubernetes"),
    "image": ("kubernetes",),
    "namespace": ("kubernetes",),
    "max_restarts": ("kubernetes",),
}
"""Launch methods to which each option applies; options that are not listed apply to all."""
POD_SECONDS = 600
"""Timeout in seconds for pods to join, which may first pull the image."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HERE = (*LOOPBACK, "worker-0")
"""Names of the local host in ``--include`` and ``--exclude``."""
FLAGS = {"local": "a job on this host", "ssh": "--hostfile", "slurm": "--slurm", "kubernetes": "--kubernetes"}


def add_launch_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine launch`` to the parser ``command``."""
    add = command.add_argument
    add("--ranks-per-node", type=_count, metavar="N", help="ranks of a node; default: the number of its GPUs")
    add("--nodes", metavar="N", help="number of nodes, or MIN:MAX for an elastic job")
    add("--elastic", metavar="MIN:MAX", help="the job continues while MIN nodes are left, and accepts up to MAX")
    add("--export", action="append", default=[], metavar="NAME[=VALUE]", help="variable of the ranks; repeatable")
    add("--python", default=None, metavar="PATH", help="interpreter on all hosts; default: this one")
    add("--port", type=_count, metavar="N", help="port of the rendezvous, on the first host; default: a free one")
    add("--join-timeout", type=_count, metavar="SECONDS", help=f"time limit of the rendezvous ({JOIN_SECONDS})")
    add("--grace", type=_count, metavar="SECONDS", help="time for ranks to save a checkpoint after SIGTERM")
    add("--dry-run", action="store_true", help="print the command or file instead of starting or writing it")
    add("--local-rank", action="store_true", help="pass --local_rank=N to the script, as the deepspeed launcher does")
    add("--bind-cores", action="store_true", help="bind each rank to an equal share of the host's cores")
    add("--bind-cores-to", metavar="LIST", help="bind ranks to shares of these cores, such as 0-3,8")
    form = command.add_mutually_exclusive_group()
    form.add_argument("-m", "--module", action="store_true", help="run the script as a module, as python -m does")
    form.add_argument("--no-python", action="store_true", help="run the script as a program, without Python")
    chosen = "NAME or NAME:0,2 of GPUs, joined by @"
    add("--include", metavar="HOSTS", help=f"run only on these: {chosen}; localhost is this host")
    add("--exclude", metavar="HOSTS", help="run on all hosts but these")
    _add_places(command)
    add_deepspeed_options(command)
    add("script", help="the training script")
    add("arguments", nargs=REMAINDER, help="its arguments")


def _add_places(command: ArgumentParser) -> None:
    ssh = command.add_argument_group("over ssh")
    ssh.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, one a line: node0 slots=4, or node0:4")
    ssh.add_argument("--ssh", metavar="COMMAND", help=(
        'ssh with its options, such as "ssh -p 2222", or a program that takes "[-o OPTION]... -T HOST COMMAND" and '
        "passes stdin to COMMAND"
    ))  # fmt: skip
    ssh.add_argument("--preflight-timeout", type=_count, metavar="SECONDS", help="time limit of a host's answer (10)")
    slurm = command.add_argument_group("under Slurm")
    slurm.add_argument("--slurm", action="store_true", help="write a script for sbatch")
    slurm.add_argument("--submit", action="store_true", default=None, help="submit the script with sbatch")
    slurm.add_argument("--time", metavar="LIMIT", help="time limit for sbatch, such as 24:00:00")
    slurm.add_argument("--partition", metavar="NAME")
    slurm.add_argument("--account", metavar="NAME")
    processors = f"processors of a rank; default: {PROCESSORS_WITH_GPU} for a rank with a GPU, else 1"
    slurm.add_argument("--cpus-per-rank", type=_count, metavar="N", help=processors)
    slurm.add_argument("--sbatch", action="append", metavar="OPTION", help="further option, as in --sbatch=--qos=high")
    kubernetes = command.add_argument_group("on Kubernetes")
    kubernetes.add_argument("--kubernetes", choices=KINDS, help="write a JobSet, or a TrainJob of Kubeflow Trainer")
    kubernetes.add_argument("--image", metavar="NAME", help="container image")
    kubernetes.add_argument("--namespace", metavar="NAME")
    kubernetes.add_argument("--max-restarts", type=_from_0, metavar="N", help="restarts of the whole set (10)")
    both = command.add_argument_group("under Slurm and on Kubernetes")
    both.add_argument("--name", help="name of the job; default: the script's")
    both.add_argument(
        "--gpus-per-node", type=_from_0, metavar="N", help="GPUs of a node; default: one per rank; 0: none"
    )
    both.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: NAME.sbatch or NAME.yaml")


def _count(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _from_0(text: str) -> int:
    """Parses a whole number of at least 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def launch(options: Namespace) -> int:
    """Runs ``trine launch``: starts the job, or writes its Slurm script or Kubernetes manifest; returns the exit
    status.

    Raises:
        LaunchError: options are wrong; nothing is started.
    """
    for line in options.became:
        print(f"trine launch: {line}.", file=sys.stderr)
    refuse_all(options.refused)
    drop_one_node(options)
    place = _place(options)
    here = place == "ssh" and _names_this_host(options)
    request = _request(options, "local" if here else place)
    if here:
        print(f"trine launch: {options.hostfile} lists only this host, so ssh is not used.", file=sys.stderr)
        return _here(options, request, read_hostfile(options.hostfile)[0])
    match place:
        case "ssh":
            return _over_ssh(options, request)
        case "slurm":
            return _slurm(options, request)
        case "kubernetes":
            return _kubernetes(options, request)
        case _:
            return _here(options, request)


def _place(options: Namespace) -> str:
    given = {"ssh": options.hostfile is not None, "slurm": options.slurm, "kubernetes": options.kubernetes is not None}
    chosen = [place for place, wanted in given.items() if wanted]
    if len(chosen) > 1:
        raise LaunchError(f"{' and '.join(FLAGS[place] for place in chosen)}: a job runs in one place; give one.")
    place = chosen[0] if chosen else "local"
    strange = [name for name, places in PLACES.items() if getattr(options, name) is not None and place not in places]
    refuse_all(
        [
            LaunchError(
                f"--{name.replace('_', '-')} does not apply to {FLAGS[place]}; use it with "
                f"{' or '.join(FLAGS[other] for other in PLACES[name])}."
            )
            for name in strange
        ]
    )
    return place


def _request(options: Namespace, place: str) -> JobRequest:
    if options.nodes is not None and options.elastic is not None:
        raise LaunchError("--nodes and --elastic both set the number of nodes; give one of them.")
    nodes = NodeCount.parse(options.nodes, "--nodes") if options.nodes is not None else None
    if options.elastic is not None:
        nodes = NodeCount.parse(options.elastic, "--elastic", elastic=True)
    form: ScriptForm = "module" if options.module else "program" if options.no_python else "script"
    if place in ("local", "ssh") and form == "script" and not Path(options.script).is_file():
        raise LaunchError(f"{options.script} is not a file in {Path.cwd()}; give the path of the training script.")
    if options.bind_cores_to is not None:
        read_cores(options.bind_cores_to)
    passed = passed_on(os.environ) if place == "ssh" else {}
    if place in ("local", "ssh") and (found := environment_file()) is not None:
        note = f"all hosts get {', '.join(found[1]) or 'nothing'} of {found[0]}"
        if place == "local":
            note = f"{found[0]} is read only for jobs over ssh, as in DeepSpeed; --export NAME=VALUE sets variables"
        print(f"trine launch: {note}.", file=sys.stderr)
        passed |= found[1] if place == "ssh" else {}
    return JobRequest(
        script=options.script,
        form=form,
        # torchrun replaces its variable for each rank
        arguments=(*["--local_rank=${local_rank}"] * options.local_rank, *options.arguments),
        cores=options.bind_cores_to or ("" if options.bind_cores else None),
        python=options.python or ("python" if place == "kubernetes" else sys.executable),
        ranks_per_node=options.ranks_per_node,
        nodes=nodes,
        export={**passed, **exported(options.export, os.environ)},
        folder=Path.cwd(),
        name=options.name or Path(options.script).stem.replace("_", "-").lower(),
        port=options.port,
        join_seconds=options.join_timeout or (POD_SECONDS if place == "kubernetes" else JOIN_SECONDS),
        grace_seconds=options.grace or (30 if place in ("local", "ssh") else 120),
    )


def _names_this_host(options: Namespace) -> bool:
    """Returns True if the hostfile lists only this host, and no option asks for ssh or for more hosts."""
    if options.ssh is not None or options.elastic is not None or options.nodes not in (None, "1"):
        return False
    hosts = read_hostfile(options.hostfile)
    return len(hosts) == 1 and hosts[0].name in (*LOOPBACK, socket.gethostname())


def _here(options: Namespace, request: JobRequest, listed: Host | None = None) -> int:
    """Becomes torchrun: its streams, signals and exit status then belong to this process.

    ``listed``: this host as a file lists it.
    """
    gpus, devices = _own_gpus(options, listed, {**os.environ, **request.export})
    ranks = request.ranks_per_node or gpus
    if not ranks:
        ranks = 1
        print(
            "trine launch: nvidia-smi lists no GPU of this host, so 1 rank starts; --ranks-per-node N starts more.",
            file=sys.stderr,
        )
    command, variables = torchrun_command(request, ranks, "1", None), torchrun_environment(request, devices)
    if options.dry_run:
        print(shell_line(["env", *(f"{name}={value}" for name, value in variables.items()), *command]))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, {**os.environ, **variables})
    except OSError as error:
        raise LaunchError(f"{request.python} cannot be started ({error.strerror}); give --python PATH.") from error


def _own_gpus(options: Namespace, listed: Host | None, environment: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """Returns the number of this host's GPUs that the job may use (None without GPUs), and their names in
    CUDA_VISIBLE_DEVICES; no names: all.
    """
    gpus = listed.slots if listed is not None and listed.slots is not None else len(gpu_names(environment))
    asked = [given.partition(":")[0] for given in (options.include, options.exclude) if given]
    names = (*HERE, socket.gethostname()) if listed is None else (listed.name,)
    name = next((name for name in names if name in asked), names[0])
    (host,) = chosen_hosts([Host(name=name, slots=gpus or None)], options.include, options.exclude)
    visible = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]
    named = [visible[device] if device < len(visible) else str(device) for device in host.devices]
    return host.slots, named


def _over_ssh(options: Namespace, request: JobRequest) -> int:
    hosts = chosen_hosts(read_hostfile(options.hostfile), options.include, options.exclude)
    if request.nodes is not None and request.nodes.most > len(hosts):
        raise LaunchError(
            f"{request.nodes} nodes are requested, but {options.hostfile} lists {len(hosts)}; add hosts to it."
        )
    ssh = SshRequest(
        hostfile=options.hostfile,
        hosts=tuple(hosts[: request.nodes.most] if request.nodes is not None else hosts),
        ssh=_ssh_words(options.ssh or "ssh"),
        seconds=float(options.preflight_timeout or 10),
        python=request.python,
    )
    identity = f"{request.name}-{os.getpid()}-{int(time.time())}"
    if options.dry_run:
        _show_ssh(request, ssh)
        return 0
    examined = examine(request, ssh)
    first = examined.found[0]
    plan = SshPlan(request=request, ssh=ssh, hosts=examined.found)
    return SshJob(plan, MeetingPlace(first=first.host, port=first.port, identity=identity), examined.absent).run()


def _ssh_words(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation without its end
        words = []
    if not words:
        raise LaunchError(f"--ssh {text!r} is no command; give a program and its options, such as 'ssh -p 2222'.")
    return tuple(words)


def _show_ssh(request: JobRequest, ssh: SshRequest) -> None:
    """Prints the lines that every host would run, with placeholders in capitals for values that hosts provide."""
    words = {"@PORT@": "A_FREE_PORT_OF_" + ssh.hosts[0].name, "@RANKS@": "NUMBER_OF_GPUS"}
    nothing = {name: "" for name in ("python", "torch", "trine", "script", "engine", "engine_folder")}
    for host in ssh.hosts:
        facts = HostReply(host=host, folder=True, gpus=(), port=0, unknown=(), **nothing)
        plan = SshPlan(request=request, ssh=ssh, hosts=(facts,) * len(ssh.hosts))
        wish = plan.wish(facts, MeetingPlace(first=ssh.hosts[0], port=request.port or 0, identity=request.name))
        line = shell_line(wish["command"])
        first = ssh.hosts[0].address
        for end in () if request.port else (f"{first}:", f"{first}]:"):
            line = line.replace(f"{end}0", f"{end}@PORT@")
        if not (request.ranks_per_node or host.slots):
            line = line.replace("--nproc-per-node=1", "--nproc-per-node=@RANKS@")
        variables = shell_line(["env", *(f"{name}={value}" for name, value in wish["environment"].items())])
        line = shell_line(["@LINE@"], {"@LINE@": line, **words})
        print(f"[{host.name}] {shell_line(ssh.command(host)[:-1])}")
        print(f"[{host.name}] cd {shlex.quote(wish['folder'])} && {variables} {line}")


def _slurm(options: Namespace, request: JobRequest) -> int:
    wish = SlurmRequest(
        time=options.time,
        partition=options.partition,
        account=options.account,
        gpus_per_node=options.gpus_per_node,
        cpus_per_rank=options.cpus_per_rank,
        more=tuple(options.sbatch or ()),
    )
    path = options.out or Path(f"{request.name}.sbatch")
    if not _written(options, path, slurm_script(request, wish)):
        return 0
    if options.submit:
        return submit(path)
    print(f"{path} is written; submit it with: sbatch {shlex.quote(str(path))}")
    return 0


def _kubernetes(options: Namespace, request: JobRequest) -> int:
    wish = KubernetesRequest(
        kind=options.kubernetes,
        image=options.image,
        namespace=options.namespace,
        gpus_per_node=options.gpus_per_node,
        max_restarts=10 if options.max_restarts is None else options.max_restarts,
    )
    path = options.out or Path(f"{request.name}.yaml")
    if _written(options, path, manifest(request, wish)):
        print(f"{path} is written; start it with: kubectl apply -f {shlex.quote(str(path))}")
    return 0


def _written(options: Namespace, path: Path, text: str) -> bool:
    """Writes the file of a job; with ``--dry-run`` prints it instead, and returns False."""
    if options.dry_run:
        print(text, end="")
    else:
        write_job_file(path, text)
    return not options.dry_run
