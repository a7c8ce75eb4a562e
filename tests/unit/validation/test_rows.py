"""Reading measured runs: what is unknown stays unknown, and what is malformed is named by line and column."""

from pathlib import Path

import pytest

from planner.errors import RequestError
from planner.models.dimensions import ExpertDimensions
from planner.validation.reading.row_files import read_rows, readings_of, sampled, unread_of
from planner.validation.reading.rows import Row
from planner.validation.request.configuration import run_of
from planner.validation.unsupported import UnsupportedError
from tests.refusals import refused
from tests.unit.validation.runs import COLUMNS, row, write


def one(tmp_path: Path, **changes: str) -> Row:
    (read,) = read_rows(write(tmp_path / "runs.csv", row(**changes)))
    return read


def test_what_was_measured_is_in_seconds_and_bytes(tmp_path: Path) -> None:
    read = one(tmp_path, iter_time_s="1.5", peak_mem_GB="2.5")
    assert (read.measured_seconds, read.measured_peak_bytes) == (1.5, 2.5e9)
    read = one(tmp_path, iter_time_s="", tokens_per_s_per_device="512", peak_mem_GB="")
    assert (read.measured_seconds, read.measured_peak_bytes) == (2.0, None)  # 16 samples of 512 tokens, 8 devices
    assert one(tmp_path, iter_time_s="").measured_seconds is None


def test_rows_are_chosen_by_their_cells_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row(id="a"), row(id="b", tier="B"), row(id="c"), row(id="d"))
    assert [read.id for read in read_rows(path, {"tier": "A"}, 2)] == ["a", "c"]
    assert [read.line for read in read_rows(path)] == [2, 3, 4, 5]
    with refused(RequestError, "tire", "tier"):
        read_rows(path, {"tire": "A"})


