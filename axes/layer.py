"""The base class of attention and all other mixers: projections, learned choices, cache and
interface."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from axes import options
from axes.base import Fixed, Normal, split_heads
from axes.positions import rotate, rotation
from axes.sight import Sight, start_of


class Projections(nn.Linear):
    """The linear layer of queries, keys and values, side by side: (B, R, C) to (B, R, sum of
    widths).

    widths: {"q": width, ...}. bias_of: the part whose bias is used, or all. The others, without a
    gradient, stay 0."""

    def __init__(self, inputs, widths, bias, bias_of):
        super().__init__(inputs, sum(widths.values()), bias)
        self.widths, self.bias_of = widths, bias_of

    def forward(self, x):
        bias = self.bias
        if bias is not None and self.bias_of != "all":
            parts = zip(self.widths, bias.split([*self.widths.values()]), strict=True)
            bias = torch.cat([b * (part == self.bias_of) for part, b in parts])
        return F.linear(x, self.weight, bias)


def extended(past, name, new, axis=2, grows=True):
    """Append `new` to the cached tensor past[name] along an axis, and return the whole.

    If it grows, the cached tensor is the filled part of a buffer, which doubles when it is full, so
    a decoding step writes only its own rows. Copies of a cache may go on separately: the first one
    to be continued keeps the buffer. Autograd needs what a buffer would overwrite, so tensors with
    a gradient have none."""
    old = past.get(name)
    if old is None or not grows or old.requires_grad or new.requires_grad:
        past[name] = new if old is None else torch.cat([old, new], axis)
        return past[name]
    if len(old) != len(new):
        raise ValueError(
            f"the cache has {len(old)} sequences, the input {len(new)}: begin with model.new_cache()"
        )
    held, count = old.shape[axis], new.shape[axis]
    room = past.get(f"{name} room", [old, None])  # the buffer, and how much of it is filled
    if (
        room[1] != held
        or room[0].data_ptr() != old.data_ptr()
        or room[0].shape[axis] < held + count
    ):
        # half will be overwritten
        room = past[f"{name} room"] = [torch.cat([old, new, old, new], axis), held]
    room[0].narrow(axis, held, count).copy_(new)
    room[1], past[name] = held + count, room[0].narrow(axis, 0, held + count)
    return past[name]


class Layer(nn.Module):
    """A layer built from the axes of a model.GPTConfig: module(x) takes (B, R, C) to (B, R, C).

    module.attend(q, k, v, x) computes everything between the projections. module.shapes holds the
    sizes of q, k and v as {"q": (heads, width), ...}. module.weight_blocks(q, k, x) yields the
    attention weights, a block of rows at a time. Each mixer defines both methods."""

    axes, numbers = {}, {}  # the tables of its axes: axes/options.py
    heads_by = "diff"  # the axis that decides how many heads q, k and v have
    refused = {}  # {axis: why the mixer does not accept its other values}
    added = ()  # names of parameters and buffers that it adds to plain attention
    retrofit = False  # can `added` be trained alone, on top of a run (--train_only)?
    causal = True  # no row depends on later positions, in values and in gradients
    cached = True  # can be decoded step by step
    trains = True  # False: for the evaluation of a model that was trained with softmax
    penalized, penalty = False, 0.0  # does the layer add a penalty to the loss? its value
    measures_importance, importance = False, None  # GPT.forward sets the first, attend the second
    fused_by = ()  # a mixer's own Triton functions, in the order of their calls

    def __init__(self, config, layer):
        super().__init__()
        self.config, self.depth = config, layer
        self.args = options.constants(config, self.axes)  # {name: value}
        self.choices = options.chosen(config, self.axes)  # {axis: Choice}
        self.rule = self.choices["rule"]
        # is attend's output, before norms and gates, weights_of times the values? If not,
        # weights_of has derivatives
        self.has_weights = self.rule.has_weights
        self.has_extra_key = self.choices["sink"].score is not None
        self.ahead = self.choices["sink"].ahead  # learned tokens before the sequence
        # the projections
        self.width = config.head_width  # of queries and keys
        heads_of = self.choices[self.heads_by].heads
        self.shapes = dict(
            zip("qkv", heads_of(config.n_head, config.n_kv_head, self.width), strict=True)
        )
        self.score_heads, value_width = self.shapes["q"][0], self.shapes["v"][1]
        self.heads = config.n_head * self.width // value_width  # of the output
        self.c_attn = Projections(
            config.n_embd,
            {part: h * w for part, (h, w) in self.shapes.items()},
            config.bias or config.qkv_bias,
            config.bias_of,
        )
        self.c_proj = nn.Linear(self.heads * value_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        # which keys a row sees, and the constant factor on scores
        windowed = layer % config.window_every == 0
        scale = 1.0 if self.choices["scale"].unscaled else self.width**-0.5
        self.sight = Sight(scale, config.window if windowed else 0, config.first if windowed else 0)
        # what the choices learn
        self.init_std = {}  # {parameter that GPT.init_weights draws: std}
        for choice in self.choices.values():
            for name, start in choice.learns(self).items():
                self.add(name, start)

    def add(self, name, start):
        """Add what a choice learns or keeps. start: a module; initial values, which
        --attn_args=learn_<name>=0 keeps fixed; a Fixed; or a Normal. GPT.init_weights redraws what
        a layer used alone draws here."""
        if isinstance(start, Normal):
            self.init_std[name] = start.std
            if start.shape is None:
                return nn.init.normal_(self.get_parameter(name), 0.0, start.std)
            start = torch.randn(start.shape) * start.std
        if isinstance(start, nn.Module):
            self.add_module(name, start)
        elif isinstance(start, torch.Tensor) and self.args.get(f"learn_{name}", True):
            self.register_parameter(name, nn.Parameter(start))
        else:
            self.register_buffer(name, start.value if isinstance(start, Fixed) else start)

    # ------------------------------------------------------ from x to q, k, v, and from y back to x

    def heads_of(self, y):
        """Split projections y (B, R, sum of widths) into q, k, v (B, heads, R, width). Apply
        learned norms to q, k."""
        parts = y.split([heads * width for heads, width in self.shapes.values()], -1)
        q, k, v = (
            split_heads(part, *shape)
            for part, shape in zip(parts, self.shapes.values(), strict=True)
        )
        projected = self.choices["qk_norm"].projected
        return (
            (projected(self, self.q_norm, q), projected(self, self.k_norm, k), v)
            if projected
            else (q, k, v)
        )

    def for_score_heads(self, x, axis):
        """x has an entry for each key head along `axis`: repeat it for the score heads that share
        this key head. If the two views of a head have separate key heads, repeat these in pairs."""
        shared = self.score_heads // x.shape[axis]
        if shared == 1:
            return x
        if not self.choices["diff"].own_keys:
            return x.repeat_interleave(shared, axis)
        return x.unflatten(axis, (-1, 2)).repeat_interleave(shared, axis).flatten(axis, axis + 1)

    def finished(self, o, x, v):
        """The output of each head o (B, heads, R, E) after value bias, Dex, XSA, norm, the factor
        that follows the norm of a difference, and gate, in the dtype of the values v (B, Hv, T, E).
        x: the layer's input (B, R, C)."""
        for axis in ("value_bias", "dex", "exclude"):
            o = self.choices[axis].corrected(self, o, v)
        norm, gate = self.choices["out_norm"].normed, self.choices["gate"]
        if gate.before_norm:
            return norm(self, gate.gated(self, o, x)).to(v.dtype)
        o = self.choices["diff"].after(self, norm(self, o))
        return gate.gated(self, o, x).to(v.dtype)

    def output(self, y):
        """Project the outputs of all heads y (B, heads, R, E) to (B, R, C)."""
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    # ------------------------------------------------- cache and rotation, for StreamingLLM as well

    def projected(self, x, past=None, turn=None):
        """Queries (B, H, R, D) of the layer's input x (B, R, C), and keys (B, Hk, T, D) and values
        (B, Hv, T, E) of all cached tokens and of x. RoPE, if any, rotates q and k by `turn` (None:
        made here); `past` holds rotated keys.

        StreamingLLM counts positions in a cache that holds only visible keys. Once tokens have been
        dropped, each query scores the first keys as if it were at position `end`, and the recent
        keys as usual. So q and k become twice as wide: [q at i | q at end], and [k | 0] for recent
        keys or [0 | k] for first keys."""
        q, k, v = self.heads_of(self.c_attn(x))
        cached, first, end = (
            (past or {}).get("tokens", 0),
            self.sight.first,
            self.sight.first + self.sight.window - 1,
        )
        i, early = torch.arange(cached, cached + x.shape[1], device=x.device), None  # i (R,)
        i = i - start_of(i, self.sight)  # or (B, 1, R) from the start of each document
        if self.choices["pos"].rotates:
            if first and cached + x.shape[1] > end + 1:
                early = rotate(q, rotation(self.config, i.clamp(max=end)))
            turn = turn or rotation(self.config, i)
            q, k = rotate(q, turn), rotate(k, turn)
        if past is not None:
            k, v = self.recall(past, k, v)
        if early is not None:
            j = torch.arange(k.shape[2], device=k.device)
            is_first = (j - start_of(j, self.sight))[..., None] < first
            q, k = torch.cat([q, early], -1), torch.cat([k * ~is_first, k * is_first], -1)
        return q, k, v

    def recall(self, past, k, v):
        """Append the keys and values of new tokens to the cache `past`, and drop those that the
        next token does not see. Returns the keys and values that were cached, and the new ones."""
        past["tokens"] = past.get("tokens", 0) + k.shape[2]  # including those that were dropped
        first, recent = self.sight.first, self.sight.window - 1
        # which needs true distances
        keeps_all = not self.sight.window or first and self.choices["pos"].bias
        k, v = extended(past, "k", k, grows=keeps_all), extended(past, "v", v, grows=keeps_all)
        if not keeps_all and (T := k.shape[2]) > first + recent:
            for name in ("k", "v"):
                past[name] = torch.cat(
                    [past[name][:, :, :first], past[name][:, :, T - recent :]], 2
                )
        return k, v

    def featured(self, x):
        """Apply the norm without weights, then the feature map, to queries or keys (.., D). If
        `projected` has doubled the width, apply both to each half."""
        x = self.choices["qk_norm"].normed(self, x.unflatten(-1, (-1, self.width)))
        return self.choices["feature"].mapped(self, x).flatten(-2)

    # ---------------------------------------------------------- for model, training and instruments

    def distance(self):
        """The layer's relative positions, a Distance, or None."""
        bias = self.choices["pos"].bias
        return bias and bias(self)

    def weights_of(self, q, k, x, table=None, sight=None):
        """The attention weights, (B, H, R, T), or (B, H, R, 1 + T) with an extra key's column
        first. For a differential recipe they are the difference of its views. Gates, norms and
        corrections of the output are not part of them. Costs O(R T) memory; weight_blocks does
        not."""
        return torch.cat(list(self.weight_blocks(q, k, x, table, sight)), 2)

    def views_of(self, q, k, x, table=None):
        """The weights of both views of a differential recipe, the second not yet multiplied by
        lambda."""
        w = torch.cat(list(self.view_blocks(q, k, table)), 2)
        return w[:, 0::2], w[:, 1::2]

    def view_blocks(self, q, k, table=None, sight=None):
        """The weights of every score head, a block of rows at a time. Only attention has them."""
        raise ValueError(
            f"--attn={self.config.attn} (mixer {self.config.mixer}) has no views or tiles of weights: "
            "choose a recipe of mixer attention"
        )

    @staticmethod
    def obstacles(config, device):
        """Triples (kernel, condition under which it cannot run on this device, reason). By default
        only PyTorch can."""
        yield "triton", True, f"mixer {config.mixer} has no kernel"
        yield "sdpa", True, f"it computes plain softmax only, not --attn={config.attn}"

    def flops_per_token(self):
        """FLOPs of q.k and w.v in training, per token, as if every row saw block_size keys; without
        a second view."""
        return 12 * self.config.n_head * self.config.head_width * self.config.block_size

    def bytes_read(self, q, k, v, x, table=None, sight=None):
        """The bytes of the cache that a decoding step must read, from the arguments of its
        attend."""
        per_token = (
            k.shape[1] * self.width * k.element_size() + v.shape[1] * v.shape[3] * v.element_size()
        )
        return k.shape[0] * k.shape[2] * per_token

    def finish_step(self, machine):
        """The training loop calls this after every step. Some mixers update themselves from its
        tokens."""

    @staticmethod
    def cannot_learn(config):
        """The reason why a mixer would learn nothing with this config, or None."""
