"""Every engine: what it can say is read back as it was, and what it cannot say is given up until it can."""

import argparse
import ast
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.export.description import Description, ExportError
from planner.export.files.arguments import options_in
from planner.export.targets import TARGETS
from planner.sharding.update import Update
from tests.refusals import refused
from tests.unit.export.descriptions import MODELS, architecture, descriptions, facts_of, job_of, recorded

LAUNCHER = {"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port"}
PLAIN = Description(layers=(40, 40), data=2, full=(0, 0), selective=(0, 0), sequence_length=8192)


def said(engine: str, model: str, description: Description) -> tuple[Description, str]:
    """The nearest description that an engine can say, and the file that says it."""
    nearest, files = written(engine, model, description)
    return nearest, files[TARGETS[engine].main]


def written(engine: str, model: str, description: Description) -> tuple[Description, Mapping[str, str]]:
    """The nearest description that an engine can say, and the files that say it."""
    target = TARGETS[engine]
    losses = target.nearest(description)
    nearest = losses[-1].description if losses else description
    return nearest, target.write(job_of(nearest, model))


def possible(engine: str, model: str, description: Description) -> bool:
    """Whether an engine runs models like this with so many stages."""
    if description.in_a_v and architecture(model).tied and engine in ("torch", "mindspeed"):
        return False
    if engine == "torch":
        split, known = description.tensor * description.context, architecture(model)
        return (description.expert is None or description.tensor == 1) and known.kv_heads % split == 0
    if engine == "deepspeed":
        return sum(degree > 1 for degree in (description.tensor, description.context, description.pipeline)) < 2
    if engine == "accelerate":
        cut = description.tensor == 1 or (description.data > 1 and description.context == 1 and "gpt" not in model)
        return description.pipeline == 1 and cut
    return not (engine == "torchtitan" and model.startswith("qwen") and description.pipeline > 1)


PAIRS = [(engine, model) for engine in TARGETS for model in MODELS]


def test_arguments_without_a_model_say_that_it_is_left_to_the_user() -> None:
    known = job_of(replace(PLAIN, data=8), "llama70b")
    job, target = replace(known, architecture=None), TARGETS["megatron"]
    (left,) = (what for variable, what in target.fill_in(job) if not variable)
    assert "the arguments that describe the model" in left
    assert "--mock-data" not in target.write(job)["launch.sh"] + left
    assert any("--mock-data" in what for _, what in target.fill_in(known))


@pytest.mark.cases(2, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "model"), PAIRS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_an_engine_says_is_read_back(engine: str, model: str, data: st.DataObject) -> None:
    description = data.draw(descriptions(model).filter(lambda d: possible(engine, model, d)))
    nearest, files = written(engine, model, description)
    target = TARGETS[engine]
    assert target.nearest(nearest) == (), "what is nearest is said without a loss"
    reading = target.read(files[target.main], facts_of(nearest, model, files.get(target.beside or "", "")))
    assert reading.description == nearest
    assert reading.unread == ()
    assert target.write(job_of(reading.description, model)) == files


@pytest.mark.parametrize("engine", sorted(set(TARGETS) - {"accelerate"}))
@pytest.mark.parametrize("layers", [(0, 40, 40, 0), (80, 0), (0, 80)], ids=str)
def test_stages_without_a_layer_are_said_or_given_up(engine: str, layers: tuple[int, ...]) -> None:
    """Never written where the engine's own settings do not mean them."""
    none = (0,) * len(layers)
    description = replace(PLAIN, layers=layers, full=none, selective=none, schedule="1f1b", micro_batches=8)
    nearest, files = written(engine, "llama70b", description)
    target = TARGETS[engine]
    assert target.nearest(nearest) == ()
    reading = target.read(files[target.main], facts_of(nearest, "llama70b", files.get(target.beside or "", "")))
    assert reading.description.layers == nearest.layers
    assert engine in ("megatron", "megatron-bridge", "nemo", "torchtitan") or 0 not in nearest.layers


@pytest.mark.parametrize("engine", TARGETS)
def test_losses_lead_from_one_description_to_the_next(engine: str) -> None:
    description = replace(
        PLAIN, schedule="zb_h1", interleave=2, full=(3, 0), update=Update(buckets="none", gradient_dtype="parameter")
    )
    if engine == "accelerate":  # which has no pipelines
        description = replace(description, layers=(80,), schedule="1f1b", full=(3,), selective=(0,))
    losses = TARGETS[engine].nearest(description)
    known = [description, *(loss.description for loss in losses)]
    assert len(losses) >= 2
    assert all(before != after for before, after in pairwise(known))
    assert all(loss.what and loss.here != loss.there for loss in losses)


