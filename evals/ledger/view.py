"""The ledger as text and as a picture. found: {claim: {where: its numbers}}, from results/claims.json."""
import textwrap

import numpy as np

from evals.instrument import table
from evals.ledger.book import PAPERS, flips, jobs_of, readings, seeds_of, verdicts_of
from evals.ledger.claim import AGREES, CONTRADICTS, COSTS, MIXED, NOT_RUN, UNTESTABLE, VERDICTS
from evals.ledger.experiments import CHECKS, CONSTANT, all_jobs
from evals.pictures import pyplot, save_figure

# -------------------------------------------------------------------------------------------------------------- as text


WIDTH, HANGING = 118, " " * 26


def ledger(found, names):
    """The named claims, paper by paper: verdict, claim, the paper's figures, the rule, our figures."""
    parts, everything = [], []
    for title, claims in PAPERS.items():
        claims = [claim for claim in claims if claim.id in names]
        verdicts = [verdicts_of(claim, found.get(claim.id, {})) for claim in claims]
        parts += [f"{title}: {counted(verdicts)}"] * bool(claims)
        parts += [row(claim, verdict, found.get(claim.id, {})) for claim, verdict in zip(claims, verdicts, strict=True)]
        everything += verdicts
    total = f"all {len(everything)} claims: {counted(everything)}"
    return "\n\n".join([*parts, *[total] * (len(everything) > 1)])


def counted(verdicts):
    """The number of each verdict, as text."""
    here = [verdict[""] for verdict in verdicts]
    return ", ".join(f"{verdict}: {here.count(verdict)}" for verdict in VERDICTS if verdict in here)


def row(claim, verdicts, found):
    """One claim in a few lines."""
    lines = [f"{verdicts['']:<13} {claim.id}", hanging("claim", claim.says), hanging("theirs", claim.theirs)]
    lines += [hanging("rule", claim.rule)] if claim.reading else []
    if verdicts[""] != NOT_RUN:
        lines.append(hanging("ours", summary(found[""], verdicts[""])))
    elif claim.reading:
        lines.append(hanging("ours", f"takes {claim.cost}: python eval.py claims --run={claim.id}"))
    else:
        lines.append(hanging("ours", f"{claim.cost}: {claim.rule}"))
    for name in [name for name in verdicts if name]:
        lines.append(hanging("but" if verdicts[""] != NOT_RUN and name in flips(verdicts) else "also",
                             f"{name}: {verdicts[name]}; {summary(found[name], verdicts[name])}"))
    return "\n".join(lines)


def hanging(label, text):
    """A label, and a wrapped text to the right of it."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:>24}  ", subsequent_indent=HANGING)


def summary(found, verdict):
    """The numbers that decided the verdict, or the columns' means over seeds: "raw: softmax 0.97, elastic 0.001; mass:
    ... (seeds 2, 3, 4)"."""
    parts = decided_by(verdict) or [
        f"{column}: " + ", ".join(f"{named(run)}{mean_of(values)}" for run, values in group.items())
        for column, group in found["numbers"].items()]
    seeds = ", ".join(map(str, found["seeds"])) if any(found["seeds"]) else ""
    return "; ".join(parts) + (f" (seed{'s' * (len(found['seeds']) > 1)} {seeds})" if seeds else "")


def decided_by(verdict):
    """The numbers that a verdict compared, by seed or as a mean: ["eq. 8 over none: 0.93, 0.70, 0.61", ...]."""
    return [f"{name}: " + (value if isinstance(value, str) else ", ".join(f"{x:.3g}" for x in np.ravel(value)))
            for name, value in verdict.by.items()]


def named(run):
    """The recipe's name, which stands before its number; empty for a check, which has one number."""
    return "" if run in CHECKS or run in CONSTANT else f"{run.split('@')[0]} "


def mean_of(values):
    """The mean over seeds as text: a number, a short list, or the range of a long list."""
    mean = np.mean(np.array(values, float), 0).ravel()
    return ", ".join(f"{x:.3g}" for x in mean) if len(mean) <= 4 else f"{mean.min():.3g} to {mean.max():.3g}"


