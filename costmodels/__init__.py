"""Cost formulas: numbers in, seconds or bytes out. They know no operator and no plan; imports `hardware_profiles`
only."""

from costmodels.attention import (
    AttentionShape,
    attention_backward_time,
    attention_preparation,
    attention_rate,
    attention_time,
)
from costmodels.bounds import collective_lower_bound
from costmodels.collectives import COLLECTIVES, affine_pieces, collective_time
from costmodels.compute import FREE_OP_CLASS, operator_time
from costmodels.delta_rule import DeltaRuleShape, delta_rule_backward_time, delta_rule_time
from costmodels.dense_servers import served_update_time
from costmodels.errors import CostModelError
from costmodels.experts import BALANCED, ExpertsShape, experts_backward_time, experts_time, once_share
from costmodels.fit import fit_attention, fit_matmul, percentage_error
from costmodels.index_scores import IndexScoresShape, index_scores_backward_time, index_scores_time
from costmodels.interleaving import (
    Part,
    Slot,
    Then,
    backward_slots_of,
    interleaved_time,
    paired_time,
    slots_of,
    take_turns,
    turns_of,
)
from costmodels.matmul import element_bytes, matmul_rate, matmul_time, weight_gradient_time
from costmodels.memory import (
    MOMENT_BYTES,
    MOMENTS_KEPT,
    PLAIN_UPDATE,
    UPDATE_CHUNK,
    Optimizer,
    ParameterBytes,
    Precision,
    UpdateVariant,
    optimizer_traffic,
    parameter_bytes,
    peak_memory,
    planned_memory,
    reserved_memory,
    usable_memory,
)
from costmodels.moments import counts_at_moments, counts_beyond, fullest_moment
from costmodels.newton_schulz import (
    NEWTON_SCHULZ_KERNELS,
    NEWTON_SCHULZ_STEPS,
    orthogonalisation_bytes,
    orthogonalisation_flops,
    orthogonalisation_time,
)
from costmodels.offload import PLACES, Visit, away_seconds, offloaded_bytes, visit_pace, visit_seconds, visits_time
from costmodels.optimizer import optimizer_time
from costmodels.orders import FORWARD, SCHEDULES, Orders, Schedule, ends, most_in_flight, paired_turns, schedule_orders
from costmodels.overlapped_products import arriving_time, leaving_time
from costmodels.pipeline_times import ChunkSeconds, PassSeconds, RankSeconds
from costmodels.rank_ends import RankEnd, rank_ends, reductions_end
from costmodels.rates import best_rate
from costmodels.recurrent import RecurrentShape, recurrent_backward_time, recurrent_time
from costmodels.schedules import (
    Turn,
    bubble_fraction,
    in_flight,
    in_flight_of_chunks,
    least_step_time,
    moments_in_flight,
    order_1f1b,
    order_interleaved_1f1b,
    step_time,
)
from costmodels.state_space import (
    SelectiveScanShape,
    StateSpaceShape,
    selective_scan_backward_time,
    selective_scan_time,
    state_space_backward_time,
    state_space_time,
)
from costmodels.tables import ID_BYTES, ROW_MOMENTS, host_rows_time, server_rows_time
from costmodels.timeline import Event, Overlap, RankUse, Timeline, simulate
from costmodels.units import Array, Quantity

__all__ = [
    "Array",
    "AttentionShape",
    "BALANCED",
    "COLLECTIVES",
    "ChunkSeconds",
    "CostModelError",
    "DeltaRuleShape",
    "Event",
    "ExpertsShape",
    "FORWARD",
    "FREE_OP_CLASS",
    "ID_BYTES",
    "IndexScoresShape",
    "MOMENTS_KEPT",
    "MOMENT_BYTES",
    "NEWTON_SCHULZ_KERNELS",
    "NEWTON_SCHULZ_STEPS",
    "Optimizer",
    "Orders",
    "Overlap",
    "PLACES",
    "PLAIN_UPDATE",
    "ParameterBytes",
    "Part",
    "PassSeconds",
    "Precision",
    "Quantity",
    "ROW_MOMENTS",
    "RankEnd",
    "RankSeconds",
    "RankUse",
    "RecurrentShape",
    "SCHEDULES",
    "Schedule",
    "SelectiveScanShape",
    "Slot",
    "StateSpaceShape",
    "Then",
    "Timeline",
    "Turn",
    "UPDATE_CHUNK",
    "UpdateVariant",
    "Visit",
    "affine_pieces",
    "arriving_time",
    "attention_backward_time",
    "attention_preparation",
    "attention_rate",
    "attention_time",
    "away_seconds",
    "backward_slots_of",
    "best_rate",
    "bubble_fraction",
    "collective_lower_bound",
    "collective_time",
    "counts_at_moments",
    "counts_beyond",
    "delta_rule_backward_time",
    "delta_rule_time",
    "element_bytes",
    "ends",
    "experts_backward_time",
    "experts_time",
    "fit_attention",
    "fit_matmul",
    "fullest_moment",
    "host_rows_time",
    "in_flight",
    "in_flight_of_chunks",
    "index_scores_backward_time",
    "index_scores_time",
    "interleaved_time",
    "least_step_time",
    "leaving_time",
    "matmul_rate",
    "matmul_time",
    "moments_in_flight",
    "most_in_flight",
    "offloaded_bytes",
    "once_share",
    "operator_time",
    "optimizer_time",
    "optimizer_traffic",
    "order_1f1b",
    "order_interleaved_1f1b",
    "orthogonalisation_bytes",
    "orthogonalisation_flops",
    "orthogonalisation_time",
    "paired_time",
    "paired_turns",
    "parameter_bytes",
    "peak_memory",
    "percentage_error",
    "planned_memory",
    "rank_ends",
    "recurrent_backward_time",
    "recurrent_time",
    "reductions_end",
    "reserved_memory",
    "schedule_orders",
    "selective_scan_backward_time",
    "selective_scan_time",
    "served_update_time",
    "server_rows_time",
    "simulate",
    "slots_of",
    "state_space_backward_time",
    "state_space_time",
    "step_time",
    "take_turns",
    "turns_of",
    "usable_memory",
    "visit_pace",
    "visit_seconds",
    "visits_time",
    "weight_gradient_time",
]
