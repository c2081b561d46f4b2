"""Predict the speed of the Triton kernels from their machine code.

    python eval.py compile --sm=80,89,90 --width=64,128 --dtype=bfloat16 \
            --calls=softmax,elastic,entmax,sigmoid,tra+mix --json > out/compile.json
    python docs/predictions.py out/compile.json --out=out/predicted.json
    python docs/predictions.py out/compile.json --measured=results/speed-h100.json      prints measured over predicted

--measured is what `python eval.py speed --kernels` writes, in a file named after its GPU; an H200 counts as an H100.

In a cycle, a multiprocessor issues four instructions and computes 16 exponentials and a GPU's FLOPs of matrix products.
A program waits for its products, then computes the rest, so the times of both add up. Several programs fill each
other's waiting time. Then a tile takes the longest of three: its products, its instructions or exponentials, and its
share of the sum.
"""
import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))         # the repository, if this file runs as a script
from evals.kernels import PRODUCTS  # noqa: E402

# {generation: a GPU, FLOPs of 16-bit products a cycle and multiprocessor, multiprocessors, GHz}, from data sheets
GPUS = {80: ("A100", 2048, 108, 1.41), 89: ("RTX4090", 512, 128, 2.52), 90: ("H100", 4096, 132, 1.83)}
NEWTON = 6                                      # steps of entmax on trained weights at 4,096 tokens: docs/speed.md
RECIPES = {"tra+mix": "tda"}                    # a call that is not named after its rule


def cycles_of(row):
    """Cycles of a multiprocessor for 64 x 64 scores: of a program alone, and of programs together."""
    alone = together = 0
    for n, (instructions, exponentials, flops) in enumerate(row["loops"]):
        products = row["warps"] * flops / GPUS[row["sm"]][1]
        rest = row["warps"] * max(instructions / 4, 2 * exponentials)
        times = NEWTON if n == 1 and len(row["loops"]) == 3 else 1      # only entmax's forward pass has three
        alone += times * (products + rest)
        together += times * max(products, rest, (products + rest) / row["programs_per_sm"])
    rows, keys = map(int, row["tile"].split("x"))
    views = 2 if "+mix" in row["call"] else 1   # such a tile has the scores of two heads
    return [4096 / (rows * keys * views) * cycles for cycles in (alone, together)]


def predict(kernels):
    """{GPU: {width: {recipe: {"forward", "backward": TFLOP/s [alone, together], "speed": relative to softmax, both ways
    together}}}}. It counts the products that a rule needs, in contexts so long that masked tiles do not matter."""
    cycles = defaultdict(lambda: {"forward": [0, 0], "backward": [0, 0]})
    for row in (row for row in kernels if row["sm"] in GPUS and row["loops"]):
        way = cycles[row["sm"], row["width"], row["call"]]["forward" if row["kernel"] == "forward" else "backward"]
        way[:] = map(sum, zip(way, cycles_of(row), strict=True))
    found = defaultdict(lambda: defaultdict(dict))
    for (sm, width, call), ways in [*cycles.items()]:
        (name, _, processors, gigahertz), recipe = GPUS[sm], RECIPES.get(call, call)
        product = 2 * 64 * 64 * width * processors * gigahertz / 1000   # TFLOP/s if it took one cycle
        needed = dict(zip(("forward", "backward"), PRODUCTS.get(recipe, PRODUCTS["softmax"]), strict=True))
        row = {way: [n * product / each for each in ways[way]] for way, n in needed.items()}
        base = cycles.get((sm, width, "softmax"), ways)
        own, softmax = (sum(each[1] for each in one.values()) for one in (ways, base))
        found[name][str(width)][recipe] = row | {"speed": softmax / own}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("compiled", "--out", "--measured"):
        parser.add_argument(flag, type=Path)
    args = parser.parse_args()
    found = predict(json.loads(args.compiled.read_text(encoding="utf-8"))["kernels"])
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.measured:
        file = args.measured.name.lower().replace("-", "").replace("h200", "h100")
        gpu = next((name for name in found if name.lower() in file), None)
        if gpu is None:
            parser.error(f"no GPU in the name {args.measured.name}: it must contain one of {', '.join(found)}")
        for size, rows in json.loads(args.measured.read_text(encoding="utf-8"))["sizes"].items():
            predicted = found[gpu].get(size.split()[1].strip(","), {})
            for name in (name for name in rows if name in predicted and "missing" not in rows[name]):
                shares = [f"{way} {rows[name][way] / predicted[name][way][1]:.2f}" for way in ("forward", "backward")]
                print(f"{gpu}, {size}, {name}, of the prediction: {', '.join(shares)}")


if __name__ == "__main__":
    main()
