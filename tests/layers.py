"""Layers with random weights for tests: any recipe on any axes, its inputs, its output with all
gradients."""

import contextlib

import torch
from bounds import dice
from conftest import tiny_config
from hypothesis import strategies as st

import mixers
from evals.instrument import instead
from model import GPTConfig

# what a value of the axis `select` is given to choose from a few dozen tokens
SELECTING = {
    "sparq": "components=3",
    "quest": "page=4",
    "magicpig": "first=1,recent=3,bits=2,tables=6",
}


SIZES = {"n_head": 4, "n_embd": 32}
# values of the constants of --attn_args, and of the axes that are numbers, to draw from
CONSTANTS = {
    "tau_init": ("0", "0.5"),
    "per_length": ("0", "block"),
    "alpha": ("learned", "1.2", "2"),
    "power": ("1", "3", "1.5"),
    "kappa": ("4",),
    "beta_init": ("0.5",),
    "sigma_init": ("0.4",),
    "anneal": ("0.2",),
    "lambda_init": ("0.2",),
    "value_norm": ("5",),
    "value_even": ("1",),
    "bias_shared": ("1",),
    "bias_dims": ("3",),
    "learn_alibi": ("1",),
    "length_bias": ("0", "1"),
    "out_norm_eps": ("0.01",),
}
NUMBERS = {
    "window": (7, 1, 16, 40),
    "first": (2, 1, 9),
    "window_every": (2,),
    "topk": (2, 6, 1, 12, 0),
}
# see `shaped`
SCORES = st.sampled_from(KINDS := (None, "large", "ties", "equal", "negative", "far below 0"))


def selection(attn="softmax", **choices):
    """How a layer selects keys: its value on the axis `select`, or None."""
    return choices.get("select", mixers.attention.ATTENTIONS[attn].get("select"))


@st.composite
def combinations(draw, fixed=None, more=()):
    """A recipe with up to four axes changed, for a GPTConfig. Some are illegal. fixed: choices of
    all cases. more: {constant: values} of constants that every case draws if it has them, beyond up
    to two of CONSTANTS."""
    recipes = mixers.attention.ATTENTIONS
    fixed = fixed or {"attn": draw(st.sampled_from([*recipes]))}
    recipe = recipes[fixed["attn"]]
    mixer = mixers.MIXERS[recipe.get("mixer", "attention")]
    values = {axis: list(table) for axis, table in mixer.axes.items() if len(table) > 1}
    values |= {name: NUMBERS[name] for name in mixer.numbers if name in NUMBERS}
    changed = draw(st.lists(st.sampled_from(sorted(values)), max_size=4, unique=True))
    choices = {axis: draw(st.sampled_from(values[axis])) for axis in changed}
    choices |= draw(st.sampled_from([{}, {"n_kv_head": 2}, {"n_kv_head": 1}])) | fixed
    chosen = mixers.DEFAULTS | recipe | choices
    known = []  # the constants of what is chosen
    for axis, table in mixer.axes.items():
        if chosen[axis] in table:
            known += table[chosen[axis]].args
    some = [name for name in known if name in CONSTANTS]
    args = draw(st.lists(st.sampled_from(some), max_size=2, unique=True)) if some else []
    args = {name: draw(st.sampled_from(CONSTANTS[name])) for name in args}
    args |= {name: draw(st.sampled_from(more[name])) for name in known if name in more}
    args = ",".join(f"{name}={value}" for name, value in args.items())
    return choices | ({"attn_args": args} if args else {})


def recipes(*how):
    """The combinations that are legal."""

    def legal(choices):
        with contextlib.suppress(ValueError):
            return GPTConfig(**SIZES | choices)

    return combinations(*how).filter(legal)


