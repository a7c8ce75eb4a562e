"""Configurations that other projects publish are read as they are meant, or refused in one line."""

import csv
from pathlib import Path

import pytest

from planner.export.architecture import architecture_of
from planner.export.description import ExportError
from planner.export.guessing import guessed_engine
from planner.export.models_of import model_of
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from planner.models.zoo import zoo_entry

HERE = Path(__file__).parents[2] / "data" / "published"
ROWS = list(csv.DictReader((HERE / "configurations.csv").read_text().splitlines()))
SAID = {  # what is in no price, of some
    "megatron/train_llama3_8b_h100_fp8.sh": "fp8-recipe delayed",
    "torchtitan/llama3_405b.toml": "enable_fsdp_float8_all_gather",
    "accelerate/axolotl_qlora-fsdp-70b.yaml": "adapter",
    "mindspeed/pretrain_deepseek3_671b_4k_ptd.sh": "moe-fb-overlap",
}


def reading_of(row: dict[str, str]) -> Reading:
    text = (HERE / row["file"]).read_text()
    model = row["model"] or model_of(row["engine"], text, row["recipe"])
    if not model:
        raise ExportError("name the model with --model")
    facts = Facts(
        layers=dict(zoo_entry(model).dimensions).get("num_layers", 12),
        devices=int(row["devices"]),
        architecture=architecture_of(model, None),
        recipe=row["recipe"],
        model=model,
    )
    return TARGETS[row["engine"]].read(text, facts)


def words_of(reading: Reading) -> str:
    d = reading.description
    return (
        f"d{d.data} t{d.tensor} p{d.pipeline}x{d.virtual_stages} c{d.ring}x{d.heads} e{d.expert or 0} z{d.zero}"
        f" r{d.replicas} m{d.micro_batch}x{d.micro_batches} f{sum(d.full)} s{sum(d.selective)} {d.precision}"
    )


def name_of(row: dict[str, str]) -> str:
    return f"{row['file']}-{row['model']}"


@pytest.mark.parametrize("row", [row for row in ROWS if row["read"]], ids=name_of)
def test_a_published_configuration_says_what_it_says(row: dict[str, str]) -> None:
    reading = reading_of(row)
    assert words_of(reading) == row["read"]
    assert reading.description.devices == int(row["devices"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["refused"]], ids=name_of)
def test_what_is_not_read_is_refused_in_one_line(row: dict[str, str]) -> None:
    with pytest.raises(ExportError) as refused:
        reading_of(row)
    assert row["refused"] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_most_are_read() -> None:
    assert sum(bool(row["read"]) for row in ROWS) >= 55
    assert {row["engine"] for row in ROWS} >= set(TARGETS) - {"torch", "megatron-bridge"}


@pytest.mark.parametrize("row", [row for row in ROWS if row["file"] in SAID], ids=name_of)
def test_what_matters_and_has_no_price_is_said(row: dict[str, str]) -> None:
    reading = reading_of(row)
    words = " ".join((*reading.unmodelled, *reading.notes))
    assert SAID[row["file"]] in words


@pytest.mark.parametrize(
    ("file", "states", "weights"),
    [
        ("zero_stage2_offload_config.json", "host", "device"),
        ("axolotl_zero3_bf16_cpuoffload_all.json", "host", "host"),
        ("zero_stage3_config.json", "device", "device"),
    ],
)
def test_what_deepspeed_offloads_is_part_of_the_description(file: str, states: str, weights: str) -> None:
    for row in (row for row in ROWS if row["file"] == f"deepspeed/{file}" and row["read"]):
        reading = reading_of(row)
        assert (reading.description.states_at, reading.description.weights_at) == (states, weights)
        assert any("updated on the processors of the host" in note for note in reading.notes) == (states == "host")
        assert not any("offload" in words for words in reading.unmodelled)


def test_the_engine_of_a_file_is_guessed() -> None:
    wrong = []
    for row in ROWS:
        try:
            found = guessed_engine((HERE / row["file"]).read_text(), TARGETS)
        except ExportError:
            found = ""
        if found != row["engine"]:
            wrong.append(row["file"])
    assert wrong == ["nemo/performance_llama3_8b.py"]


def test_the_model_of_a_file_is_found() -> None:
    named = [row for row in ROWS if row["read"] and row["engine"] in ("megatron", "mindspeed", "mindformers")]
    found = {row["file"]: model_of(row["engine"], (HERE / row["file"]).read_text(), row["recipe"]) for row in named}
    assert found == {row["file"]: row["model"] for row in named}
