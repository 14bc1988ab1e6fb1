"""How fast it is on this machine: everything side by side in one run, medians of interleaved repeats

    python tests/bench.py
    python tests/bench.py --only 1,4 --json bench.json
    python tests/bench.py --quick

The scripts run as they are, in this process, on made-up images and random weights. `ours` and `other` are medians,
`ratio` is ours over other or, with an x, how many times faster ours is; `quartiles` are those of the repeats' ratios,
and so show the noise. Some bars are on an exponent: time or memory grows like size^exponent. Memory is RssAnon, which
only Linux tells, or on CUDA the device's. Ends with code 1 where a bar is not met.
"""

import csv
import io
import multiprocessing
import os
import platform
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
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

import common  # noqa: E402

# ---- 1. Settings


@dataclass
class Args:
    only: str = ""  # numbers of what to measure, such as 1,4 (default: all)
    quick: bool = False  # tiny sizes, to see whether it runs: the numbers mean nothing
    json: str = ""  # write every number to this file too
    device: str = "auto"  # auto, cpu, cuda


@dataclass
class Sizes:
    repeats: int = 5
    small: int = 500  # images of the set that is trained on as scenes is; a fifth is validation
    resnet: tuple = ("resnet50", 224, 10, 4)  # a larger backbone: name, side, images, batch
    pair: tuple = ("resnet50", 448, 5, 4)  # VLPL's pair, one step an epoch
    pair_repeats: int = 3
    clip: str = "ViT-L-14-336"
    scores: tuple = ((40137, 80), (60260, 81))  # the test sets of COCO and NUS
    jpegs: int = 64
    anchors: tuple = (32, 312)  # images, classes: CUB
    queue: int = 8192
    state: tuple = (4574, 20)  # images, classes: VOC


QUICK = dict(repeats=2, small=40, resnet=("resnet18", 64, 10, 4), pair=("resnet18", 64, 5, 4), pair_repeats=1)
QUICK |= dict(clip="RN50", scores=((500, 8),), jpegs=8, anchors=(4, 312), queue=256, state=(200, 20))
CUDA = dict(small=4000, resnet=("resnet50", 448, 640, 16), pair=("resnet50", 448, 320, 8), pair_repeats=5)

VOC = {"train": 4574, "val": 1143, "test": 5823}
VOC_EPOCHS = 10

# ---- 2. Measuring


def quartiles(values):
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, high


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


def seconds(act):
    synchronise()
    started = time.perf_counter()
    act()
    synchronise()
    return time.perf_counter() - started


def synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def anonymous_memory():
    """RssAnon: bytes that are this process's own; pages of a mapped file are not"""
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def peak_memory(act, device="cpu"):
    """-> bytes before, and the most there were while act() ran"""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        act()
        return before, torch.cuda.max_memory_allocated()
    before, done = anonymous_memory(), threading.Event()
    samples = [before]

    def watch():
        while not done.wait(0.003):
            samples.append(anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    done.set()
    watcher.join()
    return before, max(samples)


def in_new_process(act, *arguments):
    """Memory that another measurement has left behind must not count"""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(act, *arguments).result()


@dataclass
class Row:
    item: int
    what: str
    ours: float
    other: float
    unit: str
    ratio: float
    spread: tuple = ()  # quartiles of the repeats' ratios
    at_least: float | None = None
    at_most: float | None = None
    faster: bool = False
    note: str = ""
    raw: dict = field(default_factory=dict)

    @property
    def met(self):
        """None: there is no bar"""
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return None if self.at_most is None else self.ratio <= self.at_most


def compare(item, what, ours, other, unit, faster=False, **more):
    """A row of two lists of repeats"""
    a, b = (other, ours) if faster else (ours, other)
    ratio = statistics.median(a) / statistics.median(b)
    spread = quartiles([x / y for x, y in zip(a, b)])
    medians = statistics.median(ours), statistics.median(other)
    return Row(item, what, *medians, unit, ratio, spread, faster=faster, raw={"ours": ours, "other": other}, **more)


def growth(item, what, sizes, repeats, unit, **more):
    """A row of the exponent; a repeat is a list of a value per size. `ours` is the value of the last, `other` of the
    first size"""
    slopes = [exponent(sizes, values) for values in repeats]
    median = [statistics.median(values) for values in zip(*repeats)]
    raw = {"sizes": list(sizes), "values": repeats}
    return Row(item, what, median[-1], median[0], unit, exponent(sizes, median), quartiles(slopes), raw=raw, **more)


# ---- 3. What it is measured with


class Bench:
    """Made-up data sets in a temporary folder, and the scripts on them"""

    def __init__(self, folder, sizes, device):
        self.folder, self.sizes, self.device = folder, sizes, device

    @cache  # noqa: B019
    def dataset(self, name, n, side):
        """A folder of n training rows, with its cache; its last name chooses the scripts' presets"""
        import data_prep

        folder, rs = self.folder / f"{n}-{side}" / name, np.random.RandomState(0)
        y = rs.rand(n, 20) < 0.1
        y[np.arange(n), rs.randint(0, 20, n)] = True
        (folder / "images").mkdir(parents=True)
        for i in range(16):
            voc_sized_image(rs).save(folder / "images" / f"{i}.jpg", quality=90)
        np.save(folder / "formatted_train_images.npy", np.array([f"{i % 16}.jpg" for i in range(n)]))
        np.save(folder / "formatted_train_labels.npy", y.astype(np.int64))
        classes = [f"object {c}" for c in range(20)]
        common.write_json(folder / "dataset.json", {"classes": classes, "image_folder": "images"})
        data_prep.make_cache(common.Images(folder, folder / "images", "train", side), "resizing")
        return str(folder)

    @cache  # noqa: B019
    def small_clip(self):
        """A CLIP as large as that of scenes, untrained"""
        import open_clip
        from safetensors.torch import save_file

        import data_prep

        folder = self.folder / "clip"
        folder.mkdir()
        save_file(open_clip.CLIP(**data_prep.CLIP["model_cfg"]).state_dict(), folder / "open_clip_model.safetensors")
        common.write_json(folder / "open_clip_config.json", data_prep.CLIP)
        return ("--clip_model", f"local-dir:{folder}")

    def small(self, share=1.0):
        """Flags for a run at the size of scenes"""
        return self.flags("scenes", int(share * self.sizes.small), 64)

    def large(self, backbone, side, n, batch):
        """Flags for a run at the size of VOC"""
        return (*self.flags("voc", n, side), "--backbone", backbone, "--weights", "none", "--batch_size", batch)

    def flags(self, name, n, side):
        place = ("--data_root", self.folder, "--out", self.folder / "runs", "--device", self.device)
        return ("--dataset", self.dataset(name, n, side), "--image_size", side, *place)


def voc_sized_image(rs):
    """500 x 375 pixels that make a JPEG of about 110 KB, VOC's mean"""
    smooth = Image.fromarray(rs.randint(0, 256, (24, 32, 3)).astype(np.uint8)).resize((500, 375), Image.BICUBIC)
    return Image.fromarray(np.clip(smooth + rs.normal(0, 11, (375, 500, 1)), 0, 255).astype(np.uint8))


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
    return statistics.median(row[column] for row in done.run.rows[1:])


def training_seconds(name, *flags):
    """What an epoch of a script takes before it evaluates"""
    done = run_script(name, *flags)
    return len(done.data.train) / middle(done, "images_per_s")


def bare_rate(done, batches, forward, epochs=2):
    """images/s of nothing but the steps of a finished run: its model and optimizer, batches in memory"""

    def epoch():
        for x, z in batches:
            with done.run.autocast():
                loss = forward(x, z)
            loss.backward()
            done.optimizer.step()
            done.optimizer.zero_grad()

    done.model.train()
    n = sum(len(x) for x, _ in batches)
    epoch()
    return statistics.median(n / seconds(epoch) for _ in range(epochs))


# ---- 4. What is measured


def the_loop(bench):
    """Training throughput over the bare step"""
    import an

    cases = {
        "resnet_small, 64 px, batch 8": bench.small(),
        "{0}, {1} px, batch {3}".format(*bench.sizes.resnet): bench.large(*bench.sizes.resnet),
    }
    for what, flags in cases.items():
        ours, bare = [], []
        for _ in range(bench.sizes.repeats):
            done = run_script("an.py", *flags, "--epochs", 3)
            batches = [(x, z) for x, z, _ in done.run.batches(done.data.train)]
            ours.append(middle(done, "images_per_s"))
            bare.append(bare_rate(done, batches, lambda x, z: an.an_loss(done.model(x).float(), z)))  # noqa: B023
        yield compare(1, f"an.py over the bare step ({what})", ours, bare, "img/s", at_least=0.95)


def vlpl_over_an(bench):
    """An epoch of vlpl.py over one of an.py, images embedded before"""
    flags = (*bench.small(), "--epochs", 3)
    clip = bench.small_clip()
    first = images_embedded(run_script("vlpl.py", *flags, *clip))
    an, vlpl = (
        (lambda: middle(run_script("an.py", *flags), "seconds")),
        (lambda: middle(run_script("vlpl.py", *flags, *clip), "seconds")),
    )
    times = interleave(bench.sizes.repeats, an=an, vlpl=vlpl)
    yield compare(2, "an epoch of vlpl.py over one of an.py", times["vlpl"], times["an"], "s", at_most=1.05)
    again = images_embedded(run_script("vlpl.py", *flags, *clip, "--tau", 0.07, "--theta", 0.4))
    what = "images embedded by a second vlpl.py, other tau and theta"
    yield Row(2, what, again, first, "images", again / first, at_most=0.0)


def images_embedded(done):
    lines = [line for line in done.printed.splitlines() if line.startswith("embedded") and "img/s" in line]
    return sum(int(line.split(": ")[1].split()[0]) for line in lines)


def vlpl_over_release(bench):
    """A whole run of vlpl.py against the way the authors' release works"""
    import open_clip

    import vlpl

    s, flags = bench.sizes, (*bench.large(*bench.sizes.pair), *bench.small_clip(), "--epochs", 2)
    untrained = lambda name, _, dtype: (open_clip.create_model(name), open_clip.get_tokenizer(name), {})
    with mock.patch.object(common, "load_open_clip", untrained):
        clip = common.Clip(vlpl.Args(clip_model=s.clip), torch.device(bench.device))
    text = F.normalize(torch.randn(20, *clip.encode_text(clip.tokenizer("a"))[0].shape, device=bench.device), dim=1)
    labels = torch.rand(VOC["val"] + VOC["test"], 20) < 0.1
    scores = torch.randn(labels.shape)

    def ours():
        done = run_script("vlpl.py", *flags)  # its CLIP is a small one: the loop is the same
        data, run, n = done.data, done.run, len(done.data.train)
        run.args.data_root = tempfile.mkdtemp(dir=bench.folder)  # where nothing is embedded yet
        with redirect_stdout(io.StringIO()):
            embed = seconds(lambda: run.embed_images(clip, data.train, "train")) / n
        evaluate = seconds(lambda: run.predict(done.model, data.train)) / n
        mAP = seconds(lambda: common.mean_average_precision(scores, labels))
        return {"embed": embed, "train": 1 / middle(done, "images_per_s"), "evaluate": evaluate, "mAP": mAP}

    def release():
        args = vlpl.Args(backbone=s.pair[0], image_size=s.pair[1], weights="none")
        folder = Path(bench.dataset("voc", s.pair[2], s.pair[1]))
        z = torch.from_numpy(common.draw_single_positives(np.load(folder / "formatted_train_labels.npy")))
        jpegs = Jpegs([folder / "images" / name for name in common.read_names(folder, "train")][: s.pair[3]], z, args)
        net = common.Classifier(args, 20).to(bench.device)
        net.features = net.body  # its pixels come normalised
        optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
        epoch = lambda step: seconds(lambda: release_epoch(net, clip, text, jpegs, args, step)) / len(jpegs)
        mAP = seconds(lambda: sklearn_precision(scores, labels))
        return {"train": epoch(optimizer), "evaluate": epoch(None), "mAP": mAP}

    costs = interleave(s.pair_repeats, ours=ours, release=release)
    epochs = lambda cost: (
        VOC_EPOCHS * (VOC["train"] * cost["train"] + (VOC["val"] + VOC["test"]) * cost["evaluate"] + cost["mAP"])
    )
    totals = [sum(VOC.values()) * cost["embed"] + epochs(cost) for cost in costs["ours"]]
    middles = {
        side: {name: statistics.median(cost[name] for cost in costs[side]) for name in costs[side][0]} for side in costs
    }
    a, b = middles["ours"], middles["release"]
    n, held_out = VOC["train"], VOC["val"] + VOC["test"]
    note = (
        f"seconds per image; ours {n + held_out} x {a['embed']:.3g} to embed + {VOC_EPOCHS} x ({n} x {a['train']:.3g} "
        f"+ {held_out} x {a['evaluate']:.3g} + {a['mAP']:.2g} for mAP), with a test evaluation in every epoch, though "
        f"only better epochs have one; other {VOC_EPOCHS} x ({n} x {b['train']:.3g} + {held_out} x {b['evaluate']:.3g} "
        f"+ {b['mAP']:.2g} for mAP)"
    )
    what = f"VOC, {VOC_EPOCHS} epochs of vlpl.py against the release's way ({s.clip}, {s.pair[0]} at {s.pair[1]})"
    row = compare(3, what, totals, [epochs(cost) for cost in costs["release"]], "s", True, at_least=4, note=note)
    row.raw["costs"] = costs
    yield row


class Jpegs:
    """What the release's data loader gives: decoded, resized, flipped and normalised in every epoch"""

    def __init__(self, paths, z, args):
        self.paths, self.z, self.size = paths, z, args.image_size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        x = pictures.to_tensor(Image.open(self.paths[i]).convert("RGB").resize((self.size, self.size)))
        x = pictures.hflip(x) if np.random.rand() < 0.5 else x
        return pictures.normalize(x, common.IMAGENET_MEAN, common.IMAGENET_STD), self.z[i]


def release_epoch(net, clip, text, jpegs, args, optimizer):
    """CLIP in every batch, in evaluation too, which is what it is without an optimizer"""
    import vlpl

    net.train(optimizer is not None)
    for x, z in DataLoader(jpegs, args.batch_size, num_workers=4 if clip.device.type == "cuda" else 0):
        x, z = x.to(clip.device), z.to(clip.device)
        with torch.no_grad():
            image = clip.net.encode_image(F.interpolate(x, clip.size, mode="bicubic").to(clip.dtype)).float()
            pseudo = vlpl.vlpl_pseudo_labels(F.normalize(image, dim=1) @ text.T, z, args.tau, args.theta)
        with torch.set_grad_enabled(optimizer is not None):
            loss = vlpl.vlpl_loss(net(x), z, pseudo, args.alpha, args.beta)
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
        chance = torch.Generator().manual_seed(0)
        scores, y = torch.randn(n, classes, generator=chance), torch.rand(n, classes, generator=chance) < 0.04
        y[0] = True
        arrays, device_scores, device_y = (scores.numpy(), y.numpy()), scores.to(bench.device), y.to(bench.device)
        sides = {
            "ours": lambda: seconds(lambda: common.mean_average_precision(scores, y)),  # noqa: B023
            "sklearn": lambda: seconds(lambda: sklearn_precision(*arrays)),  # noqa: B023
            "sort": lambda: seconds(lambda: scores.T.contiguous().sort(dim=1)),  # noqa: B023
        }
        if bench.device == "cuda":
            sides["cuda"] = lambda: seconds(lambda: common.mean_average_precision(device_scores, device_y))  # noqa: B023
        times, size = interleave(bench.sizes.repeats, **sides), f"{n} x {classes}"
        yield compare(4, f"mAP against scikit-learn, {size}", times["ours"], times["sklearn"], "s", True, at_least=2)
        yield compare(4, f"mAP over one sort, {size}", times["ours"], times["sort"], "s")
        if "cuda" in times:
            yield compare(4, f"mAP on CUDA against scikit-learn, {size}", times["cuda"], times["sklearn"], "s", True)
        ours, theirs = common.average_precision(scores, y).numpy(), sklearn_precision(*arrays)
        worst = np.abs(ours - theirs).max()
        what = f"largest difference of an AP to scikit-learn's, {size}"
        yield Row(4, what, ours.mean(), theirs.mean(), "AP", float(worst), at_most=1e-9)


def reading(bench):
    """The image cache against JPEG files"""
    side = bench.sizes.pair[1]
    images = open_images(bench.dataset("voc", bench.sizes.jpegs, side), side)
    files = images.from_files(side, images.resample)
    read_all(images)  # from the disk; from now on from the system's cache, as the JPEG files
    rate = lambda source: len(source) / seconds(lambda: read_all(source))
    rates = interleave(bench.sizes.repeats, cache=lambda: rate(images), files=lambda: rate(files))
    what = f"images read from the cache over decoded from JPEG, {side} px"
    yield compare(5, what, rates["cache"], rates["files"], "img/s", at_least=5)
    folders = [bench.dataset("voc", scale * bench.sizes.jpegs, side) for scale in (1, 4)]
    (once,), (four_times,) = ([in_new_process(reading_memory, folder, side) / 1e6] for folder in folders)
    what = "RssAnon while 4 times the images are read, over that of 1x"
    yield Row(5, what, four_times, once, "MB", four_times / once, at_most=1.05)


def open_images(folder, side):
    return common.Images(Path(folder), Path(folder) / "images", "train", side)


def read_all(images):
    order = np.random.RandomState(0).permutation(len(images))
    return sum(int(images[rows].flatten()[0]) for rows in common.in_batches(order, 8))


def reading_memory(folder, side):
    return peak_memory(lambda: read_all(open_images(folder, side)))[1]


def methods(bench):
    """What em_apl.py, aevlp.py and lac.py add"""
    repeats, flags = bench.sizes.repeats, (*bench.small(), "--epochs", 4)
    time_of = lambda *more: lambda: training_seconds("em_apl.py", *flags, "--warmup", 1, *more)
    times = interleave(repeats, plain=time_of("--no_apl"), apl=time_of())
    selection = [apl - plain for apl, plain in zip(times["apl"], times["plain"])]
    yield compare(6, "em_apl.py's selection over a training epoch", selection, times["plain"], "s", at_most=0.4)

    T = 8
    flags = (*bench.small(0.5), "--epochs", T)
    mean = lambda name, *more: (
        lambda: statistics.mean(row["seconds"] for row in run_script(name, *flags, *more).run.rows)
    )
    aevlp = lambda every: mean("aevlp.py", *bench.small_clip(), "--refresh_every", every)
    times = interleave(repeats, an=mean("an.py"), each=aevlp(1), once=aevlp(T))
    for every, name in ((1, "each"), (T, "once")):
        what = f"an epoch of aevlp.py --refresh_every {every} over one of an.py, CLIP of scenes' size, T = {T}"
        yield compare(6, what, times[name], times["an"], "s")

    yield lac_step(bench)
    yield from lac_loss(bench)


def lac_step(bench):
    ours, bare = [], []
    for _ in range(bench.sizes.repeats):
        done = run_script("lac.py", *bench.small(), "--epochs", 3, "--end_to_end")
        views = done.run.batches(done.data.train, view=done.strong_view)
        batches = [
            (torch.cat([x[:, 0], x[:, 1]]).contiguous(memory_format=torch.channels_last), z) for x, z, _ in views
        ]

        def forward(x, z):
            logits, embed = done.model(x, True)  # noqa: B023
            return done.an_loss(logits[: len(z)], z) + embed.mean()  # noqa: B023

        ours.append(middle(done, "images_per_s"))
        bare.append(bare_rate(done, batches, forward) / 2)  # each image is there twice
    return compare(6, "lac.py over its model's bare two-view step (resnet_small, 64 px)", ours, bare, "img/s")


def lac_loss(bench):
    """L_LAC alone, where all labels are anchors"""
    (images, classes), K = bench.sizes.anchors, bench.sizes.queue
    sizes = [K // 4, K // 2, K]
    loss = {k: lac_problem(images * classes, k, classes, bench.device) for k in sizes}
    repeats = [[seconds(loss[k]) for k in sizes] for _ in range(bench.sizes.repeats)]
    what = f"exponent of L_LAC's time in K, {images} x {classes} anchors, K up to {K}"
    yield growth(6, what, sizes, repeats, "s", at_most=1.1)
    peaks = [in_new_process(lac_memory, share * classes, K, classes, bench.device) for share in (images // 4, images)]
    what = f"L_LAC's memory at {images} x {classes} anchors over a quarter of them, K {K}"
    yield Row(6, what, peaks[1] / 1e6, peaks[0] / 1e6, "MB", peaks[1] / peaks[0], at_most=1.25)


def lac_problem(anchors, k, classes, device):
    import lac

    embed = lambda n: F.normalize(torch.randn(n, 128, device=device), dim=1).requires_grad_()
    kind = lambda n: torch.arange(n, device=device) % classes
    a, b = embed(anchors), embed(k)
    return lambda: lac.lac_loss(a, kind(anchors), b, kind(k), 0.5).backward()


def lac_memory(anchors, k, classes, device):
    before, peak = peak_memory(lac_problem(anchors, k, classes, device), device)
    return peak - before


def scaling(bench):
    """How time and memory grow with images and classes"""
    scales = (1, 2, 4)
    flags = [(*bench.small(scale / 2), "--epochs", 2) for scale in scales]
    epoch = {str(scale): lambda f=f: middle(run_script("an.py", *f), "seconds") for scale, f in zip(scales, flags)}
    times = interleave(bench.sizes.repeats, **epoch)
    what = "exponent of an epoch's time, 1x to 4x images"
    yield growth(7, what, scales, list(map(list, zip(*times.values()))), "s", at_most=1.1)
    peaks = [in_new_process(training_memory, bench.device, f) / 1e6 for f in flags]
    yield growth(7, "exponent of training's memory, 1x to 4x images", scales, [peaks], "MB", at_most=1.1)

    scales, (n, classes) = (1, 4, 16), bench.sizes.state
    update = {str(scale): label_state(n, scale * classes, bench.device) for scale in scales}
    times = interleave(bench.sizes.repeats, **{name: lambda f=f: seconds(f) for name, f in update.items()})
    what = f"exponent of the label state's time, {n} images, {classes} to {16 * classes} classes"
    yield growth(7, what, scales, list(map(list, zip(*times.values()))), "s", at_most=1.1)
    peaks = [in_new_process(label_memory, n, scale * classes, bench.device) / 1e6 for scale in scales]
    yield growth(7, "exponent of the label state's memory", scales, [peaks], "MB", at_most=1.1)


def training_memory(device, flags):
    return peak_memory(lambda: run_script("an.py", *flags), device)[1]


def label_state(n, classes, device):
    """What VLPL and APL compute for all training images at once"""
    import em_apl
    import vlpl

    cosine, z = torch.rand(n, classes, device=device), torch.zeros(n, classes, dtype=torch.int8, device=device)

    def update():
        vlpl.vlpl_pseudo_labels(cosine, z, 0.03, 0.3, 0.1)
        em_apl.select_pseudo_negatives(cosine, z, [n // 10] * classes)

    return update


def label_memory(n, classes, device):
    before, peak = peak_memory(lambda: label_state(n, classes, device)(), device)
    return peak - before


def processes(bench):
    """Two processes and one, the same global batch, the same cores"""
    threads = torch.get_num_threads()
    two = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    flags = (*bench.small(), "--epochs", 4, "--device", "cpu")
    one_rate, two_rate = (
        (lambda: process_rate((), threads, flags)),
        (lambda: process_rate(two, max(1, threads // 2), flags)),
    )
    rates = interleave(bench.sizes.repeats, one=one_rate, two=two_rate)
    yield compare(8, "an.py in two gloo processes over one, the same cores", rates["two"], rates["one"], "img/s")


def process_rate(launcher, threads, flags):
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *launcher, ROOT / "an.py", *flags, "--out", out]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
        if done.returncode:
            common.die(f"an.py failed: {(done.stdout + done.stderr)[-500:]}")
        (path,) = Path(out).glob("*/metrics.csv")
        with open(path) as file:
            return statistics.median(float(row["images_per_s"]) for row in list(csv.DictReader(file))[1:])


def on_cuda(bench):
    """Precision, compilation and device memory"""
    flags, memory = (*bench.large(*bench.sizes.resnet), "--epochs", 3), {}

    def rate(name, *more):
        torch.cuda.reset_peak_memory_stats()
        done = run_script("an.py", *flags, *more)
        memory[name] = torch.cuda.max_memory_allocated() / 1e6
        return middle(done, "images_per_s")

    sides = {"bf16": ("--amp", "bf16"), "fp32": ("--amp", "off"), "compiled": ("--amp", "bf16", "--compile")}
    found = interleave(bench.sizes.repeats, **{name: partial(rate, name, *more) for name, more in sides.items()})
    yield compare(9, "an.py --amp bf16 over fp32", found["bf16"], found["fp32"], "img/s")
    yield compare(9, "an.py --compile over not", found["compiled"], found["bf16"], "img/s")
    yield Row(
        9, "device memory of bf16 over fp32", memory["bf16"], memory["fp32"], "MB", memory["bf16"] / memory["fp32"]
    )


ITEMS = dict(enumerate((the_loop, vlpl_over_an, vlpl_over_release, precision, reading, methods, scaling, processes), 1))

# ---- 5. The table


def table(rows):
    """Rows as lines of Markdown, notes below"""
    number = lambda value: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    lines = ["| | what | ours | other | | ratio | quartiles | bar | |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        bar = f">= {row.at_least:g}" if row.at_least is not None else ""
        bar = f"<= {row.at_most:g}" if row.at_most is not None else bar
        spread = " to ".join(map(number, row.spread))
        ratio = f"{number(row.ratio)}{'x' if row.faster else ''}"
        met = {True: "met", False: "NOT MET", None: ""}[row.met]
        cells = row.item, row.what, number(row.ours), number(row.other), row.unit, ratio, spread, bar, met
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines + [f"\n{row.item}: {row.note}" for row in rows if row.note])


def machine(device):
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def choose(only, items):
    chosen = only.split(",") if only else map(str, items)
    unknown = [word for word in chosen if word not in map(str, items)] if only else []
    if unknown:
        common.die(f"--only {only}: there is no {', '.join(unknown)}, only {', '.join(map(str, items))}")
    return {number: items[number] for number in items if not only or str(number) in only.split(",")}


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    if not Path("/proc/self/status").exists():
        common.die("memory is measured with /proc, so this needs Linux")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    items = choose(args.only, {**ITEMS, 9: on_cuda} if device == "cuda" else ITEMS)
    sizes = Sizes(**(QUICK if args.quick else CUDA if device == "cuda" else {}))
    rows, described = [], machine(device)
    with tempfile.TemporaryDirectory(prefix="spml-bench-") as folder:
        bench = Bench(Path(folder), sizes, device)
        for number, measure in items.items():
            print(f"{number}. {measure.__doc__} ...", file=sys.stderr, flush=True)
            started = time.perf_counter()
            rows += measure(bench)
            print(f"   {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print(table(rows))
    if args.quick:
        print("\n--quick: these numbers mean nothing")
    if args.json:
        content = {"machine": described, "quick": args.quick, "sizes": asdict(sizes)}
        common.write_json(Path(args.json), {**content, "rows": [{**asdict(row), "met": row.met} for row in rows]})
    sys.exit(not args.quick and any(row.met is False for row in rows))
