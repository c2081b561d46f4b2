"""SCROLLS: summaries of long documents, and questions about them (Shaham et al. 2022).

Threshold Differential Attention, 2601.12145, table 3, reports four of its tasks: ROUGE-1 of qmsum, summ_screen_fd and
gov_report, and F1 of qasper.

The files are public, one zip for each task: https://scrolls-tau.s3.us-east-2.amazonaws.com/qasper.zip and so on. Unpack
them into a folder and name it with --source. A task is SOURCE/qasper/validation.jsonl or SOURCE/qasper.jsonl. Each line
has an id, an input and an output. Lines with the same id are one question with several answers.

Scores are those of the benchmark's own evaluator, in percent. The best of a question's answers counts. ROUGE has no
stemming; a task's score is the geometric mean of the means of ROUGE-1, 2 and L. F1 of the words and exact match use
SQuAD's normalisation. Prompts are those of lm-evaluation-harness, which the paper uses: the document, the
question, "Answer:". The answer is generated up to the end of the line. In quality and contract_nli the model ranks the
choices by their likelihood per character; with --rank=0 it generates the answer.

Differs from lm-evaluation-harness: it also ranks the choices in the yes-or-no questions of qasper, and counts an empty
answer to the other questions as "Unanswerable".
"""
import re
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common import files
from common.flags import at_least, knob
from evals.instrument import mean_and_error, progress, table
from evals.passkey import Reader, forced, text_tokenizer


class Task(NamedTuple):
    measure: str                                # rouge, f1 or exact
    asked: bool = True                          # the input begins with a question
    choices: tuple | None = None                # the possible answers; (): each question has its own


TASKS = {
    "gov_report": Task("rouge", asked=False),
    "summ_screen_fd": Task("rouge", asked=False),
    "qmsum": Task("rouge"),
    "narrative_qa": Task("f1"),
    "qasper": Task("f1"),
    "quality": Task("exact", choices=()),
    "contract_nli": Task("exact", choices=("Not mentioned", "Entailment", "Contradiction")),
}


@dataclass
class Scrolls:
    """Flags of scrolls"""
    source: str = knob("", "folder of the benchmark's files (evals/scrolls.py says where to get them)")
    tasks: str = knob("all", "tasks, separated by commas; all: every task whose file exists")
    split: str = knob("validation", "which file of each task; the answers of the test file are not public",
                      ("validation", "train"))
    limit: int = knob(0, "questions of each task, spread evenly; 0: all")
    length: int = knob(0, "most tokens of prompt and answer together; 0: block_size. A prompt that is too long "
                          "loses the beginning of its document")
    tokens: int = knob(256, "most tokens of an answer (summaries of gov_report have about 600)")
    rank: bool = knob(True, "in quality and contract_nli, answer with the likeliest choice; 0: generate the answer")
    bos: bool = knob(False, "put the tokenizer's separator before each prompt")

    def __post_init__(self):
        at_least(self, limit=0, length=0, tokens=1)
        if not self.source:
            raise ValueError("--source is missing: give --source=FOLDER, where you unpacked the benchmark's public zip "
                             "files (evals/scrolls.py has the addresses)")
        for name in self.tasks.split(","):
            if name not in (*TASKS, "all"):
                raise ValueError(f"unknown task {name!r}: choose from all, {', '.join(TASKS)}")


def command(args, run):
    """Test the model on summaries of long documents and questions about them, scored as in the SCROLLS benchmark."""
    coder, length = text_tokenizer(run), args.length or run.model.config.block_size
    run.check_positions(length)
    if length <= args.tokens:
        raise ValueError(f"{length} tokens are not enough for a prompt and an answer of {args.tokens}: give a larger "
                         "--length, or fewer --tokens")
    questions = read_tasks(args)
    replies = {name: [] for name in questions}
    for name, question in progress([(n, q) for n, group in questions.items() for q in group], run.machine.main):
        replies[name].append(reply(run, coder, question, args, length))
    results = {name: {"questions": len(group), "cut": float(np.mean([r.cut for r in replies[name]]))}
               | score(TASKS[name].measure, replies[name], group) for name, group in questions.items()}
    numbers = {"length": length, "split": args.split, "tasks": results}
    if len(results) == len(TASKS):
        numbers["score"] = float(np.mean([result["score"] for result in results.values()]))
    return numbers, tell(args, {str(run.out_dir): numbers})


