"""Names out of files are printed as text: they are no markup, and no escape sequence reaches the terminal."""

import io
import json
import re
import struct
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import planner
from planner.cli.texts import say
from planner.report.console import PlainConsole, styled
from planner.report.table import table_of
from tests.unit.cli.conftest import CommandLine

plan = CommandLine()

MARKUP = "[/x] [bold]y[/bold] [red]z[/] :smile:"
ESCAPES = "\x1b]0;title\x07\x1b[2J\x1b[31m\u202e\r"
SPELLED = "\\x1b]0;title\\x07\\x1b[2J\\x1b[31m\\u202e\\r"

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("[/x]", nn.Linear(16, 16))

    def forward(self, x):
        return getattr(self, "[/x]")(x).pow(2).mean()

def net():
    return Net(), (torch.zeros(4, 16),)
"""


def saved(path: Path, *names: str) -> Path:
    """A file of tensors with these names."""
    rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)}
    header = json.dumps(rows).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4 * len(names)))
    return path


def test_names_of_tensors_are_text(tmp_path: Path) -> None:
    answer = plan(
        "checkpoint", "inspect", str(saved(tmp_path / "a.safetensors", "[/x]", f"w{ESCAPES}", "[bold]y[/bold]"))
    )
    assert answer.code == 0, answer
    assert "[/x]" in answer.out
    assert "[bold]y[/bold]" in answer.out
    assert f"w{SPELLED}" in answer.out.replace("\n", "")
    assert "\x1b" not in answer.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of a model whose file and operators have names like markup."""
    made = tmp_path_factory.mktemp("names")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        Path("bracketed.py").write_text(OWN)
        options = ("--hardware", "cpu", "--devices", "2", "--global-batch", "8", "-o", "plan")
        answer = plan("--model", "bracketed:net", *options)
        assert answer.code == 0, answer
        assert "[/x]" in answer.out
    content = json.loads((made / "plan").read_text())
    content["model"]["reference"] = "[/x][bold]:net"
    (made / "plan").write_text(json.dumps(content))
    return made


COMMANDS = (
    ("show", "plan"),
    ("show", "plan", "--rank", "1"),
    ("verify", "plan"),
    ("explain", "plan", "--no-search"),
    ("explain", "plan", "[/x]/linear", "--no-search"),
    ("estimate", "plan", "-o", "[/x]"),
    ("diff", "plan", "[/x]"),
    ("report", "plan", "--no-search", "-o", "[/x].html"),
    ("export", "plan", "--to", "mindspore", "-o", "[/x] strategies"),
    ("export", "plan", "--to", "deepspeed", "-o", "[/x] engine", "--approximate"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_names_in_plans_are_text(folder: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if command[0] == "diff":
        assert plan("estimate", "plan", "-o", "[/x]").code == 0
    answer = plan(*command)
    assert answer.code == 0, answer
    assert "[/x]" in answer.out or command[0] in ("verify", "explain"), answer


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("mindformers", f"parallel_config: {{data_parallel: 2, {json.dumps(MARKUP + ESCAPES)}: 1}}"),
        ("torchtitan", f"[parallelism]\ndata_parallel_shard_degree=2\n{json.dumps(MARKUP + ESCAPES)}=1"),
        ("deepspeed", json.dumps({"data_parallel_size": 2, "pipeline": {MARKUP + ESCAPES: 1}})),
        ("megatron", f"--nproc-per-node 2 --micro-batch-size 1 --x{MARKUP.replace(' ', '')}{ESCAPES}"),
    ],
)
def test_keys_that_are_not_read_are_text(engine: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "[/x]"
    file.parent.mkdir()
    file.write_text(text, newline="")
    answer = plan("import", str(file), "--from", engine, "--model", "llama-tiny", "--hardware", "cpu", "--verbose")
    assert answer.code == 0, answer
    told = answer.out.replace("\n", "")
    assert MARKUP.replace(" ", "") in told.replace(" ", "")
    assert (
        SPELLED.partition(";")[0] if engine == "megatron" else SPELLED
    ) in told  # a semicolon ends a shell's command
    assert "\x1b" not in answer.out


@pytest.mark.parametrize("width", [120, 20])
def test_cells_titles_and_headers_are_text_on_every_console(width: int) -> None:
    for made in (Console, PlainConsole):
        found = io.StringIO()
        table = table_of(f"\nTitle {MARKUP}", f"one {MARKUP}", MARKUP)
        table.add_row(f"{MARKUP}{ESCAPES}", Text("bold", style="bold"))
        made(file=found, width=width, force_terminal=False).print(table)
        for word in (*MARKUP.split(), "bold"):
            assert word in found.getvalue() or width < len(MARKUP), found.getvalue()
        assert "[/x]" in found.getvalue()
        assert "\x1b" not in found.getvalue()


def test_strings_are_text_and_styles_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = io.StringIO()
    console = PlainConsole(file=found, width=200, force_terminal=True, color_system="standard")
    console.print(f"a {MARKUP}{ESCAPES}\nb\tc")
    console.print(styled("Written to ", (f"run{ESCAPES}", "bold")))
    assert found.getvalue().startswith(f"a {MARKUP}{SPELLED}\nb")
    assert f"Written to \x1b[1mrun{SPELLED}\x1b[0m" in found.getvalue()
    say(f"{MARKUP}{ESCAPES}\nb")
    assert capsys.readouterr().out == f"{MARKUP}{SPELLED}\nb\n"


def test_nothing_is_printed_another_way() -> None:
    """Console and typer.echo know markup and escape sequences; only these files may call them."""
    sources = Path(planner.__file__).parent
    calls = {
        str(path.relative_to(sources))
        for path in sources.rglob("*.py")
        if re.search(r"(?<![\w\"])Console\(|typer\.echo\(|from_markup", path.read_text(encoding="utf-8"))
    }
    assert calls == {"cli/main.py", "cli/texts.py", "cli/commands/help_.py"}
