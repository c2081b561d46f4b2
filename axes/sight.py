"""Which keys a row sees: causal attention, windows, first keys."""
from typing import NamedTuple


class Sight(NamedTuple):
    """Which keys the rows of a layer see, and the constant factor on their scores."""
    scale: float = 1.0
    window: int = 0                             # number of keys that a row sees, its own included; 0: all
    first: int = 0                              # number of first keys that it sees beyond the window
    hidden: int = -1                            # a key that only its own row sees: for instruments, never in training
    skip_dead: bool = True                      # the kernels skip tiles without any weight; False to measure the gain


def visible(i, j, sight):
    """The mask: row i sees key j (positions, broadcast against each other).

    A window (Beltagy et al. 2020) hides the sink. A model that was trained without a window needs its sink and breaks,
    unless the first keys stay visible (StreamingLLM, Xiao et al. 2309.17453). In GPT-OSS layers 0, 2, .. have one."""
    seen = j <= i
    if sight.window:
        seen = seen & ((i - j < sight.window) | (j < sight.first))
    return seen & ((j != sight.hidden) | (i == j)) if sight.hidden >= 0 else seen


def visible_count(i, sight):
    """n_i, the number of keys that row i sees, as float32. A hidden key counts as seen."""
    n = (i + 1).float()
    return n.clamp(max=sight.window + sight.first) if sight.window else n
