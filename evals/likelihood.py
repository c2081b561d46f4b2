"""What benchmarks share: requests, the likelihoods that a model gives to them, and the texts that it generates.

A request is a context and a continuation. The model scores the tokens of the continuation. The tokens with which all
requests of a group begin are read once. Requests that need padding only at the right form a batch.
"""
import itertools
import os
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from evals.instrument import progress


class Request(NamedTuple):
    """Token ids of a context and its continuation, the last `count` of them. cut: were the first ids cut off?"""
    ids: list[int]
    count: int
    cut: bool = False


def text_tokenizer(run):
    """The tokenizer of a run that was trained on text. Raises ValueError if its tokens are symbols."""
    if run.tokenizer.name == "numbers":
        raise ValueError(f"the tokens of {run.out_dir} are symbols that spell no text: name a run trained on text")
    return run.tokenizer


def row_requests(row, coder, length, bos):
    """A Request for each choice of a benchmarks.Row. The input, all ids but the last, has at most `length` tokens. A
    longer context loses its beginning."""
    found = []
    for context, choice in zip(row.contexts, row.choices, strict=True):
        # context and choice are encoded as one text, because a token may span the boundary. The choice begins after as
        # many ids as the context has alone. A space at the end of the context goes to the choice
        before = coder.encode(context.rstrip()).tolist()
        after = coder.encode(f"{context} {choice}").tolist()[len(before):]
        if not 0 < len(after) <= length:
            raise ValueError(f"a choice has {len(after)} tokens where the model can predict 1 to {length}: give a "
                             "larger --length if its positions are relative, or leave this task out of --tasks")
        front = [coder.separator] if bos or not before else []          # something must predict the first token
        ids = front + before + after
        found.append(Request(ids[-length - 1:], len(after), len(ids) > length + 1))
    return found


def page_requests(page, coder, length, bos):
    """The Requests of a page: windows of `length` tokens that predict every token once. The first window begins with
    the separator, with or without --bos, each other one with the last token of the window before. The last window is
    moved to the left until it is full, and only its new tokens are scored."""
    ids = [coder.separator, *coder.encode(page.text).tolist()]
    ends = [*range(length, len(ids) - 1, length), len(ids) - 1]         # the last token that each window predicts
    return [Request(ids[max(0, end - length):end + 1], end - start) for start, end in itertools.pairwise([0, *ends])]


class Answer(NamedTuple):
    loglik: float                               # sum over all scored tokens, in nats
    greedy: bool                                # was each of them the likeliest?
    rank: float = 1.0                           # their mean rank, each given those before it; 1: the likeliest


class Unit(NamedTuple):
    """Requests with the same first `shared` tokens."""
    requests: list[Request]
    shared: int
    longest: int                                # the input tokens of the longest request, without the shared ones
    number: int                                 # the index of the first of them among all requests


@torch.no_grad()
def listen(model, groups, machine, batch_size, name):
    """The model's Answers to groups of Requests, [[Answer]]. The tokens that all requests of a group begin with are
    read once. The ranks share the batches. name: the task, for the progress bar and errors."""
    blocks = [block.attn for block in model.transformer.h]
    units = units_of(groups, all(block.cached for block in blocks))
    # without causality tokens would see the padding, so each batch is one unit
    todo = list(batches(units, batch_size if all(block.causal for block in blocks) else 0))
    found = np.zeros((sum(map(len, groups)), len(Answer._fields)))      # zero where another rank reads
    bar = progress(todo[machine.rank::machine.world], machine.main)
    bar.set_description(name, refresh=False)
    head, model.lm_head = model.lm_head, torch.nn.Identity()            # most tokens are context and need no logits
    try:
        with machine.autocast():                # one for all: each autocast converts the weights again
            for batch in bar:
                numbers = [unit.number + i for unit in batch for i in range(len(unit.requests))]
                found[numbers] = read_batch(model, head, batch)
    finally:
        model.lm_head = head
    found = np.reshape(machine.sum(*found.flatten().tolist()), found.shape)
    if not np.isfinite(found).all():
        raise ValueError(f"{name}: the model's log-likelihoods are not finite: try --dtype=float32, and look at "
                         "its loss with python eval.py loss")
    answers = (Answer(loglik, bool(greedy), rank) for loglik, greedy, rank in found.tolist())
    return [[next(answers) for _ in group] for group in groups]


