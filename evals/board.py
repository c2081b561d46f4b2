"""The board: every recipe on the same text, with the same model and the same number of tokens.

With a seed of its own, each recipe chooses its learning rate among three; with the other seeds it is trained at that
rate, and other commands measure these runs. Finished runs are rows of results/board.json, or of a file of your own. The
command adds those that are missing. docs/board.md says why, and evals/board_page.py makes its tables and pictures.
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path

from attention import recipe
from common import files
from common.flags import Knobs, knob
from common.runs import ROOT, output_of
from evals.board_page import TRIAL, by_seed, ladder_of, layers_of, table_of, text_of, words_of, write_pages
from evals.instrument import recipe_names, whole_numbers
from evals.jobs import Place, all_jobs, do_all, look_job, result_of, train_job
from evals.lab_runs import COMMANDS, RECIPES, SEEDS, SETUPS, TIMED

RATES = [setup.removeprefix("board-") for setup in SETUPS if setup.startswith("board-")]
LADDER = "softmax", "gated", "elastic", "lazy", "softpick", "sigmoid", "entmax", "tda", "gated_deltanet", "hybrid"
FIGURES = {                                     # {column: (a command of lab_runs.toml, the part of its numbers)}
    "bits": ("board-loss", lambda found: found["bits_per_byte"]),
    "2x": ("board-lengths", lambda found: found["lengths"][1]["more"] / math.log(2)),
    "4x": ("board-lengths", lambda found: found["lengths"][2]["more"] / math.log(2)),
    **{measure: ("board-probe", lambda found, measure=measure: found["lengths"][0][measure]) for measure in (
        "sink", "density", "sparsity", "empty_rows")},
    "dispersion": ("board-probe", lambda found: found["lengths"][1]["dispersion"]),
    # in each layer, the largest channel: its number, its value, and this over the median
    "massive": ("board-probe", lambda found: max(place["channels"][0][2] for place in found["stream"]))}
KEPT = "parameters", "seconds", "machine", "versions", "data_hash"         # of meta.json


@dataclass
class Board(Knobs):
    """Flags of board"""
    attn: str = knob("all", "recipes, also those of lab_runs.toml, separated by commas")
    seeds: str = knob(SEEDS, "seeds, separated by commas; empty: train nothing, show what is there")
    rates: str = knob("2e-3,4e-3,8e-3", "learning rates to try, separated by commas")
    also: str = knob("steps,ladder", "further runs: steps (softmax, with fewer and more steps), ladder, words "
                                     "(softmax and the ten best of these recipes, on --books); empty: none")
    books: str = knob("books", "folder with text files for words, one of them moby-dick")
    workers: int = knob(0, "runs at a time; 0: two with one thread each, or one on a GPU")
    out_dir: str = knob("out/board", "folder of the runs")
    results: str = knob("", "file of the rows; empty: OUT_DIR/board.json, beside those of results/board.json. With "
                         "--results=results/board.json docs/board.md and README get new tables and pictures")
    train_args: str = knob("", "further flags of train.py, separated by spaces, for a trial or for larger models")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run):
    """Train every recipe on the same text, each at the best of three learning rates, and compare them."""
    further, rates = further_setups(args.also), args.rates.split(",")
    if args.train_args and args.out_dir == Board.out_dir:
        raise ValueError("--train_args makes other runs: give them a folder of their own with --out_dir")
    if "words" in further and args.seeds and not Path(args.books).is_dir():
        raise ValueError(f"--also=words needs a folder with texts, and {args.books} is none: name it with --books")
    if unknown := [rate for rate in rates if rate not in RATES]:
        raise ValueError(f"--rates={unknown[0]}: choose from {', '.join(RATES)}")
    names = [*recipe_names("all"), "hybrid"] if args.attn == "all" else args.attn.split(",")
    for name in (name for name in names if name not in RECIPES):
        recipe(name)                            # raises ValueError
    file = Path(args.results or f"{args.out_dir}/board.json")
    others = {} if args.results or args.train_args else read_rows(ROOT / "results/board.json")
    rows = (read_rows(file) if file.exists() else {}) | others
    if not rows and not args.seeds:
        raise ValueError(f"--seeds= trains nothing, and {file} is not there")

    def best(name, setup=""):                   # the rate with the lowest loss among those tried; for -lower, the next
        rate = min(rates + RATES, key=lambda rate: rows.get((name, f"board-{rate}", TRIAL), {}).get("val", math.inf))
        return RATES[max(0, RATES.index(rate) - 1)] if setup.endswith("-lower") else rate

    def save():
        lines = ",\n".join(json.dumps(row) for key, row in rows.items() if others.get(key) != row)   # one line a run
        with files.replacing(file, "w") as f:
            f.write(f"[\n{lines}\n]\n")

    if seeds := whole_numbers(args.seeds, "seeds") if args.seeds else []:
        if TRIAL in seeds:
            raise ValueError(f"--seeds={args.seeds}: {TRIAL} only chooses the learning rate, so give others")
        add_costs(names, rows)                  # alone, before anything trains
        save()
        for runs in base_runs(names, seeds, rates, best):
            add_runs(runs, rows, best, args)
            save()
            check_text(runs, rows)
        first = [name for name in table_of(by_seed(rows, best), rows) if name in names]
        for setup in further:
            add_runs(runs_of(setup, names, first, seeds), rows, best, args)
            save()
    runs = by_seed(rows, best)
    table = table_of(runs, rows)
    ladder, words = ladder_of(runs), words_of(runs, table)
    if file.resolve() == ROOT / "results/board.json":
        write_pages(table, ladder, words)
    found = {"runs": [*rows.values()], "table": table, "ladder": ladder, "words": words}
    return found, text_of(table, ladder, words, rows)


def check_text(runs, rows):
    """Raise ValueError if one of these runs is on another text than all of softmax's."""
    known = {row.get("data_hash") for (name, setup, _), row in rows.items()
             if name == "softmax" and setup.startswith("board-")} - {None}
    for name, setup, seed in runs:
        text = rows[name, setup, seed].get("data_hash")
        if known and text and text not in known:
            raise ValueError(f"{name} is on another text than softmax: your Python has other sources. Train both on "
                             f"them, with --attn=softmax,{name} --results=out/own.json")


