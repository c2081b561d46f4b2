"""The report that train.py prints at the end of a run: losses, a first look at the attention, a
sample."""

from data import tokens
from evals.instrument import legend, table
from evals.lab_figures import lab_figures
from evals.loss import bits_per_byte, mean_loss
from evals.measures import IN_THE_LAB, MEASURES
from evals.probe import probe
from evals.sample import as_ids, first_token


def report(model, machine, folder, windows, batch_size, docs=False):
    """Print the losses, then a first look at the attention and a sample, or in the sink lab five of
    its figures. folder: that of the data set. Returns all figures as {name: value}. Every rank must
    call this, because the ranks share the windows of the losses. Only the main rank prints; the
    others get {}."""
    model.eval()  # no dropout: nothing is trained after this
    data_meta = tokens.read_meta(folder)
    splits = {name: tokens.Tokens(folder, name, docs) for name in ("train", "val")}
    losses = {}
    for name, split in splits.items():
        losses[name] = mean_loss(model, split, machine, windows, batch_size)
    if not machine.main:  # the main rank does the rest alone
        return {}
    rows = [[name, loss, bits_per_byte(loss, data_meta, name)] for name, loss in losses.items()]
    header = ["split", "loss", "bits_per_byte"]
    if rows[0][2] is None:  # tokens that are not text have no bytes
        header, rows = header[:2], [row[:2] for row in rows]
    print(table(rows, header) + "\n")
    if "triggers" in data_meta:  # only the sink lab's sequences have them
        found = lab_figures(model, splits["val"], data_meta, machine)
        five = list(IN_THE_LAB)[:5]
        print(legend(IN_THE_LAB, {name: found[name] for name in five if name in found}))
        return losses | found
    mean = probe(model, splits["val"], machine, 16, 4)["mean"]
    sink = f"{MEASURES['sink']}; an even spread gives it {mean['uniform']:.4f}"
    shown = {name: mean[name] for name in ("sink", "density", "sparsity")}
    print(legend(MEASURES | {"sink": sink}, shown))
    if not all(block.attn.has_weights for block in model.transformer.h):
        print("(of derivatives in place of weights)")
    coder = tokens.tokenizer(str(folder))
    # the first 240 tokens of what `eval.py sample` prints by default, in float32
    ids = as_ids(first_token(coder, splits.get), machine)
    ids = model.generate(ids, 240, temperature=0.8, top_k=50, seed=0)
    print(f"\na sample:\n{coder.decode(ids[0].tolist())}")
    return losses | {name: value for name, value in mean.items() if value is not None}
