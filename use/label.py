"""Predictions or features of a file's examples, or of the run's test split; and what the
predictions are worth, where there are labels."""

from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from data import named, open_task
from engine.targets import KINDS, balanced_scores, metrics
from files import BadRows, UserError, reading, write_atomically
from own.columns import Layout, given
from own.read import OWN_FILES, read_file
from own.split import as_numbers
from tasks import folder_name, full_name

UNKNOWN = "?"  # instead of several labels, where none is known: "" means none applies


def examples_beside(trained):
    """Return the file of examples next to a run that was shared without its data, e.g. TASK.csv;
    or None."""
    paths = trained.run.parent.glob(f"{trained.saved['task']}.*")
    return next((path for path in paths if path.suffix in OWN_FILES), None)


def held_out_examples(trained):
    """Return the test split of the run's data, its labels and names, as `new_examples` does."""
    name = trained.saved["task"]
    task, _, _, test = open_task(name, trained.data_dir)
    if task.data != trained.saved["data"]:
        raise UserError(
            f"{trained.run} was trained on {trained.saved['data']}, but {name} in "
            f"{trained.data_dir} holds {task.data}"
        )
    test.rows = np.arange(len(test)) if test.rows is None else test.rows
    ids = Path(trained.data_dir, folder_name(name), "test_ids.npy")
    ids = np.load(ids) if ids.exists() else None
    return test, None if trained.is_pretraining else named(task, test.y), ids


def new_examples(trained, path, flags=None, skip_bad=False):
    """Return the examples of a file as a Split, whose rows are their places in the file; their
    labels: names (n,), "" if there is none; numbers, NaN if there is none; several labels as one
    text each, UNKNOWN if none is known; names (n, longest), if each position has a label; or None,
    if there are none, or the run predicts none; and, of a table with a row per position, the names
    of the sequences (n,), or None.

    A table is read as that of the training data, or as flags (`given`) say. skip_bad: leave out
    rows that cannot be read, which are errors otherwise."""
    task = trained.task
    fields = (task.layout or {}) | (flags or {})
    per_position = {"positions": True, "labels": False}.get(task.target)
    layout = Layout(**fields)._replace(training=False, label_per_position=per_position)
    layout = layout._replace(channels_first=bool(layout.channels_first))  # None would be a question
    more = dict(documents=task.documents, regression=not task.classes)
    more["kind"] = "samples" if task.channels else "symbols"
    skip = []
    while True:
        try:
            contents = read_file(str(path), layout, skip=skip, **more)
            split = trained.split_of(contents.series, path, contents.rows)
            break
        except BadRows as error:
            if not skip_bad:
                advice = "--skip-bad leaves such rows out"
                raise BadRows(f"{error}. {advice}", error.rows) from None
            print(f"left out {len(error.rows):,} rows: {error}")
            skip += error.rows
    split.rows = np.arange(len(split)) if contents.rows is None else contents.rows
    if trained.is_pretraining or contents.labels is None or not contents.has_label.any():
        return split, None, contents.ids
    if contents.layout and contents.layout.label_column != "none":
        print(
            f"labels are read from column {contents.layout.label_column}; --label COLUMN names "
            "another; none: there is no label"
        )
    as_names = {"class": class_labels, "number": number_labels}.get(task.kind, array_labels)
    return split, as_names(trained, path, contents), contents.ids


# ---- The labels in a file, as the model names its predictions: (trained, path, contents) -> them -


def class_labels(trained, path, contents):
    """Return the class of each label: that of the same name or else, if there is only one, of the
    same number. So 1, "1" and 1.0 are the same class, but "01" and "1" are two. Labels of no class
    stay as they are."""
    names = trained.names
    # {number: the only class whose name is that number}
    of_number = pd.Series(names, pd.to_numeric(names.tolist(), errors="coerce"))
    of_number = of_number[of_number.index.notna() & ~of_number.index.duplicated(keep=False)]
    numbers = pd.to_numeric(pd.Series(contents.labels.tolist()), errors="coerce")
    texts = pd.Series(contents.labels.astype(str))
    labels = texts.where(texts.isin(names), numbers.map(of_number).astype(object).fillna(texts))
    layout, task = contents.layout, trained.task
    width_tells = task.channels and layout and layout.width  # whether a column is the label
    if layout and task.own and not width_tells and not {*labels} & {*names}:
        raise UserError(
            f"{path}: column {layout.label_column} holds no class of {trained.run}, e.g. "
            f"{names[0]}; --label COLUMN names the label; if there is none, give "
            "--label none --text COLUMN"
        )
    return np.where(contents.has_label, labels, "")


def number_labels(trained, path, contents):
    labelled = contents.has_label
    numbers = np.full(len(labelled), np.nan)
    with reading(f"{path}: not every label is a number", f"{trained.run} predicts numbers"):
        numbers[labelled] = as_numbers(contents.labels[labelled])
    return numbers


def array_labels(trained, path, contents):
    """Return several labels, 0 or 1 (n, classes), as one text of names each, or UNKNOWN. A label
    per position, names (n, longest), stays as it is."""
    labels = contents.labels
    task = trained.task
    are_names = labels.dtype.kind == "U"
    if task.kind == "positions" and are_names and labels.ndim == 2:
        return labels
    if task.kind == "labels" and not are_names and labels.shape[1:] == (task.classes,):
        return np.where(contents.has_label, named(task, np.nan_to_num(labels)), UNKNOWN)
    wanted = f"{task.classes} labels"
    if task.kind == "positions":
        wanted = f"one of {wanted} at each position"
    problem = f"{path}: labels have the shape {labels.shape}"
    raise UserError(f"{problem}; {trained.run} predicts {wanted}")