@pytest.mark.parametrize("engine", TARGETS)
@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"update": Update(buckets="none", gradients="sum")}, ("--gradients mean",)),
        ({"update": Update(buckets="none", local_parameters=("*.bias",))}, ("*.bias", "--local-parameters")),
        (
            {"update": Update(buckets="none", placed=(("tables.*", "host"), ("wide.*", "servers")))},
            ("tables.*", "wide.*", "--place none"),
        ),
    ],
)
def test_other_training_is_no_approximation(engine: str, change: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refused(ExportError, *facts):
        TARGETS[engine].nearest(replace(PLAIN, **change))


@pytest.mark.parametrize("engine", sorted(set(TARGETS) - {"deepspeed"}))
def test_another_optimizer_is_none(engine: str) -> None:
    with refused(ExportError, "lamb", "adamw"):
        TARGETS[engine].nearest(replace(PLAIN, optimizer="lamb"))


@cache
def parser_of(engine: str, version: str) -> argparse.ArgumentParser:
    """A parser with the options that were recorded of an engine."""
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str, None: str, "moe_freq_type": str}
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    for name, row in recorded(engine, version)["options"].items():
        if row["type"] == "flag":
            parser.add_argument(f"--{name}", action="store_true")
        else:
            nargs = row.get("nargs")
            parser.add_argument(
                f"--{name}",
                type=kinds.get(row["type"], str),
                choices=_choices(row),
                nargs=int(nargs) if nargs and nargs.isdigit() else nargs,
            )
    return parser


def _choices(row: dict[str, Any]) -> list[Any] | None:
    choices = row.get("choices")
    return None if choices is None else [int(c) if row["type"] == "int" else c for c in choices]


def arguments_in(script: str, *, later: bool = True) -> list[str]:
    """What a script gives to the program: the options after the launcher's, with those of `later` versions or not."""
    script = script if later else re.sub(r"^  later=\(.*$", "", script, flags=re.MULTILINE)
    options, found = options_in(script), []
    for name in options.unread:
        if name not in LAUNCHER:
            found += [f"--{name}", *options.words(name)]
    return found