@pytest.mark.parametrize(
    ("column", "cell", "wanted"),
    [
        ("seq_len", "~6000", "'~6000' is not a whole number of 1 or more"),
        ("vocab", "128k", "it may be 128000 or 128 x 1024"),
        ("n_params_B", '"1,024"', "it may be 1024 or 1.024"),
        ("n_layers", '"1,02"', "'1,02' is not a whole number"),
        ("zero_stage", "sharded", "'sharded' is not 0 to 3"),
        ("zero_stage", "ZeRO-3 (1)", "'ZeRO-3 (1)' is not 0 to 3"),
        ("zero_stage", "full_shard (1)", "'full_shard (1)' is not 0 to 3"),
        ("date", "2024-13", "'2024-13' is not a date"),
        ("date", "2024-12-32", "'2024-12-32' is not a date"),
        ("precision", "int8", "'int8' is not bf16"),
        ("iter_time_s", '"2,7555"', "write a point for its decimals"),
        ("iter_time_s", "2.7 s/it", "(seconds, or with ms, us, s or min)"),
        ("zero_stage", "SHARDED", "'SHARDED' is not 0 to 3"),
        ("flash_attention", "maybe", "'maybe' is not True, False"),
        ("distributed_optimizer", "perhaps", "'perhaps' is not True, False"),
        ("stack", "nemoo", "unknown training stack 'nemoo'; did you mean nemo"),
        ("peak_mem_kind", "resident", "'resident' is not one of allocated, reserved, used"),
        ("layers_per_stage", "15+16", "'15+16' is not layers of each stage"),
        ("tp", "two", "'two' is not a whole number of 1 or more"),
        ("tp", "0", "'0' is not a whole number of 1 or more"),
        ("n_layers", "1.5", "'1.5' is not a whole number of 1 or more"),
        ("iter_time_s", "fast", "'fast' is not a number above 0"),
        ("iter_time_s", "nan", "'nan' is not a number above 0"),
        ("peak_mem_GB", "-3", "'-3' is not a number above 0"),
        ("sp", "maybe", "'maybe' is not True or False"),
        ("recompute", "some", "'some' is not one of none, selective, full"),
        ("id", "gpt", "'gpt' is the name of line 2 too"),
        ("tokens_per_s_per_device", "51200", "makes a step of 0.02 s, and iter_time_s is 0.1"),
        ("id", "", "it is empty"),
    ],
)
def test_a_malformed_cell_is_named(tmp_path: Path, column: str, cell: str, wanted: str) -> None:
    path = write(tmp_path / "runs.csv", row(), row(**{"id": "other", column: cell}), row(id="third"))
    first, bad, third = read_rows(path)
    assert (first.fault, third.fault) == ("", "")
    assert bad.fault.startswith(f"line 3, column {column}: ")
    assert wanted in bad.fault
    assert bad.measured_seconds is None
    with pytest.raises(RequestError) as raised:
        read_rows(path, strict=True)
    assert str(raised.value) == f"{path}: {bad.fault}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "it is empty; a file of runs has id, profile"),
        (",,\n\n", "it is empty"),
        ("id,profile\n", "line 1: there is no column n_layers, hidden, n_heads"),
        (",".join([*COLUMNS, "tp"]) + "\n", "line 1, column tp: it stands there 2 times"),
        (",".join(COLUMNS) + "\n", "it has no runs"),
        (",".join(COLUMNS) + ",,\n,,,\n", "it has no runs"),
        (";".join(COLUMNS) + "\n", "line 1: its cells are separated by semicolons; separate them by commas"),
        ("\t".join(COLUMNS) + "\n", "line 1: its cells are separated by tabs"),
        (
            ",".join(COLUMNS).replace("n_layers", "N Layers") + "\n",
            "no column n_layers, but 'N Layers'; write n_layers",
        ),
        (",".join(COLUMNS).replace("micro_batch", "micro-batch") + "\n", "no column micro_batch, but 'micro-batch'"),
        ('"id"x,profile\n', "line 1: ',' expected after '\"'"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, wanted: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RequestError) as raised:
        read_rows(path)
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('"Llama" 8B{rest}', "line 3: ',' expected after"),
        ('"Llama 8B{rest}', "line 3: "),
        ("Llama 8B{rest},x", "line 3, column tokens_per_s_per_device: "),
        (20_000 * "x" + "{rest}", "line 3: a cell has more than 16384 characters"),
        (2_000 * ",", "line 3: 2001 cells"),
    ],
)
@pytest.mark.parametrize("quoted", ["", '"quoted, too"'])
def test_a_bad_line_costs_one_row(tmp_path: Path, bad: str, reason: str, quoted: str) -> None:
    """Also where a later row has the quote with which one that nobody closed would end, and a cell of two lines."""
    path = write(tmp_path / "runs.csv", row(id="first"), row(id="bad"), row(id="third", notes=quoted), row(id="fourth"))
    head, first, line, *others = path.read_text(encoding="utf-8").splitlines()
    cell = bad.replace("{rest}", line.removeprefix("bad"))
    others[-1] = others[-1].replace("paper", '"a\npaper"')
    path.write_text("\n".join([head, first, cell, *others]) + "\n", encoding="utf-8")
    found = read_rows(path)
    assert [(one.line, one.id) for one in found if not one.fault] == [(2, "first"), (4, "third"), (5, "fourth")]
    (refused_one,) = [one for one in found if one.fault]
    assert refused_one.fault.startswith(reason)
    assert found[1] == refused_one
    with refused(RequestError, "line 3"):
        read_rows(path, strict=True)


def test_a_sheet_with_empty_columns_and_lines_is_read(tmp_path: Path) -> None:
    """As spreadsheets export it: commas behind the last column, and lines of nothing else."""
    path = write(tmp_path / "runs.csv", row(), row(id="b"))
    lines = [f"{line},,," for line in path.read_text(encoding="utf-8").splitlines()]
    count = lines[0].count(",")
    moved = lines[2].replace("b,", "c,", 1) + "400"
    path.write_text("\n".join(["," * count, *lines, "," * count, moved]) + "\n", encoding="utf-8")
    first, second, third = read_rows(path)
    assert (first.line, first.fault, second.fault) == (3, "", "")
    assert third.fault.startswith("line 6: '400' stands in column ")


def test_a_condition_that_no_row_meets_says_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row(), row(id="b", profile="h100-80gb", tier="B"))
    with refused(RequestError, "--where profile=a100", "a100-80gb, h100-80gb"):
        read_rows(path, {"profile": "a100"})
    with refused(RequestError, "profile=h100-80gb and tier=A"):
        read_rows(path, {"profile": "h100-80gb", "tier": "A"})


