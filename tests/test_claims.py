"""eval.py claims: the algebra of verdicts, the rows of the ledger, checks against committed numbers, the command."""
import json
import math
import os
import re
import statistics

import numpy as np
import pytest
import torch
from bounds import below, close
from conftest import ROOT, by_default, examples, log_rows, meta
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_lab import SHORT

import eval as eval_script
import train as train_script
from common import files
from common.flags import Parser, add_flags, fields_of, given_flags
from evals import claims, jobs
from evals.ablate import losses_with, unchanged
from evals.instrument import Common, OpenedRun, Overrides, window_batches
from evals.jobs import Job, Place, all_jobs
from evals.lab_runs import RECIPES, SETUPS, SWEEPS, train_flags
from evals.ledger import checks, claim, experiments, later, quantities, routing, view
from evals.ledger.claim import CLAIMS, PAPERS, SOFTMAX_SINK, Bound, Quantity, Reading, judge
from evals.ledger.experiments import COMMANDS, LOOKS, jobs_of
from evals.ledger.quantities import TOGETHER, interval, reach
from model import GPTConfig

A, M, C, N, NOT_RUN = claim.VERDICTS            # agrees, mixed, contradicts, not testable, not run here
SMALL = "--n_layer=2 --n_embd=32 --n_head=4 --max_iters=3 --eval_interval=3"
COMMITTED = json.loads((ROOT / "results" / "claims.json").read_text())["claims"]

GRID = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0])                # of numbers and of bounds: some are equal
CONDITIONS = st.sampled_from(["", "-0.5 to 1", "0 to 1/2"]) | st.builds(
    "{} {}".format, st.sampled_from(["<=", "<", ">=", ">", "=="]), st.sampled_from(["-1/2", "0", "0.5", "1"]))


@st.composite
def judged(draw):
    """A reading of up to three bounds, and numbers of one to four seeds for it."""
    count, parts = draw(st.integers(1, 4)), []

    def numbers(values, runs):
        return {f"{run}@lab": draw(st.lists(values, min_size=count, max_size=count)) for run in runs}

    found = {"sink": numbers(st.sampled_from([3.9, 4.0, 9.0]), "xy"), "error": numbers(st.sampled_from([.1, 1.0]), "x")}
    for name in ("a", "b", "c")[:draw(st.integers(1, 3))]:
        values = GRID | st.just(math.nan) if draw(st.booleans()) else GRID
        found[name] = numbers(values, draw(st.sampled_from(["x", "xy"])))
        parts.append(Bound(what=name, quantity=name, agrees=draw(CONDITIONS), contradicts=draw(CONDITIONS),
                           needs=draw(st.just("") | CONDITIONS), error=draw(st.sampled_from(["", "", "error"])),
                           sink=draw(st.sampled_from(["", "", "sink", "sink/x"]))))
    return Reading(reads={}, bounds=tuple(parts), fails=draw(st.sampled_from(["all", "any"]))), found


def tail(t, degrees):
    """Student's t in closed form, for up to three degrees of freedom; 0: normal."""
    return (math.erfc(t / 2 ** 0.5) / 2, 0.5 - math.atan(t) / math.pi, 0.5 - t / (2 * (2 + t * t) ** 0.5),
            0.5 - (t / 3 ** 0.5 / (1 + t * t / 3) + math.atan(t / 3 ** 0.5)) / math.pi)[degrees]


def chance(condition, values, errors):
    """How likely such values are if the condition is just not met."""
    low, to, high = condition.partition(" to ")
    if to:
        return max(chance(f">= {low}", values, errors), chance(f"<= {high}", values, errors))
    sign, bound = condition.split()
    if sign == "==" or not errors and len(set(values)) == 1:
        return float(not all(eval(f"x {condition}", {"x": x}) for x in values))
    n, mean = len(values), sum(values) / len(values)
    error = math.hypot(*errors) / n if errors else statistics.stdev(values) / n ** 0.5
    t = (mean - eval(bound)) / error
    return tail(t if sign[0] == ">" else -t, 0 if errors else n - 1)


