"""Copying a script is safe: a copy trains, is killed, resumes to the same bits, is evaluated and predicts what the
trained model says, or is refused in one sentence before it trains."""

import json
import re
import shutil
import subprocess
import time

import pytest
import torch
from conftest import (
    ROOT,
    SMALL,
    TORCHRUN,
    assert_same_run,
    finish,
    metrics,
    only_run,
    start,
)

import common
import data_prep

FLAGS = (*SMALL, "--workers", 0, "--epochs", 3)


def copy_of(script, path, *edits):
    """A copy of a script of the project with lines replaced, each of which must be there"""
    text = (ROOT / script).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


def state(run, name="labels"):
    return torch.load(run / "last.pt", weights_only=True)[name]


LOOP = "    for epoch in run.epochs(model=model, optimizer=optimizer):  # all of these are in last.pt\n"
IMPORT = (
    "from dataclasses import dataclass\n",
    "from dataclasses import dataclass\nfrom types import SimpleNamespace\n",
)
THETA = (
    IMPORT,
    (
        LOOP,
        "    start = torch.linspace(-1, 1, data.train.z.numel()).view(data.train.z.shape)\n"
        "    labels = SimpleNamespace(theta=start.to(run.device).requires_grad_(), rounds=0)\n"
        "    theta_optimizer = torch.optim.SGD([labels.theta], lr=10.0, momentum=0.9)\n"
        "    more = dict(theta_optimizer=theta_optimizer, labels=labels)\n"
        "    for epoch in run.epochs(model=model, optimizer=optimizer, **more):\n",
    ),
    (
        "            loss, parts = an_loss(logits, z)\n",
        "            loss, parts = an_loss(logits, z)\n            loss = loss + an_loss(labels.theta[idx], z)[0]\n",
    ),
    ("            run.step(optimizer)\n", "            run.step(optimizer, theta_optimizer)\n"),
    ("        run.evaluate(model, data)\n", "        run.evaluate(model, data)\n        labels.rounds += 1\n"),
)


def test_a_trained_label_matrix_is_resumed(a_kill_changes_nothing, squares, workplace):
    script = copy_of("an.py", workplace / "matrix.py", *THETA)
    killed, whole = a_kill_changes_nothing(script, "--dataset", squares, *FLAGS)
    a, b = state(killed), state(whole)
    assert torch.equal(a["theta"], b["theta"])
    assert a["rounds"] == b["rounds"] == 3  # what came after run.evaluate is in the checkpoint too
    start = torch.linspace(-1, 1, a["theta"].numel()).view(a["theta"].shape)
    assert (a["theta"] - start).abs().min() > 1e-4  # every label of every image was trained


def test_two_processes_train_the_same_label_matrix_as_one(squares, workplace):
    script = copy_of("an.py", workplace / "matrix.py", *THETA)
    flags = ("--dataset", squares, *FLAGS, "--batch_size", 7)  # shares of four and three
    finish(start(script, *flags, "--out", "one", cwd=workplace))
    finish(start(*TORCHRUN, script, *flags, "--out", "two", cwd=workplace))
    (one,), (two,) = (workplace / "one").iterdir(), (workplace / "two").iterdir()
    torch.testing.assert_close(state(one)["theta"], state(two)["theta"], rtol=1e-4, atol=1e-5)


REBOUND = (
    IMPORT,
    (LOOP, "    labels = SimpleNamespace(seen=torch.zeros(1))\n" + LOOP.replace("r):", "r, labels=labels):")),
    (
        "            loss, parts = an_loss(logits, z)\n",
        "            loss, parts = an_loss(logits, z)\n            loss = loss * (1 + labels.seen.sum())\n"
        "            labels.seen = torch.cat([labels.seen, loss.detach()[None].cpu() / 100])\n",
    ),
)


def test_a_rebound_state_of_another_shape_is_resumed(a_kill_changes_nothing, squares, workplace):
    script = copy_of("an.py", workplace / "rebound.py", *REBOUND)
    killed, whole = a_kill_changes_nothing(script, "--dataset", squares, *FLAGS)
    assert torch.equal(state(killed)["seen"], state(whole)["seen"])
    assert len(state(whole)["seen"]) == 1 + 3 * 10  # a number per step


