import csv
import json
import math
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    LEARNT,
    ROOT,
    SMALL,
    TORCHRUN,
    assert_same_run,
    finish,
    only_run,
    start,
)
from PIL import Image
from torch import nn
from torchvision import transforms
from torchvision.transforms.autoaugment import _apply_op

import baselines
import common
import em_apl
import lac

# ---- losses


def slow_plc(logits, p_weak, z, delta):
    """Eq. 4, label by label"""
    total = 0.0
    for row in range(len(logits)):
        for c in range(len(logits[0])):
            p = 1 / (1 + math.exp(-logits[row][c]))
            if z[row][c] != 1 and p_weak[row][c] >= delta:
                total -= math.log(p)
            if z[row][c] != 1 and p_weak[row][c] <= 1 - delta:
                total -= math.log(1 - p)
    return total / len(logits)


@pytest.mark.parametrize("delta", [0.5, 0.6, 0.9])
def test_plc_against_eq_4(delta):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(7, 5, generator=generator, dtype=torch.float64)
    p_weak = torch.rand(7, 5, generator=generator, dtype=torch.float64)
    p_weak[0, 0], p_weak[1, 1] = delta, 1 - delta  # reached by equality
    z = F.one_hot(torch.tensor([1, 0, 2, 4, 4, 3, 0]), 5)
    z[6] = 0
    expected = slow_plc(logits.tolist(), p_weak.tolist(), z.tolist(), delta)
    for dtype in (torch.uint8, torch.float32):
        assert lac.plc_loss(logits, p_weak, z.to(dtype), delta).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("delta", [0.5, 0.6, 0.9])
def test_the_releases_plc(delta):
    """The observed positives take part, and the sum is divided by the labels that do"""
    generator = torch.Generator().manual_seed(1)
    logits, p_weak = 3 * torch.randn(7, 5, generator=generator), torch.rand(7, 5, generator=generator)
    z = F.one_hot(torch.tensor([1, 0, 2, 4, 4, 3, 0]), 5)
    z[6] = 0
    total, number = 0.0, 0
    for row in range(7):
        for c in range(5):
            p, weak, seen = logits[row, c].sigmoid().item(), p_weak[row, c].item(), z[row, c].item()
            if seen or weak >= delta:
                total, number = total - math.log(p), number + 1
            elif weak <= 1 - delta:
                total, number = total - math.log(1 - p), number + 1
    assert lac.plc_loss(logits, p_weak, z, delta, "release").item() == pytest.approx(total / number, rel=1e-5)
    nothing = lac.plc_loss(logits, torch.full_like(p_weak, 0.5), torch.zeros(7, 5), 0.9, "release")
    assert nothing.item() == 0


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("wan", (math.log(4) + math.log(4) / 2 + math.log(2) / 2) / 3),
        (
            "ls",
            (0.9 * math.log(4) + 0.1 * math.log(4 / 3) + 0.9 * math.log(4) + 0.1 * math.log(4 / 3) + math.log(2)) / 3,
        ),
        ("epr", math.log(4) / 3 + ((0.25 + 0.75 + 0.5 - 2.5) / 3) ** 2),
        ("em", (math.log(4) - 0.3 * (0.25 * math.log(4) + 0.75 * math.log(4 / 3)) - 0.3 * math.log(2)) / 3),
    ],
)
def test_the_other_losses_of_table_2_by_hand(loss, expected):
    """p = 1/4 (observed), 3/4, 1/2"""
    logits = torch.tensor([[0.25, 0.75, 0.5]]).logit()
    got = lac.other_loss(logits, torch.tensor([[1, 0, 0]]), loss, positives=2.5, alpha=0.3)
    assert got.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["wan", "ls", "epr", "em"])
def test_the_other_losses_are_those_of_their_scripts(loss):
    generator = torch.Generator().manual_seed(3)
    logits, z = 3 * torch.randn(6, 5, generator=generator), F.one_hot(torch.tensor([1, 0, 2, 4, 4, 3]), 5)
    if loss == "em":
        other, _ = em_apl.em_apl_loss(logits, z, torch.zeros(6, 5), alpha=0.3, beta=1.0)
    else:
        other, _ = baselines.baseline_loss(logits, z, None, baselines.Args(loss=loss, epr_positives=2.5))
    assert lac.other_loss(logits, z, loss, positives=2.5, alpha=0.3).item() == pytest.approx(other.item(), rel=1e-6)


def test_plc_by_hand():
    """One image, p_strong = 1/2: the observed class and the unsure one cost nothing"""
    loss = lac.plc_loss(torch.zeros(1, 4), torch.tensor([[0.95, 0.95, 0.5, 0.05]]), torch.tensor([[1, 0, 0, 0]]), 0.9)
    assert loss.item() == pytest.approx(2 * math.log(2))


def test_plc_takes_no_gradient_through_the_weak_view():
    logits, p_weak = torch.randn(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    lac.plc_loss(logits, p_weak, torch.zeros(2, 3), 0.6).backward()
    assert p_weak.grad is None
    assert logits.grad.isfinite().all()


def test_an_is_a_sum_over_classes():
    loss = lac.an_loss_sum(torch.zeros(3, 4), F.one_hot(torch.tensor([0, 1, 2]), 4))
    assert loss.item() == pytest.approx(4 * math.log(2))


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[-100.0, 100.0, 100.0, -100.0]], requires_grad=True)
    loss = lac.an_loss_sum(logits, torch.tensor([[1, 1, 0, 0]]))
    loss = loss + lac.plc_loss(logits, torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.zeros(1, 4), 0.9)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_losses_of_bf16_logits_are_computed_in_full_precision():
    generator = torch.Generator().manual_seed(2)
    weak, strong = (3 * torch.randn(7, 5, generator=generator, dtype=torch.bfloat16) for _ in range(2))
    z = F.one_hot(torch.tensor([1, 0, 2, 4, 4, 3, 0]), 5)
    assert torch.equal(lac.an_loss_sum(weak, z), lac.an_loss_sum(weak.float(), z))
    p_weak = weak.float().sigmoid()
    assert torch.equal(lac.plc_loss(strong, p_weak, z, 0.6), lac.plc_loss(strong.float(), p_weak, z, 0.6))


def slow_lac(a, class_a, b, class_b, tau, denominator):
    """Eq. 5 to 7, pair by pair; divided by the number of anchors"""
    total = 0.0
    similar = lambda x, y: math.exp(sum(p * q for p, q in zip(x, y)) / tau)
    for x, own in zip(a, class_a):
        positives = [y for y, c in zip(b, class_b) if c == own]
        negatives = [y for y, c in zip(b, class_b) if c != own]
        below = negatives if denominator == "inter" else b
        if not below:
            continue
        terms = [-math.log(similar(x, y) / sum(similar(x, t) for t in below)) for y in positives]
        total += sum(terms) if denominator == "inter" else sum(terms) / max(1, len(terms))
    return total / len(a)


