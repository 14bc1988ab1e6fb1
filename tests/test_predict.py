"""predict.py: the model of a run, on images of any kind, and carried away"""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import LEARNT, ROOT, SMALL, finish, only_run, start
from PIL import Image

import an
import common
import data_prep
import predict
import pu_mlc


@pytest.fixture
def folder(workplace, squares):
    """Images of several kinds and modes, and what is none"""
    folder = workplace / "photos"
    (folder / "deep").mkdir(parents=True)
    image = Image.open(f"{squares}/images/val_0.png")
    image.save(folder / "a.png")
    image.resize((90, 30)).save(folder / "deep" / "b.jpg")
    image.convert("L").save(folder / "c.bmp")
    image.convert("RGBA").save(folder / "d.webp")
    image.convert("P").save(folder / "e.gif")
    image.convert("CMYK").save(folder / "f.tif")
    Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100).save(folder / "g.png")
    return folder


def lines_of(out):
    return dict(re.findall(r"^(.*?): (.*)$", out, re.M))


MINE = """
class Mine(common.Classifier):
    def forward(self, x):
        return 2 * super().forward(x) + 1
"""


@pytest.fixture(scope="session")
def mine(tmp_path_factory, squares):
    """A finished run of a copied script, ll-r.py, whose model differs from an.py's in its forward; tests read only"""
    folder, text = tmp_path_factory.mktemp("mine"), (ROOT / "an.py").read_text()
    text = text.replace("# ---- 3. Train", f"{MINE}\n\n# ---- 3. Train").replace("common.Classifier(args", "Mine(args")
    (folder / "ll-r.py").write_text(text)
    finish(start("ll-r.py", "--dataset", squares, *SMALL, "--epochs", 2, "--workers", 0, cwd=folder))
    return only_run(folder)


def change(run, target, old, new):
    """A copy of a run, with another text in its script.py"""
    shutil.copytree(run, target)
    text = (run / "script.py").read_text()
    assert old in text
    (target / "script.py").write_text(text.replace(old, new))
    return target


def run_predict(script, *arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        script("predict.py", *arguments)
    assert ended.value.code == code


def test_probabilities_are_those_of_the_run(trained, script, squares, workplace):
    """Against Run.predict on the whole test set, from files in another order"""
    args = common.parse(an.Args, an.PRESETS, ["--eval_only", str(trained)])
    run = common.Run(args, str(ROOT / "an.py"))
    data = common.load(args)
    model = run.prepare(common.Classifier(args, 4), data)
    expected = run.predict(model, data.test).sigmoid()
    names = [f"{squares}/images/{name}" for name in data.test.images.names]
    run_predict(script, trained, *reversed(names), "--csv", "out.csv", "--device", "cpu")
    with open("out.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["image", *data.classes]
    assert [row[0] for row in rows] == names[::-1]
    values = torch.tensor([[float(value) for value in row[1:]] for row in rows])
    torch.testing.assert_close(values.flip(0), expected, rtol=0, atol=1e-6)


def test_a_copied_script_with_a_model_of_its_own(mine, trained, script, squares):
    """By hand: the weights in the model that the script's was made of, its forward worked out again"""
    args = common.parse(an.Args, an.PRESETS, ["--eval_only", str(trained)])
    data, plain = common.load(args), common.Classifier(args, 4).eval()
    checkpoint = torch.load(mine / "best.pt", weights_only=True)
    plain.load_state_dict(checkpoint["model"])
    pixels = data.test.images[data.test.rows]
    with torch.no_grad():
        logits = 2 * plain(torch.tensor(pixels).permute(0, 3, 1, 2) / 255) + 1
    model, _, classes = predict.load_model(mine, "cpu")
    assert classes == data.classes
    assert torch.equal(predict.probabilities(model, pixels, "cpu"), logits.sigmoid())
    result = json.loads((mine / "result.json").read_text())  # what the run itself measured
    assert common.f1_scores(logits.sigmoid(), data.test.y) == pytest.approx(result["test_F1"])
    assert common.mean_average_precision(logits, data.test.y) == pytest.approx(result["test_mAP"])


def test_a_run_needs_its_script_no_more(mine, script, folder, workplace):
    shutil.copytree(mine.parent.parent, workplace / "project")
    run, there = only_run(workplace / "project"), workplace / "project/ll-r.py"
    found = sorted(run.rglob("*"))
    said = []
    for change in (lambda: None, lambda: there.write_text("1 / 0"), there.unlink):
        change()
        process = start(ROOT / "predict.py", run, folder, "--csv", "out.csv", cwd=workplace)
        said.append((finish(process), Path("out.csv").read_text()))
    assert said == said[:1] * 3
    assert len(said[0][1].splitlines()) == 8
    assert sorted(run.rglob("*")) == found  # looking at a run leaves nothing there


def test_a_model_whose_code_was_changed_is_refused(mine, workplace):
    """Of the same length, within a second: nothing compiled is taken for the script"""
    run = change(mine, workplace / "run", "2 * super", "2 * super")
    predict.load_model(run, "cpu")
    for new in ("3 * super", "1 * super"):
        run = change(mine, workplace / new[0], "2 * super", new)
        with pytest.raises(SystemExit, match=r"^error: the model's code has changed since .*best.pt was trained.*$"):
            predict.load_model(run, "cpu")
    (workplace / "run/script.py").write_text((run / "script.py").read_text())
    with pytest.raises(SystemExit, match=r"^error: the model's code has changed"):
        predict.load_model(workplace / "run", "cpu")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "import common\n",
            "import common\nimport nowhere\n",
            "can't be imported: ModuleNotFoundError: No module named",
        ),
        ("class Mine", "class class Mine", "can't be imported: SyntaxError: invalid syntax"),
        ("PRESETS = {", "raise SystemExit('enough')\nPRESETS = {", "can't be imported: SystemExit: enough"),
        ("PRESETS = {", "OTHERS = {", "script.py has no PRESETS: it is not the script of a method"),
        ("class Mine", "class Yours", "can't be built again: AttributeError: module .* has no attribute 'Mine'"),
        (
            "    def forward",
            "    def __init__(self, args):\n        pass\n\n    def forward",
            "again: TypeError: .*__init__",
        ),
        ("2 * super().forward(x) + 1", "super().forward(x)[:, :3]", "the model's code has changed since"),
        ("lr: common.Positive", "rate: common.Positive", "was made by another script or version"),
    ],
)
def test_code_that_is_not_the_runs_gives_one_sentence(mine, workplace, old, new, expected):
    run = change(mine, workplace / "run", old, new)
    with pytest.raises(SystemExit, match=f"^error: .*{expected}.*$"):
        predict.load_model(run, "cpu")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_class": None}, "can't be built again: TypeError"),
        ({"classes": None}, "can't be built again: TypeError"),
        ({"model_class": ["nowhere", "Net"]}, "can't be built again: ModuleNotFoundError: No module named 'nowhere'"),
        ({"model_class": "Mine"}, "can't be built again: ValueError"),
        ({"model_class": ["common", "Classifier"]}, "the model's code has changed"),
        ({"model": {}}, "doesn't fit the model"),
    ],
)
def test_weights_that_name_another_model_give_one_sentence(mine, workplace, changes, expected):
    run = shutil.copytree(mine, workplace / "run")
    torch.save(torch.load(mine / "best.pt", weights_only=True) | changes, run / "best.pt")
    with pytest.raises(SystemExit, match=f"^error: .*{expected}.*$"):
        predict.load_model(run, "cpu")


