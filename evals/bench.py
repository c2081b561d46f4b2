"""Zero-shot scores on public benchmarks, as lm-evaluation-harness 0.4.13 computes them.

A question becomes one request per choice: how likely is this continuation after that context? The model is right if the
right choice has the largest log-likelihood: the sum over its tokens (acc), or the sum per character (acc_norm; some
papers say bytes, but the harness counts characters). In LAMBADA the model must generate the last word greedily, and
perplexity is per word. In WikiText every token of a page is scored once; words and bytes are counted on the raw page.

Several runs answer the same rows: the error of a difference is that of the mean difference per row.

Differs from lm-evaluation-harness: our standard errors of perplexities come from the delta method (theirs come from
resampling, or are missing). --limit takes rows spread over the whole file (theirs takes the first rows). We replace
an empty context by the run's separator (they may use another token).

Two scores are not from lm-evaluation-harness: `adjusted`, (score - chance) / (1 - chance), of Lazy Attention
2601.00919, appendix C.3, and the average of its table 1. That paper does not define chance. We take one over the number
of choices. In BoolQ, whose choices are always no and yes, we take the share of the more frequent answer.
"""
import math
from dataclasses import dataclass

import numpy as np

from common.flags import Knobs, knob
from data import benchmarks
from evals.instrument import explained, mean_and_error
from evals.likelihood import listen, page_requests, row_requests, text_tokenizer
from evals.pictures import figure_of, frame

MEASURES = {                                    # {task: its measures}; averages use the first
    "hellaswag": ("acc_norm", "acc"), "arc_easy": ("acc", "acc_norm"), "arc_challenge": ("acc_norm", "acc"),
    "piqa": ("acc", "acc_norm"), "winogrande": ("acc",), "openbookqa": ("acc_norm", "acc"), "siqa": ("acc",),
    "boolq": ("acc",), "lambada": ("acc", "perplexity"),
    "wikitext": ("word_perplexity", "byte_perplexity", "bits_per_byte")}
EIGHT = ("lambada", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "siqa", "boolq")    # of that table


@dataclass
class Bench(Knobs):
    """Flags of bench"""
    tasks: str = knob("", f"tasks, separated by commas: {', '.join(MEASURES)}; or all; empty: those with a file")
    source: str = knob("", "folder of these files; empty: data/benchmarks, where python data/benchmarks.py puts them")
    limit: int = knob(0, "rows of each task, spread evenly over its file; 0: all")
    bos: bool = knob(False, "begin every context with the separator, like the texts in training")
    length: int = knob(0, "tokens of the longest input; a longer one loses its beginning; 0: block_size")
    batch_size: int = knob(4096, "tokens per forward pass; a longer row gets a separate pass", least=1)


def command(args, run):
    """Zero-shot scores on public benchmarks, as lm-evaluation-harness computes them."""
    coder, length = text_tokenizer(run), args.length or run.model.config.block_size
    run.check_positions(length)
    folder, tasks = args.source or benchmarks.HERE, {}
    # read all rows before the work begins
    sets = {name: benchmarks.read(name, folder) for name in benchmarks.task_names(args.tasks, folder)}
    for name, rows in sets.items():
        spread = np.linspace(0, len(rows) - 1, min(args.limit or len(rows), len(rows))).round().astype(int)
        some = [rows[i] for i in spread]        # the same at every call
        ask = page_requests if name == "wikitext" else row_requests
        groups = [ask(row, coder, length, args.bos) for row in some]
        answers = listen(run.model, groups, run.machine, args.batch_size, name)
        tasks[name] = judge(name, some, answers, chance(name, rows))
        tasks[name]["cut"] = sum(any(r.cut for r in group) for group in groups)
    numbers = {"length": length, "bos": args.bos, "tasks": tasks, "averages": averages(tasks)}
    return numbers, tell(args, {"": numbers})


