"""The ledger: the claims of five papers, and our result for each.

    python eval.py claims                               counts, surprises, and one line for each claim
    python eval.py claims --show=lazy-sink-gone         one claim: its verdict, its bounds and our numbers
    python eval.py claims --show=lazy-sink-gone --all   everything about it, with each seed and the commands
    python eval.py claims --run=lab                     measure the missing numbers of a cost class, or of ID,ID@SETUP
    python eval.py claims --run=lazy-sink-gone@ --seeds=31 --results=out/mine.json      as written, with your own seed
    python eval.py claims --pages=results/claims        write a page with a picture for each paper

A claim is a table in the file of its paper, such as ledger/lazy.toml: the paper's statement and figures, the numbers to
read from our runs, and the bounds that decide it. ledger/claim.py reads and judges them; quantities.py computes what is
more than a column. lab_runs.toml has the runs and what is measured on them, jobs.py runs both, and ledger/view.py
prints the results.

results/claims.json stores the numbers by claim and seed, and every call computes the verdicts from them. Repeat an
interrupted --run to continue it. A --run with other seeds adds these seeds. With --results it leaves the committed
numbers alone, and prints both verdicts. results/claims-again.json has the decided rows of the lab with ten new seeds.
Where all ten exist, they decide.
"""
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from common import files
from common.flags import knob, nearest
from common.machine import Machine
from common.runs import ROOT, made_by
from evals.instrument import whole_numbers
from evals.jobs import Place, all_jobs, do_all, result_of
from evals.lab_runs import OUT_DIR, SEEDS
from evals.ledger import view
from evals.ledger.claim import CLAIMS, COSTS, NOT_RUN, judge, verdicts_of
from evals.ledger.experiments import COMMANDS, LOOKS, TIMED, jobs_of

draw = view.draw
COMMITTED = ROOT / "results/claims.json"
AGAIN = ROOT / "results/claims-again.json"      # --run=ID@ --seeds=40,41,..,49 --results=results/claims-again.json
NEW_SEEDS = range(40, 50)
COMMA = ",(?! )"                                # between names; one before a space is part of a reading's name


@dataclass
class ClaimsFlags:
    """Flags of claims"""
    show: str = knob("", "print the verdict, the bounds and our numbers of this claim")
    all: bool = knob(False, "with --show: print everything else about it")
    run: str = knob("", f"measure the missing numbers of a cost class ({', '.join([*COSTS][:-1])}) or of claims "
                        "(ID,ID); ID@SETUP names one reading of a claim, ID@ the claim as written")
    pages: str = knob("", "write a page for each paper into this folder, with a picture")
    seeds: str = knob(SEEDS, "seeds, separated by commas")
    workers: int = knob(0, "jobs at a time; 0: two with one thread each, or one on a GPU")
    out_dir: str = knob(OUT_DIR, "folder of the runs, shared with lab; finished runs are not trained again")
    books: str = knob("books", "folder of texts for the classes cpu-hours and gpu-minutes; one of them must be "
                                "moby-dick")
    train_args: str = knob("", "further flags for every train.py, such as '--max_iters=20 --n_layer=2' for a trial")
    results: str = knob("", "file of the numbers, to which new ones are added; empty: results/claims.json, or with "
                            "--train_args OUT_DIR/claims.json")
    json: bool = knob(False, "print JSON instead of text")

    def __post_init__(self):
        whole_numbers(self.seeds, "seeds")
        for name, where in [(self.show, ""), *(part.partition("@")[::2] for part in re.split(COMMA, self.run))]:
            if name in CLAIMS and where and where not in CLAIMS[name].readings:
                raise ValueError(f"--run={name}@{where}: {name} has no such reading; it has "
                                 f"{', '.join(filter(None, CLAIMS[name].readings))}")
            if name and name not in CLAIMS and (name not in COSTS or name == self.show):
                more = "" if name == self.show else f"; --run also takes {', '.join([*COSTS][:-1])}"
                raise ValueError(f"there is no claim {name!r}{nearest(name, [*COSTS, *CLAIMS]) or '.'} "
                                 f"python eval.py claims names them all{more}")


