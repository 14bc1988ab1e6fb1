"""show.py: pictures of what a run saved"""

import json
import os
import re
import runpy
import shutil
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SMALL, finish, make_its_own, only_run, start, write_dataset
from PIL import Image

import aevlp
import common
import data_prep
import predict
import show

pytestmark = pytest.mark.xdist_group("show")  # one process makes the runs, for all tests here

SHORT = (*SMALL, "--workers", 0)
OF_VLPL = ("--theta", 0.25, "--delta", 0.3)
OF_AEVLP = ("--grid", 2, "--tau", 0.05, "--zeta_global", 0.2, "--delta", 0.25, "--refresh_every", 2)
OF_LAC = ("--dim", 16, "--ffn", 32, "--project_dim", 8, "--ema", 0.9, "--queue", 30)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, squares, tiny_clip):
    """A finished run of every script that leaves something to show, which tests read only"""
    clip = "--clip_model", f"local-dir:{tiny_clip}"
    more = {
        "vlpl": (*clip, *OF_VLPL, "--epochs", 1),
        "aevlp": (*clip, *OF_AEVLP, "--epochs", 4),
        "em_apl": ("--epochs", 3, "--warmup", 1, "--pos_theta", 0.3, "--patience", -1),
        "lac": (*OF_LAC, "--epochs", 1),
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in more}
    for name, flags in more.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folders[name])
            patch.setattr(sys, "argv", [name, "--dataset", squares, *map(str, (*SHORT, *flags))])
            runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    return {name: only_run(folder) for name, folder in folders.items()}


@pytest.fixture
def draw(script, workplace):
    """draw(run, "--images", 7) runs show.py, which ends in the working directory of the run; -> what it printed"""

    def run(*arguments):
        here = os.getcwd()
        try:
            return script("show.py", *arguments)
        finally:
            os.chdir(here)

    return run


@pytest.fixture
def figures(monkeypatch):
    """The figures that show.py saves, {file name: figure}"""
    found, save = {}, data_prep.save_figure

    def keep(figure, path):
        found[path.name] = figure
        save(figure, path)

    monkeypatch.setattr(data_prep, "save_figure", keep)
    return found


def loaded(run):
    """Best model, settings, data, pseudo-labels (N, C)"""
    model, args, _ = predict.load_model(run, CPU)
    return model, args, common.load(args), common.read_state(run / "last.pt").get("labels", {}).get("pseudo")


def brightness(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("L"))


def bars_of(figure):
    """pseudo.png: {row: [(class, score, words, width of the bar)]}"""
    found = {}
    for picture, bars in zip(figure.axes[::2], figure.axes[1::2]):
        if picture.get_title():
            texts = [re.fullmatch(r" (\w+) ([\d.]+)(?: \((.+)\))?", text.get_text()).groups() for text in bars.texts]
            widths = [patch.get_width() for patch in bars.patches]
            row = int(picture.get_title().split(",")[0])
            found[row] = [(name, float(p), words or "", width) for (name, p, words), width in zip(texts, widths)]
    return found


def assert_bars(figure, data, scores, pseudo, rows):
    """Each bar is the class's score, and its words are what became of the label"""
    found, kinds = bars_of(figure), set()
    assert list(found) == list(rows)
    for row, bars in found.items():
        assert [width for *_, width in bars] == sorted((width for *_, width in bars), reverse=True)
        assert {name for name, *_ in bars} == set(data.classes)  # there are but four
        for name, p, words, width in bars:
            c = data.classes.index(name)
            assert width == pytest.approx(scores[row, c].item(), abs=1e-4)
            assert p == pytest.approx(width, abs=0.0051)
            observed, label, there = data.train.z[row, c] == 1, pseudo[row, c], data.train.y[row, c] == 1
            expected = {1: "right" if there else "wrong", 0: "present, not accepted" if there else ""}
            expected |= {-1: "negative, wrong" if there else "negative, right"}
            assert words == ("observed" if observed else expected[label.item()])
            kinds.add(words)
    return kinds


