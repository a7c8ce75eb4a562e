"""`--mode`: shortcuts for options, under the names that MindSpore gave them.

stand_alone           one device
data_parallel         all devices split the batch, each has all weights
parameter_server      the same, with the states on parameter servers, which update the weights
semi_auto_parallel    some strategies by hand; the others are searched, or data parallel (--default)
hybrid_parallel       every degree by hand
auto_parallel         everything that is not given is searched
manual                nothing is searched: a plan file is verified, priced and run as a person has edited it
"""

from collections.abc import Callable
from dataclasses import replace

from planner.cli.options import Options, flag
from planner.errors import RequestError, unknown_name

_DEGREES = ("data", "tensor", "pipeline", "context", "expert")


def applied(options: Options) -> Options:
    """The options that a mode stands for. Raises RequestError if a given option contradicts it."""
    mode = "auto_parallel" if options.mode is None else options.mode
    if mode not in MODES:
        raise RequestError(unknown_name("value for --mode", mode, MODES))
    return MODES[mode](options)


def _stand_alone(options: Options) -> Options:
    wanted: dict[str, object] = {"devices": 1, **dict.fromkeys(_DEGREES, 1)}
    _agree(options, wanted, "plans for one device")
    return replace(options, devices=1)


def _data_parallel(options: Options) -> Options:
    return _of_batch(options, {"zero": 0}, "splits the batch over all devices and keeps weights whole")


def _parameter_server(options: Options) -> Options:
    means = "splits the batch over all devices and keeps states on parameter servers"
    return _of_batch(options, {"zero": 1, "zero_by": "servers"}, means)


def _of_batch(options: Options, more: dict[str, object], means: str) -> Options:
    if options.mesh is not None or options.shard or options.shard_from:
        given = next(name for name in ("mesh", "shard", "shard_from") if getattr(options, name))
        raise RequestError(
            f"--mode {options.mode} splits nothing but the batch; leave out {flag(given)}, or use --mode auto_parallel"
        )
    wanted: dict[str, object] = {**dict.fromkeys(_DEGREES, 1), "data": options.device_count, **more}
    _agree(options, wanted, means)
    return replace(options, **wanted)  # type: ignore[arg-type]  # numbers and words of these options


def _semi_auto_parallel(options: Options) -> Options:
    if not options.shard and not options.shard_from:
        raise RequestError(
            "--mode semi_auto_parallel completes strategies that are given; give some with --shard PATTERN=STRATEGY or"
            " --shard-from PLAN"
        )
    return options


def _hybrid_parallel(options: Options) -> Options:
    missing = [flag(name) for name in ("tensor", "pipeline", "data", "zero") if getattr(options, name) is None]
    if options.micro_batch is None and options.micro_batches is None:
        missing.append("--micro-batch or --micro-batches")
    if missing:
        raise RequestError(f"--mode hybrid_parallel leaves every degree to you; give {', '.join(missing)} too")
    return options


def _auto_parallel(options: Options) -> Options:
    return options


def _manual(options: Options) -> Options:
    raise RequestError(
        "--mode manual leaves nothing to search: give the plan file that you have edited, as in plan --mode manual"
        " PLAN.json --steps 5; --mode hybrid_parallel writes one to begin with"
    )


def _agree(options: Options, wanted: dict[str, object], means: str) -> None:
    for name, value in wanted.items():
        given = getattr(options, name)
        if given is not None and given != value:
            raise RequestError(
                f"--mode {options.mode} {means}, {flag(name)} {given} contradicts it; leave out one of them"
            )


MODES: dict[str, Callable[[Options], Options]] = {
    "stand_alone": _stand_alone,
    "data_parallel": _data_parallel,
    "parameter_server": _parameter_server,
    "semi_auto_parallel": _semi_auto_parallel,
    "hybrid_parallel": _hybrid_parallel,
    "auto_parallel": _auto_parallel,
    "manual": _manual,
}
"""The options of each mode."""