def test_any_image_is_read_and_the_rest_is_listed(trained, script, folder, capsys):
    (folder / "notes.txt").write_text("no image")
    cut = folder / "deep" / "cut.png"
    cut.write_bytes((folder / "a.png").read_bytes()[:-500])
    (folder / "h.png").symlink_to("moved_away.png")
    run_predict(script, trained, folder, "nowhere.jpg", "--csv", "out.csv", code=1)
    out, err = capsys.readouterr()
    images = ["a.png", "c.bmp", "d.webp", "deep/b.jpg", "e.gif", "f.tif", "g.png"]
    assert list(lines_of(out)) == [str(folder / name) for name in images]
    assert len(Path("out.csv").read_text().splitlines()) == 8
    unreadable = [line.split(" can't be read")[0] for line in err.splitlines()]
    assert unreadable == [str(cut), str(folder / "h.png"), str(folder / "notes.txt"), "nowhere.jpg"]


def test_nothing_readable_is_an_error(trained, script, workplace, capsys):
    (workplace / "empty").mkdir()
    with pytest.raises(SystemExit, match="error: there is no readable image"):
        script("predict.py", trained, "empty")
    assert capsys.readouterr().err == "there are no files in empty\n"


def test_names_that_are_not_utf8(trained, folder, workplace):
    (folder / "a.png").rename(folder / os.fsdecode(b"\xff.png"))
    command = (ROOT / "predict.py", trained, folder, "--csv", "out.csv", "--figure", "out.png")
    out = finish(start(*command, cwd=workplace))
    assert f"{folder}/\\xff.png: " in out
    assert f"{folder}/\\xff.png," in Path("out.csv").read_text()
    assert Path("out.png").exists()


def test_a_reader_that_leaves_takes_no_file_along(trained, folder, workplace):
    """predict.py ... --csv out.csv | head -0"""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, ROOT / "predict.py", trained, folder, "--csv", "out.csv", "--figure", "out.png"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(Path("out.csv").read_text().splitlines()) == 8


def test_thresholds_and_top(trained, script, folder, capsys):
    result = json.loads((trained / "result.json").read_text())
    run_predict(script, trained, folder / "a.png", "--threshold", 0, "--top", 3, "--csv", "out.csv")
    line = lines_of(capsys.readouterr().out)[str(folder / "a.png")]
    with open("out.csv") as file:
        ((_, *values),) = list(csv.reader(file))[1:]
    p = dict(zip(common.read_state(trained / "best.pt")["classes"], map(float, values)))
    highest = sorted(p, key=p.get, reverse=True)
    assert line == ", ".join(f"{name} {p[name]:.2f}" for name in highest[:3]) + " and 1 more"
    expected = [f"{name} {p[name]:.2f}" for name in highest if p[name] >= result["thresholds"][name]]
    for default in ((), ("--threshold", "auto")):
        run_predict(script, trained, folder / "a.png", *default)
        out, err = capsys.readouterr()
        assert lines_of(out)[str(folder / "a.png")] == (", ".join(expected) or "-")
        assert not err
    run_predict(script, trained, folder / "a.png", "--threshold", 1)
    assert lines_of(capsys.readouterr().out)[str(folder / "a.png")] == "-"


