"""Models of every family under the names of transformers: its classes load what is merged here, with equal losses, and
what they save is read back bit by bit."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from planner.cli.main import app
from planner.errors import CheckpointError, ModelError
from planner.models.naming.of_model import adapter_naming_of, naming_of
from planner.models.naming.parts import Naming
from planner.models.overrides import changed_reference as changed
from planner.models.zoo import BuiltModel, build_model
from runtime.checkpoint.naming import _itself, as_ours, as_theirs, in_own_names
from runtime.checkpoint.offline import merge
from runtime.checkpoint.regions import Region, whole
from runtime.checkpoint.renamed import Renamed, initial_in
from runtime.checkpoint.restoring import load, restore
from runtime.checkpoint.source import open_checkpoint
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.refusals import refused
from tests.unit.runtime.checkpoint_states import Memory, manifest_of, plan_of, refusal

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = "+num_layers=2+hidden_size=32+vocab_size=40+sequence_length=16"
LLAMA = f"llama-tiny{SMALL}+ffn_size=48"
MIXTURE = f"mixtral-tiny{SMALL}+ffn_size=48+num_experts=4+expert_size=24"
DEEPSEEK = f"deepseek-tiny{SMALL}+dense_layers=1+expert_size=24+shared_size=48"
SECOND = "+sigmoid_scores=no+normalised_weights=no+balance_speed=0+groups_by=1"
CASES: Mapping[str, tuple[str, str]] = {
    "gpt": (f"gpt-tiny{SMALL}", "GPT2LMHeadModel"),
    "gpt untied": (f"gpt-tiny{SMALL}+tied_embeddings=no", "GPT2LMHeadModel"),
    "bert": (f"bert-tiny{SMALL}", "BertForMaskedLM"),
    "t5": (f"t5-tiny{SMALL}", "T5ForConditionalGeneration"),
    "vit": ("vit-tiny+num_layers=2", "ViTForImageClassification"),
    "resnet": ("resnet-tiny", "ResNetForImageClassification"),
    "resnet basic": ("resnet-tiny+bottleneck=no", "ResNetForImageClassification"),
    "llama": (LLAMA, "LlamaForCausalLM"),
    "llama gelu": (f"{LLAMA}+gelu=yes+tied_embeddings=yes", "LlamaForCausalLM"),
    "qwen2": (f"{LLAMA}+qkv_bias=yes", "Qwen2ForCausalLM"),
    "qwen3": (f"{LLAMA}+qk_norm=yes+head_size=16", "Qwen3ForCausalLM"),
    "gemma": (f"{LLAMA}+gelu=yes+scaled_embeddings=yes+tied_embeddings=yes", "GemmaForCausalLM"),
    "mixtral": (MIXTURE, "MixtralForCausalLM"),
    "qwen3-moe": (f"{MIXTURE}+qk_norm=yes+dense_layers=1+normalised_weights=no", "Qwen3MoeForCausalLM"),
    "deepseek-v3": (DEEPSEEK, "DeepseekV3ForCausalLM"),
    "deepseek-v2": (f"{DEEPSEEK}{SECOND}", "DeepseekV2ForCausalLM"),
    "deepseek-v2 lite": (
        f"{DEEPSEEK}{SECOND}+q_rank=0+expert_groups=1+chosen_groups=1",
        "DeepseekV2ForCausalLM",
    ),
    "mixtral of a config": (str(CONFIGS / "mixtral"), "MixtralForCausalLM"),
    "qwen3-moe of a config": (str(CONFIGS / "qwen3-moe"), "Qwen3MoeForCausalLM"),
    "deepseek-v2 of a config": (str(CONFIGS / "deepseek-v2"), "DeepseekV2ForCausalLM"),
    "deepseek-v3 of a config": (str(CONFIGS / "deepseek-v3"), "DeepseekV3ForCausalLM"),
    "switch of a config": (str(CONFIGS / "switch"), "SwitchTransformersForConditionalGeneration"),
}

HEADS = {
    "gpt untied": r"lm_head\.weight",
    "bert": r"(transform|transform_norm|decoder)\..*",
    "vit": r"head\..*",
    "resnet": r"(fc|head|classifier)\..*",
    "llama": r"lm_head\.weight",
    "mixtral of a config": r"lm_head\.weight",
}
"""Names here of heads that are not tied, by case."""


def drawn(reference: str) -> tuple[BuiltModel, Memory, Naming]:
    """A model whose weights are so large, and norms and statistics so uneven, that every one of them counts."""
    torch.manual_seed(0)
    built = build_model(reference, dtype="float32", device="cpu")
    with torch.no_grad():
        for name, parameter in built.module.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.15 if "norm" in name else 0.08))
        for name, buffer in built.module.named_buffers():
            if name.endswith("bias_steps"):
                buffer.copy_(torch.randint(-200, 200, buffer.shape))
            if name.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.2, 1.5)
    kept = {name: buffer for name, buffer in built.module.named_buffers() if name in built.module.state_dict()}
    parameters = {name: parameter.detach() for name, parameter in built.module.named_parameters()}
    naming = naming_of(reference, built.sequence_length)
    assert naming is not None
    return built, Memory(contents={**parameters, **kept}), naming


def batch_of(built: BuiltModel) -> list[torch.Tensor]:
    return [
        torch.randn(example.shape) if example.is_floating_point()
        else example if bound is None
        else torch.randint(bound, example.shape)
        for example, bound in zip((*built.args, *built.kwargs.values()), built.bounds, strict=True)
    ]  # fmt: skip


def logits(there: Any, args: list[torch.Tensor]) -> torch.Tensor:
    """Of a model of theirs, called as the one here is."""
    kind = there.config.model_type
    if kind == "bert":
        found = there(input_ids=args[0], token_type_ids=args[1], attention_mask=args[2].long())
    elif kind == "t5":
        found = there(input_ids=args[0], attention_mask=args[1].long(), decoder_input_ids=args[2])
    else:
        found = there(args[0])
    result: torch.Tensor = found.logits
    return result


@torch.no_grad()
def losses(built: BuiltModel, there: nn.Module) -> tuple[float, float]:
    """Here and there, of one batch."""
    args = batch_of(built)
    if built.kwargs:  # by their names there
        named = dict(zip(built.kwargs, args, strict=True))
        return float(built.module.eval()(**named).loss), float(there.eval()(**named).loss)
    here = float(built.module.eval()(*args))
    return here, float(F.cross_entropy(logits(there.eval(), args).flatten(0, -2), args[-1].flatten()))


@pytest.mark.cases(2, 5)
@pytest.mark.parametrize("case", CASES)
def test_what_is_merged_is_loaded_and_what_is_saved_is_read(case: str, tmp_path: Path) -> None:
    reference, kind = CASES[case]
    built, state, naming = drawn(reference)
    merge(state, manifest_of(state), tmp_path / "merged", shard=50_000, most=500, naming=naming)
    there, report = getattr(transformers, kind).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report[wrong] for wrong in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    mine, theirs = losses(built, there)
    assert theirs == pytest.approx(mine, rel=2e-6)
    there.save_pretrained(tmp_path / "saved", max_shard_size="50KB")
    source = as_ours(open_checkpoint(tmp_path / "saved"), naming)
    assert set(source.tensors) == set(state.contents)
    for name, tensor in state.contents.items():
        found = source.read(name)
        wanted = torch.zeros_like(tensor) if name in naming.fresh else tensor
        assert found.dtype == tensor.dtype
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize(("case", "head"), HEADS.items())
def test_files_of_a_model_without_its_head_leave_the_head_as_it_begins(case: str, head: str, tmp_path: Path) -> None:
    _, state, naming = drawn(CASES[case][0])
    merge(state, manifest_of(state), tmp_path / "merged", naming=naming)
    transformers.AutoModel.from_pretrained(tmp_path / "merged").save_pretrained(tmp_path / "base")
    source = as_ours(open_checkpoint(tmp_path / "base"), naming)
    assert set(initial_in(source)) == {name for name in state.contents if re.fullmatch(head, name)} != set()
    assert set(source.tensors) | set(initial_in(source)) == set(state.contents)
    for name in source.tensors:
        assert torch.equal(source.read(name), state.contents[name]), name


def test_a_head_that_lacks_a_part_and_a_body_that_lacks_one_are_refused() -> None:
    _, state, naming = drawn(CASES["bert"][0])
    theirs = as_theirs(state, naming)
    contents = {name: theirs.read(name) for name in theirs.tensors}
    for lacking in ("cls.predictions.bias", "bert.embeddings.word_embeddings.weight"):
        rest = {name: tensor for name, tensor in contents.items() if name != lacking}
        assert f"it lacks: {lacking}" in refusal(lambda rest=rest: as_ours(Memory(contents=rest), naming))  # type: ignore[misc]


@pytest.mark.parametrize("case", ["gpt", "vit", "mixtral", "deepseek-v3"])
def test_boxes_are_read_as_they_lie(case: str) -> None:
    """Of every tensor, both ways, boxes that begin and end anywhere are those of the whole."""
    _, state, naming = drawn(CASES[case][0])
    theirs = as_theirs(state, naming)
    there = Memory(contents={name: theirs.read(name) for name in theirs.tensors})
    for source in (theirs, as_ours(there, naming)):
        for name, tensor in source.tensors.items():
            all_of_it = source.read(name)
            offset = tuple(size // 3 for size in tensor.shape)
            box = Region(offset=offset, extent=tuple(max(1, size // 2) for size in tensor.shape))
            assert torch.equal(source.read(name, box), all_of_it[box.within(whole(tensor.shape))]), name


REFUSED = {
    f"{LLAMA}+qkv_bias=yes+qk_norm=yes": "qkv_bias=True and qk_norm=True",
    f"{LLAMA}+scaled_embeddings=yes": "scaled_embeddings=True: only Gemma scales",
    f"{LLAMA}+qkv_bias=yes+head_size=16": "head_size=16: heads of Qwen2",
    f"{LLAMA}+gated=no": "gated=False: the MLPs and experts",
    f"{MIXTURE}+capacity_factor=1.5": "capacity_factor=1.5: MixtralForCausalLM has no such thing",
    f"{MIXTURE}+dense_layers=1": "dense_layers=1: MixtralForCausalLM has no such thing",
    f"{MIXTURE}+normalised_weights=no": "MixtralForCausalLM normalises",
    f"{MIXTURE}+qk_norm=yes+shared_size=8": "shared_size=8: Qwen3MoeForCausalLM has no such thing",
    changed(DEEPSEEK, ["predicted_tokens=1"]): "predicted_tokens=1: DeepseekV3ForCausalLM predicts no further",
    changed(DEEPSEEK, ["norm_epsilon=0.001"]): "norm_epsilon=0.001: norms of the latent vectors",
    changed(DEEPSEEK, ["shared_size=0"]): "shared_size=0 is no multiple",
    changed(DEEPSEEK, ["balance_speed=0"]): "balance_speed=0 with scores of a sigmoid",
    changed(DEEPSEEK, ["groups_by=1"]): "groups_by=1 with scores of a sigmoid",
    changed(DEEPSEEK + SECOND, ["normalised_weights=yes"]): "normalised_weights=True with scores of a softmax",
    changed(DEEPSEEK + SECOND, ["balance_speed=0.1"]): "balance_speed=0.1 with scores of a softmax",
    changed(DEEPSEEK + SECOND, ["groups_by=2"]): "groups_by=2 with scores of a softmax",
    "resnet-tiny+groups=2": "groups=2: ResNetForImageClassification",
}


@pytest.mark.parametrize("reference", REFUSED, ids=[words.partition(":")[0] for words in REFUSED.values()])
def test_what_transformers_does_not_compute_has_no_names(reference: str) -> None:
    with pytest.raises(ModelError) as caught:
        naming_of(reference, None)
    assert "no class of transformers computes the same" in str(caught.value)
    assert REFUSED[reference] in str(caught.value)


def test_what_transformers_does_not_know_keeps_its_names() -> None:
    assert naming_of("dlrm-tiny", None) is None
    assert naming_of("wide-deep-tiny", None) is None
    assert naming_of("my.models:big", None) is None


def test_files_of_transformers_are_loaded_into_a_plan(tmp_path: Path) -> None:
    """A GPT as people have it: without its head, so that names begin otherwise, and with masks in it."""
    config = plans.GPT_CONFIG
    sizes = ["num_layers", "hidden_size", "num_heads", "vocab_size", "sequence_length"]
    reference = "+".join(["gpt-tiny", *(f"{size}={getattr(config, size)}" for size in sizes)])
    _, state, naming = drawn(reference)
    theirs = as_theirs(state, naming)
    there = {name.removeprefix("transformer."): theirs.read(name).contiguous() for name in theirs.tensors}
    there["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    merge(Memory(contents=there), replace(manifest_of(state), names=None), tmp_path / "merged")
    plan = plan_of("gpt", "zero1", (1,))
    plan = replace(plan, model=replace(plan.model, reference=reference, sequence_length=config.sequence_length))
    with one_rank("gpt", plan, plans.traced("gpt")) as (step, _):
        load(step, tmp_path / "merged")
        found = step.full_parameters()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.contents.items())


def test_a_head_that_is_not_in_the_files_keeps_its_initial_values() -> None:
    """Names are those of a model whose head is its last matrix; `initial` says which they are."""
    with one_rank("gpt", plan_of("gpt", "zero1", (1,)), plans.traced("gpt")) as (step, _):
        before = {name: tensor.clone() for name, tensor in step.full_parameters().items()}
        *body, head = before
        contents = {name: before[name] + 1 for name in body}
        memory = Memory(contents=contents)
        copies = {name: (_itself(name, tensor),) for name, tensor in memory.tensors.items()}
        source = Renamed(source=memory, tensors=memory.tensors, copies=copies, initial=(head,))
        assert restore(step.rank, source, weights_only=True, verify=False).initial == (head,)
        after = step.full_parameters()
    assert torch.equal(after[head], before[head])
    assert all(torch.equal(after[name], contents[name]) for name in body)


def test_names_of_ones_own_without_a_manifest_stay_what_they_are() -> None:
    reference = CASES["gpt"][0]
    _, state, _ = drawn(reference)
    assert in_own_names(state, replace(plan_of("gpt", "zero1", (1,)).model, reference=reference)) is state


def test_what_is_not_of_the_model_is_listed(tmp_path: Path) -> None:
    _, state, naming = drawn(CASES["mixtral"][0])
    theirs = as_theirs(state, naming)
    contents = {name: theirs.read(name) for name in theirs.tensors}
    del contents["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    contents["model.norm.weight"] = torch.ones(7)
    contents["model.bias"] = torch.ones(1)
    said = refusal(lambda: as_ours(Memory(contents=contents), naming))
    assert "it lacks: model.layers.1.block_sparse_moe.experts.2.w1.weight" in said
    assert "not in the model: model.bias" in said
    assert "other shape: model.norm.weight [7], not [32]" in said


def test_weights_of_another_kind_of_model_are_refused(tmp_path: Path) -> None:
    """Gemma's have the names of Llama's, and norms that are less by one."""
    _, state, naming = drawn(CASES["gemma"][0])
    merge(state, manifest_of(state), tmp_path / "merged", naming=naming)
    (tmp_path / "merged" / "manifest.json").unlink()
    llama = drawn(f"{LLAMA}+tied_embeddings=yes")[2]
    said = refusal(lambda: as_ours(open_checkpoint(tmp_path / "merged"), llama))
    assert "config.json: model type gemma, but the plan's model is llama or mistral" in said


def test_biases_between_two_steps_are_refused() -> None:
    _, state, naming = drawn(CASES["deepseek-v3"][0])
    theirs = as_theirs(state, naming)
    contents = {name: theirs.read(name) for name in theirs.tensors}
    name = next(name for name in contents if name.endswith("e_score_correction_bias"))
    contents[name] = contents[name] + 0.0004
    source = as_ours(Memory(contents=contents), naming)
    with refused(CheckpointError, name, 0.001, "--set balance_speed"):
        source.read("model.layers.1.mlp.router.bias_steps")


def called(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.thorough
@pytest.mark.slow
def test_from_files_of_transformers_to_slices_and_back(tmp_path: Path) -> None:
    """What transformers saved is converted for two devices and merged again: the same file, byte by byte in tensors."""
    sizes = ("--set", "num_layers=2", "--set", "hidden_size=32", "--set", "vocab_size=40", "--seq-len", "16")
    plan = tmp_path / "plan.json"
    called(
        "--model", "gpt-tiny", *sizes, "--hardware", "cpu", "--devices", "2", "--global-batch", "4", "-q", "-o", plan
    )
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=8)
    there = transformers.GPT2LMHeadModel(config)
    there.save_pretrained(tmp_path / "there")
    assert "sliced" in called("checkpoint", "convert", tmp_path / "there", "--plan", plan, "-o", tmp_path / "sliced")
    said = called("checkpoint", "merge", tmp_path / "sliced", "-o", tmp_path / "merged")
    assert "under Hugging Face's names" in said
    wanted = load_file(tmp_path / "there" / "model.safetensors")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    said = called("checkpoint", "merge", tmp_path / "merged", "-o", tmp_path / "own", "--names", "own", "--json")
    assert json.loads(said)["names"] == "own"
    assert "h.0.c_attn.weight" in open_checkpoint(tmp_path / "own").tensors


@pytest.mark.parametrize(
    ("reference", "names", "words"),
    [
        (CASES["gemma"][0], "own", "those of transformers, which keeps other numbers"),
        (f"{LLAMA}+scaled_embeddings=yes", "huggingface", "--names own keeps the names that the model has here"),
        ("dlrm-tiny", "huggingface", "leave --names out"),
        (LLAMA, "theirs", "kind of names 'theirs'"),
    ],
)
def test_names_that_cannot_be_had_are_refused(reference: str, names: str, words: str, tmp_path: Path) -> None:
    from planner.plan.plan import Plan
    from runtime.checkpoint.manifest import plan_content

    plan: Plan = plan_of("llama", "zero1", (1,))
    content = plan_content(replace(plan, model=replace(plan.model, reference=reference, sequence_length=None)))
    state = Memory(contents={"w": torch.ones(2)})
    merge(state, replace(manifest_of(state), plan=content), tmp_path / "merged")
    arguments = ["checkpoint", "merge", str(tmp_path / "merged"), "-o", str(tmp_path / "out"), "--names", names]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "out").exists()


def test_adapters_are_merged_as_peft_has_them(tmp_path: Path) -> None:
    """Under the names of its files, with what it must know of them; without the weights that are frozen."""
    reference = f"{LLAMA}+lora=2+lora_alpha=6+lora_layers=q_proj,down_proj+lora_trained=lm_head"
    module = build_model(reference, dtype="float32", device="cpu").module
    base = naming_of(reference, 16)
    assert base is not None
    naming = adapter_naming_of(reference, 16, base)
    assert naming is not None
    source = Memory(contents={name: one for name, one in module.state_dict().items() if name in naming.built})
    merge(source, manifest_of(source), tmp_path / "adapters", naming=naming)
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    places = [f"{n}.{layer}" for n in range(2) for layer in ("self_attn.q_proj", "mlp.down_proj")]
    layers = {f"base_model.model.model.layers.{place}.lora_{which}.weight" for place in places for which in "AB"}
    assert set(saved) == layers | {"base_model.model.lm_head.weight"}
    there = saved["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert torch.equal(there, module.model.layers[1].mlp.down_proj.lora_A.weight)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 6.0, ["lm_head"])
    assert config["target_modules"] == ["down_proj", "q_proj"]


def test_adapters_beside_weights_that_are_kept_together_have_no_names_in_peft() -> None:
    reference = f"gpt-tiny{SMALL}+lora=2"
    base = naming_of(reference, 16)
    assert base is not None
    with refused(ModelError, "in another order"):
        adapter_naming_of(reference, 16, base)
