"""Tiny copies of the official layouts, with their traps, and your own images."""

import csv
import http.server
import io
import json
import os
import re
import shlex
import shutil
import signal
import tarfile
import threading
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, finish, only_run, start
from PIL import Image

import an
import common
import data_prep


def test_it_does_not_import_torch():
    """Its pool forks, which a process with torch's threads must not"""
    finish(start("-c", "import sys, data_prep; sys.exit('torch' in sys.modules)", cwd=ROOT))


def picture(path, size=(37, 23), mode="RGB", seed=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.RandomState(seed).randint(0, 256, (*size[::-1], 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def settings(dataset, root, **more):
    return data_prep.Args(dataset, data_root=str(root / "data"), image_size=16, **more)


def formatted(folder, part):
    names, y = (np.load(folder / f"formatted_{part}_{kind}.npy") for kind in ("images", "labels"))
    return names.tolist(), y


@pytest.fixture
def expect(monkeypatch):
    """Counts of the tiny sets in the place of the real ones"""

    def change(dataset, classes, train, val):
        monkeypatch.setitem(data_prep.EXPECTED, dataset, (classes, {"train": train, "val": val}))

    monkeypatch.setattr(data_prep, "VOC_DRAWS", [])
    return change


# ---- VOC


@pytest.fixture
def voc(tmp_path):
    root = tmp_path / "raw" / "VOCdevkit" / "VOC2012"
    (root / "ImageSets/Main").mkdir(parents=True)
    sets = {
        "train": {
            "2008_000009": {"cow": 1},
            "2008_000002": {"tvmonitor": 1, "person": 0},
            "2008_000007": {"person": 0},
        },
        "val": {"2009_000001": {"aeroplane": 1, "person": 1}},
    }
    for name, images in sets.items():
        for image in images:
            picture(root / "JPEGImages" / f"{image}.jpg")
        for c in data_prep.VOC_CLASSES:
            lines = [f"{image} {labels.get(c, -1):2d}" for image, labels in images.items()]
            (root / "ImageSets/Main" / f"{c}_{name}.txt").write_text("\n".join(lines) + "\n")
    picture(root / "JPEGImages/2008_000009.jpg", size=(301, 7), mode="L")
    picture(root / "JPEGImages/2008_000002.jpg", size=(9, 80), mode="CMYK")
    return tmp_path


def test_a_misspelt_folder_is_not_downloaded_into(tmp_path):
    with pytest.raises(SystemExit, match=r"--raw .*nope is not a folder"):
        data_prep.prepare(settings("voc", tmp_path, raw=str(tmp_path / "nope")))
    assert not (tmp_path / "nope").exists()


def test_voc(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    names, y = formatted(folder, "train")
    assert names == ["2008_000002.jpg", "2008_000009.jpg"]  # sorted; the image with a difficult person only is out
    assert [np.flatnonzero(row).tolist() for row in y] == [[19], [9]]
    assert np.flatnonzero(formatted(folder, "val")[1][0]).tolist() == [0, 14]
    cache = np.load(folder / "cache_train_16.npy")
    path = voc / "raw/VOCdevkit/VOC2012/JPEGImages/2008_000002.jpg"
    assert np.array_equal(
        cache[0], np.asarray(Image.open(path).convert("RGB").resize((16, 16), Image.Resampling.BILINEAR))
    )


def test_wrong_counts_name_a_cause_and_can_be_mended(voc, expect):
    args = settings("voc", voc, raw=str(voc / "raw"))
    for train, cause in (
        ((3, None, None), "2 images.*not 3.*another release"),
        ((2, 3, None), "2 labels, not 3.*difficult"),
    ):
        expect("voc", 20, train, (1, 2, None))
        with pytest.raises(SystemExit, match=cause):
            data_prep.prepare(args)
        with pytest.raises(SystemExit, match="half prepared"):  # and nobody trains on it
            common.load(an.Args(dataset=str(voc / "data/voc"), image_size=16))
    expect("voc", 20, (2, 2, None), (1, 2, None))
    data_prep.prepare(args)


def test_voc2007_keeps_every_image(voc, expect):
    expect("voc2007", 20, (3, 2, None), (1, 2, None))
    main = voc / "raw/VOCdevkit/VOC2012/ImageSets/Main"
    for path in list(main.glob("*_train.txt")) + list(main.glob("*_val.txt")):
        path.rename(path.with_name(path.name.replace("_train", "_trainval").replace("_val.", "_test.")))
    folder = data_prep.prepare(settings("voc2007", voc, raw=str(voc / "raw")))
    names, y = formatted(folder, "train")
    assert names == ["2008_000002.jpg", "2008_000007.jpg", "2008_000009.jpg"]
    assert y.sum(1).tolist() == [1, 0, 1]  # the one with a difficult person only has no positive


def test_a_changed_draw_is_noticed(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    np.save(folder / "formatted_train_labels_obs.npy", np.zeros((2, 20)))
    with pytest.raises(SystemExit, match="not the published draw"):
        data_prep.prepare(settings("voc", voc, check=True))


def test_a_devkit_of_several_years(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    devkit = voc / "raw/VOCdevkit"
    shutil.copytree(devkit / "VOC2012", devkit / "VOC2007")
    shutil.rmtree(devkit / "VOC2007/JPEGImages")
    (devkit / "VOC2007/JPEGImages").mkdir()
    folder = data_prep.prepare(settings("voc", voc, raw=str(devkit)))
    assert json.loads((folder / "dataset.json").read_text())["image_folder"].endswith("VOC2012/JPEGImages")


def test_a_second_run_does_nothing(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}
    data_prep.prepare(settings("voc", voc, raw=str(voc / "nowhere")))  # the raw files are not even needed
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("[!.]*")}


def test_no_cache_and_check(voc, expect, capsys):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    with pytest.raises(SystemExit, match="not prepared"):
        data_prep.prepare(settings("voc", voc, check=True))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw"), cache=False))
    assert not list(folder.glob("cache_*"))
    data_prep.prepare(settings("voc", voc, check=True))
    assert not list(folder.glob("cache_*"))  # it only looks
    data_prep.prepare(settings("voc", voc))
    cache = np.lib.format.open_memmap(folder / "cache_val_16.npy", "r+")
    cache[0, 0, 0, 0] ^= 255
    cache.flush()
    with pytest.raises(SystemExit, match=r"2009_000001.jpg: not the same pixels"):
        data_prep.prepare(settings("voc", voc, check=True))


def test_damaged_images_are_listed_all_at_once(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    images = voc / "raw/VOCdevkit/VOC2012/JPEGImages"
    whole = {name: (images / name).read_bytes() for name in ("2008_000002.jpg", "2009_000001.jpg")}
    for name, content in whole.items():
        (images / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit, match=r"2 images can't be read") as problem:
        data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    assert all(name in str(problem.value) for name in whole)
    folder = voc / "data" / "voc"
    assert not list(folder.glob("cache_train_16.npy"))  # a half is never taken for a whole
    for name, content in whole.items():
        (images / name).write_bytes(content)
    data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    assert np.load(folder / "cache_train_16.npy").any((1, 2, 3)).all()
    assert not list(folder.glob("*.part")) + list(folder.glob("*.done"))


def test_missing_images_are_listed_all_at_once(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    for name in ("2008_000002.jpg", "2009_000001.jpg"):
        (voc / "raw/VOCdevkit/VOC2012/JPEGImages" / name).unlink()
    with pytest.raises(SystemExit, match=r"2 images are missing(.|\n)*2008_000002(.|\n)*2009_000001"):
        data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))


def test_the_cache_follows_the_files(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    before = np.load(folder / "cache_train_16.npy")
    picture(voc / "raw/VOCdevkit/VOC2012/JPEGImages/2008_000002.jpg", seed=5)  # another picture of the same name
    data_prep.prepare(settings("voc", voc))
    after = np.load(folder / "cache_train_16.npy")
    assert not np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])
    data_prep.prepare(replace(settings("voc", voc), image_size=24))
    assert (folder / "cache_train_16.npy").exists()
    picture(voc / "raw/VOCdevkit/VOC2012/JPEGImages/2008_000002.jpg", seed=6)
    data_prep.prepare(replace(settings("voc", voc), image_size=24))
    assert not (folder / "cache_train_16.npy").exists()  # nobody trains on the old picture at another size
    assert (folder / "cache_val_16.npy").exists()


def test_a_folder_of_something_else_is_no_place_to_download_to(tmp_path):
    picture(tmp_path / "photos/1.png")
    args = settings("voc", tmp_path, raw=str(tmp_path / "photos"))
    with pytest.raises(SystemExit, match=r"has neither .* nor VOCtrainval_11-May-2012\.tar: another folder"):
        data_prep.prepare(args)
    assert os.listdir(tmp_path / "photos") == ["1.png"]


def test_a_level_too_high_is_one_class(tmp_path):
    picture(tmp_path / "up/photos/cat/1.png")
    picture(tmp_path / "up/photos/dog/2.png")
    args = settings("custom", tmp_path, name="many", images=str(tmp_path / "up"), from_folders=True)
    with pytest.raises(SystemExit, match="all images are in one folder, photos: is --images one level too high"):
        data_prep.prepare(args)


def test_several_processes_decode_what_one_does(tmp_path):
    names = [f"{i}.png" for i in range(150)]
    for i, name in enumerate(names):
        picture(tmp_path / "photos/a" / name, size=(20, 20), seed=i)
    picture(tmp_path / "photos/b/0.png", size=(20, 20), seed=200)
    (tmp_path / "photos/a/77.png").write_bytes(b"no picture")
    args = settings("custom", tmp_path, name="many", images=str(tmp_path / "photos"), from_folders=True)
    with pytest.raises(SystemExit, match=r"1 images can't be read(.|\n)*77.png"):
        data_prep.prepare(args)
    picture(tmp_path / "photos/a/77.png", size=(20, 20), seed=77)
    folder = data_prep.prepare(args)
    cache, listed = np.load(folder / "cache_train_16.npy"), np.load(folder / "formatted_train_images.npy")
    expected = np.stack([data_prep.decode(tmp_path / "photos" / name, 16) for name in listed])
    assert np.array_equal(cache, expected)


def answer_to_ctrl_c(job):
    """In the place of visit_chunk, which a process looks up by its name"""
    return job[2], {row: signal.getsignal(signal.SIGINT) for row in job[2]}


def test_processes_that_decode_leave_ctrl_c_to_the_main_one(tmp_path, monkeypatch):
    images = SimpleNamespace(image_folder=tmp_path, names=np.array(["0.png"]), size=16, upright=False)
    monkeypatch.setattr(data_prep, "visit_chunk", answer_to_ctrl_c)
    assert data_prep.visit(images, "checking", None, np.arange(1), compare=True) == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN


def test_sixteen_bit_grey_is_not_cut_off(tmp_path):
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    Image.fromarray(ramp).save(tmp_path / "x.png")
    pixels = data_prep.decode(tmp_path / "x.png", 64)
    assert pixels[0, :, 0].tolist() == (ramp[0] >> 8).tolist()


def test_caching_goes_on_where_it_was_stopped(voc, expect, monkeypatch):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    real, visited = data_prep.visit, []

    def stopped(*_, **__):
        raise KeyboardInterrupt

    def watched(images, what, target, rows, compare, finished):
        visited.append(rows.tolist())
        return real(images, what, target, rows, compare, finished)

    monkeypatch.setattr(data_prep, "visit", stopped)
    with pytest.raises(KeyboardInterrupt):
        data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    (done_path,) = (voc / "data/voc").glob("cache_train_16.npy.*.done")
    done = np.lib.format.open_memmap(done_path, "r+")
    written = voc / "raw/VOCdevkit/VOC2012/JPEGImages/2008_000009.jpg"
    done[1] = written.stat().st_mtime_ns  # as if the second image had been written before the kill
    done.flush()
    monkeypatch.setattr(data_prep, "visit", watched)
    data_prep.prepare(settings("voc", voc))
    assert visited == [[0], [0]]


def test_a_half_written_data_set_is_refused(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    folder = data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    (folder / data_prep.UNFINISHED).touch()
    with pytest.raises(SystemExit, match="half prepared"):
        common.load(an.Args(dataset=str(folder), image_size=16))
    data_prep.prepare(settings("voc", voc, raw=str(voc / "raw")))
    assert not (folder / data_prep.UNFINISHED).exists()


# ---- COCO


def test_coco(tmp_path, expect):
    expect("coco", 3, (3, 5, None), (1, 1, None))
    raw = tmp_path / "raw"
    categories = [
        {"id": 7, "name": "dog"},
        {"id": 2, "name": "fire hydrant"},
        {"id": 90, "name": "tie"},
    ]  # gaps, unsorted
    boxes = lambda *pairs: [
        {"segmentation": [[1.5] * 400], "iscrowd": crowd, "image_id": i, "bbox": [0, 1], "category_id": c, "id": i * c}
        for i, c, crowd in pairs
    ]
    files = lambda part, ids: [{"id": i, "file_name": f"COCO_{part}2014_{i:012d}.jpg", "license": 1} for i in ids]
    content = {
        "train": (
            files("train", [9, 100, 25, 30]),
            boxes((100, 2, 0), (9, 90, 1), (25, 7, 0), (25, 2, 0), (25, 2, 0), (100, 90, 0)),
        ),
        "val": (files("val", [5]), boxes((5, 7, 0))),
    }
    (raw / "annotations").mkdir(parents=True)
    for part, (images, annotations) in content.items():
        whole = {
            "info": {"year": 2014},
            "annotations": annotations,
            "images": images,
            "categories": categories,
            "n": 12,
        }
        (raw / "annotations" / f"instances_{part}2014.json").write_text(
            json.dumps(whole, indent=1 if part == "val" else None)
        )
        for entry in images:
            picture(raw / f"{part}2014" / entry["file_name"])
    folder = data_prep.prepare(settings("coco", tmp_path, raw=str(raw)))
    names, y = formatted(folder, "train")
    assert [int(name[-16:-4]) for name in names] == [100, 25, 9]  # ids sorted as strings; 30 has no annotation
    assert y.tolist() == [[0, 1, 1], [1, 1, 0], [0, 0, 1]]  # the crowd counts
    assert json.loads((folder / "dataset.json").read_text())["classes"] == ["dog", "fire hydrant", "tie"]
    expect("coco_all", 3, (4, 5, None), (1, 1, None))
    whole = data_prep.prepare(settings("coco", tmp_path, raw=str(raw), keep_empty=True))
    assert whole == folder.with_name("coco_all")
    names, y = formatted(whole, "train")
    assert [int(name[-16:-4]) for name in names] == [100, 25, 30, 9]
    assert y.tolist() == [[0, 1, 1], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    with pytest.raises(SystemExit, match="--keep_empty is for coco"):
        data_prep.prepare(settings("voc", tmp_path, keep_empty=True))


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
def test_stream_json_reads_what_json_reads(tmp_path, block):
    content = {
        "a": 12,
        "b": [1, 22, {"x": [1, "],}"], "é": None}, "s", -1.5e3],
        "c": {"d": []},
        "e": [],
        "f": [[2], True],
    }
    for indent in (None, 2):
        path = tmp_path / "x.json"
        path.write_text(json.dumps(content, indent=indent, ensure_ascii=False))
        lists = [(key, element) for key, value in content.items() if isinstance(value, list) for element in value]
        assert list(data_prep.stream_json(path, block)) == lists


def test_half_a_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"annotations": [{"id": 1}, {"id": 2')
    with pytest.raises(SystemExit, match=r"not a whole|too early"):
        list(data_prep.stream_json(path))


# ---- CUB, NUS


def test_cub(tmp_path, expect):
    expect("cub", 3, (2, 3, None), (1, 1, None))
    root = tmp_path / "raw" / "CUB_200_2011"
    (root / "attributes").mkdir(parents=True)
    names = {1: "001.Albatross/a.jpg", 2: "002.Auk/b.jpg", 10: "002.Auk/c d.jpg"}
    for name in names.values():
        picture(root / "images" / name)
    (root / "images.txt").write_text("".join(f"{i} {name}\n" for i, name in names.items()))
    (root / "train_test_split.txt").write_text("1 1\n2 0\n10 1\n")
    (root.parent / "attributes.txt").write_text(
        "1 has_bill_shape::curved_(up_or_down)\n2 has_size::small\n3 has_x::y\n"
    )
    lines = ["1 1 1 3 12.7", "1 2 0 1 2.0", "1 3 0 1 1", "2 1 0 4 1", "2 2 1 1 0.5", "2 3 0 1 1"]
    lines += ["10 1 1 3 4 5.1 0", "10 2 1 1 1", "10 3 0 0 1"]  # a line with extra columns, certainty 1 and 0
    (root / "attributes/image_attribute_labels.txt").write_text("\n".join(lines) + "\n")
    folder = data_prep.prepare(settings("cub", tmp_path, raw=str(tmp_path / "raw")))
    assert formatted(folder, "train")[0] == ["001.Albatross/a.jpg", "002.Auk/c d.jpg"]
    assert formatted(folder, "train")[1].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert formatted(folder, "val")[1].tolist() == [[0, 1, 0]]
    assert json.loads((folder / "dataset.json").read_text())["classes"][0] == "has_bill_shape::curved_(up_or_down)"


def test_nus_says_what_to_get(tmp_path):
    """All three sources, where to get them, and which papers used which"""
    sources = ("ROLE, AEVLP", "zenodo", "EM + APL and VLPL", "drive.google.com", "ImageList", "LAC's paper")
    with pytest.raises(SystemExit, match=r"can't be downloaded freely") as refusal:
        data_prep.prepare(settings("nus", tmp_path))
    assert all(source in refusal.value.code for source in sources)


def test_nus_official_lists(tmp_path, expect, capsys):
    expect("nus", 2, (9, None, None), (9, None, None))
    raw = tmp_path / "raw"
    for folder in ("ImageList", "TrainTestLabels", "ConceptsList"):
        (raw / folder).mkdir(parents=True)
    (raw / "ConceptsList/Concepts81.txt").write_text("airport\nanimal\n")
    for part, n in (("Train", 3), ("Test", 2)):
        names = [f"actor\\{part}_{i}.jpg" for i in range(n)]  # Windows' slashes, as in the official lists
        (raw / f"ImageList/{part}Imagelist.txt").write_text("\r\n".join(names) + "\r\n")
        (raw / f"TrainTestLabels/Labels_airport_{part}.txt").write_text("\n".join("100"[:n]) + "\n")
        (raw / f"TrainTestLabels/Labels_animal_{part}.txt").write_text("\n".join("110"[:n]) + "\n")
        for i in range(n):
            picture(raw / f"images/actor/{part}_{i}.jpg")
    folder = data_prep.prepare(settings("nus", tmp_path, raw=str(raw)))
    assert formatted(folder, "train")[0][1] == "actor/Train_1.jpg"
    assert formatted(folder, "train")[1].tolist() == [[1, 1], [0, 1], [0, 0]]  # a row without a positive stays
    assert "the official lists differ from the papers' 150,000" in capsys.readouterr().out
    data_prep.prepare(settings("nus", tmp_path, check=True))


def test_nus_authors_files(tmp_path, expect):
    expect("nus", 2, (2, None, None), (1, None, None))
    raw = tmp_path / "raw"
    (raw / "ConceptsList").mkdir(parents=True)
    (raw / "ConceptsList/Concepts81.txt").write_text("airport\nanimal\n")
    for part, n in (("train", 2), ("val", 1)):
        np.save(raw / f"formatted_{part}_images.npy", np.array([f"{part}{i}.jpg" for i in range(n)]))
        np.save(raw / f"formatted_{part}_labels.npy", np.eye(2)[:n])
        for i in range(n):
            picture(raw / "images" / f"{part}{i}.jpg")
    folder = data_prep.prepare(settings("nus", tmp_path, raw=str(raw)))
    assert formatted(folder, "train")[1].tolist() == [[1, 0], [0, 1]]
    assert json.loads((folder / "dataset.json").read_text())["classes"] == ["airport", "animal"]
    expect("nus", 2, (3, None, None), (1, None, None))
    with pytest.raises(SystemExit, match="differs from the published data set"):
        data_prep.prepare(settings("nus", tmp_path, check=True))


# ---- downloads


class Server(http.server.BaseHTTPRequestHandler):
    """Serves one body; breaks off the first answer half-way"""

    def do_GET(self):
        server = self.server
        first = int(re.search(r"\d+", self.headers.get("Range", "bytes=0-"))[0])
        server.asked.append(first)
        if server.missing:
            return self.send_error(404)
        self.send_response(206 if first else 200)
        rest = server.body[first:]
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: len(rest) // 2] if len(server.asked) == 1 else rest)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.HTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.missing, server.body = [], False, bytes(range(256)) * 4000
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_broken_download_goes_on(server, tmp_path):
    import hashlib

    path = tmp_path / "x.tar"
    address = f"http://127.0.0.1:{server.server_port}/x.tar"
    data_prep.download(address, path, hashlib.md5(server.body).hexdigest())
    assert path.read_bytes() == server.body
    assert server.asked == [0, len(server.body) // 2]
    data_prep.download(address, path)
    assert len(server.asked) == 2  # it is there


def test_a_wrong_or_missing_download_says_what_to_do(server, tmp_path):
    address = f"http://127.0.0.1:{server.server_port}/x.tar"
    with pytest.raises(SystemExit, match=r"not the published file.*put it at"):
        data_prep.download(address, tmp_path / "x.tar", "0" * 32)
    assert not (tmp_path / "x.tar").exists()
    (tmp_path / "own.tar").write_bytes(b"repacked by hand")
    with pytest.raises(SystemExit, match=r"not the published file.*left as it is: move it away"):
        data_prep.download(address, tmp_path / "own.tar", "0" * 32)
    assert (tmp_path / "own.tar").read_bytes() == b"repacked by hand"
    server.missing = True
    with pytest.raises(SystemExit, match=r"can't be downloaded.*404.*put it at"):
        data_prep.download(address, tmp_path / "y.tar")


def test_download_extract_and_prepare(server, voc, expect, monkeypatch):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as pack:
        pack.add(voc / "raw" / "VOCdevkit", "VOCdevkit")
    server.body = buffer.getvalue()
    monkeypatch.setitem(data_prep.ARCHIVES, "voc", [(f"http://127.0.0.1:{server.server_port}/voc.tar", "")])
    folder = data_prep.prepare(settings("voc", voc))
    assert formatted(folder, "train")[0] == ["2008_000002.jpg", "2008_000009.jpg"]


def test_an_extraction_that_was_cut_off_is_done_again(voc, expect):
    expect("voc", 20, (2, 2, None), (1, 2, None))
    raw = voc / "data/voc/raw"
    raw.mkdir(parents=True)
    archive = raw / "VOCtrainval_11-May-2012.tar"
    with tarfile.open(archive, "w") as pack:
        pack.add(voc / "raw" / "VOCdevkit", "VOCdevkit")
    shutil.copytree(voc / "raw/VOCdevkit", raw / "VOCdevkit")
    (raw / "VOCdevkit/VOC2012/JPEGImages/2009_000001.jpg").unlink()  # never came out
    archive.with_name(archive.name + ".extracting").touch()
    data_prep.ARCHIVES["voc"], before = [(data_prep.ARCHIVES["voc"][0][0], "")], data_prep.ARCHIVES["voc"]
    try:
        data_prep.prepare(settings("voc", voc))
    finally:
        data_prep.ARCHIVES["voc"] = before


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_can_not_write_outside(tmp_path, kind):
    archive = tmp_path / f"evil.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as pack:
            pack.writestr("../evil.txt", "x")
    else:
        with tarfile.open(archive, "w") as pack:
            pack.addfile(tarfile.TarInfo("../evil.txt"))
    (tmp_path / "in").mkdir()
    with pytest.raises(SystemExit, match=r"outside|unsafe"):
        data_prep.extract(archive, tmp_path / "in")
    assert not (tmp_path / "evil.txt").exists()


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "x.zip").write_bytes(b"PK nonsense")
    (tmp_path / "x.tar").write_bytes(b"nonsense" * 100)
    for name in ("x.zip", "x.tar"):
        with pytest.raises(SystemExit, match=f"{name} is damaged"):
            data_prep.extract(tmp_path / name, tmp_path)


# ---- your own images


def table(path, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


@pytest.fixture
def pets(tmp_path):
    for i in range(12):
        picture(tmp_path / "photos" / f"{i}.png", seed=i)
    train = [("image", "label"), *((f"{i}.png", ("cat", "dog", "grey parrot")[i % 3]) for i in range(8))]
    val = [("image", "labels"), ("8.png", "cat;dog"), ("9.png", "grey parrot")]
    test = [("10.png", "dog ; cat"), ("11.png", "grey parrot;dog")]  # without a header
    return dict(
        name="pets",
        images=str(tmp_path / "photos"),
        labels=table(tmp_path / "labels.csv", *train),
        val=table(tmp_path / "val.csv", *val),
        test=table(tmp_path / "test.csv", *test),
    )


def test_custom(pets, tmp_path):
    folder = data_prep.prepare(settings("custom", tmp_path, **pets))
    data = common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16))
    assert data.classes == ["cat", "dog", "grey parrot"]
    assert (len(data.train), len(data.val), len(data.test)) == (8, 2, 2)  # the training file is not split
    assert data.train.y is None
    assert data.train.z.tolist()[:3] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert data.val.y.tolist() == [[1, 1, 0], [0, 0, 1]]
    assert data.test.y.tolist() == [[1, 1, 0], [0, 1, 1]]
    assert data.train.images.cached
    assert not (folder / "formatted_train_labels.npy").exists()


def test_photos_of_your_own_are_turned_upright(pets, tmp_path):
    """As predict.py will turn them; the published data sets stay as the papers took them (test_predict)"""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    with Image.open(tmp_path / "photos/3.png") as image:
        image.load()
    image.save(tmp_path / "photos/3.png", exif=exif)
    upright = np.asarray(image.transpose(Image.Transpose.ROTATE_270).resize((16, 16), Image.Resampling.BILINEAR))
    args = an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16)
    prints = []
    for cache in (True, False):
        folder = data_prep.prepare(settings("custom", tmp_path, **pets, cache=cache))
        for old in [] if cache else folder.glob("cache_*"):
            old.unlink()
        images = common.load(args).train.images
        assert images.cached == cache
        assert np.array_equal(images[np.array([3])][0], upright)
        assert np.array_equal(images.from_files(16, Image.Resampling.BILINEAR)[np.array([3])][0], upright)  # CLIP's
        prints.append(common.load(args).train.fingerprint())
    info = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**info, "upright": False}))
    assert not np.array_equal(common.load(args).train.images[np.array([3])][0], upright)
    assert common.load(args).train.fingerprint() not in prints  # other pixels, so other embeddings


def test_a_cache_from_before_photos_were_turned_is_made_again(pets, tmp_path):
    folder = data_prep.prepare(settings("custom", tmp_path, **pets))
    description = json.loads((folder / "cache_train_16.json").read_text())
    assert description.pop("upright")
    (folder / "cache_train_16.json").write_text(json.dumps(description))
    with pytest.raises(SystemExit, match=r"cache_train_16.npy was made for another list of images"):
        common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16))
    pixels = np.load(folder / "cache_train_16.npy")
    np.save(folder / "cache_train_16.npy", np.zeros_like(pixels))
    data_prep.prepare(settings("custom", tmp_path, **pets))
    assert np.array_equal(np.load(folder / "cache_train_16.npy"), pixels)


def test_names_need_not_be_utf_8(tmp_path, capsys):
    for i in range(4):
        picture(tmp_path / "photos" / f"{'ab'[i % 2]}/{i}.png", seed=i)
    os.rename(tmp_path / "photos/a/0.png", os.fsencode(tmp_path / "photos/a") + b"/caf\xe9.png")
    os.rename(tmp_path / "photos/a/2.png", os.fsencode(tmp_path / "photos/a") + b"/caf\xe9.doc")
    data_prep.prepare(settings("custom", tmp_path, name="pets", images=str(tmp_path / "photos"), from_folders=True))
    data = common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16))
    assert data.train.images.names[0] == os.fsdecode(b"a/caf\xe9.png")
    assert "without an image extension: a/caf\\xe9.doc" in capsys.readouterr().out


