"""The ledger: what five papers claim, and what this repository finds.

    python eval.py claims                               every claim, its verdict, their figures and ours
    python eval.py claims --show=lazy-sink-gone         one claim whole
    python eval.py claims --run=lab                     measure what is missing of these, or of ID,ID

A claim is a row of data (ledger/lazy.py, threshold.py, focus.py, native_moe.py, emerges.py: one paper each): what is
said and where, their figures, what is read from which runs, and a verdict rule that was fixed before any run.
ledger/experiments.py holds the runs, which claims share, and ledger/checks.py what no other instrument measures.

What was measured stands in results/claims.json, by claim and seed; verdicts are taken from it anew at every call. A
--run that is cut short goes on where it was.
"""
import itertools
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from common.flags import knob
from common.machine import Machine
from common.runs import ROOT, made_by
from data import files
from evals.instrument import pyplot, save_figure, table, whole_numbers
from evals.ledger import emerges, focus, lazy, native_moe, threshold
from evals.ledger.claim import AGREES, CONTRADICTS, COSTS, MIXED, NOT_RUN, UNTESTABLE, VERDICTS
from evals.ledger.experiments import CHECKS, COMMANDS, LOOKS, PUBLIC, TIMED, Place, all_jobs, do, job_of, result_of

PAPERS = {paper.TITLE: paper.CLAIMS for paper in (lazy, threshold, focus, native_moe, emerges)}
CLAIMS = {claim.id: claim for claims in PAPERS.values() for claim in claims}


@dataclass
class ClaimsFlags:
    """Flags of claims"""
    show: str = knob("", "print this claim whole")
    run: str = knob("", f"measure what is missing of a class ({', '.join(COSTS)}), or of claims: ID,ID")
    seeds: str = knob("2,3,4", "seeds, separated by commas")
    workers: int = knob(0, "jobs at a time; 0: two with one thread each, on a GPU one")
    out_dir: str = knob("out/claims", "where the runs go; those that are there are not trained again")
    books: str = knob("books", "folder of texts for gpu-minutes, with a moby-dick among them")
    train_args: str = knob("", "more flags for every train.py, as in '--max_iters=20 --n_layer=2' to try it out")
    results: str = knob("", "the file with what was found; empty: results/claims.json, or with --train_args "
                            "claims.json in out_dir")
    png: str = knob("", "also draw all verdicts into this file")
    json: bool = knob(False, "print JSON instead of text")

    def __post_init__(self):
        whole_numbers(self.seeds, "seeds")
        for name in [*([self.show] if self.show else []), *(self.run.split(",") if self.run else [])]:
            if name not in CLAIMS and not (name in COSTS and name != self.show):
                raise ValueError(f"there is no claim {name!r}: choose from {', '.join([*COSTS, *CLAIMS])}")


def command(args, run):
    """What five papers claim, and what is found here: with --run measured, else as it was found."""
    where = Place(args.out_dir, args.books, args.train_args)
    place = Path(args.results or (f"{args.out_dir}/claims.json" if args.train_args else ROOT / "results/claims.json"))
    results = files.read_json(place) if place.exists() else {"claims": {}}
    if args.run:
        asked = wanted(args.run)
        check_gpu(asked, args)
        measure(asked, args, where, results)
        files.write_json(place, results)
    if args.png:
        draw(args.png, results["claims"])
    verdicts = {name: verdicts_of(claim, results["claims"].get(name, {})) for name, claim in CLAIMS.items()}
    text = shown(CLAIMS[args.show], results, where) if args.show else ledger(results["claims"])
    return results | {"verdicts": verdicts}, text


# ------------------------------------------------------------------------------------------------------ what is asked


def readings(claim):
    """{where: (Reading, its cost class)} of a claim: as it stands (""), in other set-ups, of other runs."""
    found = {"": (claim.reading, claim.cost)} if claim.reading else {}
    for setup in claim.variations:
        moved = {column: (path, " ".join(f"{run}@{setup}" for run in runs.split()))
                 for column, (path, runs) in claim.reading.reads.items()}
        found[setup] = claim.reading._replace(reads=moved), claim.cost
    return found | {name: (reading, cost_of(reading, claim)) for name, reading in claim.elsewhere.items()}


