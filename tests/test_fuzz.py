"""tests/fuzz.py: wrong flags and damaged files work or end in one line. `python tests/fuzz.py` tries many more."""
import pickle
import random
import shutil

import bounds
import fuzz
import pytest
from conftest import by_default

# one worker makes the runs and data sets that are damaged
pytestmark = pytest.mark.xdist_group("fuzz")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return fuzz.Places(tmp_path_factory.mktemp("places"))


@pytest.mark.parametrize("rounds", [by_default(True, range(4)), by_default(False, range(4, 70))], ids=["few", "many"])
@pytest.mark.parametrize("kind", range(len(fuzz.KINDS)), ids=[kind.__name__ for kind in fuzz.KINDS])
def test_wrong_inputs_work_or_end_in_one_line(kind, rounds, places):
    for number in rounds:
        number = kind + number * len(fuzz.KINDS)
        if fuzz.missing(number, bounds.SEED):
            continue
        _, line, outcome = fuzz.attempt(number, bounds.SEED, places)
        assert not outcome.finding, f"input {number}: {line}\n{outcome.finding}"


@pytest.mark.parametrize("seed", range(8))
def test_no_code_is_executed_from_a_checkpoint(seed, places, tmp_path, monkeypatch):
    """The attack works: pickle itself would execute it."""
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(places("run"), tmp_path / "run")
    fuzz.attack(random.Random(seed), run / "ckpt.pt")
    outcome = fuzz.called(["eval.py", "loss", "--out_dir=run", "--device=cpu"])
    assert outcome.code == 1 and not outcome.finding and "ckpt.pt" in outcome.said
    pickle.loads(pickle.dumps(fuzz.Attack(str(tmp_path / fuzz.MARKER))))
    assert fuzz.wrong_in(["eval.py"], 0, "") == "code was executed"
