"""Your own images: settings that suit them, one known label each and nothing more, and how long it takes."""

import json
import math
import re
from importlib import import_module

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, metrics, only_run, start, write_dataset

import common
import data_prep

SCRIPTS = ["an", "baselines", "em_apl", "role", "ll", "vlpl", "aevlp", "pu_mlc"]


@pytest.fixture(scope="module")
def known_only(tmp_path_factory):
    """--dataset of the squares with one known label per training image and no full ones but the test's"""
    folder = write_dataset(tmp_path_factory.mktemp("own") / "own")
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", data_prep.draw_single_positives(y))
    (folder / "formatted_train_labels.npy").unlink()
    return str(folder)


# ---- settings


@pytest.mark.parametrize("name", SCRIPTS)
def test_linear_and_a_cpu_have_settings_of_their_own(name):
    script = import_module(name)
    parse = lambda words: common.parse(script.Args, script.PRESETS, words.split())
    linear = script.PRESETS["--linear"]
    for words in ("--dataset voc --linear", "--dataset coco --linear", "--dataset pets --device cpu"):
        args = parse(words)
        assert {key: getattr(args, key) for key in linear} == linear
        assert args.linear
    assert parse("--dataset voc --linear --lr 0.5").lr == 0.5  # the command line wins
    small = parse("--dataset pets --device cpu")
    assert (small.backbone, small.image_size) == ("tf_efficientnet_lite0", 224)
    assert getattr(small, "clip_model", "ViT-B-32") == "ViT-B-32"
    paper = script.Args(dataset="pets", device="cuda")
    assert common.preset_settings(script.Args, script.PRESETS, paper) == script.Args(dataset="pets")  # VOC's


def test_who_chooses_the_model_keeps_the_rest_of_the_defaults(capsys):
    an = import_module("an")
    parse = lambda words: common.parse(an.Args, an.PRESETS, words.split())
    for words in ("--no_linear", "--no-linear", "--backbone resnet18"):
        args = parse(f"--dataset pets --device cpu {words}")
        assert (args.linear, args.image_size, args.lr) == (False, 448, 1e-5)
    args = parse("--dataset pets --device cpu --weights none")  # from scratch: no frozen features, but as small
    assert (args.linear, args.backbone, args.image_size) == (False, "tf_efficientnet_lite0", 224)
    for words in (
        "--linear",
        "--backbone tf_efficientnet_lite0",
        "--weights file.pth",
        "--init_from RUN",
        "--image_size 160",
    ):
        args = parse(f"--dataset pets --device cpu {words}")
        assert (args.linear, args.backbone, args.lr) == (True, "tf_efficientnet_lite0", 1e-4)
    assert args.image_size == 160
    assert not parse("--dataset voc --device cpu").linear
    assert not parse("--dataset scenes --device cpu").linear


def test_one_line_says_what_was_chosen(capsys):
    vlpl = import_module("vlpl")
    common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", "pets", "--device", "cpu", "--epochs", "7"])
    (line,) = capsys.readouterr().out.splitlines()
    start = "settings for pets, which has no preset, on a CPU: --linear --lr 0.0001 --image_size 224 --backbone tf_eff"
    assert line.startswith(start)
    assert line.endswith("--clip_model ViT-B-32")  # --epochs is the user's own
    for dataset in ("voc", "scenes", "cub"):
        common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", dataset, "--device", "cpu"])
        assert not capsys.readouterr().out
    common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", "voc", "--device", "cpu", "--linear"])
    assert capsys.readouterr().out == "settings for voc, on a CPU: --epochs 20 --lr 0.0001\n"
    own = common.parse(vlpl.Args, vlpl.PRESETS, ["--dataset", "pets", "--device", "cpu", "--clip_pretrained", "L14.pt"])
    assert own.clip_model == "ViT-L-14-336"  # the file is of the default model


# ---- one known label each