# ---- pseudo.png


def clip_scores(tiny_clip, data, tau):
    """Eq. 1 of VLPL, from the files"""
    args = common.parse(aevlp.Args, {}, ["--clip_model", f"local-dir:{tiny_clip}"])
    clip = common.Clip(args, CPU)
    pixels = data.train.images.from_files(32, Image.Resampling.BICUBIC)[data.train.rows]
    text = clip.encode_text(clip.tokenizer([f"A photo of {name}" for name in data.classes]))
    cosine = clip.encode_image(common.as_pixels(torch.from_numpy(pixels))) @ F.normalize(text, dim=1).T
    return (cosine / tau).softmax(1)


def test_where_clip_made_the_labels_the_bars_are_its_scores(draw, runs, figures, workplace, tiny_clip):
    rows = range(0, 80, 2)
    out = draw(runs["vlpl"], "--images", *rows, "--out", "new/folder")
    assert out.splitlines() == ["new/folder/pseudo.png: 40 training images"]
    assert [path.name for path in (workplace / "new/folder").iterdir()] == ["pseudo.png"]
    _, args, data, pseudo = loaded(runs["vlpl"])
    kinds = assert_bars(figures["pseudo.png"], data, clip_scores(tiny_clip, data, args.tau), pseudo, rows)
    assert {"observed", "right", "wrong", "negative, right", "negative, wrong"} <= kinds
    assert not (workplace / "data").exists()  # the run's embeddings are where it made them


def test_else_they_are_the_best_models_probabilities(draw, runs, figures, monkeypatch):
    monkeypatch.setattr(common, "EVAL_BATCH", 3)  # more images than a batch has
    assert draw(runs["em_apl"], "--out", ".") == "pseudo.png: 8 training images\n"
    model, _, data, pseudo = loaded(runs["em_apl"])
    pixels = data.train.images[data.train.rows]
    rows = [0, 11, 22, 33, 45, 56, 67, 79]  # evenly spaced
    p = predict.probabilities(model, pixels, CPU)
    kinds = assert_bars(figures["pseudo.png"], data, p, pseudo, rows)
    assert {"observed", "negative, right", "right"} <= kinds
    assert "epoch 3" in figures["pseudo.png"].get_suptitle()
    for row, axis in zip(rows, figures["pseudo.png"].axes[::2]):
        assert np.array_equal(axis.images[0].get_array(), pixels[row])
        assert axis.get_title() == f"{row}, observed: {data.classes[data.train.z[row].argmax()]}"


def test_other_images_are_another_picture(draw, runs, workplace):
    for row in (7, 20):
        for name in ("aevlp", "lac"):
            draw(runs[name], "--images", row, "--out", row)
    for name in ("pseudo.png", "views.png", "attention.png"):
        one, other = (brightness(workplace / row / name) for row in ("7", "20"))
        assert min(one.std(), other.std()) > 20  # there is something on it
        assert one.shape != other.shape or (one != other).mean() > 0.05


@pytest.mark.parametrize(
    ("label", "words", "colour"),
    [
        ((True, 0, True), "observed", "lightskyblue"),
        ((False, 1, True), "right", "lightgreen"),
        ((False, 1, False), "wrong", "salmon"),
        ((False, 1, None), "accepted", "gold"),
        ((False, -1, False), "negative, right", "lightgreen"),
        ((False, -1, True), "negative, wrong", "salmon"),
        ((False, -1, None), "negative, accepted", "gold"),
        ((False, 0, True), "present, not accepted", "lightgrey"),
        ((False, 0, False), "", "lightgrey"),
        ((False, 0, None), "", "lightgrey"),
    ],
)
def test_what_became_of_a_label(label, words, colour):
    assert show.verdict(*label) == (words, colour)


