"""own/table.py, columns.py: tables as people have them; what a file does not say is asked for."""

import glob
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.io
from conftest import ROOT, alike
from test_predict import table

import data
import predict
from files import UserError
from own.columns import Layout
from own.read import NO_LAYOUT, read_own

X = np.round(np.random.default_rng(0).normal(size=(12, 5)), 3)
Y = np.array(["run", "walk"] * 6)
CASES = ROOT.parent / "shared" / "cases"


def read(path, raw, layout=NO_LAYOUT):
    """Read a file as training does: a row that cannot be read is an error."""
    return read_own(path, raw, layout)


def lines(rows, delimiter=",", header=None):
    return (
        "\n".join(
            delimiter.join(map(str, row))
            for row in ([header] if header else []) + [*map(list, rows)]
        )
        + "\n"
    )


FIRST = [[y, *x] for y, x in zip(Y, X)]
LAST = [[*x, y] for y, x in zip(Y, X)]
NAMES = [f"t{i}" for i in range(5)]
COMMA = [[y, *(str(value).replace(".", ",") for value in x)] for y, x in zip(Y, X)]
LONG = [
    [i, t, X[i, t], -X[i, t], Y[i]]
    for i in range(12)
    for t in np.random.default_rng(i).permutation(5)
]


@pytest.mark.parametrize(
    "name, text, flags",
    [
        ("a.csv", lines(FIRST), {}),
        ("a.csv", lines(FIRST, ";"), {}),
        ("a.csv", lines(FIRST, "\t"), {}),
        ("a.tsv", lines(FIRST), {}),
        ("a.tsv", lines(FIRST, "\t"), {}),
        ("a.csv", lines(FIRST, "|"), {}),
        ("a.csv", lines(FIRST, " "), {}),
        ("a.csv", lines(COMMA, ";"), {}),
        ("a.csv", lines(COMMA, "\t"), {}),
        ("a.csv", lines([[y, *(f'"{cell}"' for cell in row)] for y, *row in COMMA]), {}),
        ("a.csv", lines(FIRST, ",", ["class", *NAMES]), {}),
        ("a.csv", lines(LAST, ",", [*NAMES, "Label"]), {}),
        ("a.csv", lines(FIRST, ",", ["y", *range(5)]), {}),
        ("a.csv", lines(LAST), dict(label="-1")),
        ("a.csv", lines(LAST, ",", [*NAMES, "species"]), dict(label="species")),
        ("a.csv", lines(FIRST, ", "), {}),
        ("a.csv", lines([[*row, ""] for row in FIRST]), {}),
        ("a.csv", lines(FIRST).replace("\n", "\r\n"), {}),
        ("a.csv", lines(FIRST).replace("\n", "\n\n"), {}),
    ],
    ids=str,
)
def test_however_a_table_is_written(name, text, flags, tmp_path):
    """The same numbers to the last bit, the same labels; whatever the encoding and the
    compression."""
    for raw in (
        text.encode(),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode("utf-16"),
        text.encode("latin-1"),
    ):
        for suffix, pack in (("", bytes), (".gz", gzip.compress)):
            own = read_own(f"{name}{suffix}", pack(raw), Layout(**flags))
            assert (
                np.array_equal(np.stack(own.series)[..., 0], X)
                and own.labels.tolist() == Y.tolist()
            )


RISING = lines([["ab"[i % 2], i + 0.5, -i, 3.25] for i in range(9)])


