"""The GPT around the attention, in the spirit of nanoGPT: norm, MLP, block, the whole model,
generation with a cache.

A block's attention is `mixers.layer_of(config, depth)`: the layer of attention.py, or another
*mixer*, a layer that mixes tokens in its own way. The architecture and its names follow GPT-2
(Radford et al. 2019) and nanoGPT. RMSNorm, SwiGLU and RoPE follow LLaMA (Touvron et al. 2023).

Shapes: B batch, T tokens, C = n_embd, V = vocab_size.
"""

import math
import zlib
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torch.nn import functional as F

import attention
import mixers
from axes.layer import Cache
from axes.positions import POSITIONS, parse_rope_scaling
from axes.rows import SINKS
from common.flags import Knobs, knob
from common.machine import check_memory

# --------------------------------------------------------------------------------------- the layers


def make_norm(config):
    """The norm that config.norm names. It acts on each token alone: (B, T, C) to (B, T, C)."""
    if config.norm == "rmsnorm":  # unit mean square: RMSNorm subtracts no mean and has no bias
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


def hidden_width(config):
    """The hidden width of the MLP."""
    if config.n_inner:
        return config.n_inner
    # SwiGLU has three matrices instead of two. A width of 8/3 C gives it as many parameters as 4 C
    # gives the others
    return 32 * math.ceil(config.n_embd / 12) if config.mlp == "swiglu" else 4 * config.n_embd


class MLP(nn.Module):
    """Two linear layers with an activation between them. They act on each token alone: (B, T, C) to
    (B, T, C)."""

    ACTIVATIONS = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's
        "relu2": lambda x: F.relu(x).square(),  # Primer, So et al. 2021
    }

    def __init__(self, config):
        super().__init__()
        gated, hidden = config.mlp == "swiglu", hidden_width(config)
        self.c_fc = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.c_gate = nn.Linear(config.n_embd, hidden, bias=config.bias) if gated else None
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)
        self.activation = F.silu if gated else self.ACTIVATIONS[config.mlp]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        if self.c_gate is None:
            x = self.activation(self.c_fc(x))  # (B, T, hidden)
        else:
            # (B, T, hidden): SwiGLU, Shazeer 2020
            x = self.activation(self.c_gate(x)) * self.c_fc(x)
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """One attention layer, which mixes tokens, and one MLP. Both add to the residual stream x.

    Differs from the paper (Vaswani et al. 2017) with norm_place="post": the model's ln_f follows
    the ln_2 of the last block. The paper has no norm there; torch.nn.Transformer has one. It
    changes nothing until training moves ln_2."""

    def __init__(self, config, depth):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = mixers.layer_of(config, depth)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.norm_place = config.norm_place

    def forward(self, x, cache=None, rope=None, starts=None, importance=False):
        """x (B, T, C) to (B, T, C), or with importance to (x, that of the heads (heads,)). It is an
        output, because --shard would copy a list among the inputs. The rest is for the attention:
        see Attention.forward."""
        found = [] if importance else None
        context = cache, rope, starts, found
        # post: a norm on the stream after each branch (Vaswani et al. 2017). The stream stays
        # bounded, but every gradient passes through all norms, so training needs a warm-up: 100
        # steps are enough with --preset=lab
        if self.norm_place == "post":
            x = self.ln_1(x + self.attn(x, *context))  # (B, T, C)
            x = self.ln_2(x + self.mlp(x))  # (B, T, C)
        # out: a norm on what each branch adds (OLMo 2). No norm changes the stream itself
        elif self.norm_place == "out":
            x = x + self.ln_1(self.attn(x, *context))  # (B, T, C)
            x = x + self.ln_2(self.mlp(x))  # (B, T, C)
        # pre: a norm on what each branch reads (GPT-2). No norm changes the stream itself
        else:
            x = x + self.attn(self.ln_1(x), *context)  # (B, T, C)
            x = x + self.mlp(self.ln_2(x))  # (B, T, C)
        return (x, *found) if importance else x


