"""Compare runs, or look into one: a table like the papers', AP per class, and a page with curves, classes and images

    python report.py runs/*
    python report.py runs/* --html report.html
    python report.py runs/grid/* --grid tau theta --out grid.png

A row is a method: its script and those of its own flags that differ from the preset. Numbers are test mAP at the best
validation epoch, mean ± standard deviation over the runs. The page is one file and needs no network. A grid has
validation and test mAP, means over seeds, and the precision of the pseudo-positives at the best epoch if there are any.
"""

import base64
import csv
import io
import json
import os
import re
import shlex
import sys
from dataclasses import dataclass, fields, replace
from html import escape
from itertools import zip_longest
from pathlib import Path
from string import Template

import numpy as np
import torch
import tyro
from PIL import Image

import common
import data_prep
import predict

# ---- 1. Settings


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[str, ...]]  # run directories
    markdown: bool = False  # print the tables as Markdown
    latex: bool = False  # print the tables as LaTeX, for booktabs
    csv: bool = False  # print one table with all classes as CSV
    html: str = ""  # HTML file of the report, with curves and images
    grid: tuple[str, ...] = ()  # one or two settings: validation and test mAP over their values, instead of the tables
    out: str = ""  # PNG file of the grid
    classes: int = 20  # classes in the table of AP: the largest differences from AN or, without AN, the lowest (0: all)
    data_root: str = ""  # folder of the data sets, for the page's images if not that of the runs
    seed: int = 0  # seed of the page's choice of images
    device: str = "auto"  # device: auto, cpu, cuda, cuda:1, ...


# Test mAP with a ResNet-50 at 448 pixels. Zhou et al. 2022, Table 1; but wan and epr: Cole et al. 2021 as quoted by Xie
# et al. 2022, Table 2, without NUS, whose images were others; vlpl.py: Xing et al. 2024, Table 1; aevlp.py: its own
# paper; lac.py: Xie et al. 2022, Tables 2 and 3; role.py: Zhou et al., Table 1; ll.py: Kim et al. 2022.
PUBLISHED_ON = ("voc", "coco", "nus", "cub")
PUBLISHED = {
    "an.py": (85.89, 64.92, 42.27, 18.31),
    "baselines.py --loss wan": (86.5, 64.8, None, 20.3),
    "baselines.py --loss dw": (86.98, 67.59, 45.71, 19.15),
    "baselines.py --loss ls": (87.90, 67.15, 43.77, 16.26),
    "baselines.py --loss n_ls": (88.12, 67.15, 43.86, 16.82),
    "baselines.py --loss entmin": (53.16, 32.52, 19.38, 13.08),
    "baselines.py --loss focal": (87.59, 68.79, 47.00, 19.80),
    "baselines.py --loss asl": (87.76, 68.78, 46.93, 18.81),
    "baselines.py --loss epr": (85.5, 63.3, None, 20.0),
    "baselines.py --loss bce_1p_alln": (87.60, 71.39, 46.45, 20.65),
    "baselines.py --loss bce_full": (89.42, 76.78, 52.08, 30.90),
    "role.py": (87.77, 67.04, 41.63, 13.66),
    "role.py --init_from RUN": (88.26, 69.12, 45.98, 14.86),  # ROLE + LI
    "ll.py": (89.2, 71.0, 47.4, 19.5),
    "ll.py --form ct": (89.0, 70.5, 48.0, 20.4),
    "ll.py --form cp": (88.4, 70.7, 48.3, 20.1),
    "em_apl.py --no_apl": (89.09, 70.70, 47.15, 20.85),
    "em_apl.py": (89.19, 70.87, 47.59, 21.84),
    "vlpl.py": (89.10, 71.45, 49.55, 24.02),
    "aevlp.py --no_damp": (89.83, 73.17, 49.08, 21.64),
    "aevlp.py": (90.46, 73.54, 50.70, 24.89),
    "lac.py --loss wan": (89.2, 73.5, 48.5, 22.5),
    "lac.py --loss epr": (88.8, 72.7, 49.3, 23.1),
    "lac.py --loss ls": (88.0, 70.9, 47.1, 16.3),
    "lac.py --loss em": (89.2, 73.2, 48.7, 22.2),
    "lac.py --no_plc --no_lac": (87.6, 72.3, 48.5, 18.6),
    "lac.py --no_lac": (89.0, 73.7, None, None),
    "lac.py --queue 0 --end_to_end": (84.5, 65.6, None, None),
    "lac.py --queue 0": (89.2, 74.7, None, None),
    "lac.py": (89.6, 75.6, 51.1, 23.3),
}
PUBLISHED_WITH = {"backbone": "resnet50", "image_size": 448, "weights": "imagenet", "linear": False, "init_from": ""}
PUBLISHED_WITH |= {"max_steps": 0, "smoke": False}
FOOTNOTE = "published: with a ResNet-50 at 448 pixels"
MISSED = "missed: positives below their class's threshold; taken for: the class that most often has the highest"
MISSED += " probability of those not in the image, and its share of the missed"
UNLIKE = "; ~: these runs have another backbone, size, start, length, lr or CLIP, so the two can't be compared"