def command(args, run):
    """The claims of five papers, and our results: the committed numbers, or with --run new ones."""
    folders = Place(args.out_dir, args.books, args.train_args)
    place = Path(args.results or (f"{args.out_dir}/claims.json" if args.train_args else COMMITTED))
    results = {"claims": stored(place) if place.exists() else {}}
    asked = wanted(args) if args.run else []
    if asked:
        measure(asked, args, folders, results)
        files.write_json(place, results)
    found, first = results["claims"], {}
    if place.resolve() == COMMITTED.resolve():
        found, first = with_new_seeds(found, stored(AGAIN))
    verdicts = verdicts_of(found)
    if args.pages:
        view.write_pages(Path(args.pages), found, verdicts, first)
    if args.show:
        claim, here = CLAIMS[args.show], found.get(args.show, {})
        more = view.details(claim, here, folders) if args.all else "--all adds the rest: notes, seeds, commands"
        text = f"{view.section(claim, here, verdicts[claim.id], first.get(claim.id), words=args.all)}\n\n{more}"
    else:
        text = view.ledger(verdicts, first, {claim.id for claim, *_ in asked} or CLAIMS.keys())
    if asked and place.resolve() != COMMITTED.resolve():
        text += (f"\n{compared(asked, found, stored(COMMITTED))}\n\nnext:  python eval.py claims "
                 f"--show={asked[0][0].id} --results={place}    these numbers beside the bounds")
    return results | {"verdicts": verdicts}, text


def compared(asked, found, committed):
    """A line for each of these readings: its verdict on the numbers found and on the committed ones."""
    def verdict(here, reading):
        return f"{judge(reading, here['numbers'])} ({view.said_seeds(here)})".removesuffix(" ()") if here else NOT_RUN
    return "\n".join(f"{claim.id}{where and ', '}{where}: " + "; committed: ".join(
        verdict(numbers.get(claim.id, {}).get(where), reading) for numbers in (found, committed))
        for claim, where, reading in asked)


def with_new_seeds(found, again):
    """The numbers, replaced by those of `again` where all ten new seeds exist, and {claim: its verdict as written, by
    the first seeds} of the claims that this changes."""
    new = {name: ready for name, here in again.items() if name in found and (
        ready := {where: numbers for where, numbers in here.items() if set(numbers["seeds"]) >= {*NEW_SEEDS}})}
    before = verdicts_of(found) if new else {}
    return found | {name: found[name] | ready for name, ready in new.items()}, {
        name: before[name][""] for name in new}


