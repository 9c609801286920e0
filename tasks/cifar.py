"""CIFAR-10, pixel by pixel: Image in gray (Long Range Arena), sCIFAR in colour.

    61 45 48 57 78 ...    the gray levels of 32 x 32 pixels, row by row    ->    label 6, "frog"

sCIFAR has three numbers per pixel, its colours."""

import codecs
import io
import pickle
from dataclasses import replace

import numpy as np
from PIL import Image

from files import UserError, reading
from tasks import LEVELS, SPLITS, TASKS, Source, Task
from tasks.making import find, members, random_split, save_split


class ArraysOnly(pickle.Unpickler):
    """A reader of the official pickled batches. A pickle can call any function by its name; this
    reader knows only those that make an array."""

    ALLOWED = {
        ("_codecs", "encode"): codecs.encode,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module, name):
        if name == "_reconstruct" and module.startswith("numpy."):
            return np.empty(0).__reduce__()[0]  # makes an empty array, which its state fills
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[module, name]


def read_cifar(place):
    """Read CIFAR-10 (Krizhevsky 2009) from an archive, a folder or an .npz file -> (images, labels)
    of training and of test, in the official order: uint8 (n, 32, 32, 3), or (n, 32, 32) if the .npz
    holds gray images, and uint8 (n,)."""
    if place.suffix == ".npz":
        with np.load(place) as file:
            halves = ("train", "test")
            return [(file[f"x_{half}"], file[f"y_{half}"].reshape(-1)) for half in halves]
    batches = {}
    for match, raw in members(place, r"(?:^|/)(data_batch_[1-5]|test_batch)(\.bin)?$"):
        if match[2]:  # a label and three planes, row by row
            rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3072)
            labels, planes = np.split(rows, [1], axis=1)
        else:
            batch = ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
            labels = np.array(batch[b"labels"])
            planes = batch[b"data"]
        batches[match[1]] = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.reshape(-1)
    parts = [batches[f"data_batch_{i}"] for i in range(1, 6)]
    return [np.concatenate(arrays) for arrays in zip(*parts)], batches["test_batch"]


def prepare(task, request):
    """Prepare Image (one gray channel) or sCIFAR (three), row by row. A pixel of a smaller image is
    the mean of those whose centres lie under it. Validation is a tenth of the training images."""
    place = find(request, "cifar-10-binary*.tar.gz", "cifar-10-python*.tar.gz", "cifar10*.npz", ".")
    with reading(f"{place} is not the whole CIFAR-10", f"it may be: {task.source.accepts}"):
        (images, labels), test = read_cifar(place)
    if images.ndim < 4 and task.channels == 3:
        raise UserError(f"{place} holds gray images; {request.folder.name} needs colour")
    train, val = np.split(random_split(len(labels)), [int(len(labels) * 0.9)])
    splits = (images[train], labels[train]), (images[val], labels[val]), test
    mode = "L" if task.channels == 1 else "RGB"
    for split, (images, labels) in zip(SPLITS, splits):
        pictures = [Image.fromarray(image).convert(mode) for image in images]
        if task.side != 32:
            pictures = [picture.resize((task.side, task.side), Image.BOX) for picture in pictures]
        x = np.stack(pictures).reshape(-1, task.length, task.channels)
        save_split(request, split, x, labels, place)


CIFAR = Source(
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    "cifar-10-binary.tar.gz, cifar-10-python.tar.gz, a folder of either, or cifar10*.npz with "
    "x_train, y_train, x_test, y_test",
    "none stated; cite Krizhevsky 2009",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
COLOUR = Task(
    "cifar",
    length=1024,
    classes=10,
    sizes=(45_000, 5_000, 10_000),
    mask=0.50,
    source=CIFAR,
    channels=3,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.247, 0.243, 0.261),
    side=32,
    prepare=prepare,
    names=tuple(NAMES.split()),
)
GREY = replace(COLOUR, vocab=256, channels=1, mean=122.6 / 255, std=61 / 255, symbols=LEVELS)
TASKS |= {
    "image": GREY,
    "scifar": COLOUR,
    # These are not the paper's: smaller images, for `run_all.sh --preset mini`.
    "image_mini": replace(GREY, length=144, sizes=(45_000, 1_000, 5_000), side=12, subset=True),
    "scifar_mini": replace(COLOUR, length=144, sizes=(9_000, 1_000, 2_000), side=12, subset=True),
}
