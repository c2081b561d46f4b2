"""evals/everything.sh: all measurements of a GPU, one after another, on a page."""
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

import eval as eval_script
from common.flags import Parser, add_flags
from mixers import trained_recipes

# stands for python: it writes down its arguments, and lets one command fail
PYTHON = f"""#!/bin/sh
case "$*" in
    -c*) cd {ROOT} && exec {sys.executable} "$@" ;;
    *--live*) echo "the device is gone" >&2; exit 1 ;;
    *) echo "$@" >> commands; echo "figures of $1" ;;
esac
"""


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_every_command_is_valid_and_a_failure_stops_nothing(tmp_path):
    for folder in ("evals", "docs", "bin"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "evals/everything.sh", tmp_path / "evals")
    (tmp_path / "bin/python").write_text(PYTHON)
    (tmp_path / "bin/python").chmod(0o755)
    subprocess.run(["sh", "evals/everything.sh"], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL,
                   env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"})
    page, parser = (tmp_path / "docs/gpu.md").read_text(), Parser()
    add_flags(parser, eval_script.COMMANDS["speed"].flags)
    commands = [line.split()[2:] for line in (tmp_path / "commands").read_text().splitlines() if "speed" in line]
    parsed = [parser.parse_args(words) for words in commands]           # an unknown flag ends the test
    steps = ",".join(args.attn for args in parsed if args.vocab_size == 50304)
    assert steps.split(",") == trained_recipes() and {args.lengths for args in parsed if args.kernels} >= {"65536"}
    assert page.count("failed: the device is gone") == 1 and page.count("figures of eval.py") == len(parsed)
    assert page.count("```") == 4 * page.count("\n## ") and not (tmp_path / "gpu.err").exists()
