"""What a test may ask of a refusal: its kind, and the facts in its message.

    with refused(RequestError, "--devices", 12, "h100-80gb"):
        ...

Facts are what the user gave and what clashes with it: options, names, paths, numbers, and what the message tells the
user to type instead. Sentences around them may change freely. They stand once for each kind of refusal in
tests/golden/messages.txt.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Kind = TypeVar("Kind", bound=BaseException)

# These signs do not end a word: the dash of "--mesh-order", the dot of 4.5 or "plan.json", the comma of 1,024, the
# slash of a path, the colon of "package.module:factory", the at sign of "node=8@300" and the star of "*.bias". A name
# may be the last part of a path, but a number is not the last part of a fraction.
_BEGINS = r"(?<![\w*-])(?<![\w*][.:@])"
_ENDS = r"(?![\w*])(?![-.:@/][\w*])"
_NUMBER_BEGINS = r"(?<!\d/)"
_THREE_DIGITS_BEGIN = r"(?<!\d,)"
_NUMBER_ENDS = r"(?!,\d{3}(?!\d))"


@contextmanager
def refused(kind: type[Kind], *facts: object) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Demand that the block raises `kind`, and that its message states each of `facts`, as `says` finds them."""
    __tracebackhide__ = True
    with pytest.raises(kind) as caught:
        yield caught
    says(str(caught.value), *facts)


def says(text: str, *facts: object) -> None:
    """Demand that each fact stands in `text` as a word or number of its own, a repeated fact as often as it is given.

    4 does not stand in 42, 4.5, -4 or 4,096, and "--mesh" not in "--mesh-order". Quotes, brackets, commas, the stop of
    a sentence and a colon before a space may stand beside a fact.

    Raises:
        AssertionError: naming the facts that are missing, with the text.
    """
    __tracebackhide__ = True
    wanted = Counter(map(str, facts))
    assert wanted, "give a fact; where the kind of an error is all that counts, use pytest.raises"
    assert "" not in wanted, "an empty fact stands everywhere"
    missing = [fact for fact, times in wanted.items() if len(re.findall(_alone(fact), text)) < times]
    assert not missing, f"not said: {', '.join(map(repr, missing))}\nin: {text}"


def _alone(fact: str) -> str:
    """The pattern of a fact that is no part of a longer word or number."""
    around = (
        (r"[\w./*-]", _BEGINS),
        (r"\d", _NUMBER_BEGINS),
        (r"\d{3}(?!\d)", _THREE_DIGITS_BEGIN),
    )
    before = "".join(boundary for start, boundary in around if re.match(start, fact))
    after = _ENDS if re.search(r"[\w./*-]$", fact) else ""
    return before + re.escape(fact) + after + (_NUMBER_ENDS if fact[-1].isdigit() else "")
