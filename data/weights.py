"""Start pretrained/: turn public weights into a run, or a run into public weights.

python data/weights.py -h
python data/weights.py export -h
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder

if __name__ == "__main__":
    runpy.run_module("pretrained.convert", run_name="__main__")
