"""The claims of the ledger, read from a .toml file for each paper, and the algebra that decides them.

A claim has the paper's statement and figures in words, `reads` (which numbers of which runs), `bounds` (the values with
which it holds, and those with which it fails) and `changes` (bounds that were changed after numbers had been seen).
Verdicts, sentences, tables and pictures all come from the bounds. In a .toml file

    about       place in the paper, class of COSTS, and what differs from the defaults of Claim and Reading
    reads       a line for some runs: "RUN RUN @SETUP: COLUMN = PATH | COLUMN = PATH". Braces stand for several columns:
                "at {64,128} = lengths/{0,1}/sink", or before the colon for several lines
    bounds      "words | quantity | agrees CONDITION | contradicts CONDITION | ..", with the fields of Bound. Braces
                stand for several lines
    changes     "date | before -> after | verdict before -> after | why"
    [ID.NAME]   another reading: the same question about other runs. Those of the best grade decide the claim.
                Instead of `reads`, `like` says what differs from the claim's own: "OLD -> NEW | OLD -> NEW"

and a line that begins with a space continues the one before.
"""
import hashlib
import re
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evals.lab_runs import PUBLIC, SETUPS, TIMED, expanded, fields, read_toml
from evals.ledger import quantities
from evals.ledger.experiments import CONSTANT

WORDS = read_toml(Path(__file__).with_name("words.toml"))
COSTS, GRADES, KINDS = (WORDS[name] for name in ("costs", "grades", "kinds"))      # each {name: what it means}

AGREES, CONTRADICTS, MIXED, UNTESTABLE, NOT_RUN = "agrees", "contradicts", "mixed", "not testable", "not run here"
VERDICTS = (AGREES, MIXED, CONTRADICTS, UNTESTABLE, NOT_RUN)
WHY_MIXED = {                                   # {(whether a part holds, whether a part does not hold)}
    (True, True): "one part holds, another does not", (True, False): "one part holds, another is undecided",
    (False, True): "it does not hold, but does not fail clearly", (False, False): "its interval contains a bound"}

# A claim about sinks needs runs in which softmax has one. Readings with the column SOFTMAX_SINK ask for it
SOFTMAX_SINK = "softmax itself, x uniform"
LEAST_SINK = 4                                  # times the weight of an even spread

# Shares of a row are judged by their log-odds, as -4 is as far from 0 as 4 is. Beyond these ends they are equal
SHARES = {"sink_idle", "extra_idle", "share_idle", "sparsity", "negative"}
LEAST_SHARE = 1e-4

# -------------------------------------------------------------------------------------------------------- what a row is


@dataclass(frozen=True)
class Bound:
    """One quantity, which has a number for each seed, and conditions on it: "<= 0.1", "> 4", "== 0" or "0.4 to 0.8". A
    condition is met if the whole 95 % interval of the mean meets it. A number without an interval, which is one run or
    one number of all seeds together, is compared as it is.

    quantity: COLUMN, or some of its runs, COLUMN[RUN RUN], perhaps with " / " or " - " and another column or a run of
        the same one. FUNCTION(..) of quantities.py: of EACH, around any of these or around a COLUMN; or of TOGETHER,
        FUNCTION(ARGUMENT; ARGUMENT).
    error: the column of its standard errors, if the seeds do not decide; or "windows": a quantity (seeds, windows),
        whose windows decide.
    sink: a column of weights on the first token, in multiples of an even spread, or COLUMN/RUN. If one is below 4, this
        bound is not tested.
    """
    what: str                                   # the quantity in words
    quantity: str
    agrees: str = ""                            # the condition with which the claim holds; empty: it has no say
    contradicts: str = ""                       # the condition with which the claim fails
    needs: str = ""                             # the condition without which the claim cannot be tested
    error: str = ""
    sink: str = ""