# ---------------------------------------------------------------------------------------- the model


def axis(name, meaning):
    """A field of GPTConfig for one axis. Its default None becomes the recipe's value or, if it has
    none, the axis' default."""
    least = mixers.NUMBERS[name].default if name in mixers.NUMBERS else None
    return knob(None, meaning, mixers.AXES.get(name), least)


@dataclass
class GPTConfig(Knobs):
    """Sizes and choices of one model. The recipe `attn` fills in the axes (see axes/base.py) that
    are None.

    With `layers`, one model has layers of several recipes: `layer_configs` has a config for each.
    Raises ValueError if no model can be built from them."""

    # sizes
    block_size: int = knob(1024, "context length T in tokens", least=1)
    vocab_size: int = knob(
        50304, "number of token ids V; 0 in train.py: take it from the data set", least=1
    )
    n_layer: int = knob(12, "number of blocks", least=1)
    n_head: int = knob(12, "attention heads per block", least=1)
    n_kv_head: int = knob(0, "key and value heads, each shared by a group of heads; 0: n_head")
    n_embd: int = knob(768, "width C of the residual stream", least=1)
    head_dim: int = knob(0, "width of each query and key; 0: n_embd / n_head")
    n_inner: int = knob(
        0, "hidden width of the MLP; 0: 4 C (swiglu: 8/3 C, rounded up to a multiple of 32)"
    )
    # around the attention
    dropout: float = knob(
        0.0,
        "dropout on embeddings, attention weights and both branches of a block",
        least=0,
        below=1,
    )
    bias: bool = knob(False, "biases in linear layers and LayerNorms")
    qkv_bias: bool = knob(False, "biases of queries, keys and values, even without --bias")
    bias_of: str = knob(
        "all", "which of queries, keys and values have these biases", ("all", "q", "k", "v")
    )
    norm: str = knob(
        "layernorm",
        "kind of norm, in each block and before the output layer",
        ("layernorm", "rmsnorm"),
    )
    norm_place: str = knob(
        "pre",
        "norms before each branch (pre), on what each branch adds (out), or on the stream after "
        "each branch (post, which needs a learning-rate warm-up)",
        ("pre", "out", "post"),
    )
    norm_eps: float = knob(1e-5, "epsilon of the norms", least=1e-12, below=1)
    embed_norm: bool = knob(False, "a norm on the token embeddings as well, as in BLOOM")
    mlp: str = knob(
        "gelu",
        "activation of the MLP; swiglu: a gated MLP",
        ("relu", "gelu", "gelu_tanh", "swiglu", "relu2"),
    )
    tied: bool = knob(True, "the output layer shares the token embedding's weights")
    rope_base: float = knob(10000.0, "base of RoPE's wavelengths", least=1e-3, below=math.inf)
    rope_scaling: str = knob(
        "",
        "longer RoPE wavelengths for longer contexts: linear:FACTOR, ntk:RATIO (NTK-aware), or "
        "llama3:FACTOR,LOW,HIGH,ORIGINAL (as in LLaMA 3.1)",
    )
    bias_range: int = knob(
        512, "number of distances that a learned distance bias covers; it is 0 beyond them", least=1
    )
    # the attention: a recipe, its constants, the code that computes it
    attn: str = knob(
        next(iter(attention.ATTENTIONS)),
        "attention recipe: sets the axes below, unless their flags are given",
        tuple(attention.ATTENTIONS),
    )
    layers: str = knob(
        "",
        "in place of --attn, a pattern of recipes that repeats through the depth, each perhaps "
        "with axes of its own: gated_deltanet*3+softmax,pos=none. The flag of an axis changes "
        "this axis in all layers",
    )
    attn_args: str = knob(
        "", "constants of the recipe (the first of --layers) as key=value,key=value"
    )
    kernel: str = knob(
        "auto",
        "code that computes attention: torch (the block loop in PyTorch); triton, or on a CPU "
        "cpp (fused kernels; they do not decode); sdpa (torch's fused softmax); auto: the fastest "
        "that can compute the recipe here",
        ("auto", "torch", "triton", "cpp", "sdpa"),
    )
    # the axes
    mixer: str | None = axis(
        "mixer",
        "layer that mixes tokens: attention; focus: distant pairs need a common group; routing: "
        "all pairs need a common cluster; recurrent: every token changes and reads a state; "
        "performer: a state that approximates softmax; selection: each query selects a few keys "
        "of a model trained with softmax",
    )
    rule: str | None = axis(
        "rule", "how scores become attention weights; for a state: how a token changes it"
    )
    forget: str | None = axis("forget", "what a state loses at each token: nothing or a share")
    write: str | None = axis("write", "how much of its value a token writes into the state")
    conv: str | None = axis(
        "conv", "a convolution over 4 tokens, then silu, on a state's queries, keys and values"
    )
    balance: str | None = axis("balance", "how a token's scores become its shares of Focus' groups")
    affinity: str | None = axis(
        "affinity",
        "how Focus' gate acts on the score of a distant pair: its logarithm is "
        "added (log), or it multiplies the score (score)",
    )
    select: str | None = axis(
        "select",
        "how a query selects keys: the highest scores (topk), the highest scores in "
        "its largest components (sparq), pages by a bound (quest), or colliding hashes (magicpig)",
    )
    topk: int | None = axis(
        "topk",
        "how many keys a query selects, 0: all; with Focus how many groups a token "
        "belongs to when the model is evaluated, 0: soft gates",
    )
    pos: str | None = axis(
        "pos",
        "positions: rotary; none; an embedding of each position, fixed or learned; or a bias on "
        "the score: a slope (alibi), T5's learned buckets, the bucket numbers themselves (a "
        "negative control), or a learned bias per head and distance, also with rotary",
    )
    qk_norm: str | None = axis(
        "qk_norm",
        "norm of queries and keys: unit length (l2); unit mean square (rms); or "
        "RMSNorm with learned weights of each head or of all heads together",
    )
    feature: str | None = axis(
        "feature", "feature map applied to queries and keys: elu + 1, or a small MLP"
    )
    scale: str | None = axis(
        "scale",
        "factor on q.k: 1/sqrt(d); 1; or 1/sqrt(d) times a factor that grows with log n "
        "(SSMax, ASEntmax)",
    )
    normalize: str | None = axis(
        "normalize",
        "divisor of a row whose rule has no normaliser: 1, the row's sum, its "
        "length, or max(|sum|, 1)",
    )
    sink: str | None = axis(
        "sink",
        "an extra key with score 0 (one), a learned score (logit), a learned key, or a "
        "learned key and value; or a learned token before the sequence (token)",
    )
    diff: str | None = axis(
        "diff",
        "a second view, which is subtracted from the first: with shared values, or as in "
        "Differential Transformer's versions 1 and 2",
    )
    value_bias: str | None = axis("value_bias", "a learned vector added to each head's output")
    dex: str | None = axis("dex", "Dex's learned correction of each head's output")
    exclude: str | None = axis(
        "exclude", "own: the output loses its part along the token's own value"
    )
    out_norm: str | None = axis(
        "out_norm",
        "RMSNorm on the output of each head, or of all heads together; gated: the "
        "latter with ReLA's gate; layer: LayerNorm, for a state",
    )
    gate: str | None = axis(
        "gate",
        "sigmoid gate on the output, computed from the layer's input: one per head, or "
        "one per element, for a state also of low rank; or silu, after or before the norm",
    )
    window: int | None = axis(
        "window",
        "number of keys that a row sees, its own included; 0: all earlier keys. "
        "Focus: keys that it sees whatever their group",
    )
    window_every: int | None = axis("window_every", "N: only layers 0, N, 2N, ... have the window")
    first: int | None = axis(
        "first", "number of first keys that stay visible beyond the window, as in StreamingLLM"
    )

    def __post_init__(self):
        if self.layers:
            self.attn = attention.pattern(self.layers)[0][0]
        self.recipe = attention.recipe(self.attn)  # {axis: value} of the axes that it sets
        if unknown := self.recipe.keys() - {*mixers.DEFAULTS, "args"}:
            raise ValueError(f"recipe {self.attn} has no such axis: {unknown.pop()}")
        for axis, default in mixers.DEFAULTS.items():
            if getattr(self, axis) is None:
                setattr(self, axis, self.recipe.get(axis, default))
        self.n_kv_head = self.n_kv_head or self.n_head

        super().__post_init__()  # checks each value alone
        if self.n_embd % self.n_head and not self.head_dim:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        # the head dimension D: the width of each query and key
        self.head_width = self.head_dim or self.n_embd // self.n_head
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}")
        if self.bias_of != "all" and not (self.bias or self.qkv_bias):
            raise ValueError(f"bias_of={self.bias_of} needs biases: add --qkv_bias=1")
        if self.rope_scaling:
            parse_rope_scaling(self.rope_scaling)  # raises if it is malformed
            if not POSITIONS[self.pos].rotates:
                raise ValueError(
                    f"rope_scaling={self.rope_scaling} needs rotary positions, which "
                    f"--pos={self.pos} does not have: leave it empty, or use --pos=rope"
                )
        mixers.check_axes(self)
        if self.layers:
            mixers.check_layers(self)

    @property
    def layer_configs(self):
        """The configs of the layers that --layers repeats; without --layers, this one alone.

        A layer has the axes of its recipe. Two things override them: axes of this config that
        differ from the first recipe's, since a preset or a flag has changed them in all layers;
        and the layer's own axes, into which `resolve` has written those of flags."""
        if not self.layers:
            return [self]
        first = mixers.DEFAULTS | self.recipe
        changed = {}
        for axis in mixers.DEFAULTS:
            if getattr(self, axis) != first[axis]:
                changed[axis] = getattr(self, axis)
        configs = []
        for attn, own in attention.pattern(self.layers):
            axes = {axis: own.get(axis, changed.get(axis)) for axis in mixers.DEFAULTS}
            constants = [f"{name}={value}" for name, value in own.items() if name not in axes]
            if attn == self.attn and self.attn_args:
                constants.insert(0, self.attn_args)  # the last value wins: the layer's own
            args = ",".join(constants)
            configs.append(replace(self, layers="", attn=attn, attn_args=args, **axes))
        return configs