def judge(name, rows, answers, guess):
    """The numbers of a task: "n", "chance", and for each of its MEASURES {"value", "stderr", "rows"}. Accuracies also
    have "adjusted" and "than_guessing": does the accuracy differ from the chance by more than two standard errors of
    guessing n times? answers: [[Answer]], a list for each row. guess: the chance, None if it is undefined."""
    found, by_measure = {"n": len(rows), "chance": guess}, measured(name, rows, answers)
    for measure in MEASURES[name]:
        values = np.asarray(by_measure[measure], float)
        value, error = mean_and_error(values)
        if "perplexity" in measure:             # exp of the mean, its error by the delta method
            value = math.exp(value) if value < 700 else math.inf        # exp of more overflows
            error = error and value * error
        # a number for each row, as one line of text, so that JSON stays short
        rowwise = " ".join(f"{number:.6g}" for number in values)
        found[measure] = {"value": value, "stderr": error, "rows": rowwise}
        if measure.startswith("acc"):
            outcome = verdict(value - guess, math.sqrt(guess * (1 - guess) / len(rows)), "no better", "better", "worse")
            left = 1 - guess or 1.0             # 1 if guessing is always right, so nothing is left to gain
            found[measure] |= {"adjusted": (value - guess) / left, "than_guessing": outcome if guess else None}
    return found


def verdict(difference, error, near, above, below):
    """near, above or below: is a difference beyond two standard errors?"""
    return near if abs(difference) <= 2 * error else above if difference > 0 else below


def measured(name, rows, answers):
    """The numbers of all rows by measure, {measure: (n,)}. An accuracy or bits_per_byte is the mean of its numbers, a
    perplexity exp of the mean. The standard error of the mean gives that of the measure."""
    if name == "lambada":
        return {"acc": [word.greedy for [word] in answers], "perplexity": [-word.loglik for [word] in answers]}
    if name == "wikitext":                      # perplexities per word and per byte
        losses, found = np.array([-sum(answer.loglik for answer in page) for page in answers], float), []
        for counts in ([page.words for page in rows], [page.bytes for page in rows]):
            # a number for each row: value + (its loss - value * its count) / mean count. The mean of these numbers is
            # the ratio `value`, and the standard error of their mean is that of the ratio by the delta method
            counts = np.array(counts, float)
            value = losses.sum() / counts.sum()
            found.append(value + (losses - value * counts) / counts.mean())
        return dict(zip(MEASURES[name], [*found, found[1] / math.log(2)], strict=True))
    found = {"acc": [], "acc_norm": []}         # is the right choice's score the highest? The first wins a tie
    for row, choices in zip(rows, answers, strict=True):
        sums = np.array([answer.loglik for answer in choices])
        for measure, scores in (("acc", sums), ("acc_norm", sums / [len(choice) for choice in row.choices])):
            found[measure].append(scores.argmax() == row.gold)
    return found


def chance(name, rows):
    """The score of guessing on the rows of a whole file, as the head of this file defines it. None for wikitext."""
    if name in ("wikitext", "lambada"):
        return None if name == "wikitext" else 0.0                      # a random word is almost never right
    if name == "boolq":
        yes = float(np.mean([row.gold for row in rows]))
        return max(yes, 1 - yes)
    return float(np.mean([1 / len(row.choices) for row in rows]))


def averages(tasks):
    """The means over tasks of their first measures, with equal weights: over all tasks that have an accuracy, and over
    the EIGHT if all of them and at least one other task are among these. None for a single task."""
    found = {}
    for label, names in averaged(tasks).items():
        scores = [tasks[name][MEASURES[name][0]] for name in names]
        value, error = mean_of([(score["value"], score["stderr"]) for score in scores])
        found[label] = {"tasks": len(scores), "value": value, "stderr": error,
                        "adjusted": sum(score["adjusted"] for score in scores) / len(scores)}
    return found


def averaged(tasks):
    """The tasks of each average, {name: tasks}."""
    scored = [name for name in tasks if "acc" in tasks[name]]
    wanted = {"average": scored} if len(scored) > 1 else {}
    return wanted | ({"average of eight": EIGHT} if set(EIGHT) < set(scored) else {})


def mean_of(found):
    """The mean of independent [(value, standard error)], and its own error: None if an error is None."""
    values, errors = zip(*found, strict=True)
    return sum(values) / len(values), None if None in errors else math.hypot(*errors) / len(errors)


def compared(scores, first):
    """The table's cells for the mean of several scores of a run minus that of the first run on the same rows.
    Perplexities enter by their logarithms."""
    rows = [[np.array(score["rows"].split(), float) for score in pair] for pair in zip(scores, first, strict=True)]
    value, error = mean_of([mean_and_error(ours - theirs) for ours, theirs in rows])
    outcome = None if error is None else verdict(value, error, "cannot be told apart", "higher", "lower")
    return {"difference": short(value), "+- ": short(error), "verdict": outcome}


