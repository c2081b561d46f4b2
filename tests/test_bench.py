"""eval.py bench: requests, a model's answers in batches of any size, scores against small independent forms, and the
scores of lm-evaluation-harness as an oracle."""
import json
import math
import statistics

import bounds
import numpy as np
import pytest
import torch
from bounds import close
from conftest import CACHES, assert_says, byte_pairs, run, tiny_config, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_benchmarks import PUBLIC, WIKI, write_rows

import eval as eval_script
from attention import ATTENTIONS
from common.machine import Machine
from data import benchmarks, coders, tokens
from data import weights as weights_tool
from evals import bench, likelihood
from evals.instrument import load_run
from evals.likelihood import Answer, Request, Unit
from model import GPT

BYTES = coders.Bytes()

# ----------------------------------------------------------------------------------------------- from text to requests


def test_a_row_becomes_a_request_for_each_choice():
    row = benchmarks.Row(["ab", "abc ", ""], ["x", "yz", "x"], 0)
    assert likelihood.row_requests(row, BYTES, 99, bos=False) == [
        Request(list(b"ab x"), 2), Request(list(b"abc  yz"), 4), Request([256, *b" x"], 2)]         # 256 precedes all
    assert likelihood.row_requests(row, BYTES, 99, bos=True)[0] == Request([256, *b"ab x"], 2)
    assert likelihood.row_requests(row, BYTES, 3, bos=True)[0] == Request(list(b"ab x"), 2, cut=True)
    assert not likelihood.row_requests(row, BYTES, 4, bos=True)[0].cut
    with pytest.raises(ValueError, match="a choice has 2 tokens where the model can predict 1 to 1"):
        likelihood.request([1, 2, 3], [4, 5], 1)


@given(context=st.text("theqk ", max_size=12), more=st.text("theqk ", min_size=1, max_size=6))
def test_context_and_choice_are_encoded_together(toy, context, more):
    """The context has the tokens of its text alone. The choice has the remaining tokens of the whole text."""
    coder = tokens.tokenizer(str(toy))
    before, after = likelihood.pair(coder, context, more)
    assert before == coder.encode(context.rstrip()).tolist()
    assert after == coder.encode(context + more).tolist()[len(before):]


@given(st.binary(min_size=1, max_size=30), st.integers(1, 12))
def test_every_token_of_a_page_is_predicted_once_in_a_full_window(text, length):
    page, end = benchmarks.Page(text.decode("latin-1"), 1, 1), 0
    ids = [256, *page.text.encode()]
    for request in likelihood.page_requests(page, BYTES, length, False):
        end += request.count
        assert request.ids == ids[end + 1 - len(request.ids):end + 1]
        assert len(request.ids) - 1 == min(length, len(ids) - 1) >= request.count
    assert end == len(ids) - 1


@pytest.mark.parametrize("count, limit, chosen", [(5, 0, [0, 1, 2, 3, 4]), (5, 3, [0, 2, 4]), (3, 9, [0, 1, 2]),
                                                  (7, 1, [0])])
def test_a_limit_is_spread_over_the_file(count, limit, chosen):
    assert list(bench.evenly(count, limit)) == chosen


# --------------------------------------------------------------------------------------------- from requests to answers

IDS = st.lists(st.integers(0, 1), min_size=2, max_size=6)
GROUPS = st.lists(st.lists(IDS.flatmap(lambda ids: st.integers(1, len(ids) - 1).map(
    lambda count: Request(ids, count))), min_size=1, max_size=3), min_size=1, max_size=5)


@given(GROUPS, st.booleans())
def test_a_beginning_is_shared_up_to_the_token_that_predicts_the_first_score(groups, cached):
    found, number = [], 0
    for group in groups:
        able = [n for n in range(1, 7) if all(r.ids[:n] == group[0].ids[:n] and n < len(r.ids) - r.count for r in group)]
        shared = able[-1] if able and cached and len(group) > 1 else 0
        found += [Unit(group, shared, number)] if shared else [Unit([r], 0, number + i) for i, r in enumerate(group)]
        number += len(group)
    assert likelihood.units_of(groups, cached) == found


