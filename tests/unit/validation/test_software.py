"""The stack and the network that a row tells of."""

import csv
from itertools import product
from pathlib import Path

import pytest

from hardware_profiles import Cluster, load_profile, load_software
from planner.errors import RequestError
from planner.validation import read_rows
from planner.validation.evaluate import gradient_dtype
from planner.validation.losses import gathers_logits
from planner.validation.network import stated_bandwidth
from planner.validation.recipes import release_of
from planner.validation.rows import Row
from planner.validation.software import machine_of_run
from tests.unit.validation.runs import row


def one(folder: Path, **changes: str) -> Row:
    values = row(**changes)
    path = folder / "runs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values))
        writer.writeheader()
        writer.writerow(values)
    (found,) = read_rows(path)
    return found


def machine(folder: Path, zero: int = 0, devices: int = 8, **changes: str) -> tuple[Cluster, list[str]]:
    notes: list[str] = []
    return machine_of_run(one(folder, **changes), devices, zero, notes), notes


@pytest.mark.parametrize(
    ("zero", "changes", "stack"),
    [
        (0, {"date": "2021-04", "flash_attention": "False"}, "megatron-2021"),
        (0, {"date": "2022-06", "flash_attention": "", "stack": "Megatron-LM"}, "megatron-2021"),
        (0, {"date": "2022-06", "flash_attention": "True", "stack": "Megatron-LM"}, "megatron"),
        (0, {"date": "2022-06", "flash_attention": "", "stack": "megatron"}, "megatron"),
        (0, {"date": "2024-06", "flash_attention": "", "stack": "Megatron-LM"}, "megatron"),
        (0, {"date": "2024-06", "flash_attention": "True"}, "megatron"),
        (1, {"other_flags": "Megatron-DeepSpeed; 1F1B"}, "deepspeed"),
        (3, {"date": "2023-11", "compile": "False"}, "fsdp"),
        (3, {"date": "2024-12", "compile": "True"}, "fsdp-compiled"),
        (1, {"source": "NeMo 24.07", "flash_attention": "True"}, "nemo"),
        (1, {"profile": "ascend-910b-64gb", "flash_attention": "True"}, "mindspeed"),
        (1, {"profile": "ascend-910b-64gb", "source": "mindformers model cards (r1.3.0)"}, "mindformers"),
        (1, {"source": "NeMo 24.07", "stack": "deepspeed"}, "deepspeed"),
        (1, {"notes": "plain Megatron-LM, not NeMo", "flash_attention": "True"}, "megatron"),
        (1, {"notes": "other_flags: TE, attention-softmax-in-fp32", "flash_attention": "True"}, "megatron"),
        (1, {"notes": "run without the NeMo container; NeMo 2 recipe", "flash_attention": "True"}, "nemo"),
        (3, {"source": "Megatron-Bridge perf archive 26.04 NeMo Container"}, "nemo"),
        (1, {"other_flags": "Megatron-DeepSpeed", "notes": "beside NeMo", "flash_attention": "True"}, "deepspeed"),
        (3, {"stack": "DeepSpeed"}, "deepspeed-zero3"),
        (1, {"stack": "Megatron-Core 0.9"}, "megatron"),
        (1, {"stack": "PaddlePaddle"}, "paddle"),
        (0, {"stack": "nanotron"}, "megatron"),
        (0, {"stack": "Transformer Engine"}, "megatron"),
        (0, {"stack": "Hugging Face transformers", "source": "Transformer Engine tutorial"}, "fsdp"),
        (1, {"stack": "NeMo 2.0"}, "nemo"),
        (3, {"stack": "torchtitan", "compile": "True"}, "fsdp-compiled"),
        (2, {"zero_stage": "SHARD_GRAD_OP"}, "fsdp"),
        (3, {"source": "From DeepSpeed to FSDP and back", "other_flags": "FSDP full sharding"}, "fsdp"),
        (3, {"source": "From DeepSpeed to FSDP and back", "other_flags": "DeepSpeed ZeRO-3"}, "deepspeed-zero3"),
        (3, {"other_flags": "DeepSpeed ZeRO-3, not FSDP"}, "deepspeed-zero3"),
    ],
)
def test_stacks(tmp_path: Path, zero: int, changes: dict[str, str], stack: str) -> None:
    cluster, notes = machine(tmp_path, zero, **changes)
    assert cluster.software.name == stack
    assert any(note.startswith(f"taken for {stack}, attention") for note in notes)


BRIDGE = "Megatron-Bridge perf archive {} NeMo Container"
EXPERTS = {"arch": "moe", "precision": "fp8", "date": "2025-09..2026-07"}


