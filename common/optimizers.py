"""Muon for matrices, AdamW for the rest, as one optimizer."""
from itertools import islice

import torch


class Together(torch.optim.Optimizer):
    """Optimizers with different parameters as one, whose groups and state are theirs. So a checkpoint, a scaler and a
    schedule see a single optimizer."""

    def __init__(self, *parts):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.share()

    def share(self):
        """Give each part its groups and the common state, which it fills for its own parameters."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups, part.state = list(islice(groups, len(part.param_groups))), self.state

    def __setstate__(self, state):              # load_state_dict ends with it: all groups and states are new objects
        super().__setstate__(state)
        self.share()

    def step(self):
        for part in self.parts:
            part.step()
