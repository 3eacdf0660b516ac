"""Test manifests against the published models of JobSet and TrainJob, and zlaunch in a pod of them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kubeflow_trainer_api import models

from zlaunch.cli.k8s import k8s
from zlaunch.cli.main import main
from zlaunch.launchers.found import read_pod


def manifest(*words: str) -> dict[str, Any]:
    """Returns what `zlaunch k8s script` prints."""
    result = CliRunner().invoke(k8s, ["script", *words])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.output)
    return found


def pod_env(job: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of a JobSet's pod, as Kubernetes sets them."""
    (job_spec,) = job["spec"]["replicatedJobs"]
    (container,) = job_spec["template"]["spec"]["template"]["spec"]["containers"]
    return {each["name"]: each.get("value", str(index)) for each in container["env"]}


def test_a_job_set_is_one_and_its_pods_know_their_places() -> None:
    words = "--image ghcr.io/me/train:1 --nodes 3 --gpus 8 --memory 64Gi --cpus 16 --restarts 2 --shm 16Gi"
    words += " --mount data:/data --env HF_HOME=/data/hf train_gpt.py --config ds.json"
    job = manifest(*shlex.split(words))
    assert models.JobsetV1alpha2JobSet.from_dict(job).to_dict() == job
    assert job["metadata"] == {"name": "train-gpt"} and job["spec"]["failurePolicy"] == {"maxRestarts": 2}
    (replicated,) = job["spec"]["replicatedJobs"]
    batch = replicated["template"]["spec"]
    assert (batch["parallelism"], batch["completions"], batch["completionMode"]) == (3, 3, "Indexed")
    (container,) = batch["template"]["spec"]["containers"]
    assert container["command"] == ["zlaunch", "train_gpt.py", "--config", "ds.json"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "16", "memory": "64Gi"}
    assert {"name": "volume-0", "mountPath": "/data"} in container["volumeMounts"]
    for index in range(3):
        pod = read_pod(pod_env(job, index))
        assert pod is not None
        assert (pod.node_rank, pod.nodes, pod.workers) == (index, 3, 8)
        assert (pod.master_addr, pod.master_port) == ("train-gpt-node-0-0.train-gpt", 29500)


def test_a_train_job_is_one() -> None:
    words = "--kind trainjob --image me/train --nodes 2 --gpus 4 --name try --namespace team --env A=b=c"
    job = manifest(*words.split(), "train.py")
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    assert job["metadata"] == {"name": "try", "namespace": "team"}
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["env"] == [{"name": "A", "value": "b=c"}]


def test_pods_without_gpus() -> None:
    job = manifest("--image", "me/train", "--workers", "2", "1st.py")
    assert models.JobsetV1alpha2JobSet.from_dict(job).to_dict() == job
    assert job["metadata"]["name"] == "run-1st" and pod_env(job, 0)["PET_NPROC_PER_NODE"] == "2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--image x", "no script given"),
        ("train.py", "Missing option '--image'"),
        ("--image x --name Run train.py", "--name 'Run': use at most 40 lower-case letters"),
        ("--image x --memory 64GB train.py", "--memory '64GB': write it as Kubernetes does"),
        ("--image x --env HF train.py", "--env 'HF': write it as KEY=VALUE"),
        ("--image x --mount data train.py", "--mount 'data': write it as CLAIM:PATH"),
        ("--image x --mount data:here train.py", "the path must start with /"),
        ("--image x --runtime r train.py", "a JobSet has no runtime"),
        ("--kind trainjob --image x --shm 1Gi train.py", "--shm: it belongs into the training runtime"),
    ],
)
def test_mistakes(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["k8s", "script", *words.split()]) == 2
    assert said in capsys.readouterr().err
