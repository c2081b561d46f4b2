"""What the claims are read from: every model that is trained for them, in every set-up, and what is looked at.

A run is named RECIPE, or RECIPE@SETUP where it is not the plain lab's; with a seed it has a folder. Claims share runs:
each is trained once, whoever reads it.

    lab     Bigram-Backcopy, one layer, one head: evals/lab.py. 14 s on one core
    nobos   the same without BOS: sequences begin with a symbol drawn at random
    nobias, tied, lr3e-3    the same without biases, with a tied head, with a third of the learning rate
    heads8  the same with eight heads
    long    the same task in sequences of 256 symbols, as many tokens a step
    gpu     8 layers, width 512, T = 512, books in bytes, Moby-Dick held out: some two minutes on one H200
"""
import csv
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch

import attention
from common import files
from common.runs import finished_run, output_of
from evals.lab import flags_in_lab
from evals.ledger import checks, routing


class Setup(NamedTuple):
    """A way to train every recipe. {data}, {runs}, {seed} and {books} stand for folders and the seed at hand."""
    flags: str                                  # of train.py, before the recipe's own
    data: str = ""                              # what makes {data}/NAME, if it has a data set of its own


BACKCOPY = "data/backcopy.py"
BOOKS = "data/text.py --source={books} --val=moby-dick"
GPU = ("--n_layer=8 --n_head=8 --n_embd=512 --block_size=512 --pos=rope --batch_size=64 --max_iters=2000 "
       "--learning_rate=1e-3 --warmup_iters=200 --eval_interval=100 --eval_iters=4")

SETUPS = {
    "lab": Setup("--preset=lab"),
    "nobos": Setup("--preset=lab --dataset={data}/nobos", f"{BACKCOPY} --no_bos"),
    "nobias": Setup("--preset=lab --bias=0"),
    "tied": Setup("--preset=lab --tied=1"),
    "lr3e-3": Setup("--preset=lab --learning_rate=3e-3"),
    "heads8": Setup("--preset=lab --n_head=8"),
    "long": Setup("--preset=lab --dataset={data}/long --block_size=256 --bias_range=256 --batch_size=12",
                  f"{BACKCOPY} --length=256 --sequences=10000 --val_sequences=1000"),
    **{f"fixed{place}": Setup(f"--preset=lab --dataset={{data}}/fixed{place}",
                              f"{BACKCOPY} --no_bos --fixed_at={place}") for place in (4, 32)},
    "text": Setup("--preset=tiny --max_iters=600"),
    "books": Setup("", f"{BOOKS} --tokenizer=out/smollm2"),              # for public weights
    "gpu": Setup(f"{GPU} --dataset={{data}}/gpu", f"{BOOKS} --tokenizer=bytes"),
    **{f"gpu-fixed{place}": Setup(
        f"{GPU} --dataset={{data}}/gpu-fixed{place}",
        f"{BOOKS} --tokenizer=bytes --fixed_at={place} --length=512")
       for place in (4, 8, 16, 32, 64)},
}

CHECKS, LOOKS = checks.CHECKS | routing.CHECKS, checks.LOOKS | routing.LOOKS

TDA = "--attn=tda --attn_args=learn_beta=0,beta_init="
FROZEN = "--attn=focus --window=128 --init_from={runs}/softmax-{seed} --train_only=focus --max_iters=1000"
HEADS = "--n_layer=2 --n_head=4"
TUNED = f"{HEADS} --init_from={{runs}}/heads-{{seed}} --max_iters=250 --learning_rate=1e-3"

