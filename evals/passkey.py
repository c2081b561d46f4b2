"""Can a model find a number in a long text, and say it at the end? Threshold Differential Attention
2601.12145, section 6.3, figure 3 and appendix C, after Landmark Attention (Mohtashami & Jaggi
2023). Details that the paper omits come from Landmark Attention's script: keys from 1 to 50,000,
and ten tokens of answer, whose first number counts.

Small models never find the key. Two more scores still tell them apart: the log-likelihood of the
right answer, each token given those before it, and its gain over another key, which the text does
not contain.

A prompt is a function of the tokenizer, the seed, the length and the number of the trial, so all
runs of one tokenizer read the same prompts.
"""

import bisect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.flags import Knobs, knob
from evals.instrument import legend, mean_and_error, table, whole_numbers
from evals.likelihood import answers, generated, text_tokenizer
from evals.pictures import GREY, figure_of, heat_map, line_panel, signed

# the parts of a prompt, byte for byte, joined by newlines
INSTRUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
GARBAGE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
)
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

LARGEST = 50_000  # keys are drawn from 1 to here
ANSWER = 10  # tokens of an answer, for which a prompt leaves room
DEPTHS = 5  # bins of the key's place, from the beginning to the end
DEPTH_NAMES = [f"{100 * i // DEPTHS}-{100 * (i + 1) // DEPTHS} %" for i in range(DEPTHS)]
SCORES = {  # {score of a trial: (name in the table, meaning)}
    "correct": ("accuracy", "share of the greedy answers that are the key"),
    "log_likelihood": ("log-likelihood", "log-likelihood of the key after the prompt, in nats"),
    "gain": (
        "gain",
        "that log-likelihood minus that of another key, not in the text; 0: the text did not help",
    ),
}


@dataclass
class Passkey(Knobs):
    """Flags of passkey"""

    lengths: str = knob(
        "",
        "tokens of prompt and answer together, separated by commas; empty: 500,1000,...,4000, "
        "up to the number of the model's positions",
    )
    trials: int = knob(100, "prompts of each length", least=1)
    seed: int = knob(0, "seed of the keys and their places")
    batch_size: int = knob(
        8,
        "largest number of prompts per forward pass; those of a batch have equally many tokens",
        least=1,
    )


def command(args, run):
    """Test whether the model finds a number hidden in a long text (Threshold Differential
    Attention, appendix C)."""
    coder = text_tokenizer(run)
    usual = [length for length in range(500, 4001, 500) if length <= run.positions] or [500]
    lengths = sorted(set(whole_numbers(args.lengths, "lengths"))) if args.lengths else usual
    run.check_positions(lengths[-1], "lengths")
    trials = {}
    for length in lengths:
        numbers = range(args.trials)
        trials[length] = [make_trial(coder, length, number, args.seed) for number in numbers]
    rows = []
    # the longest first: what does not fit into memory fails at once
    for length in reversed(lengths):
        scores = scores_of(run.model, run.machine, coder, trials[length], args.batch_size)
        depths = [trial.depth for trial in trials[length]]
        rows.insert(0, summary(length, list(zip(depths, scores, strict=True))))
    numbers = {
        "trials": args.trials,
        "seed": args.seed,
        "rope_scaling": run.model.config.rope_scaling,
        "training_length": run.meta["knobs"]["block_size"],
        "lengths": rows,
        "mean": {name: float(np.mean([row[name] for row in rows])) for name in SCORES},
    }
    header, cells, by_depth = ["length", "trials"], [], []
    for title, _ in SCORES.values():
        header += [title, "+-"]
    for row in rows:
        length, trials, *scores = row.values()
        cells.append([str(length), str(trials), *scores[:-1]])
        by_depth.append([str(length), *(part["gain"] for part in row["by_depth"])])
    return numbers, (
        f"trained on windows of {numbers['training_length']:,} tokens\n\n"
        f"{table(cells, header)}\n\n{legend(dict(SCORES.values()))}\n\n"
        f"gain, by the place of the key in the text\n\n{table(by_depth, ['length', *DEPTH_NAMES])}"
    )


class Trial(NamedTuple):
    """One prompt and its right answer, as token ids."""

    depth: float  # place of the key: 0 at the beginning, towards 1 at the end
    key: int
    prompt: tuple
    right: tuple  # the key, as a continuation
    wrong: tuple  # another key with as many tokens


def make_trial(coder, length, number, seed=0):
    """The trial of this number: as much garbage as fits, with the key at a random depth."""
    dice = np.random.default_rng([seed, length, number])
    key, depth = int(dice.integers(1, LARGEST + 1)), float(dice.random())

    def ids(garbage, more=""):
        return tuple(coder.encode(prompt_text(key, garbage, depth) + more).tolist())

    room, least = length - ANSWER, len(ids(0))
    if least > room:
        raise ValueError(
            f"a prompt without any garbage has {least} tokens, and {ANSWER} are reserved for the "
            f"answer: --lengths={length} must be at least {least + ANSWER}"
        )
    # the number of tokens grows almost monotonically with the characters: bisection finds the limit
    sizes = range(8 * length)
    characters = bisect.bisect(sizes, room, key=lambda garbage: len(ids(garbage))) - 1
    prompt = ids(characters)

    def following(number):  # encoded together with the prompt, as in lm-evaluation-harness
        return ids(characters, f" {number}")[len(prompt) :]

    right, wrong = following(key), ()
    while len(wrong) != len(right):
        wrong = following(dice.integers(1, LARGEST + 1))
    return Trial(depth, key, prompt, right, wrong)


