"""What can go wrong with hardware descriptions.

ValueError
└── HardwareProfileError      anything below; catch this one
    ├── UnknownProfileError   no profile of that name
    ├── InvalidProfileError   a profile file that does not read, naming file, key and reason
    ├── UnknownKeyError       a dtype or an op class that the device has no figure for
    ├── MeasurementsError     a file of measured times that does not read, naming file, key and reason
    └── TopologyError         device counts or groups that the hierarchy cannot hold
"""

import difflib
from collections.abc import Sequence


def suggestion(name: str, known: Sequence[str], begun: Sequence[str] = ()) -> str:
    """What may have been meant by an unknown name: what has `begun` so, else what is spelled nearly like it; else all
    that is known."""
    nearest = begun or difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(nearest)}?" if nearest else f"known: {', '.join(known)}"


class HardwareProfileError(ValueError):
    """Base of the errors of this package."""


class UnknownProfileError(HardwareProfileError):
    """No profile of that name."""


class InvalidProfileError(HardwareProfileError):
    """A profile file that cannot be read."""


class MeasurementsError(HardwareProfileError):
    """A file of measured times that cannot be read."""


class UnknownKeyError(HardwareProfileError):
    """A dtype or an op class for which the device has no figure."""


class TopologyError(HardwareProfileError):
    """A device count or a group that does not fit the hierarchy."""