def embeddings(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    embed = F.normalize(torch.randn(n, 6, generator=generator, dtype=torch.float64), dim=1)
    return embed, torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize("denominator", ["inter", "all"])
@pytest.mark.parametrize(("n", "m", "classes"), [(5, 9, 3), (12, 4, 6), (1, 1, 1), (6, 6, 1), (4, 7, 50)])
def test_lac_against_eq_7(n, m, classes, denominator):
    (a, class_a), (b, class_b) = embeddings(n, classes, n), embeddings(m, classes, 99 + m)
    got = lac.lac_loss(a, class_a, b, class_b, 0.5, denominator)
    expected = slow_lac(a.tolist(), class_a.tolist(), b.tolist(), class_b.tolist(), 0.5, denominator)
    assert got.item() == pytest.approx(expected, abs=1e-10)


def test_lac_by_hand():
    """One anchor on its partner, at right angles to one of another class, tau 1: -log(e / 1) = -1"""
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert lac.lac_loss(a, torch.tensor([0]), b, torch.tensor([0, 1]), 1.0).item() == pytest.approx(-1)
    both = lac.lac_loss(a, torch.tensor([0]), b, torch.tensor([0, 1]), 1.0, "all")
    assert both.item() == pytest.approx(math.log(math.e + 1) - 1)


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_class_minus_1_is_as_if_it_was_not_there(denominator):
    """What a fixed shape holds besides the chosen labels changes neither loss nor gradient"""
    (a, class_a), (b, class_b) = embeddings(7, 3, 1), embeddings(9, 3, 2)
    class_a[[0, 4]], class_b[[3, 7, 8]] = -1, -1
    losses, slopes = [], []
    for rows_a, rows_b in ((class_a > -2, class_b > -2), (class_a >= 0, class_b >= 0)):
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        loss = lac.lac_loss(x[rows_a], class_a[rows_a], y[rows_b], class_b[rows_b], 0.5, denominator)
        loss.backward()
        losses.append(loss.detach())
        slopes.append(torch.cat([x.grad, y.grad]))
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*slopes)
    nobody = torch.full_like(class_a, -1)
    a.requires_grad_()
    for sides in ((a, class_a, b, torch.full_like(class_b, -1)), (a, nobody, b, class_b)):
        loss = lac.lac_loss(*sides, 0.5, denominator)
        loss.backward()
        assert loss.item() == 0
        assert not a.grad.any()


def test_an_anchor_is_not_compared_with_itself():
    (a, classes), own = embeddings(8, 3, 1), torch.arange(8)
    got = lac.lac_loss(a, classes, a, classes, 0.5, "all", own)
    others = [[j for j in range(8) if j != i] for i in range(8)]
    terms = [
        slow_lac([a[i].tolist()], [classes[i]], a[others[i]].tolist(), classes[others[i]].tolist(), 0.5, "all")
        for i in range(8)
    ]
    assert got.item() == pytest.approx(sum(terms) / 8, abs=1e-10)


@pytest.mark.parametrize("at_once", [1024, 3])
@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_the_past_is_constant(denominator, at_once, monkeypatch):
    """8 embeddings of this batch, 12 of the past among anchors and all else: they count alike and take no gradient"""
    monkeypatch.setattr(lac, "ANCHORS_AT_ONCE", at_once)
    (embed, classes), own = embeddings(20, 3, 1), torch.arange(20)
    now, all_of_them = embed[:8].clone().requires_grad_(), embed.clone().requires_grad_()
    together = torch.cat([now, embed[8:]])
    plain = lac.lac_loss(together, classes, together, classes, 0.5, denominator, own)
    loss = lac.lac_loss(all_of_them, classes, all_of_them, classes, 0.5, denominator, own, live=8)
    assert loss.item() == pytest.approx(plain.item(), abs=1e-12)
    if denominator == "all":
        rest = lambda i: [j for j in range(20) if j != i]
        terms = [
            slow_lac([embed[i].tolist()], [classes[i]], embed[rest(i)].tolist(), classes[rest(i)].tolist(), 0.5, "all")
            for i in range(20)
        ]
        assert loss.item() == pytest.approx(sum(terms) / 20, abs=1e-10)
    plain.backward()
    loss.backward()
    torch.testing.assert_close(all_of_them.grad[:8], now.grad)
    assert not all_of_them.grad[8:].any()


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_lac_of_nothing_is_0(denominator):
    (a, class_a), nothing = embeddings(3, 2, 0), torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    a.requires_grad_()
    for sides in ((a, class_a, nothing, none), (nothing, none, a, class_a), (nothing, none, nothing, none)):
        loss = lac.lac_loss(*sides, 0.5, denominator)
        loss.backward()
        assert loss.item() == 0
    assert not a.grad.any()


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_lac_is_computed_in_full_precision(denominator):
    (a, class_a), (b, class_b) = embeddings(6, 3, 0), embeddings(9, 3, 1)
    plain = lac.lac_loss(a.float(), class_a, b.float(), class_b, 0.5, denominator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(lac.lac_loss(a.float(), class_a, b.float(), class_b, 0.5, denominator), plain)
    a = a.bfloat16()  # of another precision than the queue
    expected = lac.lac_loss(a.float(), class_a, b.float(), class_b, 0.5, denominator)
    assert torch.equal(lac.lac_loss(a, class_a, b.float(), class_b, 0.5, denominator), expected)
    assert lac.lac_loss(a, class_a, a[:0], class_a[:0], 0.5, denominator).dtype == torch.float32


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_lac_gradient_reaches_both_sides(denominator):
    (a, class_a), (b, class_b) = embeddings(5, 3, 1), embeddings(7, 3, 2)
    class_b[class_b == class_a[0]] = 2 if class_a[0] != 2 else 1  # the first anchor has no partner
    loss = lambda x, y: lac.lac_loss(x, class_a, y, class_b, 0.5, denominator)
    assert torch.autograd.gradcheck(loss, (a.requires_grad_(), b.requires_grad_()))


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_lac_without_negatives_has_a_finite_gradient(denominator):
    (a, _), (b, _) = embeddings(3, 1, 1), embeddings(4, 1, 2)
    a.requires_grad_()
    lac.lac_loss(a, torch.zeros(3), b, torch.zeros(4), 0.5, denominator).backward()
    assert a.grad.isfinite().all()


@pytest.mark.parametrize("denominator", ["inter", "all"])
def test_anchors_in_portions_are_the_same_loss(monkeypatch, denominator):
    (a, class_a), (b, class_b) = embeddings(23, 4, 1), embeddings(9, 4, 2)
    losses, slopes = [], []
    for at_once in (100, 5):
        monkeypatch.setattr(lac, "ANCHORS_AT_ONCE", at_once)
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        loss = lac.lac_loss(x, class_a, y, class_b, 0.5, denominator)
        loss.backward()
        losses.append(loss.detach())
        slopes.append(torch.cat([x.grad, y.grad]))
    assert torch.allclose(*losses)
    assert torch.allclose(*slopes)


def peak_of_lac(anchors, path):
    """MB of tensors, as torch's allocator counts them, while L_LAC of CUB's 312 classes runs forward and backward"""
    a, b = (F.normalize(torch.randn(n, 128), dim=1).requires_grad_() for n in (anchors, 32 * 312 + 512))
    class_a, class_b = (torch.arange(len(side)) % 312 for side in (a, b))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        lac.lac_loss(a, class_a, b, class_b, 0.5).backward()
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]") / 1e6


def test_lac_takes_a_batch_of_cub(tmp_path):
    """All 32 x 312 labels are anchors: the matrix of all pairs would take 420 MB, with its gradient and masks 1 GB"""
    portion, batch = (peak_of_lac(n, tmp_path / "trace.json") for n in (1024, 32 * 312))
    assert batch < 1.2 * portion < 300


# ---- queue