@dataclass(frozen=True)
class Reading:
    """What to measure, and the bounds on it.

    reads: {column: (path, runs)}, runs separated by spaces. A column has, for each run, the number or list at this path
        of the run's report, of a check's result if the run is one of CHECKS, or of the result of the command in
        COMMANDS or the look in LOOKS (a measurement of a run that only the ledger makes) with which the path begins.
    """
    reads: dict[str, tuple[str, str]]
    bounds: tuple[Bound, ...]
    fails: str = "all"                          # the claim fails if "all" or "any" of its conditions `contradicts` hold
    own_grade: str = ""                         # of GRADES; empty: that of its runs
    aside: bool = False                         # it never decides the claim

    @property
    def runs(self):
        return " ".join(runs for _, runs in self.reads.values()).split()

    @property
    def costs(self):
        """The cost classes of the runs."""
        return {"public-weights" if run in PUBLIC else "gpu-minutes" if run in TIMED else
                SETUPS[run.partition("@")[2] or "lab"].cost for run in self.runs}

    @property
    def grade(self):
        """What kind of evidence the numbers are, of GRADES. Kernels are timed on random tensors."""
        return "lab" if set(self.runs) <= TIMED.keys() else self.own_grade or max(
            (WORDS["grade of"][cost] for cost in self.costs), key=list(GRADES).index)

    @property
    def fingerprint(self):
        """Changes if anything changes that decides a verdict. Those of frozen.json may no longer change."""
        judged = self.reads, [astuple(bound) for bound in self.bounds], self.fails
        return hashlib.sha256(repr(judged).encode()).hexdigest()[:12]


class Change(NamedTuple):
    """A change of a claim's words or bounds. verdicts: before and after, on the same numbers unless `why` denies it."""
    date: str
    changed: str
    verdicts: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of a paper, how it is tested, and what decides it."""
    id: str
    paper: str                                  # its title
    place: str                                  # section, figure or table of the paper
    says: str                                   # the claim in one sentence
    theirs: str                                 # the paper's figures, and where they contradict each other
    cost: str                                   # of COSTS: the cheapest run that can decide it
    kind: str = "claim"                         # of KINDS
    readings: dict[str, Reading]                # as written (""), in the set-ups of `variations`, and on other runs
    tested: str = ""                            # in words, what the bounds have in common
    note: str = ""                              # what the bounds leave out, and why
    variations: tuple[str, ...] = ()            # other set-ups of lab_runs.SETUPS for the same bounds
    seeds: int = 3                              # the most seeds of runs that take long (cpu-hours, gpu-minutes)
    changes: tuple[Change, ...] = ()            # oldest first; each makes a new version of the claim

    @property
    def version(self):
        return 1 + len(self.changes)

    @property
    def cheapest(self):
        """The cost class of the cheapest reading, or the claim's own if it has none."""
        return min(map(self.cost_of, self.readings), key=list(COSTS).index, default=self.cost)

    def cost_of(self, where):
        """The cost class of one reading: the claim's own, or that of the dearest run which it needs."""
        return max(self.readings[where].costs, key=list(COSTS).index) if where else self.cost

    def seeds_of(self, reading, seeds):
        """The seeds of a reading: [0] for runs without seeds, and at most self.seeds for runs that take long."""
        return ([0] if CONSTANT.issuperset(reading.runs) else
                seeds[:self.seeds] if {"gpu-minutes", "cpu-hours"} & reading.costs else seeds)

    def moved_to(self, verdict):
        """Has a changed bound led to this verdict, if it is a decision?"""
        moves = (change.verdicts.split(" -> ") for change in self.changes)
        return verdict in (AGREES, CONTRADICTS) and any(before != after == verdict for before, after in moves)

    def decided_by(self, judged):
        """The readings that decide, a list: those of the best grade that can be tested. Other set-ups decide only in
        place of a GPU. judged: {where: Verdict} of the readings with numbers, perhaps with the headline."""
        left_out = () if self.cost == "gpu-minutes" else self.variations
        able = [where for where, reading in self.readings.items()
                if where in judged and where not in left_out and not reading.aside]
        able = [where for where in able if judged[where] != UNTESTABLE] or able
        ranks = {where: list(GRADES).index(self.readings[where].grade) for where in able}
        return [where for where, rank in ranks.items() if rank == max(ranks.values())]

    def headline(self, judged):
        """The Verdict of the readings that decide. It is mixed if they differ."""
        verdicts = [judged[where] for where in self.decided_by(judged)]
        if len(set(verdicts)) < 2:
            return verdicts[0] if verdicts else Verdict(NOT_RUN)
        return Verdict(MIXED, why="readings of one grade differ")


