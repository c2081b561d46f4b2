"""Generate text with a run.

python eval.py sample --out_dir=out/stdlib-elastic --prompt="def attention("
"""

import sys
import time
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
    times = [time.perf_counter()]  # of the start, then of the logits after every token

    def note_time(model, inputs, outputs):
        outputs[0][0, 0, 0].item()  # waits for the GPU
        times.append(time.perf_counter())

    hook = run.model.register_forward_hook(note_time)
    with run.machine.autocast():
        ids = run.model.generate(
            idx, args.tokens, args.temperature, args.top_k, seed=args.seed, stop=stop
        )
    hook.remove()
    speed = {"prompt": idx.numel() / (times[1] - times[0])}
    if len(times) > 2:
        speed["new"] = len(idx) * (len(times) - 2) / (times[-1] - times[1])
    if run.machine.main:
        print(
            " ".join(f"{number:,.0f} {what} tokens/s" for what, number in speed.items()),
            file=sys.stderr,
        )
    texts = []
    for row in ids[:, len(prompt) :].tolist():
        texts.append(coder.decode([*prompt.tolist(), *takewhile(lambda i: i not in stop, row)]))
    return {"samples": texts, "tokens_per_s": speed}, "\n---------------\n".join(texts)


def first_token(coder, split):
    """The default prompt (1,): the separator of a public model's tokenizer, otherwise
    split("val")'s first token."""
    return np.array([coder.separator]) if coder.content else split("val").window(0, 1)


def as_ids(array, machine):
    """Token ids (T,) as a batch of one, (1, T) int64, on the machine's device."""
    return torch.from_numpy(array.astype(np.int64))[None].to(machine.device)
