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
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lab import SHORT

import eval as eval_script
import train as train_script
from common import files
from common.flags import Parser, add_flags, fields_of, given_flags
from evals import claims, jobs
from evals.instrument import Common, Overrides
from evals.jobs import Job, Place, all_jobs
from evals.lab_runs import RECIPES, SETUPS, train_flags
from evals.ledger import checks, claim, experiments, quantities, routing, view
from evals.ledger.claim import CLAIMS, PAPERS, SOFTMAX_SINK, Bound, Reading, judge, readable
from evals.ledger.experiments import COMMANDS, LOOKS, jobs_of
from evals.ledger.quantities import T95, interval
from evals.sweeps import SWEEPS
from model import GPTConfig

A, M, C, N, NOT_RUN = claim.VERDICTS            # agrees, mixed, contradicts, not testable, not run here
SMALL = "--n_layer=2 --n_embd=32 --n_head=4 --max_iters=3 --eval_interval=3"
COMMITTED = json.loads((ROOT / "results" / "claims.json").read_text())["claims"]

GRID = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0, 2.0])                # of numbers and of bounds: some are equal
CONDITIONS = st.sampled_from(["", "-0.5 to 1", "not 0 to 1/2", "clearly -1 to 2", "could be 0.5"]) | st.builds(
    "{}{} {}".format, st.sampled_from(["", "not ", "clearly ", "not clearly "]),
    st.sampled_from(["<=", "<", ">=", ">", "=="]), st.sampled_from(["-1/2", "0", "0.5", "1"]))


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
                           needs=draw(st.just("") | CONDITIONS), means=draw(st.sampled_from(["", "alone"])),
                           error=draw(st.sampled_from(["", "", "error"])),
                           sink=draw(st.sampled_from(["", "", "sink", "sink/x"]))))
    return Reading(reads={}, bounds=tuple(parts), fails=draw(st.sampled_from(["all", "any"]))), found


def meets(condition, values, ends):
    """What a condition says of each value, or of an interval with these ends."""
    kind, _, rest = condition.partition(" ")
    if kind == "not":
        return [not met for met in meets(rest, values, ends)]
    if kind == "could":
        return [ends[0] <= float(rest.removeprefix("be ")) <= ends[1]]
    if kind == "clearly":
        return [all(meets(rest, ends, None))]
    low, to, high = condition.partition(" to ")
    return [eval(f"{low} <= x <= {high}" if to else f"x {condition}", {"x": x}) for x in values]


@settings(max_examples=max(200, examples(40)))
@given(judged())
def test_a_verdict_is_what_the_conditions_say(case):
    """The same by hand. A bound without its sink, or with a nan, is not tested."""
    reading, numbers = case
    says, tested, lost = {"agrees": [], "contradicts": [], "needs": []}, 0, 0
    for bound in reading.bounds:
        sinks = numbers["sink"]["x@lab"] + (numbers["sink"]["y@lab"] if bound.sink == "sink" else [])
        for values in numbers[bound.quantity].values():
            if bound.sink and min(sinks) < 4 or any(map(math.isnan, values)):
                lost += 1
                continue
            n, mean, tested = len(values), sum(values) / len(values), tested + 1
            half = (1.96 / n * math.hypot(*numbers["error"]["x@lab"]) if bound.error else
                    math.inf if n == 1 else T95[n - 2] * statistics.stdev(values) / n ** 0.5)
            for part in says:
                if condition := getattr(bound, part):
                    says[part].append(meets(condition, [mean] if bound.means else values, (mean - half, mean + half)))
    yes, no = all(map(all, says["agrees"])), [all(met) for met in says["contradicts"]]
    no = any(no) if reading.fails == "any" else no and all(no)
    expected = N if not tested or not all(map(all, says["needs"])) else M if yes == bool(no) or yes and lost else (
        A if yes else C)
    assert judge(reading, numbers) == expected


@given(st.lists(GRID, min_size=1, max_size=5), GRID, GRID)
def test_verdicts_obey_their_algebra(values, one, other):
    """A claim that holds up to a bound, and fails from a larger one on."""
    low, high = sorted((one, other + 0.25))

    def verdict(values, agrees=f"<= {low}", contradicts=f">= {high}"):
        bound = Bound(what="it", quantity="it", agrees=agrees, contradicts=contradicts)
        return judge(Reading(reads={}, bounds=(bound,), fails="all"), {"it": {"x@lab": values}})

    found = verdict(values)
    assert found == (A if max(values) <= low else C if min(values) >= high else M) == verdict(values[::-1])
    assert verdict([-x for x in values], f">= {-low}", f"<= {-high}") == found          # the sign does not matter
    assert verdict(values, f">= {high}", f"<= {low}") == {A: C, C: A, M: M}[found]      # the opposite claim
    low, high, ends = low + 0.1, high + 0.1, interval(np.array(values))                 # off the grid
    assert verdict(values, f"clearly <= {low}", f"clearly >= {high}") == (
        A if ends[1] <= low else C if ends[0] >= high else M)
    assert found == M or {verdict([x]) for x in values} == {found}      # further seeds never settle what is mixed


def test_the_interval_is_that_of_students_t():
    for degrees, t in enumerate(T95, 1):        # t = sqrt(degrees) tan(angle) has the density cos(angle)^(degrees - 1)
        angle = torch.linspace(0, math.pi / 2, 100_001, dtype=torch.float64)
        density = angle.cos() ** (degrees - 1)
        below(abs(density[angle < math.atan(t / degrees ** 0.5)].sum() / density.sum() - 0.95), 1e-4)
    many = np.arange(30.0)
    close(interval(many)[1], 14.5 + T95[8] * many.std(ddof=1) / 30 ** 0.5)


