"""report.py: numbers worked out again, warnings provoked, the page looked at in a browser"""

import contextlib
import csv
import html
import importlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, finish, make_its_own, metrics, only_run, start, write_dataset
from PIL import Image

import an
import common
import data_prep
import predict
import report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BAD_NAMES = ["</script><script>alert(1)</script>", "50% & more_#1", 'a "quoted" <b>|\\ name$', "white"]


@pytest.fixture(scope="session")
def pseudo(tmp_path_factory, squares):
    """A finished run of another method, with pseudo-labels, which tests read only"""
    folder = tmp_path_factory.mktemp("pseudo")
    flags = ("--dataset", squares, *SMALL, "--epochs", 4, "--warmup", 2, "--patience", -1, "--workers", 0)
    finish(start(ROOT / "em_apl.py", *flags, cwd=folder))
    return only_run(folder)


def copy(source, target, settings=(), result=(), **config):
    """A run like another, but with these settings, results and notes, or of another script"""
    shutil.copytree(source, target)
    if "method" in config:
        shutil.copy(ROOT / f"{config['method']}.py", target / "script.py")
    for name, changes in (("config.json", {"commit": "abc1234", **config}), ("result.json", dict(result))):
        content = json.loads((target / name).read_text()) | changes
        if name == "config.json":
            content["settings"] |= dict(settings)
        (target / name).write_text(json.dumps(content))
    make_its_own(target)
    return target


@pytest.fixture
def runs(workplace, trained, pseudo):
    """Three runs of AN and one of EM + APL"""
    for seed in range(3):
        AP = dict(zip(("red", "green", "blue", "white"), np.random.RandomState(seed).rand(4)))
        result = {"test_mAP": 100 * np.mean(list(AP.values())), "test_AP": AP}
        copy(trained, workplace / f"runs/an-{seed}", {"seed": seed, "patience": -1}, result)
    copy(pseudo, workplace / "runs/em_apl")
    return sorted((workplace / "runs").iterdir())


@pytest.fixture
def compare(script):
    """compare("runs/a", "--csv") -> what report.py printed, its warnings"""

    def run(*arguments):
        with contextlib.redirect_stderr(io.StringIO()) as warnings:
            out = script("report.py", *arguments)
        return out, warnings.getvalue().splitlines()

    return run


def read(run, name="result.json"):
    return json.loads((run / name).read_text())


# ---- tables


def test_numbers_against_numpy(compare, runs):
    out, warnings = compare(*runs, "--csv")
    assert warnings == []
    lines = list(csv.DictReader(io.StringIO(out)))
    results = [read(run) for run in runs[:3]]
    (an,) = (line for line in lines if line["method"] == "an.py" and not line["class"])
    values = [result["test_mAP"] for result in results]
    assert float(an["mean"]) == pytest.approx(np.mean(values))
    assert float(an["std"]) == pytest.approx(np.std(values, ddof=1))
    assert float(an["seconds"]) == pytest.approx(np.mean([result["seconds"] for result in results]))
    with open(runs[0] / "metrics.csv") as file:  # all three are copies of one run
        speeds = [float(row["images_per_s"]) for row in csv.DictReader(file)]
    assert float(an["images_per_s"]) == pytest.approx(np.mean(speeds))
    assert (an["dataset"], an["runs"], an["measured_on"]) == ("squares", "3", "test")
    assert float(an["val_mAP"]) == pytest.approx(results[0]["val_mAP"])
    assert {an[name] for name in ("published", "difference", "comparable")} == {""}  # nobody has one
    (blue,) = (line for line in lines if line["method"] == "an.py" and line["class"] == "blue")
    values = [100 * result["test_AP"]["blue"] for result in results]
    assert float(blue["mean"]) == pytest.approx(np.mean(values))
    assert float(blue["std"]) == pytest.approx(np.std(values, ddof=1))
    (em,) = (line for line in lines if line["method"].startswith("em_apl.py") and not line["class"])
    assert float(em["mean"]) == read(runs[3])["test_mAP"]
    assert em["std"] == ""  # one run has no spread
    assert len(lines) == 2 * (1 + 4)


def test_minutes_are_those_of_training(compare, workplace, trained):
    """Only the run that came first had to embed"""
    for seed, embedding in enumerate((600, 0)):
        copy(trained, workplace / str(seed), {"seed": seed}, {"seconds": 90, "embedding_seconds": embedding})
    assert re.search(r"^an.py +2 .* 1.5 +\d+$", compare("0", "1")[0], re.M)


def test_the_printed_table(compare, runs):
    out, _ = compare(*runs)
    values = [read(run)["test_mAP"] for run in runs[:3]]
    assert f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" in out
    em = read(runs[3])
    shown = rf"^em_apl.py --warmup 2 +1 +{em['test_mAP']:.2f} +{em['val_mAP']:.2f} +[\d.]+ +\d+$"  # one: no spread
    assert re.search(shown, out, re.M)
    assert "published" not in out
    assert "em_apl.py --warmup 2 - AN" in out  # its own flag, not that of the trunk
    for name, AP in read(runs[3])["test_AP"].items():
        base = np.mean([read(run)["test_AP"][name] for run in runs[:3]])
        counts = rf"{em['train_observed'][name]} +{em['test_missed'][name]['positives']}"
        assert re.search(rf"^{name} +{100 * base:.2f} +{re.escape(f'{100 * (AP - base):+.2f}')} +{counts}$", out, re.M)
    cut, line = compare(*runs, "--classes", 2)[0], "2 of 4 classes; --classes 0 shows all"
    assert len(re.findall("^(red|green|blue|white) ", cut, re.M)) == 2
    assert line in cut
    assert report.tex(line) in compare(*runs, "--classes", 2, "--latex")[0]
    for classes in (0, 4, 5):
        assert "shows all" not in compare(*runs, "--classes", classes)[0]
    assert " - AN" not in compare(runs[3])[0]


