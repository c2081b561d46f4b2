"""Generate text with a run.

python eval.py sample --out_dir=out/stdlib-elastic --prompt="def attention("
"""

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch

from common.flags import Knobs, knob


@dataclass
class Sample(Knobs):
    """Flags of sample"""

    prompt: str = knob(
        "", "text to continue; empty: a public model's separator, or the first held-out token"
    )
    tokens: int = knob(300, "tokens to generate; fewer if the model ends its text", least=1)
    samples: int = knob(1, "number of continuations", least=1)
    temperature: float = knob(0.8, "divisor of the logits; 0: always the likeliest token", least=0)
    top_k: int = knob(50, "draw from the k likeliest tokens only; 0: from all")
    seed: int = knob(0, "seed of the draws")


def command(args, run):
    """Generate text that continues a prompt."""
    coder, stop = run.tokenizer, run.meta.get("ends", [])  # missing in older runs
    prompt = coder.encode(args.prompt) if args.prompt else first_token(coder, run.split)
    # (samples, T): each row draws its own tokens
    idx = as_ids(prompt, run.machine).expand(args.samples, -1)
    with run.machine.autocast():
        ids = run.model.generate(
            idx, args.tokens, args.temperature, args.top_k, seed=args.seed, stop=stop
        )
    texts = []
    for row in ids[:, len(prompt) :].tolist():
        new = takewhile(lambda i: i not in stop, row)
        texts.append(coder.decode([*prompt.tolist(), *new]))
    return {"samples": texts}, "\n---------------\n".join(texts)


def first_token(coder, split):
    """The default prompt (1,): the separator of a public model's tokenizer, otherwise
    split("val")'s first token."""
    return np.array([coder.separator]) if coder.content else split("val").window(0, 1)


def as_ids(array, machine):
    """Token ids (T,) as a batch of one, (1, T) int64, on the machine's device."""
    return torch.from_numpy(array.astype(np.int64))[None].to(machine.device)