@settings(max_examples=max(200, examples(40)))
@given(judged(), st.sampled_from([0.025, 0.004, 0.0]))
def test_a_verdict_is_what_the_conditions_say(case, level):
    """The same by hand. A bound without its sink, or with a nan, is not tested."""
    reading, numbers = case
    says, lost = {"agrees": [], "contradicts": [], "needs": []}, 0
    for bound in reading.bounds:
        sinks = [*numbers["sink"].values()][:2 if bound.sink == "sink" else 1]
        for values in numbers[bound.quantity].values():
            if bound.sink and min(map(statistics.mean, sinks)) < 4 or any(map(math.isnan, values)):
                lost += 1
                continue
            for part in says:
                if condition := getattr(bound, part):
                    says[part].append(chance(condition, values, numbers["error"]["x@lab"] if bound.error else None))
    yes, no = max(says["agrees"], default=1), max(says["contradicts"], default=1)
    if reading.fails == "any" and says["contradicts"]:
        no = min(1, len(says["contradicts"]) * min(says["contradicts"]))
    assume(all(abs(found - at) > 1e-6 for found in (yes, no, *says["needs"]) for at in (level, 0.025) if found))
    expected = N if not says["agrees"] + says["contradicts"] or max(says["needs"], default=0) > 0.025 else M if (
        yes <= level) == (no <= level) or yes <= level and lost else A if yes <= level else C
    found = judge(reading, numbers, level)
    assert found == expected
    if not lost and found != N:
        close(found.chance, min(yes, no), size=1.0, dtype=torch.float32)


@given(st.lists(GRID, min_size=1, max_size=5), GRID, GRID)
def test_verdicts_obey_their_algebra(values, one, other):
    """A claim that holds up to a bound, and fails from a larger one on. Both lie off the grid."""
    low, high = sorted((one + 0.1, other + 0.35))

    def verdict(values, agrees=f"<= {low}", contradicts=f">= {high}"):
        bound = Bound(what="it", quantity="it", agrees=agrees, contradicts=contradicts)
        return judge(Reading(reads={}, bounds=(bound,)), {"it": {"x@lab": values}})

    ends = interval(np.array(values))
    found = verdict(values)
    assert found == (A if ends[1] <= low else C if ends[0] >= high else M) == verdict(values[::-1])
    assert verdict([-x for x in values], f">= {-low}", f"<= {-high}") == found          # the sign does not matter
    assert verdict(values, f">= {high}", f"<= {low}") == {A: C, C: A, M: M}[found]      # the opposite claim
    close(np.mean(ends), np.mean(values), size=1.0)


def test_students_t_is_that_of_the_tables_and_shares_are_judged_by_their_log_odds():
    for degrees, t in ((1, 12.70620), (2, 4.30265), (9, 2.26216), (30, 2.04227), (math.inf, 1.95996)):
        below(abs(quantities.quantile(degrees) - t), 2e-5)
    for n, degrees in enumerate((math.inf, 1, 2, 3)):
        below(abs(tail(1.7, n) - quantities.tail(1.7, degrees)), 1e-6)
    share = Quantity("it", Bound("it", "it"), np.array([0.5, 0.9, 0.99]), None, share=True)
    odds = np.log([1, 9, 99])
    close(share.interval, 1 / (1 + np.exp(-np.array(interval(odds)))))
    close(share.chance("<= 0.999"), quantities.tail((np.log(999) - odds.mean()) / odds.std(ddof=1) * 3 ** 0.5, 2))
    assert Quantity("it", Bound("it", "it"), np.array([0.0, 1e-9]), None, share=True).chance("< 0.01") == 0


@given(st.lists(st.sampled_from([1e-4, 0.004, 0.006, 0.01, 0.02, 0.5]), max_size=6))
def test_holm_decides_a_test_if_it_and_all_clearer_ones_are_clear_among_those_left(chances):
    levels = quantities.holm(dict(enumerate(chances)))
    ranked = sorted(chances)
    clear = [all(ranked[i] <= 0.025 / (len(ranked) - i) for i in range(k + 1)) for k in range(len(ranked))]
    assert sorted(chance for n, chance in enumerate(chances) if chance <= levels[n]) == [
        chance for chance, met in zip(ranked, clear, strict=True) if met]