# ------------------------------------------------------------------------------------------------------------ the files


def claim_of(name, paper, row):
    """The Claim of one table."""
    about = row.pop("about")
    variations, own_grade = tuple(about.pop("variations", "").split()), about.pop("own_grade", "")
    fails = about.pop("fails", "all")
    texts = {key: " ".join(row.get(key, "").split()) for key in ("says", "theirs", "tested", "note")}
    changes = tuple(Change(*line.split(" | ")) for line in lines(row.get("changes", "")))
    reads, bounds, found = columns_of(row.get("reads", "")), bounds_of(row), {}
    if reads:
        found[""] = Reading(reads, bounds, fails, own_grade)
    for setup in variations:
        moved = {column: (path, " ".join(f"{run.partition('@')[0]}@{setup}" for run in runs.split()))
                 for column, (path, runs) in reads.items()}
        needed = {SOFTMAX_SINK: ("times_uniform_idle", "softmax@nobos")} if setup == "nobos" else {}
        found[setup] = Reading(moved | needed, bounds, fails)
    for where, part in row.items():
        if isinstance(part, dict):
            text = part.get("reads", row.get("reads"))
            for change in fields(part.get("like", "")):
                text = text.replace(*change.split(" -> ")) if change else text
            own = bounds_of(part) or bounds_of(row.get(part.get("bounds_of"), row))
            found[where] = Reading(columns_of(text), own, fails, **part.get("about", {}))
    asked = (Bound(SOFTMAX_SINK, SOFTMAX_SINK, needs=f">= {LEAST_SINK}"),)
    found = {where: replace(reading, bounds=reading.bounds + asked) if SOFTMAX_SINK in reading.reads else reading
             for where, reading in found.items()}
    return Claim(id=name, paper=paper, **texts, **about, variations=variations, readings=found, changes=changes)


def lines(text):
    """The lines of a table."""
    return re.sub(r"\n +", " ", text.strip()).splitlines()


def columns_of(text):
    """The `reads` of a Reading."""
    found = {}
    for line in (one for each in lines(text) for one in (expanded(each) if "{" in each.split(": ")[0] else [each])):
        runs, _, columns = line.partition(": ")
        *names, last = runs.split()
        runs = " ".join(name + last for name in names) if last.startswith("@") else runs
        for column in columns.split(" | "):
            for one in expanded(column):
                name, _, path = one.partition(" = ")
                found[name] = (path, runs)
    return found


def bounds_of(part):
    """The bounds of a claim or of a reading."""
    found = []
    for line in (one for each in lines(part.get("bounds", "")) for one in expanded(each)):
        what, quantity, *conditions = line.split(" | ")
        found.append(Bound(what, quantity, **dict(condition.split(" ", 1) for condition in conditions)))
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------- verdicts


SIGNS = {"<=": np.less_equal, "<": np.less, ">=": np.greater_equal, ">": np.greater, "==": np.equal}


def parts_of(condition):
    """A condition as pairs of a sign and a number: "0.4 to 4/5" is [(">=", 0.4), ("<=", 0.8)]."""
    low, to, high = condition.partition(" to ")
    return [(sign, float(Fraction(x))) for sign, x in ([(">=", low), ("<=", high)] if to else [condition.split(" ")])]