def prompt_text(key, characters, depth):
    """A prompt with this many characters of garbage. The share `depth` of them is before the key.
    Their number is uniform in 0..characters if depth is uniform in [0, 1)."""
    before = int(depth * (characters + 1))
    garbage = " ".join([GARBAGE] * (characters // len(GARBAGE) + 1))
    needle, after = NEEDLE.format(key=key), garbage[: characters - before]
    return "\n".join([INSTRUCTION, garbage[:before], needle, after, QUESTION])


def scores_of(model, machine, coder, trials, batch_size):
    """A dict of SCORES for each of these trials, which have about equally many tokens."""
    requests = []
    for trial in trials:
        for ids in (trial.right, trial.wrong):
            requests.append(([*trial.prompt, *ids], len(ids)))
    tokens = batch_size * max(len(ids) for ids, _ in requests)
    heard = iter(answers(model, machine, requests, tokens))
    prompts = [trial.prompt for trial in trials]
    said = generated(model, machine, prompts, tokens, ANSWER, temperature=0)
    found = []
    for trial, ids, right, wrong in zip(trials, said, heard, heard, strict=True):
        found.append(
            {
                "correct": float(is_correct(coder.decode(ids), trial.key)),
                "log_likelihood": right.loglik,
                "gain": right.loglik - wrong.loglik,
            }
        )
    return found


def is_correct(text, key):
    """Is the answer (without spaces around it), or the first number in it, the key?"""
    number = re.search(r"\d+", text)
    return text.strip() == str(key) or number is not None and int(number[0]) == key


def summary(length, trials):
    """Means and errors over the trials of one length, [(depth, scores)], over all and by depth:
    {"trials", score, score_error, ...}. Values are None if there are no trials."""

    def means(group):
        found = {"trials": len(group)}
        for name in SCORES:
            values = [scores[name] for _, scores in group]
            mean, error = mean_and_error(values) if group else (None, None)
            found |= {name: mean, f"{name}_error": error}
        return found

    parts = [[] for _ in range(DEPTHS)]
    for depth, scores in trials:
        parts[int(depth * DEPTHS)].append((depth, scores))
    return {"length": length} | means(trials) | {"by_depth": list(map(means, parts))}


def draw(path, found):
    """Draw accuracy, log-likelihood and gain by length, a line for each run, with standard errors
    and dotted lines at the training lengths; below, for each run a map of the gain by length and
    depth, with the accuracy in its cells."""
    marks, curves, cells = set(), {name: {} for name in SCORES}, {}
    for place, numbers in found.items():
        rows, trained, run = numbers["lengths"], numbers["training_length"], Path(place).name
        if rows[0]["length"] <= trained <= rows[-1]["length"]:
            marks.add(trained)
        for name in SCORES:
            columns = ("length", name, f"{name}_error")
            curves[name][run] = [[row[key] for row in rows] for key in columns]
        parts = [[part["gain"], part["correct"]] for row in rows for part in row["by_depth"]]
        # (2, depths, lengths)
        cells[place] = np.array(parts, float).reshape(len(rows), DEPTHS, 2).T
    most = max(1.0, *(np.nanmax(np.abs(gains)) for gains, _ in cells.values()))
    titles = "accuracy", "log-likelihood of the key (nats)", "gain of the key (nats)"
    with figure_of(path, [3.4] + [2.6] * -(-len(found) // 3), [4] * 3) as axes:
        for ax, name, title in zip(axes[0], SCORES, titles, strict=True):
            xlabel = "tokens of prompt and answer"
            line_panel(ax, curves[name], title, xlabel, marks, legend=name == "correct")
        axes[0, 0].set_ylim(-0.03, 1.03)
        axes[0, 2].axhline(0, color=GREY, linestyle=":", linewidth=1)
        maps = axes[1:].flatten()
        for ax in maps[len(found) :]:
            ax.set_axis_off()
        for ax, (place, (gains, accuracies)) in zip(maps, cells.items(), strict=False):
            title = f"{Path(place).name}: gain in colour, accuracy in numbers"
            labels = {"xlabel": xlabel, "ylabel": "place of the key", "title": title}
            image = heat_map(ax, gains, signed(most), accuracies, **labels)
            lengths = [row["length"] for row in found[place]["lengths"]]
            ax.set_xticks(range(len(lengths)), lengths, fontsize=8)
            ax.set_yticks(range(DEPTHS), DEPTH_NAMES, fontsize=8)
        ax.figure.colorbar(image, ax=maps.tolist(), label="gain (nats)")
