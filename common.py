"""What every method script shares: settings, data, model, run, metrics. No method lives here."""

import argparse
import copy
import csv
import ctypes
import difflib
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
import tyro
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.resnet import BasicBlock
from tqdm import tqdm

PROTOCOL_SEED = 1200  # of the split and of the observed labels (Cole et al. 2021); never that of a run
EVAL_BATCH = 64
CHECK_EVERY = 50  # steps between two looks at the losses: each one waits for the device
UNFINISHED = "UNFINISHED"  # a file that stands in a data set's folder while data_prep.py writes there
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what PIL raises at damaged images
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def die(message):
    """Ends the program with one sentence instead of a traceback."""
    raise SystemExit(f"error: {message}")


# ---- 1. Settings


@dataclass
class Args:
    """Where and how a script runs. What a method computes with is in the method's own Args."""

    dataset: str = "scenes"  # scenes, voc, voc2007, coco, nus, cub, another folder under data_root, or a path
    data_root: str = "data"  # data sets and embeddings are here
    out: str = "runs"  # run directories go here
    seed: int = 0  # of weights, order and flips; split and observed labels are the same for all seeds
    linear: bool = False  # freeze the backbone, embed every image once, train the head alone
    init_from: str = ""  # a run (of --linear, say) whose best weights to start from
    known_ratio: float = 0.0  # keep this share of ALL positives instead of one per image (0: one per image)
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...
    workers: int = -1  # loader processes (-1: what suits the data); never changes a result
    amp: Literal["auto", "bf16", "fp16", "off"] = "auto"  # auto: bf16 or fp16 on CUDA, off on a CPU
    compile: bool = False  # torch.compile the model
    tensorboard: bool = False  # write TensorBoard events too
    resume: str = ""  # a run directory: go on where it was stopped
    eval_only: str = ""  # a run directory: evaluate its best weights and stop
    max_steps: int = 0  # end training after so many steps (0: don't), for smoke runs


# What a continued run may change, besides show_...: where it runs, not what it computes.
RESUME_MAY_CHANGE = {"data_root", "out", "device", "workers", "tensorboard", "resume", "eval_only"}


def parse(args_class, presets, argv=None):
    """Command line -> args_class. Precedence: default < presets[dataset] < command line; with --resume or
    --eval_only the run's own settings take the place of the first two. With --known_ratio, presets["<dataset> partial"]
    if there is one."""
    argv = sys.argv[1:] if argv is None else argv
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--dataset", default=args_class.dataset)
    peek.add_argument("--known_ratio", "--known-ratio", default="0")
    peek.add_argument("--resume", default="")
    peek.add_argument("--eval_only", "--eval-only", default="")
    first, _ = peek.parse_known_args(argv)

    earlier = first.resume or first.eval_only
    if earlier:
        start = read_run_settings(args_class, earlier)
    else:
        partial = first.known_ratio.strip("0.") != ""  # "0.0" is none either
        start = preset_settings(args_class, presets, first.dataset, partial)
    about = (sys.modules[args_class.__module__].__doc__ or "").split("NOTES")[0]
    args = tyro.cli(args_class, args=argv, default=start, use_underscores=True, description=about)
    if earlier:
        changed = [f.name for f in fields(args) if getattr(args, f.name) != getattr(start, f.name)]
        refused = [f"--{name}" for name in changed if name not in RESUME_MAY_CHANGE and not name.startswith("show_")]
        if refused:
            die(f"{earlier} keeps its own settings: leave out {', '.join(refused)}, or start a new run")

    for name, least in {
        "epochs": 1,
        "batch_size": 1,
        "image_size": 1,
        "patience": -1,
        "max_steps": 0,
        "seed": 0,
    }.items():
        if not least <= getattr(args, name) < 2**31:
            die(f"--{name} must be at least {least} and below 2^31, not {getattr(args, name)}")
    for name, value in vars(args).items():
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            die(f"--{name} must be a finite number, not {value}")
    if not args.lr > 0:
        die(f"--lr must be above 0, not {args.lr}")
    if not 0 <= args.known_ratio <= 1:
        die(f"--known_ratio is a share between 0 and 1, not {args.known_ratio}")
    return args


def preset_settings(args_class, presets, dataset, partial):
    """The script's defaults, and over them its preset for the data set"""
    name = Path(dataset).name
    preset = presets.get(name, {})
    return args_class(dataset=dataset, **(presets.get(f"{name} partial", preset) if partial else preset))


def read_run_settings(args_class, run):
    config = read_json(Path(run) / "config.json", f"{run} is not a run directory")
    try:  # JSON has no tuples
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in config["settings"].items()}
        return replace(args_class(**settings), resume="", eval_only="")
    except (KeyError, TypeError, AttributeError) as problem:
        die(f"{run} was made by another script or version ({problem})")


def printable(path):
    """A file's name need not be UTF-8"""
    return os.fsencode(path).decode(errors="backslashreplace")


def read_json(path, otherwise):
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        die(f"{otherwise} (there is no {path})")
    except (OSError, ValueError) as problem:
        die(f"{path} can't be read: {problem}")


# ---- 2. Data


def split_indices(n, val_fraction=0.2, seed=PROTOCOL_SEED):
    """Rows of the train file -> (train_idx, val_idx), sorted."""
    order = np.random.RandomState(seed).permutation(n)
    n_val = round(val_fraction * n)
    return np.sort(order[: n - n_val]), np.sort(order[n - n_val :])


def as_tensor(values):
    """A tensor, or an array of any strides and byte order, read-only or not -> a tensor without gradient"""
    if isinstance(values, np.ndarray):
        values = np.require(values, values.dtype.newbyteorder("="), "CW")
    return torch.as_tensor(values).detach()


def draw_single_positives(y, seed=PROTOCOL_SEED):
    """(N, C) full labels -> (N, C) uint8 with one positive kept per row, exactly as Cole et al. drew theirs."""
    y = (as_tensor(y) == 1).cpu().numpy()
    rs = np.random.RandomState(seed)
    z = np.zeros(y.shape, dtype=np.uint8)
    for row, labels in enumerate(y):
        positives, negatives = np.flatnonzero(labels), np.flatnonzero(~labels)
        rs.shuffle(positives)
        rs.shuffle(negatives)  # none is kept, but the published draws consumed this randomness
        z[row, positives[:1]] = 1
    return z


def draw_known_positives(y, ratio, seed=PROTOCOL_SEED):
    """(N, C) full labels -> (N, C) uint8 with round(ratio * positives) of all positives kept."""
    y = (as_tensor(y) == 1).cpu().numpy()
    positives = np.flatnonzero(y)
    kept = np.random.RandomState(seed).permutation(positives)[: round(ratio * len(positives))]
    z = np.zeros(y.shape, dtype=np.uint8)
    z.flat[kept] = 1
    return z


