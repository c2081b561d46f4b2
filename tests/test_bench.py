"""eval.py bench: requests in batches of any size, scores of local tasks, computed one by one."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounds import SEED, close
from conftest import TEXT, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from common import files
from common.machine import Machine
from data import tokens
from evals import bench as bench_module
from evals import likelihood
from evals.bench import value_zero
from evals.instrument import load_run
from model import GPT

IDS = st.lists(st.integers(0, 30), min_size=2, max_size=9)
REQUESTS = st.lists(IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.integers(1, len(ids) - 1))))
LENGTH = 40  # tokens of the longest input of a task


@pytest.mark.parametrize("recipe", ["softmax", "sink_token"])
@given(REQUESTS, st.integers(1, 30))
@torch.no_grad()
def test_requests_in_batches_are_answered_as_one_by_one(recipe, requests, batch_size):
    torch.manual_seed(SEED)
    model = GPT(tiny_config(attn=recipe)).double().eval()
    for p in model.parameters():  # less flat logits than at initialisation
        p.add_(0.2 * torch.randn_like(p))
    found = likelihood.batches([ids for ids, _ in requests], batch_size)
    for batch in found:
        lengths = {len(requests[number][0]) for number in batch}
        assert len(lengths) == 1 and (len(batch) == 1 or len(batch) * max(lengths) <= batch_size)
    assert sorted(sum(found, [])) == [*range(len(requests))]
    heard = likelihood.answers(model, Machine("cpu", "float32"), requests, batch_size)
    for (ids, count), answer in zip(requests, heard, strict=True):
        logits, wanted = model(torch.tensor([ids[:-1]]))[0][0, -count:], torch.tensor(ids[-count:])
        own = logits.gather(1, wanted[:, None])
        loglik = (own[:, 0] - logits.logsumexp(1)).sum()
        assert answer.greedy == (logits <= own).all()
        close(answer.loglik, loglik.item(), dtype=torch.float32)


@pytest.fixture(scope="module")
def lively(tmp_path_factory, toy_run):
    """toy_run with larger weights, so that the context matters."""
    place = shutil.copytree(toy_run, tmp_path_factory.mktemp("bench") / "lively")
    weights = torch.load(place / "ckpt.pt", weights_only=True)
    for value in weights["model"].values():
        value.mul_(6.0 if value.dim() > 1 else 1.0)
    torch.save(weights, place / "ckpt.pt")
    return place


@pytest.fixture
def bench(lively, tmp_path, evaluate):
    """Score rows as a task of the harness: bench(rows, measures, key=value of its YAML file)."""
    pytest.importorskip("lm_eval", reason="needs the package lm-eval")

    def scores(rows, measures, **config):
        files.write_json(tmp_path / "rows.json", rows)
        source = {"data_files": {"test": str(tmp_path / "rows.json")}, "cache_dir": str(tmp_path)}
        files.write_json(
            tmp_path / "task.yaml",
            config
            | {  # JSON is YAML
                "task": "t",
                "dataset_path": "json",
                "dataset_kwargs": source,
                "test_split": "test",
                "metric_list": [{"metric": name, "higher_is_better": True} for name in measures],
            },
        )
        found = evaluate(
            "bench",
            f"--out_dir={lively}",
            f"--include_path={tmp_path}",
            "--tasks=t",
            f"--length={LENGTH}",
            "--batch_size=99",
        )
        assert found["questions"] == {"t": len(rows)} and found["zero_above"] == 1
        return [found[f"t {name}"] for name in measures]

    return scores


def test_heads_above_a_threshold_read_0_and_only_if_the_first_token_is_the_sink(monkeypatch):
    notes = []
    for attn in "sink_token", "kv_bias":
        run = SimpleNamespace(model=GPT(tiny_config(attn=attn)), note=notes.append)
        value_zero(run, 0)
        with pytest.raises(ValueError, match="give --zero_above=0"):
            value_zero(run, 0.5)
    assert notes == ["the first value is 0 in 2 of 2 heads"] * 2
    run = SimpleNamespace(model=GPT(tiny_config()), window=lambda _: 9, split=None, machine=None)
    run.note, run.split = notes.append, lambda _: None
    layers = [{"alpha_sink": [0.2, 0.6]}]
    monkeypatch.setattr(bench_module, "probe", lambda *_, **__: {"layers": layers})
    seen = []
    monkeypatch.setattr(bench_module, "value_zeroed", lambda chosen, **_: seen.append(chosen))
    value_zero(run, 0.5)
    assert seen[0].tolist() == [[False, True]]


def words(least, most):
    """A text of at least `least` words, and fewer than `most`."""
    return " ".join(np.random.choice(TEXT.split(), np.random.randint(least, most)))


def loglik(gpt, before, after):
    """The log-likelihood of the ids `after` after `before`, of which the last that fit are read."""
    request = (before + after)[-LENGTH - 1 :], len(after)
    return likelihood.answers(gpt, Machine("cpu", "float32"), [request], 1)[0].loglik


def test_continuations_and_texts_longer_than_a_window_have_their_log_likelihoods(bench, lively):
    """A long context loses its beginning. A long text is scored once, in windows."""
    gpt, coder = load_run(lively, "cpu")[0], tokens.tokenizer(str(lively))
    rows, sums = [{"q": words(1, 30), "a": words(1, 5)} for _ in range(9)], []
    for row in rows:
        before, both = (
            coder.encode(text).tolist() for text in (row["q"], f"{row['q']} {row['a']}")
        )
        sums.append(loglik(gpt, before, both[len(before) :]))
    found = bench(
        rows,
        ["perplexity"],
        output_type="loglikelihood",
        doc_to_text="{{q}}",
        doc_to_target="{{' ' + a}}",
    )
    close([math.log(found[0])], [-np.mean(sums)], dtype=torch.float32)

    text, total = words(60, 61), 0.0
    ids = [coder.separator, *coder.encode(text).tolist()]
    ends = [*range(LENGTH, len(ids) - 1, LENGTH), len(ids) - 1]  # the last ids of the windows
    for start, end in zip([0, *ends], ends, strict=False):
        total += loglik(gpt, ids[: start + 1], ids[start + 1 : end + 1])
    found = bench(
        [{"text": text}],
        ["bits_per_byte"],
        doc_to_text="",
        output_type="loglikelihood_rolling",
        doc_to_target="{{text}}",
    )
    close(found, [-total / len(text) / math.log(2)], dtype=torch.float32)


def test_an_answer_is_the_models_own_up_to_a_stop_string(bench, lively):
    gpt, coder = load_run(lively, "cpu")[0], tokens.tokenizer(str(lively))
    rows = [{"q": words(1, 40)} for _ in range(6)]
    for row in rows:
        idx = torch.tensor([coder.encode(row["q"]).tolist()[9 - LENGTH :]])
        ids = gpt.generate(idx, 9, temperature=0, use_cache=False)[0, idx.shape[1] :]
        row["a"] = coder.decode(ids.tolist())
    stop = rows[0]["a"][3:5]
    for number, row in enumerate(rows):
        row["a"] = "another answer" if number % 3 == 1 else row["a"].partition(stop)[0]
    found = bench(
        rows,
        ["exact_match"],
        output_type="generate_until",
        doc_to_text="{{q}}",
        doc_to_target="{{a}}",
        generation_kwargs={"until": [stop], "max_gen_toks": 9},
    )
    close(found, [4 / 6])
