"""The ledger as text and as a picture. found: {claim: {where it was asked: what was found}}, of results/claims.json."""
import itertools
import textwrap

import numpy as np

from evals.instrument import pyplot, save_figure, table
from evals.ledger.book import CLAIMS, PAPERS, flips, jobs_of, readings, seeds_of, verdicts_of
from evals.ledger.claim import AGREES, CONTRADICTS, COSTS, MIXED, NOT_RUN, UNTESTABLE, VERDICTS
from evals.ledger.experiments import CHECKS, PUBLIC, TIMED, all_jobs

# -------------------------------------------------------------------------------------------------------------- as text


WIDTH, HANGING = 118, " " * 26


def ledger(found):
    """All claims, a paper after the other: the verdict, what is said, their figures, ours."""
    parts = []
    for title, claims in PAPERS.items():
        verdicts = [verdicts_of(claim, found.get(claim.id, {})) for claim in claims]
        parts.append(f"{title}: {counted(verdicts)}")
        parts += [row(claim, verdict, found.get(claim.id, {})) for claim, verdict in zip(claims, verdicts, strict=True)]
    everything = [verdicts_of(claim, found.get(claim.id, {})) for claim in CLAIMS.values()]
    return "\n\n".join([*parts, f"all {len(CLAIMS)} claims: {counted(everything)}"])


def counted(verdicts):
    """How many of each verdict there are, as text."""
    here = [verdict[""] for verdict in verdicts]
    return ", ".join(f"{here.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in here)


def row(claim, verdicts, found):
    """One claim in some lines."""
    lines = [f"{verdicts['']:<13} {claim.id}", hanging("claim", claim.says), hanging("theirs", claim.theirs)]
    if "" in found:
        lines.append(hanging("ours", summary(found[""])))
    elif claim.reading:
        lines.append(hanging("ours", f"takes {claim.cost}: python eval.py claims --run={claim.id}"))
    else:
        lines.append(hanging("ours", f"{claim.cost}: {claim.rule}"))
    for name in [name for name in verdicts if name]:
        lines.append(hanging("but" if "" in found and name in flips(verdicts) else "also",
                             f"{name}: {verdicts[name]}; {summary(found[name])}"))
    return "\n".join(lines)


def hanging(label, text):
    """A label and a text of several lines to the right of it."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:>24}  ", subsequent_indent=HANGING)


def summary(found, most=6):
    """The first columns, means over seeds: raw: softmax 0.97, elastic 0.001; mass: ... (seeds 2, 3, 4)."""
    parts = [f"{column}: " + ", ".join(f"{named(run)}{mean_of(values)}" for run, values in group.items())
             for column, group in itertools.islice(found["numbers"].items(), most)]
    seeds = ", ".join(map(str, found["seeds"])) if any(found["seeds"]) else ""
    more = "; ..." if len(found["numbers"]) > most else ""
    return "; ".join(parts) + more + (f" (seed{'s' * (len(found['seeds']) > 1)} {seeds})" if seeds else "")


def named(run):
    """A recipe's name before its number; of a check, which has but one, none."""
    return "" if run in CHECKS or run in TIMED or run in PUBLIC else f"{run.split('@')[0]} "


def mean_of(values):
    """The mean over seeds; of a list its numbers, of a long one the least and the largest."""
    mean = np.mean(np.array(values, float), 0).ravel()
    return ", ".join(f"{x:.3g}" for x in mean) if len(mean) <= 4 else f"{mean.min():.3g} to {mean.max():.3g}"


def shown(claim, results, where):
    """One claim whole: the text, their figures, the rule, the verdict wherever it was asked, numbers by seed, and the
    commands."""
    found = results["claims"].get(claim.id, {})
    verdicts = verdicts_of(claim, found)
    parts = [f"{claim.id}: {verdicts['']}", hanging("claim", claim.says), hanging("place", claim.place),
             hanging("theirs", claim.theirs), hanging("rule", claim.rule),
             hanging("cost", f"{claim.cost}: {COSTS[claim.cost]}")]
    parts += [hanging("note", claim.note)] if claim.note else []
    for name, (reading, _) in readings(claim).items():
        jobs = jobs_of(reading, seeds_of(claim, reading, found.get(name, {}).get("seeds", [2])), where)
        parts.append(f"\n{name or 'as it stands'}: {verdicts.get(name, NOT_RUN)}\n")
        parts += [by_seed(found[name])] if name in found else []
        parts += [f"\n{commands(claim, jobs)}"]
    return "\n".join(parts)


def by_seed(found):
    """Every number, a column a seed."""
    rows = [[column, run, *(mean_of([value]) for value in values)]
            for column, group in found["numbers"].items() for run, values in group.items()]
    seeds = [f"seed {seed}" if seed else "" for seed in found["seeds"]]
    made = f"commit {(found['git_commit'] or 'unknown')[:9]}, {found['machine']}"
    return f"{table(rows, ['', 'run', *seeds])}\n{made}"


def commands(claim, jobs):
    """The commands of the first seed, in their order, and what is measured by this one itself."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if job.words[0].endswith(".py")]
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if not job.words[0].endswith(".py")))
    return "\n".join(lines + [f"python eval.py claims --run={claim.id}     {own}: evals/ledger/"] * bool(own))


# --------------------------------------------------------------------------------------------------------- the picture


COLOURS = {AGREES: "#2c6fb3", MIXED: "#efc25a", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#e3e3e3"}


def draw(path, found):
    """All claims, a column a paper, a square for the verdict; a small one beside it where another set-up flips it."""
    figure, axes = pyplot().subplots(1, len(PAPERS), figsize=(16, 0.9 + 0.36 * max(map(len, PAPERS.values()))))
    for ax, (title, claims) in zip(axes, PAPERS.items(), strict=True):
        for y, claim in enumerate(claims):
            verdicts = verdicts_of(claim, found.get(claim.id, {}))
            ax.scatter(0, y, s=190, marker="s", color=COLOURS[verdicts[""]])
            for x, verdict in enumerate(dict.fromkeys(flips(verdicts).values())):
                ax.scatter(0.075 + 0.05 * x, y, s=36, marker="s", color=COLOURS[verdict])
            ax.text(0.17, y, claim.id, va="center", fontsize=9.5, color="0.55" if verdicts[""] == NOT_RUN else "0.1")
        ax.set_title(title, fontsize=11, loc="left")
        ax.set(xlim=(-0.05, 1), ylim=(max(map(len, PAPERS.values())) - 0.4, -0.7))
        ax.set_axis_off()
    handles = [axes[0].scatter([], [], s=120, marker="s", color=colour, label=name) for name, colour in COLOURS.items()]
    handles.append(axes[0].scatter([], [], s=36, marker="s", color="0.3", label="small: elsewhere otherwise"))
    figure.legend(handles=handles, ncols=len(handles), loc="lower center", frameon=False, fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save_figure(figure, path)
