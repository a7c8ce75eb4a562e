"""A plan written into a file of the user's own: what a plan says is changed there, and everything else stays.

A description holds what a plan decides. A file of settings is a whole configuration: data sets, learning rates, and
switches that mean nothing for this plan, such as sharing states out among one device, or halves of one sample that are
computed in turn. So a configuration that was imported and is exported onto itself comes back letter by letter.
"""

from dataclasses import replace

from planner.export.description import ExportError
from planner.export.editing import edited
from planner.export.target import Facts, Job, Target

_PASSES = 4
"""What meant nothing before may mean something after a change, as sharing out does with more devices."""


def written_onto(target: Target, text: str, facts: Facts, job: Job) -> str:
    """The text of a file of settings with what `job` says, and with nothing else changed.

    Raises ExportError where the file is not understood, where files of this engine are not rewritten, and where its
    settings stand in places that are not known.
    """
    for _ in range(_PASSES):
        before = target.read(text, facts).description
        if before == job.description:
            return text
        text = edited(target, text, replace(job, description=before), job.description)
    raise ExportError(
        "the settings of the plan do not fit into this file, where they stand elsewhere too; leave out --onto, and make"
        " the changes by hand"
    )
