"""Prepares data sets: from nothing, or from what you have downloaded, to the files that every script reads.

    python data_prep.py voc
    python data_prep.py voc --raw /data/VOCdevkit --image_size 224 --contact_sheet voc.png
    python data_prep.py custom --name pets --images photos --labels labels.csv --val val.csv --test test.csv

Writes formatted_*.npy, dataset.json and the image cache into <data_root>/<data set>, then checks and describes them.
Safe to kill and to run again: it does what is missing. `--check` only looks.

`scenes` is made by the code below: pictures of twenty objects on cluttered backgrounds, for real training without a
download. Everyone gets the same files: all randomness comes from numpy's frozen RandomState, all pixels from integer
arithmetic and from the pinned Pillow and matplotlib (whose DejaVu font draws the objects).
"""

import csv
import hashlib
import http.client
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import matplotlib
import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm, trange

import common

# ---- 1. Settings


@dataclass
class Args:
    dataset: tyro.conf.Positional[Literal["scenes", "voc", "voc2007", "coco", "nus", "cub", "custom"]]
    data_root: str = "data"  # the data set goes into a folder of its own in here
    raw: str = ""  # archives or extracted files that you have, if not in <data_root>/<data set>/raw
    image_size: int = 448  # of the image cache
    cache: bool = True  # --no_cache saves disk: the scripts then decode the files in every epoch
    check: bool = False  # only verify what is there, every image included
    contact_sheet: str = ""  # also write a picture of 5 x 5 training images with their labels
    name: str = ""  # custom: what --dataset will call it
    images: str = ""  # custom: the folder of your images
    labels: str = ""  # custom: CSV of the training images: image,label
    val: str = ""  # custom: CSV of fully labelled validation images: image,label1;label2;...
    test: str = ""  # custom: CSV of fully labelled test images
    classes: str = ""  # custom: a file with a class a line, or names joined by commas, if not all that occur
    from_folders: bool = False  # custom: one sub-folder of --images per class, instead of --labels


# ---- 2. Scenes

SCENES_VERSION = 1  # part of every image's seed: raise it when anything below changes
SCENES_SIZE = {"train": 4000, "val": 2000}
SIDE = 64
OBJECTS = {  # class: (glyph, its usual colour, how often it comes up)
    "airplane": ("\u2708", (90, 150, 220), 12),
    "anchor": ("\u2693", (40, 60, 120), 8),
    "cloud": ("\u2601", (235, 235, 245), 36),
    "crown": ("\u265b", (230, 190, 60), 4),
    "cup": ("\u2615", (130, 80, 50), 20),
    "dice": ("\u2684", (240, 240, 240), 3),
    "envelope": ("\u2709", (240, 220, 180), 12),
    "flag": ("\u2691", (210, 60, 60), 16),
    "flower": ("\u273f", (240, 140, 190), 28),
    "gear": ("\u2699", (120, 120, 120), 4),
    "heart": ("\u2665", (220, 40, 70), 18),
    "horse": ("\u265e", (90, 60, 40), 8),
    "moon": ("\u263e", (240, 230, 150), 14),
    "pencil": ("\u270f", (250, 170, 60), 10),
    "scissors": ("\u2702", (170, 180, 190), 6),
    "snowman": ("\u2603", (220, 240, 250), 6),
    "star": ("\u2605", (250, 210, 80), 24),
    "sun": ("\u2600", (250, 190, 40), 40),
    "telephone": ("\u260e", (30, 30, 30), 8),
    "umbrella": ("\u2602", (130, 60, 170), 22),
}
CLASSES = list(OBJECTS)
THEMES = (  # what often comes together
    ("sun", "cloud", "airplane", "flag"),
    ("sun", "umbrella", "anchor", "flag"),
    ("pencil", "scissors", "envelope", "telephone", "gear"),
    ("heart", "crown", "horse", "dice"),
    ("moon", "star", "cloud", "snowman"),
    ("cup", "flower", "heart", "envelope"),
)
THEME_BOOST = 8
OBJECTS_PER_IMAGE = np.repeat((1, 2, 3, 4, 5), (27, 27, 22, 14, 10))
CLUTTER = "ABEFGHKMQRSWZ2345789&%#@?$"


def draw_labels(rs):
    """One image's labels (C,): a theme makes its classes likelier, the rest is the classes' own frequency."""
    theme = THEMES[rs.randint(len(THEMES))]
    weight = np.array([often * (THEME_BOOST if name in theme else 1) for name, (_, _, often) in OBJECTS.items()])
    y = np.zeros(len(CLASSES), dtype=np.uint8)
    for _ in range(OBJECTS_PER_IMAGE[rs.randint(len(OBJECTS_PER_IMAGE))]):
        thresholds = np.cumsum(weight * (y == 0))
        y[np.searchsorted(thresholds, rs.randint(thresholds[-1]), side="right")] = 1
    return y


@dataclass
class Stamp:
    """One glyph in a scene, all in whole numbers: no version of any library changes a layout."""

    glyph: str
    size: int
    opacity: int  # percent
    angle: int  # degrees
    stretch: int  # of the width, percent; negative: mirrored
    middle: list  # x, y
    inks: list  # colours to try in turn until one shows on what is below


