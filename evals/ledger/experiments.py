"""What the ledger measures: instruments on runs, timings, and the checks and looks that no other instrument makes."""
import re
from pathlib import Path

from evals.jobs import Job, data_job, train_job
from evals.lab_runs import COMMANDS, PUBLIC, TIMED
from evals.ledger import checks, later, routing

CHECKS, LOOKS = checks.CHECKS | routing.CHECKS, checks.LOOKS | routing.LOOKS | later.LOOKS

DATA_OF = {"far": "{data}/long", "dormant": "{data}/smollm2"}           # the data sets that looks read
CONSTANT = {*PUBLIC, *TIMED, "focus_table"}     # without seeds: measured once


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
        f"{look} {base.place} {DATA_OF.get(look, '')}")
    data = re.findall(r"{data}/(\w+)", words)
    words = words.format(data=Path(folders.out_dir) / "data").split()
    file = found / f"{base.place.name}-{look}.json"
    return Job(tuple(words), file, (*(data_job(name, folders) for name in data), base), LOOKS.get(look))


def jobs_of(reading, seeds, folders):
    """{(column, run): [the job of each seed]}."""
    return {(column, run): [job_of(run, path, seed, folders) for seed in seeds]
            for column, (path, runs) in reading.reads.items() for run in runs.split()}
