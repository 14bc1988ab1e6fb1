import copy
import ctypes
import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from dataclasses import replace

import bench
import numpy as np
import pytest
import torch
from conftest import ROOT, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score
from torch import nn

import aevlp
import an
import baselines
import common
import data_prep
import em_apl
import lac
import ll
import pu_mlc
import role
import vlpl

# ---- protocol


def test_split_fingerprints():
    for n, n_val, first in (
        (5717, 1143, [5, 6, 11, 15, 22, 23, 29, 34]),
        (82081, 16416, [3, 4, 34, 37, 48, 64, 69, 76]),
        (150000, 30000, [2, 4, 5, 7, 9, 11, 12, 19]),
    ):
        train, val = common.split_indices(n)
        assert val[:8].tolist() == first
        assert len(val) == n_val
        assert train.dtype == val.dtype == np.int64
        assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(n))


def test_single_positive_fingerprint():
    y = np.array([[int(bit) for bit in row] for row in ("10101", "01010", "11111", "00010", "10001", "01101")])
    for labels in (y, y.astype(np.float64), torch.tensor(y)):
        z = common.draw_single_positives(labels)
        assert z.dtype == np.uint8
        assert z.argmax(1).tolist() == [0, 3, 3, 3, 0, 4]
        assert z.sum(1).tolist() == [1] * 6


def test_single_positive_of_an_empty_row_is_empty():
    z = common.draw_single_positives(np.array([[0, 0, 0], [0, 1, 0]]))
    assert z.tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("ratio", [0.1, 0.37, 0.5, 1.0])
def test_known_positives_keep_their_share_and_no_negative(ratio):
    y = (np.random.RandomState(3).random_sample((200, 9)) < 0.3).astype(np.int64)
    z = data_prep.draw_known_positives(y, ratio)
    assert (z <= y).all()
    assert z.sum() == round(ratio * y.sum())
    assert np.array_equal(z, data_prep.draw_known_positives(y, ratio))


# ---- metrics


def sklearn_ap(scores, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of classes without positives and returns 0
        return [average_precision_score(y[:, c], scores[:, c]) for c in range(y.shape[1])]


def test_average_precision_by_hand():
    scores = np.array([[0.9], [0.8], [0.8], [0.1]])
    y = np.array([[1], [0], [1], [1]])
    # thresholds 0.9: precision 1, recall 1/3; 0.8: 2/3, 2/3; 0.1: 3/4, 1
    assert common.average_precision(scores, y).tolist() == pytest.approx([(1 + 2 / 3 + 3 / 4) / 3], abs=1e-12)
    assert common.mean_average_precision(scores, y) == pytest.approx(100 * (1 + 2 / 3 + 3 / 4) / 3)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 5), st.sampled_from([2, 5, 1000]), st.floats(0, 1), st.integers(0, 10**6))
def test_average_precision_equals_scikit_learn(n, classes, levels, share, seed):
    rs = np.random.RandomState(seed)
    scores = rs.randint(-levels, levels, (n, classes)) / 7  # few levels: many ties
    y = (rs.random_sample((n, classes)) < share).astype(np.int64)
    assert common.average_precision(scores, y).tolist() == pytest.approx(sklearn_ap(scores, y), abs=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_average_precision_of_many_rows(dtype):
    rs = np.random.RandomState(0)
    y = (rs.random_sample((20000, 6)) < [0.5, 0.1, 0.01, 0.001, 0, 1]).astype(np.uint8)
    scores = (rs.standard_normal((20000, 6)) + y).astype(dtype)  # float16 ties often
    expected = sklearn_ap(scores.astype(np.float64), y)
    assert common.average_precision(scores, y).tolist() == pytest.approx(expected, abs=1e-9)
    assert common.average_precision(torch.tensor(scores), torch.tensor(y)).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    "change", [lambda t: t[::-1], np.fliplr, np.asfortranarray, lambda t: t.astype(t.dtype.newbyteorder())]
)
def test_metrics_take_any_array(change):
    rs = np.random.RandomState(4)
    scores, y = rs.rand(30, 4), rs.randint(0, 2, (30, 4))
    strange_scores, strange_y = change(scores), change(y)
    strange_scores.setflags(write=False)
    plain_scores, plain_y = strange_scores.astype(float, order="C"), strange_y.astype(int, order="C")
    for metric in (common.average_precision, common.best_f1_thresholds):
        assert torch.equal(metric(strange_scores, strange_y), metric(plain_scores, plain_y))
    assert common.f1_scores(strange_scores, strange_y) == common.f1_scores(plain_scores, plain_y)
    assert np.array_equal(common.draw_single_positives(strange_y), common.draw_single_positives(plain_y))
    labels = torch.tensor(plain_y, dtype=torch.bfloat16, requires_grad=True)
    assert np.array_equal(common.draw_single_positives(labels), common.draw_single_positives(plain_y))


