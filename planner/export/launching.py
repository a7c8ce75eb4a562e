"""Files beside exported settings: a description, and files that start them under a scheduler.

    README.md          what it is, how to start it on one node and on many, what to fill in
    slurm.sbatch       one task on each node, which runs launch.sh
    pytorchjob.yaml    the same under Kubernetes, with the training operator of Kubeflow
    jobset.yaml        the same with JobSet

All of them pass `NODE_RANK` and `MASTER_ADDR` to `launch.sh`, which starts the processes of one node. Kubernetes mounts
the folder as a ConfigMap. Sources: sbatch(1) and srun(1) of Slurm 23.11; kubeflow/training-operator 1.8,
pkg/apis/kubeflow.org/v1 (its pods know RANK and MASTER_ADDR); kubernetes-sigs/jobset v1alpha2 (pods are called
JOBSET-JOB-0-INDEX, in the subdomain of the name of the JobSet).
"""

import re
from collections.abc import Mapping
from typing import Any

from planner.export.files.quoting import in_markdown, one_line
from planner.export.files.yaml_files import block_yaml
from planner.export.target import ASCEND, Job, Target

_NAME = 40  # characters of a Kubernetes name, which gets suffixes; the limit is 63
_FOLDER = "/plan"
_ASCEND = frozenset({"mindspeed", "mindformers"})
_START = 'NODE_RANK="${rank}" exec bash {folder}/launch.sh "$@"'


def folder_files(target: Target, job: Job) -> dict[str, str]:
    """All files of an export by name: the engine's own, and those that start them."""
    files = dict(target.write(job))
    own = {
        "README.md": _readme(target, job, files),
        "slurm.sbatch": _slurm(target, job),
        "pytorchjob.yaml": _commented(target, job, block_yaml(_pytorch_job(target, job))),
        "jobset.yaml": _commented(target, job, block_yaml(_job_set(target, job))),
    }
    return {**files, **own}


def switched_off(job: Job) -> tuple[str, ...]:
    """Usual training features that a plan does not have, each with what to do, in Markdown."""
    found = []
    if job.description.update.clip_norm is None:
        found.append("clipping of gradients (plan with `--clip-norm 1`)")
    if job.architecture is not None and job.architecture.experts is not None and not job.architecture.balance_loss:
        found.append("the balance loss of experts, which the planned model has not (it takes hardly any time)")
    return tuple(found)


def priced_only(target: Target, job: Job) -> tuple[str, ...]:
    """What the predicted step counts on and the settings do not switch on, so that a step may take longer."""
    found, told = [*job.unsaid, *target.ignores(job)], target.tells(job)
    if (job.description.expert or 1) > 1:
        if job.dispatcher and "once" not in told:
            found.append("a token sent once to each node (DeepEP, HybridEP)")
        if "exchange" in job.overlapped and "exchange" not in told:
            found.append("the exchange of experts overlapped with other work")
    return tuple(found)


