"""Tables of names: a pattern of a name here, the name there, and how the one is made of the other."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.models.naming.parts import Built, Part, transposed, whole

Shape = tuple[int, ...]
Maker = Callable[[str, str, Shape], Iterable[Part]]
"""Parts of a tensor from its name here, that there, and its shape here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Names here that match `pattern`, all of them, are `template` there."""

    pattern: str
    template: str
    make: Maker


def as_it_is(ours: str, theirs: str, shape: Shape) -> Iterator[Part]:
    """The same tensor under another name."""
    yield whole(ours, theirs, shape)


def the_other_way_round(ours: str, theirs: str, shape: Shape) -> Iterator[Part]:
    """A weight whose inputs come first there; a bias stays as it is."""
    yield transposed(whole(ours, theirs, shape))


def one_by_one(ours: str, theirs: str, shape: Shape) -> Iterator[Part]:
    """A stack whose members are tensors of their own there: `theirs` has `{}` in the place of their number."""
    rest = shape[1:]
    for number in range(shape[0]):
        yield Part(
            ours=ours,
            theirs=theirs.format(number),
            at=(number, *(0 for _ in rest)),
            extent=(1, *rest),
            there=(0,) * len(rest),
            dims=tuple(range(1, len(shape))),
        )


def rule(pattern: str, template: str, make: Maker = as_it_is) -> Rule:
    """A row of a table."""
    return Rule(pattern=pattern, template=template, make=make)


def parts_of(
    built: Built, rules: Sequence[Rule], fresh: Sequence[str] = ()
) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """The parts of all tensors of a model, and the names of those that match one of the patterns in `fresh`. Every
    tensor has a rule, or the table lacks one."""
    parts: list[Part] = []
    new = tuple(name for name in built if any(re.fullmatch(pattern, name) for pattern in fresh))
    for name, (shape, _) in built.items():
        if name in new:
            continue
        for one in rules:
            found = re.fullmatch(one.pattern, name)
            if found is not None:
                parts.extend(one.make(name, found.expand(one.template), shape))
                break
        else:
            raise AssertionError(f"no rule names {name}")
    return tuple(parts), new
