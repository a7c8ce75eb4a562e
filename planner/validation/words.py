"""Whether a text has a word, and not only to deny it ("not NeMo", "without the NeMo container", "liger=False",
"packing false", "loss_chunk_size 0"), or in the name of a vocabulary ("Hugging Face tokenizer")."""

import re

_NOT = re.compile(
    r"(?:\b(?:not|no|non|without|never|isn't|neither|nor|unlike|disabl(?:e|es|ed|ing))|instead of|rather than)"
    r"(?:[^\w,;.]|_)+(?:\w+[^\w,;.]+)?$"
)

_VALUE = r"\(?(?:false|off|none|null|never|disabled|unused|-1|0(?:\.0+)?)(?![\w.])"
"""Values that switch something off; 0 and -1 are no count, size or window."""

_OFF = re.compile(
    rf"(?:[^\s,;=:]*[^\s,;=:.\d])?\s*(?:[=:]\s*[^\w\s-]?(?:{_VALUE}|no(?![\w.]))|{_VALUE}|no\s*(?:[;,.)]|$)"
    rf"|(?:is|was|are|were|set to|switched|turned)\s+{_VALUE}"
    r"|(?:(?:is|was|are|were)\s+)?not (?:used|enabled|applied|set|on)\b)"
)
"""What denies a word from behind, as its value."""

_SWITCH = re.compile(r"\bdisable[-_](?:\w+[-_])?$")
"""What makes a word the name of a switch, which does nothing where it is off ("disable_recompute=false")."""

_NOUN = re.compile(r"(?:'s)?[-_ ]?(?:fast[-_ ])?(?:tokeni[sz]er|vocab|hub\b|corpus)")
"""What a word in front of it is only the maker of: it says nothing of what ran."""


def mentions(words: str, pattern: str) -> bool:
    """Whether a text has what the pattern says at some place where it is not denied, before it or as a value behind,
    and where it is no part of the name of a vocabulary."""
    return any(
        not _denied(words[: found.start()], words[found.end() :]) and not _NOUN.match(words, found.end())
        for found in re.finditer(pattern, words)
    )


def _denied(before: str, behind: str) -> bool:
    """Whether what stands around a word denies it."""
    off = bool(_OFF.match(behind))
    return not off if _SWITCH.search(before) else off or bool(_NOT.search(before))
