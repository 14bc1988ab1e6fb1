"""docs/reproduce.md: every command is accepted, has the settings and hours of its row, and runs."""

import dataclasses
import functools
import glob
import json
import re
import shlex
import string
import subprocess

import numpy as np
import pytest
import torch
import torchvision
import tyro
from conftest import ROOT
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

import common
import data_prep
import lac
import pu_mlc
import report
import show

PAGE = (ROOT / "docs/reproduce.md").read_text()
TOOLS = {"report.py": report.Args, "show.py": show.Args, "data_prep.py": data_prep.Args}

# ---- the page


def tables():
    """Of the page: [[cells of a row]], without the line under the head"""
    lines = [line if line.startswith("|") else "" for line in PAGE.splitlines()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] if line else None for line in lines]
    found = [[]]
    for row in rows:
        if row is None:
            found.append([])
        elif set("".join(row)) != {"-"}:
            found[-1].append(row)
    return [table for table in found if table]


def variables():
    """{"dataset": ["voc", "coco", "nus", "cub"], "l1": ...}"""
    return {row[0].strip("`$"): row[1].split() for table in tables() for row in table if row[0].startswith("`$")}


@dataclasses.dataclass
class Row:
    title: str
    groups: list  # of commands, one group for each value of the row's variable; a command is its words, without python
    settings: dict  # name: the values that the row claims, one for all groups or one for each
    published: list
    hours: str

    @property
    def commands(self):
        return [command for group in self.groups for command in group]

    def last(self):
        """Settings of the last training of each group"""
        return [parse([command for command in group if is_training(command)][-1]) for group in self.groups]


def rows():
    for head, *body in (table for table in tables() if table[0][1:2] == ["command"]):
        for title, command, settings, published, hours in body:
            written = re.findall(r"`(python [^`]+)`", command)
            names = sorted(set(re.findall(r"\$(\w+)", command)))
            columns = zip(*(variables()[name] for name in names), strict=True) if names else [()]
            values = [dict(zip(names, column)) for column in columns]
            filled = [[string.Template(one).substitute(chosen) for one in written] for chosen in values]
            groups = [[shlex.split(one)[1:] for one in group] for group in filled]
            claims = {name: text.split("/") for name, text in re.findall(r"`(\w+)=([^`]+)`", settings)}
            numbers = [text.split(" ")[0] for text in published.split(" / ")]
            numbers = [float(text) for text in numbers if re.fullmatch(r"[\d.]+", text)]
            yield Row(f"{head[0]}: {title}", groups, claims, numbers, hours), command


def blocks():
    """The loops, run by bash with an echo in place of Python -> Rows. Functions stay known to the blocks below"""
    earlier = "python() { printf '%q ' \"$@\"; echo; }\n"
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S):
        out = subprocess.run(["bash"], input=earlier + block, capture_output=True, text=True, check=True, cwd=ROOT)
        assert not out.stderr
        earlier += block if block.startswith("table1()") else ""
        hours = re.match("# GPU hours: (.+)\n", block)
        if not block.startswith("table1()"):
            yield Row(
                re.search("python .*", block)[0], [list(map(shlex.split, out.stdout.splitlines()))], {}, [], hours[1]
            )


ROWS = [row for row, _ in rows() if row.commands] + list(blocks())


def parse(command):
    return parse_words(*command)


@functools.cache
def parse_words(script, *flags):
    if script in TOOLS:
        return tyro.cli(TOOLS[script], args=flags, use_underscores=True)
    module = __import__(script.removesuffix(".py"))
    return common.parse(module.Args, module.PRESETS, flags)


def is_training(command):
    return command[0] not in TOOLS


# ---- hours on paper

RATES = {"RTX 4090": 1776, "A100": 2470}  # images/s of 4.09 GMACs; docs/speed.md has the sources
CLIP_RATES = {"vlpl.py": 250, "aevlp.py": 2270}  # images/s of an RTX 4090
GMACS = {"resnet34": 14.7, "resnet50": 16.3, "resnet101": 31.2, "resnet101 lgconv": 35.7}
GMACS |= {"resnet101_clip.openai lgconv": 44.2, "lac 20": 28.9, "lac 80": 31.4, "lac 81": 31.5, "lac 312": 41.4}
GMACS |= {"convnext_xlarge.fb_in22k": 243.7, "convnext_xlarge.fb_in22k_ft_in1k": 243.7}
GMACS |= {"vit_large_patch14_clip_quickgelu_336.openai": 191.0}


