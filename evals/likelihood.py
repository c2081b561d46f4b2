"""How likely is this text after that one? Requests, and what a model says to them, for evals/bench.py.

Each request is a context and a continuation, whose tokens are scored. What the requests of a group begin with is read
once, and what is of one kind is read together, without more padding than at the right.
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
    """How likely are the last `count` of these ids after those before them? cut: earlier ones were left out."""
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
    """The ids of both, (list, list). They are encoded together and cut where the context ends by itself: byte pairs may
    begin on one side and end on the other. A space at the end of a context belongs to the word after it."""
    end = len(context.rstrip())
    context, continuation = context[:end], context[end:] + continuation
    before = coder.encode(context).tolist()
    return before, coder.encode(context + continuation).tolist()[len(before):]


def request(context, continuation, length):
    """A Request whose input, all ids but the last, has at most `length` tokens."""
    if not 0 < len(continuation) <= length:
        raise ValueError(f"a choice has {len(continuation)} tokens where the model can predict 1 to {length}: give a "
                         "larger --length, if its positions are relative, or leave this task out with --tasks")
    ids = context + continuation
    return Request(ids[-length - 1:], len(continuation), len(ids) > length + 1)


def page_requests(page, coder, length, bos):
    """A page in windows of `length`. The first begins with the separator, with or without --bos, the others with the
    last token of the one before; the last one is moved to the left until it is full, and only what is new in it counts.
    So every token is predicted once."""
    ids = [coder.separator, *coder.encode(page.text).tolist()]
    ends = [*range(length, len(ids) - 1, length), len(ids) - 1]         # the last that each window predicts
    return [Request(ids[max(0, end - length):end + 1], end - start) for start, end in itertools.pairwise([0, *ends])]


# ------------------------------------------------------------------------------------------- what the model says to it


class Answer(NamedTuple):
    loglik: float                               # of all scored tokens, in nats
    greedy: bool                                # was each of them the likeliest?


class Unit(NamedTuple):
    """Requests whose first `shared` tokens are the same, and the number of the first of them among all."""
    requests: list[Request]
    shared: int
    number: int

    @property
    def longest(self):
        """Tokens to read of the longest, beyond the shared ones."""
        return max(len(r.ids) for r in self.requests) - 1 - self.shared


@torch.no_grad()
def listen(model, groups, machine, batch_size, name):
    """The model's Answers to groups of Requests, [[Answer]]. What the requests of a group begin with is read once. The
    ranks share the batches."""
    blocks = [block.attn for block in model.transformer.h]
    units = units_of(groups, all(block.cached for block in blocks))
    # where later tokens are seen, padding would be, too: each goes by itself
    todo = list(batches(units, batch_size if all(block.causal for block in blocks) else 0))
    sums = np.zeros((2, sum(map(len, groups))))                         # loglik and greedy of each request
    bar = progress(todo[machine.rank::machine.world], machine.main)
    bar.set_description(name, refresh=False)
    with machine.autocast(), without_head(model) as head:               # once: weights in 16 bits are made anew at each
        for batch in bar:
            numbers = [unit.number + i for unit in batch for i in range(len(unit.requests))]
            sums[:, numbers] = read_batch(model, head, batch)
    loglik, greedy = np.reshape(machine.sum(*sums.flatten().tolist()), sums.shape).tolist()
    if not np.isfinite(loglik).all():
        raise ValueError(f"{name}: the model's log-likelihoods are not finite: try --dtype=float32, and look at "
                         "its loss")
    answers = map(Answer, loglik, map(bool, greedy))
    return [[next(answers) for _ in group] for group in groups]


def units_of(groups, cached):
    """What is read together: a group that shares a beginning, or each request by itself. cached: can a beginning be
    kept at all?"""
    units, number = [], 0
    for group in groups:
        shared = in_common(group) if cached else 0
        parts = [group] if shared else [[request] for request in group]
        for part in parts:
            units.append(Unit(part, shared, number))
            number += len(part)
    return units


def in_common(group):
    """How many first tokens all requests of a group share, before the one that predicts the first scored token."""
    if len(group) == 1:
        return 0
    common = os.path.commonprefix([request.ids for request in group])   # of any lists, not only of paths
    return min(len(common), *(len(request.ids) - request.count - 1 for request in group))


def batches(units, batch_size):
    """Lists of Units, the longest first: each of units that share equally many tokens, so that padding is needed at the
    right only, where causal attention does not see it, and of at most batch_size tokens, with the padding."""
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
    """Inside this context model(idx) ends before the head, which is handed out: (B, T, C) instead of (B, T, V). Most of
    what a model reads here is context, of which nothing is to be predicted."""
    head, model.lm_head = model.lm_head, torch.nn.Identity()
    try:
        yield head
    finally:
        model.lm_head = head


def read_batch(model, head, batch):
    """loglik and greedy of every request of some Units that share equally many tokens, (2, N)."""
    device, P = head.weight.device, batch[0].shared
    cache = read_shared(model, batch, device) if P else None
    requests = [request for unit in batch for request in unit.requests]
    inputs = [request.ids[P:-1] for request in requests]
    S, counts = max(map(len, inputs)), [request.count for request in requests]
    idx = torch.tensor([ids + [0] * (S - len(ids)) for ids in inputs], device=device)                   # (N, S)
    x = model(idx, cache=cache)[0].flatten(0, 1)                                                        # (N S, C)
    # the places that predict something, the last `count` of each input, and what comes there, (M,) both
    ends = [i * S + len(ids) for i, ids in enumerate(inputs)]
    at = [place for end, count in zip(ends, counts, strict=True) for place in range(end - count, end)]
    wanted = torch.tensor([token for r in requests for token in r.ids[-r.count:]], device=device)
    # in parts, as a page of logits would be too much
    parts = zip(x[torch.tensor(at, device=device)].split(256), wanted.split(256), strict=True)
    found = torch.cat([predicted(head(rows).float(), ids) for rows, ids in parts], 1)                   # (2, M)
    loglik, greedy = (row.split(counts) for row in found)
    return [[part.sum().item() for part in loglik], [part.min().item() for part in greedy]]


def read_shared(model, batch, device):
    """The cache of a model that has read what each unit shares, once for each of its requests."""
    cache = model.new_cache()
    model(torch.tensor([unit.requests[0].ids[:unit.shared] for unit in batch], device=device), cache=cache)
    repeats = torch.tensor([len(unit.requests) for unit in batch], device=device)
    return tree_map_only(torch.Tensor, lambda value: value.repeat_interleave(repeats, 0), cache)


def predicted(logits, ids):
    """Log-probabilities of ids (M,) under logits (M, V), and 1 where they are the likeliest: (2, M) float64."""
    logprob = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return torch.stack([logprob, logits.argmax(-1) == ids]).cpu().double()
