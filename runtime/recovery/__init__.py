"""Training continues after failures.

    supervisor ── one run after the other ──▶ ranks        each run starts from the last checkpoint or state replica
        │
        └── replanning: another number of devices gets another plan, searched once and kept

If a process is killed, all processes are restarted on the same plan. If there are fewer or more devices, a plan for
that number is searched, and the state is resharded (`runtime.checkpoint`). The training stays the same: global batch,
samples, their order, and random numbers.
"""
