import math
import re

import pytest
import torch
from conftest import LEARNT, SMALL, only_run

import an
import baselines
import common

LOSSES = list(baselines.Loss.__args__)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
ARGS = dict(dw_weight=0.1, n_ls_target=0.3, entmin_weight=0.4, asl_gamma=2.0, asl_margin=0.2, epr_positives=1.5)


def settings(loss, **changes):
    return baselines.Args(loss=loss, **{**ARGS, **changes})


def slow(loss, logit, z, y, classes, a):
    """One label's cost in plain Python, from the definitions in Zhou et al."""
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


def test_losses_by_hand():
    """p = 1/2 everywhere: -log p = -log(1 - p) = H(p) = log 2; one positive is observed of four labels, two are true"""
    logits, z, y = torch.zeros(1, 4), torch.tensor([[1, 0, 0, 0]]), torch.tensor([[1, 1, 0, 0]])
    log2 = math.log(2)
    expected = dict(an=log2, wan=log2 / 2, dw=log2 * 1.3 / 4, ls=log2, n_ls=log2, entmin=log2 * 2.2 / 4)
    expected |= dict(focal=log2 * (0.75 + 3 * 0.25) / 4 / 4, asl=(log2 - 3 * 0.3**2 * math.log(0.7)) / 4)
    expected |= dict(epr=log2 / 4 + (0.5 / 4) ** 2, bce_full=log2, bce_1p_alln=3 * log2 / 4)
    got = {loss: baselines.baseline_loss(logits, z, y, settings(loss))[0].item() for loss in LOSSES}
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_against_a_slow_reference(loss, batch):
    logits, z, y = batch
    a = settings(loss)
    labels = [slow(loss, logits[n, c].item(), z[n, c], y[n, c], 5, a) for n in range(6) for c in range(5)]
    expected = sum(labels) / 30
    if loss == "epr":
        expected += ((logits.sigmoid().sum().item() / 6 - a.epr_positives) / 5) ** 2
    before = logits.clone(), z.clone(), y.clone()
    assert baselines.baseline_loss(logits, z, y, a)[0].item() == pytest.approx(expected, rel=1e-12)
    assert all(torch.equal(new, old) for new, old in zip((logits, z, y), before))
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert baselines.baseline_loss(logits, z.to(dtype), y, a)[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_parts_are_those_of_positives_and_others(loss, batch):
    logits, z, y = batch
    a = settings(loss)
    value, parts = baselines.baseline_loss(logits, z, y, a)
    positive = y if loss == "bce_full" else z
    labels = [(n, c) for n in range(6) for c in range(5) if positive[n, c]]
    expected = sum(slow(loss, logits[n, c].item(), z[n, c], y[n, c], 5, a) for n, c in labels) / 30
    assert parts["loss_positive"].item() == pytest.approx(expected, rel=1e-12)
    assert sum(parts.values()).item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_full_labels_are_for_the_upper_bounds_alone(loss, batch):
    logits, z, y = batch
    value = lambda full: baselines.baseline_loss(logits, z, full, settings(loss))[0].item()
    if loss.startswith("bce"):
        assert value(y) != value(1 - y)
    else:
        assert value(y) == value(None)


def test_limits(batch):
    """What a setting of its own turns into AN"""
    logits, z, y = batch
    expected = an.an_loss(logits, z)[0].item()
    same = [("an", {}), ("dw", dict(dw_weight=1.0)), ("n_ls", dict(n_ls_target=0.0))]
    for loss, changes in [*same, ("asl", dict(asl_gamma=0.0, asl_margin=0.0))]:
        assert baselines.baseline_loss(logits, z, y, settings(loss, **changes))[0].item() == pytest.approx(expected)
    small = baselines.baseline_loss(logits, z, y, settings("asl", asl_margin=1e-9))[0].item()
    assert small == pytest.approx(baselines.baseline_loss(logits, z, y, settings("asl", asl_margin=0.0))[0].item())


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_by_finite_differences(loss, batch):
    logits, z, y = batch
    torch.autograd.gradcheck(lambda x: baselines.baseline_loss(x, z, y, settings(loss))[0], logits.requires_grad_())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_computed_in_full_precision(loss, dtype, autocast, batch):
    logits, z, y = batch[0].to(dtype).requires_grad_(), *batch[1:]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = baselines.baseline_loss(logits, z, y, settings(loss))[0]
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = baselines.baseline_loss(logits.double(), z, y, settings(loss))[0].item()
    assert value.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(value, logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        *((loss, {}) for loss in LOSSES),
        ("asl", dict(asl_gamma=1.0, asl_margin=0.0)),
        ("asl", dict(asl_gamma=0.5)),
        ("asl", dict(asl_gamma=0.0)),
    ],
)
def test_extreme_logits_stay_finite(loss, changes, dtype):
    logits = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 0.0]], dtype=dtype, requires_grad=True)
    z = torch.tensor([[0, 1, 0], [0, 0, 0]])
    y = torch.tensor([[0, 1, 1], [1, 0, 0]])
    value = baselines.baseline_loss(logits, z, y, settings(loss, **changes))[0]
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_penalties_by_hand():
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -4.0]]))
        model.bias.fill_(1.0)
    assert baselines.penalty(model, l1=0.1, l2=0.01).item() == pytest.approx(0.1 * 8 + 0.01 * 26)
    model.bias.requires_grad_(False)  # frozen
    assert baselines.penalty(model, l1=0.1, l2=0.01).item() == pytest.approx(0.1 * 7 + 0.01 * 25)
    (gradient,) = torch.autograd.grad(baselines.penalty(model, l1=0.1, l2=0.01), model.weight)
    assert gradient.tolist() == [pytest.approx([0.1 + 0.06, -0.1 - 0.08])]


