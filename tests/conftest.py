"""What all tests share: ranks on a fork server, and the tables of the documents."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks as start_ranks
from tests.ranks import server_address, start_server, use_server
from tests.selection import items_of_part, time_by_group
from tests.tables import Table

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks and tests share few cores
os.environ.setdefault("TRINE_CACHE", "0")  # a test searches its own tensor plan
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each worker and some hundred processes would compile all files again

TESTS = Path(__file__).parent
MOST_WORKERS = 8
"""Each may start eight ranks."""
FROZEN = 1_000_000
"""About how many objects are not looked through for garbage."""
FIRST = (
    "tests/cluster/",
    "tests/launch/",
    "tests/engine/checkpoint/test_background_save.py",
    "tests/engine/checkpoint/test_kills.py",
    "tests/engine/checkpoint/test_sigterm.py",
    "tests/engine/parity/test_kernel_injection.py",
    "tests/engine/watchdog/test_jobs.py",
    "tests/faults/test_seeded_faults.py",
    "tests/parallel/comm/test_agreement.py",
    "tests/test_ranks.py",
)
"""Long tests that mostly wait, or compile: begun first, they are done beside the others and not after them."""


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU to test on, Triton interprets kernels on the CPU, where they can be compared with anything."""
    if find_spec("hypothesis"):  # GPU tests run without it
        from hypothesis import settings

        settings.register_profile("trine", deadline=None)  # a busy machine is no failure
        settings.load_profile("trine")
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    if worker := getattr(config, "workerinput", None):
        sys.argv = worker["mainargv"]  # figures name the command that has measured them
        if server := worker.get("server"):
            use_server(server)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The workers of a whole run share one fork server: each would import torch and the engine for its own."""
    if node.config.args_source is not pytest.Config.ArgsSource.ARGS:
        node.workerinput["server"] = server_address()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in a process for each core and one more, since ranks wait for each other; what the command
    line names runs in one. ``-n N`` says other."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS or hasattr(config, "workerinput")
    alone = config.option.collectonly or config.option.usepdb or config.option.markexpr == "gpu"
    if config.pluginmanager.hasplugin("xdist") and config.option.numprocesses is None and not (named or alone):
        config.option.numprocesses = min((os.cpu_count() or 1) + 1, MOST_WORKERS)
        config.option.dist = "worksteal"  # neighbours share what their modules have trained


def pytest_addoption(parser: pytest.Parser) -> None:
    """Measured figures go into the documents only when asked; how hard the crash test tries."""
    parser.addoption("--write-figures", action="store_true", help="keep measured tables in docs/figures and show them")
    parser.addoption("--part", default="1/1", help="run part K of N, such as 2/4: parts are disjoint and cover all")
    parser.addoption("--write-budgets", action="store_true", help="accept what compiled kernels take")
    parser.addoption("--kills", default="20", help="how many processes the long crash test kills")
    parser.addoption("--kill-seed", default="", help="of the crash test, to repeat it")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m gpu`` looks into one folder: the others import packages that a GPU machine may lack."""
    if config.getoption("markexpr") != "gpu":
        return None
    return True if collection_path.parent == TESTS and collection_path.name != "gpu" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part that was asked for, and begin with what takes longest."""
    kept = items_of_part(config.getoption("--part"), [item.nodeid for item in items])
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Nearly all that is imported and collected stays: no garbage is looked for meanwhile.

    Each worker of a whole run first imports a share of the test files of its own, so that in a fresh clone pytest
    rewrites the assertions of a file once and not in every worker.
    """
    gc.disable()
    worker = getattr(session.config, "workerinput", {})
    if "server" in worker:
        share = int(worker["workerid"].removeprefix("gw"))
        for file in sorted(TESTS.rglob("test_*.py"))[share :: worker["workercount"]]:
            with suppress(Exception, pytest.skip.Exception):  # collection repeats the import and reports it
                import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported and collected by now is not looked through again: a collection of garbage took half a second.
    The next ones come a tenth as often as by Python's numbers."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: FROZEN  # it counts a million objects, and a dry run asks whether there is one
    gc.set_threshold(7000, 20, 20)
    session.config.pluginmanager.register(FrozenAgain())


class FrozenAgain:
    """What tests import and keep adds a million objects, and a test that collects garbage or looks for live tensors
    would visit them all, a second each time. After the last test of a file those that outlive a collection are frozen
    too; a collection then visits the objects of one file."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """A test has been torn down, with the fixtures of its file."""
        done = yield
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()
        return done


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """After ``-m long``: how long each group of tests took."""
    if config.getoption("markexpr") != "long":
        return
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "duration")]
    terminalreporter.section("time by group")
    for line in time_by_group([(report.nodeid, report.duration, report.when) for report in reports]):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """An engine leaves its process group to the interpreter's exit; the next test starts without."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    if function := sys.modules.get("torch.autograd.function"):
        apply = function.Function.apply
        assert apply.__module__ == function.__name__, f"{apply} was left in torch, where later tests meet it"


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """``run_ranks(function, world_size, *arguments, env=None, seconds=120)``; see tests/ranks.py."""
    start_server()
    return start_ranks


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """A command in the place of ``python``, whose processes need not import torch; see tests/warm_python.py."""
    from tests import warm_python

    with warm_python.warm_python() as command:
        yield command


@pytest.fixture(scope="session")
def parity_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Largest relative deviation of a loss from one process, by model and grid."""
    yield from _deviations("parity", request)


@pytest.fixture(scope="session")
def axes_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The same by model and grid of all three axes, over every way of running it that was tried."""
    yield from _deviations("axes", request)


@pytest.fixture(scope="session")
def zero_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The same by model and grid for each ZeRO stage, over every mode of the stage that was tried."""
    yield from _deviations("parity-zero", request)


@pytest.fixture(scope="session")
def schedules_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The same by pipeline schedule and sizes."""
    yield from _deviations("parity-schedules", request)


@pytest.fixture(scope="session")
def architectures_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Deviations of losses by model and number of stages, and what stages receive."""
    yield from _deviations("architectures", request, "largest relative deviation of a loss, by model")


@pytest.fixture(scope="session")
def tensor_models_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Deviations of losses by model and grid with tensor ranks, and how its layers are shared."""
    yield from _deviations("tensor-models", request, "largest relative deviation of a loss, by model")


@pytest.fixture(scope="session")
def unseen_models_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """The same for families that the search was not made with."""
    yield from _deviations("tensor-unseen", request, "family")


@pytest.fixture(scope="session")
def kernels_models_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Modules that go through operators of ours by model, and the same deviation with them in place."""
    yield from _deviations("kernels-models", request, "model")


@pytest.fixture(scope="session")
def faults_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Seconds from a fault of a job to the sentence that names it, by fault and grid."""
    yield from _deviations("watchdog-faults", request, "what a rank does")


def _deviations(
    name: str, request: pytest.FixtureRequest, corner: str = "largest relative deviation of a loss"
) -> Iterator[Table]:
    table = Table(name, corner)
    yield table
    if request.config.getoption("--write-figures"):
        table.write()


@pytest.fixture(scope="session")
def activation_memory_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """KiB of live storages at the peak, predicted and measured, by way of running and model."""
    yield from _deviations("activation-memory", request, "KiB at the peak, predicted / measured")