def log_odds(share):
    share = np.clip(share, LEAST_SHARE, 1 - LEAST_SHARE)
    return np.log(share / (1 - share))


def share_of(odds):
    """The inverse of log_odds."""
    return 1 / (1 + np.exp(-odds))


class Quantity(NamedTuple):
    """What a bound found for one run."""
    name: str
    bound: Bound
    values: np.ndarray                          # (seeds,)
    errors: np.ndarray | None                   # (seeds,), if they were measured
    tested: bool = True                         # False: the sink that the bound needs is missing, or a value is nan
    share: bool = False                         # judged by its log-odds

    @property
    def scaled(self):
        return log_odds(self.values) if self.share else self.values

    @property
    def interval(self):
        """The 95 % interval of the mean, (low, high)."""
        ends = np.array(quantities.interval(self.scaled, self.errors))
        return share_of(ends) if self.share else ends

    @property
    def mean(self):
        mean = self.scaled.mean()
        return share_of(mean) if self.share else mean

    def chance(self, condition):
        """The chance of a mean like this one or a clearer one if the condition were just not met: Student's t,
        one-sided; for a range the larger one of its two ends. 0 or 1 for a number without an interval."""
        mean, error, degrees = quantities.estimate(self.scaled, self.errors)

        def chance_at(sign, bound):
            if error == 0 or sign == "==":
                return float(not SIGNS[sign](self.values, bound).all())
            distance = (mean - (log_odds(bound) if self.share else bound)) / error
            return quantities.tail(distance if sign[0] == ">" else -distance, degrees)
        return max(chance_at(*part) for part in parts_of(condition))


class Verdict(str):
    """One of VERDICTS. quantities: what decided it. why: of a mixed verdict. chance: that of numbers like these if the
    claim were just neither true nor false."""

    def __new__(cls, verdict, quantities=(), why="", chance=1.0):
        self = super().__new__(cls, verdict)
        self.quantities, self.why, self.chance = quantities, why, chance
        return self


def judge(reading, numbers, level=quantities.LEVEL):
    """The verdict on numbers {column: {run: [a value for each seed]}}. The set-up is part of the runs' names. level:
    the largest chance with which a condition counts as met."""
    every = found_by(reading, numbers)
    found = [quantity for quantity in every if quantity.tested]
    yes, no, needs = ([quantity.chance(condition) for quantity in found
                       if (condition := getattr(quantity.bound, name))] for name in ("agrees", "contradicts", "needs"))
    agrees = max(yes, default=1.0)
    contradicts = max(no, default=1.0) if reading.fails == "all" else min([1.0, *(len(no) * chance for chance in no)])
    chance, half = min(agrees, contradicts), len(found) < len(every)
    if not yes + no or max(needs, default=0.0) > quantities.LEVEL:
        return Verdict(UNTESTABLE, every)
    if max(agrees, contradicts) <= level:
        return Verdict(MIXED, every, "its bounds overlap", chance)
    if agrees <= level and half:
        return Verdict(MIXED, every, "one part cannot be tested")
    if chance <= level:
        return Verdict(AGREES if agrees <= level else CONTRADICTS, every, "", chance)
    if chance <= quantities.LEVEL and not half:
        alone = AGREES if agrees == chance else CONTRADICTS
        return Verdict(MIXED, every, f"{alone} by itself, but not clearly enough among all rows of its paper", chance)
    holds, fails = min(yes, default=1.0) <= quantities.LEVEL, max(yes, default=0.0) >= 1 - quantities.LEVEL
    return Verdict(MIXED, every, WHY_MIXED[holds, fails], chance)


