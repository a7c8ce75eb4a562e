"""Options and keys of plan files that have new words since this version. The old ones are still taken, with one line
that says the new one; in the next version this file is empty."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "plan": {"--copies": "--interleave"},
    "run": {"--copies": "--state-replicas", "--data": "--dataset"},
}
"""By the command; "plan" stands for all that take what `plan` itself takes."""

KEYS: Mapping[tuple[str, str], str] = {
    ("training", "copies"): "interleave",
    ("prediction", "parked"): "offloaded",
}
"""Of plan files, by section."""


def with_new_options(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command with its options in their new words, and a line for each that had an old one."""
    renamed, found, said = OPTIONS.get(command, {}), list[str](), list[str]()
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[at:]], said
        option, equals, value = argument.partition("=")
        if option in renamed:
            said.append(f"{option} is now {renamed[option]}")
            argument = f"{renamed[option]}{equals}{value}"
        found.append(argument)
    return found, list(dict.fromkeys(said))


def rename_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Give the sections of a plan file the new keys, in place; yields a line for each old one. A key that stands there
    under both words is left for the check of the form."""
    for (section, old), new in KEYS.items():
        inside = content.get(section)
        if isinstance(inside, dict) and old in inside and new not in inside:
            inside[new] = inside.pop(old)
            yield f"{section}.{old} is now {section}.{new}"