def test_a_row_with_cells_missing_is_refused_whatever_is_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row())
    path.write_text(path.read_text(encoding="utf-8") + "a,b\n", encoding="utf-8")
    assert [read.fault for read in read_rows(path, {"tier": "A"})] == [
        "",
        f"line 3, column source: 2 cells under {len(COLUMNS)} columns; quote commas",
    ]


def test_rows_that_nobody_asked_for_are_not_read(tmp_path: Path) -> None:
    """Neither a cell nor a name of one that is left out matters, unless the reader is strict."""
    path = write(tmp_path / "runs.csv", row(tier="B"), row(id="other", tier="B", tp="two"), row())
    assert [(read.id, read.fault) for read in read_rows(path, {"tier": "A"})] == [("gpt", "")]
    with refused(RequestError, "line 3", "tp"):
        read_rows(path, {"tier": "A"}, strict=True)


@pytest.mark.parametrize(
    ("column", "cell", "value"),
    [
        ("seq_len", '"4,096"', 4096),
        ("seq_len", "4_096", 4096),
        ("seq_len", "128Ki", 131072),
        ("n_params_B", "350M", 0.35),
        ("n_params_B", "1.3T", 1300),
        ("iter_time_s", "1350 ms", 1.35),
        ("peak_mem_GB", "74 GiB", 79.456894976),
        ("tokens_per_s_per_device", '"10,239.5 tokens/s"', 10239.5),
        ("tokens_per_s_per_device", "10240 tok/s/GPU", 10240),
        ("vpp", "n/a", None),
    ],
)
def test_what_has_one_meaning_is_read_and_noted(tmp_path: Path, column: str, cell: str, value: float | None) -> None:
    read = one(tmp_path, **{column: cell})
    assert read.fault == ""
    quantity = column in ("n_params_B", "iter_time_s", "peak_mem_GB", "tokens_per_s_per_device")
    assert (read.quantity(column) if quantity else read.integer(column)) == pytest.approx(value)
    (note,) = readings_of(read)
    assert note.startswith(f"{column} '{cell.strip(chr(34))}' read as")


@pytest.mark.parametrize(
    ("cells", "stages", "note"),
    [
        ({"n_layers": "6"}, (2, 1, 1, 2), None),
        ({"layers_per_stage": "3 1"}, (3, 1), None),
        ({"other_flags": '"num-layer-list=1,3; position-embedding-type=rope"'}, (1, 3), None),
        ({"layers_per_stage": "2 2"}, None, None),
        ({"vpp": "3"}, (0, 1, 1, 1, 1, 0), "embedding and head are counted as layers of the pipeline"),
        (
            {"vpp": "2", "stack": "torchtitan", "date": "2025-08"},
            (1, 2, 1, 0),
            "layers of stages as torchtitan deals them out: 1 2 1 0",
        ),
        ({"n_layers": "5", "n_params_B": ""}, None, "layers of each stage unknown: as the search divides them"),
    ],
)
def test_layers_of_stages(
    tmp_path: Path, cells: dict[str, str], stages: tuple[int, ...] | None, note: str | None
) -> None:
    if cells == {"n_layers": "6"}:
        cells = {**cells, "layers_per_stage": "2 1 1 2", "vpp": "2", "n_params_B": ""}
    run = run_of(one(tmp_path, **cells))
    assert run.stages == stages
    assert note is None or note in run.notes
    if stages is not None:
        assert (run.pinned.virtual_stages, run.pinned.even) == (1, False)


@pytest.mark.parametrize(
    ("cells", "virtual"),
    [
        ({"other_flags": "interleaved pipeline", "n_layers": "8"}, 2),
        ({"other_flags": "interleaved 1F1B", "n_layers": "6"}, 3),
        ({"other_flags": "interleaving", "n_layers": "6", "pp": "1", "dp": "4"}, 1),
        ({"other_flags": "not interleaved", "n_layers": "8"}, 1),
        ({"other_flags": '"fused SwiGLU; interleaved, seed 3"', "n_layers": "8"}, 2),
        ({"other_flags": "interleaved RoPE", "n_layers": "8"}, 1),
        ({"other_flags": '"sliding-window attention, interleaved with full"', "n_layers": "8"}, 1),
        ({"other_flags": "micro_batch_interleave_num=2", "n_layers": "8"}, 1),
        ({"other_flags": "interleaved pipeline", "n_layers": "8", "vpp": "4"}, 4),
        ({"other_flags": "", "n_layers": "8"}, 1),
    ],
)
def test_interleaved_stages_of_unknown_number_are_the_fewest(
    tmp_path: Path, cells: dict[str, str], virtual: int
) -> None:
    run = run_of(one(tmp_path, **{"vpp": "", "n_params_B": "", **cells}))
    assert run.pinned.virtual_stages == virtual
    assert any("interleaved" in note for note in run.notes) == (virtual in (2, 3))


