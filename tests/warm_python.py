"""A command to put in the place of ``python``, whose processes have imported torch and the engine before they begin.

A script of three steps spends four seconds of CPU time on its imports, and a job of torchrun starts one for the
launcher and one for each rank. Here they are forked from a process that the server of tests/ranks.py has started. The
script, its arguments, folder, environment, streams, signals, namespaces and exit status are those of a process of its
own; what is imported already, and the seed of ``hash``, are those of all. So one test of each kind starts a cold
``python``.
"""

import atexit
import ctypes
import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tests import warm_client
from tests.ranks import as_started_alone, start_server

MORE = ("torch.distributed.run", "engine.api", "engine.launch.reference_run")
OURS = (__file__, runpy.__file__, "<frozen runpy>")


@contextmanager
def warm_python() -> Iterator[str]:
    """Path of the command: ``command [-u] script ...`` or ``command [-u] -m module ...``; it works within the block."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        command = Path(folder) / "python"
        command.write_text(f"#!{sys.executable} -IS\n{Path(warm_client.__file__).read_text()}")
        command.chmod(0o700)
        listener.bind(str(Path(folder) / "socket"))
        listener.listen(64)
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(listener, theirs))
        process.start()
        for given in (listener, theirs):
            given.close()  # a stand-in that asks for a process is told when the server has gone
        try:
            yield str(command)
        finally:
            ours.close()
            process.join()


def warm_torchrun(command: str) -> list[str]:
    """``torchrun`` that starts warm itself and starts warm ranks."""
    return ["env", f"PYTHON_EXEC={command}", command, "-m", "torch.distributed.run"]


def _serve(listener: socket.socket, life: Connection) -> None:
    """Start a keeper for every connection, until the test process is gone."""
    for name in MORE:
        import_module(name)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process hears it too, and decides
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how keepers end
    watched: list[Any] = [listener, life]
    while life not in select.select(watched, [], [])[0]:
        line, _ = listener.accept()
        if not os.fork():
            listener.close()
            life.close()
            _keep(line)
        line.close()


def _keep(line: socket.socket) -> NoReturn:
    """Start one process, pass signals on to it, and tell how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        head, streams, _, _ = socket.recv_fds(line, 4, 3)
        with line.makefile("rb") as stream:
            wish = json.loads(stream.read(int.from_bytes(head, "big")))
    except ValueError:
        os._exit(1)  # its stand-in was killed before it could ask
    _join_namespaces(line)
    pid = os.fork()
    if not pid:
        line.close()
        _be(wish, streams)
    for number in streams:
        os.close(number)
    end = os.pidfd_open(pid)
    watched: list[Any] = [end, line]
    while end not in (ready := select.select(watched, [], [])[0]):
        if line in ready:
            given = line.recv(1)
            os.kill(pid, given[0] if given else signal.SIGKILL)
            if not given:
                watched.remove(line)
    try:
        line.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        os._exit(0)


def _join_namespaces(line: socket.socket) -> None:
    """Go where the stand-in is, which may run on a node of tests/cluster; what is forked next is there, too."""
    (stand_in,) = struct.unpack_from("i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    kinds = ("net", "uts", "ipc", "pid", "mnt")
    places = [f"/proc/{stand_in}/ns/{kind}" for kind in kinds]
    other = [
        place for place, kind in zip(places, kinds, strict=True) if not os.path.samefile(place, f"/proc/self/ns/{kind}")
    ]
    for place in [os.open(place, os.O_RDONLY) for place in other]:  # opened first: another "mnt" has another /proc
        if ctypes.CDLL(None, use_errno=True).setns(place, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(place)


def _be(wish: dict[str, Any], streams: list[int]) -> NoReturn:
    """Become the process that was asked for."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(wish["folder"])
    os.environ.clear()
    os.environ.update(wish["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    as_started_alone()
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    code = 1
    try:
        _run(wish["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        of_script = error.__traceback__
        while of_script and of_script.tb_frame.f_code.co_filename in OURS:
            of_script = of_script.tb_next
        sys.excepthook(type(error), error.with_traceback(of_script), of_script)
    finally:
        _leave(code)


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:0] = [os.getcwd(), *given]
        sys.modules.pop(arguments[1], None)  # or runpy warns that it runs a second time
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[:0] = [os.path.dirname(os.path.abspath(arguments[0])), *given]
        runpy.run_path(arguments[0], run_name="__main__")


def _leave(code: int) -> NoReturn:
    """As an interpreter ends: threads first, then what was registered, then the streams."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)
