"""Where a run's first weights come from: another run (--init_from=RUN), or its own last checkpoint (resume)."""
from pathlib import Path

from common.adapters import frozen, learned
from common.flags import fields_of
from common.runs import (find_base, last_checkpoint, load_weights, on_base, read_checkpoint, read_run, read_weights,
                         what_is_new)
from common.shards import is_sharded, load_optimizer, load_parts
from model import GPTConfig


def take_weights(model, path, run, machine):
    """Load the weights of another run. Weights that only this model's recipe has keep their initial values.

    Raises ValueError if `run`, the new run, would overwrite that run, or if such a weight would never be trained."""
    if run.checkpoint.resolve() == Path(path).resolve():
        raise ValueError(f"--init_from and --out_dir both name {run.folder}: name another --out_dir for the new run")
    added = model.additions_to(GPTConfig(**fields_of(GPTConfig, read_run(path)[0]["knobs"])))
    if untrained := [name for name in added if name in frozen(model)]:
        raise ValueError(f"{untrained[0]} is not in {path}, and --train_only does not train it, so it would stay at "
                         "its initial value: leave out the flags that add it")
    load_weights(model, read_weights(path), path, added)
    if added and machine.main:
        print(what_is_new(added, path))


def resume(run, stored, meta, model, optimizer, scaler):
    """Load a run's own last checkpoint, if it has saved one. stored: its meta.json. meta: the new meta.json.

    Raises ValueError if the data set is not the one that the run began with."""
    if stored.get("data_hash") != meta["data_hash"]:
        raise ValueError(f"the data set {meta['knobs']['dataset']} has changed since {run.folder} began: "
                         "make it as it was, or start a new run")
    path = last_checkpoint(run.folder)
    if path is None:                            # killed before its first checkpoint: start again
        return
    if path.is_dir():                           # in parts
        if "base" in stored:
            load_weights(model, read_weights(find_base(stored, run.folder)), path, new=learned(model))
        run.saved = load_parts(path, learned(model), model, optimizer, scaler)
    else:
        checkpoint = read_checkpoint(path, mmap=is_sharded(model))      # a rank reads only its parts into memory
        load_weights(model, on_base(checkpoint["model"], stored, path), path)
        load_optimizer(optimizer, checkpoint["optimizer"])
        scaler.load_state_dict(scaler.state_dict() | checkpoint.get("scaler", {}))
        run.saved = checkpoint["step"]
    meta["losses"] = stored.get("losses", {})
