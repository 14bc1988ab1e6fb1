"""Runs that go on wherever they stop, and files that are whole or refused: real processes, real signals."""

import csv
import io
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SMALL,
    TORCHRUN,
    assert_same_run,
    finish,
    kill_inside,
    metrics,
    only_run,
    start,
    write_dataset,
)
from PIL import Image

import common
import data_prep
import scenes

FLAGS = (*SMALL, "--workers", 0, "--epochs", 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, squares):
    """A run of FLAGS that nobody stopped"""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(ROOT / "an.py", "--dataset", squares, *FLAGS, cwd=folder))
    return only_run(folder)


def wait_for(condition, process, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# ---- the same command goes on


def test_the_same_command_with_a_name_goes_on(squares, whole, workplace):
    command = (
        ROOT / "an.py",
        "--dataset",
        squares,
        *FLAGS,
        "--out",
        "killed",
        "--name",
        "first",
        "--save_minutes",
        1e-9,
    )
    for epoch in (1, 2):
        kill_inside(start(*command, cwd=workplace), workplace, epoch)
    out = finish(start(*command, cwd=workplace))
    assert "resumed after epoch 1 and" in out
    assert [path.name for path in (workplace / "killed").iterdir()] == ["first"]
    assert_same_run(workplace / "killed/first", whole)

    before = {path: path.stat().st_mtime_ns for path in (workplace / "killed/first").iterdir()}
    mAP = json.loads((whole / "result.json").read_text())["test_mAP"]
    assert finish(start(*command, cwd=workplace)) == f"killed/first: finished after epoch 3, test mAP {mAP:.2f}\n"
    assert before == {path: path.stat().st_mtime_ns for path in (workplace / "killed/first").iterdir()}


def test_a_finished_run_tells_what_has_changed_since(squares, whole, script, workplace):
    shutil.copytree(whole, workplace / "runs/first")
    shutil.copytree(squares, workplace / "data/squares", symlinks=True, copy_function=shutil.copyfile)  # new files
    mine = workplace / "an.py"
    mine.write_text((ROOT / "an.py").read_text() + "# mine\n")
    flags = ("--dataset", "squares", *FLAGS, "--name", "first")
    written, changed, finished = script(mine, *flags).splitlines()
    assert changed.startswith("note: an.py has changed since runs/first began")
    assert finished.startswith("runs/first: finished after epoch 3, test mAP")
    assert written == "note: squares was written after runs/first: if it has changed, start a new run"
    config = json.loads((workplace / "runs/first/config.json").read_text())
    config["settings"]["dataset"] = str(workplace / "data/squares")
    (workplace / "runs/first/config.json").write_text(json.dumps(config))
    assert "squares was written after runs/first" in script("an.py", "--eval_only", "runs/first")


def test_a_name_belongs_to_one_run(squares, whole, script, workplace):
    shutil.copytree(whole, workplace / "runs/first")
    for name, flags, expected in (
        ("an.py", ("--seed", 1), "has other settings: --seed was 0 and is 1. Choose the same"),
        ("an.py", ("--lr", 1), "--lr was 0.003 and is 1.0"),
        ("em_apl.py", (), "was made by an.py"),
        ("an.py", ("--resume", whole), "leave it out, the run has a directory"),
        ("an.py", ("--name", "../x"), "a name is made of letters"),
    ):
        with pytest.raises(SystemExit, match=expected):
            script(name, "--dataset", squares, *FLAGS, "--name", "first", *flags)
    (workplace / "runs/mine").mkdir()
    (workplace / "runs/mine/last.pt").write_text("")
    with pytest.raises(SystemExit, match=r"runs/mine is not a run directory, it contains last\.pt"):
        script("an.py", "--dataset", squares, *FLAGS, "--name", "mine")


def test_a_directory_that_was_only_made_is_begun(squares, script, workplace):
    (workplace / "runs/first").mkdir(parents=True)  # killed before config.json came
    shutil.copy(ROOT / "an.py", workplace / "runs/first/script.py")
    script("an.py", "--dataset", squares, *FLAGS, "--name", "first", "--max_steps", 1)
    assert (workplace / "runs/first/result.json").exists()


@pytest.mark.parametrize("name", [(), pytest.param(("--name", "first"), marks=pytest.mark.slow)])
def test_torchrun_restarts_go_on(squares, workplace, name):
    torchrun = (*TORCHRUN[:-1], "--nproc_per_node=2", "--max-restarts=2", ROOT / "an.py")
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 4)
    finish(start(*torchrun, *flags, "--out", "whole", cwd=workplace))
    process = start(*torchrun, *flags, "--out", "again", *name, cwd=workplace)
    wait_for(lambda: any(len(metrics(path.parent)) >= 2 for path in workplace.glob("again/*/metrics.csv")), process)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    assert "resumed after epoch" in finish(process)
    (again,), (whole,) = ((workplace / out).iterdir() for out in ("again", "whole"))
    assert_same_run(again, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_end_a_run_as_ctrl_c_does(squares, whole, workplace, number):
    process = start(ROOT / "an.py", "--dataset", squares, *FLAGS, "--save_minutes", 1e-9, cwd=workplace)
    wait_for(lambda: list(workplace.glob("runs/*/last.pt")), process)
    process.send_signal(number)
    out = finish(process, code=143)
    run = only_run(workplace)
    assert f"stopped; resume with: python {ROOT / 'an.py'} --resume {run.relative_to(workplace)}" in out
    assert "Traceback" not in out
    finish(start(ROOT / "an.py", "--resume", run, cwd=workplace))
    assert_same_run(run, whole)


@pytest.mark.slow
def test_sigterm_ends_a_run_of_two_processes(squares, workplace):
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 4)
    process = start(*TORCHRUN, ROOT / "an.py", *flags, cwd=workplace)
    wait_for(lambda: list(workplace.glob("runs/*/last.pt")), process)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert "stopped; resume with: torchrun ..." in out + err
    finish(start(*TORCHRUN, ROOT / "an.py", "--resume", only_run(workplace), cwd=workplace))
    finish(start(*TORCHRUN, ROOT / "an.py", *flags, "--out", "whole", cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    assert_same_run(only_run(workplace), whole)


def test_two_processes_go_on_inside_an_epoch(squares, workplace, monkeypatch):
    """Each has its own random numbers, logged losses and statistics"""
    script = workplace / "noisy.py"
    lines = (
        "            with run.autocast():\n",
        "            common.CHECK_EVERY = 1\n            x += torch.rand_like(x)\n",
    )
    text = (ROOT / "pu_mlc.py").read_text()
    assert text.count(lines[0]) >= 1
    script.write_text(text.replace(lines[0], lines[1] + lines[0], 1))
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 3)
    finish(start(*TORCHRUN, script, *flags, "--out", "whole", cwd=workplace))
    process = start(*TORCHRUN, script, *flags, "--out", "killed", "--save_minutes", 1e-9, cwd=workplace)
    inside, found = None, []
    while not inside or inside["done"] < 4:
        assert process.poll() is None, process.communicate()
        found = found or list(workplace.glob("killed/*/inside.pt"))
        last = torch.load(found[0], weights_only=True) if found and found[0].exists() else {"run": {"epoch": 0}}
        inside = last["inside"] if last["run"]["epoch"] == 2 else None
    workers = children(process.pid)
    for pid in (process.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert len(inside["processes"]) == 2
    finish(start(*TORCHRUN, script, "--resume", found[0].parent, cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    assert_same_run(found[0].parent, whole)


@pytest.mark.parametrize(  # the others' tests do it
    "name", ["em_apl", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vlpl", "pu_mlc", "baselines"))]
)
def test_every_method_goes_on_inside_an_epoch(name, squares, tiny_clip, workplace):
    more = {"em_apl": ("--warmup", 1), "vlpl": ("--clip_model", f"local-dir:{tiny_clip}", "--theta", 0.1)}
    flags = ("--dataset", squares, *FLAGS, *more.get(name, ()))
    finish(start(ROOT / f"{name}.py", *flags, "--out", "whole", cwd=workplace))
    process = start(ROOT / f"{name}.py", *flags, "--out", "killed", "--save_minutes", 1e-9, cwd=workplace)
    kill_inside(process, workplace, 2)
    (killed,), (whole,) = ((workplace / out).iterdir() for out in ("killed", "whole"))
    finish(start(ROOT / f"{name}.py", "--resume", killed, cwd=workplace))
    assert_same_run(killed, whole)


def test_a_pass_that_was_done_is_not_repeated(squares, workplace):
    """Two loops over the data in an epoch, the second one resumed in its middle"""
    text = (ROOT / "an.py").read_text()
    head, loop = text.split("        for x, z, idx")
    body, end = loop.split("        run.evaluate")
    script = workplace / "twice.py"
    script.write_text(f"{head}        for x, z, idx{body}        for x, z, idx{body}        run.evaluate{end}")
    flags = ("--dataset", squares, *FLAGS)
    finish(start(script, *flags, "--out", "whole", cwd=workplace))
    process = start(script, *flags, "--out", "killed", "--save_minutes", 1e-9, cwd=workplace)
    inside = {"pass": 1}
    while not (inside and inside["pass"] == 2 and inside["done"] > 2):
        assert process.poll() is None, process.communicate()
        for path in workplace.glob("killed/*/inside.pt"):
            inside = torch.load(path, weights_only=True)["inside"] if path.exists() else inside
    process.kill()
    process.communicate()
    finish(start(script, "--resume", path.parent, cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    assert torch.load(whole / "last.pt", weights_only=True)["run"]["steps"] == 3 * 20
    assert_same_run(path.parent, whole)


def test_sigterm_saves_the_step(squares, whole, workplace):
    for wait in (0.5, 2, 4):  # on a busy machine the first step may come late
        process = start(ROOT / "an.py", "--dataset", squares, *FLAGS, "--save_minutes", 0, "--out", wait, cwd=workplace)
        assert process.stdout.readline()  # it has begun
        time.sleep(wait)
        process.terminate()
        finish(process, code=143)
        (run,) = (workplace / str(wait)).iterdir()
        if saved := (run / "inside.pt").exists() or (run / "last.pt").exists():
            break
    assert saved
    out = finish(start(ROOT / "an.py", "--resume", run, cwd=workplace))
    assert "resumed after epoch" in out
    assert_same_run(run, whole)


def test_sigterm_between_two_batches_saves_too(squares, workplace):
    """Images take long to read here, so that the signal arrives while the loop waits for them"""
    script, loop = workplace / "slow.py", "run.batches(data.train, flip=True)"
    text = (ROOT / "an.py").read_text().replace("import common\n", "import common\nimport time\n", 1)
    slow = text.replace(loop, loop[:-1] + ", augment=lambda image, row: time.sleep(0.1) or image)")
    script.write_text(slow.replace("run.log(loss=loss", 'print("step", flush=True)\n            run.log(loss=loss'))
    flags = ("--dataset", squares, *FLAGS, "--workers", 0, "--save_minutes", 0)
    process = start(script, *flags, cwd=workplace)
    wait_for(lambda: process.stdout.readline() == "step\n", process)
    time.sleep(0.3)  # of 0.8 until the next batch
    process.terminate()
    finish(process, code=143)
    assert torch.load(only_run(workplace) / "inside.pt", weights_only=True)["inside"]["done"]


def test_with_other_processes_the_epoch_begins_again(squares, workplace):
    flags = ("--dataset", squares, *FLAGS, "--out", "killed", "--save_minutes", 1e-9)
    kill_inside(start(ROOT / "an.py", *flags, cwd=workplace), workplace, 2)
    (run,) = (workplace / "killed").iterdir()
    out = finish(start(*TORCHRUN, ROOT / "an.py", "--resume", run, cwd=workplace))
    assert "note: started with 1 processes" in out
    assert "resumed after epoch 1\n" in out
    assert [row["epoch"] for row in metrics(run)] == ["1", "2", "3"]
    assert not (run / "inside.pt").exists()


def test_other_images_and_another_script_are_noticed(workplace):
    folder = write_dataset(workplace / "own")
    kill_inside(
        start(ROOT / "an.py", "--dataset", folder, *FLAGS, "--out", "killed", "--save_minutes", 1e-9, cwd=workplace),
        workplace,
        2,
    )
    (run,) = (workplace / "killed").iterdir()
    for name in ("images", "labels"):
        path = folder / f"formatted_train_{name}.npy"
        np.save(path, np.load(path)[::-1])
    out = finish(start(ROOT / "an.py", "--resume", run, cwd=workplace), code=1)
    assert "inside.pt was made with other training images or observed labels, or in another order" in out
    for name in ("images", "labels"):
        path = folder / f"formatted_train_{name}.npy"
        np.save(path, np.load(path)[::-1])
    (workplace / "an.py").write_text((ROOT / "an.py").read_text() + "# mine\n")
    out = finish(start(workplace / "an.py", "--resume", run, cwd=workplace))
    assert "note: an.py has changed since" in out


# ---- one writer


def test_a_run_has_one_writer(squares, workplace):
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 200, "--name", "first")
    process = start(ROOT / "an.py", *flags, cwd=workplace)
    wait_for(lambda: (workplace / "runs/first/last.pt").exists(), process)
    for command in (flags, ("--resume", "runs/first")):
        out = finish(start(ROOT / "an.py", *command, cwd=workplace), code=1)
        assert f"error: runs/first is in use by process {process.pid} on {os.uname().nodename}" in out
        assert len(out.splitlines()) == 1
    process.kill()  # the lock dies with it
    process.communicate()
    second = start(ROOT / "an.py", *flags, cwd=workplace)
    assert second.stdout.readline().startswith("runs/first: resumed after epoch")
    second.kill()
    second.communicate()


def test_orphans_of_a_killed_torchrun_end(squares, workplace):
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 1000, "--name", "first")
    process = start(*TORCHRUN, ROOT / "an.py", *flags, cwd=workplace)
    wait_for(lambda: (workplace / "runs/first/last.pt").exists(), process)
    workers = children(process.pid)
    process.kill()
    running = lambda pid: os.path.exists(f"/proc/{pid}") and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    end = time.monotonic() + 60
    while any(map(running, workers)):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_process_that_stops_ends_the_others(squares, workplace):
    flags = ("--dataset", squares, *SMALL, "--workers", 0, "--epochs", 100000)
    process = start(*TORCHRUN, ROOT / "an.py", *flags, cwd=workplace)
    wait_for(lambda: list(workplace.glob("runs/*/last.pt")), process)
    time.sleep(5)  # some beats
    stopped, began = children(process.pid)[1], time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    _, err = process.communicate(timeout=100)  # torchrun itself waits 30 s before it kills the one that stopped
    assert time.monotonic() - began < 90
    assert "process 1 has given no sign of life for 40 s: process 0 ends" in err


# ---- checkpoints


def damaged(run, folder):
    shutil.copytree(run, folder)
    (folder / "result.json").unlink()
    return folder


def test_one_flipped_bit_is_found(whole, script, workplace):
    run = damaged(whole, workplace / "run")
    for name, flag in (("best.pt", "--eval_only"), ("last.pt", "--resume")):
        content = bytearray((run / name).read_bytes())
        with zipfile.ZipFile(run / name) as file:
            largest = max(file.infolist(), key=lambda member: member.file_size)
        content[largest.header_offset + 200 + largest.file_size // 2] ^= 4
        (run / name).write_bytes(content)
        with pytest.raises(SystemExit, match=rf"{name} is not a readable file of weights: .* has changed on the disk"):
            script("an.py", flag, run)


def test_checkpoints_of_another_run_are_refused(squares, whole, script, workplace):
    script("an.py", "--dataset", squares, *FLAGS, "--epochs", 3, "--seed", 1, "--name", "other")
    for name, flag in (("best.pt", "--eval_only"), ("last.pt", "--resume")):
        run = damaged(whole, workplace / f"{name} of another")
        shutil.copy(workplace / "runs/other" / name, run / name)
        with pytest.raises(SystemExit, match=rf"{name} is a checkpoint of another run: --seed was 1 and is 0"):
            script("an.py", flag, run)
        (run / name).write_bytes(b"")
        with pytest.raises(SystemExit, match=f"{name} is not a readable file of weights"):
            script("an.py", flag, run)
        checkpoint = torch.load(whole / name, weights_only=True)
        for key in ("model", "identity", "classes"):
            torch.save({k: v for k, v in checkpoint.items() if k != key}, run / name)
            with pytest.raises(SystemExit, match=f"{name} lacks {key}: it is not a run's checkpoint"):
                script("an.py", flag, run)
    out = finish(start(ROOT / "predict.py", run, "--export", "x.pt2", cwd=workplace))  # its best.pt is its own
    assert "x.pt2" in out
    shutil.copy(workplace / "runs/other/best.pt", run / "best.pt")
    assert "--seed was 1 and is 0" in finish(
        start(ROOT / "predict.py", run, "--export", "x.pt2", cwd=workplace), code=1
    )


def test_damaged_embeddings_are_computed_again(squares, script, workplace):
    command = ("an.py", "--dataset", squares, *FLAGS, "--linear")
    script(*command, "--name", "first")
    files = sorted((workplace / "data/embeddings").glob("*/all.npy"))
    before = [path.read_bytes() for path in files]
    for damage in (
        lambda content: content[:-100],
        lambda content: content[:1000] + bytes([content[1000] ^ 1]) + content[1001:],
        lambda content: b"",
        lambda content: b"\x93NUMPY\x01\x00\xff\xff" + content[10:],
    ):
        files[0].write_bytes(damage(before[0]))
        script(*command, "--name", f"again{time.monotonic_ns()}")
        assert [path.read_bytes() for path in files] == before
    rows = np.load(files[0])
    assert rows.dtype == np.float32
    assert rows.ndim == 2


def test_a_damaged_chunk_is_computed_again(workplace):
    cache = common.EmbeddingCache("data", None)
    calls = []

    def encode(batches):
        for idx in batches:
            calls.append(len(idx))
            yield torch.from_numpy(idx).float().view(-1, 1).expand(-1, 3)

    key = {"what": "test"}
    cache.rows(encode, 1200, key, "numbers", "row")
    (whole,) = (workplace / "data/embeddings").glob("*/all.npy")
    rows, folder = np.load(whole), whole.parent
    whole.unlink()
    for at in (0, 512, 1024):  # as a killed process leaves them, the second one damaged
        data_prep.write_rows(folder / f"{at:09d}-512.npy", [rows[at : at + 512]])
    content = bytearray((folder / "000000512-512.npy").read_bytes())
    content[300] ^= 1
    (folder / "000000512-512.npy").write_bytes(content)
    calls.clear()
    assert np.array_equal(cache.rows(encode, 1200, key, "numbers", "row"), rows)
    assert sum(calls) == 512
    assert [path.name for path in folder.iterdir()] == ["all.npy"]


def limited(size):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("flags", [("--linear",), ()])
def test_a_full_disk_is_a_sentence(squares, workplace, flags):
    """A limit on the size of files stands for it"""
    command = [sys.executable, ROOT / "an.py", "--dataset", squares, *FLAGS, *flags]
    done = subprocess.run(
        [*map(str, command)],
        cwd=workplace,
        capture_output=True,
        text=True,
        preexec_fn=limited(4000 if flags else 100_000),
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "can't be written" in done.stderr


# ---- what is written where


def test_devices_fifos_and_links_are_written_through(workplace):
    path = workplace / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE, text=True)
    data_prep.write_json(path, {"a": 1})
    assert json.loads(reader.communicate(timeout=10)[0]) == {"a": 1}
    assert stat.S_ISFIFO(path.stat().st_mode)

    data_prep.write_json(workplace / "real.json", {"a": 1})
    (workplace / "link.json").symlink_to("real.json")
    data_prep.write_json(workplace / "link.json", {"a": 2})
    assert (workplace / "link.json").is_symlink()
    assert json.loads((workplace / "real.json").read_text()) == {"a": 2}

    data_prep.write_json(Path("/dev/null"), {"a": 1})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(SystemExit, match="it is a folder"):
        data_prep.write_json(workplace, {})


def test_predictions_go_to_the_output_or_nowhere(whole, squares, workplace):
    image = f"{squares}/images/val_0.png"
    out = subprocess.run(
        [sys.executable, str(ROOT / "predict.py"), str(whole), image, "--csv", "/dev/stdout"],
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    rows = list(csv.reader(out.stdout.splitlines()[1:]))
    assert rows[0] == ["image", "red", "green", "blue", "white"]
    assert len(rows) == 2
    finish(start(ROOT / "predict.py", whole, image, "--csv", "/dev/null", cwd=workplace))
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_litter_of_killed_writes_is_cleared(workplace):
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = os.uname().nodename
    old, alive = (workplace / f".a.json.{host}.{pid}.1" for pid in (dead.pid, os.getpid()))
    for path in (old, alive, workplace / f".b.json.{host}.{dead.pid}.1", workplace / f".a.json.elsewhere.{dead.pid}.1"):
        path.write_text("half")
    data_prep.write_json(workplace / "a.json", {})
    assert not old.exists()
    assert len(list(workplace.glob(".*"))) == 3
    (workplace / f".scenes-{host}-{dead.pid}-x").mkdir()
    with scenes.replacing(workplace / "scenes", "dataset.json", {"name": "scenes"}):
        pass
    assert not list(workplace.glob(".scenes*"))


def test_names_are_harmless_where_they_are_shown():
    assert data_prep.printable("a\x1b[2Jb\u202ec\udcff") == r"a\x1b[2Jb\u202ec\xff"
    assert data_prep.printable("Bäume 木") == "Bäume 木"
    for name in ("=1+1", "+1", "-1", "@x", "\tx"):
        assert data_prep.cell(name).startswith("'")
    assert data_prep.cell("cat=dog") == "cat=dog"
    with pytest.raises(SystemExit, match=r"^error: \\x1b\[31m\nnext$"):
        data_prep.die("\x1b[31m\nnext")


def test_prediction_tables_are_harmless(whole, squares, workplace):
    for name in ("=cmd.png", "a\x1b[2Jb.png"):
        shutil.copy(f"{squares}/images/val_0.png", workplace / name)
    out = finish(start(ROOT / "predict.py", whole, "=cmd.png", "a\x1b[2Jb.png", "--csv", "p.csv", cwd=workplace))
    assert "\x1b" not in out
    names = [row[0] for row in csv.reader((workplace / "p.csv").read_text().splitlines())]
    assert names == ["image", "'=cmd.png", r"a\x1b[2Jb.png"]


# ---- data sets


def test_a_prepared_data_set_that_was_changed_is_not_replaced(workplace):
    folder = write_dataset(workplace / "squares", n_train=6, n_test=2)
    for name in ("labels.csv", "fewer.csv"):
        rows = [f"train_{i}.png,red" for i in range(6 if name == "labels.csv" else 5)]
        (workplace / name).write_text("image,label\n" + "\n".join(rows) + "\n")
    command = ("custom", "--name", "mine", "--images", folder / "images", "--image_size", 8, "--labels")
    prepare = lambda labels, code=0: finish(start(ROOT / "data_prep.py", *command, labels, cwd=workplace), code)
    prepare("labels.csv")
    prepare("fewer.csv")  # the user's own table has changed: taken up
    path = workplace / "data/mine/formatted_train_labels_obs.npy"
    assert len(np.load(path)) == 5
    np.save(path, 1 - np.load(path))  # by hand
    edited = path.read_bytes()
    assert f"{path.relative_to(workplace)} was changed after data/mine was prepared" in prepare("labels.csv", code=1)
    assert path.read_bytes() == edited

    shutil.rmtree(workplace / "data")
    prepare("labels.csv")
    shutil.copytree(folder, workplace / "others")
    flags = ("custom", "--name", "mine", "--images", "others/images", "--image_size", 8, "--labels", "labels.csv")
    assert "is the data set of" in finish(start(ROOT / "data_prep.py", *flags, cwd=workplace), code=1)


def test_two_data_preps_at_once(workplace):
    folder = write_dataset(workplace / "squares", n_train=6, n_test=2)
    (workplace / "labels.csv").write_text("image,label\ntrain_0.png,red\n")
    with data_prep.lock(workplace / "data/mine"):
        flags = ("--name", "mine", "--images", folder / "images", "--labels", "labels.csv")
        out = finish(start(ROOT / "data_prep.py", "custom", *flags, cwd=workplace), code=1)
    assert f"data/mine is in use by process {os.getpid()}" in out


def test_a_damaged_cache_is_made_again(workplace):
    folder = write_dataset(workplace / "squares", n_train=6, n_test=2)
    (workplace / "labels.csv").write_text("image,label\n" + "".join(f"train_{i}.png,red\n" for i in range(6)))
    flags = ("--name", "mine", "--images", folder / "images", "--labels", "labels.csv", "--image_size", 8)
    finish(start(ROOT / "data_prep.py", "custom", *flags, cwd=workplace))
    path = workplace / "data/mine/cache_train_8.npy"
    whole = path.read_bytes()
    for content in (whole[:-10], b"", b"\x93NUMPY garbage"):
        path.write_bytes(content)
        args = common.Args(dataset="mine")
        args.image_size = 8
        with pytest.raises(SystemExit, match=r"cache_train_8\.npy"):
            common.load(args)
        finish(start(ROOT / "data_prep.py", "custom", *flags, cwd=workplace))
        assert path.read_bytes() == whole


# ---- no way in


def tar(path, *members):
    with tarfile.open(path, "w") as pack:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
            pack.addfile(member, io.BytesIO(b"evil"))
    return path


@pytest.mark.parametrize(
    "members",
    [
        [("../evil", tarfile.REGTYPE, "")],
        [("/tmp/evil", tarfile.REGTYPE, "")],
        [("a/../../evil", tarfile.REGTYPE, "")],
        [("link", tarfile.SYMTYPE, ".."), ("link/evil", tarfile.REGTYPE, "")],
        [("link", tarfile.LNKTYPE, "../secret")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("d/" * 20 + "x", tarfile.SYMTYPE, "../" * 40), ("d/" * 20 + "x/evil", tarfile.REGTYPE, "")],
    ],
)
def test_tar_members_that_lead_outside(workplace, members):
    (workplace / "raw").mkdir()
    (workplace / "secret").write_text("secret")
    with pytest.raises(SystemExit, match=r"outside|link or device"):
        data_prep.extract(tar(workplace / "x.tar", *members), workplace / "raw")
    assert not list(workplace.rglob("*evil*"))
    assert not any(path.is_symlink() for path in workplace.rglob("*"))


def test_zip_members_that_lead_outside(workplace):
    (workplace / "raw").mkdir()
    link = zipfile.ZipInfo("link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for name in ("../evil", "/tmp/evil", link):
        with zipfile.ZipFile(workplace / "x.zip", "w") as pack:
            pack.writestr(name, "..")
        with pytest.raises(SystemExit, match=r"outside|link or device"):
            data_prep.extract(workplace / "x.zip", workplace / "raw")
    assert not list(workplace.rglob("*evil*"))


def test_an_archive_that_holds_far_too_much(workplace):
    (workplace / "raw").mkdir()
    with zipfile.ZipFile(workplace / "x.zip", "w", zipfile.ZIP_DEFLATED) as pack:
        for i in range(5):
            pack.writestr(f"zeros{i}", bytes(40_000_000))
    with pytest.raises(SystemExit, match="holds far more than its size suggests"):
        data_prep.extract(workplace / "x.zip", workplace / "raw")
    assert sum(path.stat().st_size for path in (workplace / "raw").iterdir()) < 110_000_000


def test_archives_are_unpacked(workplace):
    (workplace / "in/deep").mkdir(parents=True)
    (workplace / "in/deep/a.txt").write_text("a")
    for name, mode in (("x.tar", "w"), ("x.tgz", "w:gz")):
        with tarfile.open(workplace / name, mode) as pack:
            pack.add(workplace / "in", "in")
    with zipfile.ZipFile(workplace / "x.zip", "w") as pack:
        pack.write(workplace / "in/deep/a.txt", "in/deep/a.txt")
    for name in ("x.tar", "x.tgz", "x.zip"):
        folder = workplace / f"out {name}"
        folder.mkdir()
        data_prep.extract(workplace / name, folder)
        assert (folder / "in/deep/a.txt").read_text() == "a"


def test_downloads_without_encryption_have_a_checksum():
    for archives in data_prep.ARCHIVES.values():
        assert all(len(md5) == 32 for _, md5 in archives)


def test_only_formats_that_are_meant_are_opened(workplace):
    """PIL would start Ghostscript for this one"""
    (workplace / "cat.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n")
    with Image.open(workplace / "cat.jpg") as image:
        assert image.format == "EPS"
    with pytest.raises(OSError, match="cannot identify"):
        data_prep.read_image(workplace / "cat.jpg")
    for ending in ("jpg", "png", "webp", "gif", "bmp", "tiff", "jp2", "avif"):
        Image.new("RGB", (20, 10), "red").save(workplace / f"image.{ending}")
        assert data_prep.read_image(workplace / f"image.{ending}").size == (20, 10)


# ---- one sentence


@pytest.mark.parametrize(
    "content",
    [
        '{"classes": "red"}',
        '{"classes": ["red", 1, "blue", "white"]}',
        '{"upright": "no"}',
        '{"image_folder": 3}',
        "[]",
        "null",
        "{",
        "[" * 100000,
        "\x00",
    ],
)
def test_dataset_json_is_checked(content, script, workplace):
    folder = write_dataset(workplace / "own", n_train=10, n_test=4)
    (folder / "dataset.json").write_text(content)
    with pytest.raises(SystemExit, match=r"error: .*dataset.json"):
        script("an.py", "--dataset", folder, *FLAGS)


def test_arrays_are_checked(script, workplace):
    folder = write_dataset(workplace / "own", n_train=10, n_test=4)
    path = folder / "formatted_train_labels.npy"
    y = np.load(path)
    npz = io.BytesIO()
    np.savez(npz, y=y)
    structured = np.zeros(10, dtype=[("a", "i4")])
    for write in (
        lambda: path.write_bytes(npz.getvalue()),
        lambda: np.save(path, structured),
        lambda: np.save(path, y.astype(complex)),
        lambda: path.write_bytes(b""),
        lambda: path.write_bytes(b"\x93NUMPY\x01\x00\xff\xff{"),
        lambda: np.save(path, y[:-1]),
        lambda: np.save(path, y.astype(object), allow_pickle=True),
    ):
        write()
        with pytest.raises(SystemExit, match=r"error: .*formatted_train_labels.npy"):
            script("an.py", "--dataset", folder, *FLAGS)


def test_tables_with_odd_characters(workplace):
    folder = write_dataset(workplace / "squares", n_train=2, n_test=2)
    for text, expected in (
        ("a\x00b.png,red", "NUL"),
        (f"{'x' * 300}.png,red", "there is no"),
        ("\x1b[2J.png,red", "\\x1b"),
    ):
        (workplace / "labels.csv").write_text(f"image,label\ntrain_0.png,red\n{text}\n")
        flags = ("--name", "mine", "--images", folder / "images", "--labels", "labels.csv")
        out = finish(start(ROOT / "data_prep.py", "custom", *flags, cwd=workplace), code=1)
        assert expected in out
        assert "Traceback" not in out
        assert "\x1b" not in out


def test_absurd_sizes_are_refused(squares, script, workplace):
    for flags, expected in (
        (("--workers", 1000000), "--workers must be at least -1 and at most 256"),
        (("--image_size", 10_000_000), "one batch takes"),
        (("--image_size", 60_000, "--batch_size", 2**30), "one batch takes"),
    ):
        with pytest.raises(SystemExit, match=expected):
            script("an.py", "--dataset", squares, *FLAGS, *flags)


def test_a_closed_output_is_no_traceback(squares, workplace):
    command = f"{sys.executable} {ROOT / 'an.py'} --dataset {squares} {' '.join(map(str, FLAGS))} | head -1"
    done = subprocess.run(command, shell=True, cwd=workplace, capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == "error: broken pipe: the output is no longer read\n"


@pytest.mark.slow
def test_low_limits_are_a_sentence(squares, workplace):
    command = [sys.executable, str(ROOT / "an.py"), "--dataset", squares, *map(str, FLAGS)]
    for kind, limit, expected in (
        (resource.RLIMIT_AS, 8_000_000_000, "error: out of memory: try a smaller --batch_size"),
        (resource.RLIMIT_NOFILE, 7, "error: Too many open files"),
    ):
        size = ("--batch_size", "80", "--image_size", "1500") if "memory" in expected else ()
        done = subprocess.run(
            [*command, *size],
            cwd=workplace,
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),  # noqa: B023
        )
        assert done.returncode == 1
        assert done.stderr.startswith(expected), done.stderr


def test_a_loss_that_is_not_finite_in_the_first_epoch(squares, script, workplace):
    with pytest.raises(SystemExit, match=r"epoch 1, step \d+ .*: try a lower --lr") as problem:
        script("an.py", "--dataset", squares, *FLAGS, "--lr", 1e30)
    assert "keeps the epoch before" not in str(problem.value)


def test_a_bug_keeps_its_traceback(squares, workplace):
    script = workplace / "buggy.py"
    script.write_text(
        (ROOT / "an.py").read_text().replace("            run.backward(loss)\n", "            run.bckward(loss)\n")
    )
    out = finish(start(script, "--dataset", squares, *FLAGS, cwd=workplace), code=1)
    assert "Traceback" in out
    assert "bckward" in out


# ---- docs/clusters.md


@pytest.fixture(scope="module")
def blocks():
    text = (ROOT / "docs/clusters.md").read_text()
    return [block.split("```")[0] for block in text.split("```bash\n")[1:]]


def test_the_sbatch_script_requeues(blocks, squares, whole, workplace):
    """With a stand-in for scontrol: stopped before its time limit it is queued again, and ends with the same bits"""
    (block,) = [block for block in blocks if "#SBATCH" in block]
    assert len(block.splitlines()) <= 12 + 2
    flags = f"--dataset {squares} {' '.join(map(str, FLAGS))} --save_minutes 1e-9"
    block = block.replace("python vlpl.py --dataset voc", f"{sys.executable} {ROOT / 'an.py'} {flags}")
    (workplace / "job.sh").write_text(block)
    (workplace / "scontrol").write_text('#!/bin/bash\necho "$@" > requeued\n')
    (workplace / "scontrol").chmod(0o755)
    environment = {**os.environ, "PATH": f"{workplace}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment |= {"SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_ID": "7", "PYTHONPATH": str(ROOT)}
    job = lambda: subprocess.Popen(["bash", "job.sh"], cwd=workplace, env=environment)
    first = job()
    wait_for(lambda: (workplace / "runs/voc-vlpl-s0/last.pt").exists(), first)
    first.terminate()
    assert first.wait(60) == 143
    assert (workplace / "requeued").read_text() == "requeue 7\n"
    assert job().wait(120) == 0
    assert_same_run(workplace / "runs/voc-vlpl-s0", whole)


@pytest.mark.slow
def test_the_loop_of_the_docs_is_a_sweep(blocks, squares, workplace):
    (block,) = [block for block in blocks if "for seed" in block]
    for old, new in (
        (
            "python $method.py --dataset voc",
            f"{sys.executable} {ROOT}/$method.py --dataset {squares} {' '.join(SMALL)} --epochs 1",
        ),
        ("an em_apl role ll vlpl", "an role"),
        ("0 1 2", "0 1"),
        ("python report.py", f"{sys.executable} {ROOT}/report.py"),
    ):
        assert block.count(old) == 1
        block = block.replace(old, new)
    for done in (0, 4):
        out = subprocess.run(["bash", "-c", block], cwd=workplace, capture_output=True, text=True, check=True).stdout
        assert out.count("finished after epoch 1") == done
    assert len(list((workplace / "runs").iterdir())) == 4
    assert "an.py " in out