@pytest.mark.parametrize("result", [None, "{}"])  # unfinished; finished, without validation images
def test_without_tuned_thresholds_it_is_a_half_and_says_so(trained, script, workplace, folder, capsys, result):
    run = shutil.copytree(trained, workplace / "run", ignore=shutil.ignore_patterns("result.json"))
    if result:
        (run / "result.json").write_text(result)
    run_predict(script, run, folder)
    out, err = capsys.readouterr()
    told = r"note: every class has the threshold 0.5 \(--threshold .*\): the run has no tuned thresholds .*\n"
    assert re.fullmatch(told, err)
    for flags, expected in ((("--threshold", 0.5), out), (("--threshold", 0.2), None)):
        run_predict(script, run, folder, *flags)
        said, err = capsys.readouterr()
        assert not err
        assert (said == out) == (expected is not None)


def test_tuned_thresholds_are_those_of_validation(trained):
    args = common.parse(an.Args, an.PRESETS, ["--eval_only", str(trained)])
    data, (model, _, classes) = common.load(args), predict.load_model(trained, "cpu")
    p = predict.probabilities(model, data.val.images[data.val.rows], "cpu")
    tuned = json.loads((trained / "result.json").read_text())["thresholds"]
    assert list(tuned) == classes
    best = []
    for c in range(len(classes)):
        f1 = lambda t: f1_of(p[:, c] >= t, data.val.y[:, c])  # noqa: B023
        best.append(max(sorted(p[:, c].tolist(), reverse=True), key=f1))
    logits, n = np.log(best) - np.log1p(-np.array(best)), data.val.y.sum(0).numpy()
    middle = np.sort(logits)[(len(logits) - 1) // 2]
    expected = 1 / (1 + np.exp(-(n * logits + 20 * middle) / (n + 20)))
    assert list(tuned.values()) == pytest.approx(expected, abs=1e-5)


def f1_of(guess, truth):
    return 2 * (guess & (truth == 1)).sum().item() / (guess.sum() + truth.sum()).item()


def test_small_mistakes_give_one_sentence(trained, script, workplace, folder):
    shutil.copytree(trained, workplace / "partly")
    (workplace / "partly/result.json").write_text(json.dumps({"thresholds": {"red": 0.5, "blue": 0.5}}))
    shutil.copytree(trained, workplace / "broken")
    (workplace / "broken/result.json").write_text('{"thresholds": {"red"')
    (workplace / "filled.csv").write_text("image,labels")
    shutil.copytree(trained, workplace / "foreign", ignore=shutil.ignore_patterns("script.py"))
    shutil.copytree(trained, workplace / "young", ignore=shutil.ignore_patterns("best.pt", "result.json"))
    for arguments, expected in (
        (("partly", folder), "partly/result.json has no threshold for green, white"),
        (("partly", "--export", "model.pt2"), "partly/result.json has no threshold for green, white"),
        (("broken", "--export", "model.pt2"), "broken/result.json can't be read"),
        ((trained, folder, "--threshold", "high"), "--threshold high"),
        ((trained, folder, "--threshold", 1.5), "--threshold 1.5"),
        ((trained, folder, "--top", 0), "--top 0"),
        ((trained, folder, "--device", "gpu"), "--device gpu"),
        ((trained, folder, "--csv", "no/where.csv"), "no/where.csv can't be written"),
        ((trained,), "pass images or folders"),
        ((trained, "--csv", "out.csv", "--export", "model.pt2"), "--csv and --figure need images"),
        ((trained, "--export", "model.tflite"), "--export model.tflite: the name must end in .pt2 or .onnx"),
        ((trained, "--card", trained), "the folder is not empty"),
        ((trained, "--card", folder / "a.png"), "a.png can't be written"),
        ((trained, folder, "--to_label", 5), "--to_label and --out belong together"),
        ((trained, folder, "--out", "tasks.json"), "--to_label and --out belong together"),
        ((trained, folder, "--to_label", -1, "--out", "tasks.json"), "--to_label and --out belong together"),
        ((trained, folder, "--to_label", 5, "--out", "tasks.xml"), "the name must end in .json or .csv"),
        ((trained, folder, folder, "--to_label", 5, "--out", "tasks.json"), "--to_label needs one folder of images"),
        ((trained, folder / "a.png", "--to_label", 5, "--out", "tasks.json"), "--to_label needs one folder of images"),
        ((trained, folder, "--to_label", 5, "--out", "filled.csv"), "filled.csv: it exists, and may hold somebody's"),
        ((trained, folder, "--figure", "out.jpg"), "--figure out.jpg: the name must end in .png"),
        ((folder, folder), "is not a run directory"),
        (("foreign", folder), "foreign/script.py, the run's copy of its script, can't be imported: FileNotFoundError"),
        (("young", folder), "young has no best.pt"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{expected}"):
            script("predict.py", *arguments)


def test_the_figure_shows_every_image(trained, script, folder):
    run_predict(script, trained, folder, "--figure", "out.png")
    with Image.open("out.png") as figure:
        assert figure.width == round(4.4 * 4 * 110)  # four in a row
        assert figure.height == round(2.2 * 2 * 110)  # of seven


def test_the_figure_shows_the_labels_first(folder, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)  # to be looked at
    p, thresholds = torch.tensor([[0.9, 0.2, 0.6, 0.3]]), torch.tensor([0.95, 0.1, 0.5, 0.5])
    classes = ["red", "green", "blue", "white"]
    predict.draw(Path("out.png"), [folder / "a.png"], p, thresholds, classes, top=3)
    _, bars = plt.gcf().axes
    monkeypatch.undo()
    plt.close("all")
    assert [text.get_text().strip() for text in bars.texts] == ["blue 0.60", "green 0.20", "red 0.90"]
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([0.6, 0.2, 0.9])
    blue, green, red = (bar.get_facecolor() for bar in bars.patches)
    assert blue == green != red
    assert predict.labels(p[0], thresholds, classes, top=3) == "blue 0.60, green 0.20"


@pytest.fixture
def album(workplace, squares):
    """24 photos with names and folders that need quoting, of which one label each is known, and a file that is none"""
    known = {}
    for i in range(24):
        name = f"a day/no {i} & 50%.png" if i % 2 else f"-{i}.png"
        (workplace / "album/a day").mkdir(parents=True, exist_ok=True)
        shutil.copy(f"{squares}/images/train_{i}.png", workplace / "album" / name)
        known[name] = ["red", "green", "blue", "white"][i % 4]
    (workplace / "album/notes.txt").write_text("no image")
    (workplace / "labels.csv").write_text("image,label\n" + "".join(f"{n},{c}\n" for n, c in known.items()))
    return workplace / "album"


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_images_to_label_come_back_as_validation_images(trained, script, album, capsys, ending):
    run_predict(script, trained, "album", "--to_label", 6, "--seed", 1, "--out", f"tasks.{ending}", code=1)  # notes.txt
    out = capsys.readouterr().out
    assert f"tasks.{ending}: 6 of 25 files, at random, seed 1\n" in out
    assert out.endswith("data_prep.py custom --val takes it back\n")
    answers = [[], ["red"], ["white", "blue"], ["green"], ["red", "green", "blue", "white"]]
    if ending == "json":  # as Label Studio exports it, the last task skipped
        done = json.loads(Path("tasks.json").read_text())
        names = [task["data"]["file"] for task in done]
        for task, answer in zip(done, [*answers, None]):
            task["annotations"] = [{"result": [], "was_cancelled": answer is None}]
            if answer:
                choice = {"from_name": "labels", "to_name": "image", "type": "choices", "value": {"choices": answer}}
                task["annotations"][0]["result"].append(choice)
        Path("done.json").write_text(json.dumps(done))
    else:
        header, *rows = csv.reader(Path("tasks.csv").read_text().splitlines())
        assert header == ["image", "labels", "suggested", "drawn"]
        assert {row[0][:2] for row in rows} == {"'-", "a "}  # a spreadsheet takes none of them for a formula
        names = [row[0].removeprefix("'") for row in rows]
        filled = [[row[0], ";".join(answer), *row[2:]] for row, answer in zip(rows, answers)]  # the last is deleted
        with open("done.csv", "w", newline="") as file:
            csv.writer(file).writerows([header, *filled])
    command = "data_prep.py", "custom", "--name", "album", "--images", "album", "--labels", "labels.csv", "--val"
    assert "removed from training: 5" in script(*command, f"done.{ending}")
    prepared, classes = Path("data/album"), json.loads(Path("data/album/dataset.json").read_text())["classes"]
    found = data_prep.read_names(prepared, "valid").tolist()
    y = np.load(prepared / "formatted_valid_labels.npy")
    assert {n: {classes[c] for c in row.nonzero()[0]} for n, row in zip(found, y)} == {
        name: set(answer) for name, answer in zip(names, answers)
    }
    with pytest.raises(SystemExit, match=r"6 images .* still have \? instead of|there is no validation image"):
        script(*command, f"tasks.{ending}")  # nothing done yet: no silent set of images without labels


def test_drawn_images_are_the_same_from_a_seed_and_a_larger_draw_goes_on(trained, script, album):
    names = {}
    for seed, n in ((0, 5), (0, 9), (1, 9), (0, 99)):
        run_predict(script, trained, album, "--to_label", n, "--seed", seed, "--out", f"{seed}-{n}.json", code=1)
        names[seed, n] = [task["data"]["file"] for task in json.loads(Path(f"{seed}-{n}.json").read_text())]
    assert names[0, 9][:5] == names[0, 5]
    assert names[0, 99][:9] == names[0, 9]
    assert len(set(names[0, 99])) == 24
    assert len(set(names[1, 9])) == 9
    assert names[1, 9] != names[0, 9]


def test_a_label_studio_task_by_hand(trained, script, album, capsys):
    """Each key against the probabilities of --csv"""
    (album / "notes.txt").unlink()
    run_predict(script, trained, "album", "--to_label", 4, "--out", "tasks.json", "--csv", "p.csv")
    (_, *classes), *rows = csv.reader(Path("p.csv").read_text().splitlines())
    tuned = json.loads((trained / "result.json").read_text())["thresholds"]
    tasks = json.loads(Path("tasks.json").read_text())
    assert len(tasks) == len(rows) == 4
    for task, (path, *values) in zip(tasks, rows):
        name, p = str(Path(path).relative_to("album")), dict(zip(classes, map(float, values)))
        assert task["data"] == {"image": task["data"]["image"], "file": name, "drawn": "at random, seed 0"}
        address = task["data"]["image"].removeprefix("/data/local-files/?d=")
        assert " " not in address
        assert "%25" in address or "%" not in name
        (prediction,) = task["predictions"]
        assert prediction["model_version"] == trained.name
        found = sorted((c for c in classes if p[c] >= tuned[c]), key=lambda c: -p[c])
        assert [one["value"]["choices"] for one in prediction["result"]] == ([found] if found else [])
        assert {(one["from_name"], one["to_name"], one["type"]) for one in prediction["result"]} <= {
            ("labels", "image", "choices")
        }
        odds = [p[c] / (1 - p[c]) * (1 - tuned[c]) / tuned[c] for c in classes]
        sure = [(q, 1 - q) for q in (o / (1 + o) for o in odds)]
        entropy = sum(-a * np.log2(a) - b * np.log2(b) for a, b in sure if 0 < a < 1) / len(classes)
        assert prediction["score"] == pytest.approx(1 - entropy, abs=1e-4)
    assert f"DOCUMENT_ROOT={album.parent}\n" in capsys.readouterr().out
    view = ElementTree.fromstring(Path("tasks.xml").read_text())
    assert (view[0].tag, view[0].attrib) == ("Image", {"name": "image", "value": "$image"})
    assert view[1].attrib | {"name": "labels", "toName": "image", "choice": "multiple"} == view[1].attrib
    assert [choice.attrib["value"] for choice in view[1]] == classes


def test_uncertain_images_are_marked(trained, script, album, capsys):
    (album / "notes.txt").unlink()
    run_predict(script, trained, album, "--to_label", 24, "--to_label_by", "uncertainty", "--out", "all.json")
    run_predict(script, trained, album, "--to_label", 3, "--to_label_by", "uncertainty", "--out", "three.json")
    assert re.search("by uncertainty: to train with, not to measure with\n(?s:.*)--labels", capsys.readouterr().out)
    every, three = (json.loads(Path(name).read_text()) for name in ("all.json", "three.json"))
    assert three == every[:3]
    scores = [task["predictions"][0]["score"] for task in every]
    assert scores == sorted(scores)
    assert {task["data"]["drawn"] for task in every} == {"by uncertainty: to train with, not to measure with"}


def test_a_class_on_the_fence_is_uncertain():
    thresholds = torch.tensor([0.5, 0.1])
    p = torch.tensor([[0.5, 0.1], [0.5, 1.0], [0.0, 1.0], [1.0, 0.1]])
    torch.testing.assert_close(predict.uncertainty(p, thresholds), torch.tensor([1, 0.5, 0, 0.5]), rtol=0, atol=1e-3)
    assert predict.uncertainty(p, torch.tensor([0.0, 1.0])).isfinite().all()


def test_names_of_classes_are_quoted_for_label_studio(workplace, folder):
    classes, p = ['"a" & <b>', "ü"], torch.tensor([[0.9, 0.1]])
    predict.write_tasks(Path("t.json"), folder, [folder / "a.png"], p, torch.tensor([0.5, 0.5]), classes, "", "m")
    view = ElementTree.fromstring(Path("t.xml").read_text(encoding="utf-8"))
    assert [choice.attrib["value"] for choice in view[1]] == classes


# Elsewhere: another process, another folder, nothing of this project to import
ELSEWHERE = """
import json, sys, torch
files = {"labels.json": ""}
model = torch.export.load("model.pt2", extra_files=files).module()
print(json.loads(files["labels.json"])["classes"])
assert model(torch.zeros(1, 3, 40, 40, dtype=torch.uint8)).numpy().shape == (1, 4)  # takes no gradient
torch.save([model(x) for x in torch.load("pixels.pt")], "probabilities.pt")
assert "common" not in sys.modules
"""


def test_an_exported_model_works_elsewhere(trained, script, folder, capsys):
    run_predict(script, trained, folder / "a.png", folder / "deep", "--export", "model.pt2")
    out = capsys.readouterr().out
    assert "on 2 images its probabilities differ by 0.0e+00" in out
    assert float(re.search(r"PIL's changes them by up to (\S+)", out)[1]) < 0.02
    pixels = [
        torch.randint(256, shape, dtype=torch.uint8) for shape in ((1, 3, 32, 32), (5, 3, 17, 300), (2, 3, 99, 9))
    ]
    torch.save(pixels, "pixels.pt")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['red', 'green', 'blue', 'white']"
    model, args, _ = predict.load_model(trained, "cpu")
    original = predict.Portable(model, args.image_size).eval()
    with torch.no_grad():
        for x, p in zip(pixels, torch.load("probabilities.pt")):
            torch.testing.assert_close(p, original(x), rtol=0, atol=1e-5)


def test_tuned_thresholds_are_exported_where_there_are_some(trained, script, workplace):
    shutil.copytree(trained, workplace / "old")
    result = json.loads((trained / "result.json").read_text())
    (workplace / "old/result.json").unlink()
    shutil.copytree(trained, workplace / "no_validation")
    tuned, half = result.pop("thresholds"), dict.fromkeys(common.read_state(trained / "best.pt")["classes"], 0.5)
    (workplace / "no_validation/result.json").write_text(json.dumps(result))
    for run, expected in ((trained, tuned), ("old", half), ("no_validation", half)):
        card = workplace / f"card of {Path(run).name}"
        run_predict(script, run, "--export", "model.pt2", "--card", card)
        about = {"labels.json": ""}
        torch.export.load("model.pt2", extra_files=about)
        assert json.loads(about["labels.json"])["thresholds"] == pytest.approx(expected)
        on_card = json.loads((card / "config.json").read_text())["thresholds"]
        assert on_card == (None if expected is half else pytest.approx(expected))


def test_an_export_that_differs_is_not_written(trained, script, workplace, monkeypatch):
    (workplace / "model.pt2").write_text("old")
    load = torch.export.load

    def broken(file):
        program = load(file)
        for weight in program.state_dict.values():
            weight.data = weight.data * 1.5 if weight.is_floating_point() else weight.data
        return program

    monkeypatch.setattr(torch.export, "load", broken)
    with pytest.raises(SystemExit, match="none was written"):
        script("predict.py", trained, "--export", "model.pt2")
    assert [path.name for path in workplace.iterdir()] == ["model.pt2"]
    assert (workplace / "model.pt2").read_text() == "old"


@pytest.mark.parametrize("files", [[], ["photos/a.png"]])
def test_an_export_with_other_preprocessing_is_not_written(trained, folder, monkeypatch, files):
    def without_255(self, pixels):
        return self.model(torch.nn.functional.interpolate(pixels.float(), self.size)).sigmoid()

    model, args, _ = predict.load_model(trained, "cpu")
    monkeypatch.setattr(predict.Portable, "forward", without_255)
    with pytest.raises(SystemExit, match=r"squashed by PIL \(0.05 is allowed\): none was written"):
        predict.export(Path("model.pt2"), model, args.image_size, {}, files)
    assert not Path("model.pt2").exists()


def test_an_exported_model_that_fails_is_not_a_full_disk(trained, script, workplace, monkeypatch):
    def broken(file):
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(torch.export, "load", broken)
    with pytest.raises(SystemExit, match=r"error: torch can't export this model: no kernel for this$"):
        script("predict.py", trained, "--export", "model.pt2")


def test_an_onnx_model_gives_the_same_answers(trained, script, folder, capsys):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    run_predict(script, trained, folder / "a.png", folder / "deep", "--export", "model.onnx")
    out = capsys.readouterr().out
    assert float(re.search(r"on 2 images its probabilities differ by (\S+)", out)[1]) <= 1e-3
    session = runtime.InferenceSession("model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["labels.json"])
    assert about["classes"] == ["red", "green", "blue", "white"]
    assert about["thresholds"] == pytest.approx(json.loads((trained / "result.json").read_text())["thresholds"])
    model, args, _ = predict.load_model(trained, "cpu")
    original = predict.Portable(model, args.image_size).eval()
    for shape in ((1, 3, 32, 32), (5, 3, 17, 300), (2, 3, 99, 9)):
        x = torch.randint(256, shape, dtype=torch.uint8)
        with torch.no_grad():
            (p,) = session.run(None, {"pixels": x.numpy()})
            torch.testing.assert_close(torch.tensor(p), original(x), rtol=0, atol=1e-3)


def without(package):
    find = importlib.util.find_spec
    return lambda name, *more: None if name == package else find(name, *more)


def test_an_onnx_model_is_compared_where_onnxruntime_is(trained, script, workplace, capsys, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    model, args, _ = predict.load_model(trained, "cpu")
    convert = predict.to_onnx

    def broken(program, about):
        content, portable = convert(program, about)
        return content, lambda x: portable(x) + 0.002

    monkeypatch.setattr(predict, "to_onnx", broken)
    with pytest.raises(SystemExit, match=r"from the original's \(1e-03 is allowed\).*none was written"):
        predict.export(Path("model.onnx"), model, args.image_size, {}, [])
    assert not list(workplace.iterdir())
    monkeypatch.undo()
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(importlib.util, "find_spec", without("onnxruntime"))
    predict.export(Path("model.onnx"), model, args.image_size, {}, [])
    assert "model.onnx: not compared with the original" in capsys.readouterr().out
    assert Path("model.onnx").stat().st_size > 10**5


def test_what_onnx_needs_is_named(trained, script, workplace, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("onnxscript"))
    with pytest.raises(SystemExit, match=r"error: --export model\.onnx needs the package onnxscript"):
        script("predict.py", trained, "--export", "model.onnx")


def test_a_card_is_loaded_as_a_run_is(mine, script, folder, squares, workplace, capsys):
    run_predict(script, mine, "--card", "first")
    Path("away").mkdir()
    card = Path("first").rename("away/squares | mine")
    assert sorted(os.listdir(card)) == ["README.md", "config.json", "model.safetensors", "script.py"]
    said = []
    for run in (mine, card):
        capsys.readouterr()
        run_predict(script, run, folder, "--csv", "out.csv")
        said.append((capsys.readouterr(), Path("out.csv").read_text()))
    assert said[0] == said[1]
    config, result = (json.loads(path.read_text()) for path in (card / "config.json", mine / "result.json"))
    assert (config["method"], config["backbone"], config["image_size"]) == ("ll-r", "resnet_small", 32)
    assert config["classes"] == ["red", "green", "blue", "white"]
    assert config["thresholds"] == pytest.approx(result["thresholds"])
    assert config["settings"]["lr"] == 3e-3
    weights = torch.load(mine / "best.pt", weights_only=True)["model"]
    stored = common.read_state(card / "model.safetensors")
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
    assert all(str(Path(squares).parent) not in path.read_text() for path in (card / "config.json", card / "README.md"))
    run_predict(script, card, "--card", "again")
    assert json.loads(Path("again/config.json").read_text()) == config
    assert not {"best.pt", "result.json"} & set(os.listdir(card))


def test_a_card_says_what_a_hub_wants_to_know(trained, script, workplace):
    from huggingface_hub import ModelCard

    run_predict(script, trained, "--card", "card")
    text, result = Path("card/README.md").read_text(), json.loads((trained / "result.json").read_text())
    header = ModelCard(text).data
    assert (header.license, header.pipeline_tag) == ("unknown", "image-classification")
    assert {"multi-label", "an", "resnet_small"} <= set(header.tags)
    assert f"val mAP {result['val_mAP']:.2f}, test mAP {result['test_mAP']:.2f}, OF1 " in text
    for name in ("red", "green", "blue", "white"):
        assert f"| {name} | {result['thresholds'][name]:.3f} | {result['test_AP'][name]:.3f} |\n" in text


def test_a_card_is_measured_and_started_from(trained, script, squares, workplace):
    run_predict(script, trained, "--card", "card")
    root, found = ("--data_root", Path(squares).parent, "--workers", 0), sorted(os.listdir("card"))
    measured = script("an.py", "--eval_only", trained, "--workers", 0).split(": ")[-1]
    assert "at tuned thresholds" in measured
    assert script("an.py", "--eval_only", "card", *root).endswith(measured)
    assert sorted(os.listdir("card")) == found
    out = script("an.py", "--dataset", squares, *SMALL, "--init_from", "card", "--epochs", 1, "--lr", 1e-9)
    assert float(re.search(r"test mAP (\S+),", out)[1]) > LEARNT


def test_a_card_without_true_labels_to_measure_with():
    config = {"method": "an", "backbone": "resnet50", "image_size": 448, "thresholds": None, "classes": ["a|b", "c"]}
    text = predict.card(config | {"settings": {"dataset": "x"}}, "mine")
    assert "no true labels to measure with" in text
    assert text.endswith("|---|---|---|\n| a\\|b | - | - |\n| c | - | - |\n")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"probe": [[0.0] * 4] * 2}, "the model's code has changed"),
        ({"probe": "none"}, "can't be built again"),
        ({"classes": ["red"]}, "doesn't fit the model"),
        ({"thresholds": {"red": 0.5}}, "config.json has no threshold for green"),
        ({"thresholds": [0.5]}, "thresholds should be a number for every class"),
    ],
)
def test_a_card_that_was_changed_gives_one_sentence(trained, script, folder, workplace, changes, expected):
    run_predict(script, trained, "--card", "card")
    config = json.loads(Path("card/config.json").read_text()) | changes
    Path("card/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=f"^error: .*{expected}.*$"):
        script("predict.py", "card", folder)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("an.py", ("--linear", "--backbone", "test_efficientnet")),  # timm; the backbone is in best.pt too
        ("pu_mlc.py", ("--lgconv", "--backbone", "resnet18")),  # torchvision; a model of the method's own
        ("lac.py", ("--dim", 16, "--heads", 2, "--ffn", 16, "--project_dim", 8)),
    ],
)
def test_other_models_are_built_again(script, squares, workplace, name, flags, capsys):
    script(name, "--dataset", squares, *SMALL, "--epochs", 1, "--max_steps", 2, "--workers", 0, *flags)
    images = f"{squares}/images/val_0.png", f"{squares}/images/val_1.png"
    run_predict(script, only_run(workplace), *images, "--export", "model.pt2", "--card", "card")
    assert "on 2 images" in capsys.readouterr().out
    assert torch.export.load("model.pt2").module()(torch.zeros(5, 3, 20, 90, dtype=torch.uint8)).shape == (5, 4)


