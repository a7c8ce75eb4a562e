"""An auto-parallel planner: traces a PyTorch model, searches how to split it over a cluster, and writes the plan.

The parts, from the ground up (each imports only from those before it):

    errors, graph, models     what a model computes
    sharding, pricing         how it can be split, and what that costs
    plan                      what was decided: the file, its checks, its price
    search, report, export    who makes plans, shows them, carries them elsewhere
    cli                       the command line
"""

__all__: list[str] = []
