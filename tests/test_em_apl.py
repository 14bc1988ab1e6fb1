import csv
import math
import re
import signal
import time

import pytest
import torch
from conftest import LEARNT, ROOT, SMALL, TORCHRUN, finish, only_run, start

import common
import em_apl


def test_em_loss_by_hand():
    logits = torch.tensor([[0.0, math.log(3)]])  # p = 1/2, 3/4
    z, s = torch.tensor([[1, 0]]), torch.zeros(1, 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert em_apl.em_apl_loss(logits, z, s, 0.2, 9.0).item() == pytest.approx((math.log(2) - 0.2 * entropy) / 2)


def test_pseudo_negative_by_hand():
    logits, z, s = torch.tensor([[math.log(3)]]), torch.tensor([[-1]]), torch.tensor([[0.1]])
    expected = 0.5 * (-0.1 * math.log(0.75) - 0.9 * math.log(0.25))
    assert em_apl.em_apl_loss(logits, z, s, 0.2, 0.5).item() == pytest.approx(expected)


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    z = torch.randint(-1, 2, (6, 5))
    z[3] = 0  # no positive
    return logits, z, torch.rand(6, 5, dtype=torch.float64)


def test_loss_against_a_slow_reference(batch):
    logits, z, s = batch
    total = 0.0
    for n in range(6):
        for c in range(5):
            p = 1 / (1 + math.exp(-logits[n, c]))
            if z[n, c] == 1:
                total -= math.log(p)
            elif z[n, c] == 0:
                total += 0.3 * (p * math.log(p) + (1 - p) * math.log(1 - p))
            else:
                total -= 0.7 * (s[n, c].item() * math.log(p) + (1 - s[n, c].item()) * math.log(1 - p))
    before = [t.clone() for t in batch]
    for dtype in (torch.int8, torch.float32, torch.int64):
        assert em_apl.em_apl_loss(logits, z.to(dtype), s, 0.3, 0.7).item() == pytest.approx(total / 30, rel=1e-12)
    assert all(torch.equal(new, old) for new, old in zip(batch, before))


def test_gradients(batch):
    logits, z, s = batch
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: em_apl.em_apl_loss(x, z, s, 0.3, 0.7), logits)
    (gradient,) = torch.autograd.grad(em_apl.em_apl_loss(logits, z, s, 0.3, 0.7), logits)
    p = logits.detach().sigmoid()
    closed = torch.where(
        z == 1, p - 1, torch.where(z == 0, 0.3 * logits.detach() * p * (1 - p), 0.7 * (p - s))
    )  # Eq. 5
    torch.testing.assert_close(gradient, closed / 30)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[100.0, -100.0, 100.0, -100.0, 100.0, -100.0]], requires_grad=True)
    z, s = torch.tensor([[1, 1, 0, 0, -1, -1]]), torch.full((1, 6), 0.3)
    value = em_apl.em_apl_loss(logits, z, s, 0.2, 0.5)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_soft_labels_count_only_where_they_are():
    logits, z = torch.zeros(1, 2, requires_grad=True), torch.tensor([[1, -1]])
    value = em_apl.em_apl_loss(logits, z, torch.tensor([[math.nan, 0.5]]), 0.2, 1.0)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.item() == pytest.approx(math.log(2))
    assert gradient.isfinite().all()


def test_selection_by_hand():
    p = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.3, 0.5], [0.1, 0.2, 0.5], [0.4, 0.0, 0.5]])
    z = torch.tensor([[0, 0, 0], [0, -1, 0], [1, 0, 0], [0, 1, 0]])
    chosen = em_apl.select_pseudo_negatives(p, z, [2, 5, 1])
    assert chosen.tolist() == [[False, True, True], [True, False, False], [False, True, False], [True, False, False]]
    assert not em_apl.select_pseudo_negatives(p, z, [0, 0, 0]).any()
    assert not em_apl.select_pseudo_negatives(p, torch.ones_like(z), torch.tensor([4, 4, 4])).any()