def read_image(path, upright=False):
    """An RGB image; `upright` turns it as the camera held it. What is transparent is white"""
    with Image.open(path) as image:
        if image.mode == "F":
            raise ValueError("its pixels are fractions of an unknown range")
        image = ImageOps.exif_transpose(image) if upright else image
        if image.mode.startswith("I"):  # grey of 16 bits or more, which PIL would cut off at 255
            pixels = np.asarray(image)
            if pixels.min() < 0 or pixels.max() > 65535:
                raise ValueError("its pixels are not of 8 or 16 bits")
            image = Image.fromarray((pixels >> (8 if image.mode != "I" or pixels.max() > 255 else 0)).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def decode(path, size, resample=Image.Resampling.BILINEAR, upright=False):
    """The protocol's transform: RGB, squashed to size x size, bilinear. -> uint8 (size, size, 3)"""
    return np.asarray(read_image(path, upright).resize((size, size), resample))


def hash_names(names):
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()


class Images:
    """Pixels of one formatted file: from the pre-resized cache when there is one, else decoded from the files.

    images[rows] -> uint8 (B, size, size, 3). What can't be read comes back as a sentence, which crosses the border of a
    worker process better than an exception does.
    """

    def __init__(self, folder, image_folder, part, size, upright=False):
        self.names = read_names(folder, part)
        self.image_folder, self.size, self.resample = image_folder, size, Image.Resampling.BILINEAR
        self.upright = upright  # as the camera held it, which is not the protocol of the published data sets
        self.cache = folder / f"cache_{part}_{size}.npy"
        self.cached = self.cache.exists()
        self.pixels = None  # the opened cache, in every process its own
        if self.cached:
            made_for = read_json(self.cache.with_suffix(".json"), f"{self.cache} has no description")
            pixels = read_array(self.cache, ndim=4, mmap_mode="r")
            fits = pixels.shape == (len(self.names), size, size, 3) and pixels.dtype == np.uint8
            alike = made_for.get("images") == hash_names(self.names) and made_for.get("upright", False) == upright
            if not (alike and fits):
                die(
                    f"{self.cache} was made for another list of images or way to turn them: delete it, or prepare again"
                )
            return
        missing = self.missing()
        if missing:
            die(f"{len(missing)} of {len(self.names)} images are missing, first {image_folder / missing[0]}")

    def missing(self):
        return [name for name in self.names if not (self.image_folder / name).is_file()]

    def from_files(self, size, resample):
        """The same images, squashed from their files to another size; from the cache where the files are gone"""
        if self.cached and self.missing():
            return self
        other = copy.copy(self)
        other.size, other.resample, other.cached = size, resample, False
        return other

    def __len__(self):
        return len(self.names)

    def __getstate__(self):
        return {**self.__dict__, "pixels": None}

    def __getitem__(self, rows):
        if self.cached:
            if self.pixels is None:
                self.pixels = np.load(self.cache, mmap_mode="r", allow_pickle=False)
            return torch.from_numpy(self.pixels[rows])
        batch = np.empty((len(rows), self.size, self.size, 3), dtype=np.uint8)
        for i, row in enumerate(rows):
            path = self.image_folder / self.names[row]
            try:
                batch[i] = decode(path, self.size, self.resample, self.upright)
            except UNREADABLE as problem:
                return f"{path} can't be read: {problem}"
        return torch.from_numpy(batch)


class Views:
    """images[rows] beside a second, random view of each: uint8 (B, 2, size, size, 3). The view of an image is drawn
    from (seed, epoch, row), in whatever process."""

    def __init__(self, images, view, seed, epoch):
        self.images, self.view, self.seed, self.epoch = images, view, seed, epoch

    def __getitem__(self, rows):
        batch = self.images[rows]
        if isinstance(batch, str):
            return batch
        with torch.random.fork_rng(devices=[]):
            views = []
            for row, pixels in zip(rows, batch):
                state = np.random.SeedSequence([self.seed, self.epoch, int(row)]).generate_state(1, np.uint64)
                torch.default_generator.manual_seed(int(state[0]) >> 1)  # torch.manual_seed would seed the GPUs too
                views.append(self.view(pixels))
        return torch.stack([batch, torch.stack(views)], 1)


@dataclass
class Split:
    images: Images
    rows: np.ndarray  # this split's rows in its formatted file
    y: torch.Tensor | None  # (N, C) full labels, for evaluation and upper bounds; your own images may have none
    z: torch.Tensor | None = None  # (N, C) observed labels, of the training split
    features: tuple = ()  # with --linear: embeddings of the plain and, in training, of the flipped images, (N, D) each

    def __len__(self):
        return len(self.rows)

    def true(self, idx):
        """Full labels of these images, None where nobody knows them"""
        return None if self.y is None else self.y[idx]

    def fingerprint(self):
        """Changes when the list of images does, or a file behind it."""
        source = self.images
        files = [source.cache] if source.cached else [source.image_folder / source.names[row] for row in self.rows]
        stats = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in map(os.stat, files)]
        return hash_names([source.names[row] for row in self.rows] + stats + ["upright"] * source.upright)


@dataclass
class Data:
    classes: list
    train: Split
    val: Split | None  # your own images may come without
    test: Split | None

    def splits(self):
        """{name: split} of those there are"""
        return {name: split for name in ("train", "val", "test") if (split := getattr(self, name))}


def load(args, device="cpu"):
    """The data set of --dataset, its labels on `device`."""
    folder = find_dataset(args)
    info = read_json(folder / "dataset.json", "") if (folder / "dataset.json").exists() else {}
    default_images = folder / "images" if (folder / "images").is_dir() else folder
    image_folder = folder / info.get("image_folder", default_images.resolve())

    there = lambda name: (folder / f"formatted_{name}.npy").exists()
    parts = [part for part in ("train", "valid", "val") if there(f"{part}_images")]
    upright = info.get("upright", False)
    images = {part: Images(folder, image_folder, part, args.image_size, upright) for part in parts}
    y = {
        part: read_labels(folder / f"formatted_{part}_labels.npy", len(images[part]))
        for part in parts
        if part != "train" or there("train_labels") or not there("train_labels_obs")
    }
    z = observed_labels(args, folder, len(images["train"]), y.get("train"))
    classes = info.get("classes", nameless(z.shape[1]))
    columns = {"train_labels_obs": z.shape[1], **{f"{part}_labels": labels.shape[1] for part, labels in y.items()}}
    if set(columns.values()) != {len(classes)} or len(set(classes)) < len(classes):
        die(f"{folder} has {len(set(classes))} different class names, but its labels' columns are {columns}")
    if not z.any():
        die(f"{folder}: not one positive label is observed" + (", raise --known_ratio" if args.known_ratio else ""))

    def split(part, rows, **more):
        full = torch.from_numpy(y[part][rows]).to(device) if part in y else None
        return Split(images[part], rows, full, **more)

    everything = {part: np.arange(len(images[part])) for part in parts}
    if "train" in y and "valid" not in y:
        train_rows, val_rows = split_indices(len(images["train"]))
        if not len(val_rows):
            die(f"{folder} has only {len(images['train'])} training images: to set some aside takes three or more")
        val = split("train", val_rows)
    else:  # your own images: validation has a file of its own, or there is none
        train_rows = everything["train"]
        val = split("valid", everything["valid"]) if "valid" in y else None
    train = split("train", train_rows, z=torch.from_numpy(z[train_rows]).to(device))
    test = split("val", everything["val"]) if "val" in y else None
    return Data(classes, train, val, test)


