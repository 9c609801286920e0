"""Run chains of commands side by side, on GPUs or CPU cores, and stop them together."""

import contextlib
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from files import UserError


def visible(wanted):
    """Return names of GPUs for CUDA_VISIBLE_DEVICES. wanted: their numbers; None: all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(256)))).split(",")
    try:
        return [names[int(number)] for number in wanted or range(torch.cuda.device_count())]
    except IndexError:
        last = len(names) - 1
        raise UserError(f"--gpus: CUDA_VISIBLE_DEVICES leaves only 0 to {last}") from None


def jobs_of(gpus):
    """Return how many runs to train side by side: JOBS, or one per GPU or CPU core."""
    if jobs := os.environ.get("JOBS"):
        if not re.fullmatch(r"[1-9]\d{0,3}", jobs):
            raise UserError(f"JOBS must be a number of runs side by side, got '{jobs}'")
        return int(jobs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return len(gpus) or cores


class Pool:
    """Slots that run chains side by side, on these GPUs."""

    def __init__(self, jobs, gpus, folder):
        self.jobs, self.folder = jobs, folder
        self.running = set()
        self.stopped = self.failed = False
        self.slots = queue.SimpleQueue()
        for i in range(jobs):
            if gpus:
                self.slots.put(os.environ | {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]})
            else:
                self.slots.put({"OMP_NUM_THREADS": "1"} | os.environ)  # one thread each

    def run(self, by_seed):
        """Run the chains of {seed: chains}, those of the first seed first. Whenever a seed has no
        chain left, yield all such seeds."""
        left = {seed: len(chains) for seed, chains in by_seed.items()}
        seeds = {}  # of chains that wait or run
        with ThreadPoolExecutor(self.jobs) as threads:
            for seed, chains in by_seed.items():
                seeds |= {threads.submit(self.work, chain): seed for chain in chains}
            for chain in tqdm(as_completed(seeds), str(self.folder), len(seeds), unit="chain"):
                left[seeds[chain]] -= 1
                if not left[seeds[chain]] and not self.stopped:
                    yield [seed for seed, n in left.items() if not n]

    def work(self, chain):
        if self.stopped:
            return
        environment = self.slots.get()
        name = Path(shlex.split(chain[-1])[-1]).name
        path = self.folder / "output" / f"{name}.txt"
        try:
            with open(path, "w") as output:
                done = all(self.call(command, output, environment) == 0 for command in chain)
            lines = path.read_text(errors="replace").strip().splitlines() or [""]
            last = f"{path} ends with: {lines[-1]}"
        except OSError as error:  # disk full, or no python
            done, last = False, str(error)
        if not done and not self.stopped:
            self.failed = True
            tqdm.write(f"error: {name} did not finish; {last}", file=sys.stderr)
        self.slots.put(environment)

    def call(self, command, output, environment):
        # Runs have a session of their own, so Ctrl-C in the terminal reaches only this process. It
        # then stops all runs and waits until they have saved.
        streams = dict(stdout=output, stderr=subprocess.STDOUT)
        process = subprocess.Popen(
            shlex.split(command), env=environment, start_new_session=True, **streams
        )
        self.running.add(process)
        if self.stopped:  # stopped while this run was started
            end(process)
        code = process.wait()
        self.running.discard(process)
        return code

    def stop(self):
        self.stopped = True
        for process in [*self.running]:
            end(process)


def end(process):
    with contextlib.suppress(OSError):  # it has already ended
        os.killpg(process.pid, signal.SIGTERM) if hasattr(os, "killpg") else process.terminate()


def stop_on_signals(pool):
    """Stop all runs, and then this process, when a signal asks for it."""

    def stop(number, _):
        pool.stop()
        raise SystemExit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP, and so do we
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