# ---- settings


def test_presets_are_those_of_supplement_b2():
    table = {"voc": (8, 1e-5, 0.1, 0.3, 0.01, 2, 0.2, 1.5), "coco": (16, 1e-5, 0.1, 0.1, 0.9, 2, 0.2, 2.9)}
    table |= {"nus": (16, 1e-5, 0.1, 0.1, 0.4, 2, 0.2, 1.9), "cub": (8, 1e-4, 0.02, 0.1, 0.4, 1, 0, 31.4)}
    for dataset, values in table.items():
        a = common.parse(baselines.Args, baselines.PRESETS, ["--dataset", dataset])
        own = a.dw_weight, a.n_ls_target, a.entmin_weight, a.asl_gamma, a.asl_margin, a.epr_positives
        assert (a.batch_size, a.lr, *own) == values
        assert (a.epochs, a.patience, a.loss, a.l1, a.l2) == (10, -1, "an", 0, 0)


REFUSED = {
    "--l1 -1": "--l1 must be at least 0, not -1.0",
    "--l2 -1e-9": "--l2 must be at least 0, not -1e-09",
    "--dw_weight -0.1": "--dw_weight must be at least 0, not -0.1",
    "--n_ls_target 7": "--n_ls_target must be between 0 and 1, not 7.0",
    "--n_ls_target -0.1": "--n_ls_target must be between 0 and 1, not -0.1",
    "--entmin_weight -1": "--entmin_weight must be at least 0, not -1.0",
    "--asl_gamma -2": "--asl_gamma must be at least 0, not -2.0",
    "--asl_margin 1": "--asl_margin must be at least 0 and below 1, not 1.0",
    "--epr_positives -1": "--epr_positives must be at least 0, not -1.0",
    "--epr_positives inf": "--epr_positives must be a finite number, not inf",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_out_of_range_is_one_sentence(words, script, squares, workplace):
    with pytest.raises(SystemExit) as refusal:
        script("baselines.py", "--dataset", squares, *words.split())
    assert refusal.value.code == f"error: {REFUSED[words]}"
    assert not (workplace / "runs").exists()


def test_an_unknown_loss_names_the_choices(script, squares, workplace, capsys):
    with pytest.raises(SystemExit):
        script("baselines.py", "--dataset", squares, "--loss", "role")
    said = capsys.readouterr().err
    assert all(loss in said for loss in LOSSES)


# ---- runs


def last_test_mAP(out):
    return float(re.search(r"last epoch ([\d.]+)\)", out)[1])


FLAGS = (*SMALL, "--epochs", 8, "--epr_positives", 2, "--workers", 0)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(loss, script, squares, workplace):
    out = script("baselines.py", "--dataset", squares, *FLAGS, "--loss", loss)
    assert last_test_mAP(out) > LEARNT, out
    assert (only_run(workplace) / "curve.png").stat().st_size > 5000


def test_what_did_not_learn_stays_below(script, squares, workplace):
    """Chance on these images is 50; without learning a network comes nowhere near what the tests above ask for."""
    out = script("baselines.py", "--dataset", squares, *FLAGS, "--lr", 1e-12)
    assert last_test_mAP(out) < LEARNT - 10, out


def test_its_an_is_that_of_an_and_penalties_come_on_top(script, squares, workplace):
    def weights_after(name, out, *more):
        script(name, "--dataset", squares, *SMALL, "--max_steps", 3, "--workers", 0, *more, "--out", out)
        (run,) = (workplace / out).iterdir()
        return torch.load(run / "last.pt", weights_only=True)["model"]

    trunk, same = weights_after("an.py", "an"), weights_after("baselines.py", "same")
    assert all(torch.equal(trunk[key], same[key]) for key in trunk)
    for out, flag in (("l1", "--l1"), ("l2", "--l2")):
        shrunk = weights_after("baselines.py", out, flag, 1)
        assert shrunk["head.weight"].abs().sum() < trunk["head.weight"].abs().sum()