def test_the_queue_wraps_around():
    queue = lac.Queue(5, 1, 1)

    def push(*values):
        """-1 is no label, and is passed over"""
        queue.push(torch.tensor(values)[:, None, None].float(), torch.tensor(values))

    assert queue.classes.tolist() == [-1] * 5
    push(1, -1, 2, 3, -1)
    assert queue.classes.tolist() == [1, 2, 3, -1, -1]
    push(4, 5, 6)
    assert queue.classes.tolist() == [6, 2, 3, 4, 5]
    push(-1, -1)
    assert queue.classes.tolist() == [6, 2, 3, 4, 5]
    push(7, 8, -1, 9, 10, 11, -1, 12, 13)  # more than it holds: the last five stay
    assert sorted(queue.classes.tolist()) == [9, 10, 11, 12, 13]
    push(14)
    assert sorted(queue.classes.tolist()) == [10, 11, 12, 13, 14]  # and the oldest goes first
    assert torch.equal(queue.embed.flatten().long(), queue.classes)


def test_a_queue_against_a_list():
    """Random batches of random sizes: what a list of the last 7 would hold"""
    queue, past, state = lac.Queue(7, 2, 3), [], np.random.RandomState(0)
    for _ in range(50):
        embed, classes = torch.randn(12, 2, 3), torch.from_numpy(state.randint(-1, 4, 12))
        classes[state.rand(12) < state.rand()] = -1
        queue.push(embed, classes)
        past = (past + [(c.item(), e) for c, e in zip(classes, embed) if c >= 0])[-7:]
        held = [(c.item(), e) for c, e in zip(queue.classes, queue.embed) if c >= 0]
        assert len(held) == len(past)
        for c, e in past:
            assert any(c == other and torch.equal(e, embedding) for other, embedding in held)


def test_a_queue_of_0_takes_nothing():
    queue = lac.Queue(0, 1, 1)
    queue.push(torch.ones(3, 1, 1), torch.ones(3, dtype=torch.int64))
    assert not len(queue.classes)


def a_batch():
    """Two images, three classes, three of six labels chosen, and a past of two"""
    torch.manual_seed(0)
    weak, strong = (F.normalize(torch.randn(2, 3, 4), dim=2) for _ in range(2))
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    anchors, partners = (torch.stack([view[0, 0], view[0, 2], view[1, 2]]) for view in (weak, strong))
    return weak, strong, chosen, anchors, partners, F.normalize(torch.randn(2, 2, 4), dim=2)


def test_a_batch_is_compared_with_its_strong_view_and_the_past():
    """By hand: which labels are anchors, what they meet, and Eq. 7's B = 6"""
    weak, strong, chosen, anchors, partners, old = a_batch()
    for denominator, scale in (("inter", 3 / 6), ("all", 1)):
        queue = lac.Queue(10, 1, 4)
        queue.push(old[:, :1], torch.tensor([1, 2]))
        rest = [0, 2, 2], torch.cat([partners, old[:, 0]]).tolist(), [0, 2, 2, 1, 2]
        expected = scale * slow_lac(anchors.tolist(), *rest, 0.5, denominator)
        got = lac.compare(weak, strong, chosen, queue, 6, lac.Args(form="paper", denominator=denominator))
        assert got.item() == pytest.approx(expected, abs=1e-5)
        assert queue.classes.tolist() == [1, 2, 0, 2, 2] + [-1] * 5
        assert torch.equal(queue.embed[2:5, 0], anchors)


def test_the_releases_form_compares_all_with_all():
    """Both views of batch and past are anchors; each is compared with all others, as SupCon does"""
    weak, strong, chosen, anchors, partners, old = a_batch()
    queue = lac.Queue(10, 2, 4)
    queue.push(old, torch.tensor([1, 2]))
    everything = torch.cat([anchors, partners, old[:, 0], old[:, 1]])
    classes = [0, 2, 2, 0, 2, 2, 1, 2, 1, 2]
    terms = []
    for i in range(10):
        others = [j for j in range(10) if j != i]
        rest = everything[others].tolist(), [classes[j] for j in others]
        terms.append(slow_lac([everything[i].tolist()], [classes[i]], *rest, 0.5, "all"))
    got = lac.compare(weak, strong, chosen, queue, 6, lac.Args(form="release"))
    assert got.item() == pytest.approx(sum(terms) / 10, abs=1e-5)
    assert torch.equal(queue.embed[2:5], torch.stack([anchors, partners], 1))


# ---- model


def arguments(*words):
    small = ("--dim", "16", "--ffn", "32", "--project_dim", "8")
    return common.parse(lac.Args, lac.PRESETS, ["--dataset", "voc", *SMALL, *small, *words])


@pytest.mark.parametrize("layers", [1, 2])
def test_the_model_computes_what_the_paper_says(layers):
    """The whole decoder again, head by head, with the model's own weights"""
    torch.manual_seed(0)
    model = lac.LabelWise(arguments("--decoder_layers", str(layers)), 5).eval()
    x = torch.rand(2, 3, 32, 32)
    fmap = model.shrink(model.feature_map(x))
    memory = fmap.flatten(2).transpose(1, 2)
    where = lac.sine_positions(*fmap.shape[2:], 16, "cpu")

    def attend(block, query, key, value):
        q, k, v = (
            F.linear(t, w, b).unflatten(-1, (4, 4)).transpose(1, 2)
            for t, w, b in zip(
                (query, key, value), block.attend.in_proj_weight.chunk(3), block.attend.in_proj_bias.chunk(3)
            )
        )
        weights = (q @ k.transpose(2, 3) / 2).softmax(3)  # sqrt(4)
        return block.attend.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights.mean(1)

    def finish_block(block, x, new):
        x = block.norm1(x + new)
        return block.norm2(x + block.ffn(x))

    memory = finish_block(model.encoder, memory, attend(model.encoder, memory + where, memory + where, memory)[0])
    queries = model.queries.expand(2, -1, -1)
    new, looks = attend(model.decoder[0], queries, memory + where, memory)
    f = finish_block(model.decoder[0], 0, new)  # nothing but what was attended to
    if layers == 2:  # the query is added again, and a LayerNorm ends it
        new, looks = attend(model.decoder[1], f + queries, memory + where, memory)
        f = F.layer_norm(finish_block(model.decoder[1], f, new), [16])
    logits = torch.stack([f[:, c] @ model.weight[c] + model.bias[c] for c in range(5)], 1)
    assert torch.allclose(model(x), logits, atol=1e-5)
    got, projected = model(x, project=True)
    assert torch.allclose(got, logits, atol=1e-5)
    assert torch.allclose(projected.norm(dim=2), torch.ones(2, 5), atol=1e-5)
    assert torch.allclose(projected, F.normalize(model.project(f), dim=2), atol=1e-5)
    maps = model.embeddings(x, weights=True)[1]
    assert torch.allclose(maps.flatten(2), looks, atol=1e-5)
    assert torch.allclose(maps.sum((2, 3)), torch.ones(2, 5), atol=1e-5)


def test_embeddings_come_from_the_image():
    """Before any learning they vary more between images than a query's own constant would let them"""
    torch.manual_seed(0)
    model = lac.LabelWise(arguments("--dim", "64"), 20).eval()
    with torch.no_grad():
        f, _ = model.embeddings(torch.rand(16, 3, 32, 32) * torch.rand(16, 3, 1, 1))
    constant = f.mean(0).var(0, correction=0).sum() / f.flatten(0, 1).var(0, correction=0).sum()  # of each class
    assert constant < 0.5


def test_two_layers_start_as_the_releases():
    torch.manual_seed(0)
    model = lac.LabelWise(arguments("--dim", "64", "--ffn", "128", "--decoder_layers", "2"), 5)
    for block in (model.encoder, *model.decoder):
        for weight in (block.attend.in_proj_weight, block.attend.out_proj.weight, block.ffn[0].weight):
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.95 * bound < weight.abs().max() <= bound