def test_one_run_has_its_classes_too(compare, squares, trained, workplace):
    """The lowest AP first, with counts from the files and what is missed from the model"""
    copy(trained, workplace / "a")
    out, _ = compare("a")
    model, settings, classes = predict.load_model(trained, "cpu")
    data, result = common.load(settings), read(trained)
    p = predict.probabilities(model, data.test.images[np.arange(len(data.test))], "cpu").numpy()
    y, known = data.test.y.numpy(), data.train.z.sum(0).tolist()
    assert sum(known) == 80
    missed = [(y[:, c] == 1) & (p[:, c] < result["thresholds"][name]) for c, name in enumerate(classes)]
    instead = [np.bincount(np.where(y == 1, -1, p).argmax(1)[rows], minlength=4) for rows in missed]
    table = [line.split(maxsplit=5) for line in re.findall(r"^(?:red|green|blue|white) .*", out, re.M)]
    expected = []
    for name, AP in sorted(result["test_AP"].items(), key=lambda item: item[1]):
        c = classes.index(name)
        share = f"{classes[instead[c].argmax()]} ({100 * instead[c].max() / missed[c].sum():.0f} %)"
        expected.append([name, f"{100 * AP:.2f}", str(known[c]), str(y[:, c].sum()), str(missed[c].sum()), share])
    assert table == expected
    assert report.MISSED in out
    lines = {line["class"]: line for line in csv.DictReader(io.StringIO(compare("a", "--csv")[0]))}
    for name, *_, known, positives, lost, taken_for in expected:
        line = lines[name]
        assert (line["known"], line["positives"], float(line["missed"])) == (known, positives, float(lost))
        assert f"{line['taken_for']} ({100 * float(line['share']):.0f} %)" == taken_for
    assert compare("a", "--html", "page.html")[0] == out
    page = Path("page.html").read_text()
    assert re.findall(r'<tr data-class="(\w+)">', page) == [name for name, *_ in expected]
    assert "The same as a table" not in page


def test_seeds_and_methods_without_an(compare, trained, pseudo, workplace):
    """What the runs of a method miss is put together; of several methods there are only the APs"""
    tell = lambda missed, taken_for, times: dict(positives=9, missed=missed, taken_for=taken_for, times=times)
    names = ("red", "green", "blue", "white")
    for seed, numbers in enumerate([(8, "blue", 5), (4, "green", 2), (3, "green", 2)]):
        missed = dict.fromkeys(names, tell(*numbers)) | {"white": tell(0, None, 0)}
        AP = dict(zip(names, (0.25, 0.5 + seed / 10, 1.0, 0.125)))
        copy(trained, workplace / str(seed), {"seed": seed}, {"test_missed": missed, "test_AP": AP})
    out = compare("0", "1", "2")[0]
    assert re.findall("^(red|green|blue|white) ", out, re.M) == ["white", "red", "green", "blue"]
    assert re.search(r"^green +60.00 ± 10.00 +\d+ +9 +5 +blue \(33 %\)$", out, re.M)
    assert re.search(r"^white +12.50 ± 0.00 +\d+ +9 +0 +-$", out, re.M)
    for name, alpha in (("em", 0.2), ("other", 0.1)):
        copy(pseudo, workplace / name, {"alpha": alpha}, {"test_AP": dict(zip(names, (0.5, alpha, 0.3, 1.0)))})
    out = compare("em", "other", "--html", "page.html")[0]
    (head,) = re.findall("^AP of .*", out, re.M)
    assert re.split("  +", head)[1:] == [
        *re.findall(r"^(em_apl.*?)  ", out, re.M),
        "known in training",
        "test positives",
    ]
    assert re.findall("^(red|green|blue|white) ", out, re.M) == ["green", "blue", "red", "white"]
    assert "AP per class, the lowest first" in Path("page.html").read_text()


def test_a_run_of_an_older_version_has_no_counts(compare, trained, workplace):
    copy(trained, workplace / "a")
    old = {name: v for name, v in read(workplace / "a").items() if name not in ("test_missed", "train_observed")}
    (workplace / "a/result.json").write_text(json.dumps(old))
    out = compare("a", "--html", "page.html")[0]
    assert re.search(r"^AP of +an.py$", out, re.M)
    assert len(re.findall(r"^(red|green|blue|white) +[\d.]+$", out, re.M)) == 4
    assert report.MISSED not in out


def test_without_test_images_it_is_validation(compare, script, workplace):
    folder = write_dataset(workplace / "own", n_train=40, n_test=1)
    for name in ("val_images", "val_labels"):
        (folder / f"formatted_{name}.npy").unlink()
    script("an.py", "--dataset", folder, *SMALL, "--epochs", 2, "--workers", 0)
    run = only_run(workplace)
    result, (model, settings, classes) = read(run), predict.load_model(run, "cpu")
    val = common.load(settings).val
    p = predict.probabilities(model, val.images[val.rows], "cpu")
    AP = dict(zip(classes, common.average_precision(p, val.y).tolist()))
    assert result["val_AP"] == pytest.approx(AP)
    assert {name: n["positives"] for name, n in result["val_missed"].items()} == dict(
        zip(classes, val.y.sum(0).tolist())
    )
    out = compare(run)[0]
    assert re.search(r"^method +runs +val mAP +minutes +images/s$", out, re.M)
    assert re.search(rf"^an.py +1 +{result['val_mAP']:.2f} ", out, re.M)
    assert re.search(r"^AP of +an.py +known in training +val positives +missed\b", out, re.M)
    assert re.findall("^(red|green|blue|white) ", out, re.M) == sorted(AP, key=AP.get)


@pytest.mark.parametrize("n", [1, 7, 300])
def test_missed_positives_against_a_loop(n, monkeypatch):
    monkeypatch.setattr(common, "ROWS", 64)  # several pieces, and a short one
    classes, rs = list("abcde"), np.random.RandomState(n)
    p, y, thresholds = rs.rand(n, 5).astype(np.float32), rs.rand(n, 5) < 0.4, rs.rand(5).astype(np.float32)
    y[:, 4], y[0] = False, True  # a class without positives but in an image that shows all, where there is no other
    expected = {}
    for c, name in enumerate(classes):
        times, missed = dict.fromkeys(classes, 0), 0
        for i in range(n):
            if y[i, c] and p[i, c] < thresholds[c]:
                missed += 1
                others = [d for d in range(5) if not y[i, d]]
                if others:
                    times[classes[max(others, key=lambda d: p[i, d])]] += 1
        most = max(times, key=times.get)
        expected[name] = dict(positives=y[:, c].sum(), missed=missed, taken_for=most if times[most] else None)
        expected[name] |= {"times": times[most]}
    given = torch.from_numpy(p), torch.from_numpy(y.astype(np.uint8)), classes, torch.from_numpy(thresholds)
    assert common.missed_positives(*given) == expected
    assert any(numbers["times"] for numbers in expected.values()) == (n > 1)


