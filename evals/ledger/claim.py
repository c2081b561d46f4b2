"""What a row of the ledger is made of, and the words that its rules are written in."""
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

COSTS = {                                       # class: what it takes
    "lab": "one-layer models and exact checks, on a CPU",
    "cpu-minutes": "small models on text, on a CPU",
    "public-weights": "the weights of out/smollm2",
    "gpu-minutes": "models of 30M parameters: at most ten minutes on one H200",
    "out of reach": "more than that"}

AGREES, CONTRADICTS, MIXED, UNTESTABLE, NOT_RUN = "agrees", "contradicts", "mixed", "not testable", "not run here"
VERDICTS = (AGREES, MIXED, CONTRADICTS, UNTESTABLE, NOT_RUN)

# A claim about sinks is not testable on runs in which softmax has none: a column of this name holds its weight on the
# first token over uniform, and below so much there is no sink. (Planned for a GPU's runs; those of the lab without BOS
# were found to need it.)
GATE, SINK = "softmax itself, x uniform", 4
GPU_GATE = {GATE: ("times_uniform", "softmax@gpu")}
NOBOS_GATE = {GATE: ("times_uniform_idle", "softmax@nobos")}


class Reading(NamedTuple):
    """What is measured, and what follows.

    reads: {column: (path, runs)}: in the report of each of these runs, separated by spaces, the number or list at this
    path; where the path begins with a look of experiments.LOOKS, in what that look found; where a run is one of
    checks.CHECKS, in what that found.
    verdict: {column: {run: array}} -> a Verdict; arrays have a row for each seed.
    """
    reads: dict[str, tuple[str, str]]
    verdict: Callable


class Claim(NamedTuple):
    """A row. Thresholds in `rule` and `reading` were fixed before any run."""
    id: str
    place: str                                  # where in the paper
    says: str                                   # the claim in one sentence
    theirs: str                                 # the figures that it prints, and in which of them it disagrees
    cost: str                                   # of COSTS
    rule: str                                   # what agrees, what contradicts; between the two is mixed
    reading: Reading | None                     # None: out of reach
    note: str = ""                              # what had to be asked otherwise than planned, and why; what it leaves
    variations: tuple[str, ...] = ()            # set-ups of lab_runs.SETUPS in which the same rule is applied again
    elsewhere: dict[str, Reading] = {}          # {name: the same question, to other runs}
    seeds: int = 3                              # how many, at most


# ----------------------------------------------------------------------------------------------- the words of the rules


class Verdict(str):
    """One of VERDICTS, and by: the numbers that decided it, {name: (seeds,), one, or words}."""
    by = {}


def decide(agrees, contradicts, testable=True, by=None):
    """The verdict of two conditions, each of which must hold with every seed that it is given; where both do or
    neither, mixed. by: what they compare, where a reading's columns do not show it."""
    yes, no = holds(agrees), holds(contradicts)
    found = Verdict(UNTESTABLE if not holds(testable) else MIXED if yes == no else AGREES if yes else CONTRADICTS)
    found.by = by or {}
    return found


def holds(condition):
    """Is it true throughout? A truth, an array of them, or a list of either."""
    return all(map(holds, condition)) if isinstance(condition, list) else bool(np.all(condition))


def below(a, b):
    """Is a lower than b beyond 2 standard deviations? Both (seeds,), paired by seed; one seed shows nothing."""
    less = np.subtract(a, b)
    return len(less) > 1 and less.mean() < -2 * less.std(ddof=1)


def every(column, bound):
    """Does bound(values) hold for all runs of a column?"""
    return all(np.all(bound(values)) for values in column.values())


def rank_correlation(a, b):
    """Spearman's, of two lists; equal values share their mean rank. 0 where a list is all the same."""
    a, b = ((x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (np.ravel(a), np.ravel(b)))
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0


def layer_means(values):
    """(seeds, layers, heads) to (layers,)."""
    return np.asarray(values, float).mean((0, 2))


def thirds(values):
    """The means of the first, middle and last third of a list; nan of a third that two layers do not have."""
    return [float(np.mean(part)) if len(part) else np.nan for part in np.array_split(np.asarray(values, float), 3)]
