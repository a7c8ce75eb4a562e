"""Recipes that people wrote, and what is no recipe."""

import pytest

from planner.export.description import Description, ExportError
from planner.export.files.recipes import recipe_in
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from tests.refusals import refused
from tests.unit.export.descriptions import architecture, job_of

NEMO = TARGETS["nemo"]
FACTS = Facts(layers=80, devices=64, architecture=architecture("llama70b"))

THEIRS = """
import nemo_run as run
from nemo.collections import llm

def configure():
    return llm.llama3_70b.pretrain_recipe(name="mine", num_nodes=8)

recipe = configure()
recipe.trainer.strategy.tensor_model_parallel_size = 8
recipe.trainer.strategy.pipeline_model_parallel_size = 4
recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 5
recipe.trainer.strategy.sequence_parallel = True
recipe.trainer.strategy.ddp.use_distributed_optimizer = True
recipe.trainer.strategy.context_parallel_size = 2
recipe.trainer.callbacks = [run.Config(object)]
recipe.trainer.val_check_interval = 100
recipe.data.micro_batch_size = 1
recipe.data.global_batch_size = 128
recipe.model.config.recompute_granularity = "full"
recipe.model.config.recompute_method = "block"
recipe.model.config.recompute_num_layers = 2
"""


def test_what_people_assign_is_read() -> None:
    reading = NEMO.read(THEIRS, FACTS)
    d = reading.description
    assert (d.tensor, d.pipeline, d.virtual_stages, d.ring, d.data, d.zero) == (8, 4, 5, 2, 1, 1)
    assert (d.layers, d.full, d.sequence_parallel, d.micro_batches) == ((4,) * 20, (2,) * 20, True, 128)
    assert (d.precision, d.update.gradient_dtype) == ("bf16", "mixed")
    assert "trainer.val_check_interval" in reading.unread


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("recipe.trainer = (", ("Python", "line 1")),
        ("x = 3", ("recipe.trainer.strategy",)),
        ("recipe.model.config.num_layers = 40", ("--num-layers 40", "--model", 80)),
        ("recipe.trainer.plugins = run.Config(X, precision='8')", ("precision 8", "bf16-mixed")),
        ("recipe.optim.config.optimizer = 'muon'", ("--optimizer muon", "adam")),
    ],
)
def test_what_is_no_recipe_of_the_model(text: str, facts: tuple[object, ...]) -> None:
    with refused(ExportError, *facts):
        NEMO.read(text, FACTS)


def test_both_ways_to_split_a_context_become_one() -> None:
    d = Description(layers=(80,), ring=2, heads=2, zigzag=True, full=(0,), selective=(0,), sequence_length=8192)
    (loss, *_) = NEMO.nearest(d)
    assert (loss.what, loss.there) == ("context parallelism", "ring of 4")
    assert (
        "cp_comm_type = 'a2a'"
        in NEMO.write(job_of(Description(layers=(80,), heads=4, full=(0,), selective=(0,)), "llama70b"))["recipe.py"]
    )


@pytest.mark.parametrize(
    "text",
    [
        "a = [1]\nb = [1]\n" + "a = [a, a]\nb = [b, b]\n" * 60 + "c = a == b\n",  # 2^60 parts
        "a = [1]\n" + "a = [a, a]\n" * 60 + "c = 2 in a\n",
        "x = 1.5 * " + "9" * 400 + "\n",
        "a = {" + ",".join(f"{i}: {i}" for i in range(500)) + "}\n" + "b = [a, a]\n" * 500,
    ],
    ids=["equal", "in", "overflow", "written"],
)
def test_values_of_a_recipe_end_soon(text: str) -> None:
    found = recipe_in(text + "recipe.trainer.num_nodes = 2\n")
    assert found.settings["trainer.num_nodes"] == 2


RECIPE = (
    "recipe = llm.llama3_8b.pretrain_recipe(num_nodes=1, num_gpus_per_node=8)\n"
    "recipe.data.micro_batch_size = 1\nrecipe.data.global_batch_size = 16\nrecipe.trainer.devices = 8\n"
)
TENSOR = "recipe.trainer.strategy.tensor_model_parallel_size"


def read_recipe(added: str) -> Reading:
    return TARGETS["nemo"].read(RECIPE + added, Facts(layers=32, devices=None, architecture=None))


@pytest.mark.parametrize("added", [
    f"{TENSOR} = recipe.trainer.strategy.expert_tensor_parallel_size = 4\n", f"tp, pp = 4, 2\n{TENSOR} = tp\n",
    f"tp = 2\ntp *= 2\n{TENSOR} = tp\n", 'setattr(recipe.trainer.strategy, "tensor_model_parallel_size", 4)\n',
    f'if __name__ == "__main__":\n    {TENSOR} = 4\n    run.run(recipe)\n',
])  # fmt: skip
def test_every_way_to_assign_a_number_is_followed(added: str) -> None:
    reading = read_recipe(added)
    assert reading.description.tensor == 4
    assert not [note for note in reading.notes if note.startswith("line ")]


@pytest.mark.parametrize("value", ['int(os.environ["TP"])', "TP", "args.tp"])
def test_degrees_that_are_not_known_are_refused(value: str) -> None:
    """They were read as 1."""
    with refused(ExportError, "trainer.strategy.tensor_model_parallel_size", "write the number"):
        read_recipe(f"{TENSOR} = {value}\n")


