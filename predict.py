"""Use a trained model: label images, or export it

    python predict.py runs/voc-vlpl-s0-20261116-093000 photos
    python predict.py runs/voc-vlpl-s0-20261116-093000 --export model.pt2
    python predict.py runs/voc-vlpl-s0-20261116-093000 --card folder_for_a_model_hub

All that is needed to build the model is in the run: its copy of the script, its settings and its weights. The copy is
executed, so open only runs that you trust. An image is turned upright, as the camera held it, and squashed to the size
of training.

NOTES: The exported model squashes pixels of any size itself, with torch's antialiased bilinear filter instead of PIL's:
on 60 photos of VOC one value in seven differed, by 1 of 255, and probabilities by up to 0.0011; onnxruntime's rounding
moved them by up to 0.00016. The export prints the difference on the images given, and above 0.05 writes nothing.
"""

import csv
import importlib.util
import io
import json
import logging
import math
import os
import random
import signal
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal
from xml.sax.saxutils import quoteattr

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import tyro
from PIL import Image
from torch import nn
from tqdm import tqdm

import common
import data_prep

ON_A_FIGURE = 40  # images; more would be too small to see
CHECKED = 16  # images on which an exported model is compared with the original
SAME = {".pt2": 1e-5, ".onnx": 1e-3}  # largest difference of its probabilities from those of the original module
CLOSE = 0.05  # largest difference from those of this script, whose images are squashed by PIL

# ---- 1. Settings


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # a run directory, or a folder of --card
    images: tyro.conf.Positional[tuple[str, ...]] = ()  # images, or folders of them
    threshold: str = "auto"  # lowest probability of a label (auto: the run's tuned thresholds, else 0.5)
    top: int = 5  # maximum number of labels per image
    csv: str = ""  # CSV file for the probabilities of all classes
    figure: str = ""  # PNG file of the images with their probabilities
    to_label: int = 0  # number of images to draw for labelling by hand, with suggestions, into --out
    to_label_by: Literal["random", "uncertainty"] = "random"  # random (for validation) or uncertainty (for training)
    out: str = ""  # file for --to_label: tasks.json (Label Studio) or tasks.csv (to fill in)
    seed: int = 0  # seed of the random draw
    export: str = ""  # .pt2 or .onnx file for the model with its preprocessing
    card: str = ""  # new folder for weights, settings, script and model card, ready for a model hub
    device: str = "auto"  # device: auto, cpu, cuda, cuda:1, ...


# ---- 2. The model of a run


def find_script(run):
    """The run's own copy of its script, as a module, and the run's config"""
    config = common.read_config(Path(run))
    path, project = Path(run) / "script.py", str(Path(__file__).resolve().parent)
    if project not in sys.path:  # the script imports common
        sys.path.insert(0, project)
    try:
        script = common.import_script(path)
    except (Exception, SystemExit) as problem:
        common.die(f"{path}, the run's copy of its script, can't be imported: {common.in_a_line(problem)}")
    if missing := [name for name in ("Args", "PRESETS") if not hasattr(script, name)]:
        common.die(f"{path} has no {' and no '.join(missing)}: it is not the script of a method")
    return script, config


def load_model(run, device):
    """A run's best model, its settings and the names of its classes"""
    script, _ = find_script(run)
    args = replace(common.read_run_settings(script.Args, run), eval_only=str(run))  # so no weights are downloaded
    path = common.start_from(args)
    checkpoint = common.read_checkpoint(path)
    classes = checkpoint["classes"]
    try:
        module, name = checkpoint["model_class"]
        home = script if module == "__main__" else importlib.import_module(module)
        model = getattr(home, name)(args, len(classes))
        common.load_weights(model, path)
        common.check_probe(model, args.image_size, checkpoint, path)
    except Exception as problem:  # whatever the code of a model may raise
        common.die(f"the model of {path} can't be built again: {common.in_a_line(problem)}")
    return model.to(device).eval(), args, classes


@torch.no_grad()
def probabilities(model, pixels, device):
    """uint8 (B, H, W, 3), a tensor or an array -> (B, C)"""
    return model(common.as_pixels(common.as_tensor(pixels).to(device))).sigmoid().cpu()


def tuned_thresholds(run, classes):
    """Those that the run has tuned on validation, (C,), or None where it has none"""
    path = Path(run) / "result.json"
    if not path.exists():  # a folder of --card, or the run is unfinished and there are none
        path = Path(run) / "config.json"
    tuned = common.read_json(path, f"{run} is not a run directory").get("thresholds")
    if tuned is None:  # no validation images
        return None
    if not data_prep.fits(tuned, {str: float}):
        common.die(f"{path}: thresholds should be a number for every class")
    if missing := [name for name in classes if name not in tuned]:
        common.die(f"{path} has no threshold for {', '.join(missing)}")
    return torch.tensor([tuned[name] for name in classes])


