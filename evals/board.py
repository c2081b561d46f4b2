"""The board: every recipe on the same text, with the same model and the same number of tokens.

A run is RECIPE@board-RATE of lab_runs.toml: the byte model of the preset tiny, on the sources of Python's library. With
one further seed, each recipe chooses its learning rate among three: a rule must not lose because softmax's rate is not
its own. The other seeds are trained at that rate, and other commands measure them. Finished runs are rows of
results/board.json. The command adds those that are missing, and can be stopped and repeated at any time.
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from common import files
from common.flags import knob
from common.runs import ROOT
from evals.instrument import legend, markdown, recipe_names, whole_numbers
from evals.jobs import Place, all_jobs, do_all, result_of
from evals.lab_runs import SEEDS
from evals.ledger.experiments import job_of
from evals.ledger.quantities import interval
from evals.measures import MEASURES, printed

RATES, TRIAL = ("2e-3", "4e-3", "8e-3"), 1      # the learning rates, and the seed that chooses among them
FIGURES = {                                     # of a run: {column: (a command of lab_runs.toml, where in its numbers)}
    "bits": ("board-loss", "bits_per_byte"), "2x": ("board-lengths", "lengths 1 more"),
    "4x": ("board-lengths", "lengths 2 more"), **{measure: ("board-probe", f"lengths 0 {measure}") for measure in (
        "sink", "density", "sparsity", "empty_rows", "massive")}, "dispersion": ("board-probe", "lengths 1 dispersion")}
KEPT = "parameters", "seconds", "machine", "versions", "data_hash"         # of meta.json
MEANINGS = {
    "rate": "the best of three learning rates", "bits": "bits per byte of the validation split, in windows of 256",
    "over softmax": "95 % interval of bits less softmax's of the same seed", "2x": "nats a byte more in windows of 512",
    "4x": "the same of 1,024", "massive": "norm of the first token's hidden state over the others'",
    "dispersion": f"{MEASURES['dispersion']}, in windows of 1,024"}


@dataclass
class Board:
    """Flags of board"""
    attn: str = knob("all", "recipes, separated by commas")
    seeds: str = knob(SEEDS, "seeds, separated by commas; empty: train nothing, show what is there")
    workers: int = knob(0, "runs at a time; 0: two with one thread each, or one on a GPU")
    out_dir: str = knob("out/board", "folder of the runs")
    results: str = knob("", "file of the rows; empty: results/board.json, or OUT_DIR/board.json with --train_args")
    train_args: str = knob("", "further flags of train.py, separated by spaces, for a trial")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run):
    """Train every recipe on the same text, each at the best of three learning rates, and compare them."""
    file = Path(args.results or (f"{args.out_dir}/board.json" if args.train_args else ROOT / "results/board.json"))
    rows = {(row["recipe"], row["rate"], row["seed"]): row for row in (files.read_json(file) if file.exists() else [])}
    seeds, place = whole_numbers(args.seeds, "seeds") if args.seeds else [], Place(args.out_dir, "", args.train_args)
    names = recipe_names(args.attn)
    for pair in [names[i:i + 2] for i in range(0, len(names), 2)] * bool(seeds):        # so that two workers stay busy
        trials = {(name, rate, TRIAL): () for name in pair for rate in RATES}
        measured(trials, rows, place, args.workers, file)
        best = {name: min(RATES, key=lambda rate: rows[name, rate, TRIAL].get("val", math.inf)) for name in pair}
        looks = dict.fromkeys(look for look, _ in FIGURES.values())
        measured({(name, best[name], seed): looks for seed in seeds for name in pair}, rows, place, args.workers, file)
    return [*rows.values()], text_of(names, rows)


def measured(runs, rows, place, workers, file):
    """Measure those of these runs {(recipe, rate, seed): the commands that look at it} that are missing or failed: add
    them to the rows and the file. A figure is None if its command failed: some positions know no longer windows."""
    missing = {key: looks for key, looks in runs.items() if ("bits" if looks else "val") not in rows.get(key, {})}
    jobs = {(key, look): job_of(f"{key[0]}@board-{key[1]}", look, key[2], place)
            for key, looks in missing.items() for look in ("", *looks)}
    failed = do_all(all_jobs(jobs.values()), workers)
    for key, looks in missing.items():
        row = rows[key] = dict(zip(("recipe", "rate", "seed"), key, strict=True))
        trained = jobs[key, ""]
        if (report := result_of(trained)) is None:
            row["failed"] = failed.get(trained.place, "not finished")
            continue
        meta = files.read_json(trained.place / "meta.json")
        row |= {"val": report["val"]} | {name: meta[name] for name in KEPT}
        for name, (look, path) in FIGURES.items() if looks else ():
            numbers = result_of(jobs[key, look])
            for part in path.split() if numbers else ():
                numbers = numbers[int(part) if part.isdigit() else part]
            row[name] = numbers and float(f"{numbers:.6g}")
    lines = ",\n".join(json.dumps(row) for row in rows.values())        # one line a run
    with files.replacing(file, "w") as f:
        f.write(f"[\n{lines}\n]\n")


def text_of(names, rows):
    """A line for each recipe that has been measured, the best first, and the reasons of failures."""
    groups = {name: {seed: row for (recipe, _, seed), row in rows.items() if recipe == name and "bits" in row}
              for name in dict.fromkeys(["softmax", *names])}
    lines = []
    for name in (name for name in names if groups[name]):
        figures = {column: [row[column] for row in groups[name].values()] for column in FIGURES}
        means = {column: None if None in values else fmean(values) for column, values in figures.items()}
        over = [row["bits"] - groups["softmax"][seed]["bits"] for seed, row in groups[name].items()
                if seed in groups["softmax"] and name != "softmax"]
        rates = {row["rate"] for row in groups[name].values()}
        bits = means.pop("bits")
        lines.append((bits, [name, str(len(groups[name])), *rates, f"{bits:.4f}",
                             "{:+.3f} to {:+.3f}".format(*interval(over)) if len(over) > 1 else "-",
                             *("-" if mean is None else f"{mean:.3f}" for mean in means.values())]))
    table = markdown([cells for _, cells in sorted(lines)], [
        "recipe", "runs", "rate", "bits", "over softmax", *map(printed, [*FIGURES][1:])])
    failures = [f"{recipe} at {rate}, seed {seed}: {row['failed']}" for (recipe, rate, seed), row in rows.items()
                if recipe in names and "failed" in row]
    return "\n\n".join([table, legend(MEANINGS), *failures])
