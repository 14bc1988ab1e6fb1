import json
import math

import numpy as np
import pytest
import torch
from conftest import (
    LEARNT,
    ROOT,
    SMALL,
    TORCHRUN,
    finish,
    metrics,
    only_run,
    start,
    write_dataset,
)

import common
import role

FLAGS = (*SMALL, "--workers", 0, "--epochs", 3)


def loss_of(*arguments):
    return role.role_loss(*arguments)[0]


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits, estimates = (2 * torch.randn(6, 5, dtype=torch.float64) for _ in range(2))
    z = torch.zeros(6, 5, dtype=torch.uint8)
    z[torch.arange(5), torch.tensor([0, 3, 3, 1, 4])] = 1  # the last row has no positive
    return logits, estimates, z


def slow(logits, estimates, z, k):
    """Loops, from the equations of methods.md"""
    sigmoid = lambda x: 1 / (1 + math.exp(-x))
    B, C = logits.shape

    def side(a, b):
        total = expected = 0.0
        for n in range(B):
            for c in range(C):
                p, q = sigmoid(a[n, c].item()), sigmoid(b[n, c].item())
                total += -math.log(p) / (B * C) if z[n, c] == 1 else 0.0
                total += (-q * math.log(p) - (1 - q) * math.log(1 - p)) / (B * C)
                expected += p / B
        return total + ((expected - k) / C) ** 2

    return (side(logits, estimates) + side(estimates, logits)) / 2


def test_loss_against_loops(batch):
    logits, estimates, z = batch
    before = [t.clone() for t in batch]
    loss, parts = role.role_loss(logits, estimates, z, 1.7)
    assert loss.item() == pytest.approx(slow(logits, estimates, z, 1.7), rel=1e-12)
    assert sum(part for name, part in parts.items() if name.startswith("loss")).item() == pytest.approx(loss.item())
    assert parts["expected_positives"].item() == pytest.approx(logits.sigmoid().sum().item() / 6)
    assert parts["expected_positives_estimates"].item() == pytest.approx(estimates.sigmoid().sum().item() / 6)
    assert all(torch.equal(now, then) for now, then in zip(batch, before))
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert loss_of(logits, estimates, z.to(dtype), 1.7).item() == pytest.approx(loss.item(), rel=1e-12)


def test_loss_by_hand():
    logits, estimates, z = (
        torch.zeros(1, 2),
        torch.tensor([[math.log(3), 0.0]]),
        torch.tensor([[1, 0]]),
    )  # p 1/2, q 3/4, 1/2
    classifier = math.log(2) / 2 + math.log(2) + ((1 - 1.5) / 2) ** 2
    cross = (-0.5 * math.log(0.75) - 0.5 * math.log(0.25) + math.log(2)) / 2
    estimator = -math.log(0.75) / 2 + cross + ((1.25 - 1.5) / 2) ** 2
    assert loss_of(logits, estimates, z, 1.5).item() == pytest.approx((classifier + estimator) / 2)