def test_the_best_grade_decides_and_readings_that_differ_are_mixed():
    row = CLAIMS["zero-v0-harmless"]
    one, two, three = "SmolLM2, strong heads", "SmolLM2, half a sink", "SmolLM2, all heads"
    for said, expected in (({"": A}, A), ({"": A, one: C}, C), ({"": A, one: A, three: C}, M), ({"": A, one: N}, A),
                           ({"": N, one: N}, N), ({"nobias": C}, NOT_RUN), ({"": C, two: A, three: A}, A)):
        assert row.headline({where: claim.Verdict(verdict) for where, verdict in said.items()}) == expected
    row = CLAIMS["pe-all-sink"]                 # one of its readings never decides
    assert row.headline({"": claim.Verdict(C), "one head": claim.Verdict(A)}) == C and row.moved_to(C)
    assert not row.moved_to(A)


def test_bounds_are_frozen():
    """A bound that changes is a new row. A new reading gets its line in frozen.json before its first run."""
    now = {name: {where: reading.fingerprint for where, reading in row.readings.items()}
           for name, row in CLAIMS.items() if row.readings}
    assert files.read_json(ROOT / "evals/ledger/frozen.json") == now


def test_new_seeds_decide_once_all_ten_are_there():
    weights = {"softmax": [.9, .9, .8], "elastic": [0, 0, .01], "lazy": [0, 0, .01]}
    old = {"seeds": [2, 3, 4], "numbers": dict.fromkeys(("raw", "share", "mass"), weights)}
    again = {"seeds": [*range(40, 50)], "numbers": dict.fromkeys(old["numbers"], {run: [.5] * 10 for run in weights})}
    found, first = claims.with_new_seeds({"lazy-sink-gone": {"": old, "table2": old}}, {"lazy-sink-gone": {"": again}})
    assert found["lazy-sink-gone"] == {"": again, "table2": old} and first == {"lazy-sink-gone": A}
    assert claim.verdicts_of(found)["lazy-sink-gone"]["claim"] == C
    again["seeds"] = again["seeds"][1:]
    assert claims.with_new_seeds({"lazy-sink-gone": {"": old}}, {"lazy-sink-gone": {"": again}})[1] == {}


def test_a_ratio_has_the_same_run_of_the_other_column_and_equal_values_share_a_rank():
    """The pages have all other kinds of quantities."""
    numbers = {"raw": {"softmax@lab": [1, 2], "elastic@lab": [5, 6]}, "cost": {"softmax@lab": [2], "elastic@lab": [4]}}
    found = judge(Reading(reads={}, bounds=(Bound(what="it", quantity="raw / cost"),)), numbers).quantities
    close(np.stack([part.values for part in found]), [[0.5, 1], [1.25, 1.5]])
    ranked = ([1, 2, 2, 4], [1, 3, 3, 9]), ([1, 1], [1, 2]), ([1, 2, 3, 3], [1, 2, 4, 3])
    close([quantities.rank_correlation(*pair) for pair in ranked], [1, 0, 3 / 10 ** 0.5])  # as in scipy.stats


def test_every_claim_has_its_sources_a_bound_and_numbers_to_read():
    assert len(CLAIMS) == sum(map(len, PAPERS.values())) and sum(len(row.changes) for row in CLAIMS.values()) == 92
    for row in CLAIMS.values():
        assert row.place and row.says and row.theirs and (row.readings or row.cost == "out of reach"), row.id
        for where, reading in row.readings.items():
            assert any(bound.agrees or bound.contradicts for bound in reading.bounds), (row.id, where)
            asks = any(bound.quantity == SOFTMAX_SINK and bound.needs for bound in reading.bounds)
            assert asks == (SOFTMAX_SINK in reading.reads) >= (where == "nobos"), row.id


