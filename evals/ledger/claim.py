"""A row of the ledger, and the functions with which its verdict rules are written."""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

COSTS = {                                       # class: what a measurement needs
    "lab": "one-layer models and exact checks, on a CPU",
    "cpu-minutes": "small models on text, on a CPU",
    "public-weights": "the weights of out/smollm2",
    "gpu-minutes": "models of 30M parameters: at most ten minutes on one H200",
    "out of reach": "more than that"}

AGREES, CONTRADICTS, MIXED, UNTESTABLE, NOT_RUN = "agrees", "contradicts", "mixed", "not testable", "not run here"
VERDICTS = (AGREES, MIXED, CONTRADICTS, UNTESTABLE, NOT_RUN)

# A claim about sinks is not testable on runs where softmax has no sink. The column GATE holds softmax's weight on the
# first token over uniform; below SINK it has none. Two set-ups need this check: runs on a GPU, and the lab without BOS
GATE, SINK = "softmax itself, x uniform", 4
GPU_GATE = {GATE: ("times_uniform", "softmax@gpu")}
NOBOS_GATE = {GATE: ("times_uniform_idle", "softmax@nobos")}


class Reading(NamedTuple):
    """What to measure, and the verdict that follows.

    reads: {column: (path, runs)}, runs separated by spaces. A column has, for each run, the number or list at this path
        of the run's report. If the path begins with a command of experiments.COMMANDS or a look of LOOKS, it is a path
        in that one's result; if a run is one of CHECKS, in the result of that check.
    verdict: {column: {run: array}} -> a Verdict; arrays have a row for each seed.
    """
    reads: dict[str, tuple[str, str]]
    verdict: Callable


class Claim(NamedTuple):
    """One claim of a paper, how it is tested, and the rule of its verdict."""
    id: str
    place: str                                  # section, figure or table of the paper
    says: str                                   # the claim in one sentence
    theirs: str                                 # the paper's figures, and where they contradict each other
    cost: str                                   # of COSTS
    rule: str                                   # when it agrees, when it contradicts; otherwise mixed
    reading: Reading | None                     # None: out of reach
    note: str = ""                              # what differs from the plan, and why; what stays open
    variations: tuple[str, ...] = ()            # other set-ups of lab_runs.SETUPS for the same rule
    elsewhere: dict[str, Reading] = {}          # {name: the same question about other runs}
    seeds: int = 3                              # at most so many seeds


# ----------------------------------------------------------------------------------------------- for the rules


class Verdict(str):
    """One of VERDICTS. by: the numbers that decided it, {name: (seeds,), a number or text}."""
    by = {}


def decide(agrees, contradicts, testable=True, by=None):
    """The verdict of two conditions, each of which must hold with every seed. If both hold or neither, it is mixed.
    by: the numbers that were compared, if the reading's columns do not show them."""
    yes, no = holds(agrees), holds(contradicts)
    found = Verdict(UNTESTABLE if not holds(testable) else MIXED if yes == no else AGREES if yes else CONTRADICTS)
    found.by = by or {}
    return found


def holds(condition):
    """Is it true everywhere? condition: a bool, an array of them, or a list of either."""
    return all(map(holds, condition)) if isinstance(condition, list) else bool(np.all(condition))


def below(a, b):
    """Is a lower than b by more than 2 standard deviations? Both (seeds,), paired by seed. False with one seed."""
    less = np.subtract(a, b)
    return len(less) > 1 and less.mean() < -2 * less.std(ddof=1)


def every(column, bound):
    """Does bound(values) hold for all runs of a column?"""
    return all(np.all(bound(values)) for values in column.values())


def rank_correlation(a, b):
    """Spearman's rank correlation of two lists. Equal values share their mean rank. 0 if a list is constant."""
    a, b = ((x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (np.ravel(a), np.ravel(b)))
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0


def layer_means(values):
    """Means over seeds and heads: (seeds, layers, heads) to (layers,)."""
    return np.asarray(values, float).mean((0, 2))


def thirds(values):
    """The means of the first, middle and last third of a list; nan for an empty third."""
    return [float(np.mean(part)) if len(part) else np.nan for part in np.array_split(np.asarray(values, float), 3)]
