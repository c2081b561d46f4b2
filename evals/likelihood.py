"""The likelihood of a text after a context: requests and a model's answers, for evals/bench.py.

A request is a context and a continuation. The model scores the tokens of the continuation. It reads the tokens that
all requests of a group begin with only once. Requests that need padding only at the right form a batch.
"""
import contextlib
import itertools
import os
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from evals.instrument import progress

# ------------------------------------------------------------------------------------------------ from text to requests


class Request(NamedTuple):
    """Token ids of a context and its continuation, the last `count` of them. cut: were the first ids cut off?"""
    ids: list[int]
    count: int
    cut: bool = False


def row_requests(row, coder, length, bos):
    """A Request for each choice of a benchmarks.Row."""
    found = []
    for context, choice in zip(row.contexts, row.choices, strict=True):
        before, after = pair(coder, context, f" {choice}")
        front = [coder.separator] if bos or not before else []          # something must predict the first token
        found.append(request(front + before, after, length))
    return found


def pair(coder, context, continuation):
    """The ids of a context and of its continuation, (list, list). Both are encoded as one text, because a token may
    span the boundary, and cut after as many ids as the context has alone. A space at the end of the context goes to the
    continuation."""
    end = len(context.rstrip())
    context, continuation = context[:end], context[end:] + continuation
    before = coder.encode(context).tolist()
    return before, coder.encode(context + continuation).tolist()[len(before):]


def request(context, continuation, length):
    """A Request whose input, all ids but the last, has at most `length` tokens."""
    if not 0 < len(continuation) <= length:
        raise ValueError(f"a choice has {len(continuation)} tokens where the model can predict 1 to {length}: give a "
                         "larger --length if its positions are relative, or leave this task out of --tasks")
    ids = context + continuation
    return Request(ids[-length - 1:], len(continuation), len(ids) > length + 1)


def page_requests(page, coder, length, bos):
    """The Requests of a page: windows of `length` tokens that predict every token once. The first window begins with
    the separator, with or without --bos, each other one with the last token of the window before. The last window is
    moved to the left until it is full, and only its new tokens are scored."""
    ids = [coder.separator, *coder.encode(page.text).tolist()]
    ends = [*range(length, len(ids) - 1, length), len(ids) - 1]         # the last token that each window predicts
    return [Request(ids[max(0, end - length):end + 1], end - start) for start, end in itertools.pairwise([0, *ends])]


# ------------------------------------------------------------------------------------------- from requests to answers


class Answer(NamedTuple):
    loglik: float                               # of all scored tokens, in nats
    greedy: bool                                # was each of them the likeliest?


class Unit(NamedTuple):
    """Requests with the same first `shared` tokens. number: the index of the first of them among all requests."""
    requests: list[Request]
    shared: int
    number: int

    @property
    def longest(self):
        """The input tokens of the longest request, without the shared ones."""
        return max(len(r.ids) for r in self.requests) - 1 - self.shared


@torch.no_grad()
def listen(model, groups, machine, batch_size, name):
    """The model's Answers to groups of Requests, [[Answer]]. The tokens that all requests of a group begin with are
    read once. The ranks share the batches. name: the task, for the progress bar and errors."""
    blocks = [block.attn for block in model.transformer.h]
    units = units_of(groups, all(block.cached for block in blocks))
    # without causality tokens would see the padding, so each batch is one unit
    todo = list(batches(units, batch_size if all(block.causal for block in blocks) else 0))
    sums = np.zeros((2, sum(map(len, groups))))                         # loglik and greedy of each request
    bar = progress(todo[machine.rank::machine.world], machine.main)
    bar.set_description(name, refresh=False)
    with machine.autocast(), without_head(model) as head:               # one autocast: each converts the weights anew
        for batch in bar:
            numbers = [unit.number + i for unit in batch for i in range(len(unit.requests))]
            sums[:, numbers] = read_batch(model, head, batch)
    loglik, greedy = np.reshape(machine.sum(*sums.flatten().tolist()), sums.shape).tolist()
    if not np.isfinite(loglik).all():
        raise ValueError(f"{name}: the model's log-likelihoods are not finite: try --dtype=float32, and look at "
                         "its loss with python eval.py loss")
    answers = map(Answer, loglik, map(bool, greedy))
    return [[next(answers) for _ in group] for group in groups]