def test_a_fifth_of_the_known_labels_is_held_out(known_only):
    an = import_module("an")
    data = common.load(an.Args(dataset=known_only, image_size=32))
    train, val = common.split_indices(100)
    assert data.train.rows.tolist() == train.tolist()
    assert data.val.rows.tolist() == val.tolist()
    z = np.load(f"{known_only}/formatted_train_labels_obs.npy")
    assert data.val.y is None
    assert data.train.y is None
    assert data.val.z.tolist() == z[val].tolist()
    assert data.positives_per_image() == 0
    assert common.load(an.Args(dataset=known_only, image_size=32, val_fraction=0.0)).val is None


def test_no_class_loses_its_last_training_image(tmp_path):
    folder = write_dataset(tmp_path / "own")
    z = np.zeros((100, 4), dtype=np.uint8)
    z[:, 0] = 1
    train, val = common.split_indices(100)
    z[val[3]] = [0, 1, 0, 0]  # the only one of its class
    z[val[4:6]] = [0, 0, 1, 0]  # both of its class
    z[train[0]] = [0, 0, 0, 1]
    np.save(folder / "formatted_train_labels_obs.npy", z)
    (folder / "formatted_train_labels.npy").unlink()
    data = common.load(import_module("an").Args(dataset=str(folder), image_size=32))
    assert data.train.z.any(0).all()
    assert sorted([*data.train.rows, *data.val.rows]) == list(range(100))
    assert set(val) - set(data.val.rows) == set(val[3:6])
    assert data.train.z.tolist() == z[data.train.rows].tolist()
    assert data.val.z.tolist() == z[data.val.rows].tolist()


def test_known_label_thresholds_by_hand():
    scores = torch.tensor([[0.9, 0.2], [0.8, 0.6], [0.3, 0.7], [0.1, 0.5], [0.6, 0.4]])
    z = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 1], [1, 0]])
    at = lambda recall, n=0.0: [round(t, 4) for t in common.known_label_thresholds(scores, z, recall, n).tolist()]
    assert at(1) == [0.3, 0.5]
    assert at(0.75) == [0.6, 0.5]
    assert at(0.51) == [0.6, 0.5]  # 3 of 4, for 2 are too few
    assert at(0.5) == [0.8, 0.5]
    assert at(0) == [0.9, 0.5]
    none = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 0], [1, 0]])
    assert common.known_label_thresholds(scores, none, 0.5).tolist() == pytest.approx([0.8, 0.8])  # that of all classes
    # labels given per image: 0.9 0.5 -> (1 + 3) / 5; 0.8 -> 1.0; 0.6 -> 1.2; 0.3 -> 1.4
    assert at(0, 1.2) == [0.6, 0.5]
    assert at(0, 1.3) == [0.6, 0.5]
    assert at(0, 5) == [0.3, 0.5]
    assert at(0, 0.1) == [0.9, 0.5]  # fewer there are not


def test_thresholds_find_the_stated_share():
    rs = np.random.RandomState(0)
    scores, z = torch.from_numpy(rs.rand(500, 7)), torch.from_numpy(rs.rand(500, 7) < 0.2)
    for recall in (0.1, 0.5, 0.7, 0.95):
        found = (scores >= common.known_label_thresholds(scores, z, recall)) & z
        shares = found.sum(0) / z.sum(0)
        assert (shares >= recall).all()
        assert ((found.sum(0) - 1) / z.sum(0) < recall).all()  # no lower than it has to be


def test_classes_that_the_validation_images_lack_are_named(tmp_path, script):
    folder = write_dataset(tmp_path / "own")
    y = np.load(folder / "formatted_val_labels.npy")
    rows = np.flatnonzero(y[:, 1] == 0)[:20]  # class 1, green, is in none of them
    np.save(folder / "formatted_valid_images.npy", np.load(folder / "formatted_val_images.npy")[rows])
    np.save(folder / "formatted_valid_labels.npy", y[rows])
    out = script("an.py", "--dataset", folder, *SMALL, "--epochs", 1)
    lacking = "1 classes have no positive in the validation set and count as AP 0, with the median threshold: green"
    assert [line for line in out.splitlines() if "have no positive" in line] == [lacking]
    thresholds = json.loads((only_run(tmp_path) / "result.json").read_text())["thresholds"]
    assert thresholds["green"] == sorted(thresholds[name] for name in ("red", "blue", "white"))[1]


