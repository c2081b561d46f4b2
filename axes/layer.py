"""The base class of attention and all other mixers: projections, learned choices, cache, and what
follows the rule.
"""

from types import MethodType

import torch
import torch.nn as nn
from torch.nn import functional as F

import kernels
from axes import options
from axes.base import Fixed, Normal
from axes.positions import Rope, rotate
from kernels import Mask


class PartlyBiased(nn.Linear):
    """The projection to queries, keys and values, with a bias for one of them (--bias_of).

    widths: {"q": width, ...}. The bias of the other two, which has no gradient, stays 0."""

    def __init__(self, inputs, widths, biased):
        super().__init__(inputs, sum(widths.values()))
        self.widths = list(widths.values())
        self.uses = [part == biased for part in widths]

    def forward(self, x):
        parts = self.bias.split(self.widths)
        bias = torch.cat([part * used for part, used in zip(parts, self.uses, strict=True)])
        return F.linear(x, self.weight, bias)


class Cache:
    """What one layer keeps of the tokens that it has read, so that the next ones can be computed
    alone. config: of the model that fills it."""

    def __init__(self, config=None):
        self.config = config
        self.tokens = 0  # how many it has read, including those that it has dropped
        self.kept = {}  # {name: a tensor, or tensors}: k and v, and what a mixer adds
        self.buffers = {}  # {name: a longer tensor, which begins with the kept one}

    def append(self, name, new, axis=2):
        """Append `new` to the kept tensor along an axis, and return the whole.

        A buffer doubles when it is full, so a decoding step writes only its own rows. Autograd
        needs what a buffer would overwrite, so tensors with a gradient have none."""
        old = self.kept.get(name)
        if old is None:
            self.kept[name] = new
            return new
        if len(old) != len(new):
            raise ValueError(
                f"the cache has {len(old)} sequences, the input {len(new)}: begin with "
                "model.new_cache()"
            )
        if old.requires_grad or new.requires_grad:
            self.kept[name] = torch.cat([old, new], axis)
            return self.kept[name]
        held = old.shape[axis]
        total = held + new.shape[axis]
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape[axis] < total:
            buffer = torch.cat([old, new, old, new], axis)  # the second half will be overwritten
            self.buffers[name] = buffer
        else:
            buffer.narrow(axis, held, total - held).copy_(new)
        self.kept[name] = buffer.narrow(axis, 0, total)
        return self.kept[name]

    def copy(self):
        """A copy that can read other tokens next. It shares what is kept, but no buffer."""
        copied = Cache(self.config)
        copied.tokens = self.tokens
        copied.kept = dict(self.kept)
        return copied


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
    refuse = None  # config, args, choices -> why it cannot have them, or None; as Choice.refuse
    causal = True  # no row depends on later positions, in values and in gradients
    cached = True  # can be decoded step by step
    in_blocks = False  # does it have a block loop, kernels.block_loop, whatever the choices?
    trains = True  # False: for the evaluation of a model that was trained with softmax
    penalized, penalty = False, 0.0  # does the layer add a penalty to the loss? its value
    convolved = None  # y, cache -> y: a convolution of the projections y (B, R, sum of widths)
    fused_by = ()  # a mixer's own Triton functions, in the order of their calls
    # Instruments set it: forward then calls hook(attend, q, k, v, x, table) in place of
    # attend(q, k, v, x, table). In decoding, layers of mixers/base.py add by name what their cache
    # holds, and a hook passes these arguments on
    hook = None

    def __init__(self, config, depth):
        super().__init__()
        self.config, self.depth = config, depth
        self.args = options.constants(config, self.axes)  # {name: value}
        self.choices = options.chosen(config, self.axes)  # {axis: Choice}
        self.dropout = config.dropout

        # the projections
        self.width = config.head_width  # of queries and keys
        heads_of = self.choices[self.heads_by].heads
        shapes = heads_of(config.n_head, config.n_kv_head, self.width)
        self.shapes = dict(zip("qkv", shapes, strict=True))
        self.score_heads, value_width = self.shapes["q"][0], self.shapes["v"][1]
        self.heads = config.n_head * self.width // value_width  # of the output
        widths = {part: heads * width for part, (heads, width) in self.shapes.items()}
        bias = config.bias or config.qkv_bias
        if config.bias_of == "all":
            self.c_attn = nn.Linear(config.n_embd, sum(widths.values()), bias)
        else:
            self.c_attn = PartlyBiased(config.n_embd, widths, config.bias_of)
        self.c_proj = nn.Linear(self.heads * value_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

        # which keys a row sees, and the constant factor on scores
        windowed = depth % config.window_every == 0
        self.mask = Mask(config.window if windowed else 0, config.first if windowed else 0)
        self.scale = 1.0 if self.choices["scale"].unscaled else self.width**-0.5

        # what the choices do, as methods of this layer; None: nothing
        self.bind("pos", "bias")  # bias() -> Distance
        self.rope = Rope(config) if self.choices["pos"].rotates else None
        self.bind("qk_norm", "learned_norm", "fixed_norm")  # (norm, x) -> x, and (x) -> x
        self.bind("feature", "feature_map")  # (x) -> x
        self.bind("scale", "score_factor")  # (n) -> a factor on the scores
        self.bind("sink", "extra_score", "extra_value")  # (q) -> c, and (heads) -> v*
        self.bind("diff", "mix", "after_norm")  # (x) -> lambda, and (o) -> o
        self.bind("out_norm", "normed")  # (o) -> o
        self.bind("gate", "gated")  # (o, x) -> o
        self.divisor = self.choices["normalize"].divisor
        self.rule = self.choices["rule"]
        # True: before norms and gates, attend's output is weights_of times the values. False:
        # weights_of has the derivatives of the output
        self.has_weights = self.rule.has_weights
        self.has_extra_key = self.extra_score is not None
        self.sink_tokens = self.choices["sink"].tokens  # learned tokens before the sequence

        # what the choices learn
        self.init_std = {}  # {parameter that GPT.init_weights draws: std}
        for choice in self.choices.values():
            for name, start in choice.learns(self).items():
                self.add(name, start)

        self.kernels = {}  # {(type of device, autocast): which code computes the layer there}

    def kernel_on(self, device):
        """Which code computes the layer on a device ("cuda", "cpu", ...) in this context of
        autocast: "triton"; "cpp" (the same kernel, compiled for this CPU); "sdpa" (torch's own
        fused softmax); or "torch" (the block loop). auto is the first of these that has no
        obstacle. Chosen when it is first needed, since it may have to be built. Raises ValueError
        if an explicit --kernel cannot compute the layer."""
        key = device, torch.is_autocast_enabled(device)
        if key in self.kernels:
            return self.kernels[key]
        cannot, kernel = self.obstacles_by_kernel(device), self.config.kernel
        if kernel in cannot:
            raise ValueError(f"--kernel={kernel}: {cannot[kernel]}; use auto or torch")
        if kernel == "auto":
            kernel = next(name for name in ("triton", "cpp", "sdpa", "torch") if name not in cannot)
        self.kernels[key] = kernel
        return kernel

    def obstacles_by_kernel(self, device):
        """{kernel: the first reason why it cannot compute the layer on this device}."""
        cannot = {}
        for kernel, holds, reason in self.obstacles(device):
            if holds:
                cannot.setdefault(kernel, reason)
        return cannot

    def bind(self, axis, *names):
        """Make functions of the axis' value, whose first argument is a layer, methods of this
        one."""
        for name in names:
            function = getattr(self.choices[axis], name)
            setattr(self, name, function and MethodType(function, self))

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

    # ------------------------------------------------------------------ from x to q, k and v

    def projected(self, x, cache=None, rope=None, starts=None):
        """Queries (B, H, R, D) of the layer's input x (B, R, C), and keys (B, Hk, T, D) and values
        (B, Hv, T, E) of all cached tokens and of x.

        RoPE, if any, rotates q and k by `rope`; None: made here. The cache holds rotated keys.
        starts (B, T): where the documents of packed tokens begin."""
        y = self.c_attn(x)
        if self.convolved:  # only a state has this
            y = self.convolved(y, cache)
        parts = y.split([heads * width for heads, width in self.shapes.values()], -1)
        q, k, v = (
            part.unflatten(-1, shape).transpose(1, 2)
            for part, shape in zip(parts, self.shapes.values(), strict=True)
        )
        if self.learned_norm:
            q, k = self.learned_norm(self.q_norm, q), self.learned_norm(self.k_norm, k)
        if self.rope:
            if rope is None:
                rope = self.rope(self.positions(x, cache, starts))
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = self.recall(cache, k, v)
        return q, k, v

    @staticmethod
    def positions(x, cache, starts):
        """The positions of the tokens of x (B, R, C) in their document: (R,), or of packed ones (B,
        1, R)."""
        first = cache.tokens if cache else 0
        i = torch.arange(first, first + x.shape[1], device=x.device)
        return i if starts is None else (i - starts)[:, None]

    def recall(self, cache, k, v):
        """Append the keys and values of new tokens to the cache, and drop those that the next token
        does not see: then places in the cache stand for positions, and a row's keys are still the
        last ones. Returns the keys and values that were cached, and the new ones."""
        cache.tokens += k.shape[2]
        first, recent = self.mask.first, self.mask.window - 1
        if not self.mask.window or (first and self.bias):  # a bias needs true distances
            return cache.append("k", k), cache.append("v", v)
        if "k" in cache.kept:
            k, v = torch.cat([cache.kept["k"], k], 2), torch.cat([cache.kept["v"], v], 2)
        T = k.shape[2]
        for name, all_ in (("k", k), ("v", v)):
            if T > first + recent:
                all_ = torch.cat([all_[:, :, :first], all_[:, :, T - recent :]], 2)
            cache.kept[name] = all_
        return k, v

    def featured(self, x):
        """Apply the norm without weights, then the feature map, to queries or keys (.., D)."""
        if self.fixed_norm:
            x = self.fixed_norm(x)
        return self.feature_map(x) if self.feature_map else x

    def for_score_heads(self, x, axis):
        """x has an entry for each key head along `axis`: repeat it for the score heads that share
        this key head. If the two views of a head have separate key heads, repeat these in pairs."""
        shared = self.score_heads // x.shape[axis]
        if shared == 1:
            return x
        if not self.choices["diff"].own_keys:
            return x.repeat_interleave(shared, axis)
        return x.unflatten(axis, (-1, 2)).repeat_interleave(shared, axis).flatten(axis, axis + 1)

    def distance(self):
        """The layer's relative positions, a Distance, or None."""
        return self.bias() if self.bias else None

    # ------------------------------------------------------------------ from o to y

    def postprocess(self, o, x, v):
        """The output of each head o (B, heads, R, E) after value bias, Dex, XSA, norm, the factor
        that follows the norm of a difference, and gate, in the dtype of the values v (B, Hv, T, E).
        x: the layer's input (B, R, C)."""
        for axis in ("value_bias", "dex", "exclude"):
            if corrected := self.choices[axis].corrected:
                o = corrected(self, o, v)
        gate_first = self.choices["gate"].before_norm
        if gate_first:
            o = self.gated(o, x)
        if self.normed:
            o = self.normed(o)
        if self.after_norm:
            o = self.after_norm(o)
        if self.gated and not gate_first:
            o = self.gated(o, x)
        return o.to(v.dtype)

    def output(self, y):
        """Project the outputs of all heads y (B, heads, R, E) to (B, R, C)."""
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))

    # ---------------------------------------------------- for model, training and instruments

    def weights_of(self, q, k, x, table=None, mask=None):
        """The attention weights (B, heads, R, T), or (B, heads, R, 1 + T) with an extra key's
        column first. For a differential recipe they are the difference of its views. Gates, norms
        and corrections of the output are not part of them. Costs O(R T) memory; weight_blocks does
        not."""
        return torch.cat(list(self.weight_blocks(q, k, x, table, mask)), 2)

    def views_of(self, q, k, x, table=None):
        """The weights of both views of a differential recipe, the second not yet multiplied by
        lambda."""
        w = torch.cat(list(self.view_blocks(q, k, table)), 2)
        return w[:, 0::2], w[:, 1::2]

    def view_blocks(self, q, k, table=None, mask=None):
        """The weights of every score head, a block of rows at a time. Only attention has them."""
        raise ValueError(
            f"--attn={self.config.attn} (mixer {self.config.mixer}) has no views or tiles of "
            "weights: choose a recipe of mixer attention"
        )

    def obstacles(self, device):
        """Triples (kernel, condition under which it cannot run on this device, reason). By default
        only PyTorch can."""
        for kernel in ("triton", "cpp"):
            yield kernel, True, f"mixer {self.config.mixer} has no kernel"
        yield "sdpa", True, f"it computes plain softmax only, not --attn={self.config.attn}"

    def triton_obstacles(self, device, widest):
        """Those that all Triton kernels share. widest: the width of the widest heads."""
        yield "triton", widest > 256, "its heads are wider than 256"
        here = kernels.AVAILABLE and (device == "cuda" or kernels.INTERPRETED)
        reason = "it needs triton and a CUDA GPU, or TRITON_INTERPRET=1 to try it slowly on a CPU"
        yield "triton", not here, reason
        passed_over = self.config.kernel == "auto" and device != "cuda"
        yield "triton", passed_over, "the interpreter is for tests"

    def cpp_obstacles(self, device, rules):
        """Those of kernels.cpp. rules: what it must compute, see kernels.why_not_cpp, which builds
        it."""
        yield "cpp", device != "cpu", "it computes on a CPU"
        low = torch.is_autocast_enabled("cpu") and torch.cpu._is_amx_tile_supported()
        yield "cpp", low, "it computes in float32, and AMX multiplies bfloat16 much faster"
        if self.config.kernel in ("auto", "cpp") and device == "cpu" and not low:
            for rule, views in rules:
                reason = kernels.why_not_cpp(rule, views)
                yield "cpp", reason, reason

    def flops_per_token(self):
        """FLOPs of q.k and w.v in training, per token, as if every row saw block_size keys; without
        a second view."""
        return 12 * self.config.n_head * self.config.head_width * self.config.block_size

    def bytes_read(self, q, k, v, x, table=None, mask=None):
        """The bytes of the cache that a decoding step must read, from the arguments of its
        attend."""
        values = v.shape[1] * v.shape[3] * v.element_size()
        keys = k.shape[1] * self.width * k.element_size()
        return k.shape[0] * k.shape[2] * (keys + values)

    def finish_step(self, machine):
        """The training loop calls this after every step. Some mixers update themselves from its
        tokens."""

    @staticmethod
    def has_importance(config):
        """Can a layer with this config measure the importance of its heads?"""
        return False

    @staticmethod
    def cannot_learn(config):
        """The reason why a mixer would learn nothing with this config, or None."""
