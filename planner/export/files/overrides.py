"""Settings that a command line overrides, `model.tensor_model_parallel_size=4`, as in Hydra, by their path."""

import re
from typing import Any

from planner.export.files.shell_words import Variables, words_of

_OVERRIDE = re.compile(r"\+{0,2}((?:[a-z_]\w*\.)+\w+)=(.*)", re.DOTALL)
_MOST = 2000


def overrides_in(script: str) -> dict[str, Any]:
    """Values by path; those that a script leaves to its caller stay unexpanded."""
    found: dict[str, Any] = {}
    for word in words_of(script):
        matched = _OVERRIDE.fullmatch(word)
        if matched is not None and len(found) < _MOST:
            found[matched[1]] = _value(matched[2].strip("'\""))
    return found


def choice_in(script: str, group: str) -> str:
    """The file that a group is taken from, `training=llama/llama2_7b` (which a shell would read as a variable); else
    empty."""
    variables = Variables()
    for _ in words_of(script, variables):
        pass
    return variables.known.get(group, "")


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d{1,12}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d{1,12}\.\d{0,12}", text) else text
