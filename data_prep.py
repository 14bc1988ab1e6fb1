"""Prepares data sets: from nothing, or from what you have downloaded, to the files that every script reads.

    python data_prep.py voc
    python data_prep.py voc --raw /data/VOCdevkit --image_size 224 --contact_sheet voc.png
    python data_prep.py custom --name pets --images photos --labels labels.csv --val val.csv --test test.csv

Writes formatted_*.npy, dataset.json and the image cache into <data_root>/<data set>, then checks and describes them.
Safe to kill and to run again: it does what is missing. `--check` only looks.
"""

import codecs
import copy
import csv
import errno
import functools
import glob
import gzip
import hashlib
import http.client
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import sys
import tarfile
import tempfile
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import matplotlib
import numpy as np
import tyro
from PIL import Image, ImageOps
from tqdm import tqdm

import scenes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import pillow_heif
except ImportError:  # optional
    pillow_heif = None

# ---- 1. Settings


@dataclass
class Args:
    dataset: tyro.conf.Positional[Literal["scenes", "voc", "voc2007", "coco", "nus", "cub", "custom"]]
    data_root: str = "data"  # folder of the data sets
    raw: str = ""  # folder of your archives or extracted files, if not <data_root>/<data set>/raw
    image_size: int = 0  # side of the cached images (0: 448; custom: no cache above 20 times the size of the photos)
    cache: bool = True  # cache of resized images (--no_cache: files are decoded in every epoch)
    keep_empty: bool = False  # coco: also the images without labels, as the data set coco_all
    check: bool = False  # verification only, of every image
    contact_sheet: str = ""  # PNG of 5 x 5 training images with their labels
    name: str = ""  # custom: name of the data set, for --dataset
    images: str = ""  # custom: folder of your images
    labels: str = ""  # custom: table of the training images and their known labels: image,label or image,label1;label2
    val: str = ""  # custom: table of fully labelled validation images, or Label Studio's JSON export
    test: str = ""  # custom: table of fully labelled test images, or Label Studio's JSON export
    classes: str = ""  # custom: file with a class per line, or names joined by commas (empty: all that occur)
    from_folders: bool = False  # custom: one sub-folder of --images per class, instead of --labels
    ignore_case: bool = False  # custom: one class for names that differ in case, white space or Unicode form only
    skip_damaged: bool = False  # custom: unreadable photos are listed and left out


# ---- 2. Files and images, which common.py reads in the same way

PROTOCOL_SEED = 1200  # of the split and of the observed labels (Cole et al. 2021); never that of a run
CACHE_SIZE = 448  # pixels, as in the papers
PARTS = {"train": "training", "valid": "validation", "val": "test"}  # name in the files: usual name
UNFINISHED = "UNFINISHED"  # marker file in a data set's folder while this script writes there
Image.init()
if pillow_heif:
    pillow_heif.register_heif_opener()
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "HEIF")  # not EPS: it runs programs
FORMATS = tuple(name for name in FORMATS if name in Image.OPEN)  # Pillow may be built without some
HEIC, HEIC_HELP = (".heic", ".heif", ".hif"), "install the package pillow-heif (pip install pillow-heif)"
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what PIL raises at damaged images


def die(message):
    """Ends the program with one sentence instead of a traceback"""
    raise SystemExit("error: " + "\n".join(map(printable, str(message).split("\n"))))


def printable(name):
    """Text that a terminal shows and doesn't obey: control characters, and bytes that are not UTF-8, as escapes"""

    def escape(found):
        code = ord(found[0])
        code -= 0xDC00 if 0xDC80 <= code <= 0xDCFF else 0  # a byte, as Python keeps it in a file's name
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return re.sub("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", escape, str(name))


def cell(name):
    """Text for a CSV file, which no spreadsheet takes for a formula"""
    return "'" * str(name).startswith(("=", "+", "-", "@", "\t", "\r")) + printable(name)


EXPECTED_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE}
EXPECTED_ERRORS |= {errno.ENOMEM, errno.EFBIG, errno.EIO, errno.ESTALE, errno.ENAMETOOLONG, errno.ELOOP}