# ------------------------------------------------------------------------------------------------------------ the files


class Question(NamedTuple):
    prompt: str
    answers: list
    choices: list                               # empty: any generated text


def read_tasks(args):
    """{task: its questions}."""
    paths = find(Path(args.source), args.tasks, args.split)
    if any(TASKS[name].measure == "rouge" for name in paths):
        files.optional("rouge_score")           # fail now, not after the last answer
    return {name: spread(read_questions(path, TASKS[name]), args.limit) for name, path in paths.items()}


def find(source, names, split):
    """{task: its file} in a folder. Raises ValueError if a task in names has no file, or if no task has one."""
    wanted = list(TASKS) if "all" in names.split(",") else names.split(",")
    places = {name: (source / name / f"{split}.jsonl", source / f"{name}.jsonl") for name in wanted}
    found = {name: path for name, paths in places.items() for path in reversed(paths) if path.is_file()}
    missing = [name for name in wanted if name not in found]
    if missing and ("all" not in names.split(",") or not found):
        raise ValueError(f"--source={source} holds neither {missing[0]}/{split}.jsonl nor {missing[0]}.jsonl: unpack "
                         "the benchmark's zip files there (evals/scrolls.py has their addresses)")
    return found


def read_questions(path, task):
    """The questions of a file in their order; lines of one id are one question with several answers."""
    inputs, answers = {}, {}
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                name, text, output = read_line(path, number, line)
                inputs.setdefault(name, text)
                answers.setdefault(name, []).append(output)
    if not inputs:
        raise ValueError(f"{path} is empty: unpack the benchmark's zip file again")
    return [make_question(text, answers[name], task, path) for name, text in inputs.items()]


def read_line(path, number, line):
    try:
        row = files.parsed(line)
        found = [row[key] for key in ("id", "input", "output")]
        if not all(isinstance(value, str) for value in found):
            raise TypeError
        return found
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{path}, line {number} is no JSON object with the strings "id", "input" and "output": '
                         "name the folder of the SCROLLS benchmark's files") from None


def make_question(text, answers, task, path):
    """A Question, whose prompt is the document and then the question. In the file the question comes first, then (for
    quality) the four choices, then the document, with empty lines between them."""
    if not task.asked:
        return Question(f"{text}\n\nQuestion: What is a summary of the preceding text?\nAnswer:", answers, [])
    question, _, text = text.partition("\n\n")
    if task.choices is None:
        return Question(f"{text}\n\nQuestion: {question}\nAnswer:", answers, [])
    if task.choices:
        return Question(f"{text}\n\nHypothesis: {question}\nConclusion:", answers, list(task.choices))
    parts = re.match(r"\s*\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(.*?)\n\n(.*)", text, re.DOTALL)
    if not parts:
        raise ValueError(f"{path} has a question without four choices (A) to (D): unpack the benchmark's file again")
    choices = [" ".join(choice.split()) for choice in parts.groups()[:4]]
    shown = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return Question(f"{parts[5].strip()}\n\nQuestion: {question}\n{shown}\nAnswer:", answers, choices)


def spread(rows, limit):
    """`limit` of the rows, spread evenly; 0: all."""
    return [rows[i] for i in np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int)] if limit else rows


# ---------------------------------------------------------------------------------------------------------- the answers


class Reply(NamedTuple):
    text: str
    cut: bool                                   # the prompt was too long