def test_no_label_of_a_test_image_is_a_label_too(pets, tmp_path):
    pets["test"] = table(tmp_path / "none.csv", ("10.png", "dog"), ("11.png", ""))
    data_prep.prepare(settings("custom", tmp_path, **pets))
    data = common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16))
    assert data.test.y.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_custom_trains_with_and_without_validation(pets, tmp_path):
    small = [word for word in SMALL if word not in ("--image_size", "32")]
    command = (ROOT / "an.py", "--dataset", "pets", *small, "--image_size", 16, "--epochs", 3)
    data_prep.prepare(settings("custom", tmp_path, **pets))
    out = finish(start(*command, cwd=tmp_path))
    assert "best epoch" in out
    run = only_run(tmp_path)
    assert f"test mAP {json.loads((run / 'result.json').read_text())['test_mAP']:.2f}" in finish(
        start(ROOT / "an.py", "--eval_only", run, cwd=tmp_path)
    )
    full = (ROOT / "baselines.py", *command[1:], "--loss", "bce_full")
    assert "needs the full training labels" in finish(start(*full, cwd=tmp_path), code=1)

    data_prep.prepare(settings("custom", tmp_path, **{**pets, "val": "", "test": ""}))
    out = finish(start(*command, "--out", "blind", "--val_fraction", 0, cwd=tmp_path))
    assert "no fully labelled validation images: the last epoch is kept" in out
    assert "last epoch 3 (no validation): no true labels to measure with; " in out
    (blind,) = (tmp_path / "blind").iterdir()
    result = json.loads((blind / "result.json").read_text())
    assert result["best_epoch"] == 3
    assert result["val_mAP"] is result["test_mAP"] is None
    with open(blind / "metrics.csv") as file:
        assert {row["val_mAP"] for row in csv.DictReader(file)} == {""}  # nobody pretends to know
    best, last = (torch.load(blind / name, weights_only=True)["model"] for name in ("best.pt", "last.pt"))
    assert all(torch.equal(best[key], last[key]) for key in best)