def test_bars_are_of_the_highest_and_of_all_that_became_labels():
    scores, z = torch.arange(40, 0, -1) / 40, F.one_hot(torch.tensor(20), 40)
    pseudo = torch.zeros(40, dtype=torch.int8)
    assert show.classes_of_pseudo(scores, pseudo, z) == [0, 1, 2, 3, 4, 20]
    pseudo[:6] = 1
    assert show.classes_of_pseudo(scores, pseudo, z) == [*range(7), 20]  # and the first that was not accepted
    pseudo[35], pseudo[25:30] = 1, -1
    assert show.classes_of_pseudo(scores, pseudo, z) == [*range(8), 20, 25, 26, 27, 35]
    assert show.classes_of_pseudo(scores, torch.ones_like(pseudo), z) == [*range(10), 20]


def test_many_observed_labels_are_counted(runs):
    _, _, data, _ = loaded(runs["vlpl"])
    data.train.z[0], data.train.z[1] = 1, 0
    assert show.observed_names(data, 0) == "red, green, blue and 1 more"
    assert show.observed_names(data, 1) == "nothing"


# ---- views.png


def test_views_are_those_of_the_last_round(draw, runs, figures):
    for row in (5, 20, 41):
        out = draw(runs["aevlp"], "--images", row, 3, "--out", ".")
        assert out.splitlines() == ["pseudo.png: 2 training images", f"views.png: training image {row}"]
        whole, bars, *tiles = figures["views.png"].axes
        _, args, data, pseudo = loaded(runs["aevlp"])
        pixels = data.train.images[data.train.rows[[row]]]
        grown, flip = aevlp.draw_views(80, 2, args.grow, args.seed, 3)  # rounds were in epochs 1 and 3 of 4
        views = aevlp.augment(common.as_pixels(torch.from_numpy(pixels)), grown[[row]], flip[[row]], 2, 32)[0, 1:]
        assert len(tiles) == len(whole.patches) == 4
        for axis, view in zip(tiles, views):
            assert np.allclose(axis.images[0].get_array(), view.permute(1, 2, 0), atol=1e-6)
        assert np.array_equal(whole.images[0].get_array(), pixels[0])

        signs = [{1: "+", -1: "−", 0: ""}[label] for label in pseudo[row].tolist()]
        signs = ["observed" if observed else sign for observed, sign in zip(data.train.z[row], signs)]
        there = [" (present)" if label else "" for label in data.train.y[row]]
        expected = {f"{sign} {name}{true}" for sign, name, true in zip(signs, data.classes, there)}
        assert {tick.get_text() for tick in bars.get_yticklabels()} == expected


def test_the_scores_that_decide_are_those_of_the_method(draw, runs, figures):
    """What is drawn as deciding, put to the script's own rule: a class is accepted at its own score, not above"""
    draw(runs["aevlp"], "--images", 20, "--out", ".")
    _, args, data, _ = loaded(runs["aevlp"])
    bars = figures["views.png"].axes[1]
    drawn = {bars.get_label(): [patch.get_width() for patch in bars] for bars in bars.containers}
    names = [tick.get_text().removesuffix(" (present)").split()[-1] for tick in bars.get_yticklabels()]
    order = [data.classes.index(name) for name in names]
    final, average, s_global = (drawn[name] for name in ("decides +", "decides −", "whole image"))
    assert final == sorted(final, reverse=True)

    loader, clip = common.Loader(args, CPU), common.Clip(args, CPU)
    texts, cache = common.prompts(args.prompt, data.classes), common.EmbeddingCache("here", loader)
    text = aevlp.class_embeddings(clip, texts, cache, args, CPU)
    ((_, _, whole, tiles),) = aevlp.score_views(loader, clip, text, data.train, np.array([20]), 3, args)
    assert s_global == pytest.approx(whole[0, order].tolist())
    nothing = torch.zeros(1, 4)
    z = data.train.z[[20]]
    for place, c in enumerate(order):
        label = lambda zeta: aevlp.damp_pseudo_labels(whole, tiles, z, args.nu, zeta, 4, 0)[0, c]  # noqa: B023
        assert label(final[place] + 1e-6) == 0
        assert label(final[place] - 1e-6) == (z[0, c] != 1)
    refused = aevlp.damp_pseudo_labels(whole, tiles, nothing, args.nu, 2, 0, 0.25)[0]  # one of four
    assert average.index(min(average)) == order.index((refused == -1).nonzero().item())
    assert average == pytest.approx(((whole + tiles.mean(1)) / 2)[0, order].tolist())


