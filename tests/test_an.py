import math
import re
from importlib import import_module

import pytest
import torch
from conftest import LEARNT, SMALL, metrics, only_run

import an
import common

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def test_an_loss_by_hand():
    logits = torch.tensor([[0.0, math.log(3)], [-math.log(3), 0.0]])  # p = 1/2, 3/4; 1/4, 1/2
    z = torch.tensor([[1, 0], [0, 1]])
    expected = (math.log(2) + math.log(4) + math.log(4 / 3) + math.log(2)) / 4
    loss, parts = an.an_loss(logits, z)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert parts["loss_positive"].item() == pytest.approx(2 * math.log(2) / 4, abs=1e-6)
    assert parts["loss_negative"].item() == pytest.approx((math.log(4) + math.log(4 / 3)) / 4, abs=1e-6)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    z = torch.zeros(5, 7, dtype=torch.uint8)
    z[torch.arange(4), torch.tensor([0, 3, 3, 6])] = 1  # the last row has no positive
    return 3 * torch.randn(5, 7, dtype=torch.float64), z


def test_an_gradient_is_p_minus_z(batch):
    logits, z = batch
    torch.autograd.gradcheck(lambda x: an.an_loss(x, z)[0], logits.requires_grad_())
    (gradient,) = torch.autograd.grad(an.an_loss(logits, z)[0], logits)
    torch.testing.assert_close(gradient, (logits.detach().sigmoid() - z) / 35)


def test_the_loss_changes_nothing_and_takes_labels_of_any_dtype(batch):
    logits, z = batch
    before, loss = [t.clone() for t in batch], an.an_loss(logits, z)[0]
    for dtype in (torch.float32, torch.int64, torch.bool):
        assert an.an_loss(logits, z.to(dtype))[0] == loss
    assert all(torch.equal(new, old) for new, old in zip(batch, before))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_computed_in_full_precision(dtype, autocast, batch):
    logits, z = batch[0].to(dtype).requires_grad_(), batch[1]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = an.an_loss(logits, z)[0]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(an.an_loss(logits.double(), z)[0].item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 0.0]], dtype=dtype, requires_grad=True)
    loss = an.an_loss(logits, torch.tensor([[0, 1, 0], [0, 0, 0]]))[0]
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx((300 + 2 * math.log(2)) / 6)
    assert gradient.isfinite().all()


# ---- settings

SCRIPTS = ["an", "baselines", "em_apl", "vlpl", "aevlp"]
EVERYWHERE = {
    "--epochs 0": "--epochs must be at least 1 and below 2^31, not 0",
    "--batch_size -8": "--batch_size must be at least 1 and below 2^31, not -8",
    "--image_size 2147483648": "--image_size must be at least 1 and below 2^31, not 2147483648",
    "--lr 0": "--lr must be above 0, not 0.0",
    "--lr inf": "--lr must be a finite number, not inf",
    "--lr nan": "--lr must be a finite number, not nan",
    "--patience -2": "--patience must be at least -1 and below 2^31, not -2",
    "--known_ratio 1.5": "--known_ratio must be between 0 and 1, not 1.5",
    "--seed -1": "--seed must be at least 0 and below 2^31, not -1",
    "--workers -2": "--workers must be at least -1 and at most 256, not -2",
    "--max_steps -3": "--max_steps must be at least 0 and below 2^31, not -3",
}


@pytest.mark.parametrize("words", EVERYWHERE)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_value_out_of_range_is_one_sentence(name, words, script, squares, workplace):
    with pytest.raises(SystemExit) as refusal:
        script(f"{name}.py", "--dataset", squares, *words.split())
    assert refusal.value.code == f"error: {EVERYWHERE[words]}"
    assert not (workplace / "runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_presets_are_within_their_ranges(name):
    module = import_module(name)
    for name in ("voc", *module.PRESETS):
        words = {"--linear": "--dataset voc --linear", "--device cpu": "--dataset pets --device cpu"}
        args = common.parse(module.Args, module.PRESETS, words.get(name, f"--dataset {name}").split())
        preset = module.PRESETS.get(name, {})
        on_top = module.PRESETS.get("--linear", {}) if args.linear else {}
        assert all(getattr(args, key) == value for key, value in (preset | on_top).items())


# ---- runs

FLAGS = (*SMALL, "--epochs", 8, "--workers", 0)


def last_test_mAP(out):
    return float(re.search(r"last epoch ([\d.]+)\)", out)[1])


def test_an_learns(script, squares, workplace):
    out = script("an.py", "--dataset", squares, *FLAGS)
    assert last_test_mAP(out) > LEARNT, out
    assert (only_run(workplace) / "curve.png").stat().st_size > 5000


def test_what_did_not_learn_stays_below(script, squares, workplace):
    """Chance on these images is 50; without learning a network comes nowhere near what learning is asked for."""
    out = script("an.py", "--dataset", squares, *FLAGS, "--lr", 1e-12)
    assert last_test_mAP(out) < LEARNT - 10, out


def test_the_logged_loss_is_that_of_its_step(script, squares, workplace):
    """One step on all images at a learning rate of nothing, made again from the checkpoint's weights"""
    script("an.py", "--dataset", squares, *SMALL, "--epochs", 1, "--batch_size", 80, "--lr", 1e-30)
    args = common.parse(an.Args, an.PRESETS, ["--dataset", squares, *SMALL, "--batch_size", "80"])
    run, data = common.Run(args, "an.py"), common.load(args)
    model = common.Classifier(args, 4).train()
    model.load_state_dict(torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"])
    run.epoch = 1
    ((x, z, idx),) = run.batches(data.train, flip=True)
    (row,) = metrics(only_run(workplace))
    loss, parts = an.an_loss(model(x), z)
    for name, value in dict(loss=loss, **parts).items():
        assert float(row[name]) == pytest.approx(value.item(), rel=1e-4)
    assert float(row["loss_positive"]) + float(row["loss_negative"]) == pytest.approx(float(row["loss"]))
    assert torch.equal(z, data.train.z[idx])


def test_the_other_losses_are_not_an(script, squares, workplace, capsys):
    with pytest.raises(SystemExit):
        script("an.py", "--dataset", squares, "--loss", "ls")
    assert "--loss" in capsys.readouterr().err
    assert not (workplace / "runs").exists()
