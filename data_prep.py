"""Prepares data sets: writes the files that every script reads.

    python data_prep.py scenes --contact_sheet scenes.png

`scenes` is made by the code below: pictures of twenty objects on cluttered backgrounds, for real training without a
download. Everyone gets the same files: all randomness comes from numpy's frozen RandomState, all pixels from integer
arithmetic and from the pinned Pillow and matplotlib (whose DejaVu font draws the objects).
"""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import matplotlib
import numpy as np
import tyro
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

import common

# ---- 1. Settings


@dataclass
class Args:
    dataset: tyro.conf.Positional[Literal["scenes"]]
    data_root: str = "data"  # the data set goes into a folder of its own in here
    contact_sheet: str = ""  # also write a picture of 5 x 5 training images with their labels


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
    """One image's labels: a theme makes its classes more likely, the rest is the classes' own frequency. -> (C,) uint8"""
    theme = THEMES[rs.randint(len(THEMES))]
    weight = np.array([often * (THEME_BOOST if name in theme else 1) for name, (_, _, often) in OBJECTS.items()])
    y = np.zeros(len(CLASSES), dtype=np.uint8)
    for _ in range(OBJECTS_PER_IMAGE[rs.randint(len(OBJECTS_PER_IMAGE))]):
        thresholds = np.cumsum(weight * (y == 0))
        y[np.searchsorted(thresholds, rs.randint(thresholds[-1]), side="right")] = 1
    return y


def draw_scene(rs, y):
    """An image that shows the objects of y. -> uint8 (SIDE, SIDE, 3)"""
    canvas = draw_background(rs)
    for _ in range(rs.randint(2)):
        stamp(rs, canvas, CLUTTER[rs.randint(len(CLUTTER))], size=rs.randint(12, 28), opacity=rs.randint(60, 101))
    shown = np.repeat(np.flatnonzero(y), 1 + (rs.randint(5, size=y.sum()) == 0))  # one in five objects comes twice
    for c in rs.permutation(shown):
        glyph, colour, _ = OBJECTS[CLASSES[c]]
        stamp(rs, canvas, glyph, size=rs.randint(22, 37), opacity=rs.randint(80, 101), colour=colour)
    for _ in range(rs.randint(2)):
        stamp(rs, canvas, CLUTTER[rs.randint(len(CLUTTER))], size=rs.randint(8, 18), opacity=rs.randint(60, 101))
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