def test_stages_with_dense_layers_hold_equally_many_too(tmp_path: Path) -> None:
    """The search would give the rank of the dense layer three, and the other one."""
    run = run_of(one(tmp_path, **MIXTURE, ep="2", other_flags="moe-layer-freq=([0]*1+[1]*3)"))
    assert run.stages == (2, 2)
    assert run_of(one(tmp_path, **MIXTURE, ep="2")).stages is None


def test_layers_that_no_stages_hold(tmp_path: Path) -> None:
    with refused(UnsupportedError, "layers_per_stage", 2, 5, "n_layers=4"):
        run_of(one(tmp_path, layers_per_stage="3 2"))
    with refused(UnsupportedError, "n_layers=5", "pp 2 x vpp 2", 4):
        run_of(one(tmp_path, n_layers="5", vpp="2", n_params_B=""))


def test_a_row_becomes_a_request(tmp_path: Path) -> None:
    run = run_of(one(tmp_path))
    assert run.notes == ()
    assert (run.job.profile, run.job.devices, run.job.global_batch) == ("a100-80gb", 8, 16)
    assert (run.job.model.family, run.job.model.vocabulary) == ("gpt", 50304)
    pinned = run.pinned
    assert (pinned.tensor, pinned.pipeline, pinned.data, pinned.context, pinned.virtual_stages) == (2, 2, 2, 1, 1)
    assert (pinned.zero, pinned.micro_batch, pinned.recompute, pinned.sequence_parallel) == (1, 2, "full", False)


def test_degrees_that_do_not_fit_together_are_named_or_noted(tmp_path: Path) -> None:
    with refused(UnsupportedError, "tp 2 x pp 3 x cp 1 = 6", 8):  # nobody wrote a dp
        run_of(one(tmp_path, pp="3", dp=""))
    assert "vpp is 2, and there is no pipeline: 1" in run_of(one(tmp_path, pp="1", vpp="2", dp="4")).notes


def test_what_is_unknown_is_what_frameworks_do_and_noted(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("zero_stage", "micro_batch", "recompute", "sp", "dp", "n_kv_heads"), "")
    run = run_of(one(tmp_path, **unknown))
    pinned = run.pinned
    assert (pinned.zero, pinned.micro_batch, pinned.recompute, pinned.sequence_parallel, pinned.data) == (
        0,
        1,
        "none",
        False,
        2,
    )
    assert len(run.notes) == 6
    assert all("unknown" in note or "n_kv_heads" in note for note in run.notes)


@pytest.mark.parametrize(
    ("cell", "optimizer", "stage"),
    [
        ("3", "", 3),
        ("fsdp2 (3)", "", 3),
        ("distributed optimizer (1)", "", 1),
        ("DeepSpeed ZeRO (3)", "", 3),
        ("ZeRO stage (2)", "", 2),
        ("ZeRO redundancy optimizer (1)", "", 1),
        ("torch-fsdp (3)", "", 3),
        ("FSDP full_shard (3)", "", 3),
        ("FSDP1 (2)", "", 2),
        ("DDP (0)", "", 0),
        ("FULL_SHARD", "True", 3),
        ("SHARD_GRAD_OP", "", 2),
        ("NO_SHARD", "", 0),
        ("fsdp2", "", 3),
        ("ZeRO-1", "", 1),
        ("", "True", 1),
        ("", "yes", 1),
        ("deepspeed", "DeepSpeed ZeRO-1", 1),
        ("deepspeed", "", 3),
        ("", "", 0),
    ],
)
def test_words_for_zero(tmp_path: Path, cell: str, optimizer: str, stage: int) -> None:
    assert run_of(one(tmp_path, zero_stage=cell, distributed_optimizer=optimizer)).pinned.zero == stage