RECIPES = {                                     # {name: flags of train.py}; beside them every recipe by its own name
    # positions (when sinks emerge, table 3), and norms
    "learned": "--attn=softmax --pos=learned",
    "rope": "--attn=softmax --pos=rope",
    "sinusoidal": "--attn=softmax --pos=sinusoidal",
    "alibi": "--attn=softmax --pos=alibi",
    "no-positions": "--attn=softmax --pos=none",
    "t5": "--attn=softmax --pos=t5",
    "t5-index": "--attn=softmax --pos=t5_index",
    "alibi-learned": "--attn=softmax --pos=alibi --attn_args=learn_alibi=1",
    "sink-rope": "--attn=sink --pos=rope",
    **{f"{pos}-untrained": f"--attn=softmax --pos={pos} --max_iters=1"
       for pos in ("learned", "sinusoidal", "rope", "alibi")},
    "postnorm": "--attn=softmax --norm_place=post",
    # the lazy family, one part at a time
    "elastic-rope": "--attn=elastic --pos=rope",
    "rope+bias": "--attn=softmax --pos=rope+bias",
    # a sink logit that learns 30 times as fast; a bias key whose value has a fixed norm
    "sink-x30": "--attn=sink --head_lr=30",
    **{f"value-norm-{m}": f"--attn=kv_bias --attn_args=value_norm={m},value_even=1" for m in (0, 1, 5, 20)},
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
    # Focus: from scratch; its router alone, beside a frozen model
    **{f"focus-{balance}": f"--attn=focus --window=64 --balance={balance} --attn_args=groups=8"
       for balance in ("softmax", "entropy", "sinkhorn")},
    "focus": "--attn=focus --window=128",
    "focus-frozen": FROZEN, "focus-frozen-sinkhorn": f"{FROZEN} --balance=sinkhorn",
    "focus-random": f"{FROZEN} --max_iters=1", "focus-short": f"{FROZEN} --block_size=256 --window=64",
    "focus-k8": f"{FROZEN} --attn_args=groups=8",
    "focus-k8-random": f"{FROZEN} --attn_args=groups=8 --max_iters=1",
    **{f"focus-n{count}": f"{FROZEN} --balance=sinkhorn --attn_args=iterations={count}" for count in (3, 5, 10, 20)},
    **{f"focus-d{width}": f"{FROZEN} --attn_args=route_dim={width}" for width in (8, 16, 64, 512)},
    **{f"focus-w{width}": f"{FROZEN} --window={width}" for width in (16, 64, 128, 256)},
    # two layers; and of four heads, before and after 250 steps with and without the balancing loss
    "two-layers": "--attn=softmax --n_layer=2",
    "heads": f"--attn=softmax {HEADS}",
    "heads-plain": f"--attn=softmax {TUNED}",
    "heads-eq8": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_form=all",
    "heads-eq9": f"--attn=softmax {TUNED} --head_balance=0.01 --balance_skip=1",
}

PUBLIC = {name: f"out/{name}" for name in ("smollm2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")}      # weights
# what is timed, without a run
KERNELS = "speed --kernels --lengths=1024,4096,16384 --widths=64 --n_embd=512"
TIMED = {"kernels": KERNELS, "kernels-float32": f"{KERNELS} --dtype=float32",
         "focus-speed": "speed --focus --lengths=1024,4096,8192,16384,32768,65536,262144"}
CONSTANT = {*PUBLIC, *TIMED, "focus_table"}     # what has no seeds: it is read once

# what eval.py says of a run, as JSON; checks.LOOKS are more
COMMANDS = {
    "probe": "probe --windows=256 --batch_size=64",
    "repeat": "probe --windows=64 --batch_size=64 --input=repeat --dataset={data}/nobos",
    "repeat-bos": "probe --windows=64 --batch_size=64 --input=repeat",
    "probe-lengths": "probe --lengths=64,128,256 --windows=128 --batch_size=16",
    "probe-far": "probe --lengths=64,128,256,512,1024,2048 --windows=16 --batch_size=2",
    "probe-10": "probe --length=10",
    "probe-512": "probe --length=512 --windows=16",
    "params": "params",
    "heads": "heads --windows=64 --batch_size=16",
    "heads-against": "heads --windows=64 --against=stdlib",
    "heads-cost": "heads --windows=32 --cost --prune=14",
    "loss": "loss --windows=128 --length=512",
    "loss-streaming": "loss --windows=128 --length=512 --attn=streaming --window=64 --first=4",
    "loss-window": "loss --windows=128 --length=512 --attn=window --window=64",
    "loss-short": "loss --windows=128 --length=48",
    "loss-short-streaming": "loss --windows=128 --length=48 --attn=streaming --window=64 --first=4",
    "loss-top2": "loss --windows=128 --length=512 --topk=2",
    "loss-window128": "loss --windows=128 --length=512 --attn=window --window=128",
    "groups": "groups",
    "focus": "routers --windows=64 --lengths=256,512 --k=1,2,3,4 --repeats=1",
    "lengths": "lengths --lengths=512",
    "lengths-far": "lengths --lengths=512,1024,2048",
    "passkey": "passkey --lengths=512,1024,2048",
    "public-probe": "probe --windows=20 --length=64 --batch_size=20",
    "public-bos": "probe --windows=20 --length=64 --batch_size=20 --input=bos",
    "public-heads": "heads --windows=16 --length=256 --cost --prune=14",
    "public-dormant": "heads --windows=16 --length=256",
    "public-against": "heads --windows=16 --length=256 --against={data}/books",
}

# ------------------------------------------------------------------------------------------------------------- the jobs


class Place(NamedTuple):
    """Where runs and data sets go, and what is told to every train.py."""
    out_dir: str = "out/claims"
    books: str = "books"
    train_args: str = ""


