"""Text: is a film review positive? Retrieval: does one paper cite another? Both are read as
characters.

    "Great!"    ->    ids 56 12 5 7 6 57 3 (3: <eos>),    label 1, "positive"

Symbols are characters, not bytes or words. A text is cut to length - 1 characters and ends with
EOS. Ids: the special symbols, then the characters of the (cut) training texts by falling frequency,
as in [2]; all others are UNK.

[1] github.com/google-research/long-range-arena, lra_benchmarks/matching/input_pipeline.py
[2] the paper's official configuration, which is that of S4 (github.com/state-spaces/s4)
"""

import csv
from collections import Counter
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from files import UserError
from tasks import EOS, SPECIAL, SPLITS, TASKS, UNK, Source, Task
from tasks.making import find, members, random_split, save_split


def vocabulary(counts, least):
    """Build the vocabulary from {character: number of occurrences}; characters that occur fewer
    than `least` times are UNK, ties are ordered by code point. Return the fields that `open_task`
    fills in, and encode(text) -> ids (characters + 1,), with EOS at the end."""
    frequent = (letter for letter in counts if counts[letter] >= least)
    letters = sorted(frequent, key=lambda letter: (-counts[letter], letter))
    vocab = len(SPECIAL) + len(letters)
    ids = np.full(0x110000, UNK, np.uint8 if vocab <= 256 else np.uint16)  # by code point
    ids[[ord(letter) for letter in letters]] = np.arange(len(SPECIAL), vocab)

    def encode(text):
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        return np.append(ids[points], ids.dtype.type(EOS))

    return dict(vocab=vocab, symbols=[*SPECIAL, *letters]), encode


def prepare_text(task, request):
    """Prepare IMDb (Maas et al. 2011). Validation is a tenth of the training reviews; the official
    code validates on the test set. The vocabulary holds the characters that occur at least 15 times
    in the 25,000 training reviews, as in [2]."""
    place = find(request, "aclImdb*.tar.gz", ".")
    reviews = {"train": {}, "test": {}}  # {half: {(label, file): text}}
    for match, raw in members(place, r"(?:^|/)(train|test)/(neg|pos)/(\d+_\d+)\.txt$"):
        half, sentiment, file = match.groups()
        text = raw.decode("utf-8", "replace")[: task.length - 1]
        reviews[half][sentiment == "pos", file] = text
    train, test = (sorted(half.items()) for half in reviews.values())  # by label, then by file
    counts = Counter("".join(text for _, text in train))
    fields, encode = vocabulary(counts, least=15)
    kept, held_out = np.split(random_split(len(train)), [len(train) - len(train) // 10])
    # The test reviews are shuffled, too, because a subset takes the first ones.
    orders = kept, held_out, random_split(len(test))
    for split, half, order in zip(SPLITS, (train, train, test), orders):
        y = [half[i][0][0] for i in order]
        save_split(request, split, (encode(half[i][1]) for i in order), y, place)
    return fields


def read_retrieval(path):
    """Yield (label, text, text) from an official AAN file: label ("0.0" or "1.0"), id, id, text,
    text; no header. As in [2] a field may be quoted by `"`, and may then hold tabs, line ends and
    doubled quotes ([1] takes quotes literally, so a few texts differ)."""
    csv.field_size_limit(1 << 22)  # the most that a quote which is never closed can swallow
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        try:
            for label, _, _, first, second in reader:
                yield int(float(label)), first, second
        except (csv.Error, ValueError) as error:
            problem = f"{path}, line {reader.line_num}: not a label, two ids and two texts"
            raise UserError(f"{problem} between tabs ({error}); restore the file") from None


def prepare_retrieval(task, request):
    """Prepare AAN (Radev et al. 2013; pairs of LRA). The files are read twice, because the training
    texts fill gigabytes: once for labels and vocabulary, once to write."""
    names = [f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]
    paths = [find(request, f"tsv_data/{name}", f"aan/{name}", name) for name in names]
    longest = task.length - 1  # room for EOS
    counts = Counter()  # of the training texts
    labels = []  # of each split
    for split, path in zip(SPLITS, paths):
        labels.append([])
        for label, first, second in tqdm(read_retrieval(path), desc=path.name, unit="pair"):
            labels[-1].append(label)
            if split == "train":
                counts.update(first[:longest] + second[:longest])
    fields, encode = vocabulary(counts, least=1)
    for split, path, y in zip(SPLITS, paths, labels):
        texts = (text for _, *pair in read_retrieval(path) for text in pair)
        save_split(request, split, (encode(text[:longest]) for text in texts), y, path)
    return fields


AAN = Source(
    (),
    "new_aan_pairs.{train,eval,test}.tsv, or the LRA release that holds them in tsv_data/",
    "texts of the ACL Anthology Network, not to be redistributed; the LRA archive answers 403 "
    "Forbidden",
)
IMDB = Source(
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    "aclImdb_v1.tar.gz, or its folder aclImdb/",
    "none stated; cite Maas et al. 2011",
    84_125_825,
    "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
TEXT = Task(
    "text",
    length=4096,
    classes=2,
    sizes=(22_500, 2_500, 25_000),
    mask=0.15,
    source=IMDB,
    vocab=0,
    names=("negative", "positive"),
    prepare=prepare_text,
)
PAIRS = replace(TEXT, family="retrieval", documents=2, source=AAN, prepare=prepare_retrieval)
PAIRS = replace(PAIRS, length=4000, sizes=(147_086, 18_090, 17_437), names=("unrelated", "related"))
TASKS |= {
    "text": TEXT,
    "retrieval": PAIRS,
    # These are not the paper's: the beginnings of reviews, for demos and for `run_all.sh --preset
    # mini`.
    "text256": replace(TEXT, length=256, mask=0.30),
    "text_demo": replace(TEXT, length=128, sizes=(5_000, 2_500, 10_000), mask=0.30, subset=True),
    "text_mini": replace(TEXT, length=128, sizes=(22_500, 1_000, 5_000), mask=0.30, subset=True),
}
