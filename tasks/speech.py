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
    """Prepare Speech Commands v0.02, all 35 words. The official lists name the validation and test
    clips; the rest is for training. Samples are normalised by one mean and one standard deviation,
    those of the padded training clips. S4's official code uses one per time step, of values divided
    by 2^15 twice."""
    place = find(request, "speech_commands*.tar.gz", ".")
    path = request.folder / "samples.tmp"
    clips, lists = write_clips(task, request, place, path)
    train = clips.keys() - lists["validation"] - lists["testing"]
    for split, names in zip(SPLITS, (train, lists["validation"], lists["testing"])):
        names = sorted(clips.keys() & names)
        size = request.take(split, len(names), place)
        names = [names[i] for i in random_split(len(names))[:size]]
        samples = np.memmap(path, np.int16, "r", shape=(len(clips), task.length, 1))
        x = (samples[clips[name]] for name in names)
        y = [task.names.index(name.split("/")[0]) for name in names]
        save_split(request, split, x, y, place)
    path.unlink()
    x = np.load(request.folder / "train_x.npy", mmap_mode="r")  # (n, l, 1)
    mean = x.mean(dtype=np.float64)
    power = np.einsum("nlc,nlc->", x, x, dtype=np.float64) / x.size
    return dict(mean=float(mean / task.scale), std=float(np.sqrt(power - mean**2) / task.scale))


def write_clips(task, request, place, path):
    """Write the samples of all clips to a file, int16 -> {clip: its row}, {list: its clips}."""
    words = "|".join(task.names)
    pattern = rf"(?:^|/)(?:((?:{words})/[^/.][^/]*\.wav)|(validation|testing)_list\.txt)$"
    clips = {}
    lists = {"validation": set(), "testing": set()}
    with open(path, "wb") as file:
        for match, raw in tqdm(members(place, pattern), str(request.folder), unit="clip"):
            if match[2]:
                lists[match[2]] = set(raw.decode("utf-8", "replace").split())
                continue
            problem = f"{match[1]} in {place} is damaged"
            with reading(problem, "get it again"), wave.open(io.BytesIO(raw)) as clip:
                # 16 kHz, mono, 16 bits
                samples = np.frombuffer(clip.readframes(task.length), "<i2")
            file.write(np.pad(samples, (0, task.length - len(samples))))  # padded with silence
            clips[match[1]] = len(clips)
    return clips, lists


SPEECH = Source(
    ("https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",),
    "speech_commands_v0.02.tar.gz, or a folder of it",
    "CC BY 4.0",
    2_428_923_189,
    "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
)
TEXT = (  # S4's order
    "bed cat down five forward go house left marvin no on right sheila tree up visual yes backward "
    "bird dog eight follow four happy learn nine off one seven six stop three two wow zero"
)
WORDS = tuple(TEXT.split())
TASKS |= {
    "sc": Task(
        "speech",
        length=16_000,
        classes=35,
        sizes=(84_843, 9_981, 11_005),
        mask=0.25,
        source=SPEECH,
        channels=1,
        scale=32768,  # mean and std: of the training clips
        names=WORDS,
        prepare=prepare,
    )
}
