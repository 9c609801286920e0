"""Processes, device and dtype of a run; the signals and errors that end it."""

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
    """Keep freed memory for the next tensor. Clearing new pages, which glibc would request, takes
    a third of a small model's step on a CPU."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        trim_threshold, mmap_threshold = -1, -3  # constants of malloc.h
        # older versions of glibc allow no more than 2^25
        libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)


def set_numerics():
    """Make a CPU fast and a GPU exact."""
    keep_memory()
    # below 1e-38 (a saturated softmax) a CPU would take three times as long
    torch.set_flush_denormal(True)
    # Some containers enable TF32; it would raise a kernel's error from 9e-7 to 4e-4.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


class Processes:
    """The processes of a run, one per GPU. world: their number; rank: the index of this process;
    device: its device; main: whether this is the first process, which prints and writes."""

    signal = None  # name of the signal that asked this process to stop
    exchange = None  # the flag that `stops` exchanges, and the handle of the exchange
    current = None  # this process's Run: `guarded` logs what ended it

    def __init__(self, args):
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        self.main = self.rank == 0
        if self.world > args.batch:
            raise UserError(f"--batch {args.batch} is smaller than {self.world} processes")
        cuda = args.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
        self.group = None  # of `stops`; None: the default group
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            backend, device = ("nccl", self.device) if cuda else ("gloo", None)
            dist.init_process_group(backend, device_id=device)
            self.group = dist.new_group(backend="gloo") if cuda else None
        # Older GPUs emulate bfloat16, slowly and without fused attention.
        able = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        self.bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and able
        self.dtype = "bfloat16" if self.bf16 else "float32"
        set_numerics()
        always = "SSM kernels and convolutions always float32"
        self.say(f"device {self.device} x {self.world}; {self.dtype}; {always}")

    def say(self, text):
        if self.main:
            print(text, flush=True)

    def autocast(self):
        """Return the autocast context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def total(self, tensor):
        """Sum a tensor over processes, in place, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self):
        if self.world > 1:
            dist.barrier()

    def distributed(self, model):
        """Return the model to call. With several processes it averages gradients over them."""
        if self.world == 1:
            return model
        # BatchNorm uses the whole batch, so buffers are already equal on all processes. Newer
        # versions of torch rename the argument.
        warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
        return torch.nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    def seed(self, number):
        """Seed dropout, as torch.manual_seed does, but half a millisecond faster."""
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def stops(self):
        """Return whether a signal asked any process to stop. With several processes this is the
        result of the exchange that the previous call started: equal on all, and none waits."""
        if self.world == 1:
            return self.signal is not None
        previous = self.exchange
        flag = torch.tensor(float(self.signal is not None))
        self.exchange = flag, dist.all_reduce(flag, group=self.group, async_op=True)
        if previous is None:
            return False
        flag, handle = previous
        handle.wait()
        return bool(flag)

    def close(self):
        """Leave the process group together: who left early would break the others' connections."""
        if self.world > 1:
            if self.exchange is not None:
                self.exchange[1].wait()
            # Keep the handle. Otherwise gloo's thread may be the last to drop it and need the
            # interpreter's lock for that. The group's destructor holds this lock while it waits for
            # the thread: a deadlock, in which some runs never exited.
            self.last_barrier = dist.barrier(async_op=True)
            self.last_barrier.wait()
            dist.destroy_process_group()


PREEMPTED = 143  # exit code after SIGTERM and SIGUSR1


def on_signal(number, _):
    """Stop a run after its current step or batch. Exit at once if there is nothing to save yet."""
    run = Processes.current
    if run is not None:
        run.processes.signal = signal.Signals(number).name
    if run is None or not run.stepping:
        raise SystemExit(PREEMPTED)


def explained(error):
    """Return what to print of an error that ends a run; None for a bug: it has a traceback."""
    if isinstance(error, (UserError, SizeError)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of GPU memory; give a smaller --micro-batch"
    if isinstance(error, KeyboardInterrupt) and Processes.current is not None:
        return "interrupted; the same command with --resume continues from the last checkpoint"
    if "TritonMissing" in str(error) or "InvalidCxxCompiler" in str(error):
        return "--compile needs triton on a GPU, g++ on a CPU; install it, or leave out --compile"
    return None


def logged(main):
    """Run a script's main and log what ends its run, for `analyze.py status`."""
    try:
        return main()
    except (Exception, KeyboardInterrupt) as error:
        text = explained(error)
        if Processes.current is not None:
            with contextlib.suppress(OSError):  # the disk may be the cause
                record = text or f"{type(error).__name__}: {error}"
                Processes.current.folder.log(kind="error", error=record)
        if text is None:
            raise
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UserError
        raise kind(text) from None
    except SystemExit as end:
        run = Processes.current
        if end.code == PREEMPTED and run is not None:
            text = f"stopped by {run.processes.signal or 'a signal'} after step {run.step}"
            run.folder.log(kind="stop", text=text)
            run.say(f"{text}; the same command with --resume continues")
        elif end.code == PREEMPTED:  # before the run has a folder, perhaps in its data
            print("stopped by a signal; to go on, run the same command again", flush=True)
        raise
    finally:
        if Processes.current is not None:
            Processes.current.folder.lock.close()  # this process may resume it


def guarded(main):
    """Run a script's main and end with its `exit_code`. Signals stop a run in order."""
    for name in "SIGTERM", "SIGUSR1":
        if hasattr(signal, name):  # not every system has both
            signal.signal(getattr(signal, name), on_signal)
    if code := exit_code(lambda: logged(main)):
        raise SystemExit(code)
