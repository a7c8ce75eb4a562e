"""The words of a shell script, as far as they are known without running it.

    text ─ tokens ─▶ words with their quotes ─ conditions ─▶ those of branches that may run ─ variables ─▶ words

Nothing is run and no environment is read. Variables that the script sets are expanded. So are defaults of other
variables (`${TP:-4}`, and `${TP:=4}`, which also sets it), variables that Slurm sets from the script's requests
(`#SBATCH --nodes=4`), and arithmetic on whole numbers (`$((NODES * 8))`). A branch whose condition compares known words
is read or left out; if a condition is unknown, all of its branches are read, as are those of `case`, and numbers that
differ there are noted. A quoted list of options that stands alone
is split into words, as a shell does with an unquoted variable.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.export.description import ExportError

_SCRIPT = 2**18  # most characters of a script, because splitting words in Python is slow
_EXPANDED = 2**18  # most characters of all expanded variables: each may contain another one twice
_NESTED = 8  # depth of variables in the defaults of variables
_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
      | (?P<space>(?:[ \t\r]|\\\r?\n)+)
      | (?P<line>\n)
      | (?P<sign>\|\||&&|;;|[;&|])
      | (?P<word>(?: \\.
                   | '[^']*'
                   | "(?:\\.|[^"\\])*"
                   | \$\(\([^\n]{0,200}?\)\)
                   | \$\{(?:[^{}"$\n]|"[^"\n]{0,256}"|\$(?!\{)|\$?\{[^{}\n]{0,256}\}){0,256}\}
                   | [^\s;&|"'\\] )+)""",
    re.VERBOSE | re.DOTALL,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_INNERMOST = re.compile(
    r"\$\{(?P<braced>\w+)(?::?(?P<sign>[-=])(?P<default>[^${}]{0,256}))?\}|\$(?P<plain>[A-Za-z_]\w*|\d)|\$\(\((?P<sum>[^$]{0,200}?)\)\)"
)
_EXPR = re.compile(r"(?:\$\([ ]*|`)expr ([\w\s$\{\}+*/%\\-]{1,200}?)[ ]*(?:\)|`)")
_NUMBER = re.compile(r"\d{1,12}")
_SUM = re.compile(r"[\d\s()*/+%-]+")
_SBATCH = re.compile(r"^#SBATCH[ \t]+(--?[A-Za-z][\w-]*)[= \t]+(?:[\w-]+:){0,2}(\d{1,9})(?=\s|$)", re.MULTILINE)
_SLURM = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), "--gres": ("SLURM_GPUS_ON_NODE",),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "--ntasks": ("SLURM_NTASKS",), "-n": ("SLURM_NTASKS",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",), "-c": ("SLURM_CPUS_PER_TASK",),
}  # fmt: skip
"""Variables that Slurm sets from options of sbatch. Source: SchedMD, man page of sbatch, output environment."""
_LAUNCHERS = ("accelerate", "deepspeed", "numactl", "python", "python3", "srun", "torchrun", "uv")
_OPENED = {"if": "condition", "elif": "condition", "then": "branch", "else": "branch", "fi": "end"}


def words_of(script: str, variables: "Variables | None" = None) -> Iterator[str]:
    """The words that commands, variables and arrays of a script may contain, in their order.

    An empty word ends a command. `variables` gets what the script sets. Raises ExportError if quotes do not match, or
    if the script or the values of its variables are too long.
    """
    if len(script) > _SCRIPT:
        raise ExportError(f"not a launch script: {len(script)} characters are too many; at most {_SCRIPT}")
    known, branches = Variables() if variables is None else variables, _Branches()
    known.known.update(_of_slurm(script))
    for command in _commands(_EXPR.sub(r"$((\1))", script)):
        if not branches.runs(command, known):
            continue
        known.unsure = branches.unsure
        for raw in command:
            yield from _words(raw, known)
        yield ""


def _of_slurm(script: str) -> dict[str, str]:
    """Variables that Slurm sets from a script's requests; empty for other scripts."""
    return {name: count for option, count in _SBATCH.findall(script) for name in _SLURM.get(option, ())}


def scheduled_devices(script: str) -> int | None:
    """Devices that a script requests from Slurm; None if it does not state both nodes and devices per node."""
    asked = _of_slurm(script)
    nodes, each = asked.get("SLURM_NNODES"), asked.get("SLURM_GPUS_ON_NODE")
    return None if nodes is None or each is None else int(nodes) * int(each)