def nameless(n):
    return [f"class {c}" for c in range(n)]


def find_dataset(args):
    folder = Path(args.dataset) if os.sep in args.dataset else Path(args.data_root) / args.dataset
    if args.dataset == "scenes":
        import data_prep  # only here: the other data sets are prepared before

        if rank() == 0:
            data_prep.make_scenes(folder)
        wait_for_all()
    if (folder / UNFINISHED).exists():
        die(f"{folder} is only half prepared: run the same data_prep.py command again")
    if not (folder / "formatted_train_images.npy").exists():
        there = sorted(path.parent.name for path in Path(args.data_root).glob("*/formatted_train_images.npy"))
        die(
            f"no data set {args.dataset!r} in {folder}: prepare it with data_prep.py, or choose another "
            f"(scenes needs no preparation; in {args.data_root} there is {', '.join(there) or 'nothing yet'})"
        )
    return folder


def observed_labels(args, folder, n, y):
    """z of the whole train file, as the protocol draws it or as the file says; y is None where nobody knows it."""
    if args.known_ratio:
        if y is None:
            die(f"--known_ratio needs the full training labels, which {folder} doesn't have")
        return draw_known_positives(y, args.known_ratio)
    path = folder / "formatted_train_labels_obs.npy"
    if not path.exists():
        return draw_single_positives(y)
    z = read_labels(path, n)
    if y is not None and z.shape != y.shape:
        die(f"{path} is {z.shape}, but formatted_train_labels.npy is {y.shape}")
    crowded, false = np.flatnonzero(z.sum(1) > 1), np.flatnonzero((z > (1 if y is None else y)).any(1))
    if len(crowded):
        die(
            f"{path} has {len(crowded)} rows with more than one observed positive (first: row {crowded[0]}); delete it "
            "to draw one per image, or say --known_ratio to keep a share of all positives"
        )
    if len(false):
        die(f"{path} observes labels that formatted_train_labels.npy calls negative (first: row {false[0]})")
    return z


def read_array(path, ndim, mmap_mode=None):
    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        die(f"{path} can't be read: {problem}")
    if array.ndim != ndim or len(array) == 0:
        die(f"{path} should have {ndim} dimension(s) and at least one row; its shape is {array.shape}")
    return array


def read_names(folder, part):
    return [str(name) for name in read_array(folder / f"formatted_{part}_images.npy", ndim=1)]


def read_labels(path, n):
    """(n, C) labels of any real dtype, 0 or 1 -> uint8"""
    labels = read_array(path, ndim=2)
    if len(labels) != n:
        die(f"{path} has {len(labels)} rows, but its images file has {n}")
    wrong = ~np.isin(labels, (0, 1))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        die(f"{path} may hold 0 and 1 only; row {row}, column {column} is {labels[row, column]}")
    return labels.astype(np.uint8)


# ---- 3. Model


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


def make_body(args):
    """--backbone and --weights -> (module: normalised pixels -> (B, D), D, mean, std)"""
    name, fresh = args.backbone, not start_from(args)
    pretrained = fresh and args.weights == "imagenet"
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if name == "resnet_small":
        if pretrained:
            die("resnet_small has no ImageNet weights: add --weights none")
        net, width, head = small_resnet(), 128, ()
    elif name in torchvision.models.list_models(include=["resnet*", "resnext*", "wide_resnet*"]):
        version = "IMAGENET1K_V1" if pretrained else None  # V2 moves results by more than a point
        net = from_hub(name, lambda: torchvision.models.get_model(name, weights=version))
        width, head = net.fc.in_features, "fc."
        net.fc = nn.Identity()
    else:
        net, mean, std = make_timm(name, pretrained, args.image_size)
        width, head = net.head_hidden_size, net.pretrained_cfg.get("classifier") or ()
    if fresh and args.weights not in ("imagenet", "none"):
        load_body(net, args.weights, head)
    return net, width, mean, std


def small_resnet(width=32):
    """A ResNet-10 for 64-pixel images on a laptop: 3x3 stem, two stages of two blocks, a map of 8 x 8."""

    def stage(before, after):
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))
        return nn.Sequential(BasicBlock(before, after, 2, shortcut), BasicBlock(after, after))

    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    stages = stage(width, 2 * width), stage(2 * width, 4 * width)
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def make_timm(name, pretrained, image_size):
    import timm  # takes seconds: only for those who need it

    names = timm.list_models() + timm.list_pretrained()  # without and with the tag of their weights
    if name not in names:
        near = ", ".join(difflib.get_close_matches(name, names, 5, 0.4))
        die(f"no backbone {name!r} in torchvision's ResNets or timm; near it: {near or 'nothing'}")
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    size = {"img_size": image_size} if fixed else {}
    net = from_hub(name, lambda: timm.create_model(name, pretrained=pretrained, num_classes=0, **size))
    try:
        with torch.no_grad():
            net.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, ValueError, AssertionError) as problem:
        reason = (str(problem) or type(problem).__name__).splitlines()[0]
        die(f"--backbone {name} doesn't take images of {image_size} pixels, try another --image_size: {reason}")
    config = timm.data.resolve_model_data_config(net)
    return net.train(), config["mean"], config["std"]


def from_hub(name, make):
    try:
        return make()
    except (OSError, RuntimeError) as problem:
        die(
            f"the pretrained weights of {name} can't be had ({type(problem).__name__}): download them where there is "
            "internet and pass --weights FILE, or start from nothing with --weights none"
        )


def load_body(net, path, head):
    """A local .pth or .safetensors file, or a run's best.pt, into the backbone; what comes after it is left out."""
    state = read_state(path)
    state = next((state[key] for key in ("state_dict", "model") if isinstance(state.get(key), dict)), state)
    of_a_run = {key[len("body.") :]: value for key, value in state.items() if key.startswith("body.")}
    state = of_a_run or state
    state = {key: value for key, value in state.items() if not key.startswith(head)}
    own = {key: value for key, value in net.state_dict().items() if not key.endswith("num_batches_tracked")}
    problems = {
        "missing": [key for key in own if key not in state],
        "unknown": [key for key in state if key not in net.state_dict()],
        "of another shape": [key for key in own if key in state and state[key].shape != own[key].shape],
    }
    if any(problems.values()):
        listed = "; ".join(f"{len(keys)} {what}: {', '.join(keys[:20])}" for what, keys in problems.items() if keys)
        die(f"{path} doesn't fit the backbone ({listed})")
    net.load_state_dict(state, strict=False)


def read_state(path):
    """The dictionary of a .pth or .safetensors file, on the CPU, nothing executed"""
    try:
        if str(path).endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        die(f"there is no file {path}")
    except Exception as problem:  # truncated archives and foreign pickles raise all sorts
        die(f"{path} is not a whole file of weights: {str(problem).splitlines()[0]}")


def start_from(args):
    """The checkpoint whose weights are the model's first, before or instead of --weights"""
    last = Path(args.resume) / "last.pt"
    if args.resume and last.exists():
        return last
    run = args.eval_only or args.init_from
    if run and not (Path(run) / "best.pt").exists():
        die(f"{run} has no best.pt: it is not a run, or was stopped in its first epoch")
    return Path(run) / "best.pt" if run else None


