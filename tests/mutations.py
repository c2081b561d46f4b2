"""Checks that the tests notice wrong code. Each mutation below breaks a line or two; then a test must fail.

    python tests/mutations.py                   all mutations, one after another, each in a copy of the repository
    python tests/mutations.py mask --jobs=2     only those whose name contains "mask", two test processes each
    python tests/mutations.py --root=DIR        the code and the tests of another checkout

A mutation names the tests that should fail. If they pass, all default tests run.
"""
import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    name: str
    file: str
    tests: str                                  # X of tests/test_X.py, and a -k expression after "-k"
    changes: list                               # pairs of (text that occurs once in the file, its replacement)


MUTATIONS = [
    # masks, rules, axes, cache
    Mutation("a mask that shows one later key", "axes/sight.py", "contract -k later",
             [("    seen = j <= i\n    if sight", "    seen = j <= i + 1\n    if sight")]),
    Mutation("a window one key too wide", "axes/sight.py", "attention -k formula",
             [("(i - j < sight.window) |", "(i - j <= sight.window) |")]),
    Mutation("elastic's threshold divides by n - 1", "attention.py", "attention -k formula",
             [("return layer.tau[:, None, None] / n[:, None]",
               "return layer.tau[:, None, None] / (n - 1).clamp(min=1)[:, None]")]),
    Mutation("log-sum-exp's gradient with the wrong sign", "attention.py", "contract -k finite",
             [("return ctx.saved_tensors[0] * e, None", "return -ctx.saved_tensors[0] * e, None")]),
    Mutation("entmax's gradient forgets its threshold", "attention.py", "contract -k finite",
             [("r = r + ((x ** power).sum(-1, keepdim=True) - 1) / slope", "r = r + 0 * slope")]),
    Mutation("softpick's denominator leaves out negative scores", "attention.py", "attention -k formula",
             [("(e.abs().sum(-1, keepdim=True) + 1e-8)", "(F.relu(e).sum(-1, keepdim=True) + 1e-8)")]),
    Mutation("tra's threshold without the 2 under the root", "attention.py", "attention -k formula",
             [("torch.sqrt(2 * log / layer.width)", "torch.sqrt(log / layer.width)")]),
    Mutation("the gate before the norm", "attention.py", "contract -k weights_times",
             [('o = choices["value_bias"].shifted(self, o)', 'o = choices["gate"].gated(self, o, x)'),
              ('return choices["gate"].gated(self, o, x).to(dtype)', "return o.to(dtype)")]),
    Mutation("Dex's correction after the norm", "attention.py", "contract -k weights_times",
             [('o = choices["dex"].corrected(self, o)\n        o = choices["out_norm"].normed(self, o)',
               'o = choices["out_norm"].normed(self, o)\n        o = choices["dex"].corrected(self, o)')]),
    Mutation("a cache that drops a key of the window", "axes/layer.py", "contract -k one_call",
             [("self.sight.first, self.sight.window - 1\n", "self.sight.first, self.sight.window - 2\n")]),
    Mutation("views that share the first key of their pair", "axes/layer.py", "attention -k formula",
             [("return x.unflatten(axis, (-1, 2)).repeat_interleave(shared, axis).flatten(axis, axis + 1)",
               "return x.repeat_interleave(shared, axis)")]),
    Mutation("recomputed blocks draw another dropout", "kernels.py", "attention -k dropout",
             [("one_block, use_reentrant=False)", "one_block, use_reentrant=False, preserve_rng_state=False)")]),
    # slopes, tiles
    Mutation("a wrong sign in elastic's slope", "attention.py", "contract -k kernel",
             [("return p * (g - delta), -g", "return p * (g + delta), -g")]),
    Mutation("softpick's slope ignores negative scores", "attention.py", "kernels -k softpick",
             [("tl.where(s < 0, delta, 0.)", "tl.where(s < 0, 0., 0.)")]),
    Mutation("keys that skip the last rows of their window", "kernels.py", "kernels -k float32",
             [("hi = tl.minimum(inputs.T, j + c.BN - 1 + inputs.window)",
               "hi = tl.minimum(inputs.T, j + inputs.window)")]),
    Mutation("the second view's share has no gradient", "kernels.py", "kernels -k views",
             [("        dmix -= tl.sum(wb * g, 1)", "        dmix -= 0 * tl.sum(wb * g, 1)")]),
    # mixers/: states, groups, features
    Mutation("a state that fades one token late", "mixers/recurrent.py", "recurrent -k tokens",
             [("(k * (end - c).exp()).mT @ u", "(k * (end - c + forget).exp()).mT @ u")]),
    Mutation("a delta rule that erases nothing within a chunk", "mixers/recurrent.py", "recurrent -k tokens",
             [("torch.linalg.solve_triangular(erase * scores(k, k, c)",
               "torch.linalg.solve_triangular(0 * erase * scores(k, k, c)")]),
    Mutation("Sinkhorn that stops one round early", "mixers/focus.py", "focus -k sinkhorn",
             [('for _ in range(layer.args["iterations"]):', 'for _ in range(layer.args["iterations"] - 1):')]),
    Mutation("random features without their normaliser", "mixers/performer.py", "performer",
             [("b = k @ W - k.square().sum(-1, keepdim=True) / 2", "b = k @ W")]),
    Mutation("colliding keys without their probability", "mixers/selection.py", "selection -k unbiased",
             [("return torch.where(is_exact(layer, i, j), 0.0, u.log())", "return 0 * u.log()")]),
    # model.py, train.py: initial values, sampling, batches, steps
    Mutation("norms decay like matrices", "model.py", "model -k optimizer",
             [('name != "bias" and p.dim() > 1', 'name != "bias" and p.dim() > 0')]),
    Mutation("top_p keeps one token too few", "model.py", "model -k top_p",
             [("ordered.cumsum(-1) - ordered >= top_p", "ordered.cumsum(-1) >= top_p")]),
    Mutation("every rank reads the first rank's sequences", "train.py", "train -k rank",
             [("starts.reshape(self.machine.world, -1)[self.machine.rank]",
               "starts.reshape(self.machine.world, -1)[0]")]),
    Mutation("a resumed run repeats its last step", "train.py", "train -k resum",
             [("for step in range(first + 1, knobs.max_iters + 1)",
               "for step in range(max(first, 1), knobs.max_iters + 1)")]),
    Mutation("a share that forgets the extra key", "evals/measures.py", "measures",
             [("total = mass + extra + 1e-8", "total = mass + 1e-8")]),
]


