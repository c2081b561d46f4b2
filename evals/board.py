"""The board: every recipe on the same text, with the same model and the same number of tokens.

The base table has the byte model of the preset tiny, on the sources of Python's library. With one further seed, each
recipe chooses its learning rate among three: a rule must not lose because softmax's rate is not its own. At that rate
it is trained with the other seeds, and other commands measure these runs. `also` adds softmax with fewer and more
steps, which tells what softmax reaches in the time that a slower recipe takes, and the ladder: ten recipes in smaller
and larger models, with tokens in proportion to parameters.

Finished runs are rows of results/board.json, or of a file of your own. The command adds those that are missing, and
can be stopped and repeated at any time. evals/board_page.py makes the tables, the pictures and the page for a browser.
"""
import json
import math
from dataclasses import dataclass
from pathlib import Path

from attention import recipe
from common import files
from common.flags import knob
from common.runs import ROOT, output_of
from evals.board_page import TRIAL, by_seed, ladder_of, table_of, text_of, write_pages
from evals.instrument import recipe_names, whole_numbers
from evals.jobs import Place, all_jobs, do_all, result_of
from evals.lab_runs import COMMANDS, RECIPES, SEEDS, SETUPS, TIMED
from evals.ledger.experiments import job_of

RATES = "2e-3", "4e-3", "8e-3"                  # the seed TRIAL chooses among these learning rates
LADDER = "softmax", "gated", "elastic", "lazy", "softpick", "sigmoid", "entmax", "tda", "gated_deltanet", "hybrid"
FIGURES = {                                     # {column: (a command of lab_runs.toml, the part of its numbers)}
    "bits": ("board-loss", lambda found: found["bits_per_byte"]),
    "2x": ("board-lengths", lambda found: found["lengths"][1]["more"] / math.log(2)),
    "4x": ("board-lengths", lambda found: found["lengths"][2]["more"] / math.log(2)),
    **{measure: ("board-probe", lambda found, measure=measure: found["lengths"][0][measure]) for measure in (
        "sink", "density", "sparsity", "empty_rows")},
    "dispersion": ("board-probe", lambda found: found["lengths"][1]["dispersion"]),
    "massive": ("board-probe", lambda found: max(place["channels"][0][2] for place in found["stream"]))}
LOOKS = [name for name in COMMANDS if name.startswith("board-")]
KEPT = "parameters", "seconds", "machine", "versions", "data_hash"         # of meta.json


@dataclass
class Board:
    """Flags of board"""
    attn: str = knob("all", "recipes, also those of lab_runs.toml, separated by commas")
    seeds: str = knob(SEEDS, "seeds, separated by commas; empty: train nothing, show what is there")
    also: str = knob("steps,ladder", "further runs: steps (softmax, with fewer and more steps), ladder; empty: none")
    workers: int = knob(0, "runs at a time; 0: two with one thread each, or one on a GPU")
    out_dir: str = knob("out/board", "folder of the runs")
    results: str = knob("", "file of the rows; empty: OUT_DIR/board.json, beside those of results/board.json. With "
                         "--results=results/board.json docs/board.md and README get new tables and pictures")
    train_args: str = knob("", "further flags of train.py, separated by spaces, for a trial")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run):
    """Train every recipe on the same text, each at the best of three learning rates, and compare them."""
    committed, file = ROOT / "results/board.json", Path(args.results or f"{args.out_dir}/board.json")
    sources = filter(Path.exists, [file] if args.results or args.train_args else [file, committed])
    rows = {(row["recipe"], row["setup"], row["seed"]): row for source in sources for row in files.read_json(source)}
    seeds = whole_numbers(args.seeds, "seeds") if args.seeds else []
    names = [*recipe_names("all"), "hybrid"] if args.attn == "all" else args.attn.split(",")
    for name in (name for name in names if name not in RECIPES):
        recipe(name)                            # raises ValueError

    def best(name):                             # the learning rate with the lowest loss
        return min(RATES, key=lambda rate: rows.get((name, f"board-{rate}", TRIAL), {}).get("val", math.inf))

    def save():
        lines = ",\n".join(json.dumps(row) for row in rows.values())    # one line a run
        with files.replacing(file, "w") as f:
            f.write(f"[\n{lines}\n]\n")

    if seeds:
        add_costs([name for name in names if name not in RECIPES], rows)        # alone, before anything trains
        save()
        for runs in plan(names, seeds, args.also, best):
            add_runs(runs, rows, best, args)
            save()
    runs = by_seed(rows, best)
    table, ladder = table_of(runs, rows), ladder_of(runs)
    if file.resolve() == committed:
        write_pages(table, ladder)
    return {"runs": [*rows.values()], "table": table, "ladder": ladder}, text_of(table, rows)


