"""eval.py sample: text that depends on the seed and the prompt."""

import shutil

import pytest
import torch
from conftest import meta

from common import files
from data import tokens
from evals.instrument import load_run


@pytest.fixture
def sample(evaluate):
    return lambda folder, *flags: evaluate("sample", f"--out_dir={folder}", *flags)["samples"]


def test_a_sample_depends_on_its_seed_and_prompt(sample, elastic_run, data):
    def text(seed):
        return sample(elastic_run, "--tokens=12", "--prompt=the quick", f"--seed={seed}")[0]

    assert text(1) == text(1) != text(2) and text(1).startswith("the quick")
    first = chr((data / "val.bin").read_bytes()[1024])  # of the held-out data
    assert sample(elastic_run, "--tokens=2")[0].startswith(first)


def test_a_text_stops_at_an_end_token_and_marks_in_a_prompt_are_text(toy_run, tmp_path, sample):
    """The run's data is gone. With greedy decoding the model's text is known, and one of its tokens
    is declared an end of text. Without a prompt, the text begins with the separator, which is not
    shown."""
    folder = shutil.copytree(toy_run, tmp_path / "ending")
    coder = tokens.tokenizer(str(folder))
    stored = meta(folder)
    prompt = coder.encode("the <|im_end|>\n").tolist()
    assert not {0, 1} & {*prompt}
    text = load_run(folder, "cpu")[0].generate(torch.tensor([prompt]), 9, temperature=0)[0].tolist()
    end = text.index(text[-5], len(prompt))
    stored["knobs"]["dataset"] = "/nowhere"
    for ends, shown in ([], text), ([text[end]], text[:end]):
        files.write_json(folder / "meta.json", stored | {"ends": ends})
        greedy = "--temperature=0", "--tokens=9", "--samples=2"
        found = sample(folder, *greedy, "--prompt=the <|im_end|>\n")
        assert found == [coder.decode(shown)] * 2
    (text,) = sample(folder, "--tokens=12", "--prompt=")
    assert text and "<|end|>" not in text