def test_views_show_the_highest_and_the_refused():
    final = torch.arange(40, 0, -1) / 40
    pseudo, z = torch.zeros(40, dtype=torch.int8), F.one_hot(torch.tensor(20), 40)
    pseudo[25:], pseudo[3] = -1, 1
    assert show.classes_of_views(final, pseudo, z, 3) == [*range(8), 20, *range(30, 40)]
    assert show.classes_of_views(final, pseudo, z, 32) == list(range(40))


def test_no_damp_has_no_views_to_show(draw, script, squares, workplace):
    script("aevlp.py", "--dataset", squares, *SHORT, "--max_steps", 1, "--no_damp", "--clip_model", "local-dir:nowhere")
    run = only_run(workplace)
    assert draw(run) == f"{run}/pseudo.png: 8 training images\n"


# ---- attention.png


def test_attention_is_that_of_the_best_model(draw, runs, figures):
    assert draw(runs["lac"], "--images", 3, 9, "--out", ".") == "attention.png: training image 3\n"
    model, _, data, _ = loaded(runs["lac"])
    pixels = data.train.images[data.train.rows[[3]]]
    p = predict.probabilities(model, pixels, CPU)[0]
    image, *axes = figures["attention.png"].axes
    assert np.array_equal(image.images[0].get_array(), pixels[0])
    shown = [axis.get_title() for axis in axes]
    observed = data.train.z[3].argmax().item()
    others = [c for c in p.argsort(descending=True).tolist() if c != observed]
    words = lambda c: "observed" if c == observed else "present" if data.train.y[3, c] else "absent"
    assert shown == [f"{data.classes[c]} {p[c]:.2f}\n{words(c)}" for c in (observed, *others)]
    with torch.no_grad():
        maps = model.embeddings(common.as_pixels(torch.from_numpy(pixels)), weights=True)[1][0]
    for axis, c in zip(axes, (observed, *others)):
        heat = axis.images[1].get_array()
        assert heat.shape == (32, 32)
        assert heat.max() == pytest.approx(1)
        top, left = (maps[c] == maps[c].max()).nonzero()[0].tolist()
        cell = 32 // len(maps[c])
        assert heat[top * cell : (top + 1) * cell, left * cell : (left + 1) * cell].max() == pytest.approx(1)


# ---- probabilities.png


def test_probabilities_are_those_of_all_training_labels(draw, trained, figures, monkeypatch):
    monkeypatch.setattr(common, "EVAL_BATCH", 30)  # three batches, the last one short
    out = draw(trained, "--probabilities", "--out", "new")
    model, _, data, _ = loaded(trained)
    p = predict.probabilities(model, data.train.images[data.train.rows], CPU).double().numpy()
    z, y = data.train.z.numpy() == 1, data.train.y.numpy() == 1
    kinds = {"observed positives": z, "hidden positives": y & ~z, "hidden negatives": ~y}
    words = [f"{where.sum()} {name}, mean probability {p[where].mean():.3f}" for name, where in kinds.items()]
    assert out == f"new/probabilities.png: {'; '.join(words)}\n"
    every, most, shares = figures["probabilities.png"].axes
    most_hidden = (y & ~z).sum(0).argmax()
    assert most.get_title() == data.classes[most_hidden]
    for axis, columns in ((every, slice(None)), (most, [most_hidden])):
        drawn = {patch.get_label(): patch.get_data() for patch in axis.patches if ":" in patch.get_label()}
        for name, where in kinds.items():
            own = p[:, columns][where[:, columns]]
            density, edges = np.histogram(own, show.BINS, (0, 1), density=True)
            values, at, _ = drawn[f"{name}: mean {own.mean():.2f}"]
            assert values == pytest.approx(density)
            assert at == pytest.approx(edges)
    share = dict(zip(data.classes, 100 * (y & ~z).sum(0) / (~z).sum(0)))
    names = [tick.get_text() for tick in shares.get_xticklabels()]
    assert [bar.get_height() for bar in shares.patches] == pytest.approx([share[name] for name in names])
    assert sorted(share.values(), reverse=True) == pytest.approx([share[name] for name in names])
    assert os.listdir("new") == ["probabilities.png"]


