"""The sample instrument: text that follows its seed and its prompt."""
import json

import pytest
from conftest import complain

import eval as eval_script


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


@pytest.mark.parametrize("flag", ["--tokens=0", "--samples=0", "--temperature=-1", "--top_k=-1", "--top_p=-1"])
def test_impossible_numbers_are_refused(flag, elastic_run, capsys):
    before = {path.name: path.read_bytes() for path in elastic_run.iterdir()}
    err = complain(eval_script.main, capsys, "sample", f"--out_dir={elastic_run}", flag)[1]
    assert flag.split("=")[0] in err
    assert {path.name: path.read_bytes() for path in elastic_run.iterdir()} == before
