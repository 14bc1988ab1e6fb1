"""What every method script shares: settings, data, model, CLIP, run, metrics. No method lives here."""

import atexit
import csv
import ctypes
import difflib
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import logging
import math
import os
import platform
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from PIL import Image
from torch import nn
from tqdm import tqdm

import data_prep
import scenes
from data_prep import die, read_json, replacing, split_indices
from data_prep import draw_single_positives as draw_single_positives  # others import it from here

EVAL_BATCH = 64
NO_RESULTS = ("epoch", "seconds", "images_per_s")  # columns of metrics.csv that are neither printed nor drawn
ROWS = 2**12  # rows of an (N, C) table that are summed at once: torch turns bool and uint8 into int64 first

# ---- 1. Settings


class Limit(NamedTuple):  # the range of a setting, declared in its type, checked by parse()
    words: str
    holds: Callable


Positive = Annotated[float, Limit("above 0", lambda value: value > 0)]
NonNegative = Annotated[float, Limit("at least 0", lambda value: value >= 0)]
Share = Annotated[float, Limit("between 0 and 1", lambda value: 0 <= value <= 1)]
ShareBelow1 = Annotated[float, Limit("at least 0 and below 1", lambda value: 0 <= value < 1)]
Count = Annotated[int, Limit("at least 1 and below 2^31", lambda value: 1 <= value < 2**31)]
Natural = Annotated[int, Limit("at least 0 and below 2^31", lambda value: 0 <= value < 2**31)]
NaturalOrMinus1 = Annotated[int, Limit("at least -1 and below 2^31", lambda value: -1 <= value < 2**31)]
Workers = Annotated[int, Limit("at least -1 and at most 256", lambda value: -1 <= value <= 256)]


@dataclass
class Args:
    """Where and how a script runs. What a method computes with is in the method's own Args."""

    dataset: str = "scenes"  # data set: scenes, voc, voc2007, coco, coco_all, nus, cub, a folder of data_root, a path
    data_root: str = "data"  # folder of the data sets and embeddings
    out: str = "runs"  # folder of the run directories
    name: str = ""  # run directory <out>/<name>, which the same command resumes (empty: data set, method, seed, time)
    seed: Natural = 0  # seed of weights, order and flips; split and observed labels don't depend on it
    linear: bool = False  # linear probing: frozen backbone, images embedded once, only the head is trained
    init_from: str = ""  # run directory whose best weights are the initial ones
    known_ratio: Share = 0.0  # share of ALL positives that is observed (0: one positive per image)
    val_fraction: ShareBelow1 = 0.2  # share of the train file held out for validation (0: none, the last epoch counts)
    recall: Share = 0.7  # validation without full labels: share of a class's known labels that its threshold finds
    labels_per_image: NonNegative = 0.0  # validation without full labels: expected labels per image, instead of recall
    device: str = "auto"  # device: auto, cpu, cuda, cuda:1, ...
    workers: Workers = -1  # loader threads (-1: automatic); no effect on results
    pixels: Literal["auto", "device", "loader"] = "auto"  # cached pixels: in device memory (auto: if they fit) or not
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"  # mixed precision (auto: bf16 or fp16 on CUDA, off on a CPU)
    compile: bool = False  # torch.compile of the model
    sync_bn: bool = False  # BatchNorm statistics over all processes of torchrun; needs CUDA
    tensorboard: bool = False  # TensorBoard events beside metrics.csv
    resume: str = ""  # run directory to resume
    eval_only: str = ""  # run directory whose best weights are evaluated, without training
    save_minutes: NonNegative = 10.0  # minutes between checkpoints inside an epoch (0: only at its end)
    max_steps: Natural = 0  # number of steps after which training ends (0: no limit)
    smoke: bool = False  # smoke test: every epoch, pseudo-label round and stage, on a few images


RESUME_MAY_CHANGE = {"data_root", "out", "name", "device", "workers", "tensorboard", "resume", "eval_only"}
RESUME_MAY_CHANGE |= {"save_minutes", "pixels", "recall", "labels_per_image"}
KNOWN = {"scenes", "voc", "voc2007", "coco", "coco_all", "nus", "cub"}  # they have papers' settings
CPU = "--device cpu"  # in PRESETS: your own images without a GPU


def parse(args_class, presets, argv=None):
    """Command line -> args_class. Precedence: default < presets < command line; with --resume or --eval_only the run's
    own settings replace the first two."""
    sys.excepthook = data_prep.explain
    argv = sys.argv[1:] if argv is None else argv
    if missing := {"epochs", "batch_size", "image_size"} - {field.name for field in fields(args_class)}:
        die(f"Args lacks {', '.join(sorted(missing))}, which common.py reads: put the field back")
    written = {name for name, value in vars(args_class).items() if not (name.startswith("_") or callable(value))}
    if untyped := sorted(written - {field.name for field in fields(args_class)}):
        die(f"Args: {untyped[0]} needs a type, as in {untyped[0]}: float = 0.1, to be a setting")
    about = (sys.modules[args_class.__module__].__doc__ or "").split("NOTES")[0]
    cli = partial(tyro.cli, args_class, use_underscores=True, description=about)
    first = cli(args=[word for word in argv if word not in ("-h", "--help")])  # which preset, or which run
    earlier = first.resume or first.eval_only
    if {"--no_linear", "--no-linear"} & set(argv):
        presets = {name: row for name, row in presets.items() if name != CPU}
    start = read_run_settings(args_class, earlier) if earlier else preset_settings(args_class, presets, first)
    args = cli(args=argv, default=start)
    changed = [f.name for f in fields(args) if getattr(args, f.name) != getattr(start, f.name)]
    if refused := [f"--{name}" for name in changed if earlier and name not in RESUME_MAY_CHANGE]:
        die(f"{earlier} keeps its own settings: leave out {', '.join(refused)}, or start a new run")
    check_ranges(args)
    if args.name and (earlier or not re.fullmatch(r"\w[\w.+-]*", args.name)):
        fix = "leave it out, the run has a directory" if earlier else "a name is made of letters, digits and . + - _"
        die(f"--name {args.name}: {fix}")
    own = Path(args.dataset).name not in {*presets, *KNOWN}
    if (own or args.linear) and not earlier and os.environ.get("RANK", "0") == "0":
        tell_settings(args, start, own)
    return args


def tell_settings(args, start, own):
    """One line: what was chosen for your own images, or for --linear"""
    plain = type(args)(dataset=args.dataset)
    chosen = [name for name, value in vars(args).items() if value == getattr(start, name) != getattr(plain, name)]
    flags = [word for name in chosen for word in as_flag(name, getattr(args, name))]
    what = f"settings for {args.dataset}" + ", which has no preset" * own + ", on a CPU" * on_cpu(args)
    if flags or not on_cpu(args):
        print(f"{what}: {' '.join(flags) or 'the defaults, those of VOC'}", flush=True)


def check_ranges(args):
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        kinds = [kind for kind in get_args(hint) if kind is not Ellipsis]
        for kind, number in zip(itertools.cycle(kinds), value) if isinstance(value, tuple) else [(hint, value)]:
            finite = Limit("a finite number", lambda value: not isinstance(value, float) or math.isfinite(value))
            for limit in (finite, *getattr(kind, "__metadata__", ())):
                if isinstance(limit, Limit) and not limit.holds(number):
                    die(f"--{name} must be {limit.words}, not {number}")


def as_flag(name, value):
    """A setting as words of a command line"""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no_{name}"]
    return [f"--{name}", *map(as_label, value if isinstance(value, tuple) else (value,))]


def as_label(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def on_cpu(args):
    return args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available())


def preset_settings(args_class, presets, given):
    """The settings if nothing but `given` data set, --known_ratio, --linear and --device were said: presets[dataset],
    your own images on a CPU presets[CPU], unless the model is chosen by hand, and presets["--linear"] on top. With
    --known_ratio a row's "<name> partial" takes its place, if there is one."""
    name, plain = Path(given.dataset).name, args_class()
    paper = "coco" if name == "coco_all" else name  # with the images that have no label
    row = lambda name: presets.get(f"{name} partial" if given.known_ratio else name, presets.get(name, {}))
    preset = row(paper)
    said = lambda setting: getattr(given, setting, 0) != getattr(plain, setting, 0)
    unwanted = {"clip_model"} if said("clip_pretrained") else set()
    unwanted |= {"linear", "freeze_backbone"} if getattr(given, "weights", "") == "none" else set()  # nothing to keep
    laptop = {k: v for k, v in presets.get(CPU, {}).items() if k not in unwanted}
    by_hand = said("backbone") and given.backbone != laptop.get("backbone")
    if name not in {*presets, *KNOWN} and on_cpu(given) and not by_hand:
        preset = laptop
    if given.linear or preset.get("linear"):
        preset = preset | row("--linear")
    try:
        return args_class(dataset=given.dataset, **preset)
    except TypeError as problem:
        die(f"PRESETS of {name} doesn't fit Args: {problem}")


def read_run_settings(args_class, run):
    config = read_config(Path(run))
    # JSON has no tuples
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in config["settings"].items()}
    if unknown := sorted(settings.keys() - {field.name for field in fields(args_class)}):
        die(f"{run} was made by another script or version, {config['method']}.py, with --{unknown[0]}")
    return replace(args_class(**settings), resume="", eval_only="", name="")


def read_config(run):
    """config.json of a run directory"""
    kinds = {"method": str, "settings": dict, "processes": int, "launch": str, "working_directory": str, "command": str}
    config = read_json(run / "config.json", f"{run} is not a run directory", **kinds)
    if missing := {"method", "settings", "processes"} - config.keys():
        die(f"{run} was made by another script or version: its config.json lacks {', '.join(sorted(missing))}")
    return config


def identity(method, settings):
    """All that decides a run's results, as JSON has it: the settings by their flags, and the script"""
    kept = {f"--{name}": value for name, value in settings.items() if name not in RESUME_MAY_CHANGE}
    kept["--dataset"] = Path(str(settings.get("dataset"))).name  # its folder may be moved
    return json.loads(json.dumps({"script": f"{method}.py", **kept}))


def differences(then, now):
    """Between two identities, in words"""
    apart = (name for name in then if then[name] != now.get(name, then[name]))
    return ", ".join(f"{name} was {then[name]} and is {now[name]}" for name in apart)


# -- for all rooms: scripts, processes, progress


def in_a_line(problem):
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def import_script(path):
    """A method's script as a module of its own. Not by its loader, which would leave a __pycache__ in a run"""
    name = f"script_{time.monotonic_ns()}"
    script = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, Path(path).absolute()))
    sys.modules[name] = script  # where dataclasses and typing look it up
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(script))
    return script


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier():
    if world() > 1:
        dist.barrier()


def broadcast(value):
    """Rank 0's value, on every rank"""
    values = [value]
    if world() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def gather(mine, n):
    """Rows rank, rank + world, ... of n, padded to the same number on every rank -> all n rows, on every rank"""
    if world() == 1:
        return mine
    everyone = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone, 1).flatten(0, 1)[:n]


def gather_objects(mine):
    """Every rank's value, on every rank"""
    values = [mine] * world()
    if world() > 1:
        dist.all_gather_object(values, mine)
    return values


def in_minutes(seconds):
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{max(1, round(seconds / 60))} minutes"


def progress(items, what, **more):
    hidden = rank() > 0 or not sys.stderr.isatty()
    return tqdm(items, desc=what, leave=False, disable=hidden, dynamic_ncols=True, **more)


# ---- 2. Data


def as_tensor(values):
    """A tensor, or an array of any strides and byte order, read-only or not -> a tensor without gradient"""
    if isinstance(values, np.ndarray):
        values = np.require(values, values.dtype.newbyteorder("="), "CW")
    return torch.as_tensor(values).detach()


