"""eval.py bench: requests, a model's answers in batches of any size, scores of known answers, and the scores of
lm-evaluation-harness as an oracle."""
import json
import math

import bounds
import numpy as np
import pytest
import torch
from bounds import close
from conftest import (CACHES, assert_says, byte_pairs, run, tiny_config, write_tokenizer)
from test_benchmarks import PUBLIC, WIKI, write_rows

import eval as eval_script
from attention import ATTENTIONS
from common.machine import Machine
from data import benchmarks, coders, tokens
from data import weights as weights_tool
from evals import bench, likelihood
from evals.likelihood import Answer, Request, Unit
from evals.instrument import load_run, mean_and_error
from model import GPT

BYTES = coders.Bytes()

# ----------------------------------------------------------------------------------------------- from text to requests


def test_a_row_becomes_a_request_for_each_choice():
    row = benchmarks.Row(["ab", "abc "], ["x", "yz"], 0)
    first, second = likelihood.row_requests(row, BYTES, 99, bos=False)
    assert first == Request(list(b"ab x"), 2) and second == Request(list(b"abc  yz"), 4)
    first, second = likelihood.row_requests(row, BYTES, 99, bos=True)
    assert first == Request([256, *b"ab x"], 2)
    empty, = likelihood.row_requests(benchmarks.Row([""], ["x"], 0), BYTES, 99, bos=False)
    assert empty == Request([256, *b" x"], 2)   # a prediction needs a token before it


def test_context_and_choice_are_encoded_together(toy):
    """The context has the tokens of its text alone. The choice has the remaining tokens of the whole text."""
    coder = tokens.tokenizer(str(toy))
    before, after = likelihood.pair(coder, "the quick", " brown")
    assert before == coder.encode("the quick").tolist() and before + after == coder.encode("the quick brown").tolist()
    joined = likelihood.pair(coder, "the qu", "ick")
    assert joined[0] == coder.encode("the qu").tolist()
    assert joined[1] == coder.encode("the quick").tolist()[len(joined[0]):]
    assert likelihood.pair(coder, "the  ", "x")[1] == coder.encode("the  x").tolist()[len(coder.encode("the")):]


def test_long_requests_are_cut_at_the_beginning():
    assert likelihood.request([1, 2, 3], [4, 5], 4) == Request([1, 2, 3, 4, 5], 2, cut=False)        # 4 inputs
    assert likelihood.request([1, 2, 3], [4, 5], 3) == Request([2, 3, 4, 5], 2, cut=True)
    assert likelihood.request([1, 2, 3], [4, 5], 2) == Request([3, 4, 5], 2, cut=True)
    with pytest.raises(ValueError, match="a choice has 2 tokens where the model can predict 1 to 1"):
        likelihood.request([1, 2, 3], [4, 5], 1)


@pytest.mark.parametrize("text, windows", [
    ("a", [([256, 97], 1)]),
    ("abc", [([256, 97, 98, 99], 3)]),
    ("abcd", [([256, 97, 98, 99], 3), ([97, 98, 99, 100], 1)]),
    ("abcdef", [([256, 97, 98, 99], 3), ([99, 100, 101, 102], 3)]),
    ("abcdefg", [([256, 97, 98, 99], 3), ([99, 100, 101, 102], 3), ([100, 101, 102, 103], 1)])])
def test_every_token_of_a_page_is_predicted_once(text, windows):
    assert likelihood.page_requests(benchmarks.Page(text, 1, 1), BYTES, 3, False) == [Request(*w) for w in windows]


@pytest.mark.parametrize("count, limit, chosen", [(5, 0, [0, 1, 2, 3, 4]), (5, 3, [0, 2, 4]), (3, 9, [0, 1, 2]),
                                                  (7, 1, [0])])
def test_a_limit_is_spread_over_the_file(count, limit, chosen):
    assert list(bench.evenly(count, limit)) == chosen