def test_the_quantities_of_claims_without_committed_numbers():
    """The pages have their bounds, but no numbers of theirs."""
    speeds = {f"{name} at {T}": {"kernels": np.array([speed])} for T, *pair in (
        (1024, 2, 1), (4096, 1, 3), (16_384, 2, 10)) for name, speed in zip(("torch", "TRA"), pair, strict=True)}
    close(np.concatenate([*TOGETHER["growth_of_speedup"](speeds).values()]), [2.5, 2])
    leads = {f"gain at {T}": {"tda": T + np.arange(3), "softmax": np.arange(3)} for T in (512, 1024, 2048)}
    leads |= {f"error at {T}": {"tda": [3] * 3, "softmax": [4] * 3} for T in (512, 1024, 2048)}
    close([*TOGETHER["lead_in_errors"](leads).values()], [512 / 5, 1024 / 5, 2048 / 5])
    close([*TOGETHER["growth_of_share"]({"dormant": dict(small=[.1, .3], mid=[.5], large=[.1])}).values()], [.3, -.4])
    bias = 1.0 * (np.arange(200) < np.array([[40], [60], [80]]))        # of three heads, smoothed over five distances
    assert reach(bias) == 61 and np.isnan(reach(bias + 0.2))                # the latter does not fade
    before, after = ({"alibi-learned": np.array(slopes)} for slopes in ([.5, .25], [.6, .2]))
    close(TOGETHER["change_of_slopes"]({"slopes at first": before, "slopes": after}), 0.2)
    ratios = {"forward": {"kernels": [0.5]}, "forward and backward": {"kernels": [0.8]}}
    found = judge(CLAIMS["elastic-two-pass"].readings[""], ratios).quantities
    close(np.concatenate([part.values for part in found]), [2, 1.25])


def test_every_command_of_every_reading_is_valid_and_every_recipe_and_look_is_used():
    """The jobs of one seed, and the runs of the sweeps."""
    every = [reading for row in CLAIMS.values() for reading in row.readings.values()]
    words = {job.words for reading in every for group in jobs_of(reading, [2], Place()).values()
             for job in all_jobs(group)}
    swept = {run for sweep in SWEEPS.values() for run, *_ in sweep.values()}
    trained = [flags for script, *flags in words if script == "train.py"]
    parser = Parser(prog="train.py")
    add_flags(parser, train_script.Train, GPTConfig)
    for flags in trained + [train_flags(run, 2, "out") for run in swept]:
        fresh = [flag for flag in flags if not flag.startswith("--init_from")]          # that run does not exist
        for small in ([], SMALL.split()):       # SMALL is for trying out the rows of a GPU
            knobs = train_script.settle_knobs(parser.parse_args(fresh + small), train_script.Train)[0]
            config = GPTConfig(**fields_of(GPTConfig, knobs) | {"vocab_size": 66})
            assert config.attn != "lazy" or config.pos == "rope+bias", "the set-up's positions replace lazy's own"
            fields = fields_of(train_script.Train, knobs) | {"train_only": "all"}
            train_script.check_balance(train_script.Train(**fields), config)
    for name, *flags in (rest for script, *rest in words if script == "eval.py"):
        command, parser = eval_script.COMMANDS[name], Parser(prog="eval.py")
        add_flags(parser, command.flags, *(Common, Overrides) * (name in eval_script.OF_A_RUN))
        command.flags(**given_flags(parser.parse_args(flags), command.flags))
    paths, named = zip(*(pair for reading in every for pair in reading.reads.values()), strict=True)
    runs = {run for names in named for run in names.split()}
    assert {run.partition("@")[0] for run in runs} | swept >= set(RECIPES) - {"heads", "blind", "hybrid", "no-conv"}
    board = "board-", "steps-", "ladder-", "words"      # for test_board.py
    others = {"lab"} | {name for name in (*SETUPS, *COMMANDS) if name.startswith(board)}
    assert {run.partition("@")[2] for run in runs} - others == {*SETUPS, ""} - others
    assert {path.split("/")[0] for path in paths} >= {*COMMANDS, *LOOKS} - others