def test_a_ratio_has_the_same_run_of_the_other_column_and_equal_values_share_a_rank():
    """The pages have all other kinds of quantities."""
    numbers = {"raw": {"softmax@lab": [1, 2], "elastic@lab": [5, 6]}, "cost": {"softmax@lab": [2], "elastic@lab": [4]}}
    found = judge(Reading(reads={}, bounds=(Bound(what="it", quantity="raw / cost"),)), numbers).quantities
    close(np.stack([part.values for part in found]), [[0.5, 1], [1.25, 1.5]])
    ranked = ([1, 2, 2, 4], [1, 3, 3, 9]), ([1, 1], [1, 2]), ([1, 2, 3, 3], [1, 2, 4, 3])
    close([quantities.rank_correlation(*pair) for pair in ranked], [1, 0, 3 / 10 ** 0.5])  # as in scipy.stats


def test_every_claim_has_its_sources_a_bound_and_numbers_to_read():
    assert len(CLAIMS) == sum(map(len, PAPERS.values())) and sum(len(row.changes) for row in CLAIMS.values()) == 79
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
    close(np.concatenate([*quantities.growth_of_speedup(speeds).values()]), [2.5, 2])
    leads = {f"gain at {T}": {"tda": T + np.arange(3), "softmax": np.arange(3)} for T in (512, 1024, 2048)}
    leads |= {f"error at {T}": {"tda": [3] * 3, "softmax": [4] * 3} for T in (512, 1024, 2048)}
    close([*quantities.lead_in_errors(leads).values()], [512 / 5, 1024 / 5, 2048 / 5])
    shares = {"dormant": {"small": [.1, .3], "medium": [.5], "large": [.1]}}
    close([*quantities.growth_of_share(shares).values()], [.3, -.4])
    bias = 1.0 * (np.arange(200) < np.array([[40], [60], [80]]))        # of three heads, smoothed over five distances
    assert quantities.reach(bias) == 61 and np.isnan(quantities.reach(bias + 0.2))  # the latter does not fade
    before, after = ({"alibi-learned": np.array(slopes)} for slopes in ([.5, .25], [.6, .2]))
    close(quantities.change_of_slopes({"slopes at first": before, "slopes": after}), 0.2)
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
    assert {run.partition("@")[0] for run in runs} | swept >= set(RECIPES) - {"heads", "blind"}
    assert {run.partition("@")[2] for run in runs} | {"lab"} == {*SETUPS, ""}
    assert {path.split("/")[0] for path in paths} >= {*COMMANDS, *LOOKS}


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
    assert jobs.best_loss(elastic_run) == min(float(row[2]) for row in log_rows(elastic_run)[1:] if row[2])


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
    assert CLAIMS["lazy-sink-gone"].decided_by({"lr3e-3": {}}) is None             # a variation, not in place of a GPU
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
    assert " ".join(routing.CLASSES[kind] for kind in kinds) == (
        "article other other punctuation preposition punctuation space digit capitalised article")
    close([routing.mutual_information(groups, kinds) for groups in (kinds, np.zeros_like(kinds))], [1, 0], size=1.0)
    close(routing.purity(np.array([0, 0, 1, 1, 1]), np.array([0, 1, 0, 0, 1])), 2 / 3)  # group 1 has two of three marks


def run_claims(capsys, *flags):
    eval_script.main(["claims", *map(str, flags)])
    return capsys.readouterr()


def test_the_ledger_prints_the_stored_verdict_of_each_claim(capsys):
    said, found = run_claims(capsys).out, json.loads(run_claims(capsys, "--json").out)
    for name, verdict in found["verdicts"].items():
        assert re.search(rf"^  {verdict['']} +.* {name} ", said, re.M), name
    verdicts = [verdict[""] for verdict in found["verdicts"].values()]
    assert said.startswith(f"70 claims of five papers. {verdicts.count(NOT_RUN)} are not run here.")
    shown = run_claims(capsys, "--show=kbias-shift", "--all").out
    assert shown.startswith(f"## kbias-shift\n\n**{found['verdicts']['kbias-shift']['']}**")
    assert "python train.py --preset=lab --seed=2" in shown and re.search("run +. seed 2 +. seed 3 +. seed 4", shown)


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
    assert first["postnorm"][""]["seeds"] == [3] and json.loads(said.out)["verdicts"]["gate-identity"] == {"": A}
    assert sorted("--norm_place=post" in flags for flags in trainings) == [False, True, True]
    said, found = measured("--run=gate-identity", "--seeds=9,2")
    found = found["gate-identity"][""]
    assert found["seeds"] == [2, 3, 9] and "gate-identity" in said.out and "postnorm" not in said.out
    for column, (path, _) in CLAIMS["gate-identity"].readings[""].reads.items():
        expected = [checks.gate_identity(seed)[path] for seed in (2, 3, 9)]
        close(found["numbers"][column]["gate_identity"], expected, dtype=torch.float32)


def test_the_pages_and_their_verdicts_are_those_that_the_command_writes(tmp_path):
    """If not, run python eval.py claims --pages=results/claims. They have each quantity with its bounds and verdict."""
    assert all(CLAIMS[name].readings[where].fits(kept["numbers"])
               for name, found in COMMITTED.items() for where, kept in found.items())
    view.write_pages(tmp_path, {"claims": readable(COMMITTED)})
    written = {page.name: page.read_text() for page in tmp_path.glob("*.md")}
    assert written == {page.name: page.read_text() for page in (ROOT / "results/claims").glob("*.md")}
    assert {page.stem for page in tmp_path.glob("*.png")} == {*map(lambda name: name[:-3], written)} - {"changes"}
