import csv
import math
import re
import signal
import time

import bench
import pytest
import torch
from conftest import LEARNT, ROOT, SMALL, TORCHRUN, assert_same_run, finish, only_run, start
from hypothesis import given, settings
from hypothesis import strategies as st

import common
import em_apl

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def loss_of(*arguments):
    """The loss that the script's loop takes, without its parts"""
    return em_apl.em_apl_loss(*arguments)[0]


def test_em_loss_by_hand():
    logits = torch.tensor([[0.0, math.log(3)]])  # p = 1/2, 3/4
    z, s = torch.tensor([[1, 0]]), torch.zeros(1, 2)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    loss, parts = em_apl.em_apl_loss(logits, z, s, 0.2, 9.0)
    assert loss.item() == pytest.approx((math.log(2) - 0.2 * entropy) / 2)
    expected = {"loss_positive": math.log(2) / 2, "loss_unknown": -0.1 * entropy, "loss_pseudo_negative": 0.0}
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(expected)


def test_pseudo_negative_by_hand():
    logits, z, s = torch.tensor([[math.log(3)]]), torch.tensor([[-1]]), torch.tensor([[0.1]])
    expected = 0.5 * (-0.1 * math.log(0.75) - 0.9 * math.log(0.25))
    loss, parts = em_apl.em_apl_loss(logits, z, s, 0.2, 0.5)
    assert loss.item() == parts["loss_pseudo_negative"].item() == pytest.approx(expected)


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
        assert loss_of(logits, z.to(dtype), s, 0.3, 0.7).item() == pytest.approx(total / 30, rel=1e-12)
    assert all(torch.equal(new, old) for new, old in zip(batch, before))


def test_gradients(batch):
    logits, z, s = batch
    logits.requires_grad_()
    torch.autograd.gradcheck(lambda x: loss_of(x, z, s, 0.3, 0.7), logits)
    (gradient,) = torch.autograd.grad(loss_of(logits, z, s, 0.3, 0.7), logits)
    p = logits.detach().sigmoid()
    closed = torch.where(
        z == 1, p - 1, torch.where(z == 0, 0.3 * logits.detach() * p * (1 - p), 0.7 * (p - s))
    )  # Eq. 5
    torch.testing.assert_close(gradient, closed / 30)


def test_parts_sum_up_to_the_loss(batch):
    loss, parts = em_apl.em_apl_loss(*batch, 0.3, 0.7)
    assert list(parts) == ["loss_positive", "loss_unknown", "loss_pseudo_negative"]
    assert sum(parts.values()).item() == pytest.approx(loss.item(), rel=1e-12)
    assert all(part != 0 for part in parts.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_computed_in_full_precision(dtype, autocast, batch):
    logits, z, s = batch[0].to(dtype).requires_grad_(), batch[1], batch[2].float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, parts = em_apl.em_apl_loss(logits, z, s, 0.3, 0.7)
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    assert {value.dtype for value in (loss, *parts.values())} == {precise}
    assert loss.item() == pytest.approx(loss_of(logits.double(), z, s, 0.3, 0.7).item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[100.0, -100.0, 100.0, -100.0, 100.0, -100.0]], dtype=dtype, requires_grad=True)
    z, s = torch.tensor([[1, 1, 0, 0, -1, -1]]), torch.full((1, 6), 0.3)
    value = loss_of(logits, z, s, 0.2, 0.5)
    (gradient,) = torch.autograd.grad(value, logits)
    assert value.isfinite()
    assert gradient.isfinite().all()


def test_soft_labels_count_only_where_they_are():
    logits, z = torch.zeros(1, 2, requires_grad=True), torch.tensor([[1, -1]])
    value = loss_of(logits, z, torch.tensor([[math.nan, 0.5]]), 0.2, 1.0)
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