def test_a_bare_tensor_is_refused_before_training(refused, squares, workplace):
    bare = (LOOP, "    z_all = data.train.z.clone()\n" + LOOP.replace("r):", "r, z_all=z_all):"))
    out = refused(copy_of("an.py", workplace / "bare.py", bare), "--dataset", squares, *FLAGS)
    assert "error: run.epochs can't save z_all, a Tensor" in out
    assert "SimpleNamespace(z_all=z_all)" in out
    assert not (only_run(workplace) / "metrics.csv").exists()


def test_what_a_namespace_cant_save_is_refused_before_training(refused, squares, workplace):
    odd = (LOOP, "    labels = SimpleNamespace(seen={1, 2})\n" + LOOP.replace("r):", "r, labels=labels):"))
    out = refused(copy_of("an.py", workplace / "odd.py", IMPORT, odd), "--dataset", squares, *FLAGS)
    assert "error: run.epochs can't save labels.seen, a set" in out


def test_a_state_of_another_shape_is_refused_where_it_is_trained(script, refused, squares, workplace):
    path = copy_of("an.py", workplace / "matrix.py", *THETA)
    script(path, "--dataset", squares, *FLAGS, "--epochs", 1)
    run = only_run(workplace)
    last = torch.load(run / "last.pt", weights_only=True)
    last["labels"]["theta"] = last["labels"]["theta"][:1]  # would broadcast
    torch.save(last, run / "last.pt")
    (run / "result.json").unlink()
    assert "error: labels.theta is (1, 4) in the checkpoint and (80, 4) in the script" in refused(path, "--resume", run)


def test_a_state_that_each_process_changes_on_its_own_is_refused(squares, workplace):
    counting = (
        IMPORT,
        (
            LOOP,
            "    labels = SimpleNamespace(seen=torch.zeros(len(data.train)))\n"
            + LOOP.replace("r):", "r, labels=labels):"),
        ),
        (
            "            loss, parts = an_loss(logits, z)\n",
            "            loss, parts = an_loss(logits, z)\n            labels.seen[idx] += 1\n",
        ),
    )
    script = copy_of("an.py", workplace / "counting.py", *counting)
    out = finish(start(*TORCHRUN, script, "--dataset", squares, *FLAGS, cwd=workplace), code=1)
    assert "labels.seen differs between the processes" in out
    finish(start(script, "--dataset", squares, *FLAGS, "--out", "one", cwd=workplace))  # alone it is fine
    (one,) = (workplace / "one").iterdir()
    assert state(one)["seen"].tolist() == [3.0] * 80


FORWARD = (
    (
        "# ---- 3. Train\n",
        "class Mine(common.Classifier):\n"
        "    def forward(self, x):\n"
        "        return 3 * super().forward(x) + 1\n\n\n"
        "# ---- 3. Train\n",
    ),
    ("run.prepare(common.Classifier(args", "run.prepare(Mine(args"),
)


def test_a_changed_forward_in_a_script_with_a_hyphen(a_kill_changes_nothing, squares, workplace):
    """Trained, killed, resumed, evaluated, and predicted with what was trained, though the weights fit a Classifier"""
    script = copy_of("an.py", workplace / "my-method.py", *FORWARD)
    killed, _ = a_kill_changes_nothing(script, "--dataset", squares, *FLAGS)
    result = json.loads((killed / "result.json").read_text())
    assert f"test mAP {result['test_mAP']:.2f}" in finish(start(script, "--eval_only", killed, cwd=workplace))

    script.unlink()  # a run carries its own source
    image = next((workplace / squares / "images").glob("val_*.png"))
    finish(start(ROOT / "predict.py", killed, image, "--csv", "p.csv", cwd=workplace))
    predicted = torch.tensor([float(p) for p in (workplace / "p.csv").read_text().splitlines()[1].split(",")[1:]])
    best = torch.load(killed / "best.pt", weights_only=True)
    settings = json.loads((killed / "config.json").read_text())["settings"]
    model = common.Classifier(common_args(settings), 4)
    model.load_state_dict(best["model"])
    pixels = torch.tensor(data_prep.decode(image, 32))[None]
    with torch.no_grad():
        logits = model.eval()(common.as_pixels(pixels))[0]
    torch.testing.assert_close(predicted, (3 * logits + 1).sigmoid(), rtol=0, atol=1e-4)
    assert (predicted - logits.sigmoid()).abs().max() > 0.05  # a Classifier would have said something else


