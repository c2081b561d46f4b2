"""Public weights: as runs of ours, and our recipes under models of transformers."""

import common  # noqa: F401  it must come before torch
