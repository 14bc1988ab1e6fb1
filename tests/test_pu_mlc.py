import csv
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from conftest import LEARNT, ROOT, SMALL, TORCHRUN, finish, only_run, start, write_cache, write_dataset
from torch import nn

import common
import pu_mlc
import scenes

sigmoid = lambda s: 1 / (1 + math.exp(-s))


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = 2 * torch.randn(7, 5, dtype=torch.float64) - 1
    z = (torch.rand(7, 5) < 0.3).double()
    z[:, 2] = 0  # a class without a positive
    z[3] = 0  # an image without one
    return logits, z


# ---- PU loss


def slow_pu_loss(logits, z, alpha, gamma):
    """Eq. 7, 9, 10 and 11 as printed, class by class; the factor with s / tau"""
    total, n = 0.0, len(logits)
    for c in range(logits.shape[1]):
        s = logits[:, c].tolist()
        mean = sum(s) / n
        tau = min(alpha * math.sqrt(sum((value - mean) ** 2 for value in s) / n), 1)
        u = sum(sigmoid(value / tau) for value in s) / n
        own = [math.log(sigmoid(s[i] / tau)) for i in range(n) if z[i, c] == 1]
        total += u**gamma * math.log(u) - (sum(own) / len(own) if own else 0)
    return total


@pytest.mark.parametrize(("alpha", "gamma"), [(2.0, 0.85), (0.1, 0.0), (1.0, 0.55), (0.3, 2.0)])
def test_loss_against_a_slow_reference(batch, alpha, gamma):
    logits, z = batch
    before = logits.clone(), z.clone()
    for dtype in (torch.uint8, torch.float32, torch.int64):
        loss, parts = pu_mlc.pu_loss(logits, z.to(dtype), alpha, gamma)
        assert loss.item() == pytest.approx(slow_pu_loss(logits, z, alpha, gamma), rel=1e-9)
        assert (parts["loss_unlabelled"] + parts["loss_positive"]).item() == pytest.approx(loss.item(), rel=1e-9)
        assert parts["classes_without_positive"] == (z.sum(0) == 0).sum()
    assert torch.equal(logits, before[0])
    assert torch.equal(z, before[1])


def test_loss_by_hand():
    logits, z = torch.tensor([[3.0], [-1.0]]), torch.tensor([[1], [0]])  # spread 2, so tau = min(4, 1)
    u = (sigmoid(3) + sigmoid(-1)) / 2
    expected = u**0.5 * math.log(u) - math.log(sigmoid(3))
    assert pu_mlc.pu_loss(logits, z, 2.0, 0.5)[0].item() == pytest.approx(expected)
    u = (sigmoid(6) + sigmoid(-2)) / 2  # alpha 1/4: tau = 1/2
    expected = u**0.5 * math.log(u) - math.log(sigmoid(6))
    loss, parts = pu_mlc.pu_loss(logits, z, 0.25, 0.5)
    assert loss.item() == pytest.approx(expected)
    assert parts["loss_positive"].item() == pytest.approx(-math.log(sigmoid(6)))
    assert [parts[name].item() for name in ("tau_min", "tau_mean", "tau_max")] == [0.5] * 3
    assert parts["u_mean"].item() == pytest.approx(u)