@pytest.mark.parametrize(
    ("release", "changes", "stack"),
    [
        ("26.04.01", {"profile": "gb300-288gb"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb"}, "nemo-2606"),
        ("26.08", {"profile": "b300-288gb"}, "nemo-2606"),
        ("26.06", {"profile": "b300-288gb", "model": "GPT OSS 120B"}, "nemo"),
        ("26.06", {"profile": "gb200-186gb", "model": "GPT OSS 120B"}, "nemo-2606"),
        ("26.06", {"profile": "b200-180gb"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb", "precision": "bf16"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb", "arch": "dense"}, "nemo"),
    ],
)
def test_recipes_fuse_kernels_of_experts_from_a_release_on(
    tmp_path: Path, release: str, changes: dict[str, str], stack: str
) -> None:
    cluster, _ = machine(tmp_path, 1, **{**EXPERTS, **changes}, source=BRIDGE.format(release))
    assert cluster.software.name == stack


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"source": BRIDGE.format("26.04"), "date": "2026-04"}, (2, 2, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "precision": "fp8"}, (2, 4, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "zero_stage": "3"}, (2, 4, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "model": "DeepSeekV3"}, (2, 2, 2)),
        ({"source": "NVIDIA DGXC benchmarking recipes v24.11.1", "date": "2024-11"}, (2, 2, 4)),
        ({"source": "NVIDIA DGXC benchmarking recipes v25.05", "date": "2025-05"}, (2, 4, 4)),
        ({"notes": "NeMo"}, (4, 4, 4)),
        ({"other_flags": "NeMo; grad_sync_dtype: bf16"}, (2, 4, 4)),
        ({"source": "NeMo 24.07", "date": "2024-07", "other_flags": "grad_reduce_in_fp32=True"}, (4, 4, 4)),
        ({"other_flags": "grad-reduce-in-bf16"}, (2, 4, 4)),
    ],
)
def test_what_recipes_keep_in_bf16(tmp_path: Path, changes: dict[str, str], stored: tuple[int, int, int]) -> None:
    """Gradients, the master weight beside the weight itself, and moments."""
    own = machine(tmp_path, 1, **{"flash_attention": "True", "other_flags": "NeMo", **changes})[0].software.stored
    assert (own.bf16, own.master, own.moment) == stored


@pytest.mark.parametrize(
    ("release", "model", "profile", "dispatcher", "graphs"),
    [
        ("25.09", "DeepSeekV3", "gb200-186gb", "alltoall", "none"),
        ("25.09", "DeepSeekV3", "h100-80gb", "once", "none"),
        ("25.11", "DeepSeekV3", "gb200-186gb", "once", "router"),
        ("25.11", "Qwen3_235B_a22B", "b200-180gb", "alltoall", "none"),
        ("26.02", "Qwen3_30B_a3B", "b300-288gb", "once", "router"),
        ("26.04.01", "DeepSeekV3", "gb300-288gb", "once", "attention"),
        ("26.04.01", "GPT OSS 120B", "h100-80gb", "alltoall", "none"),
        ("26.04.01", "Mixtral 8x7B", "gb300-288gb", "once", "none"),
    ],
)
def test_how_recipes_send_rows_and_what_they_graph(
    tmp_path: Path, release: str, model: str, profile: str, dispatcher: str, graphs: str
) -> None:
    known = {**EXPERTS, "profile": profile, "model": model, "source": BRIDGE.format(release)}
    software = machine(tmp_path, 1, **known)[0].software
    assert (software.dispatcher, software.graphs) == (dispatcher, graphs)
    for flags, told in (("moe_token_dispatcher_type: alltoall", "alltoall"), ("flex dispatcher, hybridep", "once")):
        assert machine(tmp_path, 1, **known, other_flags=flags)[0].software.dispatcher == told


def test_recipes_before_megatron_bridge_graph_whole_layers_on_blackwell(tmp_path: Path) -> None:
    known = {**EXPERTS, "date": "2025-05", "other_flags": "NeMo framework recipe", "model": "Grok1 314b"}
    for profile, graphs in (("gb200-186gb", "step"), ("h100-80gb", "none")):
        software = machine(tmp_path, 1, **known, profile=profile)[0].software
        assert (software.dispatcher, software.graphs) == ("alltoall", graphs)


def test_mindspeed_sorts_rows_element_by_element_before_2025(tmp_path: Path) -> None:
    known = {"arch": "moe", "profile": "ascend-910b-64gb", "flash_attention": "True"}
    assert machine(tmp_path, **known, date="2024-06")[0].software.sorts_elements
    assert not machine(tmp_path, **known, date="2025-06")[0].software.sorts_elements
    flags = "moe-token-dispatcher-type=alltoall"
    assert not machine(tmp_path, **known, date="2024-06", other_flags=flags)[0].software.sorts_elements


@pytest.mark.parametrize(
    ("release", "slow"), [("25.11", True), ("26.04", True), ("26.06", False), ("26.06.01", True), ("26.08", False)]
)
def test_learned_sinks_are_slow_in_some_releases(tmp_path: Path, release: str, slow: bool) -> None:
    known = {**EXPERTS, "profile": "gb300-288gb", "model": "GPT OSS 120B"}
    software = machine(tmp_path, 1, **known, source=BRIDGE.format(release))[0].software
    assert software.has_sinks
    assert (software.sinks > 1) == slow
    other = {**known, "model": "Qwen3_30B_a3B"}
    assert not machine(tmp_path, 1, **other, source=BRIDGE.format(release))[0].software.has_sinks


def test_a_release_is_named_or_the_month_of_the_date(tmp_path: Path) -> None:
    assert release_of(one(tmp_path, source="NeMo Container")) == ""
    assert release_of(one(tmp_path, source="a table", date="2026-08")) == "26.08"
    assert release_of(one(tmp_path, source=BRIDGE.format("26.06.01"), date="2025-09..2026-07")) == "26.06.01"


