"""The ledger in markdown, for the terminal and for its pages, and as forest plots.

found: {claim: {where: its numbers}}, from results/claims.json; `here` is that of one claim. verdicts: of
claim.verdicts_of, or those of one claim.
"""
import itertools
import shlex
import textwrap
from collections import Counter

import numpy as np

from common import files
from evals.instrument import markdown
from evals.jobs import all_jobs
from evals.lab_runs import PUBLIC
from evals.ledger.claim import (
    AGREES, CITED, CLAIMS, CONTRADICTS, COSTS, FILES, GRADES, KINDS, LEAST_SHARE, MIXED, NOT_RUN, PAPERS, UNTESTABLE,
    VERDICTS, WORDS, in_words, parts_of)
from evals.ledger.experiments import jobs_of
from evals.pictures import pyplot, save_figure

PAGES = "results/claims"                        # the folder of the pages

# --------------------------------------------------------------------------------------------------------- all claims


def ledger(verdicts, first, names):
    """Counts by grade and verdict, how to read them, and a line for each of these claims, by verdict. first: the
    verdicts as written by the first seeds, of the claims that have new ones."""
    parts = [counts(verdicts), WORDS["texts"]["screen"]] if len(names) == len(CLAIMS) else []
    for title, claims in PAPERS.items():
        rows = sorted((VERDICTS.index(verdicts[name]["claim"]), name) for name in claims if name in names)
        lines = []
        for claim, verdict in ((claims[name], VERDICTS[n]) for n, name in rows):
            grade = evidence(claim, verdicts[claim.id]) or claim.cheapest
            again = f"{confirmed(first.get(claim.id), verdicts[claim.id]):<13} " * bool(first)
            said, star = textwrap.shorten(claim.says, 80, placeholder=" ..."), "*" * claim.moved_to(verdict)
            lines.append(f"  {verdict + star:<13} {grade:<15} {claim.id:<24} {again}{said}")
        parts += ["\n".join([title, *lines])] * bool(lines)
    return "\n\n".join(parts)


def confirmed(first, verdicts):
    """What ten new seeds say of the verdict as written, which by the first seeds was `first`; None without new ones."""
    if first is None or first == verdicts[""]:
        return "confirmed" if first else ""
    return "not confirmed" if first in (AGREES, CONTRADICTS) else "decided now"


def counts(verdicts):
    """How many rows have which verdict: of claims by the grade of their evidence, and of other kinds."""
    judged = [(evidence(claim, verdicts[name]) if claim.kind == "claim" else claim.kind, verdicts[name]["claim"])
              for name, claim in CLAIMS.items()]
    rows = {name: [str(judged.count((name, verdict))) for verdict in VERDICTS[:-1]] for name in (*GRADES, *KINDS)
            if name in dict(judged)}
    own = [claim for claim in CLAIMS.values() if claim.kind == "claim"]
    missing = sum(verdicts[claim.id]["claim"] == NOT_RUN for claim in own)
    decided = [claim for claim in own if verdicts[claim.id]["claim"] in (AGREES, CONTRADICTS)]
    moved = sum(claim.moved_to(verdicts[claim.id]["claim"]) for claim in decided)
    reasons = Counter(every["claim"].why for every in verdicts.values() if every["claim"] == MIXED)
    return "\n\n".join([f"{len(own)} claims of five papers. {missing} are not run here.\n{moved} of the {len(decided)} "
                        "decided ones owe their verdict to a bound that was changed after numbers had been seen.",
                        markdown([[name, *row] for name, row in rows.items()], ["evidence", *VERDICTS[:-1]]),
                        "\n".join(["mixed, and why:", *(f"  {n:>2}  {why}" for why, n in reasons.most_common())]),
                        "\n".join(f"{name}: {(GRADES | KINDS)[name]}" for name in rows)])


def evidence(claim, verdicts):
    """The grade of the numbers that decide a claim; None if it is not run."""
    where = claim.decided_by(verdicts)
    return claim.readings[where[0]].grade if where else None


# ---------------------------------------------------------------------------------------------------------- one claim