def cost_of(reading, claim):
    """The class of the same question to other runs."""
    runs = " ".join(runs for _, runs in reading.reads.values()).split()
    public, gpu = any(run in PUBLIC for run in runs), any("@gpu" in run for run in runs)
    return "public-weights" if public else "gpu-minutes" if gpu else "lab"


def wanted(text):
    """[(claim, where, Reading)] that --run names: of a class all readings that cost so much, of a claim those that cost
    no more than itself."""
    names, costs = text.split(","), list(COSTS)
    return [(claim, name, reading) for claim in CLAIMS.values() for name, (reading, cost) in readings(claim).items()
            if cost in names or claim.id in names and costs.index(cost) <= costs.index(claim.cost)]


def seeds_of(claim, reading, seeds):
    """Some claims take fewer than there are. Public weights and clocks have none: they are read once."""
    runs = " ".join(runs for _, runs in reading.reads.values()).split()
    return [0] if all(run in PUBLIC or run in TIMED for run in runs) else seeds[:claim.seeds]


def check_gpu(asked, args):
    """Raise ValueError where models would be trained for days."""
    large = any("@gpu" in run for _, _, reading in asked for _, run in reading.reads.values())
    if large and not torch.cuda.is_available() and not args.train_args:
        raise ValueError(f"--run={args.run} trains models of 30M parameters and wants a GPU; to try it without one, "
                         "make them small: --train_args='--n_layer=2 --n_embd=32 --max_iters=3 --eval_interval=3'")


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(asked, args, where, results):
    """Do what is missing for these readings, and put what they read into the results. What fails is named at the end,
    and its claims stay as they were."""
    seeds = whole_numbers(args.seeds, "seeds")
    jobs = {(claim.id, name): jobs_of(reading, seeds_of(claim, reading, seeds), where)
            for claim, name, reading in asked}
    do_all(all_jobs(job for several in jobs.values() for row in several.values() for job in row), args.workers)
    about = made_by() | {"machine": str(Machine())}
    for claim, name, reading in asked:
        numbers = numbers_of(reading, jobs[claim.id, name])
        if numbers:
            found = {**about, "seeds": seeds_of(claim, reading, seeds), "numbers": numbers}
            results["claims"].setdefault(claim.id, {})[name] = found


def jobs_of(reading, seeds, where):
    """{(column, run): [the job of each seed]}."""
    return {(column, run): [job_of(run, path, seed, where) for seed in seeds]
            for column, (path, runs) in reading.reads.items() for run in runs.split()}


def do_all(jobs, workers):
    """What of these is missing, some at a time, each after what it needs."""
    missing = [job for job in jobs if result_of(job) is None]
    workers = workers or (1 if torch.cuda.is_available() else 2)
    depths, failed = {job: depth(job) for job in missing}, []
    missing.sort(key=depths.get)
    with tqdm(total=len(missing), unit="job", disable=not missing, mininterval=1) as bar, ThreadPoolExecutor(
            workers) as pool:
        for _, stage in itertools.groupby(missing, depths.get):
            for error in (pool.map if workers > 1 else map)(tried, stage):
                failed += [error] if error else []
                bar.update()
    print("".join(f"{error}\n" for error in failed), end="", file=sys.stderr)


def depth(job):
    """How many jobs come before it, one after another."""
    return 1 + max(map(depth, job.after), default=0)


def tried(job):
    """Do it; what went wrong, or None."""
    try:
        do(job)
    except (ValueError, OSError) as e:
        return str(e)


def numbers_of(reading, jobs):
    """{column: {run: [what each seed's job found at the path]}}, or None while some is missing."""
    found = {}
    for (column, run), group in jobs.items():
        results = [result_of(job) for job in group]
        if None in results:
            return None
        path = reading.reads[column][0]
        found.setdefault(column, {})[run] = [rounded(value_at(result, path, job))
                                             for result, job in zip(results, group, strict=True)]
    return found