def test_variants_are_rows_of_their_own(compare, runs, trained, pseudo, workplace):
    copy(trained, workplace / "more/ls", {"loss": "ls", "l1": 1e-6}, method="baselines")
    copy(pseudo, workplace / "more/em", {"apl": False, "warmup": 5})
    out, _ = compare(*runs, *(workplace / "more").iterdir())
    others = ["baselines.py --loss ls --l1 1e-06", "em_apl.py --warmup 2", "em_apl.py --no_apl"]
    assert re.findall(r"^(\S+\.py.*?)  ", out, re.M) == ["an.py", *sorted(others, key=out.index)]


def test_several_datasets_make_an_overview(compare, runs, workplace, trained):
    copy(trained, workplace / "other", {"dataset": "/data/voc"}, {"test_mAP": 50.0})
    out, _ = compare(*runs, workplace / "other")
    head, an, em, *_ = out.splitlines()
    assert head.split() == ["method", "squares", "voc"]
    assert an.endswith("50.00")
    assert em.split()[0] == "em_apl.py"
    assert em.endswith(" -")


@pytest.mark.parametrize("like_the_papers", [True, False])
def test_published_figures(compare, workplace, trained, like_the_papers):
    like = dict(image_size=448, backbone="resnet50", weights="imagenet", epochs=10, batch_size=8, lr=1e-5)
    like = like if like_the_papers else {}
    copy(trained, workplace / "an", {"dataset": "voc", **like}, {"test_mAP": 60.0})
    for loss in ("focal", "epr"):
        settings = {"dataset": "voc", "loss": loss, **like}
        copy(trained, workplace / loss, settings, {"test_mAP": 60.0}, method="baselines")
    out, _ = compare("an", "focal", "epr")
    mark = "" if like_the_papers else "~"
    assert re.search(rf"^an.py +1 +60.00 +{mark}85.89 +{mark}-25.89 ", out, re.M)
    assert re.search(rf"^baselines.py --loss focal +1 +60.00 +{mark}87.59 +{mark}-27.59 ", out, re.M)
    assert report.FOOTNOTE in out
    assert (report.UNLIKE in out) != like_the_papers
    copy(trained, workplace / "partial", {"dataset": "voc", "known_ratio": 0.5})
    assert report.FOOTNOTE not in compare("partial")[0]  # another task


def test_a_short_run_is_not_compared_with_the_papers(compare, workplace, trained):
    like = dict(
        image_size=448, backbone="resnet50", weights="imagenet", epochs=10, batch_size=8, lr=1e-5, dataset="voc"
    )
    for other in ({"epochs": 1}, {"max_steps": 3}, {"smoke": True}, {"lr": 1.0}):
        copy(trained, workplace / "short", like | other, {"test_mAP": 60.0})
        assert "~85.89" in compare("short")[0]
        shutil.rmtree(workplace / "short")


def test_other_experiments_are_tables_of_their_own(compare, workplace, trained):
    """Frozen features, partial labels and another start are not averaged with the rest"""
    for name, settings in (("a", {}), ("b", {"linear": True}), ("c", {"known_ratio": 0.5}), ("d", {"init_from": "x"})):
        copy(trained, workplace / name, settings, {"test_mAP": 50.0})
    out, _ = compare("a", "b", "c", "d")
    assert "squares  squares --linear  squares --known_ratio 0.5  squares --init_from" in out
    assert len(re.findall(r"^an.py +1 +50.00", out, re.M)) == 4


def test_runs_of_other_settings_are_rows_apart(compare, workplace, trained):
    copy(trained, workplace / "a", {"lr": 0.5, "seed": 1}, {"test_mAP": 50.0})
    copy(trained, workplace / "b", {"lr": 0.25, "seed": 1}, {"test_mAP": 70.0})
    out, warnings = compare("a", "b")
    assert re.search(r"^an.py --lr 0.5 +1 +50.00", out, re.M)
    assert re.search(r"^an.py --lr 0.25 +1 +70.00", out, re.M)
    assert any("differ in lr" in warning for warning in warnings)


def test_the_preset_stays_the_baseline(compare, workplace, trained, pseudo):
    preset = common.preset_settings(an.Args, an.PRESETS, an.Args(dataset="squares", device="cuda"))
    copy(trained, workplace / "a", {"lr": preset.lr}, {"test_mAP": 50.0})
    copy(trained, workplace / "b", {"lr": 0.25, "seed": 1}, {"test_mAP": 70.0})
    copy(pseudo, workplace / "c")
    out, _ = compare("a", "b", "c", "--html", "page.html")
    assert re.search(r"^an.py +1 +50.00", out, re.M)
    assert re.search(r"^an.py --lr 0.25 +1 +70.00", out, re.M)
    assert "an.py --lr 0.25 - AN" in out
    assert "em_apl.py --warmup 2 - AN" in out
    title = "AP per class, difference from an.py"
    assert title in Path("page.html").read_text()
    for runs in (["a"], ["c"]):
        compare(*runs, "--html", "page.html")
        assert title not in Path("page.html").read_text()


def test_a_run_named_twice_counts_once(compare, workplace, trained):
    copy(trained, workplace / "a")
    assert compare("a", "a/", "./a")[0] == compare("a")[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", "[]"), ("metrics.csv", "epoch,val_mAP\n"), ("metrics.csv", "epoch,val_mAP\n1,much\n")],
)
def test_a_damaged_run_is_left_out(compare, workplace, trained, name, text):
    copy(trained, workplace / "a")
    copy(trained, workplace / "b")
    (workplace / "b" / name).write_text(text)
    out, warnings = compare("a", "b")
    assert out == compare("a")[0]
    assert ["left out" in warning for warning in warnings] == [True]


@pytest.mark.parametrize(
    "damage",
    [{"test_missed": {"red": {}}}, {"test_missed": []}, {"train_observed": {"red": "x"}}, {"val_mAP": "high"}],
    ids=str,
)
def test_a_damaged_result_is_left_out(compare, workplace, trained, damage):
    copy(trained, workplace / "a")
    copy(trained, workplace / "b", {"seed": 1}, damage)
    out, warnings = compare("a", "b")
    assert out == compare("a")[0]
    assert ["left out" in warning for warning in warnings] == [True]


def test_many_methods_have_colours_of_their_own():
    styles = [report.colour(i) for i in range(13)]
    assert len(set(styles)) == 13
    assert all(report.COLOURS[0] not in style for style in styles[1:])  # AN's grey is AN's