SHARED = ("epochs", "batch_size", "lr", "patience", "image_size", "backbone", "weights")  # in every script
CLIP = ("clip_model", "clip_pretrained")
SETTING = ("linear", "known_ratio", "init_from")  # with another of these it is another experiment, not another method
CUT_SHORT = ("max_steps", "smoke")  # always warned of
NUMBERS_OF_MISSED = ("positives", "missed", "taken_for", "times")  # of a class, in result.json
AVERAGED = {*common.RESUME_MAY_CHANGE, "compile", "seed"}  # in which the runs of a row or of a cell may differ
NOT_COMPARED = {*AVERAGED, *CUT_SHORT, *SETTING}
CRITERIA = ("val_mAP", "val_known_mAP")  # columns of metrics.csv that choose the best epoch
AN = "an.py"
COLOURS = ("#8a8a8a", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito; AN is grey
PAGE = Path(__file__).with_name("report_page.html")
SAMPLE, SHOWN = 256, 12  # test images that are looked at, and of these on the page

# ---- 2. Runs


@dataclass
class Run:
    path: Path
    script: str
    settings: common.Args
    preset: common.Args  # what they would be if nothing had been said
    mAP: float  # of the test images; where there are none, of validation
    AP: dict
    seconds: float  # of training alone: which run fills the embedding cache is chance
    epochs: list  # rows of metrics.csv
    commit: str
    around: dict  # where it ran
    working_directory: str  # to which its paths are relative; "" where an old run doesn't say
    result: dict  # result.json

    @property
    def dataset(self):
        return Path(self.settings.dataset).name

    @property
    def setting(self):
        """voc --linear: the data set, and what makes it another experiment on it"""
        s = self.settings
        flags = ["--linear"] * s.linear + [f"--known_ratio {s.known_ratio:g}"] * (s.known_ratio > 0)
        return " ".join([self.dataset, *flags, *["--init_from"] * bool(s.init_from)])

    def method(self, without=()):
        """baselines.py --loss ls: the script, and what of its own differs from the preset"""
        shared = {field.name for field in fields(common.Args)} | {*SHARED, *without}
        words = [self.script]
        for name in (field.name for field in fields(self.settings) if field.name not in shared):
            value = getattr(self.settings, name)
            if value != getattr(self.preset, name):
                words += common.as_flag(name, value)
        return shlex.join(words)

    def compared(self):
        """{what may differ between runs: (value, the preset's value)}"""
        names = [field.name for field in fields(common.Args) if field.name not in NOT_COMPARED]
        chosen = {name: (getattr(self.settings, name), getattr(self.preset, name)) for name in (*names, *SHARED)}
        no_preset = {"dataset": self.source(), "init_from": self.start(), **self.around}
        return chosen | {name: (value, None) for name, value in no_preset.items()}

    def source(self):
        """The data set's name if it is in --data_root, wherever that is, else its path"""
        path, root = Path(self.settings.dataset), Path(self.settings.data_root)
        in_root = os.sep not in self.settings.dataset or path.resolve().parent == root.resolve()
        return self.dataset if in_root else str(path.resolve())

    def start(self):
        """--init_from without seed and, where it has no --name, time and number among those of one second"""
        given = self.settings.init_from
        return re.sub(r"-s\d+(-\d{8}-\d{6}(-\d+)?)?$", "", str(Path(given).resolve())) if given else ""

    def published(self):
        """-> figure or None, whether it was reached with what this run has"""
        name, started = self.method(without=CLIP), f"{self.method(without=CLIP)} --init_from RUN"
        started = started if self.settings.init_from and started in PUBLISHED else ""
        known = PUBLISHED.get(started or name)
        on_test = self.around.get("measured_on") != "val"
        if not (known and on_test) or self.dataset not in PUBLISHED_ON or self.settings.known_ratio:
            return None, True
        wanted = {name: value for name, value in PUBLISHED_WITH.items() if not (started and name == "init_from")}
        alike = all(getattr(self.settings, name) == value for name, value in wanted.items())
        alike = alike and all(getattr(self.settings, name) == getattr(self.preset, name) for name in SHARED)
        return known[PUBLISHED_ON.index(self.dataset)], alike and self.method() == name

    @property
    def classes(self):
        return list(self.AP or self.result.get("train_observed", {}))

    def column(self, name):
        """{epoch: value} of the epochs that have one"""
        return {int(row["epoch"]): row[name] for row in self.epochs if np.isfinite(row.get(name, np.nan))}

    def at_best(self, name):
        """Value of a column at the best epoch, None where it has none"""
        return self.column(name).get(self.result.get("best_epoch"))


def read_run(path):
    script, config = predict.find_script(path)
    settings = common.read_run_settings(script.Args, path)
    presets = script.PRESETS
    if not settings.linear and presets.get(common.CPU, {}).get("linear") and settings.weights != "none":  # --no_linear
        presets = {name: row for name, row in presets.items() if name != common.CPU}
    preset = common.preset_settings(script.Args, presets, replace(settings, device=config["device"]))
    method = f"{config['method']}.py"
    unfinished, number = f"{path} is unfinished, resume it with python {method} --resume {path}", int | float | None
    kinds = {"best_epoch": int, "test_mAP": number, "val_mAP": number, "train_observed": {str: int}}
    result = common.read_json(path / "result.json", unfinished, **kinds)
    with open(path / "metrics.csv", newline="") as file:
        rows = csv.DictReader(file)
        epochs = [{name: float(value) for name, value in row.items() if value} for row in rows]
    if not epochs:
        raise ValueError("no epoch in metrics.csv")
    measured_on = "val" if result["test_mAP"] is None else "test"
    mAP = np.nan if result[f"{measured_on}_mAP"] is None else result[f"{measured_on}_mAP"]
    AP = {name: 100 * value for name, value in result.get(f"{measured_on}_AP", {}).items()}
    missed = result.get(f"{measured_on}_missed", {}).items()
    result["missed"] = {name: [numbers[key] for key in NUMBERS_OF_MISSED] for name, numbers in missed}
    around = {"commit": config["commit"].removesuffix("-dirty")[:7], "torch": config["versions"]["torch"]}
    around |= {"device": config["device"], "processes": config["processes"]}
    by = "full labels" if result["val_mAP"] is not None else "known labels" if "val_known_mAP" in result else "none"
    around |= {"validation": by, "measured_on": measured_on}
    known = path, method, settings, preset, mAP, AP, result["seconds"], epochs, config["commit"], around
    return Run(*known, config.get("working_directory", ""), result)


def read_runs(paths, warn):
    """What can't be compared is left out, with a warning."""
    for path in dict.fromkeys(Path(path).resolve() for path in paths):  # each once
        path = Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path
        try:
            yield read_run(path)
        except SystemExit as problem:
            warn(f"left out: {str(problem).removeprefix('error: ')}")
        except (KeyError, TypeError, ValueError, AttributeError, OSError) as problem:
            warn(f"left out: {path} is damaged or of another version ({problem!r})")


def over_runs(values):
    """Mean and standard deviation; NaN where there is none"""
    return np.mean(values) if values else np.nan, np.std(values, ddof=1) if len(values) > 1 else np.nan


@dataclass
class Row:
    """The runs of one method on one data set"""

    method: str
    runs: list
    style: str  # its colour, the same wherever it appears

    def mAP(self):
        return over_runs([run.mAP for run in self.runs])

    def measured_on(self):
        return self.runs[0].around["measured_on"]

    def val_mAP(self, name="val_mAP"):
        values = [run.result.get(name) for run in self.runs]
        return over_runs([np.nan if value is None else value for value in values])

    def observed(self, name):
        return self.runs[0].result.get("train_observed", {}).get(name)

    def missed(self, name):
        """-> positives, how many are missed in the mean over runs, what they are most often taken for, its share"""
        found = [run.result["missed"].get(name) for run in self.runs]
        if not all(found):  # of another version
            return None, None, None, None
        positives, missed, *_ = zip(*found)
        times = {}
        for *_, other, often in found:
            times[other] = times.get(other, 0) + often
        taken_for = max(times, key=times.get)
        return positives[0], np.mean(missed), taken_for, times[taken_for] / sum(missed) if taken_for else None

    def AP(self, name):
        return over_runs([run.AP.get(name, np.nan) for run in self.runs])

    def seconds(self):
        return np.mean([run.seconds for run in self.runs])

    def images_per_s(self):
        return np.mean([speed for run in self.runs for speed in run.column("images_per_s").values()])

    def published(self):
        figures = [run.published() for run in self.runs]
        return figures[0][0], all(alike for _, alike in figures)


def group(runs):
    """{setting: [Row]}, AN first, then by mAP. Runs of a method that differ in what all scripts have are rows apart;
    those of the preset keep the method's name"""
    alike, found, methods = {}, {}, [AN]
    for run in runs:
        alike.setdefault((run.setting, run.method()), []).append(run)
    for (setting, method), those in alike.items():
        apart = [name for name in SHARED if len({getattr(run.settings, name) for run in those}) > 1]
        for run in those:
            said = [name for name in apart if getattr(run.settings, name) != getattr(run.preset, name)]
            words = [word for name in said for word in common.as_flag(name, getattr(run.settings, name))]
            name = shlex.join([*shlex.split(method), *words, *["--smoke"] * run.settings.smoke])
            found.setdefault(setting, {}).setdefault(name, []).append(run)
            methods += [name] if name not in methods else []
    style = {method: colour(i) for i, method in enumerate(methods)}
    order = lambda row: (row.method != AN, row.mAP()[0])
    rows = lambda methods: [Row(method, runs, style[method]) for method, runs in methods.items()]
    return {dataset: sorted(rows(methods), key=order) for dataset, methods in found.items()}


def colour(i):
    """The i-th method's: AN's is nobody else's, from the seventh other one on they are striped"""
    paint, striped = COLOURS[1 + (i - 1) % (len(COLOURS) - 1)] if i else COLOURS[0], i >= len(COLOURS)
    stripes = f"repeating-linear-gradient(90deg,{paint} 0 3px,transparent 3px 5px)"
    return f"--c:{paint};--d:{'4 3' if striped else 'none'};--f:{stripes if striped else paint}"


def check(dataset, rows, warn):
    """Warns of all that would make a comparison unfair."""
    runs = [run for row in rows for run in row.runs]
    compared = [(run.method(), run.compared()) for run in runs]
    for name in compared[0][1]:
        methods, chosen = {}, [(method, *settings[name]) for method, settings in compared]
        for method, value, _ in chosen:
            methods.setdefault(value, {})[method] = None
        if len(methods) > 1 and any(value != preset for _, value, preset in chosen):
            said = [f"{value if value != '' else 'nothing'} ({', '.join(who)})" for value, who in methods.items()]
            warn(f"{dataset}: the runs differ in {name}: {', '.join(said)}")
    first = runs[0]
    if other := next((run for run in runs if run.classes != first.classes), None):
        a, b = next((a, b) for a, b in zip_longest(first.classes, other.classes, fillvalue="none") if a != b)
        counts = f"{len(first.classes)} in {first.path}, {len(other.classes)} in {other.path}"
        warn(f"{dataset}: the runs differ in classes: {counts}; the first that differ are {a} and {b}")
    if short := [str(run.path) for run in runs if any(getattr(run.settings, name) for name in CUT_SHORT)]:
        warn(f"{dataset}: {len(short)} runs were cut short by --max_steps or --smoke: {', '.join(short)}")
    for row in rows:
        seeds = [run.settings.seed for run in row.runs]
        for seed in sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            warn(f"{dataset}: {row.method} has {seeds.count(seed)} runs of seed {seed}")
        if len({(run.path / "script.py").read_bytes() for run in row.runs}) > 1:
            places = ", ".join(str(run.path / "script.py") for run in row.runs)
            warn(f"{dataset}: the script of {row.method} changed between its runs: {places}")
    if any(run.around["validation"] == "none" for run in runs):
        warn(f"{dataset}: without validation the last epoch counts, not the best")
    if not all(run.commit for run in runs):
        warn(f"{dataset}: the commit of some runs is unknown")
    if dirty := [str(run.path) for run in runs if run.commit.endswith("-dirty")]:
        warn(f"{dataset}: {len(dirty)} runs with changes that were not committed: {', '.join(dirty)}")


# ---- 3. Tables


def number(value, form=".2f"):
    return "-" if value is None or np.isnan(value) else f"{value:{form}}"


def spread(mean, std):
    return number(mean) if np.isnan(std) else f"{mean:.2f} ± {std:.2f}"


def overview(datasets):
    """methods x data sets"""
    note = lambda row: " (val)" if row.measured_on() == "val" and not np.isnan(row.mAP()[0]) else ""
    mAP = {(row.method, name): spread(*row.mAP()) + note(row) for name, rows in datasets.items() for row in rows}
    methods = dict.fromkeys(method for method, _ in mAP)
    table = [["method", *datasets], *([m, *(mAP.get((m, name), "-") for name in datasets)] for m in methods)]
    return without_blanks(table)


def details(rows):
    table = [["method", "runs", "test mAP", "published", "difference"]]
    table[0] += ["val mAP", "val known mAP", "minutes", "images/s"]
    for row in rows:
        figure, alike = row.published()
        shown = [figure, row.mAP()[0] - figure] if figure else []
        known = [("" if alike else "~") + number(*value) for value in zip(shown, (".2f", "+.2f"))] or ["-", "-"]
        mAP = spread(*row.mAP()) if row.measured_on() == "test" else "-"
        ends = [spread(*row.val_mAP()), spread(*row.val_mAP("val_known_mAP"))]
        ends += [number(row.seconds() / 60, ".1f"), number(row.images_per_s(), ".0f")]
        table.append([row.method, str(len(row.runs)), mAP, *known, *ends])
    return without_blanks(table)


def without_blanks(table):
    """The first column, and those in which a row has a value"""
    kept = [column for i, column in enumerate(zip(*table)) if i == 0 or set(column[1:]) - {"-", ""}]
    return [list(line) for line in zip(*kept)]


def footnote(rows):
    figures = [row.published() for row in rows]
    if not any(figure for figure, _ in figures):
        return ""
    return FOOTNOTE + ("" if all(alike for _, alike in figures) else UNLIKE)


def differences(rows):
    """[(class, AN's AP, [each other method's AP minus AN's])], the largest first; nothing where AN was not run"""
    an, *others = rows
    if an.method != AN or not others:
        return []
    AP = {name: an.AP(name)[0] for name in an.runs[0].AP}
    found = [(name, base, [row.AP(name)[0] - base for row in others]) for name, base in AP.items()]
    return sorted(found, key=lambda line: -np.nan_to_num(np.abs(line[2])).max())


def class_table(rows, most=0):
    """AP per class: with AN the others' differences from it, the largest first; else the lowest AP first. Beside it the
    positives and, of a single method, those that it misses"""
    if found := differences(rows):
        lines = [[name, number(base), *(number(d, "+.2f") for d in ds)] for name, base, ds in found]
        header = [AN, *(f"{row.method} - AN" for row in rows[1:])]
    else:
        order = lambda name: np.nan_to_num([row.AP(name)[0] for row in rows], nan=100).mean()
        lines = [[name, *(spread(*row.AP(name)) for row in rows)] for name in sorted(rows[0].runs[0].AP, key=order)]
        header = [row.method for row in rows]
    header = ["AP of", *header, "known in training", f"{rows[0].measured_on()} positives", "missed", "taken for"]
    lines = lines[: most or None]
    for line in lines:
        positives, *rest = rows[0].missed(line[0])
        missed, taken_for, share = rest if len(rows) == 1 else [None] * 3
        line += [number(rows[0].observed(line[0]), "d"), number(positives, "d"), number(missed, ".0f")]
        line.append(f"{taken_for} ({100 * share:.0f} %)" if taken_for else "-")
    return without_blanks([header, *lines])


def as_text(table):
    widths = [max(map(len, column)) for column in zip(*table)]
    pad = lambda i, cell: cell.rjust(widths[i]) if i else cell.ljust(widths[i])
    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(line)) for line in table)


