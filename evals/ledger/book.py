"""All claims, paper by paper: what each costs and what its evidence is, the jobs that it takes, and its verdicts."""
from evals.lab_runs import PUBLIC, SETUPS
from evals.ledger import emerges, focus, lazy, native_moe, threshold
from evals.ledger.claim import COSTS, GRADES, NOT_RUN, judge, readings
from evals.ledger.experiments import CONSTANT, TIMED, job_of

FILES = (lazy, threshold, focus, native_moe, emerges)
PAPERS = {paper.TITLE: paper.CLAIMS for paper in FILES}
CITED = {paper.TITLE: paper.CITED for paper in FILES}
CLAIMS = {claim.id: claim for claims in PAPERS.values() for claim in claims}

# ------------------------------------------------------------------------------------------------------- of a reading


def runs_of(reading):
    """The names of all runs that a reading uses."""
    return " ".join(runs for _, runs in reading.reads.values()).split()


def costs_of(reading):
    """The cost classes of a reading's runs."""
    return {"public-weights" if run in PUBLIC else "gpu-minutes" if run in TIMED else
            SETUPS[run.partition("@")[2] or "lab"].cost for run in runs_of(reading)}


def cost_of(claim, where):
    """The cost class of one reading of a claim: the claim's own, or that of the dearest run which it needs."""
    return max(costs_of(readings(claim)[where]), key=list(COSTS).index) if where else claim.cost


def cheapest(claim):
    """The cost class of a claim's cheapest reading, or its own if it has none."""
    return min((cost_of(claim, where) for where in readings(claim)), key=list(COSTS).index, default=claim.cost)


def grade_of(reading):
    """What kind of evidence a reading's numbers are, of claim.GRADES."""
    if set(runs_of(reading)) <= TIMED.keys():   # kernels are timed on random tensors
        return "lab"
    return reading.grade or max((GRADE_OF[cost] for cost in costs_of(reading)), key=list(GRADES).index)


GRADE_OF = {"lab": "lab", "cpu-minutes": "tiny text", "gpu-minutes": "small text", "cpu-hours": "real model",
            "public-weights": "real model"}


def seeds_of(claim, reading, seeds):
    """The seeds of a reading: [0] for runs without seeds, and at most claim.seeds for runs that take long."""
    return ([0] if CONSTANT.issuperset(runs_of(reading)) else
            seeds[:claim.seeds] if {"gpu-minutes", "cpu-hours"} & costs_of(reading) else seeds)


def jobs_of(reading, seeds, folders):
    """{(column, run): [the job of each seed]}."""
    return {(column, run): [job_of(run, path, seed, folders) for seed in seeds]
            for column, (path, runs) in reading.reads.items() for run in runs.split()}


# ------------------------------------------------------------------------------------------------------------ verdicts


def verdicts_of(claim, found):
    """{where: Verdict} of a claim, of readings with numbers. found: {where: its numbers}. Under "" is the verdict of
    the claim: that of the reading that decides it."""
    judged = {where: judge(reading, found[where]["numbers"]) for where, reading in readings(claim).items()
              if where in found}
    return {"": judged.get(decided_by(claim, found), NOT_RUN)} | judged


def decided_by(claim, found):
    """The reading that decides a claim: the first that has numbers, as written ("") or elsewhere; None if it is not
    run. Another set-up decides only in place of a GPU."""
    others = (*claim.elsewhere, *(claim.variations if claim.cost == "gpu-minutes" else ()))
    return next((where for where in ("", *others) if where in found), None)


def readable(found):
    """{claim: {where: numbers}} without numbers of another version of the ledger, which have other columns or runs."""
    return {claim.id: {where: found[claim.id][where] for where, reading in readings(claim).items()
                       if where in found[claim.id] and fits(reading, found[claim.id][where]["numbers"])}
            for claim in CLAIMS.values() if claim.id in found}


def fits(reading, numbers):
    """Do these numbers have the reading's columns and runs?"""
    return {column: runs.split() for column, (_, runs) in reading.reads.items()} == {
        column: list(group) for column, group in numbers.items()}


def evidence(claim, found):
    """The grade of the numbers that decide a claim; None if it is not run."""
    where = decided_by(claim, found)
    return None if where is None else grade_of(readings(claim)[where])
