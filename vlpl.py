"""VLPL: vision-language pseudo-labels (Xing et al. 2024, arXiv:2310.15985)

    python vlpl.py --dataset voc --tau 0.03 --theta 0.3

Unobserved classes that CLIP is sure of become soft positives; the others are pushed towards uncertainty.

NOTES: CLIP embeds every plain image once, with its own mean and std (authors' release: in every batch, on flipped
images with ImageNet's mean and std, with bare class names as text for VOC and COCO, and with tau 0.01 and theta 0.3 for
all sets). For CUB the paper has lr 1e-5, the release 1e-4 for ResNet-50, taken here. Eq. 5's signs are misprinted;
section 4.6 has the form used here. gamma, which only `--delta` uses, is beta's value (paper: not printed, release: 0).
Class names are read as words; CUB's theta was tuned on other strings. Table 2's backbones: `--backbone
convnext_xlarge.fb_in22k_ft_in1k`, `--backbone convnext_xlarge.fb_in22k` and, with CLIP's projection before the head,
`--backbone vit_large_patch14_clip_quickgelu_336.openai --image_size 336 --batch_size 6`. docs/vlpl.md has the rest.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
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
    clip_model: str = "ViT-L-14-336"  # CLIP: a name of open_clip, local-dir:FOLDER, hf-hub:NAME, or scenes
    clip_pretrained: str = "openai"  # open_clip weights: tag or file (OpenAI's file: with --clip_model NAME-quickgelu)
    prompt: str = "A photo of {}"  # text for CLIP; {} is the class
    tau: common.Positive = 0.03  # temperature of CLIP's softmax
    theta: common.Share = 0.3  # probability above which a class becomes a pseudo-positive
    delta: common.Share = 0.0  # share of an image's classes, the lowest, that become pseudo-negatives
    alpha: common.NonNegative = 0.2  # weight of the entropy
    beta: common.NonNegative = 0.7  # weight of the pseudo-positives
    gamma: common.NonNegative = 0.7  # weight of the pseudo-negatives
    rho: common.Share = 0.9  # target of the pseudo-labels (1: no label smoothing)


PRESETS = {  # tau and theta: Xing et al., section 4.7; alpha and lr: the authors' release; the defaults are VOC's
    "coco": dict(tau=0.01, alpha=0.1),
    "nus": dict(theta=0.1, alpha=0.1),
    "cub": dict(lr=1e-4, theta=0.01, alpha=0.01),
    "--linear": dict(epochs=20, lr=1e-4),  # frozen features; chosen on validation
    # your own images without a GPU: small enough for it
    "--device cpu": dict(linear=True, backbone="tf_efficientnet_lite0", image_size=224, clip_model="ViT-B-32"),
    # made here; chosen on its validation set
    "scenes": dict(epochs=24, lr=1e-3, image_size=64, backbone="resnet_small", weights="none")
    | dict(clip_model="scenes"),
}

# ---- 2. Method


def clip_cosines(clip, data, texts, cache):
    """Cosines of the images of every split with the classes' texts -> {split: (N, C)}"""
    text = clip.embed_texts(texts, cache)  # (C, D)
    text = text / np.linalg.norm(text, axis=1, keepdims=True)
    images = {name: clip.embed_images(split, name, cache) for name, split in data.splits().items()}  # (N, D) each
    return {name: torch.from_numpy(image @ text.T).to(data.train.z.device) for name, image in images.items()}


def clip_scores(cosine, tau):
    """Eq. 1: q = softmax(cosine / tau) over the classes"""
    return (cosine / tau).softmax(1)


