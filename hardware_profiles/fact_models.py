"""Numbers in files with their source and kind, as pydantic models; profiles and stacks are made of them."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from hardware_profiles.cluster import Fact, FactKind

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


_LEAST, _MOST = 1e-9, 1e12
"""Limits of numbers in the units of files (GB/s, TFLOP/s, GiB, us), and of shares. No machine has numbers outside of
them, and prices made of such numbers would be useless: times of infinite seconds have no differences."""


class Strict(BaseModel):
    """A model with exact keys whose values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Number(Strict):
    """A number of 0 or more, with its source and kind."""

    value: float = Field(ge=0, le=_MOST, allow_inf_nan=False)
    source: Text
    kind: FactKind


class Positive(Number):
    """A number above 0."""

    value: float = Field(ge=_LEAST, le=_MOST, allow_inf_nan=False)


class Share(Number):
    """A share in (0, 1]."""

    value: float = Field(ge=_LEAST, le=1)


class AtLeastOne(Number):
    """A number of 1 or more."""

    value: float = Field(ge=1, le=_MOST, allow_inf_nan=False)


class Portion(Number):
    """A share in [0, 1]."""

    value: float = Field(ge=0, le=1)


def facts_of(path: str, value: object) -> Iterator[Fact]:
    """Every number in `value` with its path, in the order of the file's schema."""
    if isinstance(value, Number):
        yield Fact(key=path, value=value.value, source=value.source, kind=value.kind)
    elif isinstance(value, BaseModel):
        for key in type(value).model_fields:
            yield from facts_of(f"{path}.{key}" if path else key, getattr(value, key))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from facts_of(f"{path}.{key}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from facts_of(f"{path}.{index}", item)
