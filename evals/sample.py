"""Text from a run: continuations of a prompt."""
from dataclasses import dataclass

import numpy as np
import torch

from common.flags import at_least, knob


@dataclass
class Sample:
    """Flags of sample"""
    prompt: str = knob("", "text to continue; empty: the separator of a public model's tokenizer, or else whatever "
                           "token the held-out data begins with, as a rule a separator, too")
    tokens: int = knob(300, "tokens to generate")
    samples: int = knob(1, "how many continuations")
    temperature: float = knob(0.8, "0: always the likeliest token")
    top_k: int = knob(50, "draw from the k likeliest tokens only; 0: from all")
    top_p: float = knob(0.0, "draw from the fewest tokens whose probabilities reach p; 0: from all")
    seed: int = knob(0, "seed of the draws")

    def __post_init__(self):
        at_least(self, tokens=1, samples=1, temperature=0, top_k=0, top_p=0, seed=0)


def command(args, run):
    """Generate text."""
    coder, machine = run.tokenizer, run.machine
    prompt = coder.encode(args.prompt) if args.prompt else first_token(coder, run.split)
    idx = as_ids(prompt, machine).expand(args.samples, -1)              # (samples, T): each row draws its own tokens
    with machine.autocast():
        ids = run.model.generate(idx, args.tokens, args.temperature, args.top_k, args.top_p, args.seed)
    texts = [coder.decode(row) for row in ids.tolist()]
    return {"samples": texts}, "\n---------------\n".join(texts)


def first_token(coder, split):
    """What a text begins with, (1,): a prompt when there is none. split("val"): the held-out data, which a public
    model can do without."""
    return np.array([coder.separator]) if coder.content else split("val").window(0, 1)


def as_ids(array, machine):
    """Token ids (T,) as a batch of one, (1, T) int64, on the machine's device."""
    return torch.from_numpy(array.astype(np.int64))[None].to(machine.device)
