"""Trivial and linear baselines of a task: the majority class (regression: the mean) and a linear model, fitted in
seconds. A network that does not beat them has learned little.

    python baseline.py --task text_demo
    python baseline.py --task text --words
    python baseline.py --task file:my.npz --label-fraction 0.05

Symbols: logistic regression on the n-grams of 1 to 5 symbols that occur, weighted by naive Bayes (Wang and Manning
2012). --words uses a text's words and pairs of words instead. Samples: ridge regression on random convolutions (ROCKET,
Dempster et al. 2020). Splits are those of finetune.py. Validation chooses the strength of regularisation; the test
split is evaluated once. --out DIR writes result.json and predictions.npz as finetune.py does, with start "baseline".
"""
# First, so that there is no traceback if Ctrl-C comes while the rest is imported.
from files import Parser, UserError, read_json, write_json

import time
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.metrics import r2_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from data import open_task
from engine.flags import between
from engine.folder import Folder, environment
from engine.processes import guarded
from tasks import SPECIAL
from tasks.split import balanced_accuracy, unequal

LONGEST = 5                                    # symbols of the longest n-gram
WORD = r"\w+|[^\w\s]"                          # with --words: a word, or a punctuation mark
KERNELS = 1_000                                # random convolutions, two features each
POSITIONS = 10_000_000                         # larger data sets get fewer kernels, but at least a tenth


# ---- Symbols ---------------------------------------------------------------------------------------------------------

def ngrams(task, split, words=False):
    """Return which n-grams of symbols, or of words, occur: 0 or 1, sparse (examples, documents x hashes)."""
    k, rows = task.documents, range(len(split)) if split.chosen is None else split.chosen
    if words:                                                          # the encoded text; special symbols are blanks
        letters = np.array([ord(" ")] * len(SPECIAL) + [*map(ord, task.symbols[len(SPECIAL):])], np.uint32)
        kind = dict(token_pattern=WORD, ngram_range=(1, 2), n_features=2 ** 22)
    else:
        letters = np.arange(task.vocab, dtype=np.uint32) + 0x10000     # a character per symbol, none of them a blank
        kind = dict(analyzer="char", ngram_range=(1, LONGEST), lowercase=False)
    texts = [letters[split.x[split.offsets[j]:split.offsets[j + 1]]].tobytes().decode("utf-32-le")
             for i in rows for j in range(k * i, k * i + k)]
    vectors = HashingVectorizer(norm=None, binary=True, alternate_sign=False, dtype=np.float32, **kind).transform(texts)
    return sparse.hstack([vectors[i::k] for i in range(k)], "csr")


class NaiveBayes(TransformerMixin, BaseEstimator):
    """Weights of n-grams: the logarithm of how much more frequent an n-gram is in one class than in the others."""

    def fit(self, x, y):
        counts = np.stack([1 + np.asarray(x[y == one].sum(0))[0] for one in (0, 1)])          # (2, features)
        self.ratio = np.log(counts[1] / counts[1].sum()) - np.log(counts[0] / counts[0].sum())
        return self

    def transform(self, x):
        return x.multiply(self.ratio.astype(np.float32)).tocsr()


# ---- Samples ---------------------------------------------------------------------------------------------------------

