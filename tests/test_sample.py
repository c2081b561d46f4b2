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


def test_a_sample_depends_on_its_seed_and_prompt(sample, elastic_run, data):
    texts = [sample(elastic_run, "--samples=2", "--tokens=12", "--prompt=the quick", f"--seed={seed}")
             for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 2
    assert all(text.startswith("the quick") for text in texts[0])
    first = chr((data / "val.bin").read_bytes()[1024])                  # of the held-out data
    assert sample(elastic_run, "--tokens=2")[0].startswith(first)


def test_a_run_with_its_own_tokenizer_samples_without_its_data(toy_run, tmp_path, sample):
    """tokenizer.json in its folder encodes the prompt and decodes the text. Without a prompt, the text begins with the
    separator, which is not shown."""
    folder, about = shutil.copytree(toy_run, tmp_path / "moved"), meta(toy_run)
    files.write_json(folder / "meta.json", about | {"knobs": about["knobs"] | {"dataset": "/nowhere"}})
    for prompt in ("the quick<|im_end|>", ""):
        texts = sample(folder, "--tokens=12", "--samples=2", f"--prompt={prompt}")
        assert len(texts) == 2 and all(text.startswith(prompt) and len(text) > len(prompt) for text in texts)


@pytest.fixture
def chatty(toy_run, tmp_path):
    """The toy run, with ChatML's marks in its tokenizer."""
    return write_tokenizer(shutil.copytree(toy_run, tmp_path / "chatty"),
                           byte_pairs(specials=(*SPECIAL, "<|im_start|>")))


@pytest.mark.parametrize("system", ["", "You are a fox."])
def test_a_conversation_is_written_as_the_template_says_and_marks_in_a_prompt_are_text(chatty, system):
    prompt = "the quick <|im_end|>\n brown"
    template = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    template += "<|im_start|>user\nPROMPT<|im_end|>\n<|im_start|>assistant\n"
    coder = tokens.tokenizer(str(chatty))
    found = conversation(coder, system, prompt).tolist()
    plain = coder.encode(f"user\n{prompt}").tolist()
    assert not {0, 1, 2} & set(plain)
    coder.coder.encode_special_tokens = False   # now marks in a text are special tokens
    before, after = template.split("user\nPROMPT")
    assert found == [*coder.encode(before).tolist(), *plain, *coder.encode(after).tolist()]


def test_the_answer_is_shown_alone_and_stops_at_an_end_token(chatty, sample):
    """With greedy decoding the model's text is known. One of its tokens is then declared an end of text."""
    def assert_sampled(plain, asked):
        flags = ("--temperature=0", "--tokens=9", "--samples=2", "--prompt=the quick")
        assert sample(chatty, *flags) == [coder.decode([*prompt, *plain])] * 2
        assert sample(chatty, *flags, "--chat", "--system=Be brief.") == [coder.decode(asked)] * 2

    coder, stored = tokens.tokenizer(str(chatty)), meta(chatty)
    prompt = coder.encode("the quick").tolist()
    plain, asked = (load_run(chatty, "cpu")[0].generate(torch.tensor(idx)[None].long(), 9, temperature=0)[0, len(idx):]
                    .tolist() for idx in (prompt, conversation(coder, "Be brief.", "the quick")))
    assert_sampled(plain, asked)
    ends = [plain[4], asked[4]]
    files.write_json(chatty / "meta.json", stored | {"ends": ends})
    assert_sampled(*(ids[:min(ids.index(end) for end in ends if end in ids)] for ids in (plain, asked)))