def find_thresholds(given, tuned, classes):
    """--threshold -> (C,)"""
    if given == "auto" and tuned is not None:
        return tuned
    if given == "auto":
        why = "the run has no tuned thresholds (unfinished, or without validation images)"
        print(f"note: every class has the threshold 0.5 (--threshold changes it): {why}", file=sys.stderr)
        given = 0.5
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        common.die(f"--threshold {given}: a number between 0 and 1, or auto")
    return torch.full((len(classes),), value)


# ---- 3. Images


def find_files(given):
    """Folders -> all that is in them, at any depth, but hidden files; each once"""
    return list(dict.fromkeys(file for path in map(Path, given) for file in (inside(path) or [path])))


def inside(path):
    """Files of a folder, through links too, but through each folder once: links may go round in a circle"""
    files, seen = [], {os.path.realpath(path)}
    for folder, folders, names in os.walk(path, followlinks=True):
        real = {os.path.realpath(os.path.join(folder, name)): name for name in folders if name[0] != "."}
        folders[:] = [name for path, name in real.items() if path not in seen]
        seen |= real.keys()
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(file for file in files if file.is_file() or not file.exists())  # a link to nothing is worth a word


def read_pixels(path, size):
    """-> uint8 (size, size, 3), or the sentence why there is none"""
    try:
        return torch.tensor(data_prep.decode(path, size, upright=True))
    except IsADirectoryError:
        return f"there are no files in {path}"
    except Exception as problem:  # PIL's readers of rare formats raise all sorts
        return f"{path} can't be read: {problem or type(problem).__name__}"


def in_order(p, thresholds):
    """Classes that reach their threshold, then the others, the highest first"""
    return np.lexsort((-p, p < thresholds)).tolist()


def above(p, thresholds):
    """Classes that reach their threshold, the highest first"""
    return [c for c in in_order(p, thresholds) if p[c] >= thresholds[c]]


def labels(p, thresholds, classes, top):
    """The classes that reach their threshold, in words"""
    found = above(p, thresholds)
    more = f" and {len(found) - top} more" if len(found) > top else ""
    return (", ".join(f"{classes[c]} {p[c]:.2f}" for c in found[:top]) or "-") + more