def plan(names, seeds, also, best):
    """Yield all runs in their order, a few at a time, as {(recipe, set-up, seed): the commands that look at it}."""
    for pair in (names[i:i + 2] for i in range(0, len(names), 2)):      # so that two workers stay busy
        yield {(name, f"board-{rate}", TRIAL): () for name in pair for rate in RATES}
        yield {(name, f"board-{best(name)}", seed): LOOKS for seed in seeds for name in pair}
    for setup in (setup for setup in SETUPS if setup.startswith(tuple(filter(None, also.split(","))))):
        recipes, its_seeds = (LADDER, seeds[:2]) if setup.startswith("ladder") else (("softmax",), seeds)
        yield {(name, setup, seed): LOOKS[:1] for seed in its_seeds for name in recipes if name in names}


def add_costs(names, rows):
    """Add rows with what recipes cost: the speed of a training step relative to softmax, and the KiB of keys, values or
    state that a new token reads after 4,096 others, four times those of the first layer. They are None if the recipe
    cannot be decoded."""
    names = [name for name in names if (name, "cost", 0) not in rows]
    if not names:
        return
    steps, caches = (json.loads(output_of(
        "eval.py", *TIMED[look].split(), f"--attn={','.join(names)}", "--json", OMP_NUM_THREADS="1"))
        for look in ("board-speed", "board-cache"))
    for name in names:
        speed = 1 if name == "softmax" else steps["lengths"]["256"][name]["step"]
        cache = caches["lengths"]["4096"].get(name)
        rows[name, "cost", 0] = {"recipe": name, "setup": "cost", "seed": 0, "speed": round(speed, 3),
                                 "kib": cache and 4 * cache["bytes"] / 1024, "machine": steps["machine"]}


def add_runs(runs, rows, best, args):
    """Measure those of these runs {(recipe, setup, seed): the commands that look at it} that are missing or failed, and
    add them to the rows. A figure is None if its command failed: some positions know no longer windows."""
    jobs, missing = {}, {key: looks for key, looks in runs.items()
                         if rows.get(key, {}).get("bits" if looks else "val") is None}
    for (name, setup, seed), looks in missing.items():
        rate = setup.partition("board-")[2]     # only set-ups of the base table have their own
        flags = args.train_args if rate else f"{args.train_args} --learning_rate={best(name)}"
        for look in ("", *looks):
            jobs[name, setup, seed, look] = job_of(f"{name}@{setup}", look, seed, Place(args.out_dir, "", flags))
        rows[name, setup, seed] = {"recipe": name, "setup": setup, "rate": rate or best(name), "seed": seed}
    failed = do_all(all_jobs(jobs.values()), args.workers)
    for key, looks in missing.items():
        row, trained = rows[key], jobs[(*key, "")]
        if (report := result_of(trained)) is None:
            row["failed"] = failed.get(trained.place, "not finished")
            continue
        meta = files.read_json(trained.place / "meta.json")
        row |= {"val": report["val"], "steps": meta["losses"]["step"]} | {name: meta[name] for name in KEPT}
        for name, (look, figure) in FIGURES.items():
            if look in looks:
                found = result_of(jobs[(*key, look)])
                row[name] = None if found is None or (value := figure(found)) is None else float(f"{value:.6g}")
        failures = [failed[job.place] for look in looks if (job := jobs[(*key, look)]).place in failed]
        row |= {"failed": failures[0]} if failures else {}
