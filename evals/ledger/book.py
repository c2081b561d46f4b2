"""All claims, paper by paper: the set-ups in which each is tested, the jobs that this takes, and the verdicts."""
import numpy as np

from evals.ledger import emerges, focus, lazy, native_moe, threshold
from evals.ledger.claim import GATE, NOBOS_GATE, NOT_RUN, SINK, decide
from evals.ledger.experiments import CONSTANT, PUBLIC, TIMED, job_of

PAPERS = {paper.TITLE: paper.CLAIMS for paper in (lazy, threshold, focus, native_moe, emerges)}
CLAIMS = {claim.id: claim for claims in PAPERS.values() for claim in claims}

# ------------------------------------------------------------------------------------------------------ the questions


def readings(claim):
    """{where: (Reading, its cost class)} of a claim: as written (""), in other set-ups, and on other runs."""
    found = {"": (claim.reading, claim.cost)} if claim.reading else {}
    for setup in claim.variations:
        moved = {column: (path, " ".join(f"{run}@{setup}" for run in runs.split()))
                 for column, (path, runs) in claim.reading.reads.items()}
        gate = NOBOS_GATE if setup == "nobos" else {}
        found[setup] = claim.reading._replace(reads=moved | gate), claim.cost
    return found | {name: (reading, cost_of(reading)) for name, reading in claim.elsewhere.items()}


def cost_of(reading):
    """The cost class of a reading of other runs."""
    runs = runs_of(reading)
    gpu = any("@gpu" in run or run in TIMED for run in runs)
    return "gpu-minutes" if gpu else "public-weights" if any(run in PUBLIC for run in runs) else "lab"


def runs_of(reading):
    """The names of all runs that a reading uses."""
    return " ".join(runs for _, runs in reading.reads.values()).split()


def seeds_of(claim, reading, seeds):
    """The seeds of a reading: at most claim.seeds, and [0] for runs without seeds."""
    return [0] if CONSTANT.issuperset(runs_of(reading)) else seeds[:claim.seeds]


def jobs_of(reading, seeds, where):
    """{(column, run): [the job of each seed]}."""
    return {(column, run): [job_of(run, path, seed, where) for seed in seeds]
            for column, (path, runs) in reading.reads.items() for run in runs.split()}


# ------------------------------------------------------------------------------------------------------------- verdicts


def verdicts_of(claim, found):
    """{where: verdict} of a claim. found: {where: its numbers}."""
    judged = {name: judge(reading, found[name]["numbers"]) for name, (reading, _) in readings(claim).items()
              if name in found}
    return {"": NOT_RUN} | judged


def readable(found):
    """{claim: {where: numbers}} without numbers of another version of the ledger, which have other columns or runs."""
    return {claim.id: {name: found[claim.id][name] for name, (reading, _) in readings(claim).items()
                       if name in found[claim.id] and fits(reading, found[claim.id][name]["numbers"])}
            for claim in CLAIMS.values() if claim.id in found}


def fits(reading, numbers):
    """Do these numbers have the reading's columns and runs?"""
    return {column: runs.split() for column, (_, runs) in reading.reads.items()} == {
        column: list(group) for column, group in numbers.items()}


def judge(reading, numbers):
    """The verdict on numbers {column: {run: [a value for each seed]}}. The set-up is part of the runs' names."""
    arrays = {column: {run.split("@")[0]: np.array(values, float) for run, values in group.items()}
              for column, group in numbers.items()}
    gate = np.array(list(arrays.pop(GATE, {}).values()))
    if np.any(gate < SINK):
        return decide(False, False, testable=False, by={GATE: gate.ravel()})
    return reading.verdict(arrays)


def flips(verdicts):
    """The set-ups whose verdict differs from that of the claim as written."""
    return {name: verdict for name, verdict in verdicts.items() if verdict != verdicts[""]}
