"""Zero-shot scores on public benchmarks, as lm-evaluation-harness 0.4.13 computes them.

A question becomes one request per choice: how likely is this continuation after that context? The model is right if the
right choice has the largest log-likelihood: the sum over its tokens (acc), or the sum per character (acc_norm; some
papers say bytes, but the harness counts characters). In LAMBADA the model must generate the last word greedily, and
perplexity is per word. In WikiText every token of a page is scored once; words and bytes are counted on the raw page.

Several runs answer the same rows. So the error of a difference is the standard error of the mean difference by row.

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

from common.flags import at_least, knob
from data import benchmarks
from evals.instrument import legend, mean_and_error, table
from evals.likelihood import listen, page_requests, row_requests
from evals.pictures import frame, pyplot, save_figure

MEASURES = {                                    # {task: its measures}; averages use the first
    "hellaswag": ("acc_norm", "acc"), "arc_easy": ("acc", "acc_norm"), "arc_challenge": ("acc_norm", "acc"),
    "piqa": ("acc", "acc_norm"), "winogrande": ("acc",), "openbookqa": ("acc_norm", "acc"), "siqa": ("acc",),
    "boolq": ("acc",), "lambada": ("acc", "perplexity"),
    "wikitext": ("word_perplexity", "byte_perplexity", "bits_per_byte")}
EIGHT = ("lambada", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "siqa", "boolq")    # of that table


@dataclass
class Bench:
    """Flags of bench"""
    tasks: str = knob("", f"tasks, separated by commas: {', '.join(MEASURES)}; or all; empty: those with a file")
    source: str = knob("", "folder of these files; empty: data/benchmarks, where python data/benchmarks.py puts them")
    limit: int = knob(0, "rows of each task, spread evenly over its file; 0: all")
    bos: bool = knob(False, "begin every context with the separator, like the texts in training")
    length: int = knob(0, "tokens of the longest input; a longer one loses its beginning; 0: block_size")
    batch_size: int = knob(4096, "tokens per forward pass; a longer row gets a pass of its own")

    def __post_init__(self):
        at_least(self, limit=0, length=0, batch_size=1)


def command(args, run):
    """Zero-shot scores on public benchmarks, as lm-evaluation-harness computes them."""
    coder, length = run.tokenizer, args.length or run.model.config.block_size
    if coder.name == "numbers":
        raise ValueError(f"{run.out_dir} was trained on symbols, not on text: bench needs a run with a text tokenizer")
    run.check_positions(length)
    folder, found = args.source or benchmarks.HERE, {"length": length, "bos": args.bos, "tasks": {}}
    names = benchmarks.task_names(args.tasks) if args.tasks else benchmarks.those_in(folder)
    sets = {name: benchmarks.read(name, folder) for name in names}      # read all before the work begins
    for name, rows in sets.items():
        some = [rows[i] for i in evenly(len(rows), args.limit)]
        ask = page_requests if name == "wikitext" else row_requests
        groups = [ask(row, coder, length, args.bos) for row in some]
        answers = listen(run.model, groups, run.machine, args.batch_size, name)
        found["tasks"][name] = judge(name, some, answers, chance(name, rows))
        found["tasks"][name]["cut"] = sum(any(r.cut for r in group) for group in groups)
    found["averages"] = averages(found["tasks"])
    return found, tell(args, {"": found})


def evenly(count, limit):
    """Indices of `limit` of `count` rows, spread evenly, the same at every call; 0: all."""
    return np.linspace(0, count - 1, min(limit, count)).round().astype(int) if limit else range(count)


# ----------------------------------------------------------------------------------------------- from answers to scores


def judge(name, rows, answers, guess):
    """The numbers of a task: "n", "chance", and for each of its MEASURES {"value", "stderr", "rows"}. Accuracies also
    have "adjusted" and "than_guessing". answers: [[Answer]], a list for each row. guess: the chance, None if it is
    undefined."""
    found, values = {"n": len(rows), "chance": guess}, measured(name, rows, answers)
    for measure in MEASURES[name]:
        value, error = (perplexity if "perplexity" in measure else mean_and_error)(values[measure])
        found[measure] = {"value": value, "stderr": error, "rows": packed(values[measure])}
        if measure.startswith("acc"):
            left = 1 - guess or 1.0             # 1 if guessing is always right, so nothing is left to gain
            found[measure] |= {"adjusted": (value - guess) / left,
                               "than_guessing": than_guessing(value, guess, len(rows))}
    return found


def measured(name, rows, answers):
    """The numbers of all rows by measure, {measure: (n,)}. An accuracy or bits_per_byte is the mean of its numbers, a
    perplexity exp of the mean. The standard error of the mean gives that of the measure."""
    if name == "wikitext":
        loss = [-sum(answer.loglik for answer in page) for page in answers]
        word, byte = per_row(loss, [page.words for page in rows]), per_row(loss, [page.bytes for page in rows])
        return {"word_perplexity": word, "byte_perplexity": byte, "bits_per_byte": byte / math.log(2)}
    if name == "lambada":
        return {"acc": np.array([word.greedy for [word] in answers], float),
                "perplexity": np.array([-word.loglik for [word] in answers])}
    in_sum = [np.array([answer.loglik for answer in choices]) for choices in answers]
    per_character = [sums / [len(choice) for choice in row.choices] for sums, row in zip(in_sum, rows, strict=True)]
    return {"acc": hits(in_sum, rows), "acc_norm": hits(per_character, rows)}


def hits(scores, rows):
    """1 where the right choice has the highest score, else 0. In a tie the first choice wins."""
    return np.array([values.argmax() == row.gold for values, row in zip(scores, rows, strict=True)], float)


def per_row(sums, counts):
    """Numbers (n,) whose mean is value = sums.sum() / counts.sum(). The number of a row is value plus (sum - value
    count) / mean count. So the standard error of their mean is that of the ratio by the delta method."""
    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    value = sums.sum() / counts.sum()
    return value + (sums - value * counts) / counts.mean()


def perplexity(nats):
    """exp(mean of nats) and its standard error by the delta method."""
    mean, error = mean_and_error(nats)
    value = math.exp(mean) if mean < 700 else math.inf                  # exp of more overflows
    return value, error and value * error


def packed(values):
    """A number for each row as one line of text, so that JSON stays short."""
    return " ".join(f"{value:.6g}" for value in values)


def difference(score, first):
    """A run's score minus the first run's on the same rows, and the standard error of this difference. Of perplexities
    it takes the logarithms."""
    return mean_and_error(np.subtract(*(np.array(one["rows"].split(), float) for one in (score, first))))


def chance(name, rows):
    """The score of guessing on the rows of a whole file, as the head of this file defines it. None for wikitext."""
    if name == "wikitext":
        return None
    if name == "lambada":                       # a random word is almost never right
        return 0.0
    if name == "boolq":
        yes = float(np.mean([row.gold for row in rows]))
        return max(yes, 1 - yes)
    return float(np.mean([1 / len(row.choices) for row in rows]))


def than_guessing(value, guess, n):
    """"better" or "worse" if an accuracy differs from guessing by more than two standard errors, otherwise "no better".
    The errors are those of guessing n times. None if the chance is 0 or undefined."""
    if not guess:
        return None
    if abs(value - guess) <= 2 * math.sqrt(guess * (1 - guess) / n):
        return "no better"
    return "better" if value > guess else "worse"


def averages(tasks):
    """The averages over the accuracies of tasks, {name: numbers}."""
    return {label: average([headline(name, tasks) for name in names]) for label, names in averaged(tasks).items()}


def averaged(tasks):
    """The tasks of each average, {name: tasks}: all tasks that have an accuracy, and the EIGHT if all of them and
    at least one other task are among these. Empty for a single task."""
    scored = [name for name in tasks if "acc" in tasks[name]]
    wanted = {"average": scored} if len(scored) > 1 else {}
    return wanted | ({"average of eight": EIGHT} if set(EIGHT) < set(scored) else {})


def headline(name, tasks):
    """A task's score in averages and pictures."""
    return tasks[name][MEASURES[name][0]]