def common_args(settings):
    import an

    return an.Args(**settings)


@pytest.mark.parametrize("where", ["local", "arguments"])
def test_a_model_that_predict_could_not_build_is_refused_before_training(where, refused, squares, workplace):
    inner = "    class Mine(common.Classifier):\n        pass\n\n"
    edits = {
        "local": (
            ("    args = common.parse(Args, PRESETS)\n", inner + "    args = common.parse(Args, PRESETS)\n"),
            FORWARD[1],
        ),
        "arguments": (
            (
                "# ---- 3. Train\n",
                "class Mine(common.Classifier):\n"
                "    def __init__(self, args, num_classes, scale):\n"
                "        super().__init__(args, num_classes)\n"
                "        self.scale = scale\n\n\n"
                "# ---- 3. Train\n",
            ),
            ("run.prepare(common.Classifier(args, len(data.classes))", "run.prepare(Mine(args, len(data.classes), 2)"),
        ),
    }[where]
    out = refused(copy_of("an.py", workplace / "mine.py", *edits), "--dataset", squares, *FLAGS)
    assert "error: predict.py could not build the model again" in out
    assert "Mine(args, num_classes), a class at the top level of mine.py, must make all of it" in out
    assert not (workplace / "runs").exists()


def test_code_that_changed_after_the_training_is_refused(script, refused, squares, workplace):
    path = copy_of("an.py", workplace / "mine.py", *FORWARD)
    script(path, "--dataset", squares, *FLAGS, "--epochs", 1)
    run = only_run(workplace)
    text = path.read_text().replace("3 * super()", "2 * super()")
    path.write_text(text)
    assert "the model's code has changed since" in refused(path, "--eval_only", run)
    (run / "script.py").write_text(text)
    assert "the model's code has changed since" in refused("predict.py", run, workplace / squares / "images")


def test_a_deleted_field(script, refused, squares, workplace):
    line = next(line + "\n" for line in (ROOT / "an.py").read_text().splitlines() if line.startswith("    patience"))
    short = copy_of("an.py", workplace / "short.py", (line, ""))
    for more in ((), ("--smoke",)):
        assert "best epoch" in script(short, "--dataset", squares, *FLAGS, *more)

    line = next(line + "\n" for line in (ROOT / "an.py").read_text().splitlines() if line.startswith("    image_size"))
    out = refused(copy_of("an.py", workplace / "shorter.py", (line, "")), "--dataset", squares)
    assert "error: Args lacks image_size, which common.py reads" in out

    line = next(line + "\n" for line in (ROOT / "em_apl.py").read_text().splitlines() if line.startswith("    warmup"))
    out = refused(copy_of("em_apl.py", workplace / "preset.py", (line, "")))
    assert "error: PRESETS of scenes doesn't fit Args" in out
    assert "warmup" in out


def test_a_step_that_fp16_skips_leaves_momentum_alone(script, squares, workplace, monkeypatch):
    """Its first one, of which fused SGD would keep memory that nobody has set; against the plain one"""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device))  # a CPU has it too
    old = "            run.backward(loss)\n"
    overflow = "            if run.steps == 0:\n                model.head.bias.grad.fill_(torch.inf)\n"
    fused = "torch.zeros_like(w)  # not set by torch if fp16 skips the first step\n"
    plain = ("lr=args.lr, fused=True, **more)\n", "lr=args.lr, **more)\n"), (fused, "None\n")
    losses = {}
    for name, edits in (("fused", ()), ("plain", plain)):
        copy_of("ll.py", workplace / f"{name}.py", (old, old + overflow), *edits)
        script(workplace / f"{name}.py", "--dataset", squares, *FLAGS, "--sgd", "--out", name)
        losses[name] = [float(row["loss"]) for row in metrics(next((workplace / name).iterdir()))]
    assert losses["fused"] == pytest.approx(losses["plain"], rel=1e-3)
    assert losses["fused"][2] < losses["fused"][0]