@dataclass
class Split:
    images: data_prep.Images
    rows: np.ndarray  # this split's rows in its formatted file
    y: torch.Tensor | None  # (N, C) full labels, for evaluation and upper bounds; your own images may have none
    z: torch.Tensor | None = None  # (N, C) observed labels, of training and of validation images without full ones
    features: tuple = ()  # with --linear: embeddings of the plain and, in training, of the flipped images, (N, D) each
    pixels: torch.Tensor | None = None  # (N, H, W, 3) uint8 on the device, where Loader.hold has put them

    def __len__(self):
        return len(self.rows)

    @property
    def labels(self):
        """(N, C) the full labels, where nobody knows them the observed ones"""
        return self.z if self.y is None else self.y

    def true(self, idx):
        """Full labels of these images, None where nobody knows them"""
        return None if self.y is None else self.y[idx]

    def first(self, n):
        return replace(self, rows=self.rows[:n], y=self.true(slice(n)), z=None if self.z is None else self.z[:n])

    def names(self):
        return (self.images.names[row] for row in self.rows)

    def fingerprint(self):
        """Changes when the list of images does, or a file behind it"""
        source = self.images
        files = [source.cache] if source.cached else (source.image_folder / name for name in self.names())
        stats = (f"{stat.st_size} {stat.st_mtime_ns}" for stat in map(os.stat, files))
        return data_prep.hash_names(itertools.chain(self.names(), stats, ["upright"] * source.upright))


@dataclass
class Data:
    classes: list
    train: Split
    val: Split | None  # your own images may come without, or have only the labels that are known
    test: Split | None

    @property
    def full_val(self):
        """The validation images if they have all of their labels, else None"""
        return None if self.val is None or self.val.y is None else self.val

    def positives_per_image(self):
        """Mean of the validation labels; 0 where nobody knows"""
        return self.full_val.y.sum(1).float().mean().item() if self.full_val else 0.0

    def splits(self):
        return {name: split for name in ("train", "val", "test") if (split := getattr(self, name))}


def load(args, device="cpu"):
    """The data set of --dataset, its labels on `device`"""
    folder = find_dataset(args)
    info = data_prep.read_dataset(folder) if (folder / "dataset.json").exists() else {}
    default_images = folder / "images" if (folder / "images").is_dir() else folder
    image_folder, upright = folder / info.get("image_folder", default_images.resolve()), info.get("upright", False)
    there = lambda name: (folder / f"formatted_{name}.npy").exists()
    parts = data_prep.parts_of(folder)
    images = {part: data_prep.Images(folder, image_folder, part, args.image_size, upright) for part in parts}
    labelled = [part for part in parts if part != "train" or there("train_labels") or not there("train_labels_obs")]
    y = {part: data_prep.read_labels(folder / f"formatted_{part}_labels.npy", len(images[part])) for part in labelled}
    z = data_prep.observed_labels(folder, len(images["train"]), y.get("train"), args.known_ratio)
    classes = info.get("classes", data_prep.nameless(z.shape[1]))
    columns = {"train_labels_obs": z.shape[1], **{f"{part}_labels": labels.shape[1] for part, labels in y.items()}}
    if set(columns.values()) != {len(classes)} or len(set(classes)) < len(classes):
        die(f"{folder} has {len(set(classes))} different class names, but its labels' columns are {columns}")
    if not z.any():
        die(f"{folder}: no positive label is observed" + (", raise --known_ratio" if args.known_ratio else ""))

    def split(part, rows=None, **more):
        rows = np.arange(len(images[part])) if rows is None else rows
        full = torch.from_numpy(y[part][rows]).to(device) if part in y else None
        return Split(images[part], rows, full, **more)

    train_rows, val = np.arange(len(z)), split("valid") if "valid" in y else None  # your own images: files, or none
    if "valid" not in y and args.val_fraction:
        train_rows, val_rows = split_indices(len(z), args.val_fraction)
        if "train" not in y:  # only known labels: images without one can't judge, and no class loses its last one
            kept = z[val_rows].any(1) & ~z[val_rows][:, ~z[train_rows].any(0)].any(1)
            train_rows, val_rows = np.sort(np.append(train_rows, val_rows[~kept])), val_rows[kept]
        if "train" in y and not (len(val_rows) and len(train_rows)):
            die(f"--val_fraction {args.val_fraction} of {len(z)} images leaves none for validation or for training")
        known = None if "train" in y else torch.from_numpy(z[val_rows]).to(device)
        val = split("train", val_rows, z=known) if len(val_rows) else None
    train = split("train", train_rows, z=torch.from_numpy(z[train_rows]).to(device))
    test = split("val") if "val" in y else None
    if args.smoke:  # two batches and a short one
        train, val, test = train.first(2 * args.batch_size + 3), val and val.first(16), test and test.first(16)
    gigabytes = min(len(train), args.batch_size) * args.image_size**2 * 15 / 1e9  # of a batch, as bytes and as floats
    if gigabytes > (here := memory() / 1e9):
        die(f"one batch takes {gigabytes:.0f} GB, this machine has {here:.0f} GB: lower --batch_size or --image_size")
    return Data(classes, train, val, test)


def dataset_folder(args):
    return Path(args.dataset) if os.sep in args.dataset else Path(args.data_root, args.dataset)


def find_dataset(args):
    folder = dataset_folder(args)
    if args.dataset == "scenes":
        if rank() == 0:
            scenes.make(folder)
        barrier()
    if (folder / data_prep.UNFINISHED).exists():
        die(f"{folder} is only half prepared: run the same data_prep.py command again")
    if not (folder / "formatted_train_images.npy").exists():
        there = sorted(path.parent.name for path in Path(args.data_root).glob("*/formatted_train_images.npy"))
        others = f"scenes needs no preparation; in {args.data_root} there is {', '.join(there) or 'nothing yet'}"
        die(f"no data set {args.dataset!r} in {folder}: prepare it with data_prep.py, or choose another ({others})")
    return folder


def memory(device=None):
    """Bytes: of a GPU those that are free, of the machine all that it has"""
    if device and device.type == "cuda":
        try:
            return torch.cuda.mem_get_info(device)[0]
        except RuntimeError:  # a driver that doesn't tell
            return 0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf


def in_batches(rows, size=None):
    size = size or EVAL_BATCH
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def as_pixels(batch):
    """uint8 (..., H, W, 3) -> float (..., 3, H, W) in 0..1"""
    return batch.movedim(-1, -3).float() / 255


class Loader:
    """Reads batches ahead in threads and brings them to the device. One serves a whole run; nothing that it yields
    depends on the number of its threads"""

    def __init__(self, args, device):
        cores_each = data_prep.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of torchrun on this machine
        self.device, self.threads = device, max(1, min(8, cores_each)) if args.workers < 0 else args.workers
        self.pool, self.place = ThreadPoolExecutor(max(1, self.threads)), args.pixels

    def read(self, fetch, items):
        """fetch(item), an array, of every item in order -> tensors on the device"""
        cuda, items, waiting = self.device.type == "cuda", iter(items), deque()

        def ready(item):
            batch = torch.from_numpy(fetch(item))
            return batch.pin_memory() if cuda else batch  # only pinned memory is copied in the background

        try:
            while True:
                ahead = itertools.islice(items, 2 * self.threads - len(waiting))
                waiting.extend(self.pool.submit(ready, item) for item in ahead)
                batch = waiting.popleft().result() if waiting else next(map(ready, items), None)
                if batch is None:
                    return
                yield batch.to(self.device, non_blocking=True)
        finally:
            for future in waiting:
                future.cancel()

    def hold(self, split):
        """Puts a split's cached pixels into the device's memory for good: --pixels device, or auto on a GPU, if they
        take less than half of what is free there"""
        source, auto = split.images, self.place == "auto"
        if self.place == "loader" or split.pixels is not None or (auto and self.device.type == "cpu"):
            return
        need, free = 3 * len(split) * source.size**2 / 1e9, memory(self.device) / 1e9
        missing = "" if source.cached else f"there is no {source.cache}, which data_prep.py makes"
        large = f"they take {need:.3g} GB, more than half of {free:.3g} GB" if 2 * need > free else ""
        if problem := missing or large:
            if not auto:
                die(f"--pixels device can't hold the images: {problem}; leave it out")
            return
        split.pixels = torch.empty((len(split), source.size, source.size, 3), dtype=torch.uint8, device=self.device)
        batches = in_batches(np.arange(len(split)))
        for idx, batch in zip(batches, self.read(lambda idx: source[split.rows[idx]], batches)):
            split.pixels[idx[0] : idx[-1] + 1] = batch

    def pixels(self, split, batches, augment=None):
        """Images of a split, float (B, 3, H, W) in 0..1; `batches` are arrays of its rows. `augment` maps an image,
        uint8 (H, W, 3), and its row in the file to one or more views, as dimensions after B"""
        if split.pixels is not None and not augment:
            return (as_pixels(split.pixels[idx]) for idx in self.read(lambda idx: idx, batches))

        def fetch(idx):
            rows = split.rows[idx]
            pixels = split.images[rows]
            return np.stack([augment(image, row) for image, row in zip(pixels, rows)]) if augment else pixels

        return map(as_pixels, self.read(fetch, batches))


# ---- 3. Model

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Classifier(nn.Module):
    """Backbone, global average pooling, one linear layer. Pixels in 0..1 or, with --linear, their features -> logits"""

    def __init__(self, args, num_classes):
        super().__init__()
        self.body, width, mean, std = make_body(args)
        self.head = nn.Linear(width, num_classes)
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def features(self, x):
        return self.body((x - self.mean) / self.std)  # (B, D)

    def forward(self, x):
        features = x if x.ndim == 2 else self.features(x)
        with torch.autocast(x.device.type, enabled=False):  # bf16 logits would tie, and mAP ranks them
            return self.head(features.float())


def full_precision(logits):
    """float32, or better if it is: what a loss computes in, whatever autocast gives it"""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def make_body(args):
    """--backbone and --weights -> (module: normalised pixels -> (B, D), D, mean, std)"""
    import torchvision  # takes a second, which neither --help nor a refused setting needs

    if not (hasattr(args, "backbone") and hasattr(args, "weights")):
        die("Args lacks backbone or weights, which this model is made of: put the field back")
    name, fresh = args.backbone, not start_from(args)
    pretrained = fresh and args.weights == "imagenet"
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if name == "resnet_small":
        if pretrained:
            die("resnet_small has no ImageNet weights: add --weights none")
        net, width, head = scenes.small_resnet(), 128, ()
    elif name in torchvision.models.list_models(include=["resnet*", "resnext*", "wide_resnet*"]):
        version = "IMAGENET1K_V1" if pretrained else None  # V2 moves results by more than a point
        net = from_hub(name, lambda: torchvision.models.get_model(name, weights=version))
        width, head = net.fc.in_features, "fc."
        net.fc = nn.Identity()
    else:
        net, mean, std = make_timm(name, pretrained, args.image_size)
        if fresh and args.weights != "none":
            check_activation(name, net)
        projection = net.num_classes  # of a CLIP, which is a part of it; of others 0
        width, head = projection or net.head_hidden_size, net.pretrained_cfg.get("classifier") or ()
        head = () if projection else head
    if fresh and args.weights not in ("imagenet", "none"):
        load_body(net, name, args.weights, head)
    return net, width, mean, std


CLIP_WIDTHS = (384, 512, 640, 768, 1024, 1152, 1280)  # widths of embeddings, which timm calls num_classes


def make_timm(name, pretrained, image_size):
    import timm  # takes seconds: only for those who need it

    names = timm.list_models() + timm.list_pretrained()  # without and with the tag of their weights
    if name not in names:
        near = ", ".join(difflib.get_close_matches(name, names, 5, 0.4))
        die(f"no backbone {name!r} in torchvision's ResNets or timm; near it: {near or 'nothing'}")
    config = timm.get_pretrained_cfg(name)
    more = {"img_size": image_size} if getattr(config, "fixed_input_size", False) else {}
    if not ("_clip_" in name and config.num_classes in CLIP_WIDTHS):  # there it is CLIP's projection: kept
        more["num_classes"] = 0
    try:
        make = lambda: timm.create_model(name, pretrained=pretrained, **more)
        net = from_hub(name, make) if pretrained else make()
        with torch.no_grad():
            net.eval()(torch.zeros(1, 3, image_size, image_size))
    except Exception as problem:  # of a size that the network doesn't take: whatever its code may raise
        size = f"{image_size} pixels, try another --image_size"
        die(f"--backbone {name} doesn't take images of {size}: {in_a_line(problem)}")
    config = timm.data.resolve_model_data_config(net)
    return net.train(), config["mean"], config["std"]


