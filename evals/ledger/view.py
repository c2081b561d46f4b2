"""The ledger as text, as pages and as pictures. found: {claim: {where: its numbers}}, from results/claims.json."""
import shlex
import textwrap

import numpy as np

from evals.instrument import markdown, table
from evals.lab_runs import PUBLIC
from evals.ledger.book import (
    CITED,
    CLAIMS,
    PAPERS,
    cheapest,
    decided_by,
    evidence,
    grade_of,
    jobs_of,
    seeds_of,
    verdicts_of,
)
from evals.ledger.changes import LOG, changes_of, version_of
from evals.ledger.claim import (
    AGREES,
    CONTRADICTS,
    COSTS,
    GRADES,
    MIXED,
    NOT_RUN,
    UNTESTABLE,
    VERDICTS,
    in_words,
    number,
    readings,
)
from evals.ledger.experiments import all_jobs
from evals.pictures import pyplot, save_figure

WIDTH, HANGING = 118, " " * 12
HOW_TO_READ = """\
agrees, contradicts: every seed lies beyond the bounds at which the claim holds, or fails. A bound "on average" asks
this of the mean, and "clearly" of its whole 95 % interval: over seeds, or over windows of text where it says so.
mixed: neither. not testable: a condition is missing, such as a sink in softmax itself.
The bounds were written before the first run; docs/claims/changes.md names those that were changed after it."""
SURPRISES = (                                   # what a reader of the papers would not expect: (claim, sentence)
    ("sigmoid-norm-sink", "Rows that sum to 1 need not have a sink: normalised sigmoid spreads its weight."),
    ("sink-logit-moves-sink", "Without linear biases a sink logit takes nothing: the first token keeps the sink."),
    ("elastic-removed-mass", "\"59.58 % sparsity\" is removed mass. Exact zeros are another number."),
    ("diff-fixed-sum", "Differential softmax is called free of a fixed sum, and has one."),
    ("focus-leak", "Sinkhorn over a sequence lets earlier tokens see later ones while Focus trains."),
)

# -------------------------------------------------------------------------------------------------------------- as text


def ledger(found, names):
    """The ledger: counts by grade and verdict, the surprises, and one line for each of these claims."""
    parts = []
    if len(names) == len(CLAIMS):
        parts += [counts(found), HOW_TO_READ, "\n".join(
            ["Five surprises:"] + [f"  {name:<24} {said}" for name, said in SURPRISES]),
            "python eval.py claims --show=ID    one claim: its bounds, our numbers, the commands\n"
            "python eval.py claims --run=ID     measure it again; docs/claims/ has all of them with pictures"]
    for title, claims in PAPERS.items():
        lines = [line(claim, found.get(claim.id, {})) for claim in claims if claim.id in names]
        parts += ["\n".join([title, *lines])] * bool(lines)
    return "\n\n".join(parts)


def counts(found):
    """How many claims have which verdict, by the grade of their evidence."""
    header, rows = ["evidence", *VERDICTS[:-1]], []
    for grade, meaning in GRADES.items():
        here = [verdicts_of(claim, found[name])[""] for name, claim in CLAIMS.items()
                if evidence(claim, found.get(name, {})) == grade]
        rows += [[grade, *(str(here.count(verdict)) for verdict in header[1:]), meaning]] * bool(here)
    missing = sum(decided_by(claim, found.get(name, {})) is None for name, claim in CLAIMS.items())
    return f"{len(CLAIMS)} claims of five papers. {missing} are not run here.\n\n" + table(
        [row[:-1] for row in rows], header) + "\n\n" + "\n".join(f"{row[0]}: {row[-1]}" for row in rows)


def line(claim, found):
    """A claim in one line."""
    grade = evidence(claim, found) or cheapest(claim)
    said = textwrap.shorten(claim.says, 96, placeholder=" ...")
    return f"  {verdicts_of(claim, found)['']:<13} {grade:<15} {claim.id:<24} {said}"


def hanging(label, text):
    """A label, and a wrapped text to the right of it."""
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:>10}  ", subsequent_indent=HANGING)