def units_of(groups, cached):
    """The Units to read: a group if its requests share a beginning, otherwise each request alone. cached: whether the
    model can keep what it has read of a text."""
    units, number = [], 0
    for group in groups:
        common = len(os.path.commonprefix([request.ids for request in group]))          # it accepts any lists
        # the token before a continuation is not shared, because it predicts the first score
        shared = min(common, *(len(r.ids) - r.count - 1 for r in group)) if cached and len(group) > 1 else 0
        for part in [group] if shared else [[request] for request in group]:
            units.append(Unit(part, shared, max(len(r.ids) for r in part) - 1 - shared, number))
            number += len(part)
    return units


def batches(units, batch_size):
    """Yield batches, lists of Units, the longest first. The units of a batch have the same number of shared tokens. So
    they need padding only at the right, where causal attention does not see it. A batch has at most batch_size tokens,
    including the padding."""
    batch = []
    for unit in sorted(units, key=lambda unit: (unit.shared, unit.longest), reverse=True):
        longest = batch[0].longest if batch else unit.longest
        size = unit.shared * (len(batch) + 1) + longest * sum(len(unit.requests) for unit in [*batch, unit])
        if batch and (unit.shared != batch[0].shared or size > batch_size):
            yield batch
            batch = []
        batch.append(unit)
    yield batch


def read_batch(model, head, batch):
    """The fields of the Answers to the requests of a batch, (N, 3). The model returns the input of its head (B, T, C)
    instead of logits (B, T, V)."""
    device, P, cache = head.weight.device, batch[0].shared, None
    if P:                                       # read the shared tokens of each unit, and repeat them for its requests
        cache = model.new_cache()
        model(torch.tensor([unit.requests[0].ids[:P] for unit in batch], device=device), cache=cache)
        repeats = torch.tensor([len(unit.requests) for unit in batch], device=device)
        cache = tree_map_only(torch.Tensor, lambda value: value.repeat_interleave(repeats, 0), cache)
    requests = [request for unit in batch for request in unit.requests]
    inputs, counts = [request.ids[P:-1] for request in requests], [request.count for request in requests]
    S = max(map(len, inputs))
    idx = torch.tensor([ids + [0] * (S - len(ids)) for ids in inputs], device=device)                   # (N, S)
    x = model(idx, cache=cache)[0].flatten(0, 1)                                                        # (N S, C)
    # the places that need logits, the last `count` of each input, and the tokens that follow them: (M,) both
    ends = [i * S + len(ids) for i, ids in enumerate(inputs)]
    at = [place for end, count in zip(ends, counts, strict=True) for place in range(end - count, end)]
    wanted = torch.tensor([token for r in requests for token in r.ids[-r.count:]], device=device)
    found = []
    for rows, ids in zip(x[torch.tensor(at, device=device)].split(256), wanted.split(256), strict=True):
        logits = head(rows).float()             # in parts, because the logits of a page are large
        logprob = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        rank = 1 + (logits > logits.gather(-1, ids[:, None])).sum(-1)
        found.append(torch.stack([logprob, logits.argmax(-1) == ids, rank]).cpu().double())
    return [[loglik.sum().item(), greedy.min().item(), rank.mean().item()]
            for loglik, greedy, rank in torch.cat(found, 1).split(counts, 1)]


def generated(model, machine, prompts, count, stop=(), batch_size=1):
    """The likeliest continuation of each prompt, lists of at most `count` ids. A row that has drawn an id in `stop`
    repeats it. A batch has at most batch_size prompts of the same length; the longest is first, so that a batch that
    does not fit into memory fails at once."""
    by_length, found = {}, {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    todo = [numbers[i:i + batch_size] for _, numbers in sorted(by_length.items(), reverse=True)
            for i in range(0, len(numbers), batch_size)]
    with machine.autocast():
        for batch in progress(todo, machine.main):
            idx = torch.tensor([prompts[number] for number in batch], device=machine.device)
            ids = model.generate(idx, count, temperature=0, stop=stop)
            found |= zip(batch, ids[:, idx.shape[1]:].tolist(), strict=True)
    return [found[number] for number in range(len(prompts))]
