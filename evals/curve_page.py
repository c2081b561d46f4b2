"""The page of `curve --html`: drag the scores of one row, and see the weights that every rule gives to them.

evals/curve.html is the page. It has no formula of a rule: this module runs each rule of attention.py on a row once and
writes down the operations that PyTorch executes. The page repeats them with other scores. So the page needs each
operation (add, exp, sum, ...) only once, and a new rule is on it without another line.
"""
import inspect

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attention
from axes import rows
from evals.pictures import save_page
from model import GPTConfig

WIDTH = 64                                      # head dimension
KEYS = 7                                        # of the recorded row; any number but 1 gives the same operations

# {recipe: {constant: (its least value, its largest, step, meaning)}}, for the sliders. A constant is a learned scalar
# of the layer, one of its --attn_args, or the rule's row input t. A learned scalar that is missing here has the slider
# of `constants_of`
CONSTANTS = {
    "sink": {"sink_logit": (-4, 8, 0.1, "score of the extra key; at 0 this is softmax1")},
    "elastic": {"tau": (-1, 5, 0.1, "τ, learned")},
    "entmax": {"alpha": (1.05, 2, 0.05, "α: near 1 softmax, at 2 sparsemax")},
    "lssar": {"power": (1, 30, 1, "power")},
    "tra": {"beta": (0, 4, 0.1, "β, learned"), "kappa": (1, 32, 1, "κ: noise that may pass"),
            "power": (1, 4, 0.5, "power")},
    "sigmoid": {"t": (0, 8, 0.1, "t, at first the logarithm of the context length")},
}


def page(path, numbers):
    save_page(path, "curve.html", {"rules": numbers["rules"]})


def rules_for_page():
    """Every rule, and after softmax the same with an extra key: [{"name", "about", "constants", "program"}]."""
    names = ["softmax", "sink", *(name for name in attention.RULES if name != "softmax")]
    return [recorded(name) for name in names]


def constants_of(name, layer):
    """The sliders of a rule: those of CONSTANTS, and one around the initial value of every other learned scalar."""
    learned = layer.rule.learns(layer) if layer.rule.learns else {}
    return {scalar: (start.item() - 4, start.item() + 4, 0.1, "learned") for scalar, start in learned.items()
            if isinstance(start, torch.Tensor) and start.numel() == 1} | CONSTANTS.get(name, {})


def recorded(name):
    """One rule as the page reads it: its name, its formula, its sliders and its program."""
    axes = attention.recipe(name) if name in attention.ATTENTIONS else {"rule": name}
    config = GPTConfig(n_head=1, n_embd=WIDTH, block_size=64, attn=name if name in attention.ATTENTIONS else "softmax",
                       rule=axes["rule"], kernel="torch")
    layer = attention.Attention(config, 0).eval()
    constants = constants_of(name, layer)
    starts = {constant: start_of(layer, constant) for constant in constants}
    inputs = {"s": torch.linspace(-1, 2, KEYS).view(1, 1, 1, -1), "seen": torch.ones(1, 1, 1, KEYS, dtype=torch.bool),
              "n": torch.tensor([float(KEYS)]), **{name: torch.tensor(start) for name, start in starts.items()}}
    with torch.no_grad(), Tape(inputs) as tape:
        w, outside = row_weights(layer, **inputs)
    card = layer.choices["sink"] if layer.has_extra_key else attention.RULES[axes["rule"]].weights
    about = (inspect.getdoc(card) or "").split("\n\n")[0].split("\nSource")[0]
    users = {recipe: own for recipe, own in attention.ATTENTIONS.items() if own.get("rule") == name}
    if users and all((own.get("qk_norm"), own.get("scale")) == ("l2", "one") for own in users.values()):
        about += f" In its recipes ({', '.join(users)}) scores are cosines, from -1 to 1."
    sliders = [{"name": constant, "start": round(starts[constant], 2), "least": least, "most": most, "step": step,
                "about": meaning} for constant, (least, most, step, meaning) in constants.items()]
    return {"name": name, "about": " ".join(about.split()), "constants": sliders, "program": tape.program(w, outside)}


def start_of(layer, constant):
    """The initial value of a constant."""
    if constant == "t":
        return layer.rule.row_input(layer, torch.tensor([64.0])).item()
    return float(layer.args[constant]) if constant in layer.args else getattr(layer, constant).item()


def row_weights(layer, s, seen, n, **constants):
    """The weights of one row of scores s (1, 1, 1, T) by the layer's rule, with these constants in place of the layer's
    own: on keys (1, 1, 1, T), and on an extra key. n (1,): how many keys the row sees."""
    for name, value in constants.items():
        if name in layer.args:
            layer.args[name] = value
        elif name != "t":
            del layer._parameters[name]
            setattr(layer, name, value.view(1))
    rule = attention.RULES[layer.config.rule]
    t = constants.get("t")
    if t is None and rule.row_input:
        t = rule.row_input(layer, n)
    w = rule.weights(s, seen, t, **({"power": rule.power(layer.args)} if rule.power else {}))
    if not layer.has_extra_key:
        return w, torch.zeros(1)
    share = rows.share_of_keys(layer, s, rule.statistic(s, seen, w), n)
    return w * share, 1 - share


class Tape(TorchDispatchMode):
    """Writes down the operations of PyTorch. A program is a list of steps [operation, number of its result, arguments]:
    an argument is a number, [the number of an earlier result], or null. Numbers below 0 are those of the inputs."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs, self.steps, self.kept = list(inputs), [], []
        self.names = {id(value): -1 - i for i, value in enumerate(inputs.values())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":       # the rule asks whether it has finished: not yet, so all passes are here
            return False
        out = func(*args, **(kwargs or {}))
        self.steps.append([name.strip("_"), len(self.steps), [self.argument(value) for value in args]])
        self.kept.append((out, args))           # so that no other tensor gets the id
        self.names[id(out)] = len(self.steps) - 1
        return out

    def argument(self, value):
        """A number, or [the number of a result]. None for an argument left out, and for shapes, which rows do not need.
        """
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names:
                raise ValueError("a rule uses a tensor that the page does not know")
            return [self.names[id(value)]]
        return float(value) if isinstance(value, float | int) and not isinstance(value, bool) else None

    def program(self, *results):
        """The steps that lead to these results."""
        wanted, steps = {self.names[id(result)] for result in results}, []
        for step in reversed(self.steps):
            if step[1] in wanted:
                steps.append(step)
                wanted |= {argument[0] for argument in step[2] if isinstance(argument, list)}
        return {"inputs": self.inputs, "steps": steps[::-1], "results": [self.names[id(result)] for result in results]}
