"""A row of the ledger: a claim of a paper, what is measured for it, and the bounds that decide it.

A Bound is data: a quantity, the values with which the claim holds, and those with which it fails. Verdicts, sentences,
tables and pictures all come from the bounds.
"""
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

COSTS = {                                       # class: what a measurement needs
    "lab": "one-layer models and exact checks, on a CPU",
    "cpu-minutes": "small models on text, on a CPU",
    "public-weights": "the weights of SmolLM2 or GPT-2",
    "cpu-hours": "routers beside the weights of out/smollm2: up to an hour each on a CPU",
    "gpu-minutes": "models of 30M parameters, or timings of kernels: at most ten minutes on one H200",
    "out of reach": "more than that"}

GRADES = {                                      # what kind of evidence numbers are, from the weakest on
    "identity": "it follows from the definition and could not have come out otherwise",
    "lab": "a one-layer model on a synthetic task, or random tensors",
    "tiny text": "a model of 1M parameters on text",
    "small text": "a model of 30M parameters on text",
    "real model": "GPT-2, or SmolLM2 (135M parameters)",
    "the paper's own": "the paper's models or printed numbers"}

AGREES, CONTRADICTS, MIXED, UNTESTABLE, NOT_RUN = "agrees", "contradicts", "mixed", "not testable", "not run here"
VERDICTS = (AGREES, MIXED, CONTRADICTS, UNTESTABLE, NOT_RUN)

