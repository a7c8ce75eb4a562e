"""Plans that the planner finds for the small models of plans.py, on machines where it pays to split them."""

from dataclasses import replace

from hardware_profiles import Cluster, Machine, load_profile
from planner.plan.plan import ModelReference, Plan
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.search import search
from tests.distributed import plans


def eager_cluster(devices: int, memory: float) -> Cluster:
    """Links without latency between slow devices, so that it pays to split models as small as these."""
    cluster = load_profile("cpu").with_devices(devices)
    device = replace(cluster.device, memory=memory, reserved=0.0, allocator_slack=0.0, launch_latency=0.0)
    levels = tuple(
        replace(level, bandwidth=1e12, protocols=tuple(replace(p, setup=0.0, latency=0.0) for p in level.protocols))
        for level in cluster.levels
    )
    return replace(cluster, device=device, levels=levels)


def searched_plan(
    model: str,
    devices: int,
    *,
    memory: float = 1e9,
    pinned: Pinned = FREE,
    update: Update = PLAIN,
    global_batch: int = plans.BATCH,
    machine: Machine | None = None,
) -> Plan:
    """The best plan on some devices with so many bytes of memory each, or on a machine. What is in float64 is
    priced as float32, as no machine profile says how quick the former is."""
    traced = plans.traced(model)
    types = {name: replace(t, dtype="float32") if t.dtype == "float64" else t for name, t in traced.types.items()}
    graph = replace(traced, types=types)
    reference = ModelReference(
        reference=model,
        sequence_length=plans.SEQUENCE,
        batch=plans.BATCH,
        parameters=graph.parameter_count(),
        fingerprint=graph.fingerprint(),
    )
    request = SearchRequest(
        graph=graph,
        batch=plans.BATCH,
        model=reference,
        cluster=eager_cluster(devices, memory) if machine is None else machine,
        global_batch=global_batch,
        precision="fp32",
        pinned=pinned,
        update=update,
    )
    plan = search(request).plan
    return replace(plan, model=replace(plan.model, fingerprint=traced.fingerprint()))
