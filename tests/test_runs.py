"""Scripts as users run them: what a run leaves, kills and resumes, several processes, bad luck."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import time

import numpy as np
import pytest
import torch
from conftest import (
    LEARNT,
    ROOT,
    SMALL,
    TORCHRUN,
    assert_same_run,
    finish,
    metrics,
    only_run,
    start,
    write_cache,
    write_dataset,
)

import an
import common
import data_prep
import scenes


def test_a_run_leaves_all_its_files(trained):
    assert {path.name for path in trained.iterdir()} == {
        *("config.json", "script.py", "metrics.csv", "last.pt", "best.pt", "curve.png", "result.json", ".lock")
    }
    assert trained.name.startswith("squares-an-s0-")
    assert (trained / "script.py").read_text() == (ROOT / "an.py").read_text()
    config = json.loads((trained / "config.json").read_text())
    assert config["settings"]["lr"] == 3e-3
    assert config["versions"]["torch"] == torch.__version__
    rows, result = metrics(trained), json.loads((trained / "result.json").read_text())
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    best = max(range(4), key=lambda i: float(rows[i]["val_mAP"]))  # the first of equals, as in "strictly greater"
    assert result["best_epoch"] == best + 1
    assert result["val_mAP"] == float(rows[best]["val_mAP"])
    assert result["test_mAP"] == float(rows[best]["test_mAP"])
    assert result["last_test_mAP"] == float(rows[-1]["test_mAP"])
    assert 100 * np.mean(list(result["test_AP"].values())) == pytest.approx(result["test_mAP"])


def test_eval_only_reprints_the_mAP(trained, script):
    result = json.loads((trained / "result.json").read_text())
    before = {path: path.stat().st_mtime_ns for path in trained.iterdir()}
    out = script("an.py", "--eval_only", trained)
    assert f"val mAP {result['val_mAP']:.2f}, test mAP {result['test_mAP']:.2f}" in out
    assert before == {path: path.stat().st_mtime_ns for path in trained.iterdir()}


def test_classes_in_another_order_are_not_taken_for_the_same(squares, trained, script, workplace):
    folder, out = workplace / "squares", ("--workers", 0, "--out", "again")
    shutil.copytree(squares, folder)
    runs = {name: workplace / name for name in ("finished", "stopped")}
    for run in runs.values():
        shutil.copytree(trained, run)
        config = json.loads((run / "config.json").read_text())
        config["settings"]["dataset"] = str(folder)
        (run / "config.json").write_text(json.dumps(config))
    (runs["stopped"] / "result.json").unlink()
    script("an.py", "--eval_only", runs["finished"])
    info = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**info, "classes": info["classes"][::-1]}))
    for flags in (
        ("--eval_only", runs["finished"]),
        ("--resume", runs["stopped"]),
        ("--dataset", folder, *SMALL, "--init_from", runs["finished"], *out),
    ):
        with pytest.raises(SystemExit, match=r"was trained for other classes.* in another order: red is now white"):
            script("an.py", *flags)
    assert not (workplace / "again").exists()
    (folder / "dataset.json").write_text(json.dumps({"image_folder": info["image_folder"]}))  # no names: nobody knows
    script("an.py", "--eval_only", runs["finished"])


def test_kill_and_resume_give_the_same_bits(squares, workplace):
    command = ("--dataset", squares, *SMALL, "--epochs", 12, "--workers", 0)
    process = start(ROOT / "an.py", *command, cwd=workplace)
    for epochs, delay in ((1, 0.0), (4, 0.05), (7, 0.15)):  # killed in three places
        while True:
            assert process.poll() is None, "it ended before it was killed"
            found = list(workplace.glob("runs/*/metrics.csv"))
            if found and len(metrics(found[0].parent)) >= epochs:
                break
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert len(metrics(only_run(workplace))) < 12
        process = start(ROOT / "an.py", "--resume", only_run(workplace), cwd=workplace)
    finish(process)
    finish(start(ROOT / "an.py", *command, "--out", "whole", cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    assert_same_run(only_run(workplace), whole)


def test_a_kill_between_the_two_checkpoints_changes_nothing(script, squares, workplace):
    script("an.py", "--dataset", squares, *SMALL, "--epochs", 3, "--workers", 0)
    whole = only_run(workplace)
    torn = workplace / "torn"
    script("an.py", "--dataset", squares, *SMALL, "--epochs", 3, "--workers", 0, "--out", torn, "--max_steps", 10)
    (torn,) = torn.iterdir()  # stopped after the first of three epochs
    config = json.loads((torn / "config.json").read_text())
    config["settings"]["max_steps"] = 0
    (torn / "config.json").write_text(json.dumps(config))
    last = torch.load(torn / "last.pt", weights_only=True)
    last["identity"]["--max_steps"] = 0
    torch.save(last, torn / "last.pt")
    (torn / "result.json").unlink()
    for name in ("best.pt", "metrics.csv"):  # written in a later epoch, whose last.pt never came
        shutil.copy(whole / name, torn / name)
    script("an.py", "--resume", torn)
    assert_same_run(torn, whole)


def test_resume_of_a_finished_run_says_so(trained, script, workplace):
    shutil.copytree(trained, workplace / "copy")
    before = {path: path.stat().st_mtime_ns for path in (workplace / "copy").iterdir()}
    mAP = json.loads((trained / "result.json").read_text())["test_mAP"]
    assert script("an.py", "--resume", "copy") == f"copy: finished after epoch 4, test mAP {mAP:.2f}\n"
    assert before == {path: path.stat().st_mtime_ns for path in (workplace / "copy").iterdir()}


def test_resume_keeps_the_settings(trained, script, workplace):
    shutil.copytree(trained, workplace / "copy")
    with pytest.raises(SystemExit, match="keeps its own settings: leave out --lr"):
        script("an.py", "--resume", "copy", "--lr", 1)
    script("an.py", "--resume", "copy", "--workers", 1)  # where it runs may change


def test_ctrl_c_prints_the_command_to_go_on(squares, workplace):
    process = start(ROOT / "an.py", "--dataset", squares, *SMALL, "--epochs", 500, "--workers", 2, cwd=workplace)
    deadline = time.time() + 120
    while not list(workplace.glob("runs/*/last.pt")) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out = finish(process, code=130)
    assert "Traceback" not in out
    words = re.search(r"stopped; resume with: python (.*)", out)[1].split()
    process = start(*words, cwd=workplace)  # the printed words work from where they were printed
    while "resumed after epoch" not in process.stdout.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()


def test_neither_workers_nor_the_cache_change_a_run(script, workplace):
    folder = write_dataset(workplace / "own", n_train=20, n_test=10)
    command = ("an.py", "--dataset", folder, *SMALL, "--epochs", 2)
    for workers in (0, 1, 4):
        script(*command, "--workers", workers, "--out", f"workers {workers}")
    write_cache(folder)
    for workers in (0, 4):
        script(*command, "--workers", workers, "--out", f"cache, workers {workers}")
        script(*command, "--workers", workers, "--out", f"held, workers {workers}", "--pixels", "device")
    first, *others = (next(path.iterdir()) for path in sorted(workplace.glob("*workers*")))
    assert len(others) == 6
    for other in others:
        assert_same_run(first, other)


@pytest.fixture
def rows_read(monkeypatch):
    """The number of images in every call that reads some"""
    calls, real = [], data_prep.Images.__getitem__
    monkeypatch.setattr(data_prep.Images, "__getitem__", lambda self, rows: calls.append(len(rows)) or real(self, rows))
    return calls


@pytest.fixture
def own(workplace):
    """16 training, 4 validation and 10 test images, cached"""
    return write_cache(write_dataset(workplace / "own", n_train=20, n_test=10))


TRAIN_BYTES = 16 * 32 * 32 * 3


@pytest.mark.parametrize(("name", "anew"), [("an.py", 0), ("lac.py", 16)])  # images that an epoch reads anew
def test_pixels_on_the_device_are_read_once(name, anew, script, own, workplace, rows_read):
    """lac.py's strong views are made on the host; a resumed run may read otherwise"""
    flags = (name, "--dataset", own, *SMALL, "--epochs", 2, "--workers", 0)
    flags += ("--stage", 1, "--dim", 16, "--ffn", 16) if name == "lac.py" else ()
    script(*flags, "--out", "loader", "--pixels", "loader")
    assert sum(rows_read) >= 2 * (16 + 4) + 10
    rows_read.clear()
    script(*flags, "--out", "device", "--pixels", "device")
    assert sum(rows_read) == 16 + 4 + 10 + 2 * anew
    loader, device = (next((workplace / place).iterdir()) for place in ("loader", "device"))
    assert_same_run(loader, device)
    (device / "result.json").unlink()
    script(name, "--resume", device, "--pixels", "loader")