def value_at(found, path, job):
    """What a job's result has at this path of names and numbers, whose first may be the name of its look; * is every
    item of a list that has what follows. Raises ValueError where there is nothing."""
    def down(found, steps):
        if not steps:
            return found
        if steps[0] == "*":                     # after the last layer, the stream has no values
            return [down(item, steps[1:]) for item in found if steps[1] in item]
        return down(found[int(steps[0]) if isinstance(found, list) else steps[0]], steps[1:])
    steps = path.split("/")
    try:
        return down(found, steps[1:] if steps[0] in COMMANDS or steps[0] in LOOKS else steps)
    except (KeyError, IndexError, ValueError):
        raise ValueError(f"{job.place} has nothing at {path}: it is of another version, remove it and measure "
                         "again") from None


def rounded(value):
    """A number or a list of them, to six digits."""
    return [rounded(item) for item in value] if isinstance(value, list) else float(f"{value:.6g}")


# ------------------------------------------------------------------------------------------------------------- verdicts


def verdicts_of(claim, found):
    """{where: verdict} of a claim, from what was found of it."""
    judged = {name: judge(reading, found[name]["numbers"]) for name, (reading, _) in readings(claim).items()
              if name in found}
    return {"": NOT_RUN} | judged


def judge(reading, numbers):
    """The verdict on numbers {column: {run: [a value for each seed]}}, which have the setup in their runs' names."""
    arrays = {column: {run.split("@")[0]: np.array(values, float) for run, values in group.items()}
              for column, group in numbers.items()}
    return reading.verdict(arrays)


def flips(verdicts):
    """Where the verdict is another one than of the claim as it stands, or the only one."""
    return {name: verdict for name, verdict in verdicts.items() if verdict != verdicts[""]}


# -------------------------------------------------------------------------------------------------------------- as text


WIDTH, HANGING = 118, " " * 26


def ledger(found):
    """All claims, a paper after the other: the verdict, what is said, their figures, ours."""
    parts = []
    for title, claims in PAPERS.items():
        verdicts = [verdicts_of(claim, found.get(claim.id, {})) for claim in claims]
        parts.append(f"{title}: {counted(verdicts)}")
        parts += [row(claim, verdict, found.get(claim.id, {})) for claim, verdict in zip(claims, verdicts, strict=True)]
    everything = [verdicts_of(claim, found.get(claim.id, {})) for claim in CLAIMS.values()]
    return "\n\n".join([*parts, f"all {len(CLAIMS)} claims: {counted(everything)}"])