def check_activation(name, net):
    """timm's plain CLIPs have GELU where OpenAI's and others' weights were trained with QuickGELU"""
    there = any("QuickGELU" in type(module).__name__ for module in net.modules())
    if "QuickGELU" in str(net.pretrained_cfg.get("notes")) and not there and rank() == 0:
        quick = name.replace("_clip_", "_clip_quickgelu_")
        print(f"note: these weights were trained with QuickGELU: --backbone {quick}", flush=True)


def from_hub(name, make):
    logging.disable()  # the hub's retries
    try:
        return make()
    except (OSError, RuntimeError) as problem:
        fix = "download them where there is internet and pass --weights FILE, or train from scratch with --weights none"
        die(f"the pretrained weights of {name} can't be downloaded ({type(problem).__name__}): {fix}")
    finally:
        logging.disable(logging.NOTSET)


def load_body(net, name, path, head):
    """A local .pth or .safetensors file, or a run's best.pt, into the backbone; what comes after it is left out"""
    state = read_state(path)
    state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
    of_a_run = {key[len("body.") :]: value for key, value in state.items() if key.startswith("body.")}
    state = {key: value for key, value in (of_a_run or state).items() if not key.startswith(head)}
    own = net.state_dict()
    problems = {
        "missing": [key for key in own if key not in state and not key.endswith("num_batches_tracked")],
        "unknown": [key for key in state if key not in own],
        "of another shape": [key for key in own if key in state and state[key].shape != own[key].shape],
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(keys)} {what}: {', '.join(keys[:3])}" for what, keys in problems.items() if keys)
        die(f"{path} doesn't fit --backbone {name} ({listed})")
    net.load_state_dict(state, strict=False)


def read_state(path):
    """The dictionary of a .pth or .safetensors file, on the CPU, nothing executed"""
    try:
        if str(path).endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        if zipfile.is_zipfile(path) and (damaged := zipfile.ZipFile(path).testzip()):  # torch doesn't look
            raise ValueError(f"{damaged} in it has changed on the disk")
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        die(f"there is no file {path}")
    except Exception as problem:  # truncated archives and foreign pickles raise all sorts
        die(f"{path} is not a readable file of weights: {in_a_line(problem)}")


def read_checkpoint(path):
    """A run's last.pt, best.pt or stage1.pt, if it is whole and belongs to the run whose directory it is in"""
    checkpoint, config = read_state(path), read_config(path.parent)
    if path.suffix == ".safetensors":  # of predict.py --card, which has the rest in config.json
        checkpoint = {**config, "model": checkpoint, "identity": identity(config["method"], config["settings"])}
    of_a_run, of_a_model = {"run", "scaler", "embedding_seconds", "inside", "data"}, {"model_class", "probe"}
    needed = of_a_run if path.name in ("last.pt", "inside.pt") else of_a_model
    if missing := ({"model", "classes", "identity"} | needed) - checkpoint.keys():
        die(f"{path} lacks {', '.join(sorted(missing))}: it is not a run's checkpoint, or of an old version")
    if apart := differences(checkpoint["identity"], identity(config["method"], config["settings"])):
        die(f"{path} is a checkpoint of another run: {apart}")
    return checkpoint


def start_from(args):
    """Path of the checkpoint that --resume, --eval_only or --init_from start from; None: --weights counts"""
    resumed = args.resume and (Path(args.resume) / "last.pt").exists()
    run = args.resume if resumed else args.eval_only or args.init_from
    path = Path(run) / ("last.pt" if resumed else "best.pt")
    path = path if path.exists() else path.with_name("model.safetensors")  # a folder of predict.py --card
    if run and not path.exists():
        die(f"{run} has no best.pt: it is not a run, or was stopped in its first epoch")
    return path if run else None


def batch_norms(model):
    """[(parent module, name in it)] of the BatchNorms whose statistics training updates"""
    children = [(module, *child) for module in model.train().modules() for child in module.named_children()]
    kind = nn.modules.batchnorm._BatchNorm
    return [(module, name) for module, name, child in children if isinstance(child, kind) and child.training]


def share_batch_norms(places):
    """--sync_bn; those with frozen statistics, which a model may know by reference, stay as they are"""
    from timm.layers import convert_sync_batchnorm  # torch's own would lose the activation inside of timm's layers

    for module, name in places:
        setattr(module, name, convert_sync_batchnorm(getattr(module, name)))


def load_weights(model, path, classes=None):
    """The model of a run's checkpoint into one of the same make, and of the same classes if they are given"""
    checkpoint = read_checkpoint(Path(path))
    state, trained = checkpoint["model"], checkpoint["classes"]
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in model.state_dict().items()}:
        die(f"{path} doesn't fit the model: it has another --backbone, other layers or another number of classes")
    if classes and classes != trained and data_prep.nameless(len(classes)) not in (classes, trained):
        was, now = next((a, b) for a, b in zip(trained, classes) if a != b)
        die(f"{path} was trained for other classes than the data set has now, or in another order: {was} is now {now}")
    model.load_state_dict(state)
    return checkpoint


@torch.no_grad()
def probe(model, size):
    """Logits of two made-up images, kept beside the weights: a model that is built again must give the same"""
    x = torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    x = F.interpolate(x, (size, size), mode="bilinear").to(next(model.parameters()).device)
    training, logits = model.training, model.eval().forward(x).float().cpu()  # forward: not what --compile made of it
    model.train(training)
    return logits


def close(now, then):
    """Whether one network may have given both, on another device or in a batch of another size: kernels differ there"""
    return now.shape == then.shape and bool((now - then).norm() <= 0.05 * then.norm() + 1e-3)


def check_probe(model, size, checkpoint, path):
    """Refuses a model whose code computes something else than what was trained"""
    now, then = probe(model, size), checkpoint.get("probe")
    if then is not None and not close(now, torch.as_tensor(then)):
        die(f"the model's code has changed since {path} was trained: with the same weights it gives other logits")


def hash_tensors(tensors):
    digest = hashlib.sha256()
    for key, value in tensors.items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- 4. CLIP and the embedding cache


class EmbeddingCache:
    """Embeddings of images or texts by a frozen network, cached under <data_root>/embeddings"""

    def __init__(self, data_root, loader):
        self.folder, self.loader, self.seconds = Path(data_root) / "embeddings", loader, 0.0

    def images(self, encode, split, key, what):
        """encode(x) of every image of a split -> float32 (N, D)"""
        key = {**key, "pixels": (split.images.size, split.images.resample), "images": split.fingerprint()}
        return self.rows(lambda batches: map(encode, self.loader.pixels(split, batches)), len(split), key, what, "img")

    @torch.no_grad()
    def rows(self, encode, n, key, what, unit):
        """encode(batches of row numbers) -> batches of rows; all n rows -> float32 (n, D), memory-mapped. `key` holds
        all that decides the values. Chunks are files: a killed run leaves whole ones, concurrent runs do no harm."""
        folder = self.folder / hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        whole, size = folder / "all.npy", 8 * EVAL_BATCH
        if not broadcast(rank() > 0 or data_prep.read_rows(whole, n) is not None):
            data_prep.make_folder(folder)
            starts = range(0, n, size)
            parts = {folder / f"{at:09d}-{size}.npy": in_batches(np.arange(at, min(at + size, n))) for at in starts}
            rows_in = {part: sum(map(len, batches)) for part, batches in parts.items()}
            share = list(parts)[rank() :: world()]
            mine = {part: parts[part] for part in share if data_prep.read_rows(part, rows_in[part]) is None}
            total, started = sum(len(idx) for batches in mine.values() for idx in batches), time.perf_counter()
            for done, part in enumerate(progress(mine, f"embedding {what}", unit=f" x {size} {unit}"), 1):
                data_prep.write_rows(part, [batch.float().cpu().numpy() for batch in encode(mine[part])])
                if rank() == 0 and done == 1 and (to_go := (time.perf_counter() - started) * (len(mine) - 1)) > 60:
                    print(f"embedding {what}: {n} {unit}, about {in_minutes(to_go)} to go", flush=True)
            if rank() == 0 and total:
                seconds = time.perf_counter() - started
                print(f"embedded {what}: {total} in {seconds:.1f} s, {total / seconds:.0f} {unit}/s", flush=True)
                self.seconds += seconds
            barrier()
            chunks = [data_prep.read_rows(part, rows_in[part]) for part in parts] if rank() == 0 else [None]
            if not any(chunk is None for chunk in chunks):  # else another run was first, and has tidied up
                data_prep.write_rows(whole, chunks)
            for part in parts if rank() == 0 else ():
                part.unlink(missing_ok=True)
        barrier()
        if not whole.exists():
            die(f"{whole} has been deleted: start again")
        return np.load(whole, mmap_mode="r", allow_pickle=False)


class Clip:
    """A frozen CLIP of open_clip, as --clip_model and --clip_pretrained say, with its own tokenizer, mean and std"""

    def __init__(self, args, device):
        name, folder = args.clip_model, Path(args.data_root) / "scenes_clip"
        if name == "scenes":
            name = f"local-dir:{folder}"
            if rank() == 0:
                scenes.make_clip(folder)
            barrier()
        self.device, self.dtype = device, torch.float16 if device.type == "cuda" else torch.float32
        with torch.random.fork_rng(devices=[]):  # the global generator stays as it is without a CLIP
            self.net, self.tokenizer, config = load_open_clip(name, args.clip_pretrained, self.dtype)
        preprocess = self.net.visual.preprocess_cfg
        weights = hash_tensors(self.net.state_dict())
        self.key = {"clip": config, "weights": weights, "preprocess": preprocess, "as": str(self.dtype)}
        self.net.to(device).eval().requires_grad_(False)
        self.mean, self.std = (torch.tensor(preprocess[what], device=device).view(3, 1, 1) for what in ("mean", "std"))
        self.size = int(np.max(preprocess["size"]))
        self.resample = getattr(Image.Resampling, preprocess["interpolation"].upper(), Image.Resampling.BICUBIC)

    @torch.inference_mode()
    def encode_image(self, x):
        """Pixels in 0..1 (B, 3, H, W), squashed to CLIP's input -> unit vectors (B, D)"""
        with torch.autocast(self.device.type, enabled=False):  # its precision is its own
            x = (squash(x, self.size) - self.mean) / self.std
            x = x.contiguous(memory_format=torch.channels_last)  # convolutions on a CPU are twice as fast on it
            return F.normalize(self.net.encode_image(x.to(self.dtype)).float(), dim=1)

    @torch.inference_mode()
    def encode_text(self, tokens):
        """-> (N, D), as CLIP gives them: not unit vectors"""
        with torch.autocast(self.device.type, enabled=False):
            return self.net.encode_text(tokens.to(self.device)).float()

    def embed_images(self, split, what, cache):
        """Unit vectors of a split's images, whatever --image_size is -> float32 (N, D)"""
        split = replace(split, images=split.images.from_files(self.size, self.resample), pixels=None)
        return cache.images(self.encode_image, split, self.key, f"{what} with CLIP")

    def embed_texts(self, texts, cache):
        """Embeddings of texts -> float32 (N, D), not unit vectors"""
        tokens = self.tokenizer(texts)
        for i, j in itertools.combinations(range(len(texts)), 2):
            if torch.equal(tokens[i], tokens[j]):
                die(f"CLIP can't tell {texts[i]!r} from {texts[j]!r}: it reads no more than {tokens.shape[1]} tokens")
        encode = lambda batches: (self.encode_text(tokens[idx]) for idx in batches)
        return cache.rows(encode, len(texts), {**self.key, "tokens": tokens.tolist()}, "texts", "text")


