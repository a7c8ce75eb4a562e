"""What rows of single frameworks mean by their words: InternEvo, Megatron-LM with experts, torchtitan, fms-fsdp."""

from pathlib import Path

import pytest

from hardware_profiles import load_profile, load_software
from planner.validation import read_rows
from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.request.configuration import Run, run_of
from planner.validation.request.decoder import model_of
from planner.validation.spared import Spared
from planner.validation.stack.network import stated_bandwidth
from planner.validation.stack.states import states_of
from tests.unit.validation.runs import machine, one, row, write

EXPERTS = {"arch": "moe", "n_experts": "8", "topk": "2", "moe_ffn_hidden": "512", "n_params_B": "", "recompute": "none"}
SIXTEEN = {"n_devices": "16", "tp": "2", "pp": "2", "dp": "4"}


def run(folder: Path, **changes: str) -> Run:
    return run_of(one(folder, **changes))


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"date": "2024-06", "ep": "4"}, False),
        ({"date": "2024-06", "ep": "8"}, True),  # more than data x context
        ({"date": "2025-07", "ep": "4"}, True),
        ({"date": "2025-07", "ep": "4", "other_flags": "ETP=2"}, False),
        ({"date": "2025-07", "ep": "4", "moe_ffn_hidden": "4096"}, False),  # wider than the model
        ({"date": "2025-07", "ep": "4", "profile": "ascend-910b-64gb", "device": ""}, False),
    ],
)
def test_experts_are_whole_where_recipes_have_them_so(tmp_path: Path, changes: dict[str, str], whole: bool) -> None:
    found = run(tmp_path, **{**EXPERTS, **SIXTEEN, **changes}).pinned
    assert (found.expert, found.whole_experts) == (int(changes["ep"]), whole)


@pytest.mark.parametrize(
    ("arch", "detail", "spared"),
    [
        ("moe", "moe_act layernorm", Spared(remade=("experts", "normalisation"))),
        ("moe", "modules=[layernorm moe]", Spared(but=("moe",), remade=("normalisation",))),
        ("moe", "core_attn", Spared(but=("attention",))),
        ("dense", "modules=[mlp]", Spared(but=("mlp",))),
        ("Megatron Bridge", "mlp", Spared(but=("mlp",))),
    ],
)
def test_modules_by_their_names_in_megatron(tmp_path: Path, arch: str, detail: str, spared: Spared) -> None:
    model = EXPERTS if arch == "moe" else {"arch": "dense", "stack": "" if arch == "dense" else arch}
    found = run(tmp_path, **{**model, "recompute": "selective", "recompute_detail": detail})
    assert found.spared == spared
    assert found.pinned.recompute == ("selective" if spared.but else "none")


@pytest.mark.parametrize(
    ("modules", "again"),
    [
        ("core_attn", "attention"),
        ("layernorm moe_act", "elementwise, normalisation"),
        ("mla_act", "the fastest choice of operators"),  # only a part of it is the name of a module
    ],
)
def test_modules_that_are_classes_of_operators(tmp_path: Path, modules: str, again: str) -> None:
    found = run(tmp_path, arch="dense", recompute="selective", recompute_detail=f"modules=[{modules}]")
    assert f"selective recomputation: of {again}" in found.notes


@pytest.mark.parametrize(
    ("changes", "spared"),
    [
        ({"other_flags": "cpu_offloading_num_layers=3"}, Spared(offloaded=3)),
        ({"other_flags": "activations of 2 layers offloaded"}, Spared(offloaded=2)),
        ({"other_flags": "cpu-offloading-num-layers 0"}, Spared()),
        ({"other_flags": "cpu_offloading_num_layers=3", "recompute": "full"}, Spared()),  # beside recomputation: unread
    ],
)
def test_blocks_whose_activations_wait_on_the_host(tmp_path: Path, changes: dict[str, str], spared: Spared) -> None:
    assert run(tmp_path, **{"recompute": "none", **changes}).spared == spared


def test_each_tensor_parallel_device_has_keys_of_its_own_where_there_are_fewer(tmp_path: Path) -> None:
    few = {"n_heads": "48", "hidden": "6144", "ffn_hidden": "24576", "n_kv_heads": "1", "n_params_B": "", "arch": "gqa"}
    for tensor, keys in (("4", 4), ("1", 1)):
        row = one(tmp_path, **few, tp=tensor)
        assert model_of(row, []).kv_heads == keys


