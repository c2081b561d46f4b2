"""SCROLLS: summaries of long documents, and questions about them (Shaham et al. 2022). Threshold Differential
Attention, 2601.12145, table 3, reports ROUGE-1 of qmsum, summ_screen_fd and gov_report, and F1 of qasper.

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

from common import files
from common.flags import Knobs, knob
from data import tokens
from evals.instrument import mean_and_error, table
from evals.likelihood import Request, generated, listen, text_tokenizer


class Task(NamedTuple):
    measure: str                                # rouge, f1 or exact
    prompt: str = "Question: {}\nAnswer:"       # follows the document
    choices: tuple = ()                         # the possible answers; in quality each question has its own


SUMMARY = "Question: What is a summary of the preceding text?\nAnswer:"
TASKS = {
    "gov_report": Task("rouge", SUMMARY),
    "summ_screen_fd": Task("rouge", SUMMARY),
    "qmsum": Task("rouge"),
    "narrative_qa": Task("f1"),
    "qasper": Task("f1"),
    "quality": Task("exact"),
    "contract_nli": Task("exact", "Hypothesis: {}\nConclusion:", ("Not mentioned", "Entailment", "Contradiction")),
}
TITLES = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L", "f1": "F1", "exact": "exact"}


@dataclass
class Scrolls(Knobs):
    """Flags of scrolls"""
    source: str = knob("", "folder of the benchmark's files (evals/scrolls.py says where to get them)")
    tasks: str = knob("all", "tasks, separated by commas; all: every task whose file exists")
    split: str = knob("validation", "which file of each task; the answers of the test file are not public",
                      ("validation", "train"))
    limit: int = knob(0, "questions of each task, spread evenly; 0: all")
    length: int = knob(0, "most tokens of prompt and answer together; 0: block_size. A prompt that is too long "
                          "loses the beginning of its document")
    tokens: int = knob(256, "most tokens of an answer (summaries of gov_report have about 600)", least=1)
    rank: bool = knob(True, "in quality and contract_nli, answer with the likeliest choice; 0: generate the answer")
    bos: bool = knob(False, "put the tokenizer's separator before each prompt")

    def __post_init__(self):
        super().__post_init__()
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
    paths = find(Path(args.source), args.tasks, args.split)
    if any(TASKS[name].measure == "rouge" for name in paths):
        files.optional("rouge_score")           # fail now, not after the last answer
    sets, tasks = {name: read_questions(path, name, args.limit) for name, path in paths.items()}, {}
    for name, questions in sets.items():
        texts, cut = replies(run, coder, questions, args, length)
        tasks[name] = {"questions": len(questions), "cut": float(np.mean(cut))}
        tasks[name] |= score(TASKS[name].measure, texts, questions)
    numbers = {"length": length, "split": args.split, "tasks": tasks}
    if len(tasks) == len(TASKS):
        numbers["score"] = float(np.mean([result["score"] for result in tasks.values()]))
    used = {name for result in tasks.values() for name in result}
    parts, rows = [part for part in TITLES if part in used], []
    for name, result in (tasks | {"mean": numbers}).items():
        if "score" in result:                   # the mean exists if all tasks do
            cells = [result.get(key) for part in parts for key in (part, f"{part}_error")] + [result["score"]]
            counts = [str(result["questions"]), f"{result['cut']:.0%}"] if name in tasks else [None, None]
            rows.append([name, *counts, *(None if cell is None else f"{cell:.2f}" for cell in cells)])
    header = [title for part in parts for title in (TITLES[part], "+-")]
    return numbers, (
        f"{table(rows, ['task', 'questions', 'cut', *header, 'score'])}\n\ncut: share of prompts too long for {length} "
        "tokens, which lost their beginning\nscore: that of the benchmark; for ROUGE the geometric mean of the three")


def find(source, names, split):
    """{task: its file} in a folder. Raises ValueError if a task in names has no file, or if no task has one."""
    all_tasks = "all" in names.split(",")
    places = {name: [path for path in (source / name / f"{split}.jsonl", source / f"{name}.jsonl") if path.is_file()]
              for name in (TASKS if all_tasks else names.split(","))}
    missing = [name for name, paths in places.items() if not paths]
    if missing and (not all_tasks or len(missing) == len(TASKS)):
        raise ValueError(f"--source={source} holds neither {missing[0]}/{split}.jsonl nor {missing[0]}.jsonl: unpack "
                         "the benchmark's zip files there (evals/scrolls.py has their addresses)")
    return {name: paths[0] for name, paths in places.items() if paths}


class Question(NamedTuple):
    prompt: str
    answers: list
    choices: list                               # empty: any generated text


def read_questions(path, name, limit=0):
    """The questions of a file in their order, or `limit` of them, spread evenly. Lines of one id are one question with
    several answers. A prompt is the document and then the question. In the file the question comes first, then (for
    quality) the four choices, then the document, with empty lines between them."""
    def strings(row):
        found = [row[name] for name in ("id", "input", "output")]
        if not all(isinstance(value, str) for value in found):
            raise ValueError("its id, input and output must be strings")
        return found

    inputs, answers, found = {}, {}, []
    for number, text, output in tokens.jsonl_rows(path, strings, f"row of {name}"):
        inputs.setdefault(number, text)
        answers.setdefault(number, []).append(output)
    if not inputs:
        raise ValueError(f"{path} is empty: unpack the benchmark's zip file again")
    _, prompt, choices = TASKS[name]
    for number, text in inputs.items():
        question = ""
        if prompt != SUMMARY:
            question, _, text = text.partition("\n\n")
        if name == "quality":
            parts = re.match(r"\s*\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(.*?)\n\n(.*)", text, re.DOTALL)
            if not parts:
                raise ValueError(f"{path} has a question without choices (A) to (D): unpack the benchmark's file again")
            choices, text = [" ".join(choice.split()) for choice in parts.groups()[:4]], parts[5].strip()
            question += "".join(f"\n({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
        found.append(Question(f"{text}\n\n{prompt.format(question)}", answers[number], [*choices]))
    return [found[i] for i in np.linspace(0, len(found) - 1, min(limit, len(found))).astype(int)] if limit else found


def replies(run, coder, questions, args, length):
    """The model's answers to the questions of a task, and whether each prompt was too long. Such a prompt keeps its
    last tokens, so the question stays."""
    groups, texts, first = [], [], [coder.separator] if args.bos else []
    for question in questions:                  # one request for each choice, or the prompt alone for generation
        choices = [coder.encode(f" {choice}").tolist() for choice in question.choices if args.rank] or [[]]
        room = length - len(first) - (max(map(len, choices)) or args.tokens)
        if room < 1:
            raise ValueError(f"a choice is too long for --length={length}: give a larger --length")
        prompt = coder.encode(question.prompt).tolist()
        groups.append([Request(first + prompt[-room:] + ids, len(ids), len(prompt) > room) for ids in choices])
    if args.rank and questions[0].choices:
        heard = listen(run.model, groups, run.machine, 1, "scrolls")
        for question, answers in zip(questions, heard, strict=True):
            scores = [answer.loglik / len(choice) for answer, choice in zip(answers, question.choices, strict=True)]
            texts.append(question.choices[int(np.argmax(scores))])
    else:                                       # an answer ends with its text, or its line
        ends = {coder.separator, *run.meta.get("ends", [])}
        stop = sorted(ends | {i for i in range(coder.vocab_size) if "\n" in coder.decode([i])})
        prompts = [request.ids for [request] in groups]
        for ids in generated(run.model, run.machine, prompts, args.tokens, stop):
            texts.append(coder.decode([i for i in ids if i not in ends]).partition("\n")[0].strip())
    return texts, [group[0].cut for group in groups]


def score(measure, texts, questions):
    """The scores of a task in percent, {measure, measure_error, ..., "score"}. The best of a question's answers counts,
    for each part of the measure."""
    each = [best(measure, text, question.answers) for text, question in zip(texts, questions, strict=True)]
    found = {}
    for name in each[0]:
        found[name], found[f"{name}_error"] = mean_and_error([100 * scores[name] for scores in each])
    return found | {"score": float(np.prod([found[name] for name in each[0]]) ** (1 / len(each[0])))}


def best(measure, text, answers):
    """The best score over the answers, for each part of the measure: {part: 0 to 1}."""
    each = []
    for answer in answers:
        # SQuAD's normalisation: lower case, no punctuation, no articles
        said, right = (re.sub(r"\b(a|an|the)\b", " ", "".join(c for c in words.lower() if c not in string.punctuation))
                       .split() for words in (text, answer))
        if measure == "rouge":
            each.append(rouge(text, answer))
        elif measure == "exact":
            each.append({"exact": float(said == right)})
        else:                                   # harmonic mean of precision and recall of the words, with repetitions
            common = sum((Counter(said) & Counter(right)).values())
            each.append({"f1": 2 * common / (len(said) + len(right)) if common else 0.0})
    return {part: max(scores[part] for scores in each) for part in each[0]}


def rouge(text, answer):
    """The F-measures of ROUGE-1, 2 and L (Lin 2004), by the package of Google Research, without stemming."""
    scorer = files.optional("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    return {name: found.fmeasure for name, found in scorer.score(answer, text).items()}