def squash(x, size):
    """Pixels in 0..1 (B, 3, H, W) -> (B, 3, size, size)"""
    if x.shape[2:] == (size, size):
        return x
    return F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def load_open_clip(name, pretrained, dtype):
    """-> a model of open_clip with its weights, its tokenizer, its description; die() says what to do without them"""
    import open_clip  # takes seconds: only for those who need it
    from huggingface_hub.constants import HF_HUB_CACHE

    local, named = name.startswith("local-dir:"), not name.startswith(("local-dir:", "hf-hub:"))
    pretrained = pretrained if named else None
    tags, file = open_clip.list_pretrained_tags_by_model(name), pretrained and Path(pretrained).is_file()
    if local and not (Path(name[len("local-dir:") :]) / "open_clip_config.json").is_file():
        die(f"--clip_model {name}: there is no open_clip_config.json in that folder")
    if named and name not in open_clip.list_models():
        near = ", ".join(difflib.get_close_matches(name, open_clip.list_models(), 5, 0.4))
        near = f"did you mean local-dir:{name}?" if Path(name).is_dir() else f"near it: {near or 'nothing'}"
        die(f"--clip_model {name} is not one of open_clip's, local-dir:FOLDER or hf-hub:NAME; {near}")
    if named and not file and pretrained not in tags:
        die(f"--clip_pretrained {pretrained!r} is neither a file nor a tag of {name}, which are: {', '.join(tags)}")
    # open_clip only warns where a tag's weights were trained with another activation than the model's name stands for
    quick = pretrained in tags and open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
    more = {"precision": "fp16" if dtype == torch.float16 else "fp32", "force_quick_gelu": quick}
    logging.disable()
    try:
        net = open_clip.create_model(name, pretrained, require_pretrained=True, **more)
        return net, open_clip.get_tokenizer(name), {"quick": quick, **open_clip.get_model_config(name)}
    except Exception as problem:  # open_clip, the hub, torch and safetensors each have their own
        reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        if local or file:
            die(f"CLIP's weights in {pretrained or name} are missing, cut off or of another model: {reason}")
        named = f" --clip_model {name}-quickgelu" if quick and not name.endswith("-quickgelu") else ""
        fix = f"where there is internet and pass --clip_pretrained FILE{named}, or --clip_model local-dir:FOLDER"
        what = f"CLIP {name} {pretrained or ''} is not in {HF_HUB_CACHE}"
        die(f"{what} and can't be downloaded: fetch it {fix} ({reason[:150]})")
    finally:
        logging.disable(logging.NOTSET)


COMPOUNDS = {"diningtable": "dining table", "pottedplant": "potted plant", "tvmonitor": "tv monitor"}  # of VOC


def prompts(template, classes):
    """--prompt with every class's name in it, as words: pottedplant is potted plant, and CUB's
    has_bill_shape::all-purpose is bird whose bill shape is all-purpose"""
    if template.count("{}") != 1:
        die(f"--prompt {template!r} must have one {{}} where the class goes")
    if classes == data_prep.nameless(len(classes)):
        die("CLIP needs the classes' names: put them into the data set's dataset.json, as a list under \"classes\"")
    words = [re.sub(r"^has_(\w+)::(.+)$", r"bird whose \1 is \2", COMPOUNDS.get(name, name)) for name in classes]
    return [template.replace("{}", " ".join(name.replace("_", " ").split())) for name in words]


# scenes' class names give an odds ratio of 6.9 and an agreement of 79 %, 300 random orders 0.4 to 2.4 and 39 to 62 %.
# Odds are like precision where classes are rare, but twice those of a class in half of the images can be reached.
MIN_ODDS_RATIO = 2  # of the pseudo-positives' precision to that of a random choice
MIN_AGREEMENT = 65  # percent
MIN_CHOSEN = 1  # percent of training images with a pseudo-positive
JUDGED = 10_000  # images at most


def judge_clip(run, data, scores, choose):
    """What CLIP is worth for these classes: by full labels of validation images, else by known labels of training
    images. One line, and a warning where it is worth little. scores(name of a split) -> (N, C), choose(scores, z) ->
    pseudo-labels"""
    full = data.full_val
    name, labels = ("val", full.y[:JUDGED]) if full else ("train", data.train.z[:JUDGED])
    z = torch.zeros_like(labels) if full else labels
    score = scores(name)[:JUDGED]
    counts = count_pseudo_labels(choose(score, z), z, labels if full else None)
    wanted = [f"pseudo_positives_{what}" for what in ("per_image", "precision", "precision_at_random")]
    numbers = {what: value for what, value in pseudo_label_columns(counts.double()).items() if what in wanted}
    numbers |= {"agreement": agreement(score, labels), "agreement_at_random": 50.0}
    run.summarise(f"clip_on_{name}", without_nans(numbers))
    odds = [p / max(100 - p, 1e-9) for p in map(numbers.get, wanted[1:]) if p is not None]
    useless = odds[0] < MIN_ODDS_RATIO * odds[1] if odds else numbers["agreement"] < MIN_AGREEMENT
    if useless and rank() == 0:
        remedy = "class names as CLIP would read them, another --prompt or --clip_model, or em_apl.py (no CLIP)"
        print(f"warning: CLIP hardly knows these classes: try {remedy}", flush=True)


def warn_of_few(pseudo, fix):
    """A warning where hardly a training image has a pseudo-positive, with what to try"""
    chosen = 100 * (pseudo.amax(1) == 1).float().mean().item()
    if chosen < MIN_CHOSEN and rank() == 0:
        print(f"warning: {chosen:.2g} % of the training images have a pseudo-positive: {fix}", flush=True)


def agreement(scores, z):
    """Mean percent of an image's other classes that have a lower score than a known label; ties count half"""
    shares = []
    for score, known in zip(scores.split(ROWS), (z == 1).split(ROWS)):
        image, c = known.nonzero(as_tuple=True)
        score, at, others = score[image], score[image, c, None], ~known[image]  # (known labels, C)
        below = (score < at) + (score == at) / 2
        shares.append((below * others).sum(1) / others.sum(1))
    return 100 * torch.cat(shares).nanmean().item()


# ---- 5. Run


def unwrap(thing):
    return thing.module if isinstance(thing, nn.parallel.DistributedDataParallel) else thing


def find_device(name):
    try:
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        device = torch.empty(0, device=name).device  # with its index, if it is there
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        die(f"--device {name}: {str(problem).splitlines()[0]}; try --device cpu")
    if device.type not in ("cpu", "cuda"):
        die(f"--device {name}: only cpu and cuda are supported")
    libc = ctypes.CDLL(None) if sys.platform == "linux" and device.type == "cpu" else None
    if hasattr(libc, "mallopt"):  # keep freed memory: getting pages anew would take up to half of a step on a CPU
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    return device


def join_processes(args):
    """Joins the others under torchrun; -> this process's device, and the dtype of autocast (None: full precision)"""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1 and args.device != "cpu" and torch.cuda.is_available()
    device, amp = find_device(f"cuda:{os.environ['LOCAL_RANK']}" if several else args.device), args.amp
    cuda = device.type == "cuda"
    if dist.is_torchelastic_launched() and not dist.is_initialized():
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        # of what one process does alone; that another is dead is found by watch_processes
        ranks |= {"timeout": timedelta(hours=2), "device_id": device if cuda else None}
        dist.init_process_group("nccl" if cuda else "gloo", store=torchrun_store(1800), **ranks)
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        amp = amp.replace("auto", "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16")
    elif amp == "fp16":
        die("--amp fp16 needs CUDA: on a CPU use bf16 or off")
    return device, {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)


def torchrun_store(seconds):
    """The key-value store of torchrun's processes, with a prefix of its own after every restart: torch's default would
    find the addresses of processes that are dead"""
    hosts = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    more = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False, "multi_tenant": True}
    prefix = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return dist.PrefixStore(prefix, dist.TCPStore(*where, is_master=hosts, **more))


def launch():
    """What the processes that torchrun starts again have in common with the first ones; "" without torchrun"""
    there = dist.is_torchelastic_launched()
    return f"{platform.node()} {os.getppid()} {os.environ['TORCHELASTIC_RUN_ID']}" if there else ""


SILENCE = 40  # seconds without a sign of life after which a process counts as dead


def watch_processes():
    """Starts a thread that ends this process when torchrun is gone or another process is silent, for which a collective
    operation would wait until its time-out. -> the function that stops the thread"""
    parent, stop, own, everyone = os.getppid(), threading.Event(), rank(), range(world())

    def silent(store):
        """Why this process should end, as soon as there is a reason; "" when it ends itself"""
        beats, awake = {}, time.monotonic()
        while not stop.wait(2):
            store.set(f"alive {own}", str(time.monotonic()))
            slept, awake = time.monotonic() - awake > SILENCE / 2, time.monotonic()  # suspended, with all the others
            for other in everyone:
                beat = store.get(f"alive {other}") if store.check([f"alive {other}"]) else None
                if slept or beat != beats.get(other, (None,))[0] or beat is None:
                    beats[other] = beat, awake
                elif awake - beats[other][1] > SILENCE:
                    return f"process {other} has given no sign of life for {SILENCE} s"
            if os.getppid() != parent:
                return "torchrun is gone"
        return ""

    def watch():
        try:
            reason = silent(torchrun_store(SILENCE))
        except RuntimeError as problem:
            reason = f"the other processes can't be reached ({in_a_line(problem)[:100]})"
        if reason and dist.is_initialized() and not stop.is_set():
            print(f"error: {reason}: process {own} ends; --resume the run", file=sys.stderr, flush=True)
            os._exit(1)

    def end():
        stop.set()
        thread.join(SILENCE)  # a thread that is killed inside torch would take the process with it

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    atexit.register(end)
    return end


RESERVED = {"run", "scaler", "classes", "embedding_seconds", "probe", "model_class", "epoch", "thresholds"}
RESERVED |= {"identity", "inside", "data"}


def check_state(name, thing):
    """A bare tensor is refused: rebound by the script it would silently drop out of the checkpoint"""
    if name in RESERVED or name.startswith(("val_", "test_")):
        die(f"run.epochs can't save {name}=..., a name reserved for checkpoints: choose another")
    if not isinstance(thing, SimpleNamespace) and not hasattr(thing, "load_state_dict"):
        fix = f"labels = types.SimpleNamespace({name}={name}), labels.{name} in the loop, run.epochs(labels=labels)"
        die(f"run.epochs can't save {name}, a {type(thing).__name__} that may be rebound: put it in a namespace, {fix}")
    for key, value in vars(thing).items() if isinstance(thing, SimpleNamespace) else ():
        if not (torch.is_tensor(value) or type(value) in (int, float, bool, str, type(None))):
            die(f"run.epochs can't save {name}.{key}, a {type(value).__name__}: make it a tensor or a number")


def restore_namespace(name, space, saved, device=None):
    """In place where the shape is the same, for an optimizer may hold the tensor; else rebound to what was saved"""
    for key, value in saved.items():
        now = getattr(space, key, None)
        if not torch.is_tensor(now) or not torch.is_tensor(value):
            setattr(space, key, value.to(device) if torch.is_tensor(value) else value)
        elif (now.shape, now.dtype) == (value.shape, value.dtype):
            now.detach().copy_(value)
        elif now.requires_grad:
            die(f"{name}.{key} is {tuple(value.shape)} in the checkpoint and {tuple(now.shape)} in the script")
        else:
            setattr(space, key, value.to(now.device))


def seed_all(seed):
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_state(device):
    """State of all global generators, as a checkpoint can hold it"""
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest)}
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return state | {"cuda": cuda, "python": random.getstate()}


def restore_random_state(device, state):
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


CHECK_EVERY = 50  # steps between two checks of the losses: each one waits for the device


