"""The command of pretrained/: turn public weights into a run (pretrained/convert.py), or a run into public weights
(pretrained/export.py).

    python data/weights.py -h
    python data/weights.py export -h
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from pretrained import convert, export


def main(argv):
    export.command(argv[1:]) if argv[:1] == ["export"] else convert.command(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