def test_a_result_is_valid_until_its_run_or_its_words_change(tmp_path, elastic_run):
    run, place = Job((), tmp_path / "run"), tmp_path / "found.json"
    job, meta_json = Job(("probe", "x"), place, (run,)), run.place / "meta.json"
    files.write_json(meta_json, {})
    files.write_json(place, {"words": ["probe", "x"], "found": {"loss": 1}})
    assert jobs.result_of(job) == {"loss": 1}
    assert jobs.result_of(job._replace(words=("probe", "y"))) is None
    os.utime(meta_json, (2e9, 2e9))             # trained again
    assert jobs.result_of(job) is None
    meta_json.unlink()
    assert jobs.result_of(job) is None
    found = {"stream": [{"a": 1}, {"b": 2}, {"a": 3}], "changes": [{"what": "zero", "where": "all", "loss": 4}]}
    assert claims.value_at(found, "probe/stream/*/a", job) == [1, 3]    # the name of the look is no part of the path
    assert claims.value_at(found, "changes/zero, all/loss", job) == 4 and claims.value_at(found, "stream/1/b", job) == 2
    assert [*jobs.val_losses(elastic_run).values()] == [float(row[2]) for row in log_rows(elastic_run)[1:] if row[2]]


def test_a_data_set_of_other_texts_is_refused(tmp_path):
    job = jobs.data_job("words", jobs.Place(tmp_path, "novels/"))
    files.write_json(job.place / "meta.json", {"source": "novels"})
    assert jobs.result_of(job) == {}
    with pytest.raises(ValueError, match="is made of novels"):
        jobs.result_of(jobs.data_job("words", jobs.Place(tmp_path, "poems")))


def test_a_job_is_done_if_it_is_missing_or_needs_one_that_is(monkeypatch):
    """Jobs are done by their depth, so that those of one depth can be done at the same time."""
    run, other, done = Job(("train.py",), "run"), Job(("eval.py",), "other"), []
    look = Job(("eval.py",), "look", (run,))
    last = Job(("eval.py",), "last", (look, other))
    monkeypatch.setattr(jobs, "do", done.append)
    for missing, expected in (([run], [run, look, last]), ([run, other, look, last], [run, other, look, last])):
        monkeypatch.setattr(jobs, "result_of", lambda job, missing=missing: None if job in missing else {})
        done.clear()
        jobs.do_all([run, look, other, last], 1)
        assert done == expected


def test_only_readings_that_fit_the_machine_are_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def wanted(names, small=SMALL):
        return [f"{row.id}@{where}" for row, where, _ in claims.wanted(claims.ClaimsFlags(run=names, train_args=small))]

    assert wanted("pe-all-sink") == ["pe-all-sink@", "pe-all-sink@one head"]            # not those of a GPU
    named = ["zero-v0-harmless@SmolLM2, all heads", "postnorm@"]
    assert wanted(",".join(named)) == named
    small = wanted("gpu-minutes")               # no kernel can be timed, but small models can be trained
    assert "pe-all-sink@gpu" in small and {"focus-speed@", "tda-kernel@", "elastic-two-pass@"}.isdisjoint(small)
    with pytest.raises(ValueError, match="trains models of 30M parameters and wants a GPU"):
        wanted("pe-all-sink@gpu", "")
    assert CLAIMS["lazy-sink-gone"].decided_by({"lr3e-3": A}) == []     # a variation, not in place of a GPU
    row, timed = CLAIMS["early-layers-active"], CLAIMS["tda-kernel"].readings[""]
    assert [row.seeds_of(reading, [2, 3]) for reading in (*row.readings.values(), timed)] == [[2], [0], [0]]
    assert timed.grade == "lab"


@pytest.mark.parametrize("name", [by_default(name != "survivors", name) for name in experiments.CHECKS])
def test_a_check_repeats_its_committed_numbers(name):
    found, compared = experiments.CHECKS[name](2), 0
    for row, where in [(row, where) for row, kept in COMMITTED.items() for where in kept]:
        for column, (path, runs) in CLAIMS[row].readings[where].reads.items():
            if name in runs.split():
                kept = np.array(COMMITTED[row][where]["numbers"][column][name][0])
                error, compared = np.abs(claims.value_at(found, path, None) - kept), compared + 1
                below(torch.tensor(error), 1e-4 + np.abs(kept).max() / 1000)
    assert compared


