"""A position in the training data, as a checkpoint stores it: a few plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from planner.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """The position after `samples` samples of epoch `epoch`, in the order that `seed` and `shuffle` give to `count`
    samples; an iterable dataset, which has its own order, has no `count`."""

    epoch: int
    samples: int
    seed: int
    shuffle: bool
    count: int | None

    def check(self, here: "DataPosition") -> None:
        """Raise RequestError where the next samples `here` are not those that would have come next at this position."""
        for name in ("seed", "shuffle", "count"):
            then, now = getattr(self, name), getattr(here, name)
            if then != now:
                what = {"count": "number of samples"}.get(name, name)
                raise RequestError(
                    f"the data position was saved with {what} {then}, but here it is {now}: other samples would follow;"
                    " open the same data in the same order, or start without the position"
                )


def position_of(state: Mapping[str, Any]) -> DataPosition:
    """A position from plain JSON. Raises RequestError for anything else."""
    names = [field.name for field in fields(DataPosition)]
    wrong = sorted(set(names) ^ set(state))
    for name in ("epoch", "samples", "seed", "shuffle"):
        kind = bool if name == "shuffle" else int
        if not wrong and (type(state[name]) is not kind or (name in ("epoch", "samples") and state[name] < 0)):
            wrong = [name]
    if not wrong and not (state["count"] is None or type(state["count"]) is int):
        wrong = ["count"]
    if wrong:
        raise RequestError(f"a data position has the fields {', '.join(names)}; wrong here: {', '.join(wrong)}")
    return DataPosition(**state)
