"""Public weights: as runs of ours, and our recipes under models of transformers."""