def test_room_between_backward_and_step(a_kill_changes_nothing, squares, workplace):
    """Clipping, accumulation over two batches, a second optimizer with a part of the weights"""
    edits = (
        (
            "torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr, fused=True)\n",
            "torch.optim.SGD(model.body.parameters(), lr=0.1)\n"
            "    head = torch.optim.SGD(model.head.parameters(), lr=0.1)\n",
        ),
        (LOOP, LOOP.replace("r):", "r, head=head):")),
        (
            "            run.step(optimizer)\n",
            "            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)\n"
            "            if run.batch % 2 == 0:\n"
            "                run.step(optimizer, head)\n"
            "            run.log(gradient_norm=norm)\n",
        ),
    )
    script = copy_of("an.py", workplace / "clip.py", *edits)
    killed, _ = a_kill_changes_nothing(script, "--dataset", squares, *FLAGS)
    assert torch.load(killed / "last.pt", weights_only=True)["run"]["steps"] == 3 * 5  # of 10 batches an epoch
    assert float(metrics(killed)[-1]["gradient_norm"]) > 1e-6
    first = torch.load(killed / "best.pt", weights_only=True)["model"]
    torch.manual_seed(0)
    import an

    untrained = common.Classifier(an.Args(backbone="resnet_small", weights="none"), 4).state_dict()
    moved = max((first[key] - untrained[key]).abs().max() for key in first if key.startswith("head"))
    assert 0 < moved < 1e-5  # clipped steps are tiny


def test_a_new_metric_gets_its_column_and_panel(script, squares, workplace, monkeypatch):
    new = ("run.log(loss=loss, **parts)\n", "run.log(loss=loss, **parts, spread_of_logits=logits.std())\n")
    script(copy_of("an.py", workplace / "metric.py", new), "--dataset", squares, *FLAGS)
    rows = [{name: float(value) for name, value in row.items() if value} for row in metrics(only_run(workplace))]
    assert all(row["spread_of_logits"] > 0 for row in rows)
    drawn = []
    monkeypatch.setattr(data_prep, "save_figure", lambda figure, path: drawn.append(figure))
    common.plot_curve(rows, 1, workplace / "curve.png")
    panels = {axis.get_title(): axis for axis in drawn[0].axes if axis.get_visible()}
    assert list(panels) == ["loss", "mAP", "spread"]
    (line, _) = panels["spread"].get_lines()
    assert line.get_ydata().tolist() == [row["spread_of_logits"] for row in rows]


def test_an_epoch_without_evaluate_is_said(refused, squares, workplace):
    blind = copy_of("an.py", workplace / "blind.py", ("        run.evaluate(model, data)\n", ""))
    out = refused(blind, "--dataset", squares, *FLAGS)
    assert "error: blind.py: every epoch must end with run.evaluate(model, data)" in out


@pytest.mark.parametrize(
    "change",
    [
        "model.head = torch.nn.Sequential(torch.nn.Dropout(), model.head)",
        "model.body[-2] = torch.nn.AdaptiveMaxPool2d(1)",
    ],
)
def test_a_model_that_is_changed_after_its_construction_is_refused_before_training(change, refused, squares, workplace):
    made = (
        "    model = run.prepare(common.Classifier(args, len(data.classes)), data)\n",
        f"    model = common.Classifier(args, len(data.classes))\n    {change}\n    model = run.prepare(model, data)\n",
    )
    out = refused(copy_of("an.py", workplace / "changed.py", made), "--dataset", squares, *FLAGS)
    assert "error: predict.py could not build the model again" in out
    assert not (workplace / "runs").exists()


def test_embeddings_of_other_code_are_not_taken(script, refused, squares, workplace):
    features = (
        "# ---- 3. Train\n",
        "class Mine(common.Classifier):\n"
        "    def features(self, x):\n"
        "        return 0 * super().features(x) + 7\n\n\n"
        "# ---- 3. Train\n",
    )
    flags = ("--dataset", squares, *FLAGS, "--linear")
    script("an.py", *flags)
    mine = copy_of("an.py", workplace / "mine.py", features, FORWARD[1])
    assert "were made by other code of Mine: delete them" in refused(mine, *flags)


def test_observed_labels_in_a_namespace_are_the_scripts_own(a_kill_changes_nothing, squares, workplace):
    """What is restored into a namespace must not reach the labels that run.batches yields."""
    edits = (
        IMPORT,
        (LOOP, "    labels = SimpleNamespace(z=data.train.z)\n" + LOOP.replace("r):", "r, labels=labels):")),
        ("        run.evaluate(model, data)\n", "        labels.z = 1 - labels.z\n        run.evaluate(model, data)\n"),
    )
    script = copy_of("an.py", workplace / "own.py", *edits)
    killed, whole = a_kill_changes_nothing(script, "--dataset", squares, *FLAGS)
    assert torch.equal(state(killed)["z"], state(whole)["z"])