def shown(claim, found, folders):
    """Everything about one claim: the paper, the claim, its bounds, and for each reading the verdict, the numbers and
    the commands. folders: an experiments.Place."""
    found = found.get(claim.id, {})
    verdicts = verdicts_of(claim, found)
    title = next(title for title, claims in PAPERS.items() if claim in claims)
    parts = [f"{claim.id}: {verdicts['']}{reason(verdicts[''])}", hanging("paper", f"{title}: {CITED[title]}"),
             hanging("claim", f"{claim.says} ({claim.place})"), hanging("theirs", claim.theirs)]
    parts += [hanging("tested", claim.tested)] * bool(claim.tested)
    parts += [hanging("note", claim.note)] * bool(claim.note)
    parts += [hanging("changed", f"{change.date}: {change.before} -> {change.after}; {' -> '.join(change.verdicts)}. "
                      f"{change.why}") for change in changes_of(claim.id)]
    for name, reading in sorted(readings(claim).items(), key=lambda item: item[0] not in found):
        here = verdicts[name] if name in found else NOT_RUN
        parts.append(f"\n{name or 'as written'}: {here}{reason(here)} ({grade_of(reading)})")
        if name in found:
            parts += ["\n" + forest(here.quantities), "\n" + by_seed(found[name]), made(claim, found[name])]
        else:
            parts.append(hanging("bounds", in_words(claim, reading)))
        seeds = found.get(name, {}).get("seeds") or seeds_of(claim, reading, [2])
        parts.append("\n" + commands(claim, name, jobs_of(reading, seeds, folders)))
    return "\n".join(parts)


def reason(verdict):
    """Why a verdict is mixed, in brackets."""
    return f" ({verdict.why})" if getattr(verdict, "why", "") else ""


def effect(quantity):
    """The mean and its 95 % interval: "0.31 [0.28, 0.35]"."""
    low, high = quantity.interval
    return f"{quantity.values.mean():.3g}" + (f" [{low:.3g}, {high:.3g}]" if np.isfinite(low) and low < high else "")


def bounds_table(quantities):
    """Rows of what was found next to its bounds: quantity, agrees, contradicts, ours."""
    return [[quantity.name + ", over windows" * (quantity.bound.error == "windows")
             + " (cannot be tested)" * (not quantity.tested),
             quantity.bound.agrees or (f"needs {quantity.bound.needs}" if quantity.bound.needs else "-"),
             quantity.bound.contradicts or "-", effect(quantity)] for quantity in quantities]


def forest(quantities):
    """The table of bounds, with a line for each quantity: o is a seed, = the 95 % interval, and the two bars are the
    bounds: left of the first the claim fails, right of the second it holds."""
    rows = [[*row, drawn(quantity)] for row, quantity in zip(bounds_table(quantities), quantities, strict=True)]
    return table(rows, ["", "agrees", "contradicts", "ours", "fails | between | holds"])


def drawn(quantity, width=30):
    """One line of a forest plot in characters."""
    place = positions(quantity)
    if place is None:
        return ""
    seeds, low, high = place

    def column(x):                              # of -1 .. 2
        return round((min(max(x, -1), 2) + 1) / 3 * (width - 1))
    cells = [" "] * width
    cells[column(low):column(high) + 1] = "=" * (column(high) + 1 - column(low))
    for x in (0, 1):
        cells[column(x)] = "|"
    for x in seeds:
        cells[column(x)] = "o"
    return "".join(cells)


