"""Files beside exported settings start them: under a shell, Slurm and Kubernetes, on one node and on many."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.export.description import Description
from planner.export.launching import folder_files, object_name, switched_off
from planner.export.targets import TARGETS
from planner.sharding.update import PLAIN
from tests.unit.export.descriptions import job_of
from tests.unit.export.test_quoting import HOSTILE


def folder(engine: str, data: int) -> dict[str, str]:
    """What is exported for so many data parallel devices, in nodes of eight."""
    plain = Description(layers=(80,), data=data, zero=2, full=(80,), selective=(0,), sequence_length=8192)
    losses = TARGETS[engine].nearest(plain)
    return folder_files(TARGETS[engine], job_of(losses[-1].description if losses else plain, "llama70b"))


def written(files: dict[str, str], at: Path) -> Path:
    at.mkdir()
    for name, text in files.items():
        (at / name).write_text(text)
    return at


def stubs(at: Path) -> dict[str, str]:
    """An environment in which launchers and Slurm only say how they were called."""
    at.mkdir()
    scripts = {
        **dict.fromkeys(("torchrun", "accelerate"), 'echo "$0 $@"'),
        "scontrol": "for node in node-{a..z}{0..999}; do echo $node; done",
        "srun": 'shift\nfor SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, text in scripts.items():
        (at / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (at / name).chmod(0o755)
    launcher = at / "scripts"
    launcher.mkdir()
    (launcher / "msrun_launcher.sh").write_text('eval echo msrun "$@"\n')
    asked = dict.fromkeys(("TRAIN", "MODEL", "FLAVOR", "HF_ASSETS", "MEGATRON"), "somewhere")
    return {"PATH": f"{at}:/usr/bin:/bin", "MINDFORMERS": str(at), **asked}


def started(command: list[str], environment: dict[str, str], at: Path) -> list[str]:
    done = subprocess.run(command, env=environment, cwd=at, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("engine", "resource", "asked"),
    [
        ("torchtitan", "amd.com/gpu", "--gpus-per-node=8"),
        ("torchtitan", "huawei.com/Ascend910", "--gres=npu:8"),
        ("mindspeed", "huawei.com/Ascend910", "--gres=npu:8"),
    ],
)
def test_devices_are_asked_for_by_the_name_of_their_maker(engine: str, resource: str, asked: str) -> None:
    plain = Description(layers=(80,), data=16, zero=2, full=(80,), selective=(0,), sequence_length=8192)
    losses = TARGETS[engine].nearest(plain)
    job = job_of(losses[-1].description if losses else plain, "llama70b")
    files = folder_files(TARGETS[engine], replace(job, resource=resource if engine == "torchtitan" else job.resource))
    assert f"#SBATCH {asked}\n" in files["slurm.sbatch"]
    for name in ("jobset.yaml", "pytorchjob.yaml"):
        assert f"{resource}: 8" in files[name]
        assert "nvidia" not in files[name]


@pytest.mark.cases(3)
@pytest.mark.parametrize("engine", TARGETS)
def test_slurm_starts_every_node_with_its_rank_and_the_first_address(engine: str, tmp_path: Path) -> None:
    run, environment = written(folder(engine, 16), tmp_path / "run"), stubs(tmp_path / "bin")
    script = (run / "slurm.sbatch").read_text()
    assert "#SBATCH --nodes=2\n" in script
    environment |= {"SLURM_SUBMIT_DIR": str(run), "SLURM_JOB_NODELIST": "node-[a-b]"}
    lines = started(["bash", str(run / "slurm.sbatch"), "--more", "a b"], environment, tmp_path)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert "node-a0" in line
        assert "--more a b" in line
        assert re.search(rf"(--node-rank|--machine_rank) {rank}\b| 8118 {rank} output", line), line


@pytest.mark.parametrize(("model", "clip", "words"), [
    ("llama70b", 1.0, ()),
    ("llama70b", None, ("clipping of gradients",)),
    ("mixtral-8x7b", None, ("clipping of gradients", "the balance loss of experts")),
])  # fmt: skip
def test_what_a_plan_does_without_is_said(model: str, clip: float | None, words: tuple[str, ...]) -> None:
    update = replace(PLAIN, clip_norm=clip)
    none, layers = (0,), (80 if model == "llama70b" else 32,)
    plain = Description(layers=layers, data=8, zero=1, full=none, selective=none, sequence_length=8192, update=update)
    job = job_of(replace(plain, expert=8 if "mixtral" in model else None), model)
    assert len(switched_off(job)) == len(words)
    text = folder_files(TARGETS["megatron"], job)["README.md"]
    assert [word for word in ("clipping of gradients", "the balance loss of experts") if word in text] == list(words)


@pytest.mark.parametrize("engine", TARGETS)
def test_one_node_needs_neither_rank_nor_address(engine: str, tmp_path: Path) -> None:
    files = folder(engine, 8)
    run, environment = written(files, tmp_path / "run"), stubs(tmp_path / "bin")
    (line,) = started(["bash", str(run / "launch.sh")], environment, tmp_path)
    assert "rank" not in line
    assert "MASTER_ADDR" not in files["README.md"]
    (job,) = yaml.safe_load(files["pytorchjob.yaml"])["spec"]["pytorchReplicaSpecs"].values()
    assert job["replicas"] == 1


def pods(content: Any) -> list[tuple[int, dict[str, Any]]]:
    """Pods of a manifest, each with how many there are."""
    if content["kind"] == "PyTorchJob":
        return [(one["replicas"], one["template"]["spec"]) for one in content["spec"]["pytorchReplicaSpecs"].values()]
    (job,) = content["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    return [(spec["completions"], spec["template"]["spec"])]


@pytest.mark.parametrize("kind", ["pytorchjob.yaml", "jobset.yaml"])
@pytest.mark.parametrize("engine", TARGETS)
def test_kubernetes_starts_one_pod_for_each_node(engine: str, kind: str, tmp_path: Path) -> None:
    files = folder(engine, 16)
    content = yaml.safe_load(files[kind])
    found = pods(content)
    assert sum(count for count, _ in found) == 2
    run, environment = written(files, tmp_path / "run"), stubs(tmp_path / "bin")
    name = content["metadata"]["name"]
    for _, pod in found:
        (container,) = pod["containers"]
        assert list(container["resources"]["limits"].values()) == [8]
        assert pod["volumes"][0]["configMap"]["name"] == name
        assert f"create configmap {name} --from-file=." in files["README.md"]
        known = {row["name"]: row["value"] for row in container["env"]} if "env" in container else {}
        known |= {"RANK": "1", "JOB_COMPLETION_INDEX": "1"}
        known.setdefault("MASTER_ADDR", "given")
        command = [word.replace("/plan/", f"{run}/") for word in container["command"]]
        (line,) = started(command, {**known, **environment}, tmp_path)
        assert known["MASTER_ADDR"] in line
        assert re.search(r"(--node-rank|--machine_rank) 1\b| 8118 1 output", line), line


@pytest.mark.parametrize("engine", TARGETS)
def test_everything_to_fill_in_is_in_the_readme_and_in_the_manifests(engine: str) -> None:
    files = folder(engine, 16)
    asked = set(re.findall(r"\$\{(\w+):\?", files["launch.sh"])) - {"NODE_RANK", "MASTER_ADDR"}
    for variable in asked:
        assert f"`{variable}`" in files["README.md"]
        assert f"name: {variable}\n" in files["jobset.yaml"]
    assert 10 <= len(files["README.md"].splitlines()) <= 20


@pytest.mark.parametrize("data", [8, 16])
def test_msrun_is_waited_for(data: int, tmp_path: Path) -> None:
    """Without `join` it ends as soon as its processes run, and Slurm and Kubernetes then end these (MindSpore, msrun
    Launching). Six words start one node, nine several (MindFormers, scripts/msrun_launcher.sh)."""
    run, environment = written(folder("mindformers", data), tmp_path / "run"), stubs(tmp_path / "bin")
    (tmp_path / "bin/scripts/msrun_launcher.sh").write_text('printf "%s\\n" "$@"\n')
    words = started(
        ["bash", str(run / "launch.sh")], {**environment, "NODE_RANK": "1", "MASTER_ADDR": "first"}, tmp_path
    )[1:]
    nodes = ["8", "first", "8118", "1"] if data > 8 else ["8118"]
    assert words == [str(data), *nodes, "output/msrun_log", "True", "300"]


@pytest.mark.parametrize("model", [*HOSTILE, "x" * 100, "llama-tiny+num_layers=2", "", "é", "-"], ids=ascii)
def test_names_of_objects_are_those_that_kubernetes_takes(model: str) -> None:
    assert re.fullmatch(r"plan(-[a-z0-9]+)*", object_name(model))
    assert len(object_name(model)) <= 40


def test_words_behind_the_script_of_mindformers_stay_words(tmp_path: Path) -> None:
    """The launcher of MindFormers evaluates its first argument."""
    description = Description(layers=(80,), data=8, zero=1, full=(0,), selective=(0,), sequence_length=8192)
    folder, theirs = tmp_path / "a run", tmp_path / "theirs" / "scripts"
    folder.mkdir()
    theirs.mkdir(parents=True)
    (folder / "launch.sh").write_text(TARGETS["mindformers"].write(job_of(description, "llama70b"))["launch.sh"])
    (theirs / "msrun_launcher.sh").write_text("eval printf '%s\\\\n' $1\n")
    for given in ([], ["--train_dataset_dir", "my data", 'a"b']):
        done = subprocess.run(
            ["bash", str(folder / "launch.sh"), *given], capture_output=True, text=True, check=True,
            env={"PATH": os.environ["PATH"], "MINDFORMERS": str(theirs.parent)},
        )  # fmt: skip
        words = ["--config", f"{folder}/train.yaml", "--use_parallel", "True", "--run_mode", "train", *given]
        assert done.stdout.splitlines() == ["run_mindformer.py", *words]