def shown(claim, results, where):
    """Everything about one claim: text, the paper's figures, the rule, and for each set-up verdict, numbers by seed and
    commands."""
    found = results["claims"].get(claim.id, {})
    verdicts = verdicts_of(claim, found)
    parts = [f"{claim.id}: {verdicts['']}", hanging("claim", claim.says), hanging("place", claim.place),
             hanging("theirs", claim.theirs), hanging("rule", claim.rule),
             hanging("cost", f"{claim.cost}: {COSTS[claim.cost]}")]
    parts += [hanging("note", claim.note)] if claim.note else []
    parts += [hanging("what changes it", changed_by(verdicts))]
    parts += [hanging("columns", columns(claim.reading))] if claim.reading else []
    for name, (reading, _) in readings(claim).items():
        jobs = jobs_of(reading, seeds_of(claim, reading, found.get(name, {}).get("seeds", [2])), where)
        parts.append(f"\n{name or 'as it stands'}: {verdicts.get(name, NOT_RUN)}\n")
        if name in found:
            parts += [hanging("decided by", line) for line in ["; ".join(decided_by(verdicts[name]))] if line]
            parts.append(by_seed(found[name]) + "\n")
        parts.append(commands(claim, jobs))
    return "\n".join(parts)


def changed_by(verdicts):
    """The other set-ups that were tried; first those with another verdict."""
    tried, flipped = [name for name in verdicts if name], flips(verdicts)
    parts = [f"{name} ({verdict})" for name, verdict in flipped.items()]
    same = [name for name in tried if name not in flipped]
    parts += [f"not {', '.join(same)}"] if same else []
    return "; ".join(parts) or "numbers beyond the bounds of the rule; no other set-up was tried"


def columns(reading):
    """The path that each column reads, in a run's report or in an instrument's JSON."""
    return "; ".join(f"{column} is {path}" for column, (path, _) in reading.reads.items())


def by_seed(found):
    """Every number, with a column for each seed."""
    rows = [[column, run, *(mean_of([value]) for value in values)]
            for column, group in found["numbers"].items() for run, values in group.items()]
    seeds = [f"seed {seed}" if seed else "" for seed in found["seeds"]]
    return f"{table(rows, ['', 'run', *seeds])}\n{made(found)}"


def made(found):
    """The commit and machine of the numbers of these seeds."""
    own = f"commit {(found['git_commit'] or 'unknown')[:9]}, {found['machine']}"
    earlier = found.get("earlier")
    return own + (f"\nof seeds {', '.join(map(str, earlier['seeds']))}: {made(earlier)}" if earlier else "")


def commands(claim, jobs):
    """The commands of the first seed, in order, and the measurements that only `claims` makes."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if job.words[0].endswith(".py")]
    lines += ["# the same with the other seeds"] * (bool(lines) and any(len(group) > 1 for group in jobs.values()))
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if not job.words[0].endswith(".py")))
    return "\n".join(lines + [f"python eval.py claims --run={claim.id}",
                              f"# this also measures what no other command does: {own}, in evals/ledger/"] * bool(own))


# --------------------------------------------------------------------------------------------------------- the picture


COLOURS = {AGREES: "#2c6fb3", MIXED: "#efc25a", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#e3e3e3"}


def draw(path, results):
    """All claims, with a column for each paper and a square for each verdict. Small squares below are the set-ups with
    another verdict."""
    figure, axes = pyplot().subplots(1, len(PAPERS), figsize=(16, 0.9 + 0.36 * max(map(len, PAPERS.values()))))
    for ax, (title, claims) in zip(axes, PAPERS.items(), strict=True):
        for y, claim in enumerate(claims):
            verdicts = verdicts_of(claim, results["claims"].get(claim.id, {}))
            ax.scatter(0, y, s=190, marker="s", color=COLOURS[verdicts[""]])
            x = 0.07
            for name, verdict in flips(verdicts).items():
                ax.scatter(x, y + 0.4, s=16, marker="s", color=COLOURS[verdict])
                ax.text(x + 0.02, y + 0.4, name, va="center", fontsize=6.5, color="0.35")
                x += 0.07 + 0.016 * len(name)   # the marker, and so many letters
            ax.text(0.06, y, claim.id, va="center", fontsize=9.5, color="0.55" if verdicts[""] == NOT_RUN else "0.1")
        ax.set_title(title, fontsize=11, loc="left")
        ax.set(xlim=(-0.05, 1), ylim=(max(map(len, PAPERS.values())) - 0.4, -0.7))
        ax.set_axis_off()
    handles = [axes[0].scatter([], [], s=120, marker="s", color=colour, label=name) for name, colour in COLOURS.items()]
    handles.append(axes[0].scatter([], [], s=36, marker="s", color="0.3", label="small: elsewhere otherwise"))
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False, fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save_figure(figure, path)
