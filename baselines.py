"""The loss-only baselines and upper bounds of Zhou et al. 2022 (arXiv:2203.16219), Table 1

    python baselines.py --dataset voc --loss ls

Assume negative with other losses for the labels that were not observed.

NOTES: batch size and learning rate are EM's, as in an.py. L1R and L2R of Table 1 are `--l1` and `--l2` on top of any
loss. `bce_full` and `bce_1p_alln` use the full labels: upper bounds, not methods. Under torchrun `epr` takes its mean
over each process's share of a batch. docs/baselines.md has the rest.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

import common

# ---- 1. Settings

Loss = Literal["an", "wan", "dw", "ls", "n_ls", "entmin", "focal", "asl", "epr", "bce_full", "bce_1p_alln"]


@dataclass
class Args(common.Args):
    epochs: common.Count = 10  # number of epochs
    batch_size: common.Count = 8  # images per step, over all processes
    lr: common.Positive = 1e-5  # learning rate
    patience: common.NaturalOrMinus1 = -1  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    loss: Loss = "an"  # loss function
    dw_weight: common.NonNegative = 0.1  # dw: weight of the assumed negatives
    n_ls_target: common.Share = 0.3  # n_ls: target of the assumed negatives
    entmin_weight: common.NonNegative = 0.01  # entmin: weight of the entropy
    asl_gamma: common.NonNegative = 2.0  # asl: focusing exponent of the assumed negatives
    asl_margin: common.ShareBelow1 = 0.2  # asl: probability below which assumed negatives cost nothing
    epr_positives: common.NonNegative = 1.5  # epr: expected positives per image
    l1: common.NonNegative = 0.0  # weight of the L1 penalty (paper: voc 1e-6, coco and nus 1e-7, cub 1e-9)
    l2: common.NonNegative = 0.0  # weight of the L2 penalty (paper: voc and nus 1e-6, coco 1e-7, cub 1e-8)


PRESETS = {  # Zhou et al., supplement B.2; the defaults are VOC's
    "coco": dict(batch_size=16, n_ls_target=0.1, entmin_weight=0.9, epr_positives=2.9),
    "nus": dict(batch_size=16, n_ls_target=0.1, entmin_weight=0.4, epr_positives=1.9),
    "cub": dict(lr=1e-4, dw_weight=0.02, n_ls_target=0.1, entmin_weight=0.4, asl_gamma=1.0, asl_margin=0.0)
    | dict(epr_positives=31.4),
    "--linear": dict(epochs=20, lr=1e-4),  # frozen features; chosen on validation
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none", epr_positives=2.5),
}

# ---- 2. Method


# same as in an.py: an_loss
def an_loss(logits, z):
    """Eq. 1 of Zhou et al.: mean over (B, C) of -log p where z = 1, -log(1 - p) elsewhere. -> loss, its parts"""
    logits = common.full_precision(logits)
    cost = -torch.where(z == 1, F.logsigmoid(logits), F.logsigmoid(-logits))
    return cost.mean(), dict(loss_positive=(cost * (z == 1)).mean(), loss_negative=(cost * (z != 1)).mean())


def baseline_loss(logits, z, y, args):
    """The loss of --loss: a cost of the observed positives and one of all other labels, mean over (B, C). -> loss, its
    parts"""
    logits = common.full_precision(logits)
    positive, other = -F.logsigmoid(logits), -F.logsigmoid(-logits)  # -log p, -log(1 - p)
    p = logits.sigmoid()
    match args.loss:
        case "an":
            return an_loss(logits, z)
        case "wan":  # each positive weighs as much as the C - 1 others together
            other = other / max(logits.shape[1] - 1, 1)
        case "dw":
            other = args.dw_weight * other
        case "ls":  # targets 0.9 and 0.1
            positive, other = 0.9 * positive + 0.1 * other, 0.1 * positive + 0.9 * other
        case "n_ls":
            other = args.n_ls_target * positive + (1 - args.n_ls_target) * other
        case "entmin":  # H(p), minimised
            other = args.entmin_weight * (p * positive + (1 - p) * other)
        case "focal":  # gamma 2, alpha 0.75
            positive, other = 0.75 * (1 - p) ** 2 * positive, 0.25 * p**2 * other
        case "asl":  # p shifted by the margin; log(1 - p) itself where there is none, which stays finite
            shifted = (p - args.asl_margin).clamp(min=0)
            other = shifted**args.asl_gamma * (-torch.log1p(-shifted) if args.asl_margin else other)
        case "epr":
            expected = p.sum(1).mean()
            other = ((expected - args.epr_positives) / logits.shape[1]) ** 2
            positive = (positive * (z == 1)).mean()
            return positive + other, dict(loss_positive=positive, loss_negative=other)
        case "bce_full":
            return an_loss(logits, y)
        case "bce_1p_alln":  # the positives that were not observed cost nothing
            other = other * (y == 0)
    cost = torch.where(z == 1, positive, other)
    return cost.mean(), dict(loss_positive=(cost * (z == 1)).mean(), loss_negative=(cost * (z != 1)).mean())


def penalty(model, l1, l2):
    """L1R and L2R: l1 sum |w| + l2 sum w^2 over the weights that are trained"""
    weights = [w for w in model.parameters() if w.requires_grad]
    return l1 * sum(w.abs().sum() for w in weights) + l2 * sum(w.square().sum() for w in weights)


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    if args.loss.startswith("bce") and data.train.y is None:
        common.die(f"--loss {args.loss} needs the full training labels, which {args.dataset} doesn't have")
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr, fused=True)

    for epoch in run.epochs(model=model, optimizer=optimizer):  # all of these are in last.pt
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            loss, parts = baseline_loss(logits, z, data.train.true(idx), args)
            if args.l1 or args.l2:
                parts["loss_penalty"] = penalty(model, args.l1, args.l2)
                loss = loss + parts["loss_penalty"]
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
        run.evaluate(model, data)