def explain(kind, problem, trace):
    """sys.excepthook of all scripts: one sentence for errors of the machine, a traceback for bugs"""
    text, sentence = str(problem), None
    if isinstance(problem, BrokenPipeError):
        sentence = "broken pipe: the output is no longer read"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be flushed
    elif isinstance(problem, OSError) and problem.errno in EXPECTED_ERRORS:
        sentence = f"{problem.strerror}: {problem.filename or 'a file or device'}"
    elif isinstance(problem, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        sentence = "out of memory: try a smaller --batch_size or --image_size, fewer --workers, --pixels loader"
    elif "can't start new thread" in text:
        sentence = "no more threads can be started: lower --workers, or raise the limit (ulimit -u)"
    elif "Connection closed by peer" in text or "Connection reset by peer" in text:
        sentence = "another process of this run has ended"
    elif kind.__name__.startswith("Dist"):  # of torch.distributed
        sentence = f"the processes can't work together: {text.splitlines()[0]}"
    if sentence:
        print(f"error: {printable(sentence)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, problem, trace)


def read_json(path, otherwise, **kinds):
    """The object in a JSON file; `kinds` are the types of those values that are there: str, [str], {str: int}, ..."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        die(f"{otherwise} (there is no {path})")
    except (OSError, ValueError, RecursionError) as problem:
        die(f"{path} can't be read: {problem}")
    if not isinstance(content, dict):
        die(f"{path} should hold an object {{...}}, not a {type(content).__name__}")
    for name, kind in kinds.items():
        if name in content and not fits(content[name], kind):
            wanted = re.sub("<class '(\\w+)'>", r"\1", str(kind))
            die(f"{path}: {name} should be {wanted}, not {str(content[name])[:50]!r}")
    return content


def fits(value, kind):
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(item, *kind.values()) for item in value.values())
    return isinstance(value, kind)


def write_json(path, content):
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def replacing(path):
    """A temporary path that replaces `path` if the block raises nothing: readers see old or new, never half, after a
    power cut too. A link's target is replaced; what is no regular file (a device, a FIFO) is written to."""
    special = (path.exists() and not path.is_file()) or str(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))
    target = path if special else Path(os.path.realpath(path))
    folder = Path(tempfile.gettempdir()) if special else target.parent
    stem = f".{target.name[:100]}.{socket.gethostname()}."
    temporary = folder / f"{stem}{os.getpid()}.{time.monotonic_ns()}"
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        for litter in folder.glob(f"{glob.escape(stem)}*"):  # of writes that were killed
            if (pid := litter.name[len(stem) :].split(".")[0]).isdigit() and not is_running(int(pid)):
                litter.unlink(missing_ok=True)
        yield temporary
        if special:
            with open(temporary, "rb") as source, open(path, "wb") as sink:
                shutil.copyfileobj(source, sink)
        else:
            sync(temporary)
            os.replace(temporary, target)
            sync(folder)
    except (OSError, RuntimeError) as problem:
        die(f"{path} can't be written ({problem}); the previous version is intact")
    finally:
        temporary.unlink(missing_ok=True)


def sync(path):
    """To the disk, so that a power cut after a rename leaves no empty file"""
    if os.name == "nt":  # has no such thing for folders, or for files that are read
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if Path(path).is_file():  # not every file system does it for folders
            raise
    finally:
        os.close(handle)


def is_running(pid):
    if os.name == "nt":  # where signal 0 is Ctrl-C
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def lock(folder):
    """An open file: while it is, this process is the only one that writes into `folder`, however it ends"""
    make_folder(folder)
    path = folder / ".lock"
    try:
        file = open(path, "a+")  # noqa: SIM115
    except OSError as problem:
        die(f"{folder} can't be written: {problem}")
    try:
        if fcntl:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        die(f"{folder} is in use by {path.read_text().strip()}: wait until it has ended, or stop it")
    except OSError as problem:
        note = f"note: {folder} can't be locked ({problem}): make sure that no other process writes there"
        print(note, file=sys.stderr)
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
    return file


def make_folder(path, new=False):
    """With `new` -> False where there is one of that name"""
    try:
        path.mkdir(parents=True, exist_ok=not new)
    except OSError as problem:
        if not (new and path.is_dir()):
            die(f"{path} can't be written: {problem}")
        return False
    return True


def cores():
    """Number of CPUs that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def split_indices(n, val_fraction=0.2, seed=PROTOCOL_SEED):
    """Rows of the train file -> (train_idx, val_idx), sorted"""
    order = np.random.RandomState(seed).permutation(n)
    n_val = round(val_fraction * n)
    return np.sort(order[: n - n_val]), np.sort(order[n - n_val :])


def is_positive(y):
    """(N, C) labels, an array or a tensor of any device and type -> bool array"""
    return np.asarray((y == 1).cpu() if hasattr(y, "cpu") else np.asarray(y) == 1)


def draw_single_positives(y, seed=PROTOCOL_SEED):
    """(N, C) full labels -> (N, C) uint8 with one positive kept per row, exactly as Cole et al. drew theirs"""
    y, rs = is_positive(y), np.random.RandomState(seed)
    z, places = np.zeros(y.shape, dtype=np.uint8), np.empty(y.shape[1], dtype=np.int64)
    for row, labels in enumerate(y):
        (positives,) = labels.nonzero()
        rs.shuffle(positives)
        rs.shuffle(places[len(positives) :])  # of negatives: none is kept, but the published draws shuffled them too
        if len(positives):
            z[row, positives[0]] = 1
    return z


def draw_known_positives(y, ratio, seed=PROTOCOL_SEED):
    """(N, C) full labels -> (N, C) uint8 with round(ratio * positives) of all positives kept"""
    positives = np.flatnonzero(is_positive(y))
    z = np.zeros(y.shape, dtype=np.uint8)
    z.flat[np.random.RandomState(seed).permutation(positives)[: round(ratio * len(positives))]] = 1
    return z


def read_image(path, upright=False):
    """An RGB image; `upright` applies the camera's EXIF orientation. Transparent pixels become white"""
    if str(path).lower().endswith(HEIC) and not pillow_heif:
        raise ValueError(f"it is HEIC: {HEIC_HELP}")
    with Image.open(path, formats=FORMATS) as image:
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
    """SHA-256 of all names, a line each; never many of them at once, for an array holds them in less memory"""
    digest, names, between = hashlib.sha256(), iter(names), ""
    while piece := list(islice(names, 4096)):
        digest.update((between + "\n".join(piece)).encode(errors="surrogateescape"))
        between = "\n"
    return digest.hexdigest()


class Images:
    """images[rows] -> uint8 (B, size, size, 3), from the cache of resized images where there is one, else from files"""

    def __init__(self, folder, image_folder, part, size, upright=False):
        self.names, self.image_folder = read_names(folder, part), image_folder
        self.size, self.resample = size, Image.Resampling.BILINEAR
        self.upright = upright  # EXIF orientation applied, which is not the protocol of the published data sets
        self.cache = folder / f"cache_{part}_{size}.npy"
        self.cached = self.cache.exists()
        if not self.cached and (missing := self.missing()):
            die(f"{len(missing)} of {len(self.names)} images are missing, first {image_folder / missing[0]}")
        if self.cached:
            self.pixels = read_array(self.cache, ndim=4, mmap_mode="r")
            made_for = read_json(self.cache.with_suffix(".json"), f"{self.cache} has no description", upright=bool)
            found = made_for.get("images"), made_for.get("upright", False), self.pixels.shape, self.pixels.dtype
            if found != (hash_names(self.names), upright, (len(self), size, size, 3), np.uint8):
                die(f"{self.cache} was made for another list of images or orientation: delete it, or prepare again")

    def missing(self):
        return [name for name in self.names if not (self.image_folder / name).is_file()]

    def from_files(self, size, resample):
        """The same images, squashed from their files to another size; from the cache where the files are gone"""
        other = copy.copy(self)
        if not (self.cached and self.missing()):
            other.size, other.resample, other.cached = size, resample, False
        return other

    def __len__(self):
        return len(self.names)

    def __getitem__(self, rows):
        if self.cached:
            return self.pixels[rows]
        batch = np.empty((len(rows), self.size, self.size, 3), dtype=np.uint8)
        for i, path in enumerate(self.image_folder / self.names[row] for row in rows):
            try:
                batch[i] = decode(path, self.size, self.resample, self.upright)
            except UNREADABLE as problem:
                die(f"{path} can't be read: {problem}")
        return batch


def read_array(path, ndim, mmap_mode=None):
    try:
        array = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
    except Exception as problem:  # damaged headers raise all sorts
        die(f"{path} can't be read: {problem}")
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufU":
        die(f"{path} should hold one array of numbers or names, as numpy.save writes it")
    if array.ndim != ndim or len(array) == 0:
        die(f"{path} should have {ndim} dimension(s) and at least one row; its shape is {array.shape}")
    return array


def write_rows(path, arrays):
    """An .npy file of the rows of all arrays, with their CRC-32 behind them"""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        shape, crc = (sum(map(len, arrays)), arrays[0].shape[1]), 0
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for rows in arrays:
            crc = zlib.crc32(np.ascontiguousarray(rows), crc)
            file.write(rows.tobytes())
        file.write(crc.to_bytes(4, "little"))


def read_rows(path, n):
    """What write_rows wrote, memory-mapped; None if there is no file, or one that is damaged, which is deleted"""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
        with open(path, "rb") as file:
            file.seek(rows.offset + rows.nbytes)
            if rows.ndim == 2 and len(rows) == n and file.read() == zlib.crc32(rows).to_bytes(4, "little"):
                return rows
    except FileNotFoundError:
        return None
    except Exception:  # damaged headers raise all sorts
        pass
    print(f"{path} is damaged: these embeddings are computed again", file=sys.stderr)
    path.unlink(missing_ok=True)
    return None


def read_names(folder, part):
    return read_array(folder / f"formatted_{part}_images.npy", ndim=1).astype(str, copy=False)


def read_labels(path, n):
    """(n, C) labels of any real dtype, 0 or 1 -> uint8"""
    labels = read_array(path, ndim=2, mmap_mode="r")  # the file may have 8 bytes per label
    if len(labels) != n:
        die(f"{path} has {len(labels)} rows, but its images file has {n}")
    for start in range(0, n, 4096):
        wrong = ~np.isin(labels[start : start + 4096], (0, 1))
        if wrong.any():
            row, column = np.argwhere(wrong)[0] + (start, 0)
            die(f"{path} may hold 0 and 1 only; row {row}, column {column} is {labels[row, column]}")
    return np.array(labels, dtype=np.uint8)


def observed_labels(folder, n, y, known_ratio):
    """z of the whole train file, as the protocol draws it or as the file says; y is None where nobody knows it"""
    if known_ratio and y is None:
        die(f"--known_ratio needs the full training labels, which {folder} doesn't have")
    path = folder / "formatted_train_labels_obs.npy"
    if known_ratio or not path.exists():
        return draw_known_positives(y, known_ratio) if known_ratio else draw_single_positives(y)
    z = read_labels(path, n)
    if y is None:  # your own photos, of which several labels may be known
        return z
    if z.shape != y.shape:
        die(f"{path} is {z.shape}, but formatted_train_labels.npy is {y.shape}")
    crowded, false = np.flatnonzero(z.sum(1) > 1), np.flatnonzero((z > y).any(1))
    if len(crowded):
        fix = "delete it to draw one per image, or keep a share of all positives with --known_ratio"
        die(f"{path} has {len(crowded)} rows with more than one observed positive (first: row {crowded[0]}): {fix}")
    if len(false):
        die(f"{path} observes labels that formatted_train_labels.npy calls negative (first: row {false[0]})")
    return z


def nameless(n):
    return [f"class {c}" for c in range(n)]


def pyplot():
    """matplotlib's, for a machine without a screen; a $ in the name of a class is just a $"""
    matplotlib.use("Agg")
    matplotlib.rcParams["text.parse_math"] = False
    return importlib.import_module("matplotlib.pyplot")  # takes a while: only where something is drawn


def save_figure(figure, path):
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    pyplot().close(figure)


# ---- 3. Official data sets: download, extract, read

OXFORD = "https://thor.robots.ox.ac.uk/pascal/VOC"
ARCHIVES = {  # data set: [(address, md5)]
    "voc": [(f"{OXFORD}/voc2012/VOCtrainval_11-May-2012.tar", "6cd6e144f989b92b3379bac3b3de84fd")],
    "voc2007": [
        (f"{OXFORD}/voc2007/VOCtrainval_06-Nov-2007.tar", "c52e279531787c972589f7e41ab4ae64"),
        (f"{OXFORD}/voc2007/VOCtest_06-Nov-2007.tar", "b6e924de25625d8de591ea690078ad9f"),
    ],
    "coco": [  # http, for the host's certificate is of another name; the checksum vouches for the files
        ("http://images.cocodataset.org/annotations/annotations_trainval2014.zip", "0a379cfc70b0e71301e0f377548639bd"),
        ("http://images.cocodataset.org/zips/train2014.zip", "0da8c0bd3d6becc4dcb32757491aca88"),
        ("http://images.cocodataset.org/zips/val2014.zip", "a3d79f5ed8d289b7a7554ce06a5782b3"),
    ],
    "cub": [
        ("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz", "97eceeb196236b17998738112f37df78")
    ],
}
MARKERS = {  # files that must be there before a data set can be read, relative to its root
    "voc": ["ImageSets/Main/aeroplane_train.txt", "JPEGImages"],
    "voc2007": ["ImageSets/Main/aeroplane_trainval.txt", "ImageSets/Main/aeroplane_test.txt", "JPEGImages"],
    "coco": ["annotations/instances_train2014.json", "annotations/instances_val2014.json", "train2014", "val2014"],
    "cub": ["images.txt", "train_test_split.txt", "attributes/image_attribute_labels.txt", "images"],
}


@dataclass
class Source:
    """What a reader found: image names relative to image_folder and labels, per formatted file."""

    classes: list
    image_folder: Path
    names: dict  # part: list of names
    labels: dict  # part: (N, C) uint8, full labels
    observed: dict = field(default_factory=dict)  # part: (N, C) uint8, where they are given and not to be drawn
    published: bool = True  # these are the images of the papers, whose numbers are known
    upright: bool = False  # turn photos as the camera held them; the protocol of the papers doesn't


def fetch(args):
    """The root of the extracted data set, after whatever download and extraction it takes."""
    raw = Path(args.raw or Path(args.data_root) / args.dataset / "raw")
    if args.raw and not raw.is_dir():
        die(f"--raw {raw} is not a folder (to download into it, make it first)")
    if not list(raw.glob("*.extracting")) and (root := find_root(raw, args.dataset)):
        return root
    ours = {address.rsplit("/", 1)[1] for address, _ in ARCHIVES[args.dataset]}
    found = {path.name for path in raw.glob("[!.]*")} if args.raw else set()
    if found and not any(name.startswith(tuple(ours)) for name in found):
        die(f"--raw {raw} has neither {MARKERS[args.dataset][0]} nor {min(ours)}: another folder, or one level off?")
    for address, md5 in ARCHIVES[args.dataset]:
        archive = raw / address.rsplit("/", 1)[1]
        extracting, extracted = (archive.with_name(archive.name + ending) for ending in (".extracting", ".extracted"))
        if not extracted.exists():
            download(address, archive, md5)
            extracting.touch()  # stays behind when the extraction is cut off
            extract(archive, raw)
            extracting.replace(extracted)
    if not (root := find_root(raw, args.dataset)):
        die(f"{raw} was filled but lacks {', '.join(MARKERS[args.dataset])}: another release of {args.dataset}?")
    return root


def find_root(raw, dataset):
    """raw, or a folder up to two levels below it, that holds all of the data set's markers"""
    markers, usual = MARKERS[dataset], {"voc": "VOC2012", "voc2007": "VOC2007"}.get(dataset)
    found = [path for depth in ("", "*/", "*/*/") for path in sorted(raw.glob(depth + markers[0]))]
    roots = [path.parents[markers[0].count("/")] for path in found]
    roots = [root for root in roots if all((root / marker).exists() for marker in markers)]
    return min(roots, key=lambda root: root.resolve().name != usual, default=None)  # a devkit may hold several years


def download(address, path, md5="", tries=5):
    """Downloads to `path`, going on where a broken download stopped; checks size and checksum."""
    make_folder(path.parent)
    by_hand, ours = f"download {address} in another way and put it at {path}", not path.exists()
    partial = path.with_name(path.name + ".part")
    for attempt in range(tries if ours else 0):
        try:
            download_rest(address, partial)
            os.replace(partial, path)
            break
        except (OSError, http.client.HTTPException) as problem:  # urllib's errors are OSErrors
            refused = isinstance(problem, urllib.error.HTTPError) and problem.code < 500
            if refused or attempt == tries - 1:
                die(f"{address} can't be downloaded ({problem}): {by_hand}")
            time.sleep(2**attempt / 4)
    if md5:
        with open(path, "rb") as file:
            digest = hashlib.md5()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != md5:
            if ours:
                path.unlink()
            fate = "is deleted" if ours else "is left as it is: move it away"
            die(f"{path} is not the published file (md5 {digest.hexdigest()}) and {fate}; {by_hand}")


def download_rest(address, partial):
    done = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as problem:
        if problem.code == 416 and problem.headers.get("Content-Range", "").endswith(f"/{done}"):
            return  # it was whole
        raise
    with answer, open(partial, "ab" if answer.status == 206 else "wb") as file:
        length = answer.headers["Content-Length"]
        total = int(length) + file.tell() if length else None
        bar = dict(total=total, initial=file.tell(), unit="B", unit_scale=True, leave=False, disable=None)
        with tqdm(desc=f"downloading {partial.stem}", **bar) as progress:
            while block := answer.read(1 << 20):
                file.write(block)
                progress.update(len(block))
        if total and file.tell() != total:
            raise ConnectionError(f"{file.tell()} of {total} bytes received")


def extract(archive, folder):
    """Unpacks a tar or zip. Only files and folders inside `folder` are written, and no more than such archives hold"""
    left = 5 * archive.stat().st_size + 100_000_000  # bytes; annotations of COCO are the most compressed, 3.3 times
    home = folder.resolve()
    try:
        with zipfile.ZipFile(archive) if archive.suffix == ".zip" else tarfile.open(archive) as pack:
            members = pack.infolist() if archive.suffix == ".zip" else pack
            for member in tqdm(members, f"extracting {archive.name}", leave=False, disable=None):
                name, is_folder, is_file, read = member_of(pack, member)
                target = (home / name).resolve()
                if Path(name).is_absolute() or ".." in Path(name).parts or not target.is_relative_to(home):
                    die(f"{archive} would write outside {folder}: {name}")
                if not (is_folder or is_file):
                    die(f"{archive} holds a link or device, {name}, which none of these archives has")
                (target if is_folder else target.parent).mkdir(parents=True, exist_ok=True)
                if is_file:
                    with read() as source, open(target, "wb") as file:
                        while block := source.read(min(1 << 20, left + 1)):
                            left -= len(block)
                            if left < 0:
                                die(f"{archive} holds far more than its size suggests: it is not the published file")
                            file.write(block)
    except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, RuntimeError) as problem:
        die(f"{archive} is damaged or unsafe ({problem}): delete it and run this again")
    except OSError as problem:
        die(f"{folder} can't be written: {problem}")


