"""Short names of profiles, as people use them: `h100` for `h100-80gb`, `910b` for `ascend-910b-64gb`.

They are accepted only where a person names hardware; profiles, plans and tables of runs keep full names.
"""

import re
from collections.abc import Mapping

from hardware_profiles.load import profile_names

_NICKNAMES: Mapping[str, str] = {
    "a100": "a100-80gb",
    "a100pcie": "a100-pcie-80gb",
    "a10g": "a10g-24gb",
    "a800": "a800-80gb",
    "ascend910a": "ascend-910a-32gb",
    "ascend910b": "ascend-910b-64gb",
    "ascend910c": "ascend-910c-64gb",
    "910a": "ascend-910a-32gb",
    "910b": "ascend-910b-64gb",
    "910c": "ascend-910c-64gb",
    "b200": "b200-180gb",
    "b300": "b300-288gb",
    "gb200": "gb200-186gb",
    "gb300": "gb300-288gb",
    "gh200": "gh200-96gb",
    "h20": "h20-96gb",
    "h203e": "h20-141gb",
    "h203e141gb": "h20-141gb",
    "h100": "h100-80gb",
    "h100pcie": "h100-pcie-80gb",
    "h200": "h200-141gb",
    "h800": "h800-80gb",
    "l4": "l4-24gb",
    "l40s": "l40s-48gb",
    "mi300x": "mi300x-192gb",
    "mi325x": "mi325x-256gb",
    "mi355x": "mi355x-288gb",
    "rtx3090": "rtx-3090-24gb",
    "3090": "rtx-3090-24gb",
    "rtx4090": "rtx-4090-24gb",
    "4090": "rtx-4090-24gb",
    "rtx5090": "rtx-5090-32gb",
    "5090": "rtx-5090-32gb",
    "rtx6000pro": "rtx-pro-6000-96gb",
    "rtxpro6000": "rtx-pro-6000-96gb",
    "pro6000": "rtx-pro-6000-96gb",
    "rtx6000ada": "rtx-6000-ada-48gb",
    "6000ada": "rtx-6000-ada-48gb",
    "rtxa6000": "rtx-a6000-48gb",
    "a6000": "rtx-a6000-48gb",
    "v100": "v100-32gb",
}
"""If a device has several sizes, the most common one: A100 80 GB, H100 80 GB."""

_MAKERS = ("nvidia", "huawei", "amd", "instinct", "geforce")
_EDITIONS = ("blackwell", "serveredition", "generation")
"""Parts of full names that do not distinguish devices."""

_NAME = re.compile(r"(?P<name>[^\[\],:]+)(?P<rest>(?:\[[^\[\]]*\])?(?::[0-9]+)?)")
_GROUPS = re.compile(r",(?![^\[]*\])")


def full_profile(text: str) -> str:
    """The value of `--hardware` with full names in place of nicknames; a text without any is returned as it is.

    Groups of a heterogeneous pipeline are replaced one by one: `h100:32,a100:32` is `h100-80gb:32,a100-80gb:32`.
    """
    return ",".join(_full(part) for part in _GROUPS.split(text))


def _full(part: str) -> str:
    found = _NAME.fullmatch(part)
    if found is None or found["name"] in profile_names():
        return part
    spoken = re.sub(r"[\s_-]", "", found["name"].lower())
    for maker in _MAKERS:
        spoken = spoken.removeprefix(maker)
    for edition in _EDITIONS:
        spoken = spoken.replace(edition, "")
    whole = {re.sub("-", "", name): name for name in profile_names()}
    name = _NICKNAMES.get(spoken) or whole.get(spoken)
    return part if name is None else f"{name}{found['rest']}"