def test_custom_problems_come_all_together_with_lines(pets, tmp_path):
    bad = [
        ("image", "label"),
        ("0.png", "cat"),
        ("nowhere.png", "cat"),
        ("../labels.csv", "cat"),
        ("1.png", ""),
        ("3.png", "cow"),
        ("4.png", "cat", "extra"),
        ("5.png",),
        ("x" * 300, "cat"),
        ("/etc/passwd", "cat"),
        ("2", "cat"),
        ("4.PNG", "cat"),
    ]
    pets["labels"] = table(tmp_path / "bad.csv", *bad)
    pets["val"] = table(tmp_path / "val.csv", ("8.png", "cat"), ("8.png", "cat;dog"), ("./8.png", "cat"))
    pets["test"] = table(tmp_path / "test.csv", ("8.png", "cat"))
    with pytest.raises(SystemExit) as problem:
        data_prep.prepare(settings("custom", tmp_path, **pets, classes="cat,dog,grey parrot"))
    message = str(problem.value)
    for expected in (
        r"bad.csv:3: there is no .*nowhere.png",
        r"bad.csv:4: ../labels.csv is outside",
        r"bad.csv:5: 1.png has no label",
        r"bad.csv:6: 'cow' is not one of the 3 classes",
        r"bad.csv:7: 3 columns, not 2 \(semicolon or bar between labels\)",
        r"bad.csv:8: 1 columns, not 2",
        r"bad.csv:9: there is no .*xxx",
        r"bad.csv:10: .*etc/passwd is outside",
        r"bad.csv:11: there is no .*/2 \(there is 2.png\)",
        r"bad.csv:12: there is no .*/4.PNG \(there is 4.png\)",
        r"val.csv:2: 8.png comes again with other labels \(first at .*val.csv:1\)",
        r"test.csv:1: 8.png is a validation image too \(at .*val.csv:1\)",
        r"class 'dog' has no training example",
        r"class 'grey parrot' has no training example",
    ):
        assert re.search(expected, message), expected
    assert "error: 14 problems, nothing was written" in message
    assert not (tmp_path / "data" / "pets").exists()


