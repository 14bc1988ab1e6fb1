import math

import pytest
import torch
from conftest import LEARNT, ROOT, SMALL, TORCHRUN, finish, metrics, only_run, start

import an
import common
import ll

FLAGS = (*SMALL, "--workers", 0, "--epochs", 4, "--head_lr", 1, "--max_drop", 100)
MANY = ("--delta_rel", 5, 5, 5)  # percent: of 8 x 4 labels two more in every epoch


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 5, dtype=torch.float64)
    z = torch.zeros(6, 5, dtype=torch.uint8)
    z[torch.arange(5), torch.tensor([0, 3, 3, 1, 4])] = 1  # the last row has no positive
    return logits, z


def slow(logits, z, count, form):
    """Loops: sort the unobserved labels' losses, change the largest"""
    p = lambda n, c: 1 / (1 + math.exp(-logits[n, c].item()))
    places = [(n, c) for n in range(len(logits)) for c in range(logits.shape[1])]
    losses = {(n, c): -math.log(p(n, c) if z[n, c] == 1 else 1 - p(n, c)) for n, c in places}
    hidden = sorted((losses[place] for place in places if z[place] == 0), reverse=True)
    total = 0.0
    for place in places:
        large = count and z[place] == 0 and losses[place] >= hidden[count - 1]
        total += (0.0 if form == "r" else -math.log(p(*place))) if large else losses[place]
    return total / len(places)


@pytest.mark.parametrize("form", ["r", "ct"])
@pytest.mark.parametrize("count", [0, 1, 4, 25])
def test_loss_against_loops(form, count, batch):
    logits, z = batch
    before = [t.clone() for t in batch]
    assert ll.ll_loss(logits, z, count, form)[0].item() == pytest.approx(slow(logits, z, count, form), rel=1e-12)
    assert all(torch.equal(now, then) for now, then in zip(batch, before))
    for dtype in (torch.float32, torch.int64, torch.bool):
        value = ll.ll_loss(logits, z.to(dtype), count, form)[0].item()
        assert value == pytest.approx(slow(logits, z, count, form), rel=1e-12)


def test_count_0_is_an(batch):
    for form in ("r", "ct"):
        torch.testing.assert_close(ll.ll_loss(*batch, 0, form)[0], an.an_loss(*batch)[0], rtol=0, atol=0)


def test_gradients(batch):
    """What is rejected takes none; what is flipped is pulled up; the choice itself takes none"""
    logits, z = batch
    logits.requires_grad_()
    large = ll.large_losses(logits, z, 4)
    assert large.sum() == 4
    assert not large.requires_grad
    p = logits.detach().sigmoid()
    (rejected,) = torch.autograd.grad(ll.ll_loss(logits, z, 4, "r")[0], logits)
    torch.testing.assert_close(rejected, torch.where(large, 0, p - z.double()) / 30)
    (flipped,) = torch.autograd.grad(ll.ll_loss(logits, z, 4, "ct")[0], logits)
    torch.testing.assert_close(flipped, torch.where(large, p - 1, p - z.double()) / 30)


def test_equal_losses_are_modified_together_or_not_at_all():
    logits, z = torch.tensor([[2.0, 2.0, 1.0, 5.0]]), torch.tensor([[0, 0, 0, 1]])
    assert ll.large_losses(logits, z, 1).tolist() == [[True, True, False, False]]
    assert ll.large_losses(logits, z, 1, strictly=True).tolist() == [[False] * 4]
    assert ll.large_losses(logits, z, 3, strictly=True).tolist() == [[True, True, False, False]]
    assert ll.large_losses(logits, z, 99).tolist() == [[True, True, True, False]]  # never an observed one


