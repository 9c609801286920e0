"""Use a trained run: predict labels, extract features, export the model, fill in or continue
sequences.

    python predict.py RUN --input new.csv         finetuned run: a label for each sequence of a file, in predictions.csv
    python predict.py RUN                         the same for the test split
    python predict.py RUN --features out.npy      (n, d), the input of the head; pretrained run: the mean over positions
    python predict.py RUN --export model.pt2      torch.export, for programs without this repository; or model.onnx
    python predict.py RUN --show sheet.png        pretrained run: sequences, with hidden positions, and filled in
    python predict.py RUN --prompt "[MAX 3"       causally pretrained run: continue symbols, or images in sample.png

A file is a table, .npz, .ts or .txt, as for `--task file:` (results/own.md); labels may be missing.
In Python:

    from predict import load
    model = load("runs/text_demo-s4-masked-scratch-s0")
    names, probabilities = model(["a film to remember", "what a waste"])

Only the run directory is needed: best.pt also holds the normalisation of its data, its symbols and
its classes."""

# First, so that there is no traceback if Ctrl-C comes while the rest is imported.
import io
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from PIL import Image

from data import Split, named, open_task, sheet
from engine.feed import drawing
from engine.flags import between, completed
from engine.folder import newest, read_checkpoint
from engine.processes import guarded
from engine.targets import KINDS
from files import Parser, UserError, read_json, reading, write_atomically
from kernels import inside
from models import Classifier, Denoiser, Joint
from pretrain import OBJECTIVES, denoising, make_backbone
from recurrent import backbone_step, can_step
from tasks import EOS, MASK, PAD, UNK, folder_name, full_name, restored
from tasks.columns import from_frame
from tasks.own import as_stored, encode
from tasks.readers import OWN_FILES, read_file
from tasks.picture import height, picture
from tasks.split import as_numbers, check_each
from tasks.table import Layout, add_layout, given

# ---- A trained run -------------------------------------------------------------------------------