def vlpl_pseudo_labels(cosine, z, tau, theta, delta=0.0):
    """Algorithm 1: 1 where q > theta; -1 for the int(delta * C) lowest of an image that are neither 1 nor observed;
    0 = unknown, and where z = 1. -> (B, C) int8"""
    q = clip_scores(cosine, tau)
    pseudo = (q > theta).to(torch.int8)
    if lowest := int(delta * q.shape[1]):
        place = cosine.argsort(dim=1, stable=True).argsort(dim=1)  # cosine sorts as q does, which may underflow
        pseudo[(place < lowest) & (pseudo == 0)] = -1
    return pseudo.masked_fill(z == 1, 0)


def zero_shot_mAP(cosines, splits, tau):
    """mAP of CLIP alone, by Eq. 1's scores -> {split: mAP} of the splits with full labels"""
    scores = lambda name: (cosines[name].double() / tau).log_softmax(1)  # log: no ties at 1
    known = {name: split.y for name, split in splits.items() if split.y is not None}
    return {name: common.mean_average_precision(scores(name), y) for name, y in known.items()}


# same as in em_apl.py: entropy
def entropy(logits):
    """H(p) = -p log p - (1 - p) log(1 - p)"""
    p = logits.sigmoid()
    return -p * F.logsigmoid(logits) - (1 - p) * F.logsigmoid(-logits)


def vlpl_loss(logits, z, pseudo, alpha, beta, gamma=0.0, rho=0.9):
    """Eq. 4: mean over (B, C) of -log p where z = 1, beta * [-rho log p - (1 - rho) log(1 - p)] where pseudo = 1,
    gamma * [-rho log(1 - p) - (1 - rho) log p] where pseudo = -1, -alpha H(p) elsewhere. Without -1 it is Eq. 6.
    -> loss, its parts"""
    logits = common.full_precision(logits)
    log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
    kind = torch.where(z == 1, 2, pseudo)
    positive = torch.where(kind == 2, -log_p, 0).mean()
    unknown = torch.where(kind == 0, -alpha * entropy(logits), 0).mean()
    pseudo_positive = torch.where(kind == 1, -beta * (rho * log_p + (1 - rho) * log_not_p), 0).mean()
    pseudo_negative = torch.where(kind == -1, -gamma * (rho * log_not_p + (1 - rho) * log_p), 0).mean()
    parts = dict(loss_positive=positive, loss_unknown=unknown)
    parts |= dict(loss_pseudo_positive=pseudo_positive, loss_pseudo_negative=pseudo_negative)
    return positive + unknown + pseudo_positive + pseudo_negative, parts


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    texts = common.prompts(args.prompt, data.classes)  # new vs an.py
    clip = None if args.eval_only else common.Clip(args, run.device)
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr, fused=True)

    labels = SimpleNamespace(pseudo=torch.zeros_like(data.train.z, dtype=torch.int8))  # new vs an.py
    if clip:  # it is frozen, so the pseudo-labels are computed once
        cosines = clip_cosines(clip, data, texts, run.cache)
        choose = lambda cosine, z: vlpl_pseudo_labels(cosine, z, args.tau, args.theta, args.delta)
        labels.pseudo = choose(cosines["train"], data.train.z)
        common.judge_clip(run, data, cosines.get, choose)
        common.warn_of_few(labels.pseudo, "lower --theta, or try another --prompt or --tau")
        if zero_shot := zero_shot_mAP(cosines, data.splits(), args.tau):
            run.summarise("clip_zero_shot_mAP", zero_shot)
        del clip  # its memory is the model's now

    for epoch in run.epochs(model=model, optimizer=optimizer, labels=labels):  # all of these are in last.pt
        for x, z, idx in run.batches(data.train, flip=True):  # x (B, 3, H, W) in 0..1, z (B, C) observed, idx (B,) rows
            with run.autocast():
                logits = model(x)  # (B, C)
            loss, parts = vlpl_loss(logits, z, labels.pseudo[idx], args.alpha, args.beta, args.gamma, args.rho)
            run.backward(loss)
            run.step(optimizer)
            run.log(loss=loss, **parts)
        run.log_pseudo_labels(labels.pseudo, data.train.z, data.train.y)
        run.evaluate(model, data)