def average(scores):
    """The mean of the scores of several tasks, with equal weights, and its standard error."""
    value, error = mean_of([(score["value"], score["stderr"]) for score in scores])
    return {"tasks": len(scores), "value": value, "stderr": error,
            "adjusted": sum(score["adjusted"] for score in scores) / len(scores)}


def mean_of(found):
    """The mean of independent [(value, standard error)], and its own error: None if an error is None."""
    values, errors = zip(*found, strict=True)
    return sum(values) / len(values), None if None in errors else math.hypot(*errors) / len(errors)


# -------------------------------------------------------------------------------------------------- the table, a chart


ALONE = {                                       # columns of one run, and their meanings
    "n": "rows", "chance": "score of guessing", "adjusted": "(score - chance) / (1 - chance)"}
ALWAYS = {"than guessing": "no better: within two standard errors of chance, those of guessing n times"}
BESIDE = {                                      # columns of several runs
    "difference": "the score minus the first run's on the same rows, and the standard error of that difference; for "
                  "perplexities, of their logarithms",
    "+- ": "",
    "verdict": "cannot be told apart: the difference is at most two of these errors"}


def tell(args, found):
    """A table with a row for each score. Of several runs, the rows of one measure follow each other, and show the
    differences from the first run."""
    several, (first, *_) = len(found) > 1, found.values()
    rows = []
    for key, score in scores_of(first).items():
        for place, numbers in found.items():
            own = scores_of(numbers)[key]
            differs = [None] * len(BESIDE) if numbers is first else beside(own, score)
            tail = [own.get("than_guessing"), *differs] if several else [
                own["n"], own.get("chance"), own.get("adjusted"), own.get("than_guessing")]
            rows.append([*key, *[place] * several, short(own["value"]), short(own["stderr"]), *tail])
    columns = ALWAYS | BESIDE if several else ALONE | ALWAYS
    text = table(rows, ["task", "measure", *["run"] * several, "score", "+-", *columns])
    meant = {"+-": "standard error"} | {name: meaning for name, meaning in columns.items() if meaning}
    return "\n\n".join([text, "\n".join([legend(meant), *notes(found)])])