def draw_layout(rs, y):
    """Which glyphs an image of y shows, in the order they are drawn"""

    def stamp(glyph, sizes, opacities, colour=None):
        size = int(rs.randint(*sizes))
        usual = (rs.randint(5, size=(8, 1)) > 0) & (colour is not None)  # one object in five has any colour
        near = np.clip(np.array(colour or (0, 0, 0)) + rs.randint(-60, 61, (8, 3)), 0, 255)
        return Stamp(
            glyph,
            size,
            opacity=int(rs.randint(*opacities)),
            angle=int(rs.randint(-20, 21)),
            stretch=int(rs.randint(85, 118) * (1 if rs.randint(2) else -1)),
            middle=rs.randint(size * 2 // 5, SIDE - size * 2 // 5 + 1, 2).tolist(),
            inks=np.where(usual, near, rs.randint(0, 256, (8, 3))).tolist(),
        )

    clutter = lambda sizes: [stamp(CLUTTER[rs.randint(len(CLUTTER))], sizes, (60, 101)) for _ in range(rs.randint(2))]
    shown = np.repeat(np.flatnonzero(y), 1 + (rs.randint(5, size=y.sum()) == 0))  # one in five objects comes twice
    objects = [OBJECTS[CLASSES[c]] for c in rs.permutation(shown)]
    below = clutter((12, 28))
    return below + [stamp(glyph, (22, 37), (80, 101), colour) for glyph, colour, _ in objects] + clutter((8, 18))


def draw_scene(rs, layout):
    """-> uint8 (SIDE, SIDE, 3)"""
    canvas = draw_background(rs)
    for stamp in layout:
        draw_stamp(rs, canvas, stamp)
    return canvas.astype(np.uint8)


def draw_background(rs):
    """Smooth noise of three scales around one muted colour, lines, arcs and boxes of like colours, grain."""
    colour = rs.randint(50, 206) + rs.randint(-35, 36, 3)
    canvas = np.zeros((SIDE, SIDE, 1), dtype=np.int64)
    for grid, strength in ((2, 45), (6, 35), (16, 30)):
        noise = Image.fromarray(rs.randint(0, 256, (grid, grid)).astype(np.uint8))
        canvas[..., 0] += (np.asarray(noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.int64) - 128) * strength
    image = Image.fromarray(np.clip(colour + canvas // 100, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for _ in range(rs.randint(2, 8)):
        left, top, right, bottom = (*rs.randint(-8, SIDE, 2).tolist(), *rs.randint(8, SIDE + 8, 2).tolist())
        ink = tuple(np.clip(colour + rs.randint(-60, 61, 3), 0, 255).tolist())
        kind, width = rs.randint(3), int(rs.randint(1, 4))
        if kind == 0:
            pen.line((left, top, right, bottom), ink, width)
        elif kind == 1:
            pen.arc((left, top, left + right, top + bottom), *rs.randint(360, size=2).tolist(), ink, width)
        else:
            pen.rectangle((left, top, left + 2 + right // 5, top + 2 + bottom // 5), ink)
    return np.clip(np.asarray(image, np.int64) + rs.randint(-12, 13, (SIDE, SIDE, 3)), 0, 255)


def draw_stamp(rs, canvas, stamp):
    """Draws a glyph onto the canvas, in place."""
    fine, box = 4, stamp.size * 3 // 2  # drawn four times as fine, in a box with room to turn
    cos, sin = (round(f(math.radians(stamp.angle)), 9) for f in (math.cos, math.sin))
    down = GLYPH_SIDE / (stamp.size * fine)
    across = down * stamp.stretch / 100
    a, b, d, e = cos * across, sin * across, -sin * down, cos * down
    middle_in, middle_out = GLYPH_SIDE / 2, box * fine / 2
    matrix = (a, b, middle_in - (a + b) * middle_out, d, e, middle_in - (d + e) * middle_out)
    turned = glyph_mask(stamp.glyph).transform((box * fine, box * fine), Image.Transform.AFFINE, matrix)
    mask = np.asarray(turned.reduce(fine), np.int64)[..., None] * stamp.opacity // 100

    left, top = (at - box // 2 for at in stamp.middle)
    inside = slice(max(top, 0), min(top + box, SIDE)), slice(max(left, 0), min(left + box, SIDE))
    mask = mask[inside[0].start - top : inside[0].stop - top, inside[1].start - left : inside[1].stop - left]
    below = canvas[inside]
    brightness = below.sum((0, 1)) @ BRIGHTNESS // (below.size // 3)
    shows = np.abs(np.array(stamp.inks) @ BRIGHTNESS - brightness) > 550
    ink = stamp.inks[shows.argmax() if shows.any() else -1]
    grain = np.clip(ink + rs.randint(-12, 13, below.shape), 0, 255)
    canvas[inside] = (below * (255 - mask) + grain * mask) // 255


GLYPH_SIDE = 128
BRIGHTNESS = np.array((3, 6, 1))  # of red, green and blue


@cache
def glyph_mask(glyph):
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 120)
    left, top, right, bottom = font.getbbox(glyph)
    side = max(right - left, bottom - top) + 4
    image = Image.new("L", (side, side))
    corner = (side - right - left) // 2, (side - bottom - top) // 2
    ImageDraw.Draw(image).text(corner, glyph, 255, font)
    return image.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.BOX)


def scene(part, i):
    """Image i of a part ("train" or "val"): its random state, labels and layout"""
    rs = np.random.RandomState((SCENES_VERSION, list(SCENES_SIZE).index(part), i))
    y = draw_labels(rs)
    return rs, y, draw_layout(rs, y)


def make_scenes(folder):
    """Writes the data set into `folder`, all or nothing; does nothing when it is there."""
    info = {"name": "scenes", "version": SCENES_VERSION, "classes": CLASSES, "image_folder": "images"}
    if folder.exists():
        found = common.read_json(folder / "dataset.json", f"{folder} exists but holds no scenes: move it away")
        if found == info:
            return
        if found.get("name") != "scenes":
            common.die(f"{folder} holds another data set: move it away, or choose another --data_root")
    common.make_folder(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=".scenes-", dir=folder.parent))
    building.chmod(0o755)
    with tqdm(total=sum(SCENES_SIZE.values()), desc="making scenes", unit="img", leave=False, disable=None) as bar:
        for part, n in SCENES_SIZE.items():
            (building / "images" / part).mkdir(parents=True)
            names = np.array([f"{part}/{i:05d}.png" for i in range(n)])
            y = np.zeros((n, len(CLASSES)), dtype=np.uint8)
            pixels = np.zeros((n, SIDE, SIDE, 3), dtype=np.uint8)
            for i in range(n):
                rs, y[i], layout = scene(part, i)
                pixels[i] = draw_scene(rs, layout)
                Image.fromarray(pixels[i]).save(building / "images" / names[i], compress_level=1)
                bar.update()
            np.save(building / f"formatted_{part}_images.npy", names)
            np.save(building / f"formatted_{part}_labels.npy", y)
            np.save(building / f"formatted_{part}_labels_obs.npy", common.draw_single_positives(y))
            np.save(building / f"cache_{part}_{SIDE}.npy", pixels)
            common.write_json(building / f"cache_{part}_{SIDE}.json", {"images": common.hash_names(names)})
    put_in_place(building, folder, "dataset.json", info)


def put_in_place(building, folder, name, description):
    """building, whole but for its description, becomes folder, unless another process has made the same meanwhile."""
    common.write_json(building / name, description)
    if (folder / name).exists() and json.loads((folder / name).read_text()) == description:
        shutil.rmtree(building)
        return
    if folder.exists():
        shutil.rmtree(folder)  # of another version
    try:
        building.rename(folder)
    except OSError:
        shutil.rmtree(building)
        if not folder.exists():  # else another process was first
            raise


CLIP = {  # the small CLIP of scenes, as open_clip describes a model; 2 million weights, most of them words
    "scenes": {"version": SCENES_VERSION, "batches": 200, "passes": 8, "pairs": 12, "lr": 3e-3},
    "model_cfg": {
        "embed_dim": 64,
        "vision_cfg": {
            "timm_model_name": "test_resnet",
            "timm_model_pretrained": False,
            "timm_pool": "avg",
            "timm_proj": "linear",
            "image_size": SIDE,
        },
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25], "resize_mode": "squash"},
}


def captioned_scene(i, batch):
    """Image i of a stream of its own, which shares nothing with the data set, and its caption. A batch of images has
    every class alone once, every other time from near; the rest are two classes together."""
    rs = np.random.RandomState((SCENES_VERSION, len(SCENES_SIZE), i))
    alone = i % batch < len(CLASSES)
    shown = [i % batch] if alone else rs.permutation(len(CLASSES))[:2].tolist()
    y = np.zeros(len(CLASSES), dtype=np.uint8)
    y[shown] = 1
    layout = draw_layout(rs, y)
    image = Image.fromarray(draw_scene(rs, layout))
    if alone and rs.randint(2):
        window = rs.randint(SIDE // 2, SIDE)
        middle = next(stamp.middle for stamp in layout if stamp.glyph == OBJECTS[CLASSES[shown[0]]][0])
        left, top = (min(max(at - window // 2, 0), SIDE - window) for at in middle)
        box = (left, top, left + window, top + window)
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
    things = [f"{'an' if CLASSES[c][0] in 'aeiou' else 'a'} {CLASSES[c]}" for c in shown]
    return np.asarray(image), f"a photo of {' and '.join(things)}"


def make_scenes_clip(folder):
    """Trains the CLIP of scenes into `folder` (for local-dir:), all or nothing; does nothing when it is there.

    It sees captioned images of a separate stream, never the data set's images or labels.
    """
    if folder.exists():
        found = common.read_json(folder / "open_clip_config.json", f"{folder} exists but holds no CLIP: move it away")
        if found == CLIP:
            return
        if "scenes" not in found:
            common.die(f"{folder} holds another CLIP: move it away, or choose another --data_root")
    import open_clip
    import torch
    from safetensors.torch import save_file

    how, n_classes = CLIP["scenes"], len(CLASSES)
    batch, steps = n_classes + how["pairs"], how["batches"] * how["passes"]
    print("training a small CLIP for scenes, once: about two minutes", file=sys.stderr)
    images = trange(how["batches"] * batch, desc="drawing captioned scenes", unit="img", leave=False, disable=None)
    pixels, captions = zip(*(captioned_scene(i, batch) for i in images))
    pixels = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    tokens = open_clip.SimpleTokenizer(context_length=CLIP["model_cfg"]["text_cfg"]["context_length"])(list(captions))
    mean, std = (torch.tensor(CLIP["preprocess_cfg"][what]).view(3, 1, 1) for what in ("mean", "std"))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SCENES_VERSION)
        net = open_clip.CLIP(**CLIP["model_cfg"])
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how["lr"], steps)
        contrast = open_clip.ClipLoss()
        bar = trange(steps, desc="training CLIP on them", leave=False, disable=None)
        for step in bar:
            if step % how["batches"] == 0:  # batches keep one of each kind
                order = torch.stack([torch.randperm(how["batches"]) for _ in range(batch)], 1)
            rows = order[step % how["batches"]] * batch + torch.arange(batch)
            x = (pixels[rows].float() / 255 - mean) / std
            x = torch.where(torch.rand(batch, 1, 1, 1) < 0.5, x.flip(3), x)
            loss = contrast(*net(x, tokens[rows])[:3])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                net.logit_scale.clamp_(0, math.log(100))  # as CLIP's authors do
            if step % 20 == 0:
                bar.set_postfix(loss=f"{loss.item():.2f}")

    common.make_folder(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=".scenes-clip-", dir=folder.parent))
    building.chmod(0o755)
    save_file(net.state_dict(), building / "open_clip_model.safetensors")
    put_in_place(building, folder, "open_clip_config.json", CLIP)


# ---- 3. Official data sets: download, extract, read

OXFORD = "https://thor.robots.ox.ac.uk/pascal/VOC"
ARCHIVES = {  # data set: [(address, md5 where one is published)]
    "voc": [(f"{OXFORD}/voc2012/VOCtrainval_11-May-2012.tar", "6cd6e144f989b92b3379bac3b3de84fd")],
    "voc2007": [
        (f"{OXFORD}/voc2007/VOCtrainval_06-Nov-2007.tar", "c52e279531787c972589f7e41ab4ae64"),
        (f"{OXFORD}/voc2007/VOCtest_06-Nov-2007.tar", "b6e924de25625d8de591ea690078ad9f"),
    ],
    "coco": [  # http: the host's certificate is for another name
        ("http://images.cocodataset.org/annotations/annotations_trainval2014.zip", ""),
        ("http://images.cocodataset.org/zips/train2014.zip", ""),
        ("http://images.cocodataset.org/zips/val2014.zip", ""),
    ],
    "cub": [("https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz", "")],
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
        common.die(f"--raw {raw} is not a folder (to download into it, make it first)")
    root = None if list(raw.glob("*.extracting")) else find_root(raw, args.dataset)
    if root:
        return root
    for address, md5 in ARCHIVES[args.dataset]:
        archive = raw / address.rsplit("/", 1)[1]
        extracting, extracted = (archive.with_name(archive.name + ending) for ending in (".extracting", ".extracted"))
        if not extracted.exists():
            download(address, archive, md5)
            extracting.touch()  # stays behind when the extraction is cut off
            extract(archive, raw)
            extracting.replace(extracted)
    root = find_root(raw, args.dataset)
    if not root:
        common.die(f"{raw} was filled but lacks {', '.join(MARKERS[args.dataset])}: another release of {args.dataset}?")
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
    common.make_folder(path.parent)
    by_hand = f"download {address} in another way and put it at {path}"
    partial = path.with_name(path.name + ".part")
    for attempt in range(0 if path.exists() else tries):
        try:
            download_rest(address, partial)
            os.replace(partial, path)
            break
        except (OSError, http.client.HTTPException) as problem:  # urllib's errors are OSErrors
            refused = isinstance(problem, urllib.error.HTTPError) and problem.code < 500
            if refused or attempt == tries - 1:
                common.die(f"{address} can't be downloaded ({problem}): {by_hand}")
            time.sleep(2**attempt / 4)
    if md5:
        with open(path, "rb") as file:
            digest = hashlib.md5()
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != md5:
            path.unlink()
            common.die(f"{path} was not the published file (md5 {digest.hexdigest()}) and is deleted: {by_hand}")


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
            raise ConnectionError(f"{file.tell()} of {total} bytes came")


def extract(archive, folder):
    """Unpacks a tar or zip; members that would land outside the folder are refused."""
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as pack:
                members = pack.infolist()
                outside = [
                    m.filename for m in members if not (folder / m.filename).resolve().is_relative_to(folder.resolve())
                ]
                if outside:
                    common.die(f"{archive} would write outside {folder}: {outside[0]}")
                for member in tqdm(members, f"extracting {archive.name}", leave=False, disable=None):
                    pack.extract(member, folder)
        else:
            with tarfile.open(archive) as pack:
                for member in tqdm(pack, f"extracting {archive.name}", leave=False, disable=None):
                    pack.extract(member, folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error) as problem:
        common.die(f"{archive} is damaged or unsafe ({problem}): delete it and run this again")
    except OSError as problem:
        common.die(f"{folder} can't be written: {problem}")


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


def read_coco(root):
    """Crowd annotations count; images without annotations drop out; rows in the order of the ids as strings."""
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
            common.die(f"{path} has other categories than the training file")
        for image, category in found:
            rows.setdefault(image, set()).add(column[category][0])
        order = sorted(rows, key=str)
        names[part] = [f"{part}2014/{files[image]}" for image in order]
        labels[part] = np.zeros((len(order), len(column)), dtype=np.uint8)
        for row, image in enumerate(order):
            labels[part][row, list(rows[image])] = 1
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
                    common.die(f"{path} ends too early: it is only a part of the file")

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
                    common.die(f"{path} is not a whole JSON file")
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
        common.die(
            f"{root.parent / 'attributes.txt'} is missing: it is in CUB_200_2011.tgz beside the CUB_200_2011 folder"
        )
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
  (1) the authors' formatted_{{train,val}}_{{images,labels}}.npy (zenodo.org/records/10162606: Cole et al.'s re-crawl),
      the official ConceptsList/Concepts81.txt (the names of the classes) and the images in a folder images/
  (2) the official lists: ImageList/{{Train,Test}}Imagelist.txt, TrainTestLabels/Labels_<concept>_{{Train,Test}}.txt and
      ConceptsList/Concepts81.txt, and the images in a folder images/ (on request from NUS)
and run this again. The two are different images: their results can't be compared."""


def read_nus(raw):
    names, labels, concepts = {}, {}, raw / "ConceptsList/Concepts81.txt"
    if (raw / "formatted_train_images.npy").exists():
        for part in ("train", "val"):
            names[part] = [str(name) for name in common.read_array(raw / f"formatted_{part}_images.npy", ndim=1)]
            labels[part] = common.read_labels(raw / f"formatted_{part}_labels.npy", len(names[part]))
        return Source(read_lines(concepts), raw / "images", names, labels)
    if not (raw / "ImageList/TrainImagelist.txt").exists():
        common.die(NUS_HELP.format(raw=raw))
    classes = read_lines(concepts)
    for part, official in (("train", "Train"), ("val", "Test")):
        names[part] = [line.replace("\\", "/") for line in read_lines(raw / f"ImageList/{official}Imagelist.txt")]
        columns = [read_lines(raw / f"TrainTestLabels/Labels_{name}_{official}.txt") for name in classes]
        uneven = [name for name, column in zip(classes, columns) if len(column) != len(names[part])]
        if uneven:
            common.die(f"Labels_{uneven[0]}_{official}.txt has not as many lines as {official}Imagelist.txt")
        labels[part] = (np.array(columns) == "1").T.astype(np.uint8)
    print("note: the official lists have other images than the 150,000 / 60,260 of the papers: no count to check")
    return Source(classes, raw / "images", names, labels, published=False)


def read_lines(path):
    try:
        return [line.strip() for line in Path(path).read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        common.die(f"{path} can't be read: {problem}")


# ---- 4. Your own images

IMAGE_ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff")


def read_custom(args):
    """labels.csv (image, its one known label) or class folders; val.csv and test.csv (image, all labels joined by ;)"""
    folder, problems, tables = Path(args.images), [], {}
    if not args.images or not folder.is_dir():
        common.die(f"--images {args.images!r} is not a folder")
    if args.from_folders and args.labels:
        common.die("--labels and --from_folders both say what the labels are: leave one out")
    if args.from_folders:
        names = in_class_folders(folder)
        tables["train"] = [(name, [name.split("/")[0]], f"{folder / name}") for name in names]
    elif args.labels:
        tables["train"] = read_table(args.labels, folder, problems)
    else:
        common.die("say which label is known of each image: --labels labels.csv, or --from_folders")
    for part, path in (("valid", args.val), ("val", args.test)):
        if path:
            tables[part] = read_table(path, folder, problems)

    seen = {}
    for part, table in tables.items():
        for image, labels, place in table:
            if image in seen:
                problems.append(f"{place}: {image} comes again (first at {seen[image]})")
            seen.setdefault(image, place)
            if not labels and part == "train":  # of the others it may be known that none applies
                problems.append(f"{place}: {image} has no label")
    problems += [
        f"{place}: a training image has one known label, not {len(labels)} ({'; '.join(labels)})"
        for _, labels, place in tables["train"]
        if len(labels) > 1
    ]
    known = {label for _, labels, _ in tables["train"] for label in labels}
    if args.classes:
        given = read_lines(args.classes) if os.path.isfile(args.classes) else args.classes.split(",")
        classes = [name.strip() for name in given]
        problems += [f"--classes names {name!r} twice" for name in sorted(set(classes)) if classes.count(name) > 1]
    else:
        classes = sorted(known.union(*(labels for table in tables.values() for _, labels, _ in table)))
    for table in tables.values():
        problems += [
            f"{place}: {label!r} is not one of the {len(classes)} classes"
            for _, labels, place in table
            for label in labels
            if label not in classes
        ]
    problems += [f"class {name!r} has no training example" for name in classes if name not in known]
    if not tables["train"]:
        problems.append("there is no training image")
    if problems:
        shown = "\n  ".join(problems[:200])
        more = f"\n  ... and {len(problems) - 200} more" if len(problems) > 200 else ""
        common.die(f"{len(problems)} problems, nothing was written:\n  {shown}{more}")

    names = {part: [image for image, _, _ in table] for part, table in tables.items()}
    labels = {}
    for part, table in tables.items():
        labels[part] = np.zeros((len(table), len(classes)), dtype=np.uint8)
        for row, (_, found, _) in enumerate(table):
            labels[part][row, [classes.index(label) for label in found]] = 1
    return Source(classes, folder.resolve(), names, labels, {"train": labels.pop("train")}, upright=True)


def in_class_folders(folder):
    """Names of the images in sub-folders, hidden ones left out; says what else there is and is not taken."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = [path for path in files if not any(part.startswith((".", "__")) for part in path.parts)]
    wanted = lambda path: len(path.parts) > 1 and path.suffix.lower() in IMAGE_ENDINGS
    left = [path for path in files if not wanted(path)]
    if left:
        listed = ", ".join(map(common.printable, left[:5])) + (", ..." if len(left) > 5 else "")
        print(f"left out: {len(left)} files that are in no class's folder or have no image's ending: {listed}")
    return [path.as_posix() for path in files if wanted(path)]


def read_table(path, folder, problems):
    """[(image, labels, "file:line")] of a CSV; what is wrong with a line goes to `problems`."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [(f"{path}:{number}", line) for number, line in enumerate(csv.reader(file), 1) if any(line)]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        common.die(f"{path} can't be read: {problem}")
    if lines and lines[0][1][0].strip().lower() == "image":
        place, header = lines.pop(0)
        unknown = [name for name in header[1:] if name.strip().lower() not in ("label", "labels")]
        if unknown or len(header) != 2:
            problems.append(f"{place}: the columns are image,label; unknown: {', '.join(unknown) or 'none'}")
    table = []
    for place, line in lines:
        if len(line) != 2:
            problems.append(f"{place}: two columns (image,label), not {len(line)}")
            continue
        image = Path(os.path.normpath(line[0].strip())).as_posix()
        if not Path(os.path.realpath(folder / image)).is_relative_to(os.path.realpath(folder)):
            problems.append(f"{place}: {image} is outside {folder}")
        elif not os.path.isfile(folder / image):
            problems.append(f"{place}: there is no {folder / image}")
        table.append((image, [label.strip() for label in line[1].split(";") if label.strip()], place))
    return table


# ---- 5. Write, cache, check

EXPECTED = {  # data set: (classes, part: (images, labels or None, positives per training image or None))
    "voc": (20, {"train": (5717, 8331, 1.46), "val": (5823, 8351, None)}),
    "voc2007": (20, {"train": (5011, None, None), "val": (4952, None, None)}),
    "coco": (80, {"train": (82081, None, 2.94), "val": (40137, None, None)}),
    "nus": (81, {"train": (150000, None, 1.89), "val": (60260, None, None)}),
    "cub": (312, {"train": (5994, None, 31.4), "val": (5794, None, None)}),
}
VOC_DRAWS = [12, 4, 11, 19, 6, 0, 14, 0, 10, 18, 11, 7]  # the observed classes of the first training images


def write_source(folder, name, source):
    """The formatted files, checked. Until they are right a marker forbids their use."""
    if list(folder.glob("formatted_*.npy")) and not (folder / "dataset.json").exists():
        common.die(
            f"{folder} holds formatted files that were not made here: move them, or use them with --dataset {folder}"
        )
    common.make_folder(folder)
    unfinished = folder / common.UNFINISHED
    unfinished.touch()
    observed = source.observed or {part: common.draw_single_positives(y) for part, y in source.labels.items()}
    info = {"name": name, "classes": source.classes, "image_folder": str(source.image_folder.resolve())}
    common.write_json(folder / "dataset.json", info | {"published": source.published, "upright": source.upright})
    for old in folder.glob("formatted_*.npy"):
        old.unlink()
    for kind, parts in (("images", source.names), ("labels", source.labels), ("labels_obs", observed)):
        for part, content in parts.items():
            np.save(folder / f"formatted_{part}_{kind}.npy", np.array(content))
    check_counts(folder)
    unfinished.unlink()


def parts_of(folder):
    return [part for part in ("train", "valid", "val") if (folder / f"formatted_{part}_images.npy").exists()]


def visit(images, what, target, rows, compare, finished=lambda rows: None):
    """Decodes the rows of `images` in several processes, into `target` or to compare with it; -> what went wrong"""
    jobs = [
        (
            images.image_folder,
            [images.names[row] for row in rows[n : n + 64]],
            rows[n : n + 64],
            images.size,
            images.upright,
            target,
            compare,
        )
        for n in range(0, len(rows), 64)
    ]
    problems = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    # forked, where that exists: a fresh interpreter for each worker would take seconds and hundreds of megabytes
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    workers = ProcessPoolExecutor(cores, context, initializer=common.ignore_ctrl_c, initargs=(0,))
    with workers, tqdm(total=len(rows), desc=what, unit="img", leave=False, disable=None) as bar:
        try:
            for chunk, failed in workers.map(visit_chunk, jobs):
                finished([row for row in chunk if row not in failed])
                problems += failed.values()
                bar.update(len(chunk))
        except BrokenProcessPool:
            common.die("a process that decodes images was killed (out of memory or disk?): run this again to go on")
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
            image = common.decode(image_folder / name, size, upright=upright)
        except common.UNREADABLE as problem:
            failed[row] = f"{image_folder / name}: {problem}"
            continue
        if target and not compare:
            pixels[row] = image
        elif target and not np.array_equal(pixels[row], image):
            failed[row] = f"{image_folder / name}: not the same pixels as in {target}"
    return rows, failed


def file_times(images):
    return np.array([os.stat(images.image_folder / name).st_mtime_ns for name in images.names])


def describe_cache(images, times):
    """What a cache was made of: the list of names, and the files behind it"""
    files = hashlib.sha256(str(images.image_folder).encode() + times.tobytes()).hexdigest()
    description = {"images": common.hash_names(images.names), "files": files}
    return description | ({"upright": True} if images.upright else {})


def drop_stale_cache(folder, image_folder, part, size, upright):
    """Deletes a cache that is of other images than the formatted file's."""
    cache = folder / f"cache_{part}_{size}.npy"
    if not cache.exists():
        return
    images = SimpleNamespace(names=common.read_names(folder, part), image_folder=image_folder, upright=upright)
    described = cache.with_suffix(".json")
    if not described.exists() or common.read_json(described, "") != describe_cache(images, file_times(images)):
        cache.unlink()


def make_cache(images, what):
    """The pre-resized cache of one formatted file: goes on where it was stopped, takes its name when it is whole."""
    times = file_times(images)
    description = describe_cache(images, times)
    kind = [str(images.image_folder), *["upright"] * images.upright]
    stem = f"{images.cache.name}.{common.hash_names([*kind, *images.names])[:8]}"
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
        with common.replacing(done_path) as temporary, open(temporary, "wb") as file:
            np.save(file, np.zeros(len(images), dtype=np.int64))
    done = np.lib.format.open_memmap(done_path, "r+")  # the time of the file that each row was made of, 0 before

    def finished(rows):
        done[rows] = times[rows]

    problems = visit(images, what, partial, np.flatnonzero(done != times), compare=False, finished=finished)
    if not problems:
        common.write_json(images.cache.with_suffix(".json"), description)
        os.replace(partial, images.cache)
        done_path.unlink()
    return problems


def check_counts(folder):
    """Compares with the numbers that are known of a data set."""
    info = common.read_json(folder / "dataset.json", f"{folder} is not prepared")
    if info["name"] not in EXPECTED or not info["published"]:
        return
    classes, parts = EXPECTED[info["name"]]
    problems = []
    for part, (n_images, n_labels, per_image) in parts.items():
        y = common.read_array(folder / f"formatted_{part}_labels.npy", ndim=2)
        train_rows, _ = common.split_indices(len(y))
        if y.shape != (n_images, classes):
            problem = f"{len(y):,} images and {y.shape[1]} classes, not {n_images:,} and {classes}"
            problems.append(f"{part}: {problem} (files are missing, or it is another release)")
        elif n_labels and y.sum() != n_labels:
            problems.append(f"{part}: {int(y.sum()):,} labels, not {n_labels:,} (are 0, 'difficult', and 1 mixed up?)")
        elif per_image and abs(y[train_rows].sum(1).mean() - per_image) > 0.06:
            problems.append(f"{part}: {y[train_rows].sum(1).mean():.2f} positives per image, not {per_image}")
        elif part == "train":
            z = common.read_array(folder / "formatted_train_labels_obs.npy", ndim=2)
            first = z[: len(VOC_DRAWS)].argmax(1).tolist()
            if not np.array_equal(z, common.draw_single_positives(y)) or (info["name"] == "voc" and first != VOC_DRAWS):
                problems.append("train: the observed labels are not the published draw")
    if problems:
        common.die(f"{folder} is not what it should be: {'; '.join(problems)}")


def summarise(folder):
    classes = common.read_json(folder / "dataset.json", f"{folder} is not prepared")["classes"]
    what = {"train": "training", "valid": "validation", "val": "test"}
    for part in parts_of(folder):
        full, observed = (folder / f"formatted_{part}_{kind}.npy" for kind in ("labels", "labels_obs"))
        y = common.read_array(full if full.exists() else observed, ndim=2)
        count = y.sum(0).astype(int)
        order = np.argsort(count, kind="stable")
        named = [f"{classes[c]} {count[c]:,}" for c in order]
        kind = "positives" if full.exists() else "known positives"
        print(
            f"{what[part]} file: {len(y):,} images, {len(classes)} classes, {y.sum(1).mean():.2f} {kind} per image, "
            f"{int((y.sum(1) == 0).sum()):,} images without one\n"
            f"  rarest: {', '.join(named[:3])}; most frequent: {', '.join(named[:-4:-1])}"
        )


def prepare(args):
    """Makes what is missing, checks what there is; -> the data set's folder"""
    name = args.name if args.dataset == "custom" else args.dataset
    if not re.fullmatch(r"\w[\w.-]*", name) or (args.dataset == "custom" and name in (*EXPECTED, "scenes")):
        common.die(f"--name {name!r}: give your data set a name of its own, of letters, digits, - and _")
    if args.image_size < 1:
        common.die(f"--image_size must be at least 1, not {args.image_size}")
    folder = Path(args.data_root) / name
    ready = (folder / "dataset.json").exists() and not (folder / common.UNFINISHED).exists()
    if args.check and not ready:
        common.die(f"{folder} is not prepared: run this without --check")
    if args.dataset == "scenes":
        make_scenes(folder)
        return folder
    if not args.check and (args.dataset == "custom" or not ready):
        write_source(folder, name, read_source(args))
    elif args.check:
        check_counts(folder)

    info = common.read_json(folder / "dataset.json", f"{folder} is not prepared")
    size, image_folder, upright = args.image_size, Path(info["image_folder"]), info.get("upright", False)
    names = {part: common.read_names(folder, part) for part in parts_of(folder)}
    missing = [
        str(image_folder / image) for part in names for image in names[part] if not (image_folder / image).is_file()
    ]
    if missing:
        listed = "\n  ".join(missing[:1000])
        common.die(f"{len(missing)} images are missing; put them back and run this again:\n  {listed}")
    if not args.check:
        for part in names:
            drop_stale_cache(folder, image_folder, part, size, upright)
    parts = {part: common.Images(folder, image_folder, part, size, upright) for part in names}
    if args.cache and not args.check:
        say_disk(folder, [images for images in parts.values() if not images.cached])
    damaged = []
    for part, images in parts.items():
        if args.check or not args.cache:
            target = images.cache if images.cached else None
            damaged += visit(images, f"checking {part}", target, np.arange(len(images)), compare=True)
        elif not images.cached:
            damaged += make_cache(images, f"resizing {part}")
    if damaged:
        listed = "\n  ".join(sorted(damaged))
        common.die(f"{len(damaged)} images are damaged; replace them and run this again:\n  {listed}")
    return folder


def say_disk(folder, to_cache):
    need = sum(len(images) * images.size**2 * 3 for images in to_cache)
    there = sum(path.stat().st_blocks * 512 for path in folder.glob("cache_*.part"))
    free = shutil.disk_usage(folder).free
    if need:
        print(f"the image cache takes {need / 1e9:.1f} GB; {free / 1e9:.0f} GB are free", flush=True)
    if need - there > free:
        common.die("the disk is too small for the image cache: say --no_cache, or choose a smaller --image_size")


def read_source(args):
    if args.dataset == "custom":
        return read_custom(args)
    if args.dataset == "nus":
        return read_nus(Path(args.raw or Path(args.data_root) / "nus" / "raw"))
    root = fetch(args)
    try:
        if args.dataset == "voc":
            return read_voc(root, {"train": "train", "val": "val"})
        if args.dataset == "voc2007":
            return read_voc(root, {"train": "trainval", "val": "test"}, keep_empty=True)  # the usual 5,011 / 4,952
        return read_coco(root) if args.dataset == "coco" else read_cub(root)
    except (ValueError, KeyError, IndexError) as problem:
        common.die(f"{root} is not in the layout of {args.dataset}: {problem!r}")


# ---- 6. A look at the data


def contact_sheet(data, path, side=5):
    """side x side random training images, their true labels, the observed one marked."""
    plt = common.pyplot()
    n = min(side * side, len(data.train))
    chosen = np.sort(np.random.RandomState(0).choice(len(data.train), n, replace=False))
    pixels = data.train.images[data.train.rows[chosen]].numpy()
    figure, axes = plt.subplots(side, side, figsize=(2 * side, 2.3 * side), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, idx, image in zip(axes.flat, chosen, pixels):
        z = data.train.z[idx].tolist()
        y = z if data.train.y is None else data.train.y[idx].tolist()
        observed = [name for name, seen in zip(data.classes, z) if seen]
        hidden = [name for name, true, seen in zip(data.classes, y, z) if true and not seen]
        axis.imshow(image)
        axis.set_title("\n".join(observed), fontsize=9, fontweight="bold", color="tab:green", loc="left", pad=3)
        axis.text(0, -0.04, ", ".join(hidden), fontsize=7, color="grey", va="top", transform=axis.transAxes, wrap=True)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as problem:
        common.die(f"--contact_sheet {path} can't be written: {problem}")


# ---- 7. Go

if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    try:
        folder = prepare(args)
        summarise(folder)
        if args.contact_sheet:
            size = SIDE if args.dataset == "scenes" else args.image_size
            data = common.load(SimpleNamespace(dataset=str(folder), data_root="", image_size=size, known_ratio=0.0))
            contact_sheet(data, args.contact_sheet)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
