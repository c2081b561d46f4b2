"""One runner for the lab, its sweeps and the board: data sets, runs (lab_runs.py) and measurements of them, as jobs.
Each job is done once."""
import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from common import files
from common.runs import flags_to_finish, output_of, run_with
from evals.lab_runs import COMMANDS, OUT_DIR, SETUPS, folder_of, train_flags


class Place(NamedTuple):
    """Where runs and data sets go, and flags for every train.py."""
    out_dir: str = OUT_DIR
    books: str = "books"
    train_args: str = ""


class Job(NamedTuple):
    """Something to do once."""
    words: tuple[str, ...]                      # a command from its script on
    place: Path                                 # the folder of a run or a data set, or the file with the numbers
    after: tuple = ()                           # jobs that must be done before


def data_job(name, folders):
    """The job that makes a set-up's own data set."""
    folder = Path(folders.out_dir) / "data" / name
    return Job(tuple(f"{SETUPS[name].data} --out_dir={folder}".format(books=Path(folders.books)).split()), folder)


def train_job(run, seed, folders):
    """The job that trains RECIPE or RECIPE@SETUP."""
    setup = run.partition("@")[2] or "lab"
    after = (data_job(setup, folders),) if SETUPS[setup].data else ()
    words = "train.py", *train_flags(run, seed, folders.out_dir, folders.train_args)
    return Job(words, folder_of(run, seed, folders.out_dir), after)


def look_job(look, run, seed, folders):
    """The job that looks at this run by a command of COMMANDS."""
    trained = train_job(run, seed, folders)
    words = "eval.py", *COMMANDS[look].split(), f"--out_dir={trained.place}", "--json"
    return Job(words, Path(folders.out_dir) / "found" / f"{trained.place.name}-{look}.json", (trained,))


def all_jobs(jobs):
    """These jobs and all that must be done before them, each once, in a possible order."""
    found = {}
    for job in jobs:
        found |= dict.fromkeys([*all_jobs(job.after), job])
    return list(found)


def result_of(job):
    """The numbers of a job: a run's report, a file's content, or {} of a data set. None: not done. Raises ValueError if
    the data set is there, but of other texts."""
    if job.words[0] == "train.py":
        meta = run_with(job.place, list(job.words[1:]))
        return meta.get("report")
    if job.words[0].startswith("data/"):
        if not (made := job.place / "meta.json").exists():
            return None
        source = files.read_json(made).get("source")
        if any(word.startswith("--source=") and word != f"--source={source}" for word in job.words):
            raise ValueError(f"{job.place} is made of {source}: give --books={source}, or a new folder with --out_dir")
        return {}
    kept = files.read_json(job.place) if job.place.exists() else {}
    needed = [before.place / "meta.json" for before in job.after]
    done = isinstance(kept, dict) and kept.get("words") == list(job.words) and all(
        path.exists() and path.stat().st_mtime <= job.place.stat().st_mtime for path in needed)
    return kept["found"] if done else None


def do_all(jobs, workers=0):
    """Do the missing jobs and those that need one of them, several at a time, each after the jobs that it needs. Print
    and return the failures, {place: reason}. jobs: from all_jobs. workers: 0 for two with one thread each, or one on a
    GPU."""
    stages, failed = {}, {}                     # stages {job: number}: jobs of one stage do not need each other
    for job in jobs:
        if result_of(job) is None or not stages.keys().isdisjoint(job.after):
            stages[job] = 1 + max((stages.get(before, 0) for before in job.after), default=0)

    def tried(job):                             # a failure must not stop the others
        try:
            do(job)
        except (ValueError, OSError, RuntimeError) as e:
            failed[job.place] = str(e)

    missing = sorted(stages, key=stages.get)
    workers = workers or (1 if torch.cuda.is_available() else 2)
    with tqdm(total=len(missing), unit="job", disable=not missing, mininterval=1) as bar, ThreadPoolExecutor(
            workers) as pool:
        for _, stage in itertools.groupby(missing, stages.get):
            for _ in (pool.map if workers > 1 else map)(tried, stage):
                bar.update()
    print("".join(f"{place}: {error}\n" for place, error in failed.items()), end="", file=sys.stderr)
    return failed


def do(job):
    """Do a job in a separate process. Raises ValueError if it fails."""
    name, *rest = job.words
    for before in job.after:
        if not (before.place / "meta.json").exists():
            raise ValueError(f"{before.place} is not there: its own job failed, see above")
    threads = {} if torch.cuda.is_available() else {"OMP_NUM_THREADS": "1"}             # two jobs at a time
    output = output_of(name, *(flags_to_finish(job.place, rest) if name == "train.py" else rest), **threads)
    if name == "eval.py":
        files.write_json(job.place, {"words": job.words, "found": json.loads(output)})
