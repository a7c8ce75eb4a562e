"""`--help` fits: `plan` on a screen, an option in a line; and names are understood as people write them."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hardware_profiles import profile_names
from hardware_profiles.nicknames import full_profile
from planner.cli.helping import EXAMPLES, PURPOSES, command_help
from planner.cli.main import COMMANDS, app
from planner.cli.options import Options
from planner.cli.spoken import parse_counted, parse_tokens
from planner.errors import ModelError, RequestError
from planner.models.nicknames import full_model
from planner.models.zoo import ZOO
from tests.refusals import refused

GROUP = typer.main.get_command(app)


def printed(*words: str, columns: int = 100) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_help_of_plan_is_one_screen_with_every_command() -> None:
    lines = printed("--help", columns=80).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert all(f"  {one}" in lines for one in EXAMPLES)
    listed = {name.rstrip(",") for _, rows in PURPOSES for names, _ in rows for name in names.split()} - {"WORD"}
    assert listed == {*COMMANDS, "checkpoint"}


def paths() -> list[str]:
    every = dict(GROUP.commands)  # type: ignore[attr-defined]
    inner = every.pop("checkpoint").commands
    return [*every, *(f"checkpoint {name}" for name in inner)]


@pytest.mark.parametrize("path", paths())
def test_every_command_has_examples_and_every_option_one_line(path: str) -> None:
    text = printed(*path.split(), "--help")
    assert f"\n  plan {path}" in text[text.index("Examples") :]
    listing = text[text.index("Examples") :].splitlines()
    assert [line for line in listing if line.startswith("      ")] == [], "an option takes more than a line"
    assert "default: (" not in text
    assert max(map(len, listing)) <= 100


def test_options_are_in_the_help_of_search_by_group_and_told_whole() -> None:
    text = printed("search", "--help")
    for field in Options.__dataclass_fields__:
        name = {"as_json": "json", "engine": "for"}.get(field, field).replace("_", "-")
        assert f"--{name}" in text or f"--[no-]{name}" in text, field
    headings = ["Training job", "Parallelism", "Output", "Search and memory", "Gradients and optimizer states", "fp8"]
    assert [text.index(f"\n{one}\n") for one in headings] == sorted(text.index(f"\n{one}\n") for one in headings)
    whole = printed("help", "gathers")
    assert "ahead prefetches" in whole.replace("\n ", "")
    assert "ahead prefetches" not in text
    assert printed("help", "export") == printed("export", "--help")
    with typer.Context(GROUP, info_name="plan") as context:  # type: ignore[arg-type]
        assert "Commands" in command_help(GROUP, context)


def test_names_of_models_are_understood_as_people_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for said, meant in (
        ("llama-8b", "llama8b"),
        ("llama3-70b", "llama70b"),
        ("meta-llama/Llama-3.1-70B", "llama70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama8b"),
        ("Llama-2-7b-hf", "llama2-7b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("bert-large-uncased+num_layers=6", "bert-large+num_layers=6"),
        ("llama", "llama"),
        ("mine:factory", "mine:factory"),
        ("./config.json", "./config.json"),
    ):
        assert full_model(said) == meant, said
    assert [full_model(name) for name in ZOO] == list(ZOO)
    with refused(ModelError, "meta-llama/Llama-9-70B", "llama2-70b", "downloaded"):
        full_model("meta-llama/Llama-9-70B")
    (tmp_path / "meta-llama/Llama-3.1-70B").mkdir(parents=True)
    assert full_model("meta-llama/Llama-3.1-70B") == "llama70b", "a folder without a config is no model"
    (tmp_path / "meta-llama/Llama-3.1-70B/config.json").write_text("{}")
    assert full_model("meta-llama/Llama-3.1-70B") == "meta-llama/Llama-3.1-70B"


def test_names_of_hardware_are_understood_as_people_write_them() -> None:
    for said, meant in (
        ("h100", "h100-80gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA H200", "h200-141gb"),
        ("RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-96gb"),
        ("H20-3e", "h20-141gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("mi355x", "mi355x-288gb"),
        ("H100 PCIe", "h100-pcie-80gb"),
        ("V100 16GB", "v100-16gb"),
        ("L4", "l4-24gb"),
        ("RTX A6000", "rtx-a6000-48gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("h100:32,a100[node=4,cluster@25]:32,between@5", "h100-80gb:32,a100-80gb[node=4,cluster@25]:32,between@5"),
        ("mine.toml", "mine.toml"),
        ("h1000", "h1000"),
    ):
        assert full_profile(said) == meant, said
    assert [full_profile(name) for name in profile_names()] == list(profile_names())


def test_numbers_have_units() -> None:
    assert [parse_counted("--seq-len", text) for text in ("8192", "32k", "32K", "1m", "8,192")] == [
        8192, 32768, 32768, 2**20, 8192,
    ]  # fmt: skip
    assert [parse_tokens("--tokens", text) for text in ("15T", "1.5e13", "300B", "2g")] == [15e12, 15e12, 3e11, 2e9]
    for text in ("0", "32kk", "-8", "1.5k", "8,19"):
        with refused(RequestError, "--seq-len", text):
            parse_counted("--seq-len", text)
    for text in ("T", "0", "-3B", "1e99", "nan"):
        with refused(RequestError, "--tokens", text):
            parse_tokens("--tokens", text)


def test_what_was_understood_is_said_back() -> None:
    result = CliRunner().invoke(app, ["models", "llama8b", "--json"])
    assert "note" not in result.stderr
    words = ["--model", "llama-tiny", "--hardware", "H100", "--seq-len", "1k", "--devices", "3", "--tensor", "2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "note: --hardware H100 is h100-80gb\n" in result.stderr
    assert "note: --seq-len 1k is 1,024\n" in result.stderr