def test_pixels_that_cannot_be_held(script, squares, own, workplace, monkeypatch):
    """One sentence, and no directory"""
    with pytest.raises(SystemExit, match=r"--pixels device can't hold the images: there is no .*cache_train_32.npy"):
        script("an.py", "--dataset", squares, *SMALL, "--pixels", "device")
    monkeypatch.setattr(common, "memory", lambda device=None: 2 * TRAIN_BYTES - 1 if device else 1e12)
    with pytest.raises(SystemExit, match=r"they take 4.92e-05 GB, more than half of 9.83e-05 GB; leave it out"):
        script("an.py", "--dataset", own, *SMALL, "--pixels", "device")
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize(("free", "held"), [(2 * TRAIN_BYTES, True), (2 * TRAIN_BYTES - 1, False)])
def test_auto_holds_pixels_that_fit(free, held, own, monkeypatch):
    """On a device that is not the CPU; `meta` stands for it, and holds shapes"""
    args = an.Args(dataset=str(own), image_size=32)
    train = common.load(args).train
    monkeypatch.setattr(common, "memory", lambda device: free)
    common.Loader(args, torch.device("cpu")).hold(train)
    assert train.pixels is None
    common.Loader(args, torch.device("meta")).hold(train)
    assert (train.pixels is not None) == held
    assert not held or train.pixels.shape == (16, 32, 32, 3)


def make_run(epoch=1, **settings):
    """A run without a directory, in some epoch"""
    run = common.Run(an.Args(device="cpu", **settings), ROOT / "an.py")
    run.epoch = epoch
    return run


def test_a_run_in_another_precision_is_resumed_in_fp16():
    """Its scaler has no state; one that has is restored"""
    run = make_run()
    run.scaler = torch.amp.GradScaler("cpu", enabled=True)
    run.load_state({"scaler": {}}, {})
    assert run.scaler.get_scale() == 2**16
    run.load_state({"scaler": {**run.scaler.state_dict(), "scale": 8.0}}, {})
    assert run.scaler.get_scale() == 8