def member_of(pack, member):
    """-> name, whether it is a folder, whether it is a regular file, and what opens it"""
    if isinstance(member, tarfile.TarInfo):
        return member.name, member.isdir(), member.isreg(), lambda: pack.extractfile(member)
    kind = stat.S_IFMT(member.external_attr >> 16)  # of Unix; 0 where the archive was not made there
    return member.filename, member.is_dir(), kind in (0, stat.S_IFREG), lambda: pack.open(member)


VOC_CLASSES = ["aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable"]
VOC_CLASSES += ["dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"]


def read_voc(root, official, keep_empty=False):
    """`official`: formatted part -> the official set. 1 is positive; -1 and 0 ("difficult") are not."""
    names, labels = {}, {}
    for part, name in official.items():
        rows = {}
        for c, class_name in enumerate(VOC_CLASSES):
            path = root / "ImageSets/Main" / f"{class_name}_{name}.txt"
            for line in read_lines(path):
                image, value = line.split()
                rows.setdefault(image, np.zeros(len(VOC_CLASSES), dtype=np.uint8))[c] = value == "1"
        kept = sorted(image for image, y in rows.items() if keep_empty or y.any())
        names[part] = [f"{image}.jpg" for image in kept]
        labels[part] = np.stack([rows[image] for image in kept])
    return Source(VOC_CLASSES, root / "JPEGImages", names, labels)


