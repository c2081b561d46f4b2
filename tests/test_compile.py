"""eval.py compile: no kernel spills, whatever the rule, the width and the data type; and its flags."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, complain

triton = pytest.importorskip("triton")
import eval as eval_script  # noqa: E402

exhaustive = pytest.mark.exhaustive
# attention.py first, before a script of data/ puts the repository at the head of the path
PROGRAM = ("import sys; sys.path[:0] = sys.argv[1:3]; import attention, eval; "
           "eval.main(['compile', '--json', *sys.argv[3:]])")


def compiled(*flags, folder="", **environment):
    """What the command finds, in a process of its own: in this one the kernels may be interpreted. folder: where
    modules are looked for first."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    argv = [sys.executable, "-c", PROGRAM, folder, str(ROOT), *flags]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# by the whole table, those with the fewest registers to spare, and of either kind of kernel
TIGHT = ("--sm=90", "--width=128", "--dtype=bfloat16", "--calls=elastic+busy,gated_deltanet")
# the fullest of each group. The command prints the rest of the table
FULLEST = "--calls=softmax+sets,elastic+busy,lssar+busy,tra+mix+busy,gated_deltanet,delta+channels"
WIDEST = "--calls=elastic+busy,lssar+busy,gla"
TABLE = [(f"--dtype={dtype}", f"--sm={sm}") for dtype in ("float32", "bfloat16") for sm in (80, 90)]


@pytest.mark.parametrize("flags", [TIGHT, *(pytest.param((*row, f"--width={width}", FULLEST), marks=exhaustive)
                                            for row in TABLE for width in (64, 128))])
def test_kernels_compile_well(flags):
    """No spills, shared memory that exists on every GPU that takes these tiles, tensor cores, and as many exponentials
    as the design counts. The tiles were chosen with Triton 3.9: older compilers may spill a little."""
    few = 72 if triton.__version__ < "3.9" else 0
    bad = [row for row in compiled(*flags)["kernels"] if row["stack"] > few or {*row["problems"]} - {"spills"}]
    assert not bad, "\n".join(map(str, bad))


@exhaustive
@pytest.mark.parametrize("flags", TABLE)
def test_heads_of_width_256_fit_and_spill_hardly(flags):
    """The widest heads that a tile holds. Some kernels may spill a few registers, and that is all."""
    rows = compiled(*flags, "--width=256", WIDEST)["kernels"]
    bad = [row for row in rows if {*row["problems"]} - {"spills"} or row["stack"] > 32]
    assert rows and not bad, "\n".join(map(str, bad))


@exhaustive
def test_the_largest_clean_tile_is_chosen():
    """softmax at width 64 has room for more than its usual tile of rows; the last that is tried is clean."""
    found = compiled("--choose=forward", "--sm=90", "--width=64", "--dtype=bfloat16", "--calls=softmax")
    *others, last = found["tried"]
    assert all(row["problems"] for row in others) and not last["problems"] and last["tile"][0] >= 128


@exhaustive
def test_an_edited_rule_is_compiled_anew(tmp_path):
    """Triton keeps what it compiled on disk. Without Kernel.cache_key it would not look into the rule and run the old
    kernel."""
    source = (ROOT / "attention.py").read_text(encoding="utf-8")
    line = "    w = tl.exp2(s - r)\n"
    assert source.count(line) == 1
    codes = []
    for edited in (line, line + "    w = w * 2\n", line):
        (tmp_path / "attention.py").write_text(source.replace(line, edited), encoding="utf-8")
        found = compiled("--sm=90", "--width=64", "--dtype=bfloat16", "--calls=softmax", folder=str(tmp_path),
                         TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1")
        codes.append({row["kernel"]: row["code"] for row in found["kernels"]}["forward"])
    assert codes[0] == codes[2] != codes[1]


@pytest.mark.parametrize("flag, says", [
    ("--calls=nonsense", "elastic"), ("--dtype=int8", "bfloat16"), ("--sm=new", "'new'"), ("--choose=nonsense", "scan"),
    ("--processes=0", "processes")])
def test_wrong_flags_are_explained(flag, says, capsys, monkeypatch):
    monkeypatch.setattr("kernels.INTERPRETED", False)
    assert says in complain(eval_script.main, capsys, "compile", flag)[1]


def test_the_interpreter_compiles_nothing(capsys, monkeypatch):
    monkeypatch.setattr("kernels.INTERPRETED", True)
    assert "unset it" in complain(eval_script.main, capsys, "compile")[1]
