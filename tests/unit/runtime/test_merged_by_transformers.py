"""Models that transformers has built: it loads what was merged of them, and what it saves is read, also in another
dtype. Those of the zoo are in `test_names_of_transformers`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.errors import CheckpointError
from planner.models.huggingface.taken_apart import together
from planner.models.naming.of_model import naming_of
from planner.models.zoo import build_model
from runtime.checkpoint.naming import in_own_names
from runtime.checkpoint.offline import merge
from runtime.checkpoint.restoring import load
from runtime.checkpoint.source import open_checkpoint
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.long_lists import first
from tests.refusals import refused
from tests.unit.runtime.checkpoint_states import Memory, manifest_of, plan_of

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {
    "vocab_size": plans.VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": plans.SEQUENCE,
}  # fmt: skip


def theirs() -> object:
    """The config of the same model there."""
    config = plans.LLAMA
    heads = {"num_key_value_heads": config.num_kv_heads}
    return transformers.LlamaConfig(
        **{**SIZES, **heads}, rope_theta=config.rope_theta, rms_norm_eps=config.norm_epsilon, tie_word_embeddings=False
    )


def test_files_that_transformers_write_are_read(tmp_path: Path) -> None:
    written = transformers.LlamaForCausalLM(theirs())
    written.save_pretrained(tmp_path, max_shard_size="20KB")
    source = open_checkpoint(tmp_path)
    source.check()
    assert len(source.files) > 2
    module = plans.build("llama")
    module.load_state_dict({name: source.read(name) for name in source.tensors}, strict=True)
    assert torch.equal(module.lm_head.weight, written.lm_head.weight)


def test_weights_in_another_dtype_are_taken_where_that_is_asked_for(tmp_path: Path) -> None:
    """A step on one rank, from files in bfloat16 for a plan in float32."""
    written = transformers.LlamaForCausalLM(theirs()).bfloat16()
    written.save_pretrained(tmp_path)
    with one_rank("llama", plan_of("llama", "zero1", (1,)), plans.traced("llama")) as (step, _):
        with refused(CheckpointError, tmp_path, "model.embed_tokens.weight", "bfloat16", "float32", "--weights PATH"):
            load(step, tmp_path)
        assert load(step, tmp_path, cast=True).step == 0
        found = step.full_parameters()["lm_head.weight"]
    assert torch.equal(found, written.lm_head.weight.float())


@pytest.mark.parametrize(
    "name", first(6, ["gpt2", "phi3", "llama4", "olmoe", "qwen3", "t5-hf", "phimoe", "qwen3-next", "bert-hf", "vit"])
)
def test_models_of_a_config_have_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    """What was planned from a `config.json` is loaded whole by the class that it names, tied weights are there once,
    and what that class saves is read."""
    config = CONFIGS / name / "config.json"
    module = build_model(str(config), dtype="float32", device="cpu").module
    buffers = {n: b for n, b in module.named_buffers() if n in module.state_dict()}
    state = Memory(contents={**dict(module.named_parameters()), **buffers})
    naming = naming_of(str(config), None)
    assert naming is not None
    merge(state, manifest_of(state), tmp_path / "merged", naming=naming)
    loaded, report = type(module).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    known = loaded.state_dict()
    assert all(torch.equal(value, known[name]) for name, value in together(module, module.state_dict()).items())
    loaded.save_pretrained(tmp_path / "saved")
    model = replace(plan_of("llama", "zero1", (1,)).model, reference=str(config), sequence_length=None)
    source = in_own_names(open_checkpoint(tmp_path / "saved"), model, str(config))
    assert all(torch.equal(source.read(name), value) for name, value in state.contents.items())
