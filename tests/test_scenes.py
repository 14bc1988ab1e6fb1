"""The embedded data set is the same for everyone."""

import hashlib
import json
import re
import shutil

import numpy as np
import open_clip
import pytest
import torch
from conftest import ROOT, finish, only_run, start
from safetensors.torch import load_file

import an
import common
import data_prep
import scenes

pytestmark = pytest.mark.xdist_group("scenes")  # one process makes them, for all tests here


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "scenes"
    scenes.make(folder)
    return folder


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A folder with seven of the images, which a test may change"""
    monkeypatch.setattr(scenes, "SIZES", {"train": 5, "val": 2})
    scenes.make(tmp_path / "scenes")
    return tmp_path / "scenes"


def checksum(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_labels_are_those_of_version_1(made):
    y, test = (np.load(made / f"formatted_{part}_labels.npy") for part in ("train", "val"))
    assert y.shape == (4000, 20)
    assert test.shape == (2000, 20)
    assert checksum(y) == "34ca7ab11ecbce21"
    assert checksum(test) == "eeedf0a0337dd996"


def test_observed_labels_are_those_of_version_1(made, tmp_path):
    """With and without the files of them that scenes used to come with"""
    assert not list(made.glob("*_obs.npy"))
    y = np.load(made / "formatted_train_labels.npy")
    old = shutil.copytree(made, tmp_path / "scenes", ignore=shutil.ignore_patterns("images"))
    np.save(old / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
    for folder in (made, old):
        z = common.load(an.Args(dataset=str(folder), image_size=64)).train.z.numpy()
        assert checksum(z.astype(np.uint8)) == "1dd75d9f3be2e45a"
        assert np.array_equal(z, common.draw_single_positives(y)[common.split_indices(4000)[0]])


def test_pixels_are_those_of_the_pinned_pillow_and_matplotlib(made):
    assert checksum(np.load(made / "cache_train_64.npy")) == "d8ca9d4bb7aefb09"
    assert checksum(np.load(made / "cache_val_64.npy")) == "58c68046547759d0"


def test_files_and_cache_agree(made):
    names, pixels = np.load(made / "formatted_val_images.npy"), np.load(made / "cache_val_64.npy", mmap_mode="r")
    for i in (0, 777, 1999):
        assert np.array_equal(data_prep.decode(made / "images" / names[i], 64), pixels[i])


def test_scenes_have_the_shape_of_the_field(made):
    y = np.load(made / "formatted_train_labels.npy").astype(float)
    assert 2 <= y.sum(1).mean() <= 3
    assert y.sum(1).min() == 1
    assert y.sum(0).max() >= 8 * y.sum(0).min()
    assert 100 * y.mean() < 20  # chance
    names = scenes.CLASSES
    together = lambda a, b: (y[:, names.index(a)] * y[:, names.index(b)]).mean()
    apart = lambda a, b: y[:, names.index(a)].mean() * y[:, names.index(b)].mean()
    assert together("pencil", "telephone") > 2 * apart("pencil", "telephone")
    assert together("moon", "star") > 1.5 * apart("moon", "star")


def test_layouts_are_those_of_version_1():
    """All that is drawn where, in whole numbers: the same under any version of any library"""
    layouts = [[vars(stamp) for stamp in scenes.scene(part, i)[2]] for part in ("train", "val") for i in range(300)]
    assert hashlib.sha256(json.dumps(layouts).encode()).hexdigest()[:16] == "e9bd2b52cb4a4839"


def test_scenes_are_made_once(made):
    before = (made / "dataset.json").stat().st_mtime_ns
    scenes.make(made)
    assert (made / "dataset.json").stat().st_mtime_ns == before
    assert not list(made.parent.glob(".scenes*"))


def test_a_folder_with_files_of_observed_labels_stays_as_it_is(few):
    for part in ("train", "val"):
        y = np.load(few / f"formatted_{part}_labels.npy")
        np.save(few / f"formatted_{part}_labels_obs.npy", common.draw_single_positives(y))
    before = content(few)
    scenes.make(few)
    assert content(few) == before


def test_scenes_are_made_again_after_a_change_of_version(few, tmp_path, monkeypatch):
    before = np.load(few / "cache_train_64.npy")
    (few / "notes.txt").write_text("mine")
    monkeypatch.setattr(scenes, "VERSION", 2)
    scenes.make(few)
    assert not np.array_equal(before, np.load(few / "cache_train_64.npy"))
    (old,) = tmp_path.glob("scenes-before-*")  # nothing is lost
    assert np.array_equal(before, np.load(old / "cache_train_64.npy"))
    assert (old / "notes.txt").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"scenes", old.name}


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes" / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds no data set of scenes"):
        scenes.make(tmp_path / "scenes")
    for foreign in ('{"classes": [], "version": 0}', '{"name": "pets", "version": 0}', '["scenes"]'):
        (tmp_path / "scenes" / "dataset.json").write_text(foreign)
        with pytest.raises(SystemExit, match="another data set"):
            scenes.make(tmp_path / "scenes")
    assert (tmp_path / "scenes" / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("changes", [{"classes": ["mine"]}, {"note": "mine"}, {"version": 2}, {"version": "0"}])
def test_an_edited_data_set_is_left_alone(few, tmp_path, changes):
    edit(few / "dataset.json", **changes)
    before = content(few)
    with pytest.raises(SystemExit, match=r"^error: .*move it away, or choose another --data_root$"):
        scenes.make(few)
    assert content(few) == before
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


def test_what_appears_meanwhile_is_left_alone(few, tmp_path):
    """Another process may make the same; a user may put something else there"""
    before, description = content(few), json.loads((few / "dataset.json").read_text())
    with scenes.replacing(few, "dataset.json", description) as new:
        (new / "later.txt").write_text("the slower one")
    assert content(few) == before

    def replace_late():
        with scenes.replacing(few, "dataset.json", description):
            edit(few / "dataset.json", note="mine")

    with pytest.raises(SystemExit, match="edited data set"):
        replace_late()
    assert json.loads((few / "dataset.json").read_text())["note"] == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["scenes"]


def test_a_stopped_process_leaves_nothing(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(scenes, "draw_scene", stopped)
    with pytest.raises(KeyboardInterrupt):
        scenes.make(tmp_path / "scenes")
    assert not list(tmp_path.iterdir())


def test_a_damaged_description_or_a_full_disk_is_one_sentence(few, tmp_path, monkeypatch):
    for damaged in (b"{", b"\xff"):
        (few / "dataset.json").write_bytes(damaged)
        with pytest.raises(SystemExit, match=r"dataset.json can't be read"):
            scenes.make(few)
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"scenes can't be written"):
        scenes.make(tmp_path / "file" / "scenes")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scenes.np, "save", full)
    with pytest.raises(SystemExit, match=r"other can't be written: .*No space left"):
        scenes.make(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "scenes"]


def test_scenes_imports_nothing_of_the_project(tmp_path):
    project = {path.stem for path in ROOT.glob("*.py")} - {"scenes"}
    assert {"common", "data_prep"} <= project
    code = f"import scenes, sys; print('imported:', sorted(set(sys.modules) & {project}))"
    assert "imported: []" in finish(start("-c", code, cwd=tmp_path))


def test_an_runs_without_arguments_but_a_limit(made, tmp_path):
    (tmp_path / "data").symlink_to(made.parent)
    out = finish(start(ROOT / "an.py", "--max_steps", 3, cwd=tmp_path))
    assert "best epoch 1" in out
    assert json.loads((only_run(tmp_path) / "config.json").read_text())["settings"]["dataset"] == "scenes"


def test_contact_sheet(made, tmp_path):
    (tmp_path / "data").symlink_to(made.parent)
    finish(start(ROOT / "data_prep.py", "scenes", "--contact_sheet", "sheet.png", cwd=tmp_path))
    assert (tmp_path / "sheet.png").stat().st_size > 100_000


# ---- the CLIP of scenes


def test_captions_say_what_is_there_and_share_no_image_with_the_data_set():
    pixels, caption = scenes.captioned_scene(0, 32)
    assert caption == "a photo of an airplane"
    assert pixels.shape == (64, 64, 3)
    assert scenes.captioned_scene(32 + 2, 32)[1] == "a photo of a cloud"
    assert re.fullmatch(r"a photo of an? \w+ and an? \w+", scenes.captioned_scene(20, 32)[1])
    assert np.array_equal(pixels, scenes.captioned_scene(0, 32)[0])
    for part in ("train", "val"):
        rs, _, layout = scenes.scene(part, 0)
        assert not np.array_equal(pixels, scenes.draw_scene(rs, layout))


def test_the_clip_is_unpacked_once_and_is_the_same_everywhere(tmp_path, monkeypatch):
    state = torch.random.get_rng_state()
    folder = tmp_path / "data" / "scenes_clip"
    scenes.make_clip(folder)
    assert torch.equal(state, torch.random.get_rng_state())
    weights = folder / "open_clip_model.safetensors"
    made, before = weights.stat().st_mtime_ns, weights.read_bytes()
    scenes.make_clip(folder)
    assert weights.stat().st_mtime_ns == made
    scenes.make_clip(tmp_path / "again")
    assert (tmp_path / "again" / weights.name).read_bytes() == before
    monkeypatch.setitem(scenes.CLIP["scenes"], "version", 99)
    scenes.make_clip(folder)  # of an older version: made again
    assert weights.stat().st_mtime_ns != made
    assert json.loads((folder / "open_clip_config.json").read_text()) == scenes.CLIP
    (old,) = folder.parent.glob("scenes_clip-before-*")
    assert (old / weights.name).read_bytes() == before
    assert {path.name for path in folder.parent.iterdir()} == {"scenes_clip", old.name}


def test_a_clip_that_was_trained_here_is_moved_aside(tmp_path):
    folder = tmp_path / "scenes_clip"
    folder.mkdir()
    trained = {"version": 1, "batches": 200, "passes": 8, "pairs": 12, "lr": 3e-3}  # before weights were shipped
    (folder / "open_clip_config.json").write_text(json.dumps({**scenes.CLIP, "scenes": trained}))
    (folder / "open_clip_model.safetensors").write_bytes(b"trained here")
    scenes.make_clip(folder)
    (old,) = tmp_path.glob("scenes_clip-before-*")
    assert (old / "open_clip_model.safetensors").read_bytes() == b"trained here"
    assert json.loads((folder / "open_clip_config.json").read_text())["scenes"]["sha256"]


def test_the_shipped_weights_are_small_and_checked(tmp_path, monkeypatch):
    content = scenes.CLIP_FILE.read_bytes()
    assert len(content) < 1.2e6
    assert hashlib.sha256(content).hexdigest() == scenes.CLIP["scenes"]["sha256"]
    monkeypatch.setattr(scenes, "CLIP_FILE", tmp_path / "weights")
    for wrong in (None, b"", content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        if wrong is not None:
            scenes.CLIP_FILE.write_bytes(wrong)
        with pytest.raises(SystemExit, match=r"weights is missing, cut off or edited: restore it"):
            scenes.make_clip(tmp_path / "scenes_clip")
        assert not (tmp_path / "scenes_clip").exists()


def test_concurrent_processes_unpack_one_clip(tmp_path):
    code = "import pathlib, scenes; scenes.make_clip(pathlib.Path('scenes_clip'))"
    for process in [start("-c", code, cwd=tmp_path) for _ in range(3)]:
        finish(process)
    assert [path.name for path in tmp_path.iterdir()] == ["scenes_clip"]
    files = sorted(path.name for path in (tmp_path / "scenes_clip").iterdir())
    assert files == ["open_clip_config.json", "open_clip_model.safetensors"]


def cosines(net, pixels, texts):
    """(N, C), as vlpl.py's: of images (N, 64, 64, 3) with the texts"""
    mean, std = (scenes.CLIP["preprocess_cfg"][what][0] for what in ("mean", "std"))
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - mean) / std
    tokens = open_clip.SimpleTokenizer(context_length=16)(texts)
    with torch.inference_mode():
        images = torch.cat([net.encode_image(part, normalize=True) for part in x.split(500)])
        return images @ net.encode_text(tokens, normalize=True).T


