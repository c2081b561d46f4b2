"""The instruments: eval.py runs them, and each file is one command or a part of several."""