@given(GROUPS, st.integers(0, 40))
def test_batches_hold_as_many_units_of_one_kind_as_fit_and_the_longest_come_first(groups, size):
    units = likelihood.units_of(groups, cached=True)
    found = list(likelihood.batches(units, size))
    assert sorted((unit for batch in found for unit in batch), key=id) == sorted(units, key=id)

    def tokens_of(batch):                       # the shared ones of each unit, and all others with their padding
        return sum(unit.shared for unit in batch) + max(u.longest for u in batch) * sum(len(u.requests) for u in batch)
    order = [(unit.shared, unit.longest) for batch in found for unit in batch]
    assert order == sorted(order, reverse=True)
    for batch, following in zip(found, [*found[1:], []], strict=True):
        assert len({unit.shared for unit in batch}) == 1 and (len(batch) == 1 or tokens_of(batch) <= size)
        assert not following or following[0].shared != batch[0].shared or tokens_of([*batch, following[0]]) > size


def some_groups():
    """Requests with one to three scored tokens: five groups share a beginning, two do not."""
    dice = np.random.default_rng(bounds.SEED)
    groups = []
    for shared in (0, 1, 4, 4, 9, 4, 0):
        front = dice.integers(31, size=shared).tolist()
        groups.append([Request(front + dice.integers(31, size=2 + 2 * i).tolist(), 1 + i) for i in range(3)])
    return groups


def said(model, groups, batch_size=10 ** 6):
    found = likelihood.listen(model, groups, Machine("cpu", "float32"), batch_size, "x")
    return [answer for group in found for answer in group]


@pytest.mark.parametrize("recipe", CACHES)
def test_shared_padded_and_batched_requests_are_answered_as_one_by_one(recipe):
    """The model is float64, so that rounding does not decide between two likely tokens."""
    window = {"window": 4} if "window" in ATTENTIONS[recipe] else {}
    model = GPT(tiny_config(attn=recipe, n_layer=2, **window)).double().eval()
    with torch.no_grad():
        for p in model.parameters():            # less flat logits than at initialisation
            p.add_(0.2 * torch.randn_like(p))
    expected, groups, head = [], some_groups(), model.lm_head
    for request in (request for group in groups for request in group):
        with torch.no_grad():
            logits = model(torch.tensor([request.ids[:-1]]))[0][0, -request.count:]
        wanted = torch.tensor(request.ids[-request.count:])
        expected.append(Answer(logits.log_softmax(-1)[range(request.count), wanted].sum().item(),
                               bool((logits.argmax(-1) == wanted).all())))
    for batch_size in (10 ** 6, 1):
        found = said(model, groups, batch_size)
        assert [answer.greedy for answer in found] == [answer.greedy for answer in expected]
        close([answer.loglik for answer in found], [answer.loglik for answer in expected], dtype=torch.float32)
    assert model.lm_head is head
    model.transformer.wte.weight.data[:] = math.nan
    with pytest.raises(ValueError, match="x: the model's log-likelihoods are not finite"):
        said(model, groups)


def test_requests_to_a_model_that_sees_later_tokens_are_neither_padded_nor_shared(monkeypatch):
    model, seen = GPT(tiny_config()).eval(), []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda idx, cache=None: seen.append((idx.shape, cache)) or forward(idx))
    monkeypatch.setattr(type(model.transformer.h[0].attn), "causal", False)
    monkeypatch.setattr(type(model.transformer.h[0].attn), "cached", False)
    groups = some_groups()
    said(model, groups)
    lengths = sorted((len(request.ids) - 1 for group in groups for request in group), reverse=True)
    assert seen == [((1, n), None) for n in lengths]


# ----------------------------------------------------------------------------------------------- from answers to scores

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
        assert found[measure]["than_guessing"] == ("better" if value > chance + error else
                                                   "worse" if value < chance - error else "no better")
    assert found["n"] == len(rows)


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 9), st.integers(9, 40)), min_size=2,
                max_size=6))