def test_what_models_and_dtypes_say_of_kernels(tmp_path: Path) -> None:
    assert machine(tmp_path, model="Mistral-7B")[0].software.window == 4096
    assert machine(tmp_path, model="Mistral-7B-v0.3")[0].software.window == 0
    known = {"precision": "fp8", "date": "2025-06", "compile": "True"}
    assert machine(tmp_path, 3, **known, precision_detail="float8 rowwise")[0].software.gained < 1
    assert machine(tmp_path, 3, **known, precision_detail="float8 tensorwise")[0].software.gained == 1


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({"flash_attention": "False"}, "unfused"),
        ({"flash_attention": "True", "date": "2023-11"}, "flash1"),
        ({"flash_attention": "True", "date": "2024-03"}, "flash2"),
        ({"flash_attention": "True", "date": "2024-03", "precision": "fp32"}, "unfused"),  # FlashAttention has 16 bits
        ({"flash_attention": "True", "date": "2025-03"}, "best"),
        ({"flash_attention": "SDPA FA2", "date": "2025-03"}, "flash2"),
        ({"flash_attention": "FA3", "date": "2024-03"}, "best"),
        ({"flash_attention": "True", "date": "2023-11", "profile": "b200-180gb"}, "best"),  # has no older kernels
        ({"flash_attention": "", "other_flags": "Megatron-DeepSpeed", "date": "2024-09"}, "unfused"),
    ],
)
def test_attention_kernels_by_name_or_date(tmp_path: Path, changes: dict[str, str], attention: str) -> None:
    assert machine(tmp_path, **changes)[0].software.attention == attention


@pytest.mark.parametrize("flag", ["use-mc2", "use-ascend-mc2"])
def test_mc2_hides_collectives_of_tensor_parallelism(tmp_path: Path, flag: str) -> None:
    known = {"profile": "ascend-910b-64gb", "flash_attention": "True"}
    assert machine(tmp_path, **known)[0].software.hidden.tensor == 0
    assert machine(tmp_path, **known, other_flags=f"{flag}; use-fused-rmsnorm")[0].software.hidden.tensor > 0


def test_flags_name_what_is_overlapped(tmp_path: Path) -> None:
    flags = "use-fused-rmsnorm; overlap-grad-reduce; no-gradient-accumulation-fusion"
    software = machine(tmp_path, other_flags=flags)[0].software
    assert (software.hidden.tensor, software.hidden.gathers) == (0.0, 0.0)
    assert software.hidden.reductions > 0.5
    assert software.accumulates
    assert machine(tmp_path, precision="fp8", profile="h100-80gb")[0].software.products == "fp8"


@pytest.mark.parametrize(
    ("text", "per_device"),
    [
        ("8x200Gb/s HDR IB per node (Selene, published)", 25e9),
        ("4 Omni-Path links per node (published); 100Gb/s each (standard)", 6.25e9),
        ("400Gb/s per GPU (standard)", 50e9),
        ("400Gb/s RDMA per GPU (published)", 50e9),
        ("1600 Gbps node-node interconnect (RoCE)", 25e9),
        ("800Gb/s per node (vTrain config)", 12.5e9),
        ("3200Gb/s EFA per node", 50e9),
        ("3.2Tbps RoCE per node", 50e9),
        ("400Gb/s NIC inter-node", None),
        ("400Gbps (published)", 6.25e9),
        ("200Gbps (published)", None),
        ("n/a (single node)", None),
        ("", None),
    ],
)
def test_networks_as_stated(tmp_path: Path, text: str, per_device: float | None) -> None:
    found = one(tmp_path, inter_bw=text, devices_per_node="8")
    assert stated_bandwidth(found) == per_device
    cluster, notes = machine(tmp_path, devices=16, inter_bw=text, devices_per_node="8")
    expected = load_profile("a100-80gb").levels[-1].bandwidth if per_device is None else per_device
    assert cluster.levels[-1].bandwidth == pytest.approx(expected)
    assert ("network as the row states it" in notes) == (per_device is not None)
    unclear = text not in ("", "n/a (single node)") and per_device is None
    assert any(note.startswith("network as the profile has it") for note in notes) == unclear


def test_links_inside_a_node(tmp_path: Path) -> None:
    cluster, _ = machine(tmp_path, intra_bw="NVLink, 4 inter-gpu connects per GPU (published)")
    assert cluster.levels[0].bandwidth == 100e9


def test_products_in_fp8_of_transformer_engine_keep_their_operands_so(tmp_path: Path) -> None:
    llama = {"vocab": "128256", "hidden": "4096", "n_params_B": "8.03"}
    engine, _ = machine(tmp_path, 1, notes="TE", precision="fp8", flash_attention="True", **llama)
    assert engine.software.keeps_fp8
    blocks = 1 - 2 * 128256 * 4096 / 8.03e9  # embedding and head stay in 16 bits
    assert engine.software.stored.beside == pytest.approx(2 * blocks)  # as it is and transposed, in fp8
    recipe, _ = machine(tmp_path, 1, source=BRIDGE.format("26.04"), precision="fp8", precision_detail="mxfp8")
    assert recipe.software.stored.beside == 0.0
    assert 0 < recipe.software.gained < 1
    wide, _ = machine(tmp_path, 1, source=BRIDGE.format("26.04"))
    assert not wide.software.keeps_fp8


@pytest.mark.parametrize(
    ("date", "stack", "accumulates", "loss"),
    [
        ("2021-04", "megatron-2021", True, "in place"),
        ("2022-05", "megatron-2021", False, "in place"),
        ("2023-11", "megatron", False, "whole"),
        ("2024-06", "nemo", False, "whole"),
        ("2024-07", "megatron", False, "in place"),
    ],
)
def test_megatron_is_that_of_its_time(tmp_path: Path, date: str, stack: str, accumulates: bool, loss: str) -> None:
    software = machine(tmp_path, 1, date=date, stack=stack, flash_attention="True")[0].software
    assert (software.name, software.accumulates, software.loss) == (stack, accumulates, loss)


NEMO_1 = {"stack": "nemo", "date": "2024-05", "hidden": "64", "vocab": "1000", "n_params_B": "0.1", "n_layers": "24"}
LAYER = (100e6 - 2 * 64 * 1000) / 24