def counted(verdicts):
    """How many of each verdict there are, as text."""
    here = [verdict[""] for verdict in verdicts]
    return ", ".join(f"{here.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in here)


def row(claim, verdicts, found):
    """One claim in some lines."""
    lines = [f"{verdicts['']:<13} {claim.id}", hanging("claim", claim.says), hanging("theirs", claim.theirs)]
    if "" in found:
        lines.append(hanging("ours", summary(found[""])))
    elif claim.reading:
        lines.append(hanging("ours", f"takes {claim.cost}: python eval.py claims --run={claim.id}"))
    else:
        lines.append(hanging("ours", f"{claim.cost}: {claim.rule}"))
    for name in [name for name in verdicts if name]:
        lines.append(hanging("but" if "" in found and name in flips(verdicts) else "also",
                             f"{name}: {verdicts[name]}; {summary(found[name])}"))
    return "\n".join(lines)


def hanging(label, text):
    """A label and a text of several lines to the right of it."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:>24}  ", subsequent_indent=HANGING)


def summary(found, most=6):
    """The first columns, means over seeds: raw: softmax 0.97, elastic 0.001; mass: ... (seeds 2, 3, 4)."""
    parts = [f"{column}: " + ", ".join(f"{named(run)}{mean_of(values)}" for run, values in group.items())
             for column, group in itertools.islice(found["numbers"].items(), most)]
    seeds = ", ".join(map(str, found["seeds"])) if any(found["seeds"]) else ""
    more = "; ..." if len(found["numbers"]) > most else ""
    return "; ".join(parts) + more + (f" (seed{'s' * (len(found['seeds']) > 1)} {seeds})" if seeds else "")


def named(run):
    """A recipe's name before its number; of a check, which has but one, none."""
    return "" if run in CHECKS or run in TIMED or run in PUBLIC else f"{run.split('@')[0]} "


def mean_of(values):
    """The mean over seeds; of a list its numbers, of a long one the least and the largest."""
    mean = np.mean(np.array(values, float), 0).ravel()
    return ", ".join(f"{x:.3g}" for x in mean) if len(mean) <= 4 else f"{mean.min():.3g} to {mean.max():.3g}"


def shown(claim, results, where):
    """One claim whole: the text, their figures, the rule, the verdict wherever it was asked, numbers by seed, and the
    commands."""
    found = results["claims"].get(claim.id, {})
    verdicts = verdicts_of(claim, found)
    parts = [f"{claim.id}: {verdicts['']}", hanging("claim", claim.says), hanging("place", claim.place),
             hanging("theirs", claim.theirs), hanging("rule", claim.rule),
             hanging("cost", f"{claim.cost}: {COSTS[claim.cost]}")]
    parts += [hanging("note", claim.note)] if claim.note else []
    for name, (reading, _) in readings(claim).items():
        jobs = jobs_of(reading, seeds_of(claim, reading, found.get(name, {}).get("seeds", [2])), where)
        parts.append(f"\n{name or 'as it stands'}: {verdicts.get(name, NOT_RUN)}\n")
        parts += [by_seed(found[name])] if name in found else []
        parts += [f"\n{commands(claim, jobs)}"]
    return "\n".join(parts)


def by_seed(found):
    """Every number, a column a seed."""
    rows = [[column, run, *(mean_of([value]) for value in values)]
            for column, group in found["numbers"].items() for run, values in group.items()]
    seeds = [f"seed {seed}" if seed else "" for seed in found["seeds"]]
    made = f"commit {(found['git_commit'] or 'unknown')[:9]}, {found['machine']}"
    return f"{table(rows, ['', 'run', *seeds])}\n{made}"


def commands(claim, jobs):
    """The commands of the first seed, in their order, and what is measured by this one itself."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if job.words[0].endswith(".py")]
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if not job.words[0].endswith(".py")))
    return "\n".join(lines + [f"python eval.py claims --run={claim.id}     {own}: evals/ledger/"] * bool(own))


# --------------------------------------------------------------------------------------------------------- the picture


COLOURS = {AGREES: "#2c6fb3", MIXED: "#efc25a", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#e3e3e3"}


def draw(path, found):
    """All claims, a column a paper, a square for the verdict; a small one beside it where another set-up flips it."""
    figure, axes = pyplot().subplots(1, len(PAPERS), figsize=(16, 0.9 + 0.36 * max(map(len, PAPERS.values()))))
    for ax, (title, claims) in zip(axes, PAPERS.items(), strict=True):
        for y, claim in enumerate(claims):
            verdicts = verdicts_of(claim, found.get(claim.id, {}))
            ax.scatter(0, y, s=190, marker="s", color=COLOURS[verdicts[""]])
            for x, verdict in enumerate(dict.fromkeys(flips(verdicts).values())):
                ax.scatter(0.075 + 0.05 * x, y, s=36, marker="s", color=COLOURS[verdict])
            ax.text(0.17, y, claim.id, va="center", fontsize=9.5, color="0.55" if verdicts[""] == NOT_RUN else "0.1")
        ax.set_title(title, fontsize=11, loc="left")
        ax.set(xlim=(-0.05, 1), ylim=(max(map(len, PAPERS.values())) - 0.4, -0.7))
        ax.set_axis_off()
    handles = [axes[0].scatter([], [], s=120, marker="s", color=colour, label=name) for name, colour in COLOURS.items()]
    handles.append(axes[0].scatter([], [], s=36, marker="s", color="0.3", label="small: elsewhere otherwise"))
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False, fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save_figure(figure, path)