def test_whole_numbers_are_ranked_exactly():
    """As float32 the two scores would tie"""
    assert common.average_precision(np.array([[2**24 + 1], [2**24]]), np.array([[1], [0]])).item() == 1


def test_average_precision_refuses_nan_and_other_shapes():
    with pytest.raises(ValueError, match="NaN"):
        common.average_precision(np.array([[np.nan], [1.0]]), np.array([[1], [0]]))
    with pytest.raises(ValueError, match="should be one"):
        common.average_precision(np.zeros((3, 2)), np.zeros((2, 3)))


def test_f1_by_hand():
    scores = np.array([[0.5, 0.4, 0.1], [0.9, 0.6, 0.2], [0.2, 0.7, 0.3]])
    y = np.array([[1, 1, 0], [0, 1, 0], [0, 1, 0]])
    # guesses: 2, 2, 0; hits: 1, 2, 0; truths: 1, 3, 0. The third class is never guessed and has no positive: 0 and 0
    f1 = common.f1_scores(scores, y)
    cp, cr = (1 / 2 + 1 + 0) / 3, (1 + 2 / 3 + 0) / 3
    expected = dict(OP=75, OR=75, OF1=75, CP=100 * cp, CR=100 * cr, CF1=100 * 2 * cp * cr / (cp + cr))
    assert f1 == pytest.approx(expected)
    assert set(common.f1_scores(scores, y, threshold=2).values()) == {0.0}


def test_f1_against_scikit_learn():
    rs = np.random.RandomState(1)
    scores, y = rs.random_sample((100, 8)), rs.randint(2, size=(100, 8))
    guess = scores >= 0.7
    f1 = common.f1_scores(torch.tensor(scores), torch.tensor(y), threshold=0.7)
    assert f1["OF1"] == pytest.approx(100 * f1_score(y, guess, average="micro"))
    assert f1["CP"] == pytest.approx(100 * precision_score(y, guess, average="macro"))
    assert f1["CR"] == pytest.approx(100 * recall_score(y, guess, average="macro"))


def slow_threshold(scores, truth):
    best, chosen = -1.0, 0.5
    for threshold in sorted(set(scores), reverse=True) if any(truth) else []:
        f1 = f1_score(truth, [score >= threshold for score in scores])
        if f1 > best + 1e-12:
            best, chosen = f1, threshold
    return chosen