@pytest.mark.parametrize(
    ("changes", "parameters", "per_device"),
    [
        ({"stack": "megatron", "date": "2024-03"}, 40e6, 0),
        ({"stack": "megatron", "date": "2024-04"}, 40e6, 1e6),
        ({"stack": "megatron"}, 40e6, 1e6),
        ({"stack": "nemo", "date": "2024-09"}, 2**27, 0),
        ({"stack": "nemo"}, 2**27, 0),
        ({**NEMO_1, "tp": "1", "pp": "1"}, LAYER, 0),
        ({**NEMO_1, "tp": "4", "pp": "2"}, LAYER / 4, 0),
        ({**NEMO_1, "tp": "4", "pp": "2", "vpp": "3"}, LAYER * 4 / 4, 0),
        ({**NEMO_1, "date": "2024-10", "source": "MLPerf Training v4.1", "tp": "1"}, LAYER, 0),
        ({**NEMO_1, "arch": "moe"}, 2**27, 0),
    ],
)
def test_buckets_are_those_of_their_time(
    tmp_path: Path, changes: dict[str, str], parameters: float, per_device: float
) -> None:
    """Of NeMo 1 a layer, or the layers of a virtual stage."""
    software = machine(tmp_path, 1, flash_attention="True", **changes)[0].software
    assert (software.bucket_parameters, software.bucket_per_device) == (round(parameters), per_device)


@pytest.mark.parametrize(
    ("changes", "composed"),
    [
        ({"date": "2021-04", "flash_attention": "False"}, True),
        ({"date": "2024-07"}, True),
        ({"date": "2024-07", "other_flags": "cross-entropy-loss-fusion"}, False),
        ({"date": "2024-07", "other_flags": "in-house framework in eager PyTorch"}, False),
        ({"date": "2024-07", "other_flags": "nanotron in eager PyTorch"}, True),
        ({"other_flags": "Megatron-DeepSpeed"}, False),
    ],
)
def test_megatron_and_what_has_its_loss_compute_it_kernel_by_kernel(
    tmp_path: Path, changes: dict[str, str], composed: bool
) -> None:
    """What Megatron-DeepSpeed takes for it is in its `passes`, which were fitted."""
    assert machine(tmp_path, 1, **changes)[0].software.composed_loss == ("megatron" if composed else "")


def test_torchtitan_says_what_it_hides_and_gathers(tmp_path: Path) -> None:
    plain, _ = machine(tmp_path, 3, precision="fp8", other_flags="vanilla TP")
    found, _ = machine(tmp_path, 3, precision="fp8", other_flags="Float8 + async TP")
    assert (plain.software.hidden.tensor, plain.software.gathers_narrow) == (0.0, False)
    assert found.software.hidden.tensor > 0
    assert found.software.gathers_narrow
    assert found.software.hidden.gathers == plain.software.hidden.gathers
    denied, _ = machine(tmp_path, 3, precision="fp8", other_flags="no async-tp; without float8")
    assert (denied.software.hidden, denied.software.gathers_narrow) == (plain.software.hidden, False)
    assert (plain.software.rearranges, found.software.rearranges, denied.software.rearranges) == (True, False, True)


@pytest.mark.parametrize(
    ("detail", "narrow"),
    [("float8 tensorwise", True), ("float8 rowwise", False), ("mxfp8", False), ("fp8 (TE)", False)],
)
def test_torchtitan_gathers_inputs_in_fp8_with_one_scale_for_each_tensor(
    tmp_path: Path, detail: str, narrow: bool
) -> None:
    """docs/float8.md of torchtitan: "float8 all-gather for TP (by default for `Float8Linear`)", with tensor-wise
    scales."""
    found, _ = machine(tmp_path, 3, precision="fp8", precision_detail=detail, other_flags="torchtitan; vanilla TP")
    assert found.software.gathers_inputs_narrow == narrow


def test_deepspeed_copies_gradients_in_fp32_into_buckets(tmp_path: Path) -> None:
    """500 million elements, or all that a device has: 4 bytes each, and 2 of their cast, where fp16 has 2."""
    cut = {"other_flags": "Megatron-DeepSpeed", "tp": "8", "pp": "12"}
    buffers = {}
    for precision, size in product(("fp16", "bf16"), ("176", "9.6")):
        cluster, _ = machine(tmp_path, 1, **cut, precision=precision, n_params_B=size)
        buffers[precision, size] = cluster.software.buffers
    assert buffers["bf16", "176"] - buffers["fp16", "176"] == 4 * 5e8
    assert buffers["bf16", "9.6"] - buffers["fp16", "9.6"] == pytest.approx(4 * 9.6e9 / 96)


@pytest.mark.parametrize(
    ("stack", "precision", "dtype"),
    [
        ("deepspeed", "fp16", "parameter"),
        ("deepspeed", "bf16", "mixed"),
        ("megatron", "fp16", "parameter"),
        ("megatron", "bf16", "mixed"),
        ("fsdp", "bf16", "mixed"),
        ("megatron", "fp32", "mixed"),
        ("deepspeed-zero3", "bf16", "mixed"),
    ],
)
def test_gradients_are_reduced_as_a_stack_keeps_them(stack: str, precision: str, dtype: str) -> None:
    assert gradient_dtype(load_software(stack), precision) == dtype