def scores_of(numbers):
    """{(task, measure): the score and the other numbers of its row}, the averages last."""
    tasks = numbers["tasks"]
    found = {(name, measure): task[measure] | {"n": str(task["n"])}
             | ({"chance": task["chance"] or None} if "adjusted" in task[measure] else {})
             for name, task in tasks.items() for measure in MEASURES[name]}
    return found | {(name, f"{mean['tasks']} tasks"): mean | {"n": None, "parts": [
        headline(task, tasks) for task in averaged(tasks)[name]]} for name, mean in numbers["averages"].items()}


def beside(score, first):
    """The cells of BESIDE, of a score and that of the first run."""
    pairs = zip(score.get("parts", [score]), first.get("parts", [first]), strict=True)
    differences = [difference(*pair) for pair in pairs]
    value, error = mean_of(differences)
    apart = None if error is None else "cannot be told apart" if abs(value) <= 2 * error else (
        "higher" if value > 0 else "lower")
    return [short(value), short(error), apart]


def short(value):
    """A number as a cell; a huge perplexity in scientific notation."""
    return value if value is None or abs(value) < 1e5 else f"{value:.3g}"


def notes(found):
    """The lines below the table."""
    if any(numbers["averages"] for numbers in found.values()):
        yield "averages take the first measure of each task; average of eight: the tasks of Lazy Attention's table 1"
    for place, numbers in found.items():
        cut = [f"{task['cut']} of {name}" for name, task in numbers["tasks"].items() if task["cut"]]
        if cut:
            where = f" in {place}" if len(found) > 1 else ""
            yield f"longer than {numbers['length']:,} tokens{where}, and cut at the beginning: rows {', '.join(cut)}"


def draw(path, runs):
    """Draw a bar for the first accuracy of each task and run, with two standard errors up and down, and a dashed line
    for guessing. runs: {name: numbers}, as command returns them. Raises ValueError if there are no accuracies."""
    names = [name for name in MEASURES if any("acc" in found["tasks"].get(name, ()) for found in runs.values())]
    if not names:
        raise ValueError("there is no accuracy to draw: give --tasks other than wikitext")
    figure, ax = pyplot().subplots(figsize=(1.8 + len(names) * max(0.75, 0.32 * len(runs)), 3.8))
    width = 0.8 / len(runs)
    for number, (label, found) in enumerate(runs.items()):
        scores = {x: headline(name, found["tasks"]) for x, name in enumerate(names) if name in found["tasks"]}
        ax.bar([x + (number + 0.5) * width - 0.4 for x in scores], [score["value"] for score in scores.values()],
               0.92 * width, yerr=[2 * (score["stderr"] or 0) for score in scores.values()], label=label,
               error_kw={"elinewidth": 1, "ecolor": "0.25", "capsize": 2}, zorder=2)
    guesses = [next(found["tasks"][name]["chance"] for found in runs.values() if name in found["tasks"])
               for name in names]
    ax.hlines(guesses, [x - 0.46 for x in range(len(names))], [x + 0.46 for x in range(len(names))], color="black",
              linestyle="--", linewidth=1.2, zorder=3, label="guessing")
    ax.set_xticks(range(len(names)), [f"{name}\n{MEASURES[name][0]}" for name in names], fontsize=7)
    ax.set(xlim=(-0.6, len(names) - 0.4), ylim=(0, 1))
    ax.grid(axis="y", color="0.9", zorder=0)
    frame(ax, ylabel="share of right answers, with two standard errors")
    ax.legend(frameon=False, fontsize=8, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    figure.tight_layout()
    save_figure(figure, path)