def test_a_model_that_cant_be_exported(trained, script, workplace, monkeypatch):
    monkeypatch.setattr(torch.export, "export", lambda *_, **__: 1 / 0)
    with pytest.raises(SystemExit, match="error: torch can't export this model: division by zero"):
        script("predict.py", trained, "--export", "model.pt2")
    assert not list(workplace.iterdir())


def test_pretrained_weights_are_not_asked_for(trained, workplace, monkeypatch):
    """A run that started from ImageNet's weights carries its own."""
    torch.manual_seed(0)
    args = an.Args(dataset="x", backbone="resnet18", weights="none", image_size=32)
    (workplace / "run").mkdir()
    weights = common.Classifier(args, 2).state_dict()
    best = {"model": weights, "classes": ["a", "b"], "model_class": ["common", "Classifier"]}
    shutil.copy(ROOT / "an.py", workplace / "run/script.py")
    settings = {**json.loads((trained / "config.json").read_text())["settings"], "backbone": "resnet18"}
    config = {"method": "an", "settings": {**settings, "weights": "imagenet", "init_from": "gone"}, "processes": 1}
    (workplace / "run/config.json").write_text(json.dumps(config))
    torch.save(best | {"identity": common.identity("an", config["settings"]), "probe": None}, workplace / "run/best.pt")
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: pytest.fail("a download"))
    model, _, classes = predict.load_model(workplace / "run", "cpu")
    assert classes == ["a", "b"]
    assert torch.equal(model.head.weight, weights["head.weight"])


