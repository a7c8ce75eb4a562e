"""Models of the zoo by their names in configurations."""

import re
from collections.abc import Iterable

_NAMES: tuple[tuple[str, str], ...] = (
    (r"mixtral.*?(8x(?:7|22)b)", "mixtral-{0}"),
    (r"mistral-7b", "mistral-7b"),
    (r"deepseek-?v2-lite", "deepseek-v2-lite"),
    (r"deepseek-?v3-?16b", "deepseek-v2-lite"),
    (r"deepseek-?v3-?236b", "deepseek-v2"),
    (r"deepseek-?v3", "deepseek-v3"),
    (r"deepseek-?v2(?!-?lite)", "deepseek-v2"),
    (r"qwen-?3(?!-?\.5)(?!-next).*?(30b|235b)-?(a3b|a22b)", "qwen3-{0}-{1}"),
    (r"qwen-?3(?!-?\.5)(?!-next).*?600m", "qwen3-0.6b"),
    (r"qwen-?3(?!-?\.5)(?!-next).*?(?<![\d.])(0\.6|1\.7|4|8|14|32)b", "qwen3-{0}b"),
    (r"qwen-?2\.?5.*?(?<![\d.])(0\.5|1\.5|3|7|14|32|72)b", "qwen2.5-{0}b"),
    (r"llama-?3[.-]?2.*?(?<![\d.])(1|3)b", "llama3.2-{0}b"),
    (r"llama-?3(?:[.-]?[13])?.*?(?<![\d.])(8|70|405)b", "llama{0}b"),
    (r"llama-?2.*?(?<![\d.])(7|13|70)b", "llama2-{0}b"),
    (r"gemma-?(?:1\.1-)?(2|7)b", "gemma-{0}b"),
    (r"gpt-?3?.*?175b", "gpt3-175b"),
)
_SAME = re.compile(r"llama-?3\.?1-?nemotron-?(?:nano-?)?(8|70)b")
"""Llama 3.1 as NVIDIA trained it further, with the same layers."""
_OTHERS = re.compile(r"nemotron|(?<![a-z])(?:audio|omni|pro|vision|vl)(?![a-z])")
"""Words for models that are based on one of these, but have other layers or an additional encoder."""


def zoo_name(text: str) -> str | None:
    """The model of the zoo that a name means: `meta-llama/Meta-Llama-3-70B`, `Llama3Config70B`, `mixtral_8x7b`; else
    None."""
    plain = re.sub(r"(?<=[0-9a-z])p(?=\d+b)", ".", re.sub(r"[\s_/]+", "-", text.lower()[:400])).replace("config", "-")
    if (same := _SAME.search(plain)) is not None:
        return f"llama{same[1]}b"
    if _OTHERS.search(plain):
        return None
    for pattern, name in _NAMES:
        found = re.search(pattern, plain)
        if found is not None:
            return name.format(*found.groups())
    return None


def model_among(names: Iterable[str]) -> str | None:
    """The first of some names that means a model, as its name in the zoo."""
    return next((found for name in names if (found := zoo_name(name)) is not None), None)
