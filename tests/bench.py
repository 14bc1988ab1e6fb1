"""How fast it is on this machine: everything side by side in one run, medians of interleaved repeats

    python tests/bench.py
    python tests/bench.py --only 1,4 --json bench.json
    python tests/bench.py --quick

The scripts run as they are, in this process, on made-up images and random weights. `ours` and `other` are medians,
`ratio` is ours over other or, with an x, how many times faster ours is: the median of the repeats' ratios, whose
`quartiles` show the noise. Where the ratio is an exponent, time or memory grows like size^exponent, `ours` is that of
the largest and `other` of the smallest size. Memory is RssAnon, which only Linux tells, or on CUDA the device's. Rows
are printed, and written to --json, as they come. Ends with code 1 where a bar is not met.
"""

import csv
import gc
import io
import logging
import multiprocessing
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from statistics import mean, median, quantiles
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import functional as pictures

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from syncs import counted  # noqa: E402

import an  # noqa: E402
import common  # noqa: E402
import data_prep  # noqa: E402
import em_apl  # noqa: E402
import lac  # noqa: E402
import scenes  # noqa: E402
import vlpl  # noqa: E402

# ---- 1. Settings


@dataclass
class Args:
    only: str = ""  # numbers of what to measure, such as 1,4 (default: all)
    quick: bool = False  # tiny sizes, to see whether it runs: the numbers mean nothing
    json: str = ""  # write every number to this file too
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass
class Sizes:
    repeats: int = 5
    small: int = 250  # images of the set that is trained on as scenes is; a fifth is validation
    resnet: tuple = ("resnet50", 224, 10, 4)  # a larger backbone: name, side, images, batch
    pair: tuple = ("resnet50", 448, 5, 4)  # VLPL's pair, one step an epoch
    pair_repeats: int = 3
    clip: str = "ViT-L-14-336"
    scores: tuple = ((40137, 80), (60260, 81))  # the test sets of COCO and NUS
    jpegs: int = 64
    anchors: tuple = (32, 312)  # images, classes: CUB
    queue: int = 8192
    state: tuple = (20000, 20)  # images, classes: long enough for peak_memory to see
    many: int = 10000  # images of 8 pixels: what an epoch keeps of each shows in its memory, a table of pairs fills it
    rows: tuple = (100_000, 1_000_000)  # images of 4 pixels
    row_classes: int = 100


QUICK = dict(repeats=2, small=40, resnet=("resnet18", 64, 10, 4), pair=("resnet18", 64, 5, 4), pair_repeats=1)
QUICK |= dict(clip="RN50", scores=((500, 8),), jpegs=8, anchors=(4, 312), queue=256, state=(10000, 20), many=1000)
QUICK |= dict(rows=(2000, 20_000), row_classes=20)
CUDA = dict(small=4000, resnet=("resnet50", 448, 640, 16), pair=("resnet50", 448, 320, 8), pair_repeats=5)

CLASSES = 20
VOC = {"train": 4574, "val": 1143, "test": 5823}
COCO = {"train": 65665, "val": 16416, "test": 40137}
VOC_EPOCHS = 10
# published images/s, mixed precision: ResNet-50 trained at 224 pixels, ViT-L-14-336 inference; sources: docs/speed.md
PUBLISHED = {"RTX 3090": (1218, 143), "RTX 4090": (1776, 250), "A100": (2470, None)}
LINEAR = 1.1  # an exponent up to this is linear, give or take the noise

# ---- 2. Measuring


def quartiles(values):
    return tuple(quantiles(values, n=4, method="inclusive")[::2]) if len(values) > 1 else ()


def exponent(sizes, values):
    """Slope of the line through (log size, log value): the values grow like size^exponent"""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def interleave(repeats, **sides):
    """{name: function} -> {name: what each of its calls returned}; A B, B A, A B, ... so that a drift cancels out"""
    results = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: -1 if repeat % 2 else 1]:
            results[name].append(sides[name]())
    return results


def seconds(act, *arguments):
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    started = time.perf_counter()
    act(*arguments)
    wait()
    return time.perf_counter() - started


