"""eval.py: the help lists all commands and flags, and commands print readable text."""
import pytest
from conftest import run

import eval as eval_script


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
def test_a_real_process_prints_readable_text(command, elastic_run):
    flags, words = COMMANDS[command]
    done = run("eval.py", command, f"--out_dir={elastic_run}", "--device=cpu", *flags)
    assert all(word in done.stdout for word in words) and done.stderr == ""


@pytest.mark.parametrize("command", ["probe", "sample"])
def test_a_command_prints_readable_text(command, elastic_run, capsys):
    flags, words = COMMANDS[command]
    eval_script.main([command, f"--out_dir={elastic_run}", "--device=cpu", *flags])
    done = capsys.readouterr()
    assert all(word in done.out for word in words) and done.err == ""