def test_a_changed_table_is_taken_up(pets, tmp_path):
    data_prep.prepare(settings("custom", tmp_path, **{**pets, "test": ""}))
    pets["labels"] = table(
        tmp_path / "more.csv", *((f"{i}.png", ("cat", "dog", "grey parrot")[i % 3]) for i in (10, 0, 2))
    )
    folder = data_prep.prepare(settings("custom", tmp_path, **{**pets, "test": ""}))
    assert np.load(folder / "formatted_train_images.npy").tolist() == ["10.png", "0.png", "2.png"]
    assert np.array_equal(np.load(folder / "cache_train_16.npy")[0], data_prep.decode(tmp_path / "photos/10.png", 16))


def test_files_that_others_made_are_not_overwritten(pets, tmp_path):
    folder = tmp_path / "data" / "pets"
    folder.mkdir(parents=True)
    np.save(folder / "formatted_train_images.npy", np.array(["mine"]))
    with pytest.raises(SystemExit, match="were not made here"):
        data_prep.prepare(settings("custom", tmp_path, **pets))
    assert np.load(folder / "formatted_train_images.npy").tolist() == ["mine"]


def test_a_class_only_in_validation(pets, tmp_path):
    pets["labels"] = table(tmp_path / "l.csv", ("0.png", "cat"), ("1.png", "dog"))
    with pytest.raises(SystemExit, match="class 'grey parrot' has no training example"):
        data_prep.prepare(settings("custom", tmp_path, **pets))