def read_rows(file):
    return {(row["recipe"], row["setup"], row["seed"]): row for row in files.read_json(file)}


def further_setups(also):
    """The set-ups of --also. Raises ValueError on other words."""
    kinds = {kind: [setup for setup in SETUPS if setup.partition("-")[0] == kind]
             for kind in ("steps", "ladder", "words")}
    known = kinds | {setup: [setup] for setups in kinds.values() for setup in setups}
    if unknown := [name for name in also.split(",") if also and name not in known]:
        raise ValueError(f"--also={unknown[0]}: choose from {', '.join(known)}")
    return sum((known[name] for name in also.split(",") if also), [])


def base_runs(names, seeds, rates, best):
    """Yield the runs of the base table, two recipes at a time, which keep two workers busy, as {(recipe, set-up, seed):
    the commands that look at it}."""
    for pair in (names[i:i + 2] for i in range(0, len(names), 2)):
        yield {(name, f"board-{rate}", TRIAL): () for name in pair for rate in rates}
        yield {(name, f"board-{best(name)}", seed): COMMANDS for seed in seeds for name in pair}


def runs_of(setup, names, first, seeds):
    """The runs of a further set-up, as those of base_runs. first: these recipes by their bits in the base table."""
    recipes = [name for name in ("softmax",) if name in names]
    if setup.startswith("ladder"):
        recipes, seeds = [name for name in LADDER if name in names], seeds[:2]
    elif setup == "words":                      # with softmax, to which the others are compared
        recipes = ["softmax", *[name for name in first if name != "softmax"][:10]]
    return {(name, setup, seed): ["board-loss"] for seed in seeds for name in recipes}


def add_costs(names, rows):
    """Add rows with what recipes cost: the speed of a training step relative to softmax, and the KiB of keys, values or
    state that a new token reads after 4,096 others, four times those of the first layer (None: it cannot be decoded).
    If the measurement fails, each recipe is measured alone: a rule of a user's own may be the reason."""
    names = [name for name in dict.fromkeys(sum(map(layers_of, names), []))
             if "speed" not in rows.get((name, "cost", 0), {})]
    if not names:
        return
    try:
        steps, caches = (json.loads(output_of(
            "eval.py", *TIMED[look].split(), f"--attn={','.join(names)}", "--json", OMP_NUM_THREADS="1"))
            for look in ("board-speed", "board-cache"))
    except ValueError as e:
        rows[names[0], "cost", 0] = {"recipe": names[0], "setup": "cost", "seed": 0, "failed": str(e)}
        for name in names if names[1:] else ():
            add_costs([name], rows)
        return
    for name in names:
        speed = 1 if name == "softmax" else steps["lengths"]["256"][name]["step"]
        cache = caches["lengths"]["4096"].get(name)
        rows[name, "cost", 0] = {"recipe": name, "setup": "cost", "seed": 0, "speed": round(speed, 3),
                                 "kib": cache and 4 * cache["bytes"] / 1024, "machine": steps["machine"]}


def add_runs(runs, rows, best, args):
    """Measure those of these runs {(recipe, setup, seed): the commands that look at it} that are missing or failed, and
    add them to the rows. A figure is None if its command failed: some positions know no longer windows."""
    jobs, missing = {}, {}
    for (name, setup, seed), looks in runs.items():
        row, its_rate = rows.get((name, setup, seed), {}), setup.partition("board-")[2]     # only in the base table
        rate = its_rate or best(name, setup)
        flags = args.train_args if its_rate else f"{args.train_args} --learning_rate={rate}"
        run, place = f"{name}@{setup}", Place(args.out_dir, args.books, flags)
        found = {"": train_job(run, seed, place)} | {look: look_job(look, run, seed, place) for look in looks}
        again = "failed" in row and found[""].place.exists()            # its run is here, so only commands are repeated
        if again or row.get("bits" if looks else "val") is None or row["rate"] != rate:
            jobs[name, setup, seed], missing[name, setup, seed] = found, rate
    failed = do_all(all_jobs(job for found in jobs.values() for job in found.values()), args.workers)
    for (name, setup, seed), rate in missing.items():
        trained, found = jobs[name, setup, seed].pop(""), jobs[name, setup, seed]
        rows[name, setup, seed] = row = {"recipe": name, "setup": setup, "rate": rate, "seed": seed}
        reasons = [failed[job.place] for job in (*trained.after, trained, *found.values()) if job.place in failed]
        row |= {"failed": reasons[0]} if reasons else {}
        if (report := result_of(trained)) is None:
            row.setdefault("failed", "not finished")
            continue
        meta = files.read_json(trained.place / "meta.json")
        row |= {"val": report["val"], "steps": meta["losses"]["step"]} | {key: meta[key] for key in KEPT}
        for column, (look, figure) in FIGURES.items():
            if look in found:
                numbers = result_of(found[look])
                value = None if numbers is None else figure(numbers)
                row[column] = float(f"{value:.6g}") if value is not None and math.isfinite(value) else None