def test_zero_3_of_deepspeed_keeps_gradients_as_weights(tmp_path: Path) -> None:
    """engine.py, get_data_types: the dtype of the model, unless data_types.grad_accum_dtype says more."""
    asked = {"other_flags": "DeepSpeed ZeRO-3", "precision": "bf16", "zero_stage": "3"}
    plain, notes = machine(tmp_path, 3, **asked)
    assert plain.software.stored.bf16 == 2
    assert gradient_dtype(plain.software, "bf16") == "parameter"
    assert any("grad_accum_dtype" in note for note in notes)
    wide, _ = machine(tmp_path, 3, **{**asked, "other_flags": "DeepSpeed; grad_accum_dtype: fp32"})
    assert wide.software.stored.bf16 > 2
    assert gradient_dtype(wide.software, "bf16") == "mixed"


@pytest.mark.parametrize(
    ("changes", "scaled"),
    [
        ({"source": BRIDGE.format("26.04")}, True),
        ({"source": BRIDGE.format("26.04"), "precision_detail": "mxfp8"}, False),
        ({"source": BRIDGE.format("25.11"), "precision_detail": "fp8-cs"}, True),
        ({"source": BRIDGE.format("26.04"), "precision": "bf16"}, False),
        ({"source": "NeMo 25.04", "precision_detail": "per tensor, current scaling"}, True),
        ({"source": "NeMo 24.07"}, False),
        ({"source": "NeMo 25.04", "precision_detail": "fp8 hybrid, delayed scaling"}, False),
        ({"stack": "torchtitan", "compile": "True", "precision_detail": "float8 tensorwise"}, False),
    ],
)
def test_current_scaling_of_transformer_engine(tmp_path: Path, changes: dict[str, str], scaled: bool) -> None:
    asked = {"precision": "fp8", "flash_attention": "True", "date": "2026-01", **changes}
    software = machine(tmp_path, 3 if "stack" in changes else 1, **asked)[0].software
    assert software.current_scaling is scaled


def test_weights_that_a_row_says_to_be_in_fp8(tmp_path: Path) -> None:
    """Without the words Transformer Engine keeps two copies in fp8 beside each weight."""
    asked = {"precision": "fp8", "other_flags": "NeMo", "flash_attention": "True", "date": "2024-10", "n_params_B": "7"}
    stored = machine(tmp_path, 1, **{**asked, "other_flags": "NeMo; FP8_PARAMS=True"})[0].software
    assert stored.gathers_narrow
    assert stored.stored.beside == 0
    beside = machine(tmp_path, 1, **asked)[0].software
    assert not beside.gathers_narrow
    assert beside.stored.beside > 0


@pytest.mark.parametrize("word", ["FP8", "fp8", "float8", "MXFP8"])
def test_products_in_fp8_by_any_word(tmp_path: Path, word: str) -> None:
    cluster, _ = machine(tmp_path, precision=word, profile="b200-180gb")
    assert cluster.software.products == "fp8"
    assert (cluster.software.gained != 1) == (word == "MXFP8")


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ("", 0),
        ("sliding_window=1024", 1024),
        ("sliding window of 4096", 4096),
        ("no swa", 0),
        ("sliding_window 0", 0),
        ("window_size=(-1, -1)", 0),
        ("window pattern SSSL", 290),  # three layers of four leave 3/4, one all: 2 x - x^2 = 0.8125 of 512 keys
        ("window pattern SSSS", 290),  # the last layer sees all
        ("window pattern LL", 512),
        ("sliding_window null", 0),
    ],
)
def test_windows_of_attention(tmp_path: Path, flags: str, window: int) -> None:
    assert machine(tmp_path, other_flags=flags)[0].software.window == window


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({"other_flags": "PaddlePaddle", "notes": "ALiBi"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Baichuan2-13B"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Baichuan2-7B"}, False),
        ({"other_flags": "PaddlePaddle", "model": "bigscience/bloom-7b1"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Liger-bloom"}, False),
        ({"other_flags": "PaddlePaddle", "model": "BLOOM-like GPT"}, False),
        ({"other_flags": "PaddlePaddle, no ALiBi", "model": "Bloom-7B1"}, False),
        ({"other_flags": "FSDP; alibi", "zero_stage": "3", "flash_attention": "SDPA"}, True),
        ({"other_flags": "FSDP; alibi", "zero_stage": "3", "flash_attention": "FA2"}, False),  # alibi_slopes
        ({"other_flags": "PaddlePaddle; alibi", "flash_attention": "False"}, False),
    ],
)
def test_alibi_is_a_mask_where_kernels_know_no_slopes(tmp_path: Path, changes: dict[str, str], biased: bool) -> None:
    zero = int(changes.get("zero_stage", "1"))
    assert (
        machine(tmp_path, zero, **{"date": "2024-01", "flash_attention": "True", **changes})[0].software.biased
        == biased
    )


@pytest.mark.parametrize("flags", ["sliding window", "sliding_window=512 alternating with global layers"])
def test_windows_that_nobody_can_price_are_refused(tmp_path: Path, flags: str) -> None:
    with pytest.raises(RequestError, match="window"):
        machine(tmp_path, other_flags=flags)


def test_power_limits(tmp_path: Path) -> None:
    limited, notes = machine(tmp_path, profile="h100-80gb", other_flags="power limit 500W")
    assert limited.device.power_share == pytest.approx(5 / 7)
    assert "a power limit of 500 of 700 W" in notes
    assert machine(tmp_path, profile="h100-80gb", device="H100-SXM (700W)")[0].device.power_share == 1
    with pytest.raises(RequestError, match="says nothing of its board"):
        machine(tmp_path, profile="gb200-186gb", notes="power cap 900 W")


