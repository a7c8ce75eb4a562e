"""`plan search`: the main command, same as `plan --model ...`."""

from planner.cli.commands import plan
from planner.cli.errors import reporting
from planner.cli.options import Options, taking_options
from planner.errors import RequestError


@taking_options
def search(options: Options) -> None:
    """Find the fastest plan for a model on a cluster, predict its time and memory, and write it as a file.

    Options that you give are fixed; the search decides the rest. `plan --model ...` is the same command.

        plan search --model llama70b --devices 64
        plan search --model llama70b --devices 64 --tensor 8 --pipeline 8 --zero 1 -o mine.json
        plan search --model llama70b --hardware h100-80gb:32,a100-80gb:32
        plan search --model path/to/config.json --devices 8 --seq-len 32k --recompute selective
        plan search --model llama8b --devices 8 --top 3 --explain
    """
    search_model(options)


def search_model(options: Options) -> None:
    """Plan what the options say."""
    with reporting(options.as_json):
        if options.model is None:
            raise RequestError("missing --model NAME (see `plan models`)")
        plan.make_plan(options)
