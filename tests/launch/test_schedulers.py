"""Scripts and manifests of `jaxspeed launch --on`, run with stubs or validated by their schemas."""

import json
import os
import signal
import subprocess
import sys
import time
from urllib.parse import unquote

import pytest
import yaml

from jaxspeed.cli.main import main
from jaxspeed.errors import ExitCode
from jaxspeed.launch.agent import decoded_job
from jaxspeed.launch.scheduler_table import SCHEDULERS, Scheduler

pytestmark = pytest.mark.fast

TRAIN = ("--", "train", "configs/tiny.yaml")
IMAGE = ("--image", "repo/image:1")

# JobSet's documented fields: api/jobset/v1alpha2/jobset_types.go of kubernetes-sigs/jobset.
JOBSET = {
    "spec": {
        "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend",
        "coordinator", "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies",
    },
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "successPolicy": {"operator", "targetReplicatedJobs"},
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "rule": {
        "name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns",
        "targetReplicatedJobs",
    },
    "replicatedJob": {"name", "groupName", "template", "replicas", "dependsOn"},
}  # fmt: skip


@pytest.fixture
def printed(capsys, monkeypatch, tmp_path):
    """What `--print` writes."""
    monkeypatch.chdir(tmp_path)

    def show(on, *options, command=TRAIN):
        words = ["launch", "--on", on, "--print", "--processes", "4", *options, *command]
        assert main(words) == 0
        return capsys.readouterr().out

    return show


def stub(folder, name, code):
    """A program that stands for one that is not here; `folder` becomes the first of PATH."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{code}\n")
    file.chmod(0o755)


def with_stubs(folder, **more):
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", **more}


# -- SLURM -------------------------------------------------------------------------------------


def test_a_slurm_script_asks_for_what_the_run_needs(printed, tmp_path):
    options = ("--nodes", "2", "--devices-per-process", "3", "--option=--partition=gpu")
    script = printed("slurm", *options, "--save-seconds", "600", "--name", "mine")
    asked = {line[8:] for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert asked >= {
        "--job-name=mine", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-node=6",
        "--requeue", "--signal=TERM@600", "--open-mode=append", "--partition=gpu",
        f"--chdir={tmp_path}", f"--output={tmp_path}/logs/job-%j.log",
    }  # fmt: skip
    assert f"{sys.executable} -m jaxspeed train configs/tiny.yaml\n" in script


@pytest.mark.parametrize(
    ("code", "failures", "requeued"),
    [(0, 0, False), (75, 2, True), (1, 0, True), (1, 2, False), (137, 1, True), (2, 0, False),
     (3, 0, False)],
)  # fmt: skip
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])  # the latter after scancel
def test_a_slurm_script_requeues_by_exit_code(printed, tmp_path, code, failures, requeued, state):
    script = printed("slurm", "--max-restarts", "2")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "failures-7").write_text("exit code 1\n" * failures)
    stub(tmp_path, "squeue", f"echo {state}")
    stub(tmp_path, "srun", f'echo "$JAX_COMPILATION_CACHE_DIR" > {tmp_path}/cache.txt; exit {code}')
    stub(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/requeued')
    environment = with_stubs(tmp_path, SLURM_RESTART_COUNT="5", SLURM_JOB_ID="7")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=environment)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() is (requeued and state == "RUNNING")
    assert (tmp_path / "cache.txt").read_text().strip() == f"{tmp_path}/cache"
    assert done.stdout.splitlines()[-1] == f"jaxspeed: exit code {code}, starts before this one 5"


def test_a_slurm_job_is_submitted(tmp_path, monkeypatch):
    stub(tmp_path, "sbatch", f"cat > {tmp_path}/submitted; exit 4")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--on", "slurm", "--processes", "2", *TRAIN]) == 4
    assert (tmp_path / "submitted").read_text().startswith("#!/bin/bash\n#SBATCH ")
    assert (tmp_path / "logs").is_dir()


# -- Open MPI ----------------------------------------------------------------------------------


def test_an_mpi_script_names_the_coordinator_of_a_hostfile(printed, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    script = printed("mpi", "--nodes", "2", "--hostfile", "hosts")
    assert "-n 4 --map-by ppr:2:node" in script and "--hostfile hosts" in script
    assert "-x JAX_COORDINATOR_ADDRESS=a:2" in script and "-x JAXSPEED_TOKEN " in script
    assert "JAX_COORDINATOR_ADDRESS" not in printed("mpi")


def test_an_mpi_script_starts_a_failed_run_again(printed, tmp_path):
    script = printed("mpi", "--max-restarts", "1")
    stub(tmp_path, "mpirun", f"echo x >> {tmp_path}/starts; exit 1")
    done = subprocess.run(
        ["bash"], input=script, text=True, capture_output=True, env=with_stubs(tmp_path)
    )
    assert done.returncode == 1
    assert (tmp_path / "starts").read_text() == "x\nx\n"
    assert done.stdout.splitlines()[-1] == "jaxspeed: exit code 1, restarts so far 1"


def test_an_mpi_script_passes_a_signal_on_and_waits(printed, tmp_path):
    """The run takes its time to save; its exit code is the script's."""
    (tmp_path / "script").write_text(printed("mpi", "--max-restarts", "5"))
    code = "trap 'sleep 1; exit 75' USR1; touch started; sleep 60 & wait"
    stub(tmp_path, "mpirun", code)
    child = subprocess.Popen(["bash", "script"], cwd=tmp_path, env=with_stubs(tmp_path))
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == ExitCode.PREEMPTED