def test_positions_tell_rows_from_columns():
    where = lac.sine_positions(3, 5, 16, "cpu").view(3, 5, 16)
    assert torch.equal(where[1, 0, :8], where[1, 4, :8])  # the first half is the row's
    assert torch.equal(where[0, 2, 8:], where[2, 2, 8:])
    assert len({tuple(v.tolist()) for v in where.flatten(0, 1)}) == 15
    assert where[0, 0, 0].item() == pytest.approx(math.sin(2 * math.pi / 3), abs=1e-6)
    assert where[0, 0, 9].item() == pytest.approx(math.cos(2 * math.pi / 5), abs=1e-6)


@pytest.mark.parametrize("backbone", ["resnet18", "tf_efficientnet_lite0", "mobilenetv3_small_100", "test_convnext"])
def test_backbones_that_give_a_map(backbone):
    model = lac.LabelWise(arguments("--backbone", backbone, "--image_size", "64"), 3).eval()
    assert model(torch.rand(1, 3, 64, 64)).shape == (1, 3)
    assert min(model.feature_map(torch.rand(1, 3, 64, 64)).shape[2:]) >= 2


def test_a_backbone_without_a_map_gives_one_sentence():
    with pytest.raises(SystemExit, match="test_vit gives no map"):
        lac.LabelWise(arguments("--backbone", "test_vit", "--image_size", "160"), 3)


def test_the_papers_size():
    args = common.parse(lac.Args, lac.PRESETS, ["--dataset", "coco", "--weights", "none"])
    with torch.device("meta"):
        model = lac.LabelWise(args, 80)
    assert isinstance(model.shrink, nn.Identity)  # 2048 channels, as they come
    assert model.queries.shape == model.weight.shape == (80, 2048)
    assert model.encoder.ffn[0].out_features == 8192
    assert model.encoder.attend.num_heads == 4
    assert [layer.out_features for layer in model.project[::2]] == [2048, 128]
    assert (args.epochs, args.batch_size, args.lr, args.weight_decay, args.ema) == (40, 32, 1e-4, 0.01, 0.9997)
    assert (args.delta, args.tau, args.queue, args.dropout, args.decoder_layers) == ((0.6, 0.9), 0.5, 512, 0.1, 1)


def test_pretrained_first_layers_and_norms_stay_as_they_are(tmp_path, squares, workplace, script):
    import torchvision

    body = torchvision.models.resnet18()
    torch.save(body.state_dict(), tmp_path / "weights.pth")
    flags = ("--dataset", squares, *SMALL, "--backbone", "resnet18", "--weights", tmp_path / "weights.pth")
    script("lac.py", *flags, "--dim", 16, "--ffn", 32, "--epochs", 1, "--max_steps", 4, "--no_lac")
    after = torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"]
    for name, before in body.state_dict().items():
        if name.startswith("fc"):
            continue
        still = "bn" in name or "downsample.1" in name or name.startswith(("conv1", "layer1"))
        assert torch.equal(after[f"body.{name}"], before) == still, name


def test_freeze_backbone_trains_the_rest(tmp_path, squares, workplace, script):
    import torchvision

    body = torchvision.models.resnet18()
    torch.save(body.state_dict(), tmp_path / "weights.pth")
    flags = ("--dataset", squares, *SMALL, "--backbone", "resnet18", "--weights", tmp_path / "weights.pth")
    script("lac.py", *flags, "--dim", 16, "--ffn", 32, "--epochs", 1, "--max_steps", 2, "--no_lac", "--freeze_backbone")
    after = torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"]
    for name, before in body.state_dict().items():
        assert name.startswith("fc") or torch.equal(after[f"body.{name}"], before), name


def test_random_first_layers_learn():
    model = lac.LabelWise(arguments(), 3).train()
    assert all(weight.requires_grad for weight in model.parameters())
    assert all(module.training for module in model.modules())


# ---- views

RAND_AUGMENT = transforms.RandAugment()  # two operations, magnitude 9 of 31, as its defaults are


def noise(side, seed=0):
    return np.random.RandomState(seed).randint(20, 200, (side, side, 3)).astype(np.uint8)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_the_strong_view_is_cut_and_distorted(monkeypatch):
    """Without RandAugment: one square of half a side and one colour, anywhere, clipped at the border"""
    monkeypatch.setattr(lac, "OPERATIONS", lac.OPERATIONS[:1])
    grey, areas = np.full((40, 40, 3), 200, dtype=np.uint8), []
    for seed in range(200):
        view = lac.strong_view(grey, generator(seed))
        assert view.shape == grey.shape
        assert view.dtype == np.uint8
        hole = (view != 200).any(2)
        rows, columns = np.flatnonzero(hole.any(1)), np.flatnonzero(hole.any(0))
        assert hole.sum() == len(rows) * len(columns)
        assert rows[-1] - rows[0] == len(rows) - 1
        assert len(np.unique(view[hole], axis=0)) == 1
        assert len(rows) == 20 or rows[0] == 0 or rows[-1] == 39
        areas.append(len(rows) * len(columns))
    assert min(areas) >= 100
    assert max(areas) == 400
    assert 0.2 < np.mean(np.array(areas) == 400) < 0.35  # 21 of 40 places along each side are not clipped
    assert (grey == 200).all()


def test_cutout_comes_before_rand_augment(monkeypatch):
    """Where RandAugment inverts, it inverts the hole too"""
    invert, nothing = (lambda image, _: lac.pictures.invert(image), 0, False), lac.OPERATIONS[0]
    views = []
    for operations in ((nothing,) * 2, (invert, nothing), (nothing, invert), (invert,) * 2):
        left = list(operations)
        monkeypatch.setattr(lac, "OPERATIONS", ((lambda image, by: left.pop()[0](image, by), 0, False),))  # noqa: B023
        views.append(lac.strong_view(noise(40), generator(0)))
    plain, once, once_more, twice = views
    assert np.array_equal(once, 255 - plain)
    assert np.array_equal(once_more, 255 - plain)
    assert np.array_equal(twice, plain)


@pytest.mark.parametrize("side", [32, 41, 64, 331, 448])
def test_the_operations_are_those_of_torchvision(side):
    image, space = Image.fromarray(noise(side)), RAND_AUGMENT._augmentation_space(31, (side, side))
    assert len(lac.OPERATIONS) == len(space) == 14
    for (operation, ours, signed), (name, (magnitudes, theirs_signed)) in zip(lac.OPERATIONS, space.items()):
        assert signed == theirs_signed, name
        theirs = magnitudes[9].item() if magnitudes.ndim else 0.0
        for sign in (1, -1) if signed else (1,):
            expected = _apply_op(image, name, sign * theirs, RAND_AUGMENT.interpolation, None)
            assert np.array_equal(operation(image, sign * ours), expected), (name, sign)
            assert (name == "Identity") == np.array_equal(expected, image), name