def read_coco(root, keep_empty):
    """Crowd annotations count; images without annotations drop out, as the protocol has it, or are kept; rows in the
    order of the ids as strings."""
    names, labels = {}, {}
    for part in ("train", "val"):
        path = root / "annotations" / f"instances_{part}2014.json"
        files, column, rows = {}, {}, {}
        found = []  # annotations may come before the categories that number them
        with tqdm(desc=f"reading {path.name}", unit=" entries", leave=False, disable=None) as bar:
            for section, entry in stream_json(path):
                bar.update()
                if section == "images":
                    files[entry["id"]] = entry["file_name"]
                elif section == "categories":
                    column[entry["id"]] = (len(column), entry["name"])
                elif section == "annotations":
                    found.append((entry["image_id"], entry["category_id"]))
        classes = [name for _, name in column.values()]
        if part == "train":
            train_classes = classes
        elif classes != train_classes:
            die(f"{path} has other categories than the training file")
        for image, category in found:
            rows.setdefault(image, set()).add(column[category][0])
        order = sorted(files if keep_empty else rows, key=str)
        names[part] = [f"{part}2014/{files[image]}" for image in order]
        labels[part] = np.zeros((len(order), len(column)), dtype=np.uint8)
        for row, image in enumerate(order):
            labels[part][row, list(rows.get(image, ()))] = 1
    return Source(classes, root, names, labels)


def stream_json(path, block=1 << 20):
    """(key, element) for every element of the lists in a file's top object: a COCO file is too large to hold whole."""
    decoder, text, at = json.JSONDecoder(), "", 0
    with open(path, encoding="utf-8") as file:

        def skip(characters):
            nonlocal text, at
            while True:
                while at < len(text) and text[at] in characters:
                    at += 1
                if at < len(text):
                    return text[at]
                text, at = file.read(block), 0
                if not text:
                    die(f"{path} ends too early: it is only a part of the file")

        def value():
            nonlocal text, at
            while True:
                try:
                    result, end = decoder.raw_decode(text, at)
                    if text[end : end + 1] in {*" \t\r\n,:]}"}:  # else a number may go on in the next block
                        at = end
                        return result
                except ValueError:
                    pass
                more = file.read(max(block, len(text) - at))
                if not more:
                    die(f"{path} is not a whole JSON file")
                text, at = text[at:] + more, 0

        skip(" \t\r\n{")
        while skip(" \t\r\n,") != "}":
            key = value()
            if skip(" \t\r\n:") != "[":
                value()
                continue
            at += 1
            while skip(" \t\r\n,") != "]":
                yield key, value()
            at += 1


def read_cub(root):
    """312 attributes; is_present alone counts, certainty doesn't; some lines carry extra columns."""
    files = dict(line.split(maxsplit=1) for line in read_lines(root / "images.txt"))
    is_train = dict(line.split() for line in read_lines(root / "train_test_split.txt"))
    listed = next((p for p in (root / "attributes/attributes.txt", root.parent / "attributes.txt") if p.exists()), None)
    if not listed:
        die(f"{root.parent / 'attributes.txt'} is missing: it is in CUB_200_2011.tgz beside the CUB_200_2011 folder")
    classes = [line.split(maxsplit=1)[1] for line in read_lines(listed)]
    ids = sorted(files, key=int)
    row = {image: i for i, image in enumerate(ids)}
    y = np.zeros((len(ids), len(classes)), dtype=np.uint8)
    with open(root / "attributes/image_attribute_labels.txt") as file:
        for line in tqdm(file, "reading attributes", unit=" lines", leave=False, disable=None):
            image, attribute, present = line.split()[:3]
            y[row[image], int(attribute) - 1] = present == "1"
    chosen = {"train": np.array([is_train[image] == "1" for image in ids])}
    chosen["val"] = ~chosen["train"]
    names = {part: [files[image] for image, keep in zip(ids, keeps) if keep] for part, keeps in chosen.items()}
    return Source(classes, root / "images", names, {part: y[keeps] for part, keeps in chosen.items()})


NUS_HELP = """NUS-WIDE can't be downloaded freely. Put into {raw} one of:
  (1) Cole et al.'s re-crawl, used by ROLE, AEVLP and the releases of LL and LAC:
      formatted_{{train,val}}_{{images,labels}}.npy of zenodo.org/records/10162606
  (2) the official images, used by EM + APL and VLPL: Flickr.zip of
      lms.comp.nus.edu.sg/wp-content/uploads/2019/research/nuswide/NUS-WIDE.html (reported dead in 2025), and
      formatted_{{train,val}}_{{images,labels}}.npy of the authors of EM + APL,
      drive.google.com/drive/folders/1YL7WhnGpd-pjbtPL5r6IKiPeYFVdpYne
  (3) the complete set, on request on the same page: ImageList/{{Train,Test}}Imagelist.txt and
      TrainTestLabels/Labels_<concept>_{{Train,Test}}.txt (LAC's paper has it, with a random split of its own)
each with the images in a folder images/ and the classes' names, the official ConceptsList/Concepts81.txt,
and run this again. The three are different images: their results can't be compared."""


def read_nus(raw):
    names, labels, concepts = {}, {}, raw / "ConceptsList/Concepts81.txt"
    if (raw / "formatted_train_images.npy").exists():
        for part in ("train", "val"):
            names[part] = [str(name) for name in read_array(raw / f"formatted_{part}_images.npy", ndim=1)]
            labels[part] = read_labels(raw / f"formatted_{part}_labels.npy", len(names[part]))
        return Source(read_lines(concepts), raw / "images", names, labels)
    if not (raw / "ImageList/TrainImagelist.txt").exists():
        die(NUS_HELP.format(raw=raw))
    classes = read_lines(concepts)
    for part, official in (("train", "Train"), ("val", "Test")):
        names[part] = [line.replace("\\", "/") for line in read_lines(raw / f"ImageList/{official}Imagelist.txt")]
        columns = [read_lines(raw / f"TrainTestLabels/Labels_{name}_{official}.txt") for name in classes]
        if uneven := [name for name, column in zip(classes, columns) if len(column) != len(names[part])]:
            die(f"Labels_{uneven[0]}_{official}.txt differs in length from {official}Imagelist.txt")
        labels[part] = (np.array(columns) == "1").T.astype(np.uint8)
    print("note: the official lists differ from the papers' 150,000 / 60,260 images: counts are not checked")
    return Source(classes, raw / "images", names, labels, published=False)


