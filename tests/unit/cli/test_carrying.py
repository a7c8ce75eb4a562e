"""`plan export` and `plan import`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.api.exported_folders import Record, exported_as
from planner.cli.commands.export import better
from planner.plan.file import load_plan

pytestmark = pytest.mark.usefixtures("searched_once")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TINY = ("--model", "llama-tiny", "--hardware", "cpu")
MEGATRON = """
TP=2  # devices
ARGS=(
    --tensor-model-parallel-size $TP --num-layers 4 --hidden-size 256
    --micro-batch-size 2 --global-batch-size 16 --use-distributed-optimizer --seq-length 128 --log-interval 10)
torchrun --nproc-per-node 4 pretrain_gpt.py ${ARGS[@]}
"""


@pytest.fixture
def imported(plan: Any, here: Path) -> str:
    """A plan that was read from a script of Megatron-LM."""
    (here / "run.sh").write_text(MEGATRON)
    content = plan.json("import", "run.sh", "--from", "megatron", *TINY, "-o", "plan.json")
    assert (content["degrees"]["tensor"], content["degrees"]["data"], content["micro_batches"]) == (2, 2, 4)
    assert content["optimizer_sharding"].startswith("1")
    assert (content["notes"], content["unread"]) == ([], ["--log-interval"])
    return "plan.json"


@pytest.mark.thorough
def test_what_is_imported_is_exported_again(plan: Any, here: Path, imported: str) -> None:
    content = plan.json("export", imported, "--to", "megatron", "-o", "run")
    assert content["given_up"] == []
    assert content["step_seconds"] == content["plan_step_seconds"]
    assert sorted(path.name for path in (here / "run").iterdir()) == [
        "README.md", "export.json", "jobset.yaml", "launch.sh", "pytorchjob.yaml", "slurm.sbatch",
    ]  # fmt: skip
    plan.json("import", "run", "--from", "megatron", *TINY, "-o", "again.json")
    assert (here / "again.json").read_text() == (here / imported).read_text()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_plan_that_lies_outside_is_searched_again_or_written_as_the_nearest(
    plan: Any, here: Path, imported: str
) -> None:
    content = plan.json("export", imported, "--to", "torchtitan", "-o", "best", "--tolerance", "0%")
    assert (content["searched"], content["software"], content["given_up"]) == (True, "fsdp", [])
    again = plan.json("import", "best", "--from", "torchtitan", *TINY, "--devices", "4", "--software", "fsdp")
    assert again["step_seconds"] == content["step_seconds"]
    content = plan.json("export", imported, "--to", "torchtitan", "-o", "run", "--nearest")
    assert not content["searched"]
    assert [step["what"] for step in content["given_up"]][-1].startswith(("ZeRO", "norms"))
    assert json.loads((here / "run" / "export.json").read_text())["given_up"] == content["given_up"]
    close = plan.json("export", imported, "--to", "torchtitan", "-o", "close", "--tolerance", "100%")
    assert close["given_up"] == content["given_up"]


@pytest.mark.slow
@pytest.mark.thorough
def test_what_does_not_fit_is_never_written(plan: Any, here: Path) -> None:
    (here / "run.sh").write_text("torchrun --nproc-per-node 1 pretrain_gpt.py --bf16 --micro-batch-size 1")
    content = plan.json("import", "run.sh", "--from", "megatron", "--model", "llama8b", "-o", "large.json")
    assert not content["fits"]
    outcome = plan("export", "large.json", "--to", "megatron", "-o", "run", "--nearest")
    assert outcome.code == 3
    assert "nothing was written" in outcome.err
    assert not (here / "run").exists()


@pytest.mark.thorough
def test_a_file_to_write_onto_is_named_alone_if_it_cannot_be_read(plan: Any, imported: str) -> None:
    """Before anything else is done, and not as an error of the plan."""
    message = plan.refused("export", imported, "--to", "megatron", "-o", "run", "--onto", "nothing.sh")
    assert message.startswith("plan: nothing.sh: cannot be read")


def test_only_an_export_is_replaced(plan: Any, here: Path, imported: str) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "work.txt").write_text("hours of it")
    message = plan.refused("export", imported, "--to", "megatron", "-o", "mine")
    assert "-o mine: holds 'work.txt', which plan export did not write; name another folder, or remove it" in message
    for _ in range(2):
        assert plan("export", imported, "--to", "megatron", "-o", "run").code == 0
    assert sorted(path.name for path in here.iterdir()) == ["mine", "plan.json", "run", "run.sh"]


def test_people_are_told_what_was_given_up(plan: Any, imported: str) -> None:
    outcome = plan("export", imported, "--to", "torchtitan", "-o", "run", "--nearest")
    assert outcome.code == 0
    assert "Given up" in outcome.out
    assert (
        "Written to run: README.md, export.json, jobset.yaml, launch.sh, launch_registry.sh, plan_config.py,"
        " pytorchjob.yaml, slurm.sbatch, train.toml" in outcome.out
    )
    assert "Set FLAVOR: your flavor of it; without one torchtitan trains its debug model" in outcome.out


def test_an_exported_folder_says_its_engine_and_its_model(plan: Any, here: Path, imported: str) -> None:
    """Its export.json does; without that the engine shows in its settings, beside the launch.sh of any engine."""
    plan.json("export", imported, "--to", "torchtitan", "-o", "run", "--nearest")
    content = plan.json("import", "run", "--hardware", "cpu")
    assert (content["model"], content["devices"]) == ("llama-tiny", 4)
    (here / "run" / "export.json").unlink()
    assert plan.json("import", "run", *TINY)["step_seconds"] == content["step_seconds"]
    assert "does not say which model it trains; name it with --model" in plan.refused("import", "run")


@pytest.mark.parametrize("model", ["package.module:factory", "own/config.json", 8, None])
def test_a_model_of_export_json_counts_if_the_zoo_has_it(here: Path, model: object) -> None:
    (here / "export.json").write_text(json.dumps({"engine": "nemo", "model": model}))
    assert exported_as(here) == Record(engine="nemo")
    (here / "export.json").write_text("{")
    assert exported_as(here) == exported_as(here / "export.json") == Record()


def test_a_slow_nearest_plan_points_to_the_search() -> None:
    plan = SimpleNamespace(prediction=SimpleNamespace(step_seconds=1.0))
    for seconds, told in ((1.04, ""), (1.2, "; without --nearest the best plan that it can run is searched for")):
        found: Any = SimpleNamespace(plan=plan, prediction=SimpleNamespace(step_seconds=seconds))
        assert better(found) == told


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (MEGATRON, ("--from", "megatrn"), "unknown engine 'megatrn'; did you mean megatron?"),
        (MEGATRON.replace("256", "512"), ("--from", "megatron"), "--hidden-size 512: the model that --model names has"),
        (MEGATRON.replace("nproc-per-node 4", "nproc-per-node 3"), ("--from", "megatron"), "do not divide 3 devices"),
        (MEGATRON.replace("$TP", "$UNKNOWN"), ("--from", "megatron"), "a variable that the file does not set"),
        ("--micro-batch-size 1", ("--from", "megatron"), "give --devices"),
        ("--micro-batch-size one", ("--from", "megatron", "--devices", "4"), "not a whole number"),
        ("[parallelism", ("--from", "torchtitan"), "not a TOML file"),
        ("[parallelism]\ntensor_parallel_degree = 'two'", ("--from", "torchtitan"), "is not a whole number"),
    ],
)  # fmt: skip
def test_settings_that_make_no_plan_are_refused(
    plan: Any, here: Path, text: str, arguments: tuple[str, ...], message: str
) -> None:
    (here / "settings").write_text(text)
    assert message in plan.refused("import", "settings", *TINY, *arguments)


def test_a_file_of_torchtitan_is_read(plan: Any, here: Path) -> None:
    (here / "train.toml").write_text(
        "[training]\nlocal_batch_size = 2\nseq_len = 128\n[parallelism]\ntensor_parallel_degree = 2\n"
        '[activation_checkpoint]\nmode = "full"\n'
    )
    content = plan.json("import", "train.toml", "--from", "torchtitan", *TINY, "--devices", "4", "-o", "plan.json")
    assert content["degrees"] == {"data": 2, "tensor": 2, "context": 1, "expert": 1, "pipeline": 1, "replicated": 1}
    assert (content["optimizer_sharding"][0], content["recomputation"]) == ("3", "full")
    assert load_plan(here / "plan.json").training.global_batch == 4


def test_a_file_of_strategies_comes_back_as_it_was_written(plan: Any, here: Path, imported: str) -> None:
    plan.json("export", imported, "--to", "mindspore", "-o", "theirs")
    content = plan.json("import", "theirs", "--from", "mindspore", *TINY, "-o", "again.json")
    assert (content["notes"], content["plan_file"]) == ([], "again.json")
    plan.json("export", "again.json", "--to", "mindspore", "-o", "again")
    for name in ("strategy.json", "export.json", "README.md"):
        assert (here / "again" / name).read_text() == (here / "theirs" / name).read_text()
    (here / "theirs" / "export.json").unlink()
    content = plan.json("import", "theirs", "--from", "mindspore", *TINY, "--global-batch", "8", "--micro-batches", "2")
    assert "a global batch of 8 samples (--global-batch), micro-batches: 2" in content["notes"][-1]


def test_strategies_do_not_carry_offload_and_say_so(plan: Any, here: Path) -> None:
    plan.json("estimate", *TINY, "--devices", "2", "--offload", "optimizer,weights", "-o", "offloading.json")
    assert "cannot say what the plan offloads (optimizer, weights)" in plan(
        "export", "offloading.json", "--to", "mindspore", "-o", "theirs"
    ).out.replace("\n", " ")
    plan.json("import", "theirs", "--from", "mindspore", *TINY, "-o", "again.json")
    assert "offload" not in plan("show", "again.json").out
    assert "offloads" not in plan("export", "again.json", "--to", "mindspore", "-o", "again").out


def test_a_batch_that_settings_say_is_not_said_twice(plan: Any, here: Path) -> None:
    (here / "settings").write_text(MEGATRON)
    message = plan.refused("import", "settings", "--from", "megatron", *TINY, "--global-batch", "8")
    assert "--global-batch, --micro-batches: these settings say how many; leave them out" in message


@pytest.mark.thorough
def test_a_config_is_exported_with_its_dimensions_while_it_is_the_same(plan: Any, here: Path) -> None:
    content = json.loads((CONFIGS / "llama" / "config.json").read_text())
    (here / "own").mkdir()
    (here / "own" / "config.json").write_text(json.dumps(content))
    fixed = ("--seq-len", "8", "--devices", "2", "--data", "2", "--zero", "1", "--global-batch", "4")
    plan.json("--model", "own/config.json", "--hardware", "cpu", *fixed, "-o", "plan.json")
    for layers, told in ((3, True), (2, False)):
        (here / "own" / "config.json").write_text(json.dumps({**content, "num_hidden_layers": layers}))
        plan.json("export", "plan.json", "--to", "megatron", "-o", f"run{layers}", "--nearest")
        script = (here / f"run{layers}" / "launch.sh").read_text()
        assert ("--num-layers 3" in script, "--ffn-hidden-size 64" in script) == (told, told)
