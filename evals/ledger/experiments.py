"""What the claims are read from: every model that is trained for them, in every set-up, and what is looked at.

A run is named RECIPE, or RECIPE@SETUP where it is not the plain lab's; with a seed it has a folder. Claims share runs:
each is trained once, whoever reads it.

    lab     Bigram-Backcopy, one layer, one head: evals/lab.py. 14 s on one core
    nobos   the same without BOS: sequences begin with a symbol drawn at random
    nobias, tied, lr3e-3    the same without biases, with a tied head, with a third of the learning rate
    long    the same task in sequences of 256 symbols, as many tokens a step
    gpu     8 layers, width 512, T = 512, books in bytes, Moby-Dick held out: some two minutes on one H200
"""
from typing import NamedTuple

from evals.lab import flags_in_lab


class Setup(NamedTuple):
    """A way to train every recipe."""
    flags: str                                  # of train.py, before the recipe's own
    data: str = ""                              # what makes its data set in DATA/NAME, if it has one of its own
    seconds: float = 14.0                       # of a run, about


DATA, RUNS = "out/claims/data", "out/claims"
BACKCOPY = "data/backcopy.py"
BOOKS = "data/text.py --source={books} --val=moby-dick --tokenizer=bytes"
FORTY_BOOKS = "--dataset=out/claims/data/gpu"
GPU = ("--n_layer=8 --n_head=8 --n_embd=512 --block_size=512 --pos=rope --batch_size=64 --max_iters=2000 "
       "--learning_rate=1e-3 --warmup_iters=200 --eval_interval=100 --eval_iters=4")

SETUPS = {
    "lab": Setup("--preset=lab"),
    "nobos": Setup("--preset=lab --dataset={data}/nobos", f"{BACKCOPY} --no_bos"),
    "nobias": Setup("--preset=lab --bias=0"),
    "tied": Setup("--preset=lab --tied=1"),
    "lr3e-3": Setup("--preset=lab --learning_rate=3e-3"),
    "long": Setup("--preset=lab --dataset={data}/long --block_size=256 --bias_range=256 --batch_size=12",
                  f"{BACKCOPY} --length=256 --sequences=10000 --val_sequences=1000", 25.0),
    "gpu": Setup(f"{GPU} --dataset={{data}}/gpu", BOOKS, 120.0),
}

TDA = "--attn=tda --attn_args=learn_beta=0,beta_init="
HEADS = "--n_layer=2 --n_head=4"
TUNED = f"{HEADS} --init_from={{runs}}/heads-{{seed}} --max_iters=250 --learning_rate=1e-3"

RECIPES = {                                     # {name: flags of train.py}; beside them every recipe by its own name
    # positions (when sinks emerge, table 3), and norms
    "rope": "--attn=softmax --pos=rope",
    "sinusoidal": "--attn=softmax --pos=sinusoidal",
    "alibi": "--attn=softmax --pos=alibi",
    "no-positions": "--attn=softmax --pos=none",
    "t5-index": "--attn=softmax --pos=t5_index",
    "sink-rope": "--attn=sink --pos=rope",
    "rope-untrained": "--attn=softmax --pos=rope --max_iters=1",
    "alibi-untrained": "--attn=softmax --pos=alibi --max_iters=1",
    "postnorm": "--attn=softmax --norm_place=post",
    # the lazy family, one part at a time
    "elastic-rope": "--attn=elastic --pos=rope",
    "rope+bias": "--attn=softmax --pos=rope+bias",
    # a sink logit that learns 30 times as fast; a bias key whose value has a fixed norm
    "sink-x30": "--attn=sink --head_lr=30",
    **{f"value-norm-{m}": f"--attn=kv_bias --attn_args=value_norm={m},value_even=1" for m in (0, 1, 5, 20)},
    # threshold differential attention with a fixed beta
    **{f"tda-{beta}": f"{TDA}{beta}" for beta in ("0.3", "0.5", "0.8", "1")},
    # two layers; and of four heads, before and after 250 steps with and without the balancing loss
    "two-layers": "--attn=softmax --n_layer=2",
    "heads": f"--attn=softmax {HEADS}",
    "heads-plain": f"--attn=softmax {TUNED}",
    "heads-eq8": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_form=all",
    "heads-eq9": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_skip=1",
}


def flags_of(recipe):
    """What train.py is told of a recipe, whatever the set-up. Raises ValueError on a name that is none."""
    return RECIPES[recipe].split() if recipe in RECIPES else flags_in_lab(recipe)
