"""LL: large loss matters (Kim et al. 2022, arXiv:2206.03740), LL-R, LL-Ct and LL-Cp

    python ll.py --dataset voc --form r

Assume negative; but the largest losses among the labels that were not observed, a few more in every epoch, are likely
false negatives: they are rejected (r), count as positives for this step (ct) or from now on (cp).

NOTES: as in the authors' release, LL-Cp flips for good what is strictly above the last of the modified labels: with one
label a step (settings of VOC and scenes) nothing is flipped for good. With torchvision's IMAGENET1K_V1 weights users
report 87.8 to 88 on VOC; 89.1 came with V2. Under torchrun the largest losses are those of each process's share of a
batch. docs/ll.md has the rest.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F

import common

# ---- 1. Settings

Percents = tuple[common.NonNegative, common.NonNegative, common.NonNegative]


@dataclass
class Args(common.Args):
    epochs: common.Count = 10  # number of epochs
    batch_size: common.Count = 16  # images per step, over all processes
    lr: common.Positive = 1e-5  # learning rate
    patience: common.NaturalOrMinus1 = -1  # early stopping: epochs without improvement to tolerate (-1: off)
    image_size: common.Count = 448  # side in pixels of the square that images are squashed to
    backbone: str = "resnet50"  # backbone: a ResNet of torchvision, resnet_small, or a name of timm
    weights: str = "imagenet"  # initial weights of the backbone: imagenet, none, or a .pth, .pt or .safetensors file
    head_lr: common.Positive = 10.0  # learning-rate multiplier of the head
    sgd: bool = False  # SGD with momentum 0.9 and weight decay 0.001 instead of Adam
    max_drop: common.NonNegative = 3.0  # early stopping: tolerated drop of validation mAP below its best
    form: Literal["r", "ct", "cp"] = "r"  # large losses are rejected (r), positives for a step (ct) or for good (cp)
    delta_rel: Percents = (0.4, 0.2, 0.2)  # percent of labels to modify: r and ct, growth per epoch; cp, constant


PRESETS = {  # the authors' release; the defaults are those of COCO and NUS
    "voc": dict(lr=5e-3, sgd=True, delta_rel=(0.2, 0.2, 0.1)),
    "cub": dict(lr=7.5e-5, delta_rel=(0.4, 0.4, 0.2)),
    # frozen features; chosen on validation
    "--linear": dict(epochs=20, batch_size=8, lr=1e-4, sgd=False, head_lr=1.0, delta_rel=(0.2, 0.05, 0.1)),
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none")
    | dict(batch_size=8, head_lr=1.0, max_drop=100.0, delta_rel=(0.4, 0.2, 0.1)),
}

# ---- 2. Method


def label_losses(logits, z):
    """AN's loss of every label: -log p where z = 1, -log(1 - p) elsewhere -> (B, C)"""
    logits = common.full_precision(logits)
    return -torch.where(z == 1, F.logsigmoid(logits), F.logsigmoid(-logits))


def large_losses(logits, z, count, strictly=False):
    """The unobserved labels whose loss is at least (strictly: above) the count-th largest among them -> (B, C) bool"""
    losses = label_losses(logits.detach(), z).masked_fill(z == 1, -torch.inf)
    if count == 0:
        return torch.zeros_like(losses, dtype=torch.bool)
    bound = losses.flatten().topk(min(count, losses.numel())).values[-1]
    return ((losses > bound) if strictly else (losses >= bound)) & (z != 1)


def ll_loss(logits, z, count, form="r"):
    """Mean over (B, C) of AN's losses, but of the count largest among the unobserved labels (large_losses): 0 in LL-R
    ("r"), -log p in LL-Ct and LL-Cp ("ct", "cp"). count = 0 is AN. -> loss, its parts"""
    large = large_losses(logits, z, count)
    if form == "r":
        cost = label_losses(logits, z).masked_fill(large, 0)
    else:
        cost = label_losses(logits, torch.where(large, 1, z))
    return cost.mean(), dict(loss_positive=(cost * (z == 1)).mean(), loss_negative=(cost * (z != 1)).mean())


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    # new vs an.py: the head has a learning rate of its own, as in aevlp.py
    head = list(common.unwrap(model).head.parameters())
    body = [w for w in common.unwrap(model).body.parameters() if w.requires_grad]
    groups = [dict(params=body), dict(params=head, lr=args.lr * args.head_lr)]
    groups = [group for group in groups if group["params"]]
    kind, more = (torch.optim.SGD, dict(momentum=0.9, weight_decay=0.001)) if args.sgd else (torch.optim.Adam, {})
    optimizer = kind(groups, lr=args.lr, fused=True, **more)
    for w in (w for group in groups for w in group["params"] if args.sgd):
        optimizer.state[w]["momentum_buffer"] = torch.zeros_like(w)  # not set by torch if fp16 skips the first step

    # new vs an.py: in LL-Cp, 1 for the labels that are positives for good
    labels = SimpleNamespace(pseudo=torch.zeros_like(data.train.z))
    delta_rel = dict(zip(("r", "ct", "cp"), args.delta_rel))[args.form] / 100

    for epoch in run.epochs(model=model, optimizer=optimizer, labels=labels):  # all of these are in last.pt
        share = delta_rel * (min(epoch - 1, 1) if args.form == "cp" else epoch - 1)
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            z_now, count = z | labels.pseudo[idx], math.ceil(round(z.numel() * share, 9))  # new vs an.py
            loss, parts = ll_loss(logits, z_now, count, args.form)
            if args.form == "cp":
                labels.pseudo[idx] |= large_losses(logits, z_now, count, strictly=True)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
            modified = large_losses(logits, z_now, count) | (z_now == 1)
            run.log_pseudo_labels(modified.char(), z, data.train.true(idx))
        if common.world() > 1:  # what each process found on its share of the images
            dist.all_reduce(labels.pseudo, dist.ReduceOp.MAX)
        run.evaluate(model, data, max_drop=args.max_drop)
