"""Trivial and linear baselines of a task: the majority class (regression: the mean) and a linear
model, fitted in seconds. A network that does not beat them has learned little.

    python baseline.py --task text_demo
    python baseline.py --task text --words
    python baseline.py --task file:my.npz --label-fraction 0.05

Symbols: logistic regression on the n-grams of 1 to 5 symbols that occur, weighted by naive Bayes
(Wang and Manning 2012). --words uses a text's words and pairs of words instead. Samples: ridge
regression on random convolutions (ROCKET, Dempster et al. 2020). A label per position: ridge
regression on the symbols or samples around it. Splits are those of finetune.py. Validation chooses
the strength of regularisation; the test split is evaluated once. --out DIR writes result.json and
predictions.npz as finetune.py does, with start "baseline"."""

# First, so that there is no traceback if Ctrl-C comes while the rest is imported.
import time
from pathlib import Path

import numpy as np
import pandas
import torch
from scipy import sparse
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression, Ridge, RidgeClassifier
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from data import open_task
from engine.feed import drawing
from engine.flags import between, completed
from engine.folder import Folder, environment
from engine.processes import guarded
from engine.targets import KINDS
from files import Parser, UserError, read_json, write_json
from pretrain import OBJECTIVES, denoising
from tasks import IGNORE, SPECIAL, full_name
from tasks.split import unequal

LONGEST = 5  # symbols of the longest n-gram
WORD = r"\w+|[^\w\s]"  # with --words: a word, or a punctuation mark
KERNELS = 1_000  # random convolutions, two features each
POSITIONS = 10_000_000  # larger data sets get fewer kernels, but at least a tenth


# ---- Symbols -------------------------------------------------------------------------------------


def ngrams(task, split, words=False):
    """Return which n-grams of symbols, or of words, occur: 0 or 1, sparse (examples, documents x
    hashes)."""
    k, rows = task.documents, range(len(split)) if split.chosen is None else split.chosen
    if words:  # the encoded text; special symbols are blanks
        letters = np.array(
            [ord(" ")] * len(SPECIAL) + [*map(ord, task.symbols[len(SPECIAL) :])], np.uint32
        )
        kind = dict(token_pattern=WORD, ngram_range=(1, 2), n_features=2**22)
    else:
        # a character per symbol, none of them a blank
        letters = np.arange(task.vocab, dtype=np.uint32) + 0x10000
        kind = dict(analyzer="char", ngram_range=(1, LONGEST), lowercase=False)
    texts = [
        letters[split.x[split.offsets[j] : split.offsets[j + 1]]].tobytes().decode("utf-32-le")
        for i in rows
        for j in range(k * i, k * i + k)
    ]
    vectors = HashingVectorizer(
        norm=None, binary=True, alternate_sign=False, dtype=np.float32, **kind
    ).transform(texts)
    return sparse.hstack([vectors[i::k] for i in range(k)], "csr")


class NaiveBayes(TransformerMixin, BaseEstimator):
    """Weights of n-grams: the logarithm of how much more frequent an n-gram is in one class than in
    the others."""

    def fit(self, x, y):
        # (2, features)
        counts = np.stack([1 + np.asarray(x[y == one].sum(0))[0] for one in (0, 1)])
        self.ratio = np.log(counts[1] / counts[1].sum()) - np.log(counts[0] / counts[0].sum())
        return self

    def transform(self, x):
        return x.multiply(self.ratio.astype(np.float32)).tocsr()


# ---- Samples -------------------------------------------------------------------------------------


def random_kernels(length, channels, count=KERNELS):
    """Draw random convolutions -> [(weights (c, channels, width), biases (c,), dilation, padding)].
    A kernel reads a random subset of the channels."""
    rng, found, shapes = np.random.default_rng(0), [], []
    for width in (7, 9, 11):
        dilations = 2 ** np.arange(1 + int(np.log2(max(1, (length - 1) / (width - 1)))))
        shapes += [
            (width, int(dilation), padded)
            for dilation in dilations
            for padded in (True, False)
            if padded or (width - 1) * dilation < length
        ]
    for some, (width, dilation, padded) in zip(
        np.array_split(np.arange(count), min(count, len(shapes))), shapes
    ):
        weights = rng.standard_normal((len(some), channels, width))
        weights -= weights.mean(-1, keepdims=True)
        how_many = 2 ** rng.uniform(0, np.log2(min(channels, width) + 1), (len(some), 1))
        weights *= (rng.random((len(some), channels)).argsort(1).argsort(1) < how_many.astype(int))[
            ..., None
        ]
        biases = rng.uniform(-1, 1, len(some))
        found.append(
            (
                torch.from_numpy(weights).float(),
                torch.from_numpy(biases).float(),
                dilation,
                padded * (width - 1) * dilation // 2,
            )
        )
    return found