class Run:
    """The plumbing around a script's loop: device, precision, processes, directory, log, checkpoints, evaluation"""

    def __init__(self, args, script):
        self.args, self.script, self.method = args, Path(script), Path(script).stem
        self.device, self.dtype = join_processes(args)
        self.stop_watching = watch_processes() if world() > 1 else lambda: None
        args.resume = broadcast(self.find_earlier() if rank() == 0 else None)
        if args.resume is None:
            self.leave()
            sys.exit(0)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if args.batch_size < world():
            die(f"--batch_size {args.batch_size} can't be shared by {world()} processes")
        self.loader = Loader(args, self.device)
        self.cache = EmbeddingCache(args.data_root, self.loader)
        self.data = self.directory = self.lock = None  # from prepare() on
        self.fingerprint = ""  # of the training images and labels
        self.in_model, self.state, self.summaries = set(), {}, {}  # ids of the model's weights; what last.pt carries
        self.checkpoint, self.passes, self.saved = {}, 0, time.monotonic()  # inside.pt, until its batch is reached
        self.epoch, self.last_epoch, self.steps = 0, args.epochs, 0
        self.rows, self.earlier = [], []  # a row of metrics per epoch; results of the stages before the last
        self.best, self.began_at = {"epoch": 0}, 0  # best epoch of this stage with its results; last epoch before it
        self.foretold, self.clock = False, None  # whether the time to go was printed; time and number of the first step
        self.seen, self.began, self.training_began = 0, 0.0, 0.0  # images and times of this epoch
        self.logged, self.counts, self.unchecked, self.batch = {}, [], [], 0  # of this epoch too
        self.idx, self.weight, self.stepped = None, 1.0, True  # this batch
        self.in_loop, self.signal = False, None  # a signal that ends the run after this step
        if args.tensorboard and not importlib.util.find_spec("tensorboard"):
            die("--tensorboard needs one more package: pip install tensorboard")
        for name in {"SIGINT", "SIGTERM", "SIGUSR1"} & set(dir(signal)):
            signal.signal(getattr(signal, name), self.interrupt)
        seed_all(args.seed)

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def interrupt(self, number, _=None):
        """Ctrl-C, SIGTERM or SIGUSR1. Whatever they interrupt, files are whole: they are replaced, not changed"""
        signal.signal(number, signal.SIG_IGN if world() > 1 else signal.SIG_DFL)
        if number != signal.SIGINT and self.in_loop and world() == 1 and not self.signal:
            self.signal = number  # save_inside() saves after this step, and comes back here
            return
        if self.directory and rank() == 0 and not self.args.eval_only:
            start = "python" if world() == 1 else "torchrun ..."
            print(f"\nstopped; resume with: {start} {sys.argv[0]} --resume {self.directory}", file=sys.stderr)
        sys.exit(130 if number == signal.SIGINT else 143)

    def leave(self):
        """Ends the group of processes when all have come here: rank 0 may still have been writing"""
        barrier()
        self.stop_watching()
        if dist.is_initialized():
            dist.destroy_process_group()
            time.sleep(0.2)  # a thread of gloo that still drops a tensor when Python ends would abort the process

    # -- directory and model

    def find_earlier(self):
        """The run that this command resumes: that of --resume, of --name, or of the processes that torchrun has started
        again; "" where it begins, None where it has ended"""
        args, named = self.args, Path(self.args.out, self.args.name)
        given = args.resume or args.eval_only or (str(named) if args.name and (named / "config.json").exists() else "")
        if launch() and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and not (given or args.name):
            key, configs = json.dumps(launch()).encode(), Path(args.out).glob("*/config.json")
            begun = [path for path in configs if key in path.read_bytes()]
            given = str(max(begun, key=lambda path: path.stat().st_mtime).parent) if begun else ""
        if not given:
            return ""
        config, path = read_config(Path(given)), Path(given, "result.json")
        if config["method"] != self.method:
            die(f"{given} was made by {config['method']}.py: give it to that script")
        if apart := differences(identity(self.method, config["settings"]), identity(self.method, asdict(args))):
            die(f"{given} has other settings: {apart}. Choose the same settings, or another --name")
        files = dataset_folder(args).glob("formatted_*.npy")
        if path.exists() and any(file.stat().st_mtime > path.stat().st_mtime for file in files):
            print(f"note: {args.dataset} was written after {given}: if it has changed, start a new run")
        if args.eval_only:
            return ""
        if Path(given, "script.py").read_bytes() != self.script.read_bytes():
            print(f"note: {self.script.name} has changed since {given} began; the original is its script.py")
        if path.exists():
            result = read_json(path, "", test_mAP=(float, type(None)), val_known_mAP=float)
            named = {"test mAP": result.get("test_mAP"), "val known mAP": result.get("val_known_mAP")}
            mAP = "".join(f", {name} {value:.2f}" for name, value in named.items() if value is not None)
            print(f"{given}: finished after epoch {result.get('last_epoch')}{mAP}")
            return None
        if config["processes"] != world():
            print(f"note: started with {config['processes']} processes; with {world()} the numbers differ a little")
        return given

    def open_directory(self):
        """That of the run which is resumed or evaluated, or a new one: <out>/<dataset>-<method>-s<seed>-<time>"""
        args = self.args
        directory = Path(args.resume or args.eval_only or f"{args.out}/{args.name}")
        new = not (args.resume or args.eval_only)
        if rank() == 0 and new and not args.name:
            stamp = f"{Path(args.dataset).name}-{self.method}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
            paths = (Path(args.out, stamp + f"-{n}" * (n > 1)) for n in itertools.count(1))  # of the same second
            directory = next(path for path in paths if data_prep.make_folder(path, new=True))
        if rank() == 0 and not args.eval_only:
            self.lock = data_prep.lock(directory)
        if rank() == 0 and new:
            if found := {path.name for path in directory.glob("[!.]*")} - {"script.py"}:
                die(f"{directory} is not a run directory, it contains {sorted(found)[0]}: choose another --name")
            self.describe(directory)
        return broadcast(directory)

    def describe(self, directory):
        shutil.copy(self.script, directory / "script.py")
        git = ["git", "-C", str(self.script.resolve().parent), "describe", "--always", "--dirty", "--abbrev=40"]
        there = shutil.which("git")
        commit = subprocess.run([*git, "--exclude=*"], capture_output=True, text=True).stdout.strip() if there else ""
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        config = {"method": self.method, "settings": asdict(self.args), "command": shlex.join(["python", *sys.argv])}
        config |= {"working_directory": os.getcwd(), "commit": commit, "versions": versions, "processes": world()}
        config |= {"launch": launch(), "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"}
        data_prep.write_json(directory / "config.json", config)
        print(f"{directory}: {self.args.dataset}, {self.device}, amp {self.dtype or 'off'}", flush=True)

    def prepare(self, model, data, find_unused_parameters=False):
        """The model on its device, ready to train; with --linear also the data, embedded by its frozen backbone"""
        self.data, start = data, start_from(self.args)
        self.check_model(model)
        if rank() == 0 and not data.full_val:
            how = "the last epoch is kept"
            if data.val:
                how = f"{len(data.val)} training images are held out, the mAP of their known labels chooses the epoch"
            print(f"no fully labelled validation images: {how}")
        if start:
            checkpoint = load_weights(model, start, data.classes)
            if self.args.resume or self.args.eval_only:
                check_probe(model, self.args.image_size, checkpoint, start)
        if world() > 1 and not (self.args.linear or self.args.eval_only):  # else no BatchNorm is trained
            self.check_batch_norms(batch_norms(model))
        for split in data.splits().values() if self.args.pixels == "device" and not self.args.linear else ():
            self.loader.hold(split)
        self.directory = self.open_directory()  # only now: what is wrong with flags, data or weights leaves none behind
        model = model.to(self.device, memory_format=torch.channels_last)
        self.in_model = {id(weight) for weight in model.parameters()}
        if self.args.linear:
            self.embed_features(model, data)
        if self.args.compile:
            model.compile()
        more = {"device_ids": [self.device] if self.device.type == "cuda" else None}
        # not in every forward, of which a step may have several: predict() broadcasts the statistics
        ddp, name = nn.parallel.DistributedDataParallel, "forward_sync_buffers"  # before torch 2.13: broadcast_buffers
        more |= {name if name in inspect.signature(ddp).parameters else "broadcast_buffers": False}
        return ddp(model, find_unused_parameters=find_unused_parameters, **more) if world() > 1 else model

    def check_batch_norms(self, places):
        """Over all processes with --sync_bn; else a process may have too few images for statistics of its own"""
        share = self.args.batch_size // world()
        if places and self.args.sync_bn:
            if self.device.type != "cuda":
                die("--sync_bn needs CUDA: on a CPU, leave it out and raise --batch_size")
            share_batch_norms(places)
        elif places and share < 4 and rank() == 0:
            few = f"--batch_size {self.args.batch_size} leaves {share} images for the BatchNorms of each process"
            print(f"warning: {few}: raise it, or share their statistics with --sync_bn")

    def check_model(self, model):
        """Builds the model again from the script's source, as predict.py will, and compares their logits"""
        kind, size, reason = type(model), self.args.image_size, "it gives other logits"
        settings = replace(self.args, **({"weights": "none"} if hasattr(self.args, "weights") else {}))
        try:
            with torch.random.fork_rng(devices=[]):
                home = import_script(self.script) if kind.__module__ == "__main__" else sys.modules[kind.__module__]
                again = getattr(home, kind.__qualname__)(settings, len(self.data.classes))
                again.load_state_dict(model.state_dict())
                same = torch.equal(probe(model, size), probe(again, size))
        except Exception as problem:  # whatever the code of a model may raise
            same, reason = False, in_a_line(problem)
        if not same:
            name, where = f"{kind.__name__}(args, num_classes)", f"a class at the top level of {self.script.name}"
            die(f"predict.py could not build the model again ({reason}): {name}, {where}, must make all of it")

    def embed_features(self, model, data):
        if not (hasattr(model, "body") and hasattr(model, "features")):
            die(f"--linear needs a model with a body and features(x), which {type(model).__name__} doesn't have")
        if getattr(self.args, "weights", "") == "none" and not start_from(self.args) and rank() == 0:
            print("warning: --linear on random weights: add --weights FILE or --init_from RUN", flush=True)
        model.eval().body.requires_grad_(False)
        weights = hash_tensors(model.body.state_dict())
        key = {"backbone": self.args.backbone, "weights": weights, "size": self.args.image_size}
        key |= {"mean": model.mean.flatten().tolist(), "std": model.std.flatten().tolist(), "amp": str(self.dtype)}

        @torch.no_grad()
        def features(x):
            with self.autocast():
                return model.features(x)

        flipped = self.cache.images(lambda x: features(x.flip(3)), data.train, {**key, "flip": True}, "train, flipped")
        for name, split in data.splits().items():
            split.features = (self.cache.images(features, split, key, name), flipped)
        kept = torch.tensor(data.train.features[0][:2])
        again = features(next(self.loader.pixels(data.train, [np.arange(len(kept))]))).float().cpu()
        if not close(again, kept):
            die(f"the embeddings in {self.cache.folder} were made by other code of {type(model).__name__}: delete them")

    # -- steps

    def inputs(self, split, batches, flips=None, augment=None):
        """What the model takes: pixels or, with --linear, features (B, D), those of the flipped images where `flips`"""
        if not split.features:
            if not augment:
                self.loader.hold(split)
            return self.loader.pixels(split, batches, augment)
        plain, flipped = split.features  # flipped ones are of the training split
        fetch = lambda idx, flip: plain[idx] if flip is None else np.where(flip[:, None], flipped[idx], plain[idx])
        return self.loader.read(lambda item: fetch(*item), zip(batches, flips or [None] * len(batches)))

    def batches(self, split, flip=False, augment=None, min_images=1):
        """One epoch of (x, z, idx): pixels in 0..1, observed labels (a copy: label state that changes is the script's)
        and rows of the split, this process's share of every batch. Order and flips come from (seed, epoch). `augment`
        is that of Loader.pixels. A last batch that leaves a process fewer than `min_images` is dropped."""
        n, size = len(split), self.args.batch_size
        generator = torch.Generator().manual_seed(self.args.seed * 10007 + self.epoch)
        order = torch.randperm(n, generator=generator)
        flips = (torch.rand(n, generator=generator) < 0.5)[order] & flip
        spans = [(at, min(at + size, n)) for at in range(0, n, size) if n - at >= min_images * world()]
        done, total = 0, min(len(spans), self.steps_left)
        self.training_began, self.passes = time.perf_counter(), self.passes + 1
        if self.checkpoint:  # resumed inside an epoch: in this pass over the data, or in a later one
            if self.passes < self.checkpoint["inside"]["pass"]:
                return
            done, total = self.restore_inside()
        self.seen, spans = sum(stop - start for start, stop in spans[:total]), spans[done:total]
        shares = [slice(start + rank(), stop, world()) for start, stop in spans]
        rows, mirrored = [order.numpy()[share] for share in shares], [flips.numpy()[share] for share in shares]
        inputs = self.inputs(split, rows, mirrored, augment)
        order, flips = order.to(self.device), flips.to(self.device)
        bar = progress(inputs, f"epoch {self.epoch}/{self.last_epoch}", total=total, initial=done)
        self.in_loop = True  # waiting for a batch too: SIGTERM is answered after the next step
        for at, ((start, stop), share, x) in enumerate(zip(spans, shares, bar), done + 1):
            if flip and not split.features:
                x = torch.where(flips[share].view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)
            self.idx, self.weight = order[share], len(x) * world() / (stop - start)
            yield self.of_any_length(x), split.z[self.idx], self.idx
            self.foretell(len(split), at, total)
            self.save_inside(at, total)
        self.in_loop = False

    def foretell(self, images, done, total):
        """One line about how long training will take, once some steps are measured; without a terminal too"""
        now = time.perf_counter()
        self.clock = self.clock or (now, self.steps)  # after the first step, which compiles and warms up
        elapsed, steps = now - self.clock[0], self.steps - self.clock[1]
        if self.foretold or steps < 3 or elapsed < 10:
            return
        left = min(total - done + (self.last_epoch - self.epoch) * total, self.steps_left)
        evaluated = sum(len(split) for split in (self.data.val, self.data.test) if split)
        seconds, self.foretold = elapsed / steps * left * (1 + evaluated / images / 3), True  # no backward: a third
        if rank() == 0 and seconds > 60:
            slow = self.device.type == "cpu" and seconds > 3600 and not self.args.linear
            advice = "; a smaller --image_size or --backbone takes less time" if slow else ""
            advice += ", --linear a few minutes" if slow and hasattr(unwrap(self.state["model"]), "features") else ""
            print(f"about {in_minutes(seconds)} to go, {left} steps{advice}", flush=True)

    def of_any_length(self, x):
        """A batch of which --compile makes one graph for all batch sizes, the last and short one's too"""
        if self.args.compile:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return x

    def backward(self, loss):
        """Gradients of a batch's loss, scaled for fp16 (before clipping: run.scaler.unscale_(optimizer)). Unequal
        shares of a batch are weighted so that the mean over processes is the batch's; it is taken by DDP for the
        model, here for what else the optimizers have (a label matrix)."""
        self.scaler.scale(loss * self.weight).backward()
        self.stepped = False
        optimizers = [thing for thing in self.state.values() if isinstance(thing, torch.optim.Optimizer)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups] if world() > 1 else []
        for weight in (weight for group in groups for weight in group["params"] if id(weight) not in self.in_model):
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            dist.all_reduce(weight.grad)
            weight.grad /= world()
        self.batch += 1
        self.unchecked.append((self.batch, loss.detach(), self.idx))
        if len(self.unchecked) == CHECK_EVERY:
            self.check_losses()

    def step(self, *optimizers):
        """A step of one or several optimizers"""
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.steps, self.stepped = self.steps + (self.batch > 0), True  # batches that had a backward

    def check_losses(self):
        """Stops at a loss that is not finite. Not called every step, for it waits for the device."""
        losses = torch.stack([loss for _, loss, _ in self.unchecked]).tolist() if self.unchecked else []
        for loss, (step, _, idx) in zip(losses, self.unchecked):
            if not math.isfinite(loss):
                where = f"epoch {self.epoch}, step {step} (training rows {', '.join(map(str, idx.tolist()))})"
                self.give_up(f"the loss is {loss} in {where}")
        self.unchecked = []

    def give_up(self, what):
        kept = f"; {self.directory} keeps the epoch before" if self.rows else ""
        die(f"{what}{kept}: try a lower --lr or --amp off")

    # -- log

    def log(self, **values):
        """Values of a step, whose mean goes into the epoch's row, or of the epoch. Doesn't wait for the device."""
        for name, value in values.items():
            value = value.detach() if torch.is_tensor(value) else torch.tensor(value)
            if value.ndim:
                shape = tuple(value.shape)
                die(f"{self.script.name}: run.log({name}=...) takes a number, not a tensor of shape {shape}")
            self.logged.setdefault(name, []).append(value)

    def log_pseudo_labels(self, pseudo, z, y=None):
        """Number, precision and recall of pseudo-labels (B, C), 1 and -1, among the labels that were not observed. Of
        a batch, to be summed over the epoch, or of the whole training set; y are the full labels, if known."""
        self.counts.append(count_pseudo_labels(pseudo, z, y))

    def summarise(self, name, values):
        """Numbers of the whole run: printed now, kept in result.json"""
        self.summaries[name] = values
        if rank() == 0:
            print(f"{name}: {', '.join(f'{key} {value:.2f}' for key, value in values.items())}", flush=True)

    def stacked_logs(self):
        """{name: (times,) on the device}; a script may log a number here and a tensor there"""
        return {name: torch.stack([value.to(self.device) for value in values]) for name, values in self.logged.items()}

    def row_of_logs(self):
        """Means over all steps and processes of what was logged, NaNs left out, and the columns of pseudo-labels"""
        values = {name: logged.double() for name, logged in self.stacked_logs().items()}
        sums = {name: (v.nansum().item(), (~v.isnan()).sum().item()) for name, v in values.items()}
        # a process may have logged what others haven't
        everyone = gather_objects((sums, sum(self.counts).double().cpu() if self.counts else None))
        names = dict.fromkeys(name for sums, _ in everyone for name in sums)
        totals = {name: np.sum([sums.get(name, (0, 0)) for sums, _ in everyone], axis=0).tolist() for name in names}
        means = {name: total / count if count else math.nan for name, (total, count) in totals.items()}
        counts = [counts for _, counts in everyone if counts is not None]
        return means | (pseudo_label_columns(sum(counts)) if counts else {})

    # -- evaluation

    @torch.no_grad()
    def predict(self, model, split):
        """Logits (N, C) of a split's plain images, in the split's order, on every process"""
        training, model, done = model.training, unwrap(model).eval(), 0
        for buffer in model.buffers() if world() > 1 else ():  # rank 0's BatchNorm statistics, as in its checkpoint
            dist.broadcast(buffer, 0)
        batches = in_batches(np.arange(len(split))[rank() :: world()])
        logits = torch.zeros(-(-len(split) // world()), len(self.data.classes), device=self.device)
        for x in progress(self.inputs(split, batches), "evaluating", total=len(batches)):
            with self.autocast():
                logits[done : done + len(x)] = model(self.of_any_length(x))
            done += len(x)
        model.train(training)
        logits = gather(logits, len(split))
        if not all(piece.isfinite().all() for piece in logits.split(ROWS)):
            self.give_up(f"the model's outputs are not finite after epoch {self.epoch}")
        return logits

    @property
    def criterion(self):
        """The column of metrics.csv that chooses the best epoch"""
        return "val_known_mAP" if self.by_known_labels else "val_mAP"

    @property
    def by_known_labels(self):
        """Whether the validation images have only known labels"""
        return self.data.val is not None and not self.data.full_val

    def validation_mAP(self, logits):
        """mAP of the validation images or, where nobody has labelled them in full, that of their known labels against
        all others: too low, but higher for a better model"""
        return mean_average_precision(logits, self.data.val.labels) if self.data.val else math.nan

    def tune_thresholds(self, scores):
        if not self.by_known_labels:
            return shrunk_thresholds(scores, self.data.val.y)
        return known_label_thresholds(scores, self.data.val.z, self.args.recall, self.args.labels_per_image)

    def describe_thresholds(self, scores, thresholds):
        """For result.json and best.pt; how many labels they give to validation images"""
        per_image = (scores >= thresholds).sum().item() / len(scores)
        return {"thresholds": dict(zip(self.data.classes, thresholds.tolist())), "labels_per_image": per_image}

    def measure(self, model, split, thresholds=None):
        """`thresholds` are those of the classes, tuned on validation, for F1_tuned"""
        if not split:
            return {"mAP": math.nan, "F1": {}, "F1_tuned": {}, "AP": {}, "missed": {}}
        logits, y = self.predict(model, split), split.y
        ap, p = average_precision(logits, y), logits.sigmoid()
        f1 = {"F1": f1_scores(p, y), "F1_tuned": {} if thresholds is None else f1_scores(p, y, thresholds)}
        missed = missed_positives(p, y, self.data.classes, 0.5 if thresholds is None else thresholds)
        return {"mAP": 100 * ap.mean().item(), **f1, "AP": dict(zip(self.data.classes, ap.tolist())), "missed": missed}

    def evaluate(self, model, data, max_drop=math.inf, **others):
        """Ends an epoch: validation mAP, test mAP where it is to be reported, a row of metrics, best.pt. Besides
        --patience, training ends when the mAP is more than `max_drop` below its best. `others` are models too, an EMA
        of the weights for instance: the best on validation counts, without validation the last of them."""
        self.check_losses()
        row, models = {"epoch": self.epoch, **self.row_of_logs()}, {"raw": model, **others}
        images_per_s = self.seen / (time.perf_counter() - self.training_began)
        logits = {name: self.predict(each, data.val) for name, each in models.items() if data.val}
        mAP = {name: self.validation_mAP(logits.get(name)) for name in models}
        highest = self.best.get(self.criterion, -1.0)
        chosen = max(mAP, key=mAP.get) if data.val else list(models)[-1]
        row |= {self.criterion: mAP[chosen], **{f"{self.criterion}_{name}": mAP[name] for name in models if others}}
        better = data.val is None or mAP[chosen] > highest  # without validation the last is kept
        stop = self.stale(row, others) or highest - mAP[chosen] > max_drop
        if stop and not (better or self.by_known_labels or self.args.smoke):  # known labels are too noisy to stop by
            self.last_epoch = self.epoch  # early stopping
        due = self.finished or (better and data.val)
        p = logits[chosen].sigmoid() if due and data.val else None
        thresholds = None if p is None else self.tune_thresholds(p)
        test = self.measure(models[chosen], data.test if due else None, thresholds)
        if others and self.finished and not data.val:  # nothing to choose between them by
            rest = {name: self.measure(models[name], data.test) for name in models if name != chosen}
            row |= {f"test_mAP_{name}": measured["mAP"] for name, measured in {**rest, chosen: test}.items()}
        row |= {"test_mAP": test["mAP"], "images_per_s": images_per_s, "seconds": time.perf_counter() - self.began}
        self.rows.append(row)
        if better:
            self.best = {"epoch": self.epoch, self.criterion: mAP[chosen], **{f"test_{k}": v for k, v in test.items()}}
            if data.val:
                self.best |= self.describe_thresholds(p, thresholds)
            if data.full_val and not data.test:  # the classes' results are then those of validation
                self.best["val_AP"] = dict(zip(data.classes, average_precision(logits[chosen], data.val.y).tolist()))
                self.best["val_missed"] = missed_positives(p, data.val.y, data.classes, thresholds)
        if rank() == 0 and better:
            best = unwrap(models[chosen])  # saved with what rebuilds it elsewhere and what checks the rebuilt one
            about = {"model_class": [type(best).__module__, type(best).__qualname__], "classes": data.classes}
            about |= {"probe": probe(best, self.args.image_size), **self.best}
            about["identity"] = identity(self.method, asdict(self.args))
            with replacing(self.directory / "best.pt") as temporary:
                torch.save({"model": best.state_dict(), **about, **self.namespaces()}, temporary)
        if rank() == 0:
            self.show(row, better)

    def evaluate_only(self, model):
        """--eval_only: the best weights, in place since prepare(). Where only known labels choose the thresholds, those
        of another --recall or --labels_per_image go into result.json"""
        saved = read_checkpoint(start_from(self.args)).get("thresholds")
        thresholds = torch.tensor(list(saved.values()), device=self.device) if saved else None
        logits = self.predict(model, self.data.val) if self.data.val else None
        if self.by_known_labels:
            p = logits.sigmoid()
            thresholds = self.tune_thresholds(p)
        test = self.measure(model, self.data.test, thresholds)
        if rank() > 0:
            return
        print(f"{self.directory}: {in_words({self.criterion: self.validation_mAP(logits)}, test)}")
        path = self.directory / "result.json"
        if self.by_known_labels and not path.exists():
            print("note: the run is unfinished: these thresholds are not kept")
        elif self.by_known_labels:
            self.best = self.describe_thresholds(p, thresholds)
            data_prep.write_json(path, read_json(path, "") | self.best)
            self.tell_thresholds()
            print(f"{path} has these thresholds now")

    def stale(self, row, others):
        """Whether more than --patience epochs have passed since the best of this stage, of the raw weights and of each
        other model (an EMA), and the others are below their best: an EMA that still rises is waited for"""
        rows, patience = [*self.rows[self.began_at :], row], getattr(self.args, "patience", -1)
        columns = [f"{self.criterion}_{name}" for name in ("raw", *others)] if others else [self.criterion]
        best = {name: max(rows, key=lambda earlier: earlier[name]) for name in columns}
        falling = all(row[name] < best[name][name] for name in columns[1:])
        return 0 <= patience < self.epoch - max(its["epoch"] for its in best.values()) and falling

    def show(self, row, better):
        if self.args.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(self.directory) as board:
                for name, value in row.items():
                    board.add_scalar(name, value, self.epoch)
        shown = [name for name in without_nans(row) if name not in NO_RESULTS and not name.endswith("at_random")]
        values = "  ".join(f"{name} {row[name]:{'.2f' if 'mAP' in name else '.4g'}}" for name in shown)
        speed = f"{row['seconds']:.1f} s  {row['images_per_s']:.0f} img/s"
        print(f"epoch {self.epoch:>2}/{self.last_epoch}  {values}{' *' if better else ''}  {speed}", flush=True)

    # -- epochs

    def epochs(self, **state):
        """Numbers of the epochs to train. `state` is what last.pt carries, as it is when an epoch's loop body ends:
        modules, optimizers, schedulers, and namespaces of tensors and numbers."""
        self.state = state
        self.namespaces()  # ends the program before training if one can't be saved
        train = self.data.train
        train.z = train.z.clone()  # a namespace may hold, and restore, the tensor itself
        self.fingerprint = hash_tensors({data_prep.hash_names(train.names()): train.z})
        if not isinstance(state.get("model"), nn.Module):
            die(f"{self.script.name}: run.epochs needs model=model, which is trained, saved and evaluated")
        if self.args.eval_only:
            self.evaluate_only(state["model"])
            self.leave()
            return
        if self.args.resume:
            self.restore()
        while self.checkpoint or not self.finished:
            self.epoch += 1
            self.logged, self.counts, self.unchecked, self.batch, self.passes = {}, [], [], 0, 0
            self.began = time.perf_counter()
            seed_all(self.args.seed * 10007 + self.epoch * world() + rank())  # dropout and the like
            for thing in state.values():
                if isinstance(thing, nn.Module):
                    thing.train()
                if isinstance(thing, torch.optim.Optimizer):
                    thing.zero_grad()  # what was accumulated for a step that did not come
            yield self.epoch
            if self.checkpoint:
                die(f"{self.script.name} makes fewer passes over its batches than before: start a new run")
            if not self.rows or self.rows[-1]["epoch"] != self.epoch:
                die(f"{self.script.name}: every epoch must end with run.evaluate(model, data)")
            if not self.steps:
                die(f"{self.script.name}: no batch had run.backward(loss) and run.step(optimizer): nothing was learnt")
            self.save()
        if rank() == 0:
            self.report()
            self.lock.close()
        self.leave()

    @property
    def finished(self):
        return self.epoch >= self.last_epoch or not self.steps_left

    @property
    def steps_left(self):
        """Of --max_steps"""
        return max(0, self.args.max_steps - self.steps) if self.args.max_steps else math.inf

    def extend(self, epochs, keep):
        """So many more epochs after this one, with a best epoch of their own; the best so far stays as the file `keep`
        and in result.json. -> False where --max_steps are used up"""
        if not self.steps_left:
            return False
        shown = "epoch", self.criterion, "test_mAP"
        results = {name: value for name, value in without_nans(self.best).items() if name in shown}
        if rank() == 0:
            with replacing(self.directory / keep) as temporary:
                shutil.copy(self.directory / "best.pt", temporary)
            print(f"{keep}: best {', '.join(f'{name} {value:.4g}' for name, value in results.items())}", flush=True)
        barrier()
        self.earlier.append(results)
        self.best, self.began_at, self.last_epoch = {"epoch": self.epoch}, self.epoch, self.epoch + epochs
        self.foretold, self.clock = False, None  # this stage has a speed of its own
        return True

    # -- what a run leaves

    def namespaces(self):
        for name, thing in self.state.items():
            check_state(name, thing)
        return {name: vars(thing) for name, thing in self.state.items() if isinstance(thing, SimpleNamespace)}

    def save(self):
        """The end of an epoch: last.pt, metrics.csv and, where epochs are long, curve.png"""
        if world() > 1:  # else rank 0's would be saved for all
            spaces = self.namespaces().items()
            values = {f"{name}.{key}": value for name, space in spaces for key, value in space.items()}
            digests = {name: hash_tensors({"": v}) if torch.is_tensor(v) else repr(v) for name, v in values.items()}
            everyone = gather_objects(digests)
            if apart := [name for name in digests if len({theirs.get(name) for theirs in everyone}) > 1]:
                die(f"{apart[0]} differs between the processes: gather or reduce it before the epoch ends")
        self.write_checkpoint("last.pt")
        if rank() == 0:
            (self.directory / "inside.pt").unlink(missing_ok=True)
            self.write_metrics()
            if self.rows[-1]["seconds"] > 20:  # to be looked at while it goes on
                plot_curve(self.rows, self.best["epoch"], self.directory / "curve.png")

    def save_inside(self, done, total):
        """After `done` of the `total` batches of an epoch: inside.pt, if --save_minutes have passed or a signal came"""
        due = self.signal or 0 < self.args.save_minutes <= (time.monotonic() - self.saved) / 60
        rarely = world() == 1 or done % CHECK_EVERY == 0  # for the processes have to agree
        if self.stepped and rarely and broadcast(due):  # not while gradients are accumulated
            self.check_losses()
            now, own = time.perf_counter(), io.BytesIO()
            content = {"spaces": self.namespaces(), "logged": self.stacked_logs(), "buffers": self.buffers()}
            content |= {"counts": sum(self.counts) if self.counts else None, "random": random_state(self.device)}
            torch.save(content, own)  # bytes: tensors would arrive on the device that they come from
            inside = {"pass": self.passes, "done": done, "total": total, "batch": self.batch}
            inside |= {"seconds": now - self.began, "training_seconds": now - self.training_began}
            inside["processes"] = gather_objects(torch.frombuffer(bytearray(own.getvalue()), dtype=torch.uint8))
            self.write_checkpoint("inside.pt", inside)
        if self.signal and (self.stepped or done == total):
            self.interrupt(self.signal)

    def write_checkpoint(self, file, inside=None):
        """All that a run is resumed from; `inside`: position in the epoch, and what each process has of its own"""
        self.saved = time.monotonic()
        if rank() > 0:
            return
        spaces = self.namespaces()
        names = ("epoch", "last_epoch", "steps", "rows", "best", "began_at", "earlier", "summaries")
        last = {"run": {name: getattr(self, name) for name in names}, "scaler": self.scaler.state_dict()}
        last |= {"classes": self.data.classes, "embedding_seconds": self.cache.seconds, **spaces}
        last |= {name: unwrap(thing).state_dict() for name, thing in self.state.items() if name not in spaces}
        last |= {"identity": identity(self.method, asdict(self.args)), "inside": inside, "data": self.fingerprint}
        last["probe"] = probe(unwrap(self.state["model"]), self.args.image_size)
        with replacing(self.directory / file) as temporary:
            torch.save(last, temporary)

    def buffers(self):
        return [buffer for thing in self.state.values() if isinstance(thing, nn.Module) for buffer in thing.buffers()]

    def load_state(self, last, spaces):
        for name, thing in self.state.items():
            if isinstance(thing, SimpleNamespace):
                restore_namespace(name, thing, spaces[name], self.device)
            else:
                if isinstance(thing, torch.optim.Optimizer):  # of a version that had not fused them
                    for group, own in zip(last[name]["param_groups"], thing.param_groups):
                        group["fused"] = own.get("fused")
                unwrap(thing).load_state_dict(last[name])
        if last["scaler"]:  # empty where the run was not in fp16
            self.scaler.load_state_dict(last["scaler"])

    def restore_inside(self):
        """All as it was in the middle of the epoch, whatever the script has computed before its loop over the batches;
        -> how many of how many batches are done"""
        inside, now = self.checkpoint["inside"], time.perf_counter()
        own = io.BytesIO(inside["processes"][rank()].numpy().tobytes())
        own = torch.load(own, map_location="cpu", weights_only=True)
        self.load_state(self.checkpoint, own["spaces"])
        for buffer, value in zip(self.buffers(), own["buffers"]):
            buffer.copy_(value)
        self.logged = {name: list(values.to(self.device)) for name, values in own["logged"].items()}
        self.counts = [] if own["counts"] is None else [own["counts"].to(self.device)]
        self.began, self.training_began = now - inside["seconds"], now - inside["training_seconds"]
        self.batch, self.checkpoint = inside["batch"], {}
        restore_random_state(self.device, own["random"])
        return inside["done"], inside["total"]

    def restore(self):
        paths = [self.directory / name for name in ("last.pt", "inside.pt")]
        paths = [path for path in paths if broadcast(path.exists())]
        found = [read_checkpoint(path) for path in paths]
        if len(found) == 2 and found[1]["run"]["epoch"] <= found[0]["run"]["epoch"]:
            found.pop()  # of an epoch that has ended since
        if found and found[-1]["inside"] and len(found[-1]["inside"]["processes"]) != world():
            found.pop()  # of other shares of the batches: the epoch begins again
        if not found:  # stopped in its first epoch
            return
        last, path = found[-1], paths[len(found) - 1]
        if last["data"] != self.fingerprint:
            die(f"{path} was made with other training images or observed labels, or in another order")
        if missing := [name for name in self.state if name not in last]:
            die(f"{path} has no {', '.join(missing)}, which run.epochs is given now: start a new run")
        self.load_state(last, last)
        self.cache.seconds = last["embedding_seconds"]
        for name, value in last["run"].items():
            setattr(self, name, value)
        if inside := last["inside"]:
            self.checkpoint, self.epoch = last, self.epoch - 1
        if rank() == 0:
            self.write_metrics()  # in case it was stopped between the two
            done = f" and {inside['done']} of {inside['total']} batches" if inside else ""
            print(f"{self.directory}: resumed after epoch {self.epoch}{done}", flush=True)

    def write_metrics(self):
        with replacing(self.directory / "metrics.csv") as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, dict.fromkeys(name for row in self.rows for name in row))
            writer.writeheader()
            writer.writerows(map(without_nans, self.rows))

    def report(self):
        """result.json, curve.png and the last line of a run"""
        best, last, data = self.best, self.rows[-1], self.data
        positives = lambda split: zip(data.classes, split.labels.amax(0).tolist() if split else ())
        without = lambda split: [name for name, positive in positives(split) if not positive]
        empty = {"validation": without(data.val), "test": without(data.test)}
        result = {"best_epoch": best["epoch"], "val_mAP": math.nan, **best}
        result |= {"last_epoch": last["epoch"], "last_test_mAP": last["test_mAP"]}
        result |= {"classes_without_test_positives": empty["test"], "seconds": sum(row["seconds"] for row in self.rows)}
        result |= {"embedding_seconds": self.cache.seconds, **self.summaries}
        result |= {"earlier_stages": self.earlier} if self.earlier else {}
        observed = sum((piece == 1).sum(0) for piece in data.train.z.split(ROWS)).tolist()
        result["train_observed"] = dict(zip(data.classes, observed))
        del result["epoch"]
        plot_curve(self.rows, best["epoch"], self.directory / "curve.png")
        data_prep.write_json(self.directory / "result.json", dict.fromkeys(result) | without_nans(result))  # the end
        for what, names in empty.items():
            if names:
                shared = "one threshold for all of them" if self.by_known_labels else "the median threshold"
                so = "count as AP 0" + (f", with {shared}" if what == "validation" else "")
                listed = data_prep.printable(", ".join(names))
                print(f"{len(names)} classes have no positive in the {what} set and {so}: {listed}")
        chosen = f"best epoch {best['epoch']}" if data.val else f"last epoch {best['epoch']} (no validation)"
        test = {name: best.get(f"test_{name}", {}) for name in ("mAP", "F1", "F1_tuned")}
        shown = in_words({self.criterion: best[self.criterion]}, test)
        shown += f" (last epoch {last['test_mAP']:.2f})" if data.test else ""
        print(f"{chosen}: {shown}; {self.directory}/curve.png", flush=True)
        if self.by_known_labels:
            self.tell_thresholds()
        self.advise()
        if self.args.smoke:
            print("smoke test passed; its numbers mean nothing", flush=True)

    def tell_thresholds(self):
        wish, recall = self.args.labels_per_image, 100 * self.args.recall
        how = f"wanted: {wish:g}" if wish else f"each finds {recall:.0f} % of its class's known labels"
        given = f"{self.best['labels_per_image']:.2f} labels per image on {len(self.data.val)} held-out images"
        print(f"thresholds: {given} ({how}); precision unknown", flush=True)

    def advise(self):
        """What the curve of the last stage suggests"""
        args, best, first, last = self.args, self.best["epoch"], self.began_at + 1, self.epoch
        if args.smoke or args.max_steps or not self.data.val or last - first < 2:
            return
        if best == last == self.last_epoch:
            faster = "" if self.by_known_labels else " or a higher --lr"  # known labels don't compare these
            print(f"note: {self.criterion} was still rising in the last epoch: try more --epochs{faster}")
        if best == first:
            print("note: the first epoch was the best: try a lower --lr")


def without_nans(values):
    """Those that are not NaN, which JSON doesn't have"""
    return {name: value for name, value in values.items() if value == value}


def in_words(val, test):
    """What was measured; NaN where there are no images with true labels"""
    measured = without_nans({**val, "test_mAP": test["mAP"]})
    words = [f"{name.replace('_', ' ')} {value:.2f}" for name, value in measured.items()]
    for f1, where in ((test["F1"], "0.5"), (test["F1_tuned"], "tuned thresholds")):
        words += [f"OF1 {f1['OF1']:.2f} and CF1 {f1['CF1']:.2f} at {where}"] if f1 else []
    return ", ".join(words) or "no true labels to measure with"


# ---- 6. Metrics and curve


def average_precision(scores, y):
    """(N, C) scores and labels -> (C,) float64 in 0..1: the mean, over a class's positives, of the precision among all
    images that score as high or higher. Ties and all, that is scikit-learn's average_precision_score; 0 if none."""
    scores, y = as_tensor(scores), as_tensor(y)
    if scores.shape != y.shape or scores.ndim != 2:
        raise ValueError(f"scores {tuple(scores.shape)} and labels {tuple(y.shape)} should be one (N, C)")
    fits = scores.dtype == torch.float32 or scores.dtype.itemsize <= 2
    ap = torch.zeros(scores.shape[1], dtype=torch.float64, device=scores.device)
    # on a CPU numpy sorts, for it doesn't also make the indices, which nobody needs
    in_order = lambda values: values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))
    for c, (column, positive) in enumerate(columns(scores, y)):
        column = column.float() if fits else column.double()
        if column.isnan().any():
            raise ValueError("scores hold NaN: there is no ranking to measure")
        own, ranked = in_order(column[positive]), in_order(column)
        if len(own):
            positives, images = (len(values) - torch.searchsorted(values, own) for values in (own, ranked))
            ap[c] = (positives.double() / images).mean()  # of those that score as high or higher
    return ap