def load_weights(model, path, classes=None):
    """The model of a run's checkpoint into one of the same make, and of the same classes if they are given"""
    checkpoint = read_state(path)
    state, trained = checkpoint["model"], checkpoint.get("classes")
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in model.state_dict().items()}:
        die(f"{path} doesn't fit the model: it has another --backbone, other layers or another number of classes")
    if classes and trained and classes != trained and nameless(len(classes)) not in (classes, trained):
        was, now = next((a, b) for a, b in zip(trained, classes) if a != b)
        die(f"{path} was trained for other classes than the data set has now, or in another order: {was} is now {now}")
    model.load_state_dict(state)


def hash_weights(module):
    digest = hashlib.sha256()
    for key, value in module.state_dict().items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# ---- 4. CLIP


class Clip:
    """A frozen CLIP of open_clip, as --clip_model and --clip_pretrained say, with its own tokenizer, mean and std"""

    def __init__(self, args, device):
        name = args.clip_model
        if name == "scenes":
            name = f"local-dir:{make_scenes_clip(args)}"
        self.device, self.dtype = device, torch.float16 if device.type == "cuda" else torch.float32
        with torch.random.fork_rng(devices=[]):  # what comes after starts as it does without a CLIP
            self.net, self.tokenizer, shape = load_open_clip(name, args.clip_pretrained, self.dtype)
        looks = self.net.visual.preprocess_cfg
        self.key = {"clip": shape, "weights": hash_weights(self.net), "looks": looks, "dtype": str(self.dtype)}
        self.net.to(device).eval().requires_grad_(False)
        self.mean, self.std = (torch.tensor(looks[what], device=device).view(3, 1, 1) for what in ("mean", "std"))
        self.size = int(np.max(looks["size"]))
        self.resample = getattr(Image.Resampling, looks["interpolation"].upper(), Image.Resampling.BICUBIC)

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


def squash(x, size):
    """Pixels in 0..1 (B, 3, H, W) -> (B, 3, size, size)"""
    if x.shape[2:] == (size, size):
        return x
    return F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp(0, 1)


def load_open_clip(name, pretrained, dtype):
    """-> a model of open_clip with its weights, its tokenizer, its description; die() says what to do without them."""
    import open_clip  # takes seconds: only for those who need it
    from huggingface_hub.constants import HF_HUB_CACHE

    local, hub = name.startswith("local-dir:"), name.startswith("hf-hub:")
    pretrained = None if local or hub else pretrained
    tags, file = open_clip.list_pretrained_tags_by_model(name), pretrained and Path(pretrained).is_file()
    if local and not (Path(name[len("local-dir:") :]) / "open_clip_config.json").is_file():
        die(f"--clip_model {name}: there is no open_clip_config.json in that folder")
    if not local and not hub and name not in open_clip.list_models():
        near = ", ".join(difflib.get_close_matches(name, open_clip.list_models(), 5, 0.4))
        die(f"--clip_model {name} is not one of open_clip's, local-dir:FOLDER or hf-hub:NAME; near it: {near}")
    if not local and not hub and not file and pretrained not in tags:
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
        file_model = f" --clip_model {name}-quickgelu" if quick and not name.endswith("-quickgelu") else ""
        die(
            f"CLIP {name} {pretrained or ''} is not in {HF_HUB_CACHE} and can't be downloaded: fetch it where there "
            f"is internet and say --clip_pretrained FILE{file_model}, or --clip_model local-dir:FOLDER ({reason[:150]})"
        )
    finally:
        logging.disable(logging.NOTSET)


def make_scenes_clip(args):
    """The folder of the small CLIP that belongs to the data set scenes, trained where there is none yet"""
    import data_prep

    folder = Path(args.data_root) / "scenes_clip"
    if rank() == 0:
        data_prep.make_scenes_clip(folder)
    wait_for_all()
    return folder


COMPOUNDS = {"diningtable": "dining table", "pottedplant": "potted plant", "tvmonitor": "tv monitor"}  # of VOC


def prompts(template, classes):
    """--prompt with every class's name in it, written as a person would"""
    if template.count("{}") != 1:
        die(f"--prompt {template!r} must have one {{}} where the class goes")
    if classes == nameless(len(classes)):
        die("CLIP needs the classes' names: put them into the data set's dataset.json, as a list under \"classes\"")
    return [template.replace("{}", phrase(name)) for name in classes]


def phrase(name):
    """pottedplant -> potted plant; CUB's has_bill_shape::all-purpose -> bird whose bill shape is all-purpose"""
    attribute = re.fullmatch(r"has_(\w+)::(.+)", name)
    name = f"bird whose {attribute[1]} is {attribute[2]}" if attribute else COMPOUNDS.get(name, name)
    return " ".join(name.replace("_", " ").split())


# ---- 5. Run


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def wait_for_all():
    if world() > 1:
        dist.barrier()


@contextmanager
def replacing(path):
    """A temporary path that takes the place of `path` when the block ends well: readers see old or new, never half."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        os.replace(temporary, path)
    except (OSError, RuntimeError) as problem:
        die(f"{path} can't be written ({problem}); what was there before is intact")
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, content):
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def make_folder(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        die(f"{path} can't be written: {problem}")


def agreed(answer):
    """Rank 0's answer, on every rank"""
    answers = [answer]
    if world() > 1:
        dist.broadcast_object_list(answers)
    return answers[0]


def gather(mine, n):
    """Rows rank, rank + world, ... of n, padded to the same number on every rank -> all n rows, on every rank"""
    if world() == 1:
        return mine
    everyone = [torch.empty_like(mine) for _ in range(world())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone, 1).flatten(0, 1)[:n]


def in_batches(rows, size=None):
    size = size or EVAL_BATCH
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def unwrap(thing):
    return thing.module if isinstance(thing, nn.parallel.DistributedDataParallel) else thing


def import_tensorboard():
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        die("--tensorboard needs one more package: pip install tensorboard")
    return SummaryWriter


