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

import time
from dataclasses import replace
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
from engine.targets import kind_of_target
from files import Parser, UserError, read_json, write_json
from pretrain import OBJECTIVES, denoising
from tasks import IGNORE, SPECIAL, full_name

LONGEST = 5  # symbols of the longest n-gram
WORD = r"\w+|[^\w\s]"  # with --words: a word, or a punctuation mark
KERNELS = 1_000  # random convolutions, two features each
POSITIONS = 10_000_000  # larger data sets get fewer kernels, but at least a tenth


# ---- Symbols -------------------------------------------------------------------------------------


def ngrams(task, split, words=False):
    """Return which n-grams of symbols, or of words, occur: 0 or 1, sparse (examples, documents x
    hashes)."""
    if words:  # the encoded text; special symbols are blanks
        characters = [" "] * len(SPECIAL) + [*task.symbols[len(SPECIAL) :]]
        letters = np.array([*map(ord, characters)], np.uint32)
        options = dict(token_pattern=WORD, ngram_range=(1, 2), n_features=2**22)
    else:  # a character per symbol, none of them a blank
        letters = np.arange(task.vocab, dtype=np.uint32) + 0x10000
        options = dict(analyzer="char", ngram_range=(1, LONGEST), lowercase=False)
    k = task.documents
    texts = [
        letters[split.x[split.offsets[j] : split.offsets[j + 1]]].tobytes().decode("utf-32-le")
        for i in (range(len(split)) if split.chosen is None else split.chosen)
        for j in range(k * i, k * i + k)
    ]
    vectorizer = HashingVectorizer(
        norm=None, binary=True, alternate_sign=False, dtype=np.float32, **options
    )
    vectors = vectorizer.transform(texts)  # (examples x documents, hashes)
    return sparse.hstack([vectors[i::k] for i in range(k)], "csr")


class NaiveBayes(TransformerMixin, BaseEstimator):
    """Weights of n-grams: the logarithm of how much more frequent an n-gram is in one class than in
    the others."""

    def fit(self, x, y):
        counts = [1 + np.asarray(x[y == label].sum(0))[0] for label in (0, 1)]  # (features,) both
        shares = [np.log(count / count.sum()) for count in counts]
        self.ratio = shares[1] - shares[0]
        return self

    def transform(self, x):
        return x.multiply(self.ratio.astype(np.float32)).tocsr()


# ---- Samples -------------------------------------------------------------------------------------


