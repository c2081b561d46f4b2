"""The runs that the lab, its sweeps and the ledger share: their names, and the flags of train.py that make them.

A run is named RECIPE, or RECIPE@SETUP outside the plain lab. With a seed it has one folder, OUT_DIR/NAME-SEED, or that
of public weights. So it is trained only once, even if several commands use it. One run takes

    lab, ..     15 to 25 s on one core: Bigram-Backcopy, one layer, one head (evals/lab.py)
    history-..  the same with up to fifty times as many steps (ledger/later.py)
    text, ..    3 minutes on one core: 4 layers, width 128, T = 256, the sources of Python's library in bytes
    smollm2     at most an hour: a router beside the public weights of out/smollm2, T = 512, books in tokens
    gpu, ..     some two minutes on one H200: 8 layers, width 512, T = 512, books in bytes, Moby-Dick held out
"""
import re
from pathlib import Path
from typing import NamedTuple

import attention

SEEDS = "2,3,4"                                 # of the lab, its sweeps and the ledger, so that they share runs
OUT_DIR = "out/lab"
PUBLIC = {name: f"out/{name}" for name in ("smollm2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}


class Setup(NamedTuple):
    """A way to train every recipe. {data} and {books} become folders."""
    flags: str                                  # of train.py, before the recipe's own
    data: str = ""                              # the script that makes {data}/NAME, if the set-up has its own data set
    cost: str = "lab"                           # of a run, a class of ledger.claim.COSTS
    steps: int = 1000                           # {steps} of RECIPES: of a router beside a frozen model


BACKCOPY = "data/backcopy.py"
BOOKS = "data/text.py --source={books} --val=moby-dick"
GPU = ("--n_layer=8 --n_head=8 --n_embd=512 --block_size=512 --pos=rope --batch_size=64 --max_iters=2000 "
       "--learning_rate=1e-3 --warmup_iters=200 --eval_interval=100 --eval_iters=4")

SETUPS = {
    "lab": Setup("--preset=lab"),
    "nobos": Setup("--preset=lab --dataset={data}/nobos", f"{BACKCOPY} --no_bos"),      # begins with a random symbol
    "nobias": Setup("--preset=lab --bias=0"),
    # in linear layers, only the biases of queries, keys and values, or of one of them
    "bias-qkv": Setup("--preset=lab --bias=0 --qkv_bias=1"),
    **{f"bias-{part}": Setup(f"--preset=lab --bias=0 --qkv_bias=1 --bias_of={part}") for part in "qkv"},
    "tied": Setup("--preset=lab --tied=1"),
    "lr3e-3": Setup("--preset=lab --learning_rate=3e-3"),
    "table2": Setup("--preset=lab --dataset={data}/table2", f"{BACKCOPY} --seed=2"),
    "heads8": Setup("--preset=lab --n_head=8"),
    "long": Setup("--preset=lab --dataset={data}/long --block_size=256 --bias_range=256 --batch_size=12",
                  f"{BACKCOPY} --length=256 --sequences=10000 --val_sequences=1000"),
    **{f"fixed{place}": Setup(f"--preset=lab --dataset={{data}}/fixed{place}",
                              f"{BACKCOPY} --no_bos --fixed_at={place}") for place in (4, 32)},
    "text": Setup("--preset=tiny --max_iters=600", cost="cpu-minutes"),
    "text6": Setup("--preset=tiny --max_iters=600 --n_layer=6", cost="cpu-minutes"),
    "smollm2": Setup("--dataset={data}/smollm2 --block_size=512 --learning_rate=1e-3 --warmup_iters=10 "
                     "--eval_interval=100 --eval_iters=8", f"{BOOKS} --tokenizer=out/smollm2", "cpu-hours", 300),
    "gpu": Setup(f"{GPU} --dataset={{data}}/gpu", f"{BOOKS} --tokenizer=bytes", "gpu-minutes"),
    **{f"gpu-fixed{place}": Setup(
        f"{GPU} --dataset={{data}}/gpu-fixed{place}",
        f"{BOOKS} --tokenizer=bytes --fixed_at={place} --length=512", "gpu-minutes")
       for place in (4, 8, 16, 32, 64)},
}

TDA = "--attn=tda --attn_args=learn_beta=0,beta_init="
FROZEN = "--attn=focus --affinity=score --window=128 --init_from=softmax --train_only=focus --max_iters={steps}"
HEADS = "--n_layer=2 --n_head=4"
TUNED = f"{HEADS} --init_from=heads --max_iters=250 --learning_rate=1e-3"

RECIPES = {                                     # {name: flags of train.py}, in addition to attention.ATTENTIONS
    "blind": "--attn=window --window=1",        # rows see only themselves: the lab without attention
    # positions (When Attention Sink Emerges, table 3) and places of norms
    **{pos: f"--attn=softmax --pos={pos}" for pos in ("learned", "rope", "sinusoidal", "alibi", "t5", "rope+bias")},
    "no-positions": "--attn=softmax --pos=none",
    "t5-index": "--attn=softmax --pos=t5_index",
    "alibi-learned": "--attn=softmax --pos=alibi --attn_args=learn_alibi=1",
    "sink-rope": "--attn=sink --pos=rope",
    **{f"{pos}-untrained": f"--attn=softmax --pos={pos} --max_iters=1"
       for pos in ("learned", "sinusoidal", "rope", "alibi")},
    "postnorm": "--attn=softmax --norm_place=post",
    "outnorm": "--attn=softmax --norm_place=out",
    "outnorm-qknorm": "--attn=softmax --norm_place=out --qk_norm=all",          # as in OLMo 2
    # the lazy family, one part at a time
    "elastic-rope": "--attn=elastic --pos=rope",
    # a sink logit that learns 30 times as fast; a bias key whose value has a fixed norm, in all channels or in one
    "sink-x30": "--attn=sink --head_lr=30",
    **{f"value-norm-{m}": f"--attn=kv_bias --attn_args=value_norm={m},value_even=1" for m in (0, 1, 5, 20)},
    **{f"value-axis-{m}": f"--attn=kv_bias --attn_args=value_norm={m},value_even=0" for m in (1, 5, 20)},
    # a bias key in few channels; models of four heads, also with one bias key for all four
    **{f"k_bias-{dims}-dims": f"--attn=k_bias --attn_args=bias_dims={dims}" for dims in (1, 4)},
    **{f"{attn}-4-heads": f"--attn={attn} --n_head=4" for attn in ("softmax", "relu", "k_bias", "kv_bias")},
    **{f"{attn}-4-heads-shared": f"--attn={attn} --n_head=4 --attn_args=bias_shared=1"
       for attn in ("k_bias", "kv_bias")},
    # threshold differential attention with a fixed beta
    **{f"tda-{beta}": f"{TDA}{beta}" for beta in ("0.3", "0.5", "0.8", "1")},
    # the forms of elastic's offset (lazy attention, table 2), and tau's learning rate
    "tau-from-0": "--attn=elastic --attn_args=tau_init=0",
    "tau-fixed": "--attn=elastic --attn_args=learn_tau=0",
    "tau-plain": "--attn=elastic --attn_args=per_length=0,tau_init=0",
    "elastic-x30": "--attn=elastic --head_lr=30",
    "bias-alone": "--attn=softmax --pos=bias",
    **{f"tda-p{power}": f"--attn=tda --attn_args=power={power}" for power in (1, 3, 5)},
    **{f"balanced-{weight}": f"--attn=softmax --head_balance={weight} --balance_skip=1" for weight in (0.001, 0.01)},
    # Focus: from scratch; its router alone, on a frozen model
    **{f"focus-{balance}": f"--attn=focus --window=64 --balance={balance} --attn_args=groups=8"
       for balance in ("softmax", "entropy", "sinkhorn")},
    "focus-frozen": FROZEN, "focus-frozen-sinkhorn": f"{FROZEN} --balance=sinkhorn",
    "focus-random": f"{FROZEN} --max_iters=1", "focus-short": f"{FROZEN} --block_size=256 --window=64",
    "focus-k8": f"{FROZEN} --attn_args=groups=8",
    "focus-k8-random": f"{FROZEN} --attn_args=groups=8 --max_iters=1",
    **{f"focus-n{count}": f"{FROZEN} --balance=sinkhorn --attn_args=iterations={count}" for count in (3, 5, 20)},
    **{f"focus-d{width}": f"{FROZEN} --attn_args=route_dim={width}" for width in (8, 64, 512)},
    **{f"focus-w{width}": f"{FROZEN} --window={width}" for width in (16, 32, 64, 256)},
    "focus-w32-random": f"{FROZEN} --window=32 --max_iters=1",
    # trained further in all weights, with Focus and without
    "focus-tuned": "--attn=focus --affinity=score --window=128 --attn_args=groups=8 --init_from=softmax "
                   "--max_iters=1000",
    "softmax-tuned": "--attn=softmax --init_from=softmax --max_iters=1000",
    # peak learning rate times steps of decay is four times the lab's product: see ledger/later.py
    **{f"history-{rate}": f"--attn=softmax --learning_rate={rate} --lr_decay_iters={steps} "
                          f"--max_iters={steps * 5 // 4} --eval_interval=25"
       for rate, steps in (("1e-3", 32_000), ("3e-3", 10_667), ("1e-2", 3200), ("2e-2", 1600))},
    # two layers, also with norms in other places. `heads` has four heads in each layer; the next three train it for 250
    # more steps, with and without the balancing loss
    "two-layers": "--attn=softmax --n_layer=2",
    **{f"two-layers-{place}": f"--attn=softmax --n_layer=2 --norm_place={place}" for place in ("post", "out")},
    "heads": f"--attn=softmax {HEADS}",
    "heads-plain": f"--attn=softmax {TUNED}",
    "heads-eq8": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_form=all",
    "heads-eq9": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_skip=1",
}


def folder_of(run, seed, out_dir):
    return Path(PUBLIC.get(run, f"{out_dir}/{run}-{seed}"))


def base_of(run):
    """The run that this one starts from, of the same set-up, or the set-up's public weights; None if there is none."""
    recipe, at, setup = run.partition("@")
    found = re.search(r"--init_from=(\S+)", RECIPES.get(recipe, ""))
    return found and (setup if setup in PUBLIC else found[1] + at + setup)


def train_flags(run, seed, out_dir, more=""):
    """The flags of train.py that make a run. more: further flags, separated by spaces. Raises ValueError if there is no
    such recipe."""
    recipe, _, name = run.partition("@")
    setup, base = SETUPS[name or "lab"], base_of(run)
    if recipe in RECIPES:
        flags = RECIPES[recipe].format(steps=setup.steps)
        if base:                                # RECIPES has its name, train.py needs its folder
            flags = re.sub(r"--init_from=\S+", f"--init_from={folder_of(base, seed, out_dir)}", flags)
    else:
        axes, flags = attention.recipe(recipe), f"--attn={recipe}"
        if name.startswith(("text", "gpu")):    # the recipe's own positions replace the set-up's
            flags += f" --pos={axes['pos']}" if "pos" in axes else ""
        else:
            flags += " --window=16" * ("window" in axes)                # shorter than the lab's 64 tokens
            flags += " --n_head=2" * (axes.get("diff") == "v1")         # it pairs heads, and the lab has one head
            # with its own beta of 1 hardly any key passes the threshold at first, so q and k would get no gradient
            flags += " --attn_args=beta_init=0.1" * (axes["rule"] == "tra")
    fixed = setup.flags.format(data=Path(out_dir) / "data")
    return f"{fixed} --seed={seed} --out_dir={folder_of(run, seed, out_dir)} {flags} {more}".split()
