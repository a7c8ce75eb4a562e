"""Which known names a person may have meant by an unknown one.

    h10             h100-80gb, h100-94gb       names that begin so
    llma70b         llama70b                   names of similar spelling
    llama-tiny+x    llama-tiny                 names that it begins with
    a100x           a100-40gb, a100-80gb       names with a part of similar spelling

Only what is near is suggested: a far-off suggestion misleads. Similarity is that of `difflib`: twice the number of
matching characters, as a share of the characters of both words.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

_MOST = 3
_SHORTEST = 2
"""Letters of a beginning."""
_SIMILAR, _SIMILAR_PART = 0.65, 0.75
_SIMILAR_SHORT, _SHORT = 0.7, 5
"""In words of five letters or fewer, one letter more must agree: tpu is not cpu."""
_SWAPPED = 0.8
"""Similarity of words of the same letters: `difflib` sees less in mpl and mlp."""
_BEHIND = 0.1
"""How much less similar than the nearest name others may be."""
_STEP, _WORD = re.compile(r"[./]+"), re.compile(r"[-_./]+")
"""What stands between modules of a path, and between words of a name."""


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are near an unknown one, the nearest first, three at most; none where none is near."""
    wanted, names = _plain(name), {one: _plain(one) for one in sorted(set(known))}
    if not wanted:
        return []
    if len(wanted) >= _SHORTEST and (begun := [one for one, plain in names.items() if plain.startswith(wanted)]):
        return begun[:_MOST]
    whole = {one: (plain,) for one, plain in names.items()}
    parts = {one: (*_STEP.split(plain), *_WORD.split(plain)) for one, plain in names.items()}
    last = _STEP.split(wanted)[-1]
    inside = [one for one, plain in names.items() if plain and re.match(rf"{re.escape(plain)}\W", wanted)]
    return (
        _similar(wanted, whole, _SIMILAR if len(wanted) > _SHORT else _SIMILAR_SHORT)
        or sorted(inside, key=len, reverse=True)[:1]
        or _similar(last, parts, _SIMILAR_PART)
    )


def _plain(name: str) -> str:
    """A name without what tells nothing apart: case, the dashes of options, the wildcards of patterns."""
    return name.lower().strip("-*?./")


def _similar(wanted: str, names: Mapping[str, tuple[str, ...]], least: float) -> list[str]:
    """The names of which one form is similar enough, the nearest first; of equally near ones those without capitals."""
    matcher = SequenceMatcher()
    matcher.set_seq2(wanted)
    ratios: dict[str, float] = {}

    def ratio(form: str) -> float:
        if form not in ratios:
            matcher.set_seq1(form)
            possible = matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least
            swapped = len(form) == len(wanted) and sorted(form) == sorted(wanted)
            ratios[form] = max(matcher.ratio() if possible else 0.0, _SWAPPED if swapped else 0.0)
        return ratios[form]

    found = {one: max(map(ratio, forms)) for one, forms in names.items()}
    lowest = max(least, max(found.values(), default=0.0) - _BEHIND)
    near = sorted(
        (one for one, value in found.items() if value >= lowest), key=lambda one: (-found[one], one.swapcase())
    )
    return near[:_MOST]