@pytest.mark.parametrize("side", [32, 64])
def test_the_strong_view_is_that_of_torchvision(side):
    """Cutout by hand, then torchvision's RandAugment, which draws from the global generator, ours from its own"""
    for seed in range(100):
        pixels, draws = noise(side, seed), generator(seed)
        y, x, *colour = (torch.randint(n, (1,), generator=draws).item() for n in (side, side, 256, 256, 256))
        cut, rows = pixels.copy(), np.arange(side)
        inside = [(rows >= at - side // 4) & (rows < at + side // 4) for at in (y, x)]
        cut[inside[0][:, None] & inside[1]] = colour
        torch.set_rng_state(draws.get_state())
        expected = np.array(RAND_AUGMENT(Image.fromarray(cut)))
        assert np.array_equal(lac.strong_view(pixels, generator(seed)), expected), seed


def test_all_operations_come_up(monkeypatch):
    """Each of the 14 about as often as the others, and where there is a sign both about as often"""
    seen = Counter()
    record = lambda i: lambda image, by: (seen.update([(i, by > 0)]), image)[1]
    spies = [(record(i), magnitude or 1, signed) for i, (_, magnitude, signed) in enumerate(lac.OPERATIONS)]
    monkeypatch.setattr(lac, "OPERATIONS", tuple(spies))
    for row in range(700):
        lac.two_views(noise(8), row, seed=0, epoch=1)
    for i, (*_, signed) in enumerate(spies):
        assert 65 < seen[i, True] + seen[i, False] < 135, i  # of 100, give or take 3.6 standard deviations
        assert (seen[i, False] > 0.25 * seen[i, True]) == signed, i
        assert seen[i, True] > 0.25 * seen[i, False], i


def views_of(split, seed, epoch, idx, workers=0):
    """All views of some images, as a run's loader reads them: (N, 2, 3, 32, 32)"""
    augment = partial(lac.two_views, seed=seed, epoch=epoch)
    loader = common.Loader(lac.Args(workers=workers), torch.device("cpu"))
    return torch.cat(list(loader.pixels(split, common.in_batches(idx, 4), augment)))


def test_views_follow_seed_epoch_and_image(squares):
    train = common.load(arguments("--dataset", squares)).train
    idx = np.arange(6)
    views = partial(views_of, train, idx=idx)
    first, again = views(0, 1), views(0, 1, idx=idx[::-1])
    assert first.shape == (6, 2, 3, 32, 32)
    plain = common.as_pixels(torch.from_numpy(train.images[train.rows[idx]]))
    assert torch.equal(first[:, 0], plain)  # of the same decoding
    assert torch.equal(first, again.flip(0))  # whatever the order
    assert not torch.equal(first[:, 1], views(0, 2)[:, 1])
    assert not torch.equal(first[:, 1], views(1, 1)[:, 1])
    pixels = noise(32)
    by_row = [lac.two_views(pixels, row, seed=0, epoch=1) for row in range(6)]  # of one image
    assert len({views.tobytes() for views in by_row}) == 6


@pytest.mark.parametrize("workers", [1, 4])
def test_views_do_not_depend_on_the_threads(squares, workers):
    train = common.load(arguments("--dataset", squares)).train
    idx = np.arange(80)
    assert torch.equal(views_of(train, 0, 1, idx), views_of(train, 0, 1, idx, workers))


def test_views_from_several_threads_at_once():
    """More threads than cores, all at the same images, each in another order: nothing that they draw is shared"""
    pixels = [noise(64, row) for row in range(30)]
    expected = [lac.two_views(pixels[row], row, seed=3, epoch=2) for row in range(30)]

    def all_views(worker):
        rows = np.random.RandomState(worker).permutation(30)
        return {row: lac.two_views(pixels[row], row, seed=3, epoch=2) for row in rows}

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(all_views, range(8)):
            assert all(np.array_equal(found[row], expected[row]) for row in range(30))


@pytest.mark.parametrize("workers", [0, 4])
def test_views_leave_the_random_state_alone(squares, monkeypatch, workers):
    train = common.load(arguments("--dataset", squares)).train
    torch.manual_seed(7)
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda _: pytest.fail("dropout on a GPU would follow the images")
    )
    states = lambda: (torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate())
    before = states()
    views_of(train, 0, 1, np.arange(20), workers)
    assert states() == before


def test_both_views_are_flipped_alike(squares):
    args = arguments("--dataset", squares)
    run, train = common.Run(args, str(ROOT / "lac.py")), common.load(args).train
    run.epoch, flipped = 1, 0
    for x, _, idx in run.batches(train, flip=True, augment=partial(lac.two_views, seed=0, epoch=1)):
        plain = views_of(train, 0, 1, idx.numpy())
        mirrored = (x[:, 0] == plain[:, 0].flip(-1)).flatten(1).all(1)
        assert torch.equal(x, torch.where(mirrored.view(-1, 1, 1, 1, 1), plain.flip(-1), plain))
        flipped += mirrored.sum()
    assert 25 < flipped < 55


# ---- runs

SIZE = ("--dim", "16", "--ffn", "32", "--project_dim", "8", "--ema", "0.9", "--queue", "30", "--delta", "0.6", "0.6")


def rows(run):
    with open(run / "metrics.csv") as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]


def test_both_stages_in_one_run(script, squares, workplace):
    out = script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    run = only_run(workplace)
    table = rows(run)
    assert [row["stage"] for row in table] == [1, 1, 2, 2]
    assert all(row["loss_lac"] == 0 for row in table[:2])
    assert all(row["loss_lac"] != 0 for row in table[2:])
    assert "epoch  3/4" in out
    for row in table:
        assert row["loss"] == pytest.approx(row["loss_an"] + row["loss_plc"] + row["loss_lac"], rel=1e-4)
        assert row["val_mAP"] == max(row["val_mAP_raw"], row["val_mAP_ema"])
        assert 0 <= row["pseudo_positives_per_image"] + row["pseudo_negatives_per_image"] <= 3  # of 4, one is observed
    assert table[-1]["queue_fill"] == 30
    assert {path.name for path in run.iterdir()} == {
        *(
            "config.json",
            "script.py",
            "metrics.csv",
            "last.pt",
            "best.pt",
            "stage1.pt",
            "curve.png",
            "result.json",
            ".lock",
        )
    }
    assert torch.load(run / "last.pt", weights_only=True)["stage"] == {"number": 2}


@pytest.mark.parametrize(("measured", "better"), [([10, 20], "ema"), ([20, 10], "model")])
def test_the_best_of_raw_and_ema_counts(script, squares, workplace, monkeypatch, measured, better):
    values = iter(map(float, measured))
    monkeypatch.setattr(common, "mean_average_precision", lambda *_: next(values))
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--stage", 1)
    run = only_run(workplace)
    (row,) = rows(run)
    kept, last = (torch.load(run / name, weights_only=True) for name in ("best.pt", "last.pt"))
    assert [row["val_mAP_raw"], row["val_mAP_ema"]] == measured
    assert kept["val_mAP"] == row["val_mAP"] == 20
    assert all(torch.equal(value, last[better][name]) for name, value in kept["model"].items())
    assert not torch.equal(last["ema"]["queries"], last["model"]["queries"])


def test_without_validation_the_raw_weights_are_kept(script, squares, workplace):
    """An EMA of .9997 would still be the first weights"""
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--val_fraction", 0, "--ema", 0.9997)
    last, best = (torch.load(only_run(workplace) / name, weights_only=True) for name in ("last.pt", "best.pt"))
    assert all(torch.equal(value, last["model"][name]) for name, value in best["model"].items())


