"""What train.py and the instruments share. Flags, the machine, runs and files do not know the
model; presets, the values of knobs, parts of a run's weights and the balancing loss do.

Import it before torch: it sets how threads wait for each other."""

import os

# OpenMP's threads wait in a loop. If another process needs their core, the thread that they wait
# for cannot run, and training takes up to four times as long. So they sleep: at once, or, with
# GCC's OpenMP, which torch has on Linux, after some microseconds. That costs a quiet machine
# nothing, while sleeping at once costs small models a third
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
