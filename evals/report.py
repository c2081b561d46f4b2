"""report"""
from data import tokens
from evals.instrument import table
from evals.lab import lab
from evals.loss import bits_per_byte, mean_loss
from evals.probe import probe
from evals.sample import first_token


def report(model, machine, dataset, windows, batch_size):
    """What train.py prints at the end of a run: the losses, a first look at the attention, and a sample; in the sink lab, its figures.
    Returns the figures as {name: value}."""
    folder = tokens.data_folder(dataset)
    meta = tokens.read_meta(folder, verify=False)
    stride = meta.get("stride", 1)
    splits = {name: tokens.Tokens(folder, name) for name in ("train", "val")}
    losses = {name: mean_loss(model, split, machine, windows, batch_size, stride) for name, split in splits.items()}
    if not machine.main:
        return {}
    print(table([[name, loss, bits_per_byte(loss, meta, name)] for name, loss in losses.items()], ["split", "loss", "bits per byte"]) + "\n")
    if "triggers" in meta:
        found = lab(model, splits["val"], meta, machine)
        print("\n".join(f"{name}: {value:.4f}" for name, value in found.items()))
        return losses | found
    seen = probe(model, splits["val"], machine, 16, 4, stride)["mean"]
    print(f"sink ratio {seen['sink']:.4f} (an even spread puts {seen['uniform']:.4f} on the first token), "
          f"density {seen['density']:.4f}, sparsity {seen['sparsity']:.4f}\n")
    coder = tokens.tokenizer(meta["tokenizer"])
    prompt = first_token(splits["val"], machine)
    print(coder.decode(model.generate(prompt, 240, temperature=0.8, top_k=50, seed=0)[0].tolist()))
    return losses | seen