def columns(scores, y):
    """Every class's scores and whether they are of a positive, (N,) each. Neighbours are read together, for they share
    lines of the processor's cache, but few, for that takes memory"""
    for some, true in zip(scores.split(8, dim=1), y.split(8, dim=1)):
        yield from zip(some.T.contiguous(), (true.T == 1).to(scores.device))


def mean_average_precision(scores, y):
    """mAP in 0..100: the mean of average_precision over all classes, those without positives included as 0."""
    return 100 * average_precision(scores, y).mean().item()


def f1_scores(scores, y, threshold=0.5):
    """Overall and per-class precision, recall and F1, 0..100; positive iff score >= threshold, 0/0 is 0."""
    counts, pieces = 0, (as_tensor(values).split(ROWS) for values in (scores, y))
    for some, true in zip(*pieces, strict=True):
        guess, truth = some >= threshold, true.to(some.device) == 1
        counts += torch.stack([mask.sum(0) for mask in (guess & truth, guess, truth)])
    values, per_class = {}, counts.double().cpu()  # (3, C)
    for kind, (hits, guesses, truths) in {"O": per_class.sum(1), "C": per_class}.items():
        P, R = (100 * (hits / total.clamp(min=1)).mean().item() for total in (guesses, truths))
        values |= {f"{kind}P": P, f"{kind}R": R, f"{kind}F1": 2 * P * R / (P + R) if P + R else 0.0}
    return values