def test_the_family_is_the_one_whose_parameters_agree(tmp_path: Path) -> None:
    llama = {"n_layers": "32", "hidden": "4096", "n_heads": "32", "n_kv_heads": "32", "head_dim": "128"}
    found = run_of(one(tmp_path, **llama, ffn_hidden="11008", vocab="32000", n_params_B="6.74")).job.model
    assert (found.family, found.tied) == ("llama", False)
    found = run_of(one(tmp_path, **llama, ffn_hidden="16384", n_params_B="6.7")).job.model
    assert found.family == "gpt"
    wide = {**llama, "n_kv_heads": "8", "ffn_hidden": "16384", "vocab": "256000", "n_params_B": "7.74"}
    assert run_of(one(tmp_path, **wide)).job.model.family == "nemotron"  # two matrices, and grouped queries
    experts = {"arch": "moe", "n_layers": "16", "hidden": "1024", "ffn_hidden": "1024", "n_heads": "16"}
    experts |= {"n_kv_heads": "16", "head_dim": "64", "vocab": "50257", "n_experts": "64", "topk": "8"}
    for billions, family in (("2.27", "nemotron"), ("3.34", "llama")):
        found = run_of(one(tmp_path, **experts, moe_ffn_hidden="1024", n_params_B=billions)).job.model
        assert found.family == family
    with refused(UnsupportedError, 4.17, "llama", 13):
        run_of(one(tmp_path, **llama, n_params_B="13"))


@pytest.mark.parametrize(
    ("name", "published", "flags", "family"),
    [
        ("GPT-2 124M", "0.124", "", "gpt"),  # 0.12448; a Nemotron with shared embeddings has 0.12359
        ("gpt2", "0.1236", "bias=False", "gpt"),
        ("gpt2", "0.124", "rotary; RMS norm without weights", "nemotron"),
        ("GPT 124M", "0.124", "position-embedding-type rope", "nemotron"),
        ("Nemotron-4", "0.124", "", "nemotron"),
        ("small", "0.124", "squared ReLU", "nemotron"),
        ("gpt2", "0.124", "no rotary embeddings", "gpt"),
        ("small", "", "", "gpt"),
    ],
)
def test_a_gpt_is_no_nemotron_that_has_as_many_parameters(
    tmp_path: Path, name: str, published: str, flags: str, family: str
) -> None:
    small = {"n_layers": "12", "hidden": "768", "ffn_hidden": "3072", "n_heads": "12", "n_kv_heads": "12"}
    small |= {"vocab": "50304", "seq_len": "1024", "head_dim": "64", "model": name, "notes": ""}
    found = run_of(one(tmp_path, **small, n_params_B=published, other_flags=flags)).job.model
    assert (found.family, found.tied) == (family, True)


@pytest.mark.parametrize(
    ("published", "tied"),
    [
        ("175", True),
        ("175.0", True),
        ("174.6", True),
        ("175.0 billion", True),
        ("175.2", False),
        ("175.20 billion", False),
        ("175200M", False),
        ("177", False),
    ],
)
def test_a_gpt_shares_its_embeddings_unless_its_published_number_is_too_large(
    tmp_path: Path, published: str, tied: bool
) -> None:
    gpt3 = {"n_layers": "96", "hidden": "12288", "ffn_hidden": "49152", "n_heads": "96", "n_kv_heads": "96"}
    gpt3 |= {"vocab": "51200", "seq_len": "2048", "head_dim": "128", "model": "GPT3-175B", "notes": ""}
    found = run_of(one(tmp_path, **gpt3, n_params_B=published)).job.model
    assert (found.family, found.tied) == ("gpt", tied)


def test_mindspore_shares_out_gradients_that_nothing_adds_up(tmp_path: Path) -> None:
    known = {"source": "mindformers model cards (r1.3.0)", "zero_stage": "1", "tp": "1", "pp": "1", "vpp": "1"}
    known |= {"n_devices": "8", "dp": "8", "micro_batch": "1"}
    assert run_of(one(tmp_path, **known, global_batch="8")).pinned.zero == 2
    assert run_of(one(tmp_path, **known, global_batch="16")).pinned.zero == 1


MIXTURE = {"arch": "moe", "n_experts": "8", "topk": "2", "moe_ffn_hidden": "512", "n_params_B": ""}


