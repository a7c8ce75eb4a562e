"""A plan written into the user's own file: the settings of the plan change, and everything else stays.

A description has what a plan decides. A file of settings is a whole configuration, with data sets, learning rates, and
switches that have no effect for this plan, such as sharding over a single device. So a configuration that was imported
and is exported onto itself comes back letter by letter.
"""

from dataclasses import replace

from planner.export.description import ExportError
from planner.export.editing import edited
from planner.export.target import Facts, Job, Target

_PASSES = 4
"""A setting without an effect may get one after a change, as sharding does with more devices; so changes are
repeated."""


def written_onto(target: Target, text: str, facts: Facts, job: Job) -> str:
    """The text of a file of settings with what `job` says, and nothing else changed.

    Raises ExportError if the file is not understood, if files of this engine are not changed, or if its settings stand
    in unknown places.
    """
    for _ in range(_PASSES):
        before = target.read(text, facts).description
        if before == job.description:
            return text
        text = edited(target, text, replace(job, description=before), job.description)
    raise ExportError(
        "the plan cannot be written into this file, which sets the same values elsewhere, too; leave out --onto, and"
        " change the file by hand"
    )
