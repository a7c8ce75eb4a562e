"""The legal numbers next to one that is not, in the words of every refusal: which one is below, and which above."""

import math
from collections.abc import Iterable, Mapping


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, smallest first."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(low + [number // d for d in reversed(low) if d * d != number])


def multiples(number: int, step: int) -> tuple[int, ...]:
    """The multiples of a step next to a number, 0 left out."""
    low = number // step * step
    return (low, low + step) if low else (step,)


def around(wanted: int, legal: Iterable[int]) -> tuple[int, ...]:
    """The largest legal number below the one that was wanted and the smallest above it, as far as there are any."""
    known = sorted(set(legal))
    return (*[number for number in known if number < wanted][-1:], *[number for number in known if number > wanted][:1])


def nearest_words(wanted: int, legal: Iterable[int]) -> str:
    """In words, the legal numbers next to one that is not: "the nearest legal values are 8 and 16"."""
    return _words([" and ".join(map(str, near))] if (near := around(wanted, legal)) else [], len(near))


def nearest_of(options: Mapping[str, tuple[int, Iterable[int]]]) -> str:
    """The same of several options, each with what was wanted and what is legal while the others stay as they are: "the
    nearest legal values are data = 2 and 4, micro_batches = 8"."""
    found = {name: around(wanted, legal) for name, (wanted, legal) in options.items()}
    texts = [f"{name} = {' and '.join(map(str, near))}" for name, near in found.items() if near]
    return _words(texts, sum(map(len, found.values())))


def _words(texts: list[str], count: int) -> str:
    if not texts:
        return "there is no legal value"
    return f"the nearest legal value{'s are' if count > 1 else ' is'} {', '.join(texts)}"