def test_factor_and_temperature_take_no_gradient(batch):
    """The gradient is that of the loss with both held fixed, found by finite differences."""
    logits, z = batch
    tau = (0.4 * logits.std(0, correction=0)).clamp(max=1)
    u = (logits / tau).sigmoid().mean(0)
    assert tau.min() < 1  # so that the temperature would matter

    def held(s):
        p = torch.sigmoid(s / tau)
        positive = torch.where(z == 1, p.log(), 0).sum(0) / (z == 1).sum(0).clamp(min=1)
        return (u**0.85 * p.mean(0).log() - positive).sum()

    leaf = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(pu_mlc.pu_loss(leaf, z, 0.4, 0.85)[0], leaf)
    step = 1e-6
    for i in range(7):
        for c in range(5):
            moved = torch.zeros_like(logits)
            moved[i, c] = step
            slope = (held(logits + moved) - held(logits - moved)) / (2 * step)
            assert gradient[i, c].item() == pytest.approx(slope.item(), abs=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_poor_batches_stay_finite(n, scale):
    """One image, identical logits, classes without positives, empty rows, |logit| = 100"""
    for z in (torch.zeros(n, 4), torch.ones(n, 4), torch.eye(4)[:n]):
        signs = torch.tensor([[1.0, -1.0, -1.0, 1.0]]) * torch.where(torch.arange(n) % 2 == 0, 1, -1)[:, None]
        logits = (scale * signs).requires_grad_()
        mixed = (scale * signs[: n // 2]).requires_grad_()
        loss, parts = pu_mlc.pu_loss(logits, z, 2.0, 0.85)
        assert all(part.isfinite() for part in parts.values())
        for lam in (0.0, 0.3, 1.0):
            loss = loss + pu_mlc.mixup_consistency(logits, z, mixed, lam, torch.arange(n // 2))
        gradients = torch.autograd.grad(loss, [logits, mixed], allow_unused=True)
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in gradients if g is not None)


def test_bf16_logits_give_a_finite_loss():
    logits = torch.tensor([[100.0, -100.0], [-100.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = pu_mlc.pu_loss(logits, torch.eye(2), 2.0, 0.85)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_losses_of_bf16_logits_are_computed_in_full_precision(batch):
    logits, z = batch[0].bfloat16(), batch[1]
    loss, _ = pu_mlc.pu_loss(logits, z, 0.3, 0.85)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, pu_mlc.pu_loss(logits.float(), z, 0.3, 0.85)[0])
    of_mixed = lambda s: pu_mlc.mixup_consistency(s, z, s[:3] / 2, 0.3, torch.tensor([2, 0, 1]))
    assert torch.equal(of_mixed(logits), of_mixed(logits.float()))


def test_a_temperature_has_a_floor():
    """Equal logits have no spread: s / tau is then s / min_tau"""
    logits, z = torch.full((2, 1), 0.002), torch.tensor([[1], [0]])
    for floor in (1e-3, 0.1):
        loss, parts = pu_mlc.pu_loss(logits, z, 2.0, 0.0, min_tau=floor)
        assert parts["tau_min"].item() == pytest.approx(floor)
        p = sigmoid(0.002 / floor)
        assert loss.item() == pytest.approx(math.log(p) - math.log(p), abs=1e-6)
        assert parts["u_mean"].item() == pytest.approx(p)


def test_drop_empty_is_the_loss_of_the_classes_with_a_positive(batch):
    logits, z = batch
    loss, parts = pu_mlc.pu_loss(logits, z, 0.4, 0.85, drop_empty=True)
    own = z.sum(0) > 0
    assert 0 < own.sum() < 5
    assert loss.item() == pytest.approx(slow_pu_loss(logits[:, own], z[:, own], 0.4, 0.85), rel=1e-9)
    assert parts["classes_without_positive"] == (~own).sum()


# ---- mixup


def slow_consistency(logits, z, mixed, lam, perm):
    half, n = len(logits) // 2, len(logits)
    t = [[1.0 if z[i, c] == 1 else sigmoid(logits[i, c]) for c in range(logits.shape[1])] for i in range(n)]
    total = 0.0
    for c in range(logits.shape[1]):
        for k in range(half):
            target = lam * t[perm[k]][c] + (1 - lam) * t[n - half + k][c]
            total += (math.log(target) - math.log(sigmoid(mixed[k, c]))) ** 2 / half
    return total


@pytest.mark.parametrize("n", [2, 6, 7])
def test_consistency_against_a_slow_reference(batch, n):
    logits, z = batch[0][:n], batch[1][:n]
    mixed = torch.randn(n // 2, 5, dtype=torch.float64)
    perm = torch.randperm(n // 2)
    value = pu_mlc.mixup_consistency(logits, z, mixed, 0.3, perm).item()
    assert value == pytest.approx(slow_consistency(logits, z, mixed, 0.3, perm.tolist()), rel=1e-9)


def test_a_share_near_1_keeps_what_is_left_of_it():
    """In single precision 1 - 1e-9 is 1, but log(1e-9) is what the second half brings"""
    logits, lam = torch.tensor([[-100.0], [100.0]]), 1 - 1e-9
    value = pu_mlc.mixup_consistency(logits, torch.zeros(2, 1), torch.zeros(1, 1), lam, torch.tensor([0])).item()
    assert value == pytest.approx((math.log(1 - lam) - math.log(0.5)) ** 2, rel=1e-5)


def test_what_is_mixed():
    x = torch.arange(7.0)[:, None, None, None].expand(7, 3, 2, 2)
    mixed = pu_mlc.mix(x, 0.25, torch.tensor([2, 0, 1]))
    expected = [0.25 * 2 + 0.75 * 4, 0.25 * 0 + 0.75 * 5, 0.25 * 1 + 0.75 * 6]  # image 3 is in neither half
    assert mixed[:, 0, 0, 0].tolist() == expected


def test_a_model_that_is_linear_in_log_p_is_consistent():
    """Where log sigmoid of the mixed image is the log of the mixed targets, there is nothing to pay."""
    torch.manual_seed(0)
    p = torch.rand(6, 4, dtype=torch.float64)
    perm = torch.tensor([1, 2, 0])
    mixed = pu_mlc.mix(p, 0.3, perm)
    value = pu_mlc.mixup_consistency(p.logit(), torch.zeros(6, 4), mixed.logit(), 0.3, perm)
    assert value.item() == pytest.approx(0, abs=1e-20)
    wrong = pu_mlc.mixup_consistency(p.logit(), torch.zeros(6, 4), mixed.logit(), 0.7, perm)
    assert wrong > 1e-3


def test_the_middle_of_an_odd_batch_takes_no_part(batch):
    logits, z = batch
    logits = logits.clone().requires_grad_()
    value = pu_mlc.mixup_consistency(logits, z, torch.zeros(3, 5), 0.3, torch.tensor([2, 0, 1]))
    (gradient,) = torch.autograd.grad(value, logits)
    assert (gradient[3] == 0).all()
    assert (gradient[[0, 1, 2, 4, 5, 6]][z[[0, 1, 2, 4, 5, 6]] == 0] != 0).all()


def test_the_target_takes_a_gradient_but_not_through_observed_labels(batch):
    logits, z = batch
    logits, mixed = logits[:6].clone().requires_grad_(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    perm = torch.tensor([1, 2, 0])
    consistency = lambda a, b: pu_mlc.mixup_consistency(a, z[:6], b, 0.3, perm)
    torch.autograd.gradcheck(consistency, (logits, mixed))
    (gradient,) = torch.autograd.grad(consistency(logits, mixed), logits)
    assert (gradient[z[:6] == 1] == 0).all()
    assert (gradient[z[:6] == 0] != 0).all()


def test_a_batch_of_one_has_no_pair():
    logits = torch.ones(1, 3, requires_grad=True)
    value = pu_mlc.mixup_consistency(logits, torch.zeros(1, 3), logits[:0], 0.5, torch.arange(0))
    assert value == 0
    value.backward()


# ---- local-global convolution


def slow_lgconv(module, x):
    """Section III-D with loops over images, heads and places"""
    n, channels, height, width = x.shape
    weigh = lambda conv, v: conv.weight[:, :, 0, 0] @ v + (conv.bias if conv.bias is not None else 0)
    g = torch.zeros_like(x)
    size = channels // 8
    for i in range(n):
        places = [x[i, :, r, c] for r in range(height) for c in range(width)]
        local = [weigh(module.squeeze, v).relu() for v in places]
        mean = torch.stack(local).mean(0)
        h = [torch.cat([v, mean]) for v in local]
        scores = torch.stack([weigh(module.attend, v) for v in h])  # (places, heads)
        shares = scores.exp() / scores.exp().sum(0)
        gates = torch.stack([weigh(module.broadcast, v) for v in h]).sigmoid()
        values = [weigh(module.value, v) for v in places]
        for head in range(8):
            own = slice(head * size, (head + 1) * size)
            gathered = sum(shares[p, head] * values[p][own] for p in range(len(places)))
            for p in range(len(places)):
                g[i, own, p // width, p % width] = gathered * gates[p, head]
    return module.conv(x) + module.norm(module.project(x + g))


@pytest.mark.parametrize("stride", [1, 2])
def test_lgconv_against_loops(stride):
    torch.manual_seed(0)
    module = pu_mlc.LgConv(nn.Conv2d(16, 24, 3, stride, 1, bias=False)).double().eval()
    nn.init.normal_(module.norm.weight)
    x = torch.randn(2, 16, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(module(x), slow_lgconv(module, x))


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d", "timm"])
def test_lgconv_starts_as_the_plain_backbone(name):
    import timm

    torch.manual_seed(0)
    net = timm.create_model("test_resnet") if name == "timm" else torchvision.models.get_model(name)
    x = torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        for _ in range(30):  # BatchNorm's statistics as a trained network has them
            net(x)
        net.eval()
        plain = net(x)
        wide = sum(
            isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) and m.in_channels % 8 == 0 for m in net.modules()
        )
        assert pu_mlc.add_lgconv(net) == wide > 0
        net.eval()
        assert 0 < (net(x) - plain).norm() < 0.01 * plain.norm()
        for module in net.modules():
            if isinstance(module, pu_mlc.LgConv):
                nn.init.zeros_(module.norm.weight)
        torch.testing.assert_close(net(x), plain, rtol=0, atol=0)


def test_lgconv_leaves_other_convolutions_alone():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 5, padding=2))
    assert pu_mlc.add_lgconv(net) == 0  # 3 channels, an image that shrinks, 5 x 5
    dilated = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2, dilation=2))
    assert pu_mlc.add_lgconv(dilated) == 1
    assert dilated(torch.rand(1, 8, 9, 9)).shape == (1, 8, 9, 9)


def test_lgconv_learns_and_its_state_is_kept():
    torch.manual_seed(0)
    net, x = scenes.small_resnet(), torch.rand(4, 3, 32, 32)
    assert pu_mlc.add_lgconv(net) == 8
    net(x).square().sum().backward()
    for name, weight in net.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
    branch = [m for m in net.modules() if isinstance(m, pu_mlc.LgConv)][3]
    for part in (branch.squeeze, branch.attend, branch.broadcast, branch.value, branch.project, branch.norm):
        assert part.weight.grad.abs().sum() > 0
    other = scenes.small_resnet()
    pu_mlc.add_lgconv(other)
    other.load_state_dict(net.state_dict())
    torch.testing.assert_close(other.eval()(x), net.eval()(x))


# ---- the run


def flags(squares):
    return "--dataset", squares, *SMALL, "--workers", 0


def rows_of(run):
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_pu_learns_and_logs(script, squares, workplace):
    out = script("pu_mlc.py", *flags(squares), "--epochs", 12)
    assert float(re.search(r"test mAP ([\d.]+)", out)[1]) > LEARNT
    for row in rows_of(only_run(workplace)):
        value = {name: float(row[name]) for name in row if row[name]}
        parts = value["loss_unlabelled"] + value["loss_positive"] + value["loss_mixup"]
        assert value["loss"] == pytest.approx(parts, abs=1e-4)
        assert 1e-3 <= value["tau_min"] <= value["tau_mean"] <= value["tau_max"] <= 1
        assert 0 < value["u_mean"] < 1
        assert 0 <= value["classes_without_positive"] <= 4
    f1 = json.loads((only_run(workplace) / "result.json").read_text())["test_F1"]
    assert {"OF1", "CF1"} <= set(f1)


@pytest.mark.parametrize(
    "more",
    [
        ("--lgconv", "--amp", "bf16"),
        ("--known_ratio", 0.5, "--drop_empty"),
        ("--batch_size", 1, "--mixup", 1, "--linear"),
        ("--batch_size", 7, "--one_cycle", 4, "--ema", 0.9, "--weight_decay", 1e-4),
        ("--known_ratio", 0.5, "--lgconv", "--freeze_bn", "--crops", "--val_fraction", 0),
    ],
)
def test_flags_train(more, script, squares, small_weights, workplace):
    more += ("--weights", small_weights) if "--freeze_bn" in more else ()
    script("pu_mlc.py", *flags(squares), *more, "--epochs", 2)
    assert all(math.isfinite(float(row["loss"])) for row in rows_of(only_run(workplace)))


@pytest.mark.parametrize(("weight", "expected"), [(1, [9, 4] * 3), (0, [9] * 3)])
def test_the_mixed_half_costs_half_a_forward(weight, expected, script, squares, workplace, monkeypatch):
    seen = []
    forward = common.Classifier.forward
    monkeypatch.setattr(common.Classifier, "forward", lambda self, x: (seen.append(len(x)), forward(self, x))[1])
    monkeypatch.setattr(common.Run, "evaluate", lambda self, *_: self.rows.append({"epoch": self.epoch}))
    for name in ("save", "report"):
        monkeypatch.setattr(common.Run, name, lambda self: None)
    script("pu_mlc.py", *flags(squares), "--batch_size", 9, "--max_steps", 3, "--mixup", weight)
    assert seen == [
        2,
        2,
        *expected,
    ]  # before training, the model and its copy from the source are compared on two images


def test_a_last_batch_of_one_is_left_out(script, squares, workplace):
    """80 images in batches of 79: the gradient of one image alone, at the least temperature, would be enormous."""
    script("pu_mlc.py", *flags(squares), "--batch_size", 79, "--epochs", 1)
    assert torch.load(only_run(workplace) / "last.pt", weights_only=True)["run"]["steps"] == 1


def test_schedule_and_decay_are_used(script, squares, workplace):
    more = ("--epochs", 2, "--one_cycle", 4, "--ema", 0.9, "--weight_decay", 0.01)
    script("pu_mlc.py", *flags(squares), *more)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    assert last["optimizer"]["param_groups"][0]["weight_decay"] == 0.01
    assert last["scheduler"]["last_epoch"] == 20  # steps of two epochs of ten
    weight = torch.nn.Parameter(torch.zeros(1))
    expected = torch.optim.lr_scheduler.OneCycleLR(torch.optim.Adam([weight]), 3e-3, 40, pct_start=0.2)
    for _ in range(20):
        expected.optimizer.step()
        expected.step()
    assert last["optimizer"]["param_groups"][0]["lr"] == pytest.approx(expected.get_last_lr()[0])


@pytest.mark.parametrize(("measured", "better"), [([10, 20], "ema"), ([20, 10], "model")])
def test_the_better_of_raw_and_ema_is_kept(script, squares, workplace, monkeypatch, measured, better):
    values = iter(map(float, measured))
    monkeypatch.setattr(common, "mean_average_precision", lambda *_: next(values))
    script("pu_mlc.py", *flags(squares), "--epochs", 1, "--max_steps", 1, "--ema", 0.9)
    last, best = (torch.load(only_run(workplace) / name, weights_only=True) for name in ("last.pt", "best.pt"))
    torch.manual_seed(0)
    args = common.parse(pu_mlc.Args, pu_mlc.PRESETS, [*map(str, flags(squares))])
    start = pu_mlc.Classifier(args, 4).state_dict()
    for name, value in best["model"].items():
        assert torch.equal(value, last[better][name]), name
        if value.is_floating_point():
            expected = 0.9 * start[name] + 0.1 * last["model"][name]
            assert torch.allclose(last["ema"][name], expected, atol=1e-6), name
    assert not torch.equal(last["ema"]["head.weight"], last["model"]["head.weight"])


def test_without_validation_the_last_ema_counts(script, squares, workplace):
    """All of the train file is trained on; both test mAPs are written down"""
    out = script("pu_mlc.py", *flags(squares), "--epochs", 2, "--ema", 0.9, "--val_fraction", 0)
    run = only_run(workplace)
    last, best = (torch.load(run / name, weights_only=True) for name in ("last.pt", "best.pt"))
    assert all(torch.equal(value, last["ema"][name]) for name, value in best["model"].items())
    assert last["run"]["steps"] == 2 * 13  # of 100 images, not 80
    first, second = rows_of(run)
    assert second["test_mAP"] == second["test_mAP_ema"] != second["test_mAP_raw"]
    assert not first.get("test_mAP")
    assert "last epoch 2 (no validation)" in out
    assert "thresholds" not in json.loads((run / "result.json").read_text())


@pytest.mark.parametrize(("decay", "told"), [(0.9, ""), (0.99, "77 %"), (0.0, "")])
def test_an_ema_of_initial_weights_is_warned_of(decay, told, script, squares, workplace):
    """0.99^26 = 0.77, 0.9^26 = 0.06 of 13 steps in each of 2 epochs; 0.9 after 3 epochs: 0.02"""
    more = ("--epochs", 3 if decay == 0.9 else 2, "--ema", decay, "--val_fraction", 0)
    out = script("pu_mlc.py", *flags(squares), *more)
    assert re.findall("the EMA, which is kept, will still be (.* %) initial weights", out) == [told] * bool(told)


def test_frozen_batch_norms_need_trained_weights(script, squares, workplace):
    with pytest.raises(SystemExit, match="--freeze_bn needs trained weights: add --no_freeze_bn"):
        script("pu_mlc.py", *flags(squares), "--freeze_bn")
    script("pu_mlc.py", *flags(squares), "--epochs", 1)
    script("pu_mlc.py", *flags(squares), "--epochs", 1, "--freeze_bn", "--init_from", only_run(workplace))
    assert len(list((workplace / "runs").iterdir())) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_never_see_mixed_images(frozen, script, squares, small_weights, workplace):
    """After one step the running mean of the first BatchNorm is that of the plain batch, or untouched"""
    more = ("--weights", str(small_weights), *["--freeze_bn"] * frozen)
    script("pu_mlc.py", *flags(squares), "--max_steps", 1, *more)
    args = common.parse(pu_mlc.Args, pu_mlc.PRESETS, [*map(str, flags(squares)), *more])
    run, data = common.Run(args, str(ROOT / "pu_mlc.py")), common.load(args)
    model = pu_mlc.Classifier(args, 4).train()
    run.epoch = 1
    x, _, _ = next(run.batches(data.train, flip=True))
    with torch.no_grad():
        model.features(x)
    after = torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"]
    norms = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    assert norms
    for name in norms:
        value = model.state_dict()[name]
        assert torch.allclose(after[name], value, atol=1e-6), name
        assert value.any() != frozen


def test_mixed_images_are_normalised_by_their_own_statistics():
    """Frozen norms keep using the running ones; momenta are as before in the end"""
    x = torch.randn(6, 3) * 5 + 7
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.3), nn.BatchNorm1d(3).eval(), nn.SyncBatchNorm(3))
    before = [norm.running_mean.clone() for norm in model]
    with pu_mlc.without_statistics(model):
        assert [norm.momentum for norm in model] == [0, 0.1, 0]
        normal = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(model[0](x), normal)
        torch.testing.assert_close(model[1](x), x / (1 + 1e-5) ** 0.5)
    assert all(torch.equal(norm.running_mean, old) for norm, old in zip(model, before))
    assert [norm.momentum for norm in model] == [0.3, 0.1, 0.1]


def test_crops_are_squares_of_the_image():
    """A ramp tells where a crop was taken and how large it is"""
    ramp = np.stack(np.broadcast_arrays(*np.meshgrid(np.arange(64), np.arange(64)), 0), 2).astype(np.uint8)
    sides = Counter()
    for row in range(300):
        view = pu_mlc.crop(ramp, row, 56, seed=0, epoch=1)
        assert view.shape == (56, 56, 3)
        across, down = (np.ptp(view[..., axis].astype(float)) for axis in (0, 1))
        sides[round((across + 1) / 8)] += 1
        assert abs(across - down) <= 1
    assert set(sides) == {4, 5, 6, 7, 8}  # eighths
    assert min(sides.values()) > 35
    again = [pu_mlc.crop(ramp, 3, 56, seed=0, epoch=epoch) for epoch in (1, 1, 2)]
    assert np.array_equal(again[0], again[1])
    assert not np.array_equal(again[0], again[2])


def test_crops_need_files_that_evaluation_does_not(script, workplace):
    folder = write_cache(write_dataset(workplace / "own"))
    script("pu_mlc.py", *flags(str(folder)), "--crops", "--epochs", 1)
    run = only_run(workplace)
    shutil.rmtree(folder / "images")  # only the cache is left
    with pytest.raises(SystemExit, match="error: --crops needs the image files"):
        script("pu_mlc.py", *flags(str(folder)), "--crops", "--epochs", 1, "--name", "again")
    best = json.loads((run / "result.json").read_text())["val_mAP"]
    assert f"val mAP {best:.2f}" in script("pu_mlc.py", "--eval_only", run)


def test_drop_empty_leaves_out_classes_without_a_positive(script, squares, workplace):
    for name, more in (("keep", ()), ("drop", ("--drop_empty",))):
        script("pu_mlc.py", *flags(squares), "--batch_size", 2, "--max_steps", 1, "--out", name, *more)
    (keep,), (drop,) = ((workplace / name).iterdir() for name in ("keep", "drop"))
    keep, drop = (rows_of(run)[0] for run in (keep, drop))
    assert float(keep["classes_without_positive"]) >= 2  # two images observe two classes at most, of four
    assert float(keep["loss_unlabelled"]) < float(drop["loss_unlabelled"]) < 0
    assert keep["loss_positive"] == drop["loss_positive"]


def test_a_kill_changes_nothing(a_kill_changes_nothing, squares):
    """Scheduler, EMA and the random numbers of mixup come back."""
    more = ("--epochs", 4, "--one_cycle", 5, "--ema", 0.9)
    killed, whole = a_kill_changes_nothing("pu_mlc.py", *flags(squares), *more)
    a, b = (torch.load(run / "last.pt", weights_only=True)["ema"] for run in (killed, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_with_unequal_shares(squares, workplace):
    """Batches of 11, shares of 6 and 5: a half of three images on one, of two on the other"""
    more = ("--epochs", 1, "--ema", 0.9, "--batch_size", 11)
    out = finish(start(*TORCHRUN, ROOT / "pu_mlc.py", *flags(squares), *more, cwd=workplace))
    assert "best epoch 1" in out


def test_two_processes_with_one_image_each(squares, workplace):
    more = ("--max_steps", 3, "--batch_size", 3)  # shares of 2 and 1: where one has no pair, neither mixes
    out = finish(start(*TORCHRUN, ROOT / "pu_mlc.py", *flags(squares), *more, cwd=workplace))
    assert "best epoch 1" in out


@pytest.mark.parametrize(
    "words",
    [
        ("--alpha", 0),
        ("--alpha", "inf"),
        ("--gamma", -1),
        ("--ema", 1),
        ("--weight_decay", "nan"),
        ("--one_cycle", 1, "--epochs", 2),
        ("--one_cycle", -1),
        ("--lgconv", "--linear"),
        ("--crops", "--linear"),
    ],
)
def test_wrong_settings_give_one_sentence(words, script, squares, workplace):
    with pytest.raises(SystemExit, match="error: --"):
        script("pu_mlc.py", *flags(squares), *words)
    assert not (workplace / "runs").exists()


def test_presets_follow_the_setting():
    """Partial labels: the paper's own training; one positive per image: that of the other methods"""
    partial = lambda name: common.parse(pu_mlc.Args, pu_mlc.PRESETS, ["--dataset", name, "--known_ratio", "0.1"])
    voc, coco = partial("voc2007"), partial("coco")
    both = lambda a: (a.backbone, a.weight_decay, a.one_cycle, a.image_size, a.known_ratio, a.val_fraction)
    assert both(voc) == both(coco) == ("resnet101", 1e-4, 80, 448, 0.1, 0)
    assert all(args.lgconv and args.freeze_bn and args.crops for args in (voc, coco))
    assert replace(partial("coco_all"), dataset="coco") == coco
    assert (voc.batch_size, voc.lr, voc.epochs, voc.ema, voc.alpha, voc.gamma) == (90, 4e-5, 55, 0.991, 2, 0.85)
    assert (coco.batch_size, coco.lr, coco.epochs, coco.ema, coco.alpha, coco.gamma) == (70, 1e-4, 40, 0.9997, 1, 0.55)
    single = common.parse(pu_mlc.Args, pu_mlc.PRESETS, ["--dataset", "coco"])
    assert (single.lgconv, single.freeze_bn, single.crops) == (False, False, False)
    assert single.val_fraction == 0.2
    assert (single.backbone, single.batch_size, single.lr, single.epochs, single.ema) == ("resnet50", 16, 1e-5, 10, 0)
    assert partial("voc").backbone == "resnet50"  # no preset of its own
    for words in ("voc2007 --known_ratio 0.1", "voc --known_ratio 0.1", "voc"):  # --linear sees every image once
        linear = common.parse(pu_mlc.Args, pu_mlc.PRESETS, ["--dataset", *words.split(), "--linear"])
        assert (linear.lgconv, linear.crops, linear.one_cycle, linear.ema, linear.epochs) == (False, False, 0, 0, 20)
        assert (linear.batch_size, linear.lr) == ((64, 5e-4) if linear.known_ratio else (8, 1e-4))