def test_outputs_of_another_device_or_batch_size_are_close():
    """5 percent of the norm: bfloat16 and TF32 stay below it, another network doesn't"""
    then = torch.tensor([[3.0, -4.0], [0.0, 12.0]])  # norm 13
    assert common.close(then + torch.tensor([[0.0, 0.6], [0.0, 0.0]]), then)
    assert not common.close(then + torch.tensor([[0.0, 0.7], [0.0, 0.0]]), then)
    assert common.close(then.bfloat16().float(), then)
    assert not common.close(then * torch.nan, then)
    assert not common.close(then[:1], then)


def test_seeds_differ_and_epochs_differ(squares):
    def orders(seed, epoch):
        data = common.load(an.Args(dataset=squares, image_size=32))
        batches = list(make_run(epoch, seed=seed, batch_size=16).batches(data.train, flip=True))
        return torch.cat([idx for *_, idx in batches]).tolist(), torch.cat([x for x, *_ in batches])

    (order, x), (again, same), (other, _), (later, _) = orders(0, 1), orders(0, 1), orders(1, 1), orders(0, 2)
    assert sorted(order) == list(range(80))
    assert order == again
    assert torch.equal(x, same)
    assert order != other
    assert order != later


def test_flips_are_those_of_the_image_and_epoch(squares):
    """About half the images come flipped, others in the next epoch, whatever the batch size; none without `flip`."""
    data = common.load(an.Args(dataset=squares, image_size=32))
    plain = common.as_pixels(torch.from_numpy(data.train.images[data.train.rows]))

    def flipped(epoch, batch_size, flip=True):
        result = torch.zeros(len(plain), dtype=torch.bool)
        for x, z, idx in make_run(epoch, batch_size=batch_size).batches(data.train, flip=flip):
            mirrored = (x == plain[idx].flip(3)).flatten(1).all(1)
            assert (mirrored | (x == plain[idx]).flatten(1).all(1)).all()
            assert torch.equal(z, data.train.z[idx])
            result[idx] = mirrored
        return result

    assert 25 < flipped(1, 8).sum() < 55
    assert torch.equal(flipped(1, 8), flipped(1, 5))
    assert not torch.equal(flipped(1, 8), flipped(2, 8))
    assert not flipped(1, 8, flip=False).any()


def test_a_short_last_batch_may_be_dropped(squares):
    data = common.load(an.Args(dataset=squares, image_size=32))
    sizes = lambda n: [len(x) for x, *_ in make_run(batch_size=33).batches(data.train, min_images=n)]
    assert sizes(1) == sizes(14) == [33, 33, 14]
    assert sizes(15) == [33, 33]


def test_observed_labels_of_a_batch_are_a_copy(squares):
    data = common.load(an.Args(dataset=squares, image_size=32))
    before = data.train.z.clone()
    for _, z, _ in make_run().batches(data.train):
        z.fill_(7)
    assert torch.equal(data.train.z, before)


def test_early_stopping(script, squares, workplace):
    script("an.py", "--dataset", squares, *SMALL, "--epochs", 40, "--patience", 0, "--workers", 0)
    values = [float(row["val_mAP"]) for row in metrics(only_run(workplace))]
    assert len(values) < 40
    assert values[-1] <= max(values[:-1])
    assert sorted(set(values[:-1])) == values[:-1]  # it rose every time before


COMPILE = pytest.param(("--compile",), marks=pytest.mark.slow)  # a minute, and a C++ compiler


@pytest.mark.parametrize("flags", [("--amp", "bf16"), ("--known_ratio", 0.5), COMPILE])
def test_flags_train(flags, script, squares, workplace):
    out = script("an.py", "--dataset", squares, *SMALL, "--epochs", 8, "--workers", 0, *flags)
    assert float(re.search(r"last epoch ([\d.]+)\)", out)[1]) > LEARNT, out


LAC = ("lac.py", "--dim", 16, "--ffn", 16, "--project_dim", 8, "--queue", 16)


@pytest.mark.slow  # minutes, and a C++ compiler
@pytest.mark.parametrize(
    ("words", "epochs", "first"),  # graphs after the first epoch: of training and of evaluation
    [
        (("an.py",), 3, {2}),
        (("an.py", "--linear"), 3, {2}),
        (("pu_mlc.py",), 3, {3}),  # mixed images have a graph of their own
        (LAC, 2, {2, 3}),  # of a CPU's code one fits a range of batch sizes only; a stage has two epochs here
    ],
)
def test_nothing_is_compiled_after_the_first_epoch(words, epochs, first, script, squares, monkeypatch):
    """Short last batches everywhere: 8 of 9 in training, 20 and 36 of 64 in evaluation"""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    found, evaluate = [], common.Run.evaluate

    def watched(self, *args, **more):
        evaluate(self, *args, **more)
        found.append(counters["stats"]["unique_graphs"])

    monkeypatch.setattr(common.Run, "evaluate", watched)
    flags = ("--dataset", squares, *SMALL, "--batch_size", 9, "--epochs", epochs, "--workers", 0, "--compile")
    script(*words, *flags)
    assert not counters["graph_break"]
    assert found[0] in first
    assert all(len(set(found[at : at + epochs])) == 1 for at in range(0, len(found), epochs))  # in each stage


