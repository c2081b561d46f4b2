"""eval.py compile: kernels of every rule, head dimension and data type compile without spills. Flags are checked."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, complain

triton = pytest.importorskip("triton")
import eval as eval_script  # noqa: E402

# import attention.py first, because a script of data/ moves the repository to the front of the path
PROGRAM = ("import sys; sys.path[:0] = sys.argv[1:3]; import attention, eval; "
           "eval.main(['compile', '--json', *sys.argv[3:]])")


def compiled(*flags, folder="", **environment):
    """The kernels that the command finds in a process that does not interpret them. folder: where modules come from."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    argv = [sys.executable, "-c", PROGRAM, folder, str(ROOT), *flags]
    return json.loads(subprocess.run(argv, env=env, stdout=subprocess.PIPE, check=True).stdout)["kernels"]


# the calls with the fewest spare registers in the whole table, for both kinds of kernels. A generation that takes its
# tiles from the table of another needs only these
TIGHT = ("--width=128", "--dtype=bfloat16", "--calls=elastic+busy,gated_deltanet")
OTHERS = [(f"--sm={sm}", *TIGHT) for sm in (86, 89, 100, 120)]
# the call of each group that needs the most registers, also of the widest heads that a tile holds
FULLEST = "--calls=softmax+sets,elastic+busy,lssar+busy,tra+mix+busy,gated_deltanet,delta+channels"
TABLE = [(f"--dtype={dtype}", f"--sm={sm}", *more) for dtype in ("float32", "bfloat16") for sm in (80, 90) for more in (
    ("--width=64", FULLEST), ("--width=128", FULLEST), ("--width=256", "--calls=elastic+busy,lssar+busy,gla"))]


@pytest.mark.parametrize("flags", [
    ("--sm=90", *TIGHT), *(pytest.param(flags, marks=pytest.mark.exhaustive) for flags in OTHERS + TABLE)])
def test_kernels_compile_without_problems(flags):
    """Kernels do not spill, fit into the shared memory of every GPU that uses these tiles, use tensor cores, and (in 16
    bits, before sm_100) compute as many exponentials as designed. The tiles were chosen with Triton 3.9 for Ampere and
    Hopper: older versions may spill some, and so do sm_100 and the widest heads."""
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    few = 32 if "--width=256" in flags else 72 if old else 16 if "--sm=100" in flags else 0
    rows = compiled(*flags)
    bad = [row for row in rows if row["stack"] > few or {*row["problems"]} - {"spills"}]
    assert rows and not bad, "\n".join(map(str, bad))


@pytest.mark.exhaustive
def test_an_edited_rule_is_compiled_anew(tmp_path):
    """Triton caches compiled kernels on disk. Without Kernel.cache_key, it would run the old kernel after an edit."""
    source, line, codes = (ROOT / "attention.py").read_text(encoding="utf-8"), "    w = tl.exp2(s - r)\n", []
    assert source.count(line) == 1
    for edited in (line, line + "    w = w * 2\n", line):
        (tmp_path / "attention.py").write_text(source.replace(line, edited), encoding="utf-8")
        found = compiled("--sm=90", "--width=64", "--dtype=bfloat16", "--calls=softmax", folder=str(tmp_path),
                         TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1")
        codes.append({row["kernel"]: row["code"] for row in found}["forward"])
    assert codes[0] == codes[2] != codes[1]


@pytest.mark.parametrize("flag, interpreted, says", [("--calls=x", False, "elastic"), ("--sm=90", True, "unset")])
def test_wrong_flags_are_explained(flag, interpreted, says, capsys, monkeypatch):
    monkeypatch.setattr("kernels.INTERPRETED", interpreted)
    assert says in complain(eval_script.main, capsys, "compile", flag)[1]