def test_each_side_learns_from_the_other_as_from_a_constant(batch):
    """The gradient of one side is that of a loss in which the other's probabilities are numbers, not weights."""
    logits, estimates, z = batch
    logits.requires_grad_(), estimates.requires_grad_()
    by_logits, by_estimates = torch.autograd.grad(loss_of(logits, estimates, z, 1.7), (logits, estimates))
    p, q = logits.detach().sigmoid(), estimates.detach().sigmoid()
    for own, other, gradient in ((p, q, by_logits), (q, p, by_estimates)):
        expected = ((own - 1) * (z == 1) + own - other) / 30
        expected += 2 * (own.sum(1).mean() - 1.7) / 25 * own * (1 - own) / 6
        torch.testing.assert_close(gradient, expected / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_and_limits(dtype):
    values = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 0.0]], dtype=dtype)
    logits, estimates = values.clone().requires_grad_(), (-values).requires_grad_()
    z = torch.tensor([[0, 1, 0], [0, 0, 0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(logits, estimates, z, 1.5)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (logits, estimates)))


def test_initial_estimates():
    z = torch.zeros(4000, 3, dtype=torch.uint8)
    z[:, 1] = 1
    theta = role.initial_estimates(z, 3)
    assert theta[:, 1].sigmoid().tolist() == pytest.approx([0.995] * 4000)
    q = theta[:, [0, 2]].sigmoid()
    assert 0.4 <= q.min() < 0.401
    assert 0.599 < q.max() <= 0.6
    assert q.mean().item() == pytest.approx(0.5, abs=0.005)
    assert torch.equal(theta, role.initial_estimates(z, 3))
    assert not torch.equal(theta, role.initial_estimates(z, 4))


def test_mAP_of_the_hidden_labels():
    """Observed labels neither help nor rank: against scikit-learn on what is left of each class"""
    from sklearn.metrics import average_precision_score

    torch.manual_seed(0)
    theta, y = torch.randn(50, 4), (torch.rand(50, 4) < 0.4).long()
    z = torch.as_tensor(common.draw_single_positives(y))
    hidden = z == 0
    expected = [average_precision_score(y[hidden[:, c], c], theta[hidden[:, c], c]) for c in range(4)]
    assert role.hidden_mAP(theta, z, y) == pytest.approx(100 * sum(expected) / 4)


def theta_of(run, name="last.pt"):
    return torch.load(run / name, weights_only=True)["labels"]["theta"]


def test_estimates_move_only_where_an_image_was_in_the_batch(script, squares, workplace):
    script("role.py", "--dataset", squares, *FLAGS, "--epochs", 1, "--max_steps", 2)
    data = common.load(role.Args(dataset=squares, image_size=32))
    start_theta = role.initial_estimates(data.train.z, 0)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))  # (seed 0, epoch 1)
    moved = (theta_of(only_run(workplace)) != start_theta).all(1).nonzero().flatten().tolist()
    untouched = (theta_of(only_run(workplace)) == start_theta).all(1).nonzero().flatten().tolist()
    assert moved == sorted(order[:16].tolist())
    assert untouched == sorted(order[16:].tolist())


def test_it_learns_and_says_what_it_estimates(script, squares, workplace):
    out = script("role.py", "--dataset", squares, *FLAGS, "--epochs", 8, "--positives", 2)
    rows = metrics(only_run(workplace))
    assert float(rows[-1]["test_mAP"]) > LEARNT, out
    assert float(rows[-1]["estimates_mAP"]) > float(rows[0]["estimates_mAP"]) + 5
    assert 1 < float(rows[-1]["expected_positives"]) < 3


def test_without_positives_the_validation_labels_say_how_many(script, squares, workplace):
    data = common.load(role.Args(dataset=squares, image_size=32))
    script("role.py", "--dataset", squares, *FLAGS, "--epochs", 1, "--out", "auto")
    k = data.val.y.sum(1).float().mean().item()
    script("role.py", "--dataset", squares, *FLAGS, "--epochs", 1, "--out", "said", "--positives", k)
    (auto,), (said,) = (workplace / "auto").iterdir(), (workplace / "said").iterdir()
    assert metrics(auto) == metrics(said)
    script("role.py", "--dataset", squares, *FLAGS, "--epochs", 1, "--out", "more", "--positives", k + 1)
    (more,) = (workplace / "more").iterdir()
    assert metrics(auto) != metrics(more)


def test_without_validation_labels_it_asks(workplace, script):
    folder = write_dataset(workplace / "own", n_train=20, n_test=4)
    y = np.load(folder / "formatted_train_labels.npy")
    np.save(folder / "formatted_train_labels_obs.npy", common.draw_single_positives(y))
    (folder / "formatted_train_labels.npy").unlink()
    with pytest.raises(SystemExit, match="needs the expected number of --positives"):
        script("role.py", "--dataset", folder, *FLAGS)
    script("role.py", "--dataset", folder, *FLAGS, "--positives", 2, "--epochs", 1)
    assert "estimates_mAP" not in metrics(only_run(workplace))[0]


