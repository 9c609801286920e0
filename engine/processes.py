"""Processes, device and number format of a run; the signals and the mistakes that end it."""
import contextlib
import ctypes
import os
import platform
import signal
import sys
import warnings

import torch
import torch.distributed as dist

from files import UserError, exit_code
from models import SizeError


def keep_memory():
    """Keeps freed memory for the next tensor. glibc gives it back to the system, which then clears it page by page: a
    third of a step of a small model on a CPU."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3            # numbers of malloc.h
        libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25)       # all that older ones allow
        libc.mallopt(trim_threshold, 2**31 - 1)


class Processes:
    """All processes of a run, one a GPU. device; world: how many there are; rank: which one this is; main: whether it
    is the first, which prints and writes."""

    told = None                                # the signal that asked this process to stop
    asked = None                               # what all processes were asked last, by `stops`
    current = None                             # the Run of this process, for `guarded` to log what ended it

    def __init__(self, args):
        environ = os.environ
        self.world, self.rank = int(environ.get("WORLD_SIZE", 1)), int(environ.get("RANK", 0))
        self.main = self.rank == 0
        if self.world > 1 and not {"RANK", "MASTER_ADDR"} <= environ.keys():
            raise UserError(f"WORLD_SIZE is {self.world}, but RANK or MASTER_ADDR is not set; start with torchrun")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda, but torch sees no CUDA device; use --device cpu")
        if self.world > args.batch:
            raise UserError(f"--batch {args.batch} is smaller than the number of processes, {self.world}")
        keep_memory()
        torch.set_flush_denormal(True)         # a CPU takes three times as long below 1e-38, where a softmax saturates
        cuda = args.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)
        self.side = dist.new_group(backend="gloo") if self.world > 1 and cuda else None          # for `stops`
        # TF32, which some containers switch on, would make a kernel's error of 9e-7 one of 4e-4.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        # Older GPUs emulate bfloat16, slowly and without fused attention.
        able = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        self.bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and able
        self.dtype = "bfloat16" if self.bf16 else "float32"
        self.say(f"device {self.device} x {self.world}; {self.dtype}; SSM kernels and convolutions always float32")

    def say(self, text):
        if self.main:
            print(text, flush=True)

    def autocast(self):
        """Context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def total(self, tensor):
        """Sum over processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self):
        if self.world > 1:
            dist.barrier()

    def distributed(self, model):
        """The model to call, which exchanges gradients."""
        if self.world == 1:
            return model
        # Buffers are equal on all processes already, as BatchNorm counts the whole batch. Newer torch renames this
        # argument.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        return torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def seed(self, number):
        """Seed dropout. torch.manual_seed does the same, and half a millisecond of work for kinds of device that are
        not there."""
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def stops(self):
        """Whether a signal asked a process to stop: the answer to the call before, which is the same on all processes,
        so that none has to wait for another."""
        if self.world == 1:
            return self.told is not None
        before, flag = self.asked, torch.tensor(float(self.told is not None))
        self.asked = flag, dist.all_reduce(flag, group=self.side, async_op=True)
        if before is not None:
            before[1].wait()
        return before is not None and bool(before[0])

    def close(self):
        """All processes together: one that leaves early takes the others' connections with it."""
        if self.world > 1:
            if self.asked is not None:
                self.asked[1].wait()
            # The handle is kept. Otherwise gloo's thread may be the last to drop it, for which it needs the
            # interpreter's lock, while the group's destructor holds that lock and waits for the thread: some runs never
            # exited.
            self.last_barrier = dist.barrier(async_op=True)
            self.last_barrier.wait()
            dist.destroy_process_group()


PREEMPTED = 143                                # exit code after SIGTERM and SIGUSR1


def on_signal(number, _):
    """A run saves after the step or batch that it is in. What has made no step yet has nothing to save."""
    if Processes.current is not None and Processes.current.stepping:
        Processes.current.processes.told = number
    else:
        raise SystemExit(PREEMPTED)


def guarded(main):
    """Runs a script's main and ends with its `exit_code`. The log of a run gets a last record that tells what went
    wrong, for `analyze.py status`; --resume takes it away again."""
    def logged():
        try:
            return main()
        except (Exception, KeyboardInterrupt) as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, (UserError, SizeError)):
                text = str(error)
            elif isinstance(error, torch.OutOfMemoryError):
                text = "out of GPU memory; give a smaller --micro-batch"
            elif isinstance(error, KeyboardInterrupt) and Processes.current is not None:
                text = "interrupted; the same command with --resume continues from the last checkpoint"
                error = KeyboardInterrupt(f"error: {text}")
            if Processes.current is not None:
                with contextlib.suppress(OSError):                     # the disk may be what went wrong
                    Processes.current.folder.log(kind="error", error=text)
            if isinstance(error, (SizeError, torch.OutOfMemoryError)):
                error = UserError(text)
            raise error                                                # of a bug, exit_code shows the traceback

    for name in "SIGTERM", "SIGUSR1":
        if hasattr(signal, name):              # not every system has them
            signal.signal(getattr(signal, name), on_signal)
    if code := exit_code(logged):
        raise SystemExit(code)