def test_probabilities_instead_of_the_other_pictures(draw, runs, workplace):
    """Without CLIP, pseudo-labels or a last.pt"""
    shutil.copytree(runs["vlpl"], workplace / "run", ignore=shutil.ignore_patterns("last.pt", "*.png"))
    draw("run", "--probabilities")
    assert [path.name for path in (workplace / "run").glob("*.png")] == ["probabilities.png"]


def test_probabilities_without_true_labels(draw, script, figures, workplace):
    folder = write_dataset(workplace / "own", n_train=20, n_test=4)
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
    for name in ("train_labels", "val_labels", "val_images"):
        (folder / f"formatted_{name}.npy").unlink()
    script("an.py", "--dataset", folder, *SHORT, "--max_steps", 1)
    out = draw(only_run(workplace), "--probabilities")
    assert re.search("16 observed positives, mean .*; 48 unobserved labels, mean", out)
    assert len(figures["probabilities.png"].axes) == 2


# ---- any run


def test_a_copied_script_has_its_pictures_too(draw, script, figures, squares, tiny_clip, workplace):
    """Another name, and another rule, which only the run's own copy of the script has"""
    text = (ROOT / "vlpl.py").read_text()
    text = text.replace(
        "return {name: torch.from_numpy(image @ text.T)", "return {name: torch.from_numpy(-image @ text.T)"
    )
    (workplace / "my_idea.py").write_text(text)
    flags = "--dataset", squares, *SHORT, "--clip_model", f"local-dir:{tiny_clip}", *OF_VLPL, "--max_steps", 1
    script(workplace / "my_idea.py", *flags)
    (workplace / "my_idea.py").unlink()
    run = only_run(workplace)
    draw(run, "--images", 0, 1, 2)
    _, args, data, pseudo = loaded(run)
    q = clip_scores(tiny_clip, data, -args.tau)
    assert (run / "pseudo.png").exists()
    assert_bars(figures["pseudo.png"], data, q, pseudo, range(3))


def test_a_run_without_pictures_says_so(draw, trained, workplace):
    with pytest.raises(
        SystemExit, match=r"error: .* has nothing to show: no pseudo-labels .* no attention .*--probabilities"
    ):
        draw(trained, "--out", "new")
    assert not list(workplace.iterdir())


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([80], " 80: there are training images 0 to 79$"),
        ([3, -1], " -1: there are training images 0 to 79$"),
        ([5] * 201, ": a picture holds up to 200, not 201$"),
    ],
    ids=["80", "-1", "201 rows"],
)
def test_rows_that_are_not_there(draw, runs, workplace, rows, sentence):
    with pytest.raises(SystemExit, match=f"error: --images{sentence}"):
        draw(runs["vlpl"], "--images", *rows, "--out", "new")
    assert not list(workplace.iterdir())


def test_attention_needs_no_last_pt(draw, runs, workplace):
    shutil.copytree(runs["lac"], workplace / "lac")
    (workplace / "lac" / "last.pt").unlink()
    assert "attention.png" in draw("lac")