def test_classes_of_tokens_and_what_groups_tell_about_them():
    kinds = routing.classes_of(["The", " c", "at", ",", " of", " 12.", " ", "7", " Ada", " tHE"])
    assert " ".join([*routing.CLASSES][kind] for kind in kinds) == (
        "article other other punctuation preposition punctuation space digit capitalised article")
    close([routing.mutual_information(groups, kinds) for groups in (kinds, np.zeros_like(kinds))], [1, 0], size=1.0)
    close(routing.purity(np.array([0, 0, 1, 1, 1]), np.array([4, 1, 4, 4, 1])), 2 / 3)  # group 1 has two of three marks


def run_claims(capsys, *flags):
    eval_script.main(["claims", *map(str, flags)])
    return capsys.readouterr()


def test_the_ledger_prints_and_draws_the_stored_verdict_of_each_claim(capsys, monkeypatch, tmp_path):
    drawn = {}
    monkeypatch.setattr(view, "draw_claim", lambda ax, name, verdict, rows: drawn.update({name: verdict}))
    said, found = run_claims(capsys).out, json.loads(run_claims(capsys, "--json", f"--png={tmp_path / 'all.png'}").out)
    verdicts = {name: every["claim"] for name, every in found["verdicts"].items()}
    assert {name for name in verdicts if verdicts[name] in (A, M, C)} <= {*drawn} and drawn.items() <= verdicts.items()
    for name, verdict in verdicts.items():
        assert re.search(rf"^  {verdict}\*? +.* {name} ", said, re.M), name
    own = [verdict for name, verdict in verdicts.items() if CLAIMS[name].kind == "claim"]
    assert said.startswith(f"{len(own)} claims of five papers. {own.count(NOT_RUN)} are not run here.")
    shown = run_claims(capsys, "--show=kbias-shift", "--all").out
    assert shown.startswith(f"## kbias-shift\n\n**{found['verdicts']['kbias-shift']['claim']}**")
    assert "python train.py --preset=lab --seed=40" in shown and re.search("run +. seed 40 +. seed 41 +. ", shown)


def test_claims_are_measured_once_also_after_a_failure_and_further_seeds_are_added(trainings, tmp_path, capsys):
    def measured(*flags):
        said = run_claims(capsys, f"--out_dir={tmp_path}", f"--train_args={SHORT}", "--workers=1", *flags)
        return said, files.read_json(tmp_path / "claims.json")["claims"]

    def fails(script, *flags, **how):
        raise ValueError(f"{script} {' '.join(flags)} failed: no luck today")

    both = "--run=postnorm,gate-identity", "--seeds=3"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "output_of", fails)
        said, found = measured(*both)
    assert "--norm_place=post" in said.err and "failed: no luck today" in said.err and set(found) == {"gate-identity"}
    _, first = measured(*both)
    report, other = (meta(tmp_path / f"{run}-3")["report"] for run in ("postnorm", "softmax"))
    numbers = {"x uniform": {"postnorm": [float(f"{report['times_uniform_idle']:.6g}")]},
               "raw": {run: [float(f"{value['sink_idle']:.6g}")] for run, value in (
                   ("postnorm", report), ("softmax", other))}}
    (tmp_path / "postnorm-3/meta.json").unlink()                        # as if it had been interrupted
    said, same = measured(*both, "--json")
    assert first["postnorm"][""]["numbers"] == same["postnorm"][""]["numbers"] == numbers
    verdicts = json.loads(said.out)["verdicts"]
    assert first["postnorm"][""]["seeds"] == [3] and verdicts["gate-identity"] == {"claim": A, "": A}
    assert sorted("--norm_place=post" in flags for flags in trainings) == [False, True, True]
    said, found = measured("--run=gate-identity", "--seeds=9,2")
    found = found["gate-identity"][""]
    assert found["seeds"] == [2, 3, 9] and "gate-identity" in said.out and "postnorm" not in said.out
    for column, (path, _) in CLAIMS["gate-identity"].readings[""].reads.items():
        expected = [checks.gate_identity(seed)[path] for seed in (2, 3, 9)]
        close(found["numbers"][column]["gate_identity"], expected, dtype=torch.float32)