def test_a_run_with_known_labels_alone(known_only, script, workplace):
    out = script("an.py", "--dataset", known_only, *SMALL, "--epochs", 4, "--recall", 0.6)
    assert "20 training images are held out, the mAP of their known labels chooses the epoch" in out
    assert "each finds 60 % of its class's known labels" in out
    run = only_run(workplace)
    rows, result = metrics(run), json.loads((run / "result.json").read_text())
    chosen = max(rows, key=lambda row: float(row["val_known_mAP"]))
    assert result["best_epoch"] == int(chosen["epoch"])
    assert result["val_known_mAP"] == float(chosen["val_known_mAP"])
    assert result["val_mAP"] is None
    assert "val_mAP" not in rows[0]
    an = import_module("an")
    args = common.parse(an.Args, an.PRESETS, ["--eval_only", str(run)])
    data = common.load(args)
    model = common.Classifier(args, 4)
    checkpoint = common.load_weights(model, run / "best.pt")
    pixels = common.as_pixels(torch.from_numpy(data.val.images[data.val.rows]))
    with torch.no_grad():
        p = model.eval()(pixels).sigmoid()
    for c, name in enumerate(data.classes):
        own = sorted((p[data.val.z[:, c] == 1, c]).tolist(), reverse=True)
        assert checkpoint["thresholds"][name] == pytest.approx(own[math.ceil(0.6 * len(own) - 1e-9) - 1], abs=1e-4)
    assert result["thresholds"] == checkpoint["thresholds"]
    given = (p.numpy() >= list(result["thresholds"].values())).sum() / 20
    assert result["labels_per_image"] == pytest.approx(given)
    out = script("an.py", "--eval_only", run, "--recall", 0.9)  # other thresholds, without training
    assert f"val known mAP {result['val_known_mAP']:.2f}" in out
    other = json.loads((run / "result.json").read_text())
    assert "each finds 90 % of its class's known labels" in out
    assert all(other["thresholds"][name] <= result["thresholds"][name] for name in data.classes)
    assert other["labels_per_image"] > result["labels_per_image"]
    assert {**other, "thresholds": 0, "labels_per_image": 0} == {**result, "thresholds": 0, "labels_per_image": 0}
    (run / "result.json").unlink()
    assert "the run is unfinished: these thresholds are not kept" in script("an.py", "--eval_only", run)
    data_prep.write_json(run / "result.json", other)
    with pytest.raises(SystemExit):
        script("predict.py", run, f"{known_only}/images/val_0.png")


@pytest.mark.parametrize("name", ["em_apl", "pu_mlc", "lac"])
def test_other_methods_with_known_labels_alone(name, known_only, script, workplace):
    small = ("--dim", 16, "--ffn", 16, "--project_dim", 8, "--ema", 0.9) if name == "lac" else ()
    script(f"{name}.py", "--dataset", known_only, *SMALL, *small, "--smoke")
    result = json.loads((only_run(workplace) / "result.json").read_text())
    assert result["val_known_mAP"] > 0
    assert result["thresholds"]


def test_role_needs_the_number_of_positives(known_only, script):
    with pytest.raises(SystemExit, match="ROLE needs the expected number of --positives"):
        script("role.py", "--dataset", known_only, *SMALL)


def write_known(folder, z):
    """The squares with these known labels alone"""
    write_dataset(folder)
    np.save(folder / "formatted_train_labels_obs.npy", z)
    (folder / "formatted_train_labels.npy").unlink()
    return str(folder)


def test_images_without_a_known_label_judge_nothing(tmp_path, script, workplace):
    z = np.zeros((100, 4), dtype=np.uint8)
    train, val = common.split_indices(100)
    z[train[:12]] = np.eye(4, dtype=np.uint8).repeat(3, 0)
    data = common.load(import_module("an").Args(dataset=write_known(tmp_path / "none", z), image_size=32))
    assert data.val is None
    assert len(data.train) == 100
    z[val[:4]] = np.eye(4, dtype=np.uint8)
    own = write_known(tmp_path / "four", z)
    data = common.load(import_module("an").Args(dataset=own, image_size=32))
    assert data.val.rows.tolist() == val[:4].tolist()
    script("an.py", "--dataset", own, *SMALL, "--epochs", 1)
    script("an.py", "--dataset", own, *SMALL, "--smoke", "--out", "smoke")