# --------------------------------------------------------------------------------------------- from requests to answers


def test_a_shared_beginning_is_read_once():
    shared = [Request([1, 2, 3, 4, 5], 1), Request([1, 2, 3, 9], 1), Request([1, 2, 3, 4, 7, 8], 3)]
    assert likelihood.in_common(shared) == 2    # token 3 predicts the first scored token of the other two
    assert likelihood.in_common(shared[:1]) == 0 and likelihood.in_common([Request([1, 2], 1), Request([1, 3], 1)]) == 0
    groups = [shared, [Request([1, 2], 1), Request([3, 4], 1)]]
    apart = [Unit([groups[1][0]], 0, 3), Unit([groups[1][1]], 0, 4)]
    assert likelihood.units_of(groups, cached=True) == [Unit(shared, 2, 0), *apart]
    assert [unit.shared for unit in likelihood.units_of(groups, cached=False)] == [0] * 5


def test_batches_hold_requests_of_one_kind_up_to_a_size():
    sizes = [(0, 5), (3, 4), (3, 9), (0, 7), (3, 4)]
    units = [Unit([Request([0] * (shared + n + 1), 1)] * 2, shared, 0) for shared, n in sizes]
    def shapes(size):
        return [[(unit.shared, unit.longest) for unit in batch] for batch in likelihood.batches(units, size)]
    assert shapes(1000) == [[(3, 9), (3, 4), (3, 4)], [(0, 7), (0, 5)]]
    assert shapes(42) == [[(3, 9), (3, 4)], [(3, 4)], [(0, 7), (0, 5)]]         # 2 * 3 + 4 * 9 tokens, with padding
    assert shapes(1) == [[(3, 9)], [(3, 4)], [(3, 4)], [(0, 7)], [(0, 5)]]


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


def one_by_one(model, groups):
    """The same answers from the full logits in float64, one request at a time."""
    for request in (request for group in groups for request in group):
        with torch.no_grad():
            logits = model(torch.tensor([request.ids[:-1]]))[0][0, -request.count:].double()
        wanted = torch.tensor(request.ids[-request.count:])
        yield Answer(torch.log_softmax(logits, -1)[range(request.count), wanted].sum().item(),
                     bool((logits.argmax(-1) == wanted).all()))


@pytest.mark.parametrize("recipe", CACHES)
def test_shared_padded_and_batched_requests_are_answered_as_one_by_one(recipe):
    """The model is float64, so that rounding does not decide between two likely tokens."""
    window = {"window": 4} if "window" in ATTENTIONS[recipe] else {}
    model = GPT(tiny_config(attn=recipe, n_layer=2, **window)).double().eval()
    with torch.no_grad():
        for p in model.parameters():            # less flat logits than at initialisation
            p.add_(0.2 * torch.randn_like(p))
    groups = some_groups()
    greedy, logliks = zip(*((answer.greedy, answer.loglik) for answer in one_by_one(model, groups)), strict=True)
    for batch_size in (10 ** 6, 1):
        found = said(model, groups, batch_size)
        assert tuple(answer.greedy for answer in found) == greedy
        close([answer.loglik for answer in found], logliks, dtype=torch.float32)


def test_requests_to_a_model_that_sees_later_tokens_are_neither_padded_nor_shared(monkeypatch):
    model = GPT(tiny_config()).eval()
    seen = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda idx, cache=None: seen.append((idx.shape, cache)) or forward(idx))
    monkeypatch.setattr(type(model.transformer.h[0].attn), "causal", False)
    monkeypatch.setattr(type(model.transformer.h[0].attn), "cached", False)
    groups = some_groups()
    said(model, groups)
    lengths = sorted((len(request.ids) - 1 for group in groups for request in group), reverse=True)
    assert seen == [((1, n), None) for n in lengths]


