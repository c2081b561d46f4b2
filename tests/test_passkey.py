"""eval.py passkey: prompts byte for byte, scores in float64."""

import math
import re
import statistics

import numpy as np
import pytest
import torch
from bounds import SEED, below, close
from hypothesis import given
from hypothesis import strategies as st

from common.machine import Machine
from data import tokens
from evals import likelihood, passkey
from evals.instrument import load_run
from evals.passkey import is_correct, make_trial, prompt_text

BYTES = tokens.tokenizer("bytes")


@given(st.integers(0, 400), st.floats(0, 1, exclude_max=True))
def test_a_prompt_is_that_of_the_paper_and_the_key_divides_its_garbage(characters, depth):
    """Appendix C prints the five blocks."""
    begins, before, needle, after, ends = prompt_text(12345, characters, depth).split("\n")
    assert [begins, needle, ends] == [
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.",
        "The pass key is 12345. Remember it. 12345 is the pass key.",
        "What is the pass key? The pass key is",
    ]
    sentences = "The grass is green. The sky is blue. The sun is yellow. Here we go. "
    whole = " ".join([f"{sentences}There and back again."] * 9)
    assert whole.startswith(before)
    assert whole.startswith(after)
    assert len(before + after) == characters
    assert len(before) == int(depth * (characters + 1))  # uniform in 0..characters


@pytest.mark.parametrize("name", ["bytes", "toy"])
def test_a_prompt_is_as_long_as_possible_with_room_for_the_answer(name, toy):
    coder = tokens.tokenizer(str(toy) if name == "toy" else name)
    for number in range(3):
        trial = make_trial(coder, 700, number)
        text = coder.decode(trial.prompt)
        characters = len("".join(text.split("\n")[1::2]))
        longer = coder.encode(prompt_text(trial.key, characters + 1, trial.depth))
        assert len(trial.prompt) <= 690 < len(longer)
        assert text == prompt_text(trial.key, characters, trial.depth)
        assert coder.decode(trial.prompt + trial.right) == f"{text} {trial.key}"
        wrong = coder.decode(trial.prompt + trial.wrong).removeprefix(text)
        assert re.fullmatch(r" \d+", wrong)
        assert len(trial.wrong) == len(trial.right)
        assert trial.wrong != trial.right


def test_trials_depend_only_on_number_length_and_seed_and_are_spread_evenly():
    trials = [make_trial(BYTES, 300, number, SEED) for number in range(200)]
    others = [make_trial(BYTES, *args) for args in ((301, 7, SEED), (300, 7, SEED + 1))]
    assert trials[7] == make_trial(BYTES, 300, 7, SEED)
    assert trials[7].key not in [trial.key for trial in others]
    for values, most in (([t.key for t in trials], 50_000), ([t.depth for t in trials], 1)):
        counts = np.histogram(values, 5, (0, most))[0]  # up to six standard errors
        below(torch.tensor(counts - 40).abs(), 6 * (200 * 0.2 * 0.8) ** 0.5)


def test_an_answer_is_right_as_text_or_as_a_number():
    assert all(is_correct(text, 123) for text in ("123\n", " 0123. Remember it", "key 123, 45"))
    assert not any(is_correct(text, 123) for text in ("1234", "45, 123", "none"))


def test_scores_are_those_of_the_answers_one_by_one(elastic_run, monkeypatch):
    """test_bench.py has the likelihoods of answers."""
    gpt, machine = load_run(elastic_run, "cpu")[0].double(), Machine("cpu", "float32")
    heard, said = [], []
    monkeypatch.setattr(
        passkey, "is_correct", lambda text, key: heard.append((key, text)) or key % 2 == 0
    )
    trials = [make_trial(BYTES, 330, number) for number in range(6)]
    found = passkey.scores_of(gpt, machine, BYTES, trials, 4)
    for trial, scores in zip(trials, found, strict=True):
        # ten tokens, greedily
        (ids,) = likelihood.generated(gpt, machine, [trial.prompt], 1, 10, temperature=0)
        said.append((trial.key, BYTES.decode(ids)))
        right, wrong = (
            likelihood.answers(gpt, machine, [(trial.prompt + ids, len(ids))], 1)[0].loglik
            for ids in (trial.right, trial.wrong)
        )
        assert scores["correct"] == (trial.key % 2 == 0)
        close(
            [scores["log_likelihood"], scores["gain"]],
            [right, right - wrong],
            terms=16,
            size=-right,
            dtype=torch.float32,
        )
    assert sorted(heard) == sorted(said)


@given(
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(-3, 3)), min_size=1, max_size=9
    )
)
def test_a_summary_has_means_and_errors_of_all_trials_and_of_each_fifth_of_the_text(rows):
    found = passkey.summary(
        500, [(depth, dict.fromkeys(passkey.SCORES, value)) for depth, value in rows]
    )
    parts = [[value for depth, value in rows if i <= 5 * depth < i + 1] for i in range(5)]
    parts.insert(0, [value for _, value in rows])
    for group, part in zip([found, *found["by_depth"]], parts, strict=True):
        error = statistics.stdev(part) / math.sqrt(len(part)) if part[1:] else None
        close(
            [group[name] for name in ("trials", "gain", "gain_error")],
            [len(part), statistics.mean(part) if part else None, error],
            size=3.0,
        )