def read_lines(path):
    try:
        return [line.strip() for line in Path(path).read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        die(f"{path} can't be read: {problem}")


# ---- 4. Your own images

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff")
IMAGE_ENDINGS += HEIC
COLUMNS = {  # what tables call them, the surest name first; image_path and label1, label2 are understood too
    "image": ["image", "images", "img", "photo", "picture", "file", "path"],
    "label": ["labels", "label", "keywords", "keyword", "tags", "tag", "classes", "class", "category", "categories"],
}
SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar"}


def read_custom(args):
    """--labels (images and their known labels) or class folders; --val and --test (images and all of their labels)"""
    folder, problems, tables = Path(args.images), [], {}
    if not args.images or not folder.is_dir():
        die(f"--images {args.images!r} is not a folder")
    if args.from_folders and args.labels:
        die("--labels and --from_folders exclude each other: leave one out")
    if args.from_folders:
        names = in_class_folders(folder)
        tables["train"] = [(name, [name.split("/")[0]], f"{folder / name}") for name in names]
    elif args.labels:
        tables["train"] = read_table(args.labels, folder, problems)
    else:
        die("the known labels are missing: give --labels labels.csv, or --from_folders")
    for part, path in (("valid", args.val), ("val", args.test)):
        if path:
            tables[part] = read_table(path, folder, problems)
    heic = [image for table in tables.values() for image, _, _ in table if image.lower().endswith(HEIC)]
    if heic and not pillow_heif:
        problems.append(f"{len(heic):,} photos, first {heic[0]}, are HEIC: {HEIC_HELP}, or convert them to JPEG")
    elif args.skip_damaged:
        leave_out_damaged(tables, folder)

    given = read_lines(args.classes) if os.path.isfile(args.classes) else args.classes.split(",")
    given = [name.strip() for name in given if name.strip()]
    problems += [f"--classes names {name!r} twice" for name, times in Counter(given).items() if times > 1]
    spell(tables, given, args.ignore_case)
    for part in tables:
        tables[part] = join_rows(tables[part], part == "train", problems)
    classes = given or sorted({label for table in tables.values() for _, labels, _ in table for label in labels})
    column = {name: c for c, name in enumerate(classes)}
    for part, table in tables.items():
        for image, labels, place in table:
            unknown = [label for label in labels if label not in column]
            problems += [f"{place}: {label!r} is not one of the {len(classes)} classes" for label in unknown]
            if not labels and part == "train":  # of the others it may be known that none applies
                problems.append(f"{place}: {image} has no label")
    keep_apart(tables, problems)
    known = {label for _, labels, _ in tables["train"] for label in labels}
    todo = sum(labels == ["?"] for table in tables.values() for _, labels, _ in table)
    missing = {"?": f"{todo} images of predict.py --to_label still have ? instead of their labels"}
    problems += [missing.get(name, f"class {name!r} has no training example") for name in classes if name not in known]
    problems += [f"there is no {PARTS[part]} image" for part, table in tables.items() if not table]
    if args.from_folders and len(classes) == 1:
        problems.append(f"all images are in one folder, {classes[0]}: is --images one level too high?")
    if problems:
        shown = "\n  ".join(problems[:30])
        more = f"\n  ... and {len(problems) - 30} more" if len(problems) > 30 else ""
        die(f"{len(problems)} problem{'s' * (len(problems) > 1)}, nothing was written:\n  {shown}{more}")

    names = {part: [image for image, _, _ in table] for part, table in tables.items()}
    labels = {}
    for part, table in tables.items():
        labels[part] = np.zeros((len(table), len(classes)), dtype=np.uint8)
        for row, (_, found, _) in enumerate(table):
            labels[part][row, [column[label] for label in found]] = 1
    return Source(classes, folder.resolve(), names, labels, {"train": labels.pop("train")}, upright=True)


def in_class_folders(folder):
    """Names of the images in sub-folders, hidden ones left out; says what else there is and is not taken."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if not any(part.startswith((".", "__")) for part in path.parts)]
    wanted = lambda path: len(path.parts) > 1 and path.suffix.lower() in IMAGE_ENDINGS
    if left := [path for path in files if not wanted(path)]:
        listed = ", ".join(map(printable, left[:5])) + (", ..." if len(left) > 5 else "")
        print(f"left out: {len(left)} files outside the class folders or without an image extension: {listed}")
    return [path.as_posix() for path in files if wanted(path)]


def leave_out_damaged(tables, folder):
    names, whole = sorted({image for table in tables.values() for image, _, _ in table}), []
    photos = SimpleNamespace(image_folder=folder, names=np.array(names), size=1, upright=True)
    damaged = visit(photos, "looking for damage", None, np.arange(len(names)), compare=False, finished=whole.extend)
    if damaged:
        listed = "\n  ".join(map(printable, sorted(damaged)))
        print(f"left out: {len(damaged):,} of {len(names):,} photos, which can't be read:\n  {listed}")
    whole = {names[row] for row in whole}
    for part, table in tables.items():
        tables[part] = [row for row in table if row[0] in whole]


def spell(tables, given, ignore_case):
    """Removes blanks around labels; says which classes look the same and, with `ignore_case`, makes them one."""
    found = [label for table in tables.values() for _, labels, _ in table for label in labels]
    count, alike, spelling = Counter(map(str.strip, found)), {}, {}
    if padded := sum(label != label.strip() for label in found):
        print(f"note: blanks around {padded:,} of {len(found):,} labels were removed")
    for name in sorted({*count, *given}):
        alike.setdefault(" ".join(unicodedata.normalize("NFD", name).casefold().split()), []).append(name)
    for names in alike.values():
        if len(names) > 1:
            names.sort(key=lambda name: (name not in given, -count[name]))  # --classes decides, else the majority
            listed = ", ".join(f"{name} ({count[name]:,})" for name in names)
            advice = f"they are now all {names[0]}" if ignore_case else "--ignore_case makes them one"
            print(printable(f"note: likely the same class: {listed}; {advice}"))
            spelling |= dict.fromkeys(names, names[0]) if ignore_case else {}
    for table in tables.values():
        for row, (image, labels, place) in enumerate(table):
            labels = [spelling.get(label, label) for label in map(str.strip, labels)]
            table[row] = image, list(dict.fromkeys(labels)), place


def join_rows(table, training, problems):
    """One row per image. Training images may have a label in each of several rows; full labels must agree."""
    rows, repeated, joined = {}, 0, set()
    for image, labels, place in table:
        _, known, first = rows.setdefault(image, (image, labels, place))
        new = [label for label in labels if label not in known]
        if new and training:
            known += new
            joined.add(image)
        elif place != first and (training or {*labels} == {*known}):
            repeated += 1
        elif place != first:
            problems.append(f"{place}: {image} comes again with other labels (first at {first})")
    if repeated:
        print(f"note: duplicate rows, merged: {repeated:,}")
    if joined:
        print(f"note: training images with labels from several rows: {len(joined):,}")
    return list(rows.values())


def keep_apart(tables, problems):
    """Takes the images of validation and test out of training."""
    held = {image: place for image, _, place in tables.get("valid", [])}
    for image, _, place in tables.get("val", []):
        if image in held:
            problems.append(f"{place}: {image} is a validation image too (at {held[image]})")
        held[image] = place
    before, tables["train"] = len(tables["train"]), [row for row in tables["train"] if row[0] not in held]
    if taken := before - len(tables["train"]):
        print(f"note: validation and test images removed from training: {taken:,}")


def read_table(path, folder, problems):
    """[(image, labels, place)] of a CSV or a Label Studio export; what is wrong goes to `problems`, with its place."""
    read, home, table = read_tasks if path.lower().endswith(".json") else read_csv, os.path.realpath(folder), []
    for image, labels, place in read(path, folder, problems):
        if image.startswith("'") and not os.path.isfile(folder / image):
            image = image[1:]  # what cell() puts before = + - @ and the like
        from_here = os.path.isfile(image) and not os.path.isfile(folder / image)
        if from_here or os.path.isabs(image):
            image = os.path.relpath(os.path.realpath(image), home)
        image = Path(os.path.normpath(image)).as_posix()
        if not Path(os.path.realpath(folder / image)).is_relative_to(home):
            problems.append(f"{place}: {image} is outside {folder}")
        elif not os.path.isfile(folder / image):
            near = files_in((folder / image).parent).get(Path(image).stem.lower())
            problems.append(f"{place}: there is no {folder / image}" + f" (there is {near})" * bool(near))
        table.append((image, labels, place))
    return table


@functools.cache
def files_in(folder):
    return {path.stem.lower(): path.name for path in folder.glob("*")}


def read_csv(path, folder, problems):
    """(image, labels, place) of each line; says what was understood."""
    text, encoding = read_text(path)
    start = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    columns = next(filter(None, (find_columns(start, separator, folder) for separator in SEPARATORS)), None)
    if not columns:
        wanted = f"columns with a {' or '.join(SEPARATORS.values())} between them and a header, such as image,label"
        die(f"{path} needs {wanted}; " + (f"it begins with {start[:80]!r}" if start else "it is empty"))
    separator, header, image, labels, named = columns
    joint = ";|" + "," * (separator in ";|")  # between the labels of a cell
    left = [c for c in range(len(header)) if c not in (image, *labels)]
    names = ["image, label, without header"]
    if named:
        names = [f"{header[image]} -> image", *(f"{header[c]} -> label" for c in labels)]
    names += [f"{header[c] or '(no name)'} left out" for c in left[:5]] + ["..."] * (len(left) > 5)
    between, within = (" or ".join(SEPARATORS[one] for one in several) for several in (separator, joint))
    print(printable(f"{path}: columns {', '.join(names)}; {between} between them, {within} between labels; {encoding}"))

    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    lines = (line for line in reader if any(map(str.strip, line)))
    try:
        for line in itertools.islice(lines, int(named), None):
            place = f"{path}:{reader.line_num}"
            if len(line) > max(image, *labels) and not any(map(str.strip, line[len(header) :])):
                cells = [label for c in labels for label in re.split(f"[{joint}]", line[c]) if label.strip()]
                yield line[image].strip(), cells, place
            else:
                problems.append(f"{place}: {len(line)} columns, not {len(header)} ({within} between labels)")
    except csv.Error as problem:
        die(f"{path}:{reader.line_num} can't be read: {problem}")


def find_columns(start, separator, folder):
    """A table's first line -> (separator, its cells, column of images, columns of labels, is it a header?), or None"""
    try:
        header = [name.strip() for name in next(csv.reader([start], delimiter=separator), [])]
    except csv.Error:  # longer than a cell may be
        return None
    plain = [re.sub(r"[\W\d_]", "", name.split(";")[0]).lower() for name in header]
    short = [re.sub("(?<=.)(name|path|file)$", "", name) for name in plain]
    image = next((short.index(name) for name in COLUMNS["image"] if name in short), None)
    label = next((name for name in COLUMNS["label"] if name in plain), None)
    if image is not None and label:
        return separator, header, image, [c for c, name in enumerate(plain) if name == label], True
    if len(header) == 2 and (header[0].lower().endswith(IMAGE_ENDINGS) or os.path.isfile(folder / header[0])):
        return separator, header, 0, [1], False
    return None


def read_text(path):
    """The text of a file that a spreadsheet may have written, and its encoding"""
    try:
        content = Path(path).read_bytes()
    except OSError as problem:
        die(f"{path} can't be read: {problem}")
    text, marks = "\0", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    for encoding in ("utf-16",) if content.startswith(marks) else ("utf-8-sig", "cp1252"):
        with suppress(UnicodeDecodeError):
            text = content.decode(encoding)
            break
    if "\0" in text:
        die(f"{path} is not text, or holds a NUL character: save it as CSV, in UTF-8")
    return text, encoding.removesuffix("-sig")


def read_tasks(path, folder, problems):
    """(image, labels, place) of those tasks of a Label Studio export that somebody did; says which were not."""
    tasks, undone, several = [], 0, 0
    try:
        for number, task in enumerate(json.loads(read_text(path)[0]), 1):
            data, done = task["data"], [one for one in task.get("annotations") or [] if not one.get("was_cancelled")]
            undone, several = undone + (not done), several + (len(done) > 1)
            if done:
                choices = [result["value"].get("choices", []) for result in done[-1]["result"]]
                tasks.append((data.get("file", ""), data.get("image", ""), choices, f"{path}: task {number}"))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as problem:
        die(f"{path} is not a JSON export (not JSON-MIN) of Label Studio: {problem!r}")
    notes = f", {undone} skipped or not done and left out" * (undone > 0)
    notes += f", {several} with several annotations, of which the last counts" * (several > 0)
    print(f"{path}: Label Studio's, {len(tasks) + undone} tasks{notes}")
    names = {}
    for file in folder.rglob("*") if tasks else ():
        names.setdefault(as_uploaded(file.name), []).append(file.relative_to(folder).as_posix())
    for file, address, choices, place in tasks:
        understood = fits([file, address], [str]) and fits(choices, [[str]]) and "\0" not in file
        if not understood or (choices and not any(choices)):  # boxes, say
            problems.append(f"{place}: not an image with choices")
        elif len(found := [file] if file else find_image(address, names)) == 1:
            yield found[0], [label for chosen in choices for label in chosen if label.strip()], place
        else:
            problems.append(f"{place}: {address} is {' or '.join(sorted(found)) or 'not there'} in {folder}")


def as_uploaded(name):
    """A file's name as Label Studio keeps it"""
    return re.sub(r"[^-\w.]", "", name.replace(" ", "_"))


def find_image(address, names):
    """Images whose path ends as Label Studio's address does, or the other way round: those that share most with it"""
    path = urllib.parse.unquote(re.sub(r".*\?d=|\?.*", "", address)).replace("\\", "/")
    *folders, file = re.sub(r".*data/upload/(\d+/)?[0-9a-f]+-", "", path).split("/")
    scores = {}
    for name in names.get(as_uploaded(file), []):
        *own, last = name.split("/")
        if all(one == other for one, other in zip(reversed(folders), reversed(own))):
            scores[name] = last == file, min(len(own), len(folders))
    return [name for name in scores if scores[name] == max(scores.values())]


# ---- 5. Write, cache, check

EXPECTED = {  # data set: (classes, part: (images, labels or None, positives per training image or None))
    "voc": (20, {"train": (5717, 8331, 1.46), "val": (5823, 8351, None)}),
    "voc2007": (20, {"train": (5011, None, None), "val": (4952, None, None)}),
    "coco": (80, {"train": (82081, None, 2.94), "val": (40137, None, None)}),
    "coco_all": (80, {"train": (82783, None, None), "val": (40504, None, None)}),
    "nus": (81, {"train": (150000, None, 1.89), "val": (60260, None, None)}),
    "cub": (312, {"train": (5994, None, 31.4), "val": (5794, None, None)}),
}
VOC_DRAWS = [12, 4, 11, 19, 6, 0, 14, 0, 10, 18, 11, 7]  # the observed classes of the first training images


def write_source(folder, name, source):
    """The formatted files, checked. Until they are right a marker forbids their use."""
    if list(folder.glob("formatted_*.npy")) and not (folder / "dataset.json").exists():
        die(f"{folder} holds formatted files that were not made here: move them, or use them with --dataset {folder}")
    observed = source.observed or {part: draw_single_positives(y) for part, y in source.labels.items()}
    arrays = {"images": source.names, "labels": source.labels, "labels_obs": observed}
    files = {f"formatted_{part}_{kind}.npy": saved(arrays[kind][part]) for kind in arrays for part in arrays[kind]}
    info = {"name": name, "classes": source.classes, "image_folder": str(source.image_folder.resolve())}
    info |= {"published": source.published, "upright": source.upright}
    info["checksums"] = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    unfinished = folder / UNFINISHED
    if (folder / "dataset.json").exists() and not unfinished.exists():
        refuse_other_work(folder, info)
    make_folder(folder)
    unfinished.touch()
    write_json(folder / "dataset.json", info)
    for old in folder.glob("formatted_*.npy"):
        old.unlink()
    for file, content in files.items():
        with replacing(folder / file) as temporary:
            temporary.write_bytes(content)
    check_counts(folder)
    unfinished.unlink()


def saved(array):
    content = io.BytesIO()
    np.save(content, np.array(array))
    return content.getvalue()


def refuse_other_work(folder, info):
    """Ends the program where what is there was made from another folder of images, or changed since by hand"""
    old, fix = read_dataset(folder), "choose another --name, or move it away"
    if old["image_folder"] != info["image_folder"]:
        die(f"{folder} is the data set of {old['image_folder']}: {fix}")
    for path in sorted(folder.glob("formatted_*.npy")):
        if old.get("checksums", {}).get(path.name) != hashlib.sha256(path.read_bytes()).hexdigest():
            die(f"{path} was changed after {folder} was prepared: {fix}")


def read_dataset(folder):
    """dataset.json, which describes a prepared data set"""
    kinds = {"name": str, "classes": [str], "image_folder": str, "published": bool, "upright": bool}
    return read_json(folder / "dataset.json", f"{folder} is not prepared", **kinds, checksums={str: str})


def parts_of(folder):
    return [part for part in PARTS if (folder / f"formatted_{part}_images.npy").exists()]


def visit(images, what, target, rows, compare, finished=lambda rows: None):
    """Decodes the rows of `images` in several processes, into `target` or to compare with it; -> what went wrong"""
    how = images.size, images.upright, target, compare
    chunks = [rows[n : n + 64] for n in range(0, len(rows), 64)]
    jobs = [(images.image_folder, images.names[chunk], chunk, *how) for chunk in chunks]
    problems = []
    # forked, where that exists: a fresh interpreter for each worker would take seconds and hundreds of megabytes
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    # of the processes that Ctrl-C reaches, only the main one speaks
    workers = ProcessPoolExecutor(cores(), context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    with workers, tqdm(total=len(rows), desc=what, unit="img", leave=False, disable=None) as bar:
        try:
            for chunk, failed in workers.map(visit_chunk, jobs):
                finished([row for row in chunk if row not in failed])
                problems += failed.values()
                bar.update(len(chunk))
        except BrokenProcessPool:
            die("a decoding process was killed (out of memory or disk?): run this again to resume")
        except BaseException:
            workers.shutdown(wait=False, cancel_futures=True)
            raise
    return problems


def visit_chunk(job):
    image_folder, names, rows, size, upright, target, compare = job
    pixels = target and np.load(target, mmap_mode="r" if compare else "r+", allow_pickle=False)
    failed = {}
    for row, name in zip(rows, names):
        try:
            image = decode(image_folder / name, size, upright=upright)
        except UNREADABLE as problem:
            failed[row] = f"{image_folder / name}: {problem}"
            continue
        if target and not compare:
            pixels[row] = image
        elif target and not np.array_equal(pixels[row], image):
            failed[row] = f"{image_folder / name}: not the same pixels as in {target}"
    if target and not compare:
        pixels.flush()  # before they count as done
    return rows, failed


def file_times(images):
    times = (os.stat(images.image_folder / name).st_mtime_ns for name in images.names)
    return np.fromiter(times, np.int64, len(images.names))


def describe_cache(images, times):
    """What a cache was made of: the list of names, and the files behind it"""
    files = hashlib.sha256(str(images.image_folder).encode() + times.tobytes()).hexdigest()
    description = {"images": hash_names(images.names), "files": files}
    return description | ({"upright": True} if images.upright else {})


def drop_stale_caches(folder, image_folder, part, upright):
    """Deletes caches, of whatever size, that are of other images than the formatted file's."""
    images = SimpleNamespace(names=read_names(folder, part), image_folder=image_folder, upright=upright)
    now = describe_cache(images, file_times(images))
    for cache in folder.glob(f"cache_{part}_*.npy"):
        side, described = cache.stem.removeprefix(f"cache_{part}_"), cache.with_suffix(".json")
        if not side.isdigit():
            continue
        try:
            shape = len(images.names), int(side), int(side), 3
            whole = np.load(cache, mmap_mode="r", allow_pickle=False).shape == shape
        except Exception:  # cut off or damaged: numpy raises all sorts
            whole = False
        if not (whole and described.exists() and read_json(described, "") == now):
            print(f"note: {cache} was of other images, or damaged, and is deleted")
            cache.unlink()


def make_cache(images, what):
    """The pre-resized cache of one formatted file: goes on where it was stopped, takes its name when it is whole."""
    times = file_times(images)
    description = describe_cache(images, times)
    kind = [str(images.image_folder), *["upright"] * images.upright]
    stem = f"{images.cache.name}.{hash_names(chain(kind, images.names))[:8]}"
    partial, done_path = (images.cache.with_name(stem + ending) for ending in (".part", ".done"))
    for old in images.cache.parent.glob(f"{images.cache.name}.*"):  # of another list of images
        if old not in (partial, done_path):
            old.unlink()
    if not done_path.exists():  # it comes after the whole .part
        shape = len(images), images.size, images.size, 3
        pixels = np.lib.format.open_memmap(partial, "w+", np.uint8, shape)
        if hasattr(os, "posix_fallocate"):  # a full disk is to be met here, not in the middle
            with open(partial, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, pixels.nbytes + pixels.offset)
        with replacing(done_path) as temporary, open(temporary, "wb") as file:
            np.save(file, np.zeros(len(images), dtype=np.int64))
    done = np.lib.format.open_memmap(done_path, "r+")  # the time of the file that each row was made of, 0 before

    def finished(rows):
        done[rows] = times[rows]

    problems = visit(images, what, partial, np.flatnonzero(done != times), compare=False, finished=finished)
    if not problems:
        write_json(images.cache.with_suffix(".json"), description)
        sync(partial)
        os.replace(partial, images.cache)
        done_path.unlink()
    return problems


def check_counts(folder):
    """Compares with the numbers that are known of a data set."""
    info = read_dataset(folder)
    if info["name"] not in EXPECTED or not info["published"]:
        return
    classes, parts = EXPECTED[info["name"]]
    problems = []
    for part, (n_images, n_labels, per_image) in parts.items():
        y = read_array(folder / f"formatted_{part}_labels.npy", ndim=2)
        train_rows, _ = split_indices(len(y))
        if y.shape != (n_images, classes):
            problem = f"{len(y):,} images and {y.shape[1]} classes, not {n_images:,} and {classes}"
            problems.append(f"{part}: {problem} (files are missing, or it is another release)")
        elif n_labels and y.sum() != n_labels:
            problems.append(f"{part}: {int(y.sum()):,} labels, not {n_labels:,} (are 0, 'difficult', and 1 mixed up?)")
        elif per_image and abs(y[train_rows].sum(1).mean() - per_image) > 0.06:
            problems.append(f"{part}: {y[train_rows].sum(1).mean():.2f} positives per image, not {per_image}")
        elif part == "train":
            z = read_array(folder / "formatted_train_labels_obs.npy", ndim=2)
            first = z[: len(VOC_DRAWS)].argmax(1).tolist()
            if not np.array_equal(z, draw_single_positives(y)) or (info["name"] == "voc" and first != VOC_DRAWS):
                problems.append("train: the observed labels are not the published draw")
    if problems:
        die(f"{folder} differs from the published data set: {'; '.join(problems)}")


def summarise(folder):
    classes = read_dataset(folder)["classes"]
    for part in parts_of(folder):
        full, observed = (folder / f"formatted_{part}_{kind}.npy" for kind in ("labels", "labels_obs"))
        y = read_array(full if full.exists() else observed, ndim=2)
        count = y.sum(0).astype(int)
        order = np.argsort(count, kind="stable")
        named = [printable(f"{classes[c]} {count[c]:,}") for c in order]
        kind = "positives" if full.exists() else "known positives"
        print(
            f"{PARTS[part]} file: {len(y):,} images, {len(classes)} classes, {y.sum(1).mean():.2f} {kind} per image, "
            f"{int((y.sum(1) == 0).sum()):,} images without one\n"
            f"  rarest: {', '.join(named[:3])}; most frequent: {', '.join(named[:-4:-1])}"
        )


def prepare(args):
    """Makes what is missing, checks what there is; -> the data set's folder"""
    name = args.name if args.dataset == "custom" else args.dataset + "_all" * args.keep_empty
    if args.keep_empty and args.dataset != "coco":
        die("--keep_empty is for coco")
    if args.dataset == "custom" and name in (*EXPECTED, "scenes"):
        die(f"--name {name}: that is the name of a published data set, choose another")
    if not re.fullmatch(r"\w[\w.-]*", name):
        die(f"--name {name!r}: give your data set a name of its own, of letters, digits, - and _")
    if args.image_size < 0:
        die(f"--image_size must be at least 0, not {args.image_size}")
    if args.skip_damaged and args.dataset != "custom":
        die(f"--skip_damaged is for your own photos: {args.dataset} must be complete to be comparable")
    folder = Path(args.data_root) / name
    ready = (folder / "dataset.json").exists() and not (folder / UNFINISHED).exists()
    if args.check and not ready:
        die(f"{folder} is not prepared: run this without --check")
    if args.dataset == "scenes":
        scenes.make(folder)
        return folder
    source = read_custom(args) if args.dataset == "custom" and not args.check else None  # a mistake leaves no folder
    with nullcontext() if args.check else lock(folder):
        if args.check:
            check_counts(folder)
        elif source or not ready:
            write_source(folder, name, source or read_source(args))
        fill_cache(args, folder)
    return folder


def fill_cache(args, folder):
    """The image cache, or with --check or --no_cache a look at every image"""
    info = read_dataset(folder)
    size, upright = args.image_size or CACHE_SIZE, info.get("upright", False)
    image_folder = folder / info["image_folder"]
    names = {part: read_names(folder, part) for part in parts_of(folder)}
    paths = (image_folder / name for part in names for name in names[part])
    if missing := [str(path) for path in paths if not path.is_file()]:
        listed = "\n  ".join(missing[:1000])
        die(f"{len(missing)} images are missing; put them back and run this again:\n  {listed}")
    if not args.check:
        for part in names:
            drop_stale_caches(folder, image_folder, part, upright)
    parts = {part: Images(folder, image_folder, part, size, upright) for part in names}
    to_cache = [images for images in parts.values() if not images.cached]
    sparing = args.dataset == "custom" and not args.image_size
    wanted = args.cache and not args.check and plan_cache(folder, to_cache, sparing)
    damaged = []
    for part, images in parts.items():
        if not wanted:
            target = images.cache if images.cached else None
            damaged += visit(images, f"checking {part}", target, np.arange(len(images)), compare=True)
        elif not images.cached:
            damaged += make_cache(images, f"resizing {part}")
    if damaged:
        listed = "\n  ".join(sorted(damaged))
        skip = ", or leave them out with --skip_damaged," if args.dataset == "custom" else ""
        die(f"{len(damaged)} images can't be read; replace them{skip} and run this again:\n  {listed}")


def plan_cache(folder, to_cache, sparing):
    """Says what the cache takes; -> False where `sparing` and this is over 20 times what the photos take"""
    need = sum(len(images) * images.size**2 * 3 for images in to_cache)
    files = sum(os.path.getsize(images.image_folder / name) for images in to_cache for name in images.names)
    if sparing and need > 20 * files:
        size = f"{need / 1e9:.1f} GB, {need / files:.0f} times the size of the photos"
        print(
            f"no image cache: {size}; the scripts read the photos themselves (--image_size {CACHE_SIZE} forces a cache)"
        )
        return False
    there = sum(path.stat().st_blocks * 512 for path in folder.glob("cache_*.part"))
    free = shutil.disk_usage(folder).free
    if need:
        print(f"the image cache takes {need / 1e9:.1f} GB; {free / 1e9:.0f} GB are free", flush=True)
    if need - there > free:
        die("the disk is too small for the image cache: use --no_cache, or choose a smaller --image_size")
    return True


def read_source(args):
    if args.dataset == "nus":
        return read_nus(Path(args.raw or Path(args.data_root) / "nus" / "raw"))
    root = fetch(args)
    try:
        if args.dataset == "voc":
            return read_voc(root, {"train": "train", "val": "val"})
        if args.dataset == "voc2007":
            return read_voc(root, {"train": "trainval", "val": "test"}, keep_empty=True)  # the usual 5,011 / 4,952
        return read_coco(root, args.keep_empty) if args.dataset == "coco" else read_cub(root)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as problem:
        die(f"{root} is not in the layout of {args.dataset}: {problem!r}")


# ---- 6. A look at the data


def contact_sheet(folder, size, path, side=5):
    """side x side random training images, their true labels, the observed one marked."""
    info = read_dataset(folder)
    full = folder / "formatted_train_labels.npy"
    images = Images(folder, folder / info["image_folder"], "train", size, info.get("upright", False))
    y = read_labels(full, len(images)) if full.exists() else None
    z = observed_labels(folder, len(images), y, known_ratio=0)
    y = z if y is None else y
    chosen = np.sort(np.random.RandomState(0).choice(len(images), min(side * side, len(images)), replace=False))
    figure, axes = pyplot().subplots(side, side, figsize=(2 * side, 2.3 * side), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, row, image in zip(axes.flat, chosen, images[chosen]):
        observed = [name for name, seen in zip(info["classes"], z[row]) if seen]
        hidden = [name for name, true, seen in zip(info["classes"], y[row], z[row]) if true and not seen]
        axis.imshow(image)
        axis.set_title("\n".join(observed), fontsize=9, fontweight="bold", color="tab:green", loc="left", pad=3)
        axis.text(0, -0.04, ", ".join(hidden), fontsize=7, color="grey", va="top", transform=axis.transAxes, wrap=True)
    save_figure(figure, path)


def next_command(args, folder):
    script = "em_apl.py" if args.dataset == "custom" else "an.py"  # your own photos want more than the baseline
    words = ["python", str(Path(sys.argv[0]).with_name(script)), "--dataset", folder.name]
    words += ["--data_root", args.data_root] * (args.data_root != Args.data_root)
    words += ["--image_size", str(args.image_size)] * (args.image_size > 0 and args.dataset != "scenes")
    return shlex.join(words)


# ---- 7. Go

if __name__ == "__main__":
    sys.excepthook = explain
    args = tyro.cli(Args, use_underscores=True, description=__doc__)
    try:
        folder = prepare(args)
        summarise(folder)
        if args.contact_sheet:
            size = scenes.SIDE if args.dataset == "scenes" else args.image_size or CACHE_SIZE
            contact_sheet(folder, size, args.contact_sheet)
        if not args.check:
            print(f"next: {next_command(args, folder)}")
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        sys.exit(130)