def test_published_figures_are_the_papers():
    assert set(map(len, report.PUBLISHED.values())) == {len(report.PUBLISHED_ON)} == {4}
    assert report.PUBLISHED["vlpl.py"] == (89.10, 71.45, 49.55, 24.02)
    assert report.PUBLISHED["em_apl.py"] == (89.19, 70.87, 47.59, 21.84)
    assert report.PUBLISHED["baselines.py --loss bce_full"] == (89.42, 76.78, 52.08, 30.90)


@pytest.mark.parametrize("command", report.PUBLISHED)
def test_published_figures_are_of_commands_that_there_are(command):
    name, *flags = shlex.split(command)
    script = importlib.import_module(name.removesuffix(".py"))
    settings = common.parse(script.Args, script.PRESETS, ["--dataset", "voc", *flags])
    preset = common.preset_settings(script.Args, script.PRESETS, script.Args(dataset="voc"))
    run = report.Run(Path(), name, settings, preset, 0.0, {}, 0.0, [], "", {}, "", {})
    assert run.method() + (" --init_from RUN" if settings.init_from else "") == command
    assert run.published() == (report.PUBLISHED[command][0], True)


def test_a_copied_script_is_a_method(compare, runs, trained, workplace):
    """Whatever it is called, wherever it is now; its own settings and presets are those of its copy in the run"""
    text = (ROOT / "an.py").read_text()
    text = text.replace("    lr: common", "    margin: float = 0.5  # of mine\n    lr: common")
    text = text.replace("PRESETS = {", "PRESETS = {'squares': dict(margin=1.0), ")
    for name, margin in (("a", 1.0), ("b", 2.0)):
        copy(trained, workplace / name, {"margin": margin, "patience": -1}, {"test_mAP": 99.0})
        config = read(workplace / name, "config.json") | {"method": "ll-r"}
        (workplace / name / "config.json").write_text(json.dumps(config))
        (workplace / name / "script.py").write_text(text)
        make_its_own(workplace / name)
    out, warnings = compare(*runs, "a", "b", "--html", "page.html")
    assert warnings == []
    assert re.search(r"^ll-r.py +1 +99.00", out, re.M)
    assert re.search(r"^ll-r.py --margin 2 +1 +99.00", out, re.M)
    assert Path("page.html").read_text().count("<img") == 24  # their models too


# ---- warnings


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"lr": 0.5}, {}, "squares: the runs differ in lr: 0.003 (an.py, em_apl.py --warmup 2), 0.5 (an.py)"),
        ({"backbone": "resnet18"}, {}, "the runs differ in backbone: resnet_small (an.py, em"),
        (
            {},
            {"commit": "fed9876"},
            "the runs differ in commit: abc1234 (an.py, em_apl.py --warmup 2), fed9876 (an.py)",
        ),
        ({}, {"processes": 2}, "the runs differ in processes: 1 "),
        ({}, {"device": "A100"}, "the runs differ in device: cpu "),
        ({}, {"commit": "abc1234-dirty"}, "squares: 1 runs with changes that were not committed: runs/new"),
        ({"seed": 1}, {}, "squares: an.py has 2 runs of seed 1"),
        ({"dataset": "/b/squares"}, {}, "/b/squares (an.py)"),
        ({"max_steps": 3}, {}, "squares: 1 runs were cut short by --max_steps or --smoke: runs/new"),
        ({"smoke": True}, {}, "squares: 1 runs were cut short by --max_steps or --smoke: runs/new"),
        ({"workers": 5, "out": "x", "data_root": "y", "device": "cpu", "compile": True}, {}, None),
    ],
)
def test_unfair_comparisons_are_warned_of(compare, runs, trained, workplace, settings, config, expected):
    copy(trained, workplace / "runs/new", {"seed": 9, **settings}, **config)
    _, warnings = compare(*runs, "runs/new")
    assert len(warnings) == (expected is not None)
    assert all(warning.startswith("warning: ") and expected in warning for warning in warnings)


def test_methods_may_have_presets_of_their_own(compare, workplace, trained, pseudo):
    """Without --patience AN never stops early and EM does; said on the command line it is a difference."""
    copy(trained, workplace / "an")
    copy(pseudo, workplace / "em", {"patience": 0})
    assert compare("an", "em")[1] == []
    copy(pseudo, workplace / "patient", {"patience": 3})
    assert ["differ in patience" in line for line in compare("an", "patient")[1]] == [True]


def test_a_dataset_by_name_and_by_path(compare, workplace, trained):
    """One of --data_root is the same wherever that is; elsewhere it is another, whatever its name"""
    names = [("a", "pets", "data"), ("b", "data/pets", "data"), ("c", f"{workplace}/data/pets/", "data")]
    names += [("d", "pets", "/other"), ("e", "/other/pets", "/other"), ("f", "/third/pets", "data")]
    for seed, (name, dataset, root) in enumerate(names):
        copy(trained, workplace / name, {"dataset": dataset, "data_root": root, "seed": seed})
    assert compare("a", "b", "c", "d", "e")[1] == []
    assert compare("a", "f")[1] == ["warning: pets: the runs differ in dataset: pets (an.py), /third/pets (an.py)"]


def test_other_starts_are_warned_of(compare, workplace, trained):
    starts = ("an-s0-20261116-093000", "an-s1-20261117-101500", "an-s2-20261117-101500-2", "vlpl-s1-20261117-101500")
    for seed, init_from in enumerate(starts):
        copy(trained, workplace / str(seed), {"init_from": f"runs/voc-{init_from}", "seed": seed})
    assert compare("0", "1", "2")[1] == []
    (warning,) = compare("0", "1", "2", "3")[1]
    assert warning.endswith(f"differ in init_from: {workplace}/runs/voc-an (an.py), {workplace}/runs/voc-vlpl (an.py)")


def test_a_script_that_changed_between_seeds_and_a_smoke_test_are_told_apart(compare, workplace, trained):
    copy(trained, workplace / "a")
    copy(trained, workplace / "b", {"seed": 1})
    with open(workplace / "b/script.py", "a") as script:
        script.write("# changed\n")
    copy(trained, workplace / "c", {"seed": 2, "smoke": True})
    table, warnings = compare("a", "b", "c")
    assert "squares: the script of an.py changed between its runs: a/script.py, b/script.py" in "".join(warnings)
    assert re.search(r"^an.py --smoke +1 ", table, re.M)
    assert re.search(r"^an.py +2 ", table, re.M)


def test_other_classes_without_test_images_are_seen(compare, workplace, trained):
    for name, classes in (("a", {"cat": 3, "dog": 4}), ("b", {"cat": 3, "cow": 4})):
        copy(trained, workplace / name, {"seed": ord(name)}, {"test_AP": {}, "train_observed": classes})
    assert any("2 in a, 2 in b; the first that differ are dog and cow" in line for line in compare("a", "b")[1])
    compare("a", "--html", "page.html")
    assert '<p class="note">No AP per class: no test or validation images' in Path("page.html").read_text()


