"""Reading profiles: packaged ones by id, and any other TOML file of the same form by path."""

from functools import lru_cache
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from hardware_profiles.cluster import Cluster
from hardware_profiles.errors import InvalidProfileError, TopologyError, UnknownProfileError, suggestion
from hardware_profiles.foreign import (
    SETTINGS,
    AbsentFileError,
    ForeignTextError,
    decoded,
    form_fault,
    parse_toml,
    read_bytes,
)
from hardware_profiles.schema import ProfileFile

_SUFFIX = ".toml"


def profile_names() -> tuple[str, ...]:
    """Ids of the packaged profiles, sorted."""
    files = resources.files("hardware_profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))


def load_profile(name_or_path: str | Path) -> Cluster:
    """The cluster that a packaged profile or a profile file describes, with one node of devices in use.

    Args:
        name_or_path: an id from `profile_names()`, or the path of a file that ends in `.toml`.

    Raises:
        UnknownProfileError: no such profile or file; the message names the nearest ids.
        InvalidProfileError: the file cannot be read; the message has the file, the key and the reason in one line.
    """
    name = str(name_or_path)
    if name in profile_names():
        return _packaged(name)
    path = Path(name_or_path)
    if path.suffix == _SUFFIX:
        try:
            content = read_bytes(path, SETTINGS.size)
        except AbsentFileError as error:
            known = ", ".join(profile_names())
            raise UnknownProfileError(f"no profile file {name}; packaged profiles: {known}") from error
        except ForeignTextError as error:
            raise InvalidProfileError(f"{name}: {error}; give a TOML file, or one of the profiles by its id") from error
        return parse_profile(content, name)
    if path.is_file():
        raise UnknownProfileError(
            f"{name} is no hardware profile: a profile is a TOML file whose name ends in {_SUFFIX}, as plan calibrate"
            " and plan fit write it, or one of those that plan profiles lists"
        )
    begun = [known for known in profile_names() if known.startswith(name.lower())] if name else []
    hint = suggestion(name, profile_names(), begun[:4])
    raise UnknownProfileError(f"no hardware profile {name!r}; {hint} (a path must end in {_SUFFIX})")


@lru_cache(maxsize=64)
def _packaged(name: str) -> Cluster:
    file = resources.files("hardware_profiles").joinpath(name + _SUFFIX)
    return parse_profile(file.read_bytes(), file.name)


def parse_profile(content: bytes, where: str) -> Cluster:
    """The cluster that the content of a profile file describes. Raises `InvalidProfileError`, which names `where`."""
    try:
        table = parse_toml(decoded(content))
    except ForeignTextError as error:
        raise InvalidProfileError(f"{where}: {error}") from error
    try:
        return ProfileFile.model_validate(table).to_cluster()
    except ValidationError as error:
        raise InvalidProfileError(f"{where}: {form_fault(error)}") from error
    except TopologyError as error:
        raise InvalidProfileError(f"{where}: level: {error}") from error
