"""DeepSeek with engines that are told of latent attention: what is written is known there, and is read back."""

import ast
import re
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest

from planner.export.architecture import Architecture, architecture_of
from planner.export.description import Description, ExportError
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from planner.models.deepseek import DeepseekConfig
from tests.refusals import refused
from tests.unit.export.descriptions import recorded
from tests.unit.export.test_targets import arguments_in, parser_of

STAGES = (1, *(2,) * 29, 1, 1)
PIPED = Description(
    layers=STAGES, data=8, tensor=2, sequence_parallel=True, expert=16, whole_experts=True, zero=1, micro_batches=64,
    full=(0,) * 32, selective=(0,) * 32, sequence_length=4096,
)  # fmt: skip
LITE = replace(PIPED, layers=(27,), full=(27,), selective=(0,))
BY_PROGRAMS = ("accelerate", "deepspeed")  # whose programs build the model: they are told no dimension
LATENT = [
    engine
    for engine, target in TARGETS.items()
    if target.latent and not target.writes_model and engine not in BY_PROGRAMS
]


def architecture(model: str) -> Architecture:
    found = architecture_of(model, None, latent=True)
    assert found is not None
    return found


def written(engine: str, model: str, description: Description) -> tuple[Description, Mapping[str, str]]:
    losses = TARGETS[engine].nearest(description)
    nearest = losses[-1].description if losses else description
    job = Job(model=model, description=nearest, architecture=architecture(model), per_node=8)
    return nearest, TARGETS[engine].write(job)


@pytest.mark.parametrize("engine", LATENT)
@pytest.mark.parametrize(("model", "description"), [("deepseek-v3", PIPED), ("deepseek-v2-lite", LITE)])
def test_it_is_read_back(engine: str, model: str, description: Description) -> None:
    nearest, files = written(engine, model, description)
    target = TARGETS[engine]
    facts = Facts(
        layers=sum(nearest.layers), devices=nearest.devices, architecture=architecture(model), model=model,
        beside=files.get(target.beside or "", ""),
    )  # fmt: skip
    reading = target.read(files[target.main], facts)
    assert reading.description == nearest
    assert reading.unread == ()
    assert reading.unmodelled == ()
    other = replace(facts, architecture=architecture("deepseek-v2-lite" if model == "deepseek-v3" else "deepseek-v3"))
    with refused(ExportError, "--model"):
        target.read(files[target.main], other)


@pytest.mark.parametrize("version", ["0.16", "0.19", "0.20"])
@pytest.mark.parametrize(("model", "description"), [("deepseek-v3", PIPED), ("deepseek-v2-lite", LITE)])
def test_megatron_knows_every_argument(model: str, description: Description, version: str) -> None:
    _, files = written("megatron", model, description)
    parsed = parser_of("megatron", version).parse_args(arguments_in(files["launch.sh"]))
    a = architecture(model)
    assert a.latent is not None
    assert (parsed.num_layers, parsed.kv_lora_rank, parsed.q_lora_rank or 0) == (a.layers, 512, a.latent.q_rank)
    assert parsed.multi_latent_attention
    assert parsed.moe_router_score_function == ("sigmoid" if model == "deepseek-v3" else "softmax")


@pytest.mark.parametrize("engine", ["nemo", "megatron-bridge"])
@pytest.mark.parametrize(("model", "description"), [("deepseek-v3", PIPED), ("deepseek-v2-lite", LITE)])
def test_recipes_know_every_path(engine: str, model: str, description: Description) -> None:
    _, files = written(engine, model, description)
    known = {key for keys in recorded(engine)["sections"].values() for key in keys}
    known |= {*recorded(engine)["latent"]["keys"]}
    assigned = re.findall(r"^(?:recipe|cfg)\.\S+\.(\w+) = ", files["recipe.py"], re.MULTILINE)
    assert "q_lora_rank" in assigned
    assert {*assigned} <= known
    ast.parse(files["recipe.py"])


def test_recipes_have_a_list_of_layers_with_experts() -> None:
    """Megatron-LM evaluates its argument; the configuration takes a list."""
    for engine in ("nemo", "megatron-bridge"):
        _, files = written(engine, "deepseek-v3", PIPED)
        assert f"moe_layer_freq = {[0] * 3 + [1] * 58}\n" in files["recipe.py"]


def test_attention_of_nemo_is_scaled_as_without_yarn() -> None:
    """Its DeepSeek recipes have rotary_scaling_factor 40 and mscale_all_dim 1, which scale attention by 1.87 with any
    rope_type (core 0.14, transformer/multi_latent_attention.py: softmax_scale); Megatron-LM's defaults are 1 and 0."""
    for model, description in (("deepseek-v3", PIPED), ("deepseek-v2-lite", LITE)):
        text = written("nemo", model, description)[1]["recipe.py"]
        for setting in ("rope_type = 'rope'", "rotary_scaling_factor = 1.0", "mscale = 1.0", "mscale_all_dim = 0.0"):
            assert f"recipe.model.config.{setting}\n" in text