def find_device(name):
    """--device -> torch.device"""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        die(f"--device {name}: {str(problem).splitlines()[0]}")
    if device.type == "cuda" and not torch.cuda.is_available():
        die(f"--device {name}: torch sees no CUDA device here; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        die(f"--device {name}: only cpu and cuda are known here")
    if device.type == "cpu":
        keep_freed_memory()
    return device


def keep_freed_memory():
    """glibc returns large blocks to the system as they are freed; a CPU then spends up to half of a step on getting
    pages for the next tensors."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt"):  # musl has none
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def ignore_ctrl_c(_):
    """Of the processes that Ctrl-C reaches, only the main one speaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Run:
    """The plumbing around a script's loop: device, precision, processes, directory, log, checkpoints, evaluation."""

    stopping = False  # by Ctrl-C
    embedding_seconds = 0.0  # of what was not on the disk yet

    def __init__(self, args, script, stages=1):
        self.args, self.script, self.method = args, script, Path(script).stem
        self.stages, self.stage, self.stage_began, self.past = stages, 1, 1, []  # each is up to args.epochs long
        self.device = self.join_processes(args.device)
        self.dtype = self.choose_precision(args.amp)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if args.batch_size < world():
            die(f"--batch_size {args.batch_size} can't be shared by {world()} processes")
        self.epoch, self.steps, self.finished = 0, 0, False
        self.rows, self.best = [], {"epoch": 0, "val_mAP": -1.0}  # a row of metrics per epoch
        self.directory, self.facts = None, {}
        self.SummaryWriter = import_tensorboard() if args.tensorboard else None
        signal.signal(signal.SIGINT, self.interrupted)
        torch.manual_seed(args.seed)

    # -- where it runs

    def join_processes(self, name):
        """Joins the other processes under torchrun; -> this process's device"""
        device = find_device(name)
        if dist.is_torchelastic_launched() and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if world() > 1 else device.index or 0)
            if device.index >= torch.cuda.device_count():
                die(f"--device {device}: there are only {torch.cuda.device_count()} CUDA devices here")
            torch.cuda.set_device(device)
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        return device

    def choose_precision(self, amp):
        """--amp -> the dtype of autocast, None for full precision"""
        if amp == "auto" and self.device.type != "cuda":
            amp = "off"
        elif amp == "auto":
            amp = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        if amp == "fp16" and self.device.type != "cuda":
            die("--amp fp16 needs CUDA: on a CPU use bf16 or off")
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[amp]

    def autocast(self):
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def open_directory(self):
        """The directory of --resume or --eval_only, or a new one: <out>/<dataset>-<method>-s<seed>-<time>"""
        args = self.args
        if args.resume or args.eval_only:
            directory = Path(args.resume or args.eval_only)
            config = read_json(directory / "config.json", f"{directory} is not a run")
            if config["method"] != self.method:
                die(f"{directory} was made by {config['method']}.py: give it to that script")
            if args.resume and config["processes"] != world() and rank() == 0:
                print(f"note: begun with {config['processes']} processes; with {world()} the numbers differ a little")
            return directory
        directory = None
        if rank() == 0:
            make_folder(Path(args.out))
            while directory is None:
                stamp = f"{Path(args.dataset).name}-{self.method}-s{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
                try:
                    os.mkdir(Path(args.out) / stamp)
                    directory = Path(args.out) / stamp
                except FileExistsError:
                    time.sleep(0.2)  # another run started in this second
                except OSError as problem:
                    die(f"--out {args.out} can't be written: {problem}")
            self.describe(directory)
        return agreed(directory)

    def describe(self, directory):
        def git(*words):
            command = ["git", "-C", str(Path(self.script).resolve().parent), *words]
            try:
                return subprocess.run(command, capture_output=True, text=True).stdout.strip()
            except OSError:  # no git on this machine
                return ""

        shutil.copy(self.script, directory / "script.py")
        config = {
            "method": self.method,
            "settings": asdict(self.args),
            "command": shlex.join(["python", *sys.argv]),
            "began_in": os.getcwd(),
            "commit": git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "-uno") else ""),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "processes": world(),
        }
        write_json(directory / "config.json", config)
        print(f"{directory}: {self.args.dataset}, {self.device}, amp {self.dtype or 'off'}", flush=True)

    def interrupted(self, *_):
        """Ctrl-C: stops at the next batch, where nothing is half-done; a second one stops at once."""
        if not self.directory:  # nothing has begun
            sys.exit(130)
        self.stopping = True
        signal.signal(signal.SIGINT, signal.SIG_IGN if world() > 1 else signal.default_int_handler)

    def stop(self):
        if rank() == 0 and not self.args.eval_only:
            start = "python" if world() == 1 else "torchrun ..."
            print(f"\nstopped; go on with: {start} {sys.argv[0]} --resume {self.directory}", file=sys.stderr)
        sys.exit(130)

    def progress(self, items, what, **more):
        hidden = rank() > 0 or not sys.stderr.isatty()
        return tqdm(items, desc=what, leave=False, disable=hidden, dynamic_ncols=True, **more)

    # -- model and batches

    def prepare(self, model, data, unused=False):
        """The model on its device, ready to train; with --linear also the data, embedded by its frozen backbone.
        `unused` says that some weights take no part in some steps."""
        self.data = data
        if not data.val and rank() == 0:
            print("no fully labelled validation images: the last epoch is kept, what needs true labels is left blank")
        if start_from(self.args):
            load_weights(model, start_from(self.args), data.classes)
        self.directory = self.open_directory()  # only now: what is wrong with flags, data or weights leaves none behind
        self.board = self.SummaryWriter(self.directory) if self.SummaryWriter and rank() == 0 else None
        model = model.to(self.device, memory_format=torch.channels_last)
        if self.args.linear:
            self.embed_features(model, data)
        if self.args.compile:
            model.compile()
        if world() == 1:
            return model
        devices = [self.device] if self.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices, find_unused_parameters=unused)

    def embed_features(self, model, data):
        model.eval().body.requires_grad_(False)
        key = {"backbone": self.args.backbone, "weights": hash_weights(model.body), "size": self.args.image_size}
        key |= {"mean": model.mean.flatten().tolist(), "std": model.std.flatten().tolist(), "amp": str(self.dtype)}
        flipped = self.embed(lambda x: model.features(x.flip(3)), data.train, {**key, "flip": True}, "train, flipped")
        for name, split in data.splits().items():
            split.features = (self.embed(model.features, split, key, name), flipped)

    def embed(self, encode, split, key, what):
        """encode(x) of every image of a split, from the disk if it was computed before -> float32 (N, D)"""
        key = {**key, "pixels": (split.images.size, split.images.resample), "images": split.fingerprint()}
        return self.once(lambda batches: map(encode, self.pixels(split, batches)), len(split), key, what, "img")

    def embed_images(self, clip, split, what):
        """CLIP's unit vectors of a split's images, whatever --image_size is -> float32 (N, D)"""
        split = replace(split, images=split.images.from_files(clip.size, clip.resample))
        return self.embed(clip.encode_image, split, clip.key, f"{what} with CLIP")

    def embed_texts(self, clip, texts):
        """CLIP's embeddings of texts -> float32 (N, D), not unit vectors"""
        tokens = clip.tokenizer(texts)
        for i, j in itertools.combinations(range(len(texts)), 2):
            if torch.equal(tokens[i], tokens[j]):
                die(f"CLIP can't tell {texts[i]!r} from {texts[j]!r}: it reads no more than {tokens.shape[1]} tokens")
        encode = lambda batches: (clip.encode_text(tokens[idx]) for idx in batches)
        return self.once(encode, len(texts), {**clip.key, "tokens": tokens.tolist()}, "texts", "text")

    @torch.no_grad()
    def once(self, encode, n, key, what, unit):
        """encode(batches of row numbers) -> batches of rows. All n rows, kept on disk -> float32 (n, D), memory-mapped.

        The folder's name is a hash of `key`, which holds all that decides the values. Chunks are files of their own: a
        killed run leaves whole ones, ranks share them out, and processes that start at once do no harm.
        """
        key = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        folder = Path(self.args.data_root) / "embeddings" / key
        whole, size = folder / "all.npy", 8 * EVAL_BATCH
        if not agreed(whole.exists()):
            make_folder(folder)
            starts = range(0, n, size)
            parts = {folder / f"{at:09d}-{size}.npy": in_batches(np.arange(at, min(at + size, n))) for at in starts}
            mine = {part: parts[part] for part in list(parts)[rank() :: world()] if not part.exists()}
            batches = [idx for part in mine.values() for idx in part]
            total, started = sum(map(len, batches)), time.perf_counter()
            with self.progress(None, f"embedding {what}", unit=unit, total=total) as bar, self.autocast():
                encoded = encode(batches)
                for part in mine:
                    embedded = []
                    for rows in itertools.islice(encoded, len(mine[part])):
                        embedded.append(rows.float().cpu())
                        bar.update(len(rows))
                    with replacing(part) as temporary, open(temporary, "wb") as file:
                        np.save(file, torch.cat(embedded).numpy())
            if rank() == 0 and total:
                seconds = time.perf_counter() - started
                print(f"embedded {what}: {total} in {seconds:.1f} s, {total / seconds:.0f} {unit}/s", flush=True)
                self.embedding_seconds += seconds
            wait_for_all()
            if rank() == 0:
                join_parts(list(parts), whole)
        wait_for_all()
        return np.load(whole, mmap_mode="r", allow_pickle=False)

    def pixels(self, split, batches, view=None):
        """Batches of a split's images on the device: float (B, 3, H, W) in 0..1, channels last. `batches` are arrays of
        rows of the split, read ahead by worker processes. With `view`, (B, 2, 3, H, W): each beside its view."""
        cuda, workers = self.device.type == "cuda", self.args.workers
        if workers < 0:
            workers = (2 if cuda else 0) if split.images.cached and not view else min(8, os.cpu_count() or 1)
        more = {"num_workers": workers, "pin_memory": cuda, "worker_init_fn": ignore_ctrl_c}
        images = Views(split.images, view, self.args.seed, self.epoch) if view else split.images
        for batch in DataLoader(images, sampler=[split.rows[idx] for idx in batches], batch_size=None, **more):
            if self.stopping:
                self.stop()
            if isinstance(batch, str):
                die(batch)
            yield batch.to(self.device, non_blocking=True).movedim(-1, -3).float() / 255

    def inputs(self, split, batches, flips=None, view=None):
        """What the model takes: pixels, flipped where `flips` says so; with --linear their features (B, D)."""
        flips = flips or [None] * len(batches)
        if split.features:
            plain, mirrored = split.features
            for idx, flip in zip(batches, flips):
                rows = plain[idx] if flip is None else np.where(flip[:, None], mirrored[idx], plain[idx])
                if self.stopping:
                    self.stop()
                yield torch.from_numpy(rows).to(self.device, non_blocking=True)
            return
        for x, flip in zip(self.pixels(split, batches, view), flips):
            if flip is not None:
                flip = torch.from_numpy(flip).to(self.device, non_blocking=True)
                x = torch.where(flip.view(-1, *[1] * (x.ndim - 1)), x.flip(-1), x)
            yield x

    def batches(self, split, least=1, view=None):
        """One epoch of (x, z, idx), this process's share of every batch; order and flips come from (seed, epoch). A
        last batch of which a process would get fewer than `least` images is left out. With `view`, a random function
        of one image's uint8 pixels, x is (B, 2, 3, H, W): every image beside its view."""
        n, size = len(split), self.args.batch_size
        chance = torch.Generator().manual_seed(self.args.seed * 10007 + self.epoch)
        order = torch.randperm(n, generator=chance).numpy()
        flips = (torch.rand(n, generator=chance) < 0.5).numpy()[order]
        starts = [start for start in range(0, n, size) if n - start >= least * world()]
        spans = [(start, min(start + size, n)) for start in starts]
        if self.args.max_steps:
            spans = spans[: self.args.max_steps - self.steps]
        shares = [slice(start + rank(), stop, world()) for start, stop in spans]
        inputs = self.inputs(split, [order[share] for share in shares], [flips[share] for share in shares], view)
        self.seen, self.started = sum(stop - start for start, stop in spans), time.perf_counter()
        bar = self.progress(inputs, f"epoch {self.epoch}/{self.stages * self.args.epochs}", total=len(spans))
        order = torch.from_numpy(order).to(self.device)
        for (start, stop), share, x in zip(spans, shares, bar):
            self.idx, self.weight = order[share], len(x) * world() / (stop - start)
            yield x, split.z[self.idx], self.idx

    def step(self, loss, optimizer):
        """Backward and a step. Unequal shares of a batch are weighed so that the processes' mean is the batch's."""
        self.scaler.scale(loss * self.weight).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        self.steps += 1
        self.unchecked.append((self.steps - self.steps_before, loss.detach(), self.idx))
        if len(self.unchecked) == CHECK_EVERY:
            self.check_losses()

    def check_losses(self):
        """Stops at a loss that is not finite. Not called every step, for it waits for the device."""
        losses = torch.stack([loss for _, loss, _ in self.unchecked]).tolist() if self.unchecked else []
        for loss, (step, _, idx) in zip(losses, self.unchecked):
            if not math.isfinite(loss):
                rows = ", ".join(map(str, idx.tolist()))
                self.give_up(f"the loss is {loss} in epoch {self.epoch}, step {step} (training rows {rows})")
        self.unchecked = []

    def give_up(self, what):
        die(f"{what}; {self.directory} keeps the epoch before: try a lower --lr or --amp off")

    def log(self, **values):
        """Values of a step, whose mean goes into the epoch's row, or of the epoch. Doesn't wait for the device."""
        for name, value in values.items():
            value = value.detach() if torch.is_tensor(value) else torch.tensor(value, device=self.device)
            self.logged.setdefault(name, []).append(value)

    def fact(self, name, values):
        """Numbers that hold for the whole run: printed now, kept in result.json"""
        self.facts[name] = values
        if rank() == 0:
            print(f"{name}: {', '.join(f'{key} {value:.2f}' for key, value in values.items())}", flush=True)

    def measure(self, model, split):
        if not split:
            return {"mAP": math.nan, "F1": {}, "AP": {}}
        logits = self.predict(model, split)
        ap = average_precision(logits, split.y)
        f1 = f1_scores(logits.sigmoid(), split.y)
        return {"mAP": 100 * ap.mean().item(), "F1": f1, "AP": dict(zip(self.data.classes, ap.tolist()))}

    def mean_logs(self):
        """Means over all steps and processes of what was logged; a NaN is a step that had nothing to say"""
        if not self.logged:
            return {}
        names = sorted(self.logged) if world() > 1 else list(self.logged)
        values = [torch.stack(self.logged[name]).double() for name in names]
        sums = torch.stack([torch.stack([v.nansum(), (~v.isnan()).sum()]) for v in values]).to(self.device)
        if world() > 1:
            dist.all_reduce(sums)
        return dict(zip(names, (sums[:, 0] / sums[:, 1]).tolist()))

    @torch.no_grad()
    def predict(self, model, split):
        """Logits (N, C) of a split's plain images, in the split's order, on every process."""
        model = unwrap(model).eval()
        if world() > 1:
            for buffer in model.buffers():  # running statistics: rank 0's, as in its checkpoint
                dist.broadcast(buffer, 0)
        mine = np.arange(len(split))[rank() :: world()]
        batches = in_batches(mine)
        logits = torch.zeros(-(-len(split) // world()), len(self.data.classes), device=self.device)
        done = 0
        for x in self.progress(self.inputs(split, batches), "evaluating", total=len(batches)):
            with self.autocast():
                logits[done : done + len(x)] = model(x)
            done += len(x)
        logits = gather(logits, len(split))
        if not logits.isfinite().all():
            self.give_up(f"the model's outputs are not finite after epoch {self.epoch}")
        return logits

    # -- epochs

    def epochs(self, **state):
        """Numbers of the epochs to train. `state` (modules, optimizers, tensors) is what a checkpoint carries."""
        self.state = state
        if self.args.eval_only:  # the best weights are in place since prepare()
            self.finished = True
            val, test = (self.measure(state["model"], split) for split in (self.data.val, self.data.test))
            if rank() == 0:
                print(f"{self.directory}: {in_words(val['mAP'], test)}")
        elif self.args.resume:
            self.restore()
        while not self.finished:
            self.epoch += 1
            self.unchecked, self.logged, self.steps_before = [], {}, self.steps
            self.epoch_started = time.perf_counter()
            torch.manual_seed(self.args.seed * 10007 + self.epoch * world() + rank())  # dropout and the like
            for thing in state.values():
                if isinstance(thing, nn.Module):
                    thing.train()
            yield self.epoch
            self.finished = self.finished or self.epoch >= self.stages * self.args.epochs
        if rank() == 0 and not self.args.eval_only:
            self.report()
        if self.board:
            self.board.close()
        if world() > 1:
            wait_for_all()  # rank 0 has still been writing
            dist.destroy_process_group()

    def evaluate(self, model, data, **others):
        """Ends an epoch: validation mAP, test mAP where it is to be reported, a row of metrics, checkpoints. `others`
        are models too, averages of weights: the one that is best on validation counts."""
        self.check_losses()
        row = {"epoch": self.epoch, **self.mean_logs()}
        images_per_s = self.seen / (time.perf_counter() - self.started)
        models = {"raw": model, **others}
        logits = {name: self.predict(each, data.val) for name, each in models.items() if data.val}
        mAP = {name: mean_average_precision(logits[name], data.val.y) if data.val else math.nan for name in models}
        best = max(mAP, key=mAP.get)
        model, row["val_mAP"] = models[best], mAP[best]
        row |= {f"mAP_{name}": mAP[name] for name in models if others}
        better = data.val is None or row["val_mAP"] > self.best["val_mAP"]  # without validation the last is kept
        out_of_patience = not better and 0 <= self.args.patience < self.epoch - self.best["epoch"]
        stage_over = self.epoch - self.stage_began + 1 >= self.args.epochs or out_of_patience
        out_of_steps = 0 < self.args.max_steps <= self.steps
        self.finished = out_of_steps or (stage_over and self.stage == self.stages)
        test = self.measure(model, data.test if self.finished or (better and data.val) else None)
        row["test_mAP"] = test["mAP"]
        if better:
            test = {f"test_{name}": value for name, value in test.items()}
            self.best = {"epoch": self.epoch, "val_mAP": row["val_mAP"], **test}
            if data.val:
                thresholds = best_f1_thresholds(logits[best].sigmoid(), data.val.y)
                self.best["thresholds"] = dict(zip(data.classes, thresholds.tolist()))
        row |= {"images_per_s": images_per_s, "seconds": time.perf_counter() - self.epoch_started}
        self.rows.append(row)
        if rank() == 0 and better:
            weights = unwrap(model).state_dict()  # the one that was measured: an average of weights, maybe
            self.write_tensors("best.pt", {"model": weights, "classes": self.data.classes, **self.best})
        if rank() == 0:
            self.show(row, better)
        if stage_over and not self.finished:
            self.end_stage()
        if rank() == 0:
            self.save()

    def end_stage(self):
        """The next stage has a best of its own; this one's stays as stage1.pt, and in result.json."""
        if rank() == 0:
            with replacing(self.directory / f"stage{self.stage}.pt") as temporary:
                shutil.copy(self.directory / "best.pt", temporary)
            shown = ", ".join(f"{name} {value:.2f}" for name, value in known(self.best).items() if name.endswith("mAP"))
            print(f"stage {self.stage} ends: best epoch {self.best['epoch']}, {shown.replace('_', ' ')}", flush=True)
        wait_for_all()
        self.past.append(
            {name: self.best[name] for name in ("epoch", "val_mAP", "test_mAP") if name in known(self.best)}
        )
        self.best = {"epoch": self.epoch, "val_mAP": -1.0}
        self.stage, self.stage_began = self.stage + 1, self.epoch + 1

    def show(self, row, better):
        if self.board:
            for name, value in row.items():
                self.board.add_scalar(name, value, self.epoch)
        shown = [name for name in row if name not in ("epoch", "seconds", "images_per_s") and not math.isnan(row[name])]
        values = "  ".join(f"{name} {row[name]:{'.2f' if 'mAP' in name else '.4g'}}" for name in shown)
        speed = f"{row['seconds']:.1f} s  {row['images_per_s']:.0f} img/s"
        print(
            f"epoch {self.epoch:>2}/{self.stages * self.args.epochs}  {values}{' *' if better else ''}  {speed}",
            flush=True,
        )

    # -- what a run leaves

    def save(self):
        names = ("epoch", "stage", "stage_began", "past", "steps", "finished", "rows", "best", "embedding_seconds")
        last = {"run": {name: getattr(self, name) for name in names}, "scaler": self.scaler.state_dict()}
        last["classes"] = self.data.classes
        for name, thing in self.state.items():
            last[name] = thing if torch.is_tensor(thing) else unwrap(thing).state_dict()
        self.write_tensors("last.pt", last)
        self.write_metrics()
        if self.rows[-1]["seconds"] > 20:  # to be looked at while it goes on
            plot_curve(self.rows, self.best["epoch"], self.directory / "curve.png")

    def restore(self):
        path = self.directory / "last.pt"
        if not path.exists():  # stopped in its first epoch
            return
        for litter in self.directory.glob(".*"):  # of a write that was cut off
            litter.unlink(missing_ok=True)
        last = read_state(path)
        for name, thing in self.state.items():
            if torch.is_tensor(thing):
                thing.copy_(last[name])
            else:
                unwrap(thing).load_state_dict(last[name])
        self.scaler.load_state_dict(last["scaler"])
        for name, value in last["run"].items():
            setattr(self, name, value)
        if rank() == 0:
            self.write_metrics()  # in case it was stopped between the two
            what = "finished" if self.finished else "going on"
            print(f"{self.directory}: {what} after epoch {self.epoch}", flush=True)

    def write_tensors(self, name, content):
        with replacing(self.directory / name) as temporary:
            torch.save(content, temporary)

    def write_metrics(self):
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        with replacing(self.directory / "metrics.csv") as temporary, open(temporary, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for row in self.rows:
                values = [row.get(name, math.nan) for name in names]
                writer.writerow(["" if math.isnan(value) else value for value in values])

    def report(self):
        """result.json, curve.png and the last line of a run"""
        best, last, data = self.best, self.rows[-1], self.data
        counts = data.test.y.sum(0).tolist() if data.test else []
        empty = [name for name, n in zip(data.classes, counts) if n == 0]
        result = {"best_epoch": best["epoch"], **best, "last_epoch": last["epoch"], "last_test_mAP": last["test_mAP"]}
        result |= {"classes_without_test_positives": empty, "seconds": sum(row["seconds"] for row in self.rows)}
        result |= {"embedding_seconds": self.embedding_seconds}
        result |= self.facts | ({"earlier_stages": self.past} if self.past else {})
        del result["epoch"]
        write_json(self.directory / "result.json", dict.fromkeys(result) | known(result))
        plot_curve(self.rows, best["epoch"], self.directory / "curve.png")
        if empty:
            print(f"{len(empty)} classes have no positive in the test set and count as AP 0: {', '.join(empty)}")
        chosen = f"best epoch {best['epoch']}" if data.val else f"last epoch {best['epoch']} (no validation)"
        shown = in_words(best["val_mAP"], {"mAP": best["test_mAP"], "F1": best["test_F1"]})
        shown += f" (last epoch {last['test_mAP']:.2f})" if data.test else ""
        print(f"{chosen}: {shown}; {self.directory}/curve.png", flush=True)


def known(values):
    """Those that are not NaN, which JSON doesn't have"""
    return {name: value for name, value in values.items() if value == value}


def in_words(val_mAP, test):
    """What was measured; NaN where there are no images with true labels"""
    measured = known({"val mAP": val_mAP, "test mAP": test["mAP"]})
    measured |= {name: test["F1"][name] for name in ("OF1", "CF1") if test["F1"]}
    return ", ".join(f"{name} {value:.2f}" for name, value in measured.items()) or "no true labels to measure with"


def join_parts(parts, whole):
    """Chunks of an embedding -> one file. Another process may do the same at the same time."""
    try:
        arrays = [np.load(part, mmap_mode="r", allow_pickle=False) for part in parts]
        with replacing(whole) as temporary:
            shape = sum(map(len, arrays)), arrays[0].shape[1]
            np.concatenate(arrays, out=np.lib.format.open_memmap(temporary, "w+", np.float32, shape))
    except FileNotFoundError:
        if not whole.exists():  # else the other one was first, and has tidied up
            raise
    for part in parts:
        part.unlink(missing_ok=True)


def pyplot():
    """matplotlib's, for a machine without a screen; a $ in the name of a class is just a $"""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    import matplotlib.pyplot as plt

    return plt


def plot_curve(rows, best_epoch, path):
    """The losses, the mAPs, and panels for the other columns of the metrics."""
    plt = pyplot()
    panels = {"loss": [], "mAP": ["val_mAP", "test_mAP"]}
    for name in dict.fromkeys(name for row in rows for name in row):  # those of one first word share a panel
        if name not in ("epoch", "seconds", "images_per_s", "val_mAP", "test_mAP"):
            panels.setdefault(name.split("_")[0], []).append(name)
    wide = min(3, len(panels))
    high = -(-len(panels) // wide)
    figure, axes = plt.subplots(high, wide, figsize=(4.2 * wide, 3 * high), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, names) in zip(axes.flat, panels.items()):
        for name in names:
            points = [(row["epoch"], row[name]) for row in rows if not math.isnan(row.get(name, math.nan))]
            axis.plot(*zip(*points), marker="o", markersize=3, label=name)
        axis.axvline(best_epoch, color="grey", linestyle=":", linewidth=1, label="best epoch")
        axis.set(title=title, xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(path.parent.name, fontsize=9, color="grey")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


# ---- 6. Metrics


def in_order(values):
    """Sorted along the last dimension; on a CPU by numpy, which doesn't also make the indices that nobody needs"""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))


def average_precision(scores, y):
    """(N, C) scores and labels -> (C,) float64 in 0..1: the mean, over a class's positives, of the precision among all
    images that score as high or higher. Ties and all, that is scikit-learn's average_precision_score; 0 if none."""
    scores, y = as_tensor(scores), as_tensor(y)
    if scores.shape != y.shape or scores.ndim != 2:
        raise ValueError(f"scores {tuple(scores.shape)} and labels {tuple(y.shape)} should be one (N, C)")
    if torch.isnan(scores).any():
        raise ValueError("scores hold NaN: there is no ranking to measure")
    fits = scores.dtype == torch.float32 or scores.dtype.itemsize <= 2
    scores = (scores.float() if fits else scores.double()).T.contiguous()  # (C, N)
    positive = (y.T == 1).to(scores.device)
    ap = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
    for c, ranked in enumerate(in_order(scores)):
        own = in_order(scores[c, positive[c]])
        if len(own):
            as_high = lambda values: (len(values) - torch.searchsorted(values, own)).double()  # noqa: B023
            ap[c] = (as_high(own) / as_high(ranked)).mean()
    return ap


def mean_average_precision(scores, y):
    """mAP in 0..100: the mean of average_precision over all classes, those without positives included as 0."""
    return 100 * average_precision(scores, y).mean().item()


def f1_scores(scores, y, threshold=0.5):
    """Overall and per-class precision, recall and F1, 0..100; positive iff score >= threshold, 0/0 is 0."""
    guess = as_tensor(scores) >= threshold
    truth = as_tensor(y).to(guess.device) == 1
    hits, guesses, truths = ((t.sum(0).double()).cpu() for t in (guess & truth, guess, truth))
    ratio = lambda a, b: a / b.clamp(min=1)
    harmonic = lambda a, b: 2 * a * b / (a + b) if a + b else 0.0
    op, recall = ratio(hits.sum(), guesses.sum()).item(), ratio(hits.sum(), truths.sum()).item()
    cp, cr = ratio(hits, guesses).mean().item(), ratio(hits, truths).mean().item()
    values = {"OP": op, "OR": recall, "OF1": harmonic(op, recall), "CP": cp, "CR": cr, "CF1": harmonic(cp, cr)}
    return {name: 100 * value for name, value in values.items()}


def best_f1_thresholds(scores, y):
    """(N, C) scores and labels -> (C,): the score of each class from which on (>=) to say yes for the best F1, the
    highest of several; 0.5 where a class has no positive to judge by"""
    scores = as_tensor(scores)
    positive = as_tensor(y).to(scores.device) == 1
    ranked, order = scores.sort(dim=0, descending=True)
    hits = positive.gather(0, order).cumsum(0)
    guesses = torch.arange(1, len(scores) + 1, device=scores.device).view(-1, 1)
    f1 = 2 * hits.double() / (guesses + positive.sum(0))
    f1[:-1][ranked[:-1] == ranked[1:]] = -1  # equal scores are said yes to together
    best = ranked.gather(0, f1.argmax(0, keepdim=True))[0]  # the first of equals
    return torch.where(positive.any(0), best, 0.5)
