"""`plan checkpoint`: inspects and verifies checkpoints, and converts them for another plan or into unsharded files."""

import math
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.show import AsJson, ExecutedModel, built_again, naming
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.helping import Command
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.texts import say
from planner.cli.usage import Commands
from planner.cli.values import parse_memory
from planner.errors import CheckpointError, ModelError, RequestError, unknown_name

if TYPE_CHECKING:
    from rich.table import Table

    from planner.models.naming.parts import Naming
    from runtime.checkpoint.manifest import Manifest
    from runtime.checkpoint.source import Readable

checkpoints = typer.Typer(
    name="checkpoint",
    cls=Commands,
    no_args_is_help=False,
    help="Inspect, verify, adopt, convert or merge checkpoints.\n\n    plan checkpoint inspect runs/tiny",
)
_SHOWN = 12  # tensors that are listed without --all

_NAMES = ("huggingface", "own")
_LEAST = 16 * 2**20  # bytes of memory
SRC = Annotated[
    Path,
    typer.Argument(metavar="SRC", help="A checkpoint, a folder of checkpoints (the newest), or Hugging Face files."),
]
DST = Annotated[
    Path, typer.Option("-o", "--output", metavar="DIR", help="A new folder, written completely or not at all.")
]

Memory = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory to use beyond that of an idle process.")]


