"""Names of models as people write them: `llama-8b`, `llama3-70b`, `meta-llama/Llama-3.1-70B`.

They are accepted only where a user names a model; plans keep the name of the zoo. A config in a folder of that name
goes before the zoo. For `ORGANISATION/NAME`, as on the Hugging Face hub, only the name counts; nothing is downloaded.
"""

import os
import re
from pathlib import Path

from hardware_profiles.spelling import nearest_names
from planner.errors import ModelError
from planner.models.overrides import split_reference
from planner.models.zoo import ZOO

_ENDINGS = re.compile(r"[-_](hf|base|instruct|chat|it|pt|uncased|cased|v[0-9.]+|[0-9]{4})$")
"""Endings of names on the hub that say how weights were trained or packed; no plan depends on them."""

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_LLAMA_3 = re.compile(r"(?:meta)?llama3(?:\.[13])?([0-9]+b)")
"""Llama 3, 3.1 and 3.3 have the same dimensions; the zoo calls them llama8b, llama70b and llama405b."""


def full_model(reference: str) -> str:
    """The name in the zoo that is meant, with the model's changes; any other reference unchanged.

    Raises ModelError for a name of the hub that is neither a folder nor in the zoo.
    """
    name, changes = split_reference(reference)
    config = os.path.isfile(Path(name, "config.json"))
    if name in ZOO or ":" in name or name.endswith(".json") or config:
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
    """The name in the zoo, after removing as few endings as possible."""
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
