"""A tiny data set, and ways to run a script as a user does."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: test processes share the cores, and the nets are tiny

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230), "white": (250, 250, 250)}
SMALL = ("--backbone", "resnet_small", "--weights", "none", "--image_size", "32", "--batch_size", "8", "--lr", "3e-3")


TIMES = ("seconds", "images_per_s")
LEARNT = 75  # mAP on the squares' test images that only a network that has learnt reaches


def write_dataset(folder, n_train=100, n_test=100, seed=0):
    """Grey noise with one to three coloured squares; the colours are the labels. Images of odd sizes, in files."""
    rs = np.random.RandomState(seed)
    (folder / "images").mkdir(parents=True)
    for part, n in (("train", n_train), ("val", n_test)):
        y = np.zeros((n, len(COLOURS)), dtype=np.int64)
        names = np.array([f"{part}_{i}.png" for i in range(n)])
        for i in range(n):
            y[i, rs.permutation(len(COLOURS))[: rs.randint(1, 4)]] = 1
            pixels = rs.randint(60, 120, (41, 57, 3)).astype(np.uint8)
            cells = rs.permutation(6)
            for cell, colour in zip(cells, np.array(list(COLOURS.values()))[y[i] == 1]):
                top, left = cell // 3 * 20, cell % 3 * 19
                pixels[top + 2 : top + 18, left + 2 : left + 17] = colour
            Image.fromarray(pixels).save(folder / "images" / names[i])
        np.save(folder / f"formatted_{part}_images.npy", names)
        np.save(folder / f"formatted_{part}_labels.npy", y)
    (folder / "dataset.json").write_text(json.dumps({"classes": list(COLOURS), "image_folder": "images"}))
    return folder


def write_cache(folder):
    """Of 32 pixels, the side in SMALL"""
    import data_prep

    for part in ("train", "val"):
        names = np.load(folder / f"formatted_{part}_images.npy")
        np.save(folder / f"cache_{part}_32.npy", np.stack([data_prep.decode(folder / "images" / n, 32) for n in names]))
        (folder / f"cache_{part}_32.json").write_text(json.dumps({"images": data_prep.hash_names(names)}))
    return folder


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    """--dataset of the tiny data set; nobody changes it"""
    return str(write_dataset(tmp_path_factory.mktemp("squares") / "squares"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, squares):
    """A finished run of four epochs in a process of its own, which tests read only"""
    folder = tmp_path_factory.mktemp("trained")
    finish(start(ROOT / "an.py", "--dataset", squares, *SMALL, "--epochs", 4, "--workers", 0, cwd=folder))
    return only_run(folder)


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory):
    """--weights of the small backbone, for what needs trained ones; nobody changes it"""
    import scenes

    path = tmp_path_factory.mktemp("weights") / "small.pth"
    torch.save(scenes.small_resnet().state_dict(), path)
    return path


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory):
    """A folder for local-dir: with a CLIP of open_clip that has learnt nothing; nobody changes it"""
    import open_clip
    from safetensors.torch import save_file

    image = {"timm_model_name": "test_efficientnet", "timm_pool": "avg", "timm_proj": "linear", "image_size": 32}
    text = {"context_length": 24, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    shape = {"embed_dim": 16, "vision_cfg": {**image, "timm_model_pretrained": False}, "text_cfg": text}
    looks = {"mean": [0.5, 0.4, 0.3], "std": [0.3, 0.25, 0.2], "interpolation": "bicubic", "resize_mode": "squash"}
    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**shape).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": shape, "preprocess_cfg": looks}))
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def script(workplace, monkeypatch, capsys):
    """script("an.py", "--epochs", "1") runs the script's own __main__ in this process; -> what it printed"""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as end:
            if end.code or name == "predict.py":  # whose tests ask for its code
                raise
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(script):
    """refused("an.py", "--epochs", "1") -> the sentence with which the script ends"""

    def run(name, *arguments):
        with pytest.raises(SystemExit) as end:
            script(name, *arguments)
        return str(end.value.code)

    return run


@pytest.fixture
def a_kill_changes_nothing(script, workplace):
    """A run killed inside its second epoch and resumed is the run that was never killed. -> both directories"""

    def run(name, *flags):
        script(name, *flags, "--out", "whole")
        (whole,) = (workplace / "whole").iterdir()
        process = start(ROOT / name, *flags, "--out", "killed", "--save_minutes", 1e-9, cwd=workplace)
        kill_inside(process, workplace, 2)
        (killed,) = (workplace / "killed").iterdir()
        finish(start(ROOT / name, "--resume", killed, cwd=workplace))
        assert_same_run(killed, whole)
        return killed, whole

    return run


def start(*command, cwd, **more):
    """A process of its own, for what must be killed or must share"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return out + err


def only_run(folder):
    (run,) = (folder / "runs").iterdir()
    return run


def metrics(run):
    """The rows of metrics.csv without the columns that no two runs share"""
    with open(run / "metrics.csv") as file:
        return [{name: value for name, value in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def make_its_own(run):
    """The checkpoints of a run whose config.json a test has edited belong to it again"""
    import common

    config = json.loads((run / "config.json").read_text())
    for path in run.glob("*.pt"):
        checkpoint = torch.load(path, weights_only=True)
        torch.save(checkpoint | {"identity": common.identity(config["method"], config["settings"])}, path)


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    for name in ("best.pt", "last.pt"):
        a, b = (torch.load(run / name, weights_only=True)["model"] for run in (one, other))
        assert all(torch.equal(a[key], b[key]) for key in a)
    a, b = (json.loads((run / "result.json").read_text()) for run in (one, other))
    times = dict(seconds=0, embedding_seconds=0)
    assert a | times == b | times


def kill_inside(process, cwd, epoch):
    """Kills the run in `cwd`/killed when its inside.pt is of the third batch of an epoch, or a later one"""
    inside = None
    while not inside or inside["done"] < min(3, inside["total"] - 1):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
        for path in cwd.glob("killed/*/inside.pt"):
            try:
                last = torch.load(path, weights_only=True)
            except FileNotFoundError:  # the epoch has ended
                continue
            assert last["run"]["epoch"] <= epoch, "too late"
            inside = last["inside"] if last["run"]["epoch"] == epoch else None
    process.send_signal(signal.SIGKILL)
    process.communicate()