def test_experts(tmp_path: Path) -> None:
    flags = "moe-shared-expert-intermediate-size=256; moe-layer-freq=([0]*1+[1]*3); expert-tensor-parallel-size=1"
    run = run_of(one(tmp_path, **MIXTURE, ep="4", other_flags=flags))
    assert run.job.model.experts == ExpertDimensions(count=8, chosen=2, width=512, shared_width=256, dense_layers=1)
    assert (run.pinned.expert, run.pinned.whole_experts) == (4, True)
    split = run_of(one(tmp_path, **MIXTURE, ep="2", other_flags="expert_tensor_parallel_degree=2", date="2025-12"))
    assert (split.pinned.expert, split.pinned.whole_experts) == (2, False)
    run = run_of(one(tmp_path, **MIXTURE, ep="2"))
    assert (run.pinned.expert, run.pinned.whole_experts) == (2, False)
    assert "tensor parallelism of experts unknown: that of all else" in run.notes
    run = run_of(one(tmp_path, **MIXTURE, ep="", tp="1", dp="4"))
    assert (run.pinned.expert, run.pinned.whole_experts) == (1, None)
    assert "ep unknown: 1" in run.notes
    assert "dropped" in run_of(one(tmp_path, **MIXTURE, model="Qwen3 (tokendrop)")).notes[0]
    for model, flags, normed in (
        ("Qwen3 30B", "", True),
        ("tune_qwen3_8b", "", True),
        ("OLMo-1124 7b", "", True),
        ("OLMo 3 7B", "", True),
        ("Qwen3.5", "", False),
        ("Qwen-3B", "", False),
        ("Mixtral", "", False),
        ("Mixtral", "use_qk_norm=true", True),
        ("Mixtral", "qk_ln", True),
        ("Mixtral", "qk_layernorm", True),
        ("Qwen2", "qk_layernorm: false", False),
    ):
        assert run_of(one(tmp_path, **MIXTURE, model=model, other_flags=flags)).job.model.qk_norm is normed


@pytest.mark.parametrize(
    ("flags", "dense", "shared"),
    [
        ("--moe-layer-freq [0]*1+[1]*3; --moe-shared-expert-intermediate-size 256", 1, 256),
        ("moe_layer_freq: '([0]*2 + [1]*2)'; moe_shared_expert_intermediate_size: 128", 2, 128),
        ("moe-layer-freq=1", 0, 0),
        ("--moe-layer-freq ([0]*1+[1]*3) --moe-router-topk 2", 1, 0),
        ("\"moe_layer_freq: '[0]*1 + [1]*3', moe-router-topk 2\"", 1, 0),
        ("first_k_dense_replace=1", 1, 0),
        ("first_k_dense_replace: 9", 4, 0),
    ],
)
def test_layers_of_experts_are_read_however_a_publisher_writes_them(
    tmp_path: Path, flags: str, dense: int, shared: int
) -> None:
    """As options of Megatron-LM, as keys of a YAML file, and as in configurations of Hugging Face."""
    experts = run_of(one(tmp_path, **MIXTURE, ep="4", other_flags=flags)).job.model.experts
    assert experts is not None
    assert (experts.dense_layers, experts.shared_width) == (dense, shared)


V3 = {
    "arch": "moe", "model": "DeepSeekV3", "n_layers": "61", "hidden": "7168", "ffn_hidden": "18432", "n_heads": "128",
    "n_kv_heads": "128", "head_dim": "", "vocab": "129280", "n_experts": "256", "topk": "8", "moe_ffn_hidden": "2048",
    "n_params_B": "671.03", "tp": "1", "pp": "1", "dp": "8", "ep": "8",
}  # fmt: skip


def test_latent_attention_is_that_of_the_deepseek_with_the_same_dimensions(tmp_path: Path) -> None:
    run = run_of(one(tmp_path, **V3))
    assert (run.job.model.family, run.job.model.like) == ("deepseek", "deepseek-v3")
    assert run.job.model.experts == ExpertDimensions(count=256, chosen=8, width=2048, shared_width=2048, dense_layers=3)
    assert run.job.model.parameters == 671_026_404_352
    assert run.notes[0] == (
        "latent attention and routers as those of deepseek-v3, without what predicts further tokens"
    )