class GPT(nn.Module):
    """The whole model: model(idx) returns (logits (B, T, V), None), model(idx, targets) (logits,
    mean loss in nats).

    The initial weights depend on config and seed alone, whatever else has drawn random numbers
    before."""

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config, layer_configs = config, config.layer_configs
        self.sink_tokens = SINKS[config.sink].tokens  # before each sequence: 0 or 1
        embeddings = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}  # of token ids
        if config.embed_norm:
            embeddings["ln_wte"] = make_norm(config)
        if places := POSITIONS[config.pos].embeds:
            # of absolute positions
            embeddings["wpe"] = places(self.sink_tokens + config.block_size, config.n_embd)
        blocks = []
        for depth in range(config.n_layer):
            blocks.append(Block(layer_configs[depth % len(layer_configs)], depth))
        # GPT-2's names, which every checkpoint contains
        self.transformer = nn.ModuleDict(
            {
                **embeddings,
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(blocks),
                "ln_f": make_norm(config),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tie()
        if self.sink_tokens:  # When Attention Sink Emerges, table 4
            self.sink_token = nn.Parameter(torch.zeros(config.n_embd))
        self.init_weights(seed)

    def tie(self):
        """Share parameters: lm_head has the token embedding's weights if config.tied, and all
        layers that have those in Position.shared, in the same shape, share them."""
        if self.config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        first = {}
        for layer in (block.attn for block in self.transformer.h):
            for name in layer.choices["pos"].shared:
                own = getattr(layer, name)
                setattr(layer, name, first.setdefault((name, own.shape), own))

    @torch.no_grad()
    def init_weights(self, seed):
        """Draw GPT-2's initial weights: N(0, 0.02), biases 0, the last layer of each branch divided
        by sqrt(2 n_layer).

        So the variance that the 2 n_layer branches add to the stream does not depend on n_layer.
        Each attention layer lists its other random weights in init_std. Each tensor has its own
        generator, seeded with (seed, its name): two recipes share the initial values of the tensors
        that they share."""
        std = {}  # {name of a parameter: its standard deviation}
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                std[f"{name}.weight"] = 0.02
                if name.endswith("c_proj"):  # it ends a branch
                    std[f"{name}.weight"] /= math.sqrt(2 * self.config.n_layer)
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
        for depth, block in enumerate(self.transformer.h):
            for name, value in block.attn.init_std.items():
                std[f"transformer.h.{depth}.attn.{name}"] = value
        for name, p in self.named_parameters():  # a tied lm_head is listed once, as wte
            if name in std:
                generator = generator_of(seed, name.removesuffix(".weight"))
                p.normal_(0.0, std[name], generator=generator)
        if self.sink_tokens:
            self.sink_token.normal_(0.0, 0.02, generator=generator_of(seed, ".sink_token"))

    def additions_to(self, config):
        """Names of attention's parameters and buffers, sink token included, that a model of
        `config` lacks."""
        theirs = shapes_of(config)
        return [
            name
            for name in self.state_dict()
            if name not in theirs and (".attn." in name or ".lora_" in name or name == "sink_token")
        ]

    def without_unused_additions(self, state):
        """The weights `state` of another model, without those that its mixer adds to attention and
        this model lacks."""
        ours = self.state_dict()
        return {
            name: value
            for name, value in state.items()
            if name in ours or name.partition(".attn.")[2] not in mixers.ADDED
        }

    def forward(self, idx, targets=None, cache=None, importance=False, last=0, starts=None):
        """From token ids idx (B, T) to logits (B, T, V), and the mean loss if there are targets (B,
        T).

        Targets of -1 are ignored. cache: from new_cache(); idx continues the tokens of earlier
        calls with it. importance: return the importance of every head, (layers, heads), as a third
        value. last: only the logits of this many last positions; 0: of all. starts (B, T): idx
        holds packed documents, and each token's own begins at this position; None: it holds one.
        Raises ValueError on too many tokens for --pos, or on a cache of another model."""
        if cache is not None and cache[0].config != self.config:
            raise ValueError(
                "the cache was filled by a model of another recipe or size: begin with "
                "model.new_cache()"
            )
        if cache and starts is not None:
            raise ValueError("a cache cannot continue packed documents: leave out `starts`")
        blocks = self.transformer.h
        if importance and not all(b.attn.has_importance(b.attn.config) for b in blocks):
            raise ValueError(
                f"--attn={self.config.attn} does not measure the importance of its heads: only a "
                "gate, or the sink of one view of softmax, has one"
            )
        cached = cache[0].tokens if cache else 0  # number of tokens in the cache
        sink_tokens = 0 if cached else self.sink_tokens  # a filled cache contains them

        # embeddings of token ids, and of positions where these are absolute
        x = self.transformer.wte(idx)  # (B, T, C)
        if "ln_wte" in self.transformer:
            x = self.transformer.ln_wte(x)
        if sink_tokens:
            x = torch.cat([self.sink_token.expand(len(x), 1, -1), x], 1)  # (B, 1+T, C)
        i = torch.arange(cached, cached + x.shape[1], device=idx.device)  # the positions, (T,)
        if starts is not None:
            for block in blocks:
                mixers.check_packs(block.attn.config)
            i = i - starts  # (B, T): each document begins at position 0, as in generation
        if "wpe" in self.transformer:
            total = cached + x.shape[1]
            if total > self.transformer.wpe.num_embeddings:
                raise ValueError(
                    f"{total - self.sink_tokens} tokens, but --pos={self.config.pos} knows only "
                    f"its block_size={self.config.block_size} positions"
                )
            x = x + self.transformer.wpe(i)
        ropes = [block.attn.rope for block in blocks if block.attn.rope]
        # for all layers: base and scaling are no axes, so their frequencies are equal
        rope = ropes[0](i.unsqueeze(-2)) if ropes else None  # i: (1, T) or (B, 1, T), for all heads
        x = self.transformer.drop(x)

        # the blocks; each keeps its keys and values in a cache of its own
        importances = []
        for depth, block in enumerate(blocks):
            x = block(x, cache[depth] if cache else None, rope, starts, importance)
            if importance:
                x, of_heads = x
                importances.append(of_heads)
        more = (torch.stack(importances),) if importance else ()

        # the sink token predicts nothing. The loss is computed in float32, under autocast as well
        x = x[:, sink_tokens:][:, -last:]  # -0: all
        logits = self.lm_head(self.transformer.ln_f(x))  # (B, T, V)
        if targets is None:
            return logits, None, *more
        flat = logits.flatten(0, 1).float()
        total = F.cross_entropy(flat, targets.flatten(), ignore_index=-1, reduction="sum")
        return logits, total / (targets >= 0).sum().clamp(min=1), *more  # 0 without a target

    @property
    def penalized(self):
        """Does any layer add a penalty to the loss?"""
        return any(block.attn.penalized for block in self.transformer.h)

    def penalty(self):
        """The sum of the layers' penalties for the last training batch."""
        return sum(block.attn.penalty for block in self.transformer.h)

    def num_params(self, embeddings=True):
        """Number of parameters, tied ones counted once.

        embeddings=False leaves out tables that are only looked up, as scaling laws do: the position
        embedding, and the token embedding unless it is tied."""
        count = sum(p.numel() for p in self.parameters())
        if embeddings:
            return count
        if "wpe" in self.transformer:
            count -= sum(p.numel() for p in self.transformer.wpe.parameters())
        return count if self.config.tied else count - self.transformer.wte.weight.numel()

    def flops_per_token(self):
        """Floating-point operations of training on one token, forward and backward, as in PaLM's
        appendix B: 6 N, plus the operations of each attention layer, such as 12 C T."""
        of_attention = sum(block.attn.flops_per_token() for block in self.transformer.h)
        return 6 * self.num_params(embeddings=False) + of_attention

    def configure_optimizers(self, weight_decay, learning_rate, betas, head_lr=1.0):
        """AdamW on all parameters that require a gradient.

        Matrices and embeddings decay; biases and norms do not. Parameters outside linear layers,
        embeddings and norms, such as one scalar a head, do not decay, and learn head_lr times as
        fast."""
        decay, no_decay, head = {}, {}, {}  # as keys: a tied weight belongs to two modules
        for module in self.modules():
            plain = isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))
            for p in module.parameters(recurse=False):
                if not plain:
                    head[p] = True
                elif p.dim() > 1:
                    decay[p] = True
                else:
                    no_decay[p] = True
        groups = []
        for params, decays, lr_scale in (
            (decay, weight_decay, 1.0),
            (no_decay, 0.0, 1.0),
            (head, 0.0, head_lr),
        ):
            # train.py multiplies the learning rate by lr_scale
            params = [p for p in params if p.requires_grad]
            group = {"params": params, "weight_decay": decays, "lr_scale": lr_scale}
            groups += [group] if params else []
        # one kernel for all parameters
        fused = self.lm_head.weight.device.type in ("cuda", "cpu", "mps")
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)

    def set_progress(self, progress):
        """Tell layers with a schedule how much of the training is over, from 0 to 1."""
        for block in self.transformer.h:
            if hasattr(block.attn, "progress"):
                block.attn.progress.fill_(progress)  # a buffer, so checkpoints contain it

    def finish_step(self, machine):
        """End a training step: layers such as Focus update statistics that they gathered from its
        tokens."""
        for block in self.transformer.h:
            block.attn.finish_step(machine)

    # ----------------------------------------------------------------------------------- generation

    def new_cache(self):
        """An empty KV cache for forward(idx, cache=...): one part per layer."""
        return [Cache(self.config) for _ in self.transformer.h]

    @torch.no_grad()
    def generate(
        self,
        idx,
        max_new_tokens,
        temperature=1.0,
        top_k=None,
        top_p=None,
        seed=None,
        use_cache=True,
        stop=(),
    ):
        """Continue idx (B, T) by at most max_new_tokens, one token at a time. Returns prompt and
        continuation.

        temperature 0 takes the likeliest token. top_k keeps only the k likeliest tokens, top_p only
        the fewest whose probabilities sum to p. A row that has drawn an id in `stop` repeats that
        id, and generation ends early when all rows have stopped. With relative positions the
        context grows without limit. With absolute ones, a context longer than block_size is cropped
        to its last block_size tokens and read without a cache. Raises ValueError on an empty prompt
        or unknown id."""
        if idx.shape[1] == 0 or idx.min() < 0 or idx.max() >= self.config.vocab_size:
            raise ValueError(
                f"a prompt needs at least one token, with ids in 0..{self.config.vocab_size - 1}"
            )
        training = self.training
        self.eval()  # no dropout
        stop = torch.tensor(stop, device=idx.device)
        ended = idx.new_zeros(len(idx), 1, dtype=torch.bool)  # rows that have drawn an id in `stop`
        generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        limit = self.config.block_size if "wpe" in self.transformer else math.inf
        # a recipe that cannot be decoded step by step reads all tokens again for each new one
        cached = use_cache and all(block.attn.cached for block in self.transformer.h)
        cache = self.new_cache() if cached else None
        for _ in range(max_new_tokens):
            if idx.shape[1] > limit:
                # absolute positions have run out: the window slides and moves every token, so the
                # cache is void
                context, cache = idx[:, -limit:], None
            else:  # the whole prompt, or the newest token, which the cache lacks
                context = idx[:, -1:] if cache and cache[0].tokens else idx
            logits = self(context, cache=cache, last=1)[0][:, 0].float()  # (B, V)
            new = pick(logits, temperature, top_k, top_p, generator)  # (B, 1)
            idx = torch.cat([idx, torch.where(ended, idx[:, -1:], new)], 1)
            if len(stop):  # only then, because all() waits for the GPU
                ended = torch.isin(idx[:, -1:], stop)
                if ended.all():
                    break
        self.train(training)
        return idx


