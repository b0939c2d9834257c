"""A run on Kubernetes: an Indexed Job with its service, or a JobSet.

Neither needs a service account: coordinator, count and rank are in the pods' environment, and so
is the run's token, from a Secret. What
happens to a failed pod depends on its exit code (`ExitCode`): a config error or a divergence ends
the job, a preemption or a peer's failure is not counted against `backoffLimit`.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import yaml

from jaxspeed.errors import ConfigError, ExitCode
from jaxspeed.launch.schedulers import ClusterJob
from jaxspeed.launch.variables import COORDINATOR, COUNT, RANK, TOKEN

PORT = 55527  # as in JAX's own detection
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_WORKERS = "workers"  # the replicated job of a JobSet
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,44}[a-z0-9])?")  # with a pod's suffix a host's name, of 63


def indexed_job(job: ClusterJob, image: str, accelerator: str, volumes: Sequence[str] = ()) -> str:
    """The token, a headless service, by which the pods find the first, and an Indexed Job."""
    token = _token(job)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the pods wait for each other before they are ready
            "selector": {"batch.kubernetes.io/job-name": job.name},
        },
    }
    pod = _pod(job, token, f"{job.name}-0.{job.name}", image, accelerator, volumes)
    pod["subdomain"] = job.name
    manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": _job_spec(job, pod, backoff=job.max_restarts),
    }
    return yaml.safe_dump_all([token, service, manifest], sort_keys=False)


def jobset(job: ClusterJob, image: str, accelerator: str, volumes: Sequence[str] = ()) -> str:
    """The token and a JobSet (v1alpha2) of one job: where a pod fails, all start again."""
    token = _token(job)
    coordinator = f"{job.name}-{_WORKERS}-0-0.{job.name}"
    pod = _pod(job, token, coordinator, image, accelerator, volumes)
    manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": job.max_restarts,
                "restartStrategy": "BlockingRecreate",  # the folder of the run has one user
                "rules": [
                    {
                        "name": "wouldFailAgain",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": _WORKERS,
                    "replicas": 1,
                    "template": {"spec": _job_spec(job, pod, backoff=0)},
                }
            ],
        },
    }
    return yaml.safe_dump_all([token, manifest], sort_keys=False)


def _token(job: ClusterJob) -> dict[str, Any]:
    """A Secret of another name for each job: Kubernetes does not remove it with the job."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{job.name}-{secrets.token_hex(4)}", "labels": {"run": job.name}},
        "stringData": {"token": secrets.token_hex(32)},
    }


def _job_spec(job: ClusterJob, pod: dict[str, Any], backoff: int) -> dict[str, Any]:
    def on_codes(action: str, *codes: ExitCode) -> dict[str, Any]:
        values = sorted(map(int, codes))
        return {
            "action": action,
            "onExitCodes": {"containerName": "run", "operator": "In", "values": values},
        }

    disrupted = {"type": "DisruptionTarget", "status": "True"}  # drained, or preempted
    return {
        "completionMode": "Indexed",
        "completions": job.processes,
        "parallelism": job.processes,
        "backoffLimit": backoff,
        "podFailurePolicy": {
            "rules": [
                on_codes("FailJob", ExitCode.CONFIG, ExitCode.DIVERGED),
                on_codes("Ignore", ExitCode.PEER, ExitCode.PREEMPTED),
                {"action": "Ignore", "onPodConditions": [disrupted]},
            ]
        },
        "template": {"spec": pod},
    }


def _pod(
    job: ClusterJob,
    token: dict[str, Any],
    coordinator: str,
    image: str,
    accelerator: str,
    volumes: Sequence[str],
) -> dict[str, Any]:
    if not _NAME.fullmatch(job.name):
        raise ConfigError(
            f"--name {job.name}: on Kubernetes at most 46 of a-z, 0-9 and -, the first a letter"
        )
    mounts, claims = [{"name": "shm", "mountPath": "/dev/shm"}], []
    for number, volume in enumerate(volumes):
        claim, colon, path = volume.partition(":")
        if not colon or not path.startswith("/"):
            raise ConfigError(f"--volume {volume}; needs CLAIM:/PATH")
        mounts.append({"name": f"claim-{number}", "mountPath": path})
        claims.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    cache = job.cache
    if len(mounts) > 1 and not cache.startswith("/"):
        cache = f"{mounts[1]['mountPath']}/{cache}"
    container: dict[str, Any] = {
        "name": "run",
        "image": image,
        "command": list(job.command),
        "env": [
            {"name": COORDINATOR, "value": f"{coordinator}:{PORT}"},
            {"name": COUNT, "value": str(job.processes)},
            {"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            {
                "name": TOKEN,
                "valueFrom": {"secretKeyRef": {"name": token["metadata"]["name"], "key": "token"}},
            },
            {"name": "JAX_COMPILATION_CACHE_DIR", "value": cache},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
        ],
        "ports": [{"containerPort": PORT}],
        "volumeMounts": mounts,
        # The last lines of its output, in the status of a failed pod.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if job.devices:
        container["resources"] = {"limits": {accelerator: job.devices}}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.save_seconds,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims],
    }