# -- the token of a run ------------------------------------------------------------------------


@pytest.mark.parametrize(("on", "starter"), [("slurm", "srun"), ("mpi", "mpirun")])
def test_a_script_makes_a_token_that_no_command_line_has(printed, tmp_path, on, starter):
    script = printed(on)
    stub(tmp_path, "squeue", "echo RUNNING")
    stub(tmp_path, starter, 'echo "$@" > words; echo "$JAXSPEED_TOKEN" >> tokens')
    for _ in range(2):
        environment = with_stubs(tmp_path, SLURM_JOB_ID="7")
        subprocess.run(["bash"], input=script, text=True, check=True, env=environment, cwd=tmp_path)
    first, second = (tmp_path / "tokens").read_text().split()
    assert len(first) == len(second) == 64 and first != second
    words = (tmp_path / "words").read_text()
    assert not any(token in text for token in (first, second) for text in (script, words))


def test_a_manifest_has_a_token_that_another_one_has_not(printed):
    tokens = set()
    for on in ("kubernetes", "jobset", "kubernetes"):
        first, *_ = yaml.safe_load_all(printed(on, *IMAGE))
        tokens.add((first["metadata"]["name"], first["stringData"]["token"]))
    assert len({name for name, _ in tokens}) == len({token for _, token in tokens}) == 3
    assert all(len(token) == 64 for _, token in tokens)


# -- Kubernetes --------------------------------------------------------------------------------


def validated(manifest):
    """The manifest, valid by the published schema of its kind."""
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(manifest, "1.30", strict=True)
    return manifest


def environment_of(spec):
    container = spec["template"]["spec"]["containers"][0]
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


