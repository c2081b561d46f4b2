"""eval.py bench: requests, answers in batches of any size, scores against small independent forms, two ranks."""
import json
import math
import statistics

import bounds
import numpy as np
import pytest
import torch
from bounds import close
from conftest import CACHES, assert_says, run, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from test_benchmarks import PUBLIC, WIKI, write_rows

import eval as eval_script
from attention import ATTENTIONS
from common.machine import Machine
from data import benchmarks, coders, tokens
from evals import bench, likelihood
from evals.likelihood import Answer, Request
from model import GPT

BYTES = coders.Bytes()


def test_a_row_becomes_a_request_for_each_choice():
    row = benchmarks.Row(["ab", "abc ", ""], ["x", "yz", "x"], 0)
    assert likelihood.row_requests(row, BYTES, 99, bos=False) == [      # the separator, 256, predicts a first token
        Request([*b"ab x"], 2), Request([*b"abc  yz"], 4), Request([256, *b" x"], 2)]
    row = row._replace(contexts=["ab"], choices=["x"])
    assert likelihood.row_requests(row, BYTES, 4, bos=True) == [Request([256, *b"ab x"], 2)]
    assert likelihood.row_requests(row, BYTES, 3, bos=True) == [Request([*b"ab x"], 2, cut=True)]
    with pytest.raises(ValueError, match="a choice has 2 tokens where the model can predict 1 to 1"):
        likelihood.row_requests(row, BYTES, 1, bos=True)


@given(context=st.text("theqk ", max_size=12), more=st.text("theqk ", min_size=1, max_size=6))
def test_context_and_choice_are_encoded_together(toy, context, more):
    """The context has the tokens of its text alone. The choice has the remaining tokens of the whole text."""
    coder = tokens.tokenizer(str(toy))
    request, = likelihood.row_requests(benchmarks.Row([context], [more], 0), coder, 99, bos=True)
    before = coder.encode(context.rstrip()).tolist()
    after = coder.encode(f"{context} {more}").tolist()[len(before):]
    assert request == Request([coder.separator, *before, *after], len(after))


@given(st.binary(min_size=1, max_size=30), st.integers(1, 12))
def test_every_token_of_a_page_is_predicted_once_in_a_full_window(text, length):
    page, end = benchmarks.Page(text.decode("latin-1"), 1, 1), 0
    ids = [256, *page.text.encode()]
    for request in likelihood.page_requests(page, BYTES, length, False):
        end += request.count
        assert request.ids == ids[end + 1 - len(request.ids):end + 1]
        assert len(request.ids) - 1 == min(length, len(ids) - 1) >= request.count
    assert end == len(ids) - 1


def some_groups():
    """Requests with one to three scored tokens: five groups share a beginning, which each model reads once."""
    dice, groups = np.random.default_rng(bounds.SEED), []
    for shared in (0, 1, 4, 4, 9, 4, 0):
        front = dice.integers(31, size=shared).tolist()
        groups.append([Request(front + dice.integers(31, size=2 + 2 * i).tolist(), 1 + i) for i in range(3)])
    return groups


def said(model, groups, batch_size=10 ** 6):
    return sum(likelihood.listen(model, groups, Machine("cpu", "float32"), batch_size, "x"), [])


@pytest.mark.parametrize("recipe", CACHES)
@torch.no_grad()
def test_shared_padded_and_batched_requests_are_answered_as_one_by_one(recipe):
    """The model is float64, so that rounding does not decide between two likely tokens."""
    window = {"window": 4} if "window" in ATTENTIONS[recipe] else {}
    model = GPT(tiny_config(attn=recipe, n_layer=2, **window)).double().eval()
    for p in model.parameters():                # less flat logits than at initialisation
        p.add_(0.2 * torch.randn_like(p))
    expected, groups, head = [], some_groups(), model.lm_head
    for ids, count, _ in sum(groups, []):
        logits, wanted = model(torch.tensor([ids[:-1]]))[0][0, -count:], torch.tensor(ids[-count:])
        loglik = logits.log_softmax(-1)[range(count), wanted].sum().item()
        rank = 1 + (logits > logits[range(count), wanted, None]).sum(1)
        expected.append(Answer(loglik, bool((logits.argmax(-1) == wanted).all()), rank.double().mean().item()))
    units = likelihood.units_of(groups, cached=True)
    some = [Request([1, 2, 3, 4, 5], 1), Request([1, 2, 3, 9], 1), Request([1, 2, 3, 4, 7, 8], 3)]
    assert likelihood.units_of([some], True)[0].shared == 2             # token 3 predicts the first score of two others
    assert [unit.shared for unit in units if unit.shared] == [1, 4, 4, 9, 4]
    for size, counts in ((57, [1, 3, 1, 6]), (56, [1, 2, 1, 1, 6]), (1, [1] * 11)):     # 57 = 3 * 4 shared + 9 * 5
        assert [len(batch) for batch in likelihood.batches(units, size)] == counts
    for batch_size in (10 ** 6, 1):
        found = said(model, groups, batch_size)
        assert [answer[1:] for answer in found] == [answer[1:] for answer in expected]
        close([answer.loglik for answer in found], [answer.loglik for answer in expected], dtype=torch.float32)
    assert model.lm_head is head
    model.transformer.wte.weight.data[:] = math.nan
    with pytest.raises(ValueError, match="x: the model's log-likelihoods are not finite"):
        said(model, groups)