def test_penalties_train(script, squares, workplace):
    flags = ("--epochs", 8, "--workers", 0, "--l1", 1e-6, "--l2", 1e-6)
    out = script("baselines.py", "--dataset", squares, *SMALL, *flags)
    assert float(re.search(r"last epoch ([\d.]+)\)", out)[1]) > LEARNT, out


# ---- linear mode


def test_linear_embeds_once_and_serves_as_a_start(script, squares, workplace):
    command = ("an.py", "--dataset", squares, *SMALL, "--workers", 0, "--lr", 0.1, "--epochs", 3)
    assert "warning: --linear on random weights" in script(*command, "--linear", "--out", "linear")
    (linear,) = (workplace / "linear").iterdir()
    embeddings = {path: path.stat().st_mtime_ns for path in (workplace / "data/embeddings").rglob("*")}
    assert len([path for path in embeddings if path.name == "all.npy"]) == 4  # train plain and flipped, val, test
    assert len([path for path in embeddings if path.is_file()]) == 4  # no chunk stays behind

    script(*command, "--linear", "--out", "again")
    (again,) = (workplace / "again").iterdir()
    assert embeddings == {path: path.stat().st_mtime_ns for path in (workplace / "data/embeddings").rglob("*")}
    assert_same_run(linear, again)

    # The head on top of the backbone gives the same mAP as on the embeddings, and end-to-end training starts there.
    result = json.loads((linear / "result.json").read_text())
    assert result["embedding_seconds"] > 0
    config, best = json.loads((linear / "config.json").read_text()), torch.load(linear / "best.pt", weights_only=True)
    config["settings"]["linear"] = best["identity"]["--linear"] = False
    (linear / "config.json").write_text(json.dumps(config))
    torch.save(best, linear / "best.pt")
    assert f"test mAP {result['test_mAP']:.2f}" in script("an.py", "--eval_only", linear)
    script(*command, "--init_from", linear, "--out", "tuned", "--max_steps", 1, "--lr", 1e-12)
    (tuned,) = (workplace / "tuned").iterdir()
    a, b = torch.load(linear / "best.pt", weights_only=True), torch.load(tuned / "last.pt", weights_only=True)
    for key in a["model"]:
        if not key.endswith(("running_mean", "running_var", "num_batches_tracked")):  # one step moves these
            torch.testing.assert_close(a["model"][key], b["model"][key], rtol=0, atol=1e-9)


def test_linear_trains_the_head_alone(script, squares, workplace):
    script("an.py", "--dataset", squares, *SMALL, "--workers", 0, "--linear", "--epochs", 2)
    trained = torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"]
    torch.manual_seed(0)
    untrained = common.Classifier(an.Args(backbone="resnet_small", weights="none"), 4).state_dict()
    changed = {key for key in untrained if not torch.equal(untrained[key], trained[key])}
    assert changed == {"head.weight", "head.bias"}


def test_linear_takes_the_flipped_features_where_the_image_is_flipped():
    run = make_run()
    plain, flipped = np.zeros((5, 2), np.float32), np.ones((5, 2), np.float32)
    split = common.Split(None, np.arange(5), None, features=(plain, flipped))
    (x,) = run.inputs(split, [np.array([3, 0, 4])], [np.array([True, False, True])])
    assert x[:, 0].tolist() == [1, 0, 1]
    (x,) = run.inputs(split, [np.arange(5)])
    assert x.sum() == 0


def test_a_linear_run_is_measured_with_its_own_backbone(script, squares, workplace):
    """Weights in files change or vanish; a run carries its own."""
    weights = workplace / "w.pth"
    torch.manual_seed(7)
    torch.save(scenes.small_resnet().state_dict(), weights)
    first = script(
        "an.py", "--dataset", squares, *SMALL, "--weights", weights, "--linear", "--epochs", 2, "--workers", 0
    )
    weights.unlink()
    again = script("an.py", "--eval_only", only_run(workplace))
    assert re.search(r"val mAP [\d.]+, test mAP [\d.]+", first)[0] in again


def make_cache(workplace):
    return common.EmbeddingCache(workplace / "data", common.Loader(an.Args(workers=0), torch.device("cpu")))


def test_embedding_goes_on_after_a_kill(workplace, monkeypatch):
    folder = write_dataset(workplace / "own", n_train=50, n_test=4)
    monkeypatch.setattr(common, "EVAL_BATCH", 2)  # chunks of 16 images
    split = common.load(an.Args(dataset=str(folder), image_size=16)).train
    calls = []

    def encode(x):
        calls.append(len(x))
        if len(calls) == 12:
            raise KeyboardInterrupt  # in the second chunk
        return x.flatten(1)[:, ::7]

    with pytest.raises(KeyboardInterrupt):
        make_cache(workplace).images(encode, split, {"model": 1}, "")
    cache = make_cache(workplace)
    whole = cache.images(encode, split, {"model": 1}, "")
    assert len(calls) == 12 + 12  # 20 batches in chunks of 8: of the second chunk 4 were lost, the first stayed
    expected = common.as_pixels(torch.from_numpy(split.images[split.rows])).flatten(1)[:, ::7]
    assert np.array_equal(whole, expected)
    assert not list((workplace / "data").rglob(".*"))
    assert cache.seconds > 0