def test_a_kill_changes_nothing(a_kill_changes_nothing, squares):
    killed, whole = a_kill_changes_nothing("role.py", "--dataset", squares, *FLAGS)
    assert torch.equal(theta_of(killed), theta_of(whole))


def test_two_processes_train_the_same_estimates_as_one(squares, workplace):
    """With --linear there is no BatchNorm that sees half a batch, and without R, which is a mean over each process's
    share, every step is the same"""
    text = (ROOT / "role.py").read_text()
    assert text.count("- k) / a.shape[1]) ** 2") == 1
    (workplace / "no_r.py").write_text(text.replace("- k) / a.shape[1]) ** 2", "- k) * 0) ** 2"))
    flags = ("--dataset", squares, *FLAGS, "--linear", "--batch_size", 7, "--lr", 0.01)  # shares of four and three
    finish(start("no_r.py", *flags, "--out", "one", cwd=workplace))
    finish(start(*TORCHRUN, "no_r.py", *flags, "--out", "two", cwd=workplace))
    (one,), (two,) = (workplace / "one").iterdir(), (workplace / "two").iterdir()
    first = role.initial_estimates(common.load(role.Args(dataset=squares, image_size=32)).train.z, 0)
    assert (theta_of(one) - first).abs().min() > 1e-3  # every estimate was trained, whichever process had its image
    torch.testing.assert_close(theta_of(one), theta_of(two), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_agree_on_the_estimates(squares, workplace):
    flags = ("--dataset", squares, *FLAGS, "--linear", "--batch_size", 7, "--lr", 0.01)
    finish(start(*TORCHRUN, ROOT / "role.py", *flags, cwd=workplace))  # run.epochs compares them in every epoch
    run = only_run(workplace)
    assert "finished after epoch 3" in finish(start(*TORCHRUN, ROOT / "role.py", "--resume", run, cwd=workplace))


def test_linear_init_brings_the_estimates_along(script, squares, workplace):
    flags = ("--dataset", squares, *FLAGS)
    script("role.py", *flags, "--linear", "--lr", 0.01, "--out", "linear")
    (linear,) = (workplace / "linear").iterdir()
    script("role.py", *flags, "--init_from", linear, "--max_steps", 1, "--lr", 1e-9)
    run = only_run(workplace)
    best = torch.load(linear / "best.pt", weights_only=True)
    torch.testing.assert_close(theta_of(run), best["labels"]["theta"], rtol=0, atol=1e-6)
    after = torch.load(run / "last.pt", weights_only=True)["model"]
    torch.testing.assert_close(after["head.weight"], best["model"]["head.weight"], rtol=0, atol=1e-6)
    result = json.loads((linear / "result.json").read_text())
    assert best["epoch"] == result["best_epoch"]


def test_estimates_of_another_data_set_are_refused(script, refused, squares, workplace):
    flags = ("--dataset", squares, *FLAGS)
    script("role.py", *flags, "--epochs", 1, "--out", "first")
    (first,) = (workplace / "first").iterdir()
    other = write_dataset(workplace / "other", n_train=30, n_test=4)
    out = refused("role.py", "--dataset", other, *FLAGS, "--init_from", first)
    assert "error: labels.theta is (80, 4) in the checkpoint and (24, 4) in the script" in out


def test_a_start_from_another_method_has_estimates_of_its_own(trained, script, squares, workplace):
    script("role.py", "--dataset", squares, *FLAGS, "--init_from", trained)
    assert len(metrics(only_run(workplace))) == 3


def test_predict(squares, workplace):
    finish(start(ROOT / "role.py", "--dataset", squares, *FLAGS, cwd=workplace))
    out = finish(start(ROOT / "predict.py", only_run(workplace), f"{squares}/images/val_1.png", cwd=workplace))
    assert "val_1.png:" in out