@pytest.mark.parametrize(
    ("changes", "vocabulary"),
    [
        ({"stack": "FSDP"}, 50257),
        ({"stack": "FSDP", "vocab": "32000"}, 32000),
        ({"stack": "FSDP", "vocab": "50264"}, 50304),  # rows of 16 bytes
        ({"stack": "FSDP", "compile": "True", "date": "2024-06"}, 50304),  # torch.compile pads products since 2.2
        ({"stack": "FSDP", "compile": "True", "date": "2023-04"}, 50257),
        ({"stack": "DeepSpeed", "other_flags": "Hugging Face transformers"}, 50257),
        ({"stack": "DeepSpeed", "other_flags": "Megatron-DeepSpeed"}, 50304),
        ({"stack": "Megatron-LM"}, 50304),
    ],
)
def test_a_vocabulary_that_nothing_pads(tmp_path: Path, changes: dict[str, str], vocabulary: int) -> None:
    alone = {"tp": "1", "pp": "1", "dp": "8", "n_params_B": ""}
    assert run(tmp_path, **alone, **changes).job.model.vocabulary == vocabulary


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("deepep", "once"),
        ("no deepep", "alltoall"),
        ("", "alltoall"),
        ("allgather dispatcher", "allgather"),
        ("moe-token-dispatcher-type=allgather", "allgather"),
        ("alltoall dispatcher; kvallgather_cp_algo", "alltoall"),
    ],
)
def test_tokens_that_are_sent_once_to_a_node(tmp_path: Path, flags: str, dispatcher: str) -> None:
    found, notes = machine(tmp_path, 0, 8, **EXPERTS, date="2025-07", other_flags=flags)
    assert found.software.dispatcher == dispatcher
    assert ("rows are sent once to a node, whichever experts they go to" in notes) == (dispatcher == "once")
    assert ("all devices that share experts gather each other's tokens" in notes) == (dispatcher == "allgather")


def test_mindspeed_has_its_own_dispatchers(tmp_path: Path) -> None:
    flags = {"stack": "MindSpeed-LLM", "other_flags": "moe-token-dispatcher-type=allgather"}
    found, _ = machine(tmp_path, 0, 8, **{**EXPERTS, **flags}, profile="ascend-910b-64gb", date="2025-07")
    assert (found.software.name, found.software.dispatcher) == ("mindspeed", "alltoall")


def test_zero1_of_internevo_is_within_a_node(tmp_path: Path) -> None:
    wide = {"n_devices": "32", "tp": "1", "pp": "1", "dp": "32", "source": "InternEvo"}
    assert run(tmp_path, **wide, other_flags="zero1=8").pinned.replicas == 4
    assert run(tmp_path, **wide, other_flags="zero1=64").pinned.replicas is None
    assert run(tmp_path, **wide, other_flags="zero1=-1").pinned.replicas is None
    assert run(tmp_path, **{**wide, "source": "paper"}, other_flags="zero1=8").pinned.replicas is None
    found, _ = machine(tmp_path, 0, 32, **wide, date="2023-11", flash_attention="True")
    assert (found.software.name, found.software.attention) == ("internevo", "flash2")


@pytest.mark.parametrize(
    ("profile", "text", "each"),
    [
        ("h100-80gb", "800Gbps (published)", 12.5e9),  # no device has such a port: a node's
        ("h100-80gb", "400Gbps", None),
        ("a100-80gb", "400Gbps", 6.25e9),
        ("a100-80gb", "400Gbps inter-node", 6.25e9),
        ("b200-180gb", "800Gbps", None),
    ],
)
def test_a_bare_bandwidth_beyond_any_port_is_of_a_node(
    tmp_path: Path, profile: str, text: str, each: float | None
) -> None:
    assert stated_bandwidth(one(tmp_path, profile=profile, inter_bw=text, devices_per_node="8")) == each


def test_torchtitan_gathers_weights_once_with_a_pipeline(tmp_path: Path) -> None:
    sharded = {"zero_stage": "fsdp2 (3)", "recompute": "none"}
    assert run(tmp_path, **sharded, other_flags="torchtitan").pinned.zero == 1
    assert run(tmp_path, **sharded, other_flags="").pinned.zero == 3
    assert run(tmp_path, **sharded, other_flags="torchtitan", pp="1", dp="4").pinned.zero == 3


@pytest.mark.parametrize(
    ("source", "date", "loss"),
    [
        ("torchtitan", "2024-03", "whole"),
        ("torchtitan", "2024-10-22", "in place"),
        ("torchtitan", "2024-12", "whole"),
        ("torchtitan", "2025-04", "in place"),
        ("torchtitan", "2024-11", "in place"),
        ("paper", "2024-12", "in place"),
        ("paper", "2024-03", "in place"),
    ],
)
def test_the_loss_of_torchtitan_was_not_compiled_for_some_months(
    tmp_path: Path, source: str, date: str, loss: str
) -> None:
    found, _ = machine(tmp_path, zero=3, zero_stage="3", compile="True", source=source, date=date)
    assert (found.software.name, found.software.loss) == ("fsdp-compiled", loss)