def test_the_pages_and_their_verdicts_are_those_that_the_command_writes(tmp_path):
    """If not, run python eval.py claims --pages=results/claims. They have each quantity with its bounds and verdict."""
    assert all({column: runs.split() for column, (_, runs) in CLAIMS[name].readings[where].reads.items()} == {
        column: [*group] for column, group in kept["numbers"].items()}
        for name, found in COMMITTED.items() for where, kept in found.items())
    found, first = claims.with_new_seeds(COMMITTED, claims.stored(claims.AGAIN))
    view.write_pages(tmp_path, found, claim.verdicts_of(found), first)
    written = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    assert written == {page.name: page.read_text() for page in (ROOT / "results/claims").glob("*.md")}
    assert {page.stem for page in tmp_path.glob("*.png")} == {*map(lambda name: name[:-3], written)} - {"changes"}


def test_history_trains_up_to_a_loss_and_then_at_one_learning_rate(backcopy, trainings, tmp_path):
    flags = f"--preset=lab {SHORT} --max_iters=6 --dataset={backcopy} --out_dir={tmp_path / 'run'}".split()
    jobs.do(Job(("train.py", *flags), tmp_path / "run"))
    val = {int(row[0]): float(row[2]) for row in log_rows(tmp_path / "run")[1:] if row[2]}
    for excess, step in ((9.0, 3), (0.0, min(val, key=val.get))):       # at once, and never
        found = later.history(tmp_path / "run", excess, more=2)
        equal, after = (meta(tmp_path / "run" / name) for name in ("equal", "after"))
        assert found["step"] == equal["losses"]["step"] == step
        close(equal["losses"]["val"], val[step], terms=1, dtype=torch.float32)          # the log has nine digits
        assert [found[name] for name in ("equal", "excess", "after", "excess after")] == [
            run["report"][name] for run in (equal, after) for name in ("sink_idle", "excess_loss")]
        assert (after["knobs"]["learning_rate"], after["losses"]["step"]) == (1e-3, 2)
    assert len(trainings) == 5


@torch.no_grad()
def test_worth_of_heads_compares_a_group_with_random_heads_of_its_layers(toy_run, monkeypatch):
    monkeypatch.setattr(later, "DORMANT", {"every": (-1, 2), "none": (2, 3)})
    run = OpenedRun(Common(out_dir=toy_run), {})
    found = later.worth_of_heads(run, "val", count=6, length=12, draws=3)
    windows, = window_batches(run.model, run.split("val"), run.machine, 12, 12, 12)
    outputs = later.alpha_and_means(run, windows[1::2])[1]              # (1, heads, E)

    def cost(change):                           # of both heads of the only layer, for the windows of each draw
        losses = [losses_with(look, run.model, windows[::2], run.machine) for look in (change, unchanged)]
        return (losses[0] - losses[1]).double().mean(1).view(3, 2).mean(1).tolist()

    ways = {"zero": lambda attend, *inputs: 0 * attend(*inputs[2:]),
            "mean": lambda attend, *inputs: 0 * attend(*inputs[2:]) + outputs[0][:, None]}
    for name, change in ways.items():
        close(found["every"][name]["cost"], cost(change), terms=1, size=6.0, dtype=torch.float32)       # of losses
        assert any(found["every"][name]["cost"])
    for name in ("value", "zero", "mean"):
        assert found["every"][name]["less random"] == found["none"][name]["cost"] == [0] * 3
    assert (found["every"]["heads"], found["none"]["heads"]) == (2, 0)

    chosen, masks = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0]]).bool(), []
    later.worth(lambda mask: mask, chosen, lambda mask, rows: masks.append(mask) or rows[:, 0], windows.double(), 0, 6)
    assert all(torch.equal(mask.sum(1), chosen.sum(1)) for mask in masks)
    assert len(masks) == 7 and len({tuple(mask.flatten().tolist()) for mask in masks[1:]}) > 2
