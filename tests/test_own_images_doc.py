"""docs/own_images.md: its commands, in their order, on a folder of made-up photos."""

import csv
import os
import re
import shlex
import subprocess
import sys
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import timm
from conftest import COLOURS, ROOT
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from test_docs import blocks, flags_of

import data_prep

PAGE = (ROOT / "docs/own_images.md").read_text()
COMMANDS = [line for block in blocks(PAGE, "sh") for line in block.splitlines()]
CLASSES = dict(zip(("dog", "cat", "person", "dining table"), COLOURS.values()))  # of the page: a colour each
TRAINS = ("an.py", "em_apl.py", "vlpl.py")
WRITES = ("--contact_sheet", "--html", "--csv", "--figure", "--out", "--export")
PRINTED = (  # quoted by the page, without names and numbers of its run
    ", which has no preset, on a CPU: --linear",
    "training images are held out, the mAP of their known labels chooses the epoch",
    "% of its class's known labels); precision unknown",
    "; they are now all dog",
    "note: duplicate rows, merged: 1",
    "agreement_at_random 50.00",
    "clip_zero_shot_mAP: val",
    "files, at random, seed 0",
    "replace each ? by all labels of the image, ; between them, or by nothing where no class applies",
    "choose a license in README.md before you publish it",
)
SHARE = 6  # of the photos that the page draws for labelling, one in so many here


def words_of(command):
    """-> the script and what follows, without a comment"""
    python, script, *words = shlex.split(command, comments=True)
    assert python == "python", command
    return script, words


def leaves(script, words):
    """Files that a command is said to write"""
    flag = dict(pairwise(words))
    named = [flag[name] for name in WRITES if name in flag]
    if "--card" in flag:
        named += [f"{flag['--card']}/{name}" for name in ("README.md", "config.json", "model.safetensors", "script.py")]
    if script in TRAINS:
        named += [f"runs/{flag['--name']}/{name}" for name in ("best.pt", "curve.png", "result.json")]
    return named


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_exist(command):
    script, words = words_of(command)
    for flag in re.findall(r"(?<!\S)--(\w+)", shlex.join(words)):
        assert flag in flags_of(Path(script).stem), f"{script} has no --{flag}"


def test_classes_and_names_are_those_of_the_page():
    assert all(name in PAGE for name in CLASSES)
    assert re.search(r"IMG_\d{8}_\d{6}\.jpg,\w+", PAGE)
    written = {name for command in COMMANDS for name in leaves(*words_of(command)) if "/" not in name}
    assert written >= {"contact.png", "report.html", "predictions.csv", "predictions.png", "tasks.csv", "model.onnx"}
    assert all(PAGE.count(name) > 1 for name in written if name.endswith(".csv")), "the page says what is in it"


def take_photos(folder, n, seed):
    """Photos of one to three coloured discs, as a phone names them -> {name: its classes}"""
    rs, truth = np.random.RandomState(seed), {}
    folder.mkdir()
    for i in range(n):
        found = rs.permutation(list(CLASSES))[: rs.randint(1, 4)].tolist()
        photo = Image.fromarray(rs.randint(60, 120, (120, 160, 3)).astype(np.uint8))
        for place, name in zip(rs.permutation(12), found):
            x, y = place % 4 * 40, place // 4 * 40
            ImageDraw.Draw(photo).ellipse((x + 3, y + 3, x + 37, y + 37), fill=CLASSES[name])
        truth[f"IMG_2026041{seed}_{101530 + i}.jpg"] = found
        photo.save(folder / f"IMG_2026041{seed}_{101530 + i}.jpg")
    return truth


def fill_in(path, truth):
    """What the reader does by hand"""
    header, *rows = csv.reader(path.read_text().splitlines())
    assert rows
    assert all(row[1] == "?" for row in rows)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *([row[0], ";".join(truth[row[0]]), *row[2:]] for row in rows)])


@pytest.mark.slow
def test_every_command_runs(tmp_path, tiny_clip):
    pytest.importorskip("onnxscript")
    weights = timm.create_model("tf_efficientnet_lite0").state_dict()  # random ones: nothing is downloaded
    save_file(weights, tmp_path / "model.safetensors")
    truth = take_photos(tmp_path / "photos", 60, seed=2)
    take_photos(tmp_path / "new_photos", 10, seed=3)
    rows = [[name, found[0]] for name, found in truth.items()]
    next(row for row in rows if row[1] == "dog")[1] = "Dog "
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "label"), *rows, rows[5]])
    printed = ""
    for command in COMMANDS:
        script, words = words_of(command)
        more = ["--image_size", "64"] if script in (*TRAINS, "data_prep.py") else []
        more += ["--weights", "model.safetensors", "--epochs", "2", "--device", "cpu"] if script in TRAINS else []
        more += ["--clip_model", f"local-dir:{tiny_clip}"] if script == "vlpl.py" else []
        more += ["--to_label", str(int(words[words.index("--to_label") + 1]) // SHARE)] if "--to_label" in words else []
        names = [sorted(map(str, tmp_path.glob(word))) if "*" in word else [word] for word in words]
        line = [sys.executable, ROOT / script, *chain(*names), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed += done.stdout
        missing = [name for name in leaves(script, words) if not (tmp_path / name).is_file()]
        assert not missing, f"{command}: there is no {missing}"
        if "--to_label" in words:
            fill_in(tmp_path / words[words.index("--out") + 1], truth)
        if script == "data_prep.py":
            prepared = data_prep.read_dataset(tmp_path / "data" / words[words.index("--name") + 1])
            assert sorted(prepared["classes"]) == sorted(CLASSES)  # Dog is dog
    assert [line for line in PRINTED if line not in printed or line not in PAGE] == []