def units_of(groups, cached):
    """The Units to read: a group if its requests share a beginning, otherwise each request alone. cached: whether the
    model can keep what it has read of a text."""
    units, number = [], 0
    for group in groups:
        shared = in_common(group) if cached else 0
        parts = [group] if shared else [[request] for request in group]
        for part in parts:
            units.append(Unit(part, shared, number))
            number += len(part)
    return units


def in_common(group):
    """The number of first tokens that all requests of a group share, before the token that predicts the first score."""
    if len(group) == 1:
        return 0
    common = os.path.commonprefix([request.ids for request in group])   # works on any lists
    return min(len(common), *(len(request.ids) - request.count - 1 for request in group))


def batches(units, batch_size):
    """Yield batches, lists of Units, the longest first. The units of a batch have the same number of shared tokens. So
    they need padding only at the right, where causal attention does not see it. A batch has at most batch_size tokens,
    including the padding."""
    batch, rows = [], 0
    for unit in sorted(units, key=lambda unit: (unit.shared, unit.longest), reverse=True):
        more = rows + len(unit.requests)
        if batch and (unit.shared != batch[0].shared
                      or unit.shared * (len(batch) + 1) + batch[0].longest * more > batch_size):
            yield batch
            batch, more = [], len(unit.requests)
        batch, rows = [*batch, unit], more
    yield batch


@contextlib.contextmanager
def without_head(model):
    """Inside this context model(idx) returns the input of the head (B, T, C) instead of logits (B, T, V). Yields the
    head. Most tokens are context and need no logits."""
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    try:
        yield head
    finally:
        model.lm_head = head


def read_batch(model, head, batch):
    """The values loglik and greedy of every request of a batch, (2, N)."""
    device, P = head.weight.device, batch[0].shared
    cache = read_shared(model, batch, device) if P else None
    requests = [request for unit in batch for request in unit.requests]
    inputs = [request.ids[P:-1] for request in requests]
    S, counts = max(map(len, inputs)), [request.count for request in requests]
    idx = torch.tensor([ids + [0] * (S - len(ids)) for ids in inputs], device=device)                   # (N, S)
    x = model(idx, cache=cache)[0].flatten(0, 1)                                                        # (N S, C)
    # the places that need logits, the last `count` of each input, and the tokens that follow them: (M,) both
    ends = [i * S + len(ids) for i, ids in enumerate(inputs)]
    at = [place for end, count in zip(ends, counts, strict=True) for place in range(end - count, end)]
    wanted = torch.tensor([token for r in requests for token in r.ids[-r.count:]], device=device)
    # in parts, because the logits of a page are large
    parts = zip(x[torch.tensor(at, device=device)].split(256), wanted.split(256), strict=True)
    found = torch.cat([predicted(head(rows).float(), ids) for rows, ids in parts], 1)                   # (2, M)
    loglik, greedy = (row.split(counts) for row in found)
    return [[part.sum().item() for part in loglik], [part.min().item() for part in greedy]]


def read_shared(model, batch, device):
    """The cache of a model that has read the shared tokens of each unit, repeated for each of its requests."""
    cache = model.new_cache()
    model(torch.tensor([unit.requests[0].ids[:unit.shared] for unit in batch], device=device), cache=cache)
    repeats = torch.tensor([len(unit.requests) for unit in batch], device=device)
    return tree_map_only(torch.Tensor, lambda value: value.repeat_interleave(repeats, 0), cache)


def predicted(logits, ids):
    """Log-probabilities of ids (M,) under logits (M, V), and 1 where they are the likeliest: (2, M) float64."""
    logprob = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return torch.stack([logprob, logits.argmax(-1) == ids]).cpu().double()