def as_markdown(table):
    head, *body = [[escape(cell, quote=False).replace("|", "\\|") for cell in line] for line in table]
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def tex(text):
    special = {"\\": r"\textbackslash{}", "~": r"$\sim$", "^": r"\^{}", "±": r"$\pm$"}
    special |= {char: f"\\{char}" for char in "&%$#_{}"} | {char: f"${char}$" for char in "<>|"}
    return "".join(special.get(char, char) for char in text).replace("--", "-{}-")  # two hyphens, not a dash


def as_latex(table):
    head, *body = [f"{' & '.join(map(tex, line))} \\\\" for line in table]
    begin = f"\\begin{{tabular}}{{l{'r' * (len(table[0]) - 1)}}}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


def print_parts(parts, args):
    """Tables and sentences"""
    show = as_markdown if args.markdown else as_latex if args.latex else as_text
    say = tex if args.latex else str
    parts = filter(None, (say(part) if isinstance(part, str) else show(part) for part in parts))
    print("\n".join(map(data_prep.printable, "\n\n".join(parts).split("\n"))))


def print_tables(datasets, args):
    parts = [overview(datasets)] if len(datasets) > 1 else []
    for name, rows in datasets.items():
        parts += [name, details(rows), footnote(rows)]
        if number_of_classes := len(rows[0].runs[0].AP):
            table = class_table(rows, args.classes)
            parts += [table, MISSED if "missed" in table[0] else ""]
        if 0 < args.classes < number_of_classes:
            parts.append(f"{args.classes} of {number_of_classes} classes; --classes 0 shows all")
    print_parts(parts, args)


