"""Records the arguments of Megatron-LM anew: python -m tests.engines.record FOLDER

FOLDER holds the sources of Megatron-LM. Its parser is built, and what it knows is written to
`tests/unit/export/engines/megatron-VERSION.json`, beside those of
other versions, against all of which exports are held.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from tests.engines.stubs import without_kernels

PLACE = Path(__file__).resolve().parents[1] / "unit" / "export" / "engines"
PACKAGE = "megatron/core/package_info.py"


def rows(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Every option by its name: its type, choices and number of values."""
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        row: dict[str, Any] = {"type": "flag" if action.nargs == 0 else getattr(action.type, "__name__", "str")}
        if action.choices is not None:
            row["choices"] = [str(choice) for choice in action.choices]
        if action.nargs not in (None, 0):
            row["nargs"] = str(action.nargs)
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                found[name.removeprefix("--")] = row
    return dict(sorted(found.items()))


def main(folder: Path) -> None:
    without_kernels()
    sys.path.insert(0, str(folder))
    arguments = importlib.import_module("megatron.training.arguments")
    info: dict[str, Any] = {}
    lines = (folder / PACKAGE).read_text(encoding="utf-8").splitlines()
    for line in lines:
        name, equals, value = line.partition(" = ")
        if equals and name in ("MAJOR", "MINOR", "PATCH"):
            info[name] = int(value)
    version = f"{info['MAJOR']}.{info['MINOR']}"
    content = {
        "package": "megatron-core",
        "version": version,
        "source": "NVIDIA/Megatron-LM, megatron/training/arguments.py, its parser built and listed",
        "options": rows(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))),
    }
    listed = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in content.pop("options").items())  # type: ignore[attr-defined]
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
    text = "{\n" + head + ',\n "options": {\n' + listed + "\n }\n}\n"
    assert json.loads(text)
    (PLACE / f"megatron-{version}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