def test_paddle_copies_what_tensor_parallel_products_read(tmp_path: Path) -> None:
    assert machine(tmp_path, other_flags="PaddlePaddle", tp="2")[0].software.copies_inputs
    assert not machine(tmp_path, other_flags="PaddlePaddle", tp="1", dp="4")[0].software.copies_inputs


@pytest.mark.parametrize(
    ("flags", "hidden"), [("overlap_grad_reduce: true", 0.8), ("overlap-grad-reduce=False", 0.0), ("", 0.0)]
)
def test_flags_with_values(tmp_path: Path, flags: str, hidden: float) -> None:
    cluster, _ = machine(tmp_path, other_flags=flags, flash_attention="True", date="2024")
    assert cluster.software.hidden.reductions == hidden


@pytest.mark.parametrize(
    "flags",
    [
        "liger=False",
        "no Liger kernel",
        "optimizer_offload: false",
        "liger false; optimizer_offload off",
        "use_liger_kernel 0; offload_optimizer none",
    ],
)
def test_what_flags_deny_is_not_read(tmp_path: Path, flags: str) -> None:
    software = machine(tmp_path, other_flags=flags)[0].software
    assert not software.gates_in_place
    assert not software.offloaded


@pytest.mark.parametrize(
    ("flags", "loss", "gates"),
    [
        ("Liger kernels", "pieces", True),
        ("use_liger_kernel=True", "pieces", True),
        ("Liger: RMSNorm, SwiGLU and cross entropy; linear warmup", "in place", True),
        ("Liger (RMSNorm, SwiGLU, no cross entropy)", "whole", True),
        ("Liger fused linear cross entropy", "pieces", False),
        ("Liger FLCE", "pieces", False),
        ("Liger cross entropy", "in place", False),
        ("Liger: cross entropy", "in place", False),
        ("Liger kernel cross entropy", "in place", False),
        ("Liger kernel, cross entropy in fp32", "pieces", True),
        ("Liger: RMSNorm, SwiGLU", "whole", True),
        ("liger_glu_activation: true; liger_fused_linear_cross_entropy: false", "whole", True),
    ],
)
def test_which_kernels_of_liger_ran(tmp_path: Path, flags: str, loss: str, gates: bool) -> None:
    told = {"stack": "fsdp", "zero_stage": "3", "tp": "1", "pp": "1", "dp": "8"}
    software = machine(tmp_path, 3, other_flags=flags, **told)[0].software
    assert (software.loss, software.gates_in_place) == (loss, gates)


@pytest.mark.parametrize(
    ("changes", "autocasts"),
    [
        ({"other_flags": "bf16 autocast"}, True),
        ({"other_flags": "bf16 autocast", "precision": "fp32"}, False),
        ({"other_flags": "bf16 autocast; pure bf16"}, False),
        ({"other_flags": "bf16 autocast", "precision_detail": "MixedPrecision(param_dtype=bf16)"}, False),
    ],
)
def test_autocast_gathers_in_fp32_what_is_stored_so(tmp_path: Path, changes: dict[str, str], autocasts: bool) -> None:
    told = {"stack": "fsdp", "zero_stage": "3", "tp": "1", "pp": "1", "dp": "8"}
    assert machine(tmp_path, 3, **told, **changes)[0].software.autocasts == autocasts


def test_gates_that_are_not_fused_are_kept(tmp_path: Path) -> None:
    for flags, fused in (
        ("bias_activation_fusion=False", False),
        ("no-bias-swiglu-fusion", False),
        ("bias-swiglu-fusion disabled", False),
        ("bias_swiglu_fusion", True),
        ("", True),
    ):
        assert machine(tmp_path, stack="NeMo", date="2025-09", other_flags=flags)[0].software.fused == fused


@pytest.mark.parametrize("date", ["June 2021", "12/2024", "24-06"])
def test_dates_that_would_be_taken_for_others_are_refused(tmp_path: Path, date: str) -> None:
    assert f"column date: '{date}' is not a date" in one(tmp_path, date=date).fault


@pytest.mark.parametrize(("date", "again"), [("2024-07", False), ("2024-07-17", True), ("2025-02", True)])
def test_nanotron_kept_what_it_gathered(tmp_path: Path, date: str, again: bool) -> None:
    """Until tp_recompute_allgather."""
    cluster, notes = machine(tmp_path, other_flags="nanotron in eager PyTorch; fused RMSNorm", date=date)
    assert cluster.software.regathers == again
    assert any("kept whole" in note for note in notes) == (not again)


def test_modules_of_hugging_face_are_eager_whatever_shares_their_states_out(tmp_path: Path) -> None:
    """Under DistributedDataParallel too, which is no Megatron-LM."""
    plain, notes = machine(
        tmp_path, 0, other_flags="Hugging Face transformers; DDP, native AMP", flash_attention="False"
    )
    assert (plain.software.name, plain.software.attention) == ("fsdp", "unfused")
    assert "operators are launched from Python, as in Megatron" in notes
    assert plain.software.softmax_heads > 2**20, "no head count is a multiple of it: softmax is a chain of kernels"
    fused, _ = machine(tmp_path, 0, other_flags="Hugging Face transformers; fused softmax", flash_attention="False")
    assert fused.software.softmax_heads == 1
    compiled, _ = machine(tmp_path, 0, other_flags="Hugging Face transformers; DDP", compile="True")
    assert compiled.software.name == "fsdp-compiled"
    loop, _ = machine(tmp_path, 0, other_flags="PyTorch DDP; torch.compile", compile="True")
    assert loop.software.name == "fsdp-compiled"
    for stack, compiles, name in (("PyTorch DDP", "False", "fsdp"), ("PyTorch", "True", "fsdp-compiled")):
        assert machine(tmp_path, 0, stack=stack, compile=compiles)[0].software.name == name
    megatron, _ = machine(tmp_path, 0, other_flags="Megatron-LM; weights of Hugging Face")
    assert megatron.software.name == "megatron"


