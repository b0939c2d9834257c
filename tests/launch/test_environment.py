"""Coordinator, count and rank from the variables that schedulers set."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import jax
import pytest
from jax._src.clusters import cloud_tpu_cluster

from jaxspeed.errors import ConfigError, RunError
from jaxspeed.launch import environment
from jaxspeed.launch.binding import shared_evenly, visible_gpus
from jaxspeed.launch.environment import find_membership

pytestmark = pytest.mark.fast

STATED = {
    "JAX_COORDINATOR_ADDRESS": "a:1234",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "2",
}
# As `srun` of SLURM 22.05 sets them on the second of two hosts with four GPUs.
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3",
}
# As `mpirun` of Open MPI 4.1 and of 5.0.
MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPI_5 = {name: value for name, value in MPI_4.items() if "orte" not in name} | {
    "PMIX_NAMESPACE": "prterun-host-4711@1"
}


@pytest.fixture
def given(monkeypatch):
    """`find_membership` in an environment of these variables alone."""

    def find(variables):
        for name in {*SLURM, *MPI_4, *MPI_5, *STATED, "JOB_COMPLETION_INDEX"}:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return find_membership()

    return find


def test_one_process_alone_is_no_group(given):
    assert given({}) is None
    assert given(STATED | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    assert given(SLURM | {"SLURM_NTASKS": "1"}) is None
    assert given(MPI_4 | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_stated_variables_come_first(given):
    found = given(SLURM | STATED)
    assert (found.coordinator, found.count, found.rank, found.gpus) == ("a:1234", 4, 2, None)
    assert given(SLURM | {"JAX_NUM_PROCESSES": "1"}) is None  # processes that train apart


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"JAX_COORDINATOR_ADDRESS": ""}, "not JAX_COORDINATOR_ADDRESS"),
        ({"JAX_PROCESS_ID": ""}, "not JAX_PROCESS_ID"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4: needs 0 to 3"),
        ({"JAX_PROCESS_ID": "two"}, "not numbers"),
    ],
)
def test_incomplete_variables_are_named(given, changes, said):
    with pytest.raises(ConfigError, match=said):
        given(STATED | changes)


def test_slurm(given):
    found = given(SLURM)
    assert (found.coordinator, found.count, found.rank) == ("node007:61444", 4, 2)


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, (0, 1)),  # two processes of a host share its four
        ({"SLURM_LOCALID": "1"}, (2, 3)),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, (0, 1, 2, 3)),  # JAX would take one
        ({"SLURM_STEP_TASKS_PER_NODE": "4,1"}, (0, 1, 2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),  # --gpus-per-task=1: each sees its own
        ({"SLURM_STEP_TASKS_PER_NODE": ""}, None),
    ],
)
def test_the_gpus_of_a_host_are_shared_by_its_processes(given, changes, gpus):
    assert given(SLURM | changes).gpus == gpus


def test_open_mpi_4(given):
    found = given(MPI_4)
    assert (found.count, found.rank, found.found_by) == (2, 1, "ompi")
    assert found.coordinator.startswith("10.96.0.1:")


def test_open_mpi_5(given):
    """It no longer names the launcher's host: one host is found, several need the address."""
    found = given(MPI_5)
    assert (found.count, found.rank) == (2, 1)
    assert found.coordinator == given(MPI_5 | {"OMPI_COMM_WORLD_RANK": "0"}).coordinator
    daemon_of_slurm = given(MPI_5 | SLURM | {"SLURM_NTASKS": "3"})
    assert (daemon_of_slurm.count, daemon_of_slurm.found_by) == (2, "ompi")
    two_hosts = MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match="-x JAX_COORDINATOR_ADDRESS"):
        given(two_hosts)
    assert given(two_hosts | {"JAX_COORDINATOR_ADDRESS": "b:9"}).coordinator == "b:9"