def test_the_loss_of_pytorch_holds_three_copies_of_the_logits(tmp_path: Path) -> None:
    """And four where two tensor parallel devices share out the words."""
    sharded = {"zero_stage": "3", "seq_len": "512", "vocab": "50257", "micro_batch": "2"}
    eager, compiled = (machine(tmp_path, 3, 8, **sharded, compile=word)[0] for word in ("False", "True"))
    alone = machine(tmp_path, 3, 8, **sharded, tp="1", dp="4", compile="False")[0]
    logits = 4 * 2 * 512 * 50257
    assert alone.software.buffers == load_software("fsdp").buffers + logits
    assert eager.software.buffers == load_software("fsdp").buffers + 2 * logits / 2
    assert compiled.software.buffers == load_software("fsdp-compiled").buffers
    assert (eager.software.composed_loss, compiled.software.composed_loss) == ("pytorch", "inductor")


@pytest.mark.parametrize(
    ("source", "date", "foreach", "repeats"),
    [
        ("torchtitan benchmarks", "2024-12", True, True),
        ("torchtitan benchmarks", "2025-02-24", False, True),
        ("torchtitan benchmarks", "2025-02", False, True),
        ("torchtitan benchmarks", "2026-02", False, False),
        ("torchtitan benchmarks", "", False, False),
        ("paper", "2024-12", False, False),
    ],
)
def test_what_the_model_and_the_optimizer_of_torchtitan_did_until_then(
    tmp_path: Path, source: str, date: str, foreach: bool, repeats: bool
) -> None:
    found, _ = machine(tmp_path, zero=3, zero_stage="3", compile="True", source=source, date=date)
    assert (found.software.foreach, found.software.repeats_keys) == (foreach, repeats)


def test_megatron_computes_its_loss_kernel_by_kernel(tmp_path: Path) -> None:
    changes = {"date": "2024-06", "flash_attention": "True"}
    assert machine(tmp_path, 0, 8, **changes)[0].software.composed_loss
    for flags in ("cross-entropy-loss-fusion", "cross-entropy-fusion-impl te", "in-house framework in eager PyTorch"):
        assert not machine(tmp_path, 0, 8, **changes, other_flags=flags)[0].software.composed_loss
    assert not load_software("megatron").composed_loss  # plans: a stack is told so by a row alone


@pytest.mark.parametrize(
    ("flags", "name"),
    [("Megatron-LM; Megatron FSDP", "megatron"), ("use_megatron_fsdp", "megatron"), ("Megatron-LM; FSDP2", "fsdp")],
)
def test_megatrons_own_fsdp_has_its_layers(tmp_path: Path, flags: str, name: str) -> None:
    found, _ = machine(tmp_path, 3, 8, zero_stage="3", date="2025-07", flash_attention="True", other_flags=flags)
    assert found.software.name == name


def test_a_compiled_run_of_fsdp_by_name(tmp_path: Path) -> None:
    named = {"zero_stage": "3", "stack": "FSDP2", "other_flags": "Hugging Face transformers"}
    compiled, _ = machine(tmp_path, 3, 8, **named, compile="True")
    assert (compiled.software.name, compiled.software.composed_norms) == ("fsdp-compiled", False)
    assert compiled.software.fuses_chains
    for model, real in (("Llama3-8B", False), ("DeepSeek-V3", False), ("Qwen3-32B", True), ("GPT-OSS-20B", True)):
        titan = {**named, "other_flags": "torchtitan", "model": model}  # complex numbers have no code of inductor
        assert machine(tmp_path, 3, 8, **titan, compile="True")[0].software.fuses_chains is real, model
    assert machine(tmp_path, 3, 8, **named, compile="False")[0].software.name == "fsdp"


def test_sinks_are_not_slow_in_flex_attention(tmp_path: Path) -> None:
    model = {**EXPERTS, "model": "GPT-OSS-20B"}
    assert machine(tmp_path, 0, 8, **model, other_flags="FlexAttention")[0].software.sinks == 1
    assert machine(tmp_path, 0, 8, **model)[0].software.sinks > 1