def slow_selection(p, z, quota):
    """By the whole order of a class: the first of equals"""
    chosen = torch.zeros(p.shape, dtype=torch.bool)
    for c, n in enumerate(quota):
        free = [row for row in range(len(p)) if z[row, c] == 0]
        chosen[sorted(free, key=lambda row: (p[row, c].item(), row))[:n], c] = True
    return chosen


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.sampled_from([1, 2, 5, 10**6]), st.sampled_from(DTYPES), st.integers(0, 10**6))
def test_selection_takes_the_first_of_equals(n, levels, dtype, seed):
    """Of -p too, as --pos_theta has it; quotas of nothing and of more than there is"""
    torch.manual_seed(seed)
    p, z = (torch.randint(-levels, levels + 1, (n, 5)) / levels).to(dtype), torch.randint(-1, 2, (n, 5))
    z[:, 0], z[:, 1] = 0, 1
    quota = torch.randint(0, n + 2, (5,))
    kept = p.clone(), z.clone()
    for given_quota in (quota, quota.tolist()):
        assert torch.equal(em_apl.select_pseudo_negatives(p, z.char(), given_quota), slow_selection(p, z, quota))
    assert torch.equal(p, kept[0])
    assert torch.equal(z, kept[1])


def test_selection_takes_less_memory_than_the_predictions():
    """In a process of its own: this one may have kept freed memory, which would serve again"""
    _, added, predictions = bench.in_new_process(bench.table_cost, "selection", 100_000, 50)
    assert added < predictions


def test_logit_magnitudes_by_hand():
    logits = torch.tensor([[3.0, -5.0, 2.0], [-1.0, 4.0, -8.0]], requires_grad=True)
    z, y = torch.tensor([[1, 0, 0], [0, 0, 0]]), torch.tensor([[1, 1, 0], [0, 1, 0]])
    sizes = em_apl.logit_magnitudes(logits, z, y)
    assert sizes["logit_positives"].item() == pytest.approx((5 + 4) / 2)  # the observed 3 is left out
    assert sizes["logit_negatives"].item() == pytest.approx((2 + 1 + 8) / 3)
    assert not any(size.requires_grad for size in sizes.values())
    assert em_apl.logit_magnitudes(logits, z, torch.zeros_like(y))["logit_positives"].isnan()  # none there


def columns(*batches):
    run = common.Run(em_apl.Args(device="cpu", workers=0), "em_apl.py")
    for pseudo, z, y in batches:
        run.log_pseudo_labels(pseudo, z, y)
    return run.row_of_logs()


def test_columns_of_pseudo_labels_by_hand():
    z = torch.tensor([[1, 0], [0, 0], [0, 0], [0, 0]])
    y = torch.tensor([[1, 1], [1, 0], [0, 0], [0, 0]])
    pseudo = torch.tensor([[-1, -1], [-1, -1], [-1, 0], [-1, 1]])  # of the observed one nobody asks
    expected = {  # three and two negatives are chosen; 2 of 3 and 3 of 4 that were not observed are right
        "pseudo_negatives_per_image": 5 / 4,
        "pseudo_negatives_precision": 100 * 3 / 5,
        "pseudo_negatives_precision_at_random": 100 * (3 * 2 / 3 + 2 * 3 / 4) / 5,
        "pseudo_negatives_recall": 100 * 3 / 5,
        "pseudo_positives_per_image": 1 / 4,
        "pseudo_positives_precision": 0,
        "pseudo_positives_precision_at_random": 100 * 1 / 4,
        "pseudo_positives_recall": 0,
    }
    assert columns((pseudo, z, y)) == pytest.approx(expected)
    halves = [(pseudo[half], z[half], y[half]) for half in (slice(0, 1), slice(1, 4))]
    assert columns(*halves) == pytest.approx(expected)
    counts = {name: value for name, value in expected.items() if name.endswith("per_image")}
    assert columns((pseudo, z, None)) == pytest.approx(counts)  # nobody knows the truth
    none = columns((torch.zeros_like(pseudo), z, y))
    assert none == dict.fromkeys(counts, 0)  # there is nothing to judge
    negatives = columns((pseudo.clamp(max=0), z, y))
    assert negatives == pytest.approx(
        {name: value for name, value in expected.items() if "negatives" in name} | {"pseudo_positives_per_image": 0}
    )


