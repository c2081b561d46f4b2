"""The GPT around the attention, in the spirit of nanoGPT: norm, MLP, block, the whole model, generation with a cache.

What happens between the queries, keys and values and the output of a head is in attention.py; here it is only
`Attention(config, layer)`. References: GPT-2 (Radford et al. 2019) and nanoGPT for the architecture and its names;
LLaMA (Touvron et al. 2023) for RMSNorm, SwiGLU and RoPE.

Shapes: B batch, T tokens, C = n_embd, V = vocab_size.
"""
import dataclasses
import math
import zlib
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

import attention
import mixers
from common.flags import knob

# --------------------------------------------------------------------------------------------------------- the layers


def make_norm(config):
    """What keeps the numbers of each token in bounds: (B, T, C) to (B, T, C)."""
    if config.norm == "rmsnorm":                # to unit mean square: no mean is subtracted, no bias added
        return nn.RMSNorm(config.n_embd, eps=config.norm_eps)
    return nn.LayerNorm(config.n_embd, eps=config.norm_eps, bias=config.bias)


class MLP(nn.Module):
    """Two linear layers with an activation between them, for each token by itself: (B, T, C) to (B, T, C)."""
    ACTIVATIONS = {
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),           # GPT-2's
        "relu2": lambda x: F.relu(x).square(),                          # Primer, So et al. 2021
    }

    def __init__(self, config):
        super().__init__()
        gated = config.mlp == "swiglu"
        # swiglu has three matrices where the others have two, so 8/3 C in place of 4 C costs as many parameters
        hidden = config.n_inner or (-(-8 * config.n_embd // 96) * 32 if gated else 4 * config.n_embd)
        self.c_fc = nn.Linear(config.n_embd, hidden, bias=config.bias)  # widens
        self.c_gate = nn.Linear(config.n_embd, hidden, bias=config.bias) if gated else None
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=config.bias)                # back to the stream's width
        self.activation = F.silu if gated else self.ACTIVATIONS[config.mlp]
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        if self.c_gate is None:
            x = self.activation(self.c_fc(x))                           # (B, T, 4 C)
        else:
            x = self.activation(self.c_gate(x)) * self.c_fc(x)          # (B, T, 8/3 C): SwiGLU, Shazeer 2020
        return self.dropout(self.c_proj(x))


class Block(nn.Module):
    """Attention, where tokens look at each other, then the MLP, where each is by itself. Both add to the stream x.

    Differs from the paper (Vaswani et al. 2017) with norm_place="post": the model's ln_f directly follows the ln_2 of
    the last block, where the paper has no further norm. torch.nn.Transformer has two as well. The second changes
    nothing until training has moved the weights of the first.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = mixers.layer_of(config, layer)                      # attention, or another mixer with its face
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)
        self.norm_place = config.norm_place

    def forward(self, x, cache=None, importances=None):
        # post: the stream itself is normed after every branch (Vaswani et al. 2017), so nothing in it can stay large,
        # and every gradient runs through the norms: a warm-up of 100 steps, train.py's own, is enough in the lab
        if self.norm_place == "post":
            x = self.ln_1(x + self.attn(x, cache, importances))         # (B, T, C)
            return self.ln_2(x + self.mlp(x))                           # (B, T, C)
        # else norms stand inside the branches: the stream runs unchanged from the embedding to the head
        if self.norm_place == "out":            # of what a branch adds (OLMo 2)
            x = x + self.ln_1(self.attn(x, cache, importances))         # (B, T, C)
            return x + self.ln_2(self.mlp(x))                           # (B, T, C)
        x = x + self.attn(self.ln_1(x), cache, importances)             # (B, T, C)
        return x + self.mlp(self.ln_2(x))                               # (B, T, C)


class LoRA(nn.Linear):
    """A linear layer whose weight W is kept, and beside it a product of thin matrices that learns: W x + B A x, with A
    (rank, in) and B (out, rank).

    B is 0 at first, so nothing has changed. Hu et al. 2021 (arXiv 2106.09685), section 4.1, where alpha / rank is a
    factor on B A: here alpha is the rank. dice: a generator of random numbers."""

    def __init__(self, linear, rank, dice):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = nn.Parameter(torch.randn(rank, self.in_features, generator=dice) * 0.02)
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


# ---------------------------------------------------------------------------------------------------------- the model


def axis(name, meaning):
    """A field for one axis of a mixer. None until it is set: then the recipe decides, then the default."""
    return knob(None, meaning, mixers.AXES.get(name))


@dataclass
class GPTConfig:
    """Sizes and choices of one model. Axes left None are filled in from the recipe `attn`.

    Raises ValueError on what cannot be built."""
    # the sizes
    block_size: int = knob(1024, "context length T in tokens")
    vocab_size: int = knob(50304, "number of token ids V; 0 in train.py: what the data set says")
    n_layer: int = knob(12, "number of blocks")
    n_head: int = knob(12, "attention heads per block")
    n_kv_head: int = knob(0, "key and value heads, each shared by a group of heads; 0: n_head")
    n_embd: int = knob(768, "width C of the residual stream")
    head_dim: int = knob(0, "width of each query and key; 0: n_embd / n_head")
    n_inner: int = knob(0, "hidden width of the MLP; 0: 4 C (swiglu: 8/3 C, rounded up to a multiple of 32)")
    # what stands around the attention
    dropout: float = knob(0.0, "dropout on embeddings, attention weights and both branches of a block")
    bias: bool = knob(False, "biases in linear layers and LayerNorms")
    qkv_bias: bool = knob(False, "biases of queries, keys and values, also where there are no others")
    norm: str = knob("layernorm", "normalisation before each branch and before the head", ("layernorm", "rmsnorm"))
    norm_place: str = knob(
        "pre", "norms before each branch, on what each branch adds (out), or on the stream after it (post, which "
        "needs some warm-up)", ("pre", "out", "post"))
    norm_eps: float = knob(1e-5, "what a norm adds to the mean square")
    mlp: str = knob("gelu", "activation of the MLP", ("relu", "gelu", "gelu_tanh", "swiglu", "relu2"))
    tied: bool = knob(True, "the head shares the token embedding's weights")
    rope_base: float = knob(10000.0, "base of RoPE's wavelengths")
    rope_scaling: str = knob(
        "", "longer waves for longer contexts: linear:FACTOR, NTK-aware ntk:RATIO, or as LLaMA 3.1 "
        "llama3:FACTOR,LOW,HIGH,ORIGINAL")
    bias_range: int = knob(512, "distances that a learned distance bias covers; beyond it is 0")
    # the attention: a recipe, its constants, who computes it
    attn: str = knob(
        "softmax", "attention recipe: the axes below it sets, a flag of their own overrides",
        tuple(attention.ATTENTIONS))
    attn_args: str = knob("", "constants of the recipe as key=value,key=value")
    kernel: str = knob(
        "auto", "who computes attention: the block loop (torch), Triton (while decoding, the loop), or torch's own "
        "softmax (sdpa)", ("auto", "torch", "triton", "sdpa"))
    # the axes, one by one: of attention.py, and of mixers/
    mixer: str | None = axis("mixer", "what mixes tokens: attention; attention whose distant pairs need a group in "
                             "common (focus), or within clusters (routing); or a state that every token changes and "
                             "reads, which may stand for softmax (performer)")
    rule: str | None = axis("rule", "from scores to weights; of a state, how a token changes it")
    forget: str | None = axis("forget", "what a state loses at each token: nothing, a fixed share, what the token says")
    write: str | None = axis("write", "how much of its value a token writes into the state")
    conv: str | None = axis("conv", "a convolution over 4 tokens, and silu, on queries, keys and values of a state")
    balance: str | None = axis("balance", "how a token's scores become its shares of Focus' groups")
    affinity: str | None = axis("affinity", "what Focus' gate does to a distant pair: its logarithm is added to the "
                                "score, or the score is multiplied by it")
    topk: int | None = axis("topk", "groups of Focus that a token is in when the model is evaluated; 0: soft gates")
    pos: str | None = axis(
        "pos", "positions: rotary; none; an embedding of each place, fixed or learned; or added to the score a slope "
        "(ALiBi), T5's learned buckets, their bare numbers (a negative control), a learned bias per head and distance, "
        "also with rotary")
    qk_norm: str | None = axis(
        "qk_norm", "queries and keys to unit length, or to unit mean square; with learned weights, of each head or of "
        "all together")
    feature: str | None = axis(
        "feature", "what is done to queries and keys before they meet: elu + 1, or a small MLP")
    scale: str | None = axis(
        "scale", "what multiplies q.k: 1/sqrt(d), 1, or that times a factor that grows with log n (SSMax, ASEntmax)")
    normalize: str | None = axis(
        "normalize", "what a row of a rule without a normaliser is divided by: 1, its sum, its length, max(|sum|, 1)")
    sink: str | None = axis(
        "sink", "an extra key: of score 0 (one), a learned score (logit), a learned key, key and value, or a learned "
        "token")
    diff: str | None = axis(
        "diff", "a second view, which is subtracted: of shared values, or as Differential Transformer's first and "
        "second version")
    value_bias: str | None = axis("value_bias", "a learned vector added to each head's output")
    dex: str | None = axis("dex", "Dex's learned correction of each head's output")
    out_norm: str | None = axis(
        "out_norm", "RMSNorm on the output of each head, of all heads together, or that with ReLA's gate")
    gate: str | None = axis(
        "gate", "sigmoid gate on the output, from the layer's input: one per head, or one per element; of a state "
        "also silu, after or before the norm")
    window: int | None = axis("window", "keys that a row sees, itself included; 0: all before it. Of Focus: keys that "
                              "it sees whatever their group")
    window_every: int | None = axis("window_every", "N: the window is in layers 0, N, 2N, ...")
    first: int | None = axis("first", "first keys that stay visible beyond the window, as in StreamingLLM")

    def __post_init__(self):
        # a flag beats the recipe, the recipe beats the default; presets came in before (common/flags.py)
        recipe = attention.recipe(self.attn)
        for name, default in mixers.DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, recipe.get(name, default))
        self.n_kv_head = self.n_kv_head or self.n_head
        check(self)

    @property
    def head_width(self):
        """Width D of each query and key."""
        return self.head_dim or self.n_embd // self.n_head


class GPT(nn.Module):
    """The whole model: model(idx) gives logits (B, T, V) and None, model(idx, targets) also the mean loss in nats.

    `seed` fixes the initial weights, whatever else has drawn random numbers before."""

    def __init__(self, config, seed=1337):
        super().__init__()
        self.config = config
        self.ahead = attention.SINKS[config.sink].ahead                 # 1: a learned token precedes each sequence
        embeddings = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}            # (V, C): a vector for each id
        if places := attention.POSITIONS[config.pos].embeds:            # and one for each place
            embeddings["wpe"] = places(self.ahead + config.block_size, config.n_embd)
        self.transformer = nn.ModuleDict({      # GPT-2's names, which stand in every checkpoint
            **embeddings,
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            "ln_f": make_norm(config),          # the stream has grown with every block
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)          # (V, C): a score for each
        self.tie()
        if self.ahead:                                                  # When Attention Sink Emerges, table 4
            self.sink_token = nn.Parameter(torch.zeros(config.n_embd))
        self.init_weights(seed)

    def tie(self):
        """Make one parameter of what is shared: by head and embedding if config.tied, which then both predict and read
        tokens, and by all layers what their positions say."""
        if self.config.tied:
            self.lm_head.weight = self.transformer.wte.weight
        for name in attention.POSITIONS[self.config.pos].shared:
            for block in self.transformer.h[1:]:
                setattr(block.attn, name, getattr(self.transformer.h[0].attn, name))

    @torch.no_grad()
    def init_weights(self, seed):
        """GPT-2's initial values: N(0, 0.02), biases 0, the last layer of each branch smaller by sqrt(2 n_layer), so
        that 2 n_layer branches together add to the stream what one would. Each attention layer says in its init_std
        what else is drawn.

        Each tensor draws from a generator of its own, seeded by its name: two recipes share the initial values of what
        they share.
        """
        std = {}                                                        # {name of a parameter: its standard deviation}
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                ends_a_branch = name.endswith("c_proj")
                std[f"{name}.weight"] = 0.02 / math.sqrt(2 * self.config.n_layer) if ends_a_branch else 0.02
                if getattr(module, "bias", None) is not None:
                    module.bias.zero_()
        for layer, block in enumerate(self.transformer.h):
            std |= {f"transformer.h.{layer}.attn.{name}": value for name, value in block.attn.init_std.items()}
        for name, p in self.named_parameters():                         # a tied head is met once, as wte
            if name in std:
                p.normal_(0.0, std[name], generator=own_generator(seed, name.removesuffix(".weight")))
        if self.ahead:
            self.sink_token.normal_(0.0, 0.02, generator=own_generator(seed, ".sink_token"))

    def beyond(self, config):
        """Names of what this model's recipe adds to a model of another config: parameters and buffers of its attention,
        a sink token."""
        there = shapes_of(config)
        return [name for name in self.state_dict() if name not in there and (".attn." in name or name == "sink_token")]

    def without_spare(self, state):
        """Another model's weights, without what a mixer had added there that this recipe has no use for."""
        own = self.state_dict()
        return {name: value for name, value in state.items()
                if name in own or name.partition(".attn.")[2] not in mixers.ADDED}

    def add_lora(self, names, rank, seed):
        """Put LoRA on these projections of every attention layer."""
        for layer, block in enumerate(self.transformer.h):
            for name in names:
                dice = own_generator(seed, f"transformer.h.{layer}.attn.{name}.lora_a")
                setattr(block.attn, name, LoRA(getattr(block.attn, name), rank, dice))

    def freeze(self, rest):
        """Train nothing from now on but the `rest`: LoRA ("lora"), or what the mixer adds to plain attention ("focus").
        Raises ValueError where that is nothing."""
        for name, p in self.named_parameters():
            _, _, own = name.partition(".attn.")                        # as the layer calls it
            p.requires_grad_(".lora_" in own if rest == "lora" else own in self.transformer.h[0].attn.added)
        if not self.num_trained():
            raise ValueError(f"--attn={self.config.attn} adds nothing to plain attention that --train_only=focus could "
                             "train: use --attn=focus, or --train_only=lora")

    def frozen(self):
        """Names of the parameters that are not trained."""
        return {name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def forward(self, idx, targets=None, cache=None, importance=False):
        """idx, targets: (B, T) token ids; targets of -1 do not count. cache: what new_cache() gave, filled by the
        earlier calls that idx goes on from. importance: return that of every head, too, (layers, heads). Raises
        ValueError where absolute positions run out."""
        if cache is not None and cache[0].setdefault("config", self.config) != self.config:
            raise ValueError("the cache was filled by a model of another recipe or size: begin with model.new_cache()")
        past = 0 if cache is None else cache[0].get("tokens", 0)        # tokens that the cache has seen
        ahead = self.ahead if past == 0 else 0                          # the sink token stands in the cache already

        # embeddings: what each token is, and for learned positions also where it stands
        x = self.transformer.wte(idx)                                   # (B, T, C)
        if ahead:
            x = torch.cat([self.sink_token.expand(len(x), 1, -1), x], 1)                # (B, 1+T, C)
        if "wpe" in self.transformer:
            end = past + x.shape[1]
            if end > self.transformer.wpe.num_embeddings:
                raise ValueError(f"{end - ahead} tokens, but --pos={self.config.pos} knows only its "
                                 f"block_size={self.config.block_size} positions")
            x = x + self.transformer.wpe(torch.arange(past, end, device=idx.device))
        x = self.transformer.drop(x)

        # the blocks, one after another; each keeps its keys and values in a cache of its own
        importances = [] if importance else None
        for layer, block in enumerate(self.transformer.h):
            x = block(x, None if cache is None else cache[layer], importances)
        more = (torch.stack(importances),) if importance else ()

        # nobody predicts the sink token; the loss is taken in float32, whatever the products were in
        logits = self.lm_head(self.transformer.ln_f(x[:, ahead:]))      # (B, T, V)
        if targets is None:
            return logits, None, *more
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1), *more

    @property
    def penalized(self):
        """Does any layer ask for something on top of the loss?"""
        return any(block.attn.penalized for block in self.transformer.h)

    def penalty(self):
        """What layers ask on top of the loss of the last training batch (Focus with --balance=entropy)."""
        return sum(block.attn.penalty for block in self.transformer.h)

    def num_params(self, embeddings=True):
        """Parameters, tied ones counted once. Without `embeddings`, position and untied token tables are left out, as
        scaling laws count; a tied table stays, for it multiplies in the head."""
        count = sum(p.numel() for p in self.parameters())
        # looked up, not multiplied with
        tables = [self.transformer.wpe] if "wpe" in self.transformer else []
        tables += [] if self.config.tied else [self.transformer.wte]
        return count if embeddings else count - sum(p.numel() for table in tables for p in table.parameters())

    def num_trained(self):
        """Parameters that are not frozen."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def flops_per_token(self):
        """Floating-point operations of training on one token, forward and backward, as PaLM's appendix B counts them:
        6 N, and 12 C T for each layer of attention."""
        return 6 * self.num_params(embeddings=False) + sum(block.attn.flops_per_token() for block in self.transformer.h)

    def configure_optimizers(self, weight_decay, learning_rate, betas, head_lr=1.0):
        """AdamW on what is not frozen, fused where the device has it. Only matrices and embeddings decay; what
        attention learns outside its linear layers (tau and its kin) does not, and its learning rate is head_lr times
        the others'."""
        # linear layers, embeddings and norms are plain; what stands in no such module is attention's own
        groups = {"decay": [], "no_decay": [], "head": []}
        for module in self.modules():
            plain = isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm))
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    groups["head" if not plain else "decay" if p.dim() > 1 else "no_decay"].append(p)
        groups = [{
            "params": list(dict.fromkeys(params)),                      # a tied weight is met twice
            "weight_decay": weight_decay if kind == "decay" else 0.0,   # not on biases and norms, as in nanoGPT
            "lr_scale": head_lr if kind == "head" else 1.0,             # train.py multiplies the learning rate by it
        } for kind, params in groups.items() if params]
        fused = self.lm_head.weight.device.type in ("cuda", "cpu", "mps")               # one kernel for all parameters
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)

    def set_progress(self, progress):
        """Tell the layers that change during training (Dex) how much of it is over, 0 to 1."""
        for block in self.transformer.h:
            if hasattr(block.attn, "progress"):
                block.attn.progress.fill_(progress)                     # a buffer: the checkpoint keeps it

    def finish_step(self, machine):
        """A training step is over: layers settle what they counted of its tokens, on all ranks (Focus' groups)."""
        for block in self.transformer.h:
            block.attn.finish_step(machine)

    # ----------------------------------------------------------------------------------------------------- generation

    def new_cache(self):
        """An empty key-value cache for forward(idx, cache=...): one dict per layer."""
        return [{} for _ in self.transformer.h]

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, seed=None, use_cache=True,
                 stop=()):
        """Continue idx (B, T) by max_new_tokens, one at a time: (B, T + max_new_tokens). A row that has drawn an id of
        `stop` is finished and only repeats it; when all rows are, this is the end, with fewer tokens.

        temperature 0 takes the likeliest token; top_k and top_p keep only the k likeliest, or the fewest whose
        probabilities sum to p. With relative positions the context grows without limit; absolute ones end at
        block_size, beyond which each step reads the last block_size tokens again. Raises ValueError on an empty prompt
        or an id that the model does not know.
        """
        if idx.shape[1] == 0 or idx.min() < 0 or idx.max() >= self.config.vocab_size:
            raise ValueError(f"a prompt needs at least one token, with ids in 0..{self.config.vocab_size - 1}")
        training = self.training
        self.eval()                             # no dropout here; the mode comes back below
        stop, ended = torch.tensor(stop, device=idx.device), idx.new_zeros(len(idx), 1, dtype=torch.bool)
        dice = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
        limit = self.config.block_size if "wpe" in self.transformer else math.inf
        # some recipes cannot be decoded step by step, and read everything again for each token
        cache = self.new_cache() if use_cache and all(block.attn.cached for block in self.transformer.h) else None
        for _ in range(max_new_tokens):
            if idx.shape[1] > limit:
                # absolute positions have run out: the window slides, which moves every token, so the cache is void
                context, cache = idx[:, -limit:], None
            elif cache and cache[0]:
                context = idx[:, -1:]           # the cache knows all but the newest token
            else:
                context = idx                   # the whole prompt at once
            logits = self(context, cache=cache)[0][:, -1].float()       # (B, V): only the last position predicts
            new = pick(logits, temperature, top_k, top_p, dice)         # (B, 1)
            idx = torch.cat([idx, torch.where(ended, idx[:, -1:], new)], 1)
            if len(stop):                       # to ask whether all have ended makes a GPU wait for its answer
                ended = torch.isin(idx[:, -1:], stop)
                if ended.all():
                    break
        self.train(training)
        return idx


