"""`zlaunch k8s`: make manifests for Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from zlaunch.cli.commands import SETTINGS, Group, count_option
from zlaunch.errors import LaunchError

_SETTINGS = {"allow_interspersed_args": False}
_OF_RUNTIME = "it belongs into the training runtime that a TrainJob names; or use --kind jobset"


@click.group(cls=Group, context_settings=SETTINGS)
def k8s() -> None:
    """Write manifests for Kubernetes."""


@k8s.command(context_settings=_SETTINGS)
@click.option(
    "--kind",
    type=click.Choice(["jobset", "trainjob"], case_sensitive=False),
    default="jobset",
    show_default=True,
    help="JobSet, or TrainJob of Kubeflow Trainer 2.",
)
@click.option("--image", required=True, metavar="IMAGE", help="Container image with zlaunch and the script.")
@click.option("--name", metavar="NAME", help="Name of the job.  [default: the script's]")
@click.option("--namespace", metavar="NAME", help="Namespace of the cluster.")
@count_option(
    "--num_nodes", "--nodes", "nodes", default=1, show_default=True, help="Nodes; each runs in a pod."
)
@count_option("--num_gpus", "--gpus", "gpus", low=0, default=0, show_default=True, help="GPUs per node.")
@count_option("--workers", help="Workers per node.  [default: one per GPU, or 1]")
@click.option("--cpus", metavar="N", help="CPU cores of each pod: 16 or 500m.")
@click.option("--memory", metavar="SIZE", help="Memory of each pod: 64Gi.")
@click.option("--env", "env", multiple=True, metavar="KEY=VALUE", help="Environment variable; repeatable.")
@click.option(
    "--mount", "mounts", multiple=True, metavar="CLAIM:PATH", help="Volume claim to mount; repeatable."
)
@click.option("--shm", metavar="SIZE", help="Size of /dev/shm.  [default: what the memory allows]")
@count_option(
    "--max_restarts", "--restarts", "restarts", low=0, default=0, help="Restart up to N times after failures."
)
@click.option(
    "--runtime", metavar="NAME", help="Training runtime of a TrainJob.  [default: torch-distributed]"
)
@click.option("--zlaunch_args", metavar="ARGS", help='Options of zlaunch, such as "--log_ranks all".')
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def script(
    command: tuple[str, ...],
    kind: str,
    image: str,
    name: str | None,
    env: tuple[str, ...],
    mounts: tuple[str, ...],
    shm: str | None,
    restarts: int,
    runtime: str | None,
    zlaunch_args: str | None,
    **sizes: Any,
) -> None:
    """Print the manifest that runs SCRIPT with zlaunch in pods, for `kubectl apply -f -`.

    SCRIPT is the path in the image. Options before it are Kubernetes'. Everything after it goes to
    the script.
    """
    import shlex

    import yaml

    from zlaunch.kubernetes.manifests import KubernetesJob, job_set, train_job

    if not command or not command[0]:
        raise click.UsageError("no script given: zlaunch k8s script --image IMAGE SCRIPT [ARGS]")
    try:
        own = shlex.split(zlaunch_args or "")
    except ValueError as error:
        raise click.UsageError(f"--zlaunch_args {zlaunch_args!r}: {error}") from None
    job = KubernetesJob(
        name=name or _name_of(command[0]),
        image=image,
        command=("zlaunch", *own, *command),
        env=dict(_pair(each, "=", "--env", "KEY=VALUE") for each in env),
        **sizes,
    )
    if kind == "trainjob":
        for option, given in (("mount", mounts), ("shm", shm), ("max_restarts", restarts)):
            if given:
                raise LaunchError(f"--{option}: {_OF_RUNTIME}")
        manifest = train_job(job, runtime=runtime or "torch-distributed")
    else:
        if runtime is not None:
            raise LaunchError("--runtime needs --kind trainjob; a JobSet has no runtime")
        pairs = dict(_pair(each, ":", "--mount", "CLAIM:PATH") for each in mounts)
        manifest = job_set(job, restarts=restarts, shm=shm, mounts=pairs)
    click.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)


def _name_of(script: str) -> str:
    """Make a name for Kubernetes from a script's."""
    name = re.sub("[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _pair(text: str, separator: str, option: str, form: str) -> tuple[str, str]:
    key, found, value = text.partition(separator)
    if not key or not found:
        raise LaunchError(f"{option} {text!r}: write it as {form}")
    return key, value