def test_other_classes_are_counted_not_listed(compare, workplace, trained):
    AP = dict.fromkeys(map(str, range(300)), 0.5)
    copy(trained, workplace / "a", {}, {"test_AP": AP})
    copy(trained, workplace / "b", {"seed": 1}, {"test_AP": AP | {"more": 0.5}})
    copy(trained, workplace / "c", {"seed": 2}, {"test_AP": {"0": 0.5, "one": 0.5}})
    begin = "warning: squares: the runs differ in classes:"
    assert compare("a", "b")[1] == [f"{begin} 300 in a, 301 in b; the first that differ are none and more"]
    assert compare("a", "c")[1] == [f"{begin} 300 in a, 2 in c; the first that differ are 1 and one"]


@pytest.mark.parametrize("settings", [{"max_steps": 3}, {"smoke": True}])
def test_all_runs_cut_short_are_warned_of_too(compare, workplace, trained, settings):
    copy(trained, workplace / "a", settings)
    assert compare("a")[1] == ["warning: squares: 1 runs were cut short by --max_steps or --smoke: a"]


def test_what_is_no_finished_run_is_left_out(compare, script, runs, workplace, trained):
    (workplace / "runs/grid").mkdir()
    copy(trained, workplace / "runs/young")
    (workplace / "runs/young/result.json").unlink()
    copy(trained, workplace / "runs/foreign")
    (workplace / "runs/foreign/script.py").unlink()
    copy(trained, workplace / "runs/older", {"extinct": 1})
    copy(trained, workplace / "runs/damaged")
    (workplace / "runs/damaged/result.json").write_text("{}")
    left_out = ("grid", "young", "foreign", "older", "damaged")
    out, warnings = compare(*runs, *(f"runs/{name}" for name in left_out))
    assert out == compare(*runs)[0]
    for name, warning, reason in zip(
        left_out,
        warnings,
        (
            "not a run directory",
            "unfinished, resume it with python an.py --resume runs/young",
            "No such file",
            "extinct",
            "test_mAP",
        ),
        strict=True,
    ):
        assert re.match(f"warning: left out: runs/{name}[ /]", warning)
        assert reason in warning
    for arguments, expected in (
        (["runs/young"], "nothing to compare.*unfinished"),
        ([*runs, "--csv", "--latex"], "exclude"),
        ([*runs, "--classes", -1], "--classes -1: at least one"),
        ([*runs, "--seed", -3, "--html", "x"], "--seed -3: at least 0"),
        ([*runs, "--device", "foo", "--html", "x"], "--device foo"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{expected}"):
            script("report.py", *arguments)


# ---- formats and names


@pytest.fixture
def badly_named(workplace, trained, pseudo):
    """Two runs whose classes are called what no one should call a class"""
    for name, source in (("a", trained), ("b", pseudo)):
        result = {what: dict(zip(BAD_NAMES, read(source)[what].values())) for what in ("test_AP", "train_observed")}
        missed = dict(positives=9, missed=5, taken_for=BAD_NAMES[2], times=4)
        result["test_missed"] = dict.fromkeys(BAD_NAMES, missed)
        copy(source, workplace / f"bad/{name}", {"dataset": "/x/<i>&_set"}, result)
    return sorted((workplace / "bad").iterdir())


def test_markdown(compare, badly_named):
    out, _ = compare(*badly_named, "--markdown")
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in out.splitlines() if line.startswith("|")]
    assert [len(line) for line in lines] == [6] * 4 + [5] * 6
    cells = {html.unescape(line[0].strip()).replace("\\|", "|") for line in lines}
    assert cells >= set(BAD_NAMES)
    assert "<script>" not in out


def test_latex(compare, badly_named, workplace):
    copy(badly_named[0], workplace / "again", {"seed": 1})
    out, _ = compare(*badly_named, "again", "--latex")
    assert out.count(r"\begin{tabular}") == out.count(r"\end{tabular}") == 2
    body = [line for line in out.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [5] * 3 + [4] * 5
    assert r"50\% \& more\_\#1" in out
    assert r"\textbackslash{} name\$" in out
    assert r"$\pm$" in out
    assert r"em\_apl.py -{}-warmup 2" in out
    assert not re.search(r"(?<!\\)[%#_]", out)


def test_csv_keeps_names_as_they_are(compare, badly_named):
    lines = list(csv.DictReader(io.StringIO(compare(*badly_named, "--csv")[0])))
    assert {line["class"] for line in lines} == {"", *BAD_NAMES}
    assert {line["taken_for"] for line in lines} == {"", BAD_NAMES[2]}


def test_bad_names_of_one_run(compare, badly_named):
    latex, markdown = (compare(badly_named[0], flag)[0] for flag in ("--latex", "--markdown"))
    assert report.tex(f"{BAD_NAMES[2]} (80 %)") in latex
    assert html.escape(f"{BAD_NAMES[2]} (80 %)", quote=False).replace("|", "\\|") in markdown
    compare(badly_named[0], "--html", "page.html")
    page = Path("page.html").read_text().split('<script id="data"')[0]
    assert not any(name in page for name in BAD_NAMES[:3])
    assert f'<tr data-class="{html.escape(BAD_NAMES[0])}">' in page


# ---- the page


def test_the_page_needs_nothing_else(compare, runs, workplace):
    _, warnings = compare(*runs, "--html", "page.html")
    assert warnings == []
    page = (workplace / "page.html").read_text()
    assert len(page) < 3e6
    assert not re.search(r"https?://|src=\"(?!data:)|@import|url\(", page)
    assert page.count("<img") == 24
    shown, folded = page.split("<summary>More columns</summary>")
    assert shown.count('class="mean"') == 3  # validation mAP of two methods, pseudo-labels of one
    assert shown.count('class="run"') == 3 + 1 + 1
    columns = [{name for row in metrics(run) for name, value in row.items() if value} - {"epoch"} for run in runs]
    assert charts(shown) == ["val_mAP", "pseudo_negatives_precision"]
    assert sorted(charts(page)) == sorted(set.union(*columns))  # every column that has a value
    assert page.count('class="run"') == sum(map(len, columns))  # of every run that has one
    assert page.count('class="mean"') == len(columns[0]) + len(columns[3])
    pseudo = [name.startswith("pseudo_") for name in charts(folded)]
    assert pseudo == sorted(pseudo, reverse=True)
    assert sum(pseudo) > 2
    random, furthest = (re.findall(r'src="(\S+)"', part) for part in page.split("furthest apart"))
    compare(*runs, "--html", "again.html")
    assert (workplace / "again.html").read_text() == page  # chosen by seed
    compare(*runs, "--html", "other.html", "--seed", 1)
    other = re.findall(r'src="(\S+)"', (workplace / "other.html").read_text().split("furthest apart")[0])
    assert set(random) != set(other)
    assert len(furthest) == 12


def charts(page):
    return re.findall("<figcaption>(.*?)</figcaption>", page)


def rewrite(run, **columns):
    """metrics.csv with more columns"""
    times = {"images_per_s": 1, "seconds": 1}
    rows = [row | times | {name: values[i] for name, values in columns.items()} for i, row in enumerate(metrics(run))]
    with open(run / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_column_that_nobody_knows_has_a_chart(compare, workplace, trained):
    for seed in range(2):
        copy(trained, workplace / str(seed), {"seed": seed})
    values = {"margin_<b>": [0.25, 0.5, "", 1.0], "pseudo_odd_precision": [5, 6, 7, 8], "none": [""] * 4}
    rewrite(workplace / "1", **values, broken=["nan", "inf", "-inf", "nan"], half=["inf", 2, 3, "nan"])
    assert compare("0", "1", "--html", "page.html")[1] == []
    page = Path("page.html").read_text()
    shown, folded = page.split("<summary>More columns</summary>")
    assert charts(shown) == ["val_mAP", "pseudo_odd_precision"]
    losses = ["loss", "loss_positive", "loss_negative"]
    assert charts(folded) == [*losses, "test_mAP", "margin_&lt;b&gt;", "half"]
    (figure,) = re.findall(r"<figcaption>margin_&lt;b&gt;.*?</figure>", page)
    lines = re.findall(r'class="(\w+)" style="\S+" d="M(.*?)h0"><title>(.*?)</title>', figure)
    assert [(kind, what) for kind, _, what in lines] == [
        ("run", "an.py: margin_&lt;b&gt;, seed 1"),
        ("mean", "an.py: margin_&lt;b&gt;, mean"),
    ]
    (x1, y1), (x2, y2), (x4, y4) = (map(float, point.split()) for point in lines[0][1].split("L"))
    assert (x4 - x1) / (x2 - x1) == pytest.approx(3, abs=0.01)
    assert (y1 - y4) / (y1 - y2) == pytest.approx(3, abs=0.01)
    assert not re.search(r"\b(nan|inf)\b", "".join(re.findall("<svg.*?</svg>", page)))


def test_a_smoke_test_beside_whole_runs(compare, workplace, trained, pseudo):
    """Whatever it was tested on, the images of the page are the same for all"""
    copy(trained, workplace / "a")
    copy(pseudo, workplace / "b", {"smoke": True})
    (warning,) = compare("a", "b", "--html", "page.html")[1]
    assert "cut short" in warning
    assert "Of 100 random ones" in Path("page.html").read_text()


def test_the_page_without_data_says_so(compare, badly_named, workplace):
    _, warnings = compare(*badly_named, "--html", "page.html")
    assert len(warnings) == 1
    assert "no images of <i>&_set: no data set '/x/<i>&_set'" in warnings[0]
    page = (workplace / "page.html").read_text()
    assert "No images: no data set" in page
    assert "<img" not in page
    before, content, after = re.split(r'<script id="data" type="application/json">(.*?)</script>', page)
    assert list(json.loads(content)["<i>&_set"]) == BAD_NAMES
    for name in ("<i>&_set", *BAD_NAMES[:3]):
        assert name not in before + after
        assert html.escape(name) in before


def test_data_that_are_elsewhere(compare, workplace, trained, squares):
    copy(
        trained, workplace / "b", {"dataset": "squares", "data_root": "."}, working_directory=str(Path(squares).parent)
    )
    assert compare("b", "--html", "page.html")[1] == []  # wherever the report is made
    above = Path(squares).parent
    copy(trained, workplace / "c", {"dataset": f"{above.name}/squares"}, working_directory=str(above.parent))
    assert compare("c", "--html", "page.html")[1] == []
    copy(trained, workplace / "a", {"dataset": "squares", "data_root": "gone"})
    _, (warning,) = compare("a", "--html", "page.html")
    assert "no images of squares: gone/squares not found: pass the folder of the data sets as --data_root" in warning
    assert compare("a", "--html", "page.html", "--data_root", Path(squares).parent)[1] == []
    assert Path("page.html").read_text().count("<img") == 12


PERCENT = [[12.345678] * 3, [50.0], [99.9, 99.95, 100.0], [0.0, 80.0]]
OTHERS = [[0.0] * 3, [0.001, 0.00125], [-3e-8, 2e-8], [-7.0], [123456.0, 123457.0], [0.69, 0.41, 0.4], [1e6, 2e6]]


@pytest.mark.parametrize("values", PERCENT + OTHERS)
def test_the_ticks_of_a_curve_differ(values):
    row = report.Row("an.py", [], "")
    chart = report.line_chart("flat", [(row, "run", "an.py", dict(enumerate(values, 1)))])
    edges, ticks = zip(*re.findall(r'<text x="([\d.]+)" y="(?!206").*?">(.*?)</text>', chart))
    assert len(ticks) == len(set(ticks)) > 2
    assert len(set(edges)) == 1
    assert max(map(len, ticks)) * 6 <= float(edges[0]) < 60  # more would be cut off
    assert max(map(len, ticks)) <= 5 or values in OTHERS
    assert float(ticks[0]) <= min(values) <= max(values) <= float(ticks[-1])
    assert ("stroke-width" in chart) == (len(values) == 1)  # a line of one epoch is a dot that can be seen
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.-]+)", chart)]
    assert max(heights) - min(heights) == 175  # grid lines and curve fill the chart
    curve = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", re.search(r'class="run".*?/path>', chart)[0])]
    if max(values) - min(values) > 0.05 * max(map(abs, values)):
        assert max(curve) - min(curve) > 80  # and what changes can be seen


LOOK = """<!doctype html><iframe src="page.html" style="width:360px;height:800px"></iframe><pre></pre><script>
const frame = document.querySelector("iframe"), found = {};
frame.onload = () => {
  const page = frame.contentDocument, section = page.querySelector("section"), table = section.querySelector("table");
  const first = () => [...table.tBodies[0].rows].map(row => row.cells[0].textContent);
  const shown = selector => [...section.querySelectorAll(selector)].filter(e => e.getClientRects().length);
  const tooWide = () => page.documentElement.scrollWidth - page.documentElement.clientWidth;
  found.too_wide = tooWide();
  found.pictures = [...page.images].filter(image => image.complete && image.naturalWidth).length;
  const numbers = shown(".card i b"), box = element => element.getBoundingClientRect();
  found.numbers = numbers.length;
  found.highest_number = Math.max(...numbers.map(number => box(number).height));
  found.too_far_right = Math.max(...numbers.map(number => box(number).right - box(number.closest(".card")).right));
  found.mAP_too_far_right = box(table.tBodies[0].rows[0].cells[2]).right - box(table.parentElement).right;
  const button = table.querySelectorAll("th button")[2];
  button.click();
  found.down = first();
  found.sorted = button.parentElement.getAttribute("aria-sort");
  button.click();
  found.up = first();
  const select = section.querySelector("select");
  found.options = [...select.options].map(option => option.textContent);
  select.value = found.options[2];
  select.dispatchEvent(new Event("change"));
  found.chosen = shown(".chosen .p").map(line => line.textContent);
  found.bars = shown(".class[data-class]").map(line => line.dataset.class);
  found.cards = shown(".card").map(card => JSON.parse(card.dataset.true));
  found.too_wide_chosen = tooWide();
  select.value = "";
  select.dispatchEvent(new Event("change"));
  found.all_cards = shown(".card").length;
  found.empty = section.querySelector(".chosen").textContent;
  document.querySelector("pre").textContent = JSON.stringify(found);
  console.error("looked at");
};
</script>"""


def look_at(folder):
    """The page in a browser, 360 pixels wide -> what LOOK found, the lines of the console"""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    (folder / "look.html").write_text(LOOK)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--enable-logging=stderr"]
    flags += [f"--user-data-dir={folder}/browser", "--virtual-time-budget=10000", "--dump-dom"]
    command = [browser, *flags, (folder / "look.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (found,) = re.findall(r"<pre>(.*?)</pre>", done.stdout)
    return json.loads(html.unescape(found)), re.findall(r"CONSOLE.*", done.stderr)


def test_the_page_in_a_browser(compare, runs, workplace):
    compare(*runs, "--html", "page.html")
    found, console = look_at(workplace)
    assert len(console) == 1  # LOOK's own: nothing that the page had to complain of
    assert "looked at" in console[0]
    assert found["too_wide"] == found["too_wide_chosen"] == 0
    assert found["pictures"] == 24
    assert found["numbers"] == (workplace / "page.html").read_text().count('class="p ') * 2  # one per method
    assert found["highest_number"] < 15  # one line
    assert found["too_far_right"] <= 0
    assert found["mAP_too_far_right"] <= 0  # without scrolling
    mAP = {"an.py": np.mean([read(run)["test_mAP"] for run in runs[:3]])}
    mAP["em_apl.py --warmup 2"] = read(runs[3])["test_mAP"]
    assert found["down"] == sorted(mAP, key=mAP.get, reverse=True)
    assert found["up"] == sorted(mAP, key=mAP.get)
    assert found["sorted"] == "descending"
    assert found["options"] == ["all classes", "blue", "green", "red", "white"]
    AP = [100 * read(run)["test_AP"]["green"] for run in runs]
    an = f"an.pyAP {np.mean(AP[:3]):.2f} ± {np.std(AP[:3], ddof=1):.2f}"
    assert found["chosen"] == [an, f"em_apl.py --warmup 2AP {AP[3]:.2f}"]
    assert found["bars"] == ["green"]
    assert 0 < len(found["cards"]) < 24
    assert all("green" in names for names in found["cards"])
    assert found["all_cards"] == 24
    assert found["empty"] == ""


def test_bad_names_in_a_browser(compare, badly_named, workplace):
    compare(*badly_named, "--html", "page.html")
    found, console = look_at(workplace)
    assert len(console) == 1
    assert found["options"][1:] == sorted(BAD_NAMES)
    assert found["bars"] == [sorted(BAD_NAMES)[1]]
    assert found["too_wide"] == found["too_wide_chosen"] == 0


def test_the_gallery_shows_each_methods_own_probabilities(compare, runs, squares):
    """Every card again: the image by its true labels, the bars by the models, the mark by the protocol's draw"""
    compare(runs[0], runs[3], "--html", "page.html")
    cards = re.findall(r'<figure class="card".*?</figure>', Path("page.html").read_text(), re.S)
    models = {name: predict.load_model(run, "cpu") for name, run in (("an.py", runs[0]), ("em_apl.py", runs[3]))}
    data = common.load(models["an.py"][1])
    pixels = data.test.images[np.arange(len(data.test))]
    p = {name: predict.probabilities(model, pixels, "cpu") for name, (model, *_) in models.items()}
    observed = common.draw_single_positives(data.test.y)
    order = np.random.RandomState(0).permutation(len(data.test))
    apart = (p["an.py"] - p["em_apl.py"]).abs().mean(1)[order]
    for card, image in zip(cards, [*order[:12], *order[apart.argsort(descending=True)[:12]]], strict=True):
        shown = re.findall(r'class="p (\w+)"><span>(\w+)</span><div role="img" aria-label="(.*?)">(.*?)</div>', card)
        true = {data.classes[c] for c in np.flatnonzero(data.test.y[image])}
        assert {name for kind, name, *_ in shown if kind != "false"} == true
        assert [name for kind, name, *_ in shown if kind == "observed"] == [data.classes[observed[image].argmax()]]
        for _, name, said, numbers in shown:
            c = data.classes.index(name)
            expected = [f"{p[m][image, c]:.2f}" for m in ("an.py", "em_apl.py")]
            assert re.findall(r" ([\d.]+)(?:,|$)", said) == re.findall(r"<b>(.*?)</b>", numbers) == expected


# ---- the grid


@pytest.fixture
def grid(workplace, trained):
    """vlpl.py over tau and theta: two seeds, the cell (0.1, 0.3) missing, precision in the cells of tau 0.01"""
    for tau, theta, seed in ((0.01, 0.3, 0), (0.01, 0.3, 1), (0.01, 0.1, 0), (0.1, 0.1, 0)):
        run = copy(
            trained, workplace / f"grid/{tau}-{theta}-{seed}", dict(tau=tau, theta=theta, seed=seed), method="vlpl"
        )
        best, values = read(run)["best_epoch"], dict.fromkeys(range(1, 5), 0.0)
        mAP = 100 * theta + 5000 * tau + 10 * seed
        rewrite(run, val_mAP=[*(values | {best: mAP}).values()], test_mAP=[*(values | {best: mAP / 2}).values()])
        if tau == 0.01:
            rewrite(run, pseudo_positives_precision=[*(values | {best: 40 + seed}).values()])
    return sorted((workplace / "grid").iterdir())


def test_a_grid_by_hand(compare, grid, workplace):
    out, warnings = compare(*grid, "--grid", "tau", "theta", "--out", "grid.png")
    assert warnings == []
    lines = [re.split("  +", line.strip()) for line in out.splitlines() if line]
    assert lines[:4] == [
        ["validation mAP"],
        ["tau \\ theta", "0.1", "0.3"],
        ["0.01", "60.00", "85.00 ± 7.07"],  # 10 + 50; 30 + 50 and 10 more
        ["0.1", "510.00"],
    ]
    assert lines[4:8] == [["test mAP"], lines[1], ["0.01", "30.00", "42.50 ± 3.54"], ["0.1", "255.00"]]
    assert lines[8:] == [["precision of the pseudo-positives, %"], lines[1], ["0.01", "40.00", "40.50 ± 0.71"], ["0.1"]]
    with Image.open("grid.png") as picture:
        assert np.asarray(picture.convert("L")).std() > 20
    lines = list(csv.DictReader(io.StringIO(compare(*grid, "--grid", "theta", "tau", "--csv")[0])))
    cells = [(line["theta"], line["tau"], line["runs"], line["val_mAP"]) for line in lines]
    assert cells == [("0.1", "0.01", "1", "60.0"), ("0.1", "0.1", "1", "510.0"), ("0.3", "0.01", "2", "85.0")]
    assert [line["pseudo_positives_precision"] for line in lines] == ["40.0", "", "40.5"]
    assert "0.1 & 510.00 &  \\\\" in compare(*grid, "--grid", "tau", "theta", "--latex")[0]
    assert "| 0.1 | 510.00 |  |" in compare(*grid, "--grid", "tau", "theta", "--markdown")[0]


def test_the_picture_of_a_grid(grid, monkeypatch):
    runs, found = list(report.read_runs(grid, pytest.fail)), []
    monkeypatch.setattr(data_prep, "save_figure", lambda figure, _: found.append(figure))
    axes, cells = report.find_cells(runs, ("tau", "theta"), pytest.fail)
    report.draw_grid("x", ("tau", "theta"), axes, report.over_cells(axes, cells))
    mAP, test_mAP, precision = found[0].axes
    shown = lambda axis: {tuple(map(int, text.get_position())): text.get_text() for text in axis.texts}
    assert shown(mAP) == {(0, 0): "60.0", (1, 0): "85.0", (0, 1): "510.0"}  # x, y
    assert shown(test_mAP) == {(0, 0): "30.0", (1, 0): "42.5", (0, 1): "255.0"}
    assert shown(precision) == {(0, 0): "40.0", (1, 0): "40.5"}
    assert [tick.get_text() for tick in mAP.get_xticklabels()] == ["0.1", "0.3"]
    assert [tick.get_text() for tick in mAP.get_yticklabels()] == ["0.01", "0.1"]
    assert (mAP.get_xlabel(), mAP.get_ylabel()) == ("theta", "tau")
    assert np.isnan(mAP.images[0].get_array().filled(np.nan)).tolist() == [[False, False], [False, True]]
    axes, cells = report.find_cells(runs[:3], ("theta",), pytest.fail)
    report.draw_grid("x", ("theta",), axes, report.over_cells(axes, cells))
    line = found[1].axes[0].lines[0]
    assert [*line.get_ydata()] == [60, 85]
    assert [tick.get_text() for tick in found[1].axes[0].get_xticklabels()] == ["0.1", "0.3"]


def test_a_line_over_one_setting(compare, grid, workplace):
    out = compare(*grid[:3], "--grid", "theta", "--out", "line.png")[0]
    lines = [re.split("  +", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["theta", "validation mAP", "test mAP", "precision of the pseudo-positives, %"]
    assert lines[1:] == [["0.1", "60.00", "30.00", "40.00"], ["0.3", "85.00 ± 7.07", "42.50 ± 3.54", "40.50 ± 0.71"]]
    assert Path("line.png").stat().st_size > 5000
    copy(grid[0], workplace / "wide", {"theta": 0.7, "lr": 0.5})
    _, warnings = compare(*grid[:3], "wide", "--grid", "theta")
    assert warnings == ["warning: not only theta but also lr differ over the grid"]
    copy(grid[0], workplace / "again")
    _, warnings = compare(*grid[:3], "again", "--grid", "theta")
    assert warnings == ["warning: the runs with theta 0.1 have seeds 0, 0"]


def test_grids_that_cant_be(compare, grid, workplace, trained):
    copy(trained, workplace / "an")
    copy(grid[0], workplace / "blind")
    rewrite(workplace / "blind", val_mAP=[""] * 4, test_mAP=[""] * 4, pseudo_positives_precision=[""] * 4)
    copy(workplace / "blind", workplace / "blind2", {"theta": 0.5})
    for arguments, expected in (
        ([*grid, "--grid", "rho"], "--grid rho: it is the same in all runs; they differ in tau, theta"),
        (
            [*grid, "--grid", "tau", "queue"],
            "--grid queue: not every run has such a setting; they differ in tau, theta",
        ),
        (["an", grid[0], "--grid", "tau"], "--grid tau: not every run has such a setting; they differ in script"),
        ([grid[1], grid[2], "--grid", "tau"], "--grid tau: it is the same in all runs; they differ in nothing"),
        ([*grid, "--grid", "tau"], "--grid: the runs with tau 0.01 differ in theta too, so they have no mean"),
        (["blind", "blind2", "--grid", "theta"], "--grid: none of these runs has an mAP"),
        (["--grid", "tau", "theta", *grid], "one setting or two, after the runs"),
        ([*grid, "--grid", "tau", "tau"], "--grid tau tau: one setting or two"),
        ([*grid, "--grid", "tau", "theta", "--out", "no/x.png"], "--out no/x.png: there is no such folder"),
        ([*grid, "--out", "x.png"], "--html is for the tables, --out for the picture of --grid"),
        ([*grid, "--grid", "tau", "--html", "x"], "--html is for the tables"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{re.escape(expected)}"):
            compare(*arguments)
