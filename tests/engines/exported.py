"""Descriptions of which every engine gets what it can be told: four known problems, and drawn ones."""

from pathlib import Path

from planner.export.description import Description
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from tests.unit.export.descriptions import architecture, facts_of, job_of

Known = dict[str, tuple[str, Description]]


def _plain(layers: tuple[int, ...], sequence: int, **settings: object) -> Description:
    none = (0,) * len(layers)
    given: dict[str, object] = {"full": none, "selective": none, "sequence_length": sequence, **settings}
    return Description(layers=layers, **given)  # type: ignore[arg-type]  # by name


PROBLEMS: Known = {
    "llama8b on 8": ("llama8b", _plain((32,), 8192, data=4, tensor=2, sequence_parallel=True, zero=2, micro_batches=8)),
    "llama8b on 8, recomputed": ("llama8b", _plain((32,), 8192, data=8, zero=3, full=(32,), micro_batch=4)),
    "llama70b on 64": (
        "llama70b",
        _plain(
            (7, 11, 11, 11, 11, 11, 11, 7), 8192, data=2, tensor=4, sequence_parallel=True, zero=1, micro_batches=128,
            full=(2,) * 8,
        ),
    ),
    "llama70b on 64, shared out": ("llama70b", _plain((80,), 8192, data=64, zero=3, full=(80,), micro_batch=4)),
    "gpt3-175b on 128": (
        "gpt3-175b",
        _plain((32,) * 3, 2048, data=2, tensor=8, sequence_parallel=True, zero=1, micro_batches=256),
    ),
    "gpt3-175b on 128, virtual": (
        "gpt3-175b",
        _plain(
            (12,) * 8, 2048, virtual_stages=2, schedule="interleaved_1f1b", data=4, tensor=8, sequence_parallel=True,
            zero=1, micro_batches=128,
        ),
    ),
    "llama70b on 64, in a V": (
        "llama70b",
        _plain(
            (10,) * 8, 8192, virtual_stages=2, schedule="zb_v", data=4, tensor=4, sequence_parallel=True, zero=1,
            micro_batches=64, full=(10,) * 8,
        ),
    ),
    "llama70b on 64, both ways": (
        "llama70b",
        _plain(
            (10,) * 8, 8192, virtual_stages=2, schedule="dualpipe_v", data=4, tensor=4, sequence_parallel=True, zero=1,
            micro_batches=64,
        ),
    ),
    "mixtral on 64": (
        "mixtral-8x7b",
        _plain((16, 16), 32768, data=4, heads=8, zero=1, micro_batches=64, expert=8),
    ),
    "mixtral on 64, experts over tensor": (
        "mixtral-8x7b",
        _plain(
            (32,), 32768, data=8, tensor=2, ring=4, zigzag=True, sequence_parallel=True, zero=3, replicas=2,
            micro_batches=32, expert=8, whole_experts=True, full=(32,),
        ),
    ),
    "mixtral on 64, shared out": ("mixtral-8x7b", _plain((32,), 32768, data=64, zero=3, micro_batch=4, expert=8)),
}  # fmt: skip
"""As they are found for engines, in kind: models, degrees, stages, recomputation."""


def told(engine: str, description: Description) -> Description | None:
    """The nearest that an engine can be told; None where it has no place for any of it."""
    from planner.export.description import ExportError

    try:
        losses = TARGETS[engine].nearest(description)
    except ExportError:
        return None
    return losses[-1].description if losses else description


def written(engine: str, model: str, description: Description, folder: Path) -> Path:
    """The folder with what an engine is told; it is read back equal."""
    target, job = TARGETS[engine], exported_job(model, description)
    files = target.write(job)
    for name, text in files.items():
        (folder / name).write_text(text)
    facts: Facts = facts_of(description, model, files.get(target.beside or "", ""))
    assert target.read(files[target.main], facts).description == description
    return folder


def exported_job(model: str, description: Description) -> Job:
    assert architecture(model) is not None
    return job_of(description, model)