def test_lambada_is_scored_per_word_and_wikitext_per_word_and_byte(rows):
    """The error of a ratio is what moves it if one page is left out, up to the second order: the delta method."""
    nats, greedy, words, size = (np.array(column, float) for column in zip(*rows, strict=True))
    n, heard = len(rows), [[Answer(-loss, bool(right))] for loss, right in zip(nats, greedy, strict=True)]
    found = bench.judge("lambada", [benchmarks.Row(["c"], ["word"], 0)] * n, heard, 0.0)
    error = nats.std(ddof=1) / n ** 0.5
    close([found["acc"]["value"], found["acc"]["adjusted"]], [greedy.mean()] * 2, size=1.0)
    close(list(found["perplexity"][part] for part in ("value", "stderr")), [math.exp(nats.mean()) * x for x in (1, error)])
    assert found["acc"]["than_guessing"] is None and "adjusted" not in found["perplexity"]
    pages = [[Answer(-loss / 2, False)] * 2 for loss in nats]           # in two windows
    found = bench.judge("wikitext", [benchmarks.Page("", w, b) for w, b in zip(words, size, strict=True)], pages, None)
    for measure, count, scale in (("word_perplexity", words, 1), ("byte_perplexity", size, 1),
                                  ("bits_per_byte", size, math.log(2))):
        mean = nats.sum() / count.sum() / scale
        error = math.sqrt(((nats - mean * scale * count) ** 2).sum() / (n - 1) / n) / count.mean() / scale
        value = math.exp(mean) if "perplexity" in measure else mean
        close([found[measure]["value"], found[measure]["stderr"]], [value, error * (value if value != mean else 1)],
              terms=256)


def test_the_chance_of_yes_or_no_is_the_more_frequent_answer():
    no, yes = (benchmarks.Row(["c"] * 2, ["no", "yes"], gold) for gold in (0, 1))
    assert bench.chance("boolq", [no] * 3 + [yes]) == bench.chance("boolq", [no] + [yes] * 3) == 0.75
    assert bench.chance("lambada", []) == 0 and bench.chance("wikitext", []) is None
    found = bench.judge("boolq", [yes] * 2, [[Answer(-1, False), Answer(-2, False)]] * 2, bench.chance("boolq", [yes] * 2))
    assert found["acc"]["adjusted"] == -1       # guessing is always right, so nothing is divided
    assert bench.than_guessing(1.0, 0.5, 3) == "no better"              # three rows are too few


def test_averages_weigh_all_tasks_equally():
    def task(value, error):
        score = {"value": value, "stderr": error, "adjusted": value - 0.1}
        return {"acc": score, "acc_norm": score}
    tasks = {name: task(0.1 * i, 0.01) for i, name in enumerate(bench.EIGHT)} | {"wikitext": {"bits_per_byte": {}}}
    assert list(bench.averages(tasks)) == ["average"] and bench.averages({"piqa": task(1, 0)}) == {}
    close([bench.averages(tasks)["average"][part] for part in ("tasks", "value", "stderr", "adjusted")],
          [8, 0.35, 0.01 / math.sqrt(8), 0.25])
    found = bench.averages(tasks | {"openbookqa": task(0.8, None)})
    assert found["average"]["tasks"] == 9 and found["average"]["stderr"] is None
    close([found["average of eight"]["value"], found["average"]["value"]], [0.35, 0.4])


def test_runs_are_compared_with_the_first_run_row_by_row():
    """The error is that of the rows' differences. One of 8 rows differs, so the mean and its error are both 1/8."""
    def piqa(*hits):
        heard = [[Answer(-(not hit), False), Answer(-hit, False)] for hit in hits]
        task = bench.judge("piqa", [benchmarks.Row(["c"] * 2, ["a", "b"], 0)] * len(hits), heard, 0.5) | {"cut": 0}
        return {"tasks": {"piqa": task}, "averages": {}}
    first, other, best = piqa(1, 1, 1, 1, 0, 0, 0, 0), piqa(1, 1, 1, 1, 1, 0, 0, 0), piqa(*[1] * 8)
    lines = [line.split() for line in bench.tell(bench.Bench(), {"out/a": first, "out/b": other, "out/c": best,
                                                                 "out/d": piqa(*[0] * 8)}).splitlines()[1:5]]
    assert lines[0][2:4] == ["out/a", "0.5000"] and lines[0][-3:] == ["-"] * 3
    assert lines[1][-6:] == ["0.1250", "0.1250", *"cannot be told apart".split()]
    assert [line[-1] for line in lines[2:]] == ["higher", "lower"] and lines[2][-3] == "0.5000"
    assert bench.beside(*[first["tasks"]["piqa"]["acc"]] * 2) == [0, 0, "cannot be told apart"]
    loss = [{"rows": "1 2 6"}, {"rows": "2 3 7"}]                       # of perplexities: 1 nat is a factor of e
    assert bench.difference(loss[1], loss[0]) == (1.0, 0.0)