def test_embeddings_of_another_key_or_image_are_not_taken(workplace):
    folder = write_dataset(workplace / "own", n_train=10, n_test=4)
    load = lambda: common.load(an.Args(dataset=str(folder), image_size=16)).train
    cache = make_cache(workplace)
    constant = lambda value: lambda x: torch.full((len(x), 3), float(value))
    assert cache.images(constant(1), load(), {"model": 1}, "")[0, 0] == 1
    assert cache.images(constant(2), load(), {"model": 1}, "")[0, 0] == 1  # the same key: from disk
    assert cache.images(constant(2), load(), {"model": 2}, "")[0, 0] == 2
    path = folder / "images" / load().images.names[load().rows[3]]
    os.utime(path, (1, 1))  # a changed file
    assert cache.images(constant(3), load(), {"model": 1}, "")[0, 0] == 3


def test_two_processes_may_embed_at_once(squares, workplace):
    command = (ROOT / "an.py", "--dataset", squares, *SMALL, "--workers", 0, "--linear", "--epochs", 2)
    both = [start(*command, "--out", out, cwd=workplace) for out in ("a", "b")]
    for process in both:
        finish(process)
    (a,), (b,) = (workplace / "a").iterdir(), (workplace / "b").iterdir()
    assert_same_run(a, b)


# ---- several processes

ONE_STEP = """
import torch, an, common
args = common.parse(an.Args, an.PRESETS)
run = common.Run(args, __file__)
data = common.load(args, run.device)
model = run.prepare(common.Classifier(args, len(data.classes)), data)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for epoch in run.epochs(model=model, optimizer=optimizer):
    model.eval()  # BatchNorm would see half the batch
    for x, z, idx in run.batches(data.train, flip=True):
        loss, _ = an.an_loss(model(x), z)
        run.backward(loss)
        run.step(optimizer)
        run.log(loss=loss)
    run.evaluate(model, data)
"""


def test_two_processes_take_the_steps_of_one(squares, workplace):
    (workplace / "one_step.py").write_text(ONE_STEP)
    command = ("one_step.py", "--dataset", squares, *SMALL, "--batch_size", 7, "--workers", 0, "--epochs", 1, "--lr", 1)
    finish(start(*command, "--out", "one", cwd=workplace))
    finish(start(*TORCHRUN, *command, "--out", "two", cwd=workplace))
    (one,), (two,) = (workplace / "one").iterdir(), (workplace / "two").iterdir()
    a, b = (torch.load(run / "last.pt", weights_only=True)["model"] for run in (one, two))
    for key in a:  # seven images a step, shared as four and three
        torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)
    assert float(metrics(one)[0]["val_mAP"]) == pytest.approx(float(metrics(two)[0]["val_mAP"]), abs=0.5)


def test_two_processes_train_resume_and_measure(trained, squares, workplace):
    result = json.loads((trained / "result.json").read_text())
    out = finish(start(*TORCHRUN, ROOT / "an.py", "--eval_only", trained, "--workers", 0, cwd=workplace))
    assert out.count(f"val mAP {result['val_mAP']:.2f}, test mAP {result['test_mAP']:.2f}") == 1  # rank 0 alone speaks
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 4)
    out = finish(start(*TORCHRUN, ROOT / "an.py", *flags, cwd=workplace))
    assert out.count("epoch  4/4") == 1
    run = only_run(workplace)
    assert len(metrics(run)) == 4
    assert (
        finish(start(*TORCHRUN, ROOT / "an.py", "--resume", run, cwd=workplace)).count(
            ": finished after epoch 4, test mAP"
        )
        == 1
    )


TWO_FORWARDS = """
import copy, torch, an, common
args = common.parse(an.Args, an.PRESETS)
run = common.Run(args, __file__)
data = common.load(args, run.device)
model = run.prepare(common.Classifier(args, len(data.classes)), data)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
for epoch in run.epochs(model=model, optimizer=optimizer):
    for x, z, idx in run.batches(data.train, flip=True):
        alone = copy.deepcopy(common.unwrap(model))
        both = [[net(x), net(x.flip(2))] for net in (model, alone)]
        loss = an.an_loss(both[0][0], z)[0] + an.an_loss(both[0][1], z)[0]
        run.backward(loss)
        run.step(optimizer)
        run.log(loss=loss)
        statistics = [dict(net.named_buffers()) for net in (common.unwrap(model), alone)]
        assert all(torch.equal(statistics[0][name], statistics[1][name]) for name in statistics[0])
    own = common.gather_objects(common.unwrap(model).body[0][1].running_mean.tolist())
    assert own[0] != own[1]
    run.evaluate(model, data)
    own = common.gather_objects([buffer.tolist() for buffer in model.buffers()])
    assert own[0] == own[1]  # what was evaluated, and is saved
"""


def test_two_forwards_before_a_backward(squares, workplace):
    """A process's BatchNorms have the statistics that its own images give: another's would be written into what the
    first forward has kept for its gradient"""
    (workplace / "two_forwards.py").write_text(TWO_FORWARDS)
    out = finish(start(*TORCHRUN, "two_forwards.py", "--dataset", squares, *SMALL, "--epochs", 2, cwd=workplace))
    assert "best epoch" in out
    assert "warning" not in out


