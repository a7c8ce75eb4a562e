"""Words that shells complete: names of models, machines and stacks, and values of options.

`plan --install-completion` tells a shell to ask for them. Nothing is imported before it does.
"""

from collections.abc import Callable, Iterable


def completing(known: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """The known words that start with what was typed."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in known() if word.startswith(incomplete)]

    return complete


def models() -> Iterable[str]:
    """Of the zoo."""
    from planner.models.zoo import ZOO

    return ZOO


def profiles() -> Iterable[str]:
    """Machines."""
    from hardware_profiles import profile_names

    return profile_names()


def stacks() -> Iterable[str]:
    """Training stacks."""
    from hardware_profiles import software_names

    return software_names()


def engines() -> Iterable[str]:
    """Engines that plans are searched for."""
    from planner.engines.spaces import SPACES

    return SPACES


def modes() -> Iterable[str]:
    """Of --mode."""
    from planner.cli.modes import MODES

    return MODES


def schedules() -> Iterable[str]:
    """Of --schedule."""
    from costmodels import SCHEDULES

    return SCHEDULES


def algorithms() -> Iterable[str]:
    """Of --search."""
    from planner.strategy_search.request.request import ALGORITHMS

    return ALGORITHMS


def defaults() -> Iterable[str]:
    """Of --default."""
    from planner.strategy_search.request.request import DEFAULTS

    return DEFAULTS


def objectives() -> Iterable[str]:
    """Of --objective."""
    from planner.strategy_search.request.request import OBJECTIVES

    return OBJECTIVES


def precisions() -> Iterable[str]:
    """Of --precision."""
    from planner.graph.fp8 import WORD
    from planner.plan.plan import PRECISIONS

    return (*PRECISIONS, WORD)


def recipes() -> Iterable[str]:
    """Of --fp8."""
    from planner.fp8_recipes import RECIPES

    return RECIPES


def optimizers() -> Iterable[str]:
    """Of --optimizer."""
    from planner.plan.plan import OPTIMIZERS

    return OPTIMIZERS


def recomputation() -> Iterable[str]:
    """Of --recompute."""
    from planner.plan.plan import RECOMPUTATION

    return RECOMPUTATION


def offload() -> Iterable[str]:
    """Of --offload."""
    from planner.strategy_search.request.offload import WORDS

    return WORDS


def alltoall() -> Iterable[str]:
    """Of --alltoall-on."""
    from planner.cli.requesting import ALLTOALL

    return ALLTOALL


def contexts() -> Iterable[str]:
    """Of --context-by."""
    from typing import get_args

    from planner.strategy_search.request.space import ContextBy

    return get_args(ContextBy)


def gradients() -> Iterable[str]:
    """Of --gradients."""
    from planner.sharding.update import GRADIENTS

    return GRADIENTS


def zero_by() -> Iterable[str]:
    """Of --zero-by."""
    from planner.sharding.update import AUTO_ZERO_BY, ZERO_BY

    return (*ZERO_BY, AUTO_ZERO_BY)


def gradient_dtypes() -> Iterable[str]:
    """Of --gradient-dtype."""
    from planner.sharding.update import GRADIENT_DTYPES

    return GRADIENT_DTYPES


def moment_dtypes() -> Iterable[str]:
    """Of --moment-dtype."""
    from planner.sharding.update import MOMENT_DTYPES

    return MOMENT_DTYPES
