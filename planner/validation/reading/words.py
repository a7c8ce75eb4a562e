"""What a text says about a word: that it holds, that it does not hold, or nothing.

    in front      not NeMo, without the NeMo container, no-rope-fusion, disable_liger, unfused RMSNorm
    behind        liger=False, packing false, CUDA graphs off, loss_chunk_size 0, cuda_graph_scope: [], tf32 is not used
    of a whole    cuda_graph_scope attn, Liger: RMSNorm and no cross entropy
                  └── whole ───┘ └part┘  └whole┘└─ part ┘     └── denied ──┘

A denial in front of a flag ("no-rope-fusion") ends with the flag. A denial in several words ("no use of Liger kernels")
reaches the noun that it denies. A value behind stands at the end of the word, or after nouns that belong to it ("CUDA
graphs off"). "use_x" and "enable_x" say x. The name of a vocabulary ("Hugging Face tokenizer") says nothing about the
software that ran.
"""

import re
from collections.abc import Iterator

_DENIAL = (
    r"(?<![a-z0-9])(?:not|no|non|without|w/o|never|neither|nor|unlike|(?:is|are|was|were|does|do|did)n't"
    r"|disabl(?:e|es|ed|ing)|exclud(?:e|es|ed|ing)|skip(?:s|ped|ping)?|lack(?:s|ing)?"
    r"|(?:turn|switch)(?:e?s|ed|ing)?[-_ ]off|instead of|rather than)"
)
_APART = r"(?:[^\w\s,;.]|\s(?![\s-]))+"
"""What separates two words of a sentence: no comma, and no dashes of another flag."""

_OF_NO_WEIGHT = rf"(?:(?:the|an?|any|of|use|using|used|all|its?|either){_APART})*"
_NOT = re.compile(
    rf"{_DENIAL}(?:[-_][\w-]*|{_APART}{_OF_NO_WEIGHT}(?:[\w'-]+{_APART}(?:or{_APART}|of{_APART})?{_OF_NO_WEIGHT})?"
    rf"|{_APART}(?:\w+(?:ed|ing)|run){_APART}(?:with|by|on|in){_APART}{_OF_NO_WEIGHT})$"
    r"|(?<![a-z])(?:un|non)$"
)
"""A denial in front of a word: the flag that contains the word, or a denial before it with at most one other word
between."""

_NOUNS = (
    r"(?:[-_ ](?:kernels?|graphs?|modules?|layers?|fusions?|modes?|support|flags?|options?|scopes?|impl|states?)"
    r"(?![a-z]))*"
)
"""Nouns that belong to the word before them, and share its value."""

_VALUE = r"[(\[]?(?:false|off|none|null|never|disabled|unused|omitted|left out|-1|0(?:\.0+)?)(?![\w.])|\[\s*\]|\{\s*\}"
"""Values that switch something off; 0 and -1 are not counts, sizes or windows."""

_OFF = re.compile(
    rf"(?:[^\s,;=:]*[^\s,;=:.\d])?{_NOUNS}[\"'\])]*\s*(?:[=:]\s*[^\w\s\[{{-]?(?:{_VALUE}|no(?![\w.]))|(?:{_VALUE})|no\s*(?:[;,.)]|$)"
    rf"|(?:is|was|are|were|set to|switched|turned)\s+(?:{_VALUE})"
    r"|(?:(?:is|was|are|were)\s+)?not (?:used|enabled|applied|set|on|active)\b|(?:is|are|was|were)n't\b)"
)
"""A denial behind a word, as its value."""

_SWITCH = re.compile(r"(?<![a-z0-9])(?:disable|no|skip)[-_][\w-]*$")
"""Makes a word the name of a switch, which does nothing if it is off ("disable_recompute=false")."""

_WITHIN = re.compile(r"\s(?:not?|without|never|off|none|false)(?![\w-])")
"""A denial between the words of a pattern, as in "PyTorch without DDP"."""

_NOUN = re.compile(r"(?:'s)?[-_ ]?(?:fast[-_ ])?(?:tokeni[sz]er|vocab|hub\b|corpus)")
"""Nouns after a word that make it only the maker of something; the word then says nothing about the software that
ran."""

_ON = re.compile(r"(?<![a-z0-9])(use|enable|with)_(?=[a-z]|$)")
"""Prefixes of the name of a flag."""

_STATEMENT = re.compile(rf"(?!{_NOUNS}\s*,)((?:(?!;|\s--).)*)", re.DOTALL)
"""What is said about a whole: the text up to the next flag; nothing if a comma ends it."""


def says(words: str, pattern: str) -> bool | None:
    """Whether a text states a pattern anywhere; False if it denies it everywhere, None if it does not mention it.

    The text must be in small letters.
    """
    places = [(start, end) for start, end in _places(words, pattern) if not _NOUN.match(words, end)]
    return any(not _denied(words, start, end) for start, end in places) if places else None


def mentions(words: str, pattern: str) -> bool:
    """Whether a text has a pattern at a place where it is not denied."""
    return says(words, pattern) is True


def said_of(words: str, whole: str) -> Iterator[str]:
    """What a text says about a whole at each mention that is not denied; may be an empty text."""
    for start, end in _places(words, whole):
        if not _denied(words, start, end):
            statement = _STATEMENT.match(words, end)
            yield statement[1] if statement else ""


def mentions_of(words: str, whole: str, part: str) -> bool:
    """Whether a text mentions a part in what it says about a whole."""
    return any(mentions(statement, part) for statement in said_of(words, whole))


def _places(words: str, pattern: str) -> list[tuple[int, int]]:
    """Start and end of each match of a pattern, also after "use_" and similar prefixes.

    Adjacent matches, as in "Hugging Face transformers", are one place.
    """
    plain = _ON.sub(r"\1 ", words)
    texts = (words,) if plain == words else (words, plain)
    found: list[tuple[int, int]] = []
    for start, end in sorted({place.span() for text in texts for place in re.finditer(pattern, text)}):
        if found and not words[found[-1][1] : start].strip("-_ "):
            start, end = found[-1][0], max(found.pop()[1], end)
        found.append((start, end))
    return found


def _denied(words: str, start: int, end: int) -> bool:
    """Whether the text around a word, or within it, denies it."""
    before = _ON.sub(r"\1 ", words[:start])
    off = bool(_OFF.match(words, end))
    if _SWITCH.search(before):
        return not off
    return off or bool(_NOT.search(before)) or bool(_WITHIN.search(words[start:end]))