def positions(quantity):
    """A quantity on the axis of the forest plots, on which the claim fails below 0 and holds above 1: (each seed, low
    and high end of the interval), or None if it has no bounds. If there is one bound only, the unit is its size (1 if
    it is 0). If that bound is a range, the unit is half its width."""
    agrees, contradicts = (thresholds(getattr(quantity.bound, name)) for name in ("agrees", "contradicts"))
    two_sided = quantity.bound.agrees.startswith("could be ")
    if not agrees and not contradicts or two_sided or np.isnan(quantity.values).any():
        return None
    low, high = quantity.interval if np.isfinite(quantity.interval[0]) else (quantity.values.mean(),) * 2
    values = np.array([low, high, *quantity.values])
    in_range = len(agrees) == 2
    if in_range:                                # how far inside the range, in units of half its width
        values, contradicts, agrees = (np.minimum(np.subtract(x, agrees[0]), np.subtract(agrees[1], x))
                                       / (agrees[1] - agrees[0]) * 2 for x in (values, contradicts, agrees))
    one, zero = (bound[0] if len(bound) else None for bound in (agrees, contradicts))
    if one is None or zero is None or one == zero:
        at = one if one is not None else zero
        grows = (quantity.bound.agrees or quantity.bound.contradicts).removeprefix("not ").removeprefix("clearly ")[0]
        up = in_range or ((grows == ">") == (one is not None)) != quantity.bound.agrees.startswith("not ")
        place = (values - at) / (abs(at) or 1) * (1 if up else -1)      # above 0 is the good side
        place = np.where(place >= 0, 1 + place, np.maximum(1 + place, 0) if zero is None else place)
    else:
        place = (values - zero) / (one - zero)
    low, high, *seeds = place
    return seeds, min(low, high), max(low, high)


def thresholds(condition):
    """The numbers in a condition: [0.1], or of a range [0.4, 0.8]."""
    return [number(word) for word in condition.split() if word[0].isdigit() or word[0] in "-." and len(word) > 1]


def mean_of(values):
    """The mean over seeds as text: a number, a short list, or the mean and range of a long list."""
    mean = np.mean(np.array(values, float), 0).ravel()
    return (", ".join(f"{x:.3g}" for x in mean) if len(mean) <= 4 else
            f"{mean.mean():.4g} ({mean.min():.3g} to {mean.max():.3g})")


def by_seed(found):
    """Every number, with a column for each seed."""
    rows = [[column, run, *(mean_of([value]) for value in values)]
            for column, group in found["numbers"].items() for run, values in group.items()]
    return table(rows, ["", "run", *(f"seed {seed}" if seed else "" for seed in found["seeds"])])


def said_seeds(found):
    """"seed 2" or "seeds 2, 3, 4"; empty if the runs have no seeds."""
    seeds = found["seeds"]
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if any(seeds) else ""


def made(claim, found):
    """The commit and machine of the numbers of these seeds, and the bounds by which they were first judged."""
    dirty = " with uncommitted changes" * bool(found.get("git_dirty"))
    own = f"commit {(found['git_commit'] or 'unknown')[:9]}{dirty}, {found['machine']}"
    version = found.get("version", 1)
    if version < version_of(claim.id):
        own += f"; measured under version {version} of the bounds, judged by version {version_of(claim.id)}"
    earlier = found.get("earlier")
    return own + (f"\nseeds {', '.join(map(str, earlier['seeds']))}: {made(claim, earlier)}" if earlier else "")