class Trained:
    """A run's best weights; call it with raw arrays or texts. data_dir: folder of prepared data;
    only the run's own splits are read from it. task: the run's task, as saved in training; saved:
    all flags that define the run; model, in eval mode: Classifier or Joint, or the Denoiser of a
    pretraining run."""

    device, dtype = "cpu", "float32"  # dtype: the number format of the run

    def __init__(self, run, data_dir="data"):
        torch.set_flush_denormal(True)  # as in training
        self.run, self.data_dir = Path(run), data_dir
        if not (self.run / "best.pt").is_file():
            raise UserError(f"{run} has no best.pt; predict.py needs the directory of a run")
        checkpoint, result = read_checkpoint(self.run / "best.pt"), self.run / "result.json"
        self.dtype = (read_json(result) if result.exists() else newest(self.run)).get(
            "dtype", self.dtype
        )
        self.saved = saved = checkpoint["config"]
        self.args = completed(
            "pretrain" if saved["start"] == "pretrain" else "finetune", OBJECTIVES, **saved
        )
        with reading(
            f"{run}/best.pt does not fit its own sizes",
            "it may come from another version of the code",
        ):
            self.task = task = restored(checkpoint["task"])
            self.names = np.array(task.names or [str(i) for i in range(task.classes)])
            self.pretrained, joint = saved["start"] == "pretrain", saved["start"] == "joint"
            backbone = make_backbone(self.args, task)
            predicted, outputs = OBJECTIVES[saved["objective"]].outputs, task.classes or 1
            if self.pretrained:
                self.model = Denoiser(backbone, predicted(self.args, task))
            elif joint:
                self.model = Joint(
                    backbone, outputs, saved["pool"], saved["head"], predicted(self.args, task)
                )
            else:
                self.model = Classifier(backbone, outputs, saved["pool"], saved["head"])
            self.model.load_state_dict(checkpoint["model"])
        self.model.eval()

    def to(self, device):
        """Move the model to the device on which `outputs` computes."""
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda, but torch sees no CUDA device; leave it out")
        self.device = device
        self.model.to(device)
        return self

    def autocast(self):
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def encoded(self, x, place="x", bad=None):
        """Turn raw sequences into a Split without targets. x: an array as in a file, (n, l) or (n,
        l, channels), a DataFrame with the columns of the training data, or a list of n arrays or
        texts (pairs of texts, if an example has two documents). bad: see `encode`."""
        task = self.task
        layout = Layout(**task.layout or {})
        if hasattr(x, "columns"):
            named = not all(str(name).isdigit() for name in x.columns) or bool(layout.columns)
            x = (
                x.to_numpy()
                if layout.width is None
                else from_frame(
                    place,
                    x.rename(columns=str).reset_index(drop=True),
                    named,
                    layout,
                    task.documents,
                ).all_series()
            )
        x = list(x) if np.iterable(x) else [x]
        if layout.channels_first and place == "x":
            x = [np.transpose(one) if np.ndim(one) == 2 else one for one in x]
        if not x:
            raise UserError(f"{place} holds no sequence")
        if task.documents > 1:
            x = [[one] * task.documents if isinstance(one, UserError) else one for one in x]
            check_each(
                place,
                [
                    np.iterable(one) and not isinstance(one, str) and len(one) == task.documents
                    for one in x
                ],
                "it is no pair; give a list of pairs, [(first, second)] for one",
            )
            x = [one for pair in x for one in pair]
        with reading(f"{place} cannot be read", "give a list of texts or of arrays of numbers"):
            x = [one if isinstance(one, (str, UserError)) else np.asarray(one) for one in x]
            x = [one.astype(float) if getattr(one, "dtype", None) == object else one for one in x]
        arrays, unknown, longer = encode(task, place, x, bad)
        if unknown:
            some = ", ".join(f"{name!r} ({n:,})" for name, n in unknown.most_common(5))
            print(
                f"note: {sum(unknown.values()):,} of {sum(len(one) - 1 for one in arrays):,} "
                "positions hold one of "
                f"{len(unknown):,} symbols that training never saw; they become <unk>: {some}"
                + (", ..." if len(unknown) > 5 else "")
            )
        if longer:
            print(
                f"note: {longer:,} of {len(arrays):,} sequences are longer than the "
                f"{task.length:,} positions that "
                "the model was trained on; the rest is cut off"
            )
        flat = np.stack(arrays) if task.channels and not task.ragged else np.concatenate(arrays)
        offsets = None if task.channels and not task.ragged else np.cumsum([0, *map(len, arrays)])
        return Split(task, flat, np.zeros(len(arrays) // task.documents), offsets)

    @torch.no_grad()
    def outputs(self, split, features=False):
        """Return outputs for every example of a split, (n, classes or 1) float64; with features,
        inputs of the head, (n, d) float32 (pretrained: documents side by side). With a label per
        position: (n, length, classes or d), 0 past the end. Batches and number format are those of
        an evaluation."""
        size, found = self.saved.get("micro_batch") or self.saved["batch"], []
        model = (
            Classifier(self.model.backbone, 1, "mean").to(self.device).eval()
            if self.pretrained
            else self.model
        )
        if features:
            hook = model.head.register_forward_pre_hook(
                lambda _, inputs: found.append(inputs[0].cpu())
            )
        elif self.pretrained:
            raise UserError(
                f"{self.run} is a pretraining run and predicts no labels; train a classifier from "
                "it: "
                f"python finetune.py --init {self.run}"
            )
        order = (
            np.arange(len(split))
            if split.lengths() is None
            else np.argsort(split.lengths(), kind="stable")
        )
        for i in range(0, len(split), size):
            batch = split.batch(order[i : i + size], self.device)
            with self.autocast():
                outputs = model(model.backbone.inputs(batch), batch.lengths)
            found += [] if features else [outputs.double().cpu()]
        if features:
            hook.remove()
        if found[0].ndim == 3:
            whole = [
                nn.functional.pad(some, (0, 0, 0, self.task.length - some.shape[1]))
                for some in found
            ]
            return torch.cat(whole).numpy()[np.argsort(order)]
        return torch.cat(found).numpy().reshape(len(split), -1)[np.argsort(order)]

    def answers(self, outputs):
        """Turn outputs into predictions, as `named` does, and the probability of each class (n[,
        length], classes); in regression None."""
        outputs = torch.from_numpy(outputs)
        predicted = named(self.task, KINDS[self.task.kind].predict(outputs))
        if self.task.kind == "labels":
            return predicted, outputs.sigmoid().numpy()
        return predicted, outputs.softmax(-1).numpy() if self.task.classes else None

    def __call__(self, x):
        """Return `answers` for raw sequences, as in `encoded`, or for one text or series, (l,) or
        (l, channels)."""
        x = x if hasattr(x, "__len__") or not np.iterable(x) else [*x]
        first = None if hasattr(x, "columns") or not np.iterable(x) else next(iter(x), None)
        if (self.task.channels or 1) > 1 and np.iterable(first):  # then one series has two axes
            first = next(iter(first), None)
        single = isinstance(x, str) or isinstance(first, (int, float, np.number))
        return self.answers(self.outputs(self.encoded([x] if single else x)))


load = Trained  # the name under which other programs import it


# ---- Labels for sequences ------------------------------------------------------------------------


def held_examples(trained):
    """Return the file of examples next to a run that was shared without its data (TASK.csv, for
    example); or None."""
    name = trained.saved["task"]
    return next(
        (path for path in trained.run.parent.glob(f"{name}.*") if path.suffix in OWN_FILES), None
    )


def held_out(trained):
    """Return the test split of the run's data, the row of each example in the data file, and its
    label; None instead of labels for a pretraining run."""
    task, _, _, test = open_task(trained.saved["task"], trained.data_dir)
    if task.data != trained.saved["data"]:
        raise UserError(
            f"{trained.run} was trained on {trained.saved['data']}, but {trained.saved['task']} in "
            f"{trained.data_dir} holds {task.data}"
        )
    rows = np.arange(len(test)) if test.rows is None else test.rows
    return test, rows, None if trained.pretrained else named(task, test.y)


def new_split(trained, path, flags=None, bad=None):
    """Return a file's examples, encoded; the row of each; and its label, "" (NaN in regression) if
    it has none. None instead of labels if the file has none. A table is read as that of the
    training data, or as flags (`given`) say. bad: see `encode`."""
    import pandas as pd

    layout = Layout(**trained.task.layout or {})
    layout = layout._replace(**{"channels_first": bool(layout.channels_first)} | (flags or {}))
    own = read_file(
        str(path), layout, trained.task.documents, not trained.task.classes, trained.task.target
    )
    split = trained.encoded(own.all_series(bad), path, bad)
    if bad and len(bad) == len(own.series):
        raise bad[0]
    rows = np.arange(len(own.series)) if own.rows is None else own.rows
    if trained.pretrained or own.labels is None or not own.known.any():
        return split, rows, None
    if own.layout and own.layout.label_column != "none":
        print(
            f"labels are read from column {own.layout.label_column}; --label COLUMN names another; "
            "none: "
            "there is no label"
        )
    if trained.task.target:
        several = trained.task.target == "labels"
        if (
            np.ndim(own.labels) < 2
            or (own.labels.dtype.kind == "U") == several
            or (several and own.labels.shape[1] != trained.task.classes)
        ):
            raise UserError(
                f"{path}: labels have the shape {np.shape(own.labels)}; {trained.run} predicts "
                f"{trained.task.classes} labels{'' if several else ' at each position'}"
            )
        if not several:
            return split, rows, own.labels
        return (
            split,
            rows,
            np.where(own.known, named(trained.task, np.nan_to_num(own.labels)), UNKNOWN),
        )
    if trained.task.classes:
        # The exact name, or else the only one of this number: 1, "1" and 1.0 are the same class,
        # "01" and "1" are two.
        numbers, theirs = (
            pd.to_numeric(some.tolist(), errors="coerce") for some in (trained.names, own.labels)
        )
        same = {
            number: name
            for number, name in zip(numbers, trained.names)
            if (numbers == number).sum() == 1
        }
        texts = own.labels.astype(str).tolist()
        found = [
            text if text in trained.names else same.get(number, text)
            for number, text in zip(theirs, texts)
        ]
        sure = trained.task.channels and own.layout and own.layout.width  # by the number of columns
        if own.layout and trained.task.own and not sure and not {*found} & {*trained.names}:
            raise UserError(
                f"{path}: column {own.layout.label_column} holds no class of {trained.run}, e.g. "
                f"{trained.names[0]}; --label COLUMN names the label; if there is none, give "
                "--label none "
                "--text COLUMN"
            )
        return split, rows, np.where(own.known, found, "")
    values = np.full(len(rows), np.nan)
    with reading(f"{path}: not every label is a number", f"{trained.run} predicts numbers"):
        values[own.known] = as_numbers(own.labels[own.known])
    return split, rows, values


UNKNOWN = "?"  # instead of several labels, where none is known: "" means none applies


def tabled(trained, split, rows, labels, outputs):
    """Return predictions as a DataFrame, one line per example: its row, from 0; its label, if there
    are labels; the prediction; probabilities. With a label per position: one line per position, row
    and position, as there are."""
    import pandas as pd

    task, (predicted, probabilities) = trained.task, trained.answers(outputs)
    places, columns = {"row": rows}, {} if labels is None else {"label": labels}
    columns["prediction"] = predicted
    columns |= {f"p({name})": probabilities[..., i] for i, name in enumerate(trained.names)}
    if task.kind == "positions":
        lengths = np.full(len(rows), task.length) if split.lengths() is None else split.lengths()
        lengths = lengths - (not task.channels)  # <eos> is no position of the user's
        i, position = np.nonzero(np.arange(task.length) < lengths[:, None])  # (m,) both
        if labels is not None:
            columns["label"] = np.pad(labels, ((0, 0), (0, task.length)))
        columns = {name: column[i, position] for name, column in columns.items()}
        places = {"row": rows[i], "position": position}
    columns |= {
        name: np.char.mod("%.6f", column)
        for name, column in columns.items()
        if name.startswith("p(")
    }
    return pd.DataFrame(places | columns, dtype=object)


def judged(labels, predicted, names, several=False):
    """Yield lines that compare predictions with labels. names: names of the classes, empty for
    regression. several: a prediction is a text of several names."""
    import pandas as pd
    from sklearn import metrics

    if several:
        labels, predicted = labels[labels != UNKNOWN], predicted[labels != UNKNOWN]
        y, guess = (
            np.array([np.isin(names, text.split(";")) for text in some])
            for some in (labels, predicted)
        )
        found = ", ".join(
            f"{name.replace('_f1', ' F1')} {value:.4f}"
            for name, value in KINDS["labels"].scores(y, guess, None, False).items()
        )
        yield f"{len(y):,} examples: {found}; all labels right in {100 * np.mean((y == guess).all(1)):.1f} %"
        return
    known = np.isin(labels, names) if len(names) else np.isfinite(labels)
    strange = (
        Counter(label for label in labels[~known] if label not in ("", "nan")) if len(names) else {}
    )
    if strange:
        yield (
            f"{sum(strange.values()):,} labels belong to no class of the model: "
            f"{', '.join([*strange][:5])}; "
            "not counted"
        )
    y, guess = labels[known], predicted[known]
    if not len(y):
        return
    if not len(names):
        error = metrics.root_mean_squared_error(y, guess)
        r2 = f"R2 {metrics.r2_score(y, guess):.4f}, " if len(set(y)) > 1 else ""
        yield f"{len(y):,} labels: {r2}root mean squared error {error:.4g}"
        return
    here = [name for name in names if name in y]
    recall = metrics.recall_score(y, guess, labels=here, average="macro", zero_division=0)
    f1 = metrics.f1_score(y, guess, labels=here, average="macro", zero_division=0)
    yield (
        f"{len(y):,} labels: accuracy {metrics.accuracy_score(y, guess):.4f}, balanced accuracy "
        f"{recall:.4f}, "
        f"macro F1 {f1:.4f}"
    )
    if len(names) <= 20:
        table = pd.DataFrame(
            metrics.confusion_matrix(y, guess, labels=names), names, names
        ).to_string()
        yield f"confusion matrix, one row per label, one column per prediction:\n{table}"
    if len(set(guess)) == 1 and len(set(y)) > 1:
        yield f"every prediction is {guess[0]}"


def label(trained, args):
    trained.to(args.device)
    bad = {}
    split, rows, labels = (
        new_split(trained, args.input, given(args), bad) if args.input else held_out(trained)
    )
    if args.features:
        features = trained.outputs(split, features=True)
        features[[*bad]] = np.nan
        write_atomically(args.features, lambda file: np.save(file, features))
        print(f"wrote {args.features}: {features.shape}, {features.dtype}, one line per example")
    else:
        table, several = (
            tabled(trained, split, rows, labels, trained.outputs(split)),
            trained.task.kind == "labels",
        )
        lacking = table["row"].isin(rows[[*bad]])
        table.loc[lacking, "prediction":] = ""
        text = table.to_csv(index=False, na_rep="nan", lineterminator="\r\n")
        write_atomically(args.out, lambda file: file.write(text.encode(errors="replace")))
        print(
            f"wrote {args.out}: {len(rows):,} examples of {args.input or 'the test split'}; rows "
            "are counted from 0"
            + (
                ""
                if trained.dtype == "float32"
                else f"; computed in {trained.dtype}, as in training"
            )
        )
        table = table[~lacking]
        if trained.task.classes:
            counts = Counter(
                (";" if several else "\n").join(table["prediction"]).split(";" if several else "\n")
            )
            print(
                "predicted: "
                + (
                    ", ".join(f"{name} {counts[name]:,}" for name in trained.names if counts[name])
                    or "no label"
                )
            )
        for line in (
            []
            if labels is None
            else judged(
                *(np.array([*table[name]]) for name in ("label", "prediction")),
                trained.names,
                several,
            )
        ):
            print(line)
    if args.input and trained.saved["task"] == full_name(f"file:{args.input}"):
        print("note: the run was trained on this file; without --input only its test split is used")
    if bad:
        first = min(bad)
        raise UserError(
            f"{len(bad):,} of {len(rows):,} examples could not be read; their lines are empty. Row "
            f"{rows[first]}: {bad[first]}"
        )


# ---- What a pretrained run fills in --------------------------------------------------------------


@torch.no_grad()
def filled_in(trained, batch):
    """Return which positions of a batch were hidden (b, l); the predictions for them, ids (b, l) or
    samples (b, l, channels); and which predictions are wrong (b, l): another symbol, or off by half
    a standard deviation."""
    args, task, objective = trained.args, trained.task, OBJECTIVES[trained.saved["objective"]]
    rows, shape = (
        np.arange(len(batch.y)),
        (batch.symbols if batch.samples is None else batch.samples).shape[:2],
    )
    draw = drawing(task, batch, rows, slice(0, len(rows)), args.seed, 1 << 41)
    inputs, lengths, hidden, targets = denoising(args, batch, draw)
    with trained.autocast():
        said = trained.model(inputs, lengths, hidden)  # (m, outputs)
    # Which position does each prediction stand for? The same pretext says so of a batch that holds
    # positions, which begin at 2^20, above all symbols.
    numbers = (2**20 + torch.arange(shape[1])).expand(shape)
    numbered = batch._replace(
        symbols=numbers,
        samples=batch.samples
        if batch.samples is None
        else numbers[..., None].expand_as(batch.samples).float(),
    )
    # (m,)
    where = (
        denoising(args, numbered, draw).targets[hidden].reshape(len(said), -1)[:, 0].long() - 2**20
    )
    real, targets = (where >= 0) & (where < shape[1]), targets[hidden]  # (m,), (m, ...)
    if len(hidden) != shape[0] or not real.any():
        raise UserError(
            f"--show: the predictions of --objective {args.objective} are not positions of a "
            "sequence"
        )
    if args.loss == "ce":  # of several predictions, e.g. of the next positions, the first
        vocab = objective.reads(args, task).vocab
        guess = said.unflatten(-1, (-1, vocab)).argmax(-1)[:, 0]
        wrong = guess != targets.reshape(len(said), -1)[:, 0]
        guess = guess.where(guess < task.vocab, UNK)
    else:
        guess, wrong = said, (said - targets).abs().amax(-1) > 0.5
    place = hidden.nonzero()[real, 0], where[real]
    return [
        one.new_zeros(*shape, *one.shape[1:]).index_put(place, one[real]).numpy()
        for one in (real, guess, wrong)
    ]


def show(trained, split, path):
    """Write a picture of four sequences: the original, the model's input, and as the model fills it
    in."""
    if not trained.pretrained:
        raise UserError(
            f"--show needs a run of pretrain.py, but {trained.run} is one of finetune.py"
        )
    task, batch = trained.task, split.batch(np.arange(min(4, len(split))))
    hidden, guess, wrong = filled_in(trained, batch)
    if task.channels and trained.saved["loss"] == "ce":  # gray levels as samples
        guess = (guess[..., None] / task.scale - task.mean) / task.std
    hides, right = OBJECTIVES[trained.saved["objective"]].hides, 1 - wrong.sum() / hidden.sum()
    n, stacked = len(batch.y), not task.channels  # texts are wide: below each other
    covered = f"{trained.saved['mask']:.0%} hidden" if hides else "read from left to right"
    columns = [
        (["original"] * n, np.zeros_like(hidden)),
        ([covered] * n, hidden & hides),
        ([f"filled in by {trained.saved['model']}"] * n, hidden, guess, wrong),
    ]
    size = (
        (6.2, 3.3 * height(task) * n) if stacked else (7.2 if task.side else 17, height(task) * n)
    )
    sheet(path, task, batch, size, columns, stacked)
    colours = (
        "hidden pixels are blue, wrong ones orange"
        if task.side
        else "correct predictions are blue, wrong ones orange"
    )
    print(f"wrote {path}: {colours}; of {hidden.sum():,} hidden positions {right:.1%} are correct")


# ---- Export --------------------------------------------------------------------------------------


class Exported(nn.Module):
    """A finetuned model for export. Normalisation, and kernels at the task's length, are constants.
    Raw samples (b, l, channels) or ids (b, l), padded with anything, and true lengths (b,) if they
    differ -> probabilities (b, classes), with a label per position (b, l, classes), or values in
    the unit of the labels (b, 1), float64 because a unit may be fine (seconds since 1970). An
    example of two documents has two rows of x."""

    def __init__(self, trained):
        super().__init__()
        task, self.model, self.classes = trained.task, trained.model, trained.task.classes
        self.samples = not trained.model.backbone.reads_symbols
        # float64 if float32 would lose too much
        kind = torch.from_numpy(as_stored(task, np.zeros(1))).dtype
        self.register_buffer("mean", torch.tensor(task.mean, dtype=kind))
        self.register_buffer("std", torch.tensor(task.std, dtype=kind))
        self.scale = task.scale
        self.ends, self.several = task.ends or (0.0, 1.0), task.kind == "labels"
        self.kernels = [
            kernels and (kernels[0].detach(),)
            for kernels in trained.model.backbone.kernels(task.length)
        ]

    def forward(self, x, lengths=None):
        if lengths is not None:
            padding = ~inside(lengths, x.shape[1])
            x = x.masked_fill(padding[..., None] if self.samples else padding, PAD)
        if self.samples:
            x = ((x / self.scale - self.mean) / self.std).float()  # as Split.batch does
        outputs = self.model.classify(self.model.backbone.body(x, lengths, self.kernels), lengths)
        low, high = self.ends
        if self.several:
            return outputs.sigmoid()
        return (
            outputs.softmax(-1) if self.classes else low + (outputs.double() + 1) / 2 * (high - low)
        )


def described(task, names, dtype):
    """Return what a program needs besides an exported model, for JSON: the names of the classes in
    the order of the probabilities; length, channels and dtype of the input, and whether it wants
    `lengths`; the id of each symbol, and those of the end, of padding and of an unknown symbol.
    between: what separates symbols in a text."""
    return dict(
        target=task.kind,
        names=names.tolist(),
        length=task.length,
        channels=task.channels,
        dtype=str(dtype).removeprefix("torch."),
        lengths=task.ragged or not task.channels,
        ids={symbol: i for i, symbol in enumerate(task.symbols) if i > EOS},
        end=EOS,
        pad=PAD,
        unknown=UNK,
        between=task.between,
    )


def as_pt2(program, text):
    """Return the bytes of an exported program, with a text inside, and a function that runs
    them."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"task.json": text})
    return buffer.getvalue(), torch.export.load(io.BytesIO(buffer.getvalue())).module()


def as_onnx(program, text):
    """Return the same for ONNX, which lacks some operations of lru, mamba, s5 and spade."""
    with reading("--export .onnx is not possible here", "pip install onnx onnxscript onnxruntime"):
        import onnxruntime
        import onnxscript  # noqa: F401, for torch.onnx
    try:
        made = torch.onnx.export(program, verbose=False)
    except torch.onnx.OnnxExporterError:
        raise UserError(
            "ONNX lacks an operation of this model; give --export a name that ends in .pt2"
        ) from None
    made.model.metadata_props["task.json"] = text
    raw = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(raw)
    names = [one.name for one in session.get_inputs()]
    return raw, lambda *inputs: torch.from_numpy(
        session.run(None, dict(zip(names, map(np.asarray, inputs))))[0]
    )


@torch.no_grad()
def export(trained, path):
    """Export the model for batches of any size, all of the task's length. Check the export before
    writing it."""
    task, k = trained.task, trained.task.documents
    if path.suffix not in (".pt2", ".onnx"):
        raise UserError(f"--export {path}: give a name that ends in .pt2 or .onnx")
    if trained.pretrained:
        raise UserError(f"--export needs a finetuned run, but {trained.run} is a pretraining run")
    exported = Exported(trained).eval()
    ragged = task.ragged or not task.channels
    # Three random examples: x (3 k, l[, channels]) and, if lengths differ, these (3 k,).
    if exported.samples:
        noise = torch.randn(3 * k, task.length, task.channels, dtype=exported.mean.dtype)
        x = (noise * exported.std + exported.mean) * task.scale
    else:
        x = torch.randint(0 if task.channels else EOS + 1, task.vocab, (3 * k, task.length))
    lengths = [
        torch.cat((torch.tensor([task.length]), torch.randint(1, task.length + 1, (3 * k - 1,))))
    ] * ragged
    stored = x.numpy() if x.ndim == 3 or ragged else x.numpy()[..., None]  # gray levels
    if ragged:
        stored = np.concatenate([one[:length] for one, length in zip(stored, lengths[0])])
    split = Split(
        task, stored, np.zeros(3), np.cumsum([0, *lengths[0].tolist()]) if ragged else None
    )
    # Compute this before tracing: cached functions must not keep tensors of the trace.
    dtype, trained.dtype, (low, high) = trained.dtype, "float32", exported.ends  # of the export
    answer, probabilities = trained.answers(trained.outputs(split))
    trained.dtype = dtype
    # (3, classes or 1)
    ours = torch.from_numpy(answer[:, None] if probabilities is None else probabilities)
    batch = torch.export.Dim("batch", min=1)
    two = tuple(one[: 2 * k] for one in (x, *lengths))
    program = torch.export.export(exported, two, dynamic_shapes=[{0: k * batch}] * len(two))
    text = json.dumps(described(task, trained.names, x.dtype))
    raw, written = (as_onnx if path.suffix == ".onnx" else as_pt2)(program, text)
    difference = (written(x, *lengths) - ours).abs()
    if ours.ndim == 3 and lengths:  # what is predicted past the end does not count
        difference = difference[inside(lengths[0], task.length)]
    error = difference.max().item()
    if not error < 1e-5 * max(high - low, (ours - low).abs().max().item()) + math.ulp(
        ours.abs().max().item()
    ):
        raise UserError(
            f"the export of {trained.run} differs from the model by {error:.1g}; nothing was "
            "written"
        )
    write_atomically(path, lambda file: file.write(raw))
    inputs = ", ".join(
        f"({'2 b' if k > 1 else 'b'}{''.join(f', {n}' for n in one.shape[1:])}) "
        f"{str(one.dtype).removeprefix('torch.')}"
        for one in (x, *lengths)
    )
    more = "" if dtype == "float32" else f"; it computes in float32, but the run in {dtype}"
    outputs = ", ".join(map(str, ("b", *ours.shape[1:])))
    print(f"wrote {path}: {inputs} -> ({outputs}); it differs from the model by {error:.1g}{more}")


# ---- Continue sequences with a causally pretrained run -------------------------------------------


def beginning(trained, prompt):
    """Return the given symbols (b, t), which the model continues."""
    task = trained.task
    if task.side and prompt is not None:
        raise UserError(
            f"--prompt has no meaning for the images of {task.family}, whose upper half is given"
        )
    if task.side or prompt is None:
        val = open_task(trained.saved["task"], trained.data_dir)[2]
    if task.side:
        return val.batch(np.arange(8)).symbols[:, : task.length // 2]  # (b, l/2)
    if prompt is None:
        some = val.batch([0])
        # (1, l/4), without <eos>
        return some.symbols[:1, : max(1, min(task.length // 4, some.lengths[0] - 1))]
    words = prompt.split() if task.between else list(prompt)
    if unknown := set(words) - set(task.symbols[EOS + 1 :]):  # special symbols are unknown, too
        raise UserError(
            f"--prompt {prompt!r}: {task.family} has no symbol "
            f"{' '.join(map(repr, sorted(unknown)))}; "
            f"it has: {' '.join(task.symbols[EOS + 1 : EOS + 100])}"
        )
    if not 0 < len(words) < task.length:
        raise UserError(
            f"--prompt has {len(words)} symbols; {task.family} needs 1 to {task.length - 1}"
        )
    return torch.tensor([[task.symbols.index(word) for word in words]])  # (1, words)


@torch.no_grad()
def continued(task, model, x):
    """Draw symbols after x (b, t) up to the task's length, or until all sequences end in <eos> ->
    (b, length at most). A model whose layers all have a recurrent form takes one step per position
    (attention keeps keys and values). Other models compute all positions again for every new
    one."""
    backbone = model.backbone
    given, states, steps = x.shape[1], None, can_step(backbone)
    for t in range(0 if steps else given - 1, task.length - 1):
        seen = x[:, t] if steps else x  # (b,) or (b, t + 1)
        if not backbone.reads_symbols:
            seen = (seen[..., None].float() / task.scale - task.mean) / task.std
        if steps:
            features, states = backbone_step(backbone, seen, t, states)  # (b, d)
        else:
            features = backbone(seen)[:, -1]
        if t + 1 < given:
            continue
        scores = model.head(features)  # (b, vocab)
        if not task.side:
            scores[:, [MASK, PAD, UNK]] = -math.inf
        x = torch.cat((x, torch.multinomial(scores.softmax(-1), 1)), 1)
        if not task.side and (x[:, -1] == EOS).all():
            break
    return x


def generate(trained, args):
    saved, task = trained.saved, trained.task
    for name, wanted in (("start", "pretrain"), ("objective", "causal"), ("loss", "ce")):
        if saved.get(name) != wanted:
            raise UserError(
                f"{args.run} has {name} {saved.get(name)}; to continue a sequence, predict.py "
                "needs a run "
                "of pretrain.py with --objective causal --loss ce. Labels need a run of "
                "finetune.py "
                "(--init RUN); other outputs of a pretraining run are --show sheet.png, --features "
                "out.npy"
            )
    x = beginning(trained, args.prompt)
    torch.manual_seed(args.seed)
    x = continued(task, trained.model, x)
    if task.side:
        pictures = np.hstack(x.view(-1, task.side, task.side).byte().numpy())  # (side, b side)
        Image.fromarray(pictures).resize(
            [4 * pixels for pixels in pictures.shape[::-1]], Image.NEAREST
        ).save(args.run / "sample.png")
        print(f"wrote {args.run / 'sample.png'}: validation images; the lower half is generated")
    else:
        print(task.between.join(task.symbols[i] for i in x[0] if i != EOS))


def main(argv=None):
    parser = Parser(examples=True, description="Predictions of a trained run.", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="new sequences: a table, .npz, .ts, or .txt "
        "with one text per line (default: the test split)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("predictions.csv"),
        metavar="FILE",
        help="where to write predictions (default: predictions.csv)",
    )
    parser.add_argument(
        "--features", type=Path, metavar="FILE", help="write features (n, d), not predictions"
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the model for other programs (.pt2, .onnx)",
    )
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="draw what a pretrained run fills in (.png, .pdf)"
    )
    parser.add_argument(
        "--prompt", help="beginning of the sequence (default: taken from the validation split)"
    )
    parser.add_argument(
        "--seed", type=between(int, 0, 2**63 - 1), default=0, help="seed of the drawn symbols"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="device for predictions and features",
    )
    parser.add_argument("--data-dir", default="data", help="where prepared data sets live")
    add_layout(parser, "--input")
    args = parser.parse_args(argv)
    trained = load(args.run, args.data_dir)
    here = Path(args.data_dir, folder_name(trained.saved["task"]), "meta.json").exists()
    if not (here or args.input or args.export) and (path := held_examples(trained)):
        print(f"the run's data are not here; using {path} instead")
        args.input = path
    if args.show:
        picture("--show", args.show)
    if args.export:
        export(trained, args.export)
    elif args.show:
        split = (
            new_split(trained, args.input, given(args))[0]
            if args.input
            else open_task(trained.saved["task"], args.data_dir)[2]
        )
        show(trained, split, args.show)
    elif args.prompt is not None or trained.pretrained and not (args.features or args.input):
        generate(trained, args)
    else:
        label(trained, args)


if __name__ == "__main__":
    guarded(main)