@pytest.mark.parametrize(("beyond", "spared"), [(1.0, 1), (1.0833, 1), (1.1667, 2), (1.3333, None)])
def test_the_share_of_blocks_that_are_run_again_by_hfu(tmp_path: Path, beyond: float, spared: int | None) -> None:
    """A forward pass is a third of a step: HFU of 13/12 of MFU is a quarter of the blocks run again."""
    parameters, layers, hidden, sequence = 0.1024e9, 4, 1024, 512
    flops = (6 * parameters + 12 * layers * hidden * sequence) * sequence * 16 / 8
    mfu = flops / 0.1 / load_profile("a100-80gb").device.peak("bf16")
    row = {"tp": "1", "pp": "1", "dp": "8", "zero_stage": "3", "micro_batch": "2", "source": "fms-fsdp"}
    found = run(
        tmp_path, **row, recompute="selective", recompute_detail="selective", notes=f"HFU {mfu * beyond:.6f}; seq 4096"
    )
    assert found.spared == (Spared() if spared is None else Spared(recomputed=spared))
    assert found.pinned.recompute == ("full" if spared is None else "none")


@pytest.mark.slow
def test_gradients_of_a_run_are_read_for_their_norm_and_scaled(tmp_path: Path) -> None:
    """Three passes over fp32 gradients, 12 bytes a parameter, beside the 30 of the update."""
    none, clipped = (evaluate_rows([one(tmp_path, other_flags=flags)])[0] for flags in ("clip_grad=0.0", ""))
    update = [dict(found.time)["optimizer"] for found in (none, clipped)]
    assert 1.3 < update[1] / update[0] < 42 / 30  # launches are the same


@pytest.mark.parametrize(
    ("flags", "stack", "clips"),
    [
        ("", "", True),
        ("max_grad_norm=0", "", False),
        ("max_grad_norm 0.0", "", False),
        ("clip_grad=1.0", "", True),
        ("max_grad_norm=10; gradient_clip_val=1.0", "", True),
        ("no QK-clipping; moe_softmax_norm=False", "", True),
        ("Axolotl; accelerate launch", "Hugging Face", True),
        ("no gradient clipping", "", False),
        ("Transformer Engine TransformerLayer", "Transformer Engine", False),
        ("Transformer Engine; Hugging Face accelerate; clip_grad_norm 1.0", "Transformer Engine", True),
        ("Hugging Face Trainer; accelerate", "Hugging Face", True),
        ("Transformer Engine", "Megatron-LM", True),
    ],
)
def test_trainers_clip_gradients_and_layers_do_not(tmp_path: Path, flags: str, stack: str, clips: bool) -> None:
    row = one(tmp_path, other_flags=flags, stack=stack, date="2024-06")
    assert (states_of(row, []).clip_norm is not None) == clips


@pytest.mark.slow
@pytest.mark.thorough
def test_weights_are_shared_out_where_devices_do_not_divide_their_dims(tmp_path: Path) -> None:
    """On 96 devices a 34B has a 96th of all states on each, as FSDP cuts or pads them, and gathers all weights twice a
    micro-batch: about 33.7e9 x 16 / 96 bytes, and no share of a power of two of the devices."""
    (found,) = evaluate_rows(
        [
            one(
                tmp_path,
                **{"profile": "h100-80gb", "device": "H100", "n_layers": "48", "hidden": "8192", "ffn_hidden": "22016"},
                **{"n_heads": "64", "n_kv_heads": "8", "head_dim": "128", "vocab": "32000", "n_params_B": "33.7"},
                **{"arch": "gqa", "seq_len": "4096", "n_devices": "96", "devices_per_node": "8", "dp": "96", "tp": "1"},
                **{"pp": "1", "zero_stage": "3", "micro_batch": "2", "global_batch": "192", "recompute": "full"},
                **{"inter_bw": "800Gb/s per node", "iter_time_s": "5.285", "peak_mem_GB": "", "date": "2024-02"},
            )
        ]
    )
    assert found.error is None
    assert found.needed_bytes is not None
    assert found.capacity_bytes is not None
    assert found.needed_bytes < found.capacity_bytes
    through_a_node = 2 * (2 * 33.7e9) * (11 / 12) / 100e9  # both gathers of a micro-batch, seconds
    assert dict(found.time)["parameter gathering"] > through_a_node / 2  # of which half is hidden


def test_a_row_on_an_unknown_machine_ends_no_other_row(tmp_path: Path) -> None:
    """Also where its recomputation goes by HFU and the rate of its machine."""
    sizes = {"tp": "1", "pp": "1", "dp": "8", "zero_stage": "3", "vpp": "1"}
    by_rate = {"source": "fms-fsdp", "recompute": "selective", "notes": "HFU 0.5", "profile": "nosuch", "device": ""}
    rows = (row(**sizes, id="none", recompute="none"), row(**sizes, id="unknown", **by_rate))
    known, unknown = evaluate_rows(read_rows(write(tmp_path / "runs.csv", *rows)))
    assert known.error is None
    assert "no hardware profile 'nosuch'" in (unknown.error or "")