@pytest.mark.parametrize("added", [
    f'if os.environ.get("X"):\n    {TENSOR} = 4\n', f"for n in (4,):\n    {TENSOR} = n\n",
])  # fmt: skip
def test_statements_that_are_not_followed_are_noted(added: str) -> None:
    reading = read_recipe(added)
    assert reading.description.tensor == 1
    assert [note for note in reading.notes if note.startswith("line 5 of the recipe")]


def test_conditions_that_are_not_known_are_noted() -> None:
    text = (
        "def pretrain_recipe(tp=4):\n    cfg = base()\n    cfg.train.global_batch_size = 16\n    if {}:\n"
        "        cfg.model.tensor_model_parallel_size = tp\n    return cfg\n"
    )
    facts = Facts(layers=32, devices=8, architecture=None)
    for condition, noted in (("tp == 4", False), ("is_large()", True), ("HOPPER", True)):
        reading = TARGETS["nemo"].read(text.format(condition), facts)
        assert bool([note for note in reading.notes if f"{condition} is not known" in note]) == noted


def test_other_settings_that_are_not_known_are_noted() -> None:
    reading = read_recipe("recipe.trainer.strategy.ddp.overlap_grad_reduce = OVERLAP\n")
    assert [note for note in reading.notes if "overlap_grad_reduce = OVERLAP: not known" in note]


def test_degrees_of_torchtitan_that_are_not_known_are_refused() -> None:
    text = "def llama3_8b():\n    config = Trainer.Config()\n    config.parallelism.tensor_parallel_degree = TP\n"
    with refused(ExportError, "parallelism.tensor_parallel_degree", "TP", "write the number"):
        TARGETS["torchtitan"].read(f"{text}    return config\n", Facts(layers=32, devices=8, architecture=None))


YAML = (
    "trainer:\n  devices: 8\n  num_nodes: 1\n  precision: bf16\n"
    "model:\n  micro_batch_size: 1\n  global_batch_size: 16\n"
)


def read_yaml(added: str) -> Description:
    return TARGETS["nemo"].read(YAML + added, Facts(layers=32, devices=None, architecture=None)).description


@pytest.mark.parametrize(("added", "clip"), [
    ("", None), ("  gradient_clip_val: 0\n", None), ("  gradient_clip_val: 0.5\n", 0.5),
])  # fmt: skip
def test_nemo_1_clips_where_it_is_told(added: str, clip: float | None) -> None:
    text = YAML.replace("model:\n", f"{added}model:\n")
    found = TARGETS["nemo"].read(text, Facts(layers=32, devices=None, architecture=None)).description
    assert found.update.clip_norm == clip


@pytest.mark.parametrize(("name", "zero"), [
    ("fused_adam", 0), ("distributed_fused_adam", 1), ("mcore_distributed_optim", 1), ("adamw", 0),
])  # fmt: skip
def test_optimizers_of_nemo_1_are_read(name: str, zero: int) -> None:
    found = read_yaml(f"  optim:\n    name: {name}\n")
    assert (found.optimizer, found.zero) == ("adamw", zero)
    assert read_yaml("  optim:\n    name: sgd\n").optimizer == "sgd"
    with refused(ExportError, "adafactor"):
        read_yaml("  optim:\n    name: adafactor\n")


def test_fsdp_of_nemo_1_is_read() -> None:
    """NeMo 1.23, examples/nlp/language_modeling/conf/megatron_gpt_config.yaml; it was passed over."""
    assert [read_yaml(f"  fsdp: {on}\n").zero for on in ("false", "true")] == [0, 3]
    assert read_yaml("  fsdp: true\n  fsdp_sharding_strategy: grad\n").zero == 2
    with refused(ExportError, "model.fsdp_sharding_strategy", "hybrid"):
        read_yaml("  fsdp: true\n  fsdp_sharding_strategy: hybrid\n")
    added = 'recipe.trainer.strategy.fsdp = "pytorch"\n'
    assert read_recipe(added).description.zero == 3


@pytest.mark.parametrize(("added", "said"), [
    ("", True), ("  megatron_amp_O2: false\n", True), ("  megatron_amp_O2: true\n", False), ("  fsdp: true\n", False),
])  # fmt: skip
def test_weights_that_autocast_rounds_are_said_to_have_no_price(added: str, said: bool) -> None:
    """NeMo 1.23 (megatron_gpt_model.py): without megatron_amp_O2, the default, the module is no Float16Module."""
    for precision in ("bf16", "32"):
        text = YAML.replace("bf16", precision) + added
        found = TARGETS["nemo"].read(text, Facts(layers=32, devices=None, architecture=None))
        assert any("megatron_amp_O2" in line for line in found.unmodelled) == (said and precision == "bf16")
        assert not any("megatron_amp_O2" in path for path in found.unread)


def test_degrees_of_nemo_1_that_other_keys_say_are_refused() -> None:
    with refused(ExportError, "model.tensor_model_parallel_size", "write the number"):
        read_yaml("  tensor_model_parallel_size: ${oc.env:TP}\n")


@pytest.mark.parametrize(
    "text", ["trainer: 5\nmodel:\n  - a\n", "trainer:\n  devices: 8\nmodel:\n  sample_rate: 16000\n"]
)
def test_other_models_of_nemo_1_are_refused(text: str) -> None:
    """Its models of speech have the same sections; they were read as language models with degrees of 1."""
    with refused(ExportError, "model.micro_batch_size"):
        TARGETS["nemo"].read(text, Facts(layers=32, devices=8, architecture=None))