def test_presets_are_those_of_table_6():
    parse = lambda dataset: common.parse(em_apl.Args, em_apl.PRESETS, ["--dataset", dataset])
    table = {"voc": (8, 1e-5, 0.2, 0.02, 5), "coco": (16, 1e-5, 0.1, 0.9, 5)}
    table |= {"nus": (16, 1e-5, 0.1, 0.2, 4), "cub": (8, 1e-4, 0.01, 0.4, 3)}
    for dataset, values in table.items():
        args = parse(dataset)
        assert (args.batch_size, args.lr, args.alpha, args.beta, args.warmup) == values
        assert (args.theta, args.epochs, args.patience) == (0.9, 10, 0)


REFUSED = {
    "--alpha -9": "--alpha must be at least 0, not -9.0",
    "--beta -0.1": "--beta must be at least 0, not -0.1",
    "--beta nan": "--beta must be a finite number, not nan",
    "--theta 1.5": "--theta must be between 0 and 1, not 1.5",
    "--pos_theta -0.1": "--pos_theta must be between 0 and 1, not -0.1",
    "--warmup 0": "--warmup must be at least 1 and below 2^31, not 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_out_of_range_is_one_sentence(words, script, squares, workplace):
    with pytest.raises(SystemExit) as refusal:
        script("em_apl.py", "--dataset", squares, *words.split())
    assert refusal.value.code == f"error: {REFUSED[words]}"
    assert not (workplace / "runs").exists()


# ---- runs

FLAGS = (*SMALL, "--workers", 0, "--patience", -1)


def rows_of(run):
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def state_of(run):
    last = torch.load(run / "last.pt", weights_only=True)
    assert set(last["labels"]) == {"pseudo", "s"}
    return last["labels"]["pseudo"], last["labels"]["s"]


def train_split(squares):
    return common.load(em_apl.Args(dataset=squares, image_size=32)).train


def test_the_schedule_of_pseudo_negatives(script, squares, workplace):
    script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 5, "--warmup", 2, "--theta", 0.6)
    pseudo, s = state_of(only_run(workplace))
    split = train_split(squares)
    quota = [int(0.6 * n / 3) for n in (split.z == 0).sum(0).tolist()]
    rows = rows_of(only_run(workplace))
    counts = [round(80 * float(row["pseudo_negatives_per_image"])) for row in rows]
    assert counts == [n * sum(quota) for n in (0, 1, 2, 3, 3)]  # after epochs 2, 3 and 4; not after the last
    assert (pseudo == -1).sum(0).tolist() == [3 * q for q in quota]
    assert not (pseudo == 1).any()
    assert ((s > 0) == (pseudo == -1)).all()
    assert not pseudo[split.z == 1].any()
    assert {"logit_positives", "logit_negatives"} <= rows[0].keys()
    for row in rows:
        parts = sum(float(row[f"loss_{part}"]) for part in ("positive", "unknown", "pseudo_negative"))
        assert float(row["loss"]) == pytest.approx(parts, abs=1e-6)
    assert [float(row["loss_pseudo_negative"]) > 0 for row in rows] == [False, False, True, True, True]


def test_the_logged_pseudo_labels_are_those_of_the_checkpoint(script, squares, workplace):
    flags = ("--epochs", 4, "--warmup", 2, "--theta", 0.5, "--pos_theta", 0.2)
    script("em_apl.py", "--dataset", squares, *FLAGS, *flags)
    (pseudo, _), split = state_of(only_run(workplace)), train_split(squares)
    hidden = [(n, c) for n in range(80) for c in range(4) if split.z[n, c] == 0]
    *_, row = rows_of(only_run(workplace))
    for kind, sign, truth in (("positives", 1, 1), ("negatives", -1, 0)):
        chosen = [(n, c) for n, c in hidden if pseudo[n, c] == sign]
        right = sum(split.y[n, c].item() == truth for n, c in chosen)
        share = [torch.tensor([split.y[n, c] == truth for n, c in hidden if c == of]).float().mean() for of in range(4)]
        expected = {
            "per_image": len(chosen) / 80,
            "precision": 100 * right / len(chosen),
            "precision_at_random": 100 * sum(share[c].item() for _, c in chosen) / len(chosen),
            "recall": 100 * right / sum(split.y[n, c].item() == truth for n, c in hidden),
        }
        got = {name: float(row[f"pseudo_{kind}_{name}"]) for name in expected}
        assert got == pytest.approx(expected, rel=1e-5)
        assert 0 < got["precision"] < 100