@checkpoints.command("inspect", cls=Command)
def inspect(
    source: SRC,
    every: Annotated[bool, typer.Option("--all", help="List all tensors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint: step, plan, tensors, and whether its files are complete. Reads only headers.

    plan checkpoint inspect runs/tiny
    """
    with reporting(as_json):
        from runtime.checkpoint.folder import incomplete

        opened, notes = _opened(source), incomplete(source)
        if as_json:
            write_json("plan checkpoint inspect", {**_content(opened), "incomplete": notes})
            return
        _print(opened, None if every else _SHOWN, notes)


@checkpoints.command("verify", cls=Command)
def verify(source: SRC, as_json: AsJson = False) -> None:
    """Read all files of a checkpoint and compare their checksums. Exit code 2 where one is damaged.

    plan checkpoint verify runs/tiny/step-000100
    """
    with reporting(as_json):
        from planner.report.units import bytes_text
        from runtime.checkpoint.folder import incomplete

        opened = _opened(source)
        for note in incomplete(source):
            say(note, err=True)
        if opened.manifest is None:
            raise CheckpointError(f"{opened.path}: has no manifest, so that there are no checksums to compare")
        opened.check()
        total = opened.manifest.bytes
        if as_json:
            found = {"checkpoint": str(opened.path), "files": len(opened.files), "bytes": total, "whole": True}
            write_json("plan checkpoint verify", {"schema_version": OUTPUT_SCHEMA_VERSION, **found})
        else:
            say(f"{opened.path}: whole; {_files(opened.files)}, {bytes_text(total)}, all as they were written")


@checkpoints.command("adopt", cls=Command)
def adopt(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run (`plan run --save`).")],
    as_json: AsJson = False,
) -> None:
    """Let a run continue in a folder that was moved, restored from a backup, or put together.

    A run refuses a copy of its folder, so that two runs cannot continue as one. If the original is no longer used, this
    gives the copy, and all checkpoints in it, a new identity.

        plan checkpoint adopt runs/tiny
    """
    with reporting(as_json):
        from runtime.checkpoint.folder import checkpoints as whole
        from runtime.checkpoint.opening import adopt_run

        record, count = adopt_run(folder), len(whole(folder))
        if as_json:
            found = {"folder": str(folder), "run": record.run, "identity": record.folder, "checkpoints": count}
            write_json("plan checkpoint adopt", {"schema_version": OUTPUT_SCHEMA_VERSION, **found})
        else:
            several = f"{count} checkpoint{'s' if count > 1 else ''}"
            say(f"{folder}: is the folder of run {record.run[:8]} now, with {several}; go on with --continue")


@checkpoints.command("convert", cls=Command)
def convert(
    source: SRC,
    plan_file: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="Plan to continue with.")],
    output: DST,
    memory: Memory = "256MiB",
    model: ExecutedModel = None,
    as_json: AsJson = False,
) -> None:
    """Reshard a checkpoint for another plan, in this process and in bounded memory.

    Optional: plan run --resume loads any checkpoint under any plan, but reads less of a converted one.

        plan checkpoint convert runs/tiny --plan eight.json -o runs/eight/step-000100
    """
    with reporting(as_json):
        from planner.plan.binding.bind import bind
        from planner.plan.file import load_plan
        from planner.plan.layout.stage_cut import cut_stage
        from runtime.checkpoint.naming import in_own_names
        from runtime.checkpoint.offline import convert as converted
        from runtime.checkpoint.renamed import initial_in
        from runtime.checkpoint.source import listed
        from runtime.parameters.kept_buffers import buffer_homes

        most = _block(memory)
        opened = _opened(source)
        opened.check()
        plan = load_plan(plan_file)
        with naming(plan_file):
            known = built_again(plan, model, ", and its buffers are taken from it")
            bound = bind(plan, known.graph, known.batch)
        assert known.built is not None
        opened = in_own_names(opened, plan.model, model, most)
        if lacking := initial_in(opened):
            raise CheckpointError(
                f"{source}: lacks the head of the model, {listed(lacking)}, and a conversion has no initial values;"
                f" plan run --weights {source} has them"
            )
        cuts = [cut_stage(bound, stage) for stage in range(len(plan.stages))]
        manifest = _manifest_of(opened)
        homes = buffer_homes(known.built.module, bound, cuts)
        _answer(converted(opened, manifest, bound, homes, output, most), output, as_json)


@checkpoints.command("merge", cls=Command)
def merge(
    source: SRC,
    output: DST,
    names: Annotated[
        str | None,
        typer.Option(
            "--names",
            metavar="huggingface|own",
            help="Names of tensors: of transformers, or the model's own. Left out: the former"
            " where transformers has such models.",
        ),
    ] = None,
    max_file: Annotated[float, typer.Option("--max-file", metavar="GB", help="Largest file, in 1e9 bytes.")] = 5.0,
    memory: Memory = "256MiB",
    model: ExecutedModel = None,
    as_json: AsJson = False,
) -> None:
    """Write the model of a checkpoint as unsharded tensors, for PyTorch and Hugging Face, in bounded memory.

    With transformers' names a config.json is written too, so that from_pretrained loads the folder.

        plan checkpoint merge runs/tiny -o tiny-model
    """
    with reporting(as_json):
        from runtime.checkpoint.offline import merge as merged

        if not 0 < max_file < math.inf:
            raise RequestError(f"--max-file {max_file:g}: give GB, more than 0, as in 5")
        most = _block(memory)
        opened = _opened(source)
        opened.check()
        opened, naming = _named(opened, names, model)
        made = merged(opened, _manifest_of(opened), output, int(max_file * 1e9), most, naming)
        _answer(made, output, as_json)


def _block(memory: str) -> int:
    """Bytes of a tensor that are handled at a time, within the memory limit."""
    from runtime.checkpoint.offline import HELD

    asked = int(parse_memory(memory, "--memory"))
    if asked < _LEAST:
        raise RequestError(f"--memory {memory}: give 16MiB or more; what files are written through takes as much")
    return asked // HELD


def _named(opened: "Readable", names: str | None, given: str | None) -> "tuple[Readable, Naming | None]":
    """A checkpoint under its model's names, and the names of transformers if requested or available."""
    from runtime.checkpoint.naming import in_own_names, naming_of_model, trained_beside

    if names is not None and names not in _NAMES:
        raise RequestError(f"--names {unknown_name('kind of names', names, _NAMES)}")
    plan = None if opened.manifest is None else opened.manifest.written_under()
    if plan is None:
        if names is not None:
            raise RequestError(
                f"--names {names}: {opened.path} does not say of which model it is, so that its tensors keep the"
                " names they have; leave --names out"
            )
        return opened, None
    try:
        naming = naming_of_model(plan.model, given)
        adapters = None
        if naming is not None and names != "own":
            adapters = trained_beside(opened, plan.model, given, naming)
    except ModelError as error:
        if names == "own":
            return opened, None
        raise ModelError(f"{error}; --names own keeps the names that the model has here") from error
    if names == "own" and naming is not None and naming.misleading:
        raise RequestError(
            f"--names own: the names of {plan.model.reference} are those of transformers, which keeps other numbers"
            " under them, so that it would load a wrong model; leave --names out"
        )
    if names == "huggingface" and naming is None:
        raise RequestError(
            f"--names huggingface: nothing is known of what transformers would call the tensors of"
            f" {plan.model.reference}; leave --names out"
        )
    if adapters is not None:
        return adapters
    return in_own_names(opened, plan.model, given), None if names == "own" else naming


def _opened(source: Path) -> "Readable":
    from runtime.checkpoint.fused import opened_in_module

    return opened_in_module(source)


def _manifest_of(opened: "Readable") -> "Manifest":
    """The manifest of a checkpoint; for other files a substitute: a model at step 0."""
    from runtime.checkpoint.manifest import FORMAT_VERSION, Manifest, Progress

    return opened.manifest or Manifest(
        format_version=FORMAT_VERSION,
        kind="merged",
        progress=Progress(step=0, updates=0, samples=0, seed=0),
        optimizer=None,
        files=opened.files,
        tensors=dict(opened.tensors),
        names=None,
    )


def _answer(manifest: "Manifest", folder: Path, as_json: bool) -> None:
    from planner.report.units import bytes_text

    count = len(manifest.files)
    if as_json:
        write_json(
            "plan checkpoint convert",
            {
                "schema_version": OUTPUT_SCHEMA_VERSION,
                "checkpoint": str(folder),
                "kind": manifest.kind,
                "files": count,
                "bytes": manifest.bytes,
                "tensors": len(manifest.tensors),
                "names": manifest.names,
            },
        )
    else:
        say(
            f"{folder}: {manifest.kind}, {len(manifest.tensors)} tensors in {count} file{'s' if count > 1 else ''},"
            f" {bytes_text(manifest.bytes)}{_names_text(manifest)}"
        )


def _names_text(manifest: "Manifest") -> str:
    """Whose tensor names a merged checkpoint has, if known."""
    known = {"huggingface": ", under Hugging Face's names", "own": ", under the model's own names"}
    return known.get(manifest.names or "", "") if manifest.kind == "merged" else ""


def _content(opened: "Readable") -> dict[str, Any]:
    manifest = _manifest_of(opened)
    plan = manifest.written_under()
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "checkpoint": str(opened.path),
        "kind": manifest.kind,
        "manifest": opened.manifest is not None,
        "step": manifest.progress.step,
        "samples": manifest.progress.samples,
        "seed": manifest.progress.seed,
        "names": manifest.names,
        "optimizer": manifest.optimizer,
        "data": manifest.progress.data,
        "model": None if plan is None else plan.model.reference,
        "devices": None if plan is None else plan.cluster.devices,
        "files": [
            {"name": f.name, "bytes": f.bytes, "checksum": f.checksum or None, "fault": fault}
            for f, fault in zip(manifest.files, _faults(opened), strict=True)
        ],
        "tensors": {
            name: {"shape": list(t.shape), "dtype": t.dtype, "cuts": list(t.cuts)}
            for name, t in sorted(manifest.tensors.items())
        },
        "tied": dict(manifest.tied),
    }


def _print(opened: "Readable", most: int | None, notes: Sequence[str]) -> None:
    from planner.report.units import bytes_text

    manifest = _manifest_of(opened)
    console = console_of()
    progress, plan = manifest.progress, manifest.written_under()
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"{opened.path}")
    what = "slices of every rank, with the optimizer" if manifest.kind == "sliced" else "the model alone, whole tensors"
    what += _names_text(manifest)
    console.print(f"{manifest.kind}: {what}; {bytes_text(manifest.bytes)} in {_files(manifest.files)}")
    if opened.manifest is None:
        console.print("no manifest: of no checksums, no step and no plan")
    else:
        after = f"step {progress.step}, {progress.samples:,} samples, seed {progress.seed}"
        states = f", states of {manifest.optimizer}" if manifest.optimizer and progress.updates else ""
        console.print(f"{after}{states}")
    if plan is not None:
        shape = "x".join(map(str, plan.mesh.sizes)) or "1"
        console.print(
            f"written under a plan of {plan.model.reference} for {plan.cluster.devices} devices: mesh {shape},"
            f" {len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}",
        )
    for line in _states(opened):
        console.print(line, soft_wrap=True)
    console.print(_tensors(manifest, most))
    if most is not None and len(manifest.tensors) > most:
        console.print(f"and {len(manifest.tensors) - most} more tensors; --all lists them")


def _states(opened: "Readable") -> list[str]:
    """In words, whether the files of a checkpoint are complete; nothing is known of files that are not ours."""
    if opened.manifest is None:
        return []
    faults = [fault for fault in _faults(opened) if fault is not None]
    if not faults:
        return ["all files are there and as long as they were written; plan checkpoint verify compares checksums"]
    return [f"damaged: {fault}" for fault in faults]


def _faults(opened: "Readable") -> list[str | None]:
    """For each file, why it is missing or has another size than was written; None if it has that size."""
    from runtime.checkpoint.tensor_files import check_size

    found: list[str | None] = []
    for file in opened.files:
        try:
            check_size(opened.path, file)
            found.append(None)
        except CheckpointError as error:
            found.append(str(error))
    return found


def _tensors(manifest: "Manifest", most: int | None) -> "Table":
    from planner.report.table import table_of
    from planner.report.units import bytes_text
    from runtime.checkpoint.tensor_files import dtype_of

    table = table_of("Tensors", "name", "shape", "dtype", "slices", "bytes")
    for name, tensor in sorted(manifest.tensors.items())[:most]:
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        cut = "x".join(map(str, tensor.cuts)) if len(tensor.files) > 1 else "whole"
        size = bytes_text(tensor.elements * dtype_of(tensor.dtype).itemsize)
        table.add_row(name, shape, tensor.dtype, cut, size)
    return table


def _files(files: Sized) -> str:
    return f"{len(files)} file{'' if len(files) == 1 else 's'}"
