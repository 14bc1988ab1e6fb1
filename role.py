"""ROLE: regularised online label estimation (Cole et al. 2021, arXiv:2106.09708)

    python role.py --dataset voc

Estimates of all training labels are trained together with the classifier: each side learns from the other's
probabilities, and both are held to the expected number of positives per image.

NOTES: the release searches lr 1e-2 to 1e-5 and batch sizes 8 and 16 on validation, has k 2.5 for COCO, and adds 1e-5
inside every logarithm. ROLE + LinearInit is two commands: `--linear --lr 1e-3 --theta_lr 10` (CUB: batch 8),
then `--init_from RUN`. Under torchrun the mean number of positives is that of each process's share of a batch.
docs/role.md has the rest.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import common

# ---- 1. Settings


@dataclass
class Args(common.Args):
    epochs: common.Count = 10  # number of epochs
    batch_size: common.Count = 8  # images per step, over all processes
    lr: common.Positive = 1e-5  # learning rate
    patience: common.NaturalOrMinus1 = -1  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    theta_lr: common.Positive = 10.0  # learning-rate multiplier of the label estimates
    positives: common.NonNegative = 0.0  # expected positives per image, k (0: the validation labels' mean)


PRESETS = {  # k: Cole et al.; batch size and learning rate as in an.py
    "voc": dict(positives=1.5),
    "coco": dict(batch_size=16, positives=2.9),
    "nus": dict(batch_size=16, positives=1.9),
    "cub": dict(lr=1e-4, positives=31.4),
    # frozen features; chosen on validation
    "--linear": dict(epochs=25, batch_size=16, lr=3e-4, theta_lr=200.0),
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none"),
}

# ---- 2. Method


def initial_estimates(z, seed):
    """Section 4.3: logits of the label estimates (N, C), uniform in +-logit(0.6); logit(0.995) where z = 1"""
    logit = lambda p: math.log(p / (1 - p))
    uniform = 2 * torch.rand(z.shape, generator=torch.Generator().manual_seed(seed)).to(z.device) - 1
    return torch.where(z == 1, logit(0.995), logit(0.6) * uniform)


def one_side(a, b, z, k):
    """L(a | b) = mean over (B, C) of -log a where z = 1 + mean over (B, C) of [-b log a - (1 - b) log(1 - a)]
    + ((mean_n sum_c a - k) / C)^2. a and b are logits; b takes no gradient. -> its three terms"""
    log_a, log_not_a, b = F.logsigmoid(a), F.logsigmoid(-a), b.detach().sigmoid()
    positive = -torch.where(z == 1, log_a, 0).mean()
    cross = -(b * log_a + (1 - b) * log_not_a).mean()
    return positive, cross, ((a.sigmoid().sum(1).mean() - k) / a.shape[1]) ** 2


def role_loss(logits, estimates, z, k):
    """Section 4.3: (L(p | q) + L(q | p)) / 2 with p = sigmoid(logits) of the classifier and q = sigmoid(estimates) of
    the same images, both (B, C); the first trains the classifier, the second the estimates. -> loss, its parts"""
    logits, estimates = common.full_precision(logits), common.full_precision(estimates)
    positive, cross, R = (term / 2 for term in one_side(logits, estimates, z, k))
    positive_q, cross_q, R_q = (term / 2 for term in one_side(estimates, logits, z, k))
    expected = lambda scores: scores.detach().sigmoid().sum(1).mean()
    parts = dict(loss_positive=positive, loss_cross=cross, loss_R=R)
    parts |= dict(loss_positive_estimates=positive_q, loss_cross_estimates=cross_q, loss_R_estimates=R_q)
    parts |= dict(expected_positives=expected(logits), expected_positives_estimates=expected(estimates))
    return positive + cross + R + positive_q + cross_q + R_q, parts


def hidden_mAP(theta, z, y):
    """mAP of the estimates among the training labels that were not observed"""
    return common.mean_average_precision(theta.masked_fill(z == 1, -torch.inf), y * (z == 0))


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    k = args.positives or data.positives_per_image()  # new vs an.py
    if not k:
        common.die("without validation labels ROLE needs the expected number of --positives per image")
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    # new vs an.py: estimates of all training labels, with --init_from those of that run, and their learning rate
    labels = SimpleNamespace(theta=initial_estimates(data.train.z, args.seed).requires_grad_())
    saved = common.read_state(common.start_from(args)).get("labels", {}) if args.init_from else {}
    common.restore_namespace("labels", labels, {name: saved[name] for name in saved if name == "theta"})
    groups = [dict(params=[w for w in model.parameters() if w.requires_grad])]
    groups += [dict(params=[labels.theta], lr=args.lr * args.theta_lr)]
    optimizer = torch.optim.Adam(groups, lr=args.lr, fused=True)

    for epoch in run.epochs(model=model, optimizer=optimizer, labels=labels):  # all of these are in last.pt
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            loss, parts = role_loss(logits, labels.theta[idx], z, k)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
        if data.train.y is not None:
            run.log(estimates_mAP=hidden_mAP(labels.theta.detach(), data.train.z, data.train.y))
        run.evaluate(model, data)