def unpacked(folder):
    scenes.make_clip(folder)
    net = open_clip.CLIP(**scenes.CLIP["model_cfg"])
    net.load_state_dict(load_file(folder / "open_clip_model.safetensors"))
    return net.eval()


def test_the_unpacked_weights_are_the_shipped_ones_in_full_precision(tmp_path):
    weights, shipped = unpacked(tmp_path / "scenes_clip").state_dict(), load_file(scenes.CLIP_FILE)
    words, rows = shipped.pop("words"), weights["token_embedding.weight"]
    assert rows.any(1).nonzero().flatten().tolist() == words.tolist()
    weights["token_embedding.weight"] = rows[words]
    assert weights.keys() == shipped.keys()
    assert all(torch.equal(weights[name], shipped[name].to(weights[name].dtype)) for name in weights)


def test_a_word_of_no_caption_carries_no_meaning(tmp_path):
    net = unpacked(tmp_path / "scenes_clip")
    pixels = np.stack([scenes.captioned_scene(32 * (i // 20) + i % 20, 32)[0] for i in range(100)])  # classes alone
    texts = ["qzxj", "", "zebra", "...", "a photo of a cup and a zebra", "a photo of a zebra", "a photo of a whale"]
    got = cosines(net, pixels, texts)
    assert got.isfinite().all()
    assert torch.equal(got[:, -2], got[:, -1])
    for prompt in ("a photo of a {}", "A photo of {}", "a photo of a {}."):  # full stops do no harm
        best = cosines(net, pixels, [prompt.format(name) for name in scenes.CLASSES]).argmax(1)
        assert (best == torch.arange(100) % 20).float().mean() > 0.5  # at random: 0.05


def test_the_words_of_a_clip_are_those_that_learn():
    net, words = scenes.train_clip(batches=1, passes=1)
    assert net.token_embedding.weight.grad.abs().sum(1).nonzero().flatten().tolist() == words.tolist()
    decode = open_clip.SimpleTokenizer().decoder
    said = {decode[word].removesuffix("</w>") for word in words.tolist()}
    assert said == {*scenes.CLASSES, "a", "an", "and", "of", "photo", "<start_of_text>", "<end_of_text>"}


def test_another_clip_is_left_alone(tmp_path):
    folder = tmp_path / "scenes_clip"
    folder.mkdir()
    with pytest.raises(SystemExit, match="holds no CLIP"):
        scenes.make_clip(folder)
    config = folder / "open_clip_config.json"
    (folder / "open_clip_model.safetensors").write_bytes(b"mine")
    edited = {**scenes.CLIP, "scenes": {**scenes.CLIP["scenes"], "sha256": "0"}}
    newer = {**scenes.CLIP, "scenes": {**scenes.CLIP["scenes"], "version": 3}}
    foreign = {"model_cfg": {}, "preprocess_cfg": {}}
    for found, problem in ((foreign, "another CLIP"), (edited, "edited CLIP"), (newer, "a version after 2")):
        config.write_text(json.dumps(found))
        with pytest.raises(SystemExit, match=problem):
            scenes.make_clip(folder)
        assert (folder / "open_clip_model.safetensors").read_bytes() == b"mine"


@pytest.mark.slow
def test_training_anew_gives_a_clip_as_good_as_the_shipped_one(made, tmp_path, monkeypatch, capsys):
    shipped = unpacked(tmp_path / "shipped")
    net, words = scenes.train_clip()
    net.eval()
    monkeypatch.setattr(scenes, "train_clip", lambda: (net, words))
    monkeypatch.setattr(scenes, "CLIP_FILE", tmp_path / "weights.safetensors")
    scenes.ship_clip(scenes.CLIP_FILE)
    monkeypatch.setitem(scenes.CLIP["scenes"], "sha256", capsys.readouterr().out.split()[-1])
    anew = unpacked(tmp_path / "anew")

    pixels, y = np.load(made / "cache_val_64.npy"), torch.from_numpy(np.load(made / "formatted_val_labels.npy"))
    texts = [f"A photo of {name}" for name in scenes.CLASSES]
    full, half, there = (cosines(model, pixels, texts) for model in (net, anew, shipped))
    assert (full - half).abs().max() < 0.01
    mAP = lambda cosine: common.mean_average_precision((cosine / 0.03).log_softmax(1), y)
    assert mAP(half) == pytest.approx(mAP(full), abs=0.1)
    assert mAP(half) == pytest.approx(mAP(there), abs=5)