def cost(script, args, embedded):
    """The page's formula -> (seconds x images/s of the network, images for CLIP); `embedded` data sets are known"""
    classes, files = data_prep.EXPECTED[args.dataset]
    n, test = files["train"][0], files["val"][0]
    val = round(args.val_fraction * n)
    train, epochs, views, networks, selections = n - val, args.epochs, 1, 1, 0
    model = args.backbone + " lgconv" * getattr(args, "lgconv", False)
    if script == "lac.py":
        model, networks, plain = f"lac {classes}", 2, args.loss != "an"
        views = 1 if plain or not (args.plc or args.lac) else 2
        epochs *= 2 if args.lac and not (plain or args.end_to_end) else 1
    if script == "pu_mlc.py":
        views, networks = 1 + 0.5 * (args.mixup > 0), 1 + (args.ema > 0)
    if script == "em_apl.py" and args.apl:
        selections = args.epochs - args.warmup
    images = epochs * (views * train + (networks * val + test) / 3) + selections * train / 3
    if args.linear:
        images = (2 * train + val + test) / 3
    seen = 0
    if script == "vlpl.py" and args.dataset not in embedded:
        embedded.add(args.dataset)
        seen = n + test
    if script == "aevlp.py" and args.damp:
        seen = -(-epochs // args.refresh_every) * train * (1 + args.grid**2)
    return GMACS[model] / 4.09 * images, seen / CLIP_RATES.get(script, 1)


def hours(commands):
    embedded = set()
    costs = [cost(command[0], parse(command), embedded) for command in commands if is_training(command)]
    if not costs:
        return "none"
    network, clip = (sum(column) / 3600 for column in zip(*costs))
    fast, a100 = network / RATES["RTX 4090"] + clip, network / RATES["A100"]
    return f"{two_digits(fast)} / {two_digits(a100)}" + " + CLIP" * (clip > 0)


def two_digits(value):
    return f"{float(f'{value:.2g}'):g}"


# ---- fast tests, of all commands


def test_every_row_has_a_command_or_a_reason():
    for row, text in rows():
        assert row.commands or re.search("not possible here: |below|Table 1", text), row.title
    scripts = {command[0] for row in ROWS for command in row.commands}
    assert scripts == {"an.py", "baselines.py", "role.py", "ll.py", "em_apl.py", "vlpl.py", "aevlp.py", "lac.py"} | {
        "pu_mlc.py",
        *TOOLS,
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_the_settings_of_a_row_are_those_of_its_commands(row):
    assert all(map(parse, row.commands))
    assert hours(row.commands) == row.hours
    assert len(row.published) in (0, len(row.groups))
    for name, values in row.settings.items():
        assert len(values) in (1, len(row.groups)), name
        for args, text in zip(row.last(), values * (len(row.groups) // len(values)), strict=True):
            assert equal(getattr(args, name), text), f"{name} is {getattr(args, name)}"


def equal(value, text):
    if isinstance(value, tuple):
        return value == tuple(map(float, text.split(",")))
    return str(value) == text if isinstance(value, str | bool) else value == float(text)


def test_a_wrong_setting_is_seen():
    assert equal((0.0, 2.0), "0,2")
    assert not equal((0.0, 2.0), "0,3")
    assert equal(True, "True")
    assert not equal(False, "True")
    assert equal("an", "an")
    assert not equal(1e-5, "1e-4")


def test_the_published_numbers_are_those_of_the_report():
    """Of its every method, in some row"""
    for name, numbers in report.PUBLISHED.items():
        script, *flags = shlex.split(name.replace("--init_from RUN", "--init_from x"))
        module = __import__(script.removesuffix(".py"))
        wanted = common.parse(module.Args, module.PRESETS, ["--dataset", "voc", *flags])
        found = []
        for row in (row for row in ROWS if row.published and row.groups[0][-1][0] == script):
            args = row.last()[0]
            if dataclasses.replace(args, init_from="x" * bool(args.init_from)) == wanted:
                found.append([mine for mine in zip(row.published, numbers) if mine[1] is not None])
        assert any(mine and all(a == b for a, b in mine) for mine in found), name


def test_the_commands_of_the_data_page():
    for command in re.findall(r"^python (.+?)(?:  .*)?$", (ROOT / "docs/data.md").read_text(), re.M):
        parse(shlex.split(command))


# ---- smoke tests

SIZES = {name: classes for name, (classes, _) in data_prep.EXPECTED.items()}
TINY = ("--smoke", "--device", "cpu", "--workers", "0", "--backbone", "resnet_small", "--weights", "none")
TINY += ("--image_size", "32", "--batch_size", "8")  # a smoke test's images are those of two batches and a short one
TINY_LAC = ("--epochs", "2", "--dim", "16", "--ffn", "32", "--project_dim", "8")
COLOURS = ["blue", "brown", "purple", "rufous", "grey", "yellow", "olive", "green", "pink", "orange", "black", "white"]


def class_names(dataset):
    if SIZES[dataset] == 20:
        return list(data_prep.VOC_CLASSES)
    if dataset == "cub":
        return [f"has_{part}_color::{colour}" for part in range(26) for colour in COLOURS]
    weights = torchvision.models.detection.FasterRCNN_ResNet50_FPN_Weights.COCO_V1
    names = [name for name in weights.meta["categories"] if name not in ("__background__", "N/A")]
    return names + ["waterfall"] * (SIZES[dataset] - 80)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """Noise with the names, class names and shapes of the published data sets"""
    root, rs = tmp_path_factory.mktemp("data"), np.random.RandomState(0)
    for dataset, classes in SIZES.items():
        folder = root / dataset
        (folder / "images").mkdir(parents=True)
        for part, n in (("train", 50), ("val", 20)):
            y = (rs.rand(n, classes) < 2 / classes).astype(np.int64)
            y[np.arange(n), np.arange(n) % classes] = 1
            names = np.array([f"{part}_{i}.png" for i in range(n)])
            for name in names:
                Image.fromarray(rs.randint(0, 256, (40, 36, 3)).astype(np.uint8)).save(folder / "images" / name)
            np.save(folder / f"formatted_{part}_images.npy", names)
            np.save(folder / f"formatted_{part}_labels.npy", y)
        info = {"name": "made up", "classes": class_names(dataset), "image_folder": str(folder / "images")}
        (folder / "dataset.json").write_text(json.dumps(info))
    return root


def smoke(script, commands, made_up, tiny_clip):
    """Runs the commands of a row, one after the other, on the made-up data"""
    for name, *flags in commands:
        if name == "report.py":
            flags = [path for flag in flags for path in sorted(glob.glob(flag)) or [flag]]
        if name in ("report.py", "show.py"):
            flags += ["--device", "cpu"]
        if name in ("show.py", "data_prep.py") or is_training([name]):
            flags += ["--data_root", str(made_up)]
        if is_training([name]):
            partial = ["--epochs", "2", "--no_freeze_bn"] * ("--known_ratio" in flags)  # of weights from scratch
            flags += [*TINY, *TINY_LAC * (name == "lac.py"), *partial]
            flags += ["--clip_model", f"local-dir:{tiny_clip}"] * (name in CLIP_RATES)
        script(name, *flags)


FIRST = {command[0]: row for row in reversed(ROWS) for command in row.commands if is_training(command)}


@pytest.mark.parametrize("name", FIRST)
def test_a_command_of_each_script_runs(name, script, made_up, tiny_clip, workplace):
    smoke(script, FIRST[name].groups[0], made_up, tiny_clip)
    assert list(workplace.glob("runs/*/result.json"))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_every_command_runs(row, script, made_up, tiny_clip, workplace):
    commands = [command for command in row.commands if "--seed" not in command or "-s0" in command[-1]]
    smoke(script, commands, made_up, tiny_clip)
    assert len(list(workplace.glob("runs/*/result.json"))) == sum(map(is_training, commands))


@pytest.mark.slow
@pytest.mark.parametrize("name", GMACS)
def test_the_multiply_adds_of_a_network(name):
    """Half of what torch counts in a forward pass"""
    side = 336 if name.startswith("vit") else 448
    if name.startswith("lac"):
        model = lac.LabelWise(lac.Args(weights="none"), int(name.split()[1]))
    else:
        backbone, *lgconv = name.split()
        args = pu_mlc.Args(backbone=backbone, weights="none", lgconv=bool(lgconv), image_size=side)
        model = pu_mlc.Classifier(args, 20)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.zeros(1, 3, side, side))
    assert counter.get_total_flops() / 2e9 == pytest.approx(GMACS[name], abs=0.06)


def test_the_multiply_adds_of_the_page():
    table = PAGE.split("| GMACs |")[1].split("\n\n")[0]
    assert {float(number) for number in re.findall(r"\d+\.\d", table)} == {*GMACS.values()}
