"""eval.py: it names its commands and flags, refuses wrong ones in one line, and prints for people."""
import re

import pytest
from conftest import complain, run

import eval as eval_script


@pytest.mark.parametrize("args, says", [
    ((), "loss, probe, sample"), (("nonsense",), "loss, probe, sample"), (("loss",), "--out_dir"),
    (("loss", "--out_dir=no/such/run"), "no/such/run"), (("loss", "--nonsense=1"), "valid flags"),
    (("probe", "--out_dir=x", "--batch_size=0"), "batch_size"), (("loss", "--out_dir=x", "--windows=-1"), "windows"),
    (("probe", "--out_dir=x", "--attn=nonsense"), "elastic"), (("speed", "--lengths=long"), "'long'"),
    (("speed", "--live"), "--out_dir"), (("lab", "--attn=nonsense"), "nonsense.*elastic"),
    (("lab", "--seeds=x"), "'x'")])
def test_it_names_its_commands_and_flags(args, says, capsys):
    assert re.search(says, complain(eval_script.main, capsys, *args)[1])


@pytest.mark.parametrize("command", [[], *([name] for name in eval_script.COMMANDS)])
def test_help_lists_the_commands_and_every_flag_of_each(command, capsys):
    with pytest.raises(SystemExit) as stop:
        eval_script.main([*command, "-h"])
    said = capsys.readouterr().out
    names = eval_script.COMMANDS
    if command:
        groups = [eval_script.COMMANDS[command[0]].flags]
        if command[0] in eval_script.OF_A_RUN:
            groups += [eval_script.Common, eval_script.Overrides]
        knobs = [knob for group in groups for knob in group.__dataclass_fields__.values()]
        names = [knob.name if knob.metadata["positional"] else f"--{knob.name} " for knob in knobs]
    assert stop.value.code == 0 and all(name in said for name in names)


COMMANDS = {"loss": (["--windows=2"], ["bits per byte", "val"]),
            "probe": (["--windows=2"], ["sink", "0.1", "mean", "dispersion"]),
            "sample": (["--tokens=3", "--prompt=fox"], ["fox"])}


@pytest.mark.parametrize("command", ["loss", *(pytest.param(name, marks=pytest.mark.exhaustive)
                                               for name in ("probe", "sample"))])
def test_a_real_process_prints_for_people(command, elastic_run):
    flags, words = COMMANDS[command]
    done = run("eval.py", command, f"--out_dir={elastic_run}", "--device=cpu", *flags)
    assert all(word in done.stdout for word in words) and done.stderr == ""


@pytest.mark.parametrize("command", ["probe", "sample"])
def test_a_command_prints_for_people(command, elastic_run, capsys):
    flags, words = COMMANDS[command]
    eval_script.main([command, f"--out_dir={elastic_run}", "--device=cpu", *flags])
    done = capsys.readouterr()
    assert all(word in done.out for word in words) and done.err == ""


@pytest.mark.exhaustive
def test_a_wrong_number_ends_a_real_process_in_one_line():
    done = run("eval.py", "speed", "--lengths=long", ok=False)
    assert done.returncode == 1 and "'long'" in done.stderr and done.stderr.count("\n") == 1
