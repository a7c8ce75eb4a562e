"""Plan files of older versions, and those with older words, as files of this version."""

import logging
from typing import Any

from planner.errors import PlanFileError
from planner.old_words import rename_keys
from planner.plan.plan import SCHEMA_VERSION

_LOG = logging.getLogger(__name__)


def migrated(content: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The content of a plan file as this version has it, and whether that changed it.

    Raises PlanFileError for a version that is not known.
    """
    if content["schema_version"] not in (1, SCHEMA_VERSION) or content["schema_version"] is True:
        raise PlanFileError(
            f"schema_version is {content['schema_version']!r}, this planner reads the versions 1 and "
            f"{SCHEMA_VERSION}; plan again with this version"
        )
    if old := content["schema_version"] == 1:
        content = _from_version_1(content)
    for line in rename_keys(content):
        _LOG.warning("plan file: %s; plans are written with the new word", line)
        old = True
    return content, old


def _from_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """A file of version 1 as a file of this version: version 1 had one word for how all blocks are recomputed, and no
    virtual or single stages. Content without the form of a plan is left for the check of the form."""
    word = content.pop("recomputation", None)
    if word not in ("none", "full"):
        raise PlanFileError(f"recomputation: {word!r} is not one of none, full; undo the edit or plan again")
    content["schema_version"] = SCHEMA_VERSION
    _add(content, "the file", virtual_stages=1, rules={})
    if isinstance(content.get("cluster"), dict):
        _add(content["cluster"], "cluster", composition="", software="pytorch")
    groups = content.get("groups")
    for index, group in enumerate(groups if isinstance(groups, list) else ()):
        if isinstance(group, dict):
            _add(group, f"groups.{index}", recomputation=word if group.get("blocks") else "none", kept=[])
    if isinstance(content.get("prediction"), dict):
        _add(
            content["prediction"], "prediction", stages=[], objective_seconds=None, low_seconds=None, high_seconds=None
        )
    return content


def _add(content: dict[str, Any], place: str, **new: Any) -> None:
    for key, value in new.items():
        if key in content:
            raise PlanFileError(f"{place}: version 1 has no key '{key}'; say schema_version {SCHEMA_VERSION}")
        content[key] = value