def best_f1_thresholds(scores, y):
    """(N, C) scores and labels -> (C,): the threshold (score >= it) of each class with the best F1, the highest of
    several; a class without a positive has the median of the others', 0.5 if there is none"""
    scores, best = as_tensor(scores), []
    guesses = torch.arange(1, len(scores) + 1, device=scores.device)
    for column, positive in columns(scores, as_tensor(y)):
        ranked, order = column.sort(descending=True)
        f1 = 2 * positive[order].cumsum(0).double() / (guesses + positive.sum())
        f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal scores are on the same side of a threshold
        best.append(torch.where(positive.any(), ranked[f1.argmax()], torch.nan))  # the first of equals
    best = torch.stack(best)
    return best.nan_to_num(best.nanmedian().nan_to_num(0.5).item())


FEW_POSITIVES = 20  # number of positives that the median of the classes' thresholds weighs as much as


def shrunk_thresholds(p, y):
    """(N, C) probabilities and labels -> (C,): best_f1_thresholds, which few positives decide by chance, drawn towards
    their median: the mean of the two logits, weighted by the class's positives and by FEW_POSITIVES"""
    own, positives = best_f1_thresholds(p, y).double().logit(1e-12), (as_tensor(y) == 1).sum(0).to(p.device)
    return ((positives * own + FEW_POSITIVES * own.median()) / (positives + FEW_POSITIVES)).sigmoid()