@dataclass(slots=True)
class Variables:
    """Variables that a script sets, and the characters that expansions may still use.

    Attributes:
        unsure: whether a command may be left out, by a condition that is not known.
        others: other numbers that variables have without such commands.
        used: names of these that are expanded.
    """

    known: dict[str, str] = field(default_factory=dict)
    left: int = _EXPANDED
    unsure: bool = False
    others: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    @property
    def notes(self) -> tuple[str, ...]:
        """What depends on conditions that are not known."""
        return tuple(
            f"{name}: {self.others[name]} or {self.known[name]}, by a condition that the file does not decide; read as"
            f" {self.known[name]}"
            for name in self.others
            if name in self.used
        )

    def give(self, name: str, text: str) -> None:
        """Set a variable; it is noted if it had another number, which it may still have."""
        before = self.known.get(name, text)
        if not self.unsure:
            self.others.pop(name, None)
        elif before != text and _NUMBER.fullmatch(before) and _NUMBER.fullmatch(text):
            self.others[name] = before
        self.known[name] = text

    def expanded(self, text: str) -> str:
        """A text with known variables and sums of numbers expanded; others stay as they are."""
        for _ in range(_NESTED):
            found = _INNERMOST.sub(self._value, text)
            if found == text:
                break
            text = found
        return text

    def _number(self, name: re.Match[str]) -> str:
        """The whole number of a variable in a sum; else its name, which makes no sum."""
        value = self.known.get(name[0], name[0])
        if name[0] in self.others:
            self.used.add(name[0])
        return value if re.fullmatch(r"\d{1,12}", value) else name[0]

    def _value(self, match: re.Match[str]) -> str:
        if match["sum"] is not None:
            names = re.sub(r"[A-Za-z_]\w*", self._number, match["sum"])
            total = _summed(names) if _SUM.fullmatch(names) else None
            return match[0] if total is None else str(total)
        name = match["braced"] or match["plain"]
        default = match["default"]
        if name in self.others:
            self.used.add(name)
        found = self.known.get(name, match[0] if default is None else default.strip("\"'"))
        if match["sign"] == "=":
            self.known[name] = found
        self.left -= len(found)
        if self.left < 0:
            raise ExportError(
                f"${name}: the variables of the script become more than {_EXPANDED} characters; write the options out"
            )
        return found


def _summed(text: str) -> int | None:
    """The value of whole numbers with + - * / % and brackets; None if it has none."""
    tokens = re.findall(r"\d{1,12}|[()*/+%-]", text)
    try:
        value, rest = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return None if rest else value


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign, (other, rest) = tokens[0], _product(tokens[1:])
        value, tokens = value + other if sign == "+" else value - other, rest
    return value, tokens


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _number(tokens)
    while tokens and tokens[0] in "*/%":
        sign, (other, rest) = tokens[0], _number(tokens[1:])
        value, tokens = value * other if sign == "*" else value // other if sign == "/" else value % other, rest
    return value, tokens


def _number(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] != "(":
        return int(tokens[0]), tokens[1:]
    value, rest = _sum(tokens[1:])
    if rest[0] != ")":
        raise ValueError(rest[0])
    return value, rest[1:]


def _commands(script: str) -> Iterator[list[str]]:
    """Words with their quotes, command by command; an array is one command, even over several lines."""
    at, command, open_brackets, start = 0, list[str](), 0, True
    while at < len(script):
        match = _TOKEN.match(script, at)
        if match is None:
            raise ExportError(f"not a shell script: no closing quotation at line {script.count(chr(10), 0, at) + 1}")
        kind = str(match.lastgroup)
        if kind == "comment" and not start:  # a # inside a word
            kind = "word"
        at = match.end()
        if kind == "word":
            command.append(match[0])
            open_brackets += _brackets(match[0])
        elif kind in ("line", "sign") and open_brackets <= 0 and command:
            yield command
            command, open_brackets = [], 0
        start = kind != "word"
    if command:
        yield command


