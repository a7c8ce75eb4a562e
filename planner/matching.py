"""Names of modules are any text without a dot: how a pattern means a name, and how one is taken apart.

layers.*.mlp     wildcards as in `fnmatch`
blocks.[a]       a name that looks like a pattern means itself too
blocks.[[]a]     and as a pattern it is written like this
"""

from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means a name."""
    return name == pattern or fnmatchcase(name, pattern)


def module_and_call(name: str) -> tuple[str, str]:
    """The path of the module and the call of an operator's name, "a.b/linear"; the call is "" where it is the name of a
    parameter, whose last part comes behind a dot, whatever its modules are called."""
    module, slash, call = name.rpartition("/")
    if not slash:
        return ("", name) if "." not in name else (name, "")
    return (name, "") if "." in call else (module, call)