def test_no_batch_is_left_after_the_last_step(squares, workplace):
    """A script may make several steps with a batch, and more of them than --max_steps"""
    args = common.parse(an.Args, an.PRESETS, ["--dataset", squares, *SMALL, "--max_steps", "3"])
    run, data = common.Run(args, str(ROOT / "an.py")), common.load(args)
    run.epoch, run.data = 1, data
    for steps, expected in ((0, 3), (2, 1), (3, 0), (4, 0)):
        run.steps = steps
        run.checkpoint = {}
        assert len([None for _ in run.batches(data.train)]) == expected
    assert run.finished


def test_few_images_for_batch_norm(squares, workplace):
    flags = (ROOT / "an.py", "--dataset", squares, *SMALL, "--batch_size", 7, "--max_steps", 2)
    out = finish(start(*TORCHRUN, *flags, cwd=workplace))
    assert len(re.findall("^warning: --batch_size 7 leaves 3 images for .* --sync_bn$", out, re.M)) == 1
    out = finish(start(*TORCHRUN, *flags, "--sync_bn", "--out", "other", cwd=workplace), code=1)
    assert "error: --sync_bn needs CUDA" in out
    assert not (workplace / "other").exists()


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


@pytest.mark.parametrize("way", ["master", pytest.param("rendezvous", marks=pytest.mark.slow)])
def test_two_nodes_are_two_processes(squares, workplace, way):
    flags = ("--dataset", squares, *SMALL, "--epochs", 2)
    (workplace / "threads.py").write_text(
        (ROOT / "an.py").read_text() + "    print('threads', run.loader.threads, flush=True)\n"
    )
    finish(start(*TORCHRUN, ROOT / "an.py", *flags, "--out", "one", cwd=workplace))
    port, node = free_port(), ("-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1")
    meet = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=two")
    if way == "master":
        meet = ("--master_addr=127.0.0.1", f"--master_port={port}")
    nodes = [
        start(*node, f"--node_rank={n}", *meet, "threads.py", *flags, "--out", "two", cwd=workplace) for n in range(2)
    ]
    printed = [finish(process) for process in nodes]
    assert sum(out.count("best epoch") for out in printed) == 1  # rank 0 alone speaks
    (one,), (two,) = (workplace / "one").iterdir(), (workplace / "two").iterdir()
    assert metrics(one) == metrics(two)
    assert (one / "metrics.csv").read_text().count("\n") == 3
    a, b = (torch.load(run / "last.pt", weights_only=True)["model"] for run in (one, two))
    assert all(torch.equal(a[key], b[key]) for key in a)
    # each has its node, and the cores, to itself
    assert all(f"threads {min(8, len(os.sched_getaffinity(0)))}" in out for out in printed)


def test_two_processes_share_the_embedding(squares, workplace):
    finish(start(*TORCHRUN, ROOT / "an.py", "--dataset", squares, *SMALL, "--linear", "--epochs", 2, cwd=workplace))
    two = {path.parent.name: np.load(path) for path in workplace.rglob("all.npy")}
    (workplace / "other").mkdir()
    finish(start(ROOT / "an.py", "--dataset", squares, *SMALL, "--linear", "--epochs", 2, cwd=workplace / "other"))
    one = {path.parent.name: np.load(path) for path in (workplace / "other").rglob("all.npy")}
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=1e-5)


# ---- what a checkpoint carries

STATEFUL = """
import types, torch, an, common
args = common.parse(an.Args, an.PRESETS)
run = common.Run(args, __file__)
data = common.load(args, run.device)
model = run.prepare(common.Classifier(args, len(data.classes)), data)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
matrix = torch.zeros(len(data.train), len(data.classes), requires_grad=True)
optimizers = torch.optim.Adam(model.parameters(), lr=args.lr), torch.optim.Adam([matrix], lr=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], args.lr, total_steps=30)
labels = types.SimpleNamespace(counts=torch.zeros(len(data.train)), matrix=matrix, seen=torch.zeros(0), round=0)
labels.last, labels.none_yet = "", None
state = dict(model=model, ema=ema, first=optimizers[0], second=optimizers[1], scheduler=scheduler, labels=labels)
for epoch in run.epochs(**state):
    for x, z, idx in run.batches(data.train, flip=True):
        logits = model(torch.nn.functional.dropout(x))
        loss = an.an_loss(logits, z)[0] + an.an_loss(matrix[idx] + logits.detach(), z)[0]
        run.backward(loss)
        run.step(*optimizers)
        scheduler.step()
        ema.update_parameters(model)
        labels.counts[idx] += epoch
        run.log(loss=loss)
    run.evaluate(ema.module, data)
    labels.counts = labels.counts + 0  # rebound, and after evaluation: what is saved is what the loop's body leaves
    labels.seen = torch.arange(epoch)  # of another shape in every epoch
    labels.none_yet = torch.tensor(epoch)
    labels.round, labels.last = labels.round + 1, f"epoch {epoch}"
    if epoch == 3 and STOP:
        raise SystemExit("stopped")
torch.save(vars(labels), "labels.pt")
"""