def stamp(rs, canvas, glyph, size, opacity, colour=None):
    """Draws a glyph onto the canvas in place: rotated, stretched, maybe mirrored, anywhere, in a colour that shows."""
    fine, box = 4, size * 3 // 2  # drawn four times as fine, in a box with room to turn
    angle = np.deg2rad(rs.randint(-20, 21))
    cos, sin = round(float(np.cos(angle)), 9), round(float(np.sin(angle)), 9)
    scale = GLYPH_SIDE / (size * fine)
    stretch = scale * rs.randint(85, 118) / 100 * (1 if rs.randint(2) else -1)
    a, b, d, e = cos * stretch, sin * stretch, -sin * scale, cos * scale
    middle_in, middle_out = GLYPH_SIDE / 2, box * fine / 2
    matrix = (a, b, middle_in - (a + b) * middle_out, d, e, middle_in - (d + e) * middle_out)
    turned = glyph_mask(glyph).transform(
        (box * fine, box * fine), Image.Transform.AFFINE, matrix
    )  # nearest: no rounding
    mask = np.asarray(turned.reduce(fine), np.int64)[..., None]

    left, top = rs.randint(size * 2 // 5, SIDE - size * 2 // 5 + 1, 2) - box // 2
    inside = slice(max(top, 0), min(top + box, SIDE)), slice(max(left, 0), min(left + box, SIDE))
    mask = mask[inside[0].start - top : inside[0].stop - top, inside[1].start - left : inside[1].stop - left]
    under = canvas[inside]
    brightness = np.array((3, 6, 1))
    for _ in range(8):
        usual = colour is not None and rs.randint(5) > 0
        ink = np.clip(colour + rs.randint(-60, 61, 3), 0, 255) if usual else rs.randint(0, 256, 3)
        if abs(ink @ brightness - under.reshape(-1, 3).sum(0) @ brightness // (under.size // 3)) > 550:
            break
    grain = np.clip(ink + rs.randint(-12, 13, under.shape), 0, 255)
    mask = mask * opacity // 100
    canvas[inside] = (under * (255 - mask) + grain * mask) // 255


GLYPH_SIDE = 128


@cache
def glyph_mask(glyph):
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 120)
    left, top, right, bottom = font.getbbox(glyph)
    side = max(right - left, bottom - top) + 4
    image = Image.new("L", (side, side))
    corner = (side - right - left) // 2, (side - bottom - top) // 2
    ImageDraw.Draw(image).text(corner, glyph, 255, font)
    return image.resize((GLYPH_SIDE, GLYPH_SIDE), Image.Resampling.BOX)


def make_scenes(folder):
    """Writes the data set into `folder`, all or nothing; does nothing when it is there."""
    info = folder / "dataset.json"
    if info.exists() and common.read_json(info, "")["version"] == SCENES_VERSION:
        return
    if folder.exists() and not info.exists():
        common.die(f"{folder} exists but holds no scenes: move it away or choose another --data_root")
    building = folder.with_name(f".{folder.name}.{os.getpid()}")
    common.make_folder(building)
    total = sum(SCENES_SIZE.values())
    with tqdm(total=total, desc="making scenes", unit="img", leave=False, disable=None) as bar:
        for code, (part, n) in enumerate(SCENES_SIZE.items()):
            (building / "images" / part).mkdir(parents=True)
            names = np.array([f"{part}/{i:05d}.png" for i in range(n)])
            y = np.zeros((n, len(CLASSES)), dtype=np.uint8)
            pixels = np.zeros((n, SIDE, SIDE, 3), dtype=np.uint8)
            for i in range(n):
                rs = np.random.RandomState((SCENES_VERSION, code, i))
                y[i] = draw_labels(rs)
                pixels[i] = draw_scene(rs, y[i])
                Image.fromarray(pixels[i]).save(building / "images" / names[i], compress_level=1)
                bar.update()
            np.save(building / f"formatted_{part}_images.npy", names)
            np.save(building / f"formatted_{part}_labels.npy", y)
            np.save(building / f"formatted_{part}_labels_obs.npy", common.draw_single_positives(y))
            np.save(building / f"cache_{part}_{SIDE}.npy", pixels)
            made_for = {"images": common.hash_names(names)}
            (building / f"cache_{part}_{SIDE}.json").write_text(json.dumps(made_for))
    content = {"name": "scenes", "version": SCENES_VERSION, "classes": CLASSES, "image_folder": "images"}
    (building / "dataset.json").write_text(json.dumps(content, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    try:
        building.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(building)


# ---- 3. A look at the data


def contact_sheet(data, path, side=5):
    """side x side random training images, their true labels, the observed one marked."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = np.sort(np.random.RandomState(0).choice(len(data.train), side * side, replace=False))
    pixels = data.train.images[data.train.rows[chosen], None].numpy()
    figure, axes = plt.subplots(side, side, figsize=(2 * side, 2.3 * side), layout="constrained")
    for axis, idx, image in zip(axes.flat, chosen, pixels):
        y, z = data.train.y[idx].tolist(), data.train.z[idx].tolist()
        observed = [name for name, seen in zip(data.classes, z) if seen]
        hidden = [name for name, true, seen in zip(data.classes, y, z) if true and not seen]
        axis.imshow(image)
        axis.set_axis_off()
        axis.set_title("\n".join(observed), fontsize=9, fontweight="bold", color="tab:green", loc="left", pad=3)
        axis.text(0, -0.04, ", ".join(hidden), fontsize=7, color="grey", va="top", transform=axis.transAxes, wrap=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    args = tyro.cli(Args, use_underscores=True)
    data = common.load(SimpleNamespace(**vars(args), image_size=SIDE, known_ratio=0.0))
    if args.contact_sheet:
        contact_sheet(data, args.contact_sheet)
