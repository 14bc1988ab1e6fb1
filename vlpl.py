"""VLPL: vision-language pseudo-labels (Xing et al. 2024, arXiv:2310.15985)

    python vlpl.py --dataset voc --tau 0.03 --theta 0.3

Unobserved classes that CLIP is sure of become soft positives; the others are pushed towards uncertainty.

NOTES: CLIP embeds every plain image once, with its own mean and std (authors' release: in every batch and in
evaluation, on flipped images with ImageNet's mean and std, with bare class names as text for VOC and COCO, and with tau
0.01 and theta 0.3 for all sets). For CUB the paper says lr 1e-5; the release and we take 1e-4. Eq. 5's signs are
misprinted; section 4.6 has the form used here. alpha and beta are the release's; nobody says what gamma is, which only
`--delta` uses. Class names are read as words: pottedplant as potted plant, CUB's attributes as "bird whose bill shape
is hooked". `clip_zero_shot_mAP` ranks by Eq. 1's scores, so it depends a little on tau. The paper's other backbones:
`--backbone convnext_xlarge.fb_in22k`, `convnext_xlarge.fb_in22k_ft_in1k`, `vit_large_patch14_clip_336.openai`.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import common

# ---- 1. Settings


@dataclass
class Args(common.Args):
    epochs: int = 10
    batch_size: int = 8  # over all processes
    lr: float = 1e-5
    patience: int = -1  # stop after more than so many epochs without a better validation mAP (-1: never)
    image_size: int = 448  # images are squashed to a square of this side
    backbone: str = "resnet50"  # a ResNet of torchvision, resnet_small, or any name of timm
    weights: str = "imagenet"  # imagenet, none, or a .pth or .safetensors file
    clip_model: str = "ViT-L-14-336"  # a name of open_clip, local-dir:FOLDER, hf-hub:NAME, or scenes
    clip_pretrained: str = "openai"  # with a name of open_clip: a tag, or a file (OpenAI's: NAME-quickgelu)
    prompt: str = "A photo of {}"  # what CLIP reads; {} is the class
    tau: float = 0.03  # temperature of CLIP's softmax
    theta: float = 0.3  # classes above this probability become pseudo-positives
    delta: float = 0.0  # share of the classes, lowest first, that become pseudo-negatives
    alpha: float = 0.2  # weight of the entropy
    beta: float = 0.7  # weight of the pseudo-positives
    gamma: float = 0.7  # weight of the pseudo-negatives
    rho: float = 0.9  # how sure pseudo-labels count as (1: no label smoothing)
    show_pseudo: int = 0  # write pseudo.png: so many training images with what CLIP says of them


PRESETS = {  # tau and theta: Xing et al., section 4.7; alpha and lr: the authors' release; the defaults are VOC's
    "coco": dict(tau=0.01, alpha=0.1),
    "nus": dict(theta=0.1, alpha=0.1),
    "cub": dict(lr=1e-4, theta=0.01, alpha=0.01),
    # made here; chosen on its validation set
    "scenes": dict(epochs=15, lr=1e-3, image_size=64, backbone="resnet_small", weights="none", clip_model="scenes"),
}

# ---- 2. Method


def vlpl_pseudo_labels(cosine, z, tau, theta, delta=0.0):
    """Algorithm 1: q = softmax(cosine / tau) over the classes (Eq. 1); 1 where q > theta; -1 for the int(delta * C)
    lowest of an image that are neither 1 nor observed; 0 = unknown, and where z = 1. -> (B, C) int8"""
    q = (cosine / tau).softmax(1)
    pseudo = (q > theta).to(torch.int8)
    if lowest := int(delta * q.shape[1]):
        place = cosine.argsort(dim=1, stable=True).argsort(dim=1)  # cosine sorts as q does, which may underflow
        pseudo[(place < lowest) & (pseudo == 0)] = -1
    return pseudo.masked_fill(z == 1, 0)


# same as in em_apl.py: entropy
def entropy(logits):
    """H(p) = -p log p - (1 - p) log(1 - p)"""
    p = logits.sigmoid()
    return -p * F.logsigmoid(logits) - (1 - p) * F.logsigmoid(-logits)


def vlpl_terms(logits, z, pseudo, alpha, beta, gamma, rho):
    """The four parts of Eq. 4, each a mean over (B, C)"""
    log_p, log_not_p = F.logsigmoid(logits), F.logsigmoid(-logits)
    kind = torch.where(z == 1, 2, pseudo)
    positive = torch.where(kind == 2, -log_p, 0)
    unknown = torch.where(kind == 0, -alpha * entropy(logits), 0)
    pseudo_positive = torch.where(kind == 1, -beta * (rho * log_p + (1 - rho) * log_not_p), 0)
    pseudo_negative = torch.where(kind == -1, -gamma * (rho * log_not_p + (1 - rho) * log_p), 0)
    return positive.mean(), unknown.mean(), pseudo_positive.mean(), pseudo_negative.mean()


def vlpl_loss(logits, z, pseudo, alpha, beta, gamma=0.0, rho=0.9):
    """Eq. 4: mean over (B, C) of -log p where z = 1, beta * [-rho log p - (1 - rho) log(1 - p)] where pseudo = 1,
    gamma * [-rho log(1 - p) - (1 - rho) log p] where pseudo = -1, -alpha H(p) elsewhere. Without -1 it is Eq. 6"""
    return sum(vlpl_terms(logits, z, pseudo, alpha, beta, gamma, rho))


def quality(chosen, right, hidden):
    """Pseudo-labels against the truth, in percent: precision, and recall among the labels that were not observed"""
    hits = (chosen & right).sum()
    return 100 * hits / chosen.sum(), 100 * hits / (right & hidden).sum()


def draw_pseudo(path, data, cosine, pseudo, tau, n):
    """A picture of n training images, evenly spaced: the observed label, CLIP's highest scores, what became of them"""
    plt = common.pyplot()
    split, wide = data.train, min(n, 4)
    rows = np.linspace(0, len(split) - 1, min(n, len(split))).astype(int)
    high = -(-len(rows) // wide)
    figure, axes = plt.subplots(high, 2 * wide, figsize=(4.4 * wide, 2.2 * high), squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for row, (picture, bars) in zip(rows, axes.reshape(-1, 2)):
        pixels = split.images[split.rows[[row]]]
        if isinstance(pixels, str):
            common.die(pixels)
        q = (cosine[row] / tau).softmax(0)
        observed = [data.classes[c] for c in split.z[row].nonzero().flatten()]
        picture.imshow(pixels[0].numpy())
        picture.set_title(f"observed: {', '.join(observed) or 'nothing'}", fontsize=8)
        accepted = (pseudo[row] == 1).sum().item()
        for place, c in enumerate(q.argsort(descending=True)[: max(5, min(accepted + 1, 10))].tolist()):
            truth = None if split.y is None else bool(split.y[row, c])
            judged = {True: "right", False: "wrong", None: "accepted"}[truth]
            missed = " (there, not accepted)" if truth else ""
            verdict = " (observed)" if split.z[row, c] else f" ({judged})" if pseudo[row, c] == 1 else missed
            colour = "lightskyblue" if split.z[row, c] else "lightgrey"
            if pseudo[row, c] == 1:
                colour = {True: "lightgreen", False: "salmon", None: "gold"}[truth]
            bars.barh(place, q[c].item(), color=colour)
            bars.text(0, place, f" {data.classes[c]} {q[c]:.2f}{verdict}", va="center", fontsize=7)
        bars.set(xlim=(0, 1), ylim=(place + 0.6, -0.6))
    with common.replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    plt.close(figure)


# ---- 3. Train

if __name__ == "__main__":
    args = common.parse(Args, PRESETS)
    if not (args.tau > 0 and 0 <= args.theta <= 1 and 0 <= args.delta <= 1 and 0 <= args.rho <= 1):
        common.die("--tau must be above 0; --theta, --delta and --rho are between 0 and 1")
    if not 0 <= args.show_pseudo <= 200:
        common.die(f"--show_pseudo {args.show_pseudo}: a picture holds up to 200 images")
    run = common.Run(args, __file__)
    data = common.load(args, run.device)
    texts = common.prompts(args.prompt, data.classes)  # new vs an.py
    clip = None if args.eval_only and not args.show_pseudo else common.Clip(args, run.device)  # new vs an.py
    model = run.prepare(common.Classifier(args, len(data.classes)), data)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=args.lr)

    if clip:  # new vs an.py: CLIP is frozen, so its scores and the pseudo-labels are computed once
        text = run.embed_texts(clip, texts)  # (C, D)
        text = text / np.linalg.norm(text, axis=1, keepdims=True)
        images = {name: run.embed_images(clip, split, name) for name, split in data.splits().items()}  # (N, D) each
        cosine = {name: torch.from_numpy(image @ text.T).to(run.device) for name, image in images.items()}  # (N, C)
        del clip  # its memory is the model's now
        pseudo_all = vlpl_pseudo_labels(cosine["train"], data.train.z, args.tau, args.theta, args.delta)
        known = {name: split.y for name, split in data.splits().items() if split.y is not None}
        scores = {name: (cosine[name].double() / args.tau).log_softmax(1) for name in known}  # Eq. 1; no ties at 1
        zero_shot = {name: common.mean_average_precision(scores[name], known[name]) for name in known}
        if known:
            run.fact("clip_zero_shot_mAP", zero_shot)
        if args.show_pseudo and common.rank() == 0:
            draw_pseudo(run.directory / "pseudo.png", data, cosine["train"], pseudo_all, args.tau, args.show_pseudo)

    for epoch in run.epochs(model=model, optimizer=optimizer):
        for x, z, idx in run.batches(data.train):
            with run.autocast():
                logits = model(x)
            terms = vlpl_terms(logits.float(), z, pseudo_all[idx], args.alpha, args.beta, args.gamma, args.rho)
            positive, unknown, pseudo_positive, pseudo_negative = terms
            loss = sum(terms)
            run.step(loss, optimizer)
            run.log(loss=loss, loss_positive=positive, loss_unknown=unknown, loss_pseudo=pseudo_positive)
            if args.delta:
                run.log(loss_pseudo_negative=pseudo_negative)
        chosen, hidden = pseudo_all == 1, data.train.z == 0
        run.log(positives_per_image=chosen.sum() / len(chosen))
        if data.train.y is not None:
            precision, recall = quality(chosen, data.train.y == 1, hidden)
            run.log(pseudo_precision=precision, pseudo_recall=recall)
            if args.delta:
                run.log(pseudo_negatives_correct=quality(pseudo_all == -1, data.train.y == 0, hidden)[0])
        run.evaluate(model, data)
