"""evals/instrument.py: opening runs with overrides, watching and changing attention, lists."""

import os
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch
from bounds import close, same
from conftest import meta, tiny_config, train_here
from layers import token_ids

import eval as eval_script
from common import files
from evals.instrument import (
    each_done,
    instead,
    load_run,
    overrides_of,
    runs_named,
    train_if_missing,
)
from model import GPT


def test_axes_may_be_overridden_and_a_recipe_adds_its_parameters(tmp_path, data, evaluate, capsys):
    """They have their initial values and are named in one line."""

    def loss(*flags, out_dir):
        return evaluate("loss", f"--out_dir={out_dir}", "--windows=4", *flags)["loss"]

    base, tuned = tmp_path / "base", tmp_path / "tuned"
    train_here(f"--dataset={data}", f"--out_dir={base}", "--attn=softmax")
    as_it_is, added = loss(out_dir=base), loss("--attn=elastic", out_dir=base)
    for flags in (["--pos=none"], ["--attn=streaming", "--window=4", "--first=1"]):
        assert loss(*flags, out_dir=base) != as_it_is
    for flags in (["--attn=elastic", "--attn_args=tau_init=0"], ["--attn=window", "--window=16"]):
        close(loss(*flags, out_dir=base), as_it_is, terms=4, dtype=torch.float32)
    eval_script.main(
        ["loss", f"--out_dir={base}", "--device=cpu", "--windows=4", "--attn=sink_token"]
    )
    assert "initial values: sink_token" in capsys.readouterr().err
    files.write_json(base / "meta.json", meta(base) | {"ends": [7]})
    train_here(
        f"--init_from={base}",
        f"--out_dir={tuned}",
        "--attn=elastic",
        "--max_iters=2",
        "--device=cpu",
    )
    assert "initial values: tau" in capsys.readouterr().out and loss(out_dir=tuned) != added
    assert meta(tuned)["ends"] == [7]


def test_an_override_reaches_the_recipes_that_set_it_or_else_accept_it_or_else_all():
    flags = {"attn": "softmax,window,linear_state,elastic", "window": 8}
    softmax, window, state, elastic = overrides_of(flags["attn"].split(","), flags).values()
    assert "window" not in softmax | state | elastic and window["window"] == 8  # window sets it
    found = overrides_of(["softmax", "linear_state"], flags)
    assert found == {
        "softmax": {"attn": "softmax", "window": 8},  # attention accepts a window, a state does not
        "linear_state": {"attn": "linear_state"},
    }
    flags = {"attn_args": "tau_init=0", "rope_base": 3}
    assert overrides_of(["softmax", "elastic"], flags) == {
        "softmax": {"attn": "softmax", "rope_base": 3},
        "elastic": {"attn": "elastic", "rope_base": 3, "attn_args": "tau_init=0"},
    }


def test_attention_is_changed_in_every_layer_and_an_error_restores_it():
    gpt = GPT(tiny_config(n_layer=3))
    idx = token_ids(2, 5)
    before = gpt(idx)[0]
    seen = []

    def double(attend, layer, module, *inputs):
        seen.append((layer, module))
        return 2 * attend(*inputs)

    with pytest.raises(KeyError), instead(gpt, double):
        assert not torch.equal(gpt(idx)[0], before)
        raise KeyError
    assert seen == [*enumerate(block.attn for block in gpt.transformer.h)]
    same(gpt(idx)[0], before)


def test_a_run_is_trained_if_it_is_missing_older_than_its_base_or_made_with_other_flags(
    copy, elastic_run, monkeypatch
):
    asked = []
    flags = meta(copy)["flags"]
    other = [*flags, "--seed=3"]
    again = [*flags, f"--init_from={elastic_run}"]
    monkeypatch.setattr(
        subprocess,
        "run",
        lambda argv, **how: asked.append(argv[2:]) or SimpleNamespace(returncode=0),
    )
    assert train_if_missing(copy, flags)["flags"] == flags and not asked
    train_if_missing(copy, other)
    files.write_json(copy / "meta.json", meta(copy) | {"flags": again})
    for time in (2e9, 1e9):  # newer than its base, then older
        os.utime(copy / "ckpt.pt", (time, time))
        train_if_missing(copy, again)
    assert asked == [other, again]


def test_a_stopped_run_goes_on_from_its_last_checkpoint(copy, trainings):
    log = (copy / "log.csv").read_text()
    finished = meta(copy)
    flags = [*finished["flags"], f"--out_dir={copy}"]
    report = finished.pop("report")
    files.write_json(copy / "meta.json", finished | {"flags": flags})
    found = train_if_missing(copy, flags)  # which the second call finds trained
    assert (
        found["flags"] == [*flags, "--init_from=resume"] == trainings[0]
        and found["report"] == report
    )
    assert train_if_missing(copy, flags) == found and len(trainings) == 1
    assert (copy / "log.csv").read_text() == log  # no step was done again


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_fails_stops_no_other(workers, capsys):
    """The second job waits for the third, so two workers do them at the same time."""
    done = threading.Event()
    jobs = [("a", 1), ("b", 0), ("c", 2)]

    def work(name, number):
        if name == "b" and workers == 2:
            assert done.wait(60)
        if name == "c":
            done.set()
        if not number:
            raise ValueError("it is 0")
        return 6 // number

    assert [*each_done(work, jobs, workers)] == [(("a", 1), 6), (("c", 2), 3)]
    assert "b 0: it is 0" in capsys.readouterr().err


def test_large_matrices_are_stored_in_the_data_type_of_the_products(elastic_run):
    """Otherwise autocast would convert them at every pass. The logits do not change."""
    half, whole = (
        load_run(elastic_run, "cpu", dtype=dtype)[0] for dtype in ("bfloat16", "float32")
    )
    for name, p in half.named_parameters():
        assert (p.dtype == torch.bfloat16) == (p.dim() > 1 and ".h." in name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        same(half(token_ids(2, 16))[0], whole(token_ids(2, 16))[0])


def test_runs_are_named_by_patterns_and_lists_and_each_once(elastic_run, tmp_path):
    both = [f"{tmp_path}/run-{i}" for i in range(2)]
    for link in both:
        os.symlink(elastic_run, link)
    assert runs_named(f"{tmp_path}/run-*") == runs_named(",".join([*both, both[0]])) == both


@pytest.mark.parametrize(
    "command",
    [
        "probe --windows=2 --all",
        "probe --windows=2 --lengths=4,8,16",
        "probe --windows=2 --lengths=4,16 --lines=times_live,peak+peak_a",
        "probe --windows=2 --lines=sparsity",
        "heads --windows=2 --cost",
        "maps --text=$fox$ --heads=0",
        "lengths --windows=2 --lengths=16,32",
        "params --windows=2",
        "passkey --lengths=300 --trials=2",
    ],
)
def test_every_instrument_draws_one_run_or_several(
    command, elastic_run, toy_run, data, tmp_path, capsys
):
    for number, out_dir in enumerate((elastic_run, f"{elastic_run},{toy_run}")):
        flags = [
            *command.split(),
            f"--out_dir={out_dir}",
            "--device=cpu",
            f"--png={tmp_path}/{number}",
        ]
        if out_dir == elastic_run and command.startswith("heads"):
            flags.append(f"--against={data}")  # which has no ids of the other run
        eval_script.main(flags)
        assert (tmp_path / str(number)).read_bytes().startswith(b"\x89PNG")
        said = capsys.readouterr()
        assert len(said.out) > 100 and said.err == "" and "nan" not in said.out
        assert said.out.count(str(toy_run)) >= number