@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([2, 5, 1000]))
@settings(max_examples=60, deadline=None)
def test_thresholds_against_a_loop(n, seed, levels):
    """With ties, among scores and among F1s, and classes without a positive or without a negative"""
    rs = np.random.RandomState(seed)
    scores, y = rs.randint(0, levels, (n, 4)) / levels, rs.randint(0, 2, (n, 4))
    y[:, 2], y[:, 3] = 0, 1
    thresholds = common.best_f1_thresholds(torch.tensor(scores), torch.tensor(y))
    slow = [slow_threshold(scores[:, c].tolist(), y[:, c].tolist()) for c in range(4)]
    judged = sorted(slow[c] for c in (0, 1, 3) if y[:, c].any())
    slow = [slow[c] if y[:, c].any() else judged[(len(judged) - 1) // 2] for c in range(4)]
    assert thresholds.tolist() == slow
    assert common.best_f1_thresholds(torch.tensor(scores), torch.zeros(n, 4)).tolist() == [0.5] * 4


def test_thresholds_of_few_positives_are_drawn_to_the_median():
    """Best F1 at 0.2, 0.5, 0.9; a class without a positive; the median's logit is 0. Weights n / (n + 20)"""
    p, y = torch.zeros(100, 4, dtype=torch.float64), torch.zeros(100, 4)
    for c, (threshold, positives) in enumerate(((0.2, 60), (0.5, 2), (0.9, 5))):
        p[:positives, c], y[:positives, c] = threshold, 1
    expected = [1 / (1 + 4 ** (60 / 80)), 0.5, 1 / (1 + 9 ** (-5 / 25)), 0.5]
    assert common.shrunk_thresholds(p, y).tolist() == pytest.approx(expected)
    sure = common.shrunk_thresholds(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2))  # logits without bounds
    assert ((sure >= 0) & (sure <= 1)).all()


def test_metrics_of_many_rows_and_classes(monkeypatch):
    """Classes and rows are taken a few at a time"""
    rs = np.random.RandomState(2)
    scores, y = rs.randint(0, 9, (50, 37)) / 9, rs.randint(0, 2, (50, 37))
    whole = common.f1_scores(scores, y, threshold=0.4)
    monkeypatch.setattr(common, "ROWS", 7)
    assert common.f1_scores(scores, y, threshold=0.4) == whole
    assert common.average_precision(scores, y).tolist() == pytest.approx(sklearn_ap(scores, y), abs=1e-12)
    expected = [slow_threshold(scores[:, c].tolist(), y[:, c].tolist()) for c in range(37)]
    assert common.best_f1_thresholds(scores, y).tolist() == expected


def test_metrics_take_little_memory():
    """All classes at once would take ten times that of the scores and more. In a process of its own: this one may have
    kept freed memory, which would serve again"""
    _, added, scores = bench.in_new_process(bench.table_cost, "metrics", 100_000, 60)
    assert added < 3 * scores


# ---- settings


def test_precedence_is_default_preset_command_line():
    parse = lambda *words: common.parse(an.Args, an.PRESETS, list(words))
    assert parse("--dataset", "voc").lr == 1e-5  # default
    assert parse("--dataset", "cub").lr == 1e-4  # preset
    assert parse("--dataset=cub", "--lr", "0.5").lr == 0.5  # command line
    assert parse().backbone == "resnet_small"  # scenes is the default data set, and has a preset
    assert parse("--dataset", "scenes", "--batch-size", "3").batch_size == 3  # hyphens are fine too


@pytest.mark.parametrize(
    "script", [aevlp, an, baselines, em_apl, lac, ll, pu_mlc, role, vlpl], ids=lambda script: script.__name__
)
def test_presets_hold_only_known_settings_that_differ(script):
    default = script.Args()
    for row, preset in script.PRESETS.items():
        for name, value in preset.items():
            others = [other.get(name, value) for other in script.PRESETS.values() if "--linear" in row]  # it overrides
            assert getattr(default, name) != value or any(other != value for other in others)


def test_coco_with_unlabelled_images_has_the_settings_of_coco():
    coco, more = (common.parse(an.Args, an.PRESETS, ["--dataset", name]) for name in ("coco", "coco_all"))
    assert replace(more, dataset="coco") == coco
    assert coco.batch_size == 16


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--loss", "unknown"], "bce_full"),  # names the choices
        (["--lrr", "1"], "lrr"),
        (["--lr", "0"], "--lr must be above 0, not 0.0"),
        (["--lr", "inf"], "--lr must be a finite number, not inf"),
        (["--l1", "nan"], "--l1 must be a finite number, not nan"),
        (["--l2", "-1"], "--l2 must be at least 0, not -1.0"),
        (["--batch_size", "0"], "--batch_size must be at least 1"),
        (["--epochs", str(2**31)], "--epochs must be at least 1 and below 2^31"),
        (["--patience", "-2"], "--patience must be at least -1"),
        (["--workers", "-2"], "--workers must be at least -1"),
        (["--known_ratio", "1.5"], "--known_ratio must be between 0 and 1, not 1.5"),
        (["--max_steps", "-3"], "--max_steps must be at least 0"),
        (["--seed", str(10**18)], "--seed must be at least 0 and below"),
        (["--resume", "nowhere"], "not a run"),
    ],
)
def test_bad_command_lines(words, expected, capsys):
    with pytest.raises(SystemExit) as problem:
        common.parse(baselines.Args, baselines.PRESETS, words)
    printed = capsys.readouterr()
    assert expected in str(problem.value) + printed.out + printed.err