@pytest.mark.parametrize("form", ["paper", "release"])
def test_the_losses_of_a_step_are_those_of_its_views(form, script, squares, workplace):
    """One step on all images at a learning rate of nothing, made again"""
    delta, still = 0.52, ("--lr", "1e-30", "--weight_decay", "0", "--dropout", "0", "--workers", "0")
    weights = ("--form", form, "--lambda_plc", "0.5", "--lambda_lac", "2", "--tau", "0.3")
    flags = ("--dataset", squares, *SMALL, *SIZE, *still, "--batch_size", "80", "--delta", "0.9", str(delta))
    script("lac.py", *flags, *weights, "--epochs", 1, "--end_to_end")
    args = common.parse(lac.Args, lac.PRESETS, list(flags))
    run, data, model = common.Run(args, str(ROOT / "lac.py")), common.load(args), lac.LabelWise(args, 4)
    model.load_state_dict(torch.load(only_run(workplace) / "last.pt", weights_only=True)["model"])
    run.epoch = 1
    ((x, z, idx),) = run.batches(data.train, flip=True, augment=partial(lac.two_views, seed=0, epoch=1))
    x = torch.cat([x[:, 0], x[:, 1]]).contiguous(memory_format=torch.channels_last)
    logits, embed = model.train()(x, project=True)
    p, y, hidden = logits[:80].sigmoid(), data.train.y[idx], z == 0
    above, below = (p >= delta) & hidden, (p <= 1 - delta) & hidden
    chosen = above | (z == 1)
    classes = chosen.nonzero()[:, 1]
    if form == "paper":  # sums over classes; Eq. 7 over B = b * q
        an, plc = lac.an_loss_sum(logits[:80], z), lac.plc_loss(logits[80:], p, z, delta)
        contrast = lac.lac_loss(embed[:80][chosen], classes, embed[80:][chosen], classes, 0.3) * len(classes) / (80 * 4)
    else:  # means over labels; the observed ones take part; both views are anchors, compared with all but themselves
        an = F.binary_cross_entropy_with_logits(logits[:80], z.float())
        targets = F.binary_cross_entropy_with_logits(logits[80:], chosen.float(), reduction="none")
        plc = targets[chosen | below].mean()
        both, kinds = torch.cat([embed[:80][chosen], embed[80:][chosen]]), classes.repeat(2)
        others = ~torch.eye(len(both), dtype=bool)
        log_p = (both @ both.T / 0.3).masked_fill(~others, -torch.inf).log_softmax(1)
        same = (kinds[:, None] == kinds) & others
        contrast = -torch.stack([row[mates].mean() for row, mates in zip(log_p, same)]).mean()
    expected = {"loss_an": an.item(), "loss_plc": 0.5 * plc.item(), "loss_lac": 2 * contrast.item()}
    expected |= {"loss": (an + 0.5 * plc + 2 * contrast).item()}
    for kind, chosen, true in (("positives", above, y == 1), ("negatives", below, y == 0)):
        share = lambda part, whole: 100 * (part.sum() / whole.sum()).item()
        at_random = (hidden & true).sum(0) / hidden.sum(0)  # (C,)
        expected |= {
            f"pseudo_{kind}_per_image": chosen.sum().item() / 80,
            f"pseudo_{kind}_precision": share(chosen & true, chosen),
            f"pseudo_{kind}_precision_at_random": share(chosen * at_random, chosen),
            f"pseudo_{kind}_recall": share(chosen & true, hidden & true),
        }
    (row,) = rows(only_run(workplace))
    assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert 0 < row["pseudo_negatives_recall"] < 100
    assert 0 < row["pseudo_positives_precision"] < 100


def test_schedule_and_decay_are_used(script, squares, workplace):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 4, "--max_steps", 15, "--weight_decay", 0.02)
    group = torch.load(only_run(workplace) / "last.pt", weights_only=True)["optimizer"]["param_groups"][0]
    weight = nn.Parameter(torch.zeros(1))
    cycle = torch.optim.lr_scheduler.OneCycleLR(torch.optim.AdamW([weight]), 3e-3, 40, pct_start=0.2)
    for _ in range(15):
        cycle.optimizer.step()
        cycle.step()
    assert group["lr"] == pytest.approx(cycle.get_last_lr()[0])
    assert group["weight_decay"] == 0.02


def test_a_random_backbone_may_be_frozen_where_a_run_has_trained_it(script, squares, workplace):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 1)
    script("lac.py", *flags, "--stage", 1, "--out", "one")
    (first,) = (workplace / "one").iterdir()
    script("lac.py", *flags, "--stage", 2, "--init_from", first, "--freeze_backbone", "--out", "two")
    (second,) = (workplace / "two").iterdir()
    before, after = (torch.load(path, weights_only=True)["model"] for path in (first / "best.pt", second / "last.pt"))
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith("body."), name


def stop_saving(monkeypatch, epoch, before=False):
    """The run dies as this epoch's last.pt is written, or before it is"""
    save = common.Run.save

    def save_and_die(run):
        if run.epoch == epoch and before:
            raise SystemExit("killed")
        save(run)
        if run.epoch == epoch:
            raise SystemExit("killed")

    monkeypatch.setattr(common.Run, "save", save_and_die)


def killed_run(script, monkeypatch, folder, *flags, **more):
    with monkeypatch.context() as patch:
        stop_saving(patch, **more)
        with pytest.raises(SystemExit, match="killed"):
            script("lac.py", *flags, "--out", folder)
    (run,) = folder.iterdir()
    return run


def test_stage_2_starts_from_stage_1s_best(script, squares, workplace, monkeypatch):
    """At a learning rate of nothing stage 2 ends with the weights that stage 1 is said to have left"""
    extend, marked = common.Run.extend, {}

    def extend_and_mark(run, *arguments, **more):
        assert extend(run, *arguments, **more)
        kept = torch.load(run.directory / "stage1.pt", weights_only=True)
        marked.update({name: value + 0.25 for name, value in kept["model"].items() if value.is_floating_point()})
        torch.save({**kept, "model": kept["model"] | marked}, run.directory / "stage1.pt")
        return True

    monkeypatch.setattr(common.Run, "extend", extend_and_mark)
    frozen = ("--lr", 1e-30, "--weight_decay", 0)
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, *frozen)
    last = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    for name, value in marked.items():
        if "running" not in name:
            assert torch.equal(last["model"][name], value), name
            assert torch.allclose(last["ema"][name], value, atol=1e-5), name


def test_the_switch_makes_everything_fresh(script, squares, workplace, monkeypatch):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    run = killed_run(script, monkeypatch, workplace / "runs", *flags, epoch=2)
    last, kept = (torch.load(run / name, weights_only=True) for name in ("last.pt", "stage1.pt"))
    assert last["stage"] == {"number": 2}
    for name, value in kept["model"].items():
        assert torch.equal(last["model"][name], value), name
        assert torch.equal(last["ema"][name], value), name
    assert last["scheduler"]["last_epoch"] == 0
    assert not last["optimizer"]["state"]
    assert last["optimizer"]["param_groups"][0]["lr"] < 1e-3  # where the cycle begins
    assert last["run"]["best"] == {"epoch": 2}
    script("lac.py", "--resume", run)
    last = torch.load(run / "last.pt", weights_only=True)
    assert last["scheduler"]["last_epoch"] == 20
    assert {state["step"].item() for state in last["optimizer"]["state"].values()} == {20}


@pytest.mark.parametrize("steps", [17, 20])  # within stage 1's last epoch, and at its very end
def test_steps_that_end_with_stage_1_keep_its_result(script, squares, workplace, steps):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 2, "--max_steps", steps)
    run = only_run(workplace)
    result, table = json.loads((run / "result.json").read_text()), rows(run)
    assert [row["stage"] for row in table] == [1, 1]
    best = max(table, key=lambda row: row["val_mAP"])
    expected = (best["epoch"], best["val_mAP"], best["test_mAP"])
    assert (result["best_epoch"], result["val_mAP"], result["test_mAP"]) == expected
    assert result["last_test_mAP"] == table[-1]["test_mAP"]
    assert "earlier_stages" not in result
    assert not (run / "stage1.pt").exists()
    assert torch.load(run / "best.pt", weights_only=True)["epoch"] == best["epoch"]
    before = (run / "result.json").read_bytes()
    assert "finished after epoch 2" in script("lac.py", "--resume", run)
    assert (run / "result.json").read_bytes() == before


