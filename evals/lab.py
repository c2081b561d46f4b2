"""The sink lab: what every recipe does with rows that need no attention, on a task whose best possible loss is known.

The data comes from data/backcopy.py: after a trigger symbol, the symbol before it is repeated; everywhere else a bigram
table decides. So queries at triggers (*copy* rows) have something to find, and all others (*idle* rows) do not.

The command starts train.py once for each recipe and seed. At its end, train.py measures its own run (evals/report.py)
and writes the figures to meta.json. The command collects them in a table, a JSON file and a picture.
"""
import dataclasses
from dataclasses import dataclass

import numpy as np

import attention
import mixers
from common import files
from common.flags import knob
from common.runs import ROOT
from evals.instrument import markdown, recipe_names, table, whole_numbers
from evals.jobs import Place, all_jobs, do_all, result_of, train_job
from evals.lab_runs import FILE, OUT_DIR, SEEDS, SWEEPS
from evals.pictures import draw_recipes

PANELS = {                                      # of the picture, {figure: (title, lower and upper end of the axis)}
    "sink_idle": ("weight on the first token, idle rows", 0, 1.05),
    "value_norm_ratio": ("norm of the first value over the others", 0, 2.5),
    "row_mass_idle": ("sum of the weights of an idle row", -0.5, 1.5),
    "excess_copy": ("excess loss on copy rows (nats)", 0, None),
}


@dataclass
class Lab:
    """Flags of lab"""
    attn: str = knob("all", "recipes, separated by commas")
    sweep: str = knob("", "instead of recipes, repeat this table of When Attention Sink Emerges", ("", *SWEEPS))
    seeds: str = knob(SEEDS, "seeds, separated by commas")
    out_dir: str = knob(OUT_DIR, "folder of the runs, a subfolder each; finished runs are not trained again")
    results: str = knob("", "save the table, the figures and the picture as this name with .md, .json and .png; "
                            "empty: results/lab, or OUT_DIR/lab if this is not the whole lab")
    train_args: str = knob("", "further flags of train.py, separated by spaces")
    json: bool = knob(False, "print JSON instead of a table")


def command(args, run):
    """Train every recipe in the sink lab, on the same data with the same seeds, and compare them."""
    recipes, seeds = recipe_names(args.attn), whole_numbers(args.seeds, "seeds")
    models = ({what: name for what, (name, *_) in SWEEPS[args.sweep].items()} if args.sweep else
              {name: name for name in [*recipes, "blind"]})
    place = Place(args.out_dir, train_args=args.train_args)
    jobs = {(what, seed): train_job(name, seed, place) for seed in seeds for what, name in models.items()}
    do_all(all_jobs(jobs.values()), 1)          # seed by seed: an interrupted lab has all models of its first seeds
    if failed := [str(job.place) for job in jobs.values() if result_of(job) is None]:
        raise ValueError(f"{', '.join(failed)} not finished: read the errors above, change flags with --train_args")
    metas = {what: [files.read_json(jobs[what, seed].place / "meta.json") for seed in seeds] for what in models}
    runs = {what: [{key: meta[key] for key in ("parameters", "seconds")} | meta["report"] for meta in group]
            for what, group in metas.items()}
    about = {key: next(iter(metas.values()))[0][key] for key in ("machine", "versions")}
    numbers = {"flags": dataclasses.asdict(args), **about, "runs": runs}
    # only a whole lab may replace the committed results
    whole = set(recipes) == set(recipe_names("all")) and not args.train_args and len(seeds) >= 3
    name = f"lab-{args.sweep}" if args.sweep else "lab"
    place = args.results or (ROOT / "results" / name if whole else f"{args.out_dir}/{name}")
    files.write_json(f"{place}.json", numbers)
    draw_recipes(f"{place}.png", runs, PANELS)
    rows, header = rows_of(runs, args.sweep)
    with files.replacing(f"{place}.md", "w") as f:
        f.write(markdown(rows, header) + "\n")
    return numbers, f"{table(rows, header)}\n\nmeans over seeds {args.seeds}; saved as {place}.md, .json and .png"


def rows_of(runs, sweep=""):
    """A row for each of runs, {name: [the figures of each seed]}, and the names of the columns. Figures are means over
    seeds. In a sweep, the paper's figures stand before ours, and "apart" is the range of sink idle over seeds."""
    rows, columns = [], FILE["columns"]["sweep" if sweep else "lab"]
    for name, group in runs.items():
        ours = [[figures.get(key) for figures in group] for key in columns.values()]
        cells = ["-" if None in values else f"{np.mean(values):.3f}" for values in ours]
        if sweep:
            theirs = ["-" if value is None else f"{value:.2f}" for value in SWEEPS[sweep][name][1:]]
            sinks = [figures["sink_idle"] for figures in group]
            rows.append([name, *theirs, *cells, f"{max(sinks) - min(sinks):.3f}"])
        else:
            exact = name not in attention.ATTENTIONS or mixers.has_weights(name)
            cells += [f"{np.mean([figures[key] for figures in group]):.0f}" for key in ("parameters", "seconds")]
            rows.append([name if exact else f"{name} (derivatives)", *cells])
    if sweep:
        return rows, ["", "their Sink*", "their Sink_1", "their loss", *columns, "apart"]
    return rows, ["recipe", *columns, "parameters", "s"]