@pytest.mark.parametrize(
    ("flags", "pieces"),
    [
        ("FSDP2; eight chunks of the loss", True),
        ("chunked cross entropy", True),
        ("loss in chunks of 1024", True),
        ("no chunked loss", False),
        ("chunked prefill", False),
        ("loss_chunk_size 1024", True),
        ("loss_chunk_size 0", False),
        ("ce_chunk_size=0", False),
        ("disable_chunked_loss=true", False),
        ("disable_chunked_loss=false", True),
        ("chunked_cross_entropy", True),
        ("loss_num_chunks=1", False),
    ],
)
def test_a_loss_in_chunks_never_holds_all_logits(tmp_path: Path, flags: str, pieces: bool) -> None:
    assert (machine(tmp_path, 3, other_flags=flags)[0].software.loss == "pieces") == pieces


def test_torchtitan_cut_whole_logits_until_the_projection_was_in_the_chunks(tmp_path: Path) -> None:
    for date, loss in (("2025-03", "in place"), ("2026-05", "pieces"), ("", "pieces")):
        row = {"stack": "torchtitan", "other_flags": "eight chunks of the loss", "date": date}
        assert machine(tmp_path, 3, **row)[0].software.loss == loss


def test_outputs_with_a_cache_hold_keys_values_and_logits(tmp_path: Path) -> None:
    """Of 4 layers and 2 samples of 512 tokens."""
    told = {"zero_stage": "3", "tp": "1", "pp": "1", "dp": "8", "n_kv_heads": "4"}
    found = [
        machine(tmp_path, 3, other_flags=f"FSDP{flag}", recompute=recompute, **told)[0].software.buffers
        for flag, recompute in (("", "full"), ("; use_cache=True", "full"), ("; use_cache", "none"), ("", "none"))
    ]
    assert found[1] - found[0] == 1024 * (4 * 2 * 2 * 4 * 64 + 4 * 50257)
    assert found[2] == found[3], "what is not recomputed is kept anyway"


def test_gradients_of_megatron_are_narrow_where_their_main_copy_is(tmp_path: Path) -> None:
    for flags, width in (("main-grads-dtype bf16", 2.0), ("main_grads_dtype=fp32", 4.0), ("", 4.0)):
        software = machine(tmp_path, stack="Megatron-LM", date="2025-02", other_flags=flags)[0].software
        assert software.stored.bf16 == width


@pytest.mark.parametrize(
    ("changes", "stack", "graphs"),
    [
        ({"stack": "Megatron Bridge"}, "nemo-2606", "none"),
        ({"stack": "Megatron Bridge", "other_flags": "CUDA graphs of moe_router and moe_preprocess"}, "nemo", "router"),
        ({"stack": "Megatron Bridge", "other_flags": "cuda_graph_scope=attn moe_router"}, "nemo", "attention"),
        ({"stack": "Megatron Bridge", "other_flags": "full-iteration CUDA graphs"}, "nemo-2606", "step"),
        ({"stack": "Megatron-LM", "other_flags": "full-iteration CUDA graphs; paged stash"}, "megatron", "step"),
        ({"stack": "Megatron-LM", "other_flags": "hybridep; cuda_graph_scope attn mlp"}, "megatron", "attention"),
        ({"stack": "Megatron-LM", "other_flags": "full_cuda_graph: true"}, "megatron", "step"),
        ({"stack": "Megatron-LM", "other_flags": "full-iteration CUDA graphs off"}, "megatron", "none"),
        ({"stack": "Megatron-LM", "other_flags": "--cuda-graph-scope none --attn flash"}, "megatron", "none"),
        ({"stack": "Megatron-LM", "other_flags": "cuda_graph_impl=none cuda_graph_scope=attn"}, "megatron", "none"),
        ({"stack": "nemo"}, "nemo", "router"),
        ({"source": "cards of Megatron Bridge"}, "nemo-2606", "none"),
        ({"other_flags": "Megatron Bridge; Megatron FSDP"}, "nemo-2606", "none"),
        ({"other_flags": "Megatron FSDP"}, "megatron", "none"),
    ],
)
def test_megatron_bridge_is_that_of_its_release_whatever_names_it(
    tmp_path: Path, changes: dict[str, str], stack: str, graphs: str
) -> None:
    row = {"arch": "moe", "model": "Qwen3-30B-A3B", "precision": "fp8", "precision_detail": "mxfp8", "date": "2026-07"}
    software = machine(tmp_path, profile="gb300-288gb", **row, **changes)[0].software
    assert (software.name, software.graphs) == (stack, graphs)
    assert software.fused_experts == (stack == "nemo-2606" or "stash" in changes.get("other_flags", ""))


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({"date": "2023-04", "flash_attention": "False"}, "megatron-2021"),
        ({"date": "2023-04", "flash_attention": "True"}, "nemo"),
        ({"date": "2024-03", "flash_attention": "False"}, "nemo"),
        ({"date": "", "flash_attention": "False"}, "nemo"),
    ],
)
def test_nemo_had_the_kernels_of_megatron_before_transformer_engine(
    tmp_path: Path, changes: dict[str, str], stack: str
) -> None:
    for named in ({"stack": "NeMo"}, {"source": "NeMo Framework Launcher"}):
        assert machine(tmp_path, **named, **changes)[0].software.name == stack


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"date": "2026-04", "flash_attention": "SDPA"}, "cudnn"),
        ({"date": "2026-04", "flash_attention": "True"}, "cudnn"),
        ({"date": "2026-04", "flash_attention": "FA2"}, "flash2"),
        ({"date": "2025-12", "flash_attention": "SDPA"}, "flash2"),
        ({"date": "2026-04", "flash_attention": "FlexAttention"}, "flash2"),
        ({"date": "2026-04", "flash_attention": "SDPA", "other_flags": "latent attention"}, "flash1"),
    ],
)
def test_kernels_of_pytorch(tmp_path: Path, changes: dict[str, str], kernels: str) -> None:
    assert machine(tmp_path, 3, profile="h200-141gb", zero_stage="3", **changes)[0].software.attention == kernels


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"stack": "torchtitan", "zero_stage": "3", "date": "2025-05", "flash_attention": "SDPA"}, "cudnn"),
        ({"stack": "torchtitan", "zero_stage": "3", "date": "2025-04", "flash_attention": "SDPA"}, "flash2"),
        ({"stack": "torchtitan", "zero_stage": "3", "date": "", "flash_attention": "SDPA"}, "flash2"),
        ({"stack": "FSDP2", "zero_stage": "3", "date": "2025-12", "flash_attention": "SDPA"}, "flash2"),
        ({"date": "2026-07", "flash_attention": "TE", "flag": "deterministic-mode"}, "best"),
        ({"date": "2026-07", "flash_attention": "TE", "other_flags": "attention_dropout 0.1"}, "best"),
    ],
)
def test_kernels_on_blackwell(tmp_path: Path, changes: dict[str, str], kernels: str) -> None:
    assert machine(tmp_path, 3, profile="gb200-186gb", **changes)[0].software.attention == kernels