def csv_table(datasets):
    """A line per method, and one per method and class"""
    about = ["runs", "measured_on", "mean", "std", "val_mAP", "val_known_mAP", "published", "difference"]
    about += ["comparable", "seconds", "images_per_s", "known", "positives", "missed", "taken_for", "share"]
    table = [["dataset", "method", "class", *about]]
    for name, rows in datasets.items():
        for row in rows:
            (figure, alike), start = row.published(), [data_prep.cell(name), data_prep.cell(row.method)]
            difference, comparable = (row.mAP()[0] - figure, alike) if figure else (None, None)
            ends = [row.val_mAP()[0], row.val_mAP("val_known_mAP")[0], figure, difference, comparable]
            ends += [row.seconds(), row.images_per_s(), *[None] * 5]
            table.append([*start, "", len(row.runs), row.measured_on(), *row.mAP(), *ends])
            for label in row.runs[0].AP:
                positives, missed, taken_for, share = row.missed(label)
                taken_for = taken_for and data_prep.cell(taken_for)
                ends = *[None] * 7, row.observed(label), positives, missed, taken_for, share
                table.append([*start, data_prep.cell(label), len(row.runs), row.measured_on(), *row.AP(label), *ends])
    return [["" if value is None or value != value else value for value in line] for line in table]