def known_label_thresholds(scores, z, recall, labels_per_image=0.0):
    """(N, C) scores and known labels -> (C,): the highest threshold of each class (score >= it) that finds `recall` of
    its known labels; where it has none, that of all classes together. With `labels_per_image` the recall, in percent
    steps, that gives as many labels or the next fewer"""
    scores, hits = as_tensor(scores), as_tensor(z) == 1
    in_order = lambda values: values.sort(descending=True).values
    found, of_all = [in_order(column[hit]) for column, hit in zip(scores.T, hits.T)], in_order(scores[hits])

    def at(recall):
        lowest = lambda own: own[max(0, math.ceil(recall * len(own) - 1e-9) - 1)]
        return torch.stack([lowest(own if len(own) else of_all) for own in found])

    if labels_per_image:
        per_image = lambda recall: (scores >= at(recall)).sum().item() / len(scores)
        shares = [percent / 100 for percent in range(101)]
        recall = max((share for share in shares if per_image(share) <= labels_per_image), default=0.0)
    return at(recall)


def missed_positives(scores, y, classes, thresholds=0.5):
    """Of every class: its positives, how many of them score below its threshold, and the class that these images are
    taken for: the one that most often has the highest score of those that are not in the image, and how often"""
    counts, instead = 0, torch.zeros(len(classes), len(classes), dtype=torch.int32, device=scores.device)
    for some, true in zip(scores.split(ROWS), y.split(ROWS)):
        true = true == 1
        missed = true & (some < thresholds)
        counts += torch.stack([true.sum(0), missed.sum(0)])
        highest = some.masked_fill(true, -math.inf).argmax(1)  # (B,), of images that don't show all classes
        instead.index_add_(0, highest, (missed & ~true.all(1, keepdim=True)).int())
    times, which = (values.tolist() for values in instead.max(0))
    names = [classes[c] if n else None for c, n in zip(which, times)]
    numbers = zip(*counts.tolist(), names, times)
    return {name: dict(zip(("positives", "missed", "taken_for", "times"), row)) for name, row in zip(classes, numbers)}


def count_pseudo_labels(pseudo, z, y):
    """Numbers of every class's pseudo-labels, and of those that are right if y is known -> (8, C)"""
    counts, y = 0, torch.full_like(z, 2) if y is None else y  # 2: nobody knows
    for some, observed, true in zip(pseudo.split(ROWS), z.split(ROWS), y.split(ROWS)):
        hidden = observed != 1
        positives, negatives = (some == 1) & hidden, (some == -1) & hidden
        masks = torch.ones_like(hidden), hidden, positives, negatives
        masks += hidden & (true == 1), positives & (true == 1), negatives & (true == 0), true < 2
        counts = counts + torch.stack([mask.sum(0) for mask in masks])
    return counts


def pseudo_label_columns(counts):
    """Sums of count_pseudo_labels, (8, C) -> columns of metrics.csv"""
    images, hidden, positives, negatives, true, right_positives, right_negatives, judged = counts
    kinds = {"positives": (positives, true, right_positives), "negatives": (negatives, hidden - true, right_negatives)}
    columns = {}
    for kind, (chosen, available, right) in kinds.items():
        columns[f"pseudo_{kind}_per_image"] = chosen.sum() / images[0]
        if judged.any() and chosen.any():
            columns[f"pseudo_{kind}_precision"] = 100 * right.sum() / chosen.sum()
            columns[f"pseudo_{kind}_precision_at_random"] = 100 * (chosen * available / hidden).nansum() / chosen.sum()
            columns[f"pseudo_{kind}_recall"] = 100 * right.sum() / available.sum()
    return {name: value.item() for name, value in columns.items()}


def plot_curve(rows, best_epoch, path):
    """curve.png: every column of the metrics over the epochs"""
    panels = {"loss": [], "mAP": []}
    for name in dict.fromkeys(name for row in rows for name in without_nans(row)):
        if name not in NO_RESULTS:
            words = " ".join(name.split("_")[: 2 if name.startswith("pseudo_") else 1])
            title = "mAP" if "mAP" in name else "per image" if name.endswith("per_image") else words
            panels.setdefault(title, []).append(name)
    wide, high = min(3, len(panels)), -(-len(panels) // 3)
    size, more = (4.2 * wide, 3 * high), {"squeeze": False, "layout": "constrained"}
    figure, axes = data_prep.pyplot().subplots(high, wide, figsize=size, **more)
    for axis, (title, names) in itertools.zip_longest(axes.flat, panels.items(), fillvalue=("", ())):
        for name in names:
            points = [(row["epoch"], row[name]) for row in rows if name in without_nans(row)]
            axis.plot(*zip(*points), "o-", ms=3, label=name)
        axis.axvline(best_epoch, color="grey", linestyle=":", linewidth=1, label="best epoch")
        axis.set(title=title, xlabel="epoch", visible=bool(names))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(path.parent.name, fontsize=9, color="grey")
    data_prep.save_figure(figure, path)
