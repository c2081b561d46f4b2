"""What the mixers share: the choices that all accept, the cache of keys, and what happens to the
outputs of the heads.
"""

from functools import partial

import torch
from torch.nn import functional as F

import kernels
from axes import options
from axes.base import only
from axes.layer import Layer
from axes.outputs import GATES, OUT_NORMS, VALUE_BIASES
from axes.positions import WITHOUT_BIAS
from axes.queries_keys import QK_NORMS
from axes.rows import share_of_keys


def axes_of(rules, **known):
    """{axis: its values} of a mixer with these rules. known: axes of its own. A few axes are shared
    by all mixers. Every other axis has only its default value."""
    defaults = {axis: only(values, next(iter(values))) for axis, values in options.AXES.items()}
    shared = {
        "pos": WITHOUT_BIAS,
        "qk_norm": QK_NORMS,
        "value_bias": VALUE_BIASES,
        "out_norm": OUT_NORMS,
        "gate": GATES,
    }
    return {"rule": rules} | defaults | shared | known


class Mixer(Layer):
    """A layer whose queries attend to cached keys, or to a state: (B, T, C) to (B, T, C).

    attend(q, k, v, x, None, mask) takes rotated queries (B, heads, R, D), the last R of T
    positions, keys, values and the layer's input x to the output of each head, (B, H, R, E). mask: the
    layer's own, or with another `hidden`. weight_blocks(q, k, x, None, mask) yields the
    weights, (B, H, BLOCK rows or fewer, T), without value bias, norm and gate; an extra key has a
    column before the others."""

    decided_by_x = ""  # what x decides at every token; "": attend needs no x before its R rows

    def forward(self, x, cache=None, rope=None, starts=None, importance=None):
        """See Attention.forward. A mixer neither keeps packed documents apart nor measures the
        importance of heads."""
        q, k, v = self.projected(x, cache, rope)
        cached = {} if cache is None else self.remember(cache, x, k, v)
        attend = partial(self.hook, self.attend) if self.hook else self.attend
        return self.output(attend(q, k, v, x, None, **cached))

    def remember(self, cache, x, k, v):
        """Update what a mixer caches beyond keys and values. Returns it by the names of `attend`'s
        arguments."""
        return {}

    def check(self, k, x, table):
        """Raise ValueError on inputs that a mixer cannot use."""
        if table is not None:
            raise ValueError(
                f"--attn={self.config.attn} adds nothing to scores by distance: call it without a table"
            )
        if self.decided_by_x and x.shape[1] != k.shape[2]:
            raise ValueError(
                f"x has {x.shape[1]} rows for {k.shape[2]} keys: --attn={self.config.attn} needs the "
                f"layer's input at every token, which decides {self.decided_by_x}"
            )

    def block(self, weights, i, q, k, v, *parts):
        """The output (B, H, R, E) of the rows at positions i, and their log-sum-exp if an extra key
        needs it. weights: a function of i, q, k and `parts` that returns the weights (B, H, R,
        keys), and that log-sum-exp if needed."""
        w, *r = weights(i, q, k, *parts)
        return kernels.weighted_sum(w, v, self.dropout * self.training), *r

    def softmax_blocks(self, weights, q, k):
        """weight_blocks of a mixer with softmax. weights: a function of the positions i of a
        block's rows, their q and the keys up to the last of them; it returns their weights, and
        their log-sum-exp if an extra key needs it. The extra key, if there is one, comes first and
        takes its share."""
        for block, keys, i in kernels.row_blocks(q.shape[2], k.shape[2], self.mask, q.device):
            w, *r = weights(i, q[:, :, block], k[:, :, : keys.stop])
            share = share_of_keys(self, q[:, :, block], r[0] if r else None, None)
            w = F.pad(w if share is None else w * share, (0, k.shape[2] - w.shape[-1]))
            yield torch.cat([1 - share, w], -1) if self.has_extra_key else w