def object_name(model: str) -> str:
    """A name that Kubernetes accepts: small letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", f"plan-{model}".lower().encode("ascii", "replace").decode()).strip("-")
    return plain[:_NAME].rstrip("-")


def _readme(target: Target, job: Job, files: Mapping[str, str]) -> str:
    name, asked = object_name(job.model), target.fill_in(job)
    given = "".join(f"{variable}=... " for variable, _ in asked if variable)
    devices = f"{job.nodes} nodes of {job.processes} devices" if job.nodes > 1 else f"one node of {job.processes}"
    start = f"{given}bash launch.sh"
    if job.nodes > 1:
        by_hand = f"`{given}NODE_RANK=0 MASTER_ADDR=first-node bash launch.sh` on the first node, and on the others the"
        by_hand += f" same with `NODE_RANK` 1{f' to {job.nodes - 1}' if job.nodes > 2 else ''}"
    else:
        by_hand = f"`{start}`"
    settings = ", ".join(f"`{one}`" for one in sorted(files) if one not in ("launch.sh", "README.md"))
    lines = [
        f"# {in_markdown(job.model)}: {in_markdown(target.about)}",
        "",
        f"A plan as settings, for {devices}; for another number of devices plan again. `launch.sh` starts the processes"
        f" of one node{f' with {settings}' if settings else ''}. What was predicted and what was given up is in"
        " `export.json`.",
        "",
        *(
            [f"{in_markdown(job.gave_up)}: these are the settings of another plan, without that.", ""]
            if job.gave_up
            else []
        ),
        f"- By hand: {by_hand}.",
        f"- Slurm: `{given}sbatch slurm.sbatch`, in this folder, which every node sees.",
        f"- Kubernetes: `kubectl create configmap {name} --from-file=.`, then `kubectl create -f pytorchjob.yaml`"
        " (training operator) or `-f jobset.yaml` (JobSet).",
        "- Fill in: in the YAML `image` and the name under which the cluster counts its devices"
        f" (`{_resource(target, job)}`), in the job for Slurm account and partition;",
        *(f"  {f'`{variable}`, ' if variable else ''}{what};" for variable, what in asked),
        *(f"  switched off, as in the plan: {what};" for what in switched_off(job)),
        *(f"  priced, but not switched on here: {what};" for what in priced_only(target, job)),
        "  what is given to `launch.sh` goes to the program, behind its own settings.",
    ]
    return "\n".join(lines) + "\n"


def _resource(target: Target, job: Job) -> str:
    """The Kubernetes resource name of a device."""
    return ASCEND if target.name in _ASCEND else job.resource


def _slurm(target: Target, job: Job) -> str:
    on_ascend = _resource(target, job) == ASCEND
    devices = f"--gres=npu:{job.processes}" if on_ascend else f"--gpus-per-node={job.processes}"
    start = _START.format(rank="SLURM_NODEID", folder='"$0"')
    return f"""#!/usr/bin/env bash
# {one_line(job.model)}: sbatch slurm.sbatch, in this folder, which every node sees.
#SBATCH --job-name={object_name(job.model)}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH {devices}
#SBATCH --exclusive
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR
srun --kill-on-bad-exit=1 bash -c '{start}' "$SLURM_SUBMIT_DIR" "$@"
"""


def _commented(target: Target, job: Job, text: str) -> str:
    asked = ", ".join(variable for variable, _ in target.fill_in(job) if variable)
    values = f", and the values of {asked}" if asked else ""
    return f"# {one_line(job.model)}. Fill in the image{values}; README.md says how the folder gets there.\n{text}"


def _pod(target: Target, job: Job, rank: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """A pod for one node; `rank` is the variable with the node's number."""
    start = _START.format(rank=rank, folder=_FOLDER)
    asked = {variable: "FILL_IN" for variable, _ in target.fill_in(job) if variable}
    variables = [{"name": key, "value": value} for key, value in {**environment, **asked}.items()]
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": "FILL_IN",
        "command": ["bash", "-c", start],
        "env": variables,
        "resources": {"limits": {_resource(target, job): job.processes}},
        "volumeMounts": [{"name": "plan", "mountPath": _FOLDER}, {"name": "shared", "mountPath": "/dev/shm"}],
    }
    if not variables:
        del container["env"]
    volumes: list[dict[str, Any]] = [
        {"name": "plan", "configMap": {"name": object_name(job.model)}},
        {"name": "shared", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [container], "volumes": volumes}


def _pytorch_job(target: Target, job: Job) -> dict[str, object]:
    """A PyTorchJob; its first pod is the master, and all pods know RANK and MASTER_ADDR."""
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    specs = {
        name: {"replicas": count, "restartPolicy": "Never", "template": {"spec": _pod(target, job, "RANK", {})}}
        for name, count in replicas.items()
        if count
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": object_name(job.model)},
        "spec": {"pytorchReplicaSpecs": specs},
    }


def _job_set(target: Target, job: Job) -> dict[str, object]:
    name = object_name(job.model)
    pod = _pod(target, job, "JOB_COMPLETION_INDEX", {"MASTER_ADDR": f"{name}-node-0-0.{name}"})
    spec = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}]},
    }