def test_steps_that_end_in_stage_2_keep_both_results(script, squares, workplace):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--max_steps", 13)
    run = only_run(workplace)
    result, (first, second) = json.loads((run / "result.json").read_text()), rows(run)
    assert (first["stage"], second["stage"]) == (1, 2)
    assert (result["best_epoch"], result["val_mAP"]) == (2, second["val_mAP"])
    assert result["earlier_stages"] == [{name: first[name] for name in ("epoch", "val_mAP", "test_mAP")}]


def test_a_run_reports_its_last_stage_and_keeps_the_first(script, squares, workplace):
    out = script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    run = only_run(workplace)
    result, table = json.loads((run / "result.json").read_text()), rows(run)
    first, second = (max(part, key=lambda row: row["val_mAP"]) for part in (table[:2], table[2:]))
    assert (result["best_epoch"], result["val_mAP"]) == (second["epoch"], second["val_mAP"])
    assert result["test_mAP"] == second["test_mAP"]
    (past,) = result["earlier_stages"]
    assert past == {"epoch": first["epoch"], "val_mAP": first["val_mAP"], "test_mAP": first["test_mAP"]}
    assert f"stage1.pt: best epoch {first['epoch']:.0f}, val_mAP {first['val_mAP']:.4g}" in out
    assert torch.load(run / "stage1.pt", weights_only=True)["epoch"] == first["epoch"]


def test_patience_ends_a_stage_not_the_run(script, squares, workplace, monkeypatch):
    """Whatever is measured falls, so no epoch is better than a stage's first"""
    falling = iter(range(90, 0, -1))
    monkeypatch.setattr(common, "mean_average_precision", lambda *_: float(next(falling)))
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--patience", 1, "--epochs", 9)
    assert [row["stage"] for row in rows(only_run(workplace))] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("raw", "ema", "end"),
    [
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9], 9),  # the EMA rises to the end
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 3, 2, 1, 1, 1], 7),  # its best was in the fourth
        ([9, 8, 7, 6, 5, 4, 3, 2, 1], [3, 3, 3, 3, 3, 3, 3, 3, 3], 9),  # not below its best
        ([1, 2, 3, 4, 3, 2, 1, 1, 1], [9, 8, 8, 8, 8, 8, 8, 8, 8], 7),  # the raw weights' own best was in the fourth
        ([1, 2, 3, 2, 2, 4, 1, 1, 1], [9, 8, 8, 8, 8, 8, 8, 8, 8], 9),  # and in the very epoch that would be the last
    ],
)
def test_a_stage_waits_for_an_ema_that_rises(raw, ema, end, squares, workplace, monkeypatch):
    """Patience 2, with measured mAPs put in the place of real ones"""
    args = arguments("--dataset", squares, "--patience", "2", "--epochs", "9")
    run, data = common.Run(args, str(ROOT / "lac.py")), common.load(args)
    nets = {name: lac.LabelWise(args, 4) for name in ("raw", "ema")}
    nets["raw"] = run.prepare(nets["raw"], data)
    values = {id(nets["raw"]): raw, id(nets["ema"]): ema}
    monkeypatch.setattr(run, "measure", lambda *_: {"mAP": 1.0, "F1": {}, "F1_tuned": {}, "AP": {}})
    monkeypatch.setattr(
        run, "predict", lambda model, split: torch.full((2, 4), float(values[id(model)][run.epoch - 1]))
    )
    monkeypatch.setattr(common, "mean_average_precision", lambda logits, y: logits[0, 0].item())
    monkeypatch.setattr(
        common, "best_f1_thresholds", lambda *_: torch.zeros(4)
    )  # of real labels it would need as many rows
    while not run.finished:
        run.epoch += 1
        run.evaluate(nets["raw"], data, ema=nets["ema"])
    assert run.epoch == end


def test_the_ema_is_exponential(script, squares, workplace):
    """From the first weights on, every step's are mixed in with 1 - decay"""
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--no_lac")
    for steps in (1, 2):
        script("lac.py", *flags, "--max_steps", steps, "--out", steps)
    one, two = (torch.load(next((workplace / str(n)).iterdir()) / "last.pt", weights_only=True) for n in (1, 2))
    torch.manual_seed(0)
    start = lac.LabelWise(arguments(), 4).state_dict()
    for name, raw in one["model"].items():
        if raw.is_floating_point():
            assert torch.allclose(one["ema"][name], 0.9 * start[name] + 0.1 * raw, atol=1e-6), name
            expected = 0.9 * one["ema"][name] + 0.1 * two["model"][name]
            assert torch.allclose(two["ema"][name], expected, atol=1e-6), name


def test_projection_is_frozen_in_stage_1(script, squares, workplace):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--stage", 1)
    after = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    torch.manual_seed(0)
    before = lac.LabelWise(arguments(), 4)
    for name, weight in before.project.named_parameters():
        assert torch.equal(after["model"][f"project.{name}"], weight), name
    assert not torch.equal(after["model"]["queries"], before.queries)


@pytest.mark.parametrize(
    ("flag", "lac_on", "plc_on", "stages"),
    [
        (("--no_plc",), True, False, {1, 2}),
        (("--no_lac",), False, True, {1}),
        (("--no_plc", "--no_lac"), False, False, {1}),
        (("--end_to_end",), True, True, {2}),
        (("--queue", 0), True, True, {1, 2}),
        (("--decoder_layers", 2), True, True, {1, 2}),
        (("--form", "paper"), True, True, {1, 2}),
        (("--form", "paper", "--denominator", "all"), True, True, {1, 2}),
        (("--ema", 0), True, True, {1, 2}),
        (("--loss", "em"), False, False, {1}),
        (("--loss", "epr"), False, False, {1}),
        (("--amp", "bf16"), True, True, {1, 2}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_ablations(script, squares, workplace, flag, lac_on, plc_on, stages):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, *flag)
    table = rows(only_run(workplace))
    assert {row["stage"] for row in table} == stages
    assert any(row["loss_lac"] for row in table) == lac_on
    assert any(row["loss_plc"] for row in table) == plc_on
    assert all(("val_mAP_ema" in row) == (flag != ("--ema", 0)) for row in table)


def test_lac_learns(script, squares, workplace):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--dim", 32, "--delta", 0.8, 0.9, "--epochs", 25, "--no_lac")
    script("lac.py", *flags, "--batch_size", 8, "--lr", 3e-3)
    assert max(row["test_mAP"] for row in rows(only_run(workplace)) if row["test_mAP"] > 0) > LEARNT


def test_a_kill_in_stage_1_changes_nothing(a_kill_changes_nothing, squares):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    killed, whole = a_kill_changes_nothing("lac.py", *flags)
    a, b = (torch.load(run / "last.pt", weights_only=True) for run in (killed, whole))
    for part in ("queue", "ema"):
        assert all(torch.equal(a[part][key], b[part][key]) for key in a[part])
    assert b["queue"]["classes"].max() >= 0


@pytest.mark.parametrize("epoch", [2, pytest.param(3, marks=pytest.mark.slow)])  # at the switch, and within stage 2
def test_a_kill_in_stage_2_changes_nothing(script, squares, workplace, epoch):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    script("lac.py", *flags, "--out", "whole")
    process = start(ROOT / "lac.py", *flags, "--out", "killed", cwd=workplace)
    while not list(workplace.glob("killed/*/metrics.csv")) or len(rows(next((workplace / "killed").iterdir()))) < epoch:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (killed,), (whole,) = (list((workplace / out).iterdir()) for out in ("killed", "whole"))
    finish(start(ROOT / "lac.py", "--resume", killed, cwd=workplace))
    assert_same_run(killed, whole)
    assert_same_stage_1(killed, whole)


def assert_same_stage_1(one, other):
    a, b = (torch.load(run / "stage1.pt", weights_only=True) for run in (one, other))
    assert (a["epoch"], a["val_mAP"]) == (b["epoch"], b["val_mAP"])
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in b["model"])


def test_a_kill_before_a_checkpoint_changes_nothing(script, squares, workplace, monkeypatch):
    """best.pt and, at the switch, stage1.pt are an epoch ahead of last.pt then"""
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 2)
    script("lac.py", *flags, "--out", "whole")
    (whole,) = (workplace / "whole").iterdir()
    for epoch in (2, 3):  # at the switch, and within stage 2
        folder = workplace / f"killed in {epoch}"
        killed = killed_run(script, monkeypatch, folder, *flags, epoch=epoch, before=True)
        assert (killed / "stage1.pt").exists()
        assert torch.load(killed / "last.pt", weights_only=True)["run"]["epoch"] == epoch - 1
        script("lac.py", "--resume", killed)
        assert_same_run(killed, whole)
        assert_same_stage_1(killed, whole)


