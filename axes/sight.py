"""Which keys a row sees: causal attention, windows, first keys, packed documents."""

from typing import Any, NamedTuple


class Sight(NamedTuple):
    """Which keys the rows of a layer see, and the constant factor on their scores."""

    scale: float = 1.0
    window: int = 0  # number of keys that a row sees, its own included; 0: all
    first: int = 0  # number of first keys that it sees beyond the window
    hidden: int = -1  # a key that only its own row sees: for instruments, never in training
    starts: Any = None  # (B, T): the first key of each row's own document; None: key 0
    skip_dead: bool = True  # the kernels skip tiles without any weight; False to measure the gain


def visible(i, j, sight):
    """The mask: row i sees key j (positions, broadcast against each other).

    A window (Beltagy et al. 2020) hides the sink. A model that was trained without a window needs
    its sink and breaks, unless the first keys stay visible (StreamingLLM, Xiao et al. 2309.17453).
    In GPT-OSS layers 0, 2, .. have one."""
    start = start_of(i, sight)
    seen = (j <= i) if sight.starts is None else (start <= j) & (j <= i)
    if sight.window:
        seen = seen & ((i - j < sight.window) | (j - start < sight.first))
    return seen & ((j != sight.hidden) | (i == j)) if sight.hidden >= 0 else seen


def start_of(i, sight):
    """The first key of the documents of rows i: 0, or with packed documents (B, 1, the shape of
    i)."""
    return 0 if sight.starts is None else sight.starts[:, None, i]


def visible_count(i, sight):
    """n_i, the number of keys that row i sees, hidden ones included, as float32: (R,), or of packs
    (B, 1, R)."""
    n = (i + 1 - start_of(i, sight)).float()
    return n.clamp(max=sight.window + sight.first) if sight.window else n