MEANINGS = {                                    # the columns of the table
    "score": "value of the measure", "+-": "standard error", "n": "rows", "chance": "score of guessing",
    "adjusted": "(score - chance) / (1 - chance)",
    "than guessing": "no better: within two standard errors of chance, those of guessing n times",
    "difference": "the score minus the first run's on the same rows; for perplexities, of their logarithms",
    "+- ": "standard error of that difference",
    "verdict": "cannot be told apart: the difference is at most two of these errors"}


def tell(args, found):
    """A table with a row for each score. With several runs, the rows of one measure are adjacent, and show the
    differences from the first run."""
    several, lines, (first, *_) = len(found) > 1, {}, found.values()
    parts = {(name, measure): [(name, measure)] for name in first["tasks"] for measure in MEASURES[name]}
    for name, names in averaged(first["tasks"]).items():
        parts[name, f"{len(names)} tasks"] = [(task, MEASURES[task][0]) for task in names]
    for (name, measure), behind in parts.items():
        for place, numbers in found.items():
            task = numbers["tasks"].get(name, {})
            score = task[measure] if task else numbers["averages"][name]
            row = {"score": short(score["value"]), "+-": short(score["stderr"]),
                   "than guessing": score.get("than_guessing")}
            if not several:
                row |= {"n": str(task["n"]) if task else None, "adjusted": score.get("adjusted"),
                        "chance": task.get("chance") or None if "adjusted" in score else None}
            if numbers is not first:
                scores, others = ([run["tasks"][task][which] for task, which in behind] for run in (numbers, first))
                row |= compared(scores, others)
            lines[f"{name} {measure}{several * f' {place}'}"] = row
    notes = [explained(lines, MEANINGS, "task")]
    if any(numbers["averages"] for numbers in found.values()):
        notes.append("averages take the first measure of each task; average of eight: the tasks of Lazy Attention's "
                     "table 1")
    for place, numbers in found.items():
        cut = [f"{task['cut']} of {name}" for name, task in numbers["tasks"].items() if task["cut"]]
        if cut:
            notes.append(f"longer than {numbers['length']:,} tokens{several * f' in {place}'}, and cut at the "
                         f"beginning: rows {', '.join(cut)}")
    return "\n".join(notes)


def short(value):
    """A number as a cell; a huge perplexity in scientific notation."""
    return value if value is None or abs(value) < 1e5 else f"{value:.3g}"


def draw(path, runs):
    """Draw a bar for the first accuracy of each task and run, with two standard errors up and down, and a dashed line
    for guessing. runs: {name: numbers}, as command returns them. Raises ValueError if there are no accuracies."""
    chances = {name: task["chance"] for found in reversed(runs.values()) for name, task in found["tasks"].items()}
    names = [name for name in MEASURES if chances.get(name) is not None]
    if not names:
        raise ValueError("there is no accuracy to draw: give --tasks other than wikitext")
    width, places = 0.8 / len(runs), np.arange(len(names))
    with figure_of(path, [3.8], [1.8 + len(names) * max(0.75, 0.32 * len(runs))]) as [[ax]]:
        for number, (label, found) in enumerate(runs.items()):
            scores = {x: found["tasks"][name][MEASURES[name][0]] for x, name in enumerate(names)
                      if name in found["tasks"]}
            ax.bar([x + (number + 0.5) * width - 0.4 for x in scores], [score["value"] for score in scores.values()],
                   0.92 * width, yerr=[2 * (score["stderr"] or 0) for score in scores.values()], label=label,
                   error_kw={"elinewidth": 1, "ecolor": "0.25", "capsize": 2}, zorder=2)
        ax.hlines([chances[name] for name in names], places - 0.46, places + 0.46, color="black", linestyle="--",
                  linewidth=1.2, zorder=3, label="guessing")
        ax.set_xticks(places, [f"{name}\n{MEASURES[name][0]}" for name in names], fontsize=7)
        ax.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, 1))
        ax.grid(axis="y", color="0.9", zorder=0)
        frame(ax, ylabel="share of right answers, with two standard errors")
        ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