def test_two_processes_share_one_queue(squares, workplace):
    """With delta 1 every image brings its observed label and no other: 80, of which each process has seen half"""
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--queue", 128, "--delta", 0.6, 1)
    finish(start(*TORCHRUN, ROOT / "lac.py", *flags, cwd=workplace))
    first, second = rows(only_run(workplace))
    assert (first["stage"], second["stage"]) == (1, 2)
    assert second["queue_fill"] == 80


def test_two_processes_leave_the_projection_alone_in_stage_1(squares, workplace):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--stage", 1)
    finish(start(*TORCHRUN, ROOT / "lac.py", *flags, cwd=workplace))
    after = torch.load(only_run(workplace) / "last.pt", weights_only=True)
    torch.manual_seed(0)
    for name, weight in lac.LabelWise(arguments(), 4).project.named_parameters():
        assert torch.equal(after["model"][f"project.{name}"], weight), name


def test_five_steps_are_enough(script, squares, workplace):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1, "--batch_size", 16, "--no_lac")


def test_from_all_has_everybodys(workplace):
    """Ranks with 3 and 1 rows, padded to 4 each: all see the same, and what is padded has class -1"""
    (workplace / "check.py").write_text(
        "import torch, torch.distributed as dist, lac\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "n = 3 if rank == 0 else 1\n"
        "embed = torch.arange(n)[:, None, None].repeat(1, 1, 2).float() + 10 * rank\n"
        "rows, classes = lac.from_all(embed, 4), lac.from_all(torch.arange(n) + 5 * rank, 4)\n"
        "assert rows.shape == (8, 1, 2) and classes.shape == (8,)\n"
        "assert classes[classes >= 0].tolist() == [0, 5, 1, 2], classes\n"
        "assert rows[classes >= 0][:, 0, 0].tolist() == [0, 10, 1, 2], rows\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    finish(start(*TORCHRUN, "check.py", cwd=workplace))


def test_two_processes_have_the_gradient_of_one(workplace):
    """The release's L_LAC, of 5 images by two processes, with DDP's mean, and of all 5 together; the queue is
    empty in the first step"""
    (workplace / "check.py").write_text(
        "import torch, torch.distributed as dist, torch.nn.functional as F, lac\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "rank, args = dist.get_rank(), lac.Args(form='release')\n"
        "torch.manual_seed(0)\n"
        "net, alone = torch.nn.Linear(6, 4).double(), torch.nn.Linear(6, 4).double()\n"
        "alone.load_state_dict(net.state_dict())\n"
        "both, queue, past = DistributedDataParallel(net), lac.Queue(64, 2, 4).double(), []\n"
        "for step in range(3):\n"
        "    x, chosen = torch.randn(2, 5, 3, 6).double(), torch.rand(5, 3) < 0.6  # two views, 5 images, 3 classes\n"
        "    mine = slice(rank, None, 2)\n"
        "    weak, strong = F.normalize(both(x[:, mine]), dim=3)\n"
        "    loss = lac.compare(weak, strong, chosen[mine], queue, 9, args)\n"
        "    net.zero_grad()\n"
        "    loss.backward()\n"
        "    weak, strong = (view.flatten(0, 1)[chosen.flatten()] for view in F.normalize(alone(x), dim=3))\n"
        "    classes = torch.arange(3).repeat(5)[chosen.flatten()]\n"
        "    old = [torch.stack(column) for column in zip(*past)] or [weak[:0], strong[:0], classes[:0]]\n"
        "    embed, kinds = torch.cat([weak, strong, *old[:2]]), torch.cat([classes, classes, old[2], old[2]])\n"
        "    whole = lac.lac_loss(embed, kinds, embed, kinds, args.tau, 'all', torch.arange(len(kinds)))\n"
        "    alone.zero_grad()\n"
        "    whole.backward()\n"
        "    torch.testing.assert_close(loss, whole)\n"
        "    torch.testing.assert_close(net.weight.grad, alone.weight.grad)\n"
        "    past += zip(weak.detach(), strong.detach(), classes)\n"
        "assert (queue.classes >= 0).sum() == len(past) > 20\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    finish(start(*TORCHRUN, "check.py", cwd=workplace))


def test_a_third_stage_is_refused(script, squares):
    flags = ("--dataset", squares, *SMALL, *SIZE, "--epochs", 1)
    script("lac.py", *flags, "--name", "both")
    with pytest.raises(SystemExit, match="error: --stage 2: runs/both has been through both stages"):
        script("lac.py", *flags, "--stage", 2, "--init_from", "runs/both")


def test_a_finished_run_is_measured_later(script, squares, workplace):
    script("lac.py", "--dataset", squares, *SMALL, *SIZE, "--epochs", 1)
    run = only_run(workplace)
    best = json.loads((run / "result.json").read_text())["val_mAP"]
    assert f"val mAP {best:.2f}" in script("lac.py", "--eval_only", run)


@pytest.mark.parametrize(
    "words",
    [
        ("--linear",),
        ("--delta", 0.6, 1.1),
        ("--delta", 0.4, 0.9),
        ("--end_to_end", "--no_lac"),
        ("--end_to_end", "--stage", 1),
        ("--denominator", "all"),
        ("--loss", "wan", "--form", "paper"),
        ("--loss", "wan", "--stage", 2, "--init_from", "x"),
        ("--tau", 0),
        ("--ema", 1),
        ("--queue", -1),
        ("--heads", 3),
        ("--heads", 0),
        ("--stage", 2),
        ("--freeze_backbone",),
        ("--backbone", "test_vit", "--image_size", 160),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_wrong_settings_give_one_sentence(words, script, squares, workplace):
    with pytest.raises(SystemExit, match=f"error: .*{words[0]}"):
        script("lac.py", "--dataset", squares, *SMALL, *SIZE, *words)
    assert not (workplace / "runs").exists()