def test_a_run_of_a_few_layers_is_of_so_many(tmp_path: Path) -> None:
    few = {**V3, "n_layers": "2", "n_params_B": "", "other_flags": "moe-layer-freq=([0]*1+[1]*1)"}
    experts = run_of(one(tmp_path, **few)).job.model.experts
    assert experts is not None
    assert (experts.dense_layers, experts.shared_width) == (1, 2048)
    experts = run_of(one(tmp_path, **{**few, "other_flags": ""})).job.model.experts
    assert experts is not None
    assert experts.dense_layers == 2


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"n_heads": "64"}, ("hidden=7168", "n_heads=64", "n_experts=256", "topk=8")),
        ({"hidden": ""}, ("hidden", "empty")),
        ({"n_params_B": "", "moe_ffn_hidden": "18432"}, ("deepseek", 671)),
    ],
)
def test_other_latent_attention_is_not_guessed(
    tmp_path: Path, changes: dict[str, str], facts: tuple[object, ...]
) -> None:
    with refused(UnsupportedError, *facts):
        run_of(one(tmp_path, **{**V3, **changes}))


def test_attention_is_latent_by_a_flag_else_by_the_model(tmp_path: Path) -> None:
    """A number of parameters is no version, and what R1 was distilled into has heads that share keys."""
    latent = ("DeepSeek-V3", "deepseek2-236b", "DeepSeek-R1", "DeepSeek-Coder-V2", "Moonlight-16B-A3B", "Kimi K2")
    other = ("deepseek_500b", "deepseek-7b", "deepseek-6.7b", "DeepSeek-R1-Distill-Llama-70B", "DeepSeek-V3 dense")
    for model in (*latent, *other):
        denied = "no latent attention" if model.endswith("dense") else ""
        assert one(tmp_path, model=model, other_flags=denied).latent is (model in latent), model
    for flags, told in (("multi-latent-attention", True), ("MLA", True), ("MLA: false", False), ("", False)):
        assert one(tmp_path, model="GPT", other_flags=flags).latent is told, flags


def test_heads_need_not_make_up_the_hidden_size(tmp_path: Path) -> None:
    found = run_of(one(tmp_path, head_dim="128", n_params_B="")).job.model
    assert (found.family, found.head_size) == ("llama", 128)
    assert run_of(one(tmp_path)).job.model.head_size is None


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"n_params_B": ""}, "n_params_B unknown: taken for a gpt"),
        ({"cp": "2", "dp": "1"}, "context parallelism by ring"),
        ({"vocab": "", "n_params_B": "0.085"}, "vocab unknown: 32000, as Llama's"),
        (
            {"cp": "2", "dp": "1", "other_flags": "context-parallel-algo=ulysses_cp_algo"},
            "context parallelism by heads",
        ),
        ({"other_flags": "act CPU offload True"}, "what offloading moves takes no time here"),
        ({"precision": "fp8"}, "fp8: products in fp8, all else in bf16"),
        ({"recompute": "selective"}, "selective recomputation: of attention"),
        (
            {"recompute": "selective", "recompute_detail": "minimal_flash"},
            "selective recomputation: of elementwise, normalisation",
        ),
        (
            {"recompute": "selective", "recompute_detail": "SAVE_DOT_WITH_NO_BATCH_DIM"},
            "selective recomputation: of attention, elementwise, normalisation",
        ),
        (
            {"recompute": "selective", "recompute_detail": "selective op"},
            "selective recomputation: of everything but attention and every second product",
        ),
        (
            {"recompute": "selective", "recompute_detail": "selective ( n= modules=[layernorm mlp moe_act])"},
            "selective recomputation: of layernorm, mlp, moe_act in every block",
        ),
    ],
)
def test_what_is_not_modelled_is_noted(tmp_path: Path, changes: dict[str, str], note: str) -> None:
    assert run_of(one(tmp_path, **changes)).notes == (note,)
    assert run_of(one(tmp_path, other_flags="act CPU offload False")).notes == ()


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"arch": "moe"}, ("n_experts", "empty")),
        ({"n_experts": "8"}, ("topk", "empty")),
        ({**MIXTURE, "topk": "1000"}, ("topk=1000", "n_experts=8")),
        ({**MIXTURE, "other_flags": "moe-layer-freq=([0]*1+[1]*2)"}, ("([0]*1+[1]*2)",)),
        ({**MIXTURE, "other_flags": "moe-layer-freq=2;"}, (2, "dense")),
        ({**MIXTURE, "other_flags": "moe-layer-freq=[0]*2+[1]*1+[0]*1"}, ("[0]*2+[1]*1+[0]*1", "dense")),
        ({**MIXTURE, "other_flags": "first_k_dense_replace=all"}, ("all", "number of layers")),
        ({**MIXTURE, "other_flags": "first_k_dense_replace=-1"}, (-1, "number of layers")),
        ({**MIXTURE, "other_flags": "first_k_dense_replace=1.5"}, ("1.5", "number of layers")),
        ({**MIXTURE, "other_flags": "multi-latent-attention"}, ("hidden=1024", "n_heads=16", "n_experts=8", "topk=2")),
        ({**MIXTURE, "model": "DeepSeekV4"}, ("hidden=1024", "n_heads=16", "n_experts=8", "topk=2")),
        ({**MIXTURE, "tp": "4", "dp": "1", "other_flags": "ETP=2"}, (2, 4)),
        ({"ep": "2"}, ("ep", 2)),
        ({"arch": "ssm-mamba"}, ("ssm-mamba",)),
        ({"precision": "fp4"}, ("precision", "fp4")),
        ({"precision": "amp"}, ("precision", "amp")),
        ({"dp": "3"}, ("tp 2", "pp 2", "cp 1", "dp 3", 12, 8)),
        ({"head_dim": "", "n_heads": "15"}, ("head_dim", 15, "hidden=1024")),
        ({"n_kv_heads": "5", "n_params_B": ""}, ("n_kv_heads=5", "n_heads=16")),
        ({"seq_len": ""}, ("seq_len", "empty")),
        ({"profile": ""}, ("profile",)),
        ({"model": "Llama QLoRA"}, ("QLoRA",)),
    ],
)
def test_what_cannot_be_planned_has_a_reason(
    tmp_path: Path, changes: dict[str, str], facts: tuple[object, ...]
) -> None:
    with refused(UnsupportedError, *facts):
        run_of(one(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"n_layers": "1e30"}, ("n_layers", "1e30", 1024)),
        ({"hidden": "1e300", "n_heads": "1"}, ("hidden", "1e300", 1048576)),
        ({"seq_len": "99999999999"}, ("seq_len", 99999999999)),
        ({"global_batch": "67108864", "micro_batch": "1"}, (67108864, 262144)),
        ({"n_experts": "1e18", "arch": "moe"}, ("n_experts", "1e18")),
    ],
)
def test_a_row_with_absurd_numbers_is_not_evaluated(
    tmp_path: Path, changes: dict[str, str], facts: tuple[object, ...]
) -> None:
    with refused(UnsupportedError, *facts):
        run_of(one(tmp_path, **changes))