def anonymous_memory():
    """RssAnon: bytes that are this process's own; pages of a mapped file are not"""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def peak_memory(device, act, *arguments):
    """-> MB before, and the most there were while act() ran"""
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act(*arguments)
        return before / 1e6, torch.cuda.max_memory_allocated() / 1e6
    samples, done = [anonymous_memory()], threading.Event()

    def watch():
        while not done.wait(0.003):
            samples.append(anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act(*arguments)
    finally:
        done.set()
        watcher.join()
    return samples[0] / 1e6, max(samples) / 1e6


def in_new_process(act, *arguments):
    """For memory: what another measurement left behind must not count"""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(act, *arguments).result()


def added_memory(bench, act, *arguments):
    before, peak = in_new_process(peak_memory, bench.device, act, *arguments)
    return peak - before


@dataclass
class Row:
    item: int
    what: str
    ours: float
    other: float
    unit: str
    ratio: float
    at_least: float | None = None  # a bar
    at_most: float | None = None  # or this one
    faster: bool = False  # the ratio is other over ours
    quartiles: tuple = ()
    note: str = ""
    raw: dict = field(default_factory=dict)

    @property
    def met(self):
        """None: there is no bar"""
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return None if self.at_most is None else self.ratio <= self.at_most


def compare(item, what, ours, other, unit, faster=False, **more):
    """The row of two lists of repeats. What happened at the same time is compared: the ratio is the median of the
    pairs' ratios, and so between its quartiles"""
    ratios = [b / a if faster else a / b for a, b in zip(ours, other)]
    more |= {"faster": faster, "quartiles": quartiles(ratios), "raw": {"ours": ours, "other": other}}
    return Row(item, what, median(ours), median(other), unit, median(ratios), **more)


def growth(item, what, sizes, values, unit, at_most=LINEAR):
    """The row of an exponent; `values` has the repeats of every size"""
    middles, raw = [median(repeats) for repeats in values], {"sizes": sizes, "values": values}
    spread = quartiles([exponent(sizes, repeat) for repeat in zip(*values)])
    slope = exponent(sizes, middles)
    return Row(item, what, middles[-1], middles[0], unit, slope, at_most=at_most, quartiles=spread, raw=raw)


# ---- 3. What it is measured with


class Bench:
    """Made-up data sets in a temporary folder, and flags that make the scripts use them"""

    def __init__(self, folder, sizes, device):
        self.folder, self.sizes, self.device = folder, sizes, device
        self.dataset, self.small_clip = cache(self.dataset), cache(self.small_clip)

    def dataset(self, name, n, side, files=(500, 375)):
        """A folder with a train file of n images, and their cache; its name chooses the scripts' presets"""
        folder, rs = self.folder / f"{n}-{side}" / name, np.random.RandomState(0)
        y = rs.rand(n, CLASSES) < 0.1
        y[np.arange(n), rs.randint(0, CLASSES, n)] = True
        (folder / "images").mkdir(parents=True)
        for i in range(16):
            voc_sized_image(rs).resize(files).save(folder / "images" / f"{i}.jpg", quality=90)
        np.save(folder / "formatted_train_images.npy", np.array([f"{i % 16}.jpg" for i in range(n)]))
        np.save(folder / "formatted_train_labels.npy", y.astype(np.int64))
        classes = [f"object {c}" for c in range(CLASSES)]
        data_prep.write_json(folder / "dataset.json", {"classes": classes, "image_folder": "images"})
        data_prep.make_cache(open_images(folder, side), "resizing")
        return folder

    def rows(self, n):
        """Flags for a run on n images of 4 pixels, prepared as data_prep.py does, of which there is the cache alone"""
        folder, rs, classes = self.folder / f"{n} rows" / "scenes", np.random.RandomState(0), self.sizes.row_classes
        names, images = np.array([f"train/{i:012d}.jpg" for i in range(n)]), rs.randint(0, 256, (n, 4, 4, 3), np.uint8)
        y = (rs.randint(0, 100, (n, classes), np.uint8) < 3).astype(np.uint8)
        y[np.arange(n), rs.randint(0, classes, n)] = 1
        folder.mkdir(parents=True)
        np.save(folder / "formatted_train_images.npy", names)
        np.save(folder / "formatted_train_labels.npy", y)
        np.save(folder / "formatted_train_labels_obs.npy", data_prep.draw_single_positives(y))
        np.save(folder / "cache_train_4.npy", images)
        data_prep.write_json(folder / "cache_train_4.json", {"images": data_prep.hash_names(names)})
        place = ("--data_root", self.folder, "--out", self.folder / "runs", "--device", self.device)
        return ("--dataset", folder, "--image_size", 4, *place)

    def small_clip(self):
        """Flags for a CLIP as large as that of scenes, untrained"""
        import open_clip
        from safetensors.torch import save_file

        folder = self.folder / "clip"
        folder.mkdir()
        save_file(open_clip.CLIP(**scenes.CLIP["model_cfg"]).state_dict(), folder / "open_clip_model.safetensors")
        data_prep.write_json(folder / "open_clip_config.json", scenes.CLIP)
        return ("--clip_model", f"local-dir:{folder}")

    def small(self, share=1.0):
        """Flags for a run at the size of scenes"""
        return self.flags("scenes", int(share * self.sizes.small), 64)

    def large(self, backbone, side, n, batch):
        """Flags for a run at the size of VOC"""
        return (*self.flags("voc", n, side), "--backbone", backbone, "--weights", "none", "--batch_size", batch)

    def flags(self, name, n, side, **more):
        place = ("--data_root", self.folder, "--out", self.folder / "runs", "--device", self.device)
        return ("--dataset", self.dataset(name, n, side, **more), "--image_size", side, *place)


def voc_sized_image(rs):
    """500 x 375 pixels that make a JPEG of about 110 KB, as large as VOC's are on average"""
    smooth = Image.fromarray(rs.randint(0, 256, (24, 32, 3)).astype(np.uint8)).resize((500, 375))
    return Image.fromarray(np.clip(smooth + rs.normal(0, 14, (375, 500, 1)), 0, 255).astype(np.uint8))


def open_images(folder, side):
    return data_prep.Images(folder, folder / "images", "train", side)


def run_script(name, *flags):
    """A script's own __main__, in this process -> its variables, and what it printed"""
    printed, handler = io.StringIO(), signal.getsignal(signal.SIGINT)
    try:
        with mock.patch.object(sys, "argv", [name, *map(str, flags)]), redirect_stdout(printed):
            variables = runpy.run_path(str(ROOT / name), run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)
    shutil.rmtree(variables["run"].directory)
    return SimpleNamespace(**variables, printed=printed.getvalue())


def middle(done, column):
    """Median of a column of a run's metrics over its epochs, the first one left out"""
    return median(row[column] for row in done.run.rows[1:])


def bare_rate(done, batches, forward):
    """images/s of nothing but a finished run's steps: its model and optimizer, as many epochs, batches in memory"""

    def epoch():
        for x, z in batches:
            with done.run.autocast():
                loss = forward(x, z)
            loss.backward()
            done.optimizer.step()
            done.optimizer.zero_grad()

    done.model.train()
    times = [seconds(epoch) for _ in done.run.rows]
    return sum(len(z) for _, z in batches) / median(times[1:])


# ---- 4. What is measured


def the_loop(bench):
    """Training throughput over the bare step"""
    name, side, _, batch = bench.sizes.resnet
    cases = {"resnet_small, 64 px, batch 8": (*bench.small(), "--epochs", 4)}
    cases[f"{name}, {side} px, batch {batch}"] = (*bench.large(*bench.sizes.resnet), "--epochs", 2)
    for what, flags in cases.items():
        ours, bare = [], []
        for _ in range(bench.sizes.repeats):
            done = run_script("an.py", *flags)
            batches = [(x, z) for x, z, _ in done.run.batches(done.data.train, flip=True)]
            ours.append(middle(done, "images_per_s"))
            bare.append(bare_rate(done, batches, lambda x, z: an.an_loss(done.model(x), z)[0]))  # noqa: B023
        yield compare(1, f"an.py over the bare step ({what})", ours, bare, "img/s", at_least=0.95)
    yield from waits(bench)


def waits(bench):
    """How often a step of each script makes the host wait for the device"""
    clip = bench.small_clip()
    ways = {"an.py": (), "an.py --linear": (), "baselines.py": (), "role.py": (), "ll.py --form cp": ()}
    ways |= {"em_apl.py": (), "vlpl.py": clip, "aevlp.py": clip, "pu_mlc.py": (), "lac.py --end_to_end": ()}
    for way, more in ways.items():
        with counted() as found:
            run_script(*way.split(), *bench.small(), "--epochs", 2, "--smoke", "--amp", "bf16", *more)
        steps = found.pop("steps")
        syncs = sum(found.values())
        yield Row(1, f"host syncs per step, {way}", syncs, steps, "syncs, steps", syncs / steps, at_most=0.0)


def vlpl_over_an(bench):
    """An epoch of vlpl.py over one of an.py, once images are embedded"""
    flags, clip = (*bench.small(), "--epochs", 3), bench.small_clip()
    first = images_embedded("vlpl.py", *flags, *clip)
    epoch = lambda *words: lambda: middle(run_script(*words), "seconds")
    times = interleave(bench.sizes.repeats, an=epoch("an.py", *flags), vlpl=epoch("vlpl.py", *flags, *clip))
    yield compare(2, "an epoch of vlpl.py over one of an.py", times["vlpl"], times["an"], "s", at_most=1.05)
    again = images_embedded("vlpl.py", *flags, *clip, "--tau", 0.07, "--theta", 0.4)
    what = "images that a second vlpl.py embeds, with other tau and theta"
    yield Row(2, what, again, first, "images", again / first, at_most=0.0)


def images_embedded(*words):
    return sum(map(int, re.findall(r"^embedded .*: (\d+) in .* img/s$", run_script(*words).printed, re.M)))


def vlpl_over_release(bench):
    """A whole run of vlpl.py against the way the authors' release works"""
    import open_clip

    s, (backbone, side, n, batch) = bench.sizes, bench.sizes.pair
    half = "fp16" if bench.device == "cuda" else "fp32"  # as common.Clip has it
    untrained = lambda name, *_: (open_clip.create_model(name, precision=half), open_clip.get_tokenizer(name), {})
    logging.disable()  # open_clip warns that its weights are random
    with mock.patch.object(common, "load_open_clip", untrained):
        clip = common.Clip(vlpl.Args(clip_model=s.clip), torch.device(bench.device))
    n_all, held_out = sum(VOC.values()), VOC["val"] + VOC["test"]
    flags = (*bench.large(*s.pair), *bench.small_clip(), "--epochs", 2)
    scores, labels = np.random.rand(held_out, CLASSES), np.random.rand(held_out, CLASSES) < 0.1
    dtypes = {}

    def ours():
        done = run_script("vlpl.py", *flags)  # its CLIP is a small one, which is all the same to the loop
        train, run = done.data.train, done.run
        dtypes["ours"] = run.dtype or torch.float32
        nothing_yet = common.EmbeddingCache(tempfile.mkdtemp(dir=bench.folder), run.loader)
        with redirect_stdout(io.StringIO()):
            embed = seconds(clip.embed_images, train, "train", nothing_yet) / len(train)
        evaluate = seconds(run.predict, done.model, train) / len(train)
        mAP = seconds(common.mean_average_precision, scores, labels)
        return {"embed": embed, "train": 1 / middle(done, "images_per_s"), "evaluate": evaluate, "mAP": mAP}

    def release():
        args = vlpl.Args(backbone=backbone, image_size=side, batch_size=batch, weights="none")
        net = common.Classifier(args, CLASSES).to(bench.device)
        jpegs = Jpegs(bench.dataset("voc", n, side), side)
        epoch = lambda step: seconds(release_epoch, net, clip, jpegs, args, step) / len(jpegs)
        optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
        epoch(optimizer)  # the first one is left out, as ours is
        train, evaluate = epoch(optimizer), epoch(None)
        dtypes["other"] = next(net.parameters()).dtype
        return {"embed": 0, "train": train, "evaluate": evaluate, "mAP": seconds(sklearn_precision, scores, labels)}

    def whole(cost):
        epoch = VOC["train"] * cost["train"] + held_out * cost["evaluate"] + cost["mAP"]
        return n_all * cost["embed"] + VOC_EPOCHS * epoch

    costs = interleave(s.pair_repeats, ours=ours, other=release)
    note = f"in seconds, CLIP in {half}, with the test set evaluated in every epoch (ours does in better ones only)"
    for name, repeats in costs.items():
        embed, train, evaluate, mAP = (f"{median(repeat[part] for repeat in repeats):.3g}" for part in repeats[0])
        note += f"\n   {name} = {n_all} x {embed} to embed + {VOC_EPOCHS} x ({VOC['train']} x {train} to train"
        note += f" + {held_out} x {evaluate} to evaluate + {mAP} for mAP), its network in {dtypes[name]}"
    what = f"vlpl.py on VOC, {VOC_EPOCHS} epochs, against the release's way ({s.clip}, {backbone} at {side})"
    totals = [[whole(cost) for cost in costs[name]] for name in ("ours", "other")]
    row = compare(3, what, *totals, "s", faster=True, at_least=4, note=note)
    row.raw |= {"costs": costs}
    yield row
    yield from on_paper("VOC", VOC)
    yield from on_paper("COCO", COCO)


def on_paper(dataset, images):
    """The same from published throughputs: arithmetic, not a measurement. 448 pixels are four times 224, evaluation a
    third of a training step; batches of any size are as fast, and decoding costs nothing"""
    for gpu, (resnet, clip) in PUBLISHED.items():
        held_out = images["val"] + images["test"]
        network = VOC_EPOCHS * (images["train"] + held_out / 3) * 4 / resnet / 60
        what = f"ON PAPER, {gpu}: {VOC_EPOCHS} epochs on {dataset}"
        if clip:
            embed = sum(images.values()) / clip / 60
            ours, other = network + embed, network + VOC_EPOCHS * embed
            yield Row(3, f"{what}, CLIP once against in every batch", ours, other, "min", other / ours, faster=True)
        else:
            yield Row(3, f"{what}, without CLIP", network, network, "min", 1.0)


class Jpegs:
    """As the release reads: decoded, resized, flipped and normalised in every epoch"""

    def __init__(self, folder, side):
        self.paths = [folder / "images" / name for name in data_prep.read_names(folder, "train")]
        self.z, self.side = common.draw_single_positives(np.load(folder / "formatted_train_labels.npy")), side

    def __len__(self):
        return len(self.paths) * 4 // 5  # without validation

    def __getitem__(self, i):
        x = pictures.to_tensor(Image.open(self.paths[i]).convert("RGB").resize((self.side, self.side)))
        x = pictures.hflip(x) if np.random.rand() < 0.5 else x
        return pictures.normalize(x, common.IMAGENET_MEAN, common.IMAGENET_STD), self.z[i]


def release_epoch(net, clip, jpegs, args, optimizer):
    """CLIP in every batch, in evaluation too, which is what it is without an optimizer"""
    text = F.normalize(torch.randn(CLASSES, clip.net.visual.output_dim, device=clip.device), dim=1)
    net.train(optimizer is not None)
    for x, z in DataLoader(jpegs, args.batch_size, num_workers=4 if clip.device.type == "cuda" else 0):
        x, z = x.to(clip.device), z.to(clip.device)
        with torch.no_grad():
            image = clip.net.encode_image(F.interpolate(x, (clip.size, clip.size), mode="bicubic").to(clip.dtype))
            cosine = F.normalize(image.float(), dim=1) @ text.T
            pseudo = vlpl.vlpl_pseudo_labels(cosine, z, args.tau, args.theta)
        with torch.set_grad_enabled(optimizer is not None):
            loss, _ = vlpl.vlpl_loss(net.head(net.body(x)), z, pseudo, args.alpha, args.beta)
        if optimizer:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def sklearn_precision(scores, y):
    from sklearn.metrics import average_precision_score

    return np.array([average_precision_score(y[:, c], scores[:, c]) for c in range(y.shape[1])])


def precision(bench):
    """mean_average_precision against scikit-learn, class by class"""
    for n, classes in bench.sizes.scores:
        scores, y, size = torch.randn(n, classes), torch.rand(n, classes) < 0.04, f"{n} x {classes}"
        y[0] = True
        ours, theirs = common.average_precision(scores, y).numpy(), sklearn_precision(scores.numpy(), y.numpy())
        sides = {
            "ours": partial(seconds, common.mean_average_precision, scores, y),
            "sklearn": partial(seconds, sklearn_precision, scores.numpy(), y.numpy()),
            "sort": partial(seconds, np.sort, scores.T.contiguous().numpy()),
        }
        if bench.device == "cuda":
            sides["cuda"] = partial(seconds, common.mean_average_precision, scores.cuda(), y.cuda())
        times = interleave(bench.sizes.repeats, **sides)
        yield compare(4, f"mAP against scikit-learn, {size}", times["ours"], times["sklearn"], "s", True, at_least=2)
        yield compare(4, f"mAP over one sort, {size}", times["ours"], times["sort"], "s")
        if bench.device == "cuda":
            yield compare(4, f"mAP on CUDA against scikit-learn, {size}", times["cuda"], times["sklearn"], "s", True)
        worst, what = float(np.abs(ours - theirs).max()), f"largest difference of an AP to scikit-learn's, {size}"
        yield Row(4, what, float(ours.mean()), float(theirs.mean()), "mean AP", worst, at_most=1e-9)


def reading(bench):
    """The image cache against JPEG files"""
    n, side = bench.sizes.jpegs, bench.sizes.pair[1]
    folders = bench.dataset("voc", n, side), bench.dataset("voc", 4 * n, side)
    images = open_images(folders[0], side)
    files = images.from_files(side, images.resample)
    read_all(images)  # into the system's memory, where the JPEG files are too
    rate = lambda source: lambda: n / seconds(read_all, source)
    rates = interleave(bench.sizes.repeats, cache=rate(images), files=rate(files))
    what = f"images from the cache over decoded JPEGs, {side} px"
    yield compare(5, what, rates["cache"], rates["files"], "img/s", at_least=5)
    once, more = (in_new_process(peak_memory, "cpu", open_and_read_all, each, side)[1] for each in folders)
    yield Row(5, "RssAnon while 4 times the images are read, over 1x", more, once, "MB", more / once, at_most=1.05)

    views = partial(lac.two_views, seed=0, epoch=1)
    for what, source, augment in (("JPEGs", files, None), ("cache", images, None), ("strong views", images, views)):
        for workers in (1, 2, 4):
            ways = loaders(source, augment, workers, 8 if what == "cache" else 2)
            rates = interleave(bench.sizes.repeats, **ways)
            name = f"{what}, {side} px: {workers} loader thread(s) over as many worker processes"
            yield compare(5, name, rates["threads"], rates["processes"], "img/s", at_least=0.9)
            if what == "strong views" and workers == 1:
                one = median(rates["threads"])
                yield Row(5, f"strong views of one loader thread, {side} px, over 100/s", one, 100, "img/s", one / 100)


class Batches:
    """What a worker process of torch's DataLoader reads"""

    def __init__(self, source, augment, batches):
        self.source, self.augment, self.batches = source, augment, batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        rows = self.batches[i]
        pixels = self.source[rows]
        views = np.stack([self.augment(*pair) for pair in zip(pixels, rows)]) if self.augment else pixels
        return torch.from_numpy(views)


def loaders(source, augment, workers, passes):
    """{name: function -> images/s}: our threads, and worker processes that have been started before"""
    rows = np.tile(np.random.RandomState(0).permutation(len(source)), passes)
    split, batches = common.Split(source, np.arange(len(source)), None), common.in_batches(rows, 8)
    ours = common.Loader(common.Args(workers=workers), torch.device("cpu"))
    theirs = DataLoader(Batches(source, augment, batches), None, num_workers=workers, persistent_workers=True)
    threads, processes = lambda: ours.pixels(split, batches, augment), lambda: map(common.as_pixels, theirs)
    consume = lambda make: sum(len(x) for x in make())
    consume(processes)
    rate = lambda make: lambda: len(rows) / seconds(consume, make)
    return {"threads": rate(threads), "processes": rate(processes)}


def read_all(images):
    for rows in common.in_batches(np.random.RandomState(0).permutation(len(images)), 8):
        images[rows]


def open_and_read_all(folder, side):
    read_all(open_images(folder, side))  # of a mapped file, which would be copied on its way into a new process


def methods(bench):
    """What em_apl.py, aevlp.py and lac.py add"""
    repeats, T = bench.sizes.repeats, 8
    flags = (*bench.small(), "--epochs", 4, "--warmup", 1)
    rate = lambda *more: middle(run_script("em_apl.py", *flags, *more), "images_per_s")
    epoch = lambda *more: lambda: 0.8 * bench.sizes.small / rate(*more)
    times = interleave(repeats, plain=epoch("--no_apl"), apl=epoch())
    added = [apl - plain for apl, plain in zip(times["apl"], times["plain"])]
    yield compare(6, "em_apl.py's selection pass over a training epoch", added, times["plain"], "s", at_most=0.4)

    flags = (*bench.small(0.5), "--epochs", T)
    epoch = lambda name, *more: lambda: mean(row["seconds"] for row in run_script(name, *flags, *more).run.rows)
    refreshed = lambda every: epoch("aevlp.py", *bench.small_clip(), "--refresh_every", every)
    times = interleave(repeats, an=epoch("an.py"), always=refreshed(1), once=refreshed(T))
    what = "an epoch of aevlp.py over one of an.py, CLIP and tiles as for scenes, --refresh_every"
    yield compare(6, f"{what} 1", times["always"], times["an"], "s")
    yield compare(6, f"{what} T = {T}", times["once"], times["an"], "s")

    ours, bare = zip(*(lac_rates(bench, "--end_to_end") for _ in range(repeats)))
    what = "over its model's bare two-view step (64 px)"
    yield compare(6, f"lac.py, all losses, {what}", ours, bare, "img/s")
    with mock.patch.object(common.Loader, "pixels", remembered(common.Loader.pixels)):
        ours, bare = zip(*(lac_rates(bench, "--stage", 1) for _ in range(repeats)))
    yield compare(6, f"lac.py's stage 1 {what}, views made before", ours, bare, "img/s", at_least=0.95)

    (images, classes), K = bench.sizes.anchors, bench.sizes.queue
    sizes, size = (K // 4, K // 2, K), f"{images} x {classes} anchors"
    loss = lambda k: partial(seconds, lac_loss_of, images * classes, k, classes, bench.device)
    times = interleave(repeats, **{str(k): loss(k) for k in sizes})
    what = f"exponent of L_LAC's time in K, --form paper, {size}, K up to {K}"
    yield growth(6, what, sizes, list(times.values()), "s")
    a, b = (added_memory(bench, lac_loss_of, n * classes, K, classes, bench.device) for n in (images, images // 4))
    yield Row(6, f"L_LAC's memory, {size}, K {K}, over a quarter", a, b, "MB", a / b, at_most=1.5)


def remembered(pixels):
    """Loader.pixels that makes the views of an image once, in the first epoch"""
    views = {}

    def read(loader, split, batches, augment=None):
        once = lambda image, row: views[row] if row in views else views.setdefault(row, augment(image, row))
        return pixels(loader, split, batches, once if augment else None)

    return read


def lac_rates(bench, *stage):
    done = run_script("lac.py", *bench.small(), "--epochs", 3, *stage)
    views = done.run.batches(done.data.train, flip=True, augment=partial(lac.two_views, seed=0, epoch=1))
    batches = [(x.transpose(0, 1).flatten(0, 1).contiguous(memory_format=torch.channels_last), z) for x, z, _ in views]

    def forward(x, z):
        if stage[0] == "--stage":
            return lac.an_loss_sum(done.model(x)[: len(z)], z)
        logits, embed = done.model(x, project=True)
        return lac.an_loss_sum(logits[: len(z)], z) + embed.mean()

    return middle(done, "images_per_s"), bare_rate(done, batches, forward)


def lac_loss_of(anchors, k, classes, device):
    """The paper's L_LAC, forward and backward, of so many anchors and a queue of k"""
    a, b = (F.normalize(torch.randn(n, 128, device=device), dim=1).requires_grad_() for n in (anchors, k))
    class_a, class_b = (torch.arange(n, device=device) % classes for n in (anchors, k))
    lac.lac_loss(a, class_a, b, class_b, lac.Args.tau).backward()


def scaling(bench):
    """How time and memory grow with images and classes"""
    repeats, scales = bench.sizes.repeats, (1, 2, 4)
    flags = [(*bench.small(scale / 2), "--epochs", 3) for scale in scales]
    epoch = lambda words: lambda: middle(run_script("an.py", *words), "seconds")
    times = interleave(repeats, **{str(scale): epoch(words) for scale, words in zip(scales, flags)})
    yield growth(7, "exponent of an epoch's time, an.py, 1x to 4x images", scales, list(times.values()), "s")
    counts = [scale * bench.sizes.many for scale in scales]
    flags = [(*bench.flags("scenes", count, 8, files=(8, 8)), "--batch_size", 32, "--epochs", 1) for count in counts]
    peaks = [[added_memory(bench, run_script, "an.py", *words)] for words in flags]
    what = f"exponent of what an epoch adds to memory, an.py, {counts[0]} to {counts[-1]} images of 8 px"
    yield growth(7, what, counts, peaks, "MB")

    n, classes = bench.sizes.state
    counts = (classes, 4 * classes, 16 * classes)
    update = lambda count: partial(seconds, label_state, n, count, bench.device)
    times = interleave(repeats, **{str(count): update(count) for count in counts})
    what = f"exponent of the label state's time, {n} images, 1x to 16x {classes} classes"
    yield growth(7, what, counts, list(times.values()), "s")
    peaks = [[added_memory(bench, label_state, n, count, bench.device)] for count in counts]
    yield growth(7, "exponent of its memory", counts, peaks, "MB")


def label_state(n, classes, device):
    """What VLPL and APL compute for all training images at once"""
    cosine, z = torch.rand(n, classes, device=device), torch.zeros(n, classes, dtype=torch.int8, device=device)
    vlpl.vlpl_pseudo_labels(cosine, z, vlpl.Args.tau, vlpl.Args.theta, vlpl.Args.delta)
    em_apl.select_pseudo_negatives(cosine, z, [n // 10] * classes)


def processes(bench):
    """Two gloo processes against one, the same global batch"""
    threads, each = torch.get_num_threads(), max(1, torch.get_num_threads() // 2)
    flags = (*bench.flags("scenes", min(250, bench.sizes.small), 64), "--epochs", 4, "--device", "cpu")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    one = partial(process_rate, (), threads, flags)
    two = partial(process_rate, torchrun, each, flags)
    rates = interleave(bench.sizes.repeats, one=one, two=two)
    what = f"an.py in two gloo processes (threads: {each} + {each}) over one (threads: {threads})"
    yield compare(8, what, rates["two"], rates["one"], "img/s")


def process_rate(launcher, threads, flags):
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *launcher, ROOT / "an.py", *flags, "--out", out]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        if done.returncode:
            common.die(f"an.py failed under {launcher or 'python'}: {done.stderr[-500:]}")
        with open(next(Path(out).glob("*/metrics.csv"))) as file:
            return median(float(row["images_per_s"]) for row in list(csv.DictReader(file))[1:])


def a_million(bench):
    """A million images: time to the first step, memory"""
    (few, many), classes, repeats = bench.sizes.rows, bench.sizes.row_classes, bench.sizes.repeats
    flags, size = {n: bench.rows(n) for n in (few, many)}, f"{many:,} x {classes}"
    start = lambda n: partial(in_new_process, time_to_first_step, flags[n])
    times = interleave(repeats, few=start(few), many=start(many))
    what = f"an.py's first step, {size}, over 3 x that of {few:,} and 10 s"
    yield compare(10, what, times["many"], [3 * each + 10 for each in times["few"]], "s", at_most=1)
    exponent_of = lambda what, values, unit: growth(10, f"exponent of {what}", (few, many), values, unit, at_most=None)
    yield exponent_of(f"its time, from {few:,} on", [times["few"], times["many"]], "s")
    peaks = [in_new_process(peak_memory, "cpu", run_script, "an.py", *flags[n], "--max_steps", 9)[1] for n in flags]
    bound, what = 3 * many * classes / 1e6 + 1500, f"RssAnon of an.py, {size}, over 3 x the labels and 1.5 GB"
    yield Row(10, what, peaks[1], bound, "MB", peaks[1] / bound, at_most=1)
    yield exponent_of("it", [[peak] for peak in peaks], "MB")

    select = lambda n: partial(in_new_process, table_cost, "selection", n, classes)
    costs = interleave(repeats, few=select(few), many=select(many))
    seconds_of, added, table = ([[cost[i] for cost in costs[n]] for n in ("few", "many")] for i in range(3))
    what = f"what em_apl.py's selection adds to memory, {size}, over the predictions"
    yield compare(10, what, added[1], table[1], "MB", at_most=3)
    yield exponent_of(f"its time, from {few:,} on", seconds_of, "s")
    _, added, table = in_new_process(table_cost, "metrics", many, classes)
    what = f"what mAP, F1 and thresholds add to memory, {size}, over the scores"
    yield Row(10, what, added, table, "MB", added / table, at_most=3)  # 0.4 to 1.7, as torch's allocator has it


class FirstStep(Exception):
    pass


def time_to_first_step(flags):
    """From the first line of an.py on, whose modules are imported"""
    with mock.patch.object(common.Run, "step", side_effect=FirstStep), suppress(FirstStep):
        started = time.perf_counter()
        run_script("an.py", *flags)
    return time.perf_counter() - started


def table_cost(kind, n, classes):
    """-> seconds, MB that were added, MB of the scores"""
    scores, z = torch.rand(n, classes), (torch.rand(n, classes) < 0.03).to(torch.int8)

    def act():
        if kind == "selection":
            em_apl.select_pseudo_negatives(scores, z, [n // 5] * classes)
            return
        for measure in (common.average_precision, common.f1_scores, common.best_f1_thresholds):
            measure(scores, z)

    common.find_device("cpu")  # whose way with memory is that of a run
    started = time.perf_counter()
    before, peak = peak_memory("cpu", act)
    return time.perf_counter() - started, peak - before, scores.nbytes / 1e6


def on_cuda(bench):
    """Precision, compilation and device memory"""
    ways = {"bf16": ("--amp", "bf16"), "fp32": ("--amp", "off"), "compiled": ("--amp", "bf16", "--compile")}
    memory = {name: [] for name in ways}

    def rate(name):
        torch.compiler.reset()  # what was compiled for the models of the runs before, which would count
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        done = run_script("an.py", *bench.large(*bench.sizes.resnet), "--epochs", 3, *ways[name])
        memory[name].append(torch.cuda.max_memory_allocated() / 1e6)
        return middle(done, "images_per_s")

    rates = interleave(bench.sizes.repeats, **{name: partial(rate, name) for name in ways})
    for a, b in (("bf16", "fp32"), ("compiled", "bf16")):
        yield compare(9, f"an.py, {a} over {b}", rates[a], rates[b], "img/s")
        yield compare(9, f"its device memory, {a} over {b}", memory[a], memory[b], "MB")


ITEMS = dict(enumerate((the_loop, vlpl_over_an, vlpl_over_release, precision, reading, methods, scaling, processes), 1))
ITEMS[10] = a_million  # 9 is on_cuda

# ---- 5. The table

HEADER = "| | what | ours | other | | ratio | quartiles | bar | |\n|---|---|---|---|---|---|---|---|---|"


def line(row):
    """A row as Markdown"""
    number = lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    bar = "" if row.at_least is None else f">= {row.at_least:g}"
    bar = bar if row.at_most is None else f"<= {row.at_most:g}"
    ratio, spread = number(row.ratio) + "x" * row.faster, " to ".join(map(number, row.quartiles))
    met = {True: "met", False: "NOT MET", None: ""}[row.met]
    cells = row.item, row.what, number(row.ours), number(row.other), row.unit, ratio, spread, bar, met
    return f"| {' | '.join(map(str, cells))} |"


def describe_machine(device):
    cpus = [line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if not Path("/proc/self/status").exists():
        common.die("memory is measured with /proc, which only Linux has")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not torch.cuda.is_available():
        common.die("--device cuda: torch sees no CUDA device here")
    items = {str(n): measure for n, measure in ({**ITEMS, 9: on_cuda} if device == "cuda" else ITEMS).items()}
    chosen = dict.fromkeys(args.only.split(",") if args.only else items)
    if not set(chosen) <= set(items):
        common.die(f"--only {args.only}: there are {', '.join(items)}")
    sizes = Sizes(**(QUICK if args.quick else CUDA if device == "cuda" else {}))
    machine, rows = describe_machine(device), []

    def save():
        if args.json:
            content = {"machine": machine, "quick": args.quick, "sizes": asdict(sizes)}
            data_prep.write_json(
                Path(args.json), {**content, "rows": [{**asdict(row), "met": row.met} for row in rows]}
            )

    save()  # a file that can't be written is to be met here, not after the first item
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + f"\n\n{HEADER}", flush=True)
    with tempfile.TemporaryDirectory(prefix="spml-bench-") as folder:
        bench = Bench(Path(folder), sizes, device)
        for n in chosen:
            print(f"{n}. {items[n].__doc__} ...", file=sys.stderr, flush=True)
            for row in items[n](bench):
                rows.append(row)
                print(line(row), flush=True)
                save()
    print("".join(f"\n{row.item}. {row.note}\n" for row in rows if row.note), end="")
    if args.quick:
        print("\n--quick: these numbers mean nothing")
    sys.exit(not args.quick and any(row.met is False for row in rows))
