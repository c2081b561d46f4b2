"""The jobs behind the ledger: data sets, runs (evals/lab_runs.py), and what instruments measure on them. Claims share
jobs, and each is done once.
"""
import csv
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch

from common import files
from common.runs import flags_to_finish, output_of, run_with
from evals.lab_runs import OUT_DIR, PUBLIC, SETUPS, base_of, folder_of, train_flags
from evals.ledger import checks, routing

CHECKS, LOOKS = checks.CHECKS | routing.CHECKS, checks.LOOKS | routing.LOOKS

# timings, which need no run
KERNELS = "speed --kernels --lengths=1024,4096,16384 --widths=64 --n_embd=512"
TIMED = {"kernels": KERNELS, "kernels-float32": f"{KERNELS} --dtype=float32",
         "focus-speed": "speed --focus --lengths=1024,4096,8192,16384,32768,65536,262144"}
CONSTANT = {*PUBLIC, *TIMED, "focus_table"}     # without seeds: measured once

# commands of eval.py, whose JSON is read; checks.LOOKS are further measurements of a run
COMMANDS = {
    "probe": "probe --windows=256 --batch_size=64",
    "probe-nobos": "probe --windows=64 --batch_size=64 --dataset={data}/nobos",
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
    "loss-top1": "loss --windows=128 --length=512 --topk=1",
    "loss-top2": "loss --windows=128 --length=512 --topk=2",
    "groups": "groups",
    "focus-512": "routers --windows=32 --lengths=512 --k=1,2,3,4 --repeats=1",
    "focus-256": "routers --windows=64 --lengths=256 --k=1,2,3,4 --repeats=1",
    "focus-gap": "routers --windows=32 --lengths=256,512 --k=2 --repeats=1",
    "lengths": "lengths --lengths=512",
    "lengths-256": "lengths --lengths=256",
    "lengths-text": "lengths --lengths=256,512,1024",
    "lengths-far": "lengths --lengths=512,1024,2048",
    "passkey": "passkey --lengths=512,1024,2048",
    "public-probe": "probe --windows=20 --length=64 --batch_size=20",
    "public-bos": "probe --windows=20 --length=64 --batch_size=20 --input=bos",
    "public-repeat": "probe --windows=20 --length=64 --batch_size=20 --input=repeat",
    "public-heads": "heads --windows=16 --length=256 --cost --prune=14 --threshold=0.75",
    "public-half": "heads --windows=16 --length=256 --cost --prune=14",
    "public-dormant": "heads --windows=16 --length=256",
    "public-against": "heads --windows=16 --length=256 --against={data}/smollm2",
}

# ------------------------------------------------------------------------------------------------------------- the jobs


class Place(NamedTuple):
    """Where runs and data sets go, and flags for every train.py."""
    out_dir: str = OUT_DIR
    books: str = "books"
    train_args: str = ""


class Job(NamedTuple):
    """Something to do once. words: a command from its script on, or a function and its argument. place: the folder of a
    run or a data set, or the file with the numbers. after: jobs that must be done before."""
    words: tuple[str, ...]
    place: Path
    after: tuple = ()


def data_job(name, folders):
    """The job that makes a set-up's own data set."""
    folder = Path(folders.out_dir) / "data" / name
    return Job(tuple(f"{SETUPS[name].data} --out_dir={folder}".format(books=folders.books).split()), folder)


def train_job(run, seed, folders):
    """The job that trains RECIPE or RECIPE@SETUP. Public weights are no job: it has no words."""
    if run in PUBLIC:
        return Job((), folder_of(run, seed, folders.out_dir))
    setup, base = run.partition("@")[2] or "lab", base_of(run)
    after = (data_job(setup, folders),) if SETUPS[setup].data else ()
    if base:
        after += (train_job(base, seed, folders),)
    words = "train.py", *train_flags(run, seed, folders.out_dir, folders.train_args)
    return Job(words, folder_of(run, seed, folders.out_dir), after)


def job_of(run, path, seed, folders):
    """The job that measures what a Reading reads at this path of this run."""
    look, found = path.split("/")[0], Path(folders.out_dir) / "found"
    if run in CHECKS:
        return Job((run, str(seed)), found / f"{run}-{seed}.json")
    if run in TIMED:
        return Job(("eval.py", *TIMED[run].split(), "--json"), found / f"{run}.json")
    base = train_job(run, seed, folders)
    if look not in LOOKS and look not in COMMANDS:
        return base
    words = f"eval.py {COMMANDS[look]} --out_dir={base.place} --json" if look in COMMANDS else f"{look} {base.place}"
    data = ["long"] if look == "far" else re.findall(r"{data}/(\w+)", words)
    words = words.format(data=Path(folders.out_dir) / "data").split()
    file = found / f"{base.place.name}-{look}.json"
    return Job(tuple(words), file, (*(data_job(name, folders) for name in data), base))


def all_jobs(jobs):
    """These jobs and all that must be done before them, each once, in a possible order."""
    found = {}
    for job in jobs:
        found |= dict.fromkeys([*all_jobs(job.after), job])
    return [job for job in found if job.words]


def result_of(job):
    """The numbers of a job, or None if it is not done: a run's report and best loss, or the content of a file. A data
    set has none: {}."""
    if job.words[:1] == ("train.py",):
        meta = run_with(job.place, list(job.words[1:]))
        return meta["report"] | {"best": best_loss(job.place)} if "report" in meta else None
    if job.words[0].startswith("data/"):
        return {} if (job.place / "meta.json").exists() else None
    kept = files.read_json(job.place) if job.place.exists() else {}
    needed = [before.place / "meta.json" for before in job.after]
    if not isinstance(kept, dict) or kept.get("words") != list(job.words) or not all(path.exists() for path in needed):
        return None
    up_to_date = all(path.stat().st_mtime <= job.place.stat().st_mtime for path in needed)
    return kept["found"] if up_to_date else None


def best_loss(folder):
    """The lowest validation loss in a run's log: small models on few books overfit towards the end."""
    with open(folder / "log.csv", newline="") as f:
        return min(float(row["val_loss"]) for row in csv.DictReader(f) if row["val_loss"])


def do(job):
    """Do a job, in a process of its own if it is a command. Raises ValueError if it fails."""
    name, *rest = job.words
    for before in job.after:
        if not (before.place / "meta.json").exists():
            raise ValueError(f"{before.place} is not there: its own job failed, see above. Public weights come from "
                             f"python data/weights.py {before.place.name}")
    if name in CHECKS:
        found = CHECKS[name](int(rest[0]))
    elif name in LOOKS:
        found = LOOKS[name](rest[0])
    else:
        threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}         # two jobs at a time
        output = output_of(name, *(flags_to_finish(job.place, rest) if name == "train.py" else rest), **threads)
        if name != "eval.py":
            return
        found = json.loads(output)
    files.write_json(job.place, {"words": job.words, "found": found})
