"""Errors of hardware descriptions.

ValueError
└── HardwareProfileError      anything below; catch this one
    ├── UnknownProfileError   no profile of that name
    ├── InvalidProfileError   a profile file that cannot be read; names file, key and reason
    ├── UnknownKeyError       a dtype or an op class without a figure for the device
    ├── MeasurementsError     a file of measured times that cannot be read; names file, key and reason
    └── TopologyError         device counts or groups that do not fit the hierarchy
"""

from collections.abc import Sequence

from hardware_profiles.spelling import nearest_names


def suggestion(name: str, known: Sequence[str], begun: Sequence[str] = ()) -> str:
    """A hint for an unknown name: the names in `begun`, else those that are near, else all known names."""
    nearest = begun or nearest_names(name, known)
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
    """A dtype or an op class without a figure for the device."""


class TopologyError(HardwareProfileError):
    """A device count or a group that does not fit the hierarchy."""