def verdicts_of(found):
    """{claim: {"claim": the headline, where: Verdict of each reading}} of numbers {claim: {where: its numbers}}. The
    readings that decide a paper's claims share one level (`quantities.holm`), but for numbers without an interval."""
    judged = {name: {where: judge(reading, found[name][where]["numbers"]) for where, reading in claim.readings.items()
                     if where in found.get(name, {})} for name, claim in CLAIMS.items()}
    for claims in PAPERS.values():
        chances = {(name, where): judged[name][where].chance for name, claim in claims.items()
                   for where in claim.decided_by(judged[name]) if 0 < judged[name][where].chance < 1}
        for (name, where), level in quantities.holm(chances).items():
            judged[name][where] = judge(CLAIMS[name].readings[where], found[name][where]["numbers"], level)
    return {name: {"claim": CLAIMS[name].headline(own)} | own for name, own in judged.items()}


def found_by(reading, numbers):
    """What the bounds of a reading found, [Quantity]."""
    arrays = {column: {run.split("@")[0]: np.array(values, float) for run, values in group.items()}
              for column, group in numbers.items()}
    found = []
    for bound in reading.bounds:
        values = values_of(bound.quantity, arrays)
        errors, (column, _, one) = arrays.get(bound.error, {}), bound.sink.partition("/")
        tested = all(np.mean(sink) >= LEAST_SINK for run, sink in arrays.get(column, {}).items() if one in ("", run))
        path, _ = reading.reads.get(re.sub(r"\[[^]]*\]$", "", bound.quantity), ("", ""))    # a column, or some runs
        for run, value in values.items():
            error = errors.get(run, next(iter(errors.values()), None))
            if bound.error == "windows":
                value, error = value.mean(1), value.std(1, ddof=1) / value.shape[1] ** 0.5
            name, value = f"{bound.what}, {run}" if len(values) > 1 and run else bound.what, np.ravel(value)
            share = path.split("/")[-1] in SHARES and error is None and bool(np.all((value >= 0) & (value <= 1)))
            found.append(Quantity(name, bound, value, error, tested and not np.isnan(value).any(), share))
    return found


def values_of(quantity, n):
    """{run: array} of the quantity of a bound."""
    if call := re.fullmatch(r"(\w+)\(([^()]*)\)", quantity):
        name, inside = call.groups()
        if name in quantities.EACH:
            return {run: quantities.EACH[name](values) for run, values in values_of(inside, n).items()}
        values = quantities.TOGETHER[name](n, *filter(None, inside.split("; ")))
        return values if isinstance(values, dict) else {"": values}
    column, sign, other = re.fullmatch(r"(.*?)(?: ([/-]) (.*))?", quantity).groups()
    column, _, runs = column.partition("[")
    every, found = values_of(column, n) if "(" in column else n[column], {}
    for run in runs[:-1].split() or every:
        if not sign:
            found[run] = every[run]
        elif run != other:                      # with another column of the same run, or another run of the column
            rival = n[other].get(run, next(iter(n[other].values()))) if other in n else every[other]
            found[run] = every[run] / rival if sign == "/" else every[run] - rival
    return found


# ---------------------------------------------------------------------------------------------------------- all of them

PAPERS, CITED, FILES = {}, {}, {}               # {title: its claims {id: Claim}, its full name, the name of its file}
for name in ("lazy", "threshold", "focus", "native_moe", "emerges", "later"):
    rows = read_toml(Path(__file__).with_name(f"{name}.toml"))
    title = rows.pop("title")
    FILES[title], CITED[title] = name, rows.pop("cited")
    PAPERS[title] = {key: claim_of(key, title, row) for key, row in rows.items()}
CLAIMS = {key: claim for claims in PAPERS.values() for key, claim in claims.items()}


def in_words(claim, reading):
    """The bounds of a reading in one sentence."""
    parts = (("agrees", "agrees", "and"), ("contradicts", "contradicts", "and" if reading.fails == "all" else "or"),
             ("testable only with", "needs", "and"))
    said = [f"{label}: {f', {joint} '.join(conditions)}" for label, name, joint in parts if (conditions := [
        f"{bound.what} {condition}" for bound in reading.bounds if (condition := getattr(bound, name))])]
    return (f"{claim.tested}: " if claim.tested else "") + "; ".join(said)
