"""Generate text with a run: continuations of a prompt, or the answer to a question.

    python eval.py sample --out_dir=out/stdlib-elastic --prompt="def attention("
    python eval.py sample --out_dir=out/smollm2 --chat --prompt="Why is the sky blue?"
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
    prompt: str = knob("", "text to continue; empty: a public model's separator, or the first held-out token")
    chat: bool = knob(False, "the prompt is a question to an instruction-tuned model: print only its answer")
    system: str = knob("", "with --chat: the system message; empty: none, or that of smollm2's training")
    tokens: int = knob(300, "tokens to generate; fewer if the model ends its text", least=1)
    samples: int = knob(1, "number of continuations", least=1)
    temperature: float = knob(0.8, "divisor of the logits; 0: always the likeliest token", least=0)
    top_k: int = knob(50, "draw from the k likeliest tokens only; 0: from all")
    top_p: float = knob(0.0, "draw from the fewest tokens whose probabilities reach p; 0: from all", least=0)
    seed: int = knob(0, "seed of the draws")

    def __post_init__(self):
        super().__post_init__()
        if self.chat and not self.prompt:
            raise ValueError("--chat needs a question: give it as --prompt=...")
        if self.system and not self.chat:
            raise ValueError("--system needs a conversation: add --chat, or leave --system out")


def command(args, run):
    """Generate text: continue a prompt, or with --chat answer a question."""
    coder, stop = run.tokenizer, set(run.meta.get("ends", []))          # missing in older runs
    if args.chat:
        stop.add(mark(coder, END))
        prompt = conversation(coder, args.system or SYSTEM.get(coder.name), args.prompt)
    else:
        prompt = coder.encode(args.prompt) if args.prompt else first_token(coder, run.split)
    idx = as_ids(prompt, run.machine).expand(args.samples, -1)          # (samples, T): each row draws its own tokens
    times = [time.perf_counter()]               # of the start, then of the logits after every token

    def note_time(model, inputs, outputs):
        outputs[0][0, 0, 0].item()              # waits for the GPU
        times.append(time.perf_counter())

    hook = run.model.register_forward_hook(note_time)
    with run.machine.autocast():
        ids = run.model.generate(idx, args.tokens, args.temperature, args.top_k, args.top_p, args.seed,
                                 stop=sorted(stop))
    hook.remove()
    speed = {"prompt": idx.numel() / (times[1] - times[0])}
    if len(times) > 2:
        speed["new"] = len(idx) * (len(times) - 2) / (times[-1] - times[1])
    if run.machine.main:
        print(" ".join(f"{number:,.0f} {what} tokens/s" for what, number in speed.items()), file=sys.stderr)
    answers = [list(takewhile(lambda i: i not in stop, row)) for row in ids[:, len(prompt):].tolist()]
    texts = [coder.decode(([] if args.chat else prompt.tolist()) + answer) for answer in answers]
    return {"samples": texts, "tokens_per_s": speed}, "\n---------------\n".join(texts)


def first_token(coder, split):
    """The default prompt (1,): the separator of a public model's tokenizer, otherwise split("val")'s first token."""
    return np.array([coder.separator]) if coder.content else split("val").window(0, 1)


def as_ids(array, machine):
    """Token ids (T,) as a batch of one, (1, T) int64, on the machine's device."""
    return torch.from_numpy(array.astype(np.int64))[None].to(machine.device)


# ChatML, the format in which many public models learned to answer. Each turn is enclosed in two special tokens, and its
# first line names the speaker. The prompt ends with the beginning of the assistant's turn, which the model continues.
BEGIN, END = "<|im_start|>", "<|im_end|>"
SYSTEM = {"smollm2": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}    # from its own template


def conversation(coder, system, prompt):
    """The ids (T,) of a conversation up to the beginning of the answer. system: the system message, or None."""
    begin, end, ids = mark(coder, BEGIN), mark(coder, END), []
    for role, text in ("system", system), ("user", prompt):
        if text:
            ids += [begin, *coder.encode(f"{role}\n{text}"), end, *coder.encode("\n")]
    return np.array([*ids, begin, *coder.encode("assistant\n")])


def mark(coder, spelling):
    """The id of a special token (in a prompt the same characters are text). Raises ValueError without one."""
    found = coder.coder.token_to_id(spelling) if coder.content else None
    if found is None:
        raise ValueError(f"--chat: the tokenizer {coder.name} has no {spelling}, so this model has not learned to "
                         "answer in this format: leave --chat out, and give a --prompt to continue")
    return found