TABLES = {  # what is in the file, in which encoding: what is said of it
    "filename,keyword\n0.png,cat\n1.png,dog\n": (
        "utf-8",
        "columns filename -> image, keyword -> label; comma between them, semicolon or bar between labels; utf-8",
    ),
    "Image Path;Tags\r\n0.png;cat\r\n1.png;dog\r\n": (
        "utf-8-sig",
        "Image Path -> image, Tags -> label; semicolon between them, semicolon or bar or comma between labels; utf-8",
    ),
    "file\tclass\n0.png\tcat\n1.png\tdog\n": ("utf-16", "columns file -> image, class -> label; tab between them"),
    ",image,label\n0,0.png,cat\n1,1.png,dog\n": ("utf-8", "label -> label, (no name) left out; comma"),  # pandas'
    "\tname\timg\tlabels\n0\tA\t0.png\tcat\n1\tB\t1.png\tdog\n": (
        "utf-16-le",
        "(no name) left out, name left out; tab",
    ),
    "image|label\n0.png|cat\n1.png|dog\n": ("utf-8", "columns image -> image, label -> label; bar between them"),
    "0.png;cat\n1.png;dog\n": ("utf-8", "columns image, label, without header; semicolon between them"),
    "\n\n0.png\tcat\r1.png\tdog\r": ("utf-8", "columns image, label, without header; tab between them"),
    '"image","label","by"\n"0.png","cat","Zo\xeb"\n\n"1.png","dog",""\n,,\n': (
        "latin-1",
        "by left out; comma between them",
    ),
    "id,path,class_id,class\n7,photos/0.png,3,cat\n8,PWD/photos/1.png,4,dog\n": (
        "utf-8",
        "class -> label, id left out, class_id",
    ),
    "image,label,,\n0.png,cat,,\n1.png,dog\n": ("utf-8", "columns image -> image, label -> label, (no name) left out"),
}


@pytest.mark.parametrize("text", TABLES)
def test_tables_of_many_programs(pets, workplace, capsys, text):
    encoding, understood = TABLES[text]
    mark = "\ufeff" * (encoding == "utf-16-le")
    content = (mark + text.replace("PWD", str(workplace))).encode(encoding)
    (workplace / "odd.csv").write_bytes(content)
    folder = data_prep.prepare(settings("custom", workplace, **{**pets, "labels": "odd.csv", "val": "", "test": ""}))
    assert understood in capsys.readouterr().out
    assert np.load(folder / "formatted_train_images.npy").tolist() == ["0.png", "1.png"]
    assert np.load(folder / "formatted_train_labels_obs.npy").tolist() == [[1, 0], [0, 1]]
    assert data_prep.read_dataset(folder)["classes"] == ["cat", "dog"]


JUNK = {  # what is in the file: the sentence
    b"": r"odd.csv needs columns .* it is empty",
    b"\n \n\n": r"odd.csv needs columns .* it begins with ' '",
    b"image,label\n": r"1 problem, nothing was written:\n  there is no training image",
    b"image\n0.png\n": r"odd.csv needs columns .* it begins with 'image'",
    b"0,0.png,cat\n1,1.png,dog\n": r"odd.csv needs columns .* it begins with '0,0.png,cat'",
    b"bild,wort\n0.png,cat\n": r"odd.csv needs columns .* a header, such as image,label; it begins with 'bild,wort'",
    b"image,label\n0.png,c\0t\n": "odd.csv is not text, or holds a NUL character",
    "image,label\n0.png,cat\n".encode("utf-16-be"): "odd.csv is not text, or holds a NUL character",
    b"\xff\xfea": "odd.csv is not text",
    b"\x89PNG\r\n\x1a\n\x81\x8d": "odd.csv is not text",
    bytes(range(1, 128)) * 9: r"odd.csv needs columns .* it begins with '\\x01",
    b'image,label\n0.png,"cat\n1.png,dog\n': r"odd.csv:3 can't be read: unexpected end of data",
    b"image,label\n0.png," + b"x" * 200_000: r"odd.csv:2 can't be read: field larger than field limit",
    b",".join(b"c%d" % c for c in range(100_000)): r"odd.csv needs columns .* it begins with 'c0,c1,c2",
    b"\t".join(b"c%d" % c for c in range(100_000)): r"odd.csv needs columns .* it begins with 'c0\\tc1\\tc2",
    b"image,label," + b"," * 100_000 + b"\n0.png,cat": r"odd.csv:2: .* \(semicolon",
}