def pick(logits, temperature, top_k, top_p, dice):
    """Draw one token id (B, 1) from logits (B, V). dice: a generator, None for torch's own."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature               # below 1 sharpens, above 1 flattens
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]                # (B, 1): ties with it stay, too
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = F.softmax(logits, -1)
    if top_p:                                   # the likeliest always stays: nothing is before it
        ordered, order = probs.sort(-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p                  # those before it reach p already
        probs = probs.masked_fill(beyond.scatter(-1, order, beyond), 0.0)               # back to the order of ids
    return torch.multinomial(probs, 1, generator=dice)                  # it normalises what is left by itself


def shapes_of(config):
    """{name: shape} of a model's parameters and buffers, without the memory that they would take."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in GPT(config).state_dict().items()}


def own_generator(seed, name):
    """Random numbers for one tensor, the same whatever other tensors the model has."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


# --------------------------------------------------------------------------------------------- what cannot be a model

SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "bias_range")         # at least 1


def check(config):
    """Raise ValueError on a config of which no model can be built, naming the field and what is valid."""
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{field.name}={value} is not among {', '.join(choices)}")
    least_of = dict.fromkeys(SIZES, 1) | {name: number.default for name, number in mixers.NUMBERS.items()}
    for name, least in least_of.items():
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} must be at least {least}")
    if config.n_embd % config.n_head and not config.head_dim:
        raise ValueError(f"n_embd={config.n_embd} is not divisible by n_head={config.n_head}")
    if config.n_head % config.n_kv_head:
        raise ValueError(f"n_head={config.n_head} is not divisible by n_kv_head={config.n_kv_head}")
    if config.n_inner < 0:
        raise ValueError(f"n_inner={config.n_inner} must not be negative")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout={config.dropout} must lie in [0, 1)")
    if config.head_dim < 0:
        raise ValueError(f"head_dim={config.head_dim} must not be negative")
    if not 0 < config.norm_eps < 1:
        raise ValueError(f"norm_eps={config.norm_eps} must lie between 0 and 1")
    if not 0 < config.rope_base < math.inf:
        raise ValueError(f"rope_base={config.rope_base} must be a positive number")
    mixers.check_axes(config)