# ------------------------------------------------------------------------------------------- the command and its table


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """A folder with one file for each task: a row of the public file, one with another right answer, one with a longer
    question."""
    folder = tmp_path_factory.mktemp("benchmarks")
    key = {"arc_easy": "answerKey", "arc_challenge": "answerKey", "openbookqa": "answerKey", "winogrande": "answer"}
    first = {"arc_easy": "B", "arc_challenge": "1", "openbookqa": "A", "siqa": "1", "winogrande": "1", "boolq": False}
    long = {"hellaswag": "ctx_a", "piqa": "goal", "siqa": "context", "boolq": "passage", "lambada": "text",
            "winogrande": "sentence"}
    for name, row in PUBLIC.items():
        rows = [row] if name == "lambada" else [row, row | {key.get(name, "label"): first.get(name, 1)}]
        if name in long:
            rows.append(row | {long[name]: "A rather longer beginning, with 7 words. " + row[long[name]]})
        write_rows(folder, name, *rows)
    (folder / "wiki.test.raw").write_text(WIKI)
    return folder


def test_a_run_is_scored_on_every_task_and_drawn(elastic_run, questions, evaluate, capsys, tmp_path):
    look = ("bench", f"--out_dir={elastic_run}", f"--source={questions}")
    found = evaluate(*look, "--length=200")
    assert list(found["tasks"]) == list(benchmarks.TASKS) and found["length"] == 200 and not found["bos"]
    for name, task in found["tasks"].items():
        assert set(bench.MEASURES[name]) < set(task) and task["cut"] == 0
    assert {name: mean["tasks"] for name, mean in found["averages"].items()} == {"average": 9, "average of eight": 8}
    less = evaluate(*look, "--length=200", "--bos", "--batch_size=1", "--tasks=piqa,wikitext")
    assert list(less["tasks"]) == ["piqa", "wikitext"]
    for measure in bench.MEASURES["wikitext"]:  # pages begin with the separator even without --bos
        one, two = (numbers["tasks"]["wikitext"][measure] for numbers in (less, found))
        close([one["value"], one["stderr"]], [two["value"], two["stderr"]], dtype=torch.float32)
    for name, runs in (("one", {"one": found}), ("three", {"one": found, "less": less, "again": found})):
        bench.draw(tmp_path / name, runs)
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    eval_script.main([*look, "--device=cpu", "--length=50", "--tasks=boolq,piqa,lambada", "--limit=2"])
    done = capsys.readouterr()
    assert done.err == ""
    assert_says(r"task +measure +score +\+- +n +chance +adjusted +than guessing\n *boolq +acc ", done.out)
    assert_says("piqa +acc_norm .*\nlambada +acc .*\nlambada +perplexity .* 2 .*\naverage +3 tasks", done.out)
    assert_says("longer than 50 tokens, and cut at the beginning: rows 1 of boolq, 1 of piqa, 1 of lambada", done.out)


@pytest.mark.exhaustive
def test_two_ranks_give_the_scores_of_one_process(elastic_run, questions, evaluate):
    flags = ("bench", f"--out_dir={elastic_run}", f"--source={questions}", "--length=200", "--tasks=piqa,lambada")
    done = run("eval.py", *flags, "--device=cpu", "--json", ranks=2)
    close(*(found["tasks"]["lambada"]["perplexity"]["value"] for found in (json.loads(done.stdout), evaluate(*flags))),
          dtype=torch.float32)


def test_pages_are_scored_in_the_tokens_of_the_run(toy_run, questions, evaluate):
    """Each page begins with the separator of this tokenizer."""
    found = evaluate("bench", f"--out_dir={toy_run}", f"--source={questions}", "--length=100", "--tasks=wikitext")
    (model, _), coder, nats = load_run(toy_run, "cpu"), tokens.tokenizer(str(toy_run)), 0
    for page in benchmarks.pages(WIKI):
        ids = torch.tensor([[coder.separator, *coder.encode(page.text).tolist()]])
        with torch.no_grad():
            nats += model(ids[:, :-1], ids[:, 1:])[1].item() * (ids.shape[1] - 1)
    close(math.log(found["tasks"]["wikitext"]["word_perplexity"]["value"]),
          nats / sum(page.words for page in benchmarks.pages(WIKI)), dtype=torch.float32)


# ----------------------------------------------------------------------------------- lm-evaluation-harness as an oracle

