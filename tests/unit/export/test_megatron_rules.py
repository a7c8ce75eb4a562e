"""What Megatron-LM, NeMo and Megatron Bridge do with settings beyond knowing them: rules of their own sources, which
exports follow. Megatron-LM at core 0.16 (ddc0d677), 0.19 (f8837c04) and d98e8a64, NeMo r2.5.0, Megatron Bridge at
067f987d.
"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.api.exporting import check_fits
from planner.engines.spaces import SPACES
from planner.errors import InfeasibleError
from planner.export.description import Description, ExportError
from planner.export.launching import priced_only
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from planner.graph.fp8 import Fp8
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN
from tests.refusals import refused
from tests.unit.export.descriptions import facts_of, job_of
from tests.unit.export.test_latent import architecture as latent_architecture

MODEL = "qwen3-30b-a3b"
SHARDED = Description(
    layers=(48,), data=8, expert=8, zero=3, micro_batches=8, full=(0,), selective=(0,), sequence_length=4096
)
PIPED = replace(
    SHARDED, layers=(12,) * 4, virtual_stages=2, schedule="interleaved_1f1b", full=(0,) * 4, selective=(0,) * 4, zero=1,
    data=4, tensor=2, sequence_parallel=True, whole_experts=True,
)  # fmt: skip
ALL = ("tensor", "gathers", "reductions", "exchange")
RECIPES = ["nemo", "megatron-bridge"]


def nearest(engine: str, description: Description) -> Description:
    losses = TARGETS[engine].nearest(description)
    return losses[-1].description if losses else description


def main(engine: str, description: Description, **settings: Any) -> str:
    """The main file, which is read back equal."""
    target, d = TARGETS[engine], nearest(engine, description)
    files = target.write(replace(job_of(d, MODEL), **settings))
    reading = target.read(files[target.main], facts_of(d, MODEL, files.get(target.beside or "", "")))
    assert reading.description == d
    return files[target.main]


@pytest.mark.parametrize(("states_at", "recipe", "gathered"), [
    ("host", "tensorwise", False), ("host", "delayed", True), ("device", "tensorwise", True),
])  # fmt: skip
def test_offloaded_states_take_weights_in_fp8_by_delayed_scaling_alone(
    states_at: Any, recipe: str, gathered: bool
) -> None:
    """megatron/training/arguments.py, validate_args: "optimizer cpu offload must be used in conjunction with
    `--fp8-recipe delayed`", where --fp8-param-gather is given."""
    wanted = replace(SHARDED, states_at=states_at, fp8=Fp8(recipe=recipe, experts=True, gathered=True))
    found = nearest("megatron", wanted)
    assert (found.states_at, found.fp8.gathered) == (states_at, gathered)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "parameter"])
