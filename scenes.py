"""The embedded data set: 6,000 synthetic images of 64 x 64 pixels, 20 classes, and a small CLIP for them.

    python data_prep.py scenes --contact_sheet scenes.png

For training from scratch without a download: one to five objects on a cluttered background, with co-occurring and rare
classes. Everybody gets the same files: all randomness is from numpy's frozen RandomState, all pixels are from integer
arithmetic and the pinned Pillow and matplotlib (whose DejaVu font draws the objects).
"""

import hashlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm, trange

# ---- 1. Labels and layouts

VERSION = 1  # part of every image's seed: raise it when anything below changes
SIZES = {"train": 4000, "val": 2000}
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


def scene(part, i):
    """Image i of a part ("train" or "val"): its random state, labels and layout"""
    rs = np.random.RandomState((VERSION, list(SIZES).index(part), i))
    y = draw_labels(rs)
    return rs, y, draw_layout(rs, y)


# ---- 2. Pixels

GLYPH_SIDE = 128
BRIGHTNESS = np.array((3, 6, 1))  # of red, green and blue


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


@cache
def glyph_mask(glyph):
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 120)
    left, top, right, bottom = font.getbbox(glyph)
    side = max(right - left, bottom - top) + 4
    image = Image.new("L", (side, side))
    corner = (side - right - left) // 2, (side - bottom - top) // 2
    ImageDraw.Draw(image).text(corner, glyph, 255, font)
    return image.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.BOX)


# ---- 3. Files


def make(folder):
    """Writes the data set into `folder`, all or nothing; does nothing when it is there."""
    description = {"name": "scenes", "version": VERSION, "classes": CLASSES, "image_folder": "images"}
    if is_made(folder, "dataset.json", description):
        return
    with (
        replacing(folder, "dataset.json", description) as new,
        tqdm(total=sum(SIZES.values()), desc="making scenes", unit="img", leave=False, disable=None) as bar,
    ):
        for part, n in SIZES.items():
            (new / "images" / part).mkdir(parents=True)
            names = np.array([f"{part}/{i:05d}.png" for i in range(n)])
            y = np.zeros((n, len(CLASSES)), dtype=np.uint8)
            pixels = np.zeros((n, SIDE, SIDE, 3), dtype=np.uint8)
            for i in range(n):
                rs, y[i], layout = scene(part, i)
                pixels[i] = draw_scene(rs, layout)
                Image.fromarray(pixels[i]).save(new / "images" / names[i], compress_level=1)
                bar.update()
            np.save(new / f"formatted_{part}_images.npy", names)
            np.save(new / f"formatted_{part}_labels.npy", y)
            np.save(new / f"cache_{part}_{SIDE}.npy", pixels)
            made_for = hashlib.sha256("\n".join(names).encode()).hexdigest()  # as data_prep.Images checks it
            write_json(new / f"cache_{part}_{SIDE}.json", {"images": made_for})


def is_made(folder, name, description):
    """Whether `folder` is there, with `description` in its file `name`. False: none yet, or of an older version. Ends
    the program at anything else, which may be the user's own work."""
    kind = "CLIP" if "clip" in name else "data set"
    remedy = "move it away, or choose another --data_root"
    if not folder.exists():
        return False
    try:
        found = json.loads((folder / name).read_text())
    except FileNotFoundError:
        die(f"{folder} exists but holds no {kind} of scenes (there is no {folder / name}): {remedy}")
    except (OSError, ValueError) as problem:
        die(f"{folder / name} can't be read ({problem}): {remedy}")
    if found == description:
        return True
    version, latest = version_of(found), version_of(description)
    if version is None:
        die(f"{folder} holds another {kind} than scenes: {remedy}")
    if version >= latest:
        die(f"{folder} holds an edited {kind} or one of a version after {latest}: {remedy}")
    return False


def version_of(description):
    """Version number in a description of the data set or of its CLIP, None in any other"""
    match description:
        case {"name": "scenes", "version": int(version)} | {"scenes": {"version": int(version)}}:
            return version


@contextmanager
def replacing(folder, name, description):
    """A new folder that becomes `folder`, with its description, when the block ends well, unless another process has
    made the same meanwhile. One of an older version, which may have been edited, is kept under another name."""
    stem = f".{folder.name}-{platform.node()}-"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for litter in folder.parent.glob(f"{stem}*"):  # of processes that were killed
            if not Path("/proc", litter.name[len(stem) :].split("-")[0]).exists() and Path("/proc/self").exists():
                shutil.rmtree(litter, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f"{stem}{os.getpid()}-", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            yield new
            write_json(new / name, description)
            os.sync()  # a power cut after the rename leaves whole files
            if is_made(folder, name, description):
                return
            if folder.exists():
                old = folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}")
                folder.rename(old)
                print(f"{folder} was of an older version and is now {old}", file=sys.stderr)
            new.rename(folder)
    except OSError as problem:
        if not is_made(folder, name, description):
            die(f"{folder} can't be written: {problem}")


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1) + "\n")