# ------------------------------------------------------------------------------------------------------- what a row is


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One quantity, which has a number for each seed, and conditions on it.

    The quantity is a column of the reading, for each of its runs. `over` divides it by another number, and `less`
    subtracts one. `value` computes any other quantity.
    Every seed must meet a condition: "<= 0.1", "> 4", "== 0" or "0.4 to 0.8". "clearly < 0" holds if the whole 95 %
    interval of the mean lies below 0, "could be 0" if the interval contains 0. "not " in front negates a condition.
    """
    what: str                                   # the quantity in words
    column: str = ""                            # of the reading
    of: str = ""                                # its runs, separated by spaces; empty: all
    over: str = ""                              # divide by another column, or by a run of the same column
    less: str = ""                              # subtract it
    value: Callable | None = None               # {column: {run: array}} -> (seeds,), or {name: (seeds,)}; nan: it
                                                # cannot be tested
    agrees: str = ""                            # the condition with which the claim holds; empty: it has no say
    contradicts: str = ""                       # the condition with which the claim fails
    needs: str = ""                             # the condition without which the claim cannot be tested
    means: bool = False                         # conditions are on the mean over seeds
    error: str = ""                             # the column of its standard errors, if the seeds do not decide; or
                                                # "windows": a quantity (seeds, windows), whose windows decide
    sink: str = ""                              # a column of weights on the first token, in multiples of an even
                                                # spread, or COLUMN/RUN; if one is below 4, this bound is not tested


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What to measure, and the bounds on it.

    reads: {column: (path, runs)}, runs separated by spaces. A column has, for each run, the number or list at this path
        of the run's report. If the path begins with a command of experiments.COMMANDS, or with a look (one of LOOKS: a
        measurement of a run that only the ledger makes), it is a path in that one's result. If a run is one of CHECKS,
        it is a path in the result of that check.
    bounds: if this reading has none, it has those of its claim.
    """
    reads: dict[str, tuple[str, str]]
    bounds: tuple[Bound, ...] = ()
    fails: str = ""                             # the claim fails if "all" or "any" of its conditions `contradicts` hold
    grade: str = ""                             # of GRADES; empty: that of its runs


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, how it is tested, and what decides it."""
    id: str
    place: str                                  # section, figure or table of the paper
    says: str                                   # the claim in one sentence
    theirs: str                                 # the paper's figures, and where they contradict each other
    cost: str                                   # of COSTS: the cheapest run that can decide it
    tested: str = ""                            # in words, what the bounds have in common
    reads: dict = field(default_factory=dict)   # as of a Reading; empty: out of reach
    bounds: tuple[Bound, ...] = ()
    fails: str = "all"
    grade: str = ""
    variations: tuple[str, ...] = ()            # other set-ups of lab_runs.SETUPS for the same bounds
    elsewhere: dict[str, Reading] = field(default_factory=dict)         # {name: the same question about other runs}
    note: str = ""                              # what the bounds leave out, and why
    seeds: int = 3                              # the most seeds of runs that take long (cpu-hours, gpu-minutes)


# A claim about sinks needs runs in which softmax has one. Readings with the column SOFTMAX_SINK ask for it
SOFTMAX_SINK = "softmax itself, x uniform"
LEAST_SINK = 4                                  # times the weight of an even spread
HAS_SINK = Bound(what=SOFTMAX_SINK, column=SOFTMAX_SINK, needs=f">= {LEAST_SINK}")
GPU_SOFTMAX_SINK = {SOFTMAX_SINK: ("times_uniform", "softmax@gpu")}
NOBOS_SOFTMAX_SINK = {SOFTMAX_SINK: ("times_uniform_idle", "softmax@nobos")}


def readings(claim):
    """{where: Reading} of a claim: as written (""), in other set-ups, and on other runs."""
    found = {"": Reading(reads=claim.reads, grade=claim.grade)} if claim.reads else {}
    for setup in claim.variations:
        moved = {column: (path, " ".join(f"{run.partition('@')[0]}@{setup}" for run in runs.split()))
                 for column, (path, runs) in claim.reads.items()}
        found[setup] = Reading(reads=moved | (NOBOS_SOFTMAX_SINK if setup == "nobos" else {}))
    found |= claim.elsewhere
    return {where: replace(reading, fails=reading.fails or claim.fails,
                           bounds=(reading.bounds or claim.bounds) + (HAS_SINK,) * (SOFTMAX_SINK in reading.reads))
            for where, reading in found.items()}


# ---------------------------------------------------------------------------------------------------------- conditions


SIGNS = {"<=": np.less_equal, "<": np.less, ">=": np.greater_equal, ">": np.greater, "==": np.equal}


def meets(condition, values):
    """Which of these numbers meet a condition without "clearly" and "not"."""
    if " to " in condition:
        low, high = map(number, condition.split(" to "))
        return (values >= low) & (values <= high)
    sign, bound = condition.split(" ")
    return SIGNS[sign](values, number(bound))


def number(text):
    """"0.3" or "1/3" as a float."""
    return float(Fraction(text))


# Student's t at 97.5 %, of 1, 2, .. degrees of freedom. With more than 10 seeds the last makes the interval too wide
T95 = (12.70620, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216)


def interval(values, errors=None):
    """The 95 % interval of the mean over seeds, (low, high): Student's t, or 1.96 standard errors if they are given.
    One seed without an error has none: (-inf, inf)."""
    mean = np.mean(values)
    if errors is not None:
        half = 1.96 * np.sqrt(np.mean(np.square(errors)) / len(values))
    elif len(values) < 2:
        half = np.inf
    else:
        half = T95[min(len(values) - 2, len(T95) - 1)] * np.std(values, ddof=1) / len(values) ** 0.5
    return mean - half, mean + half


# ------------------------------------------------------------------------------------------------------------ verdicts


class Quantity(NamedTuple):
    """What a bound found for one run."""
    name: str
    bound: Bound
    values: np.ndarray                          # (seeds,)
    errors: np.ndarray | None                   # (seeds,), if they were measured
    tested: bool = True                         # False: the sink that the bound needs is missing, or a value is nan

    @property
    def interval(self):
        return interval(self.values, self.errors)

    def holds(self, condition):
        """Whether a condition is met: one boolean for each seed, or one for the mean or the interval."""
        low, high = self.interval
        if condition.startswith("could be "):
            return np.array([low <= number(condition.removeprefix("could be ")) <= high])
        asked = condition.removeprefix("not ")
        if asked.startswith("clearly "):
            met = np.all(meets(asked.removeprefix("clearly "), np.array([low, high])), keepdims=True)
        else:
            met = meets(asked, np.mean(self.values, keepdims=True) if self.bound.means else self.values)
        return met if asked == condition else ~met


class Verdict(str):
    """One of VERDICTS. quantities: what decided it. why: of a mixed verdict."""
    quantities, why = (), ""


def judge(reading, numbers):
    """The verdict on numbers {column: {run: [a value for each seed]}}. The set-up is part of the runs' names."""
    every = quantities(reading, numbers)
    found = [quantity for quantity in every if quantity.tested]
    asked = [quantity for quantity in found if quantity.bound.agrees]
    yes = [quantity.holds(quantity.bound.agrees) for quantity in asked]
    no = [quantity.holds(quantity.bound.contradicts).all() for quantity in found if quantity.bound.contradicts]
    whole = [met.all() for met in yes]
    agrees, contradicts = all(whole), bool(no) and (any(no) if reading.fails == "any" else all(no))
    untestable = any(not quantity.holds(quantity.bound.needs).all() for quantity in found if quantity.bound.needs)
    half = agrees and len(found) < len(every)
    verdict = Verdict(UNTESTABLE if untestable or not found else MIXED if agrees == contradicts or half else
                      AGREES if agrees else CONTRADICTS)
    verdict.quantities = every
    if half:
        verdict.why = "one part cannot be tested"
    elif agrees and contradicts:
        verdict.why = "its bounds overlap"
    elif verdict == MIXED:
        split = [quantity.name for quantity, met in zip(asked, yes, strict=True) if met.any() and not met.all()]
        verdict.why = "seeds split" if split else "one part holds, another does not" if any(whole) else \
            "between the bounds"
    return verdict


