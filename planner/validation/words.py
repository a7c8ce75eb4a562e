"""Whether a text has a word, and not only to deny it ("not NeMo", "without the NeMo container", "liger=False")."""

import re

_NOT = re.compile(
    r"(?:\b(?:not|no|non|without|never|isn't|neither|nor|unlike)|instead of|rather than)[^\w,;.]+(?:\w+[^\w,;.]+)?$"
)


_OFF = re.compile(r"\S*\s*(?:[=:]\s*\W?(?:false|off|none|no|disabled|0)(?![\w.])|(?:disabled|off)\b)")


def mentions(words: str, pattern: str) -> bool:
    """Whether a text has what the pattern says at some place where it is not denied, before it or as a value behind."""
    return any(
        not _NOT.search(words[: found.start()]) and not _OFF.match(words, found.end())
        for found in re.finditer(pattern, words)
    )
