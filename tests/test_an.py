import math
import re

import pytest
import torch
from conftest import LEARNT, SMALL, only_run

import an

LOSSES = list(an.Loss.__args__)
ARGS = dict(dw_weight=0.1, n_ls_target=0.3, entmin_weight=0.4, asl_gamma=2.0, asl_margin=0.2, epr_positives=1.5)


def settings(loss, **changes):
    return an.Args(loss=loss, **{**ARGS, **changes})


def test_an_loss_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [-math.log(3), 0.0]])  # p = 1/2, 3/4; 1/4, 1/2
    z = torch.tensor([[1, 0], [0, 1]])
    expected = (math.log(2) + math.log(4) + math.log(4 / 3) + math.log(2)) / 4
    assert an.an_loss(logits, z).item() == pytest.approx(expected, abs=1e-6)


def test_an_gradient_is_p_minus_z():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    z = torch.zeros(5, 7)
    z[torch.arange(4), torch.tensor([0, 3, 3, 6])] = 1  # the last row has no positive
    (gradient,) = torch.autograd.grad(an.an_loss(logits, z), logits)
    torch.testing.assert_close(gradient, (logits.detach().sigmoid() - z) / 35)


def slow(loss, logit, z, y, classes, a):
    """One label's cost in plain Python, from the definitions in methods.md"""
    p = 1 / (1 + math.exp(-logit))
    positive, negative = -math.log(p), -math.log(1 - p)
    entropy = p * positive + (1 - p) * negative
    m = max(p - a.asl_margin, 0)
    return {
        "an": positive if z else negative,
        "wan": positive if z else negative / (classes - 1),
        "dw": positive if z else a.dw_weight * negative,
        "ls": 0.9 * positive + 0.1 * negative if z else 0.1 * positive + 0.9 * negative,
        "n_ls": positive if z else a.n_ls_target * positive + (1 - a.n_ls_target) * negative,
        "entmin": positive if z else a.entmin_weight * entropy,
        "focal": 0.75 * (1 - p) ** 2 * positive if z else 0.25 * p**2 * negative,
        "asl": positive if z else -(m**a.asl_gamma) * math.log(1 - m),
        "epr": positive if z else 0.0,
        "bce_full": positive if y else negative,
        "bce_1p_alln": positive if z else 0.0 if y else negative,
    }[loss]


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    y = (torch.rand(6, 5) < 0.5).long()
    y[:, 2] = 1
    z = torch.zeros(6, 5, dtype=torch.uint8)
    z[:5, 2] = 1  # the last row has no observed positive
    return logits, z, y


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_against_a_slow_reference(loss, batch):
    logits, z, y = batch
    a = settings(loss)
    labels = [slow(loss, logits[n, c].item(), z[n, c], y[n, c], 5, a) for n in range(6) for c in range(5)]
    expected = sum(labels) / 30
    if loss == "epr":
        expected += ((logits.sigmoid().sum().item() / 6 - a.epr_positives) / 5) ** 2
    before = logits.clone(), z.clone(), y.clone()
    assert an.baseline_loss(logits, z, y, a).item() == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(new, old) for new, old in zip((logits, z, y), before))
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert an.baseline_loss(logits, z.to(dtype), y, a).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_by_finite_differences(loss, batch):
    logits, z, y = batch
    torch.autograd.gradcheck(lambda x: an.baseline_loss(x, z, y, settings(loss)), logits.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("loss", "changes"), [*((loss, {}) for loss in LOSSES), ("asl", dict(asl_gamma=1.0, asl_margin=0.0))]
)
def test_extreme_logits_stay_finite(loss, changes, dtype):
    logits = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 0.0]], dtype=dtype, requires_grad=True)
    z = torch.tensor([[0, 1, 0], [0, 0, 0]])
    y = torch.tensor([[0, 1, 1], [1, 0, 0]])
    value = an.baseline_loss(logits.float(), z, y, settings(loss, **changes))
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_penalties_by_hand():
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -4.0]]))
        model.bias.fill_(1.0)
    value = an.penalty(model, an.Args(l1=0.1, l2=0.01))
    assert value.item() == pytest.approx(0.1 * 8 + 0.01 * 26)


def last_test_mAP(out):
    return float(re.search(r"last epoch ([\d.]+)\)", out)[1])


FLAGS = (*SMALL, "--epochs", 8, "--epr_positives", 2, "--workers", 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(loss, script, squares, workplace):
    out = script("an.py", "--dataset", squares, *FLAGS, "--loss", loss)
    assert last_test_mAP(out) > LEARNT, out
    assert (only_run(workplace) / "curve.png").stat().st_size > 5000


def test_what_did_not_learn_stays_below(script, squares, workplace):
    """Chance on these images is 50; without learning a network comes nowhere near what the tests above ask for."""
    out = script("an.py", "--dataset", squares, *FLAGS, "--lr", 1e-12)
    assert last_test_mAP(out) < LEARNT - 10, out