@pytest.mark.parametrize(
    "flags", [("--no_apl",), ("--hard",), ("--beta", 1), ("--pos_theta", 0.1), ("--linear", "--lr", 0.01)]
)
def test_ablations_run(flags, script, squares, workplace):
    script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 4, "--warmup", 2, *flags)
    pseudo, s = state_of(only_run(workplace))
    chosen = pseudo != 0
    assert chosen.any() == ("--no_apl" not in flags)
    if "--hard" in flags:
        assert not s.any()
    if "--pos_theta" in flags:
        free = (train_split(squares).z == 0).sum(0).tolist()
        assert chosen.sum(0).tolist() == [2 * (int(0.9 * n / 2) + int(0.1 * n / 2)) for n in free]
        assert (pseudo == 1).sum(0).tolist() == [2 * int(0.1 * n / 2) for n in free]


def test_hard_negatives_leave_pseudo_positives_soft(script, squares, workplace):
    flags = ("--epochs", 4, "--warmup", 2, "--hard", "--pos_theta", 0.1)
    script("em_apl.py", "--dataset", squares, *FLAGS, *flags)
    pseudo, s = state_of(only_run(workplace))
    assert not s[pseudo == -1].any()
    assert (s[pseudo == 1] > 0).all()
    assert (pseudo == 1).any()


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
        x = torch.from_numpy(split.images[split.rows]).permute(0, 3, 1, 2).float() / 255  # plain images, eval mode
        p = model(x).sigmoid()
    pseudo, s = state_of(only_run(workplace))
    torch.testing.assert_close(s[pseudo != 0], p[pseudo != 0], rtol=1e-4, atol=1e-5)
    assert not s[pseudo == 0].any()
    for c in range(4):
        free = p[split.z[:, c] == 0, c].sort().values
        low, high = int(0.5 * len(free)), int(0.1 * len(free))
        torch.testing.assert_close(s[pseudo[:, c] == -1, c].sort().values, free[:low], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            s[pseudo[:, c] == 1, c].sort().values, free[len(free) - high :], rtol=1e-4, atol=1e-5
        )
    assert not pseudo[split.z == 1].any()


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
    for one, other in zip(state_of(torn), state_of(whole)):
        assert torch.equal(one, other)
    assert_same_run(torn, whole)


def test_em_learns(script, squares, workplace):
    out = script("em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 8, "--no_apl")
    assert float(re.search(r"last epoch ([\d.]+)\)", out)[1]) > LEARNT, out


def test_too_few_epochs_for_pseudo_labels_are_said(script, squares, workplace):
    assert "warning: no pseudo-labels" in script(
        "em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 2, "--warmup", 2
    )


def test_the_label_state_survives_a_kill(script, squares, workplace):
    flags = ("--dataset", squares, *FLAGS, "--epochs", 10, "--warmup", 2)
    process = start(ROOT / "em_apl.py", *flags, cwd=workplace)
    while not (found := list(workplace.glob("runs/*/metrics.csv"))) or len(rows_of(found[0].parent)) < 4:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(rows_of(only_run(workplace))) < 10
    finish(start(ROOT / "em_apl.py", "--resume", only_run(workplace), cwd=workplace))
    script("em_apl.py", *flags, "--out", "whole")
    (whole,) = (workplace / "whole").iterdir()
    for one, other in zip(state_of(only_run(workplace)), state_of(whole)):
        assert torch.equal(one, other)
    assert_same_run(only_run(workplace), whole)


def test_two_processes_select_together(squares, workplace):
    finish(
        start(*TORCHRUN, ROOT / "em_apl.py", "--dataset", squares, *FLAGS, "--epochs", 4, "--warmup", 2, cwd=workplace)
    )
    pseudo, _ = state_of(only_run(workplace))
    quota = [int(0.9 * n / 2) for n in (train_split(squares).z == 0).sum(0).tolist()]
    assert (pseudo == -1).sum(0).tolist() == [2 * q for q in quota]
    counts = [round(80 * float(row["pseudo_negatives_per_image"])) for row in rows_of(only_run(workplace))]
    assert counts == [n * sum(quota) for n in (0, 1, 2, 2)]  # images of both are counted once
