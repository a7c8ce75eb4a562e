"""Names of models as people write them: `llama-8b`, `llama3-70b`, `meta-llama/Llama-3.1-70B`.

Only where a person names a model; plans keep the name of the zoo. A config in a folder of that name goes before the
zoo. Of `ORGANISATION/NAME`, as the Hugging Face hub writes it, the name counts; nothing is downloaded.
"""

import re
from pathlib import Path

from planner.errors import ModelError, nearest_names
from planner.models.overrides import split_reference
from planner.models.zoo import ZOO

_ENDINGS = re.compile(r"[-_](hf|base|instruct|chat|it|pt|uncased|cased|v[0-9.]+|[0-9]{4})$")
"""Of names on the hub: how the weights were trained or packed, which no plan depends on."""

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_LLAMA_3 = re.compile(r"(?:meta)?llama3(?:\.[13])?([0-9]+b)")
"""Llama 3, 3.1 and 3.3 have the same dimensions; the zoo calls them llama8b, llama70b and llama405b."""


def full_model(reference: str) -> str:
    """The name of the zoo that is meant, with what is changed of it; any other reference as it is.

    Raises ModelError for a name of the hub that is neither a folder nor of the zoo.
    """
    name, changes = split_reference(reference)
    if name in ZOO or ":" in name or name.endswith(".json") or Path(name, "config.json").is_file():
        return reference
    hub = _HUB.fullmatch(name) is not None
    if "/" in name and not hub:
        return reference
    found = _of_zoo(name.rpartition("/")[2])
    if found is None:
        if hub:
            near = nearest_names(name.rpartition("/")[2].lower(), ZOO)
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise ModelError(
                f"'{name}' is no folder here, and the zoo has no such model{hint}. Nothing is downloaded: put its"
                f" config.json into a folder {name}/"
            )
        return reference
    return "+".join([found, *(f"{key}={value}" for key, value in changes.items())])


def _of_zoo(spoken: str) -> str | None:
    """The name of the zoo, with as few endings taken off as need be."""
    names = {_plain(name): name for name in ZOO}
    assert len(names) == len(ZOO), "plain names are distinct"
    rest, shorter = "", spoken.lower()
    while shorter != rest:
        rest, shorter = shorter, _ENDINGS.sub("", shorter)
        plain = _plain(rest)
        llama = _LLAMA_3.fullmatch(plain)
        if found := names.get(plain) or (names.get(f"llama{llama[1]}") if llama else None):
            return found
    return None


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