class Job(NamedTuple):
    """Something to do once, whoever reads it. words: of the command, from its script on, or of a function here; place:
    a run's or a data set's folder, or the file with what was found; after: the jobs that come before."""
    words: tuple[str, ...]
    place: Path
    after: tuple = ()


def data_job(name, where):
    """The making of a set-up's own data set."""
    folder = Path(where.out_dir) / "data" / name
    return Job(tuple(f"{SETUPS[name].data} --out_dir={folder}".format(books=where.books).split()), folder)


def train_job(run, seed, where):
    """The training of RECIPE or RECIPE@SETUP."""
    recipe, _, name = run.partition("@")
    name = name or "lab"
    setup, folder = SETUPS[name], Path(where.out_dir) / name / f"{recipe}-{seed}"
    flags = f"{setup.flags} --seed={seed} --out_dir={folder} {flags_of(recipe, name)} {where.train_args}"
    after = (data_job(name, where),) if setup.data else ()
    if earlier := re.search(r"{runs}/(\w+)-", flags):                   # it goes on from another run of this set-up
        after += (train_job(f"{earlier[1]}@{name}", seed, where),)
    filled = flags.format(data=Path(where.out_dir) / "data", runs=folder.parent, seed=seed)
    return Job(("train.py", *filled.split()), folder, after)


def flags_of(recipe, setup):
    """What train.py is told of a recipe. Raises ValueError on a name that is none."""
    if recipe in RECIPES:
        return RECIPES[recipe]
    if not setup.startswith("gpu"):
        return " ".join(flags_in_lab(recipe))   # what it needs in one layer with one head, and nowhere else
    pos = attention.recipe(recipe).get("pos")
    return f"--attn={recipe}" + (f" --pos={pos}" if pos else "")        # its own positions go before the set-up's


def job_of(run, path, seed, where):
    """The job that has what a Reading reads at this path of this run."""
    look, found = path.split("/")[0], Path(where.out_dir) / "found"
    if run in CHECKS:
        return Job((run, str(seed)), found / f"{run}-{seed}.json")
    if run in TIMED:
        return Job(("eval.py", *TIMED[run].split(), "--json"), found / f"{run}.json")
    base = Job((), Path(PUBLIC[run])) if run in PUBLIC else train_job(run, seed, where)
    if look not in LOOKS and look not in COMMANDS:
        return base
    words = f"eval.py {COMMANDS[look]} --out_dir={base.place} --json" if look in COMMANDS else f"{look} {base.place}"
    data = ["long"] if look == "far" else re.findall(r"{data}/(\w+)", words)
    words = words.format(data=Path(where.out_dir) / "data").split()
    file = found / f"{base.place.parent.name}-{base.place.name}-{look}.json"
    return Job(tuple(words), file, (*(data_job(name, where) for name in data), base))


def all_jobs(jobs):
    """These and all that come before them, each once, in an order in which they can be done."""
    found = {}
    for job in jobs:
        found |= dict.fromkeys([*all_jobs(job.after), job])
    return [job for job in found if job.words]  # public weights are there, or they are not


def result_of(job):
    """What a job has found, or None while it is not done: a run's report and losses, the numbers in a file."""
    if job.words[:1] == ("train.py",):
        meta = finished_run(job.place, list(job.words[1:]))
        return meta and meta["report"] | {"best": best_loss(job.place)}
    if job.words[0].startswith("data/"):
        return {} if (job.place / "meta.json").exists() else None
    kept = files.read_json(job.place) if job.place.exists() else {}
    before = [run.place / "meta.json" for run in job.after]
    if kept.get("words") != list(job.words) or not all(path.exists() for path in before):
        return None
    young = all(path.stat().st_mtime <= job.place.stat().st_mtime for path in before)
    return kept["found"] if young else None


def best_loss(folder):
    """The lowest validation loss in a run's log: small models on few books are overfitted at the end."""
    with open(folder / "log.csv", newline="") as f:
        return min(float(row["val_loss"]) for row in csv.DictReader(f) if row["val_loss"])


def do(job):
    """Do it, in a process of its own if it is a command. Raises ValueError where that fails."""
    name, *rest = job.words
    for before in job.after:
        if not (before.place / "meta.json").exists():
            raise ValueError(f"{before.place} is not there")
    if name in CHECKS:
        found = CHECKS[name](int(rest[0]))
    elif name in LOOKS:
        found = LOOKS[name](rest[0])
    else:
        threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}         # two jobs at a time
        output = output_of(name, *rest, **threads)
        if name != "eval.py":
            return
        found = json.loads(output)
    files.write_json(job.place, {"words": job.words, "found": found})