def test_emas_schedules_and_namespaces_are_resumed(squares, workplace):
    """Stopped in the body of epoch 3, a run goes on after epoch 2"""
    (workplace / "method.py").write_text(STATEFUL.replace("STOP", "not args.resume"))
    flags = ("--dataset", squares, *SMALL, "--epochs", 3, "--workers", 0)
    finish(start("method.py", *flags, "--out", "stopped", cwd=workplace), code=1)
    (stopped,) = (workplace / "stopped").iterdir()
    last = torch.load(stopped / "last.pt", weights_only=True)
    assert (last["run"]["epoch"], last["labels"]["round"], last["labels"]["last"]) == (2, 2, "epoch 2")
    assert last["labels"]["counts"].tolist() == [3.0] * 80
    assert "resumed after epoch 2" in finish(start("method.py", "--resume", stopped, cwd=workplace))
    labels = torch.load("labels.pt")
    assert labels["counts"].tolist() == [6.0] * 80  # every image once in each of epochs 1, 2 and 3
    assert labels["seen"].tolist() == [0, 1, 2]
    assert (labels["round"], labels["last"], labels["none_yet"].item()) == (3, "epoch 3", 3)

    (workplace / "method.py").write_text(STATEFUL.replace("STOP", "False"))
    finish(start("method.py", *flags, "--out", "whole", cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    assert_same_run(stopped, whole)
    assert torch.equal(torch.load("labels.pt")["matrix"], labels["matrix"])  # which the second optimizer holds
    assert labels["matrix"].any()
    result = json.loads((whole / "result.json").read_text())  # best.pt holds the EMA, which was measured
    assert f"test mAP {result['test_mAP']:.2f}" in finish(start("method.py", "--eval_only", whole, cwd=workplace))


def test_best_weights_know_their_model(trained):
    """predict.py builds the model again; code that changed in between is found by its logits"""
    best = torch.load(trained / "best.pt", weights_only=True)
    assert best["model_class"] == ["common", "Classifier"]
    assert best["probe"].shape == (2, 4)
    args = an.Args(backbone="resnet_small", weights="none", image_size=32)
    model = common.Classifier(args, 4)
    checkpoint = common.load_weights(model, trained / "best.pt")
    common.check_probe(model, 32, checkpoint, "x")
    model.std *= 0.5  # not among the weights
    with pytest.raises(SystemExit, match="the model's code has changed since x was trained"):
        common.check_probe(model, 32, checkpoint, "x")


def test_changed_code_is_found_before_it_is_used(trained, script, workplace, monkeypatch):
    shutil.copytree(trained, workplace / "copy")
    (workplace / "copy/result.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (workplace / "copy").iterdir()}
    features = common.Classifier.features
    monkeypatch.setattr(common.Classifier, "features", lambda self, x: features(self, 2 * x))
    for flag, name in (("--eval_only", "best.pt"), ("--resume", "last.pt")):
        with pytest.raises(SystemExit, match=f"the model's code has changed since copy/{name} was trained"):
            script("an.py", flag, "copy")
    assert before == {path: path.stat().st_mtime_ns for path in (workplace / "copy").iterdir()}


# ---- bad luck


def test_a_checkpoint_in_the_working_directory_is_not_taken(trained, squares, script, workplace, monkeypatch):
    """Of a user who stands in a run's directory"""
    shutil.copytree(trained, workplace / "copy")
    monkeypatch.chdir(workplace / "copy")
    result = json.loads((trained / "result.json").read_text())
    assert f"val mAP {result['val_mAP']:.2f}, test mAP {result['test_mAP']:.2f}" in script("an.py", "--eval_only", ".")
    flags = ("--dataset", squares, *SMALL, "--init_from", trained, "--max_steps", 1, "--lr", 1e-12)
    script("an.py", *flags, "--out", workplace / "tuned")
    (tuned,) = (workplace / "tuned").iterdir()
    a, b = (torch.load(path, weights_only=True)["model"] for path in (trained / "best.pt", tuned / "last.pt"))
    torch.testing.assert_close(a["head.weight"], b["head.weight"], rtol=0, atol=1e-9)


def test_runs_of_the_same_second_have_directories_of_their_own(script, squares, workplace, monkeypatch):
    monkeypatch.setattr(common.time, "strftime", lambda _: "20260101-000000")
    for _ in range(3):
        script("an.py", "--dataset", squares, *SMALL, "--max_steps", 1)
    name = "squares-an-s0-20260101-000000"
    assert sorted(path.name for path in (workplace / "runs").iterdir()) == [name, f"{name}-2", f"{name}-3"]
    for run in (workplace / "runs").iterdir():
        assert (run / "result.json").exists()


def test_nothing_is_left_of_a_run_that_could_not_start(script, squares, workplace):
    for flags in (("--dataset", "vocc"), ("--dataset", squares, *SMALL, "--weights", "typo.pth")):
        with pytest.raises(SystemExit, match="error: "):
            script("an.py", *flags)
    assert not (workplace / "runs").exists()


def test_tensorboard_is_there_or_is_asked_for(script, squares, workplace):
    command = ("an.py", "--dataset", squares, *SMALL, "--epochs", 1, "--workers", 0, "--tensorboard")
    if importlib.util.find_spec("tensorboard"):
        script(*command)
        assert list(only_run(workplace).glob("events*"))
    else:
        with pytest.raises(SystemExit, match="pip install tensorboard"):
            script(*command)
        assert not (workplace / "runs").exists()


def test_weights_that_a_last_step_ruined_stop_the_run(script, squares, workplace):
    with pytest.raises(SystemExit, match="not finite"):
        script("an.py", "--dataset", squares, *SMALL, "--lr", 1e30, "--max_steps", 1)
    assert not (only_run(workplace) / "best.pt").exists()


def test_a_bad_loss_is_found_within_an_epoch(script, squares, workplace, monkeypatch):
    monkeypatch.setattr(common, "CHECK_EVERY", 3)
    with pytest.raises(SystemExit, match=r"the loss is nan in epoch 1, step \d+ \(training rows"):
        script("an.py", "--dataset", squares, *SMALL, "--lr", 1e30)


def test_a_loss_that_is_not_finite_stops_the_run(trained, script, workplace):
    shutil.copytree(trained, workplace / "copy")
    (workplace / "copy/result.json").unlink()
    last = torch.load(workplace / "copy/last.pt", weights_only=True)
    last["run"]["epoch"] = 2
    last["model"]["head.bias"].fill_(float("nan"))
    del last["probe"]  # which knows the weights as they were
    torch.save(last, workplace / "copy/last.pt")
    before = (workplace / "copy/last.pt").read_bytes()
    with pytest.raises(SystemExit, match=r"the loss is nan in epoch 3, step 1 \(training rows \d+(, \d+){7}\)"):
        script("an.py", "--resume", "copy")
    assert (workplace / "copy/last.pt").read_bytes() == before


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_a_truncated_image_is_named(script, workplace, workers):
    folder = write_dataset(workplace / "own", n_train=10, n_test=4)
    path = folder / "images" / "val_2.png"
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(SystemExit, match=r"val_2.png can't be read"):
        script("an.py", "--dataset", folder, *SMALL, "--epochs", 1, "--workers", workers)


def test_a_directory_that_cant_be_written(script, squares, workplace):
    (workplace / "file").write_text("")
    with pytest.raises(SystemExit, match="can't be written"):
        script("an.py", "--dataset", squares, *SMALL, "--out", workplace / "file" / "runs")


def test_small_mistakes_give_one_sentence(trained, script, squares, workplace):
    tiny = ("--dataset", squares, *SMALL)
    for flags, expected in (
        (("--amp", "fp16", "--device", "cpu"), "needs CUDA"),
        (("--device", "gpu"), "--device gpu"),
        (("--device", "meta"), "only cpu and cuda"),
        (("--init_from", "nowhere"), "no best.pt"),
        (("--init_from", trained, "--backbone", "resnet18"), "another --backbone"),
        (("--weights", "w.pth"), "no file w.pth"),
    ):
        with pytest.raises(SystemExit, match=expected):
            script("an.py", *tiny, *flags)


def test_an_interrupted_write_leaves_the_old_file(workplace):
    path = workplace / "file"
    path.write_text("old")

    def write_half():
        with common.replacing(path) as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_text() == "old"
    assert list(workplace.iterdir()) == [path]


def test_f1_is_also_measured_at_tuned_thresholds(script, squares, workplace):
    """As a loop over the test images counts it, with the thresholds that validation gave"""
    out = script("an.py", "--dataset", squares, *SMALL, "--epochs", 3)
    run = only_run(workplace)
    result = json.loads((run / "result.json").read_text())
    args = common.parse(an.Args, an.PRESETS, ["--dataset", squares, *SMALL])
    data, model = common.load(args), common.Classifier(args, 4)
    model.load_state_dict(torch.load(run / "best.pt", weights_only=True)["model"])
    x = common.as_pixels(torch.from_numpy(data.test.images[data.test.rows]))
    with torch.no_grad():
        p = model.eval()(x).sigmoid().tolist()
    y, thresholds = data.test.y.tolist(), list(result["thresholds"].values())
    guesses = [[score >= t for score, t in zip(row, thresholds)] for row in p]
    hits = sum(guess and label == 1 for g, row in zip(guesses, y) for guess, label in zip(g, row))
    precision, recall = hits / sum(map(sum, guesses)), hits / sum(map(sum, y))
    expected = 100 * 2 * precision * recall / (precision + recall)
    assert result["test_F1_tuned"]["OF1"] == pytest.approx(expected, abs=0.6)  # one image more or less, by rounding
    assert f"OF1 {result['test_F1_tuned']['OF1']:.2f} and CF1 {result['test_F1_tuned']['CF1']:.2f} at tuned" in out
    assert f"{result['test_F1_tuned']['OF1']:.2f} and" in script("an.py", "--eval_only", run)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_nothing_is_refused(share, script, squares, workplace):
    with pytest.raises(SystemExit, match=f"--val_fraction {share} of 100 images leaves none"):
        script("an.py", "--dataset", squares, *SMALL, "--val_fraction", share)
    assert not (workplace / "runs").exists()


def test_a_checkpoint_of_an_optimizer_that_was_not_fused_is_resumed(script, squares, workplace, monkeypatch):
    flags = ("--dataset", squares, *SMALL, "--epochs", 2)
    save = common.Run.save

    def save_unfused(run, *arguments):
        run.state["optimizer"].param_groups[0]["fused"] = None
        save(run, *arguments)
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(common.Run, "save", save_unfused)
        with pytest.raises(SystemExit, match="killed"):
            script("an.py", *flags)
    script("an.py", "--resume", only_run(workplace))
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    assert last["optimizer"]["param_groups"][0]["fused"] is True
    assert last["run"]["epoch"] == 2
