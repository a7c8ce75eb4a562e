"""Folders that keep what is found once: rules found by trial, and traced graphs. The latter are in

    --graph-cache FOLDER     else PLAN_GRAPH_CACHE     else $XDG_CACHE_HOME/parallel-planner/graphs

Without XDG_CACHE_HOME it is in ~/.cache, and without a home folder graphs are not kept; `none` as the folder turns
the cache off. (https://specifications.freedesktop.org/basedir-spec/latest/)
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.cli.options import Options

VARIABLE = "PLAN_GRAPH_CACHE"
NONE = "none"
_PROJECT = "parallel-planner"


def graph_folder(options: "Options") -> Path | None:
    """The folder of traced graphs; None if graphs are not kept, or if every block is to be traced."""
    return None if options.full_trace else cache_folder(options.graph_cache)


def cache_folder(given: str | None) -> Path | None:
    """The `given` folder, or the default; None if graphs are not kept."""
    said = given or os.environ.get(VARIABLE)
    if said == NONE:
        return None
    if said:
        return folder_of("--graph-cache" if given else VARIABLE, said)
    above = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not above.is_absolute():
        try:
            above = Path("~/.cache").expanduser()
        except RuntimeError:  # no HOME, and a user without an entry in the list of users, as in some containers
            return None
    return above / _PROJECT / "graphs"


def rule_folder(options: "Options") -> Path | None:
    """The folder of rules found by trial, if there is to be one."""
    return None if options.rule_cache is None else folder_of("--rule-cache", options.rule_cache)


def folder_of(option: str, text: str) -> Path:
    """The folder that an option names, which need not exist. Raises RequestError if it is something else."""
    try:
        folder = Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{option} {text}: this home folder is not known; give the whole path") from error
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{option} {text}: is not a folder; name a folder, or one that does not exist yet")
    return folder


def is_kept(options: "Options") -> bool:
    """Whether the graph of the requested model is likely cached, so that PyTorch is not needed. Unknown for the model
    of a plan file."""
    from hardware_profiles import load_machine
    from planner.graph.fp8 import chosen
    from planner.plan.graph_cache import graph_key, graph_path
    from planner.plan.plan import PRECISIONS
    from planner.strategy_search.job import default_precision

    folder = graph_folder(options)
    if folder is None or options.model is None:
        return False
    asked, _ = chosen(options.precision, options.fp8, ())
    precision = asked or default_precision(load_machine(options.profile))
    key = graph_key(options.reference, dtype=PRECISIONS[precision], sequence_length=options.seq_len)
    return key is not None and graph_path(folder, key).is_file()