def test_a_smoke_test_has_fewer_images(draw, script, squares, workplace):
    script("em_apl.py", "--dataset", squares, *SHORT, "--smoke", "--epochs", 1)
    run = only_run(workplace)
    assert "pseudo.png: 8 training images" in draw(run)
    with pytest.raises(SystemExit, match="--images 19: there are training images 0 to 18"):
        draw(run, "--images", 19)


def test_own_images_without_true_labels(draw, script, figures, tiny_clip, workplace):
    folder = write_dataset(workplace / "own", n_train=20, n_test=4)
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
    for name in ("train_labels", "val_labels", "val_images"):
        (folder / f"formatted_{name}.npy").unlink()
    flags = "--dataset", folder, *SHORT, "--clip_model", f"local-dir:{tiny_clip}", "--max_steps", 1
    script("aevlp.py", *flags, *OF_AEVLP, "--positives", 2)
    draw(only_run(workplace))
    words = {words for bars in bars_of(figures["pseudo.png"]).values() for _, _, words, _ in bars}
    assert words == {"observed", "accepted", "negative, accepted", ""}
    assert not any("there" in tick.get_text() for tick in figures["views.png"].axes[1].get_yticklabels())


def test_paths_are_those_of_the_run(draw, script, tiny_clip, workplace, monkeypatch):
    """Started and shown from different folders: data, embeddings and CLIP are found, and nothing is made twice"""
    began, here = workplace / "began", workplace / "here"
    here.mkdir()
    write_dataset(began / "data" / "squares", n_train=20, n_test=4)
    shutil.copytree(tiny_clip, began / "clip")
    flags = "--dataset", "squares", *SHORT, "--clip_model", "local-dir:clip", "--max_steps", 1
    monkeypatch.chdir(began)
    script("vlpl.py", *flags)
    monkeypatch.chdir(here)
    command = ROOT / "show.py", "../began/runs/" + only_run(began).name, "--out", "pictures"
    out = finish(start(*command, cwd=here))
    assert out == "pictures/pseudo.png: 8 training images\n"  # and nothing was embedded
    assert [path.relative_to(here).as_posix() for path in here.rglob("*.*")] == ["pictures/pseudo.png"]

    shutil.move(began / "data", workplace / "elsewhere")
    run = only_run(began)
    with pytest.raises(SystemExit, match=r"data/squares not found: pass .* as --data_root"):
        draw(run)
    draw(run, "--data_root", "../elsewhere")
    assert (run / "pseudo.png").exists()

    np.save(workplace / "elsewhere/squares/formatted_train_images.npy", np.array([f"train_{i}.png" for i in range(10)]))
    labels = workplace / "elsewhere/squares/formatted_train_labels.npy"
    np.save(labels, np.load(labels)[:10])
    with pytest.raises(SystemExit, match="training images or classes of squares are not those of"):
        draw(run, "--data_root", workplace / "elsewhere")


def test_a_clip_that_is_gone_is_not_made_anew(draw, script, squares, tiny_clip, workplace):
    shutil.copytree(tiny_clip, workplace / "clip")
    flags = "--dataset", squares, *SHORT, "--clip_model", f"local-dir:{workplace / 'clip'}", "--max_steps", 1
    script("vlpl.py", *flags)
    run = only_run(workplace)
    shutil.rmtree(workplace / "clip")
    with pytest.raises(SystemExit, match=r"no open_clip_config\.json"):
        draw(run)
    config = json.loads((run / "config.json").read_text())
    config["settings"] |= {"dataset": "scenes", "clip_model": "scenes"}
    (run / "config.json").write_text(json.dumps(config))
    make_its_own(run)
    with pytest.raises(SystemExit, match="data/scenes not found"):
        draw(run)
    assert [path.name for path in (workplace / "data").iterdir()] == ["embeddings"]