def test_modules_that_predict_further_tokens_are_told() -> None:
    """Where stages are uneven they stand in the layout, before the loss."""
    model = "deepseek-v3+predicted_tokens=1"
    _, files = written("megatron", model, PIPED)
    arguments = parser_of("megatron", "0.20").parse_args(arguments_in(files["launch.sh"]))
    assert (arguments.mtp_num_layers, arguments.mtp_loss_scaling_factor) == (1, 0.3)
    assert arguments.pipeline_model_parallel_layout.endswith("|t*1mL")
    untold = Job(model="deepseek-tiny+predicted_tokens=1", description=PIPED, architecture=None, per_node=8)
    assert "|t*1mL" in TARGETS["megatron"].write(untold)["launch.sh"], "its routers are told to no engine"
    for engine in ("megatron", "nemo", "megatron-bridge"):
        nearest, files = written(engine, model, PIPED)
        target = TARGETS[engine]
        facts = Facts(
            layers=61, devices=nearest.devices, architecture=architecture(model), model=model,
            beside=files.get(target.beside or "", ""),
        )  # fmt: skip
        reading = target.read(files[target.main], facts)
        assert reading.description == nearest
        assert reading.unmodelled == ()
        with refused(ExportError, "--model", 2):
            other = replace(facts, architecture=replace(architecture(model), predicted=2))
            target.read(files[target.main], other)
    assert "mtp_num_layers = 1" in written("nemo", model, PIPED)[1]["recipe.py"]
    assert "mtp_num_layers = None" in written("nemo", "deepseek-v3", PIPED)[1]["recipe.py"]
    assert TARGETS["torch"].architecture_of(model, None) is None


def test_weights_that_no_device_holds_whole_are_made_on_the_meta_device() -> None:
    sharded = replace(LITE, zero=3, tensor=1, sequence_parallel=False, whole_experts=False)
    for engine in ("megatron", "nemo", "megatron-bridge"):
        for zero, there in ((3, True), (2, False), (1, False)):
            _, files = written(engine, "deepseek-v2-lite", replace(sharded, zero=zero))
            text = "\n".join(files.values())
            assert ("init-model-with-meta-device" in text or "init_model_with_meta_device = True" in text) == there


def test_torchtitan_has_a_flavor_without_contexts() -> None:
    _, files = written("torchtitan", "deepseek-v3", PIPED)
    assert 'flavor = "671B"' in files["train.toml"]
    assert "deepseek_v3_671b()" in files["plan_config.py"]
    ring = replace(PIPED, ring=2, zigzag=True)
    with refused(ExportError, "deepseek-v3", "--context 1"):
        written("torchtitan", "deepseek-v3", ring)


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite", "deepseek-v2"])
def test_the_script_has_attention_and_routers_of_its_own(model: str) -> None:
    """`tests/distributed/test_torch_script.py` runs such scripts."""
    target, alone = TARGETS["torch"], replace(PIPED, data=32, tensor=1, sequence_parallel=False, whole_experts=False)
    alone = replace(
        alone, layers=(1, 58, 1) if model == "deepseek-v2" else (1, 25, 1), full=(0,) * 3, selective=(0,) * 3
    )
    alone = replace(alone, layers=(3, 57, 1)) if model == "deepseek-v3" else alone
    a = target.architecture_of(model, None)
    assert a is not None
    files = target.write(Job(model=model, description=alone, architecture=a, per_node=8))
    facts = Facts(layers=a.layers, devices=96, architecture=a, model=model)
    assert target.read(files["train.py"], facts).description == alone
    told = {line.partition(" = ")[0] for line in files["model.py"].splitlines()}
    assert told >= {"KEY_RANK", "QUERY_RANK", "PLAIN", "GROUPS", "GROUPS_BY", "BALANCE_LOSS", "BIAS_SPEED"}
    assert "balance_of(stages, mesh)" in files["train.py"]
    assert ("self.q_a_proj" in files["model.py"]) == (model != "deepseek-v2-lite")
    assert ".sigmoid()" in files["model.py"] if model == "deepseek-v3" else "F.softmax(logits" in files["model.py"]
    for file in ("train.py", "model.py"):
        compile(files[file], file, "exec")


def test_the_script_cuts_no_latent_attention_and_foretells_nothing() -> None:
    for change, words in ((replace(LITE, expert=None), ("--tensor 1", 2)), (LITE, ("--tensor 1", 2))):
        with refused(ExportError, *words):
            written("torch", "deepseek-v2-lite", change)
    none = Job(
        model="deepseek-v3+predicted_tokens=1", description=replace(LITE, tensor=1), architecture=None, per_node=8
    )
    with refused(ExportError, "predicted_tokens=1", "one token"):
        TARGETS["torch"].write(none)


SAID = {
    "num_layers", "hidden_size", "ffn_size", "num_heads", "q_rank", "kv_rank", "plain_size", "rotary_size",
    "value_size", "vocab_size", "sequence_length", "num_experts", "experts_per_token", "expert_size", "shared_size",
    "dense_layers",
    "normalised_weights", "sigmoid_scores", "weight_scale", "expert_groups", "chosen_groups", "groups_by",
    "balance_loss", "balance_speed", "rope_theta", "norm_epsilon", "predicted_tokens", "predicted_weight",
}  # fmt: skip
REFUSED = {"rope_frequencies", "rope_magnitude=2.0", "score_scale=2.0"}


def test_every_dimension_is_said_or_refused() -> None:
    assert {field.name for field in fields(DeepseekConfig)} == SAID | {name.partition("=")[0] for name in REFUSED}
    for change in REFUSED:
        if "=" in change:
            assert architecture_of(f"deepseek-v3+{change}", None, latent=True) is None
    assert architecture_of("deepseek-v3", None) is None
    assert architecture_of("deepseek-v2", None, latent=True) is None, "groups by their best expert"
