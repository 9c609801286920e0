"""A trained run as a function: raw sequences in, predictions and probabilities out."""

from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

from data import Split, named
from engine.flags import completed
from engine.folder import newest, read_checkpoint
from engine.targets import KINDS
from files import UserError, read_json, reading
from models import Classifier, Denoiser, Joint
from own.cells import check_each
from own.columns import Layout, from_frame
from own.task import encode
from pretrain import OBJECTIVES, make_backbone
from tasks import restored


class TrainedModel:
    """A run's best weights. Call it with raw sequences: arrays or texts.

    task: the run's task, as saved in training. saved: all flags that define the run; args: with
    defaults for those that they lack. names: of the classes. model, in eval mode: Classifier or
    Joint, or the Denoiser of a pretraining run. dtype: the number format of the run. data_dir:
    folder of prepared data; only the run's own splits are read from it."""

    device = "cpu"
    dtype = "float32"

    def __init__(self, run, data_dir="data"):
        torch.set_flush_denormal(True)  # as in training
        self.run = Path(run)
        self.data_dir = data_dir
        if not (self.run / "best.pt").is_file():
            raise UserError(f"{run} has no best.pt; predict.py needs the directory of a run")
        checkpoint = read_checkpoint(self.run / "best.pt")
        self.saved = checkpoint["config"]
        self.is_pretraining = self.saved["start"] == "pretrain"
        stage = "pretrain" if self.is_pretraining else "finetune"
        self.args = completed(stage, OBJECTIVES, **self.saved)
        result = self.run / "result.json"
        record = read_json(result) if result.exists() else newest(self.run)  # of an unfinished run
        self.dtype = record.get("dtype", self.dtype)
        problem = f"{run}/best.pt does not fit its own sizes"
        with reading(problem, "it may come from another version of the code"):
            self.task = restored(checkpoint["task"])
            self.names = np.array(self.task.names or [str(i) for i in range(self.task.classes)])
            self.model = untrained(self.args, self.task)
            self.model.load_state_dict(checkpoint["model"])
        self.model.eval()

    def autocast(self):
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def __call__(self, x):
        """Return the predictions and probabilities of raw sequences, as in `encoded`."""
        return self.predict(self.encoded(x))

    def encoded(self, x):
        """Turn raw sequences into a Split without targets. x: an array as in a file, (n, l) or (n,
        l, channels), a DataFrame with the columns of the training data, or a list of n arrays or
        texts (pairs of texts, if an example has two documents); or one text or series, (l,) or (l,
        channels)."""
        layout = Layout(**self.task.layout or {})
        if hasattr(x, "columns"):
            x = rows_of_frame(self.task, x, layout)
        examples = [x] if isinstance(x, str) or not np.iterable(x) else list(x)
        if np.iterable(x) and is_series(self.task, examples):
            examples = [examples]
        if layout.channels_first:
            examples = [np.transpose(array) if np.ndim(array) == 2 else array for array in examples]
        return self.split_of(examples, "x")

    def split_of(self, examples, place, rows=None):
        """Turn a list of n examples, as a file's reader returns them, into a Split without targets.
        place: what errors call them. rows: of the file (n,); None: those of the examples."""
        task = self.task
        if not examples:
            raise UserError(f"{place} holds no sequence")
        documents = examples
        if task.documents == 2:
            lists = tuple, list, np.ndarray
            right = [isinstance(pair, lists) and len(pair) == 2 for pair in examples]
            advice = "give a list of pairs, [(first, second)] for one"
            check_each(place, right, f"it is no pair; {advice}")
            documents = [document for pair in examples for document in pair]
        with reading(f"{place} cannot be read", "give a list of texts or of arrays of numbers"):
            documents = [as_array(document) for document in documents]
        arrays, unknown, longer = encode(task, place, documents, rows)
        if unknown:
            positions = sum(len(ids) - 1 for ids in arrays)  # without <eos>
            most = ", ".join(f"{name!r} ({n:,})" for name, n in unknown.most_common(5))
            more = ", ..." if len(unknown) > 5 else ""
            print(
                f"note: {unknown.total():,} of {positions:,} positions hold one of "
                f"{len(unknown):,} symbols that training never saw; they become <unk>: {most}{more}"
            )
        if longer:
            print(
                f"note: {longer:,} of {len(arrays):,} sequences are longer than the "
                f"{task.length:,} positions that the model was trained on; the rest is cut off"
            )
        return without_targets(task, arrays)

    def predict(self, split):
        """Return the predictions for a split, as `named` does, and the probability of each class
        (n[, length], classes); None in regression."""
        kind = self.task.kind
        outputs = torch.from_numpy(self.outputs(split))
        predictions = named(self.task, KINDS[kind].predict(outputs))
        if kind == "number":
            return predictions, None
        probabilities = outputs.sigmoid() if kind == "labels" else outputs.softmax(-1)
        return predictions, probabilities.numpy()

    def outputs(self, split):
        """Return the outputs for every example of a split: (n, classes or 1) float64; with a label
        per position (n, length, classes)."""
        if self.is_pretraining:
            raise UserError(
                f"{self.run} is a pretraining run and predicts no labels; train a classifier from "
                f"it: python finetune.py --init {self.run}"
            )

        def of_batch(batch):
            return self.model(self.model.backbone.inputs(batch), batch.lengths).double()

        return self.over_batches(split, of_batch)

    def features(self, split):
        """Return what the head reads of every example of a split: (n, d) float32; (n, 4 d) for the
        head `pair`; with a label per position (n, length, d). Of a pretraining run: means over
        positions, (n, documents * d)."""
        model = self.model
        if self.is_pretraining:
            # only for its pooling
            model = Classifier(model.backbone, 1, "mean").to(self.device).eval()
        seen = []
        hook = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))

        def head_inputs(batch):
            model(model.backbone.inputs(batch), batch.lengths)
            return seen.pop()

        features = self.over_batches(split, head_inputs)
        hook.remove()
        return features

    @torch.no_grad()
    def over_batches(self, split, compute):
        """Return compute(batch) of a whole split, in the order of its examples, 0 past the longest
        sequence of a batch. Number format and, on a CPU, batches are those of an evaluation."""
        size = self.saved.get("micro_batch") or self.saved["batch"]
        lengths = split.lengths()
        order = np.arange(len(split)) if lengths is None else np.argsort(lengths, kind="stable")
        parts = []
        for i in range(0, len(split), size):
            rows = order[i : i + size]
            batch = split.batch(rows, self.device)
            with self.autocast():
                part = compute(batch).cpu()
            if part.ndim == 3:  # (b, l, ...): batches differ in l
                part = nn.functional.pad(part, (0, 0, 0, self.task.length - part.shape[1]))
            else:
                part = part.reshape(len(rows), -1)
            parts.append(part)
        return torch.cat(parts).numpy()[np.argsort(order)]