def die(message):
    raise SystemExit(f"error: {message}")


# ---- 4. Backbone and CLIP


def small_resnet(width=32):
    """--backbone resnet_small, a ResNet-10 for a laptop: 3x3 stem, two stages of two blocks, 8 x 8 map -> (B, 128)"""
    from torch import nn
    from torchvision.models.resnet import BasicBlock

    def stage(before, after):
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, 2, bias=False), nn.BatchNorm2d(after))
        return nn.Sequential(BasicBlock(before, after, 2, shortcut), BasicBlock(after, after))

    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    stages = stage(width, 2 * width), stage(2 * width, 4 * width)
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


CLIP_FILE = Path(__file__).with_name("scenes_clip.safetensors")  # half precision, with the words of captions alone
CLIP = {  # the small CLIP of scenes, as open_clip describes a model; 2 million weights, most of them words
    "scenes": {  # of CLIP_FILE: other weights take a higher version
        "version": 2,
        "sha256": "afe5a033293bc2a599918ed8b4d609edf87fc8f117988cb73900c4c48d3f76cf",
    },
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
    rs = np.random.RandomState((VERSION, len(SIZES), i))
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


def make_clip(folder):
    """Unpacks the CLIP of scenes into `folder` (for local-dir:), all or nothing; does nothing when it is there."""
    if is_made(folder, "open_clip_config.json", CLIP):
        return
    import torch  # only here: drawing the data set takes none
    from safetensors.torch import load, save_file

    content = CLIP_FILE.read_bytes() if CLIP_FILE.is_file() else b""
    if hashlib.sha256(content).hexdigest() != CLIP["scenes"]["sha256"]:
        die(f"{CLIP_FILE} is missing, cut off or edited: restore it, with git checkout {CLIP_FILE.name}")
    weights = {name: w.float() if w.is_floating_point() else w for name, w in load(content).items()}
    # A word of no caption has a row of zeros: it carries no meaning, where an untrained row would carry noise.
    text = CLIP["model_cfg"]["text_cfg"]
    rows = torch.zeros(text["vocab_size"], text["width"])
    rows[weights.pop("words")] = weights["token_embedding.weight"]
    with replacing(folder, "open_clip_config.json", CLIP) as new:
        save_file(weights | {"token_embedding.weight": rows}, new / "open_clip_model.safetensors")


def ship_clip(path=CLIP_FILE):
    """Trains the CLIP of scenes anew and writes its weights: python -c "import scenes; scenes.ship_clip()". No two
    kinds of CPU, nor two numbers of threads, train the same weights: that is why they are shipped."""
    from safetensors.torch import save_file

    net, words = train_clip()
    weights = {name: w.half() if w.is_floating_point() else w for name, w in net.state_dict().items()}
    rows = weights["token_embedding.weight"][words]
    save_file(weights | {"token_embedding.weight": rows, "words": words}, path)
    print(f"{path}: sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()}")


def train_clip(batches=200, passes=8, pairs=12, lr=3e-3):
    """Sees captioned images of a separate stream, never the data set's images or labels. -> the net, its words"""
    import open_clip
    import torch

    batch, steps = len(CLASSES) + pairs, batches * passes
    images = trange(batches * batch, desc="drawing captioned scenes", unit="img", leave=False, disable=None)
    pixels, captions = zip(*(captioned_scene(i, batch) for i in images))
    pixels = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
    tokens = open_clip.SimpleTokenizer(context_length=CLIP["model_cfg"]["text_cfg"]["context_length"])(list(captions))
    mean, std = (torch.tensor(CLIP["preprocess_cfg"][what]).view(3, 1, 1) for what in ("mean", "std"))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(VERSION)
        net = open_clip.CLIP(**CLIP["model_cfg"])
        optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps)
        contrast = open_clip.ClipLoss()
        bar = trange(steps, desc="training CLIP on them", leave=False, disable=None)
        for step in bar:
            if step % batches == 0:  # batches keep one of each kind
                order = torch.stack([torch.randperm(batches) for _ in range(batch)], 1)
            rows = order[step % batches] * batch + torch.arange(batch)
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
    return net, tokens[tokens > 0].unique()  # without the padding