@pytest.mark.parametrize(
    "name, text, flags, series, labels",
    [
        # a header as pandas writes it
        ("a.csv", "0,1,2,3\n" + RISING, {}, [[0.5, 0, 3.25], [1.5, -1, 3.25]], "ab"),
        (
            "a.csv",
            "strain,0.0,0.5,1.0\n" + RISING,
            dict(label="strain"),
            [[0.5, 0, 3.25], [1.5, -1, 3.25]],
            "ab",
        ),
        (
            "a.csv",
            ",Group,t0,t1,t2\n" + "".join(f"{i},{line}\n" for i, line in enumerate(RISING.split())),
            dict(label="Group"),
            [[0.5, 0, 3.25], [1.5, -1, 3.25]],
            "ab",
        ),  # and its index
        ("a.csv", "sep=,\n" + RISING, {}, [[0.5, 0, 3.25], [1.5, -1, 3.25]], "ab"),
        ("a.csv", RISING.encode("utf-16-le"), {}, [[0.5, 0, 3.25], [1.5, -1, 3.25]], "ab"),
        # quotes that are letters
        ("a.tsv", 'a\t"hello\nb\tworld"\na\tthree\n', {}, ['"hello', 'world"'], "ab"),
        ("a.csv", "#happy day\nplain\n", {}, ["#happy day", "plain"], None),
        ("a.csv", "0110\n1001\n", dict(text="0"), ["0110", "1001"], None),
        ("a.csv", "a, tex\nb, more\n", {}, [" tex", " more"], "ab"),
        ("a.txt", "one\x0ctwo\nthree\x85.\n", {}, ["one\x0ctwo", "three\x85."], None),
        (
            "a.csv",
            "s,time,hr\n1,2024-01-30,5\n1,2024-02-01,7\n1,2024-01-31,6\n2,2024-01-30,8\n2,2024-01-31,9\n",
            dict(id="s", time="time", label="none"),
            [[5, 6, 7], [8, 9]],
            None,
        ),
        (
            "a.csv",
            "s,time,hr\n1,2024-03-30T12:00+01:00,5\n1,2024-03-31T12:00+02:00,6\n2,2024-03-30T12:00Z,8\n",
            dict(id="s", time="time", label="none"),
            [[5, 6], [8]],
            None,
        ),
    ],
)
def test_forms_that_were_misread(name, text, flags, series, labels):
    own = read(name, text if isinstance(text, bytes) else text.encode(), Layout(**flags))
    found = [one if isinstance(one, str) else one[:, 0].tolist() for one in own.series]
    assert found[:2] == series and (
        own.labels is None if labels is None else [*own.labels[:2]] == [*labels]
    )