def test_a_sample_has_so_many_rows_of_each_source_in_their_order() -> None:
    rows = [Row(line=at, values={"source": "many" if at % 3 else "few"}) for at in range(60)]
    chosen = sampled(rows, 20)
    assert [row.line for row in chosen] == sorted(row.line for row in chosen)
    assert sum(row.text("source") == "few" for row in chosen) == 20  # all
    assert sum(row.text("source") == "many" for row in chosen) == 20
    assert sampled(rows, 20) == chosen
    assert sampled(rows, 60) == tuple(rows)


@pytest.mark.parametrize(
    ("word", "kind"),
    [("reserved", "reserved"), ("torch.cuda.max_memory_allocated", "allocated"), ("nvidia-smi", "used")],
)
def test_what_a_peak_counts_by_its_name(tmp_path: Path, word: str, kind: str) -> None:
    assert one(tmp_path, peak_mem_kind=word).peak_kind() == kind


@pytest.mark.parametrize(
    ("word", "read"),
    [("BF16", "bf16"), ("bfloat16", "bf16"), ("bf16-mixed", "bf16"), ("float16", "fp16"), ("FP8", "fp8"), ("", None)],
)
def test_words_for_precision(tmp_path: Path, word: str, read: str | None) -> None:
    assert one(tmp_path, precision=word).precision() == read


def test_measured_columns_of_other_names_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "runs.csv", row(iter_time_s="", peak_mem_GB=""))
    head, cells = path.read_text(encoding="utf-8").splitlines()
    path.write_text(f"{head},step_time_ms,mfu\n{cells},1350,41%\n", encoding="utf-8")
    (found,) = read_rows(path)
    assert unread_of(found)[0].startswith("nothing measured is read of step_time_ms, mfu: iter_time_s, ")
    assert unread_of(one(tmp_path)) == ()
