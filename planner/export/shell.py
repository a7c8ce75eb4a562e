"""Launch scripts: the same few lines for every engine that torchrun starts."""

from collections.abc import Iterable

from planner.export.files.arguments import Option, lines_of, option
from planner.export.files.quoting import one_line
from planner.export.target import Job

_HEAD = """#!/usr/bin/env bash
# {title}
# {nodes}
set -euo pipefail
"""


def torchrun_script(
    job: Job,
    title: str,
    program: str,
    options: Iterable[Option],
    *,
    exports: Iterable[str] = (),
    also: Iterable[str] = (),
    before: str = "",
) -> str:
    """A script that starts `program` with its options on every device; arguments of the script are appended.

    `also` are options in which the shell expands something, `before` are lines that run first. The title becomes a
    comment line, whatever it contains.
    """
    many = job.nodes > 1
    nodes = (
        f"Run it on each of {job.nodes} nodes: NODE_RANK=0..{job.nodes - 1} MASTER_ADDR=first-node bash launch.sh"
        if many
        else f"Runs on one node with {job.processes} devices: bash launch.sh"
    )
    launcher = [option("nnodes", job.nodes), option("nproc-per-node", job.processes)]
    network = ' --node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}" --master-port "${MASTER_PORT:-29500}"'
    start = f"torchrun {' '.join(lines_of(launcher))}{network if many else ''}"
    lines = [f"{start} \\", f"  {program} \\", *(f"  {line} \\" for line in (*lines_of(options), *also)), '  "$@"']
    if job.architecture is None:
        nodes += "\n# These arguments do not describe the model; README.md says what is left to you."
    head = _HEAD.format(title=one_line(title), nodes=nodes)
    return head + "".join(f"export {line}\n" for line in exports) + "\n" + before + "\n".join(lines) + "\n"
