"""Presets: named sets of values for the knobs of train.py and model.GPTConfig (--preset)."""

import textwrap

import attention
from common.flags import shown

# what several presets share
FINEWEB = {"dataset": "fineweb_edu", "vocab_size": 50304, "order": "pass"}
GPT2 = FINEWEB | {
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "block_size": 1024,
    "norm": "layernorm",
    "mlp": "gelu_tanh",
    "bias": True,
    "batch_size": 16,
    "gradient_accumulation_steps": 32,
    "max_iters": 19_000,
}
LLAMA = FINEWEB | {
    "pos": "rope",
    "norm": "rmsnorm",
    "mlp": "swiglu",
    "bias": False,
    "learning_rate": 4e-4,
}
LAZY = LLAMA | {
    "n_layer": 24,
    "n_head": 16,
    "n_embd": 1024,
    "n_inner": 2816,
    "block_size": 4096,
    "tied": True,
    "batch_size": 8,
    "gradient_accumulation_steps": 16,
    "weight_decay": 0.01,
    "warmup_iters": 1024,
    "eval_interval": 500,
}

PRESETS = {
    "tiny": {
        "about": "a byte model of 0.8M parameters: minutes on two CPU cores",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "block_size": 256,
        "batch_size": 8,
        "max_iters": 1000,
        "learning_rate": 2e-3,
    },
    "lab": {
        "about": "the sink lab: a sink grows in one layer with one head, in well under a minute",
        "dataset": "backcopy",
        "n_layer": 1,
        "n_head": 1,
        "n_embd": 64,
        "n_inner": 256,
        "block_size": 64,
        "pos": "learned",
        "norm": "layernorm",
        "mlp": "relu",
        "bias": True,
        "bias_range": 64,
        "tied": False,
        "batch_size": 48,
        "max_iters": 800,
        "warmup_iters": 100,
        "learning_rate": 1e-2,
        "beta2": 0.999,
        "weight_decay": 0.01,
        "eval_interval": 200,
        "eval_iters": 5,
        "dtype": "float32",
    },
    "tune": {
        "about": "continue from public weights (the default when --init_from names them): minutes "
        "on two cores",
        "block_size": 256,
        "batch_size": 1,
        "max_iters": 200,
        "learning_rate": 1e-4,
        "warmup_iters": 20,
        "eval_interval": 100,
        "eval_iters": 16,
    },
    "gpt2": {
        "about": "GPT-2 small (124M) on 10B tokens of FineWeb-Edu, half a million a step, close to "
        "llm.c. nanoGPT itself trains for 600,000 steps on OpenWebText, without biases",
        **GPT2,
        "pos": "learned",
        "tied": True,
        "learning_rate": 6e-4,
        "warmup_iters": 700,
    },
    "paper1": {
        "about": "Lazy Attention, appendix C.2: 340M parameters, 15B tokens. The paper uses the "
        "Llama 2 tokenizer (32k ids); GPT-2's, used here, makes it 360M. The paper does "
        "not give the number of heads or the width of the MLP: they follow DeltaNet's "
        "340M",
        **LAZY,
        "max_iters": 28_610,
    },
    "paper1-ablation": {
        "about": "Lazy Attention, table 2 and figure 6: paper1 with T = 512 and 10B tokens. "
        "The paper does not give the size of these models",
        **LAZY,
        "block_size": 512,
        "batch_size": 64,
        "max_iters": 19_073,
    },
    # the paper cites this scale from Titans: 760M in table 1, 730M in appendix C.2. It prints no
    # sizes. These are GPT-3 Large's, with SwiGLU's usual width: 729M parameters with the paper's
    # 32,000 ids
    "paper1-760m": {
        "about": "Lazy Attention, table 1: 760M parameters, 30B tokens. The paper prints no depth, "
        "width or number of heads: they are GPT-3 Large's (760M). GPT-2's tokenizer, used "
        "here, makes it 757M",
        **LAZY,
        "n_embd": 1536,
        "n_inner": 4096,
        "batch_size": 4,
        "gradient_accumulation_steps": 32,
        "max_iters": 57_220,
        "warmup_iters": 2048,
    },
    "paper2": {
        "about": "Threshold Differential Attention, appendix D: GPT-2 162M with RoPE and an untied "
        "head, with the paper's tokenizer and data. The paper trains for 190,730 steps; "
        "this is one pass over the data. The paper does not give the peak learning rate",
        **GPT2,
        "pos": "rope",
        "tied": False,
        "learning_rate": 1e-3,
        "warmup_iters": 715,
    },
    "paper5": {
        "about": "When Attention Sink Emerges: LLaMA blocks of 59M parameters, without embeddings, "
        "20k steps. The paper uses the Pile with a tokenizer of its own; this uses "
        "FineWeb-Edu with GPT-2's. The batch size and the constant learning rate are its code's",
        **LLAMA,
        "n_layer": 10,
        "n_head": 8,
        "n_embd": 768,
        "n_inner": 1536,
        "block_size": 2048,
        "tied": False,
        "batch_size": 16,
        "gradient_accumulation_steps": 32,
        "max_iters": 20_000,
        "decay_lr": False,
        "warmup_iters": 100,
    },
    # the paper prints "1B" and two losses. Everything else is from its code,
    # configs/tinyllama_1b.yaml and its sigmoid twin: TinyLlama's sizes, but 16 heads, all with keys
    # of their own; 42B tokens; one learning rate after the warm-up
    "paper5-1b": {
        "about": "When Attention Sink Emerges, 7.4: 1B models, --attn=softmax against "
        "--attn=sigmoid_raw. The blocks have 1.13B parameters. The paper prints no sizes: "
        "these are its code's. Data and tokenizer as in paper5",
        **LLAMA,
        "n_layer": 22,
        "n_head": 16,
        "n_embd": 2048,
        "n_inner": 5632,
        "block_size": 2048,
        "tied": False,
        "batch_size": 4,
        "gradient_accumulation_steps": 128,
        "max_iters": 40_000,
        "decay_lr": False,
        "warmup_iters": 100,
        "eval_interval": 1000,
    },
}


def presets_and_recipes():
    """The lists of presets and recipes at the end of -h all: the flags that each of them sets."""

    def entry(name, text):
        lines = textwrap.wrap(text, 119, break_on_hyphens=False)
        return f"  {name:18} " + f"\n{'':21}".join(lines)

    def flags(knobs):
        return " ".join(f"--{name}={shown(value)}" for name, value in knobs.items())

    lines = ["presets:"]
    for name, preset in PRESETS.items():
        knobs = dict(preset)
        lines += [entry(name, knobs.pop("about")), entry("", flags(knobs))]
    lines += ["", "recipes:"]
    for name, recipe in attention.ATTENTIONS.items():
        axes = dict(recipe)
        if args := axes.pop("args", None):
            pairs = [f"{key}={shown(value)}" for key, value in args.items()]
            axes["attn_args"] = ",".join(pairs)
        lines.append(entry(name, flags(axes)))
    return "\n".join(lines)
