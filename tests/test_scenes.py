"""The embedded data set is the same for everyone."""

import hashlib
import json

import numpy as np
import pytest
from conftest import ROOT, finish, only_run, start

import common
import data_prep

pytestmark = pytest.mark.xdist_group("scenes")  # one process makes them, for all tests here


@pytest.fixture(scope="session")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    data_prep.make_scenes(folder)
    return folder


def checksum(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def test_labels_are_those_of_version_1(scenes):
    y, test = (np.load(scenes / f"formatted_{part}_labels.npy") for part in ("train", "val"))
    assert y.shape == (4000, 20)
    assert test.shape == (2000, 20)
    assert checksum(y) == "34ca7ab11ecbce21"
    assert checksum(test) == "eeedf0a0337dd996"
    observed = np.load(scenes / "formatted_train_labels_obs.npy")
    assert np.array_equal(observed, common.draw_single_positives(y))


def test_pixels_are_those_of_the_pinned_pillow_and_matplotlib(scenes):
    assert checksum(np.load(scenes / "cache_train_64.npy")) == "d8ca9d4bb7aefb09"
    assert checksum(np.load(scenes / "cache_val_64.npy")) == "58c68046547759d0"


def test_files_and_cache_agree(scenes):
    names, pixels = np.load(scenes / "formatted_val_images.npy"), np.load(scenes / "cache_val_64.npy", mmap_mode="r")
    for i in (0, 777, 1999):
        assert np.array_equal(common.decode(scenes / "images" / names[i], 64), pixels[i])


def test_scenes_have_the_shape_of_the_field(scenes):
    y = np.load(scenes / "formatted_train_labels.npy").astype(float)
    assert 2 <= y.sum(1).mean() <= 3
    assert y.sum(1).min() == 1
    assert y.sum(0).max() >= 8 * y.sum(0).min()
    assert 100 * y.mean() < 20  # chance
    names = data_prep.CLASSES
    together = lambda a, b: (y[:, names.index(a)] * y[:, names.index(b)]).mean()
    apart = lambda a, b: y[:, names.index(a)].mean() * y[:, names.index(b)].mean()
    assert together("pencil", "telephone") > 2 * apart("pencil", "telephone")
    assert together("moon", "star") > 1.5 * apart("moon", "star")


def test_layouts_are_those_of_version_1():
    """All that is drawn where, in whole numbers: the same under any version of any library"""
    layouts = [[vars(stamp) for stamp in data_prep.scene(part, i)[2]] for part in ("train", "val") for i in range(300)]
    assert hashlib.sha256(json.dumps(layouts).encode()).hexdigest()[:16] == "e9bd2b52cb4a4839"


def test_scenes_are_made_once(scenes):
    before = (scenes / "dataset.json").stat().st_mtime_ns
    data_prep.make_scenes(scenes)
    assert (scenes / "dataset.json").stat().st_mtime_ns == before
    assert not list(scenes.parent.glob(".scenes*"))


def test_scenes_are_made_again_after_a_change_of_version(tmp_path, monkeypatch):
    monkeypatch.setattr(data_prep, "SCENES_SIZE", {"train": 5, "val": 2})
    data_prep.make_scenes(tmp_path / "scenes")
    before = np.load(tmp_path / "scenes/cache_train_64.npy")
    monkeypatch.setattr(data_prep, "SCENES_VERSION", 2)
    data_prep.make_scenes(tmp_path / "scenes")
    assert not np.array_equal(before, np.load(tmp_path / "scenes/cache_train_64.npy"))
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes" / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds no scenes"):
        data_prep.make_scenes(tmp_path / "scenes")
    (tmp_path / "scenes" / "dataset.json").write_text('{"classes": [], "version": 0}')
    with pytest.raises(SystemExit, match="another data set"):
        data_prep.make_scenes(tmp_path / "scenes")
    assert (tmp_path / "scenes" / "thesis.txt").read_text() == "mine"


def test_an_runs_without_arguments_but_a_limit(scenes, tmp_path):
    (tmp_path / "data").symlink_to(scenes.parent)
    out = finish(start(ROOT / "an.py", "--max_steps", 3, cwd=tmp_path))
    assert "best epoch 1" in out
    assert json.loads((only_run(tmp_path) / "config.json").read_text())["settings"]["dataset"] == "scenes"


def test_contact_sheet(scenes, tmp_path):
    (tmp_path / "data").symlink_to(scenes.parent)
    finish(start(ROOT / "data_prep.py", "scenes", "--contact_sheet", "sheet.png", cwd=tmp_path))
    assert (tmp_path / "sheet.png").stat().st_size > 100_000
