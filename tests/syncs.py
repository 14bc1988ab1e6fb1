"""What would make the host wait for a GPU in a training step, counted on a CPU.

On a GPU a step is only queued, and the host is ahead of it until something asks for a value or a size that the device
has yet to compute, or copies memory that is not pinned. On a CPU all of these are the same calls."""

import linecache
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import common

# operations whose result, or its size, the host reads; `unique` and others become these or those below
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount", "repeat_interleave", "_unique2"}
WAITING |= {"unique_dim", "unique_consecutive", "_assert_scalar", "linalg_check_errors"}
ON_THE_HOST = ("beta.sample().item()",)  # in a line of a script: a tensor that is never on the device


class Values(TorchDispatchMode):
    """Operations that wait, wherever they are called from: the backward pass, an optimizer, inside of torch"""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name.split("::")[1]
        if name in WAITING:
            self.found(name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
            filled = name != "index" and args[2].numel() == 1  # no more than a masked_fill
            if masks and not filled:
                self.found(f"{name} by a mask")
        return operation(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Calls that copy between host and device. On a CPU they do nothing, and torch's operations don't see them"""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("tolist", "cpu", "numpy", "__array__"):
            self.found(name)
        elif name in ("tensor", "as_tensor") and kwargs.get("device") is not None and not is_tensor(args):
            self.found(f"{name} on the device")
        elif name in ("to", "cuda") and not (kwargs.get("non_blocking") or in_torch(sys._getframe(1))):
            devices = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.device) or x in ("cpu", "cuda")]
            if devices or name == "cuda":  # torch itself asks for the device that a tensor has
                self.found(f"{name} a device")
        return function(*args, **kwargs)


def is_tensor(args):
    return bool(args) and torch.is_tensor(args[0])


@contextmanager
def counted():
    """-> a Counter of (what, line of the project) and of "steps", filled by the runs inside: from the first batch of an
    epoch to its last, what comes between two batches included"""
    counts, inside = Counter(), [False]
    batches, step = common.Run.batches, common.Run.step

    def found(what):
        if inside[0]:
            file, number = place()
            if not any(words in linecache.getline(file, number) for words in ON_THE_HOST):
                counts[what, f"{Path(file).name}:{number}"] += 1

    def watched_batches(self, *args, **more):
        try:
            for batch in batches(self, *args, **more):
                inside[0] = True
                yield batch
        finally:
            inside[0] = False

    def watched_step(self, *optimizers):
        step(self, *optimizers)
        counts["steps"] += 1

    watch = mock.patch.multiple(common.Run, batches=watched_batches, step=watched_step)
    with watch, Values(found), Copies(found):
        yield counts


def in_torch(frame):
    return frame.f_code.co_filename.startswith(os.path.dirname(torch.__file__))


def place():
    """The innermost line outside of torch and of this file"""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_filename == __file__ or in_torch(frame)):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame else ("?", 0)