def copy_of(root, folder):
    """Copy the tracked and new files of a checkout into a folder."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, text=True,
                            capture_output=True, check=True).stdout.splitlines()
    for name in listed:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def mutate(mutation, folder):
    """Write the mutation. Raises ValueError where the line to break is not found exactly once."""
    path = folder / mutation.file
    text = path.read_text()
    for old, new in mutation.changes:
        if text.count(old) != 1:
            raise ValueError(f"{mutation.file} must contain this once, not {text.count(old)} times: {old!r}")
        text = text.replace(old, new)
    path.write_text(text)


def first_failure(folder, jobs, *chosen):
    """The name of the first test that fails, or None."""
    argv = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(jobs), "--durations=0", "--durations-min=60",
            "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    failed = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode in (4, 5):               # no such file, or no test was selected
        raise ValueError(done.stdout[-2000:] + done.stderr[-2000:])
    if done.returncode == 0:
        return None
    return failed[0].split(" - ")[0].split("/", 1)[1] if failed else "the tests cannot be collected"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="only mutations whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="test processes at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout of this repository")
    args = parser.parse_args()
    survived = 0
    for mutation in MUTATIONS:
        if args.name not in mutation.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy_of(args.root, Path(folder))
            mutate(mutation, Path(folder))
            words, started = mutation.tests.split(), time.monotonic()
            try:
                found = first_failure(folder, args.jobs, f"tests/test_{words[0]}.py", *words[1:])
            except ValueError:                  # another checkout may have no such test
                found = None
            found = found or first_failure(folder, args.jobs)
            survived += found is None
            print(f"{mutation.name:<55} {found or 'NOT NOTICED':<90} {time.monotonic() - started:4.0f} s", flush=True)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