def untrained(args, task):
    """Return the model of a run of either stage, before its weights are loaded."""
    backbone = make_backbone(args, task)
    predicted = OBJECTIVES[args.objective].outputs(args, task)  # per hidden position
    if args.start == "pretrain":
        return Denoiser(backbone, predicted)
    shape = task.classes or 1, args.pool, args.head  # of the head
    if args.start == "joint":
        return Joint(backbone, *shape, predicted)
    return Classifier(backbone, *shape)


def is_series(task, x):
    """Return whether a list holds the positions of one series, not several sequences."""
    first = next(iter(x), None)
    if (task.channels or 1) > 1 and np.iterable(first):  # a position has an axis, too
        first = next(iter(first), None)
    return isinstance(first, (int, float, np.number))


def rows_of_frame(task, frame, layout):
    """Return the series or texts in the rows of a DataFrame. layout: of the training data."""
    if layout.width is None:  # which was no table
        return frame.to_numpy()
    header = bool(layout.columns) or not all(str(name).isdigit() for name in frame.columns)
    frame = frame.rename(columns=str).reset_index(drop=True)
    return from_frame("x", frame, header, layout, task.documents).series


def as_array(document):
    if isinstance(document, str):
        return document
    array = np.asarray(document)
    return array.astype(float) if array.dtype == object else array


def without_targets(task, arrays):
    """Return a Split of arrays as stored, one per document."""
    y = np.zeros(len(arrays) // task.documents)
    if task.channels and not task.ragged:
        return Split(task, np.stack(arrays), y)
    return Split(task, np.concatenate(arrays), y, np.cumsum([0, *map(len, arrays)]))
