"""Random numbers that depend only on their purpose, so a run can be repeated, resumed and split over ranks."""
import zlib

import numpy as np
import torch


def generator_of(seed, name):
    """A generator for the initial values of one tensor, independent of the model's other tensors."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def seed_dropout(*numbers):
    """Seed torch's global generator, which dropout uses, with one number made of these."""
    torch.manual_seed(np.random.SeedSequence(numbers).generate_state(1)[0].item())
