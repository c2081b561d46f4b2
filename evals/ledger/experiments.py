"""What the ledger measures: instruments on runs, timings, and the checks and looks that no other instrument makes."""
import re
from pathlib import Path

from evals.jobs import Job, data_job, train_job
from evals.lab_runs import PUBLIC
from evals.ledger import checks, later, routing

CHECKS, LOOKS = checks.CHECKS | routing.CHECKS, checks.LOOKS | routing.LOOKS | later.LOOKS

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


def job_of(run, path, seed, folders):
    """The job that measures what a Reading reads at this path of this run."""
    look, found = path.split("/")[0], Path(folders.out_dir) / "found"
    if run in CHECKS:
        return Job((run, str(seed)), found / f"{run}-{seed}.json", (), CHECKS[run])
    if run in TIMED:
        return Job(("eval.py", *TIMED[run].split(), "--json"), found / f"{run}.json")
    base = train_job(run, seed, folders)
    if look not in LOOKS and look not in COMMANDS:
        return base
    words = f"eval.py {COMMANDS[look]} --out_dir={base.place} --json" if look in COMMANDS else (
        f"{look} {base.place}" + " {data}/smollm2" * (look == "dormant"))
    data = ["long"] if look == "far" else re.findall(r"{data}/(\w+)", words)
    words = words.format(data=Path(folders.out_dir) / "data").split()
    file = found / f"{base.place.name}-{look}.json"
    return Job(tuple(words), file, (*(data_job(name, folders) for name in data), base), LOOKS.get(look))


def jobs_of(reading, seeds, folders):
    """{(column, run): [the job of each seed]}."""
    return {(column, run): [job_of(run, path, seed, folders) for seed in seeds]
            for column, (path, runs) in reading.reads.items() for run in runs.split()}
