"""eval.py compile: kernels of every rule, head dimension and data type compile without spills. Flags are checked."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, complain

triton = pytest.importorskip("triton")
import eval as eval_script  # noqa: E402

exhaustive = pytest.mark.exhaustive
# import attention.py first, because a script of data/ moves the repository to the front of the path
PROGRAM = ("import sys; sys.path[:0] = sys.argv[1:3]; import attention, eval; "
           "eval.main(['compile', '--json', *sys.argv[3:]])")


def compiled(*flags, folder="", **environment):
    """What the command finds in a separate process, because this one may interpret the kernels. folder: the first
    place where modules are looked for."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    argv = [sys.executable, "-c", PROGRAM, folder, str(ROOT), *flags]
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# the calls with the fewest spare registers in the whole table, for both kinds of kernels
TIGHT = ("--sm=90", "--width=128", "--dtype=bfloat16", "--calls=elastic+busy,gated_deltanet")
# the call of each group that needs the most registers. The command itself prints the whole table
FULLEST = "--calls=softmax+sets,elastic+busy,lssar+busy,tra+mix+busy,gated_deltanet,delta+channels"
WIDEST = "--calls=elastic+busy,lssar+busy,gla"
# generations that take their tiles from the tables of others: their limits are checked by one call
OTHERS = [(f"--sm={sm}", *TIGHT[1:]) for sm in (86, 89, 100, 120)]
TABLE = [(f"--dtype={dtype}", f"--sm={sm}") for dtype in ("float32", "bfloat16") for sm in (80, 90)]


@pytest.mark.parametrize("flags", [TIGHT, *(pytest.param(flags, marks=exhaustive) for flags in OTHERS + [
    (*row, f"--width={width}", FULLEST) for row in TABLE for width in (64, 128)])])
def test_kernels_compile_without_problems(flags):
    """Kernels do not spill, fit into the shared memory of every GPU that uses these tiles, use tensor cores, and
    compute as many exponentials as designed. The tiles were chosen with Triton 3.9 for Ampere and Hopper: older
    versions may spill some, and so does sm_100."""
    few = 72 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9) else 16 if "--sm=100" in flags else 0
    bad = [row for row in compiled(*flags)["kernels"] if row["stack"] > few or {*row["problems"]} - {"spills"}]
    assert not bad, "\n".join(map(str, bad))


@exhaustive
@pytest.mark.parametrize("flags", TABLE)
def test_heads_of_width_256_fit_and_spill_little(flags):
    """These are the widest heads that a tile holds. Some kernels may spill a few registers, but nothing else."""
    rows = compiled(*flags, "--width=256", WIDEST)["kernels"]
    bad = [row for row in rows if {*row["problems"]} - {"spills"} or row["stack"] > 32]
    assert rows and not bad, "\n".join(map(str, bad))


@exhaustive
def test_the_largest_tile_without_problems_is_chosen():
    """At width 64, softmax has room for more rows than its usual tile. The last tile that is tried has no problem."""
    found = compiled("--choose=forward", "--sm=90", "--width=64", "--dtype=bfloat16", "--calls=softmax")
    *others, last = found["tried"]
    assert all(row["problems"] for row in others) and not last["problems"] and last["tile"][0] >= 128


@exhaustive
def test_an_edited_rule_is_compiled_anew(tmp_path):
    """Triton caches compiled kernels on disk. Without Kernel.cache_key, it would run the old kernel after an edit."""
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
    assert "unset the variable" in complain(eval_script.main, capsys, "compile")[1]