def commands(claim, name, jobs):
    """The commands of the first seed, in order, and the measurements that only `claims` makes."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if job.words[0].endswith(".py")]
    words = {word.rpartition("=")[2] for line in lines for word in line.split()}
    lines = [f"python data/weights.py {name}" for name, folder in PUBLIC.items() if folder in words] + lines
    lines += ["# the same with the other seeds"] * (bool(lines) and any(len(group) > 1 for group in jobs.values()))
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if not job.words[0].endswith(".py")))
    run = f"python eval.py claims --run={shlex.quote(f'{claim.id}@{name}')}"
    return "\n".join([*lines, run, *[f"# this also measures, by functions of evals/ledger/: {own}"] * bool(own)])


# ------------------------------------------------------------------------------------------------------------ as pages


def page(title, found, picture):
    """The page of one paper in Markdown. picture: the path of its forest plot, from the page."""
    parts = [f"# {title}", f"{CITED[title]}. Written by `python eval.py claims --pages=docs/claims`.",
             f"![what was found over its bounds]({picture})",
             "In the picture each claim is shown by the one of its quantities that is nearest to failing. Left of the "
             "white band the claim fails, right of it it holds. A dot is a seed, the bar is the 95 % interval. Other "
             "set-ups are grey."]
    for claim in PAPERS[title]:
        here = found.get(claim.id, {})
        verdicts = verdicts_of(claim, here)
        grade = evidence(claim, here)
        how = f", evidence: {grade}" if grade else ""
        parts += [f"## {claim.id}", f"**{verdicts['']}**{reason(verdicts[''])}{how}. {claim.says} ({claim.place})",
                  f"*Theirs:* {claim.theirs}"]
        parts += [f"*Note:* {claim.note}"] * bool(claim.note)
        parts += [f"*Changed {change.date}:* {change.before} → {change.after} ({' → '.join(change.verdicts)}). "
                  f"{change.why}" for change in changes_of(claim.id)]
        for name, reading in readings(claim).items():
            if name in here:
                seeds = said_seeds(here[name])
                about = f"{name or 'As written'}: {verdicts[name]}{reason(verdicts[name])}, {grade_of(reading)}" + (
                    f", {seeds}" if seeds else "")
                said = f" ({claim.tested})" if claim.tested and not name else ""
                parts += [f"{about}{said}.", markdown(bounds_table(verdicts[name].quantities),
                                                      ["", "agrees", "contradicts", "ours"])]
        if here and claim.reads and "" not in here:
            parts += ["As written: not run here."]
        if not here:
            cost = f"{cheapest(claim)} ({COSTS[cheapest(claim)]})"
            first = next(iter(readings(claim).values()), None)
            parts += [f"Not run here: it takes {cost}. The bounds: {in_words(claim, first)}." if first else
                      f"Not run here: {claim.tested}."]
        parts += [f"`python eval.py claims --show={claim.id}` prints the numbers of each seed, and the commands."]
    return "\n\n".join(parts) + "\n"


def log_page():
    """The log of changed bounds in Markdown."""
    rows = [[f"`{change.claim}`", change.date, change.before, change.after, " → ".join(change.verdicts), change.why]
            for change in LOG]
    return ("# The log of changed bounds\n\nAll bounds were to be fixed before the first run. These were changed after "
            "numbers had been seen. The first complete run is commit 49b8a29.\n\n"
            + markdown(rows, ["claim", "date", "before", "after", "verdict", "why"]) + "\n")


# --------------------------------------------------------------------------------------------------------- the picture


COLOURS = {AGREES: "#2c6fb3", MIXED: "#d9a21b", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#bbbbbb"}


def draw(path, results, title=None):
    """A forest plot of one paper, or of all side by side: a line for each claim with numbers."""
    titles = [title] if title else list(PAPERS)
    most = max(len(PAPERS[name]) for name in titles)
    figure, axes = pyplot().subplots(1, len(titles), figsize=(7.5 * len(titles), 1.3 + 0.42 * most), squeeze=False)
    for ax, name in zip(axes[0], titles, strict=True):
        for y, claim in enumerate(PAPERS[name]):
            draw_claim(ax, y, claim, results["claims"].get(claim.id, {}))
        ax.axvspan(-1.1, 0, color="#c8402f", alpha=0.07, linewidth=0)
        ax.axvspan(1, 2.1, color="#2c6fb3", alpha=0.07, linewidth=0)
        ax.set(xlim=(-1.1, 2.1), ylim=(most - 0.4, -0.8), xticks=(0, 1))
        ax.set_xticklabels(["fails", "holds"])
        ax.set_yticks(range(len(PAPERS[name])), [claim.id for claim in PAPERS[name]], fontsize=9)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_title(name, fontsize=11, loc="left")
    figure.tight_layout()
    save_figure(figure, path)


def draw_claim(ax, y, claim, found):
    """One line: the quantity nearest to failing, as dots and an interval; below it in grey those of other set-ups."""
    verdicts, decided = verdicts_of(claim, found), decided_by(claim, found)
    colour = COLOURS[verdicts[""]]
    ax.text(2.13, y, verdicts[""], va="center", fontsize=8.5, color=colour)
    for where in found:
        places = [place for place in map(positions, verdicts[where].quantities) if place]
        if places:
            seeds, low, high = min(places, key=lambda place: np.mean(place[0]))
            at, shade, width, size = (y, colour, 1.5, 5) if where == decided else (y + 0.3, "0.65", 1, 2.5)
            ax.plot(np.clip([low, high], -1, 2), [at, at], color=shade, linewidth=width, alpha=0.8)
            ax.plot(np.clip(seeds, -1, 2), [at] * len(seeds), "o", color=shade, markersize=size)