# ---- Predictions and what they are worth ---------------------------------------------------------


def prediction_table(trained, split, labels):
    """Return predictions as a DataFrame, one line per example: its row, its label, if there are
    labels, the prediction, and probabilities. With a label per position: one line per position."""
    task = trained.task
    predictions, probabilities = trained.predict(split)
    places = {"row": split.rows}
    columns = {} if labels is None else {"label": labels}
    columns["prediction"] = predictions
    for i, name in enumerate(trained.names):
        columns[f"p({name})"] = np.char.mod("%.6f", probabilities[..., i])
    if task.kind == "positions":
        lengths = split.lengths()
        lengths = np.full(len(split), task.length) if lengths is None else lengths
        if not task.channels:
            lengths = lengths - 1  # <eos> is no position of the user's
        example, position = np.nonzero(np.arange(task.length) < lengths[:, None])  # (m,) both
        if labels is not None:
            columns["label"] = labels
        columns = {name: column[example, position] for name, column in columns.items()}
        places = {"row": split.rows[example], "position": position}
    return pd.DataFrame(places | columns, dtype=object)


def quality(kind, labels, predictions, names):
    """Yield lines that compare predictions with labels, both as in `prediction_table`. names: of
    the classes."""
    if kind == "number":
        labelled = np.isfinite(labels)
        lines = quality_of_numbers
    elif kind == "labels":
        labelled = labels != UNKNOWN
        lines = quality_of_several_labels
    else:
        labelled = np.isin(labels, names)
        lines = quality_of_classes
        strange = Counter(label for label in labels[~labelled] if label not in ("", "nan"))
        if strange:
            yield (
                f"{sum(strange.values()):,} labels belong to no class of the model: "
                f"{', '.join([*strange][:5])}; not counted"
            )
    if labelled.any():
        yield from lines(labels[labelled], predictions[labelled], names)


def quality_of_several_labels(labels, predictions, names):
    y = np.array([np.isin(names, text.split(";")) for text in labels])  # (n, classes)
    guess = np.array([np.isin(names, text.split(";")) for text in predictions])
    scores = KINDS["labels"].scores(y, guess)
    right = (y == guess).all(1).mean()
    yield (
        f"{len(y):,} examples: macro F1 {scores['macro_f1']:.4f}, micro F1 "
        f"{scores['micro_f1']:.4f}; all labels right in {100 * right:.1f} %"
    )


def quality_of_numbers(y, predictions, names):
    error = metrics().root_mean_squared_error(y, predictions)
    r2 = ""
    if len(set(y)) > 1:
        r2 = f"R2 {KINDS['number'].scores(y, predictions)['r2']:.4f}, "
    yield f"{len(y):,} labels: {r2}root mean squared error {error:.4g}"


def quality_of_classes(y, predictions, names):
    scores = balanced_scores(y, predictions)
    f1 = metrics().f1_score(y, predictions, labels=np.unique(y), average="macro", zero_division=0)
    yield (
        f"{len(y):,} labels: accuracy {scores['accuracy']:.4f}, balanced accuracy "
        f"{scores['balanced_accuracy']:.4f}, macro F1 {f1:.4f}"
    )
    if len(names) <= 20:
        confusion = metrics().confusion_matrix(y, predictions, labels=names)
        table = pd.DataFrame(confusion, names, names).to_string()
        yield f"confusion matrix, one row per label, one column per prediction:\n{table}"
    if len(set(predictions)) == 1 and len(set(y)) > 1:
        yield f"every prediction is {predictions[0]}"


def label(trained, args):
    """Write features to --features, or else predictions to --out, and print what they are worth."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device; leave it out")
    trained.device = args.device
    trained.model.to(args.device)
    if args.input:
        split, labels, ids = new_examples(trained, args.input, given(args), args.skip_bad)
    else:
        split, labels, ids = held_out_examples(trained)
    if args.features:
        features = trained.features(split)
        write_atomically(args.features, lambda file: np.save(file, features))
        print(f"wrote {args.features}: {features.shape}, {features.dtype}, one line per example")
    else:
        write_predictions(trained, split, labels, ids, args)
    if args.input and trained.saved["task"] == full_name(f"file:{args.input}"):
        print("note: the run was trained on this file; without --input only its test split is used")


def write_predictions(trained, split, labels, ids, args):
    """Write predictions to --out. Print how often each class is predicted, and scores."""
    kind, names = trained.task.kind, trained.names
    table = prediction_table(trained, split, labels)
    if ids is not None:
        table.insert(0, "id", table["row"].map(dict(zip(split.rows, ids))))
    text = table.to_csv(index=False, na_rep="nan", lineterminator="\r\n")
    write_atomically(args.out, lambda file: file.write(text.encode(errors="replace")))
    number_format = ""
    if trained.dtype != "float32":
        number_format = f"; computed in {trained.dtype}, as in training"
    print(
        f"wrote {args.out}: {len(split):,} examples of {args.input or 'the test split'}; "
        f"rows are counted from 0{number_format}"
    )
    if trained.task.classes:
        predicted = table["prediction"]
        counts = Counter(predicted.str.split(";").explode() if kind == "labels" else predicted)
        words = ", ".join(f"{name} {counts[name]:,}" for name in names if counts[name])
        print(f"predicted: {words or 'no label'}")
    if labels is not None:
        labels, predictions = (np.array([*table[name]]) for name in ("label", "prediction"))
        for line in quality(kind, labels, predictions, names):
            print(line)