def test_selection_against_a_loop():
    torch.manual_seed(1)
    p, z = torch.rand(40, 6).round(decimals=1), torch.randint(-1, 2, (40, 6))  # ties
    quota = [0, 3, 7, 14, 40, 1]
    chosen = em_apl.select_pseudo_negatives(p, z, quota)
    for c, n in enumerate(quota):
        free = [row for row in range(40) if z[row, c] == 0]
        expected = sorted(p[row, c].item() for row in free)[:n]
        assert sorted(p[chosen[:, c], c].tolist()) == expected
        assert all(z[row, c] == 0 for row in chosen[:, c].nonzero().flatten())


def test_quality_by_hand():
    free = torch.tensor([[0, 1], [1, 1], [1, 1], [1, 1]], dtype=torch.bool)
    y = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    chosen = torch.tensor([[0, 1], [1, 1], [1, 0], [1, 0]], dtype=torch.bool)  # three of class 0, two of class 1
    correct, by_chance, at_best = em_apl.quality(chosen, y == 0, free)
    assert correct.item() == pytest.approx(60)
    assert by_chance.item() == pytest.approx(100 * (3 * 2 / 3 + 2 * 3 / 4) / 5)
    assert at_best.item() == pytest.approx(100 * (2 + 2) / 5)


def test_presets_are_those_of_table_6():
    parse = lambda dataset: common.parse(em_apl.Args, em_apl.PRESETS, ["--dataset", dataset])
    table = {"voc": (8, 1e-5, 0.2, 0.02, 5), "coco": (16, 1e-5, 0.1, 0.9, 5)}
    table |= {"nus": (16, 1e-5, 0.1, 0.2, 4), "cub": (8, 1e-4, 0.01, 0.4, 3)}
    for dataset, values in table.items():
        args = parse(dataset)
        assert (args.batch_size, args.lr, args.alpha, args.beta, args.warmup) == values
        assert (args.theta, args.epochs, args.patience) == (0.9, 10, 0)


# ---- runs

FLAGS = (*SMALL, "--workers", 0, "--patience", -1)


def rows_of(run):
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_the_schedule_of_pseudo_negatives(script, squares, workplace):
    script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 5, "--warmup", 2, "--theta", 0.6)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    z, s = last["z"], last["s"]
    quota = [int(0.6 * n / 3) for n in (z != 1).sum(0).tolist()]
    counts = [round(80 * float(row["negatives_per_image"])) for row in rows_of(only_run(workplace))]
    assert counts == [n * sum(quota) for n in (0, 1, 2, 3, 3)]  # after epochs 2, 3 and 4; not after the last
    assert (z == -1).sum(0).tolist() == [3 * q for q in quota]
    assert ((s > 0) == (z == -1)).all()
    rows = rows_of(only_run(workplace))
    assert {"loss_positive", "loss_unknown", "loss_pseudo", "logit_positives", "logit_negatives"} <= rows[0].keys()
    terms = sum(float(rows[0][f"loss_{term}"]) for term in ("positive", "unknown", "pseudo"))
    assert float(rows[0]["loss"]) == pytest.approx(terms, abs=1e-6)
    assert float(rows[-1]["pseudo_correct"]) <= float(rows[-1]["pseudo_at_best"])


@pytest.mark.parametrize(
    "flags", [("--no_apl",), ("--hard",), ("--beta", 1), ("--pos_theta", 0.1), ("--linear", "--lr", 0.01)]
)
def test_ablations_run(flags, script, squares, workplace):
    script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 4, "--warmup", 2, *flags)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    chosen = last["z"] < 0
    assert chosen.any() == ("--no_apl" not in flags)
    if "--hard" in flags:
        assert not last["s"].any()
    if "--pos_theta" in flags:
        free = (last["z"] != 1).sum(0).tolist()
        assert chosen.sum(0).tolist() == [2 * (int(0.9 * n / 2) + int(0.1 * n / 2)) for n in free]