@pytest.mark.cases(4)
@pytest.mark.parametrize("version", ["0.16", "0.19", "0.20"])
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_megatron_knows_every_argument(model: str, version: str, data: st.DataObject) -> None:
    _, script = said("megatron", model, data.draw(descriptions(model)))
    parsed = parser_of("megatron", version).parse_args(arguments_in(script, later=version != "0.16"))
    assert parsed.num_layers == MODELS[model]


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_mindspeed_knows_every_argument(model: str, data: st.DataObject) -> None:
    _, script = said(
        "mindspeed", model, data.draw(descriptions(model).filter(lambda d: possible("mindspeed", model, d)))
    )
    options = options_in(script)
    known = recorded("mindspeed")
    ours = {name for name in options.unread if name not in LAUNCHER}
    assert ours <= {*known["megatron"], *known["mindspeed"]}
    algorithms = options.words("context-parallel-algo")
    assert set(algorithms) <= set(known["mindspeed"]["context-parallel-algo"])


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_mindformers_knows_every_key(model: str, data: st.DataObject) -> None:
    _, text = said("mindformers", model, data.draw(descriptions(model)))
    known = recorded("mindformers")["sections"]
    for path, value in flat("", yaml.safe_load(text)):
        section, _, key = path.rpartition(".")
        if section in known and key in known[section]:
            kind = known[section][key]
            assert kind == "NoneType" or isinstance(value, list) or type(value).__name__ in (kind, "bool"), path
        else:
            assert path in MINDFORMERS_ALSO or path.startswith(MINDFORMERS_OPEN), path


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_deepspeed_knows_every_key(model: str, data: st.DataObject) -> None:
    description = data.draw(descriptions(model).filter(lambda d: possible("deepspeed", model, d)))
    _, text = said("deepspeed", model, description)
    known = recorded("deepspeed")["sections"]
    content = json.loads(text)
    assert set(content) <= set(known["top"])
    for section, keys in content.items():
        if section in known:
            assert set(keys) <= set(known[section])
    sizes = (content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"])
    assert content.get("train_batch_size", 0) % math.prod(sizes) == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_nemo_knows_every_path(model: str, data: st.DataObject) -> None:
    _, text = said("nemo", model, data.draw(descriptions(model)))
    known = recorded("nemo")["sections"]
    for line in text.splitlines():
        path, equals, _ = line.partition(" = ")
        if equals and path.startswith("recipe."):
            section, _, key = path.removeprefix("recipe.").rpartition(".")
            assert key in known[section], path
    ast.parse(text)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_megatron_bridge_knows_every_path(model: str, data: st.DataObject) -> None:
    _, text = said("megatron-bridge", model, data.draw(descriptions(model)))
    known = recorded("megatron-bridge")["sections"]
    for path in re.findall(r"^cfg\.(\S+) = ", text, re.MULTILINE):
        section, _, key = path.partition(".")
        assert section == "mixed_precision" or key in known[section], path
    for key in re.findall(r"^    (\w+)=", text, re.MULTILINE):
        assert key in known["mixed_precision"]
    ast.parse(text)


MINDFORMERS_ALSO = {
    "run_mode", "use_parallel", "model.model_config.type", "model.arch.type", "seed", "output_dir", "load_checkpoint",
    "auto_trans_ckpt", "only_save_strategy", "resume_training", "do_eval", "micro_batch_interleave_num", "callbacks",
}  # fmt: skip
"""What has no class with keys: the name of a class, or read by the trainer (GeneralConfig of its template)."""
MINDFORMERS_OPEN = ("trainer.", "optimizer.", "lr_schedule.", "train_dataset.", "train_dataset_task.", "context.")
"""Sections of which its template takes any key; those of ours are in the published file of Llama 3.1 70B."""


def flat(prefix: str, content: dict[str, Any]) -> list[tuple[str, Any]]:
    """Every value of nested keys with its path."""
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        found += flat(f"{prefix}{key}.", value) if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_torchtitan_knows_every_key(model: str, data: st.DataObject) -> None:
    description = data.draw(descriptions(model).filter(lambda d: possible("torchtitan", model, d)))
    _, text = said("torchtitan", model, description)
    sections = recorded("torchtitan")["sections"]
    kinds = {"int": int, "str": str, "bool": bool, "str | None": str, "list[list[str]] | None": list}
    for section, keys in tomllib.loads(text).items():
        for key, value in keys.items():
            row = sections[section][key]
            assert isinstance(value, kinds.get(row["type"], int | float)), (key, value)
            assert value in row.get("choices", [value]), key


@pytest.mark.parametrize("engine", ["torch", "torchtitan"])
def test_fewer_micro_batches_than_stages_go_as_gpipe(engine: str) -> None:
    """PyTorch's 1F1B refuses them."""
    description = replace(PLAIN, micro_batches=1, zero=2)
    losses = TARGETS[engine].nearest(description)
    assert [loss.description.schedule for loss in losses][-1] == "gpipe"
    assert all(loss.there != "gpipe" for loss in TARGETS[engine].nearest(replace(description, micro_batches=2)))


@pytest.mark.parametrize("engine", ["megatron", "mindspeed"])
def test_experts_of_a_model_that_arguments_do_not_describe_are_read_back(engine: str) -> None:
    description = replace(PLAIN, data=8, expert=4)
    job = replace(job_of(description, "llama70b"), model="deepseek-v3", architecture=None)
    target = TARGETS[engine]
    script = target.write(job)[target.main]
    read = target.read(script, replace(facts_of(description, "llama70b"), architecture=None))
    assert read.description.expert == 4


@pytest.mark.parametrize("engine", ["megatron", "mindspeed"])
@pytest.mark.parametrize("expert", [None, 2])
def test_tokens_are_exchanged_as_priced_where_arguments_do_not_describe_the_model(
    engine: str, expert: int | None
) -> None:
    """By default Megatron-LM gathers all tokens everywhere."""
    job = replace(job_of(replace(PLAIN, data=8, expert=expert), "llama70b"), architecture=None)
    script = TARGETS[engine].write(job)["launch.sh"]
    assert ("--moe-token-dispatcher-type alltoall" in script) == (expert is not None)


def test_a_model_without_a_flavor_is_asked_for() -> None:
    job = replace(job_of(PLAIN, "llama70b"), model="llama-tiny")
    folder = TARGETS["torchtitan"].write(job)
    assert "model.flavor" in folder["launch.sh"]
    assert "[model]" not in folder["train.toml"]


def test_mindspeed_has_fused_operators_and_none_of_cuda() -> None:
    one = Description(layers=(32,), data=8, zero=1, full=(0,), selective=(0,), sequence_length=4096)
    target = TARGETS["mindspeed"]
    llama = options_in(target.write(job_of(one, "llama8b"))["launch.sh"])
    assert all(llama.flag(name) for name in ("use-flash-attn", "use-fused-rmsnorm", "use-fused-swiglu"))
    assert llama.flag("no-gradient-accumulation-fusion")
    gpt = options_in(target.write(job_of(replace(one, layers=(96,)), "gpt3-175b"))["launch.sh"])
    assert gpt.flag("use-flash-attn")
    assert not gpt.flag("use-fused-swiglu")
    assert any("mindspeed.megatron_adaptor" in what for _, what in target.fill_in(job_of(one, "llama8b")))


def test_dualpipev_of_mindspeed_overlaps_no_reductions() -> None:
    """It refuses --overlap-grad-reduce."""
    none = (0,) * 4
    d = Description(
        layers=(8,) * 4, virtual_stages=2, schedule="dualpipe_v", data=4, zero=1, full=none, selective=none,
        micro_batches=8, sequence_length=4096, update=replace(PLAIN.update, buckets=2**25),
    )  # fmt: skip
    target = TARGETS["mindspeed"]
    (loss,) = target.nearest(d)
    assert (loss.what, loss.description.schedule) == ("buckets of gradients", "dualpipe_v")
    job = replace(job_of(loss.description, "llama8b"), overlapped=("gathers", "reductions"))
    assert not re.search("--overlap|--ddp-bucket", target.write(job)["launch.sh"])


@pytest.mark.parametrize(("tensor", "said"), [(1, ("50257",)), (2, ())])
def test_an_odd_vocabulary_is_whole_in_every_version_of_megatron(tensor: int, said: tuple[str, ...]) -> None:
    """Its tokenizer without data adds a word up to core 0.17 and none later; padding hides that where there is any."""
    d = Description(layers=(12,), data=2, tensor=tensor, full=(0,), selective=(0,), sequence_length=1024)
    options = options_in(TARGETS["megatron"].write(job_of(d, "gpt2"))["launch.sh"])
    assert (options.words("padded-vocab-size"), options.word("vocab-size")) == (said, "50256")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"zero": 2, "heads": 2, "data": 8}, True),
        ({"zero": 3, "data": 16}, True),
        ({"zero": 3, "heads": 2, "data": 8}, False),
        ({"zero": 1, "tensor": 2, "data": 8, "whole_experts": True}, True),
        ({"zero": 1, "tensor": 2, "data": 8}, True),
        ({"zero": 1, "tensor": 2, "data": 8, "whole_experts": True, "states_at": "host"}, True),
    ],
)
def test_deepspeed_spreads_experts_where_autoep_does(changes: dict[str, Any], said: bool) -> None:
    base = Description(layers=(32,), full=(0,), selective=(0,), sequence_length=32768, expert=8)
    d = replace(base, vocabulary_parallel=changes.get("tensor", 1) == 1, **changes)
    target = TARGETS["deepspeed"]
    losses = target.nearest(d)
    assert bool([loss for loss in losses if loss.what == "expert parallelism"]) is not said
    d = losses[-1].description if losses else d
    if said:
        text = target.write(job_of(d, "mixtral-8x7b"))["ds_config.json"]
        assert json.loads(text)["expert_parallel"] == {"enabled": True, "autoep_size": 8}
        facts = facts_of(d, "mixtral-8x7b")
        assert target.read(text, facts).description.expert == 8
        cut = text.replace('"autoep_size": 8', '"autoep_size": 8, "expert_tensor_parallel_size": 2')
        with pytest.raises(ExportError, match="DeepSpeed leaves experts whole"):
            target.read(cut, facts)


def test_mindformers_has_norms_along_the_sequence_beside_experts() -> None:
    """mindformers/tools/check_rules.py, _check_moe_parallel_valid (r1.8.0), refuses experts with tensor parallelism and
    without sequence parallelism."""
    wanted = Description(
        layers=(48,), data=2, tensor=2, expert=2, full=(0,), selective=(0,), interleave=2, micro_batches=4,
        sequence_length=4096,
    )  # fmt: skip
    losses = TARGETS["mindformers"].nearest(wanted)
    assert losses[0].what == "norms of a model with experts"
    nearest = losses[-1].description
    assert (nearest.sequence_parallel, nearest.interleave) == (True, 2)
    files = TARGETS["mindformers"].write(job_of(nearest, "qwen3-30b-a3b"))
    assert "use_seq_parallel: true" in files["train.yaml"]
    for model, asked in (("qwen3-30b-a3b", True), ("llama8b", False)):
        told = " ".join(what for _, what in TARGETS["mindformers"].fill_in(job_of(nearest, model)))
        assert ("`type` and sizes in `model_config`" in told) == asked