CHOICES = st.lists(st.tuples(st.text("aé", min_size=1, max_size=3), st.integers(-3, 0)), min_size=2, max_size=4)


@given(st.lists(CHOICES.flatmap(lambda c: st.tuples(st.just(c), st.integers(0, len(c) - 1))), min_size=2, max_size=8))
def test_accuracy_takes_the_first_of_the_best_choices_and_acc_norm_counts_characters(rows):
    chance = statistics.mean(1 / len(choices) for choices, _ in rows)
    asked = [benchmarks.Row(["c"] * len(choices), [text for text, _ in choices], gold) for choices, gold in rows]
    heard = [[Answer(score, False) for _, score in choices] for choices, _ in rows]
    assert bench.chance("piqa", asked) == pytest.approx(chance)
    found = bench.judge("piqa", asked, heard, chance)
    for measure, per in (("acc", lambda text: 1), ("acc_norm", len)):
        hits = [float(max(range(len(c)), key=lambda i: c[i][1] / per(c[i][0])) == gold) for c, gold in rows]
        value = statistics.mean(hits)
        close([found[measure][part] for part in ("value", "stderr", "adjusted")],
              [value, statistics.stdev(hits) / len(hits) ** 0.5, (value - chance) / (1 - chance)], size=1.0)
        assert found[measure]["rows"].split() == [f"{hit:g}" for hit in hits]
        error = 2 * (chance * (1 - chance) / len(rows)) ** 0.5
        told = "better" if value > chance + error else "worse" if value < chance - error else "no better"
        assert found[measure]["than_guessing"] == told
    assert found["n"] == len(rows)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 9), st.integers(9, 40)), min_size=2,
                max_size=6))
def test_lambada_is_scored_per_word_and_wikitext_per_word_and_byte(rows):
    """The errors are those of the delta method."""
    nats, greedy, words, size = (np.array(column, float) for column in zip(*rows, strict=True))
    n, heard = len(rows), [[Answer(-loss, bool(right))] for loss, right in zip(nats, greedy, strict=True)]
    found = bench.judge("lambada", [None] * n, heard, bench.chance("lambada", []))
    close([found["acc"]["value"], found["acc"]["adjusted"]], [greedy.mean()] * 2, size=1.0)
    assert found["acc"]["than_guessing"] is None and "adjusted" not in found["perplexity"]
    mean, error = nats.mean(), nats.std(ddof=1) / n ** 0.5
    close([found["perplexity"][part] for part in ("value", "stderr")], [math.exp(mean), math.exp(mean) * error])
    pages = [[Answer(-loss / 2, False)] * 2 for loss in nats]           # in two windows
    asked = [benchmarks.Page("", *counts) for counts in zip(words, size, strict=True)]
    found = bench.judge("wikitext", asked, pages, bench.chance("wikitext", []))
    for name, count in (("word_perplexity", words), ("byte_perplexity", size), ("bits_per_byte", size)):
        mean = nats.sum() / count.sum()
        error = math.sqrt(((nats - mean * count) ** 2).sum() / (n - 1) / n) / count.mean()
        value, slope = (mean / math.log(2), 1 / math.log(2)) if name == "bits_per_byte" else (math.exp(mean),) * 2
        close([found[name]["value"], found[name]["stderr"]], [value, error * slope], terms=256, size=value * nats.max())


