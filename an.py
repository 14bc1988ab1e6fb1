"""AN: assume negative (Cole et al. 2021, arXiv:2106.09708)

    python an.py --dataset voc

Every label that was not observed counts as negative.

NOTES: batch size and learning rate are those of EM (Zhou et al. 2022, arXiv:2203.16219), whose authors grid-searched
each baseline and don't give the values found; all epochs are trained (theirs: `--patience 0`). docs/an.md has the rest.
"""

from dataclasses import dataclass

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


PRESETS = {  # the defaults are VOC's
    "coco": dict(batch_size=16),
    "nus": dict(batch_size=16),
    "cub": dict(lr=1e-4),
    "--linear": dict(epochs=20, lr=1e-4),  # frozen features; chosen on validation
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none"),
}

# ---- 2. Method


def an_loss(logits, z):
    """Eq. 1 of Zhou et al.: mean over (B, C) of -log p where z = 1, -log(1 - p) elsewhere. -> loss, its parts"""
    logits = common.full_precision(logits)
    cost = -torch.where(z == 1, F.logsigmoid(logits), F.logsigmoid(-logits))
    return cost.mean(), dict(loss_positive=(cost * (z == 1)).mean(), loss_negative=(cost * (z != 1)).mean())


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr, fused=True)

    for epoch in run.epochs(model=model, optimizer=optimizer):  # all of these are in last.pt
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            loss, parts = an_loss(logits, z)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
        run.evaluate(model, data)
