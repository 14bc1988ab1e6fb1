"""Prepares data sets: from nothing, or from what you have downloaded, to the files that every script reads.

    python data_prep.py voc
    python data_prep.py voc --raw /data/VOCdevkit --image_size 224 --contact_sheet voc.png
    python data_prep.py custom --name pets --images photos --labels labels.csv --val val.csv --test test.csv

Writes formatted_*.npy, dataset.json and the image cache into <data_root>/<data set>, then checks and describes them.
Safe to kill and to run again: it does what is missing. `--check` only looks.
"""

import csv
import hashlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import tyro
from tqdm import tqdm

import common
import scenes

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


# ---- 2. Official data sets: download, extract, read

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


# ---- 3. Your own images

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


# ---- 4. Write, cache, check

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
    workers = ProcessPoolExecutor(cores, context, initializer=ignore_ctrl_c)
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


def ignore_ctrl_c():
    """Of the processes that Ctrl-C reaches, only the main one speaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
        scenes.make(folder)
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


# ---- 5. A look at the data


def contact_sheet(data, path, side=5):
    """side x side random training images, their true labels, the observed one marked."""
    plt = common.pyplot()
    n = min(side * side, len(data.train))
    chosen = np.sort(np.random.RandomState(0).choice(len(data.train), n, replace=False))
    pixels = np.asarray(data.train.images[data.train.rows[chosen]])
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


# ---- 6. Go

if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    try:
        folder = prepare(args)
        summarise(folder)
        if args.contact_sheet:
            size = scenes.SIDE if args.dataset == "scenes" else args.image_size
            wanted = dict(dataset=str(folder), data_root="", image_size=size, known_ratio=0.0, smoke=False)
            contact_sheet(common.load(SimpleNamespace(**wanted)), args.contact_sheet)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        sys.exit(130)
