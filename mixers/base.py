"""What the mixers share: the axes that all accept, and the steps of a layer whose queries attend to
some of the keys.
"""

from functools import partial

import torch
from torch.nn import functional as F

import kernels
from attention import LogSumExp, softmax
from axes import options
from axes.base import only
from axes.layer import Layer
from axes.outputs import GATES, OUT_NORMS, VALUE_BIASES
from axes.positions import WITHOUT_BIAS
from axes.queries_keys import QK_NORMS
from axes.rows import normalised_output, share_of_keys


def axes_of(rules, **known):
    """{axis: its values} of a mixer with these rules. known: axes of its own. All mixers share a
    few axes. Every other axis has only its default value."""
    defaults = {}
    for axis, values in options.AXES.items():
        defaults[axis] = only(values, next(iter(values)))
    shared = {
        "pos": WITHOUT_BIAS,
        "qk_norm": QK_NORMS,
        "value_bias": VALUE_BIASES,
        "out_norm": OUT_NORMS,
        "gate": GATES,
    }
    return {"rule": rules} | defaults | shared | known


def largest(x, k):
    """A mask of the k largest entries of x (.., N) along the last axis."""
    places = x.topk(min(k, x.shape[-1]), -1).indices  # (.., k)
    return torch.zeros_like(x, dtype=torch.bool).scatter(-1, places, True)


class Mixer(Layer):
    """A layer whose queries attend to cached keys, or to a state: (B, T, C) to (B, T, C).

    attend(q, k, v, x, None, mask) returns the output of each head, (B, H, R, E). It takes rotated
    queries (B, heads, R, D), which are the last R of T positions, keys, values, and the layer's
    input x. mask: the layer's own, perhaps with a `hidden` key.

    weight_blocks(q, k, x, None, mask) yields the weights, (B, H, BLOCK rows or fewer, T), without
    value bias, norm and gate. The column of an extra key precedes the others."""

    decided_by_x = ""  # what x decides at every token; "": attend needs no x before its R rows

    def forward(self, x, cache=None, rope=None, starts=None, importance=None):
        """See Attention.forward. A mixer neither keeps packed documents apart nor measures the
        importance of heads."""
        q, k, v = self.projected(x, cache, rope)
        cached = {}
        if cache is not None:
            cached = self.remember(cache, x, k, v)
        attend = self.attend
        if self.hook:
            attend = partial(self.hook, attend)
        return self.output(attend(q, k, v, x, None, **cached))

    def remember(self, cache, x, k, v):
        """Cache what the mixer needs beyond keys and values. Returns more arguments of `attend`, by
        name."""
        return {}

    def check(self, k, x, table):
        """Raise ValueError if a mixer cannot use these inputs."""
        attn = self.config.attn
        if table is not None:
            raise ValueError(
                f"--attn={attn} adds nothing to scores by distance: call it without a table"
            )
        if self.decided_by_x and x.shape[1] != k.shape[2]:
            raise ValueError(
                f"x has {x.shape[1]} rows for {k.shape[2]} keys: --attn={attn} needs the layer's "
                f"input at every token, which decides {self.decided_by_x}"
            )

    def obstacles_of_kernels(self, device):
        """The obstacles of a mixer with a Triton kernel, see Layer.obstacles."""
        yield from self.triton_obstacles(device, self.width)
        yield "sdpa", True, f"it computes plain softmax only, not --attn={self.config.attn}"

    # ---------------------------------------------------------------- softmax over some of the keys

    def softmax(self, s, seen):
        """Weights w (B, H, R, keys): the softmax of the scores s over the keys in the mask `seen`.
        Returns w, and its log-sum-exp (B, H, R, 1) if an extra key needs it, else None."""
        w = softmax(s, seen)
        r = LogSumExp.apply(s, seen, w) if self.has_extra_key else None
        return w, r

    def block(self, weights, i, q, k, v, *parts):
        """The output (B, H, R, E) of the rows at positions i, for kernels.block_loop. weights: a
        function of i, q, k and `parts` that returns what `softmax` does."""
        w, r = weights(i, q, k, *parts)
        o = kernels.weighted_sum(w, v, self.dropout * self.training)
        return (normalised_output(self, o, q, r, None),)

    def softmax_blocks(self, weights, q, k):
        """The weight_blocks of a mixer with softmax. weights: a function of the positions i of a
        block's rows, their q, and the keys up to the last of them. It returns what `softmax`
        does."""
        T = k.shape[2]
        for rows, keys, i in kernels.row_blocks(q.shape[2], T, self.mask, q.device):
            w, r = weights(i, q[:, :, rows], k[:, :, : keys.stop])  # (B, H, R, keys)
            share = share_of_keys(self, q[:, :, rows], r, None)  # (B, H, R, 1)
            if share is not None:  # the extra key gets the rest
                w = torch.cat([1 - share, w * share], -1)
            yield F.pad(w, (0, T - keys.stop))