def test_an_indexed_job_is_valid_and_its_pods_find_each_other(printed):
    options = ("--devices-per-process", "2", "--volume", "runs:/runs", *IMAGE)
    manifests = yaml.safe_load_all(printed("kubernetes", *options, "--max-restarts", "3"))
    token, service, job = map(validated, manifests)
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (4, 4, 3)
    found = environment_of(spec)
    assert found["JAX_COORDINATOR_ADDRESS"] == "jaxspeed-0.jaxspeed:55527"
    assert found["JAX_NUM_PROCESSES"] == "4"
    assert "job-completion-index" in found["JAX_PROCESS_ID"]["fieldRef"]["fieldPath"]
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/runs/cache"
    key = {"name": token["metadata"]["name"], "key": "token"}
    assert found["JAXSPEED_TOKEN"] == {"secretKeyRef": key}
    pod = spec["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert pod["containers"][0]["command"] == ["python", "-m", "jaxspeed", *TRAIN[1:]]
    assert pod["terminationGracePeriodSeconds"] == 300


def test_failed_pods_are_judged_by_their_exit_codes(printed):
    *_, job = yaml.safe_load_all(printed("kubernetes", *IMAGE))
    by_code = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert by_code == {
        ExitCode.CONFIG: "FailJob",
        ExitCode.DIVERGED: "FailJob",
        ExitCode.PEER: "Ignore",
        ExitCode.PREEMPTED: "Ignore",
    }


def test_a_jobset_has_documented_fields_alone_and_a_valid_job(printed):
    token, jobset = yaml.safe_load_all(printed("jobset", *IMAGE, "--max-restarts", "3"))
    assert validated(token)["kind"] == "Secret"
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = jobset["spec"]
    assert set(spec) <= JOBSET["spec"]
    for part in ("network", "successPolicy", "failurePolicy"):
        assert set(spec[part]) <= JOBSET[part]
    policy = spec["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["restartStrategy"] in ("Recreate", "BlockingRecreate", "InPlaceRestart")
    for rule in policy["rules"]:
        assert set(rule) <= JOBSET["rule"] and rule["action"] == "FailJobSet"
    (workers,) = spec["replicatedJobs"]
    assert set(workers) <= JOBSET["replicatedJob"]
    found = environment_of(workers["template"]["spec"])
    assert found["JAX_COORDINATOR_ADDRESS"] == "jaxspeed-workers-0-0.jaxspeed:55527"
    name = {"name": "jaxspeed-workers-0"}
    validated({"apiVersion": "batch/v1", "kind": "Job", "metadata": name, **workers["template"]})


def test_an_unknown_field_is_found():
    """The schemas are strict: the tests above can fail."""
    schemas = pytest.importorskip("kubernetes_validate")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
    spec = {"template": {"spec": {"containers": [{"name": "a", "imag": "x"}]}}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate({**job, "spec": spec}, "1.30", strict=True)


@pytest.mark.parametrize("on", ["kubernetes", "jobset"])
def test_a_manifest_is_created_by_kubectl(tmp_path, monkeypatch, on, printed):
    monkeypatch.setattr("secrets.token_hex", lambda count: "5" * 2 * count)
    stub(tmp_path, "kubectl", f"echo $@ > {tmp_path}/words; cat > {tmp_path}/given")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    words = ["launch", "--on", on, "--processes", "4", *IMAGE, "--option=--namespace=ml", *TRAIN]
    assert main(words) == 0
    assert (tmp_path / "words").read_text() == "--namespace=ml create -f -\n"
    assert (tmp_path / "given").read_text() == printed(on, *IMAGE)


# -- Ray ---------------------------------------------------------------------------------------


def test_a_ray_job_is_submitted_with_its_environment_and_driver(tmp_path, monkeypatch):
    stub(tmp_path, "ray", f"printf '%s\\n' \"$@\" > {tmp_path}/words; exit 3")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    options = ["--max-restarts", "2", "--devices-per-process", "1", "--option=--no-wait"]
    assert main(["launch", "--on", "ray", "--processes", "4", *options, *TRAIN]) == 3
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["job", "submit", "--runtime-env-json"]
    variables = json.loads(words[3])["env_vars"]
    assert variables["RAY_JOB_STOP_WAIT_TIME_S"] == "300"
    assert variables["JAX_COMPILATION_CACHE_DIR"] == f"{tmp_path}/cache"
    assert words[4:9] == ["--no-wait", "--", sys.executable, "-m", "jaxspeed.launch.ray.driver"]
    given = json.loads(unquote(words[9]))
    job = decoded_job(given["job"])
    assert (job.count, job.processes, job.devices, job.folder) == (4, 1, 1, str(tmp_path))
    assert job.command == (sys.executable, "-m", "jaxspeed", *TRAIN[1:])
    assert given["restarts"]["most"] == 2


# -- one of another package --------------------------------------------------------------------


QUEUE = {"--queue": {"default": "normal", "help": "the queue"}}


class Pbs(Scheduler):
    """PBS, with an option of its own."""

    program = "qsub"
    reads = ("nodes", "name")
    options = QUEUE

    def script(self, job, given):
        return f"#PBS -N {job.name} -q {given.queue} -l nodes={job.nodes}\n{job.command[-1]}\n"

    def command(self, job, given):
        return ["qsub", *job.options]


def test_a_scheduler_is_added_by_its_name_and_class(monkeypatch, tmp_path, capsys, printed):
    monkeypatch.setitem(SCHEDULERS, "pbs", Pbs())
    options = ["--queue", "long", "--nodes", "2", "--option=-V"]
    script = printed("pbs", *options)
    assert script == "#PBS -N jaxspeed -q long -l nodes=2\nconfigs/tiny.yaml\n"
    stub(tmp_path, "qsub", "echo $@ > words; cat > given; exit 7")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert main(["launch", "--on", "pbs", "--processes", "4", *options, *TRAIN]) == 7
    assert (tmp_path / "words").read_text() == "-V\n"
    assert (tmp_path / "given").read_text() == script
    for words, said in (
        (["--on", "pbs", "--image", "x"], "--image: not used with --on pbs"),
        (["--on", "slurm", "--queue", "long"], "--queue: not used with --on slurm"),
        (["--queue", "long"], "--queue: needs --on pbs"),
        (["--nodes", "2"], "--nodes: needs --on slurm or mpi or pbs"),
    ):
        assert main(["launch", "--processes", "4", *words, *TRAIN]) == ExitCode.CONFIG
        assert said in capsys.readouterr().err


# -- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm", *TRAIN], "needs --processes"),
        (["--on", "kubernetes", "--processes", "2", *TRAIN], "needs --image"),
        (["--on", "slurm", "--processes", "3", "--nodes", "2", *TRAIN], "not divisible"),
        (["--on", "jobset", "--processes", "2", *IMAGE, "--volume", "x", *TRAIN], "CLAIM:/PATH"),
        (["--on", "kubernetes", "--processes", "2", *IMAGE, "--name", "my_run", *TRAIN], "a-z"),
        (["--on", "mpi", "--processes", "2", "--print"], "no COMMAND"),
    ],
)
def test_a_mistake_is_named(words, said, capsys):
    assert main(["launch", *words]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("on", "program"),
    [("slurm", "sbatch"), ("mpi", "mpirun"), ("ray", "ray"), ("jobset", "kubectl")],
)
def test_a_scheduler_that_is_not_installed_is_named(monkeypatch, tmp_path, capsys, on, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    image = IMAGE if on == "jobset" else ()
    words = ["launch", "--on", on, "--processes", "2", "--max-restarts", "2", *image, *TRAIN]
    assert main(words) == ExitCode.CONFIG
    assert f"{program} is not installed here; --print shows" in capsys.readouterr().err
