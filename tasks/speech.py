"""Speech Commands: which of 35 words is spoken? (Warden 2018)

one second of sound, 16,000 samples of 16 bits    ->    label 16, "yes"
"""

import io
import wave

import numpy as np
from tqdm import tqdm

from files import reading
from tasks import SPLITS, TASKS, Source, Task
from tasks.making import find, members, random_split, save_split


def prepare(task, request):
    """Prepare Speech Commands v0.02 (Warden 2018): all 35 words, raw samples. The official lists
    name the validation and test clips; the rest is for training.

    Samples are normalised by one mean and one standard deviation, those of the padded training
    clips. S4's official code uses one per time step, of values that it has divided by 2^15 twice.
    """
    place = find(request, "speech_commands*.tar.gz", ".")
    pattern = (
        rf"(?:^|/)(?:((?:{'|'.join(task.names)})/[^/.][^/]*\.wav)|(validation|testing)_list\.txt)$"
    )
    rows, lists, path = {}, {"validation": set(), "testing": set()}, request.folder / "samples.tmp"
    with open(path, "wb") as file:  # all clips, in the order of the archive
        for match, raw in tqdm(members(place, pattern), str(request.folder), unit="clip"):
            if match[1]:
                with (
                    reading(f"{match[1]} in {place} is damaged", "get it again"),
                    wave.open(io.BytesIO(raw)) as clip,
                ):
                    # 16 kHz, mono, 16 bits
                    samples = np.frombuffer(clip.readframes(task.length), "<i2")
                file.write(np.pad(samples, (0, task.length - len(samples))))  # padded with silence
                rows[match[1]] = len(rows)
            else:
                lists[match[2]] = set(raw.decode("utf-8", "replace").split())
    for split, mine in zip(
        SPLITS, (rows.keys() - lists["validation"] - lists["testing"], *lists.values())
    ):
        mine = sorted(rows.keys() & mine)
        mine = [mine[i] for i in random_split(len(mine))[: request.take(split, len(mine), place)]]
        samples = np.memmap(path, np.int16, "r", shape=(len(rows), task.length, 1))
        save_split(
            request,
            split,
            (samples[rows[clip]] for clip in mine),
            [task.names.index(clip.split("/")[0]) for clip in mine],
            place,
        )
    path.unlink()
    x = np.load(request.folder / "train_x.npy", mmap_mode="r")  # (n, l, 1)
    mean, power = x.mean(dtype=np.float64), np.einsum("nlc,nlc->", x, x, dtype=np.float64) / x.size
    return dict(mean=float(mean / task.scale), std=float(np.sqrt(power - mean**2) / task.scale))


SPEECH = Source(
    ("https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",),
    "speech_commands_v0.02.tar.gz, or a folder of it",
    "CC BY 4.0",
    2_428_923_189,
    "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
)
WORDS = tuple(
    "bed cat down five forward go house left marvin no on right sheila tree up visual yes backward "
    "bird dog "
    # S4's order
    "eight follow four happy learn nine off one seven six stop three two wow zero".split()
)
TASKS |= {
    "sc": Task(
        "speech",
        length=16_000,
        classes=35,
        sizes=(84_843, 9_981, 11_005),
        mask=0.25,
        source=SPEECH,
        # mean and std: of the training clips
        channels=1,
        scale=32768,
        names=WORDS,
        prepare=prepare,
    )
}