@pytest.mark.parametrize(
    "name, text, flags, words",
    [
        ("a.csv", "label,signal,,\n" + RISING, {}, "column 2 \\(counted from 0\\) has no name"),
        # as R writes row names
        (
            "a.csv",
            '"label" "t0"\n"1" 1 0.5\n"2" 0 0.7\n',
            {},
            "line 1 has 2 fields, and most lines have 3",
        ),
        (
            "a.csv",
            'label,t0,t1\na,"1,234",5\nb,"2,500",6\n',
            {},
            "does the comma in '1,234' mark thousands or decimals",
        ),
        (
            "a.csv",
            'label,t0,t1\na,"0,234",5.5\nb,"2,500",1.5\n',
            {},
            "does the comma in '0,234' mark thousands or decimals",
        ),
        (
            "a.csv",
            "s,time,hr\n1,30.01.2024,5\n1,01.02.2024,6\n",
            dict(id="s", time="time", label="none"),
            "column time holds '30.01.2024'; a time is a number, or a date as 2024-01-31",
        ),
        (
            "a.csv",
            "s,time,hr\n1,1,5\n1,,6\n",
            dict(id="s", time="time", label="none"),
            "line 3: column time holds ''; a time",
        ),
        ("a.csv", "s,time,hr\n1,1,5\n", dict(id="s"), "needs both --id COLUMN and --time COLUMN"),
        (
            "a.csv",
            lines([[i // 5, 7 * i, i * i % 7, 3.5] for i in range(30)]),
            {},
            "looks like a long table",
        ),
        ("a.jsonl", "a,b\n1,2\n", {}, "a.jsonl cannot be read: .*with a JSON object per line"),
        (
            "a.jsonl",
            '{"x":[1,"u"],"label":1}\n{"x":[1,2],"label":0}\n',
            {},
            "a.jsonl, line 1: .* is no list of numbers",
        ),
        (
            "a.jsonl",
            '{"x":[[1,2,3],[4,5,6]],"label":1}\n',
            {},
            "is the last axis the positions \\(--channels-first\\), or are there 3",
        ),
        (
            "a.txt",
            "label\tt0\tt1\n" + "a\t1.5\t2.5\n" * 5,
            {},
            "holds numbers, but a .txt holds one text per line",
        ),
    ],
)
def test_forms_that_are_asked_about(name, text, flags, words):
    with pytest.raises(UserError, match=words):
        read(name, text.encode(), Layout(**flags))


def test_a_row_per_position():
    """In any order; several channels; lengths may differ."""
    own = read_own(
        "a.csv",
        lines(LONG, ",", ["case", "when", "up", "down", "label"]).encode(),
        Layout(id="case", time="when"),
    )
    assert (
        np.array_equal(np.stack(own.series), np.stack([X, -X], -1))
        and own.labels.tolist() == Y.tolist()
    )
    assert own.rows.tolist() == [*range(0, 60, 5)]
    own = read_own(
        "a.csv",
        lines(row[:3] for row in LONG if row[1] <= row[0] % 5).encode(),
        Layout(id="0", time="1", label="none"),
    )
    assert [len(one) for one in own.series] == [i % 5 + 1 for i in range(12)] and own.labels is None
    for rows, words in (
        (LONG + [LONG[0]], "case 0 has two rows of one when"),
        (LONG[:-1] + [[*LONG[-1][:-1], "run"]], "case 11 has several labels"),
    ):
        with pytest.raises(UserError, match=words):
            read_own(
                "a.csv",
                lines(rows, ",", ["case", "when", "up", "down", "label"]).encode(),
                Layout(id="case", time="when"),
            )


@pytest.mark.parametrize(
    "name, values, words",
    [
        ("sample", range(12), "column sample rises or falls with the rows.*--drop sample"),
        ("sample", np.random.default_rng(0).permutation(12), "holds whole numbers, others not"),
        ("heat_index", np.random.default_rng(0).normal(size=12), None),
        ("set_temp", np.random.default_rng(1).normal(size=12), None),
        ("subjectId", [f"P{i // 3}" for i in range(12)], "subjectId a sample.*--group subjectId"),
        ("site", np.arange(12) % 3, "--group site"),
        ("window_index", [f"0_{i}" for i in range(12)], "--drop window_index"),
        ("Fold", np.arange(12) % 3, "--split Fold: train, val, test or the number of a fold"),
        ("used for", ["train", "test"] * 6, "--split used for"),
        ("trial", np.arange(12) // 4, "holds whole numbers, others not.*--drop trial"),
        ("logged", [f"2024-03-{i + 1:02d}" for i in range(12)], "holds times.*--time logged"),
        (
            "at",
            [1_700_000_000 + 20 * i for i in range(12)],
            "rises or falls.*Windows of",
        ),
    ],
    ids=str,
)
def test_a_column_that_is_no_sample_is_asked_about(name, values, words):
    rows = [[value, *row] for value, row in zip(values, FIRST)]
    text = lines(rows, ",", [name, "label", *NAMES]).encode()
    if words is None:
        assert read("a.csv", text).series[0].shape == (6, 1)
        return
    with pytest.raises(UserError, match=words):
        read("a.csv", text)
    assert np.array_equal(read("a.csv", text, Layout(drop=name)).series[0].ravel(), X[0])
    beside = read("a.csv", text, Layout(group=name))
    assert [*beside.group] == [*map(str, values)] and len(beside.series[0]) == 5


TEXTS = [[y, f'said "{i}", then left'] for i, y in enumerate(Y)]


@pytest.mark.parametrize(
    "name, text, flags",
    [
        ("a.csv", lines([[y, '"' + text.replace('"', '""') + '"'] for y, text in TEXTS]), {}),
        ("a.csv", lines([[y, '"' + text.replace('"', r"\"") + '"'] for y, text in TEXTS]), {}),
        ("a.tsv", lines(TEXTS, "\t"), {}),
        ("a.tsv", lines([[y, '"' + text.replace('"', '""') + '"'] for y, text in TEXTS], "\t"), {}),
        ("a.csv", lines(TEXTS, ";", ["label", "review"]), {}),
        (
            "a.csv",
            lines([[i, *pair] for i, pair in enumerate(TEXTS)], ";", ["id", "label", "review"]),
            dict(text="review"),
        ),
        (
            "a.jsonl",
            "".join(json.dumps(dict(review=text, label=y)) + "\n" for y, text in TEXTS),
            {},
        ),
    ],
)
def test_texts_with_quotes(name, text, flags):
    own = read_own(name, text.encode(), Layout(**flags))
    assert own.series == [text for _, text in TEXTS] and own.labels.tolist() == Y.tolist()


@pytest.mark.parametrize(
    "text, flags, words",
    [
        (
            lines(LAST),
            {},
            r"the last column looks like the label \('run'\), the first does not \('0.126'\); give "
            r"--label 0, --label -1 or --label none",
        ),
        (
            lines(LAST, ",", [*NAMES, "species"]),
            {},
            "no column is called label, target, class, y; its columns are: t0, t1, t2, "
            "t3, t4, species; say which is the label with --label NAME, or --label none",
        ),
        (
            lines(FIRST, ",", ["y", *NAMES]),
            dict(label="spezies"),
            "has no column 'spezies' for --label; its columns are: y, t0",
        ),
        (
            lines(FIRST).replace("0.64,", "x,"),
            {},
            "line 1: column 3: 'x' is no number; correct it, leave it empty",
        ),
        (
            lines(FIRST, ",", ["y", *NAMES]).replace("0.64,", "x,"),
            {},
            "line 2: column t2: 'x' is no number",
        ),
        (
            lines([row[:3] for row in sorted(LONG, key=lambda row: row[:2])]),
            {},
            "looks like a long table, a row per position; "
            "give --id 0 --time 1 and --label COLUMN, or --label none",
        ),
        (
            lines([[i, *pair] for i, pair in enumerate(TEXTS)], ";", ["id", "label", "review"]),
            {},
            "is column id a sample\\? --drop id leaves it out",
        ),
    ],
)
def test_what_is_not_said_is_asked_for(text, flags, words):
    with pytest.raises(UserError, match=words):
        read("a.csv", text.encode(), Layout(**flags))


def test_new_data_are_read_as_the_training_data_were(tmp_path, monkeypatch, capsys):
    """By name: other columns, another order, no label; a DataFrame as well. Without a header by
    their number."""
    import finetune

    monkeypatch.chdir(tmp_path)
    rows, more = [*FIRST * 5], [["a", row[3], *row] for row in FIRST * 5]
    (tmp_path / "named.csv").write_text(lines(rows, ";", ["species", *NAMES]))
    (tmp_path / "bare.csv").write_text(lines(rows))
    (tmp_path / "last.csv").write_text(lines([[*row[1:], row[0]] for row in rows]))
    apart = [[i, t, x, row[0]] for i, row in enumerate(rows) for t, x in enumerate(row[1:])]
    (tmp_path / "long.csv").write_text(lines(apart, ",", ["case", "when", "up", "species"]))
    for name, layout in (
        ("named", dict(label="species")),
        ("bare", None),
        ("last", dict(label="-1")),
        ("long", dict(label="species", id="case", time="when")),
    ):
        data.prepare(f"file:{name}.csv", "data", layout=layout)
        finetune.main(
            [
                "--task",
                f"file:{name}.csv",
                "--model",
                "s4",
                "--arch",
                "d=8,layers=1",
                "--steps",
                "2",
                "--batch",
                "8",
                "--warmup",
                "1",
                "--out",
                name,
            ]
        )

    def told(run, text, *flags):
        (tmp_path / "new.csv").write_text(text)
        predict.main([run, "--input", "new.csv", *flags])
        return [
            (line["row"], line.get("label"), line["p(run)"]) for line in table("predictions.csv")
        ]

    named = told("named", lines(rows, ";", ["species", *NAMES]))
    assert [label for _, label, _ in named] == [row[0] for row in rows]
    bare = [(row, None, p) for row, _, p in named]
    assert alike(told("named", lines([row[1:] for row in rows], ",", NAMES)), bare)
    assert alike(told("named", lines([row[:0:-1] for row in rows], ",", NAMES[::-1])), bare)
    assert alike(told("named", lines([row[1:] for row in rows])), bare)
    assert alike(told("named", lines(more, ",", ["who", "what", "species", *NAMES])), named)
    with pytest.raises(
        UserError, match="has no column 't1', which training had; its columns are: t0, t2"
    ):
        told("named", lines([[row[1], *row[3:]] for row in rows], ",", [NAMES[0], *NAMES[2:]]))
    for run, text in (("bare", lines(rows)), ("last", lines([[*row[1:], row[0]] for row in rows]))):
        whole = told(run, text)
        assert [label for _, label, _ in whole] == [row[0] for row in rows]
        for words in ([], ["--label", "none"]):
            assert alike(
                told(run, lines([row[1:] for row in rows]), *words),
                [(row, None, p) for row, _, p in whole],
            )
    whole = told("long", lines(apart, ",", ["case", "when", "up", "species"]))
    assert [label for _, label, _ in whole] == [row[0] for row in rows]
    bare = told(
        "long",
        lines([[row[2], row[1], row[0]] for row in apart[::-1]], ";", ["up", "when", "case"]),
    )
    assert alike([p for *_, p in bare], [p for *_, p in whole[::-1]])
    frame = pd.read_csv("named.csv", sep=";")
    for some in (frame, frame[NAMES], frame[["t3", "t1", "t0", "t4", "t2", "species"]]):
        assert np.allclose(
            predict.load("named")(some)[1][:, 0], [float(p) for _, _, p in named], atol=1e-5
        )


# Of files of shared/cases, whatever form they have: the same arrays as csv_plain.csv.
PLAIN = """csv_header.csv csv_pandas_label_numbers.csv csv_plain.csv.gz csv_quoted_numbers.csv
    csv_utf16.csv csv_scientific_comma_decimal_quoted.csv csv_spaces_after_comma.csv
    csv_trailing_comma.csv ts_crlf_bom.ts ts_spaces.ts ts_latin1.ts ts_percent.ts
    ts_timestamps.ts ts_timestamps_int.ts ts_uppercase.ts"""
# Those of the second round that are read; all others are asked about.
SECOND = """b7_dna_kmers b7_dna_masked c4_nan_words c4_nulls c5_hidden_first c6_errors c7_nested
    d2_twelve d_rul d_sentinel d_sentinel_cleaned e4_new g_wide"""
ASKED = """csv_300_classes csv_comment_lines csv_counts_label_last csv_datetime_first csv_label_NA
    csv_label_last csv_label_last_int csv_long csv_long_multi csv_long_noheader csv_nolabel
    csv_pandas_index csv_ragged_nolabel csv_spaces npz_complex npz_few npz_group_one npz_images
    npz_images_nchw npz_inf npz_int16 npz_list_of_pairs npz_ncl npz_one_class npz_three npz_x_1d
    npz_y_constant_regression npz_y_longer npz_y_none_strings text_id_label_text text_label_last
    text_numbers_as_text text_one_empty text_one_empty_first tokens_per_line ts_channels_unequal
    ts_empty_value ts_int_targets ts_label_with_colon arff_uni dna plain"""
ANSWERS = [
    ("csv_label_last.csv", dict(label="-1")),
    ("csv_label_last_int.csv", dict(label="-1")),
    ("csv_long.csv", dict(id="id", time="time", label="none")),
    ("csv_long_multi.csv", dict(id="case", time="time")),
    ("csv_nolabel.csv", dict(label="none")),
    ("csv_long_noheader.csv", dict(id="0", time="1", label="none")),
    ("text_id_label_text.csv", dict(text="text")),
    ("npz_ncl.npz", dict(channels_first=True)),
]


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """A folder with the files of shared/cases, in which the test runs."""
    if not CASES.exists():
        pytest.skip("no shared/cases")
    for name in "make.py", "second.py", "jobs.py":
        (tmp_path / name).write_bytes((CASES / name).read_bytes())
        subprocess.run([sys.executable, name], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_file_after_a_bug_report_is_read_or_refused_in_one_line(cases, tmp_path, capsys):
    def arrays(name, **layout):
        folder = data.prepare(f"file:{tmp_path / name}", tmp_path / "data", layout=layout or None)
        return [path.read_bytes() for path in sorted(folder.glob("*.npy"))]

    plain = arrays("csv_plain.csv")
    assert all(arrays(name) == plain for name in PLAIN.split())
    for path in [*tmp_path.glob("*.*"), *tmp_path.glob("second/*.*")]:
        first_round = path.parent == tmp_path
        if path.suffix == ".py" or path.name.startswith("new_") or path.name in PLAIN.split():
            continue
        asked = path.stem in ASKED.split() if first_round else path.stem not in SECOND.split()
        try:
            arrays(path)
            assert not asked or path.name == "dna.csv", path
        except UserError as error:
            assert asked and path.name in str(error) and "\n" not in str(error), error
    for name, flags in ANSWERS:
        arrays(name, **flags)
        assert len(read_own(name, (tmp_path / name).read_bytes(), Layout(**flags)).series) == 40
    capsys.readouterr()


# Of new data: a run on which file, and what predict.py prints.
NEW = {
    "new_blank.csv": ("csv_plain.csv", "holds no sequence"),
    "new_empty.csv": ("csv_plain.csv", "holds no sequence"),
    "new_header_text.csv": ("text_plain.csv", "4 labels: accuracy"),
    "new_text_only_header.csv": ("text_plain.csv", "4 examples"),
    "new_int.npz": ("npz_plain.npz", "6 labels: accuracy"),
    "new_label_1_0.csv": ("csv_plain.csv", "8 labels belong to no class"),
    "new_longer.npz": ("npz_plain.npz", "60 positions, but training had 30"),
    "new_text_only.csv": ("text_plain.csv", "4 examples"),
    "new_mixed_nan_label.csv": ("csv_plain.csv", "3 labels: accuracy"),
    "new_ncl.npz": ("npz_plain.npz", "3 channel"),
    "new_one_missing.csv": (
        "csv_plain.csv",
        "example 2: ",
    ),
    "new_one_nan.npz": (
        "npz_plain.npz",
        "example 2: ",
    ),
    "new_one_short.csv": (
        "csv_plain.csv",
        "line 4 has 30 fields",
    ),
    "new_short.csv": ("csv_plain.csv", "20 positions, but training had 30"),
    "new_text_label.csv": ("text_plain.csv", "column 0 holds no class of"),
    "new_two_channels.npz": (
        "npz_plain.npz",
        "its shape is (30, 2), but a position has 3 channel(s)",
    ),
    "new_unknown_labels.csv": (
        "csv_plain.csv",
        "3 labels belong to no class of the model: Walk, RUN, swim",
    ),
}


def test_new_files_after_a_bug_report(cases, tmp_path, capsys):
    import finetune

    assert {path.name for path in tmp_path.glob("new_*")} == NEW.keys()
    for run in {run for run, _ in NEW.values()}:
        finetune.main(
            [
                "--task",
                f"file:{run}",
                "--model",
                "s4",
                "--arch",
                "d=8,layers=1",
                "--steps",
                "2",
                "--warmup",
                "1",
                "--batch",
                "8",
                "--out",
                f"of {run}",
            ]
        )
    for name, (run, words) in NEW.items():
        capsys.readouterr()
        try:
            predict.main([f"of {run}", "--input", name])
            said = capsys.readouterr().out
        except UserError as error:
            said = str(error)
            assert name in said and "\n" not in said
        assert words in said, name


def write_inputs(folder):
    """The files that the programs of results/own.md read."""
    bare, rowwise = dict(index=False), dict(orient="records", lines=True)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 12)).round(3)
    y = np.array(["run", "walk", "sit"] * 8)
    names = [f"t{t}" for t in range(12)]
    wide = pd.DataFrame(x, columns=names)
    wide.insert(0, "label", y)
    walk = pd.DataFrame(rng.normal(size=(2_400, 3)).cumsum(0), columns=["x", "y", "z"])
    walk["activity"] = np.array(["run", "walk"])[np.arange(2_400) // 100 % 2]
    walk.rename_axis("timestamp").to_csv("recording.csv")
    rows = [(i // 4, i % 4, t, x[i, t], y[i]) for i in range(24) for t in range(12)]
    names = ["subject", "trial", "t", "up", "label"]
    pd.DataFrame(rows, columns=names).to_csv("trials.csv", index=False)
    columns = {f"{label}_{i}": row for i, (label, row) in enumerate(zip(y, x))}
    pd.DataFrame(columns).rename_axis("time").to_csv("columns.csv")
    axes = [pd.DataFrame(axis).add_prefix(name) for axis, name in ((x, "ax_"), (-x, "ay_"))]
    pd.concat([wide["label"], *axes], axis=1).to_csv("beside.csv", **bare)
    with pd.ExcelWriter("book.xlsx") as book:
        wide[:15].to_excel(book, sheet_name="train", **bare)
        wide[15:].to_excel(book, sheet_name="test", **bare)
    merged = wide.sort_values("label")
    merged.assign(label=merged["label"].where(~merged["label"].duplicated())).to_excel(
        "merged.xlsx", index=False
    )
    wide.replace(x[0, 0], -9999).to_csv("sentinels.csv", **bare)
    usage = ["Training"] * 12 + ["PublicTest"] * 6 + ["PrivateTest"] * 6
    wide.assign(Usage=usage).to_csv("usage.csv", **bare)
    tags = ["joy", "fear", "joy;fear"] * 8
    pd.DataFrame(dict(text=[f"a day {i}" for i in range(24)], label=tags)).to_csv(
        "tags.csv", index=False
    )
    wide.drop(columns="label").rename_axis("id").to_csv("series.csv")
    wide["label"].rename_axis("id").to_csv("labels.csv")
    lists = pd.DataFrame(dict(label=y, signal=[str(row.tolist()) for row in x]))
    lists.to_csv("lists.csv", **bare)
    words = [[f"E{k}" for k in rng.integers(5, size=9)] for _ in y]
    pd.DataFrame(dict(tokens=words, label=y)).to_json("words.jsonl", **rowwise)
    pairs = pd.DataFrame(dict(ax=[*x], ay=[*-x], label=y))
    pairs.to_json("channels.jsonl", **rowwise)
    log = [(i, t, "ABC"[rng.integers(3)], y[i]) for i in range(24) for t in range(8)]
    pd.DataFrame(log, columns=["case_id", "timestamp", "activity", "outcome"]).to_csv("events.csv")
    wide.to_json("rows.json", orient="records")
    wide.to_csv("table.csv.zip", **bare)
    lines = "\n".join(",".join(map(str, [*row, label])) for row, label in zip(x, y))
    Path("table.arff").write_text(f"@relation a\n@data\n{lines}\n")
    pd.to_pickle(dict(x=x, y=y), "held.pkl")
    scipy.io.savemat("held.mat", dict(X=np.stack([x, -x], 1), y=np.arange(24) % 2))
    np.save("X.npy", np.stack([x, -x], 1))
    np.save("y.npy", np.arange(24) % 2)
    dna = ["".join("ACGT"[k] for k in rng.integers(4, size=20)) for _ in y]
    Path("dna.fasta").write_text("".join(f">s{i}|{y[i]}\n{dna[i]}\n" for i in range(24)))
    np.save("images.npy", rng.normal(size=(24, 3, 4, 4)))
    for i, (label, row) in enumerate(zip(y, x)):
        for kind in "wavs", "nested":
            Path(kind, label).mkdir(parents=True, exist_ok=True)
        sound = np.round(row[: 10 + i % 3] * 1_000).astype("<i2")
        scipy.io.wavfile.write(f"wavs/{label}/{i}.wav", 8_000, sound)
        pd.DataFrame(dict(up=row, down=-row)).rename_axis("t").to_csv(f"nested/{label}/{i}.csv")


# Of a file that a program of the page writes: length, channels, classes.
WRITTEN = dict(windows=(40, 3, 2), cases=(12, 1, 3), several=(9, None, 2), codes=(10, None, 3))
WRITTEN |= dict(
    beside=(12, 2, 3), channels=(12, 2, 3), events=(9, None, 3), mat=(12, 2, 2), monster=(12, 2, 2)
)
WRITTEN |= dict(dna=(21, None, 3), images=(16, 3, 2), nested=(12, 2, 3))


def test_the_answers_of_the_page_are_read(tmp_path, monkeypatch, capsys):
    """In its order: each program, then data.py with the flags of its last line."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    page = (ROOT / "results" / "own.md").read_text()
    page = page[page.index("### Answers") : page.index("## Predictions for new")]
    names = dict(np=np, pd=pd, json=json, glob=glob)
    written = []
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        for program, flags in re.findall(r"(.*?)\n# (--task file:[^\n]*)\n", block, re.S):
            exec(program, names)
            assert data.main(flags.split()) == 0, capsys.readouterr()
            stem = re.search(r"file:(\w+)", flags)[1]
            task, *splits = data.open_task(flags.split()[1])
            assert (task.length, task.channels, task.classes) == WRITTEN.get(stem, (12, 1, 3)), stem
            written.append(stem)
    assert {*WRITTEN} < {*written} and len(written) > 20
    windows = np.load("windows.npz")
    _, *splits = data.open_task("file:windows.npz")
    groups = [{*windows["group"][split.rows]} for split in splits]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    sections = {match[0] for match in re.findall(r"own\.md: ((\w+ ?)+)", capsys.readouterr().out)}
    code = "".join(path.read_text() for path in (ROOT / "own").glob("*.py"))
    sections |= {match[0] for match in re.findall(r"\{PAGE\}: ((\w+ ?)+)", code)}
    assert len(sections) > 5 and all(f"**{section}" in page for section in sections), sections


def test_nothing_heavy_is_imported_by_what_reads_no_table():
    code = "import sys, data, tasks; sys.exit('pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_dates_far_apart_and_blanks_of_both_kinds():
    """Nanoseconds since 1970 end in 2262; a tab is a blank where blanks separate fields."""
    days = ("9999-12-31", 2), ("1600-01-02", 0), ("2024-01-01", 1)
    lines = "".join(
        f"{name},{day},{label},{value}\n"
        for name, label in (("a", "x"), ("b", "y"))
        for day, value in days
    )
    own = read("a.csv", lines.encode(), Layout(id="0", time="1", label="2"))
    assert [one.ravel().tolist() for one in own.series] == [[0, 1, 2]] * 2
    own = read("b.csv", b"1 \t 2 \t 3\n4 \t5\t 6\n1 7 8\n")
    assert np.array(own.series)[..., 0].tolist() == [[2, 3], [5, 6], [7, 8]]