def pick(logits, temperature, top_k, top_p, generator):
    """Draw one token id (B, 1) from logits (B, V). generator: None for torch's own."""
    if temperature < 1e-9:  # 0, or so small that the division below would overflow
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature  # below 1 sharpens, above 1 flattens
    if top_k:
        # (B, 1); ties with it are kept
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = F.softmax(logits, -1)
    if top_p:
        ordered, order = probs.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # likelier tokens already sum to p
        # back in the order of ids
        probs = probs.masked_fill(beyond.scatter(-1, order, beyond), 0.0)
    return torch.multinomial(probs, 1, generator=generator)  # normalises the rest by itself


def generator_of(seed, name):
    """A generator for the initial values of one tensor, independent of the model's other
    tensors."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


BYTES_PER_BLOCK = 40_000  # of a block's Python objects, without its weights


def check_size(config, copies):
    """Raise ValueError if this machine's memory cannot hold `copies` of a model's weights in
    float32. It counts a model of one block, or of one period of --layers, on the meta device."""
    one = replace(config, n_layer=len(config.layer_configs))
    with torch.device("meta"):
        model = GPT(one)
    block = sum(p.numel() for p in model.transformer.h.parameters()) // one.n_layer  # a mean
    count = model.num_params() + (config.n_layer - one.n_layer) * block
    check_memory(
        config.n_layer * BYTES_PER_BLOCK + 4 * copies * count,
        f"a model of {count:,} parameters, {block:,} in each of n_layer={config.n_layer} "
        "blocks, needs",
        "lower n_layer or n_embd, or use a larger machine",
    )


def shapes_of(config):
    """{name: shape} of a model's parameters and buffers, without allocating them."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}