def section(claim, here, verdicts, first=None, words=True):
    """A claim, its verdict, and what was found next to its bounds; with `words` also the paper's figures, our note and
    the changed bounds. verdicts: of this claim. first: the verdict by the first seeds, if new ones decide."""
    headline, grade = verdicts["claim"], evidence(claim, verdicts)
    how = f", evidence: {grade}" if grade else ""
    star = ", by a bound that was changed after numbers had been seen" * claim.moved_to(headline)
    kind = f"{claim.kind}: " * (claim.kind != "claim")
    parts = [f"## {claim.id}", f"**{headline}**{reason(headline)}{how}{star}. {kind}{claim.says} ({claim.place})"
             + f" As written, by the first seeds: {first}, by ten new ones: {verdicts.get('')}." * bool(first)]
    if words:
        parts += [f"*Theirs:* {claim.theirs}"] + [f"*Note:* {claim.note}"] * bool(claim.note)
        parts += [f"*Changed {date}:* {changed} ({verdicts}). {why}".replace("->", "→")
                  for date, changed, verdicts, why in claim.changes]
    deciding = claim.decided_by(verdicts)
    for name in sorted(filter(here.get, claim.readings), key=lambda name: name not in deciding):
        seeds = f", {said_seeds(here[name])}" if any(here[name]["seeds"]) else ""
        tested = f" ({claim.tested})" if claim.tested and not name else ""
        rows = [[found.name + ", over windows" * (found.bound.error == "windows")
                 + " (cannot be tested)" * (not found.tested),
                 found.bound.agrees or (f"needs {found.bound.needs}" if found.bound.needs else "-"),
                 found.bound.contradicts or "-", effect(found)] for found in verdicts[name].quantities]
        parts += [f"{name or 'As written'}: {verdicts[name]}{reason(verdicts[name])}, {claim.readings[name].grade}"
                  f"{seeds}{tested}.", markdown(rows, ["", "agrees", "contradicts", "ours"])]
    if here and "" in claim.readings and "" not in here:
        parts += ["As written: not run here."]
    if not here:
        first = next(iter(claim.readings.values()), None)
        parts += [f"Not run here: it takes {claim.cheapest} ({COSTS[claim.cheapest]}). The bounds: "
                  f"{in_words(claim, first)}." if first else f"Not run here: {claim.tested}."]
    return "\n\n".join(parts)


def details(claim, here, folders):
    """The paper, and of each reading the numbers by seed, their origin, and the commands. folders: a jobs.Place."""
    parts = [f"{claim.paper}: {CITED[claim.paper]}"]
    for name, reading in sorted(claim.readings.items(), key=lambda item: item[0] not in here):
        parts += [f"### {name or 'As written'} ({reading.grade})"]
        if name in here:
            seeds = here[name]["seeds"]
            rows = [[column, run, *map(in_short, values)]
                    for column, group in here[name]["numbers"].items() for run, values in group.items()]
            parts += [markdown(rows, ["", "run", *(f"seed {seed}" if seed else "" for seed in seeds)]),
                      made(claim, here[name])]
        else:
            seeds = claim.seeds_of(reading, [2])
            parts += [f"Not run here. The bounds: {in_words(claim, reading)}."]
        parts += [commands(claim, name, jobs_of(reading, seeds, folders))]
    return "\n\n".join(parts)


def reason(verdict):
    """Why a verdict is mixed, in brackets."""
    return f" ({verdict.why})" if getattr(verdict, "why", "") else ""


def effect(quantity):
    """The mean and its 95 % interval: "0.31 [0.28, 0.35]". Shares below LEAST_SHARE count as this."""
    low, high = quantity.interval
    below = "<= " if quantity.share and quantity.values.max() <= LEAST_SHARE else ""
    return f"{below}{quantity.mean:.3g}" + f" [{low:.3g}, {high:.3g}]" * bool(low < high)


def in_short(value):
    """A number or a short list as text, or the mean and range of a long list."""
    x = np.ravel(np.array(value, float))
    return f"{x.mean():.4g} ({x.min():.3g} to {x.max():.3g})" if len(x) > 4 else ", ".join(f"{part:.3g}" for part in x)


def said_seeds(found):
    """"seed 2" or "seeds 2, 3, 4"; empty if the runs have no seeds."""
    seeds = found["seeds"]
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if any(seeds) else ""


def made(claim, found):
    """The commit and machine of the numbers of these seeds, and the bounds by which they were first judged."""
    dirty = " with uncommitted changes" * bool(found.get("git_dirty"))
    own = f"commit {(found['git_commit'] or 'unknown')[:9]}{dirty}, {found['machine']}"
    version = found.get("version", 1)
    if version < claim.version:
        own += f"; measured under version {version} of the bounds, judged by version {claim.version}"
    earlier = found.get("earlier")
    return own + (f"\nseeds {', '.join(map(str, earlier['seeds']))}: {made(claim, earlier)}" if earlier else "")