@pytest.mark.parametrize("form", ["r", "ct"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_and_limits(dtype, form):
    logits = torch.tensor([[100.0, -100.0, 0.0], [-100.0, 100.0, 0.0]], dtype=dtype, requires_grad=True)
    z = torch.tensor([[0, 1, 0], [0, 0, 0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ll.ll_loss(logits, z, 2, form)[0]
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def labels_of(run):
    return torch.load(run / "last.pt", weights_only=True)["labels"]["pseudo"]


@pytest.mark.parametrize("form", ["r", "ct", "cp"])
def test_every_form_learns_and_counts(form, script, squares, workplace):
    out = script("ll.py", "--dataset", squares, *FLAGS, "--epochs", 8, *MANY, "--form", form)
    run = only_run(workplace)
    rows, z = metrics(run), common.load(ll.Args(dataset=squares, image_size=32)).train.z
    assert float(rows[-1]["test_mAP"]) > LEARNT, out
    per_image = [float(row["pseudo_positives_per_image"]) for row in rows]
    assert per_image[0] == 0  # epoch 1 is AN
    found = labels_of(run).int()
    assert not (found & z.int()).any()
    if form == "cp":
        assert found.sum() > 0
        assert sorted(per_image) == per_image  # for good
        assert per_image[-1] >= found.sum().item() / 80
    else:  # of 32 labels a step 5 % per epoch, rounded up
        assert per_image == pytest.approx([math.ceil(round(32 * 0.05 * t, 9)) / 8 for t in range(8)])
        assert not found.any()
    assert float(rows[-1]["pseudo_positives_precision"]) > float(rows[-1]["pseudo_positives_precision_at_random"])


def test_the_count_is_rounded_up(script, squares, workplace):
    """A batch of 8 x 4 labels and 0.2 %: one label in every step from epoch 2 on"""
    script("ll.py", "--dataset", squares, *FLAGS, "--delta_rel", 0.2, 0.2, 0.2)
    assert [float(row["pseudo_positives_per_image"]) for row in metrics(only_run(workplace))] == [
        0,
        1 / 8,
        1 / 8,
        1 / 8,
    ]


def test_early_stopping_by_the_drop(script, squares, workplace):
    """A learning rate that ruins the network: validation falls, and the run ends there"""
    flags = ("--dataset", squares, *FLAGS, "--epochs", 12, "--lr", 0.03, "--sgd")
    script("ll.py", *flags, "--max_drop", 100, "--out", "all")
    (whole,) = (workplace / "all").iterdir()
    mAP = [float(row["val_mAP"]) for row in metrics(whole)]
    assert len(mAP) == 12
    drops = [max(mAP[: i + 1]) - value for i, value in enumerate(mAP)]
    bound = max(drops) * 0.99
    ends = next(i for i, drop in enumerate(drops) if drop > bound) + 1
    script("ll.py", *flags, "--max_drop", bound, "--out", "cut")
    (cut,) = (workplace / "cut").iterdir()
    assert [row["val_mAP"] for row in metrics(cut)] == [row["val_mAP"] for row in metrics(whole)][:ends]
    assert metrics(cut)[-1]["test_mAP"] != ""


@pytest.mark.parametrize("form", [pytest.param("r", marks=pytest.mark.slow), "cp"])
def test_a_kill_changes_nothing(a_kill_changes_nothing, form, squares):
    flags = ("--dataset", squares, *FLAGS, *MANY, "--form", form)
    killed, whole = a_kill_changes_nothing("ll.py", *flags)
    assert torch.equal(labels_of(killed), labels_of(whole))


def test_two_processes_share_what_they_find(squares, workplace):
    """LL-Cp: labels that either process flipped are flipped for both, and the run resumes"""
    flags = ("--dataset", squares, *FLAGS, "--delta_rel", 20, 20, 20, "--form", "cp")  # 4 of the 16 labels of a share
    finish(start(*TORCHRUN, ROOT / "ll.py", *flags, cwd=workplace))
    run = only_run(workplace)
    z = common.load(ll.Args(dataset=squares, image_size=32)).train.z
    found = labels_of(run).int()
    assert not (found & z.int()).any()
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2))  # (seed 0, epoch 2)
    for rank in (0, 1):
        rows = torch.cat([batch[rank::2] for batch in order.split(8)])
        assert found[rows].sum() > 0
    assert "finished after epoch 4" in finish(start(*TORCHRUN, ROOT / "ll.py", "--resume", run, cwd=workplace))


def test_linear_and_predict(squares, workplace):
    finish(start(ROOT / "ll.py", "--dataset", squares, *FLAGS, "--linear", "--lr", 0.05, cwd=workplace))
    out = finish(start(ROOT / "predict.py", only_run(workplace), f"{squares}/images/val_1.png", cwd=workplace))
    assert "val_1.png:" in out


def test_presets():
    for name, lr, sgd, delta_rel in (
        ("voc", 5e-3, True, (0.2, 0.2, 0.1)),
        ("coco", 1e-5, False, (0.4, 0.2, 0.2)),
        ("nus", 1e-5, False, (0.4, 0.2, 0.2)),
        ("cub", 7.5e-5, False, (0.4, 0.4, 0.2)),
    ):
        args = common.parse(ll.Args, ll.PRESETS, ["--dataset", name])
        assert (args.lr, args.sgd, args.delta_rel) == (lr, sgd, delta_rel)
        assert (args.batch_size, args.epochs, args.head_lr, args.max_drop) == (16, 10, 10.0, 3.0)
