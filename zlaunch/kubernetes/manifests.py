"""Make manifests of training jobs for Kubernetes. Pure: data in, data out; nothing is sent anywhere.

A JobSet (jobset.x-k8s.io/v1alpha2) has one pod a node; each is told its place by variables that zlaunch
reads in a pod, `PET_NNODES` and the like. A TrainJob (trainer.kubeflow.org/v1alpha1, Kubeflow Trainer 2)
leaves all that to a training runtime of the cluster, which sets the same variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zlaunch.errors import LaunchError

PORT = 29500
NODE = "node"
"""The name of the pods' job in a JobSet and in the training runtimes of Kubeflow."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40
"""Characters: the names of pods and of their service are longer, and have at most 63."""
_AMOUNT = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesJob:
    """Holds the values of a manifest. Raises LaunchError on a value that Kubernetes would refuse."""

    name: str
    image: str
    command: tuple[str, ...]
    """Lists what each pod runs: zlaunch, its options, the script and its arguments."""
    namespace: str | None = None
    nodes: int = 1
    gpus: int = 0
    """GPUs of each pod."""
    workers: int | None = None
    """Workers of each pod; None: one a GPU, or one."""
    cpus: str | None = None
    memory: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, text in (("name", self.name), ("namespace", self.namespace)):
            if text is not None and not (_LABEL.fullmatch(text) and len(text) <= _LONGEST_NAME):
                raise LaunchError(
                    f"--{option} {text!r}: use at most {_LONGEST_NAME} lower-case letters, digits and -, "
                    "starting with a letter"
                )
        for option, text in (("cpus", self.cpus), ("memory", self.memory)):
            _check_amount(option, text)
        if not self.image or not self.image.isprintable() or " " in self.image:
            raise LaunchError(f"--image {self.image!r}: not an image name")

    def metadata(self) -> dict[str, str]:
        """Return the manifest's metadata."""
        return {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}

    def resources(self) -> dict[str, dict[str, str]]:
        """Return what each pod gets: limits, which are requests, too."""
        asked = {"nvidia.com/gpu": str(self.gpus) if self.gpus else None, "cpu": self.cpus}
        limits = {key: value for key, value in {**asked, "memory": self.memory}.items() if value}
        return {"limits": limits} if limits else {}

    @property
    def workers_of_node(self) -> int:
        """Return how many workers each pod starts."""
        return self.workers or self.gpus or 1


def _check_amount(option: str, text: str | None) -> None:
    if text is not None and not _AMOUNT.fullmatch(text):
        raise LaunchError(f"--{option} {text!r}: write it as Kubernetes does, such as 16, 500m, 64Gi")


def job_set(
    job: KubernetesJob, *, restarts: int = 0, shm: str | None = None, mounts: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a JobSet. All pods begin anew after a failure, up to `restarts` times. `shm` is the size of
    `/dev/shm`, by default what the pod's memory allows; `mounts` maps claims of volumes to their paths.
    Raises LaunchError.
    """
    _check_amount("shm", shm)
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", **({"sizeLimit": shm} if shm else {})}}
    ]
    mounted = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (claim, path) in enumerate((mounts or {}).items()):
        if not path.startswith("/"):
            raise LaunchError(f"--mount {claim}:{path}: the path must start with /")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounted.append({"name": f"volume-{number}", "mountPath": path})
    place: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(job.nodes)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_NPROC_PER_NODE", "value": str(job.workers_of_node)},
        {"name": "PET_MASTER_ADDR", "value": f"{job.name}-{NODE}-0-0.{job.name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    container = {
        "name": NODE,
        "image": job.image,
        "command": list(job.command),
        "env": [*place, *_own(job.env)],
        "volumeMounts": mounted,
        **({"resources": job.resources()} if job.resources() else {}),
    }
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": template}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job.metadata(),
        "spec": spec,
    }


def train_job(job: KubernetesJob, *, runtime: str = "torch-distributed") -> dict[str, Any]:
    """Return a TrainJob on a training runtime of the cluster, such as Kubeflow's own for torch."""
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": list(job.command),
        "numNodes": job.nodes,
        "numProcPerNode": job.workers_of_node,
    }
    if job.env:
        trainer["env"] = _own(job.env)
    if job.resources():
        trainer["resourcesPerNode"] = job.resources()
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": job.metadata(),
        "spec": {"runtimeRef": {"name": runtime}, "trainer": trainer},
    }


def _own(env: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in env.items()]
