"""Arguments of programs that are based on transformers' `Trainer`, from scripts and files of YAML or JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardware_profiles.foreign import SETTINGS, ForeignTextError, parse_json
from planner.export.description import ExportError
from planner.export.files.arguments import Options, options_in
from planner.export.files.settings import checked_count, size_of
from planner.export.files.yaml_files import parse_yaml

BATCH = "per_device_train_batch_size"
MARK = re.compile(
    rf"(?:^[ \t]*|^{{.*?)[\"']?{BATCH}[\"']?[ \t]*:|^[^#\n]*--{BATCH.replace('_', '[-_]')}\b", re.MULTILINE
)
_OFF = ("false", "0", "no", "none", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Arguments by name, with the `variables` of a script and the `launcher`'s own options."""

    values: Mapping[str, str]
    options: Options
    swift: bool
    yaml: bool

    @property
    def factory(self) -> bool:
        """Whether it is a file of LLaMA-Factory."""
        return "finetuning_type" in self.values or "cutoff_len" in self.values

    @property
    def machines(self) -> int | None:
        """How many machines there are, one unless something is said of them; None if the file does not tell."""
        said = self.word("nnodes", "num_nodes", "num_machines")
        if said:
            return size_of(said)
        return None if self.yaml or self.word("hostfile", "deepspeed_hostfile") else 1

    def word(self, *names: str) -> str:
        """The first of these arguments that is given and not off; else empty."""
        for name in names:
            found = self.values.get(name, "").strip()
            if found and found.lower() not in ("none", "null", "false"):
                return found
        return ""

    def truth(self, name: str, default: bool = False) -> bool:
        found = self.values.get(name)
        return default if found is None else found.strip().lower() in ("", "true", "1", "yes")

    def on(self, name: str) -> bool:
        """Whether a switch of a launcher is given, which takes no value."""
        return self.values.get(name, "false").strip().lower() not in _OFF

    def section(self, name: str) -> Mapping[str, Any]:
        """An argument that has keys of its own; empty if it is not given, or names a file."""
        word = self.word(name)
        if not word.startswith("{"):
            return {}
        try:
            found = parse_json(word, SETTINGS)
        except ForeignTextError as error:
            raise ExportError(f"{name}: {error}") from error
        return found if isinstance(found, dict) else {}

    def count(self, name: str) -> int | None:
        """A whole number of 1 or more; None if it is not given."""
        word = self.word(name)
        if not word or word == "auto":
            return None
        found = size_of(word)
        if found is None:
            kind = "a variable that the file does not set, and no" if word.startswith("$") else "no"
            raise ExportError(f"{name}: {word:.80}: {kind} number of 1 or more; write the number in the file")
        return checked_count(name, found)


def given_in(text: str) -> Given:
    """The arguments in a script, or in a file of YAML or JSON."""
    if text.lstrip().startswith("{") or re.search(rf"^[\"']?{BATCH}[\"']?\s*:", text, re.MULTILINE):
        try:
            content = parse_yaml(text)
        except ForeignTextError as error:
            raise ExportError(str(error)) from error
        values = {str(name): _text(value) for name, value in content.items()} if isinstance(content, dict) else {}
        return Given(values=values, options=Options({}), swift=False, yaml=True)
    options = options_in(text)
    values = {name.replace("-", "_"): " ".join(words) for name, words in options.all}
    return Given(
        values=values,
        options=options,
        swift=re.search(r"\bswift(?: |/cli/)(sft|pt|rlhf)\b", text) is not None,
        yaml=False,
    )


def _text(value: object) -> str:
    return json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