def test_what_was_accumulated_and_every_generator_are_those_of_the_epoch(a_kill_changes_nothing, squares, workplace):
    """An odd number of batches leaves a gradient behind; numpy's and Python's generators are seeded too"""
    edits = (
        ("import torch\nimport torch.nn", "import random\n\nimport numpy as np\nimport torch\nimport torch.nn"),
        (
            "            loss, parts = an_loss(logits, z)\n",
            "            loss, parts = an_loss(logits, z)\n"
            "            loss = loss * np.random.rand() * random.random()\n",
        ),
        (
            "            run.step(optimizer)\n",
            "            if run.batch % 2 == 0:\n                run.step(optimizer)\n",
        ),
    )
    script = copy_of("an.py", workplace / "odd.py", *edits)
    flags = ("--dataset", squares, *FLAGS, "--batch_size", 9)  # nine batches
    a_kill_changes_nothing(script, *flags)


def test_two_processes_clip_and_log_alike(squares, workplace):
    """Clipping over the model and a label matrix leaves the models equal; a value that one process logs hangs nobody"""
    edits = (
        *THETA[:3],
        (
            "            run.step(optimizer)\n",
            "            torch.nn.utils.clip_grad_norm_([*model.parameters(), labels.theta], 1e-3)\n"
            "            run.step(optimizer, theta_optimizer)\n"
            "            if common.rank() == 1:\n"
            "                run.log(only_here=1.0)\n",
        ),
        (
            "        run.evaluate(model, data)\n",
            "        run.evaluate(model, data)\n"
            "        weights = dict(common.unwrap(model).named_parameters())\n"
            "        line = f'weights {common.rank()} {epoch} {common.hash_tensors(weights)}'\n"
            "        print(line + chr(10), end='', flush=True)\n",  # one write: the other process prints too
        ),
    )
    script = copy_of("an.py", workplace / "clipped.py", *edits)
    out = finish(start(*TORCHRUN, script, "--dataset", squares, *FLAGS, cwd=workplace))
    hashes = {tuple(line.split()[2:]) for line in out.splitlines() if line.startswith("weights")}
    assert len(hashes) == 3  # one an epoch, whichever the rank
    assert [float(row["only_here"]) for row in metrics(only_run(workplace))] == [1, 1, 1]


