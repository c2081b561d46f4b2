"""Scores on public benchmarks, by EleutherAI's lm-evaluation-harness (pip install lm-eval; 0.4.13
is tested).

The harness fetches the questions of a task, words them and counts the scores. It asks a model three
things: how likely is this continuation of that context, how likely is this whole text, and how does
this text go on?
"""

import contextlib
import itertools
import math
import sys
from dataclasses import dataclass

import torch

from common import files
from common.flags import Knobs, knob
from evals.ablate import every_head, value_zeroed
from evals.instrument import instead, table
from evals.likelihood import answers, generated, text_tokenizer
from evals.probe import probe


@dataclass
class Bench(Knobs):
    """Flags of bench"""

    tasks: str = knob("", "tasks of lm-evaluation-harness, separated by commas: arc_easy,wikitext")
    include_path: str = knob("", "folder with the YAML files of more tasks, such as local files")
    num_fewshot: int = knob(
        -1, "solved examples before each question; -1: as the task says", least=-1
    )
    limit: int = knob(0, "only the first questions of each task; 0: all")
    zero_above: float = knob(
        1.0,
        "in heads with more than this share of their weight on the sink, the first token's value "
        "is 0; 0: in all heads; 1: in none (table 1 of Native MoE)",
        least=0,
    )
    length: int = knob(
        0, "tokens of the longest input; a longer one loses its beginning; 0: block_size"
    )
    batch_size: int = knob(
        4096, "tokens per forward pass; a longer input gets a separate pass", least=1
    )

    def __post_init__(self):
        super().__post_init__()
        if not self.tasks:
            raise ValueError(
                "which tasks? give --tasks=arc_easy,wikitext or others "
                "(lm-eval ls tasks lists them)"
            )


def command(args, run):
    """Scores on public benchmarks, by lm-evaluation-harness (pip install lm-eval)."""
    evaluator = files.optional("lm_eval.evaluator")
    names, manager = args.tasks.split(","), task_manager(args)
    # the class is made here, because the package of its base is optional
    base = files.optional("lm_eval.api.model").TemplateLM
    model = type("Model", (Answering, base), {})(run, args)
    # stdout has only the table
    with value_zero(run, args.zero_above), contextlib.redirect_stdout(sys.stderr):
        found = evaluator.simple_evaluate(
            model,
            tasks=names,
            task_manager=manager,
            limit=args.limit or None,
            log_samples=False,
            num_fewshot=None if args.num_fewshot < 0 else args.num_fewshot,
        )
    if not run.machine.main:  # only the first rank gets the scores
        return None, None
    numbers = {"length": model.length, "zero_above": args.zero_above}
    numbers["questions"], rows = {}, []
    for task, scores in found["results"].items():
        count = found["n-samples"].get(task, {}).get("effective")  # a group of tasks has none
        numbers["questions"][task] = count
        for key, value in scores.items():  # "acc,none", "acc_stderr,none"; or a filter's name
            measure, comma, way = key.partition(",")
            if comma and not measure.endswith("_stderr"):
                name = f"{task} {measure}" if way == "none" else f"{task} {measure} {way}"
                error = scores.get(f"{measure}_stderr,{way}")  # "N/A" if there is none
                error = error if isinstance(error, float) and math.isfinite(error) else None
                numbers |= {name: float(value), f"{name} +-": error}
                rows.append([name, None if count is None else str(count), float(value), error])
    text = table(rows, ["task", "questions", "score", "+-"])
    return numbers, f"{text}\n\n+-: standard error of the score"


def value_zero(run, threshold):
    """The context in which heads with an alpha_sink above this threshold read the first token's
    value as 0; all heads if it is 0. The heads are chosen on fixed windows of the run's data, not
    on the tasks. Raises ValueError if the sink is not the first token."""
    if threshold >= 1:
        return contextlib.nullcontext()
    chosen = every_head(run.model)
    if threshold:
        if any(b.attn.has_extra_key or b.attn.sink_tokens for b in run.model.transformer.h):
            raise ValueError(
                f"--zero_above={threshold} chooses heads by the weight on the first token, but the "
                f"sink of --attn={run.model.config.attn} is an extra key or a sink token: give "
                "--zero_above=0 for all heads, or leave it out"
            )
        length = min(run.window(0), 256)
        layers = probe(run.model, run.split("val"), run.machine, 16, 4, length, local=1)["layers"]
        chosen = torch.tensor([layer["alpha_sink"] for layer in layers]) > threshold
    run.note(f"the first value is 0 in {chosen.sum()} of {chosen.numel()} heads")
    return instead(run.model, value_zeroed(chosen, to_itself=False))