def test_lm_head_is_restored_and_scores_that_are_not_finite_are_refused():
    model = GPT(tiny_config()).eval()
    head = model.lm_head
    said(model, some_groups())
    assert model.lm_head is head
    model.transformer.wte.weight.data[:] = math.nan
    with pytest.raises(ValueError, match="x: the model's log-likelihoods are not finite"):
        said(model, some_groups())


# ----------------------------------------------------------------------------------------------- from answers to scores


def answers(*logliks):
    return [[Answer(value, False) for value in choices] for choices in logliks]


def test_accuracy_takes_the_first_of_equal_choices_and_acc_norm_counts_characters():
    rows = [benchmarks.Row(["c"] * 2, choices, gold) for choices, gold in
            ((["aa", "aaaaaaaa"], 1), (["a", "b"], 0), (["a", "b"], 1), (["é", "ab"], 0))]
    found = bench.judge("piqa", rows, answers((-3, -4), (-1, -1), (-1, -1), (-2, -3)), 0.5)
    # row 1 is right only per character; the first of equal choices wins; a character of two bytes counts once
    assert found["acc"]["value"] == 0.5 and found["acc_norm"]["value"] == 0.5
    deviation = math.sqrt(sum((x - 0.5) ** 2 for x in (0, 1, 0, 1)) / 3)
    close(found["acc"]["stderr"], deviation / math.sqrt(4))
    assert found["n"] == 4
    assert found["acc"]["adjusted"] == 0 and found["acc"]["than_guessing"] == "no better"


def test_lambada_is_scored_per_word():
    rows = [benchmarks.Row(["c"], ["word"], 0)] * 3
    heard = [[Answer(-1.0, True)], [Answer(-2.0, False)], [Answer(-6.0, False)]]
    found = bench.judge("lambada", rows, heard, 0.0)
    error = math.sqrt((4 + 1 + 9) / 2) / math.sqrt(3)
    close([found["acc"]["value"], found["acc"]["adjusted"]], [1 / 3, 1 / 3])
    close([found["perplexity"][part] for part in ("value", "stderr")], [math.e ** 3, math.e ** 3 * error])
    assert found["acc"]["than_guessing"] is None
    assert "adjusted" not in found["perplexity"] and found["perplexity"]["rows"] == "1 2 6"
    other = bench.judge("lambada", rows, [[Answer(-2.0, True)], [Answer(-3.0, False)], [Answer(-7.0, False)]], 0.0)
    assert bench.difference(other["perplexity"], found["perplexity"]) == (1.0, 0.0)         # 1 nat is a factor of e
    assert bench.beside(other["perplexity"], found["perplexity"])[2] == "higher"