@pytest.mark.parametrize("content", JUNK, ids=range(len(JUNK)))
def test_junk_for_a_table_is_one_sentence(pets, workplace, capsys, content):
    (workplace / "odd.csv").write_bytes(content)
    if content.startswith(b"image,label,"):  # is understood, if it is whole
        data_prep.prepare(settings("custom", workplace, **{**pets, "labels": "odd.csv", "val": "", "test": ""}))
        assert "(no name) left out, ...; comma" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit, match=JUNK[content]) as problem:
        data_prep.prepare(settings("custom", workplace, **{**pets, "labels": "odd.csv", "val": "", "test": ""}))
    assert len(str(problem.value)) < 300
    with pytest.raises(SystemExit, match=r"odd\.csv|there is no validation image"):
        data_prep.prepare(settings("custom", workplace, **{**pets, "val": "odd.csv"}))
    os.replace("odd.csv", "odd.json")
    with pytest.raises(SystemExit, match=r"odd.json (is not a JSON export|is not text)"):
        data_prep.prepare(settings("custom", workplace, **{**pets, "val": "odd.json"}))
    assert not (workplace / "data").exists()


def prepared(folder, part="train"):
    """{image: names of its labels}"""
    kind = "labels_obs" if part == "train" else "labels"
    names, labels = (np.load(folder / f"formatted_{part}_{kind}.npy") for kind in ("images", kind))
    classes = np.array(data_prep.read_dataset(folder)["classes"])
    return {str(name): classes[row == 1].tolist() for name, row in zip(names, labels)}


@pytest.mark.parametrize(
    "text",
    [
        "image,label\n0.png,cat;dog\n1.png,dog\n",
        "image,label1;label2\n0.png,dog;cat\n1.png,dog;\n",
        "image;label\n0.png;cat, dog\n1.png;dog\n",
        'image;label\n0.png;"cat;dog"\n1.png;dog\n',
        "0.png;cat,dog\n1.png;dog\n",
        "image\tlabel\n0.png\tcat;dog\n1.png\tdog\n",
        "image,label\n0.png,cat|dog\n1.png,dog\n",
        'image|label\n0.png|"cat|dog"\n1.png|dog\n',
        "image,label_1,label_2\n0.png,cat,dog\n1.png,,dog\n",
        "image,label\n0.png,cat\n1.png,dog\n0.png,dog\n1.png,dog\n",
    ],
)
def test_several_known_labels(pets, workplace, capsys, text):
    (workplace / "l.csv").write_text(text)
    args = settings("custom", workplace, **{**pets, "labels": "l.csv", "val": "", "test": ""})
    assert prepared(data_prep.prepare(args)) == {"0.png": ["cat", "dog"], "1.png": ["dog"]}
    data = common.load(an.Args(dataset="pets", data_root="data", image_size=16))
    assert data.train.z.tolist() == [[1, 1], [0, 1]]
    notes = [line for line in capsys.readouterr().out.splitlines() if "rows" in line]
    several = "note: training images with labels from several rows: 1"
    same = "note: duplicate rows, merged: 1"
    assert notes == ([same, several] if text.count("0.png") == 2 else [])


def test_a_comma_in_the_name_of_a_class(pets, workplace):
    (workplace / "l.csv").write_text('image,label\n0.png,"tench, Tinca tinca"\n1.png,dog\n')
    args = settings("custom", workplace, **{**pets, "labels": "l.csv", "val": "", "test": ""})
    assert prepared(data_prep.prepare(args)) == {"0.png": ["tench, Tinca tinca"], "1.png": ["dog"]}


SCRIPTS = ("an.py", "baselines.py", "em_apl.py", "role.py", "ll.py", "pu_mlc.py", "lac.py", "vlpl.py", "aevlp.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_method_takes_several_known_labels(pets, workplace, script, tiny_clip, name):
    rows = [(f"{i}.png", ("cat", "dog", "grey parrot", "cat;dog", "cat;dog;grey parrot")[i % 5]) for i in range(8)]
    pets["labels"] = table(workplace / "several.csv", *rows)
    folder = data_prep.prepare(settings("custom", workplace, **pets))
    assert np.load(folder / "formatted_train_labels_obs.npy").sum(1).tolist() == [1, 1, 1, 2, 3, 1, 1, 1]
    small = [word for word in SMALL if word not in ("--image_size", "32")]
    clip, lac = ("--clip_model", f"local-dir:{tiny_clip}"), ("--dim", 16, "--ffn", 16, "--project_dim", 8)
    own = {"vlpl.py": clip, "aevlp.py": clip, "lac.py": lac}.get(name, ())
    script(name, "--dataset", "pets", *small, "--image_size", 16, "--smoke", "--epochs", 1, "--workers", 0, *own)
    result = json.loads((only_run(workplace) / "result.json").read_text())
    assert 0 < result["test_mAP"] <= 100


def test_the_published_protocol_still_keeps_one_positive(squares, tmp_path):
    folder = shutil.copytree(squares, tmp_path / "squares")
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", y)
    with pytest.raises(SystemExit, match="more than one observed positive"):
        common.load(an.Args(dataset=str(folder), image_size=16))


def test_classes_that_look_the_same(pets, workplace, capsys):
    names = [
        "sky",
        "Sky",
        "SKY",
        "Sky",
        " dog",
        "dog ",
        "caf\xe9",
        "cafe\u0301",
        "Cafe\u0301",
        "grey  parrot",
        "grey parrot",
    ]
    rows = [("image", "label"), *((f"{i}.png", name) for i, name in enumerate(names))]
    args = dict(name="pets", images=pets["images"], labels=table(workplace / "l.csv", *rows))
    folder = data_prep.prepare(settings("custom", workplace, **args))
    out = capsys.readouterr().out
    assert "note: blanks around 2 of 11 labels were removed\n" in out
    assert "note: likely the same class: Sky (2), SKY (1), sky (1); --ignore_case makes them one\n" in out
    assert (
        "note: likely the same class: Cafe\u0301 (1), cafe\u0301 (1), caf\xe9 (1); --ignore_case makes them one\n"
        in out
    )
    assert "note: likely the same class: grey  parrot (1), grey parrot (1); --ignore_case" in out
    assert out.count("likely") == 3
    assert len(data_prep.read_dataset(folder)["classes"]) == 9

    folder = data_prep.prepare(settings("custom", workplace, **args, ignore_case=True))
    assert "likely the same class: Sky (2), SKY (1), sky (1); they are now all Sky\n" in capsys.readouterr().out
    assert data_prep.read_dataset(folder)["classes"] == ["Cafe\u0301", "Sky", "dog", "grey  parrot"]
    found = prepared(folder)
    assert [found[f"{i}.png"] for i in (0, 1, 2, 3)] == [["Sky"]] * 4
    assert [found[f"{i}.png"] for i in (4, 5)] == [["dog"]] * 2

    classes = "sky,dog,caf\xe9,grey parrot"  # whose spelling counts
    folder = data_prep.prepare(settings("custom", workplace, **args, ignore_case=True, classes=classes))
    assert "Sky (2), SKY (1); they are now all sky" in capsys.readouterr().out
    assert data_prep.read_dataset(folder)["classes"] == classes.split(",")
    assert prepared(folder)["1.png"] == ["sky"]

    rows += [("0.png", "Sky;dog")]  # known to be sky already
    args["labels"] = table(workplace / "l.csv", *rows)
    assert prepared(data_prep.prepare(settings("custom", workplace, **args, ignore_case=True)))["0.png"] == [
        "Sky",
        "dog",
    ]


def test_folders_that_look_the_same(tmp_path, capsys):
    for i, name in enumerate(("cat/a.png", "Cat/b.png", "cat/c.png", "dog/d.png")):
        picture(tmp_path / "photos" / name, seed=i)
    args = dict(name="pets", images=str(tmp_path / "photos"), from_folders=True, ignore_case=True)
    folder = data_prep.prepare(settings("custom", tmp_path, **args))
    assert "likely the same class: cat (2), Cat (1); they are now all cat" in capsys.readouterr().out
    assert prepared(folder)["Cat/b.png"] == ["cat"]


def test_damaged_photos_can_be_left_out(pets, tmp_path):
    photos = tmp_path / "photos"
    (photos / "3.png").write_bytes((photos / "3.png").read_bytes()[:200])
    (photos / "9.png").write_bytes(b"")
    command = [word for key, value in pets.items() for word in (f"--{key}", value)]
    run = lambda *flags, code=0: finish(
        start(ROOT / "data_prep.py", "custom", *command, "--image_size", 16, *flags, cwd=tmp_path), code
    )
    out = run(code=1)
    assert "2 images can't be read; replace them, or leave them out with --skip_damaged, and run this again" in out
    for cache in ((), ("--no_cache",), ()):  # again and again
        out = run("--skip_damaged", *cache)
        assert "left out: 2 of 12 photos, which can't be read:" in out
        assert re.search(r"photos/3.png: .*truncated", out)
        assert re.search(r"photos/9.png: cannot identify image file", out)
        folder = tmp_path / "data/pets"
        assert list(prepared(folder)) == [f"{i}.png" for i in (0, 1, 2, 4, 5, 6, 7)]
        assert prepared(folder, "valid") == {"8.png": ["cat", "dog"]}
        assert len(np.load(folder / "cache_train_16.npy")) == 7
    common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16))

    (photos / "8.png").write_bytes(b"gone")
    assert "there is no validation image" in run("--skip_damaged", code=1)
    for i in (2, 5):
        (photos / f"{i}.png").write_bytes(b"gone")
    assert "class 'grey parrot' has no training example" in run("--skip_damaged", code=1)