def reply(run, coder, question, args, length):
    """The model's answer. A prompt that is too long keeps its last tokens, so the question stays."""
    ranked, first = question.choices and args.rank, [coder.separator] if args.bos else []
    choices = [coder.encode(f" {choice}").tolist() for choice in question.choices] if ranked else []
    room = length - max(map(len, choices), default=args.tokens) - len(first)
    prompt = coder.encode(question.prompt).tolist()
    if room < 1:
        raise ValueError(f"a choice is too long for --length={length}: give a larger --length")
    reader, device = Reader(run.model), run.machine.device
    with run.machine.autocast():
        logits = reader.read(torch.tensor([first + prompt[-room:]], device=device))
        if ranked:
            likely = [forced(reader.fork(), logits, torch.tensor([ids], device=device))[0].item() for ids in choices]
            per_character = [total / len(text) for total, text in zip(likely, question.choices, strict=True)]
            text = question.choices[int(np.argmax(per_character))]
        else:
            ends = {coder.separator, *run.meta.get("ends", [])}
            ids = reader.go_on(logits, args.tokens, lambda i: i in ends or "\n" in coder.decode([i]))
            text = coder.decode([i for i in ids[0].tolist() if i not in ends]).partition("\n")[0]
    return Reply(text.strip(), len(prompt) > room)


# ----------------------------------------------------------------------------------------------------------- the scores


def score(measure, replies, questions):
    """The scores of a task in percent: {measure, measure_error, ..., "score"}."""
    each = [best(measure, reply.text, question.answers) for reply, question in zip(replies, questions, strict=True)]
    found = {}
    for name in each[0]:
        found[name], found[f"{name}_error"] = mean_and_error([100 * scores[name] for scores in each])
    return found | {"score": float(np.prod([found[name] for name in each[0]]) ** (1 / len(each[0])))}


def best(measure, text, answers):
    """The best score over the answers, for each part of the measure: {part: 0 to 1}."""
    each = [MEASURES[measure](text, answer) for answer in answers]
    return {part: max(scores[part] for scores in each) for part in each[0]}


def rouge(text, answer):
    """The F-measures of ROUGE-1, 2 and L (Lin 2004), by the package of Google Research, without stemming."""
    scorer = files.optional("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    return {name: found.fmeasure for name, found in scorer.score(answer, text).items()}


def f1(text, answer):
    """Harmonic mean of precision and recall of the words, with repetitions (SQuAD)."""
    said, right = normalized(text).split(), normalized(answer).split()
    common = sum((Counter(said) & Counter(right)).values())
    return {"f1": 2 * common / (len(said) + len(right)) if common else 0.0}


def exact(text, answer):
    return {"exact": float(normalized(text) == normalized(answer))}


def normalized(text):
    """Lower case, no punctuation, no articles, single spaces (SQuAD)."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


MEASURES = {"rouge": rouge, "f1": f1, "exact": exact}
TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "f1": "F1", "exact": "exact"}


def tell(args, found):
    """A table with a row for each run and task."""
    several, rows = len(found) > 1, []
    shown = {name: title for name, title in TITLES.items()
             if any(name in result for numbers in found.values() for result in numbers["tasks"].values())}
    for place, numbers in found.items():
        for name, result in numbers["tasks"].items():
            cells = [percent(result.get(part + end)) for part in shown for end in ("", "_error")]
            rows.append([place] * several + [name, str(result["questions"]), f"{result['cut']:.0%}", *cells,
                                             percent(result["score"])])
        if "score" in numbers:
            rows.append([place] * several + ["mean", "", ""] + [""] * 2 * len(shown) + [percent(numbers["score"])])
    header = ["run"] * several + ["task", "questions", "cut"] + [c for title in shown.values() for c in (title, "+-")]
    lengths = sorted({str(numbers["length"]) for numbers in found.values()})
    return (f"{table(rows, [*header, 'score'])}\n\ncut: share of prompts too long for {' or '.join(lengths)} tokens, "
            "which lost their beginning\nscore: that of the benchmark; for ROUGE the geometric mean of the three")


def percent(value):
    return None if value is None else f"{value:.2f}"