def say(line):
    """Prints; where nobody reads on (| head) only the files are still wanted"""
    try:
        tqdm.write(data_prep.printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write(path, content):
    with common.replacing(path) as temporary:
        temporary.write_bytes(content)


def write_csv(path, files, p, classes):
    with common.replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", *map(data_prep.cell, classes)])
        writer.writerows([data_prep.cell(name), *row] for name, row in zip(files, p.tolist()))


def draw(path, files, p, thresholds, classes, top):
    """Every image beside its labels, in colour, and the highest of the other probabilities"""
    wide, top = min(len(files), 4), min(top, len(classes))
    high = -(-len(files) // wide)
    size = 4.4 * wide, max(2.2, 0.2 * top) * high
    figure, axes = data_prep.pyplot().subplots(high, 2 * wide, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for file, row, (picture, bars) in zip(files, p, axes.reshape(-1, 2)):
        image = data_prep.read_image(file, upright=True)
        image.thumbnail((300, 300))
        picture.imshow(image)
        picture.set_title(data_prep.printable(file.name), fontsize=8)
        for place, c in enumerate(in_order(row, thresholds)[:top]):
            bars.barh(place, row[c].item(), color="lightskyblue" if row[c] >= thresholds[c] else "lightgrey")
            bars.text(0, place, f" {classes[c]} {row[c]:.2f}", va="center", fontsize=8)
        bars.set(xlim=(0, 1), ylim=(top - 0.4, -0.6))
    figure.supxlabel("blue: labels, at or above their class's threshold; grey: the next most probable", fontsize=8)
    data_prep.save_figure(figure, path)


# ---- 4. Images to label


def uncertainty(p, thresholds):
    """(N, C) -> (N,), entropy in bits, mean over classes, with odds of 1 at a class's threshold"""
    logits = p.logit(eps=1e-6) - thresholds.logit(eps=1e-6)
    return F.binary_cross_entropy_with_logits(logits, logits.sigmoid(), reduction="none").mean(1) / math.log(2)


def write_tasks(path, folder, files, p, thresholds, classes, drawn, model):
    """A CSV with a ? for every image's labels, which data_prep.py refuses until it is replaced; or Label Studio's tasks
    and, beside them, its labelling interface. -> what to do with it"""
    names = [file.relative_to(folder).as_posix() for file in files]
    suggested = [[classes[c] for c in above(row, thresholds)] for row in p]
    if path.suffix == ".csv":
        with common.replacing(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", "labels", "suggested", "drawn"])
            for name, found in zip(names, suggested):
                writer.writerow([data_prep.cell(name), "?", data_prep.cell(";".join(found)), drawn])
        return "replace each ? by all labels of the image, ; between them, or by nothing where no class applies"
    tasks, home = [], folder.resolve()
    for name, found, score in zip(names, suggested, (1 - uncertainty(p, thresholds)).tolist()):
        address = f"/data/local-files/?d={urllib.parse.quote(os.fsencode(f'{home.name}/{name}'))}"
        choice = {"from_name": "labels", "to_name": "image", "type": "choices", "value": {"choices": found}}
        prediction = {"model_version": model, "result": [choice] if found else [], "score": score}
        tasks.append({"data": {"image": address, "file": name, "drawn": drawn}, "predictions": [prediction]})
    choices = "\n".join(f"<Choice value={quoteattr(name)}/>" for name in classes)
    choices = f'<Choices name="labels" toName="image" choice="multiple" showInline="true">\n{choices}\n</Choices>'
    data_prep.write_json(path, tasks)
    write(path.with_suffix(".xml"), f'<View>\n<Image name="image" value="$image"/>\n{choices}\n</View>\n'.encode())
    served = f"LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={home.parent}"
    return f"""start Label Studio with {served}
in its project, paste {path.with_suffix(".xml")} as labelling interface, add {home} as local storage without syncing it,
import {path}, and export what is done as JSON, not as JSON-MIN"""


# ---- 5. Export


class Portable(nn.Module):
    """uint8 pixels (B, 3, H, W) of any size -> probabilities (B, C)"""

    def __init__(self, model, size):
        super().__init__()
        self.model, self.size = model, (size, size)

    def forward(self, pixels):
        squashed = F.interpolate(pixels.float(), self.size, mode="bilinear", antialias=True).round()
        return self.model(squashed / 255).sigmoid()


def noise(brightest):
    """A made-up image, as a PNG file in memory"""
    file, pixels = io.BytesIO(), np.random.RandomState(0).randint(brightest, size=(40, 50, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(file, "png")
    return file


def to_pt2(program, about):
    """-> the file's content, and a function that computes what it does"""
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={"labels.json": about})
    return content.getvalue(), torch.export.load(io.BytesIO(content.getvalue())).module()


def to_onnx(program, about):
    """The same; no function where there is no onnxruntime"""
    logging.getLogger("onnxscript").setLevel(logging.ERROR)  # it tells what it could not make faster
    names = {"input_names": ["pixels"], "output_names": ["probabilities"]}
    converted = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    converted.model.metadata_props["labels.json"] = about
    content = converted.model_proto.SerializeToString()
    if not importlib.util.find_spec("onnxruntime"):
        return content, None
    session = importlib.import_module("onnxruntime").InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda pixels: torch.tensor(session.run(None, {"pixels": pixels.numpy()})[0])


@torch.no_grad()
def export(path, model, size, about, files):
    """Writes path only if it computes what the model does, from the bytes that are written."""
    original, vary = Portable(model.cpu(), size).eval().requires_grad_(False), torch.export.Dim.DYNAMIC
    images = files or [noise(brightest) for brightest in (16, 64, 256)]  # bright noise alone drives a model to 0 or 1
    pictures = (np.array(data_prep.read_image(file, upright=True)) for file in images)
    pixels = [torch.from_numpy(picture).permute(2, 0, 1)[None] for picture in pictures]
    example = torch.zeros(2, 3, size + 3, size + 5, dtype=torch.uint8)  # sizes that nothing takes for constants
    convert, allowed = to_onnx if path.suffix == ".onnx" else to_pt2, SAME[path.suffix]
    try:
        program = torch.export.export(original, (example,), dynamic_shapes=({0: vary, 2: vary, 3: vary},))
        content, portable = convert(program, json.dumps(about))
        exported = [portable(x) for x in pixels if portable]
    except Exception as problem:  # what a backbone of timm does is not always what torch can follow
        common.die(f"torch can't export this model: {(str(problem) or type(problem).__name__).splitlines()[0]}")
    furthest = lambda expected: max(((a - b).abs().max().item() for a, b in zip(exported, expected)), default=0.0)
    apart = furthest([original(x) for x in pixels])
    by_pil = furthest([probabilities(model, read_pixels(file, size)[None], "cpu") for file in images])
    if not (apart <= allowed and by_pil <= CLOSE):
        common.die(
            f"the exported model's probabilities differ by {apart:.1e} from the original's ({allowed:.0e} is allowed) "
            f"and by {by_pil:.1e} from those of images squashed by PIL ({CLOSE:g} is allowed): none was written"
        )
    write(path, content)
    if not portable:
        say(f"{path}: not compared with the original, for which the package onnxruntime is needed")
        return
    what = f"{len(files)} images" if files else "made-up pixels"
    say(f"{path}: on {what} its probabilities differ by {apart:.1e} from the original's ({allowed:.0e} is allowed)")
    say(f"torch's squashing instead of PIL's changes them by up to {by_pil:.1e} ({CLOSE:g} is allowed)")


# ---- 6. A folder for a model hub


def write_card(folder, run, settings, classes, tuned):
    """All that load_model needs, with nothing of this machine in it: paths become names"""
    checkpoint, method = common.read_checkpoint(common.start_from(settings)), common.read_config(Path(run))["method"]
    kept = {name: value for name, value in asdict(settings).items() if name not in common.RESUME_MAY_CHANGE}
    kept = {name: Path(v).name if isinstance(v, str) and os.path.isabs(v) else v for name, v in kept.items()}
    config = {"method": method, "backbone": kept.get("backbone", method), "image_size": settings.image_size}
    config |= {"classes": classes, "thresholds": None if tuned is None else dict(zip(classes, tuned.tolist()))}
    config |= {"settings": kept, "processes": 1, "model_class": checkpoint["model_class"]}
    config["probe"] = torch.as_tensor(checkpoint["probe"]).tolist()
    numbers = {"val_mAP", "val_known_mAP", "test_mAP", "test_F1", "test_F1_tuned", "test_AP"} & checkpoint.keys()
    config |= common.without_nans({name: checkpoint[name] for name in sorted(numbers)})
    data_prep.make_folder(folder)
    weights = {name: value.clone().contiguous() for name, value in checkpoint["model"].items()}
    write(folder / "model.safetensors", safetensors.torch.save(weights))
    write(folder / "script.py", (Path(run) / "script.py").read_bytes())
    write(folder / "README.md", card(config, folder.resolve().name).encode())
    data_prep.write_json(folder / "config.json", config)  # the last: without it the folder is none to load
    load_model(folder, "cpu")
    say(f"{folder}: {', '.join(sorted(os.listdir(folder)))}; choose a license in README.md before you publish it")


def card(config, name):
    """README.md: a header of YAML, then the run's numbers, how to use it, its classes"""
    escape = lambda text: data_prep.printable(text).replace("|", "\\|")
    test = {"mAP": config.get("test_mAP", math.nan), **{f1: config.get(f"test_{f1}") for f1 in ("F1", "F1_tuned")}}
    columns = [config["thresholds"] or {}, config.get("test_AP", {})]
    how = "tuned for F1 on validation images"
    if "val_known_mAP" in config:
        how = "chosen by the known labels of held-out images; its precision is not known"
    rows = ([escape(c), *(f"{values[c]:.3f}" if c in values else "-" for values in columns)] for c in config["classes"])
    return f"""---
license: unknown  # choose one before you publish this
pipeline_tag: image-classification
tags: {json.dumps(["image-classification", "multi-label", "single-positive", config["method"], config["backbone"]])}
---

# {escape(name)}

Which of {len(config["classes"])} labels apply to an image: {config["backbone"]} at {config["image_size"]} pixels,
trained by `{config["method"]}.py` on {escape(Path(config["settings"]["dataset"]).name)} with incomplete labels.

{common.in_words({name: config[name] for name in ("val_mAP", "val_known_mAP") if name in config}, test)}

With the code of *Single-positive multi-label learning, one file per method*, which executes `script.py`:

```sh
python predict.py FOLDER photos
```

`model.safetensors` holds the weights, `config.json` the settings. A label applies from its threshold on, {how}
(-: 0.5). AP is that of the test images.

| class | threshold | AP |
|---|---|---|
""" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


# ---- 7. Go

if __name__ == "__main__":
    sys.excepthook = data_prep.explain
    args = tyro.cli(Args, use_underscores=True, description=__doc__.split("NOTES")[0])
    if args.top < 1:
        common.die(f"--top {args.top}: at least one label")
    if not (args.images or args.export or args.card):
        common.die("pass images or folders, --export FILE or --card FOLDER")
    if (args.csv or args.figure) and not args.images:
        common.die("--csv and --figure need images: pass some, or folders of them")
    endings = {"figure": [".png"], "out": [".json", ".csv"], "export": [*SAME]}
    for flag, wanted in endings.items():
        if (path := getattr(args, flag)) and Path(path).suffix not in wanted:
            common.die(f"--{flag} {path}: the name must end in {' or '.join(wanted)}")
    if args.export.endswith(".onnx") and not importlib.util.find_spec("onnxscript"):
        common.die(f"--export {args.export} needs the package onnxscript, and onnxruntime to compare: pip install both")
    if args.card and any(Path(args.card).glob("*")):
        common.die(f"--card {args.card}: the folder is not empty: choose another")
    if args.to_label < 0 or bool(args.to_label) != bool(args.out):
        common.die("--to_label and --out belong together: --to_label 100 --out tasks.json, or tasks.csv")
    if args.to_label and not (len(args.images) == 1 and Path(args.images[0]).is_dir()):
        common.die("--to_label needs one folder of images, that of data_prep.py custom --images")
    if args.out and Path(args.out).exists():
        common.die(f"--out {args.out}: it exists, and may hold somebody's labels: choose another name, or move it away")
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))  # Ctrl-C, without a traceback
    for path in filter(None, (args.csv, args.figure, args.out, args.export)):
        if not Path(path).absolute().parent.is_dir():
            common.die(f"{path} can't be written: there is no such folder")
    device = common.find_device(args.device)
    model, settings, classes = load_model(args.run, device)
    tuned = tuned_thresholds(args.run, classes)
    thresholds = find_thresholds(args.threshold, tuned, classes)

    files, p, problems, paths = [], [], [], find_files(args.images)
    at_random = args.to_label and args.to_label_by == "random"
    if at_random:
        random.Random(args.seed).shuffle(paths)
    with ThreadPoolExecutor() as pool, tqdm(total=len(paths), leave=False, disable=not sys.stderr.isatty()) as bar:
        for batch in common.in_batches(paths):
            read = dict(zip(batch, pool.map(lambda path: read_pixels(path, settings.image_size), batch)))
            problems += [pixels for pixels in read.values() if isinstance(pixels, str)]
            images = {path: pixels for path, pixels in read.items() if torch.is_tensor(pixels)}
            if images:
                p.append(probabilities(model, torch.stack(list(images.values())), device))
                for path, row in zip(images, p[-1] if not args.to_label else ()):
                    say(f"{path}: {labels(row, thresholds, classes, args.top)}")
            files += images
            bar.update(len(batch))
            if at_random and len(files) >= args.to_label:
                break

    print("".join(f"{data_prep.printable(problem)}\n" for problem in problems), end="", file=sys.stderr)
    if paths and not files:
        common.die("there is no readable image")
    p = torch.cat(p) if files else None
    if args.to_label:
        order = range(len(files)) if at_random else (-uncertainty(p, thresholds)).argsort(stable=True).tolist()
        chosen = list(order[: args.to_label])
        files, p = [files[row] for row in chosen], p[chosen]
        drawn = f"at random, seed {args.seed}" if at_random else "by uncertainty: to train with, not to measure with"
        say(f"{args.out}: {len(files)} of {len(paths)} files, {drawn}")
        folder, version = Path(args.images[0]), Path(args.run).resolve().name
        advice = write_tasks(Path(args.out), folder, files, p, thresholds, classes, drawn, version)
        for line in (*advice.splitlines(), f"data_prep.py custom {'--val' if at_random else '--labels'} takes it back"):
            say(line)
    if files and args.csv:
        write_csv(Path(args.csv), files, p, classes)
    if files and args.figure:
        draw(Path(args.figure), files[:ON_A_FIGURE], p, thresholds, classes, args.top)
        say(f"{args.figure}: {len(files[:ON_A_FIGURE])} of {len(files)} images")
    if args.export:
        exported = torch.full((len(classes),), 0.5) if tuned is None else tuned
        about = {"classes": classes, "thresholds": dict(zip(classes, exported.tolist())), "run": args.run}
        about |= {"input": "uint8 RGB (B, 3, H, W)", "output": "probabilities (B, C)"}
        export(Path(args.export), model, settings.image_size, about, files[:CHECKED])
    if args.card:
        write_card(Path(args.card), args.run, settings, classes, tuned)
    sys.exit(1 if problems else 0)