# ---- 4. Page


def line_chart(title, lines):
    """lines: [(row, run or mean, what it is, {epoch: value})] -> SVG"""
    from matplotlib.ticker import MaxNLocator

    epochs, values = zip(*(point for *_, line in lines for point in line.items()))
    left, right, low, high = min(epochs), max(epochs), min(values), max(values)
    room = max(high - low, 0.01 * max(high, -low))  # a flat line has no range, a column of any size may have one
    bottom, top = ((low + high - room) / 2, (low + high + room) / 2) if room else (0, 1)
    x_ticks = [tick for tick in MaxNLocator(6, integer=True).tick_values(left, right) if left <= tick <= right]
    y_ticks = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(bottom, top)
    y_ticks = y_ticks[: max(3, 1 + np.searchsorted(y_ticks, high))]  # no axis above 100 % for lines below
    numbers = [f"{tick:g}" for tick in y_ticks]
    edge = max(36, 5 + 6.2 * max(map(len, numbers)))  # a digit is about 6 wide
    x = lambda epoch: edge + (346 - edge) * (epoch - left) / max(right - left, 1)
    y = lambda value: 190 - 175 * (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
    parts = [f'<path class="grid" d="M{edge:g} {y(tick):.1f}H350"/>' for tick in y_ticks]
    parts += [f'<text x="{edge - 5:g}" y="{y(tick) + 4:.1f}">{text}</text>' for tick, text in zip(y_ticks, numbers)]
    parts += [f'<text x="{x(tick) + 3:.1f}" y="206">{tick:g}</text>' for tick in x_ticks]
    for row, kind, what, line in lines:
        path = "L".join(f"{x(epoch):.1f} {y(value):.1f}" for epoch, value in line.items())
        style = row.style + (";stroke-width:6" if len(line) == 1 else "")  # one epoch is a dot
        parts.append(f'<path class="{kind}" style="{style}" d="M{path}h0"><title>{escape(what)}</title></path>')
    svg = f'<svg viewBox="0 0 360 212" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"


def curve(rows, name):
    """A column of metrics.csv over the epochs, of all runs that have it"""
    lines = []
    for row in rows:
        found = [(run.settings.seed, column) for run in row.runs if (column := run.column(name))]
        lines += [(row, "run", f"{row.method}: {name}, seed {seed}", column) for seed, column in found]
        epochs = sorted(set.intersection(*(set(column) for _, column in found))) if found else []
        mean = {epoch: np.mean([column[epoch] for _, column in found]) for epoch in epochs}
        lines += [(row, "mean", f"{row.method}: {name}, mean", mean)] if mean else []
    return line_chart(name, lines) if lines else ""


def curves(rows):
    """-> charts of validation mAP and of the precision of pseudo-labels, and of every other column"""
    names = dict.fromkeys(name for row in rows for run in row.runs for epoch in run.epochs for name in epoch)
    order = lambda name: (name not in CRITERIA, not name.startswith("pseudo_"))
    names = sorted((name for name in names if name not in common.NO_RESULTS), key=order)
    first = [name for name in names if name in CRITERIA or re.fullmatch("pseudo_.*_precision", name)]
    draw = lambda names: "".join(curve(rows, name) for name in names)
    return draw(first), draw(name for name in names if name not in first)


def bar(row, value, width, left=0.0, text=""):
    """A method's bar, with text at its end; width and left in percent"""
    said = f"{escape(row.method)} {value:.2f}"
    return f'<i style="{row.style};left:{left:.1f}%;width:{width:.1f}%" title="{said}">{text}</i>'


def difference_bars(rows):
    """A line per class: each method's AP minus AN's, to the left and right of zero"""
    found = differences(rows)
    if not found:
        return ""
    most = max(np.nan_to_num(np.abs([ds for *_, ds in found])).max(), 1e-9)
    lines = [f'<div class="class scale"><span></span><div><b>-{most:.1f}</b><b>0</b><b>+{most:.1f}</b></div></div>']
    for name, _, ds in found:
        known = [(row, d) for row, d in zip(rows[1:], ds) if not np.isnan(d)]
        bars = "".join(bar(row, d, 50 * abs(d) / most, 50 + 50 * min(d, 0) / most) for row, d in known)
        name = escape(name)
        lines.append(f'<div class="class" data-class="{name}"><span>{name}</span><div>{bars}</div></div>')
    return f'<h4>AP per class, difference from {AN}</h4><div class="bars">{"".join(lines)}</div>'


def class_tables(rows):
    """Of all classes; where they are compared with AN the bars come first"""
    if not rows[0].runs[0].AP:
        return '<p class="note">No AP per class: no test or validation images with all their labels.</p>'
    table = class_table(rows)
    note = f'<p class="note">{escape(MISSED)}</p>' if "missed" in table[0] else ""
    bars, whole = difference_bars(rows), html_table(table, of_classes=True) + note
    if bars:
        return f"{bars}<details><summary>The same as a table</summary>{whole}</details>"
    return f"<h4>AP per class, the lowest first</h4>{whole}"


def gallery(rows, args):
    """Test images with the probabilities that one run of each method gives them"""
    device, p, first = common.find_device(args.device), [], None
    chosen = [min(row.runs, key=lambda run: run.settings.seed) for row in rows]
    for run in common.progress(chosen, "test images"):
        model, settings, classes = predict.load_model(run.path, device)
        root = os.path.abspath(args.data_root) if args.data_root else settings.data_root
        settings = replace(settings, data_root=root, smoke=False)  # the same images for all runs
        folder = common.dataset_folder(settings)
        then = Path(run.working_directory, folder).absolute()
        if not (then.is_dir() or folder.is_dir() or os.sep in settings.dataset):  # before load() makes scenes
            common.die(f"{folder} not found: pass the folder of the data sets as --data_root")
        data = common.load(replace(settings, dataset=str(then)) if then.is_dir() else settings)
        first = first or data
        if not data.test:
            common.die(f"{settings.dataset} has no test images")
        if data.classes != classes or not np.array_equal(data.test.images.names, first.test.images.names):
            common.die(f"the test images or classes of {settings.dataset} are not those of all these runs")
        sample = np.random.RandomState(args.seed).permutation(len(data.test))[:SAMPLE]  # rows of the file
        batches = common.in_batches(sample)
        p.append(torch.cat([predict.probabilities(model, data.test.images[batch], device) for batch in batches]))
    p, observed = torch.stack(p), common.draw_single_positives(data.test.y)  # (methods, images, C), (N, C)
    kinds = {f"The first {SHOWN} of a random order (seed {args.seed})": range(min(SHOWN, len(sample)))}
    if len(rows) > 1:
        apart = (p.amax(0) - p.amin(0)).mean(1)
        title = f"Of {len(sample)} random ones, the {SHOWN} on which the methods' probabilities are furthest apart"
        kinds[title] = apart.argsort(descending=True)[:SHOWN].tolist()
    seeds = ", ".join(f"{row.method} of seed {run.settings.seed}" for row, run in zip(rows, chosen))
    parts = [
        f"""<p class="note">Bars are probabilities: {escape(seeds)}. <b class="observed">Marked</b>: the true label that
        the protocol's draw would have observed; <b>bold</b>: other true labels; grey: the highest of the others.</p>"""
    ]
    for title, places in kinds.items():
        cards = [image_card(rows, data, sample[i], p[:, i], observed[sample[i]]) for i in places]
        parts.append(f'<h4>{title}</h4><div class="cards">{"".join(cards)}</div>')
    return "".join(parts)


def image_card(rows, data, image, p, observed):
    """p: (methods, C). Shown are true classes, the observed one first, and the highest of the others."""
    order, y = p.amax(0).argsort(descending=True).tolist(), data.test.y[image]
    true, false = np.flatnonzero(y).tolist(), [c for c in order if not y[c]]
    true.sort(key=lambda c: not observed[c])
    lines = []
    for c in true[:8] + false[: max(2, 5 - len(true))]:
        kind = "observed" if observed[c] else "true" if y[c] else "false"
        numbered = lambda row, value: bar(row, value, 100 * value, text=f"<b>{value:.2f}</b>")
        bars = "".join(numbered(row, value) for row, value in zip(rows, p[:, c].tolist()))
        said = ", ".join(f"{row.method} {value:.2f}" for row, value in zip(rows, p[:, c].tolist()))
        bars = f'<div role="img" aria-label="{escape(said)}">{bars}</div>'
        lines.append(f'<div class="p {kind}"><span>{escape(data.classes[c])}</span>{bars}</div>')
    if len(true) > 8:
        lines.append(f'<p class="note">and {len(true) - 8} more true labels</p>')
    names = escape(json.dumps([data.classes[c] for c in true]))
    picture = thumbnail(data.test.images, image)
    alt = escape(", ".join(data.classes[c] for c in true))
    return f'<figure class="card" data-true="{names}"><img alt="{alt}" src="{picture}">{"".join(lines)}</figure>'


def thumbnail(images, row):
    path = images.image_folder / images.names[row]
    try:
        there = path.is_file()  # a cache of pixels may be all that is left
        image = data_prep.read_image(path, images.upright) if there else Image.fromarray(images[[row]][0])
    except data_prep.UNREADABLE as problem:
        common.die(f"{path} can't be read: {problem}")
    image.thumbnail((224, 224))
    content = io.BytesIO()
    image.save(content, "jpeg", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def html_table(table, of_classes=False):
    head, *body = table
    heads = "".join(f'<th scope="col"><button>{escape(cell)}</button></th>' for cell in head)
    words = lambda cell: " ".join(f"<span>{escape(word)}</span>" for word in cell.split())  # no line ends within one
    start = lambda line: f'<tr data-class="{escape(line[0])}">' if of_classes else "<tr>"
    rows = "".join(start(line) + "".join(f"<td>{words(cell)}</td>" for cell in line) + "</tr>" for line in body)
    kind = "scroll bars" if of_classes else "scroll"
    return f'<div class="{kind}"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def section(template, name, rows, args, warn):
    """A data set's part of the page"""
    try:
        images = gallery(rows, args)
    except SystemExit as problem:  # data or weights are elsewhere: the rest of the page needs neither
        reason = str(problem).removeprefix("error: ")
        warn(f"no images of {name}: {reason}")
        images = f'<p class="note">No images: {escape(reason)}</p>'
    first, more = curves(rows)
    more = f'<details><summary>More columns</summary><div class="charts">{more}</div></details>' if more else ""
    return Template(template).substitute(
        name=escape(name),
        keys="".join(f'<span style="{row.style}">{escape(row.method)}</span>' for row in rows),
        table=html_table(details(rows)),
        footnote=escape(footnote(rows)),
        curves=first,
        more_curves=more,
        options="".join(f'<option value="{escape(x)}">{escape(x)}</option>' for x in sorted(rows[0].runs[0].AP)),
        classes=class_tables(rows),
        images=images,
    )


def write_page(datasets, args, warnings):
    head, template, foot = PAGE.read_text("utf-8").split("<!-- a data set -->\n")
    parts = [section(template, name, rows, args, warnings.append) for name, rows in datasets.items()]
    if len(datasets) > 1:
        parts.insert(0, html_table(overview(datasets)))
    per_class = lambda label, rows: [[row.method, row.style, spread(*row.AP(label))] for row in rows]
    AP = {name: {label: per_class(label, rows) for label in rows[0].runs[0].AP} for name, rows in datasets.items()}
    AP = json.dumps(AP).replace("<", "\\u003c")  # so that no name ends the script
    noted = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    warned = f"<details><summary>Warnings: {len(warnings)}</summary><ul>{noted}</ul></details>" if noted else ""
    page = head.replace("$warnings", warned) + "".join(parts) + foot.replace("$AP", AP)
    with common.replacing(Path(args.html)) as temporary:
        temporary.write_text(page, "utf-8")


# ---- 5. Grid

ON_A_GRID = {"validation mAP": "val_mAP", "validation mAP of the known labels": "val_known_mAP"}
ON_A_GRID |= {"test mAP": "test_mAP"}  # of the best validation epoch, as the papers draw it
ON_A_GRID |= {"precision of the pseudo-positives, %": "pseudo_positives_precision"}


def setting(run, name):
    """Its value; paths as they are compared"""
    paths = {"script": run.script, "dataset": run.source(), "init_from": run.start()}
    return paths[name] if name in paths else getattr(run.settings, name, None)


def varying(runs):
    """What the runs differ in, of all that decides results but the seed -> {name: values in order}"""
    names = dict.fromkeys(["script", *(field.name for run in runs for field in fields(run.settings))])
    values = {name: {setting(run, name) for run in runs} for name in names if name not in AVERAGED}
    order = lambda value: (0, value, "") if isinstance(value, int | float) else (1, 0, str(value))
    return {name: sorted(those, key=order) for name, those in values.items() if len(those) > 1}


def find_cells(runs, names, warn):
    """-> the values of each name, and {a value of each: the runs that have them}"""
    varied, cells = varying(runs), {}
    axes = {name: values for name, values in varied.items() if None not in values}  # that all runs have
    for name in names:
        if name not in axes:
            have_it = all(setting(run, name) is not None for run in runs)
            why = "it is the same in all runs" if have_it else "not every run has such a setting"
            common.die(f"--grid {name}: {why}; they differ in {', '.join(axes) or 'nothing'}")
    for run in runs:
        cells.setdefault(tuple(setting(run, name) for name in names), []).append(run)
    for cell, those in cells.items():
        where = ", ".join(f"{name} {common.as_label(value)}" for name, value in zip(names, cell))
        if apart := varying(those):
            common.die(f"--grid: the runs with {where} differ in {', '.join(apart)} too, so they have no mean")
        seeds = sorted(run.settings.seed for run in those)
        if len(set(seeds)) < len(seeds):
            warn(f"the runs with {where} have seeds {', '.join(map(str, seeds))}")
    if others := [name for name in varied if name not in names]:
        warn(f"not only {' and '.join(names)} but also {', '.join(others)} differ over the grid")
    return [axes[name] for name in names], cells


def over_cells(axes, cells):
    """{what is measured: (mean, standard deviation) over the seeds, arrays with an axis per setting}, NaN: no value"""
    found = {}
    for title, column in ON_A_GRID.items():
        mean, std = np.full((2, *map(len, axes)), np.nan)
        for cell, runs in cells.items():
            place = tuple(values.index(each) for values, each in zip(axes, cell))
            values = [v for run in runs if (v := run.at_best(column)) is not None]
            mean[place], std[place] = over_runs(values)
        if np.isfinite(mean).any():
            found[title] = mean, std
    return found


def grid_tables(names, axes, found):
    """[(title, table)]: one per measure, or with one setting one of all"""
    first, *rest = ([common.as_label(value) for value in values] for values in axes)
    shown = {title: np.vectorize(spread)(mean, std) for title, (mean, std) in found.items()}
    shown = {title: np.where(cells == "-", "", cells) for title, cells in shown.items()}
    if not rest:
        return [("", [[names[0], *shown], *zip(first, *shown.values())])]
    head = [" \\ ".join(names), *rest[0]]
    return [(title, [head, *([value, *line] for value, line in zip(first, cells))]) for title, cells in shown.items()]


def grid_csv(names, axes, cells, found):
    """A line per cell"""
    columns = [ON_A_GRID[title] for title in found]
    table = [[*names, "runs", *(name for column in columns for name in (column, f"{column}_std"))]]
    for cell, runs in sorted(cells.items(), key=lambda item: [a.index(v) for a, v in zip(axes, item[0])]):
        place = tuple(values.index(value) for values, value in zip(axes, cell))
        numbers = [array[place] for both in found.values() for array in both]
        table.append([*cell, len(runs), *("" if np.isnan(number) else number for number in numbers)])
    return table


def draw_grid(path, names, axes, found):
    """Cells of two settings, a line over one"""
    plt, labels = data_prep.pyplot(), [[common.as_label(value) for value in values] for values in axes]
    wide, high = (1.6 + 0.62 * len(axes[1]), 1.1 + 0.62 * len(axes[0])) if len(names) == 2 else (4.2, 3)
    figure, places = plt.subplots(1, len(found), figsize=(wide * len(found), high), squeeze=False, layout="constrained")
    for axis, (title, (mean, std)) in zip(places[0], found.items()):
        axis.set_title(title, fontsize=11)
        axis.set_xticks(range(len(axes[-1])), labels[-1])
        axis.set_xlabel(names[-1])
        if len(names) == 1:
            axis.errorbar(range(len(mean)), mean, np.nan_to_num(std), fmt="o-", color="#1d7f42", capsize=3)
            axis.grid(alpha=0.3)
            continue
        picture = axis.imshow(mean, cmap="YlGn", aspect="auto")
        for i, j in np.argwhere(np.isfinite(mean)):
            paint = "white" if picture.norm(mean[i, j]) > 0.6 else "black"
            axis.text(j, i, f"{mean[i, j]:.1f}", ha="center", va="center", color=paint)
        axis.set_yticks(range(len(axes[0])), labels[0])
        axis.set_ylabel(names[0])
        axis.spines[:].set_visible(False)
    data_prep.save_figure(figure, path)


def report_grid(runs, args, warn):
    axes, cells = find_cells(runs, args.grid, warn)
    found = over_cells(axes, cells)
    if not found:
        common.die("--grid: none of these runs has an mAP")
    if args.csv:
        csv.writer(sys.stdout).writerows(grid_csv(args.grid, axes, cells, found))
    else:
        print_parts([part for titled in grid_tables(args.grid, axes, found) for part in titled], args)
    if args.out:
        draw_grid(args.out, args.grid, axes, found)


# ---- 6. Go

if __name__ == "__main__":
    sys.excepthook = data_prep.explain
    args = tyro.cli(Args, use_underscores=True, description=__doc__)
    if args.markdown + args.latex + args.csv > 1:
        common.die("--markdown, --latex and --csv exclude each other")
    if args.classes < 0:
        common.die(f"--classes {args.classes}: at least one, or 0 for all")
    if not 0 <= args.seed < 2**32:
        common.die(f"--seed {args.seed}: at least 0 and below 2^32")
    common.find_device(args.device)
    if len(args.grid) > 2 or len(set(args.grid)) < len(args.grid):
        common.die(f"--grid {' '.join(args.grid)}: one setting or two, after the runs")
    if args.html if args.grid else args.out:
        common.die("--html is for the tables, --out for the picture of --grid")
    for flag, path in (("html", args.html), ("out", args.out)):
        if path and not Path(path).absolute().parent.is_dir():
            common.die(f"--{flag} {path}: there is no such folder")
    warnings = []
    warn = lambda warnings: [print(f"warning: {data_prep.printable(warning)}", file=sys.stderr) for warning in warnings]
    runs = list(read_runs(args.runs, warnings.append))
    if not runs:
        common.die(f"there is nothing to compare ({'; '.join(warnings) or 'no run was named'})")
    if args.grid:
        report_grid(runs, args, warnings.append)
        warn(warnings)
        sys.exit()
    datasets = group(runs)
    for name, rows in datasets.items():
        check(name, rows, warnings.append)
    if args.csv:
        csv.writer(sys.stdout).writerows(csv_table(datasets))
    else:
        print_tables(datasets, args)
    said = len(warnings)
    warn(warnings)
    if args.html:
        write_page(datasets, args, warnings)
        warn(warnings[said:])
