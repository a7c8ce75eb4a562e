"""Names and numbers as people write them: models, hardware, numbers with units.

    --model llama3-70b      note: --model llama3-70b is llama70b of the zoo
    --hardware h100         note: --hardware h100 is h100-80gb
    --seq-len 32k           note: --seq-len 32k is 32,768

A full name or number prints no note.
"""

import re

from planner.cli.texts import say
from planner.errors import RequestError

_BINARY = {"": 1, "k": 2**10, "m": 2**20}
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def model_of(value: str | None) -> str | None:
    """The model that --model means."""
    return _model(value, "--model ")


def model_named(value: str | None) -> str | None:
    """The same of an argument, which has no name."""
    return _model(value, "")


def hardware_of(value: str | None) -> str | None:
    """The hardware that --hardware means. Raises RequestError for an empty value, which is not the default."""
    if value == "":
        raise RequestError("--hardware is empty; give a profile, or leave it out")
    return _hardware(value, "--hardware ")


def hardware_named(value: str | None) -> str | None:
    """The same of an argument, which has no name."""
    return _hardware(value, "")


def _model(value: str | None, option: str) -> str | None:
    from planner.models.nicknames import full_model

    return None if value is None else _noted(option, value, full_model(value), " of the zoo")


def _hardware(value: str | None, option: str) -> str | None:
    from hardware_profiles.nicknames import full_profile

    return None if value is None else _noted(option, value, full_profile(value))


def _noted(option: str, value: str, meant: str, more: str = "") -> str:
    if meant != value:
        say(f"note: {option}{value} is {meant}{more}", err=True)
    return meant


def parse_counted(option: str, text: str, least: int = 1, most: int = 2**31) -> int:
    """A whole number written as 8192, 8,192 or 8k: k is 1,024 and m 1,048,576, as for lengths and batches.

    Raises RequestError.
    """
    found = re.fullmatch(r"\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,12})\s*([km]?)\s*", text.lower(), re.ASCII)
    number = 0 if found is None else int(found[1].replace(",", "")) * _BINARY[found[2]]
    if found is None or not least <= number <= most:
        raise RequestError(f"{option} {text}: give a whole number from {least:,} to {most:,}, as in 8192 or 8k")
    if found[2]:
        say(f"note: {option} {text} is {number:,}", err=True)
    return number


def parse_tokens(option: str, text: str) -> float:
    """A number of tokens written as 15T, 300B, 1e12 or 1.5e13; units are powers of 1000. Raises RequestError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?)\s*([kmgbt]?)\s*", text.lower(), re.ASCII)
    number = 0.0 if found is None else float(found[1]) * _DECIMAL[found[2]]
    if not 1 <= number <= 1e20:
        raise RequestError(f"{option} {text}: give a number of tokens, as in 15T, 300B or 1e12")
    return number
