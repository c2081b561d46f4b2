"""The sample instrument: text that follows its seed and its prompt."""
import json
import shutil

import pytest
from conftest import complain, meta

import eval as eval_script
from data import files


@pytest.fixture
def sample(elastic_run, capsys):
    def call(*flags):
        eval_script.main(["sample", f"--out_dir={elastic_run}", "--json", "--device=cpu", "--tokens=12", *flags])
        return json.loads(capsys.readouterr().out)["samples"]
    return call


def test_it_follows_its_seed_and_prompt(sample):
    texts = [sample("--samples=2", "--prompt=the quick", f"--seed={seed}") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 2
    assert all(text.startswith("the quick") for text in texts[0])
    greedy = [sample("--temperature=0", f"--seed={seed}") for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_without_a_prompt_it_begins_as_the_held_out_data_does(sample, data):
    first = chr((data / "val.bin").read_bytes()[1024])
    assert sample()[0].startswith(first)


def test_a_run_with_a_tokenizer_of_its_own_needs_no_data_to_speak(toy_run, tmp_path, capsys):
    """Its prompt goes in and its text comes out by the tokenizer.json in its folder; without a prompt it begins with
    the separator, which is not shown."""
    folder = shutil.copytree(toy_run, tmp_path / "moved")
    stored = meta(folder)
    stored["knobs"]["dataset"] = "/nowhere"
    files.write_json(folder / "meta.json", stored)
    for prompt in ("the quick<|im_end|>", ""):
        eval_script.main(["sample", f"--out_dir={folder}", "--json", "--device=cpu", "--tokens=12", "--samples=2",
                          f"--prompt={prompt}"])
        texts = json.loads(capsys.readouterr().out)["samples"]
        assert len(texts) == 2 and all(text.startswith(prompt) and len(text) > len(prompt) for text in texts)


@pytest.mark.parametrize("flag", ["--tokens=0", "--samples=0", "--temperature=-1", "--top_k=-1", "--top_p=-1"])
def test_impossible_numbers_are_refused(flag, elastic_run, capsys):
    before = {path.name: path.read_bytes() for path in elastic_run.iterdir()}
    err = complain(eval_script.main, capsys, "sample", f"--out_dir={elastic_run}", flag)[1]
    assert flag.split("=")[0] in err
    assert {path.name: path.read_bytes() for path in elastic_run.iterdir()} == before