def convolved(task, split, count=KERNELS):
    """Return two features per random convolution, maximum and share of positive values: (examples,
    2 count)."""
    convolutions, found = random_kernels(task.length, task.channels, count), []
    for part in np.array_split(
        np.arange(len(split)), min(len(split), -(-len(split) * task.length // 50_000))
    ):
        batch = split.batch(part)
        x = torch.zeros(len(part), task.length, task.channels)  # same length in each part
        for one, series, length in zip(
            x, batch.samples, batch.lengths if task.ragged else [task.length] * len(part)
        ):
            one[:length] = series[:length].nan_to_num()  # missing: the mean
        some = []
        for weights, biases, dilation, padding in convolutions:
            # (b, c, l)
            y = torch.nn.functional.conv1d(x.transpose(1, 2), weights, biases, 1, padding, dilation)
            some += [y.amax(-1), (y > 0).float().mean(-1)]
        found.append(torch.cat(some, 1))
    return torch.cat(found).numpy()


# ---- A label per position ------------------------------------------------------------------------


def neighbours(task, split, width=8):
    """Return what lies around every labelled position, up to `width` to each side: symbols, one-hot
    and sparse, or samples, (positions, features)."""
    found = []
    for part in np.array_split(np.arange(len(split)), -(-len(split) // 500)):
        batch = split.batch(part)
        # (b, l, c)
        x = batch.symbols[..., None] if batch.samples is None else batch.samples.nan_to_num()
        rows, places = np.nonzero(batch.y.numpy() != IGNORE)
        around = np.pad(x.numpy(), ((0, 0), (width, width), (0, 0)))
        found.append(
            np.stack([around[rows, places + i] for i in range(2 * width + 1)], 1).reshape(
                len(rows), -1
            )
        )
    found = np.concatenate(found)  # (m, (2 width + 1) c)
    if batch.samples is not None:
        return found
    symbols = [np.arange(task.vocab)] * found.shape[1]
    # (m, vocab (2 width + 1))
    return OneHotEncoder(categories=symbols, dtype=np.float32).fit_transform(found)


# ---- Denoising -----------------------------------------------------------------------------------


def interpolated(task, split, most=1_000):
    """Return the `val_score` of pretraining, minus the mean squared error on hidden samples, that
    two guesses have: linear interpolation between the visible neighbours, and the mean."""
    rows = np.arange(min(len(split), most))
    batch = split.batch(rows)
    pretraining = completed("pretrain", OBJECTIVES, objective="masked", loss="l1", mask=task.mask)
    inputs, lengths, hidden, targets = denoising(
        pretraining, batch, drawing(task, batch, rows, rows, 0)
    )
    found, ends = [], [inputs.shape[1]] * len(rows) if lengths is None else lengths.tolist()
    for x, y, some, end in zip(inputs.double().numpy(), targets.numpy(), hidden.numpy(), ends):
        # (l, channels)
        guess = pandas.DataFrame(x[:end]).interpolate(limit_direction="both").fillna(0)
        # (2, hidden positions m)
        found.append(np.stack((y[:end] - guess, y[:end]))[:, some[:end]].reshape(2, -1))
    errors = np.nanmean(np.square(np.concatenate(found, 1)), 1)  # without missing samples
    return dict(zip(("interpolation", "mean"), (-errors).tolist()))


# ---- Fitting -------------------------------------------------------------------------------------


def linear_models(task):
    """Return {strength of regularisation: linear model of a task's features}, the strongest first,
    which counts if scores are equal."""
    if task.kind == "positions":
        return {f"alpha {a:g}": RidgeClassifier(a) for a in (1e4, 1e2, 1)}
    if task.channels:
        kind = RidgeClassifier if task.classes else Ridge
        return {
            f"alpha {a:g}": make_pipeline(StandardScaler(), kind(a))
            for a in (1e5, 1e4, 1e3, 1e2, 1e1)
        }
    if not task.classes:
        return {f"alpha {a:g}": Ridge(a, solver="sparse_cg") for a in (1e3, 1e2, 1e1, 1)}
    return {
        f"C {c:g}": OneVsRestClassifier(
            make_pipeline(NaiveBayes(), LogisticRegression(C=c, solver="liblinear"))
        )
        for c in (0.001, 0.01, 0.1, 1)
    }


def fit(task, train, val, test, words=False):
    """Return predictions of the validation and the test split (n,), those of the majority class or
    the mean for the test split, the chosen regularisation, and whether balanced accuracy chose
    it."""
    splits, positions = (train, val, test), task.kind == "positions"
    count = KERNELS * POSITIONS // max(POSITIONS, task.length * sum(map(len, splits)))
    x, x_val, x_test = (
        neighbours(task, split)
        if positions
        else convolved(task, split, max(count, KERNELS // 10))
        if task.channels
        else ngrams(task, split, words)
        for split in splits
    )
    if not task.channels and not positions:
        some = np.flatnonzero(x.getnnz(0) > 1)  # n-grams in at least two training examples
        x, x_val, x_test = x[:, some], x_val[:, some], x_test[:, some]
    y, fitted = train.labels(), []
    y = y[y != IGNORE] if positions else y.astype(int) if task.kind == "labels" else y

    def whole(found, split):
        """Give predictions the shape of the targets."""
        if not positions:
            return found
        placed = np.full(split.y.shape, IGNORE)
        placed[split.y != IGNORE] = found
        return placed

    for strength, model in linear_models(task).items():
        model.fit(x, y)
        fitted.append((model, whole(model.predict(x_val), val), strength))
    balanced = task.kind == "class" and unequal(y)
    model, guess, strength = max(
        fitted, key=lambda one: [*scores(task, val.y, one[1], balanced).values()][-1]
    )
    constant = np.bincount(y).argmax() if y.ndim == 1 and task.classes else y.mean(0)
    if task.kind == "labels":  # the labels, the commonest first, whose constant prediction is best
        best = max(
            range(1, len(constant) + 1),
            key=lambda k: np.sort(constant)[-k:].sum() / (k + constant.sum()),
        )
        constant = constant >= np.sort(constant)[-best]
    return (
        guess,
        whole(model.predict(x_test), test),
        np.broadcast_to(constant, test.y.shape),
        strength,
        balanced,
    )


def scores(task, y, guess, balanced=False):
    """Return {name: score} for the task's kind of targets, the one that counts last."""
    error = np.square(np.float64(guess) - y).sum() if task.kind == "number" else None
    return KINDS[task.kind].scores(y, guess, error, balanced)


def main(argv=None):
    parser = Parser(examples=True, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--task", required=True, help="task, as for finetune.py")
    parser.add_argument(
        "--label-fraction", type=between(float, 1e-9, 1), help="share of labels, as for finetune.py"
    )
    parser.add_argument(
        "--words", action="store_true", help="texts: words and pairs of words instead of characters"
    )
    parser.add_argument("--data-dir", default="data", help="where prepared data sets live")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/result.json")
    args, start = parser.parse_args(argv), time.perf_counter()
    args.task = full_name(args.task)
    task, train, val, test = open_task(
        args.task, args.data_dir, None, args.label_fraction, labels=True
    )
    if args.words and (task.channels or task.between):
        raise UserError(f"--words is for texts, and {args.task} holds none; leave it out")
    name = (
        "neighbours"
        if task.kind == "positions"
        else "random convolutions"
        if task.channels
        else ("words and pairs of words" if args.words else f"n-grams of 1 to {LONGEST}")
    )
    changed = {"label_fraction": args.label_fraction} if args.label_fraction else {}
    identity = dict(task=args.task, model=name, data=task.data, changed=changed)
    there = (
        read_json(args.out / "result.json")
        if args.out and (args.out / "result.json").exists()
        else {}
    )
    if identity.items() <= there.items():
        print(f"{args.out} is finished; nothing to do")
        return
    val_guess, guess, constant, strength, balanced = fit(task, train, val, test, args.words)
    field, seconds, found = KINDS[task.kind].score, time.perf_counter() - start, {}
    for of, y, each in (
        ("val", val.y, val_guess),
        ("test", test.y, guess),
        ("constant", test.y, constant),
    ):
        found |= {
            f"{of}_{score}": value for score, value in scores(task, y, each, balanced).items()
        }
    hidden = {"denoising": interpolated(task, val)} if task.channels and task.mask else {}
    names = task.names or range(task.classes)
    always = {"number": "mean label", "labels": "best constant labels"}.get(task.kind) or (
        f"majority class ({names[int(constant.flat[0])]})"
    )
    print(
        f"{args.task}, {len(train):,} training and {len(test):,} test examples, test {field}\n"
        f"{always}: {found[f'constant_{field}']:.4f}\n"
        f"linear model of {name}: {found[f'test_{field}']:.4f} (validation "
        f"{found[f'val_{field}']:.4f}, {strength}), "
        f"{seconds:.0f} s"
    )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(
            args.out / "result.json",
            found
            | identity
            | hidden
            | dict(
                length=task.length,
                classes=task.classes,
                regularisation=strength,
                objective="none",
                start="baseline",
                seed=0,
                steps=0,
                train_examples=len(train),
                seconds=round(seconds, 1),
                **Folder(args.out, True).predictions(task, test.y, guess),
                **environment(torch.device("cpu")),
            ),
        )


if __name__ == "__main__":
    guarded(main)