def test_gradients_of_megatron_fsdp_stay_in_fp32_from_core_0_17_on(zero: int, dtype: str, tmp_path: Path) -> None:
    """Up to core 0.16 they follow `grad_reduce_in_fp32`; then `megatron_fsdp_main_grads_dtype`, by default the dtype of
    the weights (core/distributed/distributed_data_parallel_config.py)."""
    update = replace(PLAIN, gradient_dtype="mixed" if zero == 1 and dtype == "fp32" else dtype)
    wanted = replace(SHARDED, zero=zero, update=update)
    script, name = main("megatron", wanted), "--megatron-fsdp-main-grads-dtype"
    told = zero > 1 and dtype == "fp32"
    arguments = tmp_path / "megatron" / "training" / "arguments.py"
    arguments.parent.mkdir(parents=True)
    (tmp_path / "torchrun").write_text('#!/usr/bin/env bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "launch.sh").write_text(script)
    for text, there in ((f"group.add_argument('{name}')", told), ("", False)):
        arguments.write_text(text)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MEGATRON": str(tmp_path)}
        said = subprocess.run(["bash", str(tmp_path / "launch.sh")], env=environment, capture_output=True, check=True)
        assert (f"{name} fp32" in said.stdout.decode()) == there
    assert ("cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32\n" in main("megatron-bridge", wanted)) == told
    assert "main_grads_dtype" not in main("nemo", wanted), "core 0.14"


@pytest.mark.parametrize(("said", "dtype", "noted"), [
    ("", "fp32", True), ("--megatron-fsdp-main-grads-dtype fp32", "fp32", False),
    ("--megatron-fsdp-main-grads-dtype auto", "parameter", False), ("--grad-reduce-in-bf16", "parameter", False),
])  # fmt: skip
def test_gradients_of_megatron_fsdp_are_read(said: str, dtype: str, noted: bool) -> None:
    text = "pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 8 --use-megatron-fsdp"
    text += f" --data-parallel-sharding-strategy optim_grads_params {said}"
    reading = TARGETS["megatron"].read(text, Facts(layers=32, devices=8, architecture=None))
    assert reading.description.update.gradient_dtype == dtype
    assert bool([note for note in reading.notes if "from 0.17 on they are in 16 bits" in note]) == noted
    assert reading.unmodelled == ()


def test_tokens_are_sent_once_to_a_node_where_that_is_priced() -> None:
    """The flex dispatcher needs several devices, and weights of routers in fp32 (core/transformer/moe/
    token_dispatcher.py); core 0.14 knows DeepEP as `moe_enable_deepep` alone."""
    script = main("megatron", PIPED, dispatcher="hybridep")
    for words in ("token-dispatcher-type flex", "flex-dispatcher-backend hybridep", "router-dtype fp32"):
        assert f"--moe-{words} " in script
    recipe = main("megatron-bridge", PIPED, dispatcher="deepep")
    assert "cfg.model.moe_flex_dispatcher_backend = 'deepep'\n" in recipe
    assert "cfg.model.moe_token_dispatcher_type = 'flex'\n" in recipe
    recipe = main("nemo", PIPED, dispatcher="deepep")
    assert "moe_enable_deepep = True\n" in recipe
    assert "moe_token_dispatcher_type = 'flex'\n" in recipe
    assert "moe_token_dispatcher_type = 'alltoall'\n" in main("nemo", PIPED, dispatcher="hybridep")
    alone = replace(SHARDED, expert=1)
    assert "--moe-token-dispatcher-type alltoall" in main("megatron", alone, dispatcher="deepep")
    assert "--moe-token-dispatcher-type alltoall" in main("mindspeed", replace(PIPED, zero=1), dispatcher="deepep")


@pytest.mark.parametrize(("change", "able"), [
    ({}, True), ({"full": (12,) * 4}, False), ({"precision": "fp32"}, False), ({"layers": (24,) * 2}, False),
    ({"selective": (12,) * 4, "kept": Kept(but=("moe",))}, False),
])  # fmt: skip
def test_the_exchange_of_experts_overlaps_where_megatron_takes_that(change: dict[str, Any], able: bool) -> None:
    """core/transformer/transformer_config.py, TransformerConfig.__post_init__: overlap_moe_expert_parallel_comm."""
    if "layers" in change:
        change = {**change, "virtual_stages": 1, "schedule": "1f1b", "full": (0,) * 2, "selective": (0,) * 2}
    wanted = nearest("megatron", replace(PIPED, **change))
    script = main("megatron", wanted, overlapped=ALL)
    assert ("--overlap-moe-expert-parallel-comm" in script) == able
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={32 if able else 1}\n" in script
    recipe = main("megatron-bridge", wanted, overlapped=ALL)
    assert ("overlap_moe_expert_parallel_comm=True" in recipe) == able
    job = replace(job_of(wanted, MODEL), overlapped=ALL)
    told = "the exchange of experts overlapped with other work"
    assert (told in priced_only(TARGETS["megatron"], job)) != able
    assert told in priced_only(TARGETS["nemo"], job), "its step does not"


def test_what_is_priced_and_not_switched_on_is_told() -> None:
    job = replace(job_of(SHARDED, MODEL), dispatcher="hybridep", unsaid=("CUDA graphs",))
    once = "a token sent once to each node (DeepEP, HybridEP)"
    assert priced_only(TARGETS["megatron"], job) == ("CUDA graphs",)
    assert priced_only(TARGETS["nemo"], job) == priced_only(TARGETS["deepspeed"], job) == ("CUDA graphs", once)
    assert priced_only(TARGETS["nemo"], replace(job, description=replace(SHARDED, expert=None))) == ("CUDA graphs",)


@pytest.mark.parametrize("engine", RECIPES)
@pytest.mark.parametrize("buckets", [PLAIN.buckets, 2**28])
def test_what_overlaps_in_a_recipe_is_set_up(engine: str, buckets: Any) -> None:
    """NeMo makes the buffers of `tp_comm_overlap` in its callback alone (lightning/pytorch/callbacks/
    megatron_comm_overlap.py); there and in Megatron Bridge (training/comm_overlap.py) buckets are 128 Mi elements, as
    the stack has them, unless told otherwise; both decide what they are not told."""
    wanted = replace(PIPED, update=replace(PLAIN, buckets=buckets))
    recipe = main(engine, wanted, overlapped=ALL)
    own = f", bucket_size={2**26}" if buckets == 2**28 else ""
    told = f"tp_comm_overlap=True, overlap_grad_reduce=True, overlap_param_gather=True{own}"
    made = {"nemo": f"run.Config(MegatronCommOverlapCallback, {told})", "megatron-bridge": f"CommOverlapConfig({told}"}
    assert made[engine] in recipe
    plain = main(engine, PIPED)
    assert "CommOverlap" not in plain
    assert "overlap_grad_reduce = False\n" in plain


@pytest.mark.parametrize("engine", RECIPES)
def test_transfers_of_virtual_stages_overlap_in_a_recipe_as_in_megatron(engine: str) -> None:
    """ModelParallelConfig has overlap_p2p_comm False and batch_p2p_comm True; Megatron-LM's arguments have the opposite
    for virtual stages, and refuse two pipeline ranks without it."""
    found = dict(re.findall(r"\.(\w+_p2p_comm) = (\w+)$", main(engine, PIPED), re.MULTILINE))
    assert found == {"overlap_p2p_comm": "True", "batch_p2p_comm": "False"}
    assert "p2p_comm" not in main(engine, SHARDED)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_nothing_of_nemos_recipe_of_deepseek_v3_is_left(moments: str) -> None:
    """It has moments and gradients in bf16, and callbacks that switch DeepEP and overlaps on
    (collections/llm/recipes/deepseek_v3.py)."""
    d = Description(
        layers=(61,), data=64, expert=64, zero=1, micro_batches=8, full=(61,), selective=(0,), sequence_length=4096,
        update=replace(PLAIN, moment_dtype=moments),
    )  # fmt: skip
    job = Job(model="deepseek-v3", description=d, architecture=latent_architecture("deepseek-v3"), per_node=8)
    recipe = TARGETS["nemo"].write(job)["recipe.py"]
    found = dict(re.findall(r"^recipe\.optim\.config\.(\w+) = (.*)$", recipe, re.MULTILINE))
    narrow = moments == "bf16"
    assert found["use_precision_aware_optimizer"] == str(narrow)
    assert found["main_grads_dtype"] == found["main_params_dtype"] == "torch.float32"
    assert {found[f"exp_avg{sq}_dtype"] for sq in ("", "_sq")} == {"torch.bfloat16" if narrow else "torch.float32"}
    assert "recipe.trainer.callbacks = [run.Config(TimingCallback)]\n" in recipe
    assert "moe_enable_deepep = False\n" in recipe


@pytest.mark.parametrize(("engine", "word", "noted"), [
    ("megatron", "alltoall", False), ("megatron", "flex", True), ("nemo", "alltoall", True), ("nemo", "flex", False),
])  # fmt: skip
def test_another_dispatcher_than_the_priced_one_is_noted(engine: str, word: str, noted: bool) -> None:
    text = main(engine, SHARDED, dispatcher="deepep" if word == "flex" else "")
    reading = TARGETS[engine].read(text, facts_of(nearest(engine, SHARDED), MODEL))
    assert bool([note for note in reading.notes if f"--moe-token-dispatcher-type {word}" in note]) == noted


@pytest.mark.parametrize(("modules", "noted"), [("moe_act", True), ("layernorm moe_act", True), ("layernorm", False)])
def test_recomputed_activations_of_experts_are_noted(modules: str, noted: bool) -> None:
    text = main("megatron", SHARDED) + f"--recompute-granularity selective --recompute-modules {modules}"
    reading = TARGETS["megatron"].read(text, facts_of(nearest("megatron", SHARDED), MODEL))
    assert bool([note for note in reading.notes if "moe_act: priced with activations of experts kept" in note]) == noted


@pytest.mark.parametrize(("engine", "kept"), [("megatron", False), ("nemo", False), ("megatron-bridge", True)])
def test_experts_are_in_no_replicas_up_to_core_0_16(engine: str, kept: bool) -> None:
    """Up to core 0.16 (core/distributed/fsdp/mcore_fsdp_adapter.py, _init_dist_index) the groups of experts are those
    of all weights, if there are replicas; 0.17 has `hybrid_fsdp_expt_group`."""
    for zero, expert, there in ((3, 4, kept), (2, 4, kept), (1, 4, True), (3, 1, True)):
        found = nearest(engine, replace(SHARDED, replicas=2, expert=expert, zero=zero))
        assert (found.replicas, found.expert, found.zero) == (2 if there else 1, expert, zero)
    space = SPACES[engine]
    assert {one.replicated_experts for one in space.settings if one.replicated} == {kept}


@pytest.mark.parametrize("engine", ["megatron", "mindspeed", *RECIPES])
@pytest.mark.parametrize("zero", [1, 3])
def test_sgd_is_not_sharded(engine: str, zero: int) -> None:
    """megatron/core/optimizer/distrib_optimizer.py, DistributedOptimizer.__init__: "Only Adam and HybridDeviceOptimizer
    currently supported"."""
    fp8 = Fp8(recipe="tensorwise", experts=True, gathered=zero == 3 and engine == "megatron")
    wanted = replace(SHARDED, optimizer="sgd", zero=zero, replicas=2, expert=1, fp8=fp8)
    losses = TARGETS[engine].nearest(wanted)
    assert ("ZeRO", "0: its distributed optimizer takes Adam alone") in {(one.what, one.there) for one in losses}
    found = nearest(engine, wanted)
    assert (found.zero, found.replicas, found.fp8.gathered, found.update.gradient_dtype) == (0, 1, False, "mixed")
    text = main(engine, wanted)
    assert re.search(r"use[-_]distributed[-_]optimizer(?! = False)", text) is None
    assert nearest(engine, replace(wanted, optimizer="adamw")).zero > 0
    assert "sgd" not in SPACES[engine].optimizers, "which all have a distributed optimizer"


@pytest.mark.parametrize("engine", ["megatron", "mindspeed", *RECIPES])
def test_samples_divide_over_two_pieces_on_every_device_of_a_context(engine: str) -> None:
    """validate_args: "seq-length should be a multiple of 2 * context-parallel-size", also for Ulysses."""
    wanted = replace(SHARDED, data=2, heads=4, expert=1, zero=1)
    main(engine, replace(wanted, sequence_length=4104))
    with refused(ExportError, "2 x context = 8", 4100, "--seq-len"):  # then a plan is searched for the engine
        TARGETS[engine].nearest(replace(wanted, sequence_length=4100))


def read_from(arguments: str) -> Description:
    text = f"pretrain_gpt.py --bf16 --micro-batch-size 1 {arguments}"
    return TARGETS["megatron"].read(text, Facts(layers=32, devices=8, architecture=None)).description


@pytest.mark.parametrize(("arguments", "words"), [
    ("--context-parallel-size 8 --seq-length 4104 --global-batch-size 1", ("2 x context = 16", 4104)),
    ("--optimizer sgd --use-distributed-optimizer", ("--optimizer sgd", "--use-distributed-optimizer", "Adam")),
    ("--optimizer sgd --use-megatron-fsdp", ("--optimizer sgd", "--use-megatron-fsdp")),
])  # fmt: skip
def test_what_megatron_itself_refuses_is_refused(arguments: str, words: tuple[object, ...]) -> None:
    with refused(ExportError, *words):
        read_from(arguments)


ROUNDS = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"


@pytest.mark.parametrize(("arguments", "words"), [
    ("--global-batch-size 20", (10, "groups of 4")),
    ("--global-batch-size 4", (2, "groups of 4")),
    (f"{GROUP} 5 --global-batch-size 16", (8, f"{GROUP} 5")),  # 5 and 3
    (f"{GROUP} 3 --global-batch-size 24", (12, f"{GROUP} 3")),
    (f"{GROUP} 5 --global-batch-size 30", (15, f"{GROUP} 5", "groups of 4")),  # Megatron-LM takes it, a plan does not
])  # fmt: skip
def test_virtual_stages_take_micro_batches_in_groups(arguments: str, words: tuple[object, ...]) -> None:
    """megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving."""
    with refused(ExportError, "--global-batch-size", *words):
        read_from(f"{ROUNDS} {arguments}")


@pytest.mark.parametrize(("said", "noted"), [("", False), (f"{GROUP} 4", False), (f"{GROUP} 8", True)])
def test_larger_groups_of_micro_batches_are_noted(said: str, noted: bool) -> None:
    text = f"pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 16 {ROUNDS} {said}"
    reading = TARGETS["megatron"].read(text, Facts(layers=32, devices=8, architecture=None))
    assert bool([note for note in reading.notes if note.startswith(f"{GROUP} 8: priced with groups of 4")]) == noted
    assert not reading.unread


@pytest.mark.parametrize("engine", ["megatron", "mindspeed", *RECIPES])
@pytest.mark.parametrize(("chosen", "told"), [(1, True), (8, False)])
def test_a_router_that_takes_one_expert_takes_its_softmax_before(engine: str, chosen: int, told: bool) -> None:
    """TransformerConfig.__post_init__: "Please use --moe-router-pre-softmax when topk is 1"."""
    job = job_of(nearest(engine, replace(SHARDED, zero=1)), MODEL)
    assert job.architecture is not None
    assert job.architecture.experts is not None
    experts = replace(job.architecture.experts, chosen=chosen)
    files = TARGETS[engine].write(replace(job, architecture=replace(job.architecture, experts=experts)))
    assert bool(re.search("moe[-_]router[-_]pre[-_]softmax", files[TARGETS[engine].main])) == told


@pytest.mark.parametrize(("optimizer", "words"), [
    ("sgd", r"nothing was written\. Plan again with plan --for megatron --optimizer adamw$"),
    ("adamw", r"Leave out --nearest, or plan again with plan --for megatron$"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_there_is_told_an_optimizer_that_is_sharded(optimizer: str, words: str) -> None:
    training, price = SimpleNamespace(optimizer=optimizer), SimpleNamespace(peak_bytes=9, capacity_bytes=8)
    found: Any = SimpleNamespace(
        target=TARGETS["megatron"], plan=SimpleNamespace(training=training), prediction=price, fits=False, change="9 B"
    )
    with pytest.raises(InfeasibleError, match=words):
        check_fits(found, "plan.json")
