"""What bench and passkey ask of a model: how likely is a continuation, and how does a text go on?

A batch holds only inputs of the same length, so no input needs padding.
"""

from typing import NamedTuple

import torch

from evals.instrument import progress


class Answer(NamedTuple):
    """How likely a continuation is."""

    loglik: float  # sum over its tokens, in nats
    greedy: bool  # was each of them the likeliest?


def text_tokenizer(run):
    """The tokenizer of a run that was trained on text. Raises ValueError if its tokens are
    symbols."""
    if run.tokenizer.name == "numbers":
        raise ValueError(
            f"the tokens of {run.out_dir} are symbols that spell no text: "
            "name a run trained on text"
        )
    return run.tokenizer


def batches(inputs, batch_size):
    """Divide inputs, lists of ids, into batches of equal lengths. Returns lists of their numbers.
    A batch has at most batch_size tokens, or one input. The longest is first, so that a batch that
    does not fit into memory fails at once."""
    by_length, found = {}, []
    for number, ids in enumerate(inputs):
        by_length.setdefault(len(ids), []).append(number)
    for length, numbers in sorted(by_length.items(), reverse=True):
        size = max(1, batch_size // length)
        found += [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return found


@torch.no_grad()
def answers(model, machine, requests, batch_size):
    """The model's Answers to requests (ids, count): how likely are the last `count` ids after those
    before them? The ranks share the batches. Raises ValueError if an answer is not finite."""
    found = torch.zeros(len(requests), 2, dtype=torch.float64)  # zero where another rank reads
    todo = batches([ids[:-1] for ids, _ in requests], batch_size)
    with machine.autocast():  # one for all: each autocast converts the weights
        for batch in progress(todo[machine.rank :: machine.world], machine.main):
            counts = [requests[number][1] for number in batch]
            ids = torch.tensor([requests[number][0] for number in batch], device=machine.device)
            logits = model(ids[:, :-1], last=max(counts))[0]  # (B, max count, V)
            for number, count, row, wanted in zip(batch, counts, logits, ids, strict=True):
                row, wanted = row[-count:].float(), wanted[-count:, None]
                own = row.gather(-1, wanted)  # (count, 1)
                logprob = (own - row.logsumexp(-1, keepdim=True)).cpu().double()
                greedy = (row.argmax(-1, keepdim=True) == wanted).all().cpu()
                found[number] = torch.stack([logprob.sum(), greedy])
    total = machine.sum(*found.flatten().tolist())
    found = torch.tensor(total, dtype=found.dtype).view(found.shape)
    if not found.isfinite().all():
        raise ValueError(
            "the model's log-likelihoods are not finite: try --dtype=float32, and "
            "look at its loss with python eval.py loss"
        )
    return [Answer(loglik, bool(greedy)) for loglik, greedy in found.tolist()]


def generated(model, machine, prompts, batch_size, count, **how):
    """The model's continuation of each prompt: lists of at most `count` ids. how: other arguments
    of GPT.generate."""
    found = {}
    with machine.autocast():
        for batch in progress(batches(prompts, batch_size), machine.main):
            idx = torch.tensor([prompts[number] for number in batch], device=machine.device)
            ids = model.generate(idx, count, **how)
            found |= zip(batch, ids[:, idx.shape[1] :].tolist(), strict=True)
    return [found[number] for number in range(len(prompts))]