# The second of two hosts.
TPU_METADATA = {
    "agent-worker-number": "1",
    "worker-network-endpoints": "a:b:127.0.0.1,c:d:10.0.0.2",
}


class Metadata(BaseHTTPRequestHandler):
    """A TPU VM's metadata server."""

    def do_GET(self):
        body = TPU_METADATA.get(self.path.rpartition("/")[2], "").encode()
        self.send_response(200 if body or self.path.endswith("tpu-env") else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def tpu_vm(monkeypatch):
    """JAX takes this host for a TPU VM, whose metadata server is asked."""
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster.time, "sleep", lambda _: None)
    monkeypatch.setattr(
        environment, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=None))
    )
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def test_a_tpu_pod(given, tpu_vm, monkeypatch):
    found = given({})
    assert (found.coordinator, found.count, found.rank) == ("127.0.0.1:8482", 2, 1)
    assert (found.found_by, found.gpus) == ("gcetpu", None)
    monkeypatch.setitem(TPU_METADATA, "worker-network-endpoints", "a:b:127.0.0.1")
    assert given({}) is None  # a single host
    environment.jax.config.jax_platforms = "cpu"
    monkeypatch.setitem(TPU_METADATA, "worker-network-endpoints", "not:asked")
    assert given({}) is None


def test_a_tpu_pod_of_kubernetes(given, tpu_vm, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    for name in ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,tpu-1,tpu-2")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    found = given({})
    assert (found.coordinator, found.count, found.rank) == ("localhost:8482", 3, 2)
    # four slices, of which this is the last: their first host is the coordinator
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "localhost:8080")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "3")
    found = given({})
    assert (found.coordinator, found.count, found.rank) == ("localhost:8482", 12, 11)


def test_a_metadata_server_that_does_not_answer_is_named(given, tpu_vm):
    tpu_vm.shutdown()
    tpu_vm.server_close()
    with pytest.raises(ConfigError, match=r"cannot detect the processes of gcetpu: .*refused"):
        given({})


def test_kubernetes_is_asked_only_in_an_indexed_job(given, monkeypatch):
    """Of any other pod JAX's detection would fail, or warn that a package is missing."""
    asked = []
    cluster = SimpleNamespace(
        name="k8s",
        opt_in_only_method=False,
        is_env_present=lambda: asked.append(1) or True,
        get_process_count=lambda: 8,
        get_process_id=lambda: 3,
        get_coordinator_address=lambda **_: "job-0.pods:55527",
    )
    monkeypatch.setattr(environment.clusters.ClusterEnv, "_cluster_types", [cluster])
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object())
    assert given({}) is None and not asked
    found = given({"JOB_COMPLETION_INDEX": "3"})
    assert (found.coordinator, found.count, found.rank) == ("job-0.pods:55527", 8, 3)


def test_a_detection_that_fails_says_what_to_set(given, monkeypatch):
    def fails():
        raise RuntimeError("no headless service")

    cluster = SimpleNamespace(
        name="slurm",
        opt_in_only_method=False,
        is_env_present=lambda: True,
        get_process_count=fails,
    )
    monkeypatch.setattr(environment.clusters.ClusterEnv, "_cluster_types", [cluster])
    with pytest.raises(ConfigError, match="no headless service\nSet JAX_COORDINATOR"):
        given({})


def test_processes_that_were_not_joined_before_jax_started_are_an_error(monkeypatch):
    jax.devices()
    for name, value in STATED.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"process 2 of 4 .* call jaxspeed\.start_processes"):
        environment.start_processes()


def test_shares_are_consecutive_and_complete():
    for processes in range(1, 6):
        for count in range(12):
            shares = [shared_evenly(range(count), r, processes) for r in range(processes)]
            assert [x for share in shares for x in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gpus_are_those_that_cuda_shows(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, str(tmp_path)) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-8a"}, str(tmp_path)) == ["3", "GPU-8a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == []
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, str(tmp_path)) == []