def quantities(reading, numbers):
    """What the bounds of a reading found, [Quantity]."""
    arrays = {column: {run.split("@")[0]: np.array(values, float) for run, values in group.items()}
              for column, group in numbers.items()}
    found = []
    for bound in reading.bounds:
        values = bound.value(arrays) if bound.value else plain(bound, arrays)
        values = values if isinstance(values, dict) else {"": values}
        errors, (column, _, one) = arrays.get(bound.error, {}), bound.sink.partition("/")
        tested = all(np.all(sink >= LEAST_SINK) for run, sink in arrays.get(column, {}).items() if one in ("", run))
        for run, value in values.items():
            error = errors.get(run, next(iter(errors.values()), None))
            if bound.error == "windows":
                value, error = value.mean(1), value.std(1, ddof=1) / value.shape[1] ** 0.5
            name = f"{bound.what}, {run}" if len(values) > 1 and run else bound.what
            found.append(Quantity(name, bound, np.ravel(value), error, tested and not np.isnan(value).any()))
    return found


def plain(bound, arrays):
    """{run: array} of a bound whose quantity is a column, or its ratio or difference to another number."""
    column = arrays[bound.column]
    values = {run: column[run] for run in bound.of.split() or column}

    def other(name, run):                       # another column of the same run, or another run of the same column
        return arrays[name].get(run, next(iter(arrays[name].values()))) if name in arrays else column[name]

    if bound.over:
        values = {run: value / other(bound.over, run) for run, value in values.items() if run != bound.over}
    if bound.less:
        values = {run: value - other(bound.less, run) for run, value in values.items() if run != bound.less}
    return values


# ------------------------------------------------------------------------------------------------ the bounds in words


def in_words(claim, reading):
    """The bounds of a reading in one sentence."""
    parts = [("agrees", "agrees", "and"), ("contradicts", "contradicts", "and" if reading.fails == "all" else "or"),
             ("testable only with", "needs", "and")]
    said = []
    for label, name, joint in parts:
        conditions = [f"{bound.what} {condition}{' on average' * (bound.means and 'clearly' not in condition)}"
                      for bound in reading.bounds if (condition := getattr(bound, name))]
        said += [f"{label}: {f', {joint} '.join(conditions)}"] if conditions else []
    return (f"{claim.tested}: " if claim.tested else "") + "; ".join(said)


# ------------------------------------------------------------------------------------------------ for quantities


def rank_correlation(a, b):
    """Spearman's rank correlation of two lists. Equal values share their mean rank. 0 if a list is constant."""
    a, b = ((x[:, None] > x).sum(1) + (x[:, None] == x).sum(1) / 2 for x in (np.ravel(a), np.ravel(b)))
    return float(np.corrcoef(a, b)[0, 1]) if np.ptp(a) and np.ptp(b) else 0.0


def depth_correlation(layers):
    """The rank correlation of depth and a layer's number, seed by seed. layers (seeds, layers)."""
    return np.array([rank_correlation(range(len(seed)), seed) for seed in layers])


def thirds(layers):
    """The means of the first, middle and last third of the layers, seed by seed; nan for an empty third.
    layers (seeds, layers)."""
    return [part.mean(1) if part.size else np.full(len(part), np.nan) for part in np.array_split(layers, 3, 1)]
