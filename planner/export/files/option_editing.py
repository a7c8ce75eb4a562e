"""Options of a script, or keys of a YAML file of options, with other values; the user's other lines stay.

A value is written where the option stands, as a number, even in place of a variable: where else a variable is used,
only a shell knows. It is quoted for the shell, unless it stands in a quoted list of options. A new option goes after
an existing one, on its own line if options have one each. An option that stands in several places, or has no place, is
not changed. The caller reads the text again.
"""

import re
import shlex
from collections.abc import Collection, Mapping

from planner.export.description import ExportError
from planner.export.files.shell_words import in_quotes

_ANCHORS = ("micro-batch-size", "tensor-model-parallel-size", "global-batch-size", "pipeline-model-parallel-size",
            "num-layers", "seq-length", "per-device-train-batch-size")  # fmt: skip


def edited_options(text: str, changes: Mapping[str, str | None], switches: Collection[str]) -> str:
    """A script with other values of some options; None removes one. What stands behind `switches` is not theirs, but
    for true and false.

    Raises ExportError if an option has no place, or several.
    """
    lines = text.splitlines(keepends=True)
    for name, value in sorted(changes.items(), key=lambda change: (change[1] is not None, change[0])):
        found = _places(lines, name, switch=name in switches)
        if len(found) > 1:
            raise ExportError(f"--{name} stands {len(found)} times in this script; change it by hand")
        if found:
            _put(lines, *found[0], value)
        elif value is not None:
            _add(lines, name, value)
    return "".join(lines)


def edited_keys(text: str, changes: Mapping[str, str | None]) -> str:
    """As `edited_options`, for a YAML file whose keys are options, with or without their dashes."""
    lines = text.splitlines(keepends=True)
    for name, value in changes.items():
        found = [(n, head[0]) for n, line in enumerate(lines) if (head := _key(name).match(line))]
        if len(found) > 1:
            raise ExportError(f"{name} stands {len(found)} times in this file; change it by hand")
        if found and value is None:
            del lines[found[0][0]]
        elif found:
            (place, key), *_ = found
            comment = re.search(r"[ \t]+#.*", lines[place])
            lines[place] = f"{key}{_plain(value or '')}{comment[0] if comment else ''}\n"
        elif value is not None:
            at, like = _key_anchor(lines)
            written = f"--{name}" if "--" in like else name.replace("-", "_")
            indent = re.match(r"\s*", lines[at])
            lines.insert(at + 1, f"{indent[0] if indent else ''}{written}: {_plain(value)}\n")
    return "".join(lines)


def _plain(value: str) -> str:
    """The value of an option in YAML form; an option without a value is a switch."""
    if not value:
        return "true"
    return f"[{value.replace(' ', ', ')}]" if " " in value else value


def _words(name: str) -> str:
    """The pattern of a name whose words are joined by dashes or underscores."""
    return "[-_]".join(re.escape(word) for word in name.split("-"))


def _key(name: str) -> re.Pattern[str]:
    return re.compile(rf"^[ \t]*['\"]?(?:--)?{_words(name)}['\"]?[ \t]*:[ \t]*")


def _key_anchor(lines: list[str]) -> tuple[int, str]:
    for name in _ANCHORS:
        for n, line in enumerate(lines):
            if _key(name).match(line):
                return n, line
    raise ExportError("no option of this file is a place for a new one; change it by hand")


def _option(name: str, switch: bool) -> re.Pattern[str]:
    """The pattern of an option and its values: of a switch none, or whether it is on; of others the first word, and
    further ones that are no variable, which may hold other options, and no sign of the shell."""
    value = r"""(?:"[^"\n]*"|'[^'\n]*'|\$\(\([^\n]*?\)\)|[^\s"'\\);|&<>]+)"""
    end = r"(?=[\s)\"']|$)"
    more = rf"""(?:[ \t]+(?!-|\#)[^\s"'\\)$;|&<>]+{end})*"""
    values = rf"=[^\s\"']*|[ \t]+(?i:true|false){end}" if switch else rf"(?:=|[ \t]+)(?!--|\\){value}{more}"
    return re.compile(rf"(?<![\w-])--{_words(name)}(?![\w-])({values})?")


def _places(lines: list[str], name: str, *, switch: bool = False) -> list[tuple[int, re.Match[str]]]:
    """Lines with an option, outside comments, and its position in each."""
    found, option = [], _option(name, switch)
    for n, line in enumerate(lines):
        if not line.lstrip().startswith("#"):
            found += [(n, match) for match in option.finditer(line)]
    return found


def _put(lines: list[str], at: int, match: re.Match[str], value: str | None) -> None:
    line = lines[at]
    given = match[1] or ""
    option = match[0][: len(match[0]) - len(given)]
    if value is None:
        rest = line[: match.start()].rstrip(" \t") + " " + line[match.end() :].lstrip(" \t")
        if re.fullmatch(r"\s*\\?\s*", rest):
            del lines[at]
        else:
            lines[at] = (line[: match.start()] + line[match.end() :].lstrip(" \t")).rstrip(" \t\n") + "\n"
        return
    sign = "=" if given.startswith("=") else " "
    written = f"{option}{sign}{_quoted(lines, at, match, value)}" if value else option
    lines[at] = line[: match.start()] + written + line[match.end() :]


def _quoted(lines: list[str], at: int, match: re.Match[str], value: str) -> str:
    """The words of a value as a shell reads them at the place of an option: as they are inside double quotes."""
    if in_quotes("".join(lines), sum(map(len, lines[:at])) + match.start()):
        return value
    return " ".join(shlex.quote(word) for word in value.split(" "))


def _add(lines: list[str], name: str, value: str) -> None:
    for anchor in _ANCHORS:
        found = _places(lines, anchor)
        if len(found) == 1:
            at, match = found[0]
            break
    else:
        raise ExportError(f"--{name}: no option of this script is a place for it; add it by hand")
    line = lines[at]
    underscored = "_" in match[0].partition(" ")[0]
    written = f"--{name.replace('-', '_') if underscored else name}"
    written += f" {_quoted(lines, at, match, value)}" if value else " true" if underscored else ""
    before, after = line[: match.start()], line[match.end() :]
    if not before.strip() and re.fullmatch(r"[ \t]*\\?[ \t]*\n?", after):
        lines.insert(at + 1, f"{before}{written}{after}")
    else:
        lines[at] = f"{before}{match[0]} {written}{after}"