def test_wikitext_is_scored_per_word_and_per_byte():
    pages = [benchmarks.Page("", 10, 40), benchmarks.Page("", 30, 160)]
    found = bench.judge("wikitext", pages, answers((-20, -10), (-70,)), None)
    close([found[name]["value"] for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
          [math.exp(100 / 40), math.exp(100 / 200), 0.5 / math.log(2)])
    close(mean_and_error(bench.per_row([30, 70], [10, 30])), (2.5, math.sqrt((5 ** 2 + 5 ** 2) / 2) / 20))
    assert bench.judge("wikitext", pages[:1], answers((-20,)), None)["bits_per_byte"]["stderr"] is None


@pytest.mark.parametrize("value, guess, n, says", [
    (0.5, 0.5, 10, "no better"), (0.64, 0.5, 50, "no better"), (0.65, 0.5, 50, "better"), (0.35, 0.5, 50, "worse"),
    (1.0, 0.5, 3, "no better"), (0.02, 0.0, 50, None)])
def test_a_score_within_the_sampling_error_of_guessing_is_no_better(value, guess, n, says):
    assert bench.than_guessing(value, guess, n) == says


def test_chance_is_the_accuracy_of_the_best_guess():
    two, three = (benchmarks.Row(["c"] * n, ["a"] * n, n - 1) for n in (2, 3))
    close(bench.chance("arc_easy", [two, three]), (1 / 2 + 1 / 3) / 2)
    assert bench.chance("boolq", [two._replace(gold=0)] * 3 + [two]) == 0.75
    assert bench.chance("lambada", []) == 0 and bench.chance("wikitext", []) is None
    same_answer = bench.judge("boolq", [two] * 2, answers((-1, -2), (-2, -1)), bench.chance("boolq", [two] * 2))
    assert same_answer["acc"]["adjusted"] <= 0                          # guessing is always right


def test_averages_weigh_all_tasks_equally():
    def task(value, error):
        score = {"value": value, "stderr": error, "adjusted": value - 0.1}
        return {"acc": score, "acc_norm": score}
    tasks = {name: task(0.1 * i, 0.01) for i, name in enumerate(bench.EIGHT)} | {"wikitext": {"bits_per_byte": {}}}
    average = bench.averages(tasks)["average"]
    assert average["tasks"] == 8
    close([average[part] for part in ("value", "stderr", "adjusted")], [0.35, 0.01 / math.sqrt(8), 0.25])
    found = bench.averages(tasks | {"openbookqa": task(0.8, None)})
    assert found["average"]["tasks"] == 9 and found["average"]["stderr"] is None
    close(found["average of eight"]["value"], 0.35)
    assert bench.averages({"piqa": task(1, 0)}) == {}


def task_of(*hits):
    return {"tasks": {"piqa": bench.judge("piqa", [benchmarks.Row(["c"] * 2, ["a", "b"], 0)] * len(hits), answers(
        *((0, -1) if hit else (-1, 0) for hit in hits)), 0.5) | {"cut": 0}}, "averages": {}}


def test_runs_are_compared_with_the_first_run_row_by_row():
    """The error is that of the rows' differences. One of 8 rows differs, so the mean and its error are both 1/8."""
    first, other = task_of(1, 1, 1, 1, 0, 0, 0, 0), task_of(1, 1, 1, 1, 1, 0, 0, 0)
    one, two = (numbers["tasks"]["piqa"]["acc"] for numbers in (first, other))
    assert one["rows"] == "1 1 1 1 0 0 0 0"
    close(bench.difference(two, one), (1 / 8, 1 / 8))
    assert bench.beside(one, one) == [0, 0, "cannot be told apart"]
    text = bench.tell(bench.Bench(), {"out/a": first, "out/b": other, "out/c": task_of(*[1] * 8)})
    lines = [line.split() for line in text.splitlines()[1:4]]
    assert lines[0][2:4] == ["out/a", "0.5000"] and lines[0][-3:] == ["-"] * 3
    assert lines[1][-6:] == ["0.1250", "0.1250", *"cannot be told apart".split()]
    assert lines[2][-1] == "higher" and lines[2][-3] == "0.5000"
    assert text.count("standard error of that difference") == 1


# ------------------------------------------------------------------------------------------- the command and its table


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    """A folder with one file for each task. The rows have the form of the public files."""
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, row in PUBLIC.items():
        write_rows(folder, name, row, *varied(name, row))
    (folder / "wiki.test.raw").write_text(WIKI)
    return folder


def varied(name, row):
    """Two variants of a row: one with another right answer, one with a longer question."""
    key = {"arc_easy": "answerKey", "arc_challenge": "answerKey", "openbookqa": "answerKey", "winogrande": "answer"}
    first = {"arc_easy": "B", "arc_challenge": "1", "openbookqa": "A", "siqa": "1", "winogrande": "1", "boolq": False}
    long = {"hellaswag": "ctx_a", "piqa": "goal", "siqa": "context", "boolq": "passage", "lambada": "text",
            "winogrande": "sentence"}
    if name != "lambada":
        yield row | {key.get(name, "label"): first.get(name, 1)}
    if name in long:
        yield row | {long[name]: "A rather longer beginning, with 7 words. " + row[long[name]]}


@pytest.fixture
def scored(elastic_run, questions, evaluate):
    return lambda *flags: evaluate("bench", f"--out_dir={elastic_run}", f"--source={questions}", *flags)


def test_a_run_is_scored_on_every_task(scored):
    found = scored("--length=200")
    assert list(found["tasks"]) == list(benchmarks.TASKS) and found["length"] == 200 and not found["bos"]
    for name, task in found["tasks"].items():
        assert set(bench.MEASURES[name]) < set(task) and task["cut"] == 0
    assert set(found["averages"]) == {"average", "average of eight"} and found["averages"]["average"]["tasks"] == 9
    # an untrained model needs about 8 bits a byte
    assert 6 < found["tasks"]["wikitext"]["bits_per_byte"]["value"] < 9
    again = scored("--length=200", "--bos", "--batch_size=1", "--tasks=piqa,wikitext")
    assert list(again["tasks"]) == ["piqa", "wikitext"]
    for measure in bench.MEASURES["wikitext"]:  # pages begin with the separator even without --bos
        one, two = (numbers["tasks"]["wikitext"][measure] for numbers in (again, found))
        close([one["value"], one["stderr"]], [two["value"], two["stderr"]], dtype=torch.float32)


def test_the_table_shows_scores_and_cut_rows(elastic_run, questions, capsys):
    eval_script.main(["bench", f"--out_dir={elastic_run}", "--device=cpu", f"--source={questions}", "--length=50",
                      "--tasks=boolq,piqa,lambada", "--limit=2"])
    done = capsys.readouterr()
    assert done.err == ""
    assert_says(r"task +measure +score +\+- +n +chance +adjusted +than guessing\n *boolq +acc ", done.out)
    assert_says("piqa +acc_norm .*\nlambada +acc .*\nlambada +perplexity .* 2 .*\naverage +3 tasks", done.out)
    assert_says("longer than 50 tokens, and cut at the beginning: rows 1 of boolq, 1 of piqa, 1 of lambada", done.out)


def test_one_and_several_runs_are_drawn(scored, tmp_path):
    found, less = scored("--length=200"), scored("--length=200", "--tasks=piqa,wikitext")
    bench.draw(tmp_path / "one.png", {"one": found})
    bench.draw(tmp_path / "three.png", {"one": found, "less": less, "again": found})
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("one", "three"))