ORACLE = {                                      # {our task: (the oracle's file, the split that it scores)}
    "hellaswag": ("hellaswag/hellaswag", "validation"), "arc_easy": ("arc/arc_easy", "test"),
    "arc_challenge": ("arc/arc_challenge", "test"), "piqa": ("piqa/piqa", "validation"),
    "winogrande": ("winogrande/default", "validation"), "openbookqa": ("openbookqa/openbookqa", "test"),
    "siqa": ("siqa/siqa", "validation"), "boolq": ("super_glue/boolq/default", "validation"),
    "lambada": ("lambada/lambada_openai", "test"), "wikitext": ("wikitext/wikitext", "test")}


def oracle_rows(name, folder):
    """The rows in the format that lm-evaluation-harness reads."""
    if name == "wikitext":
        before, first, second = WIKI.replace(" = Oak", "# = Oak").replace(" = Ash", "# = Ash").split("#")
        return [{"page": first[:-1]}, {"page": second}]
    rows = [json.loads(line) for line in (folder / benchmarks.TASKS[name].file).read_text().splitlines()]
    if name not in ("arc_easy", "arc_challenge", "openbookqa"):
        return rows
    return [{"question": row["question"]["stem"], "question_stem": row["question"]["stem"],
             "choices": {key: [choice[key] for choice in row["question"]["choices"]] for key in ("text", "label")},
             "answerKey": row["answerKey"].strip()} for row in rows]


def oracle_task(lm_eval, name, questions, folder):
    """The path of a task of lm-evaluation-harness that is unchanged except that it reads our rows."""
    file, split = ORACLE[name]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in oracle_rows(name, questions)))
    config = {"include": f"{next(iter(lm_eval.__path__))}/tasks/{file}.yaml", "task": f"our_{name}",
              "dataset_path": "json", "dataset_name": None, "training_split": None, "validation_split": None,
              "test_split": None, "dataset_kwargs": {"data_files": {split: str(folder / f"{name}.jsonl")}}}
    (folder / f"{name}.yaml").write_text(json.dumps(config | {f"{split}_split": split}))       # JSON is valid YAML
    return str(folder / f"{name}.yaml")


@pytest.mark.exhaustive
@pytest.mark.xdist_group("weights")
@pytest.mark.parametrize("length, bos", [(24, False), (64, True)])
def test_scores_equal_those_of_lm_evaluation_harness(length, bos, questions, tmp_path, monkeypatch, evaluate):
    """Both sides run from the files to the scores, with one small random Llama. Long inputs are cut."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval", exc_type=ImportError)
    models = pytest.importorskip("lm_eval.models.huggingface", exc_type=ImportError)
    transformers = pytest.importorskip("transformers")
    theirs = small_llama(transformers, tmp_path / "theirs")
    judge = models.HFLM(pretrained=theirs, tokenizer=str(tmp_path / "theirs"), device="cpu", dtype="float32",
                        batch_size=3, max_length=length, add_bos_token=bos)
    names = [name for name in ORACLE if not bos or name != "wikitext"]  # with --bos, theirs has two and predicts one
    tasks = [oracle_task(lm_eval, name, questions, tmp_path) for name in names]
    expected = lm_eval.simple_evaluate(model=judge, tasks=tasks, bootstrap_iters=2)["results"]

    weights_tool.main([str(tmp_path / "theirs"), f"--out={tmp_path / 'run'}"])
    found = evaluate("bench", f"--out_dir={tmp_path / 'run'}", "--dtype=float32", f"--source={questions}",
                     f"--length={length}", f"--bos={int(bos)}", f"--tasks={','.join(names)}")["tasks"]
    assert found["boolq"]["cut"]
    for name, measure in [(task, measure) for task in names for measure in bench.MEASURES[task]]:
        ours, theirs = found[name][measure], expected[f"our_{name}"]
        close(ours["value"], theirs[f"{measure},none"], dtype=torch.float32)
        if measure.startswith("acc"):
            close(ours["stderr"], theirs[f"{measure}_stderr,none"])


def small_llama(transformers, folder):
    """A random Llama whose predictions are not uniform, saved with a byte-pair tokenizer."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape) + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(folder)
    coder = byte_pairs()
    coder.post_processor = pytest.importorskip("tokenizers").processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)])           # for --bos
    write_tokenizer(folder, coder)
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|end|>",
                                         eos_token="<|end|>").save_pretrained(folder)
    return model