@pytest.mark.slow  # its parts: the label matrix of two processes above, their kill in test_survive.py
def test_a_copy_under_two_processes_is_killed_and_resumed(squares, workplace):
    script = copy_of("an.py", workplace / "matrix.py", *THETA)
    flags = ("--dataset", squares, *FLAGS)
    finish(start(*TORCHRUN, script, *flags, "--out", "whole", cwd=workplace))
    process = start(*TORCHRUN, script, *flags, "--out", "killed", cwd=workplace)
    while not list(workplace.glob("killed/*/last.pt")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()  # torchrun's workers notice, or are killed here
    process.communicate()
    subprocess.run(["pkill", "-9", "-f", f"{script} --dataset {squares}.*killed"], check=False)
    (killed,), (whole,) = (list((workplace / out).iterdir()) for out in ("killed", "whole"))
    finish(start(*TORCHRUN, script, "--resume", killed, cwd=workplace))
    assert_same_run(killed, whole)
    assert torch.equal(state(killed)["theta"], state(whole)["theta"])


def test_a_value_that_becomes_unsaveable_is_said_before_it_is_written(refused, squares, workplace):
    edits = (
        IMPORT,
        (LOOP, "    labels = SimpleNamespace(n=0)\n" + LOOP.replace("r):", "r, labels=labels):")),
        (
            "        run.evaluate(model, data)\n",
            "        labels.n = data.train.z.sum().numpy() / 2\n        run.evaluate(model, data)\n",
        ),
    )
    out = refused(copy_of("an.py", workplace / "counts.py", *edits), "--dataset", squares, *FLAGS)
    assert "error: run.epochs can't save labels.n, a float64" in out
    assert not (only_run(workplace) / "best.pt").exists()


def test_small_traps_of_a_copy(refused, squares, workplace):
    for name, edits, expected in (
        (
            "reserved",
            (IMPORT, (LOOP, LOOP.replace("r):", "r, probe=torch.nn.Linear(1, 1)):"))),
            "can't save probe=..., a name",
        ),
        ("nameless", ((LOOP, LOOP.replace("model=model, ", "")),), "run.epochs needs model=model"),
        ("steady", (("            run.step(optimizer)\n", ""),), "no batch had run.backward(loss) and run.step"),
        ("aimless", (("            run.backward(loss)\n", ""),), "no batch had run.backward(loss) and run.step"),
        (
            "wide",
            (("run.log(loss=loss,", "run.log(p=logits, loss=loss,"),),
            "takes a number, not a tensor of shape (8, 4)",
        ),
        (
            "untyped",
            (("    backbone: str", "    gamma = 2.0\n    backbone: str"),),
            "gamma needs a type, as in gamma: float",
        ),
    ):
        assert expected in refused(copy_of("an.py", workplace / f"{name}.py", *edits), "--dataset", squares, *FLAGS)
    line = next(line + "\n" for line in (ROOT / "an.py").read_text().splitlines() if line.startswith("    backbone"))
    presets = ('backbone="resnet_small", ', ""), ('backbone="tf_efficientnet_lite0", ', "")
    bodyless = copy_of("an.py", workplace / "bodyless.py", (line, ""), *presets)
    flags = [flag for flag in FLAGS if flag not in ("--backbone", "resnet_small")]
    assert "error: Args lacks backbone or weights" in refused(bodyless, "--dataset", squares, *flags)


def test_predictions_in_an_epoch_leave_the_model_in_training_mode(script, squares, workplace):
    look = (
        "        for x, z, idx in run.batches",
        "        run.predict(model, data.train)\n        assert model.training\n        for x, z, idx in run.batches",
    )
    path = copy_of("an.py", workplace / "look.py", look)
    script(path, "--dataset", squares, *FLAGS, "--epochs", 1)
    run = only_run(workplace)
    (run / ".ipynb_checkpoints").mkdir()  # others' hidden files are none of ours
    (run / ".mine").write_text("")
    assert "finished" in script(path, "--resume", run)
    assert (run / ".mine").exists()


# ---- smoke tests

CLIP_SCRIPTS = ("vlpl.py", "aevlp.py")
TINY = ("--dim", 16, "--ffn", 32, "--project_dim", 8)
SMOKE = {"an.py": (), "baselines.py": ("--loss", "ls"), "role.py": (), "ll.py": ("--form", "cp", "--max_drop", 0)}
SMOKE |= {"em_apl.py": ("--warmup", 2, "--patience", 0)}
SMOKE |= {"vlpl.py": (), "aevlp.py": ("--grid", 2), "lac.py": TINY, "pu_mlc.py": ("--ema", 0.9, "--one_cycle", 4)}


@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_test_goes_through_everything(name, script, squares, tiny_clip, workplace):
    clip = ("--clip_model", f"local-dir:{tiny_clip}") if name in CLIP_SCRIPTS else ()
    flags = ("--dataset", squares, *SMALL, *SMOKE[name], *clip, "--epochs", 4, "--smoke")
    out = script(name, *flags)
    run = only_run(workplace)
    rows = metrics(run)
    assert len(rows) == (8 if name == "lac.py" else 4)  # both stages, no early stopping
    last = torch.load(run / "last.pt", weights_only=True)
    assert last["run"]["steps"] == len(rows) * (2 if name == "pu_mlc.py" else 3)  # the last batch of 3 is below 4
    if name == "em_apl.py":
        assert float(rows[1]["pseudo_negatives_per_image"]) > 0
        assert last["labels"]["pseudo"].shape == (2 * 8 + 3, 4)
    if name == "lac.py":
        assert [row["stage"] for row in rows] == ["1.0"] * 4 + ["2.0"] * 4
        assert (run / "stage1.pt").exists()
    if clip:
        assert "embedded" in out
        assert max(int(n) for n in re.findall(r"embedded .*: (\d+) in", out)) <= 19


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_a_smoke_test_on_scenes_takes_less_than_a_minute(name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "smoke"
    folder.mkdir(exist_ok=True)
    if not (folder / "data/scenes").exists():
        finish(start(ROOT / name, "--smoke", cwd=folder))  # makes the data set
    began = time.monotonic()
    finish(start(ROOT / name, "--smoke", cwd=folder))
    assert time.monotonic() - began < 60
    shutil.rmtree(folder / "runs")