def test_known_labels_are_too_noisy_for_early_stopping(known_only, script, workplace):
    """em_apl.py's patience of 0 would end it before its first pseudo-labels"""
    script("em_apl.py", "--dataset", known_only, *SMALL, "--epochs", 7, "--warmup", 4, "--lr", 3e-2)
    rows = metrics(only_run(workplace))
    assert len(rows) == 7
    assert float(rows[-1]["pseudo_negatives_per_image"]) > 0
    scores = [float(row["val_known_mAP"]) for row in rows]
    assert any(later <= max(scores[:i]) for i, later in enumerate(scores) if i)  # else it shows nothing


# ---- advice


def test_a_curve_that_still_rises_is_told(squares, script, workplace):
    slow = ("--lr", 1e-5, "--epochs", 4, "--seed", 1)
    out = script("an.py", "--dataset", squares, *SMALL, *slow)
    best = json.loads((only_run(workplace) / "result.json").read_text())["best_epoch"]
    assert ("was still rising in the last epoch: try more --epochs or a higher --lr" in out) == (best == 4)
    assert ("the first epoch was the best: try a lower --lr" in out) == (best == 1)


@pytest.mark.parametrize(
    ("best", "epochs", "more", "note"),
    [
        (4, 4, {}, "val_mAP was still rising in the last epoch"),
        (1, 4, {}, "the first epoch was the best"),
        (3, 4, {}, ""),
        (4, 4, {"smoke": True}, ""),
        (4, 4, {"max_steps": 9}, ""),
        (2, 2, {}, ""),  # too few to tell
    ],
)
def test_advice(best, epochs, more, note, capsys):
    run = common.Run.__new__(common.Run)  # the rest of a run has no part in it
    run.args = import_module("an").Args(**more)
    run.data = common.Data([], None, common.Split(None, np.arange(3), torch.zeros(3, 2)), None)
    run.best, run.began_at, run.epoch, run.last_epoch = {"epoch": best}, 0, epochs, epochs
    run.advise()
    out = capsys.readouterr().out
    assert note in out
    assert bool(out) == bool(note)


def test_how_long_it_takes(squares, workplace):
    """Without a terminal, after ten seconds of measured steps; a copy whose steps take long"""
    text = (
        (ROOT / "an.py")
        .read_text()
        .replace("    run.backward(loss)", "    time.sleep(4)\n            run.backward(loss)")
    )
    (workplace / "slow.py").write_text("import time\n" + text.replace("import common", "import common", 1))
    process = start(workplace / "slow.py", "--dataset", squares, *SMALL, "--epochs", 10, cwd=workplace)
    for line in process.stdout:
        if found := re.match(r"about (\d+) minutes to go, (\d+) steps", line):
            break
    process.kill()
    process.communicate()
    # 10 epochs of 10 steps of 4 s, and 20 + 100 images to evaluate for 80 to train: 400 s * 1.5
    assert 96 <= int(found[2]) <= 97
    assert 9 <= int(found[1]) <= 14


def test_report_and_card_of_known_labels_alone(known_only, script, workplace):
    for seed in (0, 1):
        script("an.py", "--dataset", known_only, *SMALL, "--epochs", 2, "--seed", seed, "--name", f"s{seed}")
    values = [json.loads((workplace / f"runs/s{n}/result.json").read_text())["val_known_mAP"] for n in (0, 1)]
    out = script("report.py", "runs/s0", "runs/s1")
    assert "val known mAP" in out
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in out
    assert "val mAP" not in out
    with pytest.raises(SystemExit) as end:
        script("predict.py", "runs/s0", "--card", "card")
    assert not end.value.code
    card = (workplace / "card/README.md").read_text()
    assert f"val known mAP {values[0]:.2f}" in card
    assert "chosen by the known labels of held-out images" in card
    with pytest.raises(SystemExit) as end:
        script("predict.py", "card", f"{known_only}/images/val_0.png")
    assert not end.value.code