def test_what_is_selected_and_recorded(script, squares, workplace):
    """Stopped right after its one selection, a run holds the model that selected: it tells what should have been."""
    flags = ("--epochs", 3, "--warmup", 2, "--theta", 0.5, "--pos_theta", 0.1, "--max_steps", 20)
    script("em_apl.py", "--dataset", squares, *FLAGS, *flags)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    args = em_apl.Args(dataset=squares, image_size=32, backbone="resnet_small", weights="none")
    split = common.load(args).train
    model = common.Classifier(args, 4).eval()
    model.load_state_dict(last["model"])
    with torch.no_grad():
        p = model(split.images[split.rows].permute(0, 3, 1, 2).float() / 255).sigmoid()  # plain images, eval mode
    z, s = last["z"], last["s"]
    torch.testing.assert_close(s[z < 0], p[z < 0], rtol=1e-4, atol=1e-5)
    for c in range(4):
        free = p[split.z[:, c] == 0, c].sort().values
        low, high = int(0.5 * len(free)), int(0.1 * len(free))
        torch.testing.assert_close(s[z[:, c] == -1, c].sort().values, free[:low], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(s[z[:, c] == -2, c].sort().values, free[len(free) - high :], rtol=1e-4, atol=1e-5)
    assert torch.equal(z == 1, split.z == 1)


def test_a_stop_between_selection_and_save_changes_nothing(script, squares, workplace, monkeypatch):
    command = ("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 4, "--warmup", 1)
    script(*command, "--out", "whole")
    save = common.Run.save

    def stopped(run, *rest):
        if run.epoch == 3:
            raise KeyboardInterrupt  # epoch 3 has selected, and nothing of it is on disk
        return save(run, *rest)

    monkeypatch.setattr(common.Run, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        script(*command, "--out", "torn")
    monkeypatch.setattr(common.Run, "save", save)
    (torn,), (whole,) = (workplace / "torn").iterdir(), (workplace / "whole").iterdir()
    script("em_apl.py", "--resume", torn)
    a, b = (torch.load(run / "last.pt", weights_only=True) for run in (torn, whole))
    assert torch.equal(a["z"], b["z"])
    assert torch.equal(a["s"], b["s"])


def test_em_learns(script, squares, workplace):
    out = script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 8, "--no_apl")
    assert float(re.search(r"last epoch ([\d.]+)\)", out)[1]) > LEARNT, out


def test_too_few_epochs_for_pseudo_labels_are_said(script, squares, workplace):
    assert "warning: no pseudo-labels" in script(
        "em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 2, "--warmup", 2
    )


def test_the_label_state_survives_a_kill(squares, workplace):
    command = (ROOT / "em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 10, "--warmup", 2)
    process = start(*command, cwd=workplace)
    while not (found := list(workplace.glob("runs/*/metrics.csv"))) or len(rows_of(found[0].parent)) < 4:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(rows_of(only_run(workplace))) < 10
    finish(start(ROOT / "em_apl.py", "--resume", only_run(workplace), cwd=workplace))
    finish(start(*command, "--out", "whole", cwd=workplace))
    (whole,) = (workplace / "whole").iterdir()
    a, b = (torch.load(run / "last.pt", weights_only=True) for run in (only_run(workplace), whole))
    assert torch.equal(a["z"], b["z"])
    assert torch.equal(a["s"], b["s"])
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])


def test_two_processes_select_together(squares, workplace):
    finish(
        start(*TORCHRUN, ROOT / "em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 4, "--warmup", 2, cwd=workplace)
    )
    z = torch.load(only_run(workplace) / "last.pt", weights_only=True)["z"]
    assert (z == -1).sum(0).tolist() == [2 * int(0.9 * n / 2) for n in (z != 1).sum(0).tolist()]