def random_kernels(length, channels, count=KERNELS):
    """Draw random convolutions -> [(weights (c, channels, width), biases (c,), dilation, padding)]. A kernel reads a
    random subset of the channels."""
    rng, found, shapes = np.random.default_rng(0), [], []
    for width in (7, 9, 11):
        dilations = 2 ** np.arange(1 + int(np.log2(max(1, (length - 1) / (width - 1)))))
        shapes += [(width, int(dilation), padded) for dilation in dilations for padded in (True, False)
                   if padded or (width - 1) * dilation < length]
    for some, (width, dilation, padded) in zip(np.array_split(np.arange(count), min(count, len(shapes))), shapes):
        weights = rng.standard_normal((len(some), channels, width))
        weights -= weights.mean(-1, keepdims=True)
        how_many = 2 ** rng.uniform(0, np.log2(min(channels, width) + 1), (len(some), 1))
        weights *= (rng.random((len(some), channels)).argsort(1).argsort(1) < how_many.astype(int))[..., None]
        biases = rng.uniform(-1, 1, len(some))
        found.append((torch.from_numpy(weights).float(), torch.from_numpy(biases).float(), dilation,
                      padded * (width - 1) * dilation // 2))
    return found


def convolved(task, split, count=KERNELS):
    """Return two features per random convolution, maximum and share of positive values: (examples, 2 count)."""
    convolutions, found = random_kernels(task.length, task.channels, count), []
    for part in np.array_split(np.arange(len(split)), min(len(split), -(-len(split) * task.length // 50_000))):
        batch = split.batch(part)
        x = torch.zeros(len(part), task.length, task.channels)                                # same length in each part
        for one, series, length in zip(x, batch.samples, batch.lengths if task.ragged else [task.length] * len(part)):
            one[:length] = series[:length].nan_to_num()                # missing: the mean
        some = []
        for weights, biases, dilation, padding in convolutions:
            y = torch.nn.functional.conv1d(x.transpose(1, 2), weights, biases, 1, padding, dilation)     # (b, c, l)
            some += [y.amax(-1), (y > 0).float().mean(-1)]
        found.append(torch.cat(some, 1))
    return torch.cat(found).numpy()


# ---- Fitting ---------------------------------------------------------------------------------------------------------

def linear_models(task):
    """Return {strength of regularisation: linear model of a task's features}, the strongest first."""
    if task.channels:
        kind = RidgeClassifier if task.classes else Ridge
        return {f"alpha {a:g}": make_pipeline(StandardScaler(), kind(a)) for a in (1e5, 1e4, 1e3, 1e2, 1e1)}
    if not task.classes:
        return {f"alpha {a:g}": Ridge(a, solver="sparse_cg") for a in (1e3, 1e2, 1e1, 1)}
    return {f"C {c:g}": OneVsRestClassifier(make_pipeline(NaiveBayes(), LogisticRegression(C=c, solver="liblinear")))
            for c in (0.001, 0.01, 0.1, 1)}


def fit(task, train, val, test, words=False):
    """Return the validation score, the test split's predictions (n,), those of the majority class or the mean, and the
    chosen regularisation."""
    splits = train, val, test
    count = KERNELS * POSITIONS // max(POSITIONS, task.length * sum(map(len, splits)))
    x, x_val, x_test = (convolved(task, split, max(count, KERNELS // 10)) if task.channels else
                        ngrams(task, split, words) for split in splits)
    if not task.channels:
        some = np.flatnonzero(x.getnnz(0) > 1)                         # n-grams in at least two training examples
        x, x_val, x_test = x[:, some], x_val[:, some], x_test[:, some]
    y, fitted = train.labels(), []
    for strength, model in linear_models(task).items():
        model.fit(x, y)
        fitted.append((model, model.predict(x_val), strength))
    balanced = task.classes and unequal(y)
    model, guess, strength = max(fitted, key=lambda one: balanced_accuracy(val.y, one[1]) if balanced else
                                 score(task, val.y, one[1]))           # the first of equal ones
    constant = np.bincount(y).argmax() if task.classes else y.mean()
    return score(task, val.y, guess), model.predict(x_test), np.full(len(test), constant), strength


def score(task, y, guess):
    """Return the accuracy, or R2 for regression."""
    return float(np.mean(guess == y)) if task.classes else float(r2_score(y, guess)) if len(set(y)) > 1 else 0.0


def main(argv=None):
    parser = Parser(examples=True, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--task", required=True, help="task, as for finetune.py")
    parser.add_argument("--label-fraction", type=between(float, 1e-9, 1), help="share of labels, as for finetune.py")
    parser.add_argument("--words", action="store_true", help="texts: words and pairs of words instead of characters")
    parser.add_argument("--data-dir", default="data", help="where prepared data sets live")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/result.json")
    args, start = parser.parse_args(argv), time.perf_counter()
    task, train, val, test = open_task(args.task, args.data_dir, None, args.label_fraction, labels=True)
    name = "random convolutions" if task.channels else f"n-grams of 1 to {LONGEST}"
    if args.words:
        name = "words and pairs of words"
        if task.channels or task.between:
            raise UserError(f"--words is for texts, and {args.task} holds none; leave it out")
    changed = {"label_fraction": args.label_fraction} if args.label_fraction else {}
    identity = dict(task=args.task, model=name, data=task.data, changed=changed)
    there = read_json(args.out / "result.json") if args.out and (args.out / "result.json").exists() else {}
    if identity.items() <= there.items():
        print(f"{args.out} is finished; nothing to do")
        return
    val_score, guess, constant, strength = fit(task, train, val, test, args.words)
    field, seconds = "accuracy" if task.classes else "r2", time.perf_counter() - start
    found = {f"val_{field}": val_score, f"test_{field}": score(task, test.y, guess),
             f"constant_{field}": score(task, test.y, constant)}
    names = task.names or range(task.classes)
    always = f"majority class ({names[int(constant[0])]})" if task.classes else "mean label"
    print(f"{args.task}, {len(train):,} training and {len(test):,} test examples, test {field}\n"
          f"{always}: {found[f'constant_{field}']:.4f}\n"
          f"linear model of {name}: {found[f'test_{field}']:.4f} (validation {val_score:.4f}, {strength}), "
          f"{seconds:.0f} s")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "result.json", found | identity | dict(
            regularisation=strength, objective="none", start="baseline", seed=0, steps=0,
            train_examples=len(train), seconds=round(seconds, 1), **Folder(args.out, True).predictions(
                task.classes, test.y, guess),
            **environment(torch.device("cpu"))))


if __name__ == "__main__":
    guarded(main)
