"""The first token compared with the others, in the residual stream and in the queries, keys and
values of each layer.

The stream is measured where it enters a layer, numbered as in the papers: layer 0 receives the
embeddings, and place L is the output of the last of L layers. Norms and variances are summed by
position, so memory is linear in T.

Sources:
    massive activations     When Attention Sink Emerges, 2410.10781, figures 7 and 8; channels and
                            positions as in Massive Activations, Sun et al. 2402.17762
    norms and variances     Lazy Attention, 2601.00919, appendix G; values: The Attention Sink as
                            Native MoE, figure 2
    cosines                 The Attention Sink as Native MoE, figure 3
    spread                  0 if repeated tokens cannot be told apart: Lazy Attention, section 3.2
"""

import contextlib
from itertools import product

import torch
from torch.nn import functional as F

FIRST = 16  # number of first positions that the result lists


class Stream:
    """Sums over sequences for one layer: hidden states, queries, keys, values. After the last,
    hidden states alone."""

    def __init__(self, listed=FIRST):
        self.listed = listed  # number of first positions in the result
        self.sums = {}  # {name: sum, in float64}
        self.places = []  # of each sequence: the position of the token with the largest norm

    def add(self, name, value):
        """Add value (B, ...), summed over the sequences."""
        self.sums[name] = self.sums.get(name, 0) + value.double().sum(0).cpu()

    def add_vectors(self, part, vectors):
        """Add norms and variances of vectors (B, H, T, C) by position, as means over heads."""
        self.add(f"{part}_norm", vectors.norm(dim=-1).mean(1))
        self.add(f"{part}_var", vectors.var(-1, correction=0).mean(1))

    def see_hidden(self, h, sink_tokens):
        """Add the stream h (B, sink_tokens + T, C). A sink token before the sequence may have the
        largest norm, but is not the first token."""
        h = h.float()
        tokens = h[:, sink_tokens:]  # (B, T, C)
        norm = h.norm(dim=-1)
        largest, place = norm.max(1)  # (B,)
        others = (norm.sum(1) - largest) / (norm.shape[1] - 1)
        self.places += (place - sink_tokens).tolist()
        self.add_vectors("hidden", tokens[:, None])
        self.add("sequences", torch.ones(len(h)))
        self.see_first("massive", h, sink_tokens)
        self.add("largest", largest / others)
        self.add("carrier", h[torch.arange(len(h), device=h.device), place])  # (B, C)
        self.add("median", h.abs().flatten(1).median(1)[0])
        distance = (tokens - tokens[:, :1]).norm(dim=-1)
        self.add("spread", distance.amax(1) / norm[:, sink_tokens:].mean(1))

    def see_first(self, name, h, sink_tokens):
        """Add the norm of the first token of h (B, sink_tokens + T, C) over the mean of the
        others."""
        norm = h.float().norm(dim=-1)[:, sink_tokens:]  # (B, T)
        self.add(name, norm[:, 0] / norm[:, 1:].mean(1))

    def see(self, module, q, k, v, x, table=None):
        """Add a layer's inputs, as `watch` passes them."""
        q, k = entering_the_score(module, q, k)
        for name, part in (("input", x[:, None]), ("query", q), ("key", k), ("value", v)):
            self.add_vectors(name, part[..., module.sink_tokens :, :].float())
        first = k[:, :, module.sink_tokens, None]  # (B, H, 1, D)
        for name, part in (("cos_qk", q), ("cos_kk", k)):
            later = part[:, :, module.sink_tokens + 1 :]
            self.add(name, F.cosine_similarity(later, first, -1).mean((1, 2)))

    def result(self):
        """Means over the sequences, as plain numbers. STREAM in evals/probe.py has the meanings of
        massive, ln_1, ln_2, largest, spread, cos_qk and cos_kk. The other keys:

        at, at_share    the most frequent position of the token with the largest norm, and its share
                        of the sequences
        channels        the 3 largest channels of that token: [[channel, value, value over the
                        median magnitude]]
        *_norm, *_var   of hidden, input, query, key and value: [the first token's, mean of the
                        others]; after the last layer of hidden alone
        positions       the same two by position, for the first ones: {"hidden_norm": [...], ...}
        """
        mean = {name: total / self.sums["sequences"] for name, total in self.sums.items()}
        at = max(sorted(set(self.places)), key=self.places.count)
        found = {"at": at, "at_share": self.places.count(at) / len(self.places)}
        for name in ("massive", "ln_1", "ln_2", "largest", "spread", "cos_qk", "cos_kk", "median"):
            if name in mean:
                found[name] = plain(mean[name])
        carrier = mean["carrier"]
        found["channels"] = []
        for channel in carrier.abs().topk(min(3, len(carrier)))[1].tolist():
            value = carrier[channel]
            found["channels"].append([channel, plain(value), plain(value.abs() / mean["median"])])
        found["positions"] = {}
        for name in mean:
            if name.endswith(("_norm", "_var")):
                found[name] = [plain(mean[name][0]), plain(mean[name][1:].mean())]
                found["positions"][name] = [plain(value) for value in mean[name][: self.listed]]
        return found


def plain(value):
    """The number in a tensor, rounded to the precision of float32; None if it is not finite."""
    return float(f"{value.item():.7g}") if value.isfinite() else None


def entering_the_score(module, q, k):
    """Queries and keys (B, H, T, D) of each score head as they enter the score, see
    `score_parts`. Of queries in two parts, those for the first keys."""
    q, k = score_parts(module, q, k)
    return q[..., -1, :], k.sum(-2)


def score_parts(module, q, k):
    """Queries and keys (B, H, T, 1, D) of each score head: rotated, normed, mapped to features.
    Scales are left out, because some of them grow with the length and are 0 for the first query. If
    the rotation treats the first keys specially and doubles the width (see Streaming.projected),
    they have two parts (B, H, T, 2, D), and one of a key's is 0."""
    q, k = (module.featured(part).float().unflatten(-1, (-1, module.width)) for part in (q, k))
    return q, module.for_score_heads(k, 1)


@contextlib.contextmanager
def watching(model, see, see_norm=lambda l, name, h: None):
    """Inside this context, see(l, h) gets the stream h (B, sink_tokens + T, C) that enters layer l
    or leaves the last one. see_norm(l, name, h) gets what the layer's norm ln_1 or ln_2 reads."""
    # the embeddings, then the output of each block
    places = [model.transformer.drop, *model.transformer.h]
    hooks = [
        place.register_forward_hook(lambda module, inputs, h, l=l: see(l, h))
        for l, place in enumerate(places)
    ]
    for (l, block), name in product(enumerate(model.transformer.h), ("ln_1", "ln_2")):
        norm = block.get_submodule(name)
        hooks.append(
            norm.register_forward_pre_hook(
                lambda module, inputs, l=l, name=name: see_norm(l, name, inputs[0])
            )
        )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