def shaped(kind, q, k):
    """Queries and keys whose scores are of a kind."""
    if kind == "ties":  # pairs of equal keys
        return q, k[:, :, torch.arange(k.shape[2], device=k.device) // 2 * 2]
    return {
        None: (q, k),
        "large": (30 * q, k),
        "equal": (q, k[:, :, :1].expand_as(k)),
        "negative": (q.abs(), -k.abs()),
        "far below 0": (10 + q.abs(), -30 - k.abs()),
    }[kind]


def layer(attn="softmax", dtype=torch.float64, stream=3, depth=0, progress=0.3, **choices):
    """One layer in eval mode. Its parameters are moved away from their initial values, some of
    which are kinks. By default it is in the middle of Dex's schedule, where both of its terms
    count."""
    small = {"attn": attn, "bias": True}
    for name, value in (("window", 7), ("topk", 6)):
        if name in mixers.attention.ATTENTIONS[attn]:
            small[name] = value
    if (select := selection(attn, **choices)) in SELECTING:
        small["attn_args"] = SELECTING[select]
    config = tiny_config(**SIZES | small | choices)
    torch.manual_seed(stream)  # for what is not moved below, such as fixed directions
    module = mixers.layer_of(config, depth).to(dtype).eval()
    random = dice(stream)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=random, dtype=torch.float64).to(dtype))
        if hasattr(module, "progress"):
            module.progress.fill_(progress)
    return module


def fresh(attn, dtype=torch.float64, **choices):
    """One layer in eval mode with its initial parameters."""
    return mixers.layer_of(tiny_config(**SIZES | {"attn": attn} | choices), 0).to(dtype).eval()


def normal(*shape, stream=0, dtype=torch.float64):
    return torch.randn(shape, generator=dice(stream), dtype=torch.float64).to(dtype)


def token_ids(*shape, vocab_size=31, stream=0):
    return torch.randint(vocab_size, shape, generator=dice(stream))


@torch.no_grad()
def in_every_layer(look, gpt, idx):
    """[look(module, q, k, v, x, table)] of each layer's attention while the model reads idx."""
    found = []

    def watch(attend, layer, module, *inputs):
        found.append(look(module, *inputs))
        return attend(*inputs)

    with instead(gpt, watch):
        gpt(idx)
    return found


def inputs(module, T, R=None, B=2, dtype=torch.float64, stream=0):
    """Random q (of the last R of T rows), k, v, x for module.attend. q is twice as long as k: rows
    are not uniform."""
    q, k, v = (
        normal(B, heads, T, width, stream=stream + n)
        for n, (heads, width) in enumerate(module.shapes.values())
    )
    x = normal(B, T, module.config.n_embd, stream=stream + 3)
    first = T - (R or T)
    # these need all tokens
    of_x = 0 if module.config.mixer in ("recurrent", "performer", "focus") else first
    return [a.to(dtype) for a in (2 * q[:, :, first:], k, v, x[:, of_x:])]


def scalars(module):
    """{name: parameter} of a layer, except c_attn and c_proj."""
    named = module.named_parameters()
    return {name: p for name, p in named if not name.startswith(("c_attn", "c_proj"))}


def assert_learns(gpt, idx):
    """Each parameter has a gradient, and one step of the model's own optimizer lowers the loss of
    its batch."""
    optimizer = gpt.configure_optimizers(0.1, 1e-3, (0.9, 0.95))
    torch.manual_seed(0)  # of dropout, which the two losses are without
    before = gpt.eval()(idx[:, :-1], idx[:, 1:])[1]
    gpt.train()(idx[:, :-1], idx[:, 1:])[1].backward()
    for name, p in gpt.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
    optimizer.step()
    assert gpt.eval()(idx[:, :-1], idx[:, 1:])[1] < before


def attend_and_gradients(module, *qkvx, table=None):
    """The layer's output and, for a random upstream gradient, the gradients of all inputs and
    scalars."""
    own = scalars(module).values()
    return with_gradients(lambda *leaves: module.attend(*leaves, table), qkvx, own)


def with_gradients(function, inputs, parameters=()):
    """A function's output and, for a random upstream gradient, those of all inputs and parameters.
    None: none."""
    leaves = [a.detach().clone().requires_grad_() for a in inputs]
    o = function(*leaves)
    above = normal(*o.shape, stream=9).to(o)
    return [o, *torch.autograd.grad(o, [*leaves, *parameters], above, allow_unused=True)]
