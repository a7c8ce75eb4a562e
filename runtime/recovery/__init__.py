"""Training goes on after something broke.

    supervisor ── a run after the other ──▶ ranks        each run begins where the last checkpoint, or copy, was taken
        │
        └── replanning: another number of devices gets another plan, found once and kept

A process that was killed is started again with the others, on the same plan. Where there are fewer devices, or more
again, the plan for so many is searched, and the state is cut anew (`runtime.checkpoint`). What is trained on stays the
same: the global batch, the samples, their order, and what is drawn at random.
"""