@pytest.mark.parametrize(
    ("profile", "dropout", "kernels", "ordered", "longer"),
    [
        ("gb200-186gb", "0.1", "flash2", True, (1.05, 1.05)),
        ("gb200-186gb", "0.0", "best", False, (1.0, 1.0)),
        ("h100-80gb", "0.1", "best", False, (1.03, 1.03)),
        ("a100-80gb", "0.1", "best", True, (1.05, 1.05)),
        ("a100-80gb", "0.0", "best", True, (1.0, 1.0)),
    ],
)
def test_attention_with_dropout_and_in_one_order(
    tmp_path: Path, profile: str, dropout: str, kernels: str, ordered: bool, longer: tuple[float, float]
) -> None:
    """cuDNN has no such backward pass on A100, and none with dropout on Blackwell."""
    flags = {"other_flags": f"deterministic-mode; attention_dropout {dropout}", "flash_attention": "TE"}
    found = machine(tmp_path, profile=profile, date="2026-07", **flags)[0].software
    assert (found.attention, found.ordered, found.attention_dropout) == (kernels, ordered, longer)
    assert found.hidden_dropout == "none"


@pytest.mark.parametrize(
    ("flags", "hidden", "longer"),
    [
        ("hidden_dropout 0.1; attention_dropout=0.1", "fused", 1.05),
        ("--hidden-dropout 0.0 --attention-dropout 0.0", "none", 1.0),
        ("dropout 0.1", "fused", 1.05),
        ("lora_dropout 0.1; fused dropout", "none", 1.0),
        ("hidden-dropout 0.1; bias_dropout_add_fusion=False", "apart", 1.0),
    ],
)
def test_dropout_is_what_flags_say(tmp_path: Path, flags: str, hidden: str, longer: float) -> None:
    found = machine(tmp_path, date="2026-07", flash_attention="TE", other_flags=flags)[0].software
    assert (found.hidden_dropout, found.attention_dropout[0]) == (hidden, longer)
    assert machine(tmp_path, date="2021-05", flash_attention="False", other_flags=flags)[0].software.scores == 2


def test_a_loss_that_is_not_compiled_has_all_logits(tmp_path: Path) -> None:
    """And 4 bytes more of each where a variable holds them."""
    fsdp = {"zero_stage": "3", "tp": "1", "pp": "1", "dp": "8", "stack": "fsdp-compiled", "date": "2026-01"}
    eager = machine(tmp_path, 3, **fsdp, other_flags="eager loss")[0].software
    assert eager.loss == "whole"
    assert machine(tmp_path, 3, **fsdp)[0].software.loss != "whole"
    assert machine(tmp_path, 3, **fsdp, other_flags="no eager loss")[0].software.loss != "whole"
    held = machine(tmp_path, 3, **fsdp, other_flags="eager loss; logits held")[0].software
    assert held.buffers - eager.buffers == 4.0 * 2 * 512 * 50257


def test_logits_are_gathered_under_tensor_parallelism_of_pytorch(tmp_path: Path) -> None:
    """Unless it says `loss_parallel`, or is torchtitan's."""
    fsdp = {"zero_stage": "fsdp2 (3)", "pp": "1", "dp": "4"}
    for changes, whole in (
        ({"stack": "FSDP2"}, True),
        ({"stack": "FSDP2", "other_flags": "loss_parallel"}, False),
        ({"stack": "torchtitan"}, False),
        ({"stack": "FSDP2", "tp": "1", "dp": "8"}, False),
        ({"stack": "Megatron-LM"}, False),
        ({"source": "a paper"}, False),  # which does not say by what
        ({"other_flags": "DTensor tensor parallelism"}, True),
    ):
        assert gathers_logits(one(tmp_path, **{**fsdp, **changes})) == whole
