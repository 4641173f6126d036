"""Which process of a job this is, from the variables that launchers set; what is no rank, and what is refused."""

import pytest

from engine.errors import GridError
from engine.parallel.comm import launcher
from engine.parallel.comm.launcher import Place, find_place, first_host, gloo_interface, local_rank, loopback_words

ADDRESS = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_NODELIST": "gpu[05-08]",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | ADDRESS


def test_a_task_of_srun_meets_at_the_first_node_of_its_step() -> None:
    place = find_place(SLURM)
    assert place == Place(5, 8, 1, "gpu07", place.port if place else 0)
    assert place is not None and 1024 <= place.port < 32768, "open to users, below the ports that systems give away"
    alike = {name: value for name, value in SLURM.items() if name != "SLURM_PROCID"}
    first = find_place(alike | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first is not None and (first.address, first.port) == (place.address, place.port)
    for other in ({"SLURM_JOB_ID": "4712"}, {"SLURM_STEP_ID": "1"}):
        changed = find_place(SLURM | other)
        assert changed is not None and changed.port != place.port


@pytest.mark.parametrize("given", [SLURM, OPEN_MPI, PMI])
def test_an_address_that_is_given_is_taken(given: dict[str, str]) -> None:
    place = find_place(given | ADDRESS)
    assert place is not None and (place.address, place.port, place.local_rank) == ("10.0.0.7", 29500, 1)
    assert (place.rank, place.size) == ((5, 8) if given is SLURM else (3, 4))


@pytest.mark.parametrize("given", [SLURM, OPEN_MPI, PMI, SLURM | OPEN_MPI])
def test_torchrun_comes_first(given: dict[str, str]) -> None:
    assert find_place(given | TORCHRUN) == Place(1, 2, 1, "10.0.0.7", 29500)


def test_mpirun_inside_a_slurm_job_is_mpi() -> None:
    """Its daemons are the tasks of a step, so a rank sees the variables of both."""
    place = find_place(SLURM | OPEN_MPI | ADDRESS)
    assert place is not None and (place.rank, place.size) == (3, 4)
    place = find_place(SLURM | PMI | ADDRESS)
    assert place is not None and (place.rank, place.size) == (3, 4)


def test_srun_with_a_pmi_library_is_slurm() -> None:
    place = find_place(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"})
    assert place is not None and (place.rank, place.address, place.local_rank) == (5, "gpu07", 1)


BATCH_SCRIPT = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    "shell",
    [
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[05-08]"},
        SLURM | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        SLURM | {"TRINE_LAUNCHER": "none"},
        OPEN_MPI | {"TRINE_LAUNCHER": "none"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"} | ADDRESS,
    ],
    ids=["sbatch", "batch step", "salloc", "interactive step", "srun --pty", "none", "none, MPI", "one of MPI"],
)
def test_a_shell_is_no_rank(shell: dict[str, str]) -> None:
    assert find_place(shell) is None


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (OPEN_MPI, "mpirun -n 4 -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 python train.py"),
        (PMI, "mpiexec -n 4 -genv MASTER_ADDR HOST_OF_RANK_0 -genv MASTER_PORT 29500 python train.py"),
        (OPEN_MPI | {"MASTER_ADDR": "a"}, "mpirun -n 4 -x MASTER_ADDR=HOST_OF_RANK_0"),
        (SLURM | {"SLURM_DISTRIBUTION": "arbitrary"}, "MASTER_ADDR=HOST_OF_TASK_0 MASTER_PORT=29500 srun -n 8 python"),
    ],
)
def test_ranks_that_cannot_meet_are_refused_with_the_command(given: dict[str, str], command: str) -> None:
    with pytest.raises(GridError, match="no address of a rendezvous is set") as caught:
        find_place(given)
    assert f"start with `{command}" in str(caught.value)
    assert "TRINE_LAUNCHER=none for" in str(caught.value)


def test_a_world_size_that_contradicts_the_launcher_is_refused() -> None:
    with pytest.raises(GridError, match="WORLD_SIZE=16 is set, and Slurm has started 8 processes; unset WORLD_SIZE"):
        find_place(SLURM | {"WORLD_SIZE": "16"})
    assert find_place(SLURM | {"WORLD_SIZE": "8"}) == find_place(SLURM)


@pytest.mark.parametrize("port", ["65536", "-1", "x"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(GridError, match="MASTER_PORT"):
        find_place(TORCHRUN | {"MASTER_PORT": port})


def test_a_task_that_sees_its_own_gpus_only_counts_them_from_zero() -> None:
    assert local_rank(SLURM, 5) == 1 and local_rank(SLURM | {"SLURM_GPUS_PER_TASK": "1"}, 5) == 0
    assert local_rank({}, 5) == 5 and local_rank(SLURM | {"LOCAL_RANK": "3"}, 5) == 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-08]", "gpu07"),
        ("gpu[12,07-08],x", "gpu12"),
        ("a,b[1-2]", "a"),
        ("a[07-09,12]-x[1-2],b3", "a07-x1"),
        ("n-1.site.org,n-2.site.org", "n-1.site.org"),
        ("", ""),
    ],
)
def test_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("address", "here", "said"),
    [
        ("localhost", "2", True), ("127.0.1.1", "2", True), ("10.77.0.1", "2", False), ("localhost", "4", False),
        ("localhost", None, False),
    ],
)  # fmt: skip
def test_a_loopback_address_of_a_job_of_several_nodes_is_named_with_the_remedy(
    address: str, here: str | None, said: bool
) -> None:
    words = loopback_words(Place(2, 4, 0, address, 29400), {} if here is None else {"LOCAL_WORLD_SIZE": here})
    assert bool(words) is said
    assert not said or ("the job has 2 nodes: start torchrun on each node with --local-addr=ADDRESS" in words)


@pytest.mark.parametrize(
    ("named", "route", "chosen"),
    [
        (("127.0.1.1",), "10.0.0.1", "eth0"),
        ((), "10.0.0.1", "eth0"),
        (("10.9.9.9",), "10.0.0.1", "eth0"),
        (("10.9.9.9", "10.0.0.1"), "10.0.0.1", ""),
        (("10.1.0.1", "127.0.1.1"), "10.0.0.1", ""),
        (("127.0.1.1",), "fd00::2", "eth1"),
        (("127.0.1.1",), "127.0.0.1", ""),
        (("127.0.1.1",), "", ""),
    ],
)
def test_gloo_listens_where_other_hosts_reach_it(
    named: tuple[str, ...], route: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",), "eth1": ("10.1.0.1", "fd00::2")}
    monkeypatch.setattr(launcher, "addresses_of", lambda name: named)
    monkeypatch.setattr(launcher, "route_address", lambda target: route)
    monkeypatch.setattr(launcher, "interface_addresses", held.__getitem__)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(held)))
    assert gloo_interface("node0") == chosen
