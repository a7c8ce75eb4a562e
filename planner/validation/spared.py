"""Memory savings of a run besides its degrees: recomputed blocks, and blocks whose activations are offloaded.

    stage     block 0 | block 1 | block 2 | block 3        the first `recomputed` are run again in their backward pass
              again     again     kept      kept           (Megatron: --recompute-method block --recompute-num-layers 2)
    rank      away      away      kept      kept           the first `offloaded` send what they save to the host
                                                           (Transformer Engine: cpu_offloading_num_layers 2)

A row or its recipe may state them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """What blocks do to save memory.

    Attributes:
        recomputed: blocks of every stage that are recomputed whole.
        offloaded: blocks of every pipeline rank that offload what they save.
        but: parts that every block recomputes (`planner.plan.layout.kept.Kept`).
        remade: what every block recomputes almost for free (`Software.remakes`).
    """

    recomputed: int = 0
    offloaded: int = 0
    but: tuple[str, ...] = ()
    remade: tuple[str, ...] = ()

    @property
    def by_block(self) -> bool:
        """Whether some blocks run differently from others."""
        return bool(self.recomputed or self.offloaded)


NOTHING_SPARED = Spared()