def in_quotes(script: str, place: int) -> bool:
    """Whether a place of a script is inside double quotes. A script without a closing quote has no such place."""
    at = 0
    while (match := _TOKEN.match(script, at)) is not None and match.end() <= place:
        at = match.end()
    if match is None or match.lastgroup != "word":
        return False
    return re.sub(r"""'[^']*'|"(?:\\.|[^"\\])*\"|\\.""", "", script[at:place], flags=re.DOTALL).count('"') % 2 == 1


def _brackets(word: str) -> int:
    """How many brackets a word opens: those of an array, not of a value."""
    if '"' in word or "'" in word or "$" in word:
        word = re.sub(r"""\$\(\([^\n]{0,200}?\)\)|'[^']*'|"(?:\\.|[^"\\])*\"""", "", word, flags=re.DOTALL)
    return word.count("(") - word.count(")")


@dataclass(slots=True)
class _Branches:
    """Which branches of conditions are read: for each open condition, whether this branch is, and whether an earlier
    one was."""

    open: list[tuple[bool | None, bool]] = field(default_factory=list)
    cases: int = 0

    @property
    def unsure(self) -> bool:
        """Whether a command is read that may not run."""
        return self.cases > 0 or any(now is None for now, _ in self.open)

    def runs(self, command: list[str], known: Variables) -> bool:
        """Whether a command may run; removes words of conditions from it."""
        word = command[0]
        if word == "if":
            self.open.append((_holds(command[1:], known), False))
            return False
        self.cases = max(0, self.cases + (word == "case") - (word == "esac"))
        if word in _OPENED and self.open:
            now, before = self.open.pop()
            before = before or now is True
            if word == "elif":
                self.open.append((False if before else _holds(command[1:], known), before))
                return False
            if word == "else":
                self.open.append((None if now is None or not before else False, before))
            elif word == "then":
                self.open.append((now, before))
            del command[0]
            return bool(command) and self._reads()
        return self._reads()

    def _reads(self) -> bool:
        return all(now is not False for now, _ in self.open)


def _holds(condition: list[str], known: Variables) -> bool | None:
    """Whether `[ A = B ]`, `[ -n A ]` or `[ -z A ]` holds; None if unknown."""
    words = [_unquoted(known.expanded(word)) for word in condition if word not in ("[", "[[", "]", "]]")]
    if any("$" in word or "`" in word for word in words):
        return None
    match words:
        case [one, "=" | "==" | "-eq", other]:
            return one == other
        case [one, "!=" | "-ne", other]:
            return one != other
        case ["-n", one]:
            return bool(one)
        case ["-z", one]:
            return not one
    return None


def _unquoted(text: str) -> str:
    """A word without its quotes."""
    return re.sub(
        r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""",
        lambda m: next(g for g in m.groups() if g is not None).replace("\\\n", " "),
        text,
        flags=re.DOTALL,
    )


def _words(raw: str, variables: Variables) -> Iterator[str]:
    """The words of one raw word: an assignment is remembered, and its options are read where they stand."""
    assigned = _ASSIGNMENT.fullmatch(raw)
    if assigned is not None:
        name, more, value = assigned[1], assigned[2], assigned[3]
        if value.startswith("("):
            yield ""
            raw = value
        else:
            text = variables.expanded(_unquoted(value))
            variables.give(name, f"{variables.known.get(name, '')} {text}" if more else text)
            yield ""
            if _lists_options(text):
                yield from text.split()
            yield ""
            return
    plain = not any(mark in raw for mark in "\"'\\")
    text = variables.expanded(_unquoted(_unbracketed(raw)))
    if any(list_ in text for list_ in ("[@]", "[*]", "$@", "$*")):  # an array was read where it stands
        yield ""
    elif plain or _lists_options(text):
        yield from text.split() or ("",)
    else:
        yield text
    if raw.endswith(")") and raw.count("(") < raw.count(")"):
        yield ""


def _lists_options(text: str) -> bool:
    """Whether a text is several words: options, maybe after unknown variables or a launcher."""
    words = text.split()
    if len(words) < 2 or not (words[0].startswith(("--", "$")) or words[0] in _LAUNCHERS):
        return False
    return any(word.startswith("--") or word.endswith(".py") for word in words)


def _unbracketed(token: str) -> str:
    """A token without the bracket of an array that it begins or ends; pairs of brackets stay."""
    if token.count("(") == token.count(")"):
        return token
    return token[1:] if token.startswith("(") else token[:-1] if token.endswith(")") else token