def random_kernels(length, channels, count=KERNELS):
    """Draw random convolutions -> [(weights (c, channels, width), biases (c,), dilation, padding)].
    A kernel reads a random subset of the channels."""
    shapes = []
    for width in (7, 9, 11):
        doublings = int(np.log2(max(1, (length - 1) / (width - 1))))
        for dilation in (2**i for i in range(doublings + 1)):
            reach = (width - 1) * dilation
            shapes.append((width, dilation, reach // 2))
            if reach < length:
                shapes.append((width, dilation, 0))
    rng = np.random.default_rng(0)
    kernels = []
    groups = np.array_split(np.arange(count), min(count, len(shapes)))
    for c, (width, dilation, padding) in zip(map(len, groups), shapes):
        weights = rng.standard_normal((c, channels, width))
        weights -= weights.mean(-1, keepdims=True)
        read = 2 ** rng.uniform(0, np.log2(min(channels, width) + 1), (c, 1))  # channels
        rank = rng.random((c, channels)).argsort(1).argsort(1)
        weights *= (rank < read.astype(int))[..., None]
        biases = rng.uniform(-1, 1, c)
        tensors = (torch.from_numpy(array).float() for array in (weights, biases))
        kernels.append((*tensors, dilation, padding))
    return kernels


def convolved(task, split, count=KERNELS):
    """Return two features per random convolution, maximum and share of positive values: (examples,
    2 count)."""
    kernels = random_kernels(task.length, task.channels, count)
    parts = min(len(split), -(-len(split) * task.length // 50_000))  # to bound memory
    features = []
    for rows in np.array_split(np.arange(len(split)), parts):
        batch = split.batch(rows)
        lengths = batch.lengths if task.ragged else [task.length] * len(rows)
        x = torch.zeros(len(rows), task.length, task.channels)  # same length in each part
        for padded, series, length in zip(x, batch.samples, lengths):
            padded[:length] = series[:length].nan_to_num()  # missing: the mean
        columns = []
        for weights, biases, dilation, padding in kernels:
            y = torch.conv1d(x.mT, weights, biases, 1, padding, dilation)  # (b, c, l)
            columns += [y.amax(-1), (y > 0).float().mean(-1)]
        features.append(torch.cat(columns, 1))
    return torch.cat(features).numpy()


def interpolated(task, split):
    """Return the `val_score` of pretraining, minus the mean squared error on hidden samples, that
    two guesses have: linear interpolation between the visible neighbours, and the mean."""
    rows = np.arange(min(len(split), 1_000))
    batch = split.batch(rows)
    pretraining = completed("pretrain", OBJECTIVES, objective="masked", loss="l1", mask=task.mask)
    draw = drawing(task, batch, rows, rows, 0)
    inputs, lengths, hidden, targets = denoising(pretraining, batch, draw)
    ends = [inputs.shape[1]] * len(rows) if lengths is None else lengths.tolist()
    errors = []  # of the two guesses, (2, hidden samples)
    for x, y, where, end in zip(inputs.double().numpy(), targets.numpy(), hidden.numpy(), ends):
        y = y[:end]  # (l, channels)
        # the mean of normalised samples is 0
        guess = pandas.DataFrame(x[:end]).interpolate(limit_direction="both").fillna(0)
        errors.append(np.stack((y - guess, y))[:, where[:end]].reshape(2, -1))
    scores = -np.nanmean(np.square(np.concatenate(errors, 1)), 1)  # without missing samples
    return dict(zip(("interpolation", "mean"), scores.tolist()))


# ---- Fitting -------------------------------------------------------------------------------------


def neighbours(task, split, width=8):
    """Return what lies around every labelled position, up to `width` to each side: symbols, one-hot
    and sparse, or samples, (positions, features)."""
    features = []
    for part in np.array_split(np.arange(len(split)), -(-len(split) // 500)):
        batch = split.batch(part)
        # (b, l, c)
        x = batch.symbols[..., None] if batch.samples is None else batch.samples.nan_to_num()
        rows, places = np.nonzero(batch.y.numpy() != IGNORE)  # (m,) both
        padded = np.pad(x.numpy(), ((0, 0), (width, width), (0, 0)))
        around = np.stack([padded[rows, places + i] for i in range(2 * width + 1)], 1)
        features.append(around.reshape(len(rows), -1))
    features = np.concatenate(features)  # (m, (2 width + 1) c)
    if task.channels:
        return features
    symbols = [np.arange(task.vocab)] * features.shape[1]
    # (m, vocab (2 width + 1))
    return OneHotEncoder(categories=symbols, dtype=np.float32).fit_transform(features)


def features_of(task, splits, words):
    """Return the features of each split, (examples or labelled positions, features)."""
    if task.kind == "positions":
        return [neighbours(task, split) for split in splits]
    if task.channels:
        count = KERNELS * POSITIONS // max(POSITIONS, task.length * sum(map(len, splits)))
        count = max(count, KERNELS // 10)
        return [convolved(task, split, count) for split in splits]
    features = [ngrams(task, split, words) for split in splits]
    repeated = np.flatnonzero(features[0].getnnz(0) > 1)  # in at least two training examples
    return [x[:, repeated] for x in features]


def name_of_features(task, words):
    if task.kind == "positions":
        return "neighbours"
    if task.channels:
        return "random convolutions"
    return "words and pairs of words" if words else f"n-grams of 1 to {LONGEST}"


def linear_models(task):
    """Return {strength of regularisation: linear model of a task's features}, the strongest first,
    which counts if scores are equal."""
    if task.kind == "positions":
        return {f"alpha {a:g}": RidgeClassifier(a) for a in (1e4, 1e2, 1)}
    if task.channels:
        ridge = RidgeClassifier if task.classes else Ridge
        alphas = (1e5, 1e4, 1e3, 1e2, 1e1)
        return {f"alpha {a:g}": make_pipeline(StandardScaler(), ridge(a)) for a in alphas}
    if not task.classes:
        return {f"alpha {a:g}": Ridge(a, solver="sparse_cg") for a in (1e3, 1e2, 1e1, 1)}
    models = {}
    for c in (0.001, 0.01, 0.1, 1):
        regression = LogisticRegression(C=c, solver="liblinear")
        models[f"C {c:g}"] = OneVsRestClassifier(make_pipeline(NaiveBayes(), regression))
    return models


def fit(task, train, val, test, words=False):
    """Fit a task's linear models; validation chooses the strength of regularisation. Return that
    strength; what the trivial baseline is called; {val, test, constant: predictions}, in the shape
    of the targets; and their Kind, by whose scores it was chosen."""
    kind = kind_of_target(task, train)
    x, x_val, x_test = features_of(task, (train, val, test), words)
    y = train.labels()
    if task.kind == "positions":
        y = y[y != IGNORE]
    elif task.kind == "labels":
        y = y.astype(int)

    def predictions(model, features, split):
        """Predict a split, in the shape of its targets."""
        predicted = model.predict(features)
        if task.kind != "positions":
            return predicted
        placed = np.full(split.labels().shape, IGNORE)
        placed[split.y != IGNORE] = predicted
        return placed

    candidates = []
    for strength, model in linear_models(task).items():
        model.fit(x, y)
        predicted = predictions(model, x_val, val)
        *_, score = kind.scores(val.labels(), predicted).values()  # the last one counts
        candidates.append((score, strength, model, predicted))
    _, strength, model, predicted = max(candidates, key=lambda candidate: candidate[0])
    # --labels-per-class hides from y which class is the largest
    labels = train.y[: task.labelled] if task.kind == "class" else y
    name, constant = constant_prediction(task, labels)
    constant = np.broadcast_to(constant, test.y.shape)
    baselines = dict(val=predicted, test=predictions(model, x_test, test), constant=constant)
    return strength, name, baselines, kind


def constant_prediction(task, y):
    """Return the name of the prediction that ignores the input, and it itself: the majority class,
    the mean, or the labels (classes,) with the best F1."""
    if task.kind == "number":
        return "mean label", y.mean(0)
    if task.kind != "labels":
        majority = np.bincount(y).argmax()
        return f"majority class ({(task.names or range(task.classes))[majority]})", majority
    shares = y.mean(0)  # (classes,)
    descending = -np.sort(-shares)
    k = np.arange(1, len(shares) + 1)
    best = np.argmax(descending.cumsum() / (k + shares.sum()))  # of the k commonest labels
    return "best constant labels", shares >= descending[best]


# ---- Command line --------------------------------------------------------------------------------


def parse_args(argv):
    parser = Parser(examples=True, description=__doc__.split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    share = between(float, 1e-9, 1)
    add("--task", required=True, help="task, as for finetune.py")
    shares = parser.add_mutually_exclusive_group()
    text = "of labels, as for finetune.py"
    shares.add_argument("--label-fraction", type=share, help=f"share {text}")
    shares.add_argument("--labels-per-class", type=between(int, 1), help=f"number {text}")
    add("--seed", type=between(int, 0), default=0, help="draws the labels of --labels-per-class")
    add("--words", action="store_true", help="texts: words and pairs of words, not characters")
    add("--data-dir", default="data", help="where prepared data sets live")
    add("--out", type=Path, metavar="DIR", help="write DIR/result.json")
    return parser.parse_args(argv)


def main(argv=None):
    start = time.perf_counter()
    args = parse_args(argv)
    name = full_name(args.task)
    shares = dict(labelled=args.label_fraction, per_class=args.labels_per_class, seed=args.seed)
    task, train, val, test = open_task(name, args.data_dir, labels=True, **shares)
    if args.words and (task.channels or task.between):
        raise UserError(f"--words is for texts, and {name} holds none; leave it out")
    features = name_of_features(task, args.words)
    changed = {"label_fraction": args.label_fraction, "labels_per_class": args.labels_per_class}
    changed = {flag: value for flag, value in changed.items() if value}
    identity = dict(task=name, model=features, data=task.data, changed=changed, seed=args.seed)
    recorded = args.out and (args.out / "result.json").exists()
    if recorded and identity.items() <= read_json(args.out / "result.json").items():
        print(f"{args.out} is finished; nothing to do")
        return
    strength, constant, baselines, kind = fit(task, train, val, test, args.words)
    seconds = time.perf_counter() - start
    scores = {}
    for baseline, predictions in baselines.items():
        y = val.labels() if baseline == "val" else test.y
        for score, value in kind.scores(y, predictions).items():
            scores[f"{baseline}_{score}"] = value
    print(
        f"{name}, {len(train):,} training and {len(test):,} test examples, test {kind.score}\n"
        f"{constant}: {scores[f'constant_{kind.score}']:.4f}\n"
        f"linear model of {features}: {scores[f'test_{kind.score}']:.4f} (validation "
        f"{scores[f'val_{kind.score}']:.4f}, {strength}), {seconds:.0f} s"
    )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        record = scores | identity
        if task.channels and task.mask:
            record["denoising"] = interpolated(task, replace(val, chosen=None))
        record |= dict(length=task.length, classes=task.classes, regularisation=strength)
        record |= dict(objective="none", start="baseline", steps=0)
        record |= dict(train_examples=len(train), seconds=round(seconds, 1))
        record |= Folder(args.out, True).predictions(task, test.y, baselines["test"])
        record |= environment(torch.device("cpu"))
        write_json(args.out / "result.json", record)


if __name__ == "__main__":
    guarded(main)