def test_scores_are_adjusted_for_guessing_and_averaged():
    no, yes = (benchmarks.Row(["c"] * 2, ["no", "yes"], gold) for gold in (0, 1))
    assert bench.chance("boolq", [no] * 3 + [yes]) == bench.chance("boolq", [no] + [yes] * 3) == 0.75
    found = bench.judge("boolq", [yes] * 2, [[Answer(-1, False), Answer(-2, False)]] * 2, 1.0)
    assert found["acc"]["adjusted"] == -1       # guessing is always right, so nothing is divided

    def task(value, error):
        return dict.fromkeys(("acc", "acc_norm"), {"value": value, "stderr": error, "adjusted": value - 0.1})
    tasks = {name: task(0.1 * i, 0.01) for i, name in enumerate(bench.EIGHT)} | {"wikitext": {"bits_per_byte": {}}}
    assert list(bench.averages(tasks)) == ["average"] and bench.averages({"piqa": task(1, 0)}) == {}
    close(bench.averages(tasks)["average"], {"tasks": 8, "value": 0.35, "stderr": 0.01 / 8 ** 0.5, "adjusted": 0.25})
    found = bench.averages(tasks | {"openbookqa": task(0.8, None)})
    assert found["average"]["tasks"] == 9 and found["average"]["stderr"] is None
    close([found["average of eight"]["value"], found["average"]["value"]], [0.35, 0.4])
    losses = [{"rows": "1 2 6"}, {"rows": "2 4 8"}]                     # 1 nat is a factor of e in perplexity
    close([bench.compared(losses[:1], losses[1:])[name] for name in ("difference", "+- ")], [-5 / 3, 1 / 3])
    for rows, verdict in (("1 2 9", "cannot be told apart"), ("2 4 8", "lower"), ("0 1 5", "higher")):
        assert bench.compared(losses[:1], [{"rows": rows}])["verdict"] == verdict


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """A folder with one file for each task: twice the row of the public file, some of them changed."""
    folder = tmp_path_factory.mktemp("benchmarks")
    long = "Once upon a time, in a rather long row of a file, she gave the dog a bone"
    changes = {"boolq": {"label": False}, "piqa": {"goal": long}, "lambada": {"text": long}}
    for name, row in PUBLIC.items():
        write_rows(folder, name, row, row | changes.get(name, {}))
    (folder / "wiki.test.raw").write_text(WIKI)
    return folder


def test_a_run_is_scored_on_every_task_and_drawn(elastic_run, questions, evaluate, capsys, tmp_path):
    look = ("bench", f"--out_dir={elastic_run}", f"--source={questions}")
    found = evaluate(*look, "--length=200")
    assert list(found["tasks"]) == list(benchmarks.TASKS) and found["length"] == 200 and not found["bos"]
    assert all({*bench.MEASURES[name]} < {*task} and task["cut"] == 0 for name, task in found["tasks"].items())
    assert {name: mean["tasks"] for name, mean in found["averages"].items()} == {"average": 9, "average of eight": 8}
    less = evaluate(*look, "--length=200", "--bos", "--batch_size=1", "--tasks=piqa,wikitext")
    for measure in bench.MEASURES["wikitext"]:  # pages begin with the separator even without --bos
        both = ([run["tasks"]["wikitext"][measure][part] for part in ("value", "stderr")] for run in (less, found))
        close(*both, dtype=torch.float32)
    one = evaluate(*look, "--length=200", "--limit=1", "--tasks=boolq")["tasks"]["boolq"]
    assert one["n"] == 1 and one["chance"] == 0.5                       # of the whole file
    eval_script.main([*look, "--device=cpu", "--length=50", "--tasks=boolq,piqa,lambada", f"--png={tmp_path / 'png'}"])
    assert_says("cut at the beginning: rows 1 of piqa, 1 of lambada", capsys.readouterr().out)
    assert (tmp_path / "png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.exhaustive
def test_two_ranks_give_the_scores_of_one_process(elastic_run, questions, evaluate):
    flags = ("bench", f"--out_dir={elastic_run}", f"--source={questions}", "--length=200", "--tasks=piqa,lambada")
    done = run("eval.py", *flags, "--device=cpu", "--json", ranks=2)
    close(*(found["tasks"]["lambada"]["perplexity"]["value"] for found in (json.loads(done.stdout), evaluate(*flags))),
          dtype=torch.float32)
