"""eval.py sample: text that depends on the seed and the prompt."""
import shutil

import pytest
import torch
from conftest import SPECIAL, byte_pairs, meta, write_tokenizer

from common import files
from data import tokens
from evals.instrument import load_run
from evals.sample import conversation


@pytest.fixture
def sample(evaluate):
    return lambda folder, *flags: evaluate("sample", f"--out_dir={folder}", *flags)["samples"]


def test_a_sample_depends_on_its_seed_and_prompt(sample, elastic_run, data, evaluate):
    texts = [sample(elastic_run, "--tokens=12", "--prompt=the quick", f"--seed={seed}")[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("the quick")
    first = chr((data / "val.bin").read_bytes()[1024])                  # of the held-out data
    assert sample(elastic_run, "--tokens=2")[0].startswith(first)
    speed = evaluate("sample", f"--out_dir={elastic_run}", "--tokens=2", "--prompt=fox")["tokens_per_s"]
    assert speed.keys() == {"prompt", "new"} and min(speed.values()) > 0


def test_a_run_with_its_own_tokenizer_samples_without_its_data(toy_run, tmp_path, sample):
    """Without a prompt, the text begins with the separator, which is not shown."""
    folder, about = shutil.copytree(toy_run, tmp_path / "moved"), meta(toy_run)
    files.write_json(folder / "meta.json", about | {"knobs": about["knobs"] | {"dataset": "/nowhere"}})
    for prompt in ("the quick<|im_end|>", ""):
        text, = sample(folder, "--tokens=12", f"--prompt={prompt}")
        assert text.startswith(prompt) and len(text) > len(prompt)


def test_an_answer_is_shown_alone_and_stops_at_an_end_token(toy_run, tmp_path, sample):
    """The prompt follows ChatML's template, and marks in it are text. With greedy decoding the model's text is known.
    One of its tokens is then declared an end of text."""
    shutil.copytree(toy_run, tmp_path / "chatty")
    chatty = write_tokenizer(tmp_path / "chatty", byte_pairs(specials=(*SPECIAL, "<|im_start|>")))
    coder, marks = tokens.tokenizer(str(chatty)), tokens.tokenizer(str(chatty))
    marks.coder.encode_special_tokens = False   # with this one, marks in a text are special tokens
    text = coder.encode("user\nthe <|im_end|>\n")
    assert not {0, 1, 2} & {*text.tolist()}
    asked = [*marks.encode("<|im_start|>"), *text, *marks.encode("<|im_end|>\n<|im_start|>assistant\n")]
    assert conversation(coder, "", "the <|im_end|>\n").tolist() == asked
    asked = [*marks.encode("<|im_start|>system\nBe brief.<|im_end|>\n"), *asked]
    gpt, stored, prompt = load_run(chatty, "cpu")[0], meta(chatty), coder.encode("the <|im_end|>\n").tolist()
    plain, answer = (gpt.generate(torch.tensor([[*map(int, idx)]]), 9, temperature=0)[0, len(idx):].tolist()
                     for idx in (prompt, asked))
    flags = ("--temperature=0", "--tokens=9", "--samples=2", "--prompt=the <|im_end|>\n")
    for ends in ([], [plain[4], answer[4]]):
        files.write_json(chatty / "meta.json", stored | {"ends": ends})
        plain, answer = (ids[:min((ids.index(i) for i in ends if i in ids), default=9)] for ids in (plain, answer))
        assert sample(chatty, *flags) == [coder.decode([*prompt, *plain])] * 2
        assert sample(chatty, *flags, "--chat", "--system=Be brief.") == [coder.decode(answer)] * 2