@pytest.mark.exhaustive
def test_two_ranks_give_the_scores_of_one_process(scored, elastic_run, questions):
    flags = ("--length=200", "--tasks=piqa,lambada")
    done = run("eval.py", "bench", f"--out_dir={elastic_run}", "--device=cpu", f"--source={questions}", "--json",
               *flags, ranks=2)
    ranks, alone = (found["tasks"]["lambada"]["perplexity"]["value"]
                    for found in (json.loads(done.stdout), scored(*flags)))
    close(ranks, alone, dtype=torch.float32)


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


def test_a_run_is_scored_with_its_own_tokenizer(toy_run, questions, evaluate):
    """Each page begins with the separator of this tokenizer."""
    found = evaluate("bench", f"--out_dir={toy_run}", f"--source={questions}", "--length=100",
                     "--tasks=lambada,wikitext")["tasks"]
    model, _ = load_run(toy_run, "cpu")
    coder = tokens.tokenizer(str(toy_run))
    losses = []
    for page in benchmarks.pages(WIKI):
        ids = torch.tensor([[coder.separator, *coder.encode(page.text).tolist()]])
        with torch.no_grad():
            losses.append(model(ids[:, :-1], ids[:, 1:])[1].item() * (ids.shape[1] - 1))
    assert ids.shape[1] < 100
    nats = sum(losses) / sum(page.words for page in benchmarks.pages(WIKI))
    close(math.log(found["wikitext"]["word_perplexity"]["value"]), nats, dtype=torch.float32)
