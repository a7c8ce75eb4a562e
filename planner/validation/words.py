"""Whether a text has a word, and not only to deny it ("not NeMo", "without the NeMo container")."""

import re

_NOT = re.compile(
    r"(?:\b(?:not|no|non|without|never|isn't|neither|nor|unlike)|instead of|rather than)[^\w,;.]+(?:\w+[^\w,;.]+)?$"
)


def mentions(words: str, pattern: str) -> bool:
    """Whether a text has what the pattern says at some place where it is not denied."""
    return any(not _NOT.search(words[: found.start()]) for found in re.finditer(pattern, words))