def stored(place):
    """{claim: {where: numbers}} of a file of results. Raises ValueError if it is damaged."""
    content = files.read_json(place)
    try:
        verdicts_of(content["claims"])          # raises if they are not numbers
        return content["claims"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise ValueError(f"{place} holds no results of claims: restore it, or name another file by --results") from None


def wanted(args):
    """The readings that --run names, [(claim, where, Reading)]: all readings of a cost class, one reading ID@SETUP, or
    those of a claim that cost no more than the claim. Without a GPU no timings, and large models only if --train_args
    make them small. Raises ValueError if nothing is left to measure."""
    names, costs = re.split(COMMA, args.run), list(COSTS)
    asked = [(claim, where, reading) for claim in CLAIMS.values() for where, reading in claim.readings.items()
             if claim.cost_of(where) in names or f"{claim.id}@{where}" in names or (
                 claim.id in names and costs.index(claim.cost_of(where)) <= costs.index(claim.cost))]
    if not asked:
        raise ValueError(f"--run={args.run} has nothing to measure, because it is out of reach: --show=ID says why")
    if torch.cuda.is_available():
        return asked
    possible = [row for row in asked if TIMED.keys().isdisjoint(row[2].runs) and (
        args.train_args or not any("@gpu" in run for run in row[2].runs))]
    if not possible:
        raise ValueError(f"--run={args.run} times kernels or trains models of 30M parameters and wants a GPU; to try "
                         "small models, add --train_args='--n_layer=2 --n_embd=32 --n_head=4 --max_iters=3 "
                         "--eval_interval=3'")
    if left_out := [f"{claim.id}@{where}" for claim, where, _ in asked if (claim, where, _) not in possible]:
        print(f"left out, because they need a GPU: {', '.join(left_out)}", file=sys.stderr)
    return possible


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(asked, args, folders, results):
    """Do the missing jobs of these readings, and put their numbers into the results. If jobs fail, the end of the
    output names them, and their claims keep their old numbers."""
    seeds = whole_numbers(args.seeds, "seeds")
    jobs = [jobs_of(reading, claim.seeds_of(reading, seeds), folders) for claim, _, reading in asked]
    needed = [all_jobs(job for row in group.values() for job in row) for group in jobs]
    do_all(all_jobs(job for every in needed for job in every), args.workers)
    about = made_by()
    for (claim, where, reading), group, every in zip(asked, jobs, needed, strict=True):
        try:
            numbers = numbers_of(reading, group)
        except ValueError as e:                 # one claim without numbers must not stop the others
            print(e, file=sys.stderr)
            continue
        if numbers:
            machines = sorted({files.read_json(job.place / "meta.json")["machine"] for job in every
                               if job.words[0] == "train.py"})
            found = {**about, "machine": " and ".join(machines) or str(Machine()), "version": claim.version,
                     "seeds": claim.seeds_of(reading, seeds), "numbers": numbers}
            kept = results["claims"].setdefault(claim.id, {})
            kept[where] = merged(kept[where], found) if where in kept else found


def merged(old, new):
    """Old and new numbers by seed; the new ones win. "earlier" says where the old ones were measured."""
    stay = [seed for seed in old["seeds"] if seed not in new["seeds"]]
    if not stay:
        return new

    def both(column, run):                      # sorted by seed
        kept, found = (dict(zip(part["seeds"], part["numbers"][column][run], strict=True)) for part in (old, new))
        return [value for _, value in sorted((kept | found).items())]
    numbers = {column: {run: both(column, run) for run in group} for column, group in new["numbers"].items()}
    earlier = {name: value for name, value in old.items() if name != "numbers"} | {"seeds": stay}
    return new | {"seeds": sorted(stay + new["seeds"]), "numbers": numbers, "earlier": earlier}


def numbers_of(reading, jobs):
    """{column: {run: [the number at the path for each seed]}}, or None if a job is not done."""
    found = {column: {} for column in reading.reads}
    for (column, run), group in jobs.items():
        results = [(result_of(job), reading.reads[column][0], job) for job in group]
        if any(result is None for result, *_ in results):
            return None
        found[column][run] = [rounded(value_at(*result)) for result in results]
    return found


def value_at(found, path, job):
    """The value at a path of names and indices in a job's result; the first name may be that of its command or look. *
    selects every item of a list that has the next name. Raises ValueError if there is no such value."""
    def down(found, step="", *steps):
        if step == "*":                         # the stream after the last layer has fewer names
            return [down(item, *steps) for item in found if steps[0] in item]
        if isinstance(found, list) and ", " in step:                    # an ablation: what, in which heads
            found = {f"{item['what']}, {item['where']}": item for item in found}
        return down(found[int(step) if isinstance(found, list) else step], *steps) if step else found
    first, *rest = path.split("/")
    try:
        return down(found, *rest) if first in COMMANDS or first in LOOKS else down(found, first, *rest)
    except (KeyError, IndexError, ValueError, TypeError):               # TypeError: None in place of a list
        raise ValueError(f"{job.place} has nothing at {path}: another version wrote it, so remove it and "
                         "measure again") from None


def rounded(value):
    """A number or a list of them, to six digits; None stays None."""
    if isinstance(value, list):
        return [*map(rounded, value)]
    return None if value is None else float(f"{value:.6g}")