def task_manager(args):
    """The harness's list of tasks, with those of --include_path. Raises ValueError on an unknown
    task."""
    tasks = files.optional("lm_eval.tasks")
    for defaults in (False, True):  # the harness's own tasks take seconds to list
        manager = tasks.TaskManager(
            include_path=args.include_path or None, include_defaults=defaults
        )
        unknown = [name for name in args.tasks.split(",") if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise ValueError(
        f"unknown task {unknown[0]!r}: lm-eval ls tasks lists the names, and "
        "--include_path=FOLDER adds tasks"
    )


class Answering:
    """The requests of lm_eval.api.model.TemplateLM, answered by a run."""

    def __init__(self, run, args):
        super().__init__()
        self.run, self.batch_size = run, args.batch_size
        self.length = args.length or run.model.config.block_size
        run.check_positions(self.length)
        self.coder = text_tokenizer(run)
        self.ends = {self.coder.separator, *run.meta.get("ends", [])}  # of a text

    @property
    def eot_token_id(self):
        return self.coder.separator  # it also precedes a text without a context

    def tok_encode(self, text, **_):
        return self.coder.encode(text).tolist()

    def ask(self, requests):
        return answers(self.run.model, self.run.machine, requests, self.batch_size)

    def _loglikelihood_tokens(self, requests, **_):
        asked = []
        for _, context, continuation in requests:
            count, ids = len(continuation), (context or [self.eot_token_id]) + continuation
            if not 0 < count <= self.length:
                raise ValueError(
                    f"a continuation has {count} tokens where the model can predict "
                    f"1 to {self.length}: give a larger --length, or leave this task "
                    "out of --tasks"
                )
            asked.append((ids[-self.length - 1 :], count))
        return [(answer.loglik, answer.greedy) for answer in self.ask(asked)]

    def loglikelihood_rolling(self, requests, **_):
        """The log-likelihood of each text, in windows that predict every token once."""
        windows_of = files.optional("lm_eval.utils").get_rolling_token_windows
        texts = []
        for request in requests:
            ids = self.coder.encode(request.args[0]).tolist()
            windows = windows_of(ids, self.eot_token_id, self.length, context_len=1)
            texts.append([([*inputs, new[-1]], len(new)) for inputs, new in windows])
        heard = iter(self.ask(list(itertools.chain(*texts))))
        return [sum(next(heard).loglik for _ in windows) for windows in texts]

    def generate_until(self, requests, **_):
        texts = []  # the requests of a task have the same settings
        for settings, alike in itertools.groupby(requests, lambda request: request.args[1]):
            texts += self.continued([request.args[0] for request in alike], settings)
        return texts

    def continued(self, prompts, settings):
        """The texts that follow these prompts, each up to its first stop string. A prompt that is
        too long loses its beginning."""
        settings = files.optional("lm_eval.models.utils").normalize_gen_kwargs(settings, 256)
        count, until = settings["max_gen_toks"], [text for text in settings["until"] if text]
        if count >= self.length:
            raise ValueError(
                f"an answer of {count} tokens leaves no room for its prompt: give a larger "
                f"--length than {self.length}, or leave this task out of --tasks"
            )
        stop = set(self.ends)  # also ids whose own text contains a stop string
        for i in range(self.coder.vocab_size):
            if any(text in self.coder.decode([i]) for text in until):
                stop.add(i)
        how = {"temperature": 0, "stop": sorted(stop)}
        for name in ("temperature", "top_k", "top_p"):
            if name in settings:
                how[name] = settings[name]
        asked = [self.tok_encode(prompt)[count - self.length :] for prompt in prompts]
        asked = [ids or [self.eot_token_id] for ids in asked]
        said = generated(self.run.model, self.run.machine, asked, self.batch_size, count, **how)
        texts = []
        for ids in said:
            ids = itertools.takewhile(lambda i: i not in self.ends, ids)
            text = self.coder.decode(list(ids))
            texts.append(min((text.partition(word)[0] for word in until), key=len, default=text))
        return texts