def commands(claim, name, jobs):
    """The commands of the first seed, in order, and the measurements that only `claims` makes."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if not job.function]
    words = {word.rpartition("=")[2] for line in lines for word in line.split()}
    lines = [f"python data/weights.py {name}" for name, folder in PUBLIC.items() if folder in words] + lines
    lines += ["# the same with the other seeds"] * (bool(lines) and any(len(group) > 1 for group in jobs.values()))
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if job.function))
    run = f"python eval.py claims --run={shlex.quote(f'{claim.id}@{name}')}"
    return "\n".join([*lines, run, *[f"# this also measures, by functions of evals/ledger/: {own}"] * bool(own)])


# ------------------------------------------------------------------------------------------------------------ the pages


def write_pages(folder, found, verdicts, first):
    """A page and a forest plot for each paper, and the log of changed bounds."""
    for title, claims in PAPERS.items():
        draw(folder / f"{FILES[title]}.png", {"verdicts": verdicts}, title)
        parts = [f"# {title}", f"{CITED[title]}. Written by `python eval.py claims --pages={PAGES}`.",
                 f"![what was found over its bounds]({FILES[title]}.png)", WORDS["texts"]["page"]]
        for name, claim in claims.items():
            parts += [section(claim, found.get(name, {}), verdicts[name], first.get(name)),
                      f"`python eval.py claims --show={name} --all` prints the numbers of each seed, and the commands."]
        with files.replacing(folder / f"{FILES[title]}.md", "w") as f:
            f.write("\n\n".join(parts) + "\n")
    rows = sorted(([f"`{claim.id}`", change.date, *change.changed.split(" -> "), change.verdicts.replace("->", "→"),
                    change.why] for claim in CLAIMS.values() for change in claim.changes), key=lambda row: row[1])
    with files.replacing(folder / "changes.md", "w") as f:
        log = markdown(rows, ["claim", "date", "before", "after", "verdict", "why"])
        f.write(f"{WORDS['texts']['changes']}\n\n{log}\n")


COLOURS = {AGREES: "#2c6fb3", MIXED: "#d9a21b", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#bbbbbb"}


def draw(path, results, *titles):
    """A forest plot of these papers, or of all, side by side: for each claim with numbers an axis in the unit of the
    quantity that supports its verdict least. results: with the verdicts of all claims."""
    verdicts = results["verdicts"]
    papers = {title: {name: rows for name in PAPERS[title] if (rows := shown_of(CLAIMS[name], verdicts[name]))}
              for title in titles or PAPERS}
    most = max(1, *map(len, papers.values()))
    height = 0.85 * most + 0.4                  # of the figure, in inches
    figure, axes = pyplot().subplots(most, len(papers), figsize=(8 * len(papers), height), squeeze=False)
    for column, (title, shown) in zip(axes.T, papers.items(), strict=True):
        column[0].annotate(title, (0, 1), (0, 22), fontsize=11, xycoords="axes fraction", textcoords="offset points")
        for ax, (name, rows) in itertools.zip_longest(column, shown.items(), fillvalue=(None, ())):
            if rows:
                draw_claim(ax, name, verdicts[name]["claim"], rows)
            else:
                ax.set_axis_off()
    figure.subplots_adjust(hspace=2.2, wspace=0.15, left=0.02, right=0.98, top=1 - 0.5 / height, bottom=0.2 / height)
    save_figure(figure, path)


def shown_of(claim, verdicts):
    """The quantity that supports the verdict least, in the reading that decides, and the same quantity of others."""
    for where in claim.decided_by(verdicts):
        side = CONTRADICTS if verdicts[where] == CONTRADICTS else AGREES       # also the field of a Bound
        able = [quantity for quantity in verdicts[where].quantities
                if quantity.tested and getattr(quantity.bound, side) and np.isfinite(quantity.values).all()]
        if able:
            # one condition that fails may be enough: then the clearest one supports the verdict
            extreme = min if side == CONTRADICTS and claim.readings[where].fails == "any" else max
            chosen = extreme(able, key=lambda quantity: quantity.chance(getattr(quantity.bound, side)))
            return [chosen] + [other for name in claim.readings if name in verdicts and name != where
                               for other in verdicts[name].quantities if other.name == chosen.name and other.tested]
    return []


def draw_claim(ax, name, verdict, rows):
    """One claim: the parts of the axis where it holds and fails, its seeds and interval, and in grey other set-ups."""
    conditions = {side: parts_of(condition) for side in (AGREES, CONTRADICTS)
                  if (condition := getattr(rows[0].bound, side))}
    ends = [x for row in rows for x in (*row.values, *row.interval)]
    ends += [bound for condition in conditions.values() for _, bound in condition]
    margin = 0.06 * (max(ends) - min(ends)) or 1.0
    low, high = min(ends) - margin, max(ends) + margin
    for side, condition in conditions.items():
        least = [bound for sign, bound in condition if sign[0] == ">"] or [low]
        most = [bound for sign, bound in condition if sign[0] != ">"] or [high]
        ax.axvspan(*least, *most, color=COLOURS[side], alpha=0.1, linewidth=0)
    for y, row in enumerate(rows):
        colour = "0.6" if y else COLOURS[verdict]
        ax.plot(row.interval, [-y, -y], color=colour, linewidth=2)
        ax.plot(row.values, [-y] * len(row.values), "o", color=colour, markersize=3 if y else 5, alpha=0.8)
    ax.set(xlim=(low, high), ylim=(0.8 - 1.6 * max(1, len(rows) / 1.6), 0.8), yticks=[])
    ax.set_title(f"{name}: {verdict}", fontsize=8.5, loc="left", color=COLOURS[verdict], pad=2)
    ax.set_title(textwrap.shorten(rows[0].name, 75, placeholder=" ..."), fontsize=7.5, loc="right", pad=2)
    ax.tick_params(labelsize=7, length=2)
    ax.spines[["top", "right", "left"]].set_visible(False)