def test_ranges_of_a_pair_hold_for_both():
    for words in (["0.4", "0.9"], ["0.6", "1.1"]):
        with pytest.raises(SystemExit, match=r"^error: --delta must be between 0.5 and 1, not (0.4|1.1)$"):
            common.parse(lac.Args, lac.PRESETS, ["--delta", *words])


def test_a_foreign_run_directory_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 768}')
    with pytest.raises(SystemExit, match="made by another script or version"):
        common.parse(an.Args, an.PRESETS, ["--resume", str(tmp_path)])


def test_help_shows_the_preset(capsys):
    with pytest.raises(SystemExit) as end:
        common.parse(an.Args, an.PRESETS, ["--dataset", "cub", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--lr FLOAT learning rate (default: 0.0001)" in text
    assert "linear probing: frozen backbone" in text  # trailing comments are the help


# ---- data


def arguments(dataset, **more):
    return an.Args(**{"dataset": str(dataset), "image_size": 32, **more})


@pytest.fixture
def own(tmp_path):
    """A data set that a test may break"""
    return write_dataset(tmp_path / "own", n_train=12, n_test=6)


def test_load_follows_the_protocol(squares):
    data = common.load(arguments(squares))
    y = np.load(f"{squares}/formatted_train_labels.npy")
    train, val = common.split_indices(100)
    assert (len(data.train), len(data.val), len(data.test)) == (80, 20, 100)
    assert np.array_equal(data.train.y, y[train])
    assert np.array_equal(data.val.y, y[val])
    assert np.array_equal(data.train.z, common.draw_single_positives(y)[train])  # drawn before the split
    assert data.val.z is None
    assert data.classes == ["red", "green", "blue", "white"]


def test_authors_files_load_as_they_are(own):
    y = np.load(own / "formatted_train_labels.npy")
    np.save(own / "formatted_train_labels.npy", y.astype(np.float64))
    np.save(own / "formatted_train_labels_obs.npy", common.draw_single_positives(y, seed=5).astype(np.float64))
    (own / "dataset.json").unlink()
    data = common.load(arguments(own))
    assert data.classes == ["class 0", "class 1", "class 2", "class 3"]
    assert np.array_equal(data.train.z, common.draw_single_positives(y, seed=5)[data.train.rows])


def traced_peak(act):
    """-> the result, and the most bytes that Python and numpy held for it"""
    tracemalloc.start()
    try:
        return act(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_names_stay_in_their_array(tmp_path):
    """As Python strings they would take twice the memory of this array. There is no image but in the cache"""
    n, folder = 50_000, tmp_path / "many"
    names, y = np.array([f"{i:06d}.jpg" for i in range(n)]), np.eye(4, dtype=np.int64)[np.arange(n) % 4]
    folder.mkdir()
    np.save(folder / "formatted_train_images.npy", names)
    np.save(folder / "formatted_train_labels.npy", y)
    np.save(folder / "cache_train_1.npy", np.zeros((n, 1, 1, 3), np.uint8))
    (folder / "cache_train_1.json").write_text(json.dumps({"images": data_prep.hash_names(names)}))
    data, peak = traced_peak(lambda: common.load(arguments(folder, image_size=1)))
    labels_and_rows = 8 * n * 3 + 4 * n * 6
    assert peak < names.nbytes + labels_and_rows
    assert data.train.y.dtype == data.train.z.dtype == torch.uint8
    before = hashlib.sha256("\n".join(names[data.train.rows].tolist()).encode()).hexdigest()
    found, peak = traced_peak(lambda: data_prep.hash_names(data.train.names()))
    assert (found, peak < names.nbytes / 2) == (before, True)
    found, peak = traced_peak(data.train.fingerprint)
    assert (found != before, peak < names.nbytes / 2) == (True, True)


@pytest.mark.parametrize("n", [0, 1, 4095, 4096, 4097, 8192])
def test_names_hash_as_their_lines(n):
    names = [f"caf\udce9 {i}" for i in range(n)]
    whole = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()
    assert data_prep.hash_names(names) == data_prep.hash_names(np.array(names, dtype=str)) == whole


def test_a_wrong_label_is_named_by_its_row(tmp_path):
    y = np.zeros((9000, 3))
    y[8191, 2] = 0.5
    np.save(tmp_path / "y.npy", y)
    with pytest.raises(SystemExit, match=r"row 8191, column 2 is 0\.5"):
        data_prep.read_labels(tmp_path / "y.npy", 9000)


def test_known_ratio_takes_the_place_of_single_positives(squares):
    data = common.load(arguments(squares, known_ratio=1.0))
    assert torch.equal(data.train.z, data.train.y)


def test_pixels_are_the_squash_resize_with_and_without_cache(own):
    from PIL import Image

    names = np.load(own / "formatted_train_images.npy")
    expected = np.stack([np.asarray(Image.open(own / "images" / n).convert("RGB").resize((32, 32), 2)) for n in names])
    before = common.load(arguments(own)).train.images
    assert not before.cached
    assert np.array_equal(before[np.arange(12)], expected)
    np.save(own / "cache_train_32.npy", expected)
    (own / "cache_train_32.json").write_text(json.dumps({"images": data_prep.hash_names(names)}))
    after = common.load(arguments(own)).train.images
    assert after.cached
    assert np.array_equal(after[np.array([7, 2])], expected[[7, 2]])


def broken(own, what):
    y = np.load(own / "formatted_train_labels.npy")
    labels, images = own / "formatted_train_labels.npy", own / "formatted_train_images.npy"
    match what:
        case "rows":
            np.save(labels, y[:-1])
            return "11 rows, but its images file has 12"
        case "values":
            y[4, 2] = 7
            np.save(labels, y)
            return "row 4, column 2 is 7"
        case "dimensions":
            np.save(labels, y[0])
            return "should have 2 dimension"
        case "two observed":
            np.save(own / "formatted_train_labels_obs.npy", np.ones_like(y))
            return "more than one observed positive"
        case "false observed":
            z = common.draw_single_positives(y)
            z[3] = 0
            z[3, np.flatnonzero(y[3] == 0)[0]] = 1
            np.save(own / "formatted_train_labels_obs.npy", z)
            return "calls negative (first: row 3)"
        case "classes":
            (own / "dataset.json").write_text(json.dumps({"classes": ["a", "b"], "image_folder": "images"}))
            return "has 2 different class names"
        case "equal classes":
            (own / "dataset.json").write_text(json.dumps({"classes": ["a", "b", "b", "c"], "image_folder": "images"}))
            return "has 3 different class names"
        case "nothing observed":
            np.save(own / "formatted_train_labels_obs.npy", np.zeros_like(y))
            return "no positive label is observed"
        case "test columns":
            np.save(own / "formatted_val_labels.npy", np.zeros((6, 3)))
            return "'val_labels': 3"
        case "missing image":
            (own / "images" / "train_5.png").unlink()
            return "1 of 12 images are missing"
        case "pickle":
            np.save(images, np.array(["a"] * 12, dtype=object), allow_pickle=True)
            return "can't be read"
        case "half a file":
            labels.write_bytes(labels.read_bytes()[:-50])
            return "can't be read"
        case "no labels":
            labels.unlink()
            return "can't be read"
        case "foreign cache":
            np.save(own / "cache_train_32.npy", np.zeros((12, 32, 32, 3), dtype=np.uint8))
            (own / "cache_train_32.json").write_text(json.dumps({"images": "of another set"}))
            return "made for another list of images"
        case "half a cache":
            np.save(own / "cache_train_32.npy", np.zeros((12, 32, 32, 3), dtype=np.uint8))
            with open(own / "cache_train_32.npy", "r+b") as file:
                file.truncate(5000)
            names = np.load(images)
            (own / "cache_train_32.json").write_text(json.dumps({"images": data_prep.hash_names(names)}))
            return "can't be read"
        case "json":
            (own / "dataset.json").write_text("{")
            return "can't be read"


BREAKS = (
    "rows|values|dimensions|two observed|false observed|classes|test columns|missing image|pickle|half a file|no labels"
)


@pytest.mark.parametrize(
    "what", [*BREAKS.split("|"), "foreign cache", "half a cache", "json", "equal classes", "nothing observed"]
)
def test_wrong_data_gives_one_sentence(own, what):
    expected = broken(own, what)
    with pytest.raises(SystemExit, match=r"^error: ") as problem:
        common.load(arguments(own))
    assert expected in str(problem.value)
    assert "\n" not in str(problem.value)


def test_unknown_dataset_names_what_there_is(tmp_path, own):
    with pytest.raises(SystemExit, match=r"no data set 'voc'.*there is own"):
        common.load(arguments("voc", data_root=str(tmp_path)))


# ---- loader


def make_loader(workers):
    return common.Loader(an.Args(workers=workers), torch.device("cpu"))


WORKERS = pytest.mark.parametrize("workers", [0, 1, 4])


@WORKERS
def test_batches_come_in_order(workers):
    """Even where the first ones take longest"""

    def fetch(item):
        time.sleep(0.02 if item % 5 == 0 else 0)
        return np.full(2, item)

    batches = list(make_loader(workers).read(fetch, range(23)))
    assert [batch.tolist() for batch in batches] == [[item] * 2 for item in range(23)]
    assert all(isinstance(batch, torch.Tensor) for batch in batches)


def test_threads_change_no_pixel(squares):
    split = common.load(arguments(squares)).train
    idx = np.random.RandomState(0).permutation(80)
    read = lambda workers, **more: torch.cat(
        list(make_loader(workers).pixels(split, common.in_batches(idx, 7), **more))
    )
    plain = read(0)
    assert torch.equal(plain, torch.from_numpy(split.images[split.rows[idx]]).permute(0, 3, 1, 2).float() / 255)
    assert plain.is_contiguous(memory_format=torch.channels_last)
    views = lambda pixels, row: np.stack([pixels, 255 - pixels, np.full_like(pixels, row % 256)])
    three = read(0, augment=views)
    assert three.shape == (80, 3, 3, 32, 32)
    assert torch.equal(three[:, 0], plain)
    assert torch.equal((255 * three[:, 2, 0, 0, 0]).round().long(), torch.from_numpy(split.rows[idx] % 256))
    for workers in (1, 4):
        assert torch.equal(read(workers), plain)
        assert torch.equal(read(workers, augment=views), three)


def test_threads_read_ahead_but_not_everything():
    """Two batches per thread wait at most, of a list that never ends"""
    loader, begun = make_loader(3), []
    batches = loader.read(lambda item: (begun.append(item), np.zeros(1))[1], itertools.count())
    for n in range(1, 6):
        next(batches)
        assert n <= len(begun) <= n + 2 * 3
    batches.close()


@WORKERS
def test_threads_are_as_many_as_asked_for(workers):
    names, lock = set(), threading.Lock()

    def fetch(_):
        time.sleep(0.01)
        with lock:
            names.add(threading.current_thread().name)
        return np.zeros(1)

    list(make_loader(workers).read(fetch, range(40)))
    assert len(names) == max(1, workers)
    assert (threading.main_thread().name in names) == (workers == 0)


@WORKERS
def test_an_exception_in_a_thread_reaches_the_main_thread(workers):
    """In its place: what comes before it is delivered"""

    def fetch(item):
        if item == 5:
            raise ZeroDivisionError("batch 5")
        return np.full(1, item)

    loader = make_loader(workers)
    batches = loader.read(fetch, range(20))
    assert [next(batches).item() for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError, match="batch 5"):
        next(batches)
    assert [batch.item() for batch in loader.read(lambda item: np.full(1, item), range(9))] == list(range(9))


@WORKERS
def test_an_unreadable_image_is_named(own, workers):
    split = common.load(arguments(own)).train
    path = own / "images" / split.images.names[split.rows[6]]
    path.write_bytes(path.read_bytes()[:-400])
    pixels = make_loader(workers).pixels(split, common.in_batches(np.arange(len(split)), 2))
    for _ in range(3):  # batches before that of image 6
        next(pixels)
    with pytest.raises(SystemExit, match=rf"^error: .*{path.name} can't be read: "):
        next(pixels)


def slow_reader(workers):
    """-> a loader, a fetch that waits for the event, the event, and the items whose fetch has begun"""
    gate, begun = threading.Event(), []

    def fetch(item):
        begun.append(item)
        assert item < workers or gate.wait(20)  # those of the first round come at once
        return np.full(1, item)

    return make_loader(workers), fetch, gate, begun


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("how", ["close", "drop", "raise"])
def test_an_iteration_that_ends_early_cancels_what_is_pending(workers, how):
    loader, fetch, gate, begun = slow_reader(workers)
    batches = loader.read(fetch, range(100))
    assert next(batches).item() == 0
    if how == "close":
        batches.close()
    elif how == "drop":
        del batches
    else:
        with pytest.raises(KeyboardInterrupt):
            batches.throw(KeyboardInterrupt())
    gate.set()
    loader.pool.submit(int).result(20)  # comes after all that was not cancelled
    after = len(begun)
    assert after <= 2 * workers  # of the 2 * workers + 1 that were submitted, those that no thread had begun are gone
    time.sleep(0.05)
    assert len(begun) == after


# ---- model


def classifier(**more):
    torch.manual_seed(0)
    return common.Classifier(an.Args(**{"backbone": "resnet_small", "weights": "none", **more}), 5)


def test_normalisation_follows_the_backbone():
    torchvision, timm = classifier(backbone="resnet18"), classifier(backbone="tf_efficientnet_lite0")
    assert torchvision.mean.flatten().tolist() == pytest.approx([0.485, 0.456, 0.406])
    assert timm.mean.flatten().tolist() == pytest.approx([0.5, 0.5, 0.5])
    x = torch.rand(2, 3, 64, 64)
    torchvision.eval()
    by_hand = torchvision.body(
        (x - torch.tensor(common.IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(common.IMAGENET_STD).view(3, 1, 1)
    )
    torch.testing.assert_close(torchvision.features(x), by_hand)
    assert timm.eval()(x).shape == (2, 5)


def small(args_class, **more):
    return args_class(image_size=32, weights="none", **{"backbone": "resnet_small", **more})


@pytest.mark.parametrize("kind", ["plain", "lgconv", "lac", "timm"])
def test_sync_bn_changes_layers_but_no_weight(kind):
    """The checkpoint loads into the model without it, which gives the same logits"""
    timm = lambda: common.Classifier(small(an.Args, backbone="test_efficientnet"), 3)  # its norms hold activations
    make = {"plain": lambda: common.Classifier(small(an.Args), 3), "timm": timm}
    make |= {"lgconv": lambda: pu_mlc.Classifier(small(pu_mlc.Args, lgconv=True), 3)}
    make |= {"lac": lambda: lac.LabelWise(small(lac.Args, dim=32), 3)}
    model, other = make[kind]().eval(), make[kind]().eval()
    expected = common.probe(model, 32)
    places = common.batch_norms(model)
    kinds = nn.BatchNorm2d, nn.SyncBatchNorm
    before = [sum(isinstance(layer, each) for layer in model.modules()) for each in kinds]
    weights = [id(weight) for weight in model.parameters()]
    common.share_batch_norms(places)
    assert before[1] == sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules()) == 0
    assert before[0] == len(places) == sum(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()) > 0
    assert weights == [id(weight) for weight in model.parameters()]  # those that an optimizer has
    other.load_state_dict(model.state_dict())
    assert torch.equal(common.probe(model, 32), expected)
    assert torch.equal(common.probe(other, 32), expected)
    assert torch.equal(common.probe(copy.deepcopy(model), 32), expected)  # an EMA


def test_sync_bn_leaves_frozen_statistics_alone(tmp_path):
    """lac.py knows its frozen layers by reference"""
    torch.save(common.Classifier(small(an.Args), 3).body.state_dict(), tmp_path / "body.pth")
    model = lac.LabelWise(replace(small(lac.Args, dim=32), weights=str(tmp_path / "body.pth")), 3)
    assert model.frozen_norms
    assert common.batch_norms(model) == []
    assert not any(norm.training for norm in model.frozen_norms)


@pytest.mark.parametrize("name", ["efficientformer_l1", "xcit_nano_12_p8_224", "mvitv2_tiny"])
def test_a_backbone_that_can_not_take_the_images_gives_one_sentence(name):
    """In its forward, with whatever exception, or already when it is made"""
    with pytest.raises(SystemExit, match=f"--backbone {name} doesn't take images of 100 pixels, try another"):
        classifier(backbone=name, image_size=100)


def test_a_backbone_that_takes_the_images_is_left_in_training_mode():
    assert classifier(backbone="tf_efficientnet_lite0", image_size=64).training


def test_a_dollar_is_a_dollar(tmp_path):
    plt = data_prep.pyplot()
    figure = plt.figure()
    figure.text(0, 0, "from $5_ to $10^")  # as mathematics this is an error
    figure.savefig(tmp_path / "figure.png")
    plt.close(figure)
    for script in ROOT.glob("*.py"):
        assert ("matplotlib.pyplot" in script.read_text()) == (script.name == "data_prep.py")


def test_small_backbone_keeps_a_map_of_8():
    body = classifier().body
    assert body[:-2](torch.zeros(2, 3, 64, 64)).shape == (2, 128, 8, 8)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_local_weights(tmp_path, ending):
    import torchvision
    from safetensors.torch import save_file

    torch.manual_seed(1)
    source = torchvision.models.resnet18()  # with its own classifier, as published files have
    path = tmp_path / f"weights{ending}"
    (save_file if ending == ".safetensors" else torch.save)(source.state_dict(), path)
    model = classifier(backbone="resnet18", weights=str(path))
    assert torch.equal(model.body.conv1.weight, source.conv1.weight)
    with pytest.raises(SystemExit, match=r"missing: .*layer1.0.conv1.weight.*unknown|of another shape"):
        classifier(backbone="resnet50", weights=str(path))


def test_wrong_weights_give_one_sentence(tmp_path):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "w.pth")
    (tmp_path / "half.pth").write_bytes((tmp_path / "w.pth").read_bytes()[:200])
    for file, expected in (("none.pth", "no file"), ("w.pth", "doesn't fit"), ("half.pth", "not a readable file")):
        with pytest.raises(SystemExit, match=expected):
            classifier(weights=str(tmp_path / file))
    torch.save(torch.zeros(3), tmp_path / "bare.pth")
    with pytest.raises(SystemExit, match="not a readable file of weights"):
        classifier(weights=str(tmp_path / "bare.pth"))
    with pytest.raises(SystemExit, match="no backbone 'resnet51'"):
        classifier(backbone="resnet51")
    with pytest.raises(SystemExit, match=r"no backbone 'resnet50.foo'.*near it: resnet50"):
        classifier(backbone="resnet50.foo")
    with pytest.raises(SystemExit, match="no ImageNet weights"):
        classifier(weights="imagenet")


def test_weights_that_would_execute_code_are_refused(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "boom"), "w"))

    torch.save({"x": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(SystemExit, match="not a readable file of weights"):
        classifier(weights=str(tmp_path / "bomb.pth"))
    assert not (tmp_path / "boom").exists()


def test_no_network_gives_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    for backbone in ("resnet18", "tf_efficientnet_lite0"):
        with pytest.raises(SystemExit, match=rf"weights of {backbone} can't be downloaded.*--weights FILE"):
            classifier(backbone=backbone, weights="imagenet")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another malloc than glibc's")
def test_a_cpu_does_not_page_in_every_tensor_anew():
    count = (
        "import resource, torch, common\n"
        "common.find_device('cpu')\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): torch.ones(2**24)\n"  # 64 MB: 16,384 pages; how many of the first get new ones is chance
        "start = faults()\n"
        "for _ in range(10): torch.ones(2**24)\n"
        "print(faults() - start)\n"
    )
    done = subprocess.run([sys.executable, "-c", count], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16_384  # 163,840 where every tensor gets new pages