def test_lists_in_a_config_are_tuples_again(trained, workplace):
    from dataclasses import dataclass

    @dataclass
    class Args(pu_mlc.Args):
        pair: tuple[float, float] = (0.0, 1.0)

    settings = {**common.asdict(Args()), "pair": [0.5, 2.0]}
    (workplace / "config.json").write_text(json.dumps({"method": "x", "processes": 1, "settings": settings}))
    assert common.read_run_settings(Args, workplace).pair == (0.5, 2.0)


def test_photos_are_turned_as_the_camera_held_them(workplace):
    rs = np.random.RandomState(0)
    pixels = rs.randint(0, 256, (40, 60, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    Image.fromarray(pixels).save("turned.png", exif=exif)
    Image.fromarray(np.rot90(pixels, -1)).save("upright.png")
    assert torch.equal(predict.read_pixels("turned.png", 20), predict.read_pixels("upright.png", 20))
    assert not np.array_equal(
        data_prep.decode("turned.png", 20), data_prep.decode("upright.png", 20)
    )  # training: as ever


def test_what_is_transparent_is_white(workplace):
    """Colours that nobody sees decide nothing"""
    rs = np.random.RandomState(0)
    seen, hidden = rs.randint(0, 256, (8, 8, 3)), np.indices((8, 8)).sum(0) % 3 == 0
    for name, under in (("a.png", 0), ("b.png", 200)):
        pixels = np.dstack([np.where(hidden[..., None], under, seen), np.where(hidden, 0, 255)])
        Image.fromarray(pixels.astype(np.uint8)).save(name)
    plain = predict.read_pixels("a.png", 8).numpy()
    assert np.array_equal(plain, np.where(hidden[..., None], 255, seen))
    assert np.array_equal(plain, predict.read_pixels("b.png", 8))
    half = np.full((8, 8, 2), (100, 128), dtype=np.uint8)
    Image.fromarray(half, "LA").save("half.png")
    assert predict.read_pixels("half.png", 8).unique().tolist() == [round(255 + (100 - 255) * 128 / 255)]
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.save("palette.gif", transparency=1)
    assert predict.read_pixels("palette.gif", 8).unique().tolist() == [255]


def test_odd_modes_are_read_or_refused(workplace):
    grey = np.full((8, 8), 200, dtype=np.int32)
    Image.fromarray(grey).save("int.tif")
    Image.fromarray((grey * 256).astype(np.uint16)).save("deep.png")
    Image.fromarray(grey.astype(np.float32)).save("float.tif")
    Image.fromarray(grey * 10**6).save("deeper.tif")
    assert "deeper.tif can't be read: its pixels are not of 8 or 16 bits" in predict.read_pixels("deeper.tif", 4)
    for name in ("int.tif", "deep.png"):
        assert predict.read_pixels(name, 4).unique().tolist() == [200]
    assert "float.tif can't be read" in predict.read_pixels("float.tif", 4)


def test_hidden_files_are_left_alone_and_none_is_taken_twice(workplace):
    (workplace / "photos/.hidden").mkdir(parents=True)
    for name in ("a.png", ".DS_Store", ".hidden/b.png"):
        (workplace / "photos" / name).write_text("")
    assert [path.name for path in predict.find_files(["photos", "photos/a.png"])] == ["a.png"]


def test_links_are_followed_but_not_in_circles(workplace):
    for name in ("photos/deep", "elsewhere"):
        (workplace / name).mkdir(parents=True)
    for name in ("photos/deep/a.png", "elsewhere/b.png"):
        (workplace / name).write_text("")
    for link, target in (("link", "elsewhere"), ("twice", "elsewhere"), ("deep/circle", "photos"), ("self", "photos")):
        (workplace / "photos" / link).symlink_to(workplace / target)
    (workplace / "elsewhere/back").symlink_to(workplace / "photos")
    assert sorted(path.name for path in predict.find_files(["photos"])) == ["a.png", "b.png"]