def test_published_images_are_never_left_out(voc):
    with pytest.raises(SystemExit, match="--skip_damaged is for your own photos"):
        data_prep.prepare(settings("voc", voc, raw=str(voc / "raw"), skip_damaged=True))


def test_heic_without_its_package(pets, tmp_path, monkeypatch):
    monkeypatch.setattr(data_prep, "pillow_heif", None)
    os.rename(tmp_path / "photos/3.png", tmp_path / "photos/IMG_3.HEIC")
    pets["labels"] = table(tmp_path / "l.csv", ("0.png", "cat"), ("1.png", "dog"), ("IMG_3.HEIC", "grey parrot"))
    needed = (
        r"1 photos, first IMG_3.HEIC, are HEIC: install the package pillow-heif \(pip install pillow-heif\), or convert"
    )
    for skip in (False, True):  # it is not damaged
        with pytest.raises(SystemExit, match=needed):
            data_prep.prepare(settings("custom", tmp_path, **pets, skip_damaged=skip))
    with pytest.raises(ValueError, match="install the package pillow-heif"):
        data_prep.decode(tmp_path / "photos/IMG_3.HEIC", 16)


def test_heic(tmp_path):
    pytest.importorskip("pillow_heif")
    y, x = np.mgrid[:96, :128]
    pixels = np.stack([2 * y, 2 * x, 0 * x], 2).astype(np.uint8)  # dark at its top left corner
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise: the dark corner comes to the right
    for i, name in enumerate(("cat/IMG_0001.HEIC", "dog/IMG_0002.heic")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        more = dict(exif=exif.tobytes()) if i else {}
        Image.fromarray(pixels).save(tmp_path / "photos" / name, format="HEIF", quality=95, **more)
    args = settings("custom", tmp_path, name="pets", images=str(tmp_path / "photos"), from_folders=True)
    folder = data_prep.prepare(args)
    plain, turned = np.load(folder / "cache_train_16.npy").astype(int)
    expected = np.asarray(Image.fromarray(pixels).resize((16, 16), Image.Resampling.BILINEAR)).astype(int)
    assert abs(plain - expected).mean() < 4
    assert abs(turned - np.rot90(expected, -1)).mean() < 4


def test_no_cache_out_of_proportion(tmp_path):
    for i in range(4):
        (tmp_path / "photos").mkdir(exist_ok=True)
        noise = np.random.RandomState(i).randint(0, 256, (100, 100, 3)).astype(np.uint8)
        Image.fromarray(noise).save(tmp_path / f"photos/{i}.png")  # 30 kB, of 448 x 448 x 3 = 602 kB: 20 times
    table(tmp_path / "l.csv", *((f"{i}.png", "ab"[i % 2]) for i in range(4)))
    flags = ("custom", "--name", "own", "--images", "photos", "--labels", "l.csv")
    run = lambda *more: finish(start(ROOT / "data_prep.py", *flags, *more, cwd=tmp_path))
    sizes = sum(path.stat().st_size for path in (tmp_path / "photos").iterdir())
    assert 4 * 448**2 * 3 / sizes < 20
    assert "the image cache takes 0.0 GB" in run()
    assert np.load(tmp_path / "data/own/cache_train_448.npy").shape == (4, 448, 448, 3)

    shutil.rmtree(tmp_path / "data")
    for i in range(4):
        Image.open(tmp_path / f"photos/{i}.png").save(tmp_path / f"photos/{i}.jpg", quality=50)
        os.replace(tmp_path / f"photos/{i}.jpg", tmp_path / f"photos/{i}.png")
    sizes = sum(path.stat().st_size for path in (tmp_path / "photos").iterdir())
    times = 4 * 448**2 * 3 / sizes
    assert times > 20
    expected = (
        f"no image cache: 0.0 GB, {times:.0f} times the size of the photos; the scripts read the photos themselves"
    )
    assert f"{expected} (--image_size 448 forces a cache)" in run()
    assert not list((tmp_path / "data/own").glob("cache_*"))
    images = common.load(an.Args(dataset="own", data_root=str(tmp_path / "data"), image_size=448)).train.images
    assert not images.cached
    assert images[[0]].shape == (1, 448, 448, 3)
    run("--image_size", 448)
    assert (tmp_path / "data/own/cache_train_448.npy").exists()
    assert "no image cache" not in run()  # it is there


def test_it_ends_with_the_next_command(pets, tmp_path):
    command = [word for key, value in pets.items() for word in (f"--{key}", value)]
    out = finish(
        start(ROOT / "data_prep.py", "custom", *command, "--data_root", "my data", "--image_size", 16, cwd=tmp_path)
    )
    last = out.rstrip().splitlines()[-1]
    assert last == f"next: python {ROOT / 'em_apl.py'} --dataset pets --data_root 'my data' --image_size 16"
    words = shlex.split(last.removeprefix("next: python "))
    assert "best epoch" in finish(start(*words, *SMALL[:4], "--smoke", "--epochs", 1, cwd=tmp_path))
    check = ("--data_root", "my data", "--image_size", 16, "--check")
    assert "next" not in finish(start(ROOT / "data_prep.py", "custom", *command, *check, cwd=tmp_path))


# ---- what was labelled in Label Studio


def task(image, *choices, **more):
    """A task of a JSON export; each of `choices` is an annotation: a list, or None if it was skipped"""
    result = lambda found: [{"type": "choices", "from_name": "labels", "to_name": "image", "value": {"choices": found}}]
    annotations = [{"was_cancelled": found is None, "result": result(found) if found else []} for found in choices]
    return {"id": 7, "data": {"image": image, **more}, "annotations": annotations, "predictions": []}


def test_label_studio(tmp_path, capsys):
    names = ["a/0.png", "a/1.png", "b/0.png", "b/IMG 7 (2).png", "c\xf6d%20.png", *(f"t{i}.png" for i in range(4))]
    for i, name in enumerate(names):
        picture(tmp_path / "photos" / name, seed=i)
    tasks = [
        task("/data/local-files/?d=photos/a/0.png", ["cat", "dog"]),
        task("/data/upload/12/3fa85f64-IMG_7_2.png", ["dog"]),
        task("http://localhost:8080/data/upload/1/abc123-1.png", ["cat"], ["dog"]),  # the last one counts
        task("b/0.png", []),  # done: none applies
        task("/data/local-files/?d=elsewhere%2Fphotos%2Fc%C3%B6d%2520.png", [" cat"], None),
        task("/data/upload/1/00000000-t0.png", ["dog"], file="t3.png"),
        task("t1.png", None),
        task("t1.png"),
    ]
    (tmp_path / "done.json").write_text(json.dumps(tasks))
    labels = table(tmp_path / "l.csv", *((name, ("cat", "dog")[i % 2]) for i, name in enumerate(names)))
    args = dict(name="pets", images=str(tmp_path / "photos"), labels=labels, val=str(tmp_path / "done.json"))
    folder = data_prep.prepare(settings("custom", tmp_path, **args))
    assert prepared(folder, "valid") == {
        "a/0.png": ["cat", "dog"],
        "b/IMG 7 (2).png": ["dog"],
        "a/1.png": ["dog"],
        "b/0.png": [],
        "c\xf6d%20.png": ["cat"],
        "t3.png": ["dog"],
    }
    assert prepared(folder) == {"t0.png": ["dog"], "t1.png": ["cat"], "t2.png": ["dog"]}
    out = capsys.readouterr().out
    skipped, several = "2 skipped or not done and left out", "1 with several annotations, of which the last counts"
    assert f"done.json: Label Studio's, 8 tasks, {skipped}, {several}\n" in out
    assert "note: validation and test images removed from training: 6" in out

    tasks = [
        task("/data/local-files/?d=0.png", ["cat"]),
        task("nowhere/a/1.jpg", ["cat"]),
        task("c/1.png", ["cat"]),
        task("t0.png", ["cow"]),
        task("t1.png", ["cat"], file="gone.png"),
        task("t2.png", ["cat"], file="../l.csv"),
        task("t2.png", ["cat"], file="\0"),
        task(["t2.png"], ["cat"]),
        {"data": {"image": "t2.png"}, "annotations": [{"result": [{"value": {"rectanglelabels": ["cat"]}}]}]},
        task("t3.png", ["cat"]),
        task("t3.png", ["dog"]),
    ]
    (tmp_path / "done.json").write_text(json.dumps(tasks))
    with pytest.raises(SystemExit) as problem:
        data_prep.prepare(settings("custom", tmp_path, **args, classes="cat,dog"))
    for number, expected in (
        (1, "/data/local-files/\\?d=0.png is a/0.png or b/0.png in"),
        (2, "nowhere/a/1.jpg is not there in"),
        (3, "c/1.png is not there in"),
        (4, "'cow' is not one of the 2 classes"),
        (5, "there is no .*photos/gone.png"),
        (6, "../l.csv is outside"),
        (7, "not an image with choices"),
        (8, "not an image with choices"),
        (9, "not an image with choices"),
        (11, "t3.png comes again with other labels"),
    ):
        assert re.search(f"done.json: task {number}: {expected}", str(problem.value)), expected
    assert "error: 10 problems" in str(problem.value)


@pytest.mark.parametrize(
    "content",
    [
        {"tasks": []},
        [{"image": "/data/upload/1/abc-0.png", "choice": "cat"}],  # JSON-MIN
        [1],
        [{"data": {"image": "0.png"}, "annotations": [3]}],
        [{"data": {"image": "0.png"}, "annotations": [{"result": None}]}],
        [{"data": {"image": "0.png"}, "annotations": [{"result": [{"value": "cat"}]}]}],
        "text",
        7,
    ],
)
def test_another_json_is_one_sentence(pets, tmp_path, content):
    (tmp_path / "done.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"done.json is not a JSON export \(not JSON-MIN\) of Label Studio"):
        data_prep.prepare(settings("custom", tmp_path, **{**pets, "val": str(tmp_path / "done.json")}))


def test_tasks_that_nobody_did(pets, tmp_path):
    for content in ([], [{"data": {"image": "8.png"}, "predictions": []}]):
        (tmp_path / "done.json").write_text(json.dumps(content))
        with pytest.raises(SystemExit, match="1 problem, nothing was written:\n  there is no validation image"):
            data_prep.prepare(settings("custom", tmp_path, **{**pets, "val": str(tmp_path / "done.json")}))


def test_a_table_that_was_filled_in(pets, tmp_path):
    """Images that were drawn from the training images, as labelled by somebody in a spreadsheet"""
    filled = "file;labels;suggestions\n0.png;cat, dog;cat\n1.png;;dog\n"
    (tmp_path / "filled.csv").write_text(filled)
    folder = data_prep.prepare(
        settings("custom", tmp_path, **{**pets, "val": str(tmp_path / "filled.csv"), "test": ""})
    )
    assert prepared(folder, "valid") == {"0.png": ["cat", "dog"], "1.png": []}
    assert list(prepared(folder)) == [f"{i}.png" for i in range(2, 8)]


def test_custom_from_folders(tmp_path, capsys):
    for i, name in enumerate(("cat/a.png", "cat/deep/b.png", "dog/c.JPG")):
        picture(tmp_path / "photos" / name, seed=i)
    (tmp_path / "photos/dog/notes.txt").write_text("not an image")
    picture(tmp_path / "photos/loose.png")
    picture(tmp_path / "photos/dog/._c.png")  # as a Mac leaves them
    picture(tmp_path / "photos/.trash/d.png")
    data_prep.prepare(settings("custom", tmp_path, name="pets", images=str(tmp_path / "photos"), from_folders=True))
    assert "left out: 2 files" in (out := capsys.readouterr().out)
    assert "dog/notes.txt, loose.png\n" in out
    data = common.load(an.Args(dataset="pets", data_root=str(tmp_path / "data"), image_size=16, val_fraction=0.0))
    assert data.classes == ["cat", "dog"]
    assert data.train.images.names.tolist() == ["cat/a.png", "cat/deep/b.png", "dog/c.JPG"]
    assert data.train.z.tolist() == [[1, 0], [1, 0], [0, 1]]
    assert data.val is None
    assert data.test is None


def test_custom_names_and_folders_are_checked(pets, tmp_path):
    for changes, expected in (
        (dict(name=""), "name of its own"),
        (dict(name="a/b"), "name of its own"),
        (dict(name=".."), "name of its own"),
        (dict(classes=",".join(["cat"] + ["x" * 90] * 5)), "twice"),
        (dict(from_folders=True), "leave one out"),
        (dict(images="nowhere"), "not a folder"),
        (dict(labels=""), "known labels are missing"),
        (dict(name="voc"), "that is the name of a published data set"),
        (dict(labels="nowhere.csv"), "nowhere.csv can't be read"),
    ):
        with pytest.raises(SystemExit, match=expected):
            data_prep.prepare(settings("custom", tmp_path, **{**pets, **changes}))


def test_summary_and_contact_sheet(pets, tmp_path):
    command = [word for key, value in pets.items() for word in (f"--{key}", value)]
    flags = ("--image_size", 16, "--contact_sheet", "sheet.png")
    out = finish(start(ROOT / "data_prep.py", "custom", *command, *flags, cwd=tmp_path))
    assert "the image cache takes 0.0 GB" in out
    assert "training file: 8 images, 3 classes, 1.00 known positives per image, 0 images without one" in out
    assert "test file: 2 images, 3 classes, 2.00 positives per image" in out
    assert "rarest: grey parrot 2" in out
    assert (tmp_path / "sheet.png").stat().st_size > 10_000
